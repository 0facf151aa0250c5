//! What can go wrong between driver and device.

use core::fmt;
use core::time::Duration;

use runs::Span;

use crate::features::Features;
use crate::queues::Queue;
use crate::source::EncodeError;

/// Why the driver did not do what it was asked. `E` is the error of the seams.
///
/// Whatever it is, the pages that are in the balloon stay there, until
/// [`Driver::freeze`](super::Driver::freeze) or [`Driver::remove`](super::Driver::remove) has reset the
/// device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error<E> {
    /// The device, or memory, cannot be reached.
    Seam(E),
    /// The device does not go along with the features that were accepted.
    Features {
        /// What it offers.
        offered: Features,
        /// What was accepted.
        accepted: Features,
    },
    /// The device has no such queue, or none of any use.
    NoQueue {
        /// The queue.
        queue: Queue,
        /// Its number.
        number: u16,
        /// Its entries.
        size: u16,
    },
    /// There is no memory for what the driver cannot do without.
    NoMemory {
        /// Bytes.
        bytes: u64,
    },
    /// The device answered what it was not asked. Nothing is sent to it any more.
    Answer {
        /// The queue.
        queue: Queue,
        /// How many answers there are, where there should be one.
        answers: u16,
        /// To which descriptor, where it should be the first.
        id: u32,
    },
    /// The device has not answered in time. The message stays with it.
    Silent {
        /// The queue.
        queue: Queue,
        /// How long was waited, as far as it was measured.
        waited: Duration,
        /// How often was looked.
        looked: u64,
    },
    /// The device says that it must be reset, or is gone.
    Broken,
    /// A message is still with the device, or the driver is at work: try again.
    Busy,
    /// The driver is frozen.
    Frozen,
    /// It was not negotiated.
    NotNegotiated {
        /// What.
        feature: Features,
    },
    /// There are no requests of the host: the device has none, or they were not wanted, or there was no
    /// memory for them.
    NoRequests,
    /// These pages are not in the balloon, or not all of them.
    NotHeld {
        /// The pages.
        run: Span,
    },
    /// The block is no block of the guest's memory, or is in the balloon already: an error of
    /// [`GuestPages`](super::GuestPages).
    BadBlock {
        /// The block.
        block: Span,
    },
    /// Pages cannot be named.
    Encode(EncodeError),
}

impl<E: fmt::Display> fmt::Display for Error<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seam(error) => write!(f, "{error}"),
            Self::Features { offered, accepted } => write!(
                f,
                "the device offers features {:#x} and refuses {:#x} of them",
                offered.0, accepted.0
            ),
            Self::NoQueue {
                queue,
                number,
                size,
            } => write!(f, "{queue:?} is queue {number}, which has {size} entries"),
            Self::NoMemory { bytes } => write!(f, "no memory: {bytes} bytes"),
            Self::Answer { queue, answers, id } => write!(
                f,
                "{answers} answers in {queue:?}, to descriptor {id}, where one to 0 was due"
            ),
            Self::Silent {
                queue,
                waited,
                looked,
            } => write!(
                f,
                "no answer in {queue:?} within {waited:?}, looked for {looked} times"
            ),
            Self::Broken => f.write_str("the device must be reset, or is gone"),
            Self::Busy => f.write_str("the balloon is busy: try again"),
            Self::Frozen => f.write_str("the driver is frozen"),
            Self::NotNegotiated { feature } => {
                write!(f, "feature {:#x} was not negotiated", feature.0)
            }
            Self::NoRequests => f.write_str("there are no requests of the host"),
            Self::NotHeld { run } => write!(f, "{run} is not in the balloon"),
            Self::BadBlock { block } => write!(
                f,
                "{block} is no block of memory that could go into the balloon"
            ),
            Self::Encode(error) => write!(f, "{error}"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for Error<E> {}

impl<E> From<EncodeError> for Error<E> {
    fn from(error: EncodeError) -> Self {
        Self::Encode(error)
    }
}
