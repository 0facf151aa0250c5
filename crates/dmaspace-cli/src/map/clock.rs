//! The time that each step of an operation takes, and its progress passed on.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use ioas::{Observer, Step};

use super::{Stage, Watch};

/// Nanoseconds since `started`.
pub(crate) fn nanoseconds(started: Instant) -> u64 {
    in_nanoseconds(started.elapsed())
}

pub(crate) fn in_nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Times the steps of an operation and passes its progress on.
pub(crate) struct Clock<'a> {
    watch: &'a mut dyn Watch,
    total: u64,
    begun: Option<(Step, Instant)>,
    /// How long each step took, and how many bytes it handled.
    taken: Vec<(Step, Duration, u64)>,
}

impl<'a> Clock<'a> {
    /// Of an operation on `total` bytes.
    pub(crate) fn new(watch: &'a mut dyn Watch, total: u64) -> Self {
        Self {
            watch,
            total,
            begun: None,
            taken: Vec::new(),
        }
    }

    /// What `step` took, also if it had nothing to do.
    pub(crate) fn spent(&self, step: Step) -> u64 {
        let found = self.taken.iter().find(|(known, ..)| *known == step);
        found.map_or(0, |(_, time, _)| in_nanoseconds(*time))
    }

    /// What `step` took; `None` when it has handled nothing: others have done it.
    pub(crate) fn taken(&self, step: Step) -> Option<u64> {
        let handled = |(known, _, bytes): &(Step, Duration, u64)| *known == step && *bytes > 0;
        self.taken.iter().any(handled).then(|| self.spent(step))
    }
}

impl Observer for Clock<'_> {
    fn begin(&mut self, step: Step) {
        self.begun = Some((step, Instant::now()));
    }

    fn end(&mut self, step: Step, bytes: u64) {
        let begun = self.begun.take().filter(|(begun, _)| *begun == step);
        if let Some((_, at)) = begun {
            let taken = at.elapsed();
            match self.taken.iter_mut().find(|(known, ..)| *known == step) {
                Some((_, time, handled)) => {
                    *time += taken;
                    *handled = handled.saturating_add(bytes);
                }
                None => self.taken.push((step, taken, bytes)),
            }
        }
    }

    fn progress(&mut self, step: Step, done: u64) -> ControlFlow<()> {
        let stage = match step {
            Step::Charge | Step::Pin => Stage::Pin,
            Step::FindRuns => Stage::FindRuns,
            Step::FillTables => Stage::Map,
            Step::EmptyTables | Step::Flush => Stage::Unmap,
            Step::Unpin => Stage::Unpin,
        };
        self.watch.progress(stage, done, self.total)
    }
}
