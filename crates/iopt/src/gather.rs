//! Flushes that must precede the reuse of unmapped memory and tables.
//!
//! ```text
//! unmap ──▶ Gather ──flush_with(unit)──▶ Flushed ──▶ Table::reclaim
//! ```
//!
//! A [`Gather`] collects, over any number of unmaps, the ranges that the unit may still hold in
//! its caches, the levels of the leaves that were removed, and the tables that became empty. It
//! turns into a [`Flushed`] only through [`flush_with`](Gather::flush_with), and only a `Flushed`
//! gives tables back: a table page cannot be reused before its flush, by type.
//!
//! The levels are those of the *old* leaves: a unit that invalidates a smaller size may keep a stale
//! large translation.

use arrayvec::ArrayVec;
use runs::{Iova, Span};

use crate::engine::Table;
use crate::format::{Format, Root};
use crate::memory::{Chain, TableMemory};

/// How many separate ranges a gather keeps apart; more grow together.
const RANGES: usize = 16;

/// Mappings and tables that were removed from a table and are not flushed yet.
///
/// Dropping it unflushed keeps its tables out of use for ever (they stay counted as in use by
/// their memory): never a reuse before the flush.
#[derive(Debug)]
#[must_use = "the unit still holds these translations until the gather is flushed"]
pub struct Gather {
    invalidation: Invalidation,
    pub(crate) tables: Chain,
    /// The root in the invalidation, as the table notes it; 0 for none.
    root: u64,
}

/// Invalidation that a unit has to do for one domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalidation {
    root: Option<Root>,
    ranges: ArrayVec<Span<Iova>, RANGES>,
    leaf_levels: u32,
    tables: bool,
}

impl Invalidation {
    /// Creates the invalidation of a gather after leaves at `leaf_levels` were removed from
    /// `range`, with tables unlinked or not: for units' own tests, and for tables that are not this
    /// crate's.
    pub fn of(range: Span<Iova>, leaf_levels: u32, tables_unlinked: bool) -> Self {
        let mut gather = Gather::new();
        if !range.is_empty() {
            gather.add(range, leaf_levels);
        }
        gather.invalidation.tables = tables_unlinked;
        gather.invalidation
    }

    /// The invalidation that a unit which does not see the stores of a map by itself needs after `range` was mapped: one that
    /// remembers absent entries, or buffers stores.
    ///
    /// The range is enough, whatever the sizes of its leaves and however many tables were linked for it: absence that is
    /// remembered for more than the range is true outside of it.
    pub fn mapped(range: Span<Iova>) -> Self {
        Self::of(range, 1, false)
    }

    /// The ranges of device addresses, in the order in which they came; neighbours are merged.
    /// They cover everything that was removed, and possibly more.
    pub fn ranges(&self) -> &[Span<Iova>] {
        &self.ranges
    }

    /// The levels at which leaves were removed: bit *n* for level *n*.
    pub const fn leaf_levels(&self) -> u32 {
        self.leaf_levels
    }

    /// True when tables were unlinked: caches of upper levels must go too.
    pub const fn tables_unlinked(&self) -> bool {
        self.tables
    }

    /// The table's root, when the unit does not have it yet: the table has
    /// [grown](crate::Table::grow).
    ///
    /// The flush first has the unit walk from this root, with its number of levels, and then
    /// invalidates *everything* of the domain. To invalidate the ranges is not enough: the unit
    /// would go on walking the old root, which may be among the tables that are given back.
    pub const fn new_root(&self) -> Option<Root> {
        self.root
    }

    /// True when there is nothing to invalidate.
    pub const fn is_empty(&self) -> bool {
        self.ranges.is_empty() && !self.tables && self.root.is_none()
    }
}

impl Gather {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self {
            invalidation: Invalidation {
                root: None,
                ranges: ArrayVec::new_const(),
                leaf_levels: 0,
                tables: false,
            },
            tables: Chain::empty(),
            root: 0,
        }
    }

    /// Invalidation that the unit has to do.
    pub const fn invalidation(&self) -> &Invalidation {
        &self.invalidation
    }

    /// True when nothing was removed: a flush would do nothing.
    pub const fn is_empty(&self) -> bool {
        self.invalidation.is_empty() && self.tables.is_empty()
    }

    /// How many tables wait for the flush.
    pub const fn tables(&self) -> u64 {
        self.tables.len()
    }

    /// Has `flush` invalidate everything in every unit that walks the table, and wait until no
    /// walk that began earlier is under way. The gather is empty afterwards; when `flush` fails it
    /// is untouched, to be flushed again.
    ///
    /// `flush` is not called when there is nothing to invalidate.
    pub fn flush_with<E>(
        &mut self,
        flush: impl FnOnce(&Invalidation) -> Result<(), E>,
    ) -> Result<Flushed, E> {
        if !self.is_empty() {
            flush(&self.invalidation)?;
        }
        let flushed = Flushed {
            tables: core::mem::replace(&mut self.tables, Chain::empty()),
            root: core::mem::take(&mut self.root),
        };
        self.invalidation.ranges.clear();
        self.invalidation.root = None;
        self.invalidation.leaf_levels = 0;
        self.invalidation.tables = false;
        Ok(flushed)
    }

    /// For a table that no unit can reach: there is nothing to flush.
    pub fn never_walked(self) -> Flushed {
        Flushed {
            tables: self.tables,
            root: self.root,
        }
    }

    #[cfg(feature = "alloc")]
    /// Takes in what another gather of the same table holds. `append` puts its tables into the chain.
    pub(crate) fn join(&mut self, other: Self, append: impl FnOnce(&mut Chain, Chain)) {
        for range in other.invalidation.ranges() {
            self.add(*range, other.invalidation.leaf_levels);
        }
        self.invalidation.tables |= other.invalidation.tables;
        if let Some(root) = other.invalidation.root {
            self.set_root(root, other.root);
        }
        append(&mut self.tables, other.tables);
    }

    /// Notes that leaves at `level` were removed from `range`. Inlined: for a single page a call
    /// costs as much again.
    #[inline(always)]
    pub(crate) fn add(&mut self, range: Span<Iova>, leaf_levels: u32) {
        let inv = &mut self.invalidation;
        inv.leaf_levels |= leaf_levels;
        // Growing the open range covers a neighbour exactly; with no room left it covers the gap
        // as well, which invalidates more than was removed and never less.
        let full = inv.ranges.is_full();
        if let Some(open) = inv.ranges.last_mut() {
            let touches = range.start <= open.last().saturating_add(1)
                && open.start <= range.last().saturating_add(1);
            if touches || full {
                let (first, last) = (open.start.min(range.start), open.last().max(range.last()));
                *open = Span::new(first, (last - first).saturating_add(1));
                return;
            }
        }
        // There is room: it is not full.
        let _ = inv.ranges.try_push(range);
    }

    /// Notes that tables of `owner` will be unlinked that come back in another way.
    pub(crate) fn note_tables<F: Format, M: TableMemory>(&mut self, owner: &Table<F, M>) {
        self.invalidation.tables = true;
        owner.note_root(self);
    }

    /// Notes that `table` was unlinked from `owner`.
    #[inline]
    pub(crate) fn add_table<F: Format, M: TableMemory>(&mut self, owner: &Table<F, M>, table: u64) {
        self.invalidation.tables = true;
        self.tables.push(&owner.memory, table);
        // It may be an old root, which the unit walks until it has the new one.
        owner.note_root(self);
    }

    /// Notes that the unit must receive this root, which is `word` to its table.
    pub(crate) fn set_root(&mut self, root: Root, word: u64) {
        self.invalidation.root = Some(root);
        self.root = word;
    }
}

impl Default for Gather {
    fn default() -> Self {
        Self::new()
    }
}

/// Proof that a gather was flushed: the tables in it may be used again.
#[derive(Debug)]
#[must_use = "the tables in it stay out of use until they are reclaimed"]
pub struct Flushed {
    pub(crate) tables: Chain,
    /// The root that the unit has, as the table notes it; 0 for none.
    pub(crate) root: u64,
}

impl Flushed {
    /// The tables, for [`TableMemory::reclaim`](crate::TableMemory::reclaim) once the table that
    /// they belonged to is gone.
    pub fn into_tables(self) -> Chain {
        self.tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_grow_together_and_many_ranges_never_lose_one() {
        let mut gather = Gather::new();
        gather.add(Span::new(0x1000, 0x1000), 1);
        gather.add(Span::new(0x2000, 0x1000), 1);
        gather.add(Span::new(0, 0x1000), 1);
        assert_eq!(gather.invalidation().ranges(), [Span::new(0, 0x3000)]);
        for i in 1..40u64 {
            gather.add(Span::new(i << 30, 0x1000), 2);
        }
        assert_eq!(gather.invalidation().ranges().len(), RANGES);
        for i in 1..40u64 {
            let page = Span::new(i << 30, 0x1000);
            assert!(
                gather
                    .invalidation()
                    .ranges()
                    .iter()
                    .any(|r| r.covers(&page)),
                "{page}"
            );
        }
        assert_eq!(gather.invalidation().leaf_levels(), 3);
        let _ = gather.never_walked();
    }

    #[test]
    fn a_failed_flush_leaves_the_gather_as_it_is() {
        let mut gather = Gather::new();
        gather.add(Span::new(0x1000, 0x1000), 1);
        assert_eq!(
            gather.flush_with(|_| Err("time-out")).unwrap_err(),
            "time-out"
        );
        assert_eq!(gather.invalidation().ranges(), [Span::new(0x1000, 0x1000)]);
        assert!(gather.flush_with(|_| Ok::<_, ()>(())).is_ok());
        assert!(gather.is_empty());
        // Nothing of what was flushed is asked for again.
        gather.add(Span::new(1 << 30, 1 << 21), 2);
        assert_eq!(gather.invalidation().leaf_levels(), 2);
        assert_eq!(
            gather.invalidation().ranges(),
            [Span::new(1 << 30, 1 << 21)]
        );
        let _ = gather.never_walked();
        assert!(
            Gather::new().flush_with(|_| Err(())).is_ok(),
            "nothing to flush, nothing asked"
        );
    }
}
