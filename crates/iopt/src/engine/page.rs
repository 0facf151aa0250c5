//! One page: a path of its own.
//!
//! The general path costs more than one page should. So the usual case, a page whose table is there, has a direct path:
//! a few checks, the descent, one store. Any other case ends here with nothing changed, and `map.rs`
//! and `unmap.rs` do the work or find the error.

use core::slice;

use runs::{Iova, Pa, Run, Span};

use super::Table;
use super::claim::Claim;
use super::clear::has_neighbour;
use super::request::Attributes;
use super::sink::{RunSink, Wants};
use crate::cell::Cell;
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Maps `runs` if that is one page for which there is a table, with an empty entry, and no larger leaf.
    #[inline(always)]
    pub(super) fn map_page(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        attributes: impl Attributes,
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
        let (cells, index) = self.page::<true>(iova)?;
        let cell = cells.get(index).filter(|cell| F::is_empty(cell.get()))?;
        let word = F::leaf(0, pa, F::shift(0), bits);
        if self.memory.watches_runs() {
            let run = Run { iova, pa, len };
            self.memory.mapped(run, self.format.prot(0, word));
        }
        cell.set(word);
        self.memory.written(slice::from_ref(cell));
        Some(())
    }

    /// Unmaps `range` if that is one page, and not the last one in a table that is to be freed then.
    #[inline(always)]
    pub(super) fn unmap_page<S: RunSink>(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut S,
        claim: Claim,
    ) -> Option<()> {
        if !self.is_page(range.start, range.len) {
            return None;
        }
        let (cells, index) = self.page::<false>(range.start)?;
        let cell = cells.get(index)?;
        let pa = match F::decode(0, cell.get()) {
            Entry::Leaf { pa, log2 } if log2 == F::shift(0) => pa,
            _ => return None,
        };
        if self.frees_emptied(0, range.start, claim) && !has_neighbour::<F, _>(cells, index, 1) {
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
        self.report(run, 0, dirty, gather, sink);
        Some(())
    }

    /// True when `len` bytes from there on are a page.
    #[inline(always)]
    fn is_page(&self, start: u64, len: u64) -> bool {
        let page = 1u64 << F::shift(0);
        (len, start & (page - 1)) == (page, 0) && self.sizes.bits() & page != 0
    }

    /// The entries of the table for the page at `iova`, if there is one, and the index of its own. With `MAPS` the operation
    /// is about to map it.
    #[inline(always)]
    fn page<const MAPS: bool>(&self, iova: u64) -> Option<(&[M::Cell], usize)> {
        if !self.aperture().covers(&Span::new(iova, 1)) {
            return None;
        }
        let (table, cells, index) = self.page_place::<MAPS>(iova)?;
        self.intact().ok()?;
        self.memory.table_read(table);
        Some((cells, index))
    }

    /// Reports leaves at `level`, which were one run, as unmapped.
    #[inline(always)]
    pub(super) fn report<S: RunSink>(
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
}
