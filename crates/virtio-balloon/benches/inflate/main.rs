//! Inflating, stage by stage: the driver on one thread, the device on another, rings and messages in
//! memory that both see, and real memory that goes back to the machine.
//!
//! `cargo bench -p dmaspace-virtio-balloon --features device --bench inflate`: 7 of 8 GiB; another size of
//! the guest in MiB by `DMASPACE_BENCH_MIB`, the rounds by `DMASPACE_BENCH_ROUNDS`. Without `--bench` (as
//! `cargo test --benches` runs it) one small round. As root pools of huge pages are raised for the time
//! of the run; what cannot be had is named as not run.
//!
//! The ways, in turns in each round, on the same memory, touched anew before each:
//!
//! - *page by page*, as Linux and QEMU do: 256 pages are taken and named in a message, one in flight;
//!   the host looks each of them up and discards it by a call of its own (in pages of a pool, a huge page
//!   when all of it has come in order). Both ends are the bench's own;
//! - *page numbers*: [`Driver`] and the device, still with 256 pages a message;
//! - *bitmap records*, *ranges*, *scatter-gather*: the same in bulk.
//!
//! The stages are processor time, in ms, medians of the rounds:
//!
//! - *allocate*: the guest's allocator, which is a list of blocks here, and the driver's account of what
//!   it holds. With page numbers the driver tells in between: then it stands under *encode*;
//! - *encode*: all else of the driver, messages and ring;
//! - *send*: what the clock says beyond all others: waking one another up, and whatever else ran on the
//!   machine;
//! - *translate*: the host without discarding: reading and decoding, merging, looking up;
//! - *discard*.
//!
//! Each line has their sum by the clock (quartiles), the work in it (all but *send*), and how many
//! times less either is than page by page.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a bench that cannot begin stops"
)]

#[path = "../measure/mod.rs"]
mod measure;

mod guest;
mod host;

use std::env;
use std::error::Error;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use guest::{Blocks, Shared, Wires, page_by_page};
use host::{Host, Way, shared};
use hostmem::{Backing, Mapping, RaisedPool};
use measure::{Samples, clock, number};
use runs::Span;
use virtio_balloon::driver::Settings;
use virtio_balloon::{BulkBit, BulkFormat, Driver, WIRE_PAGE, Wait};

/// Where the guest's pages begin, above rings and messages.
const BASE: u64 = 4 << 30;
const BLOCK: u64 = 2 << 20;

const WAYS: [(&str, Way); 5] = [
    ("page by page", Way::PageByPage),
    ("page numbers", Way::Numbers),
    ("bitmap records", Way::Bulk(BulkFormat::BitmapRecords)),
    ("ranges", Way::Bulk(BulkFormat::Ranges)),
    ("scatter-gather", Way::Bulk(BulkFormat::ScatterGather)),
];

const STAGES: [&str; 5] = ["allocate", "encode", "send", "translate", "discard"];

/// Seconds of each stage, the messages, and the bytes that were discarded.
struct Inflated {
    stages: [f64; 5],
    messages: u64,
    discarded: u64,
}

/// Takes these bytes in one way, of all pages or every second one.
fn inflate(way: Way, mapping: &Arc<Mapping>, every: u64, bytes: u64) -> Inflated {
    let guest = Span::new(BASE, mapping.len());
    let memory = shared();
    let host = Host::new(way, mapping, guest, memory.clone());
    let host = Arc::new(Mutex::new(host));
    let (kick, kicked) = channel();
    let (answer, answered) = channel();
    let wires = Wires::new(host.clone(), kick, answered);
    let (shared, mut blocks) = (Shared::new(memory), Blocks::new(guest, every));

    let device = host.clone();
    let device = thread::spawn(move || {
        for queue in kicked {
            device.lock().unwrap().drain(queue);
            if answer.send(()).is_err() {
                break;
            }
        }
    });
    let (allocate, encode, elapsed, messages);
    if way == Way::PageByPage {
        let begun = Instant::now();
        (allocate, encode, messages) = page_by_page(&wires, &shared, &mut blocks, bytes);
        elapsed = begun.elapsed();
        check(mapping, &blocks);
        drop(wires);
    } else {
        let settings = Settings {
            bulk: matches!(way, Way::Bulk(_)).then_some(BulkBit::DEFAULT),
            wait: Wait::Sleep {
                most: Duration::from_secs(100),
            },
            queue_size: 256,
            ..Settings::default()
        };
        let mut driver = Driver::new(wires, shared, blocks, settings).unwrap();
        let (begun, clock0) = (Instant::now(), clock());
        let allocated = driver.allocate(bytes).unwrap();
        let clock1 = clock();
        driver.tell().unwrap();
        let clock2 = clock();
        elapsed = begun.elapsed();
        assert_eq!(allocated.bytes, bytes);
        (allocate, encode) = match way {
            Way::Numbers => (0.0, clock2 - clock0),
            _ => (clock1 - clock0, clock2 - clock1),
        };
        check(mapping, driver.pages());
        messages = host.lock().unwrap().device.counters().chains;
        drop(driver);
    }
    device.join().unwrap();
    let mut host = host.lock().unwrap();
    let (discarded, discard) = host.discarded();
    let (translate, busy) = (host.busy - discard, host.busy);
    let send = elapsed.as_secs_f64() - allocate - encode - busy;
    Inflated {
        stages: [allocate, encode, send, translate, discard],
        messages,
        discarded,
    }
}

/// What was taken as blocks reads as zeros.
fn check(mapping: &Mapping, blocks: &Blocks) {
    for block in blocks.taken.iter().filter(|_| blocks.every == 1) {
        let cell = (block - BASE) as usize / 8;
        assert_eq!(mapping.cells()[cell].load(Ordering::Relaxed), 0);
    }
}

/// Every page is there.
fn touch(mapping: &Mapping) {
    for page in mapping.cells().chunks(WIRE_PAGE as usize / 8) {
        page[0].store(1, Ordering::Relaxed);
    }
}

/// A kind of memory with all ways, in turns.
fn measure(backing: Backing, every: u64, mib: u64, rounds: u64) -> Result<(), Box<dyn Error>> {
    let len = (mib << 20) / BLOCK * BLOCK;
    let pool = backing.huge_size().map(|size| RaisedPool::raise(size, len));
    let _pool = pool.transpose()?;
    let mapping = Arc::new(Mapping::new(backing, len, None)?);
    let bytes = match every {
        1 => len / 8 * 7 / BLOCK * BLOCK,
        _ => len / every,
    };
    let mut all = WAYS.map(|_| [const { Samples(Vec::new()) }; 6]);
    let mut found = WAYS.map(|_| (0, 0));
    for _ in 0..rounds {
        for (nr, (_, way)) in WAYS.into_iter().enumerate() {
            touch(&mapping);
            let inflated = inflate(way, &mapping, every, bytes);
            for (samples, seconds) in all[nr].iter_mut().zip(inflated.stages) {
                samples.0.push(seconds * 1e3);
            }
            all[nr][5].0.push(inflated.stages.iter().sum::<f64>() * 1e3);
            found[nr] = (inflated.messages, inflated.discarded);
        }
    }
    let pages = match every {
        1 => "blocks of 2 MiB".to_owned(),
        _ => format!("one page of {every}"),
    };
    println!(
        "\n{}, {pages}: {} MiB of {}",
        backing.name(),
        bytes >> 20,
        len >> 20
    );
    // By the clock, and without what the clock says beyond the work.
    let work = |samples: &[Samples; 6]| {
        let stages = STAGES.iter().zip(samples);
        let stages = stages.filter(|(stage, _)| **stage != "send");
        stages.map(|(_, samples)| samples.median()).sum::<f64>()
    };
    let old = (all[0][5].median(), work(&all[0]));
    for (nr, (name, _)) in WAYS.into_iter().enumerate() {
        let ((messages, discarded), sum) = (found[nr], &all[nr][5]);
        let (clock, work) = (sum.median(), work(&all[nr]));
        print!("  {name:15} {:>24} ms, {work:.1} of work", sum.show(1));
        print!(" ({:.1} x, {:.1} x):", old.0 / clock, old.1 / work);
        for (stage, samples) in STAGES.into_iter().zip(&all[nr]) {
            print!(" {stage} {:.2}", samples.median());
        }
        println!("; {messages} messages, {} MiB discarded", discarded >> 20);
    }
    Ok(())
}

fn main() {
    let all = env::args().any(|argument| argument == "--bench");
    let mib = number("DMASPACE_BENCH_MIB", if all { 8 << 10 } else { 64 });
    let rounds = number("DMASPACE_BENCH_ROUNDS", if all { 5 } else { 1 }).max(1);
    println!("{rounds} rounds; sums as medians (quartiles), stages as medians, in ms");
    for (backing, every) in [
        (Backing::Hugetlb2M, 1),
        (Backing::Thp, 1),
        (Backing::Anon4K, 1),
        (Backing::Anon4K, 2),
    ] {
        if let Err(error) = measure(backing, every, mib, rounds) {
            println!("\n{}: not run: {error}", backing.name());
        }
    }
}
