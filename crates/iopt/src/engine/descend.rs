//! The way down.
//!
//! Most ranges lie in one table, or in a few neighbours below one entry of it. The way from the root
//! to that table is gone once, and the operation does its work from there on.

use super::access::Access;
use super::{Level, Table, at_top};
use crate::format::{Entry, Format};
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// The lowest table, and its level, that all of `[at, at + len)` goes through: the range lies
    /// below more than one of its entries, or is all that is below one, or there is no table below.
    /// With `MAPS` the operation is about to map there.
    #[inline(always)]
    pub(super) fn lowest<P: Access, const MAPS: bool>(
        &self,
        at: u64,
        len: u64,
        access: P,
    ) -> (u64, usize) {
        self.memory.descended();
        // The bits in which its addresses differ; one more if it is a whole block, so that it is
        // not taken for a part of what is below the entry for that block.
        let mut spread = at ^ (at + (len - 1));
        if spread == len - 1 {
            spread |= len;
        }
        at_top!(self.begin(), F, Top, root => {
            self.lowest_below::<Top, P, MAPS>(root, at, spread, access)
        })
    }

    #[inline(always)]
    fn lowest_below<V: Level, P: Access, const MAPS: bool>(
        &self,
        table: u64,
        at: u64,
        spread: u64,
        access: P,
    ) -> (u64, usize) {
        if V::N > 0 && spread >> F::shift(V::N) == 0 {
            if let Some(cell) = self.cells(table, V::N).get(self.index(V::N, at)) {
                if let Entry::Table(below) = F::decode(V::N, P::follow(cell)) {
                    if MAPS {
                        self.maps_below(cell, access);
                    }
                    return self.lowest_inlined::<V::Below, P, MAPS>(below, at, spread, access);
                }
            }
        }
        (table, V::N)
    }

    // A function of its own, so that the recursion is inlined level by level.
    #[inline]
    fn lowest_inlined<V: Level, P: Access, const MAPS: bool>(
        &self,
        table: u64,
        at: u64,
        spread: u64,
        access: P,
    ) -> (u64, usize) {
        self.lowest_below::<V, P, MAPS>(table, at, spread, access)
    }
}
