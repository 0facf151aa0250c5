//! The RISC-V IOMMU.

use std::sync::Arc;

use iommu::{RiscvIommu, riscv::Config};
use iopt::HeapTables;

use super::super::{
    Bytes,
    hostile::{Model, Posted, State, Unit},
    play::{self, Subject},
};

const CQB: usize = 24;
const CQT: usize = 36;
const FQB: usize = 40;
const FQT: usize = 52;
const CQCSR: usize = 72;
const FQCSR: usize = 76;
const PQCSR: usize = 80;

/// Version 1.0, Sv39 to Sv57 in both stages, ATS, 56 bits of addresses, process directories of all sizes.
const CAPABILITIES: u64 = 0x10 | 7 << 9 | 7 << 17 | 1 << 25 | 56 << 32 | 7 << 38;

/// A page, from a queue's base.
const fn page(base: u64) -> u64 {
    (base & !0x3ff) << 2
}

pub(in super::super) struct Registers {
    capabilities: u64,
    /// Errors in cqcsr and fqcsr, as the unit has set them.
    errors: [u64; 2],
}

impl Model for Registers {
    fn read(&self, state: &State, offset: usize) -> u64 {
        // Queues are on when they are enabled.
        let on = (state.register(offset) & 1) * 0x1_0001;
        match offset {
            0 => self.capabilities,
            // Commands are fetched at once.
            32 => state.register(CQT),
            CQCSR => on | self.errors[0],
            FQCSR => on | self.errors[1],
            PQCSR => on,
            _ => state.register(offset),
        }
    }

    fn write(&mut self, state: &mut State, offset: usize, value: u64) -> Posted {
        match offset {
            CQCSR => self.errors[0] &= !value,
            FQCSR => self.errors[1] &= !value,
            CQT => {
                let [first, address] = state.before(page(state.told(CQB)), value);
                // IOFENCE.C with AV.
                if first & 0x7ff == 2 | 1 << 10 || first & 0x3ff == 2 {
                    return Posted::Store {
                        address: address << 2,
                        value: first >> 32,
                        mask: u32::MAX.into(),
                    };
                }
            }
            _ => {}
        }
        Posted::Nothing
    }

    fn misbehave(&mut self, state: &mut State) {
        let (what, n, word) = state.take(|data| (data.u8(), data.u8(), data.u64()));
        match what % 5 {
            // A fault.
            0 | 1 if state.told(FQCSR) & 1 == 1 => {
                let tail = state.register(FQT) & 0x7f;
                let at = page(state.told(FQB)) + tail * 32;
                state.store(at + 16, word.rotate_left(24));
                state.store(at, word);
                state.set(FQT, (tail + 1) & 0x7f);
            }
            2 => self.errors[usize::from(n & 1)] |= 1 << (8 + (n >> 1 & 3)),
            3 if state.told(CQCSR) & 1 == 1 => {
                state.store(page(state.told(CQB)) + u64::from(n) * 16, word);
            }
            _ => state.set(usize::from(n & 15) * 8, word),
        }
    }
}

impl Subject for RiscvIommu<Unit<Registers>, Arc<HeapTables>> {
    type Model = Registers;
    type Config = Config;

    const WAITS: u32 = 40;

    fn model(data: &mut Bytes<'_>) -> Registers {
        let flags = u64::from(data.u8());
        // Extended contexts, accessed and dirty bits, NL and S.
        let more = (flags & 1) << 22 | (flags & 2) << 23 | (flags & 4) << 40 | (flags & 8) << 40;
        Registers {
            capabilities: CAPABILITIES ^ (more | (flags & 0x70) << 34),
            errors: [0; 2],
        }
    }

    fn config(data: &mut Bytes<'_>) -> Config {
        Config {
            device_bits: [16, 8, 10, 24][data.below(4)],
            pasid_bits: [0, 3, 8, 20][data.below(4)],
            ..Config::default()
        }
    }

    over_memory!();
}

pub(in super::super) fn play(data: &[u8]) {
    play::play::<RiscvIommu<Unit<Registers>, Arc<HeapTables>>>(data);
}
