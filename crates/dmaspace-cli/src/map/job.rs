//! The steps of the job, in the order in which they are done, over any back end.
//!
//! What differs from one to the other is a [`Backend`]: where the memory goes, what can be looked at
//! while it is mapped, and what has to be closed. A step that a back end does not do by itself, or
//! a number that it cannot tell, is left out of the report.

use std::sync::Arc;
use std::time::Instant;

use hostmem::{FrameSource, Machine, Mapping, Pinner};
use ioas::{HostMemory, Ioas, Ledger, Memory, MemoryObject, Placement, Step};
use iommu::NodeId;
use iopt::Prot;
use runs::{Iova, Span};
use scenario::Counted;

use super::clock::{Clock, nanoseconds};
use super::kernel;
use super::memory::{self, Account, Taken};
use super::report::{Lack, MapReport, WindowReport};
use super::software::SoftwareBackend;
use super::{JobError, MapBackend, MapJob, Watch};

/// The unit of our own pins: the smallest part that could be given back.
const PIECE: u64 = 32 << 20;
/// Bytes of a page of the smallest size.
const PAGE: u64 = 4096;

/// A back end, as far as the job has to know it.
pub(super) trait Backend {
    /// The address space.
    fn space(&self) -> &Ioas;

    /// Says where `size` bytes shall be mapped, before anything is.
    fn place(
        &mut self,
        size: u64,
        ledger: &Arc<Ledger>,
        watch: &mut dyn Watch,
    ) -> Result<u64, JobError>;

    /// What happens between map and unmap.
    fn while_mapped(
        &mut self,
        mapped: &Mapped<'_>,
        watch: &mut dyn Watch,
        report: &mut MapReport,
    ) -> Result<(), JobError>;

    /// Ends it, when nothing is mapped any more.
    fn close(self, report: &mut MapReport) -> Result<(), JobError>;
}

/// Memory that is mapped.
pub(super) struct Mapped<'a> {
    pub(super) memory: &'a Arc<HostMemory>,
    /// Where its physical addresses come from.
    pub(super) frames: FrameSource,
    /// The device addresses.
    pub(super) range: Span<Iova>,
}

pub(super) fn run(job: &MapJob, watch: &mut dyn Watch) -> Result<MapReport, JobError> {
    if let Some(Placement::Near(NodeId(node))) = job.placement {
        let nodes = Machine::probe()?.nodes;
        if !nodes.contains(&node) {
            return Err(JobError::NoNode { node, nodes });
        }
    }
    match &job.backend {
        MapBackend::Software(software) => {
            let pinner = Pinner::probe(PIECE)?;
            let account = Account::of_pinner(&pinner)?;
            let backend = |size| SoftwareBackend::new(software, job.placement, size);
            let pinner = Arc::new(pinner);
            let memory = |mapping, frames| HostMemory::with_pinner(mapping, pinner, frames);
            run_on(job, memory, account, backend, watch)
        }
        // The kernel pins.
        MapBackend::Vfio { devices } => {
            let backend = kernel::vfio(devices, job.placement)?;
            let account = Account::of_process()?;
            let memory = |mapping, _| HostMemory::new(mapping);
            run_on(job, memory, account, |_| Ok(backend), watch)
        }
        MapBackend::Iommufd { devices } => {
            let backend = kernel::iommufd(devices, job.placement)?;
            let account = Account::of_user()?;
            let memory = |mapping, _| HostMemory::new(mapping);
            run_on(job, memory, account, |_| Ok(backend), watch)
        }
    }
}

fn run_on<S: Backend>(
    job: &MapJob,
    memory: impl FnOnce(Arc<Mapping>, FrameSource) -> HostMemory,
    account: Account,
    backend: impl FnOnce(u64) -> Result<S, JobError>,
    watch: &mut dyn Watch,
) -> Result<MapReport, JobError> {
    let mut report = MapReport::default();
    report.backend.name = job.backend.name().into();
    // The pool is put back when this is dropped, after the mapping, which is dropped before it.
    let Taken { mapping, pool } = memory::take(job, &account, watch, &mut report.memory)?;
    let started = Instant::now();
    memory::populate(&mapping, watch)?;
    report.times.populate_ns = nanoseconds(started);

    let frames = FrameSource::detect(&mapping);
    let memory = Arc::new(memory(mapping, frames));
    let outcome = backend(memory.len())
        .and_then(|backend| with_backend(backend, &account, &memory, frames, watch, &mut report));
    drop(memory);
    if let Some(pool) = pool {
        pool.restore()?;
    }
    outcome.map(|()| report)
}

/// Everything from the pin to the unpin.
fn with_backend<S: Backend>(
    mut backend: S,
    account: &Account,
    memory: &Arc<HostMemory>,
    frames: FrameSource,
    watch: &mut dyn Watch,
    report: &mut MapReport,
) -> Result<(), JobError> {
    let size = memory.len();
    let ledger = account.ledger()?;
    let iova = backend.place(size, &ledger, watch)?;
    report.charge.before = Counted::now()?;
    let (in_use, steps) = (ledger.in_use(), ledger.steps());

    let whole = Memory::new(memory.clone(), &ledger);
    let mut clock = Clock::new(watch, size);
    let mapped = backend
        .space()
        .map(iova, &whole, Span::new(0, size), Prot::RW, &mut clock);
    report.times.pin_ns = clock.taken(Step::Pin);
    report.times.find_runs_ns = clock.taken(Step::FindRuns);
    report.times.map_ns = clock.spent(Step::FillTables);
    mapped?;
    report.charge.mapped = Counted::now()?;
    report.charge.charged_bytes = ledger.in_use().saturating_sub(in_use);
    report.charge.limit_bytes = ledger.limit();
    report.charge.counter = ledger.counter().into();
    report.charge.steps = ledger.steps() - steps;
    report.charge.page_steps = size / PAGE;

    let mapped = Mapped {
        memory,
        frames,
        range: Span::new(iova, size),
    };
    let result = describe(&mut backend, memory, report)
        .and_then(|()| backend.while_mapped(&mapped, watch, report));

    let mut clock = Clock::new(watch, size);
    backend.space().unmap_all(&mut clock)?;
    report.times.unmap_ns = clock.spent(Step::EmptyTables) + clock.spent(Step::Flush);
    report.times.unpin_ns = clock.taken(Step::Unpin);
    let closed = backend.close(report);
    result?;
    closed?;
    report.charge.after = Counted::now()?;
    Ok(())
}

/// Fills in what can be said of any memory and any back end.
fn describe<S: Backend>(
    backend: &mut S,
    memory: &HostMemory,
    report: &mut MapReport,
) -> Result<(), JobError> {
    report.memory.huge_bytes = memory.mapping().folios()?.huge;
    report.memory.nodes = scenario::nodes(memory.mapping())?;
    let space = backend.space();
    let backend = &mut report.backend;
    backend.granule_bytes = space.granule();
    backend.lacks = space
        .capabilities()
        .missing()
        .map(|lack| Lack {
            name: lack.name().into(),
            cannot: lack.to_string(),
        })
        .collect();
    backend.windows = space
        .windows()
        .iter()
        .map(|window| WindowReport {
            first: window.start,
            last: window.last(),
        })
        .collect();
    Ok(())
}
