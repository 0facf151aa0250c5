//! How fast this machine maps and pins, tried for some milliseconds, to predict how long it would take.
//!
//! A prediction: so many runs and leaves at what one takes here, in warm caches, by this library.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use hostmem::{Backing, Mapping, Pinner};
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};

use super::{ProcessReport, formats};

/// Leaves that are mapped to see what one takes.
const LEAVES: u64 = 8192;
/// How often.
const TRIES: u32 = 4;
/// Bytes that are pinned to see what a page takes.
const PINNED: u64 = 8 << 20;

/// Fills in the times. `pages` are the small and the huge pages to pin.
pub(super) fn predict(report: &mut ProcessReport, pages: (u64, u64)) {
    for cost in &mut report.costs {
        let format = formats()
            .into_iter()
            .find(|(format, _)| format.name() == cost.format);
        let Some((leaf, run)) = format.and_then(|(format, levels)| quickest(format, levels)) else {
            continue;
        };
        let more = cost.leaf_count.saturating_sub(cost.runs) as f64;
        cost.map_ns = Some((cost.runs as f64 * run + more * leaf) as u64);
    }
    let small = pin(Backing::Anon4K, 4096);
    let huge = pin(Backing::Thp, 2 << 20).or(small);
    if let (Some(small), Some(huge)) = (small, huge) {
        report.pin_ns = Some((pages.0 as f64 * small + pages.1 as f64 * huge) as u64);
    }
}

/// The quickest of some tries: the first finds cold caches.
fn quickest(format: FormatId, levels: u8) -> Option<(f64, f64)> {
    (0..TRIES)
        .filter_map(|_| map(format, levels))
        .reduce(|one, other| (one.0.min(other.0), one.1.min(other.1)))
}

/// Nanoseconds for a leaf within a run, and for a run of one leaf.
fn map(format: FormatId, levels: u8) -> Option<(f64, f64)> {
    let memory = Arc::new(HeapTables::with_tables(LEAVES / 256 + 16).ok()?);
    let sizes = PageSizes::from_bits(u64::MAX).up_to(4096);
    let table = AnyTable::new(format, levels, sizes, memory).ok()?;
    let one = [Span::new(1 << 32, LEAVES * 4096)];
    let many: Vec<_> = (0..LEAVES)
        .map(|n| Span::new((1 << 33) + n * 8192, 4096))
        .collect();
    let mut times = [0.0; 2];
    for (nth, runs) in [&one[..], &many[..]].into_iter().enumerate() {
        let started = Instant::now();
        table.map((nth as u64) << 30, runs, Prot::RW).ok()?;
        if let Some(time) = times.get_mut(nth) {
            *time = started.elapsed().as_nanos() as f64 / LEAVES as f64;
        }
    }
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    Some((times[0], times[1]))
}

/// Nanoseconds for a page of `page` bytes; `None` where it cannot be pinned.
fn pin(backing: Backing, page: u64) -> Option<f64> {
    let memory = Arc::new(Mapping::new(backing, PINNED, None).ok()?);
    memory.populate(&mut |_| ControlFlow::Continue(())).ok()?;
    let pinner = Pinner::probe(PINNED).ok()?;
    let started = Instant::now();
    let pin = pinner
        .pin(&memory, Span::new(0, PINNED), &mut |_| {
            ControlFlow::Continue(())
        })
        .ok()?;
    let taken = started.elapsed().as_nanos() as f64;
    pin.unpin().ok()?;
    Some(taken / (PINNED / page) as f64)
}
