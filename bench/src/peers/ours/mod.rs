//! Our own tables as subjects, in both forms and over every format.
//!
//! Conditions, beside those of [`work`](crate::peers::work): tables are given back when they are empty, as by default, so
//! that warm ones hold something, and in rows of their own they are kept ([`Table::keep_empty_tables`]). Each unmap makes a gather, has it flushed by
//! something that does nothing, and reclaims the tables, all of it in the time taken. The arena is
//! touched before, and every page of it was filled with something: it is recycled. Sinks are function
//! items, so that they are known where they are called.

mod alike;
mod exclusive;
mod shared;
mod threads;

use std::fmt::Display;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use anyhow::{Context as _, ensure};
use iopt::{
    ArenaError, Cell, Chain, Format, HeapArena, Pending, Prot, RunSink, Table, TableMemory,
    TableOps as _, WideCell, WithDirty,
};
use runs::{Iova, Pa, PageSizes, Run, Span};

use crate::peers::clock::time;
use crate::peers::places::{Geometry, Places, random};
use crate::peers::work::{Beside, Subject, Work};

pub use exclusive::Exclusive;
pub use shared::Shared;
pub use threads::{Terrain, store_loops, threads};

/// Batches of which a sample takes the mean, where an operation is short.
const BATCHES: u32 = 16;
/// The most pages of a short operation.
const LONG: u64 = 16 << 10;

/// Content of an arena's pages before they are used.
const DIRT: u64 = 0xD1D1_D1D1_D1D1_D1D0;

/// An arena on the heap, of any table size and entry width.
pub trait Memory: TableMemory<Link: Send + Sync> + Sized + Send + Sync + 'static {
    /// The same with cells that are handled one by one, as in an engine without `std`.
    type Scalar: Memory;
    /// That is something else than this.
    const VECTORS: bool;

    /// Room for `tables` tables, from the address `base` on.
    fn with_tables_at(tables: u64, base: u64) -> Result<Self, ArenaError>;
}

macro_rules! memory {
    ($($cell:ty, $scalar:ty, $vectors:expr, [$($log2:literal)*];)*) => {$($(
        impl Memory for HeapArena<$cell, $log2> {
            type Scalar = HeapArena<$scalar, $log2>;
            const VECTORS: bool = $vectors;

            fn with_tables_at(tables: u64, base: u64) -> Result<Self, ArenaError> {
                Self::with_tables_at(tables, base)
            }
        }
    )*)*};
}
memory! {
    WideCell, AtomicU64, cfg!(target_arch = "x86_64"), [12 14 16];
    AtomicU64, AtomicU64, false, [12 14 16];
    AtomicU32, AtomicU32, false, [10];
}

/// Room for `tables` tables of `format`, all of whose pages were used before.
pub(crate) fn arena<F: Format, M: Memory>(format: &F, tables: u64) -> anyhow::Result<Arc<M>> {
    // Where tables must lie low, the window takes the upper half of what they can reach.
    let base = 1 << (format.table_bits() - 1).min(46);
    // A root of several tables is cut from what was never used.
    let arena = M::with_tables_at(tables + 64, base).map_err(plain)?;
    let entries = M::TABLE_BYTES as usize / M::Cell::BYTES;
    let mut used = Chain::empty();
    for _ in 0..tables {
        let table = arena.allocate(M::TABLE_BYTES as usize).map_err(plain)?;
        arena
            .entries(table, entries)
            .iter()
            .for_each(|cell| cell.set(DIRT));
        used.push(&arena, table);
    }
    arena.reclaim(used);
    Ok(Arc::new(arena))
}

/// An error of the library, which names its cause, for `anyhow`.
pub(crate) fn plain(error: impl Display) -> anyhow::Error {
    anyhow::anyhow!("{error}")
}

/// One of the two forms. Every function is true when all went well; each unmap flushes and reclaims.
pub trait Access<F: Format, M: Memory>: Sized {
    /// The name, for people.
    const NAME: &'static str;
    /// How many times the tables of an operation there must be room for. The shared form gives
    /// tables back one operation later, when no reader can be left: two sets take turns.
    const SETS: u64 = 1;
    /// Takes a table that is set up.
    fn of(table: Table<F, Arc<M>>) -> Self;
    /// Maps runs, laid end to end, from `iova` on.
    fn map(&mut self, iova: u64, runs: &[Span<Pa>]) -> bool;
    /// Unmaps a range that is mapped.
    fn unmap<S: RunSink>(&mut self, range: Span<Iova>, sink: S) -> bool;
    /// The same for a caller who wants to know nothing.
    fn clear(&mut self, range: Span<Iova>) -> bool;
    /// Maps each range, by itself, to the same runs; the shared form stays inside meanwhile.
    fn map_each(&mut self, ranges: &[Span<Iova>], runs: &[Span<Pa>]) -> bool;
    /// Unmaps each range by itself; the shared form stays inside, and what is to be flushed is
    /// gathered for all of them.
    fn unmap_each<S: RunSink>(&mut self, ranges: &[Span<Iova>], sink: S) -> bool;
    /// Where an address leads.
    fn translate(&self, iova: u64) -> Option<u64>;
    /// Harvests, and acknowledges what is shown.
    fn harvest(&mut self, range: Span<Iova>, pending: &mut Pending<Vec<u64>>) -> bool;
    /// Marks a range as written to.
    fn set_dirty(&mut self, range: Span<Iova>) -> bool;
    /// Makes leaves of a range smaller.
    fn split(&mut self, range: Span<Iova>, size: u64) -> bool;
    /// Makes leaves of a range as large as they can be.
    fn merge(&mut self, range: Span<Iova>) -> bool;
}

/// A sink of runs.
fn take(run: Run) {
    black_box(run);
}

/// A sink of runs with their dirty state.
fn take_dirty(run: Run, dirty: bool) {
    black_box((run, dirty));
}

/// A table of ours over the format `F` in tables of the memory `M`, in the form `T`.
pub struct Ours<F, M, T> {
    name: &'static str,
    format: F,
    /// The format as it keeps dirty state, where it can.
    dirty: Option<F>,
    ready: Option<Ready<T>>,
    memory: std::marker::PhantomData<M>,
}

/// State prepared for one kind of work.
struct Ready<T> {
    work: Work,
    table: T,
    places: Places,
    /// Batches of a sample.
    batches: u32,
    /// Memory that each operation maps.
    memory: Span<Pa>,
    addresses: Vec<u64>,
    pending: Option<Pending<Vec<u64>>>,
}

impl<F: Format, M: Memory, T: Access<F, M>> Ours<F, M, T> {
    /// Tables of `format`; for work on dirty bits of `dirty`, where the format has them.
    pub fn new(format: F, dirty: Option<F>) -> Self {
        Self {
            name: T::NAME,
            format,
            dirty,
            ready: None,
            memory: std::marker::PhantomData,
        }
    }

    /// The same by another name.
    pub fn called(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Sets a table up; `None` where this format does not do such work.
    fn prepare(&self, work: &Work) -> anyhow::Result<Option<Ready<T>>> {
        let setup = Setup::of(work);
        let format = match (setup.tracks, self.dirty) {
            (false, _) => self.format,
            (true, Some(dirty)) => dirty,
            (true, None) => return Ok(None),
        };
        let geometry = Geometry::of(&format);
        let granule = 1 << F::GRANULE_LOG2;
        let offered = F::page_sizes(format.levels());
        let sizes = match setup.page {
            None => offered,
            Some(page) if !offered.contains(page) => return Ok(None),
            Some(page) if setup.resizes => PageSizes::from_bits(page | granule),
            Some(page) => PageSizes::from_bits(page),
        };
        if setup.resizes && setup.page == Some(granule) {
            return Ok(None);
        }
        let places = match setup.page {
            None => geometry.chosen(),
            Some(page) => geometry.places(page, setup.count),
        };
        let Some(places) = places else {
            return Ok(None);
        };
        let smallest = if setup.resizes {
            granule
        } else {
            sizes.smallest()
        };
        let tables = geometry.tables(&places, smallest) * T::SETS;
        let memory = arena::<F, M>(&format, tables)?;
        let mut table = Table::with_page_sizes(format, memory, sizes).map_err(plain)?;
        table.keep_empty_tables(setup.beside == Some(Beside::Kept));
        let mut fixed = places.keeper.into_iter().collect::<Vec<_>>();
        match (setup.beside, setup.page) {
            (Some(Beside::Half), _) => fixed.extend(&places.beside),
            (Some(Beside::Page), Some(page)) => fixed.extend(places.behind(page)),
            _ => {}
        }
        for span in fixed {
            let beside = [Span::new(places.pa, span.len)];
            table.map(span.start, &beside, Prot::RW).map_err(plain)?;
        }
        if setup.tracks {
            table.track_dirty(true).map_err(plain)?;
        }
        let range = *places.ranges.first().context("no place")?;
        let mut ready = Ready {
            work: *work,
            table: T::of(table),
            batches: if setup.count <= LONG { BATCHES } else { 1 },
            memory: Span::new(places.pa, range.len),
            addresses: Vec::new(),
            pending: None,
            places,
        };
        if setup.stays {
            for range in &ready.places.ranges {
                ensure!(
                    ready.table.map(range.start, &[ready.memory]),
                    "{work:?}: the leaves that stay cannot be mapped"
                );
            }
            ready.addresses = random(range);
        }
        if let Work::Harvest { page, .. } = work {
            let words = vec![0; (range.len / page).div_ceil(64) as usize];
            ready.pending = Some(Pending::new(words, range, *page).map_err(plain)?);
        }
        if matches!(work, Work::Merge { .. }) {
            let small = |range: &Span<Iova>| ready.table.split(*range, granule);
            ensure!(
                ready.places.ranges.iter().all(small),
                "leaves cannot be split"
            );
        }
        Ok(Some(ready))
    }
}

/// Properties of a table for some kind of work.
#[derive(Clone, Copy)]
struct Setup {
    /// The only size of leaves; all sizes without one.
    page: Option<u64>,
    count: u64,
    /// Tables are warm, and hold this.
    beside: Option<Beside>,
    tracks: bool,
    /// Leaves change their sizes.
    resizes: bool,
    /// Mappings that are worked on stay.
    stays: bool,
}

impl Setup {
    fn of(work: &Work) -> Self {
        let base = Self {
            page: None,
            count: 1,
            beside: Some(Beside::Page),
            tracks: false,
            resizes: false,
            stays: false,
        };
        match *work {
            Work::Map {
                page,
                count,
                beside,
            }
            | Work::Unmap {
                page,
                count,
                beside,
                ..
            } => Self {
                page: Some(page),
                count,
                beside: Some(beside),
                ..base
            },
            Work::MapSeveral { page } | Work::UnmapSeveral { page } => Self {
                page: Some(page),
                ..base
            },
            Work::MapAllocated { page, count }
            | Work::UnmapAllocated { page, count, .. }
            | Work::Cycle { page, count } => Self {
                page: Some(page),
                count,
                beside: None,
                ..base
            },
            Work::MapChosen | Work::UnmapChosen => Self {
                beside: Some(Beside::Half),
                ..base
            },
            Work::Translate { page } => Self {
                page: Some(page),
                count: (1 << 30) / page,
                stays: true,
                ..base
            },
            Work::Harvest { page, .. } => Self {
                page: Some(page),
                count: (1 << 30) / page,
                tracks: true,
                stays: true,
                ..base
            },
            Work::UnmapDirty { page, count } => Self {
                page: Some(page),
                count,
                tracks: true,
                ..base
            },
            Work::Split { page } | Work::Merge { page } => Self {
                page: Some(page),
                resizes: true,
                stays: true,
                beside: None,
                ..base
            },
        }
    }
}

impl<T> Ready<T> {
    /// The mean time of one operation: of `timed` for every range, after `before` and followed by
    /// `after` for every range.
    #[inline(always)]
    fn timed(
        &mut self,
        before: impl Fn(&mut T, Span<Iova>, &[Span<Pa>]) -> bool,
        timed: impl Fn(&mut T, Span<Iova>, &[Span<Pa>]) -> bool,
        after: impl Fn(&mut T, Span<Iova>, &[Span<Pa>]) -> bool,
    ) -> anyhow::Result<f64> {
        let each = |table: &mut T, ranges: &[Span<Iova>], memory: &[Span<Pa>]| {
            let mut well = true;
            for range in ranges {
                well &= timed(table, *range, black_box(memory));
            }
            well
        };
        self.timed_together(before, each, after)
    }

    /// The same where `timed` does the operations for all ranges in one go.
    #[inline(always)]
    fn timed_together(
        &mut self,
        before: impl Fn(&mut T, Span<Iova>, &[Span<Pa>]) -> bool,
        timed: impl Fn(&mut T, &[Span<Iova>], &[Span<Pa>]) -> bool,
        after: impl Fn(&mut T, Span<Iova>, &[Span<Pa>]) -> bool,
    ) -> anyhow::Result<f64> {
        let (ranges, memory) = (&self.places.ranges, [self.memory]);
        let table = &mut self.table;
        let batches = self.batches;
        let (mut sum, mut well) = (0.0, true);
        for _ in 0..batches {
            for range in ranges {
                well &= before(table, *range, &memory);
            }
            sum += time(ranges.len() as u64, || {
                well &= timed(table, black_box(ranges), black_box(&memory));
            });
            for range in ranges {
                well &= after(table, *range, &memory);
            }
        }
        ensure!(well, "an operation was refused");
        Ok(sum / f64::from(batches))
    }
}

impl<F: Format, M: Memory, T: Access<F, M>> Subject for Ours<F, M, T> {
    fn name(&self) -> String {
        format!("dmaspace-iopt, {}", self.name)
    }

    fn sample(&mut self, work: &Work) -> anyhow::Result<Option<f64>> {
        if self.ready.as_ref().is_none_or(|ready| ready.work != *work) {
            // The memory of what was before goes first.
            self.ready = None;
            self.ready = self.prepare(work)?;
        }
        let Some(ready) = &mut self.ready else {
            return Ok(None);
        };
        ready.sample::<F, M>().map(Some)
    }
}

impl<T> Ready<T> {
    fn sample<F: Format, M: Memory>(&mut self) -> anyhow::Result<f64>
    where
        T: Access<F, M>,
    {
        let nothing = |_: &mut T, _: Span<Iova>, _: &[Span<Pa>]| true;
        let map = |t: &mut T, range: Span<Iova>, memory: &[Span<Pa>]| t.map(range.start, memory);
        let unmap = |t: &mut T, range: Span<Iova>, _: &[Span<Pa>]| t.unmap(range, take);
        let discard = |t: &mut T, range: Span<Iova>, _: &[Span<Pa>]| t.clear(range);
        let granule = 1 << F::GRANULE_LOG2;
        let split = |t: &mut T, range: Span<Iova>, _: &[Span<Pa>]| t.split(range, granule);
        let merge = |t: &mut T, range: Span<Iova>, _: &[Span<Pa>]| t.merge(range);
        match self.work {
            Work::Map { .. } | Work::MapAllocated { .. } | Work::MapChosen => {
                self.timed(nothing, map, discard)
            }
            Work::Unmap { runs: false, .. } | Work::UnmapAllocated { runs: false, .. } => {
                self.timed(map, discard, nothing)
            }
            Work::Unmap { .. } | Work::UnmapAllocated { .. } | Work::UnmapChosen => {
                self.timed(map, unmap, nothing)
            }
            Work::MapSeveral { .. } => {
                self.timed_together(nothing, |t, ranges, runs| t.map_each(ranges, runs), discard)
            }
            Work::UnmapSeveral { .. } => {
                self.timed_together(map, |t, ranges, _| t.unmap_each(ranges, take), nothing)
            }
            Work::Cycle { .. } => {
                let cycle = |t: &mut T, range: Span<Iova>, memory: &[Span<Pa>]| {
                    t.map(range.start, memory) && t.unmap(range, take)
                };
                self.timed(nothing, cycle, nothing)
            }
            Work::Translate { .. } => {
                let (table, addresses) = (&self.table, &self.addresses);
                let mut well = true;
                let taken = time(addresses.len() as u64, || {
                    for at in addresses {
                        well &= black_box(table.translate(black_box(*at))).is_some();
                    }
                });
                ensure!(well, "an address is not mapped");
                Ok(taken)
            }
            Work::Harvest { dirty, .. } => {
                let range = *self.places.ranges.first().context("no range")?;
                let pending = self.pending.as_mut().context("no bitmap")?;
                let table = &mut self.table;
                let mut well = !dirty || table.set_dirty(range);
                let taken = time(1, || well &= table.harvest(black_box(range), pending));
                ensure!(well, "the harvest was refused");
                Ok(taken)
            }
            Work::UnmapDirty { .. } => self.timed(
                |t, range, memory| t.map(range.start, memory) && t.set_dirty(range),
                |t, range, _| t.unmap(range, WithDirty(take_dirty)),
                nothing,
            ),
            Work::Split { .. } => self.timed(nothing, split, merge),
            Work::Merge { .. } => self.timed(nothing, merge, split),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
