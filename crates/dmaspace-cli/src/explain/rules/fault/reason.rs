//! Reasons that the addresses of a fault tell: page 0, interrupt messages, memory of the host, and the width.

use iommu::log::{Class, Family};

use super::mapping::{allocated, soft_walk};
use super::scanout::is_display;
use super::{MSI, User, for_driver, is_hosts, likely, of_addresses, user, who};
use crate::explain::facts::{Facts, Known};
use crate::explain::finding::{Advice, Certainty, Direction, Finding};
use crate::explain::folds::Fold;

/// Addresses below 4 GiB that the allocator may have given, for windows of PCI are left out of its range, and it goes on
/// below them: Linux 7.2 `drivers/iommu/dma-iommu.c`, `iova_reserve_pci_windows`.
const BELOW_WINDOWS: std::ops::RangeInclusive<u64> = 0xc000_0000..=0xffff_ffff;

/// Interrupts in HyperTransport's address map: AMD 48882 3.08, section 2.1.2, table 3 "Special Address Controls".
const HYPERTRANSPORT: std::ops::RangeInclusive<u64> = 0xfd_f800_0000..=0xfd_f8ff_ffff;

/// Reasons for the faults of one fold.
pub(super) fn reasons(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>) {
    let class = fold.key.class;
    let missing = matches!(
        class,
        Class::NotMapped | Class::NoAccess | Class::Permission
    );
    let all: Vec<u64> = fold.addresses.iter().copied().collect();
    let within = |range: &std::ops::RangeInclusive<u64>| -> Vec<u64> {
        all.iter()
            .copied()
            .filter(|address| range.contains(address))
            .collect()
    };
    if missing && !within(&(0..=0xfff)).is_empty() {
        let finding = likely(fold, "fault.null-address", "PCI Express 6.0, section 2.2.4: a request carries the address that the device was given")
            .say(format!(
                "{} used an address in page 0: a descriptor or register that was never filled, or a message that was \
                 sent as a write. The record cannot tell which; a device without a driver speaks for the message.",
                who(fold)
            ))
            .advise(Advice::text(
                "As a test keep the device's driver from loading (modprobe.blacklist=MODULE): faults that go on come \
                 from the device or its firmware.",
            ));
        found.push(of_addresses(finding, &within(&(0..=0xfff))));
    }
    let mut interrupts = within(&MSI);
    interrupts.extend(within(&HYPERTRANSPORT));
    if class != Class::InterruptRequest
        && class != Class::UnitError
        && fold.key.direction != Direction::Read
        && !interrupts.is_empty()
    {
        let finding = likely(fold, "fault.interrupt-request", "Intel SDM 3, section 12.11.1; AMD 48882 3.08, section 2.1.2")
            .say(format!(
                "{} wrote into the window of interrupt messages: an interrupt that was not remapped rather than DMA to \
                 memory.",
                who(fold)
            ));
        found.push(of_addresses(finding, &interrupts));
    }
    allocated(facts, fold, found, &all);
    soft_walk(facts, fold, found);
    physical(facts, fold, found, &all);
    wide(facts, fold, found, &all);
    ioapic(facts, fold, found);
}

/// All addresses are memory of the host, and none is one that the allocator gives.
fn physical(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>, all: &[u64]) {
    let class = matches!(fold.key.class, Class::NotMapped | Class::NoAccess);
    let ram = |address: &u64| {
        let areas = facts.iomem.iter();
        let mut areas = areas.filter(|one| one.fact.2.trim() == "System RAM");
        areas.find(|one| (one.fact.0..=one.fact.1).contains(address))
    };
    let allocated = |address: &u64| BELOW_WINDOWS.contains(address) || *address < 0x1000;
    if !class || all.is_empty() || !is_hosts(facts, fold) || all.iter().any(allocated) {
        return;
    }
    // A display's framebuffer lies in memory, too. A map with areas of ACPI that only x86 has is of another machine
    // than a unit of an embedded one.
    let x86 = facts
        .iomem
        .iter()
        .any(|one| one.fact.2.trim().starts_with("ACPI "));
    let embedded = !matches!(
        fold.key.family,
        Family::Vtd | Family::AmdVi | Family::Virtio
    );
    if is_display(facts, fold) || x86 && embedded || !facts.of_one_machine() {
        return;
    }
    let areas: Option<Vec<_>> = all.iter().map(ram).collect();
    if let Some(areas) = areas {
        let finding = likely(fold, "fault.physical-address", "Linux Documentation/core-api/dma-api-howto.rst, \"CPU and DMA addresses\"")
            .evidence(areas.into_iter().map(|one| &one.evidence))
            .say(format!(
                "All addresses {}that {} used are System RAM of the host, and none is one that the kernel's allocator \
                 gives: {}likely the device is given physical addresses instead of I/O virtual ones.",
                match fold.more_addresses {
                    0 => "",
                    _ => "of those listed ",
                },
                who(fold),
                match user(facts, fold) {
                    User::Unknown => "if it is not passed through, ",
                    _ => "",
                }
            ));
        let finding = for_driver(
            facts,
            fold,
            finding,
            "In the driver: give the device the address that dma_map_single() or dma_alloc_coherent() returned, never \
             virt_to_phys().",
        );
        found.push(of_addresses(finding, all));
    }
}

/// Addresses beyond a width that another input gives.
fn wide(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>, all: &[u64]) {
    if matches!(
        fold.key.class,
        Class::AddressWidth | Class::UnitError | Class::InterruptRequest | Class::DeviceEntry
    ) {
        return;
    }
    let last = facts.apertures.iter().max_by_key(|one| one.fact.1);
    let known = |one: &&Known<(u64, u64)>| one.fact.1 != u64::MAX && facts.of_one_machine();
    let Some(aperture) = last.filter(known) else {
        return;
    };
    let beyond: Vec<u64> = all
        .iter()
        .copied()
        .filter(|address| *address > aperture.fact.1)
        .collect();
    if !beyond.is_empty() {
        let finding = Finding::certain("fault.address-width", "the aperture that was given")
            .evidence(&fold.evidence)
            .evidence([&aperture.evidence])
            .devices(Some(fold.device.clone()).filter(|device| !device.is_empty()))
            .say(format!(
                "{} used an address beyond {:#x}, the last one that is translated.",
                who(fold),
                aperture.fact.1
            ));
        found.push(of_addresses(finding, &beyond));
    }
}

/// An interrupt of a host function that AMD's unit refuses.
fn ioapic(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>) {
    let device = fold.device.as_str();
    let hosts = device
        .split_once(':')
        .is_some_and(|(_, rest)| rest.starts_with("00:"));
    if fold.key.family != Family::AmdVi || fold.key.class != Class::InterruptRequest || !hosts {
        return;
    }
    let tables: Vec<_> = facts
        .tables
        .iter()
        .filter(|one| one.fact.table.signature == "IVRS")
        .collect();
    let id = requester(device);
    let named = |table: &dmaspace::firmware::FirmwareTable| {
        table
            .interrupt_sources
            .iter()
            .any(|source| Some(source.device) == id)
    };
    let certainty = match tables.as_slice() {
        [] => Certainty::Likely,
        // The table has an entry for this requester: its content may still be wrong, which nothing here shows.
        all if all.iter().any(|one| named(&one.fact.table)) => return,
        _ => Certainty::Certain,
    };
    let finding = Finding::new("firmware.ioapic-missing", certainty, "AMD 48882 3.08, section 5.2.2.6, special device entries; Linux drivers/iommu/amd/init.c, check_ioapic_information")
        .device(device)
        .evidence(&fold.evidence)
        .evidence(tables.iter().map(|one| &one.evidence))
        .say(format!(
            "An interrupt message of {device}, a function of the host itself, was refused: the IVRS {} for an IOAPIC \
             or HPET that sends interrupts.",
            match certainty {
                Certainty::Certain => "has no entry",
                _ => "likely has no entry, or a wrong one,",
            }
        ))
        .advise(Advice::text(
            "A firmware update; until then ivrs_ioapic[ID]=BUS:DEVICE.FUNCTION on the kernel's command line, with the \
             numbers of this machine.",
        ));
    found.push(finding);
}

/// Bus, device and function as a number.
fn requester(device: &str) -> Option<u16> {
    let (_, rest) = device.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (slot, function) = rest.split_once('.')?;
    let (bus, slot) = (
        u16::from_str_radix(bus, 16).ok()?,
        u16::from_str_radix(slot, 16).ok()?,
    );
    Some(bus << 8 | slot << 3 | function.parse::<u16>().ok()?)
}
