//! The map of areas beside `std`'s `BTreeMap`, which would hold the same by first address.
//!
//! Both do the same in the same order, in turns, a round each; what is printed is the median of
//! the rounds in nanoseconds for one operation, and their ratio. A round is the median of batches
//! of 256; only filling and emptying, in which each batch is another case, is measured whole. `cargo bench -p dmaspace-ioas
//! --bench intervals`; without `--bench` (as `cargo test --benches` runs it) one small round.
//!
//! An insertion into a map of areas has to see that the place is free. `BTreeMap` needs a search of
//! its own for that; "insert, unchecked" leaves it out (there only: the other one always looks).
//!
//! # What it costs, and of what that consists
//!
//! November 2026, two processors of a virtual machine that builds kept busy, medians of 31 rounds with
//! 65,535 areas, ns (`BTreeMap` in brackets): look up 60 (100), insert where the place is known to be free
//! 84 (107), with the search for what is in the way 110 (205), remove 100 (122). Before bounds on gaps
//! took the place of exact numbers, and the rest of an entry came to one place, it was 58, 182, 207 and
//! 135 beside the same `BTreeMap`. By callgrind, with the areas and guests of here: insert 1,718
//! instructions then, 553 now; remove 1,024 and 611; look up 227 and 233.
//!
//! A look up is the floor of both, and most of them: three nodes one after the other, of which the last
//! is seldom in the first cache, and the value. An insertion moves 24 entries behind it on average.
//! Nodes of 16, 32, 48, 96 and 128 entries were tried: each was slower in every row but filling.

#![allow(clippy::unwrap_used, reason = "a bench that cannot begin stops")]

extern crate alloc;

#[path = "../src/intervals/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    reason = "the crate's own module, not all of which is measured"
)]
mod intervals;

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use intervals::Intervals;
use runs::{Iova, Span};

const PAGE: u64 = 4096;

/// What is measured, by either.
trait Areas: Default {
    fn insert(&mut self, span: Span<Iova>, value: u32);
    /// The same where it is known that the place is free.
    fn insert_unchecked(&mut self, span: Span<Iova>, value: u32);
    fn at(&self, address: u64) -> Option<u32>;
    fn remove(&mut self, start: u64);
}

#[derive(Default)]
struct Tree(Intervals<Iova, u32>);

impl Areas for Tree {
    fn insert(&mut self, span: Span<Iova>, value: u32) {
        self.0.insert(span, value).unwrap();
    }

    fn insert_unchecked(&mut self, span: Span<Iova>, value: u32) {
        self.insert(span, value);
    }

    fn at(&self, address: u64) -> Option<u32> {
        self.0.at(address).map(|(_, &value)| value)
    }

    fn remove(&mut self, start: u64) {
        self.0.remove(start).unwrap();
    }
}

/// By start: length and value.
#[derive(Default)]
struct Plain(BTreeMap<u64, (u64, u32)>);

impl Areas for Plain {
    fn insert(&mut self, span: Span<Iova>, value: u32) {
        // The last one that begins in the span or before is the only one to look at.
        let before = self.0.range(..=span.last()).next_back();
        let free = before
            .is_none_or(|(&start, &(len, _))| Span::<Iova>::new(start, len).last() < span.start);
        assert!(free);
        self.insert_unchecked(span, value);
    }

    fn insert_unchecked(&mut self, span: Span<Iova>, value: u32) {
        self.0.insert(span.start, (span.len, value));
    }

    fn at(&self, address: u64) -> Option<u32> {
        let (&start, &(len, value)) = self.0.range(..=address).next_back()?;
        (address - start < len).then_some(value)
    }

    fn remove(&mut self, start: u64) {
        self.0.remove(&start).unwrap();
    }
}

/// One round's work. Every order is another one, so that nothing remembers the last.
struct Work {
    /// Areas that are there, and those that come and go.
    base: Vec<Span<Iova>>,
    guests: Vec<Span<Iova>>,
    look: Vec<u64>,
    leave: Vec<u64>,
    drain: Vec<u64>,
}

impl Work {
    /// Areas of 1 to 16 pages, with 0 to 3 pages between two; a guest for 16 of them.
    fn new(count: usize, random: &mut fastrand::Rng) -> Self {
        let guests = count / 16;
        let mut next = 1 << 20;
        let mut spans: Vec<Span<Iova>> = (0..count + guests)
            .map(|_| {
                let start = next + random.u64(..4) * PAGE;
                let span = Span::new(start, (1 + random.u64(..16)) * PAGE);
                next = start + span.len;
                span
            })
            .collect();
        random.shuffle(&mut spans);
        let guests = spans.split_off(count);
        let mut look: Vec<u64> = spans
            .iter()
            .map(|span| span.start + random.u64(..span.len))
            .collect();
        random.shuffle(&mut look);
        let starts = |spans: &[Span<Iova>], random: &mut fastrand::Rng| {
            let mut starts: Vec<u64> = spans.iter().map(|span| span.start).collect();
            random.shuffle(&mut starts);
            starts
        };
        Self {
            look,
            leave: starts(&guests, random),
            drain: starts(&spans, random),
            base: spans,
            guests,
        }
    }

    /// Nanoseconds an operation, in the order of [`ROWS`].
    fn run<A: Areas>(&self) -> [f64; ROWS.len()] {
        let mut areas = A::default();
        let fill = whole(&self.base, |n, &span| areas.insert(span, n as u32));
        let look = timed(&self.look, |_, &address| {
            black_box(areas.at(address)).unwrap();
        });
        let insert = timed(&self.guests, |n, &span| areas.insert(span, n as u32));
        let remove = timed(&self.leave, |_, &start| areas.remove(start));
        let unchecked = timed(&self.guests, |n, &span| {
            areas.insert_unchecked(span, n as u32)
        });
        for &start in &self.leave {
            areas.remove(start);
        }
        let drain = whole(&self.drain, |_, &start| areas.remove(start));
        [look, insert, unchecked, remove, fill, drain]
    }
}

const ROWS: [&str; 6] = [
    "look up",
    "insert",
    "insert, unchecked",
    "remove",
    "fill from empty",
    "remove all",
];

/// Nanoseconds for one of the list: the mean of all.
fn whole<T>(list: &[T], mut f: impl FnMut(usize, &T)) -> f64 {
    let begin = Instant::now();
    for (n, item) in list.iter().enumerate() {
        f(n, item);
    }
    begin.elapsed().as_nanos() as f64 / list.len() as f64
}

/// The same as the median of batches, so that it does not count when somebody else is let run.
fn timed<T>(list: &[T], mut f: impl FnMut(usize, &T)) -> f64 {
    let batches = list.chunks(256);
    median(batches.map(|batch| whole(batch, &mut f)).collect())
}

fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

fn beside(count: usize, rounds: usize) {
    let mut random = fastrand::Rng::with_seed(1);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let work = Work::new(count, &mut random);
        if round % 2 == 0 {
            ours.push(work.run::<Tree>());
            theirs.push(work.run::<Plain>());
        } else {
            theirs.push(work.run::<Plain>());
            ours.push(work.run::<Tree>());
        }
    }
    println!("{count} areas, {rounds} rounds, ns each");
    println!(
        "{:<20}{:>10}{:>10}{:>8}",
        "", "Intervals", "BTreeMap", "ratio"
    );
    for (row, name) in ROWS.iter().enumerate() {
        let of = |rounds: &[[f64; ROWS.len()]]| median(rounds.iter().map(|r| r[row]).collect());
        let (ours, theirs) = (of(&ours), of(&theirs));
        println!("{name:<20}{ours:>10.1}{theirs:>10.1}{:>8.2}", theirs / ours);
    }
}

/// Areas come and go: room is looked for, taken, and given back by another one.
fn gaps(count: usize, rounds: usize) {
    let mut random = fastrand::Rng::with_seed(1);
    let work = Work::new(count, &mut random);
    let mut areas = Intervals::<Iova, u32>::new();
    for &span in &work.base {
        areas.insert(span, 0).unwrap();
    }
    // What guests leave free; and between 64 windows there is a page that may not be used.
    let end = work.base.iter().map(Span::last).max().unwrap();
    let width = (end / 64) & !(PAGE - 1);
    let windows: Vec<Span<Iova>> = (0..64)
        .map(|n| Span::new((1 << 20) + n * width, width - PAGE))
        .collect();
    println!(
        "{count} areas, {} windows, {rounds} rounds, ns each",
        windows.len()
    );
    for (pages, align) in [(1, 1), (8, 1), (8, 8), (16, 16)] {
        let (mut find, mut take, mut give) = (Vec::new(), Vec::new(), Vec::new());
        let (len, align) = (pages * PAGE, align * PAGE);
        let mut found = 0;
        for _ in 0..rounds {
            let mut taken = Vec::new();
            let wishes = [(); 256];
            find.push(timed(&wishes, |_, ()| {
                black_box(areas.gap(len, align, black_box(&windows)));
            }));
            take.push(timed(&wishes, |n, ()| {
                if let Some(start) = areas.gap(len, align, &windows) {
                    areas.insert(Span::new(start, len), n as u32).unwrap();
                    taken.push(start);
                }
            }));
            random.shuffle(&mut taken);
            found = taken.len();
            give.push(timed(&taken, |_, &start| {
                areas.remove(start);
            }));
        }
        println!(
            "{pages:>3} pages, aligned to {:>2}: find {:.1}, find and insert {:.1}, remove {:.1} ({found} of 256 found)",
            align / PAGE,
            median(find),
            median(take),
            median(give),
        );
    }
}

/// The worst for the search: every gap is long enough, and in none is an aligned place.
fn in_vain(count: u64) {
    let mut areas = Intervals::<Iova, u32>::new();
    for n in 0..count {
        // A page at every multiple of 4: the gaps have 3 pages, none of them starts at one.
        areas.insert(Span::new(n * 4 * PAGE, PAGE), 0).unwrap();
    }
    let windows = [Span::new(PAGE, count * 4 * PAGE - PAGE)];
    let one = whole(&[(); 5], |_, ()| {
        assert_eq!(areas.gap(2 * PAGE, 4 * PAGE, black_box(&windows)), None);
    });
    println!("{count} gaps that are long enough but never aligned: {one:.0} ns");
}

fn main() {
    if std::env::args().any(|argument| argument == "--bench") {
        beside(65_535, 31);
        beside(1_000_000, 5);
        gaps(65_535, 31);
        gaps(1_000_000, 31);
        in_vain(1_000_000);
    } else {
        beside(1000, 1);
        gaps(1000, 1);
        in_vain(1000);
    }
}
