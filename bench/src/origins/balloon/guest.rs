//! The guest's end: what the driver needs from where it runs, and what drivers do page by page.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use runs::{GuestAddr, Span};
use virtio_balloon::driver::{BufferMemory, GuestPages, QueueAddresses, Transport};
use virtio_balloon::{Features, GuestPage, WIRE_PAGE};

use super::host::Host;
use super::{BLOCK, clock};
use crate::rings::{NoMemory, Rings};

/// Description of a failed step.
type Failed = &'static str;

/// How long an answer of the host is waited for: it discards memory before it answers.
pub(super) const PATIENCE: Duration = Duration::from_secs(100);

/// The way to the host, which is woken through a channel, as a guest's is by the hypervisor.
pub(super) struct Wires {
    host: Arc<Mutex<Host>>,
    kick: Sender<u16>,
    answered: Receiver<()>,
    begun: Instant,
}

impl Wires {
    pub(super) fn new(host: Arc<Mutex<Host>>, kick: Sender<u16>, answered: Receiver<()>) -> Self {
        let begun = Instant::now();
        Self {
            host,
            kick,
            answered,
            begun,
        }
    }

    fn host(&self) -> MutexGuard<'_, Host> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
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
        Ok(SIZE)
    }

    fn enable_queue(&mut self, queue: u16, size: u16, at: QueueAddresses) -> Result<(), Failed> {
        self.host().enable(queue, size, at)
    }

    fn notify(&mut self, queue: u16) -> Result<(), Failed> {
        self.kick.send(queue).map_err(|_| "the host is gone")
    }

    fn wait(&mut self, _queue: u16, most: Duration) -> Result<(), Failed> {
        // The ring shows if it has answered.
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

/// Memory for rings and messages.
pub(super) type Shared = Rings<Failed>;

impl From<NoMemory> for Failed {
    fn from(_: NoMemory) -> Self {
        "no memory"
    }
}

/// The guest's allocator: a list of blocks of 2 MiB in any order, of which all is free, or one page of so many.
pub(super) struct Blocks {
    memory: Span<GuestAddr>,
    every: u64,
    free: Vec<u64>,
    pub(super) taken: Vec<u64>,
    /// Rest of the block that pages are taken from.
    open: Span<GuestAddr>,
}

impl Blocks {
    pub(super) fn new(memory: Span<GuestAddr>, every: u64) -> Self {
        let blocks = (0..memory.len / BLOCK).map(|nr| memory.start + nr * BLOCK);
        let mut free: Vec<u64> = blocks.collect();
        fastrand::Rng::with_seed(1).shuffle(&mut free);
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

    fn span(&self) -> Span<GuestAddr> {
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

    fn give_back(&mut self, _run: Span<GuestAddr>) {}
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
/// is waited for. Returns the seconds of taking and of telling.
pub(super) fn page_by_page(
    wires: &Wires,
    shared: &Shared,
    blocks: &mut Blocks,
    bytes: u64,
) -> Result<(f64, f64), Failed> {
    wires.host().enable(0, SIZE, RING)?;
    let (mut taking, mut telling) = (0.0, 0.0);
    let pages = (bytes / WIRE_PAGE) as usize;
    let mut held: Vec<u64> = Vec::with_capacity(pages);
    let mut messages = 0u16;
    while held.len() < pages {
        let (begun, told) = (clock(), held.len());
        for _ in 0..PAGES {
            held.push(blocks.take(WIRE_PAGE).ok_or("the guest has no page")?);
        }
        let taken = clock();
        taking += taken - begun;
        let mut message = [[0; 4]; PAGES];
        for (place, page) in message.iter_mut().zip(held.iter().skip(told)) {
            *place = ((page / WIRE_PAGE) as u32).to_le_bytes();
        }
        shared.write(MESSAGE, message.as_flattened())?;
        let descriptor = u128::from(MESSAGE) | (4 * PAGES as u128) << 64;
        let slot = u64::from(messages % SIZE);
        shared.write(RING.descriptors, &descriptor.to_le_bytes())?;
        shared.write(RING.available + 4 + 2 * slot, &[0, 0])?;
        messages = messages.wrapping_add(1);
        shared.store(RING.available + 2, messages)?;
        shared.fence();
        wires.kick.send(0).map_err(|_| "the host is gone")?;
        while shared.load(RING.used + 2)? != messages {
            let answer = wires.answered.recv_timeout(PATIENCE);
            answer.map_err(|_| "the host does not answer")?;
        }
        telling += clock() - taken;
    }
    Ok((taking, telling))
}
