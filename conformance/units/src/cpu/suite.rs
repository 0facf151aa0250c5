//! Checks of every format.
//!
//! Output addresses are anywhere in the format's range: a processor that is only asked needs no memory
//! there.

use std::convert::Infallible;

use anyhow::{Context as _, ensure};
use iopt::{Format, Interruption, Prot, Table, TableOps as _};
use runs::{Iova, Span};

use super::{
    processor::Processor,
    subject::{Subject, Walked},
};

/// Steps of the mixture.
const STEPS: u64 = 100;
/// Its places in each stretch of the aperture.
const PLACES: u64 = 6;
/// The largest leaves in it; there are none that take a large part of the aperture either.
const LARGEST: u64 = 16 << 30;

/// All of it, with an empty table of which the processor has been told.
pub(super) fn all<F: Format, M: Walked>(
    processor: &Processor,
    table: Table<F, M>,
    memory: M,
    prot: Prot,
) -> anyhow::Result<()> {
    let mut subject = Subject::new(processor, table, memory, prot)?;
    subject.every_leaf_size().context("every leaf size")?;
    subject.scattered_runs().context("scattered runs")?;
    subject.split_cut_merge().context("split, cut, merge")?;
    subject.mixture().context("mixture")
}

impl<F: Format, M: Walked> Subject<'_, F, M> {
    /// Leaves of each size at both ends of the aperture and wherever one bit of the input address or of
    /// the output address is set (or, at the top, clear).
    fn every_leaf_size(&mut self) -> anyhow::Result<()> {
        let output_bits = self.table.format().output_bits();
        for size in self.table.page_sizes().iter() {
            let log2 = size.trailing_zeros();
            for span in self.spans().into_iter().filter(|span| size <= span.len) {
                let one_bit = (log2..64).map(|bit| span.start ^ 1 << bit);
                let ends = [span.start, span.last() - (size - 1)];
                for iova in ends.into_iter().chain(one_bit) {
                    if span.contains(iova) {
                        let pa = self.random.u64(..) >> (64 - output_bits) & !(size - 1);
                        self.one_leaf(iova, pa, size, ends.contains(&iova))?;
                    }
                }
                for bit in log2..output_bits {
                    self.one_leaf(span.start, 1 << bit, size, false)?;
                }
                let highest = (u64::MAX >> (64 - output_bits)) & !(size - 1);
                self.one_leaf(span.start, highest, size, true)?;
            }
        }
        Ok(())
    }

    /// A leaf comes and goes; `closely` asks for each entry of a group, and for what is beside it.
    fn one_leaf(&mut self, iova: u64, pa: u64, size: u64, closely: bool) -> anyhow::Result<()> {
        let range = Span::new(iova, size);
        self.map(iova, &[Span::new(pa, size)])?;
        self.leaf_has(iova, size)?;
        if closely {
            let step = (size / 16).max(self.page());
            for at in (0..size).step_by(step as usize) {
                self.ask(iova + at)?;
            }
            self.ask_outside(range)?;
        }
        let within = self.random.u64(..size);
        for at in [0, within, size - 1] {
            self.ask(iova + at)?;
        }
        self.unmap(range)?;
        self.ask(iova + within)
    }

    /// Runs of a few pages each, side by side over the end of a table; then every second one goes.
    fn scattered_runs(&mut self) -> anyhow::Result<()> {
        let page = self.page();
        let most = self.table.format().output_bits();
        for span in self.spans() {
            let start = span.start + span.len / 2 - 50 * page;
            let mut runs = Vec::new();
            for _ in 0..16 {
                let len = (1 + self.random.u64(..12)) * page;
                let pa = self.random.u64(..) >> (65 - most) & !(page - 1);
                runs.push(Span::new(pa, len));
            }
            self.map(start, &runs)?;
            let len = runs.iter().map(|run| run.len).sum();
            let all = Span::new(start, len);
            self.ask_each_page(all)?;
            let mut at = start;
            for (nth, run) in runs.iter().enumerate() {
                if nth % 2 == 1 {
                    self.unmap(Span::new(at, run.len))?;
                }
                at += run.len;
            }
            self.ask_each_page(all)?;
            self.unmap(all)?;
            self.ask_range(all)?;
        }
        Ok(())
    }

    /// A leaf of each size becomes leaves of the next smaller one, is cut, and becomes one leaf again.
    fn split_cut_merge(&mut self) -> anyhow::Result<()> {
        const AT_ONCE: Interruption = Interruption::Allowed;
        let sizes: Vec<u64> = self.table.page_sizes().iter().collect();
        let output_bits = self.table.format().output_bits();
        for span in self.spans() {
            for (smaller, size) in sizes.iter().zip(sizes.iter().skip(1)) {
                let (smaller, size) = (*smaller, *size);
                if size > span.len {
                    continue;
                }
                let iova = span.start + self.random.u64(..span.len / size) * size;
                let pa = self.random.u64(..) >> (64 - output_bits) & !(size - 1);
                let range = Span::new(iova, size);
                self.map(iova, &[Span::new(pa, size)])?;
                self.resize(|table, gather| {
                    let flush = |_: &_| Ok::<_, Infallible>(());
                    Ok(table.split(range, smaller, AT_ONCE, gather, flush)?)
                })?;
                self.leaf_has(iova, smaller)?;
                self.ask_range(range)?;
                self.merge(range)?;
                self.leaf_has(iova, size)?;
                self.ask_range(range)?;
                let at = iova + (1 + self.random.u64(..size / self.page() - 1)) * self.page();
                self.cut(at)?;
                self.ask_range(range)?;
                self.ask_range(Span::new(at - self.page(), 2 * self.page()))?;
                self.merge(range)?;
                self.leaf_has(iova, size)?;
                self.unmap(Span::new(at - self.page(), self.page()))?;
                self.ask_range(range)?;
                self.ask_range(Span::new(at - self.page(), 2 * self.page()))?;
                self.unmap(range)?;
                self.ask_range(range)?;
            }
        }
        Ok(())
    }

    fn cut(&mut self, at: u64) -> anyhow::Result<()> {
        self.resize(|table, gather| {
            let flush = |_: &_| Ok::<_, Infallible>(());
            Ok(table.cut(at, Interruption::Allowed, gather, flush)?)
        })
    }

    fn merge(&mut self, range: Span<Iova>) -> anyhow::Result<()> {
        self.resize(|table, gather| {
            let flush = |_: &_| Ok::<_, Infallible>(());
            Ok(table.merge(range, Interruption::Allowed, gather, flush)?)
        })
    }

    /// Maps, unmaps, splits, cuts and merges at random, here and there; after each step the range is
    /// asked for, at the end all of them, and nothing is left over.
    fn mixture(&mut self) -> anyhow::Result<()> {
        let place = self.place_bytes();
        let mut places = Vec::new();
        for span in self.spans() {
            let step = (span.len / place / PLACES).max(1) * place;
            let starts = (0..PLACES - 1).map(|nth| span.start + nth * step);
            let last = span.last() - (place - 1);
            places.extend(starts.chain([last]).map(|start| Span::new(start, place)));
        }
        for step in 0..STEPS {
            let place = *self.random.choice(&places).context("no place")?;
            let touched = self.step(place);
            let touched = touched.with_context(|| format!("step {step} at {place:x?}"))?;
            let asked = self.ask_range(touched);
            asked.with_context(|| format!("step {step} at {touched:x?}"))?;
        }
        for place in &places {
            self.ask_range(*place)?;
        }
        for place in places {
            self.unmap(place)?;
            self.ask_range(place)?;
        }
        ensure!(self.table.tables() == 1, "tables are left over");
        Ok(())
    }

    /// A step of the mixture, and the range that it has to do with.
    fn step(&mut self, place: Span<Iova>) -> anyhow::Result<Span<Iova>> {
        let page = self.page();
        let mapped = self.model.inside(place);
        let Some(run) = self.random.choice(&mapped).copied() else {
            let range = self.part(place);
            return self.map_area(range);
        };
        let run = run.input();
        match self.random.u64(..6) {
            0 => {
                self.unmap(place)?;
                Ok(run)
            }
            1 => {
                let range = self.part(place);
                self.unmap(range)?;
                Ok(range)
            }
            2 => {
                let at = run.start + self.random.u64(..run.len / page) * page;
                self.cut(at)?;
                Ok(Span::new(at, page))
            }
            3 => {
                // Not more than becomes one table of leaves.
                let table = 1 << F::shift(1);
                let part = self.part(run);
                let range = Span::new(part.start, part.len.min(table));
                let sizes: Vec<u64> = self.table.page_sizes().up_to(table).iter().collect();
                let size = *self.random.choice(&sizes).context("no sizes")?;
                self.resize(|table, gather| {
                    let flush = |_: &_| Ok::<_, Infallible>(());
                    Ok(table.split(range, size, Interruption::Allowed, gather, flush)?)
                })?;
                Ok(range)
            }
            4 => {
                self.merge(place)?;
                Ok(place)
            }
            _ => {
                // As far as nothing is mapped there.
                let range = self.part(place);
                let free = match self.model.inside(range).first() {
                    Some(run) => run.iova - range.start,
                    None => range.len,
                };
                if free == 0 {
                    return Ok(range);
                }
                self.map_area(Span::new(range.start, free))
            }
        }
    }

    /// A part of a range; small parts are as likely as large ones.
    fn part(&mut self, range: Span<Iova>) -> Span<Iova> {
        let page = self.page();
        let pages = range.len / page;
        let most = pages >> self.random.u64(..u64::from(pages.ilog2()) + 1);
        let len = 1 + self.random.u64(..most);
        let start = self.random.u64(..pages - len + 1);
        Span::new(range.start + start * page, len * page)
    }

    /// Maps a range, or the beginning of it, in up to three runs. In half of the cases both addresses are
    /// equal modulo the largest leaf, so that there are large leaves in it.
    fn map_area(&mut self, range: Span<Iova>) -> anyhow::Result<Span<Iova>> {
        let page = self.page();
        let place = self.place_bytes();
        let outputs = (1 << self.table.format().output_bits()) / place;
        let mut left = range.len;
        let mut runs = Vec::new();
        for _ in 0..1 + self.random.u64(..3) {
            let at = range.start + (range.len - left);
            let aligned = self.random.u64(..2) == 0;
            let most = if aligned {
                left
            } else {
                left.min(4 << F::shift(1))
            };
            let len = (1 + self.random.u64(..most / page)) * page;
            let shift = if aligned {
                at % place
            } else {
                self.random.u64(..(place - len) / page + 1) * page
            };
            let pa = self.random.u64(..outputs - 1) * place + shift;
            runs.push(Span::new(pa, len));
            left -= len;
            if left == 0 {
                break;
            }
        }
        self.map(range.start, &runs)?;
        Ok(Span::new(range.start, range.len - left))
    }

    fn ask_each_page(&mut self, range: Span<Iova>) -> anyhow::Result<()> {
        for at in (0..range.len).step_by(self.page() as usize) {
            let offset = self.random.u64(..self.page());
            self.ask(range.start + at + offset)?;
        }
        self.ask_outside(range)
    }

    /// The size of a place of the mixture: the largest leaf, twice.
    fn place_bytes(&self) -> u64 {
        let part = 1 << (self.table.format().aperture().bits - 5);
        2 * self.table.page_sizes().up_to(LARGEST.min(part)).largest()
    }

    fn spans(&self) -> Vec<Span<Iova>> {
        self.table.format().aperture().spans().collect()
    }
}
