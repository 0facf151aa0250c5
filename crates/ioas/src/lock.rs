//! Locks that wait as the machine allows: asleep with `std`, [spinning](spinning) without.
//!
//! A thread that panics under a lock leaves a consistent state behind, so poisoning is ignored.

#[cfg(feature = "std")]
use core::sync::atomic::{AtomicUsize, Ordering};
#[cfg(feature = "std")]
use std::sync::{self as base, PoisonError};

#[cfg(not(feature = "std"))]
use spinning as base;

#[cfg(any(test, not(feature = "std")))]
#[cfg_attr(
    feature = "std",
    allow(dead_code, unreachable_pub, reason = "its test")
)]
pub(crate) mod spinning;

pub(crate) type Guard<'a, T> = base::MutexGuard<'a, T>;
pub(crate) type ReadGuard<'a, T> = base::RwLockReadGuard<'a, T>;
pub(crate) type WriteGuard<'a, T> = base::RwLockWriteGuard<'a, T>;

/// Guard of a lock, also of a poisoned one.
#[cfg(feature = "std")]
fn sound<T>(locked: Result<T, PoisonError<T>>) -> T {
    locked.unwrap_or_else(PoisonError::into_inner)
}

#[cfg(not(feature = "std"))]
const fn sound<T>(locked: T) -> T {
    locked
}

/// One thread at a time.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(base::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(base::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        sound(self.0.lock())
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        sound(self.0.get_mut())
    }

    pub(crate) fn into_inner(self) -> T {
        sound(self.0.into_inner())
    }
}

/// Any number of threads that read, or one that writes.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(base::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(base::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> ReadGuard<'_, T> {
        sound(self.0.read())
    }

    pub(crate) fn write(&self) -> WriteGuard<'_, T> {
        sound(self.0.write())
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        sound(self.0.get_mut())
    }
}

/// Lets other threads run for a moment.
pub(crate) fn pause() {
    #[cfg(feature = "std")]
    std::thread::sleep(core::time::Duration::from_micros(50));
    #[cfg(not(feature = "std"))]
    for _ in 0..64 {
        core::hint::spin_loop();
    }
}

/// Condition variable for threads that wait for a state under a [`Mutex`].
#[derive(Debug, Default)]
pub(crate) struct Changed {
    #[cfg(feature = "std")]
    condvar: std::sync::Condvar,
    /// Number of waiting threads; changed under the lock. To wake none is a system call, too.
    #[cfg(feature = "std")]
    waiting: AtomicUsize,
}

impl Changed {
    /// Releases the lock until the state may have changed.
    #[cfg(feature = "std")]
    pub(crate) fn wait<'a, T>(&self, _mutex: &'a Mutex<T>, guard: Guard<'a, T>) -> Guard<'a, T> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = sound(self.condvar.wait(guard));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// The state has changed, under the lock that is held or was.
    #[cfg(feature = "std")]
    pub(crate) fn notify(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.condvar.notify_all();
        }
    }

    /// Releases the lock for a moment.
    #[cfg(not(feature = "std"))]
    pub(crate) fn wait<'a, T>(&self, mutex: &'a Mutex<T>, guard: Guard<'a, T>) -> Guard<'a, T> {
        drop(guard);
        pause();
        mutex.lock()
    }

    /// Does nothing: a waiting thread looks again by itself.
    #[cfg(not(feature = "std"))]
    pub(crate) const fn notify(&self) {}
}
