//! Devices first: devices in software do DMA to memory that goes through a balloon, over and over, in
//! two address spaces, while others do DMA all around it.
//!
//! The host's memory is a model in which discarding is what a kernel does: the guest gets a new page
//! at the next touch, and who has pinned the old one keeps that. A frame that nobody has pinned is
//! out of reach of devices.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use dmaspace::balloon::BalloonDma;
use dmaspace::ioas::{
    Cause, Ioas, Ledger, Memory, MemoryObject, Own, PinFailed, Pinned, RunReader, WhenUnmapped,
};
use dmaspace::iommu::{BadTarget, Config, DeviceId, DomainId, Port, SoftwareUnit, TargetMemory};
use dmaspace::iopt::{AnyTable, FormatId, HeapTables, Prot};
use dmaspace::runs::{PageSizes, Span};
use dmaspace::virtio_balloon::{Dma, Reason};

const PAGE: u64 = 4096;
const PAGES: u64 = 1024;
const FRAMES: u64 = 2 * PAGES;
/// Where frames begin, and where the guest's memory does.
const BASE: u64 = 1 << 32;
const GUEST: u64 = 1 << 30;
/// Where the second address space has it.
const SECOND: u64 = 3 << 30;
const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);
/// Of so many pages the last never goes into the balloon.
const EVERY: u64 = 16;

/// The host: frames, and which page of the guest has which.
#[derive(Debug)]
struct Host {
    words: Vec<AtomicU64>,
    /// By frame: how often it is pinned.
    pins: Vec<AtomicU64>,
    pages: Mutex<Pages>,
    /// Fails the next pin.
    refuses: AtomicBool,
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

    /// What `MADV_DONTNEED` does: a pinned frame stays with whoever has pinned it.
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
    fn word(&self, guest: u64) -> &AtomicU64 {
        let offset = guest - GUEST;
        let frame = self.touch(offset / PAGE);
        &self.words[((frame * PAGE + offset % PAGE) / 8) as usize]
    }
}

/// What devices reach.
#[derive(Clone)]
struct Reach(Arc<Host>);

impl TargetMemory for Reach {
    fn with_cells(&self, span: Span, visit: &mut dyn FnMut(&[AtomicU64])) -> Result<(), BadTarget> {
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

    fn charge(&self, part: Span) -> u64 {
        part.len
    }

    fn pin(
        &self,
        part: Span,
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
    fn inside(&self, part: Span) -> impl Iterator<Item = (u64, u64)> + '_ {
        let held = self.held.iter().copied();
        held.filter(move |(page, _)| part.contains(page * PAGE))
    }
}

impl Pinned for GuestPin {
    fn runs(&self, part: Span) -> Result<Box<dyn RunReader + '_>, Cause> {
        let runs = self.inside(part);
        let runs = runs.map(|(_, frame)| Span::new(BASE + frame * PAGE, PAGE));
        Ok(Box::new(Runs(runs.collect::<Vec<_>>().into_iter())))
    }

    fn release(&mut self, part: Span) -> Result<u64, Cause> {
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

struct Runs(std::vec::IntoIter<Span>);

impl RunReader for Runs {
    fn next_batch(&mut self, out: &mut [Span]) -> Result<usize, Cause> {
        let mut count = 0;
        for (slot, run) in out.iter_mut().zip(&mut self.0) {
            *slot = run;
            count += 1;
        }
        Ok(count)
    }
}

type Tables = Arc<HeapTables>;
type Space = Ioas<Own<Tables>>;
type Unit = Arc<SoftwareUnit<Tables, Reach>>;

/// A guest with two address spaces, each with a device.
struct Machine {
    host: Arc<Host>,
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
    tables: Tables,
    spaces: [Arc<Mutex<Space>>; 2],
    units: [Unit; 2],
    balloon: BalloonDma,
}

impl Machine {
    fn new() -> Self {
        let host = Host::new();
        let ledger = Ledger::new("a counter", Some(PAGES * PAGE), 0);
        let memory = Memory::new(Arc::new(GuestMemory(host.clone())), &ledger);
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let mut balloon = BalloonDma::new();
        balloon.add_memory(GUEST, memory.clone());
        let config = Config {
            flush_timeout: Duration::from_secs(60),
            ..Config::default()
        };
        let make = |(format, at): (FormatId, u64)| {
            let unit =
                SoftwareUnit::with_config(tables.clone(), Reach(host.clone()), config.clone());
            let unit = Arc::new(unit);
            let sizes = PageSizes::from_bits(u64::MAX);
            let table = AnyTable::new(format, 4, sizes, tables.clone()).unwrap();
            let mut space = Ioas::new(DomainId(1), table);
            space.attach(unit.clone(), DEVICE).unwrap();
            let whole = Span::new(0, PAGES * PAGE);
            space.map(at, &memory, whole, Prot::RW, &mut ()).unwrap();
            (Arc::new(Mutex::new(space)), unit)
        };
        let made = [(FormatId::VtdSs, GUEST), (FormatId::AmdV1, SECOND)].map(make);
        let [(first, one), (second, two)] = made;
        balloon.add_space(first.clone());
        balloon.add_space(second.clone());
        assert!(balloon.attached());
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

    fn release(&mut self, runs: &[Span]) -> Vec<(Span, Reason)> {
        let mut told = Vec::new();
        self.balloon
            .release(runs, &mut |span, reason| told.push((span, reason)));
        told
    }

    fn restore(&mut self, runs: &[Span]) -> Vec<(Span, Reason)> {
        let mut told = Vec::new();
        self.balloon
            .restore(runs, &mut |span, reason| told.push((span, reason)));
        told
    }

    fn ports(&self) -> [Port<Tables, Reach>; 2] {
        self.units.each_ref().map(|unit| unit.port(DEVICE))
    }

    fn discard(&self, runs: &[Span]) {
        for run in runs {
            for page in 0..run.len / PAGE {
                self.host.discard((run.start - GUEST) / PAGE + page);
            }
        }
    }

    fn end(self) {
        let Self {
            spaces, balloon, ..
        } = self;
        drop(balloon);
        for space in spaces {
            let space = Arc::into_inner(space).unwrap().into_inner().unwrap();
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

const fn pages(first: u64, len: u64) -> Span {
    Span::new(GUEST + first * PAGE, len * PAGE)
}

/// Where the address space `n` has what the guest has at `guest`.
const fn seen(n: usize, guest: u64) -> u64 {
    match n {
        0 => guest,
        _ => guest - GUEST + SECOND,
    }
}

/// A generator of numbers that are the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % end
    }

    /// Runs in order that leave the last of each sixteen pages alone.
    fn runs(&mut self) -> Vec<Span> {
        let mut groups: Vec<u64> = (0..=self.below(3))
            .map(|_| self.below(PAGES / EVERY))
            .collect();
        groups.sort_unstable();
        groups.dedup();
        let run = |group| {
            let first = self.below(EVERY - 1);
            pages(group * EVERY + first, 1 + self.below(EVERY - 1 - first))
        };
        groups.into_iter().map(run).collect()
    }
}

/// What a device and the guest do not agree on.
#[derive(Debug)]
struct Stale {
    _round: u64,
}

/// Pages go through the balloon `rounds` times, and devices use them right after. `first` says whether
/// devices let go before memory is discarded.
fn rounds(machine: &mut Machine, rounds: u64, first: bool) -> Result<u64, Stale> {
    let stop = AtomicBool::new(false);
    let around = AtomicU64::new(0);
    let [one, two] = machine.ports();
    thread::scope(|scope| {
        // Devices of both address spaces, in the pages that never go: each has its own half of these.
        for (n, mut port) in [one, two].into_iter().enumerate() {
            let (stop, around) = (&stop, &around);
            scope.spawn(move || {
                let mut numbers = Numbers(0x9e37_79b9 + n as u64);
                while !stop.load(Ordering::Relaxed) {
                    let group = 2 * numbers.below(PAGES / EVERY / 2) + n as u64;
                    let guest = GUEST + (group * EVERY + EVERY - 1) * PAGE + 8 * numbers.below(512);
                    let value = numbers.below(u64::MAX) + 1;
                    port.write(seen(n, guest), &[value]).unwrap();
                    let mut word = [0];
                    port.read(seen(n, guest), &mut word).unwrap();
                    assert_eq!(word, [value], "{guest:#x}");
                    // Not to keep the processors from whom all is about.
                    if around.fetch_add(1, Ordering::Relaxed) % 16 == 0 {
                        thread::sleep(Duration::from_micros(50));
                    }
                }
            });
        }
        let mut ports = machine.ports();
        let mut numbers = Numbers(0x1234_5678_9abc_def1);
        let mut checked = 0;
        let mut result = Ok(());
        for round in 0..rounds {
            let runs = numbers.runs();
            // The devices have used it before: units know where it was.
            for run in &runs {
                for (n, port) in ports.iter_mut().enumerate() {
                    port.write(seen(n, run.start), &[round]).unwrap();
                }
            }
            if first {
                assert_eq!(machine.release(&runs), []);
                for (n, port) in ports.iter_mut().enumerate() {
                    assert!(port.read(seen(n, runs[0].start), &mut [0]).is_err());
                }
            }
            machine.discard(&runs);
            if first {
                // What is charged for it is there.
                assert!(machine.ledger.charge(1).is_err());
                assert_eq!(machine.restore(&runs), []);
            }
            for run in &runs {
                for guest in [run.start, run.last() - 7] {
                    for (n, port) in ports.iter_mut().enumerate() {
                        let value = (round + 1) << 8 | n as u64;
                        machine.host.word(guest).store(value, Ordering::Relaxed);
                        let mut word = [0];
                        port.read(seen(n, guest), &mut word).unwrap();
                        let to_device = word == [value];
                        port.write(seen(n, guest), &[!value]).unwrap();
                        let back = machine.host.word(guest).load(Ordering::Relaxed);
                        if !to_device || back != !value {
                            result = Err(Stale { _round: round });
                        }
                        checked += 2;
                    }
                }
            }
            if result.is_err() {
                break;
            }
            if round % 256 == 0 {
                let before = around.load(Ordering::Relaxed);
                while around.load(Ordering::Relaxed) < before + 16 {
                    thread::yield_now();
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        result.map(|()| checked)
    })
}

#[test]
fn ten_thousand_pages_that_come_back_are_seen_by_devices_at_once() {
    let mut machine = Machine::new();
    let checked = rounds(&mut machine, 10_000, true).unwrap();
    assert!(checked >= 80_000, "{checked}");
    machine.end();
}

#[test]
fn without_devices_first_the_checker_sees_stale_memory() {
    let mut machine = Machine::new();
    assert!(rounds(&mut machine, 10_000, false).is_err());
    machine.end();
}

#[test]
fn what_somebody_else_pins_is_kept_in_all_address_spaces() {
    let mut machine = Machine::new();
    let held = machine.spaces[1].lock().unwrap().pin(
        Span::new(SECOND + 20 * PAGE, 2 * PAGE),
        Prot::READ,
        WhenUnmapped::Keeps,
    );
    // In runs that begin before, go over it, and lie elsewhere.
    let runs = [pages(0, 4), pages(18, 10), pages(500, 524)];
    let told = machine.release(&runs);
    assert_eq!(told, [(runs[1], Reason::PinnedElsewhere)]);
    let [mut one, mut two] = machine.ports();
    let mut word = [0];
    for (run, there) in runs.iter().zip([false, true, false]) {
        assert_eq!(one.read(run.start, &mut word).is_ok(), there, "{run}");
        assert_eq!(
            two.read(seen(1, run.start), &mut word).is_ok(),
            there,
            "{run}"
        );
    }
    drop(held);
    // A third address space, of which the balloon does not know.
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, machine.tables.clone()).unwrap();
    let mut third = Ioas::new(DomainId(1), table);
    let part = Span::new(100 * PAGE, 2 * PAGE);
    third
        .map(0, &machine.memory, part, Prot::RW, &mut ())
        .unwrap();
    let told = machine.release(&[pages(90, 20)]);
    assert_eq!(told, [(pages(100, 2), Reason::PinnedElsewhere)]);
    assert!(one.read(GUEST + 100 * PAGE, &mut word).is_ok());
    assert!(one.read(GUEST + 99 * PAGE, &mut word).is_err());
    third.close().unwrap();
    assert_eq!(machine.restore(&[pages(0, PAGES)]), []);
    machine.end();
}

#[test]
fn a_pin_that_fails_is_told_and_tried_again() {
    let mut machine = Machine::new();
    let runs = [pages(3, 5), pages(40, 8)];
    assert_eq!(machine.release(&runs), []);
    machine.discard(&runs);
    machine.host.refuses.store(true, Ordering::Relaxed);
    assert_eq!(machine.restore(&runs), [(runs[0], Reason::Kernel(14))]);
    let [mut one, mut two] = machine.ports();
    let mut word = [0];
    // The first address space has asked first.
    assert!(one.read(runs[0].start, &mut word).is_err());
    assert!(two.read(seen(1, runs[0].start), &mut word).is_ok());
    assert!(one.read(runs[1].start, &mut word).is_ok());
    assert_eq!(machine.restore(&runs), []);
    assert!(one.read(runs[0].start, &mut word).is_ok());
    machine.end();
}

#[test]
fn what_is_no_memory_of_devices_is_nobody_s_business() {
    let mut machine = Machine::new();
    let beyond = Span::new(GUEST + PAGES * PAGE, 1 << 20);
    assert_eq!(machine.release(&[Span::new(0, PAGE), beyond]), []);
    assert_eq!(machine.restore(&[Span::new(0, PAGE), beyond]), []);
    assert!(!BalloonDma::new().attached());
    // A part of the guest's memory that only one device sees, at two addresses.
    let part = pages(8, 8);
    let mut first = machine.spaces[0].lock().unwrap();
    first.unmap(pages(0, PAGES), &mut ()).unwrap();
    let half = Span::new(0, PAGES * PAGE / 2);
    for at in [GUEST, GUEST << 1] {
        first
            .map(at, &machine.memory, half, Prot::RW, &mut ())
            .unwrap();
    }
    drop(first);
    assert_eq!(machine.release(&[part]), []);
    assert_eq!(
        machine.memory.first_held(Span::new(8 * PAGE, 8 * PAGE)),
        None
    );
    let mut one = machine.units[0].port(DEVICE);
    for at in [GUEST, GUEST << 1] {
        assert!(one.read(at + 7 * PAGE, &mut [0]).is_ok());
        assert!(one.read(at + 8 * PAGE, &mut [0]).is_err());
    }
    assert_eq!(machine.restore(&[part]), []);
    let mut first = machine.spaces[0].lock().unwrap();
    first
        .unmap(Span::new(GUEST << 1, half.len), &mut ())
        .unwrap();
    drop(first);
    machine.end();
}
