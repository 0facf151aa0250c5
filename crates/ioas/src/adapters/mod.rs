//! Traits of other crates, implemented over an address space or a kernel's interface; a module for each crate.

#[cfg(feature = "vfio-ioctls")]
pub(crate) mod vfio_ioctls;
#[cfg(feature = "virtio-drivers")]
pub(crate) mod virtio_drivers;
#[cfg(feature = "vm-memory")]
pub(crate) mod vm_memory;
