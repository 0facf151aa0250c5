//! Bitmaps of dirty pages to runs: 384 MiB, a bit for each 4 KiB of 12 TiB.
//!
//! `cargo bench -p dmaspace-runs --bench dirty`; another size in MiB by `DMASPACE_BENCH_MIB`, other rounds than nine
//! by `DMASPACE_BENCH_ROUNDS`. Without `--bench` (as `cargo test --benches` runs it) one small round. At 5 % of
//! random bits the buffer for runs is 2.3 GiB.
//!
//! All in one run, one round of each after the other; milliseconds, medians with the least and the most, and the
//! median of their quotients by the longer of *read* and *write* of the same round:
//!
//! - *read*: the sum of all words;
//! - *write*: as many ranges to memory that is there;
//! - *both*: words read and as many ranges written, evenly mixed, no bit looked at;
//! - *bits*: a loop over set bits, which goes on with a range or begins one: what monitors do;
//! - *fill*: [`Runs::fill`](runs::bitmap::Runs::fill) to the same memory, and *batch* to 1,024 ranges again and again;
//! - *fold*: `for_each`, which adds up the lengths; *next*: the same by a loop over `next`;
//! - *joined*: `for_each` of runs joined across 8 bits;
//! - *two*: *fill* by two threads, a span each, from their start to their end.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

use std::hint::black_box;
use std::ops::Range;
use std::thread;
use std::time::Instant;

use runs::bitmap::{joined, runs, set, spans};

/// Share of set bits, and bits set together.
const SHAPES: [(f64, u64); 7] = [
    (0.0, 1),
    (0.001, 1),
    (0.01, 1),
    (0.05, 1),
    (0.001, 512),
    (0.01, 512),
    (0.05, 512),
];

const ROWS: [&str; 10] = [
    "read", "write", "both", "bits", "fill", "batch", "fold", "next", "joined", "two",
];

/// A bitmap with about this share of bits set, `run` together, at multiples of `run`.
fn bitmap(words: &mut [u64], share: f64, run: u64) {
    words.fill(0);
    let places = words.len() as u64 * 64 / run;
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..(places as f64 * share) as u64 {
        let first = random.u64(0..places) * run;
        set(words, first..first + run);
    }
}

fn sum(words: &[u64]) -> u64 {
    words
        .iter()
        .fold(0, |sum: u64, word| sum.wrapping_add(*word))
}

fn write(out: &mut [Range<u64>]) -> u64 {
    for (nth, run) in (0..).zip(out.iter_mut()) {
        *run = nth..nth + 1;
    }
    out.len() as u64
}

fn read_and_write(words: &[u64], out: &mut [Range<u64>]) -> u64 {
    let pieces = words.len().div_ceil(512).max(1);
    let per_piece = out.len().div_ceil(pieces).max(1);
    let mut out = out.chunks_mut(per_piece);
    let read = words.chunks(512).map(|words| {
        let piece = out.next();
        sum(words).wrapping_add(piece.map_or(0, write))
    });
    read.fold(0, u64::wrapping_add)
}

/// Returns how many runs there are.
fn bits(words: &[u64], out: &mut [Range<u64>]) -> usize {
    let mut n = 0;
    for (word, base) in words.iter().zip((0..).step_by(64)) {
        let mut word = *word;
        while word != 0 {
            let bit = base + u64::from(word.trailing_zeros());
            word &= word - 1;
            if n > 0 && out[n - 1].end == bit {
                out[n - 1].end += 1;
            } else {
                out[n] = bit..bit + 1;
                n += 1;
            }
        }
    }
    n
}

fn batches(words: &[u64], batch: &mut [Range<u64>]) -> usize {
    let (mut runs, mut n) = (runs(words), 0);
    loop {
        let filled = runs.fill(batch);
        black_box(&mut *batch);
        n += filled;
        if filled < batch.len() {
            return n;
        }
    }
}

/// Returns how many runs the threads have found, each in its half of `out`.
fn two(words: &[u64], out: &mut [Range<u64>]) -> usize {
    let half = out.len() / 2;
    thread::scope(|scope| {
        let parts = spans(words, 2).zip(out.chunks_mut(half));
        let threads = parts.map(|(mut runs, out)| scope.spawn(move || runs.fill(out)));
        let threads: Vec<_> = threads.collect();
        let found = threads.into_iter().map(|thread| thread.join().unwrap());
        found.sum()
    })
}

fn pages(runs: impl Iterator<Item = Range<u64>>) -> u64 {
    let mut pages = 0;
    runs.for_each(|run| pages += run.end - run.start);
    pages
}

fn main() {
    let bench = std::env::args().any(|argument| argument == "--bench");
    let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let (mib, rounds) = match bench {
        true => (
            number("DMASPACE_BENCH_MIB").unwrap_or(384).max(1),
            number("DMASPACE_BENCH_ROUNDS").unwrap_or(9).max(1),
        ),
        false => (1, 1),
    };
    let mut words = vec![0; mib << 17];
    // Five of a hundred bits are at most as many runs.
    let mut out = vec![1..2; words.len() * 64 / 20 + 64];
    let mut batch = vec![0..0; 1024];
    println!("{mib} MiB, {rounds} rounds: ms");
    print!("{:<14}{:>12}", "", "runs");
    ROWS.iter().for_each(|row| print!("{row:>29}"));
    println!();
    for (share, run) in SHAPES {
        bitmap(&mut words, share, run);
        let words = &words[..];
        let n = bits(words, &mut out);
        let expected = out[..n].to_vec();
        let set = pages(expected.iter().cloned());
        assert_eq!(runs(words).fill(&mut out), n);
        assert!(out[..n] == expected);
        let mut taken = [const { Vec::new() }; ROWS.len()];
        for _ in 0..rounds {
            for (row, taken) in taken.iter_mut().enumerate() {
                let begun = Instant::now();
                let found = match row {
                    0 => sum(words),
                    1 => write(&mut out[..n]),
                    2 => read_and_write(words, &mut out[..n]),
                    3 => bits(words, &mut out) as u64,
                    4 => runs(words).fill(&mut out) as u64,
                    5 => batches(words, &mut batch) as u64,
                    6 => pages(runs(words)),
                    7 => {
                        let mut pages = 0;
                        for run in runs(words) {
                            pages += run.end - run.start;
                        }
                        pages
                    }
                    8 => pages(joined(runs(words), 8)),
                    _ => two(words, &mut out) as u64,
                };
                taken.push(begun.elapsed().as_secs_f64() * 1e3);
                match row {
                    0 | 2 => drop(black_box(found)),
                    6 | 7 => assert_eq!(found, set),
                    8 => assert!(found >= set),
                    // A run across the border is two.
                    9 => assert!((n as u64..=n as u64 + 1).contains(&found)),
                    _ => assert_eq!(found, n as u64),
                }
                black_box(&mut out);
            }
        }
        let shape = match run {
            1 => "random",
            _ => "runs of 512",
        };
        print!("{:<14}{n:>12}", format!("{} % {shape}", share * 100.0));
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let least: Vec<f64> = taken[0]
            .iter()
            .zip(&taken[1])
            .map(|(read, write)| read.max(*write))
            .collect();
        for mut taken in taken {
            let mut quotients = taken
                .iter()
                .zip(&least)
                .map(|(time, least)| time / least)
                .collect();
            let quotient = median(&mut quotients);
            let middle = median(&mut taken);
            let (first, last) = (taken[0], taken[taken.len() - 1]);
            let cell = format!("{middle:.1} ({first:.1}–{last:.1}) ×{quotient:.2}");
            print!("{cell:>29}");
        }
        println!();
    }
}
