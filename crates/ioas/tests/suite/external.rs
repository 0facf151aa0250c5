//! Pages held by a user in this process: the look-up, the charge, and letting go.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::*;
use WhenUnmapped::{Drops, Keeps};
use ioas::{
    ExternalPin, ExternalPinError, Ledger, Memory, PinUser, ROUNDS, Synthetic, UnmapError,
    WhenUnmapped,
};
use iopt::{FormatId, HeapTables, Interruption, Prot};
use runs::{Iova, Offset, Span};

const AT: u64 = 0x10_0000;

struct Bench {
    space: Space,
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
}

/// 32 pages at [`AT`], in two areas.
fn bench() -> Bench {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let space = space(FormatId::VtdSs, 4, &tables);
    let ledger = Ledger::new("a counter", Some(GIB), 0);
    let runs = [Span::new(0x4000_0000, 64 * PAGE)];
    let memory = Memory::new(Arc::new(Synthetic::new(runs)), &ledger);
    for n in 0..2 {
        let part = Span::new(n * 20 * PAGE, 16 * PAGE);
        let at = AT + n * 16 * PAGE;
        space.map(at, &memory, part, Prot::RW).unwrap();
    }
    Bench {
        space,
        ledger,
        memory,
    }
}

fn pages(first: u64, count: u64) -> Span<Iova> {
    Span::new(AT + first * PAGE, count * PAGE)
}

/// Every order of `items`.
fn orders<T: Clone>(items: &[T]) -> Vec<Vec<T>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for i in 0..items.len() {
        let mut rest = items.to_vec();
        let first = rest.remove(i);
        all.extend(orders(&rest).into_iter().map(|mut order| {
            order.insert(0, first.clone());
            order
        }));
    }
    all
}

#[test]
fn the_lowest_overlapping_pin_comes_first() {
    // Apart, touching, overlapping, one in another, single pages.
    let ranges = [
        pages(3, 1),
        pages(4, 3),
        pages(6, 4),
        pages(12, 1),
        pages(7, 1),
    ];
    let bench = bench();
    for order in orders(&ranges) {
        let pins: Vec<_> = order
            .iter()
            .map(|range| bench.space.pin(*range, Prot::READ, Keeps).unwrap())
            .collect();
        for first in 0..14 {
            for count in 1..14 {
                let asked = pages(first, count);
                let held = |page: &u64| {
                    let page = pages(*page, 1);
                    ranges.iter().any(|range| range.overlaps(&page))
                };
                let lowest = (first..first + count).find(held);
                let found = bench.space.first_pinned(asked);
                assert_eq!(
                    found.map(|span| span.start),
                    lowest.map(|page| pages(page, 1).start),
                    "{asked} with pins made as {order:?}"
                );
                // In order from there on: all pages that are held, and none else.
                let mut rest = Some(asked);
                let mut all = Vec::new();
                while let Some(found) = rest.and_then(|rest| bench.space.first_pinned(rest)) {
                    all.extend((found.start..=found.last()).step_by(PAGE as usize));
                    rest = Span::inclusive(found.last() + 1, asked.last());
                }
                let expected = (first..first + count).filter(held);
                let expected: Vec<u64> = expected.map(|page| pages(page, 1).start).collect();
                assert_eq!(all, expected, "{asked}");
            }
        }
        drop(pins);
        assert_eq!(bench.space.first_pinned(pages(0, 32)), None);
    }
}

#[test]
fn what_is_pinned_already_is_not_charged_again_and_a_pin_outlives_its_area() {
    let bench = bench();
    let in_use = bench.ledger.in_use();
    assert_eq!(in_use, 32 * PAGE);
    // Over the border of the areas, which lie apart in the memory.
    let one = bench.space.pin(pages(14, 4), Prot::RW, Keeps).unwrap();
    let other = bench.space.pin(pages(15, 1), Prot::READ, Keeps).unwrap();
    let parts: Vec<Span<Offset>> = one.holds().iter().map(|hold| hold.part()).collect();
    assert_eq!(
        parts,
        [
            Span::new(14 * PAGE, 2 * PAGE),
            Span::new(20 * PAGE, 2 * PAGE)
        ]
    );
    let mut run = [Span::default(); 4];
    let hold = &one.holds()[1];
    let count = hold.with_runs(hold.part(), |reader| reader.next_batch(&mut run));
    assert_eq!(count.unwrap(), 1);
    assert_eq!(run[0], Span::new(0x4000_0000 + 20 * PAGE, 2 * PAGE));
    assert_eq!(bench.ledger.in_use(), in_use);

    // The areas go: exactly what is held stays.
    let unmapped = bench.space.unmap_all().unwrap();
    assert_eq!(unmapped.unpinned, 28 * PAGE);
    assert_eq!(bench.memory.held(), 4 * PAGE);
    assert_eq!(bench.ledger.in_use(), 4 * PAGE);
    drop(one);
    assert_eq!(bench.ledger.in_use(), PAGE);
    drop(other);
    assert_eq!((bench.ledger.in_use(), bench.memory.held()), (0, 0));
}

#[test]
fn without_a_domain_a_pin_pins() {
    let tables = Arc::new(HeapTables::with_tables(16).unwrap());
    let ids = ioas::DomainIds::new(8);
    let builder = ioas::TableBuilder::new(tables, ids, [FormatId::VtdSs]);
    let space = ioas::Ioas::over_tables(builder);
    let ledger = Ledger::unlimited();
    let runs = [Span::new(0x4000_0000, 8 * PAGE)];
    let memory = Memory::new(Arc::new(Synthetic::new(runs)), &ledger);
    let whole = Span::new(0, 8 * PAGE);
    space.map(AT, &memory, whole, Prot::RW).unwrap();
    assert_eq!(ledger.in_use(), 0);
    let pin = space.pin(pages(2, 3), Prot::READ, Keeps).unwrap();
    assert_eq!(ledger.in_use(), 3 * PAGE);
    drop(pin);
    assert_eq!(ledger.in_use(), 0);
}

#[test]
fn what_cannot_be_held_is_named() {
    let bench = bench();
    let behind = AT + 40 * PAGE;
    let part = Span::new(40 * PAGE, 2 * PAGE);
    let memory = bench.memory.clone();
    bench.space.map(behind, &memory, part, Prot::READ).unwrap();
    let pin = |bench: &Bench, range, prot| bench.space.pin(range, prot, Keeps).unwrap_err();
    let hole = pin(&bench, pages(30, 11), Prot::READ);
    assert!(matches!(hole, ExternalPinError::NotThere { at, .. } if at == AT + 32 * PAGE));
    let nothing = pin(&bench, pages(33, 2), Prot::READ);
    assert!(matches!(nothing, ExternalPinError::NotThere { at, .. } if at == AT + 33 * PAGE));
    let read_only = pin(&bench, pages(40, 1), Prot::RW);
    assert!(matches!(read_only, ExternalPinError::Prot { area, .. } if area.start == behind));
    assert!(bench.space.pin(pages(40, 1), Prot::READ, Keeps).is_ok());
    for ill in [Span::new(AT, 0), Span::new(u64::MAX, 2)] {
        assert!(matches!(
            pin(&bench, ill, Prot::READ),
            ExternalPinError::Range(_)
        ));
    }
    let never = Interruption::Refused;
    bench.space.take_out(pages(4, 1), never).unwrap();
    let out = pin(&bench, pages(3, 3), Prot::READ);
    assert!(matches!(out, ExternalPinError::NotThere { at, .. } if at == AT + 4 * PAGE));
    // A refused pin holds nothing.
    assert_eq!(bench.space.first_pinned(Span::new(0, GIB)), None);
    let in_use = bench.ledger.in_use();
    bench.space.unmap_all().unwrap();
    assert_eq!((in_use, bench.ledger.in_use()), (33 * PAGE, 0));
}

/// Drops its pins in the round given.
#[derive(Default)]
struct User {
    pins: Mutex<Vec<ExternalPin>>,
    asked: AtomicU32,
    /// Lets go when it is asked the next time after this one.
    in_round: u32,
}

impl PinUser for User {
    fn drop_pins(&self, range: Span<Iova>, round: u32) {
        assert_eq!(self.asked.fetch_add(1, Ordering::SeqCst), round);
        if round >= self.in_round {
            let mut pins = self.pins.lock().unwrap();
            pins.retain(|pin| !pin.range().overlaps(&range));
        }
    }
}

#[test]
fn a_user_is_asked_to_let_go_before_anything_changes() {
    for in_round in [0, 3, ROUNDS - 1] {
        let bench = bench();
        let user = Arc::new(User {
            in_round,
            ..User::default()
        });
        bench.space.add_pin_user(user.clone());
        let pin = |range| bench.space.pin(range, Prot::RW, Drops).unwrap();
        let pins = vec![pin(pages(2, 2)), pin(pages(3, 1)), pin(pages(20, 1))];
        user.pins.lock().unwrap().extend(pins);
        // Only those in the way, and of a part also.
        let never = Interruption::Refused;
        let part = bench.space.unmap_cutting(pages(3, 1), never);
        assert_eq!(part.unwrap().unpinned, PAGE);
        assert_eq!(user.asked.swap(0, Ordering::SeqCst), in_round + 1);
        assert_eq!(user.pins.lock().unwrap().len(), 1);
        assert_eq!(bench.space.unmap_all().unwrap().bytes, 31 * PAGE);
        assert_eq!(bench.ledger.in_use(), 0);
    }
}

#[test]
fn who_does_not_let_go_is_named_and_everything_stays() {
    let bench = bench();
    let user = Arc::new(User {
        in_round: ROUNDS,
        ..User::default()
    });
    bench.space.add_pin_user(user.clone());
    let pin = bench.space.pin(pages(5, 2), Prot::RW, Drops).unwrap();
    let kept = bench.space.pin(pages(4, 1), Prot::RW, Keeps).unwrap();
    let before = leaves(&bench.space);
    let refused = bench.space.unmap(pages(0, 16)).unwrap_err();
    assert!(matches!(refused, UnmapError::Held { held, .. } if held == pages(5, 2)));
    assert_eq!(user.asked.swap(0, Ordering::SeqCst), ROUNDS);
    let refused = bench.space.take_out(pages(6, 1), Interruption::Refused);
    assert!(matches!(refused, Err(UnmapError::Held { held, .. }) if held == pages(6, 1)));
    assert_eq!(leaves(&bench.space), before);
    assert_eq!((bench.space.len(), bench.space.retired()), (2, 0));
    // Its user is not asked about ranges beside it.
    user.asked.store(0, Ordering::SeqCst);
    bench.space.unmap(pages(16, 16)).unwrap();
    assert_eq!(user.asked.load(Ordering::SeqCst), 0);
    drop(pin);
    bench.space.unmap_all().unwrap();
    assert_eq!(bench.memory.held(), PAGE);
    drop(kept);
    assert_eq!(bench.memory.held(), 0);
}
