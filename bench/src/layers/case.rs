//! The operations of one subject.

use std::{hint::black_box, sync::Arc};

use anyhow::Context as _;
use guest::unit::{Kind, prompt};
use ioas::{
    BuildDomain as _, DomainIds, FixedRuns, Ioas, Ledger, Memory, SoftwareIommu, TableBuilder,
};
use iommu::{DeviceId, Unit};
use iopt::{AnyTable, FormatId, Gather, HeapTables, Prot, format::ArmConfig, format::ArmGranule};
use runs::{Iova, Pa, Span};

use super::{PAGE, SIZES, Size, Subject};

/// How often each operation is measured.
pub(super) const TIMES: u64 = 64;
/// How often it is done before.
const WARM: u64 = 64;
/// Areas of a page that stay, every other page from here on.
const STAY: u64 = 16;
const BASE: u64 = 4 << 30;
/// Pages for tables and a unit's structures.
const TABLES: u64 = 1024;
const DEVICE: DeviceId = DeviceId::pci(0, 1, 0);

/// A table or an address space.
enum Work {
    Table(AnyTable),
    Space(Box<Ioas>),
}

/// Memory and its place.
struct Buffer {
    range: Span<Iova>,
    runs: Vec<Span<Pa>>,
    memory: Arc<Memory>,
}

impl Buffer {
    fn new(at: u64, runs: Vec<Span<Pa>>) -> anyhow::Result<Self> {
        let fixed = FixedRuns::new(runs.iter().copied(), PAGE)?;
        let memory = Memory::new(Arc::new(fixed), &Ledger::unlimited());
        Ok(Self {
            range: Span::new(at, memory.len()),
            runs,
            memory,
        })
    }
}

/// The format that the driver of a unit takes here.
const fn format(kind: Kind) -> FormatId {
    match kind {
        Kind::Vtd => FormatId::VtdSs,
        Kind::AmdVi => FormatId::AmdV1,
        Kind::SmmuV3 | Kind::Smmu => FormatId::ArmStage1(ArmConfig {
            granule: ArmGranule::K4,
            input_bits: 48,
            upper: false,
        }),
        Kind::Riscv => FormatId::RiscV,
    }
}

impl Work {
    fn new(subject: Subject) -> anyhow::Result<Self> {
        let over = |kind| -> anyhow::Result<(Arc<dyn Unit>, TableBuilder)> {
            let tables = Arc::new(HeapTables::with_tables(TABLES)?);
            let unit = prompt(kind, &tables)?;
            let builder = TableBuilder::new(tables, DomainIds::new(8), [format(kind)]);
            Ok((unit, builder))
        };
        Ok(match subject {
            Subject::Table(kind) => {
                let (unit, mut builder) = over(kind)?;
                let built = builder.build(&*unit, false, None);
                let (_, table) = built.map_err(|cause| anyhow::anyhow!("{cause}"))?;
                Self::Table(table)
            }
            Subject::Software => {
                let iommu = SoftwareIommu::new()?;
                let space = Ioas::over(&iommu)?;
                space.attach(iommu.device(DEVICE))?;
                Self::Space(Box::new(space))
            }
            Subject::Driver(kind) => {
                let (unit, builder) = over(kind)?;
                let space = Ioas::over_tables(builder);
                space.attach((unit, DEVICE))?;
                Self::Space(Box::new(space))
            }
        })
    }

    fn map(&self, buffer: &Buffer) -> anyhow::Result<()> {
        let Buffer {
            range,
            runs,
            memory,
        } = buffer;
        match self {
            Self::Table(table) => table.map(range.start, runs, Prot::RW)?,
            Self::Space(space) => {
                space.map(range.start, memory, Span::new(0, range.len), Prot::RW)?;
            }
        }
        Ok(())
    }

    fn unmap(&self, buffer: &Buffer) -> anyhow::Result<()> {
        match self {
            Self::Table(table) => {
                let mut gather = Gather::new();
                table.alone().clear(buffer.range, &mut gather)?;
                let flushed = gather.flush_with(|_| Ok::<_, iommu::FlushError>(()))?;
                table.reclaim(flushed);
            }
            Self::Space(space) => {
                space.unmap(buffer.range)?;
            }
        }
        Ok(())
    }
}

/// The only part of the program in which instructions are counted, with the next one.
#[inline(never)]
fn measured_map(work: &Work, buffer: &Buffer) -> anyhow::Result<()> {
    work.map(black_box(buffer))
}

#[inline(never)]
fn measured_unmap(work: &Work, buffer: &Buffer) -> anyhow::Result<()> {
    work.unmap(black_box(buffer))
}

/// Where callgrind writes down what it has counted, and begins anew.
#[inline(never)]
fn dump_counts(size: &Size) {
    black_box(size);
}

/// Does each operation of a subject, for callgrind.
///
/// # Errors
///
/// When one fails.
pub fn run(subject: Subject) -> anyhow::Result<()> {
    let work = Work::new(subject).context("the unit")?;
    for n in 0..STAY {
        let run = Span::new((1 << 40) + 2 * n * PAGE, PAGE);
        work.map(&Buffer::new(BASE + 2 * n * PAGE, vec![run])?)?;
    }
    for size in &SIZES {
        let buffer = Buffer::new(BASE + size.at, size.memory())?;
        assert_eq!(buffer.range.len, size.len(), "runs were joined");
        for _ in 0..WARM {
            work.map(&buffer)?;
            work.unmap(&buffer)?;
        }
        for _ in 0..TIMES {
            measured_map(&work, &buffer).context(size.name)?;
            work.unmap(&buffer).context(size.name)?;
        }
        dump_counts(size);
        for _ in 0..TIMES {
            work.map(&buffer).context(size.name)?;
            measured_unmap(&work, &buffer).context(size.name)?;
        }
        dump_counts(size);
    }
    Ok(())
}
