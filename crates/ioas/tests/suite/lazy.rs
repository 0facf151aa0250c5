//! Lazy flushing: unmapped memory stays pinned until a bound is reached, and no device ever sees an old translation
//! where something new is mapped.
//!
//! The device's unit has caches, so that it really sees what is old; its memory refuses what is not
//! pinned. The clock is set by hand.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use ioas::{Flushing, Ledger, MapError, Memory, UnmapError};
use iommu::{FaultReason, Port, SoftwareUnit};
use iopt::{FormatId, HeapTables, Prot};
use proptest::prelude::*;
use runs::Span;

const AT: u64 = 3 * GIB;
const FRAME: u64 = 0x1_0000_0000;
const LONG: Duration = Duration::from_secs(10);

thread_local! {
    // Clock of this thread alone, as the address space.
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

fn now() -> Duration {
    NOW.get()
}

fn pass(time: Duration) {
    NOW.set(NOW.get() + time);
}

struct Bench {
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    unit: Arc<FrailUnit>,
    port: Port<Arc<HeapTables>, Arc<Pages>>,
    object: Arc<Tracked>,
    memory: Arc<Memory>,
    space: Space,
}

impl Bench {
    /// 4 MiB of memory in one run.
    fn new(format: (FormatId, u8), holds: usize) -> Self {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let ledger = Ledger::new("a counter", None, 0);
        let object = Arc::new(Tracked::new(&[Span::new(FRAME, 4 * MIB)]));
        let software = SoftwareUnit::new(tables.clone(), object.pages.clone());
        let port = software.port(DEVICE);
        let unit = Arc::new(FrailUnit::new(Arc::new(software)));
        let space = space(format.0, format.1, &tables);
        space.attach((unit.clone(), DEVICE)).unwrap();
        let age = LONG;
        space.set_flushing(Flushing::Lazy { holds, age, now });
        Self {
            memory: Memory::new(object.clone(), &ledger),
            tables,
            ledger,
            unit,
            port,
            object,
            space,
        }
    }

    fn state(&self) -> State {
        let memory = &self.object.memory;
        State::of(&self.space, &self.ledger, &self.tables, &[memory])
    }

    /// Maps a page of the object at a page of the window.
    fn map(&mut self, at: u64, page: u64) -> Result<(), MapError> {
        let part = Span::new(page * PAGE, PAGE);
        self.space.map(AT + at * PAGE, &self.memory, part, Prot::RW)
    }

    /// Unmaps a page of the window; the bytes that were unpinned.
    fn unmap(&mut self, at: u64) -> u64 {
        let range = Span::new(AT + at * PAGE, PAGE);
        self.space.unmap(range).unwrap().unpinned
    }

    /// The page of the object that the device finds; `None` for a fault.
    fn read(&mut self, at: u64) -> Option<u64> {
        let mut word = [0];
        match self.port.read(AT + at * PAGE, &mut word) {
            Ok(()) => Some((word[0] - FRAME) / PAGE),
            Err(aborted) => {
                let reason = aborted.fault.reason;
                assert!(!matches!(reason, FaultReason::Target(_)), "{aborted}");
                None
            }
        }
    }

    fn pinned(&self) -> u64 {
        let pinned = self.object.memory.pinned();
        assert_eq!(self.ledger.in_use(), pinned);
        pinned / PAGE
    }

    fn end(self) {
        self.space.close().unwrap();
        assert_eq!(self.tables.in_use(), 0);
        let left = (self.object.memory.pinned(), self.ledger.in_use());
        assert_eq!(left, (0, 0));
    }
}

#[test]
fn memory_stays_pinned_until_as_many_wait_as_may() {
    for format in FORMATS {
        let mut bench = Bench::new(format, 3);
        for n in 0..5 {
            bench.map(n, n).unwrap();
            assert_eq!(bench.read(n), Some(n));
        }
        bench.unit.invalidates.set(None);
        for n in 0..3 {
            assert_eq!(bench.unmap(n), 0);
            assert_eq!((bench.space.retired() as u64, bench.pinned()), (n + 1, 5));
            // The unit has not been told.
            assert_eq!(bench.read(n), Some(n));
        }
        assert_eq!(bench.unit.invalidates.calls(), 0);
        assert_eq!(bench.space.len(), 2);
        // One more.
        assert_eq!(bench.unmap(3), 4 * PAGE);
        assert_eq!((bench.space.retired(), bench.pinned()), (0, 1));
        assert_eq!(bench.unit.invalidates.calls(), 1, "one flush for all");
        assert_eq!(
            [0, 1, 2, 3, 4].map(|n| bench.read(n)),
            [None, None, None, None, Some(4)]
        );
        bench.end();
    }
}

#[test]
fn memory_waits_no_longer_than_it_may() {
    let mut bench = Bench::new(FORMATS[0], 100);
    for n in 0..4 {
        bench.map(n, n).unwrap();
        bench.read(n);
    }
    bench.unmap(0);
    pass(LONG - Duration::from_nanos(1));
    assert_eq!(bench.space.poll().unwrap(), 0);
    bench.unmap(1);
    assert_eq!((bench.space.retired(), bench.pinned()), (2, 4));
    // The age of the first counts.
    pass(Duration::from_nanos(1));
    assert_eq!(bench.space.poll().unwrap(), 2 * PAGE);
    assert_eq!((bench.space.retired(), bench.pinned()), (0, 2));
    assert_eq!([0, 1].map(|n| bench.read(n)), [None, None]);

    // The time in which nothing waited does not count; an unmap looks at the clock as well.
    pass(5 * LONG);
    assert_eq!(bench.space.poll().unwrap(), 0);
    assert_eq!(bench.unmap(2), 0);
    pass(LONG);
    assert_eq!(bench.unmap(3), 2 * PAGE);
    assert_eq!(bench.pinned(), 0);
    bench.end();
}

#[test]
fn what_is_mapped_where_something_waits_is_seen_and_elsewhere_nothing_is_flushed() {
    for format in FORMATS {
        let mut bench = Bench::new(format, 100);
        for n in 0..4 {
            bench.map(n, n).unwrap();
            bench.read(n);
        }
        bench.unit.invalidates.set(None);
        bench.unmap(1);
        // Beside it: the table is still linked, by the other pages.
        bench.map(5, 5).unwrap();
        assert_eq!(bench.read(5), Some(5));
        assert_eq!(
            (bench.unit.invalidates.calls(), bench.space.retired()),
            (0, 1)
        );
        assert_eq!(bench.read(1), Some(1), "old, and still pinned");
        // In its place.
        bench.map(1, 9).unwrap();
        assert_eq!(bench.read(1), Some(9));
        assert_eq!(
            (bench.unit.invalidates.calls(), bench.space.retired()),
            (1, 0)
        );
        assert_eq!(bench.pinned(), 5);
        // The same memory again at once: never unpinned in between, but flushed.
        bench.unmap(1);
        bench.map(1, 9).unwrap();
        assert_eq!((bench.unit.invalidates.calls(), bench.pinned()), (2, 5));
        bench.end();
    }
}

#[test]
fn a_neighbour_in_the_place_of_an_unlinked_table_is_seen() {
    for format in FORMATS {
        let mut bench = Bench::new(format, 100);
        // Alone in its table, which the unit remembers.
        bench.map(3, 3).unwrap();
        assert_eq!(bench.read(3), Some(3));
        bench.unmap(3);
        bench.map(7, 7).unwrap();
        assert_eq!(bench.read(7), Some(7));
        assert_eq!((bench.space.retired(), bench.pinned()), (0, 1));
        assert_eq!(bench.read(3), None);
        // A table further up, too.
        bench.unmap(7);
        bench.map(512 * 512 - 1, 8).unwrap();
        assert_eq!(bench.read(512 * 512 - 1), Some(8));
        bench.end();
    }
}

#[test]
fn a_flush_that_fails_keeps_everything() {
    let mut bench = Bench::new(FORMATS[0], 1);
    for n in 0..4 {
        bench.map(n, n).unwrap();
        bench.read(n);
    }
    bench.unmap(0);
    bench.unit.invalidates.set(0..4);
    // At the bound, by the clock, by hand, and where something is to be mapped.
    let second = Span::new(AT + PAGE, PAGE);
    let failed = bench.space.unmap(second);
    assert!(matches!(failed, Err(UnmapError::Flush(_))), "{failed:?}");
    let waits = bench.state();
    assert_eq!(
        (waits.retired, bench.pinned(), waits.areas.len()),
        (2, 4, 2)
    );
    pass(LONG);
    assert!(matches!(bench.space.poll(), Err(UnmapError::Flush(_))));
    assert_eq!(bench.state(), waits);
    assert!(matches!(bench.space.flush(), Err(UnmapError::Flush(_))));
    assert_eq!(bench.state(), waits);
    assert!(matches!(bench.map(1, 9), Err(MapError::Flush(_))));
    assert_eq!(bench.state(), waits);
    assert_eq!([0, 1].map(|n| bench.read(n)), [Some(0), Some(1)]);
    assert_eq!(bench.unit.invalidates.calls(), 4);
    // It hears.
    assert_eq!(bench.space.poll().unwrap(), 2 * PAGE);
    assert_eq!([0, 1, 2].map(|n| bench.read(n)), [None, None, Some(2)]);
    bench.end();
}

#[test]
fn strict_flushing_again_brings_what_waits_along() {
    let mut bench = Bench::new(FORMATS[2], 100);
    for n in 0..3 {
        bench.map(n, n).unwrap();
    }
    bench.unmap(0);
    bench.space.set_flushing(Flushing::Strict);
    assert_eq!((bench.space.retired(), bench.pinned()), (1, 3));
    assert_eq!(bench.unmap(1), 2 * PAGE);
    assert_eq!((bench.space.retired(), bench.pinned()), (0, 1));
    bench.end();
}

#[test]
fn what_waits_is_given_back_with_the_space_and_with_the_last_device() {
    let mut bench = Bench::new(FORMATS[1], 100);
    bench.map(0, 0).unwrap();
    bench.map(1, 1).unwrap();
    bench.unmap(0);
    bench.end();

    let mut bench = Bench::new(FORMATS[1], 100);
    bench.map(0, 0).unwrap();
    bench.unmap(0);
    let Bench { space, object, .. } = bench;
    drop(space);
    assert_eq!(object.memory.pinned(), 0);
}

#[derive(Clone, Debug)]
enum Op {
    /// Page of the window, page of the object.
    Map(u64, u64),
    Unmap(u64),
    Read(u64),
    Pass(u64),
    Poll,
    Deaf,
}

/// Two stretches of the window, in tables of their own.
fn place() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..6, 600u64..603]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (place(), 0u64..1024).prop_map(|(at, page)| Op::Map(at, page)),
        5 => place().prop_map(Op::Unmap),
        5 => place().prop_map(Op::Read),
        1 => (1u64..8).prop_map(Op::Pass),
        1 => Just(Op::Poll),
        1 => Just(Op::Deaf),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_device_sees_what_is_mapped_and_nothing_that_is_not_pinned(
        format in prop::sample::select(FORMATS.to_vec()),
        holds in 0usize..6,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut bench = Bench::new(format, holds);
        let mut model = BTreeMap::new();
        for op in ops {
            match op {
                Op::Map(at, page) => {
                    let there = model.contains_key(&at);
                    match bench.map(at, page) {
                        Ok(()) => {
                            prop_assert!(!there);
                            model.insert(at, page);
                        }
                        Err(MapError::Overlap { .. }) => prop_assert!(there),
                        Err(MapError::Flush(_)) => prop_assert!(bench.space.retired() > 0),
                        Err(other) => panic!("{other}"),
                    }
                }
                Op::Unmap(at) => {
                    let range = Span::new(AT + at * PAGE, PAGE);
                    let unmapped = bench.space.unmap(range);
                    prop_assert!(matches!(unmapped, Ok(_) | Err(UnmapError::Flush(_))));
                    model.remove(&at);
                    // No more holds than the bound wait, except when flushes fail.
                    prop_assert!(unmapped.is_err() || bench.space.retired() <= holds);
                }
                Op::Read(at) => {
                    // A page that is not mapped: a fault, or old memory that is pinned.
                    let seen = bench.read(at);
                    if let Some(page) = model.get(&at) {
                        prop_assert_eq!(seen, Some(*page));
                    }
                }
                Op::Pass(seconds) => pass(Duration::from_secs(seconds)),
                Op::Poll => drop(bench.space.poll()),
                Op::Deaf => bench.unit.invalidates.set([0]),
            }
        }
        bench.unit.invalidates.set(None);
        bench.space.flush().unwrap();
        for at in (0..8).chain(598..605) {
            prop_assert_eq!(bench.read(at), model.get(&at).copied());
        }
        let held: std::collections::BTreeSet<u64> = model.values().copied().collect();
        prop_assert_eq!(bench.pinned(), held.len() as u64);
        bench.end();
    }
}
