//! AMD-Vi.

use super::expect;
use crate::log::{Certainty, Class, FaultAccess};

#[test]
fn amd_flags_decide() {
    use Class::{BadTable, DeviceEntry, InterruptRequest, NotMapped, Permission, Rmp, UnitError};
    use FaultAccess::{Read, Unknown, Write};
    let f = expect;
    let fault = f(
        "nvme 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0xcff49550 flags=0x0070]",
        "0000:01:00.0",
        Permission,
        Write,
        Some(0xcff4_9550),
    );
    assert_eq!(
        (fault.flags, fault.domain),
        (vec!["PR", "RW", "PE"], Some(0xe))
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x0000000000001000 flags=0x0050]",
        "0000:02:00.0",
        Permission,
        Read,
        Some(0x1000),
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x1000 flags=0x0020]",
        "0000:02:00.0",
        NotMapped,
        Unknown,
        Some(0x1000),
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x1000 flags=0x00b0]",
        "0000:02:00.0",
        BadTable,
        Write,
        Some(0x1000),
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0xfee00000 flags=0x0008]",
        "0000:02:00.0",
        InterruptRequest,
        Unknown,
        Some(0xfee0_0000),
    );
    f(
        "AMD-Vi: Event logged [\nIO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x1000 flags=0x0000]",
        "0000:02:00.0",
        NotMapped,
        Unknown,
        Some(0x1000),
    );
    f(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=0a:00.0 domain=0x001d\naddress=0x000000000637c000 flags=0x0000]",
        "0000:0a:00.0",
        NotMapped,
        Unknown,
        Some(0x637_c000),
    );
    let pasid = super::fault(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:02:00.0 domain=0x0003 address=0x1000 flags=0x0001]",
    );
    assert_eq!((pasid.pasid, pasid.domain), (Some(3), None));
    let unknown = super::fault(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=02:00.0 domain=0x0003 address=0x1000 flags=0x0010]",
    );
    assert_eq!(
        (unknown.class, unknown.certainty),
        (Class::Unknown, Certainty::Unknown)
    );
    let request = f(
        "iommu ivhd0: AMD-Vi: Event logged [INVALID_DEVICE_REQUEST device=0000:00:00.0 pasid=0x00000 address=0xfffffffdf8000000 flags=0x0a00]",
        "0000:00:00.0",
        InterruptRequest,
        Unknown,
        Some(0xffff_fffd_f800_0000),
    );
    assert_eq!(
        (request.unit.as_deref(), request.field("type")),
        (Some("ivhd0"), Some(5))
    );
    f(
        "AMD-Vi: Event logged [ILLEGAL_DEV_TABLE_ENTRY device=03:00.0 pasid=0x00000 address=0xfffffffdf8000000 flags=0x0a00]\nAMD-Vi: DTE[0]: 6190000000000003\nAMD-Vi: DTE[1]: 0\nAMD-Vi: DTE[2]: 0\nAMD-Vi: DTE[3]: 0",
        "0000:03:00.0",
        DeviceEntry,
        Unknown,
        Some(0xffff_fffd_f800_0000),
    );
    f(
        "vfio-pci 0000:c1:00.0: AMD-Vi: Event logged [RMP_PAGE_FAULT vmg_tag=0x0000, gpa=0x740b8784, flags_rmp=0x0000, flags=0x0020]",
        "0000:c1:00.0",
        Rmp,
        Unknown,
        Some(0x740b_8784),
    );
    f(
        "AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=03:00.0 address=0x100d6d9f0]",
        "0000:03:00.0",
        UnitError,
        Unknown,
        Some(0x1_00d6_d9f0),
    );
    let wait = f(
        "AMD-Vi: IOMMU 0000:00:00.2: Completion-Wait loop timed out",
        "",
        UnitError,
        Unknown,
        None,
    );
    assert_eq!(wait.unit.as_deref(), Some("0000:00:00.2"));
    f(
        "AMD-Vi: Completion-Wait loop timed out",
        "",
        UnitError,
        Unknown,
        None,
    );
    let raw = super::fault(
        "AMD-Vi: Event logged [UNKNOWN event[0]=0x00000300 event[1]=0x20700001 event[2]=0x1000 event[3]=0x0",
    );
    assert_eq!(raw.class, Permission);
}
