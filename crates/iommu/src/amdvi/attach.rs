//! Attach, detach and new roots. The head of the driver has the orders.

use iopt::{Root, TableMemory};

use super::command::Command;
use super::table::Entry;
use super::unit::Inner;
use super::{AmdVi, Mode};
use crate::driver::{Attachments, Place, same_root};
use crate::error::{FlushError, NoPlace, UnitAttachError};
use crate::notes::Member;
use crate::registers::Registers;
use crate::unit::{DeviceId, DeviceTlb, DomainId};

impl<R: Registers, M: TableMemory> Attachments for AmdVi<R, M> {
    fn attach_at(&self, place: Place, domain: DomainId, root: Root) -> Result<(), UnitAttachError> {
        match self.config.mode {
            Mode::Host => self.attach_host(place.device, domain, root),
            Mode::Guest => self.attach_guest(place, domain, root),
        }
    }

    fn detach_at(&self, place: Place) -> Result<(), UnitAttachError> {
        match self.config.mode {
            Mode::Host => self.detach_host(place.device),
            Mode::Guest => self.detach_guest(place),
        }
    }

    /// Refuses a device that the device table has no room for.
    fn check_device(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        device.check_segment(self.config.segment)?;
        let last = self.config.last_device;
        if device.0 as u16 > last {
            let last = last.into();
            return Err(UnitAttachError::Beyond { device, last });
        }
        Ok(())
    }

    fn switch_device_tlb(
        &self,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), UnitAttachError> {
        let Inner { table, notes, .. } = &mut *self.inner.lock();
        let (memory, source) = (&self.memory, device.0 as u16);
        let entry = table.entry(memory, device);
        let attached = entry
            .and_then(|entry| entry.read())
            .map(|there| there.domain);
        // With guest tables the entry does not say it.
        if let Some(domain) = attached.or_else(|| notes.domain_of(memory, source)) {
            let domain = DomainId(domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        notes
            .set_tlb(memory, source, tlb)
            .map_err(|cause| cause.of(device))
    }

    fn other_root(&self, domain: DomainId, asked: Root) -> Option<Root> {
        let Inner { table, notes, .. } = &*self.inner.lock();
        match self.config.mode {
            Mode::Host => table.other_root(&self.memory, domain, asked),
            Mode::Guest => self.other_guest_root((table, notes), domain, asked),
        }
    }
}

impl<R: Registers, M: TableMemory> AmdVi<R, M> {
    /// The unit's number of the domain, if all of it is possible.
    pub(super) fn check(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: &Root,
    ) -> Result<u16, UnitAttachError> {
        self.capabilities.check(root)?;
        self.check_device(device)?;
        self.capabilities.check_domain(domain)
    }

    fn attach_host(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        let tag = self.check(device, domain, &root)?;
        let Inner { table, ring, notes } = &mut *self.inner.lock();
        let memory = &self.memory;
        let no_place = |cause: NoPlace| cause.of(device);
        let Some(entry) = table.entry(memory, device) else {
            return Err(no_place(NoPlace::Cells(table.base)));
        };
        if let Some(there) = entry.read() {
            let domain = DomainId(there.domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        same_root(table.other_root(memory, domain, root), domain, root)?;
        let source = device.0 as u16;
        let tlb = notes.tlb(memory, source);
        if tlb.is_some() {
            let member = Member {
                source,
                pasid: 0,
                domain: tag,
                tlb,
            };
            notes.add(memory, member).map_err(no_place)?;
        }
        table.note(device);
        entry.set(tag, &root, self.features, tlb.is_some());
        let absent = self.config.caches_not_present;
        let commands = [
            Some(Command::Device { source }),
            absent.then_some(Command::Barrier),
            absent.then_some(Command::domain(tag)),
        ];
        let told = ring.issue((&self.registers, memory), commands.into_iter().flatten());
        told.map_err(|cause| {
            entry.withdraw();
            UnitAttachError::Unit { device, cause }
        })
    }

    fn detach_host(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        self.check_device(device)?;
        let Inner { table, ring, notes } = &mut *self.inner.lock();
        let memory = &self.memory;
        let entry = table.entry(memory, device);
        let there = entry.as_ref().and_then(Entry::read);
        let (Some(entry), Some(there)) = (entry, there) else {
            return Err(UnitAttachError::NotAttached { device });
        };
        entry.withdraw();
        let source = device.0 as u16;
        let unit = [
            Command::Device { source },
            Command::Barrier,
            Command::domain(there.domain),
        ];
        let members = notes.members(memory, there.domain);
        let alone = members.filter(move |member| member.source == source);
        let commands = unit.into_iter().chain(self.all_in_devices(alone));
        ring.issue((&self.registers, memory), commands)
            .map_err(|cause| UnitAttachError::Unit { device, cause })?;
        entry.clear();
        notes.remove(memory, source, 0);
        Ok(())
    }

    /// Has the domain's devices translate through a root from now on. Their cached translations are
    /// invalidated, also when they have the root already: an earlier call may have failed behind the
    /// stores.
    pub(super) fn set_root(&self, domain: DomainId, root: Root) -> Result<(), FlushError> {
        let Some(tag) = self.capabilities.tag(domain) else {
            // No device can be in it.
            return Ok(());
        };
        let refused = |cause| FlushError::Root { domain, cause };
        self.capabilities.check(&root).map_err(refused)?;
        let Inner { table, ring, notes } = &mut *self.inner.lock();
        let members = table.members(&self.memory, tag);
        for (source, _) in members.clone() {
            if let Some(entry) = table.entry(&self.memory, DeviceId(source.into())) {
                entry.set_root(&root, self.features);
            }
        }
        let commands = members
            .map(|(source, _)| Command::Device { source })
            .chain([Command::Barrier, Command::domain(tag)])
            .chain(self.all_in_devices(notes.members(&self.memory, tag)));
        ring.issue((&self.registers, &self.memory), commands)
            .map_err(|cause| FlushError::Unit { domain, cause })
    }
}
