//! A start: times today and with each change, and the changes.

use crate::draw::sheet::Sheet;
use crate::inspect::{Advice, Estimate, StartReport};
use crate::size::{bytes, count, counted, duration};

pub(super) fn start(sheet: &mut Sheet, found: &StartReport, size: u64, advice: &[Advice]) {
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

pub(super) fn advice(sheet: &mut Sheet, others: &[Advice]) {
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
