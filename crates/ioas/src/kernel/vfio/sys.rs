//! VFIO's ioctls: the structures, their numbers, and the calls that take memory or give
//! descriptors.
//!
//! Source: `include/uapi/linux/vfio.h`.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::vec::Vec;

use runs::{Iova, Offset, Span};
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FEATURE_DMA_BUF, VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT,
    VFIO_DEVICE_FEATURE_DMA_LOGGING_START, VFIO_DEVICE_FEATURE_GET, VFIO_DEVICE_FEATURE_SET,
    VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP, VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, vfio_bitmap,
    vfio_device_feature, vfio_device_feature_dma_logging_control,
    vfio_device_feature_dma_logging_range, vfio_device_feature_dma_logging_report,
    vfio_device_info, vfio_group_status, vfio_iommu_type1_dirty_bitmap,
    vfio_iommu_type1_dirty_bitmap_get, vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
    vfio_iommu_type1_info, vfio_irq_info, vfio_irq_set, vfio_region_dma_range, vfio_region_info,
};

use crate::kernel::sys::{
    Argument, Plain, arguments, call, call_with, check, check_bitmap, request,
};
use crate::kernel::{AnswerError, KernelError, Result};

/// `VFIO_BASE`: the first of VFIO's numbers.
const BASE: u8 = 100;

pub(super) const GET_API_VERSION: Bare = ("VFIO_GET_API_VERSION", request(BASE));
pub(super) const CHECK_EXTENSION: Bare = ("VFIO_CHECK_EXTENSION", request(BASE + 1));
pub(super) const SET_IOMMU: Bare = ("VFIO_SET_IOMMU", request(BASE + 2));
pub(super) const SET_CONTAINER: Bare = ("VFIO_GROUP_SET_CONTAINER", request(BASE + 4));
pub(super) const UNSET_CONTAINER: Bare = ("VFIO_GROUP_UNSET_CONTAINER", request(BASE + 5));
pub(super) const GET_DEVICE_FD: Bare = ("VFIO_GROUP_GET_DEVICE_FD", request(BASE + 6));
pub(super) const RESET: Bare = ("VFIO_DEVICE_RESET", request(BASE + 11));

arguments! {
    plain vfio_group_status: "VFIO_GROUP_GET_STATUS" = BASE + 3;
    plain vfio_device_info: "VFIO_DEVICE_GET_INFO" = BASE + 7;
    plain vfio_region_info: "VFIO_DEVICE_GET_REGION_INFO" = BASE + 8;
    plain vfio_irq_info: "VFIO_DEVICE_GET_IRQ_INFO" = BASE + 9;
    // With a flag for data it is refused, being too short to hold any.
    plain vfio_irq_set: "VFIO_DEVICE_SET_IRQS" = BASE + 10;
    plain vfio_iommu_type1_info: "VFIO_IOMMU_GET_INFO" = BASE + 12;
    addressed vfio_iommu_type1_dma_map: "VFIO_IOMMU_MAP_DMA" = BASE + 13;
    // With the flag for a bitmap it is refused, being too short to hold one.
    plain vfio_iommu_type1_dma_unmap: "VFIO_IOMMU_UNMAP_DMA" = BASE + 14;
    addressed UnmapDirty: "VFIO_IOMMU_UNMAP_DMA" = BASE + 14;
    // As above.
    plain vfio_iommu_type1_dirty_bitmap: "VFIO_IOMMU_DIRTY_PAGES" = BASE + 17;
    addressed DirtyGet: "VFIO_IOMMU_DIRTY_PAGES" = BASE + 17;
    // A feature with data refuses a structure that is too short for it.
    plain vfio_device_feature: "VFIO_DEVICE_FEATURE" = BASE + 17;
    addressed DmaBuf: "VFIO_DEVICE_FEATURE" = BASE + 17;
    addressed LoggingStart: "VFIO_DEVICE_FEATURE" = BASE + 17;
    addressed LoggingReport: "VFIO_DEVICE_FEATURE" = BASE + 17;
}

/// `VFIO_IOMMU_UNMAP_DMA` with the bitmap that its flag announces.
#[repr(C)]
pub(super) struct UnmapDirty {
    pub(super) unmap: vfio_iommu_type1_dma_unmap,
    pub(super) bitmap: vfio_bitmap,
}

/// `VFIO_IOMMU_DIRTY_PAGES` with the range that its flag announces.
#[repr(C)]
pub(super) struct DirtyGet {
    pub(super) head: vfio_iommu_type1_dirty_bitmap,
    pub(super) get: vfio_iommu_type1_dirty_bitmap_get,
}

/// A feature's head and its data.
#[repr(C)]
pub(super) struct Feature<T> {
    pub(super) head: vfio_device_feature,
    pub(super) data: T,
}

/// `struct vfio_device_feature_dma_buf` with one range: all that iommufd takes.
#[repr(C)]
pub(super) struct DmaBufData {
    pub(super) region_index: u32,
    pub(super) open_flags: u32,
    pub(super) flags: u32,
    pub(super) nr_ranges: u32,
    pub(super) range: vfio_region_dma_range,
}

type DmaBuf = Feature<DmaBufData>;
type LoggingStart = Feature<vfio_device_feature_dma_logging_control>;
type LoggingReport = Feature<vfio_device_feature_dma_logging_report>;

/// The largest answer that is believed, bytes; real ones have some hundred.
const LONGEST_ANSWER: usize = 1 << 20;

/// Calls the ioctl that `head` belongs to with a buffer that begins with `head` and is as long as
/// the kernel says that its answer is: the structure and its chain of capabilities.
///
/// Source: `include/uapi/linux/vfio.h`, "Callers of INFO ioctls passing insufficiently sized
/// buffers".
pub(super) fn call_growing<T: Plain>(fd: BorrowedFd<'_>, head: &T) -> Result<Vec<u8>> {
    // SAFETY: `T` has no padding, so that all its bytes are there to read.
    let head = unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(head).cast::<u8>(), size_of::<T>())
    };
    grow(T::OPERATION, head, |answer| {
        // SAFETY: the kernel keeps to the size at the beginning of `answer`, which is its length,
        // and follows no address in it.
        check(T::OPERATION, unsafe {
            libc::ioctl(
                fd.as_raw_fd(),
                T::REQUEST as libc::Ioctl,
                answer.as_mut_ptr(),
            )
        })
    })
}

/// Asks with a buffer that begins with `head`, in which its length stands first, until what stands
/// there afterwards is no more.
pub(super) fn grow(
    operation: &'static str,
    head: &[u8],
    mut ask: impl FnMut(&mut [u8]) -> Result<u32>,
) -> Result<Vec<u8>> {
    let mut len = head.len();
    // The first call learns the length; others follow when a device came in between.
    for _ in 0..8 {
        let mut answer = head.to_vec();
        answer.resize(len, 0);
        if let Some(size) = answer.first_chunk_mut() {
            *size = (len as u32).to_ne_bytes();
        }
        ask(&mut answer)?;
        let wanted = answer
            .first_chunk()
            .map_or(0, |size| u32::from_ne_bytes(*size)) as usize;
        if wanted <= len {
            return Ok(answer);
        }
        len = wanted;
        if len > LONGEST_ANSWER {
            break;
        }
    }
    Err(KernelError::Answer {
        operation,
        problem: AnswerError::Endless { len },
    })
}

/// An ioctl that takes no structure: its name and its request number.
pub(super) type Bare = (&'static str, u32);

/// An ioctl without argument; returns what it returns.
pub(super) fn call_bare(fd: BorrowedFd<'_>, (operation, request): Bare) -> Result<u32> {
    // SAFETY: were it one that takes an address, the kernel would find none at 0.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, 0) };
    check(operation, result)
}

/// `VFIO_CHECK_EXTENSION`.
pub(super) fn check_extension(fd: BorrowedFd<'_>, extension: u32) -> Result<u32> {
    by_value(fd, CHECK_EXTENSION, extension)
}

/// `VFIO_SET_IOMMU`.
pub(super) fn set_iommu(fd: BorrowedFd<'_>, model: u32) -> Result<()> {
    by_value(fd, SET_IOMMU, model).map(|_| ())
}

fn by_value(fd: BorrowedFd<'_>, (operation, request): Bare, value: u32) -> Result<u32> {
    let value = libc::c_ulong::from(value);
    // SAFETY: both callers' ioctls take a number, not an address.
    check(operation, unsafe {
        libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, value)
    })
}

/// `VFIO_GROUP_SET_CONTAINER`.
pub(super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> Result<()> {
    let (operation, request) = SET_CONTAINER;
    let container = container.as_raw_fd();
    // SAFETY: the kernel reads one `int`, which outlives the call.
    check(operation, unsafe {
        libc::ioctl(
            group.as_raw_fd(),
            request as libc::Ioctl,
            &raw const container,
        )
    })
    .map(|_| ())
}

/// `VFIO_GROUP_GET_DEVICE_FD`.
pub(super) fn device_fd(group: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd> {
    let (operation, request) = GET_DEVICE_FD;
    // SAFETY: the kernel reads a C string, which outlives the call.
    let fd = check(operation, unsafe {
        libc::ioctl(group.as_raw_fd(), request as libc::Ioctl, name.as_ptr())
    })?;
    // SAFETY: the kernel has just made this descriptor for us; it came as a positive `int`.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// `VFIO_IOMMU_MAP_DMA`.
///
/// # Safety
///
/// As [`Container::map_dma`](super::Container::map_dma).
pub(super) unsafe fn map_dma(
    container: BorrowedFd<'_>,
    flags: u32,
    iova: Span<Iova>,
    address: u64,
) -> Result<()> {
    let mut map = vfio_iommu_type1_dma_map {
        flags,
        vaddr: address,
        iova: iova.start,
        size: iova.len,
        ..vfio_iommu_type1_dma_map::default()
    };
    // SAFETY: the caller answers for the memory at `address`.
    unsafe { call_with(container, &mut map) }.map(|_| ())
}

fn bitmap_of(page: u64, bitmap: &mut [u64]) -> vfio_bitmap {
    // The kernel adds bits to some words and overwrites others.
    bitmap.fill(0);
    vfio_bitmap {
        pgsize: page,
        size: size_of_val(bitmap) as u64,
        data: bitmap.as_mut_ptr(),
    }
}

/// `VFIO_IOMMU_UNMAP_DMA` with a bitmap of the pages that were dirty; returns the bytes unmapped.
pub(super) fn unmap_dirty(
    container: BorrowedFd<'_>,
    iova: Span<Iova>,
    page: u64,
    bitmap: &mut [u64],
) -> Result<u64> {
    let mut argument = UnmapDirty {
        unmap: vfio_iommu_type1_dma_unmap {
            flags: VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP,
            iova: iova.start,
            size: iova.len,
            ..vfio_iommu_type1_dma_unmap::default()
        },
        bitmap: bitmap_of(page, bitmap),
    };
    // SAFETY: the kernel writes to the bitmap only, which this call borrows alone, and keeps to
    // its announced size: it refuses one that is too short for the range.
    unsafe { call_with(container, &mut argument) }?;
    Ok(argument.unmap.size)
}

/// `VFIO_IOMMU_DIRTY_PAGES`, reading.
pub(super) fn dirty_bitmap(
    container: BorrowedFd<'_>,
    iova: Span<Iova>,
    page: u64,
    bitmap: &mut [u64],
) -> Result<()> {
    let mut argument = DirtyGet {
        head: vfio_iommu_type1_dirty_bitmap {
            flags: VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP,
            ..vfio_iommu_type1_dirty_bitmap::default()
        },
        get: vfio_iommu_type1_dirty_bitmap_get {
            iova: iova.start,
            size: iova.len,
            bitmap: bitmap_of(page, bitmap),
        },
    };
    // SAFETY: as for `unmap_dirty`.
    unsafe { call_with(container, &mut argument) }.map(|_| ())
}

/// `VFIO_DEVICE_SET_IRQS` without data: does `action` to the first `count` interrupts, or to the index as a whole with 0.
pub(super) fn set_irqs(device: BorrowedFd<'_>, action: u32, index: u32, count: u32) -> Result<()> {
    let mut argument = vfio_irq_set {
        flags: VFIO_IRQ_SET_DATA_NONE | action,
        index,
        count,
        ..vfio_irq_set::default()
    };
    call(device, &mut argument).map(|_| ())
}

/// `VFIO_DEVICE_SET_IRQS` with an eventfd or none for each interrupt; 0, or the number that the kernel has where it has
/// fewer than wanted.
pub(super) fn set_triggers(
    device: BorrowedFd<'_>,
    index: u32,
    start: u32,
    triggers: &[Option<BorrowedFd<'_>>],
) -> Result<u32> {
    let mut argument = trigger_words(index, start, triggers);
    // SAFETY: the first word is the length of `argument`, or less where that is no `u32`. The kernel reads no more than
    // this, and nothing behind it: it refuses a count for which it is too short. The numbers in it are descriptors, on
    // which the kernel takes references of its own.
    check(vfio_irq_set::OPERATION, unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            vfio_irq_set::REQUEST as libc::Ioctl,
            argument.as_mut_ptr(),
        )
    })
}

/// `struct vfio_irq_set` in words, with an eventfd, or -1, for each interrupt as its data.
pub(super) fn trigger_words(
    index: u32,
    start: u32,
    triggers: &[Option<BorrowedFd<'_>>],
) -> Vec<u32> {
    let number = |length| u32::try_from(length).unwrap_or(u32::MAX);
    let fds = triggers.iter().map(|trigger| match trigger {
        Some(eventfd) => eventfd.as_raw_fd() as u32,
        None => -1_i32 as u32,
    });
    let size = size_of::<vfio_irq_set>() + size_of::<i32>() * fds.len();
    let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
    let head = [number(size), flags, index, start, number(fds.len())];
    head.into_iter().chain(fds).collect()
}

fn feature(flags: u32) -> vfio_device_feature {
    vfio_device_feature {
        flags,
        ..vfio_device_feature::default()
    }
}

/// A feature without data: probes for one, or does it.
pub(super) fn bare_feature(device: BorrowedFd<'_>, flags: u32) -> Result<()> {
    call(device, &mut feature(flags)).map(|_| ())
}

/// `VFIO_DEVICE_FEATURE_DMA_BUF`.
pub(super) fn dma_buf(device: BorrowedFd<'_>, region: u32, part: Span<Offset>) -> Result<OwnedFd> {
    let mut argument = DmaBuf {
        head: feature(VFIO_DEVICE_FEATURE_GET | VFIO_DEVICE_FEATURE_DMA_BUF),
        data: DmaBufData {
            region_index: region,
            open_flags: (libc::O_RDWR | libc::O_CLOEXEC) as u32,
            flags: 0,
            nr_ranges: 1,
            range: vfio_region_dma_range {
                offset: part.start,
                length: part.len,
            },
        },
    };
    // SAFETY: this feature's data are numbers, and the one range that is announced is there.
    let fd = unsafe { call_with(device, &mut argument) }?;
    // SAFETY: the kernel has just made this descriptor for us; it came as a positive `int`.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// `VFIO_DEVICE_FEATURE_DMA_LOGGING_START`; the page size that the device took.
pub(super) fn start_logging(
    device: BorrowedFd<'_>,
    page: u64,
    ranges: &[Span<Iova>],
) -> Result<u64> {
    let ranges: Vec<_> = ranges
        .iter()
        .map(|range| vfio_device_feature_dma_logging_range {
            iova: range.start,
            length: range.len,
        })
        .collect();
    let mut argument = LoggingStart {
        head: feature(VFIO_DEVICE_FEATURE_SET | VFIO_DEVICE_FEATURE_DMA_LOGGING_START),
        data: vfio_device_feature_dma_logging_control {
            page_size: page,
            num_ranges: u32::try_from(ranges.len()).unwrap_or(u32::MAX),
            __reserved: 0,
            ranges: ranges.as_ptr() as u64,
        },
    };
    // SAFETY: the kernel reads `num_ranges` ranges, never more than there are, and they outlive the
    // call.
    unsafe { call_with(device, &mut argument) }?;
    Ok(argument.data.page_size)
}

/// `VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT`.
pub(super) fn logged(
    device: BorrowedFd<'_>,
    range: Span<Iova>,
    page: u64,
    bitmap: &mut [u64],
) -> Result<()> {
    check_bitmap(range, page, bitmap.len())?;
    let mut argument = LoggingReport {
        head: feature(VFIO_DEVICE_FEATURE_GET | VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT),
        data: vfio_device_feature_dma_logging_report {
            iova: range.start,
            length: range.len,
            page_size: page,
            bitmap: bitmap.as_mut_ptr() as u64,
        },
    };
    // SAFETY: the kernel sets bits of the bitmap, one for each page of the range, all of which it
    // has, as just checked. This call borrows it alone.
    unsafe { call_with(device, &mut argument) }.map(|_| ())
}

/// The calls on a device's own node.
#[cfg(feature = "iommufd")]
pub(super) mod cdev {
    use std::os::fd::{AsRawFd, BorrowedFd};

    use vfio_bindings::bindings::vfio::{
        vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd, vfio_device_detach_iommufd_pt,
    };

    use super::BASE;
    use crate::kernel::Result;
    use crate::kernel::sys::{Argument, Plain, arguments, call_with, request};

    arguments! {
        addressed vfio_device_bind_iommufd: "VFIO_DEVICE_BIND_IOMMUFD" = BASE + 18;
        plain vfio_device_attach_iommufd_pt: "VFIO_DEVICE_ATTACH_IOMMUFD_PT" = BASE + 19;
        plain vfio_device_detach_iommufd_pt: "VFIO_DEVICE_DETACH_IOMMUFD_PT" = BASE + 20;
    }

    /// `VFIO_DEVICE_BIND_IOMMUFD`; the device's number.
    pub(in crate::kernel::vfio) fn bind(
        device: BorrowedFd<'_>,
        iommufd: BorrowedFd<'_>,
    ) -> Result<u32> {
        let mut argument = vfio_device_bind_iommufd {
            iommufd: iommufd.as_raw_fd(),
            ..vfio_device_bind_iommufd::default()
        };
        // SAFETY: its one address is of a token, which the flags do not announce.
        unsafe { call_with(device, &mut argument) }?;
        Ok(argument.out_devid)
    }
}
