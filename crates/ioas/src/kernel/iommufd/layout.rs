//! iommufd's numbers and layouts beside the kernel's headers.

use std::vec::Vec;

use iommufd_bindings::*;

use super::sys;
use crate::kernel::headers::{Row, Since, compare, layout, requests, row};

/// Version of the newest kernel whose layout is known.
const NEW: Since = (7, 2);

#[test]
fn iommufd_is_as_the_headers_have_it() {
    let mut rows: Vec<Row> = requests(NEW, sys::ARGUMENTS);
    layout!(rows, NEW, iommu_destroy { size, id });
    layout!(
        rows,
        NEW,
        iommu_ioas_alloc {
            size,
            flags,
            out_ioas_id
        }
    );
    layout!(rows, NEW, iommu_iova_range { start, last });
    layout!(
        rows,
        NEW,
        iommu_ioas_iova_ranges {
            size,
            ioas_id,
            num_iovas,
            __reserved,
            allowed_iovas,
            out_iova_alignment
        }
    );
    layout!(
        rows,
        NEW,
        iommu_ioas_allow_iovas {
            size,
            ioas_id,
            num_iovas,
            __reserved,
            allowed_iovas
        }
    );
    layout!(
        rows,
        NEW,
        iommu_ioas_map {
            size,
            flags,
            ioas_id,
            __reserved,
            user_va,
            length,
            iova
        }
    );
    layout!(
        rows,
        NEW,
        iommu_ioas_map_file {
            size,
            flags,
            ioas_id,
            fd,
            start,
            length,
            iova
        }
    );
    layout!(
        rows,
        NEW,
        iommu_ioas_copy {
            size,
            flags,
            dst_ioas_id,
            src_ioas_id,
            length,
            dst_iova,
            src_iova
        }
    );
    layout!(
        rows,
        NEW,
        iommu_ioas_unmap {
            size,
            ioas_id,
            iova,
            length
        }
    );
    layout!(
        rows,
        NEW,
        iommu_option {
            size,
            option_id,
            op,
            __reserved,
            object_id,
            val64
        }
    );
    layout!(
        rows,
        NEW,
        iommu_vfio_ioas {
            size,
            ioas_id,
            op,
            __reserved
        }
    );
    layout!(
        rows,
        NEW,
        iommu_hwpt_alloc {
            size,
            flags,
            dev_id,
            pt_id,
            out_hwpt_id,
            __reserved,
            data_type,
            data_len,
            data_uptr,
            fault_id,
            __reserved2
        }
    );
    layout!(
        rows,
        NEW,
        iommu_hw_info {
            size,
            flags,
            dev_id,
            data_len,
            data_uptr,
            out_max_pasid_log2,
            out_capabilities
        }
    );
    let kind = core::mem::offset_of!(iommu_hw_info, __bindgen_anon_1) as u64;
    rows.push(row(
        NEW,
        "offsetof(struct iommu_hw_info, out_data_type)",
        kind,
    ));
    layout!(
        rows,
        NEW,
        iommu_hwpt_set_dirty_tracking {
            size,
            flags,
            hwpt_id,
            __reserved
        }
    );
    layout!(
        rows,
        NEW,
        iommu_hwpt_get_dirty_bitmap {
            size,
            hwpt_id,
            flags,
            __reserved,
            iova,
            length,
            page_size,
            data
        }
    );
    layout!(rows, NEW, iommu_ioas_change_process { size, __reserved });
    for (name, ours) in [
        (
            "IOMMU_IOAS_MAP_FIXED_IOVA",
            iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA,
        ),
        (
            "IOMMU_IOAS_MAP_WRITEABLE",
            iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
        ),
        (
            "IOMMU_IOAS_MAP_READABLE",
            iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE,
        ),
        (
            "IOMMU_OPTION_RLIMIT_MODE",
            iommufd_option_IOMMU_OPTION_RLIMIT_MODE,
        ),
        (
            "IOMMU_OPTION_HUGE_PAGES",
            iommufd_option_IOMMU_OPTION_HUGE_PAGES,
        ),
        (
            "IOMMU_OPTION_OP_SET",
            iommufd_option_ops_IOMMU_OPTION_OP_SET,
        ),
        (
            "IOMMU_OPTION_OP_GET",
            iommufd_option_ops_IOMMU_OPTION_OP_GET,
        ),
        (
            "IOMMU_VFIO_IOAS_GET",
            iommufd_vfio_ioas_op_IOMMU_VFIO_IOAS_GET,
        ),
        (
            "IOMMU_VFIO_IOAS_SET",
            iommufd_vfio_ioas_op_IOMMU_VFIO_IOAS_SET,
        ),
        (
            "IOMMU_VFIO_IOAS_CLEAR",
            iommufd_vfio_ioas_op_IOMMU_VFIO_IOAS_CLEAR,
        ),
        (
            "IOMMU_HWPT_ALLOC_DIRTY_TRACKING",
            iommufd_hwpt_alloc_flags_IOMMU_HWPT_ALLOC_DIRTY_TRACKING,
        ),
        (
            "IOMMU_HWPT_DATA_NONE",
            iommu_hwpt_data_type_IOMMU_HWPT_DATA_NONE,
        ),
        (
            "IOMMU_HWPT_DIRTY_TRACKING_ENABLE",
            iommufd_hwpt_set_dirty_tracking_flags_IOMMU_HWPT_DIRTY_TRACKING_ENABLE,
        ),
        (
            "IOMMU_HWPT_GET_DIRTY_BITMAP_NO_CLEAR",
            iommufd_hwpt_get_dirty_bitmap_flags_IOMMU_HWPT_GET_DIRTY_BITMAP_NO_CLEAR,
        ),
        (
            "IOMMU_HW_CAP_DIRTY_TRACKING",
            iommufd_hw_capabilities_IOMMU_HW_CAP_DIRTY_TRACKING,
        ),
        (
            "IOMMU_HW_INFO_TYPE_INTEL_VTD",
            iommu_hw_info_type_IOMMU_HW_INFO_TYPE_INTEL_VTD,
        ),
        (
            "IOMMU_HW_INFO_TYPE_ARM_SMMUV3",
            iommu_hw_info_type_IOMMU_HW_INFO_TYPE_ARM_SMMUV3,
        ),
        (
            "IOMMU_HW_INFO_TYPE_AMD",
            iommu_hw_info_type_IOMMU_HW_INFO_TYPE_AMD,
        ),
    ] {
        rows.push(row(NEW, name, ours.into()));
    }
    compare(
        "iommufd_is_as_the_headers_have_it",
        "linux/iommufd.h",
        &rows,
    );
}
