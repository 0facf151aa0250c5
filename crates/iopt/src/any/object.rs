//! The calls of an [`AnyTable`](crate::AnyTable), as an object, so that they are compiled once for each format.

use alloc::boxed::Box;
use core::fmt;

use runs::{Iova, Pa, PageSizes, Run, SizeHistogram, Span};

use super::ByWidth;
use crate::arena::erased::Erased;
use crate::engine::{
    Amount, Bound, Inside, Interruption, Leaf, NoRuns, Nodes, Owned, Plan, Progress, RunSink,
    SharedTable, TableOps, Wants,
};
use crate::error::{
    BrokenPlan, BuildError, DirtyError, ProtectError, RangeError, ResizeError, TableMapError,
    TableUnmapError,
};
use crate::format::{Aperture, BreakBeforeMake, Format, Root};
use crate::gather::{Flushed, Gather, Invalidation};
use crate::memory::Chain;
use crate::pending::Pending;
use crate::prot::Prot;
use crate::reclaim::{DefaultReclaim, Guard};

/// The operations of an [`AnyTable`](crate::AnyTable) that are the same for every caller: each is one virtual call, and
/// what the operation of the same name does inside a [`SharedTable`].
pub trait AnyOps: fmt::Debug + Send + Sync {
    /// See [`Table::root`](crate::Table::root).
    fn root(&self) -> Root;
    /// The addresses that it translates.
    fn aperture(&self) -> Aperture;
    /// See [`Table::intact`](crate::Table::intact).
    fn intact(&self) -> Result<(), BrokenPlan>;
    /// See [`Table::table_log2`](crate::Table::table_log2).
    fn table_log2(&self, level: usize) -> Option<u32>;
    /// See [`Table::page_sizes`](crate::Table::page_sizes).
    fn page_sizes(&self) -> PageSizes;
    /// True when entries can say this: see [`Format::leaf_bits`].
    fn expresses(&self, prot: Prot) -> bool;
    /// The demands of a unit that the table keeps: see [`Format::break_before_make`].
    fn break_before_make(&self) -> BreakBeforeMake;
    /// See [`Table::tables`](crate::Table::tables).
    fn tables(&self) -> u64;
    /// See [`Table::leaf_sizes`](crate::Table::leaf_sizes).
    fn leaf_sizes(&self) -> SizeHistogram;
    /// See [`Table::nodes`](crate::Table::nodes).
    fn nodes(&self) -> Nodes;
    /// See [`Table::translate`](crate::Table::translate).
    fn translate(&self, iova: u64) -> Option<u64>;
    /// See [`Table::leaf_at`](crate::Table::leaf_at).
    fn leaf_at(&self, iova: u64) -> Option<Leaf>;
    /// See [`Table::is_one_run`](crate::Table::is_one_run).
    fn is_one_run(&self, range: Span<Iova>) -> bool;
    /// See [`SharedTable::grow`].
    fn grow(&self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError>;
    /// See [`TableOps::map`].
    fn map(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError>;
    /// See [`TableOps::map_pages`].
    fn map_pages(
        &self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError>;
    /// See [`TableOps::protect`].
    fn protect(
        &self,
        range: Span<Iova>,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError>;
    /// See [`SharedTable::track_dirty`].
    fn track_dirty(&self, on: bool) -> Result<(), DirtyError>;
    /// See [`SharedTable::reclaim`].
    fn reclaim(&self, flushed: Flushed);
    /// See [`SharedTable::poll`].
    fn poll(&self) -> bool;
}

/// The operations in which a caller has a say by its types: with closures and sinks behind references.
pub(super) trait AnyFormat: AnyOps {
    fn as_ops(&self) -> &(dyn AnyOps + 'static);
    fn plan<'t>(
        &self,
        iova: u64,
        runs: &'t [Span<Pa>],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<Plan<'t>, TableMapError>;
    fn fill(&self, plan: &mut Plan<'_>) -> Result<(), TableMapError>;
    fn drop_plan(&self, plan: &mut Plan<'_>);
    /// Inside for as long as the guard lives.
    fn guard(&self) -> Guard<'_, DefaultReclaim>;
    fn unmap(
        &self,
        range: Span<Iova>,
        owned: Owned,
        removal: Removal,
        gather: &mut Gather,
        sink: DynSink<'_>,
    ) -> Progress<TableUnmapError>;
    fn check_ends(&self, range: Span<Iova>) -> Result<[Option<u64>; 2], RangeError>;
    fn resize(
        &self,
        resize: Resize,
        interruption: Interruption,
        gather: &mut Gather,
        flush: &mut dyn FnMut(&Invalidation) -> Result<(), Failed>,
    ) -> Result<(), ResizeError<Failed>>;
    fn harvest(
        &self,
        range: Span<Iova>,
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<u64, DirtyError>;
    fn peek_dirty(
        &self,
        range: Span<Iova>,
        each: &mut dyn FnMut(Span<Iova>),
    ) -> Result<u64, DirtyError>;
    /// 0 where the sink has failed.
    fn write_image(&self, sink: &mut dyn FnMut(&[u8]) -> Result<(), Failed>) -> u64;
    fn for_each_leaf(&self, range: Span<Iova>, each: &mut dyn FnMut(Leaf));
    fn tear_down(self: Box<Self>) -> Gather;
}

/// Does `operation` inside, and once more if it found no tables while some waited to be given back together: they wait
/// for this thread, too.
fn retried<F: Format, C: ByWidth, T, E>(
    table: &SharedTable<F, Erased<C>>,
    found_none: impl Fn(&E) -> bool,
    mut operation: impl FnMut(&mut Inside<'_, F, Erased<C>>) -> Result<T, E>,
) -> Result<T, E> {
    let done = operation(&mut table.enter());
    match done {
        Err(error) if found_none(&error) && !table.is_idle() => {
            table.poll();
            operation(&mut table.enter())
        }
        done => done,
    }
}

impl<F: Format, C: ByWidth> AnyOps for SharedTable<F, Erased<C>> {
    fn root(&self) -> Root {
        self.table().root()
    }
    fn aperture(&self) -> Aperture {
        self.table().aperture()
    }
    fn intact(&self) -> Result<(), BrokenPlan> {
        self.table().intact()
    }
    fn table_log2(&self, level: usize) -> Option<u32> {
        self.table().table_log2(level)
    }
    fn page_sizes(&self) -> PageSizes {
        self.table().page_sizes()
    }
    fn expresses(&self, prot: Prot) -> bool {
        self.table().format().leaf_bits(prot).is_some()
    }
    fn break_before_make(&self) -> BreakBeforeMake {
        self.table().format().break_before_make()
    }
    fn tables(&self) -> u64 {
        self.table().tables()
    }
    fn leaf_sizes(&self) -> SizeHistogram {
        self.enter().leaf_sizes()
    }
    fn nodes(&self) -> Nodes {
        self.enter().nodes()
    }
    fn translate(&self, iova: u64) -> Option<u64> {
        self.enter().translate(iova)
    }
    fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.enter().leaf_at(iova)
    }
    fn is_one_run(&self, range: Span<Iova>) -> bool {
        self.enter().is_one_run(range)
    }
    fn grow(&self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        let none = |error: &BuildError| matches!(error, BuildError::NoTables(_));
        match self.grow(levels, gather) {
            Err(error) if none(&error) && !self.is_idle() => {
                self.poll();
                self.grow(levels, gather)
            }
            done => done,
        }
    }
    fn map(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError> {
        let none = |error: &TableMapError| matches!(error, TableMapError::NoTables(_));
        retried(self, none, |inside| inside.map(iova, runs, prot))
    }
    fn map_pages(
        &self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError> {
        self.enter().map_pages(iova, page, count, prot)
    }
    fn protect(
        &self,
        range: Span<Iova>,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError> {
        self.enter().protect(range, prot, gather)
    }
    fn track_dirty(&self, on: bool) -> Result<(), DirtyError> {
        self.track_dirty(on)
    }
    fn reclaim(&self, flushed: Flushed) {
        self.reclaim(flushed);
    }
    fn poll(&self) -> bool {
        self.poll()
    }
}

impl<F: Format, C: ByWidth> AnyFormat for SharedTable<F, Erased<C>> {
    fn as_ops(&self) -> &(dyn AnyOps + 'static) {
        self
    }
    fn plan<'t>(
        &self,
        iova: u64,
        runs: &'t [Span<Pa>],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<Plan<'t>, TableMapError> {
        self.table().plan_request(iova, runs, prot, spare)
    }
    fn fill(&self, plan: &mut Plan<'_>) -> Result<(), TableMapError> {
        self.table().fill_plan(plan)
    }
    fn drop_plan(&self, plan: &mut Plan<'_>) {
        plan.give_back(self.table().memory());
    }
    fn guard(&self) -> Guard<'_, DefaultReclaim> {
        self.guard()
    }
    fn unmap(
        &self,
        range: Span<Iova>,
        owned: Owned,
        removal: Removal,
        gather: &mut Gather,
        mut sink: DynSink<'_>,
    ) -> Progress<TableUnmapError> {
        let mut inside = self.enter_as(owned);
        match sink.wants {
            Wants::Nothing => removal.by(&mut inside, range, gather, &mut NoRuns),
            Wants::Runs | Wants::DirtyRuns => removal.by(&mut inside, range, gather, &mut sink),
        }
    }
    fn check_ends(&self, range: Span<Iova>) -> Result<[Option<u64>; 2], RangeError> {
        self.table().check_ends(range)
    }
    fn resize(
        &self,
        resize: Resize,
        interruption: Interruption,
        gather: &mut Gather,
        flush: &mut dyn FnMut(&Invalidation) -> Result<(), Failed>,
    ) -> Result<(), ResizeError<Failed>> {
        let none = |error: &ResizeError<_>| matches!(error, ResizeError::NoTables(_));
        retried(self, none, |inside| match resize {
            Resize::Split(range, size) => {
                inside.split(range, size, interruption, gather, &mut *flush)
            }
            Resize::Cut(at) => inside.cut(at, interruption, gather, &mut *flush),
            Resize::Merge(range) => inside.merge(range, interruption, gather, &mut *flush),
        })
    }
    fn harvest(
        &self,
        range: Span<Iova>,
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<u64, DirtyError> {
        self.enter().harvest(range, pending)
    }
    fn peek_dirty(
        &self,
        range: Span<Iova>,
        each: &mut dyn FnMut(Span<Iova>),
    ) -> Result<u64, DirtyError> {
        self.enter().peek_dirty(range, each)
    }
    fn write_image(&self, mut sink: &mut dyn FnMut(&[u8]) -> Result<(), Failed>) -> u64 {
        self.enter().write_image(&mut sink).unwrap_or(0)
    }
    fn for_each_leaf(&self, range: Span<Iova>, each: &mut dyn FnMut(Leaf)) {
        self.enter().leaves(range).for_each(each);
    }
    fn tear_down(self: Box<Self>) -> Gather {
        (*self).into_inner().tear_down().0
    }
}

/// The operation that removes.
pub(super) enum Removal {
    Amount(Amount),
    Some(Bound),
    Pages { size: u64, count: u64 },
}

impl Removal {
    fn by<T: TableOps>(
        self,
        ops: &mut T,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Progress<TableUnmapError> {
        match self {
            Self::Amount(amount) => {
                let claim = ops.claim(range);
                match ops.table().unmap_range(range, amount, gather, sink, claim) {
                    Ok(bytes) => Progress {
                        bytes,
                        result: Ok(()),
                    },
                    Err(cause) => Progress {
                        bytes: 0,
                        result: Err(cause),
                    },
                }
            }
            Self::Some(bound) => ops.unmap_some(range, bound, gather, sink),
            Self::Pages { size, count } => ops.unmap_pages(range.start, size, count, gather),
        }
    }
}

/// Receives runs, with their dirty state or without: an unmap is compiled once for both, and
/// once for those who want nothing.
pub(super) struct DynSink<'s> {
    sink: &'s mut dyn RunSink,
    wants: Wants,
}

impl<'s> DynSink<'s> {
    pub(super) fn of(sink: &'s mut impl RunSink) -> Self {
        let wants = sink.wants();
        Self { sink, wants }
    }
}

impl RunSink for DynSink<'_> {
    #[inline(always)]
    fn wants(&self) -> Wants {
        match self.wants {
            Wants::DirtyRuns => Wants::DirtyRuns,
            // A sink that wants nothing does not come here, so no code is made for it.
            Wants::Runs | Wants::Nothing => Wants::Runs,
        }
    }

    #[inline(always)]
    fn run(&mut self, run: Run) {
        self.sink.run(run);
    }

    #[inline(always)]
    fn dirty_run(&mut self, run: Run, dirty: bool) {
        self.sink.dirty_run(run, dirty);
    }
}

/// How leaves are to change their sizes.
#[derive(Clone, Copy)]
pub(super) enum Resize {
    Split(Span<Iova>, u64),
    Cut(u64),
    Merge(Span<Iova>),
}

/// A call back to the caller failed. The caller keeps the cause, since only it knows its type.
pub(super) struct Failed;
