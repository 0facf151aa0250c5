//! A part of a memory that stays pinned.

use alloc::sync::Arc;
use core::mem;

use runs::{Offset, Span};

use super::{Memory, Readers};
use crate::memory::object::{Cause, RunReader};
use crate::memory::read::Runs;

/// Cuts `part` in two at `offset`, which lies inside; what is behind it is returned.
pub(crate) fn cut(part: &mut Span<Offset>, offset: u64) -> Span<Offset> {
    let len = offset - part.start;
    let tail = Span::new(offset, part.len - len);
    part.len = len;
    tail
}

/// Takes `tail`, which begins where `part` ends, into it and leaves nothing of it.
pub(crate) fn append(part: &mut Span<Offset>, tail: &mut Span<Offset>) {
    debug_assert_eq!(part.start + part.len, tail.start);
    part.len += mem::take(tail).len;
}

/// A part of a [`Memory`] that stays pinned for as long as this is there.
#[derive(Debug)]
#[must_use = "the memory is released as soon as this is dropped"]
pub struct Hold {
    pub(super) memory: Arc<Memory>,
    pub(super) part: Span<Offset>,
}

impl Hold {
    /// The memory.
    pub const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The part: offset and length in bytes.
    pub const fn part(&self) -> Span<Offset> {
        self.part
    }

    /// Has `work` read the physical runs of `part`, which lies in what is held. They are joined: a run ends
    /// only where the memory is not contiguous, wherever its readers end their batches, or pins.
    pub fn with_runs<T>(
        &self,
        part: Span<Offset>,
        work: impl FnOnce(&mut dyn RunReader) -> T,
    ) -> T {
        let part = part.intersection(&self.part).unwrap_or_default();
        let readers = Readers {
            memory: &self.memory,
            pins: self.memory.readers(part),
        };
        work(&mut Runs::of(&readers.pins, part.len))
    }

    /// Cuts it in two at `offset` in the object, which lies inside.
    pub(crate) fn split_at(&mut self, offset: u64) -> Self {
        Self {
            memory: Arc::clone(&self.memory),
            part: cut(&mut self.part, offset),
        }
    }

    /// Takes in `other`, which holds what follows in the same memory.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.memory, &other.memory));
        append(&mut self.part, &mut other.part);
    }

    /// Releases it, and says how many bytes that has unpinned.
    pub(crate) fn release(mut self) -> (u64, Option<Cause>) {
        self.memory.release(mem::take(&mut self.part))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Empty: moved into another one, or released already.
        if !self.part.is_empty() {
            self.memory.release(self.part);
        }
    }
}
