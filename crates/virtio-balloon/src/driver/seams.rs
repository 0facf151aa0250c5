//! Requirements of the driver on its environment: the device's registers and a clock, memory that the
//! device sees, and the guest's pages.

use core::fmt;
use core::time::Duration;

use runs::{GuestAddr, Span};

use crate::features::Features;
use crate::source::GuestPage;
use crate::stats::Stats;

/// An element of a buffer: memory that is contiguous for the device (VIRTIO 1.3, 2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    /// Its address.
    pub address: u64,
    /// Its bytes.
    pub len: u32,
    /// The device may write it; otherwise it only reads.
    pub write: bool,
}

/// Queues whose rings the platform keeps, as Linux's virtio core does. In each of them there is one buffer at a
/// time.
pub trait Queues {
    /// Why the device cannot be reached.
    type Error;

    /// Makes a buffer available in a queue, and notifies the device unless it wants no notification. The elements
    /// that the device reads come first.
    fn offer(&mut self, queue: u16, buffer: &[Element]) -> Result<(), Self::Error>;

    /// True when the device has used the buffer, once.
    fn answered(&mut self, queue: u16) -> Result<bool, Self::Error>;

    /// Bytes that the device has written to the buffer that it used last, from its first element to be written on. By
    /// default none are known: then no page is [initialized](GuestPages::initialized).
    fn written(&mut self, _queue: u16) -> u32 {
        0
    }
}

/// Where a queue lies, as the device finds it (VIRTIO 1.3, 2.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueAddresses {
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring, which the driver writes.
    pub available: u64,
    /// The used ring, which the device writes.
    pub used: u64,
}

/// The way to the device: status, features, configuration and queues (VIRTIO 1.3, 2 and 3), whatever bus
/// it is on; and the clock by which it is waited for.
pub trait Transport {
    /// Why the device cannot be reached.
    type Error: fmt::Debug + fmt::Display;

    /// Resets the device, waits until it is, and tells that there is a driver (3.1.1, steps 1 to 3).
    /// When this has returned, the device uses no memory of the guest any more.
    fn reset(&mut self) -> Result<(), Self::Error>;

    /// The features that the device offers, all 64 of them.
    fn offered(&mut self) -> Result<Features, Self::Error>;

    /// Accepts features. False when the device does not go along with them (3.1.1, steps 4 to 6).
    fn accept(&mut self, features: Features) -> Result<bool, Self::Error>;

    /// All is set up: the device may begin (3.1.1, step 8).
    fn begin(&mut self) -> Result<(), Self::Error>;

    /// True when the device says that it must be reset (2.1.2), or when it is gone.
    fn broken(&mut self) -> Result<bool, Self::Error>;

    /// Reads the configuration space from `offset` on.
    fn read_config(&mut self, offset: u16, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// A number that is another one when the device has told of a change of its configuration: its
    /// generation (2.5.1), or a count of interrupts.
    fn generation(&mut self) -> Result<u32, Self::Error>;

    /// Writes a field of the configuration space.
    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), Self::Error>;

    /// The most entries of a queue; 0 where there is none of this number.
    fn queue_size(&mut self, queue: u16) -> Result<u16, Self::Error>;

    /// The queues, where the platform keeps their rings; then it has enabled those that the accepted features
    /// need, and neither [`enable_queue`](Self::enable_queue) nor [`notify`](Self::notify) is called.
    fn queues(&mut self) -> Option<&mut dyn Queues<Error = Self::Error>> {
        None
    }

    /// Hands a queue of `size` entries over to the device.
    fn enable_queue(
        &mut self,
        queue: u16,
        size: u16,
        addresses: QueueAddresses,
    ) -> Result<(), Self::Error>;

    /// Tells the device that something waits in a queue.
    fn notify(&mut self, queue: u16) -> Result<(), Self::Error>;

    /// Sleeps until the device may have answered in a queue, and no longer than `most`.
    fn wait(&mut self, queue: u16, most: Duration) -> Result<(), Self::Error>;

    /// The time since some beginning. It must go on: waiting ends by it.
    fn now(&mut self) -> Duration;

    /// Does nothing for this long.
    fn pause(&mut self, time: Duration);
}

/// Memory for the driver's own use, both seen and not seen by the device.
///
/// Addresses are those that the device uses. It may lie behind plain pointers, or behind a protocol.
pub trait BufferMemory {
    /// Why memory cannot be reached.
    type Error;
    /// Words that only the driver sees.
    type Words: AsRef<[u64]> + AsMut<[u64]> + fmt::Debug;
    /// Bytes that only the driver sees.
    type Bytes: AsRef<[u8]> + AsMut<[u8]> + fmt::Debug;

    /// So many words, all 0; given back by dropping them.
    fn words(&mut self, count: usize) -> Option<Self::Words>;

    /// So many bytes, all 0; given back by dropping them.
    fn bytes(&mut self, count: usize) -> Option<Self::Bytes>;

    /// `len` bytes that the device sees, contiguous for it, on a boundary of 4 KiB, all 0.
    fn allocate(&mut self, len: u64) -> Option<u64>;

    /// Gives back what [`allocate`](Self::allocate) gave.
    fn free(&mut self, memory: Span<GuestAddr>);

    /// Reads bytes, in any order.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// Writes bytes, in any order.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Self::Error>;

    /// Reads a le16. No later access of the driver is done before it: a load that acquires.
    fn load(&self, address: u64) -> Result<u16, Self::Error>;

    /// Writes a le16. No earlier access of the driver is done after it: a store that releases.
    fn store(&self, address: u64, value: u16) -> Result<(), Self::Error>;

    /// Nothing after it is done before what is before it: a full barrier.
    fn fence(&self);
}

/// The guest's memory: the source of pages that go into the balloon.
pub trait GuestPages {
    /// The size of the guest's pages.
    fn page(&self) -> GuestPage;

    /// All addresses from which pages may come. Two bits are kept for each page of it at most.
    fn span(&self) -> Span<GuestAddr>;

    /// A block of `bytes`, a power of two, on a boundary of its size, which is not in use; `None`
    /// when there is none. It is not to try hard: no killing, no swapping out.
    fn take(&mut self, bytes: u64) -> Option<u64>;

    /// Gives back pages that were taken, in parts other than those in which they were.
    fn give_back(&mut self, run: Span<GuestAddr>);

    /// Chooses pages that leave the balloon, `bytes` of them at most, where not all may at any time: a kernel may
    /// be about to migrate one. Each run, in blocks that [`take`](Self::take) could have given, goes to `leaves`,
    /// which says whether the driver wants it; those that it does come back by [`give_back`](Self::give_back),
    /// or, if they cannot leave, by [`stay`](Self::stay). False: the driver chooses, the lowest first.
    fn choose(&mut self, _bytes: u64, _leaves: &mut dyn FnMut(Span<GuestAddr>) -> bool) -> bool {
        false
    }

    /// These pages were [chosen](Self::choose), and stay in the balloon.
    fn stay(&mut self, _run: Span<GuestAddr>) {}

    /// These pages have come into the balloon (`held`), or leave it, for the guest's counters. `managed`: the guest
    /// manages so much less or more memory than before, which it does not where the balloon gives way when memory
    /// is short ([`DEFLATE_ON_OOM`](Features::DEFLATE_ON_OOM)).
    fn counted(&mut self, _run: Span<GuestAddr>, _held: bool, _managed: bool) {}

    /// The device says that these whole pages, which are in the balloon, are initialized: they read as zeros, or as the
    /// poison value if `VIRTIO_BALLOON_F_PAGE_POISON` is negotiated, until the guest writes to them. It may say so again.
    /// All other pages may hold anything. Called only with
    /// [`init_on_inflate`](super::DriverSettings::init_on_inflate); a guest that does not trust its host ignores it.
    fn initialized(&mut self, _run: Span<GuestAddr>) {}

    /// Statistics of the guest's memory.
    fn stats(&mut self) -> Stats {
        Stats::default()
    }
}
