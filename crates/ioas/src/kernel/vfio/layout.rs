//! VFIO's numbers and layouts beside the kernel's headers.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

use vfio_bindings::bindings::vfio::*;

use super::sys::{self, DirtyGet, DmaBufData, Feature, UnmapDirty};
use crate::kernel::headers::{Since, compare, layout, requests, row};

/// Oldest version of kernel headers to be expected.
const OLD: Since = (5, 12);
/// Version of the newest kernel whose layout is known.
const NEW: Since = (7, 2);

/// Rows for constants that are named as in C.
macro_rules! constants {
    ($rows:ident, $since:expr, $($name:ident)*) => {
        $($rows.push(row($since, stringify!($name), $name.into()));)*
    };
}

#[test]
fn vfio_is_as_the_headers_have_it() {
    let mut rows = requests(OLD, sys::ARGUMENTS);
    rows.extend(requests(
        OLD,
        &[
            sys::GET_API_VERSION,
            sys::CHECK_EXTENSION,
            sys::SET_IOMMU,
            sys::SET_CONTAINER,
            sys::UNSET_CONTAINER,
            sys::GET_DEVICE_FD,
            sys::RESET,
        ],
    ));
    layout!(rows, OLD, vfio_info_cap_header { id, version, next });
    layout!(rows, OLD, vfio_group_status { argsz, flags });
    layout!(
        rows,
        OLD,
        vfio_region_info {
            argsz,
            flags,
            index,
            cap_offset,
            size,
            offset
        }
    );
    layout!(rows, OLD, vfio_region_sparse_mmap_area { offset, size });
    layout!(
        rows,
        OLD,
        vfio_region_info_cap_sparse_mmap {
            nr_areas,
            reserved,
            areas
        }
    );
    layout!(rows, OLD, vfio_region_info_cap_type { type_, subtype });
    layout!(
        rows,
        OLD,
        vfio_irq_info {
            argsz,
            flags,
            index,
            count
        }
    );
    layout!(
        rows,
        OLD,
        vfio_irq_set {
            argsz,
            flags,
            index,
            start,
            count,
            data
        }
    );
    layout!(rows, OLD, vfio_device_feature { argsz, flags, data });
    layout!(rows, OLD, vfio_iova_range { start, end });
    layout!(
        rows,
        OLD,
        vfio_iommu_type1_info_cap_iova_range {
            nr_iovas,
            reserved,
            iova_ranges
        }
    );
    layout!(
        rows,
        OLD,
        vfio_iommu_type1_info_cap_migration {
            flags,
            pgsize_bitmap,
            max_dirty_bitmap_size
        }
    );
    layout!(rows, OLD, vfio_iommu_type1_info_dma_avail { avail });
    layout!(
        rows,
        OLD,
        vfio_iommu_type1_dma_map {
            argsz,
            flags,
            vaddr,
            iova,
            size
        }
    );
    layout!(rows, OLD, vfio_bitmap { pgsize, size, data });
    layout!(
        rows,
        OLD,
        vfio_iommu_type1_dma_unmap {
            argsz,
            flags,
            iova,
            size,
            data
        }
    );
    layout!(
        rows,
        OLD,
        vfio_iommu_type1_dirty_bitmap { argsz, flags, data }
    );
    layout!(
        rows,
        OLD,
        vfio_iommu_type1_dirty_bitmap_get { iova, size, bitmap }
    );
    layout!(
        rows,
        NEW,
        vfio_device_info {
            argsz,
            flags,
            num_regions,
            num_irqs,
            cap_offset,
            pad
        }
    );
    layout!(
        rows,
        NEW,
        vfio_iommu_type1_info {
            argsz,
            flags,
            iova_pgsizes,
            cap_offset,
            pad
        }
    );
    layout!(
        rows,
        NEW,
        vfio_device_feature_dma_logging_control {
            page_size,
            num_ranges,
            __reserved,
            ranges
        }
    );
    layout!(
        rows,
        NEW,
        vfio_device_feature_dma_logging_range { iova, length }
    );
    layout!(
        rows,
        NEW,
        vfio_device_feature_dma_logging_report {
            iova,
            length,
            page_size,
            bitmap
        }
    );
    layout!(
        rows,
        NEW,
        vfio_device_feature_dma_buf {
            region_index,
            open_flags,
            flags,
            nr_ranges,
            dma_ranges
        }
    );
    layout!(rows, NEW, vfio_region_dma_range { offset, length });
    #[cfg(feature = "iommufd")]
    {
        rows.extend(requests(NEW, sys::cdev::ARGUMENTS));
        layout!(
            rows,
            NEW,
            vfio_device_bind_iommufd {
                argsz,
                flags,
                iommufd,
                out_devid,
                token_uuid_ptr
            }
        );
        layout!(
            rows,
            NEW,
            vfio_device_attach_iommufd_pt {
                argsz,
                flags,
                pt_id,
                pasid
            }
        );
        layout!(
            rows,
            NEW,
            vfio_device_detach_iommufd_pt {
                argsz,
                flags,
                pasid
            }
        );
    }
    constants!(
        rows, OLD,
        VFIO_API_VERSION VFIO_TYPE1_IOMMU VFIO_TYPE1v2_IOMMU VFIO_DMA_CC_IOMMU VFIO_NOIOMMU_IOMMU
        VFIO_UNMAP_ALL VFIO_UPDATE_VADDR VFIO_GROUP_FLAGS_VIABLE VFIO_GROUP_FLAGS_CONTAINER_SET
        VFIO_DEVICE_FLAGS_RESET VFIO_DEVICE_FLAGS_PCI
        VFIO_REGION_INFO_FLAG_READ VFIO_REGION_INFO_FLAG_WRITE VFIO_REGION_INFO_FLAG_MMAP
        VFIO_REGION_INFO_FLAG_CAPS VFIO_REGION_INFO_CAP_SPARSE_MMAP VFIO_REGION_INFO_CAP_TYPE
        VFIO_REGION_INFO_CAP_MSIX_MAPPABLE
        VFIO_IRQ_INFO_EVENTFD VFIO_IRQ_INFO_MASKABLE VFIO_IRQ_INFO_AUTOMASKED VFIO_IRQ_INFO_NORESIZE
        VFIO_IRQ_SET_DATA_NONE VFIO_IRQ_SET_DATA_EVENTFD
        VFIO_IRQ_SET_ACTION_MASK VFIO_IRQ_SET_ACTION_UNMASK VFIO_IRQ_SET_ACTION_TRIGGER
        VFIO_PCI_INTX_IRQ_INDEX VFIO_PCI_MSI_IRQ_INDEX VFIO_PCI_MSIX_IRQ_INDEX
        VFIO_PCI_ERR_IRQ_INDEX VFIO_PCI_REQ_IRQ_INDEX
        VFIO_PCI_CONFIG_REGION_INDEX
        VFIO_DEVICE_FEATURE_GET VFIO_DEVICE_FEATURE_SET VFIO_DEVICE_FEATURE_PROBE
        VFIO_IOMMU_INFO_PGSIZES VFIO_IOMMU_INFO_CAPS VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE
        VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL
        VFIO_DMA_MAP_FLAG_READ VFIO_DMA_MAP_FLAG_WRITE VFIO_DMA_MAP_FLAG_VADDR
        VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP VFIO_DMA_UNMAP_FLAG_ALL VFIO_DMA_UNMAP_FLAG_VADDR
        VFIO_IOMMU_DIRTY_PAGES_FLAG_START VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP
        VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP);
    constants!(rows, NEW,
        VFIO_DEVICE_FEATURE_DMA_LOGGING_START VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP
        VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT VFIO_DEVICE_FEATURE_DMA_BUF);
    compare("vfio_is_as_the_headers_have_it", "linux/vfio.h", &rows);
}

#[test]
fn what_follows_a_structure_lies_where_its_data_begin() {
    use core::mem::offset_of;
    assert_eq!(
        offset_of!(UnmapDirty, bitmap),
        offset_of!(vfio_iommu_type1_dma_unmap, data)
    );
    assert_eq!(
        offset_of!(DirtyGet, get),
        offset_of!(vfio_iommu_type1_dirty_bitmap, data)
    );
    assert_eq!(
        offset_of!(Feature<DmaBufData>, data),
        offset_of!(vfio_device_feature, data)
    );
    assert_eq!(
        offset_of!(Feature<vfio_device_feature_dma_logging_report>, data),
        offset_of!(vfio_device_feature, data)
    );
    assert_eq!(
        offset_of!(DmaBufData, range),
        offset_of!(vfio_device_feature_dma_buf, dma_ranges)
    );
}

#[test]
fn a_request_for_irq_triggers_has_the_fields_where_the_kernel_reads_them() {
    use core::mem::offset_of;
    let (file, other) = (
        File::open("/dev/null").unwrap(),
        File::open("/dev/null").unwrap(),
    );
    let triggers = [Some(file.as_fd()), None, Some(other.as_fd())];
    let words = sys::trigger_words(2, 7, &triggers);
    let word = |offset: usize| words[offset / 4];
    assert_eq!(word(offset_of!(vfio_irq_set, argsz)), 32);
    assert_eq!(word(offset_of!(vfio_irq_set, flags)), 1 << 2 | 1 << 5);
    assert_eq!(word(offset_of!(vfio_irq_set, index)), 2);
    assert_eq!(word(offset_of!(vfio_irq_set, start)), 7);
    assert_eq!(word(offset_of!(vfio_irq_set, count)), 3);
    let fds = [file.as_raw_fd(), -1, other.as_raw_fd()].map(|fd| fd as u32);
    assert_eq!(words[offset_of!(vfio_irq_set, data) / 4..], fds);
}
