//! The runs: rows, and the series beside them. All subjects of a row take turns, round by round, so
//! that whatever else goes on on the machine meets all of them.

use std::time::Duration;

use anyhow::ensure;

use crate::peers::field::{CONTESTS, Contest, Entrant, Who};
use crate::peers::linux::Programs;
use crate::peers::ours::{Terrain, store_loops};
use crate::peers::results::{Curve, Entry, Measured, Point, Results, available_memory};
use crate::peers::rows::ROWS;
use crate::peers::stats::Figure;
use crate::peers::work::Work;

/// How much is run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Rounds of rows.
    pub rounds: u32,
    /// Only what has one of these in its name, `row/format` or `series/format`; all without any.
    pub only: Vec<String>,
    /// Linux's programs; none where they cannot be had or are not wanted.
    pub linux: Option<Programs>,
}

/// Entries of an operation up to which others take part in the series by size: what their memory is
/// made for.
const OTHERS: u64 = 1 << 22;
/// Rounds of operations of this many entries or more.
const LONG: (u64, u32) = (1 << 22, 3);
/// A format without groups, and formats with them and with the same sizes otherwise.
const GROUPS: [&str; 3] = ["vtd-ss", "arm-s1-4k", "riscv"];
/// How often the formats take turns in each round: one such unmap is short.
const TURNS: u32 = 20;

impl Plan {
    fn wants(&self, what: &str, format: &str) -> bool {
        let name = format!("{what}/{format}");
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part.as_str()))
    }

    /// Rounds of a series: its points are many.
    fn few(&self) -> u32 {
        (self.rounds / 3).max(3)
    }

    /// Runs everything that is wanted.
    pub fn run(&self) -> anyhow::Result<Results> {
        let linux = self.linux.as_ref().map(Programs::made_by);
        let mut results = Results::here(self.rounds, linux);
        for contest in CONTESTS {
            self.rows(contest, &mut results)?;
        }
        self.groups(&mut results)?;
        for contest in CONTESTS.iter().filter(|contest| contest.reference) {
            self.sizes(contest, &mut results)?;
            self.threads(contest, &mut results)?;
        }
        Ok(results)
    }

    fn rows(&self, contest: &Contest, results: &mut Results) -> anyhow::Result<()> {
        let wanted = |row: &&crate::peers::rows::Row| self.wants(row.id, contest.id);
        let rows: Vec<_> = ROWS.iter().filter(wanted).collect();
        if rows.is_empty() {
            return Ok(());
        }
        let mut entrants = contest.entrants(self.linux.as_ref())?;
        for row in rows {
            let Some(work) = row.work(&contest.pages) else {
                continue;
            };
            // Work that our tables do not offer in this format is not a row of it, even if others offer it.
            let ours = entrants.iter_mut().find(|(who, _)| *who == Who::Exclusive);
            if ours.is_some_and(|(_, ours)| ours.sample(&work).is_ok_and(|sample| sample.is_none()))
            {
                continue;
            }
            let entries = turns(&mut entrants, &work, self.rounds);
            if entries.is_empty() {
                continue;
            }
            let figures: Vec<String> = entries
                .iter()
                .map(|entry| format!("{} {:.1}", entry.name, entry.figure.min / row.unit))
                .collect();
            eprintln!("{}/{}: {}", row.id, contest.id, figures.join(", "));
            results.rows.push(Measured {
                row: row.id.to_owned(),
                format: contest.id.to_owned(),
                work: format!("{work:?}"),
                entries,
            });
        }
        Ok(())
    }

    /// The row `unmap-256` of formats with and without groups, in turns with each other.
    fn groups(&self, results: &mut Results) -> anyhow::Result<()> {
        let Some(row) = ROWS.iter().find(|row| row.id == "unmap-256") else {
            return Ok(());
        };
        let mut formats = Vec::new();
        let mut works = Vec::new();
        let mut entrants = Vec::new();
        for id in GROUPS.into_iter().filter(|id| self.wants("groups", id)) {
            for contest in CONTESTS.iter().filter(|contest| contest.id == id) {
                let mut ours = contest.entrants(None)?;
                ours.retain(|(who, _)| matches!(who, Who::Exclusive | Who::Shared));
                formats.push((contest.id, ours.len()));
                works.extend(row.work(&contest.pages));
                entrants.extend(ours);
            }
        }
        let Some(work) = works.first() else {
            return Ok(());
        };
        ensure!(
            works.iter().all(|other| other == work),
            "groups: the formats have other sizes"
        );
        let entries = turns(&mut entrants, work, self.rounds * TURNS);
        ensure!(
            entries.len() == entrants.len(),
            "groups: a format failed in its turn"
        );
        let mut entries = entries.into_iter();
        for (format, count) in formats {
            let entries: Vec<Entry> = entries.by_ref().take(count).collect();
            let medians: Vec<String> = entries
                .iter()
                .map(|entry| format!("{} {:.1}", entry.name, entry.figure.median))
                .collect();
            eprintln!("groups/{format}: {}, medians", medians.join(", "));
            results.groups.rows.push(Measured {
                row: row.id.to_owned(),
                format: format.to_owned(),
                work: format!("{work:?}"),
                entries,
            });
        }
        results.groups.commit = results.origin.commit.clone();
        Ok(())
    }

    /// Map and unmap with new tables, from one page to 1 TiB.
    fn sizes(&self, contest: &Contest, results: &mut Results) -> anyhow::Result<()> {
        if !self.wants("sizes", contest.id) {
            return Ok(());
        }
        let page = contest.pages.small;
        let fresh = || -> anyhow::Result<Vec<Entrant>> {
            let mut all = contest.entrants(self.linux.as_ref())?;
            // More lines than these are not told apart.
            all.retain(|(who, _)| !matches!(who, Who::Scalar | Who::ScalarShared));
            Ok(all)
        };
        let mut entrants = fresh()?;
        for len in lengths(page) {
            let count = len / page;
            let rounds = if count >= LONG.0 { LONG.1 } else { self.few() };
            // One set of tables for the exclusive form, two for the shared one.
            if count * 8 * 4 > available_memory() {
                eprintln!("sizes/{}: no memory for {}", contest.id, size(len));
                break;
            }
            if count > OTHERS {
                entrants.retain(|(who, _)| matches!(who, Who::Exclusive | Who::Shared));
            }
            let runs = true;
            for (operation, work) in [
                ("map", Work::MapAllocated { page, count }),
                ("unmap", Work::UnmapAllocated { page, count, runs }),
            ] {
                for entry in turns(&mut entrants, &work, rounds) {
                    add(&mut results.sizes, operation, contest, entry, len as f64);
                }
            }
            if count >= OTHERS {
                // Tables of this size are not kept while the next ones are made.
                entrants = fresh()?;
            }
        }
        eprintln!("sizes/{}", contest.id);
        Ok(())
    }

    /// 1 to 16 threads on one table, beside as many that only store.
    fn threads(&self, contest: &Contest, results: &mut Results) -> anyhow::Result<()> {
        if !self.wants("threads", contest.id) {
            return Ok(());
        }
        let lasting = Duration::from_millis(if self.rounds < 10 { 20 } else { 50 });
        for (at, operation) in [
            (
                Terrain::Apart,
                "map and unmap 256 pages, each in its own tables",
            ),
            (
                Terrain::OneTable,
                "map and unmap 1 page, neighbours in one leaf table",
            ),
        ] {
            let counts = [1, 2, 4, 10, 16];
            let mut rates = vec![(Vec::new(), Vec::new()); counts.len()];
            for _ in 0..self.few() {
                for (count, (ours, stores)) in counts.into_iter().zip(&mut rates) {
                    ours.push(contest.threads(at, count, lasting)?);
                    stores.push(store_loops(at, count, lasting));
                }
            }
            for (count, (ours, stores)) in counts.into_iter().zip(rates) {
                for (who, name, samples) in [
                    (Who::Shared, "dmaspace-iopt, shared", ours),
                    (Who::Limit, "stores", stores),
                ] {
                    if let Some(figure) = Figure::of(&samples) {
                        let entry = Entry {
                            who,
                            name: name.to_owned(),
                            figure,
                        };
                        add(
                            &mut results.threads,
                            operation,
                            contest,
                            entry,
                            count as f64,
                        );
                    }
                }
            }
            eprintln!("threads/{}: {operation}", contest.id);
        }
        Ok(())
    }
}

/// Has all entrants do the work, in turns. The first time in each round is not counted: it finds the
/// caches as another left them. An entrant that fails is left out, with a message.
fn turns(entrants: &mut [Entrant], work: &Work, rounds: u32) -> Vec<Entry> {
    let mut samples = vec![Vec::new(); entrants.len()];
    let mut out = vec![false; entrants.len()];
    for _ in 0..rounds {
        for (((_, subject), samples), out) in entrants.iter_mut().zip(&mut samples).zip(&mut out) {
            if *out {
                continue;
            }
            let warm = subject.sample(work);
            match warm.and_then(|_| subject.sample(work)) {
                Ok(Some(sample)) => samples.push(sample),
                Ok(None) => *out = true,
                Err(error) => {
                    eprintln!("{}: {work:?}: {error:#}", subject.name());
                    samples.clear();
                    *out = true;
                }
            }
        }
    }
    let all = entrants.iter().zip(samples);
    let entry = |((who, subject), samples): (&Entrant, Vec<f64>)| {
        Some(Entry {
            who: *who,
            name: subject.name(),
            figure: Figure::of(&samples)?,
        })
    };
    all.filter_map(entry).collect()
}

/// Adds a point to the line that it belongs to, which may be a new one.
fn add(curves: &mut Vec<Curve>, operation: &str, contest: &Contest, entry: Entry, x: f64) {
    let point = Point {
        x,
        figure: entry.figure,
    };
    let same = |curve: &&mut Curve| {
        curve.operation == operation && curve.format == contest.id && curve.name == entry.name
    };
    match curves.iter_mut().find(same) {
        Some(curve) => curve.points.push(point),
        None => curves.push(Curve {
            operation: operation.to_owned(),
            format: contest.id.to_owned(),
            who: entry.who,
            name: entry.name,
            points: vec![point],
        }),
    }
}

/// From a page to 1 TiB, each four times the one before but for the last.
fn lengths(page: u64) -> impl Iterator<Item = u64> {
    let most = 1u64 << 40;
    let four = std::iter::successors(Some(page), |len| len.checked_mul(4));
    four.take_while(move |len| *len < most).chain([most])
}

/// A power of two of bytes, short: 4K, 2M, 1T.
pub fn size(bytes: u64) -> String {
    let (log2, units) = (bytes.max(1).ilog2(), ["", "K", "M", "G", "T", "P", "E"]);
    let unit = (log2 / 10) as usize;
    format!(
        "{}{}",
        bytes >> (10 * unit),
        units.get(unit).copied().unwrap_or_default()
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::peers::work::Subject;

    /// Counts how often it is called, and fails or offers nothing from some call on.
    struct Counter(u32, Option<u32>);

    impl Subject for Counter {
        fn name(&self) -> String {
            "counter".to_owned()
        }

        fn sample(&mut self, _: &Work) -> anyhow::Result<Option<f64>> {
            self.0 += 1;
            if self.1.is_some_and(|last| self.0 > last) {
                anyhow::bail!("enough");
            }
            Ok((self.1 != Some(0)).then_some(f64::from(self.0)))
        }
    }

    #[test]
    fn every_second_sample_counts_and_who_fails_is_left_out() {
        let mut all: Vec<Entrant> = vec![
            (Who::Shared, Box::new(Counter(0, None))),
            (Who::Crate, Box::new(Counter(0, Some(3)))),
        ];
        let entries = turns(&mut all, &Work::MapChosen, 3);
        assert_eq!(entries.len(), 1);
        let figure = entries[0].figure;
        assert_eq!((figure.samples, figure.min, figure.median), (3, 2.0, 4.0));
    }

    #[test]
    fn filters_are_parts_of_row_and_format() {
        let only = vec!["map-1/vtd".to_owned(), "threads/".to_owned()];
        let plan = Plan {
            rounds: 3,
            only,
            linux: None,
        };
        assert!(plan.wants("map-1", "vtd-ss") && plan.wants("threads", "x86-64"));
        assert!(plan.wants("unmap-1", "vtd-ss") && !plan.wants("map-1", "amdv1"));
        assert!(!plan.wants("map-256", "vtd-ss"));
    }

    #[test]
    fn lengths_end_at_a_tebibyte() {
        assert_eq!(lengths(4096).count(), 15);
        assert!(lengths(4096).all(|len| len.trailing_zeros() % 2 == 0));
        let blocks: Vec<u64> = lengths(2 << 20).collect();
        assert_eq!(blocks[..2], [2 << 20, 8 << 20]);
        assert_eq!(blocks[9..], [512 << 30, 1 << 40]);
    }

    #[test]
    fn sizes_are_short() {
        let all = [1, 4096, 64 << 10, 2 << 20, 1 << 30, 1 << 40].map(size);
        assert_eq!(all, ["1", "4K", "64K", "2M", "1G", "1T"]);
    }
}
