//! A device: its regions, its interrupts, its reset, its features.
//!
//! A region is read and written through the device's file, register by register, or mapped
//! ([`VfioDevice::map`]) where the device allows that. PCI configuration space is a region that cannot
//! be mapped; the kernel shows a virtual one, in which it lets through what is harmless.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use runs::{Iova, Offset, Span};
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FEATURE_DMA_BUF, VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT,
    VFIO_DEVICE_FEATURE_DMA_LOGGING_START, VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP,
    VFIO_DEVICE_FEATURE_GET, VFIO_DEVICE_FEATURE_PROBE, VFIO_DEVICE_FEATURE_SET,
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_INFO_AUTOMASKED,
    VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_MASKABLE, VFIO_IRQ_INFO_NORESIZE,
    VFIO_IRQ_SET_ACTION_MASK, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK,
    VFIO_PCI_CONFIG_REGION_INDEX, vfio_device_info, vfio_irq_info, vfio_region_info,
};

use super::dma_buf::DmaBuf;
use super::info::{self, DeviceRegion};
use super::registers::{DeviceRegisters, Register, check_part, check_register};
use super::sys;
use crate::kernel::sys::{call, refused};
use crate::kernel::{KernelError, Result};

/// Offsets and bits of PCI configuration space.
///
/// Source: PCI Express Base Specification 6.0, 7.5.1.1.3 "Command Register".
pub mod config {
    /// The command register, 2 bytes.
    pub const COMMAND: u64 = 4;
    /// Command: the device answers at its memory BARs.
    pub const COMMAND_MEMORY: u16 = 1 << 1;
    /// Command: the device may do DMA and send message-signalled interrupts.
    pub const COMMAND_BUS_MASTER: u16 = 1 << 2;
}

/// Indices of a PCI device's interrupts, each a kind of them.
///
/// Source: Linux `include/uapi/linux/vfio.h`, "fixed region and IRQ index mapping".
pub mod irq {
    use vfio_bindings::bindings::vfio::{
        VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX,
        VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
    };

    /// The device's wire, which it holds until it is served.
    pub const INTX: u32 = VFIO_PCI_INTX_IRQ_INDEX;
    /// Messages.
    pub const MSI: u32 = VFIO_PCI_MSI_IRQ_INDEX;
    /// Messages by a table.
    pub const MSIX: u32 = VFIO_PCI_MSIX_IRQ_INDEX;
    /// Errors that PCI Express reports.
    pub const ERROR: u32 = VFIO_PCI_ERR_IRQ_INDEX;
    /// The kernel wants the device back.
    pub const REQUEST: u32 = VFIO_PCI_REQ_IRQ_INDEX;
}

/// Description of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// On a PCI bus: regions and interrupts have the numbers that VFIO gives those of PCI.
    pub pci: bool,
    /// [`VfioDevice::reset`] works.
    pub can_reset: bool,
    /// Regions have indices below this number.
    pub regions: u32,
    /// Interrupts have indices below this number.
    pub irqs: u32,
}

/// A kind of interrupts that a device has (`VFIO_DEVICE_GET_IRQ_INFO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Number of interrupts.
    pub count: u32,
    /// They can be had by eventfd.
    pub eventfd: bool,
    /// They can be masked.
    pub maskable: bool,
    /// The kernel masks one when it arrives.
    pub automasked: bool,
    /// Once some are set up, no more can be added.
    pub fixed: bool,
}

/// Optional feature of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFeature {
    /// [`VfioDevice::dma_buf`].
    DmaBuf,
    /// [`VfioDevice::start_dma_logging`] and the others.
    DmaLogging,
}

/// An open device.
#[derive(Debug)]
pub struct VfioDevice {
    file: File,
}

impl VfioDevice {
    /// A device that is open already, by [`Group::device`](super::Group::device) or in another
    /// process.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { file: fd.into() }
    }

    /// Flags of the device, and its numbers of regions and interrupts.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn info(&self) -> Result<DeviceInfo> {
        let mut info = vfio_device_info::default();
        call(self.as_fd(), &mut info)?;
        Ok(DeviceInfo {
            pci: info.flags & VFIO_DEVICE_FLAGS_PCI != 0,
            can_reset: info.flags & VFIO_DEVICE_FLAGS_RESET != 0,
            regions: info.num_regions,
            irqs: info.num_irqs,
        })
    }

    /// Resets the device, which takes DMA and memory BARs from it until they are switched on again.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn reset(&self) -> Result<()> {
        sys::call_bare(self.as_fd(), sys::RESET).map(|_| ())
    }

    /// Number and flags of the interrupts of one kind; [`irq`] has the indices of a PCI device.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`], also for [`irq::ERROR`] of a device without PCI Express.
    pub fn irq_info(&self, index: u32) -> Result<IrqInfo> {
        let mut info = vfio_irq_info {
            index,
            ..vfio_irq_info::default()
        };
        call(self.as_fd(), &mut info)?;
        Ok(IrqInfo {
            count: info.count,
            eventfd: info.flags & VFIO_IRQ_INFO_EVENTFD != 0,
            maskable: info.flags & VFIO_IRQ_INFO_MASKABLE != 0,
            automasked: info.flags & VFIO_IRQ_INFO_AUTOMASKED != 0,
            fixed: info.flags & VFIO_IRQ_INFO_NORESIZE != 0,
        })
    }

    /// Has the kernel signal interrupts of one kind by eventfds: interrupt `start` adds 1 to the first of `triggers`, the
    /// next one to the second, and so on; `None` leaves one without. The kernel keeps the eventfds.
    ///
    /// This enables the kind in a PCI device; INTx, MSI and MSI-X exclude each other, until [`disable_irqs`](Self::disable_irqs).
    /// Where it is [fixed](IrqInfo::fixed), interrupts beyond those of the first call are refused after that. MSI and MSI-X
    /// arrive only while [bus mastering](Self::set_bus_master) is on. An interrupt that is [masked](IrqInfo::automasked) as
    /// it arrives comes again after [`unmask_irq`](Self::unmask_irq) only.
    ///
    /// Source: Linux `include/uapi/linux/vfio.h`, `VFIO_DEVICE_SET_IRQS`; `Documentation/driver-api/vfio.rst`, "VFIO Usage
    /// Example".
    ///
    /// # Errors
    ///
    /// [`KernelError::TooManyInterrupts`] where nothing was set up. [`KernelError::Interrupts`]; unless they are not there,
    /// those of `triggers` may have lost the eventfds of earlier calls.
    pub fn set_irq_triggers(
        &self,
        index: u32,
        start: u32,
        triggers: &[Option<BorrowedFd<'_>>],
    ) -> Result<()> {
        let count = u32::try_from(triggers.len()).unwrap_or(u32::MAX);
        let answer = sys::set_triggers(self.as_fd(), index, start, triggers)
            .map_err(|error| self.irqs_refused(error, index, start, Some(count)))?;
        all_available(index, start.saturating_add(count), answer)
    }

    /// Disables the interrupts of one kind, which takes their triggers.
    ///
    /// # Errors
    ///
    /// [`KernelError::Interrupts`], also where none has had a trigger.
    pub fn disable_irqs(&self, index: u32) -> Result<()> {
        sys::set_irqs(self.as_fd(), VFIO_IRQ_SET_ACTION_TRIGGER, index, 0)
            .map_err(|error| self.irqs_refused(error, index, 0, None))
    }

    /// Masks the interrupt of a [maskable](IrqInfo::maskable) kind, as INTx, while it has a trigger.
    ///
    /// # Errors
    ///
    /// [`KernelError::Interrupts`].
    pub fn mask_irq(&self, index: u32) -> Result<()> {
        sys::set_irqs(self.as_fd(), VFIO_IRQ_SET_ACTION_MASK, index, 1)
            .map_err(|error| self.irqs_refused(error, index, 0, Some(1)))
    }

    /// Unmasks it: INTx after each arrival, once the device is served; otherwise it arrives again at once.
    ///
    /// # Errors
    ///
    /// [`KernelError::Interrupts`].
    pub fn unmask_irq(&self, index: u32) -> Result<()> {
        sys::set_irqs(self.as_fd(), VFIO_IRQ_SET_ACTION_UNMASK, index, 1)
            .map_err(|error| self.irqs_refused(error, index, 0, Some(1)))
    }

    /// Adds to a refusal which interrupts were asked for, all of the index without a `count`, and how many there are.
    fn irqs_refused(
        &self,
        error: KernelError,
        index: u32,
        start: u32,
        count: Option<u32>,
    ) -> KernelError {
        let KernelError::Refused { errno, .. } = error else {
            return error;
        };
        let there = self.irq_info(index).map_or(0, |info| info.count);
        KernelError::Interrupts {
            index,
            start,
            count: count.unwrap_or(there),
            there,
            errno,
        }
    }

    /// The region with this index.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; [`KernelError::Answer`].
    pub fn region(&self, index: u32) -> Result<DeviceRegion> {
        let head = vfio_region_info {
            index,
            ..vfio_region_info::default()
        };
        let answer = sys::call_growing(self.as_fd(), &head)?;
        info::region(&answer).map_err(|problem| KernelError::Answer {
            operation: "VFIO_DEVICE_GET_REGION_INFO",
            problem,
        })
    }

    /// Reads a register of a region, by one access of its size.
    ///
    /// # Errors
    ///
    /// [`KernelError::Outside`], [`KernelError::Unaligned`]; [`KernelError::Refused`].
    pub fn read<T: Register>(&self, region: &DeviceRegion, offset: u64) -> Result<T> {
        let at = place::<T>(region, offset)?;
        let mut bytes = T::Bytes::default();
        self.file
            .read_exact_at(bytes.as_mut(), at)
            .map_err(|error| refused("pread", &error))?;
        Ok(T::from_bytes(bytes))
    }

    /// Writes a register of a region, by one access of its size.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn write<T: Register>(&self, region: &DeviceRegion, offset: u64, value: T) -> Result<()> {
        let at = place::<T>(region, offset)?;
        self.file
            .write_all_at(value.to_bytes().as_ref(), at)
            .map_err(|error| refused("pwrite", &error))
    }

    /// PCI configuration space.
    ///
    /// # Errors
    ///
    /// As [`region`](Self::region).
    pub fn config(&self) -> Result<DeviceRegion> {
        self.region(VFIO_PCI_CONFIG_REGION_INDEX)
    }

    /// Lets a PCI device do DMA, or keeps it from it.
    ///
    /// # Errors
    ///
    /// As [`region`](Self::region) and [`read`](Self::read).
    pub fn set_bus_master(&self, on: bool) -> Result<()> {
        let space = self.config()?;
        let command: u16 = self.read(&space, config::COMMAND)?;
        let command = if on {
            command | config::COMMAND_BUS_MASTER
        } else {
            command & !config::COMMAND_BUS_MASTER
        };
        self.write(&space, config::COMMAND, command)
    }

    /// True when memory decoding is on in the command register: a PCI device answers at its memory BARs then, but in
    /// power state D3hot.
    ///
    /// # Errors
    ///
    /// As [`region`](Self::region) and [`read`](Self::read).
    pub fn decodes_memory(&self) -> Result<bool> {
        let command: u16 = self.read(&self.config()?, config::COMMAND)?;
        Ok(command & config::COMMAND_MEMORY != 0)
    }

    /// Maps `part` (offset and length in bytes, multiples of the processor's page) of a region.
    ///
    /// # Errors
    ///
    /// [`KernelError::NotMappable`], [`KernelError::Outside`]; [`KernelError::Refused`].
    pub fn map(&self, region: &DeviceRegion, part: Span<Offset>) -> Result<DeviceRegisters> {
        check_part(part, region.len)?;
        let inside =
            |areas: &std::vec::Vec<Span<Offset>>| areas.iter().any(|area| area.covers(&part));
        if !region.can_map || !region.mappable.as_ref().is_none_or(inside) {
            return Err(KernelError::NotMappable {
                region: region.index,
                part,
            });
        }
        let start = region.offset.checked_add(part.start);
        let start = start.ok_or(KernelError::Outside {
            part,
            len: region.len,
        })?;
        let part = Span::new(start, part.len);
        DeviceRegisters::map(&self.file, part, region.readable, region.writable)
    }

    /// True when the device can do this.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`] for other reasons than that it cannot.
    pub fn has_feature(&self, feature: DeviceFeature) -> Result<bool> {
        let asked: &[u32] = match feature {
            DeviceFeature::DmaBuf => &[VFIO_DEVICE_FEATURE_GET | VFIO_DEVICE_FEATURE_DMA_BUF],
            DeviceFeature::DmaLogging => &[
                VFIO_DEVICE_FEATURE_SET | VFIO_DEVICE_FEATURE_DMA_LOGGING_START,
                VFIO_DEVICE_FEATURE_SET | VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP,
                VFIO_DEVICE_FEATURE_GET | VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT,
            ],
        };
        for &flags in asked {
            match sys::bare_feature(self.as_fd(), flags | VFIO_DEVICE_FEATURE_PROBE) {
                Ok(()) => {}
                // Source: `include/uapi/linux/vfio.h`, VFIO_DEVICE_FEATURE; a feature that the
                // driver does not know is ENOTTY, one that it has without this method EINVAL.
                Err(KernelError::Refused { errno, .. })
                    if errno == libc::ENOTTY || errno == libc::EINVAL =>
                {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// A dma-buf over `part` (offset and length in bytes, multiples of the processor's page) of a region, for another
    /// device to reach it (peer to peer): iommufd maps it like a memory file, while the device answers there. (Linux 6.19.)
    ///
    /// # Errors
    ///
    /// [`KernelError::Outside`]; [`KernelError::Refused`].
    pub fn dma_buf(&self, region: &DeviceRegion, part: Span<Offset>) -> Result<DmaBuf> {
        check_part(part, region.len)?;
        let file = sys::dma_buf(self.as_fd(), region.index, part)?;
        Ok(DmaBuf::from_fd(file, part.len))
    }

    /// Has the device itself keep a log of the pages that it writes to, of `page` bytes in the
    /// given ranges of device addresses. Returns the size of page that it takes.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn start_dma_logging(&self, page: u64, ranges: &[Span<Iova>]) -> Result<u64> {
        sys::start_logging(self.as_fd(), page, ranges)
    }

    /// Ends the log.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn stop_dma_logging(&self) -> Result<()> {
        let flags = VFIO_DEVICE_FEATURE_SET | VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP;
        sys::bare_feature(self.as_fd(), flags)
    }

    /// Adds the pages of `range` that were written to, and clears them: bit *n* of `bitmap` is the
    /// *n*-th page of `page` bytes from `range.start` on.
    ///
    /// # Errors
    ///
    /// [`KernelError::Bitmap`]; [`KernelError::Refused`].
    pub fn dma_log(&self, range: Span<Iova>, page: u64, bitmap: &mut [u64]) -> Result<()> {
        sys::logged(self.as_fd(), range, page, bitmap)
    }
}

/// Looks at the kernel's answer to a request for the first `wanted` interrupts: where it has fewer, it returns their number
/// instead of an error, and sets up none.
///
/// Source: Linux 7.2, `vfio_msi_enable` in `drivers/vfio/pci/vfio_pci_intrs.c`.
pub(super) fn all_available(index: u32, wanted: u32, answer: u32) -> Result<()> {
    match answer {
        0 => Ok(()),
        available => Err(KernelError::TooManyInterrupts {
            index,
            wanted,
            available,
        }),
    }
}

/// Offset of the register in the device's file.
fn place<T: Register>(region: &DeviceRegion, offset: u64) -> Result<u64> {
    check_register::<T>(offset, region.len)?;
    region
        .offset
        .checked_add(offset)
        .ok_or(KernelError::Outside {
            part: Span::new(offset, size_of::<T>() as u64),
            len: region.len,
        })
}

impl AsFd for VfioDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
