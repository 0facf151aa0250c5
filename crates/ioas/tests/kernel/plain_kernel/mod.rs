//! A plain model of what the kernel does with maps and unmaps: no page tables, no speed, the order of
//! checks and the error numbers of `VFIO_IOMMU_MAP_DMA` and its like, and of `IOMMU_IOAS_MAP` and its
//! like (Linux 7.2). Memory is an address that is never read.

#![allow(dead_code, reason = "no test binary uses all of it")]
#![allow(
    unsafe_code,
    reason = "the seam to the kernel is unsafe; the model touches no memory"
)]

pub(crate) mod setup;
mod world;

use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioas::{
    EndpointId, Entering, Errno, KernelError, Ledger, MapSource, Mapper, MapperInfo, MemoryObject,
    PinFailed, Pinned, Place, ProcessMemory, Profile, Shares,
};
use iopt::Prot;
use runs::{Iova, Offset, Span};

pub(crate) use world::*;

pub(crate) const PAGE: u64 = 4096;

/// Memory at an address, or a memory file. It cannot be pinned in this process.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) len: u64,
    pub(crate) address: Option<u64>,
    pub(crate) file: Option<File>,
}

impl MemoryObject for Fake {
    fn len(&self) -> u64 {
        self.len
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        part.len
    }

    fn pin(
        &self,
        _part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        Err(PinFailed::Refused("only a kernel pins this".into()))
    }

    fn in_process(&self) -> Option<ProcessMemory> {
        // SAFETY: it is given to the model only, which follows no address.
        self.address
            .map(|address| unsafe { ProcessMemory::new(address) })
    }

    #[cfg(feature = "iommufd")]
    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.file.as_ref()?.as_fd(), 0))
    }
}

/// Registers of a device by a dma-buf.
#[derive(Debug)]
#[cfg(feature = "iommufd")]
pub(crate) struct Registers {
    pub(crate) len: u64,
    pub(crate) file: File,
}

#[cfg(feature = "iommufd")]
impl MemoryObject for Registers {
    fn len(&self) -> u64 {
        self.len
    }

    fn charge(&self, _part: Span<Offset>) -> u64 {
        0
    }

    fn is_mmio(&self) -> bool {
        true
    }

    fn pin(
        &self,
        _part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        Err(PinFailed::Refused("only a kernel pins this".into()))
    }

    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.file.as_fd(), 0))
    }
}

/// One container or address space of the model.
#[derive(Debug)]
pub(crate) struct Plain<const IOMMUFD: bool> {
    pub(crate) world: Arc<Mutex<World>>,
    pub(crate) space: usize,
    shares: Arc<Shares>,
}

pub(crate) type PlainType1 = Plain<false>;
pub(crate) type PlainIommufd = Plain<true>;

impl<const IOMMUFD: bool> Plain<IOMMUFD> {
    pub(crate) fn new(world: &Arc<Mutex<World>>, shares: &Arc<Shares>) -> Self {
        let mut inside = world.lock().unwrap();
        inside.spaces.push(Address::default());
        Self {
            world: Arc::clone(world),
            space: inside.spaces.len() - 1,
            shares: Arc::clone(shares),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        // A test that has failed is being unwound.
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<const IOMMUFD: bool> Drop for Plain<IOMMUFD> {
    fn drop(&mut self) {
        let space = self.space;
        self.lock().spaces[space].closed = true;
    }
}

fn refused<T>(operation: &'static str, answer: Answer<T>) -> Result<T, KernelError> {
    answer.map_err(|errno| KernelError::Refused {
        operation,
        errno: errno.0,
    })
}

impl<const IOMMUFD: bool> Mapper for Plain<IOMMUFD> {
    type Device = Device;

    const PROFILE: Profile = if IOMMUFD {
        Profile::Iommufd
    } else {
        Profile::Type1
    };

    const NODE_TABLES: bool = IOMMUFD;

    fn enter(&mut self, device: &Device, with: Entering) -> Result<(), KernelError> {
        let mut world = self.lock();
        let answer = world.attach(self.space, device);
        if answer.is_ok() {
            world.entered.push((with.near, with.placement));
        }
        refused("attach", answer)
    }

    fn leave(&mut self, device: &Device) -> Result<(), KernelError> {
        refused("detach", self.lock().detach(self.space, device))
    }

    fn left(&mut self, device: &Device) {
        if IOMMUFD {
            self.lock().gone(self.space, device);
        }
    }

    fn info(&self) -> Result<MapperInfo, KernelError> {
        let world = self.lock();
        let here = &world.spaces[self.space];
        let used = here.mappings.len() as u64;
        Ok(MapperInfo {
            granule: here.alignment(),
            ranges: Some(here.ranges()),
            available: (!IOMMUFD).then(|| world.entries.saturating_sub(used)),
            page_sizes: None,
        })
    }

    fn allow(&mut self, ranges: &[Span<Iova>]) -> Result<(), KernelError> {
        let mut world = self.lock();
        let here = &mut world.spaces[self.space];
        if !ranges.iter().all(|range| here.translates(*range)) {
            return refused("allow", Err(Errno::EADDRINUSE));
        }
        here.allowed = ranges.to_vec();
        Ok(())
    }

    unsafe fn map(
        &mut self,
        iova: Span<Iova>,
        source: MapSource<'_>,
        prot: Prot,
    ) -> Result<(), KernelError> {
        if let MapSource::File(file, _) = source {
            assert!(IOMMUFD && file.as_raw_fd() >= 0);
        }
        let mapped = self
            .lock()
            .map(self.space, iova.start, iova.len, source, prot);
        refused("map", mapped)
    }

    fn unmap(&mut self, iova: Span<Iova>) -> Result<u64, KernelError> {
        refused("unmap", self.lock().unmap(self.space, iova.start, iova.len))
    }

    fn set_tracking(&mut self, on: bool) -> Result<(), KernelError> {
        let mut world = self.lock();
        let here = &mut world.spaces[self.space];
        if IOMMUFD && here.devices.iter().any(|device| !device.tracks) {
            return refused("tracking", Err(Errno::EOPNOTSUPP));
        }
        here.tracking = on;
        here.dirty.clear();
        Ok(())
    }

    fn dirty(
        &mut self,
        iova: Span<Iova>,
        page: u64,
        bitmap: &mut [u64],
    ) -> Result<(), KernelError> {
        let mut world = self.lock();
        let here = &mut world.spaces[self.space];
        if !here.tracking || page != here.alignment() || !iova.is_aligned(page) {
            return refused("dirty", Err(Errno::EINVAL));
        }
        let cut = |(start, mapping): (u64, &Mapping)| !iova.covers(&Span::new(start, mapping.len));
        if !IOMMUFD && here.overlapping(iova).any(cut) {
            return refused("dirty", Err(Errno::EINVAL));
        }
        let blind = here.devices.iter().any(|device| !device.tracks);
        for bit in 0..iova.len / page {
            let at = iova.start + bit * page;
            if here.dirty.remove(&at) || blind {
                bitmap[bit as usize / 64] |= 1 << (bit % 64);
            }
        }
        Ok(())
    }

    fn is_blind(&self) -> bool {
        let world = self.lock();
        world.spaces[self.space]
            .devices
            .iter()
            .any(|device| !device.tracks)
    }

    fn give_up_addresses(&mut self) -> Result<(), KernelError> {
        if !IOMMUFD {
            let mut world = self.lock();
            let mappings = world.spaces[self.space].mappings.values_mut();
            mappings.for_each(|mapping| mapping.invalid = true);
        }
        Ok(())
    }

    unsafe fn take_over(
        &mut self,
        _devices: &[Arc<Device>],
        mappings: &[(Span<Iova>, MapSource<'_>)],
    ) -> Result<(), KernelError> {
        let mut world = self.lock();
        let here = &mut world.spaces[self.space];
        for (range, source) in mappings {
            let Some(mapping) = here.mappings.get_mut(&range.start) else {
                return refused("update", Err(Errno::ENOENT));
            };
            match source {
                MapSource::Address(address) if !IOMMUFD => {
                    if !mapping.invalid || mapping.len != range.len {
                        return refused("update", Err(Errno::EINVAL));
                    }
                    mapping.address = *address;
                    mapping.invalid = false;
                }
                MapSource::File(..) if IOMMUFD => {}
                _ => return refused("change process", Err(Errno::EINVAL)),
            }
        }
        Ok(())
    }

    fn number(&self) -> u32 {
        self.space as u32
    }

    fn places(&self, devices: &[Arc<Device>]) -> Option<Vec<Place>> {
        Some(vec![Place {
            number: Some(self.number()),
            endpoints: devices.iter().map(EndpointId::from).collect(),
            ..Place::default()
        }])
    }

    /// Known only where the model has a limit; failures by number have no other reason than want of memory.
    fn account(&self) -> Option<Arc<Ledger>> {
        let world = self.lock();
        let limit = Some(world.limit).filter(|limit| *limit != u64::MAX)?;
        Some(match IOMMUFD {
            true => Ledger::of_user("user->locked_vm", Some(limit), world.locked()),
            false => Ledger::new("mm->locked_vm", Some(limit), world.locked()),
        })
    }

    fn shares(&self) -> Option<&Arc<Shares>> {
        IOMMUFD.then_some(&self.shares)
    }
}
