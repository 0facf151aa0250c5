//! A guest that knows the nodes: then nothing has to be placed for it.
//!
//! Each guest node has memory of one host node and, on a root bus of its own, the devices near it.
//! The guest's own drivers then place what each device uses near it, in their own tables too where
//! the guest has an IOMMU.

use std::fmt::Write;
use std::mem;

use dmaspace::topology::{DevicePlace, Topology};

use crate::pool;

/// Memory of a guest node is a multiple of this.
const UNIT: u64 = 2 << 20;
/// Bus numbers of a guest.
const BUSES: usize = 256;

/// A guest's nodes and devices, for a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestTopology {
    /// The nodes, by number.
    pub nodes: Vec<GuestNode>,
    /// Devices of which no node is known; they are on the guest's first root bus.
    pub elsewhere: Vec<GuestDevice>,
    /// How far the nodes are from each other, in their order.
    pub distances: Vec<Vec<u32>>,
    /// The guest has an IOMMU.
    pub viommu: bool,
    /// Its memory and processors are bound to the host's nodes; without, it only looks as if they were.
    pub bound: bool,
    /// Its memory is in huge pages of a pool, of so many bytes.
    pub huge_bytes: Option<u64>,
}

/// A node of a guest.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestNode {
    /// The host's node whose memory it has.
    pub host: u32,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Its processors.
    pub cpus: u32,
    /// Processors of the host's node, as the kernel lists them; empty when they are not known.
    pub host_cpus: String,
    /// The devices near it.
    pub devices: Vec<GuestDevice>,
}

/// A device of a guest.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestDevice {
    /// Its address on the host.
    pub address: String,
    /// One of QEMU's that stands for it.
    pub emulated: Option<String>,
}

/// Why there is no such guest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// There is no node with devices near memory.
    #[error("no device has a known node with memory: a guest could not show any")]
    NoNodes,
    /// The memory does not reach for all nodes.
    #[error("{bytes} bytes of memory are less than {unit} for each of {nodes} nodes", unit = runs::Bytes(*unit))]
    Memory {
        /// The guest's memory.
        bytes: u64,
        /// The least bytes of each node.
        unit: u64,
        /// Its nodes.
        nodes: usize,
    },
    /// The memory does not consist of huge pages.
    #[error("{bytes} bytes of memory are no whole huge pages of {page}", page = runs::Bytes(*page))]
    HugePages {
        /// The guest's memory.
        bytes: u64,
        /// Bytes of a huge page.
        page: u64,
    },
    /// There are too few bus numbers.
    #[error("{devices} devices on {nodes} nodes need more than 256 bus numbers")]
    Buses {
        /// Devices.
        devices: usize,
        /// Nodes.
        nodes: usize,
    },
    /// An emulated device has no place in libvirt's XML.
    #[error("{address} is to be emulated as {emulated:?}, which libvirt's XML has no place for")]
    Emulated {
        /// Its address.
        address: String,
        /// The emulated device.
        emulated: String,
    },
}

impl GuestTopology {
    /// A guest with `memory_bytes`, spread evenly over the nodes with memory that devices are nearest
    /// to, in whole 2 MiB or huge pages; what is over is the first node's.
    ///
    /// # Errors
    ///
    /// When there are no such nodes, or too many, or the memory is no whole huge pages.
    pub fn new(
        topology: &Topology,
        memory_bytes: u64,
        huge_bytes: Option<u64>,
    ) -> Result<Self, GuestError> {
        let home = |device: &DevicePlace| {
            let node = topology.node_of(device)?;
            topology.nearest_memory(node)
        };
        let devices = |host: Option<u32>| {
            let near = topology
                .devices()
                .iter()
                .filter(|device| home(device) == host);
            let near = near.map(|device| GuestDevice {
                address: device.address.clone(),
                emulated: device.emulated.clone(),
            });
            near.collect::<Vec<_>>()
        };
        let mut nodes: Vec<GuestNode> = topology
            .nodes()
            .iter()
            .map(|node| GuestNode {
                host: node.id,
                memory_bytes: 0,
                cpus: node.cpus.max(1),
                host_cpus: node.cpu_list.clone(),
                devices: devices(Some(node.id)),
            })
            .filter(|node| !node.devices.is_empty())
            .collect();
        if nodes.is_empty() {
            return Err(GuestError::NoNodes);
        }
        let bytes = memory_bytes;
        if let Some(page) = huge_bytes.filter(|page| bytes.checked_rem(*page) != Some(0)) {
            return Err(GuestError::HugePages { bytes, page });
        }
        let unit = huge_bytes.unwrap_or(UNIT);
        let share = bytes / nodes.len() as u64 / unit * unit;
        if share == 0 {
            let nodes = nodes.len();
            return Err(GuestError::Memory { bytes, unit, nodes });
        }
        let over = memory_bytes - share * nodes.len() as u64;
        for (place, node) in nodes.iter_mut().enumerate() {
            node.memory_bytes = share + if place == 0 { over } else { 0 };
        }
        let hosts: Vec<u32> = nodes.iter().map(|node| node.host).collect();
        let far = |from: &u32| {
            hosts
                .iter()
                .map(|to| topology.distance(*from, *to))
                .collect()
        };
        let new = Self {
            distances: hosts.iter().map(far).collect(),
            nodes,
            elsewhere: devices(None),
            viommu: false,
            bound: true,
            huge_bytes,
        };
        new.buses()?;
        Ok(new)
    }

    /// The first bus number of each node: the numbers are shared out evenly, the first part is that of
    /// the guest's own root bus. A node takes one, and one for each device.
    fn buses(&self) -> Result<Vec<usize>, GuestError> {
        let part = BUSES / (self.nodes.len() + 1);
        let nodes = self.nodes.iter().map(|node| &node.devices);
        let most = nodes.chain([&self.elsewhere]).map(Vec::len).max();
        // 32 slots of a root bus, of which its first one holds the host bridge of the guest's own.
        if most.is_some_and(|most| most + 1 > part.min(31)) {
            return Err(GuestError::Buses {
                devices: self.all().count(),
                nodes: self.nodes.len(),
            });
        }
        Ok((1..=self.nodes.len()).map(|place| place * part).collect())
    }

    /// The processors of each node of the guest, first and last, and those of the host that run them.
    fn pins(&self) -> Vec<(u32, u32, &str)> {
        let mut first = 0;
        let pins = self.nodes.iter().map(|node| {
            let next = first + node.cpus;
            (
                mem::replace(&mut first, next),
                next - 1,
                node.host_cpus.as_str(),
            )
        });
        let known = |pin: &(u32, u32, &str)| self.bound && !pin.2.is_empty();
        pins.filter(known).collect()
    }

    /// Commands that raise the pools of huge pages.
    fn pools(&self) -> Vec<String> {
        let Some(page) = self.huge_bytes else {
            return Vec::new();
        };
        let pool = |node: &GuestNode| {
            let file = format!(
                "/sys/devices/system/node/node{}/hugepages/hugepages-{}kB/nr_hugepages",
                node.host,
                page >> 10,
            );
            pool::raise(&file, node.memory_bytes / page).join("; ")
        };
        self.nodes.iter().map(pool).collect()
    }

    /// Settings that QEMU's arguments do not make, as commands of a shell in comments.
    pub fn qemu_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let pools = self.pools();
        if !pools.is_empty() {
            notes.push("# Before it starts, as root:".into());
            notes.extend(pools.iter().map(|pool| format!("#   {pool}")));
        }
        let pins = self.pins();
        if !pins.is_empty() {
            notes.push("# When it runs, since QEMU pins no processors:".into());
            notes.push("#   task=/proc/$(pidof -s qemu-system-x86_64)/task".into());
        }
        notes.extend(pins.iter().map(|(first, last, host)| {
            format!(
                "#   for n in $(seq {first} {last}); do taskset -cp {host} \
                 $(grep -l \"^CPU $n/\" $task/*/comm | cut -d/ -f5); done"
            )
        }));
        if self.bound && pins.len() < self.nodes.len() {
            notes.push("# Processors of nodes whose list is not known are not pinned.".into());
        }
        notes
    }

    fn all(&self) -> impl Iterator<Item = &GuestDevice> {
        let near = self.nodes.iter().flat_map(|node| &node.devices);
        near.chain(&self.elsewhere)
    }

    /// Arguments for `qemu-system-x86_64`, beside those that say of which kind the rest is.
    ///
    /// # Errors
    ///
    /// When there are too few bus numbers.
    pub fn qemu(&self) -> Result<Vec<String>, GuestError> {
        let mut arguments = Vec::new();
        let mut say = |option: &str, value: String| arguments.extend([option.into(), value]);
        let memory: u64 = self.nodes.iter().map(|node| node.memory_bytes).sum();
        let cpus: u32 = self.nodes.iter().map(|node| node.cpus).sum();
        if !self.pins().is_empty() {
            // Threads have names then, by which they are pinned.
            say("-name", "guest,debug-threads=on".into());
        }
        say("-machine", "q35".into());
        say("-m", format!("{}k", memory >> 10));
        say("-smp", cpus.to_string());
        let mut first = 0;
        for (id, node) in self.nodes.iter().enumerate() {
            let bound = match self.bound {
                true => format!(",host-nodes={},policy=bind", node.host),
                false => String::new(),
            };
            let size = node.memory_bytes >> 10;
            let backend = match self.huge_bytes {
                None => format!("memory-backend-ram,id=memory{id},size={size}k{bound}"),
                Some(page) => format!(
                    "memory-backend-memfd,id=memory{id},size={size}k,hugetlb=on,\
                     hugetlbsize={}k,prealloc=on{bound}",
                    page >> 10
                ),
            };
            say("-object", backend);
            let last = first + node.cpus - 1;
            say(
                "-numa",
                format!("node,nodeid={id},cpus={first}-{last},memdev=memory{id}"),
            );
            first = last + 1;
        }
        for (from, row) in self.distances.iter().enumerate() {
            for (to, distance) in row.iter().enumerate().filter(|(to, _)| *to != from) {
                say("-numa", format!("dist,src={from},dst={to},val={distance}"));
            }
        }
        if self.viommu {
            // Before all devices; with caching mode, which VFIO needs. 48 bits, as the host's units.
            say("-device", "intel-iommu,caching-mode=on,aw-bits=48".into());
        }
        let mut port = 0;
        let mut behind = |say: &mut dyn FnMut(&str, String), bus: &str, device: &GuestDevice| {
            port += 1;
            let options = format!("pcie-root-port,id=port{port},bus={bus},chassis={port}");
            say("-device", options);
            let host = || format!("vfio-pci,host={}", device.address);
            let device = device.emulated.clone().unwrap_or_else(host);
            say("-device", format!("{device},bus=port{port}"));
        };
        for ((id, node), bus) in self.nodes.iter().enumerate().zip(self.buses()?) {
            let options = format!("pxb-pcie,id=node{id},bus=pcie.0,bus_nr={bus},numa_node={id}");
            say("-device", options);
            for device in &node.devices {
                behind(&mut say, &format!("node{id}"), device);
            }
        }
        for device in &self.elsewhere {
            behind(&mut say, "pcie.0", device);
        }
        Ok(arguments)
    }

    /// Elements for libvirt's `<domain>`.
    ///
    /// # Errors
    ///
    /// When there are too few bus numbers, or a device is to be emulated.
    pub fn libvirt(&self) -> Result<String, GuestError> {
        let emulated = self
            .all()
            .find_map(|device| Some((device, device.emulated.clone()?)));
        if let Some((device, emulated)) = emulated {
            let address = device.address.clone();
            return Err(GuestError::Emulated { address, emulated });
        }
        let mut xml = String::new();
        self.libvirt_into(&mut xml, &self.buses()?);
        Ok(xml)
    }

    fn libvirt_into(&self, xml: &mut String, buses: &[usize]) {
        let mut line = |text: std::fmt::Arguments<'_>| {
            // Writing into a string does not fail.
            let _ = writeln!(xml, "{text}");
        };
        let memory: u64 = self.nodes.iter().map(|node| node.memory_bytes).sum();
        let cpus: u32 = self.nodes.iter().map(|node| node.cpus).sum();
        line(format_args!("<memory unit='KiB'>{}</memory>", memory >> 10));
        for pool in self.pools() {
            line(format_args!("<!-- before it starts, as root: {pool} -->"));
        }
        if let Some(page) = self.huge_bytes {
            line(format_args!(
                "<memoryBacking>\n  <hugepages>\n    <page size='{}' unit='KiB'/>\n  </hugepages>\n\
                 </memoryBacking>",
                page >> 10
            ));
        }
        line(format_args!("<vcpu>{cpus}</vcpu>"));
        let pins = self.pins();
        if !pins.is_empty() {
            line(format_args!("<cputune>"));
            for (first, last, host) in pins {
                for cpu in first..=last {
                    line(format_args!("  <vcpupin vcpu='{cpu}' cpuset='{host}'/>"));
                }
            }
            line(format_args!("</cputune>"));
        }
        if self.bound {
            line(format_args!("<numatune>"));
            for (id, node) in self.nodes.iter().enumerate() {
                let host = node.host;
                line(format_args!(
                    "  <memnode cellid='{id}' mode='strict' nodeset='{host}'/>"
                ));
            }
            line(format_args!("</numatune>"));
        }
        line(format_args!("<cpu>\n  <numa>"));
        let mut first = 0;
        for ((id, node), row) in self.nodes.iter().enumerate().zip(&self.distances) {
            let last = first + node.cpus - 1;
            let size = node.memory_bytes >> 10;
            line(format_args!(
                "    <cell id='{id}' cpus='{first}-{last}' memory='{size}' unit='KiB'>\n      <distances>"
            ));
            for (to, distance) in row.iter().enumerate() {
                line(format_args!(
                    "        <sibling id='{to}' value='{distance}'/>"
                ));
            }
            line(format_args!("      </distances>\n    </cell>"));
            first = last + 1;
        }
        line(format_args!("  </numa>\n</cpu>\n<devices>"));
        if self.viommu {
            line(format_args!(
                "  <iommu model='intel'>\n    <driver caching_mode='on' aw_bits='48'/>\n  </iommu>"
            ));
        }
        line(format_args!(
            "  <controller type='pci' index='0' model='pcie-root'/>"
        ));
        self.libvirt_devices(xml, buses);
        let _ = writeln!(xml, "</devices>");
    }

    /// Writes controllers and devices, each on the bus of its node.
    fn libvirt_devices(&self, xml: &mut String, buses: &[usize]) {
        let mut line = |text: std::fmt::Arguments<'_>| {
            // Writing into a string does not fail.
            let _ = writeln!(xml, "{text}");
        };
        // In libvirt a bus is named by the index of its controller.
        let mut devices = Vec::new();
        for ((id, node), bus) in self.nodes.iter().enumerate().zip(buses) {
            let index = id + 1;
            line(format_args!(
                "  <controller type='pci' index='{index}' model='pcie-expander-bus'>\n    \
                 <target busNr='{bus}'>\n      <node>{id}</node>\n    </target>\n  </controller>"
            ));
            let slots = node.devices.iter().enumerate();
            devices.extend(slots.map(|(slot, device)| (index, slot, device)));
        }
        // Slot 0 of the guest's own root bus is its host bridge.
        let elsewhere = self.elsewhere.iter().enumerate();
        devices.extend(elsewhere.map(|(slot, device)| (0, slot + 1, device)));
        for (port, (root, slot, device)) in (self.nodes.len() + 1..).zip(devices) {
            line(format_args!(
                "  <controller type='pci' index='{port}' model='pcie-root-port'>\n    \
                 <address type='pci' domain='0x0000' bus='0x{root:02x}' slot='0x{slot:02x}' \
                 function='0x0'/>\n  </controller>"
            ));
            let mut parts = device.address.split([':', '.']);
            let mut part = || parts.next().unwrap_or("0");
            let (domain, bus, slot, function) = (part(), part(), part(), part());
            line(format_args!(
                "  <hostdev mode='subsystem' type='pci' managed='yes'>\n    <source>\n      \
                 <address domain='0x{domain}' bus='0x{bus}' slot='0x{slot}' function='0x{function}'/>\n    \
                 </source>\n    <address type='pci' domain='0x0000' bus='0x{port:02x}' slot='0x00' \
                 function='0x0'/>\n  </hostdev>"
            ));
        }
    }
}
