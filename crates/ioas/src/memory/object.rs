//! The seam to memory: objects that can be pinned.
//!
//! **Pin first, then look.** A long-term pin may move pages, so frames that were read before it
//! are stale. A [`MemoryObject`] therefore tells no addresses: it gives a [`Pinned`] part, and only
//! that yields runs.

use alloc::boxed::Box;
use core::error::Error;
use core::fmt;
use core::ops::ControlFlow;

use runs::{Offset, Pa, Span};

use crate::memory::fixed::FixedRuns;

/// An error of the implementation behind a seam, in its own words.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Memory of which parts can be pinned: an anonymous range, a memfd, guest memory, a BAR.
pub trait MemoryObject: fmt::Debug + Send + Sync {
    /// Its length in bytes.
    fn len(&self) -> u64;

    /// True when it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes that the kernel charges for pinning `part` (offset and length in bytes): whole
    /// huge pages, for instance.
    fn charge(&self, part: Span<Offset>) -> u64;

    /// The bytes that a kernel charges for mapping `part`, which pins memory by itself: its pages, but
    /// for memory that is not charged at all.
    fn charge_of_mapping(&self, part: Span<Offset>) -> u64 {
        self.charge(part).min(part.len)
    }

    /// Pins `part`, all of it or nothing. `progress` receives how many bytes are pinned from time
    /// to time, and may stop the work.
    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed>;

    /// True for registers of a device instead of memory: they are mapped as such where a format has
    /// memory types, and never forced to be coherent.
    fn is_mmio(&self) -> bool {
        false
    }

    /// Its runs, if all of it stays where it is for as long as the object is there: then
    /// [pinning](Self::pin) it does nothing and costs nothing.
    fn fixed_runs(&self) -> Option<&FixedRuns> {
        None
    }

    /// Address of the object in this process, for kernels that map memory by it. For as long as the
    /// object is there, the answer is the same.
    fn in_process(&self) -> Option<ProcessMemory> {
        None
    }

    /// The memory file that it is, and the offset of its first byte there, for kernels that map
    /// files.
    #[cfg(feature = "iommufd")]
    fn file(&self) -> Option<(std::os::fd::BorrowedFd<'_>, u64)> {
        None
    }
}

/// Memory of this process that devices may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    address: u64,
}

impl ProcessMemory {
    /// Memory from `address` on, as long as the object that tells it.
    ///
    /// # Safety
    ///
    /// For as long as that object is there:
    ///
    /// - its memory stays mapped in this process as it is;
    /// - devices write to it at any time: this process accesses it in no other way than by atomic
    ///   cells, or through raw pointers by volatile accesses and copies that may be torn, and holds no
    ///   reference to any of it but to such cells.
    #[allow(unsafe_code)]
    pub const unsafe fn new(address: u64) -> Self {
        Self { address }
    }

    /// Start address.
    pub const fn address(&self) -> u64 {
        self.address
    }
}

/// A part of an object that stays where it is until it is unpinned or dropped. Several threads may read
/// its runs at once.
pub trait Pinned: fmt::Debug + Send + Sync {
    /// The physical runs of `part` (offset and length in the object, in bytes), which is pinned, in
    /// order of its offsets.
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause>;

    /// Gives back `part`, but not the last that is pinned; the rest stays pinned without a break.
    /// Returns the bytes that are charged for the rest. After an error it is not known how much of
    /// `part` is still pinned.
    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause>;

    /// Unpins it, or what is left of it; returns the bytes. After an error it is not known how much of it is still pinned.
    fn unpin(self: Box<Self>) -> Result<u64, Cause>;
}

/// Reads the runs of a pinned part, batch by batch.
pub trait RunReader {
    /// Fills `out` with the next runs (physical address and length in bytes, none empty) and
    /// returns how many; 0 at the end only. A run may go on in the next batch, and neighbours need
    /// not be joined: [`Hold::with_runs`](crate::Hold::with_runs) joins them. All runs together have the
    /// length of the part.
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause>;
}

/// Failure of a pin: nothing is pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinFailed {
    /// `progress` wanted to stop.
    #[error("interrupted while pinning")]
    Interrupted,
    /// The memory or the kernel refuses.
    #[error("cannot pin the memory")]
    Refused(#[source] Cause),
}
