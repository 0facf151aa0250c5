//! Attach and detach, with PASIDs. The head of the driver has the orders.

use iopt::{Root, TableMemory};

use super::structures::Entry;
use super::unit::Inner;
use super::{Mode, Vtd, queue};
use crate::driver::{Attachments, Place, same_root};
use crate::error::{NoPlace, UnitAttachError};
use crate::notes::Member;
use crate::registers::Registers;
use crate::unit::{DeviceId, DeviceTlb, DomainId};

impl<R: Registers, M: TableMemory> Vtd<R, M> {
    fn check(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: &Root,
    ) -> Result<u16, UnitAttachError> {
        self.capabilities.check(root)?;
        device.check_segment(self.config.segment)?;
        let tag = self.capabilities.check_domain(domain)?;
        // Section 6.1: what is not present is cached under the number 0.
        if tag == 0 && self.features.caching_mode() {
            return Err(UnitAttachError::ReservedDomain { domain });
        }
        Ok(tag)
    }
}

impl<R: Registers, M: TableMemory> Attachments for Vtd<R, M> {
    fn attach_at(&self, place: Place, domain: DomainId, root: Root) -> Result<(), UnitAttachError> {
        let (device, pasid) = (place.device, place.number());
        let tag = self.check(device, domain, &root)?;
        let Inner {
            structures,
            ring,
            notes,
        } = &mut *self.inner.lock();
        let memory = &self.memory;
        let found = structures.find(memory, device, pasid);
        if let Some(there) = found.and_then(|entry| entry.read()) {
            let domain = DomainId(there.domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        same_root(structures.other_root(memory, domain, root), domain, root)?;
        let no_place = |cause: NoPlace| cause.of(device);
        let source = device.0 as u16;
        let tlb = notes.tlb(memory, source);
        let entry = structures
            .make(memory, device, pasid, tlb.is_some())
            .map_err(no_place)?;
        // A flush must know who has a TLB, and which PASIDs there are.
        if tlb.is_some() || self.config.pasid_bits > 0 {
            let member = Member {
                source,
                pasid,
                domain: tag,
                tlb,
            };
            notes.add(memory, member).map_err(no_place)?;
        }
        entry.set(tag, root, self.features, tlb.is_some());
        let told = if self.features.caching_mode() {
            self.issue(ring, self.invalidate_absence(tag, source, pasid))
        } else {
            queue::flush_writes(&self.registers, self.features)
        };
        told.map_err(|cause| {
            entry.withdraw();
            UnitAttachError::Unit { device, cause }
        })
    }

    fn detach_at(&self, place: Place) -> Result<(), UnitAttachError> {
        let (device, pasid) = (place.device, place.number());
        device.check_segment(self.config.segment)?;
        let Inner {
            structures,
            ring,
            notes,
        } = &mut *self.inner.lock();
        let entry = structures.find(&self.memory, device, pasid);
        let there = entry.as_ref().and_then(Entry::read);
        let (Some(entry), Some(there)) = (entry, there) else {
            return Err(UnitAttachError::NotAttached { device });
        };
        entry.withdraw();
        let source = device.0 as u16;
        let member = Member {
            source,
            pasid,
            domain: there.domain,
            tlb: notes.tlb(&self.memory, source),
        };
        self.issue(ring, self.invalidate_member(member))
            .map_err(|cause| UnitAttachError::Unit { device, cause })?;
        entry.clear();
        notes.remove(&self.memory, source, pasid);
        Ok(())
    }

    fn check_device(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        device.check_segment(self.config.segment)
    }

    fn switch_device_tlb(
        &self,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), UnitAttachError> {
        let Inner {
            structures,
            ring,
            notes,
        } = &mut *self.inner.lock();
        let (memory, source) = (&self.memory, device.0 as u16);
        let entry = structures.find(memory, device, 0);
        let attached = entry
            .and_then(|entry| entry.read())
            .map(|there| there.domain);
        if let Some(domain) = attached.or_else(|| notes.domain_of(memory, source)) {
            let domain = DomainId(domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        // Noted for as long as the device can have translations.
        let noted = |cause: NoPlace| cause.of(device);
        if tlb.is_some() {
            notes.set_tlb(memory, source, tlb).map_err(noted)?;
        }
        let changed = self.config.mode != Mode::Legacy
            && structures.set_device_tlb(memory, device, tlb.is_some());
        if changed {
            self.issue(ring, self.invalidate_context(source))
                .map_err(|cause| UnitAttachError::Unit { device, cause })?;
        }
        if tlb.is_none() {
            notes.set_tlb(memory, source, None).map_err(noted)?;
        }
        Ok(())
    }

    fn other_root(&self, domain: DomainId, asked: Root) -> Option<Root> {
        let structures = &self.inner.lock().structures;
        structures.other_root(&self.memory, domain, asked)
    }
}
