//! Tables whose format is chosen at run time.
//!
//! An [`AnyTable`] is a [`Table`] behind a virtual call for each operation, whatever the operation's
//! size. Its memory is erased below the engine ([`Erased`]), so that the engine is compiled once for
//! each format, here, and not again for each memory of each program.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::{AtomicU32, AtomicU64};

use runs::{PageSizes, Run, SizeHistogram, Span};

use crate::arena::Storage;
use crate::arena::erased::Erased;
use crate::cell::Cell;
use crate::engine::{Discard, Interruption, Leaf, Nodes, Plan, RunSink, Table, Wants};
use crate::error::{
    BrokenMemory, BuildError, DirtyError, MapError, NoTables, ProtectError, RangeError, RefitError,
    UnmapError,
};
use crate::format::{
    AmdV1, Aperture, ArmGranule, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart1Page4K, Dart2,
    DartVersion, Format, FormatId, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa, RiscV, RiscVG, Root,
    VtdSs, X86_64,
};
use crate::gather::{Flushed, Gather, Invalidation};
use crate::memory::{Chain, TableMemory};
use crate::pending::Pending;
use crate::prot::Prot;
use crate::takeover::{AdoptError, Adopted, Takeover};

/// A [`Table`] of any format in any memory: one virtual call per operation, whatever its size.
///
/// [`new`](Self::new) builds it from what a [`Root`] says: the format's name with its
/// configuration, and the levels. A format with other options is built as a [`Table`] and
/// converted. It is the exclusive form.
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

/// What [`AnyTable::adopt`] has found whole.
#[derive(Debug)]
#[must_use = "its tables stay out of use until it is opened"]
pub struct AnyAdopted(Adopted<(FormatId, u8)>);

/// What [`AnyTable::plan_map`] has reserved the tables for. Dropped, it gives them back.
#[derive(Debug)]
#[must_use = "nothing is mapped until it is filled"]
pub struct AnyPlanned<'t> {
    table: &'t mut dyn AnyFormat,
    plan: Plan<'t>,
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
        AnyCell::build(format, levels, sizes, Erased::new(memory))
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
        let adopted = S::Cell::with_fitting(root.format, root.levels, 1 << TABLE_LOG2, adopt);
        adopted.map_err(AdoptError::Build)?
    }

    /// What converts a [`Table`] is `From`; this is for one whose memory is erased.
    fn over<F: Format, C: AnyCell>(table: Table<F, Erased<C>>) -> Self {
        let memory = AnyMemory(Arc::new(table.memory().clone()));
        let table = Box::new(table);
        Self { table, memory }
    }

    /// See [`Table::root`].
    pub fn root(&self) -> Root {
        self.table.root()
    }

    /// The addresses that it translates.
    pub fn aperture(&self) -> Aperture {
        self.table.aperture()
    }

    /// See [`Table::intact`].
    pub fn intact(&self) -> Result<(), BrokenMemory> {
        self.table.intact()
    }

    /// See [`Table::grow`].
    pub fn grow(&mut self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        self.table.grow(levels, gather)
    }

    /// Where its tables lie.
    pub fn memory(&self) -> &AnyMemory {
        &self.memory
    }

    /// See [`Table::table_log2`].
    pub fn table_log2(&self, level: usize) -> Option<u32> {
        self.table.table_log2(level)
    }

    /// See [`Table::page_sizes`].
    pub fn page_sizes(&self) -> PageSizes {
        self.table.page_sizes()
    }

    /// True when entries can say this: see [`Format::leaf_bits`].
    pub fn expresses(&self, prot: Prot) -> bool {
        self.table.expresses(prot)
    }

    /// See [`Table::tables`].
    pub fn tables(&self) -> u64 {
        self.table.tables()
    }

    /// See [`Table::leaf_sizes`].
    pub fn leaf_sizes(&self) -> SizeHistogram {
        self.table.leaf_sizes()
    }

    /// See [`Table::map`].
    pub fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) -> Result<(), MapError> {
        self.table.map(iova, runs, prot)
    }

    /// See [`Table::plan_map`].
    pub fn plan_map<'t>(
        &'t mut self,
        iova: u64,
        runs: &'t [Span],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<AnyPlanned<'t>, MapError> {
        let plan = self.table.plan(iova, runs, prot, spare)?;
        let table = &mut *self.table;
        Ok(AnyPlanned { table, plan })
    }

    /// See [`Table::unmap`].
    pub fn unmap(
        &mut self,
        range: Span,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), UnmapError> {
        let told = Told::of(sink);
        self.table.unmap(range, true, gather, told).map(|_| ())
    }

    /// See [`Table::unmap_mapped`].
    pub fn unmap_mapped(
        &mut self,
        range: Span,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, UnmapError> {
        self.table.unmap(range, false, gather, Told::of(sink))
    }

    /// See [`Table::unmap_cutting`].
    pub fn unmap_cutting<E>(
        &mut self,
        range: Span,
        interruption: Interruption,
        gather: &mut Gather,
        sink: &mut impl RunSink,
        mut flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<u64, RefitError<E>> {
        for end in self.table.check_ends(range)?.into_iter().flatten() {
            self.cut(end, interruption, gather, &mut flush)?;
        }
        self.unmap_mapped(range, gather, sink)
            .map_err(RefitError::Unmap)
    }

    /// See [`Table::split`].
    pub fn split<E>(
        &mut self,
        range: Span,
        size: u64,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), RefitError<E>> {
        self.refit(Refit::Split(range, size), interruption, gather, flush)
    }

    /// See [`Table::cut`].
    pub fn cut<E>(
        &mut self,
        at: u64,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), RefitError<E>> {
        self.refit(Refit::Cut(at), interruption, gather, flush)
    }

    /// See [`Table::merge`].
    pub fn merge<E>(
        &mut self,
        range: Span,
        interruption: Interruption,
        gather: &mut Gather,
        flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), RefitError<E>> {
        self.refit(Refit::Merge(range), interruption, gather, flush)
    }

    fn refit<E>(
        &mut self,
        refit: Refit,
        interruption: Interruption,
        gather: &mut Gather,
        mut flush: impl FnMut(&Invalidation) -> Result<(), E>,
    ) -> Result<(), RefitError<E>> {
        let mut cause = Cause(None);
        let mut flush = |what: &Invalidation| cause.keep(flush(what));
        let done = self.table.refit(refit, interruption, gather, &mut flush);
        done.map_err(|error| error.map_flush(|Failed| cause.get()))
    }

    /// See [`Table::protect`].
    pub fn protect(
        &mut self,
        range: Span,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError> {
        self.table.protect(range, prot, gather)
    }

    /// See [`Table::track_dirty`].
    pub fn track_dirty(&mut self, on: bool) -> Result<(), DirtyError> {
        self.table.track_dirty(on)
    }

    /// See [`Table::harvest`].
    pub fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
        &mut self,
        range: Span,
        pending: &mut Pending<W>,
    ) -> Result<u64, DirtyError> {
        pending.with_words(|pending| self.table.harvest(range, pending))
    }

    /// See [`Table::peek_dirty`].
    pub fn peek_dirty(&self, range: Span, mut each: impl FnMut(Span)) -> Result<u64, DirtyError> {
        self.table.peek_dirty(range, &mut each)
    }

    /// See [`Table::write_image`].
    pub fn write_image<E>(&self, sink: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<u64, E> {
        let mut cause = Cause(None);
        let mut sink = |bytes: &[u8]| cause.keep(sink(bytes));
        let written = self.table.write_image(&mut sink);
        written.map_err(|Failed| cause.get())
    }

    /// See [`Table::nodes`].
    pub fn nodes(&self) -> Nodes {
        self.table.nodes()
    }

    /// See [`Table::translate`].
    pub fn translate(&self, iova: u64) -> Option<u64> {
        self.table.translate(iova)
    }

    /// See [`Table::leaf_at`].
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.table.leaf_at(iova)
    }

    /// See [`Table::is_one_run`].
    pub fn is_one_run(&self, range: Span) -> bool {
        self.table.is_one_run(range)
    }

    /// Calls `each` for every leaf that maps at least one byte of `range`, in order. See
    /// [`Table::leaves`].
    pub fn for_each_leaf(&self, range: Span, mut each: impl FnMut(Leaf)) {
        self.table.for_each_leaf(range, &mut each);
    }

    /// See [`Table::reclaim`].
    pub fn reclaim(&mut self, flushed: Flushed) {
        self.table.reclaim(flushed);
    }

    /// See [`Table::tear_down`].
    pub fn tear_down(self) -> (Gather, AnyMemory) {
        (self.table.tear_down(), self.memory)
    }
}

impl<F: Format, M: ErasableMemory> From<Table<F, M>> for AnyTable {
    fn from(table: Table<F, M>) -> Self {
        Self::over(table.map_memory(Erased::new))
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
}

impl AnyAdopted {
    /// See [`Adopted::open`].
    pub fn open<M: ErasableMemory>(self, memory: M) -> Result<AnyTable, AdoptError> {
        AnyCell::open(self.0, Erased::new(memory))
    }
}

impl AnyPlanned<'_> {
    /// See [`Planned::fill`](crate::Planned::fill).
    pub fn fill(mut self) -> Result<(), MapError> {
        self.table.fill(&mut self.plan)
    }
}

impl Drop for AnyPlanned<'_> {
    fn drop(&mut self) {
        self.table.drop_plan(&mut self.plan);
    }
}

/// Who is told of runs, with their dirty state or without: an unmap is compiled once for both, and
/// once for those who want nothing.
struct Told<'s> {
    sink: &'s mut dyn RunSink,
    wants: Wants,
}

impl<'s> Told<'s> {
    fn of(sink: &'s mut impl RunSink) -> Self {
        let wants = sink.wants();
        Self { sink, wants }
    }
}

impl RunSink for Told<'_> {
    #[inline(always)]
    fn wants(&self) -> Wants {
        match self.wants {
            Wants::DirtyRuns => Wants::DirtyRuns,
            // Whoever wants nothing is not asked: so no code is made for it here.
            Wants::Runs | Wants::Nothing => Wants::Runs,
        }
    }

    #[inline(always)]
    fn run(&mut self, run: Run) {
        self.sink.run(run);
    }

    #[inline(always)]
    fn dirty_run(&mut self, run: Run, dirty: bool) {
        self.sink.dirty_run(run, dirty);
    }
}

/// How leaves are to change their sizes.
enum Refit {
    Split(Span, u64),
    Cut(u64),
    Merge(Span),
}

/// A call that failed: its cause is kept by the caller, since it has a type.
struct Failed;

/// The cause with which a call failed.
struct Cause<E>(Option<E>);

impl<E> Cause<E> {
    fn keep<T>(&mut self, result: Result<T, E>) -> Result<T, Failed> {
        result.map_err(|cause| {
            self.0 = Some(cause);
            Failed
        })
    }

    fn get(self) -> E {
        match self.0 {
            Some(cause) => cause,
            None => unreachable!("only `keep` makes `Failed`, and keeps a cause with it"),
        }
    }
}

/// A [`Table`] of a format that the caller does not know.
trait AnyFormat: fmt::Debug + Send + Sync {
    fn root(&self) -> Root;
    fn aperture(&self) -> Aperture;
    fn intact(&self) -> Result<(), BrokenMemory>;
    fn grow(&mut self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError>;
    fn table_log2(&self, level: usize) -> Option<u32>;
    fn page_sizes(&self) -> PageSizes;
    fn expresses(&self, prot: Prot) -> bool;
    fn tables(&self) -> u64;
    fn leaf_sizes(&self) -> SizeHistogram;
    fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) -> Result<(), MapError>;
    fn plan<'t>(
        &self,
        iova: u64,
        runs: &'t [Span],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<Plan<'t>, MapError>;
    fn fill(&mut self, plan: &mut Plan<'_>) -> Result<(), MapError>;
    fn drop_plan(&self, plan: &mut Plan<'_>);
    fn unmap(
        &mut self,
        range: Span,
        whole: bool,
        gather: &mut Gather,
        told: Told<'_>,
    ) -> Result<u64, UnmapError>;
    fn check_ends(&self, range: Span) -> Result<[Option<u64>; 2], RangeError>;
    fn refit(
        &mut self,
        refit: Refit,
        interruption: Interruption,
        gather: &mut Gather,
        flush: &mut dyn FnMut(&Invalidation) -> Result<(), Failed>,
    ) -> Result<(), RefitError<Failed>>;
    fn protect(&mut self, range: Span, prot: Prot, gather: &mut Gather)
    -> Result<(), ProtectError>;
    fn track_dirty(&mut self, on: bool) -> Result<(), DirtyError>;
    fn harvest(
        &mut self,
        range: Span,
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<u64, DirtyError>;
    fn peek_dirty(&self, range: Span, each: &mut dyn FnMut(Span)) -> Result<u64, DirtyError>;
    fn write_image(&self, sink: &mut dyn FnMut(&[u8]) -> Result<(), Failed>)
    -> Result<u64, Failed>;
    fn nodes(&self) -> Nodes;
    fn translate(&self, iova: u64) -> Option<u64>;
    fn leaf_at(&self, iova: u64) -> Option<Leaf>;
    fn is_one_run(&self, range: Span) -> bool;
    fn for_each_leaf(&self, range: Span, each: &mut dyn FnMut(Leaf));
    fn reclaim(&mut self, flushed: Flushed);
    fn tear_down(self: Box<Self>) -> Gather;
}

impl<F: Format, C: AnyCell> AnyFormat for Table<F, Erased<C>> {
    fn root(&self) -> Root {
        self.root()
    }
    fn aperture(&self) -> Aperture {
        self.format().aperture()
    }
    fn intact(&self) -> Result<(), BrokenMemory> {
        self.intact()
    }
    fn grow(&mut self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        self.grow(levels, gather)
    }
    fn table_log2(&self, level: usize) -> Option<u32> {
        self.table_log2(level)
    }
    fn page_sizes(&self) -> PageSizes {
        self.page_sizes()
    }
    fn expresses(&self, prot: Prot) -> bool {
        self.format().leaf_bits(prot).is_some()
    }
    fn tables(&self) -> u64 {
        self.tables()
    }
    fn leaf_sizes(&self) -> SizeHistogram {
        self.leaf_sizes()
    }
    fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) -> Result<(), MapError> {
        self.map(iova, runs, prot)
    }
    fn plan<'t>(
        &self,
        iova: u64,
        runs: &'t [Span],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<Plan<'t>, MapError> {
        self.plan_request(iova, runs, prot, spare)
    }
    fn fill(&mut self, plan: &mut Plan<'_>) -> Result<(), MapError> {
        self.fill_plan(plan)
    }
    fn drop_plan(&self, plan: &mut Plan<'_>) {
        plan.give_back(self.memory());
    }
    fn unmap(
        &mut self,
        range: Span,
        whole: bool,
        gather: &mut Gather,
        mut told: Told<'_>,
    ) -> Result<u64, UnmapError> {
        match told.wants {
            Wants::Nothing => self.unmap_range(range, whole, gather, &mut Discard),
            Wants::Runs | Wants::DirtyRuns => self.unmap_range(range, whole, gather, &mut told),
        }
    }
    fn check_ends(&self, range: Span) -> Result<[Option<u64>; 2], RangeError> {
        self.check_ends(range)
    }
    fn refit(
        &mut self,
        refit: Refit,
        interruption: Interruption,
        gather: &mut Gather,
        flush: &mut dyn FnMut(&Invalidation) -> Result<(), Failed>,
    ) -> Result<(), RefitError<Failed>> {
        match refit {
            Refit::Split(range, size) => self.split(range, size, interruption, gather, flush),
            Refit::Cut(at) => self.cut(at, interruption, gather, flush),
            Refit::Merge(range) => self.merge(range, interruption, gather, flush),
        }
    }
    fn protect(
        &mut self,
        range: Span,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError> {
        self.protect(range, prot, gather)
    }
    fn track_dirty(&mut self, on: bool) -> Result<(), DirtyError> {
        self.track_dirty(on)
    }
    fn harvest(
        &mut self,
        range: Span,
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<u64, DirtyError> {
        self.harvest(range, pending)
    }
    fn peek_dirty(&self, range: Span, each: &mut dyn FnMut(Span)) -> Result<u64, DirtyError> {
        self.peek_dirty(range, each)
    }
    fn write_image(
        &self,
        mut sink: &mut dyn FnMut(&[u8]) -> Result<(), Failed>,
    ) -> Result<u64, Failed> {
        self.write_image(&mut sink)
    }
    fn nodes(&self) -> Nodes {
        self.nodes()
    }
    fn translate(&self, iova: u64) -> Option<u64> {
        self.translate(iova)
    }
    fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.leaf_at(iova)
    }
    fn is_one_run(&self, range: Span) -> bool {
        self.is_one_run(range)
    }
    fn for_each_leaf(&self, range: Span, each: &mut dyn FnMut(Leaf)) {
        self.leaves(range).for_each(each);
    }
    fn reclaim(&mut self, flushed: Flushed) {
        self.reclaim(flushed);
    }
    fn tear_down(self: Box<Self>) -> Gather {
        Self::tear_down(*self).0
    }
}

/// The memory of a table, as far as it does not matter how wide an entry is.
trait Tables: fmt::Debug + Send + Sync {
    fn set_aside(&self, count: u64, chain: &mut Chain) -> Result<(), NoTables>;
    fn take_back(&self, count: u64, chain: &mut Chain);
    fn reclaim(&self, chain: Chain);
}

impl<C: AnyCell> Tables for Erased<C> {
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
}

/// The width of entries decides which formats there can be.
pub trait AnyCell: Cell + Send + Sync + fmt::Debug + Sized + 'static {
    /// The other width.
    #[doc(hidden)]
    type Other: AnyCell;

    /// Hands the format with this name and these levels to `visitor`.
    #[doc(hidden)]
    fn with_format<V: Visitor>(
        format: FormatId,
        levels: u8,
        visitor: V,
    ) -> Result<V::Result, BuildError>;

    /// The same, and the error of memory with tables of `table_bytes` bytes if the format has entries of
    /// another width.
    #[doc(hidden)]
    fn with_fitting<V: Visitor>(
        format: FormatId,
        levels: u8,
        table_bytes: u64,
        visitor: V,
    ) -> Result<V::Result, BuildError> {
        let offered = (Self::BYTES, table_bytes);
        let found = Self::with_format(format, levels, visitor);
        found.map_err(
            |cause| match Self::Other::with_format(format, levels, Geometry) {
                Ok(wanted) => BuildError::TableMemory {
                    format,
                    wanted,
                    offered,
                },
                Err(_) => cause,
            },
        )
    }

    /// [`AnyTable::new`], without a parameter: so it is compiled here.
    #[doc(hidden)]
    fn build(
        format: FormatId,
        levels: u8,
        sizes: PageSizes,
        memory: Erased<Self>,
    ) -> Result<AnyTable, BuildError>;

    /// [`AnyAdopted::open`], without a parameter.
    #[doc(hidden)]
    fn open(adopted: Adopted<(FormatId, u8)>, memory: Erased<Self>)
    -> Result<AnyTable, AdoptError>;
}

/// What is done with a format that is known by its name.
pub trait Visitor {
    /// What comes of it.
    type Result;

    /// Does it.
    fn visit<F: Format>(self, format: F) -> Self::Result;
}

macro_rules! any_cell {
    ($cell:ty, $other:ty, $levels:ident { $($id:pat $(if $guard:expr)? => $format:expr,)* }) => {
        impl AnyCell for $cell {
            type Other = $other;

            fn with_format<V: Visitor>(
                format: FormatId,
                $levels: u8,
                visitor: V,
            ) -> Result<V::Result, BuildError> {
                match format {
                    $($id $(if $guard)? => visit($format?, $levels, visitor),)*
                    _ => Err(BuildError::NotAny(format)),
                }
            }

            fn build(
                format: FormatId,
                levels: u8,
                sizes: PageSizes,
                memory: Erased<Self>,
            ) -> Result<AnyTable, BuildError> {
                let table_bytes = memory.table_bytes();
                Self::with_fitting(format, levels, table_bytes, Build { sizes, memory })?
            }

            fn open(
                adopted: Adopted<(FormatId, u8)>,
                memory: Erased<Self>,
            ) -> Result<AnyTable, AdoptError> {
                let (format, levels) = *adopted.format();
                let open = Open { adopted, memory };
                Self::with_format(format, levels, open).map_err(AdoptError::Build)?
            }
        }
    };
}

any_cell! {
    AtomicU64, AtomicU32, levels {
        FormatId::AmdV1 => AmdV1::new(levels),
        FormatId::X86_64 => X86_64::new(levels),
        FormatId::VtdSs => VtdSs::new(levels),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K4 => ArmStage1::<K4>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K4Lpa2 => ArmStage1::<K4Lpa2>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K16 => ArmStage1::<K16>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K16Lpa2 => ArmStage1::<K16Lpa2>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K64 => ArmStage1::<K64>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K64Lpa => ArmStage1::<K64Lpa>::of(arm),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K4 => ArmStage2::<K4>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K4Lpa2 => {
            ArmStage2::<K4Lpa2>::of(arm, levels)
        },
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K16 => ArmStage2::<K16>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K16Lpa2 => {
            ArmStage2::<K16Lpa2>::of(arm, levels)
        },
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K64 => ArmStage2::<K64>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K64Lpa => {
            ArmStage2::<K64Lpa>::of(arm, levels)
        },
        FormatId::RiscV => RiscV::new(levels),
        FormatId::RiscVG => RiscVG::new(levels),
        FormatId::Dart(dart) if dart.version == DartVersion::V1 && dart.page_log2 == 12 => {
            Dart1Page4K::new(levels, dart.input_bits)
        },
        FormatId::Dart(dart) if dart.version == DartVersion::V1 && dart.page_log2 == 14 => {
            Dart1::new(levels, dart.input_bits)
        },
        FormatId::Dart(dart) if dart.version == DartVersion::V2 && dart.page_log2 == 14 => {
            Dart2::new(levels, dart.input_bits)
        },
    }
}

any_cell! {
    AtomicU32, AtomicU64, levels {
        FormatId::ArmV7s => Ok::<_, BuildError>(<ArmV7s>::new()),
    }
}

/// Hands over a format that must have the levels asked for.
fn visit<F: Format, V: Visitor>(
    format: F,
    levels: u8,
    visitor: V,
) -> Result<V::Result, BuildError> {
    if format.levels() != levels {
        let format = format.id();
        return Err(BuildError::Levels { format, levels });
    }
    Ok(visitor.visit(format))
}

/// Says how many bytes an entry and a table have.
struct Geometry;

impl Visitor for Geometry {
    type Result = (usize, u64);

    fn visit<F: Format>(self, _format: F) -> (usize, u64) {
        (F::ENTRY_BYTES, F::TABLE_BYTES)
    }
}

struct Build<C> {
    sizes: PageSizes,
    memory: Erased<C>,
}

impl<C: AnyCell> Visitor for Build<C> {
    type Result = Result<AnyTable, BuildError>;

    fn visit<F: Format>(self, format: F) -> Self::Result {
        Table::in_memory(format, self.memory, self.sizes).map(AnyTable::over)
    }
}

struct Adopt<'t, S: Storage, const TABLE_LOG2: u32> {
    takeover: &'t mut Takeover<S, TABLE_LOG2>,
    root: Root,
    sizes: PageSizes,
}

impl<S: Storage, const TABLE_LOG2: u32> Visitor for Adopt<'_, S, TABLE_LOG2> {
    type Result = Result<AnyAdopted, AdoptError>;

    fn visit<F: Format>(self, format: F) -> Self::Result {
        let Self {
            takeover,
            root,
            sizes,
        } = self;
        let adopted = takeover.adopt_fitting(format, root.address, sizes)?;
        Ok(AnyAdopted(adopted.with_format((root.format, root.levels))))
    }
}

struct Open<C> {
    adopted: Adopted<(FormatId, u8)>,
    memory: Erased<C>,
}

impl<C: AnyCell> Visitor for Open<C> {
    type Result = Result<AnyTable, AdoptError>;

    fn visit<F: Format>(self, format: F) -> Self::Result {
        let adopted = self.adopted.with_format(format);
        adopted.open(self.memory).map(AnyTable::over)
    }
}
