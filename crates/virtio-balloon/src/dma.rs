//! Devices first: the seam to the program that maps the guest's memory for devices.
//!
//! A device that reaches the guest's memory by itself keeps the frames that it was given, whatever
//! happens to the pages of the process: discarding a pinned page succeeds, the guest gets a new one
//! at the next touch, and the device goes on with the old. So memory is discarded only after
//! [`Releaser::release`] said that devices let go of it, and a buffer of deflateq goes back to the guest
//! only after [`Releaser::restore`] said that they see it again. This crate knows nothing of address
//! spaces, pins and units; the program that has them implements [`Releaser`].

use core::fmt;

use crate::map::{MemoryMap, Part};

/// The devices' mappings of the guest's memory, of which a map has `T` for each region.
pub trait Releaser<T = ()> {
    /// Returns true if there are devices that cannot take page faults.
    ///
    /// While there are, `VIRTIO_BALLOON_F_MUST_TELL_HOST` is needed, and free page reporting and
    /// hinting are not to be had: the guest uses pages again there without a word.
    fn attached(&self) -> bool;

    /// Lets go of `parts`: unmapped from devices, flushed, unpinned, in this order. They are parts of `map`,
    /// ascend, and touch nowhere within a region. Memory of them that is released already is left alone.
    ///
    /// Memory that stays mapped for a device, or pinned, is reported to `kept`, in ascending pieces
    /// of the parts, and stays as it was. All other memory may be discarded after the call.
    fn release(
        &mut self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
        kept: &mut dyn FnMut(Part, KeepReason),
    );

    /// Reports the pieces of `parts`, ascending, that are mapped for a device now, or pinned, and stay so: `held`
    /// receives them. Free pages that the driver reports, or hints at, are discarded but for these.
    fn held(&self, map: MemoryMap<'_, T>, parts: &[Part], held: &mut dyn FnMut(Part, KeepReason));

    /// Takes `parts` back: pinned, then mapped for devices as they were before. Memory of them that is not
    /// released is left alone.
    ///
    /// Failures are reported to `failed`, in ascending pieces of the parts, which stay released.
    fn restore(
        &mut self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
        failed: &mut dyn FnMut(Part, KeepReason),
    );
}

/// Why a part of the guest's memory was kept, or could not be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeepReason {
    /// It is pinned by more than the devices' own mapping.
    PinnedElsewhere,
    /// The guest has mapped it for its devices, by a virtual IOMMU.
    MappedByGuest,
    /// The devices' mapping cannot be cut there.
    NotCut,
    /// The units did not invalidate it; it stays pinned.
    NotFlushed,
    /// A limit of pinned memory is reached.
    Limit,
    /// The machine has no memory for it.
    NoMemory,
    /// The kernel said something else: the error number.
    Kernel(i32),
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PinnedElsewhere => f.write_str("pinned by another user"),
            Self::MappedByGuest => f.write_str("mapped by the guest's virtual IOMMU"),
            Self::NotCut => f.write_str("the devices' mapping cannot be cut there"),
            Self::NotFlushed => f.write_str("the units did not invalidate it"),
            Self::Limit => f.write_str("over a limit of pinned memory"),
            Self::NoMemory => f.write_str("no memory"),
            Self::Kernel(errno) => write!(f, "error {errno} of the kernel"),
        }
    }
}

/// No devices: everything may be discarded at any time.
impl<T> Releaser<T> for () {
    fn attached(&self) -> bool {
        false
    }

    fn release(&mut self, _: MemoryMap<'_, T>, _: &[Part], _: &mut dyn FnMut(Part, KeepReason)) {}

    fn held(&self, _: MemoryMap<'_, T>, _: &[Part], _: &mut dyn FnMut(Part, KeepReason)) {}

    fn restore(&mut self, _: MemoryMap<'_, T>, _: &[Part], _: &mut dyn FnMut(Part, KeepReason)) {}
}
