//! The guest's end: what the driver needs from where it runs, and what drivers do page by page.

use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use runs::Span;
use virtio_balloon::driver::{GuestPages, Memory, QueueAddresses, Transport};
use virtio_balloon::{Features, GuestPage, WIRE_PAGE};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::BLOCK;
use crate::host::Host;
use crate::measure::clock;

type Failed = &'static str;

/// The way to the host, which is woken through a channel, as the guest is.
pub(crate) struct Wires {
    pub(crate) host: Arc<Mutex<Host>>,
    kick: Sender<u16>,
    answered: Receiver<()>,
    begun: Instant,
}

impl Wires {
    pub(crate) fn new(host: Arc<Mutex<Host>>, kick: Sender<u16>, answered: Receiver<()>) -> Self {
        let begun = Instant::now();
        Self {
            host,
            kick,
            answered,
            begun,
        }
    }

    fn host(&self) -> MutexGuard<'_, Host> {
        self.host.lock().unwrap()
    }
}

impl Transport for Wires {
    type Error = Failed;

    fn reset(&mut self) -> Result<(), Failed> {
        Ok(())
    }

    fn offered(&mut self) -> Result<Features, Failed> {
        Ok(self.host().device.features())
    }

    fn accept(&mut self, features: Features) -> Result<bool, Failed> {
        Ok(self.host().device.negotiate(features).is_ok())
    }

    fn begin(&mut self) -> Result<(), Failed> {
        Ok(())
    }

    fn broken(&mut self) -> Result<bool, Failed> {
        Ok(self.host().device.needs_reset())
    }

    fn read_config(&mut self, offset: u16, bytes: &mut [u8]) -> Result<(), Failed> {
        self.host().device.read_config(offset.into(), bytes);
        Ok(())
    }

    fn generation(&mut self) -> Result<u32, Failed> {
        // Nothing in it changes but by the driver.
        Ok(0)
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), Failed> {
        let bytes = value.to_le_bytes();
        self.host().device.write_config(offset.into(), &bytes);
        Ok(())
    }

    fn queue_size(&mut self, _queue: u16) -> Result<u16, Failed> {
        Ok(256)
    }

    fn enable_queue(&mut self, queue: u16, size: u16, at: QueueAddresses) -> Result<(), Failed> {
        self.host().enable(queue, size, at);
        Ok(())
    }

    fn notify(&mut self, queue: u16) -> Result<(), Failed> {
        self.kick.send(queue).map_err(|_| "the host is gone")
    }

    fn wait(&mut self, _queue: u16, most: Duration) -> Result<(), Failed> {
        // Whether it has answered, the ring says.
        let _ = self.answered.recv_timeout(most);
        Ok(())
    }

    fn now(&mut self) -> Duration {
        self.begun.elapsed()
    }

    fn pause(&mut self, time: Duration) {
        thread::sleep(time);
    }
}

/// Memory for rings and messages, given out once.
pub(crate) struct Shared {
    memory: GuestMemoryMmap,
    next: u64,
}

impl Shared {
    pub(crate) fn new(memory: GuestMemoryMmap) -> Self {
        Self {
            memory,
            next: WIRE_PAGE,
        }
    }
}

impl Memory for Shared {
    type Error = Failed;
    type Words = Vec<u64>;
    type Bytes = Vec<u8>;

    fn words(&mut self, count: usize) -> Option<Vec<u64>> {
        Some(vec![0; count])
    }

    fn bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        Some(vec![0; count])
    }

    fn allocate(&mut self, len: u64) -> Option<u64> {
        let at = self.next;
        self.next += len.next_multiple_of(WIRE_PAGE);
        Some(at)
    }

    fn free(&mut self, _memory: Span) {}

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Failed> {
        let read = self.memory.read_slice(bytes, GuestAddress(address));
        read.map_err(|_| "no memory")
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Failed> {
        let written = self.memory.write_slice(bytes, GuestAddress(address));
        written.map_err(|_| "no memory")
    }

    fn load(&self, address: u64) -> Result<u16, Failed> {
        let value: Result<u16, _> = self.memory.load(GuestAddress(address), Ordering::Acquire);
        value.map(u16::from_le).map_err(|_| "no memory")
    }

    fn store(&self, address: u64, value: u16) -> Result<(), Failed> {
        let (address, value) = (GuestAddress(address), value.to_le());
        let stored = self.memory.store(value, address, Ordering::Release);
        stored.map_err(|_| "no memory")
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// The guest's allocator: a list of blocks of 2 MiB in any order, of which all is free, or every
/// second page.
pub(crate) struct Blocks {
    memory: Span,
    pub(crate) every: u64,
    free: Vec<u64>,
    pub(crate) taken: Vec<u64>,
    /// What is left of the block that pages are taken from.
    open: Span,
}

impl Blocks {
    pub(crate) fn new(memory: Span, every: u64) -> Self {
        let mut free: Vec<u64> = (0..memory.len / BLOCK)
            .map(|nr| memory.start + nr * BLOCK)
            .collect();
        // xorshift64
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for nr in (1..free.len()).rev() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            free.swap(nr, (state % (nr as u64 + 1)) as usize);
        }
        Self {
            memory,
            every,
            free,
            taken: Vec::new(),
            open: Span::new(0, 0),
        }
    }

    fn block(&mut self) -> Option<u64> {
        let block = self.free.pop()?;
        self.taken.push(block);
        Some(block)
    }
}

impl GuestPages for Blocks {
    fn page(&self) -> GuestPage {
        GuestPage::SIZE_4K
    }

    fn span(&self) -> Span {
        self.memory
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        if bytes == BLOCK && self.every == 1 {
            return self.block();
        }
        if bytes != WIRE_PAGE {
            return None;
        }
        if self.open.is_empty() {
            self.open = Span::new(self.block()?, BLOCK);
        }
        let page = self.open.start;
        let step = self.every * WIRE_PAGE;
        self.open = Span::new(page + step, self.open.len - step);
        Some(page)
    }

    fn give_back(&mut self, _run: Span) {}

    fn managed(&mut self, _bytes: i64) {}
}

/// Pages of a message.
const PAGES: usize = 256;
/// Where the message lies, and the ring: descriptors, available, used.
const MESSAGE: u64 = 0x1000;
const RING: QueueAddresses = QueueAddresses {
    descriptors: 0x2000,
    available: 0x3000,
    used: 0x4000,
};
const SIZE: u16 = 256;

/// As Linux does: 256 pages at a time are taken one by one, noted in a list, and named in a message, which
/// is waited for. Returns the seconds of taking and of telling, and the messages.
pub(crate) fn page_by_page(
    wires: &Wires,
    shared: &Shared,
    blocks: &mut Blocks,
    bytes: u64,
) -> (f64, f64, u64) {
    wires.host().enable(0, SIZE, RING);
    let (mut taking, mut telling) = (0.0, 0.0);
    let mut held: Vec<u64> = Vec::with_capacity((bytes / WIRE_PAGE) as usize);
    let mut messages = 0u16;
    let mut told = 0;
    let mut count = 0;
    while (held.len() as u64) < bytes / WIRE_PAGE {
        let begun = clock();
        for _ in 0..PAGES {
            held.push(blocks.take(WIRE_PAGE).unwrap());
        }
        let taken = clock();
        taking += taken - begun;
        let mut message = [[0; 4]; PAGES];
        for (place, page) in message.iter_mut().zip(&held[told..]) {
            *place = ((page / WIRE_PAGE) as u32).to_le_bytes();
        }
        told = held.len();
        shared.write(MESSAGE, message.as_flattened()).unwrap();
        let descriptor = u128::from(MESSAGE) | (4 * PAGES as u128) << 64;
        let slot = u64::from(messages % SIZE);
        let descriptor = descriptor.to_le_bytes();
        shared.write(RING.descriptors, &descriptor).unwrap();
        shared
            .write(RING.available + 4 + 2 * slot, &[0, 0])
            .unwrap();
        messages = messages.wrapping_add(1);
        count += 1;
        shared.store(RING.available + 2, messages).unwrap();
        shared.fence();
        wires.kick.send(0).unwrap();
        while shared.load(RING.used + 2).unwrap() != messages {
            wires.answered.recv().unwrap();
        }
        telling += clock() - taken;
    }
    (taking, telling, count)
}
