//! Bringing memory in, by what backs it: two regions, 2 GiB together, or four fifths of what is there.
//!
//! `cargo bench -p dmaspace-hostmem --bench populate`; another size in MiB by `DMASPACE_BENCH_MIB`, other
//! rounds than seven by `DMASPACE_BENCH_ROUNDS`. Without `--bench` (as `cargo test --benches` runs it) one
//! small round. As root the pool of huge pages is raised for the time of the run.
//!
//! All in one run, a round of each after the other, the first one not counted; medians with the least and
//! the most of GiB in a second of processor time of this process, so that others on the machine disturb
//! less, and of the clock:
//!
//! - *population*: a [`Population`] of both regions;
//! - *one thread*: `MADV_POPULATE_WRITE` of each region, by this thread;
//! - *equal parts*: the same by as many threads as there are processors, each with an equal part of a
//!   region, region after region, as monitors with a number of threads do;
//! - *a byte a page*: as many threads write a byte to each page of their parts;
//! - *again*: a new [`Population`] of memory that is there already, which looks at each page.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::error::Error;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use hostmem::{Backing, Machine, Mapping, Population, RaisedPool};
use runs::{Offset, Span};

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;

const BACKINGS: [Backing; 4] = [
    Backing::Anon4K,
    Backing::Thp,
    Backing::Memfd,
    Backing::Hugetlb2M,
];

const WAYS: [&str; 5] = [
    "population",
    "one thread",
    "equal parts",
    "a byte a page",
    "again",
];

/// Bytes of a region that one of `threads` brings in, in whole huge pages but for the last one.
fn parts(mapping: &Mapping, threads: u64) -> Vec<Span<Offset>> {
    let each = (mapping.len() / threads).next_multiple_of(HUGE);
    let starts = (0..mapping.len()).step_by(each as usize);
    starts
        .map(|start| Span::new(start, each.min(mapping.len() - start)))
        .collect()
}

/// Brings in a part by the plain system call.
fn call(mapping: &Mapping, part: Span<Offset>) {
    let at = (mapping.address() + part.start) as *mut libc::c_void;
    // SAFETY: a part of the mapping, of which no byte changes.
    let result = unsafe { libc::madvise(at, part.len as usize, libc::MADV_POPULATE_WRITE) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Writes to each page of the backing.
fn touch(mapping: &Mapping, part: Span<Offset>) {
    let page = mapping.backing().largest_page().max(PAGE);
    let cells = &mapping.cells()[(part.start / 8) as usize..((part.start + part.len) / 8) as usize];
    for cell in cells.iter().step_by((page / 8) as usize) {
        cell.store(0, Ordering::Relaxed);
    }
}

fn by_threads(mappings: &[Mapping], threads: u64, work: fn(&Mapping, Span<Offset>)) {
    for mapping in mappings {
        thread::scope(|scope| {
            for part in parts(mapping, threads) {
                scope.spawn(move || work(mapping, part));
            }
        });
    }
}

fn population(mappings: &[Mapping]) -> Result<(), Box<dyn Error>> {
    Ok(Population::new(mappings).run(&mut |_| ControlFlow::Continue(()))?)
}

/// Seconds of processor time of this process.
fn processor() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel fills the structure that it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Bytes in a second: of the processors, and of the clock.
type Rates = (Vec<f64>, Vec<f64>);

fn round(backing: Backing, len: u64, rates: &mut [Rates]) -> Result<(), Box<dyn Error>> {
    let threads = thread::available_parallelism()?.get() as u64;
    for (way, (of_processors, of_clock)) in rates.iter_mut().enumerate() {
        let mappings = [
            Mapping::new(backing, len / 2, None)?,
            Mapping::new(backing, len / 2, None)?,
        ];
        if way == 4 {
            population(&mappings)?;
        }
        let (begin, used) = (Instant::now(), processor());
        match way {
            0 | 4 => population(&mappings)?,
            1 => by_threads(&mappings, 1, call),
            2 => by_threads(&mappings, threads, call),
            _ => by_threads(&mappings, threads, touch),
        }
        let gib = len as f64 / f64::from(1 << 30);
        of_processors.push(gib / (processor() - used));
        of_clock.push(gib / begin.elapsed().as_secs_f64());
        for mapping in &mappings {
            let folios = mapping.folios()?;
            assert_eq!(folios.absent, 0);
            if backing == Backing::Thp && folios.small > 0 {
                println!("{}: {:.1} % huge", WAYS[way], 100.0 * folios.huge_share());
            }
        }
    }
    Ok(())
}

fn print(list: &mut [f64]) {
    list.sort_by(f64::total_cmp);
    let range = format!("{:.2} to {:.2}", list[0], list[list.len() - 1]);
    print!("{:>12.2} {range:>16}", list[list.len() / 2]);
}

fn of_memory(backing: Backing, len: u64, rounds: usize) -> Result<(), Box<dyn Error>> {
    let mut len = len / (2 * HUGE) * 2 * HUGE;
    let _pool = loop {
        if len == 0 {
            return Err("not two huge pages fit".into());
        }
        match backing.huge_size().map(|size| RaisedPool::raise(size, len)) {
            // Memory is in pieces: half of it may be had.
            Some(Err(_)) if len > 2 * HUGE => len = len / 2 / (2 * HUGE) * 2 * HUGE,
            pool => break pool.transpose()?,
        }
    };
    println!("\n{} MiB of {backing}, {rounds} rounds", len >> 20);
    println!(
        "{:<14}{:>29}{:>29}",
        "", "GiB/s a processor", "GiB/s by the clock"
    );
    // Pages that a hypervisor has not backed yet take longer.
    round(backing, len, &mut vec![Rates::default(); WAYS.len()])?;
    let mut rates = vec![Rates::default(); WAYS.len()];
    for _ in 0..rounds {
        round(backing, len, &mut rates)?;
    }
    for (name, (of_processors, of_clock)) in WAYS.iter().zip(&mut rates) {
        print!("{name:<14}");
        print(of_processors);
        print(of_clock);
        println!();
    }
    Ok(())
}

fn main() {
    let bench = std::env::args().any(|argument| argument == "--bench");
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let available = Machine::probe().map_or(0, |machine| machine.available);
    let (len, rounds) = if bench {
        let len = number("DMASPACE_BENCH_MIB").map_or(2 << 30, |mib| mib << 20);
        let rounds = number("DMASPACE_BENCH_ROUNDS").map_or(7, |rounds| rounds.max(1) as usize);
        (len, rounds)
    } else {
        (16 << 20, 1)
    };
    // A fifth stays for everybody else.
    let len = len.min(available / 5 * 4);
    for backing in BACKINGS {
        if let Err(error) = of_memory(backing, len, rounds) {
            println!("\n{backing}: not run: {error}");
        }
    }
}
