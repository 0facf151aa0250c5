//! What tables take of memory.

use anyhow::ensure;
use iopt::{Format, Prot, Table};
use runs::{PageSizes, Span};

use super::{Memory, arena, plain};
use crate::peers::places::Geometry;

/// The memory of tables that map some stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes that are mapped.
    pub mapped: u64,
    /// Bytes of tables, the root and the other upper ones among them.
    pub tables: u64,
    /// The least possible: the entries that the leaves take at their level, in whole tables, and one
    /// entry above for each table, in whole tables, up to the root.
    pub least: u64,
}

/// Maps `len` bytes in leaves of `page` bytes and counts. `None` where the format has no such leaf, or
/// no room.
pub fn footprint<F: Format, M: Memory>(
    format: F,
    page: u64,
    len: u64,
) -> anyhow::Result<Option<Footprint>> {
    let geometry = Geometry::of(&format);
    let (Some(places), true) = (
        geometry.places(page, len / page),
        F::page_sizes(format.levels()).contains(page) && len >= page,
    ) else {
        return Ok(None);
    };
    let tables = geometry.tables(&places, page);
    let memory = arena::<F, M>(&format, tables)?;
    let start = geometry.start(page);
    let mut table =
        Table::with_page_sizes(format, memory, PageSizes::from_bits(page)).map_err(plain)?;
    let memory = [Span::new(places.pa, len)];
    if table.map(start, &memory, Prot::RW).is_err() {
        return Ok(None);
    }
    let mut bytes = 0;
    let mut count = 0;
    table.for_each_table(&mut |_, level| {
        bytes += table_bytes(&format, usize::from(level));
        count += 1;
    });
    ensure!(
        count == table.tables(),
        "the table counts {} tables and has {count}",
        table.tables()
    );
    Ok(Some(Footprint {
        mapped: len,
        tables: bytes,
        least: least(&format, geometry.level(page), len),
    }))
}

/// The bytes of the fewest tables that can map `len` bytes in entries at `level`.
fn least<F: Format>(format: &F, level: usize, len: u64) -> u64 {
    let mut slots = len.div_ceil(1 << F::shift(level));
    let mut bytes = 0;
    for level in level..usize::from(format.levels()) {
        let tables = slots.div_ceil(format.entries(level) as u64);
        bytes += tables * table_bytes(format, level);
        slots = tables;
    }
    bytes
}

/// What a table at `level` takes: a root may be larger than a table, and takes no less than one.
fn table_bytes<F: Format>(format: &F, level: usize) -> u64 {
    let bytes = format.entries(level) as u64 * F::ENTRY_BYTES as u64;
    bytes.max(F::TABLE_BYTES)
}
