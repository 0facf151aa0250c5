//! x86-64: long mode, control registers written through the debugger stub.
//!
//! Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3: section 2.5 "Control
//! Registers", 5.1 "Paging Modes and Control Bits", 5.5 "4-Level Paging and 5-Level Paging"; 2.2.1
//! "Extended Feature Enable Register"; 3.4.5 "Segment Descriptors"; 10.1.1 "Processor State After Reset".

use iopt::{Prot, Table, format::X86_64};

use super::{Architecture, Emulator, processor::Processor, suite};

/// PE, protected mode; ET, which is always set; WP, supervisors keep to read-only pages, too; PG,
/// paging.
const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
/// PAE, entries of 64 bits.
const CR4_PAE: u64 = 1 << 5;
/// LA57, five levels.
const CR4_LA57: u64 = 1 << 12;
/// LME, long mode once paging is on; LMA, it is; NXE, NX is no reserved bit.
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const EFER_NXE: u64 = 1 << 11;

/// After reset the table of segments is at address 0. Code of 64 bits: L, P, S, and the type.
const CODE_SEGMENT: u32 = 8;
const CODE_DESCRIPTOR: u64 = 0x00af_9b00_0000_ffff;

pub(super) fn four_levels(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    levels(emulator, 4, CR4_PAE)
}

pub(super) fn five_levels(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    levels(emulator, 5, CR4_PAE | CR4_LA57)
}

fn levels(emulator: Emulator<'_>, levels: u8, cr4: u64) -> anyhow::Result<u64> {
    const HERE: Architecture = Architecture::X86_64;
    let (processor, tables) = Processor::start::<12>(emulator, HERE, "max,phys-bits=52")?;
    let table = Table::new(X86_64::new(levels)?, &tables)?;
    let machine = processor.machine();
    machine.writeq(u64::from(CODE_SEGMENT), CODE_DESCRIPTOR)?;
    // The stub writes 64 bits of cr3 only where code has 64 bits.
    processor.set(&[
        ("efer", EFER_LME | EFER_LMA | EFER_NXE),
        ("cr0", CR0_PE | CR0_ET),
        ("cs", CODE_SEGMENT.into()),
        ("cr4", cr4),
        ("cr3", table.root().address),
        ("cr0", CR0_PE | CR0_ET | CR0_WP | CR0_PG),
    ])?;
    suite::all(&processor, table, &tables, Prot::RW)?;
    Ok(processor.questions())
}
