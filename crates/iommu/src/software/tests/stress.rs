//! Devices at work while pages and tables are taken away under them.

use std::sync::Barrier;
use std::sync::atomic::fence;
use std::thread;
use std::time::Instant;

use super::*;

/// Word that the processor writes into memory that no device may reach.
const OURS: u64 = 0x0bad_0bad_0bad_0bad;

/// Devices read and write pages at random while their owner takes pages away, flushes, and uses
/// the memory (and the table pages) for something else: no device may then read what is written
/// there, or write to it.
fn stress(config: SoftwareConfig, words_at_once: usize) {
    let time = Duration::from_millis(700);
    const PAGES: u64 = 8;
    let (unit, words, data) = unit_with(SoftwareConfig {
        flush_timeout: Duration::from_secs(600),
        ..config
    });
    unit.attach(DISK, D1, ROOT).unwrap();
    let leaf = |n: u64| (DATA + n * 0x1000) | RW;
    for n in 0..PAGES {
        words.set(0x3000 + n * 8, leaf(n));
    }
    // A page that only stale tables lead to.
    let trap = DATA + 0x10_0000;
    let fill = |pa: u64, value: u64| {
        let visit = &mut |cells: &[AtomicU64]| {
            cells
                .iter()
                .for_each(|cell| cell.store(value, Ordering::Relaxed));
        };
        data.with_cells(Span::new(pa, 0x1000), visit).unwrap();
    };
    let check = |pa: u64| {
        let visit = &mut |cells: &[AtomicU64]| {
            assert!(
                cells
                    .iter()
                    .all(|cell| cell.load(Ordering::Relaxed) == OURS),
                "{pa:#x}"
            );
        };
        data.with_cells(Span::new(pa, 0x1000), visit).unwrap();
    };
    for n in 0..PAGES {
        fill(DATA + n * 0x1000, 0);
    }
    fill(trap, OURS);

    let stop = AtomicBool::new(false);
    let started = Barrier::new(3);
    thread::scope(|scope| {
        let devices: Vec<_> = [NIC, DISK]
            .into_iter()
            .map(|device| {
                let mut port = unit.port(device);
                let (stop, started) = (&stop, &started);
                scope.spawn(move || {
                    started.wait();
                    let mut random = fastrand::Rng::with_seed(u64::from(device.0));
                    let mut buffer = vec![0; words_at_once];
                    let own = vec![u64::from(device.0); words_at_once];
                    let mut transfers = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        let iova = random.u64(..PAGES) * 0x1000;
                        if random.bool() {
                            if port.read(iova, &mut buffer).is_ok() {
                                assert!(buffer.iter().all(|word| *word != OURS), "{iova:#x}");
                                transfers += 1;
                            }
                        } else if port.write(iova, &own).is_ok() {
                            transfers += 1;
                        }
                    }
                    transfers
                })
            })
            .collect();

        started.wait();
        let stopping = Finally(&stop, true);
        let begun = Instant::now();
        let mut rounds = 0u64;
        let mut table = 0x3000;
        // Beside other work a round takes long: a port may lose its processor inside.
        while begun.elapsed() < time || (rounds < 40 && begun.elapsed() < 20 * time) {
            let n = rounds % PAGES;
            rounds += 1;
            if !rounds.is_multiple_of(4) {
                // One page goes, by its leaf.
                words.set(table + n * 8, 0);
                unit.invalidate_ranges(D1, &page(n * 0x1000), 1, false)
                    .unwrap();
                fill(DATA + n * 0x1000, OURS);
                thread::yield_now();
                check(DATA + n * 0x1000);
                fill(DATA + n * 0x1000, 0);
                fence(Ordering::Release);
                words.set(table + n * 8, leaf(n));
            } else {
                // The table goes, and becomes something else: every entry leads to the trap.
                let next = if table == 0x3000 { 0x8000 } else { 0x3000 };
                for n in 0..PAGES {
                    words.set(next + n * 8, leaf(n));
                }
                words.set(0x2000, next | RW);
                unit.invalidate_ranges(D1, &[Span::new(0, 2 << 20)], 1, true)
                    .unwrap();
                for n in 0..PAGES {
                    words.set(table + n * 8, trap | RW);
                }
                table = next;
            }
        }
        drop(stopping);
        check(trap);
        let transfers: u64 = devices
            .into_iter()
            .map(|device| device.join().unwrap())
            .sum();
        check(trap);
        let counted = unit.counters();
        // Otherwise nothing was tested. How much depends on what else the machine does.
        assert!(
            rounds >= 8 && transfers > 0 && counted.iotlb_hits > 0,
            "{rounds} {transfers}"
        );
    });
}

#[test]
fn no_access_reaches_a_page_or_a_table_after_its_flush() {
    stress(SoftwareConfig::default(), 512);
}

#[test]
fn no_access_reaches_a_page_or_a_table_after_its_flush_with_tiny_caches_and_accesses() {
    let tiny = CacheShape { sets: 2, ways: 2 };
    stress(
        SoftwareConfig {
            iotlb: tiny,
            upper: tiny,
            ..SoftwareConfig::default()
        },
        1,
    );
}
