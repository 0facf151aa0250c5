//! Page tables in a static arena, walked as a unit walks them.

use core::hint::black_box;
use core::sync::atomic::AtomicU64;

use iommu::{
    AmdVi, AttachError, Capabilities, DeviceId, DomainId, FormatSupport, Registers, RiscvIommu,
    Smmu, Unit, Vtd, amdvi, riscv, smmu, vtd,
};
use iopt::format::{AmdV1, Format, VtdSs, X86_64};
use iopt::walk::{Access, Walker};
use iopt::{Arena, AtomicMeta, FormatId, Gather, Prot, Root, Table, TableMemory};
use runs::{PageSizes, Run, Span};

use crate::require;

const PAGES: usize = 16;

/// Tables lie at multiples of their size, here as everywhere.
#[repr(align(4096))]
struct Cells([AtomicU64; PAGES * 512]);

static CELLS: Cells = Cells([const { AtomicU64::new(0) }; PAGES * 512]);
static METAS: [AtomicMeta; PAGES] = [const { AtomicMeta::new() }; PAGES];

/// Memory that is there from the start.
type Statics = (&'static [AtomicU64], &'static [AtomicMeta]);

/// Steps 6 to 9: map, translate by table and by walker, unmap, give back.
pub(crate) fn every_format() -> Result<(), i32> {
    let arena = Arena::new((&CELLS.0[..], &METAS[..]), 1 << 40).map_err(|_| 6)?;
    one_format(&arena, AmdV1::new(4).map_err(|_| 6)?)?;
    one_format(&arena, X86_64::new(4).map_err(|_| 6)?)?;
    one_format(&arena, VtdSs::new(4).map_err(|_| 6)?)
}

fn one_format<F: Format>(arena: &Arena<Statics>, format: F) -> Result<(), i32> {
    let mut table = Table::new(format, arena).map_err(|_| 6)?;
    let iova = black_box(0x4000_0000);
    let memory = [Span::new(0x1_0020_0000, 2 << 20), Span::new(0x7000, 0x2000)];
    table.map(iova, &memory, Prot::RW).map_err(|_| 6)?;
    require(6, table.map(iova, &memory, Prot::RW).is_err())?;

    let address = iova + (2 << 20) + 0x1234;
    require(7, table.translate(address) == Some(0x8234))?;
    let walker = Walker::new(table.root());
    let walked = walker
        .walk(arena, address, Access::Write, &mut ())
        .map_err(|_| 7)?;
    require(7, walked.pa == 0x8234 && walked.prot.contains(Prot::RW))?;

    let mut gather = Gather::new();
    let mut first = None;
    let range = Span::new(iova, (2 << 20) + 0x2000);
    table
        .unmap(range, &mut gather, &mut |run| first = first.or(Some(run)))
        .map_err(|_| 8)?;
    require(
        8,
        first == Some(Run::new(iova, Span::new(0x1_0020_0000, 2 << 20))),
    )?;
    let flushed = gather.flush_with(|_| Ok::<_, i32>(()))?;
    table.reclaim(flushed);
    require(8, table.translate(address).is_none())?;

    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    require(9, arena.in_use() == 0)?;
    Ok(())
}

/// Step 10: a unit names what it cannot walk.
pub(crate) fn what_a_unit_accepts() -> Result<(), i32> {
    let support = FormatSupport {
        format: FormatId::VtdSs,
        levels: 1 << 4,
        page_sizes: PageSizes::from_bits(1 << 12),
    };
    let unit = Capabilities::new().with_format(support);
    let root = Root {
        format: FormatId::VtdSs,
        address: 0x1000,
        levels: black_box(4),
    };
    require(10, unit.check(&root).is_ok())?;
    let refused = unit.check(&Root { levels: 3, ..root });
    require(
        10,
        matches!(refused, Err(AttachError::Levels { levels: 3, .. })),
    )?;
    require(10, DeviceId::pci(0, 5, 0) == DeviceId(0x28))
}

/// Registers that nobody drives.
struct NoUnit;

impl Registers for NoUnit {
    type Lock = iommu::SpinLock;

    fn read32(&self, _offset: usize) -> u32 {
        black_box(u32::MAX)
    }
    fn write32(&self, _offset: usize, _value: u32) {}
    fn read64(&self, _offset: usize) -> u64 {
        black_box(u64::MAX)
    }
    fn write64(&self, _offset: usize, _value: u64) {}
    fn wait(&self, _round: u32) -> bool {
        false
    }
}

/// Step 11: drivers over static memory find no unit. All of them is linked.
pub(crate) fn drivers() -> Result<(), i32> {
    let arena: Arena<_> = Arena::new((&CELLS.0[..], &METAS[..]), 1 << 40).map_err(|_| 11)?;
    let root = |format| Root {
        format,
        address: 0x1000,
        levels: 4,
    };
    match Vtd::new(NoUnit, &arena, vtd::Config::default()) {
        Ok(unit) => is_used(&unit, root(FormatId::VtdSs))?,
        Err(refused) => require(11, matches!(refused, vtd::ProbeError::NoUnit { .. }))?,
    }
    let config = amdvi::Config {
        last_device: 0x7f,
        ..amdvi::Config::default()
    };
    match AmdVi::new(NoUnit, &arena, config) {
        Ok(unit) => is_used(&unit, root(FormatId::AmdV1))?,
        Err(refused) => require(11, matches!(refused, amdvi::ProbeError::NoUnit { .. }))?,
    }
    match RiscvIommu::new(NoUnit, &arena, riscv::Config::default()) {
        Ok(unit) => is_used(&unit, root(FormatId::RiscV))?,
        Err(refused) => require(11, matches!(refused, riscv::ProbeError::NoUnit { .. }))?,
    }
    match Smmu::new(NoUnit, smmu::Config::default()) {
        Ok(unit) => is_used(&unit, root(FormatId::ArmV7s)),
        Err(refused) => require(11, matches!(refused, smmu::ProbeError::NoUnit { .. })),
    }
}

fn is_used(unit: &dyn Unit, root: Root) -> Result<(), i32> {
    let attached = unit.attach(DeviceId(0), DomainId(1), root);
    let flushed = unit.invalidate_domain(DomainId(1));
    require(11, attached.is_ok() && flushed.is_ok())
}
