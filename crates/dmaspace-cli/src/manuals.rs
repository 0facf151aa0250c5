//! `dmaspace manuals`, a hidden command for packagers: man pages and shell completions, as `share` of an installation has them.

use std::path::Path;
use std::{fs, io};

use anyhow::Context as _;
use clap::Command;
use clap_complete::Shell;

use crate::output::{exit, refuse};

pub(crate) fn run(directory: &Path, command: Command) -> u8 {
    let written = write(directory, command);
    match written.with_context(|| format!("cannot write to {}", directory.display())) {
        Ok(()) => exit::RIGHT,
        Err(error) => refuse(&error),
    }
}

/// Writes a page for each command, and a script for each shell.
fn write(share: &Path, mut command: Command) -> io::Result<()> {
    let pages = share.join("man/man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(command.clone(), &pages)?;
    for (shell, scripts) in [
        (Shell::Bash, "bash-completion/completions"),
        (Shell::Zsh, "zsh/site-functions"),
        (Shell::Fish, "fish/vendor_completions.d"),
    ] {
        let scripts = share.join(scripts);
        fs::create_dir_all(&scripts)?;
        clap_complete::generate_to(shell, &mut command, "dmaspace", scripts)?;
    }
    Ok(())
}
