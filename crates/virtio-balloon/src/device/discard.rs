//! Giving memory back to the machine: the seam.

use core::fmt;

use runs::Span;

/// Gives what lies behind the guest's addresses back to the machine.
pub trait Discard {
    /// Discards `runs`: ascending, not overlapping, each within one region of the guest's memory and
    /// made of whole pages of what backs it. Once it returns, the guest finds zeros there.
    ///
    /// What was not discarded is told to `failed`, in parts of the runs, in no particular order; all other
    /// is done all the same. Returns the bytes that were discarded.
    fn discard(&mut self, runs: &[Span], failed: &mut dyn FnMut(Span, NotDiscarded)) -> u64;
}

/// Why a run was not discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotDiscarded {
    /// It does not lie in one region, or is not made of whole pages of what backs it.
    NotPages,
    /// The kernel's error number.
    Kernel(i32),
}

impl fmt::Display for NotDiscarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotPages => f.write_str("no whole pages of one region"),
            Self::Kernel(errno) => write!(f, "error {errno} of the kernel"),
        }
    }
}

/// Nothing is discarded: for a monitor that only accounts.
impl Discard for () {
    fn discard(&mut self, _runs: &[Span], _failed: &mut dyn FnMut(Span, NotDiscarded)) -> u64 {
        0
    }
}
