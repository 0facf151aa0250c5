//! Memory that has left the address space but may still be in use: held until all units and listeners
//! have invalidated it.
//!
//! An operation that unmaps notes the ranges for the listeners, and keeps the holds ([`UnmappedHolds`])
//! while it flushes: [`Retired::flush`] has the back end and the listeners invalidate what *any* operation has
//! unmapped until then, so that threads which unmap at once share flushes. An operation releases its holds
//! only after a flush has succeeded.
//!
//! Holds that an operation cannot flush, or leaves for later ([`Flushing::Lazy`]), wait here. Such waiting has a
//! number, one higher each time: a flush that succeeds is good for all numbers that were given before it
//! began, and releases their holds. So no thread undoes or loses what is another's: a flush that fails
//! changes nothing, and the next one flushes all of it.

use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use iommu::FlushError;
use runs::{Iova, Span};

use crate::lock::Mutex;
use crate::memory::Hold;
use crate::memory::object::Cause;
use crate::space::backend::Backend;
use crate::space::listener::Listeners;

/// Time at which units invalidate what was unmapped.
#[derive(Clone, Copy, Debug, Default)]
pub enum Flushing {
    /// At the end of every unmap: its memory is unpinned when it returns.
    #[default]
    Strict,
    /// In batches. Until then devices may still reach what was unmapped, and it stays pinned and
    /// charged. What is mapped where something waits flushes first.
    Lazy {
        /// Holds that may wait; one more and everything is flushed.
        holds: usize,
        /// Time that the first of them may wait. It is looked at with every unmap, and by
        /// [`Ioas::poll`](crate::Ioas::poll).
        age: Duration,
        /// A clock that only goes forward.
        now: fn() -> Duration,
    },
}

/// Unmapped holds that wait for a flush, and the listeners that must invalidate them.
#[derive(Default)]
pub(crate) struct Retired {
    /// Others with translations of their own.
    pub(crate) listeners: Listeners,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    /// Memory that was unmapped and that a device may still reach, each with its number.
    holds: Vec<(u64, Hold)>,
    flushing: Flushing,
    /// When the first of what waits now has come, by the clock of lazy flushing.
    since: Option<Duration>,
    /// The last number that was given.
    given: u64,
    /// The last number of which everything is flushed.
    flushed: u64,
}

/// The holds of what an operation has unmapped. Dropped, they wait for a flush.
pub(crate) struct UnmappedHolds<'a> {
    retired: &'a Retired,
    holds: Vec<Hold>,
}

impl fmt::Debug for Retired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retired")
            .field("holds", &self.len())
            .finish_non_exhaustive()
    }
}

impl Drop for UnmappedHolds<'_> {
    fn drop(&mut self) {
        if !self.holds.is_empty() {
            self.wait();
        }
    }
}

impl UnmappedHolds<'_> {
    /// Keeps the memory that was mapped at `range` until every unit and listener has invalidated it.
    pub(crate) fn add(&mut self, range: Span<Iova>, hold: Option<Hold>) {
        self.retired.listeners.note(range);
        self.holds.extend(hold);
    }

    /// Leaves its holds to the next flush.
    pub(crate) fn wait(&mut self) {
        let waiting = &mut *self.retired.waiting.lock();
        waiting.given += 1;
        let number = waiting.given;
        let holds = self.holds.drain(..).map(|hold| (number, hold));
        waiting.holds.extend(holds);
    }

    /// Releases the memory, which was flushed, and of what has waited for the same flush. Returns the bytes
    /// that were unpinned, and the first failure of those that have waited. `each` receives why a hold of this
    /// operation was not unpinned, or `None`, in their order.
    pub(crate) fn release(&mut self, mut each: impl FnMut(Option<Cause>)) -> (u64, Option<Cause>) {
        let (mut unpinned, failed) = self.retired.release();
        for hold in self.holds.drain(..) {
            let (bytes, cause) = hold.release();
            unpinned += bytes;
            each(cause);
        }
        (unpinned, failed)
    }
}

impl Retired {
    /// For what an operation unmaps.
    pub(crate) const fn gone(&self) -> UnmappedHolds<'_> {
        UnmappedHolds {
            retired: self,
            holds: Vec::new(),
        }
    }

    /// Number of holds that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.lock().holds.len()
    }

    pub(crate) fn set_flushing(&self, flushing: Flushing) {
        self.waiting.lock().flushing = flushing;
    }

    /// Returns true if every unmap flushes.
    pub(crate) fn is_strict(&self) -> bool {
        matches!(self.waiting.lock().flushing, Flushing::Strict)
    }

    /// Flushes before something is mapped in `range`, where needed: a unit or listener with old translations would not
    /// see the new ones.
    pub(crate) fn make_way(
        &self,
        backend: &dyn Backend,
        range: Span<Iova>,
    ) -> Result<(), FlushError> {
        let (strict, waits) = {
            let waiting = self.waiting.lock();
            let strict = matches!(waiting.flushing, Flushing::Strict);
            (strict, waiting.given > waiting.flushed)
        };
        let must = match strict {
            // Ranges unmapped now are flushed by their thread, which keeps others from them.
            true => waits || backend.waits(),
            false => !self.listeners.is_quiet() || backend.waits_in(range),
        };
        if must { self.settle(backend) } else { Ok(()) }
    }

    /// Flushes what earlier calls have left to be flushed, and releases it.
    pub(crate) fn settle(&self, backend: &dyn Backend) -> Result<(), FlushError> {
        self.flush(backend)?;
        // The caller needs room for something else; what cannot be unpinned stays charged.
        let _ = self.release();
        Ok(())
    }

    /// Returns true if waiting holds are to be flushed now: always, or when lazy flushing has come to its bound.
    pub(crate) fn is_due(&self) -> bool {
        let waiting = &mut *self.waiting.lock();
        match waiting.flushing {
            Flushing::Strict => true,
            Flushing::Lazy { holds, age, now } => {
                if waiting.holds.is_empty() && self.listeners.is_quiet() {
                    return false;
                }
                let now = now();
                let since = *waiting.since.get_or_insert(now);
                waiting.holds.len() > holds || now.saturating_sub(since) >= age
            }
        }
    }

    /// Has the back end and every listener invalidate what was unmapped. After an error all of it is still
    /// to come for the unit or listener that failed.
    pub(crate) fn flush(&self, backend: &dyn Backend) -> Result<(), FlushError> {
        let until = self.waiting.lock().given;
        let flushed = backend.flush();
        self.listeners.flush().and(flushed)?;
        let waiting = &mut *self.waiting.lock();
        waiting.flushed = waiting.flushed.max(until);
        Ok(())
    }

    /// Releases the memory that has waited and is flushed. Returns the bytes that were unpinned, and the
    /// first failure.
    pub(crate) fn release(&self) -> (u64, Option<Cause>) {
        let released = {
            let waiting = &mut *self.waiting.lock();
            waiting.since = None;
            // In the order of their numbers.
            let flushed = waiting.flushed;
            let count = waiting
                .holds
                .partition_point(|(number, _)| *number <= flushed);
            if count == 0 {
                return (0, None);
            }
            Vec::from_iter(waiting.holds.drain(..count))
        };
        let mut unpinned = 0;
        let mut failed = None;
        for (_, hold) in released {
            let (bytes, cause) = hold.release();
            unpinned += bytes;
            failed = failed.or(cause);
        }
        (unpinned, failed)
    }

    /// No device will ever be known not to reach what waits: it stays held for good.
    pub(crate) fn lose(&mut self) {
        core::mem::forget(core::mem::take(&mut self.waiting.get_mut().holds));
    }
}
