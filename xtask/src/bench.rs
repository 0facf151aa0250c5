//! `bench`, built as its figures ask for: page tables with foreign crates and ours as one program, so that calls into
//! theirs are inlined as our own are.

use crate::{
    cargo::{self, Repository},
    programs::Passed,
};

pub(crate) fn run(passed: &Passed, repository: &Repository) -> anyhow::Result<bool> {
    let options = passed.options();
    let profile = match options.first() {
        Some(&"tables") => "measure",
        _ => "release",
    };
    let run = ["run", "--profile", profile, "--package", "dmaspace-bench"];
    let mut command = repository.cargo(&run);
    command.args(["--features", "peers", "--bin", "bench", "--"]);
    cargo::run(command.args(options))?;
    Ok(true)
}
