//! Man pages and shell completions of the command line, from what it takes.

use crate::cargo::{self, Repository};

/// Writes them below `target/manuals`.
pub(crate) fn run(repository: &Repository) -> anyhow::Result<bool> {
    let directory = repository.metadata.target_directory.join("manuals");
    let run = ["run", "--quiet", "--package", "dmaspace-cli", "--example"];
    let mut command = repository.cargo(&run);
    command.args(["manuals", "--"]).arg(&directory);
    cargo::run(&mut command)?;
    println!("man pages in {directory}/man, completions in {directory}/completions");
    Ok(true)
}
