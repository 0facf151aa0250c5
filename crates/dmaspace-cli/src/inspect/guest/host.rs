//! Settings of this machine that decide about a guest's pages, and pools that a path names.

use std::path::Path;

use hostmem::{ThpMode, text_at_most};

use super::{Guest, THP};
use crate::inspect::process::MOST_TEXT;
use crate::size::is_page;

/// Where hugetlbfs files lie: `HUGETLBFS_MAGIC` of `include/uapi/linux/magic.h`.
const HUGETLBFS: u32 = 0x9584_58f6;

/// Settings of this machine that decide about a guest's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Which private memory gets transparent huge pages.
    pub private: ThpMode,
    /// Which shared memory does.
    pub shared: ThpMode,
    /// Bytes of a page of the pool that is used where no size is named.
    pub default_pool: u64,
}

impl Host {
    /// Reads sysfs; without a setting there are no transparent huge pages.
    pub(in crate::inspect) fn read() -> Self {
        let mode = |name: &str| {
            let sizes = ["hugepages-2048kB/", ""];
            let texts = sizes.iter().filter_map(|size| {
                let path = format!("/sys/kernel/mm/transparent_hugepage/{size}{name}");
                text_at_most(path, MOST_TEXT).ok()
            });
            let mut chosen = texts.filter_map(|text| {
                let word = text.split(['[', ']']).nth(1)?.to_owned();
                (word != "inherit").then_some(word)
            });
            match chosen.next().as_deref() {
                Some("always" | "within_size" | "force") => ThpMode::Always,
                Some("madvise" | "advise") => ThpMode::Madvise,
                _ => ThpMode::Never,
            }
        };
        let meminfo = text_at_most("/proc/meminfo", MOST_TEXT).unwrap_or_default();
        let pool = meminfo.lines().find_map(|line| {
            let kib = line
                .strip_prefix("Hugepagesize:")?
                .trim()
                .strip_suffix("kB")?;
            kib.trim().parse::<u64>().ok()?.checked_mul(1024)
        });
        Self {
            private: mode("enabled"),
            shared: mode("shmem_enabled"),
            default_pool: pool.filter(|bytes| is_page(*bytes)).unwrap_or(THP),
        }
    }

    /// Finds out which of the guest's files are of a hugetlb pool. A file system that is not mounted here is
    /// judged by its name.
    pub(in crate::inspect) fn look_at_files(&self, guest: &mut Guest) {
        for ram in &mut guest.memory {
            let Some(file) = ram.file.as_deref().filter(|_| ram.pool_bytes.is_none()) else {
                continue;
            };
            let mut places = Path::new(file).ancestors();
            let found = places.find_map(|place| Some((place, rustix::fs::statfs(place).ok()?)));
            ram.pool_bytes = match found {
                Some((_, found)) if found.f_type as u32 == HUGETLBFS => {
                    Some(found.f_bsize as u64).filter(|bytes| is_page(*bytes))
                }
                // `/dev/hugepages` is a plain directory where hugetlbfs is not mounted.
                Some((place, _))
                    if pool_part(&place.to_string_lossy()).is_some()
                        && !file.starts_with("/dev/hugepages") =>
                {
                    None
                }
                _ => {
                    let named = pool_by_name(file, self.default_pool);
                    ram.pool_by_name = named.is_some();
                    named
                }
            };
        }
    }
}

/// The part of a path that tells of a pool: from a folder on whose name begins so.
fn pool_part(path: &str) -> Option<&str> {
    let mut starts = path.match_indices('/').map(|(at, _)| at + 1);
    let begins = |part: &&str| {
        part.get(..4)
            .is_some_and(|name| name.eq_ignore_ascii_case("huge"))
    };
    starts.find_map(|at| path.get(at..).filter(begins))
}

/// Bytes of a page of the pool that a path names: `/dev/hugepages1G`, `/run/hugepages/kvm/2048kB`. `default_pool` is
/// that of a name without a size, and `None` is a path of no pool.
pub(super) fn pool_by_name(path: &str, default_pool: u64) -> Option<u64> {
    // Numbers of the name, in KiB where they are so large.
    const SIZES: [(&str, u64); 7] = [
        ("1048576", 1 << 30),
        ("524288", 512 << 20),
        ("2048", 2 << 20),
        ("1G", 1 << 30),
        ("512M", 512 << 20),
        ("32M", 32 << 20),
        ("2M", 2 << 20),
    ];
    let part = pool_part(path)?.to_ascii_uppercase();
    let named = SIZES.iter().find(|(name, _)| part.contains(name));
    Some(named.map_or(default_pool, |(_, bytes)| *bytes))
}

#[cfg(test)]
mod tests {
    use super::pool_by_name;

    #[test]
    fn pools_are_known_by_name() {
        for (path, page) in [
            ("/dev/hugepages", Some(4096)),
            ("/dev/hugepages1G/libvirt", Some(1 << 30)),
            ("/run/hugepages/kvm/1048576kB", Some(1 << 30)),
            ("/run/hugepages/kvm/2048kB", Some(2 << 20)),
            ("/hugepages2M/", Some(2 << 20)),
            ("/mnt/huge", Some(4096)),
            ("/mnt/huge1g/vm", Some(1 << 30)),
            ("/mnt/Huge_1GB", Some(1 << 30)),
            ("/home/u/vm-1G-huge.img", None),
            ("/home/u1G/hugepages", Some(4096)),
            ("/dev/shm/1G", None),
        ] {
            assert_eq!(pool_by_name(path, 4096), page, "{path}");
        }
    }
}
