//! How long the kernel takes until a device reaches a guest's memory: pages are faulted in and zeroed, then
//! VFIO pins them and maps them for the IOMMU.
//!
//! Faults are what this machine took for them when it was tried ([`Speeds`]). VFIO cannot be tried without a
//! device. Its share is the time that this library needs here to pin and map the same pages, times the
//! instructions of Linux over those of this library ([`Counts`], counted in a guest).
//!
//! The error adds three parts as squares: the spread of the samples; what starts of QEMU were off by
//! ([`FAULTS_OFF`], [`PINS_OFF`]); and the difference between VT-d and AMD-Vi.

use serde::Serialize;

use super::advice::{self, Advice, Now};
use super::calibrate::{Rate, Speeds};
use super::guest::{GIANT, Guest, Host, Interface, Ram, SMALL, THP};

/// Instructions of Linux 7.2 that pin and map a page that is present, by VT-d and by AMD-Vi, and that unmap it by
/// VT-d: medians of five, of 64 MiB or, for a page of 1 GiB, of one.
///
/// Source: `cargo xtask guest-dma` (docs/bench.md, "Beside VFIO and iommufd").
#[derive(Clone, Copy, Debug)]
struct Counts {
    type1: Count,
    /// By addresses, as QEMU 10.0 maps.
    iommufd: Count,
    /// By the file, as QEMU maps from 10.1 on.
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
    // Of a memory file it was not counted.
    by_file: count([21_558.0, 21_952.0], 89_594.0),
};
/// A page of 2 MiB of a pool. Starts of QEMU with it took 21,100 instructions by iommufd (docs/inspect.md).
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
/// What each contiguous range of small pages adds to a map or an unmap by type 1 and by iommufd: the middle of 1,120 and
/// 1,400, and of one count (docs/inspect.md).
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

/// Processor time of a start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// Faulting in and zeroing.
    pub fault_ns: u64,
    /// Pinning, and writing leaves; `None` where this library may not pin.
    pub pin_map_ns: Option<u64>,
    /// The sum of what is known.
    pub total_ns: u64,
    /// The error of the sum, in both directions.
    pub error_ns: u64,
}

/// What is predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StartReport {
    /// Pages of the memory: as many faults and leaves.
    pub pages: u64,
    /// How VFIO maps; type 1 where that is not known.
    pub interface: Interface,
    /// The calibration; `None` where there was none.
    pub speeds: Option<Speeds>,
    /// A start by type 1.
    pub type1: Option<Estimate>,
    /// A start by iommufd.
    pub iommufd: Option<Estimate>,
    /// A device is plugged in now; `None` of a machine that does not run.
    pub now: Option<Estimate>,
    /// A start with all changes that need no reboot.
    pub together: Option<Estimate>,
}

impl StartReport {
    /// Predicts for `guest`. Of one that runs, `missing` is the part of its memory that is not present.
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
        let tried = speeds.and_then(|speeds| speeds.parallel);
        let now = Now {
            guest,
            host,
            interface,
            estimate: from_nothing(interface),
            threads: tried.map(|tried| tried.threads),
        };
        let (advice, together) = advice::changes(&now, |guest, host, interface| {
            estimate(guest, host, interface, 1.0)
        });
        let report = Self {
            pages: guest.pages(host),
            interface,
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
            together,
        };
        (report, advice)
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
        let (mut low, times) = self.remapped.map_or((0, 1), |low| (low.bytes, low.times));
        // Maps and unmaps of small pages, and these pages.
        let mut small = (0.0, 0.0);
        for ram in &self.memory {
            let page = ram.page_bytes(host);
            let pages = ram.bytes as f64 / page as f64;
            let by_file = self.by_file && ram.shared;
            let threads = speedup(ram.prealloc_threads, speeds);
            fault.add(
                fault_of(ram.shared, page, speeds),
                missing * pages / threads,
            );
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
        let known = pin_map.unwrap_or_default();
        Estimate {
            fault_ns: fault.ns as u64,
            pin_map_ns: pin_map.map(|rate| rate.ns as u64),
            total_ns: (fault.ns + known.ns) as u64,
            error_ns: faults.hypot(known.spread_ns.hypot(PINS_OFF * known.ns)) as u64,
        }
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

/// How many times as fast so many threads are; between what was tried and one, in proportion.
fn speedup(threads: u32, speeds: &Speeds) -> f64 {
    match speeds.parallel {
        Some(tried) if threads > 1 && tried.times > 1.0 => {
            let share = f64::from(threads - 1) / f64::from(tried.threads - 1);
            1.0 + (tried.times - 1.0) * share.min(1.0)
        }
        _ => 1.0,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::calibrate::Parallel;
    use super::super::guest::Remapped;
    use super::*;
    use hostmem::ThpMode;

    const GIB: u64 = 1 << 30;

    /// A machine that takes a nanosecond for an instruction, and zeroes 4 KiB in 100.
    pub(in super::super) fn speeds() -> Speeds {
        let rate = |ns| Rate { ns, spread_ns: 0.0 };
        Speeds {
            private: rate(1100.0),
            shared: rate(2100.0),
            huge: Some(rate(51_200.0)),
            map_small: Some(rate(OURS_SMALL)),
            map_huge: Some(rate(OURS_HUGE)),
            parallel: Some(Parallel {
                threads: 4,
                times: 2.5,
            }),
        }
    }

    pub(in super::super) const HOST: Host = Host {
        private: ThpMode::Never,
        shared: ThpMode::Never,
        default_pool: 2 << 20,
    };

    pub(in super::super) fn of(ram: Ram) -> Guest {
        Guest {
            memory: vec![ram],
            ..Guest::default()
        }
    }

    fn estimate(ram: Ram, interface: Interface, missing: f64) -> Estimate {
        of(ram).estimate(&HOST, interface, missing, &speeds())
    }

    #[test]
    fn an_estimate_is_counts_times_what_one_takes() {
        let ram = Ram {
            bytes: GIB,
            ..Ram::default()
        };
        let found = estimate(ram.clone(), Interface::Type1, 1.0);
        let pages = GIB / 4096;
        assert_eq!(found.fault_ns, pages * 1100);
        assert_near(found.pin_map_ns, pages * 506);
        assert_near(Some(found.total_ns), pages * 1606);
        // What is there is not brought in, and is pinned all the same.
        let half = estimate(ram.clone(), Interface::Type1, 0.5);
        assert_eq!(
            (half.fault_ns, half.pin_map_ns),
            (pages * 550, found.pin_map_ns)
        );
        let shared = Ram {
            shared: true,
            ..ram
        };
        let found = estimate(shared, Interface::Iommufd, 1.0);
        assert_eq!(found.fault_ns, pages * 2100);
        assert_near(found.pin_map_ns, pages * 267);
    }

    /// But for rounding.
    fn assert_near(found: Option<u64>, expected: u64) {
        assert!(
            found.is_some_and(|found| found.abs_diff(expected) <= 1),
            "{found:?}, expected {expected}"
        );
    }

    #[test]
    fn without_pins_faults_are_all() {
        let speeds = Speeds {
            map_small: None,
            map_huge: None,
            ..speeds()
        };
        let ram = Ram {
            bytes: GIB,
            ..Ram::default()
        };
        let found = of(ram).estimate(&HOST, Interface::Type1, 1.0, &speeds);
        assert_eq!((found.pin_map_ns, found.total_ns), (None, found.fault_ns));
    }

    #[test]
    fn huge_pages_are_zeroed_and_hardly_more() {
        let host = Host {
            private: ThpMode::Always,
            ..HOST
        };
        for (pool_bytes, type1, iommufd) in [
            (None, 512 * 19_612, 512 * 21_558),
            (Some(2 << 20), 512 * 12_895, 512 * 21_558),
            (Some(GIB), 6_384_097, 512 * 21_558),
        ] {
            let guest = of(Ram {
                bytes: GIB,
                pool_bytes,
                ..Ram::default()
            });
            for (interface, expected) in [(Interface::Type1, type1), (Interface::Iommufd, iommufd)]
            {
                let found = guest.estimate(&host, interface, 1.0, &speeds());
                assert_eq!(found.fault_ns, 512 * 51_200);
                assert_near(found.pin_map_ns, expected);
            }
        }
    }

    #[test]
    fn shared_memory_is_mapped_by_its_file_where_the_monitor_does_so() {
        for (pool_bytes, expected) in [
            (None, GIB / 4096 * 291),
            (Some(2 << 20), 512 * 836),
            (Some(GIB), 52_616),
        ] {
            let ram = |shared| Ram {
                bytes: GIB,
                pool_bytes,
                shared,
                ..Ram::default()
            };
            let map = |shared, by_file, interface| {
                let guest = Guest {
                    by_file,
                    ..of(ram(shared))
                };
                let found = guest.estimate(&HOST, interface, 0.0, &speeds());
                found.pin_map_ns
            };
            let addresses = map(true, false, Interface::Iommufd);
            assert_near(map(true, true, Interface::Iommufd), expected);
            assert_eq!(map(false, true, Interface::Iommufd), addresses);
            assert_eq!(
                map(true, true, Interface::Type1),
                map(true, false, Interface::Type1)
            );
        }
    }

    #[test]
    fn what_is_mapped_again_is_unmapped_before() {
        let remapped = Some(Remapped {
            bytes: GIB,
            times: 5,
        });
        let ram = |bytes| Ram {
            bytes,
            ..Ram::default()
        };
        // In two parts, one of which is remapped in half.
        let guest = Guest {
            memory: vec![ram(GIB / 2), ram(GIB), ram(GIB)],
            remapped,
            ..Guest::default()
        };
        let pages = GIB / 4096;
        for (interface, map, run) in [
            (Interface::Type1, 506, 1250),
            (Interface::Iommufd, 267, 400),
        ] {
            let low = 5 * map + 4 * 321;
            let found = guest.estimate(&HOST, interface, 0.0, &speeds());
            assert_near(found.pin_map_ns, pages * low + 3 * pages / 2 * map);
            // Nine operations on two parts of five, and one on the others.
            let scattered = Guest {
                runs: 1000,
                ..guest.clone()
            };
            let found = scattered.estimate(&HOST, interface, 0.0, &speeds());
            let runs = 1000 * run * (2 * 9 + 3) / 5;
            assert_near(found.pin_map_ns, pages * low + 3 * pages / 2 * map + runs);
        }
        let (start, _) = StartReport::of(&guest, &HOST, Some(0.0), Some(&speeds()));
        // What is plugged in later is mapped once.
        assert_near(start.now.unwrap().pin_map_ns, 5 * pages / 2 * 506);
    }

    #[test]
    fn threads_share_the_faults_as_far_as_was_tried() {
        let by = |prealloc_threads| {
            let ram = Ram {
                bytes: GIB,
                prealloc_threads,
                ..Ram::default()
            };
            let found = estimate(ram, Interface::Type1, 1.0);
            assert_near(found.pin_map_ns, 262_144 * 506);
            found.fault_ns / 262_144
        };
        assert_eq!([0, 1, 2, 4, 16].map(by), [1100, 1100, 733, 440, 440]);
    }

    #[test]
    fn the_error_has_its_three_parts() {
        let ram = Ram {
            bytes: GIB,
            ..Ram::default()
        };
        // Nothing is faulted in: VT-d and AMD-Vi differ by 72 instructions.
        let found = estimate(ram.clone(), Interface::Type1, 0.0);
        let error = 262_144.0 * 72.0_f64.hypot(PINS_OFF * 506.0);
        assert_near(Some(found.error_ns), error as u64);
        let rate = |ns, spread_ns| Rate { ns, spread_ns };
        let speeds = Speeds {
            private: rate(1100.0, 30.0),
            map_small: Some(rate(OURS_SMALL, 0.1 * OURS_SMALL)),
            ..speeds()
        };
        let found = of(ram).estimate(&HOST, Interface::Type1, 1.0, &speeds);
        let faults = 30.0_f64.hypot(FAULTS_OFF * 1100.0);
        let pins = 50.6_f64.hypot(72.0).hypot(PINS_OFF * 506.0);
        let expected = 262_144.0 * faults.hypot(pins);
        assert_near(Some(found.error_ns), expected as u64);
    }
}
