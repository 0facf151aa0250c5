//! Faults on purpose: each cause that this machine can have, with the words of its kernel.
//!
//! A test provokes one cause, waits until the kernel has said so, and has the host [keep](crate::host::keep) what a user
//! would have, beside the finding that is right. `cargo xtask faults` writes these files to the tests of the program,
//! which explains them there without a guest.
//!
//! Findings are those of the unit's specification: VT-d, section 7.1.3, reasons 0x05 and 0x06 do not tell an entry that
//! is absent from one without permission, and neither do the page faults of the RISC-V IOMMU (section 3.2); AMD
//! (48882, section 2.5), the SMMU (IHI 0070, section 7.3) and the first stage of VT-d do.

mod case;
#[allow(unsafe_code)]
mod registers;

use std::{fs, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, ensure};
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
    pci::Device,
    space::{Interface as _, Iommufd, Space},
};
use case::{Case, Expected, groups};
use registers::HostEdu;

/// Where Linux's allocator of addresses begins: below 4 GiB, downwards.
const ALLOCATED: u64 = 0xffff_f000;
const PAGE: u64 = 4096;

/// Whether an entry is there.
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

/// Device as a kernel's lines name it.
fn named(machine: &Machine, device: &'static str) -> anyhow::Result<&'static str> {
    let number = bdf(device).context("no address")?;
    Ok(match machine.unit {
        // By the number of its stream or of the device.
        Unit::RiscV | Unit::Smmu1 | Unit::Smmu2 => {
            Box::leak(format!("{number:#x}").into_boxed_str())
        }
        _ => device,
    })
}

/// Word of the lines that a fault has, and lines for each.
const fn lines(unit: Unit) -> &'static str {
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
            device: Some(named(machine, EDU)?),
            address,
            access: Some(access),
            count: Some(1),
            ..Expected::new(cause)
        });
        Ok(())
    }

    fn faulted(self, machine: &Machine) -> anyhow::Result<()> {
        self.end(1, lines(machine.unit))
    }
}

/// What a machine says of itself while all is well.
pub(crate) fn nothing(_: &Machine) -> anyhow::Result<()> {
    let mut case = Case::since_the_start("nothing")?;
    for (file, path) in [
        ("cmdline", "/proc/cmdline"),
        ("iomem", "/proc/iomem"),
        ("version", "/proc/version"),
    ] {
        case.file(file, path)?;
    }
    let group = Device(EDU).path("iommu_group/reserved_regions");
    case.file("reserved_regions", &group.display().to_string())?;
    case.text("groups.txt", &groups()?)?;
    case.end(1, "IOMMU")
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
    edu.write(IOVA, 8)?;
    case.faulted(machine)
}

/// Causes that a page that is gone, one that is read-only and a first page have in common where a unit tells less.
const PAGES: &[&str] = &["fault.use-after-unmap", "fault.wrong-direction"];

pub(crate) fn after_unmap(machine: &Machine) -> anyhow::Result<()> {
    let (mut space, edu) = open()?;
    let pages = memory(Backing::Anon4K, 4 * PAGE)?;
    let start = ALLOCATED - 3 * PAGE;
    space.map_host(start, &pages, Prot::RW)?;
    edu.write(start, BUFFER)?;
    space.unmap(Span::new(start, 4 * PAGE))?;
    let mut case = Case::new("after-unmap")?;
    case.reports(machine, Entry::Absent, start)?;
    case.expect(Expected::new("fault.use-after-unmap"));
    case.allow(PAGES);
    edu.write(start, 8)?;
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
    case.allow(PAGES);
    edu.write(start, 8)?;
    case.faulted(machine)
}

pub(crate) fn null(machine: &Machine) -> anyhow::Result<()> {
    let (_space, edu) = open()?;
    let mut case = Case::new("null")?;
    case.reports(machine, Entry::Absent, 0x10)?;
    case.expect(Expected::new("fault.null-address"));
    edu.write(0x10, 8)?;
    case.faulted(machine)
}

/// First page of a megabyte in the middle of the largest part of memory.
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
    Ok((first + (last - first) / 2) & !0xf_ffff)
}

pub(crate) fn physical_address(machine: &Machine) -> anyhow::Result<()> {
    let (_space, edu) = open()?;
    let address = physical()?;
    let mut case = Case::new("physical")?;
    case.reports(machine, Entry::Absent, address)?;
    case.expect(Expected::new("fault.physical-address"));
    case.file("iomem", "/proc/iomem")?;
    edu.write(address, 8)?;
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
    edu.write(address, 8)?;
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
    let (cause, access) = match machine.unit {
        // Mode 0 without permissions is a valid entry (48882, section 2.2.2.1).
        Unit::Amd => ("fault.permission", "write"),
        _ => ("fault.device-entry", "write"),
    };
    case.reports_as(machine, cause, access, Some(IOVA))?;
    edu.write(IOVA, 8)?;
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
    edu.begin_write(address, 8);
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
    case.expect(Expected::new("fault.use-after-unmap"));
    case.allow(PAGES);
    edu.begin_write(ALLOCATED, 8);
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
            edu.begin_write(IOVA + nth * PAGE, 8);
        }
        for edu in &devices {
            edu.end()?;
        }
    }
    // The kernel says how many messages it suppressed when the next one comes.
    thread::sleep(Duration::from_secs(6));
    devices[0].begin_write(IOVA, 8);
    devices[0].end()?;
    let provoked = WRITES * devices.len() as u64 + 1;
    let cause = reported(machine.unit, Entry::Absent);
    ensure!(provoked > 100, "no flood");
    case.expect(Expected {
        count: Some(provoked),
        ..Expected::new(cause)
    });
    case.end(3, lines(machine.unit))
}
