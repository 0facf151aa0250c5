//! The calls of an [`AnyTable`](crate::AnyTable), as an object: each takes what a call of a
//! [`SharedTable`] takes, with closures and sinks behind references, so that it is compiled once for each
//! format.

use alloc::boxed::Box;
use core::fmt;

use runs::{Iova, Pa, PageSizes, Run, SizeHistogram, Span};

use super::ByWidth;
use crate::arena::erased::Erased;
use crate::engine::{
    Amount, Disjoint, Interruption, Leaf, MapPages as _, NoRuns, Nodes, Plan, Progress, RunSink,
    SharedTable, Wants,
};
use crate::error::{
    BrokenMemory, BuildError, DirtyError, ProtectError, RangeError, ResizeError, TableMapError,
    TableUnmapError,
};
use crate::format::{Aperture, Format, Root};
use crate::gather::{Flushed, Gather, Invalidation};
use crate::memory::Chain;
use crate::pending::Pending;
use crate::prot::Prot;
use crate::reclaim::{DefaultReclaim, Guard};

/// A [`SharedTable`] of a format that the caller does not know.
pub(super) trait AnyFormat: fmt::Debug + Send + Sync {
    fn root(&self) -> Root;
    fn aperture(&self) -> Aperture;
    fn intact(&self) -> Result<(), BrokenMemory>;
    fn grow(&self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError>;
    fn table_log2(&self, level: usize) -> Option<u32>;
    fn page_sizes(&self) -> PageSizes;
    fn expresses(&self, prot: Prot) -> bool;
    fn tables(&self) -> u64;
    fn leaf_sizes(&self) -> SizeHistogram;
    fn map(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError>;
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
        owned: Option<Span<Iova>>,
        amount: Amount,
        gather: &mut Gather,
        told: DynSink<'_>,
    ) -> Result<u64, TableUnmapError>;
    fn map_pages(
        &self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError>;
    fn unmap_pages(
        &self,
        iova: u64,
        size: u64,
        count: u64,
        owned: Option<Span<Iova>>,
        gather: &mut Gather,
    ) -> Progress<TableUnmapError>;
    fn check_ends(&self, range: Span<Iova>) -> Result<[Option<u64>; 2], RangeError>;
    fn resize(
        &self,
        resize: Resize,
        interruption: Interruption,
        gather: &mut Gather,
        flush: &mut dyn FnMut(&Invalidation) -> Result<(), Failed>,
    ) -> Result<(), ResizeError<Failed>>;
    fn protect(
        &self,
        range: Span<Iova>,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError>;
    fn track_dirty(&self, on: bool) -> Result<(), DirtyError>;
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
    fn nodes(&self) -> Nodes;
    fn translate(&self, iova: u64) -> Option<u64>;
    fn leaf_at(&self, iova: u64) -> Option<Leaf>;
    fn is_one_run(&self, range: Span<Iova>) -> bool;
    fn for_each_leaf(&self, range: Span<Iova>, each: &mut dyn FnMut(Leaf));
    fn reclaim(&self, flushed: Flushed);
    fn poll(&self) -> bool;
    fn tear_down(self: Box<Self>) -> Gather;
}

impl<F: Format, C: ByWidth> AnyFormat for SharedTable<F, Erased<C>> {
    fn root(&self) -> Root {
        self.root()
    }
    fn aperture(&self) -> Aperture {
        self.format().aperture()
    }
    fn intact(&self) -> Result<(), BrokenMemory> {
        self.intact()
    }
    fn grow(&self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        self.grow(levels, gather)
    }
    fn table_log2(&self, level: usize) -> Option<u32> {
        self.table().table_log2(level)
    }
    fn page_sizes(&self) -> PageSizes {
        self.table().page_sizes()
    }
    fn expresses(&self, prot: Prot) -> bool {
        self.format().leaf_bits(prot).is_some()
    }
    fn tables(&self) -> u64 {
        self.table().tables()
    }
    fn leaf_sizes(&self) -> SizeHistogram {
        let _guard = self.guard();
        self.table().leaf_sizes()
    }
    fn map(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError> {
        self.map(iova, runs, prot)
    }
    fn plan<'t>(
        &self,
        iova: u64,
        runs: &'t [Span<Pa>],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<Plan<'t>, TableMapError> {
        self.table()
            .plan_request(iova, runs, prot, spare, Disjoint::NOTHING)
    }
    fn fill(&self, plan: &mut Plan<'_>) -> Result<(), TableMapError> {
        self.table().fill_plan(plan, Disjoint::NOTHING)
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
        owned: Option<Span<Iova>>,
        amount: Amount,
        gather: &mut Gather,
        mut told: DynSink<'_>,
    ) -> Result<u64, TableUnmapError> {
        let _guard = self.guard();
        let table = self.table();
        let access = owned.map_or(Disjoint::ALL, |owned| table.owned(range, Some(owned)));
        match told.wants {
            Wants::Nothing => table.unmap_as(range, amount, gather, &mut NoRuns, access),
            Wants::Runs | Wants::DirtyRuns => {
                table.unmap_as(range, amount, gather, &mut told, access)
            }
        }
    }
    fn map_pages(
        &self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError> {
        (&mut &*self).map_pages(iova, page, count, prot)
    }
    fn unmap_pages(
        &self,
        iova: u64,
        size: u64,
        count: u64,
        owned: Option<Span<Iova>>,
        gather: &mut Gather,
    ) -> Progress<TableUnmapError> {
        let _guard = self.guard();
        let table = self.table();
        let range = Span::new(iova, size.saturating_mul(count));
        let access = owned.map_or(Disjoint::ALL, |owned| table.owned(range, Some(owned)));
        table.unmap_pages_as(iova, size, count, gather, access)
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
        match resize {
            Resize::Split(range, size) => self.split(range, size, interruption, gather, flush),
            Resize::Cut(at) => self.cut(at, interruption, gather, flush),
            Resize::Merge(range) => self.merge(range, interruption, gather, flush),
        }
    }
    fn protect(
        &self,
        range: Span<Iova>,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError> {
        self.protect(range, prot, gather)
    }
    fn track_dirty(&self, on: bool) -> Result<(), DirtyError> {
        self.track_dirty(on)
    }
    fn harvest(
        &self,
        range: Span<Iova>,
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<u64, DirtyError> {
        self.harvest(range, pending)
    }
    fn peek_dirty(
        &self,
        range: Span<Iova>,
        each: &mut dyn FnMut(Span<Iova>),
    ) -> Result<u64, DirtyError> {
        self.peek_dirty(range, each)
    }
    fn write_image(&self, mut sink: &mut dyn FnMut(&[u8]) -> Result<(), Failed>) -> u64 {
        let _guard = self.guard();
        self.table().write_image(&mut sink).unwrap_or(0)
    }
    fn nodes(&self) -> Nodes {
        let _guard = self.guard();
        self.table().nodes()
    }
    fn translate(&self, iova: u64) -> Option<u64> {
        self.translate(iova)
    }
    fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.leaf_at(iova)
    }
    fn is_one_run(&self, range: Span<Iova>) -> bool {
        let _guard = self.guard();
        self.table().is_one_run(range)
    }
    fn for_each_leaf(&self, range: Span<Iova>, each: &mut dyn FnMut(Leaf)) {
        let _guard = self.guard();
        self.table().leaves(range).for_each(each);
    }
    fn reclaim(&self, flushed: Flushed) {
        self.reclaim(flushed);
    }
    fn poll(&self) -> bool {
        self.poll()
    }
    fn tear_down(self: Box<Self>) -> Gather {
        (*self).into_inner().tear_down().0
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
pub(super) enum Resize {
    Split(Span<Iova>, u64),
    Cut(u64),
    Merge(Span<Iova>),
}

/// A call back to the caller failed. The caller keeps the cause, since only it knows its type.
pub(super) struct Failed;
