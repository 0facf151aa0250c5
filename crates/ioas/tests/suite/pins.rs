//! Memory that several address spaces use is pinned and charged once, and given back by the last.
//!
//! Random maps and unmaps of overlapping parts, in three address spaces, with pins, readers and
//! releases that fail, against a plain model: for each page of each object the number of its users and
//! the pin that holds it; for each pin its pages, also those that it did not let go. After each step
//! pinned bytes, ledger, areas, translations and the runs that holds yield are what the model says.
//!
//! Then the cases by which a reviewer would try the path from pins to leaves, one test each. (A run
//! across the border of two batches: see `batches.rs`.)

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::common::*;
use ioas::{Forecast, Ledger, MapError, Memory, Step, Synthetic, UnmapError};
use iopt::{FormatId, HeapTables, Interruption, Prot};
use proptest::prelude::*;
use runs::Span;

/// Pages of an object, and of the window in which it is mapped.
const PAGES: u64 = 48;
const WINDOW: u64 = GIB - 20 * PAGE;
const SPACES: usize = 3;
const OBJECTS: usize = 2;
/// Pages that the kernel of this test charges together, and its limit.
const CHARGED: u64 = 4;
const LIMIT: u64 = 84;

#[derive(Clone, Copy, Debug)]
enum Fail {
    Nothing,
    /// The n-th call of a kind.
    Pin(u64),
    Reader(u64),
    Release(u64),
    Unpin(u64),
}

#[derive(Clone, Debug)]
enum Op {
    /// Space, object, first page of it, pages, page in the window.
    Map(usize, usize, u64, u64, u64),
    /// Space, first page, pages; whether areas are cut.
    Unmap(usize, u64, u64, bool),
    UnmapAll(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let len = || prop_oneof![1u64..6, 1..PAGES];
    prop_oneof![
        6 => (0..SPACES, 0..OBJECTS, 0..PAGES, len(), 0..PAGES)
            .prop_map(|(s, o, first, len, at)| Op::Map(s, o, first, len.min(PAGES - first), at)),
        2 => (0..SPACES, 0..PAGES, len()).prop_map(|(s, at, len)| Op::Unmap(s, at, len, false)),
        4 => (0..SPACES, 0..PAGES, len()).prop_map(|(s, at, len)| Op::Unmap(s, at, len, true)),
        1 => (0..SPACES).prop_map(Op::UnmapAll),
    ]
}

fn fail() -> impl Strategy<Value = Fail> {
    prop_oneof![
        6 => Just(Fail::Nothing),
        1 => (0u64..3).prop_map(Fail::Pin),
        1 => (0u64..4).prop_map(Fail::Reader),
        1 => (0u64..3).prop_map(Fail::Release),
        1 => (0u64..2).prop_map(Fail::Unpin),
    ]
}

/// Runs of an object in pages; every second one goes on where the one before ended.
fn layout() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(1u64..20, 1..8)
}

fn spans(object: usize, layout: &[u64]) -> Vec<Span> {
    let mut at = 0x1_0000_0000 * (object as u64 + 1);
    let mut left = PAGES;
    let mut spans = Vec::new();
    for (n, pages) in layout.iter().chain([&PAGES]).enumerate() {
        let pages = (*pages).min(left);
        left -= pages;
        if pages > 0 {
            at += (n as u64 % 2) * 64 * PAGE;
            spans.push(Span::new(at, pages * PAGE));
            at += pages * PAGE;
        }
    }
    spans
}

/// An area: first page in the window, pages, object, first page of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    at: u64,
    len: u64,
    object: usize,
    first: u64,
}

#[derive(Default)]
struct Model {
    areas: [Vec<Place>; SPACES],
    /// Pages that have users: how many, and the pin that holds it.
    pages: BTreeMap<(usize, u64), (u64, usize)>,
    /// Pages of each pin, also those that it did not let go of. What it lost at its end stays here.
    pins: BTreeMap<usize, BTreeSet<u64>>,
    next: usize,
}

impl Model {
    /// What nobody holds, in stretches.
    fn gaps(&self, place: Place) -> Vec<Span> {
        let mut gaps: Vec<Span> = Vec::new();
        for page in place.first..place.first + place.len {
            if self.pages.contains_key(&(place.object, page)) {
                continue;
            }
            match gaps.last_mut().filter(|gap| gap.start + gap.len == page) {
                Some(gap) => gap.len += 1,
                None => gaps.push(Span::new(page, 1)),
            }
        }
        gaps
    }

    /// How many stretches of different pins there are: each has a reader of its own.
    fn readers(&self, place: Place) -> u64 {
        let pins = (place.first..place.first + place.len)
            .map(|page| self.pages[&(place.object, page)].1)
            .collect::<Vec<_>>();
        1 + pins.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64
    }

    fn hold(&mut self, place: Place) {
        for gap in self.gaps(place) {
            let pages = gap.start..gap.start + gap.len;
            self.pins.insert(self.next, pages.clone().collect());
            for page in pages {
                self.pages.insert((place.object, page), (0, self.next));
            }
            self.next += 1;
        }
        for page in place.first..place.first + place.len {
            self.pages.get_mut(&(place.object, page)).unwrap().0 += 1;
        }
    }

    /// Lets go of a part. `fails` says which call of each kind fails. Returns unpinned pages and
    /// whether anything failed.
    fn release(&mut self, place: Place, calls: &mut Calls) -> (u64, bool) {
        let mut groups: Vec<(usize, BTreeSet<u64>)> = Vec::new();
        let mut last = None;
        for page in place.first..place.first + place.len {
            let held = self.pages.get_mut(&(place.object, page)).unwrap();
            held.0 -= 1;
            let (users, pin) = *held;
            if users > 0 {
                last = None;
                continue;
            }
            self.pages.remove(&(place.object, page));
            match groups.last_mut().filter(|_| last == Some(pin)) {
                Some((_, group)) => drop(group.insert(page)),
                None => groups.push((pin, [page].into())),
            }
            last = Some(pin);
        }
        let (mut unpinned, mut failed) = (0, false);
        for (nth, (pin, group)) in groups.iter().enumerate() {
            // Groups that come later are in use while this one goes.
            let later = groups[nth + 1..].iter().any(|(other, _)| other == pin);
            let used = later || self.pages.values().any(|(_, other)| other == pin);
            if used {
                if calls.release() {
                    failed = true;
                } else {
                    self.pins
                        .get_mut(pin)
                        .unwrap()
                        .retain(|page| !group.contains(page));
                    unpinned += group.len() as u64;
                }
            } else if calls.unpin() {
                failed = true;
            } else {
                unpinned += self.pins.remove(pin).unwrap().len() as u64;
            }
        }
        (unpinned, failed)
    }

    /// Pages that the kernel has pinned.
    fn pinned(&self) -> u64 {
        self.pins.values().map(|pages| pages.len() as u64).sum()
    }

    fn charged(&self) -> u64 {
        let groups = |pages: &BTreeSet<u64>| {
            let groups: BTreeSet<u64> = pages.iter().map(|page| page / CHARGED).collect();
            groups.len() as u64
        };
        self.pins.values().map(groups).sum::<u64>() * CHARGED
    }

    /// What a new pin of `gap` charges.
    fn charge(gap: Span) -> u64 {
        (gap.last() / CHARGED - gap.start / CHARGED + 1) * CHARGED
    }

    /// Cuts areas at `at`.
    fn cut(&mut self, space: usize, at: u64) {
        let areas = &mut self.areas[space];
        let through = |area: &&mut Place| area.at < at && at < area.at + area.len;
        if let Some(area) = areas.iter_mut().find(through) {
            let front = at - area.at;
            let tail = Place {
                at,
                len: area.len - front,
                first: area.first + front,
                ..*area
            };
            area.len = front;
            areas.push(tail);
            areas.sort_by_key(|area| area.at);
        }
    }
}

/// Which calls fail, as in [`Faults`].
struct Calls {
    fail: Fail,
    releases: u64,
    unpins: u64,
}

impl Calls {
    const fn new(fail: Fail) -> Self {
        Self {
            fail,
            releases: 0,
            unpins: 0,
        }
    }

    fn release(&mut self) -> bool {
        self.releases += 1;
        matches!(self.fail, Fail::Release(n) if n + 1 == self.releases)
    }

    fn unpin(&mut self) -> bool {
        self.unpins += 1;
        matches!(self.fail, Fail::Unpin(n) if n + 1 == self.unpins)
    }
}

struct Bench {
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    objects: Vec<Arc<Frail>>,
    memories: Vec<Arc<Memory>>,
    /// The frame of each page.
    frames: Vec<Vec<u64>>,
    spaces: Vec<Space>,
    model: Model,
}

impl Bench {
    fn new(layouts: &[Vec<u64>]) -> Self {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let ledger = Ledger::new("a counter", Some(LIMIT * PAGE), 0);
        let spans: Vec<Vec<Span>> = (0..OBJECTS).map(|n| spans(n, &layouts[n])).collect();
        // One set of faults for all: the n-th call is counted over all objects.
        let (releases, unpins) = (Arc::<Faults>::default(), Arc::<Faults>::default());
        let objects: Vec<_> = spans
            .iter()
            .map(|spans| {
                let memory = Synthetic::new(spans.iter().copied()).charged_by(CHARGED * PAGE);
                let mut frail = Frail::new(memory);
                frail.releases = releases.clone();
                frail.unpins = unpins.clone();
                Arc::new(frail)
            })
            .collect();
        let frames = |spans: &Vec<Span>| {
            let pages = |span: &Span| (span.start..=span.last()).step_by(PAGE as usize);
            spans.iter().flat_map(pages).collect()
        };
        Self {
            memories: objects
                .iter()
                .map(|object| Memory::new(object.clone(), &ledger))
                .collect(),
            frames: spans.iter().map(frames).collect(),
            spaces: (0..SPACES)
                .map(|n| space(FORMATS[n].0, FORMATS[n].1, &tables))
                .collect(),
            tables,
            ledger,
            objects,
            model: Model::default(),
        }
    }

    fn set(&self, fail: Fail) {
        for object in &self.objects {
            object.pins.set(None);
            object.readers.set(None);
            object.releases.set(None);
            object.unpins.set(None);
            match fail {
                Fail::Nothing => {}
                Fail::Pin(n) => object.pins.set([n]),
                Fail::Reader(n) => object.readers.set([n]),
                Fail::Release(n) => object.releases.set([n]),
                Fail::Unpin(n) => object.unpins.set([n]),
            }
        }
    }

    fn act(&mut self, op: &Op, fail: Fail) {
        self.set(fail);
        match *op {
            Op::Map(space, object, first, len, at) => {
                let place = Place {
                    at,
                    len,
                    object,
                    first,
                };
                self.map(space, place, fail);
            }
            Op::Unmap(space, at, len, cutting) => self.unmap(space, at, len, cutting, fail),
            Op::UnmapAll(space) => {
                let result = self.spaces[space].unmap_all(&mut Watch::default());
                let areas = std::mem::take(&mut self.model.areas[space]);
                self.unmapped(result, &areas, fail);
            }
        }
    }

    fn map(&mut self, space: usize, place: Place, fail: Fail) {
        let memory = &self.memories[place.object];
        let part = Span::new(place.first * PAGE, place.len * PAGE);
        let range = Span::new(WINDOW + place.at * PAGE, part.len);
        let gaps = self.model.gaps(place);
        let needed = gaps.iter().copied().map(Model::charge).sum::<u64>();
        let fits = self.ledger.in_use() / PAGE + needed <= LIMIT;
        let forecast = memory.forecast(part);
        assert_eq!(
            matches!(forecast, Forecast::Fits { .. }),
            fits,
            "{forecast}"
        );

        let steps = self.ledger.steps();
        let watch = &mut Watch::default();
        let result = self.spaces[space].map(range.start, memory, part, Prot::RW, watch);
        let steps = self.ledger.steps() - steps;
        let taken = |area: &Place| area.at < place.at + place.len && place.at < area.at + area.len;
        if self.model.areas[space].iter().any(taken) {
            assert!(
                matches!(result, Err(MapError::Overlap { .. })),
                "{result:?}"
            );
            return;
        }
        if !fits {
            let Err(MapError::OverLimit(limit)) = result else {
                panic!("{needed} pages too many: {result:?}");
            };
            assert_eq!(limit.needed, needed * PAGE);
            return;
        }
        match fail {
            Fail::Pin(n) if n < gaps.len() as u64 => {
                assert!(matches!(result, Err(MapError::Pin(_))), "{result:?}");
                return;
            }
            _ => self.model.hold(place),
        }
        if let Fail::Reader(n) = fail
            && n < self.model.readers(place)
        {
            assert!(matches!(result, Err(MapError::Runs(_))), "{result:?}");
            self.model.release(place, &mut Calls::new(Fail::Nothing));
            return;
        }
        result.unwrap();
        assert_eq!(steps, u64::from(!gaps.is_empty()), "one charge or none");
        assert_eq!(watch.bytes(Step::Charge), needed * PAGE);
        let areas = &mut self.model.areas[space];
        areas.push(place);
        areas.sort_by_key(|area| area.at);
    }

    fn unmap(&mut self, space: usize, at: u64, len: u64, cutting: bool, fail: Fail) {
        let range = Span::new(WINDOW + at * PAGE, len * PAGE);
        let watch = &mut Watch::default();
        let result = if cutting {
            self.model.cut(space, at);
            self.model.cut(space, at + len);
            self.spaces[space].unmap_cutting(range, Interruption::Refused, watch)
        } else {
            self.spaces[space].unmap(range, watch)
        };
        let within = |area: &Place| at <= area.at && area.at + area.len <= at + len;
        let overlaps = |area: &Place| area.at < at + len && at < area.at + area.len;
        let areas = &mut self.model.areas[space];
        if areas.iter().any(|area| overlaps(area) && !within(area)) {
            assert!(
                matches!(result, Err(UnmapError::CutsArea { .. })),
                "{result:?}"
            );
            return;
        }
        let gone: Vec<Place> = areas.iter().copied().filter(within).collect();
        areas.retain(|area| !within(area));
        self.unmapped(result, &gone, fail);
    }

    fn unmapped(
        &mut self,
        result: Result<ioas::Unmapped, UnmapError>,
        areas: &[Place],
        fail: Fail,
    ) {
        let mut calls = Calls::new(fail);
        let (mut pages, mut unpinned, mut failed) = (0, 0, false);
        for area in areas {
            let (here, broken) = self.model.release(*area, &mut calls);
            pages += area.len;
            unpinned += here;
            failed |= broken;
        }
        match result {
            Err(UnmapError::Unpin(_)) => assert!(failed),
            Err(other) => panic!("{other}"),
            Ok(unmapped) => {
                assert!(!failed);
                let expected = (areas.len() as u64, pages * PAGE, unpinned * PAGE);
                assert_eq!(
                    (unmapped.areas, unmapped.bytes, unmapped.unpinned),
                    expected
                );
            }
        }
    }

    fn check(&self) {
        let pinned: u64 = self
            .objects
            .iter()
            .map(|object| object.memory.pinned())
            .sum();
        assert_eq!(pinned, self.model.pinned() * PAGE);
        assert_eq!(self.ledger.in_use(), self.model.charged() * PAGE);
        let held: u64 = self.memories.iter().map(|memory| memory.held()).sum();
        assert_eq!(held, self.model.pages.len() as u64 * PAGE);
        self.set(Fail::Nothing);
        for (space, places) in self.spaces.iter().zip(&self.model.areas) {
            let mut places_left = places.iter();
            for area in space.areas() {
                let place = places_left.next().unwrap();
                let part = Span::new(place.first * PAGE, place.len * PAGE);
                let range = Span::new(WINDOW + place.at * PAGE, part.len);
                assert_eq!((area.range(), area.part()), (range, part));
                let frames = &self.frames[place.object];
                for page in 0..place.len {
                    let found = space.table().unwrap().translate(range.start + page * PAGE);
                    assert_eq!(found, Some(frames[(place.first + page) as usize]));
                }
                // All of it, and its second half.
                let half = place.len / 2;
                for skip in [0, half] {
                    let hold = area.hold().unwrap();
                    let sub = Span::new(part.start + skip * PAGE, part.len - skip * PAGE);
                    let runs = hold.with_runs(sub, read_runs);
                    let pages = runs
                        .iter()
                        .flat_map(|run| (run.start..=run.last()).step_by(PAGE as usize));
                    let first = (place.first + skip) as usize;
                    let last = (place.first + place.len) as usize;
                    assert!(pages.eq(frames[first..last].iter().copied()), "{runs:?}");
                }
            }
            assert!(places_left.next().is_none());
            let mapped: u64 = leaves(space.table().unwrap())
                .iter()
                .map(|leaf| leaf.run.len)
                .sum();
            assert_eq!(
                mapped,
                places.iter().map(|place| place.len).sum::<u64>() * PAGE
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn pins_and_charges_are_what_a_plain_model_says(
        layouts in prop::collection::vec(layout(), OBJECTS),
        ops in prop::collection::vec((op(), fail()), 1..40),
    ) {
        let mut bench = Bench::new(&layouts);
        for (op, fail) in &ops {
            bench.act(op, *fail);
            bench.check();
        }
        for space in 0..SPACES {
            bench.act(&Op::UnmapAll(space), Fail::Nothing);
        }
        bench.check();
        // Only what could not be unpinned is still there, and it is charged.
        prop_assert!(bench.model.pages.is_empty());
        let Bench { spaces, tables, .. } = bench;
        for space in spaces {
            space.close().unwrap();
        }
        prop_assert_eq!(tables.in_use(), 0);
    }
}

/// What a format with leaves of any power of two makes of these runs, mapped at 1 GiB.
fn sizes(spans: &[Span]) -> Vec<u64> {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let mut space = space(FormatId::AmdV1, 4, &tables);
    let memory = unlimited(Arc::new(Synthetic::new(spans.iter().copied())));
    let part = Span::new(0, memory.len());
    space.map(GIB, &memory, part, Prot::RW, &mut ()).unwrap();
    let leaves = leaves(space.table().unwrap());
    leaves.iter().map(|leaf| leaf.run.len).collect()
}

#[test]
fn two_adjacent_folios_are_one_run() {
    let folio = Span::new(0x4000_0000, 2 * MIB);
    let next = Span::new(0x4020_0000, 2 * MIB);
    assert_eq!(sizes(&[folio, next]), [4 * MIB]);
}

#[test]
fn halves_of_two_large_pages_that_are_not_adjacent_are_two_runs() {
    // The second half of one, the first of another; then the same with a neighbour.
    let half = Span::new(0x4010_0000, MIB);
    assert_eq!(sizes(&[half, Span::new(0x4040_0000, MIB)]), [MIB, MIB]);
    let next = Span::new(0x4020_0000, MIB);
    assert_eq!(
        sizes(&[half, next]),
        [MIB, MIB],
        "one run, but at no multiple of 2 MiB"
    );
}

#[test]
fn folios_of_64_kib_come_in_one_batch() {
    let folios = (0..4096u64).map(|n| Span::new(0x1_0000_0000 + n * 0x3_0000, 64 << 10));
    let tables = Arc::new(HeapTables::with_tables(256).unwrap());
    let mut space = space(FormatId::AmdV1, 4, &tables);
    let memory = unlimited(Arc::new(Synthetic::new(folios)));
    let part = Span::new(0, memory.len());
    let mut watch = Watch::default();
    space.map(GIB, &memory, part, Prot::RW, &mut watch).unwrap();
    let of = |step| watch.steps.iter().filter(|(s, _)| *s == step).count();
    // The second look finds that there is no more, and then the last run is filled in.
    assert_eq!((of(Step::FindRuns), of(Step::FillTables)), (2, 2));
    let leaves = leaves(space.table().unwrap());
    assert_eq!(leaves.len(), 4096);
    assert!(leaves.iter().all(|leaf| leaf.run.len == 64 << 10));
}

#[test]
fn a_page_of_1_gib_is_one_step() {
    for (format, levels) in FORMATS {
        let tables = Arc::new(HeapTables::with_tables(8).unwrap());
        let ledger = Ledger::new("a counter", Some(GIB), 0);
        let mut space = space(format, levels, &tables);
        let object = Arc::new(Frail::new(Synthetic::new([Span::new(7 * GIB, GIB)])));
        let memory = Memory::new(object.clone(), &ledger);
        let part = Span::new(0, GIB);
        space
            .map(3 * GIB, &memory, part, Prot::RW, &mut ())
            .unwrap();
        let calls = (object.pins.calls(), object.readers.calls());
        assert_eq!((ledger.steps(), calls), (1, (1, 1)), "{format}");
        let leaves = leaves(space.table().unwrap());
        assert_eq!(leaves.len(), 1);
        assert_eq!((leaves[0].run.pa, leaves[0].run.len), (7 * GIB, GIB));
        assert_eq!(
            space
                .unmap(Span::new(3 * GIB, GIB), &mut ())
                .unwrap()
                .unpinned,
            GIB
        );
        assert_eq!((object.unpins.calls(), object.releases.calls()), (1, 0));
    }
}

#[test]
fn a_page_of_other_memory_in_between_makes_three_runs() {
    let low = Span::new(0x4000_0000, MIB);
    let other = Span::new(0x9_0000_0000, PAGE);
    let high = Span::new(0x4010_1000, MIB - PAGE);
    let tables = Arc::new(HeapTables::with_tables(8).unwrap());
    let mut space = space(FormatId::VtdSs, 4, &tables);
    let memory = unlimited(Arc::new(Synthetic::new([low, other, high])));
    let part = Span::new(0, 2 * MIB);
    space.map(GIB, &memory, part, Prot::RW, &mut ()).unwrap();
    let hold = space.area_at(GIB).unwrap().hold().unwrap();
    assert_eq!(hold.with_runs(part, read_runs), [low, other, high]);
    let table = space.table().unwrap();
    for (offset, pa) in [
        (MIB - PAGE, 0x400f_f000),
        (MIB, other.start),
        (MIB + PAGE, high.start),
    ] {
        assert_eq!(table.translate(GIB + offset), Some(pa));
    }
    // Without it, it is one page of 2 MiB.
    assert_eq!(sizes(&[low, Span::new(0x4010_0000, PAGE), high]), [2 * MIB]);
}

#[test]
fn a_limit_in_the_middle_of_a_map_leaves_everything_as_it_was() {
    let tables = Arc::new(HeapTables::with_tables(16).unwrap());
    // Five stretches that nobody holds, between four that are held.
    let ledger = Ledger::new("a counter", Some(4 * MIB + 4 * MIB), 0);
    let mut space = space(FormatId::VtdSs, 4, &tables);
    let object = Arc::new(Frail::new(Synthetic::new([Span::new(GIB, 9 * MIB)])));
    let memory = Memory::new(object.clone(), &ledger);
    for n in [1, 3, 5, 7] {
        let part = Span::new(n * MIB, MIB);
        space
            .map(GIB + part.start, &memory, part, Prot::RW, &mut ())
            .unwrap();
    }
    let state = |space: &Space| State::of(space, &ledger, &tables, &[&object.memory]);
    let before = state(&space);
    let whole = Span::new(0, 9 * MIB);
    object.pins.set(None);
    let refused = space.map(8 * GIB, &memory, whole, Prot::RW, &mut ());
    let Err(MapError::OverLimit(limit)) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(
        (limit.needed, limit.limit, limit.in_use),
        (5 * MIB, 8 * MIB, 4 * MIB)
    );
    assert_eq!(object.pins.calls(), 0, "nothing was touched");
    assert_eq!(state(&space), before);

    // The kernel's own limit comes later: with each of the pins.
    let part = Span::new(0, 8 * MIB);
    for n in 0..4 {
        object.pins.set([n]);
        let refused = space.map(8 * GIB, &memory, part, Prot::RW, &mut ());
        assert!(matches!(refused, Err(MapError::Pin(_))), "{refused:?}");
        assert_eq!(object.pins.calls(), n + 1);
        assert_eq!(state(&space), before);
    }
    space
        .map(8 * GIB, &memory, part, Prot::RW, &mut ())
        .unwrap();
    assert_eq!(
        (ledger.in_use(), object.memory.pinned()),
        (8 * MIB, 8 * MIB)
    );
    space.unmap_all(&mut ()).unwrap();
    assert_eq!((ledger.in_use(), object.memory.pinned()), (0, 0));
}

#[test]
fn a_forecast_of_nothing_and_of_what_is_held_costs_nothing() {
    let ledger = Ledger::new("a counter", Some(MIB), 0);
    let object = Arc::new(Frail::new(Synthetic::new([Span::new(GIB, 2 * MIB)])));
    let memory = Memory::new(object.clone(), &ledger);
    let tables = Arc::new(HeapTables::with_tables(8).unwrap());
    let mut space = space(FormatId::VtdSs, 4, &tables);
    let half = Span::new(MIB, MIB);
    assert_eq!(memory.forecast(half), Forecast::Fits { needed: MIB });
    space.map(GIB, &memory, half, Prot::RW, &mut ()).unwrap();
    assert_eq!(memory.forecast(half), Forecast::Fits { needed: 0 });
    for nothing in [0, PAGE, MIB, 2 * MIB, 4 * MIB].map(|at| Span::new(at, 0)) {
        assert_eq!(memory.forecast(nothing), Forecast::Fits { needed: 0 });
    }
    let outside = Span::new(2 * MIB, 0u64.wrapping_sub(2 * MIB));
    assert_eq!(memory.forecast(outside), Forecast::Fits { needed: 0 });
    let more = Span::new(MIB - PAGE, MIB + PAGE);
    assert!(matches!(memory.forecast(more), Forecast::DoesNotFit(limit) if limit.needed == PAGE));
    assert_eq!(
        (memory.held(), memory.charged(), object.pins.calls()),
        (MIB, MIB, 1)
    );
}
