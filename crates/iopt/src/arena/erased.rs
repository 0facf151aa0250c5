//! Table memory whose type is erased.
//!
//! The engine is compiled for a format and a memory. Over this one it is compiled once for each format,
//! whatever memory a program has. Requests that come once for an operation, or once for a table, are
//! virtual calls; the entries and metas of an arena, which every step asks for, are not: the place
//! where they lie is taken out of the arena beforehand.

use alloc::sync::Arc;

use super::*;
use crate::any::AnyCell;
use crate::prot::Prot;
use runs::Run;

/// The table memory of an [`AnyTable`](crate::AnyTable), whatever its type.
#[derive(Debug)]
pub struct Erased<C> {
    /// Where tables lie, if `memory` leads to an arena.
    place: Option<Place<C>>,
    table_log2: u32,
    watches_runs: bool,
    memory: Arc<dyn DynMemory<C>>,
}

impl<C> Clone for Erased<C> {
    fn clone(&self) -> Self {
        Self {
            memory: Arc::clone(&self.memory),
            ..*self
        }
    }
}

impl<C: Cell> Erased<C> {
    pub(crate) fn new<M>(memory: M) -> Self
    where
        M: TableMemory<Cell: AnyCell<One = C>, Link = AtomicU64, Count = AtomicU32>
            + Send
            + Sync
            + 'static,
    {
        let (table_log2, watches_runs) = (M::TABLE_BYTES.trailing_zeros(), memory.watches_runs());
        let memory = Arc::new(memory);
        Self {
            // From here on there is no `&mut` to the memory and it does not move: what it lends by `&`
            // is lent until the last clone is dropped.
            place: memory
                .window()
                .filter(|window| window.table_log2 == table_log2)
                .and_then(|Window { place, .. }| {
                    let count = (place.mask as usize + 1) / C::BYTES;
                    let all = DynMemory::entries(&*memory, 0, count);
                    (all.len() == count).then(|| Place {
                        cells: NonNull::from(all).cast(),
                        metas: place.metas,
                        mask: place.mask,
                    })
                }),
            table_log2,
            watches_runs,
            memory,
        }
    }
}

/// The part of [`TableMemory`] that a table held by `&mut` uses.
trait DynMemory<C>: Send + Sync {
    fn entries(&self, table: u64, count: usize) -> &[C];
    fn meta(&self, table: u64) -> &AtomicMeta;
    fn last_address(&self) -> u64;
    fn reserve(&self, count: u64) -> Result<Reserve, NoTables>;
    fn allocate(&self, bytes: usize) -> Result<u64, NoTables>;
    fn give_back(&self, reserve: Reserve);
    fn reclaim(&self, chain: Chain);
    fn node(&self, table: u64) -> Option<u32>;
    fn written(&self, entries: &[C]);
    fn descended(&self);
    fn table_read(&self, table: u64);
    fn mapped(&self, run: Run, prot: Prot);
    fn unmapped(&self, run: Run);
}

impl<C> fmt::Debug for dyn DynMemory<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("table memory")
    }
}

/// Both directions of each call; those of the second list are not made for an arena, which has nothing
/// to do there.
macro_rules! calls {
    ({ $($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)* } { $($hook:ident($($about:ident: $kind:ty),*);)* }) => {
        impl<M> DynMemory<<M::Cell as AnyCell>::One> for M
        where
            M: TableMemory<Cell: AnyCell, Link = AtomicU64, Count = AtomicU32> + Send + Sync,
        {
            fn entries(&self, table: u64, count: usize) -> &[<M::Cell as AnyCell>::One] {
                AnyCell::one(TableMemory::entries(self, table, count))
            }
            fn meta(&self, table: u64) -> &AtomicMeta {
                TableMemory::meta(self, table)
            }
            fn written(&self, entries: &[<M::Cell as AnyCell>::One]) {
                TableMemory::written(self, M::Cell::own(entries));
            }
            $(fn $name(&self, $($argument: $type),*) $(-> $result)? {
                TableMemory::$name(self, $($argument),*)
            })*
            $(fn $hook(&self, $($about: $kind),*) {
                TableMemory::$hook(self, $($about),*)
            })*
        }

        impl<C: Cell> TableMemory for Erased<C> {
            type Cell = C;
            type Link = AtomicU64;
            type Count = AtomicU32;
            /// The type does not say it: see `table_bytes`.
            const TABLE_BYTES: u64 = 0;
            const FLUSHES: bool = true;
            const WATCHES_RUNS: bool = true;

            #[inline(always)]
            fn table_bytes(&self) -> u64 {
                1 << self.table_log2
            }
            #[inline(always)]
            fn watches_runs(&self) -> bool {
                self.watches_runs
            }
            #[inline(always)]
            fn entries(&self, table: u64, count: usize) -> &[C] {
                match self.place {
                    // SAFETY: the place was lent by `memory`, which lives as long as `self` and is
                    // not changed but by `&`.
                    Some(place) => unsafe { place.entries(0, table, count) },
                    None => self.memory.entries(table, count),
                }
            }
            #[inline(always)]
            fn meta(&self, table: u64) -> &AtomicMeta {
                match self.place {
                    // SAFETY: as above.
                    Some(place) => unsafe { place.meta(self.table_log2, table) },
                    None => self.memory.meta(table),
                }
            }
            #[inline(always)]
            fn written(&self, entries: &[C]) {
                if self.place.is_none() {
                    self.memory.written(entries);
                }
            }
            $(fn $name(&self, $($argument: $type),*) $(-> $result)? {
                self.memory.$name($($argument),*)
            })*
            $(#[inline(always)]
            fn $hook(&self, $($about: $kind),*) {
                if self.place.is_none() {
                    self.memory.$hook($($about),*)
                }
            })*
        }
    };
}

calls! {
{
    last_address() -> u64;
    reserve(count: u64) -> Result<Reserve, NoTables>;
    allocate(bytes: usize) -> Result<u64, NoTables>;
    give_back(reserve: Reserve);
    reclaim(chain: Chain);
    node(table: u64) -> Option<u32>;
    mapped(run: Run, prot: Prot);
    unmapped(run: Run);
}
{
    descended();
    table_read(table: u64);
}
}
