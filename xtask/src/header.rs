//! The header of the C interface, from its source by cbindgen.

use std::{
    fs,
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};

use crate::{
    cargo::{self, Repository},
    parts::Outcome,
};

/// The program that makes it, below the root.
pub(crate) const CRATE: &str = "xtask/header";
/// What it is made of, and the header in there.
const SOURCE: &str = "crates/dmaspace-capi";
const HEADER: &str = "crates/dmaspace-capi/include/dmaspace.h";

/// Writes it.
pub(crate) fn run(repository: &Repository) -> anyhow::Result<bool> {
    fs::write(repository.root.join(HEADER), made(repository)?).context(HEADER)?;
    println!("made {HEADER}");
    Ok(true)
}

/// The part `header` of the test command: the committed one is what the source says now.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let committed = fs::read(repository.root.join(HEADER)).context(HEADER)?;
    ensure!(
        committed == made(repository)?,
        "{HEADER} is stale: `cargo xtask header` makes it anew"
    );
    Ok(Outcome::Passed)
}

/// The header as the source says now.
fn made(repository: &Repository) -> anyhow::Result<Vec<u8>> {
    let target = repository.metadata.target_directory.join("header");
    let manifest = format!("{CRATE}/Cargo.toml");
    cargo::run(
        repository
            .cargo(&["build", "--quiet", "--manifest-path", &manifest])
            .env("CARGO_TARGET_DIR", &target)
            .env_remove("CARGO_BUILD_TARGET"),
    )?;
    let program = target.join("debug/header");
    let output = Command::new(&program)
        .arg(repository.root.join(SOURCE))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("{program} cannot be started"))?;
    ensure!(output.status.success(), "{program}: {}", output.status);
    Ok(output.stdout)
}
