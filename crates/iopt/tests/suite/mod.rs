//! One suite, instantiated per format by one line.

mod arm_sizes;
#[macro_use]
pub(crate) mod cases;
pub(crate) mod dirty;
pub(crate) mod model;
mod refit;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU32;

use iopt::format::Entry;
use iopt::{Format, Gather, HeapArena, MapError, Prot, Table, TableMemory, UnmapError};
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
    Refit(refit::Refit),
    Keep(bool),
    Dirty(dirty::DirtyOp),
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
        4 => dirty::dirty_op().prop_map(Op::Dirty),
        1 => (0usize..5, 0u64..2048, 1u64..1200, any::<bool>())
            .prop_map(|(place, page, pages, holes)| Op::UnmapRaw { place, page, pages, holes }),
        3 => refit::refit().prop_map(Op::Refit),
        1 => any::<bool>().prop_map(Op::Keep),
    ]
}

/// Table memory of the suites: an arena on the heap with the cells and tables of a format.
pub(crate) trait Tables: TableMemory + Sized {
    /// Room for at least so many tables, at addresses of no more than `bits` bits.
    fn room_for(tables: u64, bits: u32) -> Self;
    /// Tables that are handed out.
    fn used(&self) -> u64;
    /// The entry at an address.
    fn word(&self, address: u64) -> u64;
}

/// The cells of the suites: those that handle entries in rows by vectors where there are such
/// cells, so that without the feature `std` the same suites show that it goes without.
#[cfg(all(feature = "std", target_arch = "x86_64"))]
pub(crate) type Word = iopt::wide::WideCell;
#[cfg(not(all(feature = "std", target_arch = "x86_64")))]
pub(crate) type Word = std::sync::atomic::AtomicU64;

macro_rules! tables {
    ($($cell:ty, $log2:literal;)*) => {$(
        impl Tables for HeapArena<$cell, $log2> {
            fn room_for(tables: u64, bits: u32) -> Self {
                Self::with_tables_at(tables, 1 << (bits - 1).min(46)).unwrap()
            }
            fn used(&self) -> u64 {
                self.in_use()
            }
            fn word(&self, address: u64) -> u64 {
                self.read(address).unwrap()
            }
        }
    )*};
}
tables! {
    Word, 12;
    Word, 14;
    Word, 16;
    AtomicU32, 10;
}

/// How many random sequences: fewer where tables are large, since all are compared at each step.
pub(crate) const fn cases<A: TableMemory>() -> u32 {
    if A::TABLE_BYTES < 1 << 16 { 48 } else { 20 }
}

/// Bytes of the smallest page.
pub(crate) const fn page<F: Format>() -> u64 {
    1 << F::GRANULE_LOG2
}

/// How many tables' worth of memory the root takes.
pub(crate) fn root_tables<F: Format>(format: &F) -> u64 {
    let bytes = format.entries(usize::from(format.levels()) - 1) * F::ENTRY_BYTES;
    (bytes as u64).div_ceil(F::TABLE_BYTES)
}

/// A table that is lent to the shared form for an operation.
pub(crate) struct Lent<T>(Option<T>);

impl<T> Lent<T> {
    pub(crate) fn take(&mut self) -> T {
        self.0.take().unwrap()
    }
    pub(crate) fn put(&mut self, table: T) {
        self.0 = Some(table);
    }
}

impl<T> std::ops::Deref for Lent<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().unwrap()
    }
}

impl<T> std::ops::DerefMut for Lent<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap()
    }
}

/// Does `$operation` on the table of `$world`, by `&mut` or, if it is `SHARED`, by `&`.
macro_rules! on {
    ($world:expr, $table:ident => $operation:expr) => {
        if SHARED {
            let $table = iopt::SharedTable::<_, _>::new($world.table.take());
            let result = $operation;
            $world.table.put($table.into_inner());
            result
        } else {
            let $table = &mut *$world.table;
            $operation
        }
    };
}
pub(crate) use on;

/// A table beside its model.
pub(crate) struct World<'a, F: Format, A: Tables, const SHARED: bool = false> {
    pub(crate) memory: &'a A,
    pub(crate) table: Lent<Table<F, &'a A>>,
    pub(crate) model: Model,
    pub(crate) prots: [Prot; 3],
    /// Empty tables stay.
    pub(crate) keeps: bool,
}

impl<'a, F: Format, A: Tables, const SHARED: bool> World<'a, F, A, SHARED> {
    pub(crate) fn new(format: F, sizes: PageSizes, memory: &'a A) -> Self {
        let table = Table::with_page_sizes(format, memory, sizes).unwrap();
        let model = Model::new(table.page_sizes(), format.aperture());
        // Read-only, read-write, and write-only or another that the format can express.
        let third = [Prot::WRITE, Prot::RW | Prot::EXECUTE]
            .into_iter()
            .find(|prot| format.leaf_bits(*prot).is_some())
            .unwrap_or(Prot::RW);
        Self {
            memory,
            table: Lent(Some(table)),
            model,
            prots: [Prot::READ, Prot::RW, third],
            keeps: false,
        }
    }

    /// Start of one of the places where things are mapped: the bottom, a boundary of a large
    /// table, the middle, and just below the ends of the aperture.
    fn place(&self, place: usize) -> u64 {
        let aperture = self.model.aperture;
        let first = aperture.spans().next().unwrap();
        let last = aperture.spans().last().unwrap();
        // The boundary between the tables of a level below the root's.
        let boundary = |below: u8| {
            let level = self.table.root().levels.saturating_sub(below);
            let log2 = F::shift(level.into());
            let log2 = log2.clamp(F::GRANULE_LOG2 + 11, aperture.bits - 2);
            first.start + (1u64 << log2)
        };
        let page = page::<F>();
        match place {
            0 => first.start,
            1 => boundary(1) - 1024 * page,
            2 => boundary(2) - 3 * page,
            // Just below the end of the lower and of the upper half.
            3 => first.start + (first.len - 1) - (2048 * page - 1),
            _ => last.start + (last.len - 1) - (2048 * page - 1),
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
                let offset = page * self::page::<F>();
                let iova = self.place(*place).wrapping_add(offset) & !(grain - 1);
                let smallest = self::page::<F>();
                let output_bits = self.table.format().output_bits();
                let largest = self.model.sizes.iter().copied().max().unwrap();
                let mut at = iova;
                let mut spans = Vec::new();
                for &(pa, kind, n) in runs {
                    let unit = [smallest, smallest, 16 * smallest, 1 << 20, 2 << 20, 1 << 30][kind]
                        .max(smallest);
                    // Where both addresses are aligned alike large leaves are possible; elsewhere
                    // lengths stay short, since every page is a leaf then.
                    let alike = pa % 2 == 0 && largest >= unit >> 4;
                    let (start, unit) = if alike {
                        let high = (pa << 32) & ((1 << output_bits) - 1);
                        (high | (at & ((1 << 30) - 1)), unit)
                    } else {
                        let low = 1 << (output_bits - 1).min(33);
                        (low + pa * smallest, unit.min(4 * smallest))
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
                let page = self::page::<F>() * page;
                let iova = self.place(*place).wrapping_add(page) & !(grain - 1);
                let len = (pages * self::page::<F>()).next_multiple_of(grain);
                self.unmap(Span::new(iova, len), *holes);
            }
            Op::Refit(refit) => self.refit(refit),
            Op::Keep(keep) => {
                self.keeps = *keep;
                self.table.keep_empty_tables(*keep);
                self.give_back_empty_tables();
            }
            Op::Dirty(op) => self.apply_dirty(op),
        }
        self.check();
    }

    pub(crate) fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) {
        let before = self.snapshot();
        let expected = self.model.map(iova, runs, prot);
        let result = if self.keeps {
            let mut gather = Gather::new();
            let result = on!(self, table => table.map_anew(iova, runs, prot, &mut gather));
            self.table.reclaim(gather.never_walked());
            result
        } else {
            on!(self, table => table.map(iova, runs, prot))
        };
        match (&result, &expected) {
            (Ok(()), Ok(())) => {}
            (Err(MapError::Overlap { found, .. }), Err(Refusal::Overlap(leaf))) => {
                assert_eq!(found, leaf);
            }
            (Err(MapError::Range(_)), Err(Refusal::Range)) => {}
            _ => panic!("map {iova:#x} {runs:?}: {result:?}, expected {expected:?}"),
        }
        if result.is_err() && !self.keeps {
            assert!(before == self.snapshot(), "a refused map changed the table");
        }
    }

    pub(crate) fn unmap(&mut self, span: Span, holes: bool) {
        if self.table.tracks_dirty() {
            return self.unmap_tracked(span, holes);
        }
        let before = self.snapshot();
        let expected = self.model.unmap(span, holes);
        let mut gather = Gather::new();
        let mut runs = Vec::new();
        // One type for both, or all of it is compiled twice.
        let mut sink: &mut dyn FnMut(Run) = &mut |run| runs.push(run);
        let result = if holes {
            on!(self, table => table.unmap_mapped(span, &mut gather, &mut sink)).map(Some)
        } else {
            on!(self, table => table.unmap(span, &mut gather, &mut sink)).map(|()| None)
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
            // The shared form looks once, and names what comes first.
            (Err(UnmapError::Hole { at, .. }), Err(Refusal::InsideLeaf)) if SHARED && !holes => {
                assert!(span.contains(*at) && self.model.translate(*at).is_none());
            }
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
        let root = root_tables(&self.table.format());
        assert_eq!(self.table.tables() + root - 1, self.memory.used());
    }

    /// The bytes of every table that can be reached from the root.
    pub(crate) fn snapshot(&self) -> BTreeMap<u64, Vec<u64>> {
        let mut tables = BTreeMap::new();
        let levels = usize::from(self.table.root().levels);
        self.collect(self.root_table(), levels - 1, &mut tables);
        tables
    }

    /// Where the root lies: without the encryption bit that a unit is told of.
    pub(crate) fn root_table(&self) -> u64 {
        self.table.root().address & !self.table.format().root_address(0)
    }

    fn collect(&self, table: u64, level: usize, tables: &mut BTreeMap<u64, Vec<u64>>) {
        let words: Vec<u64> = (0..self.table.format().entries(level) as u64)
            .map(|i| self.memory.word(table + i * F::ENTRY_BYTES as u64))
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

    /// Where tables were kept for a while.
    fn give_back_empty_tables(&mut self) {
        let mut gather = Gather::new();
        for span in self.model.aperture.spans() {
            self.table
                .give_back_empty_tables(span, &mut gather)
                .unwrap();
        }
        self.table.reclaim(gather.never_walked());
    }

    /// Unmaps everything; nothing is left but the root, and then not even that.
    pub(crate) fn finish(mut self) {
        let runs: Vec<Run> = self.model.leaves.values().map(|leaf| leaf.run).collect();
        for run in runs {
            self.unmap(run.input(), false);
        }
        self.give_back_empty_tables();
        assert_eq!(self.table.tables(), 1);
        assert_eq!(self.memory.used(), root_tables(&self.table.format()));
        let snapshot = self.snapshot();
        assert_eq!(snapshot.len(), 1);
        assert!(snapshot.values().flatten().all(|word| *word == 0));
        let (gather, memory) = self.table.take().tear_down();
        let flushed = gather.never_walked();
        memory.reclaim(flushed.into_tables());
        assert_eq!(self.memory.used(), 0);
    }
}

/// The suite for one format.
macro_rules! suite {
    ($name:ident, $format:expr, $sizes:expr) => {
        suite!($name, $format, $sizes, HeapTables);
    };
    ($name:ident, $format:expr, $sizes:expr, $tables:ty) => {
        mod $name {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig {
                    cases: $crate::suite::cases::<$tables>(),
                    ..ProptestConfig::default()
                })]

                #[test]
                fn random_sequences_match_the_model(ops in prop::collection::vec(op(), 1..40)) {
                    let format = $format;
                    let bits = iopt::Format::output_bits(&format);
                    let memory = <$tables as $crate::suite::Tables>::room_for(1 << 12, bits);
                    let mut world = <World<_, _>>::new(format, $sizes, &memory);
                    for op in &ops {
                        world.apply(op);
                    }
                    world.finish();
                }
            }

            #[test]
            fn an_allocator_that_fails_at_any_page_changes_nothing() {
                $crate::suite::failing_allocator::<_, $tables>($format, $sizes);
            }

            #[test]
            fn a_request_is_refused_for_what_is_wrong_with_it() {
                $crate::suite::refusals::<_, $tables>($format);
            }

            #[test]
            fn harvest_finds_every_write() {
                $crate::suite::dirty::harvest_finds_every_write::<_, $tables>($format, $sizes);
            }

            #[test]
            fn every_leaf_size_is_used_where_it_fits_and_not_a_page_sooner() {
                $crate::suite::leaf_sizes::<_, $tables>($format);
            }

            cases! {
                $format, $sizes, $tables;
                index_bits_of_all_levels_tile_the_address
                table_pointers_come_back_at_every_level
                every_level_has_its_own_sizes
                every_size_at_any_output_address_is_one_leaf_with_right_entries
                permissions_survive_beside_what_hardware_notes
                a_leaf_is_dirty_when_one_of_its_entries_is
                empty_tables_become_larger_leaves
                a_small_unmap_at_the_start_of_a_large_leaf
                a_thousand_random_ranges_are_right_page_by_page
                leaves_change_their_size_at_a_boundary
                fourteen_small_three_large_and_three_small_are_twenty_leaves
            }
        }
    };
}

/// Maps something that needs many tables with an allocator that has only n left, for every n.
pub(crate) fn failing_allocator<F: Format, A: Tables>(format: F, sizes: PageSizes) {
    let memory = A::room_for(64, format.output_bits());
    let mut world = <World<_, _>>::new(format, sizes, &memory);
    let grain = world.model.sizes[0];
    // Two places far apart, and leaf tables on both sides of a boundary.
    let first = format.aperture().spans().next().unwrap().start;
    let iova = first + (1u64 << 30) - grain;
    let high = 7 << (format.output_bits() - 4).min(33);
    let run = [Span::new(high | grain, 2 * grain)];
    let mut refused = 0;
    for left in 0..16 {
        let free = 64 - memory.used();
        if left > free {
            break;
        }
        let hold = memory.reserve(free - left).unwrap();
        let before = world.snapshot();
        match world.table.map(iova, &run, Prot::READ) {
            Ok(()) => {
                memory.give_back(hold);
                let model = world.model.map(iova, &run, Prot::READ);
                assert_eq!(model, Ok(()));
                world.check();
                assert!(
                    refused >= 2 || format.levels() == 1,
                    "{refused} refusals: the request needed no tables"
                );
                world.finish();
                return;
            }
            Err(MapError::NoTables(cause)) => {
                refused += 1;
                assert_eq!(cause.available, left * F::TABLE_BYTES);
                assert!(cause.needed > cause.available);
                assert!(before == world.snapshot());
                memory.give_back(hold);
            }
            Err(other) => panic!("{other}"),
        }
    }
    panic!("never mapped");
}

pub(crate) fn refusals<F: Format, A: Tables>(format: F) {
    let memory = A::room_for(64, format.output_bits());
    let mut table = Table::new(format, &memory).unwrap();
    let page = page::<F>();
    let base = format.aperture().spans().next().unwrap().start;
    let one = [Span::new(256 * page, page)];
    let two = [Span::new(0, 2 * page)];
    let range = |result: Result<(), MapError>| match result {
        Err(MapError::Range(cause)) => cause.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        range(table.map(base, &[], Prot::READ)),
        "the range has no bytes"
    );
    assert_eq!(
        range(table.map(base, &[Span::new(0, 0)], Prot::READ)),
        "the range has no bytes"
    );
    assert_eq!(
        range(table.map(base + page / 2, &one, Prot::READ)),
        format!(
            "{:#x} is not a multiple of the smallest page, {page:#x} bytes",
            base + page / 2
        )
    );
    assert!(range(table.map(base, &[Span::new(0, 5)], Prot::READ)).starts_with("0x5 is not"));
    assert!(range(table.map(base, &[Span::new(9, page)], Prot::READ)).starts_with("0x9 is not"));
    let bits = format.aperture().bits;
    if bits < 64 {
        let top = (1u64 << bits) - page;
        assert!(range(table.map(1 << bits, &one, Prot::READ)).contains("outside"));
        assert!(range(table.map(top, &two, Prot::READ)).contains("outside"));
    }
    let last = !(page - 1);
    assert!(range(table.map(last, &two, Prot::READ)).contains("beyond 2^64"));
    let bits = format.output_bits();
    let beyond = Span::new((1 << bits) - page, 2 * page);
    assert_eq!(
        table.map(base, &[beyond], Prot::READ),
        Err(MapError::OutputTooWide {
            output: beyond,
            bits
        })
    );
    assert!(matches!(
        table.map(base, &one, Prot::empty()),
        Err(MapError::Prot { .. })
    ));
    table.map(base + 5 * page, &one, Prot::READ).unwrap();
    let three = [Span::new(0, 3 * page)];
    assert_eq!(
        table.map(base + 4 * page, &three, Prot::READ),
        Err(MapError::Overlap {
            wanted: Span::new(base + 4 * page, 3 * page),
            found: Run::new(base + 5 * page, 256 * page, page)
        })
    );
    assert_eq!(table.translate(base + 4 * page), None);
    let (gather, _) = table.tear_down();
    drop(gather);
}

/// Each leaf size where alignment and length just permit it, and where one page is missing.
pub(crate) fn leaf_sizes<F: Format, A: Tables>(format: F) {
    let memory = A::room_for(1 << 10, format.output_bits());
    let mut table = Table::new(format, &memory).unwrap();
    let page = page::<F>();
    let whole = format.aperture().spans().next().unwrap();
    let highest = 1u64 << format.output_bits();
    let offered: Vec<u64> = table.page_sizes().iter().collect();
    let unmap = |table: &mut Table<F, &A>, span: Span| {
        let mut gather = Gather::new();
        table.unmap(span, &mut gather, &mut iopt::Discard).unwrap();
        let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
        table.reclaim(flushed);
    };
    let mut used = 0;
    for (nth, &size) in offered.iter().enumerate() {
        if size > whole.len / 2 || size > highest / 2 {
            continue;
        }
        used += 1;
        // The highest output address and the second leaf's place.
        let (iova, pa) = (whole.start + size, highest - size);
        table.map(iova, &[Span::new(pa, size)], Prot::RW).unwrap();
        let leaf = Run::new(iova, pa, size);
        let found: Vec<Run> = table.leaves(whole).map(|leaf| leaf.run).collect();
        assert_eq!(found, [leaf]);
        assert_eq!(table.translate(iova + (size - 1)), Some(highest - 1));
        assert_eq!(table.translate(iova - 1), None);
        if let Some(behind) = iova.checked_add(size) {
            assert_eq!(table.translate(behind), None);
        }
        unmap(&mut table, leaf.input());
        // A page less of length, or of alignment: the size below is the largest. Only where that
        // does not make too many leaves.
        let many = |leaf: u64| size / leaf > 1 << 14;
        let Some(&below) = nth.checked_sub(1).and_then(|n| offered.get(n)) else {
            continue;
        };
        let short = Span::new(pa, size - page);
        let cases = [
            (iova, short, below),
            (iova - page, short, page),
            (iova, Span::new(pa - page, size), page),
        ];
        for (iova, run, _) in cases.into_iter().filter(|(_, _, leaf)| !many(*leaf)) {
            table.map(iova, &[run], Prot::RW).unwrap();
            let range = Span::new(iova, run.len);
            let found: Vec<Run> = table.leaves(range).map(|leaf| leaf.run).collect();
            assert!(found.iter().all(|leaf| leaf.len < size));
            assert_eq!(
                table.runs(range).collect::<Vec<_>>(),
                [Run::new(iova, run.start, run.len)]
            );
            unmap(&mut table, range);
        }
    }
    assert!(used > 0);
    assert_eq!(memory.used(), root_tables(&format));
}
