//! The oldest compiler that is supported, Debian stable's: everything that a user builds compiles with it. Tests and
//! rigs are built with a newer one.

use crate::cargo::{self, Repository};

/// Features for foreign crates that need a newer compiler.
const NEWER: &[&str] = &["peers", "virtio-drivers"];

/// Fetches the compiler, unless it is there, and checks every package that says for which compiler it is.
pub(crate) fn run(repository: &Repository) -> anyhow::Result<bool> {
    let work = repository.metadata.target_directory.join("oldest");
    let mut fetch = repository.cargo(&["run", "--quiet", "--package", "dmaspace-conformance"]);
    cargo::run(fetch.args(["--", "--work", work.as_str(), "rustc"]))?;
    let mut check = repository.cargo(&["check", "--locked", "--lib", "--bins", "--examples"]);
    check.arg("--no-default-features");
    for package in repository.metadata.workspace_packages() {
        if package.rust_version.is_none() {
            continue;
        }
        check.args(["--package", &package.name]);
        let features = package.features.keys().map(String::as_str);
        for feature in features.filter(|name| *name != "default" && !NEWER.contains(name)) {
            check.args(["--features", &format!("{}/{feature}", package.name)]);
        }
    }
    let check = check.env("CARGO_TARGET_DIR", work.join("target"));
    cargo::run(check.env("RUSTC", work.join("rustc")))?;
    Ok(true)
}
