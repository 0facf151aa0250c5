//! Endpoints: devices and groups that can be attached to an address space, with any back end.

use alloc::sync::Arc;
use core::any::Any;
use core::fmt;

use iommu::{DeviceId, NodeId, Unit};

/// A device, or a group of devices, that an [`Ioas`](crate::Ioas) can be attached to.
///
/// - A device behind a unit that walks tables of ours: [`Iommu::device`](crate::Iommu::device), or `(unit, DeviceId)`.
/// - Endpoints that the kernel knows by a file: an `Arc` of a [`vfio::Group`](crate::vfio::Group), of an
///   [`iommufd::BoundDevice`](crate::iommufd::BoundDevice), or of the device of another [`Mapper`](crate::Mapper).
///
/// A back end refuses an endpoint of another one as
/// [`AttachError::Endpoint`](crate::AttachError::Endpoint).
#[derive(Clone)]
pub struct Endpoint {
    pub(crate) kind: EndpointKind,
    /// The memory node that it is at, as far as its unit does not know better.
    pub(crate) near: Option<NodeId>,
}

#[derive(Clone)]
pub(crate) enum EndpointKind {
    Device(Arc<dyn Unit>, DeviceId),
    File(Arc<dyn Any + Send + Sync>),
}

impl Endpoint {
    /// The same at the memory node `near`, if that is known: it counts where the endpoint's unit does
    /// not know its node, and for a kernel that is to have a page table for each node.
    #[must_use]
    pub fn near(self, near: impl Into<Option<NodeId>>) -> Self {
        let near = near.into();
        Self { near, ..self }
    }

    /// Identifier of the endpoint while it is attached.
    pub fn id(&self) -> EndpointId {
        match &self.kind {
            EndpointKind::Device(_, device) => EndpointId::Device(*device),
            EndpointKind::File(file) => EndpointId::File(Arc::as_ptr(file).addr()),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("id", &self.id())
            .field("near", &self.near)
            .finish()
    }
}

impl From<(Arc<dyn Unit>, DeviceId)> for Endpoint {
    fn from((unit, device): (Arc<dyn Unit>, DeviceId)) -> Self {
        let kind = EndpointKind::Device(unit, device);
        Self { kind, near: None }
    }
}

impl<U: Unit + 'static> From<(Arc<U>, DeviceId)> for Endpoint {
    fn from((unit, device): (Arc<U>, DeviceId)) -> Self {
        Self::from((unit as Arc<dyn Unit>, device))
    }
}

impl<D: Any + Send + Sync> From<Arc<D>> for Endpoint {
    fn from(file: Arc<D>) -> Self {
        let kind = EndpointKind::File(file);
        Self { kind, near: None }
    }
}

/// Identity of an [`Endpoint`] while it is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EndpointId {
    /// A device behind a unit.
    Device(DeviceId),
    /// A kernel's device or group: where its `Arc` lies, which stays while it is attached.
    File(usize),
}

impl EndpointId {
    /// The device behind a unit.
    pub const fn device(self) -> Option<DeviceId> {
        match self {
            Self::Device(device) => Some(device),
            Self::File(_) => None,
        }
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(device) => device.fmt(f),
            Self::File(_) => f.write_str("the device file"),
        }
    }
}

impl From<DeviceId> for EndpointId {
    fn from(device: DeviceId) -> Self {
        Self::Device(device)
    }
}

impl From<&Endpoint> for EndpointId {
    fn from(endpoint: &Endpoint) -> Self {
        endpoint.id()
    }
}

impl<D> From<&Arc<D>> for EndpointId {
    fn from(file: &Arc<D>) -> Self {
        Self::File(Arc::as_ptr(file).addr())
    }
}
