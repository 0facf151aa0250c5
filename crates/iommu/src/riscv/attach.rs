//! Attach and detach. The head of the module has the orders.

use core::sync::atomic::{Ordering, fence};

use iopt::{Chain, FormatId, Root, TableMemory};

use super::RiscvIommu;
use super::command::{Command, Tag};
use super::directory::Directory;
use super::entry::{Context, Device, Holds, PROCESS_LEAF_BITS, Process};
use super::flush::EVERYTHING;
use super::unit::{Inner, ROOT_BYTES, Tlbs};
use crate::driver::{Attachments, Place, same_root};
use crate::error::{NoPlace, UnitAttachError};
use crate::registers::Registers;
use crate::unit::{DeviceId, DeviceTlb, DomainId};

impl<R: Registers, M: TableMemory> RiscvIommu<R, M> {
    fn check(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: &Root,
    ) -> Result<u16, UnitAttachError> {
        self.capabilities.check(root)?;
        self.check_device(device)?;
        let bits = self.capabilities.output_bits;
        let address = root.address;
        if root.format == FormatId::RiscVG && address & 0x3fff != 0 {
            return Err(UnitAttachError::RootAddress { address, bits });
        }
        self.capabilities.check_domain(domain)
    }

    /// Attaches a process, in a new directory if it is the first.
    fn add_process(
        &self,
        context: &Device<'_, M>,
        levels: u32,
        process: u32,
        tag: u16,
        root: &Root,
    ) -> Result<(), NoPlace> {
        let memory = &self.memory;
        let (directory, fresh) = match context.holds() {
            Holds::Processes(directory) => (directory, false),
            _ => (Directory::new(memory, levels, PROCESS_LEAF_BITS)?, true),
        };
        match directory.make(memory, process) {
            // Privilege comes with a PASID.
            Ok(cells) => Process(Context { memory, cells }).set(tag, root, process != 0),
            Err(cause) => {
                if fresh {
                    self.give_back(directory);
                }
                return Err(cause);
            }
        }
        context.set_processes(&directory, self.features);
        Ok(())
    }

    fn give_back(&self, directory: Directory) {
        let mut chain = Chain::empty();
        directory.for_each_page(&self.memory, &mut |page| chain.push(&self.memory, page));
        self.memory.reclaim(chain);
    }
}

impl<R: Registers, M: TableMemory> Attachments for RiscvIommu<R, M> {
    fn attach_at(&self, place: Place, domain: DomainId, root: Root) -> Result<(), UnitAttachError> {
        let Place { device, pasid } = place;
        let tag = self.check(device, domain, &root)?;
        let memory = &self.memory;
        let inner = &mut *self.inner.lock();
        let no_place = |cause: NoPlace| cause.of(device);
        let context = inner.devices.make(memory, device.0).map_err(no_place)?;
        let process = place.number();
        let second = root.format == FormatId::RiscVG;
        let two_stages = match context.holds() {
            // With PASIDs, only second-stage tables are held so.
            Holds::Table(_) => pasid.is_some(),
            Holds::Processes(_) => second,
            Holds::Nothing => second && pasid.is_some(),
        };
        if two_stages {
            return Err(UnitAttachError::OtherStage { device });
        }
        let there = match context.holds() {
            Holds::Nothing => None,
            Holds::Table(there) => Some(there),
            Holds::Processes(directory) => {
                find_process(memory, directory, process).and_then(|context| context.read())
            }
        };
        if let Some(there) = there {
            let domain = DomainId(there.domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        same_root(inner.other_root(memory, domain, root), domain, root)?;
        let processes = self.features.process_levels(self.capabilities.pasid_bits);
        match processes.filter(|_| !second) {
            None => context.set_table(tag, &root, self.features),
            Some((levels, _)) => self
                .add_process(&context, levels, process, tag, &root)
                .map_err(no_place)?,
        }
        // A device that is started now is started behind these stores.
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn detach_at(&self, place: Place) -> Result<(), UnitAttachError> {
        let Place { device, pasid } = place;
        self.check_device(device)?;
        let memory = &self.memory;
        let Inner {
            devices,
            ring,
            tlbs,
            ..
        } = &mut *self.inner.lock();
        let not_attached = UnitAttachError::NotAttached { device };
        let context = devices.find(memory, device.0).ok_or(not_attached)?;
        let (there, process) = match context.holds() {
            Holds::Table(there) if pasid.is_none() => (there, None),
            Holds::Processes(directory) => {
                let process = place.number();
                let found = find_process(memory, directory, process).ok_or(not_attached)?;
                let there = found.read().ok_or(not_attached)?;
                (there, Some((process, found, directory)))
            }
            _ => return Err(not_attached),
        };
        let last = match &process {
            None => true,
            Some((_, _, directory)) => devices.is_last(memory, *directory),
        };
        // The context stays valid until the device's TLB has answered.
        let tlb = tlbs.as_ref().filter(|_| context.has_tlb());
        match (&process, tlb) {
            (None, Some(tlbs)) => context.block(tlbs.empty),
            (Some((_, found, _)), _) => found.0.withdraw(),
            (None, None) => {}
        }
        if last && tlb.is_none() {
            context.0.withdraw();
        }
        let mut issue = |commands: &[Option<Command>]| {
            let commands = commands.iter().copied().flatten();
            let told = ring.issue((&self.registers, memory), commands);
            told.map_err(|cause| UnitAttachError::Unit { device, cause })
        };
        let whole = Command::Device(Some(device.0));
        // Or the TLB has answered before.
        if tlb.is_none() || context.0.is_valid() {
            let directory = match &process {
                Some((process, ..)) if !last || tlb.is_some() => Command::Process {
                    device: device.0,
                    process: *process,
                },
                _ => whole,
            };
            let (tag, process) = (there.tag(), pasid.map(|pasid| pasid.0));
            let guest = match tag {
                Tag::Guest(guest) => Some(Command::First(Some(guest))),
                Tag::Process(_) => None,
            };
            issue(&[
                Some(directory),
                Some(Command::Barrier),
                guest,
                Some(Command::Table { tag, pages: None }),
                tlb.map(|_| Command::Barrier),
                tlb.map(|_| self.device_tlb(device.0, process, EVERYTHING)),
            ])?;
        }
        if last && tlb.is_some() {
            context.0.withdraw();
            issue(&[Some(whole)])?;
        }
        if let Some((_, found, _)) = &process {
            found.clear();
        }
        if last {
            context.clear();
            if let Some((_, _, directory)) = process {
                self.give_back(directory);
            }
        }
        Ok(())
    }

    fn check_device(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        let last = (1 << self.config.device_bits) - 1;
        if device.0 > last {
            return Err(UnitAttachError::Beyond { device, last });
        }
        Ok(())
    }

    fn switch_device_tlb(
        &self,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), UnitAttachError> {
        let Inner { devices, tlbs, .. } = &mut *self.inner.lock();
        let mut members = devices.members(&self.memory);
        if let Some(member) = members.find(|member| member.device == device.0) {
            let domain = DomainId(member.there.domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        drop(members);
        let no_place = |cause: NoPlace| cause.of(device);
        if let Some(DeviceTlb { queue_depth }) = tlb {
            // 0 is 32.
            let most = usize::from(queue_depth.wrapping_sub(1) & 31) + 1;
            match tlbs {
                Some(tlbs) => tlbs.depth = tlbs.depth.min(most),
                None => {
                    let empty = self.memory.allocate(ROOT_BYTES as usize);
                    let empty = empty.map_err(NoPlace::NoTables).map_err(no_place)?;
                    let cells = self.memory.entries(empty, ROOT_BYTES as usize / 8);
                    self.memory.written(cells);
                    *tlbs = Some(Tlbs { depth: most, empty });
                }
            }
        }
        let context = match tlb {
            None => devices.find(&self.memory, device.0),
            Some(_) => Some(devices.make(&self.memory, device.0).map_err(no_place)?),
        };
        if let Some(context) = context {
            context.set_tlb(tlb.is_some());
        }
        Ok(())
    }

    fn other_root(&self, domain: DomainId, asked: Root) -> Option<Root> {
        self.inner.lock().other_root(&self.memory, domain, asked)
    }
}

/// The context of a process, if there is a page for it.
fn find_process<M: TableMemory>(
    memory: &M,
    directory: Directory,
    process: u32,
) -> Option<Process<'_, M>> {
    let cells = directory.find(memory, process)?;
    Some(Process(Context { memory, cells }))
}
