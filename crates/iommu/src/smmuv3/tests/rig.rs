//! The cases of every unit.

use iopt::format::{ArmStage1, K4};
use iopt::{Gather, NoRuns, Prot, Table, TableOps as _};

use super::*;
use crate::suite::{Breakage, Change, QueueRig, Rig, every_queue};

/// A unit that answers through memory, or by its index.
struct Variant {
    msi: bool,
}

every_queue!(Variant);

impl Variant {
    fn ids(&self) -> [u32; 6] {
        let mut ids = IDS;
        ids[0] |= if self.msi { MSI } else { 0 };
        ids
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
        [false, true].map(|msi| Self { msi }).into()
    }

    fn unit(&self) -> (Driver, Model) {
        super::unit(self.ids(), CONFIG)
    }

    fn root(&self) -> Root {
        root(0x10_0000)
    }

    fn received(model: &Model) -> Vec<Received> {
        model.received()
    }

    fn found(&self, model: &Model, device: DeviceId) -> Option<(u32, u64)> {
        let (domain, there) = found(model.look_up(device.0, None))?;
        assert_eq!(there, root(there.address));
        Some((domain.into(), there.address))
    }

    fn break_down(&self, model: &Model, how: Breakage) {
        let broken = &mut model.state().broken;
        broken.mute = how == Breakage::Mute;
        broken.deaf = how == Breakage::Deaf;
        broken.stuck = if how == Breakage::Stuck { 1 } else { 0 };
    }

    fn awaited(&self) -> &'static str {
        match self.msi {
            false => "CMDQ_CONS = CMDQ_PROD",
            true => "the store of a CMD_SYNC",
        }
    }

    fn detached(&self) -> Option<Vec<Received>> {
        let entry = Received::Stream(STREAM, true);
        Some(vec![entry, Received::Sync, whole(7), Received::Sync])
    }
}

impl QueueRig for Variant {
    fn config(&self) -> Config {
        CONFIG
    }

    fn room(&self) -> u32 {
        256
    }

    fn attach_commands(&self) -> bool {
        true
    }

    fn slow(&self, model: &Model, rounds: u32) {
        model.state().latency = rounds;
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
        assert_eq!(record >> 24, error.into());
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
        Driver::new(Model::new(memory.clone(), self.ids()), memory, CONFIG)
    }

    fn other_words(&self) -> Vec<Change> {
        vec![
            (|words| words[0] ^= 1 << 32, "the stream table's shape"),
            (|words| words[1] += 4096, "SMMU_STRTAB_BASE"),
            (|words| words[2] += 4096, "SMMU_CMDQ_BASE"),
            (|words| words[4] += 4096, "SMMU_EVENTQ_BASE"),
        ]
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
