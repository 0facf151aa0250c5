//! Tables whose cells call back just before each store.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use iopt::{Arena, AtomicMeta, Cell, Format, Storage};

/// Set in an entry that leads to a table: those lie from 2^46 on, which RISC-V shifts by two.
pub(crate) const TABLE: u64 = 1 << 46 | 1 << 44;

type Before = Box<dyn FnMut(&AtomicU64)>;

thread_local! {
    /// Called before each store, with the cell.
    static BEFORE: RefCell<Option<Before>> = const { RefCell::new(None) };
}

#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Watched(pub(crate) AtomicU64);

impl Watched {
    fn before(&self) {
        if let Some(mut before) = BEFORE.with(|slot| slot.borrow_mut().take()) {
            before(&self.0);
            BEFORE.with(|slot| *slot.borrow_mut() = Some(before));
        }
    }
}

impl Cell for Watched {
    const BYTES: usize = 8;

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    fn get_acquire(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
    fn set(&self, word: u64) {
        self.before();
        self.0.store(word, Ordering::Relaxed);
    }
    fn set_release(&self, word: u64) {
        self.before();
        self.0.store(word, Ordering::Release);
    }
    fn exchange(&self, word: u64) -> u64 {
        self.before();
        self.0.swap(word, Ordering::AcqRel)
    }
    fn set_if(&self, old: u64, new: u64) -> Result<(), u64> {
        self.before();
        self.0
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
    }
}

pub(crate) struct Memory {
    pub(crate) cells: Box<[Watched]>,
    metas: Box<[AtomicMeta]>,
}

// SAFETY: boxed slices stay where they are, and nothing else can reach them.
unsafe impl Storage for Memory {
    type Cell = Watched;

    fn cells(&self) -> &[Watched] {
        &self.cells
    }
    fn metas(&self) -> &[AtomicMeta] {
        &self.metas
    }
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            cells: (0..64 * 512).map(|_| Watched::default()).collect(),
            metas: (0..64).map(|_| AtomicMeta::default()).collect(),
        }
    }
}

pub(crate) fn memory() -> Arena<Memory> {
    Arena::new(Memory::new(), 1 << 46).unwrap()
}

/// Does `operation` with `before` called before each of its stores.
pub(crate) fn watched<T>(
    before: impl FnMut(&AtomicU64) + 'static,
    operation: impl FnOnce() -> T,
) -> T {
    BEFORE.with(|slot| *slot.borrow_mut() = Some(Box::new(before)));
    let result = operation();
    BEFORE.with(|slot| *slot.borrow_mut() = None);
    result
}

/// The words that are stored to.
pub(crate) fn stores<T>(operation: impl FnOnce() -> T) -> (T, Vec<u64>) {
    let words = std::rc::Rc::new(RefCell::new(Vec::new()));
    let of = std::rc::Rc::clone(&words);
    let result = watched(
        move |cell| of.borrow_mut().push(cell.load(Ordering::Relaxed)),
        operation,
    );
    let words = words.borrow().clone();
    (result, words)
}

/// Hardware at the worst moment: it writes to the page just before the engine stores.
pub(crate) fn hardware<F: Format>(cell: &AtomicU64) {
    let word = cell.load(Ordering::Relaxed);
    let leaf =
        (0..4).any(|level| matches!(F::decode(level, word), iopt::format::Entry::Leaf { .. }));
    if leaf && word & TABLE == 0 {
        cell.store(F::dirtied(word) | F::ACCESSED, Ordering::Relaxed);
    }
}

/// The formats that keep dirty state, with leaves of every kind.
macro_rules! each_format {
    ($f:ident($($arg:expr),*)) => {
        $f(iopt::format::VtdSs::new(4).unwrap(), $($arg),*);
        $f(iopt::format::X86_64::new(4).unwrap(), $($arg),*);
        $f(iopt::format::AmdV1::new(4).unwrap(), $($arg),*);
        $f(iopt::format::RiscV::new(4).unwrap().with_hardware_updates(true), $($arg),*);
        let options = iopt::format::ArmOptions { dirty: true, ..iopt::format::ArmOptions::default() };
        $f(iopt::format::ArmStage1::<iopt::format::K4>::new(48, 48).unwrap().with_options(options), $($arg),*);
        $f(iopt::format::ArmStage2::<iopt::format::K4>::new(40, 48).unwrap().with_options(options), $($arg),*);
    };
}
