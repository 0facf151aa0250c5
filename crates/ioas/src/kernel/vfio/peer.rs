//! A BAR of one device in the address space of others: peer to peer over iommufd.
//!
//! `vfio-pci` revokes the dma-bufs over a device's BARs while the device does not answer there: memory decoding is off in
//! the command register, the device is being reset, or it is in power state D3hot. iommufd then takes what it has mapped
//! by them out of its page tables, for good: the mapping keeps its range, but translates nothing, in tables that are made
//! later neither. When the device answers again, the kernel accepts new mappings, also of the same dma-buf, and those from
//! before stay dead. No call and no event says so.
//!
//! Source: Linux 7.2, `drivers/vfio/pci/vfio_pci_dmabuf.c`, `vfio_pci_dma_buf_move`, and its callers in
//! `vfio_pci_config.c` and `vfio_pci_core.c`; `drivers/iommu/iommufd/pages.c`, `iopt_revoke_notify`.

use std::sync::Arc;

use iopt::Prot;
use runs::{Iova, Offset, Span};

use super::info::DeviceRegion;
use crate::kernel::KernelError;
use crate::kernel::iommufd::BoundDevice;
use crate::memory::Memory;
use crate::memory::ledger::Ledger;
use crate::space::Ioas;
use crate::space::error::{MapError, UnmapError};

/// A part of a device's BAR in an address space over iommufd, for the devices there to read and write it. Nothing is
/// charged for it.
///
/// It is mapped while the device answers at its BARs. That ends and begins by what the monitor does to the device, and the
/// kernel does not report that a mapping is dead; so the monitor calls, right after it:
///
/// | what the monitor has done | call |
/// |---|---|
/// | the command register was written, also the first time | [`follow`](Self::follow) |
/// | a reset ([`VfioDevice::reset`](super::VfioDevice::reset), or one by configuration space), a power state; a hot reset, for each device of its set | [`renew`](Self::renew) |
/// | the guest has the BAR elsewhere | [`move_to`](Self::move_to) |
///
/// ```no_run
/// # use ioas::vfio::{PeerBar, PeerBarError, config};
/// # use ioas::iommufd::BoundDevice;
/// # fn f(device: &BoundDevice, bars: &mut [PeerBar], value: u16) -> Result<(), PeerBarError> {
/// // The guest has written `value` to the command register.
/// device.device.write(&device.device.config()?, config::COMMAND, value)?;
/// for bar in bars {
///     if let Err(error) = bar.follow() {
///         eprintln!("{}: {error:?}", bar.range());
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// A machine runs without it: after an error peers do not reach the BAR, and everything else is as it was.
///
/// An area of a device that does not answer would keep the first device from being attached
/// ([`AttachError::Replay`](crate::AttachError::Replay) with [`MapError::Revoked`]); while decoding is off there is none.
/// It does not go over to another process: it is dropped before a hand-over. It keeps the address space and the device open; dropped, it is unmapped.
#[derive(Debug)]
pub struct PeerBar {
    space: Arc<Ioas>,
    device: Arc<BoundDevice>,
    bar: DeviceRegion,
    part: Span<Offset>,
    iova: u64,
    mapped: bool,
    /// It may have died since a call failed.
    stale: bool,
}

/// Failure to map a BAR for other devices, or to unmap it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerBarError {
    /// The command register cannot be read, or there is no dma-buf: the part is outside of the BAR
    /// ([`KernelError::Outside`]) or not of whole pages, or the kernel or the driver has none
    /// ([`DeviceFeature::DmaBuf`](super::DeviceFeature::DmaBuf), Linux 6.19).
    #[error(transparent)]
    Device(#[from] KernelError),
    /// It counts as mapped.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
    /// It is not mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

impl PeerBar {
    /// `part` (offset and length in bytes, multiples of the processor's page) of the region `bar` of `device`, to be
    /// at the device address `iova` of `space`. Nothing is mapped yet.
    pub fn new(
        space: &Arc<Ioas>,
        device: &Arc<BoundDevice>,
        bar: &DeviceRegion,
        part: Span<Offset>,
        iova: u64,
    ) -> Self {
        Self {
            space: Arc::clone(space),
            device: Arc::clone(device),
            bar: bar.clone(),
            part,
            iova,
            mapped: false,
            stale: false,
        }
    }

    /// Its device addresses: those that it has, or is to have.
    pub const fn range(&self) -> Span<Iova> {
        Span::new(self.iova, self.part.len)
    }

    /// True when it counts as mapped.
    pub const fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Maps it when memory decoding is on, by a new dma-buf, and unmaps it when that is off; otherwise it is not touched.
    /// Returns true when it is mapped, false while the device does not answer at its BARs.
    ///
    /// The kernel has already taken it from the tables when the write that switches decoding off returns, and refuses to
    /// map it before the write that switches it on. After an error the next call unmaps it in any case.
    ///
    /// # Errors
    ///
    /// [`PeerBarError`].
    pub fn follow(&mut self) -> Result<bool, PeerBarError> {
        let decodes = self.device.device.decodes_memory();
        self.stale |= decodes.is_err();
        let decodes = decodes?;
        if self.stale || !decodes {
            self.unmap()?;
        }
        match decodes && !self.mapped {
            true => self.map(),
            false => Ok(self.mapped),
        }
    }

    /// Unmaps it and maps it again by a new dma-buf, as if decoding had been off: peers miss it for a moment.
    ///
    /// # Errors
    ///
    /// As [`follow`](Self::follow).
    pub fn renew(&mut self) -> Result<bool, PeerBarError> {
        self.move_to(self.iova)
    }

    /// The same, at the device address `iova` from now on.
    ///
    /// # Errors
    ///
    /// As [`follow`](Self::follow). It stays where it is when it cannot be unmapped there.
    pub fn move_to(&mut self, iova: u64) -> Result<bool, PeerBarError> {
        self.unmap()?;
        self.iova = iova;
        self.follow()
    }

    fn map(&mut self) -> Result<bool, PeerBarError> {
        let buffer = self.device.device.dma_buf(&self.bar, self.part)?;
        // A memory of its own, which no other mapping is copied from.
        let memory = Memory::new(Arc::new(buffer), &Ledger::unlimited());
        let whole = Span::new(0, self.part.len);
        match self.space.map(self.iova, &memory, whole, Prot::RW) {
            // Switched off since the register was read, or in D3hot.
            Err(MapError::Revoked { .. }) => Ok(false),
            mapped => {
                mapped?;
                self.mapped = true;
                Ok(true)
            }
        }
    }

    fn unmap(&mut self) -> Result<(), PeerBarError> {
        if self.mapped {
            self.stale = true;
            self.space.unmap(self.range())?;
            self.mapped = false;
        }
        self.stale = false;
        Ok(())
    }
}

impl Drop for PeerBar {
    fn drop(&mut self) {
        // It stays an area then, until the address space is closed.
        let _ = self.unmap();
    }
}
