//! A table memory that breaks its contract is named, by whatever operation meets it, in every build.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use iopt::format::{AmdV1, ArmOptions, ArmStage1, BreakBeforeMake, K4, VtdSs};
use iopt::{
    AtomicMeta, BrokenPlan, BuildError, Chain, DirtyError, Format, Gather, HeapTables,
    Interruption, NoRuns, NoTables, Pending, Prot, ProtectError, Reserve, ResizeError, SharedTable,
    Table, TableMapError, TableMemory, TableOps as _, TableUnmapError, WithDirty,
};
use runs::Span;

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;

/// How the contract is broken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Breach {
    /// A reserve has a table less than it said.
    Reserve,
    /// No entry of a table can be had.
    NoEntries,
    /// Half of the entries of a table can be had.
    HalfOfThem,
    /// Entries of another table come, all of them empty.
    OtherEntries,
}

/// Breaks its contract at the `n`-th call that can.
struct Breaking {
    tables: HeapTables,
    other: HeapTables,
    breach: Cell<Option<Breach>>,
    /// Calls until then.
    left: Cell<u64>,
    /// It did.
    broke: Cell<bool>,
    /// Tables that were set aside and not said to be.
    kept: RefCell<Chain>,
}

impl Breaking {
    fn new() -> Self {
        Self {
            tables: HeapTables::with_tables(32).unwrap(),
            other: HeapTables::with_tables(1).unwrap(),
            breach: Cell::new(None),
            left: Cell::new(0),
            broke: Cell::new(false),
            kept: RefCell::new(Chain::empty()),
        }
    }

    fn arm(&self, breach: Breach, n: u64) {
        self.breach.set(Some(breach));
        self.left.set(n);
        self.broke.set(false);
    }

    fn disarm(&self) -> bool {
        self.breach.set(None);
        self.broke.get()
    }

    fn now(&self, breaches: &[Breach]) -> bool {
        if !self
            .breach
            .get()
            .is_some_and(|breach| breaches.contains(&breach))
        {
            return false;
        }
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        if left == 0 && !self.broke.replace(true) {
            return true;
        }
        false
    }
}

impl TableMemory for Breaking {
    type Cell = <HeapTables as TableMemory>::Cell;
    type Link = <HeapTables as TableMemory>::Link;
    type Count = <HeapTables as TableMemory>::Count;
    const TABLE_BYTES: u64 = HeapTables::TABLE_BYTES;

    fn entries(&self, table: u64, count: usize) -> &[Self::Cell] {
        let cells = self.tables.entries(table, count);
        if self.now(&[Breach::NoEntries, Breach::HalfOfThem, Breach::OtherEntries]) {
            return match self.breach.get() {
                Some(Breach::HalfOfThem) => &cells[..count / 2],
                Some(Breach::OtherEntries) => self.other.entries(self.other.base(), count),
                _ => &[],
            };
        }
        cells
    }
    fn meta(&self, table: u64) -> &AtomicMeta {
        self.tables.meta(table)
    }
    fn last_address(&self) -> u64 {
        self.tables.last_address()
    }
    fn reserve(&self, count: u64) -> Result<Reserve, NoTables> {
        let mut reserve = self.tables.reserve(count)?;
        if count > 0 && self.now(&[Breach::Reserve]) {
            let (table, _) = reserve.take(&self.tables).unwrap();
            self.kept.borrow_mut().push(&self.tables, table);
        }
        Ok(reserve)
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
}

/// Cause in the memory, for every error.
trait Named {
    fn named(self) -> Option<BrokenPlan>;
}

macro_rules! named {
    ($($error:ty: $broken:path),*) => {$(
        impl Named for $error {
            fn named(self) -> Option<BrokenPlan> {
                match self {
                    $broken(cause) => Some(cause),
                    _ => None,
                }
            }
        }
    )*};
}
named!(
    BuildError: BuildError::Broken, TableMapError: TableMapError::Broken, TableUnmapError: TableUnmapError::Broken,
    ProtectError: ProtectError::Broken, DirtyError: DirtyError::Broken, ResizeError<()>: ResizeError::Broken
);

fn result<T, E: Named>(result: Result<T, E>) -> Result<(), Option<BrokenPlan>> {
    result.map(drop).map_err(Named::named)
}

/// Address of the mapping before each operation.
const WHERE: u64 = 4 * G1 + M2 - 4 * PAGE;

type Outcome = Result<(), Option<BrokenPlan>>;
type Operation<F, T> = (
    &'static str,
    fn(&mut T, &mut Gather) -> Outcome,
    std::marker::PhantomData<F>,
);

fn flush(_: &iopt::Invalidation) -> Result<(), ()> {
    Ok(())
}

/// Ways to the operations of a table.
macro_rules! by_mut {
    ($table:ident) => {
        $table
    };
}

macro_rules! by_guard {
    ($table:ident) => {
        $table.enter()
    };
}

/// The operations by either way: a range over two leaf tables of pages, and a large leaf behind it.
macro_rules! operations {
    ($way:ident, $table:ty, $F:ty, $($more:expr),*) => {{
        let operations: Vec<Operation<$F, $table>> = vec![
            ("map", |table, _| {
                let runs = [Span::new(G1 + PAGE, 3 * PAGE), Span::new(2 * G1, M2 + PAGE)];
                result($way!(table).map(8 * G1 + M2 - PAGE, &runs, Prot::RW))
            }, std::marker::PhantomData),
            ("map of one run in one table", |table, _| {
                result($way!(table).map(WHERE - 20 * PAGE, &[Span::new(G1 + PAGE, 3 * PAGE)], Prot::RW))
            }, std::marker::PhantomData),
            ("map_anew", |table, gather| {
                result($way!(table).map_anew(8 * G1, &[Span::new(2 * G1, 2 * M2)], Prot::RW, gather))
            }, std::marker::PhantomData),
            ("unmap", |table, gather| {
                result($way!(table).unmap(Span::new(WHERE, 8 * PAGE), gather, &mut NoRuns))
            }, std::marker::PhantomData),
            ("unmap_mapped", |table, gather| {
                result($way!(table).unmap_mapped(Span::new(4 * G1, G1), gather, &mut NoRuns))
            }, std::marker::PhantomData),
            ("protect", |table, gather| {
                result($way!(table).protect(Span::new(WHERE, 8 * PAGE), Prot::READ, gather))
            }, std::marker::PhantomData),
            ("split", |table, gather| {
                let range = Span::new(5 * G1, M2);
                result($way!(table).split(range, PAGE, Interruption::Allowed, gather, flush))
            }, std::marker::PhantomData),
            ("cut", |table, gather| {
                result($way!(table).cut(5 * G1 + 9 * PAGE, Interruption::Allowed, gather, flush))
            }, std::marker::PhantomData),
            ("merge", |table, gather| {
                let range = Span::new(6 * G1, M2);
                result($way!(table).merge(range, Interruption::Allowed, gather, flush))
            }, std::marker::PhantomData),
            ("unmap_cutting", |table, gather| {
                let (range, sink) = (Span::new(5 * G1 + PAGE, PAGE), &mut NoRuns);
                let done = $way!(table).unmap_cutting(range, Interruption::Allowed, gather, sink, flush);
                match done {
                    Err(ResizeError::Unmap(cause)) => Err(cause.named()),
                    other => result(other),
                }
            }, std::marker::PhantomData),
            ("harvest", |table, gather| {
                if table.track_dirty(true).is_err() {
                    return Ok(());
                }
                let range = Span::new(WHERE, 8 * PAGE);
                let mut pending = Pending::new([0; 1], range, PAGE).unwrap();
                    let sink = &mut WithDirty(|_, _| ());
                    let done = result($way!(table).harvest(range, &mut pending))
                        .and_then(|()| result($way!(table).unmap(range, gather, sink)));
                    table.track_dirty(false).unwrap();
                    done
            }, std::marker::PhantomData),
            $($more),*
        ];
        operations
    }};
}

#[allow(
    clippy::arc_with_non_send_sync,
    reason = "table memory is shared by `Arc`; all of it happens in one thread"
)]
/// Each operation, with a memory that breaks its contract in each way at each call in turn, until
/// there is no such call any more.
fn check<F: Format, T>(
    format: F,
    operations: &[Operation<F, T>],
    share: impl Fn(Table<F, Arc<Breaking>>) -> T,
    intact: impl Fn(&T) -> Result<(), BrokenPlan>,
    tear_down: impl Fn(T),
) -> u64 {
    let mut seen = 0;
    for (name, operation, _) in operations {
        for breach in [Breach::Reserve, Breach::NoEntries, Breach::HalfOfThem] {
            for n in 0.. {
                let memory = Arc::new(Breaking::new());
                let mut table = Table::new(format, Arc::clone(&memory)).unwrap();
                for (iova, run) in [
                    (WHERE, Span::new(G1 + PAGE, 8 * PAGE)),
                    (5 * G1, Span::new(2 * G1, M2)),
                    (6 * G1, Span::new(4 * G1, M2 / 2)),
                    (6 * G1 + M2 / 2, Span::new(4 * G1 + M2 / 2, M2 / 2)),
                ] {
                    table.map(iova, &[run], Prot::RW).unwrap();
                }
                let mut table = share(table);
                let mut gather = Gather::new();
                memory.arm(breach, n);
                let outcome = operation(&mut table, &mut gather);
                let broke = memory.disarm();
                assert!(broke || outcome == Ok(()), "{name}: {outcome:?}");
                if !broke {
                    break;
                }
                seen += 1;
                match outcome {
                    Err(Some(BrokenPlan::Reserve { wanted, given })) => {
                        assert_eq!((breach, given + 1), (Breach::Reserve, wanted), "{name}");
                        // Nothing was changed: the same is done now.
                        assert_eq!(intact(&table), Ok(()));
                        let again = operation(&mut table, &mut gather);
                        assert_eq!(again, Ok(()), "{name}, {breach:?} at {n}, again");
                    }
                    Err(Some(cause @ BrokenPlan::Entries { address, level })) => {
                        assert_ne!(breach, Breach::Reserve);
                        assert!(address <= memory.last_address() && level < 4, "{cause}");
                        assert_eq!(intact(&table), Err(cause));
                        // Every operation reports it from now on, and leaves no claim that another one waits for.
                        for (other, operation, _) in operations {
                            let refused = operation(&mut table, &mut gather);
                            let dirty = *other == "harvest" && !format.keeps_dirty();
                            assert!(
                                dirty || refused == Err(Some(cause)),
                                "{name}, {n}, then {other}"
                            );
                        }
                    }
                    other => panic!("{name}, {breach:?} at {n}: {other:?}"),
                }
                let _ = gather.never_walked();
                tear_down(table);
            }
        }
    }
    seen
}

const IN_PLACE: ArmOptions = ArmOptions {
    dirty: true,
    break_before_make: BreakBeforeMake::NotNeeded,
    ..ArmOptions::PLAIN
};

fn both_forms<F: Format>(format: F) {
    type Exclusive<F> = Table<F, Arc<Breaking>>;
    type Shared<F> = SharedTable<F, Arc<Breaking>>;
    let exclusive = operations!(
        by_mut,
        Exclusive<F>,
        F,
        (
            "plan_map",
            |table, _| {
                let runs = [Span::new(G1 + PAGE, 3 * PAGE), Span::new(2 * G1, M2 + PAGE)];
                let planned = table.plan_map(8 * G1 + M2 - PAGE, &runs, Prot::RW, None);
                result(planned.and_then(iopt::Planned::fill))
            },
            std::marker::PhantomData
        ),
        (
            "give_back_empty_tables",
            |table, gather| result(table.give_back_empty_tables(Span::new(0, 16 * G1), gather)),
            std::marker::PhantomData
        )
    );
    let seen = check(
        format,
        &exclusive,
        |table| table,
        |table: &Exclusive<F>| table.intact(),
        |table| drop(table.tear_down()),
    );
    assert!(seen > 100, "{seen}");
    let shared = operations!(by_guard, Shared<F>, F,);
    let seen = check(
        format,
        &shared,
        SharedTable::new,
        |table: &Shared<F>| table.enter().intact(),
        |table| drop(table.into_inner().tear_down()),
    );
    assert!(seen > 100, "{seen}");
}

#[test]
fn a_memory_that_breaks_its_contract_at_any_call_is_named_by_every_operation() {
    both_forms(AmdV1::new(4).unwrap());
    both_forms(VtdSs::new(4).unwrap());
    both_forms(ArmStage1::<K4>::new(48, 48).unwrap().with_options(IN_PLACE));
    both_forms(ArmStage1::<K4>::new(48, 48).unwrap());
}

/// The engine cannot tell such a memory from a miscount of its own.
#[test]
fn a_table_that_is_another_than_was_planned_with_is_named_without_a_cause() {
    let mut seen = 0;
    for n in 0.. {
        let memory = Breaking::new();
        let mut table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
        // The request needs the tables of both, and no new one.
        for iova in [4 * G1, 4 * G1 + M2 + 100 * PAGE] {
            table.map(iova, &[Span::new(G1, PAGE)], Prot::RW).unwrap();
        }
        memory.arm(Breach::OtherEntries, n);
        let run = Span::new(2 * G1, 4 * PAGE);
        let outcome = result(table.map(4 * G1 + M2 - 2 * PAGE, &[run], Prot::RW));
        if !memory.disarm() {
            assert_eq!(outcome, Ok(()));
            break;
        }
        // The tables may also be found to be in order, with the request in the wrong one.
        if let Err(cause) = outcome {
            let Some(cause @ BrokenPlan::Mismatch { level: 1.., .. }) = cause else {
                panic!("{n}: {cause:?}");
            };
            assert!(cause.to_string().contains("or the engine has miscounted"));
            assert_eq!(table.intact(), Err(cause));
            seen += 1;
        }
        drop(table.tear_down());
    }
    assert!(seen > 0);
}

#[test]
fn a_memory_that_breaks_its_contract_while_a_table_grows_or_is_built_is_named() {
    let mut seen = 0;
    for shared in [false, true] {
        for breach in [Breach::Reserve, Breach::NoEntries, Breach::HalfOfThem] {
            for n in 0.. {
                let memory = Breaking::new();
                let mut table = Table::new(AmdV1::new(1).unwrap(), &memory).unwrap();
                table.map(0, &[Span::new(G1, PAGE)], Prot::RW).unwrap();
                let root = table.root();
                let mut gather = Gather::new();
                memory.arm(breach, n);
                let grown = if shared {
                    let shared = <SharedTable<_, _>>::new(table);
                    let grown = shared.grow(3, &mut gather);
                    memory.disarm();
                    table = shared.into_inner();
                    grown
                } else {
                    table.grow(3, &mut gather)
                };
                let _ = gather.never_walked();
                memory.disarm();
                if !memory.broke.get() {
                    assert_eq!(grown.unwrap().levels, 3);
                    break;
                }
                seen += 1;
                assert!(matches!(grown, Err(BuildError::Broken(_))), "{grown:?}");
                assert_eq!(table.root(), root);
                assert_eq!(table.translate(0), Some(G1));
            }
        }
    }
    assert!(seen >= 6, "{seen}");

    let memory = Breaking::new();
    memory.arm(Breach::NoEntries, 0);
    let refused = Table::new(VtdSs::new(4).unwrap(), &memory).map(drop);
    let level = 3;
    let address = memory.tables.base();
    assert_eq!(
        refused,
        Err(BuildError::Broken(BrokenPlan::Entries { address, level }))
    );
}
