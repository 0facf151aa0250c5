//! Properties of every peer, seen by a walker that was written from the specification.

use std::collections::HashSet;

use iopt::walk::{Access, Walker};
use iopt::{FormatId, Root};

use super::*;
use crate::peers::memory::Reader;
use crate::peers::work::{IOVA, PA};

/// Collects runs.
#[derive(Default)]
struct Collected(Vec<Run>);

impl Sink for Collected {
    const WANTED: bool = true;

    fn push(&mut self, run: Run) {
        match self.0.last_mut() {
            Some(last) if last.is_followed_by(&run) => last.len += run.len,
            _ => self.0.push(run),
        }
    }
}

/// All that a peer must hold to; `root` tells the address of its root.
pub(crate) fn holds<P: Peer>(format: FormatId, root: impl Fn(&P) -> u64) {
    let before = memory::in_use();
    let walk = |peer: &P, iova| {
        let root = Root {
            format,
            address: root(peer),
            levels: 4,
        };
        let found = Walker::new(root).walk(&Reader, iova, Access::Write, &mut ());
        found.ok().map(|found| (found.pa, found.page.len))
    };
    maps_what_it_is_asked_to::<P>(&walk);
    for work in kinds() {
        leaves_things_as_they_were::<P>(&work, &walk);
    }
    assert_eq!(memory::in_use(), before, "tables are lost");
}

fn maps_what_it_is_asked_to<P: Peer>(walk: &impl Fn(&P, u64) -> Option<(u64, u64)>) {
    for (leaves, page, count) in [
        (Leaves::Small, SMALL, 1),
        (Leaves::Small, SMALL, 300),
        (Leaves::Small, SMALL, 1024),
        (Leaves::Large, LARGE, 1),
        (Leaves::Large, LARGE, 700),
        (Leaves::Any, SMALL, 256),
    ] {
        for tables in [Tables::Stay, Tables::GoBack] {
            let mut peer = P::new().unwrap();
            let range = Span::new(IOVA + 3 * page, count * page);
            let pa = PA + (1 << 30) + page;
            // It keeps the upper tables.
            let keeper = Span::new(IOVA - page, page);
            peer.map(keeper, PA, leaves).unwrap();
            let held = memory::in_use();
            peer.map(range, pa, leaves).unwrap();
            let grown = memory::in_use();
            assert!(grown > held, "{leaves:?} {count}");
            for n in 0..count {
                let (at, to) = (range.start + n * page + 5, pa + n * page + 5);
                assert_eq!(walk(&peer, at), Some((to, page)), "{leaves:?} {n}");
                assert_eq!(peer.translate(at), Some(to), "{leaves:?} {n}");
            }
            let around = [range.start - 1, range.start + range.len];
            assert_eq!(around.map(|at| walk(&peer, at)), [None; 2], "{leaves:?}");
            assert_eq!(around.map(|at| peer.translate(at)), [None; 2]);
            let mut runs = Collected::default();
            peer.unmap(range, leaves, tables, &mut runs).unwrap();
            assert_eq!(runs.0, [Run::new(range.start, Span::new(pa, range.len))]);
            for n in 0..count {
                assert_eq!(walk(&peer, range.start + n * page), None, "{leaves:?} {n}");
            }
            assert_eq!(walk(&peer, keeper.start), Some((PA, page)));
            if tables == Tables::GoBack && P::GIVES_BACK {
                assert_eq!(memory::in_use(), held, "{leaves:?} {count}");
            } else if P::KEEPS {
                assert_eq!(memory::in_use(), grown, "{leaves:?} {count}");
            }
            // Into tables that stayed, or new ones; and nothing is asked for.
            peer.map(range, pa, leaves).unwrap();
            peer.unmap(range, leaves, tables, &mut Unwanted).unwrap();
            assert_eq!(walk(&peer, range.start), None);
        }
    }
}

/// Does `work` three times; in between, the table must map what it mapped before, in as many tables.
fn leaves_things_as_they_were<P: Peer>(work: &Work, walk: &impl Fn(&P, u64) -> Option<(u64, u64)>) {
    let outside = memory::in_use();
    let mut bench = Bench::<P>::new();
    let offered = match work {
        Work::Harvest { .. } | Work::Merge { .. } | Work::UnmapDirty { .. } => false,
        Work::MapSeveral { .. } | Work::UnmapSeveral { .. } => false,
        Work::Split { page } => P::SPLITS && *page == LARGE,
        Work::UnmapAllocated { .. } | Work::Cycle { .. } => P::GIVES_BACK,
        Work::Map { page, count, .. } => Leaves::of(*page).is_some() && (P::KEEPS || *count < 1024),
        _ => true,
    };
    let first = bench.sample(work).unwrap();
    assert_eq!(first.is_some(), offered, "{work:?}");
    if first.is_none() {
        return;
    }
    let mapped = |bench: &Bench<P>| {
        let ready = bench.ready.as_ref().unwrap();
        let places = &ready.places;
        let spans = places.ranges.iter().chain(&places.beside);
        let pages = spans.chain(&places.keeper).flat_map(|span| {
            let page = if ready.leaves == Leaves::Large {
                LARGE
            } else {
                SMALL
            };
            (0..span.len / page).map(move |n| span.start + n * page)
        });
        pages
            .filter_map(|at| Some((at, walk(&ready.peer, at)?)))
            .collect::<HashSet<_>>()
    };
    let (held, before) = (memory::in_use(), mapped(&bench));
    let stays = matches!(work, Work::Translate { .. } | Work::Split { .. });
    let ready = bench.ready.as_ref().unwrap();
    for range in &ready.places.ranges {
        let there = [range.start, range.last()].map(|at| walk(&ready.peer, at).is_some());
        assert_eq!(there, [stays; 2], "{work:?}: {range}");
    }
    for _ in 0..2 {
        let taken = bench.sample(work).unwrap().unwrap();
        assert!(taken.is_finite(), "{work:?}: {taken}");
        assert_eq!(memory::in_use(), held, "{work:?}");
        assert_eq!(mapped(&bench), before, "{work:?}");
    }
    drop(bench);
    assert_eq!(memory::in_use(), outside, "{work:?}");
}

/// Some of every kind.
fn kinds() -> Vec<Work> {
    let (page, count) = (SMALL, 2000);
    let mut all = vec![
        Work::MapAllocated { page, count },
        Work::UnmapAllocated {
            page,
            count,
            runs: true,
        },
        Work::UnmapAllocated {
            page,
            count: 1 << 18,
            runs: false,
        },
        Work::Cycle { page, count: 512 },
        Work::MapSeveral { page },
        Work::UnmapSeveral { page },
        Work::MapChosen,
        Work::UnmapChosen,
        Work::Translate { page },
        Work::Translate { page: LARGE },
        Work::Harvest { page, dirty: true },
        Work::UnmapDirty { page, count: 256 },
        Work::Split { page: LARGE },
        Work::Merge { page: LARGE },
        Work::Map {
            page: 64 << 10,
            count: 1,
            beside: Beside::Page,
        },
        Work::Map {
            page,
            count: 1024,
            beside: Beside::Page,
        },
    ];
    for (page, count) in [(SMALL, 1), (SMALL, 256), (SMALL, 512), (LARGE, 256)] {
        for beside in [Beside::Page, Beside::Half] {
            all.push(Work::Map {
                page,
                count,
                beside,
            });
            for runs in [false, true] {
                all.push(Work::Unmap {
                    page,
                    count,
                    beside,
                    runs,
                });
            }
        }
    }
    all
}
