//! Origin 5: devices on memory nodes, simulated. See `docs/numa.md` for what the simulation knows.

use super::BenchError;
use super::report::{Group, GroupReport, Key, Subject, Unit};
use super::rounds::Rounds;
use crate::study;

/// The origin's cases: which sockets take part.
pub(super) const CASES: [&str; 3] = ["first socket alone", "second socket alone", "both sockets"];

/// Runs the group: what is simulated comes out the same each time, so once is enough.
pub(super) fn run(rounds: &mut Rounds, report: &mut GroupReport) -> Result<(), BenchError> {
    report.notes = vec![
        "simulated, not measured: tables of the engine, caches and walks in software; times are inputs"
            .into(),
        "one input is fitted to \"second socket alone\" with one table; see docs/numa.md"
            .into(),
    ];
    for row in study::allreduce_rows()? {
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
        rounds.note(key, row.simulated);
    }
    Ok(())
}
