//! Origin 1: real memory, pinned, charged and mapped.
//!
//! *By runs* is [`Ioas::map`] with everything that it does. The other ways have the same pin and the same finding of
//! runs, then: *charged by page*, a charge for each page and a map for each run, as the origin did before; *charged by
//! folio*, a charge for each folio and a map for each run, as it did after; and *all by page*, a charge and a map for
//! each page, as no kernel does. The parts are measured in one round; "map for DMA" is their sum.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hostmem::{Backing, FrameSource, Pinner};
use ioas::{Charge, HostMemory, HostTables, Ioas, Ledger, MappedStorage, Memory, Observer, Step};
use iommu::DomainId;
use iopt::{AnyTable, FormatId, Leaf, Prot, TABLE_BYTES};
use runs::{Bytes, Pa, PageSizes, Span};

use super::BenchError;
use super::real::{self, Failed};
use super::report::{Group, GroupReport, Key, Subject, Unit};
use super::rounds::Rounds;

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
pub(super) fn run(rounds: &mut Rounds, report: &mut GroupReport) -> Result<(), BenchError> {
    report.notes = vec![
        "map for DMA: pin, find runs, charge and map; all ways have the same pin and the same runs".into(),
        "charged by page: then mapped by run, as the origin did before; by folio: the same with a charge for \
         each folio, as it did after; all by page: charged and mapped by page, as no kernel does"
            .into(),
    ];
    for (nth, backing) in (0..).zip(BACKINGS) {
        rounds.part(nth, 4);
        if let Err(failed) = of_memory(backing, rounds, report) {
            failed.or_report(report, backing.name())?;
        }
    }
    Ok(())
}

/// One kind of memory.
fn of_memory(
    backing: Backing,
    rounds: &mut Rounds,
    report: &mut GroupReport,
) -> Result<(), Failed> {
    let pinner = Pinner::probe(PIECE).map_err(|error| Failed::because(&error))?;
    let room = pinner.room().map_err(|error| Failed::because(&error))?;
    let wanted = rounds.settings().memory_bytes;
    let mapping = real::memory(backing, wanted, backing.page(), room, report)?;
    let frames = FrameSource::detect(&mapping);
    let (name, kind) = (backing.name(), pinner.kind());
    let len = mapping.len();
    let memory = HostMemory::with_pinner(mapping, Arc::new(pinner), frames);
    let memory = Arc::new(memory);
    // The kernel keeps its own count and its own limit.
    let ledger = Ledger::unlimited();
    let mut fixture = Fixture {
        pinned: Memory::new(memory, &ledger),
        ledger,
        tables: tables(len)?,
        charges: Vec::new(),
        len,
        backing,
    };
    let mut count = 0;
    while rounds.more() {
        count = fixture.round(rounds)?.len();
    }
    let (size, runs) = (Bytes(len), if count == 1 { "run" } else { "runs" });
    report.notes.push(format!(
        "{name}: {size}, {count} {runs}, pinned by {kind}, {frames}"
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

fn table(tables: &Arc<HostTables>) -> Result<AnyTable, BenchError> {
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

/// Time and number of charges for the mapping of all runs.
struct Steps {
    ns: f64,
    charges: u64,
}

/// The parts of a run between multiples of `size` bytes, where a page or folio begins.
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

/// Memory, and tables for it.
struct Fixture {
    pinned: Arc<Memory>,
    ledger: Arc<Ledger>,
    tables: Arc<HostTables>,
    /// Charges of one way; the memory of the list is kept, as it would count as the way's.
    charges: Vec<Charge>,
    len: u64,
    backing: Backing,
}

impl Fixture {
    /// Everything once; returns the runs.
    fn round(&mut self, rounds: &mut Rounds) -> Result<Vec<Span<Pa>>, Failed> {
        let space = Ioas::over_table(DomainId(1), table(&self.tables)?);
        let whole = Span::new(0, self.len);
        let charged = self.ledger.steps();
        let (mapped, all, pin, find) = {
            let mut clock = Clock::default();
            let begun = Instant::now();
            let mapped = space
                .observed(&mut clock)
                .map(IOVA, &self.pinned, whole, Prot::RW);
            let all = begun.elapsed().as_nanos() as f64;
            let [pin, find] = [Step::Pin, Step::FindRuns].map(|step| clock.spent(step) as f64);
            (mapped, all, pin, find)
        };
        mapped.map_err(|error| Failed::because(&error))?;
        let charges = self.ledger.steps() - charged;
        let runs = runs(&space, self.len);
        let mut clock = Clock::default();
        let unmapped = space.observed(&mut clock).unmap_all();
        let (empty, flush) = (clock.spent(Step::EmptyTables), clock.spent(Step::Flush));
        let unpin = clock.spent(Step::Unpin) as f64;
        unmapped.map_err(|error| Failed::because(&error))?;
        space.close().map_err(|error| Failed::because(&error))?;

        let ours = Steps {
            ns: (all - pin - find).max(0.0),
            charges,
        };
        let (page, folio) = (PAGE, self.backing.largest_page());
        let mut ways = vec![
            (Subject::ChargeByPage, self.by_steps(&runs, page, u64::MAX)?),
            (Subject::Dmaspace, ours),
            (Subject::ByPage, self.by_steps(&runs, page, page)?),
        ];
        if folio > page {
            let by_folio = self.by_steps(&runs, folio, u64::MAX)?;
            ways.insert(1, (Subject::ByFolio, by_folio));
        }
        let (ms, us) = (Unit::Milliseconds, Unit::Microseconds);
        for (subject, steps) in ways {
            self.note(rounds, WHOLE, subject, ms, (pin + find + steps.ns) / 1e6);
            self.note(rounds, "charge and map", subject, us, steps.ns / 1e3);
            self.note(
                rounds,
                "charges",
                subject,
                Unit::Count,
                steps.charges as f64,
            );
        }
        for (op, unit, time) in [
            ("pin", ms, pin / 1e6),
            ("find runs", ms, find / 1e6),
            ("unmap", us, (empty + flush) as f64 / 1e3),
            ("unpin", ms, unpin / 1e6),
        ] {
            self.note(rounds, op, Subject::Dmaspace, unit, time);
        }
        Ok(runs)
    }

    /// Charges known runs by `charged` bytes and maps them by `mapped` bytes, in tables and an account of its own.
    fn by_steps(&mut self, runs: &[Span<Pa>], charged: u64, mapped: u64) -> Result<Steps, Failed> {
        let ledger = Ledger::unlimited();
        let table = table(&self.tables)?;
        let (mut iova, mut well) = (IOVA, true);
        let begun = Instant::now();
        for run in runs {
            for part in parts(*run, charged) {
                match ledger.charge(part.len) {
                    Ok(charge) => self.charges.push(charge),
                    Err(_) => well = false,
                }
            }
            for part in parts(*run, mapped) {
                well &= table.map(iova, &[part], Prot::RW).is_ok();
                iova += part.len;
            }
        }
        let ns = begun.elapsed().as_nanos() as f64;
        let charges = ledger.steps();
        self.charges.clear();
        let (gather, memory) = table.tear_down();
        memory.reclaim(gather.never_walked().into_tables());
        match well {
            true => Ok(Steps { ns, charges }),
            false => Err(refused("charge and map").into()),
        }
    }

    fn note(&self, rounds: &mut Rounds, op: &'static str, subject: Subject, unit: Unit, of: f64) {
        let (memory, format, bytes) = (self.backing.name(), FORMAT.name(), self.len);
        note(rounds, op, memory, format, subject, bytes, unit, of);
    }
}

#[allow(clippy::too_many_arguments, reason = "the columns of a row")]
fn note(
    rounds: &mut Rounds,
    op: &'static str,
    memory: &'static str,
    format: &'static str,
    subject: Subject,
    size_bytes: u64,
    unit: Unit,
    figure: f64,
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
    rounds.note(key, figure);
}

/// The physical runs that are mapped.
fn runs(space: &Ioas, len: u64) -> Vec<Span<Pa>> {
    let mut runs: Vec<Span<Pa>> = Vec::new();
    let each = |leaf: Leaf| match runs.last_mut() {
        Some(last) if last.start + last.len == leaf.run.pa => last.len += leaf.run.len,
        _ => runs.push(Span::new(leaf.run.pa, leaf.run.len)),
    };
    space.with_table(|table| table.for_each_leaf(Span::new(IOVA, len), each));
    runs
}

/// Times the steps of an operation.
#[derive(Default)]
struct Clock {
    begun: Option<(Step, Instant)>,
    taken: Vec<(Step, Duration)>,
}

impl Clock {
    /// Nanoseconds of `step`, also if it had nothing to do.
    fn spent(&self, step: Step) -> u64 {
        let taken = self.taken.iter().filter(|(known, _)| *known == step);
        let taken: Duration = taken.map(|(_, time)| *time).sum();
        u64::try_from(taken.as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Observer for Clock {
    fn begin(&mut self, step: Step) {
        self.begun = Some((step, Instant::now()));
    }

    fn end(&mut self, step: Step, _bytes: u64) {
        let begun = self.begun.take().filter(|(begun, _)| *begun == step);
        if let Some((_, at)) = begun {
            self.taken.push((step, at.elapsed()));
        }
    }
}
