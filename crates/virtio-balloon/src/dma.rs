//! Devices first: the seam by which the balloon asks whoever maps the guest's memory for devices.
//!
//! A device that reaches the guest's memory by itself keeps the frames that it was given, whatever
//! happens to the pages of the process: discarding a pinned page succeeds, the guest gets a new one
//! at the next touch, and the device goes on with the old. So memory is discarded only after
//! [`Dma::release`] said that devices let go of it, and a buffer of deflateq goes back to the guest
//! only after [`Dma::restore`] said that they see it again. This crate knows nothing of address
//! spaces, pins and units; whoever has them implements [`Dma`].

use core::fmt;

use runs::Span;

/// What devices see of the guest's memory.
pub trait Dma {
    /// Whether there are devices that cannot take page faults.
    ///
    /// While there are, `VIRTIO_BALLOON_F_MUST_TELL_HOST` is needed, and free page reporting and
    /// hinting are not to be had: the guest uses pages again there without a word.
    fn attached(&self) -> bool;

    /// Lets go of `runs`: unmapped from devices, flushed, unpinned, in this order. The runs ascend and
    /// do not touch. Parts of them that are released already are left alone.
    ///
    /// Whatever stays in sight of a device, or is pinned by somebody, is told to `kept`, in ascending
    /// parts of the runs, and stays as it was. All else may be discarded after the call.
    fn release(&mut self, runs: &[Span], kept: &mut dyn FnMut(Span, Reason));

    /// Takes `runs` back: pinned, then mapped for devices as they were before. Parts of them that are
    /// not released are left alone.
    ///
    /// What could not be had is told to `failed`, in ascending parts of the runs, and stays released.
    fn restore(&mut self, runs: &[Span], failed: &mut dyn FnMut(Span, Reason));
}

/// Why a part of the guest's memory was kept, or could not be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// Somebody else than the devices' own mapping pins it.
    PinnedElsewhere,
    /// What devices see cannot be cut there.
    NotCut,
    /// The units did not forget it; it stays pinned.
    NotFlushed,
    /// A limit of pinned memory is reached.
    Limit,
    /// The machine has no memory for it.
    NoMemory,
    /// The kernel said something else: the error number.
    Kernel(i32),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PinnedElsewhere => f.write_str("pinned by somebody else"),
            Self::NotCut => f.write_str("what devices see cannot be cut there"),
            Self::NotFlushed => f.write_str("the units did not forget it"),
            Self::Limit => f.write_str("over a limit of pinned memory"),
            Self::NoMemory => f.write_str("no memory"),
            Self::Kernel(errno) => write!(f, "error {errno} of the kernel"),
        }
    }
}

/// No devices: everything may be discarded at any time.
impl Dma for () {
    fn attached(&self) -> bool {
        false
    }

    fn release(&mut self, _runs: &[Span], _kept: &mut dyn FnMut(Span, Reason)) {}

    fn restore(&mut self, _runs: &[Span], _failed: &mut dyn FnMut(Span, Reason)) {}
}
