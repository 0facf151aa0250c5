//! A table, a device that uses it, and what the device must see.

use std::cell::{Cell as Plain, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use iopt::format::{BreakBeforeMake, Entry};
use iopt::walk::{Access, Walker};
use iopt::{
    Arena, Cell, Format, Gather, Interruption, Invalidation, NoRuns, Pending, Prot, Root,
    SharedTable, Table, TableMemory, TableOps as _, WithDirty,
};
use runs::{Iova, Pa, PageSizes, Run, Span};

use super::device::{Device, Stale};
use super::memory::{Memory, Tables, When, any_entry_counts, read_anew, with_stop};

type Mem<C, const LOG2: u32> = &'static Arena<Memory<C>, LOG2>;

/// Both forms of the engine.
pub(crate) enum Either<F: Format, M: TableMemory> {
    Exclusive(Table<F, M>),
    Shared(SharedTable<F, M>),
}

macro_rules! each {
    ($either:expr, $table:ident => $body:expr) => {
        match $either {
            Either::Exclusive($table) => $body,
            Either::Shared(shared) => {
                #[allow(unused_mut, reason = "some operations only read")]
                let mut $table = shared.enter();
                $body
            }
        }
    };
}

pub(crate) struct World<F: Format, C: Cell + 'static, const LOG2: u32> {
    tables: &'static Tables<C, LOG2>,
    pub(crate) table: Either<F, Mem<C, LOG2>>,
    format: F,
    root: Root,
    device: Rc<Device<C, LOG2>>,
    pub(crate) stops: u64,
}

/// Allowed effect of an operation on the pages of its range.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Map,
    Unmap,
    /// Every page leads where it led before, at every moment if the format allows.
    Resize,
    /// Every page leads where it led before, at every moment.
    Keep,
}

impl<F: Format, C: Cell + Default + 'static, const LOG2: u32> World<F, C, LOG2> {
    pub(crate) fn new(format: F, sizes: PageSizes, shared: bool, seed: u64) -> Self {
        let tables = Tables::new(64, 1 << (format.output_bits() - 1).min(46));
        let table = Table::with_page_sizes(format, &tables.0, sizes).unwrap();
        let root = table.root();
        let walker = Walker::new(root)
            .with_updates(true)
            .with_hardware_accessed(true)
            .with_hardware_dirty(true);
        Self {
            tables,
            table: if shared {
                Either::Shared(SharedTable::new(table))
            } else {
                Either::Exclusive(table)
            },
            format,
            root,
            device: Rc::new(Device {
                tables,
                walker,
                writes: format.keeps_dirty(),
                cache: RefCell::default(),
                written: RefCell::default(),
                random: RefCell::new(fastrand::Rng::with_seed(seed)),
                idle: Plain::new(false),
            }),
            stops: 0,
        }
    }

    /// Pages to look at: all of what is near `range`'s ends, and some between and beside.
    fn pages(&self, range: Span<Iova>) -> Vec<u64> {
        let page = 1u64 << F::GRANULE_LOG2;
        let mut pages = BTreeSet::new();
        for near in [range.start, range.last() & !(page - 1)] {
            for n in 0..24 {
                pages.insert(near.wrapping_add(n * page).wrapping_sub(12 * page));
            }
        }
        let step = (range.len / 40).max(page) & !(page - 1);
        for n in 0..60u64 {
            pages.insert(range.start.wrapping_add(n * step).wrapping_sub(10 * step));
        }
        let aperture = self.format.aperture();
        pages.retain(|iova| aperture.covers(&Span::new(*iova, page)));
        pages.into_iter().collect()
    }

    /// Does `operation`, which makes of every page of `range` what `new` says.
    fn step(
        &mut self,
        range: Span<Iova>,
        kind: Kind,
        new: impl Fn(u64) -> Option<u64>,
        operation: impl FnOnce(&mut Either<F, Mem<C, LOG2>>, &dyn Fn()),
    ) {
        let device = &self.device;
        // Target of each page before this operation, and after it.
        let expected: Vec<(u64, Option<u64>, Option<u64>)> = self
            .pages(range)
            .into_iter()
            .map(|iova| {
                let old = device.seen(iova);
                let new = match kind {
                    Kind::Resize | Kind::Keep => old,
                    _ if range.contains(iova) => new(iova),
                    _ => old,
                };
                (iova, old, new)
            })
            .collect();
        // The unit knows the tables as they are now.
        for &(iova, old, _) in &expected {
            assert_eq!(device.seen_with_cache(iova), old, "{iova:#x} before");
        }
        let broken =
            kind == Kind::Resize && self.format.break_before_make() != BreakBeforeMake::NotNeeded;
        let stops = Rc::new(Plain::new(0u64));
        let stop = {
            let (device, expected, stops) =
                (Rc::clone(device), expected.clone(), Rc::clone(&stops));
            move |when| {
                let When::After { read } = when else {
                    if !device.idle.get() && device.random(4) == 0 {
                        device.write(expected[device.random(expected.len())].0);
                    }
                    // Now and then to all of them, also to the one that is about to change.
                    if !device.idle.get() && device.random(40) == 0 {
                        expected.iter().for_each(|(iova, ..)| device.write(*iova));
                    }
                    return;
                };
                stops.set(stops.get() + 1);
                if read {
                    read_anew();
                }
                for &(iova, old, new) in expected.iter().filter(|_| read) {
                    let now = device.seen(iova);
                    let fits =
                        |now: Option<u64>| now == old || now == new || broken && now.is_none();
                    assert!(fits(now), "{iova:#x}: {now:x?}, not {old:x?} or {new:x?}");
                    if matches!(kind, Kind::Resize | Kind::Keep) {
                        let now = device.seen_with_cache(iova);
                        assert!(
                            fits(now),
                            "{iova:#x}: {now:x?} by a cached table, not {old:x?}"
                        );
                    }
                }
                // It writes to a page or two.
                for _ in 0..2 {
                    if !device.idle.get() && device.random(3) == 0 {
                        device.write(expected[device.random(expected.len())].0);
                    }
                }
            }
        };
        let flushed = {
            let device = Rc::clone(device);
            move || {
                device.cache.borrow_mut().0.clear();
                any_entry_counts();
            }
        };
        let table = &mut self.table;
        with_stop(stop, || operation(table, &flushed));
        flushed();
        for (iova, _, new) in expected {
            assert_eq!(self.device.seen(iova), new, "{iova:#x} afterwards");
        }
        if kind == Kind::Unmap {
            let mut written = self.device.written.borrow_mut();
            written.retain(|iova| !range.contains(*iova));
        }
        self.stops += stops.get();
        self.nothing_is_lost();
    }

    /// Every page that the device has written to lies in a leaf that says so.
    fn nothing_is_lost(&self) {
        for &iova in self.device.written.borrow().iter() {
            if self.device.seen(iova).is_some() {
                assert!(self.is_dirty(iova), "{iova:#x} was written to and is clean");
            }
        }
    }

    fn is_dirty(&self, iova: u64) -> bool {
        is_dirty(self.tables, &self.format, self.root, iova)
    }

    pub(crate) fn leaves(&self, range: Span<Iova>) -> Vec<u64> {
        let mut sizes = Vec::new();
        let mut at = range.start;
        while range.contains(at) {
            let leaf = each!(&self.table, table => table.leaf_at(at)).unwrap();
            sizes.push(leaf.run.len);
            at = leaf.run.iova.wrapping_add(leaf.run.len);
        }
        sizes
    }

    pub(crate) fn map(&mut self, iova: u64, runs: &[Span<Pa>]) {
        let len = runs.iter().map(|run| run.len).sum();
        let new = |at: u64| {
            let mut offset = at - iova;
            for run in runs {
                if offset < run.len {
                    return Some(run.start + offset);
                }
                offset -= run.len;
            }
            None
        };
        self.step(Span::new(iova, len), Kind::Map, new, |table, _| {
            each!(table, table => table.map(iova, runs, Prot::RW).unwrap());
        });
    }

    pub(crate) fn unmap(&mut self, range: Span<Iova>) {
        self.step(
            range,
            Kind::Unmap,
            |_| None,
            |table, _| {
                let mut gather = Gather::new();
                each!(table, table => {
                    table.unmap_mapped(range, &mut gather, &mut NoRuns).unwrap();
                    // Reused at once, with all that is left in them, by what is mapped next.
                    table.reclaim(gather.never_walked());
                });
            },
        );
    }

    pub(crate) fn split(&mut self, range: Span<Iova>, size: u64) {
        self.step(range, Kind::Resize, |_| None, |table, flushed| {
            let flush = |_: &Invalidation| {
                flushed();
                Ok::<_, ()>(())
            };
            let mut gather = Gather::new();
            let allowed = Interruption::Allowed;
            each!(table, table => table.split(range, size, allowed, &mut gather, flush).unwrap());
        });
        assert!(self.leaves(range).iter().all(|leaf| *leaf <= size));
    }

    pub(crate) fn cut(&mut self, around: Span<Iova>, at: u64) {
        self.step(
            around,
            Kind::Resize,
            |_| None,
            |table, flushed| {
                let flush = |_: &Invalidation| {
                    flushed();
                    Ok::<_, ()>(())
                };
                let mut gather = Gather::new();
                let allowed = Interruption::Allowed;
                each!(table, table => table.cut(at, allowed, &mut gather, flush).unwrap());
            },
        );
        let leaf = each!(&self.table, table => table.leaf_at(at)).unwrap();
        assert_eq!(leaf.run.iova, at);
    }

    pub(crate) fn merge(&mut self, range: Span<Iova>) {
        self.step(
            range,
            Kind::Resize,
            |_| None,
            |table, flushed| {
                let flush = |_: &Invalidation| {
                    flushed();
                    Ok::<_, ()>(())
                };
                let mut gather = Gather::new();
                let allowed = Interruption::Allowed;
                each!(table, table => table.merge(range, allowed, &mut gather, flush).unwrap());
            },
        );
    }

    /// The device writes nothing by itself from now on.
    pub(crate) fn idle(&self) {
        self.device.idle.set(true);
    }

    /// Merges clean leaves; before each flush the device writes to `iova` through the tables that it
    /// has cached. Says whether the leaf is dirty before and after.
    pub(crate) fn merge_while_written(
        &mut self,
        range: Span<Iova>,
        iova: Option<u64>,
    ) -> (bool, bool) {
        let before = self.is_dirty(range.start);
        let device = Rc::clone(&self.device);
        self.step(
            range,
            Kind::Resize,
            |_| None,
            |table, flushed| {
                let flush = |_: &Invalidation| {
                    if let Some(iova) = iova {
                        // The stops in between look into the cache, too.
                        let mut cache = Stale(device.cache.borrow().0.clone());
                        let walker = &device.walker;
                        let written = walker.walk(device.tables, iova, Access::Write, &mut cache);
                        if written.is_ok() && device.writes {
                            device.written.borrow_mut().insert(iova);
                        }
                    }
                    flushed();
                    Ok::<_, ()>(())
                };
                let mut gather = Gather::new();
                let allowed = Interruption::Allowed;
                each!(table, table => table.merge(range, allowed, &mut gather, flush).unwrap());
            },
        );
        (before, self.is_dirty(range.start))
    }

    /// Merges, with a flush that fails. Says whether the leaf is dirty.
    pub(crate) fn merge_without_flush(&mut self, range: Span<Iova>) -> bool {
        let mut gather = Gather::new();
        let flush = |_: &Invalidation| Err("no answer");
        let allowed = Interruption::Allowed;
        let result = each!(&mut self.table, table => {
            table.merge(range, allowed, &mut gather, flush)
        });
        assert!(result.is_err() && !gather.is_empty());
        self.device.cache.borrow_mut().0.clear();
        each!(&mut self.table, table => table.reclaim(gather.never_walked()));
        self.is_dirty(range.start)
    }

    pub(crate) fn track_dirty(&mut self) {
        match &mut self.table {
            Either::Exclusive(table) => table.track_dirty(true).unwrap(),
            Either::Shared(table) => table.track_dirty(true).unwrap(),
        }
    }

    /// Every page that the device has written to is in this harvest, or is dirty after it.
    pub(crate) fn harvest(&mut self, range: Span<Iova>) {
        let device = Rc::clone(&self.device);
        let (tables, format, root) = (self.tables, self.format, self.root);
        let page = 1u64 << F::GRANULE_LOG2;
        self.step(
            range,
            Kind::Keep,
            |_| None,
            |table, flushed| {
                let words = (range.len / page).div_ceil(64) as usize + 1;
                let mut pending = Pending::new(vec![0; words], range, page).unwrap();
                each!(table, table => table.harvest(range, &mut pending).unwrap());
                flushed();
                let shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
                let runs: Vec<Span<Iova>> = shown.runs().collect();
                shown.acknowledge();
                let mut written = device.written.borrow_mut();
                written.retain(|iova| {
                    let told = runs.iter().any(|run| run.contains(*iova));
                    !told || is_dirty(tables, &format, root, *iova)
                });
            },
        );
    }

    /// Every page that the device has written to is reported as dirty by the unmap.
    pub(crate) fn unmap_tracked(&mut self, range: Span<Iova>) {
        let device = Rc::clone(&self.device);
        self.step(
            range,
            Kind::Unmap,
            |_| None,
            |table, _| {
                let mut runs: Vec<(Run, bool)> = Vec::new();
                let mut gather = Gather::new();
                each!(table, table => {
                    let mut sink = WithDirty(|run, dirty| runs.push((run, dirty)));
                    table.unmap_mapped(range, &mut gather, &mut sink).unwrap();
                    table.reclaim(gather.never_walked());
                });
                for &iova in device
                    .written
                    .borrow()
                    .iter()
                    .filter(|at| range.contains(**at))
                {
                    let told = runs
                        .iter()
                        .find(|(run, _)| run.input().contains(iova))
                        .unwrap();
                    assert!(told.1, "{iova:#x} was written to and is told as clean");
                }
            },
        );
    }

    pub(crate) fn protect(&mut self, range: Span<Iova>, prot: Prot) {
        self.step(
            range,
            Kind::Keep,
            |_| None,
            |table, flushed| {
                let mut gather = Gather::new();
                each!(table, table => table.protect(range, prot, &mut gather).unwrap());
                flushed();
                each!(table, table => table.reclaim(gather.never_walked()));
            },
        );
    }

    /// Nothing is left but the root.
    pub(crate) fn finish(self) -> u64 {
        let table = match self.table {
            Either::Exclusive(table) => table,
            Either::Shared(table) => {
                let mut gather = Gather::new();
                for all in self.format.aperture().spans() {
                    table
                        .enter()
                        .give_back_empty_tables(all, &mut gather)
                        .unwrap();
                }
                table.reclaim(gather.never_walked());
                table.into_inner()
            }
        };
        let root = self.format.entries(usize::from(self.root.levels) - 1) * F::ENTRY_BYTES;
        let root = (root as u64).div_ceil(1 << LOG2);
        assert_eq!(self.tables.0.in_use(), root);
        let (gather, memory) = table.tear_down();
        memory.reclaim(gather.never_walked().into_tables());
        assert_eq!(self.tables.0.in_use(), 0);
        self.stops
    }
}

/// True when an entry of the leaf for `iova` is dirty.
fn is_dirty<F: Format, C: Cell + Default, const LOG2: u32>(
    tables: &Tables<C, LOG2>,
    format: &F,
    root: Root,
    iova: u64,
) -> bool {
    let aperture = format.aperture();
    let at = if aperture.bits >= 64 {
        iova
    } else {
        iova & ((1 << aperture.bits) - 1)
    };
    let mut table = root.address;
    for level in (0..usize::from(root.levels)).rev() {
        let entries = format.entries(level);
        let index = (at >> F::shift(level)) as usize & (entries - 1);
        let word = |index: usize| {
            let address = table + (index * F::ENTRY_BYTES) as u64;
            tables.0.read(address).unwrap()
        };
        match F::decode(level, word(index)) {
            Entry::Table(below) => table = below,
            Entry::Leaf { log2, .. } => {
                let group = 1usize << (log2 - F::shift(level));
                let first = index & !(group - 1);
                return (first..first + group).any(|index| F::is_dirty(word(index)));
            }
            Entry::Empty => return false,
        }
    }
    false
}
