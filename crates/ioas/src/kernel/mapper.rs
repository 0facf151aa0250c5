//! The seam to a kernel's operations: what the back end asks of a container or of an
//! address space of iommufd.
//!
//! One call is one ioctl, or the few that belong together, and its errors are the kernel's numbers.
//! Tests put a plain model of the kernel in its place.

use core::any::Any;
use core::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::vec::Vec;

use iommu::NodeId;
use iopt::Prot;
use runs::{Iova, PageSizes, Span};

use super::shares::Shares;
use crate::errno::Profile;
use crate::kernel_error::Result;
use crate::memory::ledger::Ledger;
use crate::space::placement::{Place, Placement};

/// Device addresses that can be mapped now, and their granule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapperInfo {
    /// Alignment of a mapping's ends, bytes.
    pub granule: u64,
    /// Device addresses, first and last; `None` when the kernel does not tell.
    pub ranges: Option<Vec<RangeInclusive<u64>>>,
    /// Number of further mappings that there can be; `None` without a limit.
    pub available: Option<u64>,
    /// Sizes of pages that all of its devices translate; `None` when the kernel does not tell.
    pub page_sizes: Option<PageSizes>,
}

/// Memory behind a mapping.
#[derive(Clone, Copy, Debug)]
pub enum MapSource<'a> {
    /// Memory of this process at this address.
    Address(u64),
    /// A memory file, from this offset on.
    File(BorrowedFd<'a>, u64),
    /// Copies the mapping that another address space of the same owner has at this address.
    Copy {
        /// Its [`number`](Mapper::number).
        space: u32,
        /// The device address there.
        iova: u64,
    },
}

/// Circumstances in which a device is attached.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entering {
    /// Dirty pages are tracked from the beginning, if possible.
    pub dirty: bool,
    /// The memory node that it is at, if that is known.
    pub near: Option<NodeId>,
    /// Policy for sharing a page table with other devices.
    pub placement: Placement,
}

/// Operations of one container, or of one address space of iommufd.
///
/// Ranges and lengths are in bytes.
pub trait Mapper: Send + 'static {
    /// Endpoint that is attached, as an `Arc` of it: a group, or a device.
    type Device: Any + Send + Sync;

    /// Interface whose error numbers and capabilities it has.
    const PROFILE: Profile;

    /// Devices of each node can have page tables of their own, over the same pins.
    const NODE_TABLES: bool = false;

    /// Attaches a device; nothing can be mapped before the first.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn enter(&mut self, device: &Self::Device, with: Entering) -> Result<()>;

    /// Detaches a device. What it wrote to can still be read, but for a container whose last group this
    /// is: that keeps nothing.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn leave(&mut self, device: &Self::Device) -> Result<()>;

    /// Gives back what was there for `device` alone, which was detached.
    fn left(&mut self, device: &Self::Device) {
        let _ = device;
    }

    /// Granule and ranges that can be mapped with the devices attached now.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn info(&self) -> Result<MapperInfo>;

    /// Has the kernel refuse devices that cannot translate `ranges`, if it does such a thing.
    ///
    /// # Errors
    ///
    /// The kernel's. What was allowed before is then still.
    fn allow(&mut self, ranges: &[Span<Iova>]) -> Result<()> {
        let _ = ranges;
        Ok(())
    }

    /// Maps `source` at `iova`.
    ///
    /// # Safety
    ///
    /// For [`MapSource::Address`], until the range is unmapped: the memory stays mapped in this process
    /// as it is, and with [`Prot::WRITE`] it is accessed here only by atomic or volatile accesses;
    /// with [`Prot::READ`] alone there is no `&mut` to it.
    ///
    /// # Errors
    ///
    /// The kernel's. Nothing is mapped then.
    #[allow(unsafe_code)]
    unsafe fn map(&mut self, iova: Span<Iova>, source: MapSource<'_>, prot: Prot) -> Result<()>;

    /// Unmaps the mappings in `iova`, and returns their bytes.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn unmap(&mut self, iova: Span<Iova>) -> Result<u64>;

    /// Starts or stops tracking what devices write to. Starting discards what was written before.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn set_tracking(&mut self, on: bool) -> Result<()>;

    /// Reads and clears which pages of `iova` are dirty: sets bit *n* of `bitmap` for the *n*-th
    /// page of `page` bytes.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn dirty(&mut self, iova: Span<Iova>, page: u64, bitmap: &mut [u64]) -> Result<()>;

    /// True when some device writes without leaving a trace.
    fn is_blind(&self) -> bool;

    /// Declares all addresses of this process invalid, before another one takes over.
    ///
    /// # Errors
    ///
    /// The kernel's. Nothing has changed then.
    fn give_up_addresses(&mut self) -> Result<()>;

    /// Says where the memory of each mapping is in this process, after another one has given up, and
    /// moves the charge here.
    ///
    /// # Safety
    ///
    /// As for [`map`](Self::map).
    ///
    /// # Errors
    ///
    /// The kernel's.
    #[allow(unsafe_code)]
    unsafe fn take_over(
        &mut self,
        devices: &[Arc<Self::Device>],
        mappings: &[(Span<Iova>, MapSource<'_>)],
    ) -> Result<()>;

    /// The page tables of `devices`, which are attached, if there may be several. Mappings and charge
    /// are those of all, and are filled in for the first.
    fn places(&self, devices: &[Arc<Self::Device>]) -> Option<Vec<Place>> {
        let _ = devices;
        None
    }

    /// Name of this address space as a [`MapSource::Copy`].
    fn number(&self) -> u32 {
        0
    }

    /// Account that the kernel charges what is mapped here to, with its limit and what is in use now; `None` where that
    /// is not known. After a refusal for want of memory it says if the limit was the reason.
    fn account(&self) -> Option<Arc<Ledger>> {
        None
    }

    /// Mappings of the address spaces that can copy from each other; `None` when nothing is copied.
    fn shares(&self) -> Option<&Arc<Shares>> {
        None
    }
}
