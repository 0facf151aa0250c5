//! The report as text: one screen, read at a glance.
//!
//! Every section is a list of names and values in two columns; what needs looking at (addresses
//! that are made up, a wrong byte) is marked.

use dmaspace::map::{ChargeReport, DmaReport, MapReport, MemoryReport, NodeShare, SizeClass};
use dmaspace::map::{TablesReport, Times};

use super::Verdict;
use super::sheet::{Paint, Sheet};
use crate::size::{bytes, count, counted, duration, percent, rate, three_digits};

/// Rows of the histogram; more classes are put together.
const ROWS: usize = 8;
/// Characters of a full bar.
const BAR: u64 = 24;

/// The whole report.
pub(crate) fn write(report: &MapReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    memory(&mut sheet, &report.memory);
    charge(&mut sheet, &report.charge);
    tables(&mut sheet, &report.tables);
    times(&mut sheet, report);
    dma(&mut sheet, &report.dma);
    verdict(&mut sheet, report);
    sheet.into_text()
}

fn memory(sheet: &mut Sheet, memory: &MemoryReport) {
    sheet.section("memory");
    sheet.value(
        "size",
        &because(bytes(memory.size_bytes), &memory.size_reason),
    );
    sheet.value(
        "backing",
        &because(memory.backing.clone(), &memory.backing_reason),
    );
    if memory.pool_pages_added > 0 {
        let pages = counted(memory.pool_pages_added, "huge page");
        sheet.value(
            "",
            &format!("{pages} added to the pool, and taken out again"),
        );
    }
    sheet.value(
        "runs",
        &format!(
            "{}, {} of the memory in huge pages, {}",
            count(memory.runs),
            percent(memory.huge_bytes, memory.size_bytes),
            nodes(&memory.nodes)
        ),
    );
    histogram(sheet, &memory.run_sizes);
    let looks = match memory.looks {
        0 => String::new(),
        looks => format!(", {}", counted(looks, "look")),
    };
    let (paint, reason) = (sheet.paint(), &memory.addresses_reason);
    if memory.addresses == "pagemap" {
        sheet.value("addresses", &format!("real: {reason}{looks}"));
    } else {
        sheet.marked(
            "addresses",
            |mark| paint.warning(mark),
            "NOT REAL:",
            &format!("{reason}{looks}"),
        );
    }
}

fn charge(sheet: &mut Sheet, charge: &ChargeReport) {
    sheet.section("charge");
    let limit = match charge.limit_bytes {
        None => "no limit applies".into(),
        Some(limit) => format!(
            "{} of the limit of {}",
            percent(charge.charged_bytes, limit),
            bytes(limit)
        ),
    };
    let (charged, counter) = (bytes(charge.charged_bytes), &charge.counter);
    sheet.value("locked", &format!("{charged} on {counter}, {limit}"));
    sheet.value(
        "steps",
        &format!(
            "{} by runs, {} page by page",
            count(charge.steps),
            count(charge.page_steps)
        ),
    );
    let mut pin = because(charge.pin.clone(), &charge.pin_reason);
    if charge.pin_buffers > 0 {
        let buffers = counted(charge.pin_buffers, "buffer");
        pin += &format!(", {buffers} in {}", counted(charge.pin_calls, "call"));
    } else {
        pin += &format!(", {}", counted(charge.pin_calls, "call"));
    }
    sheet.value("pin", &pin);
}

fn tables(sheet: &mut Sheet, tables: &TablesReport) {
    sheet.section("tables");
    let levels = counted(tables.levels.into(), "level");
    sheet.value("format", &format!("{}, {levels}", tables.format));
    let leaves: Vec<_> = tables
        .leaves
        .iter()
        .map(|leaf| format!("{} of {}", count(leaf.count), bytes(leaf.from_bytes)))
        .collect();
    sheet.value("leaves", &leaves.join(", "));
    sheet.value(
        "memory",
        &format!(
            "{}, {}, {}",
            counted(tables.table_pages, "table page"),
            bytes(tables.table_bytes),
            nodes(&tables.nodes)
        ),
    );
}

fn times(sheet: &mut Sheet, report: &MapReport) {
    let (times, size) = (&report.times, report.memory.size_bytes);
    let dma = &report.dma;
    sheet.section("times");
    let mut row = |name: &str, ns: u64, rate: Option<String>, note: &str| {
        let (time, rate) = (duration(ns), rate.unwrap_or_default());
        sheet.value(name, &format!("{time:>8} {rate:>15}{note}"));
    };
    let of_memory = |ns| rate(size, ns);
    row(
        "populate",
        times.populate_ns,
        of_memory(times.populate_ns),
        "",
    );
    row("pin", times.pin_ns, of_memory(times.pin_ns), "");
    row(
        "find runs",
        times.find_runs_ns,
        of_memory(times.find_runs_ns),
        "",
    );
    row(
        "map",
        times.map_ns,
        of_memory(times.map_ns),
        &by_page(times),
    );
    // No bytes move when a device is attached.
    let each = times.attach_ns.checked_div(dma.devices.into());
    let each = each
        .filter(|_| dma.devices > 1)
        .map(|each| duration(each) + " each");
    row("attach", times.attach_ns, each, "");
    let moved = dma.read_bytes.saturating_add(dma.written_bytes);
    row(
        "DMA check",
        times.dma_check_ns,
        rate(moved, times.dma_check_ns),
        "",
    );
    row("unmap", times.unmap_ns, of_memory(times.unmap_ns), "");
    row("unpin", times.unpin_ns, of_memory(times.unpin_ns), "");
}

/// What the same map costs page by page.
fn by_page(times: &Times) -> String {
    if times.map_ns == 0 || times.map_by_page_ns == 0 {
        return String::new();
    }
    let ratio = three_digits(times.map_by_page_ns as f64 / times.map_ns as f64);
    let ns = duration(times.map_by_page_ns);
    format!("   page by page {ns}, {ratio} times that")
}

fn dma(sheet: &mut Sheet, dma: &DmaReport) {
    sheet.section("DMA check");
    sheet.value(
        "devices",
        &format!(
            "{} read {} and wrote {}",
            count(dma.devices.into()),
            bytes(dma.read_bytes),
            bytes(dma.written_bytes)
        ),
    );
    sheet.value(
        "faults",
        &format!(
            "{} inside the range; {} of {} just outside it",
            count(dma.faults),
            count(dma.neighbour_faults),
            counted(dma.neighbour_accesses, "access")
        ),
    );
    let translations = dma.iotlb_hits.saturating_add(dma.iotlb_misses);
    let mut iotlb = format!(
        "{} ({}), {}",
        counted(dma.iotlb_hits, "hit"),
        percent(dma.iotlb_hits, translations),
        counted(dma.iotlb_misses, "miss"),
    );
    if let Some(reads) = dma.reads_per_miss() {
        iotlb += &format!(", {} table reads per miss", three_digits(reads));
    }
    sheet.value("IOTLB", &iotlb);
}

fn verdict(sheet: &mut Sheet, report: &MapReport) {
    sheet.gap();
    let paint = sheet.paint();
    let line = match Verdict::of(report) {
        Verdict::Right => {
            let all = "every byte was right, and everything was given back";
            format!("{}  {all}", paint.good("OK"))
        }
        Verdict::Wrong(wrong) => format!("{}  {}", paint.bad("WRONG"), wrong.join("\n       ")),
    };
    sheet.line(&line);
}

/// `thp: no huge pages of 2M are free`.
fn because(what: String, reason: &Option<String>) -> String {
    match reason {
        Some(reason) => format!("{what}: {reason}"),
        None => what,
    }
}

/// `node 0`, or `node 0: 5 MiB, node 1: 3 MiB`.
fn nodes(shares: &[NodeShare]) -> String {
    let name = |share: &NodeShare| match share.node {
        Some(node) => format!("node {node}"),
        None => "unknown node".into(),
    };
    match shares {
        [] => "unknown node".into(),
        [one] => name(one),
        many => {
            let shares = many.iter().map(|share| (name(share), bytes(share.bytes)));
            let shares: Vec<_> = shares
                .map(|(name, part)| format!("{name}: {part}"))
                .collect();
            shares.join(", ")
        }
    }
}

/// Runs of sizes `from..below` bytes.
#[derive(Clone, Copy)]
struct Row {
    from: u64,
    below: u64,
    count: u64,
    bytes: u64,
}

impl Row {
    fn label(&self) -> String {
        // All of the same size, so that there is no need to speak of a class.
        if self.from.checked_mul(self.count) == Some(self.bytes) {
            bytes(self.from)
        } else {
            format!("{} to {}", bytes(self.from), bytes(self.below))
        }
    }
}

fn histogram(sheet: &mut Sheet, classes: &[SizeClass]) {
    let rows = rows(classes);
    let total = rows
        .iter()
        .map(|row| row.bytes)
        .fold(0, u64::saturating_add);
    let labels: Vec<_> = rows.iter().map(Row::label).collect();
    let counts: Vec<_> = rows.iter().map(|row| count(row.count)).collect();
    let widest = |texts: &[String]| texts.iter().map(String::len).max().unwrap_or(0);
    let (label_width, count_width) = (widest(&labels), widest(&counts));
    for ((row, label), count) in rows.iter().zip(labels).zip(counts) {
        let part = bytes(row.bytes);
        let bar = bar(row.bytes, total);
        sheet.value(
            "",
            &format!("{label:>label_width$}  × {count:>count_width$}  {part:>8}  {bar}"),
        );
    }
}

/// The classes as at most [`ROWS`] rows: neighbours are put together, all by the same factor.
fn rows(classes: &[SizeClass]) -> Vec<Row> {
    // 64 classes of powers of two are all that there can be.
    for factor in 1..=64 {
        let mut rows: Vec<(u32, Row)> = Vec::new();
        for class in classes.iter().filter(|class| class.count > 0) {
            let group = class.from_bytes.max(1).ilog2() / factor;
            let row = Row {
                from: class.from_bytes,
                below: class.from_bytes.saturating_mul(2),
                count: class.count,
                bytes: class.bytes,
            };
            match rows.last_mut() {
                Some((last, whole)) if *last == group => {
                    whole.from = whole.from.min(row.from);
                    whole.below = whole.below.max(row.below);
                    whole.count = whole.count.saturating_add(row.count);
                    whole.bytes = whole.bytes.saturating_add(row.bytes);
                }
                _ => rows.push((group, row)),
            }
        }
        if rows.len() <= ROWS {
            return rows.into_iter().map(|(_, row)| row).collect();
        }
    }
    Vec::new()
}

/// A bar of eighths of a character; what is something shows.
fn bar(part: u64, whole: u64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if part == 0 || whole == 0 {
        return String::new();
    }
    let eighths = u128::from(part) * u128::from(BAR) * 8 / u128::from(whole);
    let eighths = eighths.clamp(1, u128::from(BAR) * 8) as usize;
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn check(report: &MapReport, expected: &str) {
        let text = write(report, Paint::Plain);
        assert_eq!(text, expected.trim_start_matches('\n'), "\n{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "too wide: {line}");
            assert_eq!(line, line.trim_end());
        }
        assert!(text.lines().count() <= 48, "more than a screen");
    }

    #[test]
    fn the_report_of_huge_pages() {
        check(&samples::huge(), HUGE);
    }

    #[test]
    fn the_report_of_an_ordinary_user_with_something_wrong() {
        check(&samples::synthetic(), SYNTHETIC);
    }

    #[test]
    fn a_raised_pool_is_told() {
        let text = write(&samples::striped(2), Paint::Plain);
        assert!(
            text.contains("\n              1 huge page added to the pool, and taken out again\n"),
            "{text}"
        );
    }

    #[test]
    fn colour_only_marks() {
        for report in [samples::huge(), samples::synthetic()] {
            let mut text = write(&report, Paint::Colour);
            assert!(text.contains("\x1b[1mmemory\x1b[0m"));
            while let Some(at) = text.find('\x1b') {
                let end = text.split_at(at).1.find('m').unwrap();
                text.replace_range(at..=at + end, "");
            }
            assert_eq!(text, write(&report, Paint::Plain));
        }
    }

    #[test]
    fn an_empty_report_is_wrong_but_printable() {
        let text = write(&MapReport::default(), Paint::Plain);
        assert!(
            text.contains("WRONG  nothing outside the range was tried"),
            "{text}"
        );
    }

    #[test]
    fn extreme_numbers_are_printable() {
        let mut report = samples::huge();
        report.memory.size_bytes = u64::MAX;
        report.memory.run_sizes = (0..64)
            .map(|log| SizeClass {
                from_bytes: 1 << log,
                count: u64::MAX,
                bytes: u64::MAX,
            })
            .collect();
        report.dma.read_bytes = u64::MAX;
        report.times.map_ns = u64::MAX;
        report.memory.addresses_reason = "ä".repeat(300) + " " + &"ö ".repeat(200);
        write(&report, Paint::Plain);
    }

    #[test]
    fn a_bar_is_as_long_as_its_part_and_never_hides_something() {
        assert_eq!(bar(0, 100), "");
        assert_eq!(bar(1, 1_000_000), "▏");
        assert_eq!(bar(1, 2), "█".repeat(12));
        assert_eq!(bar(7, 7), "█".repeat(24));
        assert_eq!(bar(7, 0), "");
    }

    const HUGE: &str = "
memory
  size        256 MiB: the default
  backing     thp: no huge pages of 1G or 2M are free; transparent huge pages
              are on for madvise
  runs        3, 100 % of the memory in huge pages, node 0
                          2 MiB  × 1     2 MiB  ▏
              64 MiB to 128 MiB  × 2   254 MiB  ███████████████████████▊
  addresses   real: page frames (pagemap), 131 looks

charge
  locked      256 MiB on mm->pinned_vm, no limit applies
  steps       3 by runs, 65,536 page by page
  pin         io_uring, 1 buffer in 1 call

tables
  format      vtd-ss, 4 levels
  leaves      128 of 2 MiB
  memory      3 table pages, 12 KiB, node 0

times
  populate     31.2 ms      8.01 GiB/s
  pin          1.20 ms       208 GiB/s
  find runs    45.0 µs     5,560 GiB/s
  map          3.10 µs    80,600 GiB/s   page by page 1.20 ms, 387 times that
  attach       2.40 µs    1.20 µs each
  DMA check     102 ms      7.35 GiB/s
  unmap        2.90 µs    86,200 GiB/s
  unpin         410 µs       610 GiB/s

DMA check
  devices     2 read 512 MiB and wrote 256 MiB
  faults      0 inside the range; 4 of 4 accesses just outside it
  IOTLB       196,352 hits (99.9 %), 256 misses, 3.00 table reads per miss

OK  every byte was right, and everything was given back
";
    const SYNTHETIC: &str = "
memory
  size        8 MiB: what is left of the limit on locked memory (8 MiB,
              RLIMIT_MEMLOCK)
  backing     4k
  runs        190, 0 % of the memory in huge pages, node 0: 5 MiB, unknown node:
              3 MiB
                4 KiB to 16 KiB  × 144   768 KiB  ██▎
               16 KiB to 64 KiB  ×  36   768 KiB  ██▎
              64 KiB to 256 KiB  ×   7   640 KiB  █▉
               256 KiB to 1 MiB  ×   2   768 KiB  ██▎
                 4 MiB to 8 MiB  ×   1  5.12 MiB  ███████████████▍
  addresses   NOT REAL: synthetic addresses in a shuffled layout, not page
              frames

charge
  locked      8 MiB on mm->locked_vm, 100 % of the limit of 8 MiB
  steps       190 by runs, 2,048 page by page
  pin         mlock: io_uring is refused: Operation not permitted, 1 call

tables
  format      amdv1, 3 levels
  leaves      1,024 of 4 KiB, 64 of 64 KiB
  memory      1 table page, 4 KiB, node 1

times
  populate        0 ns
  pin             0 ns
  find runs       0 ns
  map          20.0 µs       391 GiB/s   page by page 15.0 µs, 0.75 times that
  attach          0 ns
  DMA check       0 ns
  unmap           0 ns
  unpin           0 ns

DMA check
  devices     1 read 8 MiB and wrote 8 MiB
  faults      2 inside the range; 1 of 2 accesses just outside it
  IOTLB       0 hits (0 %), 0 misses

WRONG  1 byte was not what it had to be
       2 faults inside the range
       1 access outside the range did not fault
";
}
