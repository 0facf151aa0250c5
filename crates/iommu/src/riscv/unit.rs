//! The driver in the terms of the shell (`driver.rs` of the crate).

use core::iter;

use iopt::{Root, TABLE_BYTES, TableMemory};

use super::capabilities::{
    BARE, DDTP, DDTP_PPN, FCTL, FOREIGN, Features, LOST, MODE, OFF, PQCSR, point, switch,
};
use super::command::Command;
use super::devices::Devices;
use super::flush::EVERYTHING;
use super::queue::{self, Commands};
use super::{Config, RiscvIommu, faults};
use crate::commands::CommandCounters;
use crate::driver::{Kind, Operations};
use crate::error::UnitError;
use crate::fault::Fault;
use crate::registers::Registers;
use crate::unit::{DomainId, NodeId};

/// An IOMMU of RISC-V.
#[derive(Debug)]
pub struct Hardware;

#[derive(Debug)]
pub struct Inner {
    pub(super) devices: Devices,
    pub(super) ring: Commands,
    /// The page of the fault queue.
    pub(super) faults: u64,
    /// `None` while no device was said to have a TLB.
    pub(super) tlbs: Option<Tlbs>,
}

/// Limits of TLBs in devices.
#[derive(Debug)]
pub(super) struct Tlbs {
    /// The fewest invalidations that one of them takes at a time. Functions of one device share its queue, so the
    /// commands to all are counted together.
    pub(super) depth: usize,
    /// An empty table, of the first stage as of the second.
    pub(super) empty: u64,
}

/// Bytes of the first table of the second stage.
pub(super) const ROOT_BYTES: u64 = 4 * TABLE_BYTES;

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

impl Inner {
    /// A root of the domain that is not the one that is asked for.
    pub(super) fn other_root<M: TableMemory>(
        &self,
        memory: &M,
        domain: DomainId,
        asked: Root,
    ) -> Option<Root> {
        let other = self.devices.members(memory).find(|member| {
            let root = member.there.root;
            // One that is leaving.
            let blocked = self
                .tlbs
                .as_ref()
                .is_some_and(|tlbs| tlbs.empty == root.address);
            u32::from(member.there.domain) == domain.0 && root != asked && !blocked
        });
        other.map(|member| member.there.root)
    }
}

impl<R: Registers, M: TableMemory> Operations for RiscvIommu<R, M> {
    fn start(&self) -> Result<(), UnitError> {
        let (registers, memory) = (&self.registers, &self.memory);
        let inner = &mut *self.inner.lock();
        let before = registers.read64(DDTP) & (MODE | DDTP_PPN);
        let foreign = registers.read32(FCTL) & FOREIGN != 0;
        let wanted = inner.devices.registers(memory, self.config.device_bits);
        let stays = !foreign && wanted.clone().any(|value| value == before);
        if !stays && (foreign || before & MODE != BARE) {
            self.block()?;
        }
        Self::stop_queues(registers)?;
        if foreign {
            registers.write32(FCTL, registers.read32(FCTL) & !FOREIGN);
            let value = registers.read32(FCTL);
            if value & FOREIGN != 0 {
                let (register, value) = ("fctl", value.into());
                return Err(UnitError::Refused { register, value });
            }
        }
        inner.ring.start(registers)?;
        faults::start(registers, inner.faults)?;
        // From here on the unit may use our tables, and a flush that it does not answer has failed.
        inner.ring.open = true;
        let mut taken = stays;
        for value in wanted.filter(|_| !stays) {
            // A mode that the unit has not becomes another (WARL), and none but Off and Bare may be before
            // the next.
            taken = point(registers, value)? == value;
            if taken {
                break;
            }
            self.block()?;
        }
        if !taken {
            let (register, value) = ("ddtp", registers.read64(DDTP));
            return Err(UnitError::Refused { register, value });
        }
        let Inner {
            devices,
            ring,
            tlbs,
            ..
        } = inner;
        let everything = [
            Command::Device(None),
            Command::Barrier,
            Command::First(None),
            Command::Second,
        ];
        let all = iter::once(EVERYTHING);
        let of_devices = self.of_devices(tlbs.as_ref(), devices.members(memory), all);
        let commands = everything.into_iter().chain(of_devices);
        ring.issue((registers, memory), commands)
    }

    fn stop(&self) -> Result<(), UnitError> {
        let ring = &mut self.inner.lock().ring;
        self.block()?;
        let value = point(&self.registers, BARE)?;
        if value & MODE != BARE {
            let register = "ddtp";
            return Err(UnitError::Refused { register, value });
        }
        Self::stop_queues(&self.registers)?;
        ring.open = false;
        Ok(())
    }

    fn drain(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        for _ in 0..faults::RECORDS {
            let alone = self.inner.lock();
            if !alone.ring.open {
                // The queue is not this driver's.
                return 0;
            }
            let Some(fault) = faults::take(&self.registers, &self.memory, alone.faults) else {
                return u64::from(faults::take_overflow(&self.registers));
            };
            // Not under the lock: the sink may flush.
            drop(alone);
            sink(fault);
        }
        0
    }
}

impl<R: Registers, M: TableMemory> RiscvIommu<R, M> {
    /// True when leaves may have memory types (Svpbmt:
    /// [`with_memory_types`](iopt::format::RiscVTables::with_memory_types)).
    pub const fn memory_types(&self) -> bool {
        self.features.memory_types()
    }

    /// Off. The page number stays as it is.
    fn block(&self) -> Result<(), UnitError> {
        let page = self.registers.read64(DDTP) & DDTP_PPN;
        let value = point(&self.registers, page | OFF)?;
        if value & MODE != OFF {
            let register = "ddtp";
            return Err(UnitError::Refused { register, value });
        }
        Ok(())
    }

    fn stop_queues(registers: &R) -> Result<(), UnitError> {
        // Page requests have a queue only where there is ATS; elsewhere the register is 0.
        switch(registers, (PQCSR, "pqcsr.pqon = 0, busy = 0", LOST), false)?;
        faults::stop(registers)?;
        queue::stop(registers)
    }
}
