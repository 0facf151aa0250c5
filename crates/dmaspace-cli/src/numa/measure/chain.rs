//! Tables with a chain through them, and one sample of walking it.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use ioas::HostTables;
use iopt::walk::{Access, BadAddress, WalkFault, WalkMemory, Walker};
use iopt::{AnyTable, FormatId, Prot};
use runs::{PageSizes, Span};

use crate::map::clock::nanoseconds;
use scenario::pattern::shuffled;

/// Walks of a sample: one for each 128 bytes of the root.
pub(super) const WALKS: u64 = 32;
/// Samples until all walks were done once.
pub(super) const SAMPLES: usize = 16;
/// Entries of a table.
const ENTRIES: u64 = 512;
const _: () = assert!(WALKS * SAMPLES as u64 == ENTRIES);
const LEVELS: u8 = 4;
/// Room for the root and, for each of its entries, a table of each lower level.
pub(super) const TABLE_BYTES: u64 = (1 + ENTRIES * (LEVELS as u64 - 1)) * iopt::TABLE_BYTES;

/// Why there is no such chain, or it leads astray.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChainError {
    /// The table cannot be built.
    #[error("cannot build a page table")]
    Build(#[from] iopt::BuildError),
    /// A page cannot be mapped.
    #[error("cannot map a page")]
    Map(#[from] iopt::TableMapError),
    /// A walk ends without a page.
    #[error("a walk faults: {0:?}")]
    Fault(WalkFault),
    /// A walk leads to another page than the one that was mapped.
    #[error("the walk at {iova:#x} leads to {found:#x} and not to {expected:#x}")]
    Astray {
        /// Where it began.
        iova: u64,
        /// What came of it.
        found: u64,
        /// What was mapped there.
        expected: u64,
    },
}

/// Tables on one node, which lead through all of themselves.
#[derive(Debug)]
pub(super) struct Chain {
    memory: Arc<HostTables>,
    /// Owns what is walked.
    _table: AnyTable,
    walker: Walker,
    parts: Vec<Part>,
}

/// What one sample walks.
#[derive(Debug)]
struct Part {
    first: u64,
    /// Where the last walk leads.
    end: u64,
    /// The offsets in the memory of all entries that are read.
    entries: Vec<u64>,
}

/// What one sample took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Reads of all its walks.
    pub(super) reads: u64,
    /// All its walks, reading from memory.
    pub(super) memory_ns: u64,
    /// The same from caches.
    pub(super) caches_ns: u64,
}

impl Chain {
    /// Fills tables in `memory`, and follows them once.
    pub(super) fn new(memory: Arc<HostTables>) -> Result<Self, ChainError> {
        let sizes = PageSizes::from_bits(4096);
        let table = AnyTable::new(FormatId::VtdSs, LEVELS, sizes, Arc::clone(&memory))?;
        let stops = stops();
        let next = stops.iter().cycle().skip(1);
        for (iova, next) in stops.iter().zip(next) {
            table.map(*iova, &[Span::new(*next, 4096)], Prot::READ)?;
        }
        let mut chain = Self {
            walker: Walker::new(table.root()),
            memory,
            _table: table,
            parts: Vec::with_capacity(SAMPLES),
        };
        let next = stops.iter().cycle().skip(1);
        let mut steps = stops.iter().zip(next);
        for _ in 0..SAMPLES {
            let part = chain.follow(steps.by_ref().take(WALKS as usize))?;
            chain.parts.push(part);
        }
        Ok(chain)
    }

    /// Walks from each stop to the next one, and notes what is read.
    fn follow<'a>(
        &self,
        steps: impl Iterator<Item = (&'a u64, &'a u64)>,
    ) -> Result<Part, ChainError> {
        let noted = Noted {
            memory: &self.memory,
            entries: RefCell::new(Vec::new()),
        };
        let (mut first, mut end) = (None, 0);
        for (&iova, &expected) in steps {
            let walked = self.walker.walk(&noted, iova, Access::Read, &mut ());
            let found = walked.map_err(ChainError::Fault)?.pa;
            if found != expected {
                return Err(ChainError::Astray {
                    iova,
                    found,
                    expected,
                });
            }
            first.get_or_insert(iova);
            end = found;
        }
        Ok(Part {
            first: first.unwrap_or_default(),
            end,
            entries: noted.entries.into_inner(),
        })
    }

    /// Walks part `nth` twice: after `evict` has emptied the caches of the entries that it is given,
    /// and again.
    pub(super) fn sample(
        &self,
        nth: usize,
        evict: impl FnOnce(&mut dyn Iterator<Item = &AtomicU64>),
    ) -> Result<Sample, ChainError> {
        let Some(part) = self.parts.get(nth) else {
            return Ok(Sample {
                reads: 0,
                memory_ns: 0,
                caches_ns: 0,
            });
        };
        let cells = self.memory.storage().mapping().cells();
        let mut entries = part.entries.iter();
        evict(&mut std::iter::from_fn(|| {
            cells.get(*entries.next()? as usize / 8)
        }));
        let (reads, memory_ns) = self.walk(part)?;
        let (_, caches_ns) = self.walk(part)?;
        Ok(Sample {
            reads,
            memory_ns,
            caches_ns,
        })
    }

    /// The walks of a part, each from where the one before leads: reads, and nanoseconds.
    fn walk(&self, part: &Part) -> Result<(u64, u64), ChainError> {
        let (mut at, mut reads) = (part.first, 0);
        let started = Instant::now();
        for _ in 0..WALKS {
            let walked = self.walker.walk(&*self.memory, at, Access::Read, &mut ());
            let walked = walked.map_err(ChainError::Fault)?;
            at = walked.pa;
            reads += u64::from(walked.reads);
        }
        let taken = nanoseconds(started);
        if at != part.end {
            return Err(ChainError::Astray {
                iova: part.first,
                found: at,
                expected: part.end,
            });
        }
        Ok((reads, taken))
    }
}

/// The addresses of all pages, in the order of the chain: in each run of [`WALKS`] none shares 128
/// bytes of the root with another, and each has lower tables of its own.
fn stops() -> Vec<u64> {
    let mut lower = shuffled(1 << 27, 1);
    let parts = (0..SAMPLES as u64)
        .flat_map(|part| shuffled(WALKS, part + 1).map(move |line| line * SAMPLES as u64 + part));
    let pages = parts.map(|root| (root << 27 | lower.next().unwrap_or_default()) << 12);
    pages.collect()
}

/// Table memory that notes which entries are read.
struct Noted<'a> {
    memory: &'a HostTables,
    entries: RefCell<Vec<u64>>,
}

impl WalkMemory for Noted<'_> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let offset = address.wrapping_sub(self.memory.base());
        self.entries.borrow_mut().push(offset);
        self.memory.read_u64(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ioas::NodeTables;
    use std::collections::HashSet;

    fn chain() -> Chain {
        let tables = NodeTables::new(TABLE_BYTES, super::super::TABLE_WINDOW);
        Chain::new(tables.memory(None).unwrap()).unwrap()
    }

    #[test]
    fn no_two_walks_of_a_sample_read_the_same_lines() {
        let chain = chain();
        let mut pages = HashSet::new();
        for part in &chain.parts {
            assert_eq!(part.entries.len() as u64, WALKS * u64::from(LEVELS));
            let lines: HashSet<u64> = part.entries.iter().map(|entry| entry / 128).collect();
            assert_eq!(lines.len(), part.entries.len());
            pages.extend(part.entries.iter().map(|entry| entry / 4096));
        }
        assert_eq!(pages.len() as u64 * 4096, TABLE_BYTES);
    }

    #[test]
    fn the_parts_are_one_ring() {
        let chain = chain();
        let next = chain.parts.iter().cycle().skip(1);
        assert!(
            chain
                .parts
                .iter()
                .zip(next)
                .all(|(part, next)| part.end == next.first)
        );
        let firsts: HashSet<u64> = chain.parts.iter().map(|part| part.first).collect();
        assert_eq!(firsts.len(), SAMPLES);
    }

    #[test]
    fn a_sample_empties_the_caches_of_what_it_reads_and_reads_all_of_it() {
        let chain = chain();
        let mut emptied = 0;
        let sample = chain.sample(3, |cells| emptied = cells.count()).unwrap();
        assert_eq!((sample.reads, emptied), (128, 128));
    }

    #[test]
    fn a_chain_that_was_cut_is_noticed() {
        let chain = chain();
        let leaf = chain.parts[5].entries[3];
        let cell = &chain.memory.storage().mapping().cells()[leaf as usize / 8];
        let entry = cell.fetch_add(4096, std::sync::atomic::Ordering::Relaxed);
        let error = chain.sample(5, |_| ()).unwrap_err();
        assert!(matches!(error, ChainError::Fault(_)), "{error}");
        cell.store(0, std::sync::atomic::Ordering::Relaxed);
        assert!(matches!(chain.sample(5, |_| ()), Err(ChainError::Fault(_))));
        cell.store(entry, std::sync::atomic::Ordering::Relaxed);
        assert!(chain.sample(5, |_| ()).is_ok());
    }
}
