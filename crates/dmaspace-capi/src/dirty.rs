//! What devices have written to.

use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use dmaspace::ioas::Tracking;
use dmaspace::iopt::Pending;
use dmaspace::runs;

use crate::boundary::{Output, end, exclusive, guarded, input};
use crate::parts::interruption;
use crate::space::Space;
use crate::status::{Failure, Status};
use crate::translation::Span;

/// What devices have written to in a range of device addresses and nobody has taken care of yet, a bit for
/// each page. It may be used with several address spaces in turn.
#[derive(Debug)]
pub struct Dirty(Mutex<Pending<Vec<u64>>>);

/// What a harvest has found.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Harvested {
    /// Bytes of leaves or pages that were dirty.
    pub bytes: u64,
    /// Some device writes without leaving a trace: all that it may write to counts as written to.
    pub blind: bool,
}

/// Is told of a stretch of device addresses that was written to. It returns 0 when that is taken care of;
/// anything else ends the call, and the rest stays pending. It must not use the address space or the
/// bitmap.
pub type Written = Option<unsafe extern "C" fn(context: *mut c_void, range: Span) -> c_int>;

/// The most words that a bitmap can have, 1 GiB: bits for 32 TiB in pages of 4 KiB.
const MOST_WORDS: u64 = 1 << 27;

/// Makes a bitmap for `len` bytes of device addresses from `iova` on, with a bit for each `page` bytes, a
/// power of two. Nothing is pending in it.
///
/// `*dirty` is the caller's, to be destroyed by `dmaspace_dirty_destroy`.
///
/// Fails with ARGUMENT, RANGE or SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_dirty_new(
    iova: u64,
    len: u64,
    page: u64,
    dirty: *mut *mut Dirty,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let output = unsafe { Output::new(dirty, "dirty") }?;
        // One more page than there are whole ones at either end.
        let words = len.checked_div(page).map_or(0, |pages| pages / 64 + 2);
        if words > MOST_WORDS {
            let message = format!("a bitmap of {words} words: {MOST_WORDS} are the most");
            return Err(Failure::new(Status::Argument, message));
        }
        let count = words as usize;
        let mut words = Vec::new();
        words
            .try_reserve_exact(count)
            .map_err(|cause| Failure::of(Status::System, &cause))?;
        words.resize(count, 0);
        let pending = Pending::new(words, runs::Span::new(iova, len), page)?;
        output.put(Box::into_raw(Box::new(Dirty(Mutex::new(pending)))));
        Ok(())
    })
}

/// Frees the bitmap; what is pending in it is discarded. NULL is fine.
///
/// Fails with ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_dirty_destroy(dirty: *mut Dirty) -> Status {
    guarded(|| {
        // SAFETY: the handle is the caller's, who says that nobody uses it any more.
        unsafe { end(dirty, "dirty", |_| Ok(())) }
    })
}

/// Begins to track what devices write to; what they wrote to before is discarded. Leaves of more than
/// `largest_leaf` bytes are split for it, where `may_interrupt` allows it also with moments in which a
/// translation is missing; 0: leaves stay as they are, and are dirty as a whole.
///
/// Fails with ARGUMENT, RANGE, BUSY, CUTS, TABLE_MEMORY, FLUSH or SYSTEM, or with UNSUPPORTED for a
/// `largest_leaf` over mappings of the kernel. Nothing is tracked then; leaves may be smaller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_track_dirty(
    space: *const Space,
    largest_leaf: u64,
    may_interrupt: bool,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        let tracking = Tracking {
            leaf: (largest_leaf > 0).then_some(largest_leaf),
            interruption: interruption(may_interrupt),
        };
        space.with(|opened| Ok(opened.space.track_dirty(tracking)?))
    })
}

/// Ends that; what was not harvested is discarded.
///
/// Fails with ARGUMENT or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_untrack_dirty(space: *const Space) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        space.with(|opened| {
            opened.space.untrack_dirty();
            Ok(())
        })
    })
}

/// Moves what devices have written to in the range of `dirty` into it, has every unit invalidate what it holds
/// of these pages, and tells `each` of all that is pending, in order: what is written from then on is found
/// by the next harvest. `*found` is what this one has found; `found` may be NULL.
///
/// Fails with ARGUMENT or BUSY; with SYSTEM, OTHER or FLUSH, and what was found is pending still, and told
/// by a later harvest; with OTHER too when `each` has ended it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_harvest_dirty(
    space: *const Space,
    dirty: *const Dirty,
    each: Written,
    context: *mut c_void,
    found: *mut Harvested,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, dirty, output) = unsafe {
            (
                input(space, "space")?,
                input(dirty, "dirty")?,
                Output::wanted(found, "found")?,
            )
        };
        let each = each.ok_or_else(|| Failure::new(Status::Argument, "each is NULL"))?;
        let mut pending = exclusive(&dirty.0, "dirty")?;
        let harvested = space.with(|opened| {
            let harvested = opened.space.harvest(&mut pending)?;
            let mut shown = opened.space.show(&mut pending)?;
            let runs: Vec<runs::Span<runs::Iova>> = shown.runs().collect();
            for run in runs {
                // SAFETY: the caller's callback, with its context.
                let code = unsafe { each(context, run.into()) };
                if code != 0 {
                    let message = format!("the callback has answered {code} to {run}");
                    return Err(Failure::new(Status::Other, message));
                }
                shown.acknowledge_part(run);
            }
            Ok(harvested)
        })?;
        if let Some(output) = output {
            let (bytes, blind) = (harvested.bytes, harvested.blind);
            output.put(Harvested { bytes, blind });
        }
        Ok(())
    })
}
