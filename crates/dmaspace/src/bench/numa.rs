//! Origin 5: devices on memory nodes, simulated. See `docs/numa.md` for what the simulation knows.

use super::BenchError;
use super::report::{Group, GroupReport, Key, NotRun, Subject, Unit};
use super::turns::Turns;
use crate::numa::study;

/// The origin's cases: which sockets take part.
pub(super) const CASES: [&str; 3] = ["first socket alone", "second socket alone", "both sockets"];

/// Runs the group: what is simulated comes out the same each time, so once is enough.
pub(super) fn run(turns: &mut Turns<'_>, report: &mut GroupReport) -> Result<(), BenchError> {
    report.notes = vec![
        "simulated, not measured: real tables, caches and walks in software, only times are put in"
            .into(),
        "\"second socket alone\" with one table is what an input was fitted to; docs/numa.md"
            .into(),
    ];
    report.not_run.push(NotRun {
        what: "measured on this machine".into(),
        why: not_measured(hostmem::Machine::probe()?.nodes.len()),
    });
    for row in study::allreduce_rows()? {
        turns.look()?;
        let ways = [
            (", shared table", Subject::SharedSimulated),
            (", table per node", Subject::PerNodeSimulated),
        ];
        let case = |(suffix, subject)| Some((row.name.strip_suffix(suffix)?, subject));
        let Some((name, subject)) = ways.into_iter().find_map(case) else {
            continue;
        };
        let Some(op) = CASES.into_iter().find(|case| *case == name) else {
            continue;
        };
        let key = Key {
            group: Group::Numa,
            op,
            memory: "",
            format: "vtd-ss",
            subject,
            threads: 1,
            size_bytes: 0,
            unit: Unit::GigabytesPerSecond,
        };
        turns.note(key, row.simulated);
    }
    Ok(())
}

/// Why nothing is measured on a machine with so many nodes.
fn not_measured(nodes: usize) -> String {
    match nodes {
        0 | 1 => "this machine has one node with memory".into(),
        _ => format!("it has {nodes} nodes: `dmaspace numa measure` is for that"),
    }
}
