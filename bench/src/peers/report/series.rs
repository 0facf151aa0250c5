//! The series: plots of size, fragments and threads, how threads scale, and memory.

use std::fmt::{Result, Write as _};

use super::figure;
use crate::peers::field::Who;
use crate::peers::plot::{Axis, COLOURS, Line, Plot};
use crate::peers::results::{Curve, Results, Tables};
use crate::peers::run::size;

/// The plots by the names of their files.
pub(super) fn plots(results: &Results) -> Vec<(String, Plot)> {
    let mut all = Vec::new();
    // One for each operation and size of leaves: more lines than that nobody tells apart.
    let mut operations: Vec<&str> = Vec::new();
    for curve in &results.sizes {
        if !operations.contains(&curve.operation.as_str()) {
            operations.push(&curve.operation);
        }
    }
    for operation in operations {
        let curves = results
            .sizes
            .iter()
            .filter(|curve| curve.operation == operation);
        let time = match operation.starts_with("translate") {
            true => "Time of one",
            false => "Time",
        };
        let name = operation.replace(", leaves of ", "-").to_lowercase();
        all.push((
            format!("size-{name}"),
            Plot {
                title: operation.to_owned(),
                x: axis("Bytes mapped", 16.0, bytes),
                y: axis(time, 10.0, nanoseconds),
                lines: coloured(lines(curves)),
            },
        ));
    }
    for operation in ["map", "unmap"] {
        let curves = results.fragments.iter();
        let lines = curves
            .filter(|curve| curve.operation == operation)
            .map(|curve| {
                let form = curve.name.rsplit(", ").next().unwrap_or_default();
                line(curve, &format!("{}, {form}", curve.format))
            });
        all.push((
            format!("fragments-{operation}"),
            Plot {
                title: format!("{operation}, fragments of 64 KiB in one call"),
                // In powers of two, too: 1K is 1,024.
                x: axis("Fragments", 4.0, bytes),
                y: axis("Time of one fragment", 2.0, nanoseconds),
                lines: coloured(lines),
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

fn bytes(value: f64) -> String {
    size(value.round() as u64)
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
    // Rates are at their best when nothing disturbs them, which is their highest; the median is fair
    // to both kinds.
    let points = curve
        .points
        .iter()
        .map(|point| (point.x, point.figure.median));
    Line {
        name: name.replace("dmaspace-iopt, ", ""),
        colour: "",
        dashed: !matches!(curve.who, Who::Exclusive | Who::Shared | Who::Scalar),
        points: points.collect(),
    }
}

const SIZES: &str = "Leaves of one size; tables are allocated and given back, runs are returned. A single page is \
    one of 64 in one table, which the first of them allocates; up to 512 pages, each range has its own table. \
    Translations are random single calls. The tables have lines with a step of 1.5× or \
    more: how much more the time grows than the size; for translations and fragments, how much the time of one grows.";
const FRAGMENTS: &str = "Fragments of 64 KiB, apart in memory and adjacent for the device, mapped by one call and \
    unmapped by one, each returned as a run; tables warm and empty, sizes of the format's choice.";

pub(super) fn write(text: &mut String, results: &Results) -> Result {
    let plots = plots(results);
    for (title, curves, part, conditions) in [
        ("Cost with size", &results.sizes, "size-", SIZES),
        ("Fragments", &results.fragments, "fragments", FRAGMENTS),
    ] {
        if curves.is_empty() {
            continue;
        }
        writeln!(text, "## {title}\n\n{conditions}\n")?;
        for (name, plot) in &plots {
            if name.starts_with(part) && plot.svg().is_some() {
                writeln!(text, "![{}](performance/{name}.svg)\n", plot.title)?;
            }
        }
        cliffs(text, curves)?;
    }
    threads(text, results)?;
    memory(text, results)
}

/// A step that is steeper is shown.
const CLIFF: f64 = 1.5;

/// The ends of each line that has a cliff, and its steepest step.
fn cliffs(text: &mut String, curves: &[Curve]) -> Result {
    writeln!(
        text,
        "| | form | first | last | steepest step |\n|---|---|---:|---:|---:|"
    )?;
    let shown = |curve: &&Curve| matches!(curve.who, Who::Exclusive | Who::Shared | Who::Linux);
    for curve in curves.iter().filter(shown) {
        let (Some(first), Some(last)) = (curve.points.first(), curve.points.last()) else {
            continue;
        };
        let each = curve.operation.starts_with("translate") || !curve.operation.contains("leaves");
        let steps = curve.points.windows(2).filter_map(|two| {
            let [a, b] = two else { return None };
            let grown = b.figure.median / a.figure.median;
            Some((if each { grown } else { grown / (b.x / a.x) }, b.x))
        });
        let steepest = steps.max_by(|a, b| a.0.total_cmp(&b.0));
        let Some((times, at)) = steepest.filter(|step| step.0 >= CLIFF) else {
            continue;
        };
        writeln!(
            text,
            "| {}, {} | {} | {} at {} | {} at {} | {}× at {} |",
            curve.operation,
            curve.format,
            curve.name.replace("dmaspace-iopt, ", ""),
            time(first.figure.median),
            size(first.x as u64),
            time(last.figure.median),
            size(last.x as u64),
            figure(times),
            size(at as u64),
        )?;
    }
    writeln!(text)
}

fn time(value: f64) -> String {
    let shown = nanoseconds(value);
    let (number, unit) = shown.split_once(' ').unwrap_or((&shown, ""));
    number.parse().map_or_else(
        |_| shown.clone(),
        |number| format!("{} {unit}", figure(number)),
    )
}

/// How the shared form scales, and how plain stores do.
fn threads(text: &mut String, results: &Results) -> Result {
    if results.threads.is_empty() {
        return Ok(());
    }
    writeln!(
        text,
        "## Threads\n\n![threads](performance/threads.svg)\n\n\
         Millions of operations a second, all threads together, and how many times those of one thread; beside it threads \
         that store to as many cells in the same places. The aim is 95 % of these stores' scaling with 2 threads \
         apart, and no collapse with more threads than processors ({}).",
        results.origin.processors
    )?;
    for ours in results
        .threads
        .iter()
        .filter(|curve| curve.who == Who::Shared)
    {
        writeln!(
            text,
            "\n| {}: threads | shared | scaling | stores | scaling | of the stores' |\n\
             |---|---:|---:|---:|---:|---:|",
            ours.operation
        )?;
        let same = |curve: &&Curve| curve.who == Who::Limit && curve.operation == ours.operation;
        let stores = results.threads.iter().find(same);
        let one = |curve: &Curve| curve.points.first().map(|point| point.figure.median);
        for point in &ours.points {
            let scaling = one(ours).map(|one| point.figure.median / one);
            let store = stores.and_then(|stores| {
                let there = stores.points.iter().find(|other| other.x == point.x)?;
                Some((there.figure.median, there.figure.median / one(stores)?))
            });
            let part = match (scaling, store) {
                (Some(ours), Some((_, theirs))) => format!("{:.0} %", 100.0 * ours / theirs),
                _ => "–".to_owned(),
            };
            let times = |scaling: Option<f64>| {
                scaling.map_or_else(|| "–".to_owned(), |x| format!("{}×", figure(x)))
            };
            writeln!(
                text,
                "| {} | {} | {} | {} | {} | {part} |",
                point.x,
                rate(point.figure.median),
                times(scaling),
                store.map_or_else(|| "–".to_owned(), |store| rate(store.0)),
                times(store.map(|store| store.1)),
            )?;
        }
    }
    writeln!(text)
}

fn rate(value: f64) -> String {
    figure(value / 1e6)
}

fn memory(text: &mut String, results: &Results) -> Result {
    if results.memory.is_empty() {
        return Ok(());
    }
    let times = |found: &Tables| found.tables as f64 / found.least.max(1) as f64;
    let larger = results.memory.iter().filter(|found| times(found) >= 1.0005);
    let rows: Vec<String> = larger
        .map(|found| {
            format!(
                "| {} | {} | {:.3} |\n",
                found.format,
                size(found.page),
                times(found)
            )
        })
        .collect();
    writeln!(
        text,
        "## Memory\n\n\
         Bytes of all tables for memory mapped in one stretch, beside the least possible: whole tables of leaves, and \
         one entry above for each table. {} of {} pairs of a format and a size of leaves take the least.\n",
        results.memory.len() - rows.len(),
        results.memory.len()
    )?;
    if !rows.is_empty() {
        writeln!(
            text,
            "| format | leaf | times the least |\n|---|---:|---:|\n{}",
            rows.concat()
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_in_units_that_fit() {
        assert_eq!(nanoseconds(10.0), "10 ns");
        assert_eq!(nanoseconds(1e5), "100 µs");
        assert_eq!(number(1e7), "10M");
        assert_eq!(bytes(4f64.powf(10.0)), "1M");
    }
}
