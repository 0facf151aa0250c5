//! The cases of every unit.

use super::*;
use crate::suite::{
    Breakage, Change, Costs, FlushRow, QueueRig, Rig, SECOND, Stuck, TLB, every_queue,
};

#[derive(Clone, Copy)]
struct Variant {
    mode: Mode,
    cap: u64,
    ecap: u64,
    pasid_bits: u32,
}

impl Variant {
    const fn caching(&self) -> bool {
        self.cap & CACHING_MODE != 0
    }

    /// Pages, or everything, of a domain.
    fn in_unit(&self, domain: DomainId, pasid: u32, pages: Option<(u64, u32, bool)>) -> Received {
        let (granularity, domain) = (if pages.is_some() { 3 } else { 2 }, domain.0 as u16);
        match self.mode {
            Mode::Legacy | Mode::ScalableSecond => Received::Iotlb(granularity, domain, pages),
            Mode::ScalableFirst => Received::PasidIotlb(granularity, domain, pasid, pages),
        }
    }

    fn unit(&self, memory: Arc<HeapTables>) -> Result<(Driver, Model), crate::UnitSetupError> {
        let model = Model::new(memory.clone(), self.cap, self.ecap);
        Ok((Driver::new(model.clone(), memory, self.config())?, model))
    }
}

every_queue!(Variant);

impl Rig for Variant {
    type Kind = unit::Hardware;
    type Model = Model;
    type Memory = Arc<HeapTables>;
    type Received = Received;

    const DEVICE: DeviceId = DEVICE;
    const DOMAIN: DomainId = DOMAIN;

    fn variants() -> Vec<Self> {
        let served = DEVICE_TLBS | PASIDS;
        [
            (Mode::Legacy, 0, 0, 0),
            (Mode::Legacy, CACHING_MODE, DEVICE_TLBS, 0),
            (Mode::ScalableSecond, CACHING_MODE, PASIDS, 10),
            (Mode::ScalableFirst, 0, 0, 0),
            (Mode::ScalableSecond, 0, served, 10),
            (Mode::ScalableFirst, 0, served, 10),
        ]
        .map(|(mode, cap, ecap, pasid_bits)| Self {
            mode,
            cap: CAP | cap,
            ecap: ECAP | SCALABLE_BOTH | ecap,
            pasid_bits,
        })
        .into()
    }

    fn unit(&self) -> (Driver, Model) {
        self.unit(memory()).unwrap()
    }

    fn root(&self) -> Root {
        let format = match self.mode {
            Mode::ScalableFirst => FormatId::X86_64,
            _ => FormatId::VtdSs,
        };
        Root {
            format,
            ..root(0x10_0000, 4)
        }
    }

    fn received(model: &Model) -> Vec<Received> {
        received(model)
    }

    fn found(&self, model: &Model, device: DeviceId, pasid: Option<Pasid>) -> Option<(u32, Root)> {
        let pasid = pasid.map(|pasid| pasid.0.into());
        let (domain, address, levels, first) = model.look_up_pasid(device.0 as u16, pasid)?;
        let found = root(address, levels as u8);
        let format = if first {
            FormatId::X86_64
        } else {
            found.format
        };
        Some((domain.into(), Root { format, ..found }))
    }

    fn slow(&self, model: &Model, rounds: u32) {
        model.state().latency = rounds;
    }

    fn break_down(&self, model: &Model, how: Breakage) {
        let broken = &mut model.state().broken;
        broken.mute = how == Breakage::Mute;
        broken.deaf = how == Breakage::Deaf;
        broken.stuck = if how == Breakage::Stuck { 1 << 31 } else { 0 };
    }

    fn awaited(&self) -> &'static str {
        "the status of an invalidation wait"
    }

    fn stuck(&self) -> Vec<Stuck<Self>> {
        let all = Self {
            cap: self.cap | WRITE_BUFFERS | PROTECTED_MEMORY,
            ..*self
        };
        let row = |bit: u32, awaited| -> Stuck<Self> {
            let stick = move |model: &Model, on: bool| {
                let broken = &mut model.state().broken;
                broken.stuck = if on { bit } else { 0 };
                broken.protects = on && bit == 0;
            };
            (Rig::unit(&all), Box::new(stick), awaited)
        };
        vec![
            row(1 << 26, [Some("GSTS.QIES = 1"), Some("GSTS.QIES = 0")]),
            row(1 << 27, [Some("GSTS.WBFS = 0"), None]),
            row(1 << 30, [Some("GSTS.RTPS = 1"), None]),
            row(1 << 31, [Some("GSTS.TES = 1"), Some("GSTS.TES = 0")]),
            row(0, [Some("PMEN.PRS = 0"), None]),
        ]
    }

    fn refused(&self) -> Vec<(DeviceId, DomainId, Root, UnitAttachError)> {
        let (device, domain) = (DeviceId(1 << 16 | DEVICE.0), DomainId(0));
        let elsewhere = UnitAttachError::Elsewhere { device, segment: 0 };
        let reserved = UnitAttachError::ReservedDomain { domain };
        let all = [
            (device, DOMAIN, self.root(), elsewhere),
            (SECOND, domain, self.root(), reserved),
        ];
        all[..if self.caching() { 2 } else { 1 }].into()
    }

    fn reserved(&self) -> &'static [(u64, u64)] {
        &[(0xfee0_0000, 0xfeef_ffff)]
    }

    fn fault(&self, model: &Model, page: u64) {
        model.fault(SOURCE, page << 12, true, 6);
    }

    fn log(&self) -> u64 {
        2
    }

    /// Leaves only is said, unless a table may stand where the unit remembers none.
    fn flushes(&self, _: Root) -> Vec<FlushRow<Self>> {
        let row = |start: u64, pages: u64, levels, unlinked: bool, mask| {
            let named = Some((start, mask, !unlinked && !self.caching()));
            let received = vec![self.in_unit(DOMAIN, 0, named), Received::Wait(0)];
            (Span::new(start, pages << 12), levels, unlinked, received)
        };
        vec![
            row(0x3000, 1, 1, false, 0),
            row(0x3000, 1, 1, true, 0),
            row(0x8000, 8, 1, false, 3),
            row(0xffff_8000_0020_0000, 512, 2, false, 9),
        ]
    }

    fn whole(&self, _: Root, domain: DomainId) -> Vec<Received> {
        vec![self.in_unit(domain, 0, None), Received::Wait(0)]
    }

    fn knows_members(&self) -> bool {
        false
    }

    fn costs(&self) -> Vec<Costs<Self>> {
        let row = |cap: u64, costs| (Self { cap, ..*self }, self.root().format, 4, false, costs);
        let mask = |mask: u64| CAP & !(0x3f << 48) | mask << 48;
        let mut all = vec![row(self.cap, [1, 1, 1, 1, 2, 16, 32, 1, 1])];
        if self.cap == CAP {
            all.extend([
                row(mask(9), [1, 1, 1, 2, 2, 1, 32, 1, 1]),
                row(mask(0), [1, 8, 32, 1, 1, 1, 32, 1, 1]),
                row(CAP & !PAGE_SELECTIVE, [1; 9]),
            ]);
        }
        all
    }

    fn reaches(
        &self,
        _: &Model,
        received: &[Received],
        (_, domain): (DeviceId, DomainId),
        iova: u64,
    ) -> bool {
        let names = |received: &Received| match *received {
            Received::Iotlb(_, of, pages) | Received::PasidIotlb(_, of, 0, pages) => {
                let named = pages.is_none_or(|(first, mask, _)| (first ^ iova) >> (12 + mask) == 0);
                u32::from(of) == domain.0 && named
            }
            _ => false,
        };
        !received.iter().any(names)
    }
}

impl QueueRig for Variant {
    fn config(&self) -> Config {
        Config {
            mode: self.mode,
            pasid_bits: self.pasid_bits,
            ..Config::default()
        }
    }

    fn room(&self) -> u32 {
        if self.mode == Mode::Legacy { 255 } else { 127 }
    }

    fn other_roots(&self) -> Vec<Root> {
        match self.mode {
            Mode::ScalableFirst => vec![self.other_root()],
            _ => vec![root(0x1234_5000, 3), root(0x6000, 4)],
        }
    }

    /// Context table, directory, and one PASID table or two.
    fn pasid_tables(&self) -> Vec<(Self, u64)> {
        let all = match self.pasid_bits {
            0 => Vec::new(),
            _ => vec![(1, 3), (13, 4), (15, 4), (16, 5), (20, 35)],
        };
        let row = |(pasid_bits, pages)| {
            (
                Self {
                    pasid_bits,
                    ..*self
                },
                pages,
            )
        };
        all.into_iter().map(row).collect()
    }

    /// In caching mode: that it was not there.
    fn attaching(&self, (domain, pasid): (DomainId, Option<Pasid>), _: bool) -> Vec<Received> {
        if !self.caching() {
            return Vec::new();
        }
        let mut all = vec![Received::Contexts(3, 0, SOURCE)];
        if self.mode != Mode::Legacy {
            all.push(Received::Pasids(3, 0, 0));
        }
        let pasid = pasid.map_or(0, |pasid| pasid.0);
        all.extend([self.in_unit(domain, pasid, None), Received::Wait(0)]);
        all
    }

    fn detaching(
        &self,
        _: Root,
        (domain, pasid): (DomainId, Option<Pasid>),
        _: bool,
    ) -> Vec<Received> {
        let (number, pasid) = (domain.0 as u16, pasid.map_or(0, |pasid| pasid.0));
        let entry = match self.mode {
            Mode::Legacy => Received::Contexts(3, number, SOURCE),
            _ => Received::Pasids(1, number, pasid),
        };
        vec![entry, self.in_unit(domain, pasid, None), Received::Wait(0)]
    }

    fn serves_tlb(&self, model: &Model, device: DeviceId) -> bool {
        let source = device.0 as u16;
        model.look_up(source).is_some() && model.serves_tlb(source)
    }

    fn barrier(&self) -> Option<Received> {
        None
    }

    fn in_device(&self, pasid: Option<Pasid>, address: u64, mask: u32) -> Received {
        let pasid = pasid.map_or(0, |pasid| pasid.0);
        Received::Device(SOURCE, pasid, TLB.queue_depth, address, mask)
    }

    /// A scalable context entry is there, and changes.
    fn switching(&self) -> Vec<Received> {
        let changed = vec![Received::Contexts(3, 0, SOURCE), Received::Wait(0)];
        if self.mode == Mode::Legacy {
            Vec::new()
        } else {
            changed
        }
    }

    fn stops(&self) -> Vec<(u32, &'static str)> {
        vec![(4, "IQE"), (5, "ICE"), (6, "ITE")]
    }

    fn stop(&self, model: &Model, at: Option<(u32, u32)>) -> u32 {
        let state = &mut *model.state();
        let first = state.fetched;
        state.broken.stops = at.map(|(bit, at)| (1 << bit, first + at));
        first + at.map_or(0, |(_, at)| at)
    }

    fn is_wait(&self, word: u64) -> bool {
        assert!(matches!(word & 0xf, 2 | 5 | 6));
        word & 0xf == 5
    }

    fn is_pages(received: &Received) -> bool {
        matches!(received, Received::Iotlb(..) | Received::PasidIotlb(..))
    }

    fn check_record(&self, _error: u32, _nth: u32, record: u64) {
        assert_eq!(record, 3);
    }

    /// The rest was taken out as waits for nothing.
    fn check_stopped(&self, received: &[Received], driver: &Driver) {
        driver.registers().wait(0);
        let late = super::received(driver.registers());
        assert_eq!(received.len() + late.len(), 3);
    }

    fn over(&self, memory: Arc<HeapTables>) -> Result<Driver, crate::UnitSetupError> {
        Ok(self.unit(memory)?.0)
    }

    fn other_words(&self) -> Vec<Change> {
        vec![
            (|words| words[0] ^= 1 << 10, "the mode"),
            (|words| words[0] ^= 1 << 16, "bits of a PASID"),
            (|words| words[1] += 4096, "RTADDR"),
            (|words| words[2] += 4096, "IQA"),
            (|words| words[2] = 0, "ECAP.QI"),
        ]
    }

    fn when_off(&self) -> &'static str {
        "GSTS"
    }

    fn structures(&self) -> Vec<&'static str> {
        let mut all = vec!["root table", "context table"];
        if self.mode != Mode::Legacy {
            all.extend(["PASID directory", "PASID table"]);
        }
        all.extend(["invalidation queue", "status of invalidation waits"]);
        all
    }
}
