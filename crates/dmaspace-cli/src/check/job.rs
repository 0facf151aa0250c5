//! A check under way: the steps one after the other, and what both back ends do alike.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use hostmem::{Counter, Limits};
use ioas::{Ioas, Ledger, Memory, Observer, Place};
use iopt::{Pending, Prot};
use runs::{Iova, Span};

use super::report::{
    CheckReport, Counted, DmaReport, DomainReport, Done, FinalCounters, PlacementReport,
};
use super::{Because as _, CheckError, CheckJob, PAGE, Step};

/// Receives the step that is under way, again and again, from the thread of the check. [`ControlFlow::Break`] ends the
/// check, which then gives everything back.
pub(super) type Watch<'a> = dyn FnMut(Step) -> ControlFlow<()> + 'a;

/// A check under way, and its report so far.
pub(super) struct Job<'a> {
    pub(super) asked: &'a CheckJob,
    pub(super) report: CheckReport,
    pub(super) step: Step,
    before: Counted,
    watch: &'a mut Watch<'a>,
}

/// A step of a back end, which compares what came of it.
pub(super) type StepOf<B> = (Step, fn(&mut B, &mut Job<'_>) -> Result<Done, CheckError>);

pub(super) const PROBE: &str = "cannot read the machine's memory and pools";
pub(super) const LIMITS: &str = "cannot learn the limits on locked memory";

/// Counters of the kernel for this process, above `before`.
fn counted(before: Counted) -> Result<Counted, CheckError> {
    let now = |counter| Ok::<_, CheckError>(Limits::in_use(counter).failed(LIMITS)?.known);
    Ok(Counted {
        locked_bytes: now(Counter::MmLockedVm)?.saturating_sub(before.locked_bytes),
        pinned_bytes: now(Counter::PinnedVm)?.saturating_sub(before.pinned_bytes),
    })
}

impl<'a> Job<'a> {
    pub(super) fn new(asked: &'a CheckJob, watch: &'a mut Watch<'_>) -> Result<Self, CheckError> {
        Ok(Self {
            asked,
            report: CheckReport {
                backend: asked.backend.name(),
                ..CheckReport::default()
            },
            step: Step::Memory,
            before: counted(Counted::default())?,
            watch,
        })
    }

    /// Asks the watch.
    pub(super) fn ask(&mut self) -> ControlFlow<()> {
        (self.watch)(self.step)
    }

    /// The same, with the error to return.
    pub(super) fn go_on(&mut self) -> Result<(), CheckError> {
        match self.ask() {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(CheckError::Interrupted(self.step)),
        }
    }

    /// Counters of the kernel, above those of the beginning.
    pub(super) fn counted(&self) -> Result<Counted, CheckError> {
        counted(self.before)
    }

    /// Does a step and reports it. The devices, too, must have found nothing wrong so far.
    pub(super) fn step(
        &mut self,
        step: Step,
        work: impl FnOnce(&mut Self) -> Result<Done, CheckError>,
    ) -> Result<(), CheckError> {
        self.step_with(step, |job| Ok((work(job)?, ())))
    }

    /// The same, with what the step is done for.
    pub(super) fn step_with<T>(
        &mut self,
        step: Step,
        work: impl FnOnce(&mut Self) -> Result<(Done, T), CheckError>,
    ) -> Result<T, CheckError> {
        tracing::debug!("{}", step.name());
        self.step = step;
        self.go_on()?;
        let (done, result) = work(self)?;
        let dma = self.report.dma.as_ref().is_none_or(DmaReport::is_right);
        let right = done.right && dma;
        self.report.steps.push(Done {
            step,
            right,
            ..done
        });
        Ok(result)
    }

    /// Maps all of `memory` at `iova`, and notes what was charged. Nanoseconds of the call's steps.
    pub(super) fn map(
        &mut self,
        space: &Ioas,
        iova: u64,
        memory: &Arc<Memory>,
        ledger: &Ledger,
    ) -> Result<Times, CheckError> {
        let (in_use, steps, step) = (ledger.in_use(), ledger.steps(), self.step);
        let mut clock = Clock::new(Some(self));
        let whole = Span::new(0, memory.len());
        let mapped = space
            .observed(&mut clock)
            .map(iova, memory, whole, Prot::RW);
        let times = clock.times;
        mapped.map_err(|cause| CheckError::of_map(cause, step))?;
        let mapped = self.counted()?;
        let memory = &mut self.report.memory;
        memory.counter = ledger.counter();
        memory.charged_bytes = ledger.in_use() - in_use;
        memory.charge_steps = ledger.steps() - steps;
        memory.mapped = mapped;
        Ok(times)
    }

    /// Notes which devices share a page table, if a placement was asked for.
    pub(super) fn place(
        &mut self,
        space: &Ioas,
        misplaced: Vec<String>,
        mut of: impl FnMut(&Place) -> Result<DomainReport, CheckError>,
    ) -> Result<(), CheckError> {
        let Some(policy) = self.asked.placement else {
            return Ok(());
        };
        let mut domains = Vec::new();
        for place in space.places() {
            domains.push(DomainReport {
                node: place.node.map(|node| node.0),
                devices: place.endpoints.len() as u64,
                ..of(&place)?
            });
        }
        self.report.placement = Some(PlacementReport {
            policy: policy.to_string(),
            domains,
            misplaced,
        });
        Ok(())
    }

    /// Ends the address space, and looks for what is left. `checked` names the counters.
    pub(super) fn close(
        &mut self,
        space: Option<Ioas>,
        memory: &Memory,
        table_pages: impl Fn() -> u64,
        checked: &str,
    ) -> Result<Done, CheckError> {
        let (closed, took_ns) = timed(|| space.map(Ioas::close));
        let ended = closed
            .transpose()
            .failed("cannot close the address space")?;
        let left = &mut self.report.left;
        left.charged_bytes = memory.charged();
        left.held_bytes = memory.held();
        left.table_pages = table_pages();
        self.report.left.kernel = self.counted()?;
        let right = ended.is_some() && self.report.left == FinalCounters::default();
        Ok(Done::new(0, took_ns, right, checked))
    }
}

/// Dirty pages of `range` by bits, their bytes, and whether the unit cannot tell.
pub(super) fn dirty(space: &Ioas, range: Span<Iova>) -> Result<(Vec<u64>, u64, bool), CheckError> {
    let words = vec![0; (range.len / PAGE).div_ceil(64) as usize];
    let pending = Pending::new(words, range, PAGE);
    let pending = &mut pending.failed("cannot make a bitmap of dirty pages")?;
    let harvested = space
        .harvest(pending)
        .failed("cannot harvest dirty pages")?;
    let shown = space.show(pending).failed("cannot flush harvested pages")?;
    let (words, runs) = (shown.words().to_vec(), shown.runs());
    let bytes = runs.map(|run| run.len).sum();
    shown.acknowledge();
    Ok((words, bytes, harvested.blind))
}

/// Nanoseconds since `started`.
fn nanoseconds(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Times `work`.
pub(super) fn timed<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let started = Instant::now();
    let done = work();
    (done, nanoseconds(started))
}

/// Nanoseconds of the steps of an operation.
#[derive(Debug, Default)]
pub(super) struct Times(Vec<(ioas::Step, u64)>);

impl Times {
    /// Nanoseconds of these steps together.
    pub(super) fn of(&self, steps: &[ioas::Step]) -> u64 {
        let these = self.0.iter().filter(|(step, _)| steps.contains(step));
        these.map(|(_, ns)| ns).sum()
    }
}

/// Times the steps of an operation, and asks the watch.
pub(super) struct Clock<'a, 'b> {
    job: Option<&'a mut Job<'b>>,
    begun: Option<Instant>,
    pub(super) times: Times,
}

impl<'a, 'b> Clock<'a, 'b> {
    pub(super) fn new(job: Option<&'a mut Job<'b>>) -> Self {
        Self {
            job,
            begun: None,
            times: Times::default(),
        }
    }
}

impl Observer for Clock<'_, '_> {
    fn begin(&mut self, _step: ioas::Step) {
        self.begun = Some(Instant::now());
    }

    fn end(&mut self, step: ioas::Step, _bytes: u64) {
        let begun = self.begun.take();
        self.times.0.extend(begun.map(|at| (step, nanoseconds(at))));
    }

    fn progress(&mut self, _step: ioas::Step, _done: u64) -> ControlFlow<()> {
        match &mut self.job {
            Some(job) => job.ask(),
            None => ControlFlow::Continue(()),
        }
    }
}
