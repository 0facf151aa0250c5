//! Origin 4: the operations of page tables, in every format.
//!
//! The exclusive form, in memory of the heap. Tables are warm: they are there and empty before a map, and
//! stay. An unmap makes a gather, has it flushed by something that does nothing, hands runs back and gives
//! tables back, all of it in the time taken. A bracket holds 8 operations, one behind the other, or 64
//! on single pages, every second one; a sample is the mean of 16 brackets.

mod fixture;

use std::sync::atomic::AtomicU32;

use iopt::format::{
    AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart2, K4, K16, K64, RiscV, RiscVG,
    VtdSs, X86_64,
};
use iopt::{BuildError, HeapArena, WideCell};

use self::fixture::Fixture;
use super::BenchError;
use super::report::GroupReport;
use super::rounds::Rounds;

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;

/// The name of a format, and its sizes.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    page: u64,
    block: Option<u64>,
}

/// One format with all its operations.
trait Case {
    /// Every operation once, in both ways.
    fn round(&mut self, rounds: &mut Rounds) -> Result<(), BenchError>;
}

/// Runs the group.
pub(super) fn run(rounds: &mut Rounds, report: &mut GroupReport) -> Result<(), BenchError> {
    report.notes = [
        "4 KiB and 2 MiB stand for each format's own page and block; ns for one operation",
        "page by page: a call for each page, one flush; split: the block unmapped, its pages mapped; \
         merge: the other way round; this project's split and merge leave no moment without a translation \
         where the format allows it",
        "stores: as many entries stored (map), or read and zeroed (unmap), in warm memory, and nothing else",
    ]
    .map(String::from)
    .into();
    let mut cases = cases()?;
    rounds.part(0, 1);
    while rounds.more() {
        for case in &mut cases {
            case.round(rounds)?;
        }
    }
    Ok(())
}

/// All formats.
fn cases() -> Result<Vec<Box<dyn Case>>, BenchError> {
    type Tables16K = HeapArena<WideCell, 14>;
    type Tables64K = HeapArena<WideCell, 16>;
    type Tables4K = HeapArena<WideCell, 12>;
    type Tables1K = HeapArena<AtomicU32, 10>;
    const DIRTY: ArmOptions = ArmOptions {
        dirty: true,
        ..ArmOptions::PLAIN
    };
    let shape = |name, page, block| Shape { name, page, block };
    let common = |name| shape(name, 4 * K, Some(2 * M));
    macro_rules! case {
        ($memory:ty, $shape:expr, $format:expr, $dirty:expr) => {{
            let shape = $shape;
            let format = $format.map_err(|source| BenchError::Build {
                format: shape.name,
                source,
            })?;
            #[allow(clippy::redundant_closure_call, reason = "one shape for all formats")]
            let dirty = ($dirty)(format);
            Box::new(Fixture::new(shape, format, dirty, |base| {
                <$memory>::with_tables_at(64, base)
            })?)
        }};
    }
    Ok(vec![
        case!(Tables4K, common("amdv1"), AmdV1::new(4), Some),
        case!(Tables4K, common("x86-64"), X86_64::new(4), Some),
        case!(Tables4K, common("vtd-ss"), VtdSs::new(4), Some),
        case!(
            Tables4K,
            common("arm-s1-4k"),
            ArmStage1::<K4>::new(48, 48),
            |f: ArmStage1<K4>| { Some(f.with_options(DIRTY)) }
        ),
        case!(
            Tables16K,
            shape("arm-s1-16k", 16 * K, Some(32 * M)),
            ArmStage1::<K16>::new(48, 48),
            |f: ArmStage1<K16>| Some(f.with_options(DIRTY))
        ),
        case!(
            Tables64K,
            shape("arm-s1-64k", 64 * K, Some(512 * M)),
            ArmStage1::<K64>::new(48, 48),
            |f: ArmStage1<K64>| Some(f.with_options(DIRTY))
        ),
        case!(
            Tables4K,
            common("arm-s2-4k"),
            ArmStage2::<K4>::new(48, 48),
            |f: ArmStage2<K4>| { Some(f.with_options(DIRTY)) }
        ),
        case!(Tables4K, common("riscv"), RiscV::new(4), |f: RiscV| {
            Some(f.with_hardware_updates(true))
        }),
        case!(Tables4K, common("riscv-g"), RiscVG::new(4), |f: RiscVG| {
            Some(f.with_hardware_updates(true))
        }),
        case!(
            Tables1K,
            shape("armv7s", 4 * K, Some(M)),
            Ok::<ArmV7s, BuildError>(ArmV7s::new()),
            |_| None
        ),
        case!(
            Tables16K,
            shape("dart1", 16 * K, None),
            Dart1::new(2, 36),
            |_| None
        ),
        case!(
            Tables16K,
            shape("dart2", 16 * K, None),
            Dart2::new(2, 36),
            |_| None
        ),
    ])
}
