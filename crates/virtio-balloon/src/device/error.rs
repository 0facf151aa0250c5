//! What the device refuses its monitor, by name.

use core::fmt;

use crate::features::Features;
use crate::format::BulkFormat;
use crate::partial::BadRegion;
use crate::queues::Queue;
use crate::ram::BadRam;

/// Why a device cannot be made, or cannot have this memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SetupError {
    /// The regions are not a guest's memory.
    Ram(BadRam),
    /// What backs a region has no such pages.
    Region(BadRegion),
    /// A feature that is not among those of balloons (VIRTIO 1.3, 5.5.3).
    Feature {
        /// The bits.
        unknown: Features,
    },
    /// The longest message in bulk is none of 8 to 32,776 bytes.
    Message {
        /// Its bytes.
        bytes: u32,
    },
    /// Answers to requests of the host need a header, which the format's messages do not have.
    Requests {
        /// The format.
        format: BulkFormat,
    },
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ram(cause) => cause.fmt(f),
            Self::Region(cause) => cause.fmt(f),
            Self::Feature { unknown } => {
                write!(f, "no features of a balloon: {:#x}", unknown.0)
            }
            Self::Message { bytes } => write!(f, "messages in bulk of {bytes} bytes"),
            Self::Requests { format } => {
                write!(f, "requests of the host cannot be answered by {format:?}")
            }
        }
    }
}

impl core::error::Error for SetupError {}

/// Why the driver's features are refused: the monitor leaves `FEATURES_OK` unset (VIRTIO 1.3, 3.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NegotiateError {
    /// The driver took features that were not offered.
    NotOffered {
        /// These.
        features: Features,
    },
    /// Devices that cannot take page faults reach the guest's memory, and the driver will not tell
    /// before it uses pages again (`VIRTIO_BALLOON_F_MUST_TELL_HOST`; 5.5.3.2).
    MustTellHost,
}

impl fmt::Display for NegotiateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOffered { features } => {
                write!(f, "features {:#x} were not offered", features.0)
            }
            Self::MustTellHost => f.write_str(
                "devices reach the guest's memory, and the driver does not accept MUST_TELL_HOST",
            ),
        }
    }
}

impl core::error::Error for NegotiateError {}

/// Why devices that cannot take page faults must not be attached now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError {
    /// The driver reports free pages, and uses them again without a word.
    Reporting,
    /// The driver hints at free pages, and uses them again without a word.
    Hinting,
    /// The driver did not accept `VIRTIO_BALLOON_F_MUST_TELL_HOST`.
    NotTold,
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reporting => "free page reporting is negotiated",
            Self::Hinting => "free page hinting is negotiated",
            Self::NotTold => "MUST_TELL_HOST is not negotiated",
        })
    }
}

impl core::error::Error for AttachError {}

/// Why a queue was not drained, or not to its end. What was taken before stays taken.
#[derive(Debug)]
#[non_exhaustive]
pub enum QueueError {
    /// No features are negotiated.
    NotNegotiated,
    /// The features that are negotiated do not bring this queue.
    NoQueue(Queue),
    /// The ring is not ready, or does not lie in the guest's memory.
    NotReady(Queue),
    /// More is available than the ring holds: the driver is broken.
    Index {
        /// The queue.
        queue: Queue,
        /// Chains available.
        available: u16,
        /// Descriptors of the ring.
        size: u16,
    },
    /// The ring could not be read or written. Chains may have gone back before, so that the driver is to be
    /// notified; others that were taken may have not, and stay away until it resets the device.
    Ring(Queue, virtio_queue::Error),
    /// The device goes on only after a reset.
    NeedsReset,
    /// There is no buffer to ask for statistics, or unused pages, with: the driver has given none, or has not
    /// answered yet.
    NoBuffer,
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotNegotiated => f.write_str("no features are negotiated"),
            Self::NoQueue(queue) => write!(f, "the queue {queue:?} is not negotiated"),
            Self::NotReady(queue) => {
                write!(f, "the ring of {queue:?} is not ready, or not in memory")
            }
            Self::Index {
                queue,
                available,
                size,
            } => write!(
                f,
                "{available} chains are available in {queue:?}, whose ring has {size} descriptors"
            ),
            Self::Ring(queue, cause) => write!(f, "the ring of {queue:?}: {cause}"),
            Self::NeedsReset => f.write_str("the device needs a reset"),
            Self::NoBuffer => f.write_str("the driver has given no buffer to ask with"),
        }
    }
}

impl core::error::Error for QueueError {}

/// Why hinting cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HintError {
    /// `VIRTIO_BALLOON_F_FREE_PAGE_HINT` is not negotiated.
    NotNegotiated,
    /// All ids have been used, and the driver has not said that it stopped (VIRTIO 1.3, 5.5.6.5.2).
    Ids,
}

impl fmt::Display for HintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotNegotiated => "free page hinting is not negotiated",
            Self::Ids => "no command id is free, since the driver has not stopped",
        })
    }
}

impl core::error::Error for HintError {}
