//! State of each device: usable now, or after which commands, or never.

use std::path::Path;

use super::sysfs::{Device, Group, SysfsView};
use super::{DeviceReport, DeviceState, DevicesReport, GroupReport, Member, Places, Way};

/// Drivers besides those of VFIO that do no DMA of their own, so that the owner of the group may
/// (`driver_managed_dma` in Linux).
const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];

pub(super) fn judge(shown: SysfsView, places: &Places) -> DevicesReport {
    let vfio = places.dev.join("vfio/vfio").exists();
    let iommufd = places.dev.join("iommu").exists();
    let groups: Vec<_> = shown
        .groups
        .iter()
        .map(|(&number, group)| judge_group(number, group, &shown))
        .collect();
    let judged = shown.devices.iter().map(|device| {
        let group = groups
            .iter()
            .find(|group| Some(group.group) == device.group);
        let mut report = describe(device, &places.dev);
        match group {
            _ if stays(device) => {
                report.state = DeviceState::Bridge;
                report.reason = "a bridge: it stays with the host".into();
            }
            None => report.reason = "no IOMMU translates for it".into(),
            Some(group) if group.no_iommu => {
                report.reason = format!(
                    "group {} is none of an IOMMU (vfio-noiommu): the device would reach all memory",
                    group.group
                );
            }
            Some(group) => {
                let node = places.dev.join(format!("vfio/{}", group.group)).exists();
                let nodes = Nodes {
                    type1: vfio && node,
                    compatibility: iommufd && node,
                    iommufd: iommufd && report.cdev.is_some(),
                };
                in_group(&mut report, device, group, &nodes);
            }
        }
        report
    });
    let devices = judged.collect();
    DevicesReport {
        hidden: shown.hidden,
        vfio,
        iommufd,
        devices,
        groups,
    }
}

/// Presence of device nodes, by the way of use that they allow.
struct Nodes {
    type1: bool,
    compatibility: bool,
    iommufd: bool,
}

fn judge_group(number: u32, group: &Group, shown: &SysfsView) -> GroupReport {
    let pci = |name: &str| shown.devices.iter().find(|device| device.address == name);
    let members: Vec<_> = group
        .members
        .iter()
        .map(|(name, driver)| Member {
            name: name.clone(),
            driver: driver.clone(),
            blocks: driver
                .as_deref()
                .is_some_and(|driver| keeps(driver, pci(name).map(|device| device.class))),
        })
        .collect();
    let no_iommu = group.name.as_deref() == Some("vfio-noiommu");
    let bind = match no_iommu || !group.direct.is_empty() {
        true => Vec::new(),
        false => bind(number, &members, shown),
    };
    GroupReport {
        group: number,
        viable: members.iter().all(|member| !member.blocks),
        no_iommu,
        members,
        direct: group.direct.clone(),
        bind,
    }
}

/// Commands after which a group can be used: one for all members that need the same.
///
/// Source: Linux `Documentation/ABI/testing/sysfs-bus-pci`, "driver_override".
fn bind(group: u32, members: &[Member], shown: &SysfsView) -> Vec<String> {
    let (mut bound, mut free, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for member in members {
        let mut devices = shown.devices.iter();
        let pci = devices.find(|device| device.address == member.name);
        let taken = pci.is_some_and(|device| !stays(device));
        match &member.driver {
            Some(driver) if is_vfio(driver) => {}
            Some(_) if taken => bound.push(member.name.as_str()),
            None if taken => free.push(member.name.as_str()),
            // A device that vfio-pci does not take, or that a guest has no use for, goes without a driver.
            Some(_) if member.blocks => others.push(member.name.as_str()),
            _ => {}
        }
    }
    let over = "echo vfio-pci > /sys/bus/pci/devices/$d/driver_override";
    let unbind = "echo $d > /sys/bus/pci/devices/$d/driver/unbind";
    let take = "echo $d > /sys/bus/pci/drivers/vfio-pci/bind";
    let leave = format!("echo $d > /sys/kernel/iommu_groups/{group}/devices/$d/driver/unbind");
    let mut commands = Vec::new();
    let binds = !bound.is_empty() || !free.is_empty();
    if binds && !shown.vfio_pci {
        commands.push("modprobe vfio-pci".to_owned());
    }
    each(&mut commands, &free, &[over, take]);
    each(&mut commands, &bound, &[over, unbind, take]);
    each(&mut commands, &others, &[&leave]);
    commands
}

/// The commands for one device; for several a loop, which ends at the first that fails.
fn each(commands: &mut Vec<String>, devices: &[&str], body: &[&str]) {
    match devices {
        [] => {}
        [device] => commands.extend(body.iter().map(|command| command.replace("$d", device))),
        several => commands.push(format!(
            "for d in {}; do {} || break; done",
            several.join(" "),
            body.join(" && ")
        )),
    }
}

fn describe(device: &Device, dev: &Path) -> DeviceReport {
    let cdev = device
        .vfio
        .as_ref()
        .map(|name| dev.join("vfio/devices").join(name))
        .filter(|path| path.exists());
    DeviceReport {
        address: device.address.clone(),
        class: class_name(device.class).into(),
        class_code: format!("{:06x}", device.class),
        id: format!("{:04x}:{:04x}", device.vendor, device.device),
        group: device.group,
        unit: device.unit.clone(),
        node: device.node,
        driver: device.driver.clone(),
        cdev,
        ..DeviceReport::default()
    }
}

fn in_group(report: &mut DeviceReport, device: &Device, group: &GroupReport, nodes: &Nodes) {
    if !group.direct.is_empty() {
        let ranges = group.direct.iter();
        let ranges = ranges.map(|(first, last)| format!("{first:#x} to {last:#x}"));
        report.state = DeviceState::Identity;
        report.reason = format!(
            "firmware demands an identity mapping of {} for group {} (reserved_regions, direct), so Linux refuses it to \
             user space: with VT-d always, with other units since 6.6",
            ranges.collect::<Vec<_>>().join(", "),
            group.group
        );
        return;
    }
    let blocking: Vec<_> = group
        .members
        .iter()
        .filter(|member| member.blocks)
        .collect();
    let bound = device.driver.as_deref().is_some_and(is_vfio);
    if bound && blocking.is_empty() {
        for (there, way) in [
            (nodes.type1, Way::Type1),
            (nodes.compatibility, Way::Compatibility),
            (nodes.iommufd, Way::Iommufd),
        ] {
            report.ways.extend(there.then_some(way));
        }
        (report.state, report.reason) = if report.ways.is_empty() {
            let missing = format!(
                "bound, but its device nodes are missing: /dev/vfio/{} with /dev/vfio/vfio or \
                 /dev/iommu, or one of its own with /dev/iommu",
                group.group
            );
            (DeviceState::NoNode, missing)
        } else {
            (DeviceState::Ready, String::from("ready"))
        };
        return;
    }
    report.state = DeviceState::Bind;
    let mut reasons = Vec::new();
    if !bound {
        reasons.push(match &device.driver {
            Some(driver) => format!("bound to {driver}"),
            None => "bound to no driver".into(),
        });
    }
    for member in blocking
        .iter()
        .filter(|member| member.name != device.address)
    {
        let driver = member.driver.as_deref().unwrap_or_default();
        reasons.push(format!("{} of its group is bound to {driver}", member.name));
    }
    report.reason = reasons.join("; ");
}

/// True where the driver of a group's member keeps VFIO from the group: it does DMA of its own. `class` is the class
/// code of a PCI function, `0xBBSSPP`: bridges to other buses keep no group.
///
/// Source: Linux `drivers/iommu/iommu.c`, `iommu_device_claim_dma_owner`; before 5.19 `drivers/vfio/vfio.c`,
/// `vfio_dev_viable`.
pub fn keeps(driver: &str, class: Option<u32>) -> bool {
    let bridge = class.is_some_and(is_bridge);
    !bridge && !is_vfio(driver) && !HARMLESS.contains(&driver)
}

/// `vfio-pci`, or one of its variants for a family of devices, or a driver of VFIO on another bus.
pub fn is_vfio(driver: &str) -> bool {
    driver.split(['-', '_']).any(|word| word == "vfio")
}

/// A bridge to another bus: its header is not of type 0.
const fn is_bridge(class: u32) -> bool {
    matches!(class >> 8, 0x0604 | 0x0607 | 0x0609)
}

/// A bridge to another bus, which no driver of VFIO takes, or the machine's own host or ISA bridge.
const fn stays(device: &Device) -> bool {
    is_bridge(device.class) || matches!(device.class >> 8, 0x0600 | 0x0601)
}

/// Name of a class. Source: PCI Code and ID Assignment Specification 1.15, 1 "Class
/// Codes".
const fn class_name(class: u32) -> &'static str {
    match class >> 8 {
        0x0106 => "SATA",
        0x0108 => "NVMe",
        0x0200 => "Ethernet",
        0x0300 => "VGA",
        0x0302 => "3D controller",
        0x0403 => "audio",
        0x0600 => "host bridge",
        0x0601 => "ISA bridge",
        0x0604 => "PCI bridge",
        0x0c03 => "USB",
        0x0c05 => "SMBus",
        other => match other >> 8 {
            0x01 => "storage",
            0x02 => "network",
            0x03 => "display",
            0x04 => "multimedia",
            0x05 => "memory",
            0x06 => "bridge",
            0x07 => "communication",
            0x08 => "system",
            0x09 => "input",
            0x0a => "docking station",
            0x0b => "processor",
            0x0c => "serial bus",
            0x0d => "wireless",
            0x0e => "intelligent I/O",
            0x0f => "satellite",
            0x10 => "encryption",
            0x11 => "signal processing",
            0x12 => "accelerator",
            _ => "other",
        },
    }
}
