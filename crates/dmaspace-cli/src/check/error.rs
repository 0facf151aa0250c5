//! Reasons for which a check ends early.

use std::error::Error;

use ioas::{Errno, KernelError, MapError};

use super::Step;

/// Cause of a check that was not done. Everything was given back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    /// The request makes no sense, or is for more than there is.
    #[error("{0}")]
    Input(String),
    /// The same, with the cause. Another size, backing, limit or device could succeed on the same machine.
    #[error("{what}")]
    Refused {
        what: String,
        source: Box<dyn Error + Send + Sync>,
    },
    /// The watcher wanted to stop.
    #[error("interrupted at {}; nothing is left pinned", .0.name())]
    Interrupted(Step),
    /// A device has made no access for a minute.
    #[error("a device has stopped at {}", .0.name())]
    Stuck(Step),
    /// The machine or this program is at fault.
    #[error("{what}")]
    Failed {
        what: &'static str,
        source: Box<dyn Error + Send + Sync>,
    },
}

impl CheckError {
    /// A request that is refused for this reason.
    pub(super) fn input(cause: impl Error) -> Self {
        Self::Input(crate::output::sentence(&cause))
    }

    /// An error of a map at this step.
    pub(super) fn of_map(cause: MapError, step: Step) -> Self {
        let what = "cannot map the memory";
        match cause {
            MapError::Interrupted => Self::Interrupted(step),
            MapError::OverLimit(_)
            | MapError::NoMemory { .. }
            | MapError::Pin(_)
            | MapError::NoRoom { .. } => Self::Refused {
                what: what.into(),
                source: cause.into(),
            },
            cause => Self::Failed {
                what,
                source: cause.into(),
            },
        }
    }

    /// True when the request is at fault and not this program.
    pub(super) const fn is_input(&self) -> bool {
        matches!(self, Self::Input(_) | Self::Refused { .. })
    }
}

/// Errors of the library, with the operation that has failed.
pub(super) trait Because<T> {
    fn failed(self, what: &'static str) -> Result<T, CheckError>;
    fn refused(self, what: impl Into<String>) -> Result<T, CheckError>;
}

impl<T, E: Into<Box<dyn Error + Send + Sync>>> Because<T> for Result<T, E> {
    fn failed(self, what: &'static str) -> Result<T, CheckError> {
        self.map_err(|cause| CheckError::Failed {
            what,
            source: cause.into(),
        })
    }

    fn refused(self, what: impl Into<String>) -> Result<T, CheckError> {
        self.map_err(|cause| CheckError::Refused {
            what: what.into(),
            source: cause.into(),
        })
    }
}

/// The likely reason for which the kernel does not attach a device; empty when none is known.
///
/// Source: `modinfo vfio_iommu_type1`, `modinfo iommufd`: the parameter `allow_unsafe_interrupts`.
pub(super) fn hint(cause: &ioas::AttachError) -> &'static str {
    let cause = match cause {
        ioas::AttachError::Kernel(cause) => cause.downcast_ref(),
        _ => None,
    };
    match cause {
        Some(KernelError::Refused { errno, .. }) if Errno(*errno) == Errno::EPERM => {
            " (where interrupts are not remapped, the kernel requires the parameter \
             allow_unsafe_interrupts=1 of vfio_iommu_type1, or of iommufd)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_for_want_of_permission_comes_with_a_likely_reason() {
        let hint = |errno: Errno| {
            let operation = "VFIO_SET_IOMMU";
            let cause = KernelError::Refused {
                operation,
                errno: errno.0,
            };
            hint(&ioas::AttachError::Kernel(Box::new(cause)))
        };
        assert!(hint(Errno::EPERM).contains("allow_unsafe_interrupts=1"));
        assert_eq!(hint(Errno::ENODEV), "");
    }
}
