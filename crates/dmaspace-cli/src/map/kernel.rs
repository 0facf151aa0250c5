//! The job over mappings of the kernel: containers of VFIO's type 1, or an address space of iommufd, and
//! devices of the machine.
//!
//! The kernel pins, finds the runs and fills its tables in one call, and tells none of it. Devices
//! are attached before memory is mapped, so that what can be mapped is known, and mapping does
//! all the work.

use std::sync::Arc;
use std::time::Instant;

use ioas::iommufd::{BoundDevice, Iommufd, Owner, Space, SpaceMapper};
use ioas::vfio::{Device, Group, Type1};
use ioas::{
    AttachError, Endpoint, Errno, HostMemory, Ioas, KernelError, Ledger, MapError, Memory, Place,
    Placement,
};
use iommu::NodeId;
use iopt::Prot;
use runs::{Iova, Span};

use super::clock::nanoseconds;
use super::job::{Backend, Mapped};
use super::report::{
    DeviceUsed, DomainReport, MapReport, MappingsReport, PlacementReport, SampleReport,
};
use super::sampled::{self, Neighbours, PLACE};
use super::{JobError, Stage, Watch, edu};
use dmaspace::devices::{DeviceReport, DevicesReport, Places, Way};

/// Mappings of the kernel end at its multiples: the largest leaf stays possible, and between two of
/// them somebody can stop it.
const GRANULE: u64 = 1 << 30;
/// Memory is mapped at multiples of the largest power of two in its length, up to this.
const LARGEST: u64 = 1 << 30;
/// Room on either side.
const PAGE: u64 = 4096;

/// Devices of the machine, attached to an address space of the kernel.
pub(super) struct KernelBackend {
    // Dropped in this order: a group stays in its container while a device of it is open.
    devices: Vec<Used>,
    space: Ioas,
    attach_ns: u64,
    placement: Option<Placement>,
    neighbours: Option<Neighbours>,
}

/// A device, and what the machine shows of it.
pub(crate) struct Used {
    pub(crate) device: Opened,
    pub(crate) shown: DeviceReport,
}

/// An open device.
pub(crate) enum Opened {
    OfGroup(Device),
    Bound(Arc<BoundDevice>),
}

impl Used {
    pub(crate) fn device(&self) -> &Device {
        match &self.device {
            Opened::OfGroup(device) => device,
            Opened::Bound(bound) => &bound.device,
        }
    }

    pub(crate) fn report(&self) -> DeviceUsed {
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

/// The devices at `addresses` with their groups in new containers: one for all, or one for each node.
pub(super) fn vfio(
    addresses: &[String],
    placement: Option<Placement>,
) -> Result<KernelBackend, JobError> {
    let machine = DevicesReport::read(&Places::default())?;
    let found = find(&machine, addresses, Way::Type1)?;
    let space = Ioas::over_kernel(Type1::open(Some(GRANULE)));
    space.set_placement(placement.unwrap_or_default())?;
    let mut attach_ns = 0;
    let mut groups: Vec<(u32, Arc<Group>)> = Vec::new();
    let mut devices = Vec::new();
    for shown in found {
        let failed = |source| open_failed(&shown, source);
        // A device that is ready has one.
        let number = shown.group.unwrap_or_default();
        let known = groups.iter().find(|(known, _)| *known == number);
        let group = match known {
            Some((_, group)) => Arc::clone(group),
            None => {
                let group = open_group(&shown)?;
                let near = machine.node_of_group(number).map(NodeId);
                attach_ns += attach(&shown, || {
                    space.attach(Endpoint::from(Arc::clone(&group)).near(near))
                })?;
                groups.push((number, Arc::clone(&group)));
                group
            }
        };
        let device = group.device(&shown.address).map_err(failed)?;
        // Where iommufd plays the container, only an open device says what can be mapped.
        space.refresh().map_err(failed)?;
        let device = Opened::OfGroup(device);
        devices.push(Used { device, shown });
    }
    Ok(KernelBackend {
        devices,
        space,
        attach_ns,
        placement,
        neighbours: None,
    })
}

/// The devices at `addresses`, by their own nodes, with a new address space of iommufd.
pub(super) fn iommufd(
    addresses: &[String],
    placement: Option<Placement>,
) -> Result<KernelBackend, JobError> {
    let machine = DevicesReport::read(&Places::default())?;
    let found = find(&machine, addresses, Way::Iommufd)?;
    let first = found.first().cloned().unwrap_or_default();
    let failed = |source| open_failed(&first, source);
    let owner = Owner::new(Iommufd::open().map_err(failed)?);
    let mapper = SpaceMapper::new(&owner).map_err(failed)?;
    let space = Ioas::over_kernel(Space::new(mapper, Some(GRANULE)));
    space.set_placement(placement.unwrap_or_default())?;
    let mut attach_ns = 0;
    let mut devices = Vec::new();
    for shown in found {
        let cdev = shown.cdev.as_deref().unwrap_or("".as_ref());
        let bound = owner.open_device(cdev);
        let bound = Arc::new(bound.map_err(|source| open_failed(&shown, source))?);
        let near = shown.node.map(NodeId);
        attach_ns += attach(&shown, || {
            space.attach(Endpoint::from(Arc::clone(&bound)).near(near))
        })?;
        let device = Opened::Bound(bound);
        devices.push(Used { device, shown });
    }
    Ok(KernelBackend {
        devices,
        space,
        attach_ns,
        placement,
        neighbours: None,
    })
}

/// The group of a device that is ready.
pub(crate) fn open_group(shown: &DeviceReport) -> Result<Arc<Group>, JobError> {
    let failed = |source| open_failed(shown, source);
    let number = shown.group.unwrap_or_default();
    let group = Group::open(number).map_err(failed)?;
    if !group.status().map_err(failed)?.viable {
        // Somebody has bound a device of it since it was looked at.
        return Err(JobError::Input(format!(
            "group {number} of {} is not viable: a driver of the host has a device of it",
            shown.address
        )));
    }
    Ok(Arc::new(group))
}

/// What the machine shows of the devices, each of which can be used in this way.
pub(crate) fn find(
    machine: &DevicesReport,
    addresses: &[String],
    way: Way,
) -> Result<Vec<DeviceReport>, JobError> {
    let mut found: Vec<DeviceReport> = Vec::new();
    for address in addresses {
        let shown = machine.ready(address, way)?;
        if found.iter().any(|other| other.address == shown.address) {
            let twice = format!("{} is named twice", shown.address);
            return Err(JobError::Input(twice));
        }
        found.push(shown.clone());
    }
    Ok(found)
}

pub(crate) fn open_failed(shown: &DeviceReport, source: KernelError) -> JobError {
    let address = shown.address.clone();
    JobError::Open { address, source }
}

/// Attaches a device, and says how long that took.
pub(crate) fn attach(
    shown: &DeviceReport,
    enter: impl FnOnce() -> Result<(), AttachError>,
) -> Result<u64, JobError> {
    let started = Instant::now();
    match enter() {
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
            " (where interrupts are not remapped, the kernel requires the parameter \
             allow_unsafe_interrupts=1 of vfio_iommu_type1, or of iommufd)"
        }
        _ => "",
    }
}

/// The lowest address for `size` bytes at which large leaves are possible, with a page on either side
/// that can be mapped, too; never in the first page.
pub(crate) fn lowest(windows: &[Span<Iova>], size: u64) -> Option<u64> {
    let align = (1u64 << size.checked_ilog2()?).clamp(PAGE, LARGEST);
    windows.iter().find_map(|window| {
        let first = window.start.max(PAGE).checked_add(PAGE)?;
        let start = first.checked_next_multiple_of(align)?;
        let with_neighbours = Span::checked(start - PAGE, size.checked_add(2 * PAGE)?)?;
        window.covers(&with_neighbours).then_some(start)
    })
}

/// Which devices share a page table. Those of iommufd share what is charged.
fn domain(place: &Place) -> DomainReport {
    DomainReport {
        node: place.node.map(|node| node.0),
        devices: place.endpoints.len() as u64,
        charged_bytes: place.number.is_none().then_some(place.charged),
        ..DomainReport::default()
    }
}

impl Backend for KernelBackend {
    fn space(&self) -> &Ioas {
        &self.space
    }

    /// Also has devices see pages on either side, which are unmapped again.
    fn place(
        &mut self,
        size: u64,
        ledger: &Arc<Ledger>,
        watch: &mut dyn Watch,
    ) -> Result<u64, JobError> {
        let no_room = JobError::Map(MapError::NoRoom { len: size });
        let start = lowest(&self.space.windows(), size).ok_or(no_room)?;
        if copiers(&self.devices).next().is_none() {
            return Ok(start);
        }
        let neighbours = Neighbours::new().map_err(JobError::Mapping)?;
        let mapping = Arc::clone(neighbours.mapping());
        let pages = Memory::new(Arc::new(HostMemory::new(mapping)), ledger);
        for (at, part) in Neighbours::pages(Span::new(start, size)) {
            self.space.map(at, &pages, part, Prot::RW, &mut ())?;
            for used in copiers(&self.devices) {
                let mut device = edu::Edu::new(used.device())?;
                sampled::Copier::read(&mut device, at, &mut || {
                    watch.progress(Stage::Attach, 0, size)
                })?;
            }
            self.space.unmap(Span::new(at, part.len), &mut ())?;
        }
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
        let made = self.space.places().iter().map(|place| place.mappings).sum();
        let most = self.space.capabilities().most_mappings;
        report.times.attach_ns = self.attach_ns;
        let mut used = self.devices.iter().map(Used::report);
        report.backend.device = used.next();
        report.backend.further_devices = used.collect();
        report.placement = self.placement.map(|policy| PlacementReport {
            policy: policy.to_string(),
            domains: self.space.places().iter().map(domain).collect(),
            misplaced: Vec::new(),
        });
        report.backend.page_sizes_bytes =
            self.space.page_sizes().map(|sizes| sizes.iter().collect());
        report.backend.mappings = Some(MappingsReport {
            made,
            available: most.map(|most| most.saturating_sub(made)),
            left: made,
        });
        report.dma.devices = self.devices.len() as u32;
        let Some(neighbours) = &self.neighbours else {
            let ids = self.devices.iter().map(|used| used.shown.id.as_str());
            let ids: Vec<_> = ids.collect();
            let why = format!("no driver for {} here", ids.join(", "));
            report.dma.not_checked = Some(why);
            return Ok(());
        };
        let started = Instant::now();
        let mut sample = SampleReport {
            engine: edu::NAME.into(),
            ..SampleReport::default()
        };
        let memory = mapped.memory.mapping();
        let all = copiers(&self.devices).count() as u64 * 2 * range.len;
        for (nth, used) in (0..).zip(copiers(&self.devices)) {
            let mut device = edu::Edu::new(used.device())?;
            let before = nth * 2 * range.len;
            let found = sampled::check(&mut device, neighbours, memory, range, &mut |done| {
                watch.progress(Stage::DmaCheck, before + done, all)
            })?;
            sample.copies += found.copies;
            sample.compared_bytes += found.compared;
            report.dma.wrong_bytes += found.wrong;
            report.dma.neighbour_accesses += found.neighbour_accesses;
            report.dma.neighbour_reached += found.neighbour_reached;
        }
        report.times.dma_check_ns = Some(nanoseconds(started));
        report.dma.read_bytes = sample.copies * PLACE;
        report.dma.written_bytes = sample.copies * PLACE;
        report.dma.sample = Some(sample);
        Ok(())
    }

    fn close(self, report: &mut MapReport) -> Result<(), JobError> {
        let left = self.space.places().iter().map(|place| place.mappings).sum();
        if let Some(mappings) = &mut report.backend.mappings {
            mappings.left = left;
        }
        // Open, they would keep their groups in the containers.
        drop(self.devices);
        Ok(self.space.close()?)
    }
}

/// The devices with a driver here, which copies.
fn copiers(devices: &[Used]) -> impl Iterator<Item = &Used> {
    devices.iter().filter(|used| used.shown.id == edu::ID)
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
    fn each_device_is_found_once_and_a_group_has_the_node_of_its_first_device_with_one() {
        let device = |address: &str, group, node| DeviceReport {
            address: address.into(),
            group: Some(group),
            node,
            ways: vec![Way::Type1],
            ..DeviceReport::default()
        };
        let machine = DevicesReport {
            vfio: true,
            devices: vec![
                device("0000:00:05.0", 7, None),
                device("0000:00:05.1", 7, Some(1)),
                device("0000:00:05.2", 7, Some(0)),
                device("0000:00:06.0", 8, None),
            ],
            ..DevicesReport::default()
        };
        assert_eq!(machine.node_of_group(7), Some(1));
        assert_eq!([8, 9].map(|group| machine.node_of_group(group)), [None; 2]);
        let find = |addresses: &[&str]| {
            let addresses: Vec<String> = addresses.iter().map(|name| name.to_string()).collect();
            let found = find(&machine, &addresses, Way::Type1)?;
            Ok::<_, JobError>(found.into_iter().map(|shown| shown.address).collect())
        };
        let both: Vec<String> = find(&["00:06.0", "0000:00:05.1"]).unwrap();
        assert_eq!(both, ["0000:00:06.0", "0000:00:05.1"]);
        let twice = find(&["00:06.0", "0000:00:06.0"]).unwrap_err();
        assert_eq!(twice.to_string(), "0000:00:06.0 is named twice");
        assert!(matches!(find(&["00:07.0"]), Err(JobError::NotReady(_))));
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
