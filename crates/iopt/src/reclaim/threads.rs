//! Readers by thread: a record for each thread of the process, for all tables together.
//!
//! A thread takes a record when it first goes inside, keeps it in thread-local storage and gives it back
//! at its end; the next thread takes it over. Records are never freed, so that a list of them can be
//! walked at any time. There are as many as threads were inside in their lives at one time.
//!
//! A guard that is taken while the thread's storage is being destroyed has a record for itself. One that
//! is still held by then keeps the record until it is dropped. One that is leaked (`mem::forget`) has
//! tables wait for ever.
//!
//! In a child of `fork` the readers that were inside in other threads of the parent have never left.
//!
//! A signal handler may go inside on a thread that was inside before; otherwise it allocates.

use core::cell::Cell;
use core::marker::PhantomData;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use std::boxed::Box;
use std::thread_local;

use super::asymmetric::{decide, is_asymmetric};
use super::record::{Clock, Record};
use super::{Reclaim, fence_heavy, fence_light};
use crate::memory::TableMemory;

/// The readers of all tables in this process, by their threads: any number, and entering is as good as
/// free. See the [protocol](super).
///
/// A thread that is inside one table has unlinked tables of the others wait as well. Not for tables that
/// another process walks: its threads have no records here.
#[derive(Clone, Copy, Debug)]
pub struct Threads(());

static CLOCK: Clock<AtomicU64> = Clock::new(AtomicU64::new(0));
/// The record that was made last.
static LAST: AtomicPtr<ThreadRecord> = AtomicPtr::new(ptr::null_mut());
static MADE: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Without a destructor, so that it can be read at any time and without asking whether it is there.
    static OWN: Cell<Option<&'static ThreadRecord>> = const { Cell::new(None) };
    /// Gives the record back at the thread's end.
    static END: End = const { End };
}

struct End;

impl Drop for End {
    fn drop(&mut self) {
        let own = OWN.try_with(Cell::take).ok().flatten();
        if let Some(own) = own.filter(|own| own.record.detach()) {
            own.release();
        }
    }
}

/// On a line (or the pair that is fetched together) of its own.
#[derive(Debug)]
#[repr(align(128))]
struct ThreadRecord {
    record: Record<AtomicU64>,
    taken: AtomicBool,
    /// The one made before.
    before: AtomicPtr<ThreadRecord>,
}

impl ThreadRecord {
    /// Follows a pointer of the list.
    #[inline]
    fn at(pointer: &AtomicPtr<Self>) -> Option<&'static Self> {
        // SAFETY: pointers of the list are null or come from `Box::leak` in `make`, which published the
        // record by a release exchange; records are never freed and are changed by atomics only. The
        // fields are private to this file.
        unsafe { pointer.load(Ordering::Acquire).as_ref() }
    }

    fn all() -> impl Iterator<Item = &'static Self> {
        core::iter::successors(Self::at(&LAST), |record| Self::at(&record.before))
    }

    /// A record that no other thread has.
    fn take() -> &'static Self {
        let free = |record: &&Self| {
            !record.taken.load(Ordering::Relaxed) && !record.taken.swap(true, Ordering::AcqRel)
        };
        let record = Self::all().find(free).unwrap_or_else(Self::make);
        // Against the one in `is_alone`.
        fence(Ordering::SeqCst);
        record
    }

    fn make() -> &'static Self {
        MADE.fetch_add(1, Ordering::Relaxed);
        let record: &'static Self = Box::leak(Box::new(Self {
            record: Record::default(),
            taken: AtomicBool::new(true),
            before: AtomicPtr::new(LAST.load(Ordering::Acquire)),
        }));
        let new = ptr::from_ref(record).cast_mut();
        let mut last = record.before.load(Ordering::Relaxed);
        while let Err(found) =
            LAST.compare_exchange_weak(last, new, Ordering::AcqRel, Ordering::Acquire)
        {
            last = found;
            record.before.store(last, Ordering::Relaxed);
        }
        record
    }

    /// Outside, it is the next thread's.
    fn release(&self) {
        self.taken.store(false, Ordering::Release);
    }

    /// The calling thread goes inside for the first time, or when its storage is gone.
    #[cold]
    fn enter_new() -> &'static Self {
        let new = Self::take();
        if END.try_with(|_| ()).is_ok() {
            // A record that an interrupt has taken just now is lost to other threads, and no more.
            OWN.set(Some(new));
            new.record.enter(&CLOCK);
        } else {
            new.record.enter(&CLOCK);
            new.record.detach();
        }
        new
    }
}

impl Threads {
    /// How many records there are: as many as threads had one at the same time.
    pub fn records() -> u32 {
        MADE.load(Ordering::Relaxed)
    }

    /// True when no thread but the calling one has a record. One that takes a record later finds what
    /// was stored before: its fence and this one face each other.
    fn is_alone() -> bool {
        fence(Ordering::SeqCst);
        let own = OWN.try_with(Cell::get).ok().flatten();
        let is_own = |record: &ThreadRecord| own.is_some_and(|own| ptr::eq(own, record));
        ThreadRecord::all().all(|record| !record.taken.load(Ordering::Acquire) || is_own(record))
    }
}

impl Default for Threads {
    /// The first in a process chooses the barrier: a system call, which takes milliseconds where the
    /// process has more than one thread by then.
    fn default() -> Self {
        decide();
        Self(())
    }
}

impl Reclaim for Threads {
    type Guard<'a> = ThreadGuard;

    #[inline(always)]
    fn enter<M: TableMemory + ?Sized>(&self, _memory: &M) -> ThreadGuard {
        let record = match OWN.try_with(Cell::get) {
            Ok(Some(own)) => {
                own.record.enter(&CLOCK);
                own
            }
            _ => ThreadRecord::enter_new(),
        };
        fence_light();
        let bound = PhantomData;
        ThreadGuard { record, bound }
    }

    fn advance(&self) -> u64 {
        CLOCK.advance()
    }

    fn barrier(&self) -> bool {
        is_asymmetric() && Self::is_alone() || fence_heavy()
    }

    fn is_costly(&self) -> bool {
        is_asymmetric() && !Self::is_alone()
    }

    fn have_left(&self, time: u64) -> bool {
        ThreadRecord::all().all(|record| record.record.has_left(time))
    }
}

/// The calling thread is inside. It stays on that thread:
///
/// ```compile_fail,E0277
/// fn moves<T: Send>() {}
/// moves::<iopt::reclaim::ThreadGuard>();
/// ```
#[derive(Debug)]
pub struct ThreadGuard {
    record: &'static ThreadRecord,
    bound: PhantomData<*const ()>,
}

impl Drop for ThreadGuard {
    #[inline(always)]
    fn drop(&mut self) {
        if self.record.record.leave() {
            self.record.release();
        }
    }
}
