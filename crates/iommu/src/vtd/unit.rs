//! The driver in the terms of the shell (`driver.rs` of the crate).

use iopt::TableMemory;
use runs::{Iova, Span};

use super::capabilities::{
    Features, GSTS, IQH, IQT, PMEN, PROTECT, PROTECTED, QUEUE, RTADDR, SCALABLE, SET_ROOT,
    TRANSLATION,
};
use super::command::Command;
use super::queue::{self, Commands};
use super::structures::Structures;
use super::{Config, Mode, Vtd, faults};
use crate::commands::CommandCounters;
use crate::driver::{Kind, Operations};
use crate::error::UnitError;
use crate::fault::Fault;
use crate::notes::Notes;
use crate::registers::{Registers, wait_until};
use crate::unit::NodeId;

/// VT-d.
#[derive(Debug)]
pub struct Hardware;

#[derive(Debug)]
pub struct Inner {
    pub(super) structures: Structures,
    pub(super) ring: Commands,
    pub(super) notes: Notes,
}

impl Kind for Hardware {
    type Config = Config;
    type Features = Features;
    type Inner = Inner;

    /// Where message-signalled interrupts are written: never translated (section 3.14 "Handling Requests
    /// to Interrupt Address Range").
    const RESERVED: &'static [Span<Iova>] = &[Span::new(0xfee0_0000, 1 << 20)];

    fn node(config: &Config) -> Option<NodeId> {
        config.node
    }

    fn counters(inner: &Inner) -> CommandCounters {
        inner.ring.counters
    }
}

impl<R: Registers, M: TableMemory> Operations for Vtd<R, M> {
    fn start(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        let Inner {
            structures, ring, ..
        } = &mut *self.inner.lock();
        self.close_queue()?;
        ring.set_up(registers)?;
        ring.open = true;
        queue::flush_writes(registers, self.features)?;
        let mode = match self.config.mode {
            Mode::Legacy => 0,
            Mode::ScalableSecond | Mode::ScalableFirst => SCALABLE,
        };
        registers.write64(RTADDR, structures.root | mode);
        queue::command(registers, SET_ROOT, true, "GSTS.RTPS = 1")?;
        let all = [
            Some(Command::AllContexts),
            self.all_pasids(),
            Some(Command::All),
        ];
        self.issue(ring, all.into_iter().flatten())?;
        queue::command(registers, TRANSLATION, true, "GSTS.TES = 1")?;
        if self.features.protected_memory() {
            registers.write32(PMEN, registers.read32(PMEN) & !PROTECT);
            wait_until(registers, "PMEN.PRS = 0", || {
                Ok(registers.read32(PMEN) & PROTECTED == 0)
            })?;
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), UnitError> {
        let ring = &mut self.inner.lock().ring;
        queue::command(&self.registers, TRANSLATION, false, "GSTS.TES = 0")?;
        self.close_queue()?;
        ring.open = false;
        Ok(())
    }

    fn drain(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let (registers, features) = (&self.registers, self.features);
        let (first, records) = faults::pending(registers, features).unwrap_or((0, 0));
        for n in 0..records {
            let alone = self.inner.lock();
            let fault = faults::take(registers, features, first + n, self.config.segment);
            // Not under the lock: the sink may flush.
            drop(alone);
            fault.into_iter().for_each(&mut *sink);
        }
        let _alone = self.inner.lock();
        u64::from(faults::take_overflow(registers))
    }
}

impl<R: Registers, M: TableMemory> Vtd<R, M> {
    #[cfg(test)]
    pub(super) fn root(&self) -> u64 {
        self.inner.lock().structures.root
    }

    /// Empties the queue, also a former owner's, and switches it off (section "Queued Invalidation
    /// Interface": only then its address may change).
    fn close_queue(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        if registers.read32(GSTS) & QUEUE == 0 {
            return Ok(());
        }
        wait_until(registers, "IQH = IQT", || {
            Ok(registers.read64(IQH) == registers.read64(IQT))
        })?;
        queue::command(registers, QUEUE, false, "GSTS.QIES = 0")
    }
}
