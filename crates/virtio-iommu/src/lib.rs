#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! A guest's driver attaches devices, here called *endpoints*, to domains, and maps its memory in these.
//! Each domain is an [`ioas::Ioas`]: a MAP request is one operation on it, by runs, pinned and charged
//! like any other; when its last endpoint leaves, a domain ends, and everything is given back.
//!
//! * [`VirtioIommu`] is the device, without a transport: features, configuration space, requests, faults, bypass
//!   mode, reset. [`VirtioIommuConfig`] has its features, limits and endpoints.
//! * [`Domains`] is the seam to the maker of address spaces, which attaches endpoints to them; [`Units`] is one with
//!   page tables of ours and any [`iommu::Unit`].
//! * [`wire`] has the messages, [`features`] the feature bits. [`FaultReport`] is what the driver receives for an access
//!   that was blocked, [`RequestError`] what the monitor receives for a request that is refused.
//!
//! A monitor describes memory by [`MemoryRegion`]s: addresses in requests are the guest's. Nothing panics on any
//! input, and no request allocates without a limit. `tests/device/requirements.txt` in the repository has the
//! standard's requirements, each with its tests.

#![forbid(unsafe_code)]

mod config;
mod device;
mod domains;
mod fault;
pub mod features;
mod refusal;
pub mod wire;

pub use config::{ConfigError, EndpointConfig, MemoryRegion, VirtioIommuConfig};
pub use device::{NotOffered, RequestCounters, RingError, Served, VirtioIommu};
pub use domains::{Domains, Units};
pub use fault::{FaultReport, ReportReason};
pub use refusal::{Failed, RequestError};
pub use wire::{
    DEVICE_ID, EVENT_QUEUE, NUM_QUEUES, QUEUE_SIZE, REQUEST_QUEUE, ReservedKind, ReservedMemory,
    Status,
};
