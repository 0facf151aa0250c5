//! The feature table `docs/origins.md`: the shape of its rows, and that what `docs/origins.txt` names for each is there.
//! Test programs, rustdoc and Cargo say what there is.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, bail};

use crate::{
    cargo::Repository,
    listed::{self, Pages},
    parts::{Outcome, PARTS},
};

pub(crate) const FILE: &str = "docs/origins.md";
const EVIDENCE: &str = "docs/origins.txt";

/// All columns in their order, and which of them every table has.
const COLUMNS: [(&str, bool); 8] = [
    ("id", true),
    ("the origin says", true),
    (STATE[0], true),
    (STATE[1], false),
    (STATE[2], false),
    ("there", false),
    ("here", false),
    ("what is missing", true),
];

/// The columns of states, and what a cell of them may say.
const STATE: [&str; 3] = ["library", "kernel", "simulated"];
const STATES: [&str; 4] = ["works", "partly", "not yet", NONE];
const NONE: &str = "–";

/// One row.
#[derive(Clone)]
pub(crate) struct Row {
    /// Where it stands in the file, from 1.
    pub(crate) line: usize,
    /// Column and text of each cell.
    cells: Vec<(&'static str, String)>,
}

impl Row {
    pub(crate) fn id(&self) -> &str {
        self.cell("id")
    }

    /// A dash where its table has no such column.
    fn cell(&self, column: &str) -> &str {
        let cell = self.cells.iter().find(|(name, _)| *name == column);
        cell.map_or(NONE, |(_, text)| text)
    }
}

/// What implements a row, and what shows it.
#[derive(Default)]
struct Evidence {
    id: String,
    items: Vec<String>,
    tests: Vec<String>,
}

/// The part `origins` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let text = fs::read_to_string(repository.root.join(FILE)).context(FILE)?;
    let pages = Pages::read(repository)?;
    let shows = shows(repository)?;
    let (rows, mut faults) = parse(&text);
    let text = fs::read_to_string(repository.root.join(EVIDENCE)).context(EVIDENCE)?;
    let (evidence, more) = evidence(&text);
    faults.extend(more);
    faults.extend(unmatched(&rows, &evidence));
    for row in &rows {
        let Some(evidence) = evidence.iter().find(|its| its.id == row.id()) else {
            continue;
        };
        let found = faults_of(row, evidence, &|item| pages.has(item), &shows);
        let found = found.into_iter();
        faults.extend(found.map(|fault| format!("line {}: {}: {fault}", row.line, row.id())));
    }
    if !faults.is_empty() {
        let (count, faults) = (faults.len(), faults.join("\n  "));
        bail!("{FILE} (faults: {count})\n  {faults}");
    }
    for column in STATE {
        let count = |state| rows.iter().filter(|row| row.cell(column) == state).count();
        let counts = STATES.map(|state| format!("{state} {}", count(state)));
        println!("{column}: {}", counts.join(", "));
    }
    Ok(Outcome::Passed)
}

/// All tests that a row may name.
fn shows(repository: &Repository) -> anyhow::Result<BTreeSet<String>> {
    let mut shows = listed::tests(repository)?;
    let benches = listed::benches(repository).into_iter();
    shows.extend(benches.map(|bench| format!("bench:{bench}")));
    shows.extend(PARTS.iter().map(|part| format!("part:{}", part.name)));
    Ok(shows)
}

/// Reads all rows; what is wrong with the shape comes back as sentences. Each origin has one or more tables, in which ids
/// ascend; together they have `O1-01`, `O1-02`, … without a gap, so that a row cannot vanish unseen.
pub(crate) fn parse(text: &str) -> (Vec<Row>, Vec<String>) {
    let (mut rows, mut faults) = (Vec::<Row>::new(), Vec::new());
    let mut columns = Vec::new();
    let mut last = String::new();
    for (line, text) in (1..).zip(text.lines()) {
        let inner = text.strip_prefix("| ").and_then(|it| it.strip_suffix('|'));
        let Some(inner) = inner else { continue };
        let cells: Vec<_> = inner.split('|').map(str::trim).collect();
        if cells[0] == "id" {
            let known = COLUMNS.iter().filter(|(name, _)| cells.contains(name));
            columns = known.map(|(name, _)| *name).collect();
            let lacks = |(name, always): &(&str, bool)| *always && !columns.contains(name);
            if columns != cells || COLUMNS.iter().any(lacks) {
                faults.push(format!("line {line}: columns must be some of {COLUMNS:?}"));
            }
            last.clear();
            continue;
        }
        let id = cells[0];
        if !id.starts_with('O') {
            continue;
        }
        let (last_cell, others) = cells.split_last().unwrap_or((&"", &[]));
        if cells.len() != columns.len() || others.contains(&"") || *last_cell == NONE {
            let (found, wanted) = (cells.len(), columns.len());
            faults.push(format!(
                "line {line}: {id}: {found} cells, of which only the last may be empty, and that is no dash, instead of {wanted}"
            ));
            continue;
        }
        if !last.is_empty() && (id <= last.as_str() || id[..3] != last[..3]) {
            faults.push(format!("line {line}: {id} follows {last}"));
        }
        id.clone_into(&mut last);
        let cells = cells.into_iter().map(str::to_owned);
        let cells = columns.iter().copied().zip(cells).collect();
        rows.push(Row { line, cells });
    }
    let ids: BTreeSet<_> = rows.iter().map(Row::id).collect();
    if ids.len() != rows.len() {
        faults.push("an id stands twice".into());
    }
    let mut before = "O0-00";
    for id in ids {
        let (origin, number) = before.split_at(3);
        let number = number.parse().unwrap_or(0) + 1;
        let next = origin[1..2].parse().unwrap_or(0) + 1;
        if id != format!("{origin}{number:02}") && id != format!("O{next}-01") {
            faults.push(format!("{id} comes after {before}, of all ids"));
        }
        before = id;
    }
    if !before.starts_with("O5-") {
        faults.push("there are not five origins".into());
    }
    (rows, faults)
}

/// Reads what stands below each id: `item`, `command` or `test`, one a line.
fn evidence(text: &str) -> (Vec<Evidence>, Vec<String>) {
    let (mut all, mut faults) = (Vec::<Evidence>::new(), Vec::new());
    for (line, text) in (1..).zip(text.lines()).filter(|it| !it.1.starts_with('#')) {
        let inner = text.strip_prefix("    ").and_then(|it| it.split_once(' '));
        match (inner, all.last_mut()) {
            (Some(("item", name)), Some(its)) => its.items.push(name.to_owned()),
            (Some(("test", name)), Some(its)) => its.tests.push(name.to_owned()),
            (Some(("command", _)), Some(_)) => {}
            (None, _) if text.starts_with('O') => all.push(Evidence {
                id: text.to_owned(),
                ..Evidence::default()
            }),
            _ => faults.push(format!(
                "{EVIDENCE}: line {line} is neither id, item, command nor test"
            )),
        }
    }
    (all, faults)
}

/// Ids that only one of the two files has, or that are not in order in the second.
fn unmatched(rows: &[Row], evidence: &[Evidence]) -> Vec<String> {
    let ids: BTreeSet<_> = rows.iter().map(Row::id).collect();
    let named: Vec<_> = evidence.iter().map(|its| its.id.as_str()).collect();
    let mut faults = Vec::new();
    if !named.is_sorted_by(|a, b| a < b) {
        faults.push(format!("{EVIDENCE}: ids must ascend"));
    }
    let named = named.into_iter().collect();
    let differ = ids.symmetric_difference(&named);
    faults.extend(differ.map(|id| format!("{id} is not in both {FILE} and {EVIDENCE}")));
    faults
}

/// What a row claims and there is not, a sentence each.
fn faults_of(
    row: &Row,
    evidence: &Evidence,
    has_item: &dyn Fn(&str) -> bool,
    shows: &BTreeSet<String>,
) -> Vec<String> {
    let mut faults = Vec::new();
    let states = STATE.map(|column| row.cell(column));
    for state in states {
        if !STATES.contains(&state) {
            faults.push(format!("the state `{state}` is none of {STATES:?}"));
        }
    }
    if states.contains(&"partly") && row.cell("what is missing").is_empty() {
        faults.push("is partly there, and does not say what is missing".into());
    }
    if (states.contains(&"works") || states.contains(&"partly")) && evidence.tests.is_empty() {
        faults.push("names nothing that shows it".into());
    }
    let items = evidence.items.iter().filter(|item| !has_item(item));
    faults.extend(items.map(|item| format!("there is no public item `{item}`")));
    let tests = evidence.tests.iter();
    let tests = tests.filter(|test| !shows.contains(&in_list(test)));
    faults.extend(tests.map(|test| format!("there is no `{test}`, or it is ignored")));
    faults
}

/// `iopt/tests/readers/image/mod.rs::name` as [`listed::tests`] has it: `iopt::readers::image::name`.
fn in_list(test: &str) -> String {
    let Some((file, path)) = test.split_once(".rs::") else {
        return test.to_owned();
    };
    let module = file.trim_end_matches("/mod").trim_end_matches("/main");
    let module = module.replacen("/tests/", "::", 1).replace('/', "::");
    format!("{module}::{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "| id | the origin says | library | simulated | what is missing |\n";

    /// A row of this id, state of the library, and what is missing.
    fn row(id: &str, state: &str, missing: &str) -> String {
        format!("| {id} | a | {state} | – | {missing} |\n")
    }

    #[test]
    fn a_row_of_the_wrong_shape_fails() {
        let first = (1..=5).map(|origin| row(&format!("O{origin}-01"), "not yet", ""));
        let tables: String = first.map(|row| HEADER.to_owned() + &row).collect();
        assert_eq!(parse(&tables).1, [""; 0]);
        let more = tables + &row("O5-02", "not yet", "");
        assert_eq!((parse(&more).0.len(), parse(&more).1), (6, vec![]));
        let apart = more.replace("| O5-02", &format!("{HEADER}| O5-02"));
        assert_eq!(parse(&apart).1, [""; 0]);
        for (bad, fault) in [
            (more.replace("O5-02", "O5-03"), "O5-03 comes after O5-01"),
            (
                more.replace("O5-02", "O5-01"),
                "line 11: O5-01 follows O5-01",
            ),
            (apart.replace("O5-02", "O5-01"), "an id stands twice"),
            (
                more.replace("O5-02", "O6-01"),
                "line 11: O6-01 follows O5-01",
            ),
            (more.replace("O3-01", "O4-01"), "an id stands twice"),
            (more.replace("O5-0", "O4-0"), "there are not five origins"),
            (more.replace("O1-01 | a", "O1-01"), "line 2: O1-01: 4 cells"),
            (
                more.replace("O1-01 | a", "O1-01 | "),
                "line 2: O1-01: 5 cells",
            ),
            (more.replace("simulated", "else"), "line 1: columns"),
            (more.replace(" library |", ""), "line 1: columns"),
        ] {
            let faults = parse(&bad).1;
            assert!(faults.iter().any(|it| it.starts_with(fault)), "{faults:?}");
        }
    }

    #[test]
    fn evidence_and_rows_have_the_same_ids() {
        let rows = parse(&(HEADER.to_owned() + &row("O1-01", "not yet", ""))).0;
        let faults = |text| {
            let (all, faults) = evidence(text);
            (faults.len(), unmatched(&rows, &all).len())
        };
        let good = "# c\nO1-01\n    item a::Item\n    command a b\n    test part:a\n";
        assert_eq!(faults(good), (0, 0));
        assert_eq!(faults("O1-01\n    bench a\n"), (1, 0));
        assert_eq!(faults("    item a\nO1-01\n"), (1, 0));
        assert_eq!(faults(""), (0, 1));
        assert_eq!(faults("O1-01\nO1-02\n"), (0, 1));
        assert_eq!(faults("O1-01\nO1-01\n"), (0, 1));
    }

    #[test]
    fn what_a_row_names_must_be_there() {
        let shows = ["a::t::name", "part:units"].map(str::to_owned).into();
        let of = |named: &str, state: &str, missing: &str| {
            let row = parse(&(HEADER.to_owned() + &row("O1-01", state, missing)))
                .0
                .remove(0);
            let its = evidence(&format!("O1-01\n{named}")).0.remove(0);
            faults_of(&row, &its, &|item| item == "a::Item", &shows)
        };
        let tests = "    test a/tests/t/main.rs::name\n    test part:units\n";
        let good = format!("    item a::Item\n{tests}");
        assert_eq!(of(&good, "works", ""), [""; 0]);
        for (named, state, missing) in [
            (&*format!("    item a::Absent\n{tests}"), "works", ""),
            ("", "works", ""),
            (tests, "done", ""),
            (tests, "partly", ""),
            ("    test a/tests/t.rs::absent\n", "works", ""),
            ("    test part:absent\n", "works", ""),
        ] {
            let found = of(named, state, missing);
            assert_eq!(found.len(), 1, "{named} {state}: {found:?}");
        }
    }

    #[test]
    fn a_file_of_a_test_is_its_module() {
        let inside = "a::t::deep::m::name";
        assert_eq!(in_list("a/tests/t/deep.rs::m::name"), inside);
        assert_eq!(in_list("a/tests/t/deep/mod.rs::m::name"), inside);
        assert_eq!(in_list("a::t::deep::m::name"), inside);
    }
}
