//! The way down: one, for a range as for an address.
//!
//! Most ranges lie in one table, or in a few neighbours below one entry of it. The way from the root
//! to that table is gone once, and the operation does its work from there on.

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

/// The end of a way down.
#[derive(Clone, Copy)]
pub(super) struct Place<'t, C> {
    pub(super) table: u64,
    pub(super) level: usize,
    /// All entries of the table.
    pub(super) cells: &'t [C],
    /// Index of the entry for the address.
    pub(super) index: usize,
    /// The entry as it was read; 0 of a memory that does not give it.
    pub(super) word: u64,
    pub(super) entry: Entry,
}

impl<C> Place<'_, C> {
    const NONE: Self = Self {
        table: 0,
        level: 0,
        cells: &[],
        index: 0,
        word: 0,
        entry: Entry::Empty,
    };
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
        let place = self.descend::<MAPS>(at, spread);
        (place.table, place.level)
    }

    /// Goes down from the root by the entries for `at`, as far as there are tables and as an entry spans more than the
    /// bits of `spread`: with 0 to the last entry of a walk. Bits above the aperture do not count.
    #[inline(always)]
    pub(super) fn descend<const MAPS: bool>(&self, at: u64, spread: u64) -> Place<'_, M::Cell> {
        // There is none only where the memory broke its contract.
        self.descend_to::<MAPS, false>(at, spread)
            .unwrap_or(Place::NONE)
    }

    /// The place of the page at `at`, if there is a table for it.
    #[inline(always)]
    pub(super) fn descend_to_page<const MAPS: bool>(&self, at: u64) -> Option<Place<'_, M::Cell>> {
        self.descend_to::<MAPS, true>(at, 0)
    }

    #[inline(always)]
    fn descend_to<const MAPS: bool, const PAGE: bool>(
        &self,
        at: u64,
        spread: u64,
    ) -> Option<Place<'_, M::Cell>> {
        self.memory.descended();
        let Begin { root, levels } = self.begin();
        // The guards are constants: levels that the format cannot have cost no code.
        match levels {
            1 if F::MIN_LEVELS <= 1 && F::MAX_LEVELS > 1 => {
                self.descend_from::<At<0>, MAPS, PAGE>(root, at, spread)
            }
            2 if F::MIN_LEVELS <= 2 && F::MAX_LEVELS > 2 => {
                self.descend_from::<At<1>, MAPS, PAGE>(root, at, spread)
            }
            3 if F::MIN_LEVELS <= 3 && F::MAX_LEVELS > 3 => {
                self.descend_from::<At<2>, MAPS, PAGE>(root, at, spread)
            }
            4 if F::MIN_LEVELS <= 4 && F::MAX_LEVELS > 4 => {
                self.descend_from::<At<3>, MAPS, PAGE>(root, at, spread)
            }
            5 if F::MIN_LEVELS <= 5 && F::MAX_LEVELS > 5 => {
                self.descend_from::<At<4>, MAPS, PAGE>(root, at, spread)
            }
            // The most levels that there can be need no comparison.
            _ if F::MAX_LEVELS >= 6 => self.descend_from::<At<5>, MAPS, PAGE>(root, at, spread),
            _ if F::MAX_LEVELS == 5 => self.descend_from::<At<4>, MAPS, PAGE>(root, at, spread),
            _ if F::MAX_LEVELS == 4 => self.descend_from::<At<3>, MAPS, PAGE>(root, at, spread),
            _ if F::MAX_LEVELS == 3 => self.descend_from::<At<2>, MAPS, PAGE>(root, at, spread),
            _ if F::MAX_LEVELS == 2 => self.descend_from::<At<1>, MAPS, PAGE>(root, at, spread),
            _ => self.descend_from::<At<0>, MAPS, PAGE>(root, at, spread),
        }
    }

    #[inline(always)]
    fn descend_from<V: Step, const MAPS: bool, const PAGE: bool>(
        &self,
        table: u64,
        at: u64,
        spread: u64,
    ) -> Option<Place<'_, M::Cell>> {
        let (cells, index) = (self.entries(table, V::N), self.index(V::N, at));
        let cell = cells.get(index)?;
        let word = cell.get_acquire();
        if V::N > 0 && spread >> F::shift(V::N) == 0 {
            if let Entry::Table(below) = F::decode(V::N, word) {
                self.memory.table_read(table);
                if MAPS {
                    self.maps_below(cell);
                }
                return self.descend_inlined::<V::Below, MAPS, PAGE>(below, at, spread);
            }
        }
        if PAGE && V::N > 0 {
            return None;
        }
        Some(Place {
            table,
            level: V::N,
            cells,
            index,
            word,
            entry: decode::<F>(V::N, word),
        })
    }

    // A function of its own, so that the recursion is inlined level by level.
    #[inline(always)]
    fn descend_inlined<V: Step, const MAPS: bool, const PAGE: bool>(
        &self,
        table: u64,
        at: u64,
        spread: u64,
    ) -> Option<Place<'_, M::Cell>> {
        self.descend_from::<V, MAPS, PAGE>(table, at, spread)
    }

    /// The end of a walk to the stripped address `at`, no lower than level `lowest`: for operations that do not decide about
    /// speed.
    pub(super) fn walk(&self, at: u64, lowest: usize) -> Place<'_, M::Cell> {
        self.last_from(self.begin().table(), at, lowest)
    }

    /// [`walk`](Self::walk) from a table on.
    pub(super) fn last_from(
        &self,
        (mut table, mut level): (u64, usize),
        at: u64,
        lowest: usize,
    ) -> Place<'_, M::Cell> {
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
                        cells,
                        index,
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
