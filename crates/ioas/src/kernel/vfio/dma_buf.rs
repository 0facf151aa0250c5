//! A part of a device's region as a dma-buf, which iommufd maps for other devices.

use std::boxed::Box;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use runs::{Offset, Span};

use crate::memory::object::{MemoryObject, PinFailed, Pinned};

/// A dma-buf over a part of a region ([`VfioDevice::dma_buf`](super::VfioDevice::dma_buf)): registers of a device, or
/// its memory, as a [`MemoryObject`] that an address space over iommufd maps.
///
/// The device's driver revokes it while the device does not answer at its BARs; what was mapped by it then is dead for
/// good. `PeerBar` maps it again.
#[derive(Debug)]
pub struct DmaBuf {
    file: OwnedFd,
    len: u64,
}

impl DmaBuf {
    /// One that is open already, as in another process, of `len` bytes.
    pub const fn from_fd(file: OwnedFd, len: u64) -> Self {
        Self { file, len }
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<DmaBuf> for OwnedFd {
    fn from(buffer: DmaBuf) -> Self {
        buffer.file
    }
}

impl MemoryObject for DmaBuf {
    fn len(&self) -> u64 {
        self.len
    }

    /// The kernel pins nothing of it.
    ///
    /// Source: Linux 7.2, `drivers/iommu/iommufd/pages.c`, `iopt_alloc_dmabuf_pages`.
    fn charge(&self, _part: Span<Offset>) -> u64 {
        0
    }

    fn is_mmio(&self) -> bool {
        true
    }

    fn pin(
        &self,
        _part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        Err(PinFailed::Refused(
            "only a kernel knows where the registers behind a dma-buf are".into(),
        ))
    }

    #[cfg(feature = "iommufd")]
    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.file.as_fd(), 0))
    }
}
