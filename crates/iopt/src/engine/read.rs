//! Reading: translate, leaves, runs.

use runs::{Iova, Joiner, Run, Span};

use super::descend::Place;
use super::entries::{Entries, decode};
use super::{Level, Table, at_level};
use crate::cell::{Cell, Series};
use crate::format::{Aperture, Entry, Format};
use crate::memory::TableMemory;
use crate::prot::Prot;

/// One leaf of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The whole leaf: where it begins in both address spaces, and its size in bytes.
    pub run: Run,
    /// Permissions of the device.
    pub prot: Prot,
    /// The level of its entry, 0 for the smallest page.
    pub level: u8,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// The physical address of `iova`, if it is mapped.
    #[inline(always)]
    pub fn translate(&self, iova: u64) -> Option<u64> {
        if !self.aperture().covers(&Span::new(iova, 1)) {
            return None;
        }
        match self.last_entry(iova) {
            (Entry::Leaf { pa, log2 }, _) => Some(pa | iova & ((1 << log2) - 1)),
            _ => None,
        }
    }

    /// The leaf that maps `iova`, if there is one.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        if !self.aperture().covers(&Span::new(iova, 1)) {
            return None;
        }
        self.memory.descended();
        let place = self.walk(self.aperture().strip(iova), 0);
        let Entry::Leaf { pa, log2 } = place.entry else {
            return None;
        };
        let len = 1 << log2;
        Some(Leaf {
            run: Run::new(iova & !(len - 1), Span::new(pa, len)),
            prot: self.format.prot(place.level, place.word),
            level: place.level as u8,
        })
    }

    /// True when [`give_back_empty_tables`](super::TableOps::give_back_empty_tables) may find any: not where one entry, or
    /// two, are for all of `range`. A question that costs little before each large leaf.
    #[inline(always)]
    pub fn may_have_empty_tables(&self, range: Span<Iova>) -> bool {
        let Ok(mut at) = self.check_range(range) else {
            return false;
        };
        let last = at + (range.len - 1);
        for _ in 0..2 {
            let (_, log2) = self.last_entry(at);
            let covered = at | ((1 << log2) - 1);
            if covered >= last {
                return false;
            }
            at = covered + 1;
        }
        true
    }

    /// The leaves that map at least one byte of `range`, in order; empty subtrees are skipped.
    /// A range that is not wholly inside the aperture has no leaves.
    pub fn leaves(&self, range: Span<Iova>) -> Leaves<'_, F, M> {
        let aperture = self.aperture();
        let todo = if aperture.covers(&range) {
            range.len
        } else {
            0
        };
        Leaves {
            table: self,
            aperture,
            here: Entries::none(),
            at: aperture.strip(range.start),
            todo,
            word: 0,
        }
    }

    /// [`leaves`](Self::leaves) of a range in the aperture that goes through one table.
    pub(super) fn leaves_from(
        &self,
        (table, level): (u64, usize),
        range: Span<Iova>,
    ) -> Leaves<'_, F, M> {
        let aperture = self.aperture();
        let here = self.entries_in(table, level, aperture.strip(range.start), range.len);
        Leaves {
            table: self,
            aperture,
            at: here.last.wrapping_add(1),
            todo: 0,
            here,
            word: 0,
        }
    }

    /// Iterates over the mappings in `range`, as the longest possible runs, in order. The first
    /// and the last leaf count whole, also when the range begins or ends inside them.
    pub fn runs(&self, range: Span<Iova>) -> impl Iterator<Item = Run> + '_ {
        let mut leaves = self.leaves(range);
        let mut joiner = Joiner::new();
        core::iter::from_fn(move || {
            loop {
                match leaves.next() {
                    Some(leaf) => {
                        if let Some(run) = joiner.push(leaf.run) {
                            return Some(run);
                        }
                    }
                    None => return joiner.finish(),
                }
            }
        })
    }

    /// True when each byte of `range` is mapped, in one run and with the same permissions. Looks no
    /// further than the first leaf with which that ends.
    pub fn is_one_run(&self, range: Span<Iova>) -> bool {
        let mut leaves = self.leaves(range).stretches();
        let Some((first, mut run)) = leaves.next() else {
            return false;
        };
        while run.input().last() < range.last() {
            match leaves.next() {
                Some((leaf, next)) if run.is_followed_by(&next) && leaf.prot == first.prot => {
                    run.len += next.len;
                }
                _ => return false,
            }
        }
        run.iova <= range.start
    }
}

/// Iterator of [`Table::leaves`]: one descent per table that holds leaves.
#[derive(Debug)]
pub struct Leaves<'t, F: Format, M: TableMemory> {
    table: &'t Table<F, M>,
    aperture: Aperture,
    /// Rest of the range in the lowest table that holds its next entry.
    here: Entries<'t, F, M::Cell>,
    /// Start of the part behind it: a stripped address, and the bytes of the range from there on.
    at: u64,
    todo: u64,
    /// The entry of the leaf that came last.
    word: u64,
}

impl<'t, F: Format, M: TableMemory> Leaves<'t, F, M> {
    /// Goes to the lowest table that has an entry for the stripped address `at`, from which on `todo`
    /// bytes of the range are left.
    fn descend(&mut self, at: u64, todo: u64) {
        self.table.memory.descended();
        let Place { table, level, .. } = self.table.walk(at, 0);
        self.here = self.table.entries_in(table, level, at, todo);
        self.at = self.here.last.wrapping_add(1);
        self.todo = todo - (self.here.last - at + 1);
    }

    /// The leaves, those together that lie in one table, have one size and one permission and are
    /// one run: the first of them, and the run.
    pub(super) fn stretches(mut self) -> impl Iterator<Item = (Leaf, Run)> + use<'t, F, M> {
        core::iter::from_fn(move || {
            let leaf = self.next()?;
            let more = self.go_on(&leaf);
            let mut run = leaf.run;
            run.len += more;
            Some((leaf, run))
        })
    }

    /// The first leaf of so many bytes as `wanted` says; others are passed in stretches.
    pub(super) fn first_of(mut self, wanted: impl Fn(u64) -> bool) -> Option<Leaf> {
        loop {
            let leaf = self.next()?;
            if wanted(leaf.run.len) {
                return Some(leaf);
            }
            self.go_on(&leaf);
        }
    }

    /// Passes the leaves that go on as `leaf` does, which was just passed; returns their bytes.
    fn go_on(&mut self, leaf: &Leaf) -> u64 {
        at_level!(usize::from(leaf.level), v => self.go_on_at(v, leaf))
    }

    fn go_on_at(&mut self, v: impl Level, leaf: &Leaf) -> u64 {
        let own = F::shift(v.n());
        if leaf.run.len != 1 << own {
            return 0;
        }
        let next = self.word.wrapping_add(F::stride(own));
        // Scattered pages end here, one by one.
        let differs = |entry: &M::Cell| (entry.get() ^ next) & !F::HARDWARE_BITS != 0;
        if self.here.rest().first().is_none_or(differs) {
            return 0;
        }
        let series = Series {
            next,
            stride: F::stride(own),
            ignored: self.unessential(leaf),
        };
        let equal = M::Cell::match_series(self.here.rest(), series);
        self.here.pass_next(equal);
        (equal as u64) << own
    }

    /// The bits that hardware changes and that are no permission in this leaf.
    fn unessential(&self, leaf: &Leaf) -> u64 {
        let level = usize::from(leaf.level);
        let (mut rest, mut bits) = (F::HARDWARE_BITS, 0);
        while rest != 0 {
            let bit = rest & rest.wrapping_neg();
            if self.table.format.prot(level, self.word ^ bit) == leaf.prot {
                bits |= bit;
            }
            rest &= !bit;
        }
        bits
    }
}

impl<F: Format, M: TableMemory> Iterator for Leaves<'_, F, M> {
    type Item = Leaf;

    fn next(&mut self) -> Option<Leaf> {
        loop {
            let Some(part) = self.here.next() else {
                if self.todo == 0 {
                    return None;
                }
                self.descend(self.at, self.todo);
                continue;
            };
            let level = self.here.level();
            let word = part.word();
            match decode::<F>(level, word) {
                Entry::Leaf { pa, log2 } => {
                    let len = 1u64 << log2;
                    let at = part.base() & !(len - 1);
                    // The range may begin inside a group.
                    let rest = at.wrapping_add(len).wrapping_sub(part.base());
                    self.here.pass((rest >> F::shift(level)) as usize);
                    self.word = word;
                    return Some(Leaf {
                        run: Run::new(self.aperture.extend(at), Span::new(pa, len)),
                        prot: self.table.format.prot(level, word),
                        level: level as u8,
                    });
                }
                Entry::Table(_) => {
                    self.descend(part.at(), self.here.last - part.at() + 1 + self.todo);
                }
                Entry::Empty => {}
            }
        }
    }
}
