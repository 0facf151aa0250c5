//! The tables that are timed, and whether Linux does to them what the clock assumes.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, bail, ensure};
use iopt::format::{
    AmdV1, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart2, Entry, K4, K16, K64, RiscV, VtdSs, X86_64,
};
use iopt::{BuildError, Format};

use super::{Kind, Work};
use crate::{
    server::{Dump, LinuxConfig, LinuxFormat, Server, option},
    setup::{arm_sizes, generic, sized},
};

/// How many entries hold leaves of 2^n bytes, by n: each entry of a leaf that is repeated counts.
type Leaves = BTreeMap<u32, u64>;
type Count = Box<dyn Fn(&Dump) -> anyhow::Result<Leaves> + Send + Sync>;

/// A table that is timed.
pub struct TimedTable {
    /// Its name.
    pub name: &'static str,
    /// How it is made.
    pub config: LinuxConfig,
    leaves: Count,
}

impl TimedTable {
    fn new<F: Format>(
        name: &'static str,
        config: LinuxConfig,
        format: Result<F, BuildError>,
    ) -> anyhow::Result<Self> {
        let format = format.with_context(|| name.to_owned())?;
        let leaves = move |dump: &Dump| {
            let mut leaves = BTreeMap::new();
            let top = usize::from(format.levels()) - 1;
            for root in &dump.roots {
                count_leaves(&format, dump, top, *root, &mut leaves)?;
            }
            Ok(leaves)
        };
        Ok(Self {
            name,
            config,
            leaves: Box::new(leaves),
        })
    }
}

fn count_leaves<F: Format>(
    format: &F,
    dump: &Dump,
    level: usize,
    table: u64,
    leaves: &mut Leaves,
) -> anyhow::Result<()> {
    let block = dump.blocks.get(&table);
    let block = block.with_context(|| format!("Linux has no table at {table:#x}"))?;
    for (_, word) in block.words.range(..format.entries(level) as u64) {
        match F::decode(level, *word) {
            Entry::Leaf { log2, .. } => *leaves.entry(log2).or_default() += 1,
            Entry::Table(below) if level > 0 => {
                count_leaves(format, dump, level - 1, below, leaves)?;
            }
            Entry::Table(_) => bail!("a table below the lowest level: {word:#x}"),
            Entry::Empty => {}
        }
    }
    Ok(())
}

/// The tables that are timed: of each format the most usual one.
pub fn tables() -> anyhow::Result<Vec<TimedTable>> {
    use LinuxFormat as L;
    let (sign, napot) = (option::SIGN_EXTENDED, option::SVNAPOT);
    let s1 = |sizes| sized(L::ArmStage1, 48, 48, sizes, option::DIRTY);
    let s2 = sized(L::ArmStage2, 48, 48, arm_sizes::<K4>(48), 0);
    let short = 1 << 12 | 1 << 16 | 1 << 20 | 1 << 24;
    let riscv = |options| generic(L::RiscV, 4, 48, 56, sign | options);
    let x86_64 = generic(L::X86_64, 4, 48, 52, sign);
    let dart = |format, out| sized(format, 36, out, 1 << 14, 0);
    let k4 = ArmStage1::<K4>::new(48, 48);
    let k16 = ArmStage1::<K16>::new(48, 48);
    let k64 = ArmStage1::<K64>::new(48, 48);
    let stage2 = ArmStage2::<K4>::new(48, 48).and_then(|format| format.with_levels(4));
    let armv7 = sized(L::ArmV7s, 32, 32, short, 0);
    Ok(vec![
        TimedTable::new("amdv1", generic(L::AmdV1, 4, 48, 52, 0), AmdV1::new(4))?,
        TimedTable::new("x86-64", x86_64, X86_64::new(4))?,
        TimedTable::new("vtd-ss", generic(L::VtdSs, 4, 48, 52, 0), VtdSs::new(4))?,
        TimedTable::new("riscv", riscv(0), RiscV::new(4))?,
        TimedTable::new("riscv-svnapot", riscv(napot), RiscV::new(4))?,
        TimedTable::new("arm-s1-4k", s1(arm_sizes::<K4>(48)), k4)?,
        TimedTable::new("arm-s1-16k", s1(arm_sizes::<K16>(48)), k16)?,
        TimedTable::new("arm-s1-64k", s1(arm_sizes::<K64>(48)), k64)?,
        TimedTable::new("arm-s2-4k", s2, stage2)?,
        TimedTable::new("armv7", armv7, Ok(<ArmV7s>::new()))?,
        TimedTable::new("dart1", dart(L::Dart1, 36), Dart1::new(2, 36))?,
        TimedTable::new("dart2", dart(L::Dart2, 42), Dart2::new(2, 36))?,
    ])
}

/// Does every kind of work with every size of pages, once with each condition, and looks at what
/// Linux mapped; how many requests that were.
///
/// The program itself looks at translations and at what was unmapped. Here it is that leaves have
/// the size that was asked for, that the time is one, and that all memory comes back.
pub fn check(program: &Path, table: &TimedTable) -> anyhow::Result<usize> {
    let mut server = Server::start(program)?;
    let sizes = server.create_timed(&table.config)?;
    let (smallest, mut done) = (sizes.trailing_zeros(), 0);
    for log2 in (0..=30).filter(|log2| sizes & 1 << log2 != 0) {
        let page = 1u64 << log2;
        // No more than 1 GiB in all: tables of 32 bits have no room for more.
        let fits = |count| page * count <= 1 << 30 || table.config.input_bits > 32;
        let works = [1, 256, (1 << 30) / page].into_iter();
        let works = works.filter(|count| fits(*count));
        let works: Vec<_> = works
            .map(|count| Work::new(Kind::Map, page, count))
            .collect();
        for work in &works {
            server.time_and_keep(work)?;
            let leaves = (table.leaves)(&server.dump()?)?;
            ensure!(
                sizes_are(&leaves, smallest, log2, work.count),
                "Linux has other leaves (2^n bytes: how many) than asked for: {leaves:?}, {work:?}"
            );
        }
        for work in &works {
            done += every_kind(&mut server, work)?;
        }
    }
    server.destroy()?;
    server.end()?;
    Ok(done)
}

/// True when all leaves but the page that stays beside are of 2^`log2` bytes.
fn sizes_are(leaves: &Leaves, smallest: u32, log2: u32, count: u64) -> bool {
    let of = |log2| leaves.get(&log2).copied().unwrap_or(0);
    let (kept, mapped) = if log2 == smallest {
        (1, of(log2).saturating_sub(1))
    } else {
        (of(smallest), of(log2))
    };
    let others = leaves.keys().any(|key| *key != log2 && *key != smallest);
    !others && kept == 1 && mapped > 0 && mapped % count == 0
}

fn every_kind(server: &mut Server, work: &Work) -> anyhow::Result<usize> {
    let mut works = Vec::new();
    for kind in [Kind::Map, Kind::Unmap, Kind::MapChosen, Kind::UnmapChosen] {
        for (half, queued) in [(false, false), (true, false), (true, true)] {
            works.push(Work {
                kind,
                half,
                queued,
                ..*work
            });
        }
    }
    for kind in [
        Kind::MapAllocated,
        Kind::UnmapAllocated,
        Kind::Cycle,
        Kind::Translate,
    ] {
        works.push(Work { kind, ..*work });
    }
    for dirty in [false, true] {
        let kind = Kind::Harvest;
        works.push(Work {
            kind,
            dirty,
            ..*work
        });
    }
    for work in &works {
        let Some(samples) = server.time(work, 2)? else {
            ensure!(work.kind == Kind::Harvest, "Linux does not offer {work:?}");
            continue;
        };
        // How long it took is no test: a clock may stand still for as long as one operation takes.
        let sound = samples.len() == 2 && samples.iter().all(|ns| ns.is_finite() && *ns >= 0.0);
        ensure!(sound, "no time: {samples:?} ns, {work:?}");
    }
    Ok(works.len())
}

#[cfg(test)]
mod tests {
    use super::sizes_are;

    #[test]
    fn leaves_of_another_size_are_seen() {
        let leaves = |of: &[(u32, u64)]| of.iter().copied().collect();
        // 2M pages beside the 4K page that stays; 4K pages.
        assert!(sizes_are(&leaves(&[(12, 1), (21, 512)]), 12, 21, 256));
        assert!(sizes_are(&leaves(&[(12, 257)]), 12, 12, 256));
        // Small ones, large ones, fewer, none.
        assert!(!sizes_are(&leaves(&[(12, 257), (21, 256)]), 12, 21, 256));
        assert!(!sizes_are(&leaves(&[(12, 257), (16, 16)]), 12, 12, 256));
        assert!(!sizes_are(&leaves(&[(12, 200)]), 12, 12, 256));
        assert!(!sizes_are(&leaves(&[(12, 1)]), 12, 12, 256));
    }
}
