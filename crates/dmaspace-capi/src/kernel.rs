//! Address spaces over the kernel's mappings: iommufd, and containers of VFIO's type 1.
//!
//! Files are the caller's, who has opened them and closes them; what is needed longer than a call is
//! duplicated, so that it does not matter when.

use std::ffi::c_int;
use std::sync::Arc;

use dmaspace::ioas::iommufd::{self, BoundDevice, DevId, Owner, RlimitMode, SpaceMapper};
use dmaspace::ioas::vfio::{Container, ContainerMapper, Device, Group};

use crate::boundary::{Output, end, file, guarded, input, open_file};
use crate::memory::Counted;
use crate::opened::Opened;
use crate::space::Space;
use crate::status::Status;

/// An open iommufd. What several of its address spaces map is pinned and charged once.
///
/// It may be used by many threads at once.
#[derive(Debug)]
pub struct Iommufd(Arc<Owner>);

/// An iommufd over `file`, an open `/dev/iommu`; -1: this library opens it. The descriptor stays the
/// caller's and may be closed, which closes nothing while the handle or an address space is there.
///
/// `*iommufd` is the caller's, to be destroyed by `dmaspace_iommufd_destroy`.
///
/// Fails with ARGUMENT, or with SYSTEM when there is none, or the file is something else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_iommufd_new(file: c_int, iommufd: *mut *mut Iommufd) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let output = unsafe { Output::new(iommufd, "iommufd") }?;
        // SAFETY: as above.
        let opened = match unsafe { self::file(file, "file") }? {
            Some(file) => iommufd::Iommufd::from_fd(file),
            None => iommufd::Iommufd::open()?,
        };
        let owner = Owner::new(opened);
        // Any other file refuses the question.
        owner.rlimit_mode()?;
        output.put(Box::into_raw(Box::new(Iommufd(owner))));
        Ok(())
    })
}

/// Binds a device to the iommufd: `node` is its own node, like `/dev/vfio/devices/vfio0`, open to read and
/// write. `*device` is its number there. It is bound until the last descriptor of that open node is closed,
/// the caller's or one of an address space that it is attached to. Whoever has bound it by
/// VFIO_DEVICE_BIND_IOMMUFD knows the number, and does not call this.
///
/// Fails with ARGUMENT, or with SYSTEM when it cannot be bound, or is bound already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_iommufd_bind(
    iommufd: *const Iommufd,
    node: c_int,
    device: *mut u32,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (iommufd, output) =
            unsafe { (input(iommufd, "iommufd")?, Output::new(device, "device")?) };
        // SAFETY: as above.
        let node = unsafe { open_file(node, "node") }?;
        output.put(iommufd.0.bind_device(node)?.id.0);
        Ok(())
    })
}

/// Frees the handle. Its address spaces go on. NULL is fine.
///
/// Fails with ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_iommufd_destroy(iommufd: *mut Iommufd) -> Status {
    guarded(|| {
        // SAFETY: the handle is the caller's, who says that nobody uses it any more.
        unsafe { end(iommufd, "iommufd", |_| Ok(())) }
    })
}

/// Makes an empty address space of an iommufd. The kernel pins what is mapped and has tables of its own; a
/// device comes in by `dmaspace_space_attach_file`.
///
/// What it maps ends at multiples of `granule` bytes of device addresses, rounded up to a power of two of
/// at least 4096: the most that can only be unmapped together. 0: areas that go on in each other may share
/// a mapping however long.
///
/// Whose locked memory is counted (IOMMU_OPTION_RLIMIT_MODE) is as it was chosen before. `*space` is the
/// caller's, to be destroyed by `dmaspace_space_destroy`.
///
/// Fails with ARGUMENT or SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_over_iommufd(
    iommufd: *const Iommufd,
    granule: u64,
    space: *mut *mut Space,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (iommufd, output) =
            unsafe { (input(iommufd, "iommufd")?, Output::new(space, "space")?) };
        let (owner, counted) = (&iommufd.0, iommufd.0.rlimit_mode()?);
        let endpoint = |number, file| {
            let (device, id) = (Device::from_fd(file), DevId(number));
            Arc::new(BoundDevice { device, id }).into()
        };
        let counted = Counted::ByKernel(counted);
        let mapper = SpaceMapper::new(owner)?;
        output.put(Space::handle(Opened::over_kernel(
            mapper, granule, counted, endpoint,
        )));
        Ok(())
    })
}

/// Makes an empty address space over `container`, an open `/dev/vfio/vfio` in which there is no group yet,
/// or an open `/dev/iommu`, which then plays one; -1: this library opens `/dev/vfio/vfio`. The descriptor
/// stays the caller's and may be closed. Groups come in by `dmaspace_space_attach_file`.
///
/// `granule` is as for `dmaspace_space_over_iommufd`. `*space` is the caller's, to be destroyed by
/// `dmaspace_space_destroy`.
///
/// Fails with ARGUMENT, or with SYSTEM when there is none, or the file is something else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_over_container(
    container: c_int,
    granule: u64,
    space: *mut *mut Space,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let output = unsafe { Output::new(space, "space") }?;
        // SAFETY: as above.
        let container = match unsafe { file(container, "container") }? {
            Some(file) => Container::from_fd(file)?,
            None => Container::open()?,
        };
        let mapper = ContainerMapper::new(container);
        // Iommufd counts so, too, when it plays one.
        let counted = Counted::ByKernel(RlimitMode::Process);
        let endpoint = |_, file| Arc::new(Group::from_fd(file)).into();
        output.put(Space::handle(Opened::over_kernel(
            mapper, granule, counted, endpoint,
        )));
        Ok(())
    })
}

/// Lets a device of the kernel's see the address space. With the first one all areas are mapped and pinned,
/// all or nothing.
///
/// Over an iommufd `file` is the device's own node, bound to that iommufd, and `device` the number that it
/// has there. Over a container `file` is a group, like `/dev/vfio/17`, and `device` a number of the
/// caller's choice, like 17; the group's devices are opened afterwards (VFIO_GROUP_GET_DEVICE_FD). Where an
/// open `/dev/iommu` plays the container, memory is pinned and windows are known only then: see
/// `dmaspace_space_refresh`.
///
/// The descriptor stays the caller's and may be closed; the address space has one of its own until the
/// device is detached.
///
/// Fails with ARGUMENT, BUSY, DEVICE, SYSTEM or, over tables of this library, UNSUPPORTED; or, when an area
/// cannot be mapped for the device, with RANGE or what else `dmaspace_space_map` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_attach_file(
    space: *const Space,
    device: u32,
    file: c_int,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, file) = unsafe { (input(space, "space")?, open_file(file, "file")?) };
        space.with(|opened| opened.attach_file(device, file))
    })
}

/// Learns again what can be mapped, which attaching and detaching do by themselves: for an open
/// `/dev/iommu` that plays a container, when a device of a group was opened.
///
/// Fails with ARGUMENT, BUSY or SYSTEM; what was known stays known.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_refresh(space: *const Space) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        space.with(|opened| Ok(opened.space.refresh()?))
    })
}
