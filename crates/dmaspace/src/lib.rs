#![doc = include_str!("../README.md")]
//!
//! # Names at the top level
//!
//! Authors of monitors, of drivers and of devices need these. Everything else is in the [modules](#modules).
//!
//! ## Addresses
//!
//! Addresses and lengths are in bytes.
//!
//! * [`Span`]: a stretch of one address space; [`Iova`], [`Pa`], [`GuestAddr`] and [`Offset`] name the space;
//! * [`Run`]: a stretch that is contiguous in device addresses and in memory;
//! * [`PageSizes`]: a set of page sizes.
//!
//! ## Address spaces
//!
//! * [`Ioas`]: the memory that devices of one owner see, in [`Area`]s with their [`Prot`]; opened with [`IoasOptions`];
//! * [`OpenSpace`]: the seam to what it is opened over, [`Iommufd`], [`Type1`], [`Iommu`] or [`SoftwareIommu`]; [`Mapper`] is
//!   the seam to a kernel interface of another;
//! * [`Memory`]: a memory object with its pins, charged to a [`Ledger`]; [`HostMemory`] is one of this process;
//! * [`GuestRam`]: a guest's memory of the crate `vm-memory`, as it is mapped (feature `vm-memory`);
//! * [`Endpoint`]: a device that can be attached;
//! * [`Capabilities`]: operations that a back end offers beside map and unmap;
//! * [`Tracking`], [`Harvested`]: dirty pages;
//! * [`Observer`]: steps of one operation; [`Listener`]: areas that come and go;
//! * [`GuestIommu`], [`ExternalPin`] and [`WhenUnmapped`]: access for device models in this process;
//! * errors: [`OpenError`], [`MapError`], [`UnmapError`], [`AttachError`], [`DetachError`], [`CloseError`], [`ReleaseError`], [`TrackingError`],
//!   [`HarvestError`], [`Unsupported`].
//!
//! ## Memory of this process
//!
//! * [`Mapping`]: a memory object of a kind of [`Backing`], of which hugetlb has a [`HugeSize`];
//! * [`Pinner`]: pins it, within the [`Limits`] of the process by [`Counter`];
//! * [`ShrinkWatch`]: a mapping of a file that another process may shorten.
//!
//! ## DMA buffers of a driver
//!
//! * [`Dma`], [`DmaBuffer`]: a mapping for each request, in page tables of its own; over VFIO or iommufd
//!   use [`Ioas::map_anywhere`];
//! * [`VirtioHal`], [`HalMemory`], [`DriverMemory`], [`HostPages`]: memory for drivers of the crate `virtio-drivers` (feature
//!   `virtio-drivers`).
//!
//! ## Kernel interfaces
//!
//! * [`Iommufd`]: an open `/dev/iommu`; [`BoundDevice`] is a device of it (feature `iommufd`; more in [`iommufd`]);
//! * [`Type1`]: VFIO's type 1, with [`Group`] and [`VfioDevice`] (feature `vfio`; more in [`vfio`]);
//! * [`KernelError`]: a call to the kernel that failed.
//!
//! ## Own page tables
//!
//! * [`TableBuilder`]: builds the table of each new domain, numbered by [`DomainIds`];
//! * [`AnyTable`]: one table, in the format of a [`FormatId`];
//! * [`HeapTables`], [`HostTables`], [`NodeTables`]: memory for tables on the heap, of the host, and on each node;
//! * [`Placement`]: the node of each table.
//!
//! ## IOMMU units
//!
//! * [`Unit`]: the seam to a unit, which knows devices by [`DeviceId`], domains by [`DomainId`], its node by [`NodeId`];
//! * [`Iommu`]: a unit with memory for its page tables, over which address spaces are opened;
//! * [`SpaceFault`]: a fault of such a unit, with the areas at its address ([`FaultPlace`]);
//! * [`SoftwareIommu`]: an IOMMU in software over memory of this process; [`SoftwareUnit`] is its unit, over any memory, as a
//!   [`RunMap`];
//! * [`Fault`]: a blocked access; [`FlushError`]: a flush that did not end.
//!
//! ## Balloon
//!
//! The device and [`GuestBalloon`] need the feature `vm-memory`.
//!
//! * [`GuestBalloon`]: memory that a guest gives up and takes back, by guest addresses;
//! * [`BalloonDevice`]: the virtio device without its bus, with [`BalloonSettings`];
//! * [`BalloonMonitor`]: notified of [`BalloonEvent`]s;
//! * [`Discarder`]: the seam behind which memory returns to the machine; [`GuestDiscard`] does so for `vm-memory`;
//! * [`MemoryMap`]: the guest's memory, of [`Region`]s; a [`Part`] lies in one of them;
//! * [`BalloonDma`]: address spaces that release memory before it is discarded; [`RegionMemory`]: what it needs of each region.
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
    Area, AttachError, Capabilities, CloseError, DetachError, Endpoint, ExternalPin, FaultPlace,
    HarvestError, Harvested, HostMemory, Ioas, IoasOptions, Iommu, Ledger, Listener, MapError,
    Memory, Observer, OpenError, OpenSpace, ReleaseError, SoftwareIommu, SpaceFault, Tracking,
    TrackingError, UnmapError, Unsupported, WhenUnmapped,
};
#[cfg(feature = "vm-memory")]
#[doc(inline)]
pub use ioas::{GuestIommu, GuestRam, GuestRamError};
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
    KernelError, Mapper, vfio,
    vfio::{Container, Group, Type1, VfioDevice},
};
#[cfg(feature = "iommufd")]
#[doc(inline)]
pub use ioas::{
    iommufd,
    iommufd::{BoundDevice, Iommufd},
};

#[doc(inline)]
pub use ioas::{DomainIds, HostTables, NodeTables, Placement, TableBuilder};
#[doc(inline)]
pub use iopt::{AnyTable, FormatId, HeapTables};

#[doc(inline)]
pub use iommu::{DeviceId, DomainId, Fault, FlushError, NodeId, RunMap, SoftwareUnit, Unit};

#[doc(inline)]
pub use balloon::{BalloonDma, RegionMemory};
#[cfg(feature = "vm-memory")]
#[doc(inline)]
pub use balloon::{GuestBalloon, GuestBalloonError, NotReturned};
#[cfg(feature = "vm-memory")]
#[doc(inline)]
pub use virtio_balloon::device::{
    BalloonDevice, BalloonEvent, BalloonMonitor, BalloonSettings, Discarder, GuestDiscard,
};
#[doc(inline)]
pub use virtio_balloon::{MemoryMap, Part, Region};

/// The README's example is compiled and run as it stands.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
