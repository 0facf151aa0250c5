//! The device: configuration, endpoints and life cycle. Requests are received in `queues`, and executed in
//! `spaces` and `mappings`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ioas::{Ioas, Memory};
use runs::{Offset, Span};

use crate::config::{ConfigError, EndpointConfig, MemoryRegion, VirtioIommuConfig, sorted};
use crate::domains::Domains;
use crate::features;
use crate::refusal::Failed;
use crate::wire::{BYPASS_OFFSET, CONFIG_BYTES, ReservedMemory, Status};

mod buffers;
mod dirty;
mod mappings;
mod queues;
mod spaces;

pub use queues::{RingError, Served};

/// A virtio-iommu device over the address spaces of `D`: everything of VIRTIO 1.3, 5.13, but the transport.
///
/// Dropped, it detaches every endpoint; see [`Ioas`] for what happens when one stays attached.
pub struct VirtioIommu<D: Domains> {
    config: VirtioIommuConfig,
    back: D,
    /// Regions by start.
    memory: Vec<MemoryRegion>,
    endpoints: BTreeMap<u32, Known>,
    domains: BTreeMap<u32, Domain>,
    /// The guest's memory at its own addresses, for as long as an endpoint is in bypass mode.
    identity: Option<Identity>,
    /// `bypass` of the configuration space.
    bypass: bool,
    negotiated: Option<u64>,
    /// While it is tracked what endpoints write to.
    dirty: Option<dirty::Dirty>,
    /// An endpoint reaches what it should not.
    stuck: bool,
    counters: RequestCounters,
    room: buffers::Room,
}

/// An endpoint that the monitor has named.
struct Known {
    /// Ranges by start.
    reserved: Vec<ReservedMemory>,
    domain: Option<u32>,
    /// It is attached to [`VirtioIommu::identity`].
    identity: bool,
}

/// A domain: what at least one endpoint is attached to.
struct Domain {
    endpoints: usize,
    /// `None` for a bypass domain.
    space: Option<Ioas>,
    /// Starts of areas that go on with the mapping before them: of a request over several regions.
    joints: BTreeSet<u64>,
}

/// The guest's memory at its own addresses.
struct Identity {
    endpoints: usize,
    space: Ioas,
}

/// Counts of requests and faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounters {
    /// Requests that were answered, by the number of their [`Status`].
    pub answered: [u64; Status::ALL.len()],
    /// Chains that are no requests, or whose answer could not be written, and went back as they were.
    pub malformed: u64,
    /// Faults that the driver received.
    pub faults: u64,
    /// Faults that it was not told of, since it had no buffer for them.
    pub dropped: u64,
}

impl RequestCounters {
    /// Requests that were answered with this status.
    pub fn with(&self, status: Status) -> u64 {
        let count = self.answered.get(status as usize);
        count.copied().unwrap_or_default()
    }
}

/// The driver took features that are not offered: the monitor leaves `FEATURES_OK` unset (VIRTIO 1.3, 3.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("features {features:#x} are not offered")]
pub struct NotOffered {
    /// These.
    pub features: u64,
}

impl<D: Domains> VirtioIommu<D> {
    /// A device as after a reset, over `back`. It knows no memory of the guest yet: see
    /// [`set_memory`](Self::set_memory).
    ///
    /// # Errors
    ///
    /// Settings that no device has: see [`ConfigError`].
    pub fn new(config: VirtioIommuConfig, back: D) -> Result<Self, ConfigError> {
        config.check()?;
        let mut device = Self {
            back,
            memory: Vec::new(),
            endpoints: BTreeMap::new(),
            domains: BTreeMap::new(),
            identity: None,
            bypass: config.bypass.unwrap_or(false),
            negotiated: None,
            dirty: None,
            stuck: false,
            counters: RequestCounters::default(),
            room: buffers::Room::default(),
            config,
        };
        for endpoint in std::mem::take(&mut device.config.endpoints) {
            device.add_endpoint(&endpoint)?;
        }
        Ok(device)
    }

    // Features and configuration space.

    /// The features to offer, of the device's type; the transport adds its own.
    pub fn features(&self) -> u64 {
        self.config.features()
    }

    /// The driver takes these features. Those of rings and transport are ignored.
    ///
    /// # Errors
    ///
    /// Features that are not offered. Then nothing is negotiated, and no queue can be used.
    pub fn ack_features(&mut self, features: u64) -> Result<(), NotOffered> {
        self.negotiated = None;
        let features = features & features::OF_DEVICE;
        let unknown = features & !self.features();
        if unknown != 0 {
            return Err(NotOffered { features: unknown });
        }
        self.negotiated = Some(features);
        Ok(())
    }

    /// The features that are negotiated.
    pub const fn negotiated(&self) -> Option<u64> {
        self.negotiated
    }

    const fn has(&self, feature: u64) -> bool {
        match self.negotiated {
            Some(features) => features & feature != 0,
            None => false,
        }
    }

    /// The configuration space.
    pub fn config(&self) -> [u8; CONFIG_BYTES] {
        self.config.space(self.bypass).to_bytes()
    }

    /// Reads from the configuration space. What lies behind its end is zeros.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let bytes = self.config();
        let from = usize::try_from(offset).ok().and_then(|at| bytes.get(at..));
        for (place, byte) in data.iter_mut().zip(from.unwrap_or(&[])) {
            *place = *byte;
        }
    }

    /// The driver writes to the configuration space. Only `bypass` changes, if the feature is negotiated
    /// and it becomes 0 or 1 (5.13.4): then endpoints without a domain come into bypass mode, or leave it.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        let place = (BYPASS_OFFSET as u64).checked_sub(offset);
        let place = place.and_then(|place| usize::try_from(place).ok());
        let byte = place.and_then(|place| data.get(place));
        if let (Some(byte @ 0..=1), true) = (byte, self.has(features::BYPASS_CONFIG)) {
            self.set_bypass(*byte == 1);
        }
    }

    fn set_bypass(&mut self, bypass: bool) {
        self.bypass = bypass;
        for endpoint in self.ids() {
            self.settle(endpoint);
        }
    }

    fn ids(&self) -> Vec<u32> {
        self.endpoints.keys().copied().collect()
    }

    // The guest's memory.

    /// Sets the guest's physical address space. Mappings that are there stay, also of regions that
    /// are gone: their memory stays pinned until the driver unmaps them. Endpoints in bypass mode have the
    /// new regions, and no others; where that fails, [`Domains::failed`] is called.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Region`]; nothing has changed then.
    pub fn set_memory(&mut self, regions: Vec<MemoryRegion>) -> Result<(), ConfigError> {
        let regions = sorted(regions)?;
        let before = std::mem::replace(&mut self.memory, regions);
        self.renew_identity(&before);
        Ok(())
    }

    /// The guest's physical address space, in order.
    pub fn memory(&self) -> &[MemoryRegion] {
        &self.memory
    }

    // Endpoints.

    /// There is one more endpoint: a device was plugged in.
    ///
    /// # Errors
    ///
    /// See [`ConfigError`]; nothing has changed then.
    pub fn add_endpoint(&mut self, endpoint: &EndpointConfig) -> Result<(), ConfigError> {
        let id = endpoint.id;
        if self.endpoints.contains_key(&id) {
            return Err(ConfigError::Endpoint { id });
        }
        let mut of_back_end = Vec::new();
        self.back.reserved(id, &mut |span| of_back_end.push(span));
        let known = Known {
            reserved: self.config.reserved(endpoint, &of_back_end)?,
            domain: None,
            identity: false,
        };
        self.endpoints.insert(id, known);
        self.settle(id);
        Ok(())
    }

    /// An endpoint is gone: it is detached from where it is. False when it is not known, or cannot be
    /// detached: then [`Domains::failed`] was called, and the device needs a [reset](Self::reset).
    pub fn remove_endpoint(&mut self, endpoint: u32) -> bool {
        let gone = self
            .leave(endpoint)
            .and_then(|()| self.leave_identity(endpoint));
        match gone {
            Ok(()) => self.endpoints.remove(&endpoint).is_some(),
            Err(cause) => {
                self.stop(endpoint, cause);
                false
            }
        }
    }

    /// The domain that an endpoint is attached to.
    pub fn domain_of(&self, endpoint: u32) -> Option<u32> {
        self.endpoints.get(&endpoint)?.domain
    }

    /// The address space that an endpoint's DMA goes through: its domain's, or that of bypass mode.
    pub fn space_of(&self, endpoint: u32) -> Option<&Ioas> {
        let known = self.endpoints.get(&endpoint)?;
        if known.identity {
            return self.identity.as_ref().map(|identity| &identity.space);
        }
        self.domains.get(&known.domain?)?.space.as_ref()
    }

    /// The first stretch of `part` (offset and length in bytes) of `memory` that endpoints can reach: mapped in a
    /// domain, or in bypass mode. Memory of the guest beside that may be discarded: no device sees it go, and
    /// what is mapped later is brought in then.
    pub fn first_mapped(&self, memory: &Arc<Memory>, part: Span<Offset>) -> Option<Span<Offset>> {
        let spaces = self
            .domains
            .values()
            .filter_map(|there| there.space.as_ref());
        let identity = self.identity.iter().map(|identity| &identity.space);
        let mut first: Option<Span<Offset>> = None;
        for space in spaces.chain(identity) {
            space.areas_over(memory, part, |area| {
                let here = area.part().intersection(&part);
                let earlier =
                    |here: &Span<Offset>| first.is_none_or(|first| here.start < first.start);
                first = here.filter(earlier).or(first);
            });
        }
        first
    }

    /// Domains that there are.
    pub fn domains(&self) -> impl Iterator<Item = u32> {
        self.domains.keys().copied()
    }

    // State.

    /// Counts of requests and faults.
    pub const fn counters(&self) -> RequestCounters {
        self.counters
    }

    /// The device goes on only after a [reset](Self::reset).
    pub const fn needs_reset(&self) -> bool {
        self.stuck
    }

    /// The maker of address spaces.
    pub const fn back_end(&mut self) -> &mut D {
        &mut self.back
    }

    // Life.

    /// The driver resets the device: endpoints leave their domains, which come to their end with
    /// everything that is mapped, and nothing is negotiated. `bypass` stays (5.13.4). False when
    /// an endpoint cannot be detached: then the device [needs](Self::needs_reset) a further reset.
    pub fn reset(&mut self) -> bool {
        self.negotiated = None;
        self.stuck = false;
        for endpoint in self.ids() {
            if let Err(cause) = self.leave(endpoint) {
                self.stop(endpoint, cause);
            } else {
                self.settle(endpoint);
            }
        }
        !self.stuck
    }

    /// The whole machine is reset: as [`reset`](Self::reset), and `bypass` is what it was at first (5.13.4).
    pub fn reset_system(&mut self) -> bool {
        self.bypass = self.config.bypass.unwrap_or(false);
        self.reset()
    }

    /// An endpoint reaches what it should not.
    fn stop(&mut self, endpoint: u32, cause: ioas::DetachError) {
        self.stuck = true;
        self.back.failed(&Failed::Stuck { endpoint, cause });
    }
}

impl<D: Domains> std::fmt::Debug for VirtioIommu<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("config", &self.config)
            .field("domains", &self.domains.keys())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}
