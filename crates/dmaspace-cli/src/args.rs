//! The command line and its help.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::balloon::{self, BalloonArgs};
use crate::check::{self, CheckArgs};
use crate::devices::DevicesArgs;
use crate::explain::{self, ExplainArgs};
use crate::inspect::InspectArgs;
use crate::numa::{self, NumaArgs};
use crate::tables::TablesCommand;

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "dmaspace",
    version,
    about = "Device memory: pinned, charged, mapped and checked in runs, never page by page",
    after_help = "Faults or a failed start: dmaspace explain\n\
        A slow start: dmaspace inspect\n\
        A test of this program: dmaspace check",
    arg_required_else_help = true,
    infer_subcommands = true
)]
pub(crate) struct Args {
    /// Log to stderr; RUST_LOG sets the filter.
    #[arg(short, long, global = true, display_order = 100)]
    pub(crate) verbose: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Map real memory for devices, run every operation during DMA, and check every byte.
    #[command(long_about = check::ABOUT, after_long_help = check::EXAMPLES)]
    Check(CheckArgs),
    /// List PCI devices: group, driver, node, unit, and whether and how each could be used.
    #[command(
        long_about = "Lists the machine's PCI devices with group, IOMMU unit, memory node and driver, \
            shows whether each is ready for passthrough and why not, and prints the commands that bind \
            it. An IOMMU group is never divided, so all its devices are listed. Opens and changes \
            nothing.\n\n\
            Exit status: 0; 1 when the kernel's list cannot be read; 2 when the result cannot be \
            written.",
        after_long_help = "Examples:\n  \
            dmaspace devices\n  \
            dmaspace devices --json | jq '.devices[] | select(.state == \"ready\").address'"
    )]
    Devices(DevicesArgs),
    /// Serve a balloon to a vhost-user monitor.
    #[command(long_about = balloon::ABOUT, after_long_help = balloon::EXAMPLES)]
    Balloon(BalloonArgs),
    /// Read I/O page tables from a file: list, explain, check, compare, draw.
    #[command(
        subcommand,
        long_about = "Reads I/O page tables from a file: an image of tables (written by `tables image` \
            or the library), a memory dump (QEMU's pmemsave, a crash dump) with --format, --root and \
            --offset, or the kernel's text of VT-d tables in debugfs. The reader follows the \
            specifications and shares no code with the engine's writers; damaged and \
            hostile files are safe to read.\n\n\
            Exit status: 0; 1 when `check` or `diff` find something, or the image is damaged; 2 when the \
            file cannot be read or an option does not apply.",
        after_long_help = "Examples:\n  \
            dmaspace tables image tables.img --map 1G:64M:4G\n  \
            dmaspace tables dump tables.img\n  \
            dmaspace tables walk memory.bin 0x40001000 --format vtd-ss --root 0x10a3000\n  \
            dmaspace tables check tables.img\n  \
            dmaspace tables diff before.img after.img\n  \
            dmaspace tables picture before.img after.img --svg tables.svg"
    )]
    Tables(TablesCommand),
    /// Show nodes, units and devices, and the domains and tables that each policy would build.
    #[command(long_about = numa::ABOUT, after_long_help = numa::EXAMPLES)]
    Numa(NumaArgs),
    /// Predict how long the kernel takes to map a virtual machine's memory, and which setting helps.
    #[command(
        long_about = "Finds the guest RAM of a running virtual machine (--pid), or reads QEMU's command \
            line (--qemu) or libvirt's XML (--libvirt). Reports the backing of this memory and how much \
            of it is present, and estimates how long the kernel takes to fault in, zero, pin and map it \
            for a device, with VFIO type 1 and with iommufd: with the current settings, and after each \
            change that helps, with its line for QEMU, libvirt or the shell. The calibration for the \
            estimate takes some hundred milliseconds. --pid also accepts processes that are not virtual \
            machines.\n\n\
            Stops and changes nothing. Facts that require a missing privilege are left out and listed.\n\n\
            Exit status: 0; 2 when an option is wrong, the process does not exist, may not be inspected or \
            has no memory of its own, or the configuration cannot be parsed.",
        after_long_help = "Examples:\n  \
            dmaspace inspect --pid $(pidof -s qemu-system-x86_64)\n  \
            dmaspace inspect --pid 4711 --json | jq '.advice[0]'\n  \
            dmaspace inspect --qemu \"qemu-system-x86_64 -m 64G -device vfio-pci,host=01:00.0\"\n  \
            dmaspace inspect --libvirt domain.xml"
    )]
    Inspect(InspectArgs),
    /// From logs, tables and listings of any machine to the cause and the setting that helps.
    #[command(long_about = explain::ABOUT, after_long_help = explain::EXAMPLES)]
    Explain(ExplainArgs),
    /// Write man pages and shell completions, for packagers.
    #[command(hide = true)]
    Manuals {
        /// Directory to write to, as `share` of an installation
        directory: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_holds_together() {
        Args::command().debug_assert();
    }

    /// The commands that do something, by their whole names.
    fn commands(command: &clap::Command, name: &str) -> Vec<(String, clap::Command)> {
        let nested = command.get_subcommands();
        let all = nested.flat_map(|nested| {
            let name = format!("{name} {}", nested.get_name());
            match nested.has_subcommands() {
                true => commands(nested, &name),
                false => vec![(name, nested.clone())],
            }
        });
        all.collect()
    }

    #[test]
    fn every_option_is_explained_with_an_example() {
        let commands = commands(&Args::command(), "dmaspace");
        assert!(commands.len() > 8, "{}", commands.len());
        for (name, command) in &commands {
            for option in command.get_arguments() {
                let Some(long) = option.get_long() else {
                    continue;
                };
                let help = option.get_long_help().unwrap_or_default().to_string();
                assert!(
                    help.contains(&format!("Example: --{long}")),
                    "{name} --{long}: {help}"
                );
            }
        }
    }
}
