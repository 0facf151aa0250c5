//! The device: the host's side of the balloon, complete, on the crates of rust-vmm.
//!
//! A [`BalloonDevice`] is everything of VIRTIO 1.3, 5.5, but the transport. A monitor that has one (PCI, MMIO,
//! vhost-user) keeps the rings and calls:
//!
//! * [`features`](BalloonDevice::features) and [`negotiate`](BalloonDevice::negotiate) while the driver sets up, and
//!   [`queue`](BalloonDevice::queue) for which queue has which number;
//! * [`read_config`](BalloonDevice::read_config) and [`write_config`](BalloonDevice::write_config);
//! * [`drain`](BalloonDevice::drain) when the driver has notified a queue, which says whether the driver is to be
//!   notified, and whether there is more to do;
//! * [`set_target`](BalloonDevice::set_target), [`request_stats`](BalloonDevice::request_stats), and
//!   [`start_hints`](BalloonDevice::start_hints) with its siblings, at the monitor's request;
//! * [`reset`](BalloonDevice::reset) when the driver resets the device.
//!
//! The device works through three seams: [`Discarder`] gives memory back to the machine ([`GuestDiscard`]
//! does, for memory of vm-memory), [`Releaser`] has devices let go of it before and takes it back for
//! them, and [`BalloonMonitor`] is notified of events. `docs/balloon-monitor.md` leads through it, with a
//! complete example.
//!
//! # The way of a message
//!
//! There is one map of the guest's memory, [`Region`]s in ascending order, and a guest address is looked up in it
//! once, when its run comes out of the decoder ([`Resolver`](crate::Resolver)). From there on a [`Part`] travels:
//! the number of a region, and offsets in it.
//!
//! 1. A decoder turns bytes into runs of guest addresses; the resolver turns runs into parts and refuses what is
//!    no memory; [`RunCollector`](crate::RunCollector) sorts parts and merges those that touch in a region.
//! 2. In regions on huge pages, bits of the parts are set in the bitmaps of their region, and huge pages that are whole
//!    now are the parts that go on. Other parts go on as they are.
//! 3. [`Releaser::release`] and then [`Discarder::discard`] receive the parts with the map. The monitor's data for a
//!    region, memory objects and mappings, is in the map ([`Region::memory`]), so that both find it by number. Memory
//!    that devices keep comes back as parts, and is subtracted.
//! 4. Notifications and saved state (events, hints, messages that are held) are in guest addresses
//!    again: they outlive the map.
//!
//! Deflating is the same way as far as the bitmaps, and then [`Releaser::restore`].
//!
//! A map is not changed. Memory that comes or goes is another map, which
//! [`set_regions`](BalloonDevice::set_regions) exchanges as a whole between two drains, with all that is remembered in it;
//! so the numbers in parts mean the same to all receivers.
//!
//! The device owns no ring: transports keep rings in different ways (a queue of `virtio-queue`, or one
//! behind a lock in `vhost-user-backend`), so [`drain`](BalloonDevice::drain) borrows the ring for one call.
//!
//! # With devices
//!
//! While [`Releaser::attached`] says so, `VIRTIO_BALLOON_F_MUST_TELL_HOST` is required, and free page
//! reporting and hinting are not offered. A monitor calls
//! [`devices_attached`](BalloonDevice::devices_attached) *before* it attaches the first device to a running guest.

use std::sync::Arc;
use std::vec::Vec;

use runs::{GuestAddr, Span};

use crate::config::{BULK_CONFIG_BYTES, BalloonConfig, CONFIG_BYTES};
use crate::dma::Releaser;
use crate::features::{Features, InitBit};
use crate::map::{MemoryMap, Part, Region};
use crate::queues::Queue;
use crate::refusal::Refusals;
use crate::source::WIRE_PAGE;
use crate::stats::ByteOrder;

mod back;
mod chain;
mod discarder;
mod error;
mod guest_discard;
mod initialized;
mod memory;
mod monitor;
mod queues;
mod ring;
mod settings;
mod state;

pub use back::BalloonCounters;
pub use discarder::{Discarder, NotDiscarded};
pub use error::{BalloonSetupError, HintError, NegotiateError, PassthroughError, QueueError};
pub use guest_discard::{GuestDiscard, GuestDiscardError};
pub use hostmem::Discard;
pub use monitor::{BalloonEvent, BalloonMonitor, Hint, Unrestored};
pub use ring::Drained;
pub use settings::{BalloonSettings, Bulk, regions};
pub use state::{BalloonState, Hints, PartialState, PendingDeflate, StatsState};

/// The device's type (VIRTIO 1.3, 5.5.1).
pub const DEVICE_ID: u32 = virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

/// A balloon device: with `D` discarding memory, `A` in front of devices, and `M` the monitor, which has `T` in
/// each region of the guest's memory.
#[derive(Debug)]
pub struct BalloonDevice<D, A = (), M = (), T = ()> {
    settings: BalloonSettings,
    back: back::Back<D, A, M>,
    memory: memory::Memory<T>,
    config: BalloonConfig,
    negotiated: Option<Features>,
    /// Devices are about to be attached, or are.
    attached: bool,
    needs_reset: bool,
    stats: StatsState,
    held: Option<PendingDeflate>,
    hints: Hints,
    refusals: Refusals,
    room: queues::Room,
}

impl<D: Discarder<T>, A: Releaser<T>, M: BalloonMonitor, T> BalloonDevice<D, A, M, T> {
    /// A device as after a reset, with nothing wanted in the balloon.
    ///
    /// # Errors
    ///
    /// Settings that no device has, or regions that are no memory: see [`BalloonSetupError`].
    pub fn new(
        settings: BalloonSettings,
        regions: impl Into<Arc<[Region<T>]>>,
        discard: D,
        dma: A,
        monitor: M,
    ) -> Result<Self, BalloonSetupError> {
        settings.check()?;
        let mut config = BalloonConfig::default();
        if let Some(bulk) = settings.bulk {
            config.bulk_format = BalloonConfig::BITMAP_RECORDS;
            config.bulk_message_bytes = bulk.message_bytes;
        }
        Ok(Self {
            settings,
            back: back::Back::new(discard, dma, monitor),
            memory: memory::Memory::new(regions.into())?,
            config,
            negotiated: None,
            attached: false,
            needs_reset: false,
            stats: StatsState::default(),
            held: None,
            hints: Hints::default(),
            refusals: Refusals::new(),
            room: queues::Room::default(),
        })
    }

    /// The guest's memory is another one: regions came or went. Remembered parts of huge pages
    /// stay, as far as they are still memory.
    ///
    /// # Errors
    ///
    /// Regions that are no memory; nothing has changed then.
    pub fn set_regions(
        &mut self,
        regions: impl Into<Arc<[Region<T>]>>,
    ) -> Result<(), BalloonSetupError> {
        let mut memory = memory::Memory::new(regions.into())?;
        memory.load(&self.memory.save());
        self.memory = memory;
        Ok(())
    }

    /// The guest's memory, as it is now.
    pub fn memory(&self) -> MemoryMap<'_, T> {
        self.memory.map()
    }

    // Features.

    /// The features to offer. They depend on whether devices reach the guest's memory.
    pub fn features(&self) -> Features {
        let offered = self.settings.features.with(self.settings.transport);
        let settings = self.settings;
        let bulk = settings.bulk.map(|bulk| bulk.bit.feature());
        let init = settings.init_on_inflate.map(InitBit::feature);
        let offered = [bulk, init]
            .into_iter()
            .flatten()
            .fold(offered, Features::with);
        if !self.devices() {
            return offered;
        }
        let without_a_word = Features::PAGE_REPORTING.with(Features::FREE_PAGE_HINT);
        offered
            .without(without_a_word)
            .with(Features::MUST_TELL_HOST)
    }

    /// The driver takes these features, once it has acknowledged all that it wants.
    ///
    /// # Errors
    ///
    /// Features that were not offered, or that are missing: see [`NegotiateError`]. Then nothing is
    /// negotiated, and no queue can be used.
    pub fn negotiate(&mut self, features: Features) -> Result<(), NegotiateError> {
        self.negotiated = None;
        let not_offered = features.without(self.features());
        if not_offered.0 != 0 {
            return Err(NegotiateError::NotOffered {
                features: not_offered,
            });
        }
        if self.devices() && !features.contains(Features::MUST_TELL_HOST) {
            return Err(NegotiateError::MustTellHost);
        }
        let bulk = self.settings.bulk.map(|bulk| bulk.bit.feature());
        let init = self.settings.init_on_inflate.map(InitBit::feature);
        if bulk
            .zip(init)
            .is_some_and(|(bulk, init)| features.contains(bulk.with(init)))
        {
            return Err(NegotiateError::BulkAndInit);
        }
        self.negotiated = Some(features);
        Ok(())
    }

    /// The features that are negotiated.
    pub fn negotiated(&self) -> Option<Features> {
        self.negotiated
    }

    /// The queue of this number, with the features that are negotiated.
    pub fn queue(&self, number: u16) -> Option<Queue> {
        Queue::of_number(number, self.negotiated?, self.settings.numbering)
    }

    /// The number of this queue, with the features that are negotiated.
    pub fn number(&self, queue: Queue) -> Option<u16> {
        queue.number(self.negotiated?, self.settings.numbering)
    }

    /// How many numbers of queues a transport must have room for, before anything is negotiated.
    pub fn queues(&self) -> u16 {
        let queues = Queue::numbered(self.settings.features, self.settings.numbering);
        queues.map(|(_, number)| number + 1).max().unwrap_or(0)
    }

    /// To be called *before* the first device that cannot take page faults is attached.
    ///
    /// # Errors
    ///
    /// Negotiated features that do not go with devices: see [`PassthroughError`]. Then none may be attached before
    /// the driver has reset the device.
    pub fn devices_attached(&mut self) -> Result<(), PassthroughError> {
        let has = |features| self.has(features);
        if has(Features::PAGE_REPORTING) {
            return Err(PassthroughError::Reporting);
        }
        if has(Features::FREE_PAGE_HINT) {
            return Err(PassthroughError::Hinting);
        }
        if self.negotiated.is_some() && !has(Features::MUST_TELL_HOST) {
            return Err(PassthroughError::MustTellHost);
        }
        self.attached = true;
        Ok(())
    }

    /// The last such device is gone. The offered features change with the next reset.
    pub fn devices_detached(&mut self) {
        self.attached = false;
    }

    // Configuration space.

    /// Bytes of the configuration space: with messages in bulk it is longer.
    pub fn config_bytes(&self) -> usize {
        match self.settings.bulk {
            Some(_) => BULK_CONFIG_BYTES,
            None => CONFIG_BYTES,
        }
    }

    /// Reads from the configuration space. Bytes behind its end are zeros.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let bytes = self.config.to_bytes();
        let there = bytes.get(..self.config_bytes()).unwrap_or(&[]);
        let from = usize::try_from(offset).ok().and_then(|at| there.get(at..));
        for (place, byte) in data.iter_mut().zip(from.unwrap_or(&[])) {
            *place = *byte;
        }
    }

    /// The driver writes to the configuration space. Only its own fields change; when it has told how
    /// much is in the balloon, [`BalloonEvent::Progress`] says so.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        if self.config.write(offset, data) {
            let (target, actual) = (self.target(), self.actual());
            self.back
                .monitor
                .event(BalloonEvent::Progress { target, actual });
        }
    }

    /// Wants `bytes` in the balloon, as far as pages of 4 KiB go, and tells the driver so. Returns what is
    /// wanted now, which is at most 16 TiB − 4 KiB.
    pub fn set_target(&mut self, bytes: u64) -> u64 {
        let pages = u32::try_from(bytes / WIRE_PAGE).unwrap_or(u32::MAX);
        if pages != self.config.num_pages {
            self.config.num_pages = pages;
            self.back.monitor.config_changed();
        }
        self.target()
    }

    /// Bytes wanted in the balloon.
    pub fn target(&self) -> u64 {
        u64::from(self.config.num_pages) * WIRE_PAGE
    }

    /// Bytes that are in the balloon, as the driver says.
    pub fn actual(&self) -> u64 {
        u64::from(self.config.actual) * WIRE_PAGE
    }

    /// Bytes in the balloon that are not given back, since they are parts of huge pages.
    pub fn waiting(&self) -> u64 {
        self.memory.waiting()
    }

    // Free page hinting.

    /// Begins a new round of hints. Returns its command's id; hints come as [`BalloonMonitor::hinted`] out of
    /// drains of free_page_vq.
    ///
    /// # Errors
    ///
    /// Hinting is not negotiated, or the ids are used up: see [`HintError`].
    pub fn start_hints(&mut self) -> Result<u32, HintError> {
        if !self.has(Features::FREE_PAGE_HINT) {
            return Err(HintError::NotNegotiated);
        }
        let id = match self.hints.latest.checked_add(1) {
            Some(id) => id.max(BalloonConfig::HINT_FIRST),
            // From the first id on again, when the driver uses none of the old ones (5.5.6.5.2).
            None if self.hints.stopped => BalloonConfig::HINT_FIRST,
            None => return Err(HintError::Ids),
        };
        self.hints.latest = id;
        self.hints.stopped = false;
        self.set_command(id);
        Ok(id)
    }

    /// Hints are not wanted for now; the driver keeps the pages that it has hinted at.
    pub fn stop_hints(&mut self) {
        self.set_command(BalloonConfig::HINT_STOP);
    }

    /// Hints are over, and the driver may use its pages. From here on none of them may be discarded.
    pub fn finish_hints(&mut self) {
        self.set_command(BalloonConfig::HINT_DONE);
    }

    fn set_command(&mut self, id: u32) {
        self.hints.begun = None;
        if self.config.free_page_hint_cmd_id != id {
            self.config.free_page_hint_cmd_id = id;
            self.back.monitor.config_changed();
        }
    }

    // Queries.

    /// Refusals of the driver's messages, by cause.
    pub const fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Counters since the device was made.
    pub fn counters(&self) -> BalloonCounters {
        self.back.counters
    }

    /// The device goes on only after a reset.
    pub const fn needs_reset(&self) -> bool {
        self.needs_reset
    }

    /// The seam towards devices.
    pub fn dma(&mut self) -> &mut A {
        &mut self.back.dma
    }

    /// The seam towards the machine.
    pub fn discarder(&mut self) -> &mut D {
        &mut self.back.discard
    }

    /// The monitor.
    pub fn monitor(&mut self) -> &mut M {
        &mut self.back.monitor
    }

    // Life.

    /// The driver resets the device. Nothing is negotiated, the balloon is empty, and devices are given
    /// everything back, since the guest now uses its pages without a word. The target stays.
    ///
    /// Returns what devices lack all the same: the guest is not to go on before a further reset has
    /// returned nothing, or devices fault there. Each part is a [`BalloonEvent::NotRestored`].
    pub fn reset(&mut self) -> Vec<Span<GuestAddr>> {
        self.negotiated = None;
        self.needs_reset = false;
        self.stats = StatsState::default();
        self.held = None;
        self.hints.begun = None;
        // No command of ours is known to a new driver.
        self.hints.stopped = true;
        self.config.actual = 0;
        self.config.poison_val = 0;
        self.config.free_page_hint_cmd_id = BalloonConfig::HINT_STOP;
        self.memory.empty();
        let mut lacking = Vec::new();
        let map = self.memory.map();
        let whole =
            |(number, region): (_, &Region<T>)| Part::new(number, Span::new(0, region.guest.len));
        let all: Vec<Part> = map.regions().iter().enumerate().map(whole).collect();
        let then = self.settings.unrestored;
        self.back.restore(map, &all, then, &mut lacking);
        lacking
    }

    /// State of the device, to be saved.
    pub fn state(&self) -> BalloonState {
        BalloonState {
            negotiated: self.negotiated,
            config: self.config,
            stats: self.stats,
            held: self.held.clone(),
            hints: self.hints,
            partial: self.memory.save(),
        }
    }

    /// Goes on from where another device, or this one, was: with the same guest, settings and memory.
    ///
    /// # Errors
    ///
    /// Features that are negotiated there are not offered here: see [`NegotiateError`]. The device is
    /// then as before, but without negotiated features.
    pub fn restore(&mut self, state: &BalloonState) -> Result<(), NegotiateError> {
        self.negotiated = None;
        if let Some(negotiated) = state.negotiated {
            self.negotiate(negotiated)?;
        }
        // The fields for bulk are those of the settings.
        self.config = BalloonConfig {
            bulk_format: self.config.bulk_format,
            bulk_message_bytes: self.config.bulk_message_bytes,
            ..state.config
        };
        self.stats = state.stats;
        self.held = state.held.clone();
        self.hints = state.hints;
        self.memory.load(&state.partial);
        Ok(())
    }

    /// Returns true if these features are negotiated.
    fn has(&self, features: Features) -> bool {
        self.negotiated.is_some_and(|has| has.contains(features))
    }

    fn devices(&self) -> bool {
        self.attached || self.back.dma.attached()
    }

    fn is_legacy(&self) -> bool {
        !self.has(Features::VERSION_1)
    }

    /// The guest fills free pages with something else than zeros.
    fn poisoned(&self) -> bool {
        self.has(Features::PAGE_POISON) && self.config.poison_val != 0
    }

    /// The byte order of what is not in the configuration space.
    fn order(&self) -> ByteOrder {
        if self.is_legacy() {
            self.settings.legacy_order
        } else {
            ByteOrder::Little
        }
    }
}
