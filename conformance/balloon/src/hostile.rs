//! Devices that no good host has: a driver in a kernel must outlive them, with all of the guest's memory.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{anyhow, ensure};
use dmaspace_vhost::{Backend, Link, Memory, Vring};
use vhost_user_backend::VringT as _;
use virtio_queue::QueueT as _;
use vm_memory::GuestAddressSpace as _;

use crate::checks::{self, MIB};
use crate::guest::{Attached, Driver, Guest, Parts, until};
use crate::page_by_page::accept;

/// What is wrong with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// It never answers a message.
    Silent,
    /// It answers each message twice.
    Twice,
    /// It answers to a message that it was not given.
    Other,
    /// Each look at its configuration shows something else, and it notifies of changes all the time.
    Config,
    /// It wants hints at free pages, and keeps what it was hinted at for good.
    Hints,
    /// Its messages in bulk have a format that is none, and no bytes.
    Format,
    /// Its messages in bulk have more bytes than there are.
    Bytes,
}

impl Wrong {
    /// All.
    pub const ALL: [Self; 7] = [
        Self::Silent,
        Self::Twice,
        Self::Other,
        Self::Config,
        Self::Hints,
        Self::Format,
        Self::Bytes,
    ];

    /// Whether messages arrive and are answered.
    const fn serves(self) -> bool {
        matches!(
            self,
            Self::Config | Self::Hints | Self::Format | Self::Bytes
        )
    }

    /// Words 4 and 5 of the configuration space: those of messages in bulk.
    const fn bulk(self) -> [u32; 2] {
        match self {
            Self::Format => [77, 0],
            Self::Bytes => [1, u32::MAX],
            _ => [1, 32 << 10],
        }
    }
}

/// The device.
#[derive(Debug)]
struct Hostile {
    wrong: Wrong,
    memory: Mutex<Option<Memory>>,
    target: AtomicU32,
    /// Looks at the configuration.
    looks: AtomicU32,
    messages: AtomicU32,
}

impl Hostile {
    fn drain(&self, vring: &Vring) -> anyhow::Result<()> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = memory.as_ref().map(|memory| memory.memory()) else {
            return Ok(());
        };
        let mut vring = vring.get_mut();
        let queue = vring.get_queue_mut();
        while let Some(chain) = queue.pop_descriptor_chain(memory.clone()) {
            let head = chain.head_index();
            self.messages.fetch_add(1, Ordering::Relaxed);
            match self.wrong {
                Wrong::Silent => {}
                Wrong::Other => queue.add_used(&*memory, (head + 5) % queue.size(), 0)?,
                Wrong::Twice => {
                    queue.add_used(&*memory, head, 1 << 30)?;
                    queue.add_used(&*memory, head, 0)?;
                }
                // A length that no buffer has.
                _ => queue.add_used(&*memory, head, u32::MAX)?,
            }
        }
        if self.wrong != Wrong::Silent {
            vring.signal_used_queue()?;
        }
        Ok(())
    }
}

impl Backend for Hostile {
    const QUEUES: u16 = 5;

    fn features(&self) -> u64 {
        // All of the standard, VIRTIO_F_VERSION_1, and messages in bulk.
        0x3f | 1 << 32 | 1 << 23
    }

    fn negotiated(&self, _features: u64) {}

    fn read_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let look = self.looks.fetch_add(1, Ordering::Relaxed);
        let (target, command) = match self.wrong {
            Wrong::Config => (look.wrapping_mul(0x9e37_79b9) % (64 << 8), look % 5),
            // The first command (5.5.6.5); 0 would end it.
            Wrong::Hints => (0, 2),
            _ => (self.target.load(Ordering::Relaxed), 0),
        };
        let words = [target, 0, command, 0].into_iter().chain(self.wrong.bulk());
        let space: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        let from = space.get(offset as usize..).unwrap_or_default();
        let mut bytes = vec![0; size as usize];
        for (to, from) in bytes.iter_mut().zip(from) {
            *to = *from;
        }
        bytes
    }

    fn write_config(&self, _offset: u32, _bytes: &[u8]) {}

    fn memory(&self, memory: &Memory) -> io::Result<()> {
        let mut kept = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = Some(memory.clone());
        Ok(())
    }

    fn kicked(&self, queue: u16, vrings: &[Vring]) {
        let Some(vring) = vrings.get(usize::from(queue)) else {
            return;
        };
        if let Err(error) = self.drain(vring) {
            eprintln!("a hostile device: {error:#}");
        }
    }

    fn woken(&self, _vrings: &[Vring]) {}

    fn stopped(&self, _queue: u16) {}

    fn reset(&self) {}
}

/// Our driver against this device: the guest lives, and has all of its memory when the driver is unloaded.
///
/// # Errors
///
/// When it does not.
pub fn outlive(parts: &Parts, wrong: Wrong) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket)?;
    let device = Arc::new(Hostile {
        wrong,
        memory: Mutex::default(),
        target: AtomicU32::new(0),
        looks: AtomicU32::new(0),
        messages: AtomicU32::new(0),
    });
    // The guest waits for answers while it boots.
    let (guest, link) = thread::scope(|scope| {
        let link = scope.spawn(|| anyhow::Ok(Link::new(accept(&listener)?, device.clone())?));
        (
            Guest::boot(parts, 192, Attached::VhostUser(&socket), &[]),
            link.join(),
        )
    });
    let link = link.map_err(|_| anyhow!("serving the guest panicked"))??;
    let mut guest = guest?;
    let free = checks::free(&mut guest)?;
    checks::prepare(&mut guest, Driver::Bulk)?;
    device.target.store(64 << 8, Ordering::Relaxed);
    link.config_changed()?;
    until("a message", || {
        Ok((device.messages.load(Ordering::Relaxed) > 0).then_some(()))
    })?;
    if wrong == Wrong::Config {
        for _ in 0..500 {
            link.config_changed()?;
            guest.run("true")?;
        }
    }
    if wrong.serves() {
        until("messages that were answered", || {
            Ok((device.messages.load(Ordering::Relaxed) > 8).then_some(()))
        })
        .or_else(|error| match wrong {
            // In bulk there are few.
            Wrong::Bytes => Ok(()),
            _ => Err(error),
        })?;
    }
    if wrong == Wrong::Hints {
        pages_that_were_hinted_are_used(&mut guest, free)?;
    }
    guest.run("rmmod /dmaspace_balloon.ko")?;
    let held = checks::count_of(&mut guest, "nr_balloon_pages")?;
    let back = checks::free(&mut guest)?;
    ensure!(
        held == 0 && back + 8 * MIB >= free,
        "of {free} bytes free in the guest {back} are, and {held} pages in no balloon"
    );
    guest.complaints()
}

/// Where nearly all of the memory that was `free` has been hinted at, what wants memory has the shrinker give it back.
fn pages_that_were_hinted_are_used(guest: &mut Guest, free: u64) -> anyhow::Result<()> {
    until("hints at most of the free memory", || {
        Ok((checks::free(guest)? < free / 4).then_some(()))
    })?;
    let killed = checks::count_of(guest, "oom_kill")?;
    let mib = free / 2 / MIB;
    guest.run(&format!(
        "dd if=/dev/zero of=/tmp/fill bs=1M count={mib} 2> /dev/null && rm /tmp/fill"
    ))?;
    let killed = checks::count_of(guest, "oom_kill")? - killed;
    ensure!(killed == 0, "{killed} processes were killed");
    Ok(())
}
