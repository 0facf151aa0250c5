//! How long the kernel takes until a device reaches a guest's memory: pages are faulted in and zeroed, then
//! VFIO pins them and maps them for the IOMMU.
//!
//! Faults take the time measured on this machine ([`Speeds`]). VFIO cannot be measured without a device. Its
//! share is the time that this library needs here to pin and map the same pages, times the
//! instructions of Linux over those of this library ([`Counts`], counted in a guest).
//!
//! Threads share the faults up to the bandwidth of memory: the time of several is the larger of two, that of one
//! thread over their number, and the bytes over those that all processors of this machine zeroed together in a
//! second ([`Together`](super::calibrate::Together)).
//!
//! The error adds its parts as squares: the spread of the samples; the deviation of QEMU's starts ([`FAULTS_OFF`],
//! [`PINS_OFF`]); the difference between VT-d and AMD-Vi; with threads, the deviation of a report of many
//! ([`THREADS_OFF`]), and possible savings by more threads than were tried.

use serde::Serialize;

use super::advice::{self, Advice, Now};
use super::calibrate::{Rate, Speeds, processors};
use super::conditions::{Conditions, Note};
use super::estimate::Estimate;
use super::guest::{GIANT, Guest, Host, Interface, Monitor, Ram, SMALL, THP};
use crate::size::{bytes, counted};

/// Instructions of Linux 7.2 that pin and map a page that is present, by VT-d and by AMD-Vi, and that unmap it by
/// VT-d: medians of five, of 64 MiB or, for a page of 1 GiB, of one.
///
/// Source: `cargo xtask guest-dma` (docs/bench.md, "Beside VFIO and iommufd").
#[derive(Clone, Copy, Debug)]
struct Counts {
    type1: Count,
    /// Maps by addresses, as QEMU 10.0 does.
    iommufd: Count,
    /// Maps by the file, as QEMU does from 10.1 on.
    by_file: Count,
}

#[derive(Clone, Copy, Debug)]
struct Count {
    map: [f64; 2],
    unmap: f64,
}

const fn count(map: [f64; 2], unmap: f64) -> Count {
    Count { map, unmap }
}

/// A page of 4 KiB.
const SMALL_PAGE: Counts = Counts {
    type1: count([506.0, 578.0], 321.0),
    iommufd: count([267.0, 287.0], 321.0),
    by_file: count([291.0, 329.0], 288.0),
};
/// A transparent huge page.
const TRANSPARENT: Counts = Counts {
    type1: count([19_612.0, 19_859.0], 74_281.0),
    iommufd: count([21_558.0, 21_952.0], 89_594.0),
    // Not counted for a memory file.
    by_file: count([21_558.0, 21_952.0], 89_594.0),
};
/// A page of 2 MiB of a pool. Starts of QEMU with it took 21,100 instructions by iommufd.
const POOL_2M: Counts = Counts {
    type1: count([12_895.0, 12_979.0], 74_031.0),
    iommufd: TRANSPARENT.iommufd,
    by_file: count([836.0, 934.0], 89_529.0),
};
/// A page of 1 GiB of a pool; by iommufd as so many of 2 MiB.
const POOL_1G: Counts = Counts {
    type1: count([6_384_097.0, 6_402_406.0], 31_600_000.0),
    iommufd: count([512.0 * 21_558.0, 512.0 * 21_952.0], 512.0 * 89_594.0),
    by_file: count([52_616.0, 100_971.0], 39_500_000.0),
};
/// Instructions that each contiguous range of small pages adds to a map or an unmap by type 1 and by iommufd: the
/// middle of 1,120 and 1,400, and of one count.
const RUN: [f64; 2] = [1_250.0, 400.0];
/// Instructions of this library for a page of 4 KiB, by VT-d.
const OURS_SMALL: f64 = 408.0;
/// The same for a transparent huge page.
const OURS_HUGE: f64 = 17_804.0;

/// The part by which starts of QEMU with `prealloc` were off at most: 4, 5, 5 and 14 % for four kinds of memory
/// (docs/inspect.md, "Compared with what happened").
const FAULTS_OFF: f64 = 0.14;
/// The part by which *pin, map* was off at most, in starts that were counted in a guest (there, too).
const PINS_OFF: f64 = 0.27;
/// The part by which the larger of the two times was off at most, given the time of 16 threads and that of 240, of
/// 7.5 TiB in pages of 2 MiB: 48 threads took 64 s, and 16 of 48 parts of 162 s are 54.
/// Source: qemu-devel, "util/oslib-posix: increase memprealloc thread count to 32", 6 November 2025.
const THREADS_OFF: f64 = 0.19;

/// Threads that QEMU starts at most for a memory object, before version 11 and since (10.0.2 and 11.1.3 were tried),
/// and bytes for each since 7.0: `get_memset_num_threads` and `MAX_MEM_PREALLOC_THREAD_COUNT`, `util/oslib-posix.c`.
const MOST_THREADS: [u32; 2] = [16, 32];
const BYTES_OF_A_THREAD: u64 = 64 << 20;
/// Versions of QEMU with one thread where none are named: `host_memory_backend_init`, `backends/hostmem.c`, before
/// commit f8d426a685.
const ONE_THREAD: std::ops::RangeInclusive<(u32, u32)> = (5, 0)..=(7, 0);

/// Prediction of a start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StartReport {
    /// Pages of the memory: as many faults and leaves.
    pub pages: u64,
    /// How VFIO maps; type 1 where that is not known.
    pub interface: Interface,
    /// Threads that bring in each part of the memory before it is mapped: those that the configuration asks for, as
    /// far as the monitor starts them and this machine has processors. Empty where no part is brought in before.
    pub threads: Vec<u32>,
    /// The calibration; `None` where there was none.
    pub speeds: Option<Speeds>,
    /// A start by type 1.
    pub type1: Option<Estimate>,
    /// A start by iommufd.
    pub iommufd: Option<Estimate>,
    /// A device is plugged in now; `None` of a machine that does not run.
    pub now: Option<Estimate>,
    /// A start by QEMU 5.0 to 7.0, which brings memory in by one thread; `None` where it does not, or is newer.
    pub one_thread: Option<Estimate>,
    /// A start with all changes that need no reboot.
    pub together: Option<Estimate>,
    /// Conditions of this machine; `None` without an estimate.
    pub conditions: Option<Conditions>,
    /// Limits of the estimate.
    pub notes: Vec<Note>,
}

impl StartReport {
    /// Predicts for `guest`. If it runs, `missing` is the part of its memory that is not present.
    pub(super) fn of(
        guest: &Guest,
        host: &Host,
        missing: Option<f64>,
        speeds: Option<&Speeds>,
    ) -> (Self, Vec<Advice>) {
        let interface = guest.interface.unwrap_or(Interface::Type1);
        let estimate = |guest: &Guest, host: &Host, interface, missing| {
            speeds.map(|speeds| guest.estimate(host, interface, missing, speeds))
        };
        let from_nothing = |interface| estimate(guest, host, interface, 1.0);
        let cpus = speeds.map_or_else(processors, |speeds| speeds.processors);
        let threads = |ram: &Ram| guest.threads_of(ram, host, cpus);
        let before = guest.memory.iter().any(|ram| ram.prealloc_threads > 0);
        let now = Now {
            guest,
            host,
            interface,
            estimate: from_nothing(interface),
            threads: speeds.map(|_| guest.most_threads().min(cpus)),
        };
        let (advice, together) = advice::changes(&now, |guest, host, interface| {
            estimate(guest, host, interface, 1.0)
        });
        let report = Self {
            pages: guest.pages(host),
            interface,
            threads: guest
                .memory
                .iter()
                .filter(|_| before)
                .map(threads)
                .collect(),
            speeds: speeds.cloned(),
            type1: from_nothing(Interface::Type1),
            iommufd: from_nothing(Interface::Iommufd),
            now: missing.and_then(|missing| {
                // `prealloc` is over.
                let mut guest = guest.clone();
                guest.remapped = None;
                guest
                    .memory
                    .iter_mut()
                    .for_each(|ram| ram.prealloc_threads = 0);
                estimate(&guest, host, interface, missing)
            }),
            one_thread: guest
                .by_one_thread()
                .and_then(|guest| estimate(&guest, host, interface, 1.0))
                .filter(|one| Some(*one) != from_nothing(interface)),
            together,
            conditions: None,
            notes: speeds.map_or(Vec::new(), |speeds| guest.notes(host, speeds)),
        };
        (report, advice)
    }

    /// Adds the conditions of this machine.
    pub(super) fn under(&mut self, conditions: Conditions) {
        if self.type1.is_some() {
            self.notes.extend(conditions.notes());
            self.conditions = Some(conditions);
        }
    }
}

impl Guest {
    /// Pages of its memory: as many faults and leaves.
    pub(super) fn pages(&self, host: &Host) -> u64 {
        let pages = |ram: &Ram| ram.bytes.div_ceil(ram.page_bytes(host));
        self.memory.iter().map(pages).fold(0, u64::saturating_add)
    }

    /// How long `interface` needs to map all memory, of which the part `missing` (0 to 1) is faulted in.
    pub(super) fn estimate(
        &self,
        host: &Host,
        interface: Interface,
        missing: f64,
        speeds: &Speeds,
    ) -> Estimate {
        let (mut fault, mut pin_map) = (Rate::default(), Some(Rate::default()));
        let mut threads_off = 0.0;
        let (mut low, times) = self.remapped.map_or((0, 1), |low| (low.bytes, low.times));
        // Maps and unmaps of small pages, and these pages.
        let mut small = (0.0, 0.0);
        for ram in &self.memory {
            let page = ram.page_bytes(host);
            let pages = ram.bytes as f64 / page as f64;
            let by_file = self.by_file && ram.shared;
            let threads = self.threads_of(ram, host, speeds.processors);
            let one = fault_of(ram.shared, page, speeds);
            let (each, off) = one.shared(page, threads, ram.host_nodes.len() as u32, speeds);
            fault.add(each, missing * pages);
            threads_off += off * missing * pages;
            let part = low.min(ram.bytes);
            low -= part;
            let part = part as f64 / page as f64;
            for (pages, maps) in [(pages - part, 1), (part, times)] {
                let one = pin_map_of(
                    (interface, by_file),
                    ram.pool_bytes.is_some(),
                    page,
                    maps,
                    speeds,
                );
                pin_map = pin_map.zip(one).map(|(mut sum, one)| {
                    sum.add(one, pages);
                    sum
                });
                if page < THP {
                    small.0 += pages * f64::from(2 * maps - 1);
                    small.1 += pages;
                }
            }
        }
        if let (Some(sum), Some(ours), true) = (&mut pin_map, speeds.map_small, small.1 > 0.0) {
            let instruction = ours.times(1.0 / OURS_SMALL);
            let each = small.0 / small.1 * RUN[interface as usize];
            sum.add(instruction, each * (self.runs as f64).min(small.1));
        }
        let faults = fault.spread_ns.hypot(FAULTS_OFF * fault.ns);
        let faults = faults.hypot(threads_off);
        let known = pin_map.unwrap_or_default();
        Estimate {
            fault_ns: fault.ns as u64,
            pin_map_ns: pin_map.map(|rate| rate.ns as u64),
            total_ns: (fault.ns + known.ns) as u64,
            error_ns: faults.hypot(known.spread_ns.hypot(PINS_OFF * known.ns)) as u64,
        }
    }
}

impl Guest {
    /// Threads that its monitor starts at most for a part of the memory.
    fn most_threads(&self) -> u32 {
        let [before, since] = MOST_THREADS;
        match self.monitor {
            Monitor::Qemu | Monitor::Libvirt if self.machine_version < Some((11, 0)) => before,
            Monitor::Qemu | Monitor::Libvirt => since,
            Monitor::CloudHypervisor | Monitor::Firecracker | Monitor::Other => u32::MAX,
        }
    }

    /// Threads that bring `ram` in before it is mapped, on a machine with so many processors; 0 leaves that to the map.
    fn threads_of(&self, ram: &Ram, host: &Host, processors: u32) -> u32 {
        let most = match self.monitor {
            Monitor::Qemu | Monitor::Libvirt => {
                let pages = ram.bytes.div_ceil(ram.page_bytes(host));
                pages.min(ram.bytes / BYTES_OF_A_THREAD).max(1)
            }
            Monitor::CloudHypervisor | Monitor::Firecracker | Monitor::Other => u64::MAX,
        };
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let threads = ram.prealloc_threads.min(self.most_threads());
        threads.min(processors).min(most)
    }

    /// The guest as QEMU 5.0 to 7.0 starts it; `None` of another monitor, a newer one, or a given number of threads.
    fn by_one_thread(&self) -> Option<Self> {
        let qemu = matches!(self.monitor, Monitor::Qemu | Monitor::Libvirt);
        // The program may be newer than its machine's type.
        let newer = self.machine_version > Some(*ONE_THREAD.end());
        let mut guest = self.clone();
        let mut parts = guest
            .memory
            .iter_mut()
            .filter(|ram| ram.prealloc_threads > 0 && !ram.threads_given);
        let found = parts.any(|ram| std::mem::replace(&mut ram.prealloc_threads, 1) > 1);
        parts.for_each(|ram| ram.prealloc_threads = 1);
        (qemu && !newer && found).then_some(guest)
    }

    /// Limits of what is known of threads and nodes.
    fn notes(&self, host: &Host, speeds: &Speeds) -> Vec<Note> {
        let mut notes = Vec::new();
        let mut say = |about, text| notes.push(Note { about, text });
        let threads = |ram: &Ram| self.threads_of(ram, host, speeds.processors);
        let less = self.memory.iter().map(|ram| (ram, threads(ram)));
        let mut less = less.filter(|(ram, threads)| *threads < ram.prealloc_threads);
        if let Some((ram, threads)) = less.next() {
            let mut text = format!(
                "{threads} of {} bring {} in: this machine has {}",
                ram.prealloc_threads,
                bytes(ram.bytes),
                counted(speeds.processors.into(), "processor")
            );
            if matches!(self.monitor, Monitor::Qemu | Monitor::Libvirt) {
                let [before, since] = MOST_THREADS;
                text += &format!(
                    ", QEMU starts {before} at most ({since} since version 11), one for 64 MiB"
                );
            }
            say("threads", text);
        }
        let tried = speeds.small_together.map_or(1, |tried| tried.threads);
        let most = self.memory.iter().map(threads).max().unwrap_or(0);
        if most > tried {
            let text = format!(
                "{tried} of {most} were tried, as memory is short: the error includes savings of more"
            );
            say("threads", text);
        }
        let bound = self
            .memory
            .iter()
            .map(|ram| ram.host_nodes.len())
            .max()
            .unwrap_or(0);
        if bound > 0 && most > 1 {
            let text = match speeds.nodes {
                1 => "this machine has one node: its bandwidth is taken for that of the nodes that memory is bound to"
                    .into(),
                nodes => format!(
                    "of {nodes} nodes, each is taken to have an equal part of the bandwidth that all have together"
                ),
            };
            say("nodes", text);
        }
        notes
    }
}

impl Rate {
    /// Adds `one` so many times: samples of a kind err alike, so their errors add up.
    fn add(&mut self, one: Self, times: f64) {
        self.ns += one.ns * times;
        self.spread_ns += one.spread_ns * times;
    }

    fn times(self, times: f64) -> Self {
        Self {
            ns: self.ns * times,
            spread_ns: self.spread_ns * times,
        }
    }

    /// Bringing in a page of `page` bytes by so many threads, in memory of so many nodes (0: of all), and the error of
    /// that. It is the larger of two times: each thread is as fast as one alone, and all are not faster than the
    /// nodes' memory. More threads than were tried are between what these took and their part of one's time.
    fn shared(self, page: u64, threads: u32, nodes: u32, speeds: &Speeds) -> (Self, f64) {
        if threads <= 1 {
            return (self, 0.0);
        }
        let together = match speeds.huge_together {
            Some(huge) if page >= THP => Some(huge),
            _ => speeds.small_together,
        };
        let own = self.times(1.0 / f64::from(threads));
        let (limit, tried) = together.map_or((self, 1), |all| {
            let every = speeds.nodes.max(1);
            let nodes = if nodes == 0 { every } else { nodes.min(every) };
            let part = f64::from(every) / f64::from(nodes);
            let ns = page as f64 * 1e9 / all.bytes_per_s * part;
            let spread_ns = ns * all.spread_bytes_per_s / all.bytes_per_s;
            (Self { ns, spread_ns }, all.threads)
        });
        let slower = if own.ns < limit.ns { limit } else { own };
        let untried = match threads > tried {
            true => slower.ns - own.ns,
            false => 0.0,
        };
        (slower, untried.hypot(THREADS_OFF * slower.ns))
    }
}

/// Pinning and mapping a page that is present, of a pool or not, by its file or not, so many times, and unmapping it
/// in between.
fn pin_map_of(
    (interface, by_file): (Interface, bool),
    pool: bool,
    page: u64,
    maps: u32,
    speeds: &Speeds,
) -> Option<Rate> {
    let (counts, counted) = match (page, pool) {
        (0..THP, _) => (SMALL_PAGE, SMALL),
        (_, false) => (TRANSPARENT, THP),
        (THP..GIANT, true) => (POOL_2M, THP),
        (GIANT.., true) => (POOL_1G, GIANT),
    };
    let count = match (interface, by_file) {
        (Interface::Type1, _) => counts.type1,
        (Interface::Iommufd, false) => counts.iommufd,
        (Interface::Iommufd, true) => counts.by_file,
    };
    let unmaps = f64::from(maps.saturating_sub(1)) * count.unmap;
    let [vtd, amd] = count.map.map(|map| f64::from(maps) * map + unmaps);
    let (ours, instructions) = match speeds.map_huge {
        Some(huge) if page >= THP => (huge, OURS_HUGE),
        _ => (speeds.map_small?, OURS_SMALL),
    };
    let mut rate = ours.times(vtd / instructions);
    rate.spread_ns = rate.spread_ns.hypot(rate.ns * (amd - vtd) / vtd);
    Some(rate.times(page as f64 / counted as f64))
}

/// Bringing in and zeroing a page. Pages of a pool, and transparent huge pages of shared memory, are zeroed by
/// the same loop as private ones.
fn fault_of(shared: bool, page: u64, speeds: &Speeds) -> Rate {
    let small = if shared {
        speeds.shared
    } else {
        speeds.private
    };
    match speeds.huge {
        Some(huge) if page >= THP => huge.times(page as f64 / THP as f64),
        _ => small.times(page as f64 / SMALL as f64),
    }
}

#[cfg(test)]
pub(super) mod tests;
