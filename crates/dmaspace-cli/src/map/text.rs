//! The report as text: one screen, read at a glance.
//!
//! Every section is a list of names and values in two columns; what needs looking at (addresses
//! that are made up, a wrong byte) is marked.

use std::iter;

use scenario::Counted;

use crate::map::{
    BackendReport, ChargeReport, Compared, DeviceUsed, DmaReport, MapReport, MemoryReport,
    NodeShare, PlacementReport, RunsReport, Spread, TablesReport, UnitReport,
};

use super::verdict::Verdict;
use crate::draw::histogram::histogram;
use crate::draw::sheet::{Paint, Sheet};
use crate::size::{bytes, count, counted, duration, percent, rate, three_digits};

/// The whole report.
pub(crate) fn write(report: &MapReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    if let Some(device) = &report.backend.device {
        let domains = report.placement.as_ref().map(|found| found.domains.len());
        backend(&mut sheet, &report.backend, device, domains.unwrap_or(1));
    }
    memory(&mut sheet, &report.memory);
    charge(&mut sheet, &report.charge);
    tables(&mut sheet, report.tables.as_ref());
    if let Some(found) = &report.placement {
        placement(&mut sheet, found, report);
    }
    times(&mut sheet, report);
    if let Some(found) = &report.compared {
        compared(&mut sheet, found);
    }
    dma(&mut sheet, report);
    verdict(&mut sheet, report);
    sheet.into_text()
}

/// A kernel's back end, with so many `domains`, and the devices that it served.
fn backend(sheet: &mut Sheet, backend: &BackendReport, device: &DeviceUsed, domains: usize) {
    sheet.section("back end");
    let through = match &device.cdev {
        Some(cdev) => cdev.display().to_string(),
        None if domains > 1 => format!("{domains} containers of type 1"),
        None => "a container of type 1".into(),
    };
    sheet.value("interface", &format!("{}: {through}", backend.name));
    for device in iter::once(device).chain(&backend.further_devices) {
        let mut words = vec![format!("{} ({})", device.address, device.id)];
        words.extend(device.group.map(|group| format!("group {group}")));
        words.extend(device.unit.clone());
        words.extend(device.node.map(|node| format!("node {node}")));
        sheet.value("device", &words.join(", "));
    }
    if let Some(mappings) = backend.mappings {
        let more = match mappings.available {
            Some(more) => format!("room for {} more", count(more)),
            None => "no limit to them".into(),
        };
        let made = counted(mappings.made, "mapping");
        sheet.value(
            "mappings",
            &format!("{made}, {more}; {} left at the end", count(mappings.left)),
        );
    }
    let pages = match &backend.page_sizes_bytes {
        Some(sizes) => {
            let sizes: Vec<_> = sizes.iter().copied().map(bytes).collect();
            sizes.join(", ")
        }
        None => format!(
            "{} and multiples of it; the kernel does not list other sizes",
            bytes(backend.granule_bytes)
        ),
    };
    sheet.value("pages", &pages);
    let windows = backend.windows.iter();
    let windows: Vec<_> = windows
        .map(|window| format!("{:#x} to {:#x}", window.first, window.last))
        .collect();
    sheet.value("windows", &windows.join(", "));
    let lacks = backend.lacks.iter().map(|lack| lack.cannot.as_str());
    let lacks: Vec<_> = lacks.collect();
    if !lacks.is_empty() {
        sheet.value("cannot", &lacks.join("; "));
    }
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
        sheet.value("", &format!("{pages} added to the pool, and removed again"));
    }
    let pages = format!(
        "{} of the memory in huge pages, {}",
        percent(memory.huge_bytes, memory.size_bytes),
        nodes(&memory.nodes)
    );
    match &memory.found {
        Some(found) => runs(sheet, found, &pages),
        None => sheet.value("pages", &pages),
    }
}

fn runs(sheet: &mut Sheet, found: &RunsReport, pages: &str) {
    sheet.value("runs", &format!("{}, {pages}", count(found.runs)));
    histogram(sheet, &found.run_sizes);
    let looks = match found.looks {
        0 => String::new(),
        looks => format!(", {}", counted(looks, "lookup")),
    };
    let (paint, reason) = (sheet.paint(), &found.addresses_reason);
    if found.addresses == "pagemap" {
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
    let by = match &charge.pins {
        Some(_) => "by runs",
        None => "in the ledger",
    };
    sheet.value(
        "steps",
        &format!(
            "{} {by}, {} page by page",
            count(charge.steps),
            count(charge.page_steps)
        ),
    );
    let Some(pins) = &charge.pins else {
        counters(sheet, charge);
        return;
    };
    let mut pin = because(pins.pin.clone(), &pins.pin_reason);
    if pins.pin_buffers > 0 {
        let buffers = counted(pins.pin_buffers, "buffer");
        pin += &format!(", {buffers} in {}", counted(pins.pin_calls, "call"));
    } else {
        pin += &format!(", {}", counted(pins.pin_calls, "call"));
    }
    sheet.value("pin", &pin);
}

/// What the kernel counted before, while memory was mapped, and afterwards.
fn counters(sheet: &mut Sheet, charge: &ChargeReport) {
    let mut row = |name: &str, of: fn(&Counted) -> u64| {
        let [before, mapped, after] =
            [&charge.before, &charge.mapped, &charge.after].map(|counted| bytes(of(counted)));
        sheet.value(
            name,
            &format!("{before} before, {mapped} while mapped, {after} at the end"),
        );
    };
    row("VmLck", |counted| counted.locked_bytes);
    row("VmPin", |counted| counted.pinned_bytes);
}

fn tables(sheet: &mut Sheet, tables: Option<&TablesReport>) {
    sheet.section("tables");
    let Some(tables) = tables else {
        sheet.value(
            "format",
            "the kernel's; it shows neither leaves nor pages nor runs",
        );
        return;
    };
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

/// Which devices share a table, where it lies, and what that costs.
fn placement(sheet: &mut Sheet, placement: &PlacementReport, report: &MapReport) {
    sheet.section("placement");
    let domains = counted(placement.domains.len() as u64, "domain");
    sheet.value("policy", &format!("{}: {domains}", placement.policy));
    for domain in &placement.domains {
        let of = match domain.node {
            Some(node) => format!("of node {node}"),
            None => "of no known node".into(),
        };
        let devices = counted(domain.devices, "device");
        let lies = match (domain.table_bytes, &domain.nodes) {
            (Some(len), Some(found)) => format!("{} of tables, on {}", bytes(len), nodes(found)),
            _ => "the kernel's tables, which it does not show".into(),
        };
        let charged = domain.charged_bytes.map(bytes);
        let charged = charged.map_or_else(String::new, |len| format!("; {len} charged"));
        sheet.value("domain", &format!("{devices} {of}; {lies}{charged}"));
    }
    let mut costs: Vec<String> = Vec::new();
    if let Some(tables) = &report.tables {
        costs.push(format!("{} of tables", bytes(tables.table_bytes)));
    }
    costs.push(format!("mapped in {}", duration(report.times.map_ns)));
    costs.push(format!("{} charged", bytes(report.charge.charged_bytes)));
    sheet.value("cost", &costs.join(", "));
    for misplaced in &placement.misplaced {
        sheet.value("misplaced", misplaced);
    }
}

fn times(sheet: &mut Sheet, report: &MapReport) {
    let (times, size) = (&report.times, report.memory.size_bytes);
    let dma = &report.dma;
    sheet.section("times");
    // What was not done, or not by itself, has no row.
    let mut row = |name: &str, ns: Option<u64>, rate: Option<String>, note: &str| {
        if let Some(ns) = ns {
            let (time, rate) = (duration(ns), rate.unwrap_or_default());
            sheet.value(name, &format!("{time:>8} {rate:>15}{note}"));
        }
    };
    let of_memory = |ns: Option<u64>| ns.and_then(|ns| rate(size, ns));
    let by_itself = |ns: Option<u64>, what: &str| match ns {
        Some(_) => String::new(),
        None => format!("   {what} by the same call"),
    };
    let (populate, map, unmap) = (
        Some(times.populate_ns),
        Some(times.map_ns),
        Some(times.unmap_ns),
    );
    row("populate", populate, of_memory(populate), "");
    row("pin", times.pin_ns, of_memory(times.pin_ns), "");
    let find_runs = times.find_runs_ns;
    row("find runs", find_runs, of_memory(find_runs), "");
    let note = by_itself(times.pin_ns, "pinned");
    row("map", map, of_memory(map), &note);
    // No bytes move when a device is attached.
    let each = times.attach_ns.checked_div(dma.devices.into());
    let each = each
        .filter(|_| dma.devices > 1)
        .map(|each| duration(each) + " each");
    row("attach", Some(times.attach_ns), each, "");
    let moved = dma.read_bytes.saturating_add(dma.written_bytes);
    // Samples say nothing of how fast it could be.
    let fast = times.dma_check_ns.filter(|_| dma.sample.is_none());
    let fast = fast.and_then(|ns| rate(moved, ns));
    row("DMA check", times.dma_check_ns, fast, "");
    let note = by_itself(times.unpin_ns, "unpinned");
    row("unmap", unmap, of_memory(unmap), &note);
    row("unpin", times.unpin_ns, of_memory(times.unpin_ns), "");
}

/// The same map by runs and page by page.
fn compared(sheet: &mut Sheet, found: &Compared) {
    let rounds = counted(found.rounds, "round");
    sheet.section(&format!(
        "the same map again: median and middle half of {rounds}"
    ));
    for (name, times) in [
        ("by runs", found.by_runs_ns),
        ("by pages", found.by_page_ns),
    ] {
        let [median, lower, upper] =
            [times.median, times.lower, times.upper].map(|ns| duration(ns as u64));
        sheet.value(name, &format!("{median:>8}   {lower} to {upper}"));
    }
    let Spread {
        median,
        lower,
        upper,
    } = found.ratio;
    let [median, lower, upper] = [median, lower, upper].map(three_digits);
    sheet.value("ratio", &format!("{median:>8}   {lower} to {upper}"));
}

fn dma(sheet: &mut Sheet, report: &MapReport) {
    let (dma, size) = (&report.dma, report.memory.size_bytes);
    sheet.section("DMA check");
    if let Some(why) = &dma.not_checked {
        let paint = sheet.paint();
        sheet.marked("device", |mark| paint.warning(mark), "not checked:", why);
        return;
    }
    let (read, written) = (bytes(dma.read_bytes), bytes(dma.written_bytes));
    if let Some(sample) = &dma.sample {
        let copies = counted_copies(sample.copies);
        let (engine, size) = (&sample.engine, bytes(size));
        sheet.value(
            "device",
            &format!("{engine} made {copies}, read {read} and wrote {written} of {size}"),
        );
        sheet.value(
            "compared",
            &format!("{}, copied or not", bytes(sample.compared_bytes)),
        );
        sheet.value(
            "outside",
            &format!(
                "{} of {} just outside it got through",
                count(dma.neighbour_reached),
                counted(dma.neighbour_accesses, "access")
            ),
        );
        return;
    }
    let devices = count(dma.devices.into());
    sheet.value(
        "devices",
        &format!("{devices} read {read} and wrote {written}"),
    );
    if let Some(unit) = &dma.unit {
        unit_counts(sheet, dma, unit);
    }
}

fn counted_copies(number: u64) -> String {
    match number {
        1 => "1 copy".into(),
        many => format!("{} copies", count(many)),
    }
}

fn unit_counts(sheet: &mut Sheet, dma: &DmaReport, unit: &UnitReport) {
    sheet.value(
        "faults",
        &format!(
            "{} inside the range; {} of {} just outside it",
            count(unit.faults),
            count(unit.neighbour_faults),
            counted(dma.neighbour_accesses, "access")
        ),
    );
    let translations = unit.iotlb_hits.saturating_add(unit.iotlb_misses);
    let mut iotlb = format!(
        "{} ({}), {}",
        counted(unit.iotlb_hits, "hit"),
        percent(unit.iotlb_hits, translations),
        counted(unit.iotlb_misses, "miss"),
    );
    if let Some(reads) = unit.reads_per_miss() {
        iotlb += &format!(", {} table reads per miss", three_digits(reads));
    }
    sheet.value("IOTLB", &iotlb);
}

fn verdict(sheet: &mut Sheet, report: &MapReport) {
    sheet.gap();
    let paint = sheet.paint();
    let good = paint.good("OK");
    match Verdict::of(report) {
        Verdict::Right => {
            let all = match report.dma.sample {
                None => "every byte was right, and everything was given back",
                Some(_) => "every byte that was compared was right, and everything was given back",
            };
            sheet.line(&format!("{good}  {all}"));
        }
        Verdict::Unchecked(_) => {
            let all = "mapped, unmapped, and everything given back; no byte was checked";
            sheet.line(&format!("{good}  {all}"));
        }
        Verdict::Wrong(wrong) => {
            for (nth, what) in wrong.iter().enumerate() {
                match nth {
                    0 => sheet.line(&format!("{}  {what}", paint.bad("WRONG"))),
                    _ => sheet.line(&format!("       {what}")),
                }
            }
        }
    }
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

#[cfg(test)]
mod tests;
