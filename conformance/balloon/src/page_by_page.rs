//! A balloon as monitors have it today: each page of 4 KiB that the driver names is given back by a
//! call of its own.
//!
//! It exists to be compared with, so it has what inflating takes and nothing else: two queues, no
//! statistics, no reporting. It goes through the same vhost-user layer as ours.

use std::io::{self, Read as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use dmaspace::vhost::{Backend, BackendMemory, Link, Vring};
use rustix::fs::{FallocateFlags, fallocate};
use vhost_user_backend::VringT as _;
use virtio_queue::QueueT as _;
use vm_memory::{
    GuestAddress, GuestAddressSpace as _, GuestMemoryBackend as _, GuestMemoryMmap,
    GuestMemoryRegion as _,
};

use crate::bench::Timed;
use crate::checks::Balloon;
use crate::guest::{Attached, Guest, Parts, until};

/// Unit of page numbers, in bytes.
const PAGE: u64 = 4096;
/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;
/// Bytes of the configuration space.
const CONFIG: usize = 16;

/// The device.
#[derive(Debug, Default)]
pub struct PageByPage {
    memory: Mutex<Option<BackendMemory>>,
    /// Pages that the balloon shall have, and that the driver says it has.
    target: AtomicU32,
    actual: AtomicU32,
    messages: AtomicU64,
    discarded: AtomicU64,
    clocks: Mutex<Clocks>,
}

/// When the target was set, until it is reached; how long that took; and the device's work.
#[derive(Debug, Default)]
struct Clocks {
    set: Option<Instant>,
    reached: Duration,
    busy: Duration,
    discarding: Duration,
}

/// The device and the front end that it serves.
pub struct Serving {
    device: Arc<PageByPage>,
    link: Link<PageByPage>,
}

impl PageByPage {
    /// Serves the guest of `mib` MiB that is booted against it.
    ///
    /// # Errors
    ///
    /// When it does not boot.
    pub fn boot(parts: &Parts, mib: u32) -> anyhow::Result<(Guest, Serving)> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket)?;
        // The guest waits for answers while it boots.
        let (guest, serving) = thread::scope(|scope| {
            let serving = scope.spawn(|| Self::serve(accept(&listener)?));
            (
                Guest::boot(parts, mib, Attached::VhostUser(&socket), &[]),
                serving.join(),
            )
        });
        let serving = serving.map_err(|_| anyhow!("serving the guest panicked"))?;
        Ok((guest?, serving?))
    }

    /// Serves a front end.
    ///
    /// # Errors
    ///
    /// When it cannot.
    fn serve(front: UnixStream) -> anyhow::Result<Serving> {
        let device = Arc::new(Self::default());
        let link = Link::new(front, device.clone())?;
        Ok(Serving { device, link })
    }

    /// Gives back every page that the messages of `queue` name, one by one.
    fn drain(&self, vring: &Vring, inflate: bool) -> anyhow::Result<()> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = memory.as_ref().map(|memory| memory.memory()) else {
            return Ok(());
        };
        let mut vring = vring.get_mut();
        let (begun, mut discarding) = (Instant::now(), Duration::ZERO);
        loop {
            let queue = vring.get_queue_mut();
            let Some(chain) = queue.pop_descriptor_chain(memory.clone()) else {
                break;
            };
            let head = chain.head_index();
            let mut message = chain.reader(&*memory)?;
            let mut number = [0; 4];
            while inflate && message.read_exact(&mut number).is_ok() {
                let begun = Instant::now();
                discard(&memory, u64::from(u32::from_le_bytes(number)) * PAGE)?;
                discarding += begun.elapsed();
                self.discarded.fetch_add(1, Ordering::Relaxed);
            }
            self.messages.fetch_add(1, Ordering::Relaxed);
            queue.add_used(&*memory, head, 0)?;
            vring.signal_used_queue()?;
        }
        let mut clocks = self.clocks.lock().unwrap_or_else(PoisonError::into_inner);
        clocks.busy += begun.elapsed();
        clocks.discarding += discarding;
        Ok(())
    }
}

/// Takes the page at `address` out of the file behind it.
fn discard(memory: &GuestMemoryMmap, address: u64) -> anyhow::Result<()> {
    let region = memory
        .find_region(GuestAddress(address))
        .context("a page outside the guest's memory")?;
    let file = region.file_offset().context("memory without a file")?;
    let at = file.start() + (address - region.start_addr().0);
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file.file(), how, at, PAGE)?)
}

impl Backend for PageByPage {
    const QUEUES: u16 = 5;

    fn features(&self) -> u64 {
        VERSION_1
    }

    fn negotiated(&self, _features: u64) {}

    fn read_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut space = [0; CONFIG];
        let fields = [&self.target, &self.actual].map(|field| field.load(Ordering::Relaxed));
        for (place, field) in space.chunks_exact_mut(4).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        let from = space.get(offset as usize..).unwrap_or_default();
        let mut bytes = vec![0; size as usize];
        bytes
            .iter_mut()
            .zip(from)
            .for_each(|(to, from)| *to = *from);
        bytes
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        if let (4, Ok(actual)) = (offset, bytes.try_into()) {
            let actual = u32::from_le_bytes(actual);
            self.actual.store(actual, Ordering::Relaxed);
            let mut clocks = self.clocks.lock().unwrap_or_else(PoisonError::into_inner);
            if actual == self.target.load(Ordering::Relaxed)
                && let Some(set) = clocks.set.take()
            {
                clocks.reached = set.elapsed();
            }
        }
    }

    fn memory(&self, memory: &BackendMemory) -> io::Result<()> {
        let mut kept = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = Some(memory.clone());
        Ok(())
    }

    fn kicked(&self, queue: u16, vrings: &[Vring]) {
        let Some(vring) = vrings.get(usize::from(queue)) else {
            return;
        };
        if let Err(error) = self.drain(vring, queue == 0) {
            eprintln!("page by page: {error:#}");
        }
    }

    fn woken(&self, _vrings: &[Vring]) {}

    fn stopped(&self, _queue: u16) {}

    fn reset(&self) {}
}

impl Serving {
    /// Messages that came, and pages that were given back.
    pub fn counts(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.device.messages), read(&self.device.discarded))
    }

    fn clocks(&self) -> MutexGuard<'_, Clocks> {
        let clocks = self.device.clocks.lock();
        clocks.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timed for Serving {
    fn reached(&mut self) -> anyhow::Result<Duration> {
        Ok(self.clocks().reached)
    }

    fn work(&mut self) -> anyhow::Result<(Duration, Duration, u64, u64)> {
        let ((messages, discards), clocks) = (self.counts(), self.clocks());
        Ok((clocks.busy, clocks.discarding, messages, discards))
    }
}

impl Balloon for Serving {
    fn set_target(&mut self, bytes: u64) -> anyhow::Result<()> {
        let pages = u32::try_from(bytes / PAGE).context("more than a balloon can hold")?;
        self.clocks().set = Some(Instant::now());
        self.device.target.store(pages, Ordering::Relaxed);
        let told = self.link.config_changed()?;
        ensure!(told, "the front end has given no channel");
        Ok(())
    }

    fn actual(&mut self) -> anyhow::Result<u64> {
        Ok(u64::from(self.device.actual.load(Ordering::Relaxed)) * PAGE)
    }
}

/// The next front end, if one comes.
pub(crate) fn accept(listener: &UnixListener) -> anyhow::Result<UnixStream> {
    listener.set_nonblocking(true)?;
    until("a guest that connects", || match listener.accept() {
        Ok((front, _)) => {
            front.set_nonblocking(false)?;
            Ok(Some(front))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.into()),
    })
}
