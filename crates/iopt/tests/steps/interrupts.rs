//! Operations of the shared form that are interrupted at a store, by a handler that does another one beside
//! them on the same processor: it must find what it needs, and not wait for the operation that it stopped.

use std::cell::Cell as Plain;
use std::collections::BTreeSet;
use std::rc::Rc;

use iopt::{
    Arena, Cell, Format, Gather, Interruption, Invalidation, Prot, SharedTable, Table,
    TableOps as _,
};
use runs::{Iova, PageSizes, Span};

use super::memory::{Memory, Tables, with_stop};
use super::{Place, place};

type Shared<F, C, const LOG2: u32> = SharedTable<F, &'static Arena<Memory<C>, LOG2>>;

/// An operation on a number of pages from a page on.
#[derive(Clone, Copy)]
enum Op {
    Map(u64, u64),
    /// The pages to remove, and those that the operation owns.
    Unmap((u64, u64), (u64, u64)),
    Split(u64, u64),
    Merge(u64, u64),
    Protect(u64, u64),
}
use Op::{Map, Merge, Protect, Split, Unmap};

struct World<F: Format, C: Cell + 'static, const LOG2: u32> {
    table: &'static Shared<F, C, LOG2>,
    place: Place,
}

impl<F: Format, C: Cell + Default + 'static, const LOG2: u32> World<F, C, LOG2> {
    fn span(&self, page: u64, pages: u64) -> Span<Iova> {
        Span::new(
            self.place.base + page * self.place.page,
            pages * self.place.page,
        )
    }

    fn apply(&self, op: Op) {
        let (table, mut gather) = (self.table, Gather::new());
        let (flush, allowed) = (|_: &Invalidation| Ok::<_, ()>(()), Interruption::Allowed);
        match op {
            Map(page, pages) => {
                let at = self.span(page, pages);
                let run = Span::new(self.place.pa + page * self.place.page, at.len);
                table.enter().map(at.start, &[run], Prot::RW).unwrap();
            }
            Unmap((page, pages), (first, owned)) => {
                let mut inside = table.owning(self.span(first, owned));
                let range = self.span(page, pages);
                inside.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
            }
            Split(page, pages) => {
                let (range, size) = (self.span(page, pages), self.place.page);
                table
                    .enter()
                    .split(range, size, allowed, &mut gather, flush)
                    .unwrap();
            }
            Merge(page, pages) => {
                let range = self.span(page, pages);
                table
                    .enter()
                    .merge(range, allowed, &mut gather, flush)
                    .unwrap();
            }
            Protect(page, pages) => {
                let range = self.span(page, pages);
                table
                    .enter()
                    .protect(range, Prot::READ, &mut gather)
                    .unwrap();
            }
        }
        table.reclaim(gather.never_walked());
    }

    /// Does `op`, with `handler` before its `nth` store, or after that; false where it has fewer.
    fn interrupt(&'static self, op: Op, handler: Op, nth: u64) -> bool {
        let stores = Rc::new(Plain::new(0));
        let counted = Rc::clone(&stores);
        let stop = move |_| {
            if counted.replace(counted.get() + 1) == nth {
                self.apply(handler);
            }
        };
        with_stop(stop, || self.apply(op));
        stores.get() > nth
    }
}

/// Mapped pages, beginning with none.
fn mapped(ops: &[Op]) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    for op in ops {
        match *op {
            Map(page, count) => pages.extend(page..page + count),
            Unmap((page, count), _) => pages.retain(|n| !(page..page + count).contains(n)),
            Split(..) | Merge(..) | Protect(..) => {}
        }
    }
    pages
}

pub(crate) fn at_every_store<F: Format, C: Cell + Default + 'static, const LOG2: u32>(
    format: F,
    sizes: PageSizes,
) {
    let place = place(&format);
    // Pages of one lowest table, and of the next.
    let (n, b) = (place.block / place.page, place.block / place.page);
    let tables = Tables::<C, LOG2>::new(64, 1 << (format.output_bits() - 1).min(46));
    let table = Table::with_page_sizes(format, &tables.0, sizes).unwrap();
    let table: &'static Shared<F, C, LOG2> = Box::leak(Box::new(SharedTable::new(table)));
    let all = format.aperture().spans().next().unwrap();
    let world: &'static World<F, C, LOG2> = Box::leak(Box::new(World { table, place }));
    let used = tables.0.in_use();
    let cases: [(&[Op], Op, Op); 10] = [
        // Both find the same tables missing.
        (&[], Map(3, 5), Map(8, 2)),
        (&[], Map(b - 3, 6), Map(b + 5, 3)),
        (&[], Map(0, 2 * n + 3), Map(2 * n + 3, 1)),
        (&[Map(8, 2)], Map(3, 5), Unmap((8, 2), (8, 2))),
        (&[Map(3, 5)], Unmap((3, 5), (0, 8)), Map(8, 2)),
        (&[Map(3, 7)], Unmap((3, 5), (3, 5)), Unmap((8, 2), (8, 2))),
        // A table goes whole, beside one that comes.
        (&[Map(3, 5)], Unmap((3, 5), (0, b)), Map(b, 2)),
        (&[Map(0, n), Map(n, 5)], Split(0, n), Unmap((n, 5), (n, 5))),
        (&[Map(0, 1), Map(1, n - 1)], Merge(0, n), Map(n, 5)),
        (&[Map(3, 7)], Protect(3, 5), Unmap((8, 2), (8, 2))),
    ];
    for (before, op, handler) in cases {
        let expected = mapped(&[before, &[op, handler]].concat());
        let pages = 2 * n + 8;
        let mut nth = 0;
        loop {
            before.iter().for_each(|op| world.apply(*op));
            let interrupted = world.interrupt(op, handler, nth);
            if !interrupted {
                world.apply(handler);
            }
            for page in 0..pages {
                let found = table.enter().translate(world.span(page, 1).start);
                let there = world.place.pa + page * world.place.page;
                assert_eq!(
                    found,
                    expected.contains(&page).then_some(there),
                    "page {page}, store {nth}"
                );
            }
            let mut gather = Gather::new();
            table
                .enter()
                .unmap_mapped(all, &mut gather, &mut iopt::NoRuns)
                .unwrap();
            table.reclaim(gather.never_walked());
            table.poll();
            assert_eq!(tables.0.in_use(), used, "store {nth}");
            if !interrupted {
                break;
            }
            nth += 1;
        }
        assert!(nth > 0);
    }
}
