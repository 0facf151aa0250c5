//! A table, the processor that walks it, and the model beside both.

use std::{convert::Infallible, sync::atomic::AtomicU32};

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use iopt::{Cell as _, Format, Gather, HeapArena, NoRuns, Prot, Table, TableMemory, TableOps as _};
use runs::{Iova, Pa, Run, Span};

use super::{
    model::Model,
    processor::{Processor, Tables},
};

/// Longest range, in pages, of which each page is asked for; of longer ones as many pages as that, and
/// the ends of as many leaves.
const EACH: u64 = 24;

/// Memory whose tables the processor walks.
pub(super) trait Walked: TableMemory + Copy {
    /// Makes sure that the machine has the entries of the table at `table`.
    fn show(self, processor: &Processor, table: u64, entries: usize) -> anyhow::Result<()>;
}

/// It is the machine's memory.
impl<const LOG2: u32> Walked for &Tables<LOG2> {
    fn show(self, _: &Processor, _: u64, _: usize) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Entries of 4 bytes. Shared memory is lent in cells of 8, so each table is copied.
pub(super) type NarrowTables = HeapArena<AtomicU32, 10>;

impl Walked for &NarrowTables {
    fn show(self, processor: &Processor, table: u64, entries: usize) -> anyhow::Result<()> {
        let words = self.entries(table, entries);
        let bytes: Vec<u8> = words
            .iter()
            .flat_map(|word| (word.get_acquire() as u32).to_le_bytes())
            .collect();
        Ok(processor.machine().write(table, &bytes)?)
    }
}

/// A table with its processor and its model.
pub(super) struct Subject<'p, F: Format, M: Walked> {
    pub(super) processor: &'p Processor,
    pub(super) table: Table<F, M>,
    pub(super) model: Model,
    pub(super) random: Rng,
    memory: M,
    prot: Prot,
}

impl<'p, F: Format, M: Walked> Subject<'p, F, M> {
    /// An empty table, of which the processor has been told, in its memory; leaves will have these
    /// permissions.
    pub(super) fn new(
        processor: &'p Processor,
        table: Table<F, M>,
        memory: M,
        prot: Prot,
    ) -> anyhow::Result<Self> {
        let subject = Self {
            processor,
            table,
            model: Model::default(),
            random: Rng::with_seed(processor.round()),
            memory,
            prot,
        };
        subject.show()?;
        Ok(subject)
    }

    /// The smallest page's size.
    pub(super) fn page(&self) -> u64 {
        self.table.page_sizes().smallest()
    }

    pub(super) fn map(&mut self, iova: u64, runs: &[Span<Pa>]) -> anyhow::Result<()> {
        self.table.map(iova, runs, self.prot)?;
        let mut at = iova;
        for run in runs {
            self.model.add(Run::new(at, *run));
            at = at.wrapping_add(run.len);
        }
        self.show()
    }

    /// Unmaps what is mapped in a range; leaves that reach over its ends are cut.
    pub(super) fn unmap(&mut self, range: Span<Iova>) -> anyhow::Result<()> {
        self.model.remove(range);
        self.resize(|table, gather| {
            table.unmap_cutting(
                range,
                iopt::Interruption::Allowed,
                gather,
                &mut NoRuns,
                |_| Ok::<_, Infallible>(()),
            )?;
            Ok(())
        })
    }

    /// Does something to the table that takes a gather. Nothing has to be flushed: a processor that
    /// stands still remembers no translation.
    pub(super) fn resize(
        &mut self,
        change: impl FnOnce(&mut Table<F, M>, &mut Gather) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut gather = Gather::new();
        change(&mut self.table, &mut gather)?;
        let Ok(flushed) = gather.flush_with(|_| Ok::<_, Infallible>(()));
        self.table.reclaim(flushed);
        self.show()
    }

    /// One address leads where the model says.
    pub(super) fn ask(&self, iova: u64) -> anyhow::Result<()> {
        let found = self.processor.translate(iova)?;
        let expected = self.model.translate(iova);
        let say = |to: Option<u64>| to.map_or("nowhere".into(), |to| format!("to {to:#x}"));
        ensure!(
            found == expected,
            "{iova:#x} leads {}, not {}, in {:x?}",
            say(found),
            say(expected),
            self.table.leaf_at(iova)
        );
        Ok(())
    }

    /// A byte of each page of a range, or of some of them, and those before and behind the range.
    pub(super) fn ask_range(&mut self, range: Span<Iova>) -> anyhow::Result<()> {
        let page = self.page();
        let pages = range.len / page;
        if pages <= EACH {
            for at in (0..range.len).step_by(page as usize) {
                let offset = self.random.u64(..page);
                self.ask(range.start + at + offset)?;
            }
        } else {
            let leaves: Vec<_> = self.table.leaves(range).collect();
            for _ in 0..EACH {
                let at = self.random.u64(..range.len);
                self.ask(range.start + at)?;
                if let Some(leaf) = self.random.choice(&leaves) {
                    let leaf = leaf.run.input();
                    self.ask(leaf.start)?;
                    self.ask(leaf.last())?;
                }
            }
        }
        self.ask_outside(range)
    }

    /// The bytes before and behind a range.
    pub(super) fn ask_outside(&self, range: Span<Iova>) -> anyhow::Result<()> {
        let aperture = self.table.format().aperture();
        for outside in [range.start.wrapping_sub(1), range.last().wrapping_add(1)] {
            // A processor of 32 bits would take the address for another one.
            if aperture.bits > 32 || aperture.covers(&Span::new(outside, 1)) {
                self.ask(outside)?;
            }
        }
        Ok(())
    }

    /// The leaf at `iova` has this size.
    pub(super) fn leaf_has(&self, iova: u64, size: u64) -> anyhow::Result<()> {
        let leaf = self.table.leaf_at(iova).context("nothing is mapped")?;
        ensure!(leaf.run.len == size, "{} is not {size:#x} bytes", leaf.run);
        Ok(())
    }

    fn show(&self) -> anyhow::Result<()> {
        let format = self.table.format();
        let mut shown = Ok(());
        self.table.for_each_table(&mut |table, level| {
            if shown.is_ok() {
                let entries = format.entries(usize::from(level));
                shown = self.memory.show(self.processor, table, entries);
            }
        });
        shown
    }
}
