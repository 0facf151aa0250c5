//! The cases of every unit.

use super::*;
use crate::suite::{Breakage, Change, QueueRig, Rig, every_queue};

struct Variant {
    capabilities: u64,
    config: Config,
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
        [(PLAIN, CONFIG), (PLAIN, PROCESSES), (RICH, CONFIG)]
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

    fn found(&self, model: &Model, device: DeviceId) -> Option<(u32, u64)> {
        let (space, address, levels, _) = model.look_up(device.0.into(), None)?;
        assert_eq!((space, levels), (Space::Pscid(7), 4));
        Some((7, address))
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

    fn detached(&self) -> Option<Vec<Received>> {
        Some(vec![
            Received::Device(Some(ID)),
            Received::Fence,
            whole(7),
            Received::Wait,
        ])
    }
}

impl QueueRig for Variant {
    fn config(&self) -> Config {
        self.config
    }

    fn room(&self) -> u32 {
        255
    }

    fn attach_commands(&self) -> bool {
        false
    }

    fn slow(&self, model: &Model, rounds: u32) {
        model.state().latency = rounds;
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
