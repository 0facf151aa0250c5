//! Faults on purpose: each cause that this machine can have, with the words of its kernel.
//!
//! A test provokes one cause, waits until the kernel has said so, and has the host [keep](crate::host::keep) what a user
//! would have, beside the finding that is right. `cargo xtask guests --keep DIRECTORY` writes these files; the tests of the program
//! explain those of its `tests/provoked` without a guest.
//!
//! Findings are those of the unit's specification: VT-d, section 7.1.3, reasons 0x05 and 0x06 do not tell an entry that
//! is absent from one without permission, and neither do the page faults of the RISC-V IOMMU (section 3.2); AMD
//! (48882, section 2.5), the SMMU (IHI 0070, section 7.3) and the first stage of VT-d do.

mod case;
mod layout;
mod monitor;
mod start;

pub(crate) use layout::{beyond_the_aperture, memlock, reserved};
pub(crate) use monitor::{
    group as monitor_group, mappings as monitor_mappings, memlock as monitor_memlock,
    node as monitor_node, pool as monitor_pool, width as monitor_width,
};
pub(crate) use start::{firmware, options};

use std::{fs, sync::Arc, thread, time::Duration};

use anyhow::Context as _;
use guest::{
    benchmark::{Domain, Linux},
    machines::{EDU, Machine, Unit, bdf, provoked::MANY},
};
use hostmem::Backing;
use iopt::Prot;
use runs::Span;

use crate::{
    dma::{IOVA, memory},
    edu::{BUFFER, Edu},
    host_edu::HostEdu,
    pci::Device,
    space::{Interface as _, Iommufd, Space},
};
use case::{Case, Expected, groups};

/// Where Linux's allocator of addresses begins: below 4 GiB, downwards.
const ALLOCATED: u64 = 0xffff_f000;
const PAGE: u64 = 4096;

/// End of a walk.
#[derive(Clone, Copy)]
enum Entry {
    Absent,
    Denies,
}

/// The cause by which a unit reports the end of its walk.
fn reported(unit: Unit, entry: Entry) -> &'static str {
    match (unit, entry) {
        (Unit::Intel | Unit::IntelSecond | Unit::RiscV | Unit::Virtio, _) => "fault.no-access",
        (_, Entry::Absent) => "fault.not-mapped",
        (_, Entry::Denies) => "fault.permission",
    }
}

/// Access that is reported with a fault of this write.
const fn write_as(unit: Unit, entry: Entry) -> &'static str {
    match (unit, entry) {
        // RW is valid only with PR.
        (Unit::Amd, Entry::Absent) => "unknown",
        _ => "write",
    }
}

/// Bytes of a write that is one access of the bus, and so one fault.
const ACCESS: u64 = 4;

/// Device as it is named where the kernel's lines have its number only.
fn named(machine: &Machine) -> anyhow::Result<String> {
    Ok(match machine.unit {
        Unit::RiscV => format!("{:#x}", bdf(EDU).context("no address")?),
        _ => EDU.to_owned(),
    })
}

/// Word of the line that each fault has.
const fn word(unit: Unit) -> &'static str {
    match unit {
        Unit::Intel | Unit::IntelSecond | Unit::IntelFirst => "fault reason",
        Unit::Amd => "Event logged",
        Unit::Smmu1 | Unit::Smmu2 => " received:",
        Unit::RiscV => "Fault ",
        Unit::Virtio => "fault",
    }
}

impl Case {
    /// The finding of a write that ends at an entry.
    fn reports(&mut self, machine: &Machine, entry: Entry, address: u64) -> anyhow::Result<()> {
        let cause = reported(machine.unit, entry);
        let access = write_as(machine.unit, entry);
        self.reports_as(machine, cause, access, Some(address))
    }

    fn reports_as(
        &mut self,
        machine: &Machine,
        cause: &'static str,
        access: &'static str,
        address: Option<u64>,
    ) -> anyhow::Result<()> {
        self.expect(Expected {
            device: Some(named(machine)?),
            address,
            access: Some(access),
            count: Some(1),
            ..Expected::new(cause)
        });
        Ok(())
    }

    /// The page was mapped until recently: VT-d's driver dumps the entries, of which only the last is absent. Where nothing
    /// tells the level, the lines fit other causes as well.
    fn unmapped(&mut self, machine: &Machine) {
        match machine.unit {
            Unit::Intel | Unit::IntelSecond | Unit::IntelFirst => {
                self.expect(Expected::new("fault.use-after-unmap"));
            }
            Unit::RiscV => self.allow(&["fault.wrong-direction"]),
            _ => {}
        }
    }

    fn faulted(mut self, machine: &Machine) -> anyhow::Result<()> {
        if matches!(
            machine.unit,
            Unit::Intel | Unit::IntelSecond | Unit::IntelFirst
        ) {
            // A dump is no cause of its own.
            self.allow(&["table.explains-fault"]);
        }
        self.end(1, word(machine.unit))
    }
}

/// A machine where all is well.
pub(crate) fn nothing(machine: &Machine) -> anyhow::Result<()> {
    let mut case = Case::since_the_start("nothing")?;
    for (file, path) in [("cmdline", "/proc/cmdline"), ("iomem", "/proc/iomem")] {
        case.file(file, path)?;
    }
    let group = Device(EDU).path("iommu_group/reserved_regions");
    case.file("reserved_regions", &group.display().to_string())?;
    case.text("groups.txt", &groups()?)?;
    if machine.unit == Unit::Amd {
        // QEMU's table has none without remapping of interrupts.
        case.expect(Expected::new("firmware.ioapic-missing"));
    }
    case.end(1, "Linux version")
}

fn open() -> anyhow::Result<(Space<Iommufd>, Edu)> {
    let space = Space::open(Device(EDU))?;
    let edu = Edu::new(space.device()?)?;
    Ok((space, edu))
}

pub(crate) fn never_mapped(machine: &Machine) -> anyhow::Result<()> {
    let (_space, edu) = open()?;
    let mut case = Case::new("never-mapped")?;
    case.reports(machine, Entry::Absent, IOVA)?;
    edu.write(IOVA, ACCESS)?;
    case.faulted(machine)
}

pub(crate) fn after_unmap(machine: &Machine) -> anyhow::Result<()> {
    let (mut space, edu) = open()?;
    let pages = memory(Backing::Anon4K, 4 * PAGE)?;
    let start = ALLOCATED - 3 * PAGE;
    space.map_host(start, &pages, Prot::RW)?;
    edu.write(start, BUFFER)?;
    space.unmap(Span::new(start, 4 * PAGE))?;
    let mut case = Case::new("after-unmap")?;
    case.reports(machine, Entry::Absent, start)?;
    case.unmapped(machine);
    edu.write(start, ACCESS)?;
    case.faulted(machine)
}

pub(crate) fn read_only(machine: &Machine) -> anyhow::Result<()> {
    let (mut space, edu) = open()?;
    let pages = memory(Backing::Anon4K, 4 * PAGE)?;
    let start = ALLOCATED - 3 * PAGE;
    space.map_host(start, &pages, Prot::READ)?;
    let mut case = Case::new("read-only")?;
    // No read before: QEMU reports no fault of a write that an entry of its IOTLB denies.
    case.reports(machine, Entry::Denies, start)?;
    case.expect(Expected::new("fault.wrong-direction"));
    edu.write(start, ACCESS)?;
    case.faulted(machine)
}

pub(crate) fn null(machine: &Machine) -> anyhow::Result<()> {
    let (_space, edu) = open()?;
    let mut case = Case::new("null")?;
    case.reports(machine, Entry::Absent, 0)?;
    case.expect(Expected::new("fault.null-address"));
    edu.write(0, ACCESS)?;
    case.faulted(machine)
}

/// Address of memory that lies apart from those that the allocator gives: a quarter into the largest part.
fn physical() -> anyhow::Result<u64> {
    let iomem = fs::read_to_string("/proc/iomem")?;
    let parts = iomem.lines().filter(|line| line.ends_with(": System RAM"));
    let parts = parts.filter_map(|line| {
        let (first, last) = line.split_once(" : ")?.0.trim().split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(first)?, number(last)?))
    });
    let largest = parts.max_by_key(|(first, last)| last - first);
    let (first, last) = largest.context("no memory")?;
    Ok((first + (last - first) / 4) & !0xf_ffff)
}

pub(crate) fn physical_address(machine: &Machine) -> anyhow::Result<()> {
    let (_space, edu) = open()?;
    let address = physical()?;
    let mut case = Case::new("physical")?;
    case.reports(machine, Entry::Absent, address)?;
    case.expect(Expected::new("fault.physical-address"));
    case.file("iomem", "/proc/iomem")?;
    edu.write(address, ACCESS)?;
    case.faulted(machine)
}

pub(crate) fn beyond_the_width(machine: &Machine) -> anyhow::Result<()> {
    let (_space, edu) = open()?;
    let address = 1 << 60;
    let mut case = Case::new("beyond-the-width")?;
    let (cause, access) = match machine.unit {
        Unit::Intel | Unit::IntelSecond | Unit::IntelFirst => ("fault.address-width", "write"),
        unit => (reported(unit, Entry::Absent), write_as(unit, Entry::Absent)),
    };
    case.reports_as(machine, cause, access, Some(address))?;
    edu.write(address, ACCESS)?;
    case.faulted(machine)
}

/// Bound to iommufd and not attached: the kernel blocks all that the device does.
pub(crate) fn no_domain(machine: &Machine) -> anyhow::Result<()> {
    let device = Device(EDU);
    device.bind_to_vfio()?;
    let file = Iommufd::file()?;
    let bound = Arc::new(Iommufd::attachable(&file, device)?);
    let edu = Edu::new(&*Iommufd::device(&bound, device)?)?;
    let mut case = Case::new("no-domain")?;
    // RISC-V reports no direction with this cause.
    let access = match machine.unit {
        Unit::RiscV => "unknown",
        _ => "write",
    };
    case.reports_as(machine, "fault.device-entry", access, Some(IOVA))?;
    edu.write(IOVA, ACCESS)?;
    case.faulted(machine)
}

/// A message of a remappable interrupt whose entry is not there (VT-d, section 5.1.2.2: address bit 4, index in bits 19:5).
pub(crate) fn interrupt(machine: &Machine) -> anyhow::Result<()> {
    let (_space, edu) = open()?;
    let mut case = Case::new("interrupt")?;
    // QEMU gives the unit no source of the message.
    case.expect(Expected {
        count: Some(1),
        ..Expected::new("fault.interrupt-request")
    });
    edu.write(0xfee0_0000 | 0x7123 << 5 | 1 << 4 | 1 << 3, 4)?;
    case.faulted(machine)
}

/// A device of the host without VFIO.
fn host_edu() -> anyhow::Result<HostEdu> {
    Device(EDU).unbind()?;
    HostEdu::open(Device(EDU))
}

pub(crate) fn host_physical(machine: &Machine) -> anyhow::Result<()> {
    let edu = host_edu()?;
    let address = physical()?;
    let mut case = Case::new("host-physical")?;
    case.reports(machine, Entry::Absent, address)?;
    case.expect(Expected::new("fault.physical-address"));
    case.file("iomem", "/proc/iomem")?;
    edu.begin_write(address, ACCESS);
    edu.end()?;
    case.faulted(machine)
}

/// The kernel's driver unmaps its buffer, and the device goes on.
fn host_unmapped(machine: &Machine, domain: Domain, name: &'static str) -> anyhow::Result<()> {
    Device(EDU).unbind()?;
    let linux = Linux::new(domain)?;
    let edu = HostEdu::open(Device(EDU))?;
    linux.run(1, PAGE)?;
    // Longer than unmapped addresses wait for an invalidation.
    thread::sleep(Duration::from_millis(100));
    let mut case = Case::new(name)?;
    case.reports(machine, Entry::Absent, ALLOCATED)?;
    case.unmapped(machine);
    edu.begin_write(ALLOCATED, ACCESS);
    edu.end()?;
    case.faulted(machine)?;
    drop(linux);
    fs::write(Device(EDU).path("driver_override"), "\n")?;
    Ok(())
}

pub(crate) fn host_unmapped_strict(machine: &Machine) -> anyhow::Result<()> {
    host_unmapped(machine, Domain::Strict, "host-unmapped-strict")
}

pub(crate) fn host_unmapped_lazy(machine: &Machine) -> anyhow::Result<()> {
    host_unmapped(machine, Domain::Lazy, "host-unmapped-lazy")
}

/// Writes of each of [`MANY`] in a flood.
const WRITES: u64 = 20;

/// More faults than the kernel prints: the count is right, or a lower bound.
pub(crate) fn flood(machine: &Machine) -> anyhow::Result<()> {
    let opened = MANY.map(|device| HostEdu::open(Device(device)));
    let devices: Vec<HostEdu> = opened.into_iter().collect::<Result<_, _>>()?;
    let mut case = Case::new("flood")?;
    for nth in 0..WRITES {
        for edu in &devices {
            edu.begin_write(IOVA + nth * PAGE, ACCESS);
        }
        for edu in &devices {
            edu.end()?;
        }
    }
    // The kernel says how many messages it suppressed when the next one comes.
    thread::sleep(Duration::from_secs(6));
    devices[0].begin_write(IOVA, ACCESS);
    devices[0].end()?;
    let provoked = WRITES * devices.len() as u64 + 1;
    let cause = reported(machine.unit, Entry::Absent);
    case.expect(Expected {
        count: Some(provoked),
        ..Expected::new(cause)
    });
    case.allow(&["table.explains-fault"]);
    case.end(3, word(machine.unit))
}
