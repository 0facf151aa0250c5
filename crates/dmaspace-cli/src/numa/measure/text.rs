//! What was measured of nodes, as text.

use crate::numa::measure::dma::DmaTimes;
use crate::numa::measure::{MeasureReport, Spread, WalkTimes};

use crate::draw::sheet::{Paint, Sheet};
use crate::size::{bytes, counted, duration, three_digits};

/// What stands for what was not measured.
const NOTHING: &str = "-";

/// A measurement.
pub(crate) fn write(report: &MeasureReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    if let Some(why) = &report.not_run {
        sheet.line(&format!(
            "not run: {why}, so nothing here is far; see `dmaspace numa simulate`"
        ));
        return sheet.into_text();
    }
    nodes(&mut sheet, report);
    walks(&mut sheet, report);
    dma(&mut sheet, &report.dma);
    sheet.into_text()
}

fn nodes(sheet: &mut Sheet, report: &MeasureReport) {
    sheet.section("nodes");
    let head = ["node", "memory", "CPUs", "tables", "in huge pages"];
    let mut rows = vec![head.map(String::from)];
    let size = |size: u64| match size {
        0 => "none".into(),
        size => bytes(size),
    };
    rows.extend(report.nodes.iter().map(|node| {
        [
            node.id.to_string(),
            size(node.memory_bytes),
            node.cpus.to_string(),
            size(node.table_bytes),
            node.huge_bytes.map_or(NOTHING.into(), size),
        ]
    }));
    sheet.table(&rows);
    let paint = sheet.paint();
    let mut note = |text: String| sheet.marked("note", |mark| paint.warning(mark), "!", &text);
    for node in &report.nodes {
        if let Some(why) = &node.no_walks {
            note(format!("no walks from node {}: {why}", node.id));
        }
        if let Some(why) = &node.no_tables {
            note(format!("no tables on node {}: {why}", node.id));
        }
    }
}

fn walks(sheet: &mut Sheet, report: &MeasureReport) {
    let Some(first) = report.walks.first() else {
        return;
    };
    let reads = three_digits(first.reads_per_walk);
    matrix(
        sheet,
        report,
        &format!("a walk of {reads} reads from memory, ns: median (first to ninth decile)"),
        |row| spread(&row.memory),
    );
    matrix(sheet, report, "one of its reads, ns", |row| {
        three_digits(row.read_ns())
    });
    matrix(sheet, report, "the same walk from caches, ns", |row| {
        spread(&row.caches)
    });
    sheet.gap();
    if let Some(times) = remote_by_local(&report.walks) {
        sheet.value("remote", &format!("{times:.2} times local, in the middle"));
    }
    sheet.value(
        "samples",
        &format!(
            "{} of {} each",
            first.samples,
            counted(first.walks, "dependent walk")
        ),
    );
    sheet.value("caches", &report.eviction.to_string());
    sheet.value(
        "read by",
        "processors, which have another way to memory than IOMMUs",
    );
}

/// The nodes of processors downwards, those of tables across.
fn matrix(
    sheet: &mut Sheet,
    report: &MeasureReport,
    title: &str,
    cell: impl Fn(&WalkTimes) -> String,
) {
    sheet.section(title);
    let nodes = || report.nodes.iter();
    let tables: Vec<u32> = nodes()
        .filter(|node| node.no_tables.is_none())
        .map(|node| node.id)
        .collect();
    let head = tables.iter().map(|node| format!("tables on {node}"));
    let mut rows = vec![[String::new()].into_iter().chain(head).collect::<Vec<_>>()];
    for from in nodes().filter(|node| node.no_walks.is_none()) {
        let found = tables.iter().map(|table_node| {
            let mut walks = report.walks.iter();
            let row = walks.find(|row| (row.cpu_node, row.table_node) == (from.id, *table_node));
            row.map_or(NOTHING.into(), &cell)
        });
        let name = [format!("CPUs of {}", from.id)];
        rows.push(name.into_iter().chain(found).collect());
    }
    sheet.table(&rows);
}

fn spread(spread: &Spread) -> String {
    let [median, low, high] = [spread.median_ns, spread.low_ns, spread.high_ns].map(three_digits);
    format!("{median} ({low} to {high})")
}

/// How the middle of remote medians compares with that of local ones; `None` when one is missing.
fn remote_by_local(walks: &[WalkTimes]) -> Option<f64> {
    let (local, remote): (Vec<_>, Vec<_>) =
        walks.iter().partition(|row| row.cpu_node == row.table_node);
    if local.is_empty() || remote.is_empty() {
        return None;
    }
    let middle = |rows: Vec<&WalkTimes>| {
        Spread::of(rows.iter().map(|row| row.memory.median_ns).collect()).median_ns
    };
    Some(middle(remote) / middle(local))
}

fn dma(sheet: &mut Sheet, rows: &[DmaTimes]) {
    if rows.is_empty() {
        return;
    }
    sheet.section("DMA through tables of the kernel: median (first to ninth decile)");
    let head = ["device", "node", "tables of", "node", "reading", "writing"];
    let mut table = vec![head.map(String::from)];
    let node = |node: Option<u32>| node.map_or(NOTHING.into(), |node| node.to_string());
    table.extend(rows.iter().map(|row| {
        let times = |spread: &Spread| match &row.not_run {
            Some(_) => NOTHING.into(),
            None => {
                let each = [spread.median_ns, spread.low_ns, spread.high_ns];
                let [median, low, high] = each.map(|ns| duration(ns as u64));
                format!("{median} ({low} to {high})")
            }
        };
        [
            row.device.clone(),
            node(row.device_node),
            row.made_for.clone(),
            node(row.table_node),
            times(&row.read),
            times(&row.write),
        ]
    }));
    sheet.table(&table);
    let paint = sheet.paint();
    let mut cautions: Vec<String> = Vec::new();
    for row in rows {
        let name = &row.device;
        let not_run = row
            .not_run
            .iter()
            .map(|why| format!("{name}: not run: {why}"));
        let caution = row.caution.iter().map(|why| format!("{name}: {why}"));
        for text in not_run.chain(caution) {
            if !cautions.contains(&text) {
                cautions.push(text);
            }
        }
        if row.wrong_bytes > 0 {
            let text = format!("{name}: {} wrong", counted(row.wrong_bytes, "byte"));
            sheet.marked("wrong", |mark| paint.bad(mark), "✗", &text);
        }
    }
    for text in cautions {
        sheet.marked("note", |mark| paint.warning(mark), "!", &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numa::measure::{Eviction, MeasuredNode};

    fn around(median_ns: f64) -> Spread {
        Spread {
            median_ns,
            low_ns: median_ns - 8.0,
            high_ns: median_ns + 40.0,
        }
    }

    fn report() -> MeasureReport {
        let node = |id, cpus| MeasuredNode {
            id,
            cpus,
            memory_bytes: 64 << 30,
            table_bytes: 8 << 20,
            huge_bytes: Some(8 << 20),
            no_walks: None,
            no_tables: None,
        };
        let mut nodes = vec![node(0, 16), node(1, 16), node(2, 0)];
        nodes[2].no_walks = Some("it has no processors".into());
        nodes[2].no_tables = Some("it has no memory".into());
        (
            nodes[2].memory_bytes,
            nodes[2].table_bytes,
            nodes[2].huge_bytes,
        ) = (0, 0, None);
        let walk = |cpu_node, table_node, median| WalkTimes {
            cpu_node,
            table_node,
            distance: if cpu_node == table_node { 10 } else { 21 },
            samples: 512,
            walks: 32,
            reads_per_walk: 4.0,
            memory: around(median),
            caches: around(48.0),
        };
        let dma = DmaTimes {
            device: "0000:17:00.0".into(),
            device_node: Some(0),
            table_node: Some(1),
            made_for: "0000:b1:00.0".into(),
            caution: Some("slow".into()),
            copies: 12,
            copy_bytes: 2048,
            read: around(100e6),
            write: around(101e6),
            wrong_bytes: 2,
            not_run: None,
        };
        MeasureReport {
            not_run: None,
            nodes,
            eviction: Eviction::Lines,
            walks: vec![
                walk(0, 0, 400.0),
                walk(0, 1, 600.0),
                walk(1, 0, 640.0),
                walk(1, 1, 400.0),
            ],
            dma: vec![dma],
        }
    }

    #[test]
    fn a_measurement_is_matrices_and_what_is_missing() {
        let expected = "\
nodes
  node  memory  CPUs  tables  in huge pages
  0     64 GiB  16    8 MiB   8 MiB
  1     64 GiB  16    8 MiB   8 MiB
  2     none    0     none    -
  note        ! no walks from node 2: it has no processors
  note        ! no tables on node 2: it has no memory

a walk of 4.00 reads from memory, ns: median (first to ninth decile)
             tables on 0       tables on 1
  CPUs of 0  400 (392 to 440)  600 (592 to 640)
  CPUs of 1  640 (632 to 680)  400 (392 to 440)

one of its reads, ns
             tables on 0  tables on 1
  CPUs of 0  100          150
  CPUs of 1  160          100

the same walk from caches, ns
             tables on 0          tables on 1
  CPUs of 0  48.0 (40.0 to 88.0)  48.0 (40.0 to 88.0)
";
        let text = write(&report(), Paint::PLAIN);
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn what_was_not_run_is_one_line() {
        let report = MeasureReport {
            not_run: Some("one node".into()),
            ..report()
        };
        let text = write(&report, Paint::PLAIN);
        assert!(text.starts_with("not run: one node, so"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}
