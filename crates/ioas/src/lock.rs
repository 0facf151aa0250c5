//! A lock that waits as the machine allows: asleep with `std`, spinning without.

#[cfg(feature = "std")]
use std::sync::PoisonError;

/// Whoever panics under the lock leaves a consistent state behind: poison says nothing here.
#[cfg(feature = "std")]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

#[cfg(feature = "std")]
impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn into_inner(self) -> T {
        let value = self.0.into_inner();
        value.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(feature = "std")]
pub(crate) type Guard<'a, T> = std::sync::MutexGuard<'a, T>;

#[cfg(not(feature = "std"))]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(spin::Mutex<T>);

#[cfg(not(feature = "std"))]
impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(spin::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.0.lock()
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

#[cfg(not(feature = "std"))]
pub(crate) type Guard<'a, T> = spin::MutexGuard<'a, T>;
