//! Groups: members that keep a group from user space.

use std::collections::{BTreeMap, BTreeSet};

use dmaspace::devices::keeps;

use super::super::facts::{Driver, Facts, Function, Known, Line, Member, is_vfio};
use super::super::finding::{Advice, Certainty, Evidence, Finding};

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    // Two files may list the groups of two machines.
    let mut groups: BTreeMap<(usize, u32), BTreeMap<&str, &Known<Member>>> = BTreeMap::new();
    for member in &facts.members {
        groups
            .entry((facts.source(member.evidence.place.file), member.fact.group))
            .or_default()
            .entry(&member.fact.device)
            .or_insert(member);
    }
    let refused: Vec<_> = facts
        .lines
        .iter()
        .filter_map(|one| match &one.fact {
            Line::NotViable { group, device } => Some((*group, device.as_deref(), &one.evidence)),
            _ => None,
        })
        .collect();
    let all = facts.configurations.iter().chain(&facts.running);
    let given: BTreeSet<&str> = all
        .flat_map(|one| {
            one.fact
                .devices
                .iter()
                .map(|device| device.address.as_str())
        })
        .collect();
    let mut explained = Vec::new();
    for ((file, number), members) in &groups {
        let function = |device: &str| facts.known(device, Some(*file));
        let lines: Vec<&Evidence> = refused
            .iter()
            .filter(|(group, device, _)| {
                // The group's number is a machine's own: a device must match where the line names one.
                device.map_or(*group == Some(*number), |device| {
                    members.contains_key(device)
                })
            })
            .map(|(.., evidence)| *evidence)
            .collect();
        let bound = |device: &&str| matches!(function(device).map(|one| one.fact.driver), Some(Driver::Bound(driver)) if is_vfio(&driver));
        let wanted: Vec<&str> = members
            .keys()
            .copied()
            .filter(|device| bound(device) || given.contains(device))
            .collect();
        if wanted.is_empty() && lines.is_empty() {
            continue;
        }
        let blocking: Vec<(&str, Known<Function>, String)> = members
            .keys()
            .filter_map(|device| {
                let known = function(device)?;
                let Driver::Bound(driver) = known.fact.driver.clone() else {
                    return None;
                };
                keeps(&driver, known.fact.class).then_some((*device, known, driver))
            })
            .collect();
        if blocking.is_empty() {
            continue;
        }
        explained.extend(lines.iter().map(|evidence| evidence.place.clone()));
        found.push(not_viable(*number, members, &blocking, &lines));
        found.extend(inseparable(*number, members, &wanted, &blocking, facts));
    }
    // The line alone says that the group is not viable, and not by whom.
    for (group, device, evidence) in refused {
        if explained.contains(&evidence.place) {
            continue;
        }
        let listed = groups.iter().find(|((_, number), members)| {
            device.map_or(group == Some(*number), |device| {
                members.contains_key(device)
            })
        });
        found.push(undecided(
            group,
            device,
            evidence,
            listed.map(|(_, members)| members),
        ));
    }
}

/// The line of a group whose members have no known driver of the host.
fn undecided(
    group: Option<u32>,
    device: Option<&str>,
    evidence: &Evidence,
    members: Option<&BTreeMap<&str, &Known<Member>>>,
) -> Finding {
    const MOST_NAMED: usize = 16;
    let number = group.map_or_else(String::new, |group| format!(" {group}"));
    let mut text = format!(
        "Group{number} is not viable: a member that is no bridge is bound to a driver of the host. The line does not \
         name it; the members with their drivers do."
    );
    let finding = Finding::new("group.not-viable", Certainty::Unknown, "Linux Documentation/driver-api/vfio.rst; drivers/iommu/iommu.c, iommu_device_claim_dma_owner")
        .devices(device)
        .evidence([evidence])
        .advise(Advice::text("The output of what follows goes into the same call (log: the file with this line):"));
    let folder = match group {
        Some(group) => format!("/sys/kernel/iommu_groups/{group}/"),
        None => "/sys/kernel/iommu_groups/".to_owned(),
    };
    let finding = match members {
        Some(members) => {
            let names: Vec<&str> = members.keys().copied().take(MOST_NAMED).collect();
            text += &format!(" Its members: {}", names.join(", "));
            text += match members.len() > names.len() {
                true => ", and more.",
                false => ".",
            };
            let first = members.values().take(MOST_NAMED);
            finding.evidence(first.map(|one| &one.evidence))
        }
        None => finding.advise(Advice::output(
            ["find", &folder, "-type", "l"],
            "groups.txt",
        )),
    };
    finding
        .say(text)
        .advise(Advice::output(["lspci", "-Dnnk"], "lspci.txt"))
        .advise(Advice::command([
            "dmaspace",
            "explain",
            "log",
            "groups.txt",
            "lspci.txt",
        ]))
}

fn not_viable(
    number: u32,
    members: &BTreeMap<&str, &Known<Member>>,
    blocking: &[(&str, Known<Function>, String)],
    lines: &[&Evidence],
) -> Finding {
    let named: Vec<String> = blocking
        .iter()
        .map(|(device, _, driver)| format!("{device} ({driver})"))
        .collect();
    let mut finding = Finding::certain("group.not-viable", "Linux Documentation/driver-api/vfio.rst, \"VFIO Usage Example\"; drivers/vfio/vfio_main.c, vfio_dev_viable (before 5.19); drivers/iommu/iommu.c, iommu_device_claim_dma_owner")
        .devices(blocking.iter().map(|(device, ..)| *device))
        .evidence(lines.iter().copied());
    for (device, function, _) in blocking {
        finding = finding
            .evidence(members.get(device).map(|one| &one.evidence))
            .evidence([&function.evidence]);
    }
    finding = finding.say(format!(
        "Group {number} is not viable: {} of it {} bound to a driver of the host. Bridges to other buses keep their \
             drivers.",
        named.join(", "),
        if blocking.len() == 1 { "is" } else { "are" }
    ));
    let devices: Vec<_> = blocking.iter().map(|(device, ..)| *device).collect();
    finding
        .advise(Advice::each(
            &devices,
            ["driverctl", "set-override", Advice::EACH, "vfio-pci"],
        ))
        .advise(Advice::text(format!(
            "Or leave {} without a driver: that is enough for the group.",
            devices.join(", ")
        )))
}

/// Functions of one slot, some given and some used by the host.
fn inseparable(
    number: u32,
    members: &BTreeMap<&str, &Known<Member>>,
    wanted: &[&str],
    blocking: &[(&str, Known<Function>, String)],
    facts: &Facts,
) -> Option<Finding> {
    let slot = |device: &str| device.rsplit_once('.').map(|(slot, _)| slot.to_owned());
    let same: Vec<_> = blocking
        .iter()
        .filter(|(device, ..)| {
            wanted
                .iter()
                .any(|wanted| wanted != device && slot(wanted) == slot(device))
        })
        .collect();
    if same.is_empty() {
        return None;
    }
    let capabilities = |device: &str| facts.known(device, None).map(|one| one.fact);
    let absent = wanted
        .iter()
        .chain(same.iter().map(|(device, ..)| device))
        .all(|device| {
            capabilities(device).is_some_and(|function| function.capabilities && !function.acs)
        });
    let certainty = if absent {
        Certainty::Certain
    } else {
        Certainty::Likely
    };
    let finding = Finding::new("group.inseparable", certainty, "PCI Express 6.0, section 6.12 \"Access Control Services\"; Linux drivers/iommu/iommu.c, get_pci_function_alias_group, pci_device_group")
        .devices(same.iter().map(|(device, ..)| *device))
        .evidence(same.iter().filter_map(|(device, ..)| members.get(device)).map(|one| &one.evidence))
        .evidence(wanted.iter().filter_map(|device| members.get(device)).map(|one| &one.evidence))
        .say(format!(
            "Functions of one slot share group {number}{}: all of them go to one guest, or none.",
            match certainty {
                Certainty::Certain => ", and have no ACS",
                _ => ", as they do without ACS",
            }
        ))
        .advise(Advice::text("Give all functions of the card to one guest, or use virtual functions (SR-IOV) where it has them."));
    Some(finding)
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Certainty;
    use super::super::{causes, of_text};

    #[test]
    fn drivers_of_the_host_block_and_bridges_do_not() {
        let found = of_text(
            "4 0000:00:1c.0 060400 8086:1 pcieport\n4 0000:03:00.0 020000 8086:2 vfio-pci\n\
             4 0000:04:00.0 010802 8086:3 nvme\n4 0000:05:00.0 020000 8086:4 -\n",
        );
        assert_eq!(causes(&found), ["group.not-viable"]);
        assert_eq!(found[0].devices, ["0000:04:00.0"]);
    }

    #[test]
    fn groups_that_nobody_wants_are_no_findings() {
        assert_eq!(
            causes(&of_text(
                "4 0000:04:00.0 010802 8086:3 nvme\n5 0000:05:00.0 020000 8086:4 vfio-pci\n"
            )),
            [""; 0]
        );
    }

    #[test]
    fn members_of_a_listing_alone_are_named_and_their_drivers_asked_for() {
        let line = "qemu-system-x86_64: vfio 0000:09:00.0: group 12 is not viable\n";
        let listed = "/sys/kernel/iommu_groups/12/devices/0000:09:00.0\n/sys/kernel/iommu_groups/12/devices/0000:09:00.1\n";
        let advice = |text: &str| {
            let found = of_text(text);
            assert_eq!(causes(&found), ["group.not-viable"]);
            let lines: Vec<_> = found[0].advice.iter().map(|one| one.line()).collect();
            (found[0].text.clone(), lines)
        };
        let find = "find /sys/kernel/iommu_groups/12/ -type l > groups.txt".to_owned();
        let lspci = "lspci -Dnnk > lspci.txt".to_owned();
        let (_, lines) = advice(line);
        assert!(lines.contains(&find) && lines.contains(&lspci), "{lines:?}");
        let (text, lines) = advice(&format!("{line}{listed}"));
        assert!(
            text.ends_with("Its members: 0000:09:00.0, 0000:09:00.1."),
            "{text}"
        );
        assert!(
            !lines.contains(&find) && lines.contains(&lspci),
            "{lines:?}"
        );
    }

    #[test]
    fn a_line_of_another_machine_is_not_joined() {
        let found = of_text(
            "qemu-system-x86_64: -device vfio-pci,host=0000:09:00.0: vfio 0000:09:00.0: group 4 is not viable\n\
             4 0000:04:00.0 010802 8086:3 nvme\n",
        );
        assert_eq!(causes(&found), ["group.not-viable"]);
        assert_eq!(found[0].certainty, Certainty::Unknown);
    }
}
