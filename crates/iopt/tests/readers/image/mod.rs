//! Images of tables: written, read, walked, refused, restored; and the same tables adopted where
//! they lie, over every format.

mod refused;

use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, AtomicU64};

use iopt::format::{
    AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart2, Entry, K4, K16Lpa2, K64, RiscV,
    RiscVG, VtdSs, X86_64,
};
use iopt::image::{Image, ImageError};
use iopt::walk::{Access, WalkMemory, Walker};
use iopt::{
    Arena, AtomicMeta, Cell, Format, Gather, HeapTables, Leaf, Prot, Table, TableMemory,
    TableOps as _, Takeover,
};
use runs::{Iova, PageSizes, Span};

const PAGE: u64 = 4096;
const G1: u64 = 1 << 30;

/// A table of some leaf sizes, with holes, and tables that were given back.
fn fill<F: Format, M: TableMemory>(table: &mut Table<F, M>) {
    let page = 1u64 << F::GRANULE_LOG2;
    let aperture = table.format().aperture();
    let output = 1u64 << (table.format().output_bits() - 1).min(34);
    let spans: Vec<Span<Iova>> = aperture.spans().collect();
    let (first, last) = (spans[0], spans[spans.len() - 1]);
    let top = last.start + (last.len - 1) - (600 * page - 1);
    for (iova, pa, pages, prot) in [
        (first.start, output, 700, Prot::RW),
        (first.start + 1000 * page, page, 3, Prot::READ),
        (first.start + 2048 * page, output, 2200, Prot::RW),
        (top, output / 2 + 5 * page, 600, Prot::RW),
    ] {
        table
            .map(iova, &[Span::new(pa, pages * page)], prot)
            .unwrap();
    }
    let mut gather = Gather::new();
    for (iova, pages) in [(first.start + 16 * page, 1), (top + 20 * page, 500)] {
        let range = Span::new(iova, pages * page);
        let _ = table.unmap_mapped(range, &mut gather, &mut iopt::NoRuns);
    }
    let flushed = gather.flush_with(|_| Ok::<_, Infallible>(())).unwrap();
    table.reclaim(flushed);
}

/// Sets what hardware sets, in every third entry that is a leaf.
fn touch<F: Format, M: TableMemory>(table: &Table<F, &M>, memory: &M) {
    table.for_each_table(&mut |address, level| {
        let count = table.format().entries(level.into());
        for cell in memory.entries(address, count).iter().step_by(3) {
            let word = cell.get();
            let leaf = matches!(F::decode(level.into(), word), Entry::Leaf { .. });
            if leaf && table.format().keeps_dirty() {
                cell.set(F::dirtied(word) | F::ACCESSED);
            }
        }
    });
}

fn leaves<F: Format, M: TableMemory>(table: &Table<F, M>) -> Vec<Leaf> {
    let spans = table.format().aperture().spans();
    spans.flat_map(|span| table.leaves(span)).collect()
}

fn image<F: Format, M: TableMemory>(table: &Table<F, M>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let written = table
        .write_image(&mut |piece: &[u8]| {
            bytes.extend_from_slice(piece);
            Ok::<_, Infallible>(())
        })
        .unwrap();
    assert_eq!(written, bytes.len() as u64);
    bytes
}

/// The words of all tables and, unless they were `moved`, their addresses.
fn words<F: Format, M: TableMemory>(table: &Table<F, &M>, memory: &M, moved: bool) -> Vec<u64> {
    let mut words = Vec::new();
    table.for_each_table(&mut |address, level| {
        if !moved {
            words.push(address);
        }
        let count = table.format().entries(level.into());
        for cell in memory.entries(address, count) {
            let word = cell.get();
            let link = matches!(F::decode(level.into(), word), Entry::Table(_));
            words.push(if moved && link { u64::MAX } else { word });
        }
    });
    words
}

/// Where the tables of the tests lie: where every format can hold their addresses.
const BASE: u64 = 1 << 31;
const TABLES: usize = 256;

/// Cells and metas for an arena.
fn room<C: Default>(log2: u32) -> (Vec<C>, Vec<AtomicMeta>) {
    let cells = (TABLES << log2) / size_of::<C>();
    (
        (0..cells).map(|_| C::default()).collect(),
        (0..TABLES).map(|_| AtomicMeta::default()).collect(),
    )
}

type Borrowed<'a, C, const LOG2: u32> = Arena<(&'a [C], &'a [AtomicMeta]), LOG2>;

fn comes_back_whole<F: Format, C: Cell + Default + Send + Sync, const LOG2: u32>(format: F) {
    let (cells, metas) = room::<C>(LOG2);
    let memory = Borrowed::<C, LOG2>::with_table_size((&cells, &metas), BASE).unwrap();
    // Two tables in one arena.
    let mut other = Table::new(format, &memory).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    let page = 1 << F::GRANULE_LOG2;
    let at = format.aperture().spans().next().unwrap().start;
    other.map(at, &[Span::new(page, page)], Prot::RW).unwrap();
    fill(&mut table);
    touch(&table, &memory);
    let bytes = image(&table);
    let parsed = Image::parse(&bytes).unwrap();
    assert_eq!(parsed.root(), table.root());
    assert_eq!(parsed.page_sizes(), table.page_sizes());
    assert_eq!(parsed.len() as u64, table.tables());
    assert_eq!(parsed.check(&format), Ok(()));

    // Built anew elsewhere, in the same memory.
    let mut copy = parsed.restore(format, &memory).unwrap();
    assert_eq!(leaves(&copy), leaves(&table));
    assert!(words(&copy, &memory, true) == words(&table, &memory, true));
    assert_eq!(copy.tables(), table.tables());
    assert_ne!(copy.root().address, table.root().address);
    take_apart(&mut copy);
    assert_eq!(copy.tables(), 1);

    // In new memory, where it lay.
    let (new_cells, new_metas) = room::<C>(LOG2);
    new_cells.iter().for_each(|cell| cell.set(0x5555_5555));
    let mut takeover = Takeover::<_, LOG2>::new((&new_cells[..], &new_metas[..]), BASE).unwrap();
    let adopted = takeover.restore(&parsed, format).unwrap();
    assert!(matches!(
        takeover.restore(&parsed, format),
        Err(ImageError::Taken { .. })
    ));
    assert_eq!(adopted.root(), table.root());
    let new_memory: Borrowed<'_, C, LOG2> = takeover.finish();
    let mut again = adopted.open(&new_memory).unwrap();
    assert!(words(&again, &new_memory, false) == words(&table, &memory, false));
    assert_eq!(leaves(&again), leaves(&table));
    assert_eq!(
        new_memory.in_use(),
        again.tables() + root_pages(&format) - 1
    );
    assert!(image(&again) == bytes);
    take_apart(&mut again);
    fill(&mut again);
    take_apart(&mut again);
    assert_eq!(new_memory.in_use(), root_pages(&format));

    // Taken over in the memory in which both lie, as a process after this one would.
    let roots = (table.root().address, other.root().address);
    let expected = (words(&table, &memory, false), words(&other, &memory, false));
    let counts = (table.tables(), other.tables());
    let before: Vec<u64> = cells.iter().map(Cell::get).collect();
    let (_, metas) = room::<C>(LOG2);
    let mut takeover = Takeover::<_, LOG2>::new((&cells[..], &metas[..]), BASE).unwrap();
    let sizes = table.page_sizes();
    let table = takeover.adopt(format, roots.0, sizes).unwrap();
    let other = takeover.adopt(format, roots.1, sizes).unwrap();
    let memory: Borrowed<'_, C, LOG2> = takeover.finish();
    let mut table = table.open(&memory).unwrap();
    let other = other.open(&memory).unwrap();
    assert!(
        cells.iter().map(Cell::get).eq(before.iter().copied()),
        "not a byte was stored"
    );
    assert_eq!((table.tables(), other.tables()), counts);
    // Tables that were not adopted are free: the ones of the copy.
    let used = counts.0 + counts.1 + 2 * (root_pages(&format) - 1);
    assert_eq!(memory.in_use(), used);
    assert!(words(&table, &memory, false) == expected.0);
    take_apart(&mut table);
    fill(&mut table);
    take_apart(&mut table);
    assert_eq!(table.tables(), 1);
    assert!(words(&other, &memory, false) == expected.1);
}

macro_rules! each_format {
    ($($name:ident, $format:expr, $cell:ty, $log2:literal;)*) => {
        mod an_image_comes_back_whole {
            use super::*;
            $(
                #[test]
                fn $name() {
                    comes_back_whole::<_, $cell, $log2>($format);
                }
            )*
        }
    };
}
each_format! {
    amdv1, AmdV1::new(4).unwrap(), AtomicU64, 12;
    amdv1_2_levels, AmdV1::new(2).unwrap(), AtomicU64, 12;
    x86_64, X86_64::new(4).unwrap(), AtomicU64, 12;
    vtd_ss, VtdSs::new(4).unwrap(), AtomicU64, 12;
    arm_s1_4k, ArmStage1::<K4>::new(48, 48).unwrap(), AtomicU64, 12;
    arm_s1_4k_upper_dirty, ArmStage1::<K4>::new(40, 48).unwrap().upper().with_options(DIRTY),
        AtomicU64, 12;
    arm_s2_16k_lpa2, ArmStage2::<K16Lpa2>::new(48, 52).unwrap(), AtomicU64, 14;
    arm_s2_64k, ArmStage2::<K64>::new(42, 48).unwrap(), AtomicU64, 16;
    riscv_hardware_updates, RiscV::new(3).unwrap().with_hardware_updates(true), AtomicU64, 12;
    armv7s, <ArmV7s>::new(), AtomicU32, 10;
    dart1, Dart1::new(2, 36).unwrap(), AtomicU64, 14;
    dart2, Dart2::new(3, 42).unwrap(), AtomicU64, 14;
    riscv_g, RiscVG::new(4).unwrap(), AtomicU64, 12;
}

const DIRTY: ArmOptions = ArmOptions {
    dirty: true,
    ..ArmOptions::PLAIN
};

fn root_pages<F: Format>(format: &F) -> u64 {
    let bytes = format.entries(usize::from(format.levels()) - 1) * F::ENTRY_BYTES;
    (bytes as u64).div_ceil(F::TABLE_BYTES)
}

/// Unmaps everything; the live counts must be right for that.
fn take_apart<F: Format, M: TableMemory>(table: &mut Table<F, M>) {
    let mut gather = Gather::new();
    let leaves = leaves(table);
    for leaf in leaves {
        table
            .unmap(leaf.run.input(), &mut gather, &mut iopt::NoRuns)
            .unwrap();
    }
    // Tables that were empty before.
    for span in table.format().aperture().spans() {
        table.give_back_empty_tables(span, &mut gather).unwrap();
    }
    table.reclaim(gather.never_walked());
}

fn vtd(memory: &HeapTables) -> Table<VtdSs, &HeapTables> {
    let mut table = Table::new(VtdSs::new(4).unwrap(), memory).unwrap();
    let sizes = [
        (5 * PAGE, 9 * G1 + PAGE, 3 * PAGE),
        (G1, 8 * G1, 4 << 20),
        (7 << 39, 64 * G1, G1),
    ];
    for (iova, pa, len) in sizes {
        table.map(iova, &[Span::new(pa, len)], Prot::RW).unwrap();
    }
    table
}

#[test]
fn an_image_is_walked_without_its_memory() {
    let memory = HeapTables::with_tables(64).unwrap();
    let table = vtd(&memory);
    let bytes = image(&table);
    let (image, walker) = (Image::parse(&bytes).unwrap(), Walker::new(table.root()));
    for iova in [
        0,
        5 * PAGE,
        7 * PAGE + 9,
        8 * PAGE,
        G1 + 12345,
        G1 + (4 << 20),
        7 << 39,
    ] {
        let there = walker.walk(&memory, iova, Access::Write, &mut ());
        assert_eq!(walker.walk(&image, iova, Access::Write, &mut ()), there);
        assert_eq!(there.ok().map(|found| found.pa), table.translate(iova));
    }
    assert!(image.read_u64(table.root().address + 4).is_err());
    assert!(image.read_u64(memory.base() + memory.size()).is_err());
}

#[test]
fn a_restore_without_room_leaves_the_memory_as_it_was() {
    let memory = HeapTables::with_tables(64).unwrap();
    let bytes = image(&vtd(&memory));
    let small = HeapTables::with_tables(16).unwrap();
    let _held = small.reserve(11).unwrap();
    let image = Image::parse(&bytes).unwrap();
    let refused = image.restore(VtdSs::new(4).unwrap(), &small);
    assert!(matches!(refused, Err(ImageError::Build(_))));
    assert_eq!(small.in_use(), 11);
}

#[test]
fn an_image_of_many_windows_keeps_every_table() {
    // Tables far apart in a large arena, written out of order.
    let memory = HeapTables::with_tables(1 << 13).unwrap();
    let format = X86_64::new(4).unwrap();
    let mut table = Table::with_page_sizes(format, &memory, PageSizes::from_bits(PAGE)).unwrap();
    let len = 5000 << 21;
    table.map(0, &[Span::new(G1, len)], Prot::RW).unwrap();
    let mut gather = Gather::new();
    let hole = Span::new(300 << 21, 2100 << 21);
    table.unmap(hole, &mut gather, &mut iopt::NoRuns).unwrap();
    table.reclaim(gather.never_walked());
    table
        .map(700 << 30, &[Span::new(0, 9 << 21)], Prot::RW)
        .unwrap();
    let bytes = image(&table);
    let parsed = Image::parse(&bytes).unwrap();
    assert_eq!(parsed.len() as u64, table.tables());
    let copy = parsed.restore(format, &memory).unwrap();
    let all = |table: &Table<_, _>| table.runs(Span::new(0, 1 << 47)).collect::<Vec<_>>();
    assert_eq!(all(&copy), all(&table));
}

/// Found by [`refused::any_words_are_refused_or_become_a_table`]: a copy has the empty tables that were kept,
/// and takes them for what they are.
#[test]
fn empty_tables_that_were_kept_come_back_and_are_mapped_into() {
    let memory = HeapTables::with_tables(64).unwrap();
    let mut table = Table::new(VtdSs::new(4).unwrap(), &memory).unwrap();
    table.keep_empty_tables(true);
    table.map(0, &[Span::new(G1, PAGE)], Prot::RW).unwrap();
    let mut gather = Gather::new();
    table
        .unmap(Span::new(0, PAGE), &mut gather, &mut iopt::NoRuns)
        .unwrap();
    table.reclaim(gather.never_walked());
    assert_eq!(table.tables(), 4);
    let bytes = image(&table);
    let image = Image::parse(&bytes).unwrap();
    let format = table.format();

    let room_for_copy = HeapTables::with_tables(64).unwrap();
    let mut copy = image.restore(format, &room_for_copy).unwrap();
    let (cells, metas) = room::<AtomicU64>(12);
    let mut takeover: Takeover<_> = Takeover::new((&cells[..], &metas[..]), memory.base()).unwrap();
    let adopted = takeover.restore(&image, format).unwrap();
    let arena = takeover.finish();
    let mut taken = adopted.open(&arena).unwrap();

    let large = [Span::new(G1, 4 << 20)];
    copy.map(0, &large, Prot::RW).unwrap();
    taken.map(0, &large, Prot::RW).unwrap();
    for leaves in [leaves(&copy), leaves(&taken)] {
        // The table for the first 2 MiB stands already; the next 2 MiB are one leaf.
        assert_eq!(leaves.len(), 513);
        assert_eq!(leaves[512].run.len, 2 << 20);
    }
    take_apart(&mut copy);
    take_apart(&mut taken);
    assert_eq!((copy.tables(), taken.tables()), (1, 1));
}

#[test]
fn the_report_of_nodes_says_where_tables_lie() {
    let memory = HeapTables::with_tables(64).unwrap();
    let nodes = vtd(&memory).nodes();
    assert_eq!((nodes.unknown(), nodes.iter().count()), (6, 0));
    let memory = HeapTables::with_tables(64).unwrap().on_node(Some(3));
    let nodes = vtd(&memory).nodes();
    assert_eq!(nodes.on(3), 6);
    assert_eq!(nodes.iter().collect::<Vec<_>>(), [(3, 6)]);
    assert_eq!(
        (nodes.unknown(), nodes.on_others(), nodes.on(99)),
        (0, 0, 0)
    );
    let memory = HeapTables::with_tables(64).unwrap().on_node(Some(64));
    assert_eq!(vtd(&memory).nodes().on_others(), 6);
}

#[test]
fn encrypted_tables_come_back_from_their_image_and_from_no_other() {
    let memory = HeapTables::with_tables(64).unwrap();
    let format = AmdV1::new(4).unwrap().with_encrypted_tables(51).unwrap();
    let mut table = Table::new(format, &memory).unwrap();
    table
        .map(0x1000, &[Span::new(0x5000, 0x3000)], Prot::RW)
        .unwrap();
    let mut file = Vec::new();
    table
        .write_image(&mut |bytes: &[u8]| {
            file.extend_from_slice(bytes);
            Ok::<_, ()>(())
        })
        .unwrap();
    let image = Image::parse(&file).unwrap();
    assert_eq!(image.root(), table.root());
    assert_eq!(image.encryption_bit(), Some(51));
    let copy = image.restore(format, &memory).unwrap();
    assert_eq!(copy.translate(0x2000), Some(0x6000));
    let walker = Walker::new(image.root()).with_encryption_bit(51);
    let found = walker.walk(&image, 0x2000, Access::Read, &mut ()).unwrap();
    assert_eq!(found.pa, 0x6000);
    for other in [
        image.check(&AmdV1::new(4).unwrap()),
        image.check(&AmdV1::new(4).unwrap().with_encrypted_tables(47).unwrap()),
    ] {
        assert!(matches!(
            other,
            Err(ImageError::Configuration {
                what: "bit of encryption",
                ..
            })
        ));
    }
}
