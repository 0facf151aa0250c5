//! QEMU's machines and units, and their options.

use std::{fmt, path::Path};

use anyhow::{Context as _, ensure};
use conformance::{kernel::Arch, newer_qemu::NewerQemu};
use iopt::{
    FormatId,
    format::{ArmConfig, ArmGranule},
};

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

    const fn arch(self) -> Arch {
        match self {
            Self::Q35 => Arch::X86,
            Self::ArmVirt => Arch::Arm,
            Self::RiscvVirt => Arch::RiscV,
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
    /// VT-d in scalable mode: PASID tables, first stage of 4 levels.
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
    ///
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

/// QEMU's record of accesses that a leaf does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// All are recorded.
    Recorded,
    /// Unless the leaf is cached: the access is blocked without a word.
    RecordedUncached,
}

/// Properties that QEMU shows of a unit.
#[derive(Clone, Copy, Debug)]
pub struct Tells {
    /// Translations are cached, so that a stale one is seen.
    pub caches: bool,
    /// Faults of devices without an entry are recorded.
    pub strangers: bool,
    /// Recording of faults where a leaf does not allow the access.
    pub denied: Denied,
    /// They name the address.
    pub address: bool,
    /// They tell reads from writes.
    pub access: bool,
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

    /// True when it stops at a command that it does not know. AMD's logs an event and goes on.
    pub(crate) const fn stops(self) -> bool {
        !matches!(self, Self::AmdVi)
    }

    /// Properties that QEMU shows of it.
    pub const fn tells(self) -> Tells {
        let all = Tells {
            caches: true,
            strangers: true,
            denied: Denied::Recorded,
            address: true,
            access: true,
        };
        match self {
            Self::VtdLegacy | Self::VtdSecond | Self::VtdFirst => Tells {
                denied: Denied::RecordedUncached,
                ..all
            },
            Self::AmdVi => Tells {
                denied: Denied::RecordedUncached,
                strangers: false,
                address: false,
                access: false,
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
                ..all
            },
        }
    }

    /// QEMU's option for it.
    pub(crate) const fn arguments(self) -> [&'static str; 2] {
        const DEVICE: &str = "-device";
        // The board has it already.
        const GLOBAL: &str = "-global";
        match self {
            Self::VtdLegacy => [DEVICE, "intel-iommu,aw-bits=48,snoop-control=on"],
            Self::VtdSecond => [
                DEVICE,
                "intel-iommu,aw-bits=48,snoop-control=on,scalable-mode=on",
            ],
            Self::VtdFirst => [
                DEVICE,
                "intel-iommu,aw-bits=48,snoop-control=on,scalable-mode=on,fsts=on",
            ],
            Self::AmdVi => [DEVICE, "amd-iommu,dma-remap=on,intremap=off"],
            Self::SmmuFirst => [GLOBAL, "arm-smmuv3.stage=1"],
            Self::SmmuSecond => [GLOBAL, "arm-smmuv3.stage=2"],
            Self::SmmuBoth => [GLOBAL, "arm-smmuv3.stage=nested"],
            // Where `drivers.rs` looks for it.
            Self::Riscv => [DEVICE, "riscv-iommu-pci,addr=0x1"],
            Self::RiscvBase => [DEVICE, "riscv-iommu-pci,addr=0x1,intremap=off"],
        }
    }
}

/// The emulator of a board.
#[derive(Clone, Debug)]
pub struct Qemu {
    qemu: NewerQemu,
    version: String,
}

impl Qemu {
    /// Fetches it into the directory of the rigs, unless it is there.
    ///
    /// # Errors
    ///
    /// When it cannot be fetched or started.
    pub fn fetch(board: Board, work: &Path) -> anyhow::Result<Self> {
        let qemu = NewerQemu::fetch(board.arch(), work)?;
        let output = qemu.command().arg("--version").output();
        let output = output.context("QEMU cannot be started")?;
        let (said, wrong) = (&output.stdout, &output.stderr);
        ensure!(
            output.status.success(),
            String::from_utf8_lossy(wrong).into_owned()
        );
        let version = String::from_utf8_lossy(said);
        let version = version.lines().next().unwrap_or_default().to_owned();
        Ok(Self { qemu, version })
    }

    /// Name and number of the version, as it says them.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The program.
    pub(crate) const fn program(&self) -> &NewerQemu {
        &self.qemu
    }
}
