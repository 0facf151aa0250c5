//! Format by format: every row, everybody, and how far the samples spread.

use std::fmt::{Result, Write as _};

use super::{Shown, Standing, figure};
use crate::field::{CONTESTS, Who};
use crate::results::{Entry, Results};
use crate::rows::ROWS;

pub(super) fn write(text: &mut String, results: &Results) -> Result {
    writeln!(
        text,
        "## The formats\n\n\
         The lowest sample, then in brackets the median and the quartiles around it."
    )?;
    for contest in CONTESTS {
        let rows: Vec<Shown<'_>> = ROWS
            .iter()
            .filter_map(|row| Shown::find(results, row, contest.id))
            .collect();
        if rows.is_empty() {
            continue;
        }
        let block = contest.pages.block.map(crate::run::size);
        writeln!(
            text,
            "\n### {}\n\n4K stands for {}, 2M for {}.\n\n\
             | operation | aim | exclusive | | shared | | limit | others |\n\
             |---|---:|---:|---|---:|---|---:|---|",
            contest.title,
            crate::run::size(contest.pages.small),
            block.as_deref().unwrap_or("nothing")
        )?;
        for shown in rows {
            let aims = [Who::Exclusive, Who::Shared].map(|who| shown.show(shown.aim(who)));
            let aims = match aims {
                [one, two] if one == two => one,
                [one, two] => format!("{one} / {two}"),
            };
            let others = shown.measured.entries.iter().filter(|entry| {
                let apart = [Who::Exclusive, Who::Shared, Who::Limit];
                !apart.contains(&entry.who)
            });
            let others: Vec<String> = others
                .map(|entry| format!("{} {}", entry.name, spread(&shown, Some(entry))))
                .collect();
            let words = |who| shown.standing(who).map_or("", Standing::words);
            writeln!(
                text,
                "| {} | {aims} | {} | {} | {} | {} | {} | {} |",
                shown.title(),
                spread(&shown, shown.best(Who::Exclusive)),
                words(Who::Exclusive),
                spread(&shown, shown.best(Who::Shared)),
                words(Who::Shared),
                spread(&shown, shown.best(Who::Limit)),
                others.join("; ")
            )?;
        }
    }
    writeln!(text)
}

/// A figure with its spread.
fn spread(shown: &Shown<'_>, entry: Option<&Entry>) -> String {
    let Some(Entry { figure: found, .. }) = entry else {
        return "–".to_owned();
    };
    let [min, lower, median, upper] = [found.min, found.lower, found.median, found.upper]
        .map(|time| figure(time / shown.row.unit));
    format!("{min} ({median}, {lower}–{upper})")
}
