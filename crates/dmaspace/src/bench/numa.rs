//! Origin 5: devices on memory nodes, simulated. See `docs/numa.md` for what the simulation knows. Beside it,
//! on a machine with two nodes, what `dmaspace numa measure` measures: walks by processors.

use super::BenchError;
use super::report::{Group, GroupReport, Key, NotRun, Subject, Unit};
use super::turns::Turns;
use crate::devices::Places;
use crate::numa::measure::{MeasureError, MeasureReport, Measurement};
use crate::numa::study;

/// Walks by processors of tables on their own node, and on another.
const WALKS: [&str; 2] = [
    "walk by a processor, measured: tables near",
    "walk by a processor, measured: tables far",
];

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
    turns.look()?;
    measured(&measure(), turns, report);
    Ok(())
}

fn measure() -> Result<MeasureReport, MeasureError> {
    Measurement::of_this_machine(&Places::default())?.run(&[])
}

/// A row for walks of near tables, and one for those of far ones: a sample is the median of a pair of nodes.
/// Where nothing was measured, why.
fn measured(
    found: &Result<MeasureReport, MeasureError>,
    turns: &mut Turns<'_>,
    report: &mut GroupReport,
) {
    let why = match found {
        Ok(found) => found.not_run.clone(),
        Err(error) => Some(error.to_string()),
    };
    if let Some(why) = why {
        let what = "measured on this machine".into();
        report.not_run.push(NotRun { what, why });
    }
    for walks in found.iter().flat_map(|found| &found.walks) {
        let [near, far] = WALKS;
        let key = Key {
            group: Group::Numa,
            op: if walks.cpu_node == walks.table_node {
                near
            } else {
                far
            },
            memory: "",
            format: "",
            subject: Subject::Dmaspace,
            threads: 1,
            size_bytes: 0,
            unit: Unit::Nanoseconds,
        };
        turns.note(key, walks.memory.median_ns);
    }
}
