//! The descent, the same for a range and an address.
//!
//! Most ranges lie in one table, or in a few neighbours below one entry of it. The walk from the
//! root to that table is done once, and the operation works from there on.

use super::Table;
use super::entries::decode;
use super::top::Begin;
use crate::cell::Cell;
use crate::format::{Entry, Format};
use crate::memory::TableMemory;

/// A level as a type, so that the way down is a sequence of constants, without a loop.
trait Step {
    const N: usize;
    /// The level below; of level 0 itself.
    type Below: Step;
}

struct At<const N: usize>;

macro_rules! steps {
    ($($n:literal => $below:literal),*) => {$(
        impl Step for At<$n> {
            const N: usize = $n;
            type Below = At<$below>;
        }
    )*};
}

steps!(0 => 0, 1 => 0, 2 => 1, 3 => 2, 4 => 3, 5 => 4);

/// The end of a walk by levels as numbers.
pub(super) struct Place {
    pub(super) table: u64,
    pub(super) level: usize,
    /// The entry as it was read; 0 of a memory that does not give it.
    pub(super) word: u64,
    pub(super) entry: Entry,
}

/// An end of a way down: it is compiled into each level at which one can end.
trait End<'t, F: Format, M: TableMemory>: Sized {
    type Out;
    /// The operation is about to map there.
    const MAPS: bool;
    /// It reads the entry at the end.
    const READS: bool;

    /// The end in `table`, at the index of the entry for the address, which says `word` if it was read.
    fn at<V: Step>(self, table: u64, cells: &'t [M::Cell], index: usize, word: u64) -> Self::Out;
}

/// The lowest table, and its level.
struct Lowest<const MAPS: bool>;

impl<'t, F: Format, M: TableMemory, const MAPS: bool> End<'t, F, M> for Lowest<MAPS> {
    type Out = (u64, usize);
    const MAPS: bool = MAPS;
    const READS: bool = false;

    #[inline(always)]
    fn at<V: Step>(self, table: u64, _: &'t [M::Cell], _: usize, _: u64) -> (u64, usize) {
        (table, V::N)
    }
}

/// The table at level 0, its entries, and the index.
struct Page<const MAPS: bool>;

impl<'t, F: Format, M: TableMemory + 't, const MAPS: bool> End<'t, F, M> for Page<MAPS> {
    type Out = Option<(u64, &'t [M::Cell], usize)>;
    const MAPS: bool = MAPS;
    const READS: bool = false;

    #[inline(always)]
    fn at<V: Step>(self, table: u64, cells: &'t [M::Cell], index: usize, _: u64) -> Self::Out {
        (V::N == 0).then_some((table, cells, index))
    }
}

/// The last entry, and for how many bytes it is, as a power of two.
struct Last;

impl<'t, F: Format, M: TableMemory> End<'t, F, M> for Last {
    type Out = (Entry, u32);
    const MAPS: bool = false;
    const READS: bool = true;

    #[inline(always)]
    fn at<V: Step>(self, _: u64, _: &'t [M::Cell], _: usize, word: u64) -> (Entry, u32) {
        (decode::<F>(V::N, word), F::shift(V::N))
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// The lowest table, and its level, that all of `[at, at + len)` goes through: the range lies
    /// below more than one of its entries, or is all that is below one, or there is no table below.
    /// With `MAPS` the operation is about to map there.
    #[inline(always)]
    pub(super) fn lowest<const MAPS: bool>(&self, at: u64, len: u64) -> (u64, usize) {
        // The bits in which its addresses differ; one more if it is a whole block, so that it is
        // not taken for a part of what is below the entry for that block.
        let mut spread = at ^ (at + (len - 1));
        if spread == len - 1 {
            spread |= len;
        }
        self.descend(at, spread, Lowest::<MAPS>)
    }

    /// The table, its entries and the index of that for the page at `at`, if there is a table for it.
    #[inline(always)]
    pub(super) fn page_place<const MAPS: bool>(&self, at: u64) -> Option<(u64, &[M::Cell], usize)> {
        self.descend(at, 0, Page::<MAPS>)
    }

    /// The entry at which a walk to `at` ends, a leaf or an empty one, and for how many bytes it is, as a power of two.
    #[inline(always)]
    pub(super) fn last_entry(&self, at: u64) -> (Entry, u32) {
        self.descend(at, 0, Last)
    }

    /// Goes down from the root by the entries for `at`, as far as there are tables and as an entry spans more than the
    /// bits of `spread`: with 0 to the last entry of a walk. Bits above the aperture do not count.
    #[inline(always)]
    fn descend<'t, E: End<'t, F, M>>(&'t self, at: u64, spread: u64, end: E) -> E::Out {
        self.memory.descended();
        let Begin { root, levels } = self.begin();
        // The guards are constants: levels that the format cannot have cost no code.
        match levels {
            1 if F::MIN_LEVELS <= 1 && F::MAX_LEVELS > 1 => {
                self.descend_from::<At<0>, E>(root, at, spread, end)
            }
            2 if F::MIN_LEVELS <= 2 && F::MAX_LEVELS > 2 => {
                self.descend_from::<At<1>, E>(root, at, spread, end)
            }
            3 if F::MIN_LEVELS <= 3 && F::MAX_LEVELS > 3 => {
                self.descend_from::<At<2>, E>(root, at, spread, end)
            }
            4 if F::MIN_LEVELS <= 4 && F::MAX_LEVELS > 4 => {
                self.descend_from::<At<3>, E>(root, at, spread, end)
            }
            5 if F::MIN_LEVELS <= 5 && F::MAX_LEVELS > 5 => {
                self.descend_from::<At<4>, E>(root, at, spread, end)
            }
            // The most levels that there can be need no comparison.
            _ if F::MAX_LEVELS >= 6 => self.descend_from::<At<5>, E>(root, at, spread, end),
            _ if F::MAX_LEVELS == 5 => self.descend_from::<At<4>, E>(root, at, spread, end),
            _ if F::MAX_LEVELS == 4 => self.descend_from::<At<3>, E>(root, at, spread, end),
            _ if F::MAX_LEVELS == 3 => self.descend_from::<At<2>, E>(root, at, spread, end),
            _ if F::MAX_LEVELS == 2 => self.descend_from::<At<1>, E>(root, at, spread, end),
            _ => self.descend_from::<At<0>, E>(root, at, spread, end),
        }
    }

    #[inline(always)]
    fn descend_from<'t, V: Step, E: End<'t, F, M>>(
        &'t self,
        table: u64,
        at: u64,
        spread: u64,
        end: E,
    ) -> E::Out {
        let (cells, index) = (self.entries(table, V::N), self.index(V::N, at));
        if cells.len() != self.format.entries(V::N) {
            // It was noted; and now the compiler knows that the index is one of them.
            return end.at::<V>(table, &[], 0, 0);
        }
        let wide = V::N > 0 && spread >> F::shift(V::N) == 0;
        let cell = cells.get(index).filter(|_| wide || E::READS);
        let word = cell.map_or(0, Cell::get_acquire);
        if let (Some(cell), true) = (cell, wide) {
            if let Entry::Table(below) = F::decode(V::N, word) {
                self.memory.table_read(table);
                if E::MAPS {
                    self.maps_below(cell);
                }
                return self.descend_inlined::<V::Below, E>(below, at, spread, end);
            }
        }
        if E::READS {
            self.memory.table_read(table);
        }
        end.at::<V>(table, cells, index, word)
    }

    // A function of its own, so that the recursion is inlined level by level.
    #[inline(always)]
    fn descend_inlined<'t, V: Step, E: End<'t, F, M>>(
        &'t self,
        table: u64,
        at: u64,
        spread: u64,
        end: E,
    ) -> E::Out {
        self.descend_from::<V, E>(table, at, spread, end)
    }

    /// The end of a walk to the stripped address `at`, no lower than level `lowest`: for operations that do not decide about
    /// speed.
    pub(super) fn walk(&self, at: u64, lowest: usize) -> Place {
        self.last_from(self.begin().table(), at, lowest)
    }

    /// [`walk`](Self::walk) from a table on.
    pub(super) fn last_from(
        &self,
        (mut table, mut level): (u64, usize),
        at: u64,
        lowest: usize,
    ) -> Place {
        loop {
            let (cells, index) = (self.cells(table, level), self.index(level, at));
            let word = cells.get(index).map_or(0, Cell::get_acquire);
            let entry = decode::<F>(level, word);
            match entry {
                Entry::Table(below) if level > lowest => (table, level) = (below, level - 1),
                _ => {
                    return Place {
                        table,
                        level,
                        word,
                        entry,
                    };
                }
            }
        }
    }

    /// A map goes on below the link in `cell`, which another thread may have stored a moment ago and
    /// not have notified the memory of. A map below it would end before a unit that reads past the
    /// caches can follow the link, so the memory is notified now.
    #[inline(always)]
    pub(super) fn maps_below(&self, cell: &M::Cell) {
        if M::FLUSHES && self.shared {
            self.memory.followed(cell);
        }
    }
}
