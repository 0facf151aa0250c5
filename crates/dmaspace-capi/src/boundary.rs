//! The boundary: pointers become references here, and panics become a code.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Mutex, MutexGuard, TryLockError};

use crate::status::{Failure, Result, Status, note};

/// Does the work of a function that C has called. What it returns, or a panic, becomes the answer.
pub fn guarded(work: impl FnOnce() -> std::result::Result<(), Failure>) -> Status {
    // Whatever a panic leaves half-way lies behind a lock that it has poisoned.
    let outcome = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().copied();
        let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let said = said.unwrap_or("without a word");
        Err(Failure::new(
            Status::Panic,
            format!("a bug of dmaspace: {said}"),
        ))
    });
    match outcome {
        Ok(()) => Status::Ok,
        Err(failure) => {
            note(&failure.message);
            failure.status
        }
    }
}

/// A pointer that is not NULL and is aligned; `what` is its name in the header.
fn checked<T>(pointer: *const T, what: &str) -> Result<NonNull<T>> {
    let aligned = NonNull::new(pointer.cast_mut()).ok_or_else(|| {
        let message = format!("{what} is NULL");
        Failure::new(Status::Argument, message)
    })?;
    if pointer.is_aligned() {
        return Ok(aligned);
    }
    let (at, to) = (pointer.addr(), align_of::<T>());
    let message = format!("{what} is {at:#x}, not aligned to {to} bytes");
    Err(Failure::new(Status::Argument, message))
}

/// What `pointer` leads to.
///
/// # Safety
///
/// If it is not NULL and is aligned, it leads to a `T` that stays, and that nobody changes, for `'a`.
pub(crate) unsafe fn input<'a, T>(pointer: *const T, what: &str) -> Result<&'a T> {
    let pointer = checked(pointer, what)?;
    // SAFETY: aligned and not NULL; the rest is the caller's promise.
    Ok(unsafe { pointer.as_ref() })
}

/// A place for a result.
pub(crate) struct Output<T>(NonNull<T>);

impl<T> Output<T> {
    /// The place that `pointer` leads to.
    ///
    /// # Safety
    ///
    /// If it is not NULL and is aligned, a `T` may be written there for as long as this value lives.
    pub(crate) unsafe fn new(pointer: *mut T, what: &str) -> Result<Self> {
        checked(pointer, what).map(Self)
    }

    /// The same, of a pointer that may be NULL.
    ///
    /// # Safety
    ///
    /// As for [`new`](Self::new).
    pub(crate) unsafe fn wanted(pointer: *mut T, what: &str) -> Result<Option<Self>> {
        match pointer.is_null() {
            true => Ok(None),
            false => checked(pointer, what).map(|place| Some(Self(place))),
        }
    }

    /// Fills it in; what was there is not looked at.
    pub(crate) fn put(self, value: T) {
        // SAFETY: aligned and not NULL; that it may be written to was promised to `new`.
        unsafe { self.0.write(value) }
    }
}

/// The `count` values from `pointer` on, which may be NULL if there are none.
///
/// # Safety
///
/// If it is not NULL and is aligned, it leads to `count` values that stay, and that nobody changes, for
/// `'a`.
pub(crate) unsafe fn values<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    let pointer = checked(pointer, what)?;
    // The most that an object in memory can have.
    let bytes = count.checked_mul(size_of::<T>());
    if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        let message = format!("{what} cannot have {count} elements");
        return Err(Failure::new(Status::Argument, message));
    }
    // SAFETY: aligned, not NULL and no longer than an object can be; the rest is the caller's promise.
    Ok(unsafe { slice::from_raw_parts(pointer.as_ptr(), count) })
}

/// The text that `pointer` leads to.
///
/// # Safety
///
/// If it is not NULL, it leads to bytes that end with a NUL, and that stay and do not change for `'a`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str> {
    let pointer = checked(pointer, what)?;
    // SAFETY: not NULL; the rest is the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer.as_ptr()) };
    text.to_str()
        .map_err(|_| Failure::new(Status::Argument, format!("{what} is no UTF-8")))
}

/// A descriptor of our own of the file that `fd` is open for; `None` of a negative one.
///
/// # Safety
///
/// If there is such an open descriptor, it stays open during this call.
pub(crate) unsafe fn file(fd: c_int, what: &str) -> Result<Option<OwnedFd>> {
    if fd < 0 {
        return Ok(None);
    }
    // SAFETY: not -1; the rest is the caller's promise, and where it is not open the kernel says so.
    let file = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
    let refused = |cause| Failure::new(Status::System, format!("{what} {fd}: {cause}"));
    file.map(Some).map_err(refused)
}

/// The same, where there must be one.
///
/// # Safety
///
/// As for [`file`].
pub(crate) unsafe fn open_file(fd: c_int, what: &str) -> Result<OwnedFd> {
    // SAFETY: the caller's promise.
    let file = unsafe { file(fd, what) }?;
    file.ok_or_else(|| Failure::new(Status::Argument, format!("{what} is {fd}, no open file")))
}

/// What a handle holds, for this call alone.
pub(crate) fn exclusive<'a, T>(handle: &'a Mutex<T>, what: &str) -> Result<MutexGuard<'a, T>> {
    handle.try_lock().map_err(|refused| match refused {
        TryLockError::WouldBlock => Failure::new(Status::Busy, format!("{what} is in use")),
        TryLockError::Poisoned(_) => {
            let message = format!("{what} was left half-way by an earlier panic");
            Failure::new(Status::Panic, message)
        }
    })
}

/// Ends a handle that `Box` made: `end` has the last look, and the handle is freed if it agrees. NULL is
/// no handle, and fine.
///
/// # Safety
///
/// A `handle` that is not NULL came from [`Box::into_raw`], was not ended before, and nobody uses it from
/// now on, unless this refuses.
pub(crate) unsafe fn end<T>(
    handle: *mut T,
    what: &str,
    look: impl FnOnce(&T) -> Result<()>,
) -> Result<()> {
    if handle.is_null() {
        return Ok(());
    }
    let handle = checked(handle, what)?;
    // SAFETY: aligned and not NULL, and the caller says that it is a handle that is still there.
    look(unsafe { handle.as_ref() })?;
    // SAFETY: as above; it came from `Box::into_raw`, and nobody uses it any more.
    drop(unsafe { Box::from_raw(handle.as_ptr()) });
    Ok(())
}
