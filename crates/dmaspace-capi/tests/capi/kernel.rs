//! Address spaces over the kernel's mappings: what is refused without the kernel's part. What they do with
//! it is shown in the guests, by `examples/c/vfio.c`.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;

use dmaspace_capi::*;

use crate::said;
use crate::space::Rig;

/// No process has so many files.
const NOT_OPEN: c_int = c_int::MAX;

fn iommufd(file: c_int) -> Status {
    let mut handle = ptr::null_mut();
    // SAFETY: the result is lent for the call, and ended if there is one.
    unsafe {
        let status = dmaspace_iommufd_new(file, &raw mut handle);
        assert_eq!(
            handle.is_null(),
            status != Status::Ok,
            "filled in on success only"
        );
        assert_eq!(dmaspace_iommufd_destroy(handle), Status::Ok);
        status
    }
}

fn container(file: c_int) -> Status {
    let mut space = ptr::null_mut();
    // SAFETY: as above.
    unsafe {
        let status = dmaspace_space_over_container(file, 0, &raw mut space);
        assert_eq!(
            space.is_null(),
            status != Status::Ok,
            "filled in on success only"
        );
        assert_eq!(dmaspace_space_destroy(space), Status::Ok);
        status
    }
}

/// Of a machine with these nodes it is found out what a caller may do with them.
#[test]
fn a_kernel_without_the_interface_is_named_with_its_node() {
    for (node, open) in [
        ("/dev/iommu", iommufd as fn(c_int) -> Status),
        ("/dev/vfio/vfio", container),
    ] {
        let status = open(-1);
        if Path::new(node).exists() {
            println!("there is {node} here: {status:?}");
            continue;
        }
        let expected = format!("cannot open {node}: No such file or directory (os error 2)");
        assert_eq!((status, said()), (Status::System, expected));
    }
}

#[test]
fn a_file_that_is_something_else_is_refused_with_the_request_that_it_does_not_know() {
    let file = File::open("/dev/null").unwrap();
    let wrong = file.as_raw_fd();
    let refused =
        |request| format!("{request} was refused: Inappropriate ioctl for device (os error 25)");
    assert_eq!(iommufd(wrong), Status::System);
    assert_eq!(said(), refused("IOMMU_OPTION"));
    assert_eq!(container(wrong), Status::System);
    assert_eq!(said(), refused("VFIO_GET_API_VERSION"));
    assert_eq!(iommufd(NOT_OPEN), Status::System);
    assert_eq!(
        said(),
        format!("file {NOT_OPEN}: Bad file descriptor (os error 9)")
    );
    assert_eq!(container(NOT_OPEN), Status::System);
    assert_eq!(
        said(),
        format!("container {NOT_OPEN}: Bad file descriptor (os error 9)")
    );
}

#[test]
fn pointers_that_lead_nowhere_are_refused_before_any_file_is_opened() {
    let (mut device, mut space, mut window) = (0, ptr::null_mut(), Span::default());
    let nobody: *const Iommufd = ptr::null();
    // SAFETY: NULL is refused, and the rest is lent for the calls.
    unsafe {
        for (status, what) in [
            (dmaspace_iommufd_new(-1, ptr::null_mut()), "iommufd"),
            (dmaspace_iommufd_bind(nobody, 0, &raw mut device), "iommufd"),
            (
                dmaspace_space_over_iommufd(nobody, 0, &raw mut space),
                "iommufd",
            ),
            (
                dmaspace_space_over_container(-1, 0, ptr::null_mut()),
                "space",
            ),
            (dmaspace_space_attach_file(ptr::null(), 0, 0), "space"),
            (dmaspace_space_refresh(ptr::null()), "space"),
            (
                dmaspace_space_get_window(ptr::null(), 0, &raw mut window),
                "space",
            ),
        ] {
            assert_eq!(status, Status::Argument, "{what}");
        }
        assert_eq!(said(), "space is NULL");
        assert_eq!(dmaspace_iommufd_destroy(ptr::null_mut()), Status::Ok);
    }
}

#[test]
fn tables_of_ours_attach_no_device_of_the_kernels() {
    let rig = Rig::new();
    let file = File::open("/dev/null").unwrap();
    // SAFETY: the handle is there.
    unsafe {
        let status = dmaspace_space_attach_file(rig.space, 5, file.as_raw_fd());
        let why = "a unit of the caller's knows devices by their number alone";
        assert_eq!((status, said()), (Status::Unsupported, why.into()));
        let status = dmaspace_space_attach_file(rig.space, 5, -1);
        assert_eq!(
            (status, said()),
            (Status::Argument, "file is -1, no open file".into())
        );
        crate::done(dmaspace_space_refresh(rig.space));
    }
    let info = rig.info();
    assert_eq!((info.devices, info.mappings, info.charged), (0, 0, 0));
    let all = DMASPACE_HITLESS_CUT
        | DMASPACE_UNMAP_PART
        | DMASPACE_SHARES_PINS
        | DMASPACE_PAGE_DIRTY
        | DMASPACE_TABLE_PLACEMENT;
    assert_eq!((info.granule, info.can, info.most_mappings), (4096, all, 0));
    rig.end();
}

#[test]
fn the_windows_are_reported_one_by_one() {
    let rig = Rig::new();
    let mut window = Span::default();
    // SAFETY: the handle is there, and the rest is lent for the calls.
    unsafe {
        // Four levels of VT-d's second stage.
        assert_eq!(rig.info().windows, 1);
        crate::done(dmaspace_space_get_window(rig.space, 0, &raw mut window));
        assert_eq!((window.start, window.len), (0, 1 << 48));
        let status = dmaspace_space_get_window(rig.space, 1, &raw mut window);
        let why = "there are 1 windows, and no window 1";
        assert_eq!((status, said()), (Status::Argument, why.into()));
    }
    rig.end();
}
