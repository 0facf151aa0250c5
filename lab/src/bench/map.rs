//! Origin 2: mapping and unmapping by several threads, with invalidation.
//!
//! The shared form, over a software unit with a device attached. Each thread has addresses of its own; the
//! upper tables are there. Page by page is a call for each page of the largest size that fits (4 KiB, and
//! 2 MiB from 2 MiB on), as the origin's core did; against it one call for all. *Strict*: each unmap tells
//! the unit before the next one begins; *lazy*: once for all unmaps of a bracket. A sample is the time of
//! one operation, the mean of a bracket of each thread and of all threads.

use std::hint::black_box;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Barrier, PoisonError, RwLock};
use std::thread;
use std::time::Instant;

use iommu::{
    BadTarget, Config, DeviceId, DomainId, FormatSupport, SoftwareUnit, TargetMemory, Unit as _,
};
use iopt::format::{AmdV1, ArmStage1, K4, VtdSs};
use iopt::{BuildError, Discard, Format, Gather, HeapTables, Prot, SharedTable, Table};
use runs::{Iova, Pa, PageSizes, Span};

use super::report::{Group, GroupReport, Key, Subject, Unit};
use super::rounds::Rounds;
use super::{BenchError, host};

/// Bytes of one operation: 4 KiB to 4 MiB.
pub(super) const SIZES: [u64; 11] = {
    let mut sizes = [0; 11];
    let mut nth = 0;
    while nth < sizes.len() {
        sizes[nth] = 4096 << nth;
        nth += 1;
    }
    sizes
};

const PAGE: u64 = 4 << 10;
const BLOCK: u64 = 2 << 20;
/// The most threads that a table lets in at a time.
const MOST_THREADS: usize = 32;
/// Addresses of a thread, and of each size among them.
const OF_THREAD: u32 = 37;
const OF_SIZE: u32 = 32;
/// Above all addresses of threads, so that what is mapped is told apart.
const PA: u64 = 1 << 43;
/// Room for the lower tables of all threads at all sizes.
const TABLES: u64 = 16 << 10;
const DOMAIN: DomainId = DomainId(1);
/// The operations, in the order in which a thread does them.
const OPS: [&str; 3] = ["map", "unmap, strict", "unmap, lazy"];

/// Runs the group.
pub(super) fn run(rounds: &mut Rounds<'_>, report: &mut GroupReport) -> Result<(), BenchError> {
    let processors = host::processors();
    let mut threads = vec![1, 2, 10, processors.min(MOST_THREADS)];
    threads.sort_unstable();
    threads.dedup();
    report.notes = vec![
        "leaves of 4 KiB and 2 MiB only, as in the origin; one device is attached, no DMA is under way".into(),
        "strict: the unit (a software one) is told in each unmap; lazy: once for many; µs for one operation"
            .into(),
    ];
    if threads.iter().any(|count| *count > processors) {
        report.notes.push(format!(
            "more threads than the {processors} processors take turns: their times hold the waiting"
        ));
    }
    let beds: [Box<dyn Fixture>; 3] = [
        fixture("vtd-ss", VtdSs::new(4))?,
        fixture("amdv1", AmdV1::new(4))?,
        fixture("arm-s1-4k", ArmStage1::<K4>::new(48, 48))?,
    ];
    rounds.part(0, 1);
    while rounds.more()? {
        for fixture in &beds {
            for count in &threads {
                rounds.look()?;
                for (nth, size) in SIZES.into_iter().enumerate() {
                    for subject in [Subject::ByPage, Subject::Dmaspace] {
                        sample(rounds, &**fixture, *count, nth, size, subject)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Takes one sample of each operation.
fn sample(
    rounds: &mut Rounds<'_>,
    fixture: &dyn Fixture,
    threads: usize,
    nth: usize,
    size: u64,
    subject: Subject,
) -> Result<(), BenchError> {
    let page = if size < BLOCK { PAGE } else { BLOCK };
    let step = match subject {
        Subject::ByPage => page,
        _ => size,
    };
    let operations = (rounds.settings().batch / (size / page)).clamp(16, 512);
    let bracket = |thread: usize| Bracket {
        start: ((thread as u64 + 1) << OF_THREAD) + ((nth as u64) << OF_SIZE),
        size,
        step,
        operations,
    };
    let group = Group::Map;
    let (format, barrier) = (fixture.name(), Barrier::new(threads));
    // Threads wait for each other, so none may begin before all are there.
    let complete = RwLock::new(false);
    let times: Vec<_> = thread::scope(|scope| {
        let mut waiting = complete.write().unwrap_or_else(PoisonError::into_inner);
        let begin = |thread: usize| {
            let (bracket, barrier, complete) = (bracket(thread), &barrier, &complete);
            thread::Builder::new().spawn_scoped(scope, move || {
                let complete = *complete.read().unwrap_or_else(PoisonError::into_inner);
                complete.then(|| {
                    barrier.wait();
                    fixture.work(&bracket)
                })?
            })
        };
        let begun: io::Result<Vec<_>> = (0..threads).map(begin).collect();
        *waiting = begun.is_ok();
        drop(waiting);
        let join = |threads: Vec<thread::ScopedJoinHandle<'_, _>>| {
            threads.into_iter().map(|thread| thread.join()).collect()
        };
        begun.map(join)
    })
    .map_err(|source| BenchError::NoThread { group, source })?;
    let mut sums = [0.0; 3];
    for times in times {
        let times = times.map_err(|_| BenchError::Thread { group })?;
        let op = OPS[0];
        let times = times.ok_or(BenchError::Refused { group, op, format })?;
        for (sum, time) in sums.iter_mut().zip(times) {
            *sum += time / threads as f64;
        }
    }
    for (op, sum) in OPS.into_iter().zip(sums) {
        let key = Key {
            group,
            op,
            memory: "",
            format,
            subject,
            threads: u32::try_from(threads).unwrap_or(u32::MAX),
            size_bytes: size,
            unit: Unit::Microseconds,
        };
        rounds.note(key, sum);
    }
    Ok(())
}

/// What a thread does: so many operations of `size` bytes, by calls of `step` bytes.
struct Bracket {
    start: u64,
    size: u64,
    step: u64,
    operations: u64,
}

impl Bracket {
    fn operations(&self) -> impl Iterator<Item = Span<Iova>> {
        (0..self.operations).map(|nth| Span::new(self.start + nth * self.size, self.size))
    }

    fn calls(&self, operation: Span<Iova>) -> impl Iterator<Item = Span<Iova>> + use<> {
        let step = self.step;
        (0..operation.len / step).map(move |nth| Span::new(operation.start + nth * step, step))
    }
}

/// One format with its unit.
trait Fixture: Sync {
    fn name(&self) -> &'static str;

    /// Microseconds of one operation of each kind; `None` if one was refused.
    fn work(&self, bracket: &Bracket) -> Option<[f64; 3]>;
}

struct Shared<F: Format> {
    name: &'static str,
    table: SharedTable<F, Arc<HeapTables>>,
    unit: SoftwareUnit<Arc<HeapTables>, Nowhere>,
}

/// No DMA is under way, so there is no memory.
struct Nowhere;

impl TargetMemory for Nowhere {
    fn with_cells(
        &self,
        span: Span<Pa>,
        _visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        let address = span.start;
        Err(BadTarget { address })
    }
}

fn fixture<F>(
    name: &'static str,
    format: Result<F, BuildError>,
) -> Result<Box<dyn Fixture>, BenchError>
where
    F: Format + Send + Sync + 'static,
{
    let not_built = |source| BenchError::Build {
        format: name,
        source,
    };
    let format = format.map_err(not_built)?;
    let memory = HeapTables::with_tables(TABLES).map_err(|source| BenchError::Arena {
        format: name,
        source,
    })?;
    let memory = Arc::new(memory);
    let sizes = PageSizes::from_bits(PAGE | BLOCK);
    let mut table = Table::with_page_sizes(format, memory.clone(), sizes).map_err(not_built)?;
    table.keep_empty_tables(true);
    let mut config = Config::default();
    let root = table.root();
    config.capabilities = config.capabilities.with_format(FormatSupport {
        format: root.format,
        levels: 1 << root.levels,
        page_sizes: sizes,
    });
    let unit = SoftwareUnit::with_config(memory, Nowhere, config);
    unit.attach(DeviceId::pci(0, 1, 0), DOMAIN, root)
        .map_err(|source| BenchError::Attach {
            format: name,
            source,
        })?;
    let table = SharedTable::new(table);
    Ok(Box::new(Shared { name, table, unit }))
}

impl<F: Format + Send + Sync> Shared<F> {
    /// Maps all operations; microseconds of one.
    fn map(&self, bracket: &Bracket) -> Option<f64> {
        let mut well = true;
        let begun = Instant::now();
        for operation in bracket.operations() {
            for call in bracket.calls(operation) {
                let memory = [Span::new(PA + call.start, call.len)];
                well &= self
                    .table
                    .map(call.start, black_box(&memory), Prot::RW)
                    .is_ok();
            }
        }
        well.then(|| micros(begun, bracket))
    }

    /// Unmaps all of them.
    fn unmap(&self, bracket: &Bracket, strict: bool) -> Option<f64> {
        let mut well = true;
        let begun = Instant::now();
        let mut gather = Gather::new();
        for operation in bracket.operations() {
            for call in bracket.calls(operation) {
                well &= self.table.unmap(call, &mut gather, &mut Discard).is_ok();
            }
            if strict {
                well &= self.flush(&mut gather);
            }
        }
        if !strict {
            well &= self.flush(&mut gather);
        }
        well.then(|| micros(begun, bracket))
    }

    fn flush(&self, gather: &mut Gather) -> bool {
        let flushed = gather.flush_with(|what| self.unit.invalidate(DOMAIN, what));
        let well = flushed.is_ok();
        if let Ok(flushed) = flushed {
            self.table.reclaim(flushed);
        }
        well
    }
}

impl<F: Format + Send + Sync> Fixture for Shared<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn work(&self, bracket: &Bracket) -> Option<[f64; 3]> {
        let map = self.map(bracket)?;
        let strict = self.unmap(bracket, true)?;
        self.map(bracket)?;
        Some([map, strict, self.unmap(bracket, false)?])
    }
}

fn micros(begun: Instant, bracket: &Bracket) -> f64 {
    begun.elapsed().as_nanos() as f64 / 1e3 / bracket.operations as f64
}
