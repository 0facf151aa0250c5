//! One suite, instantiated per format by one line.

mod arm_sizes;
#[macro_use]
pub(crate) mod cases;
pub(crate) mod dirty;
pub(crate) mod model;
mod planned;
pub(crate) mod requests;
mod resize;
mod world;

use std::sync::atomic::AtomicU32;

use iopt::{Format, HeapArena, TableMemory, WideCell};
use proptest::prelude::*;

pub(crate) use world::{World, on, owning};

/// One step of a random sequence. Numbers are raw and turned into addresses by [`World`].
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Map {
        place: usize,
        page: u64,
        runs: Vec<(u64, usize, u64)>,
        prot: usize,
    },
    Unmap {
        first: usize,
        count: usize,
        cut: (u64, u64),
        holes: bool,
    },
    UnmapRaw {
        place: usize,
        page: u64,
        pages: u64,
        holes: bool,
    },
    Resize(resize::Resize),
    Keep(bool),
    Dirty(dirty::DirtyOp),
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let run = (0u64..1024, 0usize..6, 1u64..40);
    prop_oneof![
        4 => (0usize..5, 0u64..2048, prop::collection::vec(run, 1..5), 0usize..3)
            .prop_map(|(place, page, runs, prot)| Op::Map { place, page, runs, prot }),
        3 => (any::<prop::sample::Index>(), 1usize..900, (0u64..3, 0u64..3), any::<bool>())
            .prop_map(|(first, count, cut, holes)| {
                Op::Unmap { first: first.index(1 << 20), count, cut, holes }
            }),
        4 => dirty::dirty_op().prop_map(Op::Dirty),
        1 => (0usize..5, 0u64..2048, 1u64..1200, any::<bool>())
            .prop_map(|(place, page, pages, holes)| Op::UnmapRaw { place, page, pages, holes }),
        3 => resize::resize().prop_map(Op::Resize),
        1 => any::<bool>().prop_map(Op::Keep),
    ]
}

/// Table memory of the suites: an arena on the heap with the cells and tables of a format.
pub(crate) trait Tables: TableMemory + Sized {
    /// Room for at least so many tables, at addresses of no more than `bits` bits.
    fn room_for(tables: u64, bits: u32) -> Self;
    /// Tables that are handed out.
    fn used(&self) -> u64;
    /// The entry at an address.
    fn word(&self, address: u64) -> u64;
}

macro_rules! tables {
    ($($cell:ty, $log2:literal;)*) => {$(
        impl Tables for HeapArena<$cell, $log2> {
            fn room_for(tables: u64, bits: u32) -> Self {
                Self::with_tables_at(tables, 1 << (bits - 1).min(46)).unwrap()
            }
            fn used(&self) -> u64 {
                self.in_use()
            }
            fn word(&self, address: u64) -> u64 {
                self.read(address).unwrap()
            }
        }
    )*};
}
tables! {
    WideCell, 12;
    WideCell, 14;
    WideCell, 16;
    AtomicU32, 10;
}

/// A step of a random sequence that would make more leaves than that is left out: the whole table is compared
/// with the model at each step, so that a sequence costs what its table holds. Enough for a leaf that is split
/// into all entries of a table, beside others, but for 64 KiB tables of one-page leaves.
pub(crate) const LEAVES: usize = 4096;

/// How many random sequences: fewer where tables are large, since all are compared at each step. Each run of
/// `cargo xtask properties` tries others.
pub(crate) const fn cases<A: TableMemory>() -> u32 {
    if A::TABLE_BYTES < 1 << 16 { 24 } else { 10 }
}

/// Bytes of the smallest page.
pub(crate) const fn page<F: Format>() -> u64 {
    1 << F::GRANULE_LOG2
}

/// How many tables' worth of memory the root takes.
pub(crate) fn root_tables<F: Format>(format: &F) -> u64 {
    let bytes = format.entries(usize::from(format.levels()) - 1) * F::ENTRY_BYTES;
    (bytes as u64).div_ceil(F::TABLE_BYTES)
}

/// The suite for one format.
macro_rules! suite {
    ($name:ident, $format:expr, $sizes:expr) => {
        suite!($name, $format, $sizes, HeapTables);
    };
    ($name:ident, $format:expr, $sizes:expr, $tables:ty) => {
        mod $name {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig {
                    cases: $crate::suite::cases::<$tables>(),
                    ..ProptestConfig::default()
                })]

                #[test]
                fn random_sequences_match_the_model(ops in prop::collection::vec(op(), 1..40)) {
                    let format = $format;
                    let bits = iopt::Format::output_bits(&format);
                    let memory = <$tables as $crate::suite::Tables>::room_for(1 << 12, bits);
                    let mut world = <World<_, _>>::new(format, $sizes, &memory);
                    for op in &ops {
                        world.apply(op);
                    }
                    world.finish();
                }
            }

            #[test]
            fn an_allocator_that_fails_at_any_page_changes_nothing() {
                $crate::suite::requests::failing_allocator::<_, $tables>($format, $sizes);
            }

            #[test]
            fn a_request_is_refused_for_what_is_wrong_with_it() {
                $crate::suite::requests::refusals::<_, $tables>($format);
            }

            #[test]
            fn harvest_finds_every_write() {
                $crate::suite::dirty::harvest_finds_every_write::<_, $tables>($format, $sizes);
            }

            #[test]
            fn every_leaf_size_is_used_where_it_fits_and_not_a_page_sooner() {
                $crate::suite::requests::leaf_sizes::<_, $tables>($format);
            }

            cases! {
                $format, $sizes, $tables;
                index_bits_of_all_levels_tile_the_address
                table_pointers_come_back_at_every_level
                every_level_has_its_own_sizes
                every_size_at_any_output_address_is_one_leaf_with_right_entries
                permissions_survive_beside_what_hardware_notes
                a_leaf_is_dirty_when_one_of_its_entries_is
                empty_tables_become_larger_leaves
                a_small_unmap_at_the_start_of_a_large_leaf
                a_thousand_random_ranges_are_right_page_by_page
                leaves_change_their_size_at_a_boundary
                fourteen_small_three_large_and_three_small_are_twenty_leaves
            }
        }
    };
}
