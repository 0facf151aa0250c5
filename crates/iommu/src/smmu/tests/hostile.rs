//! A unit that answers anything.

use iopt::format::{ArmConfig, ArmGranule};

use super::*;
use crate::hostile::{self, Hostile, ROUNDS, Truth};
use crate::smmu::capabilities::MOST;

/// Its registers.
struct Unit_(Hostile);

impl Registers for Unit_ {
    fn read32(&self, offset: usize) -> u32 {
        self.0.with(|script| {
            let good = match offset {
                0x20 => IDR0.into(),
                0x24 => IDR1.into(),
                0x28 => IDR2.into(),
                // Syncs are complete.
                _ if offset & 0xfff == 0x7f4 => 0,
                _ => script.register(offset),
            };
            script.answer(good, 32) as u32
        })
    }
    fn write32(&self, offset: usize, value: u32) {
        self.0
            .with(|script| script.registers.insert(offset, value.into()));
    }
    fn read64(&self, _offset: usize) -> u64 {
        0
    }
    fn write64(&self, _offset: usize, _value: u64) {}
    fn wait(&self, round: u32) -> bool {
        self.0.wait(round)
    }
}

impl hostile::Driver for Smmu<Unit_> {
    fn enable(&self) -> Result<(), UnitError> {
        self.enable()
    }
    fn disable(&self) -> Result<(), UnitError> {
        self.disable()
    }
}

fn play(unit: Hostile) -> (u32, u32) {
    let config = match unit.byte() % 2 {
        0 => V1,
        _ => V2,
    };
    let Ok(driver) = Smmu::new(Unit_(unit.clone()), config) else {
        return (0, 0);
    };
    // Whatever it says that it offers, one table of that.
    let stage = |format: fn(ArmConfig) -> FormatId| {
        format(ArmConfig {
            granule: ArmGranule::K4,
            input_bits: 32,
            upper: false,
        })
    };
    let (address, levels) = (1 << 20, 3);
    let shape = |format| {
        let format = stage(format);
        let root = Root {
            format,
            address,
            levels,
        };
        driver.shape(&root).is_ok().then_some(format)
    };
    let Some(format) = shape(FormatId::ArmStage1).or(shape(FormatId::ArmStage2)) else {
        return (0, 0);
    };
    // All devices of the play: up to 3 << 6.
    if driver.features.ids & 0xc0 != 0xc0 {
        return (0, 0);
    }
    let truth = Truth {
        root: &|address| Root {
            format,
            address,
            levels,
        },
        reserved: None,
        grows: true,
        most_faults: MOST + 1,
        most_waits: &|_| ROUNDS + 1,
    };
    hostile::play(&unit, &driver, &truth)
}

#[test]
fn a_hostile_unit_brings_nothing_down() {
    hostile::brings_nothing_down(2000, play);
}
