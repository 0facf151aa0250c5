//! The figures of the origins as one page that needs nothing else: no network, no script.
//!
//! Without a crate for templates: `maud` is a procedural macro to build, for a dozen tags.

use std::fmt::Write as _;

use lab::bench::{Group, GroupReport, Line, Unit, origin};
use lab::plot::{self, Axis, Plot, bars, escape};

use super::text::{blocks, columns, heading, machine, table};
use crate::bench::Measured;

/// The page's own style, beside that of its plots.
const STYLE: &str = "\
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:2rem auto;\
max-width:62rem;padding:0 1rem}\n\
table{border-collapse:collapse;font-size:13px;margin:1rem 0;font-variant-numeric:tabular-nums}\n\
th,td{border-bottom:1px solid var(--line);padding:.15rem .7rem;text-align:right;white-space:nowrap}\n\
th:first-child,td:first-child{text-align:left}\n\
.faint{color:var(--faint)}.plots{display:flex;flex-wrap:wrap;gap:1rem}.wide{overflow-x:auto}\n\
svg{max-width:100%;height:auto}\n";

/// The page.
pub(crate) fn page(measured: &Measured) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width\"/>\n\
         <title>dmaspace bench</title>\n<style>\n{}{STYLE}</style>\n</head>\n<body>\n\
         <h1>dmaspace bench</h1>\n\
         <p>What five public documents have measured, on this machine: their figures, the \
         page-by-page way measured here, and this project measured here, in one run and in turns. \
         What was published ran on other machines: compare ratios.</p>\n<table>\n",
        plot::STYLE
    );
    for (name, value) in machine(measured) {
        let value = escape(&value);
        let _ = writeln!(page, "<tr><th>{name}</th><td>{value}</td></tr>");
    }
    page += "</table>\n";
    for group in &measured.report.groups {
        one(&mut page, group);
    }
    page + "</body>\n</html>\n"
}

fn one(page: &mut String, group: &GroupReport) {
    let title = escape(heading(group.group));
    let source = escape(origin::machine(group.group));
    let _ = writeln!(
        page,
        "<h2>{title}</h2>\n<p class=\"faint\">Origin: {source}.</p>\n<ul>"
    );
    for note in &group.notes {
        let _ = writeln!(page, "<li>{}</li>", escape(note));
    }
    for missing in &group.not_run {
        let (what, why) = (escape(&missing.what), escape(&missing.why));
        let _ = writeln!(page, "<li>Not run: {what}: {why}</li>");
    }
    *page += "</ul>\n<div class=\"plots\">\n";
    *page += &match group.group {
        Group::Map => over_sizes(group),
        Group::Pin => by_op(group, &["map for DMA", "charge and map"]),
        Group::Balloon => by_op(group, &["inflate"]),
        Group::Tables => by_op(
            group,
            &[
                "map 256 pages",
                "unmap 256 pages",
                "split 1 block",
                "harvest 512 pages",
            ],
        ),
        Group::Numa => nodes(group),
    };
    *page += "</div>\n";
    for block in blocks(group) {
        let rows = table(group.group, &block);
        let title = escape(&block.heading());
        let _ = writeln!(page, "<h3>{title}</h3>\n<div class=\"wide\"><table>");
        for (nth, row) in rows.iter().enumerate() {
            let cell = if nth == 0 { "th" } else { "td" };
            *page += "<tr>";
            for text in row {
                let _ = write!(page, "<{cell}>{}</{cell}>", escape(text));
            }
            *page += "</tr>\n";
        }
        *page += "</table></div>\n";
    }
}

/// Each operation of each format over its sizes.
fn over_sizes(group: &GroupReport) -> String {
    let lines = group.lines();
    let mut plots: Vec<(&str, &str)> = Vec::new();
    for line in &lines {
        let plot = (line.key.format, line.key.op);
        if !plots.contains(&plot) {
            plots.push(plot);
        }
    }
    let plot = |(format, op): (&str, &str)| {
        let curve = |name: &str, colour, threads, value: fn(&Line<'_>) -> Option<f64>| {
            let points = lines.iter().filter(|line| {
                let key = line.key;
                (key.format, key.op, key.threads) == (format, op, threads)
            });
            let points = points.filter_map(|line| Some((line.key.size_bytes as f64, value(line)?)));
            let words = if threads == 1 { "thread" } else { "threads" };
            plot::Line {
                name: format!("{name}, {threads} {words}"),
                colour,
                dashed: colour == "old",
                points: points.collect(),
            }
        };
        let [_, before, after] = columns(Group::Map);
        let mut all = vec![
            curve(before, "c0", 1, |line| Some(line.before?.median)),
            curve(after, "c1", 1, |line| Some(line.after?.median)),
            curve(before, "c2", 10, |line| Some(line.before?.median)),
            curve(after, "c3", 10, |line| Some(line.after?.median)),
            curve("origin, after", "old", 1, |line| line.origin?.1),
        ];
        all.retain(|line| !line.points.is_empty());
        let plot = Plot {
            title: format!("{op}, {format}"),
            x: Axis {
                title: "size".into(),
                step: 2.0,
                show: |bytes| crate::size::bytes(bytes.round() as u64).replace("iB", ""),
            },
            y: Axis {
                title: "µs".into(),
                step: 10.0,
                show: plot::short,
            },
            lines: all,
        };
        plot.in_page().unwrap_or_default()
    };
    plots.into_iter().map(plot).collect()
}

/// Bars of some operations, by memory and format.
fn by_op(group: &GroupReport, ops: &[&str]) -> String {
    let all = group.lines();
    let plot = |op: &&str| {
        let lines: Vec<&Line<'_>> = all.iter().filter(|line| line.key.op == *op).collect();
        let unit = lines.first().map_or("", |line| line.key.unit.name());
        let names: Vec<String> = lines.iter().map(|line| name(group.group, line)).collect();
        let [_, before, after] = columns(group.group);
        let of = |name: &str, colour, value: fn(&Line<'_>) -> Option<f64>| {
            places(name, colour, lines.iter().map(|line| value(line)))
        };
        let mut all = vec![
            of(before, "c0", |line| Some(line.before?.median)),
            of("by folio", "c2", |line| Some(line.by_folio?.median)),
            of(after, "c1", |line| Some(line.after?.median)),
            of("stores", "c3", |line| Some(line.stores?.median)),
        ];
        all.retain(|line| !line.points.is_empty());
        bars(op, unit, &names, &all, false)
    };
    ops.iter().map(plot).collect()
}

/// Published and simulated, side by side.
fn nodes(group: &GroupReport) -> String {
    let mut lines = group.lines();
    // Walks that were measured are no rates.
    lines.retain(|line| line.key.unit == Unit::GigabytesPerSecond);
    let names: Vec<String> = lines.iter().map(|line| line.key.op.to_owned()).collect();
    let of = |name: &str, colour, value: fn(&Line<'_>) -> Option<f64>| {
        places(name, colour, lines.iter().map(value))
    };
    let [_, before, after] = columns(Group::Numa);
    let all = [
        of("origin, before", "old", |line| line.origin?.0),
        of(before, "c0", |line| Some(line.before?.median)),
        of("origin, after", "c2", |line| line.origin?.1),
        of(after, "c1", |line| Some(line.after?.median)),
    ];
    bars(
        "allreduce, published and simulated",
        "GB/s",
        &names,
        &all,
        true,
    )
}

fn name(group: Group, line: &Line<'_>) -> String {
    let key = line.key;
    match group {
        Group::Balloon | Group::Pin => format!("{}, {}", key.memory, key.format),
        Group::Map | Group::Tables | Group::Numa => key.format.to_owned(),
    }
}

/// Values by their place.
fn places(
    name: &str,
    colour: &'static str,
    values: impl Iterator<Item = Option<f64>>,
) -> plot::Line {
    let points = values.enumerate();
    let points = points.filter_map(|(nth, value)| Some((nth as f64, value?)));
    plot::Line {
        name: name.into(),
        colour,
        dashed: false,
        points: points.collect(),
    }
}
