//! The steps of the job, one function each, in the order in which they are done.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hostmem::{Backing, FrameSource, Limits, Machine, Mapping, Pinner, RaisedPool};
use ioas::{
    Area, HostMemory, HostTables, Ioas, Ledger, MappedStorage, Memory, MemoryObject, Observer, Own,
    Step,
};
use iommu::{DeviceId, DomainId, SoftwareUnit, Unit};
use iopt::{AnyTable, Prot, TABLE_BYTES, TableMemory};
use runs::{Bytes, PageSizes, Run, SizeHistogram, Span};

use super::report::{
    ChargeReport, DmaReport, MapReport, MemoryReport, NodeShare, SizeClass, Stretch, TablesReport,
};
use super::{JobError, MapJob, Stage, Watch, dma, target};

/// Where the memory is mapped: a multiple of every leaf size, with room for a neighbour below.
const IOVA: u64 = 1 << 40;
/// What is taken without a size.
const DEFAULT_SIZE: u64 = 256 << 20;
/// The window of the tables' addresses: above all memory, and above the addresses that stand in
/// for frames that this process may not know.
const TABLE_WINDOW: u64 = 1 << 46;
/// What is left of the limit on locked memory without being asked for: the kernel charges a ring of
/// io_uring too, and takes the charge of one that is closed back a little later.
const SPARE: u64 = 128 << 10;
/// Levels of the tables: 48 bits of addresses.
const LEVELS: u8 = 4;
/// The unit of the pins: the smallest part that could be given back.
const PIECE: u64 = 32 << 20;

pub(super) fn run(job: &MapJob, watch: &mut dyn Watch) -> Result<MapReport, JobError> {
    let mut report = MapReport::default();
    let pinner = Arc::new(Pinner::probe(PIECE)?);
    let machine = Machine::probe()?;
    let size = choose_size(job, &machine, &pinner, &mut report.memory)?;
    let backing = choose_backing(job, &machine, size, &mut report.memory)?;

    // The pool is put back when this is dropped, after the mapping, which is dropped before it.
    let pool = raise_pool(job, backing, size, watch)?;
    report.memory.pool_pages_added = pool.as_ref().map_or(0, RaisedPool::added);
    let mapping = Arc::new(Mapping::new(backing, size, None).map_err(JobError::Mapping)?);
    let started = Instant::now();
    populate(&mapping, watch)?;
    report.times.populate_ns = nanoseconds(started);

    let frames = FrameSource::detect(&mapping);
    let memory = Arc::new(HostMemory::new(
        Arc::clone(&mapping),
        Arc::clone(&pinner),
        frames,
    ));
    let outcome = with_space(job, &memory, frames, &pinner, watch, &mut report);
    drop((memory, mapping));
    if let Some(pool) = pool {
        pool.restore()?;
    }
    outcome.map(|()| report)
}

/// Everything from the pin to the unpin.
fn with_space(
    job: &MapJob,
    memory: &Arc<HostMemory>,
    frames: FrameSource,
    pinner: &Pinner,
    watch: &mut dyn Watch,
    report: &mut MapReport,
) -> Result<(), JobError> {
    let size = memory.len();
    let tables = Arc::new(HostTables::new(table_storage(size)?, TABLE_WINDOW)?);
    let mut space = Ioas::new(DomainId(1), new_table(job, tables.clone())?);

    let whole = Span::new(0, size);
    let pinned = Memory::new(memory.clone(), &ledger(pinner)?);
    let mut clock = Clock::new(watch, size);
    let mapped = space.map(IOVA, &pinned, whole, Prot::RW, &mut clock);
    report.times.pin_ns = clock.taken(Step::Pin);
    report.times.find_runs_ns = clock.taken(Step::FindRuns);
    report.times.map_ns = clock.taken(Step::FillTables);
    mapped?;

    let result = while_mapped(job, &mut space, memory, frames, &tables, watch, report);

    let mut clock = Clock::new(watch, size);
    space.unmap_all(&mut clock)?;
    report.times.unmap_ns = clock.taken(Step::EmptyTables) + clock.taken(Step::Flush);
    report.times.unpin_ns = clock.taken(Step::Unpin);
    space.close()?;
    result?;
    match tables.in_use() {
        0 => Ok(()),
        left => Err(JobError::TablesLeft { tables: left }),
    }
}

/// What happens between map and unmap.
fn while_mapped(
    job: &MapJob,
    space: &mut Ioas<Own<Arc<HostTables>>>,
    memory: &Arc<HostMemory>,
    frames: FrameSource,
    tables: &Arc<HostTables>,
    watch: &mut dyn Watch,
    report: &mut MapReport,
) -> Result<(), JobError> {
    let range = Span::new(IOVA, memory.len());
    let runs = describe(space, memory, frames, tables, range, report)?;
    report.times.map_by_page_ns = map_by_page(job, &runs, range.len, watch)?;

    let Some(hold) = space.area_at(IOVA).and_then(Area::hold) else {
        return Err(JobError::Lost { iova: IOVA });
    };
    let data = target::of_pin(memory.mapping(), hold)?;
    let unit = Arc::new(SoftwareUnit::new(Arc::clone(tables), data));
    // Devices of bus 1, as many to a slot as it has functions.
    let devices: Vec<DeviceId> = (0..job.devices).map(|n| DeviceId(1 << 8 | n)).collect();
    let started = Instant::now();
    for device in &devices {
        space.attach(Arc::clone(&unit) as Arc<dyn Unit>, *device)?;
    }
    report.times.attach_ns = nanoseconds(started);

    let started = Instant::now();
    let found = check_dma(&unit, &devices, memory.mapping(), range, watch)?;
    report.times.dma_check_ns = nanoseconds(started);
    let counters = unit.counters();
    report.dma = DmaReport {
        devices: job.devices,
        read_bytes: found.read,
        written_bytes: found.written,
        wrong_bytes: found.wrong,
        faults: found.faults,
        neighbour_faults: found.neighbour_faults,
        neighbour_accesses: found.neighbour_accesses,
        iotlb_hits: counters.iotlb_hits,
        iotlb_misses: counters.iotlb_misses,
        table_reads: counters.table_reads,
    };
    Ok(())
}

fn check_dma(
    unit: &SoftwareUnit<Arc<HostTables>, iommu::RunMap<target::Piece>>,
    devices: &[DeviceId],
    memory: &Mapping,
    range: Span,
    watch: &mut dyn Watch,
) -> Result<dma::Found, JobError> {
    let stage = Stage::DmaCheck;
    // The processor writes once, each device reads once, all write once, the processor reads once.
    let total = range.len * (devices.len() as u64 + 3);
    let filled = dma::fill(memory, &mut |done| watch.progress(stage, done, total));
    if filled.is_break() {
        return Err(JobError::Interrupted);
    }
    let mut report = |done: u64, _| watch.progress(stage, range.len + done, total);
    match dma::check(unit, devices, memory, range, &mut report) {
        ControlFlow::Continue(found) => Ok(found),
        ControlFlow::Break(()) => Err(JobError::Interrupted),
    }
}

/// The size, and why it is that when nobody asked for one.
fn choose_size(
    job: &MapJob,
    machine: &Machine,
    pinner: &Pinner,
    report: &mut MemoryReport,
) -> Result<u64, JobError> {
    let page = job.backing.map_or(machine.page, Backing::page);
    let room = pinner.room()?;
    if let Some(size) = job.size {
        if size == 0 || size % page != 0 {
            let what = job.backing.map_or("4k", Backing::name);
            return Err(JobError::Input(format!(
                "a size of {size} bytes is not a multiple of {}, the page of {what} memory, or is 0",
                Bytes(page)
            )));
        }
        if size > machine.total {
            return Err(JobError::Input(format!(
                "{} of memory are more than this machine has: {}",
                Bytes(size),
                Bytes(machine.total)
            )));
        }
        if let Some(room) = room.filter(|room| size > *room) {
            return Err(JobError::Input(over_limit(size, room, pinner)));
        }
        report.size_bytes = size;
        return Ok(size);
    }
    let mut size = DEFAULT_SIZE.max(page);
    let mut reason = "the default".to_string();
    let spare = room.map(|room| room.saturating_sub(SPARE));
    if let Some(room) = spare.filter(|room| *room < size) {
        size = room / page * page;
        if size == 0 {
            return Err(JobError::Input(over_limit(page, room, pinner)));
        }
        reason = format!(
            "what is left of the limit on locked memory ({}, RLIMIT_MEMLOCK)",
            Bytes(pinner.limits().memlock.unwrap_or(0))
        );
    } else if machine.available / 2 < size {
        size = (machine.available / 2 / page * page).max(page);
        reason = format!(
            "half of the {} that the machine has available",
            Bytes(machine.available)
        );
    }
    report.size_bytes = size;
    report.size_reason = Some(reason);
    Ok(size)
}

fn over_limit(size: u64, room: u64, pinner: &Pinner) -> String {
    let limit = pinner.limits().memlock.unwrap_or(0);
    let in_use = Limits::in_use(pinner.counter()).map_or(0, |in_use| in_use.known);
    format!(
        "needs {}, {} allowed (RLIMIT_MEMLOCK, counted in {}), {} in use: {} are left",
        Bytes(size),
        Bytes(limit),
        pinner.counter(),
        Bytes(in_use),
        Bytes(room)
    )
}

fn choose_backing(
    job: &MapJob,
    machine: &Machine,
    size: u64,
    report: &mut MemoryReport,
) -> Result<Backing, JobError> {
    let backing = match job.backing {
        Some(backing) => backing,
        None => {
            let choice = Backing::choose(size, machine);
            report.backing_reason = Some(choice.reason);
            choice.backing
        }
    };
    report.backing = backing.name().into();
    Ok(backing)
}

/// Huge pages that were asked for by name are added to the pool where they are missing.
fn raise_pool(
    job: &MapJob,
    backing: Backing,
    size: u64,
    watch: &mut dyn Watch,
) -> Result<Option<RaisedPool>, JobError> {
    match (job.backing, backing.huge_size()) {
        (Some(_), Some(page)) => match RaisedPool::raise(page, size) {
            Ok(pool) => Ok(Some(pool)),
            // A signal makes the kernel stop looking for pages.
            Err(_) if watch.progress(Stage::Populate, 0, size).is_break() => {
                Err(JobError::Interrupted)
            }
            Err(cause) => Err(cause.into()),
        },
        _ => Ok(None),
    }
}

fn populate(mapping: &Mapping, watch: &mut dyn Watch) -> Result<(), JobError> {
    let total = mapping.len();
    if watch.progress(Stage::Populate, 0, total).is_break() {
        return Err(JobError::Interrupted);
    }
    mapping.populate(&mut |done| watch.progress(Stage::Populate, done, total))?;
    Ok(())
}

fn ledger(pinner: &Pinner) -> Result<Arc<Ledger>, JobError> {
    let counter = pinner.counter();
    let name = match counter {
        hostmem::Counter::UserLockedVm => "user->locked_vm",
        hostmem::Counter::MmLockedVm => "mm->locked_vm",
        hostmem::Counter::PinnedVm => "mm->pinned_vm",
    };
    Ok(Ledger::new(
        name,
        pinner.limits().limit(counter),
        Limits::in_use(counter)?.known,
    ))
}

/// Room for the tables of `size` bytes in leaves of 4 KiB, the most that can be needed.
fn table_storage(size: u64) -> Result<MappedStorage, JobError> {
    let leaf_tables = size.div_ceil(2 << 20) + 1;
    let upper = leaf_tables.div_ceil(512) * 2 + u64::from(LEVELS);
    MappedStorage::new((leaf_tables + upper) * TABLE_BYTES, None).map_err(JobError::TableMemory)
}

fn new_table(job: &MapJob, memory: Arc<HostTables>) -> Result<AnyTable<Arc<HostTables>>, JobError> {
    let sizes = PageSizes::from_bits(u64::MAX).up_to(job.max_leaf.unwrap_or(u64::MAX));
    Ok(AnyTable::new(job.format, LEVELS, sizes, memory)?)
}

/// Fills in what is to be said of memory, charge and tables; returns the runs.
fn describe(
    space: &Ioas<Own<Arc<HostTables>>>,
    memory: &Arc<HostMemory>,
    frames: FrameSource,
    tables: &Arc<HostTables>,
    range: Span,
    report: &mut MapReport,
) -> Result<Vec<Run>, JobError> {
    let (Some(area), Some(table)) = (space.area_at(range.start), space.table()) else {
        return Err(JobError::Lost { iova: range.start });
    };
    let mut runs = Vec::new();
    let mut joiner = runs::Joiner::new();
    let mut layout: Vec<Stretch> = Vec::new();
    table.for_each_leaf(range, |leaf| {
        runs.extend(joiner.push(leaf.run));
        match layout.last_mut() {
            Some(open) if open.leaf_bytes == leaf.run.len => open.len_bytes += leaf.run.len,
            _ => layout.push(Stretch {
                iova: leaf.run.iova,
                len_bytes: leaf.run.len,
                leaf_bytes: leaf.run.len,
            }),
        }
    });
    runs.extend(joiner.finish());
    let mut sizes = SizeHistogram::new();
    runs.iter().for_each(|run| sizes.add(run.len, 1));

    let mapping = memory.mapping();
    report.layout = layout;
    report.memory.runs = runs.len() as u64;
    report.memory.run_sizes = classes(&sizes);
    report.memory.huge_bytes = mapping.folios()?.huge;
    report.memory.nodes = nodes(mapping)?;
    report.memory.addresses = match frames {
        FrameSource::Pagemap => "pagemap",
        FrameSource::FileOffset => "file-offset",
        FrameSource::Synthetic { .. } => "synthetic",
    }
    .into();
    report.memory.addresses_reason = frames.to_string();
    report.memory.looks = memory.effort().looks();

    let ledger = area.memory().ledger();
    report.charge = ChargeReport {
        charged_bytes: area.memory().charged(),
        limit_bytes: ledger.limit(),
        counter: ledger.counter().into(),
        steps: ledger.steps(),
        page_steps: range.len / TABLE_BYTES,
        pin_calls: memory.effort().calls(),
        pin_buffers: memory.effort().buffers(),
        pin: memory.pinner().kind().to_string(),
        pin_reason: memory.pinner().why().map(Into::into),
    };
    let root = table.root();
    report.tables = TablesReport {
        format: root.format.name().into(),
        levels: root.levels,
        leaves: classes(&table.leaf_sizes()),
        table_pages: table.tables(),
        table_bytes: table.tables() * TABLE_BYTES,
        nodes: nodes(tables.storage().mapping())?,
    };
    Ok(runs)
}

fn classes(sizes: &SizeHistogram) -> Vec<SizeClass> {
    sizes
        .iter()
        .map(|(from_bytes, class)| SizeClass {
            from_bytes,
            count: class.count,
            bytes: class.bytes,
        })
        .collect()
}

fn nodes(mapping: &Mapping) -> Result<Vec<NodeShare>, JobError> {
    Ok(mapping
        .nodes()?
        .into_iter()
        .map(|(node, bytes)| NodeShare { node, bytes })
        .collect())
}

/// The time of the same map done page by page, in tables of its own.
fn map_by_page(
    job: &MapJob,
    runs: &[Run],
    size: u64,
    watch: &mut dyn Watch,
) -> Result<u64, JobError> {
    let tables = Arc::new(HostTables::new(table_storage(size)?, TABLE_WINDOW)?);
    let mut table = new_table(job, tables.clone())?;
    let mut taken = Duration::ZERO;
    for run in runs {
        // In stretches, so that somebody can stop it; what watching takes is not counted.
        for start in (0..run.len).step_by(1 << 30) {
            let len = (run.len - start).min(1 << 30);
            let started = Instant::now();
            for offset in (start..start + len).step_by(TABLE_BYTES as usize) {
                let page = [Span::new(run.pa + offset, TABLE_BYTES)];
                table.map(run.iova + offset, &page, Prot::RW)?;
            }
            taken += started.elapsed();
            if watch
                .progress(Stage::Map, run.iova - IOVA + start + len, size)
                .is_break()
            {
                return Err(JobError::Interrupted);
            }
        }
    }
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    Ok(u64::try_from(taken.as_nanos()).unwrap_or(u64::MAX))
}

fn nanoseconds(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Times the steps of an operation and passes its progress on.
struct Clock<'a> {
    watch: &'a mut dyn Watch,
    total: u64,
    begun: Option<(Step, Instant)>,
    taken: Vec<(Step, Duration)>,
}

impl<'a> Clock<'a> {
    fn new(watch: &'a mut dyn Watch, total: u64) -> Self {
        Self {
            watch,
            total,
            begun: None,
            taken: Vec::new(),
        }
    }

    fn taken(&self, step: Step) -> u64 {
        let sum: Duration = self
            .taken
            .iter()
            .filter(|(s, _)| *s == step)
            .map(|(_, t)| *t)
            .sum();
        u64::try_from(sum.as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Observer for Clock<'_> {
    fn begin(&mut self, step: Step) {
        self.begun = Some((step, Instant::now()));
    }

    fn end(&mut self, step: Step, _bytes: u64) {
        if let Some((begun, at)) = self.begun.take()
            && begun == step
        {
            let taken = at.elapsed();
            match self.taken.iter_mut().find(|(s, _)| *s == step) {
                Some((_, sum)) => *sum += taken,
                None => self.taken.push((step, taken)),
            }
        }
    }

    fn progress(&mut self, step: Step, done: u64) -> ControlFlow<()> {
        let stage = match step {
            Step::Charge | Step::Pin => Stage::Pin,
            Step::FindRuns => Stage::FindRuns,
            Step::FillTables => Stage::Map,
            Step::EmptyTables | Step::Flush => Stage::Unmap,
            Step::Unpin => Stage::Unpin,
        };
        self.watch.progress(stage, done, self.total)
    }
}
