//! `dmaspace inspect`: its arguments and their execution.

use std::path::PathBuf;

use crate::inspect::{Guest, Host, InspectError, configured, inspect, libvirt, qemu_line};
use anyhow::Context as _;
use clap::{ArgGroup, Args};
use hostmem::read_at_most;

use super::text as report;
use crate::devices::Names;
use crate::draw::sheet::Paint;
use crate::json::json;
use crate::output::{exit, fail, print, refuse};

/// The longest XML that is read, as `virsh` reads it: libvirt `VSH_MAX_XML_FILE`, `tools/vsh.h`.
const MOST_XML: u64 = 10 << 20;

/// How it is called: clap's own line is wider than 80 columns.
const USAGE: &str = "dmaspace inspect [OPTIONS]
           <--pid <PID>|--qemu <LINE>|--libvirt <FILE>>";

/// The options of `dmaspace inspect`.
#[derive(Debug, Args)]
#[command(override_usage = USAGE)]
// The group that the derive would make has every option in it, and any of them would do.
#[group(skip)]
#[command(group = ArgGroup::new("what").required(true).args(["pid", "qemu", "libvirt"]))]
pub(crate) struct InspectArgs {
    /// Inspect this process, for instance a virtual machine's monitor
    ///
    /// Example: --pid $(pidof -s qemu-system-x86_64)
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,

    /// Predict for the virtual machine of this QEMU command line
    ///
    /// Example: --qemu "qemu-system-x86_64 -m 4G -device vfio-pci,host=0000:01:00.0"
    #[arg(long, value_name = "LINE")]
    qemu: Option<String>,

    /// Predict for the virtual machine of libvirt's XML in FILE
    ///
    /// Example: --libvirt domain.xml (from `virsh dumpxml --inactive`)
    #[arg(long, value_name = "FILE")]
    libvirt: Option<PathBuf>,

    /// Predict no times, and skip the calibration of this machine
    ///
    /// Example: --no-times
    #[arg(long)]
    no_times: bool,

    /// Print the report as JSON
    ///
    /// Names are stable and end in their unit. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.advice[0]'
    #[arg(long)]
    json: bool,
}

/// `dmaspace inspect`.
pub(crate) fn run(args: &InspectArgs) -> u8 {
    let done = match (args.pid, &args.qemu, &args.libvirt) {
        (Some(pid), ..) => process(args, pid),
        (_, Some(line), _) => configuration(args, |pool| Ok(qemu_line(line, pool)?)),
        (.., Some(file)) => configuration(args, |pool| {
            let bytes = read_at_most(file, MOST_XML)
                .with_context(|| format!("cannot read {}", file.display()))?;
            Ok(libvirt(&String::from_utf8_lossy(&bytes), pool)?)
        }),
        (None, None, None) => Err(anyhow::anyhow!("no process and no configuration was named")),
    };
    match done {
        Ok(()) => exit::RIGHT,
        Err(error) if error.is::<InspectError>() => fail(error.as_ref(), exit::INPUT),
        Err(error) => refuse(&error),
    }
}

fn process(args: &InspectArgs, pid: u32) -> anyhow::Result<()> {
    let mut found = inspect(pid, !args.no_times)?;
    if let Some(guest) = &mut found.guest {
        guest.name_devices(&Names::open());
    }
    print(&if args.json {
        json(&found)?
    } else {
        report::process(&found, Paint::for_stdout())
    })
}

fn configuration(
    args: &InspectArgs,
    read: impl FnOnce(u64) -> anyhow::Result<Guest>,
) -> anyhow::Result<()> {
    let host = Host::read();
    let mut found = configured(read(host.default_pool)?, &host, !args.no_times);
    found.guest.name_devices(&Names::open());
    print(&if args.json {
        json(&found)?
    } else {
        report::configuration(&found, Paint::for_stdout())
    })
}
