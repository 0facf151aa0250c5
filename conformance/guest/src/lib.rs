//! A Linux guest under emulated IOMMUs: the kernel's own VFIO and iommufd as counterparts.
//!
//! The program `guests` takes a small kernel ([`conformance::kernel`]), packs `guest-init` and the command
//! line `dmaspace` into an initramfs, boots it in QEMU ([`qemu`]) as each of the
//! [`machines`], and reads what `guest-init` has to say ([`console`]). All of it is emulated in
//! software: it takes no privilege, and nothing of the machine itself is touched.
//!
//! Tests of each machine stand in one table, [`machines::MACHINES`], that both sides are
//! compiled from: the guest runs them, and the host waits for each of them by name. What only the host
//! needs stands behind the feature `host`, so that the guest's program is built quickly.
//!
//! Another kernel and another first process, `guest-dma`, measure Linux's DMA API beside `ioas::Dma` ([`dma`]); others run
//! Linux's own tests ([`linux_tests`]).

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod benchmark;
pub mod console;
#[cfg(feature = "host")]
pub mod dma;
#[cfg(feature = "host")]
pub mod firmware;
#[cfg(feature = "host")]
pub mod linux_tests;
pub mod machines;
pub mod pci;
#[cfg(feature = "host")]
pub mod qemu;
pub mod samples;
pub mod start;
#[cfg(feature = "measure")]
pub mod unit;
#[cfg(feature = "host")]
pub mod viot;
#[cfg(feature = "host")]
pub mod virtio_iommu;
