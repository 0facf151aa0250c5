//! `dmaspace numa`: what to build on which node, and what a simulation says of it.

use std::path::{Path, PathBuf};

use crate::numa::{GuestError, GuestTopology, MOST_MEMORY, Plan, SimulateError};
use anyhow::anyhow;
use clap::{Subcommand, ValueEnum};
use dmaspace::devices::Places;
use dmaspace::topology::{Topology, TopologyError};
use lab::study::{self, HeatMap, Study, Traffic};
use serde::Serialize;

use super::plan::REACH;
use super::{simulate, svg as numa_svg, text as numa};
use crate::draw::sheet::Paint;
use crate::stop::Stop;
use crate::target::Target;
use crate::{exit, fail, json, print, refuse, size};

#[derive(Debug, Subcommand)]
pub(crate) enum NumaCommand {
    /// Show nodes, units and devices, and the domains and tables that each policy would build.
    #[command(
        long_about = "Reads the memory node of each PCI device and IOMMU unit from the machine or from a \
            file. For each placement policy (one table for all, one on each node, one on a given node) \
            it shows the domains, the bytes of their tables on each node, the entries that a map of all \
            memory writes, and the predicted bandwidth of each device. Table bytes are exact; bandwidths \
            come from a formula with simulated, published or assumed values (docs/numa.md). Opens and \
            changes nothing.\n\n\
            With --emit it prints the configuration of a guest instead: with the host's nodes, its \
            memory in huge pages, and its memory and processors bound to those of the host.\n\n\
            Exit status: 0; 1 when the machine cannot be read; 2 when an option cannot be satisfied, or \
            the result cannot be written.",
        after_long_help = "Examples:\n  \
            dmaspace numa plan\n  \
            dmaspace numa plan --topology two-sockets.toml --memory 512G --svg plan.svg\n  \
            dmaspace numa plan --emit qemu --memory 16G --viommu"
    )]
    Plan(PlanArgs),
    /// Simulate a load with each leaf size, and with one table or one per node.
    #[command(
        long_about = "Simulates DMA of all devices through the machine's IOMMU units at the same time, \
            on tables that the engine builds: bytes a second with leaves of 4 KiB, 2 MiB and 1 GiB, with \
            one table for all and with one per node, and the change with the largest gain. Measures, \
            opens and changes nothing.\n\n\
            With --published it compares the simulation with published measurements instead: pcie-bench \
            (random reads by window) and an allreduce on machines of two sockets. Each input is \
            published, fitted or assumed; a row that an input was fitted to does not count as \
            reproduced; each assumed input is varied, by 20 % up and down or to another count. A second \
            table shows for which leaves, nodes and traffic a table per node pays. This takes a few \
            seconds.\n\n\
            Exit status: 0; 1 when a published row that counts is not reproduced, or the machine \
            cannot be read; 2 when no unit translates for a device, or the result cannot be \
            written.",
        after_long_help = "Examples:\n  \
            dmaspace numa simulate\n  \
            dmaspace numa simulate --topology two-sockets.toml --traffic random\n  \
            dmaspace numa simulate --published --svg heat.svg"
    )]
    Simulate(SimulateArgs),
}

/// The options of `dmaspace numa plan`.
#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// Plan for the machine of FILE [default: this machine]
    ///
    /// TOML with [[node]], [[unit]] and [[device]]; see docs/numa.md.
    ///
    /// Example: --topology two-sockets.toml
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,

    /// Memory that all devices reach [default: that of all nodes]
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024); at most 256T. With --emit that of the guest.
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
    #[arg(long, conflicts_with_all = ["emit", "viommu", "no_bind", "huge_pages"])]
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

    /// Do not bind the guest's memory and processors to nodes of the host
    ///
    /// The guest's nodes are then not those of the host, and its pages are small: for tests on hosts with
    /// fewer nodes.
    ///
    /// Example: --no-bind
    #[arg(long, requires = "emit")]
    no_bind: bool,

    /// Huge pages of the guest's memory [default: 2m]
    ///
    /// They come from the pools of the host's nodes; the commands that raise these are printed too.
    ///
    /// Example: --huge-pages 1g
    #[arg(
        long,
        value_name = "SIZE",
        ignore_case = true,
        requires = "emit",
        conflicts_with = "no_bind"
    )]
    huge_pages: Option<HugePages>,
}

/// Of what a guest's memory is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum HugePages {
    /// Huge pages of 2 MiB
    #[value(name = "2m")]
    M2,
    /// Huge pages of 1 GiB
    #[value(name = "1g")]
    G1,
    /// The host's default pages
    None,
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
    /// Simulate the machine of FILE [default: this machine]
    ///
    /// TOML with [[node]], [[unit]] and [[device]]; see docs/numa.md.
    ///
    /// Example: --topology two-sockets.toml
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,

    /// Traffic of the devices
    ///
    /// Example: --traffic random
    #[arg(
        long,
        value_name = "LOAD",
        ignore_case = true,
        default_value = "streams"
    )]
    traffic: Load,

    /// Memory that the traffic covers
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024); at most 64G.
    ///
    /// Example: --memory 16G
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "4G")]
    memory: u64,

    /// Compare the simulation with published measurements
    ///
    /// Example: --published
    #[arg(long, conflicts_with_all = ["topology", "traffic", "memory"])]
    published: bool,

    /// Print what was simulated as JSON
    ///
    /// Names are stable. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.rows[0].bytes_per_second'
    #[arg(long)]
    json: bool,

    /// Draw into FILE where a table per node pays, with 16 devices on 2 to 8 nodes
    ///
    /// The file is written beside its place and moved there when it is whole.
    ///
    /// Example: --svg heat.svg
    #[arg(long, value_name = "FILE", requires = "published")]
    svg: Option<PathBuf>,
}

/// What devices do, simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Load {
    /// Each device reads 16 buffers of 4 MiB in sequence, one page at a time
    Streams,
    /// Each device has 64 reads of 512 bytes in flight, at random addresses
    Random,
}

/// What was published, simulated.
#[derive(Serialize)]
pub(crate) struct Published {
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
        NumaCommand::Simulate(args) => simulated(args),
    }
}

/// The machine of a file, or this one; else the exit status, and why is said.
fn machine(file: Option<&Path>) -> Result<Topology, u8> {
    let Some(path) = file else {
        return Topology::read(&Places::default()).map_err(|error| fail(&error, exit::WRONG));
    };
    Topology::load(path).map_err(|error| match error {
        // Names the file itself.
        error @ TopologyError::Read { .. } => refuse(&error.into()),
        error => refuse(&anyhow::Error::new(error).context(path.display().to_string())),
    })
}

fn plan(args: &PlanArgs) -> u8 {
    let target = match args.svg.as_deref().map(Target::new).transpose() {
        Ok(target) => target,
        Err(error) => return refuse(&error),
    };
    let topology = match machine(args.topology.as_deref()) {
        Ok(topology) => topology,
        Err(status) => return status,
    };
    let memory = match args.memory.unwrap_or_else(|| topology.memory_bytes()) {
        0 => {
            let why = "no node is known to have memory: say how much with --memory SIZE";
            return refuse(&anyhow::anyhow!(why));
        }
        memory if memory > REACH => {
            let (memory, most) = (size::bytes(memory), size::bytes(REACH));
            return refuse(&anyhow!(
                "{memory} are more than tables of 4 levels map: --memory is at most {most}"
            ));
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
    let huge_bytes = match args.huge_pages {
        _ if args.no_bind => None,
        Some(HugePages::None) => None,
        None | Some(HugePages::M2) => Some(2 << 20),
        Some(HugePages::G1) => Some(1 << 30),
    };
    let guest = GuestTopology::new(topology, memory, huge_bytes);
    let mut guest = guest.map_err(|error| match error {
        GuestError::NoNodes => anyhow!("{error}; --topology FILE describes a machine that has"),
        GuestError::HugePages { .. } => anyhow!("{error}: choose another --memory or --huge-pages"),
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
            let notes = guest.qemu_notes().into_iter().map(|note| note + "\n");
            lines.join(" \\\n") + "\n" + &notes.collect::<String>()
        }
    })
}

fn simulated(args: &SimulateArgs) -> u8 {
    if args.published {
        return published(args);
    }
    if args.memory > MOST_MEMORY {
        return refuse(&anyhow!("--memory is at most {}", size::bytes(MOST_MEMORY)));
    }
    let topology = match machine(args.topology.as_deref()) {
        Ok(topology) => topology,
        Err(status) => return status,
    };
    let traffic = match args.traffic {
        Load::Streams => Traffic::Streams,
        Load::Random => Traffic::Random,
    };
    let simulated = match simulate(&topology, traffic, args.memory) {
        Ok(simulated) => simulated,
        Err(error @ SimulateError::NoUnits) => return refuse(&error.into()),
        Err(error) => return fail(&error, exit::WRONG),
    };
    let text = match args.json {
        true => json(&simulated).map_err(Into::into),
        false => Ok(numa::simulated(&simulated, Paint::for_stdout())),
    };
    match text.and_then(|text| print(&text)) {
        Ok(()) => exit::RIGHT,
        Err(error) => refuse(&error),
    }
}

fn published(args: &SimulateArgs) -> u8 {
    let target = match args.svg.as_deref().map(Target::new).transpose() {
        Ok(target) => target,
        Err(error) => return refuse(&error),
    };
    let simulated = || {
        Ok::<_, study::StudyError>(Published {
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
        numa::published(&simulated, Paint::for_stdout())
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
