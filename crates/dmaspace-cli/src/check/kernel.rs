//! The check over mappings of the kernel: containers of VFIO's type 1, or an address space of iommufd, for devices that
//! are bound to vfio-pci.
//!
//! The kernel pins, finds the runs and fills its tables in one call. The devices do no DMA: nothing here knows their
//! registers. What an interface lacks is tried all the same; it must be refused by name, and nothing may have changed.

use std::sync::Arc;

use dmaspace::devices::{DeviceReport, DevicesReport, Places, Way};
use hostmem::{Backing, Mapping};
use ioas::iommufd::{BoundDevice, Iommufd, Owner, Space, SpaceMapper};
use ioas::vfio::{Device, Group, Type1};
use ioas::{
    AttachError, Capability, Endpoint, HostMemory, Ioas, KernelError, Ledger, MapError, Memory,
    Placement, Tracking, TrackingError, UnmapError, Unsupported,
};
use iommu::NodeId;
use iopt::{Interruption, Pending, Prot};
use runs::{Bytes, Iova, Span};

use super::job::{Clock, Steps, timed};
use super::memory::Account;
use super::report::{
    CheckReport, Counted, DeviceUsed, DomainReport, Done, KernelReport, Left, PlacementReport,
    Refused, Step, TimesReport, WindowReport,
};
use super::{CheckError, CheckJob, PAGE, Watch, times};
use crate::sentence;
use crate::size::counted;

/// Mappings of the kernel end at its multiples, so that the largest leaf stays possible and that a map can be stopped
/// between two of them. Memory begins at multiples of the largest power of two in its length, up to this.
const GRANULE: u64 = 1 << 30;
/// At most this much is mapped to meet a limit.
const MOST_OVER: u64 = 1 << 30;

/// Devices of the machine in an empty address space of the kernel.
pub(super) struct Interface {
    // Dropped in this order: a group stays in its container while a device of it is open.
    devices: Vec<(Opened, DeviceReport)>,
    space: Ioas,
    attach_ns: u64,
}

/// An open device, which is only kept.
#[expect(dead_code, reason = "open, it stays attached")]
enum Opened {
    OfGroup(Device),
    Bound(Arc<BoundDevice>),
}

impl Interface {
    /// The devices at `addresses` with their groups in new containers: one for all, or one for each node.
    pub(super) fn vfio(
        addresses: &[String],
        placement: Option<Placement>,
    ) -> Result<Self, CheckError> {
        let machine = DevicesReport::read(&Places::default())?;
        let found = find(&machine, addresses, Way::Type1)?;
        let mut interface = Self::new(Ioas::over_kernel(Type1::open(Some(GRANULE))), placement)?;
        let mut groups: Vec<(u32, Arc<Group>)> = Vec::new();
        for shown in found {
            let failed = |source| open_failed(&shown, source);
            // A device that is ready has one.
            let number = shown.group.unwrap_or_default();
            let known = groups.iter().find(|(known, _)| *known == number);
            let group = match known {
                Some((_, group)) => Arc::clone(group),
                None => {
                    let group = Group::open(number).map_err(failed)?;
                    if !group.status().map_err(failed)?.viable {
                        // A device of it was bound since it was looked at.
                        return Err(CheckError::Input(format!(
                            "group {number} of {} is not viable: a driver of the host has a device of it",
                            shown.address
                        )));
                    }
                    let group = Arc::new(group);
                    let near = machine.node_of_group(number).map(NodeId);
                    interface.attach(&shown, Endpoint::from(Arc::clone(&group)).near(near))?;
                    groups.push((number, Arc::clone(&group)));
                    group
                }
            };
            let device = group.device(&shown.address).map_err(failed)?;
            // Where iommufd plays the container, only an open device says what can be mapped.
            interface.space.refresh().map_err(failed)?;
            interface.devices.push((Opened::OfGroup(device), shown));
        }
        Ok(interface)
    }

    /// The devices at `addresses`, by their own nodes, with a new address space of iommufd.
    pub(super) fn iommufd(
        addresses: &[String],
        placement: Option<Placement>,
    ) -> Result<Self, CheckError> {
        let machine = DevicesReport::read(&Places::default())?;
        let found = find(&machine, addresses, Way::Iommufd)?;
        let first = found.first().cloned().unwrap_or_default();
        let failed = |source| open_failed(&first, source);
        let owner = Owner::new(Iommufd::open().map_err(failed)?);
        let mapper = SpaceMapper::new(&owner).map_err(failed)?;
        let space = Ioas::over_kernel(Space::new(mapper, Some(GRANULE)));
        let mut interface = Self::new(space, placement)?;
        for shown in found {
            let cdev = shown.cdev.as_deref().unwrap_or("".as_ref());
            let bound = owner.open_device(cdev);
            let bound = Arc::new(bound.map_err(|source| open_failed(&shown, source))?);
            let near = shown.node.map(NodeId);
            interface.attach(&shown, Endpoint::from(Arc::clone(&bound)).near(near))?;
            interface.devices.push((Opened::Bound(bound), shown));
        }
        Ok(interface)
    }

    fn new(space: Ioas, placement: Option<Placement>) -> Result<Self, CheckError> {
        space.set_placement(placement.unwrap_or_default())?;
        Ok(Self {
            devices: Vec::new(),
            space,
            attach_ns: 0,
        })
    }

    fn attach(&mut self, shown: &DeviceReport, endpoint: Endpoint) -> Result<(), CheckError> {
        let (entered, ns): (Result<(), AttachError>, _) = timed(|| self.space.attach(endpoint));
        self.attach_ns += ns;
        entered.map_err(|source| CheckError::enter(&shown.address, source))
    }
}

fn open_failed(shown: &DeviceReport, source: KernelError) -> CheckError {
    let address = shown.address.clone();
    CheckError::Open { address, source }
}

/// The devices, each of which can be used in this way.
fn find(
    machine: &DevicesReport,
    addresses: &[String],
    way: Way,
) -> Result<Vec<DeviceReport>, CheckError> {
    let mut found: Vec<DeviceReport> = Vec::new();
    for address in addresses {
        let shown = machine.ready(address, way)?;
        if found.iter().any(|other| other.address == shown.address) {
            let twice = format!("{} is named twice", shown.address);
            return Err(CheckError::Input(twice));
        }
        found.push(shown.clone());
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
pub(super) struct Kernel<'a> {
    interface: Option<Interface>,
    memory: Arc<Memory>,
    ledger: Arc<Ledger>,
    job: &'a CheckJob,
    account: Account,
    before: Counted,
    range: Span<Iova>,
    tracked: bool,
    report: KernelReport,
    placement: Option<PlacementReport>,
    charged: u64,
    steps: u64,
    counted: Counted,
    times: Vec<TimesReport>,
    left: Left,
}

impl<'a> Kernel<'a> {
    pub(super) fn new(
        job: &'a CheckJob,
        interface: Interface,
        mapping: Arc<Mapping>,
        account: Account,
        before: Counted,
    ) -> Result<Self, CheckError> {
        let ledger = account.ledger()?;
        Ok(Self {
            interface: Some(interface),
            memory: Memory::new(Arc::new(HostMemory::new(mapping)), &ledger),
            ledger,
            job,
            account,
            before,
            range: Span::default(),
            tracked: false,
            report: KernelReport::default(),
            placement: None,
            charged: 0,
            steps: 0,
            counted: Counted::default(),
            times: Vec::new(),
            left: Left::default(),
        })
    }

    /// There is one until the last step.
    fn interface(&self) -> Result<&Interface, CheckError> {
        let ended = || CheckError::Input("the address space has ended".into());
        self.interface.as_ref().ok_or_else(ended)
    }

    fn attach(&mut self) -> Result<Done, CheckError> {
        let interface = self.interface()?;
        let (space, devices) = (&interface.space, &interface.devices);
        let windows = space.windows();
        let done = Done {
            took_ns: interface.attach_ns,
            checked: format!(
                "{}, {}",
                counted(devices.len() as u64, "device"),
                counted(windows.len() as u64, "window")
            ),
            right: !windows.is_empty(),
            ..Done::default()
        };
        let used = |(_, shown): &(Opened, DeviceReport)| DeviceUsed {
            address: shown.address.clone(),
            id: shown.id.clone(),
            group: shown.group,
            unit: shown.unit.clone(),
            node: shown.node,
        };
        let window = |window: &Span<Iova>| WindowReport {
            first: window.start,
            last: window.last(),
        };
        self.report = KernelReport {
            devices: devices.iter().map(used).collect(),
            granule_bytes: space.granule(),
            page_sizes_bytes: space.page_sizes().map(|sizes| sizes.iter().collect()),
            windows: windows.iter().map(window).collect(),
            lacks: space
                .capabilities()
                .missing()
                .map(Capability::name)
                .collect(),
            mappings: 0,
            most_mappings: space.capabilities().most_mappings,
        };
        Ok(done)
    }

    fn map(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let size = self.memory.len();
        let space = &self.interface()?.space;
        let iova = lowest(&space.windows(), size);
        let iova = iova.ok_or(CheckError::Map(MapError::NoRoom { len: size }))?;
        let (in_use, steps) = (self.ledger.in_use(), self.ledger.steps());
        let mut clock = Clock::new(Step::Map, Some(watch));
        let whole = Span::new(0, size);
        let (mapped, took_ns) =
            timed(|| space.map(iova, &self.memory, whole, Prot::RW, &mut clock));
        mapped.map_err(|cause| CheckError::of_map(cause, Step::Map))?;
        let places = space.places();
        let mappings = places.iter().map(|place| place.mappings).sum();
        let domains = places.iter().map(|place| DomainReport {
            node: place.node.map(|node| node.0),
            devices: place.endpoints.len() as u64,
            // Tables of iommufd share what is charged.
            charged_bytes: place.number.is_none().then_some(place.charged),
            ..DomainReport::default()
        });
        self.placement = self.job.placement.map(|policy| PlacementReport {
            policy: policy.to_string(),
            domains: domains.collect(),
            misplaced: Vec::new(),
        });
        self.range = Span::new(iova, size);
        self.charged = self.ledger.in_use() - in_use;
        self.steps = self.ledger.steps() - steps;
        self.counted = Counted::since(self.before)?;
        self.report.mappings = mappings;
        Ok(Done {
            bytes: size,
            took_ns,
            checked: format!(
                "{} charged, {}",
                Bytes(self.charged),
                counted(mappings, "mapping")
            ),
            right: self.charged >= size && mappings > 0,
            ..Done::default()
        })
    }

    /// More is mapped than the limit leaves. The kernel itself is asked: the ledger would refuse it before.
    fn limit(&self) -> Result<Done, CheckError> {
        let nothing = |checked: String| Done {
            checked,
            right: true,
            ..Done::default()
        };
        let Some(left) = self.account.left()? else {
            return Ok(nothing("no limit applies".into()));
        };
        let over = (left + (2 << 20)).next_multiple_of(PAGE);
        if over > MOST_OVER {
            return Ok(nothing(format!("not tried: {} are left", Bytes(left))));
        }
        let space = &self.interface()?.space;
        let mapping = Arc::new(Mapping::new(Backing::Anon4K, over, None)?);
        let memory = Memory::new(Arc::new(HostMemory::new(mapping)), &Ledger::unlimited());
        let whole = Span::new(0, over);
        let behind = self.range.start + self.range.len.next_multiple_of(GRANULE);
        let (mapped, took_ns) = timed(|| space.map(behind, &memory, whole, Prot::RW, &mut ()));
        let refused = mapped.as_ref().err().map(|error| Refused {
            capability: None,
            error: sentence(error),
        });
        if mapped.is_ok() {
            let unmapped = space.unmap(Span::new(behind, over), &mut ());
            unmapped.map_err(CheckError::Unmap)?;
        }
        let same = Counted::since(self.before)? == self.counted;
        Ok(Done {
            bytes: over,
            took_ns,
            checked: "nothing of it is left".into(),
            right: refused.is_some() && same,
            refused,
            ..Done::default()
        })
    }

    /// Nothing that is mapped has changed.
    fn unchanged(&self) -> Result<bool, CheckError> {
        let places = self.interface()?.space.places();
        let mappings: u64 = places.iter().map(|place| place.mappings).sum();
        Ok(mappings == self.report.mappings && Counted::since(self.before)? == self.counted)
    }

    /// A refusal of the back end by name, or what it has done.
    fn tried(
        &self,
        tried: Result<(), Unsupported>,
        took_ns: u64,
        done: &str,
    ) -> Result<Done, CheckError> {
        let refused = tried.err().map(Refused::from);
        let checked = if refused.is_some() {
            "nothing has changed"
        } else {
            done
        };
        Ok(Done {
            took_ns,
            checked: checked.into(),
            right: self.unchanged()?,
            refused,
            ..Done::default()
        })
    }

    /// Tables on a node of the caller's choice, for devices that are attached already.
    fn nodes(&self) -> Result<Done, CheckError> {
        let (space, asked) = (
            &self.interface()?.space,
            self.job.placement.unwrap_or_default(),
        );
        let (placed, took_ns) = timed(|| space.set_placement(Placement::Near(NodeId(0))));
        space.set_placement(asked)?;
        self.tried(placed, took_ns, "possible")
    }

    fn hole(&self) -> Result<Done, CheckError> {
        let space = &self.interface()?.space;
        let hole = Span::new(
            self.range.start + ((self.range.len / 2) & !(PAGE - 1)),
            PAGE,
        );
        let (out, took_ns) = timed(|| space.take_out(hole, Interruption::Refused, &mut ()));
        match out {
            // Memory of a page is a mapping of its own.
            Ok(_) => {
                let back = space.put_back(hole, Interruption::Refused, &mut ());
                back.map_err(CheckError::Map)?;
                self.tried(Ok(()), took_ns, "unmapped and mapped again")
            }
            Err(UnmapError::CutsMapping { cause, .. }) => self.tried(Err(cause), took_ns, ""),
            Err(error) => Err(CheckError::Hole(error)),
        }
    }

    /// Leaves are split for tracking; what cannot be is tracked in leaves as they are.
    fn track(&mut self) -> Result<Done, CheckError> {
        let space = &self.interface()?.space;
        let leaf = Some(PAGE);
        let interruption = Interruption::Refused;
        let tracking = Tracking { leaf, interruption };
        let (tracked, took_ns) = timed(|| space.track_dirty(tracking));
        let split = match tracked {
            Ok(()) => Ok(()),
            Err(TrackingError::Unsupported(cause)) => Err(cause),
            Err(error) => return Err(error.into()),
        };
        let done = self.tried(split, took_ns, "leaves are split")?;
        if split.is_err() {
            space.track_dirty(Tracking::default())?;
        }
        self.tracked = true;
        Ok(done)
    }

    /// Nothing is dirty, since the devices do no DMA; or everything, where the kernel cannot tell.
    fn harvest(&self) -> Result<Done, CheckError> {
        let space = &self.interface()?.space;
        let words = vec![0; (self.range.len / PAGE).div_ceil(64) as usize];
        let mut pending = Pending::new(words, self.range, PAGE)?;
        let (harvested, took_ns) = timed(|| space.harvest(&mut pending));
        let blind = harvested?.blind;
        let shown = space.show(&mut pending)?;
        let bytes: u64 = shown.runs().map(|run| run.len).sum();
        shown.acknowledge();
        let can = space.capabilities();
        let (what, backend) = (Capability::PageDirty, can.backend);
        Ok(Done {
            bytes,
            took_ns,
            checked: match blind {
                true => "all counts as dirty".into(),
                false => format!("{} dirty without DMA", Bytes(bytes)),
            },
            refused: blind.then(|| Unsupported { what, backend }.into()),
            right: bytes == if blind { self.range.len } else { 0 },
            ..Done::default()
        })
    }

    fn merge(&mut self) -> Result<Done, CheckError> {
        let space = &self.interface()?.space;
        let ((), took_ns) = timed(|| space.untrack_dirty());
        let right = !space.tracks_dirty() && self.unchanged()?;
        self.tracked = false;
        Ok(Done {
            took_ns,
            checked: "tracking has ended".into(),
            right,
            ..Done::default()
        })
    }

    fn unmap(&mut self) -> Result<Done, CheckError> {
        let space = &self.interface()?.space;
        let (unmapped, took_ns) = timed(|| space.unmap_all(&mut ()));
        unmapped.map_err(CheckError::Unmap)?;
        let places = space.places();
        let mappings = places.iter().map(|place| place.mappings).sum();
        self.left.mappings = mappings;
        Ok(Done {
            bytes: self.range.len,
            took_ns,
            checked: format!("{} left", counted(mappings, "mapping")),
            right: mappings == 0,
            ..Done::default()
        })
    }

    fn close(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        if self.job.times {
            let space = &self.interface()?.space;
            let (windows, most) = (space.windows(), self.memory.len());
            let start = |size| lowest(&windows, size);
            let times = times::measure(space, start, &self.ledger, &HostMemory::new, most, watch)?;
            self.times = times;
        }
        let (closed, took_ns) = timed(|| match self.interface.take() {
            Some(interface) => {
                // Open, they would keep their groups in the containers.
                drop(interface.devices);
                interface.space.close()
            }
            None => Ok(()),
        });
        closed?;
        self.left.charged_bytes = self.memory.charged();
        self.left.held_bytes = self.memory.held();
        self.left.kernel = Counted::since(self.before)?;
        Ok(Done {
            took_ns,
            checked: "ledger, mappings, kernel: 0".into(),
            right: self.left == Left::default(),
            ..Done::default()
        })
    }
}

impl Steps for Kernel<'_> {
    const ALL: &'static [Step] = &[
        Step::Attach,
        Step::Map,
        Step::Limit,
        Step::Nodes,
        Step::Hole,
        Step::Track,
        Step::Harvest,
        Step::Merge,
        Step::Unmap,
        Step::Close,
    ];

    fn step(&mut self, step: Step, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        match step {
            Step::Attach => self.attach(),
            Step::Map => self.map(watch),
            Step::Limit => self.limit(),
            Step::Nodes => self.nodes(),
            Step::Hole => self.hole(),
            Step::Track => self.track(),
            Step::Harvest => self.harvest(),
            Step::Merge => self.merge(),
            Step::Unmap => self.unmap(),
            Step::Close => self.close(watch),
            _ => Ok(Done::default()),
        }
    }

    fn finish(self, report: &mut CheckReport, _watch: &mut Watch<'_>) -> Result<(), CheckError> {
        let memory = &mut report.memory;
        (memory.addresses, memory.addresses_reason) = ("kernel", "the kernel's".into());
        memory.pin = "kernel".into();
        memory.counter = self.ledger.counter();
        (memory.charged_bytes, memory.charge_steps) = (self.charged, self.steps);
        memory.mapped = self.counted;
        report.kernel = Some(self.report);
        report.placement = self.placement;
        (report.times, report.left) = (self.times, self.left);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmaspace::devices::NotReady;

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
        assert!(
            matches!(absent, CheckError::NotReady(NotReady::Unknown { .. })),
            "{absent}"
        );
    }
}
