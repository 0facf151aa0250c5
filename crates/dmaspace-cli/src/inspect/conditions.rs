//! Conditions of this machine that make a start longer than its estimate, as far as they can be read before.
//!
//! The estimate is processor time on a quiet machine with free memory. The time that the kernel needs to reclaim
//! and compact memory, or a hypervisor to back it, follows from nothing readable: none is given, but
//! observations from elsewhere.

use std::fmt::Write as _;

use hostmem::{Machine, text_at_most};
use serde::Serialize;

use super::calibrate::processors;
use super::guest::{Guest, Host, Ram, SMALL, THP};
use super::process::MOST_TEXT;
use crate::size::{bytes, count, counted};

/// Resources of this machine, and the need of a start; `None` is unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Conditions {
    /// Bytes that the start faults in, without those of pools.
    pub needed_bytes: u64,
    /// Bytes that nothing uses (`MemFree`).
    pub free_bytes: Option<u64>,
    /// Bytes that can be had by reclaim, without swapping (`MemAvailable`).
    pub available_bytes: Option<u64>,
    /// Transparent huge pages among the needed.
    pub huge_pages: u64,
    /// Free pages of that size: blocks of 2 MiB and more in `/proc/buddyinfo`.
    pub free_huge_pages: Option<u64>,
    /// A hypervisor runs this machine (`hypervisor` among the flags of `/proc/cpuinfo`, which only x86 has).
    pub hypervisor: Option<bool>,
    /// Processes that ran or wanted to in the last minute (`/proc/loadavg`).
    pub load: Option<f64>,
    /// Processors for them.
    pub processors: u32,
}

/// A sentence about the estimate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Note {
    /// The subject, in a word or two.
    pub about: &'static str,
    /// The sentence.
    pub text: String,
}

impl Conditions {
    /// Reads `/proc` for a start that faults in the part `missing` (0 to 1) of the guest's memory.
    pub(super) fn read(guest: &Guest, host: &Host, missing: f64) -> Self {
        let text = |name: &str| text_at_most(format!("/proc/{name}"), MOST_TEXT).ok();
        let parts = || guest.memory.iter().filter(|ram| ram.pool_bytes.is_none());
        let huge = |ram: &&Ram| ram.page_bytes(host) == THP;
        let sum = |sum: u64, ram: &Ram| sum.saturating_add(ram.bytes);
        let part = |bytes: u64| (bytes as f64 * missing) as u64;
        let meminfo = text("meminfo");
        let small = Machine::probe().is_ok_and(|machine| machine.page == SMALL);
        let buddyinfo = text("buddyinfo").filter(|_| small);
        Self {
            needed_bytes: part(parts().fold(0, sum)),
            free_bytes: line_bytes(meminfo.as_deref(), "MemFree:"),
            available_bytes: line_bytes(meminfo.as_deref(), "MemAvailable:"),
            huge_pages: part(parts().filter(huge).fold(0, sum)) / THP,
            free_huge_pages: buddyinfo.as_deref().and_then(free_huge_pages),
            hypervisor: text("cpuinfo").as_deref().and_then(hypervisor),
            load: text("loadavg").and_then(|text| text.split(' ').next()?.parse().ok()),
            processors: processors(),
        }
    }

    /// Conditions that make a start longer; none where nothing is faulted in.
    pub(super) fn notes(&self) -> Vec<Note> {
        let mut notes = Vec::new();
        if self.needed_bytes == 0 {
            return notes;
        }
        let mut say = |about, text| notes.push(Note { about, text });
        let needed = bytes(self.needed_bytes);
        if let Some(free) = self.free_bytes.filter(|free| *free < self.needed_bytes) {
            let mut text = format!(
                "{} of {needed} are free, the rest is reclaimed",
                bytes(free)
            );
            let available = self.available_bytes;
            if let Some(most) = available.filter(|most| *most < self.needed_bytes) {
                let _ = write!(text, "; without swapping, {} at most", bytes(most));
            }
            say("reclaim", text);
        }
        let free = self.free_huge_pages;
        if let Some(free) = free.filter(|free| *free < self.huge_pages) {
            let (free, needed) = (count(free), count(self.huge_pages));
            say(
                "compaction",
                format!("{free} of {needed} transparent huge pages are free"),
            );
        }
        if self.hypervisor == Some(true) {
            let text = "up to 55 times as long where it has not backed the memory yet";
            say("hypervisor", text.into());
        }
        let load = self.load.unwrap_or(0.0);
        if load > f64::from(self.processors) {
            let processors = counted(self.processors.into(), "processor");
            let text = format!("{load} on {processors}: up to 2.3 times as long was measured");
            say("load", text);
        }
        let text = "on a quiet machine with free memory; elsewhere up to 10 times as long: \
                    github.com/kata-containers/kata-containers/issues/13084";
        say("spread", text.into());
        notes
    }
}

/// Bytes of a line of `/proc/meminfo`.
fn line_bytes(meminfo: Option<&str>, name: &str) -> Option<u64> {
    let line = meminfo?.lines().find_map(|line| line.strip_prefix(name))?;
    let kib = line.trim().strip_suffix("kB")?;
    kib.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Free blocks of 2 MiB in all zones: a line has the free blocks of each order, and one of order 9 has 2 MiB where
/// pages have 4 KiB. `None` where a line's orders do not end at 10.
fn free_huge_pages(buddyinfo: &str) -> Option<u64> {
    const ORDERS: usize = 11;
    const ORDER: usize = 9;
    let mut sum = 0_u64;
    for line in buddyinfo.lines() {
        // `Node 0, zone   Normal`, then the counts.
        let counts: Vec<_> = line.split_whitespace().skip(4).collect();
        if counts.len() != ORDERS {
            return None;
        }
        for (nth, blocks) in counts.iter().skip(ORDER).enumerate() {
            let blocks: u64 = blocks.parse().ok()?;
            sum = sum.saturating_add(blocks.checked_mul(1 << nth)?);
        }
    }
    (!buddyinfo.is_empty()).then_some(sum)
}

fn hypervisor(cpuinfo: &str) -> Option<bool> {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"))?;
    Some(flags.split_whitespace().any(|flag| flag == "hypervisor"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn about(conditions: &Conditions) -> Vec<&'static str> {
        let notes = conditions.notes();
        notes.into_iter().map(|note| note.about).collect()
    }

    #[test]
    fn what_is_short_is_said_and_what_suffices_is_not() {
        let quiet = Conditions {
            needed_bytes: 16 * GIB,
            free_bytes: Some(16 * GIB),
            available_bytes: Some(20 * GIB),
            huge_pages: 8192,
            free_huge_pages: Some(8192),
            hypervisor: Some(false),
            load: Some(2.0),
            processors: 2,
        };
        assert_eq!(about(&quiet), ["spread"]);
        let short = Conditions {
            free_bytes: Some(3 * GIB),
            free_huge_pages: Some(8191),
            hypervisor: Some(true),
            load: Some(2.01),
            ..quiet.clone()
        };
        let expected = ["reclaim", "compaction", "hypervisor", "load", "spread"];
        assert_eq!(about(&short), expected);
        let text = &short.notes()[0].text;
        assert_eq!(text, "3 GiB of 16 GiB are free, the rest is reclaimed");
        let shorter = Conditions {
            available_bytes: Some(10 * GIB),
            ..short
        };
        let text = &shorter.notes()[0].text;
        assert!(text.ends_with("; without swapping, 10 GiB at most"));
        let unknown = Conditions {
            needed_bytes: 1,
            ..Conditions::default()
        };
        assert_eq!(about(&unknown), ["spread"]);
        assert_eq!(about(&Conditions::default()), [""; 0]);
    }

    #[test]
    fn needs_are_those_of_memory_that_is_in_no_pool() {
        use super::super::start::tests::HOST;
        let ram = |bytes, pool_bytes| Ram {
            bytes,
            pool_bytes,
            ..Ram::default()
        };
        let guest = Guest {
            memory: vec![ram(4 * GIB, None), ram(GIB, Some(THP))],
            ..Guest::default()
        };
        let found = Conditions::read(&guest, &HOST, 0.5);
        assert_eq!((found.needed_bytes, found.huge_pages), (2 * GIB, 0));
        let host = Host {
            private: hostmem::ThpMode::Always,
            ..HOST
        };
        assert_eq!(Conditions::read(&guest, &host, 1.0).huge_pages, 2048);
    }

    #[test]
    fn files_of_the_kernel_are_read() {
        let zones = "Node 0, zone      DMA      1      1      1      1 1 1 1 0 0 1 3\n\
                     Node 1, zone   Normal   9 9 9 9 9 9 9 9 9 10 20\n";
        assert_eq!(free_huge_pages(zones), Some(1 + 6 + 10 + 40));
        assert_eq!(free_huge_pages("Node 0, zone DMA 1 1\n"), None);
        assert_eq!(free_huge_pages(""), None);
        assert_eq!(hypervisor("flags\t\t: fpu vme hypervisor lm\n"), Some(true));
        assert_eq!(hypervisor("flags\t\t: fpu vme lm\n"), Some(false));
        assert_eq!(hypervisor("Features\t: fp asimd\n"), None);
        let meminfo = Some("MemTotal:       100 kB\nMemFree:         12 kB\n");
        assert_eq!(line_bytes(meminfo, "MemFree:"), Some(12 << 10));
        assert_eq!(line_bytes(meminfo, "MemAvailable:"), None);
    }
}
