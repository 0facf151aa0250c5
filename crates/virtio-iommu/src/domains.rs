//! The seams of the device: the maker of address spaces, to which endpoints are attached.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioas::{AttachError, DetachError, DomainIds, Ioas, TableBuilder};
use iommu::{DeviceId, Unit};
use iopt::{ErasableMemory, FormatId};
use runs::{Iova, Span};

use crate::refusal::{Failed, RequestError};
use crate::wire::Request;

/// Maker of address spaces for the device's domains, which attaches endpoints to them.
///
/// [`Units`] does so with page tables of ours. Over VFIO or iommufd a monitor writes it: `space` is a new
/// container, or an address space of the kernel, and `attach` and `detach` name its devices to it.
pub trait Domains {
    /// An address space for a new domain, without areas or devices.
    ///
    /// # Errors
    ///
    /// There can be no more: the driver is answered `NOMEM`.
    fn space(&mut self) -> Result<Ioas, ioas::Cause>;

    /// Has the DMA of an endpoint, which is in no address space, go through `space`.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    fn attach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), AttachError>;

    /// Takes `space` away from an endpoint. When it returns, none of its accesses is under way.
    ///
    /// # Errors
    ///
    /// See [`DetachError`]. The endpoint counts as attached.
    fn detach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), DetachError>;

    /// Hands the stretches of addresses to `sink` that an endpoint cannot translate.
    fn reserved(&self, endpoint: u32, sink: &mut dyn FnMut(Span<Iova>)) {
        let _ = (endpoint, sink);
    }

    /// A request is answered with [another status](RequestError::status) than `OK`: the driver learns no more
    /// than that. A guest can make as many of them as it likes, so a log needs a limit.
    fn refused(&mut self, request: Option<&Request>, refusal: &RequestError) {
        let _ = (request, refusal);
    }

    /// Something failed that no request is answered with.
    fn failed(&mut self, failed: &Failed) {
        let _ = failed;
    }
}

/// Address spaces with page tables of ours, and the units that walk them.
///
/// All tables lie in the same memory, which bounds their total size.
#[derive(Clone)]
pub struct Units<M> {
    tables: M,
    ids: Arc<DomainIds>,
    formats: Vec<FormatId>,
    endpoints: BTreeMap<u32, (Arc<dyn Unit>, DeviceId)>,
}

impl<M> Units<M> {
    /// Tables in `tables`, in the first of `formats` that a unit walks, known to units by numbers of `ids`.
    /// No endpoint is known yet.
    pub fn new(
        tables: M,
        ids: Arc<DomainIds>,
        formats: impl IntoIterator<Item = FormatId>,
    ) -> Self {
        let (formats, endpoints) = (formats.into_iter().collect(), BTreeMap::new());
        Self {
            tables,
            ids,
            formats,
            endpoints,
        }
    }

    /// An endpoint is `device` of `unit`. It is made known before it is in [`VirtioIommuConfig`](crate::VirtioIommuConfig), or is
    /// [added](crate::VirtioIommu::add_endpoint).
    pub fn insert(&mut self, endpoint: u32, unit: Arc<dyn Unit>, device: DeviceId) {
        self.endpoints.insert(endpoint, (unit, device));
    }

    /// The endpoint that is `device`, as a fault names it.
    pub fn endpoint_of(&self, device: DeviceId) -> Option<u32> {
        let mut endpoints = self.endpoints.iter();
        let found = endpoints.find(|(_, (_, known))| *known == device);
        found.map(|(id, _)| *id)
    }
}

impl<M> std::fmt::Debug for Units<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Units")
            .field("formats", &self.formats)
            .field("endpoints", &self.endpoints.keys())
            .finish_non_exhaustive()
    }
}

/// There is no unit for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {0} is no device of a unit")]
struct NoUnit(u32);

impl<M: ErasableMemory + Clone> Domains for Units<M> {
    fn space(&mut self) -> Result<Ioas, ioas::Cause> {
        let (tables, ids) = (self.tables.clone(), Arc::clone(&self.ids));
        let builder = TableBuilder::new(tables, ids, self.formats.iter().copied());
        Ok(Ioas::over_tables(builder))
    }

    fn attach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), AttachError> {
        let known = self.endpoints.get(&endpoint);
        let (unit, device) = known.ok_or_else(|| AttachError::Kernel(NoUnit(endpoint).into()))?;
        space.attach((Arc::clone(unit), *device))
    }

    fn detach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), DetachError> {
        let (_, device) = self.endpoints.get(&endpoint).ok_or(DetachError::Unknown)?;
        space.detach(*device)
    }

    fn reserved(&self, endpoint: u32, sink: &mut dyn FnMut(Span<Iova>)) {
        if let Some((unit, device)) = self.endpoints.get(&endpoint) {
            unit.reserved(*device, sink);
        }
    }
}
