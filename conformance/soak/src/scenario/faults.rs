//! Steps that fail on demand: one call of a kind, counted from now.
//!
//! A fault is armed for a thread: only its own calls fail. So what fails in another thread meanwhile has no excuse.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// A step that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Table pages are refused.
    Tables,
    /// A pin is refused.
    Pin,
    /// The runs of a pin cannot be read.
    Runs,
    /// A unit does not answer a flush.
    Flush,
}

impl Fault {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Tables, Self::Pin, Self::Runs, Self::Flush];
}

thread_local! {
    /// Call of this thread that fails, by kind: none at first.
    static LEFT: Cell<[u64; 4]> = const { Cell::new([0; 4]) };
    /// One has.
    static FIRED: Cell<bool> = const { Cell::new(false) };
}

/// Failures on demand, in all threads.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    fired: AtomicU64,
}

impl Faults {
    /// This thread's call of this kind that comes after `before` others fails, and no other.
    pub(crate) fn arm(&self, fault: Fault, before: u64) {
        self.disarm();
        let mut left = [0; 4];
        left[fault as usize] = before + 1;
        LEFT.set(left);
    }

    /// Nothing of this thread fails any more. True when something has since it was armed.
    pub(crate) fn disarm(&self) -> bool {
        self.calm();
        FIRED.take()
    }

    /// Nothing of this thread fails any more; [`disarm`](Self::disarm) will say whether something has.
    pub(crate) fn calm(&self) {
        LEFT.take();
    }

    /// How often something has failed, in all threads.
    pub(crate) fn fired(&self) -> u64 {
        self.fired.load(Ordering::SeqCst)
    }

    /// Counts a call; true when it is to fail.
    pub(crate) fn hit(&self, fault: Fault) -> bool {
        let mut left = LEFT.get();
        let count = &mut left[fault as usize];
        let hit = *count == 1;
        *count = count.saturating_sub(1);
        LEFT.set(left);
        if hit {
            FIRED.set(true);
            self.fired.fetch_add(1, Ordering::SeqCst);
        }
        hit
    }
}
