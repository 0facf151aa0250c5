//! Options of `dmaspace check`. Backings and formats are listed by the library.

use std::path::PathBuf;

use anyhow::bail;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use hostmem::Backing;
use ioas::Placement;
use iopt::FormatId;

use super::{Backend, CheckJob, Software};
use crate::size;

pub(crate) const ABOUT: &str = "\
Allocates memory, pins and charges it, and maps it by runs in I/O page tables. Devices of a software IOMMU, which are \
threads, read, compare and write every page from then to the end. Meanwhile the program unmaps 4 KiB in the largest leaf \
and maps it again; splits leaves to track dirty pages, harvests them and merges the leaves; releases 7 of 8 parts as a \
balloon does, and restores them; and unmaps everything. Each step is a line: bytes, time, checks. Then the same runs are \
mapped several times by runs and page by page. No privilege is required.\n\n\
With --backend vfio or iommufd the kernel maps the memory for a PCI device that is bound to vfio-pci (see `dmaspace \
devices`). The device does no DMA. Operations that the interface lacks are attempted, and the refusal is printed.\n\n\
Exit status: 0 when all checks passed and all counters are zero at the end; 1 otherwise; 2 when an option cannot be \
satisfied or output cannot be written; 130 when interrupted. Nothing stays pinned in any case.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
dmaspace check\n  \
dmaspace check --size 1G --backing hugetlb-2m --format amdv1\n  \
dmaspace check --max-leaf 4k --json | jq '.steps[] | {step, took_ns}'\n  \
dmaspace check --placement per-node\n  \
dmaspace check --backend iommufd --device 0000:00:05.0 --report report.json";

/// The options.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Memory to map [default: 256M, or less within the limits]
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024): whole pages of the backing. The default is reduced to
    /// the rest of the limit on locked memory, of the control group or of the machine, and the report says so; a larger
    /// SIZE is refused.
    ///
    /// Example: --size 1G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,

    /// Kind of the memory's pages
    ///
    /// Huge pages must be free in the machine's pool: the refusal prints the line that adds them.
    ///
    /// Example: --backing hugetlb-2m
    #[arg(long, value_name = "KIND", default_value = AUTO, ignore_case = true, value_parser = backings())]
    backing: BackingChoice,

    /// Implementation that maps the memory
    ///
    /// The kernel's back ends pin, charge and map it for the devices of --device.
    ///
    /// Example: --backend vfio --device 0000:00:05.0
    #[arg(
        long,
        value_name = "BACKEND",
        default_value = "software",
        ignore_case = true
    )]
    backend: Backend,

    /// PCI address of a device for which the kernel maps the memory; repeatable
    ///
    /// `dmaspace devices` and lspci -D list them. All devices of its group must be bound to vfio-pci or have no driver.
    ///
    /// Example: --device 0000:00:05.0
    #[arg(long, value_name = "ADDRESS")]
    device: Vec<String>,

    /// The largest leaf of the tables [default: the largest of the format]
    ///
    /// With 4k there are no large pages, as in Linux under `disable_hugepages` and in the "before" of every
    /// comparison.
    ///
    /// Example: --max-leaf 4k
    #[arg(long, value_name = "LEAF", ignore_case = true, value_parser = leaves())]
    max_leaf: Option<u64>,

    /// The format of the I/O page tables [default: vtd-ss]
    ///
    /// Example: --format amdv1
    #[arg(long, value_name = "FORMAT", ignore_case = true, value_parser = formats())]
    format: Option<FormatId>,

    /// Number of devices that do DMA at the same time, 1 to 256 [default: 2]
    ///
    /// Example: --devices 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    devices: Option<u32>,

    /// Sharing and placement of page tables [default: shared]
    ///
    /// `shared`: one table for all, on the node of the first device. `per-node`: one for the devices of each memory node,
    /// on that node, over memory that is pinned and charged once; with `--backend vfio` in a container for each, which
    /// pins the memory and has it charged for itself. `near:N`: one for all, on node N. Devices of the software IOMMU are
    /// at the nodes that have memory, in turn. The report then lists the tables with their actual nodes.
    ///
    /// Example: --placement per-node
    #[arg(long, value_name = "POLICY")]
    placement: Option<Placement>,

    /// Write a report that can be sent to the project into FILE, and print it
    ///
    /// Kernel, processor, IOMMU units with their capabilities, page sizes, refusals, and times of memory of several
    /// sizes and backings, as JSON. It has no names of the machine or of users, no serial numbers and no addresses. The
    /// file is replaced atomically.
    ///
    /// Example: --report report.json
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,

    /// Print the result as JSON
    ///
    /// Names are stable and end in their unit: `took_ns`, `size_bytes`. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq .left
    #[arg(long, conflicts_with = "report")]
    pub(super) json: bool,
}

impl CheckArgs {
    /// The job; an option without a meaning is refused.
    pub(super) fn job(&self) -> anyhow::Result<CheckJob> {
        let software = self.backend == Backend::Software;
        let name = self.backend.name();
        let tables = "the tables are the kernel's";
        let named = "they are those that --device names";
        for (given, option, why) in [
            (self.format.is_some(), "--format", tables),
            (self.max_leaf.is_some(), "--max-leaf", tables),
            (self.devices.is_some(), "--devices", named),
        ] {
            if given && !software {
                bail!("{option} means nothing with --backend {name}: {why}");
            }
        }
        match (software, self.device.is_empty()) {
            (true, false) => bail!(
                "--device requires --backend vfio or iommufd: the software IOMMU has devices of its own"
            ),
            (false, true) => {
                bail!("--backend {name} requires --device ADDRESS; `dmaspace devices` lists them")
            }
            _ => {}
        }
        let default = Software::default();
        Ok(CheckJob {
            size: self.size,
            backing: self.backing.0,
            backend: self.backend,
            devices: self.device.clone(),
            software: Software {
                max_leaf: self.max_leaf,
                format: self.format.unwrap_or(default.format),
                devices: self.devices.unwrap_or(default.devices),
            },
            placement: self.placement,
            times: self.report.is_some(),
        })
    }
}

const AUTO: &str = "auto";

/// A backing, or `None` for "auto"; a type of its own because clap takes an `Option` to mean an
/// option that is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BackingChoice(Option<Backing>);

fn backings() -> impl TypedValueParser<Value = BackingChoice> {
    let auto =
        PossibleValue::new(AUTO).help("The largest pages that are there; the report says why");
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
    use clap::{CommandFactory as _, Parser as _};

    use super::*;
    use crate::args::{Args, Command};

    /// The job, or what is wrong with the command line.
    fn job(options: &[&str]) -> Result<CheckJob, String> {
        let words = ["dmaspace", "check"].iter().chain(options);
        match Args::try_parse_from(words).unwrap().command {
            Command::Check(check) => check.job().map_err(|error| error.to_string()),
            _ => unreachable!("the word was check"),
        }
    }

    #[test]
    fn without_options_the_library_chooses() {
        let expected = CheckJob::default();
        assert_eq!(job(&[]).unwrap(), expected);
        assert_eq!(job(&["--backing", "auto"]).unwrap(), expected);
        assert_eq!(job(&["--backend", "software"]).unwrap(), expected);
        assert!(job(&["--report", "report.json"]).unwrap().times);
        let mut command = Args::command();
        let check = command.find_subcommand_mut("check").unwrap();
        let help = check.render_help().to_string();
        let Software {
            format, devices, ..
        } = Software::default();
        for default in [format.name().to_string(), devices.to_string()] {
            assert!(help.contains(&format!("[default: {default}]")), "{help}");
        }
    }

    #[test]
    fn every_option_arrives() {
        let options = "--size 1G --backing HUGETLB-2M --max-leaf 2m --format amdv1 --devices 256 \
                       --placement per-node";
        let options: Vec<_> = options.split(' ').collect();
        let expected = CheckJob {
            size: Some(1 << 30),
            backing: Some(Backing::Hugetlb2M),
            software: Software {
                max_leaf: Some(2 << 20),
                format: FormatId::AmdV1,
                devices: 256,
            },
            placement: Some(Placement::PerNode),
            ..CheckJob::default()
        };
        assert_eq!(job(&options).unwrap(), expected);
        for backing in Backing::ALL {
            let found = job(&["--backing", backing.name()]).unwrap().backing;
            assert_eq!(found, Some(backing));
        }
        for format in FormatId::ALL {
            let found = job(&["--format", format.name()]).unwrap().software;
            assert_eq!(found.format, format);
        }
    }

    #[test]
    fn the_kernels_back_ends_take_devices_and_nothing_that_is_not_theirs() {
        let addresses = ["0000:00:05.0", "0000:00:06.0"];
        for expected in [Backend::Vfio, Backend::Iommufd] {
            let name = expected.name();
            let [first, second] = addresses;
            let options = ["--backend", name, "--device", first, "--device", second];
            let found = job(&options).unwrap();
            assert_eq!(
                (found.backend, found.devices),
                (expected, addresses.map(String::from).into())
            );
            let refusal = job(&options[..2]).unwrap_err();
            let start = format!("--backend {name} requires --device ADDRESS");
            assert!(refusal.starts_with(&start), "{refusal}");
            for (option, value) in [
                ("--format", "vtd-ss"),
                ("--max-leaf", "4k"),
                ("--devices", "2"),
            ] {
                let refusal = job(&[&options[..], &[option, value]].concat()).unwrap_err();
                let start = format!("{option} means nothing with --backend {name}: ");
                assert!(refusal.starts_with(&start), "{refusal}");
            }
        }
        let refusal = job(&["--device", "0000:00:05.0"]).unwrap_err();
        assert!(refusal.contains("--backend vfio or iommufd"), "{refusal}");
    }
}
