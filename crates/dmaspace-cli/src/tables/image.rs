//! Images of tables to try the other commands on: of runs that are given, and of the pages of a process.

use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};

use hostmem::{ProcessPages, read_at_most};
use iopt::geometry::Geometry;
use iopt::{AnyTable, ArenaError, BuildError, HeapArena, Prot, Root, TableMapError};
use runs::{PageSizes, Run, Span};
use thiserror::Error;

use crate::inspect;

/// The lowest address of tables. Like that of the arena it is made up: no unit walks these tables.
const BASE: u64 = 16 << 20;

/// A mapping of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub(crate) run: Run,
    pub(crate) prot: Prot,
}

/// Tables as a file has them.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) image: Vec<u8>,
    pub(crate) root: Root,
    pub(crate) tables: u64,
    /// The first address that was mapped.
    pub(crate) first: u64,
}

/// Why there is no image.
#[derive(Debug, Error)]
pub(crate) enum BuildImageError {
    #[error(transparent)]
    Format(#[from] BuildError),
    #[error("there is no room for {tables} tables")]
    Room { tables: u64, source: ArenaError },
    #[error("{:#x} + {} cannot be mapped", mapped.run.iova, runs::Bytes(mapped.run.len))]
    Map {
        mapped: Mapped,
        source: TableMapError,
    },
    #[error("cannot read {path}")]
    Process { path: String, source: io::Error },
    #[error("the kernel shows the frames of process {pid} to CAP_SYS_ADMIN only: run it as root")]
    Hidden { pid: u32 },
    #[error("process {pid} has no memory that can be mapped for a device")]
    Empty { pid: u32 },
}

/// Builds tables of the root's format, with leaves of the given sizes as far as it has them.
pub(crate) fn build(
    root: Root,
    sizes: PageSizes,
    maps: &[Mapped],
) -> Result<Built, BuildImageError> {
    let geometry = Geometry::new(root.format, root.levels)?;
    let tables = most_tables(&geometry, maps);
    // The entries of these memories are as wide as the format's, and their tables as large.
    macro_rules! with {
        ($cell:ty, $log2:literal) => {{
            let base = BASE.max(tables.clamp(16, 1 << 40).next_power_of_two() << $log2);
            let memory = HeapArena::<$cell, $log2>::with_tables_at(tables, base)
                .map_err(|source| BuildImageError::Room { tables, source })?;
            let table = AnyTable::new(root.format, root.levels, sizes, memory)?;
            let built = fill(&table, maps);
            let (gather, memory) = table.tear_down();
            memory.reclaim(gather.never_walked().into_tables());
            built
        }};
    }
    match geometry.table_bytes.ilog2() {
        10 => with!(AtomicU32, 10),
        14 => with!(AtomicU64, 14),
        16 => with!(AtomicU64, 16),
        _ => with!(AtomicU64, 12),
    }
}

fn fill(table: &AnyTable, maps: &[Mapped]) -> Result<Built, BuildImageError> {
    for mapped in maps {
        let Run { iova, pa, len } = mapped.run;
        table
            .map(iova, &[Span::new(pa, len)], mapped.prot)
            .map_err(|source| BuildImageError::Map {
                mapped: *mapped,
                source,
            })?;
    }
    let mut image = Vec::new();
    let Ok(_) = table.write_image(&mut |bytes: &[u8]| {
        image.extend_from_slice(bytes);
        Ok::<_, Infallible>(())
    });
    Ok(Built {
        image,
        root: table.root(),
        tables: table.tables(),
        first: maps.first().map_or(0, |mapped| mapped.run.iova),
    })
}

/// As many tables as the runs can need with the smallest leaves. Room that is not used costs nothing.
fn most_tables(geometry: &Geometry, maps: &[Mapped]) -> u64 {
    let levels = geometry.levels.iter().skip(1);
    let below = levels.map(|level| {
        let spans = maps
            .iter()
            .map(|mapped| (mapped.run.len >> level.shift) + 2);
        spans.fold(0, u64::saturating_add)
    });
    // A root may be several tables large.
    below.fold(
        geometry.root_bytes.div_ceil(geometry.table_bytes) * 2,
        u64::saturating_add,
    )
}

/// The pages of a process that devices could be given, at its own addresses.
pub(crate) fn pages(pid: u32) -> Result<Vec<Mapped>, BuildImageError> {
    let failed = |file: &str| {
        let path = format!("/proc/{pid}/{file}");
        move |source| BuildImageError::Process { path, source }
    };
    let smaps = read_at_most(format!("/proc/{pid}/smaps"), inspect::MOST_TEXT);
    let smaps = smaps.map_err(failed("smaps"))?;
    let pages = ProcessPages::open(pid).map_err(failed("pagemap"))?;
    let mut maps = Vec::new();
    let mut hidden = false;
    for area in inspect::areas(&String::from_utf8_lossy(&smaps)) {
        if !area.mappable {
            continue;
        }
        let range = Span::new(area.address, area.bytes);
        let each = |page: hostmem::PageRun| match page.run() {
            Some(run) => maps.push(Mapped {
                run,
                prot: Prot::RW,
            }),
            None => hidden = true,
        };
        pages
            .for_each(range, area.page_bytes.max(2 << 20), each)
            .map_err(failed("pagemap"))?;
    }
    match maps.is_empty() {
        _ if hidden => Err(BuildImageError::Hidden { pid }),
        true => Err(BuildImageError::Empty { pid }),
        false => Ok(maps),
    }
}
