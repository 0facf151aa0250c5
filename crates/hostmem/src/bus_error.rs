//! `SIGBUS` where a mapping has lost its memory: the handler and its table.
//!
//! A page of a mapped file that the file no longer has is an access error, which the
//! kernel reports by `SIGBUS` (mmap(2), "Errors"). The handler looks the address up in a fixed [`TABLE`] of
//! ranges. In each that holds it, it maps zeros from the page on to the end of the range, in the place of the file, and
//! notes where; the access is tried again, and finds them. To the end, and not the page alone: an adversary
//! could otherwise have the handler cut a range into more mappings than a process may have.
//!
//! It leaves all else alone: other addresses, errors of the machine's memory (`BUS_MCEERR_…`), signals that a
//! process sent. These go to the handler that was there before, or have the default action.
//! It is no handler of `signal-hook-registry`, which calls the one before it first (that of Rust's runtime puts the
//! default action back, whatever the address) and swallows what belongs to no handler.
//!
//! The handler calls nothing but atomics, `mmap`, `sigaction` and `raise`, takes no lock, allocates nothing
//! and keeps `errno` (signal-safety(7)).
//!
//! # The protocol of a slot
//!
//! A slot is written under [`CLAIMS`] and read by the handler at any time. It is free, and holds no address, while
//! its end is 0. A writer stores 0 there first and the new end last; a reader takes the end before and after the
//! rest, and passes the slot over if it has changed. The slot of a fault does not change: its range stays watched for
//! as long as it may be touched, as the caller of [`claim`] promises.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The most ranges that are watched at a time.
pub(crate) const MOST: usize = 1024;

/// Nothing is lost.
const NOTHING: usize = usize::MAX;

struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    /// The size of its pages.
    page: AtomicUsize,
    /// The first byte that is lost, counted from the start.
    lost: AtomicUsize,
}

static TABLE: [Slot; MOST] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        lost: AtomicUsize::new(NOTHING),
    }
}; MOST];
static CLAIMS: Mutex<()> = Mutex::new(());

/// Previous signal action.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static INSTALLED: AtomicBool = AtomicBool::new(false);

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes `SIGBUS`, once for the process.
pub(crate) fn install() -> io::Result<()> {
    let _claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
    if is_installed() {
        return Ok(());
    }
    // SAFETY: all zeros are a value of the structure: the default action, and no signal in the mask.
    let (mut before, mut ours): (libc::sigaction, libc::sigaction) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: without a new action it only tells the one that is there.
    check(unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) })?;
    // Before the handler can be called.
    let _ = BEFORE.set(before);
    ours.sa_sigaction = handle as *const () as usize;
    // On the stack for signals, where a thread has one: the fault may be at the end of its own.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `handle` has the type that SA_SIGINFO asks for, and keeps to what a handler may do.
    check(unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut()) })?;
    INSTALLED.store(true, SeqCst);
    Ok(())
}

pub(crate) fn is_installed() -> bool {
    INSTALLED.load(SeqCst)
}

/// A range that is watched until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim(usize);

/// Watches the addresses from `start` up to `end`, in pages of `page` bytes; `None` when too many are watched.
///
/// # Safety
///
/// As long as the claim exists, the range stays mapped, no other code maps anything there, and the process does not
/// rely on what its bytes are: they may turn to zeros that are not shared. Ends are multiples of the page.
pub(crate) unsafe fn claim(start: usize, end: usize, page: usize) -> Option<Claim> {
    let _claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
    let free = TABLE.iter().position(|slot| slot.end.load(SeqCst) == 0)?;
    let slot = &TABLE[free];
    slot.start.store(start, SeqCst);
    slot.page.store(page, SeqCst);
    slot.lost.store(NOTHING, SeqCst);
    slot.end.store(end, SeqCst);
    Some(Claim(free))
}

impl Claim {
    /// The first byte that is lost, counted from the start.
    pub(crate) fn lost(&self) -> Option<u64> {
        let lost = TABLE[self.0].lost.load(SeqCst);
        (lost != NOTHING).then_some(lost as u64)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
        TABLE[self.0].end.store(0, SeqCst);
    }
}

impl Slot {
    /// If it holds `address`: where it begins and ends, and its page.
    fn range_of(&self, address: usize) -> Option<(usize, usize, usize)> {
        let end = self.end.load(SeqCst);
        let (start, page) = (self.start.load(SeqCst), self.page.load(SeqCst));
        let holds = start <= address && address < end && self.end.load(SeqCst) == end;
        holds.then_some((start, end, page))
    }
}

/// The handler.
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: it is this thread's, and there for as long as the thread is.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above; the kernel has given a structure, and every cause of this signal fills in the code.
    let (before, code) = unsafe { (*errno, (*info).si_code) };
    // SAFETY: of a fault the kernel has filled in the address.
    if code != libc::BUS_ADRERR || !put_zeros(unsafe { (*info).si_addr() } as usize) {
        pass_on(signal, code, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Has zeros from the page of `address` on, in every range that holds it; false if none does, or if the kernel
/// refuses.
fn put_zeros(address: usize) -> bool {
    let mut put = false;
    for slot in &TABLE {
        let Some((start, end, page)) = slot.range_of(address) else {
            continue;
        };
        let from = (address & !(page - 1)).max(start);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // As wide as the kernel takes them.
        let [access, flags, file, offset] = [access, flags, -1, 0].map(libc::c_long::from);
        let (call, len) = (libc::SYS_mmap, end - from);
        // SAFETY: these pages lie in the range, of which `claim` was promised that it may become zeros. The call itself,
        // since mmap(3) is none of the functions that a handler may call (signal-safety(7)).
        let at = unsafe { libc::syscall(call, from, len, access, flags, file, offset) };
        if at != -1 {
            slot.lost.fetch_min(from - start, SeqCst);
            put = true;
        }
    }
    put
}

/// Does what was done before there was this handler.
fn pass_on(
    signal: libc::c_int,
    code: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // With any other code the instruction is done, and none will fault again.
    let faulted = (libc::BUS_ADRALN..=libc::BUS_MCEERR_AR).contains(&code);
    let before = BEFORE.get().map(|before| (before.sa_sigaction, before));
    match before {
        Some((libc::SIG_IGN, _)) if !faulted => {}
        None | Some((libc::SIG_DFL | libc::SIG_IGN, _)) => {
            // SAFETY: all zeros are the default action.
            let default: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: the default action calls nothing. The signal that is raised waits until this handler has
            // returned; a fault comes again by itself, from where it was.
            unsafe {
                libc::sigaction(signal, &raw const default, ptr::null_mut());
                if !faulted {
                    libc::raise(signal);
                }
            }
        }
        Some((handler, before)) if before.sa_flags & libc::SA_SIGINFO != 0 => {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // A number that is transmuted would lead nowhere: the address was given away as one.
            let address = ptr::with_exposed_provenance::<()>(handler);
            // SAFETY: it was given to the kernel as a handler of this type.
            let handler = unsafe { std::mem::transmute::<*const (), Handler>(address) };
            handler(signal, info, context);
        }
        Some((handler, _)) => {
            type Handler = extern "C" fn(libc::c_int);
            let address = ptr::with_exposed_provenance::<()>(handler);
            // SAFETY: the same of a handler without SA_SIGINFO.
            let handler = unsafe { std::mem::transmute::<*const (), Handler>(address) };
            handler(signal);
        }
    }
}
