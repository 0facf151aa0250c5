//! Reclaim: who is inside a shared table, so that no table page is reused under a reader.
//!
//! # Protocol
//!
//! There is a clock, which only goes forward. A reader writes the clock's time to a place of its own
//! before it reads the first table: it is *inside*, and holds a *guard*. It writes 0 when it leaves.
//!
//! A table that was unlinked and flushed may still be read by readers that were inside when it was
//! unlinked. The reclaimer
//!
//! 1. advances the clock ([`Reclaim::advance`]): a reader that acquires the new time finds the table
//!    unlinked;
//! 2. executes a barrier ([`Reclaim::barrier`]);
//! 3. looks at the readers' places, now or later and as often as it likes
//!    ([`Reclaim::have_left`]): the table is free when none holds the old time or an earlier one.
//!
//! Why that is enough. Between the reader's store to its place and its first read of a table there
//! is a barrier as well, and the two face each other as in the store-buffer pattern: either the
//! look finds the reader, or the reader finds the table unlinked. A reader that took the time before
//! the clock was advanced, but stored it late, has an earlier time than necessary, which only makes
//! tables wait longer. A reader acquires the clock, and the advance releases it: without that a weakly
//! ordered processor could read an entry first and the clock behind it, and store a time that is later
//! than what it has read.
//!
//! One barrier serves a batch of tables, however often the reclaimer looks. There are two batches: one
//! waits for its readers, and what is retired meanwhile gathers in the next; where the barrier is
//! [costly](Reclaim::is_costly), until it is worth one. Nothing waits for readers: a call that finds
//! them inside leaves the batch to a later call, and one that finds another thread at the batch leaves
//! it to that thread.
//!
//! # Whose barrier
//!
//! There are far more readers than batches. Where the platform can have one thread execute a barrier on
//! all others ([`fence_heavy`]), the reader's is a fence for the compiler ([`fence_light`]) and costs
//! nothing.
//!
//! | readers are known | by | their barrier | for |
//! |---|---|---|---|
//! | by thread | [`Threads`]: a record for each thread of the process | light | programs: the default with the feature `std` |
//! | by slots | [`Slots`]: a fixed number for each table, taken by compare-and-exchange | a locked instruction, or a fence | the default without `std`: tests, model checkers, small systems, tables that another process walks |
//!
//! A kernel brings its own [`Reclaim`]: Linux's polled grace periods of RCU have the same three steps
//! (`get_state_synchronize_rcu` advances, `poll_state_synchronize_rcu` looks), or a [`Record`] for
//! each processor.

mod asymmetric;
mod batches;
#[cfg(all(feature = "std", target_os = "linux", not(miri), not(dmaspace_fences)))]
#[allow(unsafe_code)]
mod membarrier;
mod record;
mod slots;
#[cfg(feature = "std")]
#[allow(unsafe_code)]
mod threads;

pub use asymmetric::{fence_heavy, fence_light, use_fences};
pub(crate) use batches::{Guard, Readers};
pub use record::{Clock, Record};
pub use slots::{SlotGuard, Slots};
#[cfg(feature = "std")]
pub use threads::{ThreadGuard, Threads};

use crate::memory::TableMemory;

/// How the readers of a [`SharedTable`](crate::SharedTable) are known, unless it says otherwise.
#[cfg(feature = "std")]
pub type DefaultReclaim = Threads;
/// How the readers of a [`SharedTable`](crate::SharedTable) are known, unless it says otherwise.
#[cfg(not(feature = "std"))]
pub type DefaultReclaim = Slots;

/// How readers are known.
///
/// An implementation that breaks these promises causes a wrong translation at worst: table memory is a
/// safe seam, whatever is read in it.
pub trait Reclaim {
    /// A reader inside; dropped, it leaves. Its reads are complete before others see that it left.
    type Guard<'a>
    where
        Self: 'a;

    /// Goes inside. Guards nest, also those of different tables and in an interrupt between any two
    /// instructions, as long as the interrupt drops its own.
    ///
    /// `memory` is that of the table: where there is something to wait for, by
    /// [`wait`](TableMemory::wait).
    fn enter<M: TableMemory + ?Sized>(&self, memory: &M) -> Self::Guard<'_>;

    /// Advances the clock, with release semantics, and returns the time before.
    fn advance(&self) -> u64;

    /// The reclaimer's barrier, after it has advanced the clock. False when the platform refuses it
    /// now: the reclaimer tries again later.
    fn barrier(&self) -> bool;

    /// True when the barrier disturbs other processors now, so that it is better to have one for many tables:
    /// then up to 63 unlinked tables of a shared one wait for more, or for [`poll`](crate::SharedTable::poll).
    fn is_costly(&self) -> bool {
        false
    }

    /// True when everyone has left who was inside at `time`. Asked after a barrier, once or more often.
    fn have_left(&self, time: u64) -> bool;
}

/// No reader is known: what is read is kept by other means. See [`Table::unguarded`](crate::Table::unguarded).
#[derive(Clone, Copy, Debug)]
pub struct Unguarded;

impl Reclaim for Unguarded {
    type Guard<'a> = ();

    fn enter<M: TableMemory + ?Sized>(&self, _memory: &M) {}

    fn advance(&self) -> u64 {
        0
    }

    fn barrier(&self) -> bool {
        true
    }

    fn have_left(&self, _time: u64) -> bool {
        true
    }
}
