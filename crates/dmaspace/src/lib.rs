//! Device memory for virtual machines, hypervisors and user-space drivers.

pub mod balloon;
#[cfg(feature = "bench")]
pub mod bench;
pub mod devices;
pub mod geometry;
pub mod guest;
pub mod inspect;
#[cfg(feature = "life")]
pub mod life;
pub mod map;
pub mod numa;
pub mod tables;
pub mod topology;
#[cfg(feature = "vhost-user")]
pub mod vhost;

pub use {hostmem, ioas, iommu, iopt, runs, virtio_balloon};
