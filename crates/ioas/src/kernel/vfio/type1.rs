//! Containers as a back end: [`Type1`].
//!
//! The first group brings the container's IOMMU, the last one takes it away with all mappings. An
//! open `/dev/iommu` ([`Container::from_fd`]) does as well: iommufd plays the container.
//!
//! Each container charges for itself: memory that a second one maps is charged twice.

use std::sync::Arc;

use iopt::Prot;
use runs::{Iova, Span};

use super::container::{Container, IommuModel};
use super::group::Group;
use crate::errno::Profile;
use crate::kernel::{Entering, Kernel, KernelError, Mapper, MapperInfo, Result, Source};

/// The back end over VFIO's type 1: one container that is given ([`Kernel::new`]), or containers that are
/// opened as they are needed ([`Type1::open`]), which do for [`Placement::PerNode`](crate::Placement::PerNode).
///
/// Containers that iommufd plays do as well, opened as for [`Container::from_fd`].
///
/// ```no_run
/// use std::sync::Arc;
///
/// use ioas::{Endpoint, Ioas, Placement, vfio::{Group, Type1}};
/// use iommu::NodeId;
///
/// let space = Ioas::over_kernel(Type1::open(None));
/// space.set_placement(Placement::PerNode)?;
/// for (number, node) in [(17, 0), (42, 1)] {
///     space.attach(Endpoint::from(Arc::new(Group::open(number)?)).near(NodeId(node)))?;
/// }
/// assert_eq!(space.places().len(), 2);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub type Type1 = Kernel<ContainerMapper>;

impl Type1 {
    /// Containers of type 1 itself, opened as they are needed; see [`Kernel::new`] for `granule`.
    pub fn open(granule: Option<u64>) -> Self {
        Self::opening(|| Container::open().map(ContainerMapper::new), granule)
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
    /// What can be mapped with the groups that are in it now.
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
    unsafe fn map(&mut self, iova: Span<Iova>, source: Source<'_>, prot: Prot) -> Result<()> {
        let Source::Address(address) = source else {
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

    fn give_up_addresses(&mut self) -> Result<()> {
        self.container.invalidate_all_vaddrs().map(|_| ())
    }

    #[allow(unsafe_code)]
    unsafe fn take_over(
        &mut self,
        groups: &[Arc<Group>],
        mappings: &[(Span<Iova>, Source<'_>)],
    ) -> Result<()> {
        for (iova, source) in mappings {
            let Source::Address(address) = source else {
                return Err(KernelError::NoSource);
            };
            // SAFETY: the caller answers for the memory.
            unsafe { self.container.update_vaddr(*iova, *address) }?;
        }
        self.groups = groups.len();
        Ok(())
    }
}
