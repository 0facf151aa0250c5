//! Promises of readers by thread, whatever the barrier.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::{mem, thread};

use iopt::format::{AmdV1, VtdSs};
use iopt::reclaim::{Reclaim, ThreadGuard, Threads};
use iopt::{Format, Gather, HeapTables, Prot, SharedTable, Table, TableMapError, TableOps as _};
use runs::{Iova, Span};

use super::choose;

const PAGE: u64 = 4096;
const IOVA: u64 = 5 << 30;
const PA: u64 = 9 << 30;

type Shared = SharedTable<VtdSs, Arc<HeapTables>>;

/// A table, and its memory of `tables` tables.
fn shared(tables: u64) -> (Shared, Arc<HeapTables>) {
    choose();
    let memory = Arc::new(HeapTables::with_tables(tables).unwrap());
    let table = Table::new(VtdSs::new(4).unwrap(), memory.clone()).unwrap();
    (SharedTable::new(table), memory)
}

fn page(nth: u64) -> Span<Iova> {
    Span::new(IOVA + nth * PAGE, PAGE)
}

fn map(table: &Shared, iova: u64, pa: u64) -> Result<(), TableMapError> {
    let runs = [Span::new(pa, PAGE)];
    retried(table, || table.enter().map(iova, &runs, Prot::RW))
}

/// Does `operation`, and once more when tables that waited may have been missing.
fn retried<F: Format, T, E>(
    table: &SharedTable<F, Arc<HeapTables>>,
    mut operation: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    operation().or_else(|_| {
        table.poll();
        operation()
    })
}

/// Owns all that there is: its tables are free afterwards.
fn unmap(table: &Shared, range: Span<Iova>) {
    let mut gather = Gather::new();
    let mut owner = table.owning(Span::new(0, 1 << 48));
    owner.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
    drop(owner);
    table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
}

/// Gives back what waits. Threads of other tests may be inside tables of their own for a while.
fn settle(table: &Shared) {
    while !table.poll() {
        thread::yield_now();
    }
}

/// While another thread has a record: it makes the barrier costly, where it is one that interrupts
/// processors.
fn beside_a_thread(test: impl FnOnce()) {
    let (done, is_done) = mpsc::channel::<()>();
    let (entered, has_entered) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            drop(shared(1).0.enter());
            entered.send(()).unwrap();
            let _ = is_done.recv();
        });
        has_entered.recv().unwrap();
        test();
        drop(done);
    });
}

#[test]
fn few_tables_wait_to_be_given_back_together_and_a_map_that_needs_them_has_them() {
    let (table, memory) = shared(16);
    beside_a_thread(|| {
        map(&table, IOVA, PA).unwrap();
        let with = memory.in_use();
        unmap(&table, page(0));
        let waits = if Threads::default().is_costly() {
            with
        } else {
            1
        };
        assert_eq!(memory.in_use(), waits);
        settle(&table);
        assert_eq!(memory.in_use(), 1);
        // Each time three more wait, until a map finds no others.
        for nth in 0..20 {
            map(&table, IOVA + nth * (1 << 39), PA).unwrap();
            unmap(&table, Span::new(IOVA + nth * (1 << 39), PAGE));
        }
    });
}

#[test]
fn a_top_that_grows_and_a_map_anew_have_the_tables_that_wait() {
    const TABLES: u64 = 16;
    let runs = [Span::new(PA, PAGE)];
    beside_a_thread(|| {
        for anew in [false, true] {
            let memory = Arc::new(HeapTables::with_tables(TABLES).unwrap());
            let levels = if anew { 4 } else { 2 };
            let table = Table::new(AmdV1::new(levels).unwrap(), memory.clone()).unwrap();
            let table = SharedTable::new(table);
            let flush = |mut gather: Gather| {
                table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
            };
            // One mapped page keeps the root; then as many tables wait as there are.
            table.enter().map(0, &runs, Prot::RW).unwrap();
            let below = u64::from(levels) - 1;
            let one = 1 << (12 + 9 * below);
            let mut nth = 0;
            while memory.in_use() + below <= TABLES {
                nth += 1;
                table.enter().map(nth * one, &runs, Prot::RW).unwrap();
            }
            for nth in 1..=nth {
                let (mut owner, mut gather) =
                    (table.owning(Span::new(one, nth * one)), Gather::new());
                let page = Span::new(nth * one, PAGE);
                owner.unmap(page, &mut gather, &mut iopt::NoRuns).unwrap();
                drop(owner);
                flush(gather);
            }
            let waits = Threads::default().is_costly();
            assert_eq!(memory.in_use() > 1 + below, waits);
            let mut gather = Gather::new();
            if anew {
                let map = || table.enter().map_anew(one, &runs, Prot::RW, &mut gather);
                retried(&table, map).unwrap();
            } else {
                let grown = retried(&table, || table.grow(4, &mut gather));
                assert_eq!(grown.unwrap().levels, 4);
            }
            flush(gather);
        }
    });
}

#[test]
fn tables_are_not_reused_while_a_reader_of_another_thread_is_inside() {
    let (table, memory) = shared(64);
    map(&table, IOVA, PA).unwrap();
    let with = memory.in_use();
    let (entered, has_entered) = mpsc::channel();
    let (leave, may_leave) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let table = &table;
        scope.spawn(move || {
            let inside = table.enter();
            entered.send(inside.translate(IOVA)).unwrap();
            may_leave.recv().unwrap();
        });
        assert_eq!(has_entered.recv().unwrap(), Some(PA));
        unmap(table, page(0));
        for _ in 0..100 {
            assert!(!table.poll());
            assert_eq!(memory.in_use(), with, "it may still be read");
        }
        // Nothing waits for it either: others map, and what they unmap waits behind.
        map(table, IOVA + (1 << 30), PA).unwrap();
        unmap(table, Span::new(IOVA + (1 << 30), PAGE));
        assert!(!table.poll());
        leave.send(()).unwrap();
    });
    settle(&table);
    assert_eq!(memory.in_use(), 1);
}

#[test]
fn a_reader_that_comes_later_has_no_table_wait() {
    let (table, memory) = shared(64);
    map(&table, IOVA, PA).unwrap();
    // Its batch's time is over when the other thread comes.
    let (entered, has_entered) = mpsc::channel();
    let (leave, may_leave) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let table = &table;
        let own = table.enter();
        unmap(table, page(0));
        scope.spawn(move || {
            let _inside = table.enter();
            entered.send(()).unwrap();
            may_leave.recv().unwrap();
        });
        has_entered.recv().unwrap();
        assert!(!table.poll());
        drop(own);
        settle(table);
        assert_eq!(memory.in_use(), 1);
        leave.send(()).unwrap();
    });
}

#[test]
fn guards_of_one_thread_nest_in_any_order_and_over_tables() {
    let (first, first_memory) = shared(64);
    let (second, second_memory) = shared(64);
    for table in [&first, &second] {
        map(table, IOVA, PA).unwrap();
    }
    let outer = first.enter();
    let inner = second.enter();
    let again = first.enter();
    unmap(&first, page(0));
    unmap(&second, page(0));
    // The outermost goes first.
    for guard in [outer, again] {
        drop(guard);
        assert!(!first.poll() && !second.poll());
        assert_eq!((first_memory.in_use(), second_memory.in_use()), (4, 4));
    }
    drop(inner);
    settle(&first);
    settle(&second);
    assert_eq!((first_memory.in_use(), second_memory.in_use()), (1, 1));
}

#[test]
fn a_table_is_its_own_again_whoever_is_inside_another() {
    let (table, memory) = shared(64);
    let (other, _) = shared(64);
    let inside = other.enter();
    map(&table, IOVA, PA).unwrap();
    unmap(&table, page(0));
    assert!(!table.poll());
    let _ = table.into_inner();
    assert_eq!(memory.in_use(), 1);
    drop(inside);
}

#[test]
fn more_threads_than_slots_read_while_one_unmaps_and_reuses_the_tables() {
    // Slots are 32. An interpreter is slow.
    const READERS: usize = if cfg!(miri) { 33 } else { 96 };
    const ROUNDS: u64 = if cfg!(miri) { 8 } else { 300 };
    // Just enough for what is mapped at a time: each round reuses the tables of the one before.
    let (table, memory) = shared(16);
    let done = AtomicBool::new(false);
    let found = AtomicU64::new(0);
    let all_inside = Barrier::new(READERS + 1);
    // One of four places is mapped, to its own frame; each needs two or three tables of its own.
    let place = |round: u64| (IOVA + ((round % 4) << 30), PA + (round % 4) * PAGE);
    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                let inside = table.enter();
                // All of them at once: a form with slots would stand still here.
                all_inside.wait();
                drop(inside);
                while !done.load(Ordering::Relaxed) {
                    for round in 0..4 {
                        let (iova, pa) = place(round);
                        let there = table.enter().translate(iova);
                        assert!(there.is_none() || there == Some(pa), "{there:x?}");
                        found.fetch_add(u64::from(there.is_some()), Ordering::Relaxed);
                    }
                    thread::yield_now();
                }
            });
        }
        all_inside.wait();
        for round in 0..ROUNDS {
            let (iova, pa) = place(round);
            while let Err(error) = map(&table, iova, pa) {
                assert!(matches!(error, TableMapError::NoTables(_)), "{error}");
                table.poll();
                thread::yield_now();
            }
            thread::yield_now();
            unmap(&table, Span::new(iova, PAGE));
        }
        done.store(true, Ordering::Relaxed);
    });
    settle(&table);
    assert_eq!(memory.in_use(), 1);
    println!("found {} times", found.into_inner());
}

#[test]
fn a_thread_s_record_is_the_next_one_s() {
    let (table, _) = shared(64);
    let before = Threads::records();
    for _ in 0..if cfg!(miri) { 200 } else { 1000 } {
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(table.enter().translate(IOVA), None));
        });
    }
    let made = Threads::records() - before;
    // One, and those of tests beside this one.
    assert!(made < if cfg!(miri) { 100 } else { 300 }, "{made} records");
}

/// Goes inside when its thread's storage is destroyed, and stays there beyond what comes after it.
struct Late {
    table: Arc<Shared>,
    held: mpsc::Sender<(Option<u64>, bool)>,
}

impl Drop for Late {
    fn drop(&mut self) {
        map(&self.table, IOVA, PA).unwrap();
        let inside = self.table.enter();
        let found = inside.translate(IOVA);
        unmap(&self.table, page(0));
        let waits = !self.table.poll();
        drop(inside);
        self.held.send((found, waits)).unwrap();
    }
}

#[test]
fn a_guard_is_right_while_thread_local_storage_is_destroyed() {
    thread_local! {
        static EARLY: std::cell::RefCell<Option<Late>> = const { std::cell::RefCell::new(None) };
        static HELD: std::cell::RefCell<Option<ThreadGuard>> = const { std::cell::RefCell::new(None) };
    }
    let (table, memory) = shared(64);
    let table = Arc::new(table);
    let (held, results) = mpsc::channel();
    for late_first in [true, false] {
        for _ in 0..if cfg!(miri) { 2 } else { 20 } {
            let (table, held) = (Arc::clone(&table), held.clone());
            let late = Late {
                table: Arc::clone(&table),
                held,
            };
            thread::spawn(move || {
                // Destroyed in the order in which they were first used, or the other way round.
                if late_first {
                    EARLY.with(|place| *place.borrow_mut() = Some(late));
                    drop(table.enter());
                } else {
                    drop(table.enter());
                    EARLY.with(|place| *place.borrow_mut() = Some(late));
                }
                let guard = Threads::default().enter(&*memory_of_none());
                HELD.with(|place| *place.borrow_mut() = Some(guard));
            })
            .join()
            .unwrap();
            assert_eq!(results.recv().unwrap(), (Some(PA), true));
        }
    }
    settle(&table);
    assert_eq!(memory.in_use(), 1);
    let records = Threads::records();
    assert!(records < 300, "{records} records");
}

/// Memory for a call that asks it nothing.
fn memory_of_none() -> Arc<HeapTables> {
    Arc::new(HeapTables::with_tables(16).unwrap())
}

#[test]
fn a_guard_that_is_leaked_has_tables_wait_and_nothing_else() {
    // Its thread's record is never given to another one; so as the last of a process of its own.
    if std::env::var_os("NEXTEST").is_none() {
        return;
    }
    let (table, memory) = shared(64);
    map(&table, IOVA, PA).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| mem::forget(table.enter()));
    });
    unmap(&table, page(0));
    assert!(!table.poll());
    assert_eq!(table.enter().translate(IOVA), None);
    map(&table, IOVA, PA).unwrap();
    assert_eq!(table.enter().translate(IOVA), Some(PA));
    unmap(&table, page(0));
    let _ = table.into_inner();
    assert_eq!(memory.in_use(), 1);
}
