//! System calls on memory, and the bytes of a mapping as cells.
//!
//! Together with [`crate::rings`] this is the only file with `unsafe`, but for a promise that
//! [`Mapping::foreign`](crate::Mapping::foreign) hands on. A [`Region`] owns one
//! mapping of this process, from `mmap` to `munmap`, or holds its owner; every function that
//! takes a part of it checks that the part lies inside, so nothing here can reach memory that is not
//! the region's.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use runs::{Offset, Span};

/// Advice to `madvise`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Advice {
    Huge,
    NoHuge,
    DontFork,
    PopulateWrite,
}

/// Readable and writable memory of this process, mapped until it is dropped.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<libc::c_void>,
    len: usize,
    /// Owner that unmaps it, if another one does.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the region is plain mapped memory that belongs to no thread; all access to its bytes
// goes through the atomic cells of `cells`.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` gives out only atomic cells and makes system calls, which the
// kernel serialises itself.
unsafe impl Sync for Region {}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn invalid() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

impl Region {
    fn map(len: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<Self> {
        // SAFETY: without MAP_FIXED the kernel chooses a free address, so no memory in use is
        // touched.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start).ok_or_else(invalid)?;
        Ok(Self {
            start,
            len,
            owner: None,
        })
    }

    /// `len` bytes from `start` on, a page's beginning, that `owner` has mapped.
    ///
    /// # Safety
    ///
    /// As for [`Mapping::foreign`](crate::Mapping::foreign).
    pub(crate) const unsafe fn foreign(
        start: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            start: start.cast(),
            len,
            owner: Some(owner),
        }
    }

    /// Anonymous private memory whose address is a multiple of `align`, a power of two.
    pub(crate) fn anonymous(len: usize, align: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let spare = if align > 4096 { align } else { 0 };
        let whole = len.checked_add(spare).ok_or_else(invalid)?;
        let mut region = Self::map(whole, flags, -1)?;
        if spare > 0 {
            let address = region.start.as_ptr() as usize;
            let head = address.next_multiple_of(align) - address;
            region.cut_head(head)?;
            region.cut_tail(len)?;
        }
        Ok(region)
    }

    /// The first `len` bytes of a memory file, shared.
    pub(crate) fn of_file(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn cut_head(&mut self, bytes: usize) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if bytes >= self.len {
            return Err(invalid());
        }
        // SAFETY: `bytes` lies inside the region, which this call holds exclusively, so no cell
        // of the part is borrowed.
        check(unsafe { libc::munmap(self.start.as_ptr(), bytes) })?;
        // SAFETY: `bytes < len`, so the new start lies inside the same mapping.
        self.start = unsafe { self.start.byte_add(bytes) };
        self.len -= bytes;
        Ok(())
    }

    fn cut_tail(&mut self, keep: usize) -> io::Result<()> {
        if keep >= self.len {
            return Ok(());
        }
        // SAFETY: `keep < len`: the cut part lies inside the region, which this call holds
        // exclusively.
        check(unsafe { libc::munmap(self.start.byte_add(keep).as_ptr(), self.len - keep) })?;
        self.len = keep;
        Ok(())
    }

    /// True when other code has mapped it.
    pub(crate) const fn is_foreign(&self) -> bool {
        self.owner.is_some()
    }

    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// All bytes as 8-byte cells. The length is a multiple of the page, so none is left over.
    pub(crate) fn cells(&self) -> &[AtomicU64] {
        // SAFETY: the region is mapped readable and writable for as long as `self` lives, its
        // address is page-aligned, `len / 8` cells lie inside, any bit pattern is an `AtomicU64`,
        // and this process reaches the bytes in no other way than through these cells, or, those of
        // a foreign region, through raw pointers.
        unsafe { std::slice::from_raw_parts(self.start.cast().as_ptr(), self.len / 8) }
    }

    /// Address and length of `part`, refused when it does not lie inside.
    fn part(&self, part: Span<Offset>) -> io::Result<(*mut libc::c_void, usize)> {
        if !Span::new(0, self.len as u64).covers(&part) {
            return Err(invalid());
        }
        // SAFETY: `part` lies inside the region, as just checked.
        let start = unsafe { self.start.byte_add(part.start as usize) };
        Ok((start.as_ptr(), part.len as usize))
    }

    pub(crate) fn advise(&self, part: Span<Offset>, advice: Advice) -> io::Result<()> {
        let (start, len) = self.part(part)?;
        let advice = match advice {
            Advice::Huge => libc::MADV_HUGEPAGE,
            Advice::NoHuge => libc::MADV_NOHUGEPAGE,
            Advice::DontFork => libc::MADV_DONTFORK,
            Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
        };
        // SAFETY: the part belongs to this region, and none of these advices changes or drops
        // its bytes.
        check(unsafe { libc::madvise(start, len, advice) })
    }

    pub(crate) fn lock(&self, part: Span<Offset>) -> io::Result<()> {
        let (start, len) = self.part(part)?;
        // SAFETY: locking changes no bytes, and the part belongs to this region.
        check(unsafe { libc::mlock(start, len) })
    }

    pub(crate) fn unlock(&self, part: Span<Offset>) -> io::Result<()> {
        let (start, len) = self.part(part)?;
        // SAFETY: as for `lock`.
        check(unsafe { libc::munlock(start, len) })
    }

    /// The I/O vector of `part`; what it points to is mapped while the region lives.
    pub(crate) fn iovec(&self, part: Span<Offset>) -> io::Result<libc::iovec> {
        let (iov_base, iov_len) = self.part(part)?;
        Ok(libc::iovec { iov_base, iov_len })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        // SAFETY: the region owns `[start, start + len)`, and nothing borrows it any more.
        let result = check(unsafe { libc::munmap(self.start.as_ptr(), self.len) });
        if let Err(error) = result {
            tracing::error!(%error, len = self.len, "munmap");
        }
    }
}

/// A file in memory of `len` bytes whose size cannot change any more; of huge pages of
/// `2^huge_log2` bytes if given.
///
/// Source: memfd_create(2), fcntl(2) "File Sealing".
pub(crate) fn memory_file(len: u64, huge_log2: Option<u32>) -> io::Result<File> {
    // MFD_HUGE_2MB and MFD_HUGE_1GB are the size's logarithm, 26 bits up (memfd.h, hugetlb_encode.h).
    let huge = huge_log2.map_or(0, |log2| libc::MFD_HUGETLB | (log2 << 26));
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge;
    // SAFETY: the name is a C string, and the call returns a new descriptor or -1.
    let fd = unsafe { libc::memfd_create(c"dmaspace".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just opened and has no other owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: F_ADD_SEALS takes an integer and touches no memory of this process.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// True when the memory file cannot become shorter: no part of a mapping of it can vanish. An
/// error for files of another kind.
///
/// Source: fcntl(2) "File Sealing".
pub(crate) fn cannot_shrink(file: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: F_GET_SEALS takes nothing and touches no memory of this process.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(seals & libc::F_SEAL_SHRINK != 0)
}

/// The size of the huge pages of which a file consists; `None` for other files.
///
/// Source: fstatfs(2), Linux `Documentation/admin-guide/mm/hugetlbpage.rst`.
pub(crate) fn huge_page(file: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    // SAFETY: all zeros are a value of the structure, which the kernel fills in.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes to the structure that it is given.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) })?;
    let huge = system.f_type == libc::HUGETLBFS_MAGIC;
    Ok(huge.then_some(system.f_bsize as u64))
}

/// Gives the part of a memory file its pages; reports a shortage as an error where touching the
/// page would end in SIGBUS.
pub(crate) fn allocate(file: BorrowedFd<'_>, part: Span<Offset>) -> io::Result<()> {
    // SAFETY: works on the file alone.
    check(unsafe {
        libc::fallocate(
            file.as_raw_fd(),
            0,
            part.start as libc::off_t,
            part.len as libc::off_t,
        )
    })
}

/// Asks for pages of `[address, address + len)` on `node` while it has some, and elsewhere when
/// it has none (`MPOL_PREFERRED`).
pub(crate) fn prefer_node(address: u64, len: u64, node: u32) -> io::Result<()> {
    let mut mask = [0u64; 16];
    let word = mask.get_mut(node as usize / 64).ok_or_else(invalid)?;
    *word |= 1 << (node % 64);
    set_policy(address, len, libc::MPOL_PREFERRED, &mask)
}

/// Gives the pages of `[address, address + len)` a policy over the nodes of `mask`. Source: mbind(2).
pub(crate) fn set_policy(
    address: u64,
    len: u64,
    mode: libc::c_int,
    mask: &[u64; 16],
) -> io::Result<()> {
    // SAFETY: a policy decides where pages come from and changes no bytes, wherever the range
    // lies; the mask has the 1024 bits that are announced (the kernel reads one bit less).
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address,
            len,
            mode,
            mask.as_ptr(),
            1024 + 1,
            0,
        )
    };
    check(result as libc::c_int)
}

/// The one node that the policy of the memory at `address` names; `None` where it names none or several,
/// or when the kernel does not tell. Source: get_mempolicy(2), `MPOL_F_ADDR`.
pub(crate) fn policy_node(address: u64) -> Option<u32> {
    const MODE_FLAGS: libc::c_int = libc::MPOL_F_STATIC_NODES | libc::MPOL_F_NUMA_BALANCING;
    // Numbers of `include/uapi/linux/mempolicy.h` that libc lacks; the second since Linux 5.15.
    const OF_ADDRESS: libc::c_ulong = 1 << 1;
    const PREFERRED_MANY: libc::c_int = 5;
    let mut mode: libc::c_int = 0;
    let mut mask = [0u64; 16];
    // SAFETY: the kernel writes one word to `mode` and to the mask at most the 1024 bits that are
    // announced (it reads one bit less); it looks the address up and reads nothing there.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            mask.as_mut_ptr(),
            1024 + 1,
            address,
            OF_ADDRESS,
        )
    };
    // With MPOL_F_RELATIVE_NODES, which stays in the mode, the numbers are those of a set of nodes.
    let named = matches!(
        mode & !MODE_FLAGS,
        libc::MPOL_PREFERRED | libc::MPOL_BIND | PREFERRED_MANY
    );
    let mut nodes = runs::bitmap::runs(&mask).flat_map(|run| run.start..run.end);
    let first = nodes.next().filter(|_| result == 0 && named);
    first.filter(|_| nodes.next().is_none())?.try_into().ok()
}

/// A set of processors: as many as Linux can have (`NR_CPUS` is at most 8192).
type CpuMask = [u64; 128];

/// The processors on which this thread may run; none when the kernel does not tell.
///
/// Source: sched_getaffinity(2).
pub(crate) fn allowed_cpus() -> Vec<u32> {
    let mut mask: CpuMask = [0; 128];
    // SAFETY: the kernel writes at most as many bytes as the mask is said to have.
    let result =
        unsafe { libc::sched_getaffinity(0, size_of::<CpuMask>(), mask.as_mut_ptr().cast()) };
    if result != 0 {
        return Vec::new();
    }
    let runs = runs::bitmap::runs(&mask);
    runs.flat_map(|run| run.start as u32..run.end as u32)
        .collect()
}

/// Has this thread run on `cpus` only. Source: sched_setaffinity(2).
pub(crate) fn run_on(cpus: &[u32]) -> io::Result<()> {
    let mut mask: CpuMask = [0; 128];
    for cpu in cpus {
        let word = mask.get_mut(*cpu as usize / 64).ok_or_else(invalid)?;
        *word |= 1 << (cpu % 64);
    }
    // SAFETY: the kernel reads as many bytes as the mask has.
    check(unsafe { libc::sched_setaffinity(0, size_of::<CpuMask>(), mask.as_ptr().cast()) })
}

/// The memory node of the processor on which this thread runs. Source: getcpu(2).
pub(crate) fn current_node() -> Option<u32> {
    let mut node = 0u32;
    let nowhere = std::ptr::null_mut::<u32>();
    // SAFETY: the kernel writes one word to `node`, and nothing where the pointers are null.
    let result = unsafe { libc::syscall(libc::SYS_getcpu, nowhere, &raw mut node, nowhere) };
    (result == 0).then_some(node)
}

/// The memory node of the page at each address, or a negative error number where there is no
/// page. Source: move_pages(2), `nodes` = NULL.
pub(crate) fn nodes_of(addresses: &[u64], nodes: &mut [i32]) -> io::Result<()> {
    if nodes.len() < addresses.len() {
        return Err(invalid());
    }
    // SAFETY: with `nodes` NULL the call moves nothing; it reads `addresses.len()` addresses and
    // writes as many status words, for which `nodes` has room.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            addresses.len(),
            addresses.as_ptr(),
            std::ptr::null::<i32>(),
            nodes.as_mut_ptr(),
            0,
        )
    };
    check(result as libc::c_int)
}

/// `struct page_region` of `include/uapi/linux/fs.h`: addresses and what is true of their pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageRegion {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) categories: u64,
}

/// `struct pm_scan_arg` of `include/uapi/linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `PAGE_IS_PRESENT` of `include/uapi/linux/fs.h`.
pub(crate) const PAGE_IS_PRESENT: u64 = 1 << 3;
/// `PAGE_IS_PFNZERO`: the page of zeros, which all have in common.
pub(crate) const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// `PAGE_IS_HUGE`: mapped by an entry of a higher level, or a hugetlb page.
pub(crate) const PAGE_IS_HUGE: u64 = 1 << 6;
/// `_IOWR('f', 16, struct pm_scan_arg)`, since Linux 6.7.
const PAGEMAP_SCAN: libc::Ioctl =
    (3 << 30 | (size_of::<ScanArgument>() as u64) << 16 | (b'f' as u64) << 8 | 16) as libc::Ioctl;

/// The present stretches among the addresses `[start, end)` without those of categories `but`: how many regions were filled, and
/// the address up to which the kernel looked.
///
/// Source: Linux `Documentation/admin-guide/mm/pagemap.rst`, "Pagemap Scan IOCTL".
pub(crate) fn scan_pages(
    pagemap: &File,
    start: u64,
    end: u64,
    but: u64,
    out: &mut [PageRegion],
) -> io::Result<(usize, u64)> {
    let mut argument = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        start,
        end,
        vec: out.as_mut_ptr() as u64,
        vec_len: out.len() as u64,
        category_inverted: but,
        category_mask: PAGE_IS_PRESENT | but,
        return_mask: PAGE_IS_PRESENT | PAGE_IS_HUGE,
        ..ScanArgument::default()
    };
    // SAFETY: without write-protect flags the kernel writes only to the argument and to at most
    // `vec_len` regions of `out`.
    let filled = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
    if filled < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(((filled as usize).min(out.len()), argument.walk_end))
}

/// The size of a base page in bytes.
pub(crate) fn page_size() -> u64 {
    // SAFETY: sysconf touches no memory of this process.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// The soft `RLIMIT_MEMLOCK` in bytes; `None` when there is none.
pub(crate) fn locked_memory_limit() -> io::Result<Option<u64>> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel fills the structure it is given.
    check(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) })?;
    Ok((limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur))
}

/// Waits for the file's lock, which lasts until the file is closed. Source: flock(2).
pub(crate) fn lock_file(file: &File) -> io::Result<()> {
    // SAFETY: works on the file alone.
    check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) })
}

/// Bytes of a session's name, the zero at its end included (`LIVEUPDATE_SESSION_NAME_LENGTH`).
pub(crate) const SESSION_NAME: usize = 64;
/// `LIVEUPDATE_IOCTL_CREATE_SESSION` and `LIVEUPDATE_IOCTL_RETRIEVE_SESSION`, of the orchestrator.
pub(crate) const CREATE_SESSION: u8 = 0;
pub(crate) const RETRIEVE_SESSION: u8 = 1;
/// `LIVEUPDATE_SESSION_PRESERVE_FD`, `LIVEUPDATE_SESSION_RETRIEVE_FD` and `LIVEUPDATE_SESSION_FINISH`, of a session.
const PRESERVE_FD: u8 = 0x40;
const RETRIEVE_FD: u8 = 0x41;
const FINISH: u8 = 0x42;

/// The structures that they take: first their own size, last a name, a number, or nothing.
///
/// Source: `include/uapi/linux/liveupdate.h` of Linux 7.2.
#[repr(C)]
struct LiveUpdate<T> {
    size: u32,
    /// In `FINISH` a zero.
    fd: i32,
    rest: T,
}

/// Calls with what the header says of `number`; returns the descriptor that is left in it.
fn live_update<T>(file: BorrowedFd<'_>, number: u8, fd: i32, rest: T) -> io::Result<i32> {
    let size = size_of::<LiveUpdate<T>>() as u32;
    let mut argument = LiveUpdate { size, fd, rest };
    // `_IO(0xBA, number)`.
    let request = libc::Ioctl::from(0xbau8) << 8 | libc::Ioctl::from(number);
    // SAFETY: the kernel reads and writes as many bytes of the argument as this says, and follows no address in it.
    // A file of another kind does not know the request.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut argument) })?;
    Ok(argument.fd)
}

fn new_descriptor(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just opened it for the caller of this, and it has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A session of this name, which ends with a zero: a new one, or that of the kernel before.
pub(crate) fn session(
    device: BorrowedFd<'_>,
    request: u8,
    name: [u8; SESSION_NAME],
) -> io::Result<OwnedFd> {
    live_update(device, request, -1, name).map(new_descriptor)
}

/// Preserves a file.
pub(crate) fn preserve(
    session: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    number: u64,
) -> io::Result<()> {
    live_update(session, PRESERVE_FD, file.as_raw_fd(), number).map(|_| ())
}

/// A file that was preserved.
pub(crate) fn take_preserved(session: BorrowedFd<'_>, number: u64) -> io::Result<OwnedFd> {
    live_update(session, RETRIEVE_FD, -1, number).map(new_descriptor)
}

/// Ends a session that was retrieved.
pub(crate) fn finish_session(session: BorrowedFd<'_>) -> io::Result<()> {
    live_update(session, FINISH, 0, ()).map(|_| ())
}
