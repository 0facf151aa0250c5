//! Errors of address spaces as reasons of the balloon's seam.

use std::error::Error;
use std::io;

use ioas::{MapError, ReleaseError, UnmapError};
use virtio_balloon::Reason;

/// Where nobody says which: EIO.
const UNKNOWN: i32 = 5;

pub(super) fn of_release(cause: &ReleaseError) -> Reason {
    match cause {
        ReleaseError::Unmap(cause) => match cause {
            UnmapError::Held { .. } => Reason::PinnedElsewhere,
            UnmapError::Flush(_) => Reason::NotFlushed,
            UnmapError::Cut(iopt::ResizeError::Flush(_)) => Reason::NotFlushed,
            UnmapError::Cut(iopt::ResizeError::NoTables(_)) => Reason::NoMemory,
            UnmapError::Kernel(_) | UnmapError::Unpin(_) => of_kernel(cause),
            _ => Reason::NotCut,
        },
        ReleaseError::SetAside(cause) => of_restore(cause),
        _ => Reason::NotCut,
    }
}

pub(super) fn of_restore(cause: &MapError) -> Reason {
    match cause {
        MapError::OverLimit(_) => Reason::Limit,
        MapError::Table(iopt::TableMapError::NoTables(_)) | MapError::TooMany { .. } => {
            Reason::NoMemory
        }
        MapError::Flush(_) => Reason::NotFlushed,
        MapError::Range(_) => Reason::NotCut,
        cause => of_kernel(cause),
    }
}

/// The error number of the first that has one.
fn of_kernel(cause: &(dyn Error + 'static)) -> Reason {
    const ENOMEM: i32 = 12;
    let mut at = Some(cause);
    while let Some(cause) = at {
        let errno = cause.downcast_ref::<io::Error>();
        match errno.and_then(io::Error::raw_os_error) {
            Some(ENOMEM) => return Reason::NoMemory,
            Some(errno) => return Reason::Kernel(errno),
            None => at = cause.source(),
        }
    }
    Reason::Kernel(UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outside")]
    struct Outside(#[source] io::Error);

    #[test]
    fn the_first_error_number_in_a_chain_is_the_reason() {
        for (errno, reason) in [(12, Reason::NoMemory), (14, Reason::Kernel(14))] {
            let plain = io::Error::from_raw_os_error(errno);
            assert_eq!(of_kernel(&plain), reason);
            assert_eq!(of_kernel(&Outside(plain)), reason);
        }
        let unnumbered = Outside(io::ErrorKind::Other.into());
        assert_eq!(of_kernel(&unnumbered), Reason::Kernel(UNKNOWN));
    }
}
