//! Counting what the engine does.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::memory::{TableMemory, pass_on, pass_runs_on};

/// Table memory that counts what is done to its tables.
#[derive(Debug, Default)]
pub struct Counted<M> {
    inner: M,
    descents: AtomicU64,
    table_reads: AtomicU64,
    entry_stores: AtomicU64,
}

/// Counts of a [`Counted`] memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableCounters {
    /// How often a pass went down from a root.
    pub descents: u64,
    /// How often a pass turned to the entries of a table.
    pub table_reads: u64,
    /// Entries that were stored. All entries of new tables count, the empty ones too.
    pub entry_stores: u64,
}

impl<M> Counted<M> {
    /// Counts what is done to tables in `inner` from now on.
    pub const fn new(inner: M) -> Self {
        Self {
            inner,
            descents: AtomicU64::new(0),
            table_reads: AtomicU64::new(0),
            entry_stores: AtomicU64::new(0),
        }
    }

    /// The memory inside.
    pub const fn inner(&self) -> &M {
        &self.inner
    }

    /// Returns the counts since the beginning, or since the last [`take`](Self::take).
    pub fn counters(&self) -> TableCounters {
        TableCounters {
            descents: self.descents.load(Ordering::Relaxed),
            table_reads: self.table_reads.load(Ordering::Relaxed),
            entry_stores: self.entry_stores.load(Ordering::Relaxed),
        }
    }

    /// Returns the counts; counting begins again at 0.
    pub fn take(&self) -> TableCounters {
        TableCounters {
            descents: self.descents.swap(0, Ordering::Relaxed),
            table_reads: self.table_reads.swap(0, Ordering::Relaxed),
            entry_stores: self.entry_stores.swap(0, Ordering::Relaxed),
        }
    }
}

impl<M: TableMemory> TableMemory for Counted<M> {
    pass_on!(self => self.inner);
    pass_runs_on!(self => self.inner);

    const FLUSHES: bool = M::FLUSHES;

    fn written(&self, entries: &[M::Cell]) {
        self.entry_stores
            .fetch_add(entries.len() as u64, Ordering::Relaxed);
        self.inner.written(entries);
    }

    fn descended(&self) {
        self.descents.fetch_add(1, Ordering::Relaxed);
        self.inner.descended();
    }

    fn table_read(&self, table: u64) {
        self.table_reads.fetch_add(1, Ordering::Relaxed);
        self.inner.table_read(table);
    }
}
