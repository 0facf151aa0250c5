//! The examples: a program for each user, and one that drives each emulated IOMMU. They check what they show, so that
//! they cannot rot.

use anyhow::{Context as _, ensure};

use crate::{
    cargo::{self, Repository},
    programs::Programs,
};

/// The examples' crate.
const PACKAGE: &str = "dmaspace-examples";

/// The example that drives an IOMMU, and its units.
const UNIT: &str = "unit";
const UNITS: [&str; 5] = ["vtd", "vtd-scalable", "amd-vi", "smmuv3", "riscv"];

/// Runs each one, from its beginning to its end.
pub(crate) fn run(repository: &Repository) -> anyhow::Result<()> {
    let names = names(repository)?;
    ensure!(!names.is_empty(), "{PACKAGE} has no examples");
    let programs = Programs::build(repository)?;
    let path = programs.path_of_qemu(repository)?;
    ensure!(names.iter().any(|name| name == UNIT), "no example {UNIT}");
    for name in &names {
        let units = match &**name {
            UNIT => UNITS.map(|unit| vec!["--unit", unit]).to_vec(),
            _ => vec![Vec::new()],
        };
        for unit in units {
            let mut example = programs.example(name, repository);
            cargo::run(example.args(unit).env("PATH", &path))?;
        }
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
