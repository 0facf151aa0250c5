//! Giving memory back, by what backs it and how it is scattered: 7 GiB, or four fifths of what is there.
//!
//! `cargo bench -p dmaspace-hostmem --bench discard`; another size in MiB by `DMASPACE_BENCH_MIB`, other
//! rounds than three by `DMASPACE_BENCH_ROUNDS`. Without `--bench` (as `cargo test --benches` runs it) one
//! small round. As root the pool of huge pages is raised for the time of the run.
//!
//! All in one run, one round of each after the other, of memory that is there; nanoseconds by page of
//! 4 KiB, medians with the least and the most:
//!
//! - *discard*: [`Discard::discard`];
//! - *counted*: [`Discard::discard_counted`];
//! - *by run*: a system call for each run;
//! - *by page*: a system call for each page of what backs the memory, as devices that take page numbers do.
//!
//! Everything twice: alone, and with a second thread of the process busy on another processor, as a
//! running guest is.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::error::Error;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hostmem::{Backing, Discard, DiscardRefusal, Discarded, Freed, Machine, Mapping, RaisedPool};
use runs::{Offset, Span};

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;

const BACKINGS: [Backing; 4] = [
    Backing::Anon4K,
    Backing::Thp,
    Backing::Memfd,
    Backing::Hugetlb2M,
];

const WAYS: [&str; 4] = ["discard", "counted", "by run", "by page"];

/// Patterns of pages of `page` bytes to discard, as runs.
fn patterns(len: u64, page: u64) -> Vec<(&'static str, Vec<Span<Offset>>)> {
    let units = |unit: u64, chosen: &mut dyn FnMut(u64) -> bool| {
        let mut runs: Vec<Span<Offset>> = Vec::new();
        for n in (0..len / unit).filter(|n| chosen(*n)) {
            match runs.last_mut() {
                Some(last) if last.start + last.len == n * unit => last.len += unit,
                _ => runs.push(Span::new(n * unit, unit)),
            }
        }
        runs
    };
    let mut random = fastrand::Rng::with_seed(1);
    let mut half = |_| random.bool();
    let mut all = vec![
        ("one run", vec![Span::new(0, len)]),
        ("2M, every second", units(HUGE, &mut |n| n % 2 == 0)),
        ("2M, random half", units(HUGE, &mut half)),
    ];
    if page < HUGE {
        all.extend([
            ("every second page", units(page, &mut |n| n % 2 == 0)),
            ("random half", units(page, &mut half)),
            ("runs of 16", units(page, &mut |n| n / 16 % 2 == 0)),
        ]);
    }
    all
}

/// Discards a part by the plain system call.
fn call(mapping: &Mapping, file: Option<BorrowedFd<'_>>, part: Span<Offset>) {
    let result = match file {
        // SAFETY: works on the file alone.
        Some(file) => unsafe {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            libc::fallocate(file.as_raw_fd(), mode, part.start as i64, part.len as i64)
        },
        // SAFETY: a part of the mapping, which is accessed through atomic cells only.
        None => unsafe {
            let at = (mapping.address() + part.start) as *mut libc::c_void;
            libc::madvise(at, part.len as usize, libc::MADV_DONTNEED)
        },
    };
    assert_eq!(result, 0);
}

/// Memory that is there.
fn memory(backing: Backing, len: u64) -> Result<Arc<Mapping>, Box<dyn Error>> {
    let mapping = Mapping::new(backing, len, None)?;
    mapping.populate(&mut |_| ControlFlow::Continue(()))?;
    Ok(Arc::new(mapping))
}

struct Row {
    taken: [Vec<Duration>; WAYS.len()],
    done: Discarded,
    freed: Option<Freed>,
}

fn kept(part: Span<Offset>, why: DiscardRefusal) {
    println!("{part} is kept: {why}");
}

/// One round of all ways. A huge page that was discarded in parts comes back as small ones, so memory is
/// made anew for each.
fn round(
    backing: Backing,
    len: u64,
    runs: &[Span<Offset>],
    row: &mut Row,
) -> Result<(), Box<dyn Error>> {
    for (way, taken) in row.taken.iter_mut().enumerate() {
        let mapping = memory(backing, len)?;
        let discard = Discard::new(mapping.clone())?;
        let begin = Instant::now();
        match way {
            0 => row.done = discard.discard(runs, &mut kept)?,
            1 => row.freed = discard.discard_counted(runs, &mut kept)?.1.ok(),
            2 => runs
                .iter()
                .for_each(|run| call(&mapping, mapping.fd(), *run)),
            _ => {
                for run in runs {
                    for at in (run.start..run.start + run.len).step_by(discard.page() as usize) {
                        call(&mapping, mapping.fd(), Span::new(at, discard.page()));
                    }
                }
            }
        }
        taken.push(begin.elapsed());
    }
    Ok(())
}

fn of_memory(backing: Backing, len: u64, rounds: usize) -> Result<(), Box<dyn Error>> {
    let mut len = len / HUGE * HUGE;
    let _pool = loop {
        if len == 0 {
            return Err("not one page fits".into());
        }
        match backing.huge_size().map(|size| RaisedPool::raise(size, len)) {
            // Memory is in pieces: half of it may be had.
            Some(Err(_)) if len > HUGE => len = len / 2 / HUGE * HUGE,
            pool => break pool.transpose()?,
        }
    };
    println!(
        "\n{} MiB of {backing}, {rounds} rounds: ns for each 4 KiB",
        len >> 20
    );
    print!("{:<19}", "");
    WAYS.iter().for_each(|way| print!("{way:>24}"));
    println!("{:>10}{:>9}{:>8}", "ms", "calls", "freed");
    for (name, runs) in patterns(len, backing.page()) {
        let mut row = Row {
            taken: Default::default(),
            done: Discarded::default(),
            freed: None,
        };
        for _ in 0..rounds {
            round(backing, len, &runs, &mut row)?;
        }
        let pages = runs.iter().map(|run| run.len).sum::<u64>() / PAGE;
        print!("{name:<19}");
        for list in &mut row.taken {
            list.sort_unstable();
            let ns = |time: &Duration| time.as_nanos() as f64 / pages as f64;
            let middle = ns(&list[list.len() / 2]);
            let range = format!("{:.1} to {:.1}", ns(&list[0]), ns(&list[list.len() - 1]));
            print!("{middle:>8.1} {range:>15}");
        }
        let ms = row.taken[0][row.taken[0].len() / 2].as_nanos() as f64 / 1e6;
        let freed = row.freed.map_or("?".into(), |freed| {
            let share = 100.0 * freed.bytes as f64 / (pages * PAGE) as f64;
            format!("{share:.0}%")
        });
        println!("{ms:>10.2}{:>9}{freed:>8}", row.done.calls);
    }
    Ok(())
}

fn main() {
    let bench = std::env::args().any(|argument| argument == "--bench");
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let available = Machine::probe().map_or(0, |machine| machine.available);
    let (len, rounds) = if bench {
        let len = number("DMASPACE_BENCH_MIB").map_or(7 << 30, |mib| mib << 20);
        (
            len,
            number("DMASPACE_BENCH_ROUNDS").map_or(3, |rounds| rounds.max(1) as usize),
        )
    } else {
        (16 << 20, 1)
    };
    // A fifth stays for everybody else.
    let len = len.min(available / 5 * 4);
    for busy in [false, true] {
        println!(
            "\n== {} ==",
            if busy {
                "beside a busy thread"
            } else {
                "alone"
            }
        );
        let stop = AtomicBool::new(!busy);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            for backing in BACKINGS {
                if let Err(error) = of_memory(backing, len, rounds) {
                    println!("\n{backing}: not run: {error}");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
