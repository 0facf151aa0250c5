//! The functions as C calls them, and C itself.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on stops"
)]

mod boundary;
mod example;
mod kernel;
mod parts;
mod space;
mod table;

use std::ffi::{CStr, c_int, c_void};

use dmaspace_capi::{Invalidation, Run, Span, Status, TableConfig, dmaspace_last_error};

/// The sentence about this thread's last failure.
fn said() -> String {
    // SAFETY: the function's answer is a text that stays until the next failure.
    let text = unsafe { CStr::from_ptr(dmaspace_last_error()) };
    text.to_str().unwrap().to_owned()
}

/// Fails with the sentence unless it is done.
#[track_caller]
fn done(status: Status) {
    assert_eq!(status, Status::Ok, "{}", said());
}

const fn config(format: &CStr) -> TableConfig {
    TableConfig {
        format: format.as_ptr(),
        max_leaf: 0,
        levels: 0,
        input_bits: 0,
        upper: false,
    }
}

/// What callbacks were told, and what they answer.
#[derive(Default)]
struct Callbacks {
    answer: c_int,
    flushed: Vec<Span>,
    leaf_levels: u32,
    released: Vec<Run>,
    devices: Vec<u32>,
}

impl Callbacks {
    fn context(&mut self) -> *mut c_void {
        (&raw mut *self).cast()
    }
}

/// # Safety
///
/// `context` is that of a [`Callbacks`], and `what` was lent by the library.
unsafe extern "C" fn flush(context: *mut c_void, what: *const Invalidation) -> c_int {
    // SAFETY: the caller's promise.
    let (told, what) = unsafe { (&mut *context.cast::<Callbacks>(), &*what) };
    if told.answer == 0 && what.count > 0 {
        // SAFETY: so many ranges are there.
        let ranges = unsafe { std::slice::from_raw_parts(what.ranges, what.count) };
        told.flushed.extend(ranges);
        told.leaf_levels |= what.leaf_levels;
    }
    told.answer
}

/// # Safety
///
/// As for [`flush`].
unsafe extern "C" fn released(context: *mut c_void, run: Run) {
    // SAFETY: the caller's promise.
    unsafe { &mut *context.cast::<Callbacks>() }
        .released
        .push(run);
}
