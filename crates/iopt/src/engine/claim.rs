//! The addresses that an operation has for itself.

use runs::{Iova, Span};

use super::Table;
use crate::format::Format;
use crate::memory::TableMemory;

/// Addresses, stripped, that no other operation touches meanwhile: a table that spans no others may be unlinked once
/// it is empty.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    first: u64,
    last: u64,
}

impl Claim {
    /// All that there is: no other operation is under way.
    pub(crate) const ALL: Self = Self {
        first: 0,
        last: u64::MAX,
    };

    /// `len` bytes from the stripped address `at` on, at least one.
    #[inline(always)]
    pub(crate) const fn new(at: u64, len: u64) -> Self {
        Self {
            first: at,
            last: at.wrapping_add(len.wrapping_sub(1)),
        }
    }

    /// True when all of `[first, last]`, stripped, is claimed.
    #[inline(always)]
    pub(super) const fn covers(self, first: u64, last: u64) -> bool {
        self.first <= first && last <= self.last
    }
}

/// Ownership of addresses beyond the range that an operation names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owned {
    /// None.
    Named,
    /// A span, for operations in it.
    Span(Span<Iova>),
    /// Everything.
    #[cfg(feature = "alloc")]
    All,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// The claim of an operation on `range`.
    #[inline(always)]
    pub(crate) fn claim(&self, range: Span<Iova>, owned: Owned) -> Claim {
        let range = match owned {
            #[cfg(feature = "alloc")]
            Owned::All => return Claim::ALL,
            Owned::Span(owned) if owned.covers(&range) => owned,
            Owned::Span(_) | Owned::Named => range,
        };
        Claim::new(self.aperture().strip(range.start), range.len)
    }
}
