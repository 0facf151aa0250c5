//! One request of many fragments: a list of runs, as pinned memory comes.

use std::hint::black_box;

use anyhow::ensure;
use iopt::{Format, NoRuns, Prot, Table};
use runs::{Pa, Span};

use super::{Access, Memory, arena, plain, take};
use crate::peers::clock::time;
use crate::peers::places::Geometry;

/// The nanoseconds of one fragment: to map it, and to unmap it with its run returned.
pub type Fragments = (f64, f64);

/// Maps and unmaps `count` fragments of `bytes` bytes each, which lie apart in memory and one behind
/// the other for the device, by one call each; in tables that are there and empty, in leaves of the
/// format's choice. Returns `rounds` samples.
pub fn fragments<F: Format, M: Memory, T: Access<F, M>>(
    format: F,
    count: u64,
    bytes: u64,
    rounds: u32,
) -> anyhow::Result<Vec<Fragments>> {
    let geometry = Geometry::of(&format);
    let start = geometry.start(1 << F::GRANULE_LOG2);
    let all = Span::new(start, count * bytes);
    let runs: Vec<Span<Pa>> = (0..count)
        .map(|n| Span::new(geometry.pa() + 2 * n * bytes, bytes))
        .collect();
    let memory = arena::<F, M>(&format, all.len / F::TABLE_BYTES / 8 + 64)?;
    let mut table = Table::new(format, memory).map_err(plain)?;
    table.keep_empty_tables(true);
    // Nothing but this unmap makes tables: pages that lie apart, so that no leaf is larger.
    table.map(start, &runs, Prot::RW).map_err(plain)?;
    let mut table = T::of(table);
    let mut well = table.unmap(all, NoRuns);
    // Few fragments are repeated: a bracket around one is mostly clock.
    let repeat = (64 / count).max(1);
    let mut samples = Vec::new();
    for _ in 0..rounds {
        let (mut map, mut unmap) = (0.0, 0.0);
        for _ in 0..repeat {
            map += time(count, || well &= table.map(start, black_box(&runs)));
            unmap += time(count, || well &= table.unmap(black_box(all), take));
        }
        samples.push((map / repeat as f64, unmap / repeat as f64));
    }
    ensure!(well, "an operation on {count} fragments was refused");
    Ok(samples)
}
