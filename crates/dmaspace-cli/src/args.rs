//! What the command line takes, and how it explains itself.

use clap::{Parser, Subcommand};

use crate::balloon::{self, BalloonArgs};
use crate::balloon_guest::{self, BalloonGuestArgs};
use crate::bench::{self, BenchArgs};
use crate::devices::DevicesArgs;
use crate::inspect::InspectArgs;
use crate::life::{self, LifeArgs};
use crate::map::MapArgs;
use crate::numa::NumaCommand;
use crate::tables::TablesCommand;

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "dmaspace",
    version,
    about = "Device memory: pinned, charged, mapped and checked in runs, never page by page",
    after_help = "Start with: dmaspace map",
    arg_required_else_help = true,
    infer_subcommands = true,
    disable_help_subcommand = true
)]
pub(crate) struct Args {
    /// Say on stderr what is being done; RUST_LOG picks more finely.
    #[arg(short, long, global = true, display_order = 100)]
    pub(crate) verbose: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Map real memory for devices, let them use it, check every byte, and give it back.
    #[command(
        long_about = "Takes real memory of this process, pins and charges it, finds the physical \
            runs of which it consists, builds I/O page tables over them, attaches devices of a \
            software IOMMU, lets them read and write all of it through the tables, checks every \
            byte, unmaps, gives everything back, and says what happened.\n\n\
            With --backend vfio or iommufd the kernel does it for a device of the machine, which \
            must be bound to vfio-pci (see `dmaspace devices`). Only a device whose registers are \
            known here can be made to do DMA: that is QEMU's `edu` (give it all address bits: \
            -device edu,dma_mask=0xffffffffffffffff), which copies samples. For others memory is \
            only mapped and unmapped, and the report says so.\n\n\
            Exit status: 0 when nothing was found wrong; 1 when a byte was wrong, a device \
            faulted where it must not or did not where it must, or something broke; 2 when what \
            was asked for cannot be had; 130 when interrupted. Whatever happens, nothing stays \
            pinned.",
        after_long_help = "Examples:\n  \
            dmaspace map\n  \
            dmaspace map --size 1G --backing hugetlb-2m --format amdv1\n  \
            dmaspace map --max-leaf 4k --json | jq .times.map_ns\n  \
            dmaspace map --svg layout.svg\n  \
            dmaspace map --placement per-node\n  \
            dmaspace map --backend iommufd --device 0000:00:05.0"
    )]
    Map(MapArgs),
    /// Take a virtual machine's memory through everything, while devices do DMA all the time.
    #[command(long_about = life::ABOUT, after_long_help = life::EXAMPLES)]
    Life(LifeArgs),
    /// Take the address space of a `life` over: what it starts by itself.
    #[command(name = life::SUCCESSOR, hide = true)]
    LifeSuccessor,
    /// Raise a pool of huge pages, and put it back at the end of the input: what `map`, `life` and `bench`
    /// start by themselves.
    #[command(name = crate::pool::KEEPER, hide = true)]
    PoolKeeper,
    /// List PCI devices: group, driver, node, unit, and whether and how each could be used.
    #[command(
        long_about = "Lists the machine's PCI devices with group, IOMMU unit, memory node and \
            driver, says whether and how each can be used, and which commands would bind those \
            that cannot be used yet. An IOMMU group is never divided: all its devices are named. \
            Nothing is opened or changed.\n\n\
            Exit status: 0; 1 when the kernel's list cannot be read; 2 when the result cannot be \
            written.",
        after_long_help = "Examples:\n  \
            dmaspace devices\n  \
            dmaspace devices --json | jq '.devices[] | select(.state == \"ready\").address'"
    )]
    Devices(DevicesArgs),
    /// Be the balloon of a virtual machine whose monitor speaks vhost-user.
    #[command(long_about = balloon::ABOUT, after_long_help = balloon::EXAMPLES)]
    Balloon(BalloonArgs),
    /// Drive a balloon's device in a guest, whatever its kernel has.
    #[command(long_about = balloon_guest::ABOUT, after_long_help = balloon_guest::EXAMPLES)]
    BalloonGuest(BalloonGuestArgs),
    /// Measure this machine: what others have published, page by page, and by runs.
    #[command(long_about = bench::ABOUT, after_long_help = bench::EXAMPLES)]
    Bench(BenchArgs),
    /// Look at I/O page tables in a file: list, explain, check, compare, draw.
    #[command(
        subcommand,
        long_about = "Looks at I/O page tables that are in a file: an image of tables (which this \
            library writes), a dump of memory with --format, --root and --offset, as QEMU's pmemsave or \
            a crash dump gives, or what a running kernel shows of VT-d's tables in debugfs. They are read as the specifications say, not as we \
            would have written them; files of any bytes are survived.\n\n\
            Exit status: 0; 1 when `check` or `diff` find something, or the image is damaged; 2 \
            when the file or what was asked for cannot be had.",
        after_long_help = "Examples:\n  \
            dmaspace tables image tables.img --map 1G:64M:4G\n  \
            dmaspace tables dump tables.img\n  \
            dmaspace tables walk memory.bin 0x40001000 --format vtd-ss --root 0x10a3000\n  \
            dmaspace tables check tables.img\n  \
            dmaspace tables diff before.img after.img\n  \
            dmaspace tables picture tables.img --svg tables.svg"
    )]
    Tables(TablesCommand),
    /// Plan page tables for memory nodes, simulate what that is worth, and measure walks.
    #[command(subcommand, disable_help_subcommand = true)]
    Numa(NumaCommand),
    /// Predict how long the kernel takes to map a virtual machine's memory, and which setting helps.
    #[command(
        long_about = "Finds the guest RAM of a virtual machine that runs (--pid), or reads QEMU's command \
            line (--qemu) or libvirt's XML (--libvirt). Says how this memory is backed and what of it is \
            present, and estimates how long the kernel takes to fault in, zero, pin and map it for a \
            device, by VFIO type 1 and by iommufd: today, and with each change that helps, with the line \
            for QEMU, libvirt or the shell. The estimate needs a calibration of some hundred \
            milliseconds. --pid accepts any other process, too.\n\n\
            --machine reports IOMMU units, how each group translates, kernel options, nodes, counters and \
            recent faults, each finding with the setting that would change it.\n\n\
            Nothing is stopped or changed. What needs a privilege that is missing is left out and named.\n\n\
            Exit status: 0; 2 when there is no such process, it may not be looked at, it has no memory of \
            its own, or the configuration cannot be understood.",
        after_long_help = "Examples:\n  \
            dmaspace inspect --pid $(pidof -s qemu-system-x86_64)\n  \
            dmaspace inspect --pid 4711 --json | jq '.advice[0]'\n  \
            dmaspace inspect --qemu \"qemu-system-x86_64 -m 64G -device vfio-pci,host=01:00.0\"\n  \
            dmaspace inspect --libvirt domain.xml\n  \
            dmaspace inspect --machine"
    )]
    Inspect(InspectArgs),
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
