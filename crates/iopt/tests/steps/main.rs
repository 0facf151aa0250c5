//! Every single store of an operation, looked at from outside.
//!
//! The cells of these tables stop the operation after each store. At each stop a walker that shares
//! nothing with the engine reads the tables as a unit would, by itself and through tables that it
//! has cached before, and finds for every page of the range its old or its new translation, and for
//! every other page the old one. So there is no moment in which a device sees a table that is not
//! complete, a leaf that was not asked for, or a hole beside the range.
//!
//! At some stops the unit also writes, and marks leaves as dirty as its kind does: after the
//! operation every page that was ever written to lies in a leaf that is dirty.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod device;
mod interrupts;
mod memory;
mod world;

use std::sync::atomic::{AtomicU32, AtomicU64};

use iopt::format::{
    AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, BreakBeforeMake, Dart1, Dart1Page4K, Dart2,
    K4, K16, K64, RiscV, RiscVG, VtdSs, X86_64,
};
use iopt::walk::{Access, WalkMemory, Walker};
use iopt::{Cell, Chain, Format, Gather, Prot, Table, TableMemory, TableOps as _};
use runs::{PageSizes, Span};

use memory::{Tables, When, any_entry_counts, read_anew, with_stop};
use world::World;

const ALL: PageSizes = PageSizes::from_bits(u64::MAX);
const SEEDS: u64 = 3;

/// The sizes of one entry at levels 0, 1 and 2, and a place with room around it.
struct Place {
    page: u64,
    block: u64,
    base: u64,
    pa: u64,
}

fn place<F: Format>(format: &F) -> Place {
    let block = 1u64 << F::shift(1);
    let first = format.aperture().spans().next().unwrap().start;
    Place {
        page: 1 << F::GRANULE_LOG2,
        block,
        base: first + 8 * block,
        // As far up as leaves it aligned to the block and in reach.
        pa: (1u64 << (format.output_bits() - 2).min(40)) + 16 * block,
    }
}

fn map_and_unmap<F: Format, C: Cell + Default + 'static, const LOG2: u32>(
    format: F,
    sizes: PageSizes,
    shared: bool,
    seed: u64,
) -> u64 {
    let Place {
        page: p,
        block,
        base,
        pa,
    } = place(&format);
    let border = base + 2 * block;
    let mut world = World::<F, C, LOG2>::new(format, sizes, shared, seed);
    // New tables on both sides of the border, then more pages in them.
    let odd = pa + 3 * p;
    let runs = [Span::new(odd, 30 * p), Span::new(pa, 10 * p)];
    world.map(border - 20 * p, &runs);
    world.map(border + 20 * p, &[Span::new(odd + 64 * p, 8 * p)]);
    world.map(border - 40 * p, &[Span::new(pa + 129 * p, 16 * p)]);
    // Parts of tables go, and a whole table, and their memory comes back for others.
    world.unmap(Span::new(border - 30 * p, 20 * p));
    world.unmap(Span::new(border, 28 * p));
    world.map(border, &[Span::new(pa + 5 * p, 3 * p)]);
    world.unmap(Span::new(border - 2 * block, 4 * block));
    // Large leaves with small ones at their ends, and groups where the format has them.
    let range = Span::new(border - 3 * p, block + 40 * p);
    world.map(range.start, &[Span::new(pa - 3 * p, range.len)]);
    world.unmap(range);
    world.finish()
}

fn resize<F: Format, C: Cell + Default + 'static, const LOG2: u32>(
    format: F,
    sizes: PageSizes,
    shared: bool,
    seed: u64,
) -> u64 {
    let Place {
        page: p,
        block,
        base,
        pa,
    } = place(&format);
    let mut world = World::<F, C, LOG2>::new(format, sizes, shared, seed);

    // A block, and pages before and behind it.
    let range = Span::new(base - 3 * p, block + 6 * p);
    world.map(range.start, &[Span::new(pa - 3 * p, range.len)]);
    let as_mapped = world.leaves(range);
    assert!(as_mapped.contains(&block));
    world.split(Span::new(base + 5 * p, p), p);
    assert_eq!(world.leaves(Span::new(base, block)).len() as u64, block / p);
    world.merge(range);
    assert_eq!(world.leaves(range), as_mapped);
    world.cut(Span::new(base, block), base + 5 * p);
    let mut pieces = world.leaves(Span::new(base, block));
    assert!(pieces.len() > 1);
    // Merging a part leaves the rest alone.
    world.merge(Span::new(base, 5 * p));
    assert_eq!(world.leaves(Span::new(base, block)), pieces);
    world.cut(Span::new(base, block), base + block / 2);
    world.cut(Span::new(base, block), base + block - p);
    pieces = world.leaves(Span::new(base, block));
    assert_eq!(pieces.iter().sum::<u64>(), block);
    world.merge(Span::new(base, block));
    assert_eq!(world.leaves(range), as_mapped);
    world.unmap(range);

    // A group of 64 pages, where there are groups: apart, and together again.
    let range = Span::new(base + 64 * p, 64 * p);
    world.map(range.start, &[Span::new(pa + 64 * p, range.len)]);
    let as_mapped = world.leaves(range);
    world.cut(range, range.start + 21 * p);
    world.split(range, p);
    assert_eq!(world.leaves(range).len(), 64);
    world.merge(range);
    assert_eq!(world.leaves(range), as_mapped);
    world.unmap(range);

    // Groups of blocks, and the level above where it has leaves.
    let upper = 1u64 << F::shift(2.min(usize::from(format.levels()) - 1));
    let offered = F::page_sizes(format.levels()).and(sizes);
    let large = offered
        .iter()
        .filter(|size| *size > block && *size <= upper && *size < 1 << 34)
        .max();
    if let Some(large) = large
        && large <= format.aperture().spans().next().unwrap().len / 4
        && large / p <= 1 << 18
    {
        let start = format.aperture().spans().next().unwrap().start + large;
        let range = Span::new(start, large);
        world.map(start, &[Span::new(large, large)]);
        assert_eq!(world.leaves(range), [large]);
        world.cut(range, start + block + 5 * p);
        world.split(range, block);
        assert!(world.leaves(range).len() as u64 >= large / block);
        world.merge(range);
        assert_eq!(world.leaves(range), [large]);
        world.unmap(range);
    }
    world.finish()
}

/// Harvests, permissions that come and go, and unmaps that take dirty state along.
fn track<F: Format, C: Cell + Default + 'static, const LOG2: u32>(
    format: F,
    sizes: PageSizes,
    shared: bool,
    seed: u64,
) -> u64 {
    let Place {
        page: p,
        block,
        base,
        pa,
    } = place(&format);
    let mut world = World::<F, C, LOG2>::new(format, sizes, shared, seed);
    world.track_dirty();
    // Pages, groups where the format has them, and a block, over a border of tables.
    let range = Span::new(base - 40 * p, block + 60 * p);
    world.map(range.start, &[Span::new(pa - 40 * p, range.len)]);
    world.harvest(range);
    let part = Span::new(base - 32 * p, block + 48 * p);
    world.protect(part, Prot::READ);
    world.harvest(range);
    world.protect(part, Prot::RW);
    world.protect(part, Prot::RW);
    world.harvest(part);
    world.unmap_tracked(Span::new(base, block));
    world.harvest(Span::new(base - 40 * p, 40 * p));
    // A table that is removed whole, with what is in it.
    world.map(base, &[Span::new(pa + p, 20 * p)]);
    world.protect(Span::new(base, 20 * p), Prot::READ);
    world.protect(Span::new(base, 20 * p), Prot::RW);
    world.unmap_tracked(Span::new(base, block));
    world.unmap_tracked(range);
    world.finish()
}

/// A clean table that a large leaf replaces is written to through the unit's cache, until the flush.
fn merge_while_written<F: Format, C: Cell + Default + 'static, const LOG2: u32>(
    format: F,
    sizes: PageSizes,
    shared: bool,
) {
    let Place {
        page: p,
        block,
        base,
        pa,
    } = place(&format);
    let mut world = World::<F, C, LOG2>::new(format, sizes, shared, 5);
    let range = Span::new(base, block);
    // Two halves, so that it is not one leaf from the beginning.
    let map = |world: &mut World<F, C, LOG2>| {
        world.idle();
        world.map(base, &[Span::new(pa, block - p)]);
        world.map(base + block - p, &[Span::new(pa + block - p, p)]);
    };
    for written in [None, Some(base + 7 * p)] {
        map(&mut world);
        let (before, after) = world.merge_while_written(range, written);
        assert_eq!(world.leaves(range), [block]);
        assert!(!before);
        let expected = format.keeps_dirty() && written.is_some();
        assert_eq!(after, expected, "{written:x?}");
        world.unmap(range);
    }
    // In place, it is lost which part was written: all of it counts as dirty. Leaves that were
    // only broken are there again as they were.
    map(&mut world);
    let dirty = world.merge_without_flush(range);
    let in_place = format.break_before_make() == BreakBeforeMake::NotNeeded;
    assert_eq!(dirty, format.keeps_dirty() && in_place);
    world.unmap(range);
    world.finish();
}

/// The script of mapping and unmapping, in both forms, with some seeds.
macro_rules! map_steps {
    ($format:expr, $cell:ty, $log2:literal, $sizes:expr) => {
        #[test]
        fn every_store_of_map_and_unmap_shows_the_old_or_the_new_translation() {
            for seed in 1..=SEEDS {
                for shared in [false, true] {
                    let format = $format;
                    let stops = map_and_unmap::<_, $cell, $log2>(format, $sizes, shared, seed * 77);
                    assert!(stops > 150, "only {stops} stores were looked at");
                }
            }
        }
    };
}

/// All scripts.
macro_rules! steps {
    ($($name:ident: $format:expr, $cell:ty, $log2:literal, $sizes:expr;)*) => {$(
        mod $name {
            use super::*;

            map_steps!($format, $cell, $log2, $sizes);

            #[test]
            fn every_store_of_harvest_protect_and_unmap_keeps_dirty_state() {
                for seed in 1..=SEEDS {
                    for shared in [false, true] {
                        let format = $format;
                        if format.keeps_dirty() {
                            let stops = track::<_, $cell, $log2>(format, $sizes, shared, seed * 991);
                            assert!(stops > 100, "only {stops} stores were looked at");
                        }
                    }
                }
            }

            #[test]
            fn what_is_written_through_a_table_that_a_leaf_has_replaced_is_not_lost() {
                merge_while_written::<_, $cell, $log2>($format, $sizes, false);
                merge_while_written::<_, $cell, $log2>($format, $sizes, true);
            }

            #[test]
            fn every_store_of_split_cut_and_merge_keeps_translations_and_dirty_bits() {
                for seed in 1..=SEEDS {
                    for shared in [false, true] {
                        let stops =
                            resize::<_, $cell, $log2>($format, $sizes, shared, seed * 1_234_567);
                        assert!(stops > 500, "only {stops} stores were looked at");
                    }
                }
            }
        }
    )*};
}

/// Formats with leaves of one size: there is nothing to split or merge.
macro_rules! steps_of_one_size {
    ($($name:ident: $format:expr, $cell:ty, $log2:literal;)*) => {$(
        mod $name {
            use super::*;

            map_steps!($format, $cell, $log2, ALL);
        }
    )*};
}

const IN_PLACE: ArmOptions = ArmOptions {
    dirty: true,
    break_before_make: BreakBeforeMake::NotNeeded,
    ..ArmOptions::PLAIN
};
const MARKED: ArmOptions = ArmOptions {
    break_before_make: BreakBeforeMake::Marked,
    ..IN_PLACE
};
const BROKEN: ArmOptions = ArmOptions {
    break_before_make: BreakBeforeMake::Always,
    ..IN_PLACE
};
const OWN: PageSizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);

/// Operations in an interrupt handler are the same in every format: some formats are enough.
macro_rules! interrupts {
    ($($name:ident: $format:expr;)*) => {$(
        #[test]
        fn $name() {
            interrupts::at_every_store::<_, AtomicU64, 12>($format, ALL);
        }
    )*};
}

interrupts! {
    amdv1_is_interrupted_at_every_store: AmdV1::new(4).unwrap();
    vtd_ss_is_interrupted_at_every_store: VtdSs::new(3).unwrap();
    arm_s1_4k_is_interrupted_at_every_store:
        ArmStage1::<K4>::new(48, 48).unwrap().with_options(IN_PLACE);
}

steps! {
    amdv1: AmdV1::new(4).unwrap(), AtomicU64, 12, ALL;
    amdv1_without_groups: AmdV1::new(6).unwrap(), AtomicU64, 12, OWN;
    x86_64: X86_64::new(4).unwrap(), AtomicU64, 12, ALL;
    vtd_ss: VtdSs::new(3).unwrap(), AtomicU64, 12, ALL;
    arm_s1_4k: ArmStage1::<K4>::new(48, 48).unwrap().with_options(IN_PLACE), AtomicU64, 12, ALL;
    arm_s1_4k_marked: ArmStage1::<K4>::new(39, 40).unwrap().with_options(MARKED), AtomicU64, 12, ALL;
    arm_s1_4k_broken: ArmStage1::<K4>::new(42, 48).unwrap().with_options(BROKEN), AtomicU64, 12, ALL;
    arm_s2_4k: ArmStage2::<K4>::new(42, 48).unwrap().with_options(IN_PLACE), AtomicU64, 12, ALL;
    arm_s2_16k: ArmStage2::<K16>::new(48, 48).unwrap().with_options(IN_PLACE), AtomicU64, 14, ALL;
    arm_s1_64k: ArmStage1::<K64>::new(48, 48).unwrap().with_options(IN_PLACE), AtomicU64, 16, ALL;
    riscv: RiscV::new(3).unwrap().with_hardware_updates(true), AtomicU64, 12, ALL;
    riscv_g: RiscVG::new(4).unwrap().with_hardware_updates(true), AtomicU64, 12, ALL;
    armv7s: <ArmV7s>::new(), AtomicU32, 10, ALL;
}

steps_of_one_size! {
    dart1: Dart1::new(2, 36).unwrap(), AtomicU64, 14;
    dart1_4k: Dart1Page4K::new(2, 32).unwrap(), AtomicU64, 12;
    dart2: Dart2::new(2, 38).unwrap(), AtomicU64, 14;
    dart2_3_levels: Dart2::new(3, 42).unwrap(), AtomicU64, 14;
}

/// After each store of growing, what was mapped is there through every root that a unit may know:
/// the old one, and the one that the table has at that moment.
#[test]
fn a_growing_top_shows_the_old_translations_after_every_store() {
    const PAGE: u64 = 4096;
    let tables = Tables::<AtomicU64, 12>::new(64, 1 << 46);
    for used_before in [false, true] {
        for (from, to) in [(1, 2), (1, 6), (2, 3), (3, 6)] {
            let mut table = Table::new(AmdV1::new(from).unwrap(), &tables.0).unwrap();
            for page in [0, 3, 511] {
                let run = Span::new((100 + page) * PAGE, PAGE);
                table.map(page * PAGE, &[run], Prot::RW).unwrap();
            }
            if used_before {
                let mut used = Chain::empty();
                for _ in 0..6 {
                    let table = tables.0.allocate(4096).unwrap();
                    let cells = tables.0.entries(table, 512);
                    cells.iter().for_each(|cell| cell.set(u64::MAX));
                    used.push(&tables.0, table);
                }
                tables.0.reclaim(used);
            }
            let check = move |root| {
                for page in 0..600 {
                    let found = Walker::new(root).walk(tables, page * PAGE, Access::Read, &mut ());
                    let pa = found.ok().map(|found| found.pa);
                    let known = [0, 3, 511].contains(&page);
                    assert_eq!(pa, known.then_some((100 + page) * PAGE), "{root:?} {page}");
                }
            };
            let old = table.root();
            let stops = std::rc::Rc::new(std::cell::Cell::new(0));
            let counter = std::rc::Rc::clone(&stops);
            let stop = move |when| {
                if let When::After { read } = when {
                    counter.set(counter.get() + 1);
                    if read {
                        read_anew();
                        check(old);
                    }
                }
            };
            any_entry_counts();
            let mut gather = Gather::new();
            let new = with_stop(stop, || table.grow(to, &mut gather).unwrap());
            check(old);
            check(new);
            assert_eq!(new.levels, to);
            assert!(
                stops.get() > u32::from(to - from),
                "the stores were looked at"
            );
            table.reclaim(gather.never_walked());
            let (gather, memory) = table.tear_down();
            memory.reclaim(gather.never_walked().into_tables());
            assert_eq!(tables.0.in_use(), 0);
        }
    }
}

#[test]
fn the_walker_sees_a_table_as_soon_as_it_is_linked() {
    // Assumption of this suite: nothing of a table counts before it is linked, and then all does.
    let tables = Tables::<AtomicU64, 12>::new(16, 1 << 46);
    let table = Table::new(VtdSs::new(4).unwrap(), &tables.0).unwrap();
    let below = tables.0.allocate(4096).unwrap();
    let cells = tables.0.entries(table.root().address, 512);
    let seen = || {
        let found = Walker::new(table.root()).walk(tables, 0, Access::Read, &mut ());
        found.ok().map(|found| found.pa)
    };
    let leaf = 0x1000 | 3 | 1 << 7;
    tables.0.entries(below, 512)[0].set(leaf);
    assert_eq!(seen(), None);
    cells[0].set(below | 3);
    assert!(
        seen().is_none(),
        "a large leaf at an address that is not its"
    );
    tables.0.entries(below, 512)[0].set(0x4000_0000 | 3 | 1 << 7);
    assert_eq!(seen(), Some(0x4000_0000));
    assert!(tables.read_u64(below).is_ok());
}
