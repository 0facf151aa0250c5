//! The command line: commands, reports, exit statuses.
//!
//! For the program, which calls [`run`], and for packagers, who make man pages and completions of [`command`]:
//!
//! ```
//! let command = dmaspace_cli::command();
//! let mut names = command.get_subcommands().map(|command| command.get_name());
//! assert!(names.any(|name| name == "map"));
//! ```
//!
//! Results go to stdout, everything else to stderr, as one sentence. A reader that leaves early
//! (`dmaspace map | head`) is no error.

#![forbid(unsafe_code)]

mod args;
mod balloon;
mod balloon_guest;
mod bench;
mod inspect;
mod life;
mod numa;
mod progress;
mod report;
mod size;
mod stop;
mod tables;
mod target;

use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser};
use dmaspace::devices::{DevicesReport, Places};
use dmaspace::map::{JobError, MapReport};
use dmaspace::pool::{keep, keep_by};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use args::{Args, Command, DevicesArgs, MapArgs};
use progress::Progress;
use report::Verdict;
use report::sheet::Paint;
use stop::Stop;
use target::Target;

/// Exit statuses.
mod exit {
    /// All was right.
    pub(crate) const RIGHT: u8 = 0;
    /// Something is wrong: with the memory, the machine or this program.
    pub(crate) const WRONG: u8 = 1;
    /// What was asked for cannot be had, or its result cannot be written.
    pub(crate) const INPUT: u8 = 2;
    /// A signal ended it; what a shell reports for SIGINT.
    pub(crate) const INTERRUPTED: u8 = 130;
}

/// The hidden command by which this program keeps a pool of huge pages.
const KEEPER: &str = "pool-keeper";

/// What the command line takes.
pub fn command() -> clap::Command {
    Args::command()
}

/// Does what this process's arguments say, and tells how it went.
pub fn run() -> ExitCode {
    let status = match Args::try_parse() {
        Err(error) => explain(&error),
        Ok(args) => {
            listen(args.verbose);
            // Without it pools are raised all the same, but stay raised when this process is killed.
            this_program(KEEPER).into_iter().for_each(keep_by);
            match args.command {
                Command::Map(map_args) => map(&map_args, args.verbose),
                Command::Life(life_args) => life::run(&life_args, args.verbose),
                Command::LifeSuccessor => life::succeed_here(),
                Command::PoolKeeper => keep_here(),
                Command::Devices(devices_args) => devices(&devices_args),
                Command::Balloon(balloon_args) => balloon::run(&balloon_args, args.verbose),
                Command::BalloonGuest(guest_args) => balloon_guest::run(&guest_args),
                Command::Bench(bench_args) => bench::run(&bench_args, args.verbose),
                Command::Tables(command) => tables::run(&command),
                Command::Numa(command) => numa::run(&command),
                Command::Inspect(inspect_args) => inspect::run(&inspect_args),
            }
        }
    };
    ExitCode::from(status)
}

/// This program, to be started with a hidden command.
fn this_program(command: &str) -> anyhow::Result<Vec<OsString>> {
    let program = env::current_exe().context("cannot find this program")?;
    Ok(vec![program.into(), command.into()])
}

/// Keeps a pool for the process at the other end of standard input and output.
fn keep_here() -> u8 {
    // Whoever sends signals to all of us means the other process: only its end counts.
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    match stop.shielded(|| keep(io::stdin(), io::stdout())).0 {
        Ok(()) => exit::RIGHT,
        Err(error) => fail(&error, exit::WRONG),
    }
}

/// `dmaspace map`.
fn map(args: &MapArgs, verbose: bool) -> u8 {
    let job = match args.job() {
        Ok(job) => job,
        Err(error) => return refuse(&error),
    };
    let target = match args.svg.as_deref().map(Target::new).transpose() {
        Ok(target) => target,
        Err(error) => return refuse(&error),
    };
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let bar = io::stderr().is_terminal() && !verbose;
    let (result, asked) = stop.shielded(|| {
        let mut progress = Progress::new(stop.clone(), bar);
        job.run(&mut progress)
    });
    let report = match (result, asked) {
        (Err(JobError::Interrupted), _) | (Ok(_), true) => {
            // Whoever asked it to stop means it, even if the job was done by then.
            return fail(&JobError::Interrupted, exit::INTERRUPTED);
        }
        (Err(error), true) => {
            // A signal makes the kernel give up, too: it adds fewer huge pages than asked for.
            say(&format!("interrupted: {}", sentence(&error)));
            return exit::INTERRUPTED;
        }
        (Err(error), false) if error.is_input() => return fail(&error, exit::INPUT),
        (Err(error), false) => return fail(&error, exit::WRONG),
        (Ok(report), false) => report,
    };
    tell(args, target, &stop, &report)
}

/// `dmaspace devices`.
fn devices(args: &DevicesArgs) -> u8 {
    let report = match DevicesReport::read(&Places::default()) {
        Ok(report) => report,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let text = if args.json {
        match json(&report) {
            Ok(json) => json,
            Err(error) => return fail(&error, exit::WRONG),
        }
    } else {
        report::devices::write(&report, Paint::for_stdout())
    };
    match print(&text) {
        Ok(()) => exit::RIGHT,
        Err(error) => refuse(&error),
    }
}

/// Writes what was found. A wrong byte outranks a full disk in the exit status.
fn tell(args: &MapArgs, target: Option<Target>, stop: &Stop, report: &MapReport) -> u8 {
    let drawn = target.map_or(Ok(()), |target| {
        target.write(&report::svg::draw(report), stop)
    });
    let text = if args.json {
        match json(report) {
            Ok(json) => json,
            Err(error) => return fail(&error, exit::WRONG),
        }
    } else {
        report::text::write(report, Paint::for_stdout())
    };
    let mut written = true;
    for result in [drawn, print(&text)] {
        if let Err(error) = result {
            refuse(&error);
            written = false;
        }
    }
    status(report, written)
}

/// The exit status of a job that came to its end.
fn status(report: &MapReport, written: bool) -> u8 {
    match Verdict::of(report) {
        Verdict::Wrong(_) => exit::WRONG,
        Verdict::Right | Verdict::Unchecked(_) if !written => exit::INPUT,
        Verdict::Right | Verdict::Unchecked(_) => exit::RIGHT,
    }
}

/// A report for programs.
fn json(report: &impl serde::Serialize) -> serde_json::Result<String> {
    serde_json::to_string_pretty(report).map(|json| json + "\n")
}

/// Prints to stdout; a reader that has left wants no more, which is fine.
fn print(text: &str) -> anyhow::Result<()> {
    tell_on(text).map(drop)
}

/// Prints to stdout; false when the reader has left.
fn tell_on(text: &str) -> anyhow::Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(anyhow::Error::new(error).context("cannot write to standard output")),
    }
}

/// Help, the version, or what is wrong with the command line.
fn explain(error: &clap::Error) -> u8 {
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

fn refuse(error: &anyhow::Error) -> u8 {
    fail(error.as_ref(), exit::INPUT)
}

fn fail(error: &dyn Error, status: u8) -> u8 {
    say(&sentence(error));
    status
}

/// The whole chain of causes as one sentence.
fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some messages quote their cause already.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

/// A sentence on stderr. If nobody can read it, nobody can be told either.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "dmaspace: {text}");
}

/// Tracing to stderr: what RUST_LOG asks for, or with `-v` all that our own crates tell.
fn listen(verbose: bool) {
    let asked = env::var_os("RUST_LOG").map(OsString::into_string);
    let filter = match asked {
        Some(Ok(directives)) if !directives.is_empty() => directives,
        _ if verbose => ["dmaspace", "ioas", "iommu", "iopt", "hostmem", "runs"]
            .map(|name| format!("{name}=debug"))
            .join(","),
        _ => return,
    };
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::builder()
                .with_default_directive(LevelFilter::OFF.into())
                .parse_lossy(filter),
        )
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // A stderr that is full is no reason to stop.
        .log_internal_errors(false)
        .init();
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn a_wrong_byte_outranks_a_full_disk() {
        let (right, wrong) = (report::samples::huge(), report::samples::synthetic());
        assert_eq!(status(&right, true), exit::RIGHT);
        assert_eq!(status(&right, false), exit::INPUT);
        assert_eq!(status(&wrong, true), exit::WRONG);
        assert_eq!(status(&wrong, false), exit::WRONG);
        let unchecked = report::samples::unchecked();
        assert_eq!(status(&unchecked, true), exit::RIGHT);
        assert_eq!(status(&unchecked, false), exit::INPUT);
    }

    #[test]
    fn a_chain_of_causes_is_one_sentence_without_repetition() {
        let error = anyhow!("the disk is full")
            .context("cannot write: the disk is full")
            .context("cannot draw");
        assert_eq!(
            sentence(error.as_ref()),
            "cannot draw: cannot write: the disk is full"
        );
    }
}
