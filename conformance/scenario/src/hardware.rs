//! What does not change its owner: units and the memory behind them; and table pages that can run out.

use std::sync::Arc;

use ioas::{Builder, Cause, DomainIds, HostTables, MappedStorage};
use iommu::{
    AttachError, Capabilities, Config, DeviceId, DomainId, FlushError, NodeId, SoftwareUnit, Unit,
    UnitError,
};
use iopt::{Chain, FormatId, Invalidation, NoTables, Reserve, Root, TableMemory};

use hostmem::{Backing, Mapping};

use crate::faults::{Fault, Faults};
use crate::ram::Physical;

/// Where tables lie: they meet no data.
const TABLES_AT: u64 = 1 << 46;

pub(crate) type SoftUnit = SoftwareUnit<Arc<HostTables>, Arc<Physical>>;

/// A kind of unit. Equal ones share a domain if the placement says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The format that it walks, with four levels.
    pub format: FormatId,
    /// The node that it says it belongs to.
    pub node: NodeId,
    /// Whether DMA can be forced to be coherent: x86-64 has no bit for that.
    pub coherent: bool,
}

impl Kind {
    /// What such a unit can do.
    pub(crate) fn capabilities(self) -> Capabilities {
        let mut capabilities = Capabilities::new();
        capabilities.snoop_control = self.coherent;
        capabilities.domain_bits = 16;
        capabilities.dirty_tracking = true;
        match SoftUnit::full_capabilities().format(self.format) {
            None => capabilities,
            Some(mut support) => {
                support.levels &= 1 << 4;
                capabilities.with_format(support)
            }
        }
    }
}

/// Device `number`, behind unit `unit`: the bus tells the unit.
pub const fn device(unit: usize, number: usize) -> DeviceId {
    DeviceId::pci(unit as u8 + 1, number as u8, 0)
}

/// The unit of a device; none when it is no such device.
pub(crate) const fn unit_of(device: DeviceId) -> Option<usize> {
    ((device.0 >> 8) as usize).checked_sub(1)
}

/// A unit that does not answer when it is told so.
pub(crate) struct Rigged {
    unit: SoftUnit,
    faults: Arc<Faults>,
}

impl Rigged {
    fn refused(&self, domain: DomainId) -> Result<(), FlushError> {
        let cause = UnitError::TimedOut {
            awaited: "a flush that is to fail",
            rounds: 1,
        };
        match self.faults.hit(Fault::Flush) {
            true => Err(FlushError::Unit { domain, cause }),
            false => Ok(()),
        }
    }
}

impl Unit for Rigged {
    fn capabilities(&self) -> Capabilities {
        self.unit.capabilities()
    }

    fn node(&self) -> Option<NodeId> {
        self.unit.node()
    }

    fn attach(&self, device: DeviceId, domain: DomainId, root: Root) -> Result<(), AttachError> {
        self.unit.attach(device, domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        self.unit.detach(device)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        self.refused(domain)?;
        self.unit.invalidate(domain, what)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.refused(domain)?;
        self.unit.invalidate_domain(domain)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(iommu::Fault)) -> u64 {
        self.unit.drain_faults(sink)
    }
}

/// Table pages in a memory file, as one owner has them.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    pub(crate) arena: Arc<HostTables>,
    faults: Arc<Faults>,
}

impl Tables {
    pub(crate) fn new(arena: HostTables, faults: &Arc<Faults>) -> Self {
        Self {
            arena: Arc::new(arena),
            faults: Arc::clone(faults),
        }
    }
}

/// Where the tables of a node are to lie.
#[derive(Clone, Copy, Debug)]
pub struct TableNode {
    /// The node.
    pub node: NodeId,
    /// The node that their memory is asked of; anywhere without it.
    pub at: Option<u32>,
    /// Their bytes.
    pub bytes: u64,
}

/// The tables of a node: a memory file, so that they can go to another process.
#[derive(Debug)]
pub(crate) struct NodeTables {
    pub(crate) at: TableNode,
    pub(crate) file: Mapping,
    pub(crate) base: u64,
    pub(crate) tables: Tables,
}

impl NodeTables {
    fn new(number: u64, at: TableNode, faults: &Arc<Faults>) -> Result<Self, Cause> {
        let file = Mapping::new(Backing::Memfd, at.bytes, at.at)?;
        file.populate(&mut |_| std::ops::ControlFlow::Continue(()))?;
        let base = TABLES_AT + number * at.bytes;
        let arena = arena(again(&file)?, base)?.on_node(at.at);
        Ok(Self {
            tables: Tables::new(arena, faults),
            at,
            file,
            base,
        })
    }
}

/// The same memory file once more.
pub(crate) fn again(file: &Mapping) -> Result<Mapping, Cause> {
    let fd = file.fd().ok_or("no memory file")?;
    Ok(Mapping::of_file(fd.try_clone_to_owned()?)?)
}

fn arena(file: Mapping, base: u64) -> Result<HostTables, Cause> {
    Ok(HostTables::new(MappedStorage::over(file), base)?)
}

impl TableMemory for Tables {
    type Cell = <HostTables as TableMemory>::Cell;
    type Link = <HostTables as TableMemory>::Link;
    type Count = <HostTables as TableMemory>::Count;
    const TABLE_BYTES: u64 = HostTables::TABLE_BYTES;

    #[inline]
    fn entries(&self, table: u64, count: usize) -> &[Self::Cell] {
        self.arena.entries(table, count)
    }

    #[inline]
    fn meta(&self, table: u64) -> &iopt::Meta<Self::Link, Self::Count> {
        self.arena.meta(table)
    }

    fn last_address(&self) -> u64 {
        self.arena.last_address()
    }

    fn reserve(&self, count: u64) -> Result<Reserve, NoTables> {
        if count > 0 && self.faults.hit(Fault::Tables) {
            return Err(NoTables {
                needed: count * Self::TABLE_BYTES,
                available: 0,
            });
        }
        self.arena.reserve(count)
    }

    fn allocate(&self, bytes: usize) -> Result<u64, NoTables> {
        if self.faults.hit(Fault::Tables) {
            return Err(NoTables {
                needed: bytes as u64,
                available: 0,
            });
        }
        self.arena.allocate(bytes)
    }

    fn give_back(&self, reserve: Reserve) {
        self.arena.give_back(reserve);
    }

    fn reclaim(&self, chain: Chain) {
        self.arena.reclaim(chain);
    }
}

/// Units of the software IOMMU, the tables that they walk, and the memory behind them.
pub struct Hardware {
    pub(crate) units: Vec<SoftUnit>,
    pub(crate) rigged: Vec<Arc<Rigged>>,
    pub(crate) kinds: Vec<Kind>,
    pub(crate) tables: Vec<NodeTables>,
    pub(crate) ids: Arc<DomainIds>,
    pub(crate) physical: Arc<Physical>,
    /// The roots, when they were last ours: the walker reads them whoever owns them.
    pub(crate) roots: Vec<(DomainId, Root)>,
    /// Table pages in use, as the owner after us told last; while we own them, none.
    pub(crate) told: Option<u64>,
}

impl Hardware {
    /// A unit of each kind, over views of the table files of their own, as hardware has them.
    pub(crate) fn new(
        kinds: &[Kind],
        nodes: &[TableNode],
        memories: Vec<Arc<Mapping>>,
        faults: &Arc<Faults>,
    ) -> Result<Self, Cause> {
        let physical = Arc::new(Physical::new(memories));
        let tables = (0u64..).zip(nodes);
        let tables = tables.map(|(number, at)| NodeTables::new(number, *at, faults));
        let tables = tables.collect::<Result<Vec<_>, _>>()?;
        let views = tables
            .iter()
            .map(|tables| Ok(Arc::new(arena(again(&tables.file)?, tables.base)?)))
            .collect::<Result<Vec<_>, Cause>>()?;
        let unit = |kind: &Kind| {
            let config = Config {
                capabilities: kind.capabilities(),
                node: Some(kind.node),
                ..Config::default()
            };
            let at = tables.iter().position(|tables| tables.at.node == kind.node);
            let view = views.get(at.unwrap_or(0)).ok_or("no memory for tables")?;
            Ok(SoftUnit::with_config(
                Arc::clone(view),
                Arc::clone(&physical),
                config,
            ))
        };
        let units = kinds.iter().map(unit).collect::<Result<Vec<_>, Cause>>()?;
        let rigged = units.iter().map(|unit| {
            let (unit, faults) = (unit.clone(), Arc::clone(faults));
            Arc::new(Rigged { unit, faults })
        });
        Ok(Self {
            rigged: rigged.collect(),
            units,
            kinds: kinds.to_vec(),
            tables,
            ids: DomainIds::new(16),
            physical,
            roots: Vec::new(),
            told: None,
        })
    }

    /// Builds the domains of devices that come: on the node that is asked for, or where all tables are.
    pub(crate) fn builder(&self) -> Builder {
        let formats: Vec<FormatId> = self.kinds.iter().map(|kind| kind.format).collect();
        let all: Vec<_> = self
            .tables
            .iter()
            .map(|tables| (tables.at.node, tables.tables.clone()))
            .collect();
        let memories = move |node: Option<NodeId>| {
            let found = all.iter().find(|(at, _)| Some(*at) == node);
            let found = found.or_else(|| all.first().filter(|_| all.len() == 1));
            let found = found.map(|(_, tables)| tables.clone());
            found.ok_or_else(|| "tables are on the nodes of units only".into())
        };
        Builder::on_nodes(memories, Arc::clone(&self.ids), formats)
    }

    /// The tables, as a unit sees them, among which this root is.
    pub(crate) fn view(&self, root: &Root) -> Option<&Arc<HostTables>> {
        let holds = |view: &&Arc<HostTables>| view.contains(root.address);
        self.units.iter().map(|unit| unit.tables()).find(holds)
    }

    /// Device `number`, and its unit.
    pub(crate) fn device(&self, number: usize) -> (usize, DeviceId) {
        let unit = number % self.units.len().max(1);
        (unit, device(unit, number))
    }

    /// Table pages in use, those set aside among them.
    pub(crate) fn in_use(&self) -> u64 {
        let arenas = self.tables.iter().map(|tables| &tables.tables.arena);
        let ours = || arenas.map(|arena| arena.in_use()).sum();
        self.told.unwrap_or_else(ours)
    }
}
