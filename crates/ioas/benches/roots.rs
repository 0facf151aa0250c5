//! A root for each node: what map and unmap cost with 1, 2, 4 and 8 of them, against one for all.
//!
//! As many devices as roots, each behind a unit of its own on a node of its own: `per-node` builds a table
//! for each of them, `shared` one for all. The memory costs nothing to pin. Both are measured by turns, on
//! the same memory, and each round's first one changes; what counts is the median of the times, with the
//! least and the most beside it, and the quotient of the medians. The memories are so small that most
//! rounds end before a busy machine takes the processor away. "Fill" is the part of map that writes
//! tables; the rest (charge, pin, finding runs) is done once whatever the number of roots.
//! `cargo bench -p dmaspace-ioas --bench roots`; without `--bench` (as `cargo test --benches` runs it) a
//! 64th of the memory, once.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use ioas::{
    Cause, DomainIds, Ioas, Ledger, Memory, Observer, Placement, Step, Synthetic, TableBuilder,
};
use iommu::{
    DeviceId, FormatSupport, NodeId, RunMap, SoftwareConfig, SoftwareUnit, UnitCapabilities,
};
use iopt::{FormatId, HeapTables, Prot};
use runs::{Pa, PageSizes, Span};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const AT: u64 = 1 << 40;
const ROOTS: [u32; 4] = [1, 2, 4, 8];

type Tables = Arc<HeapTables>;
type Space = Ioas;

/// Times of a map, of its filling and of an unmap.
type Times = [Duration; 3];

/// Times the step that fills tables.
struct Filling(Instant, Duration);

impl Observer for Filling {
    fn begin(&mut self, _: Step) {
        self.0 = Instant::now();
    }

    fn end(&mut self, step: Step, _: u64) {
        if step == Step::FillTables {
            self.1 += self.0.elapsed();
        }
    }
}

/// Runs of these sizes by turns, no two of them adjacent, until there are `bytes`; each lies in its 2 MiB
/// as the addresses do at which it is mapped.
fn layout(sizes: &[u64], bytes: u64) -> Vec<Span<Pa>> {
    let (mut block, mut offset) = (1 << 36, 0);
    let mut runs = Vec::new();
    for size in sizes.iter().cycle() {
        if offset == bytes {
            break;
        }
        let len = u64::min(*size, bytes - offset);
        runs.push(Span::new(block + offset % (2 * MIB), len));
        (block, offset) = (block + 6 * MIB, offset + len);
    }
    runs
}

/// An address space with a device on each of so many nodes.
fn space(placement: Placement, format: FormatId, memories: &[Tables]) -> Space {
    let nodes: Vec<Tables> = memories.to_vec();
    let memory = move |node: Option<NodeId>| {
        let tables = node.and_then(|node| nodes.get(node.0 as usize));
        tables.cloned().ok_or(Cause::from("no such node"))
    };
    let space = Ioas::over_tables(TableBuilder::on_nodes(memory, DomainIds::new(8), [format]));
    space.set_placement(placement).unwrap();
    let mut capabilities = UnitCapabilities::new().with_format(FormatSupport {
        format,
        levels: 1 << 4,
        page_sizes: PageSizes::from_bits(u64::MAX),
    });
    capabilities.input_bits = 48;
    for (n, tables) in (0..).zip(memories) {
        let none = RunMap::<Vec<AtomicU64>>::new([]).unwrap();
        let config = SoftwareConfig {
            node: Some(NodeId(n)),
            capabilities,
            ..SoftwareConfig::default()
        };
        let unit = SoftwareUnit::with_config(tables.clone(), none, config);
        let device = DeviceId::pci(1, n as u8, 0);
        space.attach((Arc::new(unit), device)).unwrap();
    }
    space
}

fn round(space: &mut Space, memory: &Arc<Memory>) -> Times {
    let whole = Span::new(0, memory.object().len());
    let mut filling = Filling(Instant::now(), Duration::ZERO);
    let begin = Instant::now();
    space
        .observed(&mut filling)
        .map(AT, memory, whole, Prot::RW)
        .unwrap();
    let map = begin.elapsed();
    let begin = Instant::now();
    space.unmap_all().unwrap();
    [map, filling.1, begin.elapsed()]
}

/// The least, the median and the most of one of the times, in µs.
fn spread(rounds: &[Times], which: usize) -> [f64; 3] {
    let mut list: Vec<f64> = rounds
        .iter()
        .map(|times| times[which].as_secs_f64() * 1e6)
        .collect();
    list.sort_unstable_by(f64::total_cmp);
    [list[0], list[list.len() / 2], list[list.len() - 1]]
}

fn of(format: FormatId, runs: &[Span<Pa>], rounds: usize) {
    let object = Arc::new(Synthetic::new(runs.iter().copied()));
    let memory = Memory::new(object, &Ledger::unlimited());
    for roots in ROOTS {
        let memories: Vec<Tables> = (0..u64::from(roots))
            .map(|node| HeapTables::with_tables_at(2048, (1 << 46) + (node << 40)))
            .map(|tables| Arc::new(tables.unwrap()))
            .collect();
        let mut spaces =
            [Placement::Shared, Placement::PerNode].map(|how| space(how, format, &memories));
        assert_eq!(
            spaces.each_ref().map(|space| space.places().len()),
            [1, roots as usize]
        );
        let mut times = [Vec::new(), Vec::new()];
        for n in 0..=rounds {
            for which in [n % 2, 1 - n % 2] {
                times[which].push(round(&mut spaces[which], &memory));
            }
        }
        // The first round makes the memory of the tables warm.
        let times = times.map(|rounds| rounds[1..].to_vec());
        print!("{roots:>5}");
        for (which, name) in ["map", "fill", "unmap"].into_iter().enumerate() {
            let [shared, own] = times.each_ref().map(|rounds| spread(rounds, which));
            let ratio = own[1] / shared[1];
            print!(
                " | {name} {:.0} ({:.0} to {:.0}), {:.0} ({:.0} to {:.0}): {ratio:.2}x, {:.2}x a root",
                shared[1],
                shared[0],
                shared[2],
                own[1],
                own[0],
                own[2],
                ratio / f64::from(roots)
            );
        }
        println!();
        for space in spaces {
            space.close().unwrap();
        }
    }
}

fn main() {
    let full = std::env::args().any(|argument| argument == "--bench");
    let (share, rounds) = if full { (1, 301) } else { (64, 1) };
    let memories = [
        ("64 MiB in runs of 4K", vec![4 * KIB], 64 * MIB),
        ("16 GiB in runs of 2M", vec![2 * MIB], 16 * GIB),
        (
            "1 GiB in runs of 2M, 64K, 2M, 4K and 1M",
            vec![2 * MIB, 64 * KIB, 2 * MIB, 4 * KIB, MIB],
            GIB,
        ),
    ];
    for (name, sizes, bytes) in memories {
        let runs = layout(&sizes, bytes / share);
        for format in [FormatId::VtdSs, FormatId::AmdV1] {
            println!(
                "\n{name}, {format}, {} runs, {rounds} rounds: µs under shared, then per-node",
                runs.len()
            );
            of(format, &runs, rounds);
        }
    }
}
