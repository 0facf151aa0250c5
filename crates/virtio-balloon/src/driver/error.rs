//! Errors between driver and device.

use core::time::Duration;

use runs::{GuestAddr, Span};

use crate::features::Features;
use crate::queues::Queue;
use crate::source::EncodeError;

/// Why the driver did not do what it was asked. `E` is the error of the seams.
///
/// On every error the pages that are in the balloon stay there, until
/// [`BalloonDriver::freeze`](super::BalloonDriver::freeze) or [`BalloonDriver::remove`](super::BalloonDriver::remove)
/// has reset the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError<E> {
    /// The device, or memory, cannot be reached.
    #[error("{0}")]
    Seam(E),
    /// The device does not go along with the features that were accepted.
    #[error("the device offers features {:#x} and refuses {:#x} of them", .offered.0, .accepted.0)]
    Features {
        /// The features that it offers.
        offered: Features,
        /// The features that were accepted.
        accepted: Features,
    },
    /// The device has no such queue, or none of any use.
    #[error("{queue:?} is queue {number}, which has {size} entries")]
    NoQueue {
        /// The queue.
        queue: Queue,
        /// Its number.
        number: u16,
        /// Its entries.
        size: u16,
    },
    /// There is no memory for what the driver cannot do without.
    #[error("no memory: {bytes} bytes")]
    NoMemory {
        /// Bytes.
        bytes: u64,
    },
    /// The device answered what it was not asked. Nothing is sent to it any more.
    #[error("{answers} answers in {queue:?}, to descriptor {id}, where one to 0 was due")]
    Answer {
        /// The queue.
        queue: Queue,
        /// How many answers there are, where there should be one.
        answers: u16,
        /// To which descriptor, where it should be the first.
        id: u32,
    },
    /// The device has not answered in time. The message stays with it.
    #[error("no answer in {queue:?} within {waited:?}, looked for {looked} times")]
    Silent {
        /// The queue.
        queue: Queue,
        /// How long was waited, as far as it was measured.
        waited: Duration,
        /// How often was looked.
        looked: u64,
    },
    /// The device says that it must be reset, or is gone.
    #[error("the device must be reset, or is gone")]
    Broken,
    /// A message is still with the device, or the driver is at work: try again.
    #[error("the balloon is busy: try again")]
    Busy,
    /// The driver is frozen.
    #[error("the driver is frozen")]
    Frozen,
    /// It was not negotiated.
    #[error("feature {:#x} was not negotiated", .feature.0)]
    NotNegotiated {
        /// The feature.
        feature: Features,
    },
    /// These pages are not in the balloon, or not all of them.
    #[error("{run} is not in the balloon")]
    NotHeld {
        /// The pages.
        run: Span<GuestAddr>,
    },
    /// The block is no block of the guest's memory, or is in the balloon already: an error of
    /// [`GuestPages`](super::GuestPages).
    #[error("{block} is no block of memory that could go into the balloon")]
    BadBlock {
        /// The block.
        block: Span<GuestAddr>,
    },
    /// Pages cannot be named.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}
