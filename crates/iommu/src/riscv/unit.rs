//! The driver in the terms of the shell (`driver.rs` of the crate).

use core::iter;

use iopt::{Invalidation, Root, TABLE_BYTES, TableMemory};

use super::capabilities::{
    BARE, DDTP, DDTP_PPN, FCTL, FOREIGN, Features, LOST, MODE, OFF, PQCSR, point, switch,
};
use super::command::{ALL, Command};
use super::devices::{Devices, Member};
use super::queue::{self, Commands};
use super::{Config, RiscvIommu, faults};
use crate::commands::{self, Block, CommandCounters};
use crate::driver::{Kind, Operations, Place};
use crate::error::{AttachError, FlushError, UnitError};
use crate::fault::Fault;
use crate::registers::Registers;
use crate::unit::{DeviceId, DeviceTlb, DomainId, NodeId};

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

/// What TLBs of devices take.
#[derive(Debug)]
pub(super) struct Tlbs {
    /// The fewest invalidations that one of them takes at a time. Functions of one device share what it
    /// takes, so it is counted over all.
    pub(super) depth: usize,
    /// An empty table, of the first stage as of the second.
    pub(super) empty: u64,
}

/// Bytes of the first table of the second stage.
pub(super) const ROOT_BYTES: u64 = 4 * TABLE_BYTES;

/// Everything, in the terms of a command for pages.
pub(super) const EVERYTHING: Block = Block {
    address: 0,
    mask: ALL,
};

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

    fn attach_at(&self, place: Place, domain: DomainId, root: Root) -> Result<(), AttachError> {
        self.do_attach(place, domain, root)
    }

    fn detach_at(&self, place: Place) -> Result<(), AttachError> {
        self.do_detach(place)
    }

    fn check_device(&self, device: DeviceId) -> Result<(), AttachError> {
        let last = (1 << self.config.device_bits) - 1;
        if device.0 > last {
            return Err(AttachError::Beyond { device, last });
        }
        Ok(())
    }

    fn switch_device_tlb(
        &self,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), AttachError> {
        let Inner { devices, tlbs, .. } = &mut *self.inner.lock();
        let mut members = devices.members(&self.memory);
        if let Some(member) = members.find(|member| member.device == device.0) {
            let domain = DomainId(member.there.domain.into());
            return Err(AttachError::AlreadyAttached { device, domain });
        }
        drop(members);
        let no_memory = |cause| AttachError::Memory { device, cause };
        if let Some(DeviceTlb { queue_depth }) = tlb {
            // 0 is 32.
            let most = usize::from(queue_depth.wrapping_sub(1) & 31) + 1;
            match tlbs {
                Some(tlbs) => tlbs.depth = tlbs.depth.min(most),
                None => {
                    let empty = self.memory.allocate(ROOT_BYTES as usize);
                    let empty = empty.map_err(no_memory)?;
                    let cells = self.memory.entries(empty, ROOT_BYTES as usize / 8);
                    self.memory.written(cells);
                    *tlbs = Some(Tlbs { depth: most, empty });
                }
            }
        }
        let context = match tlb {
            None => devices.find(&self.memory, device.0),
            Some(_) => Some(devices.make(&self.memory, device.0).map_err(no_memory)?),
        };
        if let Some(context) = context {
            context.set_tlb(tlb.is_some());
        }
        Ok(())
    }

    fn other_root(&self, domain: DomainId, asked: Root) -> Option<Root> {
        self.inner.lock().other_root(&self.memory, domain, asked)
    }

    fn flush(&self, domain: DomainId, what: Option<&Invalidation>) -> Result<(), FlushError> {
        let tables = what.is_none_or(Invalidation::tables_unlinked);
        let by_page = what.filter(|_| !tables || self.features.upper_levels());
        let most = self.features.most_pages();
        let blocks = by_page.and_then(|what| commands::blocks(what, most));
        // Devices hold leaves only, and each takes ranges.
        let of_devices = what.and_then(|what| commands::blocks(what, ALL));
        let whole = of_devices.is_none().then_some(EVERYTHING);
        let of_devices = of_devices.into_iter().flatten().chain(whole);
        self.flush_blocks(domain, blocks, tables, of_devices)
    }

    fn drain(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        for _ in 0..faults::RECORDS {
            let alone = self.inner.lock();
            if !alone.ring.open {
                // The queue is somebody else's, or nobody's.
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

    pub(super) fn device_tlb(&self, device: u32, process: Option<u32>, block: Block) -> Command {
        Command::DeviceTlb {
            device,
            segments: self.config.device_bits > 16,
            process,
            block,
        }
    }

    /// Has the unit forget blocks of a domain, or all of it, and the devices' TLBs theirs.
    fn flush_blocks(
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
