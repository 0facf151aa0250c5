//! Errors of calls of the monitor.

use crate::features::Features;
use crate::map::BadRam;
use crate::partial::BadRegion;
use crate::queues::Queue;

/// Why a device cannot be made, or cannot have this memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BalloonSetupError {
    /// The regions are not a guest's memory.
    #[error(transparent)]
    Ram(BadRam),
    /// The backing of a region has no such pages.
    #[error(transparent)]
    Region(BadRegion),
    /// A feature that is not among those of balloons (VIRTIO 1.3, 5.5.3).
    #[error("no features of a balloon: {:#x}", .unknown.0)]
    Feature {
        /// The bits.
        unknown: Features,
    },
    /// The longest message in bulk is none of 24 to 32,776 bytes.
    #[error("messages in bulk of {bytes} bytes: the longest must have 24 to 32,776")]
    Message {
        /// Its bytes.
        bytes: u32,
    },
    /// One bit for messages in bulk and for `VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE`.
    #[error("feature bit {bit} stands for messages in bulk and for initialized pages")]
    SameBit {
        /// The bit.
        bit: u8,
    },
}

/// Why the driver's features are refused: the monitor leaves `FEATURES_OK` unset (VIRTIO 1.3, 3.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NegotiateError {
    /// The driver took features that were not offered.
    #[error("features {:#x} were not offered", .features.0)]
    NotOffered {
        /// These.
        features: Features,
    },
    /// Devices that cannot take page faults reach the guest's memory, and the driver will not tell
    /// before it uses pages again (`VIRTIO_BALLOON_F_MUST_TELL_HOST`; 5.5.3.2).
    #[error("devices reach the guest's memory, and the driver does not accept MUST_TELL_HOST")]
    MustTellHost,
    /// The driver took messages in bulk, and a bitmap for each message of initialized pages: a message in bulk has no
    /// place for it.
    #[error(
        "messages in bulk tell of no initialized pages: the driver may accept one of both features"
    )]
    BulkAndInit,
}

/// Why devices that cannot take page faults must not be attached now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PassthroughError {
    /// The driver reports free pages, and uses them again without a word.
    #[error("free page reporting is negotiated")]
    Reporting,
    /// The driver hints at free pages, and uses them again without a word.
    #[error("free page hinting is negotiated")]
    Hinting,
    /// The driver did not accept `VIRTIO_BALLOON_F_MUST_TELL_HOST`.
    #[error("MUST_TELL_HOST is not negotiated")]
    MustTellHost,
}

/// Why a queue was not drained, or not to its end. Messages taken before stay taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// No features are negotiated.
    #[error("no features are negotiated")]
    NotNegotiated,
    /// The features that are negotiated do not bring this queue.
    #[error("the queue {0:?} is not negotiated")]
    NoQueue(Queue),
    /// The ring is not ready, or does not lie in the guest's memory.
    #[error("the ring of {0:?} is not ready, or not in memory")]
    NotReady(Queue),
    /// More is available than the ring holds: the driver is broken.
    #[error("{available} chains are available in {queue:?}, whose ring has {size} descriptors")]
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
    #[error("the ring of {0:?} cannot be read or written")]
    Ring(Queue, #[source] virtio_queue::Error),
    /// The device goes on only after a reset.
    #[error("the device needs a reset")]
    NeedsReset,
    /// There is no buffer to ask for statistics with: the driver has given none, or has not answered yet.
    #[error("the driver has given no buffer to ask with")]
    NoBuffer,
}

/// Why hinting cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HintError {
    /// `VIRTIO_BALLOON_F_FREE_PAGE_HINT` is not negotiated.
    #[error("free page hinting is not negotiated")]
    NotNegotiated,
    /// All ids have been used, and the driver has not said that it stopped (VIRTIO 1.3, 5.5.6.5.2).
    #[error("no command id is free, since the driver has not stopped")]
    Ids,
}
