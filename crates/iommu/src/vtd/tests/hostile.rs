//! A unit that answers anything.

use super::*;
use crate::hostile::{self, Hostile, ROUNDS, Truth};

/// PASIDs of 20 bits, TLBs in devices.
const TAGGED: u64 = 1 << 40 | 19 << 35 | 1 << 2;

impl Registers for Hostile {
    fn read32(&self, offset: usize) -> u32 {
        self.with(|script| {
            // The status follows the command.
            let place = if offset == 0x1c { 0x18 } else { offset };
            let good = script.register(place);
            match offset {
                0x00 => 0x10,
                0x1c => script.answer(good, 64) as u32 & !(1 << 27),
                _ => script.answer(good, 64) as u32,
            }
        })
    }
    fn write32(&self, offset: usize, value: u32) {
        let value = if offset == 0x34 { 0 } else { value };
        self.with(|script| script.registers.insert(offset, value.into()));
    }
    fn read64(&self, offset: usize) -> u64 {
        self.with(|script| match offset {
            0x80 => script.answer(script.register(0x88), 64),
            0x08 => script.answer(CAP, 64),
            0x10 => script.answer(ECAP | SCALABLE_BOTH | TAGGED, 64),
            // Register commands are done.
            0x28 => script.answer(script.register(offset), 64) & !(1 << 63) | 3 << 59,
            0xf8 => script.answer(script.register(offset), 64) & !(1 << 63) | 3 << 57,
            _ => script.answer(script.register(offset), 64),
        })
    }
    fn write64(&self, offset: usize, value: u64) {
        self.with(|script| script.registers.insert(offset, value));
    }
    fn wait(&self, round: u32) -> bool {
        self.wait(round)
    }
}

impl hostile::Driver for Vtd<Hostile, Arc<HeapTables>> {
    fn tagged(&self) -> bool {
        true
    }
    fn enable(&self) -> Result<(), UnitError> {
        self.enable()
    }
    fn disable(&self) -> Result<(), UnitError> {
        self.disable()
    }
}

fn play(unit: Hostile) -> (u32, u32) {
    let (mode, pasid_bits) = match unit.byte() % 5 {
        0 => (Mode::Legacy, 0),
        1 => (Mode::ScalableSecond, 0),
        2 => (Mode::ScalableSecond, 16),
        3 => (Mode::ScalableFirst, 0),
        _ => (Mode::ScalableFirst, 1),
    };
    let config = Config {
        mode,
        pasid_bits,
        ..Config::default()
    };
    let Ok(driver) = Vtd::new(unit.clone(), memory(), config) else {
        return (0, 0);
    };
    let support = driver.capabilities().formats[0].unwrap();
    let truth = Truth {
        root: &|address| Root {
            format: support.format,
            address,
            levels: support.levels.trailing_zeros() as u8,
        },
        reserved: driver.features.caching_mode().then_some(DomainId(0)),
        grows: true,
        most_faults: 256,
        // A few waits; by registers each command waits for itself.
        most_waits: &|_| (20 + 2 * crate::MOST_PAGE_COMMANDS as u32) * (ROUNDS + 1),
    };
    hostile::play(&unit, &driver, &truth)
}

#[test]
fn a_hostile_unit_brings_nothing_down() {
    hostile::brings_nothing_down(2000, play);
}
