//! Real memory for a group, all of it there, and given back when it is dropped.

use std::error::Error;
use std::ops::ControlFlow;
use std::sync::Arc;

use hostmem::{Backing, CgroupLimit, Machine, Mapping};
use runs::Bytes;

use super::BenchError;
use super::report::{GroupReport, NotRun};
use crate::sentence::sentence;

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
    /// The machine's reason, as a sentence.
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

/// `wanted` bytes, or as many as fit, in whole multiples of `unit` bytes; less is noted in the report.
/// `most` is another limit. Huge pages are those that are free in their pool.
pub(super) fn memory(
    backing: Backing,
    wanted: u64,
    unit: u64,
    most: Option<u64>,
    report: &mut GroupReport,
) -> Result<Arc<Mapping>, Failed> {
    let machine = Machine::probe().map_err(BenchError::from)?;
    let unit = unit.max(backing.page());
    let wanted = wanted / unit * unit;
    let fits = match backing.huge_size() {
        Some(size) => {
            let free = machine.pool(size).map_or(0, |pool| pool.unreserved());
            let cgroup = machine.cgroup(backing).map_or(u64::MAX, CgroupLimit::left);
            (free * size.bytes()).min(cgroup)
        }
        // A fifth stays for all others.
        None => machine.left(backing) / 5 * 4,
    };
    let fits = fits.min(most.unwrap_or(u64::MAX));
    let len = wanted.min(fits) / unit * unit;
    if len == 0 {
        let (least, fits) = (Bytes(unit), Bytes(wanted.min(fits)));
        let raise = backing.huge_size().map(|size| {
            let pages = wanted.max(unit) / size.bytes();
            let pool = size.bytes() >> 10;
            format!("; echo {pages} > /sys/kernel/mm/hugepages/hugepages-{pool}kB/nr_hugepages")
        });
        let raise = raise.unwrap_or_default();
        return Err(Failed::NotRun(format!(
            "it requires {least}, the budget is {fits}{raise}"
        )));
    }
    let mapping = Mapping::new(backing, len, None).map_err(|error| Failed::because(&error))?;
    let filled = mapping.populate(&mut |_| ControlFlow::Continue(()));
    filled.map_err(|error| Failed::because(&error))?;
    if len < wanted {
        let (len, wanted) = (Bytes(len), Bytes(wanted));
        report.notes.push(format!(
            "{backing}: {len} instead of {wanted}: more does not fit"
        ));
    }
    Ok(Arc::new(mapping))
}
