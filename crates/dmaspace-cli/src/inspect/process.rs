//! A process and its areas, from `/proc/PID`.

use std::collections::{BTreeMap, HashSet};
use std::io::ErrorKind;
use std::{fs, io};

use hostmem::read_at_most;
use serde::Serialize;

use super::{InspectError, MemoryLess, Missing, ProcessReport};
use crate::size::is_page;

/// The longest file of `/proc` and `/sys` that is read: `smaps` of a million areas.
pub(crate) const MOST_TEXT: u64 = 1 << 30;

/// An area of the address space (a line of `/proc/PID/maps`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Area {
    /// Its first address.
    #[serde(with = "crate::json::hex")]
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Kind of memory.
    pub kind: AreaKind,
    /// Its file, or the kernel's name for it.
    pub name: String,
    /// Bytes of the pages that it is made of: those of a pool, else 4096.
    pub page_bytes: u64,
    /// Bytes that are locked.
    pub locked_bytes: u64,
    /// It asks for transparent huge pages (`madvise`).
    pub asks_for_huge: bool,
    /// It asks for none.
    pub refuses_huge: bool,
    /// Devices could be given it: it may be written, and is memory.
    pub mappable: bool,
    /// It may be executed.
    pub executable: bool,
    /// Writes are seen by others that map it.
    pub shared: bool,
    /// It is memory of a virtual machine that the process runs.
    pub guest_ram: bool,
}

/// Kind of memory of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AreaKind {
    /// Memory of its own.
    Anonymous,
    /// A memory file, or shared memory.
    Shared,
    /// Huge pages of a pool.
    Hugetlb,
    /// A file on a disk.
    File,
}

/// The limit on locked memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// The soft `RLIMIT_MEMLOCK`, bytes; `None` when it is unlimited, or not known.
    pub memlock_bytes: Option<u64>,
    /// The process has `CAP_IPC_LOCK`, which lifts it (in the initial user namespace).
    pub lifted: bool,
}

pub(super) fn alive(pid: u32) -> bool {
    fs::metadata(format!("/proc/{pid}")).is_ok()
}

/// Fills in what is said of the process as a whole; returns its areas.
pub(super) fn read(report: &mut ProcessReport) -> Result<Vec<Area>, InspectError> {
    let pid = report.pid;
    let status = file(pid, "status")?;
    let line = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
    };
    report.name = plain(line("Name").unwrap_or_default());
    // Linux `fs/proc/task_mmu.c`: the lines of memory are those of an address space, and missing without one.
    if line("VmSize").is_none() {
        return Err(InspectError::NoMemory {
            pid,
            name: report.name.clone(),
            what: match line("State").is_some_and(|state| state.starts_with(['Z', 'X'])) {
                true => MemoryLess::Zombie,
                false => MemoryLess::KernelThread,
            },
        });
    }
    report.locked_bytes = line("VmLck").and_then(kib).unwrap_or(0);
    report.pinned_bytes = line("VmPin").and_then(kib).unwrap_or(0);
    let caps = line("CapEff").and_then(|hex| u64::from_str_radix(hex, 16).ok());
    report.limit.lifted = caps.is_some_and(|caps| caps >> 14 & 1 == 1);
    match file(pid, "limits") {
        Ok(limits) => report.limit.memlock_bytes = memlock(&limits),
        Err(error) => report.missing.push(Missing {
            what: "limit",
            why: crate::output::sentence(&error),
        }),
    }
    let mut areas = areas(&file(pid, "smaps")?);
    // `PR_SET_THP_DISABLE`, which is stronger than what areas ask for.
    if line("THP_enabled") == Some("0") {
        for area in &mut areas {
            (area.asks_for_huge, area.refuses_huge) = (false, true);
        }
    }
    Ok(areas)
}

fn file(pid: u32, name: &str) -> Result<String, InspectError> {
    let path = format!("/proc/{pid}/{name}");
    read_at_most(&path, MOST_TEXT)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .map_err(|source| explain(pid, path, source))
}

fn explain(pid: u32, path: String, source: io::Error) -> InspectError {
    match source.kind() {
        // A file of a process that has ended since says ESRCH.
        _ if !alive(pid) => InspectError::Gone { pid },
        ErrorKind::NotFound => InspectError::Gone { pid },
        ErrorKind::PermissionDenied => InspectError::Denied { pid },
        _ => InspectError::Read { path, source },
    }
}

/// `Max locked memory   8388608   8388608   bytes`
pub(super) fn memlock(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// `12 kB`
fn kib(text: &str) -> Option<u64> {
    let number: u64 = text.strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

/// The kernel's names of processes and files are what their owners chose, and are printed: what a terminal
/// would obey is replaced.
pub(super) fn plain(name: &str) -> String {
    let printed = |c: char| match c.is_control() {
        true => char::REPLACEMENT_CHARACTER,
        false => c,
    };
    name.chars().map(printed).collect()
}

/// The areas of a text like `/proc/PID/smaps`. Lines that are not understood are passed over.
pub fn areas(smaps: &str) -> Vec<Area> {
    let mut areas: Vec<Area> = Vec::new();
    for line in smaps.lines() {
        if let Some(area) = header(line) {
            areas.push(area);
        } else if let Some((area, (name, value))) = areas.last_mut().zip(line.split_once(':')) {
            detail(area, name, value.trim());
        }
    }
    areas
}

/// `7f00-7f01 rw-p 00000000 00:01 1024    /memfd:ram (deleted)`
fn header(line: &str) -> Option<Area> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    let (start, end) = (number(start)?, number(end)?);
    let mut fields = rest.split_whitespace();
    let (modes, _offset, _device, inode) = (
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next()?,
    );
    let name = plain(&fields.collect::<Vec<_>>().join(" "));
    // Only what begins with a slash is a file; [anon_shmem:..] and SYSV segments are shared memory.
    let shared = ["/memfd:", "/dev/shm/", "/dev/zero", "/SYSV", "[anon_shmem"];
    let kind = if shared.iter().any(|start| name.starts_with(start)) {
        AreaKind::Shared
    } else if inode != "0" {
        AreaKind::File
    } else {
        AreaKind::Anonymous
    };
    Some(Area {
        address: start,
        bytes: end.checked_sub(start)?,
        kind,
        mappable: modes.as_bytes().get(1) == Some(&b'w') && !name.starts_with("[v"),
        executable: modes.as_bytes().get(2) == Some(&b'x'),
        shared: modes.as_bytes().get(3) == Some(&b's'),
        guest_ram: false,
        name,
        page_bytes: 4096,
        locked_bytes: 0,
        asks_for_huge: false,
        refuses_huge: false,
    })
}

fn detail(area: &mut Area, name: &str, value: &str) {
    match name {
        "KernelPageSize" => {
            let bytes = kib(value).filter(|bytes| is_page(*bytes));
            area.page_bytes = bytes.unwrap_or(4096);
        }
        "Locked" => area.locked_bytes = kib(value).unwrap_or(0),
        "VmFlags" => {
            for flag in value.split_whitespace() {
                match flag {
                    "ht" => area.kind = AreaKind::Hugetlb,
                    "hg" => area.asks_for_huge = true,
                    "nh" => area.refuses_huge = true,
                    // Registers of devices, and frames without a page.
                    "io" | "pf" | "mm" => area.mappable = false,
                    _ => {}
                }
            }
        }
        _ => {}
    }
}

/// Where the memory is, by `/proc/PID/numa_maps`: of the areas that could be mapped.
pub(super) fn nodes(report: &mut ProcessReport, areas: &[Area]) {
    let Ok(maps) = file(report.pid, "numa_maps") else {
        report.missing.push(Missing {
            what: "nodes",
            why: "there is no numa_maps, or it is another user's".into(),
        });
        report.nodes = vec![(None, report.present_bytes)];
        return;
    };
    report.nodes = node_bytes(&maps, areas);
}

/// Bytes on each node, ascending, of a text like `/proc/PID/numa_maps`: of those of `areas` that devices
/// could be given. Lines and words that are not understood are passed over.
pub fn node_bytes(numa_maps: &str, areas: &[Area]) -> Vec<(Option<u32>, u64)> {
    let mappable = areas.iter().filter(|area| area.mappable);
    let known: HashSet<u64> = mappable.map(|area| area.address).collect();
    let mut found: BTreeMap<u32, u64> = BTreeMap::new();
    for line in numa_maps.lines() {
        let mut words = line.split_whitespace();
        let address = words
            .next()
            .and_then(|hex| u64::from_str_radix(hex, 16).ok());
        if !address.is_some_and(|address| known.contains(&address)) {
            continue;
        }
        let words: Vec<_> = words.collect();
        let page = words
            .iter()
            .find_map(|word| word.strip_prefix("kernelpagesize_kB="));
        let page = page.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(4);
        let page = page.saturating_mul(1024);
        for word in words {
            let Some((node, pages)) = word.strip_prefix('N').and_then(|word| word.split_once('='))
            else {
                continue;
            };
            if let (Ok(node), Ok(pages)) = (node.parse(), pages.parse::<u64>()) {
                let sum = found.entry(node).or_default();
                *sum = sum.saturating_add(pages.saturating_mul(page));
            }
        }
    }
    found
        .into_iter()
        .map(|(node, bytes)| (Some(node), bytes))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000200000 rw-s 00000000 00:01 1024 /memfd:ram (deleted)
Size:               2048 kB
KernelPageSize:     2048 kB
Locked:                4 kB
VmFlags: rd wr sh ht hg
7f0000400000-7f0000401000 r--p 00000000 08:01 7 /usr/lib/a file
VmFlags: rd
7f0000600000-7f0000601000 rw-s 00000000 00:05 9 /dev/vfio/1
VmFlags: rd wr sh pf io
nonsense
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
";

    #[test]
    fn areas_are_read_with_what_devices_could_be_given() {
        let areas = areas(SMAPS);
        assert_eq!(areas.len(), 4);
        assert_eq!(
            areas[0],
            Area {
                address: 0x7f00_0000_0000,
                bytes: 2 << 20,
                kind: AreaKind::Hugetlb,
                name: "/memfd:ram (deleted)".into(),
                page_bytes: 2 << 20,
                locked_bytes: 4096,
                asks_for_huge: true,
                refuses_huge: false,
                mappable: true,
                executable: false,
                shared: true,
                guest_ram: false,
            }
        );
        assert_eq!((areas[1].kind, areas[1].mappable), (AreaKind::File, false));
        assert_eq!(areas[1].name, "/usr/lib/a file");
        assert!(!areas[2].mappable && !areas[3].mappable);
    }

    #[test]
    fn pages_of_no_size_are_small() {
        for (said, bytes) in [
            ("64", 64 << 10),
            ("1048576", 1 << 30),
            ("0", 4096),
            ("3", 4096),
            ("12", 4096),
        ] {
            let text = format!("7f00-8f00 rw-s 0 00:01 1 /a\nKernelPageSize: {said} kB\n");
            assert_eq!(areas(&text)[0].page_bytes, bytes, "{said}");
        }
    }

    #[test]
    fn what_a_terminal_would_obey_is_not_in_a_name() {
        let line = "7f00-8f00 rw-s 00000000 00:01 1024 /memfd:\u{1b}]0;owned\u{7}\n";
        assert_eq!(areas(line)[0].name, "/memfd:\u{fffd}]0;owned\u{fffd}");
    }

    #[test]
    fn bytes_on_nodes_are_summed_whatever_the_numbers_are() {
        let areas = areas(SMAPS);
        let maps = "7f0000000000 default file=/memfd:ram N1=1 N0=3 kernelpagesize_kB=2048\n\
            7f0000000000 default N0=18446744073709551615 kernelpagesize_kB=18446744073709551615\n\
            7f0000400000 default N0=1\n";
        let expected = [(Some(0), u64::MAX), (Some(1), 2 << 20)];
        assert_eq!(node_bytes(maps, &areas), expected);
    }

    #[test]
    fn the_limit_is_a_number_or_none() {
        let line = "Max locked memory         8388608              8388608              bytes\n";
        assert_eq!(memlock(line), Some(8 << 20));
        assert_eq!(memlock("Max locked memory unlimited unlimited bytes"), None);
    }
}
