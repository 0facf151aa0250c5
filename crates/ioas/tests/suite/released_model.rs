//! Random sequences of map, unmap, release, restore, take out and put back in several address spaces
//! against a plain model that knows each page by itself.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::*;
use ioas::{Area, Ledger, Memory, Synthetic};
use iopt::{FormatId, HeapTables, Interruption, Prot};
use proptest::prelude::*;
use runs::{Iova, Offset, Span};

const NEVER: Interruption = Interruption::Refused;
const SPACES: usize = 3;
/// Pages of the window: four times 2 MiB and a little more.
const PAGES: u64 = 2048 + 64;
const AT: u64 = GIB - 4 * MIB;
/// Starts of the two memories: in one run, and in runs of 3 MiB.
const FRAMES: [u64; 2] = [16 * GIB, 32 * GIB];
const OBJECT: u64 = 8 * MIB;

fn frame(object: usize, page: u64) -> u64 {
    match object {
        0 => FRAMES[0] + page * PAGE,
        _ => FRAMES[1] + page * PAGE + page / 768 * MIB,
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Object and first page in it; by two calls, one half after the other.
    Map(usize, u64, bool),
    Unmap,
    /// Unmaps the whole range of the map call whose page is at the beginning.
    UnmapCall,
    Release,
    Restore,
    TakeOut,
    PutBack,
}

/// An operation on a range of pages of an address space.
fn op() -> impl Strategy<Value = (usize, u64, u64, Op)> {
    let kind = prop_oneof![
        3 => (0..2usize, prop_oneof![Just(0), 0..1500u64], any::<bool>())
            .prop_map(|(object, first, twice)| Op::Map(object, first, twice)),
        2 => Just(Op::Unmap),
        1 => Just(Op::UnmapCall),
        6 => Just(Op::Release),
        4 => Just(Op::Restore),
        3 => Just(Op::TakeOut),
        2 => Just(Op::PutBack),
    ];
    let len = prop_oneof![3 => 1..8u64, 2 => Just(512), 2 => 300..1100u64];
    let start = prop_oneof![(0..4u64).prop_map(|n| n * 512), 0..PAGES - 1];
    (0..SPACES, start, len, kind).prop_map(|(space, start, len, kind)| {
        let len = len.min(PAGES - start);
        match kind {
            Op::Map(object, first, twice) => {
                let len = len.min(OBJECT / PAGE - first);
                (space, start, len, Op::Map(object, first, twice))
            }
            other => (space, start, len, other),
        }
    })
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Page {
    object: usize,
    page: u64,
    released: bool,
    out: bool,
    /// Number of the call that has mapped it.
    call: usize,
}

fn alike(page: &Page) -> (usize, bool, bool) {
    (page.call, page.released, page.out)
}

/// Areas are what lies side by side of one call, is alike, and has no cut between.
fn look_at_areas(space: &Space, model: &[Option<Page>], cuts: &BTreeSet<u64>) {
    let mut expected: Vec<Span<Iova>> = Vec::new();
    let mut before = None;
    for (n, page) in (0..).zip(model) {
        let at = AT + n * PAGE;
        let page = page.as_ref().map(alike);
        match expected.last_mut() {
            Some(area) if page.is_some() && page == before && !cuts.contains(&n) => {
                area.len += PAGE;
            }
            _ => expected.extend(page.map(|_| Span::new(at, PAGE))),
        }
        before = page;
    }
    let areas: Vec<Span<Iova>> = space.areas().into_iter().map(|area| area.range()).collect();
    assert_eq!(areas, expected);
}

/// The areas over a part of a memory are those that a look at all of them finds.
fn look_by_memory(space: &mut Space, memory: &Arc<Memory>, part: Span<Offset>) {
    for part in [part, Span::new(part.start, PAGE), Span::new(part.start, 0)] {
        let over = |area: &Area| Arc::ptr_eq(area.memory(), memory) && area.part().overlaps(&part);
        let expected: BTreeSet<u64> = space
            .areas()
            .into_iter()
            .filter(over)
            .map(|area| area.range().start)
            .collect();
        let mut found: Vec<u64> = Vec::new();
        space.areas_over(memory, part, |area| found.push(area.range().start));
        assert_eq!(found.len(), expected.len(), "{part}: {found:x?}");
        assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected);
    }
}

fn check(ops: &[(usize, u64, u64, Op)]) {
    let tables = Arc::new(HeapTables::with_tables(256).unwrap());
    let ledger = Ledger::new("a counter", None, 0);
    let runs = [
        vec![Span::new(FRAMES[0], OBJECT)],
        (0..3)
            .map(|n| Span::new(FRAMES[1] + n * 4 * MIB, (OBJECT - n * 3 * MIB).min(3 * MIB)))
            .collect(),
    ];
    let objects = runs.map(|runs| Arc::new(Synthetic::new(runs)));
    let memories: Vec<Arc<Memory>> = objects
        .iter()
        .map(|object| Memory::new(object.clone(), &ledger))
        .collect();
    let mut spaces: Vec<Space> = [FormatId::VtdSs, FormatId::X86_64, FormatId::AmdV1]
        .into_iter()
        .map(|format| space(format, 4, &tables))
        .collect();
    let mut model = vec![vec![None::<Page>; PAGES as usize]; SPACES];
    let mut calls: Vec<(u64, u64)> = Vec::new();
    // Parts that are taken out are put back as they were: areas stay cut where two calls meet.
    let mut cuts = vec![BTreeSet::<u64>::new(); SPACES];

    for (step, (n, start, len, op)) in ops.iter().enumerate() {
        let range = Span::new(AT + start * PAGE, len * PAGE);
        let pages = *start as usize..(start + len) as usize;
        if let (Op::UnmapCall, Some(page)) = (op, model[*n][*start as usize]) {
            let (start, len) = calls[page.call];
            let all = start as usize..(start + len) as usize;
            let unmapped = spaces[*n].unmap(Span::new(AT + start * PAGE, len * PAGE));
            let there = model[*n][all.clone()].iter().flatten().count() as u64;
            // Another call may have mapped something over an end, where this one was cut.
            let calls = |at: usize| model[*n].get(at).copied().flatten().map(|page| page.call);
            let cut = |at: usize| calls(at).is_some() && at > 0 && calls(at - 1) == calls(at);
            match unmapped {
                Ok(unmapped) => {
                    assert_eq!(unmapped.bytes, there * PAGE);
                    cuts[*n].retain(|at| !(start..=start + len).contains(at));
                    model[*n][all].fill(None);
                }
                Err(cause) => assert!(cut(all.start) || cut(all.end), "{cause}"),
            }
        }
        let (space, here) = (&mut spaces[*n], &mut model[*n][pages]);
        let (cuts, ends) = (&mut cuts[*n], *start..=start + len);
        let covered = here.iter().all(Option::is_some);
        match op {
            Op::Map(object, first, twice) => {
                let half = if *twice { len / 2 } else { 0 };
                for (before, len) in [(0, half), (half, len - half)] {
                    let (iova, part) = (start + before, (first + before) * PAGE);
                    let part = Span::new(part, len * PAGE);
                    let memory = &memories[*object];
                    let mapped = space.map(AT + iova * PAGE, memory, part, Prot::RW);
                    let here = &mut here[before as usize..(before + len) as usize];
                    let vacant = len > 0 && here.iter().all(Option::is_none);
                    assert_eq!(mapped.is_ok(), vacant);
                    for (page, n) in here.iter_mut().zip(first + before..).filter(|_| vacant) {
                        *page = Some(Page {
                            object: *object,
                            page: n,
                            released: false,
                            out: false,
                            call: calls.len(),
                        });
                    }
                    calls.push((iova, len));
                }
            }
            Op::Unmap => {
                space.unmap_cutting(range, NEVER).unwrap();
                here.fill(None);
                cuts.retain(|at| !ends.contains(at));
            }
            Op::UnmapCall => {}
            Op::Release => {
                let mut kept = 0;
                space.release(&[range], NEVER, &mut |_, _| kept += 1);
                assert_eq!(kept == 0, covered);
                if covered {
                    cuts.retain(|at| !ends.contains(at));
                }
                for page in here.iter_mut().flatten().filter(|_| covered) {
                    page.released = true;
                }
            }
            Op::Restore => {
                let failed = &mut |range, cause| panic!("{range}: {cause}");
                space.restore(&[range], NEVER, failed);
                cuts.retain(|at| !ends.contains(at));
                for page in here.iter_mut().flatten() {
                    page.released = false;
                }
            }
            Op::TakeOut => {
                let taken = space.take_out(range, NEVER);
                assert_eq!(taken.is_ok(), covered);
                if covered {
                    cuts.extend([*ends.start(), *ends.end()]);
                    let pairs = (*start + 1..).zip(here.windows(2));
                    let differ = pairs.filter(|(_, pair)| {
                        let [one, next] = [pair[0], pair[1]].map(|page| page.as_ref().map(alike));
                        one != next
                    });
                    cuts.extend(differ.map(|(at, _)| at));
                }
                for page in here.iter_mut().flatten().filter(|_| covered) {
                    page.out = true;
                }
            }
            Op::PutBack => {
                if space.put_back(range, NEVER).is_ok() {
                    cuts.retain(|at| !ends.contains(at));
                    for page in here.iter_mut().flatten() {
                        page.out = false;
                    }
                }
            }
        }
        // Not from the beginning, so that there are areas when it is asked first.
        if step >= 3 {
            let part = Span::new(start * PAGE, range.len);
            memories
                .iter()
                .for_each(|memory| look_by_memory(&mut spaces[*n], memory, part));
        }
        look_at_areas(&spaces[*n], &model[*n], cuts);
        let visible = |page: &&Page| !page.released && !page.out;
        for (space, model) in spaces.iter().zip(&model) {
            for (at, page) in model.iter().enumerate() {
                let there = page.as_ref().filter(visible);
                let expected = there.map(|page| frame(page.object, page.page));
                assert_eq!(
                    space.translate(AT + at as u64 * PAGE),
                    expected,
                    "page {at}"
                );
            }
        }
        let all = || model.iter().flatten().flatten();
        for (object, (synthetic, memory)) in objects.iter().zip(&memories).enumerate() {
            let of = |page: &&Page| page.object == object;
            let held: BTreeSet<u64> = all()
                .filter(of)
                .filter(visible)
                .map(|page| page.page)
                .collect();
            let kept = |page: &&Page| page.released && !page.out;
            let kept = all().filter(of).filter(kept);
            let kept: BTreeSet<u64> = kept.map(|page| page.page).collect();
            let only_kept = kept.difference(&held).count() as u64;
            assert_eq!(synthetic.pinned(), held.len() as u64 * PAGE);
            assert_eq!(memory.reserved(), only_kept * PAGE);
            assert_eq!(memory.charged(), (held.len() as u64 + only_kept) * PAGE);
        }
        let charged: u64 = memories.iter().map(|memory| memory.charged()).sum();
        assert_eq!(ledger.in_use(), charged);
    }
    for space in spaces {
        space.unmap_all().unwrap();
        space.close().unwrap();
    }
    assert_eq!((tables.in_use(), ledger.in_use()), (0, 0));
}

proptest! {
    #[test]
    fn released_and_restored_as_a_flag_of_each_page(ops in prop::collection::vec(op(), 1..24)) {
        check(&ops);
    }
}
