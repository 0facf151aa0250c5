//! Others with translations of their own: nothing is let go, mapped or handed over before they have
//! forgotten what was there.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::*;
use ioas::{
    Area, Flushing, HandOverError, Ledger, Listener, MapError, Memory, Synthetic, UnmapError,
};
use iommu::FlushError;
use iopt::{FormatId, HeapTables, Interruption, Prot};
use runs::{Iova, Span};

const AT: u64 = GIB;
const NEVER: Interruption = Interruption::Refused;

/// Forgets unless it is to fail, and records the notifications.
#[derive(Default)]
struct Cache {
    fails: Faults,
    at_unmapped: Hook,
    mapped: Mutex<Vec<Span<Iova>>>,
    unmapped: Mutex<Vec<Span<Iova>>>,
}

impl Listener for Cache {
    fn mapped(&self, area: &Area) {
        self.mapped.lock().unwrap().push(area.range());
    }

    fn unmapped(&self, range: Span<Iova>) -> Result<(), FlushError> {
        call(&self.at_unmapped);
        if self.fails.hit() {
            let waited = Duration::from_millis(1);
            return Err(FlushError::Held { range, waited });
        }
        self.unmapped.lock().unwrap().push(range);
        Ok(())
    }
}

struct Bench {
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
    unit: Arc<FrailUnit>,
    caches: [Arc<Cache>; 2],
    space: Space,
}

const fn page(n: u64, count: u64) -> Span<Iova> {
    Span::new(AT + n * PAGE, count * PAGE)
}

impl Bench {
    /// Areas of 8 pages each, and two listeners.
    fn new() -> Self {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let ledger = Ledger::new("a counter", None, 0);
        let runs = [Span::new(16 * GIB, MIB)];
        let memory = Memory::new(Arc::new(Synthetic::new(runs)), &ledger);
        let space = space(FormatId::VtdSs, 4, &tables);
        let unit = Arc::new(FrailUnit::new(crate::common::unit(&tables)));
        space.attach((unit.clone(), DEVICE)).unwrap();
        let caches = [(); 2].map(|()| Arc::<Cache>::default());
        for cache in &caches {
            space.add_listener(cache.clone());
        }
        for n in 0..4 {
            let part = Span::new(8 * n * PAGE, 8 * PAGE);
            let at = AT + part.start;
            space.map(at, &memory, part, Prot::RW).unwrap();
        }
        Self {
            tables,
            ledger,
            memory,
            unit,
            caches,
            space,
        }
    }

    /// The second listener forgets nothing.
    fn fail(&self) {
        self.caches[1].fails.set(0..64);
    }

    /// It does, and everything is let go of that waited for it.
    fn recover(&mut self, waited: u64) {
        assert_eq!(self.ledger.in_use(), 32 * PAGE, "something was let go");
        assert_eq!(self.memory.held(), 32 * PAGE);
        self.caches[1].fails.set(None);
        assert_eq!(self.space.flush().unwrap(), waited * PAGE);
        assert_eq!(self.ledger.in_use(), (32 - waited) * PAGE);
        assert_eq!(self.space.retired(), 0);
    }

    fn end(self) {
        self.space.close().unwrap();
        assert_eq!((self.tables.in_use(), self.ledger.in_use()), (0, 0));
    }
}

#[test]
fn memory_stays_pinned_until_every_listener_has_forgotten_it() {
    let failed = |result: Result<_, UnmapError>| match result {
        Err(UnmapError::Flush(FlushError::Held { range, .. })) => range,
        other => panic!("{other:?}"),
    };
    let mut bench = Bench::new();
    bench.fail();
    let unmapped = bench.space.unmap(page(0, 8)).map(|_| 0);
    assert_eq!(failed(unmapped), page(0, 8));
    assert_eq!((bench.space.len(), bench.space.retired()), (3, 1));
    // Again, and nothing is mapped meanwhile, there or elsewhere.
    assert_eq!(failed(bench.space.flush()), page(0, 8));
    for at in [AT, AT + MIB] {
        let (memory, part) = (bench.memory.clone(), Span::new(0, 8 * PAGE));
        let refused = bench.space.map(at, &memory, part, Prot::RW);
        assert!(matches!(refused, Err(MapError::Flush(_))), "{refused:?}");
    }
    let memories = [bench.memory.clone()];
    let refused = bench.space.hand_over(&memories).map(drop);
    assert!(
        matches!(refused, Err(HandOverError::Flush(_))),
        "{refused:?}"
    );
    bench.recover(8);
    // The unit had forgotten it before, and the first listener had when the second had not.
    let first = bench.caches[0].unmapped.lock().unwrap().clone();
    assert!(first.len() > 1 && first.iter().all(|range| *range == page(0, 8)));
    assert_eq!(*bench.caches[1].unmapped.lock().unwrap(), [page(0, 8)]);
    bench.end();

    let mut bench = Bench::new();
    bench.fail();
    let taken = bench.space.take_out(page(10, 2), NEVER);
    assert_eq!(failed(taken), page(10, 2));
    bench.recover(2);
    bench.end();

    // A unit that fails as well is no reason to leave out the others.
    let mut bench = Bench::new();
    bench.unit.invalidates.set(0..64);
    bench.space.unmap(page(0, 8)).unwrap_err();
    assert_eq!(*bench.caches[1].unmapped.lock().unwrap(), [page(0, 8)]);
    bench.unit.invalidates.set(None);
    bench.recover(8);
    bench.end();
}

#[test]
fn what_is_released_is_back_when_a_listener_has_not_forgotten_it() {
    let mut bench = Bench::new();
    bench.fail();
    let mut kept = Vec::new();
    let tell = &mut |range, _| kept.push(range);
    let unpinned = bench.space.release(&[page(2, 2)], NEVER, tell);
    assert_eq!((unpinned, kept), (0, vec![page(2, 2)]));
    assert!(bench.space.areas().iter().all(|area| area.is_there()));
    assert_eq!(bench.space.len(), 4);
    assert_eq!(bench.space.retired(), 1);
    // Held twice until then, charged once.
    bench.recover(0);
    let mapped = bench.caches[0].mapped.lock().unwrap().clone();
    assert_eq!(mapped.last(), Some(&page(2, 2)));
    bench.end();
}

/// While one thread has a listener invalidate, memory stays pinned and nothing is mapped.
#[test]
fn a_listener_that_another_thread_has_invalidate_is_waited_for() {
    let bench = Bench::new();
    bench.space.set_flushing(Flushing::Lazy {
        holds: 8,
        age: Duration::MAX,
        now: || Duration::ZERO,
    });
    bench.space.unmap(page(0, 8)).unwrap();
    let (pass, stopped) = stop();
    *bench.caches[0].at_unmapped.lock().unwrap() = Some(Arc::new(move || {
        pass();
    }));
    thread::scope(|scope| {
        let (space, memory) = (&bench.space, &bench.memory);
        scope.spawn(|| space.flush().unwrap());
        stopped.wait();
        beside(scope, || space.flush().unwrap());
        assert_eq!((space.retired(), memory.held()), (1, 32 * PAGE));
        beside(scope, || {
            let part = Span::new(0, 8 * PAGE);
            space.map(AT, memory, part, Prot::RW).unwrap();
        });
        assert!(space.area_at(AT).is_none());
        stopped.go();
    });
    assert_eq!((bench.space.retired(), bench.memory.held()), (0, 32 * PAGE));
    bench.end();
}

/// Without a domain there may be areas of 2^63 bytes, of which two are no span.
#[test]
fn what_two_areas_over_the_whole_address_space_were_is_forgotten() {
    let halves = [0, 1 << 63].map(|start| Span::<Iova>::new(start, 1 << 63));
    let tables = Arc::new(HeapTables::with_tables(1).unwrap());
    let builder = ioas::TableBuilder::new(tables, ioas::DomainIds::new(8), [FormatId::VtdSs]);
    let space = ioas::Ioas::over_tables(builder);
    let memory = ioas::FixedRuns::new([Span::new(0, 1 << 63)], PAGE).unwrap();
    let memory = Memory::new(Arc::new(memory), &Ledger::unlimited());
    let cache = Arc::<Cache>::default();
    space.add_listener(cache.clone());
    for half in halves {
        let part = Span::new(0, half.len);
        space.map(half.start, &memory, part, Prot::RW).unwrap();
    }
    for order in [halves, [halves[1], halves[0]]] {
        let kept = &mut |range, cause: ioas::ReleaseError| panic!("{range}: {cause}");
        assert_eq!(space.release(&order, NEVER, kept), 0);
        assert_eq!(*cache.unmapped.lock().unwrap(), order);
        let failed = &mut |range, cause: MapError| panic!("{range}: {cause}");
        space.restore(&order, NEVER, failed);
        cache.unmapped.lock().unwrap().clear();
    }
    let pins = halves.map(|half| space.pin(half, Prot::RW, ioas::WhenUnmapped::Keeps));
    let pins = pins.map(Result::unwrap);
    assert_eq!(
        halves.map(|half| space.first_pinned(half)),
        halves.map(Some)
    );
    drop(pins);
    assert_eq!(halves.map(|half| space.first_pinned(half)), [None, None]);
    space.unmap_all().unwrap();
    assert_eq!(*cache.unmapped.lock().unwrap(), halves);
}

#[test]
fn listeners_learn_of_lazy_unmaps_when_these_are_flushed_or_something_is_mapped() {
    let bench = Bench::new();
    bench.space.set_flushing(Flushing::Lazy {
        holds: 2,
        age: Duration::MAX,
        now: || Duration::ZERO,
    });
    let told = |bench: &Bench| bench.caches[0].unmapped.lock().unwrap().clone();
    for n in [0, 1] {
        let unmapped = bench.space.unmap(page(8 * n, 8)).unwrap();
        assert_eq!(unmapped.unpinned, 0);
    }
    assert_eq!((bench.space.retired(), told(&bench)), (2, vec![]));
    // A listener may have looked something up anywhere.
    bench.fail();
    let (memory, part) = (bench.memory.clone(), Span::new(0, PAGE));
    let refused = bench.space.map(AT + MIB, &memory, part, Prot::RW);
    assert!(matches!(refused, Err(MapError::Flush(_))), "{refused:?}");
    bench.caches[1].fails.set(None);
    bench.space.map(AT + MIB, &memory, part, Prot::RW).unwrap();
    assert_eq!(told(&bench).last(), Some(&page(0, 16)), "in one stretch");
    assert_eq!(bench.ledger.in_use(), 17 * PAGE);
    // One more than may wait.
    for n in [2, 3] {
        bench.space.unmap(page(8 * n, 8)).unwrap();
    }
    bench.space.unmap(Span::new(AT + MIB, PAGE)).unwrap();
    assert_eq!((bench.space.retired(), bench.ledger.in_use()), (0, 0));
    bench.end();
}
