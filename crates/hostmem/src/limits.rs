//! Limits on locked memory, and their counters.
//!
//! The kernel has three counters. `user->locked_vm` holds what all processes of a user have
//! pinned through io_uring (or iommufd); no file shows it. `mm->locked_vm` holds what this process
//! has locked with `mlock` (`VmLck`). `mm->pinned_vm` holds what is pinned for the long term
//! (`VmPin`) and is limited by nothing. `RLIMIT_MEMLOCK` limits the first two, each for itself,
//! and `CAP_IPC_LOCK` in the initial user namespace lifts it; io_uring then leaves
//! `user->locked_vm` alone altogether.
//!
//! Source: Linux `io_uring/rsrc.c` (`io_account_mem`), `mm/mlock.c` (`do_mlock`), getrlimit(2),
//! capabilities(7).

use std::fmt;

use thiserror::Error;

use crate::procfs::{self, ProcfsError};
use crate::sys;

/// Status of the calling thread: capabilities are a thread's, counters those of its process.
const STATUS: &str = "/proc/thread-self/status";
const CAP_IPC_LOCK: u32 = 14;

/// The kernel's counter that a pin raises and that can refuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// `user->locked_vm`: io_uring without `CAP_IPC_LOCK`; shared by all processes of the user.
    UserLockedVm,
    /// `mm->locked_vm`: `mlock`; of this process alone.
    MmLockedVm,
    /// `mm->pinned_vm`: io_uring with `CAP_IPC_LOCK`; counted, never limited.
    PinnedVm,
}

impl Counter {
    /// The kernel's own name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::UserLockedVm => "user->locked_vm",
            Self::MmLockedVm => "mm->locked_vm",
            Self::PinnedVm => "mm->pinned_vm",
        }
    }
}

/// The kernel's own name.
impl fmt::Display for Counter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Use of a counter, as far as this process can know. All bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InUse {
    /// Bytes that this process holds.
    pub known: u64,
    /// True when other processes of the same user may hold more on the same counter.
    pub others_possible: bool,
}

/// `12 MiB`, or `12 MiB by this process alone`.
impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", runs::Bytes(self.known))?;
        if self.others_possible {
            f.write_str(" by this process alone")?;
        }
        Ok(())
    }
}

/// Limits of this process on locked memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The soft `RLIMIT_MEMLOCK` in bytes; `None` when it is unlimited.
    pub memlock: Option<u64>,
    /// True with `CAP_IPC_LOCK` in the initial user namespace: no limit applies.
    pub privileged: bool,
}

/// Failure to read the limits.
#[derive(Debug, Error)]
pub enum LimitsError {
    /// A file of `/proc` cannot be read.
    #[error(transparent)]
    Probe(#[from] ProcfsError),
    /// getrlimit(2) failed.
    #[error("cannot read RLIMIT_MEMLOCK")]
    Rlimit(#[source] std::io::Error),
}

impl Limits {
    /// Reads them for the calling thread, as the kernel does when the thread asks it for memory.
    ///
    /// # Errors
    ///
    /// When `/proc` is not there.
    pub fn read() -> Result<Self, LimitsError> {
        let status = procfs::read(STATUS)?;
        let caps = procfs::line(&status, "CapEff")
            .and_then(|hex| u64::from_str_radix(hex, 16).ok())
            .ok_or(ProcfsError::Missing {
                path: STATUS.into(),
                what: "CapEff",
            })?;
        // A kernel without user namespaces has no uid_map, and only the initial one.
        let initial = procfs::read("/proc/self/uid_map").map_or(true, |map| is_initial(&map));
        Ok(Self {
            memlock: sys::locked_memory_limit().map_err(LimitsError::Rlimit)?,
            privileged: initial && caps >> CAP_IPC_LOCK & 1 == 1,
        })
    }

    /// The limit in bytes that applies to a counter; `None` when there is none.
    pub fn limit(&self, counter: Counter) -> Option<u64> {
        match counter {
            Counter::PinnedVm => None,
            Counter::UserLockedVm | Counter::MmLockedVm if self.privileged => None,
            Counter::UserLockedVm | Counter::MmLockedVm => self.memlock,
        }
    }

    /// Bytes that the counter holds now.
    ///
    /// # Errors
    ///
    /// When `/proc/thread-self/status` cannot be read.
    pub fn in_use(counter: Counter) -> Result<InUse, LimitsError> {
        let name = match counter {
            Counter::UserLockedVm | Counter::PinnedVm => "VmPin",
            Counter::MmLockedVm => "VmLck",
        };
        let status = procfs::read(STATUS)?;
        let known = procfs::line_bytes(&status, name).ok_or(ProcfsError::Missing {
            path: STATUS.into(),
            what: name,
        })?;
        Ok(InUse {
            known,
            others_possible: counter == Counter::UserLockedVm,
        })
    }

    /// Bytes that the counter has left under its limit, as far as this process knows; `None`
    /// without a limit.
    ///
    /// # Errors
    ///
    /// When `/proc/thread-self/status` cannot be read.
    pub fn left(&self, counter: Counter) -> Result<Option<u64>, LimitsError> {
        let Some(limit) = self.limit(counter) else {
            return Ok(None);
        };
        Ok(Some(limit.saturating_sub(Self::in_use(counter)?.known)))
    }
}

/// The initial user namespace maps every number to itself. Source: user_namespaces(7).
fn is_initial(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_map_of_everything_to_itself_is_the_initial_namespace() {
        assert!(is_initial("         0          0 4294967295\n"));
        assert!(!is_initial("         0       1000          1\n"));
        assert!(!is_initial("0 0 4294967295\n5 5 1\n"));
    }

    #[test]
    fn the_capability_lifts_every_limit() {
        let mut limits = Limits {
            memlock: Some(8 << 20),
            privileged: false,
        };
        assert_eq!(limits.limit(Counter::UserLockedVm), Some(8 << 20));
        assert_eq!(limits.limit(Counter::MmLockedVm), Some(8 << 20));
        assert_eq!(limits.limit(Counter::PinnedVm), None);
        limits.privileged = true;
        assert_eq!(limits.limit(Counter::MmLockedVm), None);
    }

    #[test]
    fn each_cause_is_said_once() {
        use std::error::Error as _;
        let read = ProcfsError::Read {
            path: STATUS.into(),
            source: std::io::Error::from_raw_os_error(2),
        };
        let error = crate::PinnerError::Limits(LimitsError::Probe(read));
        let cause = error.source().map(ToString::to_string);
        assert!(cause.is_some_and(|cause| !error.to_string().contains(&cause)));
    }

    #[test]
    fn what_is_in_use_names_its_scope() {
        let mut in_use = InUse {
            known: 12 << 20,
            others_possible: true,
        };
        assert_eq!(in_use.to_string(), "12 MiB by this process alone");
        in_use.others_possible = false;
        assert_eq!(in_use.to_string(), "12 MiB");
    }
}
