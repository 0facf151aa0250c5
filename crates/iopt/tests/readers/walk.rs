//! The walker finds in the engine's tables what the engine put there, over all formats.
//!
//! The two share nothing but the names of the formats: one writes words from the formats' files,
//! the other reads them from the specifications (DART: from what others have observed).

use std::sync::atomic::{AtomicU32, AtomicU64};

use iopt::format::{
    AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart1Page4K, Dart2, K4, K4Lpa2, K16,
    K16Lpa2, K64, K64Lpa, RiscV, RiscVG, VtdSs, X86_64,
};
use iopt::walk::{Access, Says, ScanStep, WalkMemory, WalkReason, Walker};
use iopt::{Format, Gather, HeapArena, Leaf, Prot, Table, TableMemory, TableOps as _};
use proptest::prelude::*;
use runs::{Iova, Run, Span};

/// A stretch to map, in raw numbers.
#[derive(Clone, Debug)]
struct Stretch {
    place: usize,
    offset: u64,
    pages: u64,
    size: usize,
    aligned: bool,
    target: u64,
    prot: usize,
    unmap: bool,
}

fn stretch() -> impl Strategy<Value = Stretch> {
    let what = (0..4usize, 0..4096u64, 1..100u64, 0..8usize, any::<bool>());
    (what, any::<u64>(), 0..64usize, prop::bool::weighted(0.2)).prop_map(
        |((place, offset, pages, size, aligned), target, prot, unmap)| Stretch {
            place,
            offset,
            pages,
            size,
            aligned,
            target,
            prot,
            unmap,
        },
    )
}

/// Permissions of a leaf as the walker of a format returns them.
const ALL: Prot = Prot::all();
/// It says nothing of memory types.
const NO_TYPES: Prot = Prot::RW.union(Prot::EXECUTE).union(Prot::PRIVILEGED);

fn compare<F: Format, A: TableMemory + WalkMemory>(
    format: F,
    memory: &A,
    told: Prot,
    encryption: u32,
    stretches: &[Stretch],
) {
    let mut table = Table::new(format, memory).unwrap();
    let walker = Walker::new(table.root()).with_encryption_bit(encryption);
    let prots: Vec<Prot> = (0..=Prot::all().bits())
        .map(Prot::from_bits_truncate)
        .filter(|prot| format.leaf_bits(*prot).is_some())
        .collect();
    let sizes: Vec<u64> = table.page_sizes().iter().collect();
    let spans: Vec<Span<Iova>> = format.aperture().spans().collect();
    let (first, last) = (spans[0], spans[spans.len() - 1]);
    let output_mask = (1u64 << format.output_bits()) - 1;
    let page = sizes[0];
    let mut probes = Vec::new();
    for s in stretches {
        let size = sizes[s.size % sizes.len()];
        let unit = if s.aligned { size } else { page };
        let near = (s.offset * page) & !(unit - 1);
        let iova = match s.place {
            0 => first.start.wrapping_add(near),
            // The upper half of the first span, and the ends of both.
            1 => (first.start + first.len / 2).wrapping_add(near),
            2 => first.last() & !(unit - 1),
            _ => last.last() & !(unit - 1),
        };
        let count = if size > page && s.aligned { 1 } else { s.pages };
        let pa = s.target & output_mask & !(unit - 1);
        let run = Span::new(pa, unit * count.min(3).max(count));
        // Runs that overlap or do not fit are refused: then there is nothing new to look at.
        let _ = table.map(iova, &[run], prots[s.prot % prots.len()]);
        probes.extend([
            iova.wrapping_sub(1),
            iova,
            iova ^ s.target & 0xfff_ffff,
            iova.wrapping_add(run.len),
            s.target,
            !s.target,
        ]);
        if s.unmap
            && let Some(leaf) = table.leaf_at(iova)
        {
            let mut gather = Gather::new();
            table
                .unmap(leaf.run.input(), &mut gather, &mut iopt::NoRuns)
                .unwrap();
            let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
            table.reclaim(flushed);
        }
    }
    let leaves: Vec<Leaf> = spans.iter().flat_map(|span| table.leaves(*span)).collect();
    let runs: Vec<Run> = leaves.iter().map(|leaf| leaf.run).collect();
    assert_eq!(scanned(&walker, memory), runs);
    for leaf in leaves.iter().step_by(leaves.len() / 200 + 1) {
        let run = leaf.run;
        probes.extend([
            run.iova,
            run.iova + run.len / 3,
            run.input().last(),
            run.iova.wrapping_sub(1),
            run.input().last().wrapping_add(1),
        ]);
    }
    for iova in probes {
        compare_at(&table, walker, memory, told, iova);
    }
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
}

/// The leaves that a scan meets; one of several entries is met as often, and is said once.
fn scanned(walker: &Walker, memory: &impl WalkMemory) -> Vec<Run> {
    let mut found: Vec<Run> = Vec::new();
    let scan = walker.scan(memory, |entry| {
        match entry.says {
            Ok(Says::Leaf(page)) if found.last() != Some(&page) => found.push(page),
            Ok(_) => {}
            Err(reason) => panic!("{entry:?}: {reason}"),
        }
        ScanStep::Into
    });
    scan.unwrap();
    found
}

fn compare_at<F: Format, A: TableMemory + WalkMemory>(
    table: &Table<F, &A>,
    walker: Walker,
    memory: &A,
    told: Prot,
    iova: u64,
) {
    let leaf = table.leaf_at(iova);
    // Pages for privileged requests are walked for such a request.
    let privileged = leaf.is_some_and(|leaf| leaf.prot.contains(Prot::PRIVILEGED));
    let aperture = table.format().aperture();
    assert_eq!(walker.aperture(), Some(aperture));
    for access in [Access::Read, Access::Write] {
        let found = walker
            .with_privileged_requests(privileged)
            .walk(memory, iova, access, &mut ());
        match (leaf, found) {
            (Some(leaf), Ok(found)) => {
                assert!(leaf.prot.contains(access.needs()), "{access} of {leaf:?}");
                assert_eq!(Some(found.pa), table.translate(iova));
                assert_eq!((found.page, found.level), (leaf.run, leaf.level));
                assert_eq!(found.open, leaf.run.input());
                assert_eq!(found.prot & told, leaf.prot & told, "{iova:#x}");
                if privileged {
                    let user = walker.walk(memory, iova, access, &mut ());
                    let reason = user.unwrap_err().reason;
                    assert!(matches!(reason, WalkReason::Denied { .. }));
                }
            }
            (Some(leaf), Err(fault)) => {
                assert!(!leaf.prot.contains(access.needs()), "{fault}: {leaf:?}");
                assert!(
                    matches!(fault.reason, WalkReason::Denied { .. }),
                    "{fault}: {leaf:?}"
                );
            }
            (None, Ok(found)) => panic!("{iova:#x} is not mapped, found {found:?}"),
            (None, Err(fault)) => match fault.reason {
                WalkReason::NotPresent => assert!(aperture.covers(&Span::new(iova, 1))),
                WalkReason::OutsideAperture { .. } => {
                    assert!(!aperture.covers(&Span::new(iova, 1)));
                }
                other => panic!("{iova:#x} is not mapped: {other:?}"),
            },
        }
    }
}

macro_rules! walks {
    ($($name:ident, $format:expr, $cell:ty, $log2:literal, $told:expr $(, C-bit $bit:literal)?;)*) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
            $(
                #[test]
                fn $name(stretches in prop::collection::vec(stretch(), 1..24)) {
                    let format = $format;
                    let bits = Format::output_bits(&format);
                    let base = 1 << (bits - 1).min(46);
                    let memory = HeapArena::<$cell, $log2>::with_tables_at(1 << 12, base).unwrap();
                    #[allow(unused_mut, unused_assignments, reason = "most have no such bit")]
                    let mut encryption = NO_BIT;
                    $(encryption = $bit;)?
                    compare(format, &memory, $told, encryption, &stretches);
                }
            )*
        }
    };
}

/// Tables are not encrypted.
const NO_BIT: u32 = 64;

const DIRTY: fn(ArmOptions) -> ArmOptions = |options| ArmOptions {
    dirty: true,
    ..options
};

walks! {
    amdv1, AmdV1::new(4).unwrap(), AtomicU64, 12, ALL;
    amdv1_6_levels, AmdV1::new(6).unwrap(), AtomicU64, 12, ALL;
    x86_64, X86_64::new(4).unwrap(), AtomicU64, 12, ALL;
    x86_64_5_levels, X86_64::new(5).unwrap(), AtomicU64, 12, ALL;
    amdv1_encrypted,
        AmdV1::new(5).unwrap().with_encrypted_tables(47).unwrap(),
        AtomicU64, 12, ALL, C-bit 47;
    x86_64_encrypted,
        X86_64::new(4).unwrap().with_encrypted_tables(51).unwrap(),
        AtomicU64, 12, ALL, C-bit 51;
    vtd_ss_3_levels, VtdSs::new(3).unwrap(), AtomicU64, 12, ALL;
    vtd_ss, VtdSs::new(4).unwrap(), AtomicU64, 12, ALL;
    vtd_ss_5_levels, VtdSs::new(5).unwrap(), AtomicU64, 12, ALL;

    arm_s1_4k, ArmStage1::<K4>::new(48, 48).unwrap(), AtomicU64, 12, NO_TYPES;
    arm_s1_4k_32, ArmStage1::<K4>::new(32, 40).unwrap(), AtomicU64, 12, NO_TYPES;
    arm_s1_4k_upper, ArmStage1::<K4>::new(39, 48).unwrap().upper(), AtomicU64, 12, NO_TYPES;
    arm_s1_4k_dirty,
        ArmStage1::<K4>::new(42, 48).unwrap().with_options(DIRTY(ArmOptions::default())),
        AtomicU64, 12, NO_TYPES;
    arm_s1_4k_lpa2, ArmStage1::<K4Lpa2>::new(52, K4_BITS).unwrap(), AtomicU64, 12, NO_TYPES;
    arm_s1_16k, ArmStage1::<K16>::new(48, 48).unwrap(), AtomicU64, 14, NO_TYPES;
    arm_s1_16k_47, ArmStage1::<K16>::new(47, 48).unwrap(), AtomicU64, 14, NO_TYPES;
    arm_s1_16k_lpa2, ArmStage1::<K16Lpa2>::new(52, K16_BITS).unwrap(), AtomicU64, 14, NO_TYPES;
    arm_s1_64k, ArmStage1::<K64>::new(48, 48).unwrap(), AtomicU64, 16, NO_TYPES;
    arm_s1_64k_upper, ArmStage1::<K64>::new(42, 48).unwrap().upper(), AtomicU64, 16, NO_TYPES;
    arm_s1_64k_lpa, ArmStage1::<K64Lpa>::new(52, K64_BITS).unwrap(), AtomicU64, 16, NO_TYPES;
    arm_s2_4k, ArmStage2::<K4>::new(40, 48).unwrap(), AtomicU64, 12, NO_TYPES;
    arm_s2_4k_4_levels,
        ArmStage2::<K4>::new(40, 48).unwrap().with_levels(4).unwrap(),
        AtomicU64, 12, NO_TYPES;
    arm_s2_4k_dirty,
        ArmStage2::<K4>::new(43, 44).unwrap().with_options(DIRTY(ArmOptions::default())),
        AtomicU64, 12, NO_TYPES;
    arm_s2_4k_lpa2, ArmStage2::<K4Lpa2>::new(52, K4_BITS).unwrap(), AtomicU64, 12, NO_TYPES;
    arm_s2_16k, ArmStage2::<K16>::new(48, 48).unwrap(), AtomicU64, 14, NO_TYPES;
    arm_s2_16k_lpa2, ArmStage2::<K16Lpa2>::new(51, K16_BITS).unwrap(), AtomicU64, 14, NO_TYPES;
    arm_s2_64k, ArmStage2::<K64>::new(46, 48).unwrap(), AtomicU64, 16, NO_TYPES;
    arm_s2_64k_lpa, ArmStage2::<K64Lpa>::new(52, K64_BITS).unwrap(), AtomicU64, 16, NO_TYPES;

    armv7s, <ArmV7s>::new(), AtomicU32, 10, NO_TYPES;
    armv7s_domain_9, ArmV7s::<9>::new(), AtomicU32, 10, NO_TYPES;
    riscv_sv39, RiscV::new(3).unwrap().with_memory_types(true), AtomicU64, 12, ALL;
    riscv_sv48, RiscV::new(4).unwrap().with_hardware_updates(true), AtomicU64, 12, ALL;
    riscv_sv57, RiscV::new(5).unwrap().with_supervisor_requests(true), AtomicU64, 12, ALL;
    riscv_sv39x4, RiscVG::new(3).unwrap(), AtomicU64, 12, ALL;
    riscv_sv48x4, RiscVG::new(4).unwrap().with_memory_types(true), AtomicU64, 12, ALL;
    riscv_sv57x4, RiscVG::new(5).unwrap().with_hardware_updates(true), AtomicU64, 12, ALL;

    dart1, Dart1::new(2, 36).unwrap(), AtomicU64, 14, ALL;
    dart1_32, Dart1::new(2, 32).unwrap(), AtomicU64, 14, ALL;
    dart1_with_four_roots, Dart1::new(2, 38).unwrap(), AtomicU64, 14, ALL;
    dart1_4k_with_four_roots, Dart1Page4K::new(2, 32).unwrap(), AtomicU64, 12, ALL;
    dart1_4k_3_levels, Dart1Page4K::new(3, 36).unwrap(), AtomicU64, 12, ALL;
    dart2, Dart2::new(2, 36).unwrap(), AtomicU64, 14, ALL;
    dart2_with_two_roots, Dart2::new(2, 37).unwrap(), AtomicU64, 14, ALL;
    dart2_3_levels, Dart2::new(3, 42).unwrap(), AtomicU64, 14, ALL;
}

/// Output addresses as wide as the formats offer them.
const K4_BITS: u32 = <ArmStage1<K4Lpa2> as Format>::OUTPUT_BITS;
const K16_BITS: u32 = <ArmStage1<K16Lpa2> as Format>::OUTPUT_BITS;
const K64_BITS: u32 = <ArmStage1<K64Lpa> as Format>::OUTPUT_BITS;

/// A scan reports the permissions that a walk of the leaf has: no more than every table above it permits.
#[test]
fn a_scan_narrows_permissions_by_every_entry_on_the_way() {
    /// VT-d second stage, 3 levels: read-only at the top, then for writing as well.
    struct Tables;
    impl iopt::walk::WalkMemory for Tables {
        fn read_u64(&self, address: u64) -> Result<u64, iopt::walk::BadAddress> {
            Ok(match address {
                0x1000 => 0x2000 | 1,
                0x2000 => 0x3000 | 3,
                0x2008 => 0x4020_0000 | 0x83,
                0x3000 => 0x5000_0000 | 3,
                _ => 0,
            })
        }
    }
    let format = iopt::FormatId::VtdSs;
    let root = iopt::Root {
        format,
        address: 0x1000,
        levels: 3,
    };
    let mut seen = Vec::new();
    let each = |entry: &iopt::walk::Visited| {
        seen.push((entry.level, entry.prot));
        iopt::walk::ScanStep::Into
    };
    iopt::walk::Walker::new(root).scan(&Tables, each).unwrap();
    assert_eq!(
        seen.iter().map(|(level, _)| *level).collect::<Vec<_>>(),
        [2, 1, 0, 1]
    );
    for (level, prot) in seen {
        assert!(!prot.contains(iopt::Prot::WRITE), "level {level}: {prot}");
        assert!(prot.contains(iopt::Prot::READ), "level {level}: {prot}");
    }
}
