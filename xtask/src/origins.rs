//! The feature table `docs/origins.md`: the shape of its rows, and that what they name is there. Test programs, rustdoc,
//! Cargo and the committed results of `cargo xtask bench-tables` say what there is.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::{
    cargo::Repository,
    listed::{self, Pages},
    parts::{Outcome, PARTS},
};

pub(crate) const FILE: &str = "docs/origins.md";
const RESULTS: &str = "docs/performance/results.json";

/// The columns.
const HEADER: [&str; 11] = [
    "id",
    "the origin says",
    "library",
    "kernel",
    "simulated",
    "hardware",
    "what is missing",
    "figure there",
    "figure here",
    "our type or function",
    "shown by",
];

/// What a cell of the four columns of states may say.
const STATES: [&str; 4] = ["works", "partly", "not yet", NONE];
const NONE: &str = "–";

/// One row.
pub(crate) struct Row {
    /// Where it stands in the file, from 1.
    pub(crate) line: usize,
    /// Its cells, as many as [`HEADER`] has.
    pub(crate) cells: Vec<String>,
}

impl Row {
    fn id(&self) -> &str {
        &self.cells[0]
    }

    fn states(&self) -> &[String] {
        &self.cells[2..6]
    }
}

/// The part `origins` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let text = fs::read_to_string(repository.root.join(FILE)).context(FILE)?;
    let pages = Pages::read(repository)?;
    let shows = shows(repository)?;
    let (rows, mut faults) = parse(&text);
    for row in &rows {
        let found = faults_of(row, &|item| pages.has(item), &shows);
        let found = found.into_iter();
        faults.extend(found.map(|fault| format!("line {}: {}: {fault}", row.line, row.id())));
    }
    if !faults.is_empty() {
        let (count, faults) = (faults.len(), faults.join("\n  "));
        bail!("{FILE} (faults: {count})\n  {faults}");
    }
    for (at, column) in HEADER.iter().enumerate().skip(2).take(4) {
        let count = |state| rows.iter().filter(|row| row.cells[at] == state).count();
        let counts = STATES.map(|state| format!("{state} {}", count(state)));
        println!("{column}: {}", counts.join(", "));
    }
    Ok(Outcome::Passed)
}

/// All that the last column may name.
fn shows(repository: &Repository) -> anyhow::Result<BTreeSet<String>> {
    let mut shows = listed::tests(repository)?;
    let benches = listed::benches(repository).into_iter();
    shows.extend(benches.map(|bench| format!("bench:{bench}")));
    shows.extend(PARTS.iter().map(|part| format!("part:{}", part.name)));
    let results = fs::read(repository.root.join(RESULTS)).context(RESULTS)?;
    let results: Value = serde_json::from_slice(&results).context(RESULTS)?;
    let rows = results["rows"].as_array().into_iter().flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    shows.extend(rows.map(|row| format!("row:{}/{}", text(&row["row"]), text(&row["format"]))));
    Ok(shows)
}

/// Reads all rows; what is wrong with the shape comes back as sentences. Ids run `O1-01`, `O1-02`, … without
/// a gap, so that a row cannot vanish unseen.
pub(crate) fn parse(text: &str) -> (Vec<Row>, Vec<String>) {
    let (mut rows, mut faults) = (Vec::<Row>::new(), Vec::new());
    for (line, text) in (1..).zip(text.lines()) {
        let Some(inner) = text
            .strip_prefix("| O")
            .and_then(|_| text.strip_suffix('|'))
        else {
            continue;
        };
        let cells: Vec<_> = inner[1..].split('|').map(|c| c.trim().to_owned()).collect();
        let last = rows.last().map_or("O0-00", Row::id);
        let [id, ..] = cells.as_slice() else { continue };
        if cells.len() != HEADER.len() || cells.iter().any(String::is_empty) {
            let (found, wanted) = (cells.len(), HEADER.len());
            faults.push(format!(
                "line {line}: {id}: {found} cells, of which none may be empty, instead of {wanted}"
            ));
        }
        let (before, number) = last.split_at(3);
        let number = number.parse().unwrap_or(0) + 1;
        let origin = before[1..2].parse().unwrap_or(0) + 1;
        let next = [format!("{before}{number:02}"), format!("O{origin}-01")];
        if !next.contains(id) {
            faults.push(format!("line {line}: {id} follows {last}"));
        }
        if cells.len() == HEADER.len() {
            rows.push(Row { line, cells });
        }
    }
    if rows.last().is_none_or(|row| !row.id().starts_with("O5-")) {
        faults.push("there are not five origins".into());
    }
    (rows, faults)
}

/// What a row claims and there is not, a sentence each.
fn faults_of(row: &Row, has_item: &dyn Fn(&str) -> bool, shows: &BTreeSet<String>) -> Vec<String> {
    let mut faults = Vec::new();
    let has = |state| row.states().iter().any(|cell| cell == state);
    for state in row.states() {
        if !STATES.contains(&state.as_str()) {
            faults.push(format!("the state `{state}` is none of {STATES:?}"));
        }
    }
    let (items, tests) = (names(&row.cells[9]), names(&row.cells[10]));
    if has("partly") && row.cells[6] == NONE {
        faults.push("is partly there, and does not say what is missing".into());
    }
    if (has("works") || has("partly")) && tests.is_empty() {
        faults.push("names nothing that shows it".into());
    }
    let items = items.into_iter().filter(|item| !has_item(item));
    faults.extend(items.map(|item| format!("there is no public item `{item}`")));
    let tests = tests
        .into_iter()
        .filter(|test| !shows.contains(&in_list(test)));
    faults.extend(tests.map(|test| format!("there is no `{test}`, or it is ignored")));
    faults
}

/// What stands in backticks.
fn names(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
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

    /// A row of this id with these items, tests, state of the library, and what is missing.
    fn row(id: &str, item: &str, test: &str, state: &str, missing: &str) -> String {
        format!("| {id} | a | {state} | not yet | – | – | {missing} | – | – | {item} | {test} |\n")
    }

    #[test]
    fn a_row_of_the_wrong_shape_fails() {
        let good = |id: &str| row(id, "–", "–", "not yet", "–");
        let first = (1..=5).map(|origin| good(&format!("O{origin}-01")));
        let first = first.collect::<String>();
        assert_eq!(parse(&first).1, [""; 0]);
        let more = first + &good("O5-02");
        assert_eq!(parse(&more).0.len(), 6);
        for (bad, fault) in [
            (
                more.replace("O5-02", "O5-03"),
                "line 6: O5-03 follows O5-01",
            ),
            (
                more.replace("O5-02", "O5-01"),
                "line 6: O5-01 follows O5-01",
            ),
            (
                more.replace("O3-01", "O4-01"),
                "line 3: O4-01 follows O2-01",
            ),
            (more.replace("O5-0", "O4-0"), "there are not five origins"),
            (
                more.replace("O1-01 | a", "O1-01"),
                "line 1: O1-01: 10 cells",
            ),
            (
                more.replace("O1-01 | a", "O1-01 | "),
                "line 1: O1-01: 11 cells",
            ),
        ] {
            let faults = parse(&bad).1;
            assert!(faults.iter().any(|it| it.starts_with(fault)), "{faults:?}");
        }
    }

    #[test]
    fn what_a_row_names_must_be_there() {
        let shows = ["a::t::name", "part:units"].map(str::to_owned).into();
        let of = |item: &str, test: &str, state: &str, missing: &str| {
            let row = parse(&row("O1-01", item, test, state, missing)).0.remove(0);
            faults_of(&row, &|item| item == "a::Item", &shows)
        };
        let test = "`a/tests/t/main.rs::name`, `part:units`";
        assert_eq!(of("`a::Item`", test, "works", "–"), [""; 0]);
        for (item, test, state, missing) in [
            ("`a::Absent`", test, "works", "–"),
            ("–", "–", "works", "–"),
            ("–", test, "done", "–"),
            ("–", test, "partly", "–"),
            ("–", "`a/tests/t.rs::absent`", "works", "–"),
            ("–", "`part:absent`", "works", "–"),
        ] {
            let found = of(item, test, state, missing);
            assert_eq!(found.len(), 1, "{item} {test} {state}: {found:?}");
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
