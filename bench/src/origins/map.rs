//! Origin 2: mapping and unmapping by several threads, with invalidation.
//!
//! The calls of a driver for each request, from all threads on one page table, with a software unit whose device reads
//! all the while: [`Dma::map`] and [`Dma::unmap`], which allocate a device address, map a part of memory that stays
//! where it is, unmap it, flush, and free the address. Page by page is the same with a call of the table for each page
//! of the largest size that fits (4 KiB, and 2 MiB from 2 MiB on), as the origin's core did: the first page by `Dma`,
//! with the address and the record of the buffer, the others by the table at addresses that are given, and as many
//! flushes. Where a buffer is one page both are one call. *Strict*: each unmap has the unit invalidate before it
//! returns; *lazy*: one flush for many unmaps, as many as Linux lets wait. A sample is the time of one operation, the
//! mean of many of each thread and of all threads.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, OnceLock, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use ioas::{AttachError, Dma, FixedRuns, Flushing, Ledger, Memory};
use iommu::{
    BadTarget, DeviceId, DomainId, FormatSupport, SoftwareConfig, SoftwareUnit, TargetMemory,
    Unit as _,
};
use iopt::format::{ArmConfig, ArmGranule};
use iopt::{AnyTable, FormatId, Gather, HeapTables, NoRuns, Prot};
use runs::{Iova, Offset, Pa, PageSizes, Span};

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
/// The most threads that are tried.
const MOST_THREADS: usize = 32;
/// Buffers of a thread that are mapped at a time.
const HELD: u64 = 32;
/// The memory of all buffers: one run.
const RAM: Span<Pa> = Span::new(1 << 32, 64 << 20);
/// Unmaps that wait for a lazy flush; the next one ends with it.
const LAZY: usize = 256;
/// Operations from one lazy flush to the next: a sample has whole ones, so that none has another's flush.
const TO_FLUSH: u64 = LAZY as u64 + 1;
/// Addresses that are allocated lie below, and above those of each thread's pages after the first.
const WINDOW: u64 = 1 << 40;
const OF_THREAD: u64 = HELD * (4 << 20);
/// Room for the lower tables of all threads at all sizes.
const TABLES: u64 = 16 << 10;
const DOMAIN: DomainId = DomainId(1);
const DEVICE: DeviceId = DeviceId::pci(0, 1, 0);
/// The operations.
const OPS: [&str; 3] = ["map", "unmap, strict", "unmap, lazy"];

/// Runs the group.
pub(super) fn run(rounds: &mut Rounds, report: &mut GroupReport) -> Result<(), BenchError> {
    let processors = host::processors();
    let mut threads = vec![1, 2, 10, processors.min(MOST_THREADS)];
    threads.sort_unstable();
    threads.dedup();
    report.notes = vec![
        "leaves of 4 KiB and 2 MiB only, as in the origin; a software device reads at the same time".into(),
        "dmaspace: Dma::map and Dma::unmap, with an address allocated for each; page by page: the same, with a call of \
         the table for each further page"
            .into(),
        "strict: the unit invalidates in each unmap; lazy: once for 256; µs for one operation".into(),
    ];
    if threads.iter().any(|count| *count > processors) {
        report.notes.push(format!(
            "more threads than the {processors} processors run in turns: their times include waiting"
        ));
    }
    let arm = ArmConfig {
        granule: ArmGranule::K4,
        input_bits: 48,
        upper: false,
    };
    let fixtures = [
        Fixture::new(FormatId::VtdSs)?,
        Fixture::new(FormatId::AmdV1)?,
        Fixture::new(FormatId::ArmStage1(arm))?,
    ];
    rounds.part(0, 1);
    let mut subjects = [Subject::ByPage, Subject::Dmaspace];
    while rounds.more() {
        // The first of two meets other caches, and with many threads another scheduler.
        subjects.reverse();
        for fixture in &fixtures {
            for count in &threads {
                for size in SIZES {
                    for subject in subjects {
                        sample(rounds, fixture, *count, size, subject)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Takes one sample of each operation.
fn sample(
    rounds: &mut Rounds,
    fixture: &Fixture,
    threads: usize,
    size: u64,
    subject: Subject,
) -> Result<(), BenchError> {
    let page = if size < BLOCK { PAGE } else { BLOCK };
    let operations = (rounds.settings().batch / (size / page)).clamp(1, 2 * TO_FLUSH);
    let operations = operations.next_multiple_of(TO_FLUSH);
    let bracket = |thread: usize| Bracket {
        start: WINDOW + thread as u64 * OF_THREAD,
        size,
        page,
        operations,
    };
    let group = Group::Map;
    let (format, barrier) = (fixture.name, Barrier::new(threads));
    // Threads wait for each other, so none may begin before all are there.
    let (complete, reads) = (RwLock::new(false), AtomicBool::new(true));
    let times: Vec<_> = thread::scope(|scope| {
        let mut waiting = complete.write().unwrap_or_else(PoisonError::into_inner);
        let begin = |thread: usize| {
            let (bracket, barrier, complete) = (bracket(thread), &barrier, &complete);
            thread::Builder::new().spawn_scoped(scope, move || {
                let complete = *complete.read().unwrap_or_else(PoisonError::into_inner);
                complete.then(|| {
                    barrier.wait();
                    fixture.work(&bracket, subject)
                })?
            })
        };
        let device = thread::Builder::new().spawn_scoped(scope, || fixture.read_while(&reads));
        let begun: io::Result<Vec<_>> = device.and_then(|_| (0..threads).map(begin).collect());
        *waiting = begun.is_ok();
        drop(waiting);
        let join = |threads: Vec<thread::ScopedJoinHandle<'_, _>>| {
            threads.into_iter().map(|thread| thread.join()).collect()
        };
        let times = begun.map(join);
        reads.store(false, Ordering::Relaxed);
        times
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

/// Work of a thread: so many operations of `size` bytes.
struct Bracket {
    /// Start of its addresses, where it maps by page.
    start: u64,
    size: u64,
    page: u64,
    operations: u64,
}

impl Bracket {
    /// The memory of an operation: parts of it are used again.
    fn part(&self, nth: u64) -> Span<Offset> {
        Span::new(nth * self.size % RAM.len, self.size)
    }
}

/// One format with its units.
struct Fixture {
    name: &'static str,
    strict: Space,
    lazy: Space,
}

/// A page table, and a device that reads.
struct Space {
    dma: Dma,
    memory: Arc<Memory>,
    unit: SoftwareUnit<Arc<HeapTables>, Word>,
    /// Address that the device reads.
    seen: u64,
}

/// All physical memory is one word, which devices do no more than read.
struct Word(AtomicU64);

impl TargetMemory for Word {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        for _ in 0..span.len / 8 {
            visit(std::slice::from_ref(&self.0));
        }
        Ok(())
    }
}

fn since_start() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

impl Fixture {
    fn new(format: FormatId) -> Result<Self, BenchError> {
        let lazy = Flushing::Lazy {
            holds: LAZY,
            age: Duration::from_millis(10),
            now: since_start,
        };
        Ok(Self {
            name: format.name(),
            strict: Space::new(format, Flushing::Strict)?,
            lazy: Space::new(format, lazy)?,
        })
    }

    /// Reads of the devices.
    fn read_while(&self, reads: &AtomicBool) {
        let mut ports =
            [&self.strict, &self.lazy].map(|space| (space.unit.port(DEVICE), space.seen));
        while reads.load(Ordering::Relaxed) {
            for (port, seen) in &mut ports {
                let _ = black_box(port.read(*seen, &mut [0; 8]));
            }
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// Microseconds of one operation of each kind; `None` if one was refused.
    fn work(&self, bracket: &Bracket, subject: Subject) -> Option<[f64; 3]> {
        let ([map, strict], [_, lazy]) = match subject {
            Subject::ByPage if bracket.size > bracket.page => (
                self.lazy.by_page(bracket, 1)?,
                self.lazy.by_page(bracket, TO_FLUSH)?,
            ),
            _ => (
                self.strict.by_buffer(bracket)?,
                self.lazy.by_buffer(bracket)?,
            ),
        };
        Some([map, strict, lazy])
    }
}

impl Space {
    fn new(format: FormatId, flushing: Flushing) -> Result<Self, BenchError> {
        let name = format.name();
        let tables = HeapTables::with_tables(TABLES).map_err(|source| BenchError::Arena {
            format: name,
            source,
        })?;
        let tables = Arc::new(tables);
        let sizes = PageSizes::from_bits(PAGE | BLOCK);
        let table = AnyTable::new(format, 4, sizes, Arc::clone(&tables));
        let table = table.map_err(|source| BenchError::Build {
            format: name,
            source,
        })?;
        let mut config = SoftwareConfig::default();
        let root = table.root();
        config.capabilities = config.capabilities.with_format(FormatSupport {
            format: root.format,
            levels: 1 << root.levels,
            page_sizes: sizes,
        });
        let unit = SoftwareUnit::with_config(tables, Word(AtomicU64::new(0)), config);
        let window = Span::new(0, WINDOW);
        let dma = Dma::new(DOMAIN, table, &[window], flushing, MOST_THREADS);
        let attached: Result<(), AttachError> = dma.attach((Arc::new(unit.clone()), DEVICE));
        attached.map_err(|source| BenchError::Attach {
            format: name,
            source: Box::new(source),
        })?;
        let refused = || BenchError::Refused {
            group: Group::Map,
            op: OPS[0],
            format: name,
        };
        let ram = FixedRuns::new([RAM], PAGE).map_err(|_| refused())?;
        let memory = Memory::new(Arc::new(ram), &Ledger::unlimited());
        let seen = dma.map(&memory, Span::new(0, PAGE), Prot::RW);
        let seen = seen.map_err(|_| refused())?.range().start;
        Ok(Self {
            dma,
            memory,
            unit,
            seen,
        })
    }

    /// Maps and unmaps some buffers at a time; microseconds of a map and of an unmap.
    fn by_buffer(&self, bracket: &Bracket) -> Option<[f64; 2]> {
        let mut held = Vec::with_capacity(HELD as usize);
        Self::times(bracket, |nth, unmaps| {
            if unmaps {
                return self.dma.unmap(held.pop()?).ok();
            }
            let part = black_box(bracket.part(nth));
            held.push(self.dma.map(&self.memory, part, Prot::RW).ok()?);
            Some(())
        })
    }

    /// The same by a call of the table for each page after the first, and a flush for each `most` operations. Maps and
    /// unmaps by buffer are lazy, so that the flushes are one for 256 more.
    fn by_page(&self, bracket: &Bracket, most: u64) -> Option<[f64; 2]> {
        let (table, page) = (self.dma.table(), bracket.page);
        let mut held = Vec::with_capacity(HELD as usize);
        let (mut gather, mut waiting) = (Gather::new(), 0);
        let times = Self::times(bracket, |nth, unmaps| {
            let part = black_box(bracket.part(nth));
            if unmaps {
                self.dma.unmap(held.pop()?).ok()?;
            } else {
                let first = Span::new(part.start, page);
                held.push(self.dma.map(&self.memory, first, Prot::RW).ok()?);
            }
            let start = bracket.start + nth % HELD * bracket.size;
            for at in (page..bracket.size).step_by(page as usize) {
                let call = black_box(Span::<Iova>::new(start + at, page));
                if unmaps {
                    table
                        .owning(call)
                        .unmap(call, &mut gather, &mut NoRuns)
                        .ok()?;
                } else {
                    let run = black_box(Span::<Pa>::new(RAM.start + part.start + at, page));
                    table.map(call.start, &[run], Prot::RW).ok()?;
                }
            }
            if unmaps {
                waiting += 1;
                if waiting == most {
                    waiting = 0;
                    self.flush(&mut gather)?;
                }
            }
            Some(())
        })?;
        self.flush(&mut gather)?;
        Some(times)
    }

    fn flush(&self, gather: &mut Gather) -> Option<()> {
        let flushed = gather.flush_with(|what| self.unit.invalidate(DOMAIN, what));
        self.dma.table().reclaim(flushed.ok()?);
        Some(())
    }

    /// Does `one` for some operations at a time, first to map and then to unmap; microseconds of each.
    fn times(bracket: &Bracket, mut one: impl FnMut(u64, bool) -> Option<()>) -> Option<[f64; 2]> {
        let mut times = [Duration::ZERO; 2];
        for first in (0..bracket.operations).step_by(HELD as usize) {
            let some = first..bracket.operations.min(first + HELD);
            for (time, unmaps) in times.iter_mut().zip([false, true]) {
                let begun = Instant::now();
                some.clone().try_for_each(|nth| one(nth, unmaps))?;
                *time += begun.elapsed();
            }
        }
        Some(times.map(|time| time.as_secs_f64() * 1e6 / bracket.operations as f64))
    }
}
