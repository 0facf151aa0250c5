//! The nodes of units, from the firmware's tables.
//!
//! | table | structure | says |
//! |---|---|---|
//! | DMAR | RHSA (type 3) | base of the registers at 8, proximity domain at 16 |
//! | IORT | SMMUv3 (type 4) | base at 16, flags at 24 (bit 3: the domain counts), proximity domain at 60 |
//! | RIMT | IOMMU (type 0) | base at 16, flags at 24 (bit 0: a PCI function, bit 1: the domain counts), proximity domain at 28, segment at 32, function at 34 |
//!
//! SMMUv1 and v2 have no proximity domain in the IORT. AMD's IVRS has none either: there the unit is a PCI function,
//! whose node is that of its root bus.
//!
//! Sources: Intel Virtualization Technology for Directed I/O, D51397, revision 5.0, sections 8.1, 8.2
//! and 8.6; Arm DEN0049 (IO Remapping Table), issue E.b, section 3.1 "Node format", table "SMMUv3 node";
//! RISC-V IO Mapping Table (RIMT) 1.0, "IOMMU Node"; the same in Linux, `include/acpi/actbl2.h`.

use super::UnitAddress;

/// The proximity domain of the unit at `unit`, from the whole of an ACPI table: DMAR, IORT or RIMT.
/// `None` when the table does not say, is none of them, or is damaged before it does.
///
/// Linux numbers nodes by the order in which it meets proximity domains; firmware of today numbers
/// these from 0 on without gaps, and then both are the same.
pub fn proximity(table: &[u8], unit: &UnitAddress) -> Option<u32> {
    match table.get(..4)? {
        // No count: it ends with the table.
        b"DMAR" => find(table, 48, u32::MAX, &head_of_dmar, &|node| rhsa(node, unit)),
        b"IORT" => find(
            table,
            u32_at(table, 40)?,
            u32_at(table, 36)?,
            &head_of_iort,
            &|node| smmuv3(node, unit),
        ),
        b"RIMT" => find(
            table,
            u32_at(table, 40)?,
            u32_at(table, 36)?,
            &head_of_rimt,
            &|node| riscv(node, unit),
        ),
        _ => None,
    }
}

/// First value that `says` returns for one of at most `count` structures from offset `first` on, each as long as
/// `length` reads.
fn find(
    table: &[u8],
    first: u32,
    count: u32,
    length: &dyn Fn(&[u8]) -> Option<u16>,
    says: &dyn Fn(&[u8]) -> Option<u32>,
) -> Option<u32> {
    let mut rest = table.get(first as usize..)?;
    for _ in 0..count {
        let length = usize::from(length(rest)?);
        let structure = rest.get(..length)?;
        if let Some(domain) = says(structure) {
            return Some(domain);
        }
        // Shorter than its own head: no step would be made.
        if length < 4 {
            return None;
        }
        rest = rest.get(length..)?;
    }
    None
}

fn head_of_dmar(structure: &[u8]) -> Option<u16> {
    u16_at(structure, 2)
}

fn head_of_iort(structure: &[u8]) -> Option<u16> {
    u16_at(structure, 1)
}

fn head_of_rimt(structure: &[u8]) -> Option<u16> {
    u16_at(structure, 2)
}

fn rhsa(structure: &[u8], unit: &UnitAddress) -> Option<u32> {
    let ours = u16_at(structure, 0)? == 3 && is_at(structure, 8, unit);
    ours.then(|| u32_at(structure, 16))?
}

fn smmuv3(structure: &[u8], unit: &UnitAddress) -> Option<u32> {
    const VALID: u32 = 1 << 3;
    let ours = *structure.first()? == 4 && is_at(structure, 16, unit);
    let counts = u32_at(structure, 24)? & VALID != 0;
    (ours && counts).then(|| u32_at(structure, 60))?
}

fn riscv(structure: &[u8], unit: &UnitAddress) -> Option<u32> {
    const PCI: u32 = 1 << 0;
    const VALID: u32 = 1 << 1;
    let flags = u32_at(structure, 24)?;
    let ours = if flags & PCI == 0 {
        is_at(structure, 16, unit)
    } else {
        let function = (u16_at(structure, 32)?, u16_at(structure, 34)?);
        unit.function() == Some(function)
    };
    let is_unit = *structure.first()? == 0;
    (is_unit && ours && flags & VALID != 0).then(|| u32_at(structure, 28))?
}

/// Returns true if the base at `offset` is the address of the unit's registers.
fn is_at(structure: &[u8], offset: usize, unit: &UnitAddress) -> bool {
    let bytes = structure.get(offset..offset + 8);
    let base = bytes.and_then(|bytes| Some(u64::from_le_bytes(bytes.try_into().ok()?)));
    matches!((unit, base), (UnitAddress::Registers(at), Some(base)) if *at == base)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(registers: u64) -> UnitAddress {
        UnitAddress::Registers(registers)
    }

    fn function(address: &str) -> UnitAddress {
        UnitAddress::Function(address.into())
    }

    /// Writes `value` into `bytes` at `offset`.
    fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
        bytes[offset..offset + value.len()].copy_from_slice(value);
    }

    fn of_dmar(kind: u16, base: u64, domain: u32) -> Vec<u8> {
        let mut bytes = vec![0; 20];
        put(&mut bytes, 0, &kind.to_le_bytes());
        put(&mut bytes, 2, &20u16.to_le_bytes());
        put(&mut bytes, 8, &base.to_le_bytes());
        put(&mut bytes, 16, &domain.to_le_bytes());
        bytes
    }

    fn of_iort(kind: u8, base: u64, flags: u32, domain: u32) -> Vec<u8> {
        let mut bytes = vec![0; 68];
        bytes[0] = kind;
        put(&mut bytes, 1, &68u16.to_le_bytes());
        put(&mut bytes, 16, &base.to_le_bytes());
        put(&mut bytes, 24, &flags.to_le_bytes());
        put(&mut bytes, 60, &domain.to_le_bytes());
        bytes
    }

    fn of_rimt(kind: u8, base: u64, flags: u32, domain: u32, function: [u16; 2]) -> Vec<u8> {
        let mut bytes = vec![0; 40];
        bytes[0] = kind;
        put(&mut bytes, 2, &40u16.to_le_bytes());
        put(&mut bytes, 16, &base.to_le_bytes());
        put(&mut bytes, 24, &flags.to_le_bytes());
        put(&mut bytes, 28, &domain.to_le_bytes());
        put(&mut bytes, 32, &function[0].to_le_bytes());
        put(&mut bytes, 34, &function[1].to_le_bytes());
        bytes
    }

    fn table(signature: &[u8; 4], structures: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; 48];
        put(&mut bytes, 0, signature);
        if signature != b"DMAR" {
            put(&mut bytes, 36, &(structures.len() as u32).to_le_bytes());
            put(&mut bytes, 40, &48u32.to_le_bytes());
        }
        bytes.extend(structures.concat());
        bytes
    }

    #[test]
    fn dmar_reports_by_registers() {
        // A structure of another kind in front has the same bytes where an RHSA has its base.
        let table = table(
            b"DMAR",
            &[
                of_dmar(0, 0xfed9_1000, 7),
                of_dmar(3, 0xfed9_0000, 0),
                of_dmar(3, 0xfed9_1000, 1),
            ],
        );
        assert_eq!(proximity(&table, &at(0xfed9_0000)), Some(0));
        assert_eq!(proximity(&table, &at(0xfed9_1000)), Some(1));
        assert_eq!(proximity(&table, &at(0xfed9_2000)), None);
        assert_eq!(proximity(&table, &function("0000:00:00.0")), None);
    }

    #[test]
    fn iort_describes_smmuv3_where_the_domain_counts() {
        let table = table(
            b"IORT",
            &[
                of_iort(3, 0x0905_0000, 8, 7),
                of_iort(4, 0x0905_0000, 8 | 1, 2),
                of_iort(4, 0x0906_0000, 1, 3),
            ],
        );
        assert_eq!(proximity(&table, &at(0x0905_0000)), Some(2));
        assert_eq!(proximity(&table, &at(0x0906_0000)), None);
    }

    #[test]
    fn rimt_reports_by_registers_or_function_where_the_domain_counts() {
        let table = table(
            b"RIMT",
            &[
                // A root complex.
                of_rimt(1, 0x0301_0000, 2, 7, [0, 0]),
                of_rimt(0, 0x0301_0000, 2, 4, [0, 0]),
                of_rimt(0, 0, 3, 5, [1, 0x0109]),
                of_rimt(0, 0x0302_0000, 0, 6, [0, 0]),
            ],
        );
        assert_eq!(proximity(&table, &at(0x0301_0000)), Some(4));
        assert_eq!(proximity(&table, &function("0001:01:01.1")), Some(5));
        assert_eq!(proximity(&table, &function("0000:01:01.1")), None);
        // The base of a PCI function is not where it is.
        assert_eq!(proximity(&table, &at(0)), None);
        assert_eq!(proximity(&table, &at(0x0302_0000)), None);
    }

    #[test]
    fn a_damaged_table_ends_the_search() {
        let tables = [
            table(b"DMAR", &[of_dmar(3, 0x1000, 1)]),
            table(b"IORT", &[of_iort(4, 0x1000, 8, 1)]),
            table(b"RIMT", &[of_rimt(0, 0x1000, 2, 1, [0, 0])]),
        ];
        for (table, length_at) in tables.iter().zip([50, 49, 50]) {
            assert_eq!(proximity(table, &at(0x1000)), Some(1));
            for cut in 0..table.len() {
                assert_eq!(proximity(&table[..cut], &at(0x1000)), None, "{cut}");
            }
            for length in [0u16, 1, 3, 8, u16::MAX] {
                let mut broken = table.clone();
                put(&mut broken, length_at, &length.to_le_bytes());
                assert_eq!(proximity(&broken, &at(0x1000)), None, "{length}");
            }
        }
        // No more than were announced, and none beyond the table.
        let mut none = tables[1].clone();
        put(&mut none, 36, &0u32.to_le_bytes());
        assert_eq!(proximity(&none, &at(0x1000)), None);
        let mut beyond = tables[1].clone();
        put(&mut beyond, 40, &u32::MAX.to_le_bytes());
        assert_eq!(proximity(&beyond, &at(0x1000)), None);
        assert_eq!(proximity(b"SRAT and more than four bytes", &at(0)), None);
    }
}
