//! One suite, instantiated per format by one line.

pub(crate) mod model;

use std::collections::BTreeMap;

use iopt::format::Entry;
use iopt::{Format, Gather, HeapTables, MapError, Prot, Table, UnmapError};
use proptest::prelude::*;
use runs::{PageSizes, Run, Span};

use model::{Model, Refusal};

/// One step of a random sequence. Numbers are raw and turned into addresses by [`World`].
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Map {
        place: usize,
        page: u64,
        runs: Vec<(u64, usize, u64)>,
        prot: usize,
    },
    Unmap {
        first: usize,
        count: usize,
        cut: (u64, u64),
        holes: bool,
    },
    UnmapRaw {
        place: usize,
        page: u64,
        pages: u64,
        holes: bool,
    },
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let run = (0u64..1024, 0usize..6, 1u64..40);
    prop_oneof![
        4 => (0usize..5, 0u64..2048, prop::collection::vec(run, 1..5), 0usize..3)
            .prop_map(|(place, page, runs, prot)| Op::Map { place, page, runs, prot }),
        3 => (any::<prop::sample::Index>(), 1usize..900, (0u64..3, 0u64..3), any::<bool>())
            .prop_map(|(first, count, cut, holes)| {
                Op::Unmap { first: first.index(1 << 20), count, cut, holes }
            }),
        1 => (0usize..5, 0u64..2048, 1u64..1200, any::<bool>())
            .prop_map(|(place, page, pages, holes)| Op::UnmapRaw { place, page, pages, holes }),
    ]
}

/// A table beside its model.
pub(crate) struct World<'a, F: Format> {
    pub(crate) memory: &'a HeapTables,
    pub(crate) table: Table<F, &'a HeapTables>,
    pub(crate) model: Model,
    pub(crate) prots: [Prot; 3],
}

impl<'a, F: Format> World<'a, F> {
    pub(crate) fn new(format: F, sizes: PageSizes, memory: &'a HeapTables) -> Self {
        let table = Table::with_page_sizes(format, memory, sizes).unwrap();
        let model = Model::new(table.page_sizes(), format.aperture());
        // Read-only, read-write, and write-only or another that the format can express.
        let third = [Prot::WRITE, Prot::RW | Prot::EXECUTE]
            .into_iter()
            .find(|prot| format.leaf_bits(*prot).is_some())
            .unwrap();
        Self {
            memory,
            table,
            model,
            prots: [Prot::READ, Prot::RW, third],
        }
    }

    /// Start of one of the places where things are mapped: the bottom, a boundary of a large
    /// table, the middle, and just below the ends of the aperture.
    fn place(&self, place: usize) -> u64 {
        let aperture = self.model.aperture;
        let first = aperture.spans().next().unwrap();
        let last = aperture.spans().last().unwrap();
        let boundary = |log2: u32| first.start + (1u64 << log2.min(aperture.bits - 2));
        match place {
            0 => first.start,
            1 => boundary(39) - (4 << 20),
            2 => boundary(30) - (3 << 12),
            // Just below the end of the lower and of the upper half.
            3 => first.start + (first.len - 1) - ((8 << 20) - 1),
            _ => last.start + (last.len - 1) - ((8 << 20) - 1),
        }
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        let grain = self.model.sizes[0];
        match op {
            Op::Map {
                place,
                page,
                runs,
                prot,
            } => {
                let iova = self.place(*place).wrapping_add(page * 4096) & !(grain - 1);
                let largest = self.model.sizes.iter().copied().max().unwrap();
                let mut at = iova;
                let mut spans = Vec::new();
                for &(pa, kind, n) in runs {
                    let unit = [4096, 4096, 65536, 1 << 20, 2 << 20, 1 << 30][kind];
                    // Where both addresses are aligned alike large leaves are possible; elsewhere
                    // lengths stay short, since every page is a leaf then.
                    let alike = pa % 2 == 0 && largest >= unit >> 4;
                    let (start, unit) = if alike {
                        ((pa << 32) | (at & ((1 << 30) - 1)), unit)
                    } else {
                        ((1 << 33) + pa * 4096, unit.min(16384))
                    };
                    let n = if unit == 1 << 30 { n % 2 + 1 } else { n };
                    let len = (n * unit).next_multiple_of(grain);
                    spans.push(Span::new(start & !(grain - 1), len));
                    at = at.wrapping_add(len);
                }
                self.map(iova, &spans, self.prots[*prot]);
            }
            Op::Unmap {
                first,
                count,
                cut,
                holes,
            } => {
                let leaves: Vec<Run> = self.model.leaves.values().map(|leaf| leaf.run).collect();
                let Some(start) = leaves.get(first % leaves.len().max(1)) else {
                    return;
                };
                let end = &leaves[(first % leaves.len() + count - 1).min(leaves.len() - 1)];
                let (first, last) = (start.iova, end.input().last());
                // Now and then a page less at either end: a cut, unless leaves are that small.
                let first = first.saturating_add(if cut.0 == 0 { grain } else { 0 });
                let last = last.saturating_sub(if cut.1 == 0 { grain } else { 0 });
                if let Some(span) = Span::inclusive(first, last) {
                    self.unmap(span, *holes);
                }
            }
            Op::UnmapRaw {
                place,
                page,
                pages,
                holes,
            } => {
                let iova = self.place(*place).wrapping_add(page * 4096) & !(grain - 1);
                let len = (pages * 4096).next_multiple_of(grain);
                self.unmap(Span::new(iova, len), *holes);
            }
        }
        self.check();
    }

    pub(crate) fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) {
        let before = self.snapshot();
        let expected = self.model.map(iova, runs, prot);
        let result = self.table.map(iova, runs, prot);
        match (&result, &expected) {
            (Ok(()), Ok(())) => {}
            (Err(MapError::Overlap { found, .. }), Err(Refusal::Overlap(leaf))) => {
                assert_eq!(found, leaf);
            }
            (Err(MapError::Range(_)), Err(Refusal::Range)) => {}
            _ => panic!("map {iova:#x} {runs:?}: {result:?}, expected {expected:?}"),
        }
        if result.is_err() {
            assert!(before == self.snapshot(), "a refused map changed the table");
        }
    }

    pub(crate) fn unmap(&mut self, span: Span, holes: bool) {
        let before = self.snapshot();
        let expected = self.model.unmap(span, holes);
        let mut gather = Gather::new();
        let mut runs = Vec::new();
        let result = if holes {
            self.table
                .unmap_mapped(span, &mut gather, &mut |run| runs.push(run))
                .map(Some)
        } else {
            self.table
                .unmap(span, &mut gather, &mut |run| runs.push(run))
                .map(|()| None)
        };
        match (&result, &expected) {
            (Ok(bytes), Ok(expected)) => {
                assert_eq!(&runs, expected);
                let removed: u64 = runs.iter().map(|run| run.len).sum();
                assert_eq!(bytes.unwrap_or(span.len), removed);
                for run in &runs {
                    let flushed = gather.invalidation().ranges();
                    assert!(
                        flushed.iter().any(|r| r.covers(&run.input())),
                        "{run} not flushed"
                    );
                }
            }
            (Err(UnmapError::InsideLeaf { .. }), Err(Refusal::InsideLeaf)) => {}
            (Err(UnmapError::Hole { at, .. }), Err(Refusal::Hole(hole))) => assert_eq!(at, hole),
            (Err(UnmapError::Range(_)), Err(Refusal::Range)) => {}
            _ => panic!("unmap {span} {holes}: {result:?}, expected {expected:?}"),
        }
        if result.is_err() {
            assert!(gather.is_empty());
            assert!(
                before == self.snapshot(),
                "a refused unmap changed the table"
            );
        }
        let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
        self.table.reclaim(flushed);
    }

    /// Everything that the table says is what the model says.
    pub(crate) fn check(&self) {
        let spans = self.model.aperture.spans();
        let leaves: Vec<_> = spans.flat_map(|span| self.table.leaves(span)).collect();
        let expected: Vec<_> = self.model.leaves.values().collect();
        assert_eq!(leaves.len(), expected.len());
        for (leaf, expected) in leaves.iter().zip(&expected) {
            assert_eq!((leaf.run, leaf.prot), (expected.run, expected.prot));
        }
        for leaf in expected.iter().step_by(expected.len() / 16 + 1) {
            let Span { start, len } = leaf.run.input();
            for iova in [
                start.wrapping_sub(1),
                start,
                start + len / 2 + 5,
                start.wrapping_add(len),
            ] {
                assert_eq!(
                    self.table.translate(iova),
                    self.model.translate(iova),
                    "{iova:#x}"
                );
            }
        }
        assert_eq!(self.table.tables(), self.memory.in_use());
    }

    /// The bytes of every table that can be reached from the root.
    pub(crate) fn snapshot(&self) -> BTreeMap<u64, Vec<u64>> {
        let mut tables = BTreeMap::new();
        let root = self.table.root();
        self.collect(root.address, usize::from(root.levels) - 1, &mut tables);
        tables
    }

    fn collect(&self, table: u64, level: usize, tables: &mut BTreeMap<u64, Vec<u64>>) {
        let words: Vec<u64> = (0..self.table.format().entries(level) as u64)
            .map(|i| self.memory.read(table + i * F::ENTRY_BYTES as u64).unwrap())
            .collect();
        for word in &words {
            if let Entry::Table(below) = F::decode(level, *word) {
                self.collect(below, level - 1, tables);
            }
        }
        assert!(
            tables.insert(table, words).is_none(),
            "a table is linked twice"
        );
    }

    /// Unmaps everything; nothing is left but the root, and then not even that.
    pub(crate) fn finish(mut self) {
        let runs: Vec<Run> = self.model.leaves.values().map(|leaf| leaf.run).collect();
        for run in runs {
            self.unmap(run.input(), false);
        }
        assert_eq!(self.table.tables(), 1);
        assert_eq!(self.memory.in_use(), 1);
        let root = self.table.root().address;
        for offset in (0..4096).step_by(8) {
            assert_eq!(self.memory.read(root + offset), Some(0));
        }
        let (gather, memory) = self.table.tear_down();
        let flushed = gather.never_walked();
        iopt::TableMemory::reclaim(memory, flushed.into_tables());
        assert_eq!(self.memory.in_use(), 0);
    }
}

/// The suite for one format.
macro_rules! suite {
    ($name:ident, $format:expr, $sizes:expr) => {
        mod $name {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

                #[test]
                fn random_sequences_match_the_model(ops in prop::collection::vec(op(), 1..40)) {
                    let memory = HeapTables::with_tables(1 << 12).unwrap();
                    let mut world = World::new($format, $sizes, &memory);
                    for op in &ops {
                        world.apply(op);
                    }
                    world.finish();
                }
            }

            #[test]
            fn an_allocator_that_fails_at_any_page_changes_nothing() {
                $crate::suite::failing_allocator($format, $sizes);
            }

            #[test]
            fn a_request_is_refused_for_what_is_wrong_with_it() {
                $crate::suite::refusals($format);
            }
        }
    };
}

/// Maps something that needs many tables with an allocator that has only n left, for every n.
pub(crate) fn failing_allocator<F: Format>(format: F, sizes: PageSizes) {
    let memory = HeapTables::with_tables(16).unwrap();
    let mut world = World::new(format, sizes, &memory);
    let grain = world.model.sizes[0];
    // Two places far apart, and leaf tables on both sides of a boundary.
    let iova = (1u64 << 30) - grain;
    let run = [Span::new(7 << 33 | grain, 2 * grain)];
    let mut refused = 0;
    for left in 0..16 {
        let free = 16 - memory.in_use();
        if left > free {
            break;
        }
        let hold = iopt::TableMemory::reserve(&memory, free - left).unwrap();
        let before = world.snapshot();
        match world.table.map(iova, &run, Prot::READ) {
            Ok(()) => {
                iopt::TableMemory::give_back(&memory, hold);
                let model = world.model.map(iova, &run, Prot::READ);
                assert_eq!(model, Ok(()));
                world.check();
                assert!(
                    refused >= 2,
                    "{refused} refusals: the request needed no tables"
                );
                world.finish();
                return;
            }
            Err(MapError::NoTables(cause)) => {
                refused += 1;
                assert_eq!(cause.available, left * 4096);
                assert!(cause.needed > cause.available);
                assert!(before == world.snapshot());
                iopt::TableMemory::give_back(&memory, hold);
            }
            Err(other) => panic!("{other}"),
        }
    }
    panic!("never mapped");
}

pub(crate) fn refusals<F: Format>(format: F) {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let page = [Span::new(0x10_0000, 4096)];
    let range = |result: Result<(), MapError>| match result {
        Err(MapError::Range(cause)) => cause.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        range(table.map(0, &[], Prot::READ)),
        "the range has no bytes"
    );
    assert_eq!(
        range(table.map(0, &[Span::new(0, 0)], Prot::READ)),
        "the range has no bytes"
    );
    assert_eq!(
        range(table.map(0x800, &page, Prot::READ)),
        "0x800 is not a multiple of the smallest page, 0x1000 bytes"
    );
    assert!(range(table.map(0, &[Span::new(0, 5)], Prot::READ)).starts_with("0x5 is not"));
    assert!(range(table.map(0, &[Span::new(9, 4096)], Prot::READ)).starts_with("0x9 is not"));
    let bits = format.aperture().bits;
    if bits < 64 {
        let top = (1u64 << bits) - 4096;
        assert!(range(table.map(1 << bits, &page, Prot::READ)).contains("outside"));
        let two = [Span::new(0, 8192)];
        assert!(range(table.map(top, &two, Prot::READ)).contains("outside"));
    }
    assert!(range(table.map(!0xfff, &[Span::new(0, 8192)], Prot::READ)).contains("beyond 2^64"));
    assert_eq!(
        table.map(0, &[Span::new((1 << 52) - 4096, 8192)], Prot::READ),
        Err(MapError::OutputTooWide {
            output: Span::new((1 << 52) - 4096, 8192),
            bits: 52
        })
    );
    assert!(matches!(
        table.map(0, &page, Prot::empty()),
        Err(MapError::Prot { .. })
    ));
    table.map(0x5000, &page, Prot::READ).unwrap();
    assert_eq!(
        table.map(0x4000, &[Span::new(0, 3 * 4096)], Prot::READ),
        Err(MapError::Overlap {
            wanted: Span::new(0x4000, 3 * 4096),
            found: Run::new(0x5000, 0x10_0000, 4096)
        })
    );
    assert_eq!(table.translate(0x4000), None);
    let (gather, _) = table.tear_down();
    drop(gather);
}
