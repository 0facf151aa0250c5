//! ARMv8-A: stage 1 of exception level 1, system registers written by instructions.
//!
//! Arm Architecture Reference Manual for A-profile (DDI 0487): sections D24.2 "SCTLR_EL1", "TCR_EL1",
//! "TTBR0_EL1", "TTBR1_EL1", "MAIR_EL1"; C6.2 "MSR (register)"; D8.2 "Translation process".

use iopt::{
    Above, Format, Prot, Table, TableMemory,
    format::{ArmGranule, ArmOptions, ArmStage1, Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa},
    walk::Walker,
};

use runs::Span;

use super::{
    Architecture, Emulator,
    access::{self, Accesses, Flush, Isa},
    damage,
    processor::{Processor, Tables},
    subject::Walked,
    suite,
};

const HERE: Architecture = Architecture::ArmV8;

/// `msr ttbr0_el1, x0`, `msr ttbr1_el1, x1`, `msr tcr_el1, x2`, `msr mair_el1, x3`, `msr sctlr_el1, x4`.
const CODE: &[u32] = &[
    0xd518_2000,
    0xd518_2021,
    0xd518_2042,
    0xd518_a203,
    0xd518_1004,
];

/// SCTLR.M, the MMU is on.
const SCTLR_M: u64 = 1 << 0;
/// TCR.EPD0 and EPD1: nothing is walked from this root.
const TCR_EPD0: u64 = 1 << 7;
const TCR_EPD1: u64 = 1 << 23;
/// TCR.IPS = 0b101 and 0b110: output addresses of 48 and 52 bits.
const TCR_IPS_48: u64 = 0b101 << 32;
const TCR_IPS_52: u64 = 0b110 << 32;
/// TCR.HA and HD: hardware sets the access flag and dirty state.
const TCR_HA_HD: u64 = 0b11 << 39;
/// TCR.DS: entries of 4 KiB and 16 KiB granules hold 52 address bits.
const TCR_DS: u64 = 1 << 59;

pub(super) fn pages_of_4k(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    granule::<K4, 12>(emulator, &[39, 48, 34], 48)
}

pub(super) fn pages_of_16k(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    granule::<K16, 14>(emulator, &[36, 47, 48], 48)
}

/// Input addresses of more than 48 bits take FEAT_LVA.
pub(super) fn pages_of_64k(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    granule::<K64, 16>(emulator, &[39, 42, 48, 52], 48)
}

pub(super) fn pages_of_4k_lpa2(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    granule::<K4Lpa2, 12>(emulator, &[48, 52], 52)
}

pub(super) fn pages_of_16k_lpa2(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    granule::<K16Lpa2, 14>(emulator, &[48, 52], 52)
}

pub(super) fn pages_of_64k_lpa(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    granule::<K64Lpa, 16>(emulator, &[48, 52], 52)
}

/// Tables of TTBR0 and of TTBR1 for addresses of these numbers of bits.
fn granule<G: Granule, const LOG2: u32>(
    emulator: Emulator<'_>,
    input_bits: &[u32],
    output_bits: u32,
) -> anyhow::Result<u64>
where
    for<'t> &'t Tables<LOG2>: Walked,
{
    let mut questions = 0;
    for bits in input_bits {
        let lower = ArmStage1::<G>::new(*bits, output_bits)?;
        for format in [lower, lower.upper()] {
            let (processor, tables) = Processor::start::<LOG2>(emulator, HERE, "max")?;
            let table = Table::new(format, &tables)?;
            turn_on(&processor, &table, format.mair())?;
            suite::all(&processor, table, &tables, Prot::RW)?;
            questions += processor.questions();
        }
    }
    Ok(questions)
}

/// At exception level 1. The monitor's questions do not look at the access flag, so the walker assumes
/// that hardware sets it. `K64` is left out: blocks of 4 TiB are reserved in it, but not on a processor
/// with FEAT_LPA as this one.
pub(super) fn damage(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    Ok(damaged::<K4, 12>(emulator, 48)?
        + damaged::<K16, 14>(emulator, 48)?
        + damaged::<K4Lpa2, 12>(emulator, 52)?
        + damaged::<K16Lpa2, 14>(emulator, 52)?
        + damaged::<K64Lpa, 16>(emulator, 52)?)
}

fn damaged<G: Granule, const LOG2: u32>(emulator: Emulator<'_>, bits: u32) -> anyhow::Result<u64>
where
    for<'t> &'t Tables<LOG2>: Walked,
{
    let (processor, tables) = Processor::start::<LOG2>(emulator, HERE, "max")?;
    let format = ArmStage1::<G>::new(bits, bits)?;
    let mut table = Table::new(format, &tables)?;
    turn_on(&processor, &table, format.mair())?;
    let walker = Walker::new(table.root())
        .with_privileged_requests(true)
        .with_output_bits(bits);
    damage::all(&processor, HERE, &tables, &mut table, walker, |_| false)?;
    Ok(processor.questions())
}

/// With hardware that sets the access flag and dirty state (FEAT_HAFDBS), at exception level 1, which may
/// access what exception level 0 may (PSTATE.PAN = 0).
pub(super) fn accesses(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    Ok(of::<K4, 12>(emulator, 48)?
        + of::<K16, 14>(emulator, 48)?
        + of::<K64, 16>(emulator, 48)?
        + of::<K4Lpa2, 12>(emulator, 52)?
        + of::<K16Lpa2, 14>(emulator, 52)?
        + of::<K64Lpa, 16>(emulator, 52)?)
}

fn of<G: Granule, const LOG2: u32>(emulator: Emulator<'_>, bits: u32) -> anyhow::Result<u64>
where
    for<'t> &'t Tables<LOG2>: Walked,
{
    let (processor, tables) = Processor::start::<LOG2>(emulator, HERE, "max")?;
    let options = ArmOptions {
        dirty: true,
        ..ArmOptions::PLAIN
    };
    let format = ArmStage1::<G>::new(bits, bits)?.with_options(options);
    let mut table = Table::new(format, &tables)?;
    turn_on(&processor, &table, format.mair())?;
    let isa = Isa {
        pages: Span::new(HERE.code(), 1 << LOG2),
        // Pages that others may write to cannot be executed at this level.
        prot: Prot::READ | Prot::EXECUTE | Prot::PRIVILEGED,
        code: HERE.code(),
        // `ldr x1, [x0]`, `str x1, [x0]`.
        load: 0xf940_0001_u32.to_le_bytes().to_vec(),
        store: 0xf900_0001_u32.to_le_bytes().to_vec(),
        counter: "pc",
        address: "x0",
        value: "x1",
        // VBAR_EL1 = 0: synchronous, from the current level with a stack of its own.
        handler: 0x200,
        before: vec![],
        // `tlbi vmalle1`.
        flush: Flush::Instruction(0xd508_871f_u32.to_le_bytes().to_vec()),
    };
    let accesses = Accesses::new(&processor, isa)?;
    access::all(&accesses, &mut table, HERE.data())
}

/// Has the processor walk a table from now on.
fn turn_on<G: Granule, M: TableMemory>(
    processor: &Processor,
    table: &Table<ArmStage1<G>, M>,
    mair: u64,
) -> anyhow::Result<()> {
    let (root, format) = (table.root().address, table.format());
    let aperture = format.aperture();
    let size = 64 - u64::from(aperture.bits);
    // TG0 and TG1 have codes of their own. SH, ORGN and IRGN stay 0: the tables are not cached.
    let (tg0, tg1) = match G::LOG2 {
        12 => (0b00, 0b10),
        14 => (0b10, 0b01),
        _ => (0b01, 0b11),
    };
    let mut tcr = size | tg0 << 14 | size << 16 | tg1 << 30;
    tcr |= if aperture.above == Above::Ones {
        TCR_EPD0
    } else {
        TCR_EPD1
    };
    tcr |= if format.output_bits() == 52 {
        TCR_IPS_52
    } else {
        TCR_IPS_48
    };
    if format.keeps_dirty() {
        tcr |= TCR_HA_HD;
    }
    if matches!(G::KIND, ArmGranule::K4Lpa2 | ArmGranule::K16Lpa2) {
        tcr |= TCR_DS;
    }
    processor.run(
        CODE,
        &[
            ("x0", root),
            ("x1", root),
            ("x2", tcr),
            ("x3", mair),
            ("x4", processor.get("SCTLR_EL1")? | SCTLR_M),
        ],
    )
}
