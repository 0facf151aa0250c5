//! A process, or a configuration, as text.

mod needs;
mod start;

use std::iter;

use crate::inspect::{
    Area, AreaReport, ConfigurationReport, DeviceDriver, Guest, Missing, ProcessReport, Ram,
    Remapped, StartReport,
};

use crate::draw::sheet::{Paint, Sheet};
use crate::size::{bytes, count, counted, percent};
use needs::needs;
use start::{advice, start};

/// The whole report of a process.
pub(crate) fn process(found: &ProcessReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    let what = match &found.guest {
        Some(_) => "virtual machine, process",
        None => "process",
    };
    sheet.section(&format!("{what} {} ({})", found.pid, found.name));
    if found.ended {
        let mark = |text: &str| paint.warning(text);
        sheet.marked(
            "ended",
            mark,
            "!",
            "during the inspection: this report is incomplete",
        );
    }
    match &found.guest {
        Some(guest) => {
            memory(&mut sheet, guest, found.start.as_ref());
            let rest = format!(
                "{}, {} present: heap, stacks, firmware, video memory",
                bytes(found.rest_bytes),
                bytes(found.rest_present_bytes)
            );
            sheet.value("rest", &rest);
        }
        None => sheet.value("mappable", &bytes(found.mappable_bytes)),
    }
    sheet.value("present", &present(found));
    backing(&mut sheet, found);
    let limit = match (found.limit.lifted, found.limit.memlock_bytes) {
        (true, _) => "no limit (CAP_IPC_LOCK)".into(),
        (false, Some(limit)) => format!("limit {} (RLIMIT_MEMLOCK)", bytes(limit)),
        (false, None) => "limit unlimited, or not known".into(),
    };
    let (pinned, locked) = (bytes(found.pinned_bytes), bytes(found.locked_bytes));
    sheet.value("pinned", &format!("{pinned}, locked {locked}, {limit}"));
    if found.guest.is_none() {
        areas(&mut sheet, &found.areas);
    }
    if found.guest.is_some() {
        needs(&mut sheet, &found.needs);
    }
    if let Some(report) = &found.start {
        start(&mut sheet, report, found.charged_bytes(), &found.advice);
    }
    advice(&mut sheet, &found.advice);
    unknown(&mut sheet, &found.missing);
    sheet.into_text()
}

/// The report of a machine that does not run.
pub(crate) fn configuration(found: &ConfigurationReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    sheet.section("virtual machine, by its configuration");
    memory(&mut sheet, &found.guest, Some(&found.start));
    needs(&mut sheet, &found.needs);
    start(&mut sheet, &found.start, found.guest.bytes(), &found.advice);
    advice(&mut sheet, &found.advice);
    sheet.into_text()
}

fn memory(sheet: &mut Sheet, guest: &Guest, start: Option<&StartReport>) {
    if let Some(name) = &guest.name {
        sheet.value("name", name);
    }
    // Parts that differ by their size only are one line.
    let mut lines: Vec<(String, u64, u64)> = Vec::new();
    let threads = start.map_or(&[][..], |start| &start.threads);
    let threads = threads.iter().copied().map(Some).chain(iter::repeat(None));
    for (ram, threads) in guest.memory.iter().zip(threads) {
        let line = backed(ram, threads.unwrap_or(ram.prealloc_threads));
        match lines.iter_mut().find(|known| known.0 == line) {
            Some(known) => (known.1, known.2) = (known.1 + 1, known.2.saturating_add(ram.bytes)),
            None => lines.push((line, 1, ram.bytes)),
        }
    }
    for (nth, (line, parts, size)) in lines.iter().enumerate() {
        let parts = match parts {
            1 => String::new(),
            parts => format!(" in {parts} parts"),
        };
        let name = if nth == 0 { "guest RAM" } else { "" };
        sheet.value(name, &format!("{}{parts}: {line}", bytes(*size)));
    }
    if let Some(Remapped {
        bytes: size, times, ..
    }) = guest.remapped
    {
        let text = format!(
            "{} below 4 GiB, mapped {times} times while it starts",
            bytes(size)
        );
        sheet.value("", &text);
    }
    if let Some(kind) = &guest.confidential {
        let pieces = match guest.keeps_private_memory() {
            true => ": pages are mapped in pieces, as they are shared",
            false => "",
        };
        sheet.value("", &format!("confidential ({kind}){pieces}"));
    }
    for (nth, device) in guest.devices.iter().enumerate() {
        let name = device.name.as_deref().unwrap_or_default();
        let by = match device.driver {
            DeviceDriver::Vfio => "",
            DeviceDriver::Nvme => " (a disk of QEMU's NVMe driver)",
        };
        let text = format!("{} {name}", device.address);
        let text = format!("{}{by}", text.trim_end());
        sheet.value(if nth == 0 { "devices" } else { "" }, text.trim_end());
    }
    if let Some(model) = &guest.viommu {
        let text = format!("virtual ({model}): each device has an address space of its own");
        sheet.value("IOMMU", &text);
    }
    if !guest.ignored.is_empty() {
        sheet.value("ignored", &guest.ignored.join(", "));
    }
}

fn backed(ram: &Ram, threads: u32) -> String {
    let memory = match (&ram.file, ram.pool_bytes, ram.shared) {
        (Some(file), _, _) => file.clone(),
        (None, Some(page), _) => format!("hugetlb pages of {}", bytes(page)),
        (None, None, true) => "memfd".into(),
        (None, None, false) => "anonymous".into(),
    };
    let huge = match (ram.pool_bytes, ram.asks_for_huge) {
        (None, Some(true)) => ", asks for huge pages",
        (None, Some(false)) => ", refuses huge pages",
        _ => "",
    };
    let threads = match threads {
        0 => String::new(),
        threads => format!(", brought in by {}", counted(threads.into(), "thread")),
    };
    let guess = match (ram.pool_bytes, ram.pool_by_name) {
        (Some(page), true) => format!(" (by its name, pages of {} of a pool)", bytes(page)),
        _ => String::new(),
    };
    format!("{memory}{guess}{huge}{threads}")
}

fn present(found: &ProcessReport) -> String {
    let share = percent(found.present_bytes, found.mappable_bytes);
    let classes = found.entries.iter().rev();
    let classes = classes.map(|class| {
        let (page, all) = (bytes(class.page_bytes), bytes(class.bytes));
        format!("{all} by entries of {page}")
    });
    let classes = classes.collect::<Vec<_>>().join(", ");
    match found.present_bytes {
        0 => "nothing yet".into(),
        present => format!("{} ({share}): {classes}", bytes(present)),
    }
}

/// Backing of the pages that are there; nothing without pages.
fn backing(sheet: &mut Sheet, found: &ProcessReport) {
    if found.present_bytes == 0 {
        return;
    }
    let list = |classes: Vec<String>| classes.join(", ");
    if !found.folios.is_empty() {
        let folios = found.folios.iter().rev();
        let folios =
            folios.map(|class| format!("{} of {}", bytes(class.bytes), bytes(class.page_bytes)));
        sheet.value("folios", &list(folios.collect()));
    }
    let nodes = found.nodes.iter().map(|(node, amount)| {
        let node = node.map_or("unknown".into(), |node| node.to_string());
        format!("{node}: {}", bytes(*amount))
    });
    sheet.value("nodes", &list(nodes.collect()));
    let vtd = found.costs.iter().find(|cost| cost.format == "vtd-ss");
    if let (Some(runs), Some(vtd)) = (&found.runs, vtd) {
        sheet.value(
            "runs",
            &format!(
                "{}, the largest {}; VT-d has {} leaves for them, {} of which, in a translation \
                 cache of 64 entries, reach {}",
                count(runs.count),
                bytes(runs.largest_bytes),
                count(vtd.leaf_count),
                vtd.leaf_count.min(64),
                bytes(vtd.reach_64_bytes)
            ),
        );
    }
}

fn areas(sheet: &mut Sheet, areas: &[AreaReport]) {
    let mut shown = areas
        .iter()
        .filter(|area| area.present_bytes > 0)
        .take(5)
        .peekable();
    if shown.peek().is_none() {
        return;
    }
    sheet.section("largest areas");
    let head = ["address", "size", "present", "huge", "what"];
    let rows = shown.map(|found| {
        let area = &found.area;
        [
            format!("{:#x}", area.address),
            bytes(area.bytes),
            bytes(found.present_bytes),
            percent(found.huge_bytes, found.present_bytes),
            name_of(area).into(),
        ]
    });
    let rows: Vec<_> = [head.map(String::from)].into_iter().chain(rows).collect();
    sheet.table(&rows);
}

fn name_of(area: &Area) -> &str {
    match area.name.as_str() {
        "" => "anonymous",
        name => name,
    }
}

fn unknown(sheet: &mut Sheet, missing: &[Missing]) {
    if missing.is_empty() {
        return;
    }
    sheet.section("not known");
    for missing in missing {
        sheet.value(missing.what, &missing.why);
    }
}

#[cfg(test)]
mod tests;
