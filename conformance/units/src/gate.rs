//! Registers of a unit whose command queue can be stopped: by a tail that the unit does not learn, or by a command
//! that it does not know.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use iommu::Registers as _;
use qtest::Machine;

use crate::{Registers, Unit};

/// State of a command queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Queue {
    /// The unit takes commands.
    #[default]
    Open,
    /// The unit does not learn that there are commands, and a driver does not wait for long.
    Deaf,
    /// The next command is one that the unit does not know.
    Illegal,
}

/// Place of a command queue, which is a page (VT-d 11.4.9, AMD 48882 3.4.12, IHI 0070 6.3.26, RISC-V IOMMU 6.11).
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Register with its address, and bits and shift of that.
    base: usize,
    address: u64,
    shift: u32,
    /// Register with its tail, which counts so many bytes.
    tail: usize,
    counts: u64,
    /// The tail's register has 64 bits.
    wide: bool,
}

impl Place {
    const fn of(unit: Unit) -> Self {
        match unit {
            Unit::VtdLegacy | Unit::VtdSecond | Unit::VtdFirst => Self {
                base: 0x90,
                address: !0xfff,
                shift: 0,
                tail: 0x88,
                counts: 1,
                wide: true,
            },
            Unit::AmdVi => Self {
                base: 0x08,
                address: 0x000f_ffff_ffff_f000,
                shift: 0,
                tail: 0x2008,
                counts: 1,
                wide: true,
            },
            Unit::SmmuFirst | Unit::SmmuSecond | Unit::SmmuBoth => Self {
                base: 0x90,
                address: 0x000f_ffff_ffff_f000,
                shift: 0,
                tail: 0x98,
                counts: 16,
                wide: false,
            },
            Unit::Riscv | Unit::RiscvBase => Self {
                base: 24,
                address: 0x003f_ffff_ffff_fc00,
                shift: 2,
                tail: 36,
                counts: 16,
                wide: false,
            },
        }
    }
}

/// The gate before a command queue.
pub(crate) struct Gate {
    machine: Arc<Machine>,
    registers: Registers,
    place: Place,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: Queue,
    /// The tail that the unit has not learned.
    kept: Option<u64>,
    /// Commands have come while it was stopped.
    met: bool,
}

impl Gate {
    pub(crate) fn new(machine: Arc<Machine>, registers: Registers, unit: Unit) -> Arc<Self> {
        Arc::new(Self {
            machine,
            registers,
            place: Place::of(unit),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the queue.
    pub(crate) fn stop(&self, queue: Queue) {
        let state = &mut *self.state();
        (state.queue, state.met) = (queue, false);
    }

    /// Opens it; the unit learns the last tail. True when commands had come while it was stopped.
    pub(crate) fn open(&self) -> bool {
        let state = &mut *self.state();
        state.queue = Queue::Open;
        if let Some(tail) = state.kept.take() {
            self.tell(tail);
        }
        state.met
    }

    fn tell(&self, tail: u64) {
        match self.place.wide {
            true => self.registers.write64(self.place.tail, tail),
            false => self.registers.write32(self.place.tail, tail as u32),
        }
    }

    /// The driver writes its tail.
    fn tail(&self, tail: u64) {
        let state = &mut *self.state();
        match state.queue {
            Queue::Open => {}
            Queue::Deaf => {
                (state.kept, state.met) = (Some(tail), true);
                return;
            }
            Queue::Illegal => {
                let place = self.place;
                let before = match place.wide {
                    true => self.registers.read64(place.tail),
                    false => u64::from(self.registers.read32(place.tail)),
                };
                let base = (self.registers.read64(place.base) & place.address) << place.shift;
                // Where the machine fails, the unit does not stop, which the life finds.
                let at = base + ((before * place.counts) & 0xfff);
                let _ = self.machine.write(at, &[0xff; 16]);
                (state.queue, state.met) = (Queue::Open, true);
            }
        }
        self.tell(tail);
    }
}

/// Registers with a gate before the command queue.
pub(crate) struct Gated {
    pub(crate) registers: Registers,
    pub(crate) gate: Arc<Gate>,
}

impl iommu::Registers for Gated {
    type Lock = iommu::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        self.registers.read32(offset)
    }

    fn write32(&self, offset: usize, value: u32) {
        match offset == self.gate.place.tail && !self.gate.place.wide {
            true => self.gate.tail(value.into()),
            false => self.registers.write32(offset, value),
        }
    }

    fn read64(&self, offset: usize) -> u64 {
        self.registers.read64(offset)
    }

    fn write64(&self, offset: usize, value: u64) {
        match offset == self.gate.place.tail && self.gate.place.wide {
            true => self.gate.tail(value),
            false => self.registers.write64(offset, value),
        }
    }

    fn wait(&self, round: u32) -> bool {
        self.gate.state().queue != Queue::Deaf && self.registers.wait(round)
    }
}
