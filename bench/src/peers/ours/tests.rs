//! Every kind of work is done by both forms, and leaves things as they were.

use iopt::HeapTables;
use iopt::format::{ArmOptions, ArmStage1, ArmV7s, K4, VtdSs};

use super::*;

const K: u64 = 4 << 10;
const M: u64 = 2 << 20;

fn all_kinds(page: u64, block: u64) -> Vec<Work> {
    let mut all = vec![
        Work::MapAllocated { page, count: 2000 },
        Work::UnmapAllocated {
            page,
            count: 2000,
            runs: true,
        },
        Work::UnmapAllocated {
            page,
            count: 2000,
            runs: false,
        },
        Work::Cycle { page, count: 2000 },
        // Tables that would not come back in time would be missing.
        Work::Cycle {
            page,
            count: 100_000,
        },
        Work::MapSeveral { page },
        Work::UnmapSeveral { page },
        Work::MapSeveral { page: block },
        Work::MapChosen,
        Work::UnmapChosen,
        Work::Translate { page },
        Work::Split { page: block },
        Work::Merge { page: block },
    ];
    for (page, count) in [(page, 1), (page, 256), (block, 256)] {
        for beside in [Beside::Page, Beside::Half] {
            all.push(Work::Map {
                page,
                count,
                beside,
            });
            all.push(Work::Unmap {
                page,
                count,
                beside,
                runs: true,
            });
        }
    }
    all
}

/// Does `work` twice; afterwards the table must map just what it mapped before.
fn does<F: Format, M: Memory>(format: F, dirty: Option<F>, work: &Work) -> bool {
    let mut ours = Ours::<F, M, Exclusive<F, M>>::new(format, dirty);
    let mapped = |ours: &Ours<F, M, Exclusive<F, M>>| {
        let table = ours.ready.as_ref().unwrap().table.table();
        let sizes = table.leaf_sizes().iter().collect::<Vec<_>>();
        format!("{sizes:?}")
    };
    let Some(first) = ours.sample(work).unwrap() else {
        return false;
    };
    let before = mapped(&ours);
    let second = ours.sample(work).unwrap().unwrap();
    assert!(
        first.is_finite() && second.is_finite(),
        "{work:?}: {first} {second}"
    );
    assert_eq!(mapped(&ours), before, "{work:?}");
    let mut shared = Ours::<F, M, Shared<F, M>>::new(format, dirty);
    for _ in 0..3 {
        assert!(shared.sample(work).unwrap().is_some());
    }
    true
}

#[test]
fn both_forms_do_all_work_and_leave_things_as_they_were() {
    for work in all_kinds(K, M) {
        assert!(
            does::<_, HeapTables>(VtdSs::new(4).unwrap(), None, &work),
            "{work:?}"
        );
    }
    for work in all_kinds(K, 1 << 20) {
        let done = does::<_, HeapArena<AtomicU32, 10>>(<ArmV7s>::new(), None, &work);
        assert!(done, "{work:?}");
    }
}

#[test]
fn work_on_dirty_bits_takes_the_format_that_has_them() {
    let plain = ArmStage1::<K4>::new(48, 48).unwrap();
    let options = ArmOptions {
        dirty: true,
        ..ArmOptions::PLAIN
    };
    for work in [
        Work::Harvest {
            page: M,
            dirty: true,
        },
        Work::Harvest {
            page: M,
            dirty: false,
        },
        Work::UnmapDirty {
            page: K,
            count: 256,
        },
    ] {
        assert!(does::<_, HeapTables>(
            plain,
            Some(plain.with_options(options)),
            &work
        ));
        assert!(!does::<_, HeapTables>(plain, None, &work));
    }
}

#[test]
fn leaves_that_a_format_does_not_have_are_not_offered() {
    let vtd = VtdSs::new(4).unwrap();
    let odd = Work::MapAllocated {
        page: 64 << 10,
        count: 4,
    };
    assert!(!does::<_, HeapTables>(vtd, None, &odd));
    assert!(!does::<_, HeapTables>(vtd, None, &Work::Split { page: K }));
}

#[test]
fn threads_do_something_together() {
    let (vtd, lasting) = (VtdSs::new(4).unwrap(), std::time::Duration::from_millis(5));
    for terrain in [Terrain::Apart, Terrain::OneTable] {
        for count in [1, 3, 16] {
            assert!(threads::<_, HeapTables>(vtd, terrain, count, lasting).unwrap() > 0.0);
            assert!(store_loops(terrain, count, lasting) > 0.0);
        }
    }
}
