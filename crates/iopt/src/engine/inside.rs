//! Inside a shared table: several operations under one guard.

use core::fmt;

use runs::{Iova, Pa, Span};

use super::access::Disjoint;
use super::removal_check::Amount;
use super::sink::{NoRuns, RunSink};
use super::{Leaf, SharedTable};
use crate::error::{TableMapError, TableUnmapError};
use crate::format::Format;
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;
use crate::reclaim::{DefaultReclaim, Guard, Reclaim};

/// A place inside a [`SharedTable`], for as long as it lives.
///
/// Each operation of the shared form goes inside and leaves again. A caller with several operations, as
/// after reading a queue, stays inside for all of them. Other threads go on meanwhile; only the reuse
/// of unlinked tables waits until each thread that was inside has left. So do not stay while
/// you wait for something: a flush, a lock, another thread, or
/// [`track_dirty`](SharedTable::track_dirty), which waits for all who are inside: where readers are known
/// by thread, inside any table.
pub struct Inside<'t, F: Format, M: TableMemory, R: Reclaim = DefaultReclaim> {
    shared: &'t SharedTable<F, M, R>,
    /// What no other operation touches, if that is more than what one of these removes.
    owned: Option<Span<Iova>>,
    _guard: Guard<'t, R>,
}

impl<'t, F: Format, M: TableMemory, R: Reclaim> Inside<'t, F, M, R> {
    #[inline(always)]
    pub(super) fn new(
        shared: &'t SharedTable<F, M, R>,
        guard: Guard<'t, R>,
        owned: Option<Span<Iova>>,
    ) -> Self {
        Self {
            shared,
            owned,
            _guard: guard,
        }
    }

    /// See [`Table::map`](crate::Table::map).
    #[inline(always)]
    pub fn map(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError> {
        self.shared
            .table()
            .map_as(iova, runs, prot, Disjoint::NOTHING)
    }

    /// See [`Table::unmap`](crate::Table::unmap).
    #[inline(always)]
    pub fn unmap(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), TableUnmapError> {
        self.remove(range, Amount::Whole, gather, sink).map(|_| ())
    }

    /// See [`Table::unmap_mapped`](crate::Table::unmap_mapped).
    #[inline(always)]
    pub fn unmap_mapped(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, TableUnmapError> {
        self.remove(range, Amount::Mapped, gather, sink)
    }

    /// See [`Table::clear`](crate::Table::clear).
    #[inline(always)]
    pub fn clear(&self, range: Span<Iova>, gather: &mut Gather) -> Result<(), TableUnmapError> {
        self.remove(range, Amount::Untold, gather, &mut NoRuns)
            .map(|_| ())
    }

    /// See [`Table::translate`](crate::Table::translate). What it says was true at some time during
    /// the call.
    #[inline]
    pub fn translate(&self, iova: u64) -> Option<u64> {
        self.shared.table().translate_as::<Disjoint>(iova)
    }

    /// See [`Table::leaf_at`](crate::Table::leaf_at). What it says was true at some time during the
    /// call.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.shared.table().leaf_at(iova)
    }

    #[inline(always)]
    fn remove<S: RunSink>(
        &self,
        range: Span<Iova>,
        amount: Amount,
        gather: &mut Gather,
        sink: &mut S,
    ) -> Result<u64, TableUnmapError> {
        let table = self.shared.table();
        let access = table.owned(range, self.owned);
        table.unmap_as(range, amount, gather, sink, access)
    }
}

impl<F: Format, M: TableMemory, R: Reclaim> fmt::Debug for Inside<'_, F, M, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inside").finish_non_exhaustive()
    }
}
