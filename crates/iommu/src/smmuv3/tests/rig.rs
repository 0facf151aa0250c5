//! The cases of every unit.

use iopt::format::{ArmStage1, K4};
use iopt::{Gather, NoRuns, Prot, Table, TableOps as _};

use super::caches::Range;
use super::*;
use crate::suite::{
    Breakage, Change, Costs, FlushRow, QueueRig, Rig, SECOND, Seen, StateChange, Stuck, every_queue,
};

/// A unit that answers through memory, or by its index; that has ranges, or not; with tables of one level or two.
#[derive(Clone, Copy)]
struct Variant {
    ids: [u32; 6],
    config: Config,
}

every_queue!(Variant);

impl Variant {
    const fn msi(&self) -> bool {
        self.ids[0] & MSI != 0
    }

    const fn ranges(&self) -> bool {
        self.ids[3] >> 10 & 1 == 1
    }
}

impl Rig for Variant {
    type Kind = unit::Hardware;
    type Model = Model;
    type Memory = Arc<HeapTables>;
    type Received = Received;

    const DEVICE: DeviceId = DEVICE;
    const DOMAIN: DomainId = DOMAIN;

    fn variants() -> Vec<Self> {
        let pasids = Config {
            pasid_bits: 8,
            ..CONFIG
        };
        let served = Config {
            device_tlbs: true,
            ..pasids
        };
        let [idr0, idr1, ..] = IDS;
        // Streams, then contexts, in tables of one level; an event queue of one place.
        let linear = [idr0 & !(3 << 27) | MSI, idr1 & !(0x1f << 16), 0, 0, 0, IDR5];
        let contexts = [idr0 & !(1 << 19), idr1, 0, IDR3, 0, IDR5];
        let msi = [idr0 | MSI, idr1, 0, IDR3, 0, IDR5];
        [
            (IDS, CONFIG),
            (msi, served),
            (linear, CONFIG),
            (contexts, pasids),
        ]
        .map(|(ids, config)| Self { ids, config })
        .into()
    }

    fn unit(&self) -> (Driver, Model) {
        super::unit(self.ids, self.config)
    }

    fn root(&self) -> Root {
        root(0x10_0000)
    }

    fn received(model: &Model) -> Vec<Received> {
        model.received()
    }

    fn found(&self, model: &Model, device: DeviceId, pasid: Option<Pasid>) -> Option<(u32, Root)> {
        let looked = model.look_up(device.0, pasid.map(|pasid| pasid.0));
        found(looked).map(|(domain, root)| (domain.into(), root))
    }

    fn slow(&self, model: &Model, rounds: u32) {
        model.state().latency = rounds;
    }

    fn break_down(&self, model: &Model, how: Breakage) {
        let broken = &mut model.state().broken;
        broken.mute = how == Breakage::Mute;
        broken.deaf = how == Breakage::Deaf;
        broken.stuck = if how == Breakage::Stuck { 1 } else { 0 };
    }

    fn awaited(&self) -> &'static str {
        match self.msi() {
            false => "CMDQ_CONS = CMDQ_PROD",
            true => "the store of a CMD_SYNC",
        }
    }

    fn stuck(&self) -> Vec<Stuck<Self>> {
        let row = |stick: fn(&Model, bool), awaited| -> Stuck<Self> {
            (self.unit(), Box::new(stick), awaited)
        };
        fn bit<const BIT: u32>(model: &Model, on: bool) {
            model.state().broken.stuck = if on { BIT } else { 0 };
            // Requests meanwhile are acknowledged.
            model.wait(0);
        }
        let off = Some("CR0ACK = 0");
        vec![
            row(bit::<{ 1 << 3 }>, [Some("CR0ACK.CMDQEN = 1"), off]),
            row(bit::<{ 1 << 2 }>, [Some("CR0ACK.EVENTQEN = 1"), off]),
            row(bit::<1>, [Some("CR0ACK.SMMUEN = 1"), off]),
            row(
                |model, on| model.state().broken.bypass = on,
                [Some("GBPA.Update = 0"); 2],
            ),
            row(
                |model, on| {
                    if on {
                        model.write32(0x50, 1);
                        model.wait(0);
                    }
                    model.state().broken.interrupts = on;
                },
                [Some("IRQ_CTRLACK = 0"), None],
            ),
        ]
    }

    fn refused(&self) -> Vec<(DeviceId, DomainId, Root, UnitAttachError)> {
        let (device, last) = (DeviceId(0x400), 0x3ff);
        let beyond = UnitAttachError::Beyond { device, last };
        let asked = second(0x1000);
        let other_root = UnitAttachError::OtherRoot {
            domain: DOMAIN,
            there: self.root(),
            asked,
        };
        // Stage 1 has this VMID.
        let domain = DomainId(VMID.into());
        let reserved = UnitAttachError::ReservedDomain { domain };
        vec![
            (device, DOMAIN, self.root(), beyond),
            (SECOND, DOMAIN, asked, other_root),
            (SECOND, domain, asked, reserved),
        ]
    }

    fn fault(&self, model: &Model, page: u64) {
        let header = 0x10 | u64::from(STREAM) << 32;
        model.event([header, 1 << 35, page << 12, 0]);
    }

    fn log(&self) -> u64 {
        1 << (self.ids[1] >> 16 & 0x1f).min(7)
    }

    /// Ranges with their level, and at most a sixteenth in excess; each leaf where the unit has no ranges.
    fn flushes(&self, root: Root) -> Vec<FlushRow<Self>> {
        let all = self.whole(root, DOMAIN);
        let tag = match root.format {
            FormatId::ArmStage1(_) => (VMID, Some(7)),
            _ => (7, None),
        };
        let row = |start, bytes, levels, unlinked, received| {
            (Span::new(start, bytes), levels, unlinked, received)
        };
        let pages = |address, more, leaf| {
            let range = Range { address, more };
            vec![Received::Pages(tag, range, leaf), Received::Sync]
        };
        let ranged = |address, bytes, level, leaf| {
            let more = Some((12, bytes, level));
            pages(address, more, leaf)
        };
        let plain = |address, leaf| pages(address, None, leaf);
        if !self.ranges() {
            let each = |count: u64, leaf| {
                let pages = (0..count).map(|n| plain(n << 12, leaf)[0]);
                pages.chain([Received::Sync]).collect()
            };
            return vec![
                row(0x7000, 0x1000, 1, false, plain(0x7000, true)),
                row(0, 0x2000, 1, true, each(2, false)),
                row(0x20_1000, 0x1000, 2, false, plain(0x20_0000, true)),
                // The smallest leaves may be anywhere in it.
                row(0x40_0000, 0x1000, 3, false, all.clone()),
                row(0, 32 << 12, 1, false, each(32, true)),
                row(0, 33 << 12, 1, false, all),
            ];
        }
        let excess = (1 << 30) + (1 << 26);
        vec![
            // A level that no table has.
            row(0x1000, 0x1000, 1 << 31, false, all.clone()),
            row(0x7000, 0x1000, 1, false, ranged(0x7000, 0x1000, 3, true)),
            // One granule of any level is a form that is reserved.
            row(0x7000, 0x1000, 1, true, plain(0x7000, false)),
            row(0x7000, 0x3000, 1, true, ranged(0x7000, 0x3000, 0, false)),
            row(
                0x7000,
                33 << 12,
                1,
                false,
                ranged(0x7000, 34 << 12, 3, true),
            ),
            row(0, 1 << 48, 1, false, ranged(0, 1 << 48, 3, true)),
            row(0, (1 << 30) + 0x1000, 1, false, ranged(0, excess, 3, true)),
            // A leaf of 2 MiB is named whole.
            row(
                0x20_1000,
                0x1000,
                2,
                false,
                ranged(0x20_0000, 1 << 21, 2, true),
            ),
            row(
                1 << 30,
                1 << 30,
                4,
                false,
                ranged(1 << 30, 1 << 30, 1, true),
            ),
            // Leaves of more than one level.
            row(
                0x40_0000,
                0x1000,
                3,
                false,
                ranged(0x40_0000, 1 << 21, 0, true),
            ),
            // More than five bits of NUM and SCALE can say.
            row(0, 1 << 63, 1, false, all),
        ]
    }

    fn stages(&self) -> Vec<Root> {
        vec![self.root(), second(0x10_0000)]
    }

    fn whole(&self, root: Root, domain: DomainId) -> Vec<Received> {
        let domain = domain.0 as u16;
        let all = match root.format {
            FormatId::ArmStage1(_) => whole(domain),
            _ => Received::Vmid(domain),
        };
        vec![all, Received::Sync]
    }

    fn costs(&self) -> Vec<Costs<Self>> {
        let costs = match self.ranges() {
            true => [1, 1, 1, 1, 2, 16, 16, 1, 1],
            false => [1, 8, 31, 2, 1, 1, 32, 1, 1],
        };
        let stages: [fn(ArmConfig) -> FormatId; 2] = [FormatId::ArmStage1, FormatId::ArmStage2];
        stages
            .map(|stage| (*self, stage(config(ArmGranule::K4, 48)), 4, false, costs))
            .into()
    }

    fn walking(&self, model: Model) -> (Arc<HeapTables>, Model) {
        let tables = Arc::new(HeapTables::with_tables_at(4096, 1 << 40).unwrap());
        (tables.clone(), model.with_tables(tables))
    }

    fn reaches(
        &self,
        model: &Model,
        _: &[Received],
        (device, _): (DeviceId, DomainId),
        iova: u64,
    ) -> bool {
        model.translate(device.0, None, iova).is_some()
    }
}

impl QueueRig for Variant {
    fn config(&self) -> Config {
        self.config
    }

    fn room(&self) -> u32 {
        256
    }

    fn other_roots(&self) -> Vec<Root> {
        let stage1 = |granule, levels| Root {
            format: FormatId::ArmStage1(config(granule, 48)),
            address: 0x10_0000,
            levels,
        };
        let (small, large) = (stage1(ArmGranule::K16, 4), stage1(ArmGranule::K64, 3));
        vec![second(0x1234_4000), large, second(0x10_0000), small]
    }

    /// A page of streams, one for domains; a table of the first level, and one or two of the second, or one table.
    fn pasid_tables(&self) -> Vec<(Self, u64)> {
        let all = match self.ids[0] >> 19 & 1 {
            1 => vec![(0, 3), (1, 3), (6, 3), (7, 5), (20, 36)],
            _ => vec![(7, 4), (10, 18)],
        };
        let row = |(pasid_bits, pages)| {
            let config = Config {
                pasid_bits,
                ..self.config
            };
            let ids = self.ids;
            // Streams of one level are there from the beginning.
            let pages = if ids[0] >> 27 & 1 == 1 {
                pages
            } else {
                pages - 1
            };
            (Self { ids, config }, pages)
        };
        all.into_iter().map(row).collect()
    }

    fn attaching(&self, (_, pasid): (DomainId, Option<Pasid>), first: bool) -> Vec<Received> {
        let number = pasid.map_or(0, |pasid| pasid.0);
        let entry = |leaf| match first {
            true => Received::Stream(STREAM, leaf),
            false => Received::Context(STREAM, number, leaf),
        };
        vec![entry(false), Received::Sync, entry(true), Received::Sync]
    }

    /// The last takes the entry of the stream with it.
    fn detaching(
        &self,
        root: Root,
        (domain, pasid): (DomainId, Option<Pasid>),
        last: bool,
    ) -> Vec<Received> {
        let entry = match last {
            true => Received::Stream(STREAM, true),
            false => Received::Context(STREAM, pasid.map_or(0, |pasid| pasid.0), true),
        };
        let entry = vec![entry, Received::Sync];
        [entry, self.whole(root, domain)].concat()
    }

    fn watch(&self, model: &Model, pasids: &[Option<Pasid>]) {
        for pasid in pasids {
            model.watch(STREAM, pasid.map(|pasid| pasid.0));
        }
    }

    fn seen(&self, model: &Model) -> Vec<Seen> {
        let seen = model.seen().into_iter();
        seen.map(|((_, pasid), looked)| {
            let found = found(looked).map(|(domain, root)| (domain.into(), root));
            (pasid.map(Pasid), found)
        })
        .collect()
    }

    fn serves_tlb(&self, model: &Model, device: DeviceId) -> bool {
        let looked = model.look_up(device.0, None);
        looked.is_ok_and(|found| found.ats)
    }

    fn barrier(&self) -> Option<Received> {
        Some(Received::Sync)
    }

    fn in_device(&self, pasid: Option<Pasid>, address: u64, mask: u32) -> Received {
        Received::Device(STREAM, pasid.map(|pasid| pasid.0), address, mask.into())
    }

    fn stops(&self) -> Vec<(u32, &'static str)> {
        vec![
            (1, "CERROR_ILL"),
            (2, "CERROR_ABT"),
            (3, "CERROR_ATC_INV_SYNC"),
            (9, "a command error without a name"),
        ]
    }

    fn stop(&self, model: &Model, at: Option<(u32, u32)>) -> u32 {
        let (error, at) = at.unwrap_or((0, u32::MAX));
        model.stop(error, at);
        at
    }

    fn is_wait(&self, word: u64) -> bool {
        assert!(matches!(word & 0xff, 0x12 | 0x46));
        word & 0xff == 0x46
    }

    fn is_pages(received: &Received) -> bool {
        *received != Received::Sync
    }

    fn check_record(&self, error: u32, _nth: u32, record: u64) {
        assert_eq!(record >> 24, u64::from(error));
    }

    /// A range is one command: there are two.
    fn two_pages(
        &self,
        flush: &mut dyn FnMut(&Invalidation) -> Result<(), FlushError>,
    ) -> Result<(), FlushError> {
        let tables = HeapTables::with_tables_at(64, 1 << 40).unwrap();
        let format = ArmStage1::<K4>::new(48, 48).unwrap();
        let mut table = Table::new(format, &tables).unwrap();
        let mut gather = Gather::new();
        for page in [0x1000, 0x9000] {
            let memory = [Span::new(0x8000, 0x1000)];
            table.map(page, &memory, Prot::RW).unwrap();
            let range = Span::new(page, 0x1000);
            table.unmap(range, &mut gather, &mut NoRuns).unwrap();
        }
        let flushed = gather.flush_with(|what| flush(what))?;
        table.reclaim(flushed);
        Ok(())
    }

    fn over(&self, memory: Arc<HeapTables>) -> Result<Driver, crate::UnitSetupError> {
        Driver::new(Model::new(memory.clone(), self.ids), memory, self.config)
    }

    fn other_words(&self) -> Vec<Change> {
        vec![
            (|words| words[0] ^= 1 << 32, "the stream table's shape"),
            (|words| words[1] += 4096, "SMMU_STRTAB_BASE"),
            (|words| words[2] += 4096, "SMMU_CMDQ_BASE"),
            (|words| words[4] += 4096, "SMMU_EVENTQ_BASE"),
        ]
    }

    fn other_states(&self) -> Vec<StateChange<Model>> {
        vec![(|model| model.state().gerror ^= 1, "SMMU_GERROR")]
    }

    fn when_off(&self) -> &'static str {
        "SMMU_CR0ACK"
    }

    fn structures(&self) -> Vec<&'static str> {
        vec![
            "stream table",
            "context descriptors",
            "command queue",
            "store of CMD_SYNC",
            "event queue",
        ]
    }
}
