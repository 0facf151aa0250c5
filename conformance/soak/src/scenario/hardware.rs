//! Units of the software IOMMU, the memory behind them, and table pages that can run out.

use std::sync::Arc;

use ioas::{Cause, DomainIds, HostTables, MappedStorage, TableBuilder};
use iommu::{
    DeviceId, DomainId, FlushError, NodeId, SoftwareConfig, SoftwareUnit, Unit, UnitAttachError,
    UnitCapabilities, UnitError,
};
use iopt::{Chain, FormatId, Invalidation, NoTables, Reserve, Root, TableMemory};

use hostmem::{Backing, Mapping};

use super::faults::{Fault, Faults};
use super::ram::Physical;

/// Where tables lie: they meet no data.
const TABLES_AT: u64 = 1 << 46;

pub(crate) type SoftUnit = SoftwareUnit<Arc<HostTables>, Arc<Physical>>;

/// A kind of unit. Equal ones share a domain if the placement says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// The format that it walks, with four levels.
    pub(crate) format: FormatId,
    /// The node that it says it belongs to.
    pub(crate) node: NodeId,
    /// True if DMA can be forced to be coherent: x86-64 has no bit for that.
    pub(crate) coherent: bool,
}

impl Kind {
    /// Capabilities of such a unit.
    pub(crate) fn capabilities(self) -> UnitCapabilities {
        let mut capabilities = UnitCapabilities::new();
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
const fn device(unit: usize, number: usize) -> DeviceId {
    DeviceId::pci(unit as u8 + 1, number as u8, 0)
}

/// A unit whose flushes fail on demand.
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
    fn capabilities(&self) -> UnitCapabilities {
        self.unit.capabilities()
    }

    fn node(&self) -> Option<NodeId> {
        self.unit.node()
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        self.unit.attach(device, domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitAttachError> {
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

/// Table pages.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    pub(crate) arena: Arc<HostTables>,
    faults: Arc<Faults>,
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
pub(crate) struct Hardware {
    pub(crate) units: Vec<SoftUnit>,
    pub(crate) rigged: Vec<Arc<Rigged>>,
    kinds: Vec<Kind>,
    pub(crate) tables: Tables,
    pub(crate) physical: Arc<Physical>,
}

impl Hardware {
    /// A unit of each kind, and so many bytes of tables, in which all of them walk.
    pub(crate) fn new(
        kinds: &[Kind],
        tables: u64,
        memories: Vec<Arc<Mapping>>,
        faults: &Arc<Faults>,
    ) -> Result<Self, Cause> {
        let physical = Arc::new(Physical::new(memories));
        let file = Mapping::new(Backing::Memfd, tables, None)?;
        let arena = HostTables::new(MappedStorage::over(file), TABLES_AT)?;
        let tables = Tables {
            arena: Arc::new(arena),
            faults: Arc::clone(faults),
        };
        let unit = |kind: &Kind| {
            let config = SoftwareConfig {
                capabilities: kind.capabilities(),
                node: Some(kind.node),
                ..SoftwareConfig::default()
            };
            let arena = Arc::clone(&tables.arena);
            SoftUnit::with_config(arena, Arc::clone(&physical), config)
        };
        let units: Vec<_> = kinds.iter().map(unit).collect();
        let rigged = units.iter().map(|unit| {
            let (unit, faults) = (unit.clone(), Arc::clone(faults));
            Arc::new(Rigged { unit, faults })
        });
        Ok(Self {
            rigged: rigged.collect(),
            units,
            kinds: kinds.to_vec(),
            tables,
            physical,
        })
    }

    /// Builds the domains of devices that come, on whatever node is asked for.
    pub(crate) fn builder(&self) -> TableBuilder {
        let formats: Vec<FormatId> = self.kinds.iter().map(|kind| kind.format).collect();
        let tables = self.tables.clone();
        TableBuilder::on_nodes(move |_| Ok(tables.clone()), DomainIds::new(16), formats)
    }

    /// Device `number`, and its unit.
    pub(crate) fn device(&self, number: usize) -> (usize, DeviceId) {
        let unit = number % self.units.len().max(1);
        (unit, device(unit, number))
    }

    /// Table pages in use, those set aside among them.
    pub(crate) fn in_use(&self) -> u64 {
        self.tables.arena.in_use()
    }
}
