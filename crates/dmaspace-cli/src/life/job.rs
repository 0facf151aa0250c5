//! A life under way: its steps one after the other, each timed, checked and drawn.

use std::ops::ControlFlow;
use std::time::Instant;

use ioas::Ioas;
use iommu::{Capabilities, DeviceId};
use iopt::{AnyTable, FormatId};
use runs::Span;

use super::balloon::Balloon;
use super::devices::{Devices, SoftUnit};
use super::moment::{Marks, bands};
use super::report::{Band, DmaCounts, LifeReport, LifeStep, Moment, Refused, StepReport};
use super::start::{Begun, begin};
use super::successor::{Devices as Hardware, Second};
use super::{LifeError, LifeJob, handing, steps};
use crate::map::clock::nanoseconds;

/// Where the memory is, for devices and for the guest: a multiple of every leaf size.
pub(super) const IOVA: u64 = 1 << 40;
/// The devices, by unit.
pub(super) const DEVICES: [DeviceId; 2] = [DeviceId::pci(1, 0, 0), DeviceId::pci(2, 0, 0)];
/// The unit of our own pins: the smallest part that is given back without pinning anew.
pub(super) const PIECE: u64 = 2 << 20;

/// What a unit that walks tables of `format`, of four levels, can do.
pub(super) fn capabilities(format: FormatId) -> Capabilities {
    let mut capabilities = Capabilities::new();
    capabilities.domain_bits = 16;
    capabilities.dirty_tracking = true;
    match SoftUnit::full_capabilities().format(format) {
        None => capabilities,
        Some(mut support) => {
            support.levels &= 1 << 4;
            capabilities.with_format(support)
        }
    }
}

/// What a step has done.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) took_ns: u64,
    pub(super) runs: u64,
    pub(super) bytes: u64,
    /// Table pages, where the step knows better than the address space.
    pub(super) tables: Option<u64>,
    pub(super) checked: String,
    pub(super) right: bool,
    /// What was tried, and refused by name.
    pub(super) refused: Option<Refused>,
}

impl Done {
    /// Devices were everywhere, for the first time.
    pub(super) fn dma(took_ns: u64, counts: &DmaCounts, checked: &str) -> Self {
        Self {
            took_ns,
            bytes: counts.read_bytes + counts.written_bytes,
            checked: checked.into(),
            right: counts.is_right(),
            ..Self::default()
        }
    }

    /// What it was, for the report.
    pub(super) fn report(self, step: LifeStep, flushes: u64, dma: &DmaCounts) -> StepReport {
        StepReport {
            step,
            took_ns: self.took_ns,
            runs: self.runs,
            bytes: self.bytes,
            tables: self.tables.unwrap_or(0),
            flushes,
            checked: self.checked,
            refused: self.refused,
            right: self.right && dma.is_right(),
        }
    }
}

/// A life. Dropped half-way it gives everything back, in the order of its fields.
pub(super) struct Life<'w> {
    pub(super) devices: Devices,
    pub(super) balloon: Option<Balloon>,
    pub(super) second: Option<Second>,
    pub(super) begun: Begun,
    pub(super) marks: Marks,
    /// The roots as they were handed over, and then as the second process has told.
    pub(super) told: Option<Vec<Vec<Band>>>,
    pub(super) report: LifeReport,
    pub(super) started: Instant,
    step: LifeStep,
    watch: &'w mut dyn FnMut(LifeStep) -> ControlFlow<()>,
}

impl Life<'_> {
    /// All addresses.
    pub(super) fn range(&self) -> Span {
        Span::new(IOVA, self.report.memory.size_bytes)
    }

    pub(super) fn space(&self) -> &Ioas {
        &self.begun.space
    }

    /// Flushes of all units so far.
    fn flushes(&self) -> u64 {
        let units = self.begun.units.iter();
        units.map(|(unit, _)| unit.flush_counters().flushes).sum()
    }

    /// Waits until each device has been everywhere for the first time, which is the step itself.
    pub(super) fn first_pass(&mut self) -> Result<(), LifeError> {
        self.devices.everywhere(self.step, self.watch)
    }

    /// Waits until each device has been everywhere.
    pub(super) fn everywhere(&mut self) -> Result<(), LifeError> {
        let (waited, took_ns) = timed(|| self.devices.everywhere(self.step, self.watch));
        self.report.times.waited_ns += took_ns;
        waited
    }

    /// Waits until what is now has been seen by each device many times.
    pub(super) fn seen(&mut self) -> Result<(), LifeError> {
        let (waited, took_ns) = timed(|| self.devices.seen(self.step, self.watch));
        self.report.times.waited_ns += took_ns;
        waited
    }

    /// Does a step, and notes what it was.
    pub(super) fn step(
        &mut self,
        step: LifeStep,
        work: impl FnOnce(&mut Self) -> Result<Done, LifeError>,
    ) -> Result<(), LifeError> {
        self.step = step;
        if (self.watch)(step).is_break() {
            return Err(LifeError::Interrupted(step));
        }
        let flushes = self.flushes();
        let mut done = work(self)?;
        self.report.dma = self.devices.counts();
        if done.tables.is_none() {
            done.tables = Some(self.space().tables(|_, table| table.tables()).iter().sum());
        }
        let done = done.report(step, self.flushes() - flushes, &self.report.dma);
        self.report.steps.push(done);
        let (roots, took_ns) = timed(|| self.told.clone().unwrap_or_else(|| self.roots()));
        self.report.times.drawn_ns += took_ns;
        self.report.moments.push(Moment { after: step, roots });
        Ok(())
    }

    /// Units and memory, for the second process.
    pub(super) fn hardware(&self) -> Hardware<'_> {
        Hardware {
            units: &self.begun.units,
            physical: &self.begun.physical,
        }
    }

    /// Each root's addresses now.
    pub(super) fn roots(&self) -> Vec<Vec<Band>> {
        let range = self.range();
        let drawn = |_, table: &AnyTable| bands(table, range, &self.marks);
        self.space().tables(drawn)
    }
}

/// Does `work`, and says what it took.
pub(super) fn timed<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let started = Instant::now();
    let done = work();
    (done, nanoseconds(started))
}

pub(super) fn run(
    job: &LifeJob,
    watch: &mut dyn FnMut(LifeStep) -> ControlFlow<()>,
) -> Result<LifeReport, LifeError> {
    let (started, step) = (Instant::now(), LifeStep::Memory);
    if watch(step).is_break() {
        return Err(LifeError::Interrupted(step));
    }
    let mut report = LifeReport {
        backend: "software".into(),
        ..LifeReport::default()
    };
    let (begun, took) = timed(|| begin(job, &mut report.memory, &mut || watch(step)));
    let begun = begun.map_err(|error| match error {
        LifeError::Job(crate::map::JobError::Interrupted) => LifeError::Interrupted(step),
        error => error,
    })?;
    let range = Span::new(IOVA, report.memory.size_bytes);
    let mut life = Life {
        devices: Devices::over(range, begun.units.len()),
        balloon: None,
        second: None,
        begun,
        marks: Marks::default(),
        told: None,
        report,
        started,
        step,
        watch,
    };
    steps::all(&mut life, took)?;
    handing::all(&mut life, job)?;
    handing::end(life)
}
