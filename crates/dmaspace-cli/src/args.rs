//! What the command line takes, and how it explains itself.
//!
//! Backings and formats are listed by the library: a new one is offered here by itself.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Parser, Subcommand};
use dmaspace::hostmem::Backing;
use dmaspace::iopt::FormatId;
use dmaspace::map::MapJob;

use crate::size;

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
            Exit status: 0 when all was right; 1 when a byte was wrong, a device faulted where \
            it must not or did not where it must, or something broke; 2 when what was asked \
            for cannot be had; 130 when interrupted. Whatever happens, nothing stays pinned.",
        after_long_help = "Examples:\n  \
            dmaspace map\n  \
            dmaspace map --size 1G --backing hugetlb-2m --format amdv1\n  \
            dmaspace map --max-leaf 4k --json | jq .times.map_ns\n  \
            dmaspace map --svg layout.svg"
    )]
    Map(MapArgs),
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
}

/// The options of `dmaspace devices`.
#[derive(Debug, clap::Args)]
pub(crate) struct DevicesArgs {
    /// Print the report as JSON
    ///
    /// Names are stable. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.devices[].state'
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `dmaspace map`.
#[derive(Debug, clap::Args)]
pub(crate) struct MapArgs {
    /// How much memory to map [default: 256M, or what the limit leaves]
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024): whole pages of the backing.
    /// Without it 256 MiB, or what the limit on locked memory leaves; the report says so. A size
    /// over the limit that is asked for is refused.
    ///
    /// Example: --size 1G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,

    /// Of which pages the memory consists
    ///
    /// Huge pages that are asked for by name are added to the machine's pool where they are
    /// missing, which takes root, and taken out again at the end.
    ///
    /// Example: --backing hugetlb-2m
    #[arg(long, value_name = "KIND", default_value = AUTO, ignore_case = true,
          value_parser = backings())]
    backing: BackingChoice,

    /// The largest leaf of the tables [default: the largest of the format]
    ///
    /// With 4k the tables are what they are without large pages: what Linux does under
    /// `disable_hugepages`, and the honest "before" of every comparison.
    ///
    /// Example: --max-leaf 4k
    #[arg(long, value_name = "LEAF", ignore_case = true, value_parser = leaves())]
    max_leaf: Option<u64>,

    /// The format of the I/O page tables
    ///
    /// Example: --format amdv1
    #[arg(long, value_name = "FORMAT", default_value = FormatId::VtdSs.name(), ignore_case = true,
          value_parser = formats())]
    format: FormatId,

    /// How many devices do DMA at the same time, 1 to 256
    ///
    /// Each device is a thread with its own IOTLB entries.
    ///
    /// Example: --devices 4
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    devices: u32,

    /// Print the report as JSON
    ///
    /// Names are stable and end in their unit: `map_ns`, `charged_bytes`. Nothing else is printed
    /// on stdout.
    ///
    /// Example: --json | jq .times.map_ns
    #[arg(long)]
    pub(crate) json: bool,

    /// Draw the address space into FILE, coloured by the size of the leaves
    ///
    /// The file is written beside its place and moved there when it is whole.
    ///
    /// Example: --svg layout.svg
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

impl MapArgs {
    /// The job that was asked for.
    pub(crate) fn job(&self) -> MapJob {
        MapJob {
            size: self.size,
            backing: self.backing.0,
            max_leaf: self.max_leaf,
            format: self.format,
            devices: self.devices,
        }
    }
}

const AUTO: &str = "auto";

/// A backing, or `None` for "auto"; a type of its own because clap takes an `Option` to mean an
/// option that is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BackingChoice(Option<Backing>);

fn backings() -> impl TypedValueParser<Value = BackingChoice> {
    let auto = PossibleValue::new(AUTO)
        .help("The largest pages that the machine gives as it stands; the report says why");
    let named = Backing::ALL.into_iter().map(|backing| {
        PossibleValue::new(backing.name()).help(match backing {
            Backing::Anon4K => "Anonymous memory in 4 KiB pages",
            Backing::Thp => "Anonymous memory in transparent huge pages",
            Backing::Hugetlb2M => "A memory file of 2 MiB huge pages",
            Backing::Hugetlb1G => "A memory file of 1 GiB huge pages",
            Backing::Memfd => "A plain memory file",
        })
    });
    PossibleValuesParser::new(std::iter::once(auto).chain(named)).try_map(|name| {
        if name.eq_ignore_ascii_case(AUTO) {
            return Ok(BackingChoice(None));
        }
        name.parse().map(|backing| BackingChoice(Some(backing)))
    })
}

fn formats() -> impl TypedValueParser<Value = FormatId> {
    let named = FormatId::ALL.into_iter().map(|format| {
        let value = PossibleValue::new(format.name());
        match format {
            FormatId::VtdSs => value.help("Intel VT-d, second stage"),
            FormatId::X86_64 => value.help("x86-64: AMD version 2, Intel VT-d first stage"),
            FormatId::AmdV1 => value.help("AMD, version 1: leaves of any power of two"),
            _ => value,
        }
    });
    PossibleValuesParser::new(named).try_map(|name| {
        FormatId::from_name(&name.to_ascii_lowercase())
            .ok_or_else(|| format!("no format is called {name:?}"))
    })
}

fn leaves() -> impl TypedValueParser<Value = u64> {
    PossibleValuesParser::new(["4k", "2m", "1g"]).try_map(|name| size::parse(&name))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn job(options: &[&str]) -> Result<MapJob, clap::Error> {
        let words = ["dmaspace", "map"].iter().chain(options);
        Args::try_parse_from(words).map(|args| match args.command {
            Command::Map(map) => map.job(),
            Command::Devices(_) => unreachable!("the word was map"),
        })
    }

    #[test]
    fn the_definition_holds_together() {
        Args::command().debug_assert();
    }

    #[test]
    fn without_options_the_library_chooses() {
        let expected = MapJob {
            size: None,
            backing: None,
            max_leaf: None,
            format: FormatId::VtdSs,
            devices: 2,
        };
        assert_eq!(job(&[]).unwrap(), expected);
        assert_eq!(job(&["--backing", "auto"]).unwrap(), expected);
    }

    #[test]
    fn every_option_arrives() {
        let options = "--size 1G --backing HUGETLB-2M --max-leaf 2m --format amdv1 --devices 256";
        let options: Vec<_> = options.split(' ').collect();
        let expected = MapJob {
            size: Some(1 << 30),
            backing: Some(Backing::Hugetlb2M),
            max_leaf: Some(2 << 20),
            format: FormatId::AmdV1,
            devices: 256,
        };
        assert_eq!(job(&options).unwrap(), expected);
        for backing in Backing::ALL {
            assert_eq!(
                job(&["--backing", backing.name()]).unwrap().backing,
                Some(backing)
            );
        }
        for format in FormatId::ALL {
            assert_eq!(job(&["--format", format.name()]).unwrap().format, format);
        }
    }

    #[test]
    fn every_option_is_explained_with_an_example() {
        let mut command = Args::command();
        for name in ["map", "devices"] {
            let command = command.find_subcommand_mut(name).unwrap();
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
