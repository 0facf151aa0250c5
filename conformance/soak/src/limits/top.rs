//! The top of the largest input addresses of each format.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use iopt::walk::{Access, Walker};
use iopt::{AnyTable, FormatId, Gather, HeapTables, Prot};
use runs::{PageSizes, Span};

use crate::any;

const PAGE: u64 = 4096;
const LARGE: u64 = 2 << 20;

/// A format with its most levels, and the last address that it translates.
const TOPS: [(FormatId, u8, u64); 7] = [
    (FormatId::VtdSs, 5, (1 << 57) - 1),
    (FormatId::X86_64, 5, (1 << 56) - 1),
    // Addresses are sign-extended: the upper half ends where all do.
    (FormatId::X86_64, 5, u64::MAX),
    (FormatId::RiscV, 5, (1 << 56) - 1),
    (FormatId::RiscV, 5, u64::MAX),
    (FormatId::RiscVG, 5, (1 << 59) - 1),
    (FormatId::AmdV1, 6, u64::MAX),
];

/// Maps a large page and the small ones behind it at each top, and has the walker find them.
pub(crate) fn addresses() -> anyhow::Result<String> {
    let mut said = Vec::new();
    for (format, levels, last) in TOPS {
        let text = format!("{format}, {levels} levels, up to {last:#x}");
        top(format, levels, last).with_context(|| text.clone())?;
        said.push(text);
    }
    Ok(said.join("; "))
}

fn top(format: FormatId, levels: u8, last: u64) -> anyhow::Result<()> {
    let tables = Arc::new(HeapTables::with_tables(64).map_err(any)?);
    let sizes = PageSizes::from_bits(1 << 12 | 1 << 21);
    let table = AnyTable::new(format, levels, sizes, Arc::clone(&tables)).map_err(any)?;
    // The root alone, of several pages in some formats.
    let empty = tables.in_use();
    // A large page, and 512 small ones in the opposite halves, to the last byte.
    let iova = last - (2 * LARGE - 1);
    let half = LARGE / 2;
    let runs = [
        Span::new(1 << 40, LARGE),
        Span::new((1 << 41) + half, half),
        Span::new(1 << 41, half),
    ];
    table.map(iova, &runs, Prot::RW).map_err(any)?;
    let walker = Walker::new(table.root());
    let mut offset = 0;
    for run in runs {
        for at in [0, run.len - PAGE, run.len - 1] {
            let found = walker.walk(&tables, iova + offset + at, Access::Write, &mut ());
            let pa = found
                .map(|found| found.pa)
                .map_err(|fault| any(format!("{fault:?}")))?;
            ensure!(
                pa == run.start + at,
                "{:#x} leads to {pa:#x}",
                iova + offset + at
            );
        }
        offset += run.len;
    }
    // Not below, and nothing behind.
    let below = walker.walk(&tables, iova - 1, Access::Read, &mut ());
    ensure!(below.is_err(), "{:#x} is mapped", iova - 1);
    if let Some(behind) = last.checked_add(1) {
        let refused = table.map(behind, &[Span::new(1 << 40, PAGE)], Prot::RW);
        ensure!(refused.is_err(), "{behind:#x} is mapped");
        let fault = walker.walk(&tables, behind, Access::Read, &mut ());
        ensure!(fault.is_err(), "{behind:#x} is translated");
    }
    let mut gather = Gather::new();
    let range = Span::new(iova, 2 * LARGE);
    table
        .alone()
        .unmap(range, &mut gather, &mut iopt::NoRuns)
        .map_err(any)?;
    let flushed = gather.flush_with(|_| Ok::<_, std::convert::Infallible>(()))?;
    table.reclaim(flushed);
    ensure!(tables.in_use() == empty, "tables are lost");
    ensure!(table.leaf_sizes().total().bytes == 0, "something is left");
    Ok(())
}
