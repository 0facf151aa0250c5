//! Real memory for a group, all of it there, and given back when it is dropped.

use std::error::Error;
use std::sync::Arc;

use hostmem::{Backing, Machine, Mapping, PopulateError};
use runs::Bytes;

use super::BenchError;
use super::report::{GroupReport, NotRun};
use super::rounds::Rounds;
use crate::sentence::sentence;
use hostmem::KeptPool;

/// Memory of a kind. Whoever has more references to the mapping drops them before this.
pub(super) struct Real {
    pub(super) mapping: Arc<Mapping>,
    /// Put back when the memory is gone.
    _pool: Option<KeptPool>,
}

/// Why something was not measured.
pub(super) enum Failed {
    /// Nothing more is to be measured.
    Stop(BenchError),
    /// This cannot be had here.
    NotRun(String),
}

impl From<BenchError> for Failed {
    fn from(error: BenchError) -> Self {
        Self::Stop(error)
    }
}

impl Failed {
    /// What the machine says, as a sentence.
    pub(super) fn because(error: &dyn Error) -> Self {
        Self::NotRun(sentence(error))
    }

    /// Passes an end on, and puts what was not run into the report.
    pub(super) fn or_report(self, report: &mut GroupReport, what: &str) -> Result<(), BenchError> {
        match self {
            Self::Stop(error) => Err(error),
            Self::NotRun(why) => {
                let what = what.to_owned();
                report.not_run.push(NotRun { what, why });
                Ok(())
            }
        }
    }
}

impl Real {
    /// `wanted` bytes, or as many as fit, in whole multiples of `unit` bytes; less is noted in the report.
    /// `most` is another limit.
    pub(super) fn take(
        backing: Backing,
        wanted: u64,
        unit: u64,
        most: Option<u64>,
        rounds: &mut Rounds<'_>,
        report: &mut GroupReport,
    ) -> Result<Self, Failed> {
        rounds.look()?;
        let machine = Machine::probe().map_err(BenchError::from)?;
        // A fifth stays for everybody else.
        let fits = (machine.left(backing) / 5 * 4).min(most.unwrap_or(u64::MAX));
        let unit = unit.max(backing.page());
        let (mut len, mut pool) = (wanted.min(fits) / unit * unit, None);
        if let Some(size) = backing.huge_size() {
            // Memory is in pieces: half of it may be had.
            pool = loop {
                match KeptPool::raise(size, len, &mut || rounds.go_on()) {
                    _ if len == 0 => break None,
                    Ok(pool) => break Some(pool),
                    Err(_) if rounds.go_on().is_break() => {
                        return Err(BenchError::Interrupted.into());
                    }
                    Err(error) if len == unit => return Err(Failed::because(&error)),
                    Err(_) => len = (len / 2 / unit * unit).max(unit),
                }
            };
        }
        if len == 0 {
            let (unit, fits) = (Bytes(unit), Bytes(wanted.min(fits)));
            return Err(Failed::NotRun(format!(
                "it requires {unit}, the budget is {fits}"
            )));
        }
        let mapping = Mapping::new(backing, len, None).map_err(|error| Failed::because(&error))?;
        mapping
            .populate(&mut |_| rounds.go_on())
            .map_err(|error| match error {
                PopulateError::Interrupted { .. } => BenchError::Interrupted.into(),
                error => Failed::because(&error),
            })?;
        if len < wanted / unit * unit {
            let (len, wanted) = (Bytes(len), Bytes(wanted));
            report.notes.push(format!(
                "{backing}: {len} instead of {wanted}, which is what fits"
            ));
        }
        Ok(Self {
            mapping: Arc::new(mapping),
            _pool: pool,
        })
    }
}
