//! One page of the smallest size: a path of its own.
//!
//! What a row of entries needs costs more than one page. So the usual case, a page whose table is
//! there, is gone straight through: a few checks, the way down, one store. Whatever is not as usual
//! ends here with nothing changed, and the general path does the work or finds the error.

use core::slice;

use runs::{Iova, Pa, Run, Span};

use super::access::Access;
use super::sink::{RunSink, Wants};
use super::{Level, Table, at_top};
use crate::cell::Cell;
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Maps `runs` if that is one page for which there is a table and an empty entry.
    #[inline(always)]
    pub(super) fn map_page<P: Access>(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        prot: Prot,
        access: P,
    ) -> Option<()> {
        let page = 1u64 << F::shift(0);
        let [Span { start: pa, len, .. }] = *runs else {
            return None;
        };
        let fits = len == page
            && (iova | pa) & (page - 1) == 0
            && pa >> self.format.output_bits() == 0
            && self.sizes.contains(page);
        if !fits {
            return None;
        }
        let bits = self.format.leaf_bits(prot)?;
        let (table, cell) = self.page_entry(iova, access)?;
        self.claim(table, access).ok()?;
        if !F::is_empty(cell.get()) {
            self.release(table, access);
            return None;
        }
        let word = F::leaf(0, pa, F::shift(0), bits);
        if self.memory.watches_runs() {
            self.memory
                .mapped(Run::new(iova, pa, page), self.format.prot(0, word));
        }
        let live = &self.memory.meta(table).live;
        let count = live.get();
        cell.set(word);
        self.memory.written(slice::from_ref(cell));
        live.set(count + 1);
        self.release(table, access);
        Some(())
    }

    /// Unmaps `range` if that is one page that is mapped by itself, and not the last one in its
    /// table.
    #[inline(always)]
    pub(super) fn unmap_page<S: RunSink, P: Access>(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) -> Option<()> {
        let page = 1u64 << F::shift(0);
        if range.len != page || range.start & (page - 1) != 0 {
            return None;
        }
        let (table, cell) = self.page_entry(range.start, access)?;
        self.claim(table, access).ok()?;
        let live = &self.memory.meta(table).live;
        let count = live.get();
        let word = cell.get();
        let pa = match F::decode(0, word) {
            Entry::Leaf { pa, log2 } if log2 == F::shift(0) => pa,
            _ => {
                self.release(table, access);
                return None;
            }
        };
        if count <= 1 && !self.keeps_empty {
            self.release(table, access);
            return None;
        }
        let mut dirty = false;
        if sink.wants() == Wants::DirtyRuns {
            dirty = F::is_dirty(cell.exchange(0));
        } else {
            cell.set(0);
        }
        self.memory.written(slice::from_ref(cell));
        live.set(count - 1);
        let run = Run::new(range.start, pa, page);
        if self.memory.watches_runs() {
            self.memory.unmapped(run);
        }
        self.release(table, access);
        gather.add(range, 1);
        match sink.wants() {
            Wants::Nothing => {}
            Wants::Runs => sink.run(run),
            Wants::DirtyRuns => sink.dirty_run(run, dirty),
        }
        Some(())
    }

    /// The table at level 0 that has an entry for the page at `iova`, and this entry.
    #[inline(always)]
    fn page_entry<P: Access>(&self, iova: u64, access: P) -> Option<(u64, &M::Cell)> {
        if !self.aperture().covers(&Span::new(iova, 1)) {
            return None;
        }
        self.memory.descended();
        // An index has no bits from above the aperture.
        at_top!(self.begin(), F, Top, root => self.page_entry_below::<Top, P>(root, iova, access))
    }

    #[inline(always)]
    fn page_entry_below<V: Level, P: Access>(
        &self,
        table: u64,
        at: u64,
        access: P,
    ) -> Option<(u64, &M::Cell)> {
        let cells = self.cells(table, V::N);
        if cells.len() != self.format.entries(V::N) {
            // The long way says what is wrong with it.
            return None;
        }
        let cell = cells.get(self.index(V::N, at))?;
        if V::N == 0 {
            return Some((table, cell));
        }
        match F::decode(V::N, P::follow(cell)) {
            Entry::Table(below) if self.settled(Some(table), access) => {
                self.page_entry_inlined::<V::Below, P>(below, at, access)
            }
            _ => None,
        }
    }

    // A function of its own, so that the recursion is inlined level by level.
    #[inline(always)]
    fn page_entry_inlined<V: Level, P: Access>(
        &self,
        table: u64,
        at: u64,
        access: P,
    ) -> Option<(u64, &M::Cell)> {
        self.page_entry_below::<V, P>(table, at, access)
    }
}
