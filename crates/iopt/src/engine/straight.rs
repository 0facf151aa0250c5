//! One leaf of any size, or leaves of one size in one table, as one run: a path of its own.
//!
//! As with one page (`page.rs`): a few checks, the way down, a series of stores; whatever is not as usual ends here with
//! nothing changed.

use runs::{Iova, Pa, Run, Span};

use super::access::Access;
use super::clear::same_run;
use super::request::Attributes;
use super::row::{first_occupied, store_leaves};
use super::sink::{RunSink, Wants};
use super::{L, Level, Table, at_level, at_top};
use crate::cell::{Cell, Series};
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;

/// The entries of one table that a range covers whole.
struct Row<'t, C> {
    table: u64,
    level: usize,
    cells: &'t [C],
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Maps `runs` if that is one run of leaves for which there is a table with empty entries: one leaf together,
    /// or a leaf for each entry.
    #[inline(always)]
    pub(super) fn map_straight<P: Access>(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        attributes: impl Attributes,
        access: P,
    ) -> Option<()> {
        let [Span { start: pa, len, .. }] = *runs else {
            return None;
        };
        let last = pa.checked_add(len.checked_sub(1)?)?;
        if last >> self.format.output_bits() != 0 {
            return None;
        }
        let bits = attributes.bits(&self.format)?;
        let row = self.row_at::<P, true>(Span::new(iova, len), access)?;
        let run = Run { iova, pa, len };
        if row.level == 0 {
            return self.store_row::<L<0>>(row.cells, run, bits);
        }
        at_level!(row.level, F, V => self.store_row::<V>(row.cells, run, bits))
    }

    #[inline(always)]
    fn store_row<V: Level>(&self, cells: &[M::Cell], run: Run, bits: u64) -> Option<()> {
        let Run { iova, pa, len } = run;
        let own = F::shift(V::N);
        let up_to_len = u64::MAX.checked_shr(len.leading_zeros())?;
        let sizes = F::leaf_sizes(V::N).and(self.sizes).bits() & up_to_len;
        // Entries go on by a constant step within such a block of physical memory only.
        let linear = F::LINEAR_LOG2 >= 64 || (pa ^ (pa + (len - 1))) >> F::LINEAR_LOG2 == 0;
        let log2 = if sizes == 1 << own && pa & (sizes - 1) == 0 && linear {
            own
        } else if sizes & len != 0 && len.is_power_of_two() && (iova | pa) & (len - 1) == 0 {
            len.trailing_zeros()
        } else {
            return None;
        };
        if first_occupied::<F, _>(cells).is_some() {
            return None;
        }
        self.memory.descended();
        self.announce_run(run, F::leaf(0, 0, F::shift(0), bits));
        store_leaves::<F, V, _>(cells, F::leaf(V::N, pa, log2, bits), log2);
        self.memory.written(cells);
        Some(())
    }

    /// Unmaps `range` if it is one run of leaves of one table: one leaf together, or a leaf for each entry.
    #[inline(always)]
    pub(super) fn unmap_straight<S: RunSink, P: Access>(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) -> Option<()> {
        if sink.wants() == Wants::DirtyRuns {
            return None;
        }
        let row = self.row_at::<P, false>(range, access)?;
        // Pages are what is unmapped most, and a level that is known costs less.
        if row.level == 0 {
            let pa = self.take_row::<L<0>>(row.cells, range)?;
            self.took((row.table, 0), range, pa, gather, sink, access);
        } else {
            let pa = at_level!(row.level, F, V => self.take_row::<V>(row.cells, range))?;
            self.took((row.table, row.level), range, pa, gather, sink, access);
        }
        Some(())
    }

    #[inline(always)]
    fn took<S: RunSink, P: Access>(
        &self,
        (table, level): (u64, usize),
        range: Span<Iova>,
        pa: u64,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) {
        let run = Run::new(range.start, Span::new(pa, range.len));
        self.tell(run, level, false, gather, sink);
        self.free_emptied((table, level), (range.start, range.len), gather, access);
    }

    /// Empties the entries of `range`, and says where they led.
    #[inline(always)]
    fn take_row<V: Level>(&self, cells: &[M::Cell], range: Span<Iova>) -> Option<u64> {
        let Entry::Leaf { pa, log2 } = F::decode(V::N, cells.first()?.get()) else {
            return None;
        };
        // Leaves of a series have one size, where their entries go on by a constant step. One leaf is known by its first.
        let one = 1u64.checked_shl(log2) == Some(range.len) && range.start & (range.len - 1) == 0;
        if !one {
            let own = log2 == F::shift(V::N);
            if !own || same_run::<F, V, _, false>(cells, log2) != cells.len() {
                return None;
            }
        }
        self.memory.descended();
        let empty = Series {
            next: 0,
            stride: 0,
            ignored: 0,
        };
        M::Cell::set_series(cells, empty);
        self.memory.written(cells);
        Some(pa)
    }

    /// The entries that `range` covers whole, if they are in one table. With `MAPS` the operation is about to map there.
    #[inline(always)]
    fn row_at<P: Access, const MAPS: bool>(
        &self,
        range: Span<Iova>,
        access: P,
    ) -> Option<Row<'_, M::Cell>> {
        // Of several leaves each has an entry, or this is not the way. Looked at before anything is read.
        let sizes = self.sizes.bits() & u64::MAX.checked_shr(range.len.leading_zeros())?;
        let largest = 1u64.checked_shl(63_u32.checked_sub(sizes.leading_zeros())?)?;
        let entries = (0..F::MAX_LEVELS).fold(0, |all, level| all | 1 << F::shift(level.into()));
        if largest != range.len && largest & entries == 0 || !self.aperture().covers(&range) {
            return None;
        }
        // An index has no bits from above the aperture.
        at_top!(self.begin(), F, Top, root => {
            self.row_below::<Top, P, MAPS>(root, range, access)
        })
    }

    #[inline(always)]
    fn row_below<V: Level, P: Access, const MAPS: bool>(
        &self,
        table: u64,
        range: Span<Iova>,
        access: P,
    ) -> Option<Row<'_, M::Cell>> {
        let (cells, index) = (self.cells(table, V::N), self.index(V::N, range.start));
        let (level, shift) = (V::N, F::shift(V::N));
        if (range.start | range.len) & ((1 << shift) - 1) == 0 {
            let cells = cells.get(index..)?.get(..(range.len >> shift) as usize)?;
            let row = Row {
                table,
                level,
                cells,
            };
            return self.intact().is_ok().then_some(row);
        }
        if level == 0 {
            return None;
        }
        let cell = cells.get(index)?;
        let Entry::Table(below) = F::decode(level, P::follow(cell)) else {
            return None;
        };
        if MAPS {
            self.maps_below(cell, access);
        }
        self.row_inlined::<V::Below, P, MAPS>(below, range, access)
    }

    // A function of its own, so that the recursion is inlined level by level.
    #[inline(always)]
    fn row_inlined<V: Level, P: Access, const MAPS: bool>(
        &self,
        table: u64,
        range: Span<Iova>,
        access: P,
    ) -> Option<Row<'_, M::Cell>> {
        self.row_below::<V, P, MAPS>(table, range, access)
    }
}
