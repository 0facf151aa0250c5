//! A barrier of which one side pays: the rare one has all threads of the process execute it.
//!
//! Two threads each store to a place of their own and then read the other's. With [`fence_light`]
//! between the store and the read on one side, and [`fence_heavy`] on the other, at least one of them
//! sees the other's store. The light one is for the compiler alone where Linux's `membarrier` stands
//! behind the heavy one; otherwise both are sequentially consistent fences.
//!
//! # The choice
//!
//! It is made once in a process, and before a heavy fence is relied on: by the first
//! [`Threads`](super::Threads), or by the first heavy fence. Until then a light fence is a fence, so
//! guards taken before are seen as well. Fences stay where
//!
//! * the system is not Linux, or `membarrier` cannot be registered (Linux before 4.14, a filter of
//!   system calls);
//! * the program asks for them: [`use_fences`];
//! * the build is for Miri, or with `--cfg dmaspace_fences`, as `cargo xtask sanitize` does: such tools
//!   know nothing of `membarrier`;
//! * the feature `std` is off.
//!
//! # A filter that comes later
//!
//! A filter that is installed after the choice may refuse `membarrier`. A program with such filters
//! allows the call, or asks for fences at its start. If it does neither, the first heavy fence that is
//! refused says so, and has light ones be fences from then on. Light fences that were executed before
//! are done with when the stores in front of them have left their processors' store buffers. No processor
//! tells when, but it is a matter of microseconds, and an interrupt is enough; heavy fences go on to say
//! no for [a tenth of a second](GRACE).

use core::sync::atomic::{Ordering, compiler_fence, fence};

/// See [`fence_heavy`].
#[cfg(feature = "std")]
const GRACE: core::time::Duration = core::time::Duration::from_millis(100);

/// The side of the many: between a store that [`fence_heavy`]'s caller looks for, and reads of what that
/// one stored before.
#[inline(always)]
pub fn fence_light() {
    compiler_fence(Ordering::SeqCst);
    if !choice::is_asymmetric() {
        fence(Ordering::SeqCst);
    }
}

/// The side of the few: between stores, and looking for those who executed [`fence_light`].
///
/// False when the system refuses the call that it has granted before; then nothing may be concluded from a
/// look. It grants it again within a tenth of a second. That is never the case in a process that
/// [uses fences](use_fences).
///
/// As much as a system call and an interrupt of every processor on which the process runs; so once a
/// batch.
#[must_use = "without a barrier nothing may be concluded"]
pub fn fence_heavy() -> bool {
    fence(Ordering::SeqCst);
    choice::heavy()
}

/// Has this process use fences on both sides. To be called at its start, where a filter will refuse
/// `membarrier` later, or where the threads must not be interrupted. False when it is too late: the
/// choice is made.
pub fn use_fences() -> bool {
    choice::use_fences()
}

#[cfg(feature = "std")]
pub(super) use choice::{decide, is_asymmetric};

#[cfg(feature = "std")]
mod choice {
    use core::sync::atomic::{AtomicU8, Ordering};
    use std::sync::OnceLock;
    use std::time::Instant;

    use super::GRACE;
    #[cfg(all(target_os = "linux", not(miri), not(dmaspace_fences)))]
    use crate::reclaim::membarrier;

    static CHOICE: AtomicU8 = AtomicU8::new(OPEN);
    /// When `membarrier` was refused, after it had been granted.
    static REFUSED_AT: OnceLock<Instant> = OnceLock::new();

    const OPEN: u8 = 0;
    const ASYMMETRIC: u8 = 1;
    const FENCES: u8 = 2;
    /// Fences, after it had been [`ASYMMETRIC`].
    const REFUSED: u8 = 3;

    #[inline(always)]
    pub(in crate::reclaim) fn is_asymmetric() -> bool {
        CHOICE.load(Ordering::Relaxed) == ASYMMETRIC
    }

    /// Makes the choice, if it is not made yet. Not from an older value: the exchange sees the latest.
    pub(in crate::reclaim) fn decide() -> u8 {
        match CHOICE.load(Ordering::Acquire) {
            OPEN if membarrier::register() => choose(ASYMMETRIC),
            OPEN => choose(FENCES),
            made => made,
        }
    }

    fn choose(new: u8) -> u8 {
        let made = CHOICE.compare_exchange(OPEN, new, Ordering::AcqRel, Ordering::Acquire);
        made.map_or_else(|made| made, |_| new)
    }

    pub(super) fn use_fences() -> bool {
        choose(FENCES) == FENCES
    }

    pub(super) fn heavy() -> bool {
        match decide() {
            FENCES => true,
            ASYMMETRIC if membarrier::execute() => true,
            _ => after_refusal(),
        }
    }

    #[cold]
    fn after_refusal() -> bool {
        CHOICE.store(REFUSED, Ordering::SeqCst);
        REFUSED_AT.get_or_init(Instant::now).elapsed() >= GRACE
    }

    /// There is none.
    #[cfg(not(all(target_os = "linux", not(miri), not(dmaspace_fences))))]
    mod membarrier {
        pub(super) fn register() -> bool {
            false
        }

        pub(super) fn execute() -> bool {
            false
        }
    }
}

#[cfg(not(feature = "std"))]
mod choice {
    #[inline(always)]
    pub(in crate::reclaim) fn is_asymmetric() -> bool {
        false
    }

    pub(super) fn use_fences() -> bool {
        true
    }

    pub(super) fn heavy() -> bool {
        true
    }
}
