//! A life as text: one screen.

use crate::life::{LifeReport, LifeTimes, Refused, StepReport};
use crate::map::NodeShare;

use crate::draw::sheet::{Paint, Sheet};
use crate::map::clock::in_nanoseconds;
use crate::size::{bytes, count, counted, duration};

/// The whole report.
pub(crate) fn write(report: &LifeReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    memory(&mut sheet, report);
    steps(&mut sheet, report);
    times(&mut sheet, &report.times);
    refusals(&mut sheet, report);
    end(&mut sheet, report);
    sheet.into_text()
}

/// The nodes on which memory lies.
fn lies(nodes: &[NodeShare]) -> String {
    let each = nodes.iter().map(|share| match share.node {
        Some(node) => format!("on node {node}"),
        None => "on an unknown node".into(),
    });
    each.collect::<Vec<_>>().join(", ")
}

fn memory(sheet: &mut Sheet, report: &LifeReport) {
    let memory = &report.memory;
    sheet.section("memory");
    let why = memory.size_reason.iter().map(|why| format!(", {why}"));
    let addresses = match memory.addresses.as_str() {
        "pagemap" => "page frames",
        "kernel" => "the kernel's",
        _ => "offsets in the memory files, not page frames",
    };
    let size = bytes(memory.size_bytes);
    let (why, backing): (String, _) = (why.collect(), &memory.backing);
    sheet.value("size", &format!("{size} of {backing}{why}"));
    sheet.value("addresses", addresses);
    sheet.value(
        "pinned by",
        &format!("{}, counted in {}", memory.pin, memory.counter),
    );
    for device in &report.devices {
        let group = device.group.map(|group| format!(", group {group}"));
        let (group, backend) = (group.unwrap_or_default(), &report.backend);
        let value = format!("{} ({}){group}, by {backend}", device.address, device.id);
        sheet.value("device", &value);
    }
    for (number, part) in memory.parts.iter().enumerate() {
        let planned = match memory.second_node_planned && number == 1 {
            true => " (planned)",
            false => "",
        };
        let on = lies(&part.nodes);
        let on = report.roots.get(number).map_or(on.clone(), |root| {
            let (tables, format, device) = (lies(&root.nodes), &root.format, &root.device);
            let on = match on == tables {
                true => format!("and tables {on}"),
                false => format!("{on}, tables {tables}"),
            };
            format!("{on}, {format} for device {device}")
        });
        let value = format!("{} {on}{planned}", bytes(part.size_bytes));
        sheet.value(&format!("node {}", part.node), &value);
        if !planned.is_empty() {
            sheet.value("planned", &format!("the machine has no node {}", part.node));
        }
    }
}

fn steps(sheet: &mut Sheet, report: &LifeReport) {
    sheet.gap();
    let head = [
        "step", "time", "runs", "moved", "tables", "flushes", "found",
    ];
    let rows = |found: fn(&StepReport) -> String| {
        let mut rows = vec![head.map(String::from)];
        rows.extend(report.steps.iter().map(|step| row(step, found(step))));
        rows
    };
    // A step is one line.
    let whole = rows(whole);
    match sheet.has_room(&whole) {
        true => sheet.table(&whole),
        false => sheet.table(&rows(short)),
    }
}

/// What the check of a step found.
fn whole(step: &StepReport) -> String {
    let capability = |refused: &Refused| match &refused.capability {
        Some(name) => format!("refused, {name}; "),
        None => "refused; ".into(),
    };
    let refused = step.refused.as_ref().map(capability).unwrap_or_default();
    let wrong = if step.right { "" } else { "WRONG: " };
    format!("{wrong}{refused}{}", step.checked)
}

/// The same where columns are few. What is wrong is not shortened.
fn short(step: &StepReport) -> String {
    match (&step.refused, step.right) {
        (_, false) => whole(step),
        (Some(_), true) => "refused, see below".into(),
        (None, true) => step.found.clone(),
    }
}

/// Where the time went: the steps are not all of it.
fn times(sheet: &mut Sheet, times: &LifeTimes) {
    sheet.section("time");
    for (name, ns, what) in [
        ("steps", times.steps_ns, ""),
        (
            "devices",
            times.waited_ns,
            "until they have seen what a step changed",
        ),
        (
            "picture",
            times.drawn_ns,
            "noting the leaves after each step",
        ),
        ("freeing", times.freed_ns, ""),
        ("rest", times.rest_ns, "checks, and setting up"),
        ("all", times.wall_ns, ""),
    ] {
        sheet.value(name, &format!("{:>8}  {what}", duration(ns)));
    }
}

fn row(step: &StepReport, found: String) -> [String; 7] {
    [
        step.step.name().into(),
        duration(in_nanoseconds(step.took)),
        count(step.runs),
        bytes(step.bytes),
        count(step.tables),
        count(step.flushes),
        found,
    ]
}

/// What was refused, in the back end's words.
fn refusals(sheet: &mut Sheet, report: &LifeReport) {
    let steps = report.steps.iter();
    let row = |step: &StepReport| {
        let refused = step.refused.as_ref()?;
        let what = format!("{}; {}", refused.error, step.checked);
        Some([step.step.name().into(), what])
    };
    let refused: Vec<[String; 2]> = steps.filter_map(row).collect();
    if !refused.is_empty() {
        sheet.section("refused, and nothing has changed");
        sheet.table(&refused);
    }
}

fn end(sheet: &mut Sheet, report: &LifeReport) {
    let dma = &report.dma;
    sheet.section("devices, all the time");
    sheet.value(
        "DMA",
        &format!(
            "{}: {} read, {} written; {} wrong",
            counted(dma.accesses, "access"),
            bytes(dma.read_bytes),
            bytes(dma.written_bytes),
            counted(dma.wrong_bytes, "byte"),
        ),
    );
    let reached = match dma.reached_in_holes {
        0 => "none got through".into(),
        reached => format!("{} got through", counted(reached, "access")),
    };
    sheet.value(
        "faults",
        &format!(
            "outside the holes: {}; in the holes: {}, {reached}",
            count(dma.faults_outside_holes),
            count(dma.faults_in_holes),
        ),
    );
    sheet.gap();
    let paint = sheet.paint();
    let wrong: Vec<&str> = report
        .steps
        .iter()
        .filter(|step| !step.right)
        .map(|step| step.step.name())
        .collect();
    if report.is_right() {
        let all = "every check held; charge, pins, tables, areas and huge pages are at zero";
        sheet.line(&format!("{}  {all}", paint.good("OK")));
    } else {
        let mut what = wrong.join(", ");
        if !report.left.is_nothing() {
            let left = &report.left;
            what += &format!(
                "; left: {} and {} charged, {} and {} pinned, {}, {}, {}",
                bytes(left.ledger_bytes),
                bytes(left.successor_ledger_bytes),
                bytes(left.kernel.pinned_bytes + left.kernel.locked_bytes),
                bytes(left.successor_kernel.pinned_bytes + left.successor_kernel.locked_bytes),
                counted(left.table_pages, "table page"),
                counted(left.areas, "area"),
                counted(left.huge_pages, "huge page"),
            );
        }
        sheet.line(&format!("{}  {what}", paint.bad("WRONG")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::life::samples::small;

    #[test]
    fn a_life_is_one_screen() {
        let text = write(&small(), Paint::PLAIN);
        assert!(text.lines().count() <= 40, "{text}");
    }

    #[test]
    fn a_step_is_one_line_in_80_columns_and_says_more_in_more() {
        let mut report = small();
        let whole = "out of a leaf of 1 MiB; now 12 leaves";
        for (columns, found) in [(80, "  12 leaves"), (120, whole)] {
            report.steps[1].runs = 1 << 20;
            let text = write(&report, Paint::PLAIN.with_columns(columns));
            let mut lines = text
                .lines()
                .skip_while(|line| !line.starts_with("  cut a hole"));
            let [step, next] = [lines.next(), lines.next()].map(Option::unwrap_or_default);
            assert!(step.ends_with(found) && next.is_empty(), "{text}");
        }
        // What is wrong is said whole.
        report.steps[1].right = false;
        let text = write(&report, Paint::PLAIN);
        assert!(text.contains("WRONG: out of"), "{text}");
    }

    #[test]
    fn what_was_refused_is_named_and_said() {
        let mut report = small();
        report.steps[0].refused = Some(Refused {
            capability: Some("hitless_cut".into()),
            error: "type1 cannot do so".into(),
        });
        let wide = Paint::PLAIN.with_columns(120);
        assert!(
            write(&report, wide).contains("  refused, hitless_cut; one node here"),
            "{text}",
            text = write(&report, wide)
        );
        let text = write(&report, Paint::PLAIN);
        assert!(text.contains("  refused, see below\n"), "{text}");
        let said = "\n  memory  type1 cannot do so; one node here: the second planned\n";
        assert!(text.contains(said), "{text}");
        assert!(text.contains("\nOK  every check held"), "{text}");
    }

    #[test]
    fn what_is_wrong_or_left_is_named() {
        let mut report = small();
        assert!(write(&report, Paint::PLAIN).contains("\nOK  every check held"));
        report.steps[0].right = false;
        report.left.table_pages = 3;
        let text = write(&report, Paint::PLAIN);
        assert!(text.contains("WRONG: one"), "{text}");
        assert!(
            text.contains("\nWRONG  memory; left: 0 B and 0 B charged"),
            "{text}"
        );
        assert!(text.contains("3 table pages"), "{text}");
    }
}
