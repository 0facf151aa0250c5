//! A unit with memory for its page tables: [`Iommu`].

use alloc::sync::Arc;
use core::fmt;

use iommu::{DeviceId, Unit};
use iopt::format::ArmConfig;
use iopt::{ErasableMemory, FormatId};

use super::{DomainIds, TableBuilder};
use crate::space::Ioas;
use crate::space::endpoint::Endpoint;
use crate::space::open::{IoasOptions, OpenError, OpenSpace};

/// An IOMMU that is driven by this program: its unit, memory for page tables, and the numbers of its domains. Clones
/// are the same IOMMU.
///
/// [`Ioas::over`] opens address spaces over it. Each has domains of its own, whose numbers are free again when its last
/// device is detached. Any [`Unit`] will do: a driver of hardware that translates
/// ([`Driver`](iommu::Driver)), or as here the software unit.
///
/// ```
/// use std::sync::Arc;
///
/// use ioas::{FixedRuns, Ioas, Iommu, Ledger, Memory};
/// use iommu::{DeviceId, RunMap, SoftwareUnit};
/// use iopt::{HeapTables, Prot};
/// use runs::Span;
/// # use std::sync::atomic::AtomicU64;
///
/// // Two pages of memory that are not next to each other; the second begins with a 7.
/// let page = |first| (0..512).map(|at| AtomicU64::new(if at == 0 { first } else { 0 })).collect::<Vec<_>>();
/// let data = RunMap::new([(0x4000_0000, page(0)), (0x8000_1000, page(7))])?;
/// let runs = FixedRuns::new([Span::new(0x4000_0000, 4096), Span::new(0x8000_1000, 4096)], 4096)?;
/// let memory = Memory::new(Arc::new(runs), &Ledger::unlimited());
///
/// let tables = Arc::new(HeapTables::with_tables(16)?);
/// let unit = Arc::new(SoftwareUnit::new(tables.clone(), data));
/// let iommu = Iommu::new(unit, tables);
///
/// let space = Ioas::over(&iommu)?;
/// let device = DeviceId::pci(0, 5, 0);
/// space.attach(iommu.device(device))?;
/// space.map(0x10_0000, &memory, Span::new(0, 0x2000), Prot::RW)?;
///
/// // The device reads the second page behind the first.
/// let mut word = [0];
/// iommu.unit().port(device).read(0x10_1000, &mut word)?;
/// assert_eq!(word, [7]);
/// space.close()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct Iommu<U> {
    unit: Arc<U>,
    builder: TableBuilder,
}

impl<U> Clone for Iommu<U> {
    fn clone(&self) -> Self {
        Self {
            unit: Arc::clone(&self.unit),
            builder: self.builder.clone(),
        }
    }
}

impl<U> fmt::Debug for Iommu<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iommu")
            .field("builder", &self.builder)
            .finish_non_exhaustive()
    }
}

impl<U: Unit + 'static> Iommu<U> {
    /// `unit`, with tables in `memory`, which the unit can read: in the first format that its
    /// [capabilities](iommu::UnitCapabilities::formats) list, of Arm's stage 1 the lower half, with domains numbered from
    /// 1 on.
    ///
    /// If the unit reads past the processor's caches ([`coherent_walks`](iommu::UnitCapabilities::coherent_walks) is
    /// false), `memory` writes stores back, as [`NonCoherent`](iopt::observe::NonCoherent) does.
    pub fn new<M: ErasableMemory + Clone>(unit: Arc<U>, memory: M) -> Self {
        let can = unit.capabilities();
        let formats = can.formats.iter().flatten();
        let formats = formats.map(|support| match support.format {
            // Listed is the upper half where the unit walks both; an address space begins at 0.
            FormatId::ArmStage1(arm) => FormatId::ArmStage1(ArmConfig {
                upper: false,
                ..arm
            }),
            format => format,
        });
        let builder = TableBuilder::new(memory, DomainIds::new(can.domain_bits), formats);
        Self::with_builder(unit, builder)
    }

    /// `unit`, with tables by `builder`: for [memory by node](TableBuilder::on_nodes), other formats, or several units
    /// whose devices share address spaces and which therefore share [`DomainIds`], of the fewest bits that one of them has.
    pub const fn with_builder(unit: Arc<U>, builder: TableBuilder) -> Self {
        Self { unit, builder }
    }

    /// A device behind the unit, to be [attached](Ioas::attach).
    pub fn device(&self, device: DeviceId) -> Endpoint {
        Endpoint::from((Arc::clone(&self.unit), device))
    }

    /// The unit: its capabilities, its faults.
    pub const fn unit(&self) -> &Arc<U> {
        &self.unit
    }
}

impl<U> OpenSpace for Iommu<U> {
    /// An address space without a domain, which the first device brings.
    fn open_space(&self, options: IoasOptions) -> Result<Ioas, OpenError> {
        options.over_tables(self.builder.clone())
    }
}
