//! A device of VFIO with an address space of the kernel's, by each of its three interfaces.
//!
//! The kernel wants memory to stay where it is for as long as it is mapped. A [`Space`] keeps all
//! memory that was ever mapped in it, and closes its descriptors first: that is what makes
//! [`Space::map`] safe, and the only `unsafe` of this program lies here.

use std::{any::Any, fs::OpenOptions, sync::Arc};

use hostmem::Mapping;
use ioas::{
    iommufd::{IoasId, Iommufd, KernelError},
    vfio::{Container, Device, Group, IommuModel, PageTable, Registers},
};
use iopt::Prot;
use runs::Span;

use crate::pci;

/// An interface of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A container of VFIO's type 1, and the device's group.
    Type1,
    /// The same calls, answered by iommufd.
    Compatibility,
    /// An address space of iommufd, and the device's file of its own.
    Iommufd,
}

/// An open device, and what it sees as memory.
pub(crate) struct Space {
    // Dropped in this order.
    device: Device,
    kernel: Kernel,
    kept: Vec<Arc<dyn Any>>,
}

enum Kernel {
    Container { _group: Group, container: Container },
    Iommufd { iommufd: Iommufd, ioas: IoasId },
}

impl Space {
    /// Opens the device with an empty address space; gives it to `vfio-pci` first if need be.
    pub(crate) fn open(kind: Kind, device: pci::Device) -> anyhow::Result<Self> {
        device.bind_to_vfio()?;
        let (device, kernel) = match kind {
            Kind::Type1 => in_container(Container::open()?, device)?,
            Kind::Compatibility => {
                let iommufd = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(Iommufd::PATH)?;
                in_container(Container::from_fd(iommufd.into())?, device)?
            }
            Kind::Iommufd => {
                let iommufd = Iommufd::open()?;
                let ioas = iommufd.alloc_ioas()?;
                let (device, _) = Device::open_cdev(&device.cdev()?, &iommufd)?;
                device.attach(PageTable::Ioas(ioas))?;
                (device, Kernel::Iommufd { iommufd, ioas })
            }
        };
        Ok(Self {
            device,
            kernel,
            kept: Vec::new(),
        })
    }

    /// The device.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The file and the address space, of iommufd.
    pub(crate) fn iommufd(&self) -> Option<(&Iommufd, IoasId)> {
        match &self.kernel {
            Kernel::Iommufd { iommufd, ioas } => Some((iommufd, *ioas)),
            Kernel::Container { .. } => None,
        }
    }

    /// Maps all of `memory` at `iova`.
    pub(crate) fn map(
        &mut self,
        iova: u64,
        memory: &Arc<Mapping>,
        prot: Prot,
    ) -> Result<(), KernelError> {
        let there = Span::new(memory.address(), memory.len());
        self.map_kept(iova, there, memory.clone(), prot)
    }

    /// Maps the registers of another device at `iova`.
    pub(crate) fn map_registers(
        &mut self,
        iova: u64,
        registers: &Arc<Registers>,
    ) -> Result<(), KernelError> {
        let there = Span::new(registers.address(), registers.len());
        self.map_kept(iova, there, registers.clone(), Prot::RW)
    }

    /// Maps the addresses `there`, which `owner` owns.
    fn map_kept(
        &mut self,
        iova: u64,
        there: Span,
        owner: Arc<dyn Any>,
        prot: Prot,
    ) -> Result<(), KernelError> {
        // Before it is mapped: until all is closed.
        self.kept.push(owner);
        match &self.kernel {
            // SAFETY: `kept` holds the owner until the container, its group and its device are
            // closed, and neither a mapping nor registers move or change meanwhile. Both are
            // accessed by atomic cells or volatile accesses only, whoever else has them.
            Kernel::Container { container, .. } => unsafe {
                container.map_dma(Span::new(iova, there.len), there.start, prot)
            },
            // SAFETY: as above; nothing is copied out of this address space.
            Kernel::Iommufd { iommufd, ioas } => unsafe {
                iommufd.map(*ioas, Some(iova), there, prot).map(|_| ())
            },
        }
    }

    /// Unmaps; returns the bytes.
    pub(crate) fn unmap(&self, iova: Span) -> Result<u64, KernelError> {
        match &self.kernel {
            Kernel::Container { container, .. } => container.unmap_dma(iova),
            Kernel::Iommufd { iommufd, ioas } => iommufd.unmap(*ioas, iova),
        }
    }
}

fn in_container(container: Container, device: pci::Device) -> anyhow::Result<(Device, Kernel)> {
    let group = Group::open(device.group()?)?;
    let status = group.status()?;
    anyhow::ensure!(
        status.viable && !status.in_container,
        "the group is {status:?}"
    );
    group.set_container(&container)?;
    container.set_iommu(IommuModel::Type1V2)?;
    let device = group.device(device.0)?;
    let kernel = Kernel::Container {
        _group: group,
        container,
    };
    Ok((device, kernel))
}
