//! From pinned memory to table entries, batch by batch.
//!
//! The batch is the only memory that this takes, whatever the number of runs. Runs are joined
//! while they stream by, also over the border of two batches, so that the leaves do not depend on
//! where a reader happens to end a batch.

use iopt::{AnyTable, Prot, RangeError, TableMemory};
use runs::{Joiner, Span};

use crate::error::MapError;
use crate::object::{Pinned, RunReader};
use crate::observer::{Observer, Step, observed};

/// What is to be mapped where, and how far it is.
pub(crate) struct Fill<'a, M: TableMemory> {
    pub(crate) table: &'a mut AnyTable<M>,
    pub(crate) batch: &'a mut [Span],
    pub(crate) range: Span,
    pub(crate) prot: Prot,
    /// Bytes from the start of the range on that are in the table, after an error too.
    pub(crate) mapped: u64,
}

impl<M: TableMemory> Fill<'_, M> {
    /// Finds the runs of `pin` and fills the table.
    pub(crate) fn run(
        &mut self,
        pin: &dyn Pinned,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let mut reader = observed(observer, Step::FindRuns, |_| {
            let reader = pin.runs().map_err(MapError::Runs)?;
            Ok::<_, MapError>((reader, 0))
        })?;
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
        let mut complete = 0;
        let mut sum = *found;
        for i in 0..count {
            let run = self.batch[i];
            if run.is_empty() {
                return Err(MapError::Table(RangeError::Empty.into()));
            }
            sum = sum.saturating_add(run.len);
            // At most one run comes out for each that goes in: the place was read already.
            if let Some(run) = joiner.push(run) {
                self.batch[complete] = run;
                complete += 1;
            }
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
                let bytes = runs.iter().map(|run| run.len).sum();
                self.table
                    .map(self.range.start + self.mapped, runs, self.prot)
                    .map_err(MapError::Table)?;
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
