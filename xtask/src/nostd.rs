//! The lower crates without the standard library and without an allocator.
//!
//! `crates/nostd-check` is a program with a panic handler and a start of its own. As soon as one
//! of its dependencies pulls in `std`, that handler exists twice and the build fails; as soon as
//! one allocates, the allocator is missing and the build fails. It is not a member of the
//! workspace, since a test harness would bring `std` in. Built, it also runs: its exit status
//! tells whether the results are right.

use std::{fs, process::Command};

use anyhow::{Context as _, ensure};

use crate::{
    cargo::{self, Repository},
    parts::Outcome,
};

/// The program's directory below the root.
pub(crate) const CRATE: &str = "crates/nostd-check";

/// The part `no-std` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        let reason = "the program's start is written for x86-64 Linux";
        return Ok(Outcome::NotRun(reason.into()));
    }
    let directory = repository.root.join(CRATE);
    // The same versions of foreign crates as in the workspace; Cargo drops those not needed.
    fs::copy(
        repository.root.join("Cargo.lock"),
        directory.join("Cargo.lock"),
    )
    .context("the workspace's Cargo.lock cannot be copied")?;
    let target = repository.metadata.target_directory.join("nostd-check");
    let manifest = format!("{CRATE}/Cargo.toml");
    cargo::run(
        repository
            .cargo(&["build", "--release", "--manifest-path", &manifest])
            .env("CARGO_TARGET_DIR", &target)
            // Instead of flags meant for the workspace: sanitizers and coverage need what is
            // missing here.
            .env("RUSTFLAGS", "-D warnings")
            .env_remove("CARGO_BUILD_TARGET"),
    )?;
    let program = target.join("release/nostd-check");
    let status = Command::new(&program)
        .status()
        .with_context(|| format!("{program} cannot be started"))?;
    ensure!(
        status.success(),
        "{program} ended with {status}: the number is that of the step in {CRATE}/src/main.rs"
    );
    println!("built without std and allocator, run, results right");
    // Needs an allocator, and has code that only a build without `std` has.
    let ioas = [
        "check",
        "--package",
        "dmaspace-ioas",
        "--no-default-features",
        "--features",
        "virtio-drivers",
    ];
    cargo::run(&mut repository.cargo(&ioas))?;
    Ok(Outcome::Passed)
}
