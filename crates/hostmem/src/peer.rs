//! Files from another process, which is not trusted.
//!
//! Any file can come where a memory file or an event is expected, and the other process still has it open. So:
//!
//! - **Flags protect from nothing.** `O_NONBLOCK` belongs to the open file, which both have: the other process clears it
//!   at any time, fills the counter of an eventfd, and `write` blocks for good; or it reads an event between `poll` and
//!   `read`. A [`PeerEvent`] is raised by a call that never waits, whatever the flags are ([`kernel`]).
//! - **A look can block.** `fstat` and `fstatfs` of a file of FUSE wait for its server. The kinds here
//!   ([`PeerFile::kind`]) are distinguished by the kernel's own knowledge.
//! - **A close can block:** of a file of FUSE until its server answers (`FUSE_FLUSH`), of a network socket with `SO_LINGER`
//!   until its peer has taken everything. So can the close of a local socket with such files in messages that were not received.
//!   A [`PeerFile`] that is no event and no memory file is therefore closed by another thread.
//!
//! There are at most 64 of these threads at a time. Files beyond wait for one, and cost a descriptor each: as many as the
//! other process has files that it lets block.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::sys;

mod kernel;

/// The most threads that close files.
const MOST_CLOSING: usize = 64;
/// Stack of such a thread, bytes.
const STACK: usize = 64 << 10;

/// Kinds of files of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerKind {
    /// An eventfd.
    Event,
    /// A file of `tmpfs` or `hugetlbfs`, as `memfd_create` makes them.
    Memory,
    /// Anything else.
    Other,
}

/// A file of another process, or a socket to one.
///
/// When it is dropped, this thread does not wait for its being closed; see the [kinds](PeerKind) that are.
#[derive(Debug)]
pub struct PeerFile(ManuallyDrop<OwnedFd>);

impl<T: Into<OwnedFd>> From<T> for PeerFile {
    fn from(file: T) -> Self {
        Self(ManuallyDrop::new(file.into()))
    }
}

impl AsFd for PeerFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl PeerFile {
    /// Its kind. This asks nothing of the file, so it cannot block; it needs `/proc`, without which events are
    /// [`Other`](PeerKind::Other).
    ///
    /// Source: proc(5), `/proc/PID/fd`: what has no path has a type and a name, which no path is like. fcntl(2), `F_GET_SEALS`:
    /// only memory files have seals.
    pub fn kind(&self) -> PeerKind {
        let link = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let name = fs::read_link(link).unwrap_or_default();
        match name.as_os_str().as_bytes() {
            b"anon_inode:[eventfd]" => PeerKind::Event,
            _ if sys::cannot_shrink(self.as_fd()).is_ok() => PeerKind::Memory,
            _ => PeerKind::Other,
        }
    }

    /// The event that it is; the file as it was if it is none.
    ///
    /// # Errors
    ///
    /// The file.
    pub fn into_event(self) -> Result<PeerEvent, Self> {
        match self.kind() {
            PeerKind::Event => Ok(PeerEvent(self.into_inner())),
            _ => Err(self),
        }
    }

    /// The memory file that it is, which blocks in no call; the file as it was if it is none.
    ///
    /// # Errors
    ///
    /// The file.
    pub fn into_memory(self) -> Result<OwnedFd, Self> {
        match self.kind() {
            PeerKind::Memory => Ok(self.into_inner()),
            _ => Err(self),
        }
    }

    fn into_inner(self) -> OwnedFd {
        let mut file = ManuallyDrop::new(self);
        // SAFETY: `self` is not dropped, so that its descriptor is taken here only.
        unsafe { ManuallyDrop::take(&mut file.0) }
    }
}

impl Drop for PeerFile {
    fn drop(&mut self) {
        let kind = self.kind();
        // SAFETY: nothing uses it after `drop`.
        let file = unsafe { ManuallyDrop::take(&mut self.0) };
        match kind {
            PeerKind::Event | PeerKind::Memory => drop(file),
            _ => close_apart(file),
        }
    }
}

/// An event (eventfd(2)) that another process has open, too.
#[derive(Debug)]
pub struct PeerEvent(OwnedFd);

impl PeerEvent {
    /// Adds one to its counter, and never waits: a counter that is full stays so, and is readable as before.
    ///
    /// # Errors
    ///
    /// As [`supported`](Self::supported).
    pub fn raise(&self) -> io::Result<()> {
        kernel::raise(self.0.as_fd())
    }

    /// Reads its counter, and never waits. False if it was zero: the other process has read it before, for instance.
    ///
    /// # Errors
    ///
    /// Before Linux 5.8 (`EOPNOTSUPP`).
    pub fn take(&self) -> io::Result<bool> {
        kernel::take(self.0.as_fd())
    }

    /// Looks if this process can raise events.
    ///
    /// # Errors
    ///
    /// When the kernel has no asynchronous I/O (`CONFIG_AIO`), a filter of system calls forbids `io_setup`, or others
    /// have taken all contexts (`/proc/sys/fs/aio-max-nr`).
    pub fn supported() -> io::Result<()> {
        kernel::prepare()
    }
}

/// Files that are to be closed, and threads that do it.
struct Closing {
    files: VecDeque<OwnedFd>,
    threads: usize,
}

fn closing() -> MutexGuard<'static, Closing> {
    static CLOSING: Mutex<Closing> = Mutex::new(Closing {
        files: VecDeque::new(),
        threads: 0,
    });
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has a file closed by another thread. Where none can be had, it waits for the next file's.
fn close_apart(file: OwnedFd) {
    let mut closing = closing();
    closing.files.push_back(file);
    if closing.threads < MOST_CLOSING {
        let thread = thread::Builder::new().name("closing".into());
        let begun = thread.stack_size(STACK).spawn(close_all);
        closing.threads += usize::from(begun.is_ok());
    }
}

fn close_all() {
    while let Some(file) = next_file() {
        drop(file);
    }
}

/// The next file; the thread ends where there is none.
fn next_file() -> Option<OwnedFd> {
    let mut closing = closing();
    let file = closing.files.pop_front();
    closing.threads -= usize::from(file.is_none());
    file
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::FromRawFd as _;
    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(300);

    fn eventfd(flags: i32) -> File {
        // SAFETY: the call returns a new descriptor or -1.
        let fd = unsafe { libc::eventfd(0, flags) };
        assert!(fd >= 0);
        // SAFETY: it has no other owner.
        unsafe { File::from_raw_fd(fd) }
    }

    fn event(file: &File) -> PeerEvent {
        let file = PeerFile::from(file.try_clone().unwrap());
        file.into_event().unwrap()
    }

    fn value(mut file: &File) -> u64 {
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn an_event_is_raised_and_taken_without_waiting_whatever_its_counter_is() {
        PeerEvent::supported().unwrap();
        // The flag that is not set would have a write and a read return.
        let theirs = eventfd(0);
        let ours = event(&theirs);
        assert!(!ours.take().unwrap());
        for _ in 0..300 {
            ours.raise().unwrap();
        }
        assert_eq!(value(&theirs), 300);
        (&theirs).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..2 {
            ours.raise().unwrap();
        }
        assert_eq!(value(&theirs), u64::MAX);
        ours.raise().unwrap();
        assert!(ours.take().unwrap());
        assert!(!ours.take().unwrap());
        // A counter that is read in pieces.
        let theirs = eventfd(libc::EFD_SEMAPHORE);
        let ours = event(&theirs);
        (0..2).for_each(|_| ours.raise().unwrap());
        assert_eq!((value(&theirs), ours.take().unwrap()), (1, true));
        assert!(!ours.take().unwrap());
    }

    #[test]
    fn threads_raise_an_event_as_often_as_they_do() {
        let theirs = eventfd(0);
        let ours = event(&theirs);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| ours.raise().unwrap()));
            }
        });
        assert_eq!(value(&theirs), 4000);
    }

    #[test]
    fn files_are_told_apart_by_what_the_kernel_knows_of_them() {
        let (reader, writer) = io::pipe().unwrap();
        let open = |path| PeerFile::from(File::open(path).unwrap());
        let directory = tempfile::tempdir().unwrap();
        // A name cannot be taken for one of the kernel's.
        let named = directory.path().join("anon_inode:[eventfd]");
        let named = PeerFile::from(File::create(named).unwrap());
        let kinds = [
            (eventfd(0).into(), PeerKind::Event),
            (
                sys::memory_file(4096, None).unwrap().into(),
                PeerKind::Memory,
            ),
            (reader.into(), PeerKind::Other),
            (writer.into(), PeerKind::Other),
            (open("/dev/null"), PeerKind::Other),
            (open("/dev/shm"), PeerKind::Other),
            (open("/proc/self/maps"), PeerKind::Other),
            (named, PeerKind::Other),
        ];
        for (file, kind) in kinds {
            assert_eq!(file.kind(), kind, "{file:?}");
            let file = match (kind, file.into_event()) {
                (PeerKind::Event, event) => {
                    event.unwrap();
                    continue;
                }
                (_, file) => file.unwrap_err(),
            };
            assert_eq!(file.into_memory().is_ok(), kind == PeerKind::Memory);
        }
        let shared = tempfile::tempfile_in("/dev/shm").unwrap();
        assert_eq!(PeerFile::from(shared).kind(), PeerKind::Memory);
    }

    /// A socket that blocks when it is closed, for as long as the other end is there.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        let linger = libc::linger {
            l_onoff: 1,
            l_linger: 1 << 20,
        };
        // SAFETY: the kernel reads the option's structure.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of_val(&linger) as u32,
            )
        };
        assert_eq!(set, 0);
        (socket, other)
    }

    #[test]
    fn files_that_block_when_they_are_closed_delay_nothing_and_go_when_they_can() {
        let mut others = Vec::new();
        for _ in 0..MOST_CLOSING + 3 {
            let (socket, other) = lingering();
            others.push(other);
            drop(PeerFile::from(socket));
            assert!(closing().threads <= MOST_CLOSING);
        }
        // Threads take them as they come; those beyond wait.
        let deadline = Instant::now() + PATIENCE;
        let standing = || {
            let closing = closing();
            (closing.threads, closing.files.len())
        };
        let wait = |threads, files| {
            while standing() != (threads, files) {
                assert!(Instant::now() < deadline, "{:?}", standing());
                thread::sleep(Duration::from_millis(1));
            }
        };
        wait(MOST_CLOSING, 3);
        // Events and memory are closed at once all the same.
        drop(PeerFile::from(eventfd(0)));
        drop(PeerFile::from(sys::memory_file(4096, None).unwrap()));
        wait(MOST_CLOSING, 3);
        drop(others);
        wait(0, 0);
        drop(PeerFile::from(File::open("/dev/null").unwrap()));
        wait(0, 0);
    }
}
