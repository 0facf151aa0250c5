//! The loops write the cells that tables have, and notice what they should.

use iopt::Cell as _;

use super::*;
use crate::peers::peer::{LARGE, SMALL, geometry};
use crate::peers::work::Beside;

fn ready(count: u64) -> Ready<AtomicU64> {
    let (page, beside) = (SMALL, Beside::Page);
    let work = Work::Map {
        page,
        count,
        beside,
    };
    Ready::prepare(&work, &geometry()).unwrap()
}

fn written(ready: &Ready<AtomicU64>) -> Vec<(usize, u64)> {
    let cells = ready.all[ready.skip..].iter();
    let cells = cells.map(|cell| cell.get()).enumerate();
    cells.filter(|(_, entry)| entry & FLAGS == FLAGS).collect()
}

#[test]
fn the_same_cells_are_written_as_in_tables() {
    let mut long = ready(700);
    long.zero((0, 700));
    assert!(long.store(long.ranges[0]));
    let expected: Vec<_> = (0..700)
        .map(|n| (n, long.pa + n as u64 * SMALL + FLAGS))
        .collect();
    assert_eq!(written(&long), expected);
    assert!(long.take(long.ranges[0]));
    assert_eq!(written(&long), []);
    assert!(!long.take(long.ranges[0]));
    assert_eq!(ready(1).ranges[5], (10, 1));
    assert_eq!(ready(256).ranges[3], (3 * 512, 256));
    assert_eq!(ready(512).ranges[1], (2 * 512 + 256, 512));
}

#[test]
fn dirty_bits_are_counted_and_cleared() {
    let mut ready = ready(700);
    let range = ready.ranges[0];
    ready.mark(range, DIRTY);
    assert!(ready.harvest(range, DIRTY));
    assert!(ready.harvest(range, 0));
    assert!(!ready.harvest(range, DIRTY));
}

#[test]
fn all_work_but_walks_is_done_by_the_stores() {
    let (page, count, beside, runs) = (SMALL, 256, Beside::Half, true);
    let mut stores = Limit::<AtomicU64>::new(geometry());
    for work in [
        Work::Map {
            page,
            count,
            beside,
        },
        Work::Unmap {
            page,
            count,
            beside,
            runs,
        },
        Work::MapSeveral { page },
        Work::UnmapSeveral { page },
        Work::Cycle { page, count: 2000 },
        Work::UnmapDirty { page, count },
        Work::Harvest { page, dirty: true },
        Work::Harvest { page, dirty: false },
        Work::Split { page: LARGE },
        Work::Merge { page: LARGE },
        Work::UnmapChosen,
    ] {
        for _ in 0..2 {
            assert!(stores.sample(&work).unwrap().is_some(), "{work:?}");
        }
    }
    let translate = Work::Translate { page };
    assert_eq!(stores.sample(&translate).unwrap(), None);
}

#[test]
fn other_geometries_have_as_many_cells_in_as_many_tables() {
    let k16 = Geometry {
        input_bits: 47,
        output_bits: 48,
        levels: vec![(14, 25), (25, 36), (36, 47)],
        entry_bytes: 8,
    };
    let (page, beside) = (16 << 10, Beside::Page);
    let work = Work::Map {
        page,
        count: 256,
        beside,
    };
    let ready = Ready::<AtomicU64>::prepare(&work, &k16).unwrap();
    assert_eq!(ready.ranges[3], (3 * 2048, 256));
    assert_eq!(ready.step, page);
    let split = Ready::<AtomicU64>::prepare(&Work::Split { page: 32 << 20 }, &k16).unwrap();
    assert_eq!(split.ranges[1], (512 + 2048, 2048));
    assert_eq!(split.step, page);
    assert!(Ready::<AtomicU64>::prepare(&Work::Split { page }, &k16).is_none());
    for work in [
        work,
        Work::Split { page: 32 << 20 },
        Work::Cycle { page, count: 3000 },
    ] {
        let ns = super::beside(&k16).sample(&work).unwrap();
        assert!(ns.is_some_and(f64::is_finite), "{work:?}");
    }
}

#[test]
fn entries_of_four_bytes_have_cells_of_four() {
    let armv7 = Geometry::of(&<iopt::format::ArmV7s>::new());
    assert_eq!(armv7.entry_bytes, 4);
    let (page, block) = (SMALL, 1 << 20);
    let (count, beside) = (256, Beside::Half);
    let map = |page| Work::Map {
        page,
        count,
        beside,
    };
    let ready = Ready::<AtomicU32>::prepare(&map(page), &armv7).unwrap();
    assert_eq!(ready.cell(0).as_ptr() as usize % 4096, 0);
    assert_eq!(ready.cell(1).as_ptr() as usize % 4096, 4);
    for work in [
        map(page),
        map(block),
        Work::Cycle { page, count: 2000 },
        Work::MapChosen,
        Work::UnmapChosen,
        Work::UnmapDirty { page, count },
        Work::Split { page: block },
        Work::Merge { page: block },
    ] {
        let ns = super::beside(&armv7).sample(&work).unwrap();
        assert!(ns.is_some_and(f64::is_finite), "{work:?}");
    }
}
