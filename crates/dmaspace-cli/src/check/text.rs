//! The result as text: one screen.

use super::report::{CheckReport, Compared, DomainReport, Done, MemoryReport, NodeShare, Refused};
use crate::draw::sheet::{Paint, Sheet};
use crate::size::{bytes, count, counted, duration, three_digits};

/// All of it.
pub(super) fn write(report: &CheckReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    memory(&mut sheet, report);
    if let Some(placement) = &report.placement {
        let tables = counted(placement.domains.len() as u64, "table");
        sheet.value("placement", &format!("{}: {tables}", placement.policy));
        for found in &placement.domains {
            sheet.value("", &domain(found));
        }
        for misplaced in &placement.misplaced {
            sheet.value("misplaced", misplaced);
        }
    }
    sheet.gap();
    steps(&mut sheet, &report.steps);
    if let Some(found) = &report.compared {
        compared(&mut sheet, found);
    }
    end(&mut sheet, report);
    sheet.into_text()
}

/// The items in a line.
fn listed<T>(items: impl IntoIterator<Item = T>, shown: impl Fn(T) -> String) -> String {
    let items: Vec<_> = items.into_iter().map(shown).collect();
    items.join(", ")
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
        more => listed(more, |one| format!("{} on {}", bytes(one.bytes), of(one))),
    }
}

fn memory(sheet: &mut Sheet, report: &CheckReport) {
    let memory = &report.memory;
    let size = because(&bytes(memory.size_bytes), memory.size_reason.as_ref());
    sheet.value("memory", &format!("{size}; {}", on(&memory.nodes)));
    let backing = because(memory.backing, memory.backing_reason.as_ref());
    sheet.value("backing", &backing);
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
        let levels = counted(tables.levels.into(), "level");
        let pages = counted(tables.table_pages, "table page");
        let nodes = on(&tables.nodes);
        let words = format!("{}, {levels}, {pages}; {nodes}", tables.format);
        sheet.value("tables", &words);
    }
    let Some(kernel) = &report.kernel else {
        return;
    };
    for device in &kernel.devices {
        let named = format!("{} ({}) by {}", device.address, device.id, report.backend);
        let group = device.group.map(|group| format!("group {group}"));
        let node = device.node.map(|node| format!("node {node}"));
        let words = [Some(named), group, device.unit.clone(), node];
        sheet.value("device", &listed(words.into_iter().flatten(), |word| word));
    }
    let pages = match &kernel.page_sizes_bytes {
        Some(sizes) => listed(sizes, |size| bytes(*size)),
        None => format!("{} and multiples of it", bytes(kernel.granule_bytes)),
    };
    sheet.value("pages", &pages);
    let windows = listed(&kernel.windows, |window| {
        format!("{:#x} to {:#x}", window.first, window.last)
    });
    sheet.value("windows", &windows);
}

fn pinned(memory: &MemoryReport) -> String {
    let by = because(&memory.pin, memory.pin_reason.as_ref());
    let limit = match memory.limit_bytes {
        Some(limit) => format!("limit {}", bytes(limit)),
        None => "no limit applies".into(),
    };
    format!("{by}; counted in {}, {limit}", memory.counter)
}

fn domain(domain: &DomainReport) -> String {
    let of = match domain.node {
        Some(node) => format!("of node {node}"),
        None => "of no known node".into(),
    };
    let devices = counted(domain.devices, "device");
    let lies = match (domain.table_bytes, &domain.nodes) {
        (Some(len), Some(found)) => format!("{} of tables, {}", bytes(len), on(found)),
        _ => "the kernel's tables".into(),
    };
    let charged = domain.charged_bytes;
    let charged = charged.map_or_else(String::new, |len| format!("; {} charged", bytes(len)));
    format!("{devices} {of}; {lies}{charged}")
}

fn steps(sheet: &mut Sheet, steps: &[Done]) {
    let row = |done: &Done| {
        let refused = done.refused.as_ref().map(|refused| {
            let capability = refused.capability.unwrap_or("limit");
            format!("refused ({capability}); ")
        });
        let wrong = if done.right { "" } else { "WRONG: " };
        let checked = format!("{wrong}{}{}", refused.unwrap_or_default(), done.checked);
        let (bytes, time) = (bytes(done.bytes), duration(done.took_ns));
        [done.step.name().into(), bytes, time, checked]
    };
    let head = ["step", "bytes", "time", "checked"].map(String::from);
    let rows: Vec<_> = std::iter::once(head).chain(steps.iter().map(row)).collect();
    sheet.table(&rows);
    let refused = |done: &Done| Some((done.step.name(), done.refused.clone()?));
    let refused: Vec<(_, Refused)> = steps.iter().filter_map(refused).collect();
    if !refused.is_empty() {
        sheet.section("refused, and nothing has changed");
    }
    for (name, refused) in refused {
        sheet.value(name, &refused.error);
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
        let words = format!("{devices} read {read} and wrote {wrote}; {wrong} wrong");
        sheet.value("DMA", &words);
        let (expected, unexpected) = (count(dma.faults_expected), count(dma.faults_unexpected));
        let missing = count(dma.reached_in_holes);
        let words = format!("{expected} expected, {unexpected} unexpected, {missing} missing");
        sheet.value("faults", &words);
        sheet.gap();
    }
    let paint = sheet.paint();
    if report.is_right() {
        let words = match report.dma {
            Some(_) => "every byte was right, and everything was given back",
            None => "everything was given back; the devices did no DMA",
        };
        return sheet.line(&format!("{}  {words}", paint.good("OK")));
    }
    let wrong = report.steps.iter().filter(|done| !done.right);
    let wrong = wrong.map(|done| done.step.name().to_owned());
    let left = &report.left;
    let left = [
        (left.charged_bytes, bytes(left.charged_bytes), "charged"),
        (left.held_bytes, bytes(left.held_bytes), "held"),
        (
            left.table_pages,
            counted(left.table_pages, "page"),
            "in tables",
        ),
        (
            left.mappings,
            counted(left.mappings, "mapping"),
            "in the kernel",
        ),
        (
            left.kernel.pinned_bytes,
            bytes(left.kernel.pinned_bytes),
            "pinned",
        ),
        (
            left.kernel.locked_bytes,
            bytes(left.kernel.locked_bytes),
            "locked",
        ),
    ];
    let left = left.into_iter().filter(|(left, ..)| *left > 0);
    let left = left.map(|(_, left, what)| format!("{left} still {what}"));
    let words = listed(wrong.chain(left), |word| word);
    sheet.line(&format!("{}  {words}", paint.bad("WRONG")));
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
