//! Limits of pinning.

use super::super::facts::{Facts, Known, Line};
use super::super::finding::{Advice, Certainty, Evidence, Finding};
use crate::inspect::needs::{self, Available, LockLimit, LockNeed, LockOwner};
use crate::inspect::{Guest, Interface, LockCounter, Monitor};

const ENOMEM: i32 = 12;
const ENOSPC: i32 = 28;

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    exceeded(facts, found);
    refused(facts, found);
    hard_limit(facts, found);
    per_device(facts, found);
    mappings(facts, found);
}

/// The configuration, where there is only one.
fn only(facts: &Facts) -> Option<&Known<Guest>> {
    match facts.configurations.as_slice() {
        [one] => Some(one),
        _ => None,
    }
}

fn bytes(bytes: u64) -> String {
    match crate::size::bytes(bytes) {
        text if text.contains(&bytes.to_string()) => text,
        text => format!("{bytes} bytes ({text})"),
    }
}

/// How a limit is raised: to what the guest needs, where one was given.
fn advice(finding: Finding, guest: Option<&Guest>) -> Finding {
    let need = guest.and_then(|guest| Some((guest, LockNeed::of(guest)?)));
    let monitor = guest.map_or(Monitor::Other, |guest| guest.monitor);
    let mut lines = match need.filter(|(_, need)| need.memory_bytes > 0) {
        Some((_, need)) => needs::raise(LockOwner::Given, monitor, need.counted_bytes()),
        None => {
            let mut lines = needs::raise(LockOwner::Given, monitor, 0);
            lines.remove(0);
            lines
        }
    };
    lines.push(needs::Remedy::line(
        "A process that runs: prlimit --memlock=unlimited --pid PID, with CAP_SYS_RESOURCE.",
    ));
    let lines = lines.iter().map(|line| Advice::text(line.sentence()));
    let finding = lines.fold(finding, Finding::advise);
    finding.advise(Advice::text(
        "With iommufd all memory is counted once per user, however many devices there are.",
    ))
}

fn exceeded(facts: &Facts, found: &mut Vec<Finding>) {
    let mut evidence: Vec<&Evidence> = Vec::new();
    let (mut limits, mut mediated) = (Vec::new(), Vec::new());
    for one in &facts.lines {
        if let Line::MemlockExceeded {
            limit,
            mediated: is,
        } = &one.fact
        {
            evidence.push(&one.evidence);
            let list = if *is { &mut mediated } else { &mut limits };
            if !list.contains(limit) && list.len() < 16 {
                list.push(*limit);
            }
        }
    }
    if !evidence.is_empty() {
        let list = |limits: &[u64]| {
            limits
                .iter()
                .map(|limit| bytes(*limit))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let mut text = String::new();
        if !limits.is_empty() {
            text = format!(
                "RLIMIT_MEMLOCK is too low: {}. VFIO's type 1 counts all guest memory once per container; BARs are not \
                 counted.",
                list(&limits)
            );
        }
        if !mediated.is_empty() {
            if !text.is_empty() {
                text.push(' ');
            }
            text += &format!(
                "A mediated device (mdev) pins on demand, and reached its limit of {}: the need is the memory that the guest's driver uses, not all.",
                list(&mediated)
            );
        }
        let mut finding = Finding::certain(
            "memlock.too-low",
            "Linux drivers/vfio/vfio_iommu_type1.c, vfio_pin_pages_remote, vfio_pin_page_external",
        )
        .evidence(evidence);
        let of_one = only(facts).filter(|_| facts.of_one_machine());
        let need = of_one.and_then(|one| Some((one, one.fact.known_bytes()?)));
        if let (Some((one, need)), Some(least)) = (need, limits.iter().min()) {
            let missing = need.saturating_sub(*least);
            text += &format!(
                " The guest that was given has {}: with a limit of {} at least {} are missing.",
                bytes(need),
                bytes(*least),
                bytes(missing)
            );
            finding = finding.evidence([&one.evidence]);
        }
        let guest = of_one.filter(|_| !limits.is_empty());
        found.push(advice(finding.say(text), guest.map(|one| &one.fact)));
        return;
    }
    by_limit(facts, found);
}

/// A limit and a need, or a map that ended with ENOMEM.
fn by_limit(facts: &Facts, found: &mut Vec<Finding>) {
    let failed: Vec<_> = facts
        .lines
        .iter()
        .filter(|one| matches!(one.fact, Line::MapFailed { errno: ENOMEM, .. }))
        .collect();
    let limit = facts.lines.iter().find_map(|one| match one.fact {
        Line::MemlockLimit { bytes } => Some((bytes, &one.evidence)),
        _ => None,
    });
    let of_one = only(facts).filter(|_| facts.of_one_machine());
    if let (Some((limit, at)), Some(one)) = (limit, of_one) {
        let available = Available {
            lock: Some(LockLimit {
                bytes: limit,
                lifted: false,
                of: LockOwner::Given,
            }),
            ..Available::default()
        };
        let need = LockNeed::of(&one.fact).filter(|need| need.memory_bytes > 0 && need.at_start);
        if let Some(need) = need {
            // The devices, below, tell of memory that counts more than once.
            let short = needs::locked(&need, &one.fact, &available);
            if let Some(short) = short.filter(|short| short.cause == "memlock.too-low") {
                found.push(
                    super::of_need(short)
                        .evidence(failed.iter().map(|one| &one.evidence))
                        .evidence([at, &one.evidence]),
                );
            }
            // Enough for this process: ENOMEM has another reason, which nothing here shows. Other processes of the user
            // may have the rest of its counter.
            let told = found.iter().any(|one| one.cause == "memlock.too-low");
            if told || need.counter == LockCounter::Process {
                return;
            }
        }
    }
    let unlimited = matches!(limit, Some((None, _)));
    if !failed.is_empty() && !unlimited {
        let devices = failed.iter().filter_map(|one| match &one.fact {
            Line::MapFailed { device, .. } => device.clone(),
            _ => None,
        });
        let source = "Linux drivers/vfio/vfio_iommu_type1.c, vfio_lock_acct; Documentation/userspace-api/iommufd.rst";
        let finding = Finding::likely("memlock.too-low", source)
            .devices(devices)
            .evidence(failed.iter().map(|one| &one.evidence))
            .say(
                "A map for a device ended with ENOMEM: likely RLIMIT_MEMLOCK is less than the guest's memory; memory of \
                 the host that is short gives the same. The kernel's log (RLIMIT_MEMLOCK exceeded) decides.",
            );
        found.push(advice(finding, of_one.map(|one| &one.fact)));
    }
}

/// A domain whose own limit is less than what its devices have counted.
fn hard_limit(facts: &Facts, found: &mut Vec<Finding>) {
    for one in &facts.configurations {
        let Some(limit) = one.fact.hard_limit_bytes else {
            continue;
        };
        let available = Available {
            lock: Some(LockLimit {
                bytes: Some(limit),
                lifted: false,
                of: LockOwner::HardLimit,
            }),
            ..Available::default()
        };
        let need = LockNeed::of(&one.fact).filter(|need| need.memory_bytes > 0);
        let short = need.and_then(|need| needs::locked(&need, &one.fact, &available));
        found.extend(short.map(|short| super::of_need(short).evidence([&one.evidence])));
    }
}

fn refused(facts: &Facts, found: &mut Vec<Finding>) {
    for one in &facts.lines {
        if let Line::CannotLimit { bytes: wanted } = &one.fact {
            let finding = Finding::certain("memlock.cannot-raise", "libvirt src/util/virprocess.c, virProcessSetMaxMemLock; setrlimit(2), EPERM")
                .evidence([&one.evidence])
                .say(format!(
                    "The limit of locked memory should become {}, and the process may not raise it.",
                    bytes(*wanted)
                ))
                .advise(Advice::text(
                    "A process with CAP_SYS_RESOURCE must raise the limit first (prlimit --memlock), or this process needs the capability.",
                ))
                .advise(Advice::text("libvirt: <memtune><hard_limit> sets the limit by hand; iommufd needs no such limit per device."));
            found.push(finding);
        }
    }
}

/// The limit that libvirt sets for devices with address spaces of their own.
fn total(memory: u64, count: u64) -> Option<u64> {
    memory.checked_mul(count)?.checked_add(1 << 30)
}

/// Memory that is charged once for each device.
fn per_device(facts: &Facts, found: &mut Vec<Finding>) {
    let Some(one) = only(facts) else {
        return;
    };
    let (config, lines) = (&one.fact, &facts.lines);
    let count = config.devices.len() as u64;
    let Some(memory) = config.known_bytes() else {
        return;
    };
    // A limit that holds the memory once and not once for each device.
    let between = |limit: u64| limit >= memory && limit < memory.saturating_mul(count);
    let about = lines.iter().filter(|one| match one.fact {
        Line::MemlockExceeded { limit, .. } => {
            between(limit) || Some(limit) == total(memory, count)
        }
        Line::MemlockLimit { bytes: Some(limit) } => between(limit),
        Line::CannotLimit { bytes } => bytes > memory,
        Line::MapFailed { errno: ENOMEM, .. } => true,
        _ => false,
    });
    let about: Vec<_> = about.collect();
    if about.is_empty() || count < 2 || config.interface != Some(Interface::Type1) {
        return;
    }
    let total = total(memory, count);
    let number = total.and_then(|total| {
        about.iter().find(|one| matches!(one.fact, Line::CannotLimit { bytes } | Line::MemlockExceeded { limit: bytes, .. } if bytes == total))
    });
    let certainty = match (&config.viommu, number) {
        // The error alone may have another reason.
        (Some(_), _)
            if about
                .iter()
                .all(|one| matches!(one.fact, Line::MapFailed { .. })) =>
        {
            Certainty::Likely
        }
        (Some(_), _) => Certainty::Certain,
        (None, Some(_)) => Certainty::Likely,
        (None, None) => return,
    };
    let mut text = match &config.viommu {
        Some(model) => format!(
            "With a virtual IOMMU ({model}) each device has an address space of its own: type 1 maps and counts the \
             memory once for each of the {count} devices."
        ),
        None => format!("The limit is that of {count} devices that count the memory once each."),
    };
    if let Some(total) = total {
        text += &format!(" {count} times {memory} bytes and 1 GiB are {total} bytes.");
    }
    let finding = Finding::new("memlock.per-device", certainty, "libvirt src/qemu/qemu_domain.c, qemuDomainGetMemLockLimitBytes (8.7 and later); QEMU docs/bypass-iommu.txt; Linux drivers/vfio/vfio_iommu_type1.c")
        .devices(config.devices.iter().map(|device| device.address.clone()))
        .evidence([&one.evidence])
        .evidence(about.iter().map(|one| &one.evidence))
        .say(text)
        .advise(Advice::text("iommufd counts the memory once per user (libvirt: <driver iommufd='yes'/>, QEMU: -object iommufd)."))
        .advise(Advice::text("Without a virtual IOMMU all devices of one guest share a container, and the memory counts once."));
    found.push(finding);
}

fn mappings(facts: &Facts, found: &mut Vec<Finding>) {
    let advice = |finding: Finding| {
        finding
            .advise(Advice::text("iommufd has no such limit: -object iommufd,id=iommufd0 and iommufd=iommufd0 at the device."))
            .advise(Advice::text("vfio_iommu_type1.dma_entry_limit=N on the kernel's command line raises the limit of type 1."))
            .advise(Advice::text("Larger blocks need fewer mappings: block-size= of virtio-mem, huge pages."))
    };
    let source = "Linux drivers/vfio/vfio_iommu_type1.c, vfio_dma_do_map, dma_entry_limit; QEMU hw/vfio/listener.c, vfio_ram_discard_register_listener";
    let before = found.len();
    for one in &facts.lines {
        match &one.fact {
            Line::MapFailed { errno: ENOSPC, device, iommufd: false, .. } => found.push(advice(
                Finding::certain("memlock.mapping-limit", source)
                    .devices(device.clone())
                    .evidence([&one.evidence])
                    .say(
                        "A map failed with ENOSPC: the container's number of mappings (dma_entry_limit, 65,535 unless it \
                         was changed) is reached.",
                    ),
            )),
            Line::ManyMappings { most, device } => {
                let pieces = |bytes: u64| bytes_of(*most, bytes);
                found.push(advice(
                    Finding::likely("memlock.mapping-limit", source)
                        .devices(device.clone())
                        .evidence([&one.evidence])
                        .say(format!(
                            "The monitor warns that memory mapped in pieces (virtio-mem, confidential guests) may need \
                             more than the {most} mappings of a type 1 container: {} in pieces of 2 MiB, {} in pieces \
                             of 4 KiB. Whether the limit was reached is not known.",
                            pieces(2 << 20),
                            pieces(4 << 10)
                        )),
                ));
            }
            _ => {}
        }
    }
    // Before a start, by the configuration alone.
    if found.len() == before {
        for one in &facts.configurations {
            let short = needs::mappings(&one.fact, &Available::default());
            found.extend(short.map(|short| super::of_need(short).evidence([&one.evidence])));
        }
    }
}

fn bytes_of(count: u64, piece: u64) -> String {
    crate::size::bytes(count.saturating_mul(piece))
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Certainty;
    use super::super::{causes, of_text};

    const LINE: &str =
        "qemu-system-x86_64 -m 4G -device vfio-pci,host=01:00.0 -device vfio-pci,host=02:00.0\n";

    #[test]
    fn a_limit_below_the_need_is_too_low_by_arithmetic() {
        let low = of_text(&format!(
            "{LINE}Max locked memory         65536     65536     bytes\n"
        ));
        assert_eq!(causes(&low), ["memlock.too-low"]);
        assert_eq!(low[0].certainty, Certainty::Certain);
        let enough = of_text(&format!(
            "{LINE}Max locked memory         unlimited     unlimited     bytes\nVFIO_MAP_DMA failed: Cannot allocate memory\n"
        ));
        assert_eq!(causes(&enough), [""; 0]);
    }

    #[test]
    fn an_error_alone_is_likely() {
        let found = of_text("qemu-system-x86_64: VFIO_MAP_DMA failed: Cannot allocate memory\n");
        assert_eq!(
            (found[0].cause, found[0].certainty),
            ("memlock.too-low", Certainty::Likely)
        );
        let full = of_text("qemu-system-x86_64: VFIO_MAP_DMA failed: No space left on device\n");
        assert_eq!(
            (full[0].cause, full[0].certainty),
            ("memlock.mapping-limit", Certainty::Certain)
        );
    }

    #[test]
    fn memory_counts_per_device_with_a_virtual_iommu() {
        let text = format!(
            "{} -device intel-iommu\ncannot limit locked memory of process 7 to 9663676416: Operation not permitted\n",
            LINE.trim_end()
        );
        let found = of_text(&text);
        assert_eq!(
            causes(&found),
            ["memlock.cannot-raise", "memlock.per-device"]
        );
        assert_eq!(found[1].devices, ["0000:01:00.0", "0000:02:00.0"]);
    }

    #[test]
    fn a_limit_of_the_domain_itself_is_compared_before_a_start() {
        let domain = |limit: u64, iommu: &str| {
            of_text(&format!(
                "<domain type='kvm'><memory unit='GiB'>8</memory><memtune><hard_limit unit='GiB'>{limit}</hard_limit></memtune>\
                 <devices><hostdev mode='subsystem' type='pci'><source><address bus='0x41'/></source></hostdev>\
                 <hostdev mode='subsystem' type='pci'><source><address bus='0x61'/></source></hostdev>{iommu}</devices></domain>\n"
            ))
        };
        let first = |found: &[super::super::Finding]| {
            let memlock = found.iter().find(|one| one.cause.starts_with("memlock."));
            memlock.map(|one| (one.cause, one.certainty))
        };
        let certain = |cause| Some((cause, Certainty::Certain));
        assert_eq!(first(&domain(8, "")), None);
        assert_eq!(first(&domain(7, "")), certain("memlock.too-low"));
        let iommu = "<iommu model='intel'/>";
        assert_eq!(first(&domain(8, iommu)), certain("memlock.per-device"));
        assert_eq!(first(&domain(17, iommu)), None);
    }

    #[test]
    fn pieces_of_a_confidential_guest_may_run_out_before_a_start() {
        let line = "qemu-system-x86_64 -m 16G -object tdx-guest,id=t -machine q35,confidential-guest-support=t \
            -device vfio-pci,host=b0:00.0";
        let found = of_text(&format!("{line}\n"));
        assert_eq!(causes(&found), ["memlock.mapping-limit"]);
        assert_eq!(found[0].certainty, Certainty::Likely);
        assert_eq!(found[0].devices, ["0000:b0:00.0"]);
        // The monitor's own line is the evidence where it is given.
        let full = of_text(&format!(
            "{line}\nqemu-system-x86_64: VFIO_MAP_DMA failed: No space left on device\n"
        ));
        assert_eq!(causes(&full), ["memlock.mapping-limit"]);
        assert_eq!(full[0].certainty, Certainty::Certain);
    }

    #[test]
    fn a_counter_of_the_user_may_be_full_below_its_limit() {
        let line =
            "qemu-system-x86_64 -m 4G -object iommufd,id=i -device vfio-pci,host=01:00.0,iommufd=i";
        let failed = "VFIO_MAP_DMA failed: Cannot allocate memory";
        let found = of_text(&format!(
            "{line}\nMax locked memory         4294967296     4294967296     bytes\n{failed}\n"
        ));
        assert_eq!(causes(&found), ["memlock.too-low"]);
        assert_eq!(found[0].certainty, Certainty::Likely);
        let low = of_text(&format!(
            "{line}\nMax locked memory         65536     65536     bytes\n"
        ));
        assert_eq!(low[0].certainty, Certainty::Certain);
        assert!(low[0].text.contains("user->locked_vm"), "{}", low[0].text);
    }
}
