//! An address space of iommufd as a back end: [`SpaceMapper`].
//!
//! Devices that can tell what they write to get page tables made for that, as many as there are kinds
//! of units; the others share those that the kernel makes, or with [`PerNode`](crate::Placement::PerNode) one that is made
//! for their node: see [tables](super::tables) for the rule. Memory files are mapped as files, anything
//! else by its address. What one of the address spaces of an [`Iommufd`] maps already is copied:
//! pinned and charged once, for as long as the first mapping is there.

use core::any::Any;
use core::marker::PhantomData;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::vec::Vec;

use iopt::Prot;
use runs::{Iova, Span};

use super::tables::Tables;
use super::{Clear, DevId, IoasId, Iommufd};
use crate::errno::Profile;
use crate::kernel::vfio::{PageTable, VfioDevice};
use crate::kernel::{Entering, KernelError, MapSource, Mapper, MapperInfo, Result, Shares};
#[cfg(feature = "linux")]
use crate::memory::ledger::Ledger;
use crate::space::Ioas;
use crate::space::endpoint::EndpointId;
use crate::space::open::{IoasOptions, OpenError, OpenSpace};
use crate::space::placement::Place;

impl Iommufd {
    /// Opens the PCI device `address` (`0000:01:00.0`), which `vfio-pci` has, and binds it.
    ///
    /// # Errors
    ///
    /// [`KernelError::NotBound`] while another driver has it; [`KernelError::Open`],
    /// [`KernelError::Refused`].
    pub fn device(&self, address: &str) -> Result<Arc<BoundDevice>> {
        let entries = PathBuf::from(PCI_DEVICES).join(address).join("vfio-dev");
        let node = fs::read_dir(entries)
            .ok()
            .and_then(|mut names| names.next()?.ok());
        let node = node.ok_or_else(|| KernelError::NotBound {
            device: address.into(),
        })?;
        let path = Path::new(VFIO_DEVICES).join(node.file_name());
        self.open_device(&path).map(Arc::new)
    }

    /// Opens a device's node, `/dev/vfio/devices/…`, and binds it; see [`VfioDevice::open_cdev`].
    ///
    /// # Errors
    ///
    /// [`KernelError::Open`], [`KernelError::Refused`].
    pub fn open_device(&self, path: &Path) -> Result<BoundDevice> {
        let (device, id) = VfioDevice::open_cdev(path, self)?;
        Ok(BoundDevice { device, id })
    }

    /// Binds a device whose node is open already; see [`VfioDevice::bind_cdev`].
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn bind_device(&self, node: OwnedFd) -> Result<BoundDevice> {
        let (device, id) = VfioDevice::bind_cdev(node, self)?;
        Ok(BoundDevice { device, id })
    }
}

impl OpenSpace for Iommufd {
    /// A new IOAS of the kernel.
    fn open_space(&self, options: IoasOptions) -> core::result::Result<Ioas, OpenError> {
        #[cfg(feature = "linux")]
        let options = options.ledger_or(|| self.ledger())?;
        options.over_mapper(SpaceMapper::new(self)?)
    }
}

/// Devices by their address, as `vfio` has them, and their nodes.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";
const VFIO_DEVICES: &str = "/dev/vfio/devices";

/// A device that is bound to an iommufd.
#[derive(Debug)]
pub struct BoundDevice {
    /// The device.
    pub device: VfioDevice,
    /// Its number there.
    pub id: DevId,
}

/// A device that is bound to an iommufd, and how it is attached: by the calls of the subsystem that
/// it is of. Here it is VFIO ([`BoundDevice`]); the kernel has others.
pub trait Attachable {
    /// Its number.
    fn id(&self) -> DevId;

    /// Attaches it, or changes what it is attached to.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`]; `EINVAL` for a page table of another kind of unit.
    fn attach(&self, to: PageTable) -> core::result::Result<(), KernelError>;

    /// Detaches it: from now on it reaches no memory.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    fn detach(&self) -> core::result::Result<(), KernelError>;
}

impl Attachable for BoundDevice {
    fn id(&self) -> DevId {
        self.id
    }

    fn attach(&self, to: PageTable) -> Result<()> {
        self.device.attach(to).map(|_| ())
    }

    fn detach(&self) -> Result<()> {
        self.device.detach()
    }
}

/// An address space of iommufd, and the devices in it.
#[derive(Debug)]
pub struct SpaceMapper<D = BoundDevice> {
    iommufd: Iommufd,
    id: IoasId,
    tables: Tables,
    /// It is not ours alone: another process goes on with it.
    given_up: bool,
    kind: PhantomData<fn(&D)>,
}

impl SpaceMapper {
    /// A new address space, for devices of VFIO.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn new(iommufd: &Iommufd) -> Result<Self> {
        Self::for_devices(iommufd)
    }

    /// One that another process has made and hands over, for devices of VFIO.
    pub fn existing(iommufd: &Iommufd, id: IoasId) -> Self {
        Self::over(iommufd, id)
    }
}

impl<D> SpaceMapper<D> {
    /// A new address space, for devices of another subsystem.
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn for_devices(iommufd: &Iommufd) -> Result<Self> {
        Ok(Self::over(iommufd, iommufd.alloc_ioas()?))
    }

    fn over(iommufd: &Iommufd, id: IoasId) -> Self {
        Self {
            iommufd: iommufd.clone(),
            id,
            tables: Tables::default(),
            given_up: false,
            kind: PhantomData,
        }
    }

    /// Its number.
    pub const fn id(&self) -> IoasId {
        self.id
    }

    /// Says whether neighbouring pages are mapped by large leaves; see
    /// [`Iommufd::set_huge_pages`].
    ///
    /// # Errors
    ///
    /// [`KernelError::Refused`].
    pub fn set_huge_pages(&self, on: bool) -> Result<()> {
        self.iommufd.set_huge_pages(self.id, on)
    }
}

impl<D> Drop for SpaceMapper<D> {
    fn drop(&mut self) {
        // It stays while a device is in it, and goes with the file.
        if !self.given_up {
            let _ = self.iommufd.destroy_ioas(self.id);
        }
    }
}

impl<D: Attachable + Any + Send + Sync> Mapper for SpaceMapper<D> {
    type Device = D;

    const PROFILE: Profile = Profile::Iommufd;

    const NODE_TABLES: bool = true;

    fn enter(&mut self, device: &D, with: Entering) -> Result<()> {
        let iommufd = &self.iommufd;
        let info = iommufd.hw_info(device.id());
        // A unit that tells nothing tracks nothing.
        let tracks = info.is_ok_and(|info| info.dirty_tracking);
        let kernel = (iommufd, self.id);
        self.tables.enter(&kernel, device, self.id, tracks, with)
    }

    fn leave(&mut self, device: &D) -> Result<()> {
        device.detach()
    }

    /// The page table that was made for it, with what that keeps of what it wrote to.
    fn left(&mut self, device: &D) {
        self.tables.left(&(&self.iommufd, self.id), device.id());
    }

    fn info(&self) -> Result<MapperInfo> {
        let ranges = self.iommufd.iova_ranges(self.id)?;
        Ok(MapperInfo {
            granule: ranges.alignment,
            ranges: Some(ranges.ranges),
            available: None,
            page_sizes: None,
        })
    }

    fn allow(&mut self, ranges: &[Span<Iova>]) -> Result<()> {
        let ranges: Vec<_> = ranges
            .iter()
            .map(|range| range.start..=range.last())
            .collect();
        self.iommufd.allow_iovas(self.id, &ranges)
    }

    #[allow(unsafe_code)]
    unsafe fn map(&mut self, iova: Span<Iova>, source: MapSource<'_>, prot: Prot) -> Result<()> {
        let (iommufd, at) = (&self.iommufd, Some(iova.start));
        match source {
            MapSource::Address(address) => {
                let memory = Span::new(address, iova.len);
                // SAFETY: the caller answers for the memory.
                unsafe { iommufd.map(self.id, at, memory, prot) }
            }
            MapSource::File(file, offset) => {
                let part = Span::new(offset, iova.len);
                iommufd.map_file(self.id, at, file, part, prot)
            }
            MapSource::Copy { space, iova: from } => {
                let from_range = Span::new(from, iova.len);
                iommufd.copy(IoasId(space), from_range, self.id, at, prot)
            }
        }
        .map(|_| ())
    }

    fn unmap(&mut self, iova: Span<Iova>) -> Result<u64> {
        self.iommufd.unmap(self.id, iova)
    }

    fn set_tracking(&mut self, on: bool) -> Result<()> {
        let mut tables = self.tables.tracked();
        tables.try_for_each(|table| self.iommufd.set_dirty_tracking(table, on))
    }

    /// While some device leaves no trace, every bit is set.
    fn dirty(&mut self, iova: Span<Iova>, page: u64, bitmap: &mut [u64]) -> Result<()> {
        if self.is_blind() {
            bitmap.fill(u64::MAX);
        }
        let mut tables = self.tables.tracked();
        tables.try_for_each(|table| {
            let iommufd = &self.iommufd;
            iommufd.dirty_bitmap(table, iova, page, bitmap, Clear::Yes)
        })
    }

    fn is_blind(&self) -> bool {
        self.tables.is_blind()
    }

    /// There is nothing to declare: files have no addresses, and other memory cannot be handed over.
    fn give_up_addresses(&mut self) -> Result<()> {
        self.given_up = true;
        Ok(())
    }

    /// Page tables stay those of the process before; they are not asked for what is dirty.
    #[allow(unsafe_code)]
    unsafe fn take_over(
        &mut self,
        devices: &[Arc<D>],
        _mappings: &[(Span<Iova>, MapSource<'_>)],
    ) -> Result<()> {
        self.iommufd.change_process()?;
        for device in devices {
            self.tables.taken_over(device.id());
        }
        Ok(())
    }

    fn places(&self, devices: &[Arc<D>]) -> Option<Vec<Place>> {
        let places = self.tables.places().into_iter().map(|place| {
            let uses = |device: &&Arc<D>| place.devices.contains(&device.id());
            Place {
                number: place.table.map(|table| table.0),
                node: place.node,
                // A table that was made on purpose lies on the node of its devices.
                tables: place.table.and(place.node),
                tracks: place.tracks,
                endpoints: devices.iter().filter(uses).map(EndpointId::from).collect(),
                ..Place::default()
            }
        });
        Some(places.collect())
    }

    #[cfg(feature = "linux")]
    fn account(&self) -> Option<Arc<Ledger>> {
        let mode = self.iommufd.rlimit_mode().ok()?;
        Ledger::now(|limits| mode.counter(limits))
    }

    fn number(&self) -> u32 {
        self.id.0
    }

    fn shares(&self) -> Option<&Arc<Shares>> {
        Some(&self.iommufd.0.shares)
    }
}
