//! The cases of every unit.

use super::*;
use crate::suite::{Breakage, Change, QueueRig, Rig, every_queue};

struct Variant(Config);

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
        vec![Self(CONFIG), Self(caching)]
    }

    fn unit(&self) -> (Driver, Model) {
        super::unit(FEATURES, self.0)
    }

    fn root(&self) -> Root {
        root(0x10_0000, 4)
    }

    fn received(model: &Model) -> Vec<Received> {
        model.received()
    }

    fn found(&self, model: &Model, device: DeviceId) -> Option<(u32, u64)> {
        let (domain, address, levels) = model.look_up(device.0 as u16)?;
        assert_eq!(levels, 4);
        Some((domain.into(), address))
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

    fn detached(&self) -> Option<Vec<Received>> {
        Some(vec![
            Received::Device(SOURCE),
            Received::Barrier,
            whole(7),
            Received::Wait,
        ])
    }
}

impl QueueRig for Variant {
    fn config(&self) -> Config {
        self.0
    }

    fn room(&self) -> u32 {
        255
    }

    fn attach_commands(&self) -> bool {
        true
    }

    fn slow(&self, model: &Model, rounds: u32) {
        model.state().latency = rounds;
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
        matches!(received, Received::Pages(..))
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
        Driver::new(Model::new(memory.clone(), FEATURES), memory, self.0)
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
        vec![
            "device table",
            "command buffer",
            "store of COMPLETION_WAIT",
            "event log",
        ]
    }
}
