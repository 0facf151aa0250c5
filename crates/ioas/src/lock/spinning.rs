//! Locks that spin, between two calls of the kernel.

use core::ops::{Deref, DerefMut};

/// Calls of a kernel around each lock of this crate where that spins (without the feature `std`).
///
/// A lock that is taken in an interrupt handler, too, must not be held by what the handler has interrupted: `before`
/// disables interrupts of this processor, or preemption, and `after` restores what was there. Both are called on the
/// processor that takes the lock, and calls nest: the last `after` belongs to the first `before`. They take no
/// lock of this crate.
///
/// A map or unmap of an address space holds a lock from beginning to end, and while units are flushed.
#[derive(Clone, Copy, Debug)]
pub struct LockHooks {
    /// Before a lock is waited for.
    pub before: fn(),
    /// After it was released.
    pub after: fn(),
}

static HOOKS: spin::Once<LockHooks> = spin::Once::new();

impl LockHooks {
    /// Has them called from now on, before anything else of this crate is used. False if others are set already.
    pub fn set(self) -> bool {
        let mut first = false;
        HOOKS.call_once(|| {
            first = true;
            self
        });
        first
    }
}

/// Calls `after` when dropped.
#[derive(Debug)]
struct Around;

impl Around {
    fn begin() -> Self {
        if let Some(hooks) = HOOKS.get() {
            (hooks.before)();
        }
        Self
    }
}

impl Drop for Around {
    fn drop(&mut self) {
        if let Some(hooks) = HOOKS.get() {
            (hooks.after)();
        }
    }
}

/// The guard `G` of a lock. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Hooked<G> {
    guard: G,
    _around: Around,
}

impl<G> Hooked<G> {
    fn by(lock: impl FnOnce() -> G) -> Self {
        let around = Around::begin();
        Self {
            guard: lock(),
            _around: around,
        }
    }
}

impl<G: Deref> Deref for Hooked<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Hooked<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

pub(crate) type MutexGuard<'a, T> = Hooked<spin::MutexGuard<'a, T>>;
pub(crate) type RwLockReadGuard<'a, T> = Hooked<spin::RwLockReadGuard<'a, T>>;
pub(crate) type RwLockWriteGuard<'a, T> = Hooked<spin::RwLockWriteGuard<'a, T>>;

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(spin::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(spin::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        Hooked::by(|| self.0.lock())
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(spin::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(spin::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        Hooked::by(|| self.0.read())
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        Hooked::by(|| self.0.write())
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    std::thread_local! {
        /// Locks that this thread is inside of.
        static INSIDE: Cell<u32> = const { Cell::new(0) };
    }
    static FIRST: Mutex<u32> = Mutex::new(0);
    static SECOND: RwLock<u32> = RwLock::new(0);

    fn before() {
        INSIDE.set(INSIDE.get() + 1);
        let free = INSIDE.get() != 1 || !FIRST.0.is_locked();
        assert!(free, "the lock was taken first");
    }

    fn after() {
        INSIDE.set(INSIDE.get() - 1);
        let free = INSIDE.get() != 0 || !FIRST.0.is_locked();
        assert!(free, "the lock is still held");
    }

    #[test]
    fn hooks_are_called_outside_of_locks_and_nest() {
        assert!(LockHooks { before, after }.set());
        assert!(!LockHooks { before, after }.set());
        let mut first = FIRST.lock();
        assert_eq!(INSIDE.get(), 1);
        *first += 1;
        let inner = SECOND.read();
        assert_eq!(INSIDE.get(), 2);
        *first += *inner;
        drop(inner);
        assert_eq!(INSIDE.get(), 1);
        drop(first);
        assert_eq!(INSIDE.get(), 0);
        *SECOND.write() += 2;
        assert_eq!(INSIDE.get(), 0);
        assert_eq!((*FIRST.lock(), *SECOND.read()), (1, 2));
    }
}
