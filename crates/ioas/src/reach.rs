//! What devices can reach: who is attached, which memory is held for them, and what their units
//! still have to forget.
//!
//! The rule that this module keeps: **no memory is unpinned that a device can still reach.** Memory
//! leaves by one of two ways only.
//!
//! * Its entries are emptied in the table, it becomes *retired*, and [`flush`](Reach::flush) has
//!   every unit forget it. What is not flushed yet stays in the gather and among the retired, over
//!   failed flushes too.
//! * Every device is detached, as when the whole address space is dropped. If a unit does not let a
//!   device go, the memory is never unpinned: a leak is harmless, DMA into memory that belongs to
//!   somebody else is not.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

use iommu::{AttachError, DeviceId, DomainId, FlushError, Unit};
use iopt::{Flushed, Gather, Root};

use crate::area::{Area, Held};
use crate::error::DetachError;
use crate::object::Cause;

pub(crate) struct Reach {
    pub(crate) domain: DomainId,
    attached: Vec<(Arc<dyn Unit>, DeviceId)>,
    /// What was taken out of the table and is not flushed yet.
    pub(crate) gather: Gather,
    /// By first address.
    pub(crate) areas: BTreeMap<u64, Area>,
    /// Memory of former areas that the gather still names.
    pub(crate) retired: Vec<Held>,
}

impl Reach {
    pub(crate) const fn new(domain: DomainId) -> Self {
        Self {
            domain,
            attached: Vec::new(),
            gather: Gather::new(),
            areas: BTreeMap::new(),
            retired: Vec::new(),
        }
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.attached.iter().map(|(_, id)| *id)
    }

    pub(crate) fn attach(
        &mut self,
        unit: Arc<dyn Unit>,
        id: DeviceId,
        root: Root,
    ) -> Result<(), AttachError> {
        unit.attach(id, self.domain, root)?;
        self.attached.push((unit, id));
        Ok(())
    }

    pub(crate) fn detach(&mut self, device: DeviceId) -> Result<(), DetachError> {
        let Some(place) = self.attached.iter().position(|(_, id)| *id == device) else {
            return Err(DetachError::NotAttached { device });
        };
        detach(&*self.attached[place].0, device)?;
        self.attached.remove(place);
        Ok(())
    }

    /// Detaches every device that its unit lets go. The error is that of the first one that stays.
    pub(crate) fn detach_all(&mut self) -> Result<(), DetachError> {
        let mut result = Ok(());
        self.attached.retain(|(unit, id)| {
            let detached = detach(&**unit, *id);
            result = result.and(detached);
            detached.is_err()
        });
        result
    }

    /// A unit that remembers what was not present must forget that when something is mapped.
    pub(crate) fn mapped(&self) -> Result<(), FlushError> {
        units(&self.attached)
            .filter(|unit| unit.capabilities().caches_not_present)
            .try_for_each(|unit| unit.invalidate_domain(self.domain))
    }

    /// Has every unit forget what is in the gather, and waits for it. After an error all of that
    /// is still to come. The result gives the tables back.
    pub(crate) fn flush(&mut self) -> Result<Flushed, FlushError> {
        let domain = self.domain;
        self.gather.flush_with(|what| {
            units(&self.attached).try_for_each(|unit| unit.invalidate(domain, what))
        })
    }

    /// Unpins the retired memory, which was flushed. Returns the bytes, and the first failure.
    pub(crate) fn release(&mut self) -> (u64, Option<Cause>) {
        debug_assert!(self.gather.is_empty(), "released before it was flushed");
        let mut unpinned = 0;
        let mut failed = None;
        for held in self.retired.drain(..) {
            match held.release() {
                Ok(bytes) => unpinned += bytes,
                Err(cause) => failed = failed.or(Some(cause)),
            }
        }
        (unpinned, failed)
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        // A unit that has let its last device of the domain go has forgotten the domain, so that
        // nothing needs to be flushed any more.
        if self.detach_all().is_err() {
            mem::forget(mem::take(&mut self.areas));
            mem::forget(mem::take(&mut self.retired));
        }
    }
}

fn detach(unit: &dyn Unit, device: DeviceId) -> Result<(), DetachError> {
    match unit.detach(device) {
        // Somebody has detached it behind our back, and that has come to its end.
        Ok(()) | Err(AttachError::NotAttached { .. }) => Ok(()),
        Err(cause) => Err(DetachError::Unit(cause)),
    }
}

/// The units, each of them once.
fn units(attached: &[(Arc<dyn Unit>, DeviceId)]) -> impl Iterator<Item = &dyn Unit> {
    attached.iter().enumerate().filter_map(|(i, (unit, _))| {
        let first = attached[..i]
            .iter()
            .all(|(other, _)| !Arc::ptr_eq(unit, other));
        first.then_some(&**unit)
    })
}
