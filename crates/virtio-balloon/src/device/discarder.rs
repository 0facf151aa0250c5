//! Giving memory back to the machine: the seam.

use core::fmt;

use crate::map::{MemoryMap, Part};

/// Gives what lies behind a guest's memory back to the machine, of which a map has `T` for each region.
pub trait Discarder<T = ()> {
    /// Discards `parts` of `map`: ascending, not overlapping, and made of whole pages of what backs
    /// their region. Once it returns, the guest finds zeros there.
    ///
    /// Failures are reported to `failed`, in pieces of the parts, in no particular order; all other memory
    /// is discarded all the same. Returns the bytes that were discarded.
    fn discard(
        &mut self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
        failed: &mut dyn FnMut(Part, NotDiscarded),
    ) -> u64;

    /// True when what was discarded in the region of this number, and not reported to `failed`, is certain to read
    /// as zeros when the guest has it again: it is what a guest learns that is to know which pages are initialized
    /// ([`init_on_inflate`](super::BalloonSettings::init_on_inflate)). False where a backing may keep or bring back
    /// data. By default it is not certain.
    fn gives_zeros(&self, _map: MemoryMap<'_, T>, _region: usize) -> bool {
        false
    }
}

/// Why a part was not discarded.
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
impl<T> Discarder<T> for () {
    fn discard(
        &mut self,
        _: MemoryMap<'_, T>,
        _: &[Part],
        _: &mut dyn FnMut(Part, NotDiscarded),
    ) -> u64 {
        0
    }
}
