//! Parts of areas that are let go of for a while, and memory that somebody in this process holds.

use std::ffi::{CString, c_char, c_void};

use dmaspace::ioas::{ExternalPin, WhenUnmapped};
use dmaspace::iopt::Interruption;
use dmaspace::runs;

use crate::boundary::{Output, end, guarded, input, values};
use crate::space::Space;
use crate::status::{Failure, Result, Status, text};
use crate::translation::{Span, prot};

/// Is told of a range that was not released, or not restored, and why: the code, and the sentence, which is
/// this library's and gone when the callback returns. It must not use the address space.
pub type Kept = Option<
    unsafe extern "C" fn(context: *mut c_void, range: Span, why: Status, sentence: *const c_char),
>;

/// Whether translations may be missing for a moment.
pub(crate) const fn interruption(may_interrupt: bool) -> Interruption {
    match may_interrupt {
        true => Interruption::Allowed,
        false => Interruption::Refused,
    }
}

/// Tells the caller of every failure, and keeps the first for the answer.
struct Failures {
    kept: Kept,
    context: *mut c_void,
    first: Option<Failure>,
}

impl Failures {
    const fn new(kept: Kept, context: *mut c_void) -> Self {
        Self {
            kept,
            context,
            first: None,
        }
    }

    fn add(&mut self, range: runs::Span<runs::Iova>, failure: Failure) {
        if let Some(kept) = self.kept {
            let sentence: CString = text(&failure.message);
            // SAFETY: the caller's callback, with its context; the sentence is there until it returns.
            unsafe {
                kept(
                    self.context,
                    range.into(),
                    failure.status,
                    sentence.as_ptr(),
                )
            }
        }
        self.first.get_or_insert(failure);
    }

    fn end(self) -> Result<()> {
        self.first.map_or(Ok(()), Err)
    }
}

/// Lets go of `count` ranges, each of which areas cover, as a balloon does: unmapped, flushed, unpinned,
/// exactly that, until they are restored or unmapped. Devices go on reaching all the rest. Their charge is
/// kept, so that they can come back. What devices have written there is discarded. `*unpinned` is how many
/// bytes were unpinned by this library, 0 where the kernel unpins; `unpinned` may be NULL.
///
/// A range that cannot be cut out without a moment in which the rest is missing is kept, unless
/// `may_interrupt` allows that.
///
/// Fails as the first range that was not released did: with ARGUMENT, BUSY or SYSTEM, CUTS, NOT_MAPPED, RANGE,
/// OVER_LIMIT or TABLE_MEMORY, and those ranges are as they were; with FLUSH, and they may be pinned twice
/// until `dmaspace_space_flush` succeeds; or with PIN, and they are released, but perhaps pinned. `kept` is
/// told of each of them, if it is not NULL. All others are released, and `*unpinned` is filled in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_release(
    space: *const Space,
    ranges: *const Span,
    count: usize,
    may_interrupt: bool,
    kept: Kept,
    context: *mut c_void,
    unpinned: *mut u64,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, ranges, output) = unsafe {
            (
                input(space, "space")?,
                values(ranges, count, "ranges")?,
                Output::wanted(unpinned, "unpinned")?,
            )
        };
        let ranges: Vec<runs::Span<runs::Iova>> =
            ranges.iter().map(|range| (*range).into()).collect();
        let mut failures = Failures::new(kept, context);
        let bytes = space.with(|opened| {
            let mut failed = |range, cause| failures.add(range, Failure::from(cause));
            let how = interruption(may_interrupt);
            Ok(opened.space.release(&ranges, how, &mut failed, &mut ()))
        })?;
        if let Some(output) = output {
            output.put(bytes);
        }
        failures.end()
    })
}

/// Takes back what was released in `count` ranges: pinned and mapped as before. Their ends need not be those
/// that were released; what is not released stays as it is.
///
/// Fails as the first stretch that stays released did, with ARGUMENT, BUSY, RANGE, PIN, OVER_LIMIT, SYSTEM,
/// TOO_MANY or FLUSH. `kept` is told of each of them, if it is not NULL. All others are back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_restore(
    space: *const Space,
    ranges: *const Span,
    count: usize,
    may_interrupt: bool,
    kept: Kept,
    context: *mut c_void,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, ranges) = unsafe { (input(space, "space")?, values(ranges, count, "ranges")?) };
        let ranges: Vec<runs::Span<runs::Iova>> =
            ranges.iter().map(|range| (*range).into()).collect();
        let mut failures = Failures::new(kept, context);
        space.with(|opened| {
            let mut failed = |range, cause| failures.add(range, Failure::from(cause));
            let how = interruption(may_interrupt);
            opened.space.restore(&ranges, how, &mut failed, &mut ());
            Ok(())
        })?;
        failures.end()
    })
}

/// Memory behind device addresses that somebody in this process holds, as an emulated device does.
#[derive(Debug)]
pub struct Pin {
    /// Dropped, it lets go.
    _held: ExternalPin,
}

/// Holds the memory behind a range of device addresses: pinned, and charged once, until
/// `dmaspace_pin_destroy`. `prot` is what is done with it, DMASPACE_READ or DMASPACE_WRITE too; what may be
/// written counts as written at each harvest. With `keeps` it stays pinned when its areas are unmapped;
/// otherwise unmapping them answers BUSY as long as it is held.
///
/// `*pin` is the caller's, to be destroyed by `dmaspace_pin_destroy`.
///
/// Fails with ARGUMENT, RANGE, NOT_MAPPED, PROT, OVER_LIMIT, PIN or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_pin(
    space: *const Space,
    iova: u64,
    len: u64,
    prot: u32,
    keeps: bool,
    pin: *mut *mut Pin,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, output) = unsafe { (input(space, "space")?, Output::new(pin, "pin")?) };
        let (range, prot) = (runs::Span::new(iova, len), self::prot(prot)?);
        let when = match keeps {
            true => WhenUnmapped::Keeps,
            false => WhenUnmapped::Drops,
        };
        let held = space.with(|opened| Ok(opened.space.pin(range, prot, when)?))?;
        output.put(Box::into_raw(Box::new(Pin { _held: held })));
        Ok(())
    })
}

/// Lets go of the memory, and frees the handle. NULL is fine.
///
/// Fails with ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_pin_destroy(pin: *mut Pin) -> Status {
    guarded(|| {
        // SAFETY: the handle is the caller's, who says that nobody uses it any more.
        unsafe { end(pin, "pin", |_| Ok(())) }
    })
}
