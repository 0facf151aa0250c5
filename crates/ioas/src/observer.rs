//! Observers of an operation, which time it, show its progress, or stop it.

use core::ops::ControlFlow;

/// The steps of mapping and unmapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Charging the ledger.
    Charge,
    /// Pinning memory.
    Pin,
    /// Finding the physical runs of pinned memory.
    FindRuns,
    /// Filling page tables.
    FillTables,
    /// Emptying page tables.
    EmptyTables,
    /// Having units invalidate, and waiting for them.
    Flush,
    /// Unpinning memory.
    Unpin,
}

/// Watches an operation. Steps take turns (runs are found and mapped batch by batch) and never
/// overlap. Every [`begin`](Self::begin) is followed by the [`end`](Self::end) of the same step
/// before another one begins, also when the step fails. What a failing operation does to undo
/// itself is not watched. `()` watches nothing.
pub trait Observer {
    /// `step` begins.
    fn begin(&mut self, step: Step) {
        let _ = step;
    }

    /// `step` has come to an end, or to a pause, having handled `bytes`; 0 when it has failed.
    fn end(&mut self, step: Step, bytes: u64) {
        let _ = (step, bytes);
    }

    /// `done` bytes of `step` are handled, all in all. [`ControlFlow::Break`] stops the operation,
    /// which then undoes what it has done. Only mapping asks: during [`Step::Pin`], between `begin`
    /// and `end` and once behind them; and after each batch with [`Step::FillTables`].
    fn progress(&mut self, step: Step, done: u64) -> ControlFlow<()> {
        let _ = (step, done);
        ControlFlow::Continue(())
    }
}

impl Observer for () {}

/// Does `work`, which is one step, between its `begin` and its `end`. `work` tells how many bytes
/// it has handled.
pub(crate) fn observed<T, E>(
    observer: &mut dyn Observer,
    step: Step,
    work: impl FnOnce(&mut dyn Observer) -> Result<(T, u64), E>,
) -> Result<T, E> {
    observer.begin(step);
    let result = work(observer);
    observer.end(step, result.as_ref().map_or(0, |(_, bytes)| *bytes));
    result.map(|(value, _)| value)
}
