//! IORT and RIMT: which device has which id at which unit, and IORT's reserved regions.
//!
//! | table | structure | content |
//! |---|---|---|
//! | both | head | number of nodes at 36, the first one's place at 40 |
//! | IORT | node | type at 0, length at 1, number and place of its ID mappings at 8 and 12 |
//! | IORT | named component (1), root complex (2) | object's name from 29; PCI segment at 28 |
//! | IORT | SMMUv1 and v2 (3), SMMUv3 (4) | registers at 16 |
//! | IORT | RMR (6) | flags at 16, number and place of its ranges at 20 and 24: address, length |
//! | IORT | ID mapping | first input id, number of ids less one, first output id, unit's place, flags |
//! | RIMT | node | type at 0, length at 2 |
//! | RIMT | IOMMU (0) | registers at 16, PCI segment at 32 |
//! | RIMT | PCIe root complex (1), platform device (2) | place and number of ID mappings at 16 and 18, 8 and 10 |
//! | RIMT | ID mapping | first source id, number of ids, first device id, unit's place, flags |
//!
//! Sources: Arm DEN0049, revision E.e, "IO Remapping Table"; RISC-V IO Mapping Table, version 1.0; ACPICA
//! `include/actbl2.h`, `acpi_iort_*` and `acpi_rimt_*`; Linux `drivers/acpi/arm64/iort.c`, `iort_id_map`,
//! `iort_get_rmrs`; `drivers/acpi/riscv/rimt.c`, `rimt_id_map`.

use std::sync::Arc;

use super::{
    FirmwareDamage, FirmwareRegion, FirmwareRegionKind, FirmwareTable, FirmwareUnit,
    FirmwareUnitKind, u16_at, u32_at, u64_at,
};

/// Bytes of an ID mapping.
const MAPPING: usize = 20;
/// Bytes of a range of an RMR.
const RANGE: usize = 20;
/// Bytes of an IORT node's head.
const NODE: usize = 16;
/// The longest name of an object that is kept.
const MOST_NAME: usize = 256;

/// Range of ids of devices, and the ids that a unit sees for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdMapping {
    /// Offset of its entry in the table, bytes.
    pub offset: usize,
    /// Sender of the requests.
    pub requester: Requester,
    /// The first id on the sender's side: bus, device and function of a PCI function.
    pub first: u32,
    /// Number of ids less one.
    pub more: u32,
    /// The first id on the unit's side: a stream id, or RISC-V's device id.
    pub output: u32,
    /// All requests have the id `output`, whatever the sender's is.
    pub single: bool,
    /// The unit: where its structure begins in the table, bytes.
    pub unit: usize,
}

/// Sender of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requester {
    /// Functions of a PCI segment.
    Pci {
        /// The segment.
        segment: u32,
    },
    /// Device of the ACPI namespace, by its path.
    Named(String),
}

impl IdMapping {
    /// The device with this id at the unit: a PCI address in full, or a path of the ACPI namespace.
    pub fn device(&self, id: u32) -> Option<String> {
        let distance = id.checked_sub(self.output)?;
        match &self.requester {
            Requester::Named(name) => {
                let within = if self.single {
                    distance == 0
                } else {
                    distance <= self.more
                };
                within.then(|| name.clone())
            }
            Requester::Pci { segment } => {
                // One id for all functions tells none of them.
                let within = distance <= self.more && !self.single;
                let id = self.first.checked_add(distance).filter(|_| within)?;
                let id = u16::try_from(id).ok()?;
                Some(format!(
                    "{segment:04x}:{:02x}:{:02x}.{}",
                    id >> 8,
                    id >> 3 & 0x1f,
                    id & 7
                ))
            }
        }
    }
}

/// ID mappings of a node whose units are not known yet.
struct Node<'t> {
    offset: usize,
    bytes: &'t [u8],
}

impl FirmwareTable {
    /// The devices that have this id at a unit of this kind, each once, with the mappings that say so.
    pub fn devices(&self, kind: FirmwareUnitKind, id: u32) -> Vec<(String, &IdMapping)> {
        let mut found: Vec<(String, &IdMapping)> = Vec::new();
        for mapping in &self.id_mappings {
            let of_kind = |unit: &FirmwareUnit| unit.offset == mapping.unit && unit.kind == kind;
            let Some(device) = mapping.device(id) else {
                continue;
            };
            if self.units.iter().any(of_kind) && !found.iter().any(|(known, _)| *known == device) {
                found.push((device, mapping));
            }
        }
        found
    }

    /// The place of each node that is whole.
    fn nodes<'t>(&mut self, bytes: &'t [u8], length_at: usize, least: usize) -> Vec<Node<'t>> {
        let mut nodes = Vec::new();
        let (Some(count), Some(first)) = (u32_at(bytes, 36), u32_at(bytes, 40)) else {
            self.damage.push(FirmwareDamage::Structure {
                offset: 36,
                length: 12,
                left: bytes.len().saturating_sub(36),
            });
            return nodes;
        };
        let mut offset = usize::try_from(first).unwrap_or(usize::MAX);
        for _ in 0..count {
            let rest = bytes.get(offset..).unwrap_or_default();
            let length = u16_at(rest, length_at).map_or(0, usize::from);
            let Some(node) = rest.get(..length).filter(|_| length >= least) else {
                self.damage.push(FirmwareDamage::Structure {
                    offset,
                    length,
                    left: rest.len(),
                });
                break;
            };
            nodes.push(Node {
                offset,
                bytes: node,
            });
            offset += length;
        }
        nodes
    }

    /// Entries of an array within a node, with their places.
    fn entries<'t>(
        &mut self,
        node: &Node<'t>,
        (place, count, length): (usize, usize, usize),
    ) -> Vec<(usize, &'t [u8])> {
        let mut entries = Vec::new();
        let mut at = place;
        for _ in 0..count {
            let rest = node.bytes.get(at..).unwrap_or_default();
            let Some(entry) = rest.get(..length) else {
                self.damage.push(FirmwareDamage::Entry {
                    offset: node.offset.saturating_add(at),
                    length,
                    left: rest.len(),
                });
                break;
            };
            entries.push((node.offset + at, entry));
            at += length;
        }
        entries
    }

    fn short(&mut self, node: &Node<'_>) {
        self.damage.push(FirmwareDamage::Structure {
            offset: node.offset,
            length: node.bytes.len(),
            left: node.bytes.len(),
        });
    }

    /// Reads an IORT.
    pub(super) fn iort(&mut self, bytes: &[u8]) {
        let nodes = self.nodes(bytes, 1, NODE);
        for node in &nodes {
            let kind = match node.bytes.first() {
                Some(3) => FirmwareUnitKind::Smmu,
                Some(4) => FirmwareUnitKind::SmmuV3,
                _ => continue,
            };
            match u64_at(node.bytes, 16) {
                Some(registers) => self.units.push(FirmwareUnit {
                    offset: node.offset,
                    kind,
                    segment: 0,
                    registers,
                    scopes: Vec::new(),
                }),
                None => self.short(node),
            }
        }
        for node in &nodes {
            match node.bytes.first() {
                Some(1) => match node.bytes.get(29..) {
                    Some(name) => self.iort_ids(node, &nodes, &Requester::Named(path(name))),
                    None => self.short(node),
                },
                Some(2) => match u32_at(node.bytes, 28) {
                    Some(segment) => self.iort_ids(node, &nodes, &Requester::Pci { segment }),
                    None => self.short(node),
                },
                Some(6) => self.reserved(node),
                _ => {}
            }
        }
    }

    fn mappings<'t>(&mut self, node: &Node<'t>) -> Vec<(usize, &'t [u8])> {
        let count = number(node.bytes, 8);
        self.entries(node, (number(node.bytes, 12), count, MAPPING))
    }

    fn iort_ids(&mut self, node: &Node<'_>, nodes: &[Node<'_>], requester: &Requester) {
        for (offset, entry) in self.mappings(node) {
            let more = u32_at(entry, 4).unwrap_or_default();
            self.id_mapping(offset, entry, nodes, more, requester);
        }
    }

    /// Adds an ID mapping; one to another node than a unit, as an interrupt controller, is left out.
    fn id_mapping(
        &mut self,
        offset: usize,
        entry: &[u8],
        nodes: &[Node<'_>],
        more: u32,
        requester: &Requester,
    ) {
        let unit = number(entry, 12);
        let known = |places: Result<usize, usize>| places.is_ok();
        if !known(nodes.binary_search_by_key(&unit, |node| node.offset)) {
            self.damage.push(FirmwareDamage::Reference { offset, unit });
        } else if known(self.units.binary_search_by_key(&unit, |one| one.offset)) {
            self.id_mappings.push(IdMapping {
                offset,
                requester: requester.clone(),
                first: u32_at(entry, 0).unwrap_or_default(),
                more,
                output: u32_at(entry, 8).unwrap_or_default(),
                single: u32_at(entry, 16).unwrap_or_default() & 1 == 1,
                unit,
            });
        }
    }

    /// Reserved ranges of an RMR; its ID mappings name stream ids.
    fn reserved(&mut self, node: &Node<'_>) {
        let Some(flags) = u32_at(node.bytes, 16).filter(|_| node.bytes.len() >= 28) else {
            self.short(node);
            return;
        };
        let ids: Arc<[(usize, u32, u32)]> = self
            .mappings(node)
            .into_iter()
            .map(|(_, entry)| {
                let at = |at| u32_at(entry, at).unwrap_or_default();
                (number(entry, 12), at(8), at(8).saturating_add(at(4)))
            })
            .collect();
        let count = number(node.bytes, 20);
        for (offset, range) in self.entries(node, (number(node.bytes, 24), count, RANGE)) {
            let first = u64_at(range, 0).unwrap_or_default();
            let length = u64_at(range, 8).unwrap_or_default();
            self.regions.push(FirmwareRegion {
                offset,
                segment: 0,
                first,
                last: first.wrapping_add(length).wrapping_sub(1),
                kind: FirmwareRegionKind::Rmr {
                    remapped: flags & 1 == 1,
                    ids: Arc::clone(&ids),
                },
            });
        }
    }

    /// Reads a RIMT.
    pub(super) fn rimt(&mut self, bytes: &[u8]) {
        let nodes = self.nodes(bytes, 2, 8);
        for node in nodes.iter().filter(|node| node.bytes.first() == Some(&0)) {
            match (u64_at(node.bytes, 16), u16_at(node.bytes, 32)) {
                (Some(registers), Some(segment)) => self.units.push(FirmwareUnit {
                    offset: node.offset,
                    kind: FirmwareUnitKind::Riscv,
                    segment,
                    registers,
                    scopes: Vec::new(),
                }),
                _ => self.short(node),
            }
        }
        for node in &nodes {
            let word = |at| u16_at(node.bytes, at).map_or(0, usize::from);
            let (place, count, requester) = match node.bytes.first() {
                Some(1) if node.bytes.len() >= 20 => {
                    let segment = word(14) as u32;
                    (word(16), word(18), Requester::Pci { segment })
                }
                Some(2) if node.bytes.len() >= 12 => {
                    let name = path(node.bytes.get(12..).unwrap_or_default());
                    (word(8), word(10), Requester::Named(name))
                }
                Some(1 | 2) => {
                    self.short(node);
                    continue;
                }
                _ => continue,
            };
            for (offset, entry) in self.entries(node, (place, count, MAPPING)) {
                // The number of ids, and not one less.
                if let Some(more) = u32_at(entry, 4).and_then(|count| count.checked_sub(1)) {
                    self.id_mapping(offset, entry, &nodes, more, &requester);
                }
            }
        }
    }
}

fn number(bytes: &[u8], at: usize) -> usize {
    let number = u32_at(bytes, at).and_then(|number| number.try_into().ok());
    number.unwrap_or(usize::MAX)
}

/// Path of an object, which ends with a zero.
fn path(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    let end = end.unwrap_or(bytes.len()).min(MOST_NAME);
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(signature: &[u8; 4], nodes: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; 48];
        bytes[..4].copy_from_slice(signature);
        bytes[36..40].copy_from_slice(&(nodes.len() as u32).to_le_bytes());
        bytes[40..44].copy_from_slice(&48u32.to_le_bytes());
        bytes.extend(nodes.iter().flatten());
        let length = bytes.len() as u32;
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        bytes[9] = 0u8.wrapping_sub(sum);
        bytes
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// A node of an IORT: type, words from 16 on, and ID mappings.
    fn node(kind: u8, body: &[u8], mappings: &[[u32; 5]]) -> Vec<u8> {
        let place = NODE + body.len();
        let length = place + mappings.len() * MAPPING;
        let mut bytes = vec![kind, length as u8, (length >> 8) as u8, 0, 0, 0, 0, 0];
        bytes.extend(words(&[mappings.len() as u32, place as u32]));
        bytes.extend(body);
        bytes.extend(mappings.iter().flat_map(|mapping| words(mapping)));
        bytes
    }

    /// Two SMMUs, a root complex of segment 2 at the first one, a named component at the second, an RMR.
    fn sample() -> Vec<u8> {
        let smmu = |kind| node(kind, &words(&[0x2b40_0000, 0, 0, 0]), &[]);
        let (first, second) = (48, 80);
        let complex = words(&[0, 0, 0, 2, 0]);
        let mut named = vec![0; 13];
        named.extend(b"\\_SB_.NIC0\0\0");
        let mut rmr = words(&[0, 1, 28]);
        rmr.extend(0x8000_0000u64.to_le_bytes());
        rmr.extend(0x2_0000u64.to_le_bytes());
        rmr.extend(words(&[0]));
        table(
            b"IORT",
            &[
                smmu(4),
                smmu(3),
                node(2, &complex, &[[0x100, 0xff, 0x1_0100, first, 0]]),
                node(1, &named, &[[0, 0, 7, second, 1]]),
                node(6, &rmr, &[[0, 0, 0x1_0108, first, 1]]),
            ],
        )
    }

    #[test]
    fn stream_ids_are_devices_at_their_unit() {
        let read = FirmwareTable::read(&sample());
        assert_eq!(read.damage, []);
        assert_eq!(read.units.len(), 2);
        assert_eq!(read.units[0].registers, 0x2b40_0000);
        let device = |kind, id| {
            let found = read.devices(kind, id);
            found.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(device(FirmwareUnitKind::SmmuV3, 0x1_0108), ["0002:01:01.0"]);
        assert_eq!(device(FirmwareUnitKind::SmmuV3, 0x1_01ff), ["0002:01:1f.7"]);
        assert!(device(FirmwareUnitKind::SmmuV3, 0x1_0200).is_empty());
        assert!(device(FirmwareUnitKind::SmmuV3, 0x108).is_empty());
        assert!(device(FirmwareUnitKind::Smmu, 0x1_0108).is_empty());
        assert_eq!(device(FirmwareUnitKind::Smmu, 7), ["\\_SB_.NIC0"]);
    }

    #[test]
    fn reserved_ranges_have_stream_ids() {
        let read = FirmwareTable::read(&sample());
        let [region] = read.regions.as_slice() else {
            panic!("{read:?}")
        };
        assert_eq!((region.first, region.last), (0x8000_0000, 0x8001_ffff));
        let right = FirmwareRegionKind::Rmr {
            remapped: false,
            ids: [(48, 0x1_0108, 0x1_0108)].into(),
        };
        assert_eq!(region.kind, right);
    }

    #[test]
    fn device_ids_of_riscv_are_translated() {
        let mut unit = vec![0, 1, 40, 0, 0, 0, 0, 0];
        unit.extend([0; 8]);
        unit.extend(0x300_0000u64.to_le_bytes());
        unit.extend([0; 16]);
        let mut complex = vec![1, 1, 40, 0, 0, 0, 1, 0];
        complex.extend([0, 0, 0, 0, 0, 0, 1, 0, 20, 0, 1, 0]);
        complex.extend(words(&[0, 0x1_0000, 0x1_0000, 48, 0]));
        let bytes = table(b"RIMT", &[unit, complex]);
        let read = FirmwareTable::read(&bytes);
        assert_eq!(read.damage, []);
        let found = read.devices(FirmwareUnitKind::Riscv, 0x1_0310);
        assert_eq!(found[0].0, "0001:03:02.0");
        assert!(read.devices(FirmwareUnitKind::Riscv, 0x2_0000).is_empty());
        for cut in 0..bytes.len() {
            assert!(!FirmwareTable::read(&bytes[..cut]).damage.is_empty());
        }
    }

    #[test]
    fn damage_of_nodes_and_mappings_is_named() {
        let good = sample();
        for cut in 0..good.len() {
            let damage = FirmwareTable::read(&good[..cut]).damage;
            assert!(!damage.is_empty(), "{cut}");
        }
        // The number of nodes, the place of the first, a length, a number of mappings, a unit's place.
        for (at, value) in [
            (36, 6u32),
            (36, u32::MAX),
            (40, 4000),
            (40, u32::MAX),
            (48, 0),
            (120, 2),
            (120, u32::MAX),
            (124, u32::MAX),
            (160, 49),
        ] {
            let mut broken = good.clone();
            broken[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let damage = FirmwareTable::read(&broken).damage;
            let other = |one: &FirmwareDamage| !matches!(one, FirmwareDamage::Checksum { .. });
            assert!(damage.iter().any(other), "{at} {value:#x}: {damage:?}");
        }
        for at in 0..good.len() {
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let mut broken = good.clone();
                broken[at] = byte;
                let read = FirmwareTable::read(&broken);
                let _ = read.devices(FirmwareUnitKind::SmmuV3, u32::MAX);
            }
        }
    }
}
