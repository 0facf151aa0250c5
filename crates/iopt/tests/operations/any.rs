//! A table whose format is chosen at run time leaves the same bytes as one whose format is a type.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use iopt::format::{
    AmdV1, ArmConfig, ArmGranule, ArmOptions, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart1Page4K,
    Dart2, DartConfig, DartVersion, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa, RiscV, RiscVG, VtdSs,
    X86_64,
};
use iopt::{
    AnyTable, BuildError, Format, FormatId, Gather, HeapArena, HeapTables, Interruption, Leaf,
    Prot, ResizeError, Table, TableOps as _,
};
use runs::{PageSizes, Run, Span};

const ALL: PageSizes = PageSizes::from_bits(u64::MAX);

/// Checks `$any`, made from `$memory`, beside a table of `$format`.
macro_rules! beside {
    ($format:expr, $cell:ty, $log2:literal, $memory:ident => $build:expr) => {{
        let format = $format;
        // Below the addresses of every format.
        let base = 1u64 << (format.table_bits() - 1).min(46);
        let arena = || Arc::new(HeapArena::<$cell, $log2>::with_tables_at(128, base).unwrap());
        let (typed, $memory) = (arena(), arena());
        let mut table = Table::new(format, typed.clone()).unwrap();
        let any: AnyTable = $build;
        assert_eq!(any.root(), table.root());
        assert_eq!(any.aperture(), table.format().aperture());
        assert_eq!(any.page_sizes(), table.page_sizes());

        let page = table.page_sizes().smallest();
        let first = table.format().aperture().spans().next().unwrap().start;
        let run = Span::new(16 * page, 40 * page);
        let beyond = Span::new(first + 64 * page, page);
        for iova in [first + page, first + 512 * page] {
            table.map(iova, &[run], Prot::RW).unwrap();
            any.map(iova, &[run], Prot::RW).unwrap();
            assert_eq!(
                any.map(iova, &[run], Prot::RW),
                table.map(iova, &[run], Prot::RW)
            );
            assert_eq!(any.translate(iova + 5 * page), Some(21 * page));
            assert_eq!(any.leaf_at(iova), table.leaf_at(iova));
        }
        let leaves: Vec<Leaf> = table.leaves(Span::new(first, 600 * page)).collect();
        let mut found = Vec::new();
        any.for_each_leaf(Span::new(first, 600 * page), |leaf| found.push(leaf));
        assert!(found == leaves && !leaves.is_empty());
        for (from, count, one) in [
            (1, 40, true),
            (3, 5, true),
            (0, 41, false),
            (1, 41, false),
            (41, 471, false),
        ] {
            let range = Span::new(first + from * page, count * page);
            assert_eq!(
                (any.is_one_run(range), table.is_one_run(range)),
                (one, one),
                "{range}"
            );
        }
        assert_eq!(any.leaf_sizes(), table.leaf_sizes());
        assert_eq!(any.tables(), table.tables());
        assert_eq!(typed.in_use(), $memory.in_use());
        let words = typed.in_use() << $log2;
        for at in (0..words).step_by(size_of::<$cell>()) {
            assert_eq!($memory.read(base + at), typed.read(base + at), "{at:#x}");
        }

        let mut gather = Gather::new();
        assert!(
            any.owning(beyond)
                .unmap(beyond, &mut gather, &mut iopt::NoRuns)
                .is_err()
        );
        let mut runs: Vec<Run> = Vec::new();
        let range = Span::new(first + page, 40 * page);
        let owner = any.alone();
        owner
            .unmap(range, &mut gather, &mut |run: Run| runs.push(run))
            .unwrap();
        assert_eq!(runs, [Run::new(range.start, run)]);
        let range = Span::new(first + 256 * page, 512 * page);
        let bytes = owner.unmap_mapped(range, &mut gather, &mut iopt::NoRuns);
        assert_eq!(bytes, Ok(40 * page));
        any.reclaim(gather.never_walked());
        assert_eq!(any.tables(), 1);
        let (gather, memory) = any.tear_down();
        memory.reclaim(gather.never_walked().into_tables());
        assert_eq!($memory.in_use(), 0);
    }};
}

/// The same from the format's name, its levels and its configuration.
macro_rules! by_name {
    ($format:expr, $log2:literal) => {
        by_name!($format, AtomicU64, $log2)
    };
    ($format:expr, $cell:ty, $log2:literal) => {{
        let format = $format;
        beside!(format, $cell, $log2, memory => {
            AnyTable::new(format.id(), format.levels(), ALL, memory.clone()).unwrap()
        });
        // And as the same format with whatever it was configured to.
        beside!(format, $cell, $log2, memory => Table::new(format, memory.clone()).unwrap().into());
    }};
}

#[test]
fn amd_and_intel_tables_are_built_by_name() {
    by_name!(AmdV1::new(2).unwrap(), 12);
    by_name!(AmdV1::new(6).unwrap(), 12);
    by_name!(X86_64::new(4).unwrap(), 12);
    by_name!(X86_64::new(5).unwrap(), 12);
    by_name!(VtdSs::new(3).unwrap(), 12);
}

#[test]
fn arm_tables_are_built_by_name() {
    by_name!(<ArmV7s>::new(), AtomicU32, 10);
    by_name!(ArmStage1::<K4>::new(48, 48).unwrap(), 12);
    by_name!(ArmStage1::<K4>::new(39, 48).unwrap().upper(), 12);
    by_name!(ArmStage1::<K4Lpa2>::new(52, 52).unwrap(), 12);
    by_name!(ArmStage1::<K16>::new(47, 48).unwrap(), 14);
    by_name!(ArmStage1::<K16Lpa2>::new(50, 52).unwrap(), 14);
    by_name!(ArmStage1::<K64>::new(42, 48).unwrap(), 16);
    by_name!(ArmStage1::<K64Lpa>::new(52, 52).unwrap(), 16);
    by_name!(ArmStage2::<K4>::new(40, 48).unwrap(), 12);
    let four = ArmStage2::<K4>::new(40, 48).unwrap().with_levels(4);
    by_name!(four.unwrap(), 12);
    by_name!(ArmStage2::<K4Lpa2>::new(52, 52).unwrap(), 12);
    by_name!(ArmStage2::<K16>::new(40, 48).unwrap(), 14);
    by_name!(ArmStage2::<K16Lpa2>::new(49, 52).unwrap(), 14);
    by_name!(ArmStage2::<K64>::new(46, 48).unwrap(), 16);
    by_name!(ArmStage2::<K64Lpa>::new(48, 52).unwrap(), 16);
}

#[test]
fn riscv_and_apple_tables_are_built_by_name() {
    by_name!(RiscV::new(3).unwrap(), 12);
    by_name!(RiscV::new(5).unwrap(), 12);
    by_name!(RiscVG::new(3).unwrap(), 12);
    by_name!(RiscVG::new(4).unwrap(), 12);
    by_name!(Dart1::new(2, 36).unwrap(), 14);
    by_name!(Dart1Page4K::new(2, 32).unwrap(), 12);
    by_name!(Dart2::new(3, 42).unwrap(), 14);
}

#[test]
fn formats_with_other_options_are_converted_and_keep_them() {
    let options = ArmOptions {
        dirty: true,
        ..ArmOptions::default()
    };
    let arm = ArmStage1::<K4>::new(48, 48).unwrap();
    for arm in [arm.with_options(options), arm.upper()] {
        beside!(arm, AtomicU64, 12, memory => Table::new(arm, memory.clone()).unwrap().into());
    }
    let riscv = RiscV::new(4).unwrap().with_hardware_updates(true);
    beside!(riscv, AtomicU64, 12, memory => Table::new(riscv, memory.clone()).unwrap().into());
    let encrypted = AmdV1::new(3).unwrap().with_encrypted_tables(51).unwrap();
    beside!(encrypted, AtomicU64, 12, memory => Table::new(encrypted, memory.clone()).unwrap().into());
    let encrypted = X86_64::new(4).unwrap().with_encrypted_tables(47).unwrap();
    beside!(encrypted, AtomicU64, 12, memory => Table::new(encrypted, memory.clone()).unwrap().into());
}

#[test]
fn a_table_of_any_format_grows_if_its_format_does() {
    let memory = Arc::new(HeapTables::with_tables(16).unwrap());
    let table = AnyTable::new(FormatId::AmdV1, 2, ALL, memory.clone()).unwrap();
    table
        .map(0, &[Span::new(0x7000, 0x1000)], Prot::RW)
        .unwrap();
    let mut gather = Gather::new();
    let root = table.grow(4, &mut gather).unwrap();
    assert_eq!(table.root(), root);
    assert_eq!(table.aperture().bits, 48);
    assert_eq!(gather.invalidation().new_root(), Some(root));
    let table = AnyTable::new(FormatId::VtdSs, 3, ALL, memory.clone()).unwrap();
    assert!(table.grow(4, &mut gather).is_err());
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    const K4_CONFIG: ArmConfig = ArmConfig {
        granule: ArmGranule::K4,
        input_bits: 40,
        upper: false,
    };
    let dart = |version, page_log2| {
        FormatId::Dart(DartConfig {
            version,
            page_log2,
            input_bits: 32,
        })
    };
    let memory = Arc::new(HeapTables::with_tables(16).unwrap());
    let refused = |format, levels| {
        let error = AnyTable::new(format, levels, ALL, memory.clone()).unwrap_err();
        error.to_string()
    };
    // A configuration that no unit has.
    for format in [dart(DartVersion::V1, 13), dart(DartVersion::V2, 12)] {
        let text = format!("no table of {format} is built with this configuration");
        assert_eq!(refused(format, 2), text);
    }
    // The memory: tables too small, entries of another width.
    let k16 = FormatId::ArmStage1(ArmConfig {
        granule: ArmGranule::K16,
        ..K4_CONFIG
    });
    for (format, levels, wanted) in [
        (FormatId::ArmV7s, 2, (4, 1024)),
        (k16, 3, (8, 1 << 14)),
        (dart(DartVersion::V1, 14), 2, (8, 1 << 14)),
        (dart(DartVersion::V2, 14), 2, (8, 1 << 14)),
    ] {
        assert_eq!(
            AnyTable::new(format, levels, ALL, memory.clone()).unwrap_err(),
            BuildError::TableMemory {
                format,
                wanted,
                offered: (8, 4096)
            }
        );
    }
    let narrow = HeapArena::<AtomicU32, 12>::with_tables(16).unwrap();
    assert_eq!(
        AnyTable::new(FormatId::VtdSs, 4, ALL, narrow)
            .unwrap_err()
            .to_string(),
        "vtd-ss has tables of 4096 bytes with entries of 8; the memory has 4096 and 4"
    );
    // The levels.
    for (format, levels) in [
        (FormatId::AmdV1, 7),
        (FormatId::X86_64, 3),
        (FormatId::ArmStage1(K4_CONFIG), 3),
        (FormatId::RiscV, 2),
        (dart(DartVersion::V1, 12), 5),
    ] {
        let error = AnyTable::new(format, levels, ALL, memory.clone()).unwrap_err();
        assert_eq!(error, BuildError::Levels { format, levels });
    }
    assert!(AnyTable::new(FormatId::ArmStage2(K4_CONFIG), 9, ALL, memory.clone()).is_err());
    // The configuration.
    let upper = ArmConfig {
        upper: true,
        ..K4_CONFIG
    };
    assert_eq!(
        refused(FormatId::ArmStage2(upper), 3),
        "arm-s2-4k: a root for the top 1 is not within 0 to 0"
    );
    assert_eq!(memory.in_use(), 0);
}

#[test]
fn a_call_back_that_fails_says_why() {
    let memory = Arc::new(HeapTables::with_tables(16).unwrap());
    let table = AnyTable::new(FormatId::VtdSs, 4, ALL, memory).unwrap();
    let range = Span::new(0, 2 << 20);
    table.map(0, &[range.cast()], Prot::RW).unwrap();
    let mut gather = Gather::new();
    let refused = Interruption::Refused;
    assert_eq!(
        table.split(range, 4096, refused, &mut gather, |_| Err("no answer")),
        Err(ResizeError::Flush("no answer"))
    );
    assert!(!gather.is_empty(), "it is still to be flushed");
    assert_eq!(
        table.write_image(&mut |_: &[u8]| Err("no room")),
        Err("no room")
    );
    let _ = gather.never_walked();
}
