//! Guards: who is inside a shared table, so that no table page is reused under their feet.
//!
//! # Protocol
//!
//! There is a clock, which only goes forward, and a number of slots. Whoever reads or changes the
//! table takes a free slot and writes the clock's time into it: a *guard*. It leaves by writing 0.
//!
//! A table that was unlinked and flushed may still be read by those who were inside when it was
//! unlinked. [`Readers::retire`] notes such tables with the time and advances the clock: whoever
//! takes a guard afterwards has a later time and cannot find them any more. They are free as soon as
//! no slot holds that time or an earlier one.
//!
//! Why that is enough. The guard's store into the slot and the first read of a table have a
//! sequentially consistent fence between them; so have the unlinking store and the look at the
//! slots. Of two such pairs at least one sees the other's store: either the look finds the guard, or
//! the reader finds the table unlinked. A guard that took its time before the clock went forward but
//! stored it late has an earlier time than necessary, which only makes tables wait longer.
//!
//! Two batches are enough, and nothing ever waits: one batch waits for its readers, and what is
//! retired meanwhile gathers in the next.

use crate::cell::Cell;
use crate::memory::{Chain, TableMemory};

/// A cell on a cache line of its own, so that guards on different processors do not meet.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Slot<C>(C);

/// Everybody who is inside a shared table.
#[derive(Debug)]
pub(crate) struct Readers<C, const SLOTS: usize> {
    clock: C,
    slots: [Slot<C>; SLOTS],
    /// 1 while somebody moves batches.
    lock: C,
    batches: [Batch<C>; 2],
}

/// Tables that wait for readers; under the lock.
#[derive(Debug, Default)]
struct Batch<C> {
    head: C,
    tail: C,
    count: C,
    time: C,
}

impl<C: Cell + Default, const SLOTS: usize> Readers<C, SLOTS> {
    pub(crate) fn new() -> Self {
        let clock = C::default();
        // 0 in a slot means "nobody".
        clock.set(1);
        Self {
            clock,
            slots: core::array::from_fn(|_| Slot::default()),
            lock: C::default(),
            batches: Default::default(),
        }
    }

    /// Takes a slot, beginning to look at one that depends on the calling thread.
    #[inline]
    pub(crate) fn enter<M: TableMemory + ?Sized>(&self, memory: &M) -> Guard<'_, C> {
        let mut round = 0;
        let mut index = memory.place() % SLOTS;
        loop {
            let slot = &self.slots[index].0;
            if slot.get() == 0 && slot.set_if_and_fence(0, self.clock.get()).is_ok() {
                return Guard {
                    slot,
                    index: index as u32,
                };
            }
            index = (index + 1) % SLOTS;
            round += 1;
            if round % SLOTS as u32 == 0 {
                memory.wait(round / SLOTS as u32);
            }
        }
    }

    /// Takes tables that are unlinked and flushed, and gives those back to `memory` that nobody can
    /// read any more.
    pub(crate) fn retire<M: TableMemory + ?Sized>(&self, memory: &M, chain: Chain) {
        let waits = self.batches.iter().any(|batch| batch.count.get() > 0);
        if chain.is_empty() && !waits {
            return;
        }
        self.locked(memory, |[waiting, next]| {
            next.append(memory, chain);
            // Once to free what waited, and once more because nobody may be inside at all.
            self.advance(memory, waiting, next);
            self.advance(memory, waiting, next);
        });
    }

    /// Gives back what became free meanwhile. True when nothing is left waiting.
    pub(crate) fn poll<M: TableMemory + ?Sized>(&self, memory: &M) -> bool {
        self.locked(memory, |[waiting, next]| {
            self.advance(memory, waiting, next);
            self.advance(memory, waiting, next);
            waiting.count.get() == 0 && next.count.get() == 0
        })
    }

    /// Waits until everybody has left who is inside now. What was stored before the call is seen by
    /// all who come later, by the argument at the head of this module.
    pub(crate) fn wait_for_all<M: TableMemory + ?Sized>(&self, memory: &M) {
        let now = self.locked(memory, |_| {
            let now = self.clock.get();
            self.clock.set_release(now + 1);
            now
        });
        C::fence();
        for slot in &self.slots {
            let mut round = 0;
            loop {
                let since = slot.0.get_acquire();
                if since == 0 || since > now {
                    break;
                }
                memory.wait(round);
                round += 1;
            }
        }
    }

    fn locked<M: TableMemory + ?Sized, T>(
        &self,
        memory: &M,
        f: impl FnOnce(&[Batch<C>; 2]) -> T,
    ) -> T {
        let mut round = 0;
        while self.lock.set_if(0, 1).is_err() {
            memory.wait(round);
            round += 1;
        }
        let result = f(&self.batches);
        self.lock.set_release(0);
        result
    }

    /// Frees the waiting batch if its readers are gone, and lets the next one begin to wait.
    fn advance<M: TableMemory + ?Sized>(&self, memory: &M, waiting: &Batch<C>, next: &Batch<C>) {
        C::fence();
        let time = waiting.time.get();
        let inside = |slot: &Slot<C>| {
            let since = slot.0.get_acquire();
            since != 0 && since <= time
        };
        if waiting.count.get() > 0 {
            if self.slots.iter().any(inside) {
                return;
            }
            memory.reclaim(waiting.take());
        }
        if next.count.get() > 0 {
            waiting.append(memory, next.take());
            let now = self.clock.get();
            waiting.time.set(now);
            // Whoever comes from now on finds none of these tables.
            self.clock.set_release(now + 1);
        }
    }
}

impl<C: Cell> Batch<C> {
    fn take(&self) -> Chain {
        let chain = Chain {
            head: self.head.get(),
            tail: self.tail.get(),
            count: self.count.get(),
        };
        self.count.set(0);
        chain
    }

    fn append<M: TableMemory + ?Sized>(&self, memory: &M, chain: Chain) {
        if chain.is_empty() {
            return;
        }
        if self.count.get() == 0 {
            self.tail.set(chain.tail);
        } else {
            memory.meta(chain.tail).next.set(self.head.get());
        }
        self.head.set(chain.head);
        self.count.set(self.count.get() + chain.count);
    }
}

/// Somebody inside. Leaves when dropped.
#[derive(Debug)]
pub(crate) struct Guard<'a, C: Cell> {
    slot: &'a C,
    index: u32,
}

impl<C: Cell> Guard<'_, C> {
    /// A number that nobody else inside has.
    #[inline]
    pub(crate) fn number(&self) -> u32 {
        self.index
    }
}

impl<C: Cell> Drop for Guard<'_, C> {
    #[inline]
    fn drop(&mut self) {
        self.slot.set_release(0);
    }
}
