//! The RISC-V IOMMU.
//!
//! RISC-V IOMMU Architecture Specification, version 1.0 and later; chapters and sections are named by their
//! titles. [`RiscvIommu`] drives one unit over [`Registers`] and over table memory for what the unit reads
//! and writes.
//!
//! A device is attached to a table of the first stage (Sv39, Sv48, Sv57:
//! [`FormatId::RiscV`](iopt::FormatId::RiscV)) or of the second (Sv39x4, Sv48x4, Sv57x4:
//! [`FormatId::RiscVG`](iopt::FormatId::RiscVG)), the other stage being Bare. Requests with a PASID go through
//! first-stage tables, also those of supervisor privilege
//! ([`with_supervisor_requests`](iopt::format::RiscVTables::with_supervisor_requests)); those with PASID 0 as those
//! without one ([`Config::pasid_bits`]). Both stages together, page requests, translation of message-signalled interrupts and
//! the unit's own interrupts are not driven: interrupts of devices are writes like others, and need a
//! mapping.
//!
//! # Orders
//!
//! **Enable** (sections "Guidelines for initialization", "Device-directory-table pointer"): a directory of
//! somebody else is left by way of Off, which blocks all devices for a moment; Bare is left on and our own
//! directory stays. All queues, whoever's they are, are stopped; fctl is set to little-endian order and
//! 64-bit tables (only with the unit Off); command queue and fault queue are started; `ddtp` is written,
//! with the fewest levels that hold the devices' ids and that the unit takes; everything is invalidated,
//! in devices' TLBs too. What was cached for a former owner may be used until `enable` returns.
//!
//! **Disable**: Off, which ends what is under way, then Bare, then the queues.
//!
//! **Attach**: the context, V last (`entry.rs`), and nothing else: the unit caches no context and no entry
//! without V ("Caching in-memory data structures"). So **mapping** needs stores only, too.
//!
//! **Detach** ("Changing device directory table entry", "Changing process directory table entry"): V of the
//! context is cleared; IODIR.INVAL_DDT, or IODIR.INVAL_PDT while the device has other processes; a fence, so
//! that nothing is translated by the old context any more; IOTINVAL.VMA for the PSCID, or IOTINVAL.VMA and
//! IOTINVAL.GVMA for the GSCID; one wait; then the context is emptied, and a process directory without
//! processes given back (what was translated through those that were there before has gone with them).
//! With a TLB in the device the context blocks, but stays valid, since only through such a one its answers
//! are taken (`entry.rs`); after the same commands come a fence and an ATS.INVAL for all; behind that wait V
//! is cleared, with an IODIR.INVAL_DDT and a wait of its own.
//!
//! **Invalidate**: `commands.rs` of the crate says which pages: IOTINVAL.VMA for first-stage tables,
//! IOTINVAL.GVMA for second-stage tables; then a fence and ATS.INVAL for each device of the domain with a TLB;
//! one wait at the end of all. When tables were unlinked, entries above the leaves must go: by NL, or,
//! where the unit has it not, with all of the domain.
//!
//! **Faults**: `faults.rs`.
//!
//! **Handover**: `handover.rs`.
//!
//! # Locks and bounds
//!
//! One spinning lock covers directories, commands and faults: attach, detach and flushes take turns. Each
//! holds it for a few [bounded](Registers::wait) waits.

mod attach;
mod capabilities;
mod command;
mod config;
mod devices;
mod directory;
mod entry;
mod faults;
mod handover;
mod queue;
#[cfg(test)]
mod tests;
mod unit;

use core::iter;

use iopt::{Chain, Invalidation, Root, TABLE_BYTES, TableMemory};
use spin::Mutex;

use crate::capabilities::{Capabilities, reaches};
use crate::commands::{self, Block, CommandCounters};
use crate::error::{AttachError, FlushError, UnitError};
use crate::fault::Fault;
use crate::registers::Registers;
use crate::unit::{DeviceId, DeviceTlb, DomainId, NodeId, Pasid, Unit};

use capabilities::{
    BARE, DDTP, DDTP_PPN, FCTL, FOREIGN, Features, LOST, MODE, OFF, PQCSR, point, switch,
};
use command::{ALL, Command};
use devices::{Devices, Member};
use queue::Commands;

pub use config::{Config, ProbeError};

/// One RISC-V IOMMU, over its registers `R` and memory `M` for directories and queues.
///
/// `M` gives pages of 4 KiB with 64-bit cells, at addresses that the unit has
/// ([`output_bits`](Capabilities::output_bits)). Tables, directories and queues are read through the
/// processor's caches.
///
/// Dropping it changes nothing: the unit goes on, and its memory stays taken. See
/// [`tear_down`](Self::tear_down).
#[derive(Debug)]
pub struct RiscvIommu<R, M> {
    registers: R,
    memory: M,
    config: Config,
    features: Features,
    capabilities: Capabilities,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    devices: Devices,
    ring: Commands,
    /// The page of the fault queue.
    faults: u64,
    /// `None` while no device was said to have a TLB.
    tlbs: Option<Tlbs>,
}

/// What TLBs of devices take.
#[derive(Debug)]
struct Tlbs {
    /// The fewest invalidations that one of them takes at a time. Functions of one device share what it
    /// takes, so it is counted over all.
    depth: usize,
    /// An empty table, of the first stage as of the second.
    empty: u64,
}

/// Bytes of the first table of the second stage.
const ROOT_BYTES: u64 = 4 * TABLE_BYTES;

/// Everything, in the terms of a command for pages.
const EVERYTHING: Block = Block {
    address: 0,
    mask: ALL,
};

impl<R: Registers, M: TableMemory> RiscvIommu<R, M> {
    /// Looks what the unit can do, and takes memory for it. The unit is not changed yet; devices can
    /// be attached before it is [enabled](Self::enable).
    pub fn new(registers: R, memory: M, mut config: Config) -> Result<Self, ProbeError> {
        const {
            assert!(
                <M::Cell as iopt::Cell>::BYTES == 8,
                "structures have 64-bit words"
            );
        }
        let features = Features::read(&registers)?;
        let capabilities = features.capabilities(&config)?;
        let bits = capabilities.output_bits;
        reaches(&memory, bits).map_err(|last| ProbeError::Addresses { last, bits })?;
        // device_id has no more.
        config.device_bits = config.device_bits.min(24);
        let last_process = (1 << capabilities.pasid_bits) - 1;
        let devices = Devices::new(&memory, features, last_process).map_err(ProbeError::Memory)?;
        let mut taken = Chain::empty();
        let mut pages = [0; 3];
        for page in &mut pages {
            match memory.allocate(TABLE_BYTES as usize) {
                Ok(address) => *page = address,
                Err(cause) => {
                    devices.for_each_page(&memory, &mut |_, page| taken.push(&memory, page));
                    memory.reclaim(taken);
                    return Err(ProbeError::Memory(cause));
                }
            }
            taken.push(&memory, *page);
        }
        let [entries, status, faults] = pages;
        let ring = queue::new(&memory, [entries, status]);
        Ok(Self {
            registers,
            memory,
            config,
            features,
            capabilities,
            inner: Mutex::new(Inner {
                devices,
                ring,
                faults,
                tlbs: None,
            }),
        })
    }

    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// After an error translation may be on or off; it can be called again. Faults that were not
    /// [drained](Unit::drain_faults) are forgotten.
    pub fn enable(&self) -> Result<(), UnitError> {
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

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name, but for translated requests: a TLB in a device is to be switched off before. Faults that were not [drained](Unit::drain_faults) are forgotten.
    pub fn disable(&self) -> Result<(), UnitError> {
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

    /// [Disables](Self::disable) the unit and gives its memory back. After an error the memory stays
    /// taken, since the unit may still read it; who wants to try again calls `disable` before.
    pub fn tear_down(self) -> Result<(R, M), UnitError> {
        self.disable()?;
        let inner = self.inner.into_inner();
        let mut chain = Chain::empty();
        let memory = self.memory;
        inner.for_each(&memory, &mut |_, span| {
            let pages = (0..span.len).step_by(TABLE_BYTES as usize);
            pages.for_each(|offset| chain.push(&memory, span.start + offset));
        });
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

    /// The memory for directories and queues.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

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

    fn device_tlb(&self, device: u32, process: Option<u32>, block: Block) -> Command {
        Command::DeviceTlb {
            device,
            segments: self.config.device_bits > 16,
            process,
            block,
        }
    }

    /// Has the unit forget blocks of a domain, or all of it, and the devices' TLBs theirs.
    fn flush(
        &self,
        domain: DomainId,
        blocks: Option<impl Iterator<Item = Block> + Clone>,
        tables: bool,
        of_devices: impl Iterator<Item = Block> + Clone,
    ) -> Result<(), FlushError> {
        let memory = &self.memory;
        let Inner {
            devices,
            ring,
            tlbs,
            ..
        } = &mut *self.inner.lock();
        let members = devices
            .members(memory)
            .filter(move |member| u32::from(member.there.domain) == domain.0);
        let Some(first) = members.clone().next() else {
            return Ok(());
        };
        let tag = first.there.tag();
        let command = move |pages| Command::Table { tag, pages };
        let whole = blocks.is_none().then_some(command(None));
        let pages = blocks.into_iter().flatten();
        let pages = pages.map(move |block| command(Some((block, tables))));
        let of_devices = self.of_devices(tlbs.as_ref(), members, of_devices);
        let commands = whole.into_iter().chain(pages).chain(of_devices);
        ring.issue((&self.registers, memory), commands)
            .map_err(|cause| FlushError::Unit { domain, cause })
    }

    /// What has the TLBs of devices forget blocks, behind the unit.
    fn of_devices(
        &self,
        tlbs: Option<&Tlbs>,
        members: impl Iterator<Item = Member> + Clone,
        blocks: impl Iterator<Item = Block> + Clone,
    ) -> impl Iterator<Item = Command> + Clone {
        let most = tlbs.map_or(1, |tlbs| tlbs.depth);
        // No search where there are no TLBs.
        let members = tlbs.map(|_| members).into_iter().flatten();
        members
            .filter(|member| member.tlb)
            .flat_map(move |member| blocks.clone().map(move |block| (member, block)))
            .enumerate()
            .flat_map(move |(n, (member, block))| {
                let command = self.device_tlb(member.device, member.process, block);
                // Before the first, too.
                [(n % most == 0).then_some(Command::Barrier), Some(command)]
            })
            .flatten()
    }
}

/// Refuses a root when the domain has another.
fn check_root<M: TableMemory>(
    (devices, tlbs): (&Devices, Option<&Tlbs>),
    memory: &M,
    domain: DomainId,
    asked: Root,
) -> Result<(), AttachError> {
    let other = devices.members(memory).find(|member| {
        let root = member.there.root;
        // One that is leaving.
        let blocked = tlbs.is_some_and(|tlbs| tlbs.empty == root.address);
        u32::from(member.there.domain) == domain.0 && root != asked && !blocked
    });
    match other {
        None => Ok(()),
        Some(other) => Err(AttachError::OtherRoot {
            domain,
            there: other.there.root,
            asked,
        }),
    }
}
