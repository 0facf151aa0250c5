//! virtio-iommu: a virtual IOMMU for guests (VIRTIO 1.3, 5.13, IOMMU device), over I/O address spaces.
//!
//! A guest's driver attaches devices, here called *endpoints*, to domains, and maps its memory in these.
//! Each domain is an [`ioas::Ioas`]: a MAP request is one operation on it, by runs, pinned and charged as
//! everything else there; the last endpoint that leaves a domain ends it, and everything is given back.
#![forbid(unsafe_code)]

mod config;
mod device;
mod domains;
mod fault;
pub mod features;
mod refusal;
pub mod wire;

pub use config::{Config, Endpoint, Region, SetupError};
pub use device::{Counters, Device, Error, NotOffered, Served};
pub use domains::{Domains, Units};
pub use fault::{Fault, Reason};
pub use refusal::{Failed, Refusal};
pub use wire::{
    DEVICE_ID, EVENT_QUEUE, NUM_QUEUES, QUEUE_SIZE, REQUEST_QUEUE, Reserved, ReservedKind, Status,
};
