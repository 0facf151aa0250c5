//! Tests that need no kernel with iommufd.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::string::ToString;

use iopt::Prot;
use runs::Span;

use super::ioas::map_flags;
use super::{Clear, HwptId, IoasId, Iommufd, KernelError};

/// A file that is no iommufd.
fn wrong() -> Iommufd {
    Iommufd::from_fd(OwnedFd::from(File::open("/dev/null").unwrap()))
}

#[test]
fn what_is_no_iommufd_is_refused_by_name() {
    let error = wrong().alloc_ioas().unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with("IOMMU_IOAS_ALLOC was refused: "),
        "{message}"
    );
    for refused in [
        wrong().iova_ranges(IoasId(1)).map(|_| ()),
        wrong().allow_iovas(IoasId(1), &[0..=u64::MAX]),
        wrong().unmap_all(IoasId(1)).map(|_| ()),
        wrong().set_huge_pages(IoasId(1), false),
        wrong().change_process(),
    ] {
        assert!(matches!(refused, Err(KernelError::Refused { .. })));
    }
}

#[test]
fn a_bitmap_that_is_too_short_never_reaches_the_kernel() {
    let range = Span::new(1 << 30, 65 << 12);
    let ask =
        |page, words: &mut [u64]| wrong().dirty_bitmap(HwptId(1), range, page, words, Clear::Yes);
    let error = ask(4096, &mut [0]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a bitmap of 1 words has no bit for each page of 0x1000 bytes in 0x40000000+0x41000"
    );
    // No power of two: the kernel would take it for pages of 4 KiB.
    assert!(matches!(
        ask(0x3000, &mut [0]),
        Err(KernelError::Bitmap { .. })
    ));
    assert!(matches!(ask(0, &mut [0]), Err(KernelError::Bitmap { .. })));
    assert!(matches!(
        ask(4096, &mut [0; 2]),
        Err(KernelError::Refused { .. })
    ));
    assert!(matches!(
        ask(8192, &mut [0]),
        Err(KernelError::Refused { .. })
    ));
}

#[test]
fn an_address_that_is_given_is_fixed() {
    assert_eq!(map_flags(None, Prot::READ).unwrap(), 4);
    assert_eq!(map_flags(Some(0), Prot::RW).unwrap(), 7);
    assert!(map_flags(None, Prot::RW | Prot::COHERENT).is_err());
}
