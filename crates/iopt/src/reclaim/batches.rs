//! Tables that wait for readers, in two batches.

use super::{Reclaim, Unguarded};
use crate::cell::Cell;
use crate::memory::{Chain, TableMemory};

/// So many tables wait for a barrier that is costly, unless they are asked for.
const GATHERED: u64 = 64;

/// Everyone who is inside a shared table, and the tables that wait for them.
#[derive(Debug)]
pub(crate) struct Readers<R, C> {
    reclaim: R,
    /// 1 while a thread changes what follows. Never held across a barrier or a look at readers.
    lock: C,
    /// 1 while the waiting batch is in the hands of one thread, which does the barrier for it, looks
    /// for its readers and gives it back.
    in_work: C,
    waiting: Batch<C>,
    next: Batch<C>,
}

/// Tables that wait.
#[derive(Debug, Default)]
struct Batch<C> {
    head: C,
    tail: C,
    count: C,
    time: C,
    /// 1 when the barrier is done.
    fenced: C,
}

impl<R: Reclaim, C: Cell + Default> Readers<R, C> {
    pub(crate) fn new(reclaim: R) -> Self {
        Self {
            reclaim,
            lock: C::default(),
            in_work: C::default(),
            waiting: Batch::default(),
            next: Batch::default(),
        }
    }

    /// Goes inside.
    #[inline(always)]
    pub(crate) fn enter<M: TableMemory + ?Sized>(&self, memory: &M) -> Guard<'_, R> {
        Guard(self.reclaim.enter(memory))
    }

    /// Takes tables that are unlinked and flushed, and gives those back to `memory` that no reader can
    /// reach any more. Where the barrier is costly, few of them wait for more.
    pub(crate) fn retire<M: TableMemory + ?Sized>(&self, memory: &M, chain: Chain) {
        if !chain.is_empty() || !self.waiting.is_empty() {
            self.work(memory, chain, GATHERED);
        }
    }

    /// Gives back what became free meanwhile. True when nothing is left waiting.
    pub(crate) fn poll<M: TableMemory + ?Sized>(&self, memory: &M) -> bool {
        self.work(memory, Chain::empty(), 1)
    }

    /// Gives everything back. There is no reader: the caller owns the table.
    pub(crate) fn give_all_back<M: TableMemory + ?Sized>(&mut self, memory: &M) {
        for batch in [&self.waiting, &self.next] {
            if !batch.is_empty() {
                memory.reclaim(batch.take());
            }
        }
    }

    /// Waits until every reader has left that is inside now. Stores before the call are seen by
    /// all later readers, by the argument at the head of this module.
    pub(crate) fn wait_for_all<M: TableMemory + ?Sized>(&self, memory: &M) {
        let time = self.reclaim.advance();
        let mut round = 0;
        let mut wait = || {
            memory.wait(round);
            round += 1;
        };
        while !self.reclaim.barrier() {
            wait();
        }
        while !self.reclaim.have_left(time) {
            wait();
        }
    }

    /// Takes tables, and goes on with those that wait; with a costly barrier only once they are `gathered`. True
    /// when none is left.
    fn work<M: TableMemory + ?Sized>(&self, memory: &M, chain: Chain, gathered: u64) -> bool {
        let (mut step, mut idle) = self.locked(memory, || {
            self.next.append(memory, chain);
            (self.begin(memory, gathered), self.is_idle())
        });
        let mut rounds = 0;
        while let Some((time, fenced)) = step {
            // The lock is free meanwhile: others add to the next batch and go.
            let fenced = fenced || self.reclaim.barrier();
            let left = fenced && self.reclaim.have_left(time);
            if left {
                memory.reclaim(self.waiting.take());
            }
            rounds += 1;
            (step, idle) = self.locked(memory, || {
                self.waiting.fenced.set(fenced.into());
                self.in_work.set(0);
                // The batch that waited, and the one that has gathered behind it.
                let again = left && rounds < 2;
                let step = if again {
                    self.begin(memory, gathered)
                } else {
                    None
                };
                (step, self.is_idle())
            });
        }
        idle
    }

    /// Takes the waiting batch into work: its time, and whether its barrier is done. Under the lock.
    fn begin<M: TableMemory + ?Sized>(&self, memory: &M, gathered: u64) -> Option<(u64, bool)> {
        let (waiting, next) = (&self.waiting, &self.next);
        if self.in_work.get() != 0 || waiting.is_empty() && next.is_empty() {
            return None;
        }
        if waiting.is_empty() {
            if next.count.get() < gathered && self.reclaim.is_costly() {
                return None;
            }
            waiting.append(memory, next.take());
            // A guard that is taken from now on reaches none of these tables.
            waiting.time.set(self.reclaim.advance());
            waiting.fenced.set(0);
        }
        self.in_work.set(1);
        Some((waiting.time.get(), waiting.fenced.get() != 0))
    }

    /// True when no table waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_work.get() == 0 && self.waiting.is_empty() && self.next.is_empty()
    }

    fn locked<M: TableMemory + ?Sized, T>(&self, memory: &M, f: impl FnOnce() -> T) -> T {
        let mut round = 0;
        while self.lock.set_if(0, 1).is_err() {
            memory.wait(round);
            round += 1;
        }
        let result = f();
        self.lock.set_release(0);
        result
    }
}

impl<C: Cell> Batch<C> {
    fn is_empty(&self) -> bool {
        self.count.get() == 0
    }

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
        if self.is_empty() {
            self.tail.set(chain.tail);
        } else {
            memory.meta(chain.tail).next.set(self.head.get());
        }
        self.head.set(chain.head);
        self.count.set(self.count.get() + chain.count);
    }
}

/// A reader inside. Leaves when dropped.
pub(crate) struct Guard<'a, R: Reclaim + 'a>(#[allow(dead_code, reason = "held")] R::Guard<'a>);

impl Guard<'_, Unguarded> {
    /// Guard of a reader that is not known.
    #[inline(always)]
    pub(crate) const fn of_none() -> Self {
        Self(())
    }
}

#[cfg(all(test, feature = "alloc"))]
mod tests {
    use core::cell::Cell as Plain;
    use core::sync::atomic::AtomicU64;

    use super::*;
    use crate::arena::HeapTables;

    /// Readers that are inside or not, and barriers that are counted.
    #[derive(Default)]
    struct Watched {
        time: Plain<u64>,
        /// The time at the last barrier.
        fenced: Plain<u64>,
        barriers: Plain<u32>,
        outside: Plain<bool>,
    }

    impl Reclaim for Watched {
        type Guard<'a> = ();

        fn enter<M: TableMemory + ?Sized>(&self, _memory: &M) {}

        fn advance(&self) -> u64 {
            self.time.replace(self.time.get() + 1)
        }

        fn barrier(&self) -> bool {
            self.fenced.set(self.time.get());
            self.barriers.set(self.barriers.get() + 1);
            true
        }

        fn have_left(&self, time: u64) -> bool {
            assert!(self.fenced.get() > time, "no barrier since {time}");
            self.outside.get()
        }
    }

    #[test]
    fn each_batch_has_a_barrier_of_its_own_and_no_other() {
        let memory = HeapTables::with_tables(16).unwrap();
        let readers = Readers::<_, AtomicU64>::new(Watched::default());
        for batch in 1..4 {
            let mut chain = Chain::empty();
            chain.push(&memory, memory.allocate(4096).unwrap());
            readers.reclaim.outside.set(false);
            readers.retire(&memory, chain);
            assert!(!readers.poll(&memory) && !readers.poll(&memory));
            assert_eq!(memory.in_use(), 1);
            readers.reclaim.outside.set(true);
            assert!(readers.poll(&memory));
            assert_eq!(
                (memory.in_use(), readers.reclaim.barriers.get()),
                (0, batch)
            );
        }
    }
}
