//! Tables in a memory file go from one process to the next, while a unit walks them.

#![cfg(feature = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::fs::File;
use std::io::stdin;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use hostmem::{Backing, Mapping, MappingError};
use ioas::{HostTables, MappedStorage};
use iopt::format::VtdSs;
use iopt::walk::{Access, Walker};
use iopt::{Cell, FormatId, Gather, NoRuns, Prot, Root, Table, TableOps as _, Takeover};
use runs::{PageSizes, Span};

const BYTES: u64 = 1 << 20;
const BASE: u64 = 1 << 46;
const PAGE: u64 = 4096;
const G1: u64 = 1 << 30;

/// Mappings of the first process.
const FIRST: [(u64, u64, u64); 3] = [
    (5 * PAGE, 9 * G1 + PAGE, 700 * PAGE),
    (G1, 8 * G1, 4 << 20),
    (7 << 39, 64 * G1, G1),
];

fn seen(unit: &HostTables, root: Root, iova: u64) -> Option<u64> {
    let walk = Walker::new(root).walk(unit, iova, Access::Write, &mut ());
    walk.ok().map(|found| found.pa)
}

fn also(mapping: &Mapping) -> Mapping {
    let file = mapping.fd().unwrap().try_clone_to_owned().unwrap();
    Mapping::of_file(file).unwrap()
}

/// The process that is gone when the other one begins: its memory is what it has for input.
#[test]
#[ignore = "the first half of the test below, which runs it in a process of its own"]
fn the_process_before() {
    let file = stdin().as_fd().try_clone_to_owned().unwrap();
    let storage = MappedStorage::over(Mapping::of_file(file).unwrap());
    let tables = HostTables::new(storage, BASE).unwrap();
    let mut table = Table::new(VtdSs::new(4).unwrap(), &tables).unwrap();
    for (iova, pa, len) in FIRST {
        table.map(iova, &[Span::new(pa, len)], Prot::RW).unwrap();
    }
    // Some tables that are in use no more, with something in them.
    let at = 99 * G1;
    table
        .map(at, &[Span::new(G1 + PAGE, 600 * PAGE)], Prot::RW)
        .unwrap();
    let mut gather = Gather::new();
    let range = Span::new(at, 600 * PAGE);
    table.unmap(range, &mut gather, &mut NoRuns).unwrap();
    table.reclaim(gather.never_walked());
    println!("root {} tables {}", table.root().address, table.tables());
}

#[test]
fn tables_that_another_process_left_are_adopted_while_a_unit_walks() {
    let mapping = Mapping::new(Backing::Memfd, BYTES, None).unwrap();
    let unit = HostTables::new(MappedStorage::over(also(&mapping)), BASE).unwrap();

    let file: OwnedFd = mapping.fd().unwrap().try_clone_to_owned().unwrap();
    let before = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_process_before", "--ignored", "--nocapture"])
        .stdin(Stdio::from(file))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&before.stdout);
    assert!(before.status.success(), "{said}");
    let number = |what: &str| -> u64 {
        let mut words = said.split_whitespace();
        words.find(|word| *word == what).unwrap();
        words.next().unwrap().parse().unwrap()
    };
    let (root, count) = (number("root"), number("tables"));

    let told = Root {
        format: FormatId::VtdSs,
        address: root,
        levels: 4,
    };
    let (stop, walks) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let device = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for (iova, pa, len) in FIRST {
                    for offset in [0, len / 2, len - 1] {
                        assert_eq!(seen(&unit, told, iova + offset), Some(pa + offset));
                    }
                }
                walks.fetch_add(1, Ordering::Relaxed);
            }
        });
        let running = || {
            let until = walks.load(Ordering::Relaxed) + 50;
            while walks.load(Ordering::Relaxed) < until {
                assert!(!device.is_finished(), "the device has met a fault");
                thread::yield_now();
            }
        };
        running();
        let bytes: Vec<u64> = mapping.cells().iter().map(Cell::get).collect();
        let mut takeover: Takeover<_> =
            Takeover::new(MappedStorage::over(also(&mapping)), BASE).unwrap();
        let sizes = PageSizes::from_bits(u64::MAX);
        let adopted = takeover.adopt(VtdSs::new(4).unwrap(), root, sizes).unwrap();
        let tables: HostTables = takeover.finish();
        let mut table = adopted.open(&tables).unwrap();
        assert!(mapping.cells().iter().map(Cell::get).eq(bytes));
        assert_eq!((table.tables(), tables.in_use()), (count, count));
        running();

        // The new owner maps and unmaps, and reuses what the old one had left over.
        table
            .map(99 * G1, &[Span::new(3 * G1 + PAGE, 1500 * PAGE)], Prot::RW)
            .unwrap();
        assert_eq!(
            seen(&unit, told, 99 * G1 + 1499 * PAGE),
            Some(3 * G1 + 1500 * PAGE)
        );
        assert_eq!(seen(&unit, told, 99 * G1 + 1500 * PAGE), None);
        let mut gather = Gather::new();
        let range = Span::new(99 * G1, 1500 * PAGE);
        table.unmap(range, &mut gather, &mut NoRuns).unwrap();
        table.reclaim(gather.never_walked());
        running();
        stop.store(true, Ordering::Relaxed);
        device.join().unwrap();
        for (iova, _, len) in FIRST {
            let mut gather = Gather::new();
            table
                .unmap(Span::new(iova, len), &mut gather, &mut NoRuns)
                .unwrap();
            table.reclaim(gather.never_walked());
        }
        assert_eq!(tables.in_use(), 1);
    });
}

#[test]
fn a_file_that_may_shrink_is_not_mapped() {
    let plain = File::open("/proc/self/exe").unwrap();
    assert!(matches!(
        Mapping::of_file(plain.into()),
        Err(MappingError::Refused { .. })
    ));
    // A file in memory, but not sealed.
    let path = format!("/dev/shm/dmaspace-handover-{}", std::process::id());
    let Ok(file) = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
    else {
        eprintln!("SKIPPED in part: no /dev/shm");
        return;
    };
    std::fs::remove_file(&path).unwrap();
    file.set_len(BYTES).unwrap();
    let refused = Mapping::of_file(file.into());
    assert!(
        matches!(refused, Err(MappingError::Unsealed)),
        "{refused:?}"
    );
}
