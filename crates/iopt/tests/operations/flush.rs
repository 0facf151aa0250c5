//! Units that read past the processor's caches: what they see, after every single store.
//!
//! The memory of these tables is there twice: as the processor sees it, and as the unit does. What
//! is stored reaches the unit when its cache line is written back and the write-back is completed.
//! A line may also go there at any earlier time by itself, and the worst time is tried: lines of
//! tables that the unit can reach go at once, those of tables that it cannot reach yet never do.
//! After each store a walker that shares nothing with the engine reads the unit's side.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use iopt::format::{AmdV1, ArmStage1, Entry, K4, VtdSs, X86_64};
use iopt::observe::{CacheLines, NonCoherent};
use iopt::walk::{Access, BadAddress, WalkMemory, Walker};
use iopt::{
    Arena, AtomicMeta, Cell, Format, Gather, Prot, Root, SharedTable, Table, TableMemory,
    TableOps as _,
};
use runs::{Iova, PageSizes, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;
const BASE: u64 = 1 << 46;
const TABLES: usize = 64;

type Stored = Box<dyn FnMut(usize)>;
type Act = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Called after each store with the address of the cell.
    static STORED: RefCell<Option<Stored>> = const { RefCell::new(None) };
}

#[derive(Default)]
#[repr(transparent)]
struct Cached(AtomicU64);

impl Cached {
    fn stored(&self) {
        if let Some(mut stored) = STORED.with(|slot| slot.borrow_mut().take()) {
            stored(std::ptr::from_ref(self).addr());
            STORED.with(|slot| *slot.borrow_mut() = Some(stored));
        }
    }
}

impl Cell for Cached {
    const BYTES: usize = 8;

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    fn get_acquire(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
    fn set(&self, word: u64) {
        self.0.store(word, Ordering::Relaxed);
        self.stored();
    }
    fn set_release(&self, word: u64) {
        self.0.store(word, Ordering::Release);
        self.stored();
    }
    fn exchange(&self, word: u64) -> u64 {
        let old = self.0.swap(word, Ordering::AcqRel);
        self.stored();
        old
    }
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        let result = self
            .0
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        self.stored();
        result.map(|_| ())
    }
}

/// The processor's side.
type Memory = (&'static [Cached], &'static [AtomicMeta]);

/// The unit's side, and the lines on their way to it.
struct Machine {
    arena: Arena<Memory>,
    seen: Vec<AtomicU64>,
    /// Lines of each thread, since it completes its own write-backs only.
    on_their_way: Mutex<Vec<(ThreadId, usize)>>,
    lines: AtomicUsize,
    completions: AtomicUsize,
    /// Called when the completion of this number begins.
    meanwhile: Mutex<Option<(usize, Act)>>,
}

type Tables = NonCoherent<&'static Arena<Memory>, &'static Machine>;

impl Machine {
    /// Earlier content of the memory is still there, on both sides.
    fn new() -> &'static Self {
        let garbage = |n: usize| ((n as u64 * 0x9e37_79b9) << 12) | 0x6000_0000_0000_0003;
        let room: &'static [Cached] =
            Vec::leak((0..TABLES * 512 + 8).map(|_| Cached::default()).collect());
        // Tables begin at lines.
        let skip = room.as_ptr().align_offset(64);
        let metas = Vec::leak((0..TABLES).map(|_| AtomicMeta::default()).collect());
        let memory: Memory = (&room[skip..skip + TABLES * 512], metas);
        let arena = Arena::new(memory, BASE).unwrap();
        Box::leak(Box::new(Self {
            arena,
            // The zeroes of an arena that is new were stored by the processor too.
            seen: (0..TABLES * 512)
                .map(|n| AtomicU64::new(garbage(n)))
                .collect(),
            on_their_way: Mutex::default(),
            lines: AtomicUsize::new(0),
            completions: AtomicUsize::new(0),
            meanwhile: Mutex::default(),
        }))
    }

    fn tables(&'static self) -> Tables {
        NonCoherent::new(&self.arena, self)
    }

    fn start(&self) -> usize {
        self.arena.storage().0.as_ptr().addr()
    }

    /// The line that the cell at this address lies in goes to the unit's side.
    fn write_through(&self, cell: usize) {
        let first = (cell - self.start()) / 64 * 8;
        for n in first..first + 8 {
            let word = Cell::get(&self.arena.storage().0[n]);
            self.seen[n].store(word, Ordering::Relaxed);
        }
    }

    /// The tables that the unit can reach.
    fn reach<F: Format>(&self, table: u64, level: usize, into: &mut BTreeSet<u64>) {
        if !self.arena.contains(table) || !into.insert(table & !0xfff) || level == 0 {
            return;
        }
        for n in 0..512 {
            if let Entry::Table(below) =
                F::decode(level, self.read_u64((table & !0xfff) + n * 8).unwrap())
            {
                self.reach::<F>(below, level - 1, into);
            }
        }
    }

    fn sees(&self, root: Root, iova: u64) -> Option<u64> {
        Walker::new(root)
            .walk(self, iova, Access::Read, &mut ())
            .ok()
            .map(|found| found.pa)
    }
}

impl WalkMemory for Machine {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let offset = address.wrapping_sub(BASE) as usize;
        self.seen
            .get(offset / 8)
            .map(|cell| cell.load(Ordering::Relaxed))
            .ok_or(BadAddress { address })
    }
}

impl CacheLines for &'static Machine {
    const LINE: usize = 64;

    fn write_back(&self, line: *const u8) {
        assert!(line.addr() % 64 == 0);
        self.lines.fetch_add(1, Ordering::Relaxed);
        let own = (thread::current().id(), line.addr());
        self.on_their_way.lock().unwrap().push(own);
    }

    fn complete(&self) {
        let number = self.completions.fetch_add(1, Ordering::Relaxed);
        let mut meanwhile = self.meanwhile.lock().unwrap();
        if let Some((_, act)) = meanwhile.take_if(|(wanted, _)| *wanted == number) {
            drop(meanwhile);
            act();
        }
        let own = thread::current().id();
        self.on_their_way.lock().unwrap().retain(|(by, line)| {
            if *by == own {
                self.write_through(*line);
            }
            *by != own
        });
    }
}

struct World<F: Format> {
    machine: &'static Machine,
    table: Table<F, Tables>,
    pages: Vec<u64>,
    /// Lines of tables within the unit's reach go there at once.
    at_once: bool,
    stops: u64,
}

impl<F: Format> World<F> {
    fn new(format: F, at_once: bool) -> Self {
        let machine = Machine::new();
        let sizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
        let table = Table::with_page_sizes(format, machine.tables(), sizes).unwrap();
        let near = (0..80).map(|n| G1 - 40 * PAGE + n * PAGE);
        let wide = (0..64).map(|n| G1 - 2 * M2 + n * 16 * PAGE);
        let far = [0, PAGE, G1 + 2 * M2, 5 * G1, 6 * G1 - PAGE, 7 * G1];
        Self {
            machine,
            table,
            pages: near.chain(wide).chain(far).collect(),
            at_once,
            stops: 0,
        }
    }

    fn step(
        &mut self,
        range: Span<Iova>,
        new: impl Fn(u64) -> Option<u64>,
        operation: impl FnOnce(&mut Table<F, Tables>),
    ) {
        let (machine, root, at_once) = (self.machine, self.table.root(), self.at_once);
        let expected: Vec<_> = self
            .pages
            .iter()
            .map(|&iova| {
                let old = machine.sees(root, iova);
                let new = if range.contains(iova) { new(iova) } else { old };
                (iova, old, new)
            })
            .collect();
        let after = expected.clone();
        let stops = std::rc::Rc::new(std::cell::Cell::new(0));
        let counter = std::rc::Rc::clone(&stops);
        let stored = move |cell: usize| {
            if at_once {
                let table = BASE + ((cell - machine.start()) as u64 & !0xfff);
                let mut within = BTreeSet::new();
                machine.reach::<F>(root.address, usize::from(root.levels) - 1, &mut within);
                if within.contains(&table) {
                    machine.write_through(cell);
                }
            }
            counter.set(counter.get() + 1);
            for &(iova, old, new) in &expected {
                let now = machine.sees(root, iova);
                assert!(
                    now == old || now == new,
                    "{iova:#x}: {now:x?}, not {old:x?} or {new:x?}"
                );
            }
        };
        STORED.with(|slot| *slot.borrow_mut() = Some(Box::new(stored)));
        operation(&mut self.table);
        STORED.with(|slot| *slot.borrow_mut() = None);
        self.stops += stops.get();
        for (iova, _, new) in after {
            assert_eq!(machine.sees(root, iova), new, "{iova:#x} afterwards");
        }
    }

    fn map(&mut self, iova: u64, pa: u64, len: u64) {
        self.step(
            Span::new(iova, len),
            move |at| Some(pa + (at - iova)),
            |table| table.map(iova, &[Span::new(pa, len)], Prot::RW).unwrap(),
        );
    }

    fn unmap(&mut self, iova: u64, len: u64) {
        let range = Span::new(iova, len);
        self.step(
            range,
            |_| None,
            |table| {
                let mut gather = Gather::new();
                table
                    .unmap_mapped(range, &mut gather, &mut iopt::NoRuns)
                    .unwrap();
                // The tables are reused at once, with all that is left in them on both sides.
                table.reclaim(gather.never_walked());
            },
        );
    }
}

fn every_store<F: Format>(format: F) {
    for at_once in [false, true] {
        let mut world = World::new(format, at_once);
        world.map(G1 - 20 * PAGE, 9 * G1, 30 * PAGE);
        world.map(G1 + 20 * PAGE, 11 * G1 + PAGE, 8 * PAGE);
        world.map(G1 + 12 * PAGE, 12 * G1, PAGE);
        world.unmap(G1 - 10 * PAGE, 5 * PAGE);
        world.unmap(G1, 30 * PAGE);
        world.map(G1 + 3 * PAGE, 13 * G1 + 5 * PAGE, 3 * PAGE);
        world.unmap(G1 - M2, M2);
        world.map(G1 - 2 * M2 - 3 * PAGE, 20 * G1 - 3 * PAGE, M2 + 9 * PAGE);
        world.map(5 * G1, 32 * G1, G1);
        world.unmap(5 * G1, G1);
        world.unmap(G1, M2);
        world.unmap(G1 - 2 * M2 - 3 * PAGE, M2 + 9 * PAGE);
        assert_eq!(world.table.tables(), 1);
        assert!(world.stops > 90, "only {} stores were seen", world.stops);
    }
}

#[test]
fn lines_are_flushed_before_a_table_is_linked() {
    every_store(VtdSs::new(4).unwrap());
    every_store(X86_64::new(4).unwrap());
    every_store(AmdV1::new(4).unwrap());
    every_store(ArmStage1::<K4>::new(48, 48).unwrap());
}

#[test]
fn a_root_is_empty_for_the_unit_as_soon_as_there_is_one() {
    let machine = Machine::new();
    for _ in 0..2 {
        let mut table = Table::new(VtdSs::new(4).unwrap(), machine.tables()).unwrap();
        let root = table.root();
        for slot in 0..512 {
            assert_eq!(machine.sees(root, slot << 39), None);
        }
        // Tables that the next root is made of.
        table
            .map(0, &[Span::new(7 * G1, 3 * PAGE)], Prot::RW)
            .unwrap();
        assert_eq!(machine.sees(root, PAGE), Some(7 * G1 + PAGE));
        let (gather, memory) = table.tear_down();
        memory.reclaim(gather.never_walked().into_tables());
    }
}

#[test]
fn each_line_is_written_back_once() {
    let machine = Machine::new();
    let mut table = Table::with_page_sizes(
        VtdSs::new(4).unwrap(),
        machine.tables(),
        PageSizes::from_bits(PAGE),
    )
    .unwrap();
    let lines = || machine.lines.swap(0, Ordering::Relaxed);
    assert_eq!(lines(), 64, "the root");
    // Pages 500 to 519: two tables at the lowest level, two above, all new; one line of the root.
    let range = Span::new(500 * PAGE, 20 * PAGE);
    table
        .map(range.start, &[Span::new(G1, range.len)], Prot::RW)
        .unwrap();
    assert_eq!(lines(), 4 * 64 + 1);
    // Nine pages that are not aligned to a line.
    table
        .map(12 * PAGE, &[Span::new(2 * G1, 9 * PAGE)], Prot::RW)
        .unwrap();
    assert_eq!(lines(), 2);
    table
        .map(11 * PAGE, &[Span::new(2 * G1, PAGE)], Prot::RW)
        .unwrap();
    assert_eq!(lines(), 1);
    let mut gather = Gather::new();
    table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
    // 12 entries of the one table, from index 500; 8 of the other, and the one that led to it.
    assert_eq!(lines(), 2 + 1 + 1);
    table
        .unmap(
            Span::new(11 * PAGE, 10 * PAGE),
            &mut gather,
            &mut iopt::NoRuns,
        )
        .unwrap();
    // Two lines of the table, and the entry in each table above, since all become empty.
    assert_eq!(lines(), 2 + 3);
    table.reclaim(gather.never_walked());
}

/// A map that finds a new table of a concurrent map may not end before the unit can find that
/// table too.
#[test]
fn no_map_ends_below_a_link_that_is_not_flushed() {
    for levels_flushed in 0..4 {
        let machine = Machine::new();
        let table = Table::new(VtdSs::new(4).unwrap(), machine.tables()).unwrap();
        let root = table.root();
        let table: Arc<SharedTable<_, _>> = Arc::new(SharedTable::new(table));
        let other = Arc::clone(&table);
        let seen = Arc::new(Mutex::new(None));
        let result = Arc::clone(&seen);
        let handle = Arc::new(Mutex::new(None));
        let started = Arc::clone(&handle);
        // The tables of levels 0, 1 and 2 are completed, then the entry of the root. Before each:
        let act = move || {
            let second = thread::spawn(move || {
                other
                    .enter()
                    .map(5 * PAGE, &[Span::new(9 * G1, PAGE)], Prot::RW)
                    .unwrap();
                *result.lock().unwrap() = Some(machine.sees(root, 5 * PAGE));
            });
            *started.lock().unwrap() = Some(second);
            thread::sleep(Duration::from_millis(50));
        };
        let first = machine.completions.load(Ordering::Relaxed);
        *machine.meanwhile.lock().unwrap() = Some((first + levels_flushed, Box::new(act)));
        table
            .enter()
            .map(2 * PAGE, &[Span::new(7 * G1, PAGE)], Prot::RW)
            .unwrap();
        handle.lock().unwrap().take().unwrap().join().unwrap();
        assert_eq!(
            *seen.lock().unwrap(),
            Some(Some(9 * G1)),
            "{levels_flushed}"
        );
        assert_eq!(machine.sees(root, 2 * PAGE), Some(7 * G1));
    }
}

/// In the shared form tables that became empty are unlinked where the operation owns what they span.
#[test]
fn what_is_pruned_is_out_of_the_unit_s_reach_before_the_flush() {
    let machine = Machine::new();
    let table = Table::new(VtdSs::new(4).unwrap(), machine.tables()).unwrap();
    let root = table.root().address;
    let table: SharedTable<_, _> = SharedTable::new(table);
    let reach = || {
        let mut tables = BTreeSet::new();
        machine.reach::<VtdSs>(root, 3, &mut tables);
        tables.len()
    };
    table
        .enter()
        .map(5 * PAGE, &[Span::new(G1, 3 * PAGE)], Prot::RW)
        .unwrap();
    assert_eq!(reach(), 4);
    let mut gather = Gather::new();
    table
        .owning(Span::new(0, 1 << 48))
        .unmap(
            Span::new(5 * PAGE, 3 * PAGE),
            &mut gather,
            &mut iopt::NoRuns,
        )
        .unwrap();
    assert_eq!((reach(), gather.tables()), (1, 3));
    table.reclaim(gather.never_walked());
}
