//! Tables as text: a tree, a walk, findings, differences; and as a picture.

use std::collections::BTreeSet;
use std::path::Path;

use crate::tables::fields::Field;
use crate::tables::{
    Change, DiffReport, Explained, Finding, LeafReport, Outcome, Reached, Severity, Step, Survey,
    TreeLine,
};

use super::image::Built;
use super::picture;
use crate::draw::sheet::{Paint, Sheet};
use crate::size::{bytes, count, counted, percent};

/// More findings, or changes, are only counted.
const MOST_LINES: usize = 100;

/// Report about a written image, with a command that reads it.
pub(crate) fn image(file: &Path, built: &Built, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    let Built {
        image,
        root,
        tables,
        first,
    } = built;
    sheet.section("image");
    sheet.value(
        "file",
        &format!("{}, {}", file.display(), bytes(image.len() as u64)),
    );
    let levels = counted(root.levels.into(), "level");
    let (format, address) = (root.format.name(), root.address);
    sheet.value("tables", &format!("{}, {format}, {levels}", count(*tables)));
    sheet.value("root", &format!("{address:#x}"));
    let next = format!("dmaspace tables walk {} {first:#x}", file.display());
    sheet.value("try", &next);
    sheet.into_text()
}

/// The tree, with `lines` lines of it.
pub(crate) fn dump(found: &Survey, lines: usize, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    totals(&mut sheet, found);
    sheet.section("tree");
    if found.tree.is_empty() {
        sheet.line("  nothing is mapped");
    }
    for line in found.tree.iter().take(lines) {
        sheet.line(&tree_line(line, paint));
    }
    if found.tree.len() > lines {
        let more = counted((found.tree.len() - lines) as u64, "line");
        sheet.line(&format!("  … {more} more (--lines {})", found.tree.len()));
    }
    if found.finding_count > 0 {
        findings(&mut sheet, found);
    }
    sheet.into_text()
}

/// Report of findings.
pub(crate) fn check(found: &Survey, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    totals(&mut sheet, found);
    findings(&mut sheet, found);
    sheet.into_text()
}

/// The picture of one survey, or of several under their names.
pub(crate) fn picture(found: &[(String, Survey)]) -> String {
    let tables = |found: &Survey| {
        let tables = found.levels.iter().map(|level| level.tables).sum();
        counted(tables, "table")
    };
    if let [(_, found)] = found {
        let leaves: u64 = found.leaves.iter().map(|leaf| leaf.count).sum();
        let title = format!(
            "{} in {} tables: {}, {}",
            bytes(found.mapped_bytes),
            found.root.format,
            counted(found.run_count, "run"),
            counted(leaves, "leaf"),
        );
        let subtitle = format!(
            "{}, {}, root at {:#x}",
            tables(found),
            bytes(found.waste.all_bytes),
            found.root.address
        );
        return picture::picture(&title, &subtitle, &[(String::new(), &found.layout)]);
    }
    let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
    let formats: BTreeSet<_> = found
        .iter()
        .map(|(_, found)| found.root.format.as_str())
        .collect();
    let formats: Vec<_> = formats.into_iter().collect();
    let spaces: Vec<_> = found
        .iter()
        .map(|(name, found)| {
            (
                format!("{name}, {}", tables(found)),
                found.layout.as_slice(),
            )
        })
        .collect();
    picture::picture(&names.join(" → "), &formats.join(", "), &spaces)
}

fn totals(sheet: &mut Sheet, found: &Survey) {
    let root = &found.root;
    sheet.section("tables");
    sheet.value("format", &root.format);
    sheet.value(
        "root",
        &format!(
            "{:#x}, {}, {}",
            root.address,
            counted(root.levels.into(), "level"),
            root.aperture
        ),
    );
    sheet.value(
        "mapped",
        &format!(
            "{} in {}",
            bytes(found.mapped_bytes),
            counted(found.run_count, "run")
        ),
    );
    if !found.complete {
        sheet.value(
            "read",
            "not all: there are more tables than are read, and all counts are of a part",
        );
    }
    leaves(sheet, &found.leaves);
    sheet.section("levels");
    for level in &found.levels {
        sheet.value(
            &format!("level {}", level.level),
            &format!(
                "{} of {}, {} of {} entries present ({})",
                counted(level.tables, "table"),
                bytes(level.bytes.checked_div(level.tables).unwrap_or(0)),
                count(level.present),
                count(level.entries),
                percent(level.present, level.entries),
            ),
        );
    }
    waste(sheet, found);
}

fn leaves(sheet: &mut Sheet, leaves: &[LeafReport]) {
    for (nth, leaf) in leaves.iter().rev().enumerate() {
        let name = if nth == 0 { "leaves" } else { "" };
        let (number, size) = (count(leaf.count), bytes(leaf.page_bytes));
        sheet.value(name, &format!("{number} × {size} = {}", bytes(leaf.bytes)));
    }
}

fn waste(sheet: &mut Sheet, found: &Survey) {
    let waste = &found.waste;
    sheet.section("table memory");
    sheet.value("all", &bytes(waste.all_bytes));
    if waste.mergeable_tables > 0 {
        sheet.value(
            "mergeable",
            &format!(
                "{} ({}): {} whose leaves could be one larger leaf each",
                bytes(waste.mergeable_bytes),
                percent(waste.mergeable_bytes, waste.all_bytes),
                counted(waste.mergeable_tables, "table"),
            ),
        );
    }
    if waste.empty_tables > 0 {
        sheet.value(
            "empty",
            &format!(
                "{} in {}",
                bytes(waste.empty_bytes),
                counted(waste.empty_tables, "table")
            ),
        );
    }
    if let Some(unlinked @ 1..) = waste.unlinked_tables {
        sheet.value("unlinked", &counted(unlinked, "table"));
    }
    if waste.mergeable_tables + waste.empty_tables == 0 {
        sheet.value("wasted", "nothing");
    }
}

fn tree_line(line: &TreeLine, paint: Paint) -> String {
    match line {
        TreeLine::Tables {
            depth,
            index,
            count: number,
            iova,
            bytes: length,
            address,
            level,
        } => {
            let what = match number {
                1 => format!("table at {address:#x}, level {level}"),
                many => format!(
                    "{} tables from {address:#x} on, level {level}",
                    count(*many)
                ),
            };
            let places = places(*index, *number);
            indent(
                *depth,
                &format!("{places} {iova:#x} + {}: {what}", bytes(*length)),
            )
        }
        TreeLine::Leaves {
            depth,
            index,
            count: entries,
            iova,
            pa,
            bytes: length,
            page_bytes,
            prot,
        } => {
            let leaves = length.checked_div(*page_bytes).unwrap_or(0);
            let what = match leaves {
                0 => format!("a part of {}", bytes(*page_bytes)),
                leaves => format!("{} × {}", count(leaves), bytes(*page_bytes)),
            };
            let places = places(*index, *entries);
            indent(
                *depth,
                &format!(
                    "{places} {iova:#x} + {} → {pa:#x}  {what}  {prot}",
                    bytes(*length)
                ),
            )
        }
        TreeLine::Fault {
            depth,
            index,
            iova,
            word,
            text,
        } => {
            let places = places(*index, 1);
            indent(
                *depth,
                &format!("{places} {iova:#x}: {} {word:#x} {text}", paint.bad("✗")),
            )
        }
    }
}

fn places(index: u32, number: u64) -> String {
    match number {
        1 => format!("[{index}]"),
        many => format!("[{index}..{}]", u64::from(index) + many - 1),
    }
}

fn indent(depth: usize, text: &str) -> String {
    format!("{:1$}{text}", "", 2 + 2 * depth)
}

fn findings(sheet: &mut Sheet, found: &Survey) {
    sheet.section("findings");
    if found.finding_count == 0 {
        let (paint, mark) = (sheet.paint(), "✓");
        sheet.marked("check", |text| paint.good(text), mark, "nothing is wrong");
        return;
    }
    for finding in found.findings.iter().take(MOST_LINES) {
        one_finding(sheet, finding);
    }
    let shown = found.findings.len().min(MOST_LINES) as u64;
    if found.finding_count > shown {
        sheet.line(&format!("  … {} more", count(found.finding_count - shown)));
    }
}

fn one_finding(sheet: &mut Sheet, finding: &Finding) {
    let paint = sheet.paint();
    let Finding {
        iova,
        table,
        level,
        index,
        word,
        text,
        ..
    } = finding;
    let text =
        format!("entry {index} of the table at {table:#x} (level {level}), {word:#x}: {text}");
    let name = format!("{iova:#x}");
    match finding.severity {
        Severity::Wrong => sheet.marked(&name, |mark| paint.bad(mark), "✗", &text),
        Severity::Note => sheet.marked(&name, |mark| paint.warning(mark), "!", &text),
    }
}

/// One walk.
pub(crate) fn walk(found: &Explained, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    for step in &found.steps {
        one_step(&mut sheet, step);
    }
    sheet.section(&format!("{:#x}", found.iova));
    if found.steps.is_empty() {
        sheet.value("walk", "no entry is read");
    }
    outcome(&mut sheet, "read", &found.read);
    outcome(&mut sheet, "write", &found.write);
    sheet.into_text()
}

fn one_step(sheet: &mut Sheet, step: &Step) {
    let Step {
        level,
        table,
        index,
        address,
        word,
        fields,
    } = step;
    sheet.section(&format!(
        "level {level}: entry {index} of the table at {table:#x}"
    ));
    if fields.is_empty() {
        sheet.value("entry", &format!("at {address:#x}: there is no memory"));
        return;
    }
    sheet.value("entry", &format!("{word:#018x} at {address:#x}"));
    let source = fields.first().map_or("", |field| field.source);
    sheet.value("source", source);
    // Fields that the unit ignores and that are 0 are of no interest.
    let idle = |field: &&Field| field.value == 0 && matches!(field.name, "ignored" | "reserved");
    let rows = fields.iter().filter(|field| !idle(field)).map(|field| {
        let place = match (field.high, field.low) {
            (high, low) if high == low => format!("{high}"),
            (high, low) => format!("{high}:{low}"),
        };
        let mark = match field.wrong {
            true => format!(" {}", sheet.paint().bad("✗")),
            false => String::new(),
        };
        [
            format!("{place:<10}"),
            format!("{:<13}", field.name),
            format!("{:#x}{mark}", field.value),
            field.meaning.clone(),
        ]
    });
    let rows: Vec<_> = rows.collect();
    sheet.table(&rows);
}

fn outcome(sheet: &mut Sheet, access: &str, outcome: &Outcome) {
    let paint = sheet.paint();
    match outcome {
        Outcome::Translated {
            pa,
            page_iova,
            page_pa,
            page_bytes,
            prot,
        } => {
            let text = format!(
                "goes to {pa:#x}: {page_iova:#x} → {page_pa:#x}, {}, {prot}",
                bytes(*page_bytes)
            );
            sheet.marked(access, |mark| paint.good(mark), "✓", &text);
        }
        Outcome::Faults { reason, event, .. } => {
            let mut text = format!("faults: {reason}");
            if let Some(event) = event {
                text += &format!("; the unit reports {} ({})", event.name, event.source);
            }
            sheet.marked(access, |mark| paint.bad(mark), "✗", &text);
        }
    }
}

/// Report of differences between two tables.
pub(crate) fn diff(found: &DiffReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    sheet.section("difference");
    let (before, after) = &found.formats;
    sheet.value("formats", &format!("{before}, {after}"));
    sheet.value("same", &bytes(found.same_bytes));
    sheet.value("removed", &bytes(found.removed_bytes));
    sheet.value("added", &bytes(found.added_bytes));
    sheet.value("changed", &bytes(found.changed_bytes));
    if found.leaves.0 != found.leaves.1 {
        sheet.section("leaves before");
        leaves(&mut sheet, &found.leaves.0);
        sheet.section("leaves after");
        leaves(&mut sheet, &found.leaves.1);
    }
    if !found.complete {
        sheet.value("read", "not all: differences may be missing, or be none");
    }
    if !found.changes.is_empty() {
        sheet.section("changes");
    }
    for change in found.changes.iter().take(MOST_LINES) {
        sheet.line(&one_change(change));
    }
    if found.changes.len() > MOST_LINES {
        let more = (found.changes.len() - MOST_LINES) as u64;
        sheet.line(&format!("  … {} more", count(more)));
    }
    sheet.into_text()
}

fn one_change(change: &Change) -> String {
    let side = |side: &Option<Reached>| match side {
        Some(Reached { pa, prot }) => format!("{pa:#x} {prot}"),
        None => "nothing".into(),
    };
    format!(
        "  {:#x} + {}: {} → {}",
        change.iova,
        bytes(change.bytes),
        side(&change.before),
        side(&change.after)
    )
}
