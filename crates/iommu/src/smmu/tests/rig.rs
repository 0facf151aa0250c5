//! The cases of every unit.

use super::*;
use crate::suite::{Breakage, Rig, every_unit};

/// A table of stage 1 or of stage 2, whose memory outlives it.
struct Variant {
    memory: Arc<HeapTables>,
    root: Root,
    second: bool,
}

every_unit!(Variant);

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
                Self {
                    memory,
                    root,
                    second: second_stage,
                }
            })
            .into()
    }

    fn unit(&self) -> (Smmu<Model>, Model) {
        unit_with(self.memory.clone(), V2, [IDR0, IDR1, IDR2])
    }

    fn root(&self) -> Root {
        self.root
    }

    fn received(model: &Model) -> Vec<Received> {
        model.received()
    }

    /// The model walks the table, but has no domains.
    fn found(&self, model: &Model, device: DeviceId) -> Option<(u32, u64)> {
        match model.access(device.0 as u16, 0, false) {
            Seen::Translated(DATA) => Some((DOMAIN.0, self.root.address)),
            other => {
                assert_eq!(other, NOT_MAPPED);
                None
            }
        }
    }

    fn break_down(&self, model: &Model, how: Breakage) {
        assert_ne!(how, Breakage::Deaf, "there is no queue");
        let broken = &mut model.state().broken;
        broken.bank_sync = how == Breakage::Mute;
        broken.global_sync = how == Breakage::Mute;
    }

    fn awaited(&self) -> &'static str {
        match self.second {
            false => "TLBSTATUS.SACTIVE = 0",
            true => "TLBGSTATUS.GSACTIVE = 0",
        }
    }

    fn detached(&self) -> Option<Vec<Received>> {
        None
    }
}
