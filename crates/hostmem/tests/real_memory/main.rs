//! Backings, pins and runs on the real memory of this machine.
//!
//! Pools of huge pages belong to the machine and `VmPin` to the process, so the tests of this
//! file take turns. What the machine or the rights of this process do not allow is said on
//! stderr ("not run: ...") and left out.

// In a test, giving up at once is right, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

mod discard;
mod foreign;
mod frames;
mod guest_memfd;
mod limits;
mod pins;
mod places;
mod population;
mod shrinking;
mod user_faults;

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hostmem::{Backing, Counter, FrameSource, Limits, Mapping, PinKind, Pinner, RaisedPool};
use runs::{Offset, Pa, Span};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn on(_done: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn in_use(counter: Counter) -> u64 {
    Limits::in_use(counter).unwrap().known
}

/// The counter reaches `bytes`; some kernels unpin a moment later.
fn assert_reaches(counter: Counter, bytes: u64) {
    let start = Instant::now();
    while in_use(counter) != bytes && start.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(in_use(counter), bytes, "{counter}");
}

/// The counter of `/proc/self/status` that a pinner of this process raises.
fn visible(pinner: &Pinner) -> Counter {
    match pinner.kind() {
        PinKind::IoUring => Counter::PinnedVm,
        PinKind::Mlock => Counter::MmLockedVm,
    }
}

/// An io_uring pinner, and room for `bytes` under its limit.
fn pinner(piece: u64, bytes: u64) -> Option<Pinner> {
    let pinner = Pinner::probe(piece).unwrap();
    if let Some(why) = pinner.why() {
        eprintln!("not run: {why}");
        return None;
    }
    let left = pinner.limits().left(pinner.counter()).unwrap();
    // Rings are charged too.
    if left.is_some_and(|left| left < bytes + 64 * 1024) {
        eprintln!("not run: {bytes} bytes are needed, {left:?} may be pinned");
        return None;
    }
    Some(pinner)
}

struct Memory {
    mapping: Arc<Mapping>,
    // After the mapping, so that its pages are free when the pool is put back.
    _pool: Option<RaisedPool>,
}

/// A populated mapping, or `None` where the machine has no such memory.
fn memory(backing: Backing, len: u64) -> Option<Memory> {
    let pool = match backing.huge_size() {
        None => None,
        Some(size) => match RaisedPool::raise(size, len) {
            Ok(pool) => Some(pool),
            Err(error) => {
                eprintln!("not run: {backing}: {error}");
                return None;
            }
        },
    };
    let mapping = Mapping::new(backing, len, None).unwrap();
    mapping.populate(&mut on).unwrap();
    Some(Memory {
        mapping: Arc::new(mapping),
        _pool: pool,
    })
}

fn small_length(backing: Backing) -> u64 {
    match backing {
        Backing::Hugetlb1G => 1 << 30,
        _ => 6 * MIB,
    }
}

fn is_real(mapping: &Mapping) -> bool {
    FrameSource::detect(mapping).is_real()
}

/// Runs of a part, and how many looks they took.
fn runs_of(
    pin: &hostmem::Pin,
    part: Span<Offset>,
    source: FrameSource,
    batch: usize,
) -> (Vec<Span<Pa>>, u64) {
    let mut frames = pin.runs(part, source).unwrap();
    let mut out = vec![Span::default(); batch];
    let mut runs = Vec::new();
    loop {
        let n = frames.next_batch(&mut out).unwrap();
        if n == 0 {
            return (runs, frames.entries_read());
        }
        runs.extend_from_slice(&out[..n]);
    }
}

/// The physical address of each 4 KiB page of a part, read page by page.
fn frames_page_by_page(mapping: &Mapping, part: Span<Offset>) -> Vec<u64> {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    (part.start / PAGE..(part.start + part.len) / PAGE)
        .map(|page| {
            let mut entry = [0; 8];
            let at = (mapping.address() / PAGE + page) * 8;
            pagemap.read_exact_at(&mut entry, at).unwrap();
            (u64::from_ne_bytes(entry) & ((1 << 55) - 1)) * PAGE
        })
        .collect()
}

fn pages_of(runs: &[Span<Pa>]) -> Vec<u64> {
    runs.iter()
        .flat_map(|run| (run.start..run.start + run.len).step_by(PAGE as usize))
        .collect()
}
