//! The examples: a program for each user, and for each IOMMU one that drives it, on an emulated machine where
//! there is one. They check what they show, so that they cannot rot.

use anyhow::{Context as _, ensure};

use crate::{
    cargo::{self, Repository},
    programs::Programs,
};

/// The examples' crate.
const PACKAGE: &str = "dmaspace-examples";

/// Runs each one, from its beginning to its end.
pub(crate) fn run(repository: &Repository) -> anyhow::Result<()> {
    let names = names(repository)?;
    ensure!(!names.is_empty(), "{PACKAGE} has no examples");
    let programs = Programs::build(repository)?;
    let path = programs.path_of_qemu(repository)?;
    for name in names {
        cargo::run(programs.example(&name, repository).env("PATH", &path))?;
    }
    Ok(())
}

fn names(repository: &Repository) -> anyhow::Result<Vec<String>> {
    let packages = repository.metadata.workspace_packages();
    let package = packages.into_iter().find(|package| package.name == PACKAGE);
    let targets = package.with_context(|| format!("there is no {PACKAGE}"))?;
    let examples = targets.targets.iter().filter(|target| target.is_example());
    Ok(examples.map(|target| target.name.clone()).collect())
}
