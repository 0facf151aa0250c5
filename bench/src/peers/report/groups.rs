//! Formats with groups beside one without.

use std::fmt::{Result, Write as _};

use super::{figure, ratio};
use crate::peers::field::{CONTESTS, Who};
use crate::peers::results::{Groups, Measured};

pub(super) fn write(text: &mut String, groups: &Groups) -> Result {
    let Some(first) = groups.rows.first() else {
        return Ok(());
    };
    writeln!(
        text,
        "## Groups\n\n\
         Unmap 256 × 4K, ns, in formats that can join neighbouring entries to a group beside the first, which \
         cannot; leaves are single pages, {}. In brackets: how many times as long as without groups; the aim is 1.2. \
         Measured at commit `{}`.\n\n\
         | format | exclusive | shared |\n|---|---:|---:|",
        first.conditions, groups.commit
    )?;
    for row in &groups.rows {
        let contest = CONTESTS.iter().find(|contest| contest.id == row.format);
        let title = contest.map_or(row.format.as_str(), |contest| contest.title);
        let cell = |who| {
            let (here, there) = (median(row, who), median(first, who));
            let time = here.map_or_else(|| "–".to_owned(), figure);
            format!("{time} ({})", ratio(here, there))
        };
        writeln!(
            text,
            "| {title} | {} | {} |",
            cell(Who::Exclusive),
            cell(Who::Shared)
        )?;
    }
    writeln!(text)
}

fn median(row: &Measured, who: Who) -> Option<f64> {
    let entry = row.entries.iter().find(|entry| entry.who == who)?;
    Some(entry.figure.median)
}
