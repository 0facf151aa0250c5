//! Dirty tracking: the switch, and dirty bits of leaves that are removed.
//!
//! # Hardware's stores
//!
//! A unit sets the accessed and the dirty bit of a leaf by itself, at any moment. It does so by an
//! atomic update of the entry that translated the access, and only while that entry still says so
//! (VT-d 5.0, sections 3.6 and 3.7; AMD 48882, section 2.2; Arm D8.5; RISC-V Privileged
//! Architecture, section 10.3.1); an entry that is empty by then makes the access fault. So the
//! engine loses no dirty bit as long as it
//!
//! * takes a leaf out by an exchange, and looks at what it got back;
//! * changes the bits of a leaf by a compare-and-exchange;
//! * does either by a plain store only where hardware has nothing left to set: in an entry that was
//!   read dirty and accessed.
//!
//! # Taking a leaf out
//!
//! Between the exchange and the flush a unit may still write to the page by its cached translation.
//! Nothing of that is lost. If the cached copy is dirty, then so was the entry in memory, and so is
//! the one that the exchange returned. If it is clean, then the unit must set the bit in memory
//! before the first write, finds the entry empty, and faults: the write does not happen.
//!
//! Therefore an unmap whose sink wants dirty state takes every entry out, also those of tables that
//! are unlinked whole, *before* it unlinks them. Reading the entries of an unlinked table instead
//! would have to wait for the flush, since a unit that has cached the way to that table goes on
//! setting bits in it.

use super::sink::{RunSink, Wants};
use super::{Level, Table};
use crate::cell::Cell;
use crate::error::{DirtyError, TableUnmapError};
use crate::format::Format;
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Switches dirty tracking on or off; it is off at first.
    ///
    /// While it is on, every unmap takes along what the device has written to: it is refused when
    /// its sink does not take dirty state ([`WithDirty`](crate::WithDirty) does). Fails when the
    /// format does not keep dirty state. Tearing the table down does not ask: harvest before.
    pub fn track_dirty(&mut self, on: bool) -> Result<(), DirtyError> {
        self.set_tracking(on)
    }

    pub(super) fn set_tracking(&self, on: bool) -> Result<(), DirtyError> {
        self.check_kept()?;
        self.dirty.set(on.into());
        Ok(())
    }

    /// True when dirty tracking is on.
    pub fn tracks_dirty(&self) -> bool {
        self.dirty.get() != 0
    }

    pub(super) fn check_kept(&self) -> Result<(), DirtyError> {
        if self.format.keeps_dirty() {
            Ok(())
        } else {
            let format = self.format.id();
            Err(DirtyError::NotKept { format })
        }
    }

    /// Refuses a sink that would lose dirty state, and one that asks where there is none.
    #[inline(always)]
    pub(super) fn check_sink(&self, sink: &impl RunSink) -> Result<(), TableUnmapError> {
        let dirty = sink.wants() == Wants::DirtyRuns;
        if dirty && !self.format.keeps_dirty() {
            let format = self.format.id();
            return Err(TableUnmapError::DirtyNotKept { format });
        }
        if !dirty && self.tracks_dirty() {
            return Err(TableUnmapError::DirtyWanted);
        }
        Ok(())
    }
}

/// True when all of the entries are seen to be clean at once; some may be all the same when not.
#[inline(always)]
fn are_clean<F: Format, C: Cell>(cells: &[C]) -> bool {
    F::CLEAN.is_some_and(|(none, each)| {
        C::union(cells) & none == 0 && (each == 0 || C::intersection(cells) & each == each)
    })
}

/// True when one of the entries, all of which are leaves or empty, is dirty.
#[inline(always)]
pub(super) fn some_dirty<F: Format, C: Cell>(cells: &[C]) -> bool {
    !are_clean::<F, C>(cells) && cells.iter().any(|cell| F::is_dirty(cell.get()))
}

/// True when hardware has nothing left to set in the leaf: it is accessed and dirty.
#[inline(always)]
pub(super) fn is_settled<F: Format>(leaf: u64) -> bool {
    leaf & F::ACCESSED == F::ACCESSED && F::is_dirty(leaf) && F::dirtied(leaf) == leaf
}

/// Empties the entry, which was just read as the leaf `word`; true when it was dirty.
#[inline(always)]
pub(super) fn take_word<F: Format, C: Cell>(cell: &C, word: u64) -> bool {
    if is_settled::<F>(word) {
        // No other thread and no unit may store to it.
        cell.set(0);
        return true;
    }
    F::is_dirty(cell.exchange(0))
}

/// Empties the entries of the leaf of 2^`log2` bytes that begins at the first of `cells`. Returns
/// how many there were, and whether one of them was dirty.
#[inline]
pub(super) fn take_leaf<F: Format, C: Cell>(
    v: impl Level,
    cells: &[C],
    log2: u32,
) -> (usize, bool) {
    let own = F::shift(v.n());
    let count = 1usize << log2.saturating_sub(own);
    let stride = if F::GROUPS_ADVANCE { F::stride(own) } else { 0 };
    let mut expected = cells.first().map_or(0, Cell::get) & !F::HARDWARE_BITS;
    let (mut taken, mut dirty) = (0, false);
    for cell in cells.iter().take(count) {
        // A damaged group ends where its entries do not belong together.
        if taken > 0 && cell.get() & !F::HARDWARE_BITS != expected {
            break;
        }
        dirty |= take_word::<F, C>(cell, cell.get());
        expected = expected.wrapping_add(stride);
        taken += 1;
    }
    (taken.max(1), dirty)
}
