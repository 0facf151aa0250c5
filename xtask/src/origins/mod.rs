//! The feature table `docs/origins.md` against the sources.
//!
//! The shape of every row is checked ([`table`]). What a row in the state "works" or "partly"
//! names must exist: the items in the public sources, the tests as tests that run ([`sources`]
//! reads them, [`names`] looks them up).

use std::fs;

use anyhow::{Context as _, bail};

use crate::{cargo::Repository, parts::Outcome};

mod names;
mod sources;
mod table;
mod tokens;

use sources::Workspace;
use table::{Row, State};

const FILE: &str = "docs/origins.md";

/// The part `origins` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let text = fs::read_to_string(repository.root.join(FILE))
        .with_context(|| format!("{FILE} cannot be read"))?;
    let workspace = Workspace::read(&repository.metadata)?;
    let (rows, mut faults) = table::parse(&text);
    faults.extend(rows.iter().flat_map(|row| unkept(row, &workspace)));
    if !faults.is_empty() {
        bail!(
            "{FILE} (faults: {})\n  {}",
            faults.len(),
            faults.join("\n  ")
        );
    }
    let count = |state| rows.iter().filter(|row| row.state == state).count();
    println!(
        "{} rows: {} works, {} partly, {} not yet",
        rows.len(),
        count(State::Works),
        count(State::Partly),
        count(State::NotYet)
    );
    Ok(Outcome::Passed)
}

/// What a row claims and the sources do not have, a sentence each.
fn unkept(row: &Row, workspace: &Workspace) -> Vec<String> {
    if row.state == State::NotYet {
        return Vec::new();
    }
    let mut faults = Vec::new();
    let state = row.state.name();
    if row.items.is_empty() {
        faults.push(format!(
            "is marked \"{state}\" and names no type or function"
        ));
    }
    if row.tests.is_empty() {
        faults.push(format!("is marked \"{state}\" and names no test"));
    }
    faults.extend(
        row.items
            .iter()
            .filter_map(|item| names::item(workspace, item).err()),
    );
    faults.extend(
        row.tests
            .iter()
            .filter_map(|test| names::test(workspace, test).err()),
    );
    faults
        .into_iter()
        .map(|fault| format!("line {}: {}: {fault}", row.line, row.id))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(state: State, items: &[&str], tests: &[&str]) -> Row {
        let own = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Row {
            line: 7,
            id: "O1-01".into(),
            items: own(items),
            tests: own(tests),
            state,
        }
    }

    const TEST: &str = "xtask::origins::tests::a_row_that_is_not_kept_is_named";

    /// The real workspace: this very test stands in for the tests that rows name.
    #[test]
    fn a_row_that_is_not_kept_is_named() {
        let repository = Repository::find().unwrap();
        let workspace = Workspace::read(&repository.metadata).unwrap();
        let faults = |row: &Row| unkept(row, &workspace);

        let kept = ["runs::Span", "runs::PageSizes::step", "runs::bitmap::set"];
        assert_eq!(
            faults(&row(State::Works, &kept, &[TEST])),
            Vec::<String>::new()
        );
        assert_eq!(
            faults(&row(State::Works, &["runs::Absent"], &[TEST])),
            ["line 7: O1-01: there is no public item `runs::Absent`"]
        );
        assert_eq!(
            faults(&row(
                State::Partly,
                &["runs::Span"],
                &["runs::span::tests::absent"]
            )),
            ["line 7: O1-01: there is no test `runs::span::tests::absent`"]
        );
        assert_eq!(faults(&row(State::Works, &[], &[])).len(), 2);
        assert_eq!(
            faults(&row(State::NotYet, &["runs::Absent"], &["x"])),
            Vec::<String>::new()
        );
    }
}
