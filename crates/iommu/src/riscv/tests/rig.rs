//! The cases of every unit.

use super::*;
use crate::suite::{
    Breakage, Change, Costs, FlushRow, QueueRig, Rig, SECOND, StateChange, Stuck, every_queue,
};

#[derive(Clone, Copy)]
struct Variant {
    capabilities: u64,
    config: Config,
}

impl Variant {
    fn entry(&self, pasid: Option<Pasid>, last: bool) -> Received {
        match last {
            true => Received::Device(Some(ID)),
            false => Received::Process(ID, pasid.map_or(0, |pasid| pasid.0.into())),
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
        let large = Config {
            device_bits: 24,
            pasid_bits: 17,
            ..CONFIG
        };
        [
            (PLAIN, CONFIG),
            (PLAIN, PROCESSES),
            (RICH, CONFIG),
            (RICH, large),
        ]
        .map(|(capabilities, config)| Self {
            capabilities,
            config,
        })
        .into()
    }

    fn unit(&self) -> (Driver, Model) {
        super::unit(self.capabilities, self.config)
    }

    fn root(&self) -> Root {
        root(0x10_0000, 4)
    }

    fn received(model: &Model) -> Vec<Received> {
        model.received()
    }

    fn found(&self, model: &Model, device: DeviceId, pasid: Option<Pasid>) -> Option<(u32, Root)> {
        let process = pasid.map(|pasid| pasid.0.into());
        let (space, address, levels, _) = model.look_up(device.0.into(), process)?;
        match space {
            Space::Pscid(domain) => Some((domain as u32, root(address, levels as u8))),
            Space::Gscid(domain) => Some((domain as u32, second(address, levels as u8))),
        }
    }

    fn slow(&self, model: &Model, rounds: u32) {
        model.state().latency = rounds;
    }

    fn break_down(&self, model: &Model, how: Breakage) {
        let broken = &mut model.state().broken;
        broken.mute = how == Breakage::Mute;
        broken.deaf = how == Breakage::Deaf;
        broken.busy = how == Breakage::Stuck;
    }

    fn awaited(&self) -> &'static str {
        "the store of an IOFENCE.C"
    }

    fn stuck(&self) -> Vec<Stuck<Self>> {
        let row = |stuck: Option<usize>, awaited| -> Stuck<Self> {
            let stick = move |model: &Model, on: bool| {
                let broken = &mut model.state().broken;
                broken.stuck = stuck.filter(|_| on);
                broken.busy = on && stuck.is_none();
            };
            (self.unit(), Box::new(stick), [Some(awaited); 2])
        };
        vec![
            row(Some(72), "cqcsr.cqon = cqen, busy = 0"),
            row(Some(76), "fqcsr.fqon = fqen, busy = 0"),
            row(Some(80), "pqcsr.pqon = 0, busy = 0"),
            row(None, "ddtp.busy = 0"),
        ]
    }

    fn refused(&self) -> Vec<(DeviceId, DomainId, Root, UnitAttachError)> {
        let last = (1 << self.config.device_bits) - 1;
        let device = DeviceId(last + 1);
        let beyond = UnitAttachError::Beyond { device, last };
        let asked = second(0x4000, 4);
        let other_root = UnitAttachError::OtherRoot {
            domain: DOMAIN,
            there: self.root(),
            asked,
        };
        // Its root is four pages, and aligned to them.
        let (address, bits) = (0x1000, 56);
        let odd = UnitAttachError::RootAddress { address, bits };
        vec![
            (device, DOMAIN, self.root(), beyond),
            (SECOND, DOMAIN, asked, other_root),
            (SECOND, OTHER, second(address, 4), odd),
        ]
    }

    /// A read page fault.
    fn fault(&self, model: &Model, page: u64) {
        model.fault(2 << 34 | ID << 40 | 13, page << 12);
    }

    fn log(&self) -> u64 {
        127
    }

    /// Without NL tables go with everything; without S so does what is not 4 KiB.
    fn flushes(&self, root: Root) -> Vec<FlushRow<Self>> {
        let space = match root.format {
            FormatId::RiscV => Space::Pscid(7),
            _ => Space::Gscid(7),
        };
        // And NL.
        let pages = |address, mask, upper| {
            let pages = Some(((address, mask), upper));
            vec![Received::Table(space, pages), Received::Wait]
        };
        let page = Span::new(0x3000, 0x1000);
        let all = || self.whole(root, DOMAIN);
        let first = (page, 1, false, pages(0x3000, 0, false));
        if self.capabilities == PLAIN {
            return vec![
                first,
                (page, 1, true, all()),
                (page, 2, false, all()),
                (page, 3, false, all()),
            ];
        }
        let row = |range, address, mask| (range, 1, false, pages(address, mask, false));
        vec![
            first,
            (page, 1, true, pages(0x3000, 0, true)),
            row(Span::new(0x6000, 0x2000), 0x6000, 1),
            row(Span::new(0x4000, 0x3000), 0x4000, 2),
            row(Span::new(1 << 63, 1 << 62), 1 << 63, 50),
            row(Span::new(0x1000, !0xfff - 0x1000), 0, 52),
        ]
    }

    fn stages(&self) -> Vec<Root> {
        vec![self.root(), second(0x4000, 4)]
    }

    fn whole(&self, root: Root, domain: DomainId) -> Vec<Received> {
        let id = domain.0.into();
        let all = match root.format {
            FormatId::RiscV => whole(id),
            _ => Received::Table(Space::Gscid(id), None),
        };
        vec![all, Received::Wait]
    }

    fn costs(&self) -> Vec<Costs<Self>> {
        let kept = match self.capabilities {
            PLAIN => [1, 8, 32, 1, 1, 1, 32, 1, 1],
            _ => [1, 1, 1, 1, 2, 16, 32, 1, 1],
        };
        let gone = if self.capabilities == PLAIN {
            [1; 9]
        } else {
            kept
        };
        let both = |format| {
            [
                (*self, format, 4, true, kept),
                (*self, format, 4, false, gone),
            ]
        };
        [both(FormatId::RiscV), both(FormatId::RiscVG)].concat()
    }

    fn walking(&self, model: Model) -> (Arc<HeapTables>, Model) {
        let tables = Arc::new(HeapTables::with_tables_at(4096, 1 << 40).unwrap());
        model.state().tables = Some(tables.clone());
        (tables, model)
    }

    fn reaches(
        &self,
        model: &Model,
        _: &[Received],
        (device, _): (DeviceId, DomainId),
        iova: u64,
    ) -> bool {
        model.reaches(device.0.into(), None, iova >> 12)
    }
}

impl QueueRig for Variant {
    fn config(&self) -> Config {
        self.config
    }

    fn room(&self) -> u32 {
        255
    }

    fn other_roots(&self) -> Vec<Root> {
        vec![second(0x1234_4000, 5), root(0x6000, 3), second(0x4000, 3)]
    }

    /// Process directories of one to three levels; and a page of the device directory.
    fn pasid_tables(&self) -> Vec<(Self, u64)> {
        let row = |(pasid_bits, pages): (u32, u64)| {
            let config = Config {
                pasid_bits,
                ..self.config
            };
            (Self { config, ..*self }, pages + 1)
        };
        [(8, 1), (17, 3), (20, 5)].map(row).into()
    }

    /// The unit remembers nothing that is not valid.
    fn attaching(&self, _: (DomainId, Option<Pasid>), _: bool) -> Vec<Received> {
        Vec::new()
    }

    fn detaching(
        &self,
        root: Root,
        (domain, pasid): (DomainId, Option<Pasid>),
        last: bool,
    ) -> Vec<Received> {
        let id = domain.0.into();
        let gone = match root.format {
            FormatId::RiscV => vec![whole(id)],
            _ => vec![
                Received::First(Some(id)),
                Received::Table(Space::Gscid(id), None),
            ],
        };
        let entry = [self.entry(pasid, last), Received::Fence];
        [&entry, &gone[..], &[Received::Wait]].concat()
    }

    /// The context goes when its TLB has answered.
    fn detaching_with_tlb(
        &self,
        _: Root,
        (domain, pasid): (DomainId, Option<Pasid>),
        last: bool,
    ) -> Vec<Received> {
        let gone = [
            self.entry(pasid, self.config.pasid_bits == 0),
            Received::Fence,
            whole(domain.0.into()),
            Received::Fence,
            self.in_device(pasid, 0, 52),
            Received::Wait,
        ];
        let context = [self.entry(None, true), Received::Wait];
        [&gone[..], &context[..if last { 2 } else { 0 }]].concat()
    }

    fn serves_tlb(&self, model: &Model, device: DeviceId) -> bool {
        let found = model.look_up(device.0.into(), None);
        found.is_some_and(|(.., tlb)| tlb)
    }

    fn barrier(&self) -> Option<Received> {
        Some(Received::Fence)
    }

    fn in_device(&self, pasid: Option<Pasid>, address: u64, mask: u32) -> Received {
        let process = pasid.map(|pasid| pasid.0.into());
        Received::Tlb(ID, self.config.device_bits > 16, process, (address, mask))
    }

    fn stops(&self) -> Vec<(u32, &'static str)> {
        vec![
            (1 << 8, "cqmf"),
            (1 << 9, "cmd_to"),
            (1 << 10, "cmd_ill"),
            (0, "cqon = 0, without an error"),
        ]
    }

    fn stop(&self, model: &Model, at: Option<(u32, u32)>) -> u32 {
        let state = &mut *model.state();
        let first = state.fetched;
        state.broken.stops = at.map(|(bits, at)| (bits, first + at));
        first + at.map_or(0, |(_, at)| at)
    }

    fn is_wait(&self, word: u64) -> bool {
        word & 0x7f == 2
    }

    fn is_pages(received: &Received) -> bool {
        matches!(received, Received::Table(..))
    }

    fn check_record(&self, bits: u32, _nth: u32, record: u64) {
        assert_eq!(record & 0x700, u64::from(bits));
    }

    /// Without S a command names a page; with it a block that holds both.
    fn two_pages(
        &self,
        flush: &mut dyn FnMut(&Invalidation) -> Result<(), FlushError>,
    ) -> Result<(), FlushError> {
        let pages = if self.capabilities == RICH { 3 } else { 2 };
        flush(&Invalidation::of(Span::new(0xf000, pages << 12), 1, false))
    }

    fn over(&self, memory: Arc<HeapTables>) -> Result<Driver, crate::UnitSetupError> {
        let model = Model::new(memory.clone(), self.capabilities);
        Driver::new(model, memory, self.config)
    }

    fn other_words(&self) -> Vec<Change> {
        vec![
            (|words| words[0] ^= 1 << 49, "capabilities.MSI_FLAT"),
            (|words| words[0] ^= 1 << 50, "bits of PASIDs"),
            (|words| words[1] += 4096, "ddtp"),
            (|words| words[2] += 4096, "cqb"),
            (|words| words[4] += 4096, "fqb"),
        ]
    }

    fn other_states(&self) -> Vec<StateChange<Model>> {
        fn csr(model: &Model, csr: usize, bits: u32) {
            *model.state().csrs.get_mut(&csr).unwrap() ^= bits;
        }
        vec![
            (|model| csr(model, 72, 1 << 8), "cqcsr"),
            (|model| csr(model, 76, 1 << 16), "fqcsr"),
            (
                |model| *model.state().places.get_mut(&36).unwrap() ^= 1,
                "cqh",
            ),
            (|model| model.state().fctl ^= 4, "fctl"),
        ]
    }

    fn when_off(&self) -> &'static str {
        "ddtp"
    }

    fn structures(&self) -> Vec<&'static str> {
        let mut all = vec![
            "device directory",
            "command queue",
            "store of IOFENCE.C",
            "fault queue",
        ];
        if self.config.pasid_bits > 0 {
            all.push("process directory");
        }
        all
    }
}
