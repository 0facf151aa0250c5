//! The kernel counts what is pinned for the whole process, of which all unit tests are threads where the harness
//! runs them: those that compare its counters are alone, those that pin run beside each other.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static COUNTERS: RwLock<()> = RwLock::new(());

/// For a test that compares the kernel's counters.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    COUNTERS.write().unwrap_or_else(PoisonError::into_inner)
}

/// For as long as something is pinned. A thread that has one takes no second one.
pub(crate) fn pinning() -> RwLockReadGuard<'static, ()> {
    COUNTERS.read().unwrap_or_else(PoisonError::into_inner)
}
