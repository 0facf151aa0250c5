//! Tables set aside for what is released, so that its return cannot fail for them.
//!
//! Memory that comes back may be scattered where it was not before: in the worst case there is a leaf
//! for each page, and so a table for each stretch of addresses that a table translates, on every level
//! below the root. One is set aside for each such stretch with anything released in it. What counts is
//! how many bytes of it are released, so that areas can be cut and joined as they like.
//!
//! The tables wait in a chain of the domain, from which the map that brings memory back takes them, so
//! that no other operation can take them first. (What a map that fails half-way had taken goes through the
//! table memory once, when it is flushed.) Upper tables that it did use serve what is still released as
//! well, for as long as they are there; so fewer may be set aside than are wanted, and what comes free
//! fills up.

use alloc::vec::Vec;

use iopt::{AnyMemory, AnyTable, Chain, NoTables, TableMapError};
use runs::{Iova, Span};

use crate::ranges::range_map::RangeMap;

/// Numbers of tables of one level: device addresses over what such a table translates.
#[derive(Debug)]
enum Numbers {}

/// The tables that a domain has set aside.
pub(crate) struct Spare {
    /// For each level below the root, the log2 of what a table translates, and how many bytes are
    /// released in it, by number.
    levels: Vec<(u32, RangeMap<Numbers, u64>)>,
    tables: Chain,
    /// Number of wanted tables.
    wanted: u64,
}

impl Spare {
    pub(super) const fn new() -> Self {
        Self {
            levels: Vec::new(),
            tables: Chain::empty(),
            wanted: 0,
        }
    }

    /// Sets aside what `range` can take.
    pub(super) fn add(&mut self, range: Span<Iova>, table: &AnyTable) -> Result<(), TableMapError> {
        let known = self.levels.len();
        let more = (known..).map_while(|level| table.table_log2(level));
        let more: Vec<_> = more.map(|log2| (log2, RangeMap::default())).collect();
        self.levels.extend(more);
        let fresh = self.without(range);
        let taken = self.take(fresh, table.memory()).or_else(|_| {
            // Some may wait for others, to be given back together.
            table.poll();
            self.take(fresh, table.memory())
        });
        taken.map_err(TableMapError::NoTables)?;
        self.wanted += fresh;
        self.change(range, |bytes, by| *bytes += by);
        Ok(())
    }

    /// Gives back what only `range` can take, of which each byte was added.
    pub(super) fn give_back(&mut self, range: Span<Iova>, memory: &AnyMemory) {
        self.change(range, |bytes, by| *bytes = bytes.saturating_sub(by));
        self.wanted = self.wanted.saturating_sub(self.without(range));
        let more = self.tables.len().saturating_sub(self.wanted);
        memory.take_back(more, &mut self.tables);
    }

    /// Source of tables for a map of something that was added. Filling up comes next.
    pub(super) const fn tables(&mut self) -> &mut Chain {
        &mut self.tables
    }

    /// Sets aside what is wanted, as far as there are tables.
    pub(super) fn fill_up(&mut self, memory: &AnyMemory) {
        let mut missing = self.wanted.saturating_sub(self.tables.len());
        while missing > 0 {
            match self.take(missing, memory) {
                Ok(()) => missing = self.wanted.saturating_sub(self.tables.len()),
                Err(_) => missing /= 2,
            }
        }
    }

    fn take(&mut self, count: u64, memory: &AnyMemory) -> Result<(), NoTables> {
        if count == 0 {
            return Ok(());
        }
        memory.set_aside(count, &mut self.tables)
    }

    /// Number of stretches with bytes in `range` that have nothing released.
    fn without(&self, range: Span<Iova>) -> u64 {
        let levels = self.levels.iter();
        let gaps = levels.flat_map(|(log2, bytes)| bytes.gaps(numbers(range, *log2)));
        gaps.map(|gap| gap.len).sum()
    }

    /// Gives back everything.
    pub(super) fn end(self, memory: &AnyMemory) {
        memory.reclaim(self.tables);
    }

    /// Has `change` change the bytes of each stretch, by what of it lies in `range`.
    fn change(&mut self, range: Span<Iova>, change: impl Fn(&mut u64, u64)) {
        for (log2, bytes) in &mut self.levels {
            let size = 1u64 << *log2;
            let all = numbers(range, *log2);
            let (first, last) = (all.start, all.last());
            let head = (size - (range.start & (size - 1))).min(range.len);
            bytes.change(Span::new(first, 1), |bytes| change(bytes, head));
            if last > first {
                let tail = (range.last() & (size - 1)) + 1;
                bytes.change(Span::new(last, 1), |bytes| change(bytes, tail));
            }
            if last - first > 1 {
                let between = Span::new(first + 1, last - first - 1);
                bytes.change(between, |bytes| change(bytes, size));
            }
        }
    }
}

/// The numbers of the stretches of 2^`log2` bytes with bytes in `range`.
fn numbers(range: Span<Iova>, log2: u32) -> Span<Numbers> {
    let (first, last) = (range.start >> log2, range.last() >> log2);
    Span::new(first, last - first + 1)
}
