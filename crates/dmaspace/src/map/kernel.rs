//! The job over mappings of the kernel: a container of VFIO's type 1, or an address space of
//! iommufd, and a device of the machine.
//!
//! The kernel pins, finds the runs and fills its tables in one call, and tells none of it. The device
//! is attached before memory is mapped, so that what can be mapped is known, and mapping does
//! all the work.

use std::sync::Arc;
use std::time::Instant;

use hostmem::{FrameSource, Pinner};
use ioas::iommufd::{BoundDevice, Iommufd, Owner, Space, SpaceMapper};
use ioas::vfio::{Container, ContainerMapper, Device, Group, Type1};
use ioas::{
    AttachError, Errno, HostMemory, Ioas, Kernel, KernelError, Ledger, MapError, Mapper, Memory,
    Placement,
};
use iommu::NodeId;
use iopt::Prot;
use runs::{PageSizes, Span};

use super::clock::nanoseconds;
use super::job::{Mapped, Side};
use super::report::{
    DeviceUsed, DmaReport, DomainReport, MapReport, MappingsReport, PlacementReport, SampleReport,
};
use super::sampled::{self, Neighbours, PLACE};
use super::{JobError, Stage, Watch, edu};
use crate::devices::{DeviceReport, DevicesReport, Places, Way};

/// Mappings of the kernel end at its multiples: the largest leaf stays possible, and between two of
/// them somebody can stop it.
const GRANULE: u64 = 1 << 30;
/// Memory is mapped at multiples of the largest power of two in its length, up to this.
const LARGEST: u64 = 1 << 30;
/// Room on either side.
const PAGE: u64 = 4096;

/// A device of the machine, attached to an address space of the kernel.
pub(super) struct KernelSide<K: Mapper> {
    // Dropped in this order: a group stays in its container while a device of it is open.
    device: Opened,
    space: Ioas<Kernel<K>>,
    shown: DeviceReport,
    /// The sizes of pages, if the interface tells them.
    page_sizes: Option<PageSizes>,
    attach_ns: u64,
    placement: Option<Placement>,
    neighbours: Option<Neighbours>,
}

/// An open device.
enum Opened {
    OfGroup(Device),
    Bound(Arc<BoundDevice>),
}

impl Opened {
    fn device(&self) -> &Device {
        match self {
            Self::OfGroup(device) => device,
            Self::Bound(bound) => &bound.device,
        }
    }
}

/// The device at `address` with its group in a new container.
pub(super) fn vfio(
    address: &str,
    placement: Option<Placement>,
) -> Result<KernelSide<ContainerMapper>, JobError> {
    let (shown, number) = find(address, Way::Type1)?;
    let failed = |source| open_failed(&shown, source);
    let container = Container::open().map_err(failed)?;
    let group = Arc::new(Group::open(number).map_err(failed)?);
    if !group.status().map_err(failed)?.viable {
        // Somebody has bound a device of it since it was looked at.
        return Err(JobError::Input(format!(
            "group {number} of {} is not viable: a driver of the host has a device of it",
            shown.address
        )));
    }
    let mapper = ContainerMapper::new(container);
    let mut space = Ioas::over_kernel(Type1::new(mapper, Some(GRANULE)));
    space.set_placement(placement.unwrap_or_default())?;
    let attach_ns = attach(&mut space, Arc::clone(&group), &shown)?;
    let device = group.device(&shown.address).map_err(failed)?;
    // Where iommufd plays the container, only an open device says what can be mapped.
    space.refresh().map_err(failed)?;
    let info = space.backend().mapper().container().info();
    Ok(KernelSide {
        device: Opened::OfGroup(device),
        space,
        page_sizes: info.map_err(failed)?.page_sizes,
        shown,
        attach_ns,
        placement,
        neighbours: None,
    })
}

/// The device at `address`, by its own node, with a new address space of iommufd.
pub(super) fn iommufd(
    address: &str,
    placement: Option<Placement>,
) -> Result<KernelSide<SpaceMapper>, JobError> {
    let (shown, _) = find(address, Way::Iommufd)?;
    let failed = |source| open_failed(&shown, source);
    let owner = Owner::new(Iommufd::open().map_err(failed)?);
    let cdev = shown.cdev.as_deref().unwrap_or("".as_ref());
    let bound = owner.open_device(cdev).map_err(failed)?;
    let bound = Arc::new(bound);
    let mapper = SpaceMapper::new(&owner).map_err(failed)?;
    let mut space = Ioas::over_kernel(Space::new(mapper, Some(GRANULE)));
    space.set_placement(placement.unwrap_or_default())?;
    let attach_ns = attach(&mut space, Arc::clone(&bound), &shown)?;
    Ok(KernelSide {
        device: Opened::Bound(bound),
        space,
        page_sizes: None,
        shown,
        attach_ns,
        placement,
        neighbours: None,
    })
}

/// What the machine shows of the device, which can be used in this way, and its group.
fn find(address: &str, way: Way) -> Result<(DeviceReport, u32), JobError> {
    let report = DevicesReport::read(&Places::default())?;
    let shown = report.ready(address, way)?;
    // A device that is ready has one.
    Ok((shown.clone(), shown.group.unwrap_or_default()))
}

pub(crate) fn open_failed(shown: &DeviceReport, source: KernelError) -> JobError {
    let address = shown.address.clone();
    JobError::Open { address, source }
}

/// Attaches the device, and says how long that took.
fn attach<K: Mapper>(
    space: &mut Ioas<Kernel<K>>,
    device: Arc<K::Device>,
    shown: &DeviceReport,
) -> Result<u64, JobError> {
    let started = Instant::now();
    match space.attach_near(device, shown.node.map(NodeId)) {
        Ok(()) => Ok(nanoseconds(started)),
        Err(source) => Err(JobError::Enter {
            address: shown.address.clone(),
            hint: hint(&source),
            source,
        }),
    }
}

/// What is behind a refusal for want of permission, most likely.
///
/// Source: `modinfo vfio_iommu_type1`, `modinfo iommufd`: the parameter `allow_unsafe_interrupts`.
pub(crate) fn hint(refused: &AttachError) -> &'static str {
    let AttachError::Kernel(cause) = refused else {
        return "";
    };
    match cause.downcast_ref() {
        Some(KernelError::Refused { errno, .. }) if Errno(*errno) == Errno::EPERM => {
            " (where interrupts are not remapped, the kernel wants the parameter \
             allow_unsafe_interrupts=1 of vfio_iommu_type1, or of iommufd)"
        }
        _ => "",
    }
}

/// The lowest address for `size` bytes at which large leaves are possible, with a page on either side
/// that can be mapped, too; never in the first page.
fn lowest(windows: &[Span], size: u64) -> Option<u64> {
    let align = (1u64 << size.checked_ilog2()?).clamp(PAGE, LARGEST);
    windows.iter().find_map(|window| {
        let first = window.start.max(PAGE).checked_add(PAGE)?;
        let start = first.checked_next_multiple_of(align)?;
        let with_neighbours = Span::checked(start - PAGE, size.checked_add(2 * PAGE)?)?;
        window.covers(&with_neighbours).then_some(start)
    })
}

impl<K: Mapper> Side for KernelSide<K> {
    type Backend = Kernel<K>;

    fn space(&mut self) -> &mut Ioas<Kernel<K>> {
        &mut self.space
    }

    /// Also has the device see pages on either side, which are unmapped again.
    fn place(
        &mut self,
        size: u64,
        ledger: &Arc<Ledger>,
        watch: &mut dyn Watch,
    ) -> Result<u64, JobError> {
        let no_room = JobError::Map(MapError::NoRoom { len: size });
        let start = lowest(&self.space.windows(), size).ok_or(no_room)?;
        if self.shown.id != edu::ID {
            return Ok(start);
        }
        let neighbours = Neighbours::new().map_err(JobError::Mapping)?;
        let mapping = Arc::clone(neighbours.mapping());
        let frames = FrameSource::detect(&mapping);
        // Never used: the kernel pins.
        let pinner = Arc::new(Pinner::mlock(2 << 20)?);
        let pages = Memory::new(Arc::new(HostMemory::new(mapping, pinner, frames)), ledger);
        let mut device = edu::Edu::new(self.device.device())?;
        for (at, part) in Neighbours::pages(Span::new(start, size)) {
            self.space.map(at, &pages, part, Prot::RW, &mut ())?;
            sampled::Copier::read(&mut device, at, &mut || {
                watch.progress(Stage::Attach, 0, size)
            })?;
            self.space.unmap(Span::new(at, part.len), &mut ())?;
        }
        drop(device);
        self.neighbours = Some(neighbours);
        Ok(start)
    }

    fn while_mapped(
        &mut self,
        mapped: &Mapped<'_>,
        watch: &mut dyn Watch,
        report: &mut MapReport,
    ) -> Result<(), JobError> {
        let range = mapped.range;
        let made = self.space.backend().pieces().count() as u64;
        let most = self.space.capabilities().most_mappings;
        report.times.attach_ns = self.attach_ns;
        report.backend.device = Some(self.used());
        report.placement = self.placement.map(|policy| PlacementReport {
            policy: policy.to_string(),
            domains: vec![DomainReport {
                node: self.shown.node,
                devices: 1,
                ..DomainReport::default()
            }],
            misplaced: Vec::new(),
        });
        report.backend.page_sizes_bytes = self.page_sizes.map(|sizes| sizes.iter().collect());
        report.backend.mappings = Some(MappingsReport {
            made,
            available: most.map(|most| most.saturating_sub(made)),
            left: made,
        });
        report.dma.devices = 1;
        let Some(neighbours) = &self.neighbours else {
            let why = format!("no driver for {} here", self.shown.id);
            report.dma.not_checked = Some(why);
            return Ok(());
        };
        let started = Instant::now();
        let mut device = edu::Edu::new(self.device.device())?;
        let memory = mapped.memory.mapping();
        let found = sampled::check(&mut device, neighbours, memory, range, &mut |done| {
            watch.progress(Stage::DmaCheck, done, 2 * range.len)
        })?;
        report.times.dma_check_ns = Some(nanoseconds(started));
        report.dma = DmaReport {
            devices: 1,
            sample: Some(SampleReport {
                engine: edu::NAME.into(),
                copies: found.copies,
                compared_bytes: found.compared,
            }),
            read_bytes: found.copies * PLACE,
            written_bytes: found.copies * PLACE,
            wrong_bytes: found.wrong,
            neighbour_accesses: found.neighbour_accesses,
            neighbour_reached: found.neighbour_reached,
            ..DmaReport::default()
        };
        Ok(())
    }

    fn close(self, report: &mut MapReport) -> Result<(), JobError> {
        let left = self.space.backend().pieces().count() as u64;
        if let Some(mappings) = &mut report.backend.mappings {
            mappings.left = left;
        }
        // Open, it would keep its group in the container.
        drop(self.device);
        Ok(self.space.close()?)
    }
}

impl<K: Mapper> KernelSide<K> {
    fn used(&self) -> DeviceUsed {
        let shown = &self.shown;
        DeviceUsed {
            address: shown.address.clone(),
            id: shown.id.clone(),
            group: shown.group,
            cdev: match self.device {
                Opened::OfGroup(_) => None,
                Opened::Bound(_) => shown.cdev.clone(),
            },
            unit: shown.unit.clone(),
            node: shown.node,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_goes_to_the_lowest_address_with_room_for_large_leaves_and_neighbours() {
        // VT-d's: all but where interrupts go.
        let windows = [
            Span::new(0, 0xfee0_0000),
            Span::new(0xfef0_0000, (1 << 39) - 0xfef0_0000),
        ];
        for (size, expected) in [
            (4096, Some(0x2000)),
            (6 << 20, Some(4 << 20)),
            (256 << 20, Some(256 << 20)),
            (3 << 30, Some(4 << 30)),
            (5 << 30, Some(4 << 30)),
            (1 << 39, None),
            (!4095, None),
            (0, None),
        ] {
            assert_eq!(lowest(&windows, size), expected, "{size:#x}");
        }
        // A window to the very end, and one that is too small by a page.
        let top = Span::inclusive(1 << 63, u64::MAX).unwrap();
        assert_eq!(lowest(&[top], 1 << 62), Some((1 << 63) + (1 << 30)));
        let tight = Span::new(0x10_0000, 0x4000);
        assert_eq!(lowest(&[tight], 0x2000), None);
        assert_eq!(lowest(&[tight], 0x1000), Some(0x10_1000));
        assert_eq!(lowest(&[], 4096), None);
    }

    #[test]
    fn a_refusal_for_want_of_permission_comes_with_what_may_be_behind_it() {
        let refused = |errno: Errno| {
            let operation = "VFIO_SET_IOMMU";
            let cause = KernelError::Refused {
                operation,
                errno: errno.0,
            };
            hint(&AttachError::Kernel(Box::new(cause)))
        };
        assert!(refused(Errno::EPERM).contains("allow_unsafe_interrupts=1"));
        assert_eq!(refused(Errno::ENODEV), "");
        assert_eq!(hint(&AttachError::AlreadyAttached), "");
    }
}
