//! Devices of the machine in an empty address space of one of the kernel's interfaces, and how they copy.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use dmaspace::devices::{DeviceReport, DevicesReport, Places, Way};
use hostmem::Limits;
use ioas::iommufd::{Iommufd, Owner, Space, SpaceMapper};
use ioas::vfio::{Container, ContainerMapper, Group, Type1};
use ioas::{Ioas, KernelError};
use scenario::{Copies, Handed, Play};

use crate::map::JobError;
use crate::map::edu::{self, Edu};
use crate::map::kernel::{Opened, Used, attach, find, open_failed, open_group};
use crate::map::memory::Account;
use crate::map::sampled::Copier as _;
use crate::sentence;

/// Devices of the machine in an address space of the kernel.
pub(super) struct Opening {
    pub(super) devices: Vec<Arc<Used>>,
    pub(super) space: Ioas,
    pub(super) handed: Handed,
    /// What mappings are charged to.
    pub(super) account: Account,
    /// Why what this process maps cannot go to another; see `docs/semantics.md`, "iommufd".
    pub(super) stays: Option<&'static str>,
}

impl Opening {
    /// How each device copies.
    pub(super) fn copies(&self) -> Vec<Copies> {
        let copies = |(number, used): (usize, &Arc<Used>)| -> Copies {
            let used = Arc::clone(used);
            Box::new(move |memory| -> Play {
                Box::new(move |scene| {
                    let said = |error: JobError| sentence(&error);
                    let mut edu = Edu::new(used.device()).map_err(said)?;
                    memory.play(scene, number, &mut |write, iova, go_on| {
                        let done = match write {
                            true => edu.write(iova, go_on),
                            false => edu.read(iova, go_on),
                        };
                        done.map_err(said)
                    })
                })
            })
        };
        self.devices.iter().enumerate().map(copies).collect()
    }
}

fn hand(handed: &mut Handed, file: BorrowedFd<'_>, shown: &DeviceReport) -> Result<(), JobError> {
    let failed = |source| {
        let path = "a file to be handed over".into();
        open_failed(shown, KernelError::Open { path, source })
    };
    handed
        .files
        .push(file.try_clone_to_owned().map_err(failed)?);
    Ok(())
}

/// What the machine shows of the devices, all of which have a driver here.
fn devices(addresses: &[String], way: Way) -> Result<Vec<DeviceReport>, JobError> {
    let machine = DevicesReport::read(&Places::default())?;
    let found = find(&machine, addresses, way)?;
    match found.iter().find(|shown| shown.id != edu::ID) {
        _ if found.is_empty() => Err(JobError::Input("this back end requires --device".into())),
        None => Ok(found),
        Some(other) => Err(JobError::Input(format!(
            "{} is {}, which this program cannot drive: `life` requires QEMU's edu ({})",
            other.address,
            other.id,
            edu::ID
        ))),
    }
}

/// Opens the devices, by VFIO's type 1 or by iommufd, and lets each see an empty address space.
pub(super) fn open(type1: bool, addresses: &[String]) -> Result<Opening, JobError> {
    match type1 {
        true => open_vfio(devices(addresses, Way::Type1)?),
        false => open_iommufd(devices(addresses, Way::Iommufd)?),
    }
}

fn open_vfio(found: Vec<DeviceReport>) -> Result<Opening, JobError> {
    let container = Container::open().map_err(JobError::Registers)?;
    let mut handed = Handed {
        name: "vfio",
        ..Handed::default()
    };
    let first = found.first().cloned().unwrap_or_default();
    hand(&mut handed, container.as_fd(), &first)?;
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
                hand(&mut handed, group.as_fd(), &shown)?;
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
        account: Account::of_process()?,
        stays: None,
    })
}

fn open_iommufd(found: Vec<DeviceReport>) -> Result<Opening, JobError> {
    let first = found.first().cloned().unwrap_or_default();
    let failed = |source| open_failed(&first, source);
    let owner = Owner::new(Iommufd::open().map_err(failed)?);
    let mapper = SpaceMapper::new(&owner).map_err(failed)?;
    let mut handed = Handed {
        name: "iommufd",
        ..Handed::default()
    };
    hand(&mut handed, owner.as_fd(), &first)?;
    handed.numbers.push(mapper.id().0.into());
    let space = Ioas::over_kernel(Space::new(mapper, None));
    let mut devices = Vec::new();
    for shown in found {
        let cdev = shown.cdev.as_deref().unwrap_or("".as_ref());
        let bound = owner.open_device(cdev);
        let bound = Arc::new(bound.map_err(|source| open_failed(&shown, source))?);
        attach(&shown, || space.attach(Arc::clone(&bound)))?;
        hand(&mut handed, bound.device.as_fd(), &shown)?;
        handed.numbers.push(bound.id.0.into());
        let device = Opened::Bound(bound);
        devices.push(Arc::new(Used { device, shown }));
    }
    let stays = "iommufd counts what a process without a limit maps as pinned by it for good";
    Ok(Opening {
        devices,
        space,
        handed,
        account: Account::of_user()?,
        stays: Limits::read()?.privileged.then_some(stays),
    })
}
