//! Devices in processes of their own, over `dmaspace-vfio-user`: a virtio disk ([`disk`]) and a DMA engine
//! ([`engine`]).
//!
//! The program `vfio-user-device` is one of them. `vfio-user-rig` starts both, has QEMU's `vfio-user-pci` boot Linux with
//! them, with and without an emulated IOMMU, and looks at what is on the disk and at what was mapped. In the guest runs
//! `vfio-user-init`.

#![forbid(unsafe_code)]

pub mod disk;
pub mod engine;
pub mod guest_side;
pub mod pci;
mod queue;
