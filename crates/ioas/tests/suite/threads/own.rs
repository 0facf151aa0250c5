//! Eight threads, each with a stretch of its own between those of others in the same tables, and one that all share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::{AT, Bench, FRAME};
use crate::common::*;
use fastrand::Rng;
use ioas::{Flushing, MapError, ReleaseError, UnmapError};
use iopt::{FormatId, HeapTables, Interruption, Pending};
use runs::Span;

/// Model of one thread's own stretch, which no other thread changes.
#[derive(Default)]
struct Own {
    /// First address to length, offset in the memory, and whether it is released.
    areas: BTreeMap<u64, (u64, u64, bool)>,
}

/// Each thread has a stretch of its own, between those of two others in the same tables, and all have one
/// together, where every operation may be refused, but nothing else.
fn model(format: (FormatId, u8), flushing: Flushing) {
    const THREADS: u64 = 8;
    const STRETCH: u64 = MIB;
    let bench = Bench::new(format, 512);
    bench.space.set_flushing(flushing);
    let shared = AT + THREADS * STRETCH;
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let bench = &bench;
            scope.spawn(move || {
                let mut dice = Rng::with_seed(thread);
                let mut port = bench.software.port(DEVICE);
                let mut own = Own::default();
                let mine = AT + thread * STRETCH;
                for _ in 0..250 {
                    own.step(bench, mine, &mut dice);
                    own.check(bench, mine, &mut port, &mut dice);
                    together(bench, shared, &mut dice);
                }
                for (start, (len, ..)) in own.areas {
                    bench.unmap(start, len).unwrap();
                }
            });
        }
    });
    bench.space.unmap_all().unwrap();
    bench.space.flush().unwrap();
    bench.is_empty();
    bench.end();
}

impl Own {
    fn step(&mut self, bench: &Bench, mine: u64, dice: &mut Rng) {
        let refused = Interruption::Refused;
        let nth = dice.u64(..self.areas.len().max(1) as u64) as usize;
        let area = self
            .areas
            .iter()
            .nth(nth)
            .map(|(start, area)| (*start, *area));
        match (dice.u64(..6), area) {
            (0..3, _) | (_, None) => {
                let start = mine + dice.u64(..256) * PAGE;
                let len = (1 + dice.u64(..24)).min((mine + MIB - start) / PAGE) * PAGE;
                let offset = dice.u64(..7000) * PAGE;
                let before = self.areas.range(..start + len).next_back();
                let overlap = before.filter(|(at, (len, ..))| *at + len > start);
                let map = bench.map(start, offset, len);
                match overlap {
                    None => {
                        map.unwrap();
                        self.areas.insert(start, (len, offset, false));
                    }
                    Some(_) => assert!(matches!(map, Err(MapError::Overlap { .. })), "{map:?}"),
                }
            }
            (3, Some((start, (len, ..)))) => {
                bench.unmap(start, len).unwrap();
                self.areas.remove(&start);
            }
            (4, Some((start, (len, offset, false)))) => {
                let mut kept = |range, cause: ReleaseError| panic!("{range}: {cause}");
                let range = Span::new(start, len);
                bench.space.release(&[range], refused, &mut kept);
                self.areas.insert(start, (len, offset, true));
            }
            (_, Some((start, (len, offset, _)))) => {
                let mut failed = |range, cause: MapError| panic!("{range}: {cause}");
                let range = Span::new(start, len);
                bench.space.restore(&[range], refused, &mut failed);
                self.areas.insert(start, (len, offset, false));
            }
        }
    }

    /// The device sees what it is to see.
    fn check(
        &self,
        bench: &Bench,
        mine: u64,
        port: &mut iommu::Port<Arc<HeapTables>, Arc<Pages>>,
        dice: &mut Rng,
    ) {
        let strict = bench.space.retired() == 0;
        let page = mine + dice.u64(..256) * PAGE;
        let before = self.areas.range(..=page).next_back();
        let here = before.filter(|(at, (len, _, released))| *at + len > page && !released);
        let expected = here.map(|(at, (_, offset, _))| FRAME + offset + (page - at));
        assert_eq!(bench.space.translate(page), expected);
        let mut word = [0];
        match (port.read(page, &mut word), expected) {
            (Ok(()), Some(_)) => assert_eq!(Some(word[0]), expected),
            (Ok(()), None) => assert!(!strict || bench.space.retired() > 0, "{page:#x}"),
            (Err(_), None) => {}
            (Err(cause), Some(_)) => panic!("{page:#x}: {cause}"),
        }
    }
}

/// An operation where others are, too.
fn together(bench: &Bench, shared: u64, dice: &mut Rng) {
    let start = shared + dice.u64(..64) * PAGE;
    let range = Span::new(start, (1 + dice.u64(..32)) * PAGE);
    let refused = Interruption::Refused;
    match dice.u64(..5) {
        0 => match bench.map(start, dice.u64(..7000) * PAGE, range.len) {
            Ok(()) | Err(MapError::Overlap { .. }) => {}
            Err(cause) => panic!("{cause}"),
        },
        1 => match bench.space.unmap(range) {
            Ok(_) | Err(UnmapError::CutsArea { .. }) => {}
            Err(cause) => panic!("{cause}"),
        },
        2 => drop(bench.space.unmap_cutting(range, refused).unwrap()),
        3 => {
            let mut kept = |range, cause: ReleaseError| {
                let hole = matches!(cause, ReleaseError::Unmap(UnmapError::Hole { .. }));
                assert!(hole, "{range}: {cause}");
            };
            bench.space.release(&[range], refused, &mut kept);
            let mut failed = |range, cause: MapError| panic!("{range}: {cause}");
            bench.space.restore(&[range], refused, &mut failed);
        }
        _ => {
            let mut pending = Pending::new([0u64; 2], range, PAGE).unwrap();
            bench.space.harvest(&mut pending).unwrap();
        }
    }
}

#[test]
fn eight_threads_have_what_each_of_them_would_have_alone() {
    for format in FORMATS {
        model(format, Flushing::Strict);
        model(
            format,
            Flushing::Lazy {
                holds: 16,
                age: Duration::MAX,
                now: || Duration::ZERO,
            },
        );
    }
}
