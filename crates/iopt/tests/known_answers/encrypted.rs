//! Tables in encrypted memory: AMD v1 and x86-64 with the processor's C-bit, word by word.
//!
//! AMD64 Architecture Programmer's Manual, volume 2, section 7.10: the C-bit is an address bit whose
//! place CPUID Fn8000_001F, EBX[5:0], tells. In an entry that leads to a table it says that the
//! table is encrypted.

use iopt::format::{AmdV1, X86_64};
use iopt::walk::{Access, WalkReason, Walker};
use iopt::{
    BuildError, Chain, Format, Gather, HeapTables, Prot, Table, TableMemory, TableOps as _,
};
use runs::Span;

const PAGE: u64 = 4096;
const BASE: u64 = 1 << 46;

fn memory() -> HeapTables {
    HeapTables::with_tables_at(64, BASE).unwrap()
}

/// The first entry that is not 0 of the table at `table`.
fn only_word(memory: &HeapTables, table: u64) -> u64 {
    let words = (0..512).map(|n| memory.read(table + 8 * n).unwrap());
    let mut words = words.filter(|word| *word != 0);
    let word = words.next().unwrap();
    assert_eq!(words.next(), None);
    word
}

#[test]
fn amdv1_has_the_bit_in_the_root_and_in_tables_but_not_in_leaves() {
    for bit in [47, 51] {
        let memory = memory();
        let format = AmdV1::new(3).unwrap().with_encrypted_tables(bit).unwrap();
        let mut table = Table::new(format, &memory).unwrap();
        table
            .map(0x40_3000, &[Span::new(0x1234_5000, PAGE)], Prot::RW)
            .unwrap();
        assert_eq!(table.root().address, BASE | 1 << bit);
        // PR, IR, IW, Next Level 2 and 1, the table's address and the bit.
        let rw = 1 | 3 << 61;
        let (two, one) = (BASE + PAGE, BASE + 2 * PAGE);
        let next = |table: u64| rw | 1 << bit | table;
        assert_eq!(only_word(&memory, BASE), next(two) | 2 << 9);
        assert_eq!(only_word(&memory, two), next(one) | 1 << 9);
        assert_eq!(only_word(&memory, one), rw | 0x1234_5000);
    }
}

#[test]
fn x86_64_has_the_bit_in_the_root_and_in_tables_but_not_in_leaves() {
    for bit in [47, 51] {
        let memory = memory();
        let format = X86_64::new(4).unwrap().with_encrypted_tables(bit).unwrap();
        let mut table = Table::new(format, &memory).unwrap();
        table
            .map(1 << 30, &[Span::new(5 << 30, 1 << 30)], Prot::RW)
            .unwrap();
        assert_eq!(table.root().address, BASE | 1 << bit);
        // P, R/W, U/S, A; then P, R/W, U/S, PS, NX.
        assert_eq!(only_word(&memory, BASE), (BASE + PAGE) | 1 << bit | 0x27);
        assert_eq!(only_word(&memory, BASE + PAGE), 5 << 30 | 1 << 63 | 0x87);
    }
}

/// A leaf says by itself whether its memory is encrypted; the table is walked all the same.
fn leaves_are_as_they_were_given<F: Format>(format: F, bit: u32) {
    let memory = memory();
    let mut table = Table::new(format, &memory).unwrap();
    let c_bit = 1u64 << bit;
    let runs = [
        Span::new(c_bit | 0x20_0000, 0x20_0000),
        Span::new(0x8000_0000, 0x3000),
        Span::new(c_bit | 0x7000, PAGE),
    ];
    table.map(0x20_0000, &runs, Prot::RW).unwrap();
    let walker = Walker::new(table.root()).with_encryption_bit(bit);
    for (iova, pa) in [
        (0x20_0000, c_bit | 0x20_0000),
        (0x3f_f008, c_bit | 0x3f_f008),
        (0x40_2010, 0x8000_2010),
        (0x40_3000, c_bit | 0x7000),
    ] {
        assert_eq!(table.translate(iova), Some(pa));
        // A unit of fewer address bits (EBX[11:6] tells by how many) knows the bit all the same.
        for walker in [walker, walker.with_output_bits(47)] {
            let found = walker.walk(&memory, iova, Access::Write, &mut ());
            assert_eq!(found.unwrap().pa, pa);
        }
    }
    // A unit that does not know the bit looks for tables where there are none.
    let lost = Walker::new(table.root()).walk(&memory, 0x20_0000, Access::Read, &mut ());
    assert!(matches!(
        lost.unwrap_err().reason,
        WalkReason::NoMemory { address } if address & c_bit != 0
    ));

    // The tables that come back do so by their addresses in memory.
    let mut gather = Gather::new();
    let range = Span::new(0x20_0000, 0x20_4000);
    table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
    let mut back = gather.never_walked().into_tables();
    assert!(!back.is_empty());
    let mut chain = Chain::empty();
    while let Some(table) = back.pop(&memory) {
        assert!(memory.contains(table), "{table:#x}");
        chain.push(&memory, table);
    }
    memory.reclaim(chain);
    let (gather, _) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    assert_eq!(memory.in_use(), 0);
}

#[test]
fn leaves_of_encrypted_tables_carry_the_bit_where_the_runs_do() {
    for bit in [47, 51] {
        let amd = AmdV1::new(4).unwrap().with_encrypted_tables(bit);
        leaves_are_as_they_were_given(amd.unwrap(), bit);
        let x86 = X86_64::new(4).unwrap().with_encrypted_tables(bit);
        leaves_are_as_they_were_given(x86.unwrap(), bit);
    }
}

#[test]
fn an_encrypted_top_grows_with_the_bit_in_the_root_and_in_the_entry_below() {
    let memory = memory();
    let format = AmdV1::new(1).unwrap().with_encrypted_tables(51).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    table
        .map(PAGE, &[Span::new(7 * PAGE, PAGE)], Prot::RW)
        .unwrap();
    let old = table.root();
    let mut gather = Gather::new();
    let root = table.grow(4, &mut gather).unwrap();
    assert_eq!(gather.invalidation().new_root(), Some(root));
    assert_eq!((root.address >> 51, root.levels), (1, 4));
    for root in [old, root] {
        let walker = Walker::new(root).with_encryption_bit(51);
        let found = walker.walk(&memory, PAGE, Access::Read, &mut ());
        assert_eq!(found.unwrap().pa, 7 * PAGE);
    }
    assert_eq!(table.translate(PAGE), Some(7 * PAGE));
}

#[test]
fn bits_that_are_none_and_tables_above_them_are_refused() {
    for bit in [0, 46, 52, 64] {
        assert!(matches!(
            AmdV1::new(4).unwrap().with_encrypted_tables(bit),
            Err(BuildError::Setting { value, min: 47, max: 51, .. }) if value == u64::from(bit)
        ));
        assert!(X86_64::new(4).unwrap().with_encrypted_tables(bit).is_err());
    }
    let high = HeapTables::with_tables_at(16, 1 << 47).unwrap();
    let last = high.last_address();
    let amd = AmdV1::new(4).unwrap().with_encrypted_tables(51).unwrap();
    let refused = Table::new(amd, &high).unwrap_err();
    assert_eq!(refused, BuildError::TableAddress { last, bits: 47 });
    let x86 = X86_64::new(4).unwrap().with_encrypted_tables(47).unwrap();
    let refused = Table::new(x86, &high).unwrap_err();
    assert_eq!(refused, BuildError::TableAddress { last, bits: 47 });
}
