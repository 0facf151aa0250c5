//! Both formats beside each other, by six patterns of a guest's pages: encoding from a driver's bitmap, or
//! from its runs, and on the device decoding, keeping what is memory, sorting and merging.
//!
//! `cargo bench -p dmaspace-virtio-balloon --bench formats`: a guest of 8 GiB; another size in MiB by
//! `DMASPACE_BENCH_MIB`, the rounds by `DMASPACE_BENCH_ROUNDS`. Without `--bench` (as `cargo test
//! --benches` runs it) one small round. All patterns and formats are measured in turns in each round;
//! figures are medians of the rounds, with the lower and upper quartile behind, of the thread's processor
//! time: others may use the machine meanwhile.
//!
//! The tables:
//!
//! - *formats*: ns for each page of 4 KiB, encoding and decoding, with bytes and messages of the whole.
//!   All messages lie behind one another in memory, so the time is not that of a clock;
//! - *all steps*, in ms, of bitmap records: building the bitmap page by page, blocks of 2 MiB in any
//!   order; encoding; copying out of the driver's buffer; decoding and merging; remembering parts of
//!   huge pages. Discarding is not among them (see the bench `discard` of `dmaspace-hostmem`);
//! - the first one as `docs/balloon-bulk.md` has it.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a bench that cannot begin stops"
)]

#[path = "../tests/wire/common/mod.rs"]
mod common;
mod measure;

use std::env;
use std::hint::black_box;
use std::ops::Range;

use common::patterns::{patterns, random};
use common::{ALL, Any};
use measure::{Samples, number, timed};
use runs::{GuestAddr, Span, bitmap};
use virtio_balloon::{
    GuestPage, MOST_MESSAGE_BYTES, MemoryMap, MessageSource, Part, PartialHugePages, Refusals,
    Region, Resolver, RunCollector, WIRE_PAGE,
};

const PAGE: GuestPage = GuestPage::SIZE_4K;
const HUGE: u64 = 2 << 20;
/// Runs that are merged at a time.
const ROOM: usize = 16 << 10;

const NAMES: [&str; 2] = ["le32 page numbers", "bitmap records"];

const STEPS: [&str; 6] = [
    "build",
    "encode",
    "copy",
    "decode, merge",
    "huge pages",
    "(build by runs)",
];

/// State shared by all measurements.
struct Bench {
    ram: [Region; 1],
    /// Room for all messages.
    messages: Vec<u8>,
    ends: Vec<usize>,
    room: Vec<Part>,
    /// The driver's bitmap.
    built: Vec<u64>,
    /// For the huge pages.
    memory: Vec<u64>,
}

impl Bench {
    fn new(bytes: u64) -> Self {
        Self {
            ram: [Region::new(Span::new(0, bytes))],
            messages: vec![0xaa; (bytes / WIRE_PAGE) as usize * 10 + MOST_MESSAGE_BYTES],
            ends: Vec::with_capacity((bytes / WIRE_PAGE) as usize / 64 + 1),
            room: vec![Part::default(); ROOM],
            built: vec![0; (bytes / WIRE_PAGE / 64) as usize],
            memory: vec![0; PartialHugePages::words(bytes, HUGE) as usize],
        }
    }

    /// Seconds to encode by these calls; the messages are left for [`decode`](Self::decode).
    fn encode(&mut self, format: Any, mut call: impl FnMut(&mut [u8]) -> usize) -> f64 {
        let (messages, ends) = (&mut self.messages, &mut self.ends);
        ends.clear();
        timed(|| {
            let mut at = 0;
            loop {
                let used = call(&mut messages[at..at + format.usual()]);
                if used == 0 {
                    break;
                }
                at += used;
                ends.push(at);
            }
        })
    }

    /// Seconds to decode all messages into so many runs.
    fn decode(&mut self, format: Any, expected: usize) -> f64 {
        let mut found = 0;
        let seconds = timed(|| {
            let mut resolver = Resolver::from(MemoryMap::new(&self.ram).unwrap());
            let mut collector = RunCollector::new(&mut self.room);
            let mut refusals = (Refusals::new(), Refusals::new());
            let mut count = |parts: &[Part]| {
                black_box(parts);
                found += parts.len();
            };
            let mut from = 0;
            for end in &self.ends {
                format.decode(&self.messages[from..*end], &mut refusals.0, |run| {
                    resolver.resolve(run, &mut refusals.1, |part| {
                        collector.push(part, &mut count)
                    });
                });
                from = *end;
            }
            collector.finish(&mut count);
            assert_eq!(refusals.0.total() + refusals.1.total(), 0);
        });
        // A run that goes over the end of a batch comes in two.
        assert!((expected..=expected + expected / ROOM + 1).contains(&found));
        seconds
    }

    /// Seconds of each step with bitmap records, from the pages' numbers on. The last one stands
    /// beside the first: building the bitmap by the runs of pages in each block.
    fn steps(&mut self, pages: &[u32], words: &[u64]) -> [f64; STEPS.len()] {
        let mut steps = [0.0; STEPS.len()];
        // A driver has its bitmap before it needs it.
        let built = &mut self.built;
        built.fill(0);
        steps[0] = timed(|| {
            for page in pages {
                bitmap::insert(built, u64::from(*page));
            }
        });
        assert_eq!(built, words);
        let runs = runs_of(pages);
        built.fill(0);
        steps[5] = timed(|| {
            for run in &runs {
                bitmap::set(built, run.clone());
            }
        });
        assert_eq!(built, words);
        let mut huge = PartialHugePages::new(self.ram[0].guest, HUGE, &mut self.memory).unwrap();
        let mut resolver = Resolver::from(MemoryMap::new(&self.ram).unwrap());
        let mut collector = RunCollector::new(&mut self.room);
        let mut refusals = (Refusals::new(), Refusals::new());
        let mut whole = 0;
        let mut tracked = 0.0;
        let mut track = |parts: &[Part]| {
            tracked += timed(|| {
                // The region begins at 0.
                let runs = parts
                    .iter()
                    .map(|part| self.ram[part.region].run(part.offsets));
                huge.inflate_all(runs, |run| whole += run.len);
            });
        };
        let mut source = MessageSource::new(PAGE.stretches(0, words), PAGE);
        let (sent, taken) = self.messages.split_at_mut(MOST_MESSAGE_BYTES);
        loop {
            let mut used = 0;
            steps[1] += timed(|| {
                used = Any::Bitmap.encode_bitmap(&mut source, sent).unwrap();
            });
            if used == 0 {
                break;
            }
            steps[2] += timed(|| taken[..used].copy_from_slice(&sent[..used]));
            steps[3] += timed(|| {
                Any::Bitmap.decode(&taken[..used], &mut refusals.0, |run| {
                    resolver.resolve(run, &mut refusals.1, |part| {
                        collector.push(part, &mut track)
                    });
                });
            });
        }
        steps[3] += timed(|| collector.finish(&mut track));
        assert_eq!(huge.bytes(), pages.len() as u64 * WIRE_PAGE);
        black_box(whole);
        // Batches are handed on from within.
        steps[3] -= tracked;
        steps[4] = tracked;
        steps
    }
}

/// The numbers of the pages, by blocks of 2 MiB in any order, as an allocator gives them.
fn numbers(words: &[u64]) -> Vec<u32> {
    let mut blocks: Vec<usize> = (0..words.len().div_ceil(8)).collect();
    let mut random = random();
    for nr in (1..blocks.len()).rev() {
        blocks.swap(nr, (random() % (nr as u64 + 1)) as usize);
    }
    let mut pages = Vec::new();
    for block in blocks {
        for page in block as u32 * 512..(block as u32 + 1) * 512 {
            if words[page as usize / 64] >> (page % 64) & 1 == 1 {
                pages.push(page);
            }
        }
    }
    pages
}

/// Page numbers that follow one another, within each block.
fn runs_of(pages: &[u32]) -> Vec<Range<u64>> {
    let follow = |a: &u32, b: &u32| a / 512 == b / 512 && a + 1 == *b;
    let runs = pages.chunk_by(follow);
    runs.map(|run| u64::from(run[0])..u64::from(run[0]) + run.len() as u64)
        .collect()
}

fn main() {
    let all = env::args().any(|argument| argument == "--bench");
    let mib = number("DMASPACE_BENCH_MIB", if all { 8 << 10 } else { 64 });
    let rounds = number("DMASPACE_BENCH_ROUNDS", if all { 15 } else { 1 }).max(1);
    let guest = (mib << 20) / WIRE_PAGE;

    let patterns = patterns(guest);
    let runs: Vec<Vec<Span<GuestAddr>>> = patterns
        .iter()
        .map(|(_, words)| PAGE.stretches(0, words).collect())
        .collect();
    let numbers: Vec<_> = patterns.iter().map(|(_, words)| numbers(words)).collect();
    let mut bench = Bench::new(mib << 20);
    let mut times = vec![vec![[const { Samples(Vec::new()) }; 3]; ALL.len()]; patterns.len()];
    let mut sizes = vec![vec![(0, 0); ALL.len()]; patterns.len()];
    let mut steps = vec![[const { Samples(Vec::new()) }; STEPS.len()]; patterns.len()];
    let mut sums = vec![Samples::default(); patterns.len()];
    for _ in 0..rounds {
        for (nr, (_, words)) in patterns.iter().enumerate() {
            let pages = numbers[nr].len() as f64;
            for (at, format) in ALL.into_iter().enumerate() {
                let mut source = MessageSource::new(runs[nr].iter().copied(), PAGE);
                let from_runs = bench.encode(format, |message| {
                    format.encode(&mut source, message).unwrap()
                });
                let mut source = MessageSource::new(PAGE.stretches(0, words), PAGE);
                let encode = bench.encode(format, |message| {
                    format.encode_bitmap(&mut source, message).unwrap()
                });
                let decode = bench.decode(format, runs[nr].len());
                sizes[nr][at] = (bench.ends.last().copied().unwrap_or(0), bench.ends.len());
                let seconds = [encode, decode, from_runs];
                for (samples, seconds) in times[nr][at].iter_mut().zip(seconds) {
                    samples.0.push(seconds * 1e9 / pages);
                }
            }
            let seconds = bench.steps(&numbers[nr], words);
            for (samples, seconds) in steps[nr].iter_mut().zip(seconds) {
                samples.0.push(seconds * 1e3);
            }
            sums[nr].0.push(seconds[..5].iter().sum::<f64>() * 1e3);
        }
    }

    println!("{mib} MiB, {rounds} rounds; medians (quartiles)");
    for (nr, (name, _)) in patterns.iter().enumerate() {
        println!("\n{name}: {} pages", numbers[nr].len());
        for (at, format) in NAMES.into_iter().enumerate() {
            let (bytes, messages) = sizes[nr][at];
            let [encode, decode, from_runs] = times[nr][at].each_ref().map(|ns| ns.show(3));
            println!(
                "  {format:18} encode {encode:>22} (from runs {from_runs:>22}) decode {decode:>22} ns a page, {bytes} bytes, {messages} messages",
            );
        }
        print!("  all steps {} ms:", sums[nr].show(2));
        for (step, samples) in STEPS.into_iter().zip(&steps[nr]) {
            print!(" {step} {}", samples.show(2));
        }
        println!();
    }

    println!("\n| pages | {} |", NAMES.join(" | "));
    println!("|---|{}", "---|".repeat(NAMES.len()));
    for (nr, (name, _)) in patterns.iter().enumerate() {
        let cells = times[nr]
            .iter()
            .map(|[encode, decode, _]| format!("{} / {}", short(encode), short(decode)));
        println!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
}

/// Two digits of a median, as far as they say something.
fn short(samples: &Samples) -> String {
    match samples.median() {
        ns if ns < 0.01 => "< 0.01".to_owned(),
        ns => format!("{ns:.2}"),
    }
}
