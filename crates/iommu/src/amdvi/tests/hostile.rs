//! A unit that answers anything.

use iopt::{Cell, TableMemory};

use super::*;
use crate::amdvi::capabilities::RING;
use crate::hostile::{self, Hostile, ROUNDS, Truth};

/// Its registers, and the memory that it writes to.
struct Unit_(Hostile, Arc<HeapTables>);

impl Registers for Unit_ {
    fn read32(&self, _offset: usize) -> u32 {
        0
    }
    fn write32(&self, _offset: usize, _value: u32) {}
    fn read64(&self, offset: usize) -> u64 {
        self.0.with(|script| {
            let control = script.register(0x18);
            let good = match offset {
                0x30 => FEATURES | guest::GUEST,
                // Commands are fetched at once.
                0x2000 => script.register(0x2008),
                0x2020 if control & 1 == 1 => (control >> 8 & 1 << 4) | (control << 1 & 1 << 3),
                0x2020 => 0,
                _ => script.register(offset),
            };
            script.answer(good, 32)
        })
    }
    fn write64(&self, offset: usize, value: u64) {
        let (lost, last) = self.0.with(|script| {
            script.registers.insert(offset, value);
            let commands = script.register(0x08) & 0x000f_ffff_ffff_f000;
            // The command before the tail is a wait.
            let last = commands + (value.wrapping_sub(16) & 0xff0);
            (script.byte() > 0xe0, last)
        });
        if offset == 0x2008 && !lost {
            let [first, ticket] = [0, 8].map(|word| self.1.read(last + word).unwrap_or(0));
            if first >> 60 == 1 {
                let status = self.1.entries(first & 0x000f_ffff_ffff_fff8, 1);
                status[0].set_release(ticket);
            }
        }
    }
    fn wait(&self, round: u32) -> bool {
        self.0.wait(round)
    }
}

impl hostile::Driver for AmdVi<Unit_, Arc<HeapTables>> {
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
    let (mode, pasid_bits) = match unit.byte() % 3 {
        0 => (Mode::Host, 0),
        1 => (Mode::Guest, 0),
        _ => (Mode::Guest, 12),
    };
    let config = Config {
        mode,
        pasid_bits,
        device_tlbs: true,
        ..CONFIG
    };
    let memory = memory();
    let registers = Unit_(unit.clone(), memory.clone());
    let Ok(driver) = AmdVi::new(registers, memory, config) else {
        return (0, 0);
    };
    // A few waits, or one for each of the log's events; a unit that says it cannot forget all at once
    // takes more to enable.
    let few = (RING as u32 + 20) * (ROUNDS + 1);
    let truth = Truth {
        root: &|address| match mode {
            Mode::Host => root(address, 3),
            Mode::Guest => guest::table(address),
        },
        reserved: None,
        grows: mode == Mode::Guest,
        most_faults: RING,
        most_waits: &|operation| if operation % 8 == 5 { 20 * few } else { few },
    };
    hostile::play(&unit, &driver, &truth)
}

#[test]
fn a_hostile_unit_brings_nothing_down() {
    hostile::brings_nothing_down(1000, play);
}
