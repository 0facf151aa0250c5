//! VFIO: containers, groups and devices, as Linux has them.
//!
//! A thin layer: one call is one ioctl (or two, where the length of an answer has to be learned),
//! with types instead of numbers. The meaning of an error number is left to the caller, which knows what was
//! asked for. Functions that give the kernel an address of this process are `unsafe`: the kernel
//! keeps the address, and does not keep the memory mapped there.
//!
//! # The order of things
//!
//! 1. [`Container::open`], or [`Container::from_fd`] with an open `/dev/iommu`: iommufd then plays
//!    the container (the compatibility layer).
//! 2. [`Group::open`]; it must be [viable](Group::status): every device of it is bound to VFIO, or
//!    to nothing. A group is never divided.
//! 3. [`Group::set_container`], then [`Container::set_iommu`]: from now on there is a domain, and
//!    mapping works.
//! 4. [`Group::device`], [`VfioDevice::region`], [`VfioDevice::set_irq_triggers`], [`VfioDevice::set_bus_master`]: now the
//!    device can do DMA, and its interrupts arrive.
#![cfg_attr(
    feature = "iommufd",
    doc = "\n\
           Without groups: [`VfioDevice::open_cdev`] binds a device's own node to an \
           [`Iommufd`](crate::iommufd::Iommufd), and [`VfioDevice::attach`] gives it an address space."
)]
//!
//! The kernel counts who uses what: a container lives on while a group is in it, and a group while
//! a device of it is open, whatever has been dropped here.
//!
//! Source: Linux `Documentation/driver-api/vfio.rst`, `include/uapi/linux/vfio.h`.

#[cfg(feature = "iommufd")]
mod cdev;
mod container;
mod device;
mod dma_buf;
mod group;
mod info;
#[cfg(feature = "vfio-ioctls")]
mod ioctls;
#[cfg(test)]
mod layout;
#[cfg(feature = "iommufd")]
mod peer;
mod registers;
mod sys;
#[cfg(test)]
mod tests;
mod type1;

#[cfg(feature = "iommufd")]
pub use cdev::PageTable;
pub use container::{Container, Extension, IommuModel};
pub use device::{DeviceFeature, DeviceInfo, IrqInfo, VfioDevice, config, irq};
pub use dma_buf::DmaBuf;
pub use group::{Group, GroupStatus};
pub use info::{DeviceRegion, DeviceRegionKind, IommuInfo, MigrationInfo};
#[cfg(feature = "vfio-ioctls")]
pub use ioctls::VfioOpsMapper;
#[cfg(feature = "iommufd")]
pub use peer::{PeerBar, PeerBarError};
pub use registers::{DeviceRegisters, Register};
pub use type1::{ContainerMapper, Type1};

pub use crate::kernel::{AnswerError, KernelError};
