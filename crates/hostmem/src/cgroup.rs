//! Memory that control groups leave this process.
//!
//! The limit of a group holds for everything below it, so that the process's own group and each ancestor
//! count. A process that goes beyond the limit on memory is killed where it touches the page: unlike other
//! limits, this one yields no error, and has to be looked at before.
//!
//! File cache is in use as far as the group counts, and is dropped before a process is killed; it counts as
//! free here, as it does in `MemAvailable`. Pages of files in memory (tmpfs, memfd) are not file cache there.
//!
//! Source: Linux `Documentation/admin-guide/cgroup-v2.rst` ("Memory Interface Files", "HugeTLB Interface
//! Files"), `cgroup-v1/memory.rst` (2.2, 5.2, 6), `cgroup-v1/hugetlb.rst`; cgroups(7), proc_pid_mountinfo(5).

use std::fmt;
use std::path::{Component, Path, PathBuf};

use runs::Bytes;

use crate::machine::HugeSize;
use crate::procfs;
use crate::sys;

/// The limit of a control group, and its use. All bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupLimit {
    /// The group's directory.
    pub path: PathBuf,
    /// The limit.
    pub limit: u64,
    /// Bytes that all processes of the group use, without file cache.
    pub in_use: u64,
}

impl CgroupLimit {
    /// The group that leaves this process the least of memory; `None` without a limit. `root` is `/`, or a folder that
    /// stands for it.
    pub fn of_memory(root: &Path) -> Option<Self> {
        Controller::Memory.limit(root)
    }

    /// The same of huge pages of `size`.
    pub fn of_huge(root: &Path, size: HugeSize) -> Option<Self> {
        Controller::Huge(size).limit(root)
    }

    /// Bytes still available.
    pub const fn left(&self) -> u64 {
        self.limit.saturating_sub(self.in_use)
    }
}

/// `the control group /sys/fs/cgroup/a leaves 61 MiB (64 MiB allowed, 3 MiB in use)`.
impl fmt::Display for CgroupLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the control group {} leaves {} ({} allowed, {} in use)",
            self.path.display(),
            Bytes(self.left()),
            Bytes(self.limit),
            Bytes(self.in_use)
        )
    }
}

/// Resource whose use a group limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    Memory,
    Huge(HugeSize),
}

impl Controller {
    const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Huge(_) => "hugetlb",
        }
    }

    /// The group of this process that leaves the least, below `root`, which is `/` but for tests; `None`
    /// where no group has a limit, or none can be read.
    pub(crate) fn limit(self, root: &Path) -> Option<CgroupLimit> {
        let of_self = |file| procfs::read(root.join("proc/self").join(file));
        let (groups, mounts) = (of_self("cgroup").ok()?, of_self("mountinfo").ok()?);
        let groups = groups.lines().filter_map(|line| {
            let (hierarchy, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let unified = hierarchy == "0" && controllers.is_empty();
            let ours = unified || controllers.split(',').any(|name| name == self.name());
            ours.then_some((unified, path))
        });
        groups
            .filter_map(|(unified, path)| {
                let kind = if unified { "cgroup2" } else { "cgroup" };
                let mut found = mounts.lines().filter_map(Mount::read);
                found.find_map(|mount| {
                    let here = mount.kind == kind
                        && (unified || mount.options.split(',').any(|name| name == self.name()));
                    let below = here.then(|| mount.below(path))?;
                    Some(self.least(unified, root, &mount.point, &below?))
                })?
            })
            .min_by_key(CgroupLimit::left)
    }

    /// The least that the groups on the way from `point` to `point/below` leave.
    fn least(self, unified: bool, root: &Path, point: &str, below: &Path) -> Option<CgroupLimit> {
        let top = root.join(point.trim_start_matches('/'));
        let group = top.join(below);
        let up_to_the_mount = group
            .ancestors()
            .take_while(|directory| directory.starts_with(&top))
            .enumerate()
            // Without a hierarchy, which only version 1 knows, a group counts nothing but its own processes.
            .take_while(|(nth, directory)| {
                let hierarchy = procfs::read_number(directory.join("memory.use_hierarchy"));
                *nth == 0 || hierarchy.unwrap_or(1) != 0
            });
        up_to_the_mount
            .filter_map(|(_, directory)| self.of_group(unified, directory))
            .min_by_key(CgroupLimit::left)
    }

    /// The limit of one group; `None` where it has none, as the first one of version 2.
    fn of_group(self, unified: bool, directory: &Path) -> Option<CgroupLimit> {
        let controller = match self {
            Self::Memory => "memory",
            Self::Huge(HugeSize::TwoMiB) => "hugetlb.2MB",
            Self::Huge(HugeSize::OneGiB) => "hugetlb.1GB",
        };
        let (limit, used) = match unified {
            true => ("max", "current"),
            false => ("limit_in_bytes", "usage_in_bytes"),
        };
        let number = |file| procfs::read_number(directory.join(format!("{controller}.{file}")));
        // "max" is no number; version 1 has the largest number of pages in its place.
        let unlimited = i64::MAX as u64 / sys::page_size() * sys::page_size();
        let limit = number(limit).ok().filter(|limit| *limit < unlimited)?;
        let cache = match self {
            Self::Memory => file_cache(unified, directory),
            Self::Huge(_) => 0,
        };
        Some(CgroupLimit {
            path: directory.into(),
            limit,
            in_use: number(used).ok()?.saturating_sub(cache),
        })
    }
}

/// Bytes of file cache that the kernel can drop, of the group and all below it.
fn file_cache(unified: bool, directory: &Path) -> u64 {
    let stat = procfs::read(directory.join("memory.stat")).unwrap_or_default();
    let wanted = match unified {
        true => ["inactive_file", "active_file"],
        false => ["total_inactive_file", "total_active_file"],
    };
    let lines = stat.lines().filter_map(|line| line.split_once(' '));
    lines
        .filter(|(name, _)| wanted.contains(name))
        .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

/// A line of `mountinfo`, as far as it is needed.
struct Mount<'a> {
    /// The directory of the file system that is mounted.
    root: String,
    /// Mount point.
    point: String,
    kind: &'a str,
    /// Options of the file system.
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let (place, file_system) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?, place.next()?);
        let mut file_system = file_system.split(' ');
        Some(Self {
            root: unescaped(root),
            point: unescaped(point),
            kind: file_system.next()?,
            options: file_system.nth(1)?,
        })
    }

    /// Directory of the group below the mount point; `None` if it is outside of what is mounted.
    fn below(&self, group: &str) -> Option<PathBuf> {
        let below = Path::new(group).strip_prefix(&self.root).ok()?;
        let plain = |part| matches!(part, Component::Normal(_));
        below.components().all(plain).then(|| below.into())
    }
}

/// A path of `mountinfo`, which writes blanks and the like as a backslash and three octal digits.
fn unescaped(path: &str) -> String {
    let mut text = String::new();
    let mut rest = path;
    while let Some((before, after)) = rest.split_once('\\') {
        text += before;
        let code = after
            .get(..3)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(code) => text.push(code.into()),
            None => text.push('\\'),
        }
        rest = match code {
            Some(_) => after.get(3..).unwrap_or_default(),
            None => after,
        };
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    const MIB: u64 = 1 << 20;

    /// A file system of these files.
    fn tree(files: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn found(root: &TempDir, controller: Controller) -> Option<(String, u64, u64)> {
        let found = controller.limit(root.path())?;
        let path = found.path.strip_prefix(root.path()).unwrap();
        Some((path.to_str().unwrap().into(), found.limit, found.in_use))
    }

    const UNIFIED: (&str, &str) = (
        "proc/self/mountinfo",
        "22 1 0:21 / /proc rw shared:5 - proc proc rw\n\
         30 1 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    );

    #[test]
    fn of_nested_groups_that_counts_which_leaves_the_least() {
        let at = "sys/fs/cgroup";
        let files = |outer: &'static str, inner: &'static str| {
            tree(&[
                UNIFIED,
                ("proc/self/cgroup", "0::/outer/middle/inner\n"),
                (&format!("{at}/outer/memory.max"), outer),
                (&format!("{at}/outer/memory.current"), "50000000\n"),
                (&format!("{at}/outer/middle/memory.max"), "max\n"),
                (&format!("{at}/outer/middle/memory.current"), "5\n"),
                (&format!("{at}/outer/middle/inner/memory.max"), inner),
                (
                    &format!("{at}/outer/middle/inner/memory.current"),
                    "30000000\n",
                ),
                (
                    &format!("{at}/outer/middle/inner/memory.stat"),
                    "anon 1\nfile 29000000\ninactive_file 20000000\nactive_file 7000000\nshmem 4\n",
                ),
                (&format!("{at}/other/memory.max"), "1\n"),
                (&format!("{at}/other/memory.current"), "1\n"),
            ])
        };
        let outer = (format!("{at}/outer"), 60_000_000, 50_000_000);
        let inner = (format!("{at}/outer/middle/inner"), 10_000_000, 3_000_000);
        let tree = files("60000000\n", "max\n");
        assert_eq!(found(&tree, Controller::Memory), Some(outer.clone()));
        // 7 of its own, with the file cache that can be dropped, are less than 10 of the ancestor.
        let tree = files("60000000\n", "10000000\n");
        assert_eq!(found(&tree, Controller::Memory), Some(inner.clone()));
        let tree = files("56000000\n", "10000000\n");
        let least = Some((outer.0, 56_000_000, outer.2));
        assert_eq!(found(&tree, Controller::Memory), least);
        let tree = files("max\n", "max\n");
        assert_eq!(found(&tree, Controller::Memory), None);
        let two = Controller::Huge(HugeSize::TwoMiB);
        assert_eq!(found(&tree, two), None);
    }

    #[test]
    fn version_1_has_a_directory_for_each_controller_and_hierarchies_of_its_own() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                      34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
                      35 31 0:32 / /sys/fs/cgroup/mem\\040ory rw - cgroup cgroup rw,memory\n\
                      36 31 0:33 / /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let unlimited = "9223372036854771712\n";
        let files = |hierarchy| {
            let at = "sys/fs/cgroup/mem ory";
            tree(&[
                ("proc/self/mountinfo", mounts),
                (
                    "proc/self/cgroup",
                    "5:hugetlb:/vm\n4:cpu,memory:/a/b\n3:cpuset:/\n0::/\n",
                ),
                (&format!("{at}/memory.limit_in_bytes"), unlimited),
                (&format!("{at}/memory.usage_in_bytes"), "77\n"),
                (&format!("{at}/memory.use_hierarchy"), "0\n"),
                (&format!("{at}/a/memory.limit_in_bytes"), "4194304\n"),
                (&format!("{at}/a/memory.usage_in_bytes"), "1048576\n"),
                (&format!("{at}/a/memory.use_hierarchy"), hierarchy),
                (&format!("{at}/a/b/memory.limit_in_bytes"), "8388608\n"),
                (&format!("{at}/a/b/memory.usage_in_bytes"), "3145728\n"),
                (&format!("{at}/a/b/memory.use_hierarchy"), "0\n"),
                (
                    &format!("{at}/a/b/memory.stat"),
                    "inactive_file 9\nactive_file 9\ntotal_inactive_file 524288\ntotal_active_file 524288\n",
                ),
                (
                    "sys/fs/cgroup/hugetlb/vm/hugetlb.2MB.limit_in_bytes",
                    "6291456\n",
                ),
                (
                    "sys/fs/cgroup/hugetlb/vm/hugetlb.2MB.usage_in_bytes",
                    "2097152\n",
                ),
                (
                    "sys/fs/cgroup/hugetlb/vm/hugetlb.1GB.limit_in_bytes",
                    unlimited,
                ),
                ("sys/fs/cgroup/hugetlb/vm/hugetlb.1GB.usage_in_bytes", "0\n"),
            ])
        };
        let at = |group: &str| format!("sys/fs/cgroup/mem ory/{group}");
        let tree = files("1\n");
        let outer = Some((at("a"), 4 * MIB, MIB));
        assert_eq!(found(&tree, Controller::Memory), outer);
        let (two, one) = (HugeSize::TwoMiB, HugeSize::OneGiB);
        let huge = Some(("sys/fs/cgroup/hugetlb/vm".into(), 6 * MIB, 2 * MIB));
        assert_eq!(found(&tree, Controller::Huge(two)), huge);
        assert_eq!(found(&tree, Controller::Huge(one)), None);
        let tree = files("0\n");
        let alone = Some((at("a/b"), 8 * MIB, 2 * MIB));
        assert_eq!(found(&tree, Controller::Memory), alone);
    }

    #[test]
    fn a_container_sees_its_group_where_that_is_mounted() {
        let files = |group, root: &str| {
            let mount = format!("30 1 0:26 {root} /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n");
            tree(&[
                ("proc/self/mountinfo", &mount),
                ("proc/self/cgroup", group),
                ("sys/fs/cgroup/memory.max", "5000\n"),
                ("sys/fs/cgroup/memory.current", "7000\n"),
                ("sys/fs/cgroup/job/memory.max", "4000\n"),
                ("sys/fs/cgroup/job/memory.current", "1000\n"),
                ("etc/memory.max", "1\n"),
                ("etc/memory.current", "1\n"),
            ])
        };
        let whole = Some(("sys/fs/cgroup".into(), 5000, 7000));
        for (group, root) in [
            ("0::/\n", "/"),
            ("0::/docker/4f\n", "/docker/4f"),
            ("0::/docker/4f/job\n", "/docker/4f"),
        ] {
            let tree = files(group, root);
            assert_eq!(found(&tree, Controller::Memory), whole, "{group}");
            let least = Controller::Memory.limit(tree.path()).unwrap();
            assert_eq!(least.left(), 0, "more is in use than is allowed");
        }
        // A group that is not below the mount cannot be seen, even if another directory has its name.
        for (group, root) in [
            ("0::/docker/5\n", "/docker/4f"),
            ("0::/docker/4f2\n", "/docker/4f"),
            ("0::/../../../etc\n", "/"),
            ("nonsense\n", "/"),
        ] {
            let tree = files(group, root);
            assert_eq!(found(&tree, Controller::Memory), None, "{group}");
        }
        assert_eq!(found(&tree(&[]), Controller::Memory), None);
    }
}
