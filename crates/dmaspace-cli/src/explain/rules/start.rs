//! Reasons of a slow start, from a configuration alone.

use super::super::facts::{Facts, Known, Line};
use super::super::finding::{Advice, Certainty, Evidence, Finding};
use crate::inspect::needs::{self, Available, LARGE_BAR};
use crate::inspect::{Guest, Interface, Monitor};

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    for one in &facts.configurations {
        small_pages(one, found);
        threads(facts, one, found);
    }
    bars(facts, found);
    peers(facts, found);
}

fn small_pages(one: &Known<Guest>, found: &mut Vec<Finding>) {
    let config = &one.fact;
    let mapped =
        config.interface.is_some() && !config.devices.is_empty() && config.confidential.is_none();
    let parts = config.memory.iter();
    let small: u64 = parts
        .filter(|part| part.pool_bytes.is_none() && !part.shared && part.prealloc_threads == 0)
        .fold(0, |sum, part| sum.saturating_add(part.bytes));
    if !mapped || small == 0 {
        return;
    }
    found.push(
        Finding::certain("start.small-pages", "Linux drivers/vfio/vfio_iommu_type1.c, vfio_pin_pages_remote; drivers/iommu/iommufd/pages.c, pfn_reader_user_pin")
            .evidence([&one.evidence])
            .say(format!(
                "{} of private memory are in no pool and are not brought in before: the map for the devices faults them \
                 in, page by page.",
                crate::size::bytes(small)
            ))
            .advise(Advice::text(if config.monitor == Monitor::Libvirt {
                "<memoryBacking><hugepages/></memoryBacking>: pages of a pool."
            } else {
                "-object memory-backend-memfd,hugetlb=on,prealloc=on: pages of a pool."
            }))
            .advise(Advice::text("`dmaspace inspect` predicts the times of this configuration.")),
    );
}

/// One thread that brings memory in: QEMU 5.0 to 7.0.
fn threads(facts: &Facts, one: &Known<Guest>, found: &mut Vec<Finding>) {
    let config = &one.fact;
    if config.monitor == Monitor::Libvirt
        || !config
            .memory
            .iter()
            .any(|part| part.prealloc_threads > 0 && !part.threads_given)
    {
        return;
    }
    let version = facts.lines.iter().find_map(|line| match line.fact {
        Line::Qemu { major, minor } => Some(((major, minor), &line.evidence)),
        _ => None,
    });
    let one_thread = |version: (u32, u32)| ((5, 0)..=(7, 0)).contains(&version);
    let (certainty, evidence): (Certainty, Option<&Evidence>) =
        match (version, config.machine_version) {
            (Some((version, evidence)), _) if one_thread(version) => {
                (Certainty::Certain, Some(evidence))
            }
            (Some(_), _) => return,
            // The type of the machine is of this version or an older one.
            (None, Some(machine)) if machine > (7, 0) => return,
            (None, _) => (Certainty::Likely, None),
        };
    found.push(
        Finding::new("start.prealloc-threads", certainty, "QEMU backends/hostmem.c, host_memory_backend_init; commit f8d426a685 (7.1)")
            .evidence([&one.evidence])
            .evidence(evidence)
            .say(format!(
                "Memory is brought in before the start without prealloc-threads: {} one thread does it.",
                match certainty {
                    Certainty::Certain => "in this version of QEMU",
                    _ => "in QEMU 5.0 to 7.0",
                }
            ))
            .advise(Advice::text("prealloc-threads=N at the memory object, N as many as the guest has processors, up to 32.")),
    );
}

/// Large BARs, mapped page by page.
fn bars(facts: &Facts, found: &mut Vec<Finding>) {
    let version = facts.lines.iter().find_map(|line| match line.fact {
        Line::Linux { major, minor } => Some(((major, minor), &line.evidence)),
        _ => None,
    });
    if version.is_some_and(|(version, _)| version >= (6, 15)) {
        return;
    }
    let type1: Vec<&str> = facts
        .configurations
        .iter()
        .filter(|one| one.fact.interface == Some(Interface::Type1))
        .flat_map(|one| {
            one.fact
                .devices
                .iter()
                .map(|device| device.address.as_str())
        })
        .collect();
    let listed = facts.functions.iter().map(|((device, _), known)| {
        let largest = known.fact.bars.iter().map(|(_, bytes)| *bytes).max();
        (device, largest.unwrap_or(0), &known.evidence)
    });
    let placed = facts
        .areas
        .iter()
        .filter_map(|area| Some((area.fact.device.as_ref()?, area.fact.length, &area.evidence)));
    for (device, largest, evidence) in listed.chain(placed) {
        let named = type1.contains(&device.as_str());
        if largest < LARGE_BAR || !(named || facts.is_given(device)) {
            continue;
        }
        let certainty = match (version, named) {
            (Some(_), true) => Certainty::Certain,
            _ => Certainty::Likely,
        };
        found.push(
            Finding::new("start.bar-mapping", certainty, "Linux 6.15 drivers/vfio/pci/vfio_pci_core.c, vfio_pci_mmap_huge_fault; drivers/vfio/vfio_iommu_type1.c, follow_fault_pfn")
                .device(device.clone())
                .evidence([evidence])
            .evidence(version.map(|(_, evidence)| evidence))
                .say(needs::page_by_page(device, largest))
                .advise(Advice::text("Linux 6.15 or later maps BARs in huge pages.")),
        );
    }
}

/// BARs that iommufd does not map.
fn peers(facts: &Facts, found: &mut Vec<Finding>) {
    let version = |of: fn(&Line) -> Option<(u32, u32)>| {
        let mut lines = facts.lines.iter();
        lines.find_map(|line| Some((of(&line.fact)?, &line.evidence)))
    };
    let linux = version(|line| match line {
        Line::Linux { major, minor } => Some((*major, *minor)),
        _ => None,
    });
    let qemu = version(|line| match line {
        Line::Qemu { major, minor } => Some((*major, *minor)),
        _ => None,
    });
    let available = Available {
        linux: linux.map(|(version, _)| version),
        qemu: qemu.map(|(version, _)| version),
        ..Available::default()
    };
    for one in &facts.configurations {
        let versions = linux.iter().chain(&qemu).map(|(_, evidence)| *evidence);
        let versions: Vec<_> = versions.collect();
        for short in needs::bars(&one.fact, &available) {
            let finding = super::of_need(short).evidence([&one.evidence]);
            found.push(finding.evidence(versions.iter().copied()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Certainty;
    use super::super::{causes, of_text};

    #[test]
    fn memory_of_a_pool_is_not_faulted_in_by_the_map() {
        let line = "qemu-system-x86_64 -m 4G -device vfio-pci,host=01:00.0";
        assert_eq!(
            causes(&of_text(&format!("{line}\n"))),
            ["start.small-pages"]
        );
        assert_eq!(causes(&of_text("qemu-system-x86_64 -m 4G\n")), [""; 0]);
        let pool =
            "-machine q35,memory-backend=a -object memory-backend-memfd,id=a,size=4G,hugetlb=on";
        assert_eq!(causes(&of_text(&format!("{line} {pool}\n"))), [""; 0]);
    }

    #[test]
    fn one_thread_is_certain_with_the_version() {
        let line = "qemu-system-x86_64 -machine q35,memory-backend=a -object memory-backend-memfd,id=a,size=4G,hugetlb=on,prealloc=on\n";
        let alone = of_text(line);
        assert_eq!(
            (alone[0].cause, alone[0].certainty),
            ("start.prealloc-threads", Certainty::Likely)
        );
        let old = of_text(&format!("{line}QEMU emulator version 6.2.0\n"));
        assert_eq!(old[0].certainty, Certainty::Certain);
        assert_eq!(
            causes(&of_text(&format!("{line}QEMU emulator version 9.0.0\n"))),
            [""; 0]
        );
    }

    #[test]
    fn large_bars_need_a_kernel_and_a_device() {
        let bar = "01:00.0 3D controller [0302]: x [10de:1]\n\tRegion 2: Memory at 20000000000 (64-bit, prefetchable) [size=128G]\n\tKernel driver in use: vfio-pci\n";
        let pool =
            "qemu-system-x86_64 -m 4G -mem-path /dev/hugepages -device vfio-pci,host=01:00.0\n";
        let found = of_text(&format!("{bar}{pool}Linux version 6.8.0\n"));
        assert_eq!(
            (found[0].cause, found[0].certainty),
            ("start.bar-mapping", Certainty::Certain)
        );
        assert_eq!(
            causes(&of_text(&format!("{bar}{pool}Linux version 6.16.0\n"))),
            [""; 0]
        );
    }

    #[test]
    fn peers_do_not_reach_bars_by_iommufd_of_older_versions() {
        let device = |bus: u32| format!("-device vfio-pci,host=0{bus}:00.0,iommufd=i");
        let line = format!(
            "qemu-system-x86_64 -m 4G -mem-path /dev/hugepages -object iommufd,id=i {} {}\n",
            device(1),
            device(2)
        );
        let old = of_text(&format!("{line}Linux version 6.18.2\n"));
        assert_eq!(
            (old[0].cause, old[0].certainty),
            ("start.bar-peer", Certainty::Certain)
        );
        let before = of_text(&format!("{line}QEMU emulator version 10.2.0\n"));
        assert_eq!(causes(&before), ["start.bar-peer"]);
        let new = format!("{line}Linux version 7.0.1\nQEMU emulator version 11.0.0\n");
        assert_eq!(causes(&of_text(&new)), [""; 0]);
        assert_eq!(causes(&of_text(&line)), [""; 0]);
    }
}
