//! A topology as a file.

use std::path::Path;

use hostmem::text_at_most;
use serde::Deserialize;

use super::sysfs;
use super::{DevicePlace, Node, Topology, TopologyError, UnitAddress, UnitPlace};

/// The longest file that is read: room for some thousand devices.
const MOST_BYTES: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Whole {
    #[serde(default)]
    node: Vec<FileNode>,
    #[serde(default)]
    unit: Vec<FileUnit>,
    #[serde(default)]
    device: Vec<FileDevice>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileNode {
    id: u32,
    #[serde(default)]
    memory_mib: u32,
    #[serde(default)]
    cpus: FileCpus,
    #[serde(default)]
    distances: Vec<u32>,
}

/// Number of processors, or a list of them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "cpus is a number, or a list like \"0-15\"")]
enum FileCpus {
    Count(u32),
    List(String),
}

impl Default for FileCpus {
    fn default() -> Self {
        Self::Count(0)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileUnit {
    name: String,
    node: Option<u32>,
    registers: Option<u64>,
    function: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileDevice {
    address: String,
    #[serde(default)]
    kind: String,
    node: Option<u32>,
    unit: Option<String>,
    group: Option<u32>,
    link_gbps: Option<f64>,
    emulated: Option<String>,
}

pub(super) fn load(path: &Path) -> Result<Topology, TopologyError> {
    let text = text_at_most(path, MOST_BYTES).map_err(|source| TopologyError::Read {
        path: path.into(),
        source,
    })?;
    parse(&text)
}

pub(super) fn parse(text: &str) -> Result<Topology, TopologyError> {
    if text.len() as u64 > MOST_BYTES {
        return Err(TopologyError::TooLong {
            bytes: text.len() as u64,
            most: MOST_BYTES,
        });
    }
    let whole: Whole = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start));
        TopologyError::Syntax {
            line: 1 + before.map_or(0, |before| before.matches('\n').count()),
            message: error.message().replace('\n', " "),
        }
    })?;
    let nodes = whole.node.into_iter().map(|node| {
        let (cpus, cpu_list) = match node.cpus {
            FileCpus::Count(count) => (count, String::new()),
            FileCpus::List(list) => (sysfs::count(&list), list),
        };
        Node {
            id: node.id,
            memory_bytes: u64::from(node.memory_mib) << 20,
            cpus,
            cpu_list,
            distances: node.distances,
        }
    });
    let units = whole.unit.into_iter().map(|unit| {
        let at = match (unit.registers, unit.function) {
            (None, None) => None,
            (Some(registers), None) => Some(UnitAddress::Registers(registers)),
            (None, Some(function)) => Some(UnitAddress::Function(function)),
            (Some(_), Some(_)) => return Err(TopologyError::TwoAddresses { unit: unit.name }),
        };
        Ok(UnitPlace {
            name: unit.name,
            node: unit.node,
            at,
        })
    });
    let units = units.collect::<Result<_, _>>()?;
    let devices = whole.device.into_iter().map(|device| DevicePlace {
        address: device.address,
        kind: device.kind,
        node: device.node,
        unit: device.unit,
        group: device.group,
        link_bytes_per_second: device.link_gbps.map(|gbps| gbps * 1e9 / 8.0),
        emulated: device.emulated,
    });
    Topology::new(nodes.collect(), units, devices.collect())
}
