//! Errors of address spaces as reasons of the balloon's seam.

use std::error::Error;
use std::io;

use ioas::{MapError, ReleaseError, UnmapError};
use virtio_balloon::KeepReason;

/// Error number where the cause has none: EIO.
const UNKNOWN: i32 = 5;

pub(super) fn of_release(cause: &ReleaseError) -> KeepReason {
    match cause {
        ReleaseError::Unmap(cause) => match cause {
            UnmapError::Held { .. } => KeepReason::PinnedElsewhere,
            UnmapError::Flush(_) => KeepReason::NotFlushed,
            UnmapError::Cut(iopt::ResizeError::Flush(_)) => KeepReason::NotFlushed,
            UnmapError::Cut(iopt::ResizeError::NoTables(_)) => KeepReason::NoMemory,
            UnmapError::Kernel(_) | UnmapError::Unpin(_) => of_kernel(cause),
            _ => KeepReason::NotCut,
        },
        ReleaseError::SetAside(cause) => of_restore(cause),
        _ => KeepReason::NotCut,
    }
}

pub(super) fn of_restore(cause: &MapError) -> KeepReason {
    match cause {
        MapError::OverLimit(_) => KeepReason::Limit,
        MapError::Table(iopt::TableMapError::NoTables(_))
        | MapError::TooMany { .. }
        | MapError::NoMemory { .. } => KeepReason::NoMemory,
        MapError::Flush(_) => KeepReason::NotFlushed,
        MapError::Range(_) => KeepReason::NotCut,
        cause => of_kernel(cause),
    }
}

/// The error number of the first that has one.
fn of_kernel(cause: &(dyn Error + 'static)) -> KeepReason {
    const ENOMEM: i32 = 12;
    let mut at = Some(cause);
    while let Some(cause) = at {
        match errno(cause) {
            Some(ENOMEM) => return KeepReason::NoMemory,
            Some(errno) => return KeepReason::Kernel(errno),
            None => at = cause.source(),
        }
    }
    KeepReason::Kernel(UNKNOWN)
}

fn errno(cause: &(dyn Error + 'static)) -> Option<i32> {
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    if let Some(ioas::KernelError::Refused { errno, .. }) = cause.downcast_ref() {
        return Some(*errno);
    }
    cause.downcast_ref().and_then(io::Error::raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outside")]
    struct Outside(#[source] io::Error);

    #[test]
    fn the_first_error_number_in_a_chain_is_the_reason() {
        for (errno, reason) in [(12, KeepReason::NoMemory), (14, KeepReason::Kernel(14))] {
            let plain = io::Error::from_raw_os_error(errno);
            assert_eq!(of_kernel(&plain), reason);
            assert_eq!(of_kernel(&Outside(plain)), reason);
        }
        #[cfg(feature = "vfio")]
        {
            let (operation, errno) = ("VFIO_IOMMU_MAP_DMA", 14);
            let refused = ioas::KernelError::Refused { operation, errno };
            let cause = MapError::Kernel(Box::new(refused));
            assert_eq!(of_restore(&cause), KeepReason::Kernel(14));
        }
        let unnumbered = Outside(io::ErrorKind::Other.into());
        assert_eq!(of_kernel(&unnumbered), KeepReason::Kernel(UNKNOWN));
    }
}
