#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! * [`balloon`]: devices let go before a balloon's memory is discarded, and have it back before the guest;
//! * [`devices`], [`topology`]: the machine's devices, and its memory nodes;
//! * [`layout`]: a guest's memory layout against what the host can map;
//! * [`firmware`]: reserved regions and units of the tables DMAR and IVRS;
//! * the crates below, whole: [`runs`], [`iopt`], [`hostmem`], [`iommu`], [`ioas`], [`virtio_balloon`]; with the
//!   feature `virtio-iommu` also `virtio_iommu`;
//! * with the feature `vhost`, `vhost`: vhost-user back ends; the program is in `dmaspace-cli`.
//!
//! A guide for each user is in `docs/guides` of the repository.

#![forbid(unsafe_code)]

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

/// The README's example is compiled and run as it stands.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
