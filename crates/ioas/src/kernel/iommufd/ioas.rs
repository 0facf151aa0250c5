//! Address spaces: windows, mappings, copies.

use core::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::vec::Vec;

use iommufd_bindings::{
    iommu_ioas_alloc, iommu_ioas_copy, iommu_ioas_map_file, iommu_ioas_unmap, iommu_vfio_ioas,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as FIXED,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as WRITEABLE,
    iommufd_option_IOMMU_OPTION_HUGE_PAGES as HUGE_PAGES,
    iommufd_option_ops_IOMMU_OPTION_OP_GET as GET, iommufd_option_ops_IOMMU_OPTION_OP_SET as SET,
    iommufd_vfio_ioas_op_IOMMU_VFIO_IOAS_CLEAR as VFIO_CLEAR,
    iommufd_vfio_ioas_op_IOMMU_VFIO_IOAS_GET as VFIO_GET,
    iommufd_vfio_ioas_op_IOMMU_VFIO_IOAS_SET as VFIO_SET,
};
use iopt::Prot;
use runs::{Iova, Offset, Span, Va};

use super::{IoasId, Iommufd, sys};
use crate::kernel::sys::call;
use crate::kernel::{KernelError, Result};

/// Device addresses that can be mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IovaRanges {
    /// Device addresses, first and last. They change as devices are attached and detached.
    pub ranges: Vec<RangeInclusive<u64>>,
    /// Alignment of a mapping's ends, bytes; 1 with no device.
    pub alignment: u64,
}

impl Iommufd {
    /// A new, empty address space.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn alloc_ioas(&self) -> Result<IoasId> {
        let mut argument = iommu_ioas_alloc::default();
        call(self.as_fd(), &mut argument)?;
        Ok(IoasId(argument.out_ioas_id))
    }

    /// Removes an address space that nothing is attached to, and unmaps what is in it.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn destroy_ioas(&self, ioas: IoasId) -> Result<()> {
        self.destroy(ioas.0)
    }

    /// Ranges that can be mapped with the devices attached now.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; [`KernelError::Answer`].
    pub fn iova_ranges(&self, ioas: IoasId) -> Result<IovaRanges> {
        let (ranges, alignment) = sys::iova_ranges(self.as_fd(), ioas.0)?;
        Ok(IovaRanges { ranges, alignment })
    }

    /// Makes sure that these ranges can always be mapped: a device that would take one is refused.
    /// Addresses are allocated only there. Replaces the ranges of an earlier call.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn allow_iovas(&self, ioas: IoasId, ranges: &[RangeInclusive<u64>]) -> Result<()> {
        sys::allow_iovas(self.as_fd(), ioas.0, ranges)
    }

    /// Maps `memory` (address in this process and length) at `iova`, or where the kernel finds
    /// room; returns the device address.
    ///
    /// This is `unsafe` where mapping an area of an address space is not, since iommufd remembers
    /// an address and not the memory: the caller has the areas and their memory objects. A
    /// `hostmem::Mapping` fulfils the first two points for as long as it is not dropped.
    /// [`map_file`](Self::map_file) needs no such promise.
    ///
    /// # Safety
    ///
    /// From now on until the range is unmapped here and wherever it was copied to, or every
    /// descriptor of this file and of all devices bound to it is closed:
    ///
    /// - The memory stays mapped as it is. Without a device nothing is pinned; when one is
    ///   attached the kernel pins what is at the address then.
    /// - With [`Prot::WRITE`] devices write to the memory at any time: this process accesses it
    ///   in no other way than by atomic or volatile accesses, and holds no reference to any of it
    ///   but to atomic cells. With [`Prot::READ`] alone there is no `&mut` to it.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; [`KernelError::Prot`] for more than read and write.
    #[allow(unsafe_code)]
    pub unsafe fn map(
        &self,
        ioas: IoasId,
        iova: Option<u64>,
        memory: Span<Va>,
        prot: Prot,
    ) -> Result<u64> {
        let flags = map_flags(iova, prot)?;
        // SAFETY: the caller answers for the memory.
        unsafe { sys::map(self.as_fd(), ioas.0, flags, iova.unwrap_or(0), memory) }
    }

    /// Maps `part` (offset and length) of a memory file, or of a dma-buf over a device's region,
    /// at `iova`, or where the kernel finds room; returns the device address. (Linux 6.13.)
    ///
    /// The kernel holds the file, whatever becomes of this process's mapping of it. Devices write to it as other
    /// processes may: code that maps a file that others write to must expect that.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; [`KernelError::Prot`] for more than read and write.
    pub fn map_file(
        &self,
        ioas: IoasId,
        iova: Option<u64>,
        file: BorrowedFd<'_>,
        part: Span<Offset>,
        prot: Prot,
    ) -> Result<u64> {
        let mut argument = iommu_ioas_map_file {
            flags: map_flags(iova, prot)?,
            ioas_id: ioas.0,
            fd: file.as_raw_fd(),
            start: part.start,
            length: part.len,
            iova: iova.unwrap_or(0),
            ..iommu_ioas_map_file::default()
        };
        call(self.as_fd(), &mut argument)?;
        Ok(argument.iova)
    }

    /// Maps in `to` the memory that `range` of `from` maps, all of it, at `iova` or where the
    /// kernel finds room; returns the device address. Nothing is pinned or charged again.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; [`KernelError::Prot`] for more than read and write.
    pub fn copy(
        &self,
        from: IoasId,
        range: Span<Iova>,
        to: IoasId,
        iova: Option<u64>,
        prot: Prot,
    ) -> Result<u64> {
        let mut argument = iommu_ioas_copy {
            flags: map_flags(iova, prot)?,
            dst_ioas_id: to.0,
            src_ioas_id: from.0,
            length: range.len,
            dst_iova: iova.unwrap_or(0),
            src_iova: range.start,
            ..iommu_ioas_copy::default()
        };
        call(self.as_fd(), &mut argument)?;
        Ok(argument.dst_iova)
    }

    /// Unmaps whole mappings; returns the bytes. When the range cuts one it is refused, but the
    /// mappings before that one are gone.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`], also when nothing is there.
    pub fn unmap(&self, ioas: IoasId, iova: Span<Iova>) -> Result<u64> {
        let mut argument = iommu_ioas_unmap {
            ioas_id: ioas.0,
            iova: iova.start,
            length: iova.len,
            ..iommu_ioas_unmap::default()
        };
        call(self.as_fd(), &mut argument)?;
        Ok(argument.length)
    }

    /// Unmaps everything; returns the bytes.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn unmap_all(&self, ioas: IoasId) -> Result<u64> {
        // The length that the interface takes for "all", though it is one byte short of it.
        self.unmap(ioas, Span::new(0, u64::MAX))
    }

    /// True when neighbouring pages are mapped by large leaves, as they are from the beginning.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn huge_pages(&self, ioas: IoasId) -> Result<bool> {
        Ok(self.option(HUGE_PAGES, GET, ioas.0, 0)? != 0)
    }

    /// Says whether neighbouring pages are mapped by large leaves.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn set_huge_pages(&self, ioas: IoasId, on: bool) -> Result<()> {
        self.option(HUGE_PAGES, SET, ioas.0, on.into()).map(|_| ())
    }

    /// The address space that stands for a container of VFIO's type 1.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`], also while there is none.
    pub fn vfio_ioas(&self) -> Result<IoasId> {
        self.vfio_ioas_op(VFIO_GET, IoasId(0))
    }

    /// Says which address space stands for a container of VFIO's type 1, for groups that come in
    /// from now on.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn set_vfio_ioas(&self, ioas: IoasId) -> Result<()> {
        self.vfio_ioas_op(VFIO_SET, ioas).map(|_| ())
    }

    /// Lets no address space stand for a container.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn clear_vfio_ioas(&self) -> Result<()> {
        self.vfio_ioas_op(VFIO_CLEAR, IoasId(0)).map(|_| ())
    }

    fn vfio_ioas_op(&self, op: u32, ioas: IoasId) -> Result<IoasId> {
        let mut argument = iommu_vfio_ioas {
            ioas_id: ioas.0,
            op: op as u16,
            ..iommu_vfio_ioas::default()
        };
        call(self.as_fd(), &mut argument)?;
        Ok(IoasId(argument.ioas_id))
    }
}

/// `IOMMU_IOAS_MAP_…` of an address and of what devices may do.
pub(super) fn map_flags(iova: Option<u64>, prot: Prot) -> Result<u32> {
    if !Prot::RW.contains(prot) {
        return Err(KernelError::Prot { prot });
    }
    let flag = |set, flag| if set { flag } else { 0 };
    Ok(flag(iova.is_some(), FIXED)
        | flag(prot.contains(Prot::READ), READABLE)
        | flag(prot.contains(Prot::WRITE), WRITEABLE))
}
