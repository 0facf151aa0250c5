//! Records as units reported them: one finding for each kind of request, with the meaning of its code.

use iommu::log::{Class, Family};

use super::super::count;
use super::scanout::period;
use super::{User, for_driver, is_hosts, number_name, tables_file, user, walked};
use crate::explain::facts::{Driver, Facts};
use crate::explain::finding::{Advice, Certainty, Direction, Finding, plain};
use crate::explain::folds::{Fold, MOST_ADDRESSES, MOST_NAMES};

/// Id and meaning of a class.
const fn cause(class: Class) -> (&'static str, &'static str) {
    match class {
        Class::NotMapped => (
            "fault.not-mapped",
            "the tables have no entry for the address",
        ),
        Class::Permission => (
            "fault.permission",
            "the entry is there and does not permit this access",
        ),
        Class::NoAccess => (
            "fault.no-access",
            "the entry is absent or does not permit this access; the code does not tell which",
        ),
        Class::BadTable => ("fault.bad-table", "a table is malformed or cannot be read"),
        Class::DeviceEntry => (
            "fault.device-entry",
            "the device has no valid entry in the unit's tables of devices; no page table is involved",
        ),
        Class::AddressWidth => (
            "fault.address-width",
            "the address is beyond the translated range",
        ),
        Class::AtsRefused => (
            "fault.ats-refused",
            "a translated request, or a request for a translation, is not permitted to the device",
        ),
        Class::InterruptRequest => (
            "fault.interrupt-request",
            "an interrupt message was refused, not DMA to memory",
        ),
        Class::Rmp => (
            "fault.rmp",
            "the reverse map table refuses the page: the permission is missing there and not in the I/O page table",
        ),
        Class::UnitError => (
            "fault.unit-error",
            "the unit or a device did not answer; no request was judged",
        ),
        _ => (
            "fault.no-access",
            "the code has no published meaning, so the input cannot decide the cause",
        ),
    }
}

pub(super) fn reported(facts: &Facts, fold: &Fold) -> Finding {
    let key = &fold.key;
    let (id, meaning) = cause(key.class);
    let meaning = match is_cut(fold) {
        true => "the line ends before its reason, so the input cannot decide the cause",
        false => meaning,
    };
    let certainty = match (key.class, key.certain) {
        (Class::Unknown, _) => Certainty::Unknown,
        (_, true) => Certainty::Certain,
        _ => Certainty::Likely,
    };
    let (document, section) = fold.source;
    let mut finding = Finding::new(id, certainty, document);
    if !section.is_empty() {
        finding.source = format!("{document}, {section}");
    }
    if !fold.device.is_empty() {
        finding = finding.device(fold.device.clone());
    }
    for (first, last) in fold.ranges() {
        finding = finding.range(first, last);
    }
    finding.addresses_complete &= fold.more_addresses == 0;
    finding.access = key.direction;
    finding.count = Some(fold.count);
    finding.count_exact = fold.exact;
    finding = finding.evidence(&fold.evidence);
    let mut text = sentence(fold, meaning);
    for part in details(facts, fold) {
        text.push(' ');
        text += &part;
    }
    advice(facts, fold, finding.say(text))
}

/// VT-d: a line without its reason, and without one in the next line.
fn is_cut(fold: &Fold) -> bool {
    fold.key.family == Family::Vtd
        && fold.key.class == Class::Unknown
        && fold.meanings.iter().all(|(code, ..)| code.is_none())
}

/// `0000:01:00.0 wrote to 0x1000 and was refused by VT-d 3 times: ...`
fn sentence(fold: &Fold, meaning: &str) -> String {
    let key = &fold.key;
    let family = key.family.name();
    let who = match (fold.device.as_str(), &key.unit) {
        ("", Some(unit)) => format!("unit {unit}"),
        ("", None) => "a device that the line does not name".into(),
        (device, _) if device.starts_with("0x") => {
            format!("the device with {} {device}", number_name(key.family))
        }
        (device, _) => device.to_owned(),
    };
    let times = match (fold.count, fold.exact) {
        (1, true) => "once".to_owned(),
        (count, true) => format!("{count} times"),
        (count, false) => format!("at least {count} times"),
    };
    if key.class == Class::UnitError {
        return format!("{family}, {who}: {meaning} ({times}).");
    }
    let verb = match key.direction {
        Direction::Read => "a read",
        Direction::Write => "a write",
        Direction::Execute => "a fetch of instructions",
        Direction::Unknown => "a request",
    };
    let span = fold.span.filter(|_| fold.more_addresses > 0);
    let at = match (fold.ranges().as_slice(), span) {
        ([], _) => String::new(),
        (_, Some((first, last))) => {
            format!(" at more than {MOST_ADDRESSES} addresses between {first:#x} and {last:#x}")
        }
        ([(first, last)], _) if first == last => format!(" at {first:#x}"),
        ([(first, last)], _) => format!(" at {first:#x} to {last:#x}"),
        ([(first, _), .., (_, last)], _) => format!(
            " at {} between {first:#x} and {last:#x}",
            count(fold.addresses.len() as u64, "address").replace("addresss", "addresses")
        ),
    };
    format!("{family} refused {verb} of {who}{at} {times}: {meaning}.")
}

/// Sentences behind the first one.
fn details(facts: &Facts, fold: &Fold) -> Vec<String> {
    let mut parts: Vec<String> = codes(fold).filter(|_| !is_cut(fold)).into_iter().collect();
    if fold.stages.contains(&1) && fold.key.family == Family::Vtd {
        parts.push("The domain uses first-stage tables, those of a processor's format.".into());
    }
    let span = fold.first.zip(fold.last);
    if let Some((first, last)) = span.filter(|(first, last)| last > first) {
        parts.push(format!("From {first:.3} s to {last:.3} s."));
    }
    if let Some(period) = period(fold) {
        parts.push(format!(
            "The same address comes back every {:.2} ms: {:.0} times a second.",
            period * 1e3,
            1.0 / period
        ));
    }
    if !fold.exact {
        parts.push(
            "The kernel limited the rate of its messages, so the count is a lower bound; suppressed messages are no \
             count of faults."
                .into(),
        );
    }
    if fold.more_addresses > 0 {
        parts.push(format!(
            "{MOST_ADDRESSES} addresses are listed; {} at others.",
            match fold.more_addresses {
                1 => "1 fault was".to_owned(),
                more => format!("{more} faults were"),
            }
        ));
    }
    parts.extend(of_device(facts, fold));
    if fold.key.class == Class::Rmp {
        parts.push(
            "With SNP on, devices of the host may reach shared pages only; unmapping and mapping again changes \
             nothing."
                .into(),
        );
    }
    if !facts.iomem.is_empty() && matches!(fold.key.class, Class::Permission) {
        parts.push(
            "In a translated domain these are I/O virtual addresses, about which /proc/iomem says nothing.".into(),
        );
    }
    parts
}

/// Codes of the records with their meanings.
fn codes(fold: &Fold) -> Option<String> {
    let names: Vec<String> = fold
        .meanings
        .iter()
        .filter(|(_, name, meaning)| !name.is_empty() || !meaning.is_empty())
        .map(|(code, name, meaning)| {
            let code = code.map(|code| format!("{code:#x}")).unwrap_or_default();
            let separator = if name.is_empty() || code.is_empty() {
                ""
            } else {
                " "
            };
            let name = format!("{code}{separator}{name}");
            match (name.is_empty(), meaning.is_empty()) {
                (true, _) => (*meaning).to_owned(),
                (_, true) => name,
                _ => format!("{name}: {meaning}"),
            }
        })
        .collect();
    (!names.is_empty()).then(|| format!("Code {}.", names.join("; ")))
}

/// The device: by firmware's tables, its name, its group and its driver.
fn of_device(facts: &Facts, fold: &Fold) -> Vec<String> {
    let mut parts = Vec::new();
    let number = fold
        .number()
        .map(|(_, id)| id)
        .filter(|_| !fold.names.is_empty());
    if let Some(id) = number {
        let names: Vec<_> = fold
            .names
            .iter()
            .take(MOST_NAMES)
            .map(String::as_str)
            .collect();
        parts.push(match fold.names.len() {
            1 => format!("Firmware's table gives the number {id:#x} to {}.", names.join("")),
            _ => format!(
                "Firmware's tables give the number {id:#x} to several devices: {}. The unit decides.",
                names.join(", ")
            ),
        });
    }
    let known = facts.known(&fold.device, None);
    if let Some(known) = known.filter(|known| !known.fact.name.is_empty()) {
        parts.push(format!("The device is: {}.", known.fact.name));
    }
    if let Some(member) = facts
        .members
        .iter()
        .find(|one| one.fact.device == fold.device)
    {
        parts.push(format!("It is in IOMMU group {}.", member.fact.group));
    }
    let known = facts.known(&fold.device, None);
    let driver = known.map(|known| known.fact.driver);
    if !fold.drivers.is_empty() {
        let drivers: Vec<_> = fold.drivers.iter().map(String::as_str).collect();
        parts.push(format!("Its driver is {}.", drivers.join(", ")));
    } else if let Some(Driver::Bound(driver)) = driver {
        parts.push(format!("Its driver is {}.", plain(&driver)));
    }
    parts
}

/// Advice for a device whose interrupt was refused. Source: AMD 48882 3.08, section 2.5, IO_PAGE_FAULT
/// with I = 1 and its PR.
fn interrupt(fold: &Fold, finding: Finding) -> Finding {
    let device = fold.device.as_str();
    let present: Vec<bool> = fold.present.iter().copied().collect();
    let what = match present.as_slice() {
        [false] => " The unit has no entry for the interrupt (PR = 0).",
        [true] => " The unit has an entry for the interrupt, which does not permit it (PR = 1).",
        _ => "",
    };
    finding
        .advise(Advice::text(format!(
            "The line names the sender, {device}.{what} Whether remapping is on: dmesg | grep -i remapping"
        )))
        .advise(Advice::text(
            "Its MSI (Enable+) and driver follow; after kexec, a resume or a reset a device may use an old vector.",
        ))
        .advise(Advice::command([
            "lspci",
            "-vv",
            "-s",
            device.strip_prefix("0000:").unwrap_or(device),
        ]))
}

/// SMMUv3's C_BAD_STREAMID and C_BAD_STE alone: the entry of the stream is out of range or not valid. Source: Arm IHI 0070,
/// section 7.3.
fn is_bad_stream(fold: &Fold) -> bool {
    let mut codes = fold.meanings.iter().map(|(code, ..)| *code);
    fold.key.family == Family::SmmuV3
        && !fold.meanings.is_empty()
        && codes.all(|code| matches!(code, Some(0x02 | 0x04)))
}

/// Advice for a device of which a number alone is known: how its name is found. Several names by a table are listed
/// elsewhere.
fn whose(fold: &Fold, finding: Finding) -> Finding {
    let number = fold
        .device
        .strip_prefix("0x")
        .filter(|_| fold.names.is_empty());
    let Some(number) = number.and_then(|number| u32::from_str_radix(number, 16).ok()) else {
        return finding;
    };
    let table = match fold.key.family {
        Family::Riscv => "RIMT",
        Family::SmmuV2 | Family::SmmuV3 => "IORT",
        _ => {
            return finding.advise(Advice::text(
                "The device tree (iommus = <...>) tells which device has this number.",
            ));
        }
    };
    let often = match u16::try_from(number) {
        Ok(id) => format!(
            " For PCI it is often bus:device.function, here {:02x}:{:02x}.{:x}.",
            id >> 8,
            id >> 3 & 0x1f,
            id & 7
        ),
        Err(_) => String::new(),
    };
    finding.advise(Advice::text(format!(
        "Give /sys/firmware/acpi/tables/{table} beside the log, by which the device of {} {number:#x} is found; without \
         ACPI the device tree (iommus, iommu-map) has it.{often}",
        number_name(fold.key.family)
    )))
}

/// Advice for a device that a guest has. Source: QEMU `system/memory.c`, `mtree_info` (`-f`: the flat view, which is what
/// a listener of VFIO maps).
fn of_guest(finding: Finding) -> Finding {
    finding
        .advise(Advice::text(
            "The address is a guest-physical one, unless the guest has a virtual IOMMU. Compare it with the monitor's \
             map, here of libvirt's guest NAME:",
        ))
        .advise(Advice::command([
            "virsh",
            "qemu-monitor-command",
            "NAME",
            "--hmp",
            "info mtree -f",
        ]))
        .advise(Advice::text(
            "Inside of RAM the monitor's map for the device is missing, or a balloon took the page; outside of it the \
             guest's driver is wrong.",
        ))
        .advise(Advice::text(
            "In the guest: CONFIG_DMA_API_DEBUG with dma_debug_driver=NAME, by which its kernel checks each mapping of \
             the driver.",
        ))
}

fn advice(facts: &Facts, fold: &Fold, finding: Finding) -> Finding {
    let device = &fold.device;
    let is_pci = device.contains(':');
    match fold.key.class {
        Class::Permission | Class::NoAccess | Class::NotMapped => {
            let finding = if is_hosts(facts, fold) {
                let strict = "iommu.strict=1 on the kernel's command line: if the faults change, stale translations \
                     are involved.";
                let debug =
                    "CONFIG_DMA_API_DEBUG with dma_debug_driver=NAME: the kernel checks each mapping of the driver.";
                let finding = for_driver(facts, fold, finding, strict);
                let finding = for_driver(facts, fold, finding, debug);
                match user(facts, fold) {
                    User::Unknown => finding.advise(Advice::text(
                        "If it is passed through, the address is a guest-physical one (without a virtual IOMMU): \
                         `info mtree -f` of QEMU's monitor shows whether it is RAM of the guest.",
                    )),
                    _ => finding,
                }
            } else {
                of_guest(finding)
            };
            whose(fold, finding)
        }
        Class::DeviceEntry if is_bad_stream(fold) => {
            let finding = finding.advise(Advice::text(
                "Likely cause: the stream ID that the IORT or the device tree (iommus, iommu-map) gives the device is \
                 not the one that it sends, or is beyond the unit's stream table.",
            ));
            whose(fold, finding)
        }
        Class::DeviceEntry => whose(fold, finding).advise(Advice::text(
            "The device made a request while it was attached to no domain: stop its DMA (bus mastering) before it is \
             handed over.",
        )),
        Class::BadTable => match (fold.addresses.first(), tables_file(fold)) {
            (Some(address), Some(_)) => walked(fold, *address, finding),
            _ => finding.advise(Advice::text(
                "No kernel shows this unit's tables: an image of memory (QEMU's pmemsave, a crash dump) has them.",
            )),
        },
        Class::UnitError => finding.advise(Advice::text(
            "Look for a device that stopped before: removed, reset or powered off, or its link (AER).",
        )),
        Class::InterruptRequest if is_pci => interrupt(fold, finding),
        Class::InterruptRequest => finding.advise(Advice::text(
            "Look for the device that sent the interrupt, and whether interrupt remapping has an entry for it.",
        )),
        Class::Rmp => finding.advise(Advice::text(
            "Let the device use shared pages only, or keep SNP from being initialized on this host if no \
             confidential guest is run.",
        )),
        Class::AtsRefused => finding.advise(Advice::text("pci=noats as a test: the device then asks for no translations.")),
        _ => finding,
    }
}
