//! RISC-V: RV64 in user mode, whose loads are translated; control registers written through the
//! debugger stub.
//!
//! The RISC-V Instruction Set Manual, volume II "Privileged Architecture", version 20240411: section
//! 10.1.11 "Supervisor Address Translation and Protection (satp) Register", 3.1.18 "Machine Environment
//! Configuration Register (menvcfg)", 3.7.1 "Physical Memory Protection CSRs"; chapter 11 "Svnapot", 12
//! "Svpbmt".

use anyhow::ensure;
use iopt::{Format, Prot, Table, TableOps as _, format::RiscV, walk::Walker};
use runs::{PageSizes, Span};

use super::{
    Architecture, Emulator,
    access::{self, Accesses, Flush, Isa},
    damage,
    processor::{Processor, Tables},
    subject::Subject,
    suite,
};

const HERE: Architecture = Architecture::RiscV;

/// Processors without either extension, with one and with both.
const PLAIN: &str = "rv64,svnapot=off,svpbmt=off";
const WITH_SVNAPOT: &str = "rv64,svnapot=on,svpbmt=off";
const WITH_SVPBMT: &str = "rv64,svnapot=on,svpbmt=on";
const WITH_SVADU: &str = "rv64,svnapot=on,svpbmt=off,svadu=on";

/// satp.MODE: 8, 9 and 10 for Sv39, Sv48 and Sv57.
const MODE_SHIFT: u32 = 60;
/// menvcfg.PBMTE: entries may have memory types.
const PBMTE: u64 = 1 << 62;
/// menvcfg.ADUE: hardware sets A and D.
const ADUE: u64 = 1 << 61;
/// pmpcfg0: a region of all addresses that may be read, written and executed (NAPOT, X, W, R).
const PMP_ALL: u64 = 0x1f;
const PMP_ADDRESSES: u64 = (1 << 54) - 1;

/// Leaves of 64 KiB take Svnapot.
const NAPOT: u64 = 64 << 10;

pub(super) fn sv39(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    plain(emulator, 3)
}

pub(super) fn sv48(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    plain(emulator, 4)
}

pub(super) fn sv57(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    plain(emulator, 5)
}

/// On a processor without either extension.
fn plain(emulator: Emulator<'_>, levels: u8) -> anyhow::Result<u64> {
    let (processor, tables) = start(emulator, PLAIN)?;
    let format = RiscV::new(levels)?;
    let sizes = PageSizes::from_bits(RiscV::page_sizes(levels).bits() & !NAPOT);
    let table = Table::with_page_sizes(format, &tables, sizes)?;
    turn_on(&processor, table.root().address, levels, 0)?;
    suite::all(&processor, table, &tables, Prot::RW)?;
    Ok(processor.questions())
}

/// On a processor with it; one without it finds a reserved bit in leaves of 64 KiB.
pub(super) fn svnapot(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    let mut questions = 0;
    for levels in [3, 4, 5] {
        let (processor, tables) = start(emulator, WITH_SVNAPOT)?;
        let table = Table::new(RiscV::new(levels)?, &tables)?;
        turn_on(&processor, table.root().address, levels, 0)?;
        suite::all(&processor, table, &tables, Prot::RW)?;
        questions += processor.questions();
    }
    let (processor, tables) = start(emulator, PLAIN)?;
    let mut table = Table::new(RiscV::new(3)?, &tables)?;
    turn_on(&processor, table.root().address, 3, 0)?;
    for (iova, len) in [(NAPOT, NAPOT), (4 * NAPOT, NAPOT - 0x1000)] {
        table.map(iova, &[Span::new(PA + iova, len)], Prot::RW)?;
    }
    expect(&processor, NAPOT, None)?;
    expect(&processor, 4 * NAPOT, Some(PA + 4 * NAPOT))?;
    Ok(questions + processor.questions())
}

/// Where some leaves lead.
const PA: u64 = 0xab_cdef_0000_0000;

/// With menvcfg.PBMTE on; memory types are reserved bits where it is off.
pub(super) fn svpbmt(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    let mut questions = 0;
    for (levels, memory_type) in [(3, Prot::DEVICE), (4, Prot::UNCACHED), (5, Prot::DEVICE)] {
        let (processor, tables) = start(emulator, WITH_SVPBMT)?;
        let format = RiscV::new(levels)?.with_memory_types(true);
        let table = Table::new(format, &tables)?;
        turn_on(&processor, table.root().address, levels, PBMTE)?;
        suite::all(&processor, table, &tables, Prot::RW | memory_type)?;
        let mut subject = Subject::new(
            &processor,
            Table::new(format, &tables)?,
            &tables,
            Prot::RW | memory_type,
        )?;
        turn_on(&processor, subject.table.root().address, levels, PBMTE)?;
        subject.map(0x1000, &[Span::new(PA, 0x1000)])?;
        subject.ask(0x1000)?;
        turn_on(&processor, subject.table.root().address, levels, 0)?;
        expect(&processor, 0x1000, None)?;
        questions += processor.questions();
    }
    Ok(questions)
}

/// With Svadu, in user mode.
pub(super) fn accesses(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    let mut count = 0;
    for levels in [3, 4, 5] {
        let (processor, tables) = start(emulator, WITH_SVADU)?;
        let format = RiscV::new(levels)?.with_hardware_updates(true);
        let mut table = Table::new(format, &tables)?;
        let root = table.root().address;
        turn_on(&processor, root, levels, ADUE)?;
        let isa = Isa {
            pages: Span::new(HERE.code(), 0x1000),
            prot: Prot::READ | Prot::EXECUTE,
            code: HERE.code(),
            // `ld a1, 0(a0)`, `sd a1, 0(a0)`.
            load: 0x0005_3583_u32.to_le_bytes().to_vec(),
            store: 0x00b5_3023_u32.to_le_bytes().to_vec(),
            counter: "pc",
            address: "a0",
            value: "a1",
            // mtvec = 0, in machine mode.
            handler: 0,
            before: vec![("priv", 0)],
            // A write that changes nothing flushes nothing.
            flush: Flush::Registers(vec![("priv", 3), ("satp", 0), ("satp", satp(root, levels))]),
        };
        let accesses = Accesses::new(&processor, isa)?;
        count += access::all(&accesses, &mut table, HERE.data())?;
    }
    Ok(count)
}

/// Reserved bits and encodings, with neither extension and with both.
pub(super) fn damage(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    let mut questions = 0;
    for levels in [3, 4, 5] {
        for extended in [false, true] {
            let model = if extended { WITH_SVPBMT } else { PLAIN };
            let (processor, tables) = start(emulator, model)?;
            let every = RiscV::page_sizes(levels);
            let sizes = match extended {
                true => every,
                false => PageSizes::from_bits(every.bits() & !NAPOT),
            };
            let format = RiscV::new(levels)?.with_memory_types(extended);
            let mut table = Table::with_page_sizes(format, &tables, sizes)?;
            let menvcfg = if extended { PBMTE } else { 0 };
            turn_on(&processor, table.root().address, levels, menvcfg)?;
            let walker = Walker::new(table.root())
                .with_page_sizes(sizes)
                .with_hardware_accessed(false)
                .with_hardware_dirty(false)
                .with_svpbmt(extended);
            damage::all(
                &processor,
                HERE,
                &tables,
                &mut table,
                walker,
                has_no_memory_type,
            )?;
            questions += processor.questions();
        }
    }
    Ok(questions)
}

/// PBMT = 3 is reserved and faults (chapter 12); QEMU translates it (seen in 10.0.2).
const fn has_no_memory_type(word: u64) -> bool {
    word >> 61 & 3 == 3
}

/// satp for the table at `root`.
fn satp(root: u64, levels: u8) -> u64 {
    u64::from(levels + 5) << MODE_SHIFT | root >> 12
}

fn start(emulator: Emulator<'_>, model: &str) -> anyhow::Result<(Processor, Tables<12>)> {
    Processor::start::<12>(emulator, HERE, model)
}

/// Has the processor walk the table at `root` from now on, in user mode.
fn turn_on(processor: &Processor, root: u64, levels: u8, menvcfg: u64) -> anyhow::Result<()> {
    // Machine mode: it may write the others.
    processor.set(&[("priv", 3)])?;
    if menvcfg != processor.get("menvcfg")? {
        processor.set(&[("menvcfg", menvcfg)])?;
    }
    processor.set(&[
        ("pmpaddr0", PMP_ADDRESSES),
        ("pmpcfg0", PMP_ALL),
        ("satp", satp(root, levels)),
        ("priv", 0),
    ])
}

fn expect(processor: &Processor, iova: u64, expected: Option<u64>) -> anyhow::Result<()> {
    let found = processor.translate(iova)?;
    ensure!(
        found == expected,
        "{iova:#x} leads to {found:x?}, not {expected:x?}"
    );
    Ok(())
}
