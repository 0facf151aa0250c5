//! Leaves get other sizes where a unit walks some of a format's sizes only.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use iopt::format::{AmdV1, ArmStage1, ArmStage2, ArmV7s, K4, K16, K64, RiscV, X86_64};
use iopt::{
    AnyTable, Format, Gather, HeapArena, Interruption, Leaf, NoRuns, Pending, Prot, ResizeError,
    Table,
};
use proptest::prelude::*;
use runs::{Iova, PageSizes, Span};

/// One mapped region, of which only leaves change.
struct Case {
    table: AnyTable,
    sizes: PageSizes,
    region: Span<Iova>,
    /// From device to physical addresses.
    offset: u64,
}

/// An operation; numbers choose among what there is.
#[derive(Clone, Debug)]
enum Op {
    Split(u64, u64, u64),
    Cut(u64),
    Merge(u64, u64),
    Protect(u64),
    Harvest,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (any::<u64>(), any::<u64>(), any::<u64>())
            .prop_map(|(at, len, size)| Op::Split(at, len, size)),
        any::<u64>().prop_map(Op::Cut),
        (any::<u64>(), any::<u64>()).prop_map(|(at, len)| Op::Merge(at, len)),
        any::<u64>().prop_map(Op::Protect),
        Just(Op::Harvest),
    ]
}

/// No more leaves than this many of the smallest size.
const MOST: u64 = 1 << 14;

impl Case {
    /// `chosen` has a bit for each size of the format, and `units` is how many of the largest chosen one are mapped.
    fn new(
        all: PageSizes,
        chosen: u64,
        units: u64,
        build: impl FnOnce(PageSizes) -> AnyTable,
    ) -> Self {
        let page = all.smallest();
        let bits = all.iter().enumerate().filter(|(nth, size)| {
            *size == page || (chosen >> nth & 1 != 0 && *size <= page * MOST / 4)
        });
        let sizes = PageSizes::from_bits(bits.map(|(_, size)| size).sum());
        let largest = sizes.iter().last().unwrap();
        let region = Span::new(4 * largest, units * largest);
        let table = build(sizes);
        assert_eq!(table.page_sizes(), sizes);
        let offset = 4 * largest;
        table
            .map(
                region.start,
                &[Span::new(region.start + offset, region.len)],
                Prot::RW,
            )
            .unwrap();
        Self {
            table,
            sizes,
            region,
            offset,
        }
    }

    fn leaves(&self) -> Vec<Leaf> {
        let mut leaves = Vec::new();
        self.table
            .for_each_leaf(self.region, |leaf| leaves.push(leaf));
        leaves
    }

    /// Some range of whole pages.
    fn range(&self, at: u64, len: u64) -> Span<Iova> {
        let page = self.sizes.smallest();
        let all = self.region.len / page;
        let first = at % all;
        let count = 1 + len % (all - first);
        Span::new(self.region.start + first * page, count * page)
    }

    fn apply(&mut self, op: &Op) {
        let mut gather = Gather::new();
        let flush = |_: &iopt::Invalidation| Ok::<(), ()>(());
        let allowed = Interruption::Allowed;
        match *op {
            Op::Split(at, len, nth) => {
                let sizes: Vec<u64> = self.sizes.iter().collect();
                let size = sizes[nth as usize % sizes.len()];
                let range = self.range(at, len);
                self.table
                    .split(range, size, allowed, &mut gather, flush)
                    .unwrap();
                let over = |leaf: &Leaf| leaf.run.input().overlaps(&range);
                assert!(
                    self.leaves()
                        .iter()
                        .filter(|leaf| over(leaf))
                        .all(|leaf| leaf.run.len <= size)
                );
            }
            Op::Cut(at) => {
                let at = self.range(at, 0).start;
                self.table.cut(at, allowed, &mut gather, flush).unwrap();
                assert!(self.leaves().iter().any(|leaf| leaf.run.iova == at));
            }
            Op::Merge(at, len) => {
                let range = self.range(at, len);
                self.table
                    .merge(range, allowed, &mut gather, flush)
                    .unwrap();
            }
            Op::Protect(nth) => {
                let leaves = self.leaves();
                let leaf = leaves[nth as usize % leaves.len()];
                let other = if leaf.prot.contains(Prot::WRITE) {
                    Prot::READ
                } else {
                    Prot::RW
                };
                self.table
                    .protect(leaf.run.input(), other, &mut gather)
                    .unwrap();
            }
            Op::Harvest => {
                let page = self.sizes.smallest();
                let words = vec![0; self.region.len.div_ceil(page * 64) as usize];
                let mut pending = Pending::new(words, self.region, page).unwrap();
                // Refused where dirty bits are not kept.
                let _ = self.table.harvest(self.region, &mut pending);
            }
        }
        self.table.reclaim(gather.never_walked());
        self.check(op);
    }

    /// Every address leads where it led, by leaves of the sizes that there are, and no table is one too many.
    fn check(&self, op: &Op) {
        let mut next = self.region.start;
        for leaf in self.leaves() {
            let run = leaf.run;
            assert_eq!((run.iova, run.pa), (next, next + self.offset), "{op:?}");
            assert!(self.sizes.contains(run.len), "{op:?}: {run}");
            assert_eq!(
                self.table.translate(run.iova + run.len / 2),
                Some(run.pa + run.len / 2)
            );
            next += run.len;
        }
        assert_eq!(next, self.region.start + self.region.len, "{op:?}");
    }

    fn end(self) {
        let mut gather = Gather::new();
        let owner = self.table.alone();
        let unmapped = owner.unmap_mapped(self.region, &mut gather, &mut NoRuns);
        assert_eq!(unmapped, Ok(self.region.len));
        self.table.reclaim(gather.never_walked());
        assert_eq!(self.table.tables(), 1);
    }
}

macro_rules! each_subset {
    ($($name:ident: $format:expr, $cell:ty, $log2:literal;)*) => {$(
        proptest! {
            #[test]
            fn $name(
                chosen in any::<u64>(),
                units in 1..4u64,
                ops in prop::collection::vec(op(), 1..12),
            ) {
                let format = $format;
                // Below the addresses of every format.
                let base = 1u64 << (format.table_bits() - 1).min(46);
                let arena = || Arc::new(HeapArena::<$cell, $log2>::with_tables_at(600, base).unwrap());
                let all = Table::new(format, arena()).unwrap().page_sizes();
                let mut case = Case::new(all, chosen, units, |sizes| {
                    AnyTable::new(format.id(), format.levels(), sizes, arena()).unwrap()
                });
                for op in &ops {
                    case.apply(op);
                }
                case.end();
            }
        }
    )*};
}

each_subset! {
    amd_v1: AmdV1::new(4).unwrap(), AtomicU64, 12;
    x86_64: X86_64::new(4).unwrap(), AtomicU64, 12;
    arm_s1_4k: ArmStage1::<K4>::new(48, 48).unwrap(), AtomicU64, 12;
    arm_s2_16k: ArmStage2::<K16>::new(40, 40).unwrap(), AtomicU64, 14;
    arm_s1_64k: ArmStage1::<K64>::new(48, 48).unwrap(), AtomicU64, 16;
    armv7s: <ArmV7s>::new(), AtomicU32, 10;
    riscv_sv39: RiscV::new(3).unwrap(), AtomicU64, 12;
}

/// The level's own size, 2 MiB, is not among them, and a leaf of 8 MiB has four entries of that level.
#[test]
fn amd_leaves_of_several_entries_are_cut_and_split_without_the_level_s_own_size() {
    const M4: u64 = 4 << 20;
    let sizes = PageSizes::from_bits(4096 | M4 | (2 * M4));
    for split in [false, true] {
        let memory = Arc::new(HeapArena::<AtomicU64, 12>::with_tables(64).unwrap());
        let format = AmdV1::new(4).unwrap();
        let table = AnyTable::new(format.id(), format.levels(), sizes, memory).unwrap();
        let all = Span::new(0, 2 * M4);
        table
            .map(0, &[Span::new(2 * M4, 2 * M4)], Prot::RW)
            .unwrap();
        let mut gather = Gather::new();
        let flush = |_: &iopt::Invalidation| Ok::<(), ()>(());
        let done: Result<(), ResizeError<()>> = match split {
            false => table.cut(4096, Interruption::Refused, &mut gather, flush),
            true => table.split(all, M4, Interruption::Refused, &mut gather, flush),
        };
        assert_eq!(done, Ok(()));
        let mut lens = Vec::new();
        table.for_each_leaf(all, |leaf| lens.push(leaf.run.len));
        match split {
            true => assert_eq!((lens, table.tables()), (vec![M4, M4], 3)),
            false => {
                assert_eq!((lens.len(), lens.last()), (1025, Some(&M4)));
                assert_eq!(table.tables(), 5);
            }
        }
        let owner = table.alone();
        assert_eq!(
            owner.unmap_mapped(all, &mut gather, &mut NoRuns),
            Ok(2 * M4)
        );
        table.reclaim(gather.never_walked());
        assert_eq!(table.tables(), 1);
    }
}
