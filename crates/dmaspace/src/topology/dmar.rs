//! On which node Intel's units lie, as the firmware tells.
//!
//! Intel Virtualization Technology for Directed I/O, D51397, revision 5.0: section 8.1 "DMA Remapping
//! Reporting Structure", section 8.2 "Remapping Structure Types", section 8.6 "Remapping Hardware
//! Status Affinity Structure".

/// Where the remapping structures begin.
const HEADER: usize = 48;
/// The type of a remapping hardware status affinity structure, and its length.
const RHSA: u16 = 3;
const RHSA_BYTES: usize = 20;

/// The proximity domain of the unit whose registers are at `registers`; `None` when the table does
/// not say, or is damaged before it does.
///
/// Linux numbers nodes by the order in which it meets proximity domains; firmware of today numbers
/// these from 0 on without gaps, and then both are the same.
pub(super) fn proximity(table: &[u8], registers: u64) -> Option<u32> {
    let mut rest = table.get(HEADER..)?;
    loop {
        let word = |at: usize| Some(u16::from_le_bytes(rest.get(at..at + 2)?.try_into().ok()?));
        let (kind, length) = (word(0)?, usize::from(word(2)?));
        let structure = rest.get(..length)?;
        if kind == RHSA && length >= RHSA_BYTES {
            let base = u64::from_le_bytes(structure.get(8..16)?.try_into().ok()?);
            if base == registers {
                let domain = structure.get(16..20)?.try_into().ok()?;
                return Some(u32::from_le_bytes(domain));
            }
        }
        // Shorter than its own head: no step would be made.
        if length < 4 {
            return None;
        }
        rest = rest.get(length..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn structure(kind: u16, base: u64, domain: u32) -> Vec<u8> {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(20u16.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(base.to_le_bytes());
        bytes.extend(domain.to_le_bytes());
        bytes
    }

    #[test]
    fn a_unit_is_found_by_its_registers() {
        let mut table = vec![0; HEADER];
        // A structure of another kind in front has the same bytes where an RHSA has its base.
        table.extend(structure(0, 0xfed9_1000, 7));
        table.extend(structure(3, 0xfed9_0000, 0));
        table.extend(structure(3, 0xfed9_1000, 1));
        assert_eq!(proximity(&table, 0xfed9_0000), Some(0));
        assert_eq!(proximity(&table, 0xfed9_1000), Some(1));
        assert_eq!(proximity(&table, 0xfed9_2000), None);
    }

    #[test]
    fn a_damaged_table_ends_the_search() {
        let mut table = vec![0; HEADER];
        table.extend(structure(3, 0x1000, 1));
        for cut in 0..table.len() {
            assert_eq!(proximity(&table[..cut], 0x1000), None, "{cut}");
        }
        for length in [0u16, 1, 3, 8, u16::MAX] {
            let mut broken = vec![0; HEADER];
            broken.extend(3u16.to_le_bytes());
            broken.extend(length.to_le_bytes());
            broken.extend(structure(3, 0x1000, 1));
            let found = proximity(&broken, 0x1000);
            assert!(found.is_none() || length == 8, "{length}: {found:?}");
        }
    }
}
