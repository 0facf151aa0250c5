//! The kernel's interfaces as a life uses them: how devices are opened, and which files the second owner
//! needs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use hostmem::Limits;
use ioas::Placement;
use ioas::iommufd::{BoundDevice, DevId, IoasId, Iommufd, Owner, Space, SpaceMapper};
use ioas::vfio::{Container, ContainerMapper, Device, Group, Type1};
use ioas::{Endpoint, Ioas, KernelError, Unsupported};

use super::super::successor::SuccessorError;
use crate::map::JobError;
use crate::map::edu;
use crate::map::kernel::{Opened, Used, attach, find, open_failed, open_group};
use crate::map::memory::Account;
use dmaspace::devices::{DeviceReport, DevicesReport, Places, Way};

/// Devices of the machine in an address space of the kernel.
pub(in super::super) struct Opening {
    pub(super) devices: Vec<Arc<Used>>,
    pub(super) space: Ioas,
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

/// An interface of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Interface {
    Vfio,
    Iommufd,
}

impl Interface {
    /// As the command line names it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Vfio => "vfio",
            Self::Iommufd => "iommufd",
        }
    }

    /// What its mappings are charged to.
    pub(super) fn account(self) -> Result<Account, JobError> {
        match self {
            Self::Vfio => Account::of_process(),
            Self::Iommufd => Account::of_user(),
        }
    }

    /// Opens the devices, and lets each see an empty address space.
    pub(super) fn open(self, addresses: &[String]) -> Result<Opening, JobError> {
        match self {
            Self::Vfio => open_vfio(addresses),
            Self::Iommufd => open_iommufd(addresses),
        }
    }

    /// Why what this process maps cannot go to another; see `docs/semantics.md`, "iommufd".
    pub(super) fn stays(self) -> Result<Option<&'static str>, JobError> {
        let privileged = self == Self::Iommufd && Limits::read()?.privileged;
        Ok(privileged.then_some(
            "iommufd counts what a process without a limit maps as pinned by it for good",
        ))
    }

    /// An empty address space, and what is to be attached, from what another process has handed over.
    pub(super) fn receive(self, handed: Handed) -> Result<(Ioas, Vec<Endpoint>), SuccessorError> {
        let found = handed.files.len();
        let mut files = handed.files.into_iter();
        let first = files.next().ok_or(SuccessorError::Files { found })?;
        match self {
            Self::Vfio => {
                let mapper = ContainerMapper::new(Container::from_fd(first)?);
                let groups = files.map(|group| Arc::new(Group::from_fd(group)).into());
                Ok((
                    Ioas::over_kernel(Type1::new(mapper, None)),
                    groups.collect(),
                ))
            }
            Self::Iommufd => {
                let mut numbers = handed.numbers.into_iter();
                let ioas = numbers.next().ok_or(SuccessorError::Files { found })?;
                let owner = Owner::new(Iommufd::from_fd(first));
                let mapper = SpaceMapper::existing(&owner, IoasId(ioas as u32));
                let devices = files.zip(numbers).map(|(device, id)| {
                    let (device, id) = (Device::from_fd(device), DevId(id as u32));
                    Arc::new(BoundDevice { device, id }).into()
                });
                Ok((
                    Ioas::over_kernel(Space::new(mapper, None)),
                    devices.collect(),
                ))
            }
        }
    }
}

/// What the machine shows of the devices, all of which have a driver here.
fn devices(addresses: &[String], way: Way) -> Result<Vec<DeviceReport>, JobError> {
    let machine = DevicesReport::read(&Places::default())?;
    let found = find(&machine, addresses, way)?;
    match found.iter().find(|shown| shown.id != edu::ID) {
        _ if found.is_empty() => Err(JobError::Input("a life takes a device".into())),
        None => Ok(found),
        Some(other) => Err(JobError::Input(format!(
            "{} is {}, which this program cannot drive: a life takes QEMU's edu ({})",
            other.address,
            other.id,
            edu::ID
        ))),
    }
}

fn open_vfio(addresses: &[String]) -> Result<Opening, JobError> {
    let found = devices(addresses, Way::Type1)?;
    let container = Container::open().map_err(JobError::Registers)?;
    let mut handed = Handed::default();
    let first = found.first().cloned().unwrap_or_default();
    handed.add(container.as_fd(), &first)?;
    let space = Ioas::over_kernel(Type1::new(ContainerMapper::new(container), None));
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

fn open_iommufd(addresses: &[String]) -> Result<Opening, JobError> {
    let found = devices(addresses, Way::Iommufd)?;
    let first = found.first().cloned().unwrap_or_default();
    let failed = |source| open_failed(&first, source);
    let owner = Owner::new(Iommufd::open().map_err(failed)?);
    let mapper = SpaceMapper::new(&owner).map_err(failed)?;
    let mut handed = Handed::default();
    handed.add(owner.as_fd(), &first)?;
    handed.numbers.push(mapper.id().0.into());
    let space = Ioas::over_kernel(Space::new(mapper, None));
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

/// Tables for each node, and then on nodes of the caller's choice: what this interface does not do.
pub(super) fn place(space: &Ioas, node: iommu::NodeId) -> Result<(), Unsupported> {
    space.set_placement(Placement::PerNode)?;
    let placed = space.set_placement(Placement::Near(node));
    // Devices that are there stay where they are.
    space.set_placement(Placement::Shared)?;
    placed
}
