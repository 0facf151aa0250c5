//! A guest's configuration.

use super::super::facts::{Facts, Known};
use super::super::finding::{Advice, Finding, quoted};
use crate::inspect::{BusPlace, Guest, Monitor};

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    for one in &facts.configurations {
        nodes(facts, one, found);
        unread(one, found);
    }
}

fn nodes(facts: &Facts, one: &Known<Guest>, found: &mut Vec<Finding>) {
    let config = &one.fact;
    if config.nodes < 2 {
        return;
    }
    let hanging: Vec<&str> = config
        .devices
        .iter()
        .filter(|device| device.place == BusPlace::Root)
        .map(|device| device.address.as_str())
        .collect();
    // A file that was not given may have the expander.
    if !hanging.is_empty() && !config.elsewhere {
        let hosts: Vec<_> = facts
            .device_nodes
            .iter()
            .filter(|known| hanging.contains(&known.fact.0.as_str()))
            .collect();
        let mut of: Vec<u32> = hosts.iter().map(|known| known.fact.1).collect();
        of.sort_unstable();
        of.dedup();
        let on_host = match of.as_slice() {
            [] => String::new(),
            nodes => format!(
                " On the host they are on node {}.",
                nodes
                    .iter()
                    .map(u32::to_string)
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        };
        found.push(
            Finding::certain("config.device-without-node", "QEMU docs/pci_expander_bridge.txt; libvirt docs/formatdomain.rst, \"Controllers\" (pcie-expander-bus); ACPI 6.5, section 6.2.15 _PXM")
                .devices(hanging.iter().copied())
                .evidence([&one.evidence])
                .evidence(hosts.iter().map(|known| &known.evidence))
                .say(format!(
                    "The guest has {} memory nodes, and {} on its default root bus, for which it sees no node.{on_host}",
                    config.nodes,
                    match hanging.len() {
                        1 => "a device hangs".to_owned(),
                        count => format!("{count} devices hang"),
                    }
                ))
                .advise(Advice::text(if config.monitor == Monitor::Libvirt {
                    "An expander bus for each node, with its devices below it: <controller type='pci' \
                     model='pcie-expander-bus'> with <target><node>N</node></target>, and a pcie-root-port on it."
                } else {
                    "An expander bus for each node, with its devices below it: -device pxb-pcie,id=pxb0,bus_nr=N,\
                     numa_node=N,bus=pcie.0 and -device pcie-root-port,bus=pxb0."
                }))
                .advise(Advice::text("`dmaspace numa` prints such a guest for a machine.")),
        );
    }
    let unbound: Vec<_> = config
        .memory
        .iter()
        .filter(|part| part.host_nodes.is_empty())
        .collect();
    if !unbound.is_empty() && !config.devices.is_empty() {
        let names: Vec<String> = unbound
            .iter()
            .take(16)
            .map(|part| format!("{:?}", part.id))
            .collect();
        found.push(
            Finding::certain("config.memory-unbound", "libvirt docs/formatdomain.rst, \"NUMA Node Tuning\"; QEMU qapi/qom.json, MemoryBackendProperties (host-nodes, policy)")
                .evidence([&one.evidence])
                .say(format!(
                    "Memory of the guest's nodes {} is bound to no node of the host.",
                    names.join(", ")
                ))
                .advise(Advice::text(if config.monitor == Monitor::Libvirt {
                    "<numatune> with a <memnode cellid='N' mode='strict' nodeset='N'/> for each cell."
                } else {
                    "host-nodes=N,policy=bind at each memory object."
                })),
        );
    }
}

fn unread(one: &Known<Guest>, found: &mut Vec<Finding>) {
    if one.fact.unread.is_empty() {
        return;
    }
    let names: Vec<String> = one.fact.unread.iter().map(|name| quoted(name)).collect();
    found.push(
        Finding::certain("config.unread-file", "QEMU qemu-options.hx, -readconfig")
            .evidence([&one.evidence])
            .say(format!(
                "The configuration names files that were not given: {}. Devices, memory and buses in it are not known here.",
                names.join(", ")
            ))
            .advise(Advice::text(format!("Give these too: {}.", names.join(", ")))),
    );
}

#[cfg(test)]
mod tests {
    use super::super::{causes, of_text};

    const LINE: &str = "qemu-system-x86_64 -m 4G -object memory-backend-ram,id=a,size=2G,host-nodes=0,policy=bind \
        -object memory-backend-ram,id=b,size=2G -numa node,memdev=a -numa node,memdev=b -device pxb-pcie,id=x,numa_node=1 \
        -device vfio-pci,host=01:00.0,bus=x";

    #[test]
    fn devices_below_an_expander_have_a_node() {
        assert_eq!(
            causes(&of_text(&format!("{LINE}\n"))),
            ["config.memory-unbound", "start.small-pages"]
        );
        let both = of_text(&format!("{LINE} -device vfio-pci,host=02:00.0\n"));
        assert_eq!(both[0].cause, "config.device-without-node");
        assert_eq!(both[0].devices, ["0000:02:00.0"]);
    }

    #[test]
    fn a_file_that_was_not_given_may_have_the_expander() {
        let found = of_text(&format!(
            "{LINE} -device vfio-pci,host=02:00.0 -readconfig /etc/x.cfg\n"
        ));
        assert!(causes(&found).contains(&"config.unread-file"));
        assert!(!causes(&found).contains(&"config.device-without-node"));
    }
}
