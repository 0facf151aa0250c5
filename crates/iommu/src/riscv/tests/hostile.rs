//! A unit that answers anything.

use iopt::{Cell, TableMemory};

use super::*;
use crate::hostile::{self, Hostile, ROUNDS, Truth};

/// Its registers, and the memory that it writes to.
struct Unit_(Hostile, Arc<HeapTables>);

impl Unit_ {
    fn read(&self, offset: usize, bits: u8) -> u64 {
        self.0.with(|script| {
            let good = match offset {
                0 => PLAIN,
                // Commands are fetched at once.
                32 => script.register(36),
                // Queues are on when they are enabled.
                72 | 76 | 80 => (script.register(offset) & 1) * 0x1_0001,
                _ => script.register(offset),
            };
            // Whatever it says, it walks Sv39 to Sv57 and has 56 bits of addresses.
            let sure = if offset == 0 { 7 << 9 | 56 << 32 } else { 0 };
            script.answer(good, bits) | sure
        })
    }

    fn write(&self, offset: usize, value: u64) {
        let (lost, last) = self.0.with(|script| {
            script.registers.insert(offset, value);
            let commands = (script.register(24) & !0x3ff) << 2;
            // The command before the tail is a wait.
            let last = commands + (value.wrapping_sub(1) & 0xff) * 16;
            (script.byte() > 0xe0, last)
        });
        if offset == 36 && !lost {
            let [first, address] = [0, 8].map(|word| self.1.read(last + word).unwrap_or(0));
            if first & 0x3ff == 2 {
                self.1.entries(address << 2, 1)[0].set_release(first >> 32);
            }
        }
    }
}

impl Registers for Unit_ {
    fn read32(&self, offset: usize) -> u32 {
        self.read(offset, 32) as u32
    }
    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, value.into());
    }
    fn read64(&self, offset: usize) -> u64 {
        self.read(offset, 64)
    }
    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, value);
    }
    fn wait(&self, round: u32) -> bool {
        self.0.wait(round)
    }
}

impl hostile::Driver for RiscvIommu<Unit_, Arc<HeapTables>> {
    fn enable(&self) -> Result<(), UnitError> {
        self.enable()
    }
    fn disable(&self) -> Result<(), UnitError> {
        self.disable()
    }
}

fn play(unit: Hostile) -> (u32, u32) {
    let memory = memory();
    let registers = Unit_(unit.clone(), memory.clone());
    let Ok(driver) = RiscvIommu::new(registers, memory, PROCESSES) else {
        return (0, 0);
    };
    // Three queues twice, two waits each time, and `ddtp` some times.
    let few = 40 * (ROUNDS + 1);
    let truth = Truth {
        root: &|address| root(address, 3),
        reserved: None,
        grows: true,
        most_faults: faults::RECORDS,
        most_waits: &|_| few,
    };
    hostile::play(&unit, &driver, &truth)
}

#[test]
fn a_hostile_unit_brings_nothing_down() {
    hostile::brings_nothing_down(1000, play);
}
