//! Writes man pages and shell completions, for `cargo xtask install`.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::{env, fs, io};

use clap_complete::Shell;

fn main() -> ExitCode {
    let [directory] = &env::args_os().skip(1).collect::<Vec<OsString>>()[..] else {
        eprintln!("manuals takes the directory to write to");
        return ExitCode::from(2);
    };
    match write(Path::new(directory)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("manuals: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A page for each command and a script for each shell, where they lie below `share`.
pub(crate) fn write(share: &Path) -> io::Result<()> {
    let pages = share.join("man/man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(dmaspace_cli::command(), &pages)?;
    for (shell, scripts) in [
        (Shell::Bash, "bash-completion/completions"),
        (Shell::Zsh, "zsh/site-functions"),
        (Shell::Fish, "fish/vendor_completions.d"),
    ] {
        let (mut command, scripts) = (dmaspace_cli::command(), share.join(scripts));
        fs::create_dir_all(&scripts)?;
        clap_complete::generate_to(shell, &mut command, "dmaspace", scripts)?;
    }
    Ok(())
}
