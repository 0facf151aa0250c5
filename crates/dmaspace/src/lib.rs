#![doc = include_str!("../README.md")]
//!
//! # Names at the top level
//!
//! Their users are authors of monitors, of drivers and of devices; everything else is reached by the crates below.
//!
//! **Addresses**, all in bytes: [`Span`] and [`Run`]; [`Iova`], [`Pa`], [`GuestAddr`] and [`Offset`] name the space of a span;
//! [`PageSizes`].
//!
//! **Address spaces**: [`Ioas`] with its [`Area`]s; [`Prot`]; [`Memory`] and [`HostMemory`], charged to a [`Ledger`]; [`GuestRam`], a
//! guest's memory of the crate `vm-memory`; [`Endpoint`], what can be attached; [`Capabilities`]; [`Tracking`] and [`Harvested`]; an
//! [`Observer`] of one operation, a [`Listener`] of all; [`GuestIommu`] and [`ExternalPin`] ([`WhenUnmapped`]) for device models in the
//! process. Errors:
//! [`MapError`], [`UnmapError`], [`AttachError`], [`DetachError`], [`CloseError`], [`ReleaseError`], [`TrackingError`],
//! [`HarvestError`], [`Unsupported`].
//!
//! **Memory of this process**: [`Mapping`] of a kind of [`Backing`], by pages of a [`HugeSize`]; [`Pinner`]; the [`Limits`] of the
//! process by [`Counter`]; [`ShrinkWatch`] for files that another process may shorten.
//!
//! **DMA buffers of a driver**: [`Dma`] and [`DmaBuffer`]; with the feature `virtio-drivers` [`VirtioHal`], [`DriverMemory`],
//! [`HalMemory`] and [`HostPages`].
//!
//! **Over the kernel**: [`Container`], [`Group`], [`VfioDevice`]; [`BoundDevice`]; [`KernelError`]. More is in [`vfio`] and [`iommufd`].
//!
//! **Own page tables**: a [`TableBuilder`] with [`DomainIds`], or one [`AnyTable`] of a [`FormatId`]; their memory as [`HeapTables`],
//! [`HostTables`] or by node as [`NodeTables`]; [`Placement`].
//!
//! **IOMMU units**: the trait [`Unit`]; [`DeviceId`], [`DomainId`], [`NodeId`]; a [`SoftwareUnit`] over a [`RunMap`]; [`Fault`],
//! [`FlushError`].
//!
//! **Balloon**: a [`BalloonDevice`] with its [`BalloonSettings`], [`BalloonMonitor`] and [`BalloonEvent`]s; [`GuestDiscard`] behind the
//! trait [`Discarder`]; the guest's [`MemoryMap`] of [`Region`]s and [`Part`]s; [`BalloonDma`] and [`RegionMemory`], so that devices
//! release memory first.
//!
//! # Modules
//!
//! * [`balloon`]: memory released by devices before a balloon discards it, and restored before the guest has it back;
//! * [`devices`], [`topology`]: the machine's devices, and its memory nodes;
//! * [`layout`]: a guest's memory layout against what the host can map;
//! * [`firmware`]: reserved regions and units of the tables DMAR and IVRS;
//! * [`vfio`], [`iommufd`]: the kernel's interfaces;
//! * [`vhost`]: vhost-user back ends, with the feature of this name;
//! * [`vfio_user`]: devices in processes of their own, with the feature `vfio-user`;
//! * the crates below, whole: [`runs`], [`iopt`], [`hostmem`], [`iommu`], [`ioas`], [`virtio_balloon`]; with the feature `virtio-iommu`
//!   also [`virtio_iommu`].
//!
//! The program is in the crate `dmaspace-cli`. A guide for each user is in `docs/guides` of the repository.

#![forbid(unsafe_code)]
// Links to names of features that are off.
#![cfg_attr(
    not(all(
        feature = "iommufd",
        feature = "vfio-user",
        feature = "vhost",
        feature = "virtio-drivers"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]

pub mod balloon;
pub mod devices;
pub mod firmware;
pub mod layout;
pub mod topology;
#[cfg(feature = "vhost")]
pub mod vhost;

pub use {hostmem, ioas, iommu, iopt, runs, virtio_balloon};

#[cfg(feature = "vfio-user")]
pub use dmaspace_vfio_user as vfio_user;
#[cfg(feature = "virtio-iommu")]
pub use virtio_iommu;

#[doc(inline)]
pub use runs::{GuestAddr, Iova, Offset, Pa, PageSizes, Run, Span};

#[doc(inline)]
pub use ioas::{
    Area, AttachError, Capabilities, CloseError, DetachError, Endpoint, ExternalPin, HarvestError,
    Harvested, HostMemory, Ioas, Ledger, Listener, MapError, Memory, Observer, ReleaseError,
    Tracking, TrackingError, UnmapError, Unsupported, WhenUnmapped,
};
#[cfg(feature = "vm-memory")]
#[doc(inline)]
pub use ioas::{GuestIommu, GuestRam};
#[doc(inline)]
pub use iopt::Prot;

#[doc(inline)]
pub use hostmem::{Backing, Counter, HugeSize, Limits, Mapping, Pinner, ShrinkWatch};

#[doc(inline)]
pub use ioas::{Dma, DmaBuffer};
#[cfg(feature = "virtio-drivers")]
#[doc(inline)]
pub use ioas::{DriverMemory, HalMemory, HostPages, VirtioHal};

#[cfg(feature = "vfio")]
#[doc(inline)]
pub use ioas::{
    KernelError, vfio,
    vfio::{Container, Device as VfioDevice, Group},
};
#[cfg(feature = "iommufd")]
#[doc(inline)]
pub use ioas::{iommufd, iommufd::BoundDevice};

#[doc(inline)]
pub use ioas::{Builder as TableBuilder, DomainIds, HostTables, NodeTables, Placement};
#[doc(inline)]
pub use iopt::{AnyTable, FormatId, HeapTables};

#[doc(inline)]
pub use iommu::{DeviceId, DomainId, Fault, FlushError, NodeId, RunMap, SoftwareUnit, Unit};

#[doc(inline)]
pub use balloon::{BalloonDma, RegionMemory};
#[cfg(feature = "vm-memory")]
#[doc(inline)]
pub use virtio_balloon::device::{
    Device as BalloonDevice, Discarder, Event as BalloonEvent, GuestDiscard,
    Monitor as BalloonMonitor, Settings as BalloonSettings,
};
#[doc(inline)]
pub use virtio_balloon::{MemoryMap, Part, Region};

/// The README's example is compiled and run as it stands.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
