#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! For authors of monitors, who give a guest's memory to devices, and of drivers in user space.
//!
//! An [`Ioas`] is what devices of one owner see as memory. This crate is the only place that knows
//! that memory has owners and limits: mapping a part of a [`Memory`] charges it to the [`Ledger`],
//! pins it, learns its physical runs from the pin, and fills the page tables by these runs, all or
//! nothing. What is mapped a second time, here or in another address space, is pinned and charged
//! already. Unmapping goes the other way and unpins nothing before every unit has invalidated it.
//!
//! The core needs an allocator but not `std`; without it locks spin, between the calls of a kernel's `LockHooks`. The
//! feature `linux` adds memory objects that the kernel pins (`HostMemory`) and table memory of the host (`HostTables`,
//! and `NodeTables` by node).
//!
//! Devices reach the memory through tables of ours, or, with the features `vfio` and `iommufd`, through
//! mappings of the kernel's interfaces of these names ([`Kernel`]), as is chosen at run time. All of them
//! have the same errors; [`Ioas::capabilities`] says what each can do.

#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(any(test, feature = "std"))]
extern crate std;

mod area;
mod areas;
mod backend;
mod choose;
#[cfg(feature = "linux")]
mod counters;
mod cutting;
mod dirty;
mod dma;
mod endpoint;
mod errno;
mod error;
mod external;
mod given;
#[cfg(all(feature = "linux", feature = "vm-memory"))]
mod guest_ram;
#[cfg(all(feature = "linux", feature = "virtio-drivers"))]
mod host_pages;
mod intervals;
#[cfg(feature = "iommufd")]
pub mod iommufd;
#[cfg(any(feature = "vfio", feature = "iommufd"))]
mod kernel;
mod ledger;
#[cfg(feature = "linux")]
mod linux;
mod listener;
mod lock;
mod memory;
#[cfg(feature = "linux")]
mod node_tables;
mod object;
mod observer;
mod op;
mod own;
mod placement;
mod range_map;
mod released;
mod reserved;
mod retired;
mod space;
mod synthetic;
mod taken;
#[cfg(feature = "vfio")]
pub mod vfio;
#[cfg(feature = "virtio-drivers")]
mod virtio_hal;
#[cfg(feature = "vm-memory")]
mod vm_memory;
mod windows;

pub use area::Area;
pub use backend::{Capabilities, Capability, Unsupported};
pub use dirty::{HarvestError, Harvested, Tracking, TrackingError};
pub use dma::{Dma, DmaBuffer, DmaError, DmaUnmapError};
pub use endpoint::{Endpoint, EndpointId};
pub use errno::{Errno, Profile};
pub use error::{AttachError, CloseError, DetachError, MapError, UnmapError};
pub use external::{ExternalPin, PinError, PinUser, ROUNDS, WhenUnmapped};
pub use given::{GivenRuns, NoPages};
#[cfg(all(feature = "linux", feature = "vm-memory"))]
pub use guest_ram::{GuestRam, GuestRamError, RegionFailed};
#[cfg(all(feature = "linux", feature = "virtio-drivers"))]
pub use host_pages::HostPages;
#[cfg(any(feature = "vfio", feature = "iommufd"))]
pub use kernel::{
    Entering, Kernel, KernelError, Mapper, MapperInfo, Shares, Source, pieces_needed,
};
pub use ledger::{Charge, Forecast, Ledger, OverLimit};
#[cfg(feature = "linux")]
pub use linux::{Effort, HostMemory, HostTables, MappedStorage};
pub use listener::Listener;
#[cfg(not(feature = "std"))]
pub use lock::spinning::LockHooks;
pub use memory::{Hold, Memory};
#[cfg(feature = "linux")]
pub use node_tables::{Misplaced, NodeBytes, NodeTables};
pub use object::{Cause, MemoryObject, PinFailed, Pinned, ProcessMemory, RunReader};
pub use observer::{Observer, Step};
pub use own::{
    BuildDomain, Builder, BuilderError, DecodeError, DomainIds, HandOverError, HandedArea,
    HandedDomain, Handover, Leaving, TakeOverError, TakenDomain,
};
pub use placement::{NoPlacement, Place, Placement};
pub use released::ReleaseError;
pub use retired::Flushing;
pub use space::{Ioas, Unmapped};
pub use synthetic::Synthetic;
#[cfg(feature = "virtio-drivers")]
pub use virtio_hal::{
    DmaPages, DriverMemory, DriverMemoryError, HalMemory, PageSource, UNREACHABLE, VirtioHal,
};
#[cfg(feature = "vm-memory")]
pub use vm_memory::GuestIommu;
