//! Memory nodes: asking for one, and looking where memory is.

use std::fs::File;
use std::io;

use runs::Span;
use thiserror::Error;

use crate::machine;
use crate::mapping::Mapping;
use crate::procfs;
use crate::stretches::{Pages, Stretches};
use crate::sys;

/// Questions of this crate to the system about memory nodes. [`KernelNodes`] asks the kernel; a test on a machine with
/// one node may answer itself.
pub trait NodePolicy {
    /// Numbers of the nodes that have memory.
    fn memory_nodes(&self) -> Vec<u32>;

    /// From now on the pages of `[address, address + len)` come from `node` while it has some.
    ///
    /// # Errors
    ///
    /// When the system refuses.
    fn prefer(&self, address: u64, len: u64, node: u32) -> io::Result<()>;

    /// Writes for each address the node of its page to `nodes`, or a negative error number where
    /// there is no page.
    ///
    /// # Errors
    ///
    /// When the system refuses, or `nodes` is shorter than `addresses`. A system that never tells says `ENOSYS` (Linux
    /// without `CONFIG_NUMA_MIGRATION`) or `EPERM` (a container's filter): then all nodes are unknown, which is no
    /// error of the caller.
    fn nodes_of(&self, addresses: &[u64], nodes: &mut [i32]) -> io::Result<()>;
}

/// The nodes as the kernel knows them: `/sys/devices/system/node`, mbind(2), move_pages(2).
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelNodes;

impl NodePolicy for KernelNodes {
    fn memory_nodes(&self) -> Vec<u32> {
        machine::memory_nodes()
    }

    fn prefer(&self, address: u64, len: u64, node: u32) -> io::Result<()> {
        match sys::prefer_node(address, len, node) {
            // Without `CONFIG_NUMA` all memory is on one node.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => match &*self.memory_nodes()
            {
                [only] if *only == node => Ok(()),
                _ => Err(error),
            },
            asked => asked,
        }
    }

    fn nodes_of(&self, addresses: &[u64], nodes: &mut [i32]) -> io::Result<()> {
        sys::nodes_of(addresses, nodes)
    }
}

/// Bytes of a mapping by kind of page. The three make up the whole mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Folios {
    /// In huge pages.
    pub huge: u64,
    /// In 4 KiB pages, or in a huge page that is mapped page by page.
    pub small: u64,
    /// Not there.
    pub absent: u64,
}

impl Folios {
    /// The part of the pages that are there that is huge, from 0 to 1; 0 when none is there.
    pub fn huge_share(&self) -> f64 {
        match self.huge + self.small {
            0 => 0.0,
            present => self.huge as f64 / present as f64,
        }
    }
}

/// Failure to learn from the kernel where or how memory is.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// `/proc/self/pagemap` cannot be opened.
    #[error("cannot open /proc/self/pagemap")]
    Pagemap(#[source] io::Error),
    /// `PAGEMAP_SCAN` failed; Linux has it since 6.7.
    #[error("the kernel does not report huge pages (PAGEMAP_SCAN)")]
    Scan(#[source] io::Error),
    /// `move_pages` failed.
    #[error("the kernel does not report the nodes of {pages} pages (move_pages)")]
    Nodes {
        /// Number of pages asked about.
        pages: usize,
        /// Cause.
        source: io::Error,
    },
}

impl KernelNodes {
    /// The processors of `node` on which this thread may run; none when it has none, or when the
    /// kernel does not tell.
    ///
    /// Source: Linux `Documentation/ABI/stable/sysfs-devices-node`, "cpulist".
    pub fn processors(self, node: u32) -> Vec<u32> {
        let list = procfs::read(format!("/sys/devices/system/node/node{node}/cpulist"));
        let mut processors = list.map_or(Vec::new(), |text| procfs::list(&text));
        let allowed = sys::allowed_cpus();
        processors.retain(|cpu| allowed.contains(cpu));
        processors
    }

    /// Has this thread run on these processors only, from now on.
    ///
    /// # Errors
    ///
    /// When the system refuses: none of them is there, or this thread may not run there.
    pub fn run_on(self, processors: &[u32]) -> io::Result<()> {
        sys::run_on(processors)
    }
}

pub(crate) fn open_pagemap() -> Result<File, PlacementError> {
    File::open("/proc/self/pagemap").map_err(PlacementError::Pagemap)
}

impl Mapping {
    /// Bytes of the mapping in huge pages, in small ones and in none.
    ///
    /// # Errors
    ///
    /// When the kernel has no `PAGEMAP_SCAN`.
    pub fn folios(&self) -> Result<Folios, PlacementError> {
        let pagemap = open_pagemap()?;
        let mut stretches = Stretches::new(self, Span::new(0, self.len()));
        let mut folios = Folios::default();
        while let Some(stretch) = stretches.next(&pagemap).map_err(PlacementError::Scan)? {
            let bytes = match stretch.pages {
                Pages::Huge => &mut folios.huge,
                Pages::Small => &mut folios.small,
                Pages::Absent => &mut folios.absent,
            };
            *bytes += stretch.span.len;
        }
        Ok(folios)
    }

    /// On which nodes the mapping's bytes are, by node; `None` holds the bytes that are not
    /// there, and all bytes when the kernel does not tell nodes. One look per huge page, and one
    /// per small page.
    ///
    /// # Errors
    ///
    /// When the kernel does not answer.
    pub fn nodes(&self) -> Result<Vec<(Option<u32>, u64)>, PlacementError> {
        self.nodes_by(&KernelNodes)
    }

    /// As [`nodes`](Self::nodes), over another [`NodePolicy`].
    ///
    /// # Errors
    ///
    /// As [`nodes`](Self::nodes).
    pub fn nodes_by(
        &self,
        policy: &dyn NodePolicy,
    ) -> Result<Vec<(Option<u32>, u64)>, PlacementError> {
        let pagemap = open_pagemap()?;
        let mut stretches = Stretches::new(self, Span::new(0, self.len()));
        let mut census = Census::new(policy);
        loop {
            let stretch = match stretches.next(&pagemap) {
                Ok(Some(stretch)) => stretch,
                Ok(None) => break,
                // Without PAGEMAP_SCAN each page is asked about.
                Err(_) => {
                    let page = self.backing().page();
                    census = Census::new(policy);
                    census.add(self.address(), self.len(), page)?;
                    break;
                }
            };
            let Span { start, len, .. } = stretch.span;
            let page = match stretch.pages {
                Pages::Huge => self.backing().largest_page().max(2 << 20),
                Pages::Small => 4096,
                Pages::Absent => {
                    census.count(None, len);
                    continue;
                }
            };
            census.add(self.address() + start, len, page)?;
        }
        census.finish()
    }
}

/// Counts bytes by node; asks about many pages at once.
struct Census<'a> {
    policy: &'a dyn NodePolicy,
    addresses: Vec<u64>,
    lengths: Vec<u64>,
    nodes: Vec<i32>,
    found: Vec<(Option<u32>, u64)>,
}

impl<'a> Census<'a> {
    const BATCH: usize = 4096;

    fn new(policy: &'a dyn NodePolicy) -> Self {
        Self {
            policy,
            addresses: Vec::with_capacity(Self::BATCH),
            lengths: Vec::with_capacity(Self::BATCH),
            nodes: vec![0; Self::BATCH],
            found: Vec::new(),
        }
    }

    /// Takes the pages of `page` bytes in `[address, address + len)`.
    fn add(&mut self, address: u64, len: u64, page: u64) -> Result<(), PlacementError> {
        let end = address + len;
        let mut at = address;
        while at < end {
            let next = ((at / page + 1) * page).min(end);
            self.addresses.push(at);
            self.lengths.push(next - at);
            if self.addresses.len() == Self::BATCH {
                self.ask()?;
            }
            at = next;
        }
        Ok(())
    }

    fn ask(&mut self) -> Result<(), PlacementError> {
        let pages = self.addresses.len();
        if pages == 0 {
            return Ok(());
        }
        match self.policy.nodes_of(&self.addresses, &mut self.nodes) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                self.nodes.fill(-1);
            }
            asked => asked.map_err(|source| PlacementError::Nodes { pages, source })?,
        }
        self.addresses.clear();
        let lengths = std::mem::take(&mut self.lengths);
        for (i, len) in lengths.iter().enumerate() {
            let node = self.nodes.get(i).and_then(|node| u32::try_from(*node).ok());
            self.count(node, *len);
        }
        self.lengths = lengths;
        self.lengths.clear();
        Ok(())
    }

    fn count(&mut self, node: Option<u32>, len: u64) {
        match self.found.iter_mut().find(|(found, _)| *found == node) {
            Some((_, bytes)) => *bytes += len,
            None => self.found.push((node, len)),
        }
    }

    fn finish(mut self) -> Result<Vec<(Option<u32>, u64)>, PlacementError> {
        self.ask()?;
        self.found.sort_unstable();
        Ok(self.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Backing;

    /// A system that refuses to tell nodes, with this number.
    struct Silent(i32);

    impl NodePolicy for Silent {
        fn memory_nodes(&self) -> Vec<u32> {
            Vec::new()
        }

        fn prefer(&self, _address: u64, _len: u64, _node: u32) -> io::Result<()> {
            Ok(())
        }

        fn nodes_of(&self, _addresses: &[u64], _nodes: &mut [i32]) -> io::Result<()> {
            Err(io::Error::from_raw_os_error(self.0))
        }
    }

    #[test]
    fn where_nodes_are_not_known_all_bytes_are_on_an_unknown_one() {
        let mapping = Mapping::new(Backing::Anon4K, 64 << 10, None).unwrap();
        // One page is there, so that it is asked about.
        mapping.cells()[0].store(1, std::sync::atomic::Ordering::Relaxed);
        for errno in [libc::ENOSYS, libc::EPERM] {
            let nodes = mapping.nodes_by(&Silent(errno)).unwrap();
            assert_eq!(nodes, [(None, 64 << 10)]);
        }
        let error = mapping.nodes_by(&Silent(libc::EFAULT)).unwrap_err();
        assert!(matches!(error, PlacementError::Nodes { .. }), "{error}");
    }
}
