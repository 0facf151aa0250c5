//! The cases of every unit.

use super::*;
use crate::suite::{Breakage, Costs, FlushRow, Rig, Stuck, every_unit};

/// A table of stage 1 or of stage 2, whose memory outlives it.
struct Variant {
    config: Config,
    memory: Arc<HeapTables>,
    root: Root,
}

every_unit!(Variant);

impl Variant {
    fn is_second(&self) -> bool {
        matches!(self.root.format, FormatId::ArmStage2(_))
    }

    /// A page of the domain.
    fn page(&self, leaf: bool) -> Vec<Received> {
        let (name, bank, page) = match (self.is_second(), leaf) {
            (false, false) => ("TLBIVA", 2, 2 << 48 | 3),
            (false, true) => ("TLBIVAL", 2, 2 << 48 | 3),
            (true, false) => ("TLBIIPAS2", 0, 3),
            (true, true) => ("TLBIIPAS2L", 0, 3),
        };
        vec![(name, bank, page), ("TLBSYNC", bank, 0)]
    }
}

impl Rig for Variant {
    type Kind = unit::Hardware;
    type Model = Model;
    type Memory = ();
    type Received = Received;

    const DEVICE: DeviceId = DEVICE;
    const DOMAIN: DomainId = DOMAIN;

    fn variants() -> Vec<Self> {
        [false, true]
            .map(|second_stage| {
                let memory = memory();
                let root = match second_stage {
                    false => first(&memory, 0).root(),
                    true => second(&memory, 40).root(),
                };
                let config = V2;
                Self {
                    config,
                    memory,
                    root,
                }
            })
            .into()
    }

    fn unit(&self) -> (Smmu<Model>, Model) {
        let idr2 = match self.config.version {
            Version::V1 => IDR2_V1,
            Version::V2 => IDR2,
        };
        unit_with(self.memory.clone(), self.config, [IDR0, IDR1, idr2])
    }

    fn root(&self) -> Root {
        self.root
    }

    fn received(model: &Model) -> Vec<Received> {
        model.received()
    }

    /// The model walks the table, but has no domains.
    fn found(&self, model: &Model, device: DeviceId, _: Option<Pasid>) -> Option<(u32, Root)> {
        match model.access(device.0 as u16, 0, false) {
            Seen::Translated(DATA) => Some((DOMAIN.0, self.root)),
            other => {
                assert_eq!(other, NOT_MAPPED);
                None
            }
        }
    }

    fn slow(&self, model: &Model, rounds: u32) {
        model.state().latency = rounds;
    }

    fn break_down(&self, model: &Model, how: Breakage) {
        assert_ne!(how, Breakage::Deaf, "there is no queue");
        let broken = &mut model.state().broken;
        broken.bank_sync = how == Breakage::Mute;
        broken.global_sync = how == Breakage::Mute;
    }

    fn awaited(&self) -> &'static str {
        match self.is_second() {
            false => "TLBSTATUS.SACTIVE = 0",
            true => "TLBGSTATUS.GSACTIVE = 0",
        }
    }

    fn stuck(&self) -> Vec<Stuck<Self>> {
        let stick = |model: &Model, on| model.state().broken.global_sync = on;
        let awaited = [Some("TLBGSTATUS.GSACTIVE = 0"); 2];
        vec![(self.unit(), Box::new(stick), awaited)]
    }

    fn refused(&self) -> Vec<(DeviceId, DomainId, Root, UnitAttachError)> {
        let (device, last) = (DeviceId(0x8000), 0x7fff);
        let beyond = UnitAttachError::Beyond { device, last };
        vec![(device, DOMAIN, self.root, beyond)]
    }

    fn fault(&self, model: &Model, page: u64) {
        assert_eq!(model.access(STREAM, page << 12, false), NOT_PRESENT);
    }

    fn log(&self) -> u64 {
        1
    }

    fn flushes(&self, root: Root) -> Vec<FlushRow<Self>> {
        let page = Span::new(0x3000, 0x1000);
        vec![
            (page, 1, false, self.page(true)),
            (page, 1, true, self.page(false)),
            // A level that no table has.
            (page, 1 << 31, false, self.whole(root, DOMAIN)),
        ]
    }

    fn whole(&self, _: Root, _: DomainId) -> Vec<Received> {
        match self.is_second() {
            false => vec![("TLBIASID", 2, 2), ("TLBSYNC", 2, 0)],
            true => vec![("TLBIVMID", 0, 1), ("TLBGSYNC", 0, 0)],
        }
    }

    /// Each entry is named; the block beside a page may be cached as what its entry says, the page as itself.
    fn costs(&self) -> Vec<Costs<Self>> {
        let row = |config, format, levels, costs| {
            let unit = Self {
                config,
                memory: self.memory.clone(),
                root: self.root,
            };
            (unit, format, levels, false, costs)
        };
        let config = |input_bits| ArmConfig {
            granule: ArmGranule::K4,
            input_bits,
            upper: false,
        };
        let each = [1, 8, 31, 2, 1, 1, 32, 1, 1];
        match self.is_second() {
            false => vec![
                row(V2, FormatId::ArmStage1(config(48)), 4, each),
                row(V1, FormatId::ArmStage1(config(32)), 3, each),
            ],
            // Version 1 has no command by address for stage 2.
            true => vec![
                row(V2, FormatId::ArmStage2(config(48)), 4, each),
                row(V1, FormatId::ArmStage2(config(40)), 3, [1; 9]),
            ],
        }
    }

    fn walking(&self, mut model: Model) -> (Arc<HeapTables>, Model) {
        let tables = Arc::new(HeapTables::with_tables_at(4096, 1 << 32).unwrap());
        model.memory = tables.clone();
        (tables, model)
    }

    fn reaches(
        &self,
        model: &Model,
        _: &[Received],
        (device, _): (DeviceId, DomainId),
        iova: u64,
    ) -> bool {
        matches!(
            model.access(device.0 as u16, iova, false),
            Seen::Translated(_)
        )
    }
}
