//! Cost of tables over some runs, counted without building any.
//!
//! It counts exactly as the engine maps: the largest leaves of each run that fit, from its beginning.
//! Runs come by ascending address, so on each level the last table that was needed says which are new.
//! So an address space of any size costs only the look at its pages. A test builds the tables with the
//! engine and compares.

use iopt::FormatId;
use runs::{PageSizes, Run};
use serde::Serialize;

use iopt::geometry::Geometry;

/// Leaves of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeafCount {
    /// Bytes of a leaf.
    pub page_bytes: u64,
    /// How many.
    pub count: u64,
}

/// Cost of a mapping in one format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FormatCost {
    /// The format.
    pub format: String,
    /// Leaves, smallest first.
    pub leaves: Vec<LeafCount>,
    /// All leaves.
    pub leaf_count: u64,
    /// Tables, the root among them.
    pub tables: u64,
    /// Their bytes.
    pub table_bytes: u64,
    /// Bytes that an IOTLB of 64 entries reaches: 64 leaves of mean size.
    pub reach_64_bytes: u64,
    /// Runs that are mapped.
    pub runs: u64,
}

/// Counts for one format.
#[derive(Clone, Debug, Default)]
pub(super) struct Counter {
    geometry: Option<Geometry>,
    sizes: PageSizes,
    leaves: Vec<LeafCount>,
    /// For each level below the root's: how many tables, and the last one's number plus one.
    tables: Vec<(u64, u64)>,
    bytes: u64,
}

impl Counter {
    /// `None` when there is no such format.
    pub(super) fn new(format: FormatId, levels: u8) -> Option<Self> {
        let geometry = Geometry::new(format, levels).ok()?;
        Some(Self {
            sizes: geometry.page_sizes,
            tables: vec![(0, 0); geometry.levels.len() - 1],
            geometry: Some(geometry),
            leaves: Vec::new(),
            bytes: 0,
        })
    }

    /// A run, behind all that came before.
    pub(super) fn add(&mut self, mut run: Run) {
        let Some(geometry) = &self.geometry else {
            return;
        };
        self.bytes += run.len;
        let sizes = self.sizes;
        let step = |run: Run| sizes.step(run.iova, run.output());
        while let Some((size, count)) = step(run).filter(|step| step.1 > 0) {
            let at = self.leaves.partition_point(|leaf| leaf.page_bytes < size);
            match self.leaves.get_mut(at) {
                Some(leaf) if leaf.page_bytes == size => leaf.count += count,
                _ => self.leaves.insert(
                    at,
                    LeafCount {
                        page_bytes: size,
                        count,
                    },
                ),
            }
            let bytes = size * count;
            let leaf_level = geometry.level_of(size).unwrap_or(0);
            for (level, (tables, next)) in self.tables.iter_mut().enumerate().skip(leaf_level) {
                let shift = geometry
                    .levels
                    .get(level + 1)
                    .map_or(63, |above| above.shift);
                let (first, last) = (run.iova >> shift, (run.iova + (bytes - 1)) >> shift);
                *tables += (last + 1).saturating_sub(first.max(*next));
                *next = last + 1;
            }
            run = run.skip(bytes);
        }
    }

    pub(super) fn leaf_count(&self) -> u64 {
        self.leaves.iter().map(|leaf| leaf.count).sum()
    }

    pub(super) fn cost(&self, runs: u64) -> FormatCost {
        let leaf_count = self.leaf_count();
        let below: u64 = self.tables.iter().map(|(tables, _)| tables).sum();
        let (name, root, table) = self.geometry.as_ref().map_or(("", 0, 0), |geometry| {
            (
                geometry.format.name(),
                geometry.root_bytes,
                geometry.table_bytes,
            )
        });
        FormatCost {
            format: name.into(),
            leaves: self.leaves.clone(),
            leaf_count,
            tables: below + 1,
            table_bytes: root + below * table,
            reach_64_bytes: match leaf_count {
                0 => 0,
                count => (u128::from(self.bytes) * 64 / u128::from(count)) as u64,
            }
            .min(self.bytes),
            runs,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use iopt::{AnyTable, HeapTables, Prot};
    use proptest::prelude::*;
    use runs::Span;

    use super::*;

    #[test]
    fn an_iotlb_reaches_64_leaves_and_not_beyond_what_is_mapped() {
        let mut counter = Counter::new(FormatId::VtdSs, 4).unwrap();
        assert_eq!(counter.cost(0).reach_64_bytes, 0);
        counter.add(Run::new(0, Span::new(0, 4096)));
        assert_eq!(counter.cost(1).reach_64_bytes, 4096);
        counter.add(Run::new(1 << 20, Span::new(1 << 20, 1 << 20)));
        assert_eq!(counter.cost(2).reach_64_bytes, 64 * 4096);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// The engine builds what was counted: leaves of every size, and tables.
        #[test]
        fn what_is_counted_is_what_the_engine_builds(
            parts in prop::collection::vec((0u64..4000, 1u64..3000, 0u64..0x4_0000, 0u32..4), 1..12),
        ) {
            for (format, levels) in super::super::formats() {
                let memory = Arc::new(HeapTables::with_tables(4096).unwrap());
                let sizes = PageSizes::from_bits(u64::MAX);
                let table = AnyTable::new(format, levels, sizes, memory).unwrap();
                let mut counter = Counter::new(format, levels).unwrap();
                let mut at = 0x7000_0000_0000;
                for &(gap, pages, frame, align) in &parts {
                    // Some with both ends of large pages, some congruent, some neither.
                    let unit = [4096, 1 << 16, 2 << 20, 1 << 30][align as usize];
                    at = (at + gap * 4096u64).next_multiple_of(unit);
                    let pa = (frame << 12).next_multiple_of(unit) + (1 << 34);
                    let len = pages * 4096;
                    table.map(at, &[Span::new(pa, len)], Prot::RW).unwrap();
                    counter.add(Run::new(at, Span::new(pa, len)));
                    at += len;
                }
                let cost = counter.cost(parts.len() as u64);
                let mut leaves: Vec<LeafCount> = Vec::new();
                table.for_each_leaf(Span::new(0, 1 << 47), |leaf| {
                    let at = leaves.partition_point(|known| known.page_bytes < leaf.run.len);
                    match leaves.get_mut(at) {
                        Some(known) if known.page_bytes == leaf.run.len => known.count += 1,
                        _ => leaves.insert(at, LeafCount { page_bytes: leaf.run.len, count: 1 }),
                    }
                });
                prop_assert_eq!(&cost.leaves, &leaves, "{}", format);
                prop_assert_eq!(cost.tables, table.tables(), "{}", format);
                let (gather, memory) = table.tear_down();
                memory.reclaim(gather.never_walked().into_tables());
            }
        }
    }
}
