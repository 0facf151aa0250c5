//! Tables of firmware that a machine has in the place of QEMU's, with something wrong.
//!
//! The kernel takes one from its initramfs if it has the ids of the table that is there, and a higher revision.
//!
//! Source: VT-d 4.1, section 8; Linux, Documentation/admin-guide/acpi/initrd_table_override.rst.

use crate::machines::EDU;

/// Registers of QEMU's unit.
const REGISTERS: u64 = 0xfed9_0000;
/// Registers that nothing has.
const NOWHERE: u64 = 0xfed8_0000;
/// Range that QEMU's firmware reserves.
const RESERVED: (u64, u64) = (0xfeff_c000, 0xfeff_dfff);

/// The DMAR of the machine of this name.
pub fn dmar(machine: &str) -> Option<Vec<u8>> {
    let device = edu_scope(1);
    let (start, end) = RESERVED;
    let structures = match machine {
        "dmar-one-to-one" => [unit(REGISTERS), region(start, end, &device)],
        "dmar-bad-region" => [unit(REGISTERS), region(end + 1, start - 1, &device)],
        // A device of the ACPI namespace, of which the table has no number.
        "dmar-scope" => [unit(REGISTERS), region(start, end, &edu_scope(5))],
        "dmar-no-registers" => [unit(NOWHERE), Vec::new()],
        _ => return None,
    };
    // Address width less one; interrupts are remapped.
    let mut body = vec![47, 1];
    body.extend([0; 10]);
    body.extend(structures.concat());
    Some(with_header(&body))
}

/// DRHD of all devices, with the I/O APIC where QEMU has it.
fn unit(registers: u64) -> Vec<u8> {
    let mut unit = Vec::new();
    unit.extend([0u16, 24].map(u16::to_le_bytes).concat());
    // All devices; of segment 0.
    unit.extend([1, 0, 0, 0]);
    unit.extend(registers.to_le_bytes());
    unit.extend([3, 8, 0, 0, 0, 0xff, 0, 0]);
    unit
}

/// RMRR.
fn region(first: u64, last: u64, scope: &[u8]) -> Vec<u8> {
    let mut region = Vec::new();
    let bytes = 24 + scope.len() as u16;
    region.extend([1, bytes, 0, 0].map(u16::to_le_bytes).concat());
    region.extend([first, last].map(u64::to_le_bytes).concat());
    region.extend(scope);
    region
}

/// Device scope of this type for `edu`.
fn edu_scope(kind: u8) -> [u8; 8] {
    let function = crate::machines::bdf(EDU).unwrap_or_default() as u8;
    [kind, 8, 0, 0, 0, 0, function >> 3, function & 7]
}

fn with_header(body: &[u8]) -> Vec<u8> {
    let mut table = Vec::new();
    table.extend(b"DMAR");
    table.extend((36 + body.len() as u32).to_le_bytes());
    table.extend([1, 0]);
    table.extend(b"BOCHS BXPC    ");
    table.extend(2u32.to_le_bytes());
    table.extend(b"BXPC");
    table.extend(1u32.to_le_bytes());
    table.extend(body);
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    table[9] = sum.wrapping_neg();
    table
}
