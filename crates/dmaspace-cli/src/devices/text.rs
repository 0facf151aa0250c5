//! The machine's devices as text: a table, then what it takes for those that cannot be used yet.

use std::collections::BTreeSet;

use dmaspace::devices::{DeviceReport, DeviceState, DevicesReport, GroupReport, Way};

use super::Names;
use super::units::UnitReport;
use crate::draw::sheet::{Paint, Sheet};

/// Stand-in for an empty cell.
const NONE: &str = "-";

/// The whole report.
pub(crate) fn write(
    report: &DevicesReport,
    units: &[UnitReport],
    names: &Names,
    paint: Paint,
) -> String {
    let mut sheet = Sheet::new(paint);
    machine(&mut sheet, report);
    for unit in units {
        sheet.value(&unit.name, &capabilities(unit));
    }
    table(&mut sheet, report);
    named(&mut sheet, report, names);
    for group in &report.groups {
        group_needs(&mut sheet, group, report);
    }
    sheet.into_text()
}

fn machine(sheet: &mut Sheet, report: &DevicesReport) {
    sheet.section("machine");
    let mut units: Vec<_> = report
        .devices
        .iter()
        .filter_map(|device| device.unit.as_deref())
        .collect();
    units.sort_unstable();
    units.dedup();
    if report.hidden {
        sheet.value("IOMMU", "not known: the kernel shows nothing at /sys");
    } else if report.groups.iter().all(|group| group.no_iommu) {
        sheet.value(
            "IOMMU",
            "none in use: switch it on in the firmware's setup; on Intel also intel_iommu=on on \
             the kernel's command line",
        );
    } else if units.is_empty() {
        sheet.value("IOMMU", "in use");
    } else {
        sheet.value("IOMMU", &units.join(", "));
    }
    let there = |there, path: &str| match there {
        true => path.to_string(),
        false => format!("no {path}"),
    };
    sheet.value("vfio", &there(report.vfio, "/dev/vfio/vfio"));
    sheet.value("iommufd", &there(report.iommufd, "/dev/iommu"));
}

/// `12 devices, node 0: 39 bits, 2 MiB pages`.
fn capabilities(unit: &UnitReport) -> String {
    let node = unit.node.map_or("unknown".into(), |node| node.to_string());
    let devices = match unit.devices {
        1 => "1 device".to_owned(),
        devices => format!("{devices} devices"),
    };
    let width = unit.address_bits.map(|bits| format!("{bits} bits"));
    let can = unit.can.iter().map(|can| (*can).to_owned());
    let can: Vec<_> = width.into_iter().chain(can).collect();
    let mut text = format!("{devices}, node {node}");
    if !can.is_empty() {
        text += &format!(": {}", can.join(", "));
    }
    if !unit.counters.is_empty() {
        text += &format!("; counters: {}", unit.counters.join(", "));
    }
    text
}

fn table(sheet: &mut Sheet, report: &DevicesReport) {
    sheet.section("devices");
    let head = [
        "address", "class", "id", "group", "unit", "node", "driver", "use",
    ];
    let mut rows = vec![head.map(String::from)];
    rows.extend(report.devices.iter().map(row));
    if rows.len() == 1 {
        sheet.line(if report.hidden {
            "  not known"
        } else {
            "  none"
        });
        return;
    }
    sheet.table(&rows);
}

/// Names of the devices of each number; no section without a list of names.
fn named(sheet: &mut Sheet, report: &DevicesReport, names: &Names) {
    let ids: BTreeSet<&str> = report.devices.iter().map(|one| one.id.as_str()).collect();
    let mut named = ids.iter().filter_map(|id| Some((id, names.of(id)?)));
    if let Some((id, name)) = named.next() {
        sheet.section("names");
        sheet.value(id, &name);
    }
    named.for_each(|(id, name)| sheet.value(id, &name));
}

fn row(device: &DeviceReport) -> [String; 8] {
    let number = |number: Option<u32>| number.map_or(NONE.into(), |number| number.to_string());
    let name = |name: &Option<String>| name.clone().unwrap_or_else(|| NONE.into());
    let ways: Vec<_> = device.ways.iter().copied().map(Way::name).collect();
    [
        device.address.clone(),
        device.class.clone(),
        device.id.clone(),
        number(device.group),
        name(&device.unit),
        number(device.node),
        name(&device.driver),
        match device.state {
            DeviceState::Ready => ways.join(", "),
            DeviceState::Bind => "bind first".into(),
            DeviceState::NoNode => "no device node".into(),
            DeviceState::Identity => "refused".into(),
            DeviceState::Bridge => "bridge".into(),
            DeviceState::NoIommu => "no IOMMU".into(),
        },
    ]
}

/// Obstacles to the use of a group, once for all of it, and the commands against them.
fn group_needs(sheet: &mut Sheet, group: &GroupReport, report: &DevicesReport) {
    let own = report.devices.iter();
    let own = own.filter(|device| device.group == Some(group.group));
    let held = |device: &&DeviceReport| {
        matches!(
            device.state,
            DeviceState::Bind | DeviceState::NoNode | DeviceState::Identity
        )
    };
    let mut held: Vec<_> = own.filter(held).collect();
    if held.is_empty() {
        return;
    }
    sheet.section(&format!("group {}", group.group));
    sheet.value("members", &members(group));
    // Reasons of the group are those of each of its devices.
    held.dedup_by(|one, before| one.reason == before.reason);
    match held.as_slice() {
        [one] => sheet.value("now", &one.reason),
        several => {
            for (nth, device) in several.iter().enumerate() {
                let name = if nth == 0 { "now" } else { "" };
                // Other members have lines of their own.
                let own = device.reason.split("; ").next().unwrap_or_default();
                sheet.value(name, &format!("{}: {own}", device.address));
            }
        }
    }
    for (nth, command) in group.bind.iter().enumerate() {
        let name = if nth == 0 { "bind" } else { "" };
        sheet.copied(&format!("  {name:<11} {command}"));
    }
}

fn members(group: &GroupReport) -> String {
    let members = group.members.iter().map(|member| match &member.driver {
        Some(driver) => format!("{} ({driver})", member.name),
        None => member.name.clone(),
    });
    members.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use dmaspace::devices::Member;

    use super::*;

    fn device(address: &str, class: &str, state: DeviceState) -> DeviceReport {
        DeviceReport {
            address: address.into(),
            class: class.into(),
            id: "8086:10d3".into(),
            state,
            ..DeviceReport::default()
        }
    }

    #[test]
    fn a_machine_without_an_iommu_says_how_to_get_one() {
        let report = DevicesReport {
            devices: vec![DeviceReport {
                driver: Some("virtio-pci".into()),
                ..device("0000:00:03.0", "Ethernet", DeviceState::NoIommu)
            }],
            ..DevicesReport::default()
        };
        let expected = "\
machine
  IOMMU       none in use: switch it on in the firmware's setup; on Intel also
              intel_iommu=on on the kernel's command line
  vfio        no /dev/vfio/vfio
  iommufd     no /dev/iommu

devices
  address       class     id         group  unit  node  driver      use
  0000:00:03.0  Ethernet  8086:10d3  -      -     -     virtio-pci  no IOMMU
";
        assert_eq!(
            write(&report, &[], &Names::default(), Paint::PLAIN),
            expected
        );
    }

    #[test]
    fn a_group_that_is_none_of_an_iommu_is_no_sign_of_one() {
        let group = |no_iommu| DevicesReport {
            groups: vec![GroupReport {
                no_iommu,
                ..GroupReport::default()
            }],
            ..DevicesReport::default()
        };
        let says_none = |report: DevicesReport| {
            write(&report, &[], &Names::default(), Paint::PLAIN)
                .contains("  IOMMU       none in use")
        };
        assert!(says_none(group(true)));
        assert!(!says_none(group(false)));
    }

    #[test]
    fn a_machine_without_devices_says_so() {
        let text = write(
            &DevicesReport::default(),
            &[],
            &Names::default(),
            Paint::PLAIN,
        );
        assert!(text.ends_with("\ndevices\n  none\n"), "{text}");
        let hidden = DevicesReport {
            hidden: true,
            ..DevicesReport::default()
        };
        let text = write(&hidden, &[], &Names::default(), Paint::PLAIN);
        assert!(text.contains("\n  IOMMU       not known: "), "{text}");
        assert!(text.ends_with("\ndevices\n  not known\n"), "{text}");
    }

    #[test]
    fn a_device_without_a_node_is_explained_and_one_that_is_ready_is_not() {
        let with = |state| {
            let report = DevicesReport {
                devices: vec![DeviceReport {
                    group: Some(7),
                    reason: "there is no /dev/vfio/7".into(),
                    ..device("0000:00:03.0", "Ethernet", state)
                }],
                groups: vec![GroupReport {
                    group: 7,
                    members: vec![Member {
                        name: "0000:00:03.0".into(),
                        ..Member::default()
                    }],
                    ..GroupReport::default()
                }],
                ..DevicesReport::default()
            };
            write(&report, &[], &Names::default(), Paint::PLAIN)
        };
        let text = with(DeviceState::NoNode);
        let explained =
            "\ngroup 7\n  members     0000:00:03.0\n  now         there is no /dev/vfio/7\n";
        assert!(text.ends_with(explained), "{text}");
        for state in [
            DeviceState::Ready,
            DeviceState::Bridge,
            DeviceState::NoIommu,
        ] {
            let text = with(state);
            assert!(!text.contains("/dev/vfio/7"), "{text}");
        }
    }

    #[test]
    fn a_unit_is_described_by_its_registers() {
        let unit = UnitReport {
            name: "dmar0".into(),
            node: Some(1),
            devices: 2,
            address_bits: Some(39),
            can: vec!["2 MiB pages"],
            counters: vec!["iotlb_hit".into()],
            ..UnitReport::default()
        };
        let report = DevicesReport::default();
        let text = write(&report, &[unit], &Names::default(), Paint::PLAIN);
        let line = "\n  dmar0       2 devices, node 1: 39 bits, 2 MiB pages; counters: iotlb_hit\n";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn devices_of_one_group_are_explained_once() {
        let member = |name: &str| Member {
            name: name.into(),
            driver: Some("nvme".into()),
            blocks: true,
        };
        let names: Vec<_> = (0..8).map(|nth| format!("0000:03:00.{nth}")).collect();
        let command = format!("for d in {}; do echo $d || break; done", names.join(" "));
        let report = DevicesReport {
            devices: names
                .iter()
                .map(|name| DeviceReport {
                    group: Some(3),
                    reason: "bound to nvme; 0000:03:00.9 of its group is bound to nvme".into(),
                    ..device(name, "NVMe", DeviceState::Bind)
                })
                .collect(),
            groups: vec![GroupReport {
                group: 3,
                members: names.iter().map(|name| member(name)).collect(),
                bind: vec![command.clone()],
                ..GroupReport::default()
            }],
            ..DevicesReport::default()
        };
        let text = write(&report, &[], &Names::default(), Paint::PLAIN);
        assert_eq!(text.matches("\n  bind ").count(), 1, "{text}");
        // A pasted command is one line, however long it is.
        assert!(
            text.ends_with(&format!("  bind        {command}\n")),
            "{text}"
        );
    }

    #[test]
    fn a_group_is_shown_whole_with_what_it_takes() {
        let member = |name: &str, driver: &str, blocks| Member {
            name: name.into(),
            driver: Some(driver.into()),
            blocks,
        };
        let grouped = |group, unit: &str, driver: &str, report| DeviceReport {
            group: Some(group),
            unit: Some(unit.into()),
            driver: Some(driver.into()),
            ..report
        };
        let report = DevicesReport {
            hidden: false,
            vfio: true,
            iommufd: true,
            devices: vec![
                grouped(
                    1,
                    "dmar1",
                    "pcieport",
                    device("0000:00:01.0", "PCI bridge", DeviceState::Bridge),
                ),
                DeviceReport {
                    reason: "0000:01:00.1 of its group is bound to snd_hda_intel".into(),
                    ..grouped(
                        1,
                        "dmar1",
                        "vfio-pci",
                        device("0000:01:00.0", "VGA", DeviceState::Bind),
                    )
                },
                DeviceReport {
                    node: Some(0),
                    ways: vec![Way::Type1, Way::Compatibility, Way::Iommufd],
                    ..grouped(
                        12,
                        "dmar0",
                        "vfio-pci",
                        device("0000:02:00.0", "NVMe", DeviceState::Ready),
                    )
                },
            ],
            groups: vec![GroupReport {
                group: 1,
                viable: false,
                no_iommu: false,
                members: vec![
                    member("0000:00:01.0", "pcieport", false),
                    member("0000:01:00.0", "vfio-pci", false),
                    member("0000:01:00.1", "snd_hda_intel", true),
                ],
                direct: Vec::new(),
                bind: vec![
                    "echo vfio-pci > /sys/bus/pci/devices/0000:01:00.1/driver_override".into(),
                    "echo 0000:01:00.1 > /sys/bus/pci/drivers/vfio-pci/bind".into(),
                ],
            }],
        };
        let list = "8086  Intel Corporation\n\t10d3  82574L Gigabit Network Connection\n";
        let names = Names(list.into());
        let expected = "\
machine
  IOMMU       dmar0, dmar1
  vfio        /dev/vfio/vfio
  iommufd     /dev/iommu

devices
  address       class       id         group  unit   node  driver    use
  0000:00:01.0  PCI bridge  8086:10d3  1      dmar1  -     pcieport  bridge
  0000:01:00.0  VGA         8086:10d3  1      dmar1  -     vfio-pci  bind first
  0000:02:00.0  NVMe        8086:10d3  12     dmar0  0     vfio-pci  vfio, vfio
                                                                     on iommufd,
                                                                     iommufd

names
  8086:10d3   Intel Corporation 82574L Gigabit Network Connection

group 1
  members     0000:00:01.0 (pcieport), 0000:01:00.0 (vfio-pci), 0000:01:00.1
              (snd_hda_intel)
  now         0000:01:00.1 of its group is bound to snd_hda_intel
  bind        echo vfio-pci > /sys/bus/pci/devices/0000:01:00.1/driver_override
              echo 0000:01:00.1 > /sys/bus/pci/drivers/vfio-pci/bind
";
        assert_eq!(write(&report, &[], &names, Paint::PLAIN), expected);
    }
}
