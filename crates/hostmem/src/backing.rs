//! Kinds of memory and the choice among them.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::machine::{HugeSize, Machine, ThpMode};

const HUGE_2M: u64 = HugeSize::TwoMiB.bytes();
const HUGE_1G: u64 = HugeSize::OneGiB.bytes();

/// Kind of memory of which a memory object consists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backing {
    /// Anonymous private memory in 4 KiB pages, never in huge ones.
    Anon4K,
    /// Anonymous private memory in transparent huge pages where the kernel has them.
    Thp,
    /// A memory file of 2 MiB hugetlb pages, shared.
    Hugetlb2M,
    /// A memory file of 1 GiB hugetlb pages, shared.
    Hugetlb1G,
    /// A plain memory file, shared.
    Memfd,
}

impl Backing {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Anon4K,
        Self::Thp,
        Self::Hugetlb2M,
        Self::Hugetlb1G,
        Self::Memfd,
    ];

    /// The name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Anon4K => "4k",
            Self::Thp => "thp",
            Self::Hugetlb2M => "hugetlb-2m",
            Self::Hugetlb1G => "hugetlb-1g",
            Self::Memfd => "memfd",
        }
    }

    /// The page size in bytes of which every length and every part of the memory is a multiple.
    /// Transparent huge pages are a promise for none of it, so theirs is 4 KiB.
    pub const fn page(self) -> u64 {
        match self.huge_size() {
            Some(size) => size.bytes(),
            None => 4096,
        }
    }

    /// The largest page in bytes that this memory can consist of.
    pub const fn largest_page(self) -> u64 {
        match self {
            Self::Thp => 2 << 20,
            _ => self.page(),
        }
    }

    /// The pool from which the pages come, if they come from one.
    pub const fn huge_size(self) -> Option<HugeSize> {
        match self {
            Self::Hugetlb2M => Some(HugeSize::TwoMiB),
            Self::Hugetlb1G => Some(HugeSize::OneGiB),
            _ => None,
        }
    }

    /// Pages of a pool that has pages of `page` bytes.
    pub(crate) const fn of_pool(page: u64) -> Option<Self> {
        match page {
            HUGE_2M => Some(Self::Hugetlb2M),
            HUGE_1G => Some(Self::Hugetlb1G),
            _ => None,
        }
    }

    /// The backing with the largest pages that the machine gives for `len` bytes as it stands;
    /// no pool is changed for it.
    ///
    /// ```
    /// use hostmem::{Backing, Machine};
    /// let choice = Backing::choose(64 << 20, &Machine::probe()?);
    /// println!("{}: {}", choice.backing, choice.reason);
    /// # Ok::<(), hostmem::ProcfsError>(())
    /// ```
    pub fn choose(len: u64, machine: &Machine) -> Choice {
        let mut against = Vec::new();
        for size in [HugeSize::OneGiB, HugeSize::TwoMiB] {
            let backing = match size {
                HugeSize::OneGiB => Self::Hugetlb1G,
                HugeSize::TwoMiB => Self::Hugetlb2M,
            };
            let free = machine.pool(size).map_or(0, |pool| pool.unreserved());
            let needed = len.div_ceil(size.bytes());
            if len % size.bytes() != 0 {
                if free > 0 {
                    against.push(format!("the size is no multiple of {size}"));
                }
            } else if let Some(cgroup) = machine
                .cgroup_below(backing, len)
                .filter(|_| free >= needed)
            {
                against.push(format!("of huge pages of {size} {cgroup}"));
            } else if free >= needed && needed > 0 {
                against.push(format!(
                    "{free} huge pages of {size} are free, {needed} are needed"
                ));
                return Choice::new(backing, &against);
            } else if free > 0 {
                against.push(format!(
                    "only {free} of {needed} huge pages of {size} are free"
                ));
            }
        }
        if against.is_empty() {
            against.push("no huge pages of 1G or 2M are free".into());
        }
        let (backing, last) = match machine.thp {
            ThpMode::Never => (Self::Anon4K, "transparent huge pages are off"),
            _ if len < 2 << 20 => (Self::Anon4K, "the size is below one huge page of 2M"),
            ThpMode::Always => (Self::Thp, "transparent huge pages are always on"),
            ThpMode::Madvise => (Self::Thp, "transparent huge pages are on for madvise"),
        };
        against.push(last.into());
        Choice::new(backing, &against)
    }
}

/// Result of [`Backing::choose`], with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The backing.
    pub backing: Backing,
    /// Reason, as half a sentence: `no huge pages of 1G or 2M are free; transparent huge pages are
    /// on for madvise`.
    pub reason: String,
}

impl Choice {
    fn new(backing: Backing, reasons: &[String]) -> Self {
        Self {
            backing,
            reason: reasons.join("; "),
        }
    }
}

/// The [`name`](Backing::name).
impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no backing has.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown backing {name:?}: there are 4k, thp, hugetlb-2m, hugetlb-1g and memfd")]
pub struct UnknownBacking {
    /// The given name.
    pub name: String,
}

impl FromStr for Backing {
    type Err = UnknownBacking;

    fn from_str(name: &str) -> Result<Self, UnknownBacking> {
        Self::ALL
            .into_iter()
            .find(|backing| backing.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| UnknownBacking { name: name.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::CgroupLimit;
    use crate::machine::Pool;

    fn machine(free_1g: u64, free_2m: u64, thp: ThpMode) -> Machine {
        let pool = |free| Pool {
            total: free + 2,
            free: free + 1,
            reserved: 1,
        };
        Machine {
            total: 64 << 30,
            available: 32 << 30,
            cgroup: None,
            cgroup_2m: None,
            cgroup_1g: None,
            page: 4096,
            thp,
            pool_2m: Some(pool(free_2m)),
            pool_1g: Some(pool(free_1g)),
            nodes: vec![0],
        }
    }

    #[test]
    fn the_largest_pages_that_are_free_are_chosen_and_the_reason_says_so() {
        let choose = |len, free_1g, free_2m, thp| {
            let choice = Backing::choose(len, &machine(free_1g, free_2m, thp));
            (choice.backing, choice.reason)
        };
        let (backing, reason) = choose(2 << 30, 2, 4096, ThpMode::Always);
        assert_eq!(backing, Backing::Hugetlb1G);
        assert_eq!(reason, "2 huge pages of 1G are free, 2 are needed");
        let (backing, reason) = choose(2 << 30, 1, 1024, ThpMode::Always);
        assert_eq!(backing, Backing::Hugetlb2M);
        assert_eq!(
            reason,
            "only 1 of 2 huge pages of 1G are free; 1024 huge pages of 2M are free, 1024 are needed"
        );
        let (backing, reason) = choose(256 << 20, 0, 0, ThpMode::Madvise);
        assert_eq!(backing, Backing::Thp);
        assert_eq!(
            reason,
            "no huge pages of 1G or 2M are free; transparent huge pages are on for madvise"
        );
        let mut limited = machine(2, 4096, ThpMode::Always);
        limited.cgroup_1g = Some(CgroupLimit {
            path: "/sys/fs/cgroup/vm".into(),
            limit: 3 << 30,
            in_use: 2 << 30,
        });
        let choice = Backing::choose(2 << 30, &limited);
        assert_eq!(choice.backing, Backing::Hugetlb2M);
        assert_eq!(
            choice.reason,
            "of huge pages of 1G the control group /sys/fs/cgroup/vm leaves 1 GiB (3 GiB allowed, 2 GiB in \
             use); 4096 huge pages of 2M are free, 1024 are needed"
        );
        assert_eq!(choose(3 << 20, 0, 9, ThpMode::Always).0, Backing::Thp);
        assert_eq!(choose(1 << 20, 0, 9, ThpMode::Always).0, Backing::Anon4K);
        assert_eq!(choose(1 << 30, 0, 0, ThpMode::Never).0, Backing::Anon4K);
        assert_eq!(choose(0, 9, 9, ThpMode::Always).0, Backing::Anon4K);
    }

    #[test]
    fn names_are_read_back() {
        for backing in Backing::ALL {
            assert_eq!(backing.to_string().parse(), Ok(backing));
        }
        let error = "5k".parse::<Backing>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown backing \"5k\": there are 4k, thp, hugetlb-2m, hugetlb-1g and memfd"
        );
    }
}
