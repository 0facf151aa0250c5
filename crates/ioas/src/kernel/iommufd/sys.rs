//! iommufd's ioctls: the structures, their numbers, and the calls that take memory.
//!
//! Source: `include/uapi/linux/iommufd.h`.

#![allow(unsafe_code)]

use core::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::vec;
use std::vec::Vec;

use iommufd_bindings::{
    iommu_destroy, iommu_hw_info, iommu_hwpt_alloc, iommu_hwpt_get_dirty_bitmap,
    iommu_hwpt_set_dirty_tracking, iommu_ioas_alloc, iommu_ioas_allow_iovas,
    iommu_ioas_change_process, iommu_ioas_copy, iommu_ioas_iova_ranges, iommu_ioas_map,
    iommu_ioas_map_file, iommu_ioas_unmap, iommu_iova_range, iommu_option, iommu_vfio_ioas,
};
use runs::{Iova, Span, Va};

use crate::kernel::sys::{Argument, Plain, arguments, call_with, check_bitmap, request};
use crate::kernel::{AnswerError, KernelError, Result};

arguments! {
    plain iommu_destroy: "IOMMU_DESTROY" = 0x80;
    plain iommu_ioas_alloc: "IOMMU_IOAS_ALLOC" = 0x81;
    addressed iommu_ioas_allow_iovas: "IOMMU_IOAS_ALLOW_IOVAS" = 0x82;
    plain iommu_ioas_copy: "IOMMU_IOAS_COPY" = 0x83;
    addressed iommu_ioas_iova_ranges: "IOMMU_IOAS_IOVA_RANGES" = 0x84;
    addressed iommu_ioas_map: "IOMMU_IOAS_MAP" = 0x85;
    plain iommu_ioas_unmap: "IOMMU_IOAS_UNMAP" = 0x86;
    plain iommu_option: "IOMMU_OPTION" = 0x87;
    plain iommu_vfio_ioas: "IOMMU_VFIO_IOAS" = 0x88;
    addressed iommu_hwpt_alloc: "IOMMU_HWPT_ALLOC" = 0x89;
    addressed iommu_hw_info: "IOMMU_GET_HW_INFO" = 0x8a;
    plain iommu_hwpt_set_dirty_tracking: "IOMMU_HWPT_SET_DIRTY_TRACKING" = 0x8b;
    addressed iommu_hwpt_get_dirty_bitmap: "IOMMU_HWPT_GET_DIRTY_BITMAP" = 0x8c;
    plain iommu_ioas_map_file: "IOMMU_IOAS_MAP_FILE" = 0x8f;
    plain iommu_ioas_change_process: "IOMMU_IOAS_CHANGE_PROCESS" = 0x92;
}

/// The most ranges, and bytes of an answer, that are believed.
const MOST: usize = 1 << 20;

/// `IOMMU_IOAS_IOVA_RANGES`: the ranges, and what they are aligned to.
pub(super) fn iova_ranges(
    fd: BorrowedFd<'_>,
    ioas: u32,
) -> Result<(Vec<RangeInclusive<u64>>, u64)> {
    let mut room = 16;
    // The first call may learn how many there are; others follow when devices come and go.
    for _ in 0..8 {
        let mut ranges = vec![iommu_iova_range::default(); room];
        let mut argument = iommu_ioas_iova_ranges {
            ioas_id: ioas,
            num_iovas: room as u32,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            ..iommu_ioas_iova_ranges::default()
        };
        // SAFETY: the kernel writes at most `num_iovas` ranges, which are there and ours.
        let result = unsafe { call_with(fd, &mut argument) };
        let found = argument.num_iovas as usize;
        match result {
            Ok(_) => {
                ranges.truncate(found);
                let ranges = ranges.into_iter().map(|range| range.start..=range.last);
                return Ok((ranges.collect(), argument.out_iova_alignment));
            }
            Err(KernelError::Refused { errno, .. })
                if errno == libc::EMSGSIZE && found > room && found <= MOST =>
            {
                room = found;
            }
            Err(error) => return Err(error),
        }
    }
    Err(endless::<iommu_ioas_iova_ranges>(
        room * size_of::<iommu_iova_range>(),
    ))
}

fn endless<T: Argument>(len: usize) -> KernelError {
    KernelError::Answer {
        operation: T::OPERATION,
        problem: AnswerError::Endless { len },
    }
}

/// `IOMMU_IOAS_ALLOW_IOVAS`.
pub(super) fn allow_iovas(
    fd: BorrowedFd<'_>,
    ioas: u32,
    ranges: &[RangeInclusive<u64>],
) -> Result<()> {
    let ranges: Vec<_> = ranges
        .iter()
        .map(|range| iommu_iova_range {
            start: *range.start(),
            last: *range.end(),
        })
        .collect();
    let mut argument = iommu_ioas_allow_iovas {
        ioas_id: ioas,
        num_iovas: u32::try_from(ranges.len()).unwrap_or(u32::MAX),
        allowed_iovas: ranges.as_ptr() as u64,
        ..iommu_ioas_allow_iovas::default()
    };
    // SAFETY: the kernel reads `num_iovas` ranges, never more than there are, and they outlive the
    // call.
    unsafe { call_with(fd, &mut argument) }.map(|_| ())
}

/// `IOMMU_IOAS_MAP`.
///
/// # Safety
///
/// As [`Iommufd::map`](super::Iommufd::map).
pub(super) unsafe fn map(
    fd: BorrowedFd<'_>,
    ioas: u32,
    flags: u32,
    iova: u64,
    memory: Span<Va>,
) -> Result<u64> {
    let mut argument = iommu_ioas_map {
        flags,
        ioas_id: ioas,
        user_va: memory.start,
        length: memory.len,
        iova,
        ..iommu_ioas_map::default()
    };
    // SAFETY: the caller answers for the memory.
    unsafe { call_with(fd, &mut argument) }?;
    Ok(argument.iova)
}

/// `IOMMU_HWPT_ALLOC` of a table that the kernel keeps; its id.
pub(super) fn alloc_hwpt(fd: BorrowedFd<'_>, flags: u32, device: u32, parent: u32) -> Result<u32> {
    let mut argument = iommu_hwpt_alloc {
        flags,
        dev_id: device,
        pt_id: parent,
        ..iommu_hwpt_alloc::default()
    };
    // SAFETY: its type of data is "none" with no bytes, so that there is no address to follow.
    unsafe { call_with(fd, &mut argument) }?;
    Ok(argument.out_hwpt_id)
}

/// Answer of `IOMMU_GET_HW_INFO`.
pub(super) struct HwInfo {
    pub(super) kind: u32,
    pub(super) data: Vec<u8>,
    pub(super) capabilities: u64,
    pub(super) pasid_bits: u8,
}

/// `IOMMU_GET_HW_INFO`.
pub(super) fn hw_info(fd: BorrowedFd<'_>, device: u32) -> Result<HwInfo> {
    let mut len = 64;
    for _ in 0..8 {
        let mut data = vec![0_u8; len];
        let mut argument = iommu_hw_info {
            dev_id: device,
            data_len: len as u32,
            data_uptr: data.as_mut_ptr() as u64,
            ..iommu_hw_info::default()
        };
        // SAFETY: the kernel writes at most `data_len` bytes of `data`, which this call owns.
        unsafe { call_with(fd, &mut argument) }?;
        let wanted = argument.data_len as usize;
        if wanted <= len {
            data.truncate(wanted);
            return Ok(HwInfo {
                // SAFETY: both fields of this union are the same `u32`.
                kind: unsafe { argument.__bindgen_anon_1.out_data_type },
                data,
                capabilities: argument.out_capabilities,
                pasid_bits: argument.out_max_pasid_log2,
            });
        }
        len = wanted;
        if len > MOST {
            break;
        }
    }
    Err(endless::<iommu_hw_info>(len))
}

/// `IOMMU_HWPT_GET_DIRTY_BITMAP`.
pub(super) fn dirty_bitmap(
    fd: BorrowedFd<'_>,
    hwpt: u32,
    flags: u32,
    iova: Span<Iova>,
    page: u64,
    bitmap: &mut [u64],
) -> Result<()> {
    check_bitmap(iova, page, bitmap.len())?;
    let mut argument = iommu_hwpt_get_dirty_bitmap {
        hwpt_id: hwpt,
        flags,
        iova: iova.start,
        length: iova.len,
        page_size: page,
        data: bitmap.as_mut_ptr() as u64,
        ..iommu_hwpt_get_dirty_bitmap::default()
    };
    // SAFETY: the kernel sets bits of the bitmap, one for each page of the range, all of which it
    // has, as just checked. This call borrows it alone.
    unsafe { call_with(fd, &mut argument) }.map(|_| ())
}
