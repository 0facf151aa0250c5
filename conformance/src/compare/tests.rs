//! The comparator notices what it is there for. Two tables of ours stand in for the two sides; the
//! second one's bytes are then changed.

use std::collections::BTreeMap;

use iopt::format::{AmdV1, VtdSs, X86_64};
use iopt::{HeapTables, Prot, Table, TableOps as _};
use runs::Span;

use super::*;
use crate::server::{LinuxFormat, option};

const PLAIN: LinuxConfig = LinuxConfig {
    format: LinuxFormat::VtdSs,
    options: 0,
    input_bits: 48,
    output_bits: 52,
    levels: 4,
    page_sizes: 0,
};
const SMALL: u64 = 0x7f_c020_1000;
const LARGE: u64 = 0x80_4000_0000;

fn table<F: Format>(format: F, memory: &HeapTables) -> Table<F, &HeapTables> {
    let mut table = Table::new(format, memory).unwrap();
    table
        .map(SMALL, &[Span::new(0x1234_5000, 0x3000)], Prot::RW)
        .unwrap();
    table
        .map(LARGE, &[Span::new(0, 1 << 30)], Prot::READ)
        .unwrap();
    table
}

/// The memory of a table of ours, as Linux's would be told.
fn dump<F: Format>(table: &Table<F, &HeapTables>, memory: &HeapTables) -> Dump {
    let root = table.root();
    let mut dump = Dump {
        levels: Some(root.levels),
        roots: vec![root.address],
        blocks: BTreeMap::new(),
    };
    let mut todo = vec![(root.address, usize::from(root.levels) - 1)];
    while let Some((at, level)) = todo.pop() {
        let mut block = Block {
            bytes: 4096,
            words: BTreeMap::new(),
        };
        for index in 0..512 {
            let word = memory.read(at + index * 8).unwrap();
            if word != 0 {
                block.words.insert(index, word);
            }
            if let Entry::Table(below) = F::decode(level, word) {
                todo.push((below, level - 1));
            }
        }
        dump.blocks.insert(at, block);
    }
    dump
}

/// Compares a table with another one whose dump was changed.
fn with<F: Format>(
    config: LinuxConfig,
    format: F,
    change: impl FnOnce(&mut Dump),
) -> (anyhow::Result<Counts>, Seen) {
    let memory = HeapTables::with_tables_at(64, 1 << 40).unwrap();
    let other = HeapTables::with_tables_at(64, 1 << 41).unwrap();
    let ours = table(format, &memory);
    let mut theirs = dump(&table(format, &other), &other);
    change(&mut theirs);
    let mut seen = Seen::default();
    let result = compare(&config, &format, ours.root(), &memory, &theirs, &mut seen);
    (result, seen)
}

fn plain(change: impl FnOnce(&mut Dump)) -> anyhow::Result<Counts> {
    with(PLAIN, VtdSs::new(4).unwrap(), change).0
}

/// The block that holds the leaves at `SMALL`, and the first one's index.
fn leaves(dump: &mut Dump) -> (&mut Block, u64) {
    let is_leaf = |word: &u64| word & 0xf_ffff_ffff_f000 == 0x1234_5000;
    let mut blocks = dump.blocks.values_mut();
    let block = blocks
        .find(|block| block.words.values().any(is_leaf))
        .unwrap();
    (block, SMALL >> 12 & 511)
}

fn leaf(dump: &mut Dump) -> &mut u64 {
    let (block, index) = leaves(dump);
    block.words.get_mut(&index).unwrap()
}

/// The root.
fn root(dump: &mut Dump) -> &mut Block {
    let root = dump.roots[0];
    dump.blocks.get_mut(&root).unwrap()
}

#[track_caller]
fn fails(result: anyhow::Result<Counts>, with: &str) {
    let error = format!("{:#}", result.unwrap_err());
    assert!(error.contains(with), "{error}");
}

#[test]
fn equal_tables_at_other_addresses_are_equal() {
    let counts = plain(|_| {}).unwrap();
    assert_eq!(
        counts,
        Counts {
            leaves: 4,
            tables: 4
        }
    );
}

#[test]
fn any_bit_that_is_flipped_in_a_leaf_is_noticed() {
    for bit in 0..64 {
        let result = plain(|dump| *leaf(dump) ^= 1 << bit);
        assert!(result.is_err(), "bit {bit}");
    }
}

#[test]
fn any_bit_that_is_flipped_in_an_entry_of_a_table_is_noticed() {
    for bit in 0..64 {
        let result = plain(|dump| *root(dump).words.values_mut().next().unwrap() ^= 1 << bit);
        assert!(result.is_err(), "bit {bit}");
    }
}

#[test]
fn a_leaf_that_is_missing_is_noticed() {
    let result = plain(|dump| {
        let (block, index) = leaves(dump);
        block.words.remove(&index);
    });
    fails(
        result,
        "a leaf: ours 0x0000000012345003, Linux's 0x0000000000000000",
    );
}

#[test]
fn a_leaf_too_many_is_noticed() {
    let result = plain(|dump| {
        let (block, index) = leaves(dump);
        block.words.insert(index + 3, 0x1003);
    });
    fails(result, "we have nothing here, and Linux 0x1003");
    // Also one that is not present.
    let result = plain(|dump| {
        let (block, index) = leaves(dump);
        block.words.insert(index + 3, 1 << 20);
    });
    fails(result, "we have nothing here");
}

#[test]
fn a_table_that_nothing_leads_to_is_noticed() {
    let result = plain(|dump| {
        dump.blocks.insert(
            0x5000,
            Block {
                bytes: 4096,
                words: BTreeMap::new(),
            },
        );
    });
    fails(result, "nothing leads to Linux's table at 0x5000");
}

#[test]
fn a_table_that_two_entries_lead_to_is_noticed() {
    let result = plain(|dump| {
        let root = root(dump);
        let word = *root.words.values().next().unwrap();
        root.words.values_mut().for_each(|other| *other = word);
    });
    assert!(result.is_err());
}

#[test]
fn words_behind_a_table_are_noticed() {
    let result = plain(|dump| {
        let root = root(dump);
        root.bytes = 8192;
        root.words.insert(512, 1);
    });
    fails(result, "lies behind it");
}

#[test]
fn a_table_that_is_too_small_is_noticed() {
    fails(plain(|dump| root(dump).bytes = 2048), "too small");
}

#[test]
fn an_empty_table_is_a_difference_and_a_table_with_something_in_it_is_not() {
    let add = |word: Option<u64>| {
        move |dump: &mut Dump| {
            let words = word.into_iter().map(|word| (9, word)).collect();
            dump.blocks.insert(0x5000, Block { bytes: 4096, words });
            root(dump).words.insert(300, 0x5003);
        }
    };
    let (result, seen) = with(PLAIN, VtdSs::new(4).unwrap(), add(None));
    result.unwrap();
    assert_eq!(seen.0, BTreeMap::from([("empty tables are kept", 1)]));
    fails(plain(add(Some(0x1083))), "we have nothing here");
}

#[test]
fn a_note_in_an_entry_of_a_table_is_a_difference_only_where_caches_are_not_coherent() {
    let note = |dump: &mut Dump| {
        for block in dump.blocks.values_mut() {
            for word in block.words.values_mut().filter(|word| **word > 1 << 41) {
                *word |= 1 << 10;
            }
        }
    };
    let incoherent = LinuxConfig {
        options: option::INCOHERENT,
        ..PLAIN
    };
    let (result, seen) = with(incoherent, VtdSs::new(4).unwrap(), note);
    result.unwrap();
    assert_eq!(seen.0.values().sum::<u64>(), 4);
    fails(plain(note), "an entry of a table");
}

#[test]
fn a_difference_in_a_leaf_must_be_there_wholly() {
    let config = LinuxConfig {
        format: LinuxFormat::X86_64,
        ..PLAIN
    };
    let as_linux = |except: u64| {
        move |dump: &mut Dump| {
            for word in dump
                .blocks
                .values_mut()
                .flat_map(|block| block.words.values_mut())
            {
                if *word >> 63 == 1 {
                    *word = (*word | 1 << 5 | (*word & 2) << 5) & !(1 << 63) ^ except;
                }
            }
        }
    };
    let format = X86_64::new(4).unwrap();
    let (result, seen) = with(config, format, as_linux(0));
    result.unwrap();
    assert_eq!(seen.0.get("x86-64: A set from the beginning"), Some(&4));
    assert_eq!(seen.0.get("x86-64: D set from the beginning"), Some(&3));
    for bit in 0..64 {
        let (result, _) = with(config, format, as_linux(1 << bit));
        assert!(result.is_err(), "bit {bit}");
    }
    assert!(with(config, format, |_| {}).0.is_err());
}

#[test]
fn a_top_with_fewer_levels_is_a_difference_of_the_tables_that_grow_only() {
    let memory = HeapTables::with_tables_at(64, 1 << 40).unwrap();
    let other = HeapTables::with_tables_at(64, 1 << 41).unwrap();
    let ours = table(AmdV1::new(6).unwrap(), &memory);
    let theirs = dump(&table(AmdV1::new(4).unwrap(), &other), &other);
    let format = AmdV1::new(6).unwrap();
    let compare_as = |name| {
        let config = LinuxConfig {
            format: name,
            ..PLAIN
        };
        compare(
            &config,
            &format,
            ours.root(),
            &memory,
            &theirs,
            &mut Seen::default(),
        )
    };
    compare_as(LinuxFormat::AmdV1Growing).unwrap();
    fails(compare_as(LinuxFormat::AmdV1), "fewer levels");
    let mut ours = ours;
    ours.map(1 << 50, &[Span::new(0, 0x1000)], Prot::RW)
        .unwrap();
    let config = LinuxConfig {
        format: LinuxFormat::AmdV1Growing,
        ..PLAIN
    };
    let result = compare(
        &config,
        &format,
        ours.root(),
        &memory,
        &theirs,
        &mut Seen::default(),
    );
    fails(result, "beyond Linux's top");
}

#[test]
fn a_difference_that_was_never_seen_is_missing() {
    let mut seen = Seen::default();
    let all = seen.missing();
    assert_eq!(all.len(), crate::differences::DIFFERENCES.len());
    seen.note(all[0]);
    assert_eq!(seen.missing(), all[1..]);
}

#[test]
fn no_two_differences_have_the_same_name() {
    let all: BTreeSet<_> = Seen::default().missing().into_iter().collect();
    assert_eq!(all.len(), crate::differences::DIFFERENCES.len());
}
