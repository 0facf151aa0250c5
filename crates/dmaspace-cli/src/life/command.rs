//! `dmaspace life`: one virtual machine's memory through everything.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use crate::life::{LifeBackend, LifeError, LifeJob, LifeReport, LifeStep, succeed};
use anyhow::bail;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use hostmem::Backing;

use super::{svg as life_svg, text as life};
use crate::draw::sheet::Paint;
use crate::map::BackendName;
use crate::stop::Stop;
use crate::target::Target;
use crate::{exit, fail, json, print, refuse, size, this_program};

/// The hidden command by which this program becomes the second owner.
pub(crate) const SUCCESSOR: &str = "life-successor";

pub(crate) const ABOUT: &str = "\
Allocates memory in two halves, one per memory node, pins and charges it by runs, and maps it through \
two page tables of different formats, one per node. Two devices of a software IOMMU, which are threads, \
read, check and write every page from then to the end. During this DMA the program unmaps 4 KiB in the \
largest leaf and maps it again; splits leaves for dirty tracking, reads and clears the dirty bits and \
merges the leaves; inflates a virtio balloon (the guest's driver and the device) to 7 of 8 parts and \
deflates it; and hands the address space over to a second process, which unmaps 4 KiB too, and ends it. \
Each step reports the bytes it changed, its time and its checks.\n\n\
On a machine of one node the second half and its tables are on the first node, and the report says so. \
Any user can run it; it uses huge pages where the machine has them.\n\n\
With --backend vfio or iommufd the kernel maps the memory for PCI devices, which copy all the time. \
Operations that the interface lacks (choice of tables, partial unmap, split, dirty tracking, merge) are \
attempted and printed as refused, with the missing feature.\n\n\
Exit status: 0 when all checks passed, no device faulted outside the holes, and all counters are zero at \
the end; 1 otherwise; 2 when an option cannot be satisfied; 130 when interrupted. Nothing stays pinned \
in any case.";

pub(crate) const EXAMPLES: &str = "Examples:\n  \
dmaspace life\n  \
dmaspace life --size 2G --offsets --svg life.svg\n  \
dmaspace life --backing hugetlb-2m\n  \
dmaspace life --backend iommufd --device 0000:00:05.0\n  \
dmaspace life --json | jq '.steps[] | {step, took_ns, checked}'";

/// The options of `dmaspace life`.
#[derive(Debug, clap::Args)]
pub(crate) struct LifeArgs {
    /// Memory of the virtual machine [default: 256M, or what the limit leaves]
    ///
    /// A number of bytes, or with K, M, G or T (powers of 1024): 16 equal parts of whole pages. Two owners
    /// pin it during the handover, so it counts twice against the limit on locked memory.
    ///
    /// Example: --size 2G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,

    /// Kind of the memory files [default: the largest pages that are free]
    ///
    /// Huge pages that are named here are added to the machine's pool if it has too few, which requires root,
    /// and removed at the end.
    ///
    /// Example: --backing hugetlb-2m
    #[arg(long, value_name = "KIND", ignore_case = true, value_parser = backings())]
    backing: Option<Backing>,

    /// Implementation that maps the memory
    ///
    /// The kernel's back ends map it for the devices of --device, which do DMA all the time: only QEMU's
    /// `edu` is supported. Operations that an interface lacks are attempted, and the refusal is printed.
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
    /// `dmaspace devices` lists them. All devices of its group must be bound to vfio-pci or have no driver.
    ///
    /// Example: --device 0000:00:05.0
    #[arg(long, value_name = "ADDRESS")]
    device: Vec<String>,

    /// Use offsets in the memory files instead of page frames
    ///
    /// Each half is then one run, and leaves are as large as the half, independent of its pages. This is the
    /// default without the privilege to read page frames.
    ///
    /// Example: --offsets
    #[arg(long)]
    offsets: bool,

    /// Print the report as JSON
    ///
    /// Names are stable and end in their unit: `took_ns`, `len_bytes`. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq .left
    #[arg(long)]
    json: bool,

    /// Draw the address space over time into FILE
    ///
    /// One column per step: leaves by size, the hole, dirty pages, the balloon. The file is replaced
    /// atomically.
    ///
    /// Example: --svg life.svg
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl LifeArgs {
    /// The back end that was asked for; an option that would mean nothing is refused.
    fn backend(&self) -> anyhow::Result<LifeBackend> {
        let devices = self.device.clone();
        let (name, backend) = match self.backend {
            BackendName::Software if devices.is_empty() => return Ok(LifeBackend::Software),
            BackendName::Software => bail!(
                "--device requires --backend vfio or iommufd: the software IOMMU has devices of its own"
            ),
            BackendName::Vfio => ("vfio", LifeBackend::Vfio { devices }),
            BackendName::Iommufd => ("iommufd", LifeBackend::Iommufd { devices }),
        };
        if self.device.is_empty() {
            bail!("--backend {name} requires --device ADDRESS; `dmaspace devices` lists them");
        }
        let tables = "the tables, and what is in them, are the kernel's";
        for (given, option) in [(self.offsets, "--offsets"), (self.svg.is_some(), "--svg")] {
            if given {
                bail!("{option} means nothing with --backend {name}: {tables}");
            }
        }
        Ok(backend)
    }
}

/// Memory files: others cannot go to a second process.
fn backings() -> impl TypedValueParser<Value = Backing> {
    let files = [Backing::Memfd, Backing::Hugetlb2M, Backing::Hugetlb1G];
    PossibleValuesParser::new(files.map(Backing::name)).try_map(|name| name.parse::<Backing>())
}

/// `dmaspace life`.
pub(crate) fn run(args: &LifeArgs, verbose: bool) -> u8 {
    let target = match args.svg.as_deref().map(Target::new).transpose() {
        Ok(target) => target,
        Err(error) => return refuse(&error),
    };
    let successor = match this_program(SUCCESSOR) {
        Ok(successor) => successor,
        Err(error) => return fail(error.as_ref(), exit::WRONG),
    };
    let backend = match args.backend() {
        Ok(backend) => backend,
        Err(error) => return refuse(&error),
    };
    let job = LifeJob {
        backend,
        size: args.size,
        backing: args.backing,
        stand_in: args.offsets,
        ..LifeJob::new(successor)
    };
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let shown = io::stderr().is_terminal() && !verbose;
    let (result, asked) = stop.shielded(|| {
        let mut last = None;
        let result = job.run(&mut |step| {
            if shown && last.replace(step) != Some(step) {
                progress(step);
            }
            match stop.is_asked() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        if shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
        result
    });
    let report = match result {
        Err(LifeError::Interrupted(step)) => {
            return fail(&LifeError::Interrupted(step), exit::INTERRUPTED);
        }
        // A signal reaches the second process too.
        Err(error) if asked => return fail(&error, exit::INTERRUPTED),
        Err(error) if error.is_input() => return fail(&error, exit::INPUT),
        Err(error) => return fail(&error, exit::WRONG),
        Ok(_) if asked => {
            return fail(
                &LifeError::Interrupted(LifeStep::TearDown),
                exit::INTERRUPTED,
            );
        }
        Ok(report) => report,
    };
    tell(args, target, &stop, &report)
}

/// The step that is under way, in one line that the next one replaces.
fn progress(step: LifeStep) {
    let all = LifeStep::ALL;
    let done = all.iter().position(|other| *other == step).unwrap_or(0) + 1;
    let _ = write!(io::stderr(), "\r\x1b[K{done} of {}: {step}", all.len());
    let _ = io::stderr().flush();
}

fn tell(args: &LifeArgs, target: Option<Target>, stop: &Stop, report: &LifeReport) -> u8 {
    let drawn = target.map_or(Ok(()), |target| target.write(&life_svg::draw(report), stop));
    let text = if args.json {
        match json(report) {
            Ok(json) => json,
            Err(error) => return fail(&error, exit::WRONG),
        }
    } else {
        life::write(report, Paint::for_stdout())
    };
    let mut status = exit::RIGHT;
    for result in [drawn, print(&text)] {
        if let Err(error) = result {
            status = refuse(&error);
        }
    }
    match report.is_right() {
        true => status,
        false => exit::WRONG,
    }
}

/// The second owner, on a pipe of the first.
pub(crate) fn succeed_here() -> u8 {
    // Signals of a terminal reach both: the first owner decides, and ends this one.
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    match stop.shielded(|| succeed(io::stdin(), io::stdout())).0 {
        Ok(()) => exit::RIGHT,
        // The first owner was told as well, and says it.
        Err(_) => exit::WRONG,
    }
}
