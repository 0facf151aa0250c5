//! Linking of a kernel that was built, with tables of ours, with patches, and of a module of ours for it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use super::{
    Arch, GENERIC, IOMMU, Kernel, MODULE, Tables,
    build::{count_exactly, jobs},
};
use crate::{inputs, patch::Patch, source};

const TABLES_MAKEFILE: &str =
    "\nobj-y += dmaspace_tables.o\ndmaspace_tables-y := tables.o iopt.o\n";

/// Our tables, below the root.
const TABLES: &str = "linux/tables";

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

impl Kernel {
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
