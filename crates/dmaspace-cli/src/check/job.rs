//! The steps one after the other, over any back end, and what is left after them.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use hostmem::{Machine, Mapping, Pinner};
use ioas::iommufd::RlimitMode;
use ioas::{Observer, Placement};

use super::kernel::{Interface, Kernel};
use super::memory::{Account, take};
use super::report::{CheckReport, Counted, Done, Step};
use super::software::OwnTables;
use super::{Backend, CheckError, CheckJob, Watch};
use crate::size::percent;

/// The unit of our own pins: the smallest part that is unpinned without pinning the rest anew.
pub(super) const PIECE: u64 = 2 << 20;

/// A back end, step by step.
pub(super) trait Steps {
    /// Steps that it has or can try, in order, after [`Step::Memory`].
    const ALL: &'static [Step];

    /// Does a step, and compares what came of it.
    fn step(&mut self, step: Step, watch: &mut Watch<'_>) -> Result<Done, CheckError>;

    /// Fills in what is to be told beside the steps. Everything has ended.
    fn finish(self, report: &mut CheckReport, watch: &mut Watch<'_>) -> Result<(), CheckError>;
}

/// Nanoseconds since `started`.
pub(super) fn nanoseconds(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Times `work`.
pub(super) fn timed<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let started = Instant::now();
    let done = work();
    (done, nanoseconds(started))
}

/// Times the steps of an operation, and asks the watch.
pub(super) struct Clock<'a, 'w> {
    step: Step,
    watch: Option<&'a mut Watch<'w>>,
    begun: Option<Instant>,
    taken: Vec<(ioas::Step, u64)>,
}

impl<'a, 'w> Clock<'a, 'w> {
    pub(super) fn new(step: Step, watch: Option<&'a mut Watch<'w>>) -> Self {
        let taken = Vec::new();
        Self {
            step,
            watch,
            begun: None,
            taken,
        }
    }

    /// Nanoseconds of these steps.
    pub(super) fn spent(&self, steps: &[ioas::Step]) -> u64 {
        let these = self.taken.iter().filter(|(step, _)| steps.contains(step));
        these.map(|(_, ns)| ns).sum()
    }
}

impl Observer for Clock<'_, '_> {
    fn begin(&mut self, _step: ioas::Step) {
        self.begun = Some(Instant::now());
    }

    fn end(&mut self, step: ioas::Step, _bytes: u64) {
        let begun = self.begun.take();
        self.taken.extend(begun.map(|at| (step, nanoseconds(at))));
    }

    fn progress(&mut self, _step: ioas::Step, _done: u64) -> ControlFlow<()> {
        match &mut self.watch {
            Some(watch) => watch(self.step),
            None => ControlFlow::Continue(()),
        }
    }
}

pub(super) fn run(job: &CheckJob, watch: &mut Watch<'_>) -> Result<CheckReport, CheckError> {
    if let Some(Placement::Near(node)) = job.placement {
        let nodes = Machine::probe()?.nodes;
        if !nodes.contains(&node.0) {
            return Err(CheckError::NoNode { node, nodes });
        }
    }
    let before = Counted::since(Counted::default())?;
    match &job.backend {
        Backend::Software(software) => {
            let pinner = Arc::new(Pinner::probe(PIECE)?);
            let account = Account::of_pinner(&pinner)?;
            through(job, &account, watch, |mapping| {
                OwnTables::new(job, *software, mapping, pinner, account.ledger()?, before)
            })
        }
        // The kernel pins.
        Backend::Vfio(devices) => {
            let interface = Interface::vfio(devices, job.placement)?;
            let account = Account::of_kernel(RlimitMode::Process)?;
            through(job, &account, watch, |mapping| {
                Kernel::new(job, interface, mapping, account, before)
            })
        }
        Backend::Iommufd(devices) => {
            let interface = Interface::iommufd(devices, job.placement)?;
            let account = Account::of_kernel(RlimitMode::User)?;
            through(job, &account, watch, |mapping| {
                Kernel::new(job, interface, mapping, account, before)
            })
        }
    }
}

/// Takes the memory, and does the steps of the back end that `make` makes over it.
fn through<S: Steps>(
    job: &CheckJob,
    account: &Account,
    watch: &mut Watch<'_>,
    make: impl FnOnce(Arc<Mapping>) -> Result<S, CheckError>,
) -> Result<CheckReport, CheckError> {
    let (taken, took_ns) = timed(|| take(job, account, watch));
    let (mapping, memory) = taken?;
    let mut report = CheckReport {
        backend: job.backend.name(),
        steps: vec![Done {
            step: Step::Memory,
            bytes: memory.size_bytes,
            took_ns,
            checked: format!(
                "{} in huge pages",
                percent(memory.huge_bytes, memory.size_bytes)
            ),
            right: true,
            ..Done::default()
        }],
        memory,
        ..CheckReport::default()
    };
    let mut steps = make(mapping)?;
    for &step in S::ALL {
        tracing::debug!("{}", step.name());
        if watch(step).is_break() {
            return Err(CheckError::Interrupted(step));
        }
        let done = steps.step(step, watch)?;
        report.steps.push(Done { step, ..done });
    }
    steps.finish(&mut report, watch)?;
    Ok(report)
}
