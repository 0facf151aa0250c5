//! The cases of every unit.

use super::*;
use crate::suite::{Breakage, Change, QueueRig, Rig, every_queue};

struct Variant {
    mode: Mode,
    cap: u64,
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
        [
            (Mode::Legacy, CAP),
            (Mode::Legacy, CAP | CACHING_MODE),
            (Mode::ScalableSecond, CAP),
            (Mode::ScalableFirst, CAP),
        ]
        .map(|(mode, cap)| Self { mode, cap })
        .into()
    }

    fn unit(&self) -> (Driver, Model) {
        super::unit(self.cap, ECAP | SCALABLE_BOTH, self.mode)
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

    fn found(&self, model: &Model, device: DeviceId) -> Option<(u32, u64)> {
        let (domain, address, levels, _) = model.look_up(device.0 as u16)?;
        assert_eq!(levels, 4);
        Some((domain.into(), address))
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

    fn detached(&self) -> Option<Vec<Received>> {
        let legacy = [
            Received::Contexts(3, 7, SOURCE),
            Received::Iotlb(2, 7, None),
        ];
        (self.mode == Mode::Legacy).then(|| [&legacy[..], &[Received::Wait(0)]].concat())
    }
}

impl QueueRig for Variant {
    fn config(&self) -> Config {
        Config {
            mode: self.mode,
            ..Config::default()
        }
    }

    fn room(&self) -> u32 {
        if self.mode == Mode::Legacy { 255 } else { 127 }
    }

    fn attach_commands(&self) -> bool {
        self.cap & CACHING_MODE != 0
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

    /// What was left was taken out as waits for nothing.
    fn check_stopped(&self, received: &[Received], _driver: &Driver) {
        assert_eq!(received.len(), 3);
    }

    fn over(&self, memory: Arc<HeapTables>) -> Result<Driver, crate::UnitSetupError> {
        let model = Model::new(memory.clone(), self.cap, ECAP | SCALABLE_BOTH);
        Driver::new(model, memory, self.config())
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
