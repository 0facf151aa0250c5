//! The ACPI table by which a kernel learns which devices are behind virtio's IOMMU.
//!
//! QEMU writes one for its own virtio-iommu only, so a machine with another one brings it along
//! (`-acpitable file=`).
//!
//! Source: ACPI 6.5, "Virtual I/O Translation (VIOT) Table" and "System Description Table Header".

use std::ops::RangeInclusive;

/// Bytes of the header with the table's own fields: node count, where the first node lies, 8 reserved.
const NODES: u16 = 48;
/// Node of type 1: a range of PCI functions.
const PCI_RANGE: u8 = 1;
const PCI_RANGE_BYTES: u16 = 24;
/// Node of type 3: virtio's IOMMU as a PCI function.
const VIRTIO_PCI: u8 = 3;
const VIRTIO_PCI_BYTES: u16 = 16;

/// The table of a machine whose PCI functions `endpoints` are behind the IOMMU `iommu`, all by bus,
/// device and function in segment 0. The same numbers are the endpoints' identifiers.
pub fn table(iommu: u16, endpoints: RangeInclusive<u16>) -> Vec<u8> {
    let length = NODES + VIRTIO_PCI_BYTES + PCI_RANGE_BYTES;
    let mut table = Vec::new();
    table.extend(b"VIOT");
    table.extend(u32::from(length).to_le_bytes());
    // Revision, and the checksum, which comes last.
    table.extend([0, 0]);
    table.extend(b"DMASPC");
    table.extend(b"DMASPACE");
    table.extend(1u32.to_le_bytes());
    table.extend(b"DMAS");
    table.extend(1u32.to_le_bytes());
    table.extend([2, NODES].map(u16::to_le_bytes).concat());
    table.extend([0; 8]);
    let node = |table: &mut Vec<u8>, kind: u8, bytes: u16| {
        table.extend([kind, 0]);
        table.extend(bytes.to_le_bytes());
    };
    node(&mut table, VIRTIO_PCI, VIRTIO_PCI_BYTES);
    table.extend([0, iommu].map(u16::to_le_bytes).concat());
    table.extend([0; 8]);
    node(&mut table, PCI_RANGE, PCI_RANGE_BYTES);
    table.extend(u32::from(*endpoints.start()).to_le_bytes());
    // Segments, functions, and the node of their IOMMU: from the first to the last each.
    let range = [0, 0, *endpoints.start(), *endpoints.end(), NODES];
    table.extend(range.map(u16::to_le_bytes).concat());
    table.extend([0; 6]);
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    table[9] = sum.wrapping_neg();
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_where_the_specification_has_it() {
        let table = table(0x40, 0x28..=0x38);
        let word = |at: usize| u16::from_le_bytes([table[at], table[at + 1]]);
        assert_eq!(&table[..4], b"VIOT");
        assert_eq!((table.len(), word(4), word(6)), (88, 88, 0));
        let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        assert_eq!(sum, 0);
        // Two nodes, from 48 on.
        assert_eq!((word(36), word(38)), (2, 48));
        // The IOMMU: type, length, segment, function.
        assert_eq!((table[48], word(50), word(52), word(54)), (3, 16, 0, 0x40));
        // The range: type, length, first endpoint, functions, and the offset of the IOMMU.
        assert_eq!((table[64], word(66), word(68), word(70)), (1, 24, 0x28, 0));
        assert_eq!((word(76), word(78), word(80)), (0x28, 0x38, 48));
    }
}
