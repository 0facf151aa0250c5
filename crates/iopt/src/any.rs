//! A table whose format is chosen at run time.

use runs::{PageSizes, SizeHistogram, Span};

use crate::engine::{Leaf, RunSink, Table};
use crate::error::{BuildError, MapError, UnmapError};
use crate::format::{AmdV1, Aperture, Format, FormatId, Root, VtdSs, X86_64};
use crate::gather::{Flushed, Gather};
use crate::memory::TableMemory;
use crate::prot::Prot;

/// A [`Table`] of any format: one branch per operation, whatever the size of the operation.
#[derive(Debug)]
pub enum AnyTable<M: TableMemory> {
    /// AMD I/O page tables, version 1.
    AmdV1(Table<AmdV1, M>),
    /// x86-64: AMD version 2, VT-d first stage.
    X86_64(Table<X86_64, M>),
    /// VT-d second stage.
    VtdSs(Table<VtdSs, M>),
}

macro_rules! each {
    ($any:expr, $table:ident => $body:expr) => {
        match $any {
            AnyTable::AmdV1($table) => $body,
            AnyTable::X86_64($table) => $body,
            AnyTable::VtdSs($table) => $body,
        }
    };
}

impl<M: TableMemory> AnyTable<M> {
    /// An empty table of `format` with `levels` levels, and leaves of the given sizes, as far as
    /// the format has them. See [`Table::with_page_sizes`].
    pub fn new(
        format: FormatId,
        levels: u8,
        sizes: PageSizes,
        memory: M,
    ) -> Result<Self, BuildError> {
        Ok(match format {
            FormatId::AmdV1 => {
                Self::AmdV1(Table::with_page_sizes(AmdV1::new(levels)?, memory, sizes)?)
            }
            FormatId::X86_64 => {
                Self::X86_64(Table::with_page_sizes(X86_64::new(levels)?, memory, sizes)?)
            }
            FormatId::VtdSs => {
                Self::VtdSs(Table::with_page_sizes(VtdSs::new(levels)?, memory, sizes)?)
            }
            _ => return Err(BuildError::NotAny(format)),
        })
    }

    /// See [`Table::root`].
    pub fn root(&self) -> Root {
        each!(self, table => table.root())
    }

    /// The addresses that it translates.
    pub fn aperture(&self) -> Aperture {
        each!(self, table => table.format().aperture())
    }

    /// See [`Table::grow`].
    pub fn grow(&mut self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        each!(self, table => table.grow(levels, gather))
    }

    /// See [`Table::page_sizes`].
    pub fn page_sizes(&self) -> PageSizes {
        each!(self, table => table.page_sizes())
    }

    /// See [`Table::tables`].
    pub fn tables(&self) -> u64 {
        each!(self, table => table.tables())
    }

    /// See [`Table::leaf_sizes`].
    pub fn leaf_sizes(&self) -> SizeHistogram {
        each!(self, table => table.leaf_sizes())
    }

    /// See [`Table::map`].
    pub fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) -> Result<(), MapError> {
        each!(self, table => table.map(iova, runs, prot))
    }

    /// See [`Table::unmap`].
    pub fn unmap(
        &mut self,
        range: Span,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), UnmapError> {
        each!(self, table => table.unmap(range, gather, sink))
    }

    /// See [`Table::unmap_mapped`].
    pub fn unmap_mapped(
        &mut self,
        range: Span,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, UnmapError> {
        each!(self, table => table.unmap_mapped(range, gather, sink))
    }

    /// See [`Table::translate`].
    pub fn translate(&self, iova: u64) -> Option<u64> {
        each!(self, table => table.translate(iova))
    }

    /// See [`Table::leaf_at`].
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        each!(self, table => table.leaf_at(iova))
    }

    /// Calls `each` for every leaf that maps at least one byte of `range`, in order. See
    /// [`Table::leaves`].
    pub fn for_each_leaf(&self, range: Span, mut each: impl FnMut(Leaf)) {
        each!(self, table => table.leaves(range).for_each(&mut each));
    }

    /// See [`Table::reclaim`].
    pub fn reclaim(&mut self, flushed: Flushed) {
        each!(self, table => table.reclaim(flushed));
    }

    /// See [`Table::tear_down`].
    pub fn tear_down(self) -> (Gather, M) {
        each!(self, table => table.tear_down())
    }
}
