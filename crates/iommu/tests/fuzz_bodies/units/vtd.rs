//! Intel VT-d.

use std::sync::Arc;

use iommu::{
    Vtd,
    vtd::{Config, Mode},
};
use iopt::HeapTables;

use super::super::{
    Bytes,
    hostile::{Model, Posted, State, Unit},
    play::{self, Subject},
};

const FSTS: usize = 0x34;
const IQT: usize = 0x88;
const IQA: usize = 0x90;

/// 256 domains, 3 and 4 levels, 48 bits, all leaves, pages to 2^18 at once, two fault records, draining.
const CAP: u64 =
    2 | 0b110 << 8 | 47 << 16 | 0x22 << 24 | 3 << 34 | 1 << 39 | 1 << 40 | 18 << 48 | 3 << 54;
/// Coherent walks, a queue, snoop control, IOTLB registers at 0xf0, scalable mode with both stages, 20
/// bits of PASIDs if any.
const ECAP: u64 = 1 | 1 << 1 | 1 << 7 | 0xf << 8 | 19 << 35 | 1 << 43 | 1 << 46 | 1 << 47;

pub(in super::super) struct Registers {
    cap: u64,
    ecap: u64,
    /// Offsets of the IOTLB register and of the fault records, as the capability registers give them.
    iotlb: usize,
    faults: usize,
}

impl Model for Registers {
    fn read(&self, state: &State, offset: usize) -> u64 {
        match offset {
            0x00 => 0x10,
            0x08 => self.cap,
            0x10 => self.ecap,
            // The status follows the command, but WBF.
            0x1c => state.register(0x18) & !(1 << 27),
            // Commands are fetched at once.
            0x80 => state.register(IQT),
            // Register commands are done.
            0x28 => state.register(offset) & !(1 << 63) | 3 << 59,
            _ if offset == self.iotlb => state.register(offset) & !(1 << 63) | 3 << 57,
            _ => state.register(offset),
        }
    }

    fn answered(&mut self, _state: &State, offset: usize, value: u64) -> bool {
        match offset {
            0x08 => self.faults = (value >> 24 & 0x3ff) as usize * 16,
            0x10 => self.iotlb = (value >> 8 & 0x3ff) as usize * 16 + 8,
            _ => {}
        }
        (offset == 0x28 || offset == self.iotlb) && value >> 63 == 0
    }

    fn write(&mut self, state: &mut State, offset: usize, value: u64) -> Posted {
        match offset {
            // Bits written with 1 are cleared.
            FSTS => state.set(FSTS, 0),
            IQT => {
                let queue = state.told(IQA);
                // In descriptors of 16 bytes, or of 32.
                let bytes = 16 << (queue >> 11 & 1);
                let last = (queue & !0xfff) + (value.wrapping_sub(bytes) & 0xfff);
                let [first, address] = [0, 8].map(|word| state.load(last + word));
                if first & 0xf == 5 {
                    let (value, mask) = (first >> 32, u64::from(u32::MAX));
                    return Posted::Store {
                        address,
                        value,
                        mask,
                    };
                }
            }
            _ if (offset == 0x28 || offset == self.iotlb) && value >> 63 == 1 => {
                return Posted::Poll;
            }
            _ => {}
        }
        Posted::Nothing
    }

    fn misbehave(&mut self, state: &mut State) {
        let (what, n, word) = state.take(|data| (data.u8(), data.u8(), data.u64()));
        match what % 4 {
            // A fault, with its status.
            0 => {
                let record = self.faults + usize::from(n & 3) * 16;
                state.set(record, word);
                state.set(record + 8, word.rotate_left(32) | 1 << 63);
                state.set(FSTS, state.register(FSTS) | 2 | u64::from(n & 3) << 8);
            }
            1 => state.set(FSTS, state.register(FSTS) | 1 << (n & 7)),
            // A descriptor.
            2 if state.told(0x18) >> 26 & 1 == 1 => {
                let queue = state.told(IQA) & !0xfff;
                state.store(queue + u64::from(n) * 16, word);
            }
            _ => state.set(0x18, state.register(0x18) ^ 1 << (24 + (n & 7))),
        }
    }
}

impl Subject for Vtd<Unit<Registers>, Arc<HeapTables>> {
    type Model = Registers;
    type Config = Config;

    // Each command by registers waits for itself.
    const WAITS: u32 = 20 + 2 * iommu::MOST_PAGE_COMMANDS as u32;

    fn model(data: &mut Bytes<'_>) -> Registers {
        let flags = data.u8();
        // Caching mode, write buffers, protected memory, page-selective; queue, snooped walks, TLBs in
        // devices, PASIDs.
        let on = |bit: u8| u64::from(flags >> bit & 1);
        Registers {
            cap: CAP ^ (on(0) << 7 | on(1) << 4 | on(2) << 5 | on(3) << 39),
            ecap: ECAP ^ (on(4) << 1 | on(5) << 48 | on(6) << 2 | on(7) << 40),
            iotlb: 0xf8,
            faults: 0x220,
        }
    }

    fn config(data: &mut Bytes<'_>) -> Config {
        let mode = match data.below(3) {
            0 => Mode::Legacy,
            1 => Mode::ScalableSecond,
            _ => Mode::ScalableFirst,
        };
        Config {
            mode,
            pasid_bits: [0, 3, 8, 20][data.below(4)],
            ..Config::default()
        }
    }

    over_memory!();
}

pub(in super::super) fn play(data: &[u8]) {
    play::play::<Vtd<Unit<Registers>, Arc<HeapTables>>>(data);
}
