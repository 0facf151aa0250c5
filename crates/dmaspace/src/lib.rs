//! Device memory for virtual machines, hypervisors and user-space drivers.

pub mod devices;
pub mod map;

pub use {hostmem, ioas, iommu, iopt, runs};
