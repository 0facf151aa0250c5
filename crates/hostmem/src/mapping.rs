//! Memory objects of this process.
//!
//! A [`Mapping`] is one object, mapped as a whole from its creation to its end: anonymous memory,
//! or a file that exists in memory only. Nothing is ever on disk. Its bytes are reached through
//! [`cells`](Mapping::cells): devices and processors share them, so each access is an atomic one
//! of 8 bytes, and no reference to plain bytes exists.
//!
//! Memory that other code has mapped, like a virtual machine's, is a mapping as well
//! ([`Mapping::foreign`]); it is used as it is, and its owner held.
//!
//! Anonymous memory is not inherited over `fork` (`MADV_DONTFORK`): a child would share its pages
//! copy-on-write, and the parent's next write would move a page away from under a device.
//! Memory files are sealed against any change of size. Of foreign memory both is up to its owner.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use runs::{Offset, Span};
use thiserror::Error;

use crate::backing::Backing;
use crate::cgroup::CgroupLimit;
use crate::machine::{HugeSize, Machine, Pool};
use crate::nodes::{KernelNodes, NodePolicy};
use crate::procfs::ProcfsError;
use crate::sys::{self, Advice, Region};
use crate::windows::Window;
use runs::Bytes;

/// One memory object, mapped readable and writable until it is dropped.
#[derive(Debug)]
pub struct Mapping {
    region: Region,
    file: Option<File>,
    /// Offset of the first byte in the file.
    file_offset: u64,
    backing: Backing,
    len: u64,
    node: Option<u32>,
    window: Option<Window>,
    /// Parts that a pin holds with `mlock`, which does not count how often.
    pub(crate) locked: Mutex<Vec<Span<Offset>>>,
}

/// Failure to make a mapping.
#[derive(Debug, Error)]
pub enum MappingError {
    /// A length of 0.
    #[error("a memory object cannot have 0 bytes")]
    Empty,
    /// A length that the backing's pages do not divide.
    #[error("{len} bytes are no multiple of the {} pages of {backing}", Bytes(*page))]
    Unaligned {
        /// The length, bytes.
        len: u64,
        /// The backing.
        backing: Backing,
        /// Its page, bytes.
        page: u64,
    },
    /// Memory that does not begin where a page does.
    #[error("the address {address:#x} is no multiple of the {} pages of {backing}", Bytes(*page))]
    Address {
        /// Its start.
        address: u64,
        /// The backing.
        backing: Backing,
        /// Its page, bytes.
        page: u64,
    },
    /// Huge pages of a size that this crate does not know.
    #[error("huge pages of {} are neither of 2 MiB nor of 1 GiB", Bytes(*page))]
    HugePage {
        /// Their size, bytes.
        page: u64,
    },
    /// More than can be had now.
    #[error("{} are asked for, {} are available", Bytes(*len), Bytes(*available))]
    MoreThanAvailable {
        /// The length, bytes.
        len: u64,
        /// `MemAvailable`, bytes.
        available: u64,
    },
    /// More than a control group leaves, which would kill this process.
    #[error("{} are asked for, {cgroup}", Bytes(*len))]
    OverCgroup {
        /// The length, bytes.
        len: u64,
        /// The group.
        cgroup: CgroupLimit,
    },
    /// The pool of huge pages is too small.
    #[error("{needed} huge pages of {size} are needed, {free} are free")]
    HugePages {
        /// Their size.
        size: HugeSize,
        /// Pages that are needed.
        needed: u64,
        /// Pages that are free and not promised.
        free: u64,
    },
    /// The machine's base pages are not the 4 KiB that this crate counts in.
    #[error("this machine has base pages of {}, not of 4 KiB", Bytes(*page))]
    BasePage {
        /// The base page, bytes.
        page: u64,
    },
    /// A node without memory, or none at all.
    #[error("node {node} has no memory; nodes that have: {nodes:?}")]
    NoSuchNode {
        /// The node.
        node: u32,
        /// Nodes that have memory.
        nodes: Vec<u32>,
    },
    /// The kernel refuses the node policy.
    #[error("the kernel does not place {} on node {node}", Bytes(*len))]
    Node {
        /// The node.
        node: u32,
        /// The length, bytes.
        len: u64,
        /// Cause.
        source: io::Error,
    },
    /// A memory file that could become shorter while it is mapped.
    #[error("the memory file is not sealed against becoming shorter")]
    Unsealed,
    /// The kernel refuses a step.
    #[error("cannot {step} for {} of {backing} memory", Bytes(*len))]
    Refused {
        /// The refused step.
        step: &'static str,
        /// The backing.
        backing: Backing,
        /// The length, bytes.
        len: u64,
        /// Cause.
        source: io::Error,
    },
    /// The machine's facts cannot be read.
    #[error(transparent)]
    Probe(#[from] ProcfsError),
}

impl Mapping {
    /// Maps `len` bytes; with `node`, its pages come from there while it has some. No page is
    /// there yet: see [`populate`](Self::populate). Huge pages of a pool are reserved at once.
    ///
    /// # Errors
    ///
    /// When `len` is 0, no multiple of [`Backing::page`] or more than the machine has, when the
    /// pool of huge pages is too small (it is never raised: see
    /// [`RaisedPool`](crate::RaisedPool)), or when the node has no memory.
    pub fn new(backing: Backing, len: u64, node: Option<u32>) -> Result<Self, MappingError> {
        Self::with_nodes(backing, len, node, &KernelNodes)
    }

    /// As [`new`](Self::new), over another [`NodePolicy`].
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_nodes(
        backing: Backing,
        len: u64,
        node: Option<u32>,
        policy: &dyn NodePolicy,
    ) -> Result<Self, MappingError> {
        check_length(backing, len)?;
        if let Some(node) = node {
            let nodes = policy.memory_nodes();
            if !nodes.contains(&node) {
                return Err(MappingError::NoSuchNode { node, nodes });
            }
        }
        let refused = |step| {
            move |source| MappingError::Refused {
                step,
                backing,
                len,
                source,
            }
        };
        let whole = Span::new(0, len);
        let (region, file) = match backing {
            Backing::Anon4K | Backing::Thp => {
                let region = Region::anonymous(len as usize, backing.largest_page() as usize)
                    .map_err(refused("map anonymous memory"))?;
                let (advice, step) = match backing {
                    Backing::Thp => (Advice::Huge, "ask for transparent huge pages"),
                    _ => (Advice::NoHuge, "keep transparent huge pages away"),
                };
                match region.advise(whole, advice) {
                    // A kernel built without transparent huge pages knows neither advice, and
                    // then all pages are small.
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                    result => result.map_err(refused(step))?,
                }
                region
                    .advise(whole, Advice::DontFork)
                    .map_err(refused("keep memory from child processes"))?;
                (region, None)
            }
            Backing::Hugetlb2M | Backing::Hugetlb1G | Backing::Memfd => {
                let file = sys::memory_file(len, backing.huge_size().map(HugeSize::log2))
                    .map_err(refused("make a memory file"))?;
                let region = Region::of_file(file.as_fd(), len as usize)
                    .map_err(|source| short_of_pages(backing, len, source))?;
                (region, Some(file))
            }
        };
        if let Some(node) = node {
            policy
                .prefer(region.address(), len, node)
                .map_err(|source| MappingError::Node { node, len, source })?;
        }
        Ok(Self {
            region,
            file,
            file_offset: 0,
            backing,
            len,
            node,
            window: Window::take(len),
            locked: Mutex::new(Vec::new()),
        })
    }

    /// Maps a memory file that is there already, as a whole: one that another process has made and
    /// passed on, or kept for the one after it. Its bytes are shared with all that map it.
    ///
    /// # Errors
    ///
    /// When the file is no memory file, when it is empty or no multiple of its pages, or when it
    /// could become shorter: it must be sealed against that, as those of [`new`](Self::new) are.
    pub fn of_file(file: OwnedFd) -> Result<Self, MappingError> {
        let file = File::from(file);
        let backing = pages_of_file(&file)?;
        let refused = |step, len| {
            move |source| MappingError::Refused {
                step,
                backing,
                len,
                source,
            }
        };
        let sealed = sys::cannot_shrink(file.as_fd());
        if !sealed.map_err(refused("look at the seals of a file", 0))? {
            return Err(MappingError::Unsealed);
        }
        let metadata = file.metadata();
        let len = metadata
            .map_err(refused("look at the length of a file", 0))?
            .len();
        check_pages(backing, len)?;
        let region = Region::of_file(file.as_fd(), len as usize)
            .map_err(refused("map a memory file", len))?;
        Ok(Self {
            region,
            file: Some(file),
            file_offset: 0,
            backing,
            len,
            node: None,
            window: Window::take(len),
            locked: Mutex::new(Vec::new()),
        })
    }

    /// Memory of this process that other code has mapped: `len` bytes from `start` on. `owner` is
    /// held until this is dropped. `file` is what is shared there, and the offset of the first byte
    /// in it; without one, or where it is mapped as a private copy, the memory counts as anonymous.
    ///
    /// # Safety
    ///
    /// For as long as `owner` is there:
    ///
    /// - these bytes stay mapped, readable and writable, in pages of `file` if there is one;
    /// - they change at any time: this process accesses them in no other way than by atomic cells, or
    ///   through raw pointers by volatile accesses and copies that may be torn, and holds no reference
    ///   to any of them but to such cells.
    ///
    /// # Errors
    ///
    /// When `start` or `len` is no multiple of a page, or when the pages are of a size that this
    /// crate does not know.
    #[allow(unsafe_code)]
    pub unsafe fn foreign(
        owner: Arc<dyn Any + Send + Sync>,
        start: NonNull<u8>,
        len: u64,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<Self, MappingError> {
        let (file, file_offset) = file.map_or((None, 0), |(file, at)| (Some(File::from(file)), at));
        let backing = match &file {
            // Some of its pages may be huge.
            None => Backing::Thp,
            Some(file) => pages_of_file(file)?,
        };
        check_pages(backing, len)?;
        let (address, page) = (start.as_ptr() as u64, backing.page());
        if address % page != 0 {
            return Err(MappingError::Address {
                address,
                backing,
                page,
            });
        }
        Ok(Self {
            // SAFETY: the caller answers for it.
            region: unsafe { Region::foreign(start, len as usize, owner) },
            file,
            file_offset,
            backing,
            len,
            node: None,
            window: Window::take(len),
            locked: Mutex::new(Vec::new()),
        })
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // A mapping is never empty.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Kind of memory that it consists of.
    pub const fn backing(&self) -> Backing {
        self.backing
    }

    /// The node from which its pages are to come, if one was named, here or by the policy of the first.
    pub(crate) fn node(&self) -> Option<u32> {
        self.node.or_else(|| sys::policy_node(self.address()))
    }

    /// Address of the mapping in this process.
    pub fn address(&self) -> u64 {
        self.region.address()
    }

    /// The memory file, of a backing that is one.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(File::as_fd)
    }

    pub(crate) const fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Offset of the first byte in the memory file.
    pub const fn file_offset(&self) -> u64 {
        self.file_offset
    }

    /// All bytes as 8-byte cells, in order. Accesses may be relaxed: which of them a device sees,
    /// and when, is a matter of what orders the two besides.
    ///
    /// The first access to a page that [`populate`](Self::populate) has not brought in allocates
    /// it.
    pub fn cells(&self) -> &[AtomicU64] {
        self.region.cells()
    }

    /// Bytes of its first huge page that lie before it.
    pub(crate) fn lead(&self) -> u64 {
        self.address() % self.backing.largest_page()
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Start of the addresses that stand in for physical ones; `None` when all windows are taken.
    pub(crate) fn window(&self) -> Option<u64> {
        self.window.as_ref().map(Window::start)
    }

    /// `part`, when it lies inside and is a multiple of 4 KiB at both ends.
    pub(crate) fn pages_of(&self, part: Span<Offset>) -> Option<Span<Offset>> {
        (part.is_aligned(4096) && Span::new(0, self.len).covers(&part)).then_some(part)
    }
}

/// Kind of pages of a file in memory.
fn pages_of_file(file: &File) -> Result<Backing, MappingError> {
    let huge = sys::huge_page(file.as_fd()).map_err(|source| MappingError::Refused {
        step: "look at the pages of a file",
        backing: Backing::Memfd,
        len: 0,
        source,
    })?;
    huge.map_or(Ok(Backing::Memfd), |page| {
        Backing::of_pool(page).ok_or(MappingError::HugePage { page })
    })
}

/// Refuses what is not made of whole pages of the backing.
fn check_pages(backing: Backing, len: u64) -> Result<(), MappingError> {
    let page = backing.page();
    if len == 0 {
        return Err(MappingError::Empty);
    }
    if len % page != 0 {
        return Err(MappingError::Unaligned { len, backing, page });
    }
    match sys::page_size() {
        4096 => Ok(()),
        page => Err(MappingError::BasePage { page }),
    }
}

/// Refuses that, and more than can be had now.
fn check_length(backing: Backing, len: u64) -> Result<(), MappingError> {
    check_pages(backing, len)?;
    let machine = Machine::probe()?;
    if let Some(size) = backing.huge_size() {
        let free = machine.pool(size).map_or(0, |pool| pool.unreserved());
        let needed = len / size.bytes();
        if needed > free {
            return Err(MappingError::HugePages { size, needed, free });
        }
    } else if len > machine.available {
        let available = machine.available;
        return Err(MappingError::MoreThanAvailable { len, available });
    }
    match machine.cgroup_below(backing, len) {
        Some(cgroup) => Err(MappingError::OverCgroup {
            len,
            cgroup: cgroup.clone(),
        }),
        None => Ok(()),
    }
}

/// The error of mapping a memory file; a pool that has become too small since it was looked at
/// is named.
fn short_of_pages(backing: Backing, len: u64, source: io::Error) -> MappingError {
    match backing.huge_size() {
        Some(size) if source.raw_os_error() == Some(libc::ENOMEM) => MappingError::HugePages {
            size,
            needed: len / size.bytes(),
            free: Pool::read(size).map_or(0, |pool| pool.unreserved()),
        },
        _ => MappingError::Refused {
            step: "map a memory file",
            backing,
            len,
            source,
        },
    }
}
