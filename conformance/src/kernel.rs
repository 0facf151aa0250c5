//! Linux's kernels, built from Debian's package of its source.
//!
//! A kernel is built once for each version of its options and kept, with the options it was built from beside it. What
//! is not needed to build modules for it is removed afterwards: of 2 GB some 100 MB stay.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use crate::source;
use anyhow::{Context as _, ensure};

/// What a kernel runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// x86-64: QEMU boots it.
    X86,
    /// User-Mode Linux: a program.
    Um,
}

impl Arch {
    const fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86",
            Self::Um => "um",
        }
    }

    /// What is built, and where it is then.
    const fn image(self) -> (&'static str, &'static str) {
        match self {
            Self::X86 => ("bzImage", "arch/x86/boot/bzImage"),
            Self::Um => ("linux", "linux"),
        }
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// As commands call it, and its directory below `linux` in that of the rigs.
    pub name: &'static str,
    /// What it runs on.
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

/// Those that the modules below `linux/` are built for.
pub const WITH_MODULES: [Kernel; 3] = [UML, UML_DEBUG, GUEST];

/// What stays of a tree: what a module is built with.
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

impl Kernel {
    /// That of [`WITH_MODULES`] with this name.
    pub fn find(name: &str) -> Option<Self> {
        WITH_MODULES.into_iter().find(|kernel| kernel.name == name)
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
        (built_from == self.options && image.exists()).then_some(image)
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
        let tree = self.tree(work);
        if tree.exists() {
            fs::remove_dir_all(&tree)?;
        }
        fs::create_dir_all(&tree)?;
        source::unpack(package, &tree, &[])?;
        fs::write(tree.join("our.config"), self.options)?;
        self.make(&tree, &["allnoconfig", "KCONFIG_ALLCONFIG=our.config"])?;
        let lost = lost(self.options, &fs::read_to_string(tree.join(".config"))?);
        ensure!(
            lost.is_empty(),
            "Linux's rules do not allow these options: {}",
            lost.join(", ")
        );
        let jobs = format!(
            "-j{}",
            thread::available_parallelism().map_or(1, usize::from)
        );
        let (target, image) = self.arch.image();
        self.make(&tree, &[&jobs, target])?;
        fs::rename(tree.join(image), self.image(work))?;
        if self.has_modules() {
            self.make(&tree, &[&jobs, "modules"])?;
            self.keep_modules(work)?;
        }
        // Objects of what is gone would only be in the way.
        for entry in fs::read_dir(&tree)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let kept = self.has_modules() && KEPT.contains(&&*name);
            match path.is_dir() {
                _ if kept => {}
                true => fs::remove_dir_all(&path)?,
                false => fs::remove_file(&path)?,
            }
        }
        // Last: from here on it is kept.
        fs::write(self.options_file(work), self.options)?;
        Ok(self.image(work))
    }

    /// Builds the module of the directory `sources`, with an `object` that was compiled already, for this kernel,
    /// which was built.
    ///
    /// # Errors
    ///
    /// When the build fails.
    pub fn build_module(&self, sources: &Path, object: &Path, work: &Path) -> anyhow::Result<()> {
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
        Ok(())
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

    fn has_modules(&self) -> bool {
        self.options.lines().any(|line| line == "CONFIG_MODULES=y")
    }

    fn make(&self, tree: &Path, arguments: &[&str]) -> anyhow::Result<()> {
        let status = Command::new("make")
            .args(["--silent", &format!("ARCH={}", self.arch.name())])
            .args(arguments)
            .current_dir(tree)
            // Of a make that this one is no part of.
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

    fn tree(&self, work: &Path) -> PathBuf {
        self.directory(work).join("tree")
    }

    /// What is started or booted.
    pub fn image(&self, work: &Path) -> PathBuf {
        self.directory(work).join(self.arch.image().0)
    }

    fn options_file(&self, work: &Path) -> PathBuf {
        self.directory(work).join("built-from.config")
    }
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
        fs::write(UML.options_file(work), UML.options).unwrap();
        assert_eq!(UML.kept(work), Some(UML.image(work)));
    }
}
