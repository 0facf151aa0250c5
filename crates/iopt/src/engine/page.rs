//! One page: a path of its own.
//!
//! What any request needs costs more than one page. So the usual case, a page whose table is there, is gone
//! straight through: a few checks, the way down, one store. Whatever is not as usual ends here with nothing changed,
//! and other paths do the work or find the error: `straight.rs` next.

use core::slice;

use runs::{Iova, Pa, Run, Span};

use super::access::Access;
use super::clear::has_neighbour;
use super::request::Attributes;
use super::sink::{RunSink, Wants};
use super::{Level, Table, at_top};
use crate::cell::Cell;
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Maps `runs` if that is one page for which there is a table, with an empty entry, and no larger leaf.
    #[inline(always)]
    pub(super) fn map_page_here<P: Access>(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        attributes: impl Attributes,
        access: P,
    ) -> Option<()> {
        let [Span { start: pa, len, .. }] = *runs else {
            return None;
        };
        let last = pa.wrapping_add(len.wrapping_sub(1));
        let fits = self.is_page(iova | pa, len) && (pa | last) >> self.format.output_bits() == 0;
        if !fits {
            return None;
        }
        let bits = attributes.bits(&self.format)?;
        let (cells, index) = self.page_entry::<P, true>(iova, access)?;
        let cell = cells.get(index).filter(|cell| F::is_empty(cell.get()))?;
        let word = F::leaf(0, pa, F::shift(0), bits);
        self.announce_run(Run { iova, pa, len }, word);
        cell.set(word);
        self.memory.written(slice::from_ref(cell));
        Some(())
    }

    /// Whether `len` bytes from there on are a page.
    #[inline(always)]
    fn is_page(&self, start: u64, len: u64) -> bool {
        let page = 1u64 << F::shift(0);
        (len, start & (page - 1)) == (page, 0) && self.sizes.bits() & page != 0
    }

    #[inline(always)]
    pub(super) fn announce_run(&self, run: Run, word: u64) {
        if self.memory.watches_runs() {
            self.memory.mapped(run, self.format.prot(0, word));
        }
    }

    /// Unmaps `range` if that is one page, and not the last one in a table that the operation owns.
    #[inline(always)]
    pub(super) fn unmap_page_here<S: RunSink, P: Access>(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) -> Option<()> {
        if !self.is_page(range.start, range.len) {
            return None;
        }
        let (cells, index) = self.page_entry::<P, false>(range.start, access)?;
        let cell = cells.get(index)?;
        let pa = match F::decode(0, cell.get()) {
            Entry::Leaf { pa, log2 } if log2 == F::shift(0) => pa,
            _ => return None,
        };
        if self.frees_emptied(0, range.start, access) && !has_neighbour::<F, _>(cells, index, 1) {
            return None;
        }
        let mut dirty = false;
        if sink.wants() == Wants::DirtyRuns {
            dirty = F::is_dirty(cell.exchange(0));
        } else {
            cell.set(0);
        }
        self.memory.written(slice::from_ref(cell));
        let run = Run::new(range.start, Span::new(pa, range.len));
        self.tell(run, 0, dirty, gather, sink);
        Some(())
    }

    /// Tells of leaves at `level`, which were one run, that they are unmapped.
    #[inline(always)]
    pub(super) fn tell<S: RunSink>(
        &self,
        run: Run,
        level: usize,
        dirty: bool,
        gather: &mut Gather,
        sink: &mut S,
    ) {
        if self.memory.watches_runs() {
            self.memory.unmapped(run);
        }
        gather.add(Span::new(run.iova, run.len), 1 << level);
        match sink.wants() {
            Wants::Nothing => {}
            Wants::Runs => sink.run(run),
            Wants::DirtyRuns => sink.dirty_run(run, dirty),
        }
    }

    /// The entries of the table at level 0 for the page at `iova`, and the index of its own. With
    /// `MAPS` the operation is about to map it.
    #[inline(always)]
    fn page_entry<P: Access, const MAPS: bool>(
        &self,
        iova: u64,
        access: P,
    ) -> Option<(&[M::Cell], usize)> {
        if !self.aperture().covers(&Span::new(iova, 1)) {
            return None;
        }
        self.memory.descended();
        // An index has no bits from above the aperture.
        at_top!(self.begin(), F, Top, root => {
            self.page_entry_below::<Top, P, MAPS>(root, iova, access)
        })
    }

    #[inline(always)]
    fn page_entry_below<V: Level, P: Access, const MAPS: bool>(
        &self,
        table: u64,
        at: u64,
        access: P,
    ) -> Option<(&[M::Cell], usize)> {
        let cells = self.cells(table, V::N);
        if cells.len() != self.format.entries(V::N) {
            // The long way says what is wrong with it.
            return None;
        }
        let index = self.index(V::N, at);
        if V::N == 0 {
            return self.intact().is_ok().then_some((cells, index));
        }
        let cell = cells.get(index)?;
        match F::decode(V::N, P::follow(cell)) {
            Entry::Table(below) => {
                if MAPS {
                    self.maps_below(cell, access);
                }
                self.page_entry_inlined::<V::Below, P, MAPS>(below, at, access)
            }
            _ => None,
        }
    }

    // A function of its own, so that the recursion is inlined level by level.
    #[inline(always)]
    fn page_entry_inlined<V: Level, P: Access, const MAPS: bool>(
        &self,
        table: u64,
        at: u64,
        access: P,
    ) -> Option<(&[M::Cell], usize)> {
        self.page_entry_below::<V, P, MAPS>(table, at, access)
    }
}
