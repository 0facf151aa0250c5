//! iommufd: I/O address spaces of the kernel, and page tables over them.
//!
//! A thin layer: one call is one ioctl (or two, where the length of an answer has to be learned),
//! with types instead of numbers. The meaning of an error number is left to the caller, which knows what was
//! asked for. Functions that give the kernel an address of this process are `unsafe`: the kernel
//! keeps the address, and does not keep the memory mapped there.
//!
//! An *IOAS* ([`IoasId`]) maps device addresses to memory; it has page tables when a device is
//! attached to it. An *HWPT* ([`HwptId`]) is such a page table made on purpose, with dirty
//! tracking for instance. Memory is pinned, and charged once however many tables and address
//! spaces share it ([`Iommufd::copy`]), when the first device comes.
#![cfg_attr(
    feature = "vfio",
    doc = "\n\
           A device comes in by [`vfio::VfioDevice::open_cdev`](crate::vfio::VfioDevice::open_cdev), and \
           is attached by [`vfio::VfioDevice::attach`](crate::vfio::VfioDevice::attach). An open \
           `/dev/iommu` also plays a container of VFIO's type 1: \
           [`vfio::Container::from_fd`](crate::vfio::Container::from_fd)."
)]
//!
//! Everything belongs to the open file: it goes when that is closed, and every device that is
//! bound to it.
//!
//! Source: Linux `Documentation/userspace-api/iommufd.rst`, `include/uapi/linux/iommufd.h`.

mod hwpt;
mod ioas;
#[cfg(test)]
mod layout;
#[cfg(feature = "vfio")]
mod space;
mod sys;
#[cfg(feature = "vfio")]
mod tables;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "linux")]
use std::{boxed::Box, sync::OnceLock};

#[cfg(feature = "linux")]
use hostmem::{Counter, Limits};
use iommufd_bindings::{
    iommu_destroy, iommu_ioas_change_process, iommu_option,
    iommufd_option_IOMMU_OPTION_RLIMIT_MODE as RLIMIT_MODE,
    iommufd_option_ops_IOMMU_OPTION_OP_GET as GET, iommufd_option_ops_IOMMU_OPTION_OP_SET as SET,
};

use crate::kernel::sys::{call, open};
use crate::kernel::{Result, Shares};
#[cfg(feature = "linux")]
use crate::{memory::ledger::Ledger, space::open::OpenError};

pub use crate::kernel::{AnswerError, KernelError};
pub use hwpt::{Clear, HwInfo};
pub use ioas::IovaRanges;
#[cfg(feature = "vfio")]
pub use space::{Attachable, BoundDevice, SpaceMapper};

/// The number of an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IoasId(pub u32);

/// The number of a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HwptId(pub u32);

/// The number of a device that is bound to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevId(pub u32);

/// Account of locked memory that is compared with `RLIMIT_MEMLOCK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RlimitMode {
    /// The account of all processes of the user (`user->locked_vm`).
    User,
    /// The account of the process (`mm->locked_vm`), as with VFIO's type 1.
    Process,
}

impl RlimitMode {
    /// That of a file of iommufd.
    pub(crate) fn of(file: BorrowedFd<'_>) -> Result<Self> {
        Ok(match call_option(file, RLIMIT_MODE, GET, 0, 0)? {
            0 => Self::User,
            _ => Self::Process,
        })
    }
}

#[cfg(feature = "linux")]
impl RlimitMode {
    /// The counter that the kernel raises for what it maps by itself: containers of VFIO's type 1 count by
    /// process; iommufd counts as its file [says](crate::iommufd::Iommufd::rlimit_mode), and for a privileged
    /// user only what is pinned.
    pub const fn counter(self, limits: &Limits) -> Counter {
        match self {
            Self::Process => Counter::MmLockedVm,
            Self::User if limits.privileged => Counter::PinnedVm,
            Self::User => Counter::UserLockedVm,
        }
    }
}

fn call_option(file: BorrowedFd<'_>, option: u32, op: u32, object: u32, value: u64) -> Result<u64> {
    let mut argument = iommu_option {
        option_id: option,
        op: op as u16,
        object_id: object,
        val64: value,
        ..iommu_option::default()
    };
    call(file, &mut argument)?;
    Ok(argument.val64)
}

/// An open `/dev/iommu`. Clones are the same file.
///
/// [`Ioas::over`](crate::Ioas::over) opens address spaces over it, which share pins: what one of them maps
/// already is pinned and charged once. They also share the [account](Self::ledger) of the kernel's counter.
/// [`device`](Self::device) opens devices for them.
///
/// The other calls are the kernel's, one ioctl each. What an address space of this crate has mapped must not
/// be unmapped or copied by them: that breaks what the crate promises. Ranges of device addresses and lengths
/// are in bytes.
#[derive(Clone, Debug)]
pub struct Iommufd(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    fd: OwnedFd,
    #[cfg_attr(not(feature = "vfio"), expect(dead_code))]
    shares: Arc<Shares>,
    #[cfg(feature = "linux")]
    ledger: OnceLock<Arc<Ledger>>,
}

impl Iommufd {
    /// The device node.
    pub const PATH: &str = "/dev/iommu";

    /// Opens [`PATH`](Self::PATH), with no address space and no device.
    ///
    /// # Errors
    ///
    /// [`KernelError::Open`].
    pub fn open() -> Result<Self> {
        open(Path::new(Self::PATH)).map(Self::from_fd)
    }

    /// One that is open already, like one that another process has handed over.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(Arc::new(Opened {
            fd,
            shares: Arc::default(),
            #[cfg(feature = "linux")]
            ledger: OnceLock::new(),
        }))
    }

    /// The account that mappings of its address spaces are charged to: of the counter that the kernel raises,
    /// with the limit and what was in use when this was first called.
    ///
    /// # Errors
    ///
    /// [`OpenError::Kernel`]; [`OpenError::Limit`].
    #[cfg(feature = "linux")]
    pub fn ledger(&self) -> core::result::Result<Arc<Ledger>, OpenError> {
        if let Some(ledger) = self.0.ledger.get() {
            return Ok(Arc::clone(ledger));
        }
        let mode = self.rlimit_mode()?;
        let limit = |cause| OpenError::Limit(Box::new(cause));
        let limits = Limits::read().map_err(limit)?;
        let ledger = Ledger::of_counter(mode.counter(&limits), &limits).map_err(limit)?;
        Ok(Arc::clone(self.0.ledger.get_or_init(|| ledger)))
    }

    fn destroy(&self, id: u32) -> Result<()> {
        let mut argument = iommu_destroy { size: 0, id };
        call(self.as_fd(), &mut argument).map(|_| ())
    }

    /// Account that locked memory is counted on.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn rlimit_mode(&self) -> Result<RlimitMode> {
        RlimitMode::of(self.as_fd())
    }

    /// Says whose memory is counted, before there is any address space. It takes privilege
    /// (`CAP_SYS_RESOURCE`).
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn set_rlimit_mode(&self, mode: RlimitMode) -> Result<()> {
        let value = u64::from(mode == RlimitMode::Process);
        self.option(RLIMIT_MODE, SET, 0, value).map(|_| ())
    }

    fn option(&self, option: u32, op: u32, object: u32, value: u64) -> Result<u64> {
        call_option(self.as_fd(), option, op, object, value)
    }

    /// Moves the charge of all mappings to this process, all or nothing. Only memory that was
    /// mapped from files ([`map_file`](Self::map_file)) can be moved.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn change_process(&self) -> Result<()> {
        let mut argument = iommu_ioas_change_process::default();
        call(self.as_fd(), &mut argument).map(|_| ())
    }
}

impl AsFd for Iommufd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}
