//! A device by its own node, without groups and containers: bound to an iommufd.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use vfio_bindings::bindings::vfio::{vfio_device_attach_iommufd_pt, vfio_device_detach_iommufd_pt};

use super::device::VfioDevice;
use super::sys;
use crate::kernel::Result;
use crate::kernel::iommufd::{DevId, HwptId, IoasId, Iommufd};
use crate::kernel::sys::{call, open};

/// Target of an attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageTable {
    /// An address space: the kernel finds or makes a page table for it.
    Ioas(IoasId),
    /// A page table.
    Hwpt(HwptId),
}

impl VfioDevice {
    /// Opens the device's node, like `/dev/vfio/devices/vfio0`, and binds it to `iommufd`, where it
    /// gets a number. Closing unbinds it. (Linux 6.6.)
    ///
    /// # Errors
    ///
    /// [`KernelError::Open`](super::KernelError::Open),
    /// [`KernelError::Refused`](super::KernelError::Refused).
    pub fn open_cdev(path: &Path, iommufd: &Iommufd) -> Result<(Self, DevId)> {
        Self::bind_cdev(open(path)?, iommufd)
    }

    /// Binds a device whose node is open already, as [`open_cdev`](Self::open_cdev) does.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`](super::KernelError::Refused).
    pub fn bind_cdev(fd: OwnedFd, iommufd: &Iommufd) -> Result<(Self, DevId)> {
        let id = sys::cdev::bind(fd.as_fd(), iommufd.as_fd())?;
        Ok((Self::from_fd(fd), DevId(id)))
    }

    /// Attaches the device, or changes what it is attached to without a moment in between. Returns
    /// the page table that it has now; of an emulated device, which has none, the address space.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`](super::KernelError::Refused).
    pub fn attach(&self, to: PageTable) -> Result<HwptId> {
        let (PageTable::Ioas(IoasId(id)) | PageTable::Hwpt(HwptId(id))) = to;
        let mut argument = vfio_device_attach_iommufd_pt {
            pt_id: id,
            ..vfio_device_attach_iommufd_pt::default()
        };
        call(self.as_fd(), &mut argument)?;
        Ok(HwptId(argument.pt_id))
    }

    /// Detaches it: from now on all its DMA is blocked.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`](super::KernelError::Refused).
    pub fn detach(&self) -> Result<()> {
        let mut argument = vfio_device_detach_iommufd_pt::default();
        call(self.as_fd(), &mut argument).map(|_| ())
    }
}
