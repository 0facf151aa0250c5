//! Dependencies: published crates use published ones only, also for their tests; foreign crates' licences and
//! the compiler that they ask for; how few the lowest two crates of the house need.

use std::collections::BTreeSet;

use anyhow::{Context as _, bail};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, PackageId};

use crate::{cargo::Repository, parts::Outcome};

/// Licences of foreign crates, and no more than they have.
const LICENCES: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-3-Clause",
    "MIT",
    "Unicode-3.0",
];

/// The crates that are for everywhere, and what they may not do without. `arrayvec` needs nothing itself;
/// it is what a `Gather` is made with for each unmap, without clearing 256 bytes and without unsafe code.
/// `thiserror` writes the texts of errors, without `std`.
const SMALL: &[(&str, &[&str])] = &[
    ("dmaspace-runs", &[]),
    (
        "dmaspace-iopt",
        &["dmaspace-runs", "arrayvec", "bitflags", "thiserror"],
    ),
];

/// The part `dependencies` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    // With all features, and what each crate has become of them.
    let metadata = MetadataCommand::new()
        .manifest_path(repository.root.join("Cargo.toml"))
        .other_options(["--all-features", "--locked"].map(str::to_owned).to_vec())
        .exec()?;
    let shipped = shipped(&metadata)?;
    let mut faults = Vec::new();
    for package in metadata
        .packages
        .iter()
        .filter(|package| package.source.is_some())
    {
        faults.extend(licence_fault(package));
        if shipped.contains(&package.id) {
            faults.extend(compiler_fault(package, &metadata));
        }
    }
    for package in metadata.workspace_packages() {
        faults.extend(house_faults(package, &metadata));
        faults.extend(size_fault(package));
        faults.extend(description_fault(package, repository));
    }
    if !faults.is_empty() {
        bail!("{} faults\n  {}", faults.len(), faults.join("\n  "));
    }
    let foreign = metadata.packages.len() - metadata.workspace_members.len();
    let ours = metadata.workspace_members.iter();
    let used = shipped.len() - ours.filter(|id| shipped.contains(*id)).count();
    println!(
        "{foreign} foreign crates, {used} of them in published crates: licences and compilers fit"
    );
    Ok(Outcome::Passed)
}

/// Everything that the published crates are built of, tests aside.
fn shipped(metadata: &Metadata) -> anyhow::Result<BTreeSet<PackageId>> {
    let resolve = metadata.resolve.as_ref().context("nothing is resolved")?;
    let members = metadata.workspace_packages().into_iter();
    let mut open: Vec<&PackageId> = members
        .filter(|package| is_published(package))
        .map(|package| &package.id)
        .collect();
    let mut found: BTreeSet<PackageId> = open.iter().copied().cloned().collect();
    while let Some(id) = open.pop() {
        let node = resolve.nodes.iter().find(|node| node.id == *id);
        for dependency in node.into_iter().flat_map(|node| &node.deps) {
            let mut kinds = dependency.dep_kinds.iter();
            let built = kinds.any(|kind| kind.kind != DependencyKind::Development);
            if built && found.insert(dependency.pkg.clone()) {
                open.push(&dependency.pkg);
            }
        }
    }
    Ok(found)
}

fn is_published(package: &Package) -> bool {
    package.publish.as_ref().is_none_or(|to| !to.is_empty())
}

/// Dependencies of a published crate on what serves to prove or measure it, and on namesakes of our crates.
fn house_faults(package: &Package, metadata: &Metadata) -> Vec<String> {
    if !is_published(package) {
        return Vec::new();
    }
    let ours = metadata.workspace_packages();
    let find = |name: &str| ours.iter().find(|package| package.name == name);
    let uses = package.dependencies.iter();
    uses.filter_map(|used| {
        let name = &used.name;
        match (find(name), &used.path) {
            (Some(ours), Some(_)) if is_published(ours) => None,
            (Some(_), None) => Some(format!("{name} of a registry, a namesake of ours")),
            (None, None) => None,
            _ => Some(format!("{name}, which is not published")),
        }
    })
    .map(|fault| format!("{} uses {fault}", package.name))
    .collect()
}

fn licence_fault(package: &Package) -> Option<String> {
    let said = package.license.as_deref().unwrap_or("no licence");
    (!fits(said)).then(|| {
        format!(
            "{} {}: {said} is not allowed",
            package.name, package.version
        )
    })
}

/// A crate that asks for a newer compiler than ours say they do with.
fn compiler_fault(package: &Package, metadata: &Metadata) -> Option<String> {
    let ours = metadata.workspace_packages().into_iter();
    let least = ours
        .filter_map(|package| package.rust_version.as_ref())
        .min()?;
    let asked = package
        .rust_version
        .as_ref()
        .filter(|asked| *asked > least)?;
    Some(format!(
        "{} {} asks for Rust {asked}; the workspace says {least}",
        package.name, package.version
    ))
}

/// A dependency that a crate which is for everywhere has come to.
fn size_fault(package: &Package) -> Option<String> {
    let (name, allowed) = SMALL.iter().find(|(name, _)| package.name == *name)?;
    let mut mandatory = package.dependencies.iter().filter(|dependency| {
        dependency.kind != DependencyKind::Development && !dependency.optional
    });
    let more = mandatory.find(|dependency| !allowed.contains(&&*dependency.name))?;
    Some(format!("{name} cannot do without {}", more.name))
}

/// Missing fields of a published crate that a registry shows.
fn description_fault(package: &Package, repository: &Repository) -> Option<String> {
    if !is_published(package) {
        return None;
    }
    let directory = package.manifest_path.parent()?;
    let missing = [
        ("description", package.description.is_none()),
        ("license", package.license.is_none()),
        ("repository", package.repository.is_none()),
        // Its own readme: of another directory's file the registry would follow links from here.
        (
            "readme",
            package.readme.as_deref() != Some("README.md".into()),
        ),
        ("rust-version", package.rust_version.is_none()),
        ("keywords", !(1..=5).contains(&package.keywords.len())),
        ("categories", !(1..=5).contains(&package.categories.len())),
        (
            "package.metadata.docs.rs",
            package.metadata.pointer("/docs/rs").is_none(),
        ),
        // Links: the texts stand at the root.
        (
            "LICENSE-APACHE",
            differs(repository, directory, "LICENSE-APACHE"),
        ),
        ("LICENSE-MIT", differs(repository, directory, "LICENSE-MIT")),
    ];
    let missing: Vec<_> = missing
        .iter()
        .filter(|(_, lacks)| *lacks)
        .map(|(what, _)| *what)
        .collect();
    let name = &package.name;
    (!missing.is_empty()).then(|| format!("{name} has no right {}", missing.join(", ")))
}

fn differs(
    repository: &Repository,
    directory: &cargo_metadata::camino::Utf8Path,
    file: &str,
) -> bool {
    let text = std::fs::read(repository.root.join(file));
    text.is_err() || std::fs::read(directory.join(file)).ok() != text.ok()
}

/// True if one way to read an SPDX expression takes nothing but [`LICENCES`].
fn fits(expression: &str) -> bool {
    // `/` is the older spelling of OR.
    spdx::Expression::parse_mode(expression, spdx::ParseMode::LAX).is_ok_and(|expression| {
        expression.evaluate(|licence| LICENCES.contains(&licence.to_string().as_str()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_fits_when_one_way_to_read_it_does() {
        for good in [
            "MIT/Apache-2.0",
            "GPL-3.0-or-later OR Apache-2.0 OR MulanPSL-2.0",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0-only",
        ] {
            assert!(fits(good), "{good}");
        }
        for bad in [
            "GPL-3.0-or-later",
            "MIT AND GPL-2.0-only",
            "MIT WITH LLVM-exception",
            "no licence",
            "",
        ] {
            assert!(!fits(bad), "{bad}");
        }
    }
}
