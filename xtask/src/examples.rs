//! The examples: a program for each user, and for each IOMMU one that drives it, on an emulated machine where
//! there is one. They check what they show, so that they cannot rot.

use anyhow::{Context as _, ensure};

use crate::{
    cargo::{self, Repository},
    parts::Outcome,
    programs::Programs,
};

/// The examples' crate.
const PACKAGE: &str = "dmaspace-examples";

/// The part `examples` of the test command: each one, from its beginning to its end.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let names = names(repository)?;
    ensure!(!names.is_empty(), "{PACKAGE} has no examples");
    let programs = Programs::build(repository)?;
    for name in names {
        cargo::run(&mut programs.example(&name, repository))?;
    }
    Ok(Outcome::Passed)
}

fn names(repository: &Repository) -> anyhow::Result<Vec<String>> {
    let packages = repository.metadata.workspace_packages();
    let package = packages.into_iter().find(|package| package.name == PACKAGE);
    let targets = package.with_context(|| format!("there is no {PACKAGE}"))?;
    let examples = targets.targets.iter().filter(|target| target.is_example());
    Ok(examples.map(|target| target.name.clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_beside_the_machine_is_an_example() {
        let repository = Repository::find().unwrap();
        let mut files: Vec<_> = repository
            .root
            .join("examples")
            .read_dir()
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .filter_map(|file| file.strip_suffix(".rs").map(str::to_owned))
            .filter(|name| name != "machine")
            .collect();
        let mut names = names(&repository).unwrap();
        files.sort();
        names.sort();
        assert_eq!(names, files);
        assert!(names.len() >= 3);
    }
}
