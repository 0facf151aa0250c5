//! Devices that no good host has: a driver in a kernel must outlive them, with all of the guest's memory.

use std::io::{self, Read as _};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, anyhow, ensure};
use dmaspace::vhost::{Backend, BackendMemory, Link, Vring};
use vhost_user_backend::VringT as _;
use virtio_queue::QueueT as _;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

use crate::checks::{self, MIB};
use crate::guest::{Attached, Driver, Guest, Parts, until};
use crate::page_by_page::accept;

/// Fault of the device.
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
    /// Nothing.
    None,
    /// It answers no message of deflated pages. A slow one is right, so it answers in the end.
    Slow,
}

impl Wrong {
    /// Kinds that are wrong for good.
    const ALL: [Self; 7] = [
        Self::Silent,
        Self::Twice,
        Self::Other,
        Self::Config,
        Self::Hints,
        Self::Format,
        Self::Bytes,
    ];

    /// True if messages arrive and are answered.
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

/// The queue of deflated pages.
const DEFLATE: u16 = 1;
/// Bytes of a page of the standard.
const PAGE: u64 = 4096;
/// Content of pages whose message was not answered.
const MARK: u64 = 0x6d61_726b_6564_2121;

/// The device.
struct Hostile {
    state: Mutex<State>,
    target: AtomicU32,
    /// Looks at the configuration.
    looks: AtomicU32,
    messages: AtomicU32,
}

struct State {
    wrong: Wrong,
    memory: Option<BackendMemory>,
    /// Messages that wait for their answers, and the addresses of their pages.
    waiting: Vec<(Vring, u16)>,
    marked: Vec<u64>,
}

impl Hostile {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_target(&self, mib: u32, link: &Link<Self>) -> anyhow::Result<()> {
        self.target.store(mib << 8, Ordering::Relaxed);
        link.config_changed()?;
        Ok(())
    }

    fn drain(&self, number: u16, vring: &Vring) -> anyhow::Result<()> {
        let mut state = self.state();
        let Some(memory) = state.memory.as_ref().map(|memory| memory.memory()) else {
            return Ok(());
        };
        let mut locked = vring.get_mut();
        let queue = locked.get_queue_mut();
        while let Some(chain) = queue.pop_descriptor_chain(memory.clone()) {
            let head = chain.head_index();
            self.messages.fetch_add(1, Ordering::Relaxed);
            match state.wrong {
                Wrong::Silent => {}
                Wrong::Slow if number == DEFLATE => {
                    let mut message = chain.reader(&*memory)?;
                    let mut page = [0; 4];
                    while message.read_exact(&mut page).is_ok() {
                        let address = u64::from(u32::from_le_bytes(page)) * PAGE;
                        memory.write_obj(MARK, GuestAddress(address))?;
                        state.marked.push(address);
                    }
                    state.waiting.push((vring.clone(), head));
                }
                Wrong::Other => queue.add_used(&*memory, (head + 5) % queue.size(), 0)?,
                Wrong::Twice => {
                    queue.add_used(&*memory, head, 1 << 30)?;
                    queue.add_used(&*memory, head, 0)?;
                }
                // A length that no buffer has.
                _ => queue.add_used(&*memory, head, u32::MAX)?,
            }
        }
        if state.wrong != Wrong::Silent {
            locked.signal_used_queue()?;
        }
        Ok(())
    }

    /// Pages of messages without an answer that have another content than they were given.
    fn used_pages(&self) -> anyhow::Result<Vec<u64>> {
        let state = self.state();
        let memory = state.memory.as_ref().context("no memory")?.memory();
        let mut used = Vec::new();
        for address in &state.marked {
            let content: u64 = memory.read_obj(GuestAddress(*address))?;
            if content != MARK {
                used.push(*address);
            }
        }
        Ok(used)
    }

    /// Answers the messages that wait, and from now on all of them.
    fn answer(&self) -> anyhow::Result<()> {
        let mut state = self.state();
        state.wrong = Wrong::None;
        let memory = state.memory.as_ref().context("no memory")?.memory();
        for (vring, head) in state.waiting.drain(..) {
            let mut vring = vring.get_mut();
            vring.get_queue_mut().add_used(&*memory, head, 0)?;
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
        let wrong = self.state().wrong;
        let (target, command) = match wrong {
            Wrong::Config => (look.wrapping_mul(0x9e37_79b9) % (64 << 8), look % 5),
            // The first command (5.5.6.5); 0 would end it.
            Wrong::Hints => (0, 2),
            _ => (self.target.load(Ordering::Relaxed), 0),
        };
        let words = [target, 0, command, 0].into_iter().chain(wrong.bulk());
        let space: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        let from = space.get(offset as usize..).unwrap_or_default();
        let mut bytes = vec![0; size as usize];
        for (to, from) in bytes.iter_mut().zip(from) {
            *to = *from;
        }
        bytes
    }

    fn write_config(&self, _offset: u32, _bytes: &[u8]) {}

    fn memory(&self, memory: &BackendMemory) -> io::Result<()> {
        self.state().memory = Some(memory.clone());
        Ok(())
    }

    fn kicked(&self, queue: u16, vrings: &[Vring]) {
        let Some(vring) = vrings.get(usize::from(queue)) else {
            return;
        };
        if let Err(error) = self.drain(queue, vring) {
            eprintln!("a hostile device: {error:#}");
        }
    }

    fn woken(&self, _vrings: &[Vring]) {}

    fn stopped(&self, _queue: u16) {}

    fn reset(&self) {}
}

/// Our driver against each of these devices: the guest lives, and has all of its memory when the driver is unloaded.
/// Then each driver against a slow one.
///
/// # Errors
///
/// When it does not.
pub fn outlive(parts: &Parts) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket)?;
    let device = Arc::new(Hostile {
        state: Mutex::new(State {
            wrong: Wrong::None,
            memory: None,
            waiting: Vec::new(),
            marked: Vec::new(),
        }),
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
    let guest = &mut guest?;
    checks::prepare(guest)?;
    let free = checks::free(guest)?;
    for wrong in Wrong::ALL {
        let start = Instant::now();
        device.state().wrong = wrong;
        outlives(guest, &device, &link, free).with_context(|| format!("{wrong:?}"))?;
        println!("  {wrong:?}, {:.1} s", start.elapsed().as_secs_f64());
    }
    for driver in [Driver::Stock, Driver::Pages] {
        let start = Instant::now();
        waits(guest, &device, &link, driver).with_context(|| driver.name())?;
        has_its_memory(guest, driver, free)?;
        let took = start.elapsed().as_secs_f64();
        println!("  {} waits for the device, {took:.1} s", driver.name());
    }
    guest.complaints()
}

fn outlives(
    guest: &mut Guest,
    device: &Hostile,
    link: &Link<Hostile>,
    free: u64,
) -> anyhow::Result<()> {
    let wrong = device.state().wrong;
    device.messages.store(0, Ordering::Relaxed);
    checks::load(guest, Driver::Bulk)?;
    device.set_target(64, link)?;
    until("a message", || {
        Ok((device.messages.load(Ordering::Relaxed) > 0).then_some(()))
    })?;
    if wrong == Wrong::Config {
        for _ in 0..100 {
            link.config_changed()?;
            guest.run("true")?;
        }
    }
    // In bulk there are few messages.
    if wrong.serves() && wrong != Wrong::Bytes {
        until("messages that were answered", || {
            Ok((device.messages.load(Ordering::Relaxed) > 8).then_some(()))
        })?;
    }
    if wrong == Wrong::Hints {
        pages_that_were_hinted_are_used(guest, free)?;
    }
    has_its_memory(guest, Driver::Bulk, free)?;
    // Not notified of: without a driver QEMU fails on that.
    device.target.store(0, Ordering::Relaxed);
    Ok(())
}

/// The guest has all of its memory when the driver is unloaded.
fn has_its_memory(guest: &mut Guest, driver: Driver, free: u64) -> anyhow::Result<()> {
    checks::unload(guest, driver)?;
    let held = checks::count_of(guest, "nr_balloon_pages")?;
    let back = checks::free(guest)?;
    ensure!(
        held == 0 && back + 8 * MIB >= free,
        "of {free} bytes free in the guest {back} are, and {held} pages in no balloon"
    );
    Ok(())
}

/// No page that is deflated is used before the device has answered (`VIRTIO_BALLOON_F_MUST_TELL_HOST`; VIRTIO 1.3,
/// 5.5.6.1), while the guest uses all of its free memory.
fn waits(
    guest: &mut Guest,
    device: &Hostile,
    link: &Link<Hostile>,
    driver: Driver,
) -> anyhow::Result<()> {
    const MIB_OF_BALLOON: u32 = 32;
    {
        let mut state = device.state();
        state.wrong = Wrong::Slow;
        state.marked.clear();
    }
    checks::load(guest, driver)?;
    device.set_target(MIB_OF_BALLOON, link)?;
    let pages = u64::from(MIB_OF_BALLOON) << 8;
    until("a full balloon", || {
        Ok((checks::count_of(guest, "nr_balloon_pages")? == pages).then_some(()))
    })?;
    device.set_target(0, link)?;
    until("a message of deflated pages", || {
        Ok((!device.state().waiting.is_empty()).then_some(()))
    })?;
    checks::touch(guest)?;
    let used = device.used_pages()?;
    ensure!(used.is_empty(), "used before the answer: {used:x?}");
    device.answer()?;
    until("an empty balloon", || {
        Ok((checks::count_of(guest, "nr_balloon_pages")? == 0).then_some(()))
    })
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
