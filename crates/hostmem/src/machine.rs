//! Memory of the machine, as it stands: nothing here changes anything.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::backing::Backing;
use crate::cgroup::CgroupLimit;
use crate::procfs::{self, ProcfsError};
use crate::sys;

/// A size of hugetlb pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HugeSize {
    /// 2 MiB.
    TwoMiB,
    /// 1 GiB.
    OneGiB,
}

impl HugeSize {
    /// Bytes of one page.
    pub const fn bytes(self) -> u64 {
        1 << self.log2()
    }

    pub(crate) const fn log2(self) -> u32 {
        match self {
            Self::TwoMiB => 21,
            Self::OneGiB => 30,
        }
    }

    /// The pool's directory. Source: Linux `Documentation/admin-guide/mm/hugetlbpage.rst`.
    pub(crate) fn directory(self) -> PathBuf {
        format!(
            "/sys/kernel/mm/hugepages/hugepages-{}kB",
            self.bytes() / 1024
        )
        .into()
    }
}

/// `2M` or `1G`.
impl fmt::Display for HugeSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TwoMiB => "2M",
            Self::OneGiB => "1G",
        })
    }
}

/// A pool of hugetlb pages of one size; all counts are pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Pool {
    /// Pages of the pool (`nr_hugepages`).
    pub total: u64,
    /// Pages that are not in use (`free_hugepages`).
    pub free: u64,
    /// Free pages that are promised to mappings (`resv_hugepages`).
    pub reserved: u64,
}

impl Pool {
    /// Pages that a new mapping can have.
    pub const fn unreserved(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }

    /// Reads the pool; `None` when the machine has none of this size.
    pub fn read(size: HugeSize) -> Option<Self> {
        let directory = size.directory();
        Some(Self {
            total: procfs::read_number(directory.join("nr_hugepages")).ok()?,
            free: procfs::read_number(directory.join("free_hugepages")).ok()?,
            reserved: procfs::read_number(directory.join("resv_hugepages")).ok()?,
        })
    }
}

/// Memory that gets transparent huge pages.
///
/// Source: Linux `Documentation/admin-guide/mm/transhuge.rst`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThpMode {
    /// All memory.
    Always,
    /// Memory that asked with `MADV_HUGEPAGE`.
    Madvise,
    /// None, or a kernel without them.
    Never,
}

impl ThpMode {
    /// The word in brackets of `always [madvise] never`.
    fn of(text: &str) -> Self {
        match text.split(['[', ']']).nth(1) {
            Some("always") => Self::Always,
            Some("madvise") => Self::Madvise,
            _ => Self::Never,
        }
    }
}

/// Facts about the machine's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Memory of the machine, bytes.
    pub total: u64,
    /// Memory that can be had without swapping, bytes (`MemAvailable`).
    pub available: u64,
    /// The control group that leaves this process the least of memory; `None` without a limit.
    pub cgroup: Option<CgroupLimit>,
    /// The same of huge pages of 2 MiB.
    pub cgroup_2m: Option<CgroupLimit>,
    /// The same of huge pages of 1 GiB.
    pub cgroup_1g: Option<CgroupLimit>,
    /// Size of a base page, bytes.
    pub page: u64,
    /// Memory that gets transparent huge pages.
    pub thp: ThpMode,
    /// The pool of 2 MiB pages; `None` when the machine has none.
    pub pool_2m: Option<Pool>,
    /// The pool of 1 GiB pages; `None` when the machine has none.
    pub pool_1g: Option<Pool>,
    /// Numbers of the nodes that have memory.
    pub nodes: Vec<u32>,
}

impl Machine {
    /// Reads the facts.
    ///
    /// # Errors
    ///
    /// When `/proc/meminfo` cannot be read; everything else may be missing.
    pub fn probe() -> Result<Self, ProcfsError> {
        const MEMINFO: &str = "/proc/meminfo";
        let meminfo = procfs::read(MEMINFO)?;
        let bytes = |what: &'static str| {
            procfs::line_bytes(&meminfo, what).ok_or(ProcfsError::Missing {
                path: MEMINFO.into(),
                what,
            })
        };
        let thp = procfs::read("/sys/kernel/mm/transparent_hugepage/enabled");
        Ok(Self {
            total: bytes("MemTotal")?,
            available: bytes("MemAvailable")?,
            cgroup: CgroupLimit::of_memory(Path::new("/")),
            cgroup_2m: CgroupLimit::of_huge(Path::new("/"), HugeSize::TwoMiB),
            cgroup_1g: CgroupLimit::of_huge(Path::new("/"), HugeSize::OneGiB),
            page: sys::page_size(),
            thp: thp.map_or(ThpMode::Never, |text| ThpMode::of(&text)),
            pool_2m: Pool::read(HugeSize::TwoMiB),
            pool_1g: Pool::read(HugeSize::OneGiB),
            nodes: memory_nodes(),
        })
    }

    /// The pool of pages of `size`, if there is one.
    pub const fn pool(&self, size: HugeSize) -> Option<Pool> {
        match size {
            HugeSize::TwoMiB => self.pool_2m,
            HugeSize::OneGiB => self.pool_1g,
        }
    }

    /// The control group that limits memory of `backing` the most.
    pub const fn cgroup(&self, backing: Backing) -> Option<&CgroupLimit> {
        match backing.huge_size() {
            None => self.cgroup.as_ref(),
            Some(HugeSize::TwoMiB) => self.cgroup_2m.as_ref(),
            Some(HugeSize::OneGiB) => self.cgroup_1g.as_ref(),
        }
    }

    /// The control group that does not leave `len` bytes of `backing`.
    pub fn cgroup_below(&self, backing: Backing, len: u64) -> Option<&CgroupLimit> {
        self.cgroup(backing).filter(|cgroup| cgroup.left() < len)
    }

    /// Bytes of `backing` that this process can have, huge pages once they are in their pool: `available`, or
    /// what its control group leaves where that is less.
    pub fn left(&self, backing: Backing) -> u64 {
        let cgroup = self.cgroup(backing).map_or(u64::MAX, CgroupLimit::left);
        self.available.min(cgroup)
    }
}

/// Nodes with memory; node 0 alone on a kernel without NUMA.
pub(crate) fn memory_nodes() -> Vec<u32> {
    procfs::read("/sys/devices/system/node/has_memory")
        .map(|text| procfs::list(&text))
        .ok()
        .filter(|nodes| !nodes.is_empty())
        .unwrap_or_else(|| vec![0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bracketed_mode_is_the_one_in_force() {
        assert_eq!(ThpMode::of("always [madvise] never\n"), ThpMode::Madvise);
        assert_eq!(ThpMode::of("[always] madvise never\n"), ThpMode::Always);
        assert_eq!(ThpMode::of("always madvise [never]\n"), ThpMode::Never);
        assert_eq!(ThpMode::of(""), ThpMode::Never);
    }

    #[test]
    fn this_machine_has_memory_on_a_node() {
        let machine = Machine::probe().unwrap();
        assert!(machine.total >= machine.available && machine.available > 0);
        assert!(machine.page.is_power_of_two());
        assert!(!machine.nodes.is_empty());
    }
}
