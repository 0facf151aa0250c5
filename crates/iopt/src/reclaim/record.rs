//! Record of one reader: one word, so that an interrupt finds it before or after a change.

use crate::cell::Cell;

/// Bits of a record's word below the time.
const TIME_SHIFT: u32 = 16;
/// How many guards are held.
const COUNT: u64 = 0x7fff;
/// The record's thread has ended; dropping the last guard releases the record.
const DETACHED: u64 = 0x8000;
const BELOW_TIME: u64 = COUNT | DETACHED;

/// The time by which readers enter and tables wait.
#[derive(Debug, Default)]
pub struct Clock<C>(C);

impl<C: Cell> Clock<C> {
    /// A clock around a cell that holds 0.
    pub const fn new(zero: C) -> Self {
        Self(zero)
    }

    /// See [`Reclaim::advance`](super::Reclaim::advance). A record keeps 48 bits of the time: with a
    /// batch each microsecond they last nine years.
    pub fn advance(&self) -> u64 {
        let mut now = self.0.get();
        while let Err(found) = self.0.set_if(now, now + 1) {
            now = found;
        }
        now + FIRST
    }

    /// The time. Stores from before the clock was advanced to it are visible.
    #[inline(always)]
    pub(super) fn now(&self) -> u64 {
        self.0.get_acquire() + FIRST
    }
}

/// 0 in a record or slot means that the reader is outside.
const FIRST: u64 = 1;

/// One reader at a time: a thread, or a processor in a kernel. It alone stores to its record; interrupts
/// of it do as well, as long as each drops the guards that it took.
///
/// The word holds the time at which the outermost guard was taken, and how many guards there are. Each
/// change is one load and one store. An interrupt between them leaves the word as it was, since its own
/// changes cancel out; one behind the store finds the reader inside, and only counts. Guards may be
/// dropped in any order: the time goes with the last. More than 32,767 at once are never taken to have
/// left.
#[derive(Debug, Default)]
pub struct Record<C>(C);

impl<C: Cell> Record<C> {
    /// A record around a cell that holds 0: the reader is outside.
    pub const fn new(zero: C) -> Self {
        Self(zero)
    }

    /// Goes inside. A [`fence_light`](super::fence_light), or what the implementation has for it, comes
    /// behind: between this store and the first read of a table.
    #[inline(always)]
    pub fn enter(&self, clock: &Clock<C>) {
        let word = self.0.get();
        let new = if word == 0 {
            clock.now() << TIME_SHIFT | 1
        } else if word & COUNT == COUNT {
            word
        } else {
            word + 1
        };
        self.0.set(new);
    }

    /// Leaves. True when the record is detached and this was its last guard: then it can be given to
    /// another reader.
    #[inline(always)]
    pub fn leave(&self) -> bool {
        let word = self.0.get();
        if word & BELOW_TIME == 1 {
            self.0.set_release(0);
            return false;
        }
        self.leave_another(word)
    }

    #[cold]
    fn leave_another(&self, word: u64) -> bool {
        if word & BELOW_TIME == DETACHED | 1 {
            self.0.set_release(0);
            return true;
        }
        if word & COUNT != COUNT {
            self.0.set(word - 1);
        }
        false
    }

    /// The reader ends. True when it is outside, and the record can be given to another reader;
    /// otherwise [`leave`](Self::leave) says when.
    pub fn detach(&self) -> bool {
        let word = self.0.get();
        if word != 0 {
            self.0.set(word | DETACHED);
        }
        word == 0
    }

    /// See [`Reclaim::have_left`](super::Reclaim::have_left), of this reader.
    #[inline]
    pub fn has_left(&self, time: u64) -> bool {
        let word = self.0.get_acquire();
        word == 0 || word >> TIME_SHIFT > time
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicU64;

    use super::*;

    fn pair() -> (Record<AtomicU64>, Clock<AtomicU64>) {
        (Record::default(), Clock::default())
    }

    #[test]
    fn the_outermost_guard_s_time_counts_until_the_last_guard_is_gone() {
        let (record, clock) = pair();
        record.enter(&clock);
        let first = clock.advance();
        record.enter(&clock);
        assert!(!record.has_left(first));
        // In any order.
        assert!(!record.leave());
        assert!(!record.has_left(first));
        assert!(!record.leave());
        assert!(record.has_left(first));
        record.enter(&clock);
        assert!(record.has_left(first) && !record.has_left(clock.advance()));
    }

    #[test]
    fn a_record_whose_reader_ends_inside_is_released_with_the_last_guard() {
        let (record, clock) = pair();
        assert!(record.detach());
        record.enter(&clock);
        record.enter(&clock);
        assert!(!record.detach());
        assert!(!record.leave());
        assert!(!record.has_left(clock.advance()));
        assert!(record.leave());
        assert!(record.has_left(clock.advance()));
    }

    #[test]
    fn more_guards_than_are_counted_have_never_left() {
        let (record, clock) = pair();
        let many = COUNT + 2;
        (0..many).for_each(|_| record.enter(&clock));
        assert!((0..many).all(|_| !record.leave()));
        assert!(!record.has_left(clock.advance()));
        record.enter(&clock);
        assert!(!record.has_left(1));
    }
}
