//! A domain: one page table, and the devices that translate through it.
//!
//! Unmapped entries are gathered here until every unit of the domain has invalidated them.
//! Over failed flushes the gather keeps it.
//!
//! Threads that empty different ranges have a gather each, and put it to the others' when they are done.
//! One of them flushes what all have gathered; a later one waits meanwhile, and finds its own flushed, or
//! flushes what was gathered since.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;
use core::sync::atomic::{AtomicU64, Ordering};

use iommu::{DeviceId, DomainId, FlushError, NodeId, Unit};
use iopt::{AnyTable, FormatId, Gather, Interruption, Invalidation, Prot, ResizeError, WithDirty};
use runs::{Iova, Joiner, PageSizes, Run, Span};

use super::spare::Spare;
use crate::lock::Mutex;
use crate::ranges::extents::Extent;
use crate::space::dirty_log::DirtyLog;
use crate::space::error::DetachError;
use crate::space::placement::home;

pub(crate) struct Domain {
    pub(crate) id: DomainId,
    pub(crate) table: AnyTable,
    pub(crate) devices: Devices,
    pub(super) gathers: Mutex<Gathers>,
    /// Held over a flush.
    flushing: Mutex<()>,
    /// Required answer of joining units to "DMA is forced to be coherent"; `None` when the caller has built the table
    /// and answers for that.
    pub(crate) coherent: Option<bool>,
    /// Node that its tables were asked to lie on.
    pub(crate) tables_on: Option<NodeId>,
    /// The table keeps what devices have written to.
    pub(crate) tracked: bool,
    pub(super) written: Mutex<DirtyLog>,
    /// Number of changes of leaf sizes that a unit may not have taken notice of: until it has, leaves
    /// must not be changed again, since it may still note in the old ones what a device does.
    unsettled: AtomicU64,
    /// Tables for what is released.
    pub(super) spare: Mutex<Spare>,
}

/// Entries that were taken out of the table and are not flushed yet.
#[derive(Default)]
pub(super) struct Gathers {
    /// Entries of operations that are under way, and keep others from there.
    fresh: Gather,
    /// Entries of other operations: a flush has failed, or was left for later.
    pub(super) left: Gather,
    /// Invalidation that is under way.
    under_way: Option<Box<Invalidation>>,
}

/// Has every unit invalidate something, and waits for it.
type Flush<'a> = &'a mut dyn FnMut(&Invalidation) -> Result<(), FlushError>;

/// Devices of a domain.
#[derive(Clone, Default)]
pub(crate) struct Devices(pub(crate) Vec<Member>);

/// A device of a domain.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) unit: Arc<dyn Unit>,
    pub(crate) device: DeviceId,
    /// The node that the device is at, as far as its unit does not know better.
    pub(crate) near: Option<NodeId>,
}

impl Domain {
    pub(crate) fn new(id: DomainId, table: AnyTable, coherent: Option<bool>) -> Self {
        Self {
            id,
            table,
            devices: Devices(Vec::new()),
            gathers: Mutex::default(),
            flushing: Mutex::default(),
            coherent,
            tables_on: None,
            tracked: false,
            written: Mutex::default(),
            unsettled: AtomicU64::new(0),
            spare: Mutex::new(Spare::new()),
        }
    }

    /// True when `unit` can walk the table, demands no more of its changes than it keeps, and translates through it
    /// as the others do.
    pub(crate) fn suits(&self, unit: &dyn Unit, dirty: bool) -> bool {
        let can = unit.capabilities();
        let (root, own) = {
            let table = &self.table;
            (table.root(), table.page_sizes().bits())
        };
        let sizes = |offered: PageSizes| own & offered.bits() == own;
        can.check(&root).is_ok()
            && can.break_before_make >= self.table.break_before_make()
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
        let table = &self.table;
        let arm = matches!(
            table.root().format,
            FormatId::ArmStage1(_) | FormatId::ArmStage2(_)
        );
        match self.coherent {
            _ if mmio && (arm || table.expresses(device)) => device,
            Some(true) if !mmio => prot | Prot::COHERENT,
            _ => prot,
        }
    }

    /// The node of its devices: that of the first of which one is known.
    pub(crate) fn node(&self) -> Option<NodeId> {
        let mut members = self.devices.0.iter();
        members.find_map(|member| home(&*member.unit, member.near))
    }

    /// See [`Devices::mapped`].
    pub(crate) fn mapped(&self, range: Span<Iova>) -> Result<(), FlushError> {
        self.devices.mapped(self.id, range)
    }

    /// Has every unit invalidate what was gathered until now, and waits for it. Tables are given back. After
    /// an error all of that is still to come.
    pub(crate) fn flush(&self) -> Result<(), FlushError> {
        let _flushing = self.flushing.lock();
        // Read first: what it counts is gathered already.
        let unsettled = self.unsettled.load(Ordering::SeqCst);
        let mut batch = Batch {
            gather: self.gathered(),
            domain: self,
        };
        if !batch.gather.is_empty() {
            let flushed = batch.gather.flush_with(|what| self.invalidate(what))?;
            self.table.reclaim(flushed);
        }
        drop(batch);
        self.unsettled.fetch_sub(unsettled, Ordering::SeqCst);
        self.fill_up();
        Ok(())
    }

    /// Entries gathered until now, which are flushed next.
    fn gathered(&self) -> Gather {
        let gathers = &mut *self.gathers.lock();
        let mut all = mem::take(&mut gathers.left);
        self.join(&mut all, mem::take(&mut gathers.fresh));
        gathers.under_way = (!all.is_empty()).then(|| Box::new(all.invalidation().clone()));
        all
    }

    fn join(&self, gather: &mut Gather, other: Gather) {
        if gather.is_empty() {
            *gather = other;
        } else if !other.is_empty() {
            self.table.memory().join(gather, other);
        }
    }

    fn invalidate(&self, what: &Invalidation) -> Result<(), FlushError> {
        self.devices.invalidate(self.id, what)
    }

    /// Leaves entries emptied until now for a later flush.
    pub(crate) fn leave_gathered(&self) {
        let gathers = &mut *self.gathers.lock();
        let fresh = mem::take(&mut gathers.fresh);
        self.join(&mut gathers.left, fresh);
    }

    /// True when something is left for a later flush.
    pub(crate) fn waits(&self) -> bool {
        !self.gathers.lock().left.is_empty()
    }

    /// True when something must be flushed before `range` is mapped.
    pub(crate) fn waits_in(&self, range: Span<Iova>) -> bool {
        let gathers = &*self.gathers.lock();
        let left = gathers.left.invalidation();
        gathers
            .under_way
            .as_deref()
            .into_iter()
            .chain([left])
            .any(|what| {
                what.tables_unlinked()
                    || what.ranges().iter().any(|waiting| waiting.overlaps(&range))
            })
    }

    /// Empties `range`, in which leaves end where it ends. `note` receives what a device has written
    /// to, while that is tracked. Others are kept from `owned`, which covers it: tables that became empty
    /// are taken out as far as they translate nothing else.
    pub(crate) fn empty(
        &self,
        range: Span<Iova>,
        owned: Span<Iova>,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), iopt::TableUnmapError> {
        self.written.lock().take(range, note);
        let mut gather = Gather::new();
        let emptied = empty_table(&self.table, &mut gather, range, owned, self.tracked, note);
        self.join(&mut self.gathers.lock().fresh, gather);
        emptied
    }

    /// Parts of `areas` that it can translate, in at most two stretches: a table finds the entries in a stretch faster
    /// than we do, and goes down once.
    pub(crate) fn within(&self, areas: Extent) -> impl Iterator<Item = Span<Iova>> {
        let halves = self.table.aperture().spans();
        halves.filter_map(move |half| areas.within(half))
    }

    /// [`empty`](Self::empty) of what of `areas` it can translate.
    pub(crate) fn empty_within(
        &self,
        areas: Extent,
        owned: Extent,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), iopt::TableUnmapError> {
        let halves = self.table.aperture().spans();
        for half in halves {
            if let (Some(range), Some(owned)) = (areas.within(half), owned.within(half)) {
                self.empty(range, owned, note)?;
            }
        }
        Ok(())
    }

    /// Tables that were set aside for `range` alone are free.
    pub(crate) fn give_back(&self, range: Span<Iova>) {
        self.spare.lock().give_back(range, self.table.memory());
    }

    /// Sets aside what is wanted for what is released, as far as there are tables.
    pub(crate) fn fill_up(&self) {
        self.spare.lock().fill_up(self.table.memory());
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
        self.written.get_mut().clear();
    }

    /// True when some device writes without leaving a trace.
    pub(crate) fn is_blind(&self) -> bool {
        self.devices.units().any(|unit| self.is_blind_to(unit))
    }

    /// True when devices of `unit` write without leaving a trace.
    fn is_blind_to(&self, unit: &dyn Unit) -> bool {
        !self.tracked || !unit.capabilities().dirty_tracking
    }

    /// Detaches `device`, and says whether it could write without leaving a trace. `None` when it is
    /// not here.
    pub(crate) fn detach(&mut self, device: DeviceId) -> Option<Result<bool, DetachError>> {
        let mut members = self.devices.0.iter();
        let place = members.position(|member| member.device == device)?;
        let unit = Arc::clone(&self.devices.0[place].unit);
        Some(detach(&*unit, device).map(|()| {
            self.devices.0.remove(place);
            self.is_blind_to(&*unit)
        }))
    }

    /// Makes the leaves in `range` ones of at most `size` bytes.
    pub(crate) fn split(
        &self,
        range: Span<Iova>,
        size: u64,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        self.resize(|table, gather, flush| table.split(range, size, interruption, gather, flush))
    }

    /// Has `job` change the sizes of leaves.
    fn resize(
        &self,
        job: impl FnOnce(&AnyTable, &mut Gather, Flush<'_>) -> Result<(), ResizeError<FlushError>>,
    ) -> Result<(), ResizeError<FlushError>> {
        self.settle().map_err(ResizeError::Flush)?;
        let mut gather = Gather::new();
        let mut flush = |what: &Invalidation| self.invalidate(what);
        let done = job(&self.table, &mut gather, &mut flush);
        self.join(&mut self.gathers.lock().left, gather);
        if matches!(done, Err(ResizeError::Flush(_))) {
            self.unsettled.fetch_add(1, Ordering::SeqCst);
        }
        done
    }

    /// Flushes what an earlier change of sizes has left to be flushed.
    pub(crate) fn settle(&self) -> Result<(), FlushError> {
        if self.unsettled.load(Ordering::SeqCst) > 0 {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// The leaf that goes on over one of the ends of `range`.
    pub(crate) fn leaf_over_ends(&self, range: Span<Iova>) -> Option<Run> {
        let table = &self.table;
        [range.start, range.last()].into_iter().find_map(|end| {
            let leaf = table.leaf_at(end)?;
            (!range.covers(&leaf.run.input())).then_some(leaf.run)
        })
    }

    /// Has a leaf begin at `at`, if one goes through it.
    pub(crate) fn cut(
        &self,
        at: u64,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        self.resize(|table, gather, flush| table.cut(at, interruption, gather, flush))
    }

    /// Gives the leaves in `range`, which lies in `area`, the largest sizes that are possible in the
    /// area, and so those beside it that lie in one larger page with some of it. Others are as they
    /// were: what this costs is a matter of `range` and of the tables that are looked at for such a page.
    pub(crate) fn merge(
        &self,
        range: Span<Iova>,
        area: Span<Iova>,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        let first = self.table.leaf_at(range.start);
        let ends = if first.is_some_and(|leaf| leaf.run.input().covers(&range)) {
            [Some(range.start), None]
        } else {
            self.merge_in(range, interruption)?;
            [Some(range.start), Some(range.last())]
        };
        for end in ends.into_iter().flatten() {
            if let Some(page) = self.complete_page(end, area) {
                self.merge_in(page, interruption)?;
            }
        }
        Ok(())
    }

    /// The largest page in `area` around the leaf at `at` that could be one leaf and is not.
    ///
    /// In a page that could be one, so could each smaller page.
    fn complete_page(&self, at: u64, area: Span<Iova>) -> Option<Span<Iova>> {
        let table = &self.table;
        let leaf = table.leaf_at(at)?.run;
        let sizes = table.page_sizes();
        let larger = sizes.iter().filter(|size| *size > leaf.len);
        larger
            .take_while(|size| (leaf.iova ^ leaf.pa) & (size - 1) == 0)
            .map(|size| Span::new(leaf.iova & !(size - 1), size))
            .take_while(|page| area.covers(page) && table.is_one_run(*page))
            .last()
    }

    fn merge_in(
        &self,
        range: Span<Iova>,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        self.resize(|table, gather, flush| table.merge(range, interruption, gather, flush))
    }

    /// Ends the domain, which has no devices any more: each unit has dropped it with its last
    /// one. All tables are given back. Returns what devices have written to, if that is tracked.
    pub(crate) fn end(self) -> DirtyLog {
        let mut written = self.written.into_inner();
        let table = self.table;
        self.spare.into_inner().end(table.memory());
        let Gathers { fresh, left, .. } = self.gathers.into_inner();
        for gather in [fresh, left] {
            table.memory().reclaim(gather.never_walked().into_tables());
        }
        end_table(table, Gather::new(), self.tracked, &mut written);
        written
    }
}

/// Entries of a flush under way. Dropped, unflushed entries wait for the next flush.
struct Batch<'d> {
    domain: &'d Domain,
    gather: Gather,
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        let gathers = &mut *self.domain.gathers.lock();
        let mut left = mem::take(&mut self.gather);
        self.domain.join(&mut left, mem::take(&mut gathers.left));
        gathers.left = left;
        gathers.under_way = None;
    }
}

/// Empties `range` of a table, in which leaves end where it ends.
pub(super) fn empty_table(
    table: &AnyTable,
    gather: &mut Gather,
    range: Span<Iova>,
    owned: Span<Iova>,
    tracked: bool,
    note: &mut dyn FnMut(Span<Iova>),
) -> Result<(), iopt::TableUnmapError> {
    let owner = table.owning(owned);
    if !tracked {
        return owner.clear(range, gather);
    }
    let mut noting = WithDirty(|run: Run, dirty: bool| {
        if dirty {
            note(run.input());
        }
    });
    let emptied = owner.unmap_mapped(range, gather, &mut noting);
    emptied.map(|_| ())
}

/// Gives back all tables of one that no unit walks, and what was taken out of it. What devices have
/// written to goes to `written` if that is tracked.
pub(super) fn end_table(
    table: AnyTable,
    mut gather: Gather,
    tracked: bool,
    written: &mut DirtyLog,
) {
    if tracked {
        let mut joiner = Joiner::new();
        for half in table.aperture().spans() {
            // Refused only in a damaged table, of which all is given back all the same.
            let _ = empty_table(&table, &mut gather, half, half, true, &mut |run| {
                joiner
                    .push(run)
                    .into_iter()
                    .for_each(|run| written.add(run));
            });
        }
        joiner.finish().into_iter().for_each(|run| written.add(run));
    }
    let (rest, memory) = table.tear_down();
    for gather in [gather, rest] {
        memory.reclaim(gather.never_walked().into_tables());
    }
}

impl Devices {
    /// The units, each of them once.
    pub(crate) fn units(&self) -> impl Iterator<Item = &dyn Unit> {
        let all = &self.0;
        all.iter().enumerate().filter_map(|(i, member)| {
            let mut before = all[..i].iter();
            let first = before.all(|other| !Arc::ptr_eq(&member.unit, &other.unit));
            first.then_some(&*member.unit)
        })
    }

    /// Has units that remember what was not present invalidate that, since `range` was mapped.
    pub(crate) fn mapped(&self, id: DomainId, range: Span<Iova>) -> Result<(), FlushError> {
        let what = Invalidation::mapped(range);
        self.units()
            .filter(|unit| unit.capabilities().caches_not_present)
            .try_for_each(|unit| unit.invalidate(id, &what))
    }

    /// Has every unit invalidate `what` of domain `id`, and waits for it.
    pub(crate) fn invalidate(&self, id: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        self.units().try_for_each(|unit| unit.invalidate(id, what))
    }

    /// Detaches every device that its unit releases. The error is that of the first one that stays.
    pub(crate) fn detach_all(&mut self) -> Result<(), DetachError> {
        let mut result = Ok(());
        self.0.retain(|member| {
            let detached = detach(&*member.unit, member.device);
            result = result.and(detached);
            detached.is_err()
        });
        result
    }
}

pub(crate) fn detach(unit: &dyn Unit, device: DeviceId) -> Result<(), DetachError> {
    match unit.detach(device) {
        // Other code has detached it meanwhile, and that is complete.
        Ok(()) | Err(iommu::UnitAttachError::NotAttached { .. }) => Ok(()),
        Err(cause) => Err(DetachError::Unit(cause)),
    }
}
