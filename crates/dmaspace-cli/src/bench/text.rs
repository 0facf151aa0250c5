//! The figures of the origins as text: one table for each kind of memory, format and number of threads.

use lab::bench::{Figure, Group, GroupReport, Host, Line, Unit, origin};

use crate::bench::Measured;
use crate::draw::sheet::{Paint, Sheet};
use crate::size::{bytes, count, counted, three_digits};

/// Lines that have memory, format and threads in common.
pub(crate) struct Block<'a> {
    pub(crate) title: String,
    pub(crate) lines: Vec<Line<'a>>,
}

impl Block<'_> {
    /// The unit of all its lines, if it is one.
    fn unit(&self) -> Option<Unit> {
        let mut units = self.lines.iter().map(|line| line.key.unit);
        let first = units.next()?;
        units.all(|unit| unit == first).then_some(first)
    }

    /// The title; a unit that all lines share stands there.
    pub(crate) fn heading(&self) -> String {
        match self.unit() {
            Some(unit) => format!("{}; {}", self.title, unit.name()),
            None => self.title.clone(),
        }
    }
}

/// The blocks of a group, in order.
pub(crate) fn blocks(group: &GroupReport) -> Vec<Block<'_>> {
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
        Group::Map => words.push(counted(key.threads.into(), "thread")),
        Group::Pin | Group::Balloon => words.push(bytes(key.size_bytes)),
        Group::Tables | Group::Numa => {}
    }
    words.join(", ")
}

/// What a group is called.
pub(crate) const fn heading(group: Group) -> &'static str {
    match group {
        Group::Pin => "pin: real memory pinned, charged and mapped (origin 1)",
        Group::Map => "map: map and unmap by several threads, with invalidation (origin 2)",
        Group::Balloon => "balloon: inflating, stage by stage (origin 3)",
        Group::Tables => "tables: the operations of page tables (origin 4)",
        Group::Numa => "numa: tables on memory nodes (origin 5), simulated",
    }
}

/// What stands above the columns: what was published, then what was taken here.
pub(crate) const fn columns(group: Group) -> [&'static str; 3] {
    match group {
        Group::Numa => ["origin", "one table", "a table per node"],
        Group::Pin => ["origin", "charged by page", "dmaspace"],
        _ => ["origin", "page by page", "dmaspace"],
    }
}

/// The column of units.
const UNIT: usize = 2;

/// The head of a table and its lines; columns in which nothing stands are left out.
pub(crate) fn table(group: Group, block: &Block<'_>) -> Vec<Vec<String>> {
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
        Group::Map => bytes(key.size_bytes),
        // Of the others the title or the name tells it.
        _ => String::new(),
    };
    // The origin gives averages there.
    let average = line.after.filter(|_| group == Group::Tables);
    let average = average.map_or_else(String::new, |figure| digits(figure.mean));
    [
        // With the comma a row of a map does not fit 80 columns.
        key.op.replace(',', ""),
        size,
        key.unit.name().into(),
        line.origin.map_or_else(String::new, published),
        figure(line.before),
        figure(line.by_folio),
        figure(line.after),
        average,
        figure(line.stores),
        line.ratio().map_or_else(String::new, three_digits),
        figure(line.all_by_page),
    ]
}

/// Before to after; a dash where nothing was published.
pub(crate) fn published((before, after): (Option<f64>, Option<f64>)) -> String {
    let of = |value: Option<f64>| value.map_or_else(|| "-".into(), digits);
    format!("{}→{}", of(before), of(after))
}

/// The median; the lowest and the highest, where there was more than one sample that could differ.
fn shown(unit: Unit, figure: &Figure) -> String {
    match figure.samples {
        _ if unit == Unit::Count => count(figure.median as u64),
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
        _ => three_digits(value),
    }
}

/// What the machine is, names and values.
pub(crate) fn machine(measured: &Measured) -> Vec<(&'static str, String)> {
    let host: &Host = &measured.report.machine;
    let processors = counted(host.processors as u64, "processor");
    let name = match host.processor.as_str() {
        "" => "unknown",
        name => name,
    };
    let pool = |pages: Option<u64>| pages.map_or_else(|| "none".into(), count);
    let mut lines = vec![
        ("processor", format!("{name}, {processors}")),
        (
            "memory",
            format!(
                "{}, {} available, {}",
                bytes(host.memory_bytes),
                bytes(host.available_bytes),
                counted(host.nodes as u64, "node")
            ),
        ),
        (
            "huge pages",
            format!(
                "transparent: {}; in pools: {} of 2 MiB, {} of 1 GiB",
                host.thp,
                pool(host.pool_2m),
                pool(host.pool_1g)
            ),
        ),
        ("kernel", host.kernel.clone()),
    ];
    if let Some(load) = host.load {
        lines.push(("load", format!("{load:.2} before the run")));
    }
    let (version, commit) = (measured.version, measured.commit);
    lines.push(("dmaspace", format!("{version}, commit {commit}")));
    if measured.report.quick {
        let quick = "smaller sizes and fewer rounds: figures are rough";
        lines.push(("quick", quick.into()));
    }
    lines
}

/// The whole report.
pub(crate) fn write(measured: &Measured, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    sheet.section("machine");
    for (name, value) in machine(measured) {
        sheet.value(name, &value);
    }
    for group in &measured.report.groups {
        one(&mut sheet, group);
    }
    sheet.into_text()
}

fn one(sheet: &mut Sheet, group: &GroupReport) {
    sheet.section(heading(group.group));
    let machine = origin::machine(group.group);
    sheet.value("origin", &format!("{machine}; before→after its change"));
    for note in &group.notes {
        sheet.value("note", note);
    }
    let many = |unit| group.rows.iter().any(|row| row.key.unit == unit);
    if !many(Unit::GigabytesPerSecond) {
        let times = match group.group {
            Group::Pin => "by folio, or by page where there is none,",
            _ => "page by page",
        };
        let how = &format!("median (lowest–highest), in turns; times: {times} divided by dmaspace");
        sheet.value("figures", how);
    }
    for missing in &group.not_run {
        sheet.value("not run", &format!("{}: {}", missing.what, missing.why));
    }
    for block in blocks(group) {
        sheet.section(&block.heading());
        sheet.table(&table(group.group, &block));
    }
}

#[cfg(test)]
mod tests;
