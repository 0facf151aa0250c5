//! `dmaspace numa`: the plan of a machine, or a guest with its nodes.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::ValueEnum;
use dmaspace::devices::Places;
use dmaspace::topology::{Topology, TopologyError};

use super::plan::REACH;
use super::text as numa;
use crate::draw::sheet::Paint;
use crate::json::json;
use crate::numa::{GuestError, GuestTopology, Plan};
use crate::output::{exit, fail, print, refuse};
use crate::size;

pub(crate) const ABOUT: &str = "Reads the memory node of each PCI device and IOMMU unit from the machine or from a file. For each \
    placement policy (one table for all, one on each node, one on a given node) it shows the domains, the \
    bytes of their tables on each node, the entries that a map of all memory writes, and the predicted \
    bandwidth of each device. Table bytes are exact; bandwidths come from a formula with simulated, \
    published or assumed values (docs/numa.md). Opens and changes nothing.\n\n\
    With --emit it prints the configuration of a guest instead: with the host's nodes, its memory in huge \
    pages, and its memory and processors bound to those of the host.\n\n\
    Exit status: 0; 1 when the machine cannot be read; 2 when an option cannot be satisfied, or the result \
    cannot be written.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
    dmaspace numa\n  \
    dmaspace numa --topology two-sockets.toml --memory 512G\n  \
    dmaspace numa --emit qemu --memory 16G --viommu";

/// The options of `dmaspace numa`.
#[derive(Debug, clap::Args)]
pub(crate) struct NumaArgs {
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
    // Options that require --emit are not refused for it where --json keeps that out.
    #[arg(long, conflicts_with_all = ["emit", "viommu", "no_bind", "huge_pages"])]
    json: bool,

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

/// Pages of a guest's memory.
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

/// `dmaspace numa`.
pub(crate) fn run(args: &NumaArgs) -> u8 {
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
    match text.and_then(|text| print(&text)) {
        Ok(()) => exit::RIGHT,
        Err(error) => refuse(&error),
    }
}

fn guest(args: &NumaArgs, emit: Emit, topology: &Topology, memory: u64) -> anyhow::Result<String> {
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
