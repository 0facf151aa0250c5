//! Tables that another process has left in memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use iopt::format::{ArmStage1, K4, RiscV, VtdSs};
use iopt::observe::{CacheLines, Checked, Domain, HeapRecord, NonCoherent};
use iopt::walk::{Access, Walker};
use iopt::{
    AdoptError, AnyTable, Arena, AtomicMeta, BuildError, DamageKind, Format, FormatId, Gather,
    HeapTables, Prot, Root, Table, TableMemory as _, TableOps as _, Takeover,
};
use runs::{PageSizes, Span};

const PAGE: u64 = 4096;
const G1: u64 = 1 << 30;
const BASE: u64 = 1 << 31;
const TABLES: usize = 64;

type Borrowed<'a> = Arena<(&'a [AtomicU64], &'a [AtomicMeta])>;

fn metas() -> Vec<AtomicMeta> {
    (0..TABLES).map(|_| AtomicMeta::default()).collect()
}

/// A stretch of memory with tables in it, as a process left it.
fn left_behind() -> (Vec<AtomicU64>, u64, u64) {
    let cells: Vec<AtomicU64> = (0..TABLES * 512).map(|_| AtomicU64::new(0)).collect();
    let metas = self::metas();
    let root = {
        let memory = Borrowed::new((&cells, &metas), BASE).unwrap();
        let mut table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
        table
            .map(5 * PAGE, &[Span::new(G1, 3 * PAGE)], Prot::RW)
            .unwrap();
        table
            .map(3 * G1, &[Span::new(8 * G1, 5 * PAGE)], Prot::RW)
            .unwrap();
        table.root().address
    };
    (cells, root, BASE)
}

#[test]
fn tables_that_are_no_tree_are_not_adopted() {
    let format = VtdSs::new(4).unwrap();
    let sizes = PageSizes::from_bits(u64::MAX);
    let (cells, root, base) = left_behind();
    let metas = self::metas();
    let mut takeover: Takeover<_> = Takeover::new((&cells[..], &metas[..]), base).unwrap();
    let slot = |n: u64| &cells[((root - base) / 8 + n) as usize];
    let first = slot(0).load(Ordering::Relaxed) & !0xfff;
    let mut kind = |word: u64| {
        slot(9).store(word, Ordering::Relaxed);
        match takeover.adopt(format, root, sizes) {
            Err(AdoptError::Damage(damage)) => {
                assert_eq!((damage.table, damage.level, damage.index), (root, 3, 9));
                assert_eq!(damage.word, word);
                damage.kind
            }
            other => panic!("{other:?}"),
        }
    };
    // A loop, a table that is shared, one elsewhere, one in the middle of a page, nonsense.
    assert_eq!(kind(root | 3), DamageKind::Shared { table: root });
    assert_eq!(kind(first | 3), DamageKind::Shared { table: first });
    assert_eq!(kind(0x5000 | 3), DamageKind::Foreign { table: 0x5000 });
    let beyond = base + ((TABLES as u64) << 12);
    assert_eq!(kind(beyond | 3), DamageKind::Foreign { table: beyond });
    assert_eq!(kind(1 << 62), DamageKind::Unknown);
    slot(9).store(0, Ordering::Relaxed);
    for address in [root + 8, beyond, 0, !0xfff] {
        let refused = takeover.adopt(format, address, sizes);
        assert_eq!(refused.unwrap_err(), AdoptError::Root { address });
    }
    // After all that it is still there to be adopted, once.
    let adopted = takeover.adopt(format, root, sizes).unwrap();
    assert_eq!(
        takeover.adopt(format, root, sizes).unwrap_err(),
        AdoptError::Root { address: root }
    );
    let memory = takeover.finish();
    let elsewhere = HeapTables::with_tables(16).unwrap();
    assert_eq!(memory.in_use(), adopted.tables());
    assert!(matches!(
        adopted.open(&elsewhere),
        Err(AdoptError::OtherMemory)
    ));
}

/// A leaf for all address spaces would be found by devices of other domains, and outlive their flushes.
#[test]
fn tables_with_global_leaves_are_not_adopted() {
    fn refused<F: Format>(format: F, global: impl Fn(u64) -> u64) {
        let cells: Vec<AtomicU64> = (0..TABLES * 512).map(|_| AtomicU64::new(0)).collect();
        let metas = self::metas();
        let root = {
            let memory = Borrowed::new((&cells, &metas), BASE).unwrap();
            let mut table = Table::new(format, &memory).unwrap();
            table.map(0, &[Span::new(0, G1)], Prot::RW).unwrap();
            table.root().address
        };
        let words = || cells.iter().enumerate();
        let leaf = |word| matches!(F::decode(2, word), iopt::format::Entry::Leaf { .. });
        let (at, cell) = words()
            .find(|(_, cell)| leaf(cell.load(Ordering::Relaxed)))
            .unwrap();
        let own = cell.load(Ordering::Relaxed);
        let word = global(own);
        assert_ne!(word, own);
        cell.store(word, Ordering::Relaxed);
        let mut takeover: Takeover<_> = Takeover::new((&cells[..], &metas[..]), BASE).unwrap();
        let sizes = PageSizes::from_bits(u64::MAX);
        let damage = match takeover.adopt(format, root, sizes) {
            Err(AdoptError::Damage(damage)) => damage,
            other => panic!("{other:?}"),
        };
        assert_eq!((damage.kind, damage.word), (DamageKind::Unknown, word));
        assert_eq!(damage.table, BASE + (at as u64 / 512 * PAGE));
        cell.store(own, Ordering::Relaxed);
        assert!(takeover.adopt(format, root, sizes).is_ok());
    }
    refused(RiscV::new(3).unwrap(), |word| word | 1 << 5);
    let arm = ArmStage1::<K4>::new(39, 48).unwrap();
    refused(arm, |word| word & !(1 << 11));
}

#[test]
fn a_table_is_adopted_by_the_root_that_its_unit_has() {
    let (cells, address, base) = left_behind();
    // Memory that stays, as an erased one must.
    let (cells, metas) = (Vec::leak(cells), Vec::leak(self::metas()));
    let mut takeover: Takeover<_> = Takeover::new((&*cells, &*metas), base).unwrap();
    let sizes = PageSizes::from_bits(1 << 12 | 1 << 21);
    let told = |format, levels| Root {
        format,
        address,
        levels,
    };
    let mut adopt = |root| AnyTable::adopt(&mut takeover, root, sizes);
    let format = FormatId::VtdSs;
    let refused = |cause| Some(AdoptError::Build(cause));
    let levels = BuildError::Levels {
        format: FormatId::AmdV1,
        levels: 7,
    };
    assert_eq!(adopt(told(FormatId::AmdV1, 7)).err(), refused(levels));
    let other = BuildError::TableMemory {
        format: FormatId::ArmV7s,
        wanted: (4, 1024),
        offered: (8, 4096),
    };
    assert_eq!(adopt(told(FormatId::ArmV7s, 2)).err(), refused(other));
    let adopted = adopt(told(format, 4)).unwrap();
    let memory = takeover.finish();
    let table = adopted.open(memory).unwrap();
    assert_eq!(table.root(), told(format, 4));
    assert_eq!(table.page_sizes(), sizes);
    assert_eq!(table.translate(6 * PAGE), Some(G1 + PAGE));
}

/// A unit translates all the time while its tables change hands.
#[test]
fn tables_are_adopted_while_devices_run() {
    let (cells, root, base) = left_behind();
    let format = VtdSs::new(4).unwrap();
    let metas = self::metas();
    // The unit's view of the same memory.
    let unit_metas = self::metas();
    let unit = Borrowed::new((&cells, &unit_metas), base).unwrap();
    let (stop, walks) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let told = iopt::Root {
                format: format.id(),
                address: root,
                levels: 4,
            };
            while !stop.load(Ordering::Relaxed) {
                for page in 0..3 {
                    let iova = (5 + page) * PAGE;
                    let found = Walker::new(told).walk(&unit, iova, Access::Write, &mut ());
                    assert_eq!(found.unwrap().pa, G1 + page * PAGE);
                }
                walks.fetch_add(1, Ordering::Relaxed);
            }
        });
        while walks.load(Ordering::Relaxed) < 100 {
            thread::yield_now();
        }
        let mut takeover: Takeover<_> = Takeover::new((&cells[..], &metas[..]), base).unwrap();
        let sizes = PageSizes::from_bits(u64::MAX);
        let adopted = takeover.adopt(format, root, sizes).unwrap();
        let memory = takeover.finish();
        let mut table = adopted.open(&memory).unwrap();
        // And the new owner goes on with it.
        table
            .map(8 * PAGE, &[Span::new(9 * G1, 600 * PAGE)], Prot::RW)
            .unwrap();
        let mut gather = Gather::new();
        let range = Span::new(3 * G1, 5 * PAGE);
        table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
        let after = walks.load(Ordering::Relaxed) + 100;
        while walks.load(Ordering::Relaxed) < after {
            thread::yield_now();
        }
        assert_eq!(table.translate(607 * PAGE), Some(9 * G1 + 599 * PAGE));
        table.reclaim(gather.never_walked());
        stop.store(true, Ordering::Relaxed);
    });
}

/// Counts the stretches that are written back.
#[derive(Default)]
struct Count(AtomicU64);

impl CacheLines for &Count {
    const LINE: usize = 64;
    fn write_back(&self, _line: *const u8) {}
    fn complete(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Listeners of the memory are notified of leaves that have come in another way than by a map.
#[test]
fn listeners_are_notified_of_what_was_adopted_or_restored() {
    let (cells, root, base) = left_behind();
    let format = VtdSs::new(4).unwrap();
    let sizes = PageSizes::from_bits(u64::MAX);
    let (record, lines) = (std::cell::RefCell::new(HeapRecord::new()), Count::default());
    let domain = Domain { id: 1, owner: 1 };

    let metas = self::metas();
    let mut takeover: Takeover<_> = Takeover::new((&cells[..], &metas[..]), base).unwrap();
    let adopted = takeover.adopt(format, root, sizes).unwrap();
    let memory = takeover.finish();
    let watched = Checked::new(NonCoherent::new(&memory, &lines), &record, domain);
    let table = adopted.open(watched).unwrap();
    assert_eq!(record.borrow().mapped_bytes(domain), 8 * PAGE);
    assert_eq!(lines.0.swap(0, Ordering::Relaxed), 0, "nothing was stored");

    let mut bytes = Vec::new();
    table
        .write_image(&mut |piece: &[u8]| {
            bytes.extend_from_slice(piece);
            Ok::<_, ()>(())
        })
        .unwrap();
    let image = iopt::image::Image::parse(&bytes).unwrap();
    let (cells, metas) = (
        (0..TABLES * 512)
            .map(|_| AtomicU64::new(7))
            .collect::<Vec<_>>(),
        self::metas(),
    );
    let mut takeover: Takeover<_> = Takeover::new((&cells[..], &metas[..]), base).unwrap();
    let restored = takeover.restore(&image, format).unwrap();
    let memory = takeover.finish();
    let other = Domain { id: 2, owner: 1 };
    let watched = Checked::new(NonCoherent::new(&memory, &lines), &record, other);
    let there = restored.open(watched).unwrap();
    assert_eq!(lines.0.swap(0, Ordering::Relaxed), there.tables());
    assert_eq!(record.borrow().mapped_bytes(other), 8 * PAGE);

    let third = Domain { id: 3, owner: 1 };
    let heap = HeapTables::with_tables(64).unwrap();
    let watched = Checked::new(NonCoherent::new(&heap, &lines), &record, third);
    let copy = image.restore(format, watched).unwrap();
    // The root once more: it was empty first.
    assert_eq!(lines.0.swap(0, Ordering::Relaxed), copy.tables() + 1);
    copy.verify(&record, third);
    assert!(record.borrow().violations().is_empty());
}

#[test]
fn pages_that_are_kept_are_never_handed_out() {
    let (cells, root, base) = left_behind();
    let metas = self::metas();
    let mut takeover: Takeover<_> = Takeover::new((&cells[..], &metas[..]), base).unwrap();
    let last = base + (TABLES as u64 - 1) * PAGE;
    let kept = [Span::new(base + 20 * PAGE, 3 * PAGE), Span::new(last, PAGE)];
    let format = VtdSs::new(4).unwrap();
    let sizes = PageSizes::from_bits(u64::MAX);
    let adopted = takeover.adopt(format, root, sizes).unwrap();
    for span in kept {
        takeover.keep(span).unwrap();
    }
    for span in [
        kept[0],
        Span::new(root, PAGE),
        Span::new(last, 2 * PAGE),
        Span::new(base - PAGE, PAGE),
        Span::new(base + 30 * PAGE + 8, PAGE),
        Span::new(base + 30 * PAGE, 8),
        Span::new(base + 30 * PAGE, 0),
        Span::new(base + 19 * PAGE, 2 * PAGE),
    ] {
        assert_eq!(takeover.keep(span), Err(AdoptError::Pages { span }));
    }
    let tables = adopted.tables();
    let memory = takeover.finish();
    assert_eq!(memory.in_use(), tables + 4);
    let free = memory.reserve(TABLES as u64 - tables - 4).unwrap();
    let mut reserve = free;
    while let Some((page, _)) = reserve.take(&memory) {
        assert!(page != root && kept.iter().all(|span| !span.contains(page)));
    }
}
