//! The document: figures beside their aims, what was missed and why, plots, how to repeat.
//!
//! Everything in it comes from [`Results`], from the rows and from the reasons; nothing is written by
//! hand. Figures are medians.

use std::fmt::{Result, Write as _};

use crate::peers::field::{CONTESTS, Contest, Who};
use crate::peers::plot::{Axis, COLOURS, Line, Plot};
use crate::peers::reasons::reason;
use crate::peers::results::{Curve, Entry, Groups, Measured, Results};
use crate::peers::rows::{Aim, ROWS, Row};
use crate::peers::run::size;

/// Text in the place of Linux's figures.
const NOT_MEASURED: &str = "not measured";
/// How far formats but the reference may be from aims that do not compare with Linux.
const LENIENT: f64 = 1.5;

const OURS: [(Who, &str); 2] = [(Who::Exclusive, "exclusive"), (Who::Shared, "shared")];

/// Path and content of every file, below the directory of documents.
pub fn files(results: &Results) -> Vec<(String, String)> {
    let mut files = vec![("performance.md".to_owned(), document(results))];
    for (name, plot) in plots(results) {
        if let Some(svg) = plot.svg() {
            files.push((format!("performance/{name}.svg"), svg));
        }
    }
    files
}

/// The document.
pub fn document(results: &Results) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, results);
    text
}

fn write(text: &mut String, results: &Results) -> Result {
    writeln!(
        text,
        "# Performance\n\n\
         *Written by `cargo xtask bench tables --docs docs`; do not edit.*\n\n\
         Times of `dmaspace-iopt`'s page tables beside the machine's limit (relaxed stores of the same entries), Linux's \
         code and two foreign crates, in one run. Figures are medians of {} samples, taken in turns. Compare ratios: \
         absolute figures differ from machine to machine.\n",
        results.rounds
    )?;
    operations(text, results)?;
    missed(text, results)?;
    series(text, results)?;
    groups(text, &results.groups)?;
    origin(text, results)
}

fn operations(text: &mut String, results: &Results) -> Result {
    let linux = |entry: &Entry| entry.who == Who::Linux;
    let no_linux = if results.rows.iter().flat_map(|row| &row.entries).any(linux) {
        "–"
    } else {
        NOT_MEASURED
    };
    writeln!(
        text,
        "## Operations\n\n\
         Time of an operation in a batch: 64 single pages, every second one; 8 ranges of up to 512 pages, each in a table \
         that is there before; one larger range, in new tables. Table memory is recycled, and zeroing is timed. Our unmaps \
         make a gather, flushed by a unit that does nothing, return runs, and give tables back; crates and Linux return no \
         runs.\n\n\
         Ours: x86-64, 4 levels, exclusive/shared form; without `std` there are no vectors. The limit of unmaps reads and \
         clears, that of harvests reads. Linux: its fastest format with the same sizes and compiler, beside the shared \
         form.\n\n\
         | name | operation | aim | ours | without `std` | limit | Linux | crate |\n\
         |---|---|---:|---:|---:|---:|---:|---:|"
    )?;
    for row in ROWS {
        let Some(shown) = first(results, row) else {
            continue;
        };
        let other = |who, none: &str| {
            let found = anywhere(results, row, who);
            found.map_or_else(
                || none.to_owned(),
                |(entry, format)| {
                    let home = if who == Who::Linux {
                        format
                    } else {
                        &entry.name
                    };
                    format!("{} ({home})", shown.show(Some(entry.figure.median)))
                },
            )
        };
        writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {} | {} | {} |",
            row.id,
            shown.title(),
            aims(row),
            shown.both([Who::Exclusive, Who::Shared]),
            shown.both([Who::Scalar, Who::ScalarShared]),
            shown.show(shown.time(Who::Limit)),
            other(Who::Linux, no_linux),
            other(Who::Crate, "–"),
        )?;
    }
    writeln!(text)
}

/// Its aims, in words.
fn aims(row: &Row) -> String {
    match row.aims {
        [exclusive, shared] if exclusive == shared => exclusive.to_string(),
        [exclusive, shared] if exclusive.to_what() == shared.to_what() => {
            format!("{}/{shared}", exclusive.factor())
        }
        [exclusive, shared] => format!("{exclusive} / {shared}"),
    }
}

/// The row in the reference format, or in the first that has it.
fn first<'a>(results: &'a Results, row: &'static Row) -> Option<Shown<'a>> {
    let mut contests: Vec<&Contest> = CONTESTS.iter().collect();
    contests.sort_by_key(|contest| !contest.reference);
    let find = |contest: &Contest| Shown::find(results, row, contest.id);
    contests.into_iter().find_map(find)
}

/// The fastest of those who are this to us, in any format with the sizes of the reference, and that
/// format. In others it would be other work: as many bytes are fewer pages, or are found by fewer
/// levels; where each chooses its own sizes, it would be so in any other.
fn anywhere<'a>(results: &'a Results, row: &Row, who: Who) -> Option<(&'a Entry, &'a str)> {
    let reference = CONTESTS.iter().find(|contest| contest.reference)?;
    let alike = |format: &str| {
        let mut contests = CONTESTS.iter();
        let same = |c: &Contest| c.reference || row.has_sizes() && c.pages == reference.pages;
        contests.any(|c| c.id == format && same(c))
    };
    let of_row = |measured: &&Measured| measured.row == row.id && alike(&measured.format);
    let rows = results.rows.iter().filter(of_row);
    let all = rows.flat_map(|measured| measured.entries.iter().map(|e| (e, &*measured.format)));
    all.filter(|(entry, _)| entry.who == who)
        .min_by(|a, b| a.0.figure.median.total_cmp(&b.0.figure.median))
}

fn missed(text: &mut String, results: &Results) -> Result {
    writeln!(
        text,
        "## Missed aims\n\n\
         x86-64 is held to all aims, other formats to those beside Linux, and to the rest within {LENIENT} times; \
         *missed*: by how many formats and forms. Figures are time : aim; instructions are callgrind's.\n\n\
         | name | missed | x86-64 | furthest | reason |\n|---|---:|---:|---|---|"
    )?;
    for row in ROWS {
        let mut missed = 0;
        let (mut reference, mut furthest) = (None::<f64>, None::<(f64, String)>);
        for contest in CONTESTS {
            let Some(shown) = Shown::find(results, row, contest.id) else {
                continue;
            };
            for (who, name) in OURS {
                let Some((time, aim)) = shown.time(who).zip(shown.aim(who)) else {
                    continue;
                };
                let strict = contest.reference || matches!(row.aim(who), Aim::Linux(_));
                let times = time / aim;
                if times <= if strict { 1.0 } else { LENIENT } {
                    continue;
                }
                missed += 1;
                if contest.reference {
                    reference = Some(reference.unwrap_or(0.0).max(times));
                }
                if furthest.as_ref().is_none_or(|known| times > known.0) {
                    let what = format!("{} {name} {}×", contest.id, figure(times));
                    furthest = Some((times, what));
                }
            }
        }
        if let Some((_, furthest)) = furthest {
            let reference = reference.map_or_else(|| "–".into(), |it| format!("{}×", figure(it)));
            let why = reason(row.id).unwrap_or("not explained yet");
            writeln!(
                text,
                "| `{}` | {missed} | {reference} | {furthest} | {why} |",
                row.id
            )?;
        }
    }
    writeln!(text)
}

fn origin(text: &mut String, results: &Results) -> Result {
    let origin = &results.origin;
    writeln!(
        text,
        "## Machine\n\n\
         {}, {} processors; load before (1, 5, 15 minutes) {}; commit `{}`; {}; Linux's code, 7.2, compiled by {}; {} \
         UTC. Some rows only: `cargo xtask bench tables --only map-256/x86-64`.",
        origin.processor,
        origin.processors,
        origin.load,
        origin.commit,
        origin.rustc,
        origin.linux.as_deref().unwrap_or(NOT_MEASURED),
        origin.date
    )
}

/// A row as it was measured in one format.
#[derive(Clone, Copy)]
struct Shown<'a> {
    row: &'static Row,
    measured: &'a Measured,
    results: &'a Results,
}

impl<'a> Shown<'a> {
    /// `None` when it was not measured there.
    fn find(results: &'a Results, row: &'static Row, format: &str) -> Option<Self> {
        let here = |measured: &&Measured| measured.row == row.id && measured.format == format;
        let measured = results.rows.iter().find(here)?;
        Some(Self {
            row,
            measured,
            results,
        })
    }

    /// The median of the fastest of those who are this to us, nanoseconds.
    fn time(&self, who: Who) -> Option<f64> {
        let entries = self
            .measured
            .entries
            .iter()
            .filter(|entry| entry.who == who);
        let medians = entries.map(|entry| entry.figure.median);
        medians.min_by(f64::total_cmp)
    }

    /// The aim of one of our forms, nanoseconds.
    fn aim(&self, who: Who) -> Option<f64> {
        match self.row.aim(who) {
            Aim::Limit(factor) => Some(self.time(Who::Limit)? * factor),
            Aim::Linux(factor) => Some(self.time(Who::Linux)? * factor),
            Aim::Crate(factor) => {
                let reference = CONTESTS.iter().find(|contest| contest.reference)?;
                let there = Self::find(self.results, self.row, reference.id)?;
                Some(there.time(Who::Crate)? * factor)
            }
        }
    }

    /// A time in the row's unit.
    fn show(&self, time: Option<f64>) -> String {
        time.map_or_else(|| "–".to_owned(), |time| figure(time / self.row.unit))
    }

    /// The times of two.
    fn both(&self, both: [Who; 2]) -> String {
        match both.map(|who| self.time(who)) {
            [None, None] => "–".to_owned(),
            both => both.map(|time| self.show(time)).join("/"),
        }
    }

    /// The title with its unit.
    fn title(&self) -> String {
        let unit = if self.row.unit > 1.0 { "µs" } else { "ns" };
        format!("{}, {unit}", self.row.title)
    }
}

/// A number with as many digits as mean something.
fn figure(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// The plots by the names of their files.
fn plots(results: &Results) -> Vec<(String, Plot)> {
    let mut all = Vec::new();
    for operation in ["map", "unmap"] {
        let curves = results.sizes.iter();
        let curves = curves.filter(|curve| curve.operation == operation);
        all.push((
            format!("size-{operation}"),
            Plot {
                title: format!("{operation}, leaves of 4K"),
                x: axis("Bytes mapped", 16.0, |value| size(value.round() as u64)),
                y: axis("Time", 10.0, nanoseconds),
                lines: coloured(lines(curves)),
            },
        ));
    }
    let lines = results.threads.iter().map(|curve| {
        let place = curve.operation.rsplit(", ").next().unwrap_or_default();
        line(curve, &format!("{}, {place}", curve.name))
    });
    all.push((
        "threads".to_owned(),
        Plot {
            title: "Threads on one shared table".to_owned(),
            x: axis("Threads", 2.0, number),
            y: axis("Operations a second, all together", 10.0, number),
            lines: coloured(lines),
        },
    ));
    all
}

fn axis(title: &str, step: f64, show: fn(f64) -> String) -> Axis {
    let title = title.to_owned();
    Axis { title, step, show }
}

/// Each in a colour of its own, as far as there are any.
fn coloured(lines: impl IntoIterator<Item = Line>) -> Vec<Line> {
    let colours = COLOURS.into_iter().cycle();
    let coloured = lines.into_iter().zip(colours);
    coloured
        .map(|(line, colour)| Line { colour, ..line })
        .collect()
}

/// Nanoseconds in the unit that fits.
fn nanoseconds(value: f64) -> String {
    let (value, unit) = match value {
        v if v < 1e3 => (v, "ns"),
        v if v < 1e6 => (v / 1e3, "µs"),
        v if v < 1e9 => (v / 1e6, "ms"),
        v => (v / 1e9, "s"),
    };
    // Parts of an axis are powers of a step: rounded they are what they stand for.
    format!("{} {unit}", (value * 1e3).round() / 1e3)
}

fn number(value: f64) -> String {
    match value {
        v if v < 1e3 => format!("{}", (v * 1e3).round() / 1e3),
        v if v < 1e6 => format!("{}k", (v / 1e3 * 1e3).round() / 1e3),
        v => format!("{}M", (v / 1e6 * 1e3).round() / 1e3),
    }
}

/// The lines of curves; those of Linux, one for each compiler, are one with the best of all.
fn lines<'a>(curves: impl Iterator<Item = &'a Curve>) -> Vec<Line> {
    let (mut lines, mut linux): (Vec<Line>, Option<Line>) = (Vec::new(), None);
    for curve in curves {
        let mut line = line(curve, &curve.name);
        if curve.who != Who::Linux {
            lines.push(line);
            continue;
        }
        if let Some(best) = &linux {
            let best_at = |x: f64| best.points.iter().find(|point| point.0 == x);
            for point in &mut line.points {
                point.1 = best_at(point.0).map_or(point.1, |best| best.1.min(point.1));
            }
        }
        linux = Some(line);
    }
    lines.extend(linux.map(|line| Line {
        name: "Linux, fastest compiler".to_owned(),
        ..line
    }));
    lines
}

fn line(curve: &Curve, name: &str) -> Line {
    let points = curve.points.iter();
    Line {
        name: name.replace("dmaspace-iopt, ", ""),
        colour: "",
        dashed: !matches!(curve.who, Who::Exclusive | Who::Shared),
        points: points.map(|point| (point.x, point.figure.median)).collect(),
    }
}

fn series(text: &mut String, results: &Results) -> Result {
    let shown = |name: &str| {
        let plots = plots(results);
        let plot = plots.into_iter().find(|(known, _)| known == name);
        plot.filter(|(_, plot)| plot.svg().is_some())
    };
    let sizes: Vec<_> = ["size-map", "size-unmap"]
        .into_iter()
        .filter_map(shown)
        .collect();
    if !sizes.is_empty() {
        writeln!(
            text,
            "## Cost with size\n\n\
             Tables are allocated and given back, runs are returned.\n"
        )?;
        for (name, plot) in sizes {
            writeln!(text, "![{}](performance/{name}.svg)\n", plot.title)?;
        }
    }
    let Some((name, plot)) = shown("threads") else {
        return Ok(());
    };
    writeln!(
        text,
        "## Threads\n\n![{}](performance/{name}.svg)\n\n\
         Millions of operations a second, all threads together, and how many times those of one thread. The aim is 95 % \
         of the scaling of threads that store to as many cells, with 2 threads apart, and no collapse with more threads \
         than processors ({}).\n",
        plot.title, results.origin.processors
    )?;
    let curves = |who| {
        let of = move |curve: &&Curve| curve.who == who;
        results.threads.iter().filter(of)
    };
    let ours: Vec<&Curve> = curves(Who::Shared).collect();
    let heads = ours
        .iter()
        .map(|curve| format!(" {} | of the stores' |", curve.operation));
    writeln!(
        text,
        "| threads |{}\n|---:|{}",
        heads.collect::<String>(),
        "---:|---:|".repeat(ours.len())
    )?;
    let counts = ours.first().map_or(&[][..], |curve| &curve.points);
    for x in counts.iter().map(|point| point.x) {
        write!(text, "| {x} |")?;
        for curve in &ours {
            let at = |curve: &Curve| curve.points.iter().find(|point| point.x == x).copied();
            let scaling = |curve: &Curve| {
                Some(at(curve)?.figure.median / curve.points.first()?.figure.median)
            };
            let stores = curves(Who::Limit).find(|other| other.operation == curve.operation);
            let part = scaling(curve).zip(stores.and_then(scaling));
            let rate = at(curve).zip(scaling(curve));
            write!(
                text,
                " {} | {} |",
                rate.map_or_else(
                    || "–".into(),
                    |(at, times)| format!(
                        "{} ({}×)",
                        figure(at.figure.median / 1e6),
                        figure(times)
                    )
                ),
                part.map_or_else(
                    || "–".into(),
                    |(own, theirs)| format!("{:.0} %", 100.0 * own / theirs)
                ),
            )?;
        }
        writeln!(text)?;
    }
    writeln!(text)
}

/// Formats with groups beside one without.
fn groups(text: &mut String, groups: &Groups) -> Result {
    let Some(first) = groups.rows.first() else {
        return Ok(());
    };
    writeln!(
        text,
        "## Groups\n\n\
         `unmap-256` of single pages in formats that can join neighbouring entries to a group, beside the first, which \
         cannot. In brackets: the ratio to it; the aim is 1.2. Commit `{}`.\n\n\
         | format | exclusive | shared |\n|---|---:|---:|",
        groups.commit
    )?;
    let median = |row: &Measured, who| {
        let entry = row.entries.iter().find(|entry| entry.who == who)?;
        Some(entry.figure.median)
    };
    for row in &groups.rows {
        let cells = OURS.map(|(who, _)| match median(row, who).zip(median(first, who)) {
            Some((here, there)) => format!("{} ({}×)", figure(here), figure(here / there)),
            None => "–".to_owned(),
        });
        writeln!(text, "| {} | {} |", row.format, cells.join(" | "))?;
    }
    writeln!(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
