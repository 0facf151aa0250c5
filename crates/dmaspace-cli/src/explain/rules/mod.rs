//! Rules: from facts to findings. A module for each group of causes of `docs/explain.md`; each rule names its
//! source, and none of them sees text.

mod balloon;
mod config;
mod fault;
mod firmware;
mod group;
mod layout;
mod machine;
mod memlock;
mod option;
mod pages;
mod refused;
mod start;
mod table;
mod trace;

use super::facts::{Facts, Line};
use super::finding::{Advice, Certainty, Finding};
use crate::inspect::needs::NeedFinding;

/// All findings, in the order in which they are printed.
pub(super) fn findings(facts: &mut Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    fault::findings(facts, &mut found);
    firmware::findings(facts, &mut found);
    group::findings(facts, &mut found);
    refused::findings(facts, &mut found);
    memlock::findings(facts, &mut found);
    pages::findings(facts, &mut found);
    layout::findings(facts, &mut found);
    option::findings(facts, &mut found);
    table::findings(facts, &mut found);
    trace::findings(facts, &mut found);
    balloon::findings(facts, &mut found);
    // A virtual machine that runs has its pages and limits; the rest can be said of it, too.
    let running = std::mem::take(&mut facts.running);
    facts.configurations.extend(running);
    config::findings(facts, &mut found);
    // A start is explained only where nothing else was asked about.
    let other =
        |one: &Finding| !one.cause.starts_with("config.") && one.certainty > Certainty::Unknown;
    let failed = |line: &Line| {
        matches!(
            line,
            Line::MapFailed { .. } | Line::PoolEmpty { .. } | Line::NotViable { .. }
        )
    };
    if !found.iter().any(other) && !facts.lines.iter().any(|one| failed(&one.fact)) {
        start::findings(facts, &mut found);
    }
    machine::findings(facts, &mut found);
    found
}

/// A finding that `inspect` has by the same rule, without its evidence.
fn of_need(short: NeedFinding) -> Finding {
    let certainty = match short.likely {
        true => Certainty::Likely,
        false => Certainty::Certain,
    };
    let mut finding = Finding::new(short.cause, certainty, short.source)
        .devices(short.devices)
        .say(short.text);
    for (first, last) in short.addresses {
        finding = finding.range(first, last);
    }
    let advice = short.advice.iter().map(|one| Advice::text(one.sentence()));
    advice.fold(finding, Finding::advise)
}

/// `1 page`, `3 pages`.
fn count(number: u64, name: &str) -> String {
    match number {
        1 => format!("1 {name}"),
        _ => format!("{number} {name}s"),
    }
}

/// Reads a text as one file, for the tests of rules.
#[cfg(test)]
pub(super) fn of_text(text: &str) -> Vec<Finding> {
    let mut progress = |_: &str, _: u64| {};
    let mut input = super::input::Input::new(&mut progress);
    input.stream("input.txt", text.as_bytes());
    input.facts.translate();
    findings(&mut input.facts)
}

/// The causes of findings, for the tests of rules.
#[cfg(test)]
pub(super) fn causes(found: &[Finding]) -> Vec<&'static str> {
    found.iter().map(|one| one.cause).collect()
}
