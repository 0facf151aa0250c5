//! The balloon's device behind a front end: what is kept from one connection to the next.
//!
//! Front ends come and go; the device stays. The state that a front end finds depends on whether it
//! is the previous one:
//!
//! * its memory is the same, and inflateq stands somewhere: the guest went on meanwhile, and so does
//!   the device, with what was in the balloon and what it remembers of huge pages;
//! * its memory is another one, or inflateq stands at its beginning: another guest, or a driver that begins.
//!   The device is reset, and only the target stays, beside the value with which the driver fills its free
//!   pages: that was written before the driver could be told from the last one.
//!
//! A front end whose back end vanished resumes its rings where the driver last saw a message used.
//! The buffer for statistics, which the device holds as long as no statistics are asked for, is then available once
//! more, so the device lets go of it.
//!
//! The thread of the queues and the one of requests both come here; a lock lets them in one by one.

use std::borrow::Borrow;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use runs::{GuestAddr, Span};
use vhost_user_backend::VringT as _;
use virtio_balloon::device::{
    BalloonCounters, BalloonDevice, BalloonEvent, BalloonMonitor, BalloonSettings,
    BalloonSetupError, BalloonState, Discard, GuestDiscard, Hint, HintError, QueueError,
    StatsState,
};
use virtio_balloon::{Features, Queue, Region, Releaser, Stats, WIRE_PAGE};
use virtio_queue::QueueT as _;
use vm_memory::{
    GuestAddressSpace as _, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    GuestRegionMmap,
};

use super::event::BackendEvent;
use super::link::{Backend, BackendMemory};
use super::vring::Vring;

/// The queues that a balloon can have.
const QUEUES: usize = 5;

/// Events that wait to be told; what comes beyond is counted.
const MOST_EVENTS: usize = 256;

/// The offset of `poison_val` in the configuration space (VIRTIO 1.3, 5.5.4).
const POISON: u64 = 12;

/// Events of the device, until they are fetched.
#[derive(Debug, Default)]
pub(super) struct Reported {
    events: Vec<BackendEvent>,
    lost: u64,
    config_changed: bool,
    hints_ended: bool,
    /// When the target was set, until it is reached, and how long that took.
    target_set: Option<Instant>,
    reached: Duration,
}

impl Reported {
    pub(super) fn tell(&mut self, event: BackendEvent) {
        if self.events.len() < MOST_EVENTS {
            self.events.push(event);
        } else {
            self.lost += 1;
        }
    }
}

impl BalloonMonitor for Reported {
    fn config_changed(&mut self) {
        self.config_changed = true;
    }

    fn event(&mut self, event: BalloonEvent) {
        match event {
            // Reported by the job, at its own pace.
            BalloonEvent::Progress { target, actual } => {
                if let Some(set) = self.target_set.take_if(|_| actual == target) {
                    self.reached = set.elapsed();
                }
            }
            BalloonEvent::HintsBegin { id } => self.tell(BackendEvent::HintsBegin { id }),
            BalloonEvent::HintsEnd => self.hints_ended = true,
            BalloonEvent::NotDiscarded { run, cause } => self.tell(BackendEvent::NotDiscarded {
                address: run.start,
                bytes: run.len,
                cause: cause.to_string(),
            }),
            BalloonEvent::Kept { run, reason } => self.tell(BackendEvent::NotDiscarded {
                address: run.start,
                bytes: run.len,
                cause: reason.to_string(),
            }),
            // The others are of devices that reach all memory.
            _ => {}
        }
    }

    fn stats(&mut self, stats: &Stats, _asked: bool) {
        self.tell(BackendEvent::Stats(stats.into()));
    }

    fn hinted(&mut self, _runs: &[Span<GuestAddr>]) -> Hint {
        Hint::Noted
    }
}

/// State of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) target: u64,
    pub(super) actual: u64,
    /// Time to reach the last target that was reached.
    pub(super) reached: Duration,
    pub(super) counters: BalloonCounters,
    pub(super) refused: u64,
}

/// Identity of memory: of each region the file, by device and number, the offset in it, and the
/// guest's addresses.
type Identity = Vec<(u64, u64, u64, Span<GuestAddr>)>;

fn identity(memory: &GuestMemoryMmap) -> io::Result<Identity> {
    let region = |region: &GuestRegionMmap| {
        let guest = Span::new(region.start_addr().0, region.len());
        let no_file = || io::Error::other(format!("the memory at {guest} has no file"));
        let file = region.file_offset().ok_or_else(no_file)?;
        let known = file.file().metadata()?;
        Ok((known.dev(), known.ino(), file.start(), guest))
    };
    memory.iter().map(region).collect()
}

/// Owner of a guest's memory, which a [`Balloon`] gives back.
pub trait BalloonHost: Send + 'static {
    /// Memory of a region: what discards it, and what else [`Devices`](Self::Devices) knows it by.
    type Memory: Borrow<Discard> + Send + Sync;
    /// The devices' mappings of it.
    type Devices: Releaser<Self::Memory> + Send;

    /// The guest has this memory from now on, in these regions.
    ///
    /// # Errors
    ///
    /// The memory cannot be used; the error goes to the front end.
    fn regions(&mut self, memory: &GuestMemoryMmap) -> io::Result<Vec<Region<Self::Memory>>>;
}

/// Memory that no device reaches.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoDevices;

impl BalloonHost for NoDevices {
    type Memory = Discard;
    type Devices = ();

    fn regions(&mut self, memory: &GuestMemoryMmap) -> io::Result<Vec<Region<Discard>>> {
        // Parts of transparent huge pages of a file are given back like others.
        GuestDiscard::regions(memory, WIRE_PAGE).map_err(io::Error::other)
    }
}

/// State under the lock.
struct Inner<H: BalloonHost> {
    host: H,
    device: BalloonDevice<GuestDiscard, H::Devices, Reported, H::Memory>,
    memory: Option<Arc<GuestMemoryMmap>>,
    identity: Identity,
    /// A driver has set up, and these rings of it were not looked at yet.
    fresh: [bool; QUEUES],
    /// Statistics were asked for.
    ask: bool,
}

/// The memory balloon for a monitor that speaks vhost-user, to be served by a [`Link`](super::Link), beside devices
/// of this process: an [`Iommu`](super::Iommu) whose guest maps memory for them. [`BalloonJob`](super::BalloonJob) is
/// one without devices.
pub struct Balloon<H: BalloonHost> {
    inner: Mutex<Inner<H>>,
    /// The connection is about to be closed.
    leaving: AtomicBool,
}

impl<H: BalloonHost> std::fmt::Debug for Balloon<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Balloon").finish_non_exhaustive()
    }
}

impl<H: BalloonHost> Balloon<H> {
    /// A balloon without a front end, in which `target` bytes are wanted.
    ///
    /// # Errors
    ///
    /// Settings that no device has.
    pub fn new(
        settings: BalloonSettings,
        target: u64,
        devices: H::Devices,
        host: H,
    ) -> Result<Self, BalloonSetupError> {
        let discard = GuestDiscard::new();
        let mut device = BalloonDevice::new(settings, [], discard, devices, Reported::default())?;
        device.set_target(target);
        let inner = Inner {
            host,
            device,
            memory: None,
            identity: Identity::new(),
            fresh: [false; QUEUES],
            ask: false,
        };
        Ok(Self {
            inner: Mutex::new(inner),
            leaving: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner<H>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection is about to be closed, or another one to begin: whatever goes on comes to its end
    /// first.
    pub(super) fn leave(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::Relaxed);
        if !leaving {
            // The next front end sets its own memory.
            self.lock().memory = None;
        }
    }

    /// Wants `bytes` in the balloon. The driver is notified also when they are wanted already: one that gave
    /// way when the guest was out of memory fills up only then. [`heard`](Self::heard) says when to tell the front end.
    pub fn set_target(&self, bytes: u64) {
        let mut inner = self.lock();
        inner.device.monitor().target_set = Some(Instant::now());
        inner.device.set_target(bytes);
        inner.device.monitor().config_changed();
    }

    /// Asks for statistics when [`Backend::woken`] is called next.
    pub(super) fn ask(&self) {
        self.lock().ask = true;
    }

    pub(super) fn start_hints(&self) -> Result<u32, HintError> {
        self.lock().device.start_hints()
    }

    pub(super) fn stop_hints(&self) {
        self.lock().device.stop_hints();
    }

    pub(super) fn standing(&self) -> Standing {
        let mut inner = self.lock();
        Standing {
            target: inner.device.target(),
            actual: inner.device.actual(),
            reached: inner.device.monitor().reached,
            counters: inner.device.counters(),
            refused: inner.device.refusals().total(),
        }
    }

    /// Bytes in the balloon, as the driver says.
    pub fn actual(&self) -> u64 {
        self.lock().device.actual()
    }

    /// Counts of the device so far.
    pub fn counters(&self) -> BalloonCounters {
        self.lock().device.counters()
    }

    /// Last refusal of a message of the driver, as a sentence.
    pub(super) fn latest_refusal(&self) -> Option<String> {
        let latest = self.lock().device.refusals().latest()?;
        Some(latest.to_string())
    }

    /// Events since the last call; true if the front end must be notified that the configuration space changed
    /// ([`Link::config_changed`](super::Link::config_changed)). A
    /// driver that has not begun reads it anyway; and QEMU's `vhost-user-test-device` (11.1.3) ends with a segmentation
    /// fault when it is notified before that.
    pub fn heard(&self) -> (Vec<BackendEvent>, bool) {
        let mut inner = self.lock();
        if std::mem::take(&mut inner.device.monitor().hints_ended) {
            let hinted = inner.device.counters().hinted;
            // The driver holds its pages until it hears of the end.
            inner.device.finish_hints();
            let told = inner.device.monitor();
            told.tell(BackendEvent::HintsEnd {
                hinted_bytes: hinted,
            });
        }
        let begun = inner.memory.is_some();
        let told = inner.device.monitor();
        let mut events = std::mem::take(&mut told.events);
        let lost = std::mem::take(&mut told.lost);
        if lost > 0 {
            events.push(BackendEvent::Lost { events: lost });
        }
        let changed = begun && std::mem::take(&mut told.config_changed);
        (events, changed)
    }
}

impl<H: BalloonHost> Inner<H> {
    /// The driver is another one, or began anew, which is seen only now.
    fn reset_late(&mut self) {
        let poison = self.device.state().config.poison_val;
        self.reset();
        self.device.write_config(POISON, &poison.to_le_bytes());
    }

    fn reset(&mut self) {
        let negotiated = self.device.negotiated();
        // Parts that devices lack afterwards were reported.
        let _ = self.device.reset();
        if let Some(features) = negotiated {
            self.negotiate(features);
        }
    }

    fn negotiate(&mut self, features: Features) {
        if let Err(error) = self.device.negotiate(features) {
            let cause = error.to_string();
            self.device.monitor().tell(BackendEvent::Refused { cause });
        }
    }

    /// Looks at a ring that is used for the first time since the driver set up; see the module.
    fn settle(&mut self, queue: Queue, vring: &Vring) {
        let at = {
            let state = vring.get_ref();
            (
                state.get_queue().next_avail(),
                state.get_queue().next_used(),
            )
        };
        if queue == Queue::Inflate && at == (0, 0) {
            // The ring of statistics is looked at by itself.
            let stats = self.device.state().stats;
            self.reset_late();
            self.set_stats(stats);
        }
        if queue == Queue::Stats && at.0 == at.1 {
            self.set_stats(StatsState::default());
        }
    }

    fn set_stats(&mut self, stats: StatsState) {
        let state = BalloonState {
            stats,
            ..self.device.state()
        };
        // Cannot be refused: the features in the state were negotiated before.
        let _ = self.device.restore(&state);
    }

    fn drain(
        &mut self,
        queue: Queue,
        vring: &Vring,
        leaving: &AtomicBool,
    ) -> Result<(), QueueError> {
        let Some(memory) = self.memory.clone() else {
            return Ok(());
        };
        let mut vring = vring.get_mut();
        loop {
            let drained = self.device.drain(queue, vring.get_queue_mut(), &*memory);
            // After a failure of the ring, some messages may be back.
            if drained.as_ref().map_or(true, |drained| drained.notify) {
                // A front end that has gone is not notified.
                let _ = vring.signal_used_queue();
            }
            let drained = drained?;
            if !drained.more || leaving.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
    }

    fn request_stats(&mut self, vrings: &[Vring]) -> Result<(), QueueError> {
        let memory = self.memory.clone();
        let number = self.device.number(Queue::Stats).map(usize::from);
        let vring = number.and_then(|number| vrings.get(number));
        let (Some(memory), Some(vring)) = (memory, vring) else {
            return Err(QueueError::NoQueue(Queue::Stats));
        };
        let mut vring = vring.get_mut();
        if self.device.request_stats(vring.get_queue_mut(), &*memory)? {
            let _ = vring.signal_used_queue();
        }
        Ok(())
    }
}

impl<H: BalloonHost> Backend for Balloon<H> {
    const QUEUES: u16 = QUEUES as u16;

    fn features(&self) -> u64 {
        self.lock().device.features().0
    }

    fn negotiated(&self, features: u64) {
        let mut inner = self.lock();
        inner.negotiate(Features(features));
        inner.fresh = [true; QUEUES];
        let names = super::event::names(Features(features));
        inner
            .device
            .monitor()
            .tell(BackendEvent::Negotiated { features: names });
    }

    fn read_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut bytes = vec![0; size as usize];
        self.lock().device.read_config(offset.into(), &mut bytes);
        bytes
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        self.lock().device.write_config(offset.into(), bytes);
    }

    fn memory(&self, memory: &BackendMemory) -> io::Result<()> {
        let memory = memory.memory().into_inner();
        let identity = identity(&memory)?;
        let mut inner = self.lock();
        let regions = inner.host.regions(&memory)?;
        let bytes = regions.iter().map(|region| region.guest.len).sum();
        inner
            .device
            .set_regions(regions)
            .map_err(io::Error::other)?;
        if inner.identity != identity {
            inner.reset_late();
            inner.device.monitor().tell(BackendEvent::Memory { bytes });
        }
        inner.identity = identity;
        inner.memory = Some(memory);
        Ok(())
    }

    fn kicked(&self, number: u16, vrings: &[Vring]) {
        let mut inner = self.lock();
        let queue = inner.device.queue(number);
        let (Some(queue), Some(vring)) = (queue, vrings.get(usize::from(number))) else {
            return;
        };
        let fresh = inner.fresh.get_mut(usize::from(number));
        if fresh.is_some_and(std::mem::take) {
            inner.settle(queue, vring);
        }
        if let Err(error) = inner.drain(queue, vring, &self.leaving) {
            let cause = super::sentence(&error);
            inner.device.monitor().tell(BackendEvent::Refused { cause });
        }
    }

    fn woken(&self, vrings: &[Vring]) {
        let mut inner = self.lock();
        if !std::mem::take(&mut inner.ask) {
            return;
        }
        // Without a buffer it is asked again the next time.
        let _ = inner.request_stats(vrings);
    }

    fn stopped(&self, _queue: u16) {}

    fn reset(&self) {
        self.lock().reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_hears_is_counted_beyond_a_bound() {
        let balloon = Balloon::new(BalloonSettings::default(), 0, (), NoDevices).unwrap();
        for more in [0, 1, 44] {
            for _ in 0..MOST_EVENTS + more {
                balloon
                    .lock()
                    .device
                    .monitor()
                    .tell(BackendEvent::Connected);
            }
            let mut told = vec![BackendEvent::Connected; MOST_EVENTS];
            let events = more as u64;
            told.extend((more > 0).then_some(BackendEvent::Lost { events }));
            assert_eq!(balloon.heard().0, told);
        }
    }
}
