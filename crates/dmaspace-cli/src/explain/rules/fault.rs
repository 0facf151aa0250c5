//! Faults as a unit reported them, and the reasons behind them.
//!
//! The class of a record is certain where the unit's specification says so; reasons behind it are never more than
//! likely, but for a direction that a dump of the leaf shows (see [`table`](super::table)).

use iommu::log::{Class, Family};

use super::super::facts::{Facts, Known, Line};
use super::super::finding::{Advice, At, Certainty, Direction, Evidence, Finding};
use super::super::folds::{Fold, MOST_NAMES};
use super::count;

/// Addresses that Linux's allocator gives first: from 4 GiB downwards. Source: Linux 7.2 `drivers/iommu/dma-iommu.c`,
/// `iommu_dma_alloc_iova` (32 bits first, unless `iommu.forcedac`), `drivers/iommu/iova.c`, `__alloc_and_insert_iova_range`.
const ALLOCATOR: std::ops::RangeInclusive<u64> = 0xe000_0000..=0xffff_ffff;
/// Addresses below 4 GiB that the allocator may have given, for windows of PCI are left out of its range, and it goes on
/// below them: Linux 7.2 `drivers/iommu/dma-iommu.c`, `iova_reserve_pci_windows`.
const BELOW_WINDOWS: std::ops::RangeInclusive<u64> = 0xc000_0000..=0xffff_ffff;
/// Interrupt messages of x86-64: Intel SDM volume 3, section 12.11.1 "Message Address Register Format".
const MSI: std::ops::RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;
/// Interrupts in HyperTransport's address map: AMD 48882 3.08, section 2.1.2, table 3 "Special Address Controls".
const HYPERTRANSPORT: std::ops::RangeInclusive<u64> = 0xfd_f800_0000..=0xfd_f8ff_ffff;
/// Seconds of a boot in which firmware's pictures are still shown.
const BOOT_SECONDS: f64 = 20.0;
/// Pictures a second of displays.
const FRAME_RATES: std::ops::RangeInclusive<f64> = 23.0..=245.0;

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    for fold in &facts.folds.folds {
        found.push(reported(facts, fold));
    }
    for fold in &facts.folds.folds {
        reasons(facts, fold, found);
    }
    scanout(facts, found);
}

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

fn reported(facts: &Facts, fold: &Fold) -> Finding {
    let key = &fold.key;
    let (id, meaning) = cause(key.class);
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

/// `0000:01:00.0 wrote to 0x1000 and was refused by VT-d 3 times: ...`
fn sentence(fold: &Fold, meaning: &str) -> String {
    let key = &fold.key;
    let family = key.family.name();
    let who = match (fold.device.as_str(), &key.unit) {
        ("", Some(unit)) => format!("unit {unit}"),
        ("", None) => "a device that the line does not name".into(),
        (device, _) if device.starts_with("0x") => format!("the device with number {device}"),
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
    let at = match fold.ranges().as_slice() {
        [] => String::new(),
        [(first, last)] if first == last => format!(" at {first:#x}"),
        [(first, last)] => format!(" at {first:#x} to {last:#x}"),
        [(first, _), .., (_, last)] => format!(
            " at {} between {first:#x} and {last:#x}",
            count(fold.addresses.len() as u64, "address").replace("addresss", "addresses")
        ),
    };
    format!("{family} refused {verb} of {who}{at} {times}: {meaning}.")
}

fn details(facts: &Facts, fold: &Fold) -> Vec<String> {
    let mut parts = Vec::new();
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
    if !names.is_empty() {
        parts.push(format!("Code {}.", names.join("; ")));
    }
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
            "{} more faults at addresses that are not listed.",
            fold.more_addresses
        ));
    }
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
    if !fold.drivers.is_empty() {
        let drivers: Vec<_> = fold.drivers.iter().map(String::as_str).collect();
        parts.push(format!("Its driver is {}.", drivers.join(", ")));
    }
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

fn advice(facts: &Facts, fold: &Fold, finding: Finding) -> Finding {
    let device = &fold.device;
    let is_pci = device.contains(':');
    match fold.key.class {
        Class::Permission | Class::NoAccess | Class::NotMapped => {
            let given = !is_hosts(facts, fold);
            let finding = if given {
                finding.advise(Advice::text(
                    "Compare the address with the guest's memory layout: RAM and BARs that the monitor has mapped.",
                ))
            } else {
                finding.advise(Advice::text(
                    "iommu.strict=1 on the kernel's command line: if the faults change, stale translations are \
                     involved.",
                ))
            };
            let finding = finding.advise(Advice::text(
                "CONFIG_DMA_API_DEBUG with dma_debug_driver=NAME: the kernel checks each mapping of the driver.",
            ));
            if !is_pci && device.starts_with("0x") {
                finding.advise(Advice::text(
                    "The device tree (iommus = <...>) or the IORT tells which device has this number.",
                ))
            } else {
                finding
            }
        }
        Class::DeviceEntry => finding.advise(Advice::text(
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

/// The file in which a kernel may show the device's tables: VT-d's driver is the only one that has such files.
///
/// Source: Linux `drivers/iommu/intel/debugfs.c`, `intel_iommu_debugfs_create_dev` (since 6.7; before, one file for all).
fn tables_file(fold: &Fold) -> Option<String> {
    let shown = fold.key.family == Family::Vtd && fold.device.contains(':');
    shown.then(|| {
        format!(
            "/sys/kernel/debug/iommu/intel/{}/domain_translation_struct",
            fold.device
        )
    })
}

/// A walk of the tables, where they can be read.
fn walked(fold: &Fold, address: u64, finding: Finding) -> Finding {
    match tables_file(fold) {
        Some(file) => finding
            .advise(Advice::text(
                "While it faults, where the kernel has CONFIG_INTEL_IOMMU_DEBUGFS (Linux 6.7 or newer), as root:",
            ))
            .advise(Advice::Command(vec![
                "dmaspace".into(),
                "tables".into(),
                "walk".into(),
                file,
                format!("{address:#x}"),
            ])),
        None => finding,
    }
}

/// The time between two faults at one address, where it is that of a display's pictures.
fn period(fold: &Fold) -> Option<f64> {
    let times = fold.times.iter();
    let mut steps: Vec<f64> = times
        .clone()
        .zip(times.skip(1))
        .filter(|((_, a), (_, b))| a == b)
        .map(|((first, _), (second, _))| second - first)
        .filter(|step| *step > 0.0 && *step < 0.1)
        .collect();
    steps.sort_by(f64::total_cmp);
    let (least, most) = (steps.first()?, steps.last()?);
    let regular = steps.len() >= 2 && most - least < 0.15 * most;
    (regular && FRAME_RATES.contains(&(1.0 / most))).then_some(*most)
}

fn likely(fold: &Fold, cause: &'static str, source: &'static str) -> Finding {
    let mut finding = Finding::likely(cause, source).evidence(&fold.evidence);
    if !fold.device.is_empty() {
        finding = finding.device(fold.device.clone());
    }
    finding.access = fold.key.direction;
    finding
}

fn of_addresses(mut finding: Finding, addresses: &[u64]) -> Finding {
    for address in addresses.iter().take(64) {
        finding = finding.range(*address, *address);
    }
    finding
}

fn reasons(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>) {
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

fn who(fold: &Fold) -> String {
    match fold.device.as_str() {
        "" => "The device".into(),
        device if device.starts_with("0x") => format!("The device with number {device}"),
        device => device.to_owned(),
    }
}

/// Addresses are the kernel's own: the device is in use by a driver of the host. The line of the fault has the driver
/// of its time; a listing may be of a later one.
fn is_hosts(facts: &Facts, fold: &Fold) -> bool {
    match fold.drivers.is_empty() {
        true => !facts.is_given(&fold.device),
        false => !fold.drivers.iter().any(|driver| driver.contains("vfio")),
    }
}

fn allocated(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>, all: &[u64]) {
    let recent: Vec<u64> = all
        .iter()
        .copied()
        .filter(|address| ALLOCATOR.contains(address) && !MSI.contains(address))
        .collect();
    let other = matches!(fold.key.direction, Direction::Read | Direction::Write);
    let class = fold.key.class;
    let direction = class == Class::Permission || class == Class::NoAccess && !recent.is_empty();
    if direction
        && other
        && is_hosts(facts, fold)
        && !all
            .iter()
            .all(|address| MSI.contains(address) || *address < 0x1000)
    {
        let (access, right) = match fold.key.direction {
            Direction::Read => ("reads", "DMA_TO_DEVICE"),
            _ => ("writes", "DMA_FROM_DEVICE"),
        };
        let decides = match tables_file(fold) {
            Some(_) => "A walk of the tables or dma-debug decides.",
            None => "dma-debug decides.",
        };
        let text = match class {
            Class::Permission => format!(
                "{} {access} a page whose mapping permits the other direction only, or a mapping was taken down and a \
                 stale or other one of the page is left. {decides}",
                who(fold)
            ),
            _ => format!(
                "{} {access} at an address just below 4 GiB, where Linux's allocator gives addresses first, so it was \
                 allocated recently: likely for the other direction only, or unmapped too early. {decides}",
                who(fold)
            ),
        };
        let finding = likely(fold, "fault.wrong-direction", "Linux Documentation/core-api/dma-api.rst, DMA directions; drivers/iommu/dma-iommu.c, iommu_dma_alloc_iova")
            .say(text)
            .advise(Advice::text(format!(
                "In the driver: map the buffer with {right} or DMA_BIDIRECTIONAL before the device gets it."
            )));
        let finding = match recent.first().or(all.first()) {
            Some(address) => walked(fold, *address, finding),
            None => finding,
        };
        found.push(of_addresses(
            finding,
            if class == Class::Permission {
                all
            } else {
                &recent
            },
        ));
    }
    // SMMUv2 tells the level: 3 is the last one of 4 KiB tables.
    let last = fold.levels.len() == 1 && fold.levels.contains(&3);
    let soft = soft_absent(facts, fold);
    if class == Class::NotMapped
        && last
        && !recent.is_empty()
        && soft.is_none()
        && is_hosts(facts, fold)
    {
        found.push(use_after_unmap(fold, &recent, None));
    }
}

/// A dump has no entry for `address`: it was not mapped for another direction, and where only the `last` level has none,
/// it was mapped until recently.
pub(super) fn absent_in_dump(
    facts: &Facts,
    fold: &Fold,
    (address, last): (u64, bool),
    places: &[&Evidence],
    found: &mut Vec<Finding>,
) {
    let of_fold = |one: &Finding, cause: &str| {
        one.cause == cause
            && one.devices == [fold.device.clone()]
            && one.access == fold.key.direction
    };
    found.retain_mut(|one| {
        let doubted = of_fold(one, "fault.wrong-direction") && one.certainty == Certainty::Likely;
        if doubted {
            one.addresses
                .retain(|(first, _)| first >> 12 != address >> 12);
        }
        !doubted || !one.addresses.is_empty()
    });
    if !last || !ALLOCATOR.contains(&address) || MSI.contains(&address) || !is_hosts(facts, fold) {
        return;
    }
    let places = places.iter().copied();
    let known = found
        .iter()
        .position(|one| of_fold(one, "fault.use-after-unmap"));
    let finding = match known {
        Some(known) => found.remove(known).range(address, address),
        None => use_after_unmap(fold, &[address], None),
    };
    found.push(finding.evidence(places));
}

fn use_after_unmap(fold: &Fold, addresses: &[u64], walk: Option<&Evidence>) -> Finding {
    let by = match walk {
        Some(_) => "By the kernel's own walk the page is not mapped now",
        None => "Only the last level has no entry, so neighbours are or were mapped",
    };
    let finding = likely(fold, "fault.use-after-unmap", "Arm IHI 0062, SMMU_CBn_FSYNR0.PLVL; Linux drivers/iommu/arm/arm-smmu/arm-smmu-qcom.c, qcom_smmu_context_fault; drivers/iommu/intel/iommu.c, pgtable_walk")
        .say(format!(
            "{by}: {} likely still uses a buffer that was unmapped until recently.",
            who(fold)
        ))
        .advise(Advice::text(
            "Stop or drain the device before its buffers are unmapped or freed; dma-debug names the owner.",
        ));
    of_addresses(finding.evidence(walk), addresses)
}

/// The kernel's own walk after the fault, which found no page.
fn soft_absent<'f>(facts: &'f Facts, fold: &Fold) -> Option<&'f Evidence> {
    let line_of = |evidence: &Evidence| match evidence.place.at {
        At::Line(line) => line,
        _ => 0,
    };
    let walks = facts
        .lines
        .iter()
        .filter(|one| one.fact == Line::SoftWalk { physical: 0 });
    walks
        .map(|one| &one.evidence)
        .find(|walk| {
            let before = |fold: &Fold| {
                let own = fold
                    .evidence
                    .iter()
                    .filter(|one| one.place.file == walk.place.file);
                own.map(line_of).filter(|line| *line <= line_of(walk)).max()
            };
            let smmu =
                |other: &&Fold| other.key.family == Family::SmmuV2 && other.file == walk.place.file;
            let nearest = facts
                .folds
                .folds
                .iter()
                .filter(smmu)
                .filter_map(before)
                .max();
            fold.file == walk.place.file && before(fold).is_some() && before(fold) == nearest
        })
        .filter(|_| fold.key.family == Family::SmmuV2)
}

fn soft_walk(facts: &Facts, fold: &Fold, found: &mut Vec<Finding>) {
    if fold.key.class != Class::NotMapped {
        return;
    }
    if let Some(walk) = soft_absent(facts, fold) {
        let all: Vec<u64> = fold.addresses.iter().copied().collect();
        found.push(use_after_unmap(fold, &all, Some(walk)));
    }
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
                "All addresses that {} used are System RAM of the host, and none is one that the kernel's allocator \
                 gives: likely the device is given physical addresses instead of I/O virtual ones.",
                who(fold)
            ))
            .advise(Advice::text(
                "In the driver: give the device the address that dma_map_single() or dma_alloc_coherent() returned, never \
                 virt_to_phys().",
            ));
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

/// VT-d: 00:02.0 is the place of Intel's graphics.
fn is_intels(fold: &Fold) -> bool {
    fold.key.family == Family::Vtd && fold.device == "0000:00:02.0"
}

fn is_display(facts: &Facts, fold: &Fold) -> bool {
    facts
        .is_display(&fold.device)
        .unwrap_or_else(|| is_intels(fold))
}

/// Reads of a display engine that firmware, a boot loader or a guest has started.
fn scanout(facts: &Facts, found: &mut Vec<Finding>) {
    let folds = facts.folds.folds.iter();
    let mut devices: Vec<(usize, &str)> = folds
        .map(|fold| (fold.file, fold.device.as_str()))
        .collect();
    devices.sort_unstable();
    devices.dedup();
    let mut boot: Option<Finding> = None;
    for (file, device) in devices {
        let reads: Vec<&Fold> = facts
            .folds
            .folds
            .iter()
            .filter(|fold| {
                fold.file == file && fold.device == device && fold.key.direction == Direction::Read
            })
            .filter(|fold| {
                matches!(
                    fold.key.class,
                    Class::NoAccess | Class::NotMapped | Class::BadTable
                ) && fold.addresses.iter().any(|address| *address >= 0x1000)
            })
            .collect();
        let Some(first) = reads.first() else {
            continue;
        };
        let addresses: Vec<u64> = reads
            .iter()
            .flat_map(|fold| fold.addresses.iter().copied())
            .collect();
        let times: Vec<f64> = reads
            .iter()
            .flat_map(|fold| fold.times.iter().map(|(time, _)| *time))
            .collect();
        if times.is_empty() {
            continue;
        }
        let since_boot = reads.iter().all(|fold| fold.since_boot);
        let at_boot = since_boot && times.iter().all(|time| *time < BOOT_SECONDS);
        let rate = reads.iter().find_map(|fold| period(fold));
        let mut pages: Vec<u64> = addresses.iter().map(|address| address >> 12).collect();
        pages.sort_unstable();
        pages.dedup();
        let near = pages
            .first()
            .zip(pages.last())
            .is_some_and(|(first, last)| pages.len() > 1 && last - first < 1 << 14);
        let display = is_display(facts, first);
        let announced: Vec<&Evidence> = facts
            .lines
            .iter()
            .filter(|one| matches!(one.fact, Line::BootMappings { .. }))
            .map(|one| &one.evidence)
            .filter(|evidence| evidence.place.file == first.file)
            .collect();
        let evidence = reads.iter().flat_map(|fold| &fold.evidence);
        // Buffers of a host's driver are no picture that was left over.
        let buffers = addresses.iter().all(|address| ALLOCATOR.contains(address));
        let display = display && (rate.is_some() || !buffers);
        if display && (at_boot || rate.is_some() || near) {
            let (when, advice) = match (at_boot, rate) {
                (true, _) => (
                    "within the first seconds of the boot".to_owned(),
                    vec![
                        "Firmware must report the framebuffer as a reserved region (RMRR, IVMD), or stop the display \
                         engine: a firmware update.",
                        "intel_iommu=igfx_off as a test: the graphics device alone is then not translated.",
                    ],
                ),
                (_, Some(rate)) => (
                    format!(
                        "at the same place every {:.2} ms, as a display does with its pictures",
                        rate * 1e3
                    ),
                    vec![
                        "The guest's driver or firmware must stop the display engine before a reset, and the monitor \
                         must reset the function or keep it in a blocking domain.",
                        "To prove it on the host: clear bus mastering in the command register, and the faults stop.",
                    ],
                ),
                _ => (
                    "in neighbouring pages".to_owned(),
                    vec![
                        "Map or emulate the memory that the display engine reads: stolen memory, the OpRegion (x-igd-gms).",
                    ],
                ),
            };
            let advice = if is_intels(first) || !at_boot {
                advice
            } else {
                advice[..1].to_vec()
            };
            let mut finding = Finding::likely("fault.scanout", "Linux drivers/iommu/intel/iommu.c, quirks of graphics devices (igfx_off); VT-d 5.0, section 8.4 \"RMRR\"")
                .device(device)
                .evidence(evidence)
                .say(format!(
                    "{device} is a display controller and reads {when}: likely an engine that was started earlier, by \
                     firmware, a boot loader or a guest, goes on reading its framebuffer."
                ));
            finding.access = Direction::Read;
            finding = advice
                .into_iter()
                .fold(finding, |finding, text| finding.advise(Advice::text(text)));
            found.push(of_addresses(finding, &addresses));
        } else if !announced.is_empty() && at_boot && first.key.family == Family::SmmuV2 {
            // One engine may have several numbers.
            let finding = boot.take().unwrap_or_else(|| {
                let mut finding = Finding::likely("fault.scanout", "Linux drivers/iommu/arm/arm-smmu/arm-smmu-qcom.c, qcom_smmu_cfg_probe; Devicetree, reserved-memory, iommu-addresses")
                    .evidence(announced.iter().copied())
                    .say(
                        "Pages are read one after the other in the first second of the boot, after the driver took over \
                         the boot loader's mappings: likely a display engine that the boot loader has started goes on \
                         reading its picture."
                            .to_owned(),
                    )
                    .advise(Advice::text(
                        "Reserve the framebuffer in the device tree: a reserved-memory node with iommu-addresses, and \
                         memory-region in the display's node.",
                    ));
                finding.access = Direction::Read;
                finding
            });
            boot = Some(of_addresses(
                finding.device(device).evidence(evidence),
                &addresses,
            ));
        }
    }
    found.extend(boot);
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Certainty;
    use super::super::{causes, of_text};

    const READ: &str = "DMAR: [DMA Read NO_PASID] Request device [XX] fault addr YY [fault reason 0x06] PTE Read access is not set";

    fn read(device: &str, address: &str) -> String {
        READ.replace("XX", device).replace("YY", address)
    }

    #[test]
    fn a_walk_is_advised_where_a_kernel_shows_tables() {
        let walks = |text: &str| {
            let found = of_text(&format!("[ 100.1] {text}\n"));
            let advice = found.iter().flat_map(|one| &one.advice);
            let lines: Vec<_> = advice.map(|one| one.line()).collect();
            lines
                .into_iter()
                .find(|line| line.starts_with("dmaspace tables walk"))
        };
        let file = "/sys/kernel/debug/iommu/intel/0000:03:00.0/domain_translation_struct";
        let vtd = walks(&read("03:00.0", "0xffff1000"));
        assert_eq!(vtd, Some(format!("dmaspace tables walk {file} 0xffff1000")));
        for other in [
            "nvme 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0xcff49550 flags=0x0070]",
            "AMD-Vi: Event logged [PAGE_TAB_HARDWARE_ERROR device=02:00.0 domain=0x0003 address=0x1000 flags=0x0020]",
            "DMAR: [DMA Read NO_PASID] Request device [03:00.0] fault addr 0x1000000 [fault reason 0x02] Present bit in context entry is clear",
        ] {
            assert_eq!(walks(other), None, "{other}");
        }
    }

    #[test]
    fn faults_of_one_kind_are_one_finding_with_a_lower_bound() {
        let text = format!(
            "[ 100.0] dmar_fault: 31 callbacks suppressed\n[ 100.1] {0}\n[ 100.2] {0}\n",
            read("03:00.0", "0x7000")
        );
        let found = of_text(&text);
        assert_eq!(causes(&found), ["fault.no-access"]);
        assert_eq!((found[0].count, found[0].count_exact), (Some(12), false));
        assert_eq!(found[0].devices, ["0000:03:00.0"]);
    }

    #[test]
    fn reasons_are_likely_and_have_evidence() {
        let zero = of_text(&format!("[ 100.1] {}\n", read("03:00.0", "0x0")));
        assert_eq!(causes(&zero), ["fault.no-access", "fault.null-address"]);
        assert_eq!(zero[1].certainty, Certainty::Likely);
        let recent = of_text(&format!("[ 100.1] {}\n", read("03:00.0", "0xffff1000")));
        assert_eq!(
            causes(&recent),
            ["fault.no-access", "fault.wrong-direction"]
        );
        let given = of_text(&format!(
            "[ 100.1] vfio-pci 0000:03:00.0: x\n[ 100.1] {}\n03:00.0 x [0200]: y [8086:1]\n\tKernel driver in use: vfio-pci\n",
            read("03:00.0", "0xffff1000")
        ));
        assert_eq!(causes(&given), ["fault.no-access"]);
    }

    #[test]
    fn maps_of_memory_are_not_joined_where_machines_are_mixed() {
        let fault = "[   10.5] DMAR: [DMA Read] Request device [03:00.0] fault addr 1234567000 [fault reason 06] PTE Read access is not set\n";
        let iomem = "100000000-207fffffff : System RAM\n";
        let joined = of_text(&format!("{fault}{iomem}"));
        assert!(causes(&joined).contains(&"fault.physical-address"));
        let other = "[    1.5] AMD-Vi: Event logged [IO_PAGE_FAULT device=41:00.0 domain=0x0000 address=0x1000 flags=0x0070]\n";
        let mixed = of_text(&format!("{fault}{iomem}{other}"));
        assert!(!causes(&mixed).contains(&"fault.physical-address"));
        // An aperture of one machine, and a fault of another.
        let aperture = "0x0 0x7fffffffff\n";
        let fault = fault.replace("1234567000", "8234567000");
        let joined = of_text(&format!("{fault}{aperture}"));
        assert!(causes(&joined).contains(&"fault.address-width"));
        let mixed = of_text(&format!("{fault}{aperture}{other}"));
        assert!(!causes(&mixed).contains(&"fault.address-width"));
    }

    #[test]
    fn displays_are_those_by_class_or_place() {
        let lines = |device: &str| {
            (0..3)
                .map(|nth| format!("[  40.{}] {}\n", 100 + nth * 17, read(device, "0x9000000")))
                .collect::<String>()
        };
        assert_eq!(
            causes(&of_text(&lines("00:02.0"))),
            ["fault.no-access", "fault.scanout"]
        );
        assert_eq!(causes(&of_text(&lines("03:00.0"))), ["fault.no-access"]);
        let listed = lines("03:00.0") + "03:00.0 VGA compatible controller [0300]: x [10de:1]\n";
        assert_eq!(
            causes(&of_text(&listed)),
            ["fault.no-access", "fault.scanout"]
        );
    }

    #[test]
    fn memory_of_the_host_is_named_where_all_addresses_are() {
        let text = format!(
            "[ 100.1] {}\n00100000-7fffffff : System RAM\n",
            read("03:00.0", "0x1234000")
        );
        assert_eq!(
            causes(&of_text(&text)),
            ["fault.no-access", "fault.physical-address"]
        );
        let both = format!("[ 100.2] {}\n{text}", read("03:00.0", "0x80000000"));
        assert_eq!(causes(&of_text(&both)), ["fault.no-access"]);
    }
}
