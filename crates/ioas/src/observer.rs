//! Who watches an operation: to time it, to show how far it is, to stop it.

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
    /// Having units forget, and waiting for them.
    Flush,
    /// Unpinning memory.
    Unpin,
}

/// Watches an operation. Steps take turns (runs are found and mapped batch by batch) and never
/// overlap. `()` watches nothing.
pub trait Observer {
    /// `step` begins.
    fn begin(&mut self, step: Step) {
        let _ = step;
    }

    /// `step` has come to an end, or to a pause, having handled `bytes`.
    fn end(&mut self, step: Step, bytes: u64) {
        let _ = (step, bytes);
    }

    /// `done` bytes of `step` are handled. [`ControlFlow::Break`] stops the operation, which then
    /// undoes what it has done; only mapping asks.
    fn progress(&mut self, step: Step, done: u64) -> ControlFlow<()> {
        let _ = (step, done);
        ControlFlow::Continue(())
    }
}

impl Observer for () {}
