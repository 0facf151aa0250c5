//! A table in memory that the unit reads.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use iopt::{
    AnyTable, BuildError, FormatId, Gather, Interruption, Invalidation, NoRuns, ResizeError,
    TableUnmapError,
};
use runs::{Iova, PageSizes, Span};

use crate::{Rig, qemu::Kind, rig::LargeTables};

/// A table in memory that the unit reads.
pub(crate) struct Tables {
    table: AnyTable,
    /// It lies in the memory for structures, not in that for larger tables.
    of_4k: bool,
}

impl Deref for Tables {
    type Target = AnyTable;

    fn deref(&self) -> &AnyTable {
        &self.table
    }
}

impl DerefMut for Tables {
    fn deref_mut(&mut self) -> &mut AnyTable {
        &mut self.table
    }
}

impl Tables {
    /// An empty one, of the rig's kind.
    pub(crate) fn new(rig: &Rig, sizes: PageSizes) -> Result<Self, BuildError> {
        let Kind { format, levels } = rig.kind();
        let table = match rig.large_tables() {
            LargeTables::None(_) => {
                let memory = Arc::clone(rig.structures());
                return AnyTable::new(format, levels, sizes, memory).map(Self::in_structures);
            }
            LargeTables::K16(memory) => AnyTable::new(format, levels, sizes, memory.clone()),
            LargeTables::K64(memory) => AnyTable::new(format, levels, sizes, memory.clone()),
        };
        let (table, of_4k) = (table?, false);
        Ok(Self { table, of_4k })
    }

    /// One of 4 KiB.
    pub(crate) const fn in_structures(table: AnyTable) -> Self {
        let of_4k = true;
        Self { table, of_4k }
    }

    /// Tables in memory for structures.
    pub(crate) fn tables_of_4k(&self) -> u64 {
        match self.root().format {
            _ if !self.of_4k => 0,
            // RISC-V's second stage has a root of 16 KiB.
            FormatId::RiscVG => self.tables() + 3,
            _ => self.tables(),
        }
    }

    /// True when its tables lie in memory for structures.
    pub(crate) const fn is_of_4k(&self) -> bool {
        self.of_4k
    }

    /// See [`iopt::TableOps::unmap`].
    pub(crate) fn unmap(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
    ) -> Result<(), TableUnmapError> {
        self.table.alone().unmap(range, gather, &mut NoRuns)
    }

    /// See [`iopt::TableOps::unmap_mapped`].
    pub(crate) fn unmap_mapped(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
    ) -> Result<u64, TableUnmapError> {
        self.table.alone().unmap_mapped(range, gather, &mut NoRuns)
    }

    /// See [`iopt::Table::split`].
    pub(crate) fn split<E>(
        &mut self,
        range: Span<Iova>,
        size: u64,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        self.table
            .split(range, size, Interruption::Allowed, gather, flush)
    }

    /// See [`iopt::Table::cut`].
    pub(crate) fn cut<E>(
        &mut self,
        at: u64,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        self.table.cut(at, Interruption::Allowed, gather, flush)
    }

    /// See [`iopt::Table::merge`].
    pub(crate) fn merge<E>(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        self.table
            .merge(range, Interruption::Allowed, gather, flush)
    }
}
