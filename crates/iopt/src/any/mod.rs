//! Tables whose format is chosen at run time.
//!
//! An [`AnyTable`] is a [`SharedTable`] behind a virtual call for each operation, whatever the operation's
//! size. Its memory is erased below the engine ([`Erased`]), so that the engine is compiled once for
//! each format, here, and not again for each memory of each program.

mod formats;
mod object;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::ops::Deref;
use core::sync::atomic::{AtomicU32, AtomicU64};

use runs::{Iova, Pa, PageSizes, Span};

use crate::arena::Storage;
use crate::arena::erased::Erased;
use crate::engine::{
    Amount, Bound, Interruption, Leaf, NoRuns, Owned, Plan, Progress, RunSink, SharedTable, Table,
};
use crate::error::{BuildError, DirtyError, NoTables, ResizeError, TableMapError, TableUnmapError};
use crate::format::{BreakBeforeMake, Format, FormatId, Root};
use crate::gather::{Gather, Invalidation};
use crate::memory::{Chain, TableMemory};
use crate::pending::Pending;
use crate::prot::Prot;
use crate::reclaim::{DefaultReclaim, Guard};
use crate::takeover::{AdoptError, Adopted, Takeover};

use formats::Adopt;
use object::{AnyFormat, DynSink, Failed, Removal, Resize};

pub use object::AnyOps;

pub use formats::AnyCell;
use formats::ByWidth;

/// A [`SharedTable`] of any format in any memory: one virtual call per operation, whatever its size. Its operations are
/// [`AnyOps`], those of [`AnyOwner`] that unmap, and those here, in which a caller has a say by its types.
///
/// Operations that change it and run at once have ranges that do not overlap. An unmap frees tables in what its caller
/// [owns](Self::owning).
///
/// [`new`](Self::new) builds it from what a [`Root`] says: the format's name with its
/// configuration, and the levels. A format with other options is built as a [`Table`] and
/// converted.
#[derive(Debug)]
pub struct AnyTable {
    table: Box<dyn AnyFormat>,
    memory: AnyMemory,
}

/// The memory of an [`AnyTable`].
#[derive(Clone, Debug)]
pub struct AnyMemory(Arc<dyn Tables>);

/// Table memory that an [`AnyTable`] can have: with the processor's own atomics, and for all threads.
pub trait ErasableMemory:
    TableMemory<Cell: AnyCell, Link = AtomicU64, Count = AtomicU32> + Send + Sync + 'static
{
}

impl<M> ErasableMemory for M where
    M: TableMemory<Cell: AnyCell, Link = AtomicU64, Count = AtomicU32> + Send + Sync + 'static
{
}

/// A table that [`AnyTable::adopt`] has found intact.
#[derive(Debug)]
#[must_use = "its tables stay out of use until it is opened"]
pub struct AnyAdopted(Adopted<(FormatId, u8)>);

/// A map planned by [`AnyTable::plan_map`], with its tables reserved. Dropped, it gives them back.
#[must_use = "nothing is mapped until it is filled"]
pub struct AnyPlanned<'t> {
    table: &'t dyn AnyFormat,
    plan: Plan<'t>,
    // The tables that the plan was made from stay tables.
    _guard: Guard<'t, DefaultReclaim>,
}

/// The operations of an [`AnyTable`] that unmap.
#[derive(Clone, Copy, Debug)]
pub struct AnyOwner<'t> {
    table: &'t AnyTable,
    owned: Owned,
}

impl AnyTable {
    /// An empty table of `format` with `levels` levels, and leaves of the given sizes, as far as the
    /// format has them. See [`Table::with_page_sizes`]. The entries of the memory must be as wide as
    /// the format's, and its tables not smaller.
    pub fn new<M: ErasableMemory>(
        format: FormatId,
        levels: u8,
        sizes: PageSizes,
        memory: M,
    ) -> Result<Self, BuildError> {
        Self::demanding(format, levels, sizes, BreakBeforeMake::Always, memory)
    }

    /// The same for a unit that demands `demand` of changes of a leaf's size, as
    /// `UnitCapabilities::break_before_make` of `iommu` says. It matters for Arm's formats (IHI 0070, 3.21.1),
    /// where [`new`](Self::new) expects the strictest.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn demanding<M: ErasableMemory>(
        format: FormatId,
        levels: u8,
        sizes: PageSizes,
        demand: BreakBeforeMake,
        memory: M,
    ) -> Result<Self, BuildError> {
        ByWidth::build(format, levels, sizes, demand, Erased::new(memory))
    }

    /// Takes the table that another process has told a unit as `root`, whose leaves are to be of the
    /// given sizes from now on. See [`Takeover::adopt`]. A format with other options is adopted as
    /// such, opened as a [`Table`] and converted.
    pub fn adopt<S: Storage<Cell: AnyCell>, const TABLE_LOG2: u32>(
        takeover: &mut Takeover<S, TABLE_LOG2>,
        root: Root,
        sizes: PageSizes,
    ) -> Result<AnyAdopted, AdoptError> {
        let adopt = Adopt {
            takeover,
            root,
            sizes,
        };
        let (format, levels) = (root.format, root.levels);
        let adopted =
            <S::Cell as AnyCell>::One::with_fitting(format, levels, 1 << TABLE_LOG2, adopt);
        adopted.map_err(AdoptError::Build)?
    }

    /// Conversions of a [`Table`] are `From`; this is for one whose memory is erased.
    fn over<F: Format, C: ByWidth>(table: Table<F, Erased<C>>) -> Self {
        let memory = AnyMemory(Arc::new(table.memory().clone()));
        let table = Box::new(SharedTable::new(table));
        Self { table, memory }
    }

    /// Where its tables lie.
    pub fn memory(&self) -> &AnyMemory {
        &self.memory
    }

    /// See [`TableOps::plan_map`](crate::TableOps::plan_map).
    pub fn plan_map<'t>(
        &'t self,
        iova: u64,
        runs: &'t [Span<Pa>],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<AnyPlanned<'t>, TableMapError> {
        let table = &*self.table;
        let guard = table.guard();
        let plan = table.plan(iova, runs, prot, spare)?;
        Ok(AnyPlanned {
            table,
            plan,
            _guard: guard,
        })
    }

    /// The operations that unmap, for a caller that owns `owned`, which may be more than what it removes: see
    /// [`SharedTable::owning`].
    pub fn owning(&self, owned: Span<Iova>) -> AnyOwner<'_> {
        AnyOwner {
            table: self,
            owned: Owned::Span(owned),
        }
    }

    /// [`owning`](Self::owning) for an operation beside which there is no other: it owns all that there is, and leaves no
    /// empty table behind.
    pub fn alone(&self) -> AnyOwner<'_> {
        AnyOwner {
            table: self,
            owned: Owned::All,
        }
    }

    /// See [`TableOps::unmap_cutting`](crate::TableOps::unmap_cutting).
    pub fn unmap_cutting<E>(
        &self,
        range: Span<Iova>,
        interruption: Interruption,
        gather: &mut Gather,
        sink: &mut impl RunSink,
        mut flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<u64, ResizeError<E>> {
        for end in self.table.check_ends(range)?.into_iter().flatten() {
            self.cut(end, interruption, gather, &mut flush)?;
        }
        self.owning(range)
            .unmap_mapped(range, gather, sink)
            .map_err(ResizeError::Unmap)
    }

    /// See [`TableOps::split`](crate::TableOps::split).
    pub fn split<E>(
        &self,
        range: Span<Iova>,
        size: u64,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        self.resize(Resize::Split(range, size), interruption, gather, flush)
    }

    /// See [`TableOps::cut`](crate::TableOps::cut).
    pub fn cut<E>(
        &self,
        at: u64,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        self.resize(Resize::Cut(at), interruption, gather, flush)
    }

    /// See [`TableOps::merge`](crate::TableOps::merge).
    pub fn merge<E>(
        &self,
        range: Span<Iova>,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        self.resize(Resize::Merge(range), interruption, gather, flush)
    }

    fn resize<E>(
        &self,
        resize: Resize,
        interruption: Interruption,
        gather: &mut Gather,
        mut flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), ResizeError<E>> {
        let mut failed = None;
        let mut flush = |what: &Invalidation| keep_cause(flush(what), &mut failed);
        let done = self.table.resize(resize, interruption, gather, &mut flush);
        match done.map_err(ResizeError::but_for_flush) {
            Err(Some(cause)) => Err(cause),
            Ok(()) | Err(None) => failed.map_or(Ok(()), |cause| Err(ResizeError::Flush(cause))),
        }
    }

    /// See [`TableOps::harvest`](crate::TableOps::harvest).
    pub fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
        &self,
        range: Span<Iova>,
        pending: &mut Pending<W>,
    ) -> Result<u64, DirtyError> {
        pending.with_words(|pending| self.table.harvest(range, pending))
    }

    /// See [`Table::peek_dirty`].
    pub fn peek_dirty(
        &self,
        range: Span<Iova>,
        mut each: impl FnMut(Span<Iova>),
    ) -> Result<u64, DirtyError> {
        self.table.peek_dirty(range, &mut each)
    }

    /// See [`Table::write_image`].
    pub fn write_image<E>(&self, sink: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<u64, E> {
        let mut failed = None;
        let mut sink = |bytes: &[u8]| keep_cause(sink(bytes), &mut failed);
        let written = self.table.write_image(&mut sink);
        failed.map_or(Ok(written), Err)
    }

    /// Calls `each` for every leaf that maps at least one byte of `range`, in order. See
    /// [`Table::leaves`].
    pub fn for_each_leaf(&self, range: Span<Iova>, mut each: impl FnMut(Leaf)) {
        self.table.for_each_leaf(range, &mut each);
    }

    /// See [`Table::tear_down`].
    pub fn tear_down(self) -> (Gather, AnyMemory) {
        (self.table.tear_down(), self.memory)
    }
}

impl Deref for AnyTable {
    type Target = dyn AnyOps;

    fn deref(&self) -> &Self::Target {
        self.table.as_ops()
    }
}

impl<F: Format, M: ErasableMemory> From<Table<F, M>> for AnyTable {
    fn from(table: Table<F, M>) -> Self {
        Self::over(table.map_memory(Erased::new))
    }
}

impl AnyOwner<'_> {
    /// See [`TableOps::unmap`](crate::TableOps::unmap).
    pub fn unmap(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), TableUnmapError> {
        self.remove(range, Removal::Amount(Amount::Whole), gather, sink)
            .result
    }

    /// See [`TableOps::unmap_mapped`](crate::TableOps::unmap_mapped).
    pub fn unmap_mapped(
        &self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, TableUnmapError> {
        let done = self.remove(range, Removal::Amount(Amount::Mapped), gather, sink);
        done.result.map(|()| done.bytes)
    }

    /// See [`TableOps::clear`](crate::TableOps::clear).
    pub fn clear(&self, range: Span<Iova>, gather: &mut Gather) -> Result<(), TableUnmapError> {
        let removal = Removal::Amount(Amount::Untold);
        self.remove(range, removal, gather, &mut NoRuns).result
    }

    /// See [`TableOps::unmap_some`](crate::TableOps::unmap_some).
    pub fn unmap_some(
        &self,
        range: Span<Iova>,
        bound: Bound,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Progress<TableUnmapError> {
        self.remove(range, Removal::Some(bound), gather, sink)
    }

    /// See [`TableOps::unmap_pages`](crate::TableOps::unmap_pages).
    pub fn unmap_pages(
        &self,
        iova: u64,
        size: u64,
        count: u64,
        gather: &mut Gather,
    ) -> Progress<TableUnmapError> {
        let range = Span::new(iova, size.saturating_mul(count));
        self.remove(range, Removal::Pages { size, count }, gather, &mut NoRuns)
    }

    fn remove(
        &self,
        range: Span<Iova>,
        removal: Removal,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Progress<TableUnmapError> {
        let (table, sink) = (&self.table.table, DynSink::of(sink));
        table.unmap(range, self.owned, removal, gather, sink)
    }
}

impl AnyMemory {
    /// Sets `count` tables aside, in `chain`; or none.
    pub fn set_aside(&self, count: u64, chain: &mut Chain) -> Result<(), NoTables> {
        self.0.set_aside(count, chain)
    }

    /// Takes back `count` tables of `chain`, or as many as there are.
    pub fn take_back(&self, count: u64, chain: &mut Chain) {
        self.0.take_back(count, chain);
    }

    /// Takes back tables that no walk can reach any more.
    pub fn reclaim(&self, chain: Chain) {
        self.0.reclaim(chain);
    }

    /// Puts what `other` has gathered into `gather`: both of tables in this memory. So threads that unmap at
    /// once have a gather each, and one flush.
    pub fn join(&self, gather: &mut Gather, other: Gather) {
        gather.join(other, |chain, tables| self.0.append(chain, tables));
    }
}

impl AnyAdopted {
    /// See [`Adopted::open`].
    pub fn open<M: ErasableMemory>(self, memory: M) -> Result<AnyTable, AdoptError> {
        ByWidth::open(self.0, Erased::new(memory))
    }
}

impl AnyPlanned<'_> {
    /// See [`Planned::fill`](crate::Planned::fill).
    pub fn fill(mut self) -> Result<(), TableMapError> {
        self.table.fill(&mut self.plan)
    }
}

impl fmt::Debug for AnyPlanned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyPlanned").finish_non_exhaustive()
    }
}

impl Drop for AnyPlanned<'_> {
    fn drop(&mut self) {
        self.table.drop_plan(&mut self.plan);
    }
}

/// Keeps the cause with which a call failed where its type is known.
fn keep_cause<T, E>(result: Result<T, E>, kept: &mut Option<E>) -> Result<T, Failed> {
    result.map_err(|cause| {
        *kept = Some(cause);
        Failed
    })
}

/// The memory of a table, as far as it does not matter how wide an entry is.
trait Tables: fmt::Debug + Send + Sync {
    fn set_aside(&self, count: u64, chain: &mut Chain) -> Result<(), NoTables>;
    fn take_back(&self, count: u64, chain: &mut Chain);
    fn reclaim(&self, chain: Chain);
    fn append(&self, chain: &mut Chain, other: Chain);
}

impl<C: ByWidth> Tables for Erased<C> {
    fn set_aside(&self, count: u64, chain: &mut Chain) -> Result<(), NoTables> {
        let mut reserve = self.reserve(count)?;
        while let Some((table, _)) = reserve.take(self) {
            chain.push(self, table);
        }
        Ok(())
    }
    fn take_back(&self, count: u64, chain: &mut Chain) {
        let mut back = Chain::empty();
        for _ in 0..count {
            let Some(table) = chain.pop(self) else { break };
            back.push(self, table);
        }
        TableMemory::reclaim(self, back);
    }
    fn reclaim(&self, chain: Chain) {
        TableMemory::reclaim(self, chain);
    }
    fn append(&self, chain: &mut Chain, other: Chain) {
        chain.append(self, other);
    }
}
