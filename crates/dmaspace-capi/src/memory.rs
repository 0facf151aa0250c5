//! Memory of the caller, to be pinned and charged as address spaces map it.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use dmaspace::hostmem::{FrameSource, Mapping, Pinner};
use dmaspace::ioas::{self, HostMemory, Ledger};
use dmaspace::map::ledger;

use crate::boundary::{Output, end, exclusive, guarded, input};
use crate::status::{Failure, Result, Status};

/// Memory of this process that address spaces can map. A page is pinned and charged once, however many
/// of them map it, and as long as one does.
#[derive(Debug)]
pub struct Memory(pub(crate) Mutex<Arc<ioas::Memory>>);

/// What pins, and what that is charged to: one for all of the process, as the kernel counts.
static ACCOUNT: Mutex<Option<Account>> = Mutex::new(None);

#[derive(Clone)]
struct Account {
    pinner: Arc<Pinner>,
    ledger: Arc<Ledger>,
}

/// The smallest part that is given back without registering anew, bytes.
const PIECE: u64 = 2 << 20;

impl Account {
    /// The process's, which the first to ask makes.
    fn get() -> Result<Self> {
        let mut account = ACCOUNT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = &*account {
            return Ok(there.clone());
        }
        let pinner = Pinner::probe(PIECE).map_err(|cause| Failure::of(Status::System, &cause))?;
        let ledger = ledger(&pinner).map_err(|cause| Failure::of(Status::System, &cause))?;
        let pinner = Arc::new(pinner);
        Ok(account.insert(Self { pinner, ledger }).clone())
    }
}

/// Describes `len` bytes of this process from `start` on, both multiples of 4 KiB. Nothing is pinned yet.
///
/// They stay mapped, readable and writable until the handle is destroyed: the caller unmaps, or maps
/// over, nothing of it before. `fd` is the memory file that is shared there (memfd, hugetlbfs), and `offset` that of
/// `start` in it; -1 for anonymous memory. The descriptor stays the caller's and may be closed.
///
/// The physical addresses are real only for a process that may see them (CAP_SYS_ADMIN); otherwise they
/// stand in for them, and serve units in software only.
///
/// `*memory` is the caller's, to be destroyed by `dmaspace_memory_destroy`.
///
/// Fails with ARGUMENT or SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_memory_new(
    start: *mut c_void,
    len: u64,
    fd: c_int,
    offset: u64,
    memory: *mut *mut Memory,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let output = unsafe { Output::new(memory, "memory") }?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| Failure::new(Status::Argument, "start is NULL"))?;
        let file = match fd {
            0.. => {
                // SAFETY: not -1, and open during this call, as the header says.
                let file = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
                let file = file.map_err(|cause| Failure::of(Status::System, &cause))?;
                Some((file, offset))
            }
            _ => None,
        };
        // SAFETY: the caller answers for the memory until the handle is destroyed, which is refused while
        // anything here holds it; this library accesses it by cells only.
        let mapping = unsafe { Mapping::foreign(Arc::new(()), start, len, file) }?;
        let Account { pinner, ledger } = Account::get()?;
        let frames = FrameSource::detect(&mapping);
        let object = HostMemory::new(Arc::new(mapping), pinner, frames);
        let memory = ioas::Memory::new(Arc::new(object), &ledger);
        output.put(Box::into_raw(Box::new(Memory(Mutex::new(memory)))));
        Ok(())
    })
}

/// Bytes that are charged for it now.
///
/// Fails with ARGUMENT or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_memory_charged(memory: *const Memory, bytes: *mut u64) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (memory, output) = unsafe { (input(memory, "memory")?, Output::new(bytes, "bytes")?) };
        output.put(exclusive(&memory.0, "memory")?.charged());
        Ok(())
    })
}

/// Frees the handle; the memory is then the caller's alone. NULL is fine.
///
/// Fails with BUSY while an address space maps it, or has unmapped it and waits for a flush: devices may
/// reach it still. Then, and after ARGUMENT or PANIC, it is still there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_memory_destroy(memory: *mut Memory) -> Status {
    guarded(|| {
        let look = |memory: &Memory| {
            let memory = exclusive(&memory.0, "memory")?;
            // Areas, and what waits for a flush, have it too.
            if Arc::strong_count(&memory) == 1 {
                return Ok(());
            }
            let held = memory.held();
            let message = format!("an address space has the memory: {held} bytes are pinned");
            Err(Failure::new(Status::Busy, message))
        };
        // SAFETY: the handle is the caller's, who says that nobody uses it any more.
        unsafe { end(memory, "memory", look) }
    })
}
