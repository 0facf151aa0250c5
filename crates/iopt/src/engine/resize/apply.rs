//! Rewriting one extent.

use core::ops::BitOr;
use core::slice;

use runs::Span;

use super::super::dirty::some_dirty;
use super::super::entries::{Order, decode};
use super::super::map::Target;
use super::super::request::{Cursor, Request};
use super::super::{Table, at_level, part};
use super::batch::Batch;
use super::scan::{Extent, Layout};
use crate::cell::Cell;
use crate::format::{BreakBeforeMake, Entry, Format};
use crate::gather::Gather;
use crate::memory::{Chain, Reserve, TableMemory};

/// State of a resize under way.
pub(super) struct Work {
    layout: Layout,
    pub(super) reserve: Reserve,
    /// Unlinked tables that are to be read after the flush. Where the leaf lies that replaced one
    /// is noted beside it, in units of level 1, whose upper half is in `base`.
    detached: Chain,
    base: u64,
    pub(super) added: u64,
    pub(super) removed: u64,
}

impl Work {
    pub(super) fn new(layout: Layout, base: u64, reserve: Reserve) -> Self {
        Self {
            layout,
            reserve,
            detached: Chain::empty(),
            base,
            added: 0,
            removed: 0,
        }
    }

    /// True when `at` can be noted.
    pub(super) fn reaches<F: Format>(&self, at: u64) -> bool {
        at >> F::shift(1) >> 32 == self.base >> F::shift(1) >> 32
    }

    /// True while unlinked tables wait to be read.
    pub(super) fn has_notes(&self) -> bool {
        !self.detached.is_empty()
    }

    /// Goes on where nothing is noted yet.
    pub(super) fn restart_at(&mut self, at: u64) {
        self.base = at;
    }
}

/// Accessed and dirty state that hardware has noted in leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    accessed: bool,
    dirty: bool,
}

impl State {
    fn of<F: Format>(leaf: u64) -> Self {
        Self {
            accessed: leaf & F::ACCESSED != 0,
            dirty: F::is_dirty(leaf),
        }
    }

    /// Nothing is noted in an entry that is no leaf.
    fn of_entry<F: Format>(level: usize, word: u64) -> Self {
        match decode::<F>(level, word) {
            Entry::Leaf { .. } => Self::of::<F>(word),
            _ => Self::default(),
        }
    }

    /// The entry of a leaf, or the bits of one, with this noted as well.
    fn noted<F: Format>(self, word: u64) -> u64 {
        let word = if self.dirty { F::dirtied(word) } else { word };
        word | if self.accessed { F::ACCESSED } else { 0 }
    }
}

impl BitOr for State {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self {
            accessed: self.accessed | other.accessed,
            dirty: self.dirty | other.dirty,
        }
    }
}

impl Layout {
    /// Goes through the memory of an extent, from `skip` bytes on.
    fn with_cursor<T>(&self, extent: &Extent, skip: u64, f: impl FnOnce(Cursor<'_>) -> T) -> T {
        let (at, pa, len) = (extent.at + skip, extent.pa + skip, extent.len - skip);
        let front = match self.cut.checked_sub(at) {
            Some(front) if front < len => front,
            _ => 0,
        };
        let spans = [Span::new(pa, front), Span::new(pa + front, len - front)];
        let runs = if front == 0 { &spans[1..] } else { &spans[..] };
        f(Cursor::new(&Request {
            iova: at,
            at,
            len,
            runs,
            bits: extent.bits,
            sizes: self.sizes,
        }))
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// How many tables the new leaves of an extent need.
    pub(super) fn tables_for(&self, extent: &Extent, layout: &Layout) -> u64 {
        let mut needed = 0;
        if extent.merges {
            return needed;
        }
        layout.with_cursor(extent, 0, |mut cursor| {
            at_level!(usize::from(extent.level), v => {
                // Below an entry that is empty: nothing is looked at, and nothing is in the way.
                let _ = self.plan(v, None, &mut cursor, &mut needed);
            });
        });
        needed
    }

    /// Empties the entries of an extent, or marks them, and notes what they were.
    pub(super) fn break_extent(&self, extent: &Extent, batch: &mut Batch) {
        let cells = self.cells_of(extent);
        let words = batch.push(extent, cells.len());
        for (cell, word) in cells.iter().zip(words) {
            *word = loop {
                let old = cell.get();
                let broken = self.format.broken(extent.level.into(), old);
                if cell.set_if(old, broken).is_ok() {
                    break old;
                }
            };
        }
        self.memory.written(cells);
    }

    /// Undoes [`break_extent`](Self::break_extent).
    pub(super) fn restore(&self, extent: &Extent, words: &[u64]) {
        let cells = self.cells_of(extent);
        for (cell, &word) in cells.iter().zip(words) {
            loop {
                let now = cell.get();
                // A marked leaf has gone on noting.
                let noted = match F::decode(extent.level.into(), now) {
                    Entry::Leaf { .. } => State::of::<F>(now).noted::<F>(word),
                    _ => word,
                };
                if cell.set_if(now, noted).is_ok() {
                    break;
                }
            }
        }
        self.memory.written(cells);
    }

    /// Writes the new leaves of an extent. `saved` is what its entries were before they were
    /// broken.
    pub(super) fn apply(
        &self,
        extent: &Extent,
        saved: &[u64],
        work: &mut Work,
        gather: &mut Gather,
    ) {
        if self.format.break_before_make() == BreakBeforeMake::Marked {
            // The marked leaf may be cached as well.
            extent.note(self, gather);
        }
        let (layout, level) = (work.layout, usize::from(extent.level));
        let cells = self.cells_of(extent);
        let state = cells
            .iter()
            .map(Cell::get_acquire)
            .chain(saved.iter().copied())
            .fold(State::default(), |all, word| {
                all | State::of_entry::<F>(level, word)
            });
        for &word in saved {
            if let Entry::Table(below) = decode::<F>(level, word) {
                self.detach((below, level - 1), extent.at, work);
            }
        }
        let late = layout.with_cursor(extent, 0, |cursor| {
            self.write_leaves(cells, cursor, extent, state, work)
        });
        if state | late != state {
            cells
                .iter()
                .for_each(|cell| mark::<F, _>(level, cell, late));
        }
        self.memory.written(cells);
        if extent.merges {
            return;
        }
        // Leaves are where `write_leaves` has put them: some span several entries.
        let own = F::shift(level);
        let (mut rest, mut skip) = (cells, 0);
        while let [cell, ..] = rest {
            let room = (rest.len() as u64) << own;
            let log2 = layout.with_cursor(extent, skip, |mut cursor| {
                match self.leaves_here(level, &cursor, room) {
                    Some((log2, _)) => log2,
                    None if level == 0 => own,
                    None => {
                        cursor.end_after(1 << own);
                        let state = state | late;
                        self.link_lower((level, cell), cursor, extent.bits, state, work);
                        own
                    }
                }
            });
            skip += 1 << log2;
            rest = rest.get(1 << (log2 - own)..).unwrap_or_default();
        }
    }

    /// Replaces the entries of an extent by leaves that lie in the same table. An entry whose part
    /// becomes a table is made a leaf of its own first, unless it is one or empty. Returns what
    /// hardware noted meanwhile.
    fn write_leaves(
        &self,
        cells: &[M::Cell],
        mut cursor: Cursor<'_>,
        extent: &Extent,
        state: State,
        work: &mut Work,
    ) -> State {
        let level = usize::from(extent.level);
        let own = F::shift(level);
        let bits = state.noted::<F>(extent.bits);
        let mut late = State::default();
        let mut rest = cells;
        while !rest.is_empty() {
            let inside = if extent.merges {
                Some(extent.len.trailing_zeros())
            } else {
                let room = (rest.len() as u64) << own;
                let leaves = self.leaves_here(level, &cursor, room);
                leaves.map(|(log2, _)| log2)
            };
            let log2 = inside.unwrap_or(own);
            let (group, behind) = rest.split_at((1usize << (log2 - own)).min(rest.len()));
            rest = behind;
            for (cell, nth) in group.iter().zip(0..) {
                if inside.is_none() && (cells.len() == 1 || F::is_empty(cell.get())) {
                    continue;
                }
                let pa = cursor.pa + if F::GROUPS_ADVANCE { nth << own } else { 0 };
                let old = cell.exchange(F::leaf(level, pa, log2, bits));
                match decode::<F>(level, old) {
                    Entry::Empty => {}
                    Entry::Leaf { .. } => late = late | State::of::<F>(old),
                    // Bits that were set in it late are read when the flush is done.
                    Entry::Table(below) => self.detach((below, level - 1), extent.at, work),
                }
            }
            cursor.skip(1 << log2);
        }
        late
    }

    /// Fills a table with the leaves that `cursor` is at, and puts it in the place of the leaf in
    /// `cell`.
    fn link_lower(
        &self,
        (level, cell): (usize, &M::Cell),
        mut cursor: Cursor<'_>,
        bits: u64,
        state: State,
        work: &mut Work,
    ) {
        let Some((below, zeroed)) = work.reserve.take(&self.memory) else {
            // The leaf in `cell` stays.
            return self.not_as_planned(self.walk(cursor.at, level).table, level);
        };
        let before = work.reserve.len();
        let target = if zeroed {
            Target::Zeroed
        } else {
            Target::Stale
        };
        let mut word = cell.get();
        let mut state = state | State::of_entry::<F>(level, word);
        let bits = state.noted::<F>(bits);
        let reserve = &mut work.reserve;
        at_level!(level - 1, v => {
            self.fill(v, below, target, &mut cursor, bits, reserve);
        });
        while let Err(now) = cell.set_if(word, self.format.table(level, below)) {
            word = now;
            state = state | State::of_entry::<F>(level, word);
            self.mark_all((below, level - 1), state);
        }
        self.memory.written(slice::from_ref(cell));
        work.added += 1 + before - work.reserve.len();
    }

    /// Notes that `below` was unlinked, and that a leaf at `at` took its place.
    fn detach(&self, table: (u64, usize), at: u64, work: &mut Work) {
        work.detached.push(&self.memory, table.0);
        self.memory
            .meta(table.0)
            .note
            .set(at >> F::shift(1) & 0xffff_ffff);
    }

    /// After the flush: what hardware still noted in unlinked tables is noted in the leaves that
    /// replaced them. The tables go to `done`.
    pub(super) fn settle(&self, work: &mut Work, done: &mut Chain) {
        while let Some(old) = work.detached.pop(&self.memory) {
            self.settle_one(old, None, work, &mut |table| done.push(&self.memory, table));
        }
    }

    /// After a flush that failed: units may go on setting bits in tables that are not read again, so
    /// all leaves count as accessed and dirty. The tables wait in the gather.
    pub(super) fn abandon(&self, work: &mut Work, gather: &mut Gather) {
        let all = State {
            accessed: true,
            dirty: self.format.keeps_dirty(),
        };
        while let Some(old) = work.detached.pop(&self.memory) {
            self.settle_one(old, Some(all), work, &mut |table| {
                gather.add_table(self, table);
            });
        }
    }

    fn settle_one(
        &self,
        old: u64,
        known: Option<State>,
        work: &mut Work,
        each: &mut impl FnMut(u64),
    ) {
        let unit = F::shift(1);
        let low = self.memory.meta(old).note.get();
        let at = (work.base >> unit >> 32 << 32 | low) << unit;
        work.removed += self.settle_at(at, old, known, each);
    }

    /// Notes in the leaf at `at` what was noted in the table `old`, which it has replaced, or
    /// `known`, and hands out that table and those below. Returns how many.
    fn settle_at(
        &self,
        at: u64,
        old: u64,
        known: Option<State>,
        each: &mut impl FnMut(u64),
    ) -> u64 {
        let place = self.walk(at, 1);
        let (table, level) = (place.table, place.level);
        let Entry::Leaf { log2, .. } = place.entry else {
            return 0;
        };
        let entries = 1usize << (log2 - F::shift(level));
        let group = part(
            self.cells(table, level),
            self.index(level, at) & !(entries - 1),
            entries,
        );
        let state = known.unwrap_or_else(|| self.state_below((old, level - 1)));
        group
            .iter()
            .for_each(|cell| mark::<F, _>(level, cell, state));
        self.memory.written(group);
        let mut count = 0;
        self.all_tables((old, level - 1), Order::Below, &mut |table, _| {
            each(table);
            count += 1;
        });
        count
    }

    /// The entries of an extent.
    fn cells_of(&self, extent: &Extent) -> &[M::Cell] {
        self.memory.descended();
        let level = extent.level.into();
        let table = self.walk(extent.at, level).table;
        part(
            self.cells(table, level),
            self.index(level, extent.at),
            extent.entries::<F>(),
        )
    }

    /// State noted in the leaves of a table, and in the tables below it.
    fn state_below(&self, (table, level): (u64, usize)) -> State {
        if F::ACCESSED == 0 {
            return State::default();
        }
        if level == 0 {
            // All entries are leaves, or empty: their bits together tell.
            let cells = self.cells(table, level);
            let bits = M::Cell::union(cells);
            return State {
                accessed: bits & F::ACCESSED != 0,
                dirty: match F::DIRTY {
                    0 => self.format.keeps_dirty() && some_dirty::<F, _>(cells),
                    dirty => bits & dirty != 0,
                },
            };
        }
        self.all_entries(table, level)
            .fold(State::default(), |all, part| {
                let word = part.word();
                all | match decode::<F>(level, word) {
                    Entry::Table(below) => self.state_below((below, level - 1)),
                    _ => State::of_entry::<F>(level, word),
                }
            })
    }

    /// Notes `state` in all leaves of a table that is not linked yet.
    fn mark_all(&self, (table, level): (u64, usize), state: State) {
        for part in self.all_entries(table, level) {
            match part.entry() {
                Entry::Leaf { .. } => {
                    part.cell.set(state.noted::<F>(part.cell.get()));
                    self.memory.written(slice::from_ref(part.cell));
                }
                Entry::Table(below) => self.mark_all((below, level - 1), state),
                Entry::Empty => {}
            }
        }
    }
}

/// Notes `state` in a leaf that hardware uses.
#[inline]
fn mark<F: Format, C: Cell>(level: usize, cell: &C, state: State) {
    loop {
        let word = cell.get();
        let noted = state.noted::<F>(word);
        let leaf = matches!(F::decode(level, word), Entry::Leaf { .. });
        if !leaf || noted == word || cell.set_if(word, noted).is_ok() {
            return;
        }
    }
}
