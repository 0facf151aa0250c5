//! The operations on a table, written once for the three ways to get them.
//!
//! | way | others meanwhile | tables that an operation may free | what was unlinked comes back |
//! |---|---|---|---|
//! | `&mut` [`Table`] | none | all that it empties | at once, when it is flushed |
//! | [`Inside`], from [`SharedTable::enter`](super::SharedTable::enter) | operations on other ranges, readers | those that only its range spans, or what it [owns](super::SharedTable::owning) | when all who were inside have left |
//! | [`Inside`], from [`Table::unguarded`] | operations on other ranges; the caller holds readers off | those that only its range spans | at once, when it is flushed |
//!
//! So a single-threaded user pays for no guard, and a kernel brings its own.

use runs::{Iova, Pa, Span};

use super::Table;
use super::claim::Claim;
use super::inside::Inside;
use super::look::Amount;
use super::planned::Planned;
use super::progress::{Bound, Progress};
use super::request::LeafBits;
use super::resize::{Interruption, Job};
use super::sink::{NoRuns, RunSink};
use crate::error::{DirtyError, ProtectError, ResizeError, TableMapError, TableUnmapError};
use crate::format::Format;
use crate::gather::{Flushed, Gather, Invalidation};
use crate::memory::{Chain, TableMemory};
use crate::pending::Pending;
use crate::prot::Prot;
use crate::reclaim::Reclaim;

/// The operations that change a [`Table`]: by `&mut`, or from [`Inside`] one that others use meanwhile. Operations
/// that only read are those of [`Table`] itself.
///
/// Addresses and lengths are bytes, and multiples of the smallest of the table's [page sizes](Table::page_sizes).
pub trait TableOps {
    /// The table's format.
    type Format: Format;
    /// The table's memory.
    type Memory: TableMemory;

    /// The table.
    #[doc(hidden)]
    fn table(&self) -> &Table<Self::Format, Self::Memory>;

    /// The addresses that an operation on `range` has for itself.
    #[doc(hidden)]
    fn claim(&self, range: Span<Iova>) -> Claim;

    /// Takes tables that are unlinked and flushed.
    #[doc(hidden)]
    fn retire(&mut self, tables: Chain);

    /// Maps `runs`, laid end to end, from `iova` on.
    ///
    /// The largest leaves that alignment, length and the allowed sizes permit are used, stretch by
    /// stretch. Either everything is mapped, or the table's bytes are what they were.
    #[inline(always)]
    fn map(&mut self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError> {
        self.table().map_runs(iova, runs, prot)
    }

    /// [`map`](Self::map) that first gives back the empty tables that the range covers whole, so that the largest leaves
    /// can take their place: tables that were [kept](Table::keep_empty_tables), or that operations on parts of the range
    /// have emptied.
    ///
    /// Units may still look for entries in those tables: until the gather is flushed the new mapping
    /// can be missing to them.
    fn map_anew(
        &mut self,
        iova: u64,
        runs: &[Span<Pa>],
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), TableMapError> {
        let claim = self.claim(end_to_end(iova, runs));
        let table = self.table();
        table.map_any(iova, runs, prot, table.sizes, Some((gather, claim)))
    }

    /// [`map`](Self::map) with leaves that say `bits` beside their address and size: those of
    /// [`Format::leaf_bits`], or others that a kernel wants the unit to read there (memory types, a leaf that is dirty from
    /// the beginning).
    #[inline(always)]
    fn map_leaves(&mut self, iova: u64, runs: &[Span<Pa>], bits: u64) -> Result<(), TableMapError> {
        self.table().map_runs(iova, runs, LeafBits(bits))
    }

    /// [`map_leaves`](Self::map_leaves) as [`map_anew`](Self::map_anew).
    fn map_leaves_anew(
        &mut self,
        iova: u64,
        runs: &[Span<Pa>],
        bits: u64,
        gather: &mut Gather,
    ) -> Result<(), TableMapError> {
        let claim = self.claim(end_to_end(iova, runs));
        let (table, bits) = (self.table(), LeafBits(bits));
        table.map_any(iova, runs, bits, table.sizes, Some((gather, claim)))
    }

    /// Maps at most `count` pages of one size, contiguous on both sides: `page` at `iova`, and those that follow it. A page
    /// in the way ends it there.
    ///
    /// Where an empty table was [kept](Table::keep_empty_tables), or another thread has just emptied one,
    /// pages are mapped in it by smaller leaves.
    fn map_pages(
        &mut self,
        iova: u64,
        page: Span<Pa>,
        count: u64,
        prot: Prot,
    ) -> Progress<TableMapError> {
        self.table().map_some(iova, page, count, prot)
    }

    /// Does of [`map`](Self::map) all that can fail. Tables come from `spare` as far as it has any, which
    /// no other thread can take, and then from the memory.
    ///
    /// # Errors
    ///
    /// The same as of [`map`](Self::map); `spare` is as it was then.
    fn plan_map<'t>(
        &'t mut self,
        iova: u64,
        runs: &'t [Span<Pa>],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<Planned<'t, Self::Format, Self::Memory>, TableMapError> {
        let table = self.table();
        let plan = table.plan_request(iova, runs, prot, spare)?;
        Ok(Planned { table, plan })
    }

    /// Unmaps exactly `range`, in one descent: all of it is mapped and no leaf reaches over its ends,
    /// or nothing happens. `sink` receives the physical runs; `gather` what must be flushed
    /// before they, and the tables that became empty, may be used again.
    #[inline(always)]
    fn unmap(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), TableUnmapError> {
        let claim = self.claim(range);
        let unmapped = self
            .table()
            .unmap_range(range, Amount::Whole, gather, sink, claim);
        unmapped.map(|_| ())
    }

    /// Unmaps what is mapped in `range`, holes or not, and says how many bytes that were. No leaf
    /// may reach over the ends of the range.
    #[inline(always)]
    fn unmap_mapped(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, TableUnmapError> {
        let claim = self.claim(range);
        self.table()
            .unmap_range(range, Amount::Mapped, gather, sink, claim)
    }

    /// Unmaps what is mapped in `range`, and reports nothing of it: for callers who know what that is. No
    /// leaf may reach over the ends of the range. Tables of the lowest level that the range covers whole
    /// are not read.
    #[inline(always)]
    fn clear(&mut self, range: Span<Iova>, gather: &mut Gather) -> Result<(), TableUnmapError> {
        let claim = self.claim(range);
        let cleared = self
            .table()
            .unmap_range(range, Amount::Untold, gather, &mut NoRuns, claim);
        cleared.map(|_| ())
    }

    /// Unmaps `range` from its beginning on, as much as `bound` allows: for callers who take runs into room that is bounded,
    /// flush, use what the runs were, and go on behind the bytes that are done.
    ///
    /// Whole leaves go, and at least one, however small the bound. A hole, and a leaf that reaches over an end of the range,
    /// end it there, and are its error; the bytes in front of them are done.
    ///
    /// ```
    /// # use iopt::{Bound, Gather, HeapTables, Prot, Table, TableOps as _, format::X86_64};
    /// # use runs::Span;
    /// # let memory = HeapTables::with_tables(8).unwrap();
    /// # let mut table = Table::new(X86_64::new(4).unwrap(), &memory).unwrap();
    /// # table.map(0, &[Span::new(4 << 20, 1 << 20), Span::new(8 << 20, 1 << 20)], Prot::RW).unwrap();
    /// let mut rest = Span::new(0, 2 << 20);
    /// while !rest.is_empty() {
    ///     let (mut gather, mut batch) = (Gather::new(), Vec::new());
    ///     let bound = Bound { runs: 1, ..Bound::NONE };
    ///     let done = table.unmap_some(rest, bound, &mut gather, &mut |run| batch.push(run));
    ///     done.result.unwrap();
    ///     rest = Span::new(rest.start + done.bytes, rest.len - done.bytes);
    ///     // The unit is flushed; then the batch is unpinned.
    ///     let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
    ///     table.reclaim(flushed);
    ///     assert_eq!(batch.len(), 1);
    /// }
    /// ```
    fn unmap_some(
        &mut self,
        range: Span<Iova>,
        bound: Bound,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Progress<TableUnmapError> {
        let claim = self.claim(range);
        self.table()
            .unmap_some_of(range, None, bound, gather, sink, claim)
    }

    /// Unmaps at most `count` pages of `size` bytes each, from `iova` on. A hole or a leaf of another size ends it there.
    fn unmap_pages(
        &mut self,
        iova: u64,
        size: u64,
        count: u64,
        gather: &mut Gather,
    ) -> Progress<TableUnmapError> {
        let range = Span::new(iova, size.saturating_mul(count));
        let claim = self.claim(range);
        let table = self.table();
        match table.check_pages(iova, size) {
            Ok(()) => {
                table.unmap_some_of(range, Some(size), Bound::NONE, gather, &mut NoRuns, claim)
            }
            Err(cause) => Progress::stopped(0, cause.into()),
        }
    }

    /// Unlinks every empty table that has an entry for an address in `range`, as far as the operation may free it.
    fn give_back_empty_tables(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
    ) -> Result<(), TableUnmapError> {
        let claim = self.claim(range);
        let table = self.table();
        let at = table.check_range(range)?;
        table.intact()?;
        table.unlink_emptied(at, range.len, gather, claim);
        Ok(table.intact()?)
    }

    /// Makes every leaf that maps a byte of `range` one of at most `size` bytes, the whole leaf
    /// also where it reaches over the ends. `size` is one of the table's [page sizes](Table::page_sizes). Beside other
    /// operations the leaves that reach over the ends belong to this one, too.
    ///
    /// `flush` is called as in [`Gather::flush_with`], once at the end, or as often as the format's break-before-make
    /// asks for; it must not wait for another operation on this table. Earlier contents of the gather are flushed, too.
    /// Where a flush fails, translations are what they were, some leaves have their new size, and the gather holds what
    /// is still to be flushed; until that is done no leaf of this range may be changed.
    fn split<E>(
        &mut self,
        range: Span<Iova>,
        size: u64,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        let job = self.table().check_split(size)?;
        resize(self, range, job, interruption, gather, flush)
    }

    /// Makes `at` an address at which a leaf ends and another begins: the leaf around it becomes
    /// the fewest leaves that do. Nothing happens where none is, or where one begins.
    ///
    /// See [`split`](Self::split) for the flush.
    fn cut<E>(
        &mut self,
        at: u64,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        let (range, job) = self.table().check_cut(at)?;
        resize(self, range, job, interruption, gather, flush)
    }

    /// Gives the leaves that lie in `range` the largest sizes that addresses and permissions
    /// permit, as if they were mapped anew in one request.
    ///
    /// See [`split`](Self::split) for the flush.
    fn merge<E>(
        &mut self,
        range: Span<Iova>,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        resize(self, range, Job::Merge, interruption, gather, flush)
    }

    /// [`unmap_mapped`](Self::unmap_mapped), with the leaves that reach over the ends of `range`
    /// [`cut`](Self::cut) first.
    fn unmap_cutting<E>(
        &mut self,
        range: Span<Iova>,
        interruption: Interruption,
        gather: &mut Gather,
        sink: &mut impl RunSink,
        mut flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<u64, ResizeError<E>> {
        for end in self.table().check_ends(range)?.into_iter().flatten() {
            self.cut(end, interruption, gather, &mut flush)?;
        }
        self.unmap_mapped(range, gather, sink)
            .map_err(ResizeError::Unmap)
    }

    /// Gives everything in `range` the permissions `prot`, in place: all of it is mapped and no leaf
    /// reaches over its ends, or nothing happens. Addresses, sizes, and accessed and dirty bits stay
    /// what they are; memory attributes ([`COHERENT`](Prot::COHERENT), [`DEVICE`](Prot::DEVICE),
    /// [`UNCACHED`](Prot::UNCACHED)) cannot change.
    ///
    /// `gather` receives what must be flushed before the device is held to the new permissions.
    fn protect(
        &mut self,
        range: Span<Iova>,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError> {
        self.table().protect_range(range, prot, gather)
    }

    /// Moves what the device has written to in `range` out of the table, where it is clean
    /// afterwards, into `pending`, which shows it after the flush. Returns the bytes of the leaves
    /// that were dirty. Pages that are written to meanwhile are in this harvest or in the next
    /// one.
    ///
    /// Dirty tracking must be on. A range that begins or ends inside a large leaf is refused.
    fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
        &mut self,
        range: Span<Iova>,
        pending: &mut Pending<W>,
    ) -> Result<u64, DirtyError> {
        self.table().harvest_range(range, pending)
    }

    /// Calls `each` for what the device has written to in `range`, as runs in order, which is clean afterwards: for kernels,
    /// which note it in a form of their own. Leaves at the ends count whole. The caller flushes before it relies on what
    /// `each` received. Returns the bytes, `u64::MAX` if they are all of 2^64.
    fn take_dirty(
        &mut self,
        range: Span<Iova>,
        each: impl FnMut(Span<Iova>),
    ) -> Result<u64, DirtyError> {
        self.table().visit_dirty(range, true, each)
    }

    /// Gives back the tables of flushed gathers: now, or when no reader can hold them.
    fn reclaim(&mut self, flushed: Flushed) {
        self.table().told(flushed.root);
        self.retire(flushed.tables);
    }
}

/// The addresses of runs that are mapped from `iova` on; too many of them are refused later.
fn end_to_end(iova: u64, runs: &[Span<Pa>]) -> Span<Iova> {
    let len = runs.iter().map(|run| run.len).fold(0, u64::saturating_add);
    Span::new(iova, len)
}

fn resize<T: TableOps + ?Sized, E>(
    ops: &mut T,
    range: Span<Iova>,
    job: Job,
    interruption: Interruption,
    gather: &mut Gather,
    flush: impl FnMut(&Invalidation) -> Result<(), E>,
) -> Result<(), ResizeError<E>> {
    let mut done = Chain::empty();
    let result = ops
        .table()
        .resize(range, job, interruption, gather, flush, &mut done);
    ops.retire(done);
    result
}

impl<F: Format, M: TableMemory> TableOps for Table<F, M> {
    type Format = F;
    type Memory = M;

    #[inline(always)]
    fn table(&self) -> &Self {
        self
    }

    #[inline(always)]
    fn claim(&self, _range: Span<Iova>) -> Claim {
        Claim::ALL
    }

    fn retire(&mut self, tables: Chain) {
        self.memory.reclaim(tables);
    }
}

impl<F: Format, M: TableMemory, R: Reclaim> TableOps for Inside<'_, F, M, R> {
    type Format = F;
    type Memory = M;

    #[inline(always)]
    fn table(&self) -> &Table<F, M> {
        self
    }

    #[inline(always)]
    fn claim(&self, range: Span<Iova>) -> Claim {
        Table::claim(self, range, self.owned())
    }

    fn retire(&mut self, tables: Chain) {
        Inside::retire(self, tables);
    }
}
