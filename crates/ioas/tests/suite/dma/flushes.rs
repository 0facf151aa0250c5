//! Flushes: an address comes back after one that succeeds, whichever thread has asked for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Bench, WINDOW, read, sees};
use crate::common::*;
use ioas::{DmaError, DmaUnmapError, UnmapError};
use runs::Span;

#[test]
fn a_lazily_unmapped_address_is_not_used_again_before_the_flush() {
    for format in FORMATS {
        let bench = Bench::new(format, Some(3), WINDOW);
        let mut device = bench.device();
        let mut used = Vec::new();
        // Keeps the table: one that was unlinked is flushed before anything is mapped in its place.
        let kept = bench.map(0, 1).unwrap();
        bench.unit.invalidates.set(None);
        for n in 0..4 {
            let buffer = bench.map(n * PAGE, PAGE).unwrap();
            sees(&mut device, &buffer, n * PAGE);
            let start = buffer.range().start;
            assert!(!used.contains(&start), "{start:#x} may still be cached");
            used.push(start);
            bench.dma.unmap(buffer).unwrap();
        }
        assert_eq!(bench.unit.invalidates.calls(), 1, "at the bound");
        let again = bench.map(9 * PAGE, PAGE).unwrap();
        assert!(used.contains(&again.range().start));
        sees(&mut device, &again, 9 * PAGE);
        for buffer in [again, kept] {
            bench.dma.unmap(buffer).unwrap();
        }
        bench.end();
    }
}

#[test]
fn a_full_window_flushes_first_and_then_says_what_is_left() {
    let window = Span::new(WINDOW.start, 16 * PAGE);
    let bench = Bench::new(FORMATS[0], Some(100), window);
    let buffers: Vec<_> = (0..16).map(|n| bench.map(n * PAGE, 1).unwrap()).collect();
    assert!(matches!(
        bench.map(0, 1),
        Err(DmaError::NoRoom {
            wanted: PAGE,
            longest: 0
        })
    ));
    for (n, buffer) in buffers.into_iter().enumerate() {
        if n % 2 == 0 {
            bench.dma.unmap(buffer).unwrap();
        } else {
            // It stays for good.
            let _ = buffer;
        }
    }
    assert!(bench.dma.waiting() > 0);
    let refused = bench.map(0, 2 * PAGE).unwrap_err();
    assert!(matches!(
        refused,
        DmaError::NoRoom { wanted, longest: PAGE } if wanted == 2 * PAGE
    ));
    assert_eq!(bench.dma.waiting(), 0, "flushed for room");
    let mut device = bench.device();
    for n in 0..8 {
        let buffer = bench.map(n * PAGE, 1).unwrap();
        sees(&mut device, &buffer, n * PAGE);
        let _ = buffer;
    }
    bench.end();
}

#[test]
fn an_address_whose_flush_has_failed_is_used_after_the_next() {
    let window = Span::new(WINDOW.start, 2 * PAGE);
    let bench = Bench::new(FORMATS[0], None, window);
    let mut device = bench.device();
    let buffer = bench.map(0, 1).unwrap();
    let start = buffer.range().start;
    sees(&mut device, &buffer, 0);
    let first = bench.unit.invalidates.calls();
    bench.unit.invalidates.set(first..first + 1);
    let failed = bench.dma.unmap(buffer);
    assert!(matches!(
        failed,
        Err(DmaUnmapError::Unmapped(UnmapError::Flush(_)))
    ));
    assert_eq!(read(&mut device, start), Some(0), "still cached");
    let other = bench.map(PAGE, 1).unwrap();
    assert_ne!(other.range().start, start);
    // The flush before it has succeeded.
    let third = bench.map(2 * PAGE, 1).unwrap();
    assert_eq!(third.range().start, start);
    sees(&mut device, &third, 2 * PAGE);
    for buffer in [other, third] {
        bench.dma.unmap(buffer).unwrap();
    }
    bench.end();
}

/// The buffers of one thread are being flushed when another one has everything flushed, or needs their addresses.
#[test]
fn a_flush_of_another_thread_is_waited_for() {
    type Second = fn(&Bench) -> u64;
    let flush: Second = |bench| {
        bench.dma.flush().unwrap();
        WINDOW.start
    };
    let poll: Second = |bench| {
        bench.dma.poll().unwrap();
        WINDOW.start
    };
    let map: Second = |bench| bench.map(5 * PAGE, PAGE).unwrap().range().start;
    for (second, seen) in [(flush, None), (poll, None), (map, Some(5 * PAGE))] {
        // The first flush succeeds, fails, panics.
        for first in 0..3 {
            let bench = Bench::new(FORMATS[0], Some(0), Span::new(WINDOW.start, PAGE));
            let buffer = bench.map(0, PAGE).unwrap();
            sees(&mut bench.device(), &buffer, 0);
            let (pass, stopped) = stop();
            *bench.unit.at_invalidate.lock().unwrap() = Some(Arc::new(move || {
                if pass() && first == 2 {
                    std::panic::resume_unwind(Box::new("no flush"));
                }
            }));
            bench.unit.invalidates.set((first == 1).then_some(0));
            std::thread::scope(|scope| {
                let bench = &bench;
                let unmap = move || bench.dma.unmap(buffer);
                let unmap = scope.spawn(|| catch_unwind(AssertUnwindSafe(unmap)));
                stopped.wait();
                assert_eq!(bench.dma.waiting(), 1);
                let second = beside(scope, move || {
                    let at = second(bench);
                    assert_eq!(read(&mut bench.device(), at), seen, "after {first}");
                });
                stopped.go();
                let unmapped = unmap.join().unwrap();
                assert_eq!(matches!(unmapped, Ok(Ok(()))), first == 0);
                second.join().unwrap();
            });
            assert_eq!(bench.dma.waiting(), 0);
            let mapped = if seen.is_some() { PAGE } else { 0 };
            assert_eq!(bench.object.memory.pinned(), mapped);
            bench.end();
        }
    }
}

/// One of two threads' flushes fails at each call in turn: its buffers wait, the other's are gone.
#[test]
fn a_flush_that_fails_for_one_of_two_threads_keeps_only_its_buffers() {
    for fails in 0..6 {
        let bench = Bench::new(FORMATS[0], None, WINDOW);
        bench.unit.invalidates.set([fails]);
        let failed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..2u64 {
                let (bench, failed) = (&bench, &failed);
                scope.spawn(move || {
                    for n in 0..3 {
                        let buffer = bench.map((2 * n + thread) * PAGE, PAGE).unwrap();
                        match bench.dma.unmap(buffer) {
                            Ok(()) => {}
                            Err(DmaUnmapError::Unmapped(UnmapError::Flush(_))) => {
                                failed.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(other) => panic!("{other}"),
                        }
                    }
                });
            }
        });
        assert_eq!(failed.into_inner(), 1);
        // The same thread's next unmap has flushed it, if there was one.
        let waits = bench.dma.waiting() as u64;
        assert!(waits <= 1);
        assert_eq!(bench.object.memory.pinned(), waits * PAGE);
        bench.dma.flush().unwrap();
        assert_eq!(bench.object.memory.pinned(), 0);
        bench.end();
    }
}

#[test]
fn many_threads_map_and_unmap_at_once() {
    for waits in [None, Some(32)] {
        let bench = Bench::new(FORMATS[0], waits, WINDOW);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (bench, mut device) = (&bench, bench.device());
                scope.spawn(move || {
                    for n in 0..400 {
                        let start = (thread * 400 + n) * 1031 % (8 * MIB);
                        let len = 1 + (n * 7919) % (256 << 10);
                        let buffer = bench.map(start, len).unwrap();
                        sees(&mut device, &buffer, start);
                        bench.dma.unmap(buffer).unwrap();
                    }
                });
            }
        });
        bench.end();
    }
}
