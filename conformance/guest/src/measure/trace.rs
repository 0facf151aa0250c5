//! Which of its functions the kernel calls to pin and map memory, and to unmap and unpin it, how often, and how long they take
//! with what they call and with the tracing of that.
//!
//! Source: Linux, Documentation/trace/ftrace.rst, kernel/trace/ftrace.c (`function_profile_enabled`).

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::Write as _,
    path::Path,
};

use anyhow::Context as _;
use guest::{
    machines::EDU,
    pci::Device,
    samples::{SPACES, Said, Way},
    start::say,
};
use iopt::FormatId;
use rustix::mount::{MountFlags, mount};

use crate::space::Space;

const TRACING: &str = "/sys/kernel/tracing";

/// Functions on the way of a page, as far as the compiler has not inlined them.
const FUNCTIONS: [&str; 20] = [
    "vfio_*",
    "pin_run",
    "put_pfn*",
    "unmap_unpin_*",
    "iopt_*",
    "pfn_reader_*",
    "batch_*",
    "pages_to_*",
    "*pin_user*",
    "memfd_pin_folios*",
    "__get_user_pages*",
    "__gup_*",
    "gup_*",
    "follow_page_*",
    "try_grab_folio*",
    "unpin_*",
    "folio_add_pins",
    "account_locked_vm*",
    "iommu_map*",
    "iommu_iova_to_phys",
];

/// Reports the calls for each kind of memory, which was written to before.
pub(crate) fn run(results: &mut File, format: FormatId) -> anyhow::Result<()> {
    let tracing = Path::new(TRACING);
    mount("tracefs", tracing, "tracefs", MountFlags::empty(), None).context(TRACING)?;
    let filter = tracing.join("set_ftrace_filter");
    for function in FUNCTIONS {
        let mut filter = OpenOptions::new().append(true).open(&filter)?;
        // Not every kernel has all.
        let _ = writeln!(filter, "{function}");
    }
    let enabled = tracing.join("function_profile_enabled");
    for (_, way) in Way::ALL.into_iter().take(2) {
        let space = Space::new(way, format)?;
        for kind in SPACES {
            // Counts from 0.
            fs::write(&enabled, "1")?;
            space.run(way, kind, true)?;
            fs::write(&enabled, "0")?;
            for (function, (hits, ns)) in calls(&tracing.join("trace_stat"))? {
                say(results, &Said::Called(way, kind, function, hits, ns))?;
            }
        }
    }
    Device(EDU).unbind()
}

/// Calls of each function, and nanoseconds of all, by all processors.
fn calls(stat: &Path) -> anyhow::Result<BTreeMap<String, (u64, f64)>> {
    let mut calls = BTreeMap::new();
    for entry in fs::read_dir(stat)? {
        let path = entry?.path();
        let of_functions = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("function"));
        if !of_functions {
            continue;
        }
        // Rows, after two lines of headings: function, hits, microseconds.
        for line in fs::read_to_string(&path)?.lines().skip(2) {
            let mut words = line.split_whitespace();
            let (Some(function), Some(hits), Some(us)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let hits: u64 = hits.parse().with_context(|| line.to_owned())?;
            let us: f64 = us.parse().with_context(|| line.to_owned())?;
            let sum: &mut (u64, f64) = calls.entry(function.to_owned()).or_default();
            *sum = (sum.0 + hits, sum.1 + us * 1e3);
        }
    }
    Ok(calls)
}
