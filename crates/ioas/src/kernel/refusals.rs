//! What a kernel's error numbers mean, by operation and interface: pure functions.
//!
//! What can be known before the kernel is asked was checked before. So a number tells what only the
//! kernel knows: that a limit or somebody else was in the way, or that memory is not what it seemed.
//! A number that says nothing of that kind stays a cause, with the name of the ioctl.

use std::boxed::Box;

use iopt::RangeError;
use runs::Span;

use super::error::KernelError;
use crate::backend::{Capability, Unsupported};
use crate::errno::{Errno, Profile};
use crate::error::{AttachError, DetachError, MapError, UnmapError};
use crate::ledger::OverLimit;
use crate::object::PinFailed;

/// What was to be mapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct MapRequest {
    /// Device addresses.
    pub(super) range: Span,
    /// What its ends must be multiples of, bytes.
    pub(super) granule: u64,
    /// What of the range lies in no window, as far as is known.
    pub(super) outside: Option<Span>,
    /// What the ledger says to it; `None` without a limit.
    pub(super) over: Option<OverLimit>,
    /// Mappings that there are.
    pub(super) mappings: u64,
}

/// The number, when the kernel gave one.
pub(super) const fn errno(error: &KernelError) -> Option<Errno> {
    match error {
        KernelError::Refused { errno, .. } => Some(Errno(*errno)),
        _ => None,
    }
}

/// Why a map was refused.
pub(super) fn map_refused(profile: Profile, error: KernelError, request: &MapRequest) -> MapError {
    let wanted = request.range;
    match (errno(&error), profile) {
        (Some(Errno::EEXIST), _) => MapError::Overlap {
            wanted,
            area: wanted,
        },
        (Some(Errno::ENOMEM), _) => match request.over {
            Some(over) => MapError::OverLimit(over),
            None => MapError::Kernel(Box::new(error)),
        },
        (Some(Errno::EFAULT), _) => MapError::Pin(PinFailed::Refused(Box::new(error))),
        (Some(Errno::EINTR), _) => MapError::Interrupted,
        (Some(Errno::ENOSPC), Profile::Type1) => MapError::TooMany {
            wanted: request.mappings + 1,
            most: request.mappings,
        },
        (Some(Errno::ENOSPC), Profile::Iommufd) => MapError::NoRoom { len: wanted.len },
        (Some(Errno::EOVERFLOW), _) => MapError::BeyondEnd {
            start: wanted.start,
        },
        (Some(Errno::EINVAL | Errno::EADDRINUSE), _) => match request.outside {
            Some(reserved) => MapError::Reserved { wanted, reserved },
            None if !wanted.is_aligned(request.granule) => {
                MapError::Range(RangeError::Misaligned {
                    value: wanted.start,
                    granule: request.granule,
                })
            }
            None => MapError::Kernel(Box::new(error)),
        },
        _ => match error {
            KernelError::Prot { prot } => MapError::Prot { prot },
            error => MapError::Kernel(Box::new(error)),
        },
    }
}

/// Why an unmap of `range` was refused.
pub(super) fn unmap_refused(profile: Profile, error: KernelError, range: Span) -> UnmapError {
    let cuts = UnmapError::CutsMapping {
        mapping: range,
        cause: Unsupported {
            what: Capability::UnmapPart,
            backend: profile.name(),
        },
    };
    match (errno(&error), profile) {
        (Some(Errno::EINVAL), _) if Span::checked(range.start, range.len).is_none() => {
            UnmapError::BeyondEnd { start: range.start }
        }
        (Some(Errno::EINVAL), Profile::Type1) => cuts,
        // Of a container that iommufd plays too.
        (Some(Errno::ENOENT), _) => UnmapError::Hole {
            range,
            at: range.start,
        },
        (Some(Errno::EBUSY | Errno::EDEADLOCK), _) => UnmapError::Held { range, held: range },
        (Some(Errno::EOVERFLOW), _) => UnmapError::BeyondEnd { start: range.start },
        _ => UnmapError::Kernel(Box::new(error)),
    }
}

/// Why a device was not attached.
pub(super) fn attach_refused(profile: Profile, error: KernelError) -> AttachError {
    match (errno(&error), profile) {
        (Some(Errno::EINVAL), Profile::Type1) | (Some(Errno::EADDRINUSE), _) => {
            AttachError::Conflict(Box::new(error))
        }
        (Some(Errno::EBUSY), _) => AttachError::Busy(Box::new(error)),
        _ => AttachError::Kernel(Box::new(error)),
    }
}

/// Why a device was not detached.
pub(super) fn detach_refused(error: &KernelError) -> DetachError {
    match error {
        KernelError::Refused { operation, errno } => DetachError::Kernel {
            operation,
            errno: Errno(*errno),
        },
        // Detaching has no answer that could be wrong, and opens nothing.
        _ => DetachError::Unknown,
    }
}
