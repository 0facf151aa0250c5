//! Memory that has left the address space but may still be in use: held until everybody has
//! forgotten it.
//!
//! Whoever unmaps puts the hold here and notes the range for the listeners. [`Retired::flush`] has
//! the back end and the listeners forget; only after that [`Retired::release`] lets go. Over failed
//! flushes everything stays.

use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use iommu::FlushError;
use runs::{Iova, Span};

use crate::backend::Backend;
use crate::listener::Listeners;
use crate::memory::Hold;
use crate::object::Cause;

/// When units are told what was unmapped.
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
        /// How long the first of them may wait. It is looked at with every unmap, and by
        /// [`Ioas::poll`](crate::Ioas::poll).
        age: Duration,
        /// A clock that only goes forward.
        now: fn() -> Duration,
    },
}

/// What was unmapped and waits for a flush, and who is to be told.
#[derive(Default)]
pub(crate) struct Retired {
    /// Memory that was unmapped and that somebody may still reach.
    pub(crate) holds: Vec<Hold>,
    /// Others with translations of their own.
    pub(crate) listeners: Listeners,
    pub(crate) flushing: Flushing,
    /// When the first of what waits now has come, by the clock of lazy flushing.
    since: Option<Duration>,
    /// Flushes that have succeeded.
    pub(crate) flushes: u64,
}

impl fmt::Debug for Retired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retired")
            .field("holds", &self.holds.len())
            .finish_non_exhaustive()
    }
}

impl Retired {
    /// Keeps the memory that was mapped at `range` until everybody has forgotten it.
    pub(crate) fn add(&mut self, range: Span<Iova>, hold: Option<Hold>) {
        self.listeners.note(range);
        self.holds.extend(hold);
    }

    /// What must happen before something is mapped in `range`: who still has old translations there
    /// would not see what is new.
    pub(crate) fn make_way(
        &mut self,
        backend: &mut dyn Backend,
        range: Span<Iova>,
    ) -> Result<(), FlushError> {
        match self.flushing {
            Flushing::Lazy { .. } if self.listeners.is_quiet() && !backend.waits_in(range) => {
                Ok(())
            }
            _ => self.settle(backend),
        }
    }

    /// Flushes what earlier calls have left to be flushed, and lets go of it.
    pub(crate) fn settle(&mut self, backend: &mut dyn Backend) -> Result<(), FlushError> {
        self.flush(backend)?;
        // Whoever asks wants room for something else; what cannot be unpinned stays charged.
        let _ = self.release();
        Ok(())
    }

    /// Whether what waits is to be flushed now: always, or when lazy flushing has come to its bound.
    pub(crate) fn is_due(&mut self) -> bool {
        match self.flushing {
            Flushing::Strict => true,
            Flushing::Lazy { holds, age, now } => {
                if self.holds.is_empty() && self.listeners.is_quiet() {
                    return false;
                }
                let now = now();
                let since = *self.since.get_or_insert(now);
                self.holds.len() > holds || now.saturating_sub(since) >= age
            }
        }
    }

    /// Has the back end and every listener forget what was unmapped. After an error all of that of
    /// whoever failed is still to come.
    pub(crate) fn flush(&mut self, backend: &mut dyn Backend) -> Result<(), FlushError> {
        let flushed = backend.flush();
        self.listeners.flush().and(flushed)?;
        self.flushes += 1;
        Ok(())
    }

    /// Lets go of the memory, which was flushed. Returns the bytes that were unpinned, and the
    /// first failure.
    pub(crate) fn release(&mut self) -> (u64, Option<Cause>) {
        debug_assert!(self.listeners.is_quiet(), "released before it was flushed");
        self.since = None;
        let mut unpinned = 0;
        let mut failed = None;
        for hold in self.holds.drain(..) {
            let (bytes, cause) = hold.release();
            unpinned += bytes;
            failed = failed.or(cause);
        }
        (unpinned, failed)
    }
}
