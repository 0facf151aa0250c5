//! The kernel's interfaces as a life uses them: how devices are opened, and which files the second owner
//! needs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use hostmem::Limits;
use ioas::Placement;
use ioas::iommufd::{BoundDevice, DevId, IoasId, Iommufd, Owner, Space, SpaceMapper};
use ioas::vfio::{Container, ContainerMapper, Device, Group};
use ioas::{Ioas, Kernel, KernelError, Mapper, Unsupported};

use super::super::successor::SuccessorError;
use crate::map::JobError;
use crate::map::edu;
use crate::map::kernel::{Opened, Used, attach, find, open_failed, open_group};
use crate::map::memory::Account;
use dmaspace::devices::{DeviceReport, DevicesReport, Places, Way};

/// An address space over an interface of the kernel.
pub(in super::super) type KernelSpace<K> = Ioas<Kernel<K>>;

/// Devices of the machine in an address space of the kernel.
pub(in super::super) struct Opening<K: Mapper> {
    pub(super) devices: Vec<Arc<Used>>,
    pub(super) space: KernelSpace<K>,
    pub(super) handed: Handed,
}

/// What another process needs of the kernel's to go on.
#[derive(Debug, Default)]
pub(in super::super) struct Handed {
    pub(in super::super) files: Vec<OwnedFd>,
    /// Numbers in them.
    pub(in super::super) numbers: Vec<u64>,
}

impl Handed {
    fn add(&mut self, file: BorrowedFd<'_>, shown: &DeviceReport) -> Result<(), JobError> {
        let failed = |source| {
            let path = "a file to be handed over".into();
            open_failed(shown, KernelError::Open { path, source })
        };
        self.files.push(file.try_clone_to_owned().map_err(failed)?);
        Ok(())
    }
}

/// The operations, and what is attached.
type Received<K> = (K, Vec<Arc<<K as Mapper>::Device>>);

/// An interface of the kernel.
pub(in super::super) trait Interface: Mapper + Send + Sized + 'static
where
    Self::Device: Send + Sync,
{
    /// As the command line names it.
    const NAME: &'static str;

    /// What its mappings are charged to.
    fn account() -> Result<Account, JobError>;

    /// Opens the devices, and lets each see an empty address space.
    fn open(addresses: &[String]) -> Result<Opening<Self>, JobError>;

    /// Why what this process maps cannot go to another.
    fn stays() -> Result<Option<&'static str>, JobError> {
        Ok(None)
    }

    /// The operations, and what is attached, from what another process has handed over.
    fn receive(handed: Handed) -> Result<Received<Self>, SuccessorError>;
}

/// What the machine shows of the devices, all of which have a driver here.
fn devices(addresses: &[String], way: Way) -> Result<Vec<DeviceReport>, JobError> {
    let machine = DevicesReport::read(&Places::default())?;
    let found = find(&machine, addresses, way)?;
    match found.iter().find(|shown| shown.id != edu::ID) {
        _ if found.is_empty() => Err(JobError::Input("a life takes a device".into())),
        None => Ok(found),
        Some(other) => Err(JobError::Input(format!(
            "{} is {}, which nobody here can have do DMA: a life takes QEMU's edu ({})",
            other.address,
            other.id,
            edu::ID
        ))),
    }
}

impl Interface for ContainerMapper {
    const NAME: &'static str = "vfio";

    fn account() -> Result<Account, JobError> {
        Account::of_process()
    }

    fn open(addresses: &[String]) -> Result<Opening<Self>, JobError> {
        let found = devices(addresses, Way::Type1)?;
        let container = Container::open().map_err(JobError::Registers)?;
        let mut handed = Handed::default();
        let first = found.first().cloned().unwrap_or_default();
        handed.add(container.as_fd(), &first)?;
        let mut space = Ioas::over_kernel(Kernel::new(Self::new(container), None));
        let mut groups: Vec<(Option<u32>, Arc<Group>)> = Vec::new();
        let mut devices = Vec::new();
        for shown in found {
            let known = groups.iter().find(|(number, _)| *number == shown.group);
            let group = match known {
                Some((_, group)) => Arc::clone(group),
                None => {
                    let group = open_group(&shown)?;
                    attach(&shown, || space.attach(Arc::clone(&group)))?;
                    handed.add(group.as_fd(), &shown)?;
                    groups.push((shown.group, Arc::clone(&group)));
                    group
                }
            };
            let device = group.device(&shown.address);
            let device = Opened::OfGroup(device.map_err(|source| open_failed(&shown, source))?);
            devices.push(Arc::new(Used { device, shown }));
        }
        Ok(Opening {
            devices,
            space,
            handed,
        })
    }

    fn receive(handed: Handed) -> Result<(Self, Vec<Arc<Group>>), SuccessorError> {
        let mut files = handed.files.into_iter();
        let container = files.next().ok_or(SuccessorError::Files { found: 0 })?;
        let mapper = Self::new(Container::from_fd(container)?);
        let groups = files.map(|group| Arc::new(Group::from_fd(group)));
        Ok((mapper, groups.collect()))
    }
}

impl Interface for SpaceMapper {
    const NAME: &'static str = "iommufd";

    fn account() -> Result<Account, JobError> {
        Account::of_user()
    }

    fn open(addresses: &[String]) -> Result<Opening<Self>, JobError> {
        let found = devices(addresses, Way::Iommufd)?;
        let first = found.first().cloned().unwrap_or_default();
        let failed = |source| open_failed(&first, source);
        let owner = Owner::new(Iommufd::open().map_err(failed)?);
        let mapper = Self::new(&owner).map_err(failed)?;
        let mut handed = Handed::default();
        handed.add(owner.as_fd(), &first)?;
        handed.numbers.push(mapper.id().0.into());
        let mut space = Ioas::over_kernel(Space::new(mapper, None));
        let mut devices = Vec::new();
        for shown in found {
            let cdev = shown.cdev.as_deref().unwrap_or("".as_ref());
            let bound = owner.open_device(cdev);
            let bound = Arc::new(bound.map_err(|source| open_failed(&shown, source))?);
            attach(&shown, || space.attach(Arc::clone(&bound)))?;
            handed.add(bound.device.as_fd(), &shown)?;
            handed.numbers.push(bound.id.0.into());
            let device = Opened::Bound(bound);
            devices.push(Arc::new(Used { device, shown }));
        }
        Ok(Opening {
            devices,
            space,
            handed,
        })
    }

    /// See `docs/semantics.md`, "iommufd".
    fn stays() -> Result<Option<&'static str>, JobError> {
        let privileged = Limits::read()?.privileged;
        Ok(privileged.then_some(
            "iommufd counts what a process without a limit maps as pinned by it for good",
        ))
    }

    fn receive(handed: Handed) -> Result<(Self, Vec<Arc<BoundDevice>>), SuccessorError> {
        let found = handed.files.len();
        let mut files = handed.files.into_iter();
        let mut numbers = handed.numbers.into_iter();
        let (Some(iommufd), Some(ioas)) = (files.next(), numbers.next()) else {
            return Err(SuccessorError::Files { found });
        };
        let owner = Owner::new(Iommufd::from_fd(iommufd));
        let devices = files.zip(numbers).map(|(device, id)| {
            let (device, id) = (Device::from_fd(device), DevId(id as u32));
            Arc::new(BoundDevice { device, id })
        });
        Ok((
            Self::existing(&owner, IoasId(ioas as u32)),
            devices.collect(),
        ))
    }
}

/// Tables for each node, and then on nodes of the caller's choice: what this interface does not do.
pub(super) fn place<K: Interface>(
    space: &mut KernelSpace<K>,
    node: iommu::NodeId,
) -> Result<(), Unsupported>
where
    K::Device: Send + Sync,
{
    space.set_placement(Placement::PerNode)?;
    let placed = space.set_placement(Placement::Near(node));
    // Devices that are there stay where they are.
    space.set_placement(Placement::Shared)?;
    placed
}
