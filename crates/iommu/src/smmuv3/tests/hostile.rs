//! A unit that answers anything.

use iopt::{Cell, TableMemory};

use super::*;
use crate::hostile::{self, Hostile, ROUNDS, Truth};

/// Its registers, and the memory that it writes to.
struct Unit_(Hostile, Arc<HeapTables>);

impl Registers for Unit_ {
    fn read32(&self, offset: usize) -> u32 {
        self.0.with(|script| {
            let good = match offset {
                0x00 => (IDR0 | MSI).into(),
                0x04 => IDR1.into(),
                0x0c => IDR3.into(),
                0x14 => IDR5.into(),
                // What was written is in force, and commands are taken at once.
                0x24 => script.register(0x20),
                0x44 => script.register(0x44) & !(1 << 31),
                0x54 => script.register(0x50),
                0x60 => script.register(0x64),
                0x9c => script.register(0x98),
                _ => script.register(offset),
            };
            script.answer(good, 32) as u32
        })
    }
    fn write32(&self, offset: usize, value: u32) {
        let (lost, last) = self.0.with(|script| {
            script.registers.insert(offset, value.into());
            let commands = script.register(0x90) & 0x000f_ffff_ffff_f000;
            // The command before the tail is a wait.
            let last = commands + u64::from(value.wrapping_sub(1) & 0xff) * 16;
            (script.byte() > 0xe0, last)
        });
        if offset == 0x98 && !lost {
            let [first, address] = [0, 8].map(|word| self.1.read(last + word).unwrap_or(0));
            if first & 0x30ff == 0x1046 {
                let status = self.1.entries(address & 0x000f_ffff_ffff_fff8, 1);
                status[0].set_release(first >> 32);
            }
        }
    }
    fn read64(&self, _offset: usize) -> u64 {
        0
    }
    fn write64(&self, offset: usize, value: u64) {
        self.0.with(|script| script.registers.insert(offset, value));
    }
    fn wait(&self, round: u32) -> bool {
        self.0.wait(round)
    }
}

impl hostile::Driver for SmmuV3<Unit_, Arc<HeapTables>> {
    fn enable(&self) -> Result<(), UnitError> {
        self.enable()
    }
    fn disable(&self) -> Result<(), UnitError> {
        self.disable()
    }
}

fn play(unit: Hostile) -> (u32, u32) {
    let registers = Unit_(unit.clone(), memory());
    let memory = registers.1.clone();
    let Ok(driver) = SmmuV3::new(registers, memory, CONFIG) else {
        return (0, 0);
    };
    // What it offers may be anything, but the operations want one table, and four devices.
    let can = driver.capabilities();
    let known = [root(0), second(0)]
        .into_iter()
        .find(|root| can.check(root).is_ok());
    let room = driver.inner.lock().streams.check(DeviceId(3 << 6)).is_ok();
    let (Some(known), true) = (known, room) else {
        return (0, 0);
    };
    let truth = Truth {
        root: &|address| Root { address, ..known },
        reserved: None,
        grows: true,
        most_faults: 128,
        // A few waits; a queue of two places has one for each command.
        most_waits: &|_| (20 + 2 * crate::MOST_PAGE_COMMANDS as u32) * (ROUNDS + 1),
    };
    hostile::play(&unit, &driver, &truth)
}

#[test]
fn a_hostile_unit_brings_nothing_down() {
    hostile::brings_nothing_down(1000, play);
}
