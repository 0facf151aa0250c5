#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! For authors of devices that run outside of the process of a virtual machine monitor. The monitor (the *client*) connects
//! to a socket and shares the guest's memory as files; this memory is mapped in an [`Ioas`](ioas::Ioas), and
//! a device model reads and writes guest memory through the software unit that walks these tables. So a guest with an
//! IOMMU restricts the device: an access outside its mappings is a named fault.
//!
//! # Protocol
//!
//! Version 0.0 of the specification (QEMU, docs/interop/vfio-user.rst), the server's side: all requests of a
//! client but `VFIO_USER_DEVICE_GET_REGION_IO_FDS`, which is refused. Regions are reached by messages only. Memory without
//! a file is recorded, and an access to it is a fault: `VFIO_USER_DMA_READ` and `VFIO_USER_DMA_WRITE` are not
//! sent. Migration has the states stop, copy and resume; there is no pre-copy. The unit tracks the device's writes, in its
//! tables.
//!
//! # Why not the server of the crate `vfio_user`
//!
//! The client is not trusted, and that server (0.1.7) trusts it. A version message shorter than its fixed part, or
//! without a NUL at its end, ends the program; a read of a region reserves as many bytes as the client names, up to 4 GiB;
//! after a refusal of a request with data the rest of it is taken for the next header; part of a header is taken for a
//! whole one. It has no commands for dirty pages and migration, and its flags of an unmap are not Linux's, by which
//! QEMU unmaps everything. None of that can be checked in front of it, since it reads the socket itself. So the protocol
//! is here, and the tests use that crate's client as an independent peer.

#![forbid(unsafe_code)]

mod device;
mod error;
mod irqs;
mod memory;
mod migration;
mod requests;
mod server;
mod socket;
mod translation;
mod unreported;
mod wire;

pub use device::{
    CONFIG_REGION, Description, DeviceModel, INTX, IRQS, MOST_STATE, MSIX, Migration, REGIONS,
};
pub use error::{DirtyRefusal, MapRefusal, RequestRefusal, ServeError, UnmapRefusal};
pub use irqs::Irqs;
pub use memory::{ClientLimits, ClientMemory, Counts, ServerSetupError, View};
pub use server::{Server, SessionReport};
pub use translation::{AccessGuard, MOST_ACCESS, UnitIommu};
