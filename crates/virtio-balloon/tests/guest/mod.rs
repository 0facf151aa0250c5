//! A guest in front of the device: memory with a hole, rings, and seams that record their calls,
//! in one order.

#![allow(dead_code, reason = "no suite uses all of it")]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use runs::{GuestAddr, Span};
use virtio_balloon::device::{
    BalloonDevice, BalloonEvent, BalloonMonitor, BalloonSettings, Bulk, Discarder, Drained, Hint,
    NotDiscarded, QueueError, regions,
};
use virtio_balloon::{
    BitmapRecords, Features, GuestPage, KeepReason, LePfns, MemoryMap, MessageFormat,
    MessageSource, Part, Queue, Refusals, Region, Releaser, Stats, WIRE_PAGE,
};
use virtio_queue::{Queue as VirtQueue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Two regions of 16 MiB with a hole of the same size between.
pub const LOW: Span<GuestAddr> = Span::new(0, 16 << 20);
pub const HIGH: Span<GuestAddr> = Span::new(32 << 20, 16 << 20);
/// Where pages for the balloon begin: rings and buffers lie below.
pub const FREE: u64 = 4 << 20;
const BUFFERS: u64 = 1 << 20;
const BUFFERS_END: u64 = FREE;

/// Descriptors of each ring.
pub const SIZE: u16 = 256;
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Call of a seam, in order over all of them.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    Release(Vec<Span<GuestAddr>>),
    Restore(Vec<Span<GuestAddr>>),
    Discard(Vec<Span<GuestAddr>>),
    Hinted(Vec<Span<GuestAddr>>),
    ConfigChanged,
    Event(BalloonEvent),
    Stats(Box<Stats>, bool),
}

/// State that the seams share.
#[derive(Debug, Default)]
pub struct Notes {
    pub acts: Vec<Act>,
    /// Parts that devices do not let go of.
    pub kept: Vec<Span<GuestAddr>>,
    /// Parts that devices cannot be given.
    pub lost: Vec<Span<GuestAddr>>,
    /// Parts that the machine does not take.
    pub stuck: Vec<Span<GuestAddr>>,
    /// Numbers of regions whose backing keeps what is discarded.
    pub keeping: Vec<usize>,
    /// True if there are devices.
    pub attached: bool,
    /// True if hints are discarded.
    pub discard_hints: bool,
    /// The index of the used ring that is looked at with each act, and what it was then.
    pub watch: Option<u64>,
    pub used: Vec<u16>,
}

/// All three seams.
#[derive(Clone, Debug)]
pub struct Seams {
    pub notes: Rc<RefCell<Notes>>,
    memory: GuestMemoryMmap,
}

impl Seams {
    fn note(&self, act: Act) {
        let mut notes = self.notes.borrow_mut();
        if let Some(address) = notes.watch {
            let used = self.memory.load(GuestAddress(address), Ordering::Acquire);
            notes.used.push(used.unwrap());
        }
        notes.acts.push(act);
    }
}

/// Parts of ascending parts that meet any of these runs.
fn meeting(map: MemoryMap<'_>, parts: &[Part], runs: &[Span<GuestAddr>]) -> Vec<Part> {
    let mut meeting = Vec::new();
    for run in runs {
        map.resolve(*run, &mut Refusals::new(), |run| {
            meeting.extend(parts.iter().filter_map(|part| part.intersection(&run)));
        });
    }
    meeting.sort();
    meeting
}

/// As guest addresses.
fn runs(map: MemoryMap<'_>, parts: &[Part]) -> Vec<Span<GuestAddr>> {
    parts.iter().map(|part| map.run(part)).collect()
}

impl Releaser for Seams {
    fn attached(&self) -> bool {
        self.notes.borrow().attached
    }

    fn release(
        &mut self,
        map: MemoryMap<'_>,
        parts: &[Part],
        kept: &mut dyn FnMut(Part, KeepReason),
    ) {
        self.note(Act::Release(runs(map, parts)));
        let parts = meeting(map, parts, &self.notes.borrow().kept);
        parts
            .into_iter()
            .for_each(|part| kept(part, KeepReason::PinnedElsewhere));
    }

    fn held(&self, map: MemoryMap<'_>, parts: &[Part], held: &mut dyn FnMut(Part, KeepReason)) {
        let parts = meeting(map, parts, &self.notes.borrow().kept);
        parts
            .into_iter()
            .for_each(|part| held(part, KeepReason::MappedByGuest));
    }

    fn restore(
        &mut self,
        map: MemoryMap<'_>,
        parts: &[Part],
        failed: &mut dyn FnMut(Part, KeepReason),
    ) {
        self.note(Act::Restore(runs(map, parts)));
        let parts = meeting(map, parts, &self.notes.borrow().lost);
        parts
            .into_iter()
            .for_each(|part| failed(part, KeepReason::Limit));
    }
}

impl Discarder for Seams {
    fn discard(
        &mut self,
        map: MemoryMap<'_>,
        parts: &[Part],
        failed: &mut dyn FnMut(Part, NotDiscarded),
    ) -> u64 {
        let runs = runs(map, parts);
        self.note(Act::Discard(runs.clone()));
        for pair in runs.windows(2) {
            assert!(pair[0].last() < pair[1].start, "{runs:?}");
        }
        for part in parts {
            let guest = map.region(part).unwrap().guest;
            assert!(guest.covers(&map.run(part)), "{part:?} leaves {guest}");
        }
        let stuck = meeting(map, parts, &self.notes.borrow().stuck);
        let keeping = self.notes.borrow().keeping.clone();
        let mut bytes = 0;
        for (run, part) in runs.iter().zip(parts) {
            assert!(LOW.covers(run) || HIGH.covers(run), "{run} is in no region");
            assert!(run.is_aligned(WIRE_PAGE) && !run.is_empty(), "{run}");
            for page in (run.start..=run.last()).step_by(WIRE_PAGE as usize) {
                if keeping.contains(&part.region) {
                    bytes += WIRE_PAGE;
                } else if !stuck.iter().any(|part| map.run(part).contains(page)) {
                    self.memory
                        .write_slice(&[0; WIRE_PAGE as usize], GuestAddress(page))
                        .unwrap();
                    bytes += WIRE_PAGE;
                }
            }
        }
        // In no particular order.
        stuck
            .into_iter()
            .rev()
            .for_each(|part| failed(part, NotDiscarded::Kernel(16)));
        bytes
    }

    fn gives_zeros(&self, _: MemoryMap<'_>, region: usize) -> bool {
        !self.notes.borrow().keeping.contains(&region)
    }
}

impl BalloonMonitor for Seams {
    fn config_changed(&mut self) {
        self.note(Act::ConfigChanged);
    }

    fn event(&mut self, event: BalloonEvent) {
        self.note(Act::Event(event));
    }

    fn stats(&mut self, stats: &Stats, asked: bool) {
        self.note(Act::Stats(Box::new(*stats), asked));
    }

    fn hinted(&mut self, runs: &[Span<GuestAddr>]) -> Hint {
        self.note(Act::Hinted(runs.to_vec()));
        if self.notes.borrow().discard_hints {
            Hint::Discard
        } else {
            Hint::Noted
        }
    }
}

/// A ring, from the driver's side.
#[derive(Debug)]
pub struct Ring {
    pub queue: VirtQueue,
    pub base: u64,
    next: u16,
    available: u16,
    seen: u16,
}

impl Ring {
    fn new(at: u64) -> Self {
        let base = 0x1_0000 + at * 0x1_0000;
        let mut queue = VirtQueue::new(SIZE).unwrap();
        let mut ring = Self {
            queue: VirtQueue::new(SIZE).unwrap(),
            base,
            next: 0,
            available: 0,
            seen: 0,
        };
        queue.set_size(SIZE);
        queue.set_desc_table_address(Some(base as u32), Some(0));
        queue.set_avail_ring_address(Some(ring.avail() as u32), Some(0));
        queue.set_used_ring_address(Some(ring.used() as u32), Some(0));
        queue.set_ready(true);
        ring.queue = queue;
        ring
    }

    pub fn avail(&self) -> u64 {
        self.base + 0x4000
    }

    pub fn used(&self) -> u64 {
        self.base + 0x8000
    }
}

/// A buffer of a chain: address, bytes, whether the device may write.
pub type Buffer = (u64, u32, bool);

/// Pages behind [`FREE`].
pub fn pages(first: u64, pages: u64) -> Span<GuestAddr> {
    Span::new(FREE + first * WIRE_PAGE, pages * WIRE_PAGE)
}

pub fn pfn(page: u64) -> u64 {
    FREE / WIRE_PAGE + page
}

pub fn in_bulk() -> BalloonSettings {
    BalloonSettings {
        bulk: Some(Bulk::default()),
        ..BalloonSettings::default()
    }
}

pub fn bulk_messages(runs: &[Span<GuestAddr>]) -> Vec<Vec<u8>> {
    let mut source = MessageSource::new(runs.iter().copied(), GuestPage::SIZE_4K);
    let mut message = vec![0; 4096];
    let mut all = Vec::new();
    loop {
        let used = BitmapRecords.encode(&mut source, &mut message).unwrap();
        if used == 0 {
            return all;
        }
        all.push(message[..used].to_vec());
    }
}

/// Sends runs in bulk. Returns the first descriptor of the last message.
pub fn send_bulk(guest: &mut Guest, queue: Queue, runs: &[Span<GuestAddr>]) -> u16 {
    let messages = bulk_messages(runs).into_iter();
    messages
        .map(|message| guest.send(queue, &message))
        .last()
        .unwrap()
}

pub fn command(guest: &mut Guest, id: u32) {
    guest.send(Queue::FreePage, &id.to_le_bytes());
}

pub fn hint(guest: &mut Guest, block: u64) -> Span<GuestAddr> {
    let run = Span::new(FREE + block * (4 << 20), 2 << 20);
    guest.chain(Queue::FreePage, &[(run.start, run.len as u32, true)]);
    run
}

/// Guest and device.
pub struct Guest {
    pub memory: GuestMemoryMmap,
    pub device: BalloonDevice<Seams, Seams, Seams>,
    pub notes: Rc<RefCell<Notes>>,
    pub rings: [Ring; 5],
    buffers: u64,
}

pub const fn at(queue: Queue) -> usize {
    match queue {
        Queue::Inflate => 0,
        Queue::Deflate => 1,
        Queue::Stats => 2,
        Queue::FreePage => 3,
        Queue::Reporting => 4,
    }
}

/// Guest memory, and its regions on pages of 4 KiB.
pub fn memory() -> GuestMemoryMmap {
    let ranges = [LOW, HIGH].map(|region| (GuestAddress(region.start), region.len as usize));
    GuestMemoryMmap::from_ranges(&ranges).unwrap()
}

impl Guest {
    /// All that is offered is negotiated.
    pub fn new(settings: BalloonSettings) -> Self {
        let mut guest = Self::fresh(settings, WIRE_PAGE);
        guest.device.negotiate(guest.device.features()).unwrap();
        guest
    }

    /// All that is offered but these.
    pub fn without(settings: BalloonSettings, features: Features) -> Self {
        let mut guest = Self::fresh(settings, WIRE_PAGE);
        let offered = guest.device.features();
        guest.device.negotiate(offered.without(features)).unwrap();
        guest
    }

    /// Nothing is negotiated; memory is backed by pages of this size.
    pub fn fresh(settings: BalloonSettings, page: u64) -> Self {
        let memory = memory();
        let regions: Vec<Region> = regions(&memory, page);
        let notes = Rc::new(RefCell::new(Notes::default()));
        let seams = Seams {
            notes: notes.clone(),
            memory: memory.clone(),
        };
        let device =
            BalloonDevice::new(settings, regions, seams.clone(), seams.clone(), seams).unwrap();
        Self {
            memory,
            device,
            notes,
            rings: [0, 1, 2, 3, 4].map(Ring::new),
            buffers: BUFFERS,
        }
    }

    /// Bytes in a buffer of the guest.
    pub fn buffer(&mut self, bytes: &[u8]) -> u64 {
        let len = (bytes.len() as u64).next_multiple_of(16);
        if self.buffers + len > BUFFERS_END {
            self.buffers = BUFFERS;
        }
        let address = self.buffers;
        self.buffers += len;
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .unwrap();
        address
    }

    /// Writes a descriptor.
    pub fn descriptor(&self, table: u64, nr: u16, buffer: (u64, u32), flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&buffer.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&buffer.1.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let address = table + 16 * u64::from(nr);
        self.memory
            .write_slice(&bytes, GuestAddress(address))
            .unwrap();
    }

    /// Makes a chain of these buffers available; returns its first descriptor.
    pub fn chain(&mut self, queue: Queue, buffers: &[Buffer]) -> u16 {
        let ring = &mut self.rings[at(queue)];
        let head = ring.next % SIZE;
        let base = ring.base;
        ring.next = ring.next.wrapping_add(buffers.len() as u16);
        for (nr, &(address, len, writable)) in (0u16..).zip(buffers) {
            let place = (head + nr) % SIZE;
            let more = usize::from(nr) + 1 < buffers.len();
            let flags = u16::from(more) * NEXT + u16::from(writable) * WRITE;
            let next = (place + 1) % SIZE;
            self.descriptor(base, place, (address, len), flags, next);
        }
        self.offer(queue, head);
        head
    }

    /// Makes a descriptor available.
    pub fn offer(&mut self, queue: Queue, head: u16) {
        let ring = &mut self.rings[at(queue)];
        let place = ring.avail() + 4 + 2 * u64::from(ring.available % SIZE);
        ring.available = ring.available.wrapping_add(1);
        let (avail, index) = (ring.avail(), ring.available);
        self.memory.write_obj(head, GuestAddress(place)).unwrap();
        self.memory
            .store(index, GuestAddress(avail + 2), Ordering::Release)
            .unwrap();
    }

    /// A message of one buffer that the device reads.
    pub fn send(&mut self, queue: Queue, message: &[u8]) -> u16 {
        let address = self.buffer(message);
        self.chain(queue, &[(address, message.len() as u32, false)])
    }

    /// A message of page numbers.
    pub fn pfns(&mut self, queue: Queue, pfns: impl IntoIterator<Item = u64>) -> u16 {
        let message: Vec<u8> = pfns
            .into_iter()
            .flat_map(|pfn| (pfn as u32).to_le_bytes())
            .collect();
        self.send(queue, &message)
    }

    /// Messages of runs as page numbers.
    pub fn runs(&mut self, queue: Queue, runs: &[Span<GuestAddr>]) {
        let mut source = MessageSource::new(runs.iter().copied(), GuestPage::SIZE_4K);
        let mut message = [0; 1024];
        loop {
            let used = LePfns.encode(&mut source, &mut message).unwrap();
            if used == 0 {
                return;
            }
            self.send(queue, &message[..used]);
        }
    }

    pub fn try_drain(&mut self, queue: Queue) -> Result<Drained, QueueError> {
        let ring = &mut self.rings[at(queue)].queue;
        self.device.drain(queue, ring, &self.memory)
    }

    pub fn drain(&mut self, queue: Queue) -> Drained {
        self.try_drain(queue).unwrap()
    }

    pub fn request_stats(&mut self) -> Result<bool, QueueError> {
        let ring = &mut self.rings[at(Queue::Stats)].queue;
        self.device.request_stats(ring, &self.memory)
    }

    /// A message of page numbers with a bitmap of so many bytes behind it, all 0xa5. Returns its first descriptor, and
    /// the bitmap's address.
    pub fn asking(&mut self, pfns: impl IntoIterator<Item = u64>, bytes: usize) -> (u16, u64) {
        let message: Vec<u8> = pfns
            .into_iter()
            .flat_map(|pfn| (pfn as u32).to_le_bytes())
            .collect();
        let numbers = (self.buffer(&message), message.len() as u32, false);
        let bitmap = self.buffer(&vec![0xa5; bytes]);
        let head = self.chain(Queue::Inflate, &[numbers, (bitmap, bytes as u32, true)]);
        (head, bitmap)
    }

    /// Bytes of the guest's memory.
    pub fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        self.memory
            .read_slice(&mut found, GuestAddress(address))
            .unwrap();
        found
    }

    /// The chains that came back since the last look.
    pub fn used(&mut self, queue: Queue) -> Vec<u16> {
        let used = self.written(queue).into_iter();
        used.map(|(head, bytes)| {
            assert_eq!(bytes, 0, "the device writes to no buffer");
            head
        })
        .collect()
    }

    /// The chains that came back since the last look, and the bytes that the device has written to each.
    pub fn written(&mut self, queue: Queue) -> Vec<(u16, u32)> {
        let ring = &mut self.rings[at(queue)];
        let used = ring.used();
        let index: u16 = self
            .memory
            .load(GuestAddress(used + 2), Ordering::Acquire)
            .unwrap();
        let mut written = Vec::new();
        while ring.seen != index {
            let place = used + 4 + 8 * u64::from(ring.seen % SIZE);
            let entry: [u32; 2] = [
                self.memory.read_obj(GuestAddress(place)).unwrap(),
                self.memory.read_obj(GuestAddress(place + 4)).unwrap(),
            ];
            written.push((entry[0] as u16, entry[1]));
            ring.seen = ring.seen.wrapping_add(1);
        }
        written
    }

    /// Looks at this used ring with every act from now on.
    pub fn watch(&mut self, queue: Queue) {
        self.notes.borrow_mut().watch = Some(self.rings[at(queue)].used() + 2);
    }

    /// Takes the calls since the last look.
    pub fn acts(&mut self) -> Vec<Act> {
        let mut notes = self.notes.borrow_mut();
        notes.used.clear();
        std::mem::take(&mut notes.acts)
    }

    /// The runs that were discarded since the last look, one call of the seam in each.
    pub fn discards(&mut self) -> Vec<Vec<Span<GuestAddr>>> {
        let acts = self.acts().into_iter();
        acts.filter_map(|act| match act {
            Act::Discard(runs) => Some(runs),
            _ => None,
        })
        .collect()
    }

    /// The events since the last look.
    pub fn events(&mut self) -> Vec<BalloonEvent> {
        let acts = self.acts().into_iter();
        acts.filter_map(|act| match act {
            Act::Event(event) => Some(event),
            _ => None,
        })
        .collect()
    }

    /// Writes a word to a page.
    pub fn mark(&self, address: u64, word: u64) {
        self.memory.write_obj(word, GuestAddress(address)).unwrap();
    }

    pub fn word(&self, address: u64) -> u64 {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }
}
