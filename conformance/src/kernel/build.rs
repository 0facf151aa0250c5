//! Building of a kernel from its source, and removal of what nothing needs afterwards.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    path::{Component, Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, ensure};
use walkdir::WalkDir;

use super::{Arch, EXACT_COUNTS, GENERIC, IOMMU, Kernel, LACKING, Tables, UNMAPS};
use crate::{inputs, patch, source};

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

const INCLUDED_LAST: &str = "#include <linux/iommu.h>\n";

impl Kernel {
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
        let built_of = match self.arch {
            Arch::Um => BTreeSet::new(),
            Arch::X86 | Arch::Arm | Arch::RiscV => built_of(tree)?,
        };
        for entry in WalkDir::new(tree).contents_first(true).min_depth(1) {
            let entry = entry?;
            let path = entry.path().strip_prefix(tree)?;
            if entry.file_type().is_dir() {
                // Directories that have something left stay.
                let _ = fs::remove_dir(entry.path());
            } else if !self.is_needed(path, &built_of) {
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

    pub(super) fn make(&self, tree: &Path, arguments: &[&str]) -> anyhow::Result<()> {
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
}

/// Makes the look for leaks of KUnit's suites in a tree exact.
pub(super) fn count_exactly(tree: &Path) -> anyhow::Result<()> {
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

pub(super) fn jobs() -> String {
    format!(
        "-j{}",
        thread::available_parallelism().map_or(1, usize::from)
    )
}

/// The files that a tree was built from, as far as the records of its commands name them, and those that links lead to.
fn built_of(tree: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
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
pub(super) fn normal(path: &str) -> PathBuf {
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
pub(super) fn lost<'a>(wanted: &'a str, config: &str) -> Vec<&'a str> {
    let found: BTreeSet<&str> = config.lines().collect();
    let options = wanted.lines().filter(|line| line.starts_with("CONFIG_"));
    options.filter(|line| !found.contains(line)).collect()
}
