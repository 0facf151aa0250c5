//! A domain: one table, the units that walk it, and what they still have to forget.
//!
//! Everything that is taken out of the table goes one way: emptied entries, then
//! [`flush`](Domain::flush) on every unit, then table pages back to their memory. What was removed
//! and is not flushed yet stays in the gather, over failed flushes too.

use alloc::sync::Arc;
use alloc::vec::Vec;

use iommu::{AttachError, DeviceId, DomainId, FlushError, Unit};
use iopt::{AnyTable, Discard, Gather, Prot, TableMemory};
use runs::Span;

use crate::error::DetachError;

pub(crate) struct Domain<M> {
    pub(crate) id: DomainId,
    pub(crate) table: AnyTable<M>,
    attached: Vec<(Arc<dyn Unit>, DeviceId)>,
    gather: Gather,
}

impl<M: TableMemory> Domain<M> {
    pub(crate) fn new(id: DomainId, table: AnyTable<M>) -> Self {
        Self {
            id,
            table,
            attached: Vec::new(),
            gather: Gather::new(),
        }
    }

    pub(crate) fn attach(&mut self, unit: Arc<dyn Unit>, id: DeviceId) -> Result<(), AttachError> {
        unit.attach(id, self.id, self.table.root())?;
        self.attached.push((unit, id));
        Ok(())
    }

    pub(crate) fn detach(&mut self, device: DeviceId) -> Result<(), DetachError> {
        let Some(place) = self.attached.iter().position(|(_, id)| *id == device) else {
            return Err(DetachError::NotAttached { device });
        };
        self.attached[place]
            .0
            .detach(device)
            .map_err(DetachError::Unit)?;
        self.attached.swap_remove(place);
        Ok(())
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.attached.iter().map(|(_, id)| *id)
    }

    pub(crate) fn map(
        &mut self,
        iova: u64,
        runs: &[Span],
        prot: Prot,
    ) -> Result<(), iopt::MapError> {
        self.table.map(iova, runs, prot)
    }

    /// A unit that remembers what was not present must forget that when something is mapped.
    pub(crate) fn mapped(&mut self) -> Result<(), FlushError> {
        for unit in units(&self.attached) {
            if unit.capabilities().caches_not_present {
                unit.invalidate_domain(self.id)?;
            }
        }
        Ok(())
    }

    /// Empties `range` in the table; holes stay holes. Nothing may be reused before
    /// [`flush`](Self::flush).
    pub(crate) fn unmap(&mut self, range: Span) -> Result<u64, iopt::UnmapError> {
        self.table
            .unmap_mapped(range, &mut self.gather, &mut Discard)
    }

    /// Has every unit forget what was unmapped, waits for it, and gives back empty tables. After
    /// an error all of that is still to come.
    pub(crate) fn flush(&mut self) -> Result<(), FlushError> {
        let flushed = self.gather.flush_with(|what| {
            units(&self.attached).try_for_each(|unit| unit.invalidate(self.id, what))
        })?;
        self.table.reclaim(flushed);
        Ok(())
    }

    /// Detaches every device and gives all tables back. When a unit does not let go, the tables
    /// stay out of use for good.
    pub(crate) fn close(mut self) -> Result<(), DetachError> {
        while let Some((_, device)) = self.attached.last() {
            self.detach(*device)?;
        }
        // Detaching the last device has flushed the domain, and nobody walks these tables now.
        let (gather, memory) = self.table.tear_down();
        memory.reclaim(self.gather.never_walked().into_tables());
        memory.reclaim(gather.never_walked().into_tables());
        Ok(())
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
