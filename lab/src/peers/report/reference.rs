//! The reference format: every row, everybody, and how far the samples spread.

use std::fmt::{Result, Write as _};

use super::summary::aims;
use super::{Shown, Standing, figure};
use crate::peers::field::{CONTESTS, Who};
use crate::peers::results::{Entry, Results};
use crate::peers::rows::ROWS;

pub(super) fn write(text: &mut String, results: &Results) -> Result {
    let Some(contest) = CONTESTS.iter().find(|contest| contest.reference) else {
        return Ok(());
    };
    let rows: Vec<Shown<'_>> = ROWS
        .iter()
        .filter_map(|row| Shown::find(results, row, contest.id))
        .collect();
    writeln!(
        text,
        "## {}, with spread\n\n\
         The median, then in brackets the quartiles around it and the lowest sample. Of each of \
         Linux's tables the fastest compiler's code is shown; it is queued where nothing is noted leaf \
         by leaf that is to be flushed, as in lazy domains. The other formats are in \
         [results.json](performance/results.json).\n\n\
         | operation | aim | exclusive | | shared | | without `std`, exclusive; shared | limit | others |\n\
         |---|---|---:|---|---:|---|---:|---:|---|",
        contest.title,
    )?;
    for shown in rows {
        let aims = aims(shown.row);
        let others: Vec<String> = others(&shown)
            .into_iter()
            .map(|entry| format!("{} {}", entry.name, spread(&shown, Some(entry))))
            .collect();
        let without_std =
            [Who::Scalar, Who::ScalarShared].map(|who| spread(&shown, shown.best(who)));
        let words = |who| shown.standing(who).map_or("", Standing::words);
        writeln!(
            text,
            "| {} | {aims} | {} | {} | {} | {} | {} | {} | {} |",
            shown.title(),
            spread(&shown, shown.best(Who::Exclusive)),
            words(Who::Exclusive),
            spread(&shown, shown.best(Who::Shared)),
            words(Who::Shared),
            without_std.join("; "),
            spread(&shown, shown.best(Who::Limit)),
            others.join("; ")
        )?;
    }
    writeln!(text)
}

/// Everybody who has no column; of Linux's tables, each by its fastest compiler.
fn others<'a>(shown: &Shown<'a>) -> Vec<&'a Entry> {
    let mut all: Vec<&Entry> = Vec::new();
    for entry in &shown.measured.entries {
        let columns = [
            Who::Exclusive,
            Who::Shared,
            Who::Scalar,
            Who::ScalarShared,
            Who::Limit,
        ];
        if columns.contains(&entry.who) {
            continue;
        }
        let same = |other: &&mut &Entry| {
            other.who == Who::Linux && without_compiler(other) == without_compiler(entry)
        };
        match all.iter_mut().find(same) {
            Some(other) if other.figure.median <= entry.figure.median => {}
            Some(other) => *other = entry,
            None => all.push(entry),
        }
    }
    all
}

/// The parts of the name of one of Linux's tables but for the second, which is the compiler.
fn without_compiler(entry: &Entry) -> Vec<&str> {
    let parts = entry.name.split(", ").enumerate();
    parts
        .filter(|(n, _)| *n != 1)
        .map(|(_, part)| part)
        .collect()
}

/// A figure with its spread.
fn spread(shown: &Shown<'_>, entry: Option<&Entry>) -> String {
    let Some(Entry { figure: found, .. }) = entry else {
        return "–".to_owned();
    };
    let [min, lower, median, upper] = [found.min, found.lower, found.median, found.upper]
        .map(|time| figure(time / shown.row.unit));
    format!("{median} ({lower}–{upper}, lowest {min})")
}
