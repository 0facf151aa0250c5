//! A guest and a device, as plain as they can be, for the driver between them.
//!
//! The device reads the rings by the standard's words, decodes with the crate's formats, and keeps a
//! plain set of the pages that were told. The guest keeps a plain set of those that were taken, and
//! fails when a page comes back that the device still has.

mod seams;

pub(crate) use seams::FAULT;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use runs::{GuestAddr, Span};
use virtio_balloon::driver::{DriverSettings, QueueAddresses};
use virtio_balloon::{
    BalloonConfig, BalloonDriver, BitmapRecords, BulkBit, ByteOrder, Features, GuestPage, InitBit,
    LePfns, MessageFormat as _, Numbering, Queue, Refusals, Stats,
};

pub(crate) const PAGE: u64 = 4096;
/// Where the driver's own memory lies.
const ARENA: u64 = 1 << 40;
const ARENA_BYTES: usize = 1 << 20;
pub(crate) const INDIRECT: Features = Features(1 << 28);

/// Events, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Asked(u64),
    Message(Queue, Vec<Span<GuestAddr>>),
    Answered(Queue),
    GivenBack(Span<GuestAddr>),
    Paused(Duration),
    Actual(u32),
    Reset,
}

/// When the device answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    AtOnce,
    /// When it was waited for so often.
    Late(u32),
    Never,
    /// To this descriptor, so often.
    Wrong(u32, u16),
}

pub(crate) struct World {
    pub(crate) ram: Vec<u8>,
    bump: u64,
    pub(crate) live: BTreeMap<u64, u64>,
    /// How many more words, bytes and shared memory there are, in calls.
    pub(crate) words: usize,
    pub(crate) bytes: usize,
    pub(crate) shared: usize,
    /// There is memory in large pieces.
    pub(crate) large: bool,

    pub(crate) offered: Features,
    pub(crate) accepted: Option<Features>,
    pub(crate) refuses: bool,
    pub(crate) bulk: BulkBit,
    pub(crate) init: InitBit,
    /// Addresses of 4 KiB that the device cannot initialize.
    pub(crate) data: BTreeSet<u64>,
    /// The most bytes of a bitmap that the device says it has written.
    pub(crate) most_written: u32,
    /// Pages that the guest has been told are initialized.
    pub(crate) initialized: BTreeSet<u64>,
    pub(crate) numbering: Numbering,
    pub(crate) queue_size: u16,
    queues: BTreeMap<u16, (u16, QueueAddresses, u16)>,
    pub(crate) config: BalloonConfig,
    pub(crate) answers: Answers,
    waits: u32,
    pub(crate) broken: bool,
    unanswered: VecDeque<u16>,
    pub(crate) host: BTreeSet<u64>,
    pub(crate) twice: u64,
    pub(crate) stats: Option<Stats>,
    stats_kept: bool,
    pub(crate) hints: Vec<u32>,
    pub(crate) reported: Vec<Span<GuestAddr>>,
    pub(crate) messages: u64,
    pub(crate) most_bytes: usize,
    pub(crate) generation: u32,
    /// The command in the configuration changes to this after so many hinted blocks.
    pub(crate) stop_hints: Option<(usize, u32)>,

    pub(crate) page: GuestPage,
    pub(crate) span: Span<GuestAddr>,
    pub(crate) free: BTreeSet<u64>,
    pub(crate) taken: BTreeSet<u64>,
    pub(crate) managed: i64,
    pub(crate) now: Duration,
    /// So many calls of the transport and of shared memory, then one that fails.
    pub(crate) until_fault: Option<u64>,
    pub(crate) log: Vec<Event>,
}

#[derive(Clone)]
pub(crate) struct Handle(pub(crate) Rc<RefCell<World>>);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

pub(crate) type Faked = BalloonDriver<Handle, Handle, Handle>;

/// A guest of these free pages (numbers), and a device that offers everything but messages in bulk.
pub(crate) fn world(free: impl IntoIterator<Item = u64>) -> Handle {
    let free: BTreeSet<u64> = free.into_iter().map(|nr| nr * PAGE).collect();
    let end = free.last().map_or(PAGE, |last| last + PAGE);
    Handle(Rc::new(RefCell::new(World {
        ram: vec![0; ARENA_BYTES],
        bump: 0,
        live: BTreeMap::new(),
        words: usize::MAX,
        bytes: usize::MAX,
        shared: usize::MAX,
        large: true,
        offered: Features(0x3f).with(Features::VERSION_1).with(INDIRECT),
        accepted: None,
        refuses: false,
        bulk: BulkBit::DEFAULT,
        init: InitBit::new(7).unwrap(),
        data: BTreeSet::new(),
        most_written: u32::MAX,
        initialized: BTreeSet::new(),
        numbering: Numbering::Compressed,
        queue_size: 128,
        queues: BTreeMap::new(),
        config: BalloonConfig::default(),
        answers: Answers::AtOnce,
        waits: 0,
        broken: false,
        unanswered: VecDeque::new(),
        host: BTreeSet::new(),
        twice: 0,
        stats: None,
        stats_kept: false,
        hints: Vec::new(),
        reported: Vec::new(),
        messages: 0,
        most_bytes: 0,
        generation: 0,
        stop_hints: None,
        page: GuestPage::SIZE_4K,
        span: Span::new(0, end),
        free,
        taken: BTreeSet::new(),
        managed: 0,
        now: Duration::ZERO,
        until_fault: None,
        log: Vec::new(),
    })))
}

impl Handle {
    /// Offers messages in bulk.
    pub(crate) fn bulk(self) -> Self {
        self.with(|world| {
            world.offered = world.offered.with(world.bulk.feature());
            world.config.bulk_format = BalloonConfig::BITMAP_RECORDS;
            world.config.bulk_message_bytes = 32 << 10;
        });
        self
    }

    /// Offers bitmaps of what is initialized.
    pub(crate) fn init(self) -> Self {
        self.with(|world| world.offered = world.offered.with(world.init.feature()));
        self
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut World) -> R) -> R {
        f(&mut self.0.borrow_mut())
    }

    pub(crate) fn driver(&self, settings: DriverSettings) -> Faked {
        BalloonDriver::new(self.clone(), self.clone(), self.clone(), settings).unwrap()
    }

    /// The balloon's pages are the ones reported to the device, and no page is lost.
    pub(crate) fn agree(&self, driver: &Faked) {
        self.with(|world| {
            let host: BTreeSet<u64> = world.host.clone();
            assert_eq!(host, world.taken, "told and taken");
            assert_eq!(driver.held(), world.taken.len() as u64 * world.page.bytes());
            assert_eq!(world.twice, 0, "pages told twice");
        });
    }

    /// The driver is gone, and has left nothing.
    pub(crate) fn nothing_is_left(&self) {
        self.with(|world| {
            assert!(world.taken.is_empty(), "{:?}", world.taken);
            assert!(world.live.is_empty(), "{:?}", world.live);
            assert_eq!(world.managed, 0);
        });
    }

    pub(crate) fn log(&self) -> Vec<Event> {
        self.with(|world| std::mem::take(&mut world.log))
    }
}

impl World {
    fn bytes_at(&self, address: u64, len: usize) -> &[u8] {
        &self.ram[(address - ARENA) as usize..][..len]
    }

    fn word(&self, address: u64, len: usize) -> u64 {
        let mut word = [0; 8];
        word[..len].copy_from_slice(self.bytes_at(address, len));
        u64::from_le_bytes(word)
    }

    fn put(&mut self, address: u64, bytes: &[u8]) {
        self.ram[(address - ARENA) as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    /// (address, length, writable) of each part of the chain at `head`.
    fn chain(&self, descriptors: u64, size: u16, head: u16) -> Vec<(u64, u32, bool)> {
        let (mut table, mut count, mut nr) = (descriptors, u64::from(size), u64::from(head));
        let mut parts = Vec::new();
        loop {
            assert!(nr < count, "descriptor {nr} of {count}");
            assert!(
                parts.len() < usize::from(size),
                "a chain longer than its queue"
            );
            let at = table + 16 * nr;
            let (address, len) = (self.word(at, 8), self.word(at + 8, 4) as u32);
            let flags = self.word(at + 12, 2);
            if flags & 4 != 0 {
                assert!(self.accepted.unwrap().contains(INDIRECT));
                assert_eq!((table, flags), (descriptors, 4));
                (table, count, nr) = (address, u64::from(len) / 16, 0);
                continue;
            }
            parts.push((address, len, flags & 2 != 0));
            if flags & 1 == 0 {
                return parts;
            }
            nr = self.word(at + 14, 2);
        }
    }

    /// Does what waits in a queue, and answers.
    fn run(&mut self, number: u16) {
        let features = self.accepted.unwrap();
        let queue = Queue::of_number(number, features, self.numbering).unwrap();
        let (size, at, mut seen) = self.queues[&number];
        while self.word(at.available + 2, 2) as u16 != seen {
            let entry = at.available + 4 + 2 * u64::from(seen % size);
            let head = self.word(entry, 2) as u16;
            let parts = self.chain(at.descriptors, size, head);
            if queue == Queue::Stats && !self.stats_kept {
                self.take_stats(&parts);
                self.stats_kept = true;
                return;
            }
            self.stats_kept &= queue != Queue::Stats;
            let written = self.message(queue, &parts);
            let (id, times) = match self.answers {
                Answers::Wrong(id, times) => (id, times),
                _ => (u32::from(head), 1),
            };
            let used = at.used + 4 + 8 * u64::from(seen % size);
            self.put(used, &id.to_le_bytes());
            self.put(used + 4, &written.to_le_bytes());
            seen = seen.wrapping_add(times);
            self.put(at.used + 2, &seen.to_le_bytes());
            self.queues.insert(number, (size, at, seen));
            self.log.push(Event::Answered(queue));
            if times != 1 {
                return;
            }
        }
    }

    /// The device wants new statistics.
    pub(crate) fn ask_stats(&mut self) {
        let number = Queue::Stats.number(self.accepted.unwrap(), self.numbering);
        self.run(number.unwrap());
    }

    fn take_stats(&mut self, parts: &[(u64, u32, bool)]) {
        let [(address, len, false)] = parts else {
            panic!("{parts:?}")
        };
        let bytes = self.bytes_at(*address, *len as usize);
        let stats = Stats::decode(bytes, ByteOrder::Little, &mut Refusals::new());
        self.stats = Some(stats);
    }

    /// Returns the bytes that the device says it has written.
    fn message(&mut self, queue: Queue, parts: &[(u64, u32, bool)]) -> u32 {
        match queue {
            Queue::Inflate | Queue::Deflate => return self.pages(queue, parts),
            Queue::Stats => {}
            Queue::FreePage => match parts {
                [(address, 4, false)] => {
                    let id = self.word(*address, 4) as u32;
                    self.hints.push(id);
                    // As QEMU does: the id is shown until it was answered, and nothing is said then.
                    self.config.free_page_hint_cmd_id = 0;
                }
                [(address, len, true)] => {
                    self.reported.push(Span::new(*address, u64::from(*len)));
                    if let Some((blocks, command)) = self.stop_hints
                        && self.reported.len() == blocks
                    {
                        self.config.free_page_hint_cmd_id = command;
                        self.generation += 1;
                    }
                }
                _ => panic!("{parts:?}"),
            },
            Queue::Reporting => {
                for (address, len, writable) in parts {
                    assert!(writable);
                    self.reported.push(Span::new(*address, u64::from(*len)));
                }
                self.messages += 1;
            }
        }
        0
    }

    /// Writes a bit for each page number that is initialized; and then says how much of that is written.
    fn bitmap(&mut self, numbers: &[u8], bitmap: (u64, u32, bool)) -> u32 {
        let numbers = numbers.chunks_exact(4);
        let (address, len, writable) = bitmap;
        assert_eq!((len as usize, writable), (numbers.len().div_ceil(8), true));
        let mut bits = vec![0; len as usize];
        for (nr, number) in numbers.enumerate() {
            let page = u64::from(u32::from_le_bytes(number.try_into().unwrap())) * PAGE;
            bits[nr / 8] |= u8::from(!self.data.contains(&page)) << (nr % 8);
        }
        self.put(address, &bits);
        len.min(self.most_written)
    }

    fn pages(&mut self, queue: Queue, parts: &[(u64, u32, bool)]) -> u32 {
        let features = self.accepted.unwrap();
        let init = features.contains(self.init.feature()) && queue == Queue::Inflate;
        let (parts, behind) = parts.split_at(parts.len() - usize::from(init));
        let mut refusals = Refusals::new();
        let mut found = Vec::new();
        let mut message = Vec::new();
        for (address, len, writable) in parts {
            assert!(!writable);
            message.extend_from_slice(self.bytes_at(*address, *len as usize));
        }
        self.most_bytes = self.most_bytes.max(message.len());
        match features.contains(self.bulk.feature()) {
            true => BitmapRecords.decode(&message, &mut refusals, |run| found.push(run)),
            false => LePfns.decode(&message, &mut refusals, |run| found.push(run)),
        }
        assert_eq!(refusals.total(), 0, "{refusals:?}");
        for run in &found {
            assert!(run.is_aligned(self.page.bytes()), "{run}");
            for page in (run.start..run.start + run.len).step_by(self.page.bytes() as usize) {
                let new = match queue {
                    Queue::Inflate => self.host.insert(page),
                    _ => self.host.remove(&page),
                };
                self.twice += u64::from(!new);
            }
        }
        self.messages += 1;
        self.log.push(Event::Message(queue, found));
        let behind = behind.first();
        behind.map_or(0, |behind| self.bitmap(&message, *behind))
    }

    /// Answers all requests that are not answered yet.
    pub(crate) fn catch_up(&mut self) {
        self.answers = Answers::AtOnce;
        while let Some(number) = self.unanswered.pop_front() {
            self.run(number);
        }
    }
}

/// Runs of pages told on a queue, in the order of their messages.
pub(crate) fn told(log: &[Event], on: Queue) -> Vec<Span<GuestAddr>> {
    let runs = log.iter().filter_map(|event| match event {
        Event::Message(queue, runs) if *queue == on => Some(runs.clone()),
        _ => None,
    });
    runs.flatten().collect()
}
