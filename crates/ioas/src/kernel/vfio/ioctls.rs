//! Containers and address spaces of the crate `vfio-ioctls` as a back end: [`VfioOpsMapper`].
//!
//! A `VfioDevice` opens only over that crate's own `VfioContainer` or `VfioIommufd`, to which it downcasts
//! (`DowncastVfioOps` otherwise). So its `VfioOps` is not implemented here, but called.
//!
//! `vfio_dma_unmap` returns `InvalidDmaUnmapSize` when fewer bytes were mapped than its range has, although it has
//! unmapped them. It is therefore called for one mapping at a time, with the range that was mapped; if that error
//! comes then, the mapping went with its container's groups, and is gone.

#![allow(unsafe_code)]

use core::any::Any;
use core::error::Error;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::with_exposed_provenance_mut;
use std::boxed::Box;
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::vec::Vec;

use iopt::Prot;
use runs::{Iova, Span};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError, VfioOps};

use super::container::Container;
use crate::errno::Profile;
use crate::kernel::{Entering, KernelError, MapSource, Mapper, MapperInfo, Result};
#[cfg(feature = "linux")]
use crate::memory::ledger::Ledger;

/// Maps through the `VfioOps` of the crate `vfio-ioctls`, for a monitor that opens its devices by that crate.
///
/// Nothing else may map or unmap through the same `VfioOps`, which has the devices already: attach a device here
/// after `VfioDevice::new`, and [detach](crate::Ioas::detach) it before it is dropped. `D` is what the monitor
/// has for a device, its `VfioDevice` or a type around it.
///
/// `VfioOps` maps for reading and writing: an area with other permissions is refused as
/// [`MapError::Prot`](crate::MapError::Prot). It tracks no dirty pages, so that everything mapped counts as written
/// to, and nothing is handed over to another process. Errors have the names of type 1, also over `VfioIommufd`.
///
/// ```no_run
/// use std::{path::Path, sync::Arc};
///
/// use ioas::{Ioas, vfio::VfioOpsMapper};
/// use vfio_ioctls::{VfioContainer, VfioDevice};
///
/// let container = Arc::new(VfioContainer::new(None)?);
/// let mapper = VfioOpsMapper::<VfioDevice>::of_container(&container)?;
/// let space = Ioas::over_mapper(mapper);
/// let path = Path::new("/sys/bus/pci/devices/0000:01:00.0");
/// let device = Arc::new(VfioDevice::new(path, container, false)?);
/// space.attach(device)?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct VfioOpsMapper<D = VfioDevice> {
    ops: Arc<dyn VfioOps>,
    /// The same container by a descriptor of ours, which says what it can map.
    container: Option<Container>,
    /// Length and address in this process of each mapping, by device address.
    mapped: BTreeMap<u64, (usize, u64)>,
    devices: usize,
    device: PhantomData<fn(D)>,
}

impl<D> fmt::Debug for VfioOpsMapper<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioOpsMapper")
            .field("mappings", &self.mapped.len())
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}

impl<D> VfioOpsMapper<D> {
    /// Over any `VfioOps` that maps nothing. It does not tell which addresses can be mapped, or how many mappings
    /// there can be: the kernel refuses when it is asked.
    pub fn new(ops: Arc<dyn VfioOps>) -> Self {
        Self {
            ops,
            container: None,
            mapped: BTreeMap::new(),
            devices: 0,
            device: PhantomData,
        }
    }

    /// Over a container that maps nothing. Its descriptor is duplicated, to ask the kernel for addresses, page sizes
    /// and the number of mappings.
    ///
    /// # Errors
    ///
    /// [`KernelError::Mapper`] when the process has no descriptor left, and as [`Container::from_fd`].
    pub fn of_container(container: &Arc<VfioContainer>) -> Result<Self> {
        // SAFETY: the container has the descriptor open for as long as it is borrowed here.
        let fd = unsafe { BorrowedFd::borrow_raw(container.as_raw_fd()) };
        let fd = fd.try_clone_to_owned();
        let fd = fd.map_err(|error| KernelError::Mapper(Box::new(error)))?;
        Ok(Self {
            container: Some(Container::from_fd(fd)?),
            ..Self::new(Arc::clone(container) as Arc<dyn VfioOps>)
        })
    }

    /// Maps the `len` bytes at `address` in this process.
    ///
    /// # Safety
    ///
    /// As for [`Mapper::map`].
    unsafe fn map_one(&mut self, iova: u64, len: usize, address: u64) -> Result<()> {
        let pointer = with_exposed_provenance_mut(address as usize);
        // SAFETY: the caller answers for the memory.
        let mapped = unsafe { self.ops.vfio_dma_map(iova, len, pointer) };
        mapped.map_err(|error| refused("VFIO_IOMMU_MAP_DMA", error))?;
        self.mapped.insert(iova, (len, address));
        Ok(())
    }

    fn unmap_one(&mut self, iova: u64, len: usize) -> Result<()> {
        match self.ops.vfio_dma_unmap(iova, len) {
            Ok(()) | Err(VfioError::InvalidDmaUnmapSize) => {}
            Err(error) => {
                let error = refused("VFIO_IOMMU_UNMAP_DMA", error);
                if self.devices == 0
                    && matches!(error, KernelError::Refused { errno, .. } if errno == libc::EINVAL)
                {
                    // A container without groups takes no calls and maps nothing.
                    self.mapped.clear();
                }
                return Err(error);
            }
        }
        self.mapped.remove(&iova);
        Ok(())
    }
}

/// An error of the crate: the number is that of the kernel, where there is one behind it.
fn refused(operation: &'static str, error: VfioError) -> KernelError {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if let Some(number) = error.downcast_ref::<vmm_sys_util::errno::Error>() {
            let errno = number.errno();
            return KernelError::Refused { operation, errno };
        }
        cause = error.source();
    }
    KernelError::Mapper(Box::new(error))
}

/// Refuses an operation that `VfioOps` has no call for.
fn unsupported<T>(operation: &'static str) -> Result<T> {
    let errno = libc::EOPNOTSUPP;
    Err(KernelError::Refused { operation, errno })
}

impl<D: Any + Send + Sync> Mapper for VfioOpsMapper<D> {
    type Device = D;

    const PROFILE: Profile = Profile::Type1;

    /// It is in the container since it was opened.
    fn enter(&mut self, _: &D, _: Entering) -> Result<()> {
        self.devices += 1;
        Ok(())
    }

    /// It leaves the container when it is dropped.
    fn leave(&mut self, _: &D) -> Result<()> {
        self.devices -= 1;
        Ok(())
    }

    fn info(&self) -> Result<MapperInfo> {
        match &self.container {
            Some(container) => container.mapper_info(),
            None => Ok(MapperInfo {
                granule: 4096,
                ranges: None,
                available: None,
                page_sizes: None,
            }),
        }
    }

    unsafe fn map(&mut self, iova: Span<Iova>, source: MapSource<'_>, prot: Prot) -> Result<()> {
        let MapSource::Address(address) = source else {
            return Err(KernelError::NoSource);
        };
        if prot != Prot::RW {
            return Err(KernelError::Prot { prot });
        }
        // SAFETY: the caller answers for the memory.
        unsafe { self.map_one(iova.start, iova.len as usize, address) }
    }

    /// All or nothing, as the kernel does it in one call.
    fn unmap(&mut self, iova: Span<Iova>) -> Result<u64> {
        let inside = self.mapped.range(iova.start..=iova.last());
        let inside: Vec<_> = inside.map(|(iova, part)| (*iova, *part)).collect();
        for (nth, (start, (len, _))) in inside.iter().enumerate() {
            if let Err(error) = self.unmap_one(*start, *len) {
                for (start, (len, address)) in &inside[..nth] {
                    // SAFETY: the range was mapped with this memory and is not unmapped as a whole, so that the
                    // promise for it still holds. Where this fails, no device reaches the memory.
                    let _ = unsafe { self.map_one(*start, *len, *address) };
                }
                return Err(error);
            }
        }
        Ok(inside.iter().map(|(_, (len, _))| *len as u64).sum())
    }

    fn set_tracking(&mut self, on: bool) -> Result<()> {
        match on {
            true => unsupported("VFIO_IOMMU_DIRTY_PAGES"),
            false => Ok(()),
        }
    }

    fn dirty(&mut self, _: Span<Iova>, _: u64, _: &mut [u64]) -> Result<()> {
        unsupported("VFIO_IOMMU_DIRTY_PAGES")
    }

    fn is_blind(&self) -> bool {
        true
    }

    /// `mm->locked_vm` over a container.
    #[cfg(feature = "linux")]
    fn account(&self) -> Option<Arc<Ledger>> {
        self.container.as_ref()?;
        Ledger::now(|_| hostmem::Counter::MmLockedVm)
    }

    fn give_up_addresses(&mut self) -> Result<()> {
        unsupported("VFIO_DMA_UNMAP_FLAG_VADDR")
    }

    unsafe fn take_over(&mut self, _: &[Arc<D>], _: &[(Span<Iova>, MapSource<'_>)]) -> Result<()> {
        unsupported("VFIO_DMA_MAP_FLAG_VADDR")
    }
}
