//! Containers as a back end: [`Type1`].
//!
//! The first group brings the container's IOMMU, the last one takes it away with all mappings. An
//! open `/dev/iommu` ([`Container::from_fd`]) does as well: iommufd plays the container.
//!
//! Each container charges for itself: memory that a second one maps is charged twice.

use std::sync::Arc;

use iopt::Prot;
use runs::{Iova, Span};

use super::container::{Container, Extension, IommuModel};
use super::group::Group;
use crate::errno::Profile;
use crate::kernel::{Entering, KernelError, MapSource, Mapper, MapperInfo, Result};
#[cfg(feature = "linux")]
use crate::memory::ledger::Ledger;
use crate::space::Ioas;
use crate::space::open::{IoasOptions, OpenError, OpenSpace};
#[cfg(all(feature = "linux", feature = "iommufd"))]
use {crate::kernel::iommufd::RlimitMode, std::os::fd::AsFd as _};

/// VFIO's type 1. Clones are the same handle.
///
/// A container of type 1 is one address space, so each [`Ioas::over`] opens one of its own: memory that two of
/// them map is pinned and charged twice, on the account that all of this process
#[cfg_attr(feature = "linux", doc = "[share](crate::Ledger::of_kernel).")]
#[cfg_attr(not(feature = "linux"), doc = "share.")]
/// A device opens once its [group](Self::group) is attached:
///
/// ```no_run
/// use ioas::{Ioas, vfio::Type1};
///
/// let type1 = Type1::open()?;
/// let space = Ioas::over(&type1)?;
/// let group = type1.group("0000:01:00.0")?;
/// space.attach(group.clone())?;
/// let device = group.device("0000:01:00.0")?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// With [`Placement::PerNode`](crate::Placement::PerNode) an address space has a container for the groups of each
/// memory node, opened as they are needed:
///
/// ```no_run
/// use ioas::{Endpoint, Ioas, Placement, vfio::Type1};
/// use iommu::NodeId;
///
/// let type1 = Type1::open()?;
/// let space = Ioas::options().placement(Placement::PerNode).over(&type1)?;
/// for (device, node) in [("0000:01:00.0", 0), ("0000:81:00.0", 1)] {
///     space.attach(Endpoint::from(type1.group(device)?).near(NodeId(node)))?;
/// }
/// assert_eq!(space.places().len(), 2);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Type1(());

impl Type1 {
    /// Makes sure that the kernel has type 1.
    ///
    /// # Errors
    ///
    /// [`KernelError::Open`], [`KernelError::Version`]; [`KernelError::NoType1`] of a kernel without it.
    pub fn open() -> Result<Self> {
        let model = Extension::Model(IommuModel::Type1V2);
        match Container::open()?.check_extension(model)? {
            true => Ok(Self(())),
            false => Err(KernelError::NoType1),
        }
    }

    /// Opens the IOMMU group of the PCI device `address` (`0000:01:00.0`).
    ///
    /// # Errors
    ///
    /// [`KernelError::NoGroup`]; [`KernelError::Open`] while its devices are not bound to `vfio-pci`, and
    /// when another process has it.
    pub fn group(&self, address: &str) -> Result<Arc<Group>> {
        Group::of_device(address).map(Arc::new)
    }
}

impl OpenSpace for Type1 {
    /// A new container.
    fn open_space(&self, options: IoasOptions) -> core::result::Result<Ioas, OpenError> {
        let open = || Container::open().map(ContainerMapper::new);
        match options.divides() {
            true => options.over_mappers(open),
            false => options.over_mapper(open()?),
        }
    }
}

/// A container and the groups in it.
#[derive(Debug)]
pub struct ContainerMapper {
    container: Container,
    groups: usize,
}

impl ContainerMapper {
    /// Over `container`, in which there is no group yet, or those that another process hands over.
    pub const fn new(container: Container) -> Self {
        let groups = 0;
        Self { container, groups }
    }

    /// The container.
    pub const fn container(&self) -> &Container {
        &self.container
    }
}

/// The entries of a container (`dma_entry_limit` of `vfio_iommu_type1`, unless it was changed), for
/// kernels before 5.10, which do not tell.
const ENTRIES: u64 = 65_535;

impl Container {
    /// Granule and ranges that can be mapped with the groups that are in it now.
    pub(crate) fn mapper_info(&self) -> Result<MapperInfo> {
        let info = self.info()?;
        Ok(MapperInfo {
            granule: info.page_sizes.map_or(4096, |sizes| sizes.smallest()),
            ranges: info.iova_ranges,
            available: Some(info.mappings_available.map_or(ENTRIES, u64::from)),
            page_sizes: info.page_sizes,
        })
    }
}

impl Mapper for ContainerMapper {
    type Device = Group;

    const PROFILE: Profile = Profile::Type1;

    fn enter(&mut self, group: &Group, _with: Entering) -> Result<()> {
        group.set_container(&self.container)?;
        if self.groups == 0 {
            if let Err(error) = self.container.set_iommu(IommuModel::Type1V2) {
                let _ = group.unset_container();
                return Err(error);
            }
        }
        self.groups += 1;
        Ok(())
    }

    fn leave(&mut self, group: &Group) -> Result<()> {
        group.unset_container()?;
        self.groups -= 1;
        Ok(())
    }

    fn info(&self) -> Result<MapperInfo> {
        self.container.mapper_info()
    }

    #[allow(unsafe_code)]
    unsafe fn map(&mut self, iova: Span<Iova>, source: MapSource<'_>, prot: Prot) -> Result<()> {
        let MapSource::Address(address) = source else {
            return Err(KernelError::NoSource);
        };
        // SAFETY: the caller answers for the memory.
        unsafe { self.container.map_dma(iova, address, prot) }
    }

    fn unmap(&mut self, iova: Span<Iova>) -> Result<u64> {
        self.container.unmap_dma(iova)
    }

    fn set_tracking(&mut self, on: bool) -> Result<()> {
        if on {
            self.container.start_dirty_tracking()
        } else {
            self.container.stop_dirty_tracking()
        }
    }

    /// While some group leaves no trace, the kernel sets every bit.
    fn dirty(&mut self, iova: Span<Iova>, page: u64, bitmap: &mut [u64]) -> Result<()> {
        self.container.dirty_bitmap(iova, page, bitmap)
    }

    /// The kernel does not tell which groups leave a trace; those of real devices do not.
    fn is_blind(&self) -> bool {
        true
    }

    /// `mm->locked_vm`, or what iommufd counts in the place of type 1: opened as `/dev/iommu`, by user.
    #[cfg(feature = "linux")]
    fn account(&self) -> Option<Arc<Ledger>> {
        #[cfg(feature = "iommufd")]
        if let Ok(mode) = RlimitMode::of(self.container.as_fd()) {
            return Ledger::now(|limits| mode.counter(limits));
        }
        Ledger::now(|_| hostmem::Counter::MmLockedVm)
    }

    fn give_up_addresses(&mut self) -> Result<()> {
        self.container.invalidate_all_vaddrs().map(|_| ())
    }

    #[allow(unsafe_code)]
    unsafe fn take_over(
        &mut self,
        groups: &[Arc<Group>],
        mappings: &[(Span<Iova>, MapSource<'_>)],
    ) -> Result<()> {
        for (iova, source) in mappings {
            let MapSource::Address(address) = source else {
                return Err(KernelError::NoSource);
            };
            // SAFETY: the caller answers for the memory.
            unsafe { self.container.update_vaddr(*iova, *address) }?;
        }
        self.groups = groups.len();
        Ok(())
    }
}
