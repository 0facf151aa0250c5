//! A table of any size.

use ioas::HostTables;
use ioas::MappedStorage;
use iopt::{
    AnyTable, AnyTable16K, AnyTable64K, Aperture, Arena, BuildError, DirtyError, Discard, Flushed,
    FormatId, Gather, Interruption, Invalidation, Leaf, MapError, Pending, Prot, RefitError, Root,
    UnmapError,
};
use runs::{PageSizes, Span};

use crate::{Rig, qemu::Kind, rig::LargeTables};

/// A table in memory that the unit reads.
pub(crate) enum Tables<'r> {
    /// Of 4 KiB.
    K4(AnyTable<&'r HostTables>),
    /// Of 16 KiB.
    K16(AnyTable16K<&'r Arena<MappedStorage, 14>>),
    /// Of 64 KiB.
    K64(AnyTable64K<&'r Arena<MappedStorage, 16>>),
}

macro_rules! any {
    ($self:ident, $table:ident => $what:expr) => {
        match $self {
            Self::K4($table) => $what,
            Self::K16($table) => $what,
            Self::K64($table) => $what,
        }
    };
}

impl<'r> Tables<'r> {
    /// An empty one, of the rig's kind.
    pub(crate) fn new(rig: &'r Rig, sizes: PageSizes) -> Result<Self, BuildError> {
        let Kind { format, levels } = rig.kind();
        Ok(match rig.large_tables() {
            LargeTables::None => Self::K4(AnyTable::new(format, levels, sizes, rig.structures())?),
            LargeTables::K16(memory) => Self::K16(AnyTable16K::new(format, levels, sizes, memory)?),
            LargeTables::K64(memory) => Self::K64(AnyTable64K::new(format, levels, sizes, memory)?),
        })
    }

    /// Tables in memory for structures.
    pub(crate) fn tables_of_4k(&self) -> u64 {
        match self {
            // RISC-V's second stage has a root of 16 KiB.
            Self::K4(table) if table.root().format == FormatId::RiscVG => table.tables() + 3,
            Self::K4(table) => table.tables(),
            Self::K16(_) | Self::K64(_) => 0,
        }
    }

    /// The addresses that it translates.
    pub(crate) fn aperture(&self) -> Aperture {
        any!(self, table => table.aperture())
    }

    /// See [`iopt::Table::root`].
    pub(crate) fn root(&self) -> Root {
        any!(self, table => table.root())
    }

    /// Sizes of leaves.
    pub(crate) fn page_sizes(&self) -> PageSizes {
        any!(self, table => table.page_sizes())
    }

    /// True when entries can say this.
    pub(crate) fn expresses(&self, prot: Prot) -> bool {
        any!(self, table => table.expresses(prot))
    }

    /// See [`iopt::Table::map`].
    pub(crate) fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) -> Result<(), MapError> {
        any!(self, table => table.map(iova, runs, prot))
    }

    /// See [`iopt::Table::unmap`].
    pub(crate) fn unmap(&mut self, range: Span, gather: &mut Gather) -> Result<(), UnmapError> {
        any!(self, table => table.unmap(range, gather, &mut Discard))
    }

    /// See [`iopt::Table::unmap_mapped`].
    pub(crate) fn unmap_mapped(
        &mut self,
        range: Span,
        gather: &mut Gather,
    ) -> Result<u64, UnmapError> {
        any!(self, table => table.unmap_mapped(range, gather, &mut Discard))
    }

    /// See [`iopt::Table::split`].
    pub(crate) fn split<E>(
        &mut self,
        range: Span,
        size: u64,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), RefitError<E>> {
        any!(self, table => table.split(range, size, Interruption::Allowed, gather, flush))
    }

    /// See [`iopt::Table::cut`].
    pub(crate) fn cut<E>(
        &mut self,
        at: u64,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), RefitError<E>> {
        any!(self, table => table.cut(at, Interruption::Allowed, gather, flush))
    }

    /// See [`iopt::Table::merge`].
    pub(crate) fn merge<E>(
        &mut self,
        range: Span,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), RefitError<E>> {
        any!(self, table => table.merge(range, Interruption::Allowed, gather, flush))
    }

    /// See [`iopt::Table::grow`].
    pub(crate) fn grow(&mut self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        any!(self, table => table.grow(levels, gather))
    }

    /// See [`iopt::Table::track_dirty`].
    pub(crate) fn track_dirty(&mut self, on: bool) -> Result<(), DirtyError> {
        any!(self, table => table.track_dirty(on))
    }

    /// See [`iopt::Table::harvest`].
    pub(crate) fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
        &mut self,
        range: Span,
        pending: &mut Pending<W>,
    ) -> Result<u64, DirtyError> {
        any!(self, table => table.harvest(range, pending))
    }

    /// See [`iopt::Table::leaf_at`].
    pub(crate) fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        any!(self, table => table.leaf_at(iova))
    }

    /// See [`iopt::Table::reclaim`].
    pub(crate) fn reclaim(&mut self, flushed: Flushed) {
        any!(self, table => table.reclaim(flushed));
    }
}
