//! Page tables, and abilities of the hardware behind a device.

use std::os::fd::AsFd;
use std::vec::Vec;

use iommufd_bindings::{
    iommu_hwpt_set_dirty_tracking,
    iommufd_hw_capabilities_IOMMU_HW_CAP_DIRTY_TRACKING as CAP_DIRTY_TRACKING,
    iommufd_hwpt_alloc_flags_IOMMU_HWPT_ALLOC_DIRTY_TRACKING as ALLOC_DIRTY_TRACKING,
    iommufd_hwpt_get_dirty_bitmap_flags_IOMMU_HWPT_GET_DIRTY_BITMAP_NO_CLEAR as NO_CLEAR,
    iommufd_hwpt_set_dirty_tracking_flags_IOMMU_HWPT_DIRTY_TRACKING_ENABLE as ENABLE,
};
use runs::{Iova, Span};

use super::{DevId, HwptId, IoasId, Iommufd, sys};
use crate::kernel::Result;
use crate::kernel::sys::call;

/// Unit behind a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HwInfo {
    /// `IOMMU_HW_INFO_TYPE_…`: 0 none that says more, 1 VT-d, 2 SMMUv3, 4 AMD.
    pub kind: u32,
    /// Data of that kind of unit, as its driver writes it.
    pub data: Vec<u8>,
    /// Dirty pages can be tracked.
    pub dirty_tracking: bool,
    /// Bits of a PASID; 0 when the device has none.
    pub pasid_bits: u8,
}

/// Effect of reading dirty bits on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// They are cleared.
    Yes,
    /// They are left: the range is to be unmapped next.
    No,
}

impl Iommufd {
    /// A page table over all that is mapped in `ioas`, of the kind that `device` needs. With
    /// `dirty_tracking` no device can be attached to it that does not track dirty pages.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`](super::KernelError::Refused).
    pub fn alloc_hwpt(&self, device: DevId, ioas: IoasId, dirty_tracking: bool) -> Result<HwptId> {
        let flags = if dirty_tracking {
            ALLOC_DIRTY_TRACKING
        } else {
            0
        };
        sys::alloc_hwpt(self.as_fd(), flags, device.0, ioas.0).map(HwptId)
    }

    /// Removes a page table that no device is attached to.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`](super::KernelError::Refused).
    pub fn destroy_hwpt(&self, hwpt: HwptId) -> Result<()> {
        self.destroy(hwpt.0)
    }

    /// Starts or stops tracking which pages devices write to. Starting discards old dirty bits.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`](super::KernelError::Refused).
    pub fn set_dirty_tracking(&self, hwpt: HwptId, on: bool) -> Result<()> {
        let mut argument = iommu_hwpt_set_dirty_tracking {
            flags: if on { ENABLE } else { 0 },
            hwpt_id: hwpt.0,
            ..iommu_hwpt_set_dirty_tracking::default()
        };
        call(self.as_fd(), &mut argument).map(|_| ())
    }

    /// Adds the dirty pages of a range to a bitmap: bit *n* is the *n*-th page of `page` bytes from
    /// `iova.start` on; bits that are set stay set. `page` is a power of two that divides both ends
    /// of the range.
    ///
    /// # Errors
    ///
    /// [`KernelError::Bitmap`](super::KernelError::Bitmap),
    /// [`KernelError::Refused`](super::KernelError::Refused). A hole in the range is no error.
    pub fn dirty_bitmap(
        &self,
        hwpt: HwptId,
        iova: Span<Iova>,
        page: u64,
        bitmap: &mut [u64],
        clear: Clear,
    ) -> Result<()> {
        let flags = match clear {
            Clear::Yes => 0,
            Clear::No => NO_CLEAR,
        };
        sys::dirty_bitmap(self.as_fd(), hwpt.0, flags, iova, page, bitmap)
    }

    /// Unit behind a device.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`](super::KernelError::Refused),
    /// [`KernelError::Answer`](super::KernelError::Answer).
    pub fn hw_info(&self, device: DevId) -> Result<HwInfo> {
        let info = sys::hw_info(self.as_fd(), device.0)?;
        Ok(HwInfo {
            kind: info.kind,
            data: info.data,
            dirty_tracking: info.capabilities & u64::from(CAP_DIRTY_TRACKING) != 0,
            pasid_bits: info.pasid_bits,
        })
    }
}
