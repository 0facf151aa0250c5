//! From pinned memory to the entries of every domain's table, batch by batch, in one pass.
//!
//! The batch is the only memory that this takes, whatever the number of runs. Runs are joined
//! while they stream by, also over the border of two batches, so that the leaves do not depend on
//! where a reader happens to end a batch.

use iopt::{RangeError, TableMemory};
use runs::{Joiner, Span};

use super::domain::Domain;
use crate::area::Area;
use crate::error::MapError;
use crate::memory::Hold;
use crate::object::RunReader;
use crate::observer::{Observer, Step, observed};

/// What is to be mapped where, and how far it is.
pub(super) struct Fill<'a, M: TableMemory> {
    pub(super) domains: &'a mut [Domain<M>],
    pub(super) batch: &'a mut [Span],
    pub(super) range: Span,
    pub(super) prot: iopt::Prot,
    /// Registers of a device.
    mmio: bool,
    /// Tables are set aside for it.
    released: bool,
    /// Bytes from the start of the range on that are in all tables.
    mapped: u64,
    /// Bytes from there on of which some may be in tables, after an error too.
    pub(super) reached: u64,
}

impl<'a, M: TableMemory> Fill<'a, M> {
    pub(super) fn new(domains: &'a mut [Domain<M>], batch: &'a mut [Span], area: &Area) -> Self {
        Self {
            domains,
            batch,
            range: area.range,
            prot: area.prot,
            mmio: area.memory.object().is_mmio(),
            released: area.released,
            mapped: 0,
            reached: 0,
        }
    }

    /// Finds the runs of the area's part, which `hold` holds, and fills the tables.
    pub(super) fn run(
        &mut self,
        hold: &Hold,
        part: Span,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        hold.with_runs(part, |reader| self.stream(reader, observer))
    }

    fn stream(
        &mut self,
        reader: &mut dyn RunReader,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let mut joiner = Joiner::new();
        let mut found = 0;
        loop {
            let (count, complete) = observed(observer, Step::FindRuns, |_| {
                let before = found;
                let batch = self.read(&mut *reader, &mut joiner, &mut found)?;
                Ok::<_, MapError>((batch, found - before))
            })?;
            if count == 0 {
                break;
            }
            self.fill(complete, observer)?;
        }
        if found != self.range.len {
            return Err(self.differ(found));
        }
        // The last run: nothing follows that it could be joined with.
        let Some((slot, run)) = self.batch.first_mut().zip(joiner.finish()) else {
            return Ok(());
        };
        *slot = run;
        self.fill(1, observer)
    }

    /// Reads a batch and joins it. Returns how many runs were read, and how many of those at the
    /// front of the batch are complete; the one behind them is still in the joiner.
    fn read(
        &mut self,
        reader: &mut dyn RunReader,
        joiner: &mut Joiner<Span>,
        found: &mut u64,
    ) -> Result<(usize, usize), MapError> {
        let room = self.batch.len();
        let count = reader.next_batch(self.batch).map_err(MapError::Runs)?;
        if count > room {
            return Err(MapError::BatchTooLong { count, room });
        }
        let batch = &mut self.batch[..count];
        let (mut sum, mut empty) = (*found, false);
        let complete = joiner.push_all(batch, |run| {
            empty |= run.is_empty();
            sum = sum.saturating_add(run.len);
        });
        if empty {
            return Err(MapError::Table(RangeError::Empty.into()));
        }
        // Never more than the range: what lies behind it belongs to others.
        if sum > self.range.len {
            return Err(self.differ(sum));
        }
        *found = sum;
        Ok((count, complete))
    }

    /// Maps the first `count` runs of the batch.
    fn fill(&mut self, count: usize, observer: &mut dyn Observer) -> Result<(), MapError> {
        if count > 0 {
            observed(observer, Step::FillTables, |_| {
                let runs = &self.batch[..count];
                let bytes: u64 = runs.iter().map(|run| run.len).sum();
                for domain in &mut *self.domains {
                    let prot = domain.prot(self.prot, self.mmio);
                    let at = self.range.start + self.mapped;
                    let Domain { table, spare, .. } = domain;
                    let mapped = match self.released {
                        true => table.map_sparing(at, runs, prot, spare.tables()),
                        false => table.map(at, runs, prot),
                    };
                    mapped.map_err(MapError::Table)?;
                    self.reached = self.mapped + bytes;
                }
                self.mapped += bytes;
                Ok::<_, MapError>(((), bytes))
            })?;
        }
        if observer.progress(Step::FillTables, self.mapped).is_break() {
            return Err(MapError::Interrupted);
        }
        Ok(())
    }

    const fn differ(&self, found: u64) -> MapError {
        MapError::RunsDiffer {
            pinned: self.range.len,
            found,
        }
    }
}
