//! Writes man pages and shell completions: `cargo xtask manuals`.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::{env, fs, io};

use clap::ValueEnum as _;
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

/// A page for each command below `man`, a script for each shell below `completions`.
pub(crate) fn write(directory: &Path) -> io::Result<()> {
    let (pages, scripts) = (directory.join("man"), directory.join("completions"));
    fs::create_dir_all(&pages)?;
    fs::create_dir_all(&scripts)?;
    clap_mangen::generate_to(dmaspace_cli::command(), &pages)?;
    for shell in Shell::value_variants() {
        let mut command = dmaspace_cli::command();
        clap_complete::generate_to(*shell, &mut command, "dmaspace", &scripts)?;
    }
    Ok(())
}
