//! Arm's SMMU, version 3.
//!
//! Arm System Memory Management Unit Architecture Specification, SMMU architecture version 3 (IHI 0070), F.b
//! and later. [`SmmuV3`] drives the Non-secure side of one unit over [`Registers`] and over table memory for
//! what the unit reads and writes. A [`DeviceId`] is a StreamID here: what ACPI's IORT table, or a device
//! tree, makes of a requester id.
//!
//! Tables are AArch64's (VMSAv8-64), through stage 1 or through stage 2, of 4, 16 and 64 KiB, with 52 bits
//! where the unit has them, in either half of the address space for stage 1. Stage 1 is the regime of EL1,
//! with ASIDs and two privileges; tables have the options that are `iopt`'s defaults: memory types have the
//! default indices, write-back is not forced by stage 2. PASIDs are served through stage 1, and devices' TLBs
//! through both. Nested translation, bypass, page requests, stalled faults and interrupts are not driven.
//!
//! # Orders
//!
//! **Enable** (sections 3.11 and 6.3.9): what happens to devices while the unit does not translate is set to
//! "abort"; translation and all queues are switched off, whoever's they are, since the addresses of tables
//! and queues may only be written then; the addresses, and how they are read (CR1), are written; the command
//! queue is switched on, and then the event queue; all configuration and all translations are invalidated, in
//! this order, so that none is made by old configuration; translation is switched on. So there is a moment
//! in which devices are blocked, also when the unit has translated before, but none in which they pass.
//!
//! **Attach** (section 3.21.3.1): what the entry says is stored without V and invalidated (CMD_CFGI_STE, with
//! the tables that lead to it); then V is stored, and the entry invalidated once more: two batches. The unit
//! reads the words of an entry in no order and may remember them while it is invalid. Where an entry of stage
//! 1 is valid already, because of another PASID, the same is done to the context descriptor (CMD_CFGI_CD);
//! otherwise that is complete before, since nothing leads to it.
//!
//! **Detach**: V is cleared, of the context descriptor as long as another one is in use, otherwise of both;
//! the entry is invalidated; a barrier, so that nothing is translated by it any more; the domain's
//! translations (by ASID, or by VMID); if the device has a TLB, a barrier and all of that; one wait; then the
//! entry is emptied.
//!
//! **Invalidate**: `command.rs` says which commands; then, if a device of the domain has a TLB, a barrier and
//! what it must forget (section 4.5.1); one wait at the end of all. The flag Leaf is set when no tables were
//! unlinked.
//!
//! **Mapping** needs stores only.
//!
//! **Faults**: `faults.rs`.
//!
//! **Handover** (`handover.rs`): the description says whether the unit translates, where stream table and
//! queues lie, the table's shape, and the last ticket. The successor compares CR0, the base registers and the
//! command queue's indexes with it, and reads the rest from the structures.
//!
//! # Tags
//!
//! A domain's number is the ASID of its translations, or the VMID for stage 2. All of stage 1 has one VMID,
//! the last: it must not be one of stage 2 (section 3.17). So a unit with both stages keeps the domain of
//! this number from stage 2.
//!
//! # Locks and bounds
//!
//! One spinning lock covers structures, commands and events: attach, detach and flushes take turns. Each
//! holds it for a few [bounded](Registers::wait) waits. A flush looks for the devices of its domain only where
//! a device has a TLB.

mod attach;
mod capabilities;
mod command;
mod config;
mod domains;
mod entry;
mod faults;
mod handover;
mod queue;
mod streams;
mod table;
#[cfg(test)]
mod tests;

use iopt::{Chain, Invalidation, Root, TABLE_BYTES, TableMemory};
use runs::Span;
use spin::Mutex;

use crate::capabilities::{Capabilities, reaches};
use crate::commands::CommandCounters;
use crate::error::{AttachError, FlushError, UnitError};
use crate::fault::Fault;
use crate::registers::{Registers, wait_until};
use crate::unit::{DeviceId, DeviceTlb, DomainId, NodeId, Pasid, Unit};

use capabilities::{
    ATSCHK, CMDQEN, CR1, CR2, EVENTQEN, Features, IRQ_CTRL, IRQ_CTRLACK, SMMUEN, STRTAB_BASE,
    STRTAB_BASE_CFG, acknowledge, bypass, control, errors,
};
use command::Command;
use domains::Domains;
use faults::Events;
use queue::Commands;
use streams::{Place, Streams};

pub use config::{Config, ProbeError};

/// One SMMUv3, over its registers `R` and memory `M` for stream table, context descriptors and queues.
///
/// `R` are register pages 0 and 1. `M` gives pages of 4 KiB with 64-bit cells, at addresses of the unit's
/// output bits, and some structures in one piece ([`Config`]). For units without
/// [coherent walks](Capabilities::coherent_walks) it must write lines back ([`iopt::observe::NonCoherent`]),
/// as the memory of the page tables must, and what the unit writes, the event queue, must not be read from
/// caches: such memory is best not cached at all.
///
/// Dropping it changes nothing: the unit goes on, and its memory stays taken. See
/// [`tear_down`](Self::tear_down).
#[derive(Debug)]
pub struct SmmuV3<R, M> {
    registers: R,
    memory: M,
    config: Config,
    features: Features,
    capabilities: Capabilities,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    streams: Streams,
    domains: Domains,
    ring: Commands,
    events: Events,
}

impl<R: Registers, M: TableMemory> SmmuV3<R, M> {
    /// Looks what the unit can do, and takes memory for it. The unit is not changed yet; devices can
    /// be attached before it is [enabled](Self::enable).
    pub fn new(registers: R, memory: M, config: Config) -> Result<Self, ProbeError> {
        const {
            assert!(
                <M::Cell as iopt::Cell>::BYTES == 8,
                "structures have 64-bit words"
            );
        }
        let features = Features::read(&registers, &config)?;
        let capabilities = features.capabilities(&config)?;
        let bits = 52;
        reaches(&memory, bits).map_err(|last| ProbeError::Addresses { last, bits })?;
        let last = Self::last_device(&config, features);
        let streams = Streams::new(&memory, last, features).map_err(ProbeError::Memory)?;
        let mut taken = Chain::empty();
        let mut pages = [0; 3];
        for page in &mut pages {
            match memory.allocate(TABLE_BYTES as usize) {
                Ok(address) => *page = address,
                Err(cause) => {
                    streams.spans(&memory, &mut |_, span| push(&mut taken, &memory, span));
                    memory.reclaim(taken);
                    return Err(ProbeError::Memory(cause));
                }
            }
            taken.push(&memory, *page);
        }
        let [commands, status, events] = pages;
        let inner = Inner {
            streams,
            domains: Domains::default(),
            ring: queue::new([commands, status], features, 0),
            events: Self::events(events, features),
        };
        Ok(Self {
            registers,
            memory,
            config,
            features,
            capabilities,
            inner: Mutex::new(inner),
        })
    }

    fn last_device(config: &Config, features: Features) -> u32 {
        config.last_device.min(features.last_stream())
    }

    /// A page of events, of 32 bytes each.
    fn events(entries: u64, features: Features) -> Events {
        let log2 = features.queue_log2(16, 7);
        Events { entries, log2 }
    }

    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// Until it returns, devices may be blocked; after an error they are, or the unit translates. It can be
    /// called again. Faults that were not [drained](Unit::drain_faults) are forgotten. Devices' TLBs are to be
    /// switched on after it (section 6.3.9.6).
    pub fn enable(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        let Inner {
            streams,
            ring,
            events,
            ..
        } = &mut *self.inner.lock();
        bypass(registers, true)?;
        self.stop()?;
        ring.open = false;
        registers.write32(CR1, self.features.cr1());
        registers.write32(CR2, self.features.cr2());
        registers.write64(STRTAB_BASE, streams.base());
        registers.write32(STRTAB_BASE_CFG, streams.shape());
        ring.set_up(registers);
        events.set_up(registers);
        // What an earlier owner of the unit has left.
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

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name. Faults that were not [drained](Unit::drain_faults) are forgotten.
    pub fn disable(&self) -> Result<(), UnitError> {
        let ring = &mut self.inner.lock().ring;
        bypass(&self.registers, false)?;
        self.stop()?;
        ring.open = false;
        Ok(())
    }

    /// [Disables](Self::disable) the unit and gives its memory back. After an error the memory stays
    /// taken, since the unit may still read it; who wants to try again calls `disable` before.
    pub fn tear_down(self) -> Result<(R, M), UnitError> {
        self.disable()?;
        let Inner {
            streams,
            domains,
            ring,
            events,
        } = self.inner.into_inner();
        let mut chain = Chain::empty();
        let memory = self.memory;
        streams.spans(&memory, &mut |_, span| push(&mut chain, &memory, span));
        ring.for_each_page(&mut |_, page| chain.push(&memory, page));
        let pages = domains.pages().chain([events.entries]);
        pages.for_each(|page| chain.push(&memory, page));
        memory.reclaim(chain);
        Ok((self.registers, memory))
    }

    /// What the unit was told so far.
    pub fn counters(&self) -> CommandCounters {
        self.inner.lock().ring.counters
    }

    /// The registers.
    pub const fn registers(&self) -> &R {
        &self.registers
    }

    /// The memory for stream table, context descriptors and queues.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// Switches everything off, interrupts too: nobody serves them yet.
    fn stop(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        registers.write32(IRQ_CTRL, 0);
        wait_until(registers, "IRQ_CTRLACK = 0", || {
            Ok(registers.read32(IRQ_CTRLACK) == 0)
        })?;
        control(registers, 0, "CR0ACK = 0")
    }
}

/// Puts memory into a chain, in pieces of the size of its tables.
fn push<M: TableMemory>(chain: &mut Chain, memory: &M, span: Span) {
    for offset in (0..span.len).step_by(M::TABLE_BYTES as usize) {
        chain.push(memory, span.start + offset);
    }
}

impl<R, M> Unit for SmmuV3<R, M>
where
    R: Registers + Send + Sync,
    M: TableMemory + Send + Sync,
{
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn node(&self) -> Option<NodeId> {
        self.config.node
    }

    fn attach(&self, device: DeviceId, domain: DomainId, root: Root) -> Result<(), AttachError> {
        self.do_attach(Place::of(device, None), domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        self.do_detach(Place::of(device, None))
    }

    fn attach_pasid(
        &self,
        device: DeviceId,
        pasid: Pasid,
        domain: DomainId,
        root: Root,
    ) -> Result<(), AttachError> {
        self.capabilities.check_pasid(device, pasid)?;
        self.do_attach(Place::of(device, Some(pasid)), domain, root)
    }

    fn detach_pasid(&self, device: DeviceId, pasid: Pasid) -> Result<(), AttachError> {
        self.capabilities.check_pasid(device, pasid)?;
        self.do_detach(Place::of(device, Some(pasid)))
    }

    fn set_device_tlb(&self, device: DeviceId, tlb: Option<DeviceTlb>) -> Result<(), AttachError> {
        // The unit itself keeps to the device's queue depth.
        if tlb.is_some() && !self.capabilities.device_tlbs {
            return Err(AttachError::NoDeviceTlbs { device });
        }
        let streams = &mut self.inner.lock().streams;
        streams.check(device)?;
        streams.set_device_tlb(&self.memory, device, tlb.is_some())
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        if let (Some(root), Some(tag)) = (what.new_root(), self.tag(domain)) {
            self.check_root(domain, tag, root)?;
            return self.flush(domain, None);
        }
        if what.is_empty() {
            return Ok(());
        }
        // With tables and no range, what the tables held is not named.
        self.flush(domain, Some(what).filter(|what| !what.ranges().is_empty()))
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.flush(domain, None)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let (registers, memory) = (&self.registers, &self.memory);
        let places = self.inner.lock().events.places();
        for _ in 0..places {
            let alone = self.inner.lock();
            if !alone.ring.open {
                // The queue is somebody else's, or nobody's.
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
