//! Errors of operations on an address space. Every error names its cause with numbers.

use core::error::Error;
use core::fmt;

use iommu::{DeviceId, FlushError};
use iopt::ResizeError;
use runs::{Iova, Span};

use crate::capability::Unsupported;
use crate::errno::Errno;
pub use crate::memory::error::MapError;
use crate::memory::object::Cause;

/// Failure of an unmap.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnmapError {
    /// The range cuts an area. Nothing was unmapped.
    #[error("{range} cuts the area {area}")]
    CutsArea {
        /// The range that was asked for.
        range: Span<Iova>,
        /// The area that lies only partly in it.
        area: Span<Iova>,
    },
    /// Some of the range is in no area. Nothing was taken out.
    #[error("{at:#x} in {range} is in no area")]
    Hole {
        /// The range that was asked for.
        range: Span<Iova>,
        /// The first address that is in no area.
        at: u64,
    },
    /// An external pin holds some of it, and its user has not dropped it, asked several times. Nothing was
    /// unmapped.
    #[error("{held} in {range} is held by another user and was not released")]
    Held {
        /// The range that was asked for.
        range: Span<Iova>,
        /// The first stretch of it that is held.
        held: Span<Iova>,
    },
    /// A leaf that reaches over an end of the range cannot be replaced by smaller ones, or the flush
    /// after an earlier such change has still to succeed. Nothing was unmapped; translations are what
    /// they were, some leaves may be smaller.
    #[error(transparent)]
    Cut(ResizeError<FlushError>),
    /// An end of the range lies inside a mapping of the back end, which cannot be cut, or not
    /// without a moment in which the rest is missing. Nothing was unmapped.
    #[error("{mapping} is one mapping, which cannot be cut")]
    CutsMapping {
        /// The mapping, which may hold several areas.
        mapping: Span<Iova>,
        /// Capability that the back end lacks.
        #[source]
        cause: Unsupported,
    },
    /// An operation on some of it has panicked, and its range stays taken until the address space is closed.
    /// Nothing was unmapped.
    #[error("an operation on {range} has panicked")]
    Panicked {
        /// The range of that operation.
        range: Span<Iova>,
    },
    /// The range ends beyond 2^64. Nothing was unmapped.
    #[error("the range from {start:#x} ends beyond 2^64")]
    BeyondEnd {
        /// Its start.
        start: u64,
    },
    /// The tables refuse. Nothing was unmapped.
    #[error(transparent)]
    Table(iopt::TableUnmapError),
    /// The kernel refuses, for a reason of its own. Nothing was unmapped.
    #[error("the kernel does not unmap it")]
    Kernel(#[source] Cause),
    /// The areas are unmapped, but a unit did not answer in time, and devices may still reach their memory.
    /// It stays pinned and charged, and their tables unused, until [`Ioas::flush`](crate::Ioas::flush)
    /// succeeds. Memory that no pin holds ([`FixedRuns`](crate::FixedRuns)) must not be used again before.
    #[error(transparent)]
    Flush(FlushError),
    /// The areas are unmapped and flushed, and all memory was to be unpinned, but some could not.
    /// This is the first failure. How much of that memory is still pinned is not known, so its
    /// charge stays for good.
    #[error("cannot unpin memory")]
    Unpin(#[source] Cause),
}

/// Failure of an attach: nothing has changed, unless the device stays attached and translates nothing (see
/// [`Ioas::attach`](crate::Ioas::attach)).
#[derive(Debug)]
#[non_exhaustive]
pub enum AttachError {
    /// No domain suits its unit, and nothing can build one.
    NoDomain {
        /// The device.
        device: DeviceId,
    },
    /// The device cannot translate an address at which there is an area.
    Reserved {
        /// The first such area.
        area: Span<Iova>,
        /// Range that the device reserves.
        reserved: Span<Iova>,
    },
    /// A table for a new domain was not built.
    Build(Cause),
    /// An area cannot be mapped in the new domain.
    Replay {
        /// The area.
        area: Span<Iova>,
        /// Cause.
        cause: MapError,
    },
    /// The unit refuses.
    Unit(iommu::UnitAttachError),
    /// No area covers, over one memory, what another process has mapped.
    NoArea {
        /// The mapping.
        mapping: Span<Iova>,
    },
    /// The back end takes no endpoint of this kind.
    Endpoint {
        /// Its name.
        backend: &'static str,
    },
    /// It is attached to this address space already.
    AlreadyAttached,
    /// The kernel finds that an area lies where the device cannot translate, or is no multiple of
    /// its smallest page.
    Conflict(Cause),
    /// The kernel uses it otherwise: in another container or address space, or while the addresses
    /// of this process are invalid.
    Busy(Cause),
    /// The kernel refuses, for a reason of its own.
    Kernel(Cause),
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDomain { device } => write!(f, "no domain suits the unit of {device}"),
            Self::Reserved { area, reserved } => write!(
                f,
                "the area {area} overlaps {reserved}, which the device cannot translate"
            ),
            Self::Build(_) => f.write_str("cannot build a page table for the device"),
            Self::Replay { area, .. } => {
                write!(f, "the area {area} cannot be mapped for the device")
            }
            Self::Unit(cause) => cause.fmt(f),
            Self::NoArea { mapping } => write!(f, "no area covers the mapping {mapping}"),
            Self::Endpoint { backend } => {
                write!(f, "{backend} cannot attach an endpoint of this kind")
            }
            Self::AlreadyAttached => f.write_str("it is attached to this address space already"),
            Self::Conflict(_) => f.write_str("an area overlaps addresses that it cannot translate"),
            Self::Busy(_) => f.write_str("it is in use elsewhere"),
            Self::Kernel(_) => f.write_str("the kernel does not attach it"),
        }
    }
}

impl Error for AttachError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Build(cause)
            | Self::Conflict(cause)
            | Self::Busy(cause)
            | Self::Kernel(cause) => Some(&**cause),
            Self::Replay { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

/// Failure of a detach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DetachError {
    /// It is not attached to this address space.
    #[error("{device} is not attached to this address space")]
    NotAttached {
        /// The device.
        device: DeviceId,
    },
    /// Its unit refuses, or did not come to an end in time. The device counts as attached.
    #[error(transparent)]
    Unit(iommu::UnitAttachError),
    /// It is not attached to this address space, which knows its devices by the kernel's files.
    #[error("it is not attached to this address space")]
    Unknown,
    /// The kernel refuses. The device counts as attached.
    #[error("{operation} was refused: {errno}")]
    Kernel {
        /// The ioctl.
        operation: &'static str,
        /// Error number of the kernel.
        errno: Errno,
    },
}

/// Failure to close an address space in order.
///
/// Memory and tables that could not be given back are lost on purpose: memory stays pinned and charged, tables stay out
/// of use, since a device may still reach them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// Something could not be unmapped.
    #[error(transparent)]
    Unmap(UnmapError),
    /// A device could not be detached.
    #[error(transparent)]
    Detach(DetachError),
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::io;
    use std::string::{String, ToString};
    use std::vec::Vec;

    use super::*;
    use crate::capability::Capability;
    use crate::memory::object::PinFailed;
    use crate::space::dirty::TrackingError;
    use crate::space::release::ReleaseError;

    /// Messages of an error and its causes, none of which has the next one within it.
    fn chain(error: &(dyn Error + 'static)) -> Vec<String> {
        let causes = core::iter::successors(Some(error), |&error| error.source());
        let said: Vec<_> = causes.map(ToString::to_string).collect();
        for pair in said.windows(2) {
            assert!(!pair[0].contains(&pair[1]), "{pair:?}");
        }
        said
    }

    #[test]
    fn each_cause_is_said_once() {
        let area = Span::new(0x1000, 0x1000);
        let refused = || {
            let cause = io::Error::from_raw_os_error(Errno::ENOMEM.0);
            MapError::Pin(PinFailed::Refused(Box::new(cause)))
        };
        let replay = AttachError::Replay {
            area,
            cause: refused(),
        };
        let said = chain(&replay);
        let first = [
            "the area 0x1000+0x1000 cannot be mapped for the device",
            "cannot pin the memory",
        ];
        assert_eq!(said[..2], first);
        assert_eq!(chain(&ReleaseError::SetAside(refused())).len(), 3);
        let cuts = UnmapError::CutsMapping {
            mapping: area,
            cause: Unsupported {
                what: Capability::UnmapPart,
                backend: "iommufd",
            },
        };
        assert_eq!(chain(&cuts).len(), 2);
        let split = FlushError::Held {
            range: area,
            waited: core::time::Duration::ZERO,
        };
        assert_eq!(
            chain(&TrackingError::Split(ResizeError::Flush(split))).len(),
            2
        );
        #[cfg(any(feature = "vfio", feature = "iommufd"))]
        {
            use crate::kernel_error::{AnswerError, KernelError};
            let answer = KernelError::Answer {
                operation: "VFIO_IOMMU_GET_INFO",
                problem: AnswerError::Loop,
            };
            assert_eq!(chain(&answer).len(), 2);
            let cause = io::Error::from_raw_os_error(Errno::ENOENT.0);
            let open = KernelError::Open {
                path: "/dev/iommu".into(),
                cause,
            };
            assert_eq!(chain(&AttachError::Kernel(Box::new(open))).len(), 3);
        }
    }
}
