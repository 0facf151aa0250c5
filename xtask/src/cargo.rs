//! The workspace as Cargo describes it, and Cargo as a child process.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use cargo_metadata::{Metadata, MetadataCommand};

/// The repository that this program was built from.
pub(crate) struct Repository {
    /// The directory of the root `Cargo.toml`.
    pub(crate) root: PathBuf,
    /// The answer of `cargo metadata`, without foreign crates.
    pub(crate) metadata: Metadata,
}

impl Repository {
    /// Finds the repository by the place of this crate.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = here.parent().context("xtask lies in no directory")?;
        // Foreign crates are not asked for: what is read here are the members and what each says
        // of its own dependencies, which needs no network and no resolution.
        let metadata = MetadataCommand::new()
            .manifest_path(root.join("Cargo.toml"))
            .no_deps()
            .exec()?;
        Ok(Self {
            root: root.to_owned(),
            metadata,
        })
    }

    /// A Cargo command in the root of the repository.
    pub(crate) fn cargo(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command
            .args(args)
            .current_dir(&self.root)
            .stdin(Stdio::null());
        command
    }
}

/// The Cargo that started this program, so that a toolchain chosen by the user stays chosen.
fn program() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Runs a command to its end, its output going straight through; an error names the command.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let shown = show(command);
    println!("$ {shown}");
    let status = command
        .status()
        .with_context(|| format!("`{shown}` cannot be started"))?;
    ensure!(status.success(), "`{shown}` ended with {status}");
    Ok(())
}

/// True when Cargo has the subcommand: it answers `--version`.
pub(crate) fn has_subcommand(name: &str) -> bool {
    Command::new(program())
        .args([name, "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The command as a person would type it.
pub(crate) fn show(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut words = vec![
        program
            .file_name()
            .unwrap_or(command.get_program())
            .to_string_lossy()
            .into_owned(),
    ];
    words.extend(command.get_args().map(|arg| {
        let arg = arg.to_string_lossy();
        if arg.contains(' ') {
            format!("'{arg}'")
        } else {
            arg.into_owned()
        }
    }));
    words.join(" ")
}
