//! What `dmaspace map` takes.
//!
//! Backings and formats are listed by the library: a new one is offered here by itself.

use std::path::PathBuf;

use anyhow::bail;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use hostmem::Backing;
use ioas::Placement;
use iopt::FormatId;

use super::{MapBackend, MapJob, Software};
use crate::size;

/// The options of `dmaspace map`.
#[derive(Debug, clap::Args)]
pub(crate) struct MapArgs {
    /// Memory to map [default: 256M, or what the limit leaves]
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024): whole pages of the backing.
    /// The default is reduced to what the limit on locked memory leaves, and the report says so; a larger
    /// SIZE than that is refused.
    ///
    /// Example: --size 1G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,

    /// Kind of the memory's pages
    ///
    /// Huge pages that are named here are added to the machine's pool if it has too few, which requires root,
    /// and removed at the end.
    ///
    /// Example: --backing hugetlb-2m
    #[arg(long, value_name = "KIND", default_value = AUTO, ignore_case = true,
          value_parser = backings())]
    backing: BackingChoice,

    /// Implementation that maps the memory
    ///
    /// The kernel's back ends pin, charge and map it for the device of --device. They do not show runs,
    /// leaves and tables, so the report leaves these out.
    ///
    /// Example: --backend vfio --device 0000:00:05.0
    #[arg(
        long,
        value_name = "BACKEND",
        default_value = "software",
        ignore_case = true
    )]
    backend: BackendName,

    /// PCI address of a device for which the kernel maps the memory; repeatable
    ///
    /// `dmaspace devices` and lspci -D list them. All devices of its group must be bound to vfio-pci or have
    /// no driver.
    ///
    /// Example: --device 0000:00:05.0
    #[arg(long, value_name = "ADDRESS")]
    device: Vec<String>,

    /// The largest leaf of the tables [default: the largest of the format]
    ///
    /// With 4k the tables are what they are without large pages: what Linux does under
    /// `disable_hugepages`, and the honest "before" of every comparison.
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
    /// Each device is a thread with its own IOTLB entries.
    ///
    /// Example: --devices 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    devices: Option<u32>,

    /// Which devices share a page table, and where it lies [default: shared]
    ///
    /// `shared`: one table for all, on the node of the first device. `per-node`: one for the devices
    /// of each memory node, on that node, over memory that is pinned and charged once; with `--backend
    /// vfio` in a container for each, which pins the memory and has it charged for itself. `near:N`: one
    /// for all, on node N. Devices of the software IOMMU are at the nodes that have memory, in turn.
    /// The report then says where tables really are, asked page by page, and what they take.
    ///
    /// Example: --placement per-node
    #[arg(long, value_name = "POLICY")]
    placement: Option<Placement>,

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

/// The back ends by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// Tables of our own, and a software IOMMU whose devices are threads
    Software,
    /// A container of VFIO's type 1, and a device of the machine with its group
    Vfio,
    /// An address space of iommufd, and a device of the machine by its own node
    Iommufd,
}

impl MapArgs {
    /// The job that was asked for; an option that would mean nothing is refused.
    pub(crate) fn job(&self) -> anyhow::Result<MapJob> {
        Ok(MapJob {
            size: self.size,
            backing: self.backing.0,
            backend: self.backend()?,
            placement: self.placement,
        })
    }

    fn backend(&self) -> anyhow::Result<MapBackend> {
        let name = match self.backend {
            BackendName::Software => {
                if !self.device.is_empty() {
                    bail!(
                        "--device requires --backend vfio or iommufd: the software IOMMU has devices of \
                         its own"
                    );
                }
                let default = Software::default();
                return Ok(MapBackend::Software(Software {
                    max_leaf: self.max_leaf,
                    format: self.format.unwrap_or(default.format),
                    devices: self.devices.unwrap_or(default.devices),
                }));
            }
            BackendName::Vfio => "vfio",
            BackendName::Iommufd => "iommufd",
        };
        let tables = "the tables are the kernel's";
        for (given, option, why) in [
            (self.format.is_some(), "--format", tables),
            (self.max_leaf.is_some(), "--max-leaf", tables),
            (
                self.devices.is_some(),
                "--devices",
                "they are those that --device names",
            ),
            (
                self.svg.is_some(),
                "--svg",
                "the kernel does not show the leaves to draw",
            ),
        ] {
            if given {
                bail!("{option} means nothing with --backend {name}: {why}");
            }
        }
        if self.device.is_empty() {
            bail!("--backend {name} requires --device ADDRESS; `dmaspace devices` lists them");
        }
        let devices = self.device.clone();
        Ok(match self.backend {
            BackendName::Iommufd => MapBackend::Iommufd { devices },
            _ => MapBackend::Vfio { devices },
        })
    }
}

const AUTO: &str = "auto";

/// A backing, or `None` for "auto"; a type of its own because clap takes an `Option` to mean an
/// option that is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BackingChoice(Option<Backing>);

fn backings() -> impl TypedValueParser<Value = BackingChoice> {
    let auto = PossibleValue::new(AUTO)
        .help("The largest pages available without changes; the report says why");
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
    fn job(options: &[&str]) -> Result<MapJob, String> {
        let words = ["dmaspace", "map"].iter().chain(options);
        match Args::try_parse_from(words).unwrap().command {
            Command::Map(map) => map.job().map_err(|error| error.to_string()),
            _ => unreachable!("the word was map"),
        }
    }

    #[test]
    fn without_options_the_library_chooses() {
        let expected = MapJob {
            size: None,
            backing: None,
            backend: MapBackend::Software(Software::default()),
            placement: None,
        };
        assert_eq!(job(&[]).unwrap(), expected);
        assert_eq!(job(&["--backing", "auto"]).unwrap(), expected);
        assert_eq!(job(&["--backend", "software"]).unwrap(), expected);
    }

    /// What help says is what the library does.
    #[test]
    fn defaults_that_help_names_are_those_of_the_library() {
        let mut command = Args::command();
        let map = command.find_subcommand_mut("map").unwrap();
        let help = map.render_help().to_string();
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
        let expected = MapJob {
            size: Some(1 << 30),
            backing: Some(Backing::Hugetlb2M),
            backend: MapBackend::Software(Software {
                max_leaf: Some(2 << 20),
                format: FormatId::AmdV1,
                devices: 256,
            }),
            placement: Some(Placement::PerNode),
        };
        assert_eq!(job(&options).unwrap(), expected);
        for backing in Backing::ALL {
            assert_eq!(
                job(&["--backing", backing.name()]).unwrap().backing,
                Some(backing)
            );
        }
        for format in FormatId::ALL {
            let MapBackend::Software(software) = job(&["--format", format.name()]).unwrap().backend
            else {
                panic!("another back end");
            };
            assert_eq!(software.format, format);
        }
    }

    #[test]
    fn the_kernels_back_ends_take_a_device_and_nothing_that_is_not_theirs() {
        let addresses = ["0000:00:05.0", "0000:00:06.0"];
        let devices = || addresses.map(String::from).to_vec();
        for (name, expected) in [
            ("vfio", MapBackend::Vfio { devices: devices() }),
            ("iommufd", MapBackend::Iommufd { devices: devices() }),
        ] {
            assert_eq!(expected.name(), name);
            let [first, second] = addresses;
            let options = ["--backend", name, "--device", first, "--device", second];
            assert_eq!(job(&options).unwrap().backend, expected);
            let refusal = job(&options[..2]).unwrap_err();
            let start = format!("--backend {name} requires --device ADDRESS");
            assert!(refusal.starts_with(&start), "{refusal}");
            for (option, value) in [
                ("--format", "amdv1"),
                ("--format", "vtd-ss"),
                ("--max-leaf", "4k"),
                ("--devices", "2"),
                ("--svg", "layout.svg"),
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
