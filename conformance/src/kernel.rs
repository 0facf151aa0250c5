//! Linux's kernels, built from Debian's package of its source.
//!
//! A kernel is built once for each version of its options and kept, with the options it was built from beside it. One that
//! is linked with our tables, and our module, have a [record](inputs) of the files that they were built of beside them, and
//! are refused when one of these has changed. What is not needed to build modules for it, or to link it again with other tables, is removed afterwards: of 2 GB some
//! 400 MB stay.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    path::{Component, Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use crate::{
    inputs,
    patch::{self, Patch},
    source,
};
use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use walkdir::WalkDir;

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

/// Parts of a tree that stay whole: a module is built with them.
const KEPT: [&str; 9] = [
    ".config",
    "Kbuild",
    "Makefile",
    "Module.symvers",
    "arch",
    "include",
    "modules",
    "scripts",
    "tools",
];

/// Files elsewhere that go, unless an object was made of them.
const SOURCES: [&str; 8] = [".c", ".h", ".S", ".rst", ".txt", ".yaml", ".json", ".rs"];

/// Where a tree has its IOMMUs, and what links our tables with them.
const IOMMU: &str = "drivers/iommu";
const TABLES_MAKEFILE: &str =
    "\nobj-y += dmaspace_tables.o\ndmaspace_tables-y := tables.o iopt.o\n";

/// Our tables, below the root.
const TABLES: &str = "linux/tables";

/// Linux's generic page tables.
const GENERIC: &str = "generic_pt";

/// Our module.
pub const MODULE: &str = "dmaspace_balloon.ko";

/// The option of a kernel that has KUnit's suites of generic_pt, of which we make the look for leaks exact, and add one.
const SUITES: &str = "CONFIG_IOMMU_PT_KUNIT_TEST=y\n";
const INCLUDED_LAST: &str = "#include <linux/iommu.h>\n";
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

    /// Builds the kernel from the source `package` and keeps it below `work`.
    ///
    /// # Errors
    ///
    /// When the source cannot be unpacked, an option of ours did not survive Linux's own rules, or the
    /// build fails.
    pub fn build(&self, package: &Path, work: &Path) -> anyhow::Result<PathBuf> {
        // From here on none is kept.
        if self.options_file(work).exists() {
            fs::remove_file(self.options_file(work))?;
        }
        inputs::forget(&self.image_with(Tables::Iopt, work))?;
        let tree = self.tree(work);
        for old in [&tree, &self.own_files(work)] {
            if old.exists() {
                fs::remove_dir_all(old)?;
            }
        }
        fs::create_dir_all(&tree)?;
        source::unpack(package, &tree, &[])?;
        if self.has_suites() {
            count_exactly(&tree)?;
            add_suite(&tree.join(IOMMU).join(GENERIC))?;
        }
        if self.arch == Arch::RiscV {
            patch::patch(&tree, LACKING, None)?;
        }
        fs::write(tree.join("our.config"), self.options)?;
        self.make(&tree, &["allnoconfig", "KCONFIG_ALLCONFIG=our.config"])?;
        let lost = lost(self.options, &fs::read_to_string(tree.join(".config"))?);
        ensure!(
            lost.is_empty(),
            "Linux's rules do not allow these options: {}",
            lost.join(", ")
        );
        let jobs = jobs();
        let (target, image) = self.arch.image();
        self.make(&tree, &[&jobs, target])?;
        fs::rename(tree.join(image), self.image(work))?;
        if self.has_modules() {
            self.make(&tree, &[&jobs, "modules"])?;
            self.keep_modules(work)?;
        }
        self.prune(&tree)?;
        // Last: from here on it is kept.
        fs::write(self.options_file(work), self.built_from())?;
        Ok(self.image(work))
    }

    /// Removes what no further build of this tree needs.
    fn prune(&self, tree: &Path) -> anyhow::Result<()> {
        let inputs = match self.arch {
            Arch::Um => BTreeSet::new(),
            Arch::X86 | Arch::Arm | Arch::RiscV => inputs(tree)?,
        };
        for entry in WalkDir::new(tree).contents_first(true).min_depth(1) {
            let entry = entry?;
            let path = entry.path().strip_prefix(tree)?;
            if entry.file_type().is_dir() {
                // Directories that have something left stay.
                let _ = fs::remove_dir(entry.path());
            } else if !self.is_needed(path, &inputs) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// True if a further build may need a file: to build a module, or, where an IOMMU is, to link the kernel again.
    /// Make wants all that the objects were made of to be there, and all that it asks what to do.
    fn is_needed(&self, path: &Path, inputs: &BTreeSet<PathBuf>) -> bool {
        let top = path.iter().next().unwrap_or_default().to_string_lossy();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let other = |arch: &OsStr| arch != self.arch.name() && arch != "um" && arch != "x86";
        let of_other =
            top == "arch" && path.iter().count() > 2 && path.iter().nth(1).is_some_and(other);
        let linked_again = self.arch.has_tables();
        if inputs.contains(path) || linked_again && name.starts_with("Kconfig") {
            return true;
        }
        if (self.has_modules() || linked_again) && KEPT.contains(&&*top) && !of_other {
            return true;
        }
        let source = SOURCES.iter().any(|end| name.ends_with(end)) || top == "Documentation";
        linked_again && !source && !of_other
    }

    /// Links the kernel, which was built, with the tables of the directory `sources` and an `object` that was compiled
    /// already, in the place of Linux's: nothing else differs. `inputs` is the record of what all of these were built of;
    /// without one the kernel is not [`current`](Self::current).
    ///
    /// # Errors
    ///
    /// When the build fails, or the kernel has tables of Linux.
    pub fn link_tables(
        &self,
        sources: &Path,
        object: &Path,
        inputs: Option<&str>,
        work: &Path,
    ) -> anyhow::Result<PathBuf> {
        let linked = self.image_with(Tables::Iopt, work);
        inputs::forget(&linked)?;
        if self.patched_file(work).exists() {
            self.restore(&source::package(work)?, work)?;
        }
        let tree = self.tree(work);
        let iommu = tree.join(IOMMU);
        link_with_tables(&tree)?;
        let (directory, replaced) = self.replaced();
        for (from, to) in [
            (sources.join(replaced), iommu.join(directory).join(replaced)),
            (sources.join("tables.h"), iommu.join("tables.h")),
            (sources.join("tables.c"), iommu.join("tables.c")),
            (object.to_owned(), iommu.join("iopt.o")),
        ] {
            // Unchanged files are not built again.
            let new = fs::read(&from).with_context(|| from.display().to_string())?;
            if fs::read(&to).is_ok_and(|old| old == new) {
                continue;
            }
            fs::write(&to, new)?;
        }
        fs::write(iommu.join(".iopt.o.cmd"), "")?;
        let (target, image) = self.arch.image();
        self.make(&tree, &[&jobs(), target])?;
        let symbols = Command::new("nm").arg(tree.join("vmlinux")).output()?;
        let symbols = String::from_utf8_lossy(&symbols.stdout).into_owned();
        let has = |name: &str| {
            symbols
                .lines()
                .any(|line| line.split(' ').nth(2) == Some(name))
        };
        for name in OF_LINUX {
            ensure!(!has(name), "the kernel still has Linux's {name}");
        }
        ensure!(
            has("dmaspace_allocate") && OURS.iter().any(|name| has(name)),
            "the kernel has no tables of ours"
        );
        fs::copy(tree.join(image), &linked)?;
        if let Some(inputs) = inputs {
            inputs::keep(inputs, &linked)?;
        }
        Ok(linked)
    }

    /// Which file of Linux's IOMMUs ours takes the place of: its directory, and its name.
    const fn replaced(&self) -> (&'static str, &'static str) {
        match self.arch {
            Arch::Arm => ("", "io-pgtable-arm.c"),
            Arch::X86 | Arch::RiscV | Arch::Um => (GENERIC, "iommu_pt.h"),
        }
    }

    /// The kernel's image with these tables, linked now with these `patches` if there are any.
    ///
    /// # Errors
    ///
    /// When there is none that is [`current`](Self::current), Linux's source cannot be had, the build fails, or lines have
    /// no place to go.
    pub fn linked(
        &self,
        tables: Tables,
        patches: &[Patch],
        work: &Path,
    ) -> anyhow::Result<PathBuf> {
        let root = inputs::root();
        let current = self.current(tables, &root, work)?;
        match patches {
            [] => Ok(current),
            _ => self.link_patches((tables, &root), patches, &source::package(work)?, work),
        }
    }

    /// Nothing but the patches differs between kernels that this links with the same tables.
    fn link_patches(
        &self,
        (tables, root): (Tables, &Path),
        patches: &[Patch],
        package: &Path,
        work: &Path,
    ) -> anyhow::Result<PathBuf> {
        let mut linked = self.image_with(tables, work).into_os_string();
        for patch in patches {
            linked.push(format!("-{patch:?}"));
        }
        let linked = PathBuf::from(linked);
        self.while_changed(package, work, |tree| {
            self.build_patched((tables, root), patches, tree)?;
            fs::copy(tree.join(self.arch.image().1), &linked)?;
            Ok(())
        })?;
        Ok(linked)
    }

    /// Calls `with` with the tree while the patches are in it: programs are built of it.
    ///
    /// # Errors
    ///
    /// That of `with`; when a patch does not fit, or the tree cannot be made Linux's own again.
    pub fn with_patches<T>(
        &self,
        patches: &[Patch],
        work: &Path,
        with: impl FnOnce(&Path) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.while_changed(&source::package(work)?, work, |tree| {
            patches
                .iter()
                .try_for_each(|patch| patch.apply(tree, None))?;
            with(tree)
        })
    }

    /// Calls `change` with the tree, which is Linux's own before and afterwards.
    fn while_changed<T>(
        &self,
        package: &Path,
        work: &Path,
        change: impl FnOnce(&Path) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.restore(package, work)?;
        // Left by all that ends before the tree is Linux's own again.
        fs::write(self.patched_file(work), "")?;
        let changed = change(&self.tree(work));
        self.restore(package, work)?;
        changed
    }

    /// Changes the tree and builds it. Of our tables it has all but their file in the place of Linux's from before.
    fn build_patched(
        &self,
        (tables, root): (Tables, &Path),
        patches: &[Patch],
        tree: &Path,
    ) -> anyhow::Result<()> {
        let replaced = self.replaced_file();
        let ours = tables != Tables::Stock;
        if ours {
            let (_, name) = self.replaced();
            fs::copy(root.join(TABLES).join(name), tree.join(&replaced))?;
            link_with_tables(tree)?;
        }
        for patch in patches {
            patch.apply(tree, ours.then_some(&replaced))?;
        }
        self.make(tree, &[&jobs(), self.arch.image().0])
    }

    /// Puts Linux's own files back into the tree, those that differ, so that Make builds what is of them.
    fn restore(&self, package: &Path, work: &Path) -> anyhow::Result<()> {
        let (tree, own) = (self.tree(work), self.own_files(work));
        let replaced = self.replaced_file();
        let mut changed = Patch::files();
        changed.insert(&replaced);
        let changed: Vec<&str> = changed.into_iter().collect();
        if changed.iter().any(|file| !own.join(file).exists()) {
            fs::create_dir_all(&own)?;
            source::unpack(package, &own, &changed)?;
            if self.has_suites() {
                count_exactly(&own)?;
            }
        }
        for file in changed {
            let text = fs::read(own.join(file))?;
            if fs::read(tree.join(file)).is_ok_and(|now| now == text) {
                continue;
            }
            fs::write(tree.join(file), text)?;
        }
        let makefile = tree.join(IOMMU).join("Makefile");
        let rules = fs::read_to_string(&makefile)?;
        if let Some(own) = rules.strip_suffix(TABLES_MAKEFILE) {
            fs::write(&makefile, own)?;
        }
        if self.patched_file(work).exists() {
            fs::remove_file(self.patched_file(work))?;
        }
        Ok(())
    }

    /// The file of Linux that ours takes the place of, below the tree.
    fn replaced_file(&self) -> String {
        let (directory, name) = self.replaced();
        let file = Path::new(IOMMU).join(directory).join(name);
        file.to_string_lossy().into_owned()
    }

    /// Builds the module of the directory `sources`, with an `object` that was compiled already, for this kernel,
    /// which was built. `inputs` is the record of what it was built of; without one it is not
    /// [`current`](Self::current_module).
    ///
    /// # Errors
    ///
    /// When the build fails.
    pub fn build_module(
        &self,
        sources: &Path,
        object: &Path,
        inputs: Option<&str>,
        work: &Path,
    ) -> anyhow::Result<()> {
        let module = self.modules(work).join(MODULE);
        inputs::forget(&module)?;
        // Linux builds where the sources are.
        let copy = self.directory(work).join("module");
        if copy.exists() {
            fs::remove_dir_all(&copy)?;
        }
        fs::create_dir_all(&copy)?;
        for entry in fs::read_dir(sources)? {
            let path = entry?.path();
            if let Some(name) = path.file_name().filter(|_| path.is_file()) {
                fs::copy(&path, copy.join(name))?;
            }
        }
        let name = object.file_name().context("the object has no name")?;
        fs::copy(object, copy.join(name))?;
        // That it was compiled by another build says the record of the command that made it.
        fs::write(copy.join(format!(".{}.cmd", name.display())), "")?;
        let external = format!("M={}", copy.canonicalize()?.display());
        self.make(&self.tree(work), &[&external, "modules"])?;
        for entry in fs::read_dir(&copy)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "ko")
                && let Some(name) = path.file_name()
            {
                fs::copy(&path, self.modules(work).join(name))?;
            }
        }
        ensure!(module.exists(), "there is no {MODULE}");
        inputs.map_or(Ok(()), |inputs| inputs::keep(inputs, &module))
    }

    /// The kernel's own modules, all in one directory.
    fn keep_modules(&self, work: &Path) -> anyhow::Result<()> {
        let (tree, modules) = (self.tree(work), self.modules(work));
        fs::create_dir_all(&modules)?;
        let order = fs::read_to_string(tree.join("modules.order"))?;
        for line in order.lines() {
            let path = tree.join(line).with_extension("ko");
            let name = path.file_name().context("a module without a name")?;
            fs::copy(&path, modules.join(name))?;
        }
        Ok(())
    }

    /// True if it has modules, of its own and of ours.
    pub fn has_modules(&self) -> bool {
        self.options.lines().any(|line| line == "CONFIG_MODULES=y")
    }

    fn make(&self, tree: &Path, arguments: &[&str]) -> anyhow::Result<()> {
        let status = Command::new("make")
            .args(["--silent", &format!("ARCH={}", self.arch.name())])
            .arg(format!("CROSS_COMPILE={}", self.arch.compiler()))
            .args(arguments)
            .current_dir(tree)
            // Flags of a make that this one is no part of.
            .env_remove("MAKEFLAGS")
            .stdin(Stdio::null())
            .status()
            .context("make cannot be started")?;
        ensure!(
            status.success(),
            "make {} ended with {status}",
            arguments.join(" ")
        );
        Ok(())
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

/// Has a tree link our tables.
fn link_with_tables(tree: &Path) -> anyhow::Result<()> {
    let makefile = tree.join(IOMMU).join("Makefile");
    let rules = fs::read_to_string(&makefile)?;
    if !rules.ends_with(TABLES_MAKEFILE) {
        fs::write(&makefile, rules + TABLES_MAKEFILE)?;
    }
    Ok(())
}

/// Makes the look for leaks of KUnit's suites in a tree exact.
fn count_exactly(tree: &Path) -> anyhow::Result<()> {
    let leaks = tree.join(IOMMU).join(GENERIC).join("kunit_iommu_pt.h");
    let text = fs::read_to_string(&leaks)?;
    ensure!(text.contains(INCLUDED_LAST), "KUnit's suites are others");
    fs::write(leaks, text.replacen(INCLUDED_LAST, EXACT_COUNTS, 1))?;
    Ok(())
}

/// Adds a suite to KUnit's in a tree's directory of tables.
fn add_suite(tables: &Path) -> anyhow::Result<()> {
    let formats = tables.join("fmt");
    fs::write(formats.join("unmaps.c"), UNMAPS)?;
    let rules = fs::read_to_string(formats.join("Makefile"))?;
    fs::write(formats.join("Makefile"), rules + "\nobj-y += unmaps.o\n")?;
    Ok(())
}

/// Functions of Linux's that fill and empty tables, which are in a kernel only with its own tables.
const OF_LINUX: [&str; 4] = [
    "__map_range_leaf",
    "__unmap_range",
    "__collect_tables",
    "arm_lpae_map_pages",
];

/// One of ours, by the architecture.
const OURS: [&str; 3] = [
    "dmaspace_vtdss_map",
    "dmaspace_arm",
    "dmaspace_riscv_64_map",
];

fn jobs() -> String {
    format!(
        "-j{}",
        thread::available_parallelism().map_or(1, usize::from)
    )
}

/// The files that a tree was built from, as far as the records of its commands name them, and those that links lead to.
fn inputs(tree: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut inputs = BTreeSet::new();
    for entry in WalkDir::new(tree) {
        let entry = entry?;
        if entry.path_is_symlink() {
            let directory = entry.path().parent().unwrap_or(tree);
            let target = directory.join(fs::read_link(entry.path())?);
            if let Ok(below) = target.strip_prefix(tree) {
                inputs.insert(normal(&below.to_string_lossy()));
            }
        }
        if entry.path().extension().is_some_and(|end| end == "cmd") {
            let record = fs::read(entry.path())?;
            let record = String::from_utf8_lossy(&record);
            let words =
                record.split(|c: char| !(c.is_ascii_alphanumeric() || "/._+-,".contains(c)));
            inputs.extend(words.map(normal));
        }
    }
    Ok(inputs)
}

/// A path without what leads nowhere.
fn normal(path: &str) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => _ = normal.pop(),
            Component::Normal(name) => normal.push(name),
            _ => {}
        }
    }
    normal
}

/// The options of `wanted` that did not make it into `config`.
fn lost<'a>(wanted: &'a str, config: &str) -> Vec<&'a str> {
    let found: BTreeSet<&str> = config.lines().collect();
    let options = wanted.lines().filter(|line| line.starts_with("CONFIG_"));
    options.filter(|line| !found.contains(line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_ours_is_an_option_or_a_comment() {
        for kernel in KERNELS {
            for line in kernel.options.lines().filter(|line| !line.is_empty()) {
                // An option that is off has no line in the result, so it could not be looked for.
                let on = line.contains('=') && !line.ends_with("=n");
                let option = line.starts_with("CONFIG_") && on;
                assert!(option || line.starts_with("# "), "{line}");
            }
        }
    }

    #[test]
    fn paths_lead_where_they_lead() {
        assert_eq!(normal("./a//b/../c.h"), Path::new("a/c.h"));
        assert_eq!(
            normal("drivers/iommu/generic_pt/fmt/../x.h"),
            Path::new("drivers/iommu/generic_pt/x.h")
        );
    }

    #[test]
    fn options_that_did_not_survive_are_named() {
        let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=8\nCONFIG_LONGER=y\n";
        assert!(lost("# a comment\n\nCONFIG_A=y\nCONFIG_C=8\n", config).is_empty());
        let wanted = "CONFIG_B=y\nCONFIG_C=4\nCONFIG_LONG=y\n";
        assert_eq!(lost(wanted, config), wanted.lines().collect::<Vec<_>>());
    }

    #[test]
    fn a_kernel_of_other_options_is_not_kept() {
        let work = tempfile::tempdir().unwrap();
        let work = work.path();
        fs::create_dir_all(UML.directory(work)).unwrap();
        assert_eq!(UML.kept(work), None);
        fs::write(UML.image(work), "").unwrap();
        assert_eq!(UML.kept(work), None);
        fs::write(UML.options_file(work), "CONFIG_OTHER=y\n").unwrap();
        assert_eq!(UML.kept(work), None);
        // A file of before the source had a name in it.
        fs::write(UML.options_file(work), UML.options).unwrap();
        assert_eq!(UML.kept(work), None);
        kept(UML, work);
        assert_eq!(UML.kept(work), Some(UML.image(work)));
    }

    /// A kernel that was built from the options of today.
    fn kept(kernel: Kernel, work: &Path) {
        fs::create_dir_all(kernel.modules(work)).unwrap();
        fs::write(kernel.image(work), "").unwrap();
        fs::write(kernel.options_file(work), kernel.built_from()).unwrap();
    }

    #[test]
    fn lines_of_ours_in_each_kernel_of_a_kind_are_part_of_what_it_is_built_from() {
        assert!(TESTS.built_from().contains(UNMAPS));
        assert!(TESTS.built_from().contains(EXACT_COUNTS));
        assert!(RISCV.built_from().contains(LACKING));
        assert!(!GUEST.built_from().contains(UNMAPS));
        assert!(!ARM.built_from().contains(LACKING));
    }

    #[test]
    fn what_is_not_what_the_sources_say_is_not_booted() {
        let (root, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (root, work) = (root.path(), work.path());
        let refusal = |tables| format!("{:#}", GUEST.current(tables, root, work).unwrap_err());
        assert_eq!(
            refusal(Tables::Stock),
            "there is no such kernel: `cargo xtask linux --kernel guest`"
        );
        kept(GUEST, work);
        let stock = GUEST.current(Tables::Stock, root, work).unwrap();
        assert_eq!(stock, GUEST.image(work));
        // It is there, but nothing says of what.
        let linked = GUEST.image_with(Tables::Iopt, work);
        fs::write(&linked, "").unwrap();
        GUEST.linked(Tables::Iopt, &[], work).unwrap_err();
        assert_eq!(GUEST.linked(Tables::Stock, &[], work).unwrap(), stock);
        let said = refusal(Tables::Iopt);
        assert!(
            said.contains("`cargo xtask linux --kernel guest` comes first: there is no record"),
            "{said}"
        );
        let file = root.join("lib.rs");
        fs::write(&file, "leaves are read-only").unwrap();
        let record = inputs::record(root, &["lib.rs".into()]).unwrap();
        inputs::keep(&record, &linked).unwrap();
        for tables in [Tables::Iopt, Tables::One] {
            assert_eq!(GUEST.current(tables, root, work).unwrap(), linked);
        }
        fs::write(&file, "leaves are writable").unwrap();
        for tables in [Tables::Iopt, Tables::One] {
            let said = refusal(tables);
            assert!(
                said.ends_with("was built before lib.rs has changed"),
                "{said}"
            );
        }
        // With its own tables it is what it was.
        GUEST.current(Tables::Stock, root, work).unwrap();
        let module = GUEST.modules(work).join(MODULE);
        inputs::keep(&record, &module).unwrap();
        let said = format!("{:#}", GUEST.current_module(root, work).unwrap_err());
        assert!(
            said.ends_with("was built before lib.rs has changed"),
            "{said}"
        );
        fs::write(&file, "leaves are read-only").unwrap();
        assert_eq!(GUEST.current_module(root, work).unwrap(), module);
        // With other options neither is of this kernel.
        fs::write(GUEST.options_file(work), "CONFIG_OTHER=y\n").unwrap();
        for patches in [&[][..], &[Patch::Stock]] {
            let refused = GUEST.linked(Tables::Iopt, patches, work).unwrap_err();
            assert_eq!(refused.to_string(), GUEST.missing());
        }
    }
}
