//! Parts of areas that go for a while, pages that somebody holds, and what devices have written to.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use dmaspace_capi::*;

use crate::space::{IOVA, PAGE, RW, Rig};
use crate::{done, said};

/// What a callback was told of ranges.
#[derive(Default)]
struct Ranges {
    kept: Vec<(Span, Status, String)>,
    written: Vec<Span>,
    answer: c_int,
}

impl Ranges {
    fn context(&mut self) -> *mut c_void {
        (&raw mut *self).cast()
    }
}

/// # Safety
///
/// `context` is that of [`Ranges`], and `sentence` was lent by the library.
unsafe extern "C" fn kept(context: *mut c_void, range: Span, why: Status, sentence: *const c_char) {
    // SAFETY: the caller's promise.
    let (ranges, text) = unsafe { (&mut *context.cast::<Ranges>(), CStr::from_ptr(sentence)) };
    let text = text.to_str().unwrap().to_owned();
    ranges.kept.push((range, why, text));
}

/// # Safety
///
/// `context` is that of [`Ranges`].
unsafe extern "C" fn written(context: *mut c_void, range: Span) -> c_int {
    // SAFETY: the caller's promise.
    let ranges = unsafe { &mut *context.cast::<Ranges>() };
    ranges.written.push(range);
    ranges.answer
}

const fn span(start: u64, len: u64) -> Span {
    Span { start, len }
}

#[test]
fn parts_are_unpinned_and_come_back_and_each_that_stays_is_reported() {
    let rig = Rig::new();
    let mut told = Ranges::default();
    done(rig.map(IOVA, 0, 4 * PAGE, RW));
    let ranges = [span(IOVA + PAGE, PAGE), span(IOVA + 8 * PAGE, PAGE)];
    let mut unpinned = 0;
    let mut leaf = Leaf::default();
    // SAFETY: the handles are there, and the rest is lent for the calls.
    unsafe {
        let status = dmaspace_space_release(
            rig.space,
            ranges.as_ptr(),
            2,
            false,
            Some(kept),
            told.context(),
            &raw mut unpinned,
        );
        let [(range, why, text)] = &told.kept[..] else {
            panic!("one stays: {:?}", told.kept);
        };
        assert_eq!((*range, *why), (ranges[1], Status::NotMapped));
        assert!(text.ends_with("is in no area"), "{text}");
        assert_eq!((status, said(), unpinned), (*why, text.clone(), PAGE));
        let at = |iova, leaf| dmaspace_space_translate(rig.space, iova, leaf);
        assert_eq!(at(IOVA + PAGE, &raw mut leaf), Status::NotMapped);
        done(at(IOVA, &raw mut leaf));
        done(at(IOVA + 2 * PAGE, &raw mut leaf));
        assert_eq!(rig.charged(), 4 * PAGE, "the charge is kept");

        let restore = |ranges: &[Span], told: &mut Ranges| {
            let (kept, context) = (Some(kept as _), told.context());
            dmaspace_space_restore(
                rig.space,
                ranges.as_ptr(),
                ranges.len(),
                false,
                kept,
                context,
            )
        };
        told.kept.clear();
        assert_eq!(
            restore(&[span(u64::MAX, 2)], &mut told),
            Status::Range,
            "{}",
            said()
        );
        assert_eq!(told.kept.len(), 1);
        done(restore(&ranges[..1], &mut told));
        done(at(IOVA + PAGE, &raw mut leaf));
        assert_eq!(leaf.prot, RW);
        // No ranges, and nobody who is told.
        let none = ptr::null_mut();
        done(dmaspace_space_release(
            rig.space,
            ptr::null(),
            0,
            false,
            None,
            none,
            ptr::null_mut(),
        ));
    }
    assert_eq!(rig.unmap(IOVA, 4 * PAGE), (Status::Ok, 4 * PAGE));
    rig.end();
}

#[test]
fn what_is_held_stays_pinned_and_keeps_its_area_if_it_says_so() {
    let rig = Rig::new();
    done(rig.map(IOVA, 0, 4 * PAGE, DMASPACE_READ));
    let (mut first, mut second) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the handles are there, and the rest is lent for the calls.
    unsafe {
        let status = dmaspace_space_pin(rig.space, IOVA, PAGE, RW, false, &raw mut first);
        assert_eq!(status, Status::Prot, "{}", said());
        let status = dmaspace_space_pin(rig.space, 0, PAGE, DMASPACE_READ, false, &raw mut first);
        assert_eq!(status, Status::NotMapped, "{}", said());
        assert!(first.is_null());
        done(dmaspace_space_pin(
            rig.space,
            IOVA,
            PAGE,
            DMASPACE_READ,
            false,
            &raw mut first,
        ));
        assert_eq!(rig.unmap(IOVA, 4 * PAGE).0, Status::Busy);
        assert!(
            said().ends_with("is held by a user who does not let go"),
            "{}",
            said()
        );
        done(dmaspace_pin_destroy(first));
        done(dmaspace_space_pin(
            rig.space,
            IOVA,
            PAGE,
            DMASPACE_READ,
            true,
            &raw mut second,
        ));
        assert_eq!(rig.unmap(IOVA, 4 * PAGE), (Status::Ok, 3 * PAGE));
        assert_eq!(rig.charged(), PAGE);
        assert_eq!(dmaspace_memory_destroy(rig.memory), Status::Busy);
        done(dmaspace_pin_destroy(second));
        done(dmaspace_pin_destroy(ptr::null_mut()));
    }
    assert_eq!(rig.charged(), 0);
    rig.end();
}

#[test]
fn what_is_written_is_reported_until_it_is_taken_care_of() {
    let rig = Rig::new();
    let mut told = Ranges::default();
    done(rig.map(IOVA, 0, 2 * PAGE, RW));
    done(rig.map(IOVA + 4 * PAGE, 0, 2 * PAGE, DMASPACE_READ));
    let mut dirty = ptr::null_mut();
    // SAFETY: the handles are there, and the rest is lent for the calls.
    unsafe {
        for (len, page, right) in [
            (0, PAGE, Status::Range),
            (PAGE, 0, Status::Argument),
            (PAGE, 3, Status::Argument),
            (u64::MAX, 1, Status::Argument),
        ] {
            let status = dmaspace_dirty_new(0, len, page, &raw mut dirty);
            assert_eq!((status, dirty.is_null()), (right, true), "{}", said());
        }
        // Neither end is a multiple of the page.
        done(dmaspace_dirty_new(IOVA - 1, 8 * PAGE, PAGE, &raw mut dirty));
        done(dmaspace_space_attach(rig.space, 5));
        done(dmaspace_space_track_dirty(rig.space, 0, false));
        let mut found = Harvested::default();
        let harvest = |told: &mut Ranges, found| {
            let context = told.context();
            dmaspace_space_harvest_dirty(rig.space, dirty, Some(written), context, found)
        };
        // The caller's unit leaves no trace: what it may write to counts.
        told.answer = 7;
        assert_eq!(harvest(&mut told, &raw mut found), Status::Other);
        assert!(
            said().starts_with("the callback has answered 7"),
            "{}",
            said()
        );
        let all = span(IOVA, 2 * PAGE);
        assert_eq!(
            (&told.written[..], found),
            (&[all][..], Harvested::default())
        );
        told.answer = 0;
        // Nothing was taken care of, so it is reported again, and the device could write until it had left.
        done(dmaspace_space_detach(rig.space, 5));
        done(harvest(&mut told, &raw mut found));
        assert_eq!(told.written, [all, all]);
        assert!(found.blind);
        done(harvest(&mut told, ptr::null_mut()));
        assert_eq!(told.written, [all, all], "it is taken care of");
        let nobody = ptr::null_mut();
        let status = dmaspace_space_harvest_dirty(rig.space, dirty, None, nobody, &raw mut found);
        assert_eq!((status, said()), (Status::Argument, "each is NULL".into()));
        done(dmaspace_space_untrack_dirty(rig.space));
        done(dmaspace_dirty_destroy(dirty));
    }
    rig.end();
}
