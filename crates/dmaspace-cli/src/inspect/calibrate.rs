//! A calibration of some hundred milliseconds: how fast this machine faults memory in and zeroes it, by one
//! processor and by all of them, and how fast this library pins and maps it.
//!
//! All memory of a kind stays mapped until its last sample, and is larger than most caches: pages that were just
//! freed would be zeroed faster than those of a machine that starts. All of it is touched once before: in a
//! virtual machine, pages that the hypervisor has not backed yet take many times as long.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dmaspace::iommu::DomainId;
use hostmem::{Backing, FrameSource, Machine, Mapping, PinKind, Pinner, Population};
use ioas::{HostMemory, Ioas, Ledger, Memory};
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// Bytes of a sample, and samples of a kind: together 64 MiB.
const BYTES: u64 = 4 << 20;
const SAMPLES: usize = 16;
/// Tables for as much in small pages: 32 with leaves, and those above.
const TABLES: u64 = 64;
/// Bytes for each of several threads: less is left to one (`Population::run`).
const BYTES_OF_A_THREAD: u64 = 64 << 20;
/// Samples of all processors together, of which there are fewer where they last longer.
const SAMPLES_TOGETHER: [usize; 2] = [5, 9];
const LONG: Duration = Duration::from_millis(100);

/// Time for a page: the median of the samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rate {
    /// Nanoseconds for a page.
    pub ns: f64,
    /// Half of the span of the middle half of the samples, nanoseconds.
    pub spread_ns: f64,
}

/// The calibration; `None` is what this machine does not have or allow.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Speeds {
    /// The fault of a small page of private memory, with zeroing it.
    pub private: Rate,
    /// The same of a memory file.
    pub shared: Rate,
    /// The same of a transparent huge page.
    pub huge: Option<Rate>,
    /// A small page that is present: [`Ioas::map`] pins it by io_uring, reads its frame and writes its leaf.
    pub map_small: Option<Rate>,
    /// The same of a transparent huge page.
    pub map_huge: Option<Rate>,
    /// Processors that this process may use.
    pub processors: u32,
    /// Nodes with memory.
    pub nodes: u32,
    /// All processors together fault small pages in.
    pub small_together: Option<Together>,
    /// The same with transparent huge pages.
    pub huge_together: Option<Together>,
}

/// Faulting in and zeroing by many processors at once, in the memory of all nodes: the median of the faster half of
/// the samples, as some wait for a hypervisor that has not backed the memory yet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Together {
    /// Threads that were tried: as many as processors where there is memory for each.
    pub threads: u32,
    /// Bytes in a second, with a processor for each thread.
    pub bytes_per_s: f64,
    /// Half of the span of the faster half, bytes in a second.
    pub spread_bytes_per_s: f64,
}

impl Speeds {
    /// Calibrates; `None` when memory is short.
    pub(super) fn try_here() -> Option<Self> {
        let machine = Machine::probe().ok()?;
        let room = machine.left(Backing::Anon4K);
        if room < 4 * BYTES * SAMPLES as u64 {
            return None;
        }
        let huge = fault(Backing::Thp, 2 << 20);
        let all = |backing| together(backing, &machine.nodes, room);
        Some(Self {
            private: fault(Backing::Anon4K, 4096)?,
            shared: fault(Backing::Memfd, 4096)?,
            huge,
            map_small: pin_and_map(Backing::Anon4K, 4096),
            map_huge: huge.and_then(|_| pin_and_map(Backing::Thp, 2 << 20)),
            processors: processors(),
            nodes: machine.nodes.len() as u32,
            small_together: all(Backing::Anon4K),
            huge_together: huge.and_then(|_| all(Backing::Thp)),
        })
    }
}

/// Processors that this process may use.
pub(super) fn processors() -> u32 {
    thread::available_parallelism().map_or(1, |many| many.get() as u32)
}

/// Faulting in a page of `page` bytes.
fn fault(backing: Backing, page: u64) -> Option<Rate> {
    touch(BYTES * SAMPLES as u64);
    let (mut kept, mut samples) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        let mapping = Mapping::new(backing, BYTES, None).ok()?;
        let started = processor_ns(ClockId::ThreadCPUTime);
        let mut population = Population::new([&mapping]).workers(NonZeroUsize::MIN);
        population.run(&mut |_| ControlFlow::Continue(())).ok()?;
        let pages = (BYTES / page) as f64;
        samples.push((processor_ns(ClockId::ThreadCPUTime) - started) / pages);
        if backing == Backing::Thp && mapping.folios().ok()?.huge < BYTES {
            return None;
        }
        kept.push(mapping);
    }
    rate(samples)
}

/// Pinning and mapping a page of `page` bytes that is present, of as many as were counted ([`super::start`]):
/// each call has a part that does not depend on its size. `None` where io_uring does not pin or frames are
/// not shown.
fn pin_and_map(backing: Backing, page: u64) -> Option<Rate> {
    let bytes = BYTES * SAMPLES as u64;
    let mapping = Arc::new(Mapping::new(backing, bytes, None).ok()?);
    mapping.populate(&mut |_| ControlFlow::Continue(())).ok()?;
    let pinner = Arc::new(Pinner::probe(bytes).ok()?);
    let frames = FrameSource::detect(&mapping);
    // mlock pins nothing.
    if pinner.kind() != PinKind::IoUring || frames != FrameSource::Pagemap {
        return None;
    }
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        let object = HostMemory::with_pinner(Arc::clone(&mapping), Arc::clone(&pinner), frames);
        let memory = Memory::new(Arc::new(object), &Ledger::unlimited());
        let tables = Arc::new(HeapTables::with_tables(TABLES).ok()?);
        let sizes = PageSizes::from_bits(u64::MAX);
        let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables).ok()?;
        let space = Ioas::over_table(DomainId(1), table);
        let started = processor_ns(ClockId::ThreadCPUTime);
        let all = Span::new(0, bytes);
        space.map(1 << 32, &memory, all, Prot::RW).ok()?;
        samples.push((processor_ns(ClockId::ThreadCPUTime) - started) / (bytes / page) as f64);
        space.close().ok()?;
    }
    rate(samples)
}

/// Faults memory in and frees it, so that a hypervisor backs it.
fn touch(bytes: u64) {
    if let Ok(mapping) = Mapping::new(Backing::Thp, bytes, None) {
        // A failure repeats in what follows.
        let _ = mapping.populate(&mut |_| ControlFlow::Continue(()));
    }
}

fn rate(mut samples: Vec<f64>) -> Option<Rate> {
    samples.sort_by(f64::total_cmp);
    let at = |share: usize| samples.get(samples.len() * share / 4).copied();
    Some(Rate {
        ns: at(2)?,
        spread_ns: (at(3)? - at(1)?) / 2.0,
    })
}

/// Nanoseconds of processor time: on a busy machine, the clock would show the time of others.
fn processor_ns(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// Faults memory in by all processors, on all nodes at once. Threads that wait for each other, or for memory, need
/// more processor time together than one alone. `None` where there is one processor, or memory for one.
fn together(backing: Backing, nodes: &[u32], room: u64) -> Option<Together> {
    let most = room / (4 * BYTES_OF_A_THREAD) / nodes.len() as u64;
    // Where nodes differ in processors, some workers of a node wait for each other.
    let each = processors().div_ceil(nodes.len() as u32);
    let each = NonZeroUsize::new(u64::from(each).min(most) as usize)?;
    let threads = each.get() * nodes.len();
    if threads < 2 {
        return None;
    }
    let bytes = each.get() as u64 * BYTES_OF_A_THREAD;
    let bring_in = || {
        let of = |node| {
            // Binding takes a system call that containers may not have.
            let node = (nodes.len() > 1).then_some(node);
            Mapping::new(backing, bytes, node).ok()
        };
        let mappings: Vec<Mapping> = nodes.iter().map(|node| of(*node)).collect::<Option<_>>()?;
        let mut population = Population::new(&mappings).workers(each);
        population.run(&mut |_| ControlFlow::Continue(())).ok()?;
        Some(mappings)
    };
    touch(bytes * nodes.len() as u64);
    let began = Instant::now();
    let [least, most] = SAMPLES_TOGETHER;
    let mut samples = Vec::new();
    while samples.len() < least || samples.len() < most && began.elapsed() < LONG {
        let started = processor_ns(ClockId::ProcessCPUTime);
        let mappings = bring_in()?;
        let taken = (processor_ns(ClockId::ProcessCPUTime) - started) / threads as f64;
        samples.push(bytes as f64 * mappings.len() as f64 * 1e9 / taken);
    }
    let (bytes_per_s, spread_bytes_per_s) = faster(samples)?;
    Some(Together {
        threads: threads as u32,
        bytes_per_s,
        spread_bytes_per_s,
    })
}

/// The median of the faster half, and half of its span.
fn faster(mut samples: Vec<f64>) -> Option<(f64, f64)> {
    samples.sort_by(|one, other| other.total_cmp(one));
    samples.truncate(samples.len().div_ceil(2));
    let median = samples.get(samples.len() / 2)?;
    Some((*median, (samples.first()? - samples.last()?) / 2.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_median_with_half_of_its_middle_half() {
        let samples = vec![9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0];
        let expected = Rate {
            ns: 5.0,
            spread_ns: 3.0,
        };
        assert_eq!(rate(samples), Some(expected));
        assert_eq!(rate(Vec::new()), None);
    }

    #[test]
    fn samples_that_wait_for_a_hypervisor_do_not_count() {
        let samples = vec![0.3, 10.0, 9.0, 0.2, 8.0];
        assert_eq!(faster(samples), Some((9.0, 1.0)));
        assert_eq!(faster(vec![5.0]), Some((5.0, 0.0)));
        assert_eq!(faster(Vec::new()), None);
    }

    #[test]
    fn processors_of_this_machine_zero_together() {
        let room = |threads: u64| 4 * threads * BYTES_OF_A_THREAD;
        let found = together(Backing::Anon4K, &[0], room(2));
        match processors() {
            1 => assert_eq!(found, None),
            _ => {
                let found = found.unwrap();
                assert_eq!(found.threads, 2);
                assert!(found.bytes_per_s > 0.0, "{found:?}");
            }
        }
        // Memory for one thread.
        assert_eq!(together(Backing::Anon4K, &[0], room(1)), None);
        assert_eq!(together(Backing::Anon4K, &[0], 0), None);
    }
}
