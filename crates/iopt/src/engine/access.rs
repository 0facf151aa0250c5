//! The two ways in: by `&mut`, or by `&` for a range that no other operation touches meanwhile.
//!
//! There is one set of passes, which take the way as a type, so that the exclusive form pays for nothing
//! of the other. The protocol of the shared form is at the head of `shared.rs`.

use runs::{Iova, Span};

use super::Table;
use crate::cell::Cell;
use crate::format::Format;
use crate::memory::TableMemory;

/// What an operation may rely on: a value that its passes carry along.
pub(crate) trait Access: Copy {
    /// True when other threads change other entries of the same tables meanwhile.
    const SHARED: bool;

    /// True when no other operation touches an address in `[first, last]`, stripped, so that a table
    /// which spans these may be unlinked once it is empty.
    fn owns(self, first: u64, last: u64) -> bool;

    /// Reads an entry that may lead to a table, on the way down. Relaxed where no other thread links
    /// tables meanwhile: what was linked before came here with the reference to the [`Table`]. Loads
    /// with acquire keep the compiler from holding what it knows of the memory in registers.
    #[inline(always)]
    fn follow<C: Cell>(cell: &C) -> u64 {
        if Self::SHARED {
            cell.get_acquire()
        } else {
            cell.get()
        }
    }
}

/// The operation holds the table by `&mut`.
#[derive(Clone, Copy)]
pub(crate) struct Exclusive;

impl Access for Exclusive {
    const SHARED: bool = false;

    #[inline(always)]
    fn owns(self, _first: u64, _last: u64) -> bool {
        true
    }
}

/// The operation has a range of addresses, stripped, for itself; others have others.
#[derive(Clone, Copy)]
pub(crate) struct Disjoint {
    first: u64,
    last: u64,
}

impl Disjoint {
    /// For what unlinks no table.
    pub(crate) const NOTHING: Self = Self {
        first: u64::MAX,
        last: 0,
    };

    /// Where no other operation is under way.
    #[cfg(feature = "alloc")]
    pub(crate) const ALL: Self = Self {
        first: 0,
        last: u64::MAX,
    };

    /// Of `len` bytes from the stripped address `at` on, at least one.
    #[inline(always)]
    pub(crate) const fn new(at: u64, len: u64) -> Self {
        Self {
            first: at,
            last: at.wrapping_add(len.wrapping_sub(1)),
        }
    }
}

impl Access for Disjoint {
    const SHARED: bool = true;

    #[inline(always)]
    fn owns(self, first: u64, last: u64) -> bool {
        self.first <= first && last <= self.last
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// What an operation on `range` owns, given that it owns `owned` as well.
    #[inline(always)]
    pub(crate) fn owned(&self, range: Span<Iova>, owned: Option<Span<Iova>>) -> Disjoint {
        let aperture = self.aperture();
        let range = match owned {
            Some(owned) if owned.covers(&range) => owned,
            _ => range,
        };
        Disjoint::new(aperture.strip(range.start), range.len)
    }

    /// A map goes on below the link in `cell`, which another thread may have stored a moment ago and
    /// not have notified the memory of. A map below it would end before a unit that reads past the
    /// caches can follow the link, so the memory is notified now.
    #[inline(always)]
    pub(super) fn maps_below<P: Access>(&self, cell: &M::Cell, _access: P) {
        if P::SHARED && M::FLUSHES {
            self.memory.followed(cell);
        }
    }
}
