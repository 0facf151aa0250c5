//! Units, and devices' own TLBs, as sysfs shows them.
//!
//! Source: Linux `Documentation/ABI/testing/sysfs-class-iommu-intel-iommu`,
//! `Documentation/ABI/testing/sysfs-bus-event_source-devices`; the capability registers: VT-d (D51397) revision 5.0,
//! chapter 11.

use std::fs;
use std::path::Path;

use dmaspace::devices::{DevicesReport, Places};
use dmaspace::topology::Topology;
use hostmem::{read_at_most, text_at_most};
use serde::Serialize;

/// The longest file that is read: an attribute of sysfs has at most a page, configuration space 4 KiB.
const MOST: u64 = 1 << 20;

/// A unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct UnitReport {
    /// Its name: `dmar0`.
    pub name: String,
    /// Its memory node, from the firmware; else from its devices, where all that tell one tell the same.
    pub node: Option<u32>,
    /// Nodes of its devices.
    pub device_nodes: Vec<u32>,
    /// Number of devices that it translates for.
    pub devices: u64,
    /// Bits of the addresses that it translates, where its registers are shown.
    pub address_bits: Option<u32>,
    /// Capabilities, as far as they are shown.
    pub can: Vec<&'static str>,
    /// Its counters, where the kernel has them: names of events of `perf`.
    pub counters: Vec<String>,
}

/// A device's own TLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ats {
    /// It has none.
    None,
    /// It has one, which is off.
    Off,
    /// It has one, which is on.
    On,
}

/// The trimmed text of a file.
pub(crate) fn text(path: &Path) -> Option<String> {
    let text = text_at_most(path, MOST).ok()?;
    Some(text.trim().into())
}

/// The names in a directory, sorted.
pub(crate) fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// All units of the machine.
pub(crate) fn units(places: &Places, devices: &DevicesReport) -> Vec<UnitReport> {
    let topology = Topology::read(places).ok();
    let mut all = names(&places.sys.join("class/iommu"));
    all.extend(devices.devices.iter().filter_map(|one| one.unit.clone()));
    all.sort();
    all.dedup();
    let unit = |name: String| {
        let own = devices.devices.iter();
        let own = own.filter(|device| device.unit.as_ref() == Some(&name));
        let mut device_nodes: Vec<_> = own.clone().filter_map(|device| device.node).collect();
        device_nodes.sort_unstable();
        device_nodes.dedup();
        let placed = topology.iter().flat_map(Topology::units);
        let placed = placed
            .filter(|unit| unit.name == name)
            .find_map(|unit| unit.node);
        let counters = format!("bus/event_source/devices/{name}/events");
        let (address_bits, can) = intel(&places.sys.join("class/iommu").join(&name));
        UnitReport {
            node: placed.or(match device_nodes.as_slice() {
                [node] => Some(*node),
                _ => None,
            }),
            device_nodes,
            devices: own.count() as u64,
            address_bits,
            can,
            counters: names(&places.sys.join(counters)),
            name,
        }
    };
    all.into_iter().map(unit).collect()
}

/// VT-d's capability registers. Chapter 11: CAP.MGAW 21:16, CAP.SLLPS 37:34, ECAP.SC 7, ECAP.DT 2, ECAP.C 0,
/// ECAP.SMTS 43, ECAP.PASID 40, ECAP.SSADS 45.
fn intel(unit: &Path) -> (Option<u32>, Vec<&'static str>) {
    let number = |name: &str| {
        let text = text(&unit.join("intel-iommu").join(name))?;
        u64::from_str_radix(&text, 16).ok()
    };
    let (Some(cap), Some(ecap)) = (number("cap"), number("ecap")) else {
        return (None, Vec::new());
    };
    let bit = |word: u64, n: u32| word >> n & 1 == 1;
    let can = [
        (bit(cap, 34), "2 MiB pages"),
        (bit(cap, 35), "1 GiB pages"),
        (bit(ecap, 0), "coherent table walks"),
        (bit(ecap, 2), DEVICE_TLBS),
        (bit(ecap, 7), "snoop control"),
        (bit(ecap, 43), "scalable mode"),
        (bit(ecap, 40), "PASIDs"),
        (bit(ecap, 45), "dirty bits in second-stage tables"),
    ];
    let can = can
        .into_iter()
        .filter(|(can, _)| *can)
        .map(|(_, name)| name);
    (address_bits(cap), can.collect())
}

/// Bits of the addresses that a unit with this capability register translates: its width, at most that of its widest
/// table. Source: VT-d 5.0, section 11.4.2, SAGAW 12:8, MGAW 21:16; Linux drivers/iommu/intel/iommu.c,
/// `paging_domain_alloc`.
pub(crate) fn address_bits(cap: u64) -> Option<u32> {
    let widths = [(3, 57), (2, 48), (1, 39)];
    let tables = widths.iter().find(|(bit, _)| cap >> (8 + bit) & 1 == 1);
    // MGAW is the width less 1; no unit has less than 12 bits.
    let unit = (cap >> 16 & 0x3f) as u32 + 1;
    let bits = tables.map_or(unit, |(_, bits)| unit.min(*bits));
    Some(bits).filter(|bits| *bits > 12)
}

/// Extended capabilities of a configuration space: number and place of each.
///
/// PCI Express 6.0, section 7.6: the first is at 0x100; a head has its number in bits 15:0, the place of the next one in
/// bits 31:20.
pub(crate) fn extended(space: &[u8]) -> Vec<(u32, usize)> {
    let mut found = Vec::new();
    let mut at = 0x100;
    // As many as fit; a list that leads back ends, too.
    while let Some(head) = word(space, at).filter(|head| !matches!(*head, 0 | u32::MAX)) {
        found.push((head & 0xffff, at));
        at = (head >> 20) as usize & !3;
        if at < 0x100 || found.len() == (4096 - 0x100) / 8 {
            break;
        }
    }
    found
}

fn word(space: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(space.get(at..at + 4)?.try_into().ok()?))
}

/// The unit serves TLBs of devices.
pub(crate) const DEVICE_TLBS: &str = "device TLBs";

/// The TLB of a device whose directory this is; `None` where its configuration space cannot be read so far.
///
/// PCI Express 6.0, section 10.5.1 "ATS Extended Capability": number 0xf; its control register is at 6, bit 15 is
/// Enable.
pub(crate) fn ats(device: &Path) -> Option<Ats> {
    let bytes = read_at_most(device.join("config"), MOST).ok()?;
    if bytes.len() <= 64 {
        return None;
    }
    let ats = extended(&bytes)
        .into_iter()
        .find(|(number, _)| *number == 0xf);
    let Some((_, at)) = ats else {
        return Some(Ats::None);
    };
    match word(&bytes, at + 4)? >> 31 {
        1 => Some(Ats::On),
        _ => Some(Ats::Off),
    }
}
