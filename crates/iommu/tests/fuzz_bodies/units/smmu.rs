//! Arm's SMMU, versions 1 and 2.

use std::sync::Arc;

use iommu::{
    DomainId, Frozen, Smmu, UnitError, UnitMemory,
    smmu::{Config, Version},
};
use iopt::{HeapTables, Root};

use super::super::{
    Bytes,
    hostile::{Model, Posted, State, Unit},
    play::{self, Subject},
};

pub(in super::super) struct Registers {
    idr: [u64; 3],
}

impl Model for Registers {
    fn read(&self, state: &State, offset: usize) -> u64 {
        match offset {
            0x20 | 0x24 | 0x28 => self.idr[(offset - 0x20) / 4],
            // Syncs are complete.
            0x74 => 0,
            _ if offset & 0xfff == 0x7f4 => 0,
            _ => state.register(offset),
        }
    }

    fn answered(&mut self, _state: &State, offset: usize, value: u64) -> bool {
        (offset == 0x74 || offset & 0xfff == 0x7f4) && value & 1 == 0
    }

    fn write(&mut self, state: &mut State, offset: usize, value: u64) -> Posted {
        match offset {
            // GFSR, and in a context bank FSR: what is written with 1 is cleared.
            0x48 => state.set(offset, 0),
            _ if offset >= 0x1_0000 && offset & 0xfff == 0x58 && value == 0xffff_ffff => {
                state.set(offset, 0);
            }
            // TLBGSYNC, TLBSYNC.
            0x70 => return Posted::Poll,
            _ if offset & 0xfff == 0x7f0 => return Posted::Poll,
            _ => {}
        }
        Posted::Nothing
    }

    fn misbehave(&mut self, state: &mut State) {
        let (n, word) = state.take(|data| (data.u8(), data.u64()));
        let bank = (16 + usize::from(n & 3)) << 12;
        match n >> 4 {
            // A fault, of a bank or of the global registers.
            0..4 => state.set(bank + 0x58, word & 0xffff_ffff),
            4..8 => state.set(0x48, word & 0xffff_ffff),
            8..12 => state.set(0x800 + usize::from(n & 15) * 4, word & 0xffff_ffff),
            _ => state.set(0, word & 0xffff_ffff),
        }
    }
}

impl Subject for Smmu<Unit<Registers>> {
    type Model = Registers;
    type Config = Config;

    // "No operation has more than one wait."
    const WAITS: u32 = 1;
    const ASKS_THE_UNIT: bool = true;

    fn model(data: &mut Bytes<'_>) -> Registers {
        // Stages 1 and 2, 15 bits of stream ids, 16 or fewer stream mapping registers, matched or not.
        let (streams, flags) = (u64::from(data.u8() & 15), u64::from(data.u8()));
        let matched = (flags & 1 ^ 1) << 27;
        Registers {
            idr: [
                7 << 28 | matched | 1 << 14 | (flags & 2) << 7 | 15 << 9 | (16 - streams),
                3 << 28 | 2 << 16 | 6 | (flags & 4) << 29,
                (flags >> 3 & 7 ^ 7) << 12 | 5 << 8 | 5 << 4 | 5,
            ],
        }
    }

    fn config(data: &mut Bytes<'_>) -> Config {
        let version = if data.flag() {
            Version::V1
        } else {
            Version::V2
        };
        Config {
            version,
            ..Config::default()
        }
    }

    fn new(unit: Unit<Registers>, _memory: Arc<HeapTables>, config: Config) -> Option<Self> {
        Self::new(unit, config).ok()
    }

    fn tear_down(self) -> Result<(), UnitError> {
        self.tear_down().map(|_| ())
    }

    fn freeze(self, each: &mut dyn FnMut(UnitMemory)) -> Result<Frozen, Self> {
        let frozen = self.freeze(each);
        frozen
            .map(|(frozen, _)| frozen)
            .map_err(|(driver, _)| driver)
    }

    fn adopt(
        unit: Unit<Registers>,
        _memory: Arc<HeapTables>,
        config: Config,
        frozen: &Frozen,
        tables: &[(DomainId, Root)],
    ) -> Option<Self> {
        Self::adopt(unit, config, frozen, tables.iter().copied()).ok()
    }
}

pub(in super::super) fn play(data: &[u8]) {
    play::play::<Smmu<Unit<Registers>>>(data);
}
