//! Registers of a unit.

use std::{sync::Arc, sync::OnceLock, thread, time::Duration};

use qtest::{Error, Machine};

/// How often a driver may look. QEMU has done what a register asks for when it answers, so the second
/// time is already one for its other threads.
const ROUNDS: u32 = 1000;

/// The registers of a unit, by offset in bytes.
///
/// A driver has no words for a machine that does not answer. So such an error is kept: reads yield all
/// ones from then on, as they do on a bus where nobody is, and the [`Rig`](crate::Rig) tells.
///
/// A command to QEMU and its answer pass through the kernel, so what this process stored before it is
/// seen by the unit, and what the unit stored is seen here afterwards.
pub struct Registers<'a> {
    machine: &'a Machine,
    base: u64,
    failed: Arc<OnceLock<Error>>,
}

impl<'a> Registers<'a> {
    /// The registers from `base` on.
    pub(crate) const fn new(machine: &'a Machine, base: u64, failed: Arc<OnceLock<Error>>) -> Self {
        Self {
            machine,
            base,
            failed,
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
                let _ = self.failed.set(error);
                None
            }
        }
    }
}

impl iommu::Registers for Registers<'_> {
    fn read32(&self, offset: usize) -> u32 {
        self.done(self.machine.readl(self.at(offset)))
            .unwrap_or(u32::MAX)
    }

    fn write32(&self, offset: usize, value: u32) {
        self.done(self.machine.writel(self.at(offset), value));
    }

    fn read64(&self, offset: usize) -> u64 {
        self.done(self.machine.readq(self.at(offset)))
            .unwrap_or(u64::MAX)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.done(self.machine.writeq(self.at(offset), value));
    }

    fn wait(&self, round: u32) -> bool {
        thread::sleep(Duration::from_millis(u64::from(round > 0)));
        round < ROUNDS
    }
}
