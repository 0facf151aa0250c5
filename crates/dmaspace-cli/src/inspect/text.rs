//! A process, or a configuration, as text.

use std::iter;

use crate::inspect::{
    Advice, Area, AreaReport, ConfigurationReport, DeviceDriver, Estimate, Guest, LockCounter,
    Missing, NeedsReport, ProcessReport, Ram, Remapped, StartReport,
};

use crate::draw::sheet::{Paint, Sheet};
use crate::size::{bytes, count, counted, duration, percent};

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
                "{}, the largest {}; VT-d has {} leaves for them, 64 of which reach {}",
                count(runs.count),
                bytes(runs.largest_bytes),
                count(vtd.leaf_count),
                bytes(vtd.reach_64_bytes)
            ),
        );
    }
}

/// Needs beside what there is, with a mark where that is known.
fn needs(sheet: &mut Sheet, found: &NeedsReport) {
    let short = |cause: &str| {
        let mut findings = found.findings.iter();
        findings.any(|finding| finding.cause.starts_with(cause))
    };
    let paint = sheet.paint();
    let mut begun = false;
    let mut row = |sheet: &mut Sheet, name: &str, enough: Option<bool>, text: &str| {
        if !std::mem::replace(&mut begun, true) {
            sheet.section("needs");
        }
        let good = |text: &str| paint.good(text);
        let warning = |text: &str| paint.warning(text);
        match enough {
            Some(true) => sheet.marked(name, good, "✓", text),
            Some(false) => sheet.marked(name, warning, "!", text),
            None => sheet.value(name, text),
        }
    };
    for pool in &found.pools {
        let nodes: Vec<_> = pool.nodes.iter().map(u32::to_string).collect();
        let nodes = match nodes.is_empty() {
            true => String::new(),
            false => format!(" on node {}", nodes.join(", ")),
        };
        let free = match pool.free_pages {
            Some(free) => format!("{} are free", count(free)),
            None => "free ones are not known".into(),
        };
        let enough = pool.free_pages.map(|_| pool.missing_pages == 0);
        let growth = match pool.growth_pages {
            0 => String::new(),
            growth => format!(", {} more may come", count(growth)),
        };
        let text = format!(
            "{} of {}{nodes}: {free}{growth}",
            counted(pool.needed_pages, "page"),
            bytes(pool.page_bytes)
        );
        row(sheet, "pool", enough, &text);
    }
    if let Some(lock) = &found.locked {
        let times = match lock.address_spaces {
            1 => String::new(),
            times => format!(
                ", {} in each of {times} address spaces",
                bytes(lock.memory_bytes)
            ),
        };
        let at_most = if lock.at_start { "" } else { "up to " };
        let counter = match lock.counter {
            LockCounter::Process => "mm->locked_vm",
            LockCounter::User => "user->locked_vm",
        };
        let limit = match (lock.limit_of, lock.limit_bytes) {
            (None, _) => "the limit is not known".into(),
            (Some(of), Some(limit)) => format!("{} allowed by {of}", bytes(limit)),
            (Some(of), None) => format!("no limit of {of}"),
        };
        let text = format!(
            "{at_most}{}{times} ({counter}): {limit}",
            bytes(lock.needed_bytes)
        );
        row(
            sheet,
            "locked",
            lock.limit_of
                .map(|_| !short("memlock.too-low") && !short("memlock.per-device")),
            &text,
        );
    }
    if let Some(mappings) = &found.mappings {
        let pieces: u64 = mappings
            .pieces
            .iter()
            .fold(0, |sum, one| sum.saturating_add(one.count));
        let most = match pieces {
            0 => String::new(),
            pieces => format!(", up to {} more in pieces", count(pieces)),
        };
        let text = format!(
            "{} for RAM{most}: {} allowed",
            count(mappings.ram),
            count(mappings.limit)
        );
        row(
            sheet,
            "mappings",
            Some(!short("memlock.mapping-limit")),
            &text,
        );
    }
    if let Some(last) = found.ram.last() {
        let translated = match found.last_address {
            Some(last) => format!(": the IOMMU translates up to {last:#x}"),
            None => String::new(),
        };
        let text = format!("RAM up to {:#x}{translated}", last.last);
        let known = found.reserved_ranges > 0 || found.last_address.is_some();
        row(sheet, "addresses", known.then(|| !short("layout.")), &text);
    }
    for (nth, bar) in found.bars.iter().enumerate() {
        let name = if nth == 0 { "BARs" } else { "" };
        let enough = !short("start.bar-");
        row(
            sheet,
            name,
            Some(enough),
            &format!("{} of {}", bytes(bar.bytes), bar.device),
        );
    }
}

fn start(sheet: &mut Sheet, found: &StartReport, size: u64, advice: &[Advice]) {
    if found.type1.is_none() {
        sheet.section(&format!("start: the kernel maps {}", bytes(size)));
        sheet.value("faults", &count(found.pages));
        return;
    }
    let faults = counted(found.pages, "fault");
    sheet.section(&format!(
        "start: the kernel maps {} (estimate: {faults})",
        bytes(size)
    ));
    let head = ["", "fault, zero", "pin, map", "all"].map(String::from);
    let mut rows = vec![head];
    let mut row = |name: &str, estimate: Option<Estimate>| {
        if let Some(estimate) = estimate {
            rows.push([
                name.into(),
                duration(estimate.fault_ns),
                estimate.pin_map_ns.map_or("-".into(), duration),
                with_error(&estimate),
            ]);
        }
    };
    if found.type1 == found.iommufd {
        row("today", found.type1);
    } else {
        row("today, type 1", found.type1);
        row("today, iommufd", found.iommufd);
    }
    row("one thread (QEMU 5.0 to 7.0)", found.one_thread);
    row("hot-plug now", found.now);
    // iommufd instead of type 1 has a row above.
    for advice in advice
        .iter()
        .filter(|advice| advice.estimate != found.iommufd)
    {
        row(&advice.finding, advice.estimate);
    }
    row("together, no reboot", found.together);
    sheet.table(&rows);
    let debug = "calibrated by a debug build: 3 to 4 times slower than a release build";
    let debug = cfg!(debug_assertions).then_some(("note", debug));
    let notes = found
        .notes
        .iter()
        .map(|note| (note.about, note.text.as_str()));
    let mut notes = notes.chain(debug).peekable();
    if notes.peek().is_some() {
        sheet.gap();
    }
    notes.for_each(|(about, text)| sheet.value(about, text));
}

/// `1.43 s ± 0.20 s`
fn with_error(estimate: &Estimate) -> String {
    format!(
        "{} ± {}",
        duration(estimate.total_ns),
        duration(estimate.error_ns)
    )
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

fn advice(sheet: &mut Sheet, others: &[Advice]) {
    if others.is_empty() {
        return;
    }
    sheet.section("changes that help");
    for (nth, advice) in others.iter().enumerate() {
        let saved = advice
            .saved_ns
            .map_or(String::new(), |ns| format!(": saves {}", duration(ns)));
        let boot = match (advice.reboot, advice.saved_ns) {
            (true, Some(_)) => {
                let without = others.iter().filter(|other| !other.reboot);
                let without = without
                    .filter_map(|other| other.saved_ns)
                    .max()
                    .unwrap_or(0);
                format!(", needs a reboot (without one: {})", duration(without))
            }
            (true, None) => ", needs a reboot".into(),
            (false, _) => String::new(),
        };
        sheet.line(&format!("  {}. {}{saved}{boot}", nth + 1, advice.finding));
        for line in &advice.setting {
            // A sentence is read, a command or a line of a file is copied.
            match line.ends_with('.') {
                true => sheet.line(&format!("     {line}")),
                false => sheet.copied(&format!("     {line}")),
            }
        }
        if !advice.assumes.is_empty() {
            sheet.line(&format!("     assumes {}", advice.assumes.join("; ")));
        }
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
mod tests {
    use crate::inspect::needs::{
        BarReport, GuestRange, LockReport, MappingsReport, NeedFinding, Pieces, PoolReport,
    };
    use crate::inspect::{
        AreaKind, FolioReport, FormatCost, GivenDevice, Interface, Limit, RunsReport,
    };

    use super::*;

    const MIB: u64 = 1 << 20;

    fn seconds(fault: f64, pin_map: f64) -> Estimate {
        Estimate {
            fault_ns: (fault * 1e9) as u64,
            pin_map_ns: Some((pin_map * 1e9) as u64),
            total_ns: ((fault + pin_map) * 1e9) as u64,
            error_ns: 100_000_000,
        }
    }

    fn advised(finding: &str, setting: &str, reboot: bool, after: Estimate) -> Advice {
        Advice {
            finding: finding.into(),
            setting: vec![setting.into()],
            assumes: Vec::new(),
            reboot,
            estimate: Some(after),
            saved_ns: Some(seconds(1.4, 0.2).total_ns - after.total_ns),
            pages: None,
        }
    }

    fn locked() -> LockReport {
        LockReport {
            counter: LockCounter::Process,
            memory_bytes: 4 << 30,
            address_spaces: 1,
            mlocked_bytes: 0,
            needed_bytes: 4 << 30,
            at_start: true,
            limit_of: Some("the process"),
            limit_bytes: Some(8 * MIB),
        }
    }

    fn finding(cause: &'static str) -> NeedFinding {
        NeedFinding {
            cause,
            likely: false,
            title: "something is short".into(),
            text: String::new(),
            devices: Vec::new(),
            addresses: Vec::new(),
            advice: Vec::new(),
            source: "",
            reserved: None,
        }
    }

    fn pool(nodes: Vec<u32>, free: u64) -> PoolReport {
        PoolReport {
            page_bytes: 2 * MIB,
            nodes,
            needed_pages: 1024,
            free_pages: Some(free),
            growth_pages: 0,
            missing_pages: 1024_u64.saturating_sub(free),
        }
    }

    fn needed() -> NeedsReport {
        NeedsReport {
            locked: Some(locked()),
            findings: vec![finding("memlock.too-low")],
            ..NeedsReport::default()
        }
    }

    fn monitor() -> ProcessReport {
        let class = |page_bytes, bytes| FolioReport { page_bytes, bytes };
        ProcessReport {
            pid: 4711,
            name: "qemu-system-x86".into(),
            guest: Some(Guest {
                name: Some("web".into()),
                memory: vec![
                    Ram {
                        bytes: 2 << 30,
                        shared: true,
                        asks_for_huge: Some(true),
                        ..Ram::default()
                    };
                    2
                ],
                remapped: Some(Remapped {
                    bytes: 2 << 30,
                    times: 5,
                }),
                devices: vec![GivenDevice {
                    name: Some("Intel Corporation 82574L".into()),
                    ..GivenDevice::from("0000:01:00.0".to_owned())
                }],
                ..Guest::default()
            }),
            mappable_bytes: 4 << 30,
            present_bytes: 1025 * MIB,
            rest_bytes: 1100 * MIB,
            rest_present_bytes: 12 * MIB,
            pinned_bytes: MIB,
            limit: Limit {
                memlock_bytes: Some(8 * MIB),
                lifted: false,
            },
            folios: vec![class(4096, MIB), class(64 << 10, 1024 * MIB)],
            entries: vec![class(4096, 1025 * MIB)],
            nodes: vec![(Some(0), 1025 * MIB)],
            runs: Some(RunsReport {
                count: 16_640,
                largest_bytes: 64 << 10,
                classes: Vec::new(),
            }),
            costs: vec![FormatCost {
                format: "vtd-ss".into(),
                leaf_count: 262_400,
                reach_64_bytes: 256 << 10,
                ..FormatCost::default()
            }],
            needs: needed(),
            start: Some(StartReport {
                pages: 1 << 20,
                interface: Interface::Type1,
                threads: vec![0; 2],
                speeds: None,
                type1: Some(seconds(1.4, 0.2)),
                iommufd: Some(seconds(1.4, 0.1)),
                now: Some(seconds(1.05, 0.2)),
                one_thread: None,
                together: Some(seconds(0.11, 0.01)),
                conditions: None,
                notes: Vec::new(),
            }),
            advice: vec![
                advised(
                    "hugetlb pages of 2 MiB",
                    "-object a",
                    false,
                    seconds(0.2, 0.01),
                ),
                advised(
                    "hugetlb pages of 1 GiB",
                    "-object b",
                    true,
                    seconds(0.1, 0.01),
                ),
            ],
            missing: vec![Missing {
                what: "nodes",
                why: "there is no numa_maps".into(),
            }],
            ..ProcessReport::default()
        }
    }

    #[test]
    fn a_monitor_as_people_read_it() {
        let text = process(&monitor(), Paint::PLAIN);
        assert_eq!(text, MONITOR.trim_start_matches('\n'), "\n{text}");
    }

    #[test]
    fn a_configuration_as_people_read_it() {
        let monitor = monitor();
        let text = configuration(
            &ConfigurationReport {
                guest: monitor.guest.unwrap(),
                needs: NeedsReport {
                    pools: vec![pool(vec![0], 512), pool(Vec::new(), 4096)],
                    ram: vec![GuestRange {
                        first: 1 << 32,
                        last: (1 << 40) - 1,
                    }],
                    last_address: Some((1 << 39) - 1),
                    bars: vec![BarReport {
                        device: "0000:01:00.0".into(),
                        bytes: 128 << 30,
                    }],
                    findings: [
                        "memlock.per-device",
                        "layout.address-width",
                        "start.bar-mapping",
                    ]
                    .map(finding)
                    .into(),
                    locked: Some(LockReport {
                        address_spaces: 2,
                        needed_bytes: 8 << 30,
                        limit_bytes: Some(4 << 30),
                        ..locked()
                    }),
                    mappings: Some(MappingsReport {
                        ram: 2,
                        pieces: vec![Pieces {
                            what: "virtio-mem",
                            bytes: 64 << 30,
                            piece_bytes: 2 << 20,
                            count: 32_768,
                        }],
                        limit: 65_535,
                    }),
                    ..NeedsReport::default()
                },
                start: StartReport {
                    type1: None,
                    ..monitor.start.unwrap()
                },
                advice: Vec::new(),
            },
            Paint::PLAIN,
        );
        assert_eq!(text, CONFIGURATION.trim_start_matches('\n'), "\n{text}");
    }

    #[test]
    fn another_process_has_its_areas_and_what_takes_privilege_is_unknown() {
        let mut found = monitor();
        (found.guest, found.runs, found.start) = (None, None, None);
        found.missing[0].what = "runs, leaves, folios";
        found.areas = vec![AreaReport {
            area: Area {
                address: 0x7f00_0000_0000,
                bytes: 4 << 30,
                kind: AreaKind::Anonymous,
                name: String::new(),
                page_bytes: 4096,
                locked_bytes: 0,
                asks_for_huge: false,
                refuses_huge: false,
                mappable: true,
                executable: false,
                shared: false,
                guest_ram: false,
            },
            present_bytes: 1025 * MIB,
            huge_bytes: 0,
            runs: None,
        }];
        let text = process(&found, Paint::PLAIN);
        for part in [
            "process 4711 (qemu-system-x86)\n  mappable    4 GiB\n",
            "  0x7f0000000000  4 GiB  1.00 GiB  0 %   anonymous\n",
            "\n  runs, leaves, folios\n              there is no numa_maps\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("runs  "), "{text}");
    }

    const MONITOR: &str = r"
virtual machine, process 4711 (qemu-system-x86)
  name        web
  guest RAM   4 GiB in 2 parts: memfd, asks for huge pages
              2 GiB below 4 GiB, mapped 5 times while it starts
  devices     0000:01:00.0 Intel Corporation 82574L
  rest        1.07 GiB, 12 MiB present: heap, stacks, firmware, video memory
  present     1.00 GiB (25.0 %): 1.00 GiB by entries of 4 KiB
  folios      1 GiB of 64 KiB, 1 MiB of 4 KiB
  nodes       0: 1.00 GiB
  runs        16,640, the largest 64 KiB; VT-d has 262,400 leaves for them,
              64 of which reach 256 KiB
  pinned      1 MiB, locked 0 B, limit 8 MiB (RLIMIT_MEMLOCK)

needs
  locked      ! 4 GiB (mm->locked_vm): 8 MiB allowed by the process

start: the kernel maps 4 GiB (estimate: 1,048,576 faults)
                          fault, zero  pin, map  all
  today, type 1           1.40 s       200 ms    1.60 s ± 100 ms
  today, iommufd          1.40 s       100 ms    1.50 s ± 100 ms
  hot-plug now            1.05 s       200 ms    1.25 s ± 100 ms
  hugetlb pages of 2 MiB  200 ms       10.0 ms   210 ms ± 100 ms
  hugetlb pages of 1 GiB  100 ms       10.0 ms   110 ms ± 100 ms
  together, no reboot     110 ms       10.0 ms   120 ms ± 100 ms

  note        calibrated by a debug build: 3 to 4 times slower than a release
              build

changes that help
  1. hugetlb pages of 2 MiB: saves 1.39 s
     -object a
  2. hugetlb pages of 1 GiB: saves 1.49 s, needs a reboot (without one: 1.39 s)
     -object b

not known
  nodes       there is no numa_maps
";

    const CONFIGURATION: &str = r"
virtual machine, by its configuration
  name        web
  guest RAM   4 GiB in 2 parts: memfd, asks for huge pages
              2 GiB below 4 GiB, mapped 5 times while it starts
  devices     0000:01:00.0 Intel Corporation 82574L

needs
  pool        ! 1,024 pages of 2 MiB on node 0: 512 are free
  pool        ✓ 1,024 pages of 2 MiB: 4,096 are free
  locked      ! 8 GiB, 4 GiB in each of 2 address spaces (mm->locked_vm): 4 GiB
              allowed by the process
  mappings    ✓ 2 for RAM, up to 32,768 more in pieces: 65,535 allowed
  addresses   ! RAM up to 0xffffffffff: the IOMMU translates up to 0x7fffffffff
  BARs        ! 128 GiB of 0000:01:00.0

start: the kernel maps 4 GiB
  faults      1,048,576
";
}
