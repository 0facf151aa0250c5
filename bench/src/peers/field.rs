//! The formats, and who stands beside us in each.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use iopt::format::{
    AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart2, K4, K16, K64, RiscV, RiscVG,
    VtdSs, X86_64,
};
use iopt::{Format, HeapArena, HeapTables, WideCell};
use serde::Serialize;

use crate::peers::linux::Programs;
use crate::peers::ours::{Exclusive, Memory, Ours, Shared, Terrain, plain, threads};
use crate::peers::places::Geometry;
use crate::peers::rows::Pages;
use crate::peers::work::Subject;
use iopt::reclaim::Slots;

/// Role of a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Who {
    /// A loop that stores the same entries.
    Limit,
    /// Our exclusive form.
    Exclusive,
    /// The same with cells that are handled one by one: all that there is without `std`.
    Scalar,
    /// Our shared form.
    Shared,
    /// The same without `std`: such cells, and readers known by slots.
    ScalarShared,
    /// Linux's code.
    Linux,
    /// A foreign crate.
    Crate,
}

/// A subject, and what it is to us.
pub type Entrant = (Who, Box<dyn Subject>);

/// A format with everything that is done with it.
pub struct Contest {
    /// The name, in filters and files.
    pub id: &'static str,
    /// For people.
    pub title: &'static str,
    /// Its sizes.
    pub pages: Pages,
    /// Foreign crates are measured beside this one.
    pub reference: bool,
    geometry: fn() -> anyhow::Result<Geometry>,
    ours: fn() -> anyhow::Result<Vec<Entrant>>,
    threads: fn(Terrain, u64, Duration) -> anyhow::Result<f64>,
}

impl Contest {
    /// Our tables in both forms, and the other implementations of this format.
    pub fn entrants(&self, linux: Option<&Programs>) -> anyhow::Result<Vec<Entrant>> {
        let mut all = (self.ours)()?;
        all.extend(crate::peers::others::beside(self, linux)?);
        Ok(all)
    }

    /// How addresses are divided, and how long entries are.
    pub fn geometry(&self) -> anyhow::Result<Geometry> {
        (self.geometry)()
    }

    /// See [`threads`].
    pub fn threads(&self, at: Terrain, count: u64, lasting: Duration) -> anyhow::Result<f64> {
        (self.threads)(at, count, lasting)
    }
}

/// Both forms over a format, and over it as it keeps dirty state; then both as they are without `std`, where
/// they have vectors with it.
fn ours<F: Format, M: Memory>(format: F, dirty: Option<F>) -> Vec<Entrant> {
    let mut all: Vec<Entrant> = vec![
        (
            Who::Exclusive,
            Box::new(Ours::<F, M, Exclusive<F, M>>::new(format, dirty)),
        ),
        (
            Who::Shared,
            Box::new(Ours::<F, M, Shared<F, M>>::new(format, dirty)),
        ),
    ];
    if M::VECTORS {
        let scalar = Ours::<F, M::Scalar, Exclusive<F, M::Scalar>>::new(format, dirty);
        let scalar = scalar.called("exclusive, without std");
        all.push((Who::Scalar, Box::new(scalar)));
        let shared = Ours::<F, M::Scalar, Shared<F, M::Scalar, Slots>>::new(format, dirty);
        let shared = shared.called("shared, without std");
        all.push((Who::ScalarShared, Box::new(shared)));
    }
    all
}

macro_rules! contest {
    ($id:literal, $title:literal, $memory:ty, $pages:expr, $format:expr, $dirty:expr) => {
        Contest {
            id: $id,
            title: $title,
            pages: $pages,
            reference: false,
            geometry: || Ok(Geometry::of(&$format.map_err(plain)?)),
            ours: || {
                let format = $format.map_err(plain)?;
                #[allow(clippy::redundant_closure_call, reason = "one shape for all formats")]
                let dirty = ($dirty)(format);
                Ok(ours::<_, $memory>(format, dirty))
            },
            threads: |terrain, count, lasting| {
                threads::<_, $memory>($format.map_err(plain)?, terrain, count, lasting)
            },
        }
    };
}

type Heap4K = HeapTables;
type Heap16K = HeapArena<WideCell, 14>;
type Heap64K = HeapArena<WideCell, 16>;
// Entries of 4 bytes: no vectors.
type Heap1K = HeapArena<AtomicU32, 10>;

const DIRTY: ArmOptions = ArmOptions {
    dirty: true,
    ..ArmOptions::PLAIN
};
const K: u64 = 1 << 10;
const M: u64 = 1 << 20;

/// ARMv7, whose constructor cannot fail.
const fn armv7() -> Result<ArmV7s, iopt::BuildError> {
    Ok(ArmV7s::new())
}

const fn pages(small: u64, block: Option<u64>) -> Pages {
    let room = u64::MAX;
    Pages { small, block, room }
}

/// Pages of 4 KiB, blocks of 2 MiB.
const COMMON: Pages = pages(4 * K, Some(2 * M));

/// The formats, in the order in which they are shown.
pub const CONTESTS: &[Contest] = &[
    Contest {
        reference: true,
        ..contest!(
            "x86-64",
            "x86-64, 4 levels",
            Heap4K,
            COMMON,
            X86_64::new(4),
            Some
        )
    },
    contest!(
        "vtd-ss",
        "VT-d second stage, 4 levels",
        Heap4K,
        COMMON,
        VtdSs::new(4),
        Some
    ),
    contest!(
        "amdv1",
        "AMD v1, 4 levels",
        Heap4K,
        COMMON,
        AmdV1::new(4),
        Some
    ),
    contest!(
        "riscv",
        "RISC-V Sv48",
        Heap4K,
        COMMON,
        RiscV::new(4),
        |f: RiscV| Some(f.with_hardware_updates(true))
    ),
    contest!(
        "riscv-g",
        "RISC-V Sv48x4",
        Heap4K,
        COMMON,
        RiscVG::new(4),
        |f: RiscVG| Some(f.with_hardware_updates(true))
    ),
    contest!(
        "arm-s1-4k",
        "Arm stage 1, 4K granule",
        Heap4K,
        COMMON,
        ArmStage1::<K4>::new(48, 48),
        |f: ArmStage1<K4>| Some(f.with_options(DIRTY))
    ),
    contest!(
        "arm-s1-16k",
        "Arm stage 1, 16K granule",
        Heap16K,
        pages(16 * K, Some(32 * M)),
        ArmStage1::<K16>::new(48, 48),
        |f: ArmStage1<K16>| Some(f.with_options(DIRTY))
    ),
    contest!(
        "arm-s1-64k",
        "Arm stage 1, 64K granule",
        Heap64K,
        pages(64 * K, Some(512 * M)),
        ArmStage1::<K64>::new(48, 48),
        |f: ArmStage1<K64>| Some(f.with_options(DIRTY))
    ),
    contest!(
        "arm-s2-4k",
        "Arm stage 2, 4K granule",
        Heap4K,
        COMMON,
        ArmStage2::<K4>::new(48, 48),
        |f: ArmStage2<K4>| Some(f.with_options(DIRTY))
    ),
    contest!(
        "armv7s",
        "ARMv7 short descriptors",
        Heap1K,
        Pages {
            room: 2048,
            ..pages(4 * K, Some(M))
        },
        armv7(),
        |_| None
    ),
    contest!(
        "dart1",
        "Apple DART 1, 16K",
        Heap16K,
        pages(16 * K, None),
        Dart1::new(2, 36),
        |_| None
    ),
    contest!(
        "dart2",
        "Apple DART 2, 16K",
        Heap16K,
        pages(16 * K, None),
        Dart2::new(2, 36),
        |_| None
    ),
];

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::peers::rows::ROWS;

    /// Rows of formats that do not have the operation at all.
    fn offered(contest: &Contest, row: &str) -> bool {
        let dirt = ["harvest-clean", "harvest-dirty", "unmap-dirty"];
        let keeps = !["armv7s", "dart1", "dart2"].contains(&contest.id);
        keeps || !dirt.contains(&row)
    }

    #[test]
    fn every_row_is_measured_in_every_format_that_has_it() {
        for contest in CONTESTS {
            let mut all = (contest.ours)().unwrap();
            for row in ROWS {
                let Some(work) = row.work(&contest.pages) else {
                    continue;
                };
                for (who, subject) in &mut all {
                    let figure = subject.sample(&work).unwrap();
                    let wanted = offered(contest, row.id);
                    assert_eq!(
                        figure.is_some(),
                        wanted,
                        "{}/{} {who:?}",
                        contest.id,
                        row.id
                    );
                }
            }
        }
    }
}
