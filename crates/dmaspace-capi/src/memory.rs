//! Memory of the caller, to be pinned and charged as address spaces map it.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use dmaspace::hostmem::{Limits, Mapping, Pinner};
use dmaspace::ioas::iommufd::RlimitMode;
use dmaspace::ioas::{self, HostMemory, Ledger};

use crate::boundary::{Output, end, exclusive, file, guarded, input};
use crate::status::{Failure, Result, Status};

/// Memory of this process that address spaces can map. A page is pinned and charged as long as one of them
/// maps it: once by all that have tables of this library, once by all of one iommufd, and for each mapping
/// by a container of VFIO's type 1.
#[derive(Debug)]
pub struct Memory(pub(crate) Mutex<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    object: Arc<HostMemory>,
    /// By what its pins are charged to, for address spaces that have mapped it.
    by_ledger: Vec<Arc<ioas::Memory>>,
}

impl Inner {
    /// The memory as it is charged by those who count it so.
    pub(crate) fn charged_to(&mut self, counted: Counted) -> Result<Arc<ioas::Memory>> {
        let ledger = ledger(counted)?;
        let mut known = self.by_ledger.iter();
        let known = known.find(|memory| Arc::ptr_eq(memory.ledger(), &ledger));
        Ok(match known {
            Some(memory) => Arc::clone(memory),
            None => {
                let memory = ioas::Memory::new(Arc::clone(&self.object) as _, &ledger);
                self.by_ledger.push(Arc::clone(&memory));
                memory
            }
        })
    }
}

/// Who counts what is pinned, and so the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// Pins of this library's own, for tables of ours.
    Here,
    /// The kernel, which pins what it maps by itself.
    ByKernel(RlimitMode),
}

/// What pins are charged to: the same for all of the process, as the kernel counts. Two that raise the same
/// counter of the kernel's have the same ledger, and share what the limit leaves.
static LEDGERS: Mutex<Vec<(Counted, Arc<Ledger>)>> = Mutex::new(Vec::new());

fn ledger(counted: Counted) -> Result<Arc<Ledger>> {
    let mut ledgers = LEDGERS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut known = ledgers.iter();
    if let Some((_, ledger)) = known.find(|(other, _)| *other == counted) {
        return Ok(Arc::clone(ledger));
    }
    let (counter, limits) = match counted {
        Counted::Here => {
            let pinner = Pinner::of_process()?;
            (pinner.counter(), pinner.limits())
        }
        Counted::ByKernel(mode) => {
            let limits = Limits::read()?;
            (mode.counter(&limits), limits)
        }
    };
    let new = Ledger::of_counter(counter, &limits)?;
    let mut known = ledgers.iter().map(|(_, ledger)| ledger);
    let same = known.find(|ledger| ledger.counter() == new.counter());
    let ledger = same.map_or(new, Arc::clone);
    ledgers.push((counted, Arc::clone(&ledger)));
    Ok(ledger)
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
        // SAFETY: open during this call, as the header says, or -1.
        let file = unsafe { file(fd, "fd") }?.map(|file| (file, offset));
        // SAFETY: the caller answers for the memory until the handle is destroyed, which is refused while
        // anything here holds it; this library accesses it by cells only.
        let mapping = unsafe { Mapping::foreign(Arc::new(()), start, len, file) }?;
        let inner = Inner {
            object: Arc::new(HostMemory::new(Arc::new(mapping))),
            by_ledger: Vec::new(),
        };
        output.put(Box::into_raw(Box::new(Memory(Mutex::new(inner)))));
        Ok(())
    })
}

/// Bytes that are charged for it now, by address spaces over tables of this library. What the kernel pins
/// for those over its own mappings, `dmaspace_space_get_info` says of each.
///
/// Fails with ARGUMENT or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_memory_charged(memory: *const Memory, bytes: *mut u64) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (memory, output) = unsafe { (input(memory, "memory")?, Output::new(bytes, "bytes")?) };
        let memory = exclusive(&memory.0, "memory")?;
        let charged = memory.by_ledger.iter().map(|memory| memory.charged());
        output.put(charged.sum());
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
            let mut used = memory.by_ledger.iter();
            let Some(used) = used.find(|memory| Arc::strong_count(memory) > 1) else {
                return Ok(());
            };
            let message = match used.held() {
                0 => "an address space over the kernel's mappings has the memory".to_owned(),
                held => format!("an address space has the memory: {held} bytes are pinned"),
            };
            Err(Failure::new(Status::Busy, message))
        };
        // SAFETY: the handle is the caller's, who says that nobody uses it any more.
        unsafe { end(memory, "memory", look) }
    })
}
