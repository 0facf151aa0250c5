//! Pages of the smallest size in one table, as one run: a path of its own.
//!
//! What any request needs costs more than one page, or a few. So the usual case, pages whose table is there, is gone
//! straight through: a few checks, the way down, one store or a series of them. Whatever is not as usual
//! ends here with nothing changed, and the general path does the work or finds the error.

use core::slice;

use runs::{Iova, Pa, Run, Span};

use super::access::Access;
use super::clear::has_neighbour;
use super::request::Attributes;
use super::row::{first_occupied, store_leaves};
use super::sink::{RunSink, Wants};
use super::{L, Level, Table, at_top};
use crate::cell::{Cell, Series};
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Maps `runs` if that is one run of pages for which there is a table, with empty entries, and no larger leaf;
    /// with `ONE`, if it is one page.
    #[inline(always)]
    pub(super) fn map_pages_here<P: Access, const ONE: bool>(
        &self,
        iova: u64,
        runs: &[Span<Pa>],
        attributes: impl Attributes,
        access: P,
    ) -> Option<()> {
        let page = 1u64 << F::shift(0);
        let [Span { start: pa, len, .. }] = *runs else {
            return None;
        };
        let fits = self.is_pages::<ONE>(Span::new(iova, len))
            && pa & (page - 1) == 0
            && (pa | pa.wrapping_add(len - 1)) >> self.format.output_bits() == 0;
        if !fits {
            return None;
        }
        let bits = attributes.bits(&self.format)?;
        let (cells, index) = self.page_entry::<P, true>(iova, access)?;
        let here = pages_from(cells, index, if ONE { page } else { len } >> F::shift(0))?;
        let word = F::leaf(0, pa, F::shift(0), bits);
        if ONE {
            let cell = here.first().filter(|cell| F::is_empty(cell.get()))?;
            self.announce_run(Run { iova, pa, len }, word);
            cell.set(word);
        } else {
            if first_occupied::<F, _>(here).is_some() {
                return None;
            }
            self.announce_run(Run { iova, pa, len }, word);
            store_leaves::<F, L<0>, _>(here, word, F::shift(0));
        }
        self.memory.written(here);
        Some(())
    }

    /// Whether a stretch is pages of one table, or with `ONE` a page, and too short for larger leaves.
    #[inline(always)]
    fn is_pages<const ONE: bool>(&self, Span { start, len, .. }: Span<Iova>) -> bool {
        let (page, table) = (1u64 << F::shift(0), self.span_mask(0));
        if ONE {
            return (len, start & (page - 1)) == (page, 0) && self.sizes.bits() & page != 0;
        }
        let up_to_len = u64::MAX.checked_shr(len.leading_zeros());
        (start | len) & (page - 1) == 0
            && len.wrapping_sub(1) <= table - (start & table)
            && up_to_len.is_some_and(|sizes| self.sizes.bits() & sizes == page)
    }

    #[inline(always)]
    fn announce_run(&self, run: Run, word: u64) {
        if self.memory.watches_runs() {
            self.memory.mapped(run, self.format.prot(0, word));
        }
    }

    /// Unmaps `range` if that is pages that are mapped as one run, and not the last ones in a table
    /// that the operation owns; with `ONE`, if it is one page.
    #[inline(always)]
    pub(super) fn unmap_pages_here<S: RunSink, P: Access, const ONE: bool>(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut S,
        access: P,
    ) -> Option<()> {
        let page = 1u64 << F::shift(0);
        if !self.is_pages::<ONE>(range) || !ONE && sink.wants() == Wants::DirtyRuns {
            return None;
        }
        let (cells, index) = self.page_entry::<P, false>(range.start, access)?;
        let len = if ONE { page } else { range.len };
        let here = pages_from(cells, index, len >> F::shift(0))?;
        let cell = here.first()?;
        let word = cell.get();
        let pa = match F::decode(0, word) {
            Entry::Leaf { pa, log2 } if log2 == F::shift(0) => pa,
            _ => return None,
        };
        if self.frees_emptied(0, range.start, access)
            && !has_neighbour::<F, _>(cells, index, here.len())
        {
            return None;
        }
        let mut dirty = false;
        if !ONE {
            let series = |next, stride| Series {
                next,
                stride,
                ignored: F::HARDWARE_BITS,
            };
            let run = series(word, F::stride(F::shift(0)));
            if M::Cell::match_series(here, run) != here.len() {
                return None;
            }
            M::Cell::set_series(here, series(0, 0));
        } else if sink.wants() == Wants::DirtyRuns {
            dirty = F::is_dirty(cell.exchange(0));
        } else {
            cell.set(0);
        }
        self.memory.written(here);
        let run = Run::new(range.start, Span::new(pa, len));
        if self.memory.watches_runs() {
            self.memory.unmapped(run);
        }
        gather.add(range, 1);
        match sink.wants() {
            Wants::Nothing => {}
            Wants::Runs => sink.run(run),
            Wants::DirtyRuns => sink.dirty_run(run, dirty),
        }
        Some(())
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

/// The entries of `pages` pages, if all of them are in one table.
#[inline(always)]
fn pages_from<C>(cells: &[C], index: usize, pages: u64) -> Option<&[C]> {
    match pages {
        1 => cells.get(index).map(slice::from_ref),
        _ => cells.get(index..)?.get(..pages as usize),
    }
}
