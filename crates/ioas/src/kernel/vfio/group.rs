//! A group: the devices that an IOMMU cannot tell apart, so that they are given away together.

use std::ffi::CString;
use std::format;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use vfio_bindings::bindings::vfio::{
    VFIO_GROUP_FLAGS_CONTAINER_SET, VFIO_GROUP_FLAGS_VIABLE, vfio_group_status,
};

use super::container::Container;
use super::device::VfioDevice;
use super::sys;
use crate::kernel::sys::{call, open};
use crate::kernel::{KernelError, Result};

/// State of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupStatus {
    /// All its devices are bound to VFIO, or to no driver that does DMA.
    pub viable: bool,
    /// It is in a container.
    pub in_container: bool,
}

/// An open group. Only one process can have it open.
#[derive(Debug)]
pub struct Group {
    fd: OwnedFd,
}

impl Group {
    /// Opens the group with this number, as `/sys/kernel/iommu_groups` has it.
    ///
    /// # Errors
    ///
    /// [`KernelError::Open`].
    pub fn open(number: u32) -> Result<Self> {
        let path = PathBuf::from(format!("/dev/vfio/{number}"));
        open(&path).map(|fd| Self { fd })
    }

    /// Opens the group of the PCI device `address` (`0000:01:00.0`).
    ///
    /// # Errors
    ///
    /// [`KernelError::NoGroup`], [`KernelError::Open`].
    pub fn of_device(address: &str) -> Result<Self> {
        let link = PathBuf::from("/sys/bus/pci/devices")
            .join(address)
            .join("iommu_group");
        let group = fs::read_link(link).ok();
        let number = group.as_deref().and_then(Path::file_name);
        let number = number.and_then(|name| name.to_str()?.parse().ok());
        Self::open(number.ok_or_else(|| KernelError::NoGroup {
            device: address.into(),
        })?)
    }

    /// A group that is open already.
    pub const fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// The state that it is in.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn status(&self) -> Result<GroupStatus> {
        let mut status = vfio_group_status::default();
        call(self.as_fd(), &mut status)?;
        Ok(GroupStatus {
            viable: status.flags & VFIO_GROUP_FLAGS_VIABLE != 0,
            in_container: status.flags & VFIO_GROUP_FLAGS_CONTAINER_SET != 0,
        })
    }

    /// Puts the group into a container. With the first one the container learns what it can do.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn set_container(&self, container: &Container) -> Result<()> {
        sys::set_container(self.as_fd(), container.as_fd())
    }

    /// Takes it out again; all its devices must be closed. With the last group the container loses
    /// its mappings.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn unset_container(&self) -> Result<()> {
        sys::call_bare(self.as_fd(), sys::UNSET_CONTAINER).map(|_| ())
    }

    /// Opens a device of the group by its name on its bus, like `0000:00:05.0`.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; [`KernelError::Name`].
    pub fn device(&self, name: &str) -> Result<VfioDevice> {
        let name = CString::new(name).map_err(|_| KernelError::Name)?;
        sys::device_fd(self.as_fd(), &name).map(VfioDevice::from_fd)
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
