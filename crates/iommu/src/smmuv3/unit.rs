//! The driver in the terms of the shell (`driver.rs` of the crate).

use iopt::TableMemory;

use super::capabilities::{
    ATSCHK, CMDQEN, CR1, CR2, EVENTQEN, Features, IRQ_CTRL, IRQ_CTRLACK, SMMUEN, STRTAB_BASE,
    STRTAB_BASE_CFG, acknowledge, bypass, control, errors,
};
use super::command::Command;
use super::domains::Domains;
use super::faults::Events;
use super::queue::Commands;
use super::streams::Streams;
use super::{Config, SmmuV3};
use crate::commands::CommandCounters;
use crate::driver::{Kind, Operations};
use crate::error::UnitError;
use crate::fault::Fault;
use crate::registers::{Registers, wait_until};
use crate::unit::NodeId;

/// An SMMU of version 3.
#[derive(Debug)]
pub struct Hardware;

#[derive(Debug)]
pub struct Inner {
    pub(super) streams: Streams,
    pub(super) domains: Domains,
    pub(super) ring: Commands,
    pub(super) events: Events,
}

impl Kind for Hardware {
    type Config = Config;
    type Features = Features;
    type Inner = Inner;

    fn node(config: &Config) -> Option<NodeId> {
        config.node
    }

    fn counters(inner: &Inner) -> CommandCounters {
        inner.ring.counters
    }
}

impl<R: Registers, M: TableMemory> Operations for SmmuV3<R, M> {
    fn start(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        let Inner {
            streams,
            ring,
            events,
            ..
        } = &mut *self.inner.lock();
        bypass(registers, true)?;
        self.halt()?;
        ring.open = false;
        registers.write32(CR1, self.features.cr1());
        registers.write32(CR2, self.features.cr2());
        registers.write64(STRTAB_BASE, streams.base());
        registers.write32(STRTAB_BASE_CFG, streams.shape());
        ring.set_up(registers);
        events.set_up(registers);
        // Errors left by an earlier owner of the unit.
        acknowledge(registers, errors(registers));
        let checks = if self.features.device_tlbs() {
            ATSCHK
        } else {
            0
        };
        let on = CMDQEN | checks;
        control(registers, on, "CR0ACK.CMDQEN = 1")?;
        control(registers, on | EVENTQEN, "CR0ACK.EVENTQEN = 1")?;
        // From here on the unit may use our tables, and a flush that it does not answer has failed.
        ring.open = true;
        let hypervisor = self.features.hypervisor();
        let everything = [
            Some(Command::AllStreams),
            Some(Command::Sync),
            hypervisor.then_some(Command::AllOfEl2),
            Some(Command::AllOfEl1),
        ];
        ring.issue((registers, &self.memory), everything.into_iter().flatten())?;
        control(registers, on | EVENTQEN | SMMUEN, "CR0ACK.SMMUEN = 1")
    }

    fn stop(&self) -> Result<(), UnitError> {
        let ring = &mut self.inner.lock().ring;
        bypass(&self.registers, false)?;
        self.halt()?;
        ring.open = false;
        Ok(())
    }

    fn drain(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let (registers, memory) = (&self.registers, &self.memory);
        let places = self.inner.lock().events.places();
        for _ in 0..places {
            let alone = self.inner.lock();
            if !alone.ring.open {
                // The queue is not this driver's.
                return 0;
            }
            let Some(fault) = alone.events.take(registers, memory) else {
                break;
            };
            // Not under the lock: the sink may flush.
            drop(alone);
            sink(fault);
        }
        let alone = self.inner.lock();
        u64::from(alone.ring.open && alone.events.take_overflow(registers))
    }
}

impl<R: Registers, M> SmmuV3<R, M> {
    /// Switches everything off, interrupts too: they are not served yet.
    fn halt(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        registers.write32(IRQ_CTRL, 0);
        wait_until(registers, "IRQ_CTRLACK = 0", || {
            Ok(registers.read32(IRQ_CTRLACK) == 0)
        })?;
        control(registers, 0, "CR0ACK = 0")
    }
}
