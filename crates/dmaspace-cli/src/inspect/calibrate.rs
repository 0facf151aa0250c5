//! A calibration of some hundred milliseconds: how fast this machine faults memory in and zeroes it, and how fast
//! this library pins and maps it.
//!
//! All memory of a kind stays mapped until its last sample, and is larger than most caches: pages that were just
//! freed would be zeroed faster than those of a machine that starts. All of it is touched once before: in a
//! virtual machine, pages that the hypervisor has not backed yet take many times as long.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;

use dmaspace::iommu::DomainId;
use hostmem::{Backing, FrameSource, Machine, Mapping, PinKind, Pinner};
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
/// Bytes for each of several threads, and most threads: 256 MiB for a moment.
const BYTES_OF_A_THREAD: u64 = 64 << 20;
const MOST_THREADS: u32 = 4;

/// What a page takes: the median of the samples.
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
    /// How much faster several threads fault small pages in.
    pub parallel: Option<Parallel>,
}

/// Several threads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Parallel {
    /// How many.
    pub threads: u32,
    /// How many times as fast as one they are, with a processor for each.
    pub times: f64,
}

impl Speeds {
    /// Calibrates; `None` when memory is short.
    pub(super) fn try_here() -> Option<Self> {
        let room = Machine::probe().map_or(0, |machine| machine.left(Backing::Anon4K));
        if room < 4 * BYTES * SAMPLES as u64 {
            return None;
        }
        let huge = fault(Backing::Thp, 2 << 20);
        Some(Self {
            private: fault(Backing::Anon4K, 4096)?,
            shared: fault(Backing::Memfd, 4096)?,
            huge,
            map_small: pin_and_map(Backing::Anon4K, 4096),
            map_huge: huge.and_then(|_| pin_and_map(Backing::Thp, 2 << 20)),
            parallel: parallel(room),
        })
    }
}

/// Faulting in a page of `page` bytes.
fn fault(backing: Backing, page: u64) -> Option<Rate> {
    touch(BYTES * SAMPLES as u64);
    let (mut kept, mut samples) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        let mapping = Mapping::new(backing, BYTES, None).ok()?;
        let started = processor_ns(ClockId::ThreadCPUTime);
        let go_on = &mut |_| ControlFlow::Continue(());
        mapping.populate_by(Some(NonZeroUsize::MIN), go_on).ok()?;
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

/// Threads that wait for each other, or for memory, need more processor time together than one alone.
fn parallel(room: u64) -> Option<Parallel> {
    let cpus = std::thread::available_parallelism().ok()?.get() as u32;
    let most = room / (4 * BYTES_OF_A_THREAD);
    let threads = u64::from(cpus.min(MOST_THREADS)).min(most) as u32;
    let bytes = u64::from(threads) * BYTES_OF_A_THREAD;
    let many = NonZeroUsize::new(threads as usize).filter(|many| many.get() > 1)?;
    touch(bytes);
    let by = |many| {
        let mapping = Mapping::new(Backing::Anon4K, bytes, None).ok()?;
        let started = processor_ns(ClockId::ProcessCPUTime);
        let go_on = &mut |_| ControlFlow::Continue(());
        mapping.populate_by(Some(many), go_on).ok()?;
        Some(processor_ns(ClockId::ProcessCPUTime) - started)
    };
    let times = f64::from(threads) * by(NonZeroUsize::MIN)? / by(many)?;
    Some(Parallel { threads, times })
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
}
