//! Table memory that stops an operation after each of its stores.
//!
//! It notes which entries the walker reads: a store to any other entry changes nothing of what these
//! walks found, so that a look after it would find the same.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ptr;

use iopt::walk::{BadAddress, WalkMemory};
use iopt::{Arena, AtomicMeta, Cell, Storage, TableMemory};

type Stop = Box<dyn FnMut(When)>;

/// When an operation is stopped.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum When {
    /// Before a store: what hardware does now comes after all that was read.
    Before,
    /// After a store to an entry that the walker has `read`, or to another one.
    After { read: bool },
}

thread_local! {
    static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) };
    /// Where the entries lie that were read since [`read_anew`]. `None`: it may be any of them.
    static READ: RefCell<Option<HashSet<usize>>> = const { RefCell::new(None) };
}

/// Walks that come now find out anew which entries they depend on.
pub(crate) fn read_anew() {
    READ.with(|read| *read.borrow_mut() = Some(HashSet::new()));
}

/// Notes that the walker's input has changed by something other than a store.
pub(crate) fn any_entry_counts() {
    READ.with(|read| *read.borrow_mut() = None);
}

/// Runs `operation`, with `stop` before and after each of its stores.
pub(crate) fn with_stop<T>(stop: impl FnMut(When) + 'static, operation: impl FnOnce() -> T) -> T {
    STOP.with(|slot| *slot.borrow_mut() = Some(Box::new(stop)));
    let result = operation();
    STOP.with(|slot| *slot.borrow_mut() = None);
    result
}

/// A cell that stops at each store.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Stepped<C>(C);

fn at_store<C, T>(cell: &C, store: impl FnOnce(&C) -> T) -> T {
    stop(When::Before);
    let result = store(cell);
    let place = ptr::from_ref(cell).addr();
    let read = READ.with(|read| {
        read.borrow()
            .as_ref()
            .is_none_or(|read| read.contains(&place))
    });
    stop(When::After { read });
    result
}

fn stop(when: When) {
    // Taken out meanwhile, so that what the stop does itself is not stopped at.
    if let Some(mut stop) = STOP.with(|slot| slot.borrow_mut().take()) {
        stop(when);
        STOP.with(|slot| *slot.borrow_mut() = Some(stop));
    }
}

impl<C: Cell> Cell for Stepped<C> {
    const BYTES: usize = C::BYTES;

    fn get(&self) -> u64 {
        self.0.get()
    }
    fn get_acquire(&self) -> u64 {
        self.0.get_acquire()
    }
    fn set(&self, word: u64) {
        at_store(self, |cell| cell.0.set(word));
    }
    fn set_release(&self, word: u64) {
        at_store(self, |cell| cell.0.set_release(word));
    }
    fn exchange(&self, word: u64) -> u64 {
        at_store(self, |cell| cell.0.exchange(word))
    }
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        at_store(self, |cell| cell.0.set_if(old, new))
    }
}

pub(crate) struct Memory<C> {
    cells: Box<[Stepped<C>]>,
    metas: Box<[AtomicMeta]>,
}

// SAFETY: boxed slices stay where they are, and nothing else can reach them.
unsafe impl<C: Cell> Storage for Memory<C> {
    type Cell = Stepped<C>;

    fn cells(&self) -> &[Stepped<C>] {
        &self.cells
    }
    fn metas(&self) -> &[AtomicMeta] {
        &self.metas
    }
}

/// An arena whose cells stop, leaked so that the stop can look into it.
pub(crate) struct Tables<C: Cell, const LOG2: u32>(pub(crate) Arena<Memory<C>, LOG2>);

impl<C: Cell + Default, const LOG2: u32> Tables<C, LOG2> {
    pub(crate) fn new(tables: usize, base: u64) -> &'static Self {
        let cells = (tables << LOG2) / C::BYTES;
        let memory = Memory {
            cells: (0..cells).map(|_| Stepped::default()).collect(),
            metas: (0..tables).map(|_| AtomicMeta::default()).collect(),
        };
        Box::leak(Box::new(Self(
            <Arena<_, LOG2>>::with_table_size(memory, base).unwrap(),
        )))
    }
}

impl<C: Cell, const LOG2: u32> Tables<C, LOG2> {
    /// Notes that the entry at an address is read.
    fn note(&self, address: u64) {
        let cell = self.0.entries(address, 1).as_ptr();
        READ.with(|read| {
            if let Some(read) = &mut *read.borrow_mut() {
                read.insert(cell.addr());
            }
        });
    }
}

impl<C: Cell, const LOG2: u32> WalkMemory for Tables<C, LOG2> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        self.note(address);
        self.0.read_u64(address)
    }
    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        self.note(address);
        self.0.read_u32(address)
    }
    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        self.0.compare_exchange_u64(address, old, new)
    }
}
