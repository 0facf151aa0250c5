//! Whose mappings an address space has: tables of ours, an iommufd's, or a container's.
//!
//! What all of them can do is done by [`over!`] in the words of `ioas`; what is refused by one has a
//! sentence here that names it.

use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dmaspace::ioas::iommufd::{BoundDevice, DevId, RlimitMode, SpaceMapper};
use dmaspace::ioas::vfio::{ContainerMapper, Device, Group};
use dmaspace::ioas::{CloseError, DetachError, HostTables, Ioas, Kernel, Mapper, Own};
use dmaspace::iommu::DeviceId;

use crate::memory::Counted;
use crate::status::{Failure, Result, Status};
use crate::unit::Callbacks;

/// An address space over either of them.
#[derive(Debug)]
pub(crate) enum Kind {
    Own(OverTables),
    Iommufd(OverKernel<SpaceMapper>),
    Type1(OverKernel<ContainerMapper>),
}

/// Does the same over any of them: `$space` is the `Ioas`.
macro_rules! over {
    ($kind:expr, $space:ident => $work:expr) => {
        match $kind {
            $crate::kind::Kind::Own(own) => {
                let $space = &mut own.space;
                $work
            }
            $crate::kind::Kind::Iommufd(kernel) => {
                let $space = &mut kernel.space;
                $work
            }
            $crate::kind::Kind::Type1(kernel) => {
                let $space = &mut kernel.space;
                $work
            }
        }
    };
}
pub(crate) use over;

/// Tables of ours, and the caller's unit that walks them.
#[derive(Debug)]
pub(crate) struct OverTables {
    pub(crate) space: Ioas<Own<Arc<HostTables>>>,
    pub(crate) unit: Arc<Callbacks>,
    pub(crate) tables: Arc<HostTables>,
}

/// Mappings of the kernel, and the caller's devices or groups, by number.
#[derive(Debug)]
pub(crate) struct OverKernel<K: Mapper> {
    pub(crate) space: Ioas<Kernel<K>>,
    pub(crate) counted: RlimitMode,
    devices: Vec<(u32, Arc<K::Device>)>,
}

impl<K: Mapper> OverKernel<K> {
    /// `granule`: see [`Kernel::new`], 0 for none.
    pub(crate) fn new(mapper: K, granule: u64, counted: RlimitMode) -> Self {
        let granule = (granule > 0).then_some(granule);
        Self {
            space: Ioas::over_kernel(Kernel::new(mapper, granule)),
            counted,
            devices: Vec::new(),
        }
    }

    fn attach(&mut self, number: u32, device: K::Device) -> Result<()> {
        if self.devices.iter().any(|(known, _)| *known == number) {
            let message = format!("{number} is attached to this address space already");
            return Err(Failure::new(Status::Device, message));
        }
        let device = Arc::new(device);
        self.space.attach(Arc::clone(&device))?;
        self.devices.push((number, device));
        Ok(())
    }

    fn detach(&mut self, number: u32) -> Result<()> {
        let mut known = self.devices.iter();
        let device = known.find(|(known, _)| *known == number);
        let (_, device) = device.ok_or(DetachError::Unknown)?;
        self.space.detach(device)?;
        self.devices.retain(|(known, _)| *known != number);
        Ok(())
    }
}

impl Kind {
    /// To what memory is charged that it maps.
    pub(crate) const fn counted(&self) -> Counted {
        match self {
            Self::Own(_) => Counted::Here,
            Self::Iommufd(kernel) => Counted::ByKernel(kernel.counted),
            Self::Type1(kernel) => Counted::ByKernel(kernel.counted),
        }
    }

    /// The tables of ours; `what` an address space of the kernel does not do.
    pub(crate) fn own(&mut self, what: &str) -> Result<&mut OverTables> {
        match self {
            Self::Own(own) => Ok(own),
            kernel => {
                let name = over!(kernel, space => space.capabilities().backend);
                let message = format!("{name} {what}");
                Err(Failure::new(Status::Unsupported, message))
            }
        }
    }

    /// Attaches the device or group that `file` is open for.
    pub(crate) fn attach_file(&mut self, number: u32, file: OwnedFd) -> Result<()> {
        match self {
            Self::Own(_) => {
                let message = "a unit of the caller's knows devices by their number alone";
                Err(Failure::new(Status::Unsupported, message))
            }
            Self::Iommufd(kernel) => {
                let (device, id) = (Device::from_fd(file), DevId(number));
                kernel.attach(number, BoundDevice { device, id })
            }
            Self::Type1(kernel) => kernel.attach(number, Group::from_fd(file)),
        }
    }

    pub(crate) fn detach(&mut self, number: u32) -> Result<()> {
        match self {
            Self::Own(own) => Ok(own.space.detach(DeviceId(number))?),
            Self::Iommufd(kernel) => kernel.detach(number),
            Self::Type1(kernel) => kernel.detach(number),
        }
    }

    /// Learns again what can be mapped; tables of ours know it.
    pub(crate) fn refresh(&mut self) -> Result<()> {
        match self {
            Self::Own(_) => Ok(()),
            Self::Iommufd(kernel) => Ok(kernel.space.refresh()?),
            Self::Type1(kernel) => Ok(kernel.space.refresh()?),
        }
    }

    pub(crate) fn devices(&self) -> usize {
        match self {
            Self::Own(own) => own.space.devices().count(),
            Self::Iommufd(kernel) => kernel.devices.len(),
            Self::Type1(kernel) => kernel.devices.len(),
        }
    }

    /// Mappings of the kernel's, and the bytes that it has charged for them.
    pub(crate) fn mappings(&self) -> (u64, u64) {
        fn of<K: Mapper>(kernel: &OverKernel<K>) -> (u64, u64) {
            let kernel = kernel.space.backend();
            (kernel.pieces().count() as u64, kernel.charged())
        }
        match self {
            Self::Own(_) => (0, 0),
            Self::Iommufd(kernel) => of(kernel),
            Self::Type1(kernel) => of(kernel),
        }
    }

    /// Ends it: what cannot be given back is lost on purpose.
    pub(crate) fn close(self) -> std::result::Result<(), CloseError> {
        match self {
            Self::Own(own) => {
                let closed = own.space.close();
                if closed.is_err() {
                    // A device may still walk what lies there.
                    mem::forget(own.tables);
                }
                closed
            }
            Self::Iommufd(kernel) => kernel.space.close(),
            Self::Type1(kernel) => kernel.space.close(),
        }
    }
}
