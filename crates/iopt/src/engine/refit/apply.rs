//! Rewriting one extent.

use core::ops::BitOr;
use core::slice;

use runs::Span;

use super::super::dirty::some_dirty;
use super::super::form::{Exclusive, Form};
use super::super::map::Target;
use super::super::request::{Cursor, Request};
use super::super::{Level, Table, at_level, at_top, part};
use super::batch::Batch;
use super::scan::{Extent, Layout};
use crate::cell::Cell;
use crate::format::{BreakBeforeMake, Entry, Format};
use crate::gather::Gather;
use crate::memory::{Chain, Reserve, TableMemory};

/// What is under way.
pub(super) struct Work {
    layout: Layout,
    pub(super) reserve: Reserve,
    /// Unlinked tables that are to be read after the flush. Where the leaf lies that replaced one
    /// is noted in its live count, in units of level 1, whose upper half is in `base`.
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

/// What hardware has noted in leaves.
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
        layout.with_cursor(extent, 0, |mut cursor| {
            at_level!(extent.level, F, V => {
                // Below an entry that is empty: nothing is looked at, and nothing is in the way.
                let _ = self.plan::<V, Exclusive>(None, &mut cursor, &mut needed, Exclusive);
            });
        });
        needed
    }

    /// Empties the entries of an extent, or marks them, and notes what they were.
    pub(super) fn break_extent(&self, extent: &Extent, batch: &mut Batch) {
        at_level!(extent.level, F, V => {
            let cells = self.cells_of::<V>(extent);
            let words = batch.push(extent, cells.len());
            for (cell, word) in cells.iter().zip(words) {
                *word = loop {
                    let old = cell.get();
                    if cell.set_if(old, self.format.broken(V::N, old)).is_ok() {
                        break old;
                    }
                };
            }
            self.memory.written(cells);
        });
    }

    /// Undoes [`break_extent`](Self::break_extent).
    pub(super) fn restore(&self, extent: &Extent, words: &[u64]) {
        at_level!(extent.level, F, V => {
            let cells = self.cells_of::<V>(extent);
            for (cell, &word) in cells.iter().zip(words) {
                loop {
                    let now = cell.get();
                    // A marked leaf has gone on noting.
                    let noted = match F::decode(V::N, now) {
                        Entry::Leaf { .. } => State::of::<F>(now).noted::<F>(word),
                        _ => word,
                    };
                    if cell.set_if(now, noted).is_ok() {
                        break;
                    }
                }
            }
            self.memory.written(cells);
        });
    }

    /// Writes the new leaves of an extent. `saved` is what its entries were before they were
    /// broken.
    pub(super) fn apply<P: Form>(
        &self,
        extent: &Extent,
        saved: &[u64],
        work: &mut Work,
        gather: &mut Gather,
        form: P,
    ) {
        if self.format.break_before_make() == BreakBeforeMake::Marked {
            // The marked leaf may be cached as well.
            extent.note(self, gather);
        }
        let layout = work.layout;
        at_level!(extent.level, F, V => {
            let cells = self.cells_of::<V>(extent);
            let state = cells
                .iter()
                .map(Cell::get_acquire)
                .chain(saved.iter().copied())
                .fold(State::default(), |all, word| all | self.state::<V>(word));
            for &word in saved {
                if let Entry::Table(below) = F::decode(V::N, word) {
                    self.detach::<V, P>(below, extent.at, work, form);
                }
            }
            let late = layout.with_cursor(extent, 0, |cursor| {
                self.write_leaves::<V, P>(cells, cursor, extent, state, work, form)
            });
            if state | late != state {
                cells.iter().for_each(|cell| mark::<F, V, _>(cell, late));
            }
            self.memory.written(cells);
            let slot = 1u64 << F::shift(V::N);
            for (cell, nth) in cells.iter().zip(0..) {
                layout.with_cursor(extent, nth * slot, |mut cursor| {
                    if self.goes_below::<V>(&cursor) {
                        cursor.end_after(slot);
                        let state = state | late;
                        self.link_lower::<V, P>(cell, cursor, extent.bits, state, work, form);
                    }
                });
            }
        });
    }

    /// Replaces the entries of an extent by leaves that lie in the same table. An entry whose part
    /// becomes a table is made a leaf of its own first, unless it is one or empty. Returns what
    /// hardware noted meanwhile.
    fn write_leaves<V: Level, P: Form>(
        &self,
        cells: &[M::Cell],
        mut cursor: Cursor<'_>,
        extent: &Extent,
        state: State,
        work: &mut Work,
        form: P,
    ) -> State {
        let own = F::shift(V::N);
        let bits = state.noted::<F>(extent.bits);
        let mut late = State::default();
        let mut rest = cells;
        while !rest.is_empty() {
            let room = (rest.len() as u64) << own;
            let inside = self.leaves_here::<V>(&cursor, room);
            let log2 = inside.map_or(own, |(log2, _)| log2);
            let (group, behind) = rest.split_at((1usize << (log2 - own)).min(rest.len()));
            rest = behind;
            for (cell, nth) in group.iter().zip(0..) {
                if inside.is_none() && (cells.len() == 1 || F::is_empty(cell.get())) {
                    continue;
                }
                let pa = cursor.pa + if F::GROUPS_ADVANCE { nth << own } else { 0 };
                let old = cell.exchange(F::leaf(V::N, pa, log2, bits));
                match F::decode(V::N, old) {
                    Entry::Empty => {}
                    Entry::Leaf { .. } => late = late | State::of::<F>(old),
                    // What was noted in it late is read when the flush is done.
                    Entry::Table(below) => self.detach::<V, P>(below, extent.at, work, form),
                }
            }
            cursor.skip(1 << log2);
        }
        late
    }

    /// True when the entry that `cursor` is at becomes a table.
    fn goes_below<V: Level>(&self, cursor: &Cursor<'_>) -> bool {
        V::N > 0 && self.leaves_here::<V>(cursor, 1 << F::shift(V::N)).is_none()
    }

    /// Fills a table with the leaves that `cursor` is at, and puts it in the place of the leaf in
    /// `cell`.
    fn link_lower<V: Level, P: Form>(
        &self,
        cell: &M::Cell,
        mut cursor: Cursor<'_>,
        bits: u64,
        state: State,
        work: &mut Work,
        form: P,
    ) {
        let Some((below, zeroed)) = work.reserve.take(&self.memory) else {
            // The leaf in `cell` stays.
            let table =
                at_top!(self.begin(), F, Top, root => self.table_at::<Top>(root, cursor.at, V::N));
            return self.broke(table, V::N);
        };
        let before = work.reserve.len();
        let target = if zeroed {
            Target::Zeroed
        } else {
            Target::Stale
        };
        let mut word = cell.get();
        let mut state = state | self.state::<V>(word);
        let bits = state.noted::<F>(bits);
        self.fill::<V::Below, P>(below, target, &mut cursor, bits, &mut work.reserve, form);
        self.hold_all::<V::Below, P>(below, form);
        while let Err(now) = cell.set_if(word, self.format.table(V::N, below)) {
            word = now;
            state = state | self.state::<V>(word);
            self.mark_all::<V::Below>(below, state);
        }
        self.memory.written(slice::from_ref(cell));
        work.added += 1 + before - work.reserve.len();
    }

    /// Notes that `below` was unlinked, and that a leaf at `at` took its place.
    fn detach<V: Level, P: Form>(&self, below: u64, at: u64, work: &mut Work, form: P) {
        if P::SHARED {
            self.bury_all::<V::Below, P>(below, form);
        }
        work.detached.push(&self.memory, below);
        self.memory
            .meta(below)
            .live
            .set(at >> F::shift(1) & 0xffff_ffff);
    }

    /// After the flush: what hardware still noted in unlinked tables is noted in the leaves that
    /// replaced them. The tables go to `done`.
    pub(super) fn settle(&self, work: &mut Work, done: &mut Chain) {
        while let Some(old) = work.detached.pop(&self.memory) {
            self.settle_one(old, None, work, &mut |table| done.push(&self.memory, table));
        }
    }

    /// After a flush that failed: units may go on noting in tables that nobody will read again, so
    /// everything counts as noted. The tables wait in the gather.
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
        let low = self.memory.meta(old).live.get();
        let at = (work.base >> unit >> 32 << 32 | low) << unit;
        work.removed += at_top!(self.begin(), F, Top, root => self.settle_at::<Top>(root, at, old, known, each));
    }

    /// Notes in the leaf at `at` what was noted in the table `old`, which it has replaced, or
    /// `known`, and hands out that table and those below. Returns how many.
    fn settle_at<V: Level>(
        &self,
        table: u64,
        at: u64,
        old: u64,
        known: Option<State>,
        each: &mut impl FnMut(u64),
    ) -> u64 {
        let cells = self.cells::<V>(table);
        let index = self.index::<V>(at);
        match F::decode(V::N, cells.get(index).map_or(0, Cell::get_acquire)) {
            Entry::Leaf { log2, .. } => {
                let state = known.unwrap_or_else(|| self.state_below::<V::Below>(old));
                let entries = 1usize << (log2 - F::shift(V::N));
                let group = part(cells, index & !(entries - 1), entries);
                group.iter().for_each(|cell| mark::<F, V, _>(cell, state));
                self.memory.written(group);
                self.drop_all::<V::Below>(old, each)
            }
            Entry::Table(below) if V::N > 0 => {
                self.settle_at::<V::Below>(below, at, old, known, each)
            }
            _ => 0,
        }
    }

    /// The entries of an extent.
    fn cells_of<V: Level>(&self, extent: &Extent) -> &[M::Cell] {
        self.memory.descended();
        let table =
            at_top!(self.begin(), F, Top, root => self.table_at::<Top>(root, extent.at, V::N));
        part(
            self.cells::<V>(table),
            self.index::<V>(extent.at),
            extent.entries::<F>(),
        )
    }

    /// The table at `level` with the entry for `at`.
    fn table_at<V: Level>(&self, table: u64, at: u64, level: usize) -> u64 {
        if V::N <= level {
            return table;
        }
        let cell = self.cells::<V>(table).get(self.index::<V>(at));
        match F::decode(V::N, cell.map_or(0, Cell::get_acquire)) {
            Entry::Table(below) => self.table_at::<V::Below>(below, at, level),
            _ => table,
        }
    }

    /// What is noted in an entry, or in the leaves below it.
    fn state<V: Level>(&self, word: u64) -> State {
        match F::decode(V::N, word) {
            Entry::Leaf { .. } => State::of::<F>(word),
            Entry::Table(below) if V::N > 0 => self.state_below::<V::Below>(below),
            _ => State::default(),
        }
    }

    fn state_below<V: Level>(&self, table: u64) -> State {
        if F::ACCESSED == 0 {
            return State::default();
        }
        let cells = self.cells::<V>(table);
        if V::N == 0 {
            // All entries are leaves, or empty: their bits together tell.
            let bits = M::Cell::union(cells);
            return State {
                accessed: bits & F::ACCESSED != 0,
                dirty: match F::DIRTY {
                    0 => self.format.keeps_dirty() && some_dirty::<F, _>(cells),
                    dirty => bits & dirty != 0,
                },
            };
        }
        cells.iter().fold(State::default(), |all, cell| {
            all | self.state::<V>(cell.get_acquire())
        })
    }

    /// Notes `state` in all leaves of a table that nobody can reach yet.
    fn mark_all<V: Level>(&self, table: u64, state: State) {
        for cell in self.cells::<V>(table) {
            match F::decode(V::N, cell.get()) {
                Entry::Leaf { .. } => {
                    cell.set(state.noted::<F>(cell.get()));
                    self.memory.written(slice::from_ref(cell));
                }
                Entry::Table(below) if V::N > 0 => self.mark_all::<V::Below>(below, state),
                _ => {}
            }
        }
    }

    /// Keeps new tables claimed until the operation is over.
    fn hold_all<V: Level, P: Form>(&self, table: u64, form: P) {
        if P::SHARED {
            self.memory.meta(table).claim.set(form.token());
            self.tables_below::<V>(table, |below| self.hold_all::<V::Below, P>(below, form));
        }
    }

    /// Whoever waits for the claim of an unlinked table begins again.
    fn bury_all<V: Level, P: Form>(&self, table: u64, form: P) {
        self.bury(table, form);
        self.tables_below::<V>(table, |below| self.bury_all::<V::Below, P>(below, form));
    }

    /// Hands out an unlinked table and those below; returns how many.
    fn drop_all<V: Level>(&self, table: u64, each: &mut impl FnMut(u64)) -> u64 {
        let mut count = 1;
        if V::N > 0 {
            for cell in self.cells::<V>(table) {
                if let Entry::Table(below) = F::decode(V::N, cell.get_acquire()) {
                    count += self.drop_all::<V::Below>(below, &mut *each);
                }
            }
        }
        each(table);
        count
    }

    fn tables_below<V: Level>(&self, table: u64, mut each: impl FnMut(u64)) {
        if V::N > 0 {
            for cell in self.cells::<V>(table) {
                if let Entry::Table(below) = F::decode(V::N, cell.get_acquire()) {
                    each(below);
                }
            }
        }
    }
}

/// Notes `state` in a leaf that hardware uses.
fn mark<F: Format, V: Level, C: Cell>(cell: &C, state: State) {
    loop {
        let word = cell.get();
        let noted = state.noted::<F>(word);
        let leaf = matches!(F::decode(V::N, word), Entry::Leaf { .. });
        if !leaf || noted == word || cell.set_if(word, noted).is_ok() {
            return;
        }
    }
}
