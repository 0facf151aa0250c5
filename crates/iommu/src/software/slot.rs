//! A port's place in the flush protocol, and its counters.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Counters of a port, a device or a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AccessCounters {
    /// Look-ups that found a translation in the IOTLB.
    pub iotlb_hits: u64,
    /// Look-ups that did not.
    pub iotlb_misses: u64,
    /// Table walks: the misses, and hits whose translation does not allow the access.
    pub walks: u64,
    /// Table entries that the walks have read.
    pub table_reads: u64,
    /// Walks that began at a cached table below the root.
    pub upper_hits: u64,
    /// Bytes that devices have read.
    pub bytes_read: u64,
    /// Bytes that devices have written.
    pub bytes_written: u64,
    /// Accesses that faulted.
    pub faults: u64,
}

impl AddAssign for AccessCounters {
    fn add_assign(&mut self, other: Self) {
        self.iotlb_hits += other.iotlb_hits;
        self.iotlb_misses += other.iotlb_misses;
        self.walks += other.walks;
        self.table_reads += other.table_reads;
        self.upper_hits += other.upper_hits;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.faults += other.faults;
    }
}

/// A counter that one thread writes and any thread reads.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    /// Adds without a locked instruction: there is one writer.
    #[inline]
    pub(super) fn add(&self, n: u64) {
        self.0.store(
            self.0.load(Ordering::Relaxed).wrapping_add(n),
            Ordering::Relaxed,
        );
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct PortCounters {
    pub(super) iotlb_hits: Count,
    pub(super) iotlb_misses: Count,
    pub(super) walks: Count,
    pub(super) table_reads: Count,
    pub(super) upper_hits: Count,
    pub(super) bytes_read: Count,
    pub(super) bytes_written: Count,
    pub(super) faults: Count,
}

impl PortCounters {
    pub(super) fn counters(&self) -> AccessCounters {
        AccessCounters {
            iotlb_hits: self.iotlb_hits.get(),
            iotlb_misses: self.iotlb_misses.get(),
            walks: self.walks.get(),
            table_reads: self.table_reads.get(),
            upper_hits: self.upper_hits.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
            faults: self.faults.get(),
        }
    }
}

/// Written by one port only; a line (or the pair that is fetched together) of its own.
#[repr(align(128))]
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Odd while the port is inside an access.
    turn: AtomicU64,
    pub(super) counters: PortCounters,
}

impl Slot {
    /// Begins an access. Each entry that it reads afterwards is either new, or the operation that
    /// replaced it waits for this access (see the [protocol](super)).
    #[inline]
    pub(super) fn enter(&self) -> Inside<'_> {
        let turn = self.turn.load(Ordering::Relaxed).wrapping_add(1);
        self.turn.store(turn, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Inside { slot: self, turn }
    }

    /// The turn of the access that is under way. To be called after a fence.
    pub(super) fn busy(&self) -> Option<u64> {
        let turn = self.turn.load(Ordering::Acquire);
        (turn & 1 == 1).then_some(turn)
    }

    /// True when the access of that turn is over.
    pub(super) fn has_left(&self, turn: u64) -> bool {
        self.turn.load(Ordering::Acquire) != turn
    }
}

/// An access under way; it ends when this is dropped, also by a panic.
pub(super) struct Inside<'s> {
    slot: &'s Slot,
    turn: u64,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.slot
            .turn
            .store(self.turn.wrapping_add(1), Ordering::Release);
    }
}
