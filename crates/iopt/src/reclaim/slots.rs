//! Readers by slots: a fixed number for each table, without an operating system.

use core::sync::atomic::AtomicU64;

use super::Reclaim;
use super::record::Clock;
use crate::cell::Cell;
use crate::memory::TableMemory;

/// At most `N` readers at a time; further ones wait. A reader takes a free slot by compare-and-exchange
/// and writes the time into it, with a fence behind: see the [protocol](super).
#[derive(Debug)]
pub struct Slots<C = AtomicU64, const N: usize = 32> {
    clock: Clock<C>,
    slots: [Slot<C>; N],
}

/// A cell on a cache line of its own, so that guards on different processors do not meet.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Slot<C>(C);

impl<C: Cell + Default, const N: usize> Default for Slots<C, N> {
    fn default() -> Self {
        const { assert!(N > 0, "no reader could enter") };
        Self {
            clock: Clock::default(),
            slots: core::array::from_fn(|_| Slot::default()),
        }
    }
}

impl<C: Cell, const N: usize> Reclaim for Slots<C, N> {
    type Guard<'a>
        = SlotGuard<'a, C>
    where
        Self: 'a;

    /// Begins to look at a slot that depends on the calling thread.
    #[inline]
    fn enter<M: TableMemory + ?Sized>(&self, memory: &M) -> SlotGuard<'_, C> {
        let mut round = 0;
        let mut index = memory.place() % N;
        loop {
            if let Some(Slot(slot)) = self.slots.get(index) {
                if slot.get() == 0 && slot.set_if_and_fence(0, self.clock.now()).is_ok() {
                    return SlotGuard { slot };
                }
            }
            index = (index + 1) % N;
            round += 1;
            if round % N as u32 == 0 {
                memory.wait(round / N as u32);
            }
        }
    }

    fn advance(&self) -> u64 {
        self.clock.advance()
    }

    fn barrier(&self) -> bool {
        C::fence();
        true
    }

    fn have_left(&self, time: u64) -> bool {
        self.slots.iter().all(|Slot(slot)| {
            let since = slot.get_acquire();
            since == 0 || since > time
        })
    }
}

/// A slot that is taken.
#[derive(Debug)]
pub struct SlotGuard<'a, C: Cell> {
    slot: &'a C,
}

impl<C: Cell> Drop for SlotGuard<'_, C> {
    #[inline]
    fn drop(&mut self) {
        self.slot.set_release(0);
    }
}
