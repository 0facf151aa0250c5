//! Steps that fail on demand: one call of a kind, counted from now.

use std::sync::atomic::{AtomicU64, Ordering};

/// A step that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
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
    pub const ALL: [Self; 4] = [Self::Tables, Self::Pin, Self::Runs, Self::Flush];
}

/// Which call of each kind fails: none at first.
#[derive(Debug, Default)]
pub struct Faults {
    left: [AtomicU64; 4],
    fired: AtomicU64,
}

impl Faults {
    /// The call of this kind that comes after `before` others fails, and no other.
    pub fn arm(&self, fault: Fault, before: u64) {
        self.disarm();
        self.left[fault as usize].store(before + 1, Ordering::Relaxed);
    }

    /// Nothing fails any more. True when something has since it was armed.
    pub fn disarm(&self) -> bool {
        self.left
            .iter()
            .for_each(|left| left.store(0, Ordering::Relaxed));
        self.fired.swap(0, Ordering::Relaxed) > 0
    }

    /// Nothing fails any more. True when something has; [`disarm`](Self::disarm) will say so again.
    pub(crate) fn calm(&self) -> bool {
        let fired = self.disarm();
        self.fired.store(u64::from(fired), Ordering::Relaxed);
        fired
    }

    /// Counts a call; true when it is to fail.
    pub(crate) fn hit(&self, fault: Fault) -> bool {
        let less = |left: u64| left.checked_sub(1);
        let left =
            self.left[fault as usize].fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        let hit = left == Ok(1);
        if hit {
            self.fired.fetch_add(1, Ordering::Relaxed);
        }
        hit
    }
}
