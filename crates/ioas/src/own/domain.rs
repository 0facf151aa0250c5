//! A domain: one page table, and the devices that translate through it.
//!
//! What is taken out of the table is gathered here until every unit of the domain has forgotten it.
//! Over failed flushes the gather keeps it.

use alloc::sync::Arc;
use alloc::vec::Vec;

use iommu::{DeviceId, DomainId, FlushError, NodeId, Unit};
use iopt::{
    AnyTable, Discard, FormatId, Gather, Interruption, Invalidation, Prot, ResizeError, WithDirty,
};
use runs::{Iova, Joiner, PageSizes, Run, Span};

use super::relocate::Leaving;
use super::spare::Spare;
use super::written::Written;
use crate::error::DetachError;
use crate::placement::home;

pub(crate) struct Domain {
    pub(crate) id: DomainId,
    pub(crate) table: AnyTable,
    pub(crate) devices: Devices,
    /// What was taken out of the table and is not flushed yet.
    pub(crate) gather: Gather,
    /// What the units that may join must answer to "DMA is forced to be coherent"; `None` when the
    /// caller has built the table and answers for that.
    pub(crate) coherent: Option<bool>,
    /// Where its tables were asked to lie.
    pub(crate) tables_on: Option<NodeId>,
    /// The table keeps what devices have written to.
    pub(crate) tracked: bool,
    /// The table that units walked before, until all of them walk the new one.
    pub(super) leaving: Option<Leaving>,
    pub(super) written: Written,
    /// Leaves have a new size that a unit may not have taken notice of: until it has, they must not
    /// be changed again, since it may still note in the old ones what a device does.
    unsettled: bool,
    /// Tables for what is released.
    pub(super) spare: Spare,
}

/// Has every unit forget something, and waits for it.
type Flush<'a> = &'a mut dyn FnMut(&Invalidation) -> Result<(), FlushError>;

/// Devices of a domain.
#[derive(Default)]
pub(crate) struct Devices(pub(crate) Vec<Member>);

/// A device of a domain.
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
            gather: Gather::new(),
            coherent,
            tables_on: None,
            tracked: false,
            leaving: None,
            written: Written::default(),
            unsettled: false,
            spare: Spare::new(),
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

    /// The node of its devices: that of the first of which one is known.
    pub(crate) fn node(&self) -> Option<NodeId> {
        let mut members = self.devices.0.iter();
        members.find_map(|member| home(&*member.unit, member.near))
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
            self.spare.fill_up(self.table.memory());
        }
        // All units walk the new table.
        if let Some(leaving) = self.leaving.take() {
            leaving.end(self.tracked, &mut self.written);
        }
        self.unsettled = false;
        Ok(())
    }

    /// Empties `range`, in which leaves end where it ends. `note` is told what a device has written
    /// to, while that is tracked.
    pub(crate) fn empty(
        &mut self,
        range: Span<Iova>,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), iopt::UnmapError> {
        let tracked = self.tracked;
        if let Some(leaving) = &mut self.leaving {
            leaving.empty(range, tracked, note)?;
        }
        self.written.take(range, note);
        let Self { table, gather, .. } = self;
        empty_table(table, gather, range, tracked, note)
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
        self.written.clear();
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
        &mut self,
        range: Span<Iova>,
        size: u64,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        self.resize(|table, gather, flush| table.split(range, size, interruption, gather, flush))
    }

    /// Has `job` change the sizes of leaves.
    fn resize(
        &mut self,
        job: impl FnOnce(&mut AnyTable, &mut Gather, Flush<'_>) -> Result<(), ResizeError<FlushError>>,
    ) -> Result<(), ResizeError<FlushError>> {
        // One table has leaves of other sizes, not two.
        self.unsettled |= self.leaving.is_some();
        self.settle().map_err(ResizeError::Flush)?;
        let (id, devices) = (self.id, &self.devices);
        let mut flush = |what: &Invalidation| devices.invalidate(id, what);
        let done = job(&mut self.table, &mut self.gather, &mut flush);
        self.unsettled = matches!(done, Err(ResizeError::Flush(_)));
        done
    }

    /// Flushes what an earlier change of sizes has left to be flushed.
    pub(crate) fn settle(&mut self) -> Result<(), FlushError> {
        if self.unsettled { self.flush() } else { Ok(()) }
    }

    /// The leaf that goes on over one of the ends of `range`.
    pub(crate) fn leaf_over_ends(&self, range: Span<Iova>) -> Option<Run> {
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
    ) -> Result<(), ResizeError<FlushError>> {
        self.resize(|table, gather, flush| table.cut(at, interruption, gather, flush))
    }

    /// Gives the leaves in `range`, which lies in `area`, the largest sizes that are possible in the
    /// area, and so those beside it that lie in one larger page with some of it. Others are as they
    /// were: what this costs is a matter of `range` and of the tables that are looked at for such a page.
    pub(crate) fn merge(
        &mut self,
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
        let leaf = self.table.leaf_at(at)?.run;
        let sizes = self.table.page_sizes();
        let larger = sizes.iter().filter(|size| *size > leaf.len);
        larger
            .take_while(|size| (leaf.iova ^ leaf.pa) & (size - 1) == 0)
            .map(|size| Span::new(leaf.iova & !(size - 1), size))
            .take_while(|page| area.covers(page) && self.table.is_one_run(*page))
            .last()
    }

    fn merge_in(
        &mut self,
        range: Span<Iova>,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        self.resize(|table, gather, flush| table.merge(range, interruption, gather, flush))
    }

    /// Ends the domain, which has no devices any more: each unit has forgotten it with its last
    /// one. All tables are given back. Returns what devices have written to, if that is tracked.
    pub(crate) fn end(self) -> Written {
        let mut written = self.written;
        if let Some(leaving) = self.leaving {
            leaving.end(self.tracked, &mut written);
        }
        self.spare.end(self.table.memory());
        end_table(self.table, self.gather, self.tracked, &mut written);
        written
    }
}

/// Empties `range` of a table, in which leaves end where it ends.
pub(super) fn empty_table(
    table: &mut AnyTable,
    gather: &mut Gather,
    range: Span<Iova>,
    tracked: bool,
    note: &mut dyn FnMut(Span<Iova>),
) -> Result<(), iopt::UnmapError> {
    let mut noting = WithDirty(|run: Run, dirty: bool| {
        if dirty {
            note(run.input());
        }
    });
    let emptied = if tracked {
        table.unmap_mapped(range, gather, &mut noting)
    } else {
        table.unmap_mapped(range, gather, &mut Discard)
    };
    emptied.map(|_| ())
}

/// Gives back all tables of one that no unit walks, and what was taken out of it. What devices have
/// written to goes to `written` if that is tracked.
pub(super) fn end_table(
    mut table: AnyTable,
    mut gather: Gather,
    tracked: bool,
    written: &mut Written,
) {
    if tracked {
        let mut joiner = Joiner::new();
        for half in table.aperture().spans() {
            // Refused only in a damaged table, of which all is given back all the same.
            let _ = empty_table(&mut table, &mut gather, half, true, &mut |run| {
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

    /// Has every unit forget `what` of domain `id`, and waits for it.
    pub(crate) fn invalidate(&self, id: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        self.units().try_for_each(|unit| unit.invalidate(id, what))
    }

    /// Detaches every device that its unit lets go. The error is that of the first one that stays.
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

fn detach(unit: &dyn Unit, device: DeviceId) -> Result<(), DetachError> {
    match unit.detach(device) {
        // Somebody has detached it behind our back, and that has come to its end.
        Ok(()) | Err(iommu::AttachError::NotAttached { .. }) => Ok(()),
        Err(cause) => Err(DetachError::Unit(cause)),
    }
}
