//! Linux's kernels, built from Debian's package of its source.
//!
//! A kernel is built once for each version of its options and kept, with the options it was built from beside it. One that
//! is linked with our tables, and our module, have a [record](inputs) of the files that they were built of beside them, and
//! are refused when one of these has changed. What is not needed to build modules for it, or to link it again with other
//! tables, is removed afterwards: of 2 GB some 400 MB stay.

mod build;
mod link;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::ValueEnum;

use crate::{inputs, source};

/// Platform of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// x86-64: QEMU boots it.
    X86,
    /// Arm, 64 bits: QEMU boots it, and a compiler for it builds it.
    Arm,
    /// RISC-V, 64 bits, in the same way.
    RiscV,
    /// User-Mode Linux: a program.
    Um,
}

impl Arch {
    const fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86",
            Self::Arm => "arm64",
            Self::RiscV => "riscv",
            Self::Um => "um",
        }
    }

    /// Prefix of the names of the compiler's programs.
    const fn compiler(self) -> &'static str {
        match self {
            Self::X86 | Self::Um => "",
            Self::Arm => "aarch64-linux-gnu-",
            Self::RiscV => "riscv64-linux-gnu-",
        }
    }

    /// True if it has IOMMUs, so that a kernel is linked again with our tables.
    pub const fn has_tables(self) -> bool {
        !matches!(self, Self::Um)
    }

    /// Target of the build, and where it is then.
    const fn image(self) -> (&'static str, &'static str) {
        match self {
            Self::X86 => ("bzImage", "arch/x86/boot/bzImage"),
            Self::Arm => ("Image", "arch/arm64/boot/Image"),
            Self::RiscV => ("Image", "arch/riscv/boot/Image"),
            Self::Um => ("linux", "linux"),
        }
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// As commands call it, and its directory below `linux` in that of the rigs.
    pub name: &'static str,
    /// Its platform.
    pub arch: Arch,
    /// The options that are on, with those that they need.
    pub options: &'static str,
}

/// User-Mode Linux.
pub const UML: Kernel = Kernel {
    name: "um",
    arch: Arch::Um,
    options: include_str!("../../linux/uml.config"),
};

/// One that looks for mistakes, and takes three times as long for everything.
pub const UML_DEBUG: Kernel = Kernel {
    name: "um-debug",
    arch: Arch::Um,
    options: concat!(
        include_str!("../../linux/uml.config"),
        include_str!("../../linux/uml.debug.config")
    ),
};

/// That of the guests in QEMU.
pub const GUEST: Kernel = Kernel {
    name: "guest",
    arch: Arch::X86,
    options: include_str!("../guest/kernel.config"),
};

/// The same with mitigations of processors' faults, whose objects Linux's objtool checks.
pub const HARDENED: Kernel = Kernel {
    name: "hardened",
    arch: Arch::X86,
    options: concat!(
        include_str!("../guest/kernel.config"),
        include_str!("../guest/hardened.config")
    ),
};

/// That in which the DMA API is measured: for speed and not for size.
pub const DMA: Kernel = Kernel {
    name: "dma",
    arch: Arch::X86,
    options: include_str!("../guest/dma.config"),
};

/// The same, counting the calls of its functions.
pub const TRACED: Kernel = Kernel {
    name: "traced",
    arch: Arch::X86,
    options: concat!(
        include_str!("../guest/dma.config"),
        include_str!("../guest/traced.config")
    ),
};

/// That in which Linux's own tests run.
pub const TESTS: Kernel = Kernel {
    name: "tests",
    arch: Arch::X86,
    options: concat!(
        include_str!("../guest/kernel.config"),
        include_str!("../guest/tests.config")
    ),
};

/// The same, looking for mistakes of memory, locks and context.
pub const TESTS_DEBUG: Kernel = Kernel {
    name: "tests-debug",
    arch: Arch::X86,
    options: concat!(
        include_str!("../guest/kernel.config"),
        include_str!("../guest/tests.config"),
        include_str!("../guest/tests.debug.config")
    ),
};

/// That of Linux's own tests, looking for accesses that nothing orders.
pub const TESTS_RACES: Kernel = Kernel {
    name: "tests-races",
    arch: Arch::X86,
    options: concat!(
        include_str!("../guest/kernel.config"),
        include_str!("../guest/tests.config"),
        include_str!("../guest/tests.races.config")
    ),
};

/// That in which Linux's own tests run on Arm.
pub const ARM: Kernel = Kernel {
    name: "arm",
    arch: Arch::Arm,
    options: include_str!("../guest/arm.config"),
};

/// The same on RISC-V.
pub const RISCV: Kernel = Kernel {
    name: "riscv",
    arch: Arch::RiscV,
    options: include_str!("../guest/riscv.config"),
};

/// All of them.
pub const KERNELS: [Kernel; 11] = [
    UML,
    UML_DEBUG,
    GUEST,
    HARDENED,
    DMA,
    TRACED,
    TESTS,
    TESTS_DEBUG,
    TESTS_RACES,
    ARM,
    RISCV,
];

/// Where a tree has its IOMMUs, and what links our tables with them.
const IOMMU: &str = "drivers/iommu";

/// Linux's generic page tables.
const GENERIC: &str = "generic_pt";

/// Our module.
pub const MODULE: &str = "dmaspace_balloon.ko";

/// The option of a kernel that has KUnit's suites of generic_pt, of which we make the look for leaks exact, and add one.
const SUITES: &str = "CONFIG_IOMMU_PT_KUNIT_TEST=y\n";
const EXACT_COUNTS: &str = concat!(
    "#include <linux/iommu.h>\n",
    include_str!("../guest/exact_counts.h")
);
const UNMAPS: &str = include_str!("../guest/unmaps.c");

/// Code that Linux lacks for RISC-V.
const LACKING: &str = include_str!("../../linux/patches/riscv.c");

/// I/O page tables of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Tables {
    /// Linux's generic page tables.
    #[default]
    Stock,
    /// Tables of `linux/tables`.
    Iopt,
    /// The same, a call for each page: what was before ranges were mapped at once.
    One,
}

impl Tables {
    /// Words on the kernel's command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Stock => "dmaspace.tables=stock",
            Self::Iopt => "dmaspace.tables=iopt",
            Self::One => "dmaspace.tables=iopt dmaspace_tables.one=1",
        }
    }
}

impl Kernel {
    /// That with this name.
    pub fn find(name: &str) -> Option<Self> {
        KERNELS.into_iter().find(|kernel| kernel.name == name)
    }

    /// Where it and what belongs to it lies.
    pub fn directory(&self, work: &Path) -> PathBuf {
        work.join("linux").join(self.name)
    }

    /// Where its modules are: Linux's own, and ours.
    pub fn modules(&self, work: &Path) -> PathBuf {
        self.tree(work).join("modules")
    }

    /// The kernel below `work`, if it was built from the options of today.
    pub fn kept(&self, work: &Path) -> Option<PathBuf> {
        let built_from = fs::read_to_string(self.options_file(work)).ok()?;
        let image = self.image(work);
        (built_from == self.built_from() && image.exists()).then_some(image)
    }

    /// The kernel below `work` with these tables, if it is what the sources below `root` say today.
    ///
    /// # Errors
    ///
    /// When there is none, or a file that it was built of has changed since.
    pub fn current(&self, tables: Tables, root: &Path, work: &Path) -> anyhow::Result<PathBuf> {
        let kept = self.kept(work).with_context(|| self.missing())?;
        match tables {
            Tables::Stock => Ok(kept),
            Tables::Iopt | Tables::One => self.checked(self.image_with(tables, work), root),
        }
    }

    /// The module of ours below `work` for this kernel, in the same way.
    ///
    /// # Errors
    ///
    /// As [`current`](Self::current).
    pub fn current_module(&self, root: &Path, work: &Path) -> anyhow::Result<PathBuf> {
        self.checked(self.modules(work).join(MODULE), root)
    }

    fn checked(&self, built: PathBuf, root: &Path) -> anyhow::Result<PathBuf> {
        let command = || format!("`cargo xtask linux --kernel {}` comes first", self.name);
        inputs::check(root, &built).with_context(command)?;
        Ok(built)
    }

    /// Why there is no kernel, with the command that builds it.
    pub fn missing(&self) -> String {
        format!(
            "there is no such kernel: `cargo xtask linux --kernel {}`",
            self.name
        )
    }

    /// All that it is built from, which `built-from.config` has beside it: the source, its options, and what of ours goes
    /// into it in any case.
    pub fn built_from(&self) -> String {
        let mut all = format!("# {}\n{}", source::PACKAGE, self.options);
        if self.has_suites() {
            all.extend([EXACT_COUNTS, UNMAPS]);
        }
        if self.arch == Arch::RiscV {
            all += LACKING;
        }
        all
    }

    fn has_suites(&self) -> bool {
        self.options.contains(SUITES)
    }

    /// True if it has modules, of its own and of ours.
    pub fn has_modules(&self) -> bool {
        self.options.lines().any(|line| line == "CONFIG_MODULES=y")
    }

    /// Where it was built.
    pub fn tree(&self, work: &Path) -> PathBuf {
        self.directory(work).join("tree")
    }

    /// Image to start or boot.
    pub fn image(&self, work: &Path) -> PathBuf {
        self.directory(work).join(self.arch.image().0)
    }

    /// That with these tables.
    pub fn image_with(&self, tables: Tables, work: &Path) -> PathBuf {
        match tables {
            Tables::Stock => self.image(work),
            Tables::Iopt | Tables::One => {
                let name = format!("{}-iopt", self.arch.image().0);
                self.directory(work).join(name)
            }
        }
    }

    fn options_file(&self, work: &Path) -> PathBuf {
        self.directory(work).join("built-from.config")
    }

    /// Linux's own text of the files that patches change.
    fn own_files(&self, work: &Path) -> PathBuf {
        self.directory(work).join("own")
    }

    /// There while a patch is in the tree.
    fn patched_file(&self, work: &Path) -> PathBuf {
        self.directory(work).join("patched")
    }
}

#[cfg(test)]
mod tests;
