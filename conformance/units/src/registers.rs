//! Registers of a unit.

use std::cell::RefCell;

use anyhow::Context as _;
use qtest::{Error, Machine};

/// The registers of a unit, by offset in bytes.
///
/// A driver has no words for a machine that does not answer. So such an error is kept: reads yield all
/// ones from then on, as they do on a bus where nobody is, and [`finish`](Self::finish) tells.
///
/// A command to QEMU and its answer pass through the kernel, so what this process stored before it is
/// seen by the unit, and what the unit stored is seen here afterwards.
pub struct Registers<'a> {
    machine: &'a Machine,
    base: u64,
    failed: RefCell<Option<Error>>,
}

impl<'a> Registers<'a> {
    /// The registers from `base` on.
    pub(crate) const fn new(machine: &'a Machine, base: u64) -> Self {
        Self {
            machine,
            base,
            failed: RefCell::new(None),
        }
    }

    /// Reads 4 bytes.
    pub fn read32(&self, offset: usize) -> u32 {
        self.done(self.machine.readl(self.at(offset)))
            .unwrap_or(u32::MAX)
    }

    /// Writes 4 bytes.
    pub fn write32(&self, offset: usize, value: u32) {
        self.done(self.machine.writel(self.at(offset), value));
    }

    /// Reads 8 bytes.
    pub fn read64(&self, offset: usize) -> u64 {
        self.done(self.machine.readq(self.at(offset)))
            .unwrap_or(u64::MAX)
    }

    /// Writes 8 bytes.
    pub fn write64(&self, offset: usize, value: u64) {
        self.done(self.machine.writeq(self.at(offset), value));
    }

    /// Tells whether the machine has always answered.
    pub fn finish(self) -> anyhow::Result<()> {
        match self.failed.into_inner() {
            None => Ok(()),
            Some(error) => Err(error).context("a register"),
        }
    }

    const fn at(&self, offset: usize) -> u64 {
        self.base.wrapping_add(offset as u64)
    }

    fn done<T>(&self, result: Result<T, Error>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                // The first one is the cause of the others.
                self.failed.borrow_mut().get_or_insert(error);
                None
            }
        }
    }
}
