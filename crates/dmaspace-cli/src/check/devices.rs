//! Devices of the software unit: threads that read, compare and write pages until they are stopped.
//!
//! # Protocol
//!
//! - Each page has one writer at a time: the device whose number is that of the page and of the *turn*, modulo the
//!   number of devices. It reads the page, compares each word with the page's *version*, and writes the next version.
//!   With as many turns as devices each of them has had each page. Pages in a hole are every device's in every turn.
//! - [`Scene`] says what an access must come to. It is locked for reading during an access and changed between two, so
//!   that no access falls on both sides of a change. The thread of the check does not hold it during an operation: it
//!   first declares the pages as *moving*, where an access may fault or not; then does it; then declares them as a
//!   *hole*, where each access of each device must fault, or as mapped again. A word that is read is compared in any
//!   case.
//! - [`Dma::see`] waits until the devices have had all pages of a span in a turn that began after the change, and
//!   [`Dma::see_by_each`] until each of them has. So a translation that outlived its flush is found.
//! - Versions of pages in a hole are changed by the thread of the check only: discarded memory is version 0, zeros.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hostmem::Mapping;
use iommu::{Port, TargetMemory};
use iopt::walk::WalkMemory;
use runs::{Iova, Span};

use super::job::Job;
use super::report::DmaReport;
use super::{Because as _, CheckError, PAGE};

const WORDS: usize = PAGE as usize / 8;
/// No access takes nearly as long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Results that accesses must have.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    /// Accesses may fault here.
    pub(super) moving: Option<Span<Iova>>,
    /// Accesses must fault here, and beside all memory.
    pub(super) hole: Option<Span<Iova>>,
    /// Devices write here only.
    pub(super) writes: Span<Iova>,
    turn: u64,
    /// Addresses of which each device has all in this turn, before it goes on anywhere.
    focus: Span<Iova>,
}

/// State that devices and the check share.
#[derive(Debug)]
struct Shared {
    range: Span<Iova>,
    devices: u64,
    scene: RwLock<Scene>,
    versions: Vec<AtomicU32>,
    /// Pages that were written to since they were last taken, by bits.
    written: Vec<AtomicU64>,
    progress: Vec<Progress>,
    stop: AtomicBool,
    counts: Counts,
}

/// Progress of a device.
#[derive(Debug, Default)]
struct Progress {
    /// The last turn of which it has had the focus.
    turn: AtomicU64,
    accesses: AtomicU64,
}

#[derive(Debug, Default)]
struct Counts {
    read: AtomicU64,
    written: AtomicU64,
    wrong: AtomicU64,
    expected: AtomicU64,
    unexpected: AtomicU64,
    reached: AtomicU64,
}

fn add(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}

/// The word at `offset` of memory of this version: a mix that takes every offset and version to another word (the
/// finalizer of SplitMix64, which is a bijection), so that a page at a wrong address differs at its first word.
const fn word(offset: u64, version: u32) -> u64 {
    if version == 0 {
        return 0;
    }
    let mut z = (offset | (version as u64) << 44).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Bytes of `found`, which begins at `offset`, that are not those of this version.
fn wrong_bytes(found: impl Iterator<Item = u64>, offset: u64, version: u32) -> u64 {
    (offset..)
        .step_by(8)
        .zip(found)
        .map(|(offset, found)| (found ^ word(offset, version)).to_ne_bytes())
        .map(|bytes| bytes.iter().filter(|byte| **byte != 0).count() as u64)
        .sum()
}

impl Shared {
    fn scene(&self) -> RwLockReadGuard<'_, Scene> {
        self.scene.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pages of a span, counted from the beginning of the range; those beside it have no number.
    fn pages(&self, span: Span<Iova>) -> Range<usize> {
        let first = (span.start - self.range.start) / PAGE;
        first as usize..(first + span.len / PAGE) as usize
    }

    /// Plays device `number` at `port`.
    fn play<T: WalkMemory, D: TargetMemory>(&self, number: u64, port: &mut Port<T, D>) {
        let Some(progress) = self.progress.get(number as usize) else {
            return;
        };
        let mut words = [0; WORDS];
        let (mut turn, mut next, mut idle) = (0, 0, 0u64);
        while !self.stop.load(Ordering::Relaxed) {
            let scene = self.scene();
            if scene.turn != turn {
                (turn, next) = (scene.turn, 0);
            }
            let focused = next < scene.focus.len;
            let iova = match focused {
                true => scene.focus.start + next,
                // Anywhere, in no order.
                false => {
                    idle = idle.wrapping_add(0x9e37_79b9_7f4a_7c15);
                    self.range.start + idle % (self.range.len / PAGE) * PAGE
                }
            };
            self.access(&scene, number, iova, port, &mut words);
            add(&progress.accesses, 1);
            next += PAGE;
            let seen = next >= scene.focus.len;
            drop(scene);
            if focused && seen {
                progress.turn.store(turn, Ordering::Release);
            }
            if !focused {
                // There may be more devices than processors.
                thread::yield_now();
            }
        }
    }

    /// An access to the page at `iova`, if this device may make one now.
    fn access<T: WalkMemory, D: TargetMemory>(
        &self,
        scene: &Scene,
        number: u64,
        iova: u64,
        port: &mut Port<T, D>,
        words: &mut [u64; WORDS],
    ) {
        let counts = &self.counts;
        let within = |span: &Option<Span<Iova>>| span.is_some_and(|span| span.contains(iova));
        if within(&scene.hole) || !self.range.contains(iova) {
            for through in [
                port.read(iova, words).is_ok(),
                port.write(iova, words).is_ok(),
            ] {
                match through {
                    true => add(&counts.reached, 1),
                    false => add(&counts.expected, 1),
                }
            }
            return;
        }
        let page = (iova - self.range.start) / PAGE;
        let at = self.versions.get(page as usize);
        let Some(at) = at.filter(|_| (page + scene.turn) % self.devices == number) else {
            return;
        };
        let fault = || {
            if !within(&scene.moving) {
                add(&counts.unexpected, 1);
            }
        };
        let (offset, version) = (page * PAGE, at.load(Ordering::Relaxed));
        if port.read(iova, words).is_err() {
            return fault();
        }
        add(&counts.read, PAGE);
        add(
            &counts.wrong,
            wrong_bytes(words.iter().copied(), offset, version),
        );
        if !scene.writes.contains(iova) {
            return;
        }
        // Versions come again after all others; 0 is none that is written.
        let version = version % (u32::MAX >> 12) + 1;
        for (offset, to) in (offset..).step_by(8).zip(words.iter_mut()) {
            *to = word(offset, version);
        }
        if port.write(iova, words).is_err() {
            return fault();
        }
        add(&counts.written, PAGE);
        at.store(version, Ordering::Relaxed);
        if let Some(written) = self.written.get(page as usize / 64) {
            written.fetch_or(1 << (page % 64), Ordering::Relaxed);
        }
    }
}

/// The devices. They stop when this is dropped.
#[derive(Debug)]
pub(super) struct Dma {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Dma {
    /// So many devices, which are to reach memory at `range`.
    pub(super) fn new(devices: u32, range: Span<Iova>) -> Self {
        let pages = range.len / PAGE;
        let shared = Arc::new(Shared {
            range,
            devices: devices.into(),
            scene: RwLock::new(Scene {
                moving: None,
                hole: None,
                writes: range,
                turn: 0,
                focus: Span::default(),
            }),
            versions: (0..pages).map(|_| AtomicU32::new(1)).collect(),
            written: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            progress: (0..devices).map(|_| Progress::default()).collect(),
            stop: AtomicBool::new(false),
            counts: Counts::default(),
        });
        Self {
            shared,
            threads: Vec::new(),
        }
    }

    /// Fills `memory` with the first version, and starts a thread for each port.
    pub(super) fn start<T, D>(
        &mut self,
        ports: Vec<Port<T, D>>,
        memory: &Mapping,
        job: &mut Job<'_>,
    ) -> Result<(), CheckError>
    where
        T: WalkMemory + Send + Sync + 'static,
        D: TargetMemory + Send + Sync + 'static,
    {
        for (nth, chunk) in memory.cells().chunks(1 << 20).enumerate() {
            for (offset, cell) in ((nth as u64) << 23..).step_by(8).zip(chunk) {
                cell.store(word(offset, 1), Ordering::Relaxed);
            }
            job.go_on()?;
        }
        for (number, mut port) in (0..).zip(ports) {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().spawn(move || shared.play(number, &mut port));
            self.threads.push(thread.failed("cannot start a device")?);
        }
        Ok(())
    }

    /// Changes what accesses must come to, between two of them.
    pub(super) fn expect(&self, change: impl FnOnce(&mut Scene)) {
        let scene = self.shared.scene.write();
        change(&mut scene.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until each page of `span` was had as it must be now: by its device, or in a hole by each.
    pub(super) fn see(&self, span: Span<Iova>, job: &mut Job<'_>) -> Result<(), CheckError> {
        let mut turn = 0;
        self.expect(|scene| {
            scene.turn += 1;
            (turn, scene.focus) = (scene.turn, span);
        });
        let (mut before, mut moved) = (None, Instant::now());
        loop {
            let all = self.shared.progress.iter();
            let behind = all.filter(|device| device.turn.load(Ordering::Acquire) < turn);
            let accesses = behind.map(|device| device.accesses.load(Ordering::Relaxed));
            let now = accesses.fold((0, 0u64), |(n, sum), count| {
                (n + 1, sum.wrapping_add(count))
            });
            if now.0 == 0 {
                return Ok(());
            }
            job.go_on()?;
            if before.replace(now) != Some(now) {
                moved = Instant::now();
            }
            if moved.elapsed() > PATIENCE || self.threads.iter().any(JoinHandle::is_finished) {
                return Err(CheckError::Stuck(job.step));
            }
            thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits until each device has had each page of `span`.
    pub(super) fn see_by_each(
        &self,
        span: Span<Iova>,
        job: &mut Job<'_>,
    ) -> Result<(), CheckError> {
        (0..self.shared.devices).try_for_each(|_| self.see(span, job))
    }

    /// From now on every access to `hole` must fault; the faults until each device has met all of it.
    pub(super) fn meet_hole(&self, hole: Span<Iova>, job: &mut Job<'_>) -> Result<u64, CheckError> {
        let before = self.report().faults_expected;
        self.expect(|scene| (scene.moving, scene.hole) = (None, Some(hole)));
        self.see(hole, job)?;
        Ok(self.report().faults_expected - before)
    }

    /// All memory, and the pages beside it, which are always a hole.
    pub(super) fn everywhere(&self) -> Span<Iova> {
        let range = self.shared.range;
        Span::new(range.start - PAGE, range.len + 2 * PAGE)
    }

    /// The memory at `span`, which is a hole, was discarded.
    pub(super) fn zeroed(&self, span: Span<Iova>) {
        let versions = self.shared.versions.get(self.shared.pages(span));
        for version in versions.into_iter().flatten() {
            version.store(0, Ordering::Relaxed);
        }
    }

    /// Pages that were written to since the last call, by bits.
    pub(super) fn take_written(&self) -> Vec<u64> {
        let words = self.shared.written.iter();
        words.map(|word| word.swap(0, Ordering::AcqRel)).collect()
    }

    /// Accesses until now.
    pub(super) fn report(&self) -> DmaReport {
        let counts = &self.shared.counts;
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        DmaReport {
            devices: self.shared.devices as u32,
            read_bytes: count(&counts.read),
            written_bytes: count(&counts.written),
            wrong_bytes: count(&counts.wrong),
            faults_expected: count(&counts.expected),
            faults_unexpected: count(&counts.unexpected),
            reached_in_holes: count(&counts.reached),
        }
    }

    /// Stops the devices.
    pub(super) fn stop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // One that panicked was stuck.
            let _ = thread.join();
        }
    }

    /// Compares all of `memory` by the processor. Devices have stopped.
    pub(super) fn compare(&self, memory: &Mapping, job: &mut Job<'_>) -> Result<(), CheckError> {
        let pages = memory.cells().chunks(WORDS).zip(&self.shared.versions);
        for (page, (cells, version)) in (0..).zip(pages) {
            let found = cells.iter().map(|cell| cell.load(Ordering::Relaxed));
            let wrong = wrong_bytes(found, page * PAGE, version.load(Ordering::Relaxed));
            add(&self.shared.counts.wrong, wrong);
            if page % 4096 == 0 {
                job.go_on()?;
            }
        }
        Ok(())
    }
}

impl Drop for Dma {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use hostmem::Backing;
    use iommu::{DeviceId, DomainId, RunMap, SoftwareUnit, Unit};
    use iopt::format::VtdSs;
    use iopt::{Gather, HeapTables, Prot, Table, TableOps as _};

    use super::*;
    use crate::check::CheckJob;

    const IOVA: u64 = 1 << 40;
    const PA: u64 = 1 << 33;
    const LEN: u64 = 64 * PAGE;

    /// The memory as a single piece.
    struct All(Arc<Mapping>);

    impl AsRef<[AtomicU64]> for All {
        fn as_ref(&self) -> &[AtomicU64] {
            self.0.cells()
        }
    }

    type Tampered = Table<VtdSs, Arc<HeapTables>>;

    /// Findings of two devices and the processor over a table that maps the memory, after `tamper`.
    fn found(tamper: impl FnOnce(&mut Tampered)) -> DmaReport {
        let memory = Arc::new(Mapping::new(Backing::Anon4K, LEN, None).unwrap());
        let data = RunMap::new([(PA, All(Arc::clone(&memory)))]).unwrap();
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let mut table = Table::new(VtdSs::new(4).unwrap(), Arc::clone(&tables)).unwrap();
        table.map(IOVA, &[Span::new(PA, LEN)], Prot::RW).unwrap();
        tamper(&mut table);
        let unit = SoftwareUnit::new(tables, data);
        let devices = [DeviceId::pci(1, 0, 0), DeviceId::pci(2, 0, 0)];
        for device in devices {
            unit.attach(device, DomainId(1), table.root()).unwrap();
        }
        let ports = devices.map(|device| unit.port(device)).into();
        let (asked, mut go_on) = (CheckJob::default(), |_| ControlFlow::Continue(()));
        let job = &mut Job::new(&asked, &mut go_on).unwrap();
        let mut dma = Dma::new(2, Span::new(IOVA, LEN));
        dma.start(ports, &memory, job).unwrap();
        dma.see_by_each(dma.everywhere(), job).unwrap();
        dma.stop();
        dma.compare(&memory, job).unwrap();
        dma.report()
    }

    fn remap(table: &mut Tampered, page: u64, pa: Option<u64>) {
        let mut gather = Gather::new();
        let range = Span::new(IOVA + page * PAGE, PAGE);
        table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
        table.reclaim(gather.never_walked());
        if let Some(pa) = pa {
            let page = [Span::new(pa, PAGE)];
            table.map(range.start, &page, Prot::RW).unwrap();
        }
    }

    #[test]
    fn memory_that_is_mapped_right_is_found_right() {
        let found = found(|_| {});
        assert!(found.read_bytes >= 2 * LEN && found.written_bytes >= 2 * LEN);
        assert!(found.is_right(), "{found:?}");
        // A page on each side, read and write, by each device in each turn.
        assert_eq!(found.faults_expected, 16);
    }

    #[test]
    fn a_pair_of_swapped_leaves_is_found() {
        let found = found(|table| {
            remap(table, 3, Some(PA + 40 * PAGE));
            remap(table, 40, Some(PA + 3 * PAGE));
        });
        // Hardly a byte of two different words is equal, and the processor finds them as well.
        assert!(found.wrong_bytes > 3 * PAGE, "{found:?}");
        assert_eq!(found.faults_unexpected, 0);
    }

    #[test]
    fn a_missing_leaf_is_a_fault_and_a_leaf_too_many_is_reached() {
        let missing = found(|table| remap(table, 7, None));
        assert!(missing.faults_unexpected >= 2, "{missing:?}");
        let more = found(|table| {
            let page = [Span::new(PA, PAGE)];
            table.map(IOVA + LEN, &page, Prot::READ).unwrap();
        });
        assert_eq!((more.reached_in_holes, more.faults_expected), (4, 12));
    }

    #[test]
    fn words_differ_by_offset_and_version_and_version_0_is_zeros() {
        let words = (0..4096u64).flat_map(|at| [1, 2, 3].map(|version| word(at * 8, version)));
        let words: std::collections::HashSet<_> = words.collect();
        assert_eq!(words.len(), 3 * 4096);
        assert_eq!(word(4096, 0), 0);
    }
}
