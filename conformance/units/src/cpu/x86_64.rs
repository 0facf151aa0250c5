//! x86-64: long mode, control registers written through the debugger stub.
//!
//! Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3: section 2.5 "Control
//! Registers", 5.1 "Paging Modes and Control Bits", 5.5 "4-Level Paging and 5-Level Paging"; 2.2.1
//! "Extended Feature Enable Register"; 3.4.5 "Segment Descriptors"; 7.14.1
//! "64-Bit Mode IDT"; 10.1.1 "Processor State After Reset".

use iopt::{Prot, Root, Table, format::X86_64};
use runs::{Iova, Span};

use super::{
    Architecture, Emulator,
    access::{self, Accesses, Flush, Isa},
    processor::{Processor, Tables},
    suite,
};

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

const HERE: Architecture = Architecture::X86_64;

/// The first pages: descriptors of segments and of interrupts, instructions, the stack.
const PAGES: Span<Iova> = Span::new(0, 0x3000);
const CODE: u64 = 0x1000;
const STACK: u64 = PAGES.start + PAGES.len;
/// The page-fault exception's number, its gate (64-bit interrupt gate, present), and where it leads.
const PAGE_FAULT: u64 = 14;
const GATE: u64 = 0x8e00 << 32;
const HANDLER: u64 = CODE + 0x100;

pub(super) fn four_levels(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    levels(emulator, 4)
}

pub(super) fn five_levels(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    levels(emulator, 5)
}

fn levels(emulator: Emulator<'_>, levels: u8) -> anyhow::Result<u64> {
    let (processor, tables) = start(emulator)?;
    let table = Table::new(X86_64::new(levels)?, &tables)?;
    turn_on(&processor, table.root())?;
    suite::all(&processor, table, &tables, Prot::RW)?;
    Ok(processor.questions())
}

/// With the privilege of an operating system, which CR0.WP keeps from writing to read-only pages.
pub(super) fn accesses(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    let mut count = 0;
    for levels in [4, 5] {
        let (processor, tables) = start(emulator)?;
        let mut table = Table::new(X86_64::new(levels)?, &tables)?;
        turn_on(&processor, table.root())?;
        let machine = processor.machine();
        let gate = GATE | u64::from(CODE_SEGMENT) << 16 | HANDLER;
        machine.writeq(PAGE_FAULT * 16, gate)?;
        machine.writeq(PAGE_FAULT * 16 + 8, 0)?;
        let isa = Isa {
            pages: PAGES,
            prot: Prot::RW | Prot::EXECUTE,
            code: CODE,
            // `mov rax, [rdi]`, `mov [rdi], rax`.
            load: vec![0x48, 0x8b, 0x07],
            store: vec![0x48, 0x89, 0x07],
            counter: "rip",
            address: "rdi",
            value: "rax",
            handler: HANDLER,
            before: vec![("rsp", STACK)],
            flush: Flush::Registers(vec![("cr3", table.root().address)]),
        };
        let accesses = Accesses::new(&processor, isa)?;
        count += access::all(&accesses, &mut table, HERE.data())?;
    }
    Ok(count)
}

fn start(emulator: Emulator<'_>) -> anyhow::Result<(Processor, Tables<12>)> {
    Processor::start(emulator, HERE, "max,phys-bits=52")
}

/// Has the processor walk a table from now on, in long mode.
fn turn_on(processor: &Processor, root: Root) -> anyhow::Result<()> {
    let machine = processor.machine();
    machine.writeq(u64::from(CODE_SEGMENT), CODE_DESCRIPTOR)?;
    let la57 = if root.levels == 5 { CR4_LA57 } else { 0 };
    // The stub writes 64 bits of cr3 only where code has 64 bits.
    processor.set(&[
        ("efer", EFER_LME | EFER_LMA | EFER_NXE),
        ("cr0", CR0_PE | CR0_ET),
        ("cs", CODE_SEGMENT.into()),
        ("cr4", CR4_PAE | la57),
        ("cr3", root.address),
        ("cr0", CR0_PE | CR0_ET | CR0_WP | CR0_PG),
    ])
}
