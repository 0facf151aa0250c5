//! Traits of other crates, implemented over an address space; a module for each crate.

#[cfg(all(feature = "linux", feature = "virtio-drivers"))]
pub(crate) mod host_pages;
#[cfg(feature = "virtio-drivers")]
pub(crate) mod virtio_drivers;
#[cfg(feature = "vm-memory")]
pub(crate) mod vm_memory;
