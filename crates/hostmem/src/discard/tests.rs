//! System calls that fail or do less than they were asked, and what comes of it.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use proptest::prelude::*;

use super::batch::{BYTES, LONG, RUNS};
use super::*;
use crate::Backing;
use crate::sys::Region;

const PAGE: u64 = 4096;

/// Calls to the fake kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Asked {
    One(Span<Offset>, Way),
    Batch(Vec<Span<Offset>>),
    Punch(Span<Offset>),
}

/// A kernel that drops nothing, but knows which pages it was asked to drop, and answers as the test sets it.
#[derive(Default)]
struct Script {
    asked: Vec<Asked>,
    /// Answers to batches, first come first served: bytes to do at most, or an error number.
    batches: std::collections::VecDeque<Result<u64, i32>>,
    /// Pages that cannot be dropped, with the error number.
    stuck: Vec<(u64, i32)>,
    /// Calls that are interrupted, each.
    interrupts: u32,
    dropped: BTreeSet<u64>,
}

impl Script {
    fn drop_run(&mut self, part: Span<Offset>) -> Result<(), i32> {
        let stuck = self.stuck.iter().find(|(page, _)| part.contains(*page));
        match stuck {
            Some((_, errno)) => Err(*errno),
            None => {
                for page in (part.start..part.start + part.len).step_by(PAGE as usize) {
                    self.dropped.insert(page);
                }
                Ok(())
            }
        }
    }
}

struct Fake {
    script: Arc<Mutex<Script>>,
    batch: bool,
}

impl Fake {
    fn one(&self, part: Span<Offset>, asked: Asked) -> io::Result<()> {
        let mut script = self.script.lock().unwrap();
        script.asked.push(asked);
        if script.interrupts > 0 {
            script.interrupts -= 1;
            return Err(io::Error::from_raw_os_error(libc::EINTR));
        }
        script.drop_run(part).map_err(io::Error::from_raw_os_error)
    }
}

impl Calls for Fake {
    fn drop_pages(&self, _: &Region, part: Span<Offset>, way: Way) -> io::Result<()> {
        self.one(part, Asked::One(part, way))
    }

    /// As the kernel: stops at the first run that fails, and says how many bytes it did before.
    fn drop_batch(&self, _: &Region, parts: &[Span<Offset>]) -> io::Result<u64> {
        let mut script = self.script.lock().unwrap();
        script.asked.push(Asked::Batch(parts.to_vec()));
        let most = match script.batches.pop_front() {
            Some(Err(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Ok(most)) => most.min(BYTES),
            None => BYTES,
        };
        let mut done = 0;
        for part in parts {
            let now = part.len.min(most - done);
            let whole = Span::new(part.start, now / PAGE * PAGE);
            if let Err(errno) = script.drop_run(whole) {
                return if done > 0 {
                    Ok(done)
                } else {
                    Err(io::Error::from_raw_os_error(errno))
                };
            }
            done += now;
            if now < part.len {
                break;
            }
        }
        Ok(done)
    }

    fn has_batch(&self) -> bool {
        self.batch
    }

    fn punch(&self, _: BorrowedFd<'_>, part: Span<Offset>) -> io::Result<()> {
        self.one(part, Asked::Punch(part))
    }
}

/// A discarder over untouched memory and a scripted kernel.
fn fake(backing: Backing, len: u64, batch: bool) -> (Discard, Arc<Mutex<Script>>) {
    let mapping = Arc::new(Mapping::new(backing, len, None).unwrap());
    let script = Arc::default();
    let calls = Fake {
        script: Arc::clone(&script),
        batch,
    };
    (
        Discard::with_calls(mapping, Box::new(calls)).unwrap(),
        script,
    )
}

/// Discards, with what was kept.
fn run(
    discard: &Discard,
    runs: &[Span<Offset>],
) -> (Discarded, Vec<(Span<Offset>, DiscardRefusal)>) {
    let mut kept = Vec::new();
    let done = discard.discard(runs, &mut |part, why| kept.push((part, why)));
    kept.sort_by_key(|(part, _)| *part);
    (done.unwrap(), kept)
}

fn pages(runs: impl IntoIterator<Item = Span<Offset>>) -> BTreeSet<u64> {
    let pages = |run: Span<Offset>| (run.start..run.start + run.len).step_by(PAGE as usize);
    runs.into_iter().flat_map(pages).collect()
}

fn every_second_page(count: u64) -> Vec<Span<Offset>> {
    (0..count).map(|n| Span::new(2 * n * PAGE, PAGE)).collect()
}

#[test]
fn short_runs_have_a_call_together_and_long_ones_their_own() {
    let (discard, script) = fake(Backing::Anon4K, 1 << 30, true);
    let mut runs = every_second_page(2500);
    runs.push(Span::new(512 << 20, LONG));
    runs.push(Span::new(600 << 20, LONG - PAGE));
    let (done, kept) = run(&discard, &runs);
    assert!(kept.is_empty());
    assert_eq!(done.bytes, 2499 * PAGE + 2 * LONG);
    assert_eq!(done.calls, 4);
    let script = script.lock().unwrap();
    assert_eq!(script.dropped, pages(runs.iter().copied()));
    let sizes: Vec<usize> = script
        .asked
        .iter()
        .map(|asked| match asked {
            Asked::Batch(parts) => parts.len(),
            _ => 1,
        })
        .collect();
    assert_eq!(sizes, [RUNS, RUNS, 1, 2500 + 1 - 2 * RUNS]);
}

#[test]
fn a_call_never_asks_for_more_than_the_kernel_takes() {
    let (discard, script) = fake(Backing::Anon4K, 6 << 30, true);
    let runs: Vec<Span<Offset>> = (0..1500)
        .map(|n| Span::new(n * LONG, LONG - PAGE))
        .collect();
    let (done, _) = run(&discard, &runs);
    assert_eq!(done.bytes, 1500 * (LONG - PAGE));
    for asked in &script.lock().unwrap().asked {
        let Asked::Batch(parts) = asked else {
            panic!("{asked:?}")
        };
        assert!(parts.iter().map(|part| part.len).sum::<u64>() <= BYTES);
    }
}

#[test]
fn short_returns_are_resumed_also_inside_a_run() {
    let (discard, script) = fake(Backing::Anon4K, 1 << 20, true);
    let runs = [0, 16, 32, 48].map(|page| Span::new(page * PAGE, 4 * PAGE));
    // Inside of a page, inside of the first, at the end of a run, nothing, more than was asked.
    let answers = [100, 6 * PAGE + 1, 2 * PAGE, 0, u64::MAX];
    script.lock().unwrap().batches.extend(answers.map(Ok));
    let (done, kept) = run(&discard, &runs);
    assert!(kept.is_empty());
    assert_eq!(done.bytes, 16 * PAGE);
    let script = script.lock().unwrap();
    assert_eq!(script.dropped, pages(runs));
    let second = Asked::Batch(vec![Span::new(16 * PAGE, 4 * PAGE), runs[2], runs[3]]);
    // 100 bytes are no page: the first run has a call of its own.
    assert_eq!(script.asked[1], Asked::One(runs[0], Way::Private));
    assert_eq!(script.asked[2], second);
    assert!(discard.batches(), "nothing has failed");
}

#[test]
fn a_run_that_fails_is_reported_with_its_error_and_the_others_are_discarded() {
    for batch in [true, false] {
        let (discard, script) = fake(Backing::Anon4K, 1 << 20, batch);
        let stuck = [(8 * PAGE, libc::EINVAL), (14 * PAGE, libc::ENOMEM)];
        script.lock().unwrap().stuck.extend(stuck);
        let runs = every_second_page(20);
        let (done, kept) = run(&discard, &runs);
        let refused = |page: u64, errno| {
            let call = Call::Madvise;
            (
                Span::new(page * PAGE, PAGE),
                DiscardRefusal::Refused { call, errno },
            )
        };
        assert_eq!(kept, [refused(8, libc::EINVAL), refused(14, libc::ENOMEM)]);
        assert_eq!((done.bytes, done.kept), (18 * PAGE, 2 * PAGE));
        let script = script.lock().unwrap();
        assert_eq!(script.dropped.len(), 18);
        assert_eq!(discard.batches(), batch, "the runs were at fault");
        assert_eq!(
            kept[0].1.to_string(),
            "madvise: Invalid argument (os error 22)"
        );
    }
}

#[test]
fn without_the_common_call_each_run_has_its_own() {
    // It is not there, or stops to be.
    for answers in [None, Some(Err(libc::EPERM))] {
        let (discard, script) = fake(Backing::Anon4K, 1 << 20, answers.is_some());
        script.lock().unwrap().batches.extend(answers);
        let runs = every_second_page(20);
        let (done, kept) = run(&discard, &runs);
        assert!(kept.is_empty() && !discard.batches());
        assert_eq!(done.bytes, 20 * PAGE);
        assert_eq!(done.calls, 20 + u64::from(answers.is_some()));
        assert_eq!(script.lock().unwrap().dropped, pages(runs));
    }
}

#[test]
fn interrupted_calls_are_made_again_but_not_for_ever() {
    for (interrupts, kept) in [(3, 0), (u32::MAX, 1)] {
        let (discard, script) = fake(Backing::Memfd, 1 << 20, true);
        script.lock().unwrap().interrupts = interrupts;
        let (_, told) = run(&discard, &[Span::new(PAGE, 2 * PAGE)]);
        assert_eq!(told.len(), kept);
        if let [(part, DiscardRefusal::Refused { call, errno })] = told[..] {
            assert_eq!(part, Span::new(PAGE, 2 * PAGE));
            assert_eq!((call, errno), (Call::Fallocate, libc::EINTR));
        }
    }
}

#[test]
fn runs_outside_or_out_of_order_are_refused_before_anything_is_touched() {
    let (discard, script) = fake(Backing::Anon4K, 16 * PAGE, true);
    let good = Span::new(2 * PAGE, 2 * PAGE);
    for bad in [
        Span::new(16 * PAGE, PAGE),
        Span::new(15 * PAGE, 2 * PAGE),
        Span::new(4 * PAGE, 0),
        Span::new(PAGE, u64::MAX),
    ] {
        let error = discard.discard(&[good, bad], &mut |_, _| ()).unwrap_err();
        assert!(
            matches!(error, DiscardError::Outside { index: 1, run, .. } if run == bad),
            "{error}"
        );
    }
    for bad in [good, Span::new(0, PAGE), Span::new(3 * PAGE, PAGE)] {
        let error = discard.discard(&[good, bad], &mut |_, _| ()).unwrap_err();
        assert!(
            matches!(error, DiscardError::Descends { index: 1, run } if run == bad),
            "{error}"
        );
    }
    assert!(script.lock().unwrap().asked.is_empty());
}

#[test]
fn what_is_less_than_a_page_is_reported_and_touching_runs_are_one() {
    let (discard, script) = fake(Backing::Memfd, 16 * PAGE, true);
    let runs = [
        Span::new(100, PAGE - 100),
        Span::new(PAGE, 100),
        Span::new(3 * PAGE + 8, PAGE),
        Span::new(8 * PAGE - 1, 2 * PAGE),
    ];
    let (done, kept) = run(&discard, &runs);
    let part = DiscardRefusal::PartOfPage { page: PAGE };
    let expected = [
        (Span::new(100, PAGE), part),
        (Span::new(3 * PAGE + 8, PAGE), part),
        (Span::new(8 * PAGE - 1, 1), part),
        (Span::new(9 * PAGE, PAGE - 1), part),
    ];
    assert_eq!(kept, expected);
    assert_eq!((done.bytes, done.kept, done.calls), (PAGE, 3 * PAGE, 1));
    let punched = [Asked::Punch(Span::new(8 * PAGE, PAGE))];
    assert_eq!(script.lock().unwrap().asked, punched);

    let (discard, script) = fake(Backing::Anon4K, 16 * PAGE, true);
    let touching = [Span::new(0, PAGE / 2), Span::new(PAGE / 2, 3 * PAGE / 2)];
    let (done, kept) = run(&discard, &touching);
    assert_eq!((done.bytes, kept.len()), (2 * PAGE, 0));
    let once = [Asked::One(Span::new(0, 2 * PAGE), Way::Private)];
    assert_eq!(script.lock().unwrap().asked, once);
}

#[test]
fn parts_of_transparent_huge_pages_are_distinguished() {
    let (discard, _) = fake(Backing::Thp, 16 << 20, true);
    let huge = 2 << 20;
    // Two whole ones and half a one before them; a page.
    let runs = [
        Span::new(huge / 2, huge / 2 + 2 * huge),
        Span::new(5 * huge, PAGE),
    ];
    let (done, _) = run(&discard, &runs);
    assert_eq!(done.in_parts, huge / 2 + PAGE);
    assert_eq!(done.bytes, huge / 2 + 2 * huge + PAGE);
}

proptest! {
    /// However batches end and whatever fails: each page of the runs is dropped or told, no other is
    /// asked for, and the numbers are right.
    #[test]
    fn each_page_is_dropped_or_reported(
        bits in prop::collection::vec(any::<bool>(), 1..400),
        answers in prop::collection::vec(
            prop_oneof![3 => (0..200 * PAGE).prop_map(Ok), 1 => Just(Err(libc::EAGAIN))], 0..8),
        stuck in prop::collection::vec(0..400u64, 0..6),
    ) {
        let (discard, script) = fake(Backing::Anon4K, 400 * PAGE, true);
        script.lock().unwrap().batches.extend(answers);
        let stuck = stuck.iter().map(|page| (page * PAGE, libc::EINVAL));
        script.lock().unwrap().stuck.extend(stuck);
        let each = bits.iter().enumerate().filter(|(_, set)| **set);
        let each: Vec<Span<Offset>> = each.map(|(n, _)| Span::new(n as u64 * PAGE, PAGE)).collect();
        let asked = pages(each.iter().copied());
        let (done, kept) = run(&discard, &each);
        let kept_pages = pages(kept.iter().map(|(part, _)| *part));
        prop_assert_eq!(done.bytes + done.kept, asked.len() as u64 * PAGE);
        prop_assert_eq!(done.kept, kept_pages.len() as u64 * PAGE);
        let script = script.lock().unwrap();
        let both: BTreeSet<u64> = script.dropped.union(&kept_pages).copied().collect();
        prop_assert_eq!(both, asked);
    }
}

/// Memory of which every third page is written and every third only read, discarded by the kernel that
/// is there.
fn counted(backing: Backing, by_regions: bool, runs: &[Span<Offset>]) -> count::Freed {
    let mapping = Arc::new(Mapping::new(backing, 4 << 20, None).unwrap());
    for (page, cells) in mapping.cells().chunks(512).enumerate() {
        match page % 3 {
            0 => cells[1].store(1, Ordering::Relaxed),
            1 => _ = cells[1].load(Ordering::Relaxed),
            _ => {}
        }
    }
    let discard = Discard::new(mapping).unwrap();
    let mut scan = count::Scan::open().unwrap();
    scan.by_regions = by_regions;
    let windows = count::Windows::new(&discard, scan);
    let (done, freed) = windows.run(runs, &mut |part, why| panic!("{part}: {why}"));
    assert_eq!(done.bytes, runs.iter().map(|run| run.len).sum::<u64>());
    freed.unwrap()
}

#[test]
fn with_and_without_the_scan_of_regions_the_count_is_the_same() {
    let runs = [
        Span::new(0, 10 * PAGE),
        Span::new(11 * PAGE, PAGE),
        Span::new(12 * PAGE, PAGE),
        Span::new((2 << 20) - PAGE, 100 * PAGE),
    ];
    let written = |run: &Span<Offset>| {
        let pages = run.start / PAGE..(run.start + run.len) / PAGE;
        pages.filter(|page| page % 3 == 0).count() as u64
    };
    let expected = runs.iter().map(written).sum::<u64>() * PAGE;
    for by_regions in [true, false] {
        let freed = counted(Backing::Anon4K, by_regions, &runs);
        assert_eq!((freed.bytes, freed.unsure), (expected, 0), "{by_regions}");
    }
}
