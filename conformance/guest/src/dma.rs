//! Linux's DMA API beside `ioas::Dma`, in instructions: a guest measures both, and a table says what it has found.
//!
//! See [`crate::samples`] for the clock of the guest, which counts instructions, and the README for what is in each
//! figure.

use std::{
    fmt::{self, Write as _},
    fs::File,
    path::Path,
    process::Command,
    sync::mpsc::RecvTimeoutError,
};

use anyhow::{Context as _, bail, ensure};
use conformance::{
    kernel::Tables,
    newer_qemu::{MACHINE, NewerQemu},
};

use crate::{
    machines::{EDU, Unit},
    qemu::{Guest, PATIENCE, arch, remove, results, slot},
    samples::{Kind, NS, SHIFT, SIZES, SPACES, Said, Sample, SpaceSample, THREADS, Way, Who},
};

/// The processor: all that QEMU emulates.
pub const PROCESSOR: &str = "max";

/// Pages of 1 GiB and of 2 MiB that the kernel keeps for those who ask: what [`SPACES`] has.
const KEPT: &str = "hugepagesz=1G hugepages=1 hugepagesz=2M hugepages=40";

/// How far the clock may be from one instruction a step: one in so many.
const CLOSE: u64 = 1000;

/// Functions of a row.
const MOST_CALLED: usize = 12;

/// Options of a run.
#[derive(Clone, Copy, Debug)]
pub struct Measure<'a> {
    /// QEMU.
    pub qemu: &'a NewerQemu,
    /// The kernel's image.
    pub kernel: &'a Path,
    /// I/O page tables of the kernel; only its own DMA API is measured then, unless it is patched.
    pub tables: Option<Tables>,
    /// True if it is patched, so that only its VFIO and iommufd are measured.
    pub patched: bool,
    /// Only which functions of the kernel are called to map and unmap, and how often.
    pub trace: bool,
    /// The initramfs.
    pub initramfs: &'a Path,
    /// Where what the guest says is kept.
    pub directory: &'a Path,
    /// The processor, as QEMU calls it.
    pub processor: &'a str,
}

impl Measure<'_> {
    /// Boots a guest behind `unit` and has it measure. The table, in Markdown.
    ///
    /// # Errors
    ///
    /// When QEMU cannot be started, the guest fails or falls silent, or its clock does not count instructions.
    pub fn run(&self, name: &str, unit: Unit) -> anyhow::Result<String> {
        let log = self.directory.join(format!("dma-{name}.log"));
        remove(&log)?;
        let at_log = || format!("see {}", log.display());
        let guest = Guest::start(&mut self.command(name, unit, &log)?, Said::parse)?;
        let mut found = Found::default();
        loop {
            match guest.lines.recv_timeout(PATIENCE) {
                Ok(Said::Clock(instructions, ns)) => {
                    let expected = instructions * NS;
                    let off = ns.abs_diff(expected);
                    println!(
                        "  {name}: {instructions} instructions took {ns} ns, expected {expected}"
                    );
                    ensure!(
                        off < expected / CLOSE,
                        "the clock does not count instructions"
                    );
                }
                Ok(Said::Empty(ns)) => found.empty = instructions(ns),
                Ok(Said::Sample(sample)) => {
                    println!("  {name}: {}", Said::Sample(sample));
                    found.samples.push(sample);
                }
                Ok(Said::Zero(ns)) => found.zero = instructions(ns) - found.empty,
                Ok(Said::Space(sample)) => {
                    println!("  {name}: {}", Said::Space(sample));
                    found.spaces.push(sample);
                }
                Ok(Said::Called(way, kind, function, hits, ns)) => {
                    let taken = instructions(ns);
                    found.calls.push((way, kind, function, hits, taken));
                }
                Ok(Said::Failed(why)) => bail!("{why}; {}", at_log()),
                Ok(Said::Done) if self.trace => return found.calls_table(),
                Ok(Said::Done) if self.patched => return found.space_table(&Way::ALL[..2]),
                Ok(Said::Done) if self.tables.is_none() => return found.table(name),
                Ok(Said::Done) => return found.of_linux(name),
                Err(RecvTimeoutError::Timeout) => bail!("it fell silent; {}", at_log()),
                Err(RecvTimeoutError::Disconnected) => bail!("no end; {}", at_log()),
            }
        }
    }

    fn command(&self, name: &str, unit: Unit, log: &Path) -> anyhow::Result<Command> {
        let processors = THREADS.iter().max().context("no threads")?;
        let words = format!(
            "{} panic=-1 tsc=reliable {KEPT} {} {} dmaspace.unit={name}",
            arch(unit).1,
            unit.kernel(),
            match self.tables {
                _ if self.trace => "dmaspace.trace",
                _ if self.patched => "dmaspace.patch",
                Some(tables) => tables.word(),
                None => "",
            }
        );
        let mut command = self.qemu.command();
        command
            .args(MACHINE)
            // Time goes by instructions alone, and is not waited for.
            .args(["-icount", &format!("shift={SHIFT},sleep=off")])
            .args(unit.qemu())
            .args(["-cpu", self.processor, "-smp", &processors.to_string()])
            .args(["-m", "4G"])
            .args(["-device", &format!("edu,bus=pcie.0,addr={}", slot(EDU))])
            .arg("-serial")
            .arg(format!("file:{}", log.display()))
            .args(results(unit))
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs)
            .args(["-append", &words])
            .stderr(File::create(log.with_extension("qemu.log"))?);
        Ok(command)
    }
}

fn instructions(ns: f64) -> f64 {
    ns / NS as f64
}

fn median(mut figures: Vec<f64>) -> Option<f64> {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied()
}

/// A size as the feature table has it.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 >> 20 {
            0 => write!(f, "{}K", self.0 >> 10),
            mib => write!(f, "{mib}M"),
        }
    }
}

/// Results of a guest.
#[derive(Default)]
struct Found {
    samples: Vec<Sample>,
    spaces: Vec<SpaceSample>,
    calls: Vec<(Way, Kind, String, u64, f64)>,
    /// Instructions that zero a page.
    zero: f64,
    /// Instructions between two readings of the clock with nothing in between, in a program of the guest.
    empty: f64,
}

impl Found {
    /// Instructions of a map and of an unmap, with the reading of the clock: medians.
    fn read(&self, (who, lazy): (Who, bool), threads: u32, size: u64) -> anyhow::Result<[f64; 2]> {
        let key = (who, lazy, threads, size);
        let of_key = |one: &&Sample| (one.who, one.lazy, one.threads, one.size) == key;
        let samples = self.samples.iter().filter(of_key);
        // Processors take turns: time passes for all of them.
        let own = |ns| instructions(ns) / f64::from(threads);
        let [map, unmap]: [Vec<f64>; 2] = [
            samples.clone().map(|one| own(one.map)).collect(),
            samples.map(|one| own(one.unmap)).collect(),
        ];
        let both = median(map).zip(median(unmap));
        let (map, unmap) = both.with_context(|| format!("no sample of {key:?}"))?;
        Ok([map, unmap])
    }

    /// The same without the reading of the clock; of Linux, without what remains when there is no translation.
    fn of(&self, of: (Who, bool), threads: u32, size: u64) -> anyhow::Result<[f64; 2]> {
        let less = match of.0 {
            Who::Linux => self.read((Who::Direct, false), THREADS[0], SIZES[0])?,
            _ => [self.empty; 2],
        };
        let [map, unmap] = self.read(of, threads, size)?;
        Ok([map - less[0], unmap - less[1]])
    }

    /// Measurements, without what is not the same in all kernels' tables.
    fn of_linux(&self, name: &str) -> anyhow::Result<String> {
        let mut text = String::new();
        self.rows(
            &mut text,
            name,
            &["strict", "lazy"],
            &[(Who::Linux, false), (Who::Linux, true)],
        )?;
        Ok(text)
    }

    fn table(&self, name: &str) -> anyhow::Result<String> {
        let mut text = String::new();
        let columns = [
            ("strict: Linux", (Who::Linux, false)),
            ("ours", (Who::Ours, false)),
            ("software unit", (Who::Software, false)),
            ("lazy: Linux", (Who::Linux, true)),
            ("ours", (Who::Ours, true)),
        ];
        self.rows(
            &mut text,
            name,
            &columns.map(|(name, _)| name),
            &columns.map(|(_, of)| of),
        )?;
        text += &self.space_table(&Way::ALL)?;
        Ok(text)
    }

    /// A table with a row for each number of threads and size.
    fn rows(
        &self,
        text: &mut String,
        name: &str,
        names: &[&str],
        columns: &[(Who, bool)],
    ) -> anyhow::Result<()> {
        let [map, unmap] = self.read((Who::Direct, false), THREADS[0], SIZES[0])?;
        writeln!(
            text,
            "{name}: map / unmap in instructions; of ten threads the sum"
        )?;
        writeln!(
            text,
            "without translation, subtracted from Linux: {map:.0} / {unmap:.0}"
        )?;
        writeln!(
            text,
            "reading the clock, subtracted from ours: {:.0}",
            self.empty
        )?;
        writeln!(text, "\n| threads | size | {} |", names.join(" | "))?;
        writeln!(text, "|---|---{}|", "|---".repeat(names.len()))?;
        for threads in THREADS {
            for size in SIZES {
                write!(text, "| {threads} | {} |", Bytes(size))?;
                for of in columns {
                    if of.0 == Who::Software && threads > 1 {
                        *text += " – |";
                        continue;
                    }
                    let [map, unmap] = self.of(*of, threads, size)?;
                    match threads {
                        1 => write!(text, " {map:.0} / {unmap:.0} |"),
                        // A thread that waits for the others' turns does so in an unmap, and their maps are in it.
                        _ => write!(text, " {:.0} |", map + unmap),
                    }?;
                }
                text.push('\n');
            }
        }
        Ok(())
    }

    /// Instructions of touching, mapping and unmapping all of one memory: medians.
    fn space(&self, way: Way, kind: Kind, present: bool) -> anyhow::Result<[f64; 3]> {
        let of = |one: &&SpaceSample| (one.way, one.present, one.kind) == (way, present, kind);
        let column = |figure: fn(&SpaceSample) -> f64| {
            let figures = self.spaces.iter().filter(of).map(figure).collect();
            let figure = median(figures).with_context(|| format!("no sample of {kind:?}"))?;
            anyhow::Ok(instructions(figure) - self.empty)
        };
        Ok([
            column(|one| one.touch)?,
            column(|one| one.map)?,
            column(|one| one.unmap)?,
        ])
    }

    /// For each memory and way the functions that take most: calls, and thousands of instructions of all.
    fn calls_table(mut self) -> anyhow::Result<String> {
        ensure!(!self.calls.is_empty(), "no function was called");
        self.calls.sort_by(|one, other| other.4.total_cmp(&one.4));
        let mut text = String::from("\n| memory | bytes | way | calls |\n|---|---|---|---|\n");
        for kind in SPACES {
            for (name, way) in Way::ALL.into_iter().take(2) {
                let of = self
                    .calls
                    .iter()
                    .filter(|call| (call.0, call.1) == (way, kind));
                let most = of.map(|(_, _, function, hits, taken)| {
                    format!("`{function}` {hits}, {:.1}k", taken / 1e3)
                });
                let most: Vec<String> = most.take(MOST_CALLED).collect();
                let (memory, size, most) = (kind.0, Bytes(kind.2), most.join(", "));
                writeln!(text, "| {memory} | {size} | {name} | {most} |")?;
            }
        }
        Ok(text)
    }

    fn space_table(&self, ways: &[(&str, Way)]) -> anyhow::Result<String> {
        let zero = self.zero;
        let mut text = format!("\nzeroing a page of 4K: {zero:.0} instructions\n\n");
        text += "| memory | bytes | way | touch | map / unmap, touched | map, untouched |\n";
        text += "|---|---|---|---|---|---|\n";
        for kind in SPACES {
            for &(name, way) in ways {
                let [touch, map, unmap] = self.space(way, kind, true)?;
                let [_, both, _] = self.space(way, kind, false)?;
                let (memory, size) = (kind.0, Bytes(kind.2));
                writeln!(
                    text,
                    "| {memory} | {size} | {name} | {touch:.0} | {map:.0} / {unmap:.0} | {both:.0} |"
                )?;
            }
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_medians_in_instructions_without_the_clock() {
        let mut found = Found {
            empty: 10.0,
            ..Found::default()
        };
        assert!(found.table("none").is_err(), "no sample");
        for (who, lazy) in [
            (Who::Direct, false),
            (Who::Linux, false),
            (Who::Ours, false),
            (Who::Software, false),
            (Who::Linux, true),
            (Who::Ours, true),
        ] {
            for (threads, size) in THREADS
                .into_iter()
                .flat_map(|n| SIZES.map(|size| (n, size)))
            {
                for more in [0.0, 1.0, 50.0] {
                    let base = if who == Who::Direct { 20.0 } else { 100.0 };
                    let ns = (base + more) * f64::from(threads) * NS as f64;
                    let (map, unmap) = (ns, 2.0 * ns);
                    found.samples.push(Sample {
                        who,
                        lazy,
                        threads,
                        size,
                        map,
                        unmap,
                    });
                }
            }
        }
        assert!(found.table("none").is_err(), "no space");
        for ((_, way), kind) in Way::ALL
            .into_iter()
            .flat_map(|way| SPACES.map(|kind| (way, kind)))
        {
            for (present, more) in [(true, 0), (true, 9), (true, 1), (false, 100)] {
                let ns = |of: u64| ((of + more) * NS) as f64;
                found.spaces.push(SpaceSample {
                    way,
                    kind,
                    present,
                    touch: ns(20),
                    map: ns(30),
                    unmap: ns(40),
                });
            }
        }
        let table = found.table("all").unwrap();
        assert!(table.contains("| 4k | 2M | iommufd | 11 | 21 / 31 | 120 |"));
        assert!(table.contains("without translation, subtracted from Linux: 21 / 42"));
        assert!(
            table.contains("| 1 | 4M | 80 / 160 | 91 / 192 | 91 / 192 | 80 / 160 | 91 / 192 |")
        );
        assert!(table.contains("| 10 | 64K | 240 | 283 | – | 240 | 283 |"));
        assert_eq!(table.matches("| 1 | ").count(), SIZES.len());
    }
}
