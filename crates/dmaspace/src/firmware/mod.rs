//! Firmware's tables of IOMMU units, DMAR, IVRS, IORT and RIMT: units, reserved memory regions, the devices that these
//! name, and damage.
//!
//! | table | structure | content |
//! |---|---|---|
//! | DMAR | DRHD (type 0) | unit: segment at 6, registers at 8, scopes from 16 |
//! | DMAR | RMRR (type 1) | reserved region: segment at 6, first and last address at 8 and 16, scopes from 24 |
//! | IVRS | IVHD (types 0x10, 0x11, 0x40) | unit: registers at 8, device entries from 24 or 40 |
//! | IVRS | IVMD (types 0x20 to 0x22) | reserved region: flags at 1, device at 4, start and length at 16 and 24 |
//!
//! Sources: Intel Virtualization Technology for Directed I/O, D51397, revision 5.0, sections 8.1 to 8.4; AMD I/O
//! Virtualization Technology, 48882, revision 3.08, sections 5.2.2 "IVRS" to 5.2.2.10; ACPI 6.5, section 5.2.6
//! "System Description Table Header".

mod ids;

use std::sync::Arc;

pub use ids::{IdMapping, Requester};

/// Bytes of the head that every table has.
const HEAD: usize = 36;
/// Bytes before the first structure of DMAR and IVRS.
const FIRST: usize = 48;

/// A table, as far as it can be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirmwareTable {
    /// `DMAR`, `IVRS`, `IORT`, `RIMT`, or another signature, whose structures are not read.
    pub signature: String,
    /// Units.
    pub units: Vec<FirmwareUnit>,
    /// Reserved memory regions.
    pub regions: Vec<FirmwareRegion>,
    /// Interrupt controllers that the table assigns to a device.
    pub interrupt_sources: Vec<InterruptSource>,
    /// Ids of devices at their units (IORT, RIMT).
    pub id_mappings: Vec<IdMapping>,
    /// Damage; the structures before it are there.
    pub damage: Vec<FirmwareDamage>,
}

/// An IOMMU unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirmwareUnit {
    /// Offset of its structure in the table, bytes.
    pub offset: usize,
    /// The kind.
    pub kind: FirmwareUnitKind,
    /// The PCI segment; 0 in an IORT, whose units serve those of their mappings.
    pub segment: u16,
    /// The address of its registers.
    pub registers: u64,
    /// The devices that it serves by name; empty where it serves the rest of the segment (DMAR) or has device
    /// entries (IVRS).
    pub scopes: Vec<Scope>,
}

/// A kind of unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirmwareUnitKind {
    /// Intel VT-d.
    Vtd,
    /// AMD-Vi.
    AmdVi,
    /// Arm's SMMU, versions 1 and 2.
    Smmu,
    /// Arm's SMMU, version 3.
    SmmuV3,
    /// The RISC-V IOMMU.
    Riscv,
}

/// A reserved memory region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirmwareRegion {
    /// Offset of its structure in the table, bytes.
    pub offset: usize,
    /// The PCI segment.
    pub segment: u16,
    /// Its first address.
    pub first: u64,
    /// Its last address; less than `first` in a region that is malformed. A length of 0 (IVMD) has `first - 1`.
    pub last: u64,
    /// The kind and the devices.
    pub kind: FirmwareRegionKind,
}

/// A kind of reserved memory region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirmwareRegionKind {
    /// DMAR's RMRR, for the devices of these scopes.
    Rmrr(Vec<Scope>),
    /// IVRS's IVMD: an exclusion range or a unity map, for devices from the first to the last of these numbers
    /// (bus, device and function); all devices without.
    Ivmd {
        /// The flags: bit 0 unity map, bits 1 and 2 read and write, bit 3 exclusion range.
        flags: u8,
        /// The devices.
        devices: Option<(u16, u16)>,
    },
    /// IORT's reserved memory range.
    Rmr {
        /// The operating system may map the range elsewhere, and give the device away.
        remapped: bool,
        /// The unit, by where its structure begins, and the first and the last stream id.
        ids: Arc<[(usize, u32, u32)]>,
    },
}

/// A device that a structure of the DMAR names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// 1 endpoint, 2 bridge with all below it, 3 IOAPIC, 4 HPET, 5 device of the ACPI namespace.
    pub kind: u8,
    /// The number of the IOAPIC, HPET or namespace device.
    pub number: u8,
    /// The bus that the path starts from.
    pub bus: u8,
    /// Device and function on each bus on the way.
    pub path: Vec<(u8, u8)>,
}

impl Scope {
    /// The PCI address, where the path has one step; longer ones need the numbers of the buses on the way.
    pub fn address(&self, segment: u16) -> Option<String> {
        match self.path.as_slice() {
            [(device, function)] if *device < 32 && *function < 8 => Some(format!(
                "{segment:04x}:{:02x}:{device:02x}.{function}",
                self.bus
            )),
            _ => None,
        }
    }
}

/// An IOAPIC or HPET that the IVRS assigns to a device (device entry 0x48).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptSource {
    /// Offset of its entry in the table, bytes.
    pub offset: usize,
    /// 1 IOAPIC, 2 HPET.
    pub variety: u8,
    /// The number of the IOAPIC or HPET.
    pub handle: u8,
    /// Bus, device and function that its requests have.
    pub device: u16,
}

/// Damage of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FirmwareDamage {
    /// The table is shorter than its head.
    #[error("the table has {bytes} bytes, and its head alone {HEAD}")]
    Short {
        /// Bytes that are there.
        bytes: usize,
    },
    /// The length in the head is not that of the table.
    #[error("the head gives a length of {length} bytes, and {bytes} are there")]
    Length {
        /// The length in the head.
        length: u32,
        /// Bytes that are there.
        bytes: usize,
    },
    /// The bytes do not add up to 0.
    #[error("the bytes add up to {sum:#04x} and not to 0: the checksum is wrong")]
    Checksum {
        /// The sum.
        sum: u8,
    },
    /// A structure is shorter than its own head, or goes beyond the end.
    #[error("the structure at {offset:#x} has a length of {length} bytes, and {left} are left")]
    Structure {
        /// Its offset.
        offset: usize,
        /// Its length.
        length: usize,
        /// Bytes up to the end of the table.
        left: usize,
    },
    /// A scope or device entry is shorter than its own head, or goes beyond its structure.
    #[error(
        "the entry at {offset:#x} has a length of {length} bytes, and {left} are left in its structure"
    )]
    Entry {
        /// Its offset.
        offset: usize,
        /// Its length.
        length: usize,
        /// Bytes up to the end of the structure.
        left: usize,
    },
    /// An entry refers to a place where no structure begins.
    #[error("the entry at {offset:#x} refers to {unit:#x}, where no structure begins")]
    Reference {
        /// Its offset.
        offset: usize,
        /// The place that it refers to.
        unit: usize,
    },
}

impl FirmwareTable {
    /// Reads a table: structures up to the first damage. Any bytes are safe.
    pub fn read(bytes: &[u8]) -> Self {
        let mut table = Self::default();
        if bytes.len() < HEAD {
            table
                .damage
                .push(FirmwareDamage::Short { bytes: bytes.len() });
            return table;
        }
        let signature = bytes.get(..4).unwrap_or_default();
        table.signature = String::from_utf8_lossy(signature).into_owned();
        let length = u32_at(bytes, 4).unwrap_or_default();
        // Files have no padding; a longer one has something else behind the table.
        let end = usize::try_from(length).unwrap_or(usize::MAX);
        if end != bytes.len() {
            table.damage.push(FirmwareDamage::Length {
                length,
                bytes: bytes.len(),
            });
        }
        let whole = bytes.get(..end.min(bytes.len())).unwrap_or(bytes);
        let sum = whole.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        if sum != 0 && end <= bytes.len() {
            table.damage.push(FirmwareDamage::Checksum { sum });
        }
        match table.signature.as_str() {
            "DMAR" => table.structures(whole, &Self::dmar),
            "IVRS" => table.structures(whole, &Self::ivrs),
            "IORT" => table.iort(whole),
            "RIMT" => table.rimt(whole),
            _ => {}
        }
        table
    }

    fn structures(&mut self, bytes: &[u8], take: &dyn Fn(&mut Self, usize, &[u8])) {
        let mut offset = FIRST;
        while let Some(rest) = bytes.get(offset..).filter(|rest| !rest.is_empty()) {
            // Both tables have the length of a structure at 2.
            let length = u16_at(rest, 2).map_or(0, usize::from);
            let structure = rest.get(..length).filter(|_| length >= 4);
            let Some(structure) = structure else {
                self.damage.push(FirmwareDamage::Structure {
                    offset,
                    length,
                    left: rest.len(),
                });
                return;
            };
            take(self, offset, structure);
            offset += length;
        }
    }

    fn dmar(&mut self, offset: usize, structure: &[u8]) {
        let kind = u16_at(structure, 0);
        let segment = u16_at(structure, 6).unwrap_or_default();
        let head = match kind {
            Some(0) => 16,
            Some(1) => 24,
            _ => return,
        };
        let Some(scopes) = structure.get(head..) else {
            self.damage.push(FirmwareDamage::Structure {
                offset,
                length: structure.len(),
                left: structure.len(),
            });
            return;
        };
        let scopes = self.scopes(offset + head, scopes);
        let first = u64_at(structure, 8).unwrap_or_default();
        if kind == Some(0) {
            self.units.push(FirmwareUnit {
                offset,
                kind: FirmwareUnitKind::Vtd,
                segment,
                registers: first,
                scopes,
            });
        } else {
            self.regions.push(FirmwareRegion {
                offset,
                segment,
                first,
                last: u64_at(structure, 16).unwrap_or_default(),
                kind: FirmwareRegionKind::Rmrr(scopes),
            });
        }
    }

    fn scopes(&mut self, mut offset: usize, mut rest: &[u8]) -> Vec<Scope> {
        let mut scopes = Vec::new();
        while let Some(kind) = rest.first().copied() {
            let length = rest.get(1).copied().map_or(0, usize::from);
            let scope = rest.get(..length).filter(|_| length >= 6);
            let Some(scope) = scope else {
                self.damage.push(FirmwareDamage::Entry {
                    offset,
                    length,
                    left: rest.len(),
                });
                break;
            };
            let path = scope.get(6..).unwrap_or_default().chunks_exact(2);
            scopes.push(Scope {
                kind,
                number: scope.get(4).copied().unwrap_or_default(),
                bus: scope.get(5).copied().unwrap_or_default(),
                path: path
                    .filter_map(|step| Some((*step.first()?, *step.get(1)?)))
                    .collect(),
            });
            offset += length;
            rest = rest.get(length..).unwrap_or_default();
        }
        scopes
    }

    fn ivrs(&mut self, offset: usize, structure: &[u8]) {
        let kind = structure.first().copied().unwrap_or_default();
        let short = FirmwareDamage::Structure {
            offset,
            length: structure.len(),
            left: structure.len(),
        };
        match kind {
            0x10 | 0x11 | 0x40 => {
                let head = if kind == 0x10 { 24 } else { 40 };
                let Some(entries) = structure.get(head..) else {
                    self.damage.push(short);
                    return;
                };
                self.units.push(FirmwareUnit {
                    offset,
                    kind: FirmwareUnitKind::AmdVi,
                    segment: u16_at(structure, 16).unwrap_or_default(),
                    registers: u64_at(structure, 8).unwrap_or_default(),
                    scopes: Vec::new(),
                });
                self.device_entries(offset + head, entries);
            }
            0x20..=0x22 => {
                let (Some(first), Some(length)) = (u64_at(structure, 16), u64_at(structure, 24))
                else {
                    self.damage.push(short);
                    return;
                };
                let device = u16_at(structure, 4).unwrap_or_default();
                let last = u16_at(structure, 6).unwrap_or_default();
                self.regions.push(FirmwareRegion {
                    offset,
                    segment: u16_at(structure, 8).unwrap_or_default(),
                    first,
                    last: first.wrapping_add(length).wrapping_sub(1),
                    kind: FirmwareRegionKind::Ivmd {
                        flags: structure.get(1).copied().unwrap_or_default(),
                        devices: match kind {
                            0x20 => None,
                            0x21 => Some((device, device)),
                            _ => Some((device, last)),
                        },
                    },
                });
            }
            _ => {}
        }
    }

    fn device_entries(&mut self, mut offset: usize, mut rest: &[u8]) {
        while let Some(kind) = rest.first().copied() {
            let length = match kind {
                0..0x40 => 4,
                0x40..0x80 => 8,
                0x80..0xc0 => 16,
                // Named by an ACPI device; the length of its unique name is at 21.
                0xf0 => 22 + rest.get(21).copied().map_or(0, usize::from),
                _ => 32,
            };
            let Some(entry) = rest.get(..length) else {
                self.damage.push(FirmwareDamage::Entry {
                    offset,
                    length,
                    left: rest.len(),
                });
                return;
            };
            if kind == 0x48 {
                self.interrupt_sources.push(InterruptSource {
                    offset,
                    variety: entry.get(7).copied().unwrap_or_default(),
                    handle: entry.get(4).copied().unwrap_or_default(),
                    device: u16_at(entry, 5).unwrap_or_default(),
                });
            }
            offset += length;
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(signature: &[u8; 4], structures: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; FIRST];
        bytes[..4].copy_from_slice(signature);
        bytes.extend(structures);
        let length = bytes.len() as u32;
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        bytes[9] = 0u8.wrapping_sub(sum);
        bytes
    }

    fn rmrr(first: u64, last: u64, scope: &[u8]) -> Vec<u8> {
        let mut bytes = vec![1, 0, 24 + scope.len() as u8, 0, 0, 0, 0, 0];
        bytes.extend(first.to_le_bytes());
        bytes.extend(last.to_le_bytes());
        bytes.extend(scope);
        bytes
    }

    #[test]
    fn reserved_regions_of_dmar_name_their_devices() {
        let bytes = table(b"DMAR", &rmrr(0x1000, 0x1fff, &[5, 8, 0, 0, 2, 9, 0x12, 0]));
        let read = FirmwareTable::read(&bytes);
        assert_eq!(read.damage, []);
        let [region] = read.regions.as_slice() else {
            panic!("{read:?}")
        };
        assert_eq!(
            (region.first, region.last, region.offset),
            (0x1000, 0x1fff, 48)
        );
        let FirmwareRegionKind::Rmrr(scopes) = &region.kind else {
            panic!("{region:?}")
        };
        assert_eq!((scopes[0].kind, scopes[0].number), (5, 2));
        assert_eq!(scopes[0].address(0).unwrap(), "0000:09:12.0");
    }

    #[test]
    fn ivrs_has_units_regions_and_interrupt_sources() {
        let mut ivhd = vec![0; 24];
        ivhd[0] = 0x10;
        ivhd[2] = 36;
        ivhd[8..16].copy_from_slice(&0xfeb8_0000u64.to_le_bytes());
        // A device, and IOAPIC 33 as function 00:14.0.
        ivhd.extend([2, 0x08, 0, 0, 0x48, 0, 0, 0, 33, 0xa0, 0, 1]);
        let mut ivmd = vec![0; 32];
        ivmd[0] = 0x21;
        ivmd[1] = 7;
        ivmd[2] = 32;
        ivmd[4] = 0x08;
        ivmd[16..24].copy_from_slice(&0x2000u64.to_le_bytes());
        ivmd[24..32].copy_from_slice(&0x1000u64.to_le_bytes());
        ivhd.extend(ivmd);
        let read = FirmwareTable::read(&table(b"IVRS", &ivhd));
        assert_eq!(read.damage, []);
        assert_eq!(read.units[0].registers, 0xfeb8_0000);
        let source = read.interrupt_sources[0];
        assert_eq!(
            (source.variety, source.handle, source.device),
            (1, 33, 0xa0)
        );
        assert_eq!(
            (read.regions[0].first, read.regions[0].last),
            (0x2000, 0x2fff)
        );
    }

    #[test]
    fn damage_is_named_and_ends_the_structures() {
        let good = table(b"DMAR", &rmrr(0x1000, 0x1fff, &[1, 8, 0, 0, 0, 4, 0, 1]));
        for cut in 0..good.len() {
            assert!(
                !FirmwareTable::read(&good[..cut]).damage.is_empty(),
                "{cut}"
            );
        }
        let mut sum = good.clone();
        sum[60] ^= 1;
        assert!(matches!(
            FirmwareTable::read(&sum).damage[..],
            [FirmwareDamage::Checksum { .. }]
        ));
        for length in [0u16, 3, 4, 8, 23, 33, u16::MAX] {
            let mut broken = good.clone();
            broken[50..52].copy_from_slice(&length.to_le_bytes());
            assert!(!FirmwareTable::read(&broken).damage.is_empty(), "{length}");
        }
    }
}
