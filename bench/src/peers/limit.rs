//! The limit: loops that store the same entries into as many cells as an operation writes, and
//! nothing else. No tree, no descent, no counts.
//!
//! The cells lie as the tables of an operation do, table by table ([`places`](crate::peers::places)), so that
//! the caches see the same set of lines. Mapping stores entries; unmapping reads and zeroes them; harvesting
//! reads all, and clears dirty bits; so does unmapping with dirty bits: it would exchange clean entries,
//! since hardware may set the bit between a load and a store, but all pages are dirty; splitting fills a
//! table and stores its link, merging reads one and stores a leaf.
//!
//! Stores are relaxed ones of an entry's size, as a linked table demands them.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicU64};

use anyhow::{Result, ensure};

use crate::peers::clock::time;
use crate::peers::memory::{DIRT, ENTRIES, PAGE};
use crate::peers::peer::{BATCHES, LONG, Shape};
use crate::peers::places::Geometry;
use crate::peers::work::{Subject, Work};

/// Bits of an entry beside its address.
const FLAGS: u64 = 0b111;
/// The dirty bit.
const DIRTY: u64 = 1 << 6;

/// A cell of 8 bytes, or of 4, as an entry of ARMv7 is.
pub trait Word: iopt::Cell + Sized + 'static {
    /// One that was used.
    fn dirty() -> Self;
}

macro_rules! word {
    ($atomic:ty, $int:ty) => {
        impl Word for $atomic {
            fn dirty() -> Self {
                Self::new(DIRT as $int)
            }
        }
    };
}
word!(AtomicU64, u64);
word!(AtomicU32, u32);

/// The loop over cells.
pub struct Limit<C> {
    geometry: Geometry,
    ready: Option<Ready<C>>,
}

/// State prepared for one kind of work.
struct Ready<C> {
    work: Work,
    /// The cells, from `skip` on: that is where a page begins.
    all: Box<[C]>,
    skip: usize,
    /// Ranges by operation: the first cell and the number of them.
    ranges: Vec<(usize, usize)>,
    pa: u64,
    step: u64,
    batches: u32,
}

/// The loop, as a subject, beside tables of this geometry, with cells of their entries' size.
pub fn beside(geometry: &Geometry) -> Box<dyn Subject> {
    if geometry.entry_bytes == 4 {
        Box::new(Limit::<AtomicU32>::new(geometry.clone()))
    } else {
        Box::new(Limit::<AtomicU64>::new(geometry.clone()))
    }
}

impl<C> Limit<C> {
    const fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            ready: None,
        }
    }
}

impl<C: Word> Subject for Limit<C> {
    fn name(&self) -> String {
        "stores".to_owned()
    }

    fn sample(&mut self, work: &Work) -> Result<Option<f64>> {
        // A translation takes a walk, and tables that go need not be read.
        let offered = !matches!(
            work,
            Work::Translate { .. } | Work::UnmapAllocated { runs: false, .. }
        );
        if !offered {
            return Ok(None);
        }
        if self.ready.as_ref().is_none_or(|ready| ready.work != *work) {
            self.ready = None;
            self.ready = Ready::prepare(work, &self.geometry);
        }
        let Some(ready) = &mut self.ready else {
            return Ok(None);
        };
        let taken = match work {
            Work::Map { .. }
            | Work::MapSeveral { .. }
            | Work::MapAllocated { .. }
            | Work::MapChosen => ready.timed(Ready::zero, Ready::store, Ready::zero),
            Work::Unmap { .. }
            | Work::UnmapSeveral { .. }
            | Work::UnmapAllocated { .. }
            | Work::UnmapChosen => ready.timed(Ready::store, Ready::take, |_, _| true),
            Work::Cycle { .. } => ready.timed(
                |_, _| true,
                |ready, range| ready.store(range) && ready.take(range),
                |_, _| true,
            ),
            Work::UnmapDirty { .. } => ready.timed(
                |ready, range| ready.mark(range, DIRTY),
                Ready::take_dirty,
                |_, _| true,
            ),
            Work::Harvest { dirty, .. } => {
                let bits = if *dirty { DIRTY } else { 0 };
                ready.timed(
                    move |ready, range| ready.mark(range, bits),
                    move |ready, range| ready.harvest(range, bits),
                    |_, _| true,
                )
            }
            Work::Split { .. } => ready.timed(|_, _| true, Ready::split, |_, _| true),
            Work::Merge { .. } => ready.timed(Ready::split, Ready::merge, |_, _| true),
            Work::Translate { .. } => return Ok(None),
        }?;
        Ok(Some(taken))
    }
}

impl<C: Word> Ready<C> {
    /// Cells for some work; `None` where these tables have no room for it.
    fn prepare(work: &Work, geometry: &Geometry) -> Option<Self> {
        let shape = Shape::of(work, geometry)?;
        let places = shape.places;
        let table = geometry.table(shape.page);
        let base = places.ranges.first()?.start & !(table - 1);
        let mut step = shape.page;
        let mut ranges: Vec<(usize, usize)> = (places.ranges.iter())
            .map(|range| (range.start - base, shape.count))
            .map(|(at, count)| ((at / step) as usize, count as usize))
            .collect();
        if matches!(work, Work::Split { .. } | Work::Merge { .. }) {
            // A table each, behind the cells of their links.
            let level = geometry.level(shape.page).checked_sub(1)?;
            let lower = geometry.levels.get(level)?.0;
            let count = (shape.page >> lower) as usize;
            let links = ranges.len().next_multiple_of(ENTRIES);
            for (n, range) in ranges.iter_mut().enumerate() {
                *range = (links + n * count.next_multiple_of(ENTRIES), count);
            }
            step = 1 << lower;
        }
        let cells = ranges.iter().map(|(first, count)| first + count).max()?;
        // Up to a page more, since memory begins anywhere.
        let more = PAGE as usize / C::BYTES;
        let all: Box<[C]> = (0..cells + more).map(|_| C::dirty()).collect();
        let skip = all.as_ptr().align_offset(PAGE as usize).min(more);
        Some(Self {
            work: *work,
            all,
            skip,
            ranges,
            pa: places.pa,
            step,
            batches: if shape.count <= LONG { BATCHES } else { 1 },
        })
    }

    /// The mean time of one operation: of `timed` for every range, after `before` and followed by
    /// `after` for every range.
    #[inline(always)]
    fn timed(
        &mut self,
        before: impl Fn(&mut Self, (usize, usize)) -> bool,
        timed: impl Fn(&mut Self, (usize, usize)) -> bool,
        after: impl Fn(&mut Self, (usize, usize)) -> bool,
    ) -> Result<f64> {
        let ranges = std::mem::take(&mut self.ranges);
        let (mut sum, mut well) = (0.0, true);
        for _ in 0..self.batches {
            for range in &ranges {
                well &= before(self, *range);
            }
            let batch = ranges.len() as u64;
            sum += time(batch, || {
                for range in black_box(&ranges) {
                    well &= timed(self, *range);
                }
            });
            for range in &ranges {
                well &= after(self, *range);
            }
        }
        self.ranges = ranges;
        ensure!(well, "{:?}: cells do not hold what they should", self.work);
        Ok(sum / f64::from(self.batches))
    }

    /// The cell with this number.
    #[inline(always)]
    fn cell(&self, n: usize) -> &C {
        &self.all[self.skip + n]
    }

    /// The cells of a range, table by table.
    #[inline(always)]
    fn cells(&self, range: (usize, usize)) -> impl Iterator<Item = &[C]> {
        let cells = &self.all[self.skip..];
        parts(range).map(move |(from, to)| &cells[from..to])
    }

    /// Stores the entries of a range.
    #[inline(always)]
    fn store(&mut self, range: (usize, usize)) -> bool {
        // The distance is a constant, as it is for code that knows the level.
        match self.step {
            0x1000 => self.store_by(range, 0x1000),
            0x4000 => self.store_by(range, 0x4000),
            0x1_0000 => self.store_by(range, 0x1_0000),
            0x10_0000 => self.store_by(range, 0x10_0000),
            0x20_0000 => self.store_by(range, 0x20_0000),
            0x200_0000 => self.store_by(range, 0x200_0000),
            0x2000_0000 => self.store_by(range, 0x2000_0000),
            step => self.store_by(range, step),
        }
    }

    #[inline(always)]
    fn store_by(&mut self, range: (usize, usize), step: u64) -> bool {
        let mut at = black_box(self.pa) | FLAGS;
        if range.1 == 1 {
            // Without any loop.
            self.cell(range.0).set(at);
            return true;
        }
        for cells in self.cells(range) {
            unrolled(cells, |cell, n| cell.set(at + n * step));
            at += cells.len() as u64 * step;
        }
        true
    }

    /// Reads and zeroes the entries of a range.
    #[inline(always)]
    fn take(&mut self, range: (usize, usize)) -> bool {
        let mut found = 0;
        if range.1 == 1 {
            let cell = self.cell(range.0);
            found = cell.get();
            cell.set(0);
        } else {
            for cells in self.cells(range) {
                unrolled(cells, |cell, _| {
                    found |= cell.get();
                    cell.set(0);
                });
            }
        }
        black_box(found) & FLAGS == FLAGS
    }

    /// Reads and zeroes the entries of a range, all of which must be dirty; what is clean is exchanged.
    fn take_dirty(&mut self, range: (usize, usize)) -> bool {
        let mut found = DIRTY;
        for cells in self.cells(range) {
            unrolled(cells, |cell, _| {
                let entry = cell.get();
                if entry & DIRTY != 0 {
                    cell.set(0);
                    found &= entry;
                } else {
                    found &= cell.exchange(0);
                }
            });
        }
        black_box(found) == DIRTY
    }

    /// Zeroes the entries of a range.
    fn zero(&mut self, range: (usize, usize)) -> bool {
        for cells in self.cells(range) {
            cells.iter().for_each(|cell| cell.set(0));
        }
        true
    }

    /// Stores entries of a range with `bits`.
    fn mark(&mut self, range: (usize, usize), bits: u64) -> bool {
        let stored = self.store(range);
        for cells in self.cells(range) {
            for cell in cells {
                cell.set(cell.get() | bits);
            }
        }
        stored
    }

    /// Reads the entries of a range and clears the dirty bit where it is set; all of them must have
    /// `bits` of it.
    fn harvest(&mut self, range: (usize, usize), bits: u64) -> bool {
        let mut dirty = 0;
        for cells in self.cells(range) {
            unrolled(cells, |cell, _| {
                let entry = cell.get();
                if entry & DIRTY != 0 {
                    cell.set(entry & !DIRTY);
                    dirty += 1;
                }
            });
        }
        black_box(dirty) == if bits == 0 { 0 } else { range.1 }
    }

    /// The cell of the link to the table of a range.
    fn link(&self, range: (usize, usize)) -> &C {
        self.cell(range.0 / ENTRIES % ENTRIES)
    }

    /// Fills a table, then stores its link.
    #[inline(always)]
    fn split(&mut self, range: (usize, usize)) -> bool {
        let stored = self.store(range);
        self.link(range).set(range.0 as u64 | FLAGS);
        stored
    }

    /// Reads a table whose entries follow each other, then stores a leaf.
    #[inline(always)]
    fn merge(&mut self, range: (usize, usize)) -> bool {
        let first = black_box(self.pa) | FLAGS;
        let (mut differ, step) = (0, self.step);
        for cells in self.cells(range) {
            unrolled(cells, |cell, n| {
                differ |= cell.get() ^ (first + n * step);
            });
        }
        self.link(range).set(first);
        differ == 0
    }
}

/// Cells that follow each other, table by table: from where to where.
#[inline(always)]
fn parts((first, count): (usize, usize)) -> impl Iterator<Item = (usize, usize)> {
    let end = first + count;
    (first / ENTRIES..end.div_ceil(ENTRIES)).map(move |table| {
        let start = table * ENTRIES;
        (first.max(start), end.min(start + ENTRIES))
    })
}

/// Does something with every cell and its number, eight to a turn: the compiler leaves loops of
/// atomics as they are.
#[inline(always)]
fn unrolled<C>(cells: &[C], mut what: impl FnMut(&C, u64)) {
    let eights = cells.chunks_exact(8);
    let rest = eights.remainder();
    let mut at = 0;
    for eight in eights {
        for (cell, n) in eight.iter().zip(0..) {
            what(cell, at + n);
        }
        at += 8;
    }
    for (cell, n) in rest.iter().zip(at..) {
        what(cell, n);
    }
}

#[cfg(test)]
mod tests;
