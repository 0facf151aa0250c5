//! Receivers of the runs that an unmap removes.

use runs::Run;

/// Receives the physical runs that an unmap removes.
///
/// Any `FnMut(Run)` is one; [`NoRuns`] wants none, which saves reading the leaves
/// of tables that are removed whole.
pub trait RunSink {
    /// Reports that it wants to receive. The answer never changes.
    #[inline(always)]
    fn wants(&self) -> Wants {
        Wants::Runs
    }

    /// Takes the next run. Runs come in order of their device addresses, as long as possible.
    fn run(&mut self, run: Run);

    /// Takes the next run, of a sink that wants [`DirtyRuns`](Wants::DirtyRuns), and whether the
    /// device has written to it. A run ends where this changes.
    fn dirty_run(&mut self, run: Run, dirty: bool) {
        let _ = dirty;
        self.run(run);
    }
}

/// Reports that a [`RunSink`] wants to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wants {
    /// Nothing.
    Nothing,
    /// The runs.
    Runs,
    /// The runs, and which of them were written to: see [`WithDirty`].
    DirtyRuns,
}

impl<T: FnMut(Run)> RunSink for T {
    #[inline]
    fn run(&mut self, run: Run) {
        self(run);
    }
}

/// The sink for unmaps whose runs are not wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoRuns;

impl RunSink for NoRuns {
    #[inline(always)]
    fn wants(&self) -> Wants {
        Wants::Nothing
    }

    fn run(&mut self, _run: Run) {}
}

/// A sink that learns of each run whether the device has written to it since it was mapped or
/// harvested: what an unmap needs while [dirty tracking](crate::Table::track_dirty) is on.
///
/// The device may go on writing to a run that is dirty until the flush is done: copy it afterwards.
#[derive(Clone, Copy, Debug)]
pub struct WithDirty<T>(pub T);

impl<T: FnMut(Run, bool)> RunSink for WithDirty<T> {
    #[inline(always)]
    fn wants(&self) -> Wants {
        Wants::DirtyRuns
    }

    #[inline]
    fn run(&mut self, run: Run) {
        // Not known: it counts as written to.
        (self.0)(run, true);
    }

    #[inline]
    fn dirty_run(&mut self, run: Run, dirty: bool) {
        (self.0)(run, dirty);
    }
}
