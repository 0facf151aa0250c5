//! What a reader wants first: every operation in one line, and what missed its aim.

use std::fmt::{Result, Write as _};

use super::{LENIENT, NOT_MEASURED, Shown, Standing, fastest, figure, ratio};
use crate::peers::field::{CONTESTS, Contest, Who};
use crate::peers::reasons::reason;
use crate::peers::results::{Entry, Measured, Results};
use crate::peers::rows::{Aim, ROWS, Row};

const OURS: [(Who, &str); 2] = [(Who::Exclusive, "exclusive"), (Who::Shared, "shared")];

pub(super) fn write(text: &mut String, results: &Results) -> Result {
    headline(text, results)?;
    ratios(text, results)?;
    missed(text, results)
}

/// The row in the reference format, or in the first that has it.
fn first<'a>(results: &'a Results, row: &'static Row) -> Option<(&'static Contest, Shown<'a>)> {
    let mut contests: Vec<&Contest> = CONTESTS.iter().collect();
    contests.sort_by_key(|contest| !contest.reference);
    let find = |contest: &'static Contest| Some((contest, Shown::find(results, row, contest.id)?));
    contests.into_iter().find_map(find)
}

/// The fastest of those who are this to us, in any format with the sizes of the reference, and that
/// format. In others it would be other work: as many bytes are fewer pages, or are found by fewer
/// levels; where each chooses its own sizes, it would be so in any other.
fn anywhere<'a>(results: &'a Results, row: &Row, who: Who) -> Option<(&'a Entry, &'a str)> {
    let reference = CONTESTS.iter().find(|contest| contest.reference)?;
    let alike = |format: &str| {
        let mut contests = CONTESTS.iter();
        let same =
            |c: &Contest| c.reference || row.has_sizes(&c.pages) && c.pages == reference.pages;
        contests.any(|c| c.id == format && same(c))
    };
    let rows = || {
        let of_row = |measured: &&Measured| measured.row == row.id && alike(&measured.format);
        results.rows.iter().filter(of_row)
    };
    let all = rows().flat_map(|measured| &measured.entries);
    let best = fastest(all.filter(|entry| entry.who == who))?;
    let home = rows().find(|measured| measured.entries.iter().any(|e| std::ptr::eq(e, best)))?;
    Some((best, &home.format))
}

/// Its aims, in words.
fn aims(row: &Row) -> String {
    match row.aims {
        [exclusive, shared] if exclusive == shared => exclusive.to_string(),
        [exclusive, shared] if exclusive.to_what() == shared.to_what() => {
            format!("{}/{shared}", exclusive.factor())
        }
        [exclusive, shared] => format!("{exclusive} / {shared}"),
    }
}

fn headline(text: &mut String, results: &Results) -> Result {
    let reference = CONTESTS.iter().find(|contest| contest.reference);
    let linux = |entry: &Entry| entry.who == Who::Linux;
    let no_linux = if results.rows.iter().flat_map(|row| &row.entries).any(linux) {
        "–"
    } else {
        NOT_MEASURED
    };
    writeln!(
        text,
        "## The operations\n\n\
         Ours are those of {}, exclusive and shared form; Linux's are those of its fastest format with the same \
         sizes and of its fastest compiler, and compare with the shared form. Without `std` there are no vectors, \
         and readers are known by slots. Limits: a loop of relaxed stores; one that first looks whether entries \
         are empty; one of vector stores. Of unmaps they read and clear, of harvests they read. ±: half of the \
         middle half of the samples, where it is 2.5 % or more. [results.json](performance/results.json) has all \
         entries of all formats.\n\n\
         | name | operation | aim, exclusive/shared | exclusive | shared | without `std` | limit | checked | vectors | \
         Linux, best | crate, best |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        reference.map_or("the first format", |contest| contest.title)
    )?;
    for row in ROWS {
        let Some((contest, shown)) = first(results, row) else {
            continue;
        };
        let other = |who| {
            let found = anywhere(results, row, who);
            found.map_or_else(
                || if who == Who::Linux { no_linux } else { "–" }.to_owned(),
                |(entry, format)| {
                    let time = shown.spread(Some(entry));
                    let home = if who == Who::Linux {
                        format
                    } else {
                        &entry.name
                    };
                    format!("{time} ({home})")
                },
            )
        };
        let title = if contest.reference {
            shown.title()
        } else {
            format!("{} ({})", shown.title(), contest.id)
        };
        writeln!(
            text,
            "| `{}` | {title} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            row.id,
            aims(row),
            shown.spread(shown.best(Who::Exclusive)),
            shown.spread(shown.best(Who::Shared)),
            without_std(&shown),
            shown.spread(shown.best(Who::Limit)),
            shown.spread(shown.best(Who::CheckedLimit)),
            shown.spread(shown.best(Who::VectorLimit)),
            other(Who::Linux),
            other(Who::Crate),
        )?;
    }
    writeln!(text)
}

/// Both forms as they are without `std`.
fn without_std(shown: &Shown<'_>) -> String {
    let both = [Who::Scalar, Who::ScalarShared].map(|who| shown.time(who));
    match both {
        [None, None] => "–".to_owned(),
        both => both.map(|time| shown.show(time)).join("/"),
    }
}

/// How many times as long as our shared form Linux takes in the format in which that is least, and
/// that format.
fn against_linux(results: &Results, row: &'static Row) -> String {
    let of = |contest: &Contest| {
        let shown = Shown::find(results, row, contest.id)?;
        let times = shown.time(Who::Linux)? / shown.time(Who::Shared)?;
        Some((times, contest.id))
    };
    let all = CONTESTS.iter().filter_map(of);
    let least = all.min_by(|a, b| a.0.total_cmp(&b.0));
    least.map_or_else(
        || "–".to_owned(),
        |(times, format)| format!("{}× ({format})", figure(times)),
    )
}

fn ratios(text: &mut String, results: &Results) -> Result {
    writeln!(
        text,
        "### Ratios\n\n\
         Ours to the limit (relaxed stores), in the reference format; Linux to our shared form, in the format where \
         Linux is best; the fastest crate to our exclusive form. Then all formats: how many are at the aim, and how many \
         within {LENIENT} times, in both forms; and which one is furthest from it.\n\n\
         | name | exclusive : limit | shared : limit | Linux : shared, least | crate : exclusive | \
         at the aim | within {LENIENT}× | formats | furthest |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|---|"
    )?;
    for row in ROWS {
        let Some((_, shown)) = first(results, row) else {
            continue;
        };
        let ours = OURS.map(|(who, _)| shown.time(who));
        let limit = shown.time(Who::Limit);
        let best = |who| anywhere(results, row, who).map(|(entry, _)| entry.figure.median);
        let mut counts = (0, 0, 0);
        let mut furthest: Option<(f64, &str, &str)> = None;
        for contest in CONTESTS {
            let Some(here) = Shown::find(results, row, contest.id) else {
                continue;
            };
            let all = OURS.map(|(who, name)| Some((here.time(who)? / here.aim(who)?, name)));
            let known: Vec<(f64, &str)> = all.into_iter().flatten().collect();
            let Some(worst) = known.iter().copied().max_by(|a, b| a.0.total_cmp(&b.0)) else {
                continue;
            };
            counts.0 += 1;
            counts.1 += u32::from(worst.0 <= 1.0);
            counts.2 += u32::from(worst.0 <= LENIENT);
            if furthest.is_none_or(|known| worst.0 > known.0) {
                furthest = Some((worst.0, contest.id, worst.1));
            }
        }
        let (all, at, within) = counts;
        let furthest = furthest.map_or_else(
            || "–".to_owned(),
            |(times, format, form)| format!("{} {form}, {}×", format, figure(times)),
        );
        writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {at} | {within} | {all} | {furthest} |",
            row.id,
            ratio(ours[0], limit),
            ratio(ours[1], limit),
            against_linux(results, row),
            ratio(best(Who::Crate), ours[0]),
        )?;
    }
    writeln!(text)
}

/// Formats that miss an aim in one form, and why.
struct Miss {
    why: &'static str,
    form: &'static str,
    formats: Vec<String>,
}

/// The rows that miss an aim: those formats together that have the same reason.
fn missed(text: &mut String, results: &Results) -> Result {
    let mut lines = String::new();
    for row in ROWS {
        let mut misses = Vec::<Miss>::new();
        for contest in CONTESTS {
            let Some(shown) = Shown::find(results, row, contest.id) else {
                continue;
            };
            for (who, name) in OURS {
                let (Some(time), Some(aim)) = (shown.time(who), shown.aim(who)) else {
                    continue;
                };
                // The reference is held to its aims, and so is every format to Linux; where formats have other
                // sizes of tables and entries than the reference, more of the limit is allowed.
                let to_linux = matches!(row.aim(who), Aim::Linux(_));
                match Standing::of(time, aim) {
                    Standing::Met => continue,
                    Standing::Near if !to_linux && !contest.reference => continue,
                    Standing::Near | Standing::Missed => {}
                }
                let why = reason(row.id, contest.id).unwrap_or("not explained yet");
                let times = ratio(Some(time), Some(aim));
                let miss = format!("{} {times}", contest.id);
                let same = |it: &&mut Miss| it.why == why && it.form == name;
                match misses.iter_mut().find(same) {
                    Some(found) => found.formats.push(miss),
                    None => misses.push(Miss {
                        why,
                        form: name,
                        formats: vec![miss],
                    }),
                }
            }
        }
        // The forms of one reason are one line.
        while !misses.is_empty() {
            let why = misses[0].why;
            let (same, rest) = misses.into_iter().partition(|miss| miss.why == why);
            misses = rest;
            let same: Vec<Miss> = same;
            let all = same.iter();
            let all = all.map(|miss| format!("{}: {}", miss.form, miss.formats.join(", ")));
            let all = all.collect::<Vec<_>>().join("; ");
            writeln!(lines, "| `{}` | {all} | {why} |", row.id)?;
        }
    }
    writeln!(text, "### Missed aims\n")?;
    if lines.is_empty() {
        return writeln!(text, "None.\n");
    }
    writeln!(
        text,
        "The reference is held to its aims, every format to those that compare with Linux, and to the others within \
         {LENIENT} times; all other aims are met. Figures are time : aim; instructions are callgrind's.\n\n\
         | name | where | reason |\n|---|---|---|\n{lines}"
    )
}
