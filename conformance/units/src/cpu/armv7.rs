//! ARMv7-A: short descriptors, system registers written by instructions.
//!
//! Arm Architecture Reference Manual, ARMv7-A and ARMv7-R edition (DDI 0406C): sections B4.1.130
//! "SCTLR", B4.1.153 "TTBCR", B4.1.154 "TTBR0", B4.1.43 "DACR"; A8.8.98 "MCR".

use iopt::{Format, Prot, Table, format::ArmV7s};

use super::{Architecture, Emulator, processor::Processor, subject::NarrowTables, suite};

/// `mcr p15, 0, r0, c2, c0, 0` and so on: r0 to TTBR0, r1 to TTBCR, r2 to DACR, r3 to SCTLR.
const CODE: &[u32] = &[0xee02_0f10, 0xee02_1f50, 0xee03_2f10, 0xee01_3f10];

/// M, the MMU is on; AFE, AP\[0\] is the access flag.
const SCTLR: u64 = 1 << 0 | 1 << 29;
/// TRE, memory types are chosen by PRRR and NMRR.
const SCTLR_TRE: u64 = 1 << 28;

/// Both with and without TEX remapping, and with a domain that has no supersections.
pub(super) fn short_descriptors(emulator: Emulator<'_>) -> anyhow::Result<u64> {
    let mut questions = of::<_, 0>(emulator, ArmV7s::<0>::new(), SCTLR)?;
    questions += of::<_, 0>(emulator, ArmV7s::<0>::new(), SCTLR | SCTLR_TRE)?;
    questions += of::<_, 5>(emulator, ArmV7s::<5>::new(), SCTLR)?;
    Ok(questions)
}

fn of<F: Format, const DOMAIN: u8>(
    emulator: Emulator<'_>,
    format: F,
    sctlr: u64,
) -> anyhow::Result<u64> {
    const HERE: Architecture = Architecture::ArmV7;
    // Tables are copied to where the shared memory is.
    let (processor, shared) = Processor::start::<12>(emulator, HERE, "cortex-a15")?;
    let tables = NarrowTables::with_tables_at(shared.size() >> 10, shared.base())?;
    let table = Table::new(format, &tables)?;
    processor.run(
        CODE,
        &[
            ("r0", table.root().address),
            // N = 0: TTBR0 for all addresses. EAE = 0: short descriptors.
            ("r1", 0),
            // Client: permissions are checked. All others: no access.
            ("r2", 0b01 << (2 * DOMAIN)),
            ("r3", processor.get("SCTLR_EL1")? | sctlr),
        ],
    )?;
    suite::all(&processor, table, &tables, Prot::RW)?;
    Ok(processor.questions())
}
