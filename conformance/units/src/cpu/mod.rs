//! QEMU's processors as walkers of our tables.
//!
//! Some tables are walked by no IOMMU that QEMU emulates: x86-64's with five levels, ARMv7's short
//! descriptors, RISC-V's with Svnapot and Svpbmt, Arm's with 52 bits. But its processors walk the same
//! formats. A processor stands still, is given a table of ours, and is asked where addresses
//! lead; a few checks (`suite`) are the same for all formats.
//!
//! `units --processors` runs the checks, each on machines of its own.

mod access;
mod armv7;
mod armv8;
mod damage;
mod gdb;
mod model;
mod packet;
mod processor;
mod riscv;
mod subject;
mod suite;
mod target;
mod x86_64;

use std::time::Instant;

use conformance::newer_qemu::NewerQemu;

use crate::{Board, Qemu};

/// A processor's architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// x86-64 in long mode.
    X86_64,
    /// ARMv8-A in AArch64 state, at exception level 1.
    ArmV8,
    /// ARMv7-A.
    ArmV7,
    /// RV64 in user mode.
    RiscV,
}

impl Architecture {
    /// Its name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "cpu-x86-64",
            Self::ArmV8 => "cpu-armv8",
            Self::ArmV7 => "cpu-armv7",
            Self::RiscV => "cpu-riscv",
        }
    }

    /// The machine whose program emulates it, too.
    const fn board(self) -> Board {
        match self {
            Self::X86_64 => Board::Q35,
            Self::ArmV8 | Self::ArmV7 => Board::ArmVirt,
            Self::RiscV => Board::RiscvVirt,
        }
    }
}

/// QEMU, and which random choices are made.
#[derive(Clone, Copy, Debug)]
pub struct Emulator<'q> {
    /// Its program.
    pub qemu: &'q NewerQemu,
    /// Each round has choices of its own.
    pub round: u64,
}

/// A check.
#[derive(Debug)]
pub struct Check {
    /// Checked property.
    pub name: &'static str,
    /// For which processor.
    pub architecture: Architecture,
    /// Finds out, and yields how many questions were asked.
    pub run: fn(Emulator<'_>) -> anyhow::Result<u64>,
}

const fn check(
    architecture: Architecture,
    name: &'static str,
    run: fn(Emulator<'_>) -> anyhow::Result<u64>,
) -> Check {
    Check {
        name,
        architecture,
        run,
    }
}

/// All checks.
pub const CHECKS: &[Check] = &[
    check(Architecture::X86_64, "4 levels", x86_64::four_levels),
    check(Architecture::X86_64, "5 levels", x86_64::five_levels),
    check(Architecture::X86_64, "loads and stores", x86_64::accesses),
    check(Architecture::ArmV8, "4K pages", armv8::pages_of_4k),
    check(Architecture::ArmV8, "16K pages", armv8::pages_of_16k),
    check(Architecture::ArmV8, "64K pages", armv8::pages_of_64k),
    check(
        Architecture::ArmV8,
        "4K pages, 52 bits",
        armv8::pages_of_4k_lpa2,
    ),
    check(
        Architecture::ArmV8,
        "16K pages, 52 bits",
        armv8::pages_of_16k_lpa2,
    ),
    check(
        Architecture::ArmV8,
        "64K pages, 52 bits",
        armv8::pages_of_64k_lpa,
    ),
    check(Architecture::ArmV8, "loads and stores", armv8::accesses),
    check(Architecture::ArmV8, "damaged entries", armv8::damage),
    check(
        Architecture::ArmV7,
        "short descriptors",
        armv7::short_descriptors,
    ),
    check(Architecture::RiscV, "Sv39", riscv::sv39),
    check(Architecture::RiscV, "Sv48", riscv::sv48),
    check(Architecture::RiscV, "Sv57", riscv::sv57),
    check(Architecture::RiscV, "Svnapot", riscv::svnapot),
    check(Architecture::RiscV, "Svpbmt", riscv::svpbmt),
    check(Architecture::RiscV, "loads and stores", riscv::accesses),
    check(Architecture::RiscV, "damaged entries", riscv::damage),
];

/// Counts of checks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Passed.
    pub passed: u64,
    /// Failed.
    pub failed: u64,
    /// Questions that were asked and answered rightly.
    pub questions: u64,
}

/// Runs the checks that have `only` in their names, each of them `rounds` times, and prints a line for each.
pub fn run<'q>(qemu: impl Fn(Board) -> &'q Qemu, rounds: u64, only: &str) -> Counts {
    let mut counts = Counts::default();
    for check in CHECKS {
        let name = format!("{}: {}", check.architecture.name(), check.name);
        if !name.contains(only) {
            continue;
        }
        let qemu = qemu(check.architecture.board()).program();
        for round in 0..rounds {
            let start = Instant::now();
            match (check.run)(Emulator { qemu, round }) {
                Ok(questions) => {
                    let took = start.elapsed().as_secs_f64();
                    println!("  ok      {name}: {questions} questions, {took:.2} s");
                    counts.passed += 1;
                    counts.questions += questions;
                }
                Err(error) => {
                    println!("  FAILED  {name} (round {round}): {error:#}");
                    counts.failed += 1;
                }
            }
        }
    }
    counts
}
