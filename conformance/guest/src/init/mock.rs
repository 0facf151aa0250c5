//! Devices and users of pages that iommufd has for its own tests (`CONFIG_IOMMUFD_TEST`): a unit that
//! tells which pages are dirty, and drivers that hold pages.
//!
//! Source of the structure and the numbers: Linux 7.2, `drivers/iommu/iommufd/iommufd_test.h`,
//! `struct iommu_test_cmd`.

use std::{
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
    sync::atomic::{AtomicU32, Ordering},
};

use ioas::{
    KernelError,
    iommufd::{Attachable, BoundDevice, DevId, HwptId, IoasId, Iommufd, SpaceMapper},
    vfio::PageTable,
};
use iommufd_bindings::{
    iommu_destroy, iommu_hw_queue_alloc, iommu_hwpt_alloc, iommu_viommu_alloc,
    iommufd_hwpt_alloc_flags_IOMMU_HWPT_ALLOC_NEST_PARENT as NEST_PARENT,
};
use runs::{Iova, Span};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// Aperture of the unit: first and last.
pub(crate) const APERTURE: (u64, u64) = (1 << 24, (1 << 31) - 1);

/// `IOMMU_TEST_OP_…`.
const CREATE_ACCESS: u32 = 5;
const DESTROY_ACCESS_PAGES: u32 = 6;
const ACCESS_PAGES: u32 = 7;
const MOCK_DOMAIN_REPLACE: u32 = 10;
const MOCK_DOMAIN_FLAGS: u32 = 12;
const DIRTY: u32 = 13;

/// `MOCK_FLAGS_DEVICE_NO_DIRTY`.
const NO_DIRTY: u32 = 1 << 0;
/// `MOCK_FLAGS_ACCESS_CREATE_NEEDS_PIN_PAGES`.
const NEEDS_PIN_PAGES: u32 = 1 << 0;

/// `struct iommu_test_cmd`.
#[repr(C)]
#[derive(Debug, Default)]
struct Command {
    size: u32,
    op: u32,
    id: u32,
    reserved: u32,
    /// The union.
    body: [u64; 6],
    last: u32,
    end: u32,
}

/// `_IO(IOMMUFD_TYPE, IOMMUFD_CMD_BASE + 32)`.
const TEST: Opcode = opcode::none(b';', 0x80 + 32);
/// `IOMMU_DESTROY`, and others of `include/uapi/linux/iommufd.h`.
const DESTROY: Opcode = opcode::none(b';', 0x80);
const HWPT_ALLOC: Opcode = opcode::none(b';', 0x89);
const VIOMMU_ALLOC: Opcode = opcode::none(b';', 0x90);
const HW_QUEUE_ALLOC: Opcode = opcode::none(b';', 0x94);
/// `IOMMU_VIOMMU_TYPE_SELFTEST` and `IOMMU_HW_QUEUE_TYPE_SELFTEST`.
const SELFTEST: u32 = 0xdead_beef;

/// Two fields of four bytes.
const fn pair(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}

const fn first(pair: u64) -> u32 {
    pair as u32
}

const fn second(pair: u64) -> u32 {
    (pair >> 32) as u32
}

/// Does a test operation; returns the union as it is then.
///
/// # Safety
///
/// Memory at each address in `body` is valid, and nothing else writes to it.
unsafe fn call(
    iommufd: &Iommufd,
    operation: &'static str,
    op: u32,
    id: u32,
    body: [u64; 6],
) -> Result<[u64; 6], KernelError> {
    let mut command = Command {
        size: size_of::<Command>() as u32,
        op,
        id,
        body,
        ..Command::default()
    };
    // SAFETY: the caller answers for what lies behind an address.
    unsafe { request::<TEST, _>(iommufd, operation, &mut command) }?;
    Ok(command.body)
}

/// An ioctl of iommufd.
///
/// # Safety
///
/// It takes this structure, which begins with its size. Memory at each address in it is valid,
/// and nothing else writes to it.
pub(crate) unsafe fn request<const OPCODE: Opcode, T>(
    iommufd: &Iommufd,
    operation: &'static str,
    argument: &mut T,
) -> Result<(), KernelError> {
    // SAFETY: the kernel reads and writes no more bytes of it than its size says; see above.
    let result = unsafe { ioctl(iommufd.as_fd(), Updater::<OPCODE, T>::new(argument)) };
    result.map_err(|errno| KernelError::Refused {
        operation,
        errno: errno.raw_os_error(),
    })
}

/// [`call`] of what has no address.
fn plain(
    iommufd: &Iommufd,
    operation: &'static str,
    op: u32,
    id: u32,
    body: [u64; 6],
) -> Result<[u64; 6], KernelError> {
    // SAFETY: there is no address.
    unsafe { call(iommufd, operation, op, id, body) }
}

/// Makes a device and attaches it: the test's own number for it and its page table; its number.
fn make(iommufd: &Iommufd, to: PageTable, flags: u32) -> Result<[u64; 2], KernelError> {
    let (PageTable::Ioas(IoasId(id)) | PageTable::Hwpt(HwptId(id))) = to;
    let body = [0, pair(0, flags), 0, 0, 0, 0];
    let operation = "IOMMU_TEST_OP_MOCK_DOMAIN_FLAGS";
    let made = plain(iommufd, operation, MOCK_DOMAIN_FLAGS, id, body)?;
    Ok([made[0], made[1]])
}

/// Removes an object.
fn destroy(iommufd: &Iommufd, id: u32) -> Result<(), KernelError> {
    let size = size_of::<iommu_destroy>() as u32;
    let mut argument = iommu_destroy { size, id };
    // SAFETY: the structure of this request, without an address.
    unsafe { request::<DESTROY, _>(iommufd, "IOMMU_DESTROY", &mut argument) }
}

/// A device without hardware. It goes with the file.
#[derive(Debug)]
pub(crate) struct Mock {
    iommufd: Iommufd,
    /// The test's own number for it.
    number: u32,
    id: DevId,
    /// Where it is while it is attached nowhere: an address space with nothing in it.
    home: SpaceMapper<Mock>,
    /// Its page table.
    table: AtomicU32,
}

impl Mock {
    /// A device whose unit tells, or does not tell, what it writes to.
    pub(crate) fn new(iommufd: &Iommufd, tells: bool) -> Result<Self, KernelError> {
        let home = SpaceMapper::for_devices(iommufd)?;
        let flags = if tells { 0 } else { NO_DIRTY };
        let [numbers, id] = make(iommufd, PageTable::Ioas(home.id()), flags)?;
        Ok(Self {
            iommufd: iommufd.clone(),
            number: first(numbers),
            id: DevId(first(id)),
            home,
            table: second(numbers).into(),
        })
    }

    /// It writes to pages of `page` bytes from `start` on: those whose bits are set.
    pub(crate) fn write(&self, start: u64, page: u64, bits: &[u64]) -> Result<u64, KernelError> {
        let len = bits.len() as u64 * 64 * page;
        let address = bits.as_ptr().addr() as u64;
        let body = [0, start, len, page, address, 0];
        let table = self.table.load(Ordering::Relaxed);
        // SAFETY: as many bits as there are pages are there, and borrowed.
        let done = unsafe { call(&self.iommufd, "IOMMU_TEST_OP_DIRTY", DIRTY, table, body) };
        Ok(done?[5])
    }
}

impl Attachable for Mock {
    fn id(&self) -> DevId {
        self.id
    }

    fn attach(&self, to: PageTable) -> Result<(), KernelError> {
        let (PageTable::Ioas(IoasId(id)) | PageTable::Hwpt(HwptId(id))) = to;
        let body = [pair(id, 0), 0, 0, 0, 0, 0];
        let operation = "IOMMU_TEST_OP_MOCK_DOMAIN_REPLACE";
        let done = plain(
            &self.iommufd,
            operation,
            MOCK_DOMAIN_REPLACE,
            self.number,
            body,
        )?;
        self.table.store(first(done[0]), Ordering::Relaxed);
        Ok(())
    }

    fn detach(&self) -> Result<(), KernelError> {
        self.attach(PageTable::Ioas(self.home.id()))
    }
}

/// A device without hardware that is there while it is attached, and tells nothing. (One that is moved
/// from one page table to another must not meet that of a real unit: Linux 7.2 does not look whose it
/// is.)
#[derive(Debug)]
pub(crate) struct Passing {
    iommufd: Iommufd,
    /// The test's own number for it.
    number: AtomicU32,
    id: AtomicU32,
}

impl Passing {
    pub(crate) fn new(iommufd: &Iommufd) -> Self {
        Self {
            iommufd: iommufd.clone(),
            number: 0.into(),
            id: 0.into(),
        }
    }
}

impl Attachable for Passing {
    fn id(&self) -> DevId {
        DevId(self.id.load(Ordering::Relaxed))
    }

    fn attach(&self, to: PageTable) -> Result<(), KernelError> {
        let [numbers, id] = make(&self.iommufd, to, NO_DIRTY)?;
        self.number.store(first(numbers), Ordering::Relaxed);
        self.id.store(first(id), Ordering::Relaxed);
        Ok(())
    }

    fn detach(&self) -> Result<(), KernelError> {
        destroy(&self.iommufd, self.number.load(Ordering::Relaxed))
    }
}

/// A device of VFIO or a mock.
pub(crate) enum Any {
    Real(BoundDevice),
    Mock(Passing),
}

impl Any {
    fn of(&self) -> &dyn Attachable {
        match self {
            Self::Real(device) => device,
            Self::Mock(device) => device,
        }
    }
}

impl Attachable for Any {
    fn id(&self) -> DevId {
        self.of().id()
    }

    fn attach(&self, to: PageTable) -> Result<(), KernelError> {
        self.of().attach(to)
    }

    fn detach(&self) -> Result<(), KernelError> {
        self.of().detach()
    }
}

/// A driver in the kernel that uses pages of an address space, and lets go on request.
#[derive(Debug)]
pub(crate) struct Access {
    iommufd: Iommufd,
    file: OwnedFd,
}

impl Access {
    pub(crate) fn new(iommufd: &Iommufd, space: IoasId) -> Result<Self, KernelError> {
        let body = [pair(0, NEEDS_PIN_PAGES), 0, 0, 0, 0, 0];
        let made = plain(
            iommufd,
            "IOMMU_TEST_OP_CREATE_ACCESS",
            CREATE_ACCESS,
            space.0,
            body,
        )?;
        // SAFETY: the kernel has just made it for us.
        let file = unsafe { OwnedFd::from_raw_fd(first(made[0]) as i32) };
        Ok(Self {
            iommufd: iommufd.clone(),
            file,
        })
    }

    /// Pins what is mapped at `range`; returns a number for it.
    pub(crate) fn pin(&self, range: Span<Iova>) -> Result<u32, KernelError> {
        let body = [0, range.start, range.len, 0, 0, 0];
        let file = self.file.as_raw_fd() as u32;
        let done = plain(
            &self.iommufd,
            "IOMMU_TEST_OP_ACCESS_PAGES",
            ACCESS_PAGES,
            file,
            body,
        )?;
        Ok(second(done[0]))
    }

    /// Lets go of it; refused when it was let go before.
    pub(crate) fn unpin(&self, number: u32) -> Result<(), KernelError> {
        let body = [pair(number, 0), 0, 0, 0, 0, 0];
        let file = self.file.as_raw_fd() as u32;
        let operation = "IOMMU_TEST_OP_DESTROY_ACCESS_PAGES";
        plain(&self.iommufd, operation, DESTROY_ACCESS_PAGES, file, body).map(|_| ())
    }
}

/// A queue of a unit that lies in what a guest maps: which is locked until it is removed.
pub(crate) struct Queue<'a> {
    iommufd: &'a Iommufd,
    /// It, its unit and that one's page table, in the order in which they go.
    objects: [u32; 3],
}

impl<'a> Queue<'a> {
    /// At `range` of `space`, for `device`.
    pub(crate) fn new(
        iommufd: &'a Iommufd,
        device: &Mock,
        space: IoasId,
        range: Span<Iova>,
    ) -> Result<Self, KernelError> {
        let mut table = iommu_hwpt_alloc {
            size: size_of::<iommu_hwpt_alloc>() as u32,
            flags: NEST_PARENT,
            dev_id: device.id.0,
            pt_id: space.0,
            ..iommu_hwpt_alloc::default()
        };
        // SAFETY: the structure of this request; it has no address, nor have those below.
        unsafe { request::<HWPT_ALLOC, _>(iommufd, "IOMMU_HWPT_ALLOC", &mut table) }?;
        let mut unit = iommu_viommu_alloc {
            size: size_of::<iommu_viommu_alloc>() as u32,
            type_: SELFTEST,
            dev_id: device.id.0,
            hwpt_id: table.out_hwpt_id,
            ..iommu_viommu_alloc::default()
        };
        // SAFETY: as above.
        unsafe { request::<VIOMMU_ALLOC, _>(iommufd, "IOMMU_VIOMMU_ALLOC", &mut unit) }?;
        let mut queue = iommu_hw_queue_alloc {
            size: size_of::<iommu_hw_queue_alloc>() as u32,
            viommu_id: unit.out_viommu_id,
            type_: SELFTEST,
            nesting_parent_iova: range.start,
            length: range.len,
            ..iommu_hw_queue_alloc::default()
        };
        // SAFETY: as above.
        unsafe { request::<HW_QUEUE_ALLOC, _>(iommufd, "IOMMU_HW_QUEUE_ALLOC", &mut queue) }?;
        let objects = [queue.out_hw_queue_id, unit.out_viommu_id, table.out_hwpt_id];
        Ok(Self { iommufd, objects })
    }

    /// Removes it.
    pub(crate) fn remove(self) -> Result<(), KernelError> {
        let mut objects = self.objects.into_iter();
        objects.try_for_each(|id| destroy(self.iommufd, id))
    }
}
