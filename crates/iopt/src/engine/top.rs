//! The top of a table: where walks begin, and how it grows.
//!
//! # Protocol
//!
//! The unit receives two values together: the root's address and the number of levels. In a
//! format that grows ([`Format::GROWS`]) the engine keeps them in one word too, so that an operation
//! that loads it once never sees one of them without the other. In all other formats both are
//! fixed, and there is no such word on the way of any operation.
//!
//! *Growing* writes the new tables above the root (in each of which the first entry leads one level
//! down), and stores the new word with release. No other operation may change the table meanwhile. The
//! old root is then a table like any other, and readers that began at it go on in it: their addresses
//! mean the same there.
//!
//! An old root in which nothing is mapped is not linked, but gathered, since no table that is linked
//! is empty.
//!
//! # What the unit knows
//!
//! The unit walks the old root, which translates as before, until it knows the new one. So an old root
//! must not be used for something else before the unit has the new one. The table therefore records the
//! root that the unit has: until they are equal, every gather with an unlinked table, and that of the
//! growth itself, says that there is a new root
//! ([`Invalidation::new_root`](crate::Invalidation::new_root)). The flush of such a gather gives it to the
//! unit, and [`reclaim`](Table::reclaim) records that in the table.

use super::Table;
use super::trust::set_aside;
use crate::cell::Cell;
use crate::error::BuildError;
use crate::format::{Aperture, Format, Root};
use crate::gather::Gather;
use crate::memory::{Chain, TableMemory};

/// Where an operation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begin {
    pub(crate) root: u64,
    pub(crate) levels: u8,
}

/// The bits of the word that hold the levels. Tables are multiples of at least 16 bytes.
const LEVELS: u64 = 7;

impl Begin {
    const fn word(self) -> u64 {
        self.root | self.levels as u64
    }

    /// The root as a table with its level.
    pub(crate) const fn table(self) -> (u64, usize) {
        (self.root, self.levels as usize - 1)
    }

    const fn of(word: u64) -> Self {
        Self {
            root: word & !LEVELS,
            levels: (word & LEVELS) as u8,
        }
    }
}

/// The root of a table.
pub(crate) struct Top<C> {
    /// Where the format does not grow.
    fixed: u64,
    /// Where it does: the root and the levels as they are now, and as the unit has them.
    now: C,
    told: C,
}

impl<C: Cell + Default> Top<C> {
    pub(crate) fn new(root: u64, levels: u8) -> Self {
        let (now, told) = (C::default(), C::default());
        let word = Begin { root, levels }.word();
        now.set(word);
        told.set(word);
        Self {
            fixed: root,
            now,
            told,
        }
    }

    /// For people.
    pub(crate) fn shown(&self) -> Begin {
        Begin::of(self.now.get())
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Adds levels above the root until there are `levels` of them, so that more addresses can be
    /// mapped. Everything that is mapped stays so, at every moment. With as many levels or more
    /// nothing happens.
    ///
    /// Only some formats grow ([`Format::GROWS`]: AMD v1); others refuse. [`map`](super::TableOps::map) never
    /// grows a table by itself, because the unit has to be given the new root: the gather says so
    /// ([`Invalidation::new_root`](crate::Invalidation::new_root)), and its flush must do it. Until
    /// then the unit goes on walking the old root, and finds there what was mapped before; nothing
    /// that is mapped from now on may be counted on, whatever its address.
    pub fn grow(&mut self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
        self.grow_top(levels, gather)?;
        self.format = self.format();
        Ok(self.root())
    }

    /// Where an operation begins. Later calls may give more levels, never fewer.
    #[inline(always)]
    pub(crate) fn begin(&self) -> Begin {
        if F::GROWS {
            Begin::of(self.top.now.get_acquire())
        } else {
            Begin {
                root: self.top.fixed,
                levels: self.format.levels(),
            }
        }
    }

    /// The format, with the levels that the table has now.
    #[inline(always)]
    pub(crate) fn format_now(&self) -> F {
        if F::GROWS {
            let levels = self.begin().levels;
            self.format.grown_to(levels).unwrap_or(self.format)
        } else {
            self.format
        }
    }

    /// The addresses that it translates now.
    #[inline(always)]
    pub(crate) fn aperture(&self) -> Aperture {
        self.format_now().aperture()
    }

    /// Grows the top as [`grow`](Self::grow) says.
    pub(crate) fn grow_top(&self, levels: u8, gather: &mut Gather) -> Result<(), BuildError> {
        let old = self.begin();
        if levels <= old.levels {
            // It may have grown and not have been flushed yet.
            self.note_root(gather);
            return Ok(());
        }
        if !F::GROWS || self.format.grown_to(levels).is_none() {
            return Err(BuildError::Levels {
                format: self.format.id(),
                levels,
            });
        }
        self.intact()?;
        let (table, level) = old.table();
        let empty = self.is_empty(table, level);
        let first = if empty { levels } else { old.levels + 1 };
        let (root, added) = self.add_levels((!empty).then_some(old.root), first, levels)?;
        // The new tables are complete before a walk begins there.
        self.top.now.set_release(Begin { root, levels }.word());
        self.count(added.len(), u64::from(empty));
        if empty {
            gather.add_table(self, old.root);
        }
        self.note_root(gather);
        Ok(())
    }

    /// A root with `levels` levels that leads to this one, for kernels, which have the unit walk from it and publish it
    /// themselves ([`at_root`](Self::at_root)); others [`grow`](Self::grow). Operations on the table go on meanwhile. The
    /// chain has the tables above the present root, the new one among them: of no use if the root is published, and
    /// otherwise to be given back.
    pub fn raised(&self, levels: u8) -> Result<(u64, Chain), BuildError> {
        let old = self.begin();
        if levels <= old.levels || self.format.grown_to(levels).is_none() {
            return Err(BuildError::Levels {
                format: self.format.id(),
                levels,
            });
        }
        self.add_levels(Some(old.root), old.levels + 1, levels)
    }

    /// Tables for the levels from `first` to `levels`, each of which leads to the one before; the lowest to `below`.
    fn add_levels(
        &self,
        below: Option<u64>,
        first: u8,
        levels: u8,
    ) -> Result<(u64, Chain), BuildError> {
        let needed = u64::from(levels - first) + 1;
        let mut reserve = set_aside(&self.memory, needed)?;
        let mut added = Chain::empty();
        let mut next = below;
        for level in usize::from(first) - 1..usize::from(levels) {
            let Some((table, _)) = reserve.take(&self.memory) else {
                self.not_as_planned(next.unwrap_or_default(), level);
                break;
            };
            let cells = self.entries(table, level);
            cells.iter().for_each(|cell| cell.set(0));
            if let Some((root, cell)) = next.zip(cells.first()) {
                cell.set(self.format.table(level, root));
            }
            self.memory.written(cells);
            added.push(&self.memory, table);
            next = Some(table);
        }
        // If not, they are not linked to anything: nothing has changed but that they are gone.
        self.intact()?;
        Ok((next.unwrap_or_default(), added))
    }

    /// Tells the gather if the unit does not know the root yet.
    #[inline(always)]
    pub(crate) fn note_root(&self, gather: &mut Gather) {
        if F::GROWS {
            // In this order, so that the root that the unit has is never newer than the current one.
            let told = self.top.told.get_acquire();
            let now = self.top.now.get_acquire();
            if told != now {
                gather.set_root(self.root_of(Begin::of(now)), now);
            }
        }
    }

    /// Records the root that the unit has; `word` is what
    /// [`note_root`](Self::note_root) had put into the gather, or 0.
    pub(crate) fn told(&self, word: u64) {
        if F::GROWS {
            let mut there = self.top.told.get_acquire();
            while Begin::of(there).levels < Begin::of(word).levels {
                match self.top.told.set_if(there, word) {
                    Ok(()) => break,
                    Err(found) => there = found,
                }
            }
        }
    }

    pub(crate) fn root_of(&self, begin: Begin) -> Root {
        Root {
            format: self.format.id(),
            address: self.format.root_address(begin.root),
            levels: begin.levels,
        }
    }
}
