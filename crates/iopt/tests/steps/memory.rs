//! Table memory that stops an operation after each of its stores.

use std::cell::RefCell;

use iopt::walk::{BadAddress, WalkMemory};
use iopt::{Arena, AtomicMeta, Cell, Storage};

/// Is told whether the store is still to come.
type Stop = Box<dyn FnMut(When)>;

/// When an operation is stopped.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum When {
    /// Before a store: what hardware does now comes after all that was read.
    Before,
    After,
}

thread_local! {
    static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) };
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

fn at_store(when: When) {
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
        at_store(When::Before);
        self.0.set(word);
        at_store(When::After);
    }
    fn set_release(&self, word: u64) {
        at_store(When::Before);
        self.0.set_release(word);
        at_store(When::After);
    }
    fn exchange(&self, word: u64) -> u64 {
        at_store(When::Before);
        let old = self.0.exchange(word);
        at_store(When::After);
        old
    }
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        at_store(When::Before);
        let result = self.0.set_if(old, new);
        at_store(When::After);
        result
    }
}

pub(crate) struct Memory<C> {
    cells: Box<[Stepped<C>]>,
    metas: Box<[AtomicMeta]>,
}

// SAFETY: boxed slices stay where they are, and nobody else can reach them.
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
        Box::leak(Box::new(Self(<Arena<_, LOG2>>::new(memory, base).unwrap())))
    }
}

impl<C: Cell, const LOG2: u32> WalkMemory for Tables<C, LOG2> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        self.0.read_u64(address)
    }
    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
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
