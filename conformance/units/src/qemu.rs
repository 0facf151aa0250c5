//! QEMU's programs: their versions, and what their units are called and can be told there.

use std::{collections::BTreeSet, fmt, process::Command};

use anyhow::{Context as _, ensure};
use iopt::{
    FormatId,
    format::{ArmConfig, ArmGranule},
};
use runs::PageSizes;

/// A machine that QEMU emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Board {
    /// A PC.
    Q35,
    /// Arm's `virt`.
    ArmVirt,
    /// RISC-V's `virt`.
    RiscvVirt,
}

impl Board {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Q35, Self::ArmVirt, Self::RiscvVirt];

    /// QEMU's program for it.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Q35 => "qemu-system-x86_64",
            Self::ArmVirt => "qemu-system-aarch64",
            Self::RiscvVirt => "qemu-system-riscv64",
        }
    }
}

/// An IOMMU that QEMU emulates, in one of its ways of working.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unit {
    /// VT-d in legacy mode: root and context tables, second stage of 3 and 4 levels.
    VtdLegacy,
    /// VT-d in scalable mode: PASID tables, second stage of 3 and 4 levels.
    VtdSecond,
    /// VT-d in scalable mode: PASID tables, first stage of 4 levels. QEMU has it from 9.2 on.
    VtdFirst,
    /// AMD-Vi: host tables of 2 to 6 levels.
    AmdVi,
    /// SMMUv3: stage 1, of all granules, in both halves.
    SmmuFirst,
    /// SMMUv3: stage 2, of all granules, with one table as the root.
    SmmuSecond,
    /// SMMUv3: both stages, one at a time.
    SmmuBoth,
    /// The RISC-V IOMMU as a PCI function: first and second stage of 3 to 5 levels, extended device contexts.
    /// QEMU has it from 9.2 on.
    Riscv,
    /// The same with base device contexts.
    RiscvBase,
}

/// A table that a unit walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Its format.
    pub format: FormatId,
    /// Its levels.
    pub levels: u8,
}

/// `vtd-ss of 4 levels`, and the bits of an address where the format's name leaves them open.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, levels } = self;
        let s = if *levels == 1 { "" } else { "s" };
        write!(f, "{format} of {levels} level{s}")?;
        if let Some(arm) = self.arm() {
            let half = if arm.upper { ", upper half" } else { "" };
            write!(f, ", {} bits{half}", arm.input_bits)?;
        }
        Ok(())
    }
}

impl Kind {
    const fn new(format: FormatId, levels: u8) -> Self {
        Self { format, levels }
    }

    /// Arm's tables of the fewest levels, with a root of one table.
    const fn of_arm(second: bool, granule: ArmGranule, input_bits: u8, upper: bool) -> Self {
        let config = ArmConfig {
            granule,
            input_bits,
            upper,
        };
        let log2 = match granule {
            ArmGranule::K4 | ArmGranule::K4Lpa2 => 12,
            ArmGranule::K16 | ArmGranule::K16Lpa2 => 14,
            ArmGranule::K64 | ArmGranule::K64Lpa => 16,
        };
        let format = if second {
            FormatId::ArmStage2(config)
        } else {
            FormatId::ArmStage1(config)
        };
        Self::new(format, (input_bits - log2).div_ceil(log2 - 3))
    }

    const fn arm(&self) -> Option<ArmConfig> {
        match self.format {
            FormatId::ArmStage1(arm) | FormatId::ArmStage2(arm) => Some(arm),
            _ => None,
        }
    }

    /// Log2 of the bytes of a table.
    pub const fn table_log2(&self) -> u32 {
        match self.arm() {
            Some(arm) => match arm.granule {
                ArmGranule::K4 | ArmGranule::K4Lpa2 => 12,
                ArmGranule::K16 | ArmGranule::K16Lpa2 => 14,
                ArmGranule::K64 | ArmGranule::K64Lpa => 16,
            },
            None => 12,
        }
    }
}

/// Whether QEMU records accesses that a leaf does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// It does.
    Recorded,
    /// Unless the leaf is cached: the access is blocked without a word.
    RecordedUncached,
    /// It never does.
    Silent,
}

/// What QEMU lets be seen of a unit.
#[derive(Clone, Copy, Debug)]
pub struct Tells {
    /// Translations are cached, so that a stale one is seen.
    pub caches: bool,
    /// Faults are recorded also where nothing is mapped.
    pub not_present: bool,
    /// Whether faults are recorded where a leaf does not allow the access.
    pub denied: Denied,
    /// They name the address.
    pub address: bool,
    /// They tell reads from writes.
    pub access: bool,
    /// Sizes of leaves that QEMU walks otherwise than the specification says.
    pub not_walked: PageSizes,
}

impl Unit {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::VtdLegacy,
        Self::VtdSecond,
        Self::VtdFirst,
        Self::AmdVi,
        Self::SmmuFirst,
        Self::SmmuSecond,
        Self::SmmuBoth,
        Self::Riscv,
        Self::RiscvBase,
    ];

    /// Its name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VtdLegacy => "vtd-legacy",
            Self::VtdSecond => "vtd-second",
            Self::VtdFirst => "vtd-first",
            Self::AmdVi => "amd-vi",
            Self::SmmuFirst => "smmuv3-first",
            Self::SmmuSecond => "smmuv3-second",
            Self::SmmuBoth => "smmuv3-both",
            Self::Riscv => "riscv",
            Self::RiscvBase => "riscv-base",
        }
    }

    /// The machine that it is part of.
    pub const fn board(self) -> Board {
        match self {
            Self::VtdLegacy | Self::VtdSecond | Self::VtdFirst | Self::AmdVi => Board::Q35,
            Self::SmmuFirst | Self::SmmuSecond | Self::SmmuBoth => Board::ArmVirt,
            Self::Riscv | Self::RiscvBase => Board::RiscvVirt,
        }
    }

    /// The tables that it walks, the usual one first.
    pub const fn kinds(self) -> &'static [Kind] {
        const VTD_SECOND: &[Kind] = &[Kind::new(FormatId::VtdSs, 4), Kind::new(FormatId::VtdSs, 3)];
        const VTD_FIRST: &[Kind] = &[Kind::new(FormatId::X86_64, 4)];
        const AMD: &[Kind] = &[
            Kind::new(FormatId::AmdV1, 4),
            Kind::new(FormatId::AmdV1, 2),
            Kind::new(FormatId::AmdV1, 3),
            Kind::new(FormatId::AmdV1, 5),
            Kind::new(FormatId::AmdV1, 6),
            Kind::new(FormatId::AmdV1, 1),
        ];
        // QEMU's unit has 44 bits of output addresses, and so of input addresses of stage 2.
        const SMMU_FIRST: &[Kind] = &[
            Kind::of_arm(false, ArmGranule::K4, 48, false),
            Kind::of_arm(false, ArmGranule::K4, 39, false),
            Kind::of_arm(false, ArmGranule::K4, 39, true),
            Kind::of_arm(false, ArmGranule::K4, 48, true),
            Kind::of_arm(false, ArmGranule::K16, 36, false),
            Kind::of_arm(false, ArmGranule::K16, 47, true),
            Kind::of_arm(false, ArmGranule::K16, 48, false),
            Kind::of_arm(false, ArmGranule::K64, 42, true),
            Kind::of_arm(false, ArmGranule::K64, 48, false),
        ];
        const SMMU_SECOND: &[Kind] = &[
            Kind::of_arm(true, ArmGranule::K4, 39, false),
            Kind::of_arm(true, ArmGranule::K4, 44, false),
            Kind::of_arm(true, ArmGranule::K16, 36, false),
            Kind::of_arm(true, ArmGranule::K16, 44, false),
            Kind::of_arm(true, ArmGranule::K64, 42, false),
            Kind::of_arm(true, ArmGranule::K64, 44, false),
        ];
        const SMMU_BOTH: &[Kind] = &[
            Kind::of_arm(false, ArmGranule::K4, 48, false),
            Kind::of_arm(true, ArmGranule::K4, 44, false),
        ];
        const RISCV: &[Kind] = &[
            Kind::new(FormatId::RiscV, 4),
            Kind::new(FormatId::RiscV, 3),
            Kind::new(FormatId::RiscV, 5),
            Kind::new(FormatId::RiscVG, 4),
            Kind::new(FormatId::RiscVG, 3),
            Kind::new(FormatId::RiscVG, 5),
        ];
        const RISCV_BASE: &[Kind] = &[
            Kind::new(FormatId::RiscV, 4),
            Kind::new(FormatId::RiscVG, 4),
        ];
        match self {
            Self::VtdLegacy | Self::VtdSecond => VTD_SECOND,
            Self::VtdFirst => VTD_FIRST,
            Self::AmdVi => AMD,
            Self::SmmuFirst => SMMU_FIRST,
            Self::SmmuSecond => SMMU_SECOND,
            Self::SmmuBoth => SMMU_BOTH,
            Self::Riscv => RISCV,
            Self::RiscvBase => RISCV_BASE,
        }
    }

    /// What QEMU lets be seen of it.
    pub const fn tells(self) -> Tells {
        let all = Tells {
            caches: true,
            not_present: true,
            denied: Denied::Recorded,
            address: true,
            access: true,
            not_walked: PageSizes::from_bits(0),
        };
        match self {
            Self::VtdLegacy | Self::VtdSecond | Self::VtdFirst => Tells {
                denied: Denied::RecordedUncached,
                ..all
            },
            Self::AmdVi => Tells {
                not_present: false,
                denied: Denied::Silent,
                ..all
            },
            Self::SmmuFirst => all,
            Self::SmmuSecond | Self::SmmuBoth => Tells {
                denied: Denied::RecordedUncached,
                ..all
            },
            Self::Riscv | Self::RiscvBase => Tells {
                denied: Denied::RecordedUncached,
                access: false,
                // Svnapot.
                not_walked: PageSizes::from_bits(1 << 16),
                ..all
            },
        }
    }

    /// QEMU's name of the device.
    const fn device(self) -> &'static str {
        match self {
            Self::VtdLegacy | Self::VtdSecond | Self::VtdFirst => "intel-iommu",
            Self::AmdVi => "amd-iommu",
            Self::SmmuFirst | Self::SmmuSecond | Self::SmmuBoth => "arm-smmuv3",
            Self::Riscv | Self::RiscvBase => "riscv-iommu-pci",
        }
    }

    /// What it is told: of each row the first option that QEMU has, since options were renamed when
    /// they were no experiments any more.
    const fn options(self) -> &'static [&'static [&'static str]] {
        const BITS: &[&str] = &["aw-bits=48"];
        const SNOOP: &[&str] = &["snoop-control=on"];
        const SCALABLE: &[&str] = &["scalable-mode=on", "x-scalable-mode=on"];
        const FIRST: &[&str] = &["fsts=on", "x-flts=on"];
        // Where `drivers.rs` looks for it.
        const FUNCTION: &[&str] = &["addr=0x1"];
        const REMAP: &[&str] = &["dma-remap=on", "pt=off"];
        match self {
            Self::VtdLegacy => &[BITS, SNOOP],
            Self::VtdSecond => &[BITS, SNOOP, SCALABLE],
            Self::VtdFirst => &[BITS, SNOOP, SCALABLE, FIRST],
            Self::AmdVi => &[REMAP, &["intremap=off"]],
            Self::SmmuFirst => &[&["stage=1"]],
            Self::SmmuSecond => &[&["stage=2"]],
            Self::SmmuBoth => &[&["stage=nested"]],
            Self::Riscv => &[FUNCTION],
            Self::RiscvBase => &[FUNCTION, &["intremap=off"]],
        }
    }
}

/// A program that is installed.
#[derive(Clone, Debug)]
pub struct Qemu {
    program: String,
    version: String,
    units: Vec<(Unit, BTreeSet<String>)>,
}

impl Qemu {
    /// The program of this name for a board, asked for its version and for what its units can be told.
    pub fn find(program: &str, board: Board) -> anyhow::Result<Self> {
        let version = ask(program, &["--version"])?;
        let version = version.lines().next().unwrap_or_default().to_owned();
        let options = |unit: Unit| {
            let help = ask(program, &["-device", &format!("{},help", unit.device())])?;
            anyhow::Ok((unit, names(&help)))
        };
        let here = Unit::ALL.into_iter().filter(|unit| unit.board() == board);
        Ok(Self {
            program: program.to_owned(),
            version,
            units: here.map(options).collect::<Result<_, _>>()?,
        })
    }

    /// What it says of its version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// A command that starts it, without arguments.
    pub(crate) fn command(&self) -> Command {
        Command::new(&self.program)
    }

    /// The arguments for a unit; `None` when QEMU does not have all that belongs to it.
    pub(crate) fn unit(&self, unit: Unit) -> Option<[String; 2]> {
        let (_, known) = self.units.iter().find(|(of, _)| *of == unit)?;
        let mut argument = unit.device().to_owned();
        for row in unit.options() {
            let name = |option: &str| option.split('=').next().map(ToOwned::to_owned);
            let known = |option: &&&str| name(option).is_some_and(|name| known.contains(&name));
            let option = row.iter().find(known)?;
            argument = match unit.board() {
                // The board has it already.
                Board::ArmVirt => format!("{argument}.{option}"),
                Board::Q35 | Board::RiscvVirt => format!("{argument},{option}"),
            };
        }
        let how = match unit.board() {
            Board::ArmVirt => "-global",
            Board::Q35 | Board::RiscvVirt => "-device",
        };
        Some([how.into(), argument])
    }

    /// True when it can emulate the unit.
    pub fn offers(&self, unit: Unit) -> bool {
        self.unit(unit).is_some()
    }
}

fn ask(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("{program} cannot be started"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {said}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The options in a help text: `name=<type>` at the beginning of a line.
fn names(help: &str) -> BTreeSet<String> {
    help.lines()
        .filter_map(|line| line.trim_start().split_once("=<"))
        .map(|(name, _)| name.to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qemu(help: &str) -> Qemu {
        Qemu {
            program: "none".into(),
            version: "none".into(),
            units: Unit::ALL.map(|unit| (unit, names(help))).into(),
        }
    }

    #[test]
    fn options_have_the_names_that_qemu_gives_them() {
        let old = qemu(
            "intel-iommu options:\n  aw-bits=<uint8>        -  (default: 39)\n  \
             snoop-control=<bool>   -  (default: false)\n  x-scalable-mode=<bool> - \n",
        );
        let argument = |qemu: &Qemu, unit| qemu.unit(unit).map_or_else(String::new, |[_, it]| it);
        let base = "intel-iommu,aw-bits=48,snoop-control=on";
        assert_eq!(argument(&old, Unit::VtdLegacy), base);
        let scalable = format!("{base},x-scalable-mode=on");
        assert_eq!(argument(&old, Unit::VtdSecond), scalable);
        assert!(!old.offers(Unit::VtdFirst));
        let new =
            qemu("  fsts=<bool>\n aw-bits=<uint8>\n snoop-control=<bool>\n scalable-mode=<bool>");
        let first = format!("{base},scalable-mode=on,fsts=on");
        assert_eq!(argument(&new, Unit::VtdFirst), first);
        // What belongs to the board is told what it is from outside.
        assert!(!new.offers(Unit::SmmuFirst));
        let smmu = qemu("arm-smmuv3 options:\n  stage=<str>\n").unit(Unit::SmmuFirst);
        let expected = ["-global", "arm-smmuv3.stage=1"].map(ToOwned::to_owned);
        assert_eq!(smmu, Some(expected));
    }
}
