//! The lower crates without the standard library: `xtask/no-std`, which the compiler refuses when one of them needs it.

use std::fs;

use anyhow::Context as _;

use crate::{
    cargo::{self, Repository},
    parts::Outcome,
};

/// The library's directory below the root.
pub(crate) const CRATE: &str = "xtask/no-std";

/// The part `no-std` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    // The same versions of foreign crates as in the workspace; Cargo drops those not needed.
    let lock = repository.root.join(CRATE).join("Cargo.lock");
    fs::copy(repository.root.join("Cargo.lock"), lock)
        .context("the workspace's Cargo.lock cannot be copied")?;
    let target = repository.metadata.target_directory.join("no-std");
    let manifest = format!("{CRATE}/Cargo.toml");
    for features in ["", "ioas"] {
        let options = ["--manifest-path", &manifest];
        let mut build = repository.cargo(&["build", "--features", features]);
        // Instead of flags meant for the workspace: sanitizers and coverage need what is missing here.
        build
            .args(options)
            .env("CARGO_TARGET_DIR", &target)
            .env("RUSTFLAGS", "-D warnings")
            .env_remove("CARGO_BUILD_TARGET");
        cargo::run(&mut build)?;
    }
    Ok(Outcome::Passed)
}
