//! Inside a shared table: several operations under one guard.

use core::fmt;

use runs::{Iova, Pa, Span};

use super::access::Disjoint;
use super::removal_check::Amount;
use super::request::LeafBits;
use super::sink::{NoRuns, RunSink};
use super::{Leaf, Table};
use crate::error::{DirtyError, TableMapError, TableUnmapError};
use crate::format::Format;
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;
use crate::reclaim::{DefaultReclaim, Guard, Reclaim};

/// A place inside a [`SharedTable`](crate::SharedTable), for as long as it lives.
///
/// Each operation of the shared form goes inside and leaves again. A caller with several operations, as
/// after reading a queue, stays inside for all of them. Other threads go on meanwhile; only the reuse
/// of unlinked tables waits until each thread that was inside has left. So do not stay while
/// you wait for something: a flush, a lock, another thread, or
/// [`track_dirty`](crate::SharedTable::track_dirty), which waits for all who are inside: where readers are known
/// by thread, inside any table.
pub struct Inside<'t, F: Format, M: TableMemory, R: Reclaim = DefaultReclaim> {
    table: &'t Table<F, M>,
    /// What no other operation touches, if that is more than what one of these removes.
    owned: Option<Span<Iova>>,
    _guard: Guard<'t, R>,
}

impl<'t, F: Format, M: TableMemory, R: Reclaim> Inside<'t, F, M, R> {
    #[inline(always)]
    pub(super) fn new(
        table: &'t Table<F, M>,
        guard: Guard<'t, R>,
        owned: Option<Span<Iova>>,
    ) -> Self {
        Self {
            table,
            owned,
            _guard: guard,
        }
    }

    /// See [`Table::map`](crate::Table::map).
    #[inline(always)]
    pub fn map(&self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), TableMapError> {
        self.table.map_as(iova, runs, prot, Disjoint::NOTHING)
    }

    /// [`map`](Self::map) with leaves that say `bits` beside their address and size: those of
    /// [`Format::leaf_bits`], or what else a kernel wants the unit to read there (memory types, a leaf that is dirty from
    /// the beginning).
    #[inline(always)]
    pub fn map_leaves(&self, iova: u64, runs: &[Span<Pa>], bits: u64) -> Result<(), TableMapError> {
        let bits = LeafBits(bits);
        self.table.map_as(iova, runs, bits, Disjoint::NOTHING)
    }

    /// [`map_leaves`](Self::map_leaves) that first gives back the empty tables that the range covers whole, so that large
    /// leaves can take their place: see [`Table::map_anew`](crate::Table::map_anew).
    pub fn map_leaves_anew(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        bits: u64,
        gather: &mut Gather,
    ) -> Result<(), TableMapError> {
        self.table
            .map_anew_beside(iova, runs, LeafBits(bits), gather)
    }

    /// What the device has written to in `range`, as runs in order, which is clean afterwards: for kernels, which note it
    /// in a form of their own. Leaves at the ends count whole. The caller flushes before it relies on what `each` was
    /// told. Returns the bytes.
    pub fn take_dirty(
        &self,
        range: Span<Iova>,
        each: impl FnMut(Span<Iova>),
    ) -> Result<u64, DirtyError> {
        self.table.take_dirty(range, each)
    }

    /// See [`Table::give_back_empty_tables`](crate::Table::give_back_empty_tables): those are unlinked that the range covers
    /// whole.
    pub fn give_back_empty_tables(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
    ) -> Result<(), TableUnmapError> {
        let at = self.table.check_range(range)?;
        self.table.intact()?;
        let access = Disjoint::new(at, range.len);
        self.table.unlink_emptied(at, range.len, gather, access);
        Ok(self.table.intact()?)
    }

    /// Whether [`give_back_empty_tables`](Self::give_back_empty_tables) may find any: not where one entry, or two, are for all
    /// of `range`. A question that costs little before each large leaf.
    #[inline(always)]
    pub fn may_have_empty_tables(&self, range: Span<Iova>) -> bool {
        let Ok(mut at) = self.table.check_range(range) else {
            return false;
        };
        let last = at + (range.len - 1);
        for _ in 0..2 {
            let Some((_, log2)) = self.table.last_entry::<Disjoint>(at) else {
                break;
            };
            let covered = at | ((1 << log2) - 1);
            if covered >= last {
                return false;
            }
            at = covered + 1;
        }
        true
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
        self.table.translate_as::<Disjoint>(iova)
    }

    /// See [`Table::leaf_at`](crate::Table::leaf_at). What it says was true at some time during the
    /// call.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.table.leaf_at(iova)
    }

    #[inline(always)]
    fn remove<S: RunSink>(
        &self,
        range: Span<Iova>,
        amount: Amount,
        gather: &mut Gather,
        sink: &mut S,
    ) -> Result<u64, TableUnmapError> {
        let access = self.table.owned(range, self.owned);
        self.table.unmap_as(range, amount, gather, sink, access)
    }
}

impl<F: Format, M: TableMemory, R: Reclaim> fmt::Debug for Inside<'_, F, M, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inside").finish_non_exhaustive()
    }
}
