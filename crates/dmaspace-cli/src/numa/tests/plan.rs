//! Plans on made-up machines, and the guests that are written for them.

use crate::numa::plan::{Fallback, Model, name, tables};
use crate::numa::{GuestError, GuestTopology, Plan};
use dmaspace::topology::{DevicePlace, Node, Topology, UnitPlace};
use ioas::Placement;
use iommu::NodeId;

const GIB: u64 = 1 << 30;

fn node(id: u32, memory_bytes: u64) -> Node {
    Node {
        id,
        memory_bytes,
        cpus: 2,
        cpu_list: format!("{}-{}", 2 * id, 2 * id + 1),
        distances: Vec::new(),
    }
}

fn unit(n: u32, node: Option<u32>) -> UnitPlace {
    UnitPlace {
        name: format!("dmar{n}"),
        node,
        at: None,
    }
}

fn device(bus: u32, unit: Option<u32>, node: Option<u32>, group: u32) -> DevicePlace {
    DevicePlace {
        address: format!("0000:{bus:02x}:00.0"),
        unit: unit.map(|n| format!("dmar{n}")),
        node,
        group: Some(group),
        ..DevicePlace::default()
    }
}

/// Nodes of 4 GiB, each with a unit and two devices.
fn even(nodes: u32) -> Topology {
    Topology::new(
        (0..nodes).map(|id| node(id, 4 * GIB)).collect(),
        (0..nodes).map(|n| unit(n, Some(n))).collect(),
        (0..2 * nodes)
            .map(|bus| device(bus, Some(bus / 2), None, bus))
            .collect(),
    )
    .unwrap()
}

/// Node of the tables and buses of the devices, for each domain.
fn domains(plan: &Plan, placement: Placement) -> Vec<(Option<u32>, Vec<u32>)> {
    let mut policies = plan.policies.iter();
    let policy = policies
        .find(|policy| policy.placement == placement)
        .unwrap();
    let bus = |address: &String| u32::from_str_radix(&address[5..7], 16).unwrap();
    let domains = policy.domains.iter();
    domains
        .map(|domain| (domain.node, domain.devices.iter().map(bus).collect()))
        .collect()
}

#[test]
fn each_policy_builds_its_domains_on_any_number_of_nodes() {
    for nodes in [1, 2, 4, 8] {
        let plan = Plan::new(&even(nodes), GIB);
        let all: Vec<u32> = (0..2 * nodes).collect();
        assert_eq!(domains(&plan, Placement::Shared), [(Some(0), all.clone())]);
        let each: Vec<_> = (0..nodes)
            .map(|n| (Some(n), vec![2 * n, 2 * n + 1]))
            .collect();
        assert_eq!(domains(&plan, Placement::PerNode), each);
        for near in 0..nodes {
            assert_eq!(
                domains(&plan, Placement::Near(NodeId(near))),
                [(Some(near), all.clone())]
            );
        }
        let names: Vec<_> = plan
            .policies
            .iter()
            .map(|policy| name(policy.placement))
            .collect();
        assert_eq!(names.len() as u32, 2 + nodes);
        assert_eq!(names[2], "near(0)");
        for policy in &plan.policies {
            for found in &policy.tables {
                let (bytes, entries) = tables(GIB, found.leaf_bytes);
                assert!(found.nodes.iter().all(|node| node.bytes == bytes));
                assert_eq!(found.nodes.len(), policy.domains.len());
                assert_eq!(found.entries, entries * policy.domains.len() as u64);
            }
        }
        assert!(plan.untranslated.is_empty() && plan.without_memory.is_empty());
        assert!(plan.mixed_groups.is_empty());
    }
}

#[test]
fn devices_far_from_the_shared_table_are_predicted_to_gain() {
    let plan = Plan::new(&even(2), GIB);
    let rate = |policy: usize, device: usize| {
        plan.policies[policy].devices[device]
            .bytes_per_second
            .unwrap()
    };
    let model = Model::default();
    let (near, far) = (
        model.bytes_per_second(25e9, 10),
        model.bytes_per_second(25e9, 20),
    );
    assert!(near > 1.25 * far, "{near} {far}");
    // Shared, per-node, near(0), near(1).
    for (policy, expected) in [
        [near, near, far, far],
        [near; 4],
        [near, near, far, far],
        [far, far, near, near],
    ]
    .into_iter()
    .enumerate()
    {
        let found: Vec<_> = (0..4).map(|device| rate(policy, device)).collect();
        assert_eq!(found, expected, "{policy}");
    }
    // A slower link hides it.
    assert!(model.bytes_per_second(1e9, 10) < 1.03 * model.bytes_per_second(1e9, 20));
}

#[test]
fn a_node_without_memory_has_its_tables_on_the_nearest_that_has() {
    let mut nodes = vec![node(0, GIB), node(1, GIB), node(2, 0)];
    for (node, distances) in nodes
        .iter_mut()
        .zip([[10, 21, 31], [21, 10, 15], [31, 15, 10]])
    {
        node.distances = distances.into();
    }
    let units = (0..3).map(|n| unit(n, Some(n))).collect();
    let devices = (0..3).map(|n| device(n, Some(n), None, n)).collect();
    let plan = Plan::new(&Topology::new(nodes, units, devices).unwrap(), GIB);
    // With the devices of that node, whose table it is already.
    assert_eq!(
        domains(&plan, Placement::PerNode),
        [(Some(0), vec![0]), (Some(1), vec![1, 2])]
    );
    assert_eq!(
        plan.without_memory,
        [Fallback {
            node: 2,
            tables_on: Some(1)
        }]
    );
    assert_eq!(plan.policies.len(), 4, "no near(2)");
    let found = &plan.policies[1].devices[2];
    assert_eq!((found.node, found.tables_on), (Some(2), Some(1)));
    let expected = Model::default().bytes_per_second(25e9, 15);
    assert_eq!(found.bytes_per_second, Some(expected));
}

#[test]
fn devices_without_a_node_or_a_unit_are_reported() {
    let nodes = vec![node(0, GIB), node(1, GIB)];
    let units = vec![unit(0, None), unit(1, None)];
    let devices = vec![
        device(0, Some(0), None, 0),
        device(1, Some(0), Some(1), 1),
        device(2, None, Some(0), 2),
    ];
    let plan = Plan::new(&Topology::new(nodes, units, devices).unwrap(), GIB);
    assert_eq!(plan.untranslated, ["0000:02:00.0"]);
    // The first device of which a node is known says where a shared table lies.
    assert_eq!(domains(&plan, Placement::Shared), [(Some(1), vec![0, 1])]);
    assert_eq!(
        domains(&plan, Placement::PerNode),
        [(Some(1), vec![1]), (None, vec![0])]
    );
    assert_eq!(plan.policies[1].devices[0].bytes_per_second, None);
}

/// The unit's node counts where it is known, otherwise that of each device.
#[test]
fn a_unit_may_serve_devices_of_several_nodes() {
    let nodes = || vec![node(0, GIB), node(1, GIB)];
    let devices = || {
        vec![
            device(0, Some(0), Some(0), 0),
            device(1, Some(0), Some(1), 1),
        ]
    };
    let known = Topology::new(nodes(), vec![unit(0, Some(1))], devices()).unwrap();
    let plan = Plan::new(&known, GIB);
    assert_eq!(domains(&plan, Placement::PerNode), [(Some(1), vec![0, 1])]);
    let unknown = Topology::new(nodes(), vec![unit(0, None)], devices()).unwrap();
    let plan = Plan::new(&unknown, GIB);
    assert_eq!(
        domains(&plan, Placement::PerNode),
        [(Some(0), vec![0]), (Some(1), vec![1])]
    );
    assert_eq!(plan.policies[1].domains[0].units, ["dmar0"]);
}

#[test]
fn a_group_is_never_divided() {
    let nodes = vec![node(0, GIB), node(1, GIB)];
    let devices = vec![
        device(0, Some(0), None, 7),
        device(1, Some(0), Some(1), 7),
        device(2, Some(0), Some(0), 7),
        device(3, Some(0), Some(0), 8),
    ];
    let plan = Plan::new(
        &Topology::new(nodes, vec![unit(0, None)], devices).unwrap(),
        GIB,
    );
    assert_eq!(
        domains(&plan, Placement::PerNode),
        [(Some(0), vec![3]), (Some(1), vec![0, 1, 2])]
    );
    assert_eq!(plan.mixed_groups, [7]);
}

fn guest(nodes: u32, memory: u64) -> GuestTopology {
    GuestTopology::new(&even(nodes), memory, None).unwrap()
}

#[test]
fn a_guest_sees_the_planned_nodes() {
    let mut two = guest(2, 4 * GIB + (6 << 20));
    two.viommu = true;
    let expected = "\
-name guest,debug-threads=on
-machine q35 -m 4200448k -smp 4
-object memory-backend-ram,id=memory0,size=2101248k,host-nodes=0,policy=bind
-numa node,nodeid=0,cpus=0-1,memdev=memory0
-object memory-backend-ram,id=memory1,size=2099200k,host-nodes=1,policy=bind
-numa node,nodeid=1,cpus=2-3,memdev=memory1
-numa dist,src=0,dst=1,val=20
-numa dist,src=1,dst=0,val=20
-device intel-iommu,caching-mode=on,aw-bits=48
-device pxb-pcie,id=node0,bus=pcie.0,bus_nr=85,numa_node=0
-device pcie-root-port,id=port1,bus=node0,chassis=1
-device vfio-pci,host=0000:00:00.0,bus=port1
-device pcie-root-port,id=port2,bus=node0,chassis=2
-device vfio-pci,host=0000:01:00.0,bus=port2
-device pxb-pcie,id=node1,bus=pcie.0,bus_nr=170,numa_node=1
-device pcie-root-port,id=port3,bus=node1,chassis=3
-device vfio-pci,host=0000:02:00.0,bus=port3
-device pcie-root-port,id=port4,bus=node1,chassis=4
-device vfio-pci,host=0000:03:00.0,bus=port4";
    assert_eq!(two.qemu().unwrap().join(" "), expected.replace('\n', " "));
    two.bound = false;
    two.viommu = false;
    let plain = two.qemu().unwrap().join(" ");
    assert!(
        !plain.contains("host-nodes") && !plain.contains("iommu"),
        "{plain}"
    );
    for nodes in [1, 4, 8] {
        let arguments = guest(nodes, 8 * GIB).qemu().unwrap();
        let count = |start: &str| {
            arguments
                .iter()
                .filter(|word| word.starts_with(start))
                .count()
        };
        let nodes = nodes as usize;
        assert_eq!(
            (count("pxb-pcie"), count("node,nodeid"), count("vfio-pci")),
            (nodes, nodes, 2 * nodes)
        );
        assert_eq!(count("dist,"), nodes * (nodes - 1));
    }
}

#[test]
fn a_guest_is_pinned_and_in_huge_pages() {
    let two = GuestTopology::new(&even(2), 5 * GIB, Some(GIB)).unwrap();
    let arguments = two.qemu().unwrap().join(" ");
    let memory = "memory-backend-memfd,id=memory0,size=3145728k,hugetlb=on,hugetlbsize=1048576k,\
        prealloc=on,host-nodes=0,policy=bind ";
    assert!(arguments.contains(memory), "{arguments}");
    let expected = "\
# Before it starts, as root:
#   pool=/sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages; echo $(($(cat $pool) + 3)) > $pool
#   pool=/sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages; echo $(($(cat $pool) + 2)) > $pool
# When it runs, since QEMU pins no processors:
#   task=/proc/$(pidof -s qemu-system-x86_64)/task
#   for n in $(seq 0 1); do taskset -cp 0-1 $(grep -l \"^CPU $n/\" $task/*/comm | cut -d/ -f5); done
#   for n in $(seq 2 3); do taskset -cp 2-3 $(grep -l \"^CPU $n/\" $task/*/comm | cut -d/ -f5); done";
    assert_eq!(two.qemu_notes().join("\n"), expected);
    let xml = two.libvirt().unwrap();
    for part in [
        "<page size='1048576' unit='KiB'/>",
        "  <vcpupin vcpu='1' cpuset='0-1'/>\n  <vcpupin vcpu='2' cpuset='2-3'/>\n",
        "<!-- before it starts, as root: pool=/sys/devices/system/node/node1/",
    ] {
        assert!(xml.contains(part), "{part}\n{xml}");
    }
    let (bytes, page) = (5 * GIB + (2 << 20), GIB);
    let error = GuestTopology::new(&even(2), bytes, Some(page));
    assert_eq!(error, Err(GuestError::HugePages { bytes, page }));

    let mut free = guest(2, 4 * GIB);
    free.bound = false;
    assert_eq!(free.qemu_notes(), Vec::<String>::new());
    let (xml, arguments) = (free.libvirt().unwrap(), free.qemu().unwrap().join(" "));
    assert!(!xml.contains("vcpupin") && !arguments.contains("debug-threads"));
    let mut unlisted = guest(2, 4 * GIB);
    unlisted.nodes[1].host_cpus.clear();
    let notes = unlisted.qemu_notes().join("\n");
    assert!(
        notes.ends_with("whose list is not known are not pinned."),
        "{notes}"
    );
}

#[test]
fn libvirt_gets_the_same() {
    let mut two = guest(2, 4 * GIB);
    two.viommu = true;
    let xml = two.libvirt().unwrap();
    for part in [
        "<memory unit='KiB'>4194304</memory>",
        "<vcpu>4</vcpu>",
        "<memnode cellid='1' mode='strict' nodeset='1'/>",
        "<cell id='1' cpus='2-3' memory='2097152' unit='KiB'>",
        "<sibling id='0' value='20'/>",
        "<iommu model='intel'>",
        "<controller type='pci' index='2' model='pcie-expander-bus'>",
        "<target busNr='170'>",
        "<address domain='0x0000' bus='0x03' slot='0x00' function='0x0'/>",
        // The fourth device's port is the fourth after both expanders, in the second one's slot 1.
        "<controller type='pci' index='6' model='pcie-root-port'>\n    <address type='pci' \
         domain='0x0000' bus='0x02' slot='0x01' function='0x0'/>",
        "<address type='pci' domain='0x0000' bus='0x06' slot='0x00' function='0x0'/>",
    ] {
        assert!(xml.contains(part), "{part}\n{xml}");
    }
    // Each element is closed.
    for name in [
        "numatune",
        "cpu",
        "numa",
        "devices",
        "controller",
        "hostdev",
        "cell",
        "distances",
    ] {
        let count = |tag: String| xml.matches(&tag).count();
        let opened = count(format!("<{name}>")) + count(format!("<{name} "));
        let closed = count(format!("</{name}>"))
            + xml.matches("index='0' model='pcie-root'/>").count()
                * usize::from(name == "controller");
        assert_eq!(opened, closed, "{name}\n{xml}");
    }
}

#[test]
fn guests_that_cannot_be_are_refused() {
    let nodes = || vec![node(0, GIB), node(1, 0)];
    let new = |nodes, devices, memory| {
        let topology = Topology::new(nodes, vec![], devices).unwrap();
        GuestTopology::new(&topology, memory, None)
    };
    let unknown = vec![device(0, None, None, 0)];
    assert_eq!(new(nodes(), unknown, GIB), Err(GuestError::NoNodes));
    // A device near a node without memory is in the guest node of the nearest that has some.
    let far = vec![device(0, None, Some(1), 0), device(1, None, None, 0)];
    let found = new(nodes(), far.clone(), GIB).unwrap();
    assert_eq!(
        (
            found.nodes.len(),
            found.nodes[0].host,
            found.elsewhere.len()
        ),
        (1, 0, 1)
    );
    assert_eq!(
        new(nodes(), far, 1 << 20),
        Err(GuestError::Memory {
            bytes: 1 << 20,
            unit: 2 << 20,
            nodes: 1
        })
    );
    let many: Vec<_> = (0..40).map(|bus| device(bus, None, Some(0), bus)).collect();
    assert_eq!(
        new(nodes(), many, GIB),
        Err(GuestError::Buses {
            devices: 40,
            nodes: 1
        })
    );
    let edu = DevicePlace {
        emulated: Some("edu".into()),
        ..device(0, None, Some(0), 0)
    };
    let guest = new(nodes(), vec![edu], GIB).unwrap();
    assert!(
        guest
            .qemu()
            .unwrap()
            .contains(&String::from("edu,bus=port1"))
    );
    let error = guest.libvirt().unwrap_err();
    assert!(matches!(error, GuestError::Emulated { .. }), "{error}");
}
