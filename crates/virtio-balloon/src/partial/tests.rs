use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::vec;
use std::vec::Vec;

const PAGE: u64 = WIRE_PAGE;

/// The plain set of pages, with the whole huge pages counted anew each time.
#[derive(Default)]
struct Model(BTreeSet<u64>);

impl Model {
    fn is_whole(&self, huge: u64, full: u64) -> bool {
        (huge * full..(huge + 1) * full).all(|page| self.0.contains(&page))
    }
}

/// Pages of 4 KiB in a huge page, huge pages, and steps: inflate or deflate, first page, pages.
fn steps() -> impl Strategy<Value = (u64, u64, Vec<(bool, u64, u64)>)> {
    (
        prop_oneof![
            Just(2u64),
            Just(4),
            Just(16),
            Just(64),
            Just(128),
            Just(512)
        ],
        1u64..6,
    )
        .prop_flat_map(|(full, huge)| {
            let all = full * huge;
            let step = (any::<bool>(), 0..all + 3, 1..2 * full + 2);
            (
                Just(full),
                Just(huge),
                proptest::collection::vec(step, 0..40),
            )
        })
}

proptest! {
    #[test]
    fn it_is_the_plain_set_of_pages((full, huge, steps) in steps(), base in 0u64..4) {
        let bytes = full * PAGE;
        let region = Span::new(base * bytes, huge * bytes);
        let mut memory = vec![u64::MAX; PartialHugePages::words(region.len, bytes) as usize];
        let mut tracker = PartialHugePages::new(region, bytes, &mut memory).unwrap();
        let mut model = Model::default();
        for (inflate, first, pages) in steps {
            let run = Span::new(region.start + first * PAGE, pages * PAGE);
            let inside: Vec<u64> = (first..first + pages).filter(|page| *page < full * huge).collect();
            if inflate {
                let mut found = Vec::new();
                let new = tracker.inflate(run, |run| found.push(run));
                let mut expected_new = 0;
                for page in &inside {
                    expected_new += u64::from(model.0.insert(*page));
                }
                prop_assert_eq!(new, expected_new * PAGE);
                let touched: BTreeSet<u64> = inside.iter().map(|page| page / full).collect();
                let expected: Vec<u64> = touched.into_iter().filter(|nr| model.is_whole(*nr, full)).collect();
                let whole: Vec<u64> = found.iter()
                    .flat_map(|run| (run.start - region.start) / bytes..(run.last() + 1 - region.start) / bytes)
                    .collect();
                prop_assert_eq!(whole, expected);
                for pair in found.windows(2) {
                    prop_assert!(pair[0].last() + 1 < pair[1].start);
                }
            } else {
                let gone = tracker.deflate(run);
                let expected = inside.iter().filter(|page| model.0.remove(page)).count() as u64;
                prop_assert_eq!(gone, expected * PAGE);
            }
            prop_assert_eq!(tracker.bytes(), model.0.len() as u64 * PAGE);
            let whole = (0..huge).filter(|nr| model.is_whole(*nr, full)).count() as u64;
            prop_assert_eq!(tracker.whole_bytes(), whole * bytes);
        }
        tracker.forget();
        prop_assert_eq!(tracker.bytes() + tracker.whole_bytes(), 0);
        prop_assert_eq!(tracker.inflate(region, |_| ()), region.len);
    }
}

/// Bytes to be left out or taken, in turn: as short as half a page, as long as several words.
fn lengths() -> impl Strategy<Value = Vec<u64>> {
    let len = prop_oneof![1u64..8, 1u64..8, 1u64..200, 120u64..1100];
    proptest::collection::vec(len.prop_map(|halves| halves * PAGE / 2), 0..60)
}

proptest! {
    #[test]
    fn many_runs_are_as_one_by_one(
        order in 1u32..10,
        steps in proptest::collection::vec((any::<bool>(), 0u64..40, lengths()), 0..8),
    ) {
        let huge = PAGE << order;
        let len = (8 * 512 * PAGE).next_multiple_of(huge);
        let region = Span::new(4 * len, len);
        let mut memory = [(); 2].map(|()| vec![0; PartialHugePages::words(len, huge) as usize]);
        let [mut all, mut single] = memory.each_mut().map(|memory| {
            PartialHugePages::new(region, huge, memory).unwrap()
        });
        for (inflate, before, lengths) in steps {
            // From before the region's start to behind its end, ascending.
            let mut at = region.start - before * PAGE;
            let mut runs = Vec::new();
            for pair in lengths.chunks(2) {
                let [gap, len] = [pair[0], *pair.last().unwrap()];
                runs.push(Span::new(at + gap, len));
                at += gap + len;
            }
            if inflate {
                let mut found = Vec::new();
                let new = all.inflate_all(runs.iter().copied(), |run| found.push(run));
                let mut expected_new = 0;
                let mut expected = BTreeSet::new();
                for run in &runs {
                    expected_new += single.inflate(*run, |run| {
                        expected.extend((run.start..=run.last()).step_by(huge as usize));
                    });
                }
                prop_assert_eq!(new, expected_new);
                let pages: Vec<_> = found.iter()
                    .flat_map(|run| (run.start..=run.last()).step_by(huge as usize))
                    .collect();
                prop_assert_eq!(pages, expected.into_iter().collect::<Vec<_>>());
                for pair in found.windows(2) {
                    prop_assert!(pair[0].last() + 1 < pair[1].start);
                }
            } else {
                let gone = all.deflate_all(runs.iter().copied());
                prop_assert_eq!(gone, runs.iter().map(|run| single.deflate(*run)).sum::<u64>());
            }
            prop_assert_eq!(all.bytes(), single.bytes());
            prop_assert_eq!(all.whole_bytes(), single.whole_bytes());
            prop_assert_eq!(&all.bits, &single.bits);
        }
    }
}

#[test]
fn a_page_that_came_back_makes_its_huge_page_whole_again() {
    let mut memory = [0; 17];
    let region = Span::new(4 << 20, 4 << 20);
    let mut tracker = PartialHugePages::new(region, 2 << 20, &mut memory[..]).map_err(|error| {
        assert_eq!(
            error,
            BadRegion::Room {
                words: 17,
                needed: 18
            }
        )
    });
    assert!(tracker.is_err());
    let mut memory = [0; 18];
    tracker = PartialHugePages::new(region, 2 << 20, &mut memory[..]).map_err(|_| ());
    let mut tracker = tracker.unwrap();
    let mut whole = Vec::new();
    tracker.inflate(Span::new(4 << 20, 4 << 20), |run| whole.push(run));
    assert_eq!(whole, [region], "two neighbours are one run");
    let page = Span::new((6 << 20) + 0x5000, 0x1000);
    assert_eq!(tracker.deflate(page), 0x1000);
    assert_eq!(tracker.deflate(page), 0, "it is not in the balloon");
    assert_eq!(tracker.whole_bytes(), 2 << 20);
    whole.clear();
    tracker.inflate(page, |run| whole.push(run));
    assert_eq!(whole, [Span::new(6 << 20, 2 << 20)]);
}

#[test]
fn parts_of_pages_and_other_addresses_change_nothing() {
    let mut memory = [0; 9];
    let region = Span::new(2 << 20, 2 << 20);
    let mut tracker = PartialHugePages::new(region, 2 << 20, &mut memory).unwrap();
    for run in [
        Span::new(0, 2 << 20),
        Span::new(4 << 20, u64::MAX),
        Span::new((2 << 20) + 1, 0x1ffe),
        Span::new(2 << 20, 0),
    ] {
        assert_eq!(tracker.inflate(run, |_| panic!("nothing is whole")), 0);
        assert_eq!(tracker.deflate(run), 0);
    }
    assert_eq!(tracker.inflate(Span::new(0, u64::MAX), |_| ()), 2 << 20);
}

#[test]
fn regions_that_are_not_huge_pages_are_refused() {
    let refused = |region, huge| PartialHugePages::new(region, huge, &mut [0; 64]).unwrap_err();
    let region = Span::new(0x1000, 2 << 20);
    assert_eq!(
        refused(region, 2 << 20),
        BadRegion::NotPages {
            region,
            huge: 2 << 20
        }
    );
    assert_eq!(refused(region, 4096), BadRegion::Size { huge: 4096 });
    assert_eq!(refused(region, 0), BadRegion::Size { huge: 0 });
    let empty = Span::new(0, 0);
    assert_eq!(
        refused(empty, 2 << 20),
        BadRegion::NotPages {
            region: empty,
            huge: 2 << 20
        }
    );
}
