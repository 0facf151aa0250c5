//! Origin 3: inflating a balloon, stage by stage.
//!
//! The driver on one thread, the device on another, rings and messages in memory that both see, and real
//! memory that goes back to the machine: 7 of 8 parts of it, in blocks of 2 MiB in any order, and of small
//! pages also every second one, of which no block is whole. Page by page
//! is what Linux and QEMU do: 256 pages taken and named in a message, one in flight, each looked up and
//! discarded by a call of its own; a huge page of a pool when all of it has come in order. Stages are
//! processor time of their threads; *send* is what the clock says beyond all others: waking one another
//! up, and whatever else ran on the machine. With page numbers the driver tells as it allocates: both
//! stand under *encode*.

mod guest;
mod host;

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use hostmem::{Backing, Mapping};
use runs::Span;
use rustix::time::{ClockId, clock_gettime};
use virtio_balloon::driver::DriverSettings;
use virtio_balloon::{BalloonDriver, BulkBit, Wait};

use super::BenchError;
use super::origin::SCATTERED;
use super::real::{self, Failed};
use super::report::{Group, GroupReport, Key, Subject, Unit};
use super::rounds::Rounds;
use guest::{Blocks, PATIENCE, Shared, Wires, page_by_page};
use host::Host;

/// Where the guest's pages begin, above rings and messages.
const BASE: u64 = 4 << 30;
const BLOCK: u64 = 2 << 20;
/// The least memory, of which a part is not taken.
const UNIT: u64 = 8 * BLOCK;

/// Memory, and which of its pages are taken.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    backing: Backing,
    /// One page of so many, of each block.
    every: u64,
}

const KINDS: [Kind; 4] = [
    Kind::whole(Backing::Hugetlb2M),
    Kind::whole(Backing::Thp),
    Kind::whole(Backing::Anon4K),
    Kind {
        name: SCATTERED,
        every: 2,
        ..Kind::whole(Backing::Anon4K)
    },
];

impl Kind {
    const fn whole(backing: Backing) -> Self {
        Self {
            name: backing.name(),
            backing,
            every: 1,
        }
    }

    /// How much of `len` bytes is taken.
    const fn taken(self, len: u64) -> u64 {
        match self.every {
            1 => len / 8 * 7 / BLOCK * BLOCK,
            every => len / every,
        }
    }
}

/// How pages are named and taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    PageByPage,
    Numbers,
    Bitmaps,
}

impl Way {
    /// All of them, page by page first.
    const ALL: [Self; 3] = [Self::PageByPage, Self::Numbers, Self::Bitmaps];

    /// The wire format; page by page stands beside all of them.
    const fn name(self) -> &'static str {
        match self {
            Self::PageByPage => "",
            Self::Numbers => "page-numbers",
            Self::Bitmaps => "bitmap-records",
        }
    }
}

/// The stages, in order.
const STAGES: [&str; 5] = ["allocate", "encode", "send", "translate", "discard"];
/// The sum of all.
const WHOLE: &str = "inflate";

/// Runs the group.
pub(super) fn run(rounds: &mut Rounds, report: &mut GroupReport) -> Result<(), BenchError> {
    report.notes = vec![
        "the origin's guest: 8 GiB under KVM; here: driver and device as two threads, no guest".into(),
        "stages are processor time; send is the remaining elapsed time; inflate is their sum, elapsed"
            .into(),
    ];
    for (nth, kind) in (0..).zip(KINDS) {
        rounds.part(nth, KINDS.len() as u32);
        if let Err(failed) = of_memory(kind, rounds, report) {
            failed.or_report(report, kind.name)?;
        }
    }
    Ok(())
}

fn of_memory(kind: Kind, rounds: &mut Rounds, report: &mut GroupReport) -> Result<(), Failed> {
    let wanted = rounds.settings().balloon_bytes;
    let mapping = real::memory(kind.backing, wanted, UNIT, None, report)?;
    let bytes = kind.taken(mapping.len());
    while rounds.more() {
        for way in Way::ALL {
            fill(&mapping)?;
            let (stages, messages) =
                inflate(way, kind, &mapping, bytes).map_err(|op| BenchError::Refused {
                    group: Group::Balloon,
                    op,
                    format: way.name(),
                })?;
            let subject = match way {
                Way::PageByPage => Subject::ByPage,
                Way::Numbers | Way::Bitmaps => Subject::Dmaspace,
            };
            let whole = (WHOLE, stages.iter().sum());
            let key = |op, unit| Key {
                group: Group::Balloon,
                op,
                memory: kind.name,
                format: way.name(),
                subject,
                threads: 1,
                size_bytes: bytes,
                unit,
            };
            for (op, seconds) in STAGES.into_iter().zip(stages).chain([whole]) {
                rounds.note(key(op, Unit::Milliseconds), seconds * 1e3);
            }
            rounds.note(key("messages", Unit::Count), messages as f64);
        }
    }
    Ok(())
}

/// Every page is there, and every block holds something.
fn fill(mapping: &Mapping) -> Result<(), Failed> {
    let filled = mapping.populate(&mut |_| ControlFlow::Continue(()));
    filled.map_err(|error| Failed::because(&error))?;
    for block in mapping.cells().chunks(BLOCK as usize / 8) {
        if let Some(first) = block.first() {
            first.store(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Takes these bytes in one way; seconds of each stage and how many messages, or what has failed.
fn inflate(
    way: Way,
    kind: Kind,
    mapping: &Arc<Mapping>,
    bytes: u64,
) -> Result<([f64; 5], u64), &'static str> {
    let guest = Span::new(BASE, mapping.len());
    let shared = Shared::new().map_err(|_| "no memory")?;
    let mut blocks = Blocks::new(guest, kind.every);
    let host = Host::new(way, mapping, guest, shared.memory().clone())?;
    let host = Arc::new(Mutex::new(host));
    let (kick, kicked) = channel();
    let (answer, answered) = channel();
    let wires = Wires::new(host.clone(), kick, answered);
    let device = host.clone();
    let device = thread::Builder::new().spawn(move || -> Result<(), &'static str> {
        for queue in kicked {
            let mut host = device.lock().unwrap_or_else(PoisonError::into_inner);
            host.drain(queue)?;
            drop(host);
            if answer.send(()).is_err() {
                break;
            }
        }
        Ok(())
    });
    let device = device.map_err(|_| "there is no thread for the device")?;
    let told = match way {
        Way::PageByPage => {
            let begun = Instant::now();
            let told = page_by_page(&wires, &shared, &mut blocks, bytes);
            let elapsed = begun.elapsed().as_secs_f64();
            drop(wires);
            told.and_then(|(taking, telling)| {
                is_zero(mapping, &blocks).map(|()| (taking, telling, elapsed))
            })
        }
        Way::Numbers | Way::Bitmaps => drive(way, wires, shared, blocks, mapping, bytes),
    };
    // An error of the device is the cause of the driver's.
    device.join().map_err(|_| "the device has ended")??;
    let (allocate, encode, elapsed) = told?;
    let mut host = host.lock().unwrap_or_else(PoisonError::into_inner);
    let ((discarded, discard), busy) = (host.discarded(), host.busy);
    if discarded != bytes {
        return Err("the host has not discarded all of it; inflate");
    }
    let send = (elapsed - allocate - encode - busy).max(0.0);
    let stages = [allocate, encode, send, busy - discard, discard];
    Ok((stages, host.messages()))
}

/// Has the driver allocate and tell; seconds of both, and of all by the clock.
fn drive(
    way: Way,
    wires: Wires,
    shared: Shared,
    blocks: Blocks,
    mapping: &Mapping,
    bytes: u64,
) -> Result<(f64, f64, f64), &'static str> {
    let settings = DriverSettings {
        bulk: (way == Way::Bitmaps).then_some(BulkBit::DEFAULT),
        wait: Wait::Sleep { most: PATIENCE },
        queue_size: 256,
        ..DriverSettings::default()
    };
    let driver = BalloonDriver::new(wires, shared, blocks, settings);
    let mut driver = driver.map_err(|_| "the driver does not begin; inflate")?;
    let (begun, first) = (Instant::now(), clock());
    let allocated = driver.allocate(bytes).map_err(|_| "allocate")?;
    let second = clock();
    driver.tell().map_err(|_| "send")?;
    let third = clock();
    let elapsed = begun.elapsed().as_secs_f64();
    if allocated.bytes != bytes {
        return Err("allocate");
    }
    is_zero(mapping, driver.pages())?;
    Ok(match way {
        Way::Numbers => (0.0, third - first, elapsed),
        _ => (second - first, third - second, elapsed),
    })
}

/// The first page of each block was taken, and reads as zeros.
fn is_zero(mapping: &Mapping, blocks: &Blocks) -> Result<(), &'static str> {
    let zero = |block: &u64| {
        let cell = mapping.cells().get((block - BASE) as usize / 8);
        cell.is_some_and(|cell| cell.load(Ordering::Relaxed) == 0)
    };
    match blocks.taken.iter().all(zero) {
        true => Ok(()),
        false => Err("the host has kept the balloon's pages; inflate"),
    }
}

/// Seconds of processor time of this thread.
fn clock() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
