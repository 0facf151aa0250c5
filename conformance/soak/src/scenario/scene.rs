//! Expectations of devices, their findings, and how the thread that directs them waits for that.
//!
//! Each page of device addresses is a hole (an access must fault), mapped to a page of memory (an access must find
//! exactly its bytes), or on its way (anything may happen, and nothing is written). An access holds the gate from
//! the look at the page until it is judged, so what may be expected never changes under it.
//!
//! Each page of memory has a version. A device of the software unit reads the page through whatever address,
//! compares every byte with what the version says, and writes the next one: a write that was lost, and a page that
//! is another one or too old, are found by the next device to come.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, JoinHandle};

use runs::{Iova, Span};

use super::PAGE;

/// Complaints that are kept.
const KEPT: usize = 16;

/// Expected state of a page.
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

/// Attachment of a device to the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    No = 0,
    Changing = 1,
    Yes = 2,
}

/// Counts of a device.
#[derive(Debug, Default)]
pub(crate) struct DeviceCounts {
    /// Bytes that were read and compared.
    pub(crate) read: AtomicU64,
    /// Accesses that faulted, as they had to.
    pub(crate) faults: AtomicU64,
    attached: AtomicU8,
}

/// State that the threads that play devices share with the one that directs them.
#[derive(Debug)]
pub(crate) struct Scene {
    /// The first device address, and the pages from there on.
    pub(crate) base: u64,
    gate: RwLock<()>,
    pages: Vec<AtomicU32>,
    /// Versions by page of memory.
    pub(crate) versions: Vec<AtomicU32>,
    devices: Vec<DeviceCounts>,
    /// Bits by page of device addresses: before a write, and after it.
    before: Vec<AtomicU64>,
    after: Vec<AtomicU64>,
    stop: AtomicBool,
    wrong: AtomicU64,
    complaints: Mutex<Vec<String>>,
}

fn bits(words: usize) -> Vec<AtomicU64> {
    (0..words.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
}

fn mark(words: &[AtomicU64], page: usize) {
    if let Some(word) = words.get(page / 64) {
        word.fetch_or(1 << (page % 64), Ordering::SeqCst);
    }
}

fn taken(words: &[AtomicU64], range: Range<usize>) -> Vec<u64> {
    let words = words[range].iter();
    words.map(|word| word.swap(0, Ordering::SeqCst)).collect()
}

pub(crate) fn locked<T>(lock: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scene {
    pub(crate) fn new(range: Span<Iova>, memory_pages: usize, devices: usize) -> Self {
        let pages = (range.len / PAGE) as usize;
        Self {
            base: range.start,
            gate: RwLock::default(),
            pages: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            versions: (0..memory_pages).map(|_| AtomicU32::new(0)).collect(),
            devices: (0..devices).map(|_| DeviceCounts::default()).collect(),
            before: bits(pages),
            after: bits(pages),
            stop: AtomicBool::new(false),
            wrong: AtomicU64::new(0),
            complaints: Mutex::default(),
        }
    }

    /// How many pages of device addresses there are.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// The pages of device addresses in `range`.
    pub(crate) fn pages_of(&self, range: Span<Iova>) -> Range<usize> {
        let first = ((range.start - self.base) / PAGE) as usize;
        first..first + (range.len / PAGE) as usize
    }

    /// No access is under way, and none begins, for as long as this is held.
    pub(crate) fn quiet(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held during an access.
    pub(crate) fn gate(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the expected state of `page`. Held by [`quiet`](Self::quiet).
    pub(crate) fn set(&self, page: usize, expect: Expect) {
        self.pages[page].store(expect.pack(), Ordering::SeqCst);
    }

    /// Expected state of `page` for `device`: where it is detached, all is a hole.
    pub(crate) fn expect(&self, device: usize, page: usize) -> Expect {
        let expect = Expect::unpack(self.pages[page].load(Ordering::SeqCst));
        match self.devices[device].attached.load(Ordering::SeqCst) {
            attached if attached == Attached::Changing as u8 => Expect::Moving,
            attached if attached == Attached::No as u8 && expect != Expect::Moving => Expect::Hole,
            _ => expect,
        }
    }

    pub(crate) fn attached(&self, device: usize, attached: Attached) {
        let _quiet = self.quiet();
        self.devices[device]
            .attached
            .store(attached as u8, Ordering::SeqCst);
    }

    pub(crate) fn device_counts(&self, device: usize) -> &DeviceCounts {
        &self.devices[device]
    }

    /// The page of memory reads as zeros from now on. No device reaches it.
    pub(crate) fn zeroed(&self, page: usize) {
        self.versions[page].store(0, Ordering::SeqCst);
    }

    pub(crate) fn begin_write(&self, page: usize) {
        mark(&self.before, page);
    }

    pub(crate) fn end_write(&self, page: usize) {
        mark(&self.after, page);
    }

    /// Where devices have written to since this was last asked, for sure, by words of 64 pages. Accesses under way
    /// are waited for: a write that is over, but not noted yet, would be looked for in the next harvest and was in
    /// the last.
    pub(crate) fn take_written(&self, words: Range<usize>) -> Vec<u64> {
        let _quiet = self.quiet();
        taken(&self.after, words)
    }

    /// And at most.
    pub(crate) fn take_perhaps_written(&self, words: Range<usize>) -> Vec<u64> {
        taken(&self.before, words)
    }

    /// Notes what is wrong.
    pub(crate) fn complain(&self, text: String) {
        self.wrong.fetch_add(1, Ordering::SeqCst);
        let mut kept = locked(&self.complaints);
        if kept.len() < KEPT {
            kept.push(text);
        }
    }

    /// Nothing was wrong so far.
    pub(crate) fn is_right(&self) -> bool {
        self.wrong.load(Ordering::SeqCst) == 0
    }

    /// Complaints so far.
    pub(crate) fn complaints(&self) -> Vec<String> {
        match self.wrong.load(Ordering::SeqCst) {
            0 => Vec::new(),
            _ => locked(&self.complaints).clone(),
        }
    }

    /// Pages that were compared so far, and accesses that faulted, as they had to.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let sum = |of: fn(&DeviceCounts) -> &AtomicU64| {
            let counts = self.devices.iter().map(of);
            counts.map(|count| count.load(Ordering::Relaxed)).sum()
        };
        let read: u64 = sum(|counts| &counts.read);
        (read / PAGE, sum(|counts| &counts.faults))
    }

    /// Devices are to stop.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Work of a thread that plays devices, until it is to stop.
pub(crate) type Play = Box<dyn FnOnce(&Scene) + Send>;

/// The threads that play devices. Dropped, they stop.
#[derive(Debug)]
pub(crate) struct Players {
    scene: Arc<Scene>,
    threads: Vec<JoinHandle<()>>,
}

impl Players {
    pub(crate) const fn new(scene: Arc<Scene>) -> Self {
        Self {
            scene,
            threads: Vec::new(),
        }
    }

    /// One more thread.
    pub(crate) fn start(&mut self, play: Play) -> std::io::Result<()> {
        let scene = Arc::clone(&self.scene);
        let work = move || play(&scene);
        self.threads.push(thread::Builder::new().spawn(work)?);
        Ok(())
    }

    /// Stops them, and waits for it.
    pub(crate) fn stop(&mut self) {
        self.scene.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.scene.complain("a device's thread has panicked".into());
            }
        }
    }
}

impl Drop for Players {
    fn drop(&mut self) {
        self.stop();
    }
}
