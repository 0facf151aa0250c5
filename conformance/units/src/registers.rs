//! Registers of a unit.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::ensure;
use qtest::{Error, Machine, edu::Edu};

use crate::At;

/// How often a driver may look. QEMU has done what a register asks for when it answers, so the second
/// time is already one for its other threads.
const ROUNDS: u32 = 1000;

/// The registers of a unit, by offset in bytes.
///
/// A driver has no words for a machine that does not answer. So such an error is kept: reads yield all
/// ones from then on, as they do on a bus without a device, and the [`Rig`](crate::Rig) tells.
///
/// A command to QEMU and its answer pass through the kernel, so what this process stored before it is
/// seen by the unit, and what the unit stored is seen here afterwards.
pub struct Registers {
    machine: Arc<Machine>,
    base: u64,
    failed: Arc<OnceLock<Error>>,
}

impl Registers {
    /// The registers from `base` on.
    pub(crate) const fn new(
        machine: Arc<Machine>,
        base: u64,
        failed: Arc<OnceLock<Error>>,
    ) -> Self {
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

impl iommu::Registers for Registers {
    type Lock = iommu::SpinLock;

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

/// Registers behind which devices do not rest: after each access one copies, if that is wanted.
pub(crate) struct Busy<'a> {
    registers: Registers,
    machine: &'a Machine,
    edu: u64,
    from: At,
    to: At,
    wanted: AtomicBool,
    copies: AtomicU64,
    wrong: OnceLock<String>,
}

impl<'a> Busy<'a> {
    pub(crate) const fn new(
        registers: Registers,
        machine: &'a Machine,
        edu: u64,
        from: At,
        to: At,
    ) -> Self {
        Self {
            registers,
            machine,
            edu,
            from,
            to,
            wanted: AtomicBool::new(false),
            copies: AtomicU64::new(0),
            wrong: OnceLock::new(),
        }
    }

    /// From now on.
    pub(crate) fn begin(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// No more. How many copies there were, all of which have arrived.
    pub(crate) fn end(&self) -> anyhow::Result<u64> {
        self.wanted.store(false, Ordering::Relaxed);
        let wrong = self.wrong.get();
        ensure!(wrong.is_none(), "{}", wrong.map_or("", String::as_str));
        Ok(self.copies.load(Ordering::Relaxed))
    }

    fn after(&self) {
        if self.wanted.load(Ordering::Relaxed) {
            let nth = self.copies.fetch_add(1, Ordering::Relaxed);
            if let Err(wrong) = self.copy(nth) {
                let _ = self.wrong.set(format!("{wrong:#}"));
            }
        }
    }

    fn copy(&self, nth: u64) -> anyhow::Result<()> {
        let mark = 0x5eed_0000_0000_0001 ^ nth << 8;
        self.machine.writeq(self.from.address, mark)?;
        self.machine.writeq(self.to.address, !mark)?;
        let edu = Edu::new(self.machine, self.edu)?;
        edu.read(self.from.iova, 0, 8)?;
        edu.write(self.to.iova, 0, 8)?;
        let found = self.machine.readq(self.to.address)?;
        ensure!(found == mark, "copy {nth}: {found:#x}, not {mark:#x}");
        Ok(())
    }
}

impl iommu::Registers for &Busy<'_> {
    type Lock = iommu::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        let value = self.registers.read32(offset);
        self.after();
        value
    }

    fn write32(&self, offset: usize, value: u32) {
        self.registers.write32(offset, value);
        self.after();
    }

    fn read64(&self, offset: usize) -> u64 {
        let value = self.registers.read64(offset);
        self.after();
        value
    }

    fn write64(&self, offset: usize, value: u64) {
        self.registers.write64(offset, value);
        self.after();
    }

    fn wait(&self, round: u32) -> bool {
        self.registers.wait(round)
    }
}
