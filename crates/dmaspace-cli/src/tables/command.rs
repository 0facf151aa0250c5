//! `dmaspace tables`: its arguments and their execution.

use std::path::{Path, PathBuf};

use crate::tables::{
    FORMATS, InDump, Limits, Severity, Survey, TableFile, TablesError, diff, explain, root,
};
use anyhow::{Context, anyhow, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use iopt::Prot;
use runs::{PageSizes, Run};

use super::image::{self, Mapped};
use super::text as report;
use crate::draw::sheet::Paint;
use crate::json::json;
use crate::output::{exit, fail, print, refuse};
use crate::size;
use crate::stop::Stop;
use crate::target::Target;

/// Subcommands of `dmaspace tables`.
#[derive(Debug, Subcommand)]
pub(crate) enum TablesCommand {
    /// Write an image of tables of given runs, or of a process's pages, for the other commands
    ///
    /// The engine builds the tables as it does for a unit, at fictitious physical addresses.
    ///
    /// Example: dmaspace tables image tables.img --map 0x40000000:1G:0x100000000
    Image(ImageArgs),
    /// List mappings: a tree with runs merged, counts by leaf size, wasted table memory
    ///
    /// Example: dmaspace tables dump tables.img
    Dump(DumpArgs),
    /// Explain the walk to one address, entry by entry and field by field
    ///
    /// Shows each entry, the end of the walk, and the unit's report of a fault.
    ///
    /// Example: dmaspace tables walk memory.bin 0x40001000 --format vtd-ss --root 0x10a3000
    Walk(WalkArgs),
    /// Find errors in tables: entries that fault, shared tables, broken groups, waste
    ///
    /// Exit status 1 after an error; waste is not an error.
    ///
    /// Example: dmaspace tables check tables.img
    Check(CheckArgs),
    /// Compare the translations of two tables
    ///
    /// Sizes of leaves and the addresses of tables are not compared. Exit status 1 when translations differ.
    ///
    /// Example: dmaspace tables diff before.img after.img
    Diff(DiffArgs),
    /// Draw address spaces, coloured by the size of the leaves
    ///
    /// Several files are drawn below each other, to one scale and under their names.
    ///
    /// Example: dmaspace tables picture before.img after.img --svg tables.svg
    Picture(PictureArgs),
}

/// Where in a file tables are.
#[derive(Debug, Args)]
pub(crate) struct SourceArgs {
    /// The format of the tables in a dump of memory
    ///
    /// Without it the file is an image, which contains its format, or the kernel's text of a device's tables.
    ///
    /// Example: --format vtd-ss
    #[arg(long, value_name = "FORMAT", ignore_case = true, requires = "root",
          value_parser = PossibleValuesParser::new(FORMATS).map(|name| name.to_ascii_lowercase()))]
    format: Option<String>,

    /// The physical address of the root table in a dump
    ///
    /// The root that the unit is programmed with: the second-stage pointer of a context entry, a device table
    /// entry's page table root, TTBR, or iohgatp's page number times 4096.
    ///
    /// Example: --root 0x10a3000
    #[arg(long, value_name = "ADDRESS", value_parser = address, requires = "format")]
    root: Option<u64>,

    /// The physical address of the dump's first byte [default: 0]
    ///
    /// The first argument of QEMU's `pmemsave`.
    ///
    /// Example: --offset 0x10000000
    #[arg(long, value_name = "ADDRESS", value_parser = address, requires = "format")]
    offset: Option<u64>,

    /// Levels of the tables [default: 4, or the fewest for --input-bits]
    ///
    /// Example: --levels 3
    #[arg(long, value_name = "N", requires = "format")]
    levels: Option<u8>,

    /// Bits of input addresses of Arm's tables (64 - TnSZ) and DART's [default: 48, DART 32]
    ///
    /// Example: --input-bits 39
    #[arg(long, value_name = "N", requires = "format")]
    input_bits: Option<u8>,

    /// The root is that of the top of the address space (Arm's TTBR1)
    ///
    /// Example: --upper
    #[arg(long, requires = "format")]
    upper: bool,

    /// The bit that marks addresses of tables as encrypted (AMD's C-bit)
    ///
    /// Example: --encryption-bit 51
    #[arg(long, value_name = "BIT", requires = "format",
          value_parser = clap::value_parser!(u32).range(12..=63))]
    encryption_bit: Option<u32>,

    /// The device whose tables are read, if the kernel's text has several
    ///
    /// Its PCI address, followed by `/` and the PASID if the tables belong to one.
    ///
    /// Example: --device 0000:00:05.0
    // Options that require --format are not refused for it where --device keeps that out.
    #[arg(long, value_name = "ADDRESS",
          conflicts_with_all = ["format", "root", "offset", "levels", "input_bits", "upper", "encryption_bit"])]
    device: Option<String>,
}

/// The options of `dmaspace tables image`.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    /// File of the image to write
    file: PathBuf,

    /// A run to map: device address, size, physical address, and r, w and x (default: rw)
    ///
    /// Addresses are numbers, with 0x hexadecimal, or sizes like 4G. May be given several times.
    ///
    /// Example: --map 0x80000000:12K:0x200000000:r
    #[arg(long, value_name = "IOVA:SIZE:PA[:PROT]", value_parser = mapped, required_unless_present = "pid")]
    map: Vec<Mapped>,

    /// Map the pages of a process instead, at its own addresses
    ///
    /// Pages that could be mapped for a device, at their current physical addresses. Requires root: the
    /// kernel hides frame numbers from other users.
    ///
    /// Example: --pid $(pidof -s qemu-system-x86_64)
    #[arg(long, value_name = "PID", conflicts_with = "map")]
    pid: Option<u32>,

    /// The format of the tables
    ///
    /// Example: --format amdv1
    #[arg(long, value_name = "FORMAT", ignore_case = true, default_value = "vtd-ss",
          value_parser = PossibleValuesParser::new(FORMATS).map(|name| name.to_ascii_lowercase()))]
    format: String,

    /// Levels of the tables [default: 4, or the fewest for --input-bits]
    ///
    /// Example: --levels 3
    #[arg(long, value_name = "N")]
    levels: Option<u8>,

    /// Bits of input addresses of Arm's tables (64 - TnSZ) and DART's [default: 48, DART 32]
    ///
    /// Example: --input-bits 39
    #[arg(long, value_name = "N")]
    input_bits: Option<u8>,

    /// The largest leaf [default: the largest of the format]
    ///
    /// Example: --max-leaf 4K
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    max_leaf: Option<u64>,
}

/// The options of `dmaspace tables dump`.
#[derive(Debug, Args)]
pub(crate) struct DumpArgs {
    /// An image of tables, a dump of memory, or a kernel's text (domain_translation_struct)
    file: PathBuf,
    #[command(flatten)]
    source: SourceArgs,
    /// Number of lines of the tree to print [default: 200]
    ///
    /// Example: --lines 10000
    #[arg(
        long,
        value_name = "N",
        default_value_t = 200,
        hide_default_value = true
    )]
    lines: usize,
    /// Print the result as JSON
    ///
    /// Names are stable and end in their unit. Addresses and entries are strings in hexadecimal.
    ///
    /// Example: --json | jq .leaves
    #[arg(long)]
    json: bool,
}

/// The options of `dmaspace tables walk`.
#[derive(Debug, Args)]
pub(crate) struct WalkArgs {
    /// An image of tables, a dump of memory, or a kernel's text (domain_translation_struct)
    file: PathBuf,
    /// The address that a device would access
    #[arg(value_parser = address)]
    iova: u64,
    #[command(flatten)]
    source: SourceArgs,
    /// Print the result as JSON
    ///
    /// Names are stable and end in their unit. Addresses and entries are strings in hexadecimal.
    ///
    /// Example: --json | jq .read.outcome
    #[arg(long)]
    json: bool,
}

/// The options of `dmaspace tables check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// An image of tables, a dump of memory, or a kernel's text (domain_translation_struct)
    file: PathBuf,
    #[command(flatten)]
    source: SourceArgs,
    /// Print the result as JSON
    ///
    /// Names are stable and end in their unit. Addresses and entries are strings in hexadecimal.
    ///
    /// Example: --json | jq .findings
    #[arg(long)]
    json: bool,
}

/// The options of `dmaspace tables diff`.
#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// The older tables: an image of tables, a dump of memory, or a kernel's text
    before: PathBuf,
    /// The newer tables, in any of these forms
    after: PathBuf,
    #[command(flatten)]
    source: SourceArgs,
    /// Print the result as JSON
    ///
    /// Names are stable and end in their unit. Addresses and entries are strings in hexadecimal.
    ///
    /// Example: --json | jq .changes
    #[arg(long)]
    json: bool,
}

/// The options of `dmaspace tables picture`.
#[derive(Debug, Args)]
pub(crate) struct PictureArgs {
    /// Images of tables, dumps of memory, or a kernel's texts (domain_translation_struct)
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// File of the picture to write
    ///
    /// Example: --svg tables.svg
    #[arg(long, value_name = "FILE")]
    svg: PathBuf,
    #[command(flatten)]
    source: SourceArgs,
}

/// An address: hexadecimal with 0x, or decimal; underscores are allowed.
fn address(text: &str) -> Result<u64, String> {
    let digits = text.replace('_', "").to_ascii_lowercase();
    let number = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    number.map_err(|_| "an address is a number like 0x40001000 or 1073745920".into())
}

/// A run and what devices may do there.
fn mapped(text: &str) -> Result<Mapped, String> {
    let mut parts = text.split(':');
    let (Some(iova), Some(len), Some(pa)) = (parts.next(), parts.next(), parts.next()) else {
        return Err("a run is IOVA:SIZE:PA or IOVA:SIZE:PA:PROT".into());
    };
    let place = |text: &str| match size::parse(text) {
        Ok(size) => Ok(size),
        Err(_) => address(text),
    };
    let (iova, pa) = (place(iova)?, place(pa)?);
    let len = size::parse(len).map_err(|error| error.to_string())?;
    let mut prot = Prot::empty();
    for letter in parts.next().unwrap_or("rw").chars() {
        prot |= match letter {
            'r' => Prot::READ,
            'w' => Prot::WRITE,
            'x' => Prot::EXECUTE,
            '-' => Prot::empty(),
            other => return Err(format!("{other:?} is none of r, w and x")),
        };
    }
    if parts.next().is_some() {
        return Err("there is more behind the permissions".into());
    }
    Ok(Mapped {
        run: Run { iova, pa, len },
        prot,
    })
}

impl ImageArgs {
    fn write(&self) -> anyhow::Result<()> {
        let target = Target::new(&self.file)?;
        let root = root(&self.format, 0, self.levels, self.input_bits, false)?;
        let sizes = PageSizes::from_bits(u64::MAX).up_to(self.max_leaf.unwrap_or(u64::MAX));
        let built = match self.pid {
            Some(pid) => image::build(root, sizes, &image::pages(pid)?)?,
            None => image::build(root, sizes, &self.map)?,
        };
        let stop = Stop::on_signals().map_err(|error| anyhow!(error))?;
        target.write(&built.image, &stop)?;
        print(&report::image(&self.file, &built, Paint::for_stdout()))
    }
}

impl SourceArgs {
    fn open(&self, path: &Path) -> anyhow::Result<TableFile> {
        let place = match (&self.format, self.root) {
            (Some(format), Some(address)) => Some(InDump {
                root: root(format, address, self.levels, self.input_bits, self.upper)?,
                offset: self.offset.unwrap_or(0),
                encryption_bit: self.encryption_bit,
            }),
            (None, None) => match &self.device {
                Some(_) => return Ok(TableFile::open_kernel_text(path, self.device.as_deref())?),
                None => None,
            },
            _ => bail!("a dump of memory requires --format and --root"),
        };
        Ok(TableFile::open(path, place)?)
    }

    fn survey(&self, path: &Path) -> anyhow::Result<Survey> {
        Ok(self.open(path)?.survey(Limits::default())?)
    }
}

/// `dmaspace tables`.
pub(crate) fn run(command: &TablesCommand) -> u8 {
    match perform(command) {
        Ok(status) => status,
        // An image that is there, but damaged, is what is asked about.
        Err(error) if error.downcast_ref().is_some_and(TablesError::is_damage) => {
            fail(error.as_ref(), exit::WRONG)
        }
        Err(error) => refuse(&error),
    }
}

fn perform(command: &TablesCommand) -> anyhow::Result<u8> {
    let paint = Paint::for_stdout();
    match command {
        TablesCommand::Image(args) => {
            args.write()?;
            Ok(exit::RIGHT)
        }
        TablesCommand::Dump(args) => {
            let found = args.source.survey(&args.file)?;
            show(args.json, &found, || {
                report::dump(&found, args.lines, paint)
            })?;
            Ok(exit::RIGHT)
        }
        TablesCommand::Walk(args) => {
            let file = args.source.open(&args.file)?;
            let found = explain(&file.tables()?, args.iova);
            show(args.json, &found, || report::walk(&found, paint))?;
            Ok(exit::RIGHT)
        }
        TablesCommand::Check(args) => {
            let found = args.source.survey(&args.file)?;
            show(args.json, &found, || report::check(&found, paint))?;
            let mut findings = found.findings.iter();
            // Findings beyond the limit may be wrong as well.
            let more = found.finding_count > found.findings.len() as u64;
            let wrong = more || findings.any(|finding| finding.severity == Severity::Wrong);
            Ok(if wrong || !found.complete {
                exit::WRONG
            } else {
                exit::RIGHT
            })
        }
        TablesCommand::Diff(args) => {
            let before = args.source.survey(&args.before)?;
            let after = args.source.survey(&args.after)?;
            let found = diff(&before, &after);
            show(args.json, &found, || report::diff(&found, paint))?;
            Ok(if found.is_same() {
                exit::RIGHT
            } else {
                exit::WRONG
            })
        }
        TablesCommand::Picture(args) => {
            let target = Target::new(&args.svg)?;
            let named = |file: &PathBuf| {
                let name = file.file_stem().unwrap_or_default().to_string_lossy();
                anyhow::Ok((name.into_owned(), args.source.survey(file)?))
            };
            let found = args
                .files
                .iter()
                .map(named)
                .collect::<Result<Vec<_>, _>>()?;
            let stop = Stop::on_signals().map_err(|error| anyhow!(error))?;
            target.write(&report::picture(&found), &stop)?;
            Ok(exit::RIGHT)
        }
    }
}

/// Prints as JSON, or as text.
fn show<T: serde::Serialize>(
    as_json: bool,
    found: &T,
    text: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    let text = if as_json {
        json(found).context("cannot write it as JSON")?
    } else {
        text()
    };
    print(&text)
}

#[cfg(test)]
mod tests {
    use runs::Span;

    use super::*;

    #[test]
    fn runs_are_read_with_what_devices_may_do() {
        let run = Run::new(0x4000_0000, Span::new(4 << 30, 1 << 30));
        for (text, prot) in [
            ("0x40000000:1G:4G", Prot::RW),
            ("1G:1024M:0x1_0000_0000:r", Prot::READ),
            ("1G:1G:4G:r-x", Prot::READ | Prot::EXECUTE),
        ] {
            assert_eq!(mapped(text), Ok(Mapped { run, prot }), "{text}");
        }
        for wrong in [
            "",
            "1G:1G",
            "1G:0:4G",
            "1G:1G:4G:q",
            "1G:1G:4G:r:w",
            "x:1G:4G",
        ] {
            assert!(mapped(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn addresses_are_read_in_both_bases() {
        assert_eq!(address("0x4000_1000"), Ok(0x4000_1000));
        assert_eq!(address("0XFFFFFFFFFFFFFFFF"), Ok(u64::MAX));
        assert_eq!(address("4096"), Ok(4096));
        for wrong in ["", "0x", "4K", "-1", "0x1_0000_0000_0000_0000_0"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }
}
