//! What does not change its owner: units and the memory behind them; and table pages that can run out.

use std::sync::Arc;

use ioas::{Cause, HostTables, MappedStorage};
use iommu::{
    AttachError, Capabilities, Config, DeviceId, DomainId, FlushError, NodeId, SoftwareUnit, Unit,
    UnitError,
};
use iopt::{Chain, FormatId, Invalidation, NoTables, Reserve, Root, TableMemory};

use hostmem::{Backing, Mapping};

use crate::faults::{Fault, Faults};
use crate::object::Physical;

pub(crate) type SoftUnit = SoftwareUnit<Arc<HostTables>, Arc<Physical>>;

/// What kinds of units there are: the format, the node that each says it belongs to, and whether DMA can be
/// forced to be coherent (x86-64 has no bit for that). Equal ones share a domain if the placement says so.
pub(crate) const UNITS: [(FormatId, u32, bool); 5] = [
    (FormatId::VtdSs, 0, true),
    (FormatId::AmdV1, 0, true),
    (FormatId::X86_64, 1, false),
    (FormatId::AmdV1, 1, true),
    (FormatId::VtdSs, 1, false),
];
/// Devices; each has the unit of its number, over and over.
pub(crate) const DEVICES: usize = 7;
/// Table pages.
const TABLES: u64 = 2048;
/// Where they lie: they meet no data.
const TABLES_AT: u64 = 1 << 46;

pub(crate) const fn device(number: usize) -> DeviceId {
    DeviceId::pci(1, number as u8, 0)
}

/// What unit `number` can do.
pub(crate) fn capabilities(number: usize) -> Capabilities {
    let (format, _, coherent) = UNITS[number];
    let mut capabilities = Capabilities::new();
    capabilities.snoop_control = coherent;
    capabilities.domain_bits = 16;
    capabilities.dirty_tracking = true;
    match SoftUnit::full_capabilities().format(format) {
        None => capabilities,
        Some(mut support) => {
            support.levels &= 1 << 4;
            capabilities.with_format(support)
        }
    }
}

/// A unit that does not answer when it is told so.
pub(crate) struct Rigged {
    pub(crate) unit: SoftUnit,
    pub(crate) faults: Arc<Faults>,
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

/// A memory file for tables.
pub(crate) fn table_file() -> Result<Mapping, Cause> {
    let file = Mapping::new(Backing::Memfd, TABLES * 4096, None)?;
    file.populate(&mut |_| std::ops::ControlFlow::Continue(()))?;
    Ok(file)
}

/// The same memory file once more.
pub(crate) fn again(file: &Mapping) -> Result<Mapping, Cause> {
    let fd = file.fd().ok_or("no memory file")?;
    Ok(Mapping::of_file(fd.try_clone_to_owned()?)?)
}

/// An arena over a table file.
pub(crate) fn arena(file: Mapping) -> Result<HostTables, Cause> {
    Ok(HostTables::new(MappedStorage::over(file), TABLES_AT)?)
}

/// The tables in `file`, for who takes them over.
pub(crate) fn takeover(file: Mapping) -> Result<iopt::Takeover<MappedStorage, 12>, Cause> {
    Ok(iopt::Takeover::new(MappedStorage::over(file), TABLES_AT)?)
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

/// A unit of each kind, over a view of the table file of its own, as hardware has one.
pub(crate) fn units(file: &Mapping, physical: &Arc<Physical>) -> Result<Vec<SoftUnit>, Cause> {
    let view = Arc::new(arena(again(file)?)?);
    let unit = |number: usize| {
        let config = Config {
            capabilities: capabilities(number),
            node: Some(NodeId(UNITS[number].1)),
            ..Config::default()
        };
        SoftUnit::with_config(Arc::clone(&view), Arc::clone(physical), config)
    };
    Ok((0..UNITS.len()).map(unit).collect())
}
