//! A device of VFIO in an address space of the library, by each of the kernel's three interfaces.

use std::{
    fs::OpenOptions,
    ops::Deref,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use anyhow::{Context as _, ensure};
use hostmem::Mapping;
use ioas::{
    HostMemory, Ioas, KernelError, Ledger, MapError, Mapper, Memory, UnmapError,
    iommufd::{self, BoundDevice, SpaceMapper},
    vfio::{self, Container, ContainerMapper, Group},
};
use iopt::Prot;
use runs::{Iova, Span};

use crate::{pci, semantics::table::Column};

/// An interface of the kernel, and what is opened in which order.
pub(crate) trait Interface {
    /// The operations of one address space.
    type Mapper: Mapper;
    /// File by which devices are opened.
    type File;

    /// Which of the table of semantics it is.
    const COLUMN: Column;

    fn file() -> anyhow::Result<Self::File>;

    /// A new address space.
    fn mapper(file: &Self::File) -> anyhow::Result<Self::Mapper>;

    /// The container of an address space, if it is one.
    fn container(_: &Self::Mapper) -> anyhow::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Group or device to attach.
    fn attachable(file: &Self::File, device: pci::Device) -> anyhow::Result<DeviceOf<Self>>;

    /// The device itself, once that is attached.
    fn device(attached: &Arc<DeviceOf<Self>>, device: pci::Device) -> anyhow::Result<Opened>;
}

/// A group, or a device.
pub(crate) type DeviceOf<I> = <<I as Interface>::Mapper as Mapper>::Device;

/// An open device.
pub(crate) enum Opened {
    /// A device of a group.
    OfGroup(vfio::VfioDevice),
    /// A device with its own file.
    Bound(Arc<BoundDevice>),
}

impl Deref for Opened {
    type Target = vfio::VfioDevice;

    fn deref(&self) -> &vfio::VfioDevice {
        match self {
            Self::OfGroup(device) => device,
            Self::Bound(bound) => &bound.device,
        }
    }
}

/// A container of VFIO's type 1, or one that iommufd plays, and the device's group.
pub(crate) struct InContainer<const COMPATIBILITY: bool>;

/// A container of VFIO's type 1.
pub(crate) type Type1 = InContainer<false>;
/// The same calls, answered by iommufd: the compatibility layer.
pub(crate) type Compatibility = InContainer<true>;

impl<const COMPATIBILITY: bool> InContainer<COMPATIBILITY> {
    /// A new container.
    pub(crate) fn container_mapper() -> Result<ContainerMapper, KernelError> {
        let container = if COMPATIBILITY {
            let path = iommufd::Iommufd::PATH;
            let file = OpenOptions::new().read(true).write(true).open(path);
            let file = file.map_err(|cause| KernelError::Open {
                path: path.into(),
                cause,
            })?;
            Container::from_fd(file.into())?
        } else {
            Container::open()?
        };
        Ok(ContainerMapper::new(container))
    }
}

impl<const COMPATIBILITY: bool> Interface for InContainer<COMPATIBILITY> {
    type Mapper = ContainerMapper;
    type File = ();

    const COLUMN: Column = if COMPATIBILITY {
        Column::Compatibility
    } else {
        Column::Type1
    };

    fn file() -> anyhow::Result<()> {
        Ok(())
    }

    fn mapper((): &()) -> anyhow::Result<ContainerMapper> {
        Ok(Self::container_mapper()?)
    }

    fn container(mapper: &ContainerMapper) -> anyhow::Result<Option<OwnedFd>> {
        Ok(Some(mapper.container().as_fd().try_clone_to_owned()?))
    }

    fn attachable((): &(), device: pci::Device) -> anyhow::Result<Group> {
        let group = Group::open(device.group()?)?;
        let status = group.status()?;
        ensure!(
            status.viable && !status.in_container,
            "the group is {status:?}"
        );
        Ok(group)
    }

    fn device(group: &Arc<Group>, device: pci::Device) -> anyhow::Result<Opened> {
        Ok(Opened::OfGroup(group.device(device.0)?))
    }
}

/// An address space of iommufd, and the device's file of its own.
pub(crate) struct Iommufd;

impl Interface for Iommufd {
    type Mapper = SpaceMapper;
    type File = iommufd::Iommufd;

    const COLUMN: Column = Column::Iommufd;

    fn file() -> anyhow::Result<iommufd::Iommufd> {
        Ok(iommufd::Iommufd::open()?)
    }

    fn mapper(owner: &iommufd::Iommufd) -> anyhow::Result<SpaceMapper> {
        Ok(SpaceMapper::new(owner)?)
    }

    fn attachable(owner: &iommufd::Iommufd, device: pci::Device) -> anyhow::Result<BoundDevice> {
        Ok(owner.open_device(&device.cdev()?)?)
    }

    fn device(bound: &Arc<BoundDevice>, _: pci::Device) -> anyhow::Result<Opened> {
        Ok(Opened::Bound(bound.clone()))
    }
}

/// A device, and what it sees as memory.
pub(crate) struct Space<I: Interface> {
    // Dropped in this order: a group leaves only when its devices are closed.
    plugged: Option<Plugged<I>>,
    pub(crate) ioas: Arc<Ioas>,
    pub(crate) ledger: Arc<Ledger>,
    /// The container, for another process.
    pub(crate) container: Option<OwnedFd>,
    /// The number of the address space of iommufd.
    pub(crate) number: u32,
    file: I::File,
}

struct Plugged<I: Interface> {
    // Dropped in this order.
    device: Opened,
    attached: Arc<DeviceOf<I>>,
}

impl<I: Interface> Space<I> {
    /// Opens the device with an empty address space and no limit of ours; gives it to `vfio-pci`
    /// first if need be.
    pub(crate) fn open(device: pci::Device) -> anyhow::Result<Self> {
        Self::with_ledger(device, Ledger::unlimited())
    }

    /// The same, with an account of ours.
    pub(crate) fn with_ledger(device: pci::Device, ledger: Arc<Ledger>) -> anyhow::Result<Self> {
        Self::new(I::file()?, None, device, ledger)
    }

    /// The same of a file that is open, in pieces that end at multiples of `granule` bytes.
    pub(crate) fn new(
        file: I::File,
        granule: Option<u64>,
        device: pci::Device,
        ledger: Arc<Ledger>,
    ) -> anyhow::Result<Self> {
        let mapper = I::mapper(&file)?;
        let mut space = Self {
            plugged: None,
            container: I::container(&mapper)?,
            number: mapper.number(),
            ioas: Arc::new(Ioas::options().granule(granule).over_mapper(mapper)?),
            ledger,
            file,
        };
        space.plug(device)?;
        Ok(space)
    }

    /// Attaches the device and opens it.
    pub(crate) fn plug(&mut self, device: pci::Device) -> anyhow::Result<()> {
        let attached = self.attachable(device)?;
        self.ioas.attach(attached.clone())?;
        let device = I::device(&attached, device)?;
        // A container that iommufd plays learns only now what it can do.
        self.ioas.refresh()?;
        self.plugged = Some(Plugged { device, attached });
        Ok(())
    }

    /// Group or device to attach here.
    pub(crate) fn attachable(&self, device: pci::Device) -> anyhow::Result<Arc<DeviceOf<I>>> {
        device.bind_to_vfio()?;
        Ok(Arc::new(I::attachable(&self.file, device)?))
    }

    /// Closes the device and detaches it.
    pub(crate) fn unplug(&mut self) -> anyhow::Result<()> {
        let Plugged { device, attached } = self.plugged.take().context("no device")?;
        drop(device);
        Ok(self.ioas.detach(&attached)?)
    }

    /// The device.
    pub(crate) fn device(&self) -> anyhow::Result<&vfio::VfioDevice> {
        let plugged = self.plugged.as_ref().context("no device")?;
        Ok(&plugged.device)
    }

    /// The attached group or device.
    pub(crate) fn attached(&self) -> anyhow::Result<&Arc<DeviceOf<I>>> {
        let plugged = self.plugged.as_ref().context("no device")?;
        Ok(&plugged.attached)
    }

    /// File by which devices are opened.
    pub(crate) const fn file(&self) -> &I::File {
        &self.file
    }

    /// Maps all of `memory` at `iova`.
    pub(crate) fn map(
        &mut self,
        iova: u64,
        memory: &Arc<Memory>,
        prot: Prot,
    ) -> Result<(), MapError> {
        let whole = Span::new(0, memory.object().len());
        self.ioas.map(iova, memory, whole, prot)
    }

    /// Maps all of a mapping at `iova`, as a memory of its own.
    pub(crate) fn map_host(
        &mut self,
        iova: u64,
        mapping: &Arc<Mapping>,
        prot: Prot,
    ) -> anyhow::Result<()> {
        let memory = host_memory(mapping, &self.ledger)?;
        Ok(self.map(iova, &memory, prot)?)
    }

    /// Unmaps; returns the bytes.
    pub(crate) fn unmap(&mut self, iova: Span<Iova>) -> Result<u64, UnmapError> {
        Ok(self.ioas.unmap(iova)?.bytes)
    }
}

/// A mapping as memory that kernels pin.
pub(crate) fn host_memory(
    mapping: &Arc<Mapping>,
    ledger: &Arc<Ledger>,
) -> anyhow::Result<Arc<Memory>> {
    let object = HostMemory::new(mapping.clone());
    Ok(Memory::new(Arc::new(object), ledger))
}
