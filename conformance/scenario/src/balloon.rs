//! A balloon in one process: the guest's driver, the device, and the rings between them.
//!
//! The driver notifies, and the device drains the queue at once: both are on the caller's thread, devices
//! are beside it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hostmem::{Discard, DiscardError};
use runs::{GuestAddr, Iova, Span};
use virtio_balloon::device::{
    Bulk, Counters, Device, Discarder, GuestDiscard, NotDiscarded, QueueError, Settings, SetupError,
};
use virtio_balloon::driver::{self, GuestPages, QueueAddresses, Transport};
use virtio_balloon::{BulkBit, Driver, Features, GuestPage, MemoryMap, Region, Wait};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;

use dmaspace::balloon::{BalloonDma, RegionMemory};
use ioas::Ioas;
use lab::rings::{NoMemory, Rings};

use crate::world::{Part, dma};

/// The largest block of the guest's allocator.
const BLOCK: u64 = 2 << 20;
/// Entries of a queue.
const QUEUE: u16 = 256;

/// Why the balloon did not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BalloonError {
    /// The memory cannot be discarded.
    #[error("the memory cannot be discarded")]
    Discard(#[from] DiscardError),
    /// There is no memory for rings.
    #[error("there is no memory for the balloon's rings")]
    Rings(#[source] vm_memory::mmap::FromRangesError),
    /// The device cannot be made.
    #[error("the balloon's device cannot be made")]
    Setup(#[from] SetupError),
    /// Driver and device do not get along.
    #[error("the balloon's driver")]
    Driver(#[from] driver::Error<WireError>),
    /// The balloon took, or gave back, less than it should.
    #[error("the balloon has {held} bytes, and was to have {wanted}")]
    Held {
        /// What it has.
        held: u64,
        /// What it was to have.
        wanted: u64,
    },
}

/// Why the driver does not reach the device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// There is no memory at an address that the driver uses.
    #[error("rings and messages have no memory at {address:#x}")]
    Memory {
        /// The guest's address.
        address: u64,
    },
    /// A queue does not work.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A queue is not what virtio allows.
    #[error("a queue of {size} entries")]
    Size {
        /// Entries.
        size: u16,
    },
}

/// The runs that were discarded, by guest address.
type Discarded = Arc<Mutex<Vec<Span<GuestAddr>>>>;

/// Gives memory of the regions back to the machine, and notes it.
struct Noted {
    discard: GuestDiscard,
    done: Discarded,
}

impl Discarder<RegionMemory> for Noted {
    fn discard(
        &mut self,
        map: MemoryMap<'_, RegionMemory>,
        parts: &[virtio_balloon::Part],
        failed: &mut dyn FnMut(virtio_balloon::Part, NotDiscarded),
    ) -> u64 {
        let mut kept = Vec::new();
        let bytes = self.discard.discard(map, parts, &mut |part, why| {
            kept.push(part);
            failed(part, why);
        });
        let stays =
            |part: &virtio_balloon::Part| kept.iter().any(|kept| kept.intersection(part).is_some());
        let gone = parts.iter().filter(|part| !stays(part));
        let mut noted = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        noted.extend(gone.map(|part| map.run(part)));
        bytes
    }
}

/// The device behind its rings, as the driver reaches it.
struct Wires {
    device: Device<Noted, BalloonDma, (), RegionMemory>,
    rings: Vec<(u16, Queue)>,
    memory: GuestMemoryMmap,
    begun: Instant,
}

impl Transport for Wires {
    type Error = WireError;

    fn reset(&mut self) -> Result<(), WireError> {
        self.rings.clear();
        // What devices lack is told by the balloon's counters.
        let _ = self.device.reset();
        Ok(())
    }

    fn offered(&mut self) -> Result<Features, WireError> {
        Ok(self.device.features())
    }

    fn accept(&mut self, features: Features) -> Result<bool, WireError> {
        Ok(self.device.negotiate(features).is_ok())
    }

    fn begin(&mut self) -> Result<(), WireError> {
        Ok(())
    }

    fn broken(&mut self) -> Result<bool, WireError> {
        Ok(self.device.needs_reset())
    }

    fn read_config(&mut self, offset: u16, bytes: &mut [u8]) -> Result<(), WireError> {
        self.device.read_config(offset.into(), bytes);
        Ok(())
    }

    fn generation(&mut self) -> Result<u32, WireError> {
        // Nothing in it changes but by the driver, or between its calls.
        Ok(0)
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), WireError> {
        self.device
            .write_config(offset.into(), &value.to_le_bytes());
        Ok(())
    }

    fn queue_size(&mut self, _queue: u16) -> Result<u16, WireError> {
        Ok(QUEUE)
    }

    fn enable_queue(&mut self, queue: u16, size: u16, at: QueueAddresses) -> Result<(), WireError> {
        let mut ring = Queue::new(size).map_err(|_| WireError::Size { size })?;
        // They lie in the first MiB.
        ring.set_desc_table_address(Some(at.descriptors as u32), Some(0));
        ring.set_avail_ring_address(Some(at.available as u32), Some(0));
        ring.set_used_ring_address(Some(at.used as u32), Some(0));
        ring.set_ready(true);
        self.rings.push((queue, ring));
        Ok(())
    }

    fn notify(&mut self, number: u16) -> Result<(), WireError> {
        let ring = self.rings.iter_mut().find(|(queue, _)| *queue == number);
        if let (Some((_, ring)), Some(queue)) = (ring, self.device.queue(number)) {
            while self.device.drain(queue, ring, &self.memory)?.more {}
        }
        Ok(())
    }

    fn wait(&mut self, queue: u16, _most: Duration) -> Result<(), WireError> {
        // What is held is tried again.
        self.notify(queue)
    }

    fn now(&mut self) -> Duration {
        self.begun.elapsed()
    }

    fn pause(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}

impl From<NoMemory> for WireError {
    fn from(NoMemory { address }: NoMemory) -> Self {
        Self::Memory { address }
    }
}

/// The guest's allocator: of each part of its memory all but the first eighth is free.
struct Free {
    span: Span<GuestAddr>,
    free: Vec<Span<GuestAddr>>,
}

impl GuestPages for Free {
    fn page(&self) -> GuestPage {
        GuestPage::SIZE_4K
    }

    fn span(&self) -> Span<GuestAddr> {
        self.span
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let fits = |free: &&mut Span<GuestAddr>| free.start % bytes == 0 && free.len >= bytes;
        let free = self.free.iter_mut().find(fits)?;
        let at = free.start;
        *free = Span::new(at + bytes, free.len - bytes);
        Some(at)
    }

    fn give_back(&mut self, run: Span<GuestAddr>) {
        self.free.push(run);
    }
}

/// What goes into the balloon: 7 of 8 parts of each part of the memory.
pub(crate) fn seven_of_eight(parts: &[Part]) -> Vec<Span<GuestAddr>> {
    let inside = |part: &Part| {
        let eighth = part.guest.len / 8;
        Span::new(part.guest.start + eighth, part.guest.len - eighth)
    };
    parts.iter().map(inside).collect()
}

/// Where devices have them: each part of the memory is mapped at its guest addresses.
pub(crate) fn seen_by_devices(spans: &[Span<GuestAddr>]) -> Vec<Span<Iova>> {
    spans.iter().map(|span| span.cast()).collect()
}

/// A balloon of a guest with devices.
pub(crate) struct Balloon {
    driver: Driver<Wires, Rings<WireError>, Free>,
    done: Discarded,
    wanted: u64,
}

impl fmt::Debug for Balloon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Balloon").finish_non_exhaustive()
    }
}

impl Balloon {
    /// An empty one, over memory that `space` maps for devices.
    pub(crate) fn new(parts: &[Part], space: Arc<Ioas>) -> Result<Self, BalloonError> {
        let done = Discarded::default();
        let noted = Noted {
            discard: GuestDiscard::new(),
            done: Arc::clone(&done),
        };
        let mut regions = Vec::new();
        let free = seven_of_eight(parts);
        for part in parts {
            let discard = Discard::new(Arc::clone(&part.mapping))?;
            regions.push(Region {
                guest: part.guest,
                page: discard.page(),
                memory: RegionMemory {
                    memory: Arc::clone(&part.memory),
                    discard,
                },
            });
        }
        let settings = Settings {
            bulk: Some(Bulk::default()),
            ..Settings::default()
        };
        let mut device = Device::new(settings, regions, noted, dma(&space), ())?;
        let wanted = free.iter().map(|span| span.len).sum();
        device.set_target(wanted);
        let rings = Rings::new().map_err(BalloonError::Rings)?;
        let wires = Wires {
            device,
            rings: Vec::new(),
            memory: rings.memory().clone(),
            begun: Instant::now(),
        };
        let guest = parts.iter().map(|part| part.guest);
        let first = guest.clone().map(|guest| guest.start).min().unwrap_or(0);
        let bytes = guest.map(|guest| guest.len).sum();
        let span = Span::new(first, bytes);
        let pages = Free { span, free };
        let settings = driver::Settings {
            bulk: Some(BulkBit::DEFAULT),
            wait: Wait::Sleep {
                most: Duration::from_secs(10),
            },
            queue_size: QUEUE,
            block: BLOCK,
            tries: 1,
            pause: Duration::ZERO,
            ..driver::Settings::default()
        };
        let driver = Driver::new(wires, rings, pages, settings)?;
        Ok(Self {
            driver,
            done,
            wanted,
        })
    }

    /// Takes 7 of 8 parts. Returns what was discarded.
    pub(crate) fn inflate(&mut self) -> Result<Vec<Span<GuestAddr>>, BalloonError> {
        self.driver.inflate(self.wanted)?;
        self.check(self.wanted)?;
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *done))
    }

    /// Gives all of it back.
    pub(crate) fn deflate(&mut self) -> Result<(), BalloonError> {
        self.driver.deflate(0)?;
        self.check(0)
    }

    fn check(&self, wanted: u64) -> Result<(), BalloonError> {
        let held = self.driver.held();
        match held == wanted {
            true => Ok(()),
            false => Err(BalloonError::Held { held, wanted }),
        }
    }

    /// What the device has done.
    pub(crate) fn counters(&mut self) -> Counters {
        self.driver.transport().device.counters()
    }
}
