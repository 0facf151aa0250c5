//! System calls on events that never wait, whatever another process does with the event meanwhile.
//!
//! **To raise one**, the kernel does it: asynchronous I/O (AIO) that is complete signals the eventfd that comes with the
//! request, by `eventfd_signal()`, which adds to the counter up to its end and wakes whatever waits. The I/O is a read of
//! nothing from an empty file, which is complete before `io_submit` returns.
//!
//! `write` cannot be used. Whether it waits for room in the counter is decided by the open file's flag, which the other
//! process has, too, and `pwritev2` with `RWF_NOWAIT` is refused (`EOPNOTSUPP`), up to Linux 6.18 at least: an eventfd has
//! no `write_iter`. A `poll` before the write is out of date at once.
//!
//! **To read one**, `preadv2` with `RWF_NOWAIT` does what the flag would, for this call alone (Linux 5.8).
//!
//! Source: Linux, `fs/aio.c` (`aio_complete`), `fs/eventfd.c`, `include/uapi/linux/aio_abi.h`; io_submit(2), readv(2).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sys;

/// `IOCB_CMD_PREAD`.
const READ: u16 = 0;
/// `IOCB_FLAG_RESFD`.
const RAISE: u32 = 1;
/// Completions that are taken back at once: more than the one of this call, if a signal came between others.
const COMPLETIONS: usize = 4;

/// `struct iocb`.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}

/// `struct io_event`.
type Completion = [u64; 4];

/// The queue to which the process submits: `aio_context_t`.
struct Context {
    id: libc::c_ulong,
    empty: File,
}

fn context() -> MutexGuard<'static, Option<Context>> {
    static CONTEXT: Mutex<Option<Context>> = Mutex::new(None);
    CONTEXT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has the process's context, which stays.
pub(super) fn prepare() -> io::Result<()> {
    let mut context = context();
    if context.is_none() {
        *context = Some(Context::new()?);
    }
    Ok(())
}

pub(super) fn raise(event: BorrowedFd<'_>) -> io::Result<()> {
    prepare()?;
    match &*context() {
        Some(context) => context.raise(event),
        None => Err(io::ErrorKind::Unsupported.into()),
    }
}

impl Context {
    fn new() -> io::Result<Self> {
        let empty = sys::memory_file(0, None)?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's identity to `id`.
        let set_up = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut id) };
        match set_up {
            0 => Ok(Self { id, empty }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn raise(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        let mut request = Request {
            opcode: READ,
            file: self.empty.as_raw_fd() as u32,
            flags: RAISE,
            event: event.as_raw_fd() as u32,
            ..Request::default()
        };
        let mut requests = [&raw mut request];
        // SAFETY: the kernel reads the pointer, and the request behind it, and writes the request's key, all before it
        // returns. The request has a buffer of no bytes.
        let submitted =
            unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1, requests.as_mut_ptr()) };
        if submitted != 1 {
            return Err(io::Error::last_os_error());
        }
        let mut completions = [Completion::default(); COMPLETIONS];
        let at_once = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the kernel writes at most as many completions as there is room for, and reads the time. One that stays
        // because a signal came is taken by a later call: the kernel has room for two at least.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.id,
                0,
                COMPLETIONS,
                completions.as_mut_ptr(),
                &raw const at_once,
            )
        };
        Ok(())
    }
}

pub(super) fn take(event: BorrowedFd<'_>) -> io::Result<bool> {
    let mut counter = 0_u64;
    let part = libc::iovec {
        iov_base: (&raw mut counter).cast(),
        iov_len: size_of_val(&counter),
    };
    let fd = event.as_raw_fd();
    // The file's own position, as with `read`.
    let offset = -1;
    // SAFETY: the kernel reads one vector, and writes to the counter that it names.
    let read = unsafe { libc::preadv2(fd, &raw const part, 1, offset, libc::RWF_NOWAIT) };
    match read {
        0.. => Ok(true),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            error => Err(error),
        },
    }
}
