//! Answers of the INFO ioctls: a structure, and a chain of capabilities behind it.
//!
//! A capability is a header (`id`, `version`, offset of the next one) and what belongs to it. All
//! offsets count from the beginning of the answer. A chain is read as any input is: it may end too
//! early, or lead in circles.
//!
//! Source: `include/uapi/linux/vfio.h`, "For extension of INFO ioctls".

use core::mem::offset_of;
use core::ops::RangeInclusive;
use std::vec::Vec;

use runs::{Offset, PageSizes, Span};
use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL,
    VFIO_REGION_INFO_CAP_MSIX_MAPPABLE, VFIO_REGION_INFO_CAP_SPARSE_MMAP,
    VFIO_REGION_INFO_CAP_TYPE, VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP,
    VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, vfio_info_cap_header,
    vfio_iommu_type1_info, vfio_iommu_type1_info_cap_iova_range,
    vfio_iommu_type1_info_cap_migration, vfio_iommu_type1_info_dma_avail, vfio_iova_range,
    vfio_region_info, vfio_region_info_cap_sparse_mmap, vfio_region_info_cap_type,
    vfio_region_sparse_mmap_area,
};

use crate::kernel::AnswerError;

/// Capabilities of a container's IOMMU (`VFIO_IOMMU_GET_INFO`). A field that an older kernel does not report is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IommuInfo {
    /// The page sizes of all domains together; a mapping is a multiple of the smallest.
    pub page_sizes: Option<PageSizes>,
    /// Device addresses that can be mapped, first and last: the apertures without what is reserved.
    pub iova_ranges: Option<Vec<RangeInclusive<u64>>>,
    /// Dirty pages can be tracked.
    pub migration: Option<MigrationInfo>,
    /// Number of further mappings that the container takes now.
    pub mappings_available: Option<u32>,
}

/// Properties of dirty tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationInfo {
    /// The page sizes that a bitmap may have.
    pub page_sizes: PageSizes,
    /// The largest bitmap, bytes.
    pub max_bitmap: u64,
}

/// A region of a device: a BAR, the expansion ROM, PCI configuration space
/// (`VFIO_DEVICE_GET_REGION_INFO`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceRegion {
    /// Its number; of a PCI device 0 to 5 are the BARs, 7 is configuration space.
    pub index: u32,
    /// Its length in bytes; 0 when the device has none.
    pub len: u64,
    /// It can be read.
    pub readable: bool,
    /// It can be written.
    pub writable: bool,
    /// It can be mapped: all of it, or the parts of `mappable`.
    pub can_map: bool,
    /// The parts that can be mapped, when not all of it can: offset and length, bytes.
    pub mappable: Option<Vec<Span<Offset>>>,
    /// The part with the MSI-X table can be mapped, too.
    pub msix_mappable: bool,
    /// Kind of the region, when its index does not say it.
    pub kind: Option<DeviceRegionKind>,
    /// Offset in the device's file.
    pub(super) offset: u64,
}

/// Kind of a region that only some devices have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRegionKind {
    /// `VFIO_REGION_TYPE_…`.
    pub kind: u32,
    /// Its meaning depends on `kind`.
    pub subtype: u32,
}

/// Integers at offsets of an answer, in the processor's own byte order. An offset is that of a
/// structure and that of a field in it.
#[derive(Clone, Copy)]
struct Answer<'a>(&'a [u8]);

impl Answer<'_> {
    fn bytes<const N: usize>(&self, at: usize, field: usize) -> Result<[u8; N], AnswerError> {
        let offset = at.saturating_add(field);
        self.0
            .get(offset..)
            .and_then(|rest| rest.first_chunk())
            .copied()
            .ok_or(AnswerError::Truncated {
                offset,
                len: self.0.len(),
            })
    }

    fn u16(&self, at: usize, field: usize) -> Result<u16, AnswerError> {
        self.bytes(at, field).map(u16::from_ne_bytes)
    }

    fn u32(&self, at: usize, field: usize) -> Result<u32, AnswerError> {
        self.bytes(at, field).map(u32::from_ne_bytes)
    }

    fn u64(&self, at: usize, field: usize) -> Result<u64, AnswerError> {
        self.bytes(at, field).map(u64::from_ne_bytes)
    }

    /// `count` pairs of `u64`; memory is taken only for those that are there.
    fn pairs(&self, at: usize, field: usize, count: u32) -> Result<Vec<(u64, u64)>, AnswerError> {
        let pair = |i: u32| {
            let at = at.saturating_add((i as usize).saturating_mul(16));
            Ok((self.u64(at, field)?, self.u64(at, field + 8)?))
        };
        (0..count).map(pair).collect()
    }

    /// Calls `found` with the id and the offset of each capability from `first` on. An id that is
    /// unknown is of no concern: later kernels have more.
    fn capabilities(
        &self,
        first: u32,
        mut found: impl FnMut(u32, usize) -> Result<(), AnswerError>,
    ) -> Result<(), AnswerError> {
        // Headers that do not overlap: as many as there is room for.
        let mut room = self.0.len() / size_of::<vfio_info_cap_header>();
        let mut offset = first as usize;
        while offset != 0 {
            room = room.checked_sub(1).ok_or(AnswerError::Loop)?;
            let id = self.u16(offset, offset_of!(vfio_info_cap_header, id))?;
            let next = self.u32(offset, offset_of!(vfio_info_cap_header, next))?;
            found(id.into(), offset)?;
            offset = next as usize;
        }
        Ok(())
    }
}

/// Reads the answer to `VFIO_IOMMU_GET_INFO`.
pub(super) fn iommu(answer: &[u8]) -> Result<IommuInfo, AnswerError> {
    let answer = Answer(answer);
    let mut info = IommuInfo::default();
    let flags = answer.u32(0, offset_of!(vfio_iommu_type1_info, flags))?;
    if flags & VFIO_IOMMU_INFO_PGSIZES != 0 {
        let sizes = answer.u64(0, offset_of!(vfio_iommu_type1_info, iova_pgsizes))?;
        info.page_sizes = Some(PageSizes::from_bits(sizes));
    }
    if flags & VFIO_IOMMU_INFO_CAPS == 0 {
        return Ok(info);
    }
    let first = answer.u32(0, offset_of!(vfio_iommu_type1_info, cap_offset))?;
    answer.capabilities(first, |id, at| {
        match id {
            VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => {
                type Capability = vfio_iommu_type1_info_cap_iova_range;
                const { assert!(size_of::<vfio_iova_range>() == 16) };
                let count = answer.u32(at, offset_of!(Capability, nr_iovas))?;
                let ranges = answer.pairs(at, offset_of!(Capability, iova_ranges), count)?;
                let ranges = ranges.into_iter().map(|(first, last)| first..=last);
                info.iova_ranges = Some(ranges.collect());
            }
            VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION => {
                type Capability = vfio_iommu_type1_info_cap_migration;
                let sizes = answer.u64(at, offset_of!(Capability, pgsize_bitmap))?;
                info.migration = Some(MigrationInfo {
                    page_sizes: PageSizes::from_bits(sizes),
                    max_bitmap: answer.u64(at, offset_of!(Capability, max_dirty_bitmap_size))?,
                });
            }
            VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => {
                let avail = offset_of!(vfio_iommu_type1_info_dma_avail, avail);
                info.mappings_available = Some(answer.u32(at, avail)?);
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(info)
}

/// Reads the answer to `VFIO_DEVICE_GET_REGION_INFO`.
pub(super) fn region(answer: &[u8]) -> Result<DeviceRegion, AnswerError> {
    let answer = Answer(answer);
    let flags = answer.u32(0, offset_of!(vfio_region_info, flags))?;
    let mut region = DeviceRegion {
        index: answer.u32(0, offset_of!(vfio_region_info, index))?,
        len: answer.u64(0, offset_of!(vfio_region_info, size))?,
        offset: answer.u64(0, offset_of!(vfio_region_info, offset))?,
        readable: flags & VFIO_REGION_INFO_FLAG_READ != 0,
        writable: flags & VFIO_REGION_INFO_FLAG_WRITE != 0,
        can_map: flags & VFIO_REGION_INFO_FLAG_MMAP != 0,
        ..DeviceRegion::default()
    };
    if flags & VFIO_REGION_INFO_FLAG_CAPS == 0 {
        return Ok(region);
    }
    let first = answer.u32(0, offset_of!(vfio_region_info, cap_offset))?;
    answer.capabilities(first, |id, at| {
        match id {
            VFIO_REGION_INFO_CAP_SPARSE_MMAP => {
                type Capability = vfio_region_info_cap_sparse_mmap;
                const { assert!(size_of::<vfio_region_sparse_mmap_area>() == 16) };
                let count = answer.u32(at, offset_of!(Capability, nr_areas))?;
                let areas = answer.pairs(at, offset_of!(Capability, areas), count)?;
                let areas = areas.into_iter().map(|(start, len)| Span::new(start, len));
                region.mappable = Some(areas.collect());
            }
            VFIO_REGION_INFO_CAP_TYPE => {
                type Capability = vfio_region_info_cap_type;
                region.kind = Some(DeviceRegionKind {
                    kind: answer.u32(at, offset_of!(Capability, type_))?,
                    subtype: answer.u32(at, offset_of!(Capability, subtype))?,
                });
            }
            VFIO_REGION_INFO_CAP_MSIX_MAPPABLE => region.msix_mappable = true,
            _ => {}
        }
        Ok(())
    })?;
    Ok(region)
}
