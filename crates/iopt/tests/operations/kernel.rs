//! A kernel's tables: a root that the caller keeps, and a `Table` for each call.

use std::cell::{Cell as StdCell, RefCell};

use iopt::format::{AmdV1, ArmStage1, K4, RiscV, VtdSs, X86_64};
use iopt::{
    BuildError, Cell, Chain, Format, Gather, HeapTables, Meta, NoRuns, NoTables, Prot, Reserve,
    Table, TableMapError, TableMemory, TableOps as _,
};
use runs::{Iova, Span};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const PA: u64 = 9 << 30;

/// Gives zeroed tables, at most so many in all, and notes the links that maps have followed.
struct Kernel {
    tables: HeapTables,
    left: StdCell<u64>,
    followed: RefCell<Vec<u64>>,
}

impl Kernel {
    fn new() -> Self {
        Self {
            tables: HeapTables::with_tables(64).unwrap(),
            left: StdCell::new(u64::MAX),
            followed: RefCell::default(),
        }
    }

    /// Table on which an operation of a kernel begins.
    fn table<F: Format>(&self, format: F, root: u64) -> Table<F, &Self> {
        let sizes = F::page_sizes(format.levels());
        Table::at_root(format, self, root, sizes)
    }

    fn give_back(&self, chain: Chain) {
        self.tables.reclaim(chain);
    }

    fn free(&self, gather: Gather) {
        self.give_back(gather.never_walked().into_tables());
    }
}

impl TableMemory for Kernel {
    type Cell = <HeapTables as TableMemory>::Cell;
    type Link = <HeapTables as TableMemory>::Link;
    type Count = <HeapTables as TableMemory>::Count;
    const TABLE_BYTES: u64 = 4096;
    const FLUSHES: bool = true;

    fn entries(&self, table: u64, count: usize) -> &[Self::Cell] {
        self.tables.entries(table, count)
    }
    fn meta(&self, table: u64) -> &Meta<Self::Link, Self::Count> {
        self.tables.meta(table)
    }
    fn last_address(&self) -> u64 {
        self.tables.last_address()
    }
    fn reserve(&self, count: u64) -> Result<Reserve, NoTables> {
        let left = self.left.get();
        let had = left.checked_sub(count).ok_or(NoTables {
            needed: count,
            available: left,
        })?;
        self.left.set(had);
        let mut chain = Chain::empty();
        let mut reserve = self.tables.reserve(count)?;
        while let Some((table, _)) = reserve.take(&self.tables) {
            // Leftovers of earlier use would stay where the engine takes the table for zeroed.
            self.entries(table, 512).iter().for_each(|cell| cell.set(0));
            chain.push(self, table);
        }
        Ok(Reserve::of_zeroed(chain))
    }
    fn allocate(&self, bytes: usize) -> Result<u64, NoTables> {
        self.tables.allocate(bytes)
    }
    fn give_back(&self, reserve: Reserve) {
        self.tables.give_back(reserve);
    }
    fn reclaim(&self, chain: Chain) {
        self.tables.reclaim(chain);
    }
    fn followed(&self, cell: &Self::Cell) {
        self.followed.borrow_mut().push(cell.get());
    }
}

/// Each call finds the maps of the one before at the same root, whatever the format.
fn calls_share_a_root<F: Format>(format: F) {
    let kernel = Kernel::new();
    let root = kernel.allocate(4096).unwrap();
    let bits = format.leaf_bits(Prot::RW).unwrap();
    let run = Span::new(PA, M2 + 8 * PAGE);
    let map = kernel.table(format, root);
    map.unguarded().map_leaves(M2, &[run], bits).unwrap();
    let name = format.id();

    let again = kernel.table(format, root);
    let taken = again.unguarded().map_leaves(M2, &[run], bits);
    assert!(
        matches!(taken, Err(TableMapError::Overlap { .. })),
        "{name}: {taken:?}"
    );
    let found = again.unguarded().translate(2 * M2 + 5);
    assert_eq!(found, Some(PA + M2 + 5), "{name}");
    assert_eq!(again.leaf_at(M2).unwrap().prot, Prot::RW, "{name}");

    let unmap = kernel.table(format, root);
    let mut gather = Gather::new();
    let range = Span::new(M2, run.len);
    let unmapped = unmap.unguarded().unmap(range, &mut gather, &mut NoRuns);
    unmapped.unwrap();
    // Only tables that the range covers whole are unlinked: none.
    assert_eq!(gather.tables(), 0, "{name}");
    kernel.free(gather);
    let (gather, _) = kernel.table(format, root).tear_down();
    kernel.free(gather);
    assert_eq!(kernel.tables.in_use(), 0, "{name}");
}

#[test]
fn a_root_outlives_the_tables_of_its_calls() {
    calls_share_a_root(VtdSs::default());
    calls_share_a_root(<AmdV1>::default());
    calls_share_a_root(<X86_64>::default());
    calls_share_a_root(RiscV::default());
    calls_share_a_root(ArmStage1::<K4>::new(48, 48).unwrap());
}

#[test]
fn leaves_say_what_the_kernel_wants() {
    let kernel = Kernel::new();
    let root = kernel.allocate(4096).unwrap();
    let table = kernel.table(<X86_64>::default(), root);
    // Accessed and dirty from the beginning.
    let bits = table.format().leaf_bits(Prot::RW).unwrap() | 0x60;
    table
        .unguarded()
        .map_leaves(0, &[Span::new(PA, PAGE)], bits)
        .unwrap();
    let mut leaf = 0;
    table.for_each_table(&mut |address, level| {
        if level == 0 {
            leaf = kernel.entries(address, 512)[0].get();
        }
    });
    assert_eq!(leaf, PA | bits);
}

#[test]
fn a_large_leaf_takes_the_place_of_an_empty_table() {
    let kernel = Kernel::new();
    let format = VtdSs::default();
    let root = kernel.allocate(4096).unwrap();
    let bits = format.leaf_bits(Prot::RW).unwrap();
    let table = kernel.table(format, root);
    let mut inside = table.unguarded();
    inside.map_leaves(M2, &[Span::new(PA, PAGE)], bits).unwrap();
    let mut gather = Gather::new();
    inside
        .unmap(Span::new(M2, PAGE), &mut gather, &mut NoRuns)
        .unwrap();
    let large = [Span::new(PA, 2 * M2)];
    inside
        .map_leaves_anew(M2, &large, bits, &mut gather)
        .unwrap();
    assert_eq!(gather.tables(), 1);
    kernel.free(gather);
    assert_eq!(table.leaf_at(M2).unwrap().run.len, M2);
    // Leaves in use are in the way as ever, and no table gives way.
    let mut gather = Gather::new();
    let taken = inside.map_leaves_anew(2 * M2, &large, bits, &mut gather);
    assert!(matches!(taken, Err(TableMapError::Overlap { .. })));
    assert!(gather.is_empty());
    kernel.free(gather);
}

#[test]
fn what_was_written_to_is_told_once() {
    let kernel = Kernel::new();
    let format = VtdSs::default();
    let root = kernel.allocate(4096).unwrap();
    let bits = format.leaf_bits(Prot::RW).unwrap();
    let table = kernel.table(format, root);
    let mut inside = table.unguarded();
    let all = Span::<Iova>::new(0, 2 * M2);
    inside
        .map_leaves(0, &[Span::new(PA + PAGE, M2), Span::new(PA, M2)], bits)
        .unwrap();
    table.set_dirty(Span::new(3 * PAGE, 2 * PAGE)).unwrap();
    table.set_dirty(Span::new(M2, M2)).unwrap();
    let mut take = |range| {
        let mut told = Vec::new();
        inside
            .take_dirty(range, |leaves| told.push(leaves))
            .unwrap();
        told
    };
    // A leaf that the range only begins or ends in counts whole.
    let within = Span::new(4 * PAGE, M2);
    assert_eq!(take(within), [Span::new(4 * PAGE, PAGE), Span::new(M2, M2)]);
    assert_eq!(take(all), [Span::new(3 * PAGE, PAGE)]);
    assert_eq!(take(all), []);
}

#[test]
fn a_higher_root_leads_to_what_is_mapped_meanwhile() {
    let kernel = Kernel::new();
    let [low, high] = [3, 5].map(|levels| AmdV1::new(levels).unwrap());
    let bits = low.leaf_bits(Prot::RW).unwrap();
    let root = kernel.allocate(4096).unwrap();
    let table = kernel.table(low, root);
    let (raised, added) = table.raised(5).unwrap();
    assert_eq!(added.len(), 2);
    // Not published yet: another operation maps below the old root.
    table
        .unguarded()
        .map_leaves(M2, &[Span::new(PA, PAGE)], bits)
        .unwrap();
    let above = kernel.table(high, raised);
    assert_eq!(above.translate(M2 + 7), Some(PA + 7));
    above
        .unguarded()
        .map_leaves(1 << 50, &[Span::new(PA, PAGE)], bits)
        .unwrap();
    assert_eq!(above.translate(1 << 50), Some(PA));
    let lower = table.raised(3).unwrap_err();
    assert!(
        matches!(lower, BuildError::Levels { levels: 3, .. }),
        "{lower}"
    );
    // One that another was quicker than is given back.
    let (_, unused) = table.raised(4).unwrap();
    kernel.give_back(unused);
    let (gather, _) = above.tear_down();
    kernel.free(gather);
    assert_eq!(kernel.tables.in_use(), 0);
}

#[test]
fn without_tables_nothing_is_stored_and_none_is_lost() {
    let kernel = Kernel::new();
    let format = VtdSs::default();
    let root = kernel.allocate(4096).unwrap();
    let bits = format.leaf_bits(Prot::RW).unwrap();
    for left in 0..3 {
        kernel.left.set(left);
        let refused =
            kernel
                .table(format, root)
                .unguarded()
                .map_leaves(0, &[Span::new(PA, PAGE)], bits);
        assert!(matches!(refused, Err(TableMapError::NoTables(_))), "{left}");
        assert_eq!(kernel.tables.in_use(), 1);
    }
    kernel.left.set(3);
    let table = kernel.table(format, root);
    let mut inside = table.unguarded();
    inside.map_leaves(0, &[Span::new(PA, PAGE)], bits).unwrap();
    // A zeroed table gets stores for mapped entries only, and the rest is empty.
    assert_eq!(table.leaves(Span::new(0, M2)).count(), 1);
    kernel.followed.borrow_mut().clear();
    inside
        .map_leaves(PAGE, &[Span::new(PA, PAGE)], bits)
        .unwrap();
    assert_eq!(kernel.followed.borrow().len(), 3, "every link on the way");
}
