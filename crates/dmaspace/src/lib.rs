//! Device memory for virtual machines, hypervisors and user-space drivers.

pub mod map;

pub use {hostmem, ioas, iommu, iopt, runs};
