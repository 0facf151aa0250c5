//! Settings and states of a machine, which none of its files alone shows.

use super::super::facts::{Facts, Known, State};
use super::super::finding::{Advice, Certainty, Evidence, Finding};
use super::count;

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    for one in &facts.states {
        match &one.fact {
            State::NoGroups { tables } => found.push(no_groups(facts, one, tables.as_deref())),
            State::NoIommuGroup { group } => found.push(
                Finding::certain(
                    "group.no-iommu",
                    "Linux drivers/vfio/group.c, vfio_noiommu_group_alloc; drivers/vfio/Kconfig, VFIO_NOIOMMU",
                )
                .devices(members(facts, *group))
                .evidence([&one.evidence])
                .say(format!(
                    "VFIO passes the device of group {group} through without an IOMMU: it reaches all memory."
                ))
                .advise(Advice::text(
                    "vfio.enable_unsafe_noiommu_mode=0 on the kernel's command line, and a unit that translates.",
                )),
            ),
            State::SmallMaps => found.push(
                Finding::certain(
                    "option.small-maps",
                    "Linux drivers/vfio/vfio_iommu_type1.c, disable_hugepages, vfio_pin_pages_remote",
                )
                .evidence([&one.evidence])
                .say("VFIO's type 1 maps page by page: tables are up to 512 times as large, and maps as slow.")
                .advise(Advice::text("vfio_iommu_type1.disable_hugepages=0 on the kernel's command line.")),
            ),
            State::NoHugePages => found.push(
                Finding::certain(
                    "pages.transparent-off",
                    "Linux Documentation/admin-guide/mm/transhuge.rst",
                )
                .evidence([&one.evidence])
                .say("Transparent huge pages are off: memory of no pool comes in small pages.")
                .advise(Advice::command([
                    "sh",
                    "-c",
                    "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
                ])),
            ),
            State::FarUnit {
                unit,
                nodes,
                option,
            } => {
                let nodes: Vec<_> = nodes.iter().map(u32::to_string).collect();
                let advice = match option {
                    true => "iommu.node_domains=1 on the kernel's command line.",
                    false => "Tables for each node, where the monitor can build them: `dmaspace numa` shows the plan.",
                };
                found.push(
                    Finding::certain(
                        "group.far-unit",
                        "Linux drivers/iommu/intel/iommu.c, drivers/iommu/amd/init.c: tables are allocated on the unit's node",
                    )
                    .evidence([&one.evidence])
                    .say(format!(
                        "{unit} translates for devices of the nodes {}: a domain that several of them share has its tables \
                         on one node, far from some.",
                        nodes.join(", ")
                    ))
                    .advise(Advice::text(advice)),
                );
            }
            State::Domain { .. } | State::TlbOff { .. } => {}
        }
    }
    strict(facts, found);
    open(facts, found);
    tlbs(facts, found);
}

/// Members of a group, bridges too.
fn members(facts: &Facts, group: u32) -> Vec<String> {
    let members = facts.members.iter().filter(|one| one.fact.group == group);
    members.map(|one| one.fact.device.clone()).collect()
}

/// Lines of this machine's kernel that have one of these options.
fn options<'f>(facts: &'f Facts, options: &[&str]) -> Vec<&'f Evidence> {
    let own = facts.command_lines.iter();
    let own = own.filter(|one| facts.own.contains(&one.evidence.place.file));
    let with = own.filter(|one| {
        let mut words = one.fact.split_whitespace();
        words.any(|word| options.contains(&word))
    });
    with.map(|one| &one.evidence).collect()
}

/// No unit translates: firmware has none, or the kernel does not use it.
fn no_groups(facts: &Facts, one: &Known<State>, tables: Option<&[String]>) -> Finding {
    let off = ["intel_iommu=off", "amd_iommu=off", "iommu=off"];
    let switched_off = options(facts, &off);
    match tables {
        Some([]) => Finding::certain(
            "firmware.no-unit",
            "ACPI 6.5, section 5.2.6; Linux Documentation/ABI/testing/sysfs-firmware-acpi",
        )
        .evidence([&one.evidence])
        .say(
            "No IOMMU translates for any device, and none of firmware's tables names one: no device can be passed \
             through.",
        )
        .advise(Advice::text(
            "VT-d, AMD-Vi or SMMU in the firmware's setup; in a virtual machine a virtual IOMMU of its monitor.",
        )),
        Some(tables) => {
            let intel = tables.iter().any(|name| name == "DMAR");
            let finding = Finding::certain(
                "option.unit-off",
                "Linux Documentation/admin-guide/kernel-parameters.txt, intel_iommu, amd_iommu, iommu",
            )
            .evidence([&one.evidence])
            .evidence(switched_off.iter().copied())
            .say(format!(
                "No IOMMU translates for any device, though firmware names units ({}): the kernel does not use them, so \
                 no device can be passed through.",
                tables.join(", ")
            ));
            match (switched_off.is_empty(), intel) {
                (false, _) => finding.advise(Advice::text(format!(
                    "Remove {} from the kernel's command line.",
                    off.join(", ")
                ))),
                (true, true) => finding.advise(Advice::text(
                    "intel_iommu=on on the kernel's command line: without CONFIG_INTEL_IOMMU_DEFAULT_ON the unit stays \
                     off.",
                )),
                (true, false) => finding.advise(Advice::text(
                    "The unit's driver, in the kernel or as a module; the kernel's log tells why it gave up.",
                )),
            }
        }
        None => Finding::likely(
            "firmware.no-unit",
            "Linux Documentation/ABI/testing/sysfs-kernel-iommu_groups",
        )
        .evidence([&one.evidence])
        .say(
            "No IOMMU translates for any device: no device can be passed through. Firmware shows no tables that would \
             tell whether there is one.",
        )
        .advise(Advice::text(
            "The device tree (iommus = <...>), and the unit's driver in the kernel.",
        )),
    }
}

/// Groups in which drivers of the host use a domain of this type: numbers, devices, places.
fn of_type<'f>(facts: &'f Facts, wanted: &str) -> (Vec<u32>, Vec<String>, Vec<&'f Evidence>) {
    let (mut groups, mut functions, mut places) = (Vec::new(), Vec::new(), Vec::new());
    for one in &facts.states {
        if let State::Domain {
            group,
            domain,
            devices,
        } = &one.fact
        {
            if domain == wanted {
                groups.push(*group);
                functions.extend(devices.iter().cloned());
                places.push(&one.evidence);
            }
        }
    }
    (groups, functions, places)
}

fn strict(facts: &Facts, found: &mut Vec<Finding>) {
    let (groups, functions, places) = of_type(facts, "DMA");
    if groups.is_empty() {
        return;
    }
    let line = options(
        facts,
        &[
            "iommu.strict=1",
            "intel_iommu=strict",
            "amd_iommu=fullflush",
        ],
    );
    found.push(
        Finding::certain(
            "group.strict",
            "Linux Documentation/ABI/testing/sysfs-kernel-iommu_groups, type; Documentation/admin-guide/kernel-parameters.txt, iommu.strict",
        )
        .devices(functions)
        .evidence(places)
        .evidence(line)
        .say(format!(
            "Drivers of the host use {} with strict flushing: each unmap waits for its invalidation. Devices of guests \
             are not concerned.",
            count(groups.len() as u64, "group")
        ))
        .advise(Advice::text(
            "iommu.strict=0 on the kernel's command line, or DMA-FQ in a group's type (lazy: memory stays reachable a \
             little longer).",
        )),
    );
}

fn open(facts: &Facts, found: &mut Vec<Finding>) {
    let (groups, functions, places) = of_type(facts, "identity");
    if groups.is_empty() {
        return;
    }
    let line = options(facts, &["iommu=pt", "iommu.passthrough=1"]);
    found.push(
        Finding::certain(
            "group.identity",
            "Linux Documentation/ABI/testing/sysfs-kernel-iommu_groups, type; Documentation/admin-guide/kernel-parameters.txt, iommu.passthrough",
        )
        .devices(functions)
        .evidence(places)
        .evidence(line)
        .say(format!(
            "Devices of {} are not translated while drivers of the host use them: they reach all memory.",
            count(groups.len() as u64, "group")
        ))
        .advise(Advice::text(
            "iommu.passthrough=0 on the kernel's command line, or DMA in a group's type.",
        )),
    );
}

fn tlbs(facts: &Facts, found: &mut Vec<Finding>) {
    let off: Vec<_> = facts
        .states
        .iter()
        .filter_map(|one| match &one.fact {
            State::TlbOff { device } => Some((device.clone(), &one.evidence)),
            _ => None,
        })
        .collect();
    if off.is_empty() {
        return;
    }
    let lines = facts.command_lines.iter();
    let lines = lines.filter(|one| facts.own.contains(&one.evidence.place.file));
    let noats = lines.filter(|one| {
        let mut words = one.fact.split_whitespace();
        words.any(|word| {
            let list = word.strip_prefix("pci=");
            list.is_some_and(|list| list.split(',').any(|part| part == "noats"))
        })
    });
    let noats: Vec<_> = noats.map(|one| &one.evidence).collect();
    let certainty = match noats.is_empty() {
        true => Certainty::Unknown,
        false => Certainty::Certain,
    };
    let finding = Finding::new(
        "option.ats-off",
        certainty,
        "PCI Express 6.0, section 10.5.1; Linux Documentation/admin-guide/kernel-parameters.txt, pci=noats; drivers/pci/ats.c, pci_ats_supported, pci_enable_ats",
    )
    .devices(off.iter().map(|(device, _)| device.clone()))
    .evidence(off.iter().map(|(_, evidence)| *evidence))
    .evidence(noats.iter().copied());
    let devices = match off.len() {
        1 => "a device".to_owned(),
        several => format!("{several} devices"),
    };
    found.push(match certainty {
        Certainty::Certain => finding
            .say(format!(
                "The own TLB (ATS) of {devices} is off: pci=noats is on the kernel's command line."
            ))
            .advise(Advice::text("Remove noats from pci= on the kernel's command line.")),
        _ => finding
            .say(format!(
                "The own TLB (ATS) of {devices} is off. Linux leaves it off for devices that are untrusted, whose port \
                 firmware does not list, and, with VT-d, in a domain that does not translate; the input does not tell \
                 which."
            ))
            .advise(Advice::text(
                "Firmware's table (VT-d: ATSR, SATC; AMD: the device's entry of the IVRS) and the domain's type decide.",
            )),
    });
}
