//! `dmaspace inspect`: what it takes, and what it does with it.

use std::path::PathBuf;

use crate::inspect::{InspectError, MachineReport, inspect};
use anyhow::anyhow;
use clap::{ArgGroup, Args};
use dmaspace::devices::Places;

use super::text as report;
use crate::draw::sheet::Paint;
use crate::stop::Stop;
use crate::target::Target;
use crate::{exit, fail, json, print, refuse};

/// The options of `dmaspace inspect`.
#[derive(Debug, Args)]
// The group that the derive would make has every option in it, and any of them would do.
#[group(skip)]
#[command(group = ArgGroup::new("what").required(true).args(["pid", "machine"]))]
pub(crate) struct InspectArgs {
    /// Look at this process: a virtual machine's monitor, for instance
    ///
    /// Example: --pid $(pidof -s qemu-system-x86_64)
    #[arg(long, value_name = "PID", conflicts_with = "machine",
          value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,

    /// Look at the machine: IOMMU units, groups, kernel options, nodes, counters, faults
    ///
    /// Example: --machine
    #[arg(long)]
    machine: bool,

    /// Predict no times: try for no moment how fast this machine maps and pins
    ///
    /// Example: --no-times
    #[arg(long, conflicts_with = "machine")]
    no_times: bool,

    /// Print the report as JSON
    ///
    /// Names are stable and end in their unit. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.advice[0]'
    #[arg(long)]
    json: bool,

    /// Draw what is present into FILE, coloured by the size of the pages
    ///
    /// Example: --svg process.svg
    #[arg(long, value_name = "FILE", conflicts_with = "machine")]
    svg: Option<PathBuf>,
}

/// `dmaspace inspect`.
pub(crate) fn run(args: &InspectArgs) -> u8 {
    let done = match args.pid {
        Some(pid) => process(args, pid),
        None => machine(args),
    };
    match done {
        Ok(()) => exit::RIGHT,
        Err(error) if error.is::<InspectError>() => fail(error.as_ref(), exit::INPUT),
        Err(error) => refuse(&error),
    }
}

fn process(args: &InspectArgs, pid: u32) -> anyhow::Result<()> {
    let target = args.svg.as_deref().map(Target::new).transpose()?;
    let found = inspect(pid, !args.no_times)?;
    if let Some(target) = target {
        let stop = Stop::on_signals().map_err(|error| anyhow!(error))?;
        target.write(&report::picture(&found), &stop)?;
    }
    print(&if args.json {
        json(&found)?
    } else {
        report::process(&found, Paint::for_stdout())
    })
}

fn machine(args: &InspectArgs) -> anyhow::Result<()> {
    let found = MachineReport::read(&Places::default(), "/proc".as_ref())?;
    print(&if args.json {
        json(&found)?
    } else {
        report::machine(&found, Paint::for_stdout())
    })
}
