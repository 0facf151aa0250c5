//! Arm's SMMU, version 3.

use std::sync::Arc;

use iommu::{SmmuV3, smmuv3::Config};
use iopt::HeapTables;

use super::super::{
    Bytes,
    hostile::{Model, Posted, State, Unit},
    play::{self, Subject},
};

const CR0: usize = 0x20;
const GERROR: usize = 0x60;
const GERRORN: usize = 0x64;
const COMMANDS: usize = 0x90;
const COMMANDS_PROD: usize = 0x98;
const COMMANDS_CONS: usize = 0x9c;
const EVENTS: usize = 0xa0;
const EVENTS_PROD: usize = 0x1_00a8;

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Both stages, AArch64, coherent, HTTU, ATS, 16-bit tags, two-level contexts and streams.
const IDR0: u64 =
    0b1_1011 | 1 << 5 | 2 << 6 | 1 << 10 | 1 << 12 | 1 << 18 | 1 << 19 | 2 << 21 | 1 << 27;
/// 16 bits of StreamIDs, 20 of PASIDs.
const IDR1: u64 = 16 | 20 << 6 | 1 << 27;

pub(in super::super) struct Registers {
    idr: [u64; 6],
    /// GERROR as the unit changed it: it has stopped, or claims so.
    errors: u64,
}

impl Model for Registers {
    fn read(&self, state: &State, offset: usize) -> u64 {
        match offset {
            0x00..0x18 if offset % 4 == 0 => self.idr[offset / 4],
            // Written values are in force, and commands are taken at once.
            0x24 => state.register(CR0),
            0x44 => state.register(0x44) & !(1 << 31),
            0x54 => state.register(0x50),
            GERROR => self.errors,
            COMMANDS_CONS => state.register(COMMANDS_PROD),
            _ => state.register(offset),
        }
    }

    fn answered(&mut self, state: &State, offset: usize, value: u64) -> bool {
        // As far as the queue counts: its places, and one bit more.
        let places = 2u64 << (state.told(COMMANDS) & 0x1f);
        offset == COMMANDS_CONS && (value ^ state.register(COMMANDS_PROD)) & (places - 1) == 0
    }

    fn write(&mut self, state: &mut State, offset: usize, value: u64) -> Posted {
        // A tail that is set while the queue is off posts nothing.
        if offset != COMMANDS_PROD || state.told(CR0) & 1 << 3 == 0 {
            return Posted::Nothing;
        }
        let base = state.told(COMMANDS);
        let places = 1u64 << (base & 0x1f).min(8);
        let last = (base & ADDRESS) + (value.wrapping_sub(1) & (places - 1)) * 16;
        let [first, address] = [0, 8].map(|word| state.load(last + word));
        match first & 0x30ff {
            0x1046 => Posted::Store {
                address: address & 0x000f_ffff_ffff_fff8,
                value: first >> 32,
                mask: u32::MAX.into(),
            },
            0x46 => Posted::Poll,
            _ => Posted::Nothing,
        }
    }

    fn misbehave(&mut self, state: &mut State) {
        let (what, n, word) = state.take(|data| (data.u8(), data.u8(), data.u64()));
        let on = state.told(CR0);
        match what % 4 {
            // An event.
            0 | 1 if on & 1 << 2 != 0 => {
                let prod = state.register(EVENTS_PROD);
                let log2 = (state.told(EVENTS) & 0x1f).min(7);
                let at = (state.told(EVENTS) & ADDRESS) + (prod & ((1 << log2) - 1)) * 32;
                for (nth, word) in [word, word.rotate_left(24), word >> 8, word]
                    .iter()
                    .enumerate()
                {
                    state.store(at + nth as u64 * 8, *word);
                }
                let overflow = u64::from(n > 0xf0) << 31;
                state.set(EVENTS_PROD, (prod + 1) & ((2 << log2) - 1) | overflow);
            }
            2 => self.errors = state.register(GERRORN) ^ 1 << (n & 15),
            3 if on & 1 << 3 != 0 => {
                let (base, n) = (state.told(COMMANDS), u64::from(n));
                let places = 1 << (base & 0x1f).min(8);
                state.store((base & ADDRESS) + n % places * 16, word);
            }
            _ => state.set(CR0, on ^ 1 << (n & 7)),
        }
    }
}

impl Subject for SmmuV3<Unit<Registers>, Arc<HeapTables>> {
    type Model = Registers;
    type Config = Config;

    // A queue of two places has a wait for each command.
    const WAITS: u32 = 400;

    fn model(data: &mut Bytes<'_>) -> Registers {
        let flags = u64::from(data.u8());
        // Places of the queues; MSI, linear streams, one stage only, ranges.
        let (commands, events) = (u64::from(data.u8() % 20), u64::from(data.u8() % 20));
        let idr0 =
            IDR0 ^ ((flags & 1) << 13 | (flags & 2) << 26 | (flags & 4) >> 2 | (flags & 8) >> 2);
        Registers {
            idr: [
                idr0,
                IDR1 | commands << 21 | events << 16,
                0,
                (flags >> 4 & 1) << 10 | 2 << 11,
                0,
                5 | 7 << 4,
            ],
            errors: 0,
        }
    }

    fn config(data: &mut Bytes<'_>) -> Config {
        Config {
            last_device: [0xff, 0x3ff, 0x7f, 0xffff][data.below(4)],
            pasid_bits: [0, 3, 8, 20][data.below(4)],
            device_tlbs: data.flag(),
            ..Config::default()
        }
    }

    over_memory!();
}

pub(in super::super) fn play(data: &[u8]) {
    play::play::<SmmuV3<Unit<Registers>, Arc<HeapTables>>>(data);
}
