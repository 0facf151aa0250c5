//! Topologies of made-up machines, from a made-up sysfs and from files.

use dmaspace::topology::{DevicePlace, Node, Topology, TopologyError, UnitAddress, UnitPlace};
use iommu::{AmdVi, NodeId, Registers, RiscvIommu, Smmu, SmmuV3, Unit, Vtd};
use iommu::{amdvi, riscv, smmu, smmuv3, vtd};
use iopt::HeapTables;

use crate::files::Files;

struct Machine(Files);

impl std::ops::Deref for Machine {
    type Target = Files;

    fn deref(&self) -> &Files {
        &self.0
    }
}

impl Machine {
    /// With nodes of this memory in KiB.
    fn new(nodes: &[u64]) -> Self {
        let machine = Self(Files::new());
        machine.file("dev/null", "");
        for (id, kib) in nodes.iter().enumerate() {
            let node = format!("sys/devices/system/node/node{id}");
            let meminfo = format!("\nNode {id} MemTotal:   {kib} kB\nNode {id} MemFree: 5 kB\n");
            machine.file(&format!("{node}/meminfo"), &meminfo);
            let cpus = format!("{}-{},{}\n", id * 4, id * 4 + 2, 64 + id);
            machine.file(&format!("{node}/cpulist"), &cpus);
            let distances = (0..nodes.len()).map(|to| if to == id { "10 " } else { "21 " });
            machine.file(&format!("{node}/distance"), distances.collect::<String>());
        }
        machine
    }

    fn device(&self, address: &str, class: u32, node: i32, unit: Option<&str>) -> &Self {
        let at = format!("sys/bus/pci/devices/{address}");
        self.file(&format!("{at}/class"), format!("{class:#08x}\n"));
        self.file(&format!("{at}/vendor"), "0x8086\n");
        self.file(&format!("{at}/device"), "0x10d3\n");
        self.file(&format!("{at}/numa_node"), format!("{node}\n"));
        if let Some(unit) = unit {
            self.link(
                &format!("{at}/iommu"),
                format!("../../virtual/iommu/{unit}"),
            );
        }
        self
    }

    fn topology(&self) -> Topology {
        Topology::read(&self.places()).unwrap()
    }
}

const NIC: u32 = 0x02_0000;

/// A DMAR table that says of each unit, by its registers, in which proximity domain it is.
fn dmar(units: &[(u64, u32)]) -> Vec<u8> {
    let mut table = [&b"DMAR"[..], &[0; 44]].concat();
    for (registers, domain) in units {
        table.extend([3, 0, 20, 0, 0, 0, 0, 0]);
        table.extend(registers.to_le_bytes());
        table.extend(domain.to_le_bytes());
    }
    table
}

/// The node comes from the DMAR table for Intel, from the unit's PCI function for AMD, and from its platform device for
/// Arm and RISC-V; a unit without a known node has the node of each of its devices.
#[test]
fn every_kind_of_unit_has_its_node() {
    let machine = Machine::new(&[1024, 1024]);
    let class = "sys/class/iommu";
    machine
        .file(
            "sys/firmware/acpi/tables/DMAR",
            dmar(&[(0xfed9_0000, 0), (0xfed9_1000, 1)]),
        )
        .file(&format!("{class}/dmar0/intel-iommu/address"), "fed90000\n")
        .file(&format!("{class}/dmar1/intel-iommu/address"), "fed91000\n")
        .file(&format!("{class}/dmar2/intel-iommu/address"), "fed92000\n")
        .file(&format!("{class}/ivhd0/device/numa_node"), "1\n")
        .file(&format!("{class}/smmu3.0x9050000/device/numa_node"), "0\n")
        .file(
            &format!("{class}/riscv-iommu@3010000/device/numa_node"),
            "-1\n",
        );
    // The units' nodes count, whatever the devices say.
    machine
        .device("0000:00:01.0", NIC, 1, Some("dmar0"))
        .device("0000:00:02.0", NIC, 0, Some("dmar1"))
        .device("0000:00:03.0", NIC, 1, Some("dmar2"))
        .device("0000:00:04.0", NIC, -1, Some("ivhd0"))
        .device("0000:00:05.0", NIC, 1, Some("smmu3.0x9050000"))
        .device("0000:00:06.0", NIC, -1, Some("riscv-iommu@3010000"))
        .device("0000:00:07.0", NIC, 0, None);
    let topology = machine.topology();
    let units: Vec<_> = topology.units().iter().map(|unit| unit.node).collect();
    assert_eq!(units, [Some(0), Some(1), None, Some(1), None, Some(0)]);
    let nodes: Vec<_> = topology
        .devices()
        .iter()
        .map(|device| topology.node_of(device))
        .collect();
    let expected = [Some(0), Some(1), Some(1), Some(1), Some(0), None, Some(0)];
    assert_eq!(nodes, expected);
}

/// An IORT or a RIMT with one unit, which is in proximity domain 1.
fn one_unit(signature: &[u8; 4], base: u64) -> Vec<u8> {
    let mut table = [&signature[..], &[0; 44]].concat();
    table[36] = 1;
    table[40] = 48;
    let mut unit = [0; 68];
    // Type and length, the bit that says that the domain counts, and where the domain is.
    let (kind, length_at, valid, domain_at) = match signature {
        b"IORT" => (4, 1, 8, 60),
        _ => (0, 2, 2, 28),
    };
    (unit[0], unit[length_at], unit[24], unit[domain_at]) = (kind, 68, valid, 1);
    unit[16..24].copy_from_slice(&base.to_le_bytes());
    table.extend(unit);
    table
}

/// The firmware gives the node if the kernel has no device for the unit that has one.
#[test]
fn firmware_is_asked_where_the_kernel_does_not_tell() {
    let machine = Machine::new(&[1024, 1024]);
    let class = "sys/class/iommu";
    let tables = "sys/firmware/acpi/tables";
    machine
        .file(&format!("{tables}/IORT"), one_unit(b"IORT", 0x0905_0000))
        .file(&format!("{tables}/RIMT"), one_unit(b"RIMT", 0x0301_0000))
        .file(&format!("{class}/smmu3.0x0000000009050000/x"), "")
        .file(&format!("{class}/smmu3.0x0000000009060000/x"), "")
        .file(
            &format!("{class}/riscv-iommu@3010000.iommu/device/numa_node"),
            "-1\n",
        );
    let topology = machine.topology();
    let found: Vec<_> = topology
        .units()
        .iter()
        .map(|unit| (unit.at.clone(), unit.node))
        .collect();
    let at = |registers| Some(UnitAddress::Registers(registers));
    let expected = [
        (at(0x0301_0000), Some(1)),
        (at(0x0905_0000), Some(1)),
        (at(0x0906_0000), None),
    ];
    assert_eq!(found, expected);
}

/// Registers of a unit that was just switched on: they hold what identifies it.
struct Identity(&'static [(usize, u64)]);

impl Registers for Identity {
    type Lock = iommu::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        self.read64(offset) as u32
    }

    fn write32(&self, _: usize, _: u32) {}

    fn read64(&self, offset: usize) -> u64 {
        let mut known = self.0.iter();
        known
            .find(|(at, _)| *at == offset)
            .map_or(0, |(_, value)| *value)
    }

    fn write64(&self, _: usize, _: u64) {}

    fn wait(&self, _: u32) -> bool {
        false
    }
}

/// The topology is asked once, with the unit's address that a driver's user knows; the driver receives the node, and
/// returns it.
#[test]
fn every_driver_is_given_the_node_of_its_unit() {
    let machine = Machine::new(&[1024, 1024]);
    let class = "sys/class/iommu";
    let tables = "sys/firmware/acpi/tables";
    machine
        .file(&format!("{tables}/DMAR"), dmar(&[(0xfed9_0000, 1)]))
        .file(&format!("{class}/dmar0/intel-iommu/address"), "fed90000\n")
        .file("sys/pci/0000:00:00.2/numa_node", "1\n")
        .file(&format!("{class}/ivhd0/x"), "")
        .file(&format!("{tables}/IORT"), one_unit(b"IORT", 0x0905_0000))
        .file(&format!("{class}/smmu3.0x0000000009050000/x"), "")
        // The IORT gives no node for this kind; the kernel may, by the device tree.
        .file(
            &format!("{class}/smmu.0x00000000fd800000/device/numa_node"),
            "1\n",
        )
        .file(&format!("{tables}/RIMT"), one_unit(b"RIMT", 0x0301_0000))
        .file(&format!("{class}/riscv-iommu@3010000.iommu/x"), "");
    machine.link(
        &format!("{class}/ivhd0/device"),
        "../../../pci/0000:00:00.2",
    );
    let topology = machine.topology();
    let node = |at| topology.unit_node(&at);
    let registers = |at| node(UnitAddress::Registers(at));
    let memory = || HeapTables::with_tables(2048).unwrap();

    let vtd = Identity(&[(0x00, 0x10), (0x08, 1 << 10 | 47 << 16 | 6)]);
    let config = vtd::Config {
        node: registers(0xfed9_0000),
        ..vtd::Config::default()
    };
    let vtd = Vtd::new(vtd, memory(), config).unwrap();
    let config = amdvi::Config {
        node: node(UnitAddress::Function("0000:00:00.2".into())),
        ..amdvi::Config::default()
    };
    let amdvi = AmdVi::new(Identity(&[(0x30, 2 << 10)]), memory(), config).unwrap();
    let smmuv3 = Identity(&[
        (0x00, 1 << 24 | 2 << 21 | 0b1_1011),
        (0x04, 8 << 21 | 8 << 16 | 16),
        (0x14, 1 << 4 | 5),
    ]);
    let config = smmuv3::Config {
        node: registers(0x0905_0000),
        ..smmuv3::Config::default()
    };
    let smmuv3 = SmmuV3::new(smmuv3, memory(), config).unwrap();
    let smmu = Identity(&[
        (0x20, 1 << 30 | 1 << 29 | 5 << 9),
        (0x24, 8),
        (0x28, 1 << 12 | 5 << 4 | 5),
    ]);
    let config = smmu::Config {
        node: registers(0xfd80_0000),
        ..smmu::Config::default()
    };
    let smmu = Smmu::new(smmu, config).unwrap();
    let riscv = Identity(&[(0x00, 56 << 32 | 1 << 10 | 0x10)]);
    let config = riscv::Config {
        node: registers(0x0301_0000),
        ..riscv::Config::default()
    };
    let riscv = RiscvIommu::new(riscv, memory(), config).unwrap();

    let drivers: [&dyn Unit; 5] = [&vtd, &amdvi, &smmuv3, &smmu, &riscv];
    for driver in drivers {
        assert_eq!(driver.node(), Some(NodeId(1)));
    }
    assert_eq!(registers(0xfed9_1000), None);
    assert_eq!(node(UnitAddress::Function("0000:00:00.3".into())), None);
}

#[test]
fn nodes_have_memory_processors_and_distances() {
    for count in [1, 2, 4, 8] {
        let topology = Machine::new(&vec![2048; count]).topology();
        assert_eq!(topology.nodes().len(), count);
        assert_eq!(topology.memory_bytes(), count as u64 * (2048 << 10));
        let last = topology.nodes().last().unwrap();
        assert_eq!((last.id, last.cpus), (count as u32 - 1, 4));
        let mut expected = vec![21; count];
        expected[count - 1] = 10;
        assert_eq!(last.distances, expected);
        assert_eq!(topology.distance(0, 0), 10);
    }
}

#[test]
fn a_kernel_that_reports_no_nodes_has_one() {
    let machine = Machine::new(&[]);
    machine.device("0000:00:03.0", NIC, -1, None);
    let topology = machine.topology();
    assert_eq!(topology.nodes(), [Node::default()]);
    assert_eq!(topology.node_of(&topology.devices()[0]), None);
    assert_eq!(topology.nearest_memory(0), None);
}

#[test]
fn bridges_are_no_devices_and_offline_nodes_are_unknown() {
    let machine = Machine::new(&[1024]);
    machine
        .device("0000:00:01.0", 0x06_0400, 0, None)
        .device("0000:00:02.0", NIC, 5, None);
    let topology = machine.topology();
    let devices: Vec<_> = topology
        .devices()
        .iter()
        .map(|d| (d.address.as_str(), d.node))
        .collect();
    assert_eq!(devices, [("0000:00:02.0", None)]);
}

#[test]
fn a_link_carries_what_its_lanes_do() {
    let machine = Machine::new(&[1024]);
    let links = [
        ("2.5 GT/s PCIe", "1", 0.25e9),
        ("8.0 GT/s PCIe", "8", 7.877e9),
        ("Unknown", "0", 0.0),
    ];
    for (slot, (speed, width, _)) in links.iter().enumerate() {
        let address = format!("0000:00:0{slot}.0");
        let at = format!("sys/bus/pci/devices/{address}");
        machine.device(&address, NIC, 0, None);
        machine.file(&format!("{at}/current_link_speed"), speed);
        machine.file(&format!("{at}/current_link_width"), width);
    }
    for (device, (_, _, expected)) in machine.topology().devices().iter().zip(links) {
        let found = device.link_bytes_per_second.unwrap_or(0.0);
        assert!((found - expected).abs() <= expected * 0.001, "{device:?}");
    }
}

const FILE: &str = r#"
[[node]]
id = 1
memory_mib = 2
cpus = 8
distances = [10, 32, 21]
[[node]]
id = 2              # without memory
distances = [32, 10, 15]
[[node]]
id = 0
memory_mib = 1
distances = [21, 15, 10]

[[unit]]
name = "dmar0"
node = 2
registers = 0xfed90000
[[unit]]
name = "dmar1"

[[device]]
address = "0000:17:00.0"
unit = "dmar0"
node = 0
group = 4
kind = "Ethernet"
link_gbps = 200
[[device]]
address = "0000:03:00.0"
unit = "dmar1"
emulated = "edu,dma_mask=0xffffffffffffffff"
"#;

#[test]
fn processors_are_counted_or_listed() {
    let topology = Topology::parse(&FILE.replace("cpus = 8", "cpus = \"0-5,8,9\"")).unwrap();
    let node = &topology.nodes()[1];
    assert_eq!((node.cpus, node.cpu_list.as_str()), (8, "0-5,8,9"));
    for wrong in ["", "x", "0-5;reboot", "5-0"] {
        let list = format!("cpus = {wrong:?}");
        let found = Topology::parse(&FILE.replace("cpus = 8", &list));
        // Nothing is no list, and no processors.
        let right = wrong.is_empty();
        assert_eq!(found.is_ok(), right, "{wrong}: {found:?}");
    }
    let machine = Machine::new(&[1024, 1024]);
    let read = machine.topology();
    assert_eq!(read.nodes()[1].cpu_list, "4-6,65");
}

#[test]
fn a_file_says_what_sysfs_says() {
    let topology = Topology::parse(FILE).unwrap();
    let node = |id, mib: u64, cpus, distances: [u32; 3]| Node {
        id,
        memory_bytes: mib << 20,
        cpus,
        cpu_list: String::new(),
        distances: distances.into(),
    };
    // Sorted by number, and the distances with them.
    let nodes = [
        node(0, 1, 0, [10, 21, 15]),
        node(1, 2, 8, [21, 10, 32]),
        node(2, 0, 0, [15, 32, 10]),
    ];
    assert_eq!(topology.nodes(), nodes);
    let [second, first] = topology.devices() else {
        panic!("{topology:?}");
    };
    assert_eq!(first.link_bytes_per_second, Some(25e9));
    assert_eq!(
        (topology.node_of(first), topology.node_of(second)),
        (Some(2), None)
    );
    assert_eq!(
        second.emulated.as_deref(),
        Some("edu,dma_mask=0xffffffffffffffff")
    );
    let dmar0 = UnitAddress::Registers(0xfed9_0000);
    assert_eq!(topology.unit_node(&dmar0), Some(NodeId(2)));
    // Node 2 has no memory; node 0 is nearest.
    let nearest = [0, 1, 2].map(|node| topology.nearest_memory(node));
    assert_eq!(nearest, [Some(0), Some(1), Some(0)]);
}

#[test]
fn what_does_not_fit_is_named() {
    let wrong = |from: &str, to: &str| {
        let text = FILE.replacen(from, to, 1);
        assert_ne!(text, FILE);
        Topology::parse(&text).unwrap_err().to_string()
    };
    for (from, to, expected) in [
        (
            "cpus = 8",
            "cpu = 8",
            "line 5: unknown field `cpu`, expected",
        ),
        ("cpus = 8", "cpus = ", "line 5: "),
        (
            "cpus = 8",
            "cpus = -8",
            "line 5: cpus is a number, or a list",
        ),
        (
            "registers = 0xfed90000",
            "registers = 0x1000\nfunction = \"0000:00:00.2\"",
            "dmar0 has registers and a PCI function: only one of them may be given",
        ),
        (
            "registers = 0xfed90000",
            "function = \"00:00.2\"",
            "\"00:00.2\" is no address of a PCI device",
        ),
        ("id = 2", "id = 1", "node 1 is defined twice"),
        (
            "name = \"dmar1\"",
            "name = \"dmar0\"",
            "unit dmar0 is defined twice",
        ),
        (
            "0000:03:00.0",
            "0000:17:00.0",
            "device 0000:17:00.0 is defined twice",
        ),
        (
            "0000:03:00.0",
            "0000:03:20.0",
            "\"0000:03:20.0\" is no address",
        ),
        ("0000:03:00.0", "03:00.0", "\"03:00.0\" is no address"),
        (
            "\"dmar1\"\n\n",
            "\"a b\"\n\n",
            "\"a b\" is no name of a unit",
        ),
        ("edu,", "edu -device ", "is no device of QEMU"),
        ("Ethernet", "<script>", "is no kind of a device"),
        (
            "node = 2",
            "node = 3",
            "dmar0 lies on node 3, which is not there",
        ),
        (
            "node = 0",
            "node = 9",
            "0000:17:00.0 lies on node 9, which is not there",
        ),
        (
            "unit = \"dmar1\"",
            "unit = \"dmar7\"",
            "0000:03:00.0 is served by dmar7, which is not",
        ),
        (
            "[10, 32, 21]",
            "[10, 32]",
            "node 1 has the distances [10, 32]: there are 3 nodes",
        ),
        (
            "[10, 32, 21]",
            "[11, 32, 21]",
            "node 1 has the distances [11, 32, 21]: 11 to node 1, which is 10",
        ),
        (
            "[10, 32, 21]",
            "[10, 255, 21]",
            "255 to node 2, which is from 10 to 254",
        ),
        (
            "link_gbps = 200",
            "link_gbps = 0",
            "the link of 0000:17:00.0 carries 0 bytes a second, which none does: \
             from 0.125 to 1000000000000000 are taken",
        ),
        (
            "link_gbps = 200",
            "link_gbps = nan",
            "the link of 0000:17:00.0 carries NaN",
        ),
        (
            "id = 2",
            "id = 1024",
            "the number of node 1024 is 1024, and at most 1023 is taken",
        ),
        (
            "cpus = 8",
            "cpus = \"0-7,65536\"",
            "a processor of node 1 is 65536, and at most 65535 is taken",
        ),
        (
            "cpus = 8",
            "cpus = \"0,99999999999999999999\"",
            "a processor of node 1 is 18446744073709551615, and at most 65535 is taken",
        ),
        (
            "cpus = 8",
            "cpus = \"0,,1\"",
            "\"0,,1\" is no list of processors",
        ),
    ] {
        let found = wrong(from, to);
        assert!(found.contains(expected), "{from} -> {to}: {found}");
    }
    assert!(matches!(Topology::parse(""), Err(TopologyError::NoNodes)));
    let long = "#".repeat((1 << 20) + 1);
    assert!(matches!(
        Topology::parse(&long),
        Err(TopologyError::TooLong { .. })
    ));
}

#[test]
fn sizes_are_bounded() {
    let nodes = |count: u32| {
        (0..count)
            .map(|id| Node {
                id,
                ..Node::default()
            })
            .collect()
    };
    assert!(Topology::new(nodes(1024), vec![], vec![]).is_ok());
    let error = Topology::new(nodes(1025), vec![], vec![]).unwrap_err();
    assert_eq!(error.to_string(), "1025 nodes, and at most 1024 are taken");
    let node = |memory_bytes| Node {
        memory_bytes,
        ..Node::default()
    };
    assert!(Topology::new(vec![node(1 << 56)], vec![], vec![]).is_ok());
    let error = Topology::new(vec![node((1 << 56) + 1)], vec![], vec![]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the memory in bytes of node 0 is 72057594037927937, and at most 72057594037927936 is taken"
    );
    let units = (0..4097).map(|n| UnitPlace {
        name: format!("u{n}"),
        ..UnitPlace::default()
    });
    assert!(Topology::new(nodes(1), units.collect(), vec![]).is_err());
    let devices = vec![DevicePlace::default(); 65537];
    assert!(Topology::new(nodes(1), vec![], devices).is_err());
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = Topology::load(std::path::Path::new("/nowhere/t.toml")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read /nowhere/t.toml");
    let error = Topology::load(std::path::Path::new("/dev/zero")).unwrap_err();
    let TopologyError::Read { source, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(
        source.to_string(),
        "it has more than 1 MiB, the most that is read"
    );
}
