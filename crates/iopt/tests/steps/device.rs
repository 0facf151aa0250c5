//! A device that walks the tables while they change.

use std::cell::{Cell as Plain, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use iopt::Cell;
use iopt::walk::{Access, UpperTable, WalkCache, Walker};

use super::memory::Tables;

/// A unit's cache of upper levels: what it has found stays until a flush, also when it is gone
/// from the tables.
#[derive(Default)]
pub(crate) struct Stale(pub(crate) BTreeMap<(u8, u64), UpperTable>);

impl WalkCache for Stale {
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        let spans = |table: &&UpperTable| {
            table.span_log2 < 64 && (iova ^ table.iova) >> table.span_log2 == 0
        };
        self.0.values().find(spans).copied()
    }
    fn found(&mut self, table: &UpperTable) {
        self.0.insert((table.level, table.iova), *table);
    }
}

/// Device that walks the tables meanwhile.
pub(crate) struct Device<C: Cell + 'static, const LOG2: u32> {
    pub(crate) tables: &'static Tables<C, LOG2>,
    pub(crate) walker: Walker,
    /// Its leaves get dirty.
    pub(crate) writes: bool,
    pub(crate) cache: RefCell<Stale>,
    /// Pages that it wrote to since they were mapped.
    pub(crate) written: RefCell<BTreeSet<u64>>,
    pub(crate) random: RefCell<fastrand::Rng>,
    /// It writes nothing by itself.
    pub(crate) idle: Plain<bool>,
}

impl<C: Cell, const LOG2: u32> Device<C, LOG2> {
    pub(crate) fn random(&self, below: usize) -> usize {
        self.random.borrow_mut().usize(..below)
    }

    /// Where a read of `iova` leads, without what is cached.
    pub(crate) fn seen(&self, iova: u64) -> Option<u64> {
        self.seen_by(iova, &mut ())
    }

    pub(crate) fn seen_with_cache(&self, iova: u64) -> Option<u64> {
        self.seen_by(iova, &mut *self.cache.borrow_mut())
    }

    fn seen_by(&self, iova: u64, cache: &mut impl WalkCache) -> Option<u64> {
        let reader = self.walker.with_updates(false);
        let found = reader.walk(self.tables, iova, Access::Read, cache);
        found.ok().map(|found| found.pa)
    }

    /// Writes a page, through cached tables or not.
    pub(crate) fn write(&self, iova: u64) {
        if !self.writes {
            return;
        }
        let found = if self.random(2) == 0 {
            let mut cache = self.cache.borrow_mut();
            self.walker
                .walk(self.tables, iova, Access::Write, &mut *cache)
        } else {
            self.walker.walk(self.tables, iova, Access::Write, &mut ())
        };
        if found.is_ok() {
            self.written.borrow_mut().insert(iova);
        }
    }
}
