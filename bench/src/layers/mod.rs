//! Instructions of a map and an unmap: by the page table alone, and by an address space over the software unit and over
//! each driver.
//!
//! A program of this one under valgrind does the operations of one [`Subject`] (`case`); callgrind collects while one is
//! under way, and `profile` says how many instructions that were, and of which layer.
//!
//! Memory consists of given physical runs ([`ioas::FixedRuns`]), so that no kernel pins anything; registers are plain
//! memory behind which each unit answers at once ([`guest::unit`]).

mod case;
mod profile;
mod text;

use std::{ffi::OsString, fmt, fs, process::Command, str::FromStr};

use anyhow::{Context as _, bail};
use guest::unit::Kind;
use runs::{Pa, Span};

pub use case::run as run_case;
use profile::Profile;
pub use text::document;

const PAGE: u64 = 4096;

/// An owner of tables that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The table that the driver of this unit takes, alone.
    Table(Kind),
    /// An address space over [`ioas::SoftwareIommu`].
    Software,
    /// An address space over this driver.
    Driver(Kind),
}

/// The units, with what they are called.
const KINDS: [(Kind, &str); 5] = [
    (Kind::Vtd, "vtd"),
    (Kind::AmdVi, "amdvi"),
    (Kind::SmmuV3, "smmuv3"),
    (Kind::Riscv, "riscv"),
    (Kind::Smmu, "smmuv2"),
];

impl Subject {
    fn all() -> impl Iterator<Item = Self> {
        let each = |(kind, _)| [Self::Table(kind), Self::Driver(kind)];
        [Self::Software]
            .into_iter()
            .chain(KINDS.into_iter().flat_map(each))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |kind: Kind| {
            let mut kinds = KINDS.into_iter();
            kinds
                .find(|(other, _)| *other == kind)
                .map_or("", |(_, name)| name)
        };
        match *self {
            Self::Table(kind) => write!(f, "table-{}", name(kind)),
            Self::Software => write!(f, "software"),
            Self::Driver(kind) => write!(f, "driver-{}", name(kind)),
        }
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = Self::all();
        all.find(|subject| subject.to_string() == text)
            .ok_or_else(|| format!("no subject `{text}`"))
    }
}

/// Memory that is mapped by one call.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// As the table calls it.
    pub name: &'static str,
    /// Runs, none of which goes on in the next one.
    runs: u64,
    /// Bytes of a run, to which it is aligned.
    run: u64,
    /// Where it is mapped, from the first of the areas that stay on.
    at: u64,
}

/// Sizes in the order in which they are measured.
pub const SIZES: [Size; 6] = [
    Size::new("4K", 1, PAGE, PAGE),
    Size::new("2M", 1, 2 << 20, 2 << 20),
    Size::new("1G", 1, 1 << 30, 1 << 30),
    Size::new("256 × 4K", 256, PAGE, 1 << 20),
    Size::new("4,096 × 4K", 4096, PAGE, 16 << 20),
    Size::new("512 × 2M", 512, 2 << 20, 1 << 30),
];

impl Size {
    const fn new(name: &'static str, runs: u64, run: u64, at: u64) -> Self {
        Self {
            name,
            runs,
            run,
            at,
        }
    }

    const fn len(&self) -> u64 {
        self.runs * self.run
    }

    /// Every other block of physical memory, from the last on.
    fn memory(&self) -> Vec<Span<Pa>> {
        let nth = |n| Span::new((1 << 32) + 2 * n * self.run, self.run);
        (0..self.runs).rev().map(nth).collect()
    }
}

/// Figures of one subject: of map and unmap, for each of [`SIZES`].
pub struct Figures {
    subject: Subject,
    sizes: Vec<[Profile; 2]>,
}

/// Measures every subject by this program under valgrind.
///
/// # Errors
///
/// When valgrind is missing or fails, and when an operation fails.
pub fn measure() -> anyhow::Result<Vec<Figures>> {
    Subject::all().map(of).collect()
}

fn of(subject: Subject) -> anyhow::Result<Figures> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("out");
    let mut file_option = OsString::from("--callgrind-out-file=");
    file_option.push(&file);
    let run = Command::new("valgrind")
        .args(["--quiet", "--tool=callgrind", "--compress-strings=no"])
        .args([
            "--compress-pos=no",
            "--toggle-collect=*layers::case::measured_*",
        ])
        .args(["--dump-before=*dump_counts*"])
        .arg(file_option)
        .arg(std::env::current_exe()?)
        .args(["layers", "--case", &subject.to_string()])
        .output()
        .context("valgrind cannot be started: `apt-get install valgrind`")?;
    if !run.status.success() {
        bail!("{subject}: {}", String::from_utf8_lossy(&run.stderr));
    }
    let dump = |nth: usize| {
        let file = directory.path().join(format!("out.{nth}"));
        let text = fs::read_to_string(&file);
        let text = text.with_context(|| format!("callgrind has not written {}", file.display()));
        Profile::parse(&text?, case::TIMES)
    };
    let of = |n| Ok([dump(2 * n + 1)?, dump(2 * n + 2)?]);
    let sizes = (0..SIZES.len()).map(of).collect::<anyhow::Result<_>>();
    Ok(Figures {
        subject,
        sizes: sizes.with_context(|| subject.to_string())?,
    })
}
