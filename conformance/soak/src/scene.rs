//! What devices may expect, and the devices: threads that do DMA all the time.
//!
//! Each page of device addresses is a hole (an access must fault), mapped to a page of memory (an access
//! must find exactly its bytes), or on its way (anything may happen, and nothing is written). An access holds
//! the gate from the look at the page until it is judged, so what may be expected never changes under it.
//!
//! Each page of memory has a version. A device reads the page through whatever address, compares every
//! byte with what the version says, and writes the next one: a write that was lost, and a page that is
//! another one or too old, are found by the next device to come.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::thread;
use std::time::Duration;

use ioas::HostTables;
use iommu::Port;
use runs::Span;

use crate::object::Physical;
use crate::random::Random;
use crate::{IOVA, PAGE, PAGES};

const WORDS: usize = PAGE as usize / 8;
/// In the version of a page that a device works on.
const TAKEN: u32 = 1 << 31;
/// So many accesses, then a breath.
const BREATH: u64 = 64;
/// Complaints that are kept.
const KEPT: usize = 16;

/// What a device may expect at a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    Hole,
    Moving,
    Mapped { page: u32, write: bool },
}

impl Expect {
    const fn pack(self) -> u32 {
        match self {
            Self::Hole => 0,
            Self::Moving => 1,
            Self::Mapped { page, write } => 2 + page * 2 + write as u32,
        }
    }

    const fn unpack(word: u32) -> Self {
        match word {
            0 => Self::Hole,
            1 => Self::Moving,
            word => Self::Mapped {
                page: (word - 2) / 2,
                write: word & 1 != 0,
            },
        }
    }
}

/// Whether a device has the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    No = 0,
    Changing = 1,
    Yes = 2,
}

#[derive(Debug)]
pub(crate) struct Scene {
    gate: RwLock<()>,
    pages: Vec<AtomicU32>,
    versions: Vec<AtomicU32>,
    devices: Vec<AtomicU8>,
    /// By page of device addresses: before a write, and after it.
    before: Vec<AtomicU64>,
    after: Vec<AtomicU64>,
    stop: AtomicBool,
    wrong: AtomicU64,
    complaints: Mutex<Vec<String>>,
    /// Accesses that found what they were to find, and those that were to fault and did.
    pub(crate) found: AtomicU64,
    pub(crate) faulted: AtomicU64,
}

fn bits(words: usize) -> Vec<AtomicU64> {
    (0..words.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
}

fn mark(words: &[AtomicU64], page: usize) {
    words[page / 64].fetch_or(1 << (page % 64), Ordering::SeqCst);
}

fn taken(words: &[AtomicU64]) -> Vec<u64> {
    let words = words.iter().map(|word| word.swap(0, Ordering::SeqCst));
    words.collect()
}

/// The word of memory at `offset` of `page`, of which `version` was written.
const fn word(page: u32, offset: usize, version: u32) -> u64 {
    if version == 0 {
        return 0;
    }
    let seed = (page as u64) << 41 | (version as u64) << 10 | offset as u64;
    (seed ^ seed >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

pub(crate) type DevicePort = Port<std::sync::Arc<HostTables>, std::sync::Arc<Physical>>;

impl Scene {
    pub(crate) fn new(devices: usize, memory_pages: usize) -> Self {
        Self {
            gate: RwLock::new(()),
            pages: (0..PAGES).map(|_| AtomicU32::new(0)).collect(),
            versions: (0..memory_pages).map(|_| AtomicU32::new(0)).collect(),
            devices: (0..devices).map(|_| AtomicU8::new(0)).collect(),
            before: bits(PAGES),
            after: bits(PAGES),
            stop: AtomicBool::new(false),
            wrong: AtomicU64::new(0),
            complaints: Mutex::default(),
            found: AtomicU64::new(0),
            faulted: AtomicU64::new(0),
        }
    }

    /// No access is under way, and none begins, for as long as this is held.
    pub(crate) fn quiet(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// What devices may expect at `page` from now on. Held by [`quiet`](Self::quiet).
    pub(crate) fn expect(&self, page: usize, expect: Expect) {
        self.pages[page].store(expect.pack(), Ordering::SeqCst);
    }

    pub(crate) fn attached(&self, device: usize, attached: Attached) {
        let _quiet = self.quiet();
        self.devices[device].store(attached as u8, Ordering::SeqCst);
    }

    /// The page of memory reads as zeros from now on. Nobody reaches it.
    pub(crate) fn zeroed(&self, page: usize) {
        self.versions[page].store(0, Ordering::SeqCst);
    }

    /// What devices have written to since this was last asked, for sure. Accesses under way are waited for:
    /// a write that is over, but not noted yet, would be looked for in the next harvest and was in the last.
    pub(crate) fn take_written(&self) -> Vec<u64> {
        let _quiet = self.quiet();
        taken(&self.after)
    }

    /// And at most.
    pub(crate) fn take_perhaps_written(&self) -> Vec<u64> {
        taken(&self.before)
    }

    pub(crate) fn complain(&self, text: String) {
        self.wrong.fetch_add(1, Ordering::SeqCst);
        let mut kept = self
            .complaints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT {
            kept.push(text);
        }
    }

    /// What was wrong so far.
    pub(crate) fn complaints(&self) -> Vec<String> {
        if self.wrong.load(Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let kept = self.complaints.lock();
        kept.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// A thread that plays these devices until it is stopped.
    pub(crate) fn play(&self, ports: &mut [(usize, DevicePort)], seed: u64) {
        let mut random = Random::new(seed);
        let mut count = 0u64;
        while !self.stop.load(Ordering::Relaxed) {
            for (device, port) in &mut *ports {
                // Some stay where they are for a while, so that caches are hit.
                let first = random.below(PAGES as u64) as usize;
                for page in (first..PAGES).take(1 + random.below(6) as usize) {
                    self.access(*device, port, page, &mut random);
                }
            }
            count += 1;
            if count.is_multiple_of(BREATH) {
                thread::sleep(Duration::from_micros(50));
            }
        }
    }

    fn access(&self, device: usize, port: &mut DevicePort, page: usize, random: &mut Random) {
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let iova = IOVA + page as u64 * PAGE;
        let at = |text: &str| format!("device {device} at {iova:#x}: {text}");
        let mut words = [0; WORDS];
        let expect = Expect::unpack(self.pages[page].load(Ordering::SeqCst));
        let attached = self.devices[device].load(Ordering::SeqCst);
        if attached == Attached::Changing as u8 || expect == Expect::Moving {
            // It may fault, or read whatever was or will be there: never what nobody has pinned.
            let _ = port.read(iova, &mut words);
            return;
        }
        let Expect::Mapped {
            page: memory,
            write,
        } = expect
        else {
            return self.fault(port, iova, &at("reached a hole"));
        };
        if attached == Attached::No as u8 {
            return self.fault(port, iova, &at("reached memory, but is detached"));
        }
        let version = self.take(memory);
        let next = self.exchange(port, (page, memory, version), write, random, &at);
        self.versions[memory as usize].store(next, Ordering::SeqCst);
    }

    fn take(&self, memory: u32) -> u32 {
        loop {
            let version = self.versions[memory as usize].fetch_or(TAKEN, Ordering::SeqCst);
            if version & TAKEN == 0 {
                return version;
            }
            thread::yield_now();
        }
    }

    fn fault(&self, port: &mut DevicePort, iova: u64, text: &str) {
        let mut word = [0];
        if port.read(iova, &mut word).is_ok() || port.write(iova + 8, &[0]).is_ok() {
            return self.complain(text.into());
        }
        self.faulted.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads and compares the page, and writes the next version. Returns the one that it has now.
    fn exchange(
        &self,
        port: &mut DevicePort,
        (page, memory, version): (usize, u32, u32),
        write: bool,
        random: &mut Random,
        at: &dyn Fn(&str) -> String,
    ) -> u32 {
        let iova = IOVA + page as u64 * PAGE;
        let mut words = [0; WORDS];
        if let Err(fault) = port.read(iova, &mut words) {
            self.complain(at(&format!("is mapped, and a read faults: {fault:?}")));
            return version;
        }
        let wrong = (0..WORDS).find(|n| words[*n] != word(memory, *n, version));
        if let Some(n) = wrong {
            let expected = word(memory, n, version);
            let found = words[n];
            self.complain(at(&format!(
                "page {memory} of version {version}, word {n}: {found:#x} and not {expected:#x}"
            )));
            return version;
        }
        self.found.fetch_add(1, Ordering::Relaxed);
        if random.below(3) == 0 {
            return version;
        }
        let next = version + 1;
        (0..WORDS).for_each(|n| words[n] = word(memory, n, next));
        if write {
            mark(&self.before, page);
        }
        match (port.write(iova, &words), write) {
            (Ok(()), true) => {
                mark(&self.after, page);
                next
            }
            (Err(_), false) => version,
            (Ok(()), false) => {
                self.complain(at("is read-only, and was written to"));
                next
            }
            (Err(fault), true) => {
                self.complain(at(&format!("is writable, and a write faults: {fault:?}")));
                version
            }
        }
    }
}

/// The pages of device addresses in `range`.
pub(crate) fn pages(range: Span) -> std::ops::Range<usize> {
    let first = (range.start - IOVA) / PAGE;
    first as usize..(first + range.len / PAGE) as usize
}
