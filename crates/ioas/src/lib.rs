#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! For authors of monitors, which give a guest's memory to devices, and of drivers in user space.
//!
//! An [`Ioas`] is the memory that devices of one owner see. This crate is the only place that knows
//! that memory has owners and limits: mapping a part of a [`Memory`] charges it to the [`Ledger`],
//! pins it, learns its physical runs from the pin, and fills the page tables by these runs, all or
//! nothing. Memory that is mapped a second time, here or in another address space, is pinned and
//! charged already. Unmapping reverses this, and unpins nothing before every unit has invalidated
//! the range.
//!
//! The core needs an allocator but not `std`; without it locks spin, between the calls of a kernel's `LockHooks`. The
//! feature `linux` adds memory objects that the kernel pins (`HostMemory`) and table memory of the host (`HostTables`,
//! and `NodeTables` by node).
//!
//! Devices reach the memory through tables of ours in an [`Iommu`], or, with the features `vfio` and `iommufd`, through
//! mappings of the kernel's interfaces of these names ([`OpenSpace`], [`Mapper`]), as is chosen at run time. All of them
//! have the same errors; [`Ioas::capabilities`] says what each can do.

#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(any(test, feature = "std"))]
extern crate std;

mod adapters;
mod areas;
mod capability;
mod dma;
mod errno;
#[cfg(any(feature = "vfio", feature = "iommufd"))]
mod kernel;
#[cfg(any(feature = "vfio", feature = "iommufd"))]
mod kernel_error;
mod lock;
mod memory;
mod observer;
mod own;
mod ranges;
mod space;

#[cfg(all(feature = "linux", feature = "virtio-drivers"))]
pub use adapters::host_pages::HostPages;
#[cfg(feature = "virtio-drivers")]
pub use adapters::virtio_drivers::{
    DmaPages, DriverMemory, DriverMemoryError, HalMemory, PageSource, UNREACHABLE, VirtioHal,
};
#[cfg(feature = "vm-memory")]
pub use adapters::vm_memory::GuestIommu;
pub use areas::area::Area;
pub use capability::{Capability, Unsupported};
pub use dma::{Dma, DmaBuffer, DmaError, DmaUnmapError};
pub use errno::{Errno, Profile};
#[cfg(feature = "iommufd")]
pub use kernel::iommufd;
#[cfg(feature = "vfio")]
pub use kernel::vfio;
#[cfg(any(feature = "vfio", feature = "iommufd"))]
pub use kernel::{Entering, KernelError, MapSource, Mapper, MapperInfo, Shares, pieces_needed};
#[cfg(not(feature = "std"))]
pub use lock::spinning::LockHooks;
pub use memory::fixed::{FixedRuns, UnalignedRun};
#[cfg(feature = "linux")]
pub use memory::host::{Effort, HostMemory, HostTables, MappedStorage};
pub use memory::ledger::{Charge, Forecast, Ledger, OverLimit};
#[cfg(feature = "linux")]
pub use memory::node_tables::{Misplaced, NodeBytes, NodeTables};
pub use memory::object::{Cause, MemoryObject, PinFailed, Pinned, ProcessMemory, RunReader};
pub use memory::synthetic::Synthetic;
pub use memory::{Hold, Memory};
pub use observer::{Observer, Step};
#[cfg(feature = "linux")]
pub use own::software::{PinnedMemory, SoftwareIommu, SoftwareIommuUnit, SoftwarePort};
pub use own::{
    BuildDomain, DecodeError, DomainIds, FaultPlace, HandOverError, HandedArea, HandedDomain,
    Handover, Iommu, Leaving, SpaceFault, TableBuilder, TableBuilderError, TakeOverError,
    TakenDomain,
};
pub use space::backend::Capabilities;
pub use space::dirty::{HarvestError, Harvested, Tracking, TrackingError};
pub use space::endpoint::{Endpoint, EndpointId};
pub use space::error::{AttachError, CloseError, DetachError, MapError, UnmapError};
pub use space::external_pin::{ExternalPin, ExternalPinError, PinUser, ROUNDS, WhenUnmapped};
pub use space::flush::Flushing;
#[cfg(all(feature = "linux", feature = "vm-memory"))]
pub use space::guest_ram::{GuestRam, GuestRamError};
pub use space::listener::Listener;
pub use space::observed::Observed;
pub use space::open::{IoasOptions, OpenError, OpenSpace};
pub use space::placement::{NoPlacement, Place, Placement};
pub use space::release::ReleaseError;
pub use space::{Ioas, Unmapped};
