//! Reports on devices in made-up machines.

use std::fs;

use dmaspace::devices::{DeviceReport, DeviceState, DevicesReport, NotReady, Places, Way};

use crate::files::Files;

struct Machine(Files);

impl std::ops::Deref for Machine {
    type Target = Files;

    fn deref(&self) -> &Files {
        &self.0
    }
}

/// A device: address, class, group, node, driver.
type Device<'a> = (&'a str, u32, Option<u32>, i32, Option<&'a str>);

impl Machine {
    fn new(devices: &[Device<'_>]) -> Self {
        let machine = Self(Files::new());
        machine.directory("sys/bus/pci/devices");
        machine.directory("dev");
        for device in devices {
            machine.add(device);
        }
        machine
    }

    fn add(&self, (address, class, group, node, driver): &Device<'_>) {
        // The bus has links to the devices, as on a real machine.
        let real = format!("sys/devices/pci0000:00/{address}");
        self.directory(&real);
        self.link(&format!("sys/bus/pci/devices/{address}"), self.path(&real));
        self.pci(&real, *class, *node);
        if let Some(driver) = driver {
            let path = format!("sys/bus/pci/drivers/{driver}");
            self.directory(&path);
            self.link(&format!("{real}/driver"), self.path(&path));
        }
        if let Some(group) = group {
            let path = format!("sys/kernel/iommu_groups/{group}");
            self.link(&format!("{path}/devices/{address}"), self.path(&real));
            self.link(&format!("{real}/iommu_group"), self.path(&path));
            self.link(&format!("{real}/iommu"), "../../virtual/iommu/dmar0");
        }
    }

    /// VFIO has the device under this name, and a node of its own for it.
    fn cdev(&self, address: &str, name: &str) -> &Self {
        self.directory(&format!("sys/bus/pci/devices/{address}/vfio-dev/{name}"));
        self.file(&format!("dev/vfio/devices/{name}"), "");
        self
    }

    fn report(&self) -> DevicesReport {
        DevicesReport::read(&self.places()).unwrap()
    }
}

fn device<'a>(report: &'a DevicesReport, address: &str) -> &'a DeviceReport {
    let mut devices = report.devices.iter();
    devices.find(|device| device.address == address).unwrap()
}

const NIC: u32 = 0x02_0000;
const BRIDGE: u32 = 0x06_0400;

#[test]
fn without_an_iommu_nothing_can_be_used() {
    let machine = Machine::new(&[("0000:00:03.0", NIC, None, -1, Some("e1000e"))]);
    let expected = DeviceReport {
        address: "0000:00:03.0".into(),
        class: "Ethernet".into(),
        class_code: "020000".into(),
        id: "8086:10d3".into(),
        driver: Some("e1000e".into()),
        state: DeviceState::NoIommu,
        reason: "no IOMMU translates for it".into(),
        ..DeviceReport::default()
    };
    let report = machine.report();
    assert_eq!(report.devices, [expected]);
    assert_eq!(report.groups, []);
    assert!(!report.vfio && !report.iommufd);
}

#[test]
fn without_a_bus_there_are_no_devices() {
    let machine = Machine::new(&[]);
    assert_eq!(machine.report(), DevicesReport::default());
    machine.file("sys/kernel/uevent_seqnum", "1\n");
    fs::remove_dir_all(machine.path("sys/bus")).unwrap();
    assert_eq!(machine.report(), DevicesReport::default());
}

#[test]
fn without_sysfs_devices_are_not_known() {
    let machine = Machine::new(&[]);
    fs::remove_dir_all(machine.path("sys/bus")).unwrap();
    let report = machine.report();
    assert!(report.hidden && report.devices.is_empty(), "{report:?}");
}

#[test]
fn a_directory_that_cannot_be_read_is_named() {
    let machine = Machine::new(&[]);
    fs::remove_dir_all(machine.path("sys/bus/pci")).unwrap();
    machine.file("sys/bus/pci/devices", "no directory");
    let places = machine.places();
    let error = DevicesReport::read(&places).unwrap_err();
    assert!(
        error.to_string().ends_with("sys/bus/pci/devices"),
        "{error}"
    );
}

#[test]
fn a_device_by_itself_is_bound_by_three_commands() {
    let machine = Machine::new(&[("0000:00:03.0", NIC, Some(7), 1, Some("e1000e"))]);
    machine.directory("sys/bus/pci/drivers/vfio-pci");
    let report = machine.report();
    let found = device(&report, "0000:00:03.0");
    assert_eq!(found.state, DeviceState::Bind);
    assert_eq!(found.reason, "bound to e1000e");
    assert_eq!((found.group, found.node), (Some(7), Some(1)));
    assert_eq!(found.unit.as_deref(), Some("dmar0"));
    assert_eq!(
        report.groups[0].bind,
        [
            "echo vfio-pci > /sys/bus/pci/devices/0000:00:03.0/driver_override",
            "echo 0000:00:03.0 > /sys/bus/pci/devices/0000:00:03.0/driver/unbind",
            "echo 0000:00:03.0 > /sys/bus/pci/drivers/vfio-pci/bind",
        ]
    );
}

#[test]
fn a_group_is_held_up_by_the_one_that_is_bound_elsewhere() {
    let machine = Machine::new(&[
        ("0000:00:03.0", NIC, Some(3), -1, Some("vfio-pci")),
        (
            "0000:00:03.1",
            0x04_0300,
            Some(3),
            -1,
            Some("snd_hda_intel"),
        ),
    ]);
    machine.file("dev/vfio/vfio", "").file("dev/vfio/3", "");
    let report = machine.report();
    assert!(!report.groups[0].viable);
    let blocks: Vec<_> = report.groups[0].members.iter().map(|m| m.blocks).collect();
    assert_eq!(blocks, [false, true]);
    let held = device(&report, "0000:00:03.0");
    assert_eq!((held.state, held.node), (DeviceState::Bind, None));
    assert_eq!(
        held.reason,
        "0000:00:03.1 of its group is bound to snd_hda_intel"
    );
    let commands = [
        "echo vfio-pci > /sys/bus/pci/devices/0000:00:03.1/driver_override",
        "echo 0000:00:03.1 > /sys/bus/pci/devices/0000:00:03.1/driver/unbind",
        "echo 0000:00:03.1 > /sys/bus/pci/drivers/vfio-pci/bind",
    ];
    assert_eq!(report.groups[0].bind, commands);
    assert!(held.ways.is_empty());
}

#[test]
fn a_device_that_is_bound_is_ready_by_every_node_that_is_there() {
    let machine = Machine::new(&[
        ("0000:00:05.0", 0x01_0802, Some(4), 0, Some("vfio-pci")),
        ("0000:00:06.0", 0x01_0802, Some(5), 0, Some("mlx5-vfio-pci")),
    ]);
    let ways = |address| {
        let report = machine.report();
        let device = device(&report, address);
        (device.state, device.ways.clone())
    };
    let none: Vec<Way> = Vec::new();
    assert_eq!(ways("0000:00:05.0"), (DeviceState::NoNode, none.clone()));
    machine.file("dev/vfio/4", "").file("dev/vfio/vfio", "");
    assert_eq!(ways("0000:00:05.0"), (DeviceState::Ready, vec![Way::Type1]));
    assert_eq!(ways("0000:00:06.0"), (DeviceState::NoNode, none.clone()));
    machine
        .cdev("0000:00:05.0", "vfio0")
        .cdev("0000:00:06.0", "vfio1");
    assert_eq!(ways("0000:00:06.0"), (DeviceState::NoNode, none));
    machine.file("dev/iommu", "");
    let all = vec![Way::Type1, Way::Compatibility, Way::Iommufd];
    assert_eq!(ways("0000:00:05.0"), (DeviceState::Ready, all));
    assert_eq!(
        ways("0000:00:06.0"),
        (DeviceState::Ready, vec![Way::Iommufd])
    );
    let report = machine.report();
    let cdev = device(&report, "0000:00:06.0").cdev.clone().unwrap();
    assert_eq!(cdev, machine.path("dev/vfio/devices/vfio1"));
}

#[test]
fn a_bridge_stays_and_blocks_no_group() {
    let machine = Machine::new(&[
        ("0000:00:01.0", BRIDGE, Some(1), -1, Some("pcieport")),
        ("0000:01:00.0", NIC, Some(1), -1, None),
        ("0000:01:00.1", NIC, Some(1), -1, Some("pci-stub")),
    ]);
    let report = machine.report();
    assert!(report.groups[0].viable);
    assert_eq!(report.groups[0].members.len(), 3);
    let bridge = device(&report, "0000:00:01.0");
    assert_eq!(bridge.state, DeviceState::Bridge);
    let nic = device(&report, "0000:01:00.0");
    assert_eq!(nic.reason, "bound to no driver");
    assert_eq!(
        report.groups[0].bind,
        [
            "modprobe vfio-pci",
            "echo vfio-pci > /sys/bus/pci/devices/0000:01:00.0/driver_override",
            "echo 0000:01:00.0 > /sys/bus/pci/drivers/vfio-pci/bind",
            "echo vfio-pci > /sys/bus/pci/devices/0000:01:00.1/driver_override",
            "echo 0000:01:00.1 > /sys/bus/pci/devices/0000:01:00.1/driver/unbind",
            "echo 0000:01:00.1 > /sys/bus/pci/drivers/vfio-pci/bind",
        ]
    );
}

#[test]
fn what_vfio_does_not_take_is_unbound() {
    let machine = Machine::new(&[
        ("0000:00:1f.0", 0x06_0100, Some(9), -1, Some("lpc_ich")),
        ("0000:00:1f.3", 0x04_0300, Some(9), -1, Some("vfio-pci")),
    ]);
    // A device of another bus in the same group.
    machine.directory("sys/bus/platform/drivers/uart");
    machine.link(
        "sys/devices/platform/serial0/driver",
        machine.path("sys/bus/platform/drivers/uart"),
    );
    machine.link(
        "sys/kernel/iommu_groups/9/devices/serial0",
        machine.path("sys/devices/platform/serial0"),
    );
    let report = machine.report();
    let audio = device(&report, "0000:00:1f.3");
    assert_eq!(
        audio.reason,
        "0000:00:1f.0 of its group is bound to lpc_ich; serial0 of its group is bound to uart"
    );
    assert_eq!(
        report.groups[0].bind,
        ["for d in 0000:00:1f.0 serial0; do \
             echo $d > /sys/kernel/iommu_groups/9/devices/$d/driver/unbind || break; done",]
    );
}

/// Linux refuses such a group: `__iommu_device_set_domain`, "Firmware has requested this device have a 1:1 IOMMU
/// mapping"; regions of graphics and USB are `direct-relaxable` (`device_rmrr_is_relaxable`).
#[test]
fn a_group_with_an_identity_mapping_by_firmware_is_refused() {
    let machine = Machine::new(&[
        ("0000:03:00.0", NIC, Some(3), -1, Some("vfio-pci")),
        ("0000:03:00.1", NIC, Some(3), -1, Some("e1000e")),
        ("0000:00:14.0", 0x0c_0330, Some(4), -1, Some("vfio-pci")),
    ]);
    for file in ["vfio/vfio", "vfio/3", "vfio/4", "iommu"] {
        machine.file(&format!("dev/{file}"), "");
    }
    machine.file(
        "sys/kernel/iommu_groups/3/reserved_regions",
        "0x000000007b000000 0x000000007f7fffff direct\n0x00000000fee00000 0x00000000feefffff msi\n",
    );
    machine.file(
        "sys/kernel/iommu_groups/4/reserved_regions",
        "0x000000007a000000 0x000000007a7fffff direct-relaxable\n",
    );
    let report = machine.report();
    assert_eq!(report.groups[0].direct, [(0x7b00_0000, 0x7f7f_ffff)]);
    assert!(report.groups[0].bind.is_empty());
    for address in ["0000:03:00.0", "0000:03:00.1"] {
        let refused = device(&report, address);
        assert_eq!(
            (refused.state, refused.ways.len()),
            (DeviceState::Identity, 0)
        );
        assert!(refused.reason.contains("0x7b000000 to 0x7f7fffff"));
        let error = report.ready(address, Way::Type1).unwrap_err();
        assert!(matches!(error, NotReady::Never { .. }), "{error}");
    }
    let usb = device(&report, "0000:00:14.0");
    assert_eq!(usb.state, DeviceState::Ready);
    assert!(report.groups[1].direct.is_empty());
}

/// Commands that a shell runs as they are printed: the loop binds each device, and stops at the first that fails.
#[test]
fn several_devices_are_bound_by_one_command() {
    let machine = Machine::new(&[
        ("0000:00:03.0", NIC, Some(3), -1, Some("e1000e")),
        ("0000:00:03.1", NIC, Some(3), -1, Some("igb")),
    ]);
    machine.directory("sys/bus/pci/drivers/vfio-pci");
    let report = machine.report();
    let [command] = report.groups[0].bind.as_slice() else {
        panic!("{:?}", report.groups[0].bind)
    };
    let root = machine.path("");
    let here = command.replace("/sys/", &format!("{}sys/", root.display()));
    let run = |command: &str| {
        let shell = std::process::Command::new("sh")
            .args(["-ec", command])
            .status();
        shell.unwrap().success()
    };
    assert!(run(&here), "{here}");
    let read = |path: &str| fs::read_to_string(machine.path(path)).unwrap();
    for address in ["0000:00:03.0", "0000:00:03.1"] {
        let path = format!("sys/bus/pci/devices/{address}");
        assert_eq!(read(&format!("{path}/driver_override")), "vfio-pci\n");
        assert_eq!(
            read(&format!("{path}/driver/unbind")),
            format!("{address}\n")
        );
    }
    assert_eq!(read("sys/bus/pci/drivers/vfio-pci/bind"), "0000:00:03.1\n");
}

#[test]
fn a_group_without_an_iommu_is_called_so() {
    let machine = Machine::new(&[("0000:00:05.0", NIC, Some(0), -1, Some("vfio-pci"))]);
    machine.file("sys/kernel/iommu_groups/0/name", "vfio-noiommu\n");
    machine.file("dev/vfio/0", "").file("dev/vfio/vfio", "");
    let report = machine.report();
    assert!(report.groups[0].no_iommu);
    let found = device(&report, "0000:00:05.0");
    assert_eq!((found.state, found.ways.len()), (DeviceState::NoIommu, 0));
    assert!(
        found.reason.contains("would reach all memory"),
        "{}",
        found.reason
    );
}

#[test]
fn what_is_in_the_way_of_a_device_is_named() {
    let machine = Machine::new(&[
        ("0000:00:01.0", BRIDGE, Some(1), -1, Some("pcieport")),
        ("0000:00:02.0", NIC, None, -1, Some("e1000e")),
        ("0000:00:03.0", NIC, Some(3), -1, Some("vfio-pci")),
        (
            "0000:00:03.1",
            0x04_0300,
            Some(3),
            -1,
            Some("snd_hda_intel"),
        ),
        ("0000:00:04.0", NIC, Some(4), -1, None),
        ("0000:00:05.0", NIC, Some(5), -1, Some("vfio-pci")),
    ]);
    machine.directory("sys/bus/pci/drivers/vfio-pci");
    let refused = |address: &str, way| machine.report().ready(address, way).unwrap_err();
    let said = |address: &str, way| refused(address, way).to_string();
    for way in [Way::Type1, Way::Compatibility, Way::Iommufd] {
        assert_eq!(
            said("00:09.0", way),
            "no PCI device has the address \"00:09.0\"; `dmaspace devices` lists those there are"
        );
        assert_eq!(
            said("0000:00:01.0", way),
            "0000:00:01.0 cannot be given to a program: a bridge: it stays with the host"
        );
        assert_eq!(
            said("00:02.0", way),
            "0000:00:02.0 cannot be given to a program: no IOMMU translates for it; `dmaspace devices` lists the missing steps"
        );
    }
    // Nothing is to be bound for an interface that is not there.
    assert_eq!(
        said("0000:00:04.0", Way::Type1),
        "there is no /dev/vfio/vfio: `modprobe vfio-pci`, or a kernel that has it, is needed first"
    );
    assert_eq!(
        refused("0000:00:04.0", Way::Iommufd),
        NotReady::NoInterface {
            path: "/dev/iommu",
            module: "iommufd"
        }
    );
    machine.file("dev/vfio/vfio", "").file("dev/iommu", "");
    assert_eq!(
        said("0000:00:04.0", Way::Type1),
        "0000:00:04.0 cannot be used yet: bound to no driver; as root: \
         echo vfio-pci > /sys/bus/pci/devices/0000:00:04.0/driver_override && \
         echo 0000:00:04.0 > /sys/bus/pci/drivers/vfio-pci/bind"
    );
    let expected = "0000:00:03.0 cannot be used yet: 0000:00:03.1 of its group is bound to \
                    snd_hda_intel; group 3 is passed through as a whole: 0000:00:03.0, 0000:00:03.1; \
                    as root: echo vfio-pci > ";
    let group = said("0000:00:03.0", Way::Iommufd);
    assert!(group.starts_with(expected), "{group}");
    // Bound, but without nodes: first all, then the one for iommufd.
    assert_eq!(
        said("0000:00:05.0", Way::Type1),
        "0000:00:05.0 is bound to VFIO, but has no node /dev/vfio/5"
    );
    machine.file("dev/vfio/5", "");
    let report = machine.report();
    let ready = report.ready("00:05.0", Way::Type1).unwrap();
    assert_eq!(ready.address, "0000:00:05.0");
    let node = said("0000:00:05.0", Way::Iommufd);
    assert!(node.contains("no node of its own"), "{node}");
    machine.cdev("0000:00:05.0", "vfio0");
    assert!(machine.report().ready("0000:00:05.0", Way::Iommufd).is_ok());
}

#[test]
fn devices_come_in_the_order_of_their_addresses() {
    let machine = Machine::new(&[
        ("10000:00:01.0", NIC, None, -1, None),
        ("0000:10:00.0", NIC, None, -1, None),
        ("0000:02:00.0", NIC, None, -1, None),
    ]);
    let report = machine.report();
    let order: Vec<_> = report.devices.iter().map(|d| d.address.as_str()).collect();
    assert_eq!(order, ["0000:02:00.0", "0000:10:00.0", "10000:00:01.0"]);
}

#[test]
fn the_names_in_json_are_stable() {
    let machine = Machine::new(&[("0000:00:05.0", NIC, Some(4), 0, Some("vfio-pci"))]);
    machine.file("dev/vfio/4", "").file("dev/vfio/vfio", "");
    let expected = serde_json::json!({
        "hidden": false,
        "vfio": true,
        "iommufd": false,
        "devices": [{
            "address": "0000:00:05.0",
            "class": "Ethernet",
            "class_code": "020000",
            "id": "8086:10d3",
            "group": 4,
            "unit": "dmar0",
            "node": 0,
            "driver": "vfio-pci",
            "state": "ready",
            "reason": "ready",
            "ways": ["type1"],
            "cdev": null,
        }],
        "groups": [{
            "group": 4,
            "viable": true,
            "no_iommu": false,
            "members": [{ "name": "0000:00:05.0", "driver": "vfio-pci", "blocks": false }],
            "direct": [],
            "bind": [],
        }],
    });
    assert_eq!(serde_json::to_value(machine.report()).unwrap(), expected);
}

#[test]
fn this_machine_is_read() {
    DevicesReport::read(&Places::default()).unwrap();
}
