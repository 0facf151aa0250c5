//! `dmaspace numa`: what to build on which node, what a simulation says of it, and what is measured.

use std::path::PathBuf;

use crate::numa::{GuestError, GuestTopology, Measurement, Plan};
use anyhow::anyhow;
use clap::{Subcommand, ValueEnum};
use dmaspace::devices::Places;
use dmaspace::topology::{Topology, TopologyError};
use lab::study::{self, HeatMap, Study};
use serde::Serialize;

use super::measure::text as numa_measure;
use super::{svg as numa_svg, text as numa};
use crate::draw::sheet::Paint;
use crate::stop::Stop;
use crate::target::Target;
use crate::{exit, fail, json, print, refuse, size};

#[derive(Debug, Subcommand)]
pub(crate) enum NumaCommand {
    /// Show nodes, units and devices, and the domains and tables that each policy would build.
    #[command(
        long_about = "Reads which memory node each PCI device and IOMMU unit of the machine is on, \
            or takes it from a file, and shows for each policy of placement (one table for all, \
            one on each node, one on a given node) the domains that it would build, what their \
            tables take on each node, how many entries a map of all memory writes, and what each \
            device is predicted to get. Table bytes are exact; what devices get comes from a \
            formula with values that are simulated, published or assumed (docs/numa.md). Nothing \
            is opened or changed.\n\n\
            With --emit it prints the other way out instead: a guest that knows the nodes.\n\n\
            Exit status: 0; 1 when the machine cannot be read; 2 when what was asked for cannot be \
            had, or the result cannot be written.",
        after_long_help = "Examples:\n  \
            dmaspace numa plan\n  \
            dmaspace numa plan --topology two-sockets.toml --memory 512G --svg plan.svg\n  \
            dmaspace numa plan --emit qemu --memory 16G --viommu"
    )]
    Plan(PlanArgs),
    /// Simulate what was published of IOMMUs and nodes, and where a table on each node pays.
    #[command(
        long_about = "Simulates devices that do DMA through IOMMU units with caches, on tables \
            that the engine really builds, and shows what comes out beside what was published: \
            pcie-bench (random reads by window) and the allreduce on machines of two sockets \
            before and after they had a table on each node. Each input is published, fitted or \
            assumed; a row that an input was fitted to does not count as reproduced; each assumed \
            input is varied, by 20 % up and down or to another count. Then which leaves, nodes and traffic make a table \
            on each node pay. All of it is simulated, nothing measured, and the same on every \
            machine.\n\n\
            Exit status: 0; 1 when a row that counts is not reproduced; 2 when the result cannot \
            be written.",
        after_long_help = "Examples:\n  \
            dmaspace numa simulate\n  \
            dmaspace numa simulate --json | jq '.studies[].rows'\n  \
            dmaspace numa simulate --svg heat.svg"
    )]
    Simulate(SimulateArgs),
    /// Measure what walks of page tables take on this machine, near and far.
    #[command(
        long_about = "Fills page tables on each memory node, asks the kernel page by page whether \
            they lie there, and walks them from processors of each node: dependent reads, with \
            caches emptied before each sample. Shows the median and the spread of a walk and of a \
            read for each pair of nodes. With --device also what DMA takes by that device, through \
            tables that the kernel makes for it, and for the devices of other nodes that were named. \
            On a machine with one node there is nothing to compare: it says so and ends.\n\n\
            Exit status: 0; 1 when something went wrong, or a device has read or written a wrong \
            byte; 2 when a device cannot be used, or the result cannot be written.",
        after_long_help = "Examples:\n  \
            dmaspace numa measure\n  \
            dmaspace numa measure --json | jq '.walks[].memory.median_ns'\n  \
            dmaspace numa measure --device 0000:17:00.0 --device 0000:b1:00.0"
    )]
    Measure(MeasureArgs),
}

/// The options of `dmaspace numa plan`.
#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// Plan for the machine of FILE [default: this machine]
    ///
    /// TOML with [[node]], [[unit]] and [[device]]; docs/numa.md has all of it.
    ///
    /// Example: --topology two-sockets.toml
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,

    /// How much memory all devices reach [default: that of all nodes]
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024). With --emit that of the guest.
    ///
    /// Example: --memory 512G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,

    /// Print the plan as JSON
    ///
    /// Names are stable. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.policies[].domains'
    // What requires --emit is not refused for it where --json keeps that out.
    #[arg(long, conflicts_with_all = ["emit", "viommu", "no_bind"])]
    json: bool,

    /// Draw nodes, devices and tables into FILE
    ///
    /// The file is written beside its place and moved there when it is whole.
    ///
    /// Example: --svg plan.svg
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Print a guest with the same nodes instead of the plan
    ///
    /// Memory nodes, bound to the host's, and for each node a root bus with its devices.
    ///
    /// Example: --emit qemu
    #[arg(long, value_name = "FOR", ignore_case = true)]
    emit: Option<Emit>,

    /// Give the guest an IOMMU
    ///
    /// Example: --viommu
    #[arg(long, requires = "emit")]
    viommu: bool,

    /// Do not bind the guest's memory to nodes of the host
    ///
    /// The guest then only believes in its nodes: for tests on hosts that have fewer.
    ///
    /// Example: --no-bind
    #[arg(long, requires = "emit")]
    no_bind: bool,
}

/// For whom a guest is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Emit {
    /// Arguments for qemu-system-x86_64
    Qemu,
    /// Elements of libvirt's <domain>
    Libvirt,
}

/// The options of `dmaspace numa simulate`.
#[derive(Debug, clap::Args)]
pub(crate) struct SimulateArgs {
    /// Print what was simulated as JSON
    ///
    /// Names are stable. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.heat_map.cells'
    #[arg(long)]
    json: bool,

    /// Draw into FILE where a table on each node pays
    ///
    /// The file is written beside its place and moved there when it is whole.
    ///
    /// Example: --svg heat.svg
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The options of `dmaspace numa measure`.
#[derive(Debug, clap::Args)]
pub(crate) struct MeasureArgs {
    /// Also have the device at ADDRESS do DMA; may be given several times
    ///
    /// It must be bound to vfio-pci (see `dmaspace devices`), and there must be iommufd. Linux makes
    /// tables on the node of a device: for remote ones name a device of another node, too.
    ///
    /// Example: --device 0000:17:00.0 --device 0000:b1:00.0
    #[arg(long, value_name = "ADDRESS")]
    device: Vec<String>,

    /// Print what was measured as JSON
    ///
    /// Names are stable. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.walks[].memory.median_ns'
    #[arg(long)]
    json: bool,
}

/// All that was simulated.
#[derive(Serialize)]
pub(crate) struct Simulated {
    /// What this is: so that nobody takes it for measured.
    pub(crate) label: &'static str,
    /// What was published, simulated.
    pub(crate) studies: Vec<Study>,
    /// Where a table on each node pays.
    pub(crate) heat_map: HeatMap,
}

/// `dmaspace numa`.
pub(crate) fn run(command: &NumaCommand) -> u8 {
    match command {
        NumaCommand::Plan(args) => plan(args),
        NumaCommand::Simulate(args) => simulate(args),
        NumaCommand::Measure(args) => measure(args),
    }
}

fn plan(args: &PlanArgs) -> u8 {
    let target = match args.svg.as_deref().map(Target::new).transpose() {
        Ok(target) => target,
        Err(error) => return refuse(&error),
    };
    let topology = match &args.topology {
        Some(path) => Topology::load(path).map_err(|error| match error {
            // Names the file itself.
            error @ TopologyError::Read { .. } => error.into(),
            error => anyhow::Error::new(error).context(path.display().to_string()),
        }),
        None => match Topology::read(&Places::default()) {
            Ok(topology) => Ok(topology),
            Err(error) => return fail(&error, exit::WRONG),
        },
    };
    let topology = match topology {
        Ok(topology) => topology,
        Err(error) => return refuse(&error),
    };
    let memory = match args.memory.unwrap_or_else(|| topology.memory_bytes()) {
        0 => {
            let why = "no node is known to have memory: say how much with --memory SIZE";
            return refuse(&anyhow::anyhow!(why));
        }
        memory => memory,
    };
    let plan = Plan::new(&topology, memory);
    let text = match args.emit {
        Some(emit) => guest(args, emit, &topology, memory),
        None if args.json => json(&plan).map_err(Into::into),
        None => Ok(numa::plan(&plan, Paint::for_stdout())),
    };
    match text {
        Ok(text) => write(&text, target, || numa_svg::plan(&plan)),
        Err(error) => refuse(&error),
    }
}

fn guest(args: &PlanArgs, emit: Emit, topology: &Topology, memory: u64) -> anyhow::Result<String> {
    let mut guest = GuestTopology::new(topology, memory).map_err(|error| match error {
        GuestError::NoNodes => anyhow!("{error}; --topology FILE describes a machine that has"),
        error => error.into(),
    })?;
    guest.viommu = args.viommu;
    guest.bound = !args.no_bind;
    Ok(match emit {
        Emit::Libvirt => guest.libvirt()?,
        Emit::Qemu => {
            // An option and its value on each line, as a shell takes them.
            let arguments = guest.qemu()?;
            let lines: Vec<_> = arguments.chunks(2).map(|pair| pair.join(" ")).collect();
            lines.join(" \\\n") + "\n"
        }
    })
}

fn simulate(args: &SimulateArgs) -> u8 {
    let target = match args.svg.as_deref().map(Target::new).transpose() {
        Ok(target) => target,
        Err(error) => return refuse(&error),
    };
    let simulated = || {
        Ok::<_, study::StudyError>(Simulated {
            label: "simulated",
            studies: vec![study::pcie_bench()?, study::allreduce()?],
            heat_map: study::heat_map()?,
        })
    };
    let simulated = match simulated() {
        Ok(simulated) => simulated,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let text = if args.json {
        match json(&simulated) {
            Ok(json) => json,
            Err(error) => return fail(&error, exit::WRONG),
        }
    } else {
        numa::simulated(&simulated, Paint::for_stdout())
    };
    let draw = || numa_svg::heat_map(&simulated.heat_map);
    match write(&text, target, draw) {
        exit::RIGHT => {
            let rows = simulated.studies.iter().flat_map(Study::counting);
            let mut off = rows.filter(|row| !row.is_reproduced());
            off.next().map_or(exit::RIGHT, |_| exit::WRONG)
        }
        status => status,
    }
}

fn measure(args: &MeasureArgs) -> u8 {
    let machine = Measurement::of_this_machine(&Places::default());
    let report = match machine.and_then(|machine| machine.run(&args.device)) {
        Ok(report) => report,
        Err(error) if error.is_input() => return fail(&error, exit::INPUT),
        Err(error) => return fail(&error, exit::WRONG),
    };
    let text = if args.json {
        match json(&report) {
            Ok(json) => json,
            Err(error) => return fail(&error, exit::WRONG),
        }
    } else {
        numa_measure::write(&report, Paint::for_stdout())
    };
    let printed = print(&text).map_or_else(|error| refuse(&error), |()| exit::RIGHT);
    // A wrong byte outranks a full disk.
    if report.dma.iter().any(|row| row.wrong_bytes > 0) {
        exit::WRONG
    } else {
        printed
    }
}

/// Writes the picture, then the text.
fn write(text: &str, target: Option<Target>, draw: impl FnOnce() -> String) -> u8 {
    let drawn = target.map_or(Ok(()), |target| target.write(&draw(), &Stop::on_signals()?));
    let mut status = exit::RIGHT;
    for result in [drawn, print(text)] {
        if let Err(error) = result {
            status = refuse(&error);
        }
    }
    status
}
