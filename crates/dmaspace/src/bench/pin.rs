//! Origin 1: real memory, pinned, charged and mapped.
//!
//! By runs is [`Ioas::map`] with everything that it does. Page by page and by folio, the same pin, and the
//! same finding of runs, are followed by a charge and a map of tables for each page, or folio, as the
//! origin did for each page before. The parts are measured in one round; "map for DMA" is their sum.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use hostmem::{Backing, FrameSource, Pinner};
use ioas::{HostMemory, HostTables, Ioas, Ledger, MapError, MappedStorage, Memory, Own, Step};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, Prot, TABLE_BYTES, TableMemory};
use runs::{PageSizes, Span};

use super::BenchError;
use super::real::{Failed, Real};
use super::report::{Group, GroupReport, Key, Subject, Unit};
use super::turns::Turns;
use crate::devices::{DevicesReport, Places, State, Way};
use crate::map::clock::Clock;
use crate::map::{JobError, MapBackend, MapJob, Stage, Watch};

const PAGE: u64 = 4096;
const IOVA: u64 = 1 << 40;
/// Above all memory, and above what stands in for frames.
const WINDOW: u64 = 1 << 46;
/// The smallest part that is pinned by itself.
const PIECE: u64 = 32 << 20;
const FORMAT: FormatId = FormatId::VtdSs;

const BACKINGS: [Backing; 4] = [
    Backing::Hugetlb1G,
    Backing::Hugetlb2M,
    Backing::Thp,
    Backing::Anon4K,
];

const WHOLE: &str = "map for DMA";

/// Runs the group.
pub(super) fn run(turns: &mut Turns<'_>, report: &mut GroupReport) -> Result<(), BenchError> {
    report.notes = vec![
        "map for DMA: pin, find runs, charge and map; page by page and by folio have the same pin and the \
         same runs, then a charge and a map for each page, or folio"
            .into(),
    ];
    for (nth, backing) in (0..).zip(BACKINGS) {
        turns.part(nth, 4);
        if let Err(failed) = of_memory(backing, turns, report) {
            failed.or_report(report, backing.name())?;
        }
    }
    kernel(turns, report)
}

/// One kind of memory.
fn of_memory(
    backing: Backing,
    turns: &mut Turns<'_>,
    report: &mut GroupReport,
) -> Result<(), Failed> {
    let pinner = Pinner::probe(PIECE).map_err(|error| Failed::because(&error))?;
    let room = pinner.room().map_err(|error| Failed::because(&error))?;
    let wanted = turns.settings().memory_bytes;
    let real = Real::take(backing, wanted, backing.page(), room, turns, report)?;
    let frames = FrameSource::detect(&real.mapping);
    let (name, kind) = (backing.name(), pinner.kind());
    let memory = HostMemory::new(real.mapping.clone(), Arc::new(pinner), frames);
    let memory = Arc::new(memory);
    let len = real.mapping.len();
    let mut bed = Bed {
        // The kernel keeps its own count and its own limit.
        pinned: Memory::new(memory, &Ledger::unlimited()),
        tables: tables(len)?,
        len,
        backing,
    };
    let mut count = 0;
    while turns.more()? {
        count = bed.round(turns)?.len();
    }
    let (mib, runs) = (len >> 20, if count == 1 { "run" } else { "runs" });
    report.notes.push(format!(
        "{name}: {mib} MiB, {count} {runs}, pinned by {kind}, {frames}"
    ));
    Ok(())
}

/// Room for the tables of `len` bytes in leaves of 4 KiB.
fn tables(len: u64) -> Result<Arc<HostTables>, Failed> {
    let leaf_tables = len.div_ceil(2 << 20) + 1;
    let all = leaf_tables + leaf_tables.div_ceil(512) * 2 + 8;
    let storage = MappedStorage::new(all * TABLE_BYTES, None);
    let storage = storage.map_err(|error| Failed::because(&*error))?;
    let tables = HostTables::new(storage, WINDOW).map_err(|source| BenchError::Arena {
        format: FORMAT.name(),
        source,
    })?;
    Ok(Arc::new(tables))
}

fn table(tables: &Arc<HostTables>) -> Result<AnyTable<Arc<HostTables>>, BenchError> {
    let sizes = PageSizes::from_bits(u64::MAX);
    AnyTable::new(FORMAT, 4, sizes, tables.clone()).map_err(|source| BenchError::Build {
        format: FORMAT.name(),
        source,
    })
}

fn refused(op: &'static str) -> BenchError {
    let (group, format) = (Group::Pin, FORMAT.name());
    BenchError::Refused { group, op, format }
}

/// Memory, and tables for it.
struct Bed {
    pinned: Arc<Memory>,
    tables: Arc<HostTables>,
    len: u64,
    backing: Backing,
}

impl Bed {
    /// Everything once; returns the runs.
    fn round(&mut self, turns: &mut Turns<'_>) -> Result<Vec<Span>, Failed> {
        let mut space: Ioas<Own<Arc<HostTables>>> = Ioas::new(DomainId(1), table(&self.tables)?);
        let whole = Span::new(0, self.len);
        let (mapped, all, pin, find) = {
            let mut asked = Asked(turns);
            let mut clock = Clock::new(&mut asked, self.len);
            let begun = Instant::now();
            let mapped = space.map(IOVA, &self.pinned, whole, Prot::RW, &mut clock);
            let all = begun.elapsed().as_nanos() as f64;
            let [pin, find] = [Step::Pin, Step::FindRuns].map(|step| clock.spent(step) as f64);
            (mapped, all, pin, find)
        };
        mapped.map_err(|error| match error {
            MapError::Interrupted => BenchError::Interrupted.into(),
            error => Failed::because(&error),
        })?;
        let runs = runs(&space, self.len);
        let mut asked = Asked(turns);
        let mut clock = Clock::new(&mut asked, self.len);
        let unmapped = space.unmap_all(&mut clock);
        let (empty, flush) = (clock.spent(Step::EmptyTables), clock.spent(Step::Flush));
        let unpin = clock.spent(Step::Unpin) as f64;
        unmapped.map_err(|error| Failed::because(&error))?;
        space.close().map_err(|error| Failed::because(&error))?;

        let rest = (all - pin - find).max(0.0);
        let by_page = self.by_steps(&runs, PAGE)?;
        let mut ways = vec![(Subject::ByPage, by_page), (Subject::Dmaspace, rest)];
        if self.backing.largest_page() > PAGE {
            let by_folio = self.by_steps(&runs, self.backing.largest_page())?;
            ways.push((Subject::ByFolio, by_folio));
        }
        let (ms, us) = (Unit::Milliseconds, Unit::Microseconds);
        for (subject, steps) in ways {
            self.note(turns, WHOLE, subject, ms, pin + find + steps);
            self.note(turns, "charge and map", subject, us, steps);
        }
        for (op, unit, time) in [
            ("pin", ms, pin),
            ("find runs", ms, find),
            ("unmap", us, (empty + flush) as f64),
            ("unpin", ms, unpin),
        ] {
            self.note(turns, op, Subject::Dmaspace, unit, time);
        }
        Ok(runs)
    }

    /// Charges and maps known runs by steps of `step` bytes, in tables and an account of its own;
    /// nanoseconds.
    fn by_steps(&self, runs: &[Span], step: u64) -> Result<f64, Failed> {
        let ledger = Ledger::unlimited();
        let mut table = table(&self.tables)?;
        let steps = runs.iter().map(|run| run.len / step + 2).sum::<u64>();
        let mut charges = Vec::with_capacity(usize::try_from(steps).unwrap_or(0));
        let (mut iova, mut well) = (IOVA, true);
        let begun = Instant::now();
        for run in runs {
            let (mut at, end) = (run.start, run.start + run.len);
            while at < end {
                // A folio begins at a multiple of its size.
                let len = (step - (at & (step - 1))).min(end - at);
                match ledger.charge(len) {
                    Ok(charge) => charges.push(charge),
                    Err(_) => well = false,
                }
                well &= table.map(iova, &[Span::new(at, len)], Prot::RW).is_ok();
                (at, iova) = (at + len, iova + len);
            }
        }
        let taken = begun.elapsed().as_nanos() as f64;
        let (gather, memory) = table.tear_down();
        memory.reclaim(gather.never_walked().into_tables());
        match well {
            true => Ok(taken),
            false => Err(refused("charge and map").into()),
        }
    }

    fn note(&self, turns: &mut Turns<'_>, op: &'static str, subject: Subject, unit: Unit, ns: f64) {
        let (memory, format, bytes) = (self.backing.name(), FORMAT.name(), self.len);
        note(turns, op, memory, format, subject, bytes, unit, ns);
    }
}

#[allow(clippy::too_many_arguments, reason = "the columns of a row")]
fn note(
    turns: &mut Turns<'_>,
    op: &'static str,
    memory: &'static str,
    format: &'static str,
    subject: Subject,
    size_bytes: u64,
    unit: Unit,
    ns: f64,
) {
    let key = Key {
        group: Group::Pin,
        op,
        memory,
        format,
        subject,
        threads: 1,
        size_bytes,
        unit,
    };
    let divisor = if unit == Unit::Milliseconds { 1e6 } else { 1e3 };
    turns.note(key, ns / divisor);
}

/// The physical runs that are mapped.
fn runs(space: &Ioas<Own<Arc<HostTables>>>, len: u64) -> Vec<Span> {
    let mut runs: Vec<Span> = Vec::new();
    if let Some(table) = space.table() {
        table.for_each_leaf(Span::new(IOVA, len), |leaf| match runs.last_mut() {
            Some(last) if last.start + last.len == leaf.run.pa => last.len += leaf.run.len,
            _ => runs.push(Span::new(leaf.run.pa, leaf.run.len)),
        });
    }
    runs
}

/// Whoever watches the bench watches the map.
struct Asked<'a, 'b>(&'a mut Turns<'b>);

impl Watch for Asked<'_, '_> {
    fn progress(&mut self, _stage: Stage, _done: u64, _total: u64) -> ControlFlow<()> {
        self.0.go_on()
    }
}

/// The kernel's own back ends, where a device is ready for them.
fn kernel(turns: &mut Turns<'_>, report: &mut GroupReport) -> Result<(), BenchError> {
    let devices = DevicesReport::read(&Places::default()).unwrap_or_default();
    for (way, name) in [(Way::Type1, "vfio"), (Way::Iommufd, "iommufd")] {
        let ready = |device: &&crate::devices::DeviceReport| {
            device.state == State::Ready && device.ways.contains(&way)
        };
        let Some(device) = devices.devices.iter().find(ready) else {
            let none = Failed::NotRun("no device: `dmaspace devices` says what it takes".into());
            none.or_report(report, name)?;
            continue;
        };
        for backing in BACKINGS {
            let devices = vec![device.address.clone()];
            let backend = match way {
                Way::Iommufd => MapBackend::Iommufd { devices },
                _ => MapBackend::Vfio { devices },
            };
            let size = turns.settings().memory_bytes / backing.page() * backing.page();
            let job = MapJob {
                size: Some(size),
                backing: Some(backing),
                backend,
                placement: None,
            };
            turns.part(0, 1);
            if let Err(failed) = of_kernel(&job, name, size, backing, turns) {
                failed.or_report(report, &format!("{name}, {backing}"))?;
            }
        }
    }
    Ok(())
}

fn of_kernel(
    job: &MapJob,
    name: &'static str,
    size: u64,
    backing: Backing,
    turns: &mut Turns<'_>,
) -> Result<(), Failed> {
    while turns.more()? {
        let times = match job.run(&mut Asked(turns)) {
            Ok(report) => report.times,
            Err(JobError::Interrupted) => return Err(BenchError::Interrupted.into()),
            Err(error) => return Err(Failed::because(&error)),
        };
        for (op, ns) in [(WHOLE, times.map_ns), ("unmap", times.unmap_ns)] {
            let (subject, unit) = (Subject::Dmaspace, Unit::Milliseconds);
            note(
                turns,
                op,
                backing.name(),
                name,
                subject,
                size,
                unit,
                ns as f64,
            );
        }
    }
    Ok(())
}
