//! Harvest: read and clear what the device has written to.
//!
//! # Protocol
//!
//! One pass over the range. Empty subtrees are skipped, and so are stretches of clean entries, which
//! are only read: a clean entry is never stored to, since each store would take its cache line from
//! the unit that walks it. A dirty leaf is cleaned and noted in the [`Pending`].
//!
//! Cleaning is a plain store where hardware has nothing left to set, and a compare-and-exchange
//! otherwise: see [`dirty`](super::dirty). A group is dirty when one of its entries is; all of them
//! are cleaned, since the unit may have cached any of them.
//!
//! A harvest is not a snapshot: a leaf that becomes dirty behind the pass is left for the next
//! harvest. In the shared form no other operation changes the range meanwhile, as ever.

use core::slice;

use runs::{Iova, Joiner, Span};

use super::dirty::{is_settled, some_dirty};
use super::entries::{Part, decode};
use super::{L, Level, Table, at_level, below};
use crate::cell::{Cell, Series};
use crate::error::DirtyError;
use crate::format::{Aperture, Entry, Format};
use crate::memory::TableMemory;
use crate::pending::Pending;
use crate::prot::Prot;

/// Receives dirty leaves.
trait Visitor {
    /// The leaves are cleaned.
    fn cleans(&self) -> bool;

    /// A dirty leaf at `level`, or several in a row.
    fn leaf(&mut self, leaf: Span<Iova>, level: usize);
}

/// State of a pass over dirty leaves.
struct Pass<'a, T> {
    visitor: &'a mut T,
    aperture: Aperture,
    /// Bytes of leaves that were dirty; at most the largest number.
    bytes: u64,
}

impl<T> Pass<'_, T> {
    /// Leaves at the ends of a range count whole, so that all of 2^64 bytes may come together.
    #[inline(always)]
    fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// Moves dirty leaves into a bitmap, as runs.
struct Harvest<'a, W> {
    pending: &'a mut Pending<W>,
    joiner: Joiner<Span<Iova>>,
    /// The levels of the leaves so far.
    levels: u32,
}

impl<W: AsRef<[u64]> + AsMut<[u64]>> Visitor for Harvest<'_, W> {
    #[inline(always)]
    fn cleans(&self) -> bool {
        true
    }

    #[inline]
    fn leaf(&mut self, leaf: Span<Iova>, level: usize) {
        self.levels |= 1 << level;
        if let Some(run) = self.joiner.push(leaf) {
            self.pending.harvested(run, self.levels);
        }
    }
}

/// Tells dirty leaves as runs.
struct Tell<'a, T> {
    each: &'a mut T,
    cleans: bool,
    joiner: Joiner<Span<Iova>>,
}

impl<T: FnMut(Span<Iova>)> Visitor for Tell<'_, T> {
    #[inline(always)]
    fn cleans(&self) -> bool {
        self.cleans
    }

    #[inline]
    fn leaf(&mut self, leaf: Span<Iova>, _level: usize) {
        if let Some(run) = self.joiner.push(leaf) {
            (self.each)(run);
        }
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Calls `each` for what the device has written to in `range`, as runs in order; everything
    /// stays as it is, for the next harvest. Leaves at the ends count whole. Returns the bytes, `u64::MAX`
    /// if they are all of 2^64.
    ///
    /// The device may go on writing to dirty pages. Pages that are copied now must be copied again.
    pub fn peek_dirty(
        &self,
        range: Span<Iova>,
        each: impl FnMut(Span<Iova>),
    ) -> Result<u64, DirtyError> {
        self.visit_dirty(range, false, each)
    }

    /// Calls `each` for dirty leaves, which are clean afterwards if it `cleans` them.
    pub(super) fn visit_dirty(
        &self,
        range: Span<Iova>,
        cleans: bool,
        mut each: impl FnMut(Span<Iova>),
    ) -> Result<u64, DirtyError> {
        let at = self.check_dirty(range)?;
        let joiner = Joiner::new();
        let mut tell = Tell {
            each: &mut each,
            cleans,
            joiner,
        };
        let bytes = self.visit(at, range.len, &mut tell);
        if let Some(run) = tell.joiner.finish() {
            each(run);
        }
        self.intact()?;
        Ok(bytes)
    }

    /// Marks the leaves of `range` as hardware does when the device writes to every page of it:
    /// accessed and dirty, where writing is allowed, and in a group those entries that translate
    /// these pages. For simulations and tests. Returns the bytes of the entries, `u64::MAX` if they are
    /// all of 2^64.
    pub fn set_dirty(&self, range: Span<Iova>) -> Result<u64, DirtyError> {
        let at = self.check_dirty(range)?;
        let bytes = self.mark(self.begin().table(), at, range.len);
        self.intact()?;
        Ok(bytes)
    }

    /// Checks a range of a table that keeps dirty state, and strips it.
    fn check_dirty(&self, range: Span<Iova>) -> Result<u64, DirtyError> {
        self.check_kept()?;
        let at = self.check_range(range)?;
        self.intact()?;
        Ok(at)
    }

    /// See [`TableOps::harvest`](super::TableOps::harvest).
    pub(super) fn harvest_range<W: AsRef<[u64]> + AsMut<[u64]>>(
        &self,
        range: Span<Iova>,
        pending: &mut Pending<W>,
    ) -> Result<u64, DirtyError> {
        let at = self.check_dirty(range)?;
        if !self.tracks_dirty() {
            return Err(DirtyError::NotTracked);
        }
        if !pending.span().covers(&range) {
            return Err(DirtyError::OutsidePending {
                range,
                pending: pending.span(),
            });
        }
        for end in [range.start, range.last()] {
            if let Some(leaf) = self.leaf_at(end) {
                if !range.covers(&leaf.run.input()) {
                    let leaf = leaf.run;
                    return Err(DirtyError::InsideLeaf { range, leaf });
                }
            }
        }
        let mut harvest = Harvest {
            pending,
            joiner: Joiner::new(),
            levels: 0,
        };
        let bytes = self.visit(at, range.len, &mut harvest);
        if let Some(run) = harvest.joiner.finish() {
            harvest.pending.harvested(run, harvest.levels);
        }
        self.intact()?;
        Ok(bytes)
    }

    fn visit<T: Visitor>(&self, at: u64, len: u64, visitor: &mut T) -> u64 {
        let mut pass = Pass {
            visitor,
            aperture: self.aperture(),
            bytes: 0,
        };
        let (root, level) = self.begin().table();
        at_level!(level, v => self.visit_below(v, root, at, len, &mut pass));
        pass.bytes
    }

    /// Visits the dirty leaves of `[at, at + todo)` in `table` and below.
    fn visit_below<T: Visitor>(
        &self,
        v: impl Level,
        table: u64,
        at: u64,
        todo: u64,
        pass: &mut Pass<'_, T>,
    ) {
        let mut entries = self.entries_in(table, v.n(), at, todo);
        loop {
            if v.n() == 0 {
                match first_dirty::<F, _>(entries.rest()) {
                    Some(clean) => entries.pass_next(clean),
                    None => break,
                }
            }
            let Some(part) = entries.next() else { break };
            let word = part.word();
            match decode::<F>(v.n(), word) {
                Entry::Table(below) => {
                    below!(v, v => self.visit_below(v, below, part.at(), part.len(), pass));
                }
                Entry::Leaf { .. } if F::is_dirty(word) => {
                    entries.pass(if v.n() == 0 {
                        self.visit_pages(table, &part, pass)
                    } else {
                        self.visit_leaf(v, table, &part, word, pass)
                    });
                }
                _ => {}
            }
        }
    }

    /// Visits the dirty leaves from that of `part` on, up to one that is clean, or a group. Returns
    /// how many entries that are.
    #[inline(always)]
    fn visit_pages<T: Visitor>(
        &self,
        table: u64,
        part: &Part<'_, F, M::Cell>,
        pass: &mut Pass<'_, T>,
    ) -> usize {
        let own = F::shift(0);
        let cells = part.row();
        let mut end = 0;
        let mut last = 0;
        while let Some(rest) = cells.get(end..).filter(|rest| !rest.is_empty()) {
            last = rest[0].get();
            let page = matches!(F::decode(0, last), Entry::Leaf { log2, .. } if log2 == own);
            if !page || !F::is_dirty(last) {
                break;
            }
            if !is_settled::<F>(last) {
                if pass.visitor.cleans() {
                    clean::<F, _>(&rest[0]);
                }
                end += 1;
                continue;
            }
            // Pages that go on as this one, in which hardware has nothing left to set either.
            let mut series = Series {
                next: last,
                stride: F::stride(own),
                ignored: 0,
            };
            let count = M::Cell::match_series(rest, series).max(1);
            if pass.visitor.cleans() {
                series.next = F::cleaned(last);
                M::Cell::set_series(super::part(rest, 0, count), series);
            }
            end += count;
        }
        if end == 0 {
            return self.visit_leaf(L::<0>, table, part, last, pass);
        }
        if pass.visitor.cleans() {
            self.memory.written(cells.get(..end).unwrap_or(&[]));
        }
        let len = (end as u64) << own;
        pass.add(len);
        let leaves = Span::new(pass.aperture.extend(part.base()), len);
        pass.visitor.leaf(leaves, 0);
        end
    }

    /// Visits the dirty leaf with the entry `word` that `part` is, or is one of. Returns how many
    /// entries it has from there on.
    #[inline]
    fn visit_leaf<T: Visitor>(
        &self,
        v: impl Level,
        table: u64,
        part: &Part<'_, F, M::Cell>,
        word: u64,
        pass: &mut Pass<'_, T>,
    ) -> usize {
        let own = F::shift(v.n());
        let log2 = match F::decode(v.n(), word) {
            Entry::Leaf { log2, .. } if !F::DIRTY_BY_ENTRY => log2.max(own),
            _ => own,
        };
        let count = 1usize << (log2 - own);
        let nth = self.index(v.n(), part.base()) & (count - 1);
        let rest = (1u64 << log2) - 1;
        let first = part.base() & !rest;
        if pass.visitor.cleans() {
            // Entries before this one may have been clean.
            let group = match count {
                1 => slice::from_ref(part.cell),
                _ => {
                    let begin = self.index(v.n(), first);
                    super::part(self.cells(table, v.n()), begin, count)
                }
            };
            group.iter().for_each(clean::<F, _>);
            self.memory.written(group);
        }
        pass.add(rest + 1);
        let leaf = Span::new(pass.aperture.extend(first), rest + 1);
        pass.visitor.leaf(leaf, v.n());
        count - nth
    }

    /// Sets the dirty bit in the entries of `[at, at + todo)` that can be written through.
    fn mark(&self, (table, level): (u64, usize), at: u64, todo: u64) -> u64 {
        let mut bytes = 0u64;
        for part in self.entries_in(table, level, at, todo) {
            let word = part.word();
            bytes = bytes.saturating_add(match decode::<F>(level, word) {
                Entry::Table(below) => self.mark((below, level - 1), part.at(), part.len()),
                Entry::Leaf { .. } if self.format.prot(level, word).contains(Prot::WRITE) => {
                    let written = write::<F, _>(part.cell, word);
                    if written { 1 << F::shift(level) } else { 0 }
                }
                Entry::Leaf { .. } | Entry::Empty => 0,
            });
        }
        bytes
    }
}

/// How many entries are clean before the first dirty one.
#[inline(always)]
fn first_dirty<F: Format, C: Cell>(cells: &[C]) -> Option<usize> {
    if cells.first().is_some_and(|cell| F::is_dirty(cell.get())) {
        return Some(0);
    }
    // Most often all are clean: one decision for many of them.
    let mut clean = 0;
    for some in cells.chunks(64) {
        if some_dirty::<F, C>(some) {
            break;
        }
        clean += some.len();
    }
    let rest = cells.get(clean..)?;
    let in_line = rest.iter().position(|cell| F::is_dirty(cell.get()))?;
    Some(clean + in_line)
}

/// Cleans an entry; one that is clean is not stored to.
#[inline(always)]
fn clean<F: Format, C: Cell>(cell: &C) {
    let mut word = cell.get();
    while F::is_dirty(word) {
        let clean = F::cleaned(word);
        if is_settled::<F>(word) {
            // No other thread and no unit may store to it.
            cell.set(clean);
            return;
        }
        match cell.set_if(word, clean) {
            Ok(()) => return,
            // Hardware was quicker.
            Err(now) => word = now,
        }
    }
}

/// Marks the leaf with the entry `word` as written to; false when it is gone meanwhile.
fn write<F: Format, C: Cell>(cell: &C, mut word: u64) -> bool {
    let leaf = word & !F::HARDWARE_BITS;
    while word & !F::HARDWARE_BITS == leaf {
        let written = F::dirtied(word) | F::ACCESSED;
        if written == word {
            return true;
        }
        match cell.set_if(word, written) {
            Ok(()) => return true,
            Err(now) => word = now,
        }
    }
    false
}
