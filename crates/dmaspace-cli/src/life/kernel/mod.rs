//! A life over mappings of the kernel: the same steps, of which those that the interface cannot do are tried
//! and refused by name.
//!
//! The memory is mapped in its 16 parts, each a mapping of its own: so the balloon can take 7 of 8, although
//! the kernel takes none apart. Devices of the machine copy all the time, through all of it.

mod copying;
mod handing;
mod interface;
mod second;
mod steps;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use hostmem::{Backing, Mapping};
use ioas::{HostMemory, Ioas, Ledger, Memory};
use runs::Span;

use self::copying::Copying;
use self::interface::Opening;
use super::balloon::{Balloon, Part};
use super::job::{Done, timed};
use super::memory::{PARTS, free_pages, take};
use super::report::{Left, LifeReport, LifeStep, Refused};
use super::successor::Second;
use super::{LifeError, LifeJob};
use crate::map::kernel::{Used, lowest};
use crate::map::memory::counted;
use crate::map::{Counted, JobError};
use hostmem::KeptPool;

pub(super) use self::interface::{Handed, Interface};
pub(super) use self::second::own;

/// A life. Dropped half-way it gives everything back, in the order of its fields.
struct Life<'w> {
    interface: Interface,
    copying: Copying,
    balloon: Option<Balloon>,
    second: Option<Second>,
    handed: Handed,
    /// Open, they would keep their groups in the container.
    devices: Vec<Arc<Used>>,
    space: Arc<Ioas>,
    parts: Vec<Part>,
    ledger: Arc<Ledger>,
    /// What the ledger and the kernel counted before.
    charged: u64,
    counted: Counted,
    /// Huge pages that were free before, of the memory's kind.
    free: u64,
    backing: Backing,
    /// Put back when everything else is gone.
    pool: Option<KeptPool>,
    report: LifeReport,
    /// Why leaves were not split: then there are none to merge.
    not_split: Option<Refused>,
    started: Instant,
    step: LifeStep,
    watch: &'w mut dyn FnMut(LifeStep) -> ControlFlow<()>,
}

impl Life<'_> {
    fn space(&self) -> &Ioas {
        &self.space
    }

    /// All addresses.
    fn range(&self) -> Span {
        let memory = &self.report.memory;
        Span::new(memory.iova, memory.size_bytes)
    }

    /// The mappings, in order: one for each part.
    fn mappings(&self) -> Vec<Span> {
        self.space.kernel_mappings().unwrap_or_default()
    }

    /// Bytes that the kernel counts as locked or pinned by this process, for this life.
    fn kernel(&self) -> Result<u64, LifeError> {
        let now = counted()?.since(self.counted);
        Ok(now.locked_bytes.max(now.pinned_bytes))
    }

    /// Waits until each device has been everywhere for the first time, which is the step itself.
    fn first_pass(&mut self) -> Result<(), LifeError> {
        self.copying.everywhere(self.step, self.watch)
    }

    fn everywhere(&mut self) -> Result<(), LifeError> {
        let (waited, took_ns) = timed(|| self.copying.everywhere(self.step, self.watch));
        self.report.times.waited_ns += took_ns;
        waited
    }

    /// Waits until what is now has been seen by each device.
    fn seen(&mut self) -> Result<(), LifeError> {
        let (waited, took_ns) = timed(|| self.copying.seen(self.step, self.watch));
        self.report.times.waited_ns += took_ns;
        waited
    }

    /// Does a step, and notes what it was. The kernel tells neither tables nor flushes.
    fn step(
        &mut self,
        step: LifeStep,
        work: impl FnOnce(&mut Self) -> Result<Done, LifeError>,
    ) -> Result<(), LifeError> {
        self.step = step;
        if (self.watch)(step).is_break() {
            return Err(LifeError::Interrupted(step));
        }
        let done = work(self)?;
        self.report.dma = self.copying.counts();
        let done = done.report(step, 0, &self.report.dma);
        self.report.steps.push(done);
        Ok(())
    }
}

/// Takes the memory, and opens the devices with an empty address space.
fn begin<'w>(
    interface: Interface,
    job: &LifeJob,
    addresses: &[String],
    watch: &'w mut dyn FnMut(LifeStep) -> ControlFlow<()>,
) -> Result<Life<'w>, LifeError> {
    let started = Instant::now();
    let Opening {
        devices,
        space,
        handed,
    } = interface.open(addresses)?;
    let account = interface.account()?;
    let (ledger, before) = (account.ledger()?, counted()?);
    let mut report = LifeReport {
        backend: interface.name().into(),
        devices: devices.iter().map(|used| used.report()).collect(),
        ..LifeReport::default()
    };
    let step = LifeStep::Memory;
    let memory = &mut report.memory;
    let (taken, pool) = take(job, account.room(), memory, &mut || watch(step))?;
    let (size, half) = (memory.size_bytes, memory.size_bytes / 2);
    let no_room = || JobError::Map(ioas::MapError::NoRoom { len: size });
    let iova = lowest(&space.windows(), size).ok_or_else(no_room)?;
    memory.iova = iova;
    memory.addresses = "kernel".into();
    memory.pin = "the kernel".into();
    memory.counter = ledger.counter().into();
    let copying = Copying::over(iova, taken.mappings.clone(), devices.len());
    let part = |(number, mapping): (u64, Arc<Mapping>)| {
        let host = HostMemory::new(Arc::clone(&mapping));
        Part {
            guest: Span::new(iova + number * half, half),
            memory: Memory::new(Arc::new(host), &ledger),
            mapping,
        }
    };
    let parts = (0u64..).zip(taken.mappings).map(part).collect();
    Ok(Life {
        interface,
        copying,
        balloon: None,
        second: None,
        handed,
        devices,
        space: Arc::new(space),
        parts,
        charged: ledger.in_use(),
        ledger,
        counted: before,
        free: taken.free,
        backing: taken.backing,
        pool,
        report,
        not_split: None,
        started,
        step,
        watch,
    })
}

/// The life of `job` on devices of the machine.
pub(super) fn run(
    interface: Interface,
    job: &LifeJob,
    addresses: &[String],
    watch: &mut dyn FnMut(LifeStep) -> ControlFlow<()>,
) -> Result<LifeReport, LifeError> {
    let step = LifeStep::Memory;
    if watch(step).is_break() {
        return Err(LifeError::Interrupted(step));
    }
    let (life, took) = timed(|| begin(interface, job, addresses, watch));
    let mut life = life.map_err(|error| match error {
        LifeError::Job(JobError::Interrupted) => LifeError::Interrupted(step),
        error => error,
    })?;
    steps::all(&mut life, took)?;
    handing::all(&mut life, job)?;
    let mut left = Left::default();
    life.step(LifeStep::TearDown, |life| {
        let (done, found) = handing::end(life)?;
        left = found;
        Ok(done)
    })?;
    let Life {
        copying,
        parts,
        mut report,
        pool,
        free,
        backing,
        space,
        started,
        ..
    } = life;
    let (freed, took_ns) = timed(|| {
        drop((copying, space, parts));
        pool.map_or(Ok(()), KeptPool::restore)
    });
    freed.map_err(JobError::from)?;
    left.huge_pages = free.saturating_sub(free_pages(backing));
    report.left = left;
    report.times.freed_ns = took_ns;
    report.times = report.times.closed(started, &report.steps);
    Ok(report)
}

/// The bytes of one of the parts.
fn part_bytes(size: u64) -> u64 {
    size / PARTS
}
