//! Tables that several threads use: a table goes, stays or is joined whatever another thread does beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use super::{AT, Bench, FRAME, NEIGHBOURS, read};
use crate::common::*;
use ioas::{MapError, Step, Tracking};
use iopt::{Interruption, Pending, Prot};
use runs::Span;

#[test]
fn what_is_mapped_beside_an_unmap_is_seen_when_its_table_goes() {
    for format in FORMATS {
        for [gone, new] in [NEIGHBOURS, [NEIGHBOURS[1], NEIGHBOURS[0]]] {
            let bench = Bench::new(format, 64);
            bench.map(gone, 0, PAGE).unwrap();
            // The unit remembers the table, in which nothing is left.
            assert_eq!(read(&bench, gone), Some(0));
            let (pass, stopped) = stop();
            thread::scope(|scope| {
                let space = &bench.space;
                scope.spawn(move || {
                    let range = Span::new(gone, PAGE);
                    space
                        .observed(&mut Before(Step::Flush, pass))
                        .unmap(range)
                        .unwrap();
                });
                stopped.wait();
                beside(scope, || {
                    bench.map(new, PAGE, PAGE).unwrap();
                    assert_eq!(read(&bench, new), Some(1));
                });
                stopped.go();
            });
            bench.space.unmap_all().unwrap();
            bench.is_empty();
            bench.end();
        }
    }
}

#[test]
fn a_table_into_which_another_thread_maps_stays_with_an_unmap() {
    for format in FORMATS {
        for [gone, new] in [NEIGHBOURS, [NEIGHBOURS[1], NEIGHBOURS[0]]] {
            let bench = Bench::new(format, 64);
            bench.map(gone, 0, PAGE).unwrap();
            assert_eq!(read(&bench, gone), Some(0));
            let (fills, filling) = stop();
            let (flushes, flushing) = stop();
            thread::scope(|scope| {
                let space = &bench.space;
                let map = scope.spawn(|| {
                    let (part, prot) = (Span::new(PAGE, PAGE), Prot::RW);
                    let mut observer = Before(Step::FillTables, fills);
                    let map = space
                        .observed(&mut observer)
                        .map(new, &bench.memory, part, prot);
                    map.unwrap();
                });
                filling.wait();
                scope.spawn(move || {
                    let range = Span::new(gone, PAGE);
                    let mut observer = Before(Step::Flush, flushes);
                    space.observed(&mut observer).unmap(range).unwrap();
                });
                flushing.wait();
                filling.go();
                map.join().unwrap();
                assert_eq!(read(&bench, new), Some(1));
                flushing.go();
            });
            bench.space.unmap_all().unwrap();
            bench.is_empty();
            bench.end();
        }
    }
}

#[test]
fn an_area_that_another_thread_unmaps_is_not_joined() {
    for format in FORMATS {
        for unmapped in [0, 2] {
            let bench = Bench::new(format, 64);
            bench.map(AT, 0, 3 * PAGE).unwrap();
            let page = |n| Span::new(AT + n * PAGE, PAGE);
            let refused = Interruption::Refused;
            bench.space.take_out(page(1), refused).unwrap();
            let (pass, stopped) = stop();
            thread::scope(|scope| {
                let space = &bench.space;
                let unmap = scope.spawn(move || {
                    let mut observer = Before(Step::EmptyTables, pass);
                    space
                        .observed(&mut observer)
                        .unmap(page(unmapped))
                        .unwrap()
                        .areas
                });
                stopped.wait();
                beside(scope, move || {
                    space.put_back(page(1), refused).unwrap();
                });
                stopped.go();
                assert_eq!(unmap.join().unwrap(), 1);
            });
            for n in 0..3 {
                let there = (n != unmapped).then_some(n);
                assert_eq!(read(&bench, AT + n * PAGE), there);
            }
            assert_eq!(bench.space.len(), 1);
            bench.space.unmap_all().unwrap();
            bench.is_empty();
            bench.end();
        }
    }
}

/// The unit has not taken notice of a merge, and may note in the old leaves what its device writes.
#[test]
fn leaves_of_a_new_size_wait_for_a_flush_of_another_thread() {
    let bench = Bench::new(FORMATS[0], 64);
    bench.map(AT, 0, 8 * MIB).unwrap();
    let (space, refused) = (&bench.space, Interruption::Refused);
    space.track_dirty(Tracking::default()).unwrap();
    let page = Span::new(AT + 3 * PAGE, PAGE);
    space.take_out(page, refused).unwrap();
    bench.unit.invalidates.set([0]);
    space.put_back(page, refused).unwrap();
    assert_eq!(bench.unit.invalidates.calls(), 1, "the merge was flushed");
    let (pass, stopped) = stop();
    *bench.unit.at_invalidate.lock().unwrap() = Some(Arc::new(move || {
        pass();
    }));
    let all = Span::new(AT, 8 * MIB);
    let emptied = Arc::new(AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| space.flush().unwrap());
        stopped.wait();
        let harvest = beside(scope, || {
            let mut pending = Pending::new([0u64; 4], all, MIB).unwrap();
            space.harvest(&mut pending).unwrap();
        });
        let early = harvest.is_finished();
        let flag = emptied.clone();
        beside(scope, move || {
            let flushes = move || flag.swap(true, Ordering::SeqCst);
            let mut observer = Before(Step::Flush, flushes);
            space.observed(&mut observer).unmap(all).unwrap();
        });
        assert!(!early && !emptied.load(Ordering::SeqCst));
        stopped.go();
    });
    bench.is_empty();
    bench.end();
}

#[test]
fn ten_threads_share_the_last_tables() {
    // Ten areas far apart need three tables each below the root: there are enough for five.
    let bench = Bench::new(FORMATS[0], 1 + 3 * 5);
    let refused = AtomicU64::new(0);
    thread::scope(|scope| {
        for n in 0..10 {
            let (bench, refused) = (&bench, &refused);
            scope.spawn(move || {
                let at = (n + 1) * 512 * GIB;
                for _ in 0..200 {
                    match bench.map(at, n * MIB, MIB) {
                        Ok(()) => {
                            assert_eq!(bench.space.translate(at), Some(FRAME + n * MIB));
                            bench.unmap(at, MIB).unwrap();
                        }
                        Err(MapError::Table(iopt::TableMapError::NoTables(_))) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(cause) => panic!("{cause}"),
                    }
                }
            });
        }
    });
    bench.is_empty();
    // All at once is too much; one after the other is not.
    let maps: Vec<bool> = (0..10)
        .map(|n| bench.map((n + 1) * 512 * GIB, n * MIB, MIB).is_ok())
        .collect();
    assert_eq!(maps.iter().filter(|mapped| **mapped).count(), 5);
    bench.space.unmap_all().unwrap();
    bench.is_empty();
    bench.end();
}
