//! The programs that the rigs start, built once for all of them.
//!
//! Without optimization and with every feature, as the tests are: the libraries are compiled for them already.
//! Programs that are measured, or do the same millions of times, are built with `--release` where they are started.

use std::{env, ffi::OsString, process::Command};

use cargo_metadata::camino::Utf8PathBuf;
use clap::Args;

use crate::cargo::{self, Repository};

/// The variable that tells Cargo for what to build, if not for this machine.
pub(crate) const TARGET: &str = "CARGO_BUILD_TARGET";

/// All programs and examples of the workspace.
pub(crate) struct Programs {
    directory: Utf8PathBuf,
}

impl Programs {
    /// Builds what is not built yet.
    pub(crate) fn build(repository: &Repository) -> anyhow::Result<Self> {
        // All packages, this one too: with fewer, features of foreign crates are others, and so are they.
        let all = ["build", "--workspace", "--all-features"];
        let mut build = repository.cargo(&all);
        build.args(["--bins", "--examples"]);
        cargo::run(&mut build)?;
        Ok(Self {
            directory: repository.metadata.target_directory.join("debug"),
        })
    }

    /// Programs that `options` of Cargo choose, for measurements, or an emulator.
    pub(crate) fn optimized(
        options: &[&str],
        variables: &[(&str, &str)],
        repository: &Repository,
    ) -> anyhow::Result<Self> {
        let mut build = repository.cargo(&["build", "--release", "--bins"]);
        build.args(options);
        cargo::run(build.envs(variables.iter().copied()))?;
        let mut directory = repository.metadata.target_directory.clone();
        directory.extend(
            variables
                .iter()
                .filter(|(name, _)| *name == TARGET)
                .map(|(_, target)| target),
        );
        Ok(Self {
            directory: directory.join("release"),
        })
    }

    /// A `PATH` with QEMU 11 before the distribution's. It is fetched unless it is there.
    pub(crate) fn path_of_qemu(&self, repository: &Repository) -> anyhow::Result<OsString> {
        let work = repository.metadata.target_directory.join("conformance");
        let mut fetch = self.command("dmaspace-conformance", repository);
        cargo::run(fetch.args(["--work", work.as_str(), "qemu"]))?;
        let mut path = work.join("newer-qemu/bin").into_os_string();
        if let Some(others) = env::var_os("PATH") {
            path.push(":");
            path.push(others);
        }
        Ok(path)
    }

    /// Where the program `name` is.
    pub(crate) fn path(&self, name: &str) -> Utf8PathBuf {
        self.directory.join(name)
    }

    /// The program `name`, to be started in the root of the `repository`.
    pub(crate) fn command(&self, name: &str, repository: &Repository) -> Command {
        let mut command = Command::new(self.path(name));
        command.current_dir(&repository.root);
        command
    }

    /// The example `name`.
    pub(crate) fn example(&self, name: &str, repository: &Repository) -> Command {
        self.command(&format!("examples/{name}"), repository)
    }
}

/// Options handed on to the program that a command starts.
#[derive(Args, Clone, Debug)]
pub(crate) struct Passed {
    /// Options of the program; `--help` names them.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "OPTION"
    )]
    options: Vec<String>,
}

impl Passed {
    pub(crate) fn options(&self) -> Vec<&str> {
        self.options.iter().map(String::as_str).collect()
    }
}
