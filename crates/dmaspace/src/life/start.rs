//! What a life begins with: memory on two nodes, units, and tables on each node.

use std::sync::{Arc, Mutex};

use hostmem::{Backing, FrameSource, Machine, Mapping, Pinner, RaisedPool};
use ioas::{
    Builder, DomainIds, HostMemory, HostTables, Ioas, Ledger, MappedStorage, Memory, Own, Placement,
};
use iommu::{Config, NodeId, SoftwareUnit};
use runs::{Bytes, Span};

use super::balloon::Part;
use super::devices::SoftUnit;
use super::frames::{Physical, Witness, Witnessed};
use super::job::{DEVICES, IOVA, PIECE, capabilities};
use super::report::{LifeMemory, PartReport};
use super::{LifeError, LifeJob};
use crate::map::memory::{Account, counted, nodes};
use crate::map::{Counted, JobError};

/// The equal parts of which the memory consists: 8 on each node.
const PARTS: u64 = 16;
/// Memory without a word about its size.
const DEFAULT_SIZE: u64 = 256 << 20;
/// What is left of the limit on locked memory: rings of io_uring are charged to it too.
const SPARE: u64 = 256 << 10;
/// Where offsets in memory files begin that stand in for frames.
const STAND_IN: u64 = 1 << 40;
/// Where the addresses of tables begin: they meet none of the data.
const TABLES: u64 = 1 << 46;

pub(super) type Space = Ioas<Own<Arc<HostTables>>>;

/// The tables of a node.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) file: Mapping,
    pub(super) arena: Arc<HostTables>,
    pub(super) base: u64,
    pub(super) node: NodeId,
}

/// The memory of the life, and what it takes to map it. Dropped in this order.
pub(super) struct Begun {
    pub(super) space: Arc<Mutex<Space>>,
    pub(super) units: Vec<(SoftUnit, iommu::DeviceId)>,
    pub(super) parts: Vec<Part>,
    pub(super) tables: Vec<Tables>,
    pub(super) physical: Arc<Physical>,
    pub(super) ledger: Arc<Ledger>,
    /// What the ledger and the kernel counted before.
    pub(super) charged: u64,
    pub(super) counted: Counted,
    /// Where addresses that stand in for frames begin, by part.
    pub(super) bases: Vec<Option<u64>>,
    /// Put back when everything else is gone.
    pub(super) pool: Option<RaisedPool>,
    /// Huge pages that were free before, of the memory's kind.
    pub(super) free: u64,
    pub(super) backing: Backing,
}

impl Begun {
    /// Gives everything back but the pool, which comes last.
    pub(super) fn into_pool(self) -> Option<RaisedPool> {
        self.pool
    }
}

/// Free huge pages of this kind that nobody has reserved.
pub(super) fn free_pages(backing: Backing) -> u64 {
    let pool = backing.huge_size().and_then(hostmem::Pool::read);
    pool.map_or(0, |pool| pool.unreserved())
}

/// The backing that was asked for, or that with the largest pages that are free.
fn choose_backing(job: &LifeJob, size: u64, machine: &Machine) -> Result<Backing, LifeError> {
    let Some(backing) = job.backing else {
        let huge = [Backing::Hugetlb1G, Backing::Hugetlb2M];
        let fits = |backing: &Backing| {
            let pool = backing.huge_size().and_then(|size| machine.pool(size));
            let free = pool.map_or(0, |pool| pool.unreserved());
            size.is_multiple_of(PARTS * backing.page()) && free >= size / backing.page()
        };
        return Ok(huge.into_iter().find(fits).unwrap_or(Backing::Memfd));
    };
    match backing {
        Backing::Anon4K | Backing::Thp => Err(LifeError::Input(format!(
            "{backing} memory cannot go to a second process: memfd, hugetlb-2m and hugetlb-1g can"
        ))),
        backing => Ok(backing),
    }
}

/// The size, and why it is that when nobody asked for one.
fn choose_size(job: &LifeJob, pinner: &Pinner) -> Result<(u64, Option<String>), LifeError> {
    // Both owners have it pinned for a while.
    let room = pinner.room().map_err(JobError::from)?;
    let most = room.map(|room| room.saturating_sub(SPARE) / 2);
    let page = job.backing.map_or(4096, Backing::page);
    let unit = PARTS * page;
    let Some(size) = job.size else {
        let most = most.unwrap_or(u64::MAX).min(DEFAULT_SIZE.max(unit));
        // Not an odd size: a power of two.
        let size = most.checked_ilog2().map_or(0, |log2| 1 << log2);
        if size < unit {
            return Err(LifeError::Input(format!(
                "the limit on locked memory leaves {} for two owners, and {} are needed",
                Bytes(most),
                Bytes(unit)
            )));
        }
        let reason = match size == DEFAULT_SIZE {
            true => "the default",
            false => "what the limit on locked memory, or the page, allows",
        };
        return Ok((size, Some(reason.into())));
    };
    if size == 0 || !size.is_multiple_of(unit) {
        return Err(LifeError::Input(format!(
            "a size of {size} bytes is not 16 equal parts of whole pages, multiples of {}, or is 0",
            Bytes(unit)
        )));
    }
    if let Some(most) = most.filter(|most| size > *most) {
        return Err(LifeError::Input(format!(
            "{} are more than the limit on locked memory leaves for two owners: {}",
            Bytes(size),
            Bytes(most)
        )));
    }
    Ok((size, None))
}

/// Takes the memory, brings it in, and makes units and an empty address space.
pub(super) fn begin(
    job: &LifeJob,
    report: &mut LifeMemory,
    on: &mut dyn FnMut() -> std::ops::ControlFlow<()>,
) -> Result<Begun, LifeError> {
    let machine = Machine::probe().map_err(JobError::from)?;
    let pinner = Pinner::probe(PIECE).map_err(JobError::from)?;
    let account = Account::of_pinner(&pinner)?;
    let (size, reason) = choose_size(job, &pinner)?;
    let backing = choose_backing(job, size, &machine)?;
    let free = free_pages(backing);
    let pool = match (job.backing, backing.huge_size()) {
        (Some(_), Some(page)) => Some(RaisedPool::raise(page, size).map_err(JobError::from)?),
        _ => None,
    };
    let planned = machine.nodes.len() < 2;
    let first = machine.nodes.first().copied().unwrap_or(0);
    let second = machine.nodes.get(1).copied().unwrap_or(first + 1);
    let half = size / 2;

    let (ledger, counted) = (account.ledger()?, counted()?);
    let charged = ledger.in_use();
    let (pin, counter) = (pinner.kind().to_string(), ledger.counter());
    let pinner = Arc::new(pinner);
    let mut mappings = Vec::new();
    for node in [first, second] {
        // A planned node has no memory: it lies on the first.
        let at = machine.nodes.contains(&node).then_some(node);
        let mapping = Mapping::new(backing, half, at).map_err(JobError::Mapping)?;
        mapping.populate(&mut |_| on()).map_err(JobError::from)?;
        report.parts.push(PartReport {
            node,
            size_bytes: half,
            nodes: nodes(&mapping)?,
        });
        mappings.push(Arc::new(mapping));
    }
    let source = mappings.first().map(|mapping| FrameSource::detect(mapping));
    let real = !job.stand_in && source.is_some_and(FrameSource::is_real);
    let (source, addresses) = match real {
        true => (FrameSource::Pagemap, "pagemap"),
        false => (FrameSource::FileOffset, "file-offset"),
    };
    let physical = Arc::new(Physical::new(mappings.clone()));
    let mut parts = Vec::new();
    let mut bases = Vec::new();
    for (number, mapping) in mappings.into_iter().enumerate() {
        let offset = number as u64 * half;
        let base = (!real).then_some(STAND_IN + offset);
        let host = HostMemory::new(Arc::clone(&mapping), Arc::clone(&pinner), source);
        let witness = Arc::clone(&physical) as Arc<dyn Witness>;
        let object = Witnessed::new(host, number, base, witness);
        bases.push(base);
        parts.push(Part {
            guest: Span::new(IOVA + offset, half),
            memory: Memory::new(Arc::new(object), &ledger),
            mapping,
        });
    }
    let tables = [first, second]
        .into_iter()
        .enumerate()
        .map(|(number, node)| {
            let at = machine.nodes.contains(&node).then_some(node);
            tables(number as u64, NodeId(node), at, size)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let units = units(job, &tables, &physical);
    let arenas: Vec<_> = tables
        .iter()
        .map(|tables| (tables.node, Arc::clone(&tables.arena)))
        .collect();
    let memories = move |node: Option<NodeId>| {
        let found = arenas.iter().find(|(at, _)| Some(*at) == node);
        let found = found.map(|(_, arena)| Arc::clone(arena));
        found.ok_or_else(|| "tables are on the nodes of units only".into())
    };
    let builder = Builder::on_nodes(memories, DomainIds::new(16), job.formats);
    let mut space = Ioas::with_builder(builder);
    space.set_placement(Placement::PerNode);

    *report = LifeMemory {
        size_bytes: size,
        size_reason: reason,
        backing: backing.name().into(),
        addresses: addresses.into(),
        iova: IOVA,
        parts: std::mem::take(&mut report.parts),
        second_node_planned: planned,
        pin,
        counter: counter.into(),
    };
    Ok(Begun {
        space: Arc::new(Mutex::new(space)),
        units,
        parts,
        tables,
        physical,
        ledger,
        charged,
        counted,
        bases,
        pool,
        free,
        backing,
    })
}

/// Table memory for `size` bytes in leaves of 4 KiB, with as many tables set aside again: a memory file, so
/// that it can go to another process.
fn tables(number: u64, node: NodeId, at: Option<u32>, size: u64) -> Result<Tables, LifeError> {
    let bytes = (2 * crate::map::table_bytes(size)).next_power_of_two();
    let file = Mapping::new(Backing::Memfd, bytes, at).map_err(JobError::Mapping)?;
    file.populate(&mut |_| std::ops::ControlFlow::Continue(()))
        .map_err(JobError::from)?;
    let base = TABLES + number * bytes;
    let also = also(&file)?;
    let arena = HostTables::new(MappedStorage::over(also), base).map_err(JobError::from)?;
    Ok(Tables {
        file,
        arena: Arc::new(arena.on_node(at)),
        base,
        node,
    })
}

/// The same memory file, mapped once more.
fn also(mapping: &Mapping) -> Result<Mapping, LifeError> {
    let fd = mapping.fd().map(|fd| fd.try_clone_to_owned());
    let fd = fd.unwrap_or_else(|| Err(std::io::ErrorKind::NotFound.into()));
    let fd = fd.map_err(|cause| JobError::TableMemory(cause.into()))?;
    Ok(Mapping::of_file(fd).map_err(JobError::Mapping)?)
}

fn units(
    job: &LifeJob,
    tables: &[Tables],
    physical: &Arc<Physical>,
) -> Vec<(SoftUnit, iommu::DeviceId)> {
    let all = tables.iter().zip(job.formats).zip(DEVICES);
    let unit = |((tables, format), device): ((&Tables, _), _)| {
        let config = Config {
            capabilities: capabilities(format),
            node: Some(tables.node),
            ..Config::default()
        };
        let (tables, data) = (Arc::clone(&tables.arena), Arc::clone(physical));
        (SoftwareUnit::with_config(tables, data, config), device)
    };
    all.map(unit).collect()
}
