//! Failure to map memory.

use core::fmt;

use iommu::FlushError;
use iopt::{Prot, RangeError};
use runs::{Iova, Offset, Span};

use crate::capability::Unsupported;
use crate::memory::ledger::{Forecast, OverLimit};
use crate::memory::object::{Cause, PinFailed};

/// Failure to map: areas, pins, charges and tables are as they were.
///
/// With one exception: when part of the memory was mapped already and a unit does not answer
/// that it is unmapped again, devices may still reach that memory. It is then retired
/// ([`Ioas::retired`](crate::Ioas::retired) has grown): pinned and charged, but in no area, until
/// [`Ioas::flush`](crate::Ioas::flush) succeeds.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The range of device addresses is not well formed.
    #[error(transparent)]
    Range(RangeError),
    /// The part lies outside its memory object, or is not a multiple of the smallest page.
    #[error(
        "{part} is no part of whole pages of {granule:#x} bytes in an object of {object:#x} bytes"
    )]
    Part {
        /// Offset and length in the object, bytes.
        part: Span<Offset>,
        /// Length of the object.
        object: u64,
        /// The smallest page.
        granule: u64,
    },
    /// Another area lies there.
    #[error("{wanted} overlaps the area {area}")]
    Overlap {
        /// The range that was asked for.
        wanted: Span<Iova>,
        /// The first area that is in the way.
        area: Span<Iova>,
    },
    /// The range ends beyond 2^64.
    #[error("the range from {start:#x} ends beyond 2^64")]
    BeyondEnd {
        /// Its start.
        start: u64,
    },
    /// Devices cannot translate some of it.
    #[error("{wanted} overlaps {reserved}, which a device cannot translate")]
    Reserved {
        /// The range that was asked for.
        wanted: Span<Iova>,
        /// Range that an attached device reserves.
        reserved: Span<Iova>,
    },
    /// Nowhere in the allowed ranges there is room that keeps large pages possible: from a multiple
    /// of the largest page that the length has room for, on, to the end of the part.
    #[error("the allowed ranges have no aligned room for {}", runs::Bytes(*.len))]
    NoRoom {
        /// Bytes that were to be mapped.
        len: u64,
    },
    /// A range that was to be allowed is empty, ends beyond 2^64, overlaps another one, or cannot be
    /// translated by a device.
    #[error(
        "{range} cannot be allowed: it is empty, ends beyond 2^64, overlaps another range, or a device cannot translate it"
    )]
    Allowed {
        /// The range.
        range: Span<Iova>,
    },
    /// The range to be put back is only a part of the range that was taken out.
    #[error("{out} was released as a whole, and {range} is a part of it")]
    NotOut {
        /// The range that was asked for.
        range: Span<Iova>,
        /// The area that is out and reaches over one of its ends.
        out: Span<Iova>,
    },
    /// The back end cannot do that.
    #[error(transparent)]
    Unsupported(Unsupported),
    /// Nothing is permitted, or something that this back end cannot permit: a kernel maps for reading,
    /// for writing or for both.
    #[error("nothing is mapped with the permissions \"{prot}\"")]
    Prot {
        /// Requested access.
        prot: Prot,
    },
    /// The kernel refuses, for a reason of its own.
    #[error("the kernel does not map it")]
    Kernel(#[source] Cause),
    /// The back end has as many mappings as it can have.
    #[error("{wanted} mappings are needed, and there can be {most}: {} too few{}", wanted.saturating_sub(*most), Raise(*most))]
    TooMany {
        /// Number of mappings that it would have.
        wanted: u64,
        /// The most that it can have.
        most: u64,
    },
    /// The limit on locked memory.
    #[error(transparent)]
    OverLimit(OverLimit),
    /// The kernel has no memory for it, or, where others have a part of the limit, they hold too much. The limit itself
    /// would have allowed it.
    #[error("the kernel has no memory to map {}", Others(room))]
    NoMemory {
        /// Room under the limit when the kernel refused.
        room: Forecast,
        /// Refusal of the kernel.
        #[source]
        cause: Cause,
    },
    /// The memory cannot be pinned.
    #[error(transparent)]
    Pin(PinFailed),
    /// The memory is a BAR by a dma-buf, which is revoked: its device does not answer at the BAR now, since memory
    /// decoding is off in its command register, it is in power state D3hot, or it is gone.
    #[error(
        "the dma-buf for {range} is revoked: its device does not answer at the BAR (memory decoding is off, or D3hot)"
    )]
    Revoked {
        /// The range that was asked for.
        range: Span<Iova>,
    },
    /// The runs of the pinned memory cannot be found.
    #[error("cannot find the physical runs of pinned memory")]
    Runs(#[source] Cause),
    /// The pinned memory yields another number of bytes than it has.
    #[error("{pinned} bytes are pinned, but their runs have {found} bytes")]
    RunsDiffer {
        /// Bytes that were pinned.
        pinned: u64,
        /// Bytes that its runs have, as far as they were read.
        found: u64,
    },
    /// The reader of the runs claims to have filled in more than there was room for.
    #[error("{count} runs were given in a batch of {room}")]
    BatchTooLong {
        /// Runs that it claims.
        count: usize,
        /// Runs that there was room for.
        room: usize,
    },
    /// The tables refuse.
    #[error(transparent)]
    Table(iopt::TableMapError),
    /// The observer wanted to stop.
    #[error("interrupted while mapping")]
    Interrupted,
    /// An operation on some of it has panicked, and its range stays taken until the address space is closed.
    #[error("an operation on {range} has panicked")]
    Panicked {
        /// The range of that operation.
        range: Span<Iova>,
    },
    /// A unit did not answer in time: to a flush of what was mapped, or of what had been unmapped before
    /// and was still to be flushed.
    #[error(transparent)]
    Flush(FlushError),
}

/// The most areas of an address space, which no setting changes.
pub(crate) const MOST_AREAS: u64 = u32::MAX as u64 - (1 << 16);

/// Advice on raising the limit of mappings.
struct Raise(u64);

impl fmt::Display for Raise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            MOST_AREAS => Ok(()),
            _ => f.write_str(
                " (type 1: vfio_iommu_type1.dma_entry_limit=N raises the limit; iommufd has none)",
            ),
        }
    }
}

/// Bytes that the kernel has refused, and whether others may be the reason.
struct Others<'a>(&'a Forecast);

impl fmt::Display for Others<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Forecast::Fits { needed } => write!(
                f,
                "{}; no limit on locked memory is exceeded",
                runs::Bytes(*needed)
            ),
            Forecast::DoesNotFit(over) => write!(f, "{}: {over}", runs::Bytes(over.needed)),
            Forecast::Unknown {
                needed,
                room_for_others,
                counter,
            } => write!(
                f,
                "{}, or other processes of this user hold more than {} ({counter})",
                runs::Bytes(*needed),
                runs::Bytes(*room_for_others)
            ),
        }
    }
}

impl From<PinFailed> for MapError {
    fn from(cause: PinFailed) -> Self {
        match cause {
            PinFailed::Interrupted => Self::Interrupted,
            cause => Self::Pin(cause),
        }
    }
}
