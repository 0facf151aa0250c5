//! Memory of the host from the pin to the tables and back, by steps: 8 GiB, or as much as is there,
//! of each kind of page.
//!
//! `cargo bench -p dmaspace-ioas --features linux --bench pin`; another size in MiB by
//! `DMASPACE_BENCH_MIB`. Without `--bench` (as `cargo test --benches` runs it) one small round. As
//! root the frames are real and pools of huge pages are raised for the time of the run; what cannot
//! be had is named as not run.
//!
//! The rows of a kind of page, medians of the rounds:
//!
//! - *pin*: the kernel's own pin (`io_uring`, or `mlock`), the floor for anybody who lets it pin;
//! - *find runs*: of which physical runs the pinned memory consists; beside it a plain read of all
//!   its entries in `/proc/self/pagemap`;
//! - *the rest*: everything else that [`Ioas::map`] does: areas, charge, joining, tables;
//! - *charged by folio*, *charged by page*: the same memory charged a folio, or page, at a time and mapped by
//!   run, its runs known: what the first origin did after its change, and before;
//! - *all by page*: charged and mapped a page at a time, as no kernel does;
//! - *unmap*: tables emptied, flushed; *unpin*: given back to the kernel.
//!
//! The last table has no memory behind it: runs that are known, charged and mapped.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hostmem::{Backing, FrameSource, Machine, Mapping, Pinner, RaisedPool};
use ioas::{
    Charge, HostMemory, HostTables, Ioas, Ledger, MappedStorage, Memory, Observer, Step, Synthetic,
};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, Prot, TABLE_BYTES};
use runs::{Pa, PageSizes, Span};

const PAGE: u64 = 4096;
const IOVA: u64 = 1 << 40;
/// Above all memory, and above what stands in for frames.
const WINDOW: u64 = 1 << 46;
const PIECE: u64 = 32 << 20;

/// Times steps.
struct Clock {
    begun: Instant,
    taken: [Duration; 7],
}

impl Clock {
    fn new() -> Self {
        Self {
            begun: Instant::now(),
            taken: [Duration::ZERO; 7],
        }
    }

    fn of(&self, steps: &[Step]) -> Duration {
        steps.iter().map(|step| self.taken[*step as usize]).sum()
    }
}

impl Observer for Clock {
    fn begin(&mut self, _step: Step) {
        self.begun = Instant::now();
    }

    fn end(&mut self, step: Step, _bytes: u64) {
        self.taken[step as usize] += self.begun.elapsed();
    }
}

const ROWS: [&str; 9] = [
    "pin",
    "find runs",
    "(read the page map)",
    "the rest",
    "charged by folio",
    "charged by page",
    "all by page",
    "unmap",
    "unpin",
];

type Round = [Duration; ROWS.len()];

/// Room for the tables of `len` bytes in leaves of 4 KiB.
fn tables(len: u64) -> Arc<HostTables> {
    let leaf_tables = len.div_ceil(2 << 20) + 1;
    let all = leaf_tables + leaf_tables.div_ceil(512) * 2 + 8;
    let storage = MappedStorage::new(all * TABLE_BYTES, None).unwrap();
    Arc::new(HostTables::new(storage, WINDOW).unwrap())
}

fn space(tables: &Arc<HostTables>) -> Ioas {
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone()).unwrap();
    Ioas::new(DomainId(1), table)
}

/// The parts of a run between multiples of `size` bytes.
fn parts(run: Span<Pa>, size: u64) -> impl Iterator<Item = Span<Pa>> {
    let end = run.start + run.len;
    let mut at = run.start;
    std::iter::from_fn(move || {
        let next = (at - at % size).saturating_add(size).min(end);
        let part = Span::new(at, next - at);
        at = next;
        (part.len > 0).then_some(part)
    })
}

/// The same memory charged by `charged` bytes and mapped by `mapped` bytes, in tables and an account of its own.
/// The list of `charges` is empty before and after; its memory is kept, since it is not what is timed.
fn by_steps(
    runs: &[Span<Pa>],
    tables: &Arc<HostTables>,
    (charged, mapped): (u64, u64),
    charges: &mut Vec<Charge>,
) -> Duration {
    let ledger = Ledger::new("steps", None, 0);
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone()).unwrap();
    let mut iova = IOVA;
    let begin = Instant::now();
    for run in runs {
        for part in parts(*run, charged) {
            charges.push(ledger.charge(part.len).unwrap());
        }
        for part in parts(*run, mapped) {
            table.map(iova, &[part], Prot::RW).unwrap();
            iova += part.len;
        }
    }
    let taken = begin.elapsed();
    charges.clear();
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    taken
}

/// Reads the entries of all pages.
fn read_page_map(mapping: &Mapping) -> Duration {
    let Ok(file) = File::open("/proc/self/pagemap") else {
        return Duration::ZERO;
    };
    let mut entries = vec![0; 32 << 10];
    let begin = Instant::now();
    let (mut at, end) = (
        mapping.address() / PAGE * 8,
        (mapping.address() + mapping.len()) / PAGE * 8,
    );
    while at < end {
        let count = (end - at).min(entries.len() as u64) as usize;
        file.read_exact_at(&mut entries[..count], at).unwrap();
        black_box(&entries);
        at += count as u64;
    }
    begin.elapsed()
}

fn round(
    memory: &Arc<HostMemory>,
    ledger: &Arc<Ledger>,
    charges: &mut Vec<Charge>,
) -> (Round, Vec<Span<Pa>>) {
    let len = memory.mapping().len();
    let tables = tables(len);
    let space = space(&tables);
    let pinned = Memory::new(memory.clone(), ledger);
    let whole = Span::new(0, len);

    let mut clock = Clock::new();
    let begin = Instant::now();
    space
        .map(IOVA, &pinned, whole, Prot::RW, &mut clock)
        .unwrap();
    let all = begin.elapsed();
    let [pin, find] = [Step::Pin, Step::FindRuns].map(|step| clock.of(&[step]));
    let rest = all.saturating_sub(pin + find);

    let mut runs: Vec<Span<Pa>> = Vec::new();
    let each = |leaf: iopt::Leaf| match runs.last_mut() {
        Some(last) if last.start + last.len == leaf.run.pa => last.len += leaf.run.len,
        _ => runs.push(Span::new(leaf.run.pa, leaf.run.len)),
    };
    space.with_table(|table| table.for_each_leaf(Span::new(IOVA, len), each));
    let mut clock = Clock::new();
    space.unmap_all(&mut clock).unwrap();
    let unmap = clock.of(&[Step::EmptyTables, Step::Flush]);
    let unpin = clock.of(&[Step::Unpin]);
    space.close().unwrap();
    let folio = memory.mapping().backing().largest_page();
    let ways = [(folio, u64::MAX), (PAGE, u64::MAX), (PAGE, PAGE)];
    let [by_folio, by_page, all] = ways.map(|way| by_steps(&runs, &tables, way, charges));
    let page_map = read_page_map(memory.mapping());
    let times = [
        pin, find, page_map, rest, by_folio, by_page, all, unmap, unpin,
    ];
    (times, runs)
}

fn median(mut list: Vec<Duration>) -> (Duration, Duration, Duration) {
    list.sort_unstable();
    (list[0], list[list.len() / 2], list[list.len() - 1])
}

fn of_memory(backing: Backing, len: u64, rounds: usize) -> Result<(), Box<dyn Error>> {
    let mut len = len / backing.page() * backing.page();
    let _pool = loop {
        if len == 0 {
            return Err("not one page fits".into());
        }
        match backing.huge_size().map(|size| RaisedPool::raise(size, len)) {
            // Memory is in pieces: half of it may be had.
            Some(Err(_)) if len > backing.page() => len = len / 2 / backing.page() * backing.page(),
            pool => break pool.transpose()?,
        }
    };
    let mapping = Arc::new(Mapping::new(backing, len, None)?);
    mapping.populate(&mut |_| ControlFlow::Continue(()))?;
    let folios = mapping.folios()?;
    let pinner = Arc::new(Pinner::probe(PIECE)?);
    let frames = FrameSource::detect(&mapping);
    let memory = Arc::new(HostMemory::with_pinner(
        mapping.clone(),
        pinner.clone(),
        frames,
    ));
    // The kernel keeps its own count and its own limit.
    let ledger = Ledger::new("bench", None, 0);
    // The first pin may move pages; it is not counted.
    let mut charges = Vec::new();
    let (_, mut runs) = round(&memory, &ledger, &mut charges);
    let mut taken: Vec<Round> = Vec::new();
    for _ in 0..rounds {
        let (times, found) = round(&memory, &ledger, &mut charges);
        taken.push(times);
        runs = found;
    }

    let folio = backing.largest_page();
    let huge = folios.huge / folio;
    let count = if folio > PAGE {
        huge + folios.small / PAGE
    } else {
        len / PAGE
    };
    println!(
        "\n{} MiB of {backing}: {count} folios, {} runs, pinned by {}, {frames}, {rounds} rounds",
        len >> 20,
        runs.len(),
        pinner.kind(),
    );
    println!(
        "{:<20}{:>12}{:>24}{:>11}{:>11}{:>11}{:>8}",
        "", "µs", "least to most", "ns/page", "ns/folio", "ns/run", "of pin"
    );
    let of = |row: usize| median(taken.iter().map(|round| round[row]).collect());
    let pin = of(0).1.as_nanos() as f64;
    for (row, name) in ROWS.iter().enumerate() {
        let (least, middle, most) = of(row);
        let ns = middle.as_nanos() as f64;
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        println!(
            "{name:<20}{:>12.1}{:>24}{:>11.3}{:>11.1}{:>11.1}{:>7.1}%",
            ns / 1e3,
            format!("{:.1} to {:.1}", micros(least), micros(most)),
            ns / (len / PAGE) as f64,
            ns / count as f64,
            ns / runs.len() as f64,
            100.0 * ns / pin
        );
    }
    Ok(())
}

/// Charges and maps runs that are known: `count` of `len` bytes, `apart` bytes between them.
fn of_runs(what: &str, count: u64, len: u64, apart: u64, rounds: usize) {
    let step = len + apart;
    let layout = (0..count).map(|n| Span::new((1 << 33) + n * step, len));
    let object = Arc::new(Synthetic::new(layout));
    let ledger = Ledger::new("bench", None, 0);
    let tables = tables(count * len);
    let memory = Memory::new(object, &ledger);
    let whole = Span::new(0, count * len);
    let (mut map, mut unmap) = (Vec::new(), Vec::new());
    let space = space(&tables);
    for _ in 0..=rounds {
        let begin = Instant::now();
        space.map(IOVA, &memory, whole, Prot::RW, &mut ()).unwrap();
        map.push(begin.elapsed());
        let begin = Instant::now();
        space.unmap_all(&mut ()).unwrap();
        unmap.push(begin.elapsed());
    }
    space.close().unwrap();
    // The first one makes the memory of the tables warm.
    let [map, unmap] = [map, unmap].map(|list| median(list[1..].to_vec()));
    let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
    println!(
        "{what:<34}{:>10.1}{:>20}{:>10.1}{:>10.2}",
        micros(map.1),
        format!("{:.1} to {:.1}", micros(map.0), micros(map.2)),
        micros(unmap.1),
        map.1.as_nanos() as f64 / count as f64
    );
}

fn main() {
    let bench = std::env::args().any(|argument| argument == "--bench");
    let asked = std::env::var("DMASPACE_BENCH_MIB").ok();
    let asked = asked.and_then(|text| text.parse::<u64>().ok());
    let available = Machine::probe().map_or(0, |machine| machine.available);
    let (len, rounds) = if bench {
        (asked.map_or(8 << 30, |mib| mib << 20), 9)
    } else {
        (16 << 20, 1)
    };
    // A fifth stays for everybody else.
    let len = len.min(available / 5 * 4);

    println!("known runs, charged and mapped, {rounds} rounds: µs");
    println!(
        "{:<34}{:>10}{:>20}{:>10}{:>10}",
        "", "map", "least to most", "unmap", "ns/run"
    );
    let (huge, small) = (len >> 21, len >> 12);
    of_runs("2M runs, none adjacent", huge, 2 << 20, 2 << 20, rounds);
    of_runs("2M runs, one after the other", huge, 2 << 20, 0, rounds);
    of_runs("4K runs, none adjacent", small, PAGE, PAGE, rounds);

    let backings = [
        Backing::Hugetlb1G,
        Backing::Hugetlb2M,
        Backing::Thp,
        Backing::Anon4K,
    ];
    for backing in backings {
        if let Err(error) = of_memory(backing, len, rounds) {
            println!("\n{backing}: not run: {error}");
        }
    }
}
