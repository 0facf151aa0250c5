//! The check over mappings of the kernel: containers of VFIO's type 1, or an address space of iommufd, for devices that
//! are bound to vfio-pci.
//!
//! The kernel pins, finds the runs and fills its tables in one call. The devices do no DMA: nothing here knows their
//! registers. Operations that an interface lacks are tried all the same; they must be refused by name, and nothing may
//! have changed.

use std::sync::Arc;

use dmaspace::devices::{DeviceReport, DevicesReport, Places, Way};
use hostmem::{Backing, Mapping};
use ioas::iommufd::{BoundDevice, Iommufd, RlimitMode};
use ioas::vfio::{Group, Type1, VfioDevice};
use ioas::{
    Capability, Endpoint, HostMemory, Ioas, Ledger, MapError, Memory, OpenSpace, Placement,
    Tracking, TrackingError, UnmapError, Unsupported,
};
use iommu::NodeId;
use iopt::{Interruption, Prot};
use runs::{Bytes, Iova, Span};

use super::error::hint;
use super::job::{Job, StepOf, dirty, timed};
use super::memory::{Account, take};
use super::report::{DomainReport, Done, KernelReport, Refused, Step, WindowReport};
use super::{Backend, Because as _, CheckError, PAGE, times};
use crate::output::sentence;
use crate::size::counted;

/// Mappings of the kernel end at its multiples, so that the largest leaf stays possible and that a map can be stopped
/// between two of them. Memory begins at multiples of the largest power of two in its length, up to this.
const GRANULE: u64 = 1 << 30;
/// At most this much is mapped to meet a limit.
const MOST_OVER: u64 = 1 << 30;

/// All steps but the first and the last.
const STEPS: &[StepOf<Kernel>] = &[
    (Step::Attach, Kernel::attached),
    (Step::Map, Kernel::map),
    (Step::Limit, Kernel::limit),
    (Step::Nodes, Kernel::nodes),
    (Step::Hole, Kernel::hole),
    (Step::Track, Kernel::track),
    (Step::Harvest, Kernel::harvest),
    (Step::Merge, Kernel::merge),
    (Step::Unmap, Kernel::unmap),
];

pub(super) fn check(job: &mut Job<'_>) -> Result<(), CheckError> {
    let addresses = &job.asked.devices;
    let machine = DevicesReport::read(&Places::default()).failed("cannot list devices")?;
    // A container of type 1 counts by process, iommufd by user.
    let (attached, mode) = match job.asked.backend {
        Backend::Iommufd => {
            let found = find(&machine, addresses, Way::Iommufd)?;
            (Attached::iommufd(found, job)?, RlimitMode::User)
        }
        _ => {
            let found = find(&machine, addresses, Way::Type1)?;
            (Attached::vfio(&machine, found, job)?, RlimitMode::Process)
        }
    };
    let account = Account::of_kernel(mode)?;
    let mapping = take(job, &account)?;
    let memory = &mut job.report.memory;
    (memory.addresses, memory.addresses_reason) = ("kernel", "the kernel's".into());
    memory.pin = "kernel".into();
    let ledger = account.ledger()?;
    let mut kernel = Kernel {
        memory: Memory::new(Arc::new(HostMemory::new(mapping)), &ledger),
        ledger,
        account,
        attached,
        range: Span::default(),
        mappings: 0,
    };
    for (step, work) in STEPS {
        job.step(*step, |job| work(&mut kernel, job))?;
    }
    let (space, size) = (&kernel.attached.space, kernel.memory.len());
    if job.asked.times {
        let windows = space.windows();
        let start = |size| lowest(&windows, size);
        times::measure(space, start, &kernel.ledger, &HostMemory::new, size, job)?;
    }
    job.step(Step::Close, |job| {
        // Open, they would keep their groups in the containers.
        drop(kernel.attached.devices);
        let space = Some(kernel.attached.space);
        job.close(space, &kernel.memory, || 0, "ledger, mappings, kernel: 0")
    })
}

/// Devices of the machine in an empty address space of the kernel.
struct Attached {
    // Dropped in this order: a group stays in its container while a device of it is open.
    devices: Vec<(Opened, DeviceReport)>,
    space: Ioas,
    took_ns: u64,
}

/// An open device, which is only kept.
#[expect(dead_code, reason = "open, it stays attached")]
enum Opened {
    OfGroup(VfioDevice),
    Bound(Arc<BoundDevice>),
}

fn cannot_open(device: &DeviceReport) -> String {
    format!("cannot open {}", device.address)
}

impl Attached {
    /// The devices with their groups in new containers: one for all, or one for each node.
    fn vfio(
        machine: &DevicesReport,
        found: Vec<DeviceReport>,
        job: &Job<'_>,
    ) -> Result<Self, CheckError> {
        let first = found.first().map(cannot_open).unwrap_or_default();
        let type1 = Type1::open().refused(&first)?;
        let mut attached = Self::over(&type1, job)?;
        let mut groups: Vec<(u32, Arc<Group>)> = Vec::new();
        for device in found {
            // A device that is ready has one.
            let number = device.group.unwrap_or_default();
            let known = groups.iter().find(|(known, _)| *known == number);
            let group = match known {
                Some((_, group)) => Arc::clone(group),
                None => {
                    let group = Group::open(number).refused(cannot_open(&device))?;
                    if !group.status().refused(cannot_open(&device))?.viable {
                        // A device of it was bound since it was looked at.
                        return Err(CheckError::Input(format!(
                            "group {number} of {} is not viable: a driver of the host has a device of it",
                            device.address
                        )));
                    }
                    let group = Arc::new(group);
                    let near = machine.node_of_group(number).map(NodeId);
                    attached.attach(&device, Endpoint::from(Arc::clone(&group)).near(near))?;
                    groups.push((number, Arc::clone(&group)));
                    group
                }
            };
            let open = group
                .device(&device.address)
                .refused(cannot_open(&device))?;
            // Where iommufd plays the container, only an open device says what can be mapped.
            attached.space.refresh().refused(cannot_open(&device))?;
            attached.devices.push((Opened::OfGroup(open), device));
        }
        Ok(attached)
    }

    /// The devices, by their own nodes, with a new address space of iommufd.
    fn iommufd(found: Vec<DeviceReport>, job: &Job<'_>) -> Result<Self, CheckError> {
        let first = found.first().map(cannot_open).unwrap_or_default();
        let iommufd = Iommufd::open().refused(&first)?;
        let mut attached = Self::over(&iommufd, job)?;
        for device in found {
            let bound = iommufd.open_device(device.cdev.as_deref().unwrap_or("".as_ref()));
            let bound = Arc::new(bound.refused(cannot_open(&device))?);
            let near = device.node.map(NodeId);
            attached.attach(&device, Endpoint::from(Arc::clone(&bound)).near(near))?;
            attached.devices.push((Opened::Bound(bound), device));
        }
        Ok(attached)
    }

    fn over(opened: &impl OpenSpace, job: &Job<'_>) -> Result<Self, CheckError> {
        let placement = job.asked.placement.unwrap_or_default();
        let options = Ioas::options().granule(GRANULE).placement(placement);
        Ok(Self {
            devices: Vec::new(),
            space: options.over(opened).map_err(CheckError::input)?,
            took_ns: 0,
        })
    }

    fn attach(&mut self, device: &DeviceReport, endpoint: Endpoint) -> Result<(), CheckError> {
        let (entered, ns) = timed(|| self.space.attach(endpoint));
        self.took_ns += ns;
        entered.map_err(|source| CheckError::Refused {
            what: format!("cannot attach {}{}", device.address, hint(&source)),
            source: source.into(),
        })
    }
}

/// The devices, each of which can be used in this way.
fn find(
    machine: &DevicesReport,
    addresses: &[String],
    way: Way,
) -> Result<Vec<DeviceReport>, CheckError> {
    let mut found: Vec<DeviceReport> = Vec::new();
    for address in addresses {
        let ready = machine.ready(address, way);
        let device = ready.map_err(CheckError::input)?;
        if found.iter().any(|other| other.address == device.address) {
            let twice = format!("{} is named twice", device.address);
            return Err(CheckError::Input(twice));
        }
        found.push(device.clone());
    }
    Ok(found)
}

/// The lowest address for `size` bytes at which large leaves are possible; never in the first page.
fn lowest(windows: &[Span<Iova>], size: u64) -> Option<u64> {
    let align = (1u64 << size.checked_ilog2()?).clamp(PAGE, GRANULE);
    windows.iter().find_map(|window| {
        let start = window.start.max(PAGE).checked_next_multiple_of(align)?;
        let all = Span::checked(start, size)?;
        window.covers(&all).then_some(start)
    })
}

/// Everything that is there while it is mapped.
struct Kernel {
    attached: Attached,
    memory: Arc<Memory>,
    ledger: Arc<Ledger>,
    account: Account,
    range: Span<Iova>,
    mappings: u64,
}

impl Kernel {
    fn attached(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let (space, devices) = (&self.attached.space, &self.attached.devices);
        let (windows, can) = (space.windows(), space.capabilities());
        let devices: Vec<_> = devices.iter().map(|(_, device)| device.clone()).collect();
        let number = counted(devices.len() as u64, "device");
        let checked = format!("{number}, {}", counted(windows.len() as u64, "window"));
        let window = |window: &Span<Iova>| WindowReport {
            first: window.start,
            last: window.last(),
        };
        job.report.kernel = Some(KernelReport {
            devices,
            granule_bytes: space.granule(),
            page_sizes_bytes: space.page_sizes().map(|sizes| sizes.iter().collect()),
            windows: windows.iter().map(window).collect(),
            lacks: can.missing().map(Capability::name).collect(),
            mappings: 0,
            most_mappings: can.most_mappings,
        });
        Ok(Done::new(
            0,
            self.attached.took_ns,
            !windows.is_empty(),
            checked,
        ))
    }

    fn map(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let (space, size) = (&self.attached.space, self.memory.len());
        let iova = lowest(&space.windows(), size).ok_or(MapError::NoRoom { len: size });
        let iova = iova.map_err(|cause| CheckError::of_map(cause, Step::Map))?;
        let (mapped, took_ns) = timed(|| job.map(space, iova, &self.memory, &self.ledger));
        mapped?;
        self.range = Span::new(iova, size);
        self.mappings = self.mapped_now();
        job.place(space, Vec::new(), |place| {
            Ok(DomainReport {
                // Tables of iommufd share what is charged.
                charged_bytes: place.number.is_none().then_some(place.charged),
                ..DomainReport::default()
            })
        })?;
        if let Some(report) = &mut job.report.kernel {
            report.mappings = self.mappings;
        }
        let charged = job.report.memory.charged_bytes;
        let right = charged >= size && self.mappings > 0;
        let mappings = counted(self.mappings, "mapping");
        let checked = format!("{} charged, {mappings}", Bytes(charged));
        Ok(Done::new(size, took_ns, right, checked))
    }

    /// Mappings of the kernel.
    fn mapped_now(&self) -> u64 {
        let places = self.attached.space.places();
        places.iter().map(|place| place.mappings).sum()
    }

    /// More is mapped than the limit leaves. The kernel itself is asked: the ledger would refuse it before.
    fn limit(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let Some(left) = self.account.left()? else {
            return Ok(Done::new(0, 0, true, "no limit applies"));
        };
        let over = (left + (2 << 20)).next_multiple_of(PAGE);
        if over > MOST_OVER {
            let checked = format!("not tried: {} are left", Bytes(left));
            return Ok(Done::new(0, 0, true, checked));
        }
        let space = &self.attached.space;
        let mapping = Mapping::new(Backing::Anon4K, over, None).refused("cannot get the memory")?;
        let host = HostMemory::new(Arc::new(mapping));
        let memory = Memory::new(Arc::new(host), &Ledger::unlimited());
        let whole = Span::new(0, over);
        let behind = self.range.start + self.range.len.next_multiple_of(GRANULE);
        let (mapped, took_ns) = timed(|| space.map(behind, &memory, whole, Prot::RW));
        let refused = mapped.err().map(|error| Refused {
            capability: None,
            error: sentence(&error),
        });
        if refused.is_none() {
            let unmapped = space.unmap(Span::new(behind, over));
            unmapped.failed("cannot unmap the memory")?;
        }
        let right = refused.is_some() && job.counted()? == job.report.memory.mapped;
        let done = Done::new(over, took_ns, right, "nothing of it is left");
        Ok(Done { refused, ..done })
    }

    /// A refusal of the back end by name, or what it has done. Nothing that is mapped may have changed.
    fn tried(
        &self,
        tried: Result<(), Unsupported>,
        took_ns: u64,
        checked: &str,
        job: &Job<'_>,
    ) -> Result<Done, CheckError> {
        let right =
            self.mapped_now() == self.mappings && job.counted()? == job.report.memory.mapped;
        let refused = tried.err().map(Refused::from);
        let checked = match refused {
            Some(_) => "nothing has changed",
            None => checked,
        };
        let done = Done::new(0, took_ns, right, checked);
        Ok(Done { refused, ..done })
    }

    /// Tables on a node of the caller's choice, for devices that are attached already.
    fn nodes(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let space = &self.attached.space;
        let (placed, took_ns) = timed(|| space.set_placement(Placement::Near(NodeId(0))));
        let back = space.set_placement(job.asked.placement.unwrap_or_default());
        back.map_err(CheckError::input)?;
        self.tried(placed, took_ns, "possible", job)
    }

    fn hole(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let space = &self.attached.space;
        let middle = self.range.start + ((self.range.len / 2) & !(PAGE - 1));
        let hole = Span::new(middle, PAGE);
        let (out, took_ns) = timed(|| space.take_out(hole, Interruption::Refused));
        let tried = match out {
            // Memory of a page is a mapping of its own.
            Ok(_) => {
                let back = space.put_back(hole, Interruption::Refused);
                back.map_err(|cause| CheckError::of_map(cause, Step::Hole))?;
                Ok(())
            }
            Err(UnmapError::CutsMapping { cause, .. }) => Err(cause),
            Err(error) => return Err(error).failed("cannot unmap a page"),
        };
        self.tried(tried, took_ns, "unmapped and mapped again", job)
    }

    /// Leaves are split for tracking; what cannot be is tracked in leaves as they are.
    fn track(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        const TRACK: &str = "cannot track dirty pages";
        let space = &self.attached.space;
        let leaf = Some(PAGE);
        let interruption = Interruption::Refused;
        let (tracked, took_ns) = timed(|| space.track_dirty(Tracking { leaf, interruption }));
        let split = match tracked {
            Ok(()) => Ok(()),
            Err(TrackingError::Unsupported(cause)) => Err(cause),
            Err(error) => return Err(error).failed(TRACK),
        };
        let done = self.tried(split, took_ns, "leaves are split", job)?;
        if split.is_err() {
            space.track_dirty(Tracking::default()).failed(TRACK)?;
        }
        Ok(done)
    }

    /// Nothing is dirty, since the devices do no DMA; or everything, where the kernel cannot tell.
    fn harvest(&mut self, _job: &mut Job<'_>) -> Result<Done, CheckError> {
        let space = &self.attached.space;
        let (harvested, took_ns) = timed(|| dirty(space, self.range));
        let (_, bytes, blind) = harvested?;
        let (what, backend) = (Capability::PageDirty, space.capabilities().backend);
        let checked = match blind {
            true => "all counts as dirty".into(),
            false => format!("{} dirty without DMA", Bytes(bytes)),
        };
        let right = bytes == if blind { self.range.len } else { 0 };
        let refused = blind.then(|| Unsupported { what, backend }.into());
        let done = Done::new(bytes, took_ns, right, checked);
        Ok(Done { refused, ..done })
    }

    fn merge(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let space = &self.attached.space;
        let ((), took_ns) = timed(|| space.untrack_dirty());
        let done = self.tried(Ok(()), took_ns, "tracking has ended", job)?;
        let right = done.right && !space.tracks_dirty();
        Ok(Done { right, ..done })
    }

    fn unmap(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let (unmapped, took_ns) = timed(|| self.attached.space.unmap_all());
        unmapped.failed("cannot unmap the memory")?;
        let mappings = self.mapped_now();
        job.report.left.mappings = mappings;
        let checked = format!("{} left", counted(mappings, "mapping"));
        Ok(Done::new(self.range.len, took_ns, mappings == 0, checked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_goes_to_the_lowest_address_with_room_for_large_leaves() {
        // VT-d's: all but where interrupts go.
        let windows = [
            Span::new(0, 0xfee0_0000),
            Span::new(0xfef0_0000, (1 << 39) - 0xfef0_0000),
        ];
        for (size, expected) in [
            (4096, Some(0x1000)),
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
        // A window to the very end.
        let top = Span::inclusive(1 << 63, u64::MAX).unwrap();
        assert_eq!(lowest(&[top], 1 << 62), Some(1 << 63));
        assert_eq!(lowest(&[], 4096), None);
    }

    #[test]
    fn each_device_is_found_once() {
        let device = |address: &str, group| DeviceReport {
            address: address.into(),
            group: Some(group),
            ways: vec![Way::Type1],
            ..DeviceReport::default()
        };
        let machine = DevicesReport {
            vfio: true,
            devices: vec![device("0000:00:05.1", 7), device("0000:00:06.0", 8)],
            ..DevicesReport::default()
        };
        let find = |addresses: &[&str]| {
            let addresses: Vec<String> = addresses.iter().map(|name| name.to_string()).collect();
            let found = find(&machine, &addresses, Way::Type1)?;
            Ok::<_, CheckError>(found.into_iter().map(|shown| shown.address).collect())
        };
        let both: Vec<String> = find(&["00:06.0", "0000:00:05.1"]).unwrap();
        assert_eq!(both, ["0000:00:06.0", "0000:00:05.1"]);
        let twice = find(&["00:06.0", "0000:00:06.0"]).unwrap_err();
        assert_eq!(twice.to_string(), "0000:00:06.0 is named twice");
        let absent = find(&["00:07.0"]).unwrap_err();
        assert!(absent.is_input(), "{absent}");
        assert!(
            absent
                .to_string()
                .starts_with("no PCI device has the address")
        );
    }
}
