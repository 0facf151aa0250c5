//! Linux does each kind of work that it offers, and says which it does not. Needs Linux's source, so
//! the part `compare` of the test command runs it, when it has fetched that.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use dmaspace_bench::peers::linux::{Gathering, Programs};
use dmaspace_bench::peers::work::{Beside, Subject, Work};

const K4: u64 = 4096;

#[test]
#[ignore = "needs Linux's source: run by `cargo xtask test --only compare`"]
fn linux_does_the_work_that_it_offers() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../conformance");
    let programs = Programs::build(&directory).unwrap();
    let beside = Beside::Half;
    let (page, count, runs) = (K4, 256, true);
    let offered = [
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
        Work::MapAllocated {
            page,
            count: 1 << 18,
        },
        Work::UnmapAllocated {
            page,
            count: 1 << 18,
            runs: false,
        },
        Work::Cycle {
            page,
            count: 1 << 18,
        },
        Work::MapChosen,
        Work::UnmapChosen,
        Work::Translate { page },
    ];
    let not_offered = [
        Work::UnmapDirty { page, count },
        Work::Split { page: 2 << 20 },
        Work::Merge { page: 2 << 20 },
    ];
    // Only two of these formats have dirty state in Linux 7.2's code.
    for (table, dirty) in [("amdv1", true), ("x86-64", false), ("arm-s1-4k", true)] {
        let subjects = programs.subjects(table, Gathering::Strict, true).unwrap();
        assert_eq!(subjects.len(), programs.compilers().count());
        for mut linux in subjects {
            let name = linux.name();
            for work in &offered {
                let ns = linux.sample(work).unwrap();
                eprintln!("{name}: {work:?}: {ns:?}");
                assert!(ns.is_some(), "{name}: {work:?}");
            }
            // Arm's code drops subtrees.
            let with_runs = Work::UnmapAllocated { page, count, runs };
            let ns = linux.sample(&with_runs).unwrap();
            assert_eq!(ns.is_some(), table != "arm-s1-4k", "{name}: {with_runs:?}");
            for work in &not_offered {
                assert_eq!(linux.sample(work).unwrap(), None, "{name}: {work:?}");
            }
            for all in [false, true] {
                let harvest = Work::Harvest { page, dirty: all };
                let ns = linux.sample(&harvest).unwrap();
                eprintln!("{name}: {harvest:?}: {ns:?}");
                assert_eq!(ns.is_some(), dirty, "{name}: {harvest:?}");
            }
        }
    }
    let queued = programs
        .subjects("arm-s1-4k", Gathering::Queued, false)
        .unwrap();
    for mut linux in queued {
        let name = linux.name();
        for work in &offered {
            let ns = linux.sample(work).unwrap();
            eprintln!("{name}: {work:?}: {ns:?}");
            // Work without an unmap is the same in both.
            let unmaps = ["Unmap", "Cycle"];
            let wanted = unmaps
                .iter()
                .any(|kind| format!("{work:?}").starts_with(kind));
            assert_eq!(ns.is_some(), wanted, "{name}: {work:?}");
        }
    }
}
