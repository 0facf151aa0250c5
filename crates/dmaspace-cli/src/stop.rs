//! Signals: SIGINT, SIGTERM and SIGHUP ask the program to stop.
//!
//! While work is under way that has something to give back (pinned memory, a raised pool, a
//! temporary file), a signal only leaves a note, which the work polls; a second one adds nothing.
//! At any other time there is nothing to unwind, and a signal ends the program at once, also when
//! it waits for a reader of its output.
//!
//! One atomic holds which of the two it is, so that no signal falls between them: the handler
//! moves `IDLE` to `LEAVING` or `BUSY` to `ASKED`, the work moves `IDLE` to `BUSY` and back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::output::{exit, say};

const IDLE: u8 = 0;
const BUSY: u8 = 1;
const ASKED: u8 = 2;
const LEAVING: u8 = 3;

/// Set when a signal has asked the program to stop.
#[derive(Clone, Debug)]
pub(crate) struct Stop(Arc<AtomicU8>);

impl Stop {
    /// Catches the signals from now on.
    pub(crate) fn on_signals() -> Result<Self, ctrlc::Error> {
        let stop = Self::unheard();
        let seen = stop.clone();
        ctrlc::set_handler(move || {
            if seen.moves(IDLE, LEAVING) {
                say("interrupted");
                std::process::exit(exit::INTERRUPTED.into());
            }
            seen.moves(BUSY, ASKED);
        })?;
        Ok(stop)
    }

    /// One that no signal reaches.
    fn unheard() -> Self {
        Self(Arc::new(AtomicU8::new(IDLE)))
    }

    /// Runs work that must not be cut short; returns true beside its result if a signal asked to stop meanwhile.
    pub(crate) fn shielded<T>(&self, work: impl FnOnce() -> T) -> (T, bool) {
        if !self.moves(IDLE, BUSY) {
            // The handler is ending the program on its own thread.
            loop {
                std::thread::park();
            }
        }
        let result = work();
        (result, self.0.swap(IDLE, Ordering::AcqRel) == ASKED)
    }

    /// True when the work under way shall end.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed) == ASKED
    }

    fn moves(&self, from: u8, to: u8) -> bool {
        self.0
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}

#[cfg(test)]
impl Stop {
    /// A `Stop` that behaves as if a signal had come during work, or none.
    pub(crate) fn for_tests(asked: bool) -> Self {
        let stop = Self::unheard();
        stop.0
            .store(if asked { ASKED } else { IDLE }, Ordering::Relaxed);
        stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_during_work_is_seen_by_the_work_and_after_it() {
        let stop = Stop::for_tests(false);
        let ((), asked) = stop.shielded(|| {
            assert!(!stop.is_asked());
            assert!(!stop.moves(IDLE, LEAVING), "work is under way");
            assert!(stop.moves(BUSY, ASKED));
            assert!(!stop.moves(BUSY, ASKED), "a second signal adds nothing");
            assert!(stop.is_asked());
        });
        assert!(asked);
        assert!(!stop.is_asked());
        assert!(!stop.shielded(|| ()).1);
        assert!(stop.moves(IDLE, LEAVING), "without work it ends at once");
    }
}
