//! Refusals to pin memory.
//!
//! The kernel answers with a number; here it becomes a sentence with the cause: which limit and
//! by how much, or which page.

use std::fmt;
use std::io;

use runs::{Offset, Span};
use thiserror::Error;

use crate::limits::{Counter, InUse, LimitsError};
use crate::mapping::Mapping;
use crate::pinner::PinKind;
use crate::procfs;
use crate::rings::Table;
use runs::Bytes;

/// Failure to pin memory. Nothing of it is pinned then.
#[derive(Debug, Error)]
pub enum PinError {
    /// A part that is empty, not inside of the mapping, or not a multiple of 4 KiB.
    #[error("{part} is no part of whole 4 KiB pages in a mapping of {len:#x} bytes")]
    BadPart {
        /// The part: offset and length in bytes.
        part: Span<Offset>,
        /// The mapping's length in bytes.
        len: u64,
    },
    /// The limit on locked memory.
    #[error(
        "needs {}, {} allowed (RLIMIT_MEMLOCK), {in_use} in use ({counter}): {}; refused at offset {offset:#x}",
        Bytes(*needed), Bytes(*limit), Raise { missing: in_use.known.saturating_add(*needed).saturating_sub(*limit) }
    )]
    Limit {
        /// Offset in the mapping where the limit was met; the part's first when it was clear
        /// beforehand.
        offset: u64,
        /// Charge of the kernel for the part, bytes.
        needed: u64,
        /// The limit, bytes.
        limit: u64,
        /// Use of the counter before.
        in_use: InUse,
        /// The counter that is limited.
        counter: Counter,
    },
    /// Memory that cannot be pinned: not mapped, not writable, or without a page to be had.
    #[error("the memory at offset {offset:#x} cannot be pinned by {kind}")]
    Refused {
        /// Offset in the mapping: of the page with io_uring, to within 64 MiB with `mlock`.
        offset: u64,
        /// The refused method.
        kind: PinKind,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel has no memory for the pin itself.
    #[error("the kernel has no memory left to pin {} at offset {offset:#x}", Bytes(*len))]
    NoMemory {
        /// Offset in the mapping.
        offset: u64,
        /// Length of the piece, bytes.
        len: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// No further table of registered buffers.
    #[error("no further table of registered buffers for offset {offset:#x}")]
    Table {
        /// Offset in the mapping.
        offset: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// `mlock` does not count, so a part that one pin holds cannot be held by a second.
    #[error("{part} overlaps {held}, which another pin holds with mlock")]
    AlreadyLocked {
        /// The part that was asked for.
        part: Span<Offset>,
        /// The part that is held.
        held: Span<Offset>,
    },
    /// The caller wanted to stop.
    #[error("interrupted after {}; all of it is given back", Bytes(*done))]
    Interrupted {
        /// Bytes that had been pinned.
        done: u64,
    },
    /// The limits cannot be read.
    #[error(transparent)]
    Limits(#[from] LimitsError),
}

/// Bytes by which the limit is too low, and how it is raised.
struct Raise {
    missing: u64,
}

impl fmt::Display for Raise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.missing {
            0 => f.write_str("other processes of the user hold the rest")?,
            missing => write!(f, "{} short", Bytes(missing))?,
        }
        f.write_str(", `ulimit -l` or LimitMEMLOCK= raises it, and CAP_IPC_LOCK lifts it")
    }
}

/// The limit that a pin must keep to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) needed: u64,
    pub(crate) limit: u64,
    pub(crate) in_use: InUse,
    pub(crate) counter: Counter,
}

impl Budget {
    pub(crate) fn exceeded(self, offset: u64) -> PinError {
        PinError::Limit {
            offset,
            needed: self.needed,
            limit: self.limit,
            in_use: self.in_use,
            counter: self.counter,
        }
    }
}

/// Error for `piece`, which was refused its slot; the slot is still empty.
pub(crate) fn register_error(
    table: &Table,
    slot: u32,
    mapping: &Mapping,
    piece: Span<Offset>,
    source: io::Error,
    budget: Option<Budget>,
) -> PinError {
    match (source.raw_os_error(), budget) {
        (Some(libc::ENOMEM), Some(budget)) => budget.exceeded(piece.start),
        (Some(libc::ENOMEM), None) => PinError::NoMemory {
            offset: piece.start,
            len: piece.len,
            source,
        },
        _ => PinError::Refused {
            offset: first_refused(table, slot, mapping, piece),
            kind: PinKind::IoUring,
            source,
        },
    }
}

/// The offset of the first page of `piece` that is refused, by halving.
fn first_refused(table: &Table, slot: u32, mapping: &Mapping, piece: Span<Offset>) -> u64 {
    let (mut low, mut high) = (piece.start, piece.start + piece.len);
    while high - low > 4096 {
        let middle = low
            + ((high - low) / 2)
                .next_multiple_of(4096)
                .min(high - low - 4096);
        let lower = Span::new(low, middle - low);
        if table.fill(slot, mapping.region(), &[lower]).is_err() {
            high = middle;
        } else if table.empty(slot, 1).is_ok() {
            low = middle;
        } else {
            break;
        }
    }
    low
}

pub(crate) fn table_error(offset: u64, source: io::Error, budget: Option<Budget>) -> PinError {
    match (source.raw_os_error(), budget) {
        // Kernels since 6.14 charge the ring's own two pages to the same counter.
        (Some(libc::ENOMEM), Some(budget)) => budget.exceeded(offset),
        _ => PinError::Table { offset, source },
    }
}

/// Reason in words that io_uring is not available. Source: io_uring_setup(2), Linux
/// `Documentation/admin-guide/sysctl/kernel.rst` ("io_uring_disabled").
pub(crate) fn no_ring(error: &io::Error) -> String {
    let disabled = procfs::read_number("/proc/sys/kernel/io_uring_disabled").unwrap_or(0);
    match (error.raw_os_error(), disabled) {
        (Some(libc::ENOSYS), _) => "the kernel has no io_uring".into(),
        (Some(libc::EPERM), 2) => "io_uring is switched off (kernel.io_uring_disabled = 2)".into(),
        (Some(libc::EPERM), 1) => {
            "io_uring is for privileged processes and the group of kernel.io_uring_group only \
             (kernel.io_uring_disabled = 1)"
                .into()
        }
        (Some(libc::EPERM), _) => {
            "io_uring is forbidden to this process, as containers do by seccomp".into()
        }
        (Some(libc::EINVAL), _) => {
            "the kernel's io_uring has no sparse tables of buffers (Linux 5.19)".into()
        }
        (Some(libc::ENOMEM), _) => "the limit on locked memory leaves no room for a ring".into(),
        _ => format!("io_uring is refused: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_says_by_how_much_it_is_short_and_how_it_is_raised() {
        let mut budget = Budget {
            needed: 4 << 20,
            limit: 64 << 10,
            in_use: InUse {
                known: 0,
                others_possible: true,
            },
            counter: Counter::UserLockedVm,
        };
        let said = budget.exceeded(0).to_string();
        assert_eq!(
            said,
            "needs 4 MiB, 64 KiB allowed (RLIMIT_MEMLOCK), 0 bytes by this process alone in use (user->locked_vm): \
             3.9 MiB short, `ulimit -l` or LimitMEMLOCK= raises it, and CAP_IPC_LOCK lifts it; refused at offset 0x0"
        );
        budget.limit = 8 << 20;
        let said = budget.exceeded(0x1000).to_string();
        assert!(
            said.contains("): other processes of the user hold the rest, "),
            "{said}"
        );
    }
}
