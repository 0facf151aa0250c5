//! Origin 5: devices on memory nodes, simulated. See `docs/numa.md` for what the simulation knows. Beside it,
//! on a machine with two nodes, what `dmaspace numa measure` measures: walks by processors.

use super::report::{Group, GroupReport, Key, NotRun, Subject, Unit};
use super::rounds::Rounds;
use super::{BenchError, Commands};
use crate::study;

/// Walks by processors of tables on their own node, and on another.
const WALKS: [&str; 2] = [
    "walk by a processor, measured: tables near",
    "walk by a processor, measured: tables far",
];

/// The origin's cases: which sockets take part.
pub(super) const CASES: [&str; 3] = ["first socket alone", "second socket alone", "both sockets"];

/// Runs the group: what is simulated comes out the same each time, so once is enough.
pub(super) fn run(
    commands: &dyn Commands,
    rounds: &mut Rounds<'_>,
    report: &mut GroupReport,
) -> Result<(), BenchError> {
    report.notes = vec![
        "simulated, not measured: tables of the engine, caches and walks in software; times are inputs"
            .into(),
        "one input is fitted to \"second socket alone\" with one table; see docs/numa.md"
            .into(),
    ];
    for row in study::allreduce_rows()? {
        rounds.look()?;
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
    rounds.look()?;
    measured(commands, rounds, report);
    Ok(())
}

/// A row for walks of near tables, and one for those of far ones: a sample is the median of a pair of nodes.
/// Where nothing was measured, why.
fn measured(commands: &dyn Commands, rounds: &mut Rounds<'_>, report: &mut GroupReport) {
    let (walks, why) = commands.walks();
    if let Some(why) = why {
        let what = "measured on this machine".into();
        report.not_run.push(NotRun { what, why });
    }
    for walk in walks {
        let [near, far] = WALKS;
        let key = Key {
            group: Group::Numa,
            op: if walk.near { near } else { far },
            memory: "",
            format: "",
            subject: Subject::Dmaspace,
            threads: 1,
            size_bytes: 0,
            unit: Unit::Nanoseconds,
        };
        rounds.note(key, walk.median_ns);
    }
}
