//! What is looked at before a release: packages as a registry would get them, and features one by one.

use clap::Args;

use crate::{
    cargo::{self, Repository},
    dependencies::is_published,
};

/// How thoroughly.
#[derive(Args)]
pub(crate) struct Options {
    /// Do not build the packages, only make them.
    #[arg(long)]
    no_verify: bool,
}

/// Makes the packages of all published crates, and builds each as somebody would who gets it from the
/// registry. Nothing is uploaded.
pub(crate) fn packages(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let mut command = repository.cargo(&["publish", "--workspace", "--dry-run"]);
    if options.no_verify {
        command.args(["--no-verify", "--allow-dirty"]);
    }
    cargo::run(&mut command)?;
    Ok(true)
}

/// Compiles each published crate by itself with no feature, with its default, and with each of its own; what
/// does not compile does not hide the rest.
pub(crate) fn features(repository: &Repository) -> anyhow::Result<bool> {
    let target = repository.metadata.target_directory.join("features");
    let packages = repository.metadata.workspace_packages().into_iter();
    let mut well = true;
    for package in packages.filter(|package| is_published(package)) {
        let mut choices = vec![vec![], vec!["--no-default-features"]];
        let names = package.features.keys().filter(|name| *name != "default");
        choices.extend(names.map(|name| vec!["--no-default-features", "--features", name]));
        for choice in choices {
            let mut command = repository.cargo(&["check", "--quiet", "--package", &package.name]);
            command
                .args(choice)
                .env("CARGO_TARGET_DIR", &target)
                .env("RUSTFLAGS", "-D warnings");
            if let Err(error) = cargo::run(&mut command) {
                eprintln!("{error:#}");
                well = false;
            }
        }
    }
    Ok(well)
}
