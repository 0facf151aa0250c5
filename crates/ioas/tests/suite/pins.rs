//! Memory that several address spaces use is pinned and charged once, and given back by the last.
//!
//! Random maps and unmaps of overlapping parts, in three address spaces, with pins, readers and
//! releases that fail, against a plain model: for each page of each object the number of its users and
//! the pin that holds it; for each pin its pages, also those that it did not let go. After each step
//! pinned bytes, ledger, areas, translations and the runs that holds yield are what the model says.

use std::sync::Arc;

use crate::common::pin_model::*;
use crate::common::*;
use ioas::{Forecast, Ledger, MapError, Memory, Step, Synthetic, UnmapError, WhenUnmapped};
use iopt::{FormatId, HeapTables, Interruption, Prot};
use proptest::prelude::*;
use runs::{Iova, Pa, Span};

/// Pages of an object, and of the window in which it is mapped.
const PAGES: u64 = 48;
const WINDOW: u64 = GIB - 20 * PAGE;
const OBJECTS: usize = 2;
/// The limit of the kernel of this test, in pages.
const LIMIT: u64 = 84;

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

fn spans(object: usize, layout: &[u64]) -> Vec<Span<Pa>> {
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
        let spans: Vec<Vec<Span<Pa>>> = (0..OBJECTS).map(|n| spans(n, &layouts[n])).collect();
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
        let frames = |spans: &Vec<Span<Pa>>| {
            let pages = |span: &Span<Pa>| (span.start..=span.last()).step_by(PAGE as usize);
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
                let result = self.spaces[space]
                    .observed(&mut Watch::default())
                    .unmap_all();
                let areas = std::mem::take(&mut self.model.areas[space]);
                self.unmapped(result, &areas, fail);
            }
        }
    }

    fn map(&mut self, space: usize, place: Place, fail: Fail) {
        let memory = &self.memories[place.object];
        let part = Span::new(place.first * PAGE, place.len * PAGE);
        let range = Span::<Iova>::new(WINDOW + place.at * PAGE, part.len);
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
        let result = self.spaces[space]
            .observed(watch)
            .map(range.start, memory, part, Prot::RW);
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
        let range = Span::<Iova>::new(WINDOW + at * PAGE, len * PAGE);
        let watch = &mut Watch::default();
        let result = if cutting {
            self.model.cut(space, at);
            self.model.cut(space, at + len);
            self.spaces[space]
                .observed(watch)
                .unmap_cutting(range, Interruption::Refused)
        } else {
            self.spaces[space].observed(watch).unmap(range)
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
                let range = Span::<Iova>::new(WINDOW + place.at * PAGE, part.len);
                assert_eq!((area.range(), area.part()), (range, part));
                let frames = &self.frames[place.object];
                for page in 0..place.len {
                    let found = space.translate(range.start + page * PAGE);
                    assert_eq!(found, Some(frames[(place.first + page) as usize]));
                }
                // All of it, and its second half.
                let half = place.len / 2;
                for skip in [0, half] {
                    let pin = space.pin(range, Prot::READ, WhenUnmapped::Keeps).unwrap();
                    let hold = &pin.holds()[0];
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
            let mapped: u64 = leaves(space).iter().map(|leaf| leaf.run.len).sum();
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

#[test]
fn a_forecast_of_nothing_and_of_what_is_held_costs_nothing() {
    let ledger = Ledger::new("a counter", Some(MIB), 0);
    let object = Arc::new(Frail::new(Synthetic::new([Span::new(GIB, 2 * MIB)])));
    let memory = Memory::new(object.clone(), &ledger);
    let tables = Arc::new(HeapTables::with_tables(8).unwrap());
    let space = space(FormatId::VtdSs, 4, &tables);
    let half = Span::new(MIB, MIB);
    assert_eq!(memory.forecast(half), Forecast::Fits { needed: MIB });
    space.map(GIB, &memory, half, Prot::RW).unwrap();
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
