//! The job: memory, a world over the back end, each step of a life in it, and the report.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hostmem::{Backing, FrameSource, KeptPool, Mapping, Pinner};
use iommu::NodeId;
use runs::Span;
use scenario::{Copies, Done, Kind, Layout, Life, Manner, PIECE, Setup, Source, TableNode, World};

use super::kernel::{Opening, open};
use super::memory::{Taken, free_pages, take};
use super::moment::bands;
use super::report::{Left, LifeMemory, LifeReport, LifeStep, Moment};
use super::{LifeBackend, LifeError, LifeJob};
use crate::map::JobError;
use crate::map::clock::in_nanoseconds;
use crate::map::kernel::{Used, lowest};
use crate::map::memory::Account;

/// Where the memory is, for devices of the software unit and for the guest: a multiple of every leaf size.
const IOVA: u64 = 1 << 40;
/// Where offsets in memory files begin that stand in for frames.
const STAND_IN: u64 = 1 << 40;

/// What a life begins with. Dropped in this order: the pool of huge pages is put back last.
struct Begun {
    /// Open, they would keep their groups in the container.
    devices: Vec<Arc<Used>>,
    world: World,
    copies: Vec<Copies>,
    stays: Option<&'static str>,
    /// Huge pages that were free before, of the memory's kind.
    free: u64,
    backing: Backing,
    pool: Option<KeptPool>,
}

/// Takes the memory, brings it in, and makes an empty address space.
fn begin(
    job: &LifeJob,
    report: &mut LifeReport,
    on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Begun, LifeError> {
    match &job.backend {
        LifeBackend::Software => over_units(job, report, on),
        LifeBackend::Vfio { devices } => over_kernel(open(true, devices)?, job, report, on),
        LifeBackend::Iommufd { devices } => over_kernel(open(false, devices)?, job, report, on),
    }
}

/// The memories, one behind the other from `iova` on; offsets stand in for frames from `stand_in` on.
fn sources(mappings: &[Arc<Mapping>], iova: u64, stand_in: Option<u64>) -> Vec<Source> {
    let source = |(number, mapping): (u64, &Arc<Mapping>)| {
        let offset = number * mapping.len();
        Source {
            guest: iova + offset,
            mapping: Arc::clone(mapping),
            layout: stand_in.map(|base| Layout::new(base + offset, mapping.len(), 0)),
        }
    };
    (0..).zip(mappings).map(source).collect()
}

fn over_units(
    job: &LifeJob,
    report: &mut LifeReport,
    on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Begun, LifeError> {
    report.backend = "software".into();
    let memory = &mut report.memory;
    let pinner = Pinner::probe(PIECE).map_err(JobError::from)?;
    let account = Account::of_pinner(&pinner)?;
    let ledger = account.ledger()?;
    let (taken, pool) = take(job, account.room(), memory, on)?;
    let source = taken.mappings.first();
    let real = source.is_some_and(|mapping| FrameSource::detect(mapping).is_real());
    let stand_in = (job.stand_in || !real).then_some(STAND_IN);
    let addresses = if stand_in.is_none() {
        "pagemap"
    } else {
        "file-offset"
    };
    memory.addresses = addresses.into();
    memory.iova = IOVA;
    (memory.pin, memory.counter) = (pinner.kind().to_string(), ledger.counter().into());
    // Leaves of 4 KiB, with as many tables set aside again.
    let bytes = (2 * crate::map::table_bytes(memory.size_bytes)).next_power_of_two();
    let nodes = taken.nodes.map(|(node, at)| TableNode {
        node: NodeId(node),
        at,
        bytes,
    });
    let kinds = [0, 1].map(|unit: usize| Kind {
        format: job.formats[unit],
        node: nodes[unit].node,
        coherent: false,
    });
    let setup = Setup {
        memories: sources(&taken.mappings, IOVA, stand_in),
        ..setup(&taken, IOVA, ledger)
    };
    let world = World::over_units(setup, pinner, &kinds, &nodes, kinds.len())?;
    let per_node = world.space.set_placement(ioas::Placement::PerNode);
    per_node.map_err(JobError::from)?;
    Ok(Begun {
        devices: Vec::new(),
        world,
        copies: Vec::new(),
        stays: None,
        free: taken.free,
        backing: taken.backing,
        pool,
    })
}

/// In the memory that was taken, from `iova` on.
fn setup(taken: &Taken, iova: u64, ledger: Arc<ioas::Ledger>) -> Setup {
    Setup {
        range: Span::new(iova, taken.mappings.iter().map(|half| half.len()).sum()),
        memories: sources(&taken.mappings, iova, None),
        ledger,
        manner: Manner::default(),
        huge: taken.backing.huge_size().is_some(),
        far: NodeId(taken.nodes[1].0),
    }
}

fn over_kernel(
    opening: Opening,
    job: &LifeJob,
    report: &mut LifeReport,
    on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Begun, LifeError> {
    report.backend = opening.handed.name.into();
    report.devices = opening.devices.iter().map(|used| used.report()).collect();
    let memory = &mut report.memory;
    let ledger = opening.account.ledger()?;
    let (taken, pool) = take(job, opening.account.room(), memory, on)?;
    let len = memory.size_bytes;
    let no_room = || JobError::Map(ioas::MapError::NoRoom { len });
    let iova = lowest(&opening.space.windows(), len).ok_or_else(no_room)?;
    memory.iova = iova;
    memory.addresses = "kernel".into();
    memory.pin = "the kernel".into();
    memory.counter = ledger.counter().into();
    let copies = opening.copies();
    let setup = setup(&taken, iova, ledger);
    let devices = opening.devices.len();
    Ok(Begun {
        devices: opening.devices,
        world: World::over_kernel(setup, opening.space, opening.handed, devices)?,
        copies,
        stays: opening.stays,
        free: taken.free,
        backing: taken.backing,
        pool,
    })
}

/// Whether the memory is on its nodes.
fn memory(memory: &LifeMemory, took: Duration) -> Done {
    let planned = memory.second_node_planned;
    let there = memory.parts.iter().enumerate().all(|(number, part)| {
        // A kernel that does not tell has no say.
        let at = |at: Option<u32>| at.is_none_or(|at| at == part.node);
        (planned && number > 0) || part.nodes.iter().all(|share| at(share.node))
    });
    let second = memory.parts.get(1).map_or(0, |part| part.node);
    let (nodes, found) = match planned {
        true => (
            "one node here: the second planned",
            format!("node {second} planned"),
        ),
        false => ("each half on its node", "half on each node".into()),
    };
    Done {
        took,
        bytes: memory.size_bytes,
        checked: nodes.into(),
        found,
        right: there,
        ..Done::default()
    }
}

pub(super) fn run(
    job: &LifeJob,
    watch: &mut dyn FnMut(LifeStep) -> ControlFlow<()>,
) -> Result<LifeReport, LifeError> {
    let (started, step) = (Instant::now(), LifeStep::Memory);
    if watch(step).is_break() {
        return Err(LifeError::Interrupted(step));
    }
    let mut report = LifeReport::default();
    let begun = begin(job, &mut report, &mut || watch(step));
    let begun = begun.map_err(|error| match error {
        LifeError::Job(JobError::Interrupted) => LifeError::Interrupted(step),
        error => error,
    })?;
    let took = started.elapsed();
    let Begun {
        pool,
        backing,
        free,
        world,
        devices,
        ..
    } = begun;
    let mut life = Life::new(world, job.successor.clone(), watch);
    (life.copies, life.stays) = (begun.copies, begun.stays);
    let mut drawn = Duration::ZERO;
    for step in LifeStep::ALL {
        let done = match step {
            LifeStep::Memory => memory(&report.memory, took),
            step => life.step(step)?,
        };
        report.dma = life.world.scene.counts();
        report.steps.push(done);
        if job.backend == LifeBackend::Software {
            let before = Instant::now();
            let roots = bands(&life);
            report.moments.push(Moment { after: step, roots });
            drawn += before.elapsed();
        }
    }
    report.roots = std::mem::take(&mut life.roots);
    report.largest_leaf_bytes = life.largest_leaf;
    report.left = Left {
        ledger_bytes: life.world.charged(),
        kernel: life.world.kernel().map_err(JobError::from)?,
        successor_ledger_bytes: life.left.charged,
        successor_kernel: life.left.kernel,
        table_pages: life.left.tables,
        areas: life.world.areas(),
        huge_pages: 0,
    };
    report.times.waited_ns = in_nanoseconds(life.waited);
    report.times.drawn_ns = in_nanoseconds(drawn);
    let before = Instant::now();
    drop((devices, life));
    pool.map_or(Ok(()), KeptPool::restore)
        .map_err(JobError::from)?;
    report.times.freed_ns = in_nanoseconds(before.elapsed());
    report.left.huge_pages = free.saturating_sub(free_pages(backing));
    report.times = report.times.closed(started, &report.steps);
    Ok(report)
}
