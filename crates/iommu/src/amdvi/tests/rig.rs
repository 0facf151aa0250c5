//! The cases of every unit.

use super::guest::{GUEST, table};
use super::*;
use crate::suite::{Breakage, Change, Costs, FlushRow, QueueRig, Rig, Stuck, TLB, every_queue};

#[derive(Clone, Copy)]
struct Variant(Config);

impl Variant {
    fn is_guest(&self) -> bool {
        self.0.mode == Mode::Guest
    }

    fn features(&self) -> u64 {
        if self.is_guest() { GUEST } else { FEATURES }
    }

    /// Pages of a domain, or with guest tables of a device's PASID.
    fn in_unit(&self, domain: DomainId, pasid: u32, pages: (u64, u32, bool)) -> Received {
        let (address, mask, upper) = pages;
        match self.is_guest() {
            false => Received::Pages(domain.0 as u16, address, mask, upper),
            true => Received::GuestPages(SOURCE, pasid, address, mask, upper),
        }
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
        let caching = Config {
            caches_not_present: true,
            ..CONFIG
        };
        let served = Config {
            device_tlbs: true,
            ..CONFIG
        };
        let guest = Config {
            mode: Mode::Guest,
            pasid_bits: 20,
            ..CONFIG
        };
        let guest_caching = Config {
            pasid_bits: 9,
            caches_not_present: true,
            ..guest
        };
        [CONFIG, caching, served, guest, guest_caching]
            .map(Self)
            .into()
    }

    fn unit(&self) -> (Driver, Model) {
        super::unit(self.features(), self.0)
    }

    fn root(&self) -> Root {
        match self.is_guest() {
            false => root(0x10_0000, 4),
            true => table(0x10_0000),
        }
    }

    fn received(model: &Model) -> Vec<Received> {
        model.received()
    }

    fn found(&self, model: &Model, device: DeviceId, pasid: Option<Pasid>) -> Option<(u32, Root)> {
        let source = device.0 as u16;
        if self.is_guest() {
            let pasid = pasid.map(|pasid| pasid.0.into());
            let (tag, address) = model.look_up_guest(source, pasid)?;
            return Some((tag.into(), table(address)));
        }
        let (domain, address, levels) = model.look_up(source).filter(|_| pasid.is_none())?;
        Some((domain.into(), root(address, levels as u8)))
    }

    /// With guest tables translations are tagged by device.
    fn tag(&self, device: DeviceId, domain: DomainId) -> u32 {
        if self.is_guest() { device.0 } else { domain.0 }
    }

    fn slow(&self, model: &Model, rounds: u32) {
        model.state().latency = rounds;
    }

    fn break_down(&self, model: &Model, how: Breakage) {
        let broken = &mut model.state().broken;
        broken.mute = how == Breakage::Mute;
        broken.deaf = how == Breakage::Deaf;
        broken.stuck = if how == Breakage::Stuck { 1 << 4 } else { 0 };
    }

    fn awaited(&self) -> &'static str {
        "the store of a COMPLETION_WAIT"
    }

    fn stuck(&self) -> Vec<Stuck<Self>> {
        let on = Some("Status.CmdBufRun and EventLogRun = 1");
        let off = Some("Status.CmdBufRun and EventLogRun = 0");
        let row = |bit: u64| -> Stuck<Self> {
            let stick = move |model: &Model, on: bool| {
                model.state().broken.stuck = if on { bit } else { 0 };
            };
            (self.unit(), Box::new(stick), [on, off])
        };
        [1 << 3, 1 << 4].map(row).into()
    }

    fn refused(&self) -> Vec<(DeviceId, DomainId, Root, UnitAttachError)> {
        let segment = 0;
        let device = DeviceId(1 << 16 | DEVICE.0);
        let elsewhere = UnitAttachError::Elsewhere { device, segment };
        let (beyond, last) = (DeviceId(0x400), 0x3ff);
        let device = beyond;
        let beyond = UnitAttachError::Beyond { device, last };
        vec![
            (DeviceId(1 << 16 | DEVICE.0), DOMAIN, self.root(), elsewhere),
            (device, DOMAIN, self.root(), beyond),
        ]
    }

    fn reserved(&self) -> &'static [(u64, u64)] {
        &[(0xfee0_0000, 0xfeef_ffff), (0xfd_0000_0000, 0xff_ffff_ffff)]
    }

    fn fault(&self, model: &Model, page: u64) {
        model.event(2 << 60 | 7 << 32 | u64::from(SOURCE), page << 12);
    }

    fn log(&self) -> u64 {
        255
    }

    /// Upper levels only when a table was unlinked, or may stand where the unit remembers none.
    fn flushes(&self, _: Root) -> Vec<FlushRow<Self>> {
        let row = |range, unlinked, address, mask| {
            let pages = (address, mask, unlinked || self.0.caches_not_present);
            let received = vec![self.in_unit(DOMAIN, 0, pages), Received::Wait];
            (range, 1, unlinked, received)
        };
        vec![
            row(Span::new(0x3000, 0x1000), false, 0x3000, 0),
            row(Span::new(0x3000, 0x1000), true, 0x3000, 0),
            row(Span::new(0x6000, 0x2000), false, 0x6000, 1),
            row(Span::new(0x4000, 0x3000), false, 0x4000, 2),
            row(Span::new(0, 1 << 63), false, 0, 51),
            row(Span::new(0x1000, !0xfff - 0x1000), false, 0, 52),
        ]
    }

    fn whole(&self, _: Root, domain: DomainId) -> Vec<Received> {
        vec![self.in_unit(domain, 0, (0, 52, true)), Received::Wait]
    }

    fn knows_members(&self) -> bool {
        false
    }

    fn costs(&self) -> Vec<Costs<Self>> {
        let Root { format, levels, .. } = self.root();
        vec![(*self, format, levels, false, [1, 1, 1, 1, 2, 16, 32, 1, 1])]
    }

    fn reaches(
        &self,
        _: &Model,
        received: &[Received],
        (device, domain): (DeviceId, DomainId),
        iova: u64,
    ) -> bool {
        let tag = self.tag(device, domain);
        let names = |received: &Received| match *received {
            Received::Pages(of, first, mask, _) | Received::GuestPages(of, 0, first, mask, _) => {
                let beyond = (first ^ iova).checked_shr(12 + mask).unwrap_or(0);
                u32::from(of) == tag && beyond == 0
            }
            _ => false,
        };
        !received.iter().any(names)
    }
}

impl QueueRig for Variant {
    fn config(&self) -> Config {
        self.0
    }

    fn room(&self) -> u32 {
        255
    }

    fn other_roots(&self) -> Vec<Root> {
        match self.is_guest() {
            false => vec![root(0x1234_5000, 3), root(0x6000, 6), root(0x7000, 1)],
            true => vec![self.other_root()],
        }
    }

    /// Guest CR3 tables of one to three levels.
    fn pasid_tables(&self) -> Vec<(Self, u64)> {
        let all = match self.is_guest() {
            false => Vec::new(),
            true => vec![(1, 1), (9, 1), (10, 3), (18, 3), (19, 5), (20, 5)],
        };
        let row = |(pasid_bits, pages)| {
            let config = Config {
                pasid_bits,
                ..self.0
            };
            (Self(config), pages)
        };
        all.into_iter().map(row).collect()
    }

    fn attaching(&self, (domain, pasid): (DomainId, Option<Pasid>), _: bool) -> Vec<Received> {
        let pasid = pasid.map_or(0, |pasid| pasid.0);
        let mut all = vec![Received::Device(SOURCE)];
        if self.0.caches_not_present {
            let absent = self.in_unit(domain, pasid, (0, 52, true));
            all.extend([Received::Barrier, absent]);
        }
        [all, vec![Received::Wait]].concat()
    }

    fn detaching(
        &self,
        _: Root,
        (domain, pasid): (DomainId, Option<Pasid>),
        _: bool,
    ) -> Vec<Received> {
        let pasid = pasid.map_or(0, |pasid| pasid.0);
        let all = self.in_unit(domain, pasid, (0, 52, true));
        match self.is_guest() {
            false => vec![
                Received::Device(SOURCE),
                Received::Barrier,
                all,
                Received::Wait,
            ],
            true => vec![all, Received::Wait],
        }
    }

    fn serves_tlb(&self, model: &Model, device: DeviceId) -> bool {
        model.serves_tlb(device.0 as u16)
    }

    fn barrier(&self) -> Option<Received> {
        Some(Received::Barrier)
    }

    fn in_device(&self, _: Option<Pasid>, address: u64, mask: u32) -> Received {
        Received::InDevice(SOURCE, TLB.queue_depth, address, mask)
    }

    fn stops(&self) -> Vec<(u32, &'static str)> {
        vec![
            (5, "ILLEGAL_COMMAND_ERROR"),
            (6, "COMMAND_HARDWARE_ERROR"),
            (0, "CmdBufRun = 0, without an event"),
        ]
    }

    fn stop(&self, model: &Model, at: Option<(u32, u32)>) -> u32 {
        if at.is_some() {
            // An earlier fault is not taken for the cause.
            model.event(2 << 60, 0x1000);
        }
        let state = &mut *model.state();
        let first = state.fetched;
        state.broken.stops = at.map(|(event, at)| (event.into(), first + at));
        first + at.map_or(0, |(_, at)| at)
    }

    fn is_wait(&self, word: u64) -> bool {
        word >> 60 == 1
    }

    fn is_pages(received: &Received) -> bool {
        matches!(received, Received::Pages(..) | Received::GuestPages(..))
    }

    /// The command's address, where there is an event.
    fn check_record(&self, event: u32, nth: u32, record: u64) {
        assert!(event == 0 || record & 0xfff == u64::from(nth) * 16);
    }

    /// Only what is about a device is a fault.
    fn check_stopped(&self, _received: &[Received], driver: &Driver) {
        let (faults, lost) = drain(driver);
        assert_eq!((faults.len(), lost), (1, 0));
    }

    fn over(&self, memory: Arc<HeapTables>) -> Result<Driver, crate::UnitSetupError> {
        Driver::new(Model::new(memory.clone(), self.features()), memory, self.0)
    }

    fn other_words(&self) -> Vec<Change> {
        vec![
            (|words| words[0] ^= 1 << 40, "the mode"),
            (|words| words[0] ^= 1 << 48, "bits of a PASID"),
            (|words| words[1] += 4096, "Device Table Base"),
            (|words| words[2] += 4096, "Command Buffer Base"),
            (|words| words[4] += 4096, "Event Log Base"),
        ]
    }

    fn when_off(&self) -> &'static str {
        "Control"
    }

    fn structures(&self) -> Vec<&'static str> {
        let mut all = vec![
            "device table",
            "command buffer",
            "store of COMPLETION_WAIT",
            "event log",
        ];
        if self.is_guest() {
            all.push("guest CR3 table");
        }
        all
    }
}
