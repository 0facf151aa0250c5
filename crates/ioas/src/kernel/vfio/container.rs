//! A container: one I/O address space of VFIO's type 1, and the groups in it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use iopt::Prot;
use runs::{Iova, Span};
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_DMA_CC_IOMMU, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_VADDR,
    VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL, VFIO_DMA_UNMAP_FLAG_VADDR,
    VFIO_IOMMU_DIRTY_PAGES_FLAG_START, VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP, VFIO_NOIOMMU_IOMMU,
    VFIO_TYPE1_IOMMU, VFIO_TYPE1v2_IOMMU, VFIO_UNMAP_ALL, VFIO_UPDATE_VADDR,
    vfio_iommu_type1_dirty_bitmap, vfio_iommu_type1_dma_unmap, vfio_iommu_type1_info,
};

use super::info::{self, IommuInfo};
use super::sys;
use crate::kernel::sys::{call, open};
use crate::kernel::{KernelError, Result};

/// Model of a container's IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IommuModel {
    /// The first version: an unmap that starts at a mapping removes all of it.
    Type1,
    /// The second version: an unmap never removes more than it names.
    Type1V2,
    /// No IOMMU: a device reaches all memory, and nothing can be mapped.
    NoIommu,
}

/// Ability of a kernel or a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    /// A model.
    Model(IommuModel),
    /// DMA is forced to be cache-coherent. The answer changes as groups come and go.
    DmaCoherent,
    /// [`Container::unmap_all`].
    UnmapAll,
    /// [`Container::invalidate_vaddr`] and [`Container::update_vaddr`].
    UpdateVaddr,
}

impl IommuModel {
    const fn number(self) -> u32 {
        match self {
            Self::Type1 => VFIO_TYPE1_IOMMU,
            Self::Type1V2 => VFIO_TYPE1v2_IOMMU,
            Self::NoIommu => VFIO_NOIOMMU_IOMMU,
        }
    }
}

/// An open container.
///
/// Ranges of device addresses and lengths are in bytes, and multiples of the IOMMU's smallest page.
#[derive(Debug)]
pub struct Container {
    fd: OwnedFd,
}

impl Container {
    /// The device node of type 1.
    pub const PATH: &str = "/dev/vfio/vfio";

    /// Opens a new container at [`PATH`](Self::PATH).
    ///
    /// # Errors
    ///
    /// [`KernelError::Open`]; as [`from_fd`](Self::from_fd).
    pub fn open() -> Result<Self> {
        Self::from_fd(open(Path::new(Self::PATH))?)
    }

    /// A container that is open already: one that another process has handed over, or an open
    /// `/dev/iommu`, which iommufd then makes look like a container.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`] when the file is neither; [`KernelError::Version`].
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        match sys::call_bare(fd.as_fd(), sys::GET_API_VERSION)? {
            VFIO_API_VERSION => Ok(Self { fd }),
            found => Err(KernelError::Version { found }),
        }
    }

    /// True when the kernel, or the container with the groups that are in it now, can do this.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn check_extension(&self, extension: Extension) -> Result<bool> {
        let number = match extension {
            Extension::Model(model) => model.number(),
            Extension::DmaCoherent => VFIO_DMA_CC_IOMMU,
            Extension::UnmapAll => VFIO_UNMAP_ALL,
            Extension::UpdateVaddr => VFIO_UPDATE_VADDR,
        };
        sys::check_extension(self.as_fd(), number).map(|answer| answer > 0)
    }

    /// Chooses the model, once, when the first group is in the container.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn set_iommu(&self, model: IommuModel) -> Result<()> {
        sys::set_iommu(self.as_fd(), model.number())
    }

    /// Capabilities of the IOMMU for the groups that are in the container now.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; [`KernelError::Answer`].
    pub fn info(&self) -> Result<IommuInfo> {
        let answer = sys::call_growing(self.as_fd(), &vfio_iommu_type1_info::default())?;
        info::iommu(&answer).map_err(|problem| KernelError::Answer {
            operation: "VFIO_IOMMU_GET_INFO",
            problem,
        })
    }

    /// Lets the container's devices reach the memory of this process at `address`, at the device
    /// addresses `iova`. It is pinned and charged to this process now.
    ///
    /// This is `unsafe` where mapping an area of an address space is not, since a container does
    /// not know what the memory is, nor does it hold anything that keeps it: the caller has the
    /// areas and their memory objects. A `hostmem::Mapping` fulfils the first two points for as
    /// long as it is not dropped.
    ///
    /// # Safety
    ///
    /// From now on until the range is unmapped, or every descriptor of the container and of all
    /// groups in it is closed:
    ///
    /// - `[address, address + iova.len)` stays mapped as it is. The kernel keeps the pages that it
    ///   has pinned, but pins those at the address anew when a group comes into the container
    ///   whose devices cannot share the domain that there is.
    /// - With [`Prot::WRITE`] devices write to the memory at any time: this process accesses it
    ///   in no other way than by atomic or volatile accesses, and holds no reference to any of it
    ///   but to atomic cells. With [`Prot::READ`] alone there is no `&mut` to it.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; [`KernelError::Prot`] for more than read and write.
    #[allow(unsafe_code)]
    pub unsafe fn map_dma(&self, iova: Span<Iova>, address: u64, prot: Prot) -> Result<()> {
        let flags = map_flags(prot)?;
        // SAFETY: the caller answers for the memory.
        unsafe { sys::map_dma(self.as_fd(), flags, iova, address) }
    }

    /// Takes the range from the devices and unpins its memory; returns the bytes that were mapped.
    /// Mappings that it would cut are refused by the second version of the model.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn unmap_dma(&self, iova: Span<Iova>) -> Result<u64> {
        self.unmap(0, iova)
    }

    /// Takes everything from the devices; returns the bytes.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`], also without [`Extension::UnmapAll`].
    pub fn unmap_all(&self) -> Result<u64> {
        self.unmap(VFIO_DMA_UNMAP_FLAG_ALL, Span::default())
    }

    /// As [`unmap_dma`](Self::unmap_dma), and tells which pages were dirty: bit *n* of `bitmap`,
    /// which is cleared first, is the *n*-th page of `page` bytes from `iova.start` on.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`], also when the bitmap is too short.
    pub fn unmap_dma_dirty(&self, iova: Span<Iova>, page: u64, bitmap: &mut [u64]) -> Result<u64> {
        sys::unmap_dirty(self.as_fd(), iova, page, bitmap)
    }

    /// Declares the addresses of this process behind the range invalid, before another process
    /// takes over with [`update_vaddr`](Self::update_vaddr). Devices go on; nothing can be pinned
    /// anew, and no group can come in meanwhile. Returns the bytes.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn invalidate_vaddr(&self, iova: Span<Iova>) -> Result<u64> {
        self.unmap(VFIO_DMA_UNMAP_FLAG_VADDR, iova)
    }

    /// The same for all ranges.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn invalidate_all_vaddrs(&self) -> Result<u64> {
        let flags = VFIO_DMA_UNMAP_FLAG_VADDR | VFIO_DMA_UNMAP_FLAG_ALL;
        self.unmap(flags, Span::default())
    }

    /// Says where the memory of one mapping is in this process, after it was declared invalid:
    /// exactly the range that was mapped. The charge moves to this process.
    ///
    /// # Safety
    ///
    /// As for [`map_dma`](Self::map_dma), with the permissions that the mapping has had from the
    /// beginning. It should be the same memory: devices go on using the pages that are pinned.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    #[allow(unsafe_code)]
    pub unsafe fn update_vaddr(&self, iova: Span<Iova>, address: u64) -> Result<()> {
        // SAFETY: the caller answers for the memory.
        unsafe { sys::map_dma(self.as_fd(), VFIO_DMA_MAP_FLAG_VADDR, iova, address) }
    }

    fn unmap(&self, flags: u32, iova: Span<Iova>) -> Result<u64> {
        let mut unmap = vfio_iommu_type1_dma_unmap {
            flags,
            iova: iova.start,
            size: iova.len,
            ..vfio_iommu_type1_dma_unmap::default()
        };
        call(self.as_fd(), &mut unmap)?;
        Ok(unmap.size)
    }

    /// Starts tracking which pages devices write to.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn start_dirty_tracking(&self) -> Result<()> {
        self.dirty(VFIO_IOMMU_DIRTY_PAGES_FLAG_START)
    }

    /// Stops it.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn stop_dirty_tracking(&self) -> Result<()> {
        self.dirty(VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP)
    }

    /// Tells which pages of the range are dirty, and clears it: bit *n* of `bitmap`, which is
    /// cleared first, is the *n*-th page from `iova.start` on. `page` is the IOMMU's smallest
    /// page, bytes.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`], also when the bitmap is too short.
    pub fn dirty_bitmap(&self, iova: Span<Iova>, page: u64, bitmap: &mut [u64]) -> Result<()> {
        sys::dirty_bitmap(self.as_fd(), iova, page, bitmap)
    }

    fn dirty(&self, flags: u32) -> Result<()> {
        let mut argument = vfio_iommu_type1_dirty_bitmap {
            flags,
            ..vfio_iommu_type1_dirty_bitmap::default()
        };
        call(self.as_fd(), &mut argument).map(|_| ())
    }
}

/// `VFIO_DMA_MAP_FLAG_…` of what devices may do.
pub(super) fn map_flags(prot: Prot) -> Result<u32> {
    if !Prot::RW.contains(prot) {
        return Err(KernelError::Prot { prot });
    }
    let flag = |bit, flag| if prot.contains(bit) { flag } else { 0 };
    Ok(flag(Prot::READ, VFIO_DMA_MAP_FLAG_READ) | flag(Prot::WRITE, VFIO_DMA_MAP_FLAG_WRITE))
}

impl AsFd for Container {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
