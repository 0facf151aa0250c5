//! AMD's IOMMU, AMD-Vi.
//!
//! AMD I/O Virtualization Technology (IOMMU) Specification, publication 48882, revision 3.08 and later.
//! [`AmdVi`] drives one unit (one IVHD block of ACPI's IVRS table) over [`Registers`] and over table
//! memory for what the unit reads and writes.
//!
//! # Modes
//!
//! A unit works in one [`Mode`]. With host tables (AMD v1, [`FormatId::AmdV1`](iopt::FormatId::AmdV1)) of any
//! number of levels up to the unit's most, tables may grow, and a device that asks for translations (ATS)
//! is refused them until its TLB was [announced](Unit::set_device_tlb). With guest tables (v2) requests with
//! a PASID have tables of their own ([`Config::pasid_bits`]), and devices are refused translations;
//! `guest.rs` has the orders. Nested translation, guest tables of 5 levels, page requests, interrupt
//! remapping and virtual APICs are not driven; interrupts pass unchanged.
//!
//! # Orders
//!
//! **Enable** (sections 2.4 and 2.5 on the buffers, 3.4 on the registers): command buffer and event log,
//! whoever's they are, are stopped; the exclusion range is switched off, since it would let devices
//! through; the addresses of device table, command buffer and event log are written, both pointers 0;
//! command buffer and event log (and guest tables, GTEn, without which everything would pass) are switched
//! on, then translation, for only then the unit fetches commands; everything is invalidated, by
//! INVALIDATE_IOMMU_ALL or, where the unit has it not, for each device and each domain. Translation that was on already stays on all the time; what was cached for
//! its former owner may be used until `enable` returns.
//!
//! **Attach**: the domain, then the first word of the device table entry (`table.rs`), then
//! INVALIDATE_DEVTAB_ENTRY, since the entry that blocks may be cached. Where absent entries are cached
//! ([`Config::caches_not_present`]), the domain's translations are invalidated behind it.
//!
//! **Detach**: the entry blocks; INVALIDATE_DEVTAB_ENTRY; a barrier, so that nothing is translated by
//! the old entry any more; INVALIDATE_IOMMU_PAGES for all of the domain; the device's TLB; one wait; then
//! the entry is emptied.
//!
//! **Invalidate**: `commands.rs` of the crate says which pages; one wait at the end of all. The bit PDE
//! (upper levels too) is set when tables were unlinked, and always where absent entries are cached.
//!
//! **TLBs in devices**: INVALIDATE_IOTLB_PAGES for each device of the domain that has one, in the same
//! batch, behind a barrier: the unit may answer a device from its own caches, which must have forgotten.
//! `queue.rs` says what becomes of a device that does not answer. TLBs are off while the unit is
//! [disabled](AmdVi::disable): what a device keeps over that time is not invalidated.
//!
//! **A new root** ([`Invalidation::new_root`]): stored in the entry of each of the domain's devices, then
//! as for a detach, with one INVALIDATE_DEVTAB_ENTRY for each device.
//!
//! **Mapping** needs stores only, but where absent entries are cached.
//!
//! **Faults**: `faults.rs`.
//!
//! **Handover**: the description says whether the unit translates, the mode, the bits of a PASID, where
//! device table, command buffer and event log lie, the last ticket, and which devices were ever attached;
//! members and TLBs are noted behind the ticket (`notes.rs`). The successor compares Control, Status, the
//! three base address registers and the command buffer's pointers with it.
//!
//! # Locks and bounds
//!
//! One spinning lock covers table, commands and log: attach, detach and flushes take turns. Each holds
//! it for a few [bounded](Registers::wait) waits; only `enable`, on a unit without INVALIDATE_IOMMU_ALL,
//! has some hundreds.

mod attach;
mod capabilities;
mod command;
mod config;
mod faults;
mod flush;
mod guest;
mod handover;
mod queue;
mod table;
#[cfg(test)]
mod tests;

use core::iter::Empty;

use iopt::{Chain, Invalidation, Root, TABLE_BYTES, TableMemory};
use runs::Span;
use spin::Mutex;

use crate::capabilities::{Capabilities, reaches};
use crate::commands::{self, Block, CommandCounters};
use crate::error::{AttachError, FlushError, UnitError};
use crate::fault::Fault;
use crate::notes::Notes;
use crate::registers::{Registers, wait_until};
use crate::unit::{DeviceId, DeviceTlb, DomainId, NodeId, Pasid, Unit};

use capabilities::{
    COHERENT, DEVICE_TABLE, EXCLUSION, FETCH, FETCHING, Features, GUEST, LOG, LOGGING, RING,
    STATUS, TRANSLATE, control,
};
use command::{Command, MOST_PAGES};
use faults::{Log, Taken};
use queue::Commands;
use table::DeviceTable;

pub use config::{Config, Mode, ProbeError};

/// One AMD-Vi unit, over its registers `R` and memory `M` for device table, command buffer and event
/// log.
///
/// `M` gives pages of 4 KiB with 64-bit cells, at addresses below the unit's `host_bits`, and the device
/// table in one piece ([`Config::last_device`]). Tables and entries are read through the processor's
/// caches.
///
/// Dropping it changes nothing: the unit goes on, and its memory stays taken. See
/// [`tear_down`](Self::tear_down).
#[derive(Debug)]
pub struct AmdVi<R, M> {
    registers: R,
    memory: M,
    config: Config,
    features: Features,
    capabilities: Capabilities,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    table: DeviceTable,
    ring: Commands,
    notes: Notes,
}

/// What stands for requests without a PASID (GIoV).
const NO_PASID: u32 = 0;

/// What is not memory to devices (section 2.1.2, special address ranges): message-signalled
/// interrupts, and what HyperTransport keeps below 1 TiB.
const RESERVED: [Span; 2] = [
    Span::new(0xfee0_0000, 1 << 20),
    Span::new(0xfd_0000_0000, 0x3_0000_0000),
];

impl<R: Registers, M: TableMemory> AmdVi<R, M> {
    /// Looks what the unit can do, and takes memory for it. The unit is not changed yet; devices can
    /// be attached before it is [enabled](Self::enable).
    pub fn new(registers: R, memory: M, config: Config) -> Result<Self, ProbeError> {
        const {
            assert!(
                <M::Cell as iopt::Cell>::BYTES == 8,
                "structures have 64-bit words"
            );
        }
        let features = Features::read(&registers)?;
        let capabilities = features.capabilities(&config)?;
        let bits = 52;
        reaches(&memory, bits).map_err(|last| ProbeError::Addresses { last, bits })?;
        let table = DeviceTable::new(&memory, config.last_device).map_err(ProbeError::Memory)?;
        let mut taken = Chain::empty();
        table.pages().for_each(|page| taken.push(&memory, page));
        let mut pages = [0; 3];
        for page in &mut pages {
            match memory.allocate(TABLE_BYTES as usize) {
                Ok(address) => *page = address,
                Err(cause) => {
                    memory.reclaim(taken);
                    return Err(ProbeError::Memory(cause));
                }
            }
            taken.push(&memory, *page);
        }
        let [entries, status, log] = pages;
        let log = Log {
            entries: log,
            segment: config.segment,
        };
        Ok(Self {
            registers,
            memory,
            config,
            features,
            capabilities,
            inner: Mutex::new(Inner {
                table,
                ring: queue::new([entries, status], log, 0),
                notes: Notes::new(Some(status)),
            }),
        })
    }

    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// After an error translation may be on or off; it can be called again. Faults that were not
    /// [drained](Unit::drain_faults) are forgotten.
    pub fn enable(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        let Inner { table, ring, .. } = &mut *self.inner.lock();
        let guest = match self.config.mode {
            Mode::Host => 0,
            Mode::Guest => GUEST,
        };
        self.stop(GUEST & !guest)?;
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

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name. Faults that were not [drained](Unit::drain_faults) are forgotten.
    pub fn disable(&self) -> Result<(), UnitError> {
        let ring = &mut self.inner.lock().ring;
        self.stop(TRANSLATE)?;
        ring.open = false;
        Ok(())
    }

    /// [Disables](Self::disable) the unit and gives its memory back. After an error the memory stays
    /// taken, since the unit may still read it; who wants to try again calls `disable` before.
    pub fn tear_down(self) -> Result<(R, M), UnitError> {
        self.disable()?;
        let Inner { table, ring, notes } = self.inner.into_inner();
        let mut chain = Chain::empty();
        let memory = self.memory;
        for (_, first) in table.guests(&memory) {
            let levels = guest::levels(self.config.pasid_bits);
            guest::for_each_page(&memory, first, levels, &mut |page| {
                chain.push(&memory, page);
            });
        }
        let pages = table.pages().chain(notes.further(&memory));
        pages.for_each(|page| chain.push(&memory, page));
        ring.for_each_page(&mut |_, page| chain.push(&memory, page));
        chain.push(&memory, ring.queue.log.entries);
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

    /// The memory for device table, command buffer and event log.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// Stops command buffer and event log, and what else is named.
    fn stop(&self, also: u64) -> Result<(), UnitError> {
        let registers = &self.registers;
        control(registers, 0, FETCH | LOG | also);
        wait_until(registers, "Status.CmdBufRun and EventLogRun = 0", || {
            Ok(registers.read64(STATUS) & (FETCHING | LOGGING) == 0)
        })
    }
}

impl<R, M> Unit for AmdVi<R, M>
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

    fn reserved(&self, _device: DeviceId, sink: &mut dyn FnMut(Span)) {
        RESERVED.into_iter().for_each(sink);
    }

    fn attach(&self, device: DeviceId, domain: DomainId, root: Root) -> Result<(), AttachError> {
        match self.config.mode {
            Mode::Host => self.do_attach(device, domain, root),
            Mode::Guest => self.attach_guest(device, NO_PASID, domain, root),
        }
    }

    fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        match self.config.mode {
            Mode::Host => self.do_detach(device),
            Mode::Guest => self.detach_guest(device, NO_PASID),
        }
    }

    fn attach_pasid(
        &self,
        device: DeviceId,
        pasid: Pasid,
        domain: DomainId,
        root: Root,
    ) -> Result<(), AttachError> {
        self.capabilities.check_pasid(device, pasid)?;
        self.attach_guest(device, pasid.0, domain, root)
    }

    fn detach_pasid(&self, device: DeviceId, pasid: Pasid) -> Result<(), AttachError> {
        self.capabilities.check_pasid(device, pasid)?;
        self.detach_guest(device, pasid.0)
    }

    fn set_device_tlb(&self, device: DeviceId, tlb: Option<DeviceTlb>) -> Result<(), AttachError> {
        self.do_set_device_tlb(device, tlb)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        let Some(tag) = self.tag(domain) else {
            // No device can be in it.
            return Ok(());
        };
        if let Some(root) = what.new_root() {
            if self.config.mode == Mode::Host {
                return self.set_root(domain, tag, root);
            }
            self.set_guest_root(domain, tag, root)?;
            return self.invalidate_domain(domain);
        }
        if what.is_empty() {
            return Ok(());
        }
        // With tables and no range, what the tables held is not named.
        let named = !what.ranges().is_empty();
        let blocks = named.then(|| commands::blocks(what, MOST_PAGES)).flatten();
        let tables = what.tables_unlinked() || self.config.caches_not_present;
        match self.config.mode {
            Mode::Host => self.flush(domain, tag, blocks, tables),
            Mode::Guest => self.flush_guest(domain, tag, blocks, tables),
        }
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        let all = None::<Empty<Block>>;
        match (self.tag(domain), self.config.mode) {
            (Some(tag), Mode::Host) => self.flush(domain, tag, all, true),
            (Some(tag), Mode::Guest) => self.flush_guest(domain, tag, all, true),
            (None, _) => Ok(()),
        }
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let (registers, memory) = (&self.registers, &self.memory);
        for _ in 0..RING {
            let alone = self.inner.lock();
            if !alone.ring.open {
                // The log is somebody else's, or nobody's.
                return 0;
            }
            let Some(taken) = alone.ring.queue.log.take(registers, memory) else {
                return u64::from(alone.ring.queue.log.take_overflow(registers, memory));
            };
            // Not under the lock: the sink may flush.
            drop(alone);
            match taken {
                Taken::Fault(fault) => sink(fault),
                Taken::Command => {}
                // Nor have those behind it.
                Taken::Lost => return 1,
            }
        }
        0
    }
}
