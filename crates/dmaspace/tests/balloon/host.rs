//! A guest with devices in two address spaces, on a host that is a model.
//!
//! Its discard works as a kernel's: the guest gets a new page at the next touch, and a pin of the old page keeps that
//! one. A frame without a pin is out of reach of devices.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmaspace::balloon::BalloonDma;
use dmaspace::ioas::{Cause, Ioas, Ledger, Memory, MemoryObject, PinFailed, Pinned, RunReader};
use dmaspace::iommu::{
    BadTarget, DeviceId, DomainId, Port, SoftwareConfig, SoftwareUnit, TargetMemory,
};
use dmaspace::iopt::{AnyTable, FormatId, HeapTables, Prot};
use dmaspace::runs::{GuestAddr, Offset, Pa, PageSizes, Span};
use dmaspace::virtio_balloon::{KeepReason, MemoryMap, Part, Refusals, Region, Releaser};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const PAGES: u64 = 1024;
const FRAMES: u64 = 2 * PAGES;
/// Start of frames, and of the guest's memory.
const BASE: u64 = 1 << 32;
pub(crate) const GUEST: u64 = 1 << 30;
/// Address of the guest's memory in the second address space.
pub(crate) const SECOND: u64 = 3 << 30;
pub(crate) const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);

/// The host: frames, and which page of the guest has which.
#[derive(Debug)]
pub(crate) struct Host {
    words: Vec<AtomicU64>,
    /// Pins of each frame.
    pub(crate) pins: Vec<AtomicU64>,
    pages: Mutex<Pages>,
    /// Fails the next pin.
    pub(crate) refuses: AtomicBool,
}

#[derive(Debug)]
struct Pages {
    frames: Vec<Option<u64>>,
    free: Vec<u64>,
}

impl Host {
    fn new() -> Arc<Self> {
        let words = (0..FRAMES * PAGE / 8).map(|_| AtomicU64::new(0));
        Arc::new(Self {
            words: words.collect(),
            pins: (0..FRAMES).map(|_| AtomicU64::new(0)).collect(),
            pages: Mutex::new(Pages {
                frames: vec![None; PAGES as usize],
                free: (0..FRAMES).rev().collect(),
            }),
            refuses: AtomicBool::new(false),
        })
    }

    /// The frame of a page, a new one if it has none.
    fn touch(&self, page: u64) -> u64 {
        let mut pages = self.pages.lock().unwrap();
        if let Some(frame) = pages.frames[page as usize] {
            return frame;
        }
        let frame = pages.free.pop().unwrap();
        for word in 0..PAGE / 8 {
            self.words[(frame * PAGE / 8 + word) as usize].store(0, Ordering::Relaxed);
        }
        pages.frames[page as usize] = Some(frame);
        frame
    }

    /// Model of `MADV_DONTNEED`: a pinned frame stays with its pins.
    fn discard(&self, page: u64) {
        let mut pages = self.pages.lock().unwrap();
        if let Some(frame) = pages.frames[page as usize].take()
            && self.pins[frame as usize].load(Ordering::Relaxed) == 0
        {
            // The oldest comes back last, so that a page hardly gets its own frame again.
            pages.free.insert(0, frame);
        }
    }

    fn unpin(&self, page: u64, frame: u64) {
        let pages = &mut *self.pages.lock().unwrap();
        if self.pins[frame as usize].fetch_sub(1, Ordering::Relaxed) == 1
            && pages.frames[page as usize] != Some(frame)
        {
            pages.free.insert(0, frame);
        }
    }

    /// The guest's processor.
    pub(crate) fn word(&self, guest: u64) -> &AtomicU64 {
        let offset = guest - GUEST;
        let frame = self.touch(offset / PAGE);
        &self.words[((frame * PAGE + offset % PAGE) / 8) as usize]
    }
}

/// Memory that devices reach.
#[derive(Clone)]
pub(crate) struct Reach(Arc<Host>);

impl TargetMemory for Reach {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        for address in (span.start..=span.last()).step_by(8) {
            let at = address.checked_sub(BASE).ok_or(BadTarget { address })?;
            let pins = self.0.pins.get((at / PAGE) as usize);
            if pins.is_none_or(|pins| pins.load(Ordering::Relaxed) == 0) {
                return Err(BadTarget { address });
            }
            let at = (at / 8) as usize;
            visit(&self.0.words[at..=at]);
        }
        Ok(())
    }
}

#[derive(Debug)]
struct GuestMemory(Arc<Host>);

impl MemoryObject for GuestMemory {
    fn len(&self) -> u64 {
        PAGES * PAGE
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        part.len
    }

    fn pin(
        &self,
        part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        if self.0.refuses.swap(false, Ordering::Relaxed) {
            let cause = std::io::Error::from_raw_os_error(14);
            return Err(PinFailed::Refused(Box::new(cause)));
        }
        let pages = part.start / PAGE..(part.start + part.len) / PAGE;
        let pin = |page| {
            let frame = self.0.touch(page);
            self.0.pins[frame as usize].fetch_add(1, Ordering::Relaxed);
            (page, frame)
        };
        Ok(Box::new(GuestPin {
            host: self.0.clone(),
            held: pages.map(pin).collect(),
        }))
    }
}

#[derive(Debug)]
struct GuestPin {
    host: Arc<Host>,
    /// Pages and their frames, in order.
    held: Vec<(u64, u64)>,
}

impl GuestPin {
    fn inside(&self, part: Span<Offset>) -> impl Iterator<Item = (u64, u64)> + '_ {
        let held = self.held.iter().copied();
        held.filter(move |(page, _)| part.contains(page * PAGE))
    }
}

impl Pinned for GuestPin {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        let runs = self.inside(part);
        let runs = runs.map(|(_, frame)| Span::new(BASE + frame * PAGE, PAGE));
        Ok(Box::new(Runs(runs.collect::<Vec<_>>().into_iter())))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        let gone: Vec<_> = self.inside(part).collect();
        self.held.retain(|held| !gone.contains(held));
        gone.iter()
            .for_each(|(page, frame)| self.host.unpin(*page, *frame));
        Ok(self.held.len() as u64 * PAGE)
    }

    fn unpin(mut self: Box<Self>) -> Result<u64, Cause> {
        let held = std::mem::take(&mut self.held);
        held.iter()
            .for_each(|(page, frame)| self.host.unpin(*page, *frame));
        Ok(held.len() as u64 * PAGE)
    }
}

impl Drop for GuestPin {
    fn drop(&mut self) {
        for (page, frame) in &self.held {
            self.host.unpin(*page, *frame);
        }
    }
}

struct Runs(std::vec::IntoIter<Span<Pa>>);

impl RunReader for Runs {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        let mut count = 0;
        for (slot, run) in out.iter_mut().zip(&mut self.0) {
            *slot = run;
            count += 1;
        }
        Ok(count)
    }
}

type Tables = Arc<HeapTables>;
type Unit = Arc<SoftwareUnit<Tables, Reach>>;

/// A guest with two address spaces, each with a device.
pub(crate) struct Machine {
    pub(crate) host: Arc<Host>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) tables: Tables,
    pub(crate) spaces: [Arc<Ioas>; 2],
    pub(crate) units: [Unit; 2],
    pub(crate) balloon: BalloonDma,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let host = Host::new();
        let ledger = Ledger::new("a counter", Some(PAGES * PAGE), 0);
        let memory = Memory::new(Arc::new(GuestMemory(host.clone())), &ledger);
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let mut balloon = BalloonDma::new();
        let config = SoftwareConfig {
            flush_timeout: Duration::from_secs(600),
            ..SoftwareConfig::default()
        };
        let make = |(format, at): (FormatId, u64)| {
            let unit =
                SoftwareUnit::with_config(tables.clone(), Reach(host.clone()), config.clone());
            let unit = Arc::new(unit);
            let sizes = PageSizes::from_bits(u64::MAX);
            let table = AnyTable::new(format, 4, sizes, tables.clone()).unwrap();
            let space = Ioas::over_table(DomainId(1), table);
            space.attach((unit.clone(), DEVICE)).unwrap();
            let whole = Span::new(0, PAGES * PAGE);
            space.map(at, &memory, whole, Prot::RW).unwrap();
            (Arc::new(space), unit)
        };
        let made = [(FormatId::VtdSs, GUEST), (FormatId::AmdV1, SECOND)].map(make);
        let [(first, one), (second, two)] = made;
        balloon.add_space(first.clone());
        balloon.add_space(second.clone());
        assert!(Releaser::<Arc<Memory>>::attached(&balloon));
        Self {
            spaces: [first, second],
            units: [one, two],
            host,
            ledger,
            memory,
            tables,
            balloon,
        }
    }

    pub(crate) fn release(
        &mut self,
        runs: &[Span<GuestAddr>],
    ) -> Vec<(Span<GuestAddr>, KeepReason)> {
        let mut told = Vec::new();
        let regions = self.regions();
        let (map, parts) = resolved(&regions, runs);
        self.balloon.release(map, &parts, &mut |part, reason| {
            told.push((map.run(&part), reason));
        });
        told
    }

    pub(crate) fn restore(
        &mut self,
        runs: &[Span<GuestAddr>],
    ) -> Vec<(Span<GuestAddr>, KeepReason)> {
        let mut told = Vec::new();
        let regions = self.regions();
        let (map, parts) = resolved(&regions, runs);
        self.balloon.restore(map, &parts, &mut |part, reason| {
            told.push((map.run(&part), reason));
        });
        told
    }

    fn regions(&self) -> [Region<Arc<Memory>>; 1] {
        let region = Region {
            guest: pages(0, PAGES),
            page: PAGE,
            memory: self.memory.clone(),
        };
        [region]
    }

    pub(crate) fn ports(&self) -> [Port<Tables, Reach>; 2] {
        self.units.each_ref().map(|unit| unit.port(DEVICE))
    }

    pub(crate) fn discard(&self, runs: &[Span<GuestAddr>]) {
        for run in runs {
            for page in 0..run.len / PAGE {
                self.host.discard((run.start - GUEST) / PAGE + page);
            }
        }
    }

    pub(crate) fn end(self) {
        let Self {
            spaces, balloon, ..
        } = self;
        drop(balloon);
        for space in spaces {
            let space = Arc::into_inner(space).unwrap();
            assert_eq!(space.len(), 1);
            space.close().unwrap();
        }
        assert_eq!((self.tables.in_use(), self.ledger.in_use()), (0, 0));
        assert!(
            self.host
                .pins
                .iter()
                .all(|pins| pins.load(Ordering::Relaxed) == 0)
        );
    }
}

/// The map of these regions, and what of the runs is in it.
pub(crate) fn resolved<'a, T>(
    regions: &'a [Region<T>],
    runs: &[Span<GuestAddr>],
) -> (MemoryMap<'a, T>, Vec<Part>) {
    let map = MemoryMap::new(regions).unwrap();
    let mut parts = Vec::new();
    for run in runs {
        map.resolve(*run, &mut Refusals::new(), |part| parts.push(part));
    }
    (map, parts)
}

pub(crate) const fn pages(first: u64, len: u64) -> Span<GuestAddr> {
    Span::new(GUEST + first * PAGE, len * PAGE)
}

/// Address in space `n` of the byte that the guest has at `guest`.
pub(crate) const fn seen(n: usize, guest: u64) -> u64 {
    match n {
        0 => guest,
        _ => guest - GUEST + SECOND,
    }
}
