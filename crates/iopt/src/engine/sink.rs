//! Who is told of what an unmap removes.

use runs::Run;

/// Who is told of the physical runs that an unmap removes.
///
/// Any `FnMut(Run)` is one; [`Discard`] says that nobody wants to know, which saves reading the
/// leaves of tables that are removed whole.
pub trait RunSink {
    /// False when the runs are not wanted.
    const WANTED: bool;

    /// True when the sink wants to know which runs were written to: see [`WithDirty`]. Such a
    /// sink wants the runs, too.
    const DIRTY: bool = false;

    /// Takes the next run. Runs come in order of their device addresses, as long as possible.
    fn run(&mut self, run: Run);

    /// Takes the next run, of a sink with [`DIRTY`](Self::DIRTY), and whether the device has
    /// written to it. A run ends where this changes.
    fn dirty_run(&mut self, run: Run, dirty: bool) {
        let _ = dirty;
        self.run(run);
    }
}

impl<T: FnMut(Run)> RunSink for T {
    const WANTED: bool = true;

    #[inline]
    fn run(&mut self, run: Run) {
        self(run);
    }
}

/// The sink for unmaps whose runs nobody wants.
#[derive(Clone, Copy, Debug, Default)]
pub struct Discard;

impl RunSink for Discard {
    const WANTED: bool = false;

    fn run(&mut self, _run: Run) {}
}

/// A sink that is told of each run whether the device has written to it since it was mapped or
/// harvested: what an unmap needs while [dirty tracking](crate::Table::track_dirty) is on.
///
/// The device may go on writing to a run that is dirty until the flush is done: copy it afterwards.
#[derive(Clone, Copy, Debug)]
pub struct WithDirty<T>(pub T);

impl<T: FnMut(Run, bool)> RunSink for WithDirty<T> {
    const WANTED: bool = true;
    const DIRTY: bool = true;

    #[inline]
    fn run(&mut self, run: Run) {
        // Nobody has looked: it counts as written to.
        (self.0)(run, true);
    }

    #[inline]
    fn dirty_run(&mut self, run: Run, dirty: bool) {
        (self.0)(run, dirty);
    }
}
