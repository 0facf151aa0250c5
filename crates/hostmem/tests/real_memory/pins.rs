//! Pins: charged, given back in parts and in any order, stopped, refused.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hostmem::{
    Backing, Counter, FrameSource, FramesError, HugeSize, Mapping, PinError, PinKind, Pinner, Pool,
    PopulateError, Population, UnpinError,
};
use runs::Span;

use super::*;

#[test]
fn every_backing_maps_populates_pins_and_gives_everything_back() {
    let _turn = turn();
    for backing in Backing::ALL {
        let len = small_length(backing);
        let pool = backing.huge_size().and_then(Pool::read);
        let Some(memory) = memory(backing, len) else {
            continue;
        };
        let mapping = &memory.mapping;
        assert_eq!((mapping.len(), mapping.backing()), (len, backing));
        assert_eq!(mapping.address() % backing.largest_page(), 0);
        assert_eq!(
            mapping.fd().is_some(),
            !matches!(backing, Backing::Anon4K | Backing::Thp)
        );
        match mapping.folios() {
            Ok(folios) => {
                assert_eq!(folios.huge + folios.small, len, "{backing} {folios:?}");
                match backing {
                    Backing::Anon4K => assert_eq!(folios.huge, 0),
                    Backing::Hugetlb2M | Backing::Hugetlb1G => assert_eq!(folios.huge, len),
                    Backing::Thp | Backing::Memfd => {}
                }
            }
            Err(error) => eprintln!("not run: {error}"),
        }
        match mapping.nodes() {
            Ok(nodes) => {
                assert_eq!(nodes.iter().map(|(_, bytes)| bytes).sum::<u64>(), len);
                assert!(
                    nodes.iter().all(|(node, _)| node.is_some()),
                    "{backing} {nodes:?}"
                );
            }
            Err(error) => eprintln!("not run: {error}"),
        }

        let cells = mapping.cells();
        assert_eq!(cells.len() as u64, len / 8);
        cells[cells.len() - 1].store(0x1234_5678, Ordering::Relaxed);
        if let Some(fd) = mapping.fd()
            && backing.huge_size().is_none()
        {
            let file = File::from(fd.try_clone_to_owned().unwrap());
            let mut last = [0; 8];
            file.read_exact_at(&mut last, len - 8).unwrap();
            assert_eq!(u64::from_ne_bytes(last), 0x1234_5678);
        }

        if let Some(pinner) = pinner(2 * MIB, len) {
            let before = in_use(Counter::PinnedVm);
            let pin = pinner.pin(mapping, Span::new(0, len), &mut on).unwrap();
            assert_eq!(in_use(Counter::PinnedVm) - before, len, "{backing}");
            assert_eq!((pin.bytes(), pin.charged_bytes()), (len, len));
            assert_eq!(pin.steps().buffers, len.div_ceil(pinner.piece(backing)));
            assert_eq!(pin.unpin().unwrap(), len);
            assert_reaches(Counter::PinnedVm, before);
        }
        assert_eq!(cells[cells.len() - 1].load(Ordering::Relaxed), 0x1234_5678);
        drop(memory);
        assert_eq!(backing.huge_size().and_then(Pool::read), pool, "{backing}");
    }
}

#[test]
fn mlock_is_charged_and_given_back_and_held_once() {
    let _turn = turn();
    let pinner = Pinner::mlock(2 * MIB).unwrap();
    assert_eq!(
        (pinner.kind(), pinner.counter()),
        (PinKind::Mlock, Counter::MmLockedVm)
    );
    let Memory { mapping, .. } = memory(Backing::Anon4K, 4 * MIB).unwrap();
    let before = in_use(Counter::MmLockedVm);
    let mut pin = match pinner.pin(&mapping, Span::new(0, 2 * MIB), &mut on) {
        Ok(pin) => pin,
        Err(error @ PinError::Limit { .. }) => return eprintln!("not run: {error}"),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(in_use(Counter::MmLockedVm), before + 2 * MIB);
    assert_eq!(pin.charged_bytes(), 2 * MIB);
    let twice = pinner.pin(&mapping, Span::new(2 * MIB - PAGE, 2 * PAGE), &mut on);
    assert!(
        matches!(twice, Err(PinError::AlreadyLocked { .. })),
        "{twice:?}"
    );
    let other = pinner
        .pin(&mapping, Span::new(2 * MIB, PAGE), &mut on)
        .unwrap();

    pin.release(Span::new(PAGE, PAGE)).unwrap();
    assert_eq!(in_use(Counter::MmLockedVm), before + 2 * MIB);
    assert_eq!(
        pin.parts(),
        [Span::new(0, PAGE), Span::new(2 * PAGE, 2 * MIB - 2 * PAGE)]
    );
    let again = pinner
        .pin(&mapping, Span::new(PAGE, PAGE), &mut on)
        .unwrap();
    drop((pin, again, other));
    assert_eq!(in_use(Counter::MmLockedVm), before);
}

#[test]
fn a_part_is_given_back_and_the_rest_stays_pinned() {
    let _turn = turn();
    for backing in [Backing::Anon4K, Backing::Hugetlb2M] {
        let unit = backing.page();
        let len = 8 * MIB;
        let Some(pinner) = pinner(4 * MIB, 2 * len) else {
            return;
        };
        let Some(Memory { mapping, _pool }) = memory(backing, len) else {
            continue;
        };
        let before = in_use(Counter::PinnedVm);
        let mut pin = pinner.pin(&mapping, Span::new(0, len), &mut on).unwrap();
        let source = if is_real(&mapping) {
            FrameSource::Pagemap
        } else {
            FrameSource::Synthetic { seed: 3 }
        };
        let (all, _) = runs_of(&pin, Span::new(0, len), source, 7);

        // The end of the first piece and the beginning of the second.
        let hole = Span::new(4 * MIB - unit, 2 * unit);
        pin.release(hole).unwrap();
        assert_reaches(Counter::PinnedVm, before + len - hole.len);
        assert_eq!(pin.bytes(), len - hole.len);
        assert_eq!(
            pin.parts(),
            [
                Span::new(0, hole.start),
                Span::new(hole.start + hole.len, hole.start)
            ]
        );
        let rest = Span::new(hole.start + hole.len, hole.start);
        let (runs, _) = runs_of(&pin, rest, source, 7);
        assert_eq!(
            pages_of(&runs),
            pages_of(&all)[((rest.start) / PAGE) as usize..]
        );

        for (part, offset) in [
            (hole, hole.start),
            (Span::new(0, len), hole.start),
            (Span::new(hole.start - unit, 2 * unit), hole.start),
            (Span::new(len, PAGE), len),
            (Span::new(5, PAGE), 5),
            (Span::new(PAGE, 0), PAGE),
        ] {
            match pin.release(part) {
                Err(UnpinError::NotPinned { offset: named, .. }) => assert_eq!(named, offset),
                result => panic!("{part}: {result:?}"),
            }
            match pin.runs(part, source) {
                Err(FramesError::NotPinned { offset: named }) => assert_eq!(named, offset),
                result => panic!("{part}: {result:?}"),
            }
        }
        assert_eq!(pin.bytes(), len - hole.len);

        // From the middle of one piece, so that two parts of it stay.
        if backing == Backing::Anon4K {
            pin.release(Span::new(MIB, PAGE)).unwrap();
            assert_reaches(Counter::PinnedVm, before + len - hole.len - PAGE);
            assert_eq!(pin.parts().len(), 3);
        }
        drop(pin);
        assert_reaches(Counter::PinnedVm, before);
    }
}

#[test]
fn releasing_in_any_order_keeps_the_kernel_in_step() {
    let _turn = turn();
    let pages = 512;
    let Some(pinner) = pinner(2 * MIB, 2 * pages * PAGE) else {
        return;
    };
    let Memory { mapping, .. } = memory(Backing::Anon4K, pages * PAGE).unwrap();
    let before = in_use(Counter::PinnedVm);
    let mut pin = pinner
        .pin(&mapping, Span::new(0, pages * PAGE), &mut on)
        .unwrap();
    let mut pinned = vec![true; pages as usize];
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..200 {
        let start = random.u64(..pages);
        let count = random.u64(1..=6).min(pages - start);
        let part = &mut pinned[start as usize..(start + count) as usize];
        let result = pin.release(Span::new(start * PAGE, count * PAGE));
        assert_eq!(
            result.is_ok(),
            part.iter().all(|page| *page),
            "{start} {count}"
        );
        if result.is_ok() {
            part.fill(false);
        }
        let left = pinned.iter().filter(|page| **page).count() as u64 * PAGE;
        assert_eq!(pin.bytes(), left);
        assert_reaches(Counter::PinnedVm, before + left);
    }
    drop(pin);
    assert_reaches(Counter::PinnedVm, before);
}

#[test]
fn a_hole_in_the_middle_is_named_and_nothing_stays_pinned() {
    let _turn = turn();
    let len = 8 * MIB;
    let hole = 6 * MIB + 5 * PAGE;
    for pinner in [
        Pinner::probe(2 * MIB).unwrap(),
        Pinner::mlock(2 * MIB).unwrap(),
    ] {
        let counter = visible(&pinner);
        let Memory { mapping, .. } = memory(Backing::Anon4K, len).unwrap();
        let before = in_use(counter);
        let protect = |protection| {
            // SAFETY: one page of the mapping, which nothing accesses meanwhile.
            let result = unsafe {
                libc::mprotect(
                    (mapping.address() + hole) as *mut _,
                    PAGE as usize,
                    protection,
                )
            };
            assert_eq!(result, 0);
        };
        protect(libc::PROT_NONE);
        let result = pinner.pin(&mapping, Span::new(0, len), &mut on);
        protect(libc::PROT_READ | libc::PROT_WRITE);
        match result {
            Err(PinError::Refused { offset, kind, .. }) => {
                assert_eq!(kind, pinner.kind());
                if kind == PinKind::IoUring {
                    assert_eq!(offset, hole);
                }
            }
            Err(error @ PinError::Limit { .. }) => eprintln!("not run: {error}"),
            result => panic!("{result:?}"),
        }
        assert_reaches(counter, before);
        let pin = pinner.pin(&mapping, Span::new(0, 2 * MIB), &mut on);
        assert!(pin.is_ok() || !pinner.limits().privileged, "{pin:?}");
        drop(pin);
        assert_reaches(counter, before);
    }
}

#[test]
fn a_part_outside_or_inside_a_page_is_refused() {
    let _turn = turn();
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, 4 * PAGE, None).unwrap());
    let pinner = Pinner::probe(2 * MIB).unwrap();
    for part in [
        Span::new(0, 0),
        Span::new(4 * PAGE, PAGE),
        Span::new(PAGE, 4 * PAGE),
        Span::new(1, PAGE),
        Span::new(0, PAGE + 1),
        Span::new(PAGE, !(PAGE - 1)),
    ] {
        let result = pinner.pin(&mapping, part, &mut on);
        assert!(
            matches!(result, Err(PinError::BadPart { .. })),
            "{part}: {result:?}"
        );
    }
    for piece in [0, PAGE, 3 * MIB, 2 << 30] {
        assert!(Pinner::probe(piece).is_err());
    }
}

#[test]
fn stopping_in_the_middle_gives_everything_back() {
    let _turn = turn();
    let len = 256 * MIB;
    let free = Pool::read(HugeSize::TwoMiB);
    let mapping = Arc::new(Mapping::new(Backing::Thp, len, None).unwrap());
    let mut calls = 0;
    let stopped = Population::new([&*mapping])
        .workers(NonZeroUsize::MIN)
        .run(&mut |_| {
            calls += 1;
            if calls == 2 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
    match stopped {
        Err(PopulateError::Interrupted { done }) => assert_eq!(done, 128 * MIB),
        result => panic!("{result:?}"),
    }
    if let Ok(folios) = mapping.folios() {
        assert_eq!(folios.absent, 128 * MIB, "the second half was not touched");
    }
    for pinner in [
        Pinner::probe(2 * MIB).unwrap(),
        Pinner::mlock(2 * MIB).unwrap(),
    ] {
        let counter = visible(&pinner);
        let before = in_use(counter);
        let mut seen = 0;
        let result = pinner.pin(&mapping, Span::new(0, len), &mut |done| {
            seen = done;
            assert_eq!(in_use(counter), before + done);
            ControlFlow::Break(())
        });
        match result {
            Err(PinError::Interrupted { done }) => assert_eq!(done, seen),
            Err(error @ PinError::Limit { .. }) => eprintln!("not run: {error}"),
            result => panic!("{result:?}"),
        }
        assert_reaches(counter, before);
    }
    assert_eq!(Pool::read(HugeSize::TwoMiB), free);
}
