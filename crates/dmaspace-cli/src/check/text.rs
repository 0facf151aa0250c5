//! The result as text: one screen.

use super::report::{CheckReport, Compared, Done, MemoryReport, NodeShare, PlacementReport};
use crate::draw::sheet::{Paint, Sheet};
use crate::size::{bytes, count, counted, duration, three_digits};

/// All of it.
pub(super) fn write(report: &CheckReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    memory(&mut sheet, report);
    if let Some(found) = &report.placement {
        placement(&mut sheet, found);
    }
    sheet.gap();
    steps(&mut sheet, &report.steps);
    if let Some(found) = &report.compared {
        compared(&mut sheet, found);
    }
    end(&mut sheet, report);
    sheet.into_text()
}

fn because(value: &str, reason: Option<&String>) -> String {
    match reason {
        Some(reason) => format!("{value}: {reason}"),
        None => value.into(),
    }
}

/// Memory by node.
fn on(nodes: &[NodeShare]) -> String {
    let of = |share: &NodeShare| match share.node {
        Some(node) => format!("node {node}"),
        None => "a node that the kernel does not name".into(),
    };
    match nodes {
        [one] => of(one),
        more => {
            let more: Vec<_> = more
                .iter()
                .map(|one| format!("{} on {}", bytes(one.bytes), of(one)))
                .collect();
            more.join(", ")
        }
    }
}

fn memory(sheet: &mut Sheet, report: &CheckReport) {
    let memory = &report.memory;
    let size = because(&bytes(memory.size_bytes), memory.size_reason.as_ref());
    sheet.value("memory", &format!("{size}; {}", on(&memory.nodes)));
    sheet.value(
        "backing",
        &because(memory.backing, memory.backing_reason.as_ref()),
    );
    let paint = sheet.paint();
    match memory.addresses {
        "pagemap" | "kernel" => sheet.value("addresses", &memory.addresses_reason),
        _ => {
            let not = |mark: &str| paint.warning(mark);
            sheet.marked("addresses", not, "NOT REAL:", &memory.addresses_reason);
        }
    }
    sheet.value("pinned by", &pinned(memory));
    if let Some(tables) = &report.tables {
        let pages = counted(tables.table_pages, "table page");
        let format = format!(
            "{}, {}",
            tables.format,
            counted(tables.levels.into(), "level")
        );
        sheet.value(
            "tables",
            &format!("{format}, {pages}; {}", on(&tables.nodes)),
        );
    }
    for device in report.kernel.iter().flat_map(|kernel| &kernel.devices) {
        let mut words = vec![format!(
            "{} ({}) by {}",
            device.address, device.id, report.backend
        )];
        words.extend(device.group.map(|group| format!("group {group}")));
        words.extend(device.unit.clone());
        words.extend(device.node.map(|node| format!("node {node}")));
        sheet.value("device", &words.join(", "));
    }
    if let Some(kernel) = &report.kernel {
        let pages = match &kernel.page_sizes_bytes {
            Some(sizes) => sizes
                .iter()
                .copied()
                .map(bytes)
                .collect::<Vec<_>>()
                .join(", "),
            None => format!("{} and multiples of it", bytes(kernel.granule_bytes)),
        };
        sheet.value("pages", &pages);
        let windows = kernel.windows.iter();
        let windows: Vec<_> = windows
            .map(|window| format!("{:#x} to {:#x}", window.first, window.last))
            .collect();
        sheet.value("windows", &windows.join(", "));
    }
}

fn pinned(memory: &MemoryReport) -> String {
    let by = because(&memory.pin, memory.pin_reason.as_ref());
    let limit = match memory.limit_bytes {
        Some(limit) => format!("limit {}", bytes(limit)),
        None => "no limit applies".into(),
    };
    format!("{by}; counted in {}, {limit}", memory.counter)
}

fn placement(sheet: &mut Sheet, placement: &PlacementReport) {
    let tables = counted(placement.domains.len() as u64, "table");
    sheet.value("placement", &format!("{}: {tables}", placement.policy));
    for domain in &placement.domains {
        let of = match domain.node {
            Some(node) => format!("of node {node}"),
            None => "of no known node".into(),
        };
        let devices = counted(domain.devices, "device");
        let lies = match (domain.table_bytes, &domain.nodes) {
            (Some(len), Some(found)) => format!("{} of tables, {}", bytes(len), on(found)),
            _ => "the kernel's tables".into(),
        };
        let charged = domain
            .charged_bytes
            .map(|len| format!("; {} charged", bytes(len)));
        let charged = charged.unwrap_or_default();
        sheet.value("", &format!("{devices} {of}; {lies}{charged}"));
    }
    for misplaced in &placement.misplaced {
        sheet.value("misplaced", misplaced);
    }
}

fn steps(sheet: &mut Sheet, steps: &[Done]) {
    let row = |done: &Done| {
        let capability = |refused: &super::report::Refused| refused.capability.unwrap_or("limit");
        let refused = done
            .refused
            .as_ref()
            .map(|refused| format!("refused ({}); ", capability(refused)));
        let wrong = if done.right { "" } else { "WRONG: " };
        [
            done.step.name().into(),
            bytes(done.bytes),
            duration(done.took_ns),
            format!("{wrong}{}{}", refused.unwrap_or_default(), done.checked),
        ]
    };
    let head = ["step", "bytes", "time", "checked"].map(String::from);
    let rows: Vec<_> = std::iter::once(head).chain(steps.iter().map(row)).collect();
    sheet.table(&rows);
    let refused = steps
        .iter()
        .filter_map(|done| Some((done.step.name(), done.refused.as_ref()?)));
    let refused: Vec<_> = refused.collect();
    if !refused.is_empty() {
        sheet.section("refused, and nothing has changed");
        for (name, refused) in refused {
            sheet.value(name, &refused.error);
        }
    }
}

fn compared(sheet: &mut Sheet, found: &Compared) {
    let rounds = counted(found.rounds, "round");
    sheet.section(&format!(
        "the same map again: median and middle half of {rounds}"
    ));
    let time = |ns: f64| duration(ns as u64);
    let rows = [
        ("by runs", found.by_runs_ns, time as fn(f64) -> String),
        ("by pages", found.by_page_ns, time),
        ("ratio", found.ratio, three_digits),
    ];
    for (name, spread, shown) in rows {
        let [median, lower, upper] = [spread.median, spread.lower, spread.upper].map(shown);
        sheet.value(name, &format!("{median:>8}   {lower} to {upper}"));
    }
}

fn end(sheet: &mut Sheet, report: &CheckReport) {
    sheet.gap();
    if let Some(dma) = &report.dma {
        let devices = counted(dma.devices.into(), "device");
        let (read, wrote) = (bytes(dma.read_bytes), bytes(dma.written_bytes));
        let wrong = counted(dma.wrong_bytes, "byte");
        sheet.value(
            "DMA",
            &format!("{devices} read {read} and wrote {wrote}; {wrong} wrong"),
        );
        let faults = [
            dma.faults_expected,
            dma.faults_unexpected,
            dma.reached_in_holes,
        ]
        .map(count);
        let [expected, unexpected, missing] = faults;
        sheet.value(
            "faults",
            &format!("{expected} expected, {unexpected} unexpected, {missing} missing"),
        );
        sheet.gap();
    }
    let paint = sheet.paint();
    let said = match (report.is_right(), &report.dma) {
        (true, Some(_)) => format!(
            "{}  every byte was right, and everything was given back",
            paint.good("OK")
        ),
        (true, None) => format!(
            "{}  everything was given back; the devices did no DMA",
            paint.good("OK")
        ),
        (false, _) => {
            let wrong = report.steps.iter().filter(|done| !done.right);
            let mut wrong: Vec<_> = wrong.map(|done| done.step.name().to_owned()).collect();
            let left = &report.left;
            for (what, left) in [
                ("charged", bytes(left.charged_bytes)),
                ("held", bytes(left.held_bytes)),
                ("in tables", counted(left.table_pages, "page")),
                ("in the kernel", counted(left.mappings, "mapping")),
                ("pinned", bytes(left.kernel.pinned_bytes)),
                ("locked", bytes(left.kernel.locked_bytes)),
            ] {
                if !left.starts_with("0 ") && left != "0" {
                    wrong.push(format!("{left} still {what}"));
                }
            }
            format!("{}  {}", paint.bad("WRONG"), wrong.join(", "))
        }
    };
    sheet.line(&said);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::report::{DmaReport, Refused, Step};

    fn report() -> CheckReport {
        let done = |step| Done {
            step,
            right: true,
            checked: "as it must be".into(),
            ..Done::default()
        };
        CheckReport {
            backend: "software",
            steps: vec![done(Step::Map), done(Step::Hole)],
            dma: Some(DmaReport {
                devices: 2,
                ..DmaReport::default()
            }),
            ..CheckReport::default()
        }
    }

    #[test]
    fn a_wrong_step_and_what_is_left_are_named() {
        let mut report = report();
        let text = write(&report, Paint::PLAIN);
        assert!(
            text.ends_with("\nOK  every byte was right, and everything was given back\n"),
            "{text}"
        );
        report.steps[1].right = false;
        report.left.table_pages = 3;
        let text = write(&report, Paint::PLAIN);
        assert!(text.contains("WRONG: as it must be"), "{text}");
        assert!(
            text.ends_with("\nWRONG  hole, 3 pages still in tables\n"),
            "{text}"
        );
    }

    #[test]
    fn a_refusal_is_named_in_the_table_and_quoted_below() {
        let mut report = report();
        report.dma = None;
        report.steps[1].refused = Some(Refused {
            capability: Some("hitless_cut"),
            error: "type1 cannot do so".into(),
        });
        let text = write(&report, Paint::PLAIN);
        assert!(
            text.contains("refused (hitless_cut); as it must be\n"),
            "{text}"
        );
        assert!(
            text.contains("\n  hole        type1 cannot do so\n"),
            "{text}"
        );
        assert!(text.contains("the devices did no DMA"), "{text}");
    }
}
