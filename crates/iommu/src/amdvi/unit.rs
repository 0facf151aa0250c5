//! The driver in the terms of the shell (`driver.rs` of the crate).

use iopt::TableMemory;
use runs::{Iova, Span};

use super::capabilities::{
    COHERENT, DEVICE_TABLE, EXCLUSION, FETCH, FETCHING, Features, GUEST, LOG, LOGGING, RING,
    STATUS, TRANSLATE, control,
};
use super::command::Command;
use super::faults::LogEntry;
use super::queue::Commands;
use super::table::DeviceTable;
use super::{AmdVi, Config, Mode};
use crate::commands::CommandCounters;
use crate::driver::{Kind, Operations};
use crate::error::UnitError;
use crate::fault::Fault;
use crate::notes::Notes;
use crate::registers::{Registers, wait_until};
use crate::unit::NodeId;

/// AMD-Vi.
#[derive(Debug)]
pub struct Hardware;

#[derive(Debug)]
pub struct Inner {
    pub(super) table: DeviceTable,
    pub(super) ring: Commands,
    pub(super) notes: Notes,
}

impl Kind for Hardware {
    type Config = Config;
    type Features = Features;
    type Inner = Inner;

    /// Addresses that are not memory to devices (section 2.1.2, special address ranges):
    /// message-signalled interrupts, and HyperTransport's range below 1 TiB.
    const RESERVED: &'static [Span<Iova>] = &[
        Span::new(0xfee0_0000, 1 << 20),
        Span::new(0xfd_0000_0000, 0x3_0000_0000),
    ];

    fn node(config: &Config) -> Option<NodeId> {
        config.node
    }

    fn counters(inner: &Inner) -> CommandCounters {
        inner.ring.counters
    }
}

impl<R: Registers, M: TableMemory> Operations for AmdVi<R, M> {
    fn start(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        let Inner { table, ring, .. } = &mut *self.inner.lock();
        let guest = match self.config.mode {
            Mode::Host => 0,
            Mode::Guest => GUEST,
        };
        self.halt(GUEST & !guest)?;
        registers.write64(EXCLUSION, 0);
        ring.set_up(registers);
        ring.queue.log.set_up(registers, &self.memory);
        registers.write64(DEVICE_TABLE, table.register());
        // From here on the unit may use our tables, and a flush that it does not answer has failed.
        ring.open = true;
        control(registers, COHERENT | FETCH | LOG | guest, 0);
        control(registers, TRANSLATE, 0);
        wait_until(registers, "Status.CmdBufRun and EventLogRun = 1", || {
            Ok(registers.read64(STATUS) & (FETCHING | LOGGING) == FETCHING | LOGGING)
        })?;
        let devices = table.devices();
        let all = self.features.invalidates_all();
        // Each device, a barrier, and each domain.
        let count = if all { 1 } else { devices + 1 + (1 << 16) };
        let everything = (0..count).map(move |n| match n.checked_sub(devices + 1) {
            _ if all => Command::All,
            Some(domain) => Command::domain(domain as u16),
            None if n == devices => Command::Barrier,
            None => Command::Device { source: n as u16 },
        });
        ring.issue((registers, &self.memory), everything)
    }

    fn stop(&self) -> Result<(), UnitError> {
        let ring = &mut self.inner.lock().ring;
        self.halt(TRANSLATE)?;
        ring.open = false;
        Ok(())
    }

    fn drain(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let (registers, memory) = (&self.registers, &self.memory);
        for _ in 0..RING {
            let mut alone = self.inner.lock();
            if !alone.ring.open {
                // The log is not this driver's.
                return 0;
            }
            let Some(taken) = alone.ring.queue.log.take(registers, memory) else {
                return u64::from(alone.ring.queue.log.take_overflow(registers, memory));
            };
            // Not under the lock: the sink may flush.
            drop(alone);
            match taken {
                LogEntry::Fault(fault) => sink(fault),
                LogEntry::Command => {}
                // Entries behind it have not arrived either.
                LogEntry::Lost => return 1,
            }
        }
        0
    }
}

impl<R, M> AmdVi<R, M>
where
    R: Registers,
{
    /// Stops command buffer and event log, and what else is named.
    fn halt(&self, also: u64) -> Result<(), UnitError> {
        let registers = &self.registers;
        control(registers, 0, FETCH | LOG | also);
        wait_until(registers, "Status.CmdBufRun and EventLogRun = 0", || {
            Ok(registers.read64(STATUS) & (FETCHING | LOGGING) == 0)
        })
    }
}
