//! Where our tables and Linux's are meant to differ: the one list.
//!
//! Each row says what differs, on which tables, by which section of which specification that is
//! allowed, and why. The comparator allows nothing else; and a row that a whole run never saw, or
//! that says something untrue, fails the run, so the list stays true.

use std::collections::BTreeMap;

use crate::server::{LinuxConfig, LinuxFormat as Linux, option};
use crate::setup::flag;

/// One intended difference.
#[derive(Debug)]
pub struct Difference {
    /// Its name in reports.
    pub name: &'static str,
    /// The tables that it concerns.
    pub applies: fn(&LinuxConfig) -> bool,
    /// The difference.
    pub kind: Kind,
    /// Where it is specified.
    pub source: &'static str,
    /// Why it is so.
    pub why: &'static str,
}

/// A difference.
#[derive(Debug)]
pub enum Kind {
    /// Linux's leaf is this of ours, always.
    Leaf(fn(u64) -> u64),
    /// Linux's leaf is this of ours, or ours: it depends on the request.
    LeafOrSame(fn(u64) -> u64),
    /// Linux's entry that leads to a table is this of ours.
    Table(fn(u64) -> u64),
    /// Linux keeps tables that have become empty, where we have an empty entry.
    KeepsEmptyTables,
    /// Linux's table has as many levels as its addresses need so far.
    GrowingTop,
    /// We refuse these permissions (flags of [`flag`]) and Linux takes them.
    WeRefuse(fn(u32) -> bool),
    /// Linux refuses these permissions and we take them.
    LinuxRefuses(fn(u32) -> bool),
    /// The format has leaves of these sizes, and Linux does not use them.
    Sizes(fn(&LinuxConfig) -> u64),
    /// Linux maps input addresses that the table is not made for.
    TakesAnyInput,
}

/// How often each difference was seen, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen(pub BTreeMap<&'static str, u64>);

impl Seen {
    /// Once more.
    pub fn note(&mut self, name: &'static str) {
        *self.0.entry(name).or_default() += 1;
    }

    /// Adds what another part of the run saw.
    pub fn add(&mut self, other: &Self) {
        for (name, count) in &other.0 {
            *self.0.entry(name).or_default() += count;
        }
    }

    /// The rows that were never seen.
    pub fn missing(&self) -> Vec<&'static str> {
        DIFFERENCES
            .iter()
            .map(|row| row.name)
            .filter(|name| !self.0.contains_key(name))
            .collect()
    }
}

impl Difference {
    /// The rows that concern this table.
    pub fn of(config: &LinuxConfig) -> impl Iterator<Item = &'static Self> {
        DIFFERENCES.iter().filter(|row| (row.applies)(config))
    }
}

fn amd(config: &LinuxConfig) -> bool {
    matches!(config.format, Linux::AmdV1 | Linux::AmdV1Growing)
}
fn x86(config: &LinuxConfig) -> bool {
    config.format == Linux::X86_64
}
fn vtd(config: &LinuxConfig) -> bool {
    config.format == Linux::VtdSs
}
fn riscv(config: &LinuxConfig) -> bool {
    config.format == Linux::RiscV
}
fn stage1(config: &LinuxConfig) -> bool {
    config.format == Linux::ArmStage1
}
fn stage2(config: &LinuxConfig) -> bool {
    config.format == Linux::ArmStage2
}
fn arm(config: &LinuxConfig) -> bool {
    stage1(config) || stage2(config)
}
fn armv7s(config: &LinuxConfig) -> bool {
    config.format == Linux::ArmV7s
}
fn dart(config: &LinuxConfig) -> bool {
    matches!(config.format, Linux::Dart1 | Linux::Dart2)
}
fn plain(config: &LinuxConfig) -> bool {
    amd(config) || vtd(config) || dart(config)
}

const fn executable(flags: u32) -> bool {
    flags & flag::NOEXEC == 0
}
const fn privileged(flags: u32) -> bool {
    flags & flag::PRIV != 0
}
const fn device(flags: u32) -> bool {
    flags & flag::MMIO != 0
}
const fn write_only(flags: u32) -> bool {
    flags & (flag::READ | flag::WRITE) == flag::WRITE
}

const fn row(
    name: &'static str,
    applies: fn(&LinuxConfig) -> bool,
    kind: Kind,
    source: &'static str,
    why: &'static str,
) -> Difference {
    Difference {
        name,
        applies,
        kind,
        source,
        why,
    }
}

/// The list.
pub const DIFFERENCES: &[Difference] = &[
    // Leaves.
    row(
        "x86-64: A set from the beginning",
        x86,
        Kind::Leaf(|word| word | 1 << 5),
        "AMD APM volume 2, 5.4.2; VT-d 3.6.2",
        "The unit sets A itself. Ours leaves it clear so that an access can be seen; Linux saves \
         the unit the write.",
    ),
    row(
        "x86-64: D set from the beginning",
        x86,
        Kind::Leaf(|word| word | (word & 1 << 1) << 5),
        "AMD APM volume 2, 5.4.2; VT-d 3.6.2",
        "As with A, in leaves that can be written.",
    ),
    row(
        "x86-64: always executable",
        x86,
        Kind::Leaf(|word| word & !(1 << 63)),
        "AMD APM volume 2, 5.6.3; VT-d 9.7",
        "Linux has no NX in these tables, whatever IOMMU_NOEXEC says. Ours sets it.",
    ),
    row(
        "x86-64: always for user requests",
        x86,
        Kind::Leaf(|word| word | 1 << 2),
        "AMD APM volume 2, 5.4.1; VT-d 9.7",
        "Linux ignores IOMMU_PRIV here. Ours clears U/S.",
    ),
    row(
        "RISC-V: always for user requests",
        riscv,
        Kind::Leaf(|word| word | 1 << 4),
        "RISC-V privileged architecture, 10.3.1",
        "Linux ignores IOMMU_PRIV here. Ours clears U.",
    ),
    row(
        "Arm stage 1: privileged code is not for EL0",
        stage1,
        // PXN 0, AP[1] 0: UXN is not set.
        Kind::Leaf(|word| {
            if word & (1 << 53 | 1 << 6) == 0 {
                word & !(1 << 54)
            } else {
                word
            }
        }),
        "DDI 0487, D8.4.1",
        "A page that EL0 may not read can still be executed there unless UXN is set: ours sets it \
         in privileged leaves, Linux does not.",
    ),
    row(
        "Arm stage 1: leaves begin dirty",
        |config| stage1(config) && config.has(option::DIRTY),
        // DBM: AP[2] is clear.
        Kind::Leaf(|word| {
            if word & 1 << 51 != 0 {
                word & !(1 << 7)
            } else {
                word
            }
        }),
        "DDI 0487, D8.5.2",
        "With DBM, AP[2] is 'clean'. Ours begins clean; Linux's begin dirty, and are cleaned when \
         dirty tracking is turned on.",
    ),
    row(
        "Arm stage 2: XN is 0b11",
        stage2,
        Kind::Leaf(|word| word | (word & 1 << 54) >> 1),
        "DDI 0487, D8.4.2",
        "Without FEAT_XNX bit 53 is RES0; with it, 0b11 forbids only EL0 to execute, 0b10 both. \
         Ours writes 0b10.",
    ),
    row(
        "Arm: device memory that was asked to be cached is inner shareable",
        arm,
        Kind::LeafOrSame(|word| word | 1 << 8),
        "DDI 0487, D8.6.2",
        "SH of device memory is ignored. Ours always says outer shareable, which it is; Linux says \
         inner shareable where IOMMU_CACHE comes with IOMMU_MMIO.",
    ),
    // Entries that lead to tables.
    row(
        "x86-64: a note that the entry was flushed",
        |config| x86(config) && config.has(option::INCOHERENT),
        Kind::Table(|word| word | 1 << 9),
        "VT-d 9.7: ignored",
        "Linux notes in a software bit that it flushed the processor's cache.",
    ),
    row(
        "VT-d second stage: a note that the entry was flushed",
        |config| vtd(config) && config.has(option::INCOHERENT),
        Kind::Table(|word| word | 1 << 10),
        "VT-d 9.8: ignored",
        "Linux notes in a software bit that it flushed the processor's cache.",
    ),
    row(
        "Arm: a note that the entry was flushed",
        |config| arm(config) && config.has(option::INCOHERENT),
        Kind::Table(|word| word | 1 << 55),
        "DDI 0487, D8.3.1: ignored",
        "Linux notes in a software bit that it flushed the processor's cache.",
    ),
    // The tree.
    row(
        "empty tables are kept",
        |_| true,
        Kind::KeepsEmptyTables,
        "none: an empty table translates nothing",
        "Ours frees a table with its last leaf. Linux frees it only when a range that covers all \
         of it is unmapped, or a larger leaf takes its place.",
    ),
    row(
        "AMD v1: the top grows",
        |config| config.format == Linux::AmdV1Growing,
        Kind::GrowingTop,
        "AMD IOMMU, 2.2.3: Mode in the device table entry",
        "Linux adds levels when an address needs them. Ours has those that it was made with.",
    ),
    // Sizes.
    row(
        "AMD v1: no leaves of 512 GiB",
        amd,
        Kind::Sizes(|_| 1 << 39),
        "AMD IOMMU, 2.2.3, table 14",
        "The format has them. Linux leaves them out for a defect of some hardware.",
    ),
    row(
        "AMD v1: no leaf as large as half of the aperture",
        amd,
        Kind::Sizes(|config| u64::MAX << (config.input_bits - 1)),
        "AMD IOMMU, 2.2.3, table 14",
        "The format has them. Linux leaves them out.",
    ),
    row(
        "RISC-V: no pages of 64 KiB without Svnapot",
        |config| riscv(config) && !config.has(option::SVNAPOT),
        Kind::Sizes(|_| 1 << 16),
        "RISC-V privileged architecture, chapter 11",
        "A choice of the table's owner, on both sides.",
    ),
    row(
        "Arm: no contiguous groups",
        arm,
        Kind::Sizes(|config| match config.page_sizes & 0x15000 {
            0x1000 => 1 << 16 | 1 << 25 | 1 << 34,
            0x4000 => 1 << 21 | 1 << 30,
            _ => 1 << 21 | 1 << 34,
        }),
        "DDI 0487, D8.7.1",
        "The Contiguous bit is a hint. Linux's io-pgtable does not use it.",
    ),
    row(
        "ARMv7 short: no supersections where the unit has none",
        |config| armv7s(config) && config.page_sizes & 1 << 24 == 0,
        Kind::Sizes(|_| 1 << 24),
        "DDI 0406C, B3.5.1",
        "A choice of the table's owner, on both sides.",
    ),
    // Requests.
    row(
        "no bit for execution",
        plain,
        Kind::WeRefuse(executable),
        "AMD IOMMU, 2.2.3; VT-d 9.8 (only where the unit honours X); DART: none known",
        "Ours refuses a permission that the format lacks. Linux ignores that IOMMU_NOEXEC is missing.",
    ),
    row(
        "no bit for privileged requests",
        |config| plain(config) || stage2(config),
        Kind::WeRefuse(privileged),
        "AMD IOMMU, 2.2.3; VT-d 9.8; DDI 0487, D8.4.2; DART: none known",
        "Ours refuses a permission that the format lacks. Linux ignores IOMMU_PRIV.",
    ),
    row(
        "no bit for device memory",
        |config| plain(config) || x86(config) || riscv(config) && !config.has(option::SVPBMT),
        Kind::WeRefuse(device),
        "AMD IOMMU, 2.2.3; VT-d 9.8; RISC-V privileged architecture, chapter 12; DART: none known",
        "Ours refuses a permission that the format lacks. Linux ignores IOMMU_MMIO.",
    ),
    row(
        "no write-only leaf",
        |config| x86(config) || riscv(config) || stage1(config) || armv7s(config),
        Kind::WeRefuse(write_only),
        "AMD APM volume 2, 5.4.1; RISC-V privileged architecture, 10.3.1; DDI 0487, D8.4.1; DDI \
         0406C, B3.7.1",
        "Ours grants no more than was asked for. Linux adds the permission to read.",
    ),
    row(
        "Arm: no code in device memory",
        arm,
        Kind::WeRefuse(|flags| device(flags) && executable(flags)),
        "DDI 0487, D8.6.1",
        "Instructions are not fetched from devices. Linux maps it as it is told.",
    ),
    row(
        "Arm stage 2: no code that cannot be read",
        stage2,
        Kind::WeRefuse(|flags| write_only(flags) && executable(flags)),
        "DDI 0487, D8.4.2",
        "Instructions are fetched only from memory that can be read. Linux maps it as it is told.",
    ),
    row(
        "RISC-V: code that cannot be read",
        riscv,
        Kind::LinuxRefuses(|flags| flags & (flag::READ | flag::WRITE) == 0 && executable(flags)),
        "RISC-V privileged architecture, 10.3.1",
        "X without R is a leaf. Linux's core wants one of READ and WRITE.",
    ),
    row(
        "DART: input addresses are not checked",
        // Where not every entry of the root is used.
        |config| dart(config) && config.page_sizes == 1 << 14 && config.input_bits != 36,
        Kind::TakesAnyInput,
        "none known",
        "Linux leaves it to its caller, as far as its tables reach. Ours refuses addresses outside the aperture.",
    ),
];
