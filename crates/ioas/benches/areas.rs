//! One area of 4 KiB comes and goes beside very many others: what a whole `Ioas::map` and `unmap` cost.
//!
//! Tables of ours without a device, so that no flush is needed; memory of given physical runs, which costs nothing to
//! pin. The map of areas, accounts and tables is measured: a leaf table for 256
//! areas, as there is a page between any two. Areas are in any order, and a sixteenth of them come and go.
//! Each round begins with nothing; what is printed is the median of the rounds' medians of batches of 256,
//! in nanoseconds for one operation. `cargo bench -p dmaspace-ioas --bench areas`; without `--bench` (as
//! `cargo test --benches` runs it) one small round. `--instructions COUNT` does it once with so many areas
//! and prints nothing, for valgrind: `--tool=callgrind --toggle-collect='*guests_come'`, or `'*guests_go'`.
//!
//! # What was found
//!
//! November 2026, two processors of a virtual machine that builds kept busy; medians of the same bench over
//! the code of now and of before, in turns:
//!
//! | areas | map, ns | before | unmap, ns | before |
//! |---:|---:|---:|---:|---:|
//! | 1,000 | 407 | 757 | 434 | 614 |
//! | 65,536 | 1,191 | 1,682 | 999 | 1,353 |
//! | 1,000,000 | 3,504 | 4,958 | 4,305 | 5,050 |
//!
//! Instructions of one by callgrind, beside 61,440 areas: map 5,239 (before 9,763), unmap 4,768 (7,409).
//! Removed: a search of all gaps of a node; a second look for the area that was just inserted; a
//! change of a memory's parts that changed nothing, and lists of stretches where one is all; four of six ways
//! down for what is unmapped; locked instructions for charges of nothing. An area takes 32 bytes less, since
//! few keep a charge: with a million of them the process had 261 MB instead of 293.
//!
//! The hold takes 47 in 100 of the instructions of a map (a third of them for its place in the tree of parts, the rest
//! to look, to pin and to allocate), the run and the table 23, the tree of areas 18. With very many areas cache misses
//! take the time: in a second-level cache of 2 MiB, as callgrind models it, a map misses 17 lines for reading and 4 for
//! writing beside 65,536 areas. Most of them are leaves of the two trees, where each look reads the first start of
//! every line at once.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use ioas::{FixedRuns, Ioas, Ledger, Memory};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};

const PAGE: u64 = 4096;
const AT: u64 = 1 << 32;

type Space = Ioas;

struct Case {
    space: Space,
    memory: Arc<Memory>,
    /// Areas by number: those that stay, and those that come and go.
    stay: Vec<u64>,
    guests: Vec<u64>,
}

impl Case {
    fn new(count: u64) -> Self {
        let leaf_tables = (2 * count).div_ceil(512) + 1;
        let room = leaf_tables + leaf_tables.div_ceil(512) + 8;
        let tables = Arc::new(HeapTables::with_tables(room).unwrap());
        let sizes = PageSizes::from_bits(u64::MAX);
        let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables).unwrap();
        let object = FixedRuns::new([Span::new(1 << 40, count * PAGE)], PAGE).unwrap();
        let mut stay: Vec<u64> = (0..count).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut stay);
        let guests = stay.split_off((count - count / 16) as usize);
        Self {
            space: Ioas::over_table(DomainId(1), table),
            memory: Memory::new(Arc::new(object), &Ledger::unlimited()),
            stay,
            guests,
        }
    }
}

fn map(space: &mut Space, memory: &Arc<Memory>, n: u64) {
    let part = Span::new(n * PAGE, PAGE);
    let iova = AT + 2 * n * PAGE;
    space.map(iova, memory, part, Prot::RW).unwrap();
}

fn unmap(space: &mut Space, n: u64) {
    let range = Span::new(AT + 2 * n * PAGE, PAGE);
    assert_eq!(space.unmap(range).unwrap().areas, 1);
}

/// The operations by themselves, for valgrind.
#[inline(never)]
fn guests_come(space: &mut Space, memory: &Arc<Memory>, numbers: &[u64]) {
    numbers.iter().for_each(|n| map(space, memory, *n));
}

#[inline(never)]
fn guests_go(space: &mut Space, numbers: &[u64]) {
    numbers.iter().for_each(|n| unmap(space, *n));
}

fn one(count: u64) {
    let Case {
        mut space,
        memory,
        stay,
        guests,
    } = Case::new(count);
    stay.iter().for_each(|n| map(&mut space, &memory, *n));
    guests_come(&mut space, &memory, &guests);
    guests_go(&mut space, &guests);
}

/// Nanoseconds for one of `numbers`: the median of batches of 256.
fn timed(numbers: &[u64], mut operation: impl FnMut(u64)) -> f64 {
    let batches = numbers.chunks(256).map(|batch| {
        let begin = Instant::now();
        batch.iter().for_each(|n| operation(*n));
        begin.elapsed().as_nanos() as f64 / batch.len() as f64
    });
    median(batches.collect())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn beside(count: u64, rounds: usize) {
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..rounds {
        let Case {
            mut space,
            memory,
            stay,
            guests,
        } = Case::new(count);
        let fill = timed(&stay, |n| map(&mut space, &memory, n));
        let look = timed(&guests, |n| {
            black_box(space.area_at(AT + 2 * n * PAGE));
        });
        let come = timed(&guests, |n| map(&mut space, &memory, n));
        let go = timed(&guests, |n| unmap(&mut space, n));
        for (all, time) in times.iter_mut().zip([fill, look, come, go]) {
            all.push(time);
        }
    }
    let [fill, look, come, go] = times.map(median);
    println!("{count:>9} areas {fill:>9.0} {look:>9.0} {come:>9.0} {go:>9.0} ns");
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|word| word == "--instructions") {
        return one(arguments[at + 1].parse().unwrap());
    }
    println!(
        "{:15} {:>9} {:>9} {:>9} {:>9}",
        "", "fill", "look", "map", "unmap"
    );
    if arguments.iter().any(|word| word == "--bench") {
        beside(1000, 101);
        beside(65_536, 11);
        beside(1_000_000, 3);
    } else {
        beside(1000, 1);
    }
}
