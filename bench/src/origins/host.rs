//! The machine on which figures were taken.

use std::fs;
use std::num::NonZeroUsize;
use std::thread;

use hostmem::{Machine, ThpMode};
use serde::Serialize;

/// A machine, as far as it tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Host {
    /// The processor's name; empty where the kernel does not tell.
    pub processor: String,
    /// Processors that this process may use.
    pub processors: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Memory that could be had before the run, bytes.
    pub available_bytes: u64,
    /// Nodes with memory.
    pub nodes: usize,
    /// The kernel's release.
    pub kernel: String,
    /// Use of transparent huge pages: `always`, `madvise`, `never`.
    pub thp: &'static str,
    /// Pages in the pool of 2 MiB before the run; `None` where there is no such pool.
    pub pool_2m: Option<u64>,
    /// Pages in the pool of 1 GiB before the run.
    pub pool_1g: Option<u64>,
    /// Processes that wanted to run in the minute before the run: the load average.
    pub load: Option<f64>,
}

impl Host {
    /// This machine, now.
    ///
    /// # Errors
    ///
    /// When `/proc/meminfo` cannot be read; everything else may be missing.
    pub fn read() -> Result<Self, hostmem::ProcfsError> {
        let machine = Machine::probe()?;
        let line = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = line("/proc/cpuinfo");
        let load = line("/proc/loadavg");
        Ok(Self {
            processor: processor(&cpuinfo).to_owned(),
            processors: processors(),
            memory_bytes: machine.total,
            available_bytes: machine.available,
            nodes: machine.nodes.len(),
            kernel: line("/proc/sys/kernel/osrelease").trim().to_owned(),
            thp: match machine.thp {
                ThpMode::Always => "always",
                ThpMode::Madvise => "madvise",
                ThpMode::Never => "never",
            },
            pool_2m: machine.pool_2m.map(|pool| pool.total),
            pool_1g: machine.pool_1g.map(|pool| pool.total),
            load: load.split(' ').next().and_then(|word| word.parse().ok()),
        })
    }
}

/// Processors that this process may use.
pub(super) fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// The name in the text of `/proc/cpuinfo`; Arm's kernels give none.
fn processor(cpuinfo: &str) -> &str {
    let mut lines = cpuinfo.lines();
    let name = lines.find_map(|line| line.strip_prefix("model name"));
    name.map_or("", |rest| rest.trim_start_matches([' ', '\t', ':']).trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_reports_what_it_is() {
        let cpuinfo = "processor\t: 0\nmodel name\t: A: CPU  @ 2 GHz \nmodel name\t: other\n";
        assert_eq!(processor(cpuinfo), "A: CPU  @ 2 GHz");
        assert_eq!(processor("CPU implementer\t: 0x41\n"), "");
        let host = Host::read().unwrap();
        assert!(host.processors > 0 && host.memory_bytes >= host.available_bytes);
        assert!(!host.kernel.is_empty());
    }
}
