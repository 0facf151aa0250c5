//! Differences between the translations of two tables.
//!
//! It compares translations, not tables: addresses of tables and sizes of leaves may differ without a
//! change. Both sides are given as [surveys](super::survey()), whose runs are sorted.

use serde::Serialize;

use super::report::{LeafReport, RunReport, Survey};
use crate::json::hex;

/// The differences.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DiffReport {
    /// Formats of both.
    pub formats: (String, String),
    /// Leaves of both, by size.
    pub leaves: (Vec<LeafReport>, Vec<LeafReport>),
    /// Bytes that both translate alike.
    pub same_bytes: u64,
    /// Bytes that only the first translates.
    pub removed_bytes: u64,
    /// Bytes that only the second translates.
    pub added_bytes: u64,
    /// Bytes that both translate, to other memory or with other permissions.
    pub changed_bytes: u64,
    /// The changes, by address.
    pub changes: Vec<Change>,
    /// False when not all of one side is known, so that changes may be missing or wrong.
    pub complete: bool,
}

/// A stretch of input addresses that is translated differently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The first input address.
    #[serde(with = "hex")]
    pub iova: u64,
    /// Bytes.
    pub bytes: u64,
    /// Where it led before; `None` where it was not translated.
    pub before: Option<Reached>,
    /// The same after.
    pub after: Option<Reached>,
}

/// Where an input address leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reached {
    /// The physical address.
    #[serde(with = "hex")]
    pub pa: u64,
    /// Permissions of devices: `rw-`.
    pub prot: String,
}

impl DiffReport {
    /// True when both translate everything alike.
    pub fn is_same(&self) -> bool {
        self.changes.is_empty() && self.complete
    }
}

/// A position in the runs of one table.
struct Cursor<'a> {
    runs: std::slice::Iter<'a, RunReport>,
    now: Option<&'a RunReport>,
}

impl<'a> Cursor<'a> {
    fn new(runs: &'a [RunReport]) -> Self {
        let mut runs = runs.iter();
        let now = runs.next();
        Self { runs, now }
    }

    /// Leaves behind what ends at or before `at`.
    fn pass(&mut self, at: u128) {
        while self.now.is_some_and(|run| end(run) <= at) {
            self.now = self.runs.next();
        }
    }

    /// Where it goes on: the beginning of the run that is ahead, or the end of the one at `at`.
    fn border(&self, at: u128) -> u128 {
        match self.now {
            None => u128::MAX,
            Some(run) if u128::from(run.iova) > at => run.iova.into(),
            Some(run) => end(run),
        }
    }

    fn at(&self, at: u128) -> Option<(u64, &'a str)> {
        let run = self.now.filter(|run| u128::from(run.iova) <= at)?;
        let offset = at - u128::from(run.iova);
        Some((run.pa.wrapping_add(offset as u64), &run.prot))
    }
}

fn end(run: &RunReport) -> u128 {
    u128::from(run.iova) + u128::from(run.bytes)
}

/// Compares two tables by their runs.
pub fn diff(before: &Survey, after: &Survey) -> DiffReport {
    let known = |survey: &Survey| survey.complete && survey.runs.len() as u64 == survey.run_count;
    let mut report = DiffReport {
        formats: (before.root.format.clone(), after.root.format.clone()),
        leaves: (before.leaves.clone(), after.leaves.clone()),
        complete: known(before) && known(after),
        ..DiffReport::default()
    };
    let (mut left, mut right) = (Cursor::new(&before.runs), Cursor::new(&after.runs));
    let mut at = 0u128;
    loop {
        left.pass(at);
        right.pass(at);
        let next = left.border(at).min(right.border(at));
        if next == u128::MAX {
            return report;
        }
        let bytes = u64::try_from(next - at).unwrap_or(u64::MAX);
        match (left.at(at), right.at(at)) {
            (None, None) => {}
            (one, other) if one == other => add(&mut report.same_bytes, bytes),
            (one, other) => {
                match (one, other) {
                    (Some(_), None) => add(&mut report.removed_bytes, bytes),
                    (None, _) => add(&mut report.added_bytes, bytes),
                    _ => add(&mut report.changed_bytes, bytes),
                }
                note(&mut report.changes, at as u64, bytes, one, other);
            }
        }
        at = next;
    }
}

fn add(sum: &mut u64, bytes: u64) {
    *sum = sum.saturating_add(bytes);
}

/// Joins what continues the last change.
fn note(
    changes: &mut Vec<Change>,
    iova: u64,
    bytes: u64,
    before: Option<(u64, &str)>,
    after: Option<(u64, &str)>,
) {
    let continues = |was: &Option<Reached>, is: Option<(u64, &str)>, len: u64| match (was, is) {
        (None, None) => true,
        (Some(was), Some((pa, prot))) => was.pa.checked_add(len) == Some(pa) && was.prot == prot,
        _ => false,
    };
    let continued = changes.last_mut().filter(|last| {
        last.iova.checked_add(last.bytes) == Some(iova)
            && continues(&last.before, before, last.bytes)
            && continues(&last.after, after, last.bytes)
    });
    if let Some(last) = continued {
        last.bytes = last.bytes.saturating_add(bytes);
        return;
    }
    let owned = |side: Option<(u64, &str)>| {
        side.map(|(pa, prot)| Reached {
            pa,
            prot: prot.into(),
        })
    };
    changes.push(Change {
        iova,
        bytes,
        before: owned(before),
        after: owned(after),
    });
}
