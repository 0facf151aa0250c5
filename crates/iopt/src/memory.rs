//! The seam to the memory that holds the tables.
//!
//! The engine knows a table by its address, as the unit that walks it does. Table memory turns
//! that address into entries and into [`Meta`], both by arithmetic: there is no look-up structure
//! on the walk. `Meta` lies beside the hardware's page because not every format has bits to spare.
//!
//! The seam is a safe trait. It takes addresses as they stand in entries, and an implementation
//! reduces them to its own window, as the arena does by a mask. So no content of a table, whether it
//! is damaged, adopted from another process or written by a device, leads outside, and the engine
//! and the formats need no `unsafe`. The cost is one `and` per level.
//!
//! Functions that depend on the machine are here as well: waiting ([`wait`](TableMemory::wait)) and
//! spreading threads ([`place`](TableMemory::place)) have defaults that need no operating system.
//!
//! Tables change hands in chains, linked through their own `Meta`, so that reserving and giving
//! back need no memory of their own: an operation reserves the tables that it can need, takes them
//! from the [`Reserve`] without being able to fail, and gives back what is left; tables that were
//! unlinked travel in a [`Chain`] inside the gather until the flush is done.
//!
//! # Hooks
//!
//! The engine also tells the memory what it does: [`written`](TableMemory::written) for units that
//! read memory past the processor's caches, [`descended`](TableMemory::descended) and
//! [`table_read`](TableMemory::table_read) for counts, [`mapped`](TableMemory::mapped) and
//! [`unmapped`](TableMemory::unmapped) for checks. By default they are empty and cost nothing.
//! [`observe`](crate::observe) has an adapter for each, to be put around any table memory.

use runs::Run;

use crate::arena::Window;
use crate::cell::Cell;
use crate::error::NoTables;
use crate::prot::Prot;

/// Memory for tables.
///
/// An implementation decides where tables lie (a node, a direct map, an arena) and which addresses
/// they have. Every method is cheap arithmetic but [`reserve`](Self::reserve) and the ones that
/// give back.
pub trait TableMemory {
    /// One entry.
    type Cell: Cell;
    /// The 64-bit cell of [`Meta`].
    type Link: Cell + Default;
    /// The 32-bit cell of [`Meta`].
    type Count: Cell;

    /// Bytes of the tables that [`reserve`](Self::reserve) hands out, a power of two.
    const TABLE_BYTES: u64;

    /// [`TABLE_BYTES`](Self::TABLE_BYTES), where the type does not say it.
    #[doc(hidden)]
    #[inline(always)]
    fn table_bytes(&self) -> u64 {
        Self::TABLE_BYTES
    }

    /// Where all tables lie, if they lie in an arena: saves [`AnyTable`](crate::AnyTable) a call for
    /// each table that it reads. Only an arena has one; whatever passes all calls on to an arena may
    /// pass this one on, too.
    #[doc(hidden)]
    fn window(&self) -> Option<Window<'_, Self::Cell>> {
        None
    }

    /// The `count` entries of the table at `table`, both powers of two times the entry's size.
    ///
    /// The engine asks only for tables that this memory gave out. The answer is memory of this
    /// object, whatever the address: an implementation reduces it to its own window, so that
    /// damaged tables cannot lead outside.
    fn entries(&self, table: u64, count: usize) -> &[Self::Cell];

    /// Returns the engine's notes about the table at `table`.
    fn meta(&self, table: u64) -> &Meta<Self::Link, Self::Count>;

    /// The last address at which a table can lie.
    fn last_address(&self) -> u64;

    /// Sets `count` tables aside, or none.
    fn reserve(&self, count: u64) -> Result<Reserve, NoTables>;

    /// One table of `bytes` bytes, a power of two, aligned to its size: roots may be larger than
    /// other tables. Its content is zero. It comes back by [`reclaim`](Self::reclaim), as tables
    /// of [`TABLE_BYTES`](Self::TABLE_BYTES).
    fn allocate(&self, bytes: usize) -> Result<u64, NoTables>;

    /// Takes back what is left of a reserve.
    fn give_back(&self, reserve: Reserve);

    /// Takes back tables that no walk can reach any more.
    fn reclaim(&self, chain: Chain);

    /// The memory node on which the table at `table` lies, if that is known. Which one it is, is
    /// this memory's choice; [`Table::nodes`](crate::Table::nodes) reports it.
    fn node(&self, table: u64) -> Option<u32> {
        let _ = table;
        None
    }

    /// Called while waiting for another thread, with the number of times so far: a place to give
    /// the processor away.
    #[inline]
    fn wait(&self, round: u32) {
        let _ = round;
        core::hint::spin_loop();
    }

    /// A number that tends to differ between threads, so that they do not meet: by default, where
    /// the stack is. Stacks are megabytes apart in user space and some pages apart in kernels; an
    /// implementation that knows its processor says that instead.
    #[inline]
    fn place(&self) -> usize {
        let here = 0u8;
        let address = core::ptr::from_ref(&here).addr();
        (address >> 13) ^ (address >> 20)
    }

    /// True when [`written`](Self::written) does something that has to be done before others rely
    /// on the entries. A map of the shared form then does it for the links on its way, too: see
    /// [`SharedTable`](crate::SharedTable).
    const FLUSHES: bool = false;

    /// The entries, neighbours in one table, were stored. Called once for each stretch of them:
    ///
    /// * a new table as a whole, its empty entries too, after it was filled and before the store
    ///   that links it, so that it is complete for all that follow the link, in memory as well as
    ///   in the caches;
    /// * of a linked table, the entries that an operation stored, after the last of these stores
    ///   and before the operation ends. The tables that it unlinked are flushed, and so reused,
    ///   only after that.
    #[inline(always)]
    fn written(&self, entries: &[Self::Cell]) {
        let _ = entries;
    }

    /// A map goes on below the link in `cell`, which another operation may have stored a moment ago and not have come to
    /// [`written`](Self::written) for. Where tables have a bit for software, an implementation notes there that it has
    /// flushed the link. Where [`FLUSHES`](Self::FLUSHES) only.
    #[inline(always)]
    fn followed(&self, cell: &Self::Cell) {
        self.written(core::slice::from_ref(cell));
    }

    /// A pass went down from the root to where it works.
    #[inline(always)]
    fn descended(&self) {}

    /// A pass turned to the entries of the table at `table`.
    #[inline(always)]
    fn table_read(&self, table: u64) {
        let _ = table;
    }

    /// True when [`mapped`](Self::mapped) and [`unmapped`](Self::unmapped) are to be called.
    const WATCHES_RUNS: bool = false;

    /// [`WATCHES_RUNS`](Self::WATCHES_RUNS), where the type does not say it.
    #[doc(hidden)]
    #[inline(always)]
    fn watches_runs(&self) -> bool {
        Self::WATCHES_RUNS
    }

    /// The run is about to be mapped, with leaves that allow `prot`: nothing can refuse it any more,
    /// and nothing of it is stored yet. Where [`WATCHES_RUNS`](Self::WATCHES_RUNS) only.
    #[inline(always)]
    fn mapped(&self, run: Run, prot: Prot) {
        let _ = (run, prot);
    }

    /// The run is unmapped, as far as the tables go; the flush is still to come, and nothing
    /// is mapped in its place yet. Runs come piece by piece, in order. Where
    /// [`WATCHES_RUNS`](Self::WATCHES_RUNS) only.
    #[inline(always)]
    fn unmapped(&self, run: Run) {
        let _ = run;
    }
}

/// Bytes of a table in most formats.
pub const TABLE_BYTES: u64 = 4096;

/// Notes of the engine about one table, beside the hardware's page.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Meta<Link, Count> {
    /// The next table while this one is in a chain.
    pub(crate) next: Link,
    /// A note of the operation that holds the table in a chain. While it is linked, a hint: the entry that was in use when
    /// the table was last looked at whole.
    pub(crate) note: Count,
}

/// Tables set aside for one operation.
#[derive(Debug)]
#[must_use = "what is left of a reserve is lost unless it is given back"]
pub struct Reserve {
    /// Recycled tables, chained; their content is undefined but for the last ones, `zeroed` of them.
    pub(crate) head: u64,
    pub(crate) recycled: u64,
    pub(crate) zeroed: u64,
    /// Tables that were never used: their content is zero.
    pub(crate) next_fresh: u64,
    pub(crate) fresh: u64,
}

impl Reserve {
    /// No table.
    pub const fn empty() -> Self {
        Self {
            head: 0,
            recycled: 0,
            zeroed: 0,
            next_fresh: 0,
            fresh: 0,
        }
    }

    /// How many tables are left.
    pub const fn len(&self) -> u64 {
        self.recycled + self.fresh
    }

    /// True when none is left.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next table and whether it is known to be all zero. `None` when the reserve is used up.
    #[inline]
    pub fn take<M: TableMemory + ?Sized>(&mut self, memory: &M) -> Option<(u64, bool)> {
        if self.recycled > 0 {
            let table = self.head;
            self.head = memory.meta(table).next.get();
            let zeroed = self.recycled == self.zeroed;
            self.recycled -= 1;
            self.zeroed -= u64::from(zeroed);
            return Some((table, zeroed));
        }
        if self.fresh > 0 {
            let table = self.next_fresh;
            self.next_fresh += memory.table_bytes();
            self.fresh -= 1;
            return Some((table, true));
        }
        None
    }

    /// Puts back a table that was taken and never linked.
    pub(crate) fn put<M: TableMemory + ?Sized>(&mut self, memory: &M, table: u64) {
        memory.meta(table).next.set(self.head);
        self.head = table;
        self.recycled += 1;
    }

    /// The tables of a chain, whatever they hold.
    pub const fn new(chain: Chain) -> Self {
        Self {
            head: chain.head,
            recycled: chain.count,
            zeroed: 0,
            next_fresh: 0,
            fresh: 0,
        }
    }

    /// The tables of a chain, which are all zero.
    pub const fn of_zeroed(chain: Chain) -> Self {
        Self {
            zeroed: chain.count,
            ..Self::new(chain)
        }
    }
}

/// Tables on their way back, chained through their `Meta`.
#[derive(Debug)]
pub struct Chain {
    pub(crate) head: u64,
    pub(crate) tail: u64,
    pub(crate) count: u64,
}

impl Chain {
    /// No table.
    pub const fn empty() -> Self {
        Self {
            head: 0,
            tail: 0,
            count: 0,
        }
    }

    /// How many tables it holds.
    pub const fn len(&self) -> u64 {
        self.count
    }

    /// True when it holds none.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Puts `table` in front.
    #[inline]
    pub fn push<M: TableMemory + ?Sized>(&mut self, memory: &M, table: u64) {
        memory.meta(table).next.set(self.head);
        if self.count == 0 {
            self.tail = table;
        }
        self.head = table;
        self.count += 1;
    }

    /// Puts the tables of another chain in front.
    pub(crate) fn append<M: TableMemory + ?Sized>(&mut self, memory: &M, other: Self) {
        if other.is_empty() {
            return;
        }
        if self.is_empty() {
            self.tail = other.tail;
        } else {
            memory.meta(other.tail).next.set(self.head);
        }
        self.head = other.head;
        self.count += other.count;
    }

    /// Takes the table in front.
    pub fn pop<M: TableMemory + ?Sized>(&mut self, memory: &M) -> Option<u64> {
        self.count = self.count.checked_sub(1)?;
        let table = self.head;
        self.head = memory.meta(table).next.get();
        Some(table)
    }
}

/// Functions that an adapter passes on to the memory `$inner`: everything but the hooks.
macro_rules! pass_on {
    ($self:ident => $inner:expr) => {
        type Cell = M::Cell;
        type Link = M::Link;
        type Count = M::Count;
        const TABLE_BYTES: u64 = M::TABLE_BYTES;

        #[inline(always)]
        fn table_bytes(&$self) -> u64 {
            $inner.table_bytes()
        }
        #[inline(always)]
        fn entries(&$self, table: u64, count: usize) -> &[M::Cell] {
            $inner.entries(table, count)
        }
        #[inline(always)]
        fn meta(&$self, table: u64) -> &$crate::memory::Meta<M::Link, M::Count> {
            $inner.meta(table)
        }
        fn last_address(&$self) -> u64 {
            $inner.last_address()
        }
        fn reserve(&$self, count: u64) -> Result<$crate::memory::Reserve, $crate::error::NoTables> {
            $inner.reserve(count)
        }
        fn allocate(&$self, bytes: usize) -> Result<u64, $crate::error::NoTables> {
            $inner.allocate(bytes)
        }
        fn give_back(&$self, reserve: $crate::memory::Reserve) {
            $inner.give_back(reserve)
        }
        fn reclaim(&$self, chain: $crate::memory::Chain) {
            $inner.reclaim(chain)
        }
        fn node(&$self, table: u64) -> Option<u32> {
            $inner.node(table)
        }
        fn wait(&$self, round: u32) {
            $inner.wait(round)
        }
        #[inline]
        fn place(&$self) -> usize {
            $inner.place()
        }
    };
}

/// `written`, as the memory `$inner` has it.
macro_rules! pass_stores_on {
    ($self:ident => $inner:expr) => {
        const FLUSHES: bool = M::FLUSHES;

        #[inline(always)]
        fn written(&$self, entries: &[M::Cell]) {
            $inner.written(entries)
        }
        #[inline(always)]
        fn followed(&$self, cell: &M::Cell) {
            $inner.followed(cell)
        }
    };
}

/// `descended` and `table_read`, as the memory `$inner` has them.
macro_rules! pass_steps_on {
    ($self:ident => $inner:expr) => {
        #[inline(always)]
        fn descended(&$self) {
            $inner.descended()
        }
        #[inline(always)]
        fn table_read(&$self, table: u64) {
            $inner.table_read(table)
        }
    };
}

/// `mapped` and `unmapped`, as the memory `$inner` has them.
macro_rules! pass_runs_on {
    ($self:ident => $inner:expr) => {
        const WATCHES_RUNS: bool = M::WATCHES_RUNS;

        #[inline(always)]
        fn watches_runs(&$self) -> bool {
            $inner.watches_runs()
        }
        #[inline(always)]
        fn mapped(&$self, run: runs::Run, prot: $crate::prot::Prot) {
            $inner.mapped(run, prot)
        }
        #[inline(always)]
        fn unmapped(&$self, run: runs::Run) {
            $inner.unmapped(run)
        }
    };
}

pub(crate) use {pass_on, pass_runs_on, pass_steps_on, pass_stores_on};

macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<M: TableMemory + ?Sized> TableMemory for $pointer {
            pass_on!(self => (**self));
            pass_stores_on!(self => (**self));
            pass_steps_on!(self => (**self));
            pass_runs_on!(self => (**self));

            fn window(&self) -> Option<Window<'_, Self::Cell>> {
                (**self).window()
            }
        }
    )*};
}

forward!(&M);
#[cfg(feature = "alloc")]
forward!(alloc::sync::Arc<M>);
