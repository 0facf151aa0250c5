//! What a life begins with: memory on two nodes, units, and tables on each node.

use std::sync::Arc;

use hostmem::{Backing, FrameSource, Mapping, Pinner};
use ioas::{
    Builder, DomainIds, HostMemory, HostTables, Ioas, Ledger, MappedStorage, Memory, Placement,
};
use iommu::{Config, NodeId, SoftwareUnit};
use runs::Span;

use super::balloon::Part;
use super::devices::SoftUnit;
use super::frames::{Physical, Witness, Witnessed};
use super::job::{DEVICES, IOVA, PIECE, capabilities};
use super::memory::take;
use super::report::LifeMemory;
use super::{LifeError, LifeJob};
use crate::map::memory::{Account, counted};
use crate::map::{Counted, JobError};
use hostmem::KeptPool;

/// Where offsets in memory files begin that stand in for frames.
const STAND_IN: u64 = 1 << 40;
/// Where the addresses of tables begin: they meet none of the data.
const TABLES: u64 = 1 << 46;

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
    pub(super) space: Arc<Ioas>,
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
    pub(super) pool: Option<KeptPool>,
    /// Huge pages that were free before, of the memory's kind.
    pub(super) free: u64,
    pub(super) backing: Backing,
}

impl Begun {
    /// Gives everything back but the pool, which comes last.
    pub(super) fn into_pool(self) -> Option<KeptPool> {
        self.pool
    }
}

/// Takes the memory, brings it in, and makes units and an empty address space.
pub(super) fn begin(
    job: &LifeJob,
    report: &mut LifeMemory,
    on: &mut dyn FnMut() -> std::ops::ControlFlow<()>,
) -> Result<Begun, LifeError> {
    let pinner = Pinner::probe(PIECE).map_err(JobError::from)?;
    let account = Account::of_pinner(&pinner)?;
    let room = pinner.room().map_err(JobError::from)?;
    let (ledger, counted) = (account.ledger()?, counted()?);
    let (taken, pool) = take(job, room, report, on)?;
    let charged = ledger.in_use();
    let (pin, counter) = (pinner.kind().to_string(), ledger.counter());
    let pinner = Arc::new(pinner);
    let (size, half) = (report.size_bytes, report.size_bytes / 2);
    let mappings = taken.mappings;
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
        let host = HostMemory::with_pinner(Arc::clone(&mapping), Arc::clone(&pinner), source);
        let witness = Arc::clone(&physical) as Arc<dyn Witness>;
        let object = Witnessed::new(host, number, base, witness);
        bases.push(base);
        parts.push(Part {
            guest: Span::new(IOVA + offset, half),
            memory: Memory::new(Arc::new(object), &ledger),
            mapping,
        });
    }
    let tables = (0u64..)
        .zip(taken.nodes)
        .map(|(number, (node, at))| tables(number, NodeId(node), at, size))
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
    let space = Ioas::with_builder(builder);
    space
        .set_placement(Placement::PerNode)
        .map_err(JobError::from)?;

    report.addresses = addresses.into();
    report.iova = IOVA;
    (report.pin, report.counter) = (pin, counter.into());
    Ok(Begun {
        space: Arc::new(space),
        units,
        parts,
        tables,
        physical,
        ledger,
        charged,
        counted,
        bases,
        pool,
        free: taken.free,
        backing: taken.backing,
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
