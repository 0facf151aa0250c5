//! Endpoints and their address spaces: ATTACH, DETACH, PROBE, and bypass mode (VIRTIO 1.3, 5.13.6).
//!
//! An endpoint's DMA goes through the address space of its domain; through the *identity*, the guest's
//! memory at its own addresses, in bypass mode; or through none, and then everything faults. The back
//! end does not see moves inside the identity: the guest's memory stays pinned.

use std::collections::BTreeSet;

use ioas::{DetachError, Ioas};
use iopt::Prot;
use runs::Span;

use super::dirty::Dirty;
use super::{Domain, Identity, VirtioIommu};
use crate::config::MemoryRegion;
use crate::domains::Domains;
use crate::features;
use crate::refusal::{Failed, RequestError};
use crate::wire::{Attach, Detach, Probe, attach_flags};

impl<D: Domains> VirtioIommu<D> {
    /// ATTACH (5.13.6.3).
    pub(super) fn attach(&mut self, request: &Attach) -> Result<(), RequestError> {
        let &Attach {
            domain, endpoint, ..
        } = request;
        if request.reserved != [0; 4] {
            return Err(RequestError::Reserved);
        }
        let known = match self.has(features::BYPASS_CONFIG) {
            true => attach_flags::BYPASS,
            false => 0,
        };
        let unknown = request.flags & !known;
        if unknown != 0 {
            return Err(RequestError::Flags { unknown });
        }
        if !self.config.domains().contains(&domain) {
            return Err(RequestError::DomainRange { domain });
        }
        let before = match self.endpoints.get(&endpoint) {
            Some(known) => known.domain,
            None => return Err(RequestError::NoEndpoint { endpoint }),
        };
        let bypass = request.flags & attach_flags::BYPASS != 0;
        if let Some(there) = self.domains.get(&domain) {
            if there.space.is_none() != bypass {
                return Err(RequestError::OtherKind { domain });
            }
            if before == Some(domain) {
                return Ok(());
            }
            self.compatible(endpoint, there.space.as_ref())?;
        }
        // As if the driver had detached it first.
        let result = match self.leave(endpoint) {
            Ok(()) => self.enter(endpoint, domain, bypass),
            Err(cause) => Err(RequestError::Stays { endpoint, cause }),
        };
        if result.is_err() {
            self.settle(endpoint);
        }
        // A domain that is there still has others (5.13.6.3.2).
        match result {
            Err(cause) if self.domains.contains_key(&domain) => Err(RequestError::Shared {
                endpoint,
                domain,
                cause: Box::new(cause),
            }),
            result => result,
        }
    }

    /// Refuses an endpoint for which something is reserved that the domain has mapped.
    fn compatible(&self, endpoint: u32, space: Option<&Ioas>) -> Result<(), RequestError> {
        let reserved = self.endpoints.get(&endpoint).map(|known| &known.reserved);
        let reserved = reserved.into_iter().flatten();
        let Some(space) = space.filter(|_| reserved.clone().next().is_some()) else {
            return Ok(());
        };
        let mut areas = space.areas().into_iter().map(|area| area.range());
        let found = areas.find(|area| {
            let mut reserved = reserved.clone();
            reserved.any(|part| part.overlaps(area.start, area.last()))
        });
        match found {
            Some(area) => Err(RequestError::Incompatible { endpoint, area }),
            None => Ok(()),
        }
    }

    /// Attaches an endpoint without a domain to one, which is made if it is not there.
    fn enter(&mut self, endpoint: u32, domain: u32, bypass: bool) -> Result<(), RequestError> {
        let fresh = !self.domains.contains_key(&domain);
        if fresh {
            let most = self.config.most_domains;
            if self.domains.len() >= most {
                return Err(RequestError::Domains { most });
            }
            let space = match bypass {
                true => None,
                false => Some(new_space(&mut self.back, self.dirty.as_ref())?),
            };
            let made = Domain {
                endpoints: 0,
                space,
                joints: BTreeSet::new(),
            };
            self.domains.insert(domain, made);
        }
        let entered = match bypass {
            true => self.enter_identity(endpoint),
            false => self.enter_space(endpoint, domain),
        };
        match (&entered, self.domains.get_mut(&domain)) {
            (Ok(()), Some(there)) => {
                there.endpoints += 1;
                if let Some(known) = self.endpoints.get_mut(&endpoint) {
                    known.domain = Some(domain);
                }
            }
            _ if fresh => self.end(domain),
            _ => {}
        }
        entered
    }

    fn enter_space(&mut self, endpoint: u32, domain: u32) -> Result<(), RequestError> {
        self.leave_identity(endpoint)
            .map_err(|cause| RequestError::Detach { endpoint, cause })?;
        let space = self
            .domains
            .get_mut(&domain)
            .and_then(|there| there.space.as_ref());
        let space = space.ok_or(RequestError::NoDomain { domain })?;
        let attached = self.back.attach(endpoint, space);
        attached.map_err(|cause| RequestError::Attach { endpoint, cause })
    }

    /// DETACH (5.13.6.4).
    pub(super) fn detach(&mut self, request: &Detach) -> Result<(), RequestError> {
        let &Detach { domain, endpoint } = request;
        let known = self.endpoints.get(&endpoint);
        let known = known.ok_or(RequestError::NoEndpoint { endpoint })?;
        if known.domain != Some(domain) {
            return Err(RequestError::NotAttached { endpoint, domain });
        }
        self.leave(endpoint)
            .map_err(|cause| RequestError::Detach { endpoint, cause })?;
        self.settle(endpoint);
        if self.stuck {
            return Err(RequestError::NeedsReset);
        }
        Ok(())
    }

    /// Takes an endpoint out of its domain, if it has one. From a bypass domain it stays in the identity:
    /// [`settle`](Self::settle) comes after this. A domain without endpoints ends.
    pub(super) fn leave(&mut self, endpoint: u32) -> Result<(), DetachError> {
        let Some(known) = self.endpoints.get_mut(&endpoint) else {
            return Ok(());
        };
        let Some(domain) = known.domain else {
            return Ok(());
        };
        let Some(there) = self.domains.get_mut(&domain) else {
            return Ok(());
        };
        if let Some(space) = &there.space {
            self.back.detach(endpoint, space)?;
        }
        known.domain = None;
        there.endpoints -= 1;
        if there.endpoints == 0 {
            self.end(domain);
        }
        Ok(())
    }

    /// Ends a domain without endpoints.
    fn end(&mut self, domain: u32) {
        let there = self.domains.remove(&domain);
        if let Some(space) = there.and_then(|there| there.space) {
            self.close(Some(domain), space);
        }
    }

    fn close(&mut self, domain: Option<u32>, space: Ioas) {
        if let Some(dirty) = &mut self.dirty {
            dirty.keep_all(&space, &self.memory);
        }
        if let Err(cause) = space.close() {
            self.back.failed(&Failed::NotClosed { domain, cause });
        }
    }

    // Bypass mode.

    /// Has an endpoint in the identity if it is to be in bypass mode, and otherwise not.
    pub(super) fn settle(&mut self, endpoint: u32) {
        let Some(known) = self.endpoints.get(&endpoint) else {
            return;
        };
        let domain = known.domain.map(|domain| self.domains.get(&domain));
        let bypass = match domain {
            Some(there) => there.is_some_and(|there| there.space.is_none()),
            None => self.bypass,
        };
        if !bypass {
            if let Err(cause) = self.leave_identity(endpoint) {
                self.stop(endpoint, cause);
            }
        } else if let Err(cause) = self.enter_identity(endpoint) {
            self.back.failed(&Failed::NoBypass { endpoint, cause });
        }
    }

    fn enter_identity(&mut self, endpoint: u32) -> Result<(), RequestError> {
        let Some(known) = self
            .endpoints
            .get_mut(&endpoint)
            .filter(|known| !known.identity)
        else {
            return Ok(());
        };
        if self.identity.is_none() {
            let space = new_space(&mut self.back, self.dirty.as_ref())?;
            for region in &self.memory {
                map_region(&space, region).map_err(RequestError::Map)?;
            }
            self.identity = Some(Identity {
                endpoints: 0,
                space,
            });
        }
        let Some(identity) = &mut self.identity else {
            return Ok(());
        };
        match self.back.attach(endpoint, &identity.space) {
            Ok(()) => {
                known.identity = true;
                identity.endpoints += 1;
                Ok(())
            }
            Err(cause) => {
                self.end_identity_if_left();
                Err(RequestError::Attach { endpoint, cause })
            }
        }
    }

    pub(super) fn leave_identity(&mut self, endpoint: u32) -> Result<(), DetachError> {
        let known = self
            .endpoints
            .get_mut(&endpoint)
            .filter(|known| known.identity);
        let (Some(known), Some(identity)) = (known, &mut self.identity) else {
            return Ok(());
        };
        self.back.detach(endpoint, &identity.space)?;
        known.identity = false;
        identity.endpoints -= 1;
        self.end_identity_if_left();
        Ok(())
    }

    fn end_identity_if_left(&mut self) {
        let left = self.identity.take_if(|identity| identity.endpoints == 0);
        if let Some(identity) = left {
            self.close(None, identity.space);
        }
    }

    /// The guest's memory is another one: `before` was it.
    pub(super) fn renew_identity(&mut self, before: &[MemoryRegion]) {
        let Some(identity) = &mut self.identity else {
            return;
        };
        let (back, memory) = (&mut self.back, &self.memory);
        let among = |regions: &[MemoryRegion], one: &MemoryRegion| {
            regions.iter().any(|other| other.is(one))
        };
        for gone in before.iter().filter(|region| !among(memory, region)) {
            let region = gone.span();
            // In this address space device addresses are the guest's.
            if let Err(cause) = identity.space.unmap(region.cast()) {
                back.failed(&Failed::RegionLeft { region, cause });
            }
        }
        for new in memory.iter().filter(|region| !among(before, region)) {
            let region = new.span();
            if let Err(cause) = map_region(&identity.space, new) {
                back.failed(&Failed::NoRegion { region, cause });
            }
        }
    }

    // Properties.

    /// PROBE (5.13.6.7): writes the endpoint's properties to `out`, which are zeros of `probe_size` bytes.
    pub(super) fn probe(&self, request: &Probe, out: &mut [u8]) -> Result<(), RequestError> {
        let endpoint = request.endpoint;
        let needed = self.config.probe_bytes as usize;
        if out.len() != needed {
            let given = out.len();
            return Err(RequestError::Probe { given, needed });
        }
        let known = self.endpoints.get(&endpoint);
        let known = known.ok_or(RequestError::NoEndpoint { endpoint })?;
        let properties = known.reserved.iter().flat_map(|part| part.to_bytes());
        for (place, byte) in out.iter_mut().zip(properties) {
            *place = byte;
        }
        Ok(())
    }
}

/// An address space in which it is tracked what endpoints write to, if it is tracked.
fn new_space<D: Domains>(back: &mut D, dirty: Option<&Dirty>) -> Result<Ioas, RequestError> {
    let space = back.space().map_err(RequestError::Space)?;
    if let Some(dirty) = dirty {
        let tracked = space.track_dirty(dirty.tracking);
        tracked.map_err(|cause| RequestError::Space(Box::new(cause)))?;
    }
    Ok(space)
}

/// Maps a region at its own addresses.
fn map_region(space: &Ioas, region: &MemoryRegion) -> Result<(), ioas::MapError> {
    let whole = Span::new(0, region.memory.len());
    space.map(region.start, &region.memory, whole, Prot::RW)
}
