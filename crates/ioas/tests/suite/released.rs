//! Released and restored parts of areas: charges and tables kept, notifications, and the state after a failed step.
//! (Random sequences in several address spaces: see `released_model.rs`.)

mod parts;

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use crate::common::machines::{AT, Bench, FRAME, Machine, SMALL, can};
use crate::common::*;
use ioas::{
    ExternalPin, Ledger, MapError, Memory, MemoryObject, PinFailed, PinUser, Pinned, ReleaseError,
    Synthetic, UnmapError, WhenUnmapped,
};
use iopt::{FormatId, HeapTables, Interruption, Prot, Reserve, ResizeError, TableMemory};
use runs::{Iova, Offset, Span};

const NEVER: Interruption = Interruption::Refused;

/// Releases, and returns what was kept.
fn release(space: &mut Space, ranges: &[Span<Iova>]) -> (u64, Vec<(Span<Iova>, ReleaseError)>) {
    let mut kept = Vec::new();
    let mut tell = |range, cause| kept.push((range, cause));
    let unpinned = space.release(ranges, NEVER, &mut tell);
    (unpinned, kept)
}

/// Restores, and returns what was not to be had.
fn restore(space: &mut Space, ranges: &[Span<Iova>]) -> Vec<(Span<Iova>, MapError)> {
    let mut failed = Vec::new();
    let mut tell = |range, cause| failed.push((range, cause));
    space.restore(ranges, NEVER, &mut tell);
    failed
}

/// Lower and upper address of the first area of `Bench`, by offset.
const fn at(start: u64, len: u64) -> Span<Iova> {
    Span::new(AT + start, len)
}

/// A bench whose devices are there, with an area of 1 GiB in one leaf.
fn bench(can: iommu::UnitCapabilities) -> (Bench, Machine) {
    let mut bench = Bench::new();
    bench.areas();
    let machine = Machine::new(&bench.tables, 0, can);
    machine.attach(&mut bench.space).unwrap();
    (bench, machine)
}

fn large() -> iommu::UnitCapabilities {
    can(FormatId::VtdSs, 1 << 12 | 1 << 21 | 1 << 30, true)
}

#[test]
fn runs_are_let_go_of_exactly_and_come_back_as_they_were() {
    for format in [FormatId::VtdSs, FormatId::AmdV1] {
        let (mut bench, mut machine) = bench(can(format, 1 << 12 | 1 << 21 | 1 << 30, true));
        let before = bench.state();
        let runs = [
            at(0, PAGE),
            at(5 * PAGE, 3 * PAGE),
            at(MIB + PAGE, 7 * MIB),
            at(GIB - 2 * MIB, 2 * MIB),
        ];
        let gone: u64 = runs.iter().map(|run| run.len).sum();
        // Three pages of them are held by another area too.
        let (unpinned, kept) = release(&mut bench.space, &runs);
        assert!(kept.is_empty(), "{kept:?}");
        let shared = 3 * PAGE;
        assert_eq!(unpinned, gone - shared);
        assert_eq!(bench.object.memory.pinned(), Bench::HELD - (gone - shared));
        // Charged as before.
        assert_eq!(bench.ledger.in_use(), Bench::HELD);
        assert_eq!(bench.memory.reserved(), gone - shared);
        assert_eq!(bench.memory.charged(), Bench::HELD);
        for run in runs {
            for (iova, there) in [
                (run.start.wrapping_sub(8), run.start > AT),
                (run.start, false),
                (run.last() - 7, false),
                (run.last() + 1, run.last() + 1 < AT + GIB),
            ] {
                let expected = there.then_some(FRAME.wrapping_add(iova.wrapping_sub(AT)));
                assert_eq!(machine.read(iova), expected, "{iova:#x}");
            }
        }
        let released = bench
            .space
            .areas()
            .into_iter()
            .filter(|area| area.is_released());
        let ranges: Vec<Span<Iova>> = released.map(|area| area.range()).collect();
        assert_eq!(ranges, runs);
        // Again: they stay so.
        let (unpinned, kept) = release(&mut bench.space, &runs);
        assert_eq!((unpinned, kept.len()), (0, 0));
        // In other parts than before, and over what is there.
        let failed = restore(&mut bench.space, &[at(2 * MIB, MIB), at(0, 16 * PAGE)]);
        assert!(failed.is_empty(), "{failed:?}");
        assert_eq!(machine.read(AT + 2 * MIB), Some(FRAME + 2 * MIB));
        assert_eq!(machine.read(AT + 2 * MIB - 8), None);
        let failed = restore(&mut bench.space, &[at(0, GIB)]);
        assert!(failed.is_empty(), "{failed:?}");
        assert_eq!(bench.state(), before);
        assert_eq!(bench.memory.reserved(), 0);
        bench.end();
    }
}

/// Memory that comes back in single pages.
#[derive(Debug)]
struct Moving {
    first: Synthetic,
    then: Synthetic,
    /// It has moved, and whenever it is pinned another user takes all tables of this memory.
    moved: Mutex<Option<Arc<HeapTables>>>,
    taken: Mutex<Vec<Reserve>>,
}

impl MemoryObject for Moving {
    fn len(&self) -> u64 {
        self.first.len()
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        self.first.charge(part)
    }

    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        let moved = self.moved.lock().unwrap();
        let Some(tables) = &*moved else {
            return self.first.pin(part, progress);
        };
        let others = tables.reserve(64 - tables.in_use()).unwrap();
        self.taken.lock().unwrap().push(others);
        self.then.pin(part, progress)
    }
}

#[test]
fn charge_and_tables_are_there_when_scattered_memory_comes_back() {
    let len = 64 * MIB;
    let pages = (0..len / PAGE).map(|n| Span::new(64 * GIB + (2 * n + 1) * PAGE, PAGE));
    let object = Arc::new(Moving {
        first: Synthetic::new([Span::new(32 * GIB, len)]),
        then: Synthetic::new(pages),
        moved: Mutex::default(),
        taken: Mutex::default(),
    });
    for format in FORMATS {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let mut space = space(format.0, format.1, &tables);
        // The limit leaves room for nothing else, and there is no table to spare.
        let ledger = Ledger::new("a counter", Some(len), 0);
        let memory = Memory::new(object.clone(), &ledger);
        let whole = Span::new(0, len);
        space.map(AT, &memory, whole, Prot::RW).unwrap();
        let used = tables.in_use();
        // 2M runs one by one, but for a page.
        let runs: Vec<Span<Iova>> = (0..32).map(|n| at(n * 2 * MIB, 2 * MIB)).collect();
        let (unpinned, kept) = release(&mut space, &runs);
        assert!(kept.is_empty(), "{kept:?}");
        assert_eq!((unpinned, ledger.in_use()), (len, len));
        assert!(ledger.charge(1).is_err(), "somebody has taken the charge");
        // A table for each, and one or more above.
        assert!(tables.in_use() - used >= 32, "{}", tables.in_use());
        *object.moved.lock().unwrap() = Some(tables.clone());
        for run in runs.iter().rev() {
            let failed = restore(&mut space, &[*run]);
            assert!(failed.is_empty(), "{failed:?}");
        }
        assert_eq!(leaves(&space).len() as u64, len / PAGE);
        assert_eq!(ledger.in_use(), len);
        *object.moved.lock().unwrap() = None;
        for others in object.taken.lock().unwrap().drain(..) {
            tables.give_back(others);
        }
        space.close().unwrap();
        assert_eq!((tables.in_use(), ledger.in_use()), (0, 0));
    }
}

#[test]
fn what_is_set_aside_is_given_back() {
    let (mut bench, _machine) = bench(large());
    let before = bench.state();
    let runs = [at(PAGE, PAGE), at(600 * MIB, 10 * MIB)];
    for end in 0..3 {
        let (_, kept) = release(&mut bench.space, &runs);
        assert!(kept.is_empty(), "{kept:?}");
        assert!(bench.tables.in_use() > before.tables);
        match end {
            // Once unmapped, and once closed.
            0 => {
                bench.space.unmap_cutting(at(0, 700 * MIB), NEVER).unwrap();
                assert_eq!(bench.memory.reserved(), 0);
                let whole = Span::new(0, 700 * MIB);
                bench.map(AT, whole).unwrap();
                let all = at(0, GIB);
                bench.space.unmap(at(0, 700 * MIB)).unwrap();
                bench.space.unmap(at(700 * MIB, 324 * MIB)).unwrap();
                bench.map(AT, Span::new(0, all.len)).unwrap();
                assert_eq!(bench.state(), before);
            }
            1 => {
                // The last device goes: nothing is charged, nothing kept. It stays released.
                bench.space.detach(_machine.device).unwrap();
                assert_eq!((bench.ledger.in_use(), bench.tables.in_use()), (0, 0));
                _machine.attach(&mut bench.space).unwrap();
                assert_eq!(bench.ledger.in_use(), Bench::HELD);
                assert_eq!(bench.memory.reserved(), 2561 * PAGE);
                assert!(restore(&mut bench.space, &runs).is_empty());
                assert_eq!(
                    bench.state(),
                    State {
                        domains: bench.state().domains,
                        ..before
                    }
                );
                return bench.end();
            }
            _ => unreachable!(),
        }
    }
}

#[test]
fn who_comes_later_sees_the_holes_and_what_is_restored() {
    let (mut bench, mut first) = bench(large());
    let run = at(7 * MIB, 3 * MIB);
    assert!(release(&mut bench.space, &[run]).1.is_empty());
    // Another domain: too few tables for the return, then enough.
    let tables = bench.tables.clone();
    let mut second = Machine::new(&tables, 1, can(FormatId::VtdSs, SMALL, true));
    let before = bench.state();
    let mut refused = 0;
    for left in 0.. {
        let others = tables.reserve(128 - tables.in_use() - left).unwrap();
        let attached = second.attach(&mut bench.space);
        tables.give_back(others);
        if attached.is_ok() {
            break;
        }
        assert_eq!(bench.state(), before);
        refused += 1;
    }
    assert!(refused > 2, "{refused}");
    for machine in [&mut first, &mut second] {
        assert_eq!(machine.read(run.start), None);
        assert_eq!(machine.read(run.start - 8), Some(FRAME + 7 * MIB - 8));
    }
    assert!(restore(&mut bench.space, &[run]).is_empty());
    for machine in [&mut first, &mut second] {
        assert_eq!(machine.read(run.start), Some(FRAME + 7 * MIB));
    }
    bench.end();
}

#[test]
fn released_and_taken_out_are_apart() {
    let (mut bench, mut machine) = bench(large());
    let before = bench.state();
    let page = at(9 * PAGE, PAGE);
    for restored_first in [true, false] {
        for out_first in [true, false] {
            let out = |bench: &mut Bench| bench.space.take_out(page, NEVER).unwrap();
            if out_first {
                out(&mut bench);
            }
            assert!(release(&mut bench.space, &[page]).1.is_empty());
            if !out_first {
                out(&mut bench);
            }
            assert_eq!(machine.read(page.start), None);
            if restored_first {
                assert!(restore(&mut bench.space, &[page]).is_empty());
            } else {
                bench.space.put_back(page, NEVER).unwrap();
                // It is only released now, and what is, is charged.
                assert_eq!(bench.memory.reserved(), PAGE);
            }
            assert_eq!(machine.read(page.start), None);
            assert_eq!(bench.object.memory.pinned(), before.pinned - PAGE);
            if restored_first {
                bench.space.put_back(page, NEVER).unwrap();
            } else {
                assert!(restore(&mut bench.space, &[page]).is_empty());
            }
            assert_eq!(bench.state(), before);
        }
    }
    bench.end();
}

struct Fickle(std::sync::Mutex<Option<ExternalPin>>);

impl PinUser for Fickle {
    fn drop_pins(&self, _range: Span<Iova>, round: u32) {
        if round == 2 {
            self.0.lock().unwrap().take();
        }
    }
}

#[test]
fn what_another_holder_has_is_refused_by_name_and_the_other_runs_go() {
    let (mut bench, mut machine) = bench(large());
    let before = bench.state();
    let runs = [at(0, PAGE), at(4 * PAGE, 4 * PAGE), at(16 * PAGE, PAGE)];
    let held = at(5 * PAGE, PAGE);
    let pin = bench.space.pin(held, Prot::READ, WhenUnmapped::Keeps);
    let (_, kept) = release(&mut bench.space, &runs);
    let [(range, ReleaseError::Unmap(UnmapError::Held { held: found, .. }))] = &kept[..] else {
        panic!("{kept:?}");
    };
    assert_eq!((*range, *found), (runs[1], held));
    assert_eq!(machine.read(runs[1].start), Some(FRAME + 4 * PAGE));
    assert_eq!(machine.read(runs[0].start), None);
    // A released range cannot be pinned.
    let refused = bench.space.pin(runs[0], Prot::READ, WhenUnmapped::Keeps);
    assert!(matches!(
        refused,
        Err(ioas::ExternalPinError::NotThere { .. })
    ));
    drop(pin);
    // A user that is to let go does.
    let pin = bench.space.pin(held, Prot::READ, WhenUnmapped::Drops);
    let user = Arc::new(Fickle(Some(pin.unwrap()).into()));
    bench.space.add_pin_user(user);
    assert!(release(&mut bench.space, &runs).1.is_empty());
    assert_eq!(machine.read(runs[1].start), None);
    assert!(restore(&mut bench.space, &runs).is_empty());
    assert_eq!(bench.state(), before);
    // Ranges that no area covers.
    let beyond = [at(GIB - PAGE, 2 * PAGE), Span::new(u64::MAX - 4095, 8192)];
    let (_, kept) = release(&mut bench.space, &beyond);
    let causes: Vec<_> = kept.iter().map(|(_, cause)| cause).collect();
    assert!(
        matches!(
            causes[..],
            [
                ReleaseError::Unmap(UnmapError::Hole { .. }),
                ReleaseError::Unmap(UnmapError::BeyondEnd { .. })
            ]
        ),
        "{kept:?}"
    );
    assert_eq!(bench.state(), before);
    bench.end();
}

#[test]
fn memory_that_two_areas_have_is_held_until_both_have_released_it() {
    let (mut bench, machine) = bench(large());
    let tables = bench.tables.clone();
    let mut other = space(FormatId::VtdSs, 4, &tables);
    let part = Span::new(MIB, MIB);
    other.map(0, &bench.memory, part, Prot::RW).unwrap();
    let again = Span::new(AT + 8 * GIB, MIB);
    bench.map(again.start, part).unwrap();
    // The limit leaves no room.
    let full = bench.ledger.charge(4 * GIB - bench.ledger.in_use());
    let before = bench.state();
    let here = [at(MIB, MIB), again];
    assert_eq!(release(&mut bench.space, &here[..1]).0, 0);
    assert_eq!(release(&mut other, &[Span::new(0, MIB)]).0, 0);
    assert_eq!(bench.memory.first_held(part), Some(part));
    assert_eq!(bench.memory.reserved(), 0);
    assert_eq!(release(&mut bench.space, &here[1..]).0, MIB);
    assert_eq!(bench.memory.first_held(part), None);
    assert_eq!(bench.memory.reserved(), MIB);
    assert_eq!(bench.ledger.in_use(), 4 * GIB);
    // The first map has it pinned, and all come back.
    assert!(restore(&mut other, &[Span::new(0, MIB)]).is_empty());
    assert_eq!(bench.memory.first_held(part), Some(part));
    assert!(restore(&mut bench.space, &here).is_empty());
    assert_eq!(bench.ledger.in_use(), 4 * GIB);
    assert_eq!(bench.state(), before);
    other.close().unwrap();
    drop((full, machine));
    bench.end();
}

#[test]
fn a_step_that_fails_leaves_things_as_they_were() {
    let (mut bench, mut machine) = bench(large());
    let whole = bench.state();
    let run = at(MIB + PAGE, 100 * MIB);
    let runs = [at(0, PAGE), run];
    // Leaves around it are small already, so that nothing is cut any more, but for the tables.
    let mut refused = (0, 0);
    for left in 0.. {
        let before = bench.state();
        let others = bench.tables.reserve(128 - bench.tables.in_use() - left);
        let (_, kept) = release(&mut bench.space, &[run]);
        bench.tables.give_back(others.unwrap());
        match &kept[..] {
            [] => break,
            [(_, ReleaseError::Unmap(UnmapError::Cut(ResizeError::NoTables(_))))] => refused.0 += 1,
            [(_, ReleaseError::SetAside(_))] => refused.1 += 1,
            _ => panic!("{kept:?}"),
        }
        let after = bench.state();
        assert_eq!(
            (after.areas, after.held, after.pinned, after.in_use),
            (before.areas, before.held, before.pinned, before.in_use)
        );
        assert_eq!(machine.read(run.start), Some(FRAME + MIB + PAGE));
    }
    assert!(refused.0 >= 2 && refused.1 >= 2, "{refused:?}");
    assert!(restore(&mut bench.space, &[run]).is_empty());
    assert_eq!(bench.state(), whole);

    // Each call to the unit fails once: at the cuts, and at the flush of what was emptied.
    let mut failures = (0, 0);
    for call in 0.. {
        machine.unit.invalidates.set([call]);
        let (_, kept) = release(&mut bench.space, &runs);
        let calls = machine.unit.invalidates.calls();
        machine.unit.invalidates.set(None);
        if kept.is_empty() {
            assert!(calls <= call);
            break;
        }
        for (_, cause) in &kept {
            match cause {
                ReleaseError::Unmap(UnmapError::Cut(ResizeError::Flush(_))) => failures.0 += 1,
                ReleaseError::Unmap(UnmapError::Flush(_)) => failures.1 += 1,
                other => panic!("{other}"),
            }
        }
        bench.space.flush().unwrap();
        for (range, _) in &kept {
            assert_eq!(machine.read(range.start), Some(FRAME + range.start - AT));
        }
        assert!(restore(&mut bench.space, &runs).is_empty());
        assert_eq!(bench.state(), whole, "{call}");
    }
    assert!(failures.0 >= 1 && failures.1 >= 2, "{failures:?}");

    // Released now. A pin that fails is reported, and its ranges can be tried again.
    let out = bench.state();
    bench.object.pins.set([1]);
    let failed = restore(&mut bench.space, &runs);
    let [(range, MapError::Pin(PinFailed::Refused(_)))] = &failed[..] else {
        panic!("{failed:?}");
    };
    assert_eq!(*range, run);
    assert_eq!(machine.read(runs[0].start), Some(FRAME));
    assert_eq!(machine.read(run.start), None);
    assert_eq!(bench.ledger.in_use(), whole.in_use);
    assert!(release(&mut bench.space, &runs[..1]).1.is_empty());
    assert_eq!(bench.state(), out);
    // Its runs cannot be read, in the middle of filling tables too.
    for read in 0..2 {
        bench.object.reads.set([read]);
        let failed = restore(&mut bench.space, &runs[1..]);
        assert!(matches!(failed[..], [(_, MapError::Runs(_))]), "{failed:?}");
        bench.object.reads.set(None);
        assert_eq!(bench.state(), out);
    }
    assert!(restore(&mut bench.space, &runs).is_empty());
    assert_eq!(bench.state(), whole);

    // Memory that does not go: it is released, but must not be discarded.
    bench.object.unpins.set([0]);
    let (unpinned, kept) = release(&mut bench.space, &runs);
    let [(range, ReleaseError::Unmap(UnmapError::Unpin(_)))] = &kept[..] else {
        panic!("{kept:?}");
    };
    assert_eq!((*range, unpinned), (runs[0], run.len));
    bench.object.unpins.set(None);
    assert!(restore(&mut bench.space, &runs).is_empty());
    assert_eq!(machine.read(AT), Some(FRAME));
    bench.space.close().unwrap();
}

#[test]
fn a_flush_that_was_still_to_come_is_reported_at_restore() {
    let (mut bench, machine) = bench(large());
    let run = at(MIB, MIB);
    assert!(release(&mut bench.space, &[run]).1.is_empty());
    let before = bench.state();
    machine.unit.invalidates.set(0..2);
    let gone = Span::new(AT + 2 * GIB, 5 * PAGE);
    assert!(bench.space.unmap(gone).is_err());
    let failed = restore(&mut bench.space, &[run]);
    assert!(
        matches!(failed[..], [(_, MapError::Flush(_))]),
        "{failed:?}"
    );
    assert_eq!(bench.memory.reserved(), MIB);
    machine.unit.invalidates.set(None);
    assert!(restore(&mut bench.space, &[run]).is_empty());
    assert_eq!(bench.ledger.in_use(), before.in_use);
    bench.end();
}
