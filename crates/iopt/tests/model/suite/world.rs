//! A table beside its model, and what is done to both.

use std::collections::BTreeMap;

use iopt::format::Entry;
use iopt::{Format, Gather, Prot, Table, TableMapError, TableOps as _, TableUnmapError};
use runs::{Iova, Joiner, Pa, PageSizes, Run, Span};

use super::model::{Model, Refusal};
use super::{LEAVES, Op, Tables, page, root_tables};

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
            let shared = iopt::SharedTable::<_, _>::new($world.table.take());
            #[allow(unused_mut, reason = "some operations only read")]
            let mut $table = shared.enter();
            let result = $operation;
            drop($table);
            $world.table.put(shared.into_inner());
            result
        } else {
            let $table = &mut *$world.table;
            $operation
        }
    };
}
pub(crate) use on;

/// The same for an operation that unmaps some of `$span`: by `&` it owns all that there is, so that it
/// frees tables as by `&mut`.
macro_rules! owning {
    ($world:expr, $span:expr, $table:ident => $operation:expr) => {
        if SHARED {
            let mut spans = $world.model.aperture.spans();
            let all = spans.find(|all| all.covers(&$span)).unwrap_or($span);
            let shared = iopt::SharedTable::<_, _>::new($world.table.take());
            #[allow(unused_mut, reason = "some operations only read")]
            let mut $table = shared.owning(all);
            let result = $operation;
            drop($table);
            $world.table.put(shared.into_inner());
            result
        } else {
            let $table = &mut *$world.table;
            $operation
        }
    };
}
pub(crate) use owning;

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
                if self.model.leaves.len() + self.model.leaves_of(iova, &spans) > LEAVES {
                    return;
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
            Op::Resize(resize) => self.resize(resize),
            Op::Keep(keep) => {
                self.keeps = *keep;
                self.table.keep_empty_tables(*keep);
                self.give_back_empty_tables();
            }
            Op::Dirty(op) => self.apply_dirty(op),
        }
        self.check();
    }

    pub(crate) fn map(&mut self, iova: u64, runs: &[Span<Pa>], prot: Prot) {
        let expected = self.model.map(iova, runs, prot);
        let before = expected.is_err().then(|| self.snapshot());
        let result = if self.keeps {
            let mut gather = Gather::new();
            let result = on!(self, table => table.map_anew(iova, runs, prot, &mut gather));
            self.table.reclaim(gather.never_walked());
            result
        } else if !SHARED && iova / page::<F>() % 2 == 1 {
            self.map_in_two_calls(iova, runs, prot)
        } else {
            on!(self, table => table.map(iova, runs, prot))
        };
        match (&result, &expected) {
            (Ok(()), Ok(())) => {}
            (Err(TableMapError::Overlap { found, .. }), Err(Refusal::Overlap(leaf))) => {
                assert_eq!(found, leaf);
            }
            (Err(TableMapError::Range(_)), Err(Refusal::Range)) => {}
            _ => panic!("map {iova:#x} {runs:?}: {result:?}, expected {expected:?}"),
        }
        if let Some(before) = before.filter(|_| !self.keeps) {
            assert!(before == self.snapshot(), "a refused map changed the table");
        }
    }

    pub(crate) fn unmap(&mut self, span: Span<Iova>, holes: bool) {
        if self.table.tracks_dirty() {
            return self.unmap_tracked(span, holes);
        }
        let expected = self.model.unmap(span, holes);
        let before = expected.is_err().then(|| self.snapshot());
        let mut gather = Gather::new();
        let mut runs = Vec::new();
        // One type for both, or all of it is compiled twice.
        let mut sink: &mut dyn FnMut(Run) = &mut |run| runs.push(run);
        let result = if holes {
            owning!(self, span, table => table.unmap_mapped(span, &mut gather, &mut sink)).map(Some)
        } else {
            owning!(self, span, table => table.unmap(span, &mut gather, &mut sink)).map(|()| None)
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
            (Err(TableUnmapError::InsideLeaf { .. }), Err(Refusal::InsideLeaf)) => {}
            (Err(TableUnmapError::Hole { at, .. }), Err(Refusal::Hole(hole))) => {
                assert_eq!(at, hole)
            }
            (Err(TableUnmapError::Range(_)), Err(Refusal::Range)) => {}
            _ => panic!("unmap {span} {holes}: {result:?}, expected {expected:?}"),
        }
        if let Some(before) = before {
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
            let Span { start, len, .. } = leaf.run.input();
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

    /// Address of the root: without the encryption bit that a unit receives.
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

    /// Unmaps everything, one leaf and then all that lie without a hole behind it; nothing is left but
    /// the root, and then not even that.
    pub(crate) fn finish(mut self) {
        while let Some(first) = self.model.leaves.values().next() {
            let first = first.run.input();
            self.unmap(first, false);
            let mut joiner = Joiner::new();
            let leaves = self.model.leaves.values();
            let rest = leaves
                .map(|leaf| leaf.run.input())
                .find_map(|leaf| joiner.push(leaf));
            if let Some(rest) = rest.or(joiner.finish()) {
                self.unmap(rest, false);
            }
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
