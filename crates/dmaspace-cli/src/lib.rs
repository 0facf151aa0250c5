//! The command line: commands, reports, exit statuses.
//!
//! For the program, which calls [`run`]; tests read [`command`]:
//!
//! ```
//! let command = dmaspace_cli::command();
//! let mut names = command.get_subcommands().map(|command| command.get_name());
//! assert!(names.any(|name| name == "check"));
//! ```
//!
//! Results go to stdout, everything else to stderr, as one sentence. A reader that leaves early
//! (`dmaspace check | head`) is no error.

#![forbid(unsafe_code)]

mod args;
mod balloon;
mod check;
mod devices;
mod draw;
mod explain;
mod inspect;
mod json;
mod manuals;
mod numa;
mod output;
mod pool;
mod private;
mod size;
mod stop;
mod tables;
mod target;
#[cfg(test)]
#[path = "../../dmaspace/tests/machines/files.rs"]
#[allow(dead_code, reason = "the tests of the library use the rest")]
mod test_files;

/// Parsers of any bytes, and explained walks by the thousand, for the fuzz targets.
#[doc(hidden)]
pub mod inside {
    pub use crate::explain::{explain_bytes, explain_machine};
    pub use crate::inspect::{Host, areas, configured, libvirt, node_bytes, of_areas, qemu_line};
    pub use crate::numa::{GuestTopology, Plan};
    pub use crate::tables::{
        InDump, KernelTextError, Limits, Outcome, TableFile, Tables, diff, explain, survey,
    };
}

use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use args::{Args, Command};
use draw::terminal;
use output::{exit, refuse, say};

/// The definition of the command line.
pub fn command() -> clap::Command {
    Args::command()
}

/// Runs the command of this process's arguments, and returns its exit status.
pub fn run() -> ExitCode {
    let asked = command().term_width(terminal::columns()).try_get_matches();
    let status = match asked.and_then(|matches| Args::from_arg_matches(&matches)) {
        Err(error) => help(&error),
        Ok(args) => {
            listen(args.verbose);
            match args.command {
                Command::Check(check_args) => check::run(&check_args, args.verbose),
                Command::Devices(devices_args) => devices::run(&devices_args),
                Command::Balloon(balloon_args) => balloon::run(&balloon_args, args.verbose),
                Command::Tables(command) => tables::run(&command),
                Command::Numa(numa_args) => numa::run(&numa_args),
                Command::Inspect(inspect_args) => inspect::run(&inspect_args),
                Command::Explain(explain_args) => explain::run(&explain_args),
                Command::Manuals { directory } => manuals::run(&directory, command()),
            }
        }
    };
    ExitCode::from(status)
}

/// Help, the version, or what is wrong with the command line.
fn help(error: &clap::Error) -> u8 {
    let printed = match error.print() {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.and_then(|()| io::stdout().flush()),
    };
    match printed {
        Err(error) => refuse(&anyhow::Error::new(error).context("cannot write the help")),
        Ok(()) if error.use_stderr() => exit::INPUT,
        Ok(()) => exit::RIGHT,
    }
}

/// Tracing to stderr: what RUST_LOG asks for, or with `-v` what our own crates log. RUST_LOG has levels by
/// crate or module; those by span or field would cost the program three crates and a twentieth of its build.
fn listen(verbose: bool) {
    let asked = env::var_os("RUST_LOG").map(OsString::into_string);
    let filter = match asked {
        Some(Ok(directives)) if !directives.is_empty() => directives,
        _ if verbose => ["dmaspace", "ioas", "iommu", "iopt", "hostmem", "runs"]
            .map(|name| format!("{name}=debug"))
            .join(","),
        _ => return,
    };
    let filter = match filter.parse::<Targets>() {
        Ok(filter) => filter,
        Err(error) => return say(&format!("RUST_LOG={filter} is ignored: {error}")),
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // A stderr that is full is no reason to stop.
        .log_internal_errors(false);
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .init();
}
