//! The figures of the origins as one page that needs nothing else: no network, no script.

use std::fmt::Write as _;

use lab::bench::{Group, GroupReport, Line, Unit, origin};

use super::plot::{Series, bars, curves};
use super::text::{blocks, columns, heading, machine, table};
use crate::bench::Measured;
use crate::draw::svg::escape;

/// Colours of text and plots, light and dark.
const STYLE: &str = "\
:root{color-scheme:light dark;--paper:#fff;--ink:#1b2126;--faint:#56616b;--line:#d5dbe0;\
--old:#8a949d;--c0:#d44d32;--c1:#2b9f8e;--c2:#e6a82e;--c3:#476fc4}\n\
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e8ecef;--faint:#a3adb6;\
--line:#38424b;--old:#7d8891;--c0:#ec7a62;--c1:#46b8a8;--c2:#f0bf5c;--c3:#7f9fe6}}\n\
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:2rem auto;\
max-width:62rem;padding:0 1rem}\n\
table{border-collapse:collapse;font-size:13px;margin:1rem 0;font-variant-numeric:tabular-nums}\n\
th,td{border-bottom:1px solid var(--line);padding:.15rem .7rem;text-align:right;white-space:nowrap}\n\
th:first-child,td:first-child{text-align:left}\n\
.faint{color:var(--faint)}.plots{display:flex;flex-wrap:wrap;gap:1rem}.wide{overflow-x:auto}\n\
svg{max-width:100%;height:auto;font-size:12px}svg text{fill:var(--ink)}svg .head{font-weight:600;\
font-size:13px}svg .small{font-size:10px;fill:var(--faint)}\n\
.grid{stroke:var(--line)}.curve{fill:none;stroke-width:2}.curve.old{stroke-dasharray:4 4}\n\
.bar.old{fill:var(--old)}.bar.c0{fill:var(--c0)}.bar.c1{fill:var(--c1)}.bar.c2{fill:var(--c2)}\
.bar.c3{fill:var(--c3)}\n\
.curve.old{stroke:var(--old)}.curve.c0{stroke:var(--c0)}.curve.c1{stroke:var(--c1)}\
.curve.c2{stroke:var(--c2)}.curve.c3{stroke:var(--c3)}\n";

/// The page.
pub(crate) fn page(measured: &Measured) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width\"/>\n\
         <title>dmaspace bench</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>dmaspace bench</h1>\n\
         <p>What five public documents have measured, on this machine: their figures, the \
         page-by-page way measured here, and this project measured here, in one run and in turns. \
         What was published ran on other machines: compare ratios.</p>\n<table>\n"
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
        let title = escape(&block.title);
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
        let curve = |name: &str, class, threads, value: fn(&Line<'_>) -> Option<f64>| {
            let points = lines.iter().filter(|line| {
                let key = line.key;
                (key.format, key.op, key.threads) == (format, op, threads)
            });
            let points = points.filter_map(|line| Some((line.key.size_bytes as f64, value(line)?)));
            let words = if threads == 1 { "thread" } else { "threads" };
            Series {
                name: format!("{name}, {threads} {words}"),
                class,
                points: points.collect(),
            }
        };
        let [_, before, after] = columns(Group::Map);
        let mut series = vec![
            curve(before, "c0", 1, |line| Some(line.before?.median)),
            curve(after, "c1", 1, |line| Some(line.after?.median)),
            curve(before, "c2", 10, |line| Some(line.before?.median)),
            curve(after, "c3", 10, |line| Some(line.after?.median)),
            curve("origin, after", "old", 1, |line| line.origin?.1),
        ];
        series.retain(|series| !series.points.is_empty());
        curves(&format!("{op}, {format}"), "µs", &series)
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
        let of = |name: &str, class, value: fn(&Line<'_>) -> Option<f64>| {
            places(name, class, lines.iter().map(|line| value(line)))
        };
        let mut series = vec![
            of(before, "c0", |line| Some(line.before?.median)),
            of("by folio", "c2", |line| Some(line.by_folio?.median)),
            of(after, "c1", |line| Some(line.after?.median)),
            of("stores", "c3", |line| Some(line.stores?.median)),
        ];
        series.retain(|series| !series.points.is_empty());
        bars(op, unit, &names, &series, false)
    };
    ops.iter().map(plot).collect()
}

/// Published and simulated, side by side.
fn nodes(group: &GroupReport) -> String {
    let mut lines = group.lines();
    // Walks that were measured are no rates.
    lines.retain(|line| line.key.unit == Unit::GigabytesPerSecond);
    let names: Vec<String> = lines.iter().map(|line| line.key.op.to_owned()).collect();
    let of = |name: &str, class, value: fn(&Line<'_>) -> Option<f64>| {
        places(name, class, lines.iter().map(value))
    };
    let [_, before, after] = columns(Group::Numa);
    let series = [
        of("origin, before", "old", |line| line.origin?.0),
        of(before, "c0", |line| Some(line.before?.median)),
        of("origin, after", "c2", |line| line.origin?.1),
        of(after, "c1", |line| Some(line.after?.median)),
    ];
    bars(
        "allreduce, published and simulated",
        "GB/s",
        &names,
        &series,
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
fn places(name: &str, class: &'static str, values: impl Iterator<Item = Option<f64>>) -> Series {
    let points = values.enumerate();
    let points = points.filter_map(|(nth, value)| Some((nth as f64, value?)));
    Series {
        name: name.into(),
        class,
        points: points.collect(),
    }
}
