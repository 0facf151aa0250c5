//! Backings, pins and runs on the real memory of this machine.
//!
//! Pools of huge pages belong to the machine and `VmPin` to the process, so the tests of this
//! file take turns. What the machine or the rights of this process do not allow is said on
//! stderr ("not run: ...") and left out.

// In a test, giving up at once is right, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hostmem::{
    Backing, Counter, FrameSource, FramesError, HugeSize, Limits, MapError, Mapping, PinError,
    PinKind, Pinner, Pool, PoolError, PopulateError, RaisedPool, ReleaseError,
};
use runs::Span;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn on(_done: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn in_use(counter: Counter) -> u64 {
    Limits::in_use(counter).unwrap().known
}

/// The counter reaches `bytes`; some kernels unpin a moment later.
fn assert_reaches(counter: Counter, bytes: u64) {
    let start = Instant::now();
    while in_use(counter) != bytes && start.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(in_use(counter), bytes, "{counter}");
}

/// The counter of `/proc/self/status` that a pinner of this process raises.
fn visible(pinner: &Pinner) -> Counter {
    match pinner.kind() {
        PinKind::IoUring => Counter::PinnedVm,
        PinKind::Mlock => Counter::MmLockedVm,
    }
}

/// An io_uring pinner, and room for `bytes` under its limit.
fn pinner(piece: u64, bytes: u64) -> Option<Pinner> {
    let pinner = Pinner::probe(piece).unwrap();
    if let Some(why) = pinner.why() {
        eprintln!("not run: {why}");
        return None;
    }
    let left = pinner.limits().left(pinner.counter()).unwrap();
    // Rings are charged too.
    if left.is_some_and(|left| left < bytes + 64 * 1024) {
        eprintln!("not run: {bytes} bytes are needed, {left:?} may be pinned");
        return None;
    }
    Some(pinner)
}

struct Memory {
    mapping: Arc<Mapping>,
    // After the mapping, so that its pages are free when the pool is put back.
    _pool: Option<RaisedPool>,
}

/// A populated mapping, or `None` where the machine has no such memory.
fn memory(backing: Backing, len: u64) -> Option<Memory> {
    let pool = match backing.huge_size() {
        None => None,
        Some(size) => match RaisedPool::raise(size, len) {
            Ok(pool) => Some(pool),
            Err(error) => {
                eprintln!("not run: {backing}: {error}");
                return None;
            }
        },
    };
    let mapping = Mapping::new(backing, len, None).unwrap();
    mapping.populate(&mut on).unwrap();
    Some(Memory {
        mapping: Arc::new(mapping),
        _pool: pool,
    })
}

fn small_length(backing: Backing) -> u64 {
    match backing {
        Backing::Hugetlb1G => 1 << 30,
        _ => 6 * MIB,
    }
}

fn is_real(mapping: &Mapping) -> bool {
    FrameSource::detect(mapping).is_real()
}

/// Runs of a part, and how many looks they took.
fn runs_of(pin: &hostmem::Pin, part: Span, source: FrameSource, batch: usize) -> (Vec<Span>, u64) {
    let mut frames = pin.runs(part, source).unwrap();
    let mut out = vec![Span::default(); batch];
    let mut runs = Vec::new();
    loop {
        let n = frames.next_batch(&mut out).unwrap();
        if n == 0 {
            return (runs, frames.looks());
        }
        runs.extend_from_slice(&out[..n]);
    }
}

/// The physical address of each 4 KiB page of a part, read page by page.
fn frames_page_by_page(mapping: &Mapping, part: Span) -> Vec<u64> {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    (part.start / PAGE..(part.start + part.len) / PAGE)
        .map(|page| {
            let mut entry = [0; 8];
            let at = (mapping.address() / PAGE + page) * 8;
            pagemap.read_exact_at(&mut entry, at).unwrap();
            (u64::from_ne_bytes(entry) & ((1 << 55) - 1)) * PAGE
        })
        .collect()
}

fn pages_of(runs: &[Span]) -> Vec<u64> {
    runs.iter()
        .flat_map(|run| (run.start..run.start + run.len).step_by(PAGE as usize))
        .collect()
}

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
                Err(ReleaseError::NotPinned { offset: named, .. }) => assert_eq!(named, offset),
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
    let mut random = 1u64;
    for _ in 0..200 {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let start = (random >> 33) % pages;
        let count = ((random >> 50) % 6 + 1).min(pages - start);
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
    let stopped = mapping.populate_by(NonZeroUsize::new(1), &mut |_| {
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

#[test]
fn runs_are_the_frames_that_the_pagemap_shows_page_by_page() {
    let _turn = turn();
    for backing in Backing::ALL {
        let len = match backing {
            Backing::Hugetlb1G => 1 << 30,
            _ => 16 * MIB,
        };
        let Some(pinner) = pinner(2 * MIB, len) else {
            return;
        };
        let Some(Memory { mapping, _pool }) = memory(backing, len) else {
            continue;
        };
        if !is_real(&mapping) {
            return eprintln!("not run: frames are hidden from this process");
        }
        let pin = pinner.pin(&mapping, Span::new(0, len), &mut on).unwrap();
        let plain = frames_page_by_page(&mapping, Span::new(0, len));
        for batch in [1, 3, 512] {
            let (runs, looks) = runs_of(&pin, Span::new(0, len), FrameSource::Pagemap, batch);
            assert_eq!(pages_of(&runs), plain, "{backing}");
            for pair in runs.windows(2) {
                assert_ne!(
                    pair[0].start + pair[0].len,
                    pair[1].start,
                    "{backing}: not joined"
                );
            }
            let folios = mapping.folios().unwrap_or_default();
            match backing {
                Backing::Thp if folios.huge + folios.small == len => {
                    assert_eq!(looks, folios.huge / (2 * MIB) + folios.small / PAGE);
                }
                Backing::Thp => {}
                _ => assert_eq!(looks, len / backing.page(), "{backing}"),
            }
        }
        // Parts that begin and end inside of a huge page.
        for part in [
            Span::new(PAGE, PAGE),
            Span::new(2 * MIB - PAGE, 2 * PAGE),
            Span::new(3 * PAGE, len - 8 * PAGE),
        ] {
            let (runs, _) = runs_of(&pin, part, FrameSource::Pagemap, 4);
            let (first, end) = (part.start / PAGE, (part.start + part.len) / PAGE);
            assert_eq!(
                pages_of(&runs),
                plain[first as usize..end as usize],
                "{backing} {part}"
            );
        }
    }
}

#[test]
fn a_mapping_of_mixed_page_sizes_yields_the_right_runs() {
    let _turn = turn();
    let len = 8 * MIB;
    let Some(pinner) = pinner(2 * MIB, len) else {
        return;
    };
    let Memory { mapping, .. } = memory(Backing::Thp, len).unwrap();
    // Splits the second huge page into entries of 4 KiB: another protection for one page of it,
    // and back.
    for protection in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
        let address = (mapping.address() + 3 * MIB) as *mut _;
        // SAFETY: one page of the mapping, which nothing writes meanwhile.
        let result = unsafe { libc::mprotect(address, PAGE as usize, protection) };
        assert_eq!(result, 0);
    }
    let folios = match mapping.folios() {
        Ok(folios) if folios.huge > 0 => folios,
        other => return eprintln!("not run: no transparent huge pages here: {other:?}"),
    };
    assert!(folios.small >= 2 * MIB, "{folios:?}");
    let pin = pinner.pin(&mapping, Span::new(0, len), &mut on).unwrap();
    if !is_real(&mapping) {
        return eprintln!("not run: frames are hidden from this process");
    }
    let (runs, looks) = runs_of(&pin, Span::new(0, len), FrameSource::Pagemap, 5);
    assert_eq!(
        pages_of(&runs),
        frames_page_by_page(&mapping, Span::new(0, len))
    );
    assert_eq!(looks, folios.huge / (2 * MIB) + folios.small / PAGE);
}

/// Memory that somebody else has mapped: `len` bytes, of which `file` has some.
struct Foreign {
    start: NonNull<u8>,
    len: usize,
}

impl Foreign {
    fn new(len: u64, file: Option<&File>) -> Arc<Self> {
        let len = len as usize;
        let (flags, fd) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a free address.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: in pages of any size, the bytes are the same.
        unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        let start = NonNull::new(start.cast()).unwrap();
        Arc::new(Self { start, len })
    }

    fn map(
        self: &Arc<Self>,
        part: Span,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<Mapping, MapError> {
        // SAFETY: a part of what the owner keeps mapped, which nobody else accesses.
        unsafe {
            let start = self.start.byte_add(part.start as usize);
            Mapping::foreign(self.clone(), start, part.len, file)
        }
    }
}

// SAFETY: an address range that belongs to no thread.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[test]
fn foreign_memory_is_pinned_where_it_is_and_its_owner_held() {
    let _turn = turn();
    let len = 8 * MIB;
    let Some(pinner) = pinner(2 * MIB, len) else {
        return;
    };
    // Anonymous, and not from the beginning of a huge page on; and a file from its third page on.
    let owner = Foreign::new(len + 2 * MIB, None);
    let file = Mapping::new(Backing::Memfd, len, None).unwrap();
    let fd = || file.fd().unwrap().try_clone_to_owned().unwrap();
    let of_file = Foreign::new(len, Some(&File::from(fd())));
    let tail = Span::new(2 * PAGE, len - 2 * PAGE);
    let parts = [
        (&owner, Span::new(3 * PAGE, len), None),
        (&of_file, tail, Some((fd(), 2 * PAGE))),
    ];
    for (owner, part, of) in parts {
        let offset = of.as_ref().map_or(0, |(_, offset)| *offset);
        let mapping = Arc::new(owner.map(part, of).unwrap());
        assert_eq!(mapping.file_offset(), offset);
        mapping.populate(&mut on).unwrap();
        let whole = Span::new(0, mapping.len());
        let counter = visible(&pinner);
        let before = in_use(counter);
        let mut pin = pinner.pin(&mapping, whole, &mut on).unwrap();
        // Whole huge pages at both ends.
        assert!(pin.charged_bytes() >= whole.len);
        assert_eq!(in_use(counter), before + pin.charged_bytes());
        if is_real(&mapping) {
            let (runs, _) = runs_of(&pin, whole, FrameSource::Pagemap, 5);
            assert_eq!(pages_of(&runs), frames_page_by_page(&mapping, whole));
        }
        // A part, and then the rest.
        pin.release(Span::new(MIB, 5 * MIB)).unwrap();
        assert_eq!(pin.bytes(), whole.len - 5 * MIB);
        pin.unpin().unwrap();
        assert_eq!(in_use(counter), before);
        // It is somebody else's: dropping the mapping unmaps nothing.
        mapping.cells()[0].store(7, Ordering::Relaxed);
        assert_eq!(Arc::strong_count(owner), 2);
        drop(mapping);
        assert_eq!(Arc::strong_count(owner), 1);
        let again = owner.map(part, None).unwrap();
        assert_eq!(again.cells()[0].load(Ordering::Relaxed), 7);
    }
    assert_eq!(file.cells()[2 * 512].load(Ordering::Relaxed), 7);
    let odd = |part| owner.map(part, None).map(|mapping| mapping.len());
    assert!(matches!(
        odd(Span::new(8, PAGE)),
        Err(MapError::Address { .. })
    ));
    assert!(matches!(
        odd(Span::new(0, 8)),
        Err(MapError::Unaligned { .. })
    ));
    assert!(matches!(odd(Span::new(0, 0)), Err(MapError::Empty)));
}

#[test]
fn a_file_of_huge_pages_is_mapped_again_as_what_it_is() {
    let _turn = turn();
    let len = 4 * MIB;
    let Some(Memory { mapping, .. }) = memory(Backing::Hugetlb2M, len) else {
        return;
    };
    mapping.cells()[0].store(7, Ordering::Relaxed);
    let fd = || mapping.fd().unwrap().try_clone_to_owned().unwrap();
    // However few pages are left in the pool.
    let again = Mapping::of_file(fd()).unwrap();
    assert_eq!((again.backing(), again.len()), (Backing::Hugetlb2M, len));
    assert_eq!(again.cells()[0].load(Ordering::Relaxed), 7);
    let owner: Arc<Mapping> = Arc::new(again);
    let start = |offset| NonNull::new((owner.address() + offset) as *mut u8).unwrap();
    // SAFETY: the owner keeps it mapped, and lends it as atomic cells.
    let foreign =
        |offset, file| unsafe { Mapping::foreign(owner.clone(), start(offset), 2 * MIB, file) };
    let second = foreign(2 * MIB, Some((fd(), 2 * MIB))).unwrap();
    assert_eq!(
        (second.backing(), second.file_offset()),
        (Backing::Hugetlb2M, 2 * MIB)
    );
    let inside = foreign(PAGE, Some((fd(), PAGE)));
    assert!(
        matches!(inside, Err(MapError::Address { .. })),
        "{inside:?}"
    );
}

#[test]
fn a_page_that_cannot_be_brought_in_is_named_whoever_meets_it() {
    let _turn = turn();
    // The file ends in the second chunk of 64 MiB.
    let short = Mapping::new(Backing::Memfd, 70 * MIB, None).unwrap();
    let fd = || short.fd().unwrap().try_clone_to_owned().unwrap();
    let owner = Foreign::new(192 * MIB, Some(&File::from(fd())));
    for threads in [1, 3] {
        let mapping = owner.map(Span::new(0, 192 * MIB), Some((fd(), 0))).unwrap();
        let mut told = Vec::new();
        let failed = mapping.populate_by(NonZeroUsize::new(threads), &mut |done| {
            told.push(done);
            ControlFlow::Continue(())
        });
        match failed {
            Err(PopulateError::Refused { offset, .. }) => assert_eq!(offset, 64 * MIB),
            result => panic!("{result:?}"),
        }
        assert!(told.is_empty() || told == [64 * MIB], "{told:?}");
        // What lies before is there.
        if let Ok(folios) = mapping.folios() {
            assert!(folios.small + folios.huge >= 64 * MIB, "{folios:?}");
        }
    }
}

#[test]
fn a_page_that_vanishes_is_named() {
    let _turn = turn();
    let len = 8 * MIB;
    for backing in [Backing::Anon4K, Backing::Thp] {
        let Some(pinner) = pinner(2 * MIB, len) else {
            return;
        };
        let Memory { mapping, .. } = memory(backing, len).unwrap();
        if !is_real(&mapping) {
            return eprintln!("not run: frames are hidden from this process");
        }
        let pin = pinner.pin(&mapping, Span::new(0, len), &mut on).unwrap();
        let gone = 4 * MIB;
        // SAFETY: the pages are mapped and nothing else uses them; the next access gives new ones.
        let result = unsafe {
            libc::madvise(
                (mapping.address() + gone) as *mut _,
                2 << 20,
                libc::MADV_DONTNEED,
            )
        };
        assert_eq!(result, 0);
        let mut frames = pin.runs(Span::new(0, len), FrameSource::Pagemap).unwrap();
        let mut out = vec![Span::default(); 4096];
        match frames.next_batch(&mut out) {
            Err(FramesError::NotPresent { offset }) => assert_eq!(offset, gone),
            result => panic!("{result:?}"),
        }
    }
}

#[test]
fn stand_in_addresses_are_used_once_and_lie_in_their_window() {
    let _turn = turn();
    let Some(pinner) = pinner(2 * MIB, 8 * MIB) else {
        return;
    };
    let mut used = std::collections::HashSet::new();
    let mut kept = Vec::new();
    for (backing, len) in [
        (Backing::Anon4K, 333 * PAGE),
        (Backing::Thp, 2 * MIB + 5 * PAGE),
        (Backing::Memfd, MIB),
    ] {
        let Memory { mapping, .. } = memory(backing, len).unwrap();
        let whole = Span::new(0, len);
        let pin = pinner.pin(&mapping, whole, &mut on).unwrap();
        let source = match backing {
            Backing::Memfd => FrameSource::FileOffset,
            _ => FrameSource::Synthetic { seed: 9 },
        };
        let (runs, looks) = runs_of(&pin, whole, source, 10);
        let pages = pages_of(&runs);
        assert_eq!(pages.len() as u64 * PAGE, len);
        assert_eq!(looks, 0);
        match backing {
            Backing::Memfd => assert_eq!(runs.len(), 1),
            // Two blocks of 2 MiB, which may come out as neighbours.
            Backing::Thp => assert!(runs.len() <= 2, "{runs:?}"),
            _ => assert!(runs.len() > 300, "{}", runs.len()),
        }
        // A part says the same as the whole.
        let (part, _) = runs_of(&pin, Span::new(7 * PAGE, 90 * PAGE), source, 3);
        assert_eq!(pages_of(&part), pages[7..97]);
        for page in pages {
            assert!((1 << 40..1 << 43).contains(&page));
            assert!(used.insert(page), "{page:#x} twice");
        }
        if backing != Backing::Memfd {
            let result = pin.runs(whole, FrameSource::FileOffset);
            assert!(
                matches!(result, Err(FramesError::NoFile { .. })),
                "{result:?}"
            );
        }
        kept.push(pin);
    }
}

#[test]
fn bad_lengths_and_nodes_are_refused_with_their_numbers() {
    let _turn = turn();
    let message = |backing, len, node| Mapping::new(backing, len, node).unwrap_err().to_string();
    assert_eq!(
        message(Backing::Thp, 0, None),
        "a memory object of 0 bytes is none"
    );
    assert_eq!(
        message(Backing::Hugetlb2M, MIB, None),
        "1048576 bytes are no multiple of the 2 MiB pages of hugetlb-2m"
    );
    let error = Mapping::new(Backing::Memfd, 1 << 60, None).unwrap_err();
    assert!(
        matches!(error, MapError::MoreThanAvailable { len, .. } if len == 1 << 60),
        "{error}"
    );
    let error = Mapping::new(Backing::Hugetlb1G, 1 << 60, None).unwrap_err();
    assert!(
        matches!(error, MapError::HugePages { needed, .. } if needed == 1 << 30),
        "{error}"
    );
    let error = Mapping::new(Backing::Anon4K, PAGE, Some(63)).unwrap_err();
    assert!(
        matches!(&error, MapError::NoSuchNode { node: 63, .. }),
        "{error}"
    );
}

#[test]
fn memory_is_placed_through_the_node_policy() {
    struct TwoNodes(Mutex<Vec<(u64, u64, u32)>>);
    impl hostmem::NodePolicy for TwoNodes {
        fn memory_nodes(&self) -> Vec<u32> {
            vec![0, 1]
        }
        fn prefer(&self, address: u64, len: u64, node: u32) -> std::io::Result<()> {
            self.0.lock().unwrap().push((address, len, node));
            Ok(())
        }
        fn nodes_of(&self, addresses: &[u64], nodes: &mut [i32]) -> std::io::Result<()> {
            for (address, node) in addresses.iter().zip(nodes) {
                *node = (address / PAGE % 2) as i32;
            }
            Ok(())
        }
    }
    let _turn = turn();
    let policy = TwoNodes(Mutex::default());
    let len = 64 * PAGE;
    let mapping = Mapping::with_nodes(Backing::Anon4K, len, Some(1), &policy).unwrap();
    assert_eq!(*policy.0.lock().unwrap(), [(mapping.address(), len, 1)]);
    for cell in mapping.cells()[..10 * 512].iter().step_by(512) {
        cell.store(1, Ordering::Relaxed);
    }
    if mapping.folios().is_ok() {
        let nodes = mapping.nodes_by(&policy).unwrap();
        assert_eq!(
            nodes,
            [(None, 54 * PAGE), (Some(0), 5 * PAGE), (Some(1), 5 * PAGE)]
        );
    }
    let node = hostmem::Machine::probe().unwrap().nodes[0];
    match Mapping::new(Backing::Anon4K, PAGE, Some(node)) {
        Ok(mapping) => {
            mapping.populate(&mut on).unwrap();
            assert_eq!(mapping.nodes().unwrap(), [(Some(node), PAGE)]);
        }
        Err(error) => eprintln!("not run: {error}"),
    }
}

#[test]
fn a_pool_that_cannot_be_raised_stays_as_it_was() {
    let _turn = turn();
    let before = Pool::read(HugeSize::OneGiB);
    match RaisedPool::raise(HugeSize::OneGiB, 1 << 50) {
        Err(PoolError::MoreThanAvailable { missing, .. }) => {
            assert_eq!(
                missing,
                (1 << 50) - before.unwrap().unreserved() * (1 << 30)
            );
        }
        Err(error @ PoolError::NoSuchSize { .. }) => eprintln!("not run: {error}"),
        result => panic!("{result:?}"),
    }
    assert_eq!(Pool::read(HugeSize::OneGiB), before);
    let Some(before) = Pool::read(HugeSize::TwoMiB) else {
        return eprintln!("not run: no pool of 2M pages");
    };
    match RaisedPool::raise(HugeSize::TwoMiB, 6 * MIB) {
        Ok(first) => {
            assert!(Pool::read(HugeSize::TwoMiB).unwrap().unreserved() >= 3);
            let second = RaisedPool::raise(HugeSize::TwoMiB, 10 * MIB).unwrap();
            assert_eq!(
                first.added() + second.added(),
                5u64.saturating_sub(before.unreserved())
            );
            drop(first);
            second.restore().unwrap();
            assert_eq!(Pool::read(HugeSize::TwoMiB), Some(before));
        }
        Err(error) => eprintln!("not run: {error}"),
    }
}

/// The name by which the test program calls itself.
const CHILD: &str = "as_an_ordinary_user";

#[test]
fn an_ordinary_user_meets_the_limit_with_its_numbers() {
    let _turn = turn();
    if !Limits::read().unwrap().privileged {
        return limits_without_privilege();
    }
    let mut child = Command::new("/proc/self/exe");
    child
        .args(["--exact", CHILD, "--nocapture", "--ignored"])
        .uid(65534)
        .gid(65534);
    // SAFETY: only setrlimit is called between fork and exec.
    unsafe {
        child.pre_exec(|| {
            let limit = libc::rlimit {
                rlim_cur: 8 << 20,
                rlim_max: 8 << 20,
            };
            match libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    match child.output() {
        Ok(output) => {
            eprintln!("{}", String::from_utf8_lossy(&output.stderr));
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{text}"
            );
        }
        Err(error) => eprintln!("not run: cannot become another user: {error}"),
    }
}

#[test]
#[ignore = "called by an_ordinary_user_meets_the_limit_with_its_numbers"]
fn as_an_ordinary_user() {
    limits_without_privilege();
}

fn limits_without_privilege() {
    let limits = Limits::read().unwrap();
    assert!(!limits.privileged);
    let Some(limit) = limits
        .memlock
        .filter(|limit| (MIB..1 << 30).contains(limit))
    else {
        return eprintln!("not run: locked memory is limited to {:?}", limits.memlock);
    };
    let len = (limit + 2 * MIB).next_multiple_of(2 * MIB);
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, len, None).unwrap());
    assert!(!is_real(&mapping));
    assert_eq!(
        FrameSource::detect(&mapping),
        FrameSource::Synthetic { seed: 0 }
    );
    let file = Mapping::new(Backing::Memfd, PAGE, None).unwrap();
    assert_eq!(FrameSource::detect(&file), FrameSource::FileOffset);

    for pinner in [
        Pinner::probe(2 * MIB).unwrap(),
        Pinner::mlock(2 * MIB).unwrap(),
    ] {
        eprintln!("{} {:?} {}", pinner.kind(), pinner.why(), pinner.counter());
        let counter = visible(&pinner);
        let before = in_use(counter);
        let error = pinner
            .pin(&mapping, Span::new(0, len), &mut on)
            .unwrap_err();
        eprintln!("{error}");
        match error {
            PinError::Limit {
                needed,
                limit: named,
                in_use,
                counter,
                ..
            } => {
                assert_eq!((needed, named, counter), (len, limit, pinner.counter()));
                assert_eq!(in_use.known, before);
                assert_eq!(in_use.others_possible, pinner.kind() == PinKind::IoUring);
            }
            error => panic!("{error}"),
        }
        assert_reaches(counter, before);
        // What others of the user hold, and the ring itself, shows only on trying: all but 64 KiB
        // is pinned, then more than is left.
        let most = limit - 64 * 1024;
        let pin = match pinner.pin(&mapping, Span::new(0, most), &mut on) {
            Ok(pin) => pin,
            Err(error) => {
                eprintln!("not run: the limit is used by others: {error}");
                continue;
            }
        };
        assert_eq!(in_use(counter), before + most);
        let at = most.next_multiple_of(2 * MIB);
        let error = pinner
            .pin(&mapping, Span::new(at, 128 * 1024), &mut on)
            .unwrap_err();
        assert!(
            matches!(error, PinError::Limit { needed, .. } if needed == 128 * 1024),
            "{error}"
        );
        eprintln!("{error}");
        assert_eq!(in_use(counter), before + most);
        let mut frames = pin.runs(Span::new(0, PAGE), FrameSource::Pagemap).unwrap();
        let hidden = frames.next_batch(&mut [Span::default()]);
        assert!(
            matches!(hidden, Err(FramesError::Hidden { offset: 0 })),
            "{hidden:?}"
        );

        // All the room there is can be used; and where the kernel charges the rings too, it
        // refuses in the middle what looked possible beforehand.
        drop(pin);
        assert_reaches(counter, before);
        let room = pinner.room().unwrap().unwrap();
        assert!(
            room <= limit - before && room >= limit - before - 64 * 1024,
            "{room}"
        );
        // Rings that earlier tests have closed are uncharged some time later.
        let start = Instant::now();
        let pin = loop {
            match pinner.pin(&mapping, Span::new(0, room), &mut on) {
                Err(_) if start.elapsed() < Duration::from_secs(2) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                result => break result.unwrap(),
            }
        };
        drop(pin);
        assert_reaches(counter, before);
        let whole = pinner.pin(&mapping, Span::new(0, limit), &mut on);
        match (whole, pinner.kind()) {
            (Err(error @ PinError::Limit { .. }), PinKind::IoUring) => eprintln!("{error}"),
            (Ok(_), _) => {}
            (result, _) => panic!("{result:?}"),
        }
        assert_reaches(counter, before);
    }
}
