//! Counts and limits of the host that a start meets.

use std::path::{Path, PathBuf};

use dmaspace::layout::ReservedRange;
use hostmem::{CgroupLimit, HugeSize};

use super::need::{self, GuestRange, HYPERTRANSPORT, LockNeed};
use crate::devices::units::{address_bits, names, text};
use crate::inspect::process::memlock;
use crate::inspect::{Guest, Monitor};

/// Mappings of a container unless it was changed: Linux drivers/vfio/vfio_iommu_type1.c, `dma_entry_limit`.
const MAPPINGS: u64 = 65_535;
/// Devices, groups and ranges that are read.
const MOST: usize = 1024;

/// Counts and limits of a host; what is not known is empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Available {
    /// Free pages of pools, together and by node.
    pub(crate) pools: Vec<CountedPool>,
    /// Control groups, for memory in small pages (`None`) and in pages of this size.
    pub(crate) cgroups: Vec<(Option<u64>, CgroupLimit)>,
    /// The limit on locked memory.
    pub(crate) lock: Option<LockLimit>,
    /// Mappings of a container of type 1, where that was read.
    pub(crate) dma_entry_limit: Option<u64>,
    /// Ranges that the groups of the given devices keep from being mapped.
    pub(crate) reserved: Vec<ReservedRange>,
    /// The last address that their units translate.
    pub(crate) last: Option<u64>,
    /// BARs of these devices, bytes.
    pub(crate) bars: Vec<(String, u64)>,
    /// Versions of Linux and QEMU.
    pub(crate) linux: Option<(u32, u32)>,
    pub(crate) qemu: Option<(u32, u32)>,
    /// The host is of Arm.
    pub(crate) arm: bool,
}

/// Free pages of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CountedPool {
    /// `None`: of all nodes together.
    pub(crate) node: Option<u32>,
    pub(crate) page_bytes: u64,
    /// Free pages, without those that are promised.
    pub(crate) free: u64,
    /// Pages by which the pool may grow when they are asked for.
    pub(crate) growth: u64,
}

/// A limit on locked memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockLimit {
    /// The soft limit; `None` is unlimited.
    pub(crate) bytes: Option<u64>,
    /// CAP_IPC_LOCK lifts it.
    pub(crate) lifted: bool,
    /// Its owner.
    pub(crate) of: LockOwner,
}

/// The owner of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockOwner {
    /// This process, from whose shell the monitor is started.
    Shell,
    /// The monitor that runs.
    Process(u32),
    /// The domain, by `<hard_limit>`.
    HardLimit,
    /// The domain, by libvirt's own computation.
    Libvirt,
    /// A process of the input.
    Given,
}

impl LockOwner {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Shell => "this shell",
            Self::Process(_) => "the process",
            Self::HardLimit => "<hard_limit>",
            Self::Libvirt => "libvirt",
            Self::Given => "the process",
        }
    }
}

impl LockLimit {
    /// The limit that the start meets; `None` where there is none.
    pub(super) fn in_force(&self, need: &LockNeed) -> Option<u64> {
        match self.of {
            _ if self.lifted => None,
            LockOwner::Libvirt if need.mlocked_bytes == 0 => Some(need.by_libvirt()),
            _ => self.bytes,
        }
    }
}

impl Available {
    /// Reads what concerns `guest`, which runs as `pid`, below `root`.
    pub(super) fn read(root: &Path, guest: &Guest, pid: Option<u32>) -> Self {
        let sys = root.join("sys");
        let mut found = Self {
            pools: counted_pools(&sys)
                .into_iter()
                .map(|(_, pool)| pool)
                .collect(),
            lock: lock(root, guest, pid),
            dma_entry_limit: number(
                &sys.join("module/vfio_iommu_type1/parameters/dma_entry_limit"),
            ),
            linux: text(&root.join("proc/sys/kernel/osrelease")).and_then(|text| version(&text)),
            arm: cfg!(target_arch = "aarch64"),
            ..Self::default()
        };
        // A domain of libvirt gets a control group of its own.
        if pid.is_none() && guest.monitor != Monitor::Libvirt {
            let sizes = [HugeSize::TwoMiB, HugeSize::OneGiB];
            let huge = sizes.map(|size| (Some(size.bytes()), CgroupLimit::of_huge(root, size)));
            let all = [(None, CgroupLimit::of_memory(root))]
                .into_iter()
                .chain(huge);
            found.cgroups = all
                .filter_map(|(page, limit)| Some((page, limit?)))
                .collect();
        }
        for device in guest.devices.iter().take(MOST) {
            found.device(&sys, &device.address);
        }
        found
    }

    /// Adds what concerns a given device.
    fn device(&mut self, sys: &Path, address: &str) {
        // An address is a part of a path here.
        let known = |byte: u8| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.');
        if !address.contains(':') || !address.bytes().all(known) {
            return;
        }
        let folder = sys.join("bus/pci/devices").join(address);
        let resources = text(&folder.join("resource")).unwrap_or_default();
        for bar in resources.lines().take(6).filter_map(bar) {
            self.bars.push((address.to_owned(), bar));
        }
        let reserved = text(&folder.join("iommu_group/reserved_regions")).unwrap_or_default();
        for range in reserved.lines().filter_map(reserved_range) {
            if self.reserved.len() < MOST && !self.reserved.contains(&range) {
                self.reserved.push(range);
            }
        }
        let unit = text(&folder.join("iommu/intel-iommu/cap"));
        let cap = unit.and_then(|text| u64::from_str_radix(&text, 16).ok());
        if let Some(bits) = cap.and_then(address_bits) {
            let last = u64::MAX >> (64 - bits);
            self.last = Some(self.last.map_or(last, |known| known.min(last)));
        }
    }

    /// Free pages of a pool on these nodes, or on all; `None` is unknown.
    pub(super) fn free(&self, page: u64, nodes: &[u32]) -> Option<u64> {
        let pools = || {
            self.pools
                .iter()
                .filter(move |pool| pool.page_bytes == page)
        };
        let within = |pool: &&CountedPool| {
            pool.node
                .is_some_and(|node| nodes.is_empty() || nodes.contains(&node))
        };
        let by_node = pools().any(|pool| pool.node.is_some());
        let sum = pools().filter(within).map(|pool| pool.free);
        let sum = by_node.then(|| sum.fold(0, u64::saturating_add));
        if !nodes.is_empty() {
            return sum;
        }
        let all = pools().filter(|pool| pool.node.is_none());
        let all = all.map(|pool| pool.free).max();
        // The one leaves out what is promised to others.
        all.into_iter().chain(sum).min()
    }

    /// Pages by which a pool may grow.
    pub(super) fn growth(&self, page: u64) -> u64 {
        let pools = self.pools.iter().filter(|pool| pool.page_bytes == page);
        pools.map(|pool| pool.growth).max().unwrap_or(0)
    }

    pub(super) fn mapping_limit(&self) -> u64 {
        self.dma_entry_limit.unwrap_or(MAPPINGS)
    }

    /// Guest addresses of RAM on this host.
    pub(super) fn ranges(&self, guest: &Guest) -> Vec<GuestRange> {
        // Only hosts of AMD reserve it.
        let mut reserved = self.reserved.iter();
        let amd = reserved.any(|range| *range.range.start() == HYPERTRANSPORT);
        need::ranges(guest, amd, self.arm)
    }
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// Pools together and by node, each with the file of its free pages. Source: Linux
/// Documentation/admin-guide/mm/hugetlbpage.rst.
pub(crate) fn counted_pools(sys: &Path) -> Vec<(PathBuf, CountedPool)> {
    let nodes = sys.join("devices/system/node");
    let of_node = |name: String| {
        let node = name.strip_prefix("node")?.parse().ok()?;
        Some((Some(node), nodes.join(name).join("hugepages")))
    };
    let folders = names(&nodes).into_iter().filter_map(of_node);
    let all = (None, sys.join("kernel/mm/hugepages"));
    let mut found = Vec::new();
    for (node, folder) in std::iter::once(all).chain(folders) {
        for name in names(&folder) {
            let kib = name.strip_prefix("hugepages-");
            let kib = kib.and_then(|name| name.strip_suffix("kB")?.parse::<u64>().ok());
            let count = |file: &str| number(&folder.join(&name).join(file));
            let page = kib.and_then(|kib| kib.checked_mul(1024));
            let (Some(page_bytes), Some(free)) = (page, count("free_hugepages")) else {
                continue;
            };
            // A node has none of these files but the last.
            let promised = count("resv_hugepages").unwrap_or(0);
            let growth = count("nr_overcommit_hugepages").unwrap_or(0);
            let grown = count("surplus_hugepages").unwrap_or(0);
            let pool = CountedPool {
                node,
                page_bytes,
                free: free.saturating_sub(promised),
                growth: growth.saturating_sub(grown),
            };
            found.push((folder.join(&name).join("free_hugepages"), pool));
        }
    }
    found
}

/// The limit that the monitor has, or will have.
fn lock(root: &Path, guest: &Guest, pid: Option<u32>) -> Option<LockLimit> {
    let of_domain = |bytes, of| LockLimit {
        bytes,
        lifted: false,
        of,
    };
    if pid.is_none() && guest.monitor == Monitor::Libvirt {
        return Some(match guest.hard_limit_bytes {
            Some(bytes) => of_domain(Some(bytes), LockOwner::HardLimit),
            None => of_domain(None, LockOwner::Libvirt),
        });
    }
    let folder = match pid {
        Some(pid) => root.join(format!("proc/{pid}")),
        None => root.join("proc/self"),
    };
    let limits = text(&folder.join("limits"))?;
    let unlimited = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))
        .is_some_and(|line| line.split_whitespace().next() == Some("unlimited"));
    let bytes = memlock(&limits);
    if bytes.is_none() && !unlimited {
        return None;
    }
    let status = text(&folder.join("status")).unwrap_or_default();
    let caps = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let caps = caps.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    // The kernel asks in the first user namespace, which maps all numbers to themselves: user_namespaces(7).
    let map = text(&folder.join("uid_map"));
    let first = map.is_none_or(|map| map.split_whitespace().eq(["0", "0", "4294967295"]));
    Some(LockLimit {
        bytes,
        lifted: first && caps.is_some_and(|caps| caps >> 14 & 1 == 1),
        of: pid.map_or(LockOwner::Shell, LockOwner::Process),
    })
}

/// The bytes of a BAR of memory: first address, last address, flags. Source: Linux drivers/pci/pci-sysfs.c,
/// `resource_show`; include/linux/ioport.h, IORESOURCE_MEM.
fn bar(line: &str) -> Option<u64> {
    let mut numbers = line.split_whitespace().map(hex);
    let (first, last, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let memory = flags & 0x200 != 0 && last > first;
    memory.then(|| (last - first).checked_add(1))?
}

/// `0x00000000fee00000 0x00000000feefffff msi`
fn reserved_range(line: &str) -> Option<ReservedRange> {
    let mut words = line.split_whitespace();
    let (first, last) = (hex(words.next()?)?, hex(words.next()?)?);
    let name = words.next()?;
    (first <= last).then(|| ReservedRange::new(name, first..=last))
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// `6.18.44-debian`
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
