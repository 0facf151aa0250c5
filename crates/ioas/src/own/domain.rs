//! A domain: one page table, and the devices that translate through it.
//!
//! What is taken out of the table is gathered here until every unit of the domain has forgotten it.
//! Over failed flushes the gather keeps it.

use alloc::sync::Arc;
use alloc::vec::Vec;

use iommu::{DeviceId, DomainId, FlushError, Unit};
use iopt::{
    AnyTable, Discard, FormatId, Gather, Interruption, Invalidation, Prot, RefitError, TableMemory,
    WithDirty,
};
use runs::{PageSizes, Run, Span};

use crate::error::DetachError;

pub(crate) struct Domain<M: TableMemory> {
    pub(crate) id: DomainId,
    pub(crate) table: AnyTable<M>,
    pub(crate) devices: Devices,
    /// What was taken out of the table and is not flushed yet.
    pub(crate) gather: Gather,
    /// What the units that may join must answer to "DMA is forced to be coherent"; `None` when the
    /// caller has built the table and answers for that.
    pub(crate) coherent: Option<bool>,
    /// The table keeps what devices have written to.
    pub(crate) tracked: bool,
    /// Leaves have a new size that a unit may not have taken notice of: until it has, they must not
    /// be changed again, since it may still note in the old ones what a device does.
    unsettled: bool,
}

/// Has every unit forget something, and waits for it.
type Flush<'a> = &'a mut dyn FnMut(&Invalidation) -> Result<(), FlushError>;

/// Devices of a domain, with their units.
#[derive(Default)]
pub(crate) struct Devices(pub(crate) Vec<(Arc<dyn Unit>, DeviceId)>);

impl<M: TableMemory> Domain<M> {
    pub(crate) const fn new(id: DomainId, table: AnyTable<M>, coherent: Option<bool>) -> Self {
        Self {
            id,
            table,
            devices: Devices(Vec::new()),
            gather: Gather::new(),
            coherent,
            tracked: false,
            unsettled: false,
        }
    }

    /// Whether `unit` can walk the table, and translates through it as the others do.
    pub(crate) fn suits(&self, unit: &dyn Unit, dirty: bool) -> bool {
        let can = unit.capabilities();
        let root = self.table.root();
        let sizes = |offered: PageSizes| {
            let own = self.table.page_sizes().bits();
            own & offered.bits() == own
        };
        can.check(&root).is_ok()
            && can
                .format(root.format)
                .is_some_and(|support| sizes(support.page_sizes))
            && self
                .coherent
                .is_none_or(|coherent| coherent == can.snoop_control)
            && (!dirty || can.dirty_tracking)
    }

    /// Permissions as its entries have them; `mmio` for registers of a device.
    ///
    /// Registers are marked as such where entries hold memory types. Arm's always do. Of the others,
    /// some never do, and RISC-V's where there is Svpbmt: without it, the physical address decides.
    pub(crate) fn prot(&self, prot: Prot, mmio: bool) -> Prot {
        let device = prot | Prot::DEVICE;
        let arm = matches!(
            self.table.root().format,
            FormatId::ArmStage1(_) | FormatId::ArmStage2(_)
        );
        match self.coherent {
            _ if mmio && (arm || self.table.expresses(device)) => device,
            Some(true) if !mmio => prot | Prot::COHERENT,
            _ => prot,
        }
    }

    /// A unit that remembers what was not present must forget that when something is mapped.
    pub(crate) fn mapped(&self) -> Result<(), FlushError> {
        self.devices
            .units()
            .filter(|unit| unit.capabilities().caches_not_present)
            .try_for_each(|unit| unit.invalidate_domain(self.id))
    }

    /// Has every unit forget what is in the gather, and waits for it. Tables are given back. After
    /// an error all of that is still to come.
    pub(crate) fn flush(&mut self) -> Result<(), FlushError> {
        if !self.gather.is_empty() {
            let (id, devices) = (self.id, &self.devices);
            let flushed = self
                .gather
                .flush_with(|what| devices.invalidate(id, what))?;
            self.table.reclaim(flushed);
        }
        self.unsettled = false;
        Ok(())
    }

    /// Empties `range`, in which leaves end where it ends. `note` is told what a device has written
    /// to, while that is tracked.
    pub(crate) fn empty(
        &mut self,
        range: Span,
        note: &mut dyn FnMut(Span),
    ) -> Result<(), iopt::UnmapError> {
        let Self { table, gather, .. } = self;
        let mut noting = WithDirty(|run: Run, dirty: bool| {
            if dirty {
                note(run.input());
            }
        });
        let emptied = if self.tracked {
            table.unmap_mapped(range, gather, &mut noting)
        } else {
            table.unmap_mapped(range, gather, &mut Discard)
        };
        emptied.map(|_| ())
    }

    /// Begins to track what devices write to, as far as table and units can.
    pub(crate) fn track(&mut self) {
        self.tracked = self.table.track_dirty(true).is_ok();
    }

    /// Ends it.
    pub(crate) fn untrack(&mut self) {
        // Refused only where it was never on.
        let _ = self.table.track_dirty(false);
        self.tracked = false;
    }

    /// True when there is somebody who writes without leaving a trace.
    pub(crate) fn is_blind(&self) -> bool {
        let silent = |unit: &dyn Unit| !self.tracked || !unit.capabilities().dirty_tracking;
        self.devices.units().any(silent)
    }

    /// Makes the leaves in `range` ones of at most `size` bytes.
    pub(crate) fn split(
        &mut self,
        range: Span,
        size: u64,
        interruption: Interruption,
    ) -> Result<(), RefitError<FlushError>> {
        self.refit(|table, gather, flush| table.split(range, size, interruption, gather, flush))
    }

    /// Has `job` change the sizes of leaves.
    fn refit(
        &mut self,
        job: impl FnOnce(&mut AnyTable<M>, &mut Gather, Flush<'_>) -> Result<(), RefitError<FlushError>>,
    ) -> Result<(), RefitError<FlushError>> {
        self.settle().map_err(RefitError::Flush)?;
        let (id, devices) = (self.id, &self.devices);
        let mut flush = |what: &Invalidation| devices.invalidate(id, what);
        let done = job(&mut self.table, &mut self.gather, &mut flush);
        self.unsettled = matches!(done, Err(RefitError::Flush(_)));
        done
    }

    /// Flushes what an earlier change of sizes has left to be flushed.
    pub(crate) fn settle(&mut self) -> Result<(), FlushError> {
        if self.unsettled { self.flush() } else { Ok(()) }
    }

    /// The leaf that goes on over one of the ends of `range`.
    pub(crate) fn leaf_over_ends(&self, range: Span) -> Option<Run> {
        [range.start, range.last()].into_iter().find_map(|end| {
            let leaf = self.table.leaf_at(end)?;
            (!range.covers(&leaf.run.input())).then_some(leaf.run)
        })
    }

    /// Has a leaf begin at `at`, if one goes through it.
    pub(crate) fn cut(
        &mut self,
        at: u64,
        interruption: Interruption,
    ) -> Result<(), RefitError<FlushError>> {
        self.refit(|table, gather, flush| table.cut(at, interruption, gather, flush))
    }

    /// Gives the leaves around `range`, which lies in `area`, the largest sizes that are possible in
    /// the area.
    pub(crate) fn merge(
        &mut self,
        range: Span,
        area: Span,
        interruption: Interruption,
    ) -> Result<(), RefitError<FlushError>> {
        self.merge_in(around(range, area), interruption)?;
        for end in [range.start, range.last()] {
            let mut tried = None;
            while let Some(page) = self.larger_page(end)
                && area.covers(&page)
                && tried != Some(page)
            {
                tried = Some(page);
                self.merge_in(page, interruption)?;
            }
        }
        Ok(())
    }

    /// The page of the next larger size around the leaf at `at`, if it is one of the largest that
    /// are always tried and addresses permit more.
    fn larger_page(&self, at: u64) -> Option<Span> {
        let run = self.table.leaf_at(at)?.run;
        let sizes = self.table.page_sizes();
        let size = sizes.iter().find(|size| *size > run.len)?;
        let fits = run.len >= AROUND && (run.iova ^ run.pa) & (size - 1) == 0;
        fits.then_some(Span::new(run.iova & !(size - 1), size))
    }

    fn merge_in(
        &mut self,
        range: Span,
        interruption: Interruption,
    ) -> Result<(), RefitError<FlushError>> {
        self.refit(|table, gather, flush| table.merge(range, interruption, gather, flush))
    }

    /// Ends the domain, which has no devices any more: each unit has forgotten it with its last
    /// one. All tables are given back.
    pub(crate) fn end(self) {
        let Self {
            table, mut gather, ..
        } = self;
        let (rest, memory) = table.tear_down();
        for gather in [core::mem::take(&mut gather), rest] {
            memory.reclaim(gather.never_walked().into_tables());
        }
    }
}

impl Devices {
    /// The units, each of them once.
    pub(crate) fn units(&self) -> impl Iterator<Item = &dyn Unit> {
        let all = &self.0;
        all.iter().enumerate().filter_map(|(i, (unit, _))| {
            let first = all[..i].iter().all(|(other, _)| !Arc::ptr_eq(unit, other));
            first.then_some(&**unit)
        })
    }

    /// Has every unit forget `what` of domain `id`, and waits for it.
    pub(crate) fn invalidate(&self, id: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        self.units().try_for_each(|unit| unit.invalidate(id, what))
    }

    /// Detaches `device`. `None` when it is not here.
    pub(crate) fn detach(&mut self, device: DeviceId) -> Option<Result<(), DetachError>> {
        let place = self.0.iter().position(|(_, id)| *id == device)?;
        let detached = detach(&*self.0[place].0, device);
        if detached.is_ok() {
            self.0.remove(place);
        }
        Some(detached)
    }

    /// Detaches every device that its unit lets go. The error is that of the first one that stays.
    pub(crate) fn detach_all(&mut self) -> Result<(), DetachError> {
        let mut result = Ok(());
        self.0.retain(|(unit, id)| {
            let detached = detach(&**unit, *id);
            result = result.and(detached);
            detached.is_err()
        });
        result
    }
}

/// The size of the pages in which merging is always tried: 1 GiB, the largest of most formats.
const AROUND: u64 = 1 << 30;

/// `range`, rounded out to whole pages of that size, as far as `area` goes.
fn around(range: Span, area: Span) -> Span {
    let first = (range.start & !(AROUND - 1)).max(area.start);
    let last = (range.last() | (AROUND - 1)).min(area.last());
    Span::inclusive(first, last).unwrap_or(area)
}

fn detach(unit: &dyn Unit, device: DeviceId) -> Result<(), DetachError> {
    match unit.detach(device) {
        // Somebody has detached it behind our back, and that has come to its end.
        Ok(()) | Err(iommu::AttachError::NotAttached { .. }) => Ok(()),
        Err(cause) => Err(DetachError::Unit(cause)),
    }
}
