//! Memory as a unit that does not snoop reads it; shared by the drivers' tests of such units.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iopt::observe::{CacheLines, NonCoherent};
use iopt::{HeapTables, TableMemory};

/// Earlier content of memory: it looks like an entry of every kind.
const OLD: u64 = 0x1001;

/// Copies lines that are written back to where the unit reads.
pub(crate) struct Lines {
    start: usize,
    tables: Arc<HeapTables>,
    seen: Arc<[AtomicU64]>,
}

impl CacheLines for Lines {
    const LINE: usize = 64;

    fn write_back(&self, line: *const u8) {
        // The first and the last line are not all tables.
        for address in (line.addr()..line.addr() + 64).step_by(8) {
            let n = address.wrapping_sub(self.start) / 8;
            if let Some(seen) = self.seen.get(n) {
                let word = self.tables.read(self.tables.base() + n as u64 * 8);
                seen.store(word.unwrap(), Ordering::Relaxed);
            }
        }
    }

    fn complete(&self) {}
}

/// The memory for a driver, and the word at an address as the unit sees it: [`OLD`], or what was written back.
pub(crate) fn past_caches(
    tables: Arc<HeapTables>,
) -> (
    NonCoherent<Arc<HeapTables>, Lines>,
    impl Fn(u64) -> u64 + Send + Sync + 'static,
) {
    let base = tables.base();
    let seen: Arc<[AtomicU64]> = (0..tables.size() / 8)
        .map(|_| AtomicU64::new(OLD))
        .collect();
    let lines = Lines {
        start: tables.entries(base, 1).as_ptr().addr(),
        tables: tables.clone(),
        seen: seen.clone(),
    };
    let read = move |address: u64| {
        let word = seen.get((address.wrapping_sub(base) / 8) as usize);
        word.map_or(OLD, |word| word.load(Ordering::Relaxed))
    };
    (NonCoherent::new(tables, lines), read)
}
