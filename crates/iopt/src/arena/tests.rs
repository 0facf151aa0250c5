use crate::engine::TableOps as _;
use runs::Span;

use super::*;
use crate::format::{RiscV, VtdSs};
use crate::walk::{Access, Walker};
use crate::{BuildError, Prot, Table};

#[test]
fn no_address_leads_outside() {
    let arena = HeapTables::with_tables(16).unwrap();
    for address in [
        0,
        u64::MAX,
        1 << 51,
        arena.base() - 1,
        arena.base() + arena.size(),
    ] {
        for count in [1, 8, 512, 1 << 13] {
            let entries = arena.entries(address, count);
            assert_eq!(entries.len(), if count * 8 <= 65536 { count } else { 0 });
            entries
                .iter()
                .for_each(|cell| assert_eq!(Cell::get(cell), 0));
        }
        arena.meta(address);
    }
    assert_eq!(arena.read(arena.base() + arena.size()), None);
    assert_eq!(arena.read(arena.base() + 4), None);
    assert_eq!(arena.read(arena.base() + 8), Some(0));
}

#[test]
fn every_page_is_handed_out_once_and_comes_back() {
    let arena = HeapTables::with_tables(16).unwrap();
    assert_eq!(
        arena.reserve(17).unwrap_err(),
        NoTables {
            needed: 17 * 4096,
            available: 16 * 4096
        }
    );
    for round in 0..3 {
        let mut reserve = arena.reserve(16).unwrap();
        let mut seen = alloc::collections::BTreeSet::new();
        while let Some((table, zeroed)) = reserve.take(&arena) {
            assert!(arena.contains(table));
            assert_eq!(zeroed, round == 0);
            assert!(seen.insert(table));
        }
        assert_eq!(seen.len(), 16);
        assert_eq!(arena.in_use(), 16);
        let mut chain = Chain::empty();
        seen.into_iter().for_each(|table| chain.push(&arena, table));
        arena.reclaim(chain);
        assert_eq!(arena.in_use(), 0);
    }
}

#[test]
fn large_roots_are_aligned_and_waste_nothing() {
    let arena = HeapTables::with_tables(16).unwrap();
    let small = arena.allocate(4096).unwrap();
    let large = arena.allocate(16384).unwrap();
    assert_eq!((small - arena.base(), large - arena.base()), (0, 16384));
    assert_eq!(arena.in_use(), 5);
    assert_eq!(arena.reserve(12).unwrap_err().available, 11 * 4096);
    let reserve = arena.reserve(11).unwrap();
    arena.give_back(reserve);
    assert_eq!(arena.in_use(), 5);
}

#[test]
fn a_bad_stretch_is_refused() {
    assert_eq!(
        HeapTables::with_tables_at(16, 4096).unwrap_err(),
        ArenaError::Base {
            base: 4096,
            size: 65536
        }
    );
    assert_eq!(
        HeapTables::with_tables_at(16, 1 << 56).unwrap_err(),
        ArenaError::Base {
            base: 1 << 56,
            size: 65536
        }
    );
    let cells: [AtomicU64; 0] = [];
    let metas: [AtomicMeta; 0] = [];
    assert_eq!(
        <Arena<_>>::new((&cells[..], &metas[..]), 0).unwrap_err(),
        ArenaError::Size(0)
    );
}

/// RISC-V's tables lead to 56 bits, those of others to fewer.
#[test]
fn tables_lie_wherever_their_format_leads() {
    let last = (1 << 56) - (16 << 12);
    let memory = HeapTables::with_tables_at(16, last).unwrap();
    assert_eq!(memory.last_address(), (1 << 56) - 1);
    let mut table = Table::new(RiscV::new(3).unwrap(), &memory).unwrap();
    let page = Span::new((1 << 56) - 0x1000, 0x1000);
    table.map(0x5000, &[page], Prot::RW).unwrap();
    assert_eq!(table.translate(0x5123), Some(page.start + 0x123));
    assert!(table.root().address >= last);
    let found = Walker::new(table.root()).walk(&memory, 0x5123, Access::Read, &mut ());
    assert_eq!(found.unwrap().pa, page.start + 0x123);
    let narrow = Table::new(VtdSs::new(4).unwrap(), &memory);
    let refused = BuildError::TableAddress {
        last: (1 << 56) - 1,
        bits: 52,
    };
    assert_eq!(narrow.err(), Some(refused));
}
