//! Readers by thread, with a barrier that the reclaimer has every reader execute.
//!
//! A reader does what `iopt::reclaim::Threads` does: the same [`Record`] and [`Clock`], over the
//! checker's cells, and no fence at all. The barrier is an interrupt (as `membarrier` is): at any access to
//! memory, before it takes effect, the reader's [`Processor`] may find that one is wanted, and executes a
//! fence. The same accesses are where a signal arrives, whose handler goes inside itself: once in each run
//! of a model, and there is a model for each access.

use std::cell::{Cell as Plain, RefCell};
use std::rc::Rc;

use iopt::reclaim::{Clock, Reclaim, Record};
use iopt::{Cell, TableMemory, TableOps as _};
use loom::sync::atomic::{AtomicBool, Ordering, fence};

use super::*;

/// Interrupt that is wanted of a reader.
#[derive(Default)]
struct Processor {
    wanted: AtomicBool,
    executed: AtomicBool,
}

impl Processor {
    /// The reclaimer's side. What it stored before is seen by what the reader loads after its fence, and the
    /// other way round.
    fn interrupt(&self) {
        fence(Ordering::SeqCst);
        self.wanted.store(true, Ordering::Relaxed);
        while !self.executed.load(Ordering::Acquire) {
            thread::yield_now();
        }
        fence(Ordering::SeqCst);
    }

    fn execute(&self) {
        fence(Ordering::SeqCst);
        self.executed.store(true, Ordering::Release);
    }
}

/// A thread on a processor, as far as its interrupts see it.
struct Running {
    processor: Arc<Processor>,
    fenced: Plain<bool>,
    /// Accesses until the signal arrives.
    until_signal: Plain<usize>,
    handler: Box<dyn Fn()>,
}

loom::thread_local! {
    static RUNNING: RefCell<Option<Rc<Running>>> = RefCell::new(None);
}

/// Before each access of a cell.
pub(super) fn access() {
    let Ok(Some(running)) = RUNNING.try_with(|running| running.borrow().clone()) else {
        return;
    };
    // It counts down in its own handler, too, and arrives once.
    let until = running.until_signal.get();
    running.until_signal.set(until.wrapping_sub(1));
    if until == 0 {
        (running.handler)();
    }
    if !running.fenced.get() && running.processor.wanted.load(Ordering::Relaxed) {
        running.fenced.set(true);
        running.processor.execute();
    }
}

/// Runs `read` as a thread of that processor does, with a signal in front of the access number `signal`.
fn run_on(
    processor: Arc<Processor>,
    signal: usize,
    handler: impl Fn() + 'static,
    read: impl FnOnce(),
) {
    let running = Rc::new(Running {
        processor: Arc::clone(&processor),
        fenced: Plain::new(false),
        until_signal: Plain::new(signal),
        handler: Box::new(handler),
    });
    RUNNING.with(|now| now.replace(Some(running)));
    read();
    RUNNING.with(|now| now.replace(None));
    // A thread that does not run needs no interrupt.
    processor.execute();
}

/// A clock's cell that gives away what [`Cell::get_acquire`] promises.
#[derive(Default)]
struct Weak(LoomCell);

impl Cell for Weak {
    const BYTES: usize = 8;

    fn get(&self) -> u64 {
        self.0.get()
    }
    fn get_acquire(&self) -> u64 {
        self.0.get()
    }
    fn set(&self, word: u64) {
        self.0.set(word);
    }
    fn set_release(&self, word: u64) {
        self.0.set_release(word);
    }
    fn exchange(&self, word: u64) -> u64 {
        self.0.exchange(word)
    }
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        self.0.set_if(old, new)
    }
}

/// The smallest table: a link, and what lies behind it.
#[derive(Default)]
struct Linked<C> {
    clock: Clock<C>,
    record: Record<C>,
    link: LoomCell,
    page: LoomCell,
    processor: Arc<Processor>,
}

impl<C: Cell + Default> Linked<C> {
    /// Reads inside: what is linked is not used for something else meanwhile.
    fn read(&self) {
        self.record.enter(&self.clock);
        if self.link.get_acquire() != 0 {
            assert_eq!(self.page.get(), 0, "the page is used anew");
        }
        assert!(!self.record.leave());
    }

    /// Unlinks, waits for readers, and uses the page anew.
    fn reclaim(&self, barrier: bool) {
        self.link.set(0);
        let time = self.clock.advance();
        if barrier {
            self.processor.interrupt();
        }
        while !self.record.has_left(time) {
            thread::yield_now();
        }
        self.page.set(1);
    }
}

/// A reader, which finds the page or not, and the reclaimer.
fn a_reader_and_the_reclaimer<C: Cell + Default + 'static>(signal: usize, barrier: bool) {
    model(move || {
        let linked = Arc::new(Linked::<C>::default());
        linked.link.set(1);
        let other = Arc::clone(&linked);
        let reader = thread::spawn(move || {
            let (handlers, processor) = (Arc::clone(&other), Arc::clone(&other.processor));
            run_on(processor, signal, move || handlers.read(), || other.read());
        });
        linked.reclaim(barrier);
        reader.join().unwrap();
    });
}

/// No signal.
const NEVER: usize = usize::MAX;
/// Loads and stores of one reading: three to enter, two to read, two to leave.
const ACCESSES: usize = 7;

#[test]
fn a_plain_store_and_the_reclaimer_s_barrier_keep_a_page_for_its_reader() {
    a_reader_and_the_reclaimer::<LoomCell>(NEVER, true);
}

#[test]
fn a_signal_at_any_access_of_a_reader_goes_inside_and_leaves_it_there() {
    for signal in 0..=ACCESSES {
        a_reader_and_the_reclaimer::<LoomCell>(signal, true);
    }
}

#[test]
#[should_panic(expected = "the page is used anew")]
fn without_the_barrier_a_page_is_used_anew_under_its_reader() {
    a_reader_and_the_reclaimer::<LoomCell>(NEVER, false);
}

#[test]
#[should_panic(expected = "the page is used anew")]
fn without_acquiring_the_clock_a_page_is_used_anew_under_its_reader() {
    a_reader_and_the_reclaimer::<Weak>(NEVER, true);
}

/// As `Threads`, for two threads: one on a processor that is interrupted, and one that reclaims.
#[derive(Default)]
struct TwoThreads {
    clock: Clock<LoomCell>,
    records: [Record<LoomCell>; 2],
    processor: Arc<Processor>,
}

struct Guard<'a>(&'a Record<LoomCell>);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        assert!(!self.0.leave());
    }
}

impl Reclaim for TwoThreads {
    type Guard<'a> = Guard<'a>;

    fn enter<M: TableMemory + ?Sized>(&self, _memory: &M) -> Guard<'_> {
        let number = RUNNING.with(|running| usize::from(running.borrow().is_some()));
        let record = &self.records[number];
        record.enter(&self.clock);
        Guard(record)
    }

    fn advance(&self) -> u64 {
        self.clock.advance()
    }

    fn barrier(&self) -> bool {
        self.processor.interrupt();
        true
    }

    fn have_left(&self, time: u64) -> bool {
        self.records.iter().all(|record| record.has_left(time))
    }
}

/// Page 0 is mapped to its frame or not at all, whatever its old tables are used for.
fn translate(table: &SharedTable<Tiny, Arc<Tables>, TwoThreads>) {
    let found = table.enter().translate(0);
    assert!(found.is_none() || found == Some(16 * PAGE), "{found:x?}");
}

fn a_reader_of_a_table_that_is_reused(signal: usize, preemptions: usize) {
    model_of(preemptions, move || {
        let memory = Tables::new(3, true);
        let table = Table::new(TINY, Arc::clone(&memory)).unwrap();
        let reclaim = TwoThreads::default();
        let processor = Arc::clone(&reclaim.processor);
        let table = Arc::new(SharedTable::with_reclaim(table, reclaim));
        let frames = |page: u64| [Span::new((16 + page) * PAGE, PAGE)];
        table.enter().map(0, &frames(0), Prot::RW).unwrap();
        let other = Arc::clone(&table);
        let reader = thread::spawn(move || {
            let handlers = Arc::clone(&other);
            let handler = move || translate(&handlers);
            run_on(processor, signal, handler, || translate(&other));
        });
        let mut gather = Gather::new();
        let range = Span::new(0, PAGE);
        let all = Span::new(0, 8 * PAGE);
        let mut owner = table.owning(all);
        owner.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
        drop(owner);
        table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
        while let Err(error) = table.enter().map(7 * PAGE, &frames(7), Prot::RW) {
            assert!(matches!(error, TableMapError::NoTables(_)));
            table.poll();
            thread::yield_now();
        }
        reader.join().unwrap();
        assert_eq!(table.enter().translate(7 * PAGE), Some(23 * PAGE));
        assert_eq!((table.poll(), memory.free()), (true, 0));
    });
}

#[test]
fn a_reader_by_thread_never_meets_a_table_that_is_used_for_something_else() {
    a_reader_of_a_table_that_is_reused(NEVER, 3);
}

#[test]
fn a_signal_in_a_reader_by_thread_meets_no_such_table_either_nor_does_the_reader_after_it() {
    // To enter, through the root and two tables, and to leave.
    for signal in 0..10 {
        a_reader_of_a_table_that_is_reused(signal, 2);
    }
}
