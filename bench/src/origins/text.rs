//! The figures of the origins as text: one table for each kind of memory, format and number of threads.

use runs::Bytes;

use super::figure::Figure;
use super::host::Host;
use super::origin;
use super::report::{Group, GroupReport, Line, Unit};

/// Lines that have memory, format and threads in common.
struct Block<'a> {
    title: String,
    lines: Vec<Line<'a>>,
}

impl Block<'_> {
    /// The unit of all its lines, if it is one.
    fn unit(&self) -> Option<Unit> {
        let mut units = self.lines.iter().map(|line| line.key.unit);
        let first = units.next()?;
        units.all(|unit| unit == first).then_some(first)
    }

    /// The title; a unit that all lines share stands there.
    fn heading(&self) -> String {
        match self.unit() {
            Some(unit) => format!("{}; {}", self.title, unit.name()),
            None => self.title.clone(),
        }
    }
}

/// The blocks of a group, in order.
fn blocks(group: &GroupReport) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    for line in group.lines() {
        let title = title(group.group, &line);
        match blocks.iter_mut().find(|block| block.title == title) {
            Some(block) => block.lines.push(line),
            None => blocks.push(Block {
                title,
                lines: vec![line],
            }),
        }
    }
    blocks
}

fn title(group: Group, line: &Line<'_>) -> String {
    let key = line.key;
    let mut words = vec![key.memory.to_owned(), key.format.to_owned()];
    words.retain(|word| !word.is_empty());
    match group {
        Group::Map => words.push(format!("threads: {}", key.threads)),
        Group::Pin | Group::Balloon => words.push(Bytes(key.size_bytes).to_string()),
        Group::Tables | Group::Numa => {}
    }
    words.join(", ")
}

/// The heading of a group.
const fn heading(group: Group) -> &'static str {
    match group {
        Group::Pin => "pin: real memory pinned, charged and mapped (origin 1)",
        Group::Map => "map: map and unmap by several threads, with invalidation (origin 2)",
        Group::Balloon => "balloon: inflating, stage by stage (origin 3)",
        Group::Tables => "tables: the operations of page tables (origin 4)",
        Group::Numa => "numa: tables on memory nodes (origin 5), simulated",
    }
}

/// Heads of the columns: the published figure, then those measured here.
const fn columns(group: Group) -> [&'static str; 3] {
    match group {
        Group::Numa => ["origin", "one table", "a table per node"],
        Group::Pin => ["origin", "charged by page", "dmaspace"],
        _ => ["origin", "page by page", "dmaspace"],
    }
}

/// The column of units.
const UNIT: usize = 2;

/// The head of a table and its lines; columns in which nothing stands are left out.
fn table(group: Group, block: &Block<'_>) -> Vec<Vec<String>> {
    let [origin, before, after] = columns(group);
    let head = [
        "",
        "size",
        "unit",
        origin,
        before,
        "by folio",
        after,
        "average",
        "stores",
        "times",
        "all by page",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(block.lines.iter().map(|line| cells(group, line).to_vec()));
    let used: Vec<bool> = (0..head.len())
        .map(|at| {
            if at == UNIT && block.unit().is_some() {
                return false;
            }
            let cells = rows.iter().skip(1).filter_map(|row| row.get(at));
            cells.into_iter().any(|cell| !cell.is_empty())
        })
        .collect();
    for row in &mut rows {
        let mut used = used.iter();
        row.retain(|_| used.next().copied().unwrap_or(true));
    }
    rows
}

fn cells(group: Group, line: &Line<'_>) -> [String; 11] {
    let key = line.key;
    let figure =
        |figure: Option<&Figure>| figure.map_or_else(String::new, |figure| shown(key.unit, figure));
    let size = match group {
        Group::Map => Bytes(key.size_bytes).to_string(),
        // The title or the name has it for the others.
        _ => String::new(),
    };
    // The origin gives averages there.
    let average = line.after.filter(|_| group == Group::Tables);
    let average = average.map_or_else(String::new, |figure| digits(figure.mean));
    [
        key.op.into(),
        size,
        key.unit.name().into(),
        line.origin.map_or_else(String::new, published),
        figure(line.before),
        figure(line.by_folio),
        figure(line.after),
        average,
        figure(line.stores),
        line.ratio().map_or_else(String::new, digits),
        figure(line.all_by_page),
    ]
}

/// Before to after; a dash where nothing was published.
fn published((before, after): (Option<f64>, Option<f64>)) -> String {
    let of = |value: Option<f64>| value.map_or_else(|| "-".into(), digits);
    format!("{}→{}", of(before), of(after))
}

/// The median; the lowest and the highest, where there was more than one sample that could differ.
fn shown(unit: Unit, figure: &Figure) -> String {
    match figure.samples {
        _ if unit == Unit::Count => format!("{:.0}", figure.median),
        0 | 1 => digits(figure.median),
        _ => {
            let [median, min, max] = [figure.median, figure.min, figure.max].map(digits);
            format!("{median} ({min}–{max})")
        }
    }
}

fn digits(value: f64) -> String {
    match value {
        0.0..0.01 => format!("{value:.4}"),
        0.01..0.1 => format!("{value:.3}"),
        // The borders are where rounding would show a fourth digit.
        ..9.995 => format!("{value:.2}"),
        ..99.95 => format!("{value:.1}"),
        _ => {
            let scale = 10f64.powf((value.log10() - 2.0).floor()).max(1.0);
            format!("{:.0}", (value / scale).round() * scale)
        }
    }
}

/// The machine, a line for each fact.
pub fn machine(host: &Host) -> String {
    let pool = |pages: Option<u64>| pages.map_or_else(|| "none".into(), |pages| pages.to_string());
    let name = match host.processor.as_str() {
        "" => "unknown",
        name => name,
    };
    let load = host
        .load
        .map_or_else(|| "unknown".into(), |load| format!("{load:.2}"));
    format!(
        "processor: {name}, {} of them\nmemory: {}, {} available; nodes: {}\n\
         huge pages: transparent: {}; in pools: {} of 2 MiB, {} of 1 GiB\n\
         kernel: {}; load before the run: {load}\n",
        host.processors,
        Bytes(host.memory_bytes),
        Bytes(host.available_bytes),
        host.nodes,
        host.thp,
        pool(host.pool_2m),
        pool(host.pool_1g),
        host.kernel
    )
}

/// The tables of a group, after what is to be said of them.
pub fn group(group: &GroupReport) -> String {
    let mut text = format!("{}\n", heading(group.group));
    let machine = origin::machine(group.group);
    text += &format!("  origin: {machine}; before→after its change\n");
    for note in &group.notes {
        text += &format!("  note: {note}\n");
    }
    for missing in &group.not_run {
        text += &format!("  not run: {}: {}\n", missing.what, missing.why);
    }
    for block in blocks(group) {
        text += &format!("\n{}\n", block.heading());
        text += &columns_of(&table(group.group, &block));
    }
    text
}

/// Rows of cells in columns, each as wide as its widest cell.
fn columns_of(rows: &[Vec<String>]) -> String {
    let width = |at: usize| {
        let cells = rows.iter().filter_map(|row| row.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths);
        let line: String = cells
            .map(|(cell, width)| format!("  {cell:<width$}"))
            .collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origins::{Key, NotRun, Row, Subject};

    fn row(op: &'static str, subject: Subject, median: f64, samples: usize) -> Row {
        let unit = match op {
            "charges" => Unit::Count,
            _ => Unit::Milliseconds,
        };
        Row {
            key: Key {
                group: Group::Pin,
                op,
                memory: "hugetlb-2m",
                format: "vtd-ss",
                subject,
                threads: 1,
                size_bytes: 8 << 30,
                unit,
            },
            figure: Figure {
                min: median / 2.0,
                median,
                max: median * 2.0,
                mean: median,
                samples,
            },
        }
    }

    #[test]
    fn a_group_is_a_table_for_each_kind_of_memory() {
        use Subject::{ByFolio, ChargeByPage, Dmaspace};
        let report = GroupReport {
            group: Group::Pin,
            notes: vec!["a note".into()],
            not_run: vec![NotRun {
                what: "4k".into(),
                why: "no memory".into(),
            }],
            rows: vec![
                row("map for DMA", ChargeByPage, 43.8, 3),
                row("map for DMA", ByFolio, 12.3, 3),
                row("map for DMA", Dmaspace, 6.15, 3),
                row("charges", ChargeByPage, 2_097_152.0, 3),
                row("charges", Dmaspace, 1.0, 3),
            ],
        };
        let expected = "\
pin: real memory pinned, charged and mapped (origin 1)
  origin: VFIO type 1, DMA mapping of 8 GiB in pages of 2 MiB (2025); before→after its change
  note: a note
  not run: 4k: no memory

hugetlb-2m, vtd-ss, 8 GiB
               unit   origin     charged by page   by folio          dmaspace          times
  map for DMA  ms     33.8→15.6  43.8 (21.9–87.6)  12.3 (6.15–24.6)  6.15 (3.08–12.3)  2.00
  charges      count             2097152                             1                 2100000
";
        let text = super::group(&report);
        assert_eq!(text, expected, "\n{text}");
    }

    #[test]
    fn figures_have_as_many_digits_as_they_are_good_for() {
        let one = |samples| Figure {
            min: 0.005,
            median: 0.05,
            max: 12_345.0,
            mean: 1.0,
            samples,
        };
        assert_eq!(shown(Unit::Microseconds, &one(1)), "0.050");
        assert_eq!(shown(Unit::Microseconds, &one(3)), "0.050 (0.0050–12300)");
        assert_eq!(shown(Unit::Count, &one(3)), "0");
        assert_eq!(published((Some(4126.0), None)), "4130→-");
    }
}
