//! Consistency checks of a topology.

use std::collections::BTreeSet;
use std::ops::Range;

use super::{
    DevicePlace, LOCAL_DISTANCE, MOST_CPUS, MOST_DEVICES, MOST_MEMORY, MOST_NODES, MOST_PAIRS,
    MOST_UNITS, Node, TopologyError, UnitAddress, UnitPlace,
};

/// Distances to other nodes. ACPI 6.5, 5.2.17: below 10 is reserved; 255 is out of reach.
const DISTANCES: Range<u32> = LOCAL_DISTANCE..255;

/// Bytes a second of a link: from a bit to more than PCI Express carries in any version.
pub(super) const LINKS: Range<f64> = 0.125..1e15;

/// Checks for [`Topology::new`](super::Topology::new).
pub(super) fn check(
    nodes: &[Node],
    units: &[UnitPlace],
    devices: &[DevicePlace],
) -> Result<(), TopologyError> {
    for (what, count, most) in [
        ("nodes", nodes.len(), MOST_NODES),
        ("units", units.len(), MOST_UNITS),
        ("devices", devices.len(), MOST_DEVICES),
        (
            "pairs of a node and a device",
            nodes.len().saturating_mul(devices.len()),
            MOST_PAIRS,
        ),
    ] {
        if count > most {
            return Err(TopologyError::TooMany { what, count, most });
        }
    }
    if nodes.is_empty() {
        return Err(TopologyError::NoNodes);
    }
    let ids = once("node", nodes.iter().map(|node| node.id))?;
    for node in nodes {
        if node.cpus > MOST_CPUS {
            return Err(TopologyError::TooMany {
                what: "processors of a node",
                count: node.cpus as usize,
                most: MOST_CPUS as usize,
            });
        }
        let largest = list(&node.cpu_list);
        if !node.cpu_list.is_empty() && (node.cpus == 0 || largest.is_none()) {
            return Err(TopologyError::BadName {
                what: "list of processors",
                name: node.cpu_list.clone(),
            });
        }
        for (what, value, most) in [
            ("the number", node.id.into(), MOST_NODES as u64 - 1),
            (
                "a processor",
                largest.unwrap_or(0),
                u64::from(MOST_CPUS) - 1,
            ),
            ("the memory in bytes", node.memory_bytes, MOST_MEMORY),
        ] {
            if value > most {
                let node = node.id;
                return Err(TopologyError::TooLarge {
                    what: format!("{what} of node {node}"),
                    value,
                    most,
                });
            }
        }
        distances(node, nodes)?;
    }
    let there = |what: &dyn Fn() -> String, node: Option<u32>| match node {
        Some(node) if !ids.contains(&node) => Err(TopologyError::NoSuchNode { what: what(), node }),
        _ => Ok(()),
    };
    let names = once("unit", units.iter().map(|unit| unit.name.as_str()))?;
    for unit in units {
        name("name of a unit", &unit.name, "._:@-")?;
        there(&|| unit.name.clone(), unit.node)?;
        if let Some(UnitAddress::Function(address)) = &unit.at {
            pci_address(address)?;
        }
    }
    once(
        "unit with",
        units.iter().filter_map(|unit| unit.at.as_ref()),
    )?;
    once("device", devices.iter().map(|device| &device.address))?;
    for device in devices {
        pci_address(&device.address)?;
        there(&|| device.address.clone(), device.node)?;
        if let Some(unit) = device.unit.as_deref().filter(|unit| !names.contains(unit)) {
            return Err(TopologyError::NoSuchUnit {
                device: device.address.clone(),
                unit: unit.into(),
            });
        }
        name("kind of a device", &format!("-{}", device.kind), " ._:/()-")?;
        if let Some(emulated) = &device.emulated {
            name("device of QEMU", emulated, ",=._:-")?;
        }
        let taken = |rate: &f64| LINKS.contains(rate);
        if let Some(rate) = device.link_bytes_per_second.filter(|rate| !taken(rate)) {
            return Err(TopologyError::Link {
                device: device.address.clone(),
                bytes_per_second: rate,
            });
        }
    }
    Ok(())
}

/// The largest number of a list of processors like `0-15,32-47`, which comes to stand in commands; `None` where it is none.
fn list(text: &str) -> Option<u64> {
    let numbers = text.split([',', '-']).map(|number| {
        let digits = number.bytes().all(|digit| digit.is_ascii_digit());
        // Digits only: what does not fit is too large.
        (digits && !number.is_empty()).then(|| number.parse().unwrap_or(u64::MAX))
    });
    numbers.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

/// All of them, if none is there twice.
fn once<T: Ord + ToString>(
    what: &'static str,
    all: impl Iterator<Item = T>,
) -> Result<BTreeSet<T>, TopologyError> {
    let mut seen = BTreeSet::new();
    for name in all {
        if seen.contains(&name) {
            let name = name.to_string();
            return Err(TopologyError::Twice { what, name });
        }
        seen.insert(name);
    }
    Ok(seen)
}

/// Letters, digits and what else is named, and not too many: it goes into command lines, XML and
/// pictures.
fn name(what: &'static str, name: &str, also: &str) -> Result<(), TopologyError> {
    let good = |c: char| c.is_ascii_alphanumeric() || also.contains(c);
    if (1..=128).contains(&name.len()) && name.chars().all(good) {
        return Ok(());
    }
    let name = name.into();
    Err(TopologyError::BadName { what, name })
}

fn pci_address(text: &str) -> Result<(), TopologyError> {
    if is_address(text) {
        return Ok(());
    }
    Err(TopologyError::BadName {
        what: "address of a PCI device, like 0000:00:05.0",
        name: text.into(),
    })
}

/// `0000:00:05.0`; domains may have up to eight digits.
pub(super) fn is_address(text: &str) -> bool {
    let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        digits.contains(&text.len()) && text.bytes().all(digit)
    };
    let mut parts = text.split(':');
    let (Some(domain), Some(bus), Some(rest), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let Some((slot, function)) = rest.split_once('.') else {
        return false;
    };
    let slot_fits = u8::from_str_radix(slot, 16).is_ok_and(|slot| slot < 32);
    let function_fits = matches!(function.as_bytes(), [b'0'..=b'7']);
    hex(domain, 4..=8) && hex(bus, 2..=2) && hex(slot, 2..=2) && slot_fits && function_fits
}

fn distances(node: &Node, nodes: &[Node]) -> Result<(), TopologyError> {
    let list = &node.distances;
    let wrong = |why: String| TopologyError::Distances {
        node: node.id,
        distances: list.clone(),
        why,
    };
    if list.is_empty() {
        return Ok(());
    }
    if list.len() != nodes.len() {
        return Err(wrong(format!("there are {} nodes", nodes.len())));
    }
    for (distance, to) in list.iter().zip(nodes) {
        let (right, allowed) = if to.id == node.id {
            (*distance == LOCAL_DISTANCE, "is 10")
        } else {
            (DISTANCES.contains(distance), "is from 10 to 254")
        };
        if !right {
            return Err(wrong(format!(
                "{distance} to node {}, which {allowed}",
                to.id
            )));
        }
    }
    Ok(())
}
