//! Memory given back to the machine, of each kind.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use hostmem::{
    Discard, DiscardError, DiscardRefusal, Discarded, Freed, FreedBy, HugeSize, PopulateError,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;

/// Memory that other code has mapped, in some way that a mapping of ours is not.
struct Area(NonNull<u8>, usize);

impl Area {
    fn new(len: u64, flags: i32, file: Option<&File>) -> Option<Arc<Self>> {
        let len = len as usize;
        let fd = file.map_or(-1, File::as_raw_fd);
        let flags = flags
            | if file.is_none() {
                libc::MAP_ANONYMOUS
            } else {
                0
            };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a free address.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        Some(Arc::new(Self(NonNull::new(start.cast())?, len)))
    }

    fn map(self: &Arc<Self>, file: Option<(OwnedFd, u64)>) -> Arc<Mapping> {
        // SAFETY: the owner keeps it mapped, and no other code accesses it.
        let mapping = unsafe { Mapping::foreign(self.clone(), self.0, self.1 as u64, file) };
        Arc::new(mapping.unwrap())
    }
}

// SAFETY: an address range that belongs to no thread.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl std::ops::Drop for Area {
    fn drop(&mut self) {
        // SAFETY: it is not used any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), self.1) };
    }
}

/// Writes a pattern to the first and the last word of each page.
fn fill(mapping: &Mapping) {
    for (page, cells) in mapping.cells().chunks(512).enumerate() {
        cells[0].store(page as u64 + 1, Ordering::Relaxed);
        cells[511].store(!(page as u64), Ordering::Relaxed);
    }
}

/// Pages that hold zeros only; all others must hold the pattern.
fn zeros(mapping: &Mapping) -> BTreeSet<u64> {
    let mut zeros = BTreeSet::new();
    for (page, cells) in mapping.cells().chunks(512).enumerate() {
        let words = [&cells[0], &cells[511]].map(|cell| cell.load(Ordering::Relaxed));
        match words {
            [0, 0] => _ = zeros.insert(page as u64),
            words => assert_eq!(words, [page as u64 + 1, !(page as u64)], "page {page}"),
        }
    }
    zeros
}

/// The plain model: pages of 4 KiB that are zeros after `runs` were discarded from memory of pages of
/// `page` bytes, and bytes of the runs that are kept.
fn model(runs: &[Span<Offset>], len: u64, page: u64) -> (BTreeSet<u64>, u64) {
    let inside = |byte: u64| runs.iter().any(|run| run.contains(byte));
    let mut zeros = BTreeSet::new();
    for start in (0..len).step_by(page as usize) {
        // Runs begin and end at quarters of pages.
        let quarters = (start..start + page).step_by(page as usize / 4);
        if quarters.into_iter().all(inside) {
            zeros.extend(start / PAGE..(start + page) / PAGE);
        }
    }
    let bytes: u64 = runs.iter().map(|run| run.len).sum();
    let kept = bytes - zeros.len() as u64 * PAGE;
    (zeros, kept)
}

fn discard(discard: &Discard, runs: &[Span<Offset>]) -> Discarded {
    let mut kept = 0;
    let done = discard.discard(runs, &mut |part, why| {
        assert!(
            matches!(why, DiscardRefusal::PartOfPage { .. }),
            "{part}: {why}"
        );
        kept += part.len;
    });
    let done = done.unwrap();
    assert_eq!(done.kept, kept);
    done
}

/// Ascending runs, in so many units of so many bytes.
fn runs_in(units: u64, unit: u64) -> BoxedStrategy<Vec<Span<Offset>>> {
    let longest = (units / 2).clamp(2, 40);
    let pairs = prop::collection::vec((0..4u64, 1..longest), 0..60);
    let runs = pairs.prop_map(move |pairs| {
        let mut end = 0;
        let mut runs = Vec::new();
        for (gap, len) in pairs {
            let start = end + gap;
            end = start + len;
            if end > units {
                break;
            }
            runs.push(Span::new(start * unit, len * unit));
        }
        runs
    });
    runs.boxed()
}

/// Random runs, of pages and of quarters of them, against the plain model.
fn check(mapping: &Arc<Mapping>, page: u64) {
    let discarder = Discard::new(mapping.clone()).unwrap();
    assert_eq!(discarder.page(), page);
    let len = mapping.len();
    let strategies = [page, page / 4].map(|unit| runs_in(len / unit, unit));
    let mut runner = TestRunner::deterministic();
    for _ in 0..12 {
        for strategy in &strategies {
            let runs = strategy.new_tree(&mut runner).unwrap().current();
            fill(mapping);
            let done = discard(&discarder, &runs);
            let (dropped, kept) = model(&runs, len, page);
            assert_eq!(zeros(mapping), dropped, "{runs:?}");
            assert_eq!(done.bytes, dropped.len() as u64 * PAGE);
            assert_eq!(done.kept, kept);
        }
    }
}

#[test]
fn what_is_discarded_reads_as_zeros_and_nothing_else_changes() {
    let _turn = turn();
    // Pages of 1 GiB are as those of 2 MiB, and take long to fill.
    for backing in [
        Backing::Anon4K,
        Backing::Thp,
        Backing::Memfd,
        Backing::Hugetlb2M,
    ] {
        if let Some(Memory { mapping, _pool }) = memory(backing, 16 * MIB) {
            check(&mapping, backing.page());
        }
    }
}

#[test]
fn foreign_memory_of_every_kind_is_discarded() {
    let _turn = turn();
    let len = 16 * MIB;
    let private = Area::new(len, libc::MAP_PRIVATE, None).unwrap();
    check(&private.map(None), PAGE);
    // Shared without a file: dropping the pages of this process would free nothing.
    let shared = Area::new(len, libc::MAP_SHARED, None).unwrap();
    check(&shared.map(None), PAGE);
    // Part of a file, from its third page on.
    let file = Mapping::new(Backing::Memfd, len, None).unwrap();
    let fd = || file.fd().unwrap().try_clone_to_owned().unwrap();
    let of_file = Area::new(len, libc::MAP_SHARED, Some(&File::from(fd()))).unwrap();
    // SAFETY: as in `map`; a part of it.
    let tail = unsafe {
        let start = of_file.0.byte_add(2 * PAGE as usize);
        Mapping::foreign(
            of_file.clone(),
            start,
            len - 2 * PAGE,
            Some((fd(), 2 * PAGE)),
        )
    };
    file.cells()[512].store(9, Ordering::Relaxed);
    check(&Arc::new(tail.unwrap()), PAGE);
    assert_eq!(file.cells()[512].load(Ordering::Relaxed), 9);

    match RaisedPool::raise(HugeSize::TwoMiB, len) {
        Err(error) => eprintln!("not run: private huge pages: {error}"),
        Ok(_pool) => {
            let flags = libc::MAP_PRIVATE | libc::MAP_HUGETLB;
            match Area::new(len, flags, None) {
                None => eprintln!("not run: no private huge pages"),
                Some(huge) => check(&huge.map(None), 2 * MIB),
            }
        }
    }
}

#[test]
fn private_copies_of_files_and_mixtures_are_refused() {
    let _turn = turn();
    let file = Mapping::new(Backing::Memfd, MIB, None).unwrap();
    let fd = File::from(file.fd().unwrap().try_clone_to_owned().unwrap());
    let copy = Area::new(MIB, libc::MAP_PRIVATE, Some(&fd)).unwrap();
    let error = Discard::new(copy.map(None)).unwrap_err();
    assert!(matches!(error, DiscardError::PrivateCopy { .. }), "{error}");
    // Half of it is another memory.
    let half = Area::new(MIB, libc::MAP_PRIVATE, None).unwrap();
    // SAFETY: the half belongs to the area, and no code accesses it.
    let put = unsafe {
        let at = half.0.byte_add(MIB as usize / 2).as_ptr().cast();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(at, MIB as usize / 2, access, flags, -1, 0)
    };
    assert_ne!(put, libc::MAP_FAILED);
    let error = Discard::new(half.map(None)).unwrap_err();
    assert!(matches!(error, DiscardError::Mixed { .. }), "{error}");
}

#[test]
fn locked_memory_is_reported_and_the_rest_discarded() {
    let _turn = turn();
    let Memory { mapping, .. } = memory(Backing::Anon4K, MIB).unwrap();
    let discarder = Discard::new(mapping.clone()).unwrap();
    fill(&mapping);
    let at = (mapping.address() + 10 * PAGE) as *const libc::c_void;
    // SAFETY: locking changes no bytes.
    if unsafe { libc::mlock(at, 1) } != 0 {
        return eprintln!("not run: nothing can be locked");
    }
    let runs: Vec<Span<Offset>> = (0..20).map(|n| Span::new(2 * n * PAGE, PAGE)).collect();
    let mut kept = Vec::new();
    let done = discarder.discard(&runs, &mut |part, why| kept.push((part, why)));
    assert_eq!(done.unwrap().bytes, 19 * PAGE);
    let [(part, DiscardRefusal::Refused { errno, .. })] = kept[..] else {
        panic!("{kept:?}");
    };
    assert_eq!((part, errno), (Span::new(10 * PAGE, PAGE), libc::EINVAL));
    let expected = (0..20).map(|n| 2 * n).filter(|page| *page != 10).collect();
    assert_eq!(zeros(&mapping), expected);
}

fn counted(discard: &Discard, runs: &[Span<Offset>]) -> Freed {
    let (done, freed) = discard
        .discard_counted(runs, &mut |part, why| {
            assert!(
                matches!(why, DiscardRefusal::PartOfPage { .. }),
                "{part}: {why}"
            );
        })
        .unwrap();
    let asked: u64 = runs.iter().map(|run| run.len).sum();
    assert_eq!(done.bytes + done.kept, asked);
    freed.unwrap()
}

#[test]
fn what_is_freed_is_what_the_counters_of_the_kernel_say() {
    let _turn = turn();
    for (backing, by) in [
        (Backing::Anon4K, FreedBy::PresentPages),
        (Backing::Memfd, FreedBy::FileBlocks),
        (Backing::Hugetlb2M, FreedBy::FileBlocks),
    ] {
        let len = 16 * MIB;
        let Some(Memory { mapping, _pool }) = memory(backing, len) else {
            continue;
        };
        let discarder = Discard::new(mapping.clone()).unwrap();
        let page = backing.page();
        let freed = |runs: &[Span<Offset>]| {
            let freed = counted(&discarder, runs);
            assert_eq!((freed.unsure, freed.by), (0, by));
            freed.bytes
        };
        let second: Vec<Span<Offset>> = (0..len / page / 2)
            .map(|n| Span::new(2 * n * page, page))
            .collect();
        assert_eq!(freed(&second), len / 2, "{backing}");
        assert_eq!(freed(&second), 0, "nothing is left there");
        // Half a page is not freed, and half of the rest is there.
        assert_eq!(freed(&[Span::new(page, page / 2)]), 0);
        assert_eq!(freed(&[Span::new(0, len)]), len / 2);
        let middle = [Span::new(page, 2 * page)];
        mapping.populate_runs(&middle).unwrap();
        assert_eq!(freed(&middle), 2 * page);
    }
}

#[test]
fn private_huge_pages_go_back_to_their_pool() {
    let _turn = turn();
    let len = 8 * MIB;
    let _pool = match RaisedPool::raise(HugeSize::TwoMiB, len) {
        Ok(pool) => pool,
        Err(error) => return eprintln!("not run: {error}"),
    };
    let Some(area) = Area::new(len, libc::MAP_PRIVATE | libc::MAP_HUGETLB, None) else {
        return eprintln!("not run: no private huge pages");
    };
    let mapping = area.map(None);
    fill(&mapping);
    let discarder = Discard::new(mapping).unwrap();
    // One and a half; then what is left.
    let freed = counted(&discarder, &[Span::new(2 * MIB, 3 * MIB)]);
    assert_eq!((freed.bytes, freed.by), (2 * MIB, FreedBy::FreeHugePages));
    assert_eq!(counted(&discarder, &[Span::new(0, len)]).bytes, 6 * MIB);
}

/// Memory in transparent huge pages only.
fn huge(len: u64) -> Option<Arc<Mapping>> {
    let Memory { mapping, .. } = memory(Backing::Thp, len)?;
    let at = mapping.address() as *mut libc::c_void;
    // Pages that are there stay as they are, and none become huge behind our back.
    // SAFETY: changes no bytes.
    unsafe { libc::madvise(at, len as usize, libc::MADV_NOHUGEPAGE) };
    match mapping.folios() {
        Ok(folios) if folios.huge == len => Some(mapping),
        folios => {
            eprintln!("not run: no transparent huge pages: {folios:?}");
            None
        }
    }
}

#[test]
fn a_part_of_a_transparent_huge_page_frees_nothing_until_all_of_it_is_gone() {
    let _turn = turn();
    const HUGE: u64 = 2 * MIB;
    let Some(mapping) = huge(8 * HUGE) else {
        return;
    };
    let discarder = Discard::new(mapping.clone()).unwrap();
    let freed = |runs: &[Span<Offset>]| {
        let freed = counted(&discarder, runs);
        assert_eq!(freed.by, FreedBy::PresentPages);
        (freed.bytes, freed.unsure)
    };
    // All but a page of the first, every second page of the next two, and the fourth as a whole.
    let mut runs = vec![Span::new(0, HUGE - PAGE)];
    runs.extend((0..512).map(|n| Span::new(HUGE + 2 * n * PAGE, PAGE)));
    runs.push(Span::new(3 * HUGE, HUGE));
    assert_eq!(freed(&runs), (HUGE, 0));
    // The rest of the second may be small pages, until nothing is left of it.
    let odd = |n: u64| Span::new(HUGE + (2 * n + 1) * PAGE, PAGE);
    let most: Vec<Span<Offset>> = (0..255).map(odd).collect();
    assert_eq!(freed(&most), (0, 255 * PAGE));
    assert_eq!(
        freed(&[Span::new(HUGE - PAGE, PAGE), odd(255)]),
        (2 * PAGE, 0)
    );
    // Pages that have come since are not there twice.
    mapping.cells()[0].store(1, Ordering::Relaxed);
    assert_eq!(freed(&[Span::new(0, HUGE)]).0, PAGE);
    assert_eq!(freed(&[Span::new(4 * HUGE + PAGE, HUGE)]), (0, 0));
    assert_eq!(freed(&[Span::new(6 * HUGE, 2 * HUGE)]), (2 * HUGE, 0));
}

#[test]
fn runs_that_are_no_pages_are_not_brought_in() {
    let _turn = turn();
    let mapping = Mapping::new(Backing::Anon4K, MIB, None).unwrap();
    mapping
        .populate_runs(&[Span::new(0, PAGE), Span::new(8 * PAGE, 8 * PAGE)])
        .unwrap();
    match mapping.folios() {
        Ok(folios) => assert_eq!(folios.small, 9 * PAGE),
        Err(error) => eprintln!("not run in part: {error}"),
    }
    for run in [Span::new(1, PAGE), Span::new(MIB, PAGE), Span::new(0, 0)] {
        let result = mapping.populate_runs(&[run]);
        assert!(
            matches!(result, Err(PopulateError::BadRun { run: named }) if named == run),
            "{result:?}"
        );
    }
}
