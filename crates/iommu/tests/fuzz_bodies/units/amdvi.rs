//! AMD-Vi.

use std::sync::Arc;

use iommu::{
    AmdVi,
    amdvi::{Config, Mode},
};
use iopt::HeapTables;

use super::super::{
    Bytes,
    hostile::{Model, Posted, State, Unit},
    play::{self, Subject},
};

const COMMANDS: usize = 0x08;
const EVENTS: usize = 0x10;
const CONTROL: usize = 0x18;
const COMMAND_TAIL: usize = 0x2008;
const EVENT_TAIL: usize = 0x2018;
const STATUS: usize = 0x2020;

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

pub(in super::super) struct Registers {
    features: u64,
    /// Bits of the status that the unit has set.
    status: u64,
}

impl Model for Registers {
    fn read(&self, state: &State, offset: usize) -> u64 {
        let control = state.register(CONTROL);
        match offset {
            0x30 => self.features,
            // Commands are fetched at once.
            0x2000 => state.register(COMMAND_TAIL),
            STATUS if control & 1 == 1 => {
                self.status | (control >> 8 & 1 << 4) | (control << 1 & 1 << 3)
            }
            STATUS => self.status,
            _ => state.register(offset),
        }
    }

    fn write(&mut self, state: &mut State, offset: usize, value: u64) -> Posted {
        match offset {
            STATUS => self.status &= !value,
            COMMAND_TAIL => {
                let queue = state.told(COMMANDS) & ADDRESS;
                let [first, value] = state.before(queue, value >> 4);
                if first >> 60 == 1 {
                    return Posted::Store {
                        address: first & 0x000f_ffff_ffff_fff8,
                        value,
                        mask: u64::MAX,
                    };
                }
            }
            _ => {}
        }
        Posted::Nothing
    }

    fn misbehave(&mut self, state: &mut State) {
        let (what, n, word) = state.take(|data| (data.u8(), data.u8(), data.u64()));
        let control = state.told(CONTROL);
        match what % 5 {
            // An event, or one that is not there yet.
            0 | 1 if control & 1 << 2 != 0 => {
                let tail = state.register(EVENT_TAIL) & 0xff0;
                let log = (state.told(EVENTS) & ADDRESS) + tail;
                if n & 1 == 0 {
                    state.store(log + 8, word.rotate_left(24));
                    state.store(log, word);
                }
                state.set(EVENT_TAIL, (tail + 16) & 0xff0);
            }
            // An overflow, or an error.
            2 => self.status ^= 1 << (n & 7),
            3 if control & 1 << 12 != 0 => {
                let queue = state.told(COMMANDS) & ADDRESS;
                state.store(queue + u64::from(n) * 16, word);
            }
            _ => state.set(CONTROL, control ^ 1 << (n & 15)),
        }
    }
}

impl Subject for AmdVi<Unit<Registers>, Arc<HeapTables>> {
    type Model = Registers;
    type Config = Config;

    // A few, or one for each of the log's events.
    const WAITS: u32 = 256 + 20;
    // Some hundreds, where it cannot forget everything at once.
    const ENABLE_WAITS: u32 = 20 * Self::WAITS;

    fn model(data: &mut Bytes<'_>) -> Registers {
        // INVALIDATE_IOMMU_ALL mostly: without it an enable has 66,000 commands.
        let all = u64::from(data.u8() < 0xf0) << 6;
        // Guest tables, and all PASIDs with three levels of guest CR3 tables.
        let guest = 1 << 4 | 2 << 14 | 19 << 32 | 1 << 48;
        Registers {
            features: guest | all | u64::from(data.u8() & 3) << 10,
            status: 0,
        }
    }

    fn config(data: &mut Bytes<'_>) -> Config {
        let (mode, pasid_bits) = match data.below(6) {
            0..4 => (Mode::Host, 0),
            4 => (Mode::Guest, 3),
            _ => (Mode::Guest, 20),
        };
        Config {
            mode,
            pasid_bits,
            last_device: [0xff, 0x3ff, 0x7f, 0xffff][data.below(4)],
            caches_not_present: data.flag(),
            device_tlbs: data.flag(),
            ..Config::default()
        }
    }

    over_memory!();
}

pub(in super::super) fn play(data: &[u8]) {
    play::play::<AmdVi<Unit<Registers>, Arc<HeapTables>>>(data);
}
