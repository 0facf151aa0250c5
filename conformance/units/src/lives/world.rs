//! The world of a life, and its operations.

mod look;

use std::{cell::Cell, fmt, ops::Range, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use fastrand::Rng;
use hostmem::Pinner;
use ioas::{
    DomainIds, FixedRuns, Flushing, HarvestError, Ioas, Iommu, Ledger, Memory, TableBuilder,
    Tracking,
};
use iommu::{FlushError, Unit as _, UnitError};
use iopt::{DirtyError, Interruption, Pending, Prot};
use qtest::nvme::Nvme;
use runs::{Iova, Offset, Pa, Span};
use shadow::{Change, Generator, Layout, Operation, PAGE, Page, Shadow};

use super::node::Node;
use crate::{
    DEVICES, Rig,
    gate::{Gate, Gated, Queue},
    handed::Handed,
    id,
    rig::LargeTables,
};

const MIB: u64 = 1 << 20;
/// Device addresses of the generator: on both sides of 4 GiB.
const PAGES: u64 = 8192;
const IOVA: u64 = (4 << 30) - PAGES / 2 * PAGE;
/// Bytes of each memory.
pub(super) const MEMORY: u64 = 16 * MIB;
const MEMORIES: u64 = 2;
/// Pages that every device always reaches, far from the others.
pub(super) const HOME: u64 = 6 << 30;
pub(super) const HOME_PAGES: u64 = 4;
/// Bytes of the second memory that lie together.
const CHUNK: u64 = 16 << 10;
/// Bytes of a step of a pin.
const PIECE: u64 = 4 * MIB;
/// One step of so many meets a queue that is stopped.
const STOPPED: u64 = 6;
/// One of so many is another thing than an operation of the generator.
const RARE: u64 = 25;
/// One of so many looks at all pages.
const LOOK: u64 = 10;

/// Cuts leave the rest in place.
const INTACT: Interruption = Interruption::Refused;

thread_local! {
    /// The clock of lazy flushing, which goes on by a step.
    static CLOCK: Cell<u64> = const { Cell::new(0) };
}

fn now() -> Duration {
    CLOCK.with(|clock| Duration::from_millis(clock.get()))
}

/// Lazy flushing: so many holds wait, and so many steps long.
const LAZY: Flushing = Flushing::Lazy {
    holds: 12,
    age: Duration::from_millis(8),
    now,
};

/// An address space, and its shadow.
pub(super) struct Space {
    pub(super) ioas: Ioas,
    pub(super) shadow: Shadow,
    /// Pages that were unmapped and not flushed: devices may find anything there.
    pub(super) stale: Vec<bool>,
    /// Where a page has led before.
    pub(super) led: Vec<Option<u32>>,
    /// Devices may have written there since tracking began.
    pub(super) written: Vec<bool>,
    tracked: bool,
}

/// See the module.
pub(super) struct World<'r> {
    pub(super) rig: &'r Rig,
    pub(super) iommu: Iommu<Handed>,
    gate: Arc<Gate>,
    pub(super) spaces: Vec<Space>,
    /// In which address space a device is.
    pub(super) places: [Option<usize>; DEVICES.len()],
    memories: [Arc<Memory>; MEMORIES as usize],
    ledger: Arc<Ledger>,
    pub(super) random: Rng,
    pub(super) nvme: Option<Nvme<'r>>,
    /// The operation under way, in words.
    pub(super) last: String,
    pub(super) counts: Counts,
}

/// Counts of a life.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Operations.
    pub steps: u64,
    /// Bytes that devices have read or written.
    pub bytes: u64,
    /// Faults that were compared.
    pub faults: u64,
    /// Operations that a stopped queue has failed.
    pub failed: u64,
    /// Drivers that took the unit over.
    pub drivers: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            steps,
            bytes,
            faults,
            failed,
            drivers,
        } = self;
        write!(f, "{steps} | {failed} | {drivers} | {bytes} | {faults}")
    }
}

/// Where the byte at `offset` of the second memory lies, from its beginning on: every second group of four chunks is
/// reversed.
const fn scattered(offset: u64) -> u64 {
    let nth = offset / CHUNK;
    let place = if nth & 4 == 0 { nth } else { nth ^ 3 };
    place * CHUNK + offset % CHUNK
}

impl<'r> World<'r> {
    pub(super) fn new(rig: &'r Rig, seed: u64) -> anyhow::Result<Self> {
        let gate = Gate::new(rig.machine_shared(), rig.registers(), rig.unit());
        let driver = rig.driver(gated(rig, &gate), Arc::clone(rig.structures()), None)?;
        driver.enable()?;
        let unit = Arc::new(Handed::new(driver));
        let LargeTables::None(mapping) = rig.large_tables() else {
            bail!("the memory of larger tables is in use");
        };
        let ledger = Ledger::unlimited();
        let node = Node::new(
            Arc::clone(mapping),
            Pinner::probe(PIECE)?,
            rig.shared_at().start,
        );
        let base = rig.data().start;
        let runs =
            (0..MEMORY / CHUNK).map(|nth| Span::<Pa>::new(base + scattered(nth * CHUNK), CHUNK));
        let memories = [
            Memory::new(Arc::new(node), &ledger),
            Memory::new(Arc::new(FixedRuns::new(runs, PAGE)?), &ledger),
        ];
        let home = Span::<Pa>::new(home_at(rig), HOME_PAGES * PAGE);
        let home = Memory::new(Arc::new(FixedRuns::new([home], PAGE)?), &ledger);
        let ids = DomainIds::new(unit.capabilities().domain_bits);
        let formats = [rig.kind().format];
        let builder = TableBuilder::new(Arc::clone(rig.structures()), ids, formats);
        let iommu = Iommu::with_builder(Arc::clone(&unit), builder);
        let mut spaces = Vec::new();
        for _ in 0..2 {
            let ioas = Ioas::over(&iommu)?;
            ioas.map(HOME, &home, Span::new(0, HOME_PAGES * PAGE), Prot::RW)?;
            let pages = PAGES as usize;
            spaces.push(Space {
                ioas,
                shadow: Shadow::new(pages, (MEMORIES * MEMORY / PAGE) as usize),
                stale: vec![false; pages],
                led: vec![None; pages],
                written: vec![false; pages],
                tracked: false,
            });
        }
        Ok(Self {
            rig,
            iommu,
            gate,
            spaces,
            places: [None; DEVICES.len()],
            memories,
            ledger,
            random: Rng::with_seed(seed),
            nvme: None,
            last: String::new(),
            counts: Counts::default(),
        })
    }

    /// One step, and the checks after it.
    pub(super) fn step(&mut self) -> anyhow::Result<()> {
        CLOCK.with(|clock| clock.set(clock.get() + 1));
        self.counts.steps += 1;
        let number = self.random.usize(..self.spaces.len());
        let changed = match self.random.u64(..RARE) {
            0 => self.change_driver()?,
            1 => self.fill_queue()?,
            _ => self.operate(number)?,
        };
        self.settle();
        self.look_at_areas()?;
        if self.random.u64(..LOOK) == 0 {
            self.look_at_pages()?;
        }
        self.look_at_charge()?;
        self.probe(number, &changed)
    }

    /// An operation of the generator on an address space: the ranges at which something may have changed.
    fn operate(&mut self, number: usize) -> anyhow::Result<Vec<Span<Iova>>> {
        let layout = Layout {
            iova: Span::new(IOVA, PAGES * PAGE),
            memories: MEMORIES,
            memory: MEMORY,
            devices: DEVICES.len() as u64,
        };
        let space = &self.spaces[number].ioas;
        let random = &mut self.random;
        let mut generator = Generator {
            space,
            layout,
            random,
        };
        let Some(operation) = generator.next(layout.iova) else {
            self.last = "nothing".to_owned();
            return Ok(Vec::new());
        };
        let stopped = match self.random.u64(..STOPPED) {
            0 if self.rig.unit().stops() && self.random.bool() => Queue::Illegal,
            0 => Queue::Deaf,
            _ => Queue::Open,
        };
        self.last = format!("space {number}, queue {stopped:?}, {operation:x?}");
        let changing = match &operation {
            Operation::Unmap(range)
            | Operation::UnmapCutting(range)
            | Operation::TakeOut(range) => vec![*range],
            Operation::Release(memory, parts) => self.ranges_over(number, *memory, parts),
            _ => Vec::new(),
        };
        self.warm(number, &changing).context("before it")?;
        self.gate.stop(stopped);
        let (result, changed) = self.make(number, &operation)?;
        if let Ok(Some(change)) = result {
            self.change(number, &changed, change)?;
        }
        if stopped == Queue::Deaf {
            self.before_it_hears(number, &operation, &changed)
                .context("under a deaf queue")?;
        }
        let met = self.gate.open() && stopped != Queue::Open;
        match result {
            Ok(_) => {}
            Err(cause) if met => {
                self.counts.failed += 1;
                self.last.push_str(&format!(": {cause:#}"));
                self.flush_all().context("a flush after a failure")?;
                self.take_over_areas(number)?;
                self.move_again(number, &operation)?;
            }
            Err(cause) => return Err(cause),
        }
        if met {
            // A flush that failed may have been made up for already.
            self.flush_all().context("a flush after a stop")?;
        }
        Ok(changed)
    }

    /// The unit has not heard of the operation: what is done holds all the same, and what is not done stays charged,
    /// since devices may reach it.
    fn before_it_hears(
        &mut self,
        number: usize,
        operation: &Operation,
        changed: &[Span<Iova>],
    ) -> anyhow::Result<()> {
        let moves = matches!(operation, Operation::Attach(_) | Operation::Detach(_));
        let [least, _] = self.to_be_charged();
        let found = self.ledger.in_use();
        ensure!(
            moves || least <= found,
            "{found:#x} bytes are charged, not {least:#x}"
        );
        self.settle();
        if self.spaces[number].ioas.retired() == 0 && !moves {
            self.warm(number, changed)?;
        }
        Ok(())
    }

    /// Calls the address space. Yields what came of it, an error only if a stopped queue explains it, and where.
    #[expect(clippy::type_complexity, reason = "the two errors have two readers")]
    fn make(
        &mut self,
        number: usize,
        operation: &Operation,
    ) -> anyhow::Result<(anyhow::Result<Option<Change>>, Vec<Span<Iova>>)> {
        let pages = |range: &Span<Iova>| pages_of(*range);
        let Space { ioas, shadow, .. } = &self.spaces[number];
        let one = |range: &Span<Iova>| vec![*range];
        Ok(match operation {
            Operation::Map(map) => {
                let memory = &self.memories[map.memory];
                let free = shadow.is_free(pages(&map.range));
                let result = ioas.map(map.range.start, memory, map.part, map.prot);
                let change = Change::Map {
                    first: pages(&map.range).start,
                    memory: (map.memory as u64 * MEMORY / PAGE + map.part.start / PAGE) as usize,
                    write: map.prot.contains(Prot::WRITE),
                };
                let result = match result {
                    Err(ioas::MapError::Overlap { .. }) if !free => Ok(None),
                    Ok(()) => {
                        ensure!(free, "mapped over an area");
                        Ok(Some(change))
                    }
                    Err(cause) => Err(cause.into()),
                };
                (result, one(&map.range))
            }
            Operation::Unmap(range) => {
                let result = ioas.unmap(*range).map(|_| Some(Change::Unmap));
                (result.map_err(Into::into), one(range))
            }
            Operation::UnmapCutting(range) => {
                let result = ioas.unmap_cutting(*range, INTACT);
                (
                    result.map(|_| Some(Change::Unmap)).map_err(Into::into),
                    one(range),
                )
            }
            Operation::TakeOut(range) => {
                let result = ioas.take_out(*range, INTACT);
                (
                    result.map(|_| Some(Change::TakeOut)).map_err(Into::into),
                    one(range),
                )
            }
            Operation::PutBack(range) => {
                let result = ioas.put_back(*range, INTACT);
                (
                    result.map(|()| Some(Change::PutBack)).map_err(Into::into),
                    one(range),
                )
            }
            Operation::Release(memory, parts) => {
                let ranges = self.ranges_over(number, *memory, parts);
                let mut kept = None;
                ioas.release(&ranges, INTACT, &mut |range, cause| {
                    kept.get_or_insert((range, cause));
                });
                let result = match kept {
                    None => Ok(Some(Change::Release)),
                    Some((range, cause)) => {
                        Err(anyhow::Error::new(cause).context(format!("{range} is kept")))
                    }
                };
                (result, ranges)
            }
            Operation::Restore(memory, parts) => {
                let ranges = self.ranges_over(number, *memory, parts);
                let mut failed = None;
                ioas.restore(&ranges, INTACT, &mut |range, cause| {
                    failed.get_or_insert((range, cause));
                });
                let result = match failed {
                    None => Ok(Some(Change::Restore)),
                    Some((range, cause)) => {
                        Err(anyhow::Error::new(cause).context(format!("{range} is not back")))
                    }
                };
                (result, ranges)
            }
            Operation::Attach(device) => (self.attach(number, *device), Vec::new()),
            Operation::Detach(device) => (self.detach(*device).map(|()| None), Vec::new()),
            Operation::Track(leaf) => {
                let tracking = Tracking {
                    leaf: *leaf,
                    interruption: INTACT,
                };
                let result = ioas.track_dirty(tracking);
                let space = &mut self.spaces[number];
                space.tracked |= result.is_ok();
                (result.map(|()| None).map_err(Into::into), Vec::new())
            }
            Operation::Untrack => {
                ioas.untrack_dirty();
                let space = &mut self.spaces[number];
                space.tracked = false;
                (Ok(None), Vec::new())
            }
            Operation::Harvest(range) => (self.harvest(number, *range)?, Vec::new()),
            Operation::SetLazy(lazy) => {
                ioas.set_flushing(if *lazy { LAZY } else { Flushing::Strict });
                (Ok(None), Vec::new())
            }
            Operation::Flush => (ioas.flush().map(|_| None).map_err(Into::into), Vec::new()),
            Operation::Poll => (ioas.poll().map(|_| None).map_err(Into::into), Vec::new()),
            Operation::Place(placement) => {
                ioas.set_placement(*placement)?;
                (Ok(None), Vec::new())
            }
        })
    }

    /// The device addresses at which areas of an address space lead to parts of a memory.
    fn ranges_over(&self, number: usize, memory: usize, parts: &[Span<Offset>]) -> Vec<Span<Iova>> {
        let areas = self.spaces[number].ioas.areas();
        let mut ranges = Vec::new();
        for area in areas {
            if !Arc::ptr_eq(area.memory(), &self.memories[memory]) {
                continue;
            }
            for part in parts {
                if let Some(both) = area.part().intersection(part) {
                    let start = area.range().start + (both.start - area.part().start);
                    ranges.push(Span::new(start, both.len));
                }
            }
        }
        ranges.sort_by_key(|range| range.start);
        ranges
    }

    /// A device comes into an address space, perhaps from the other one.
    fn attach(&mut self, number: usize, device: usize) -> anyhow::Result<Option<Change>> {
        if self.places[device] == Some(number) {
            let again = self.spaces[number]
                .ioas
                .attach(self.iommu.device(id(device)));
            ensure!(again.is_err(), "attached twice");
            return Ok(None);
        }
        self.detach(device)?;
        let endpoint = self.iommu.device(id(device));
        self.spaces[number].ioas.attach(endpoint)?;
        self.places[device] = Some(number);
        Ok(None)
    }

    fn detach(&mut self, device: usize) -> anyhow::Result<()> {
        let Some(number) = self.places[device] else {
            return Ok(());
        };
        self.spaces[number].ioas.detach(id(device))?;
        self.places[device] = None;
        Ok(())
    }

    /// A device that did not come or leave, since the queue was stopped, does so now.
    fn move_again(&mut self, number: usize, operation: &Operation) -> anyhow::Result<()> {
        match *operation {
            Operation::Attach(device) => {
                let endpoints = self.spaces[number].ioas.endpoints();
                if endpoints.contains(&id(device).into()) {
                    self.places[device] = Some(number);
                    self.detach(device)
                        .context("a detach after a failed attach")?;
                }
                self.attach(number, device)
                    .context("an attach after a failure")?;
            }
            Operation::Detach(device) => {
                self.detach(device).context("a detach after a failure")?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Harvests: no page is found to which no device has written, or the unit cannot tell.
    fn harvest(
        &mut self,
        number: usize,
        range: Span<Iova>,
    ) -> anyhow::Result<anyhow::Result<Option<Change>>> {
        let knows = self.iommu.unit().capabilities().dirty_tracking;
        let space = &mut self.spaces[number];
        if !space.tracked {
            return Ok(Ok(None));
        }
        let pages = pages_of(range);
        let mut pending = Pending::new(vec![0u64; pages.len().div_ceil(64)], range, PAGE)?;
        let found = match space.ioas.harvest(&mut pending) {
            Ok(found) => found,
            Err(HarvestError::Table(DirtyError::InsideLeaf { .. })) => return Ok(Ok(None)),
            Err(cause) => return Ok(Err(cause.into())),
        };
        let shown = match space.ioas.show(&mut pending) {
            Ok(shown) => shown,
            Err(cause) => return Ok(Err(cause.into())),
        };
        let live = space.ioas.is_live();
        ensure!(
            !live || found.blind != knows,
            "blind: {}, though the unit can tell: {knows}",
            found.blind
        );
        if knows && !found.blind {
            for (nth, page) in pages.enumerate() {
                let dirty = shown.words()[nth / 64] >> (nth % 64) & 1 == 1;
                ensure!(
                    !dirty || space.written[page],
                    "page {page} is dirty, and was never written to"
                );
            }
        }
        shown.acknowledge();
        Ok(Ok(None))
    }

    /// The next driver takes the unit over; what was attached and mapped stays.
    fn change_driver(&mut self) -> anyhow::Result<Vec<Span<Iova>>> {
        self.last = "another driver".to_owned();
        let (rig, gate) = (self.rig, &self.gate);
        self.iommu.unit().change(|frozen| {
            rig.driver(gated(rig, gate), Arc::clone(rig.structures()), Some(frozen))
        })?;
        self.counts.drivers += 1;
        for (device, place) in self.places.iter().enumerate() {
            if place.is_some() {
                let again = self.spaces[0].ioas.attach(self.iommu.device(id(device)));
                ensure!(again.is_err(), "device {device} is attached twice");
            }
        }
        Ok(Vec::new())
    }

    /// A queue that is deaf takes commands until it is full, and says so; open again, it takes the next one.
    fn fill_queue(&mut self) -> anyhow::Result<Vec<Span<Iova>>> {
        self.last = "a full queue".to_owned();
        let Some(number) = self.places.iter().flatten().next().copied() else {
            return Ok(Vec::new());
        };
        let domains = self.spaces[number].ioas.tables(|domain, _| domain);
        let domain = *domains
            .first()
            .context("an attached device has no domain")?;
        self.gate.stop(Queue::Deaf);
        let mut full = None;
        for _ in 0..4096 {
            match self.iommu.unit().invalidate_domain(domain) {
                Err(FlushError::Unit {
                    cause: UnitError::TimedOut { .. },
                    ..
                }) => {}
                other => {
                    full = Some(other);
                    break;
                }
            }
        }
        self.gate.open();
        ensure!(
            matches!(
                full,
                Some(Err(FlushError::Unit {
                    cause: UnitError::QueueFull { .. },
                    ..
                }))
            ),
            "a deaf queue ends with {full:?}"
        );
        self.iommu.unit().invalidate_domain(domain)?;
        Ok(Vec::new())
    }

    /// Both address spaces flush what waits, which must succeed.
    fn flush_all(&self) -> anyhow::Result<()> {
        for space in &self.spaces {
            space.ioas.flush()?;
        }
        Ok(())
    }

    /// The operation has made its change.
    fn change(
        &mut self,
        number: usize,
        ranges: &[Span<Iova>],
        change: Change,
    ) -> anyhow::Result<()> {
        let waits = self.spaces[number].ioas.retired() > 0;
        let space = &mut self.spaces[number];
        for range in ranges {
            for page in pages_of(*range) {
                let was = space.shadow[page].filter(Page::is_there);
                ensure!(
                    change.apply(page, &mut space.shadow[page]),
                    "page {page}: a map over an area"
                );
                let is = space.shadow[page].filter(Page::is_there);
                space.led[page] = is.or(was).map(|page| page.memory).or(space.led[page]);
                space.stale[page] = was.is_some() && is.is_none() && waits;
                space.written[page] &= was == is;
            }
        }
        Ok(())
    }

    /// After a flush no device finds what was unmapped.
    fn settle(&mut self) {
        for space in &mut self.spaces {
            if space.ioas.retired() == 0 {
                space.stale.fill(false);
            }
        }
    }

    /// Where a page of memory lies in the machine.
    pub(super) fn address(&self, memory: u32) -> u64 {
        let offset = u64::from(memory) * PAGE;
        match offset.checked_sub(MEMORY) {
            None => self.rig.shared_at().start + offset,
            Some(offset) => self.rig.data().start + scattered(offset),
        }
    }

    /// All devices go, then all areas; nothing is left, of charge, tables or faults.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        "the end".clone_into(&mut self.last);
        self.nvme = None;
        for device in 0..DEVICES.len() {
            self.detach(device)?;
        }
        for space in self.spaces.drain(..) {
            space.ioas.close()?;
        }
        ensure!(
            self.ledger.in_use() == 0,
            "{:#x} bytes stay charged",
            self.ledger.in_use()
        );
        let mut faults = 0;
        self.iommu.unit().drain_faults(&mut |_| faults += 1);
        ensure!(faults == 0, "{faults} faults are left");
        self.iommu.unit().disable()?;
        self.rig.live(self.counts);
        self.rig.finish()
    }
}

fn gated(rig: &Rig, gate: &Arc<Gate>) -> Gated {
    Gated {
        registers: rig.registers(),
        gate: Arc::clone(gate),
    }
}

/// Where the pages that every device reaches are in the machine.
pub(super) fn home_at(rig: &Rig) -> u64 {
    rig.data().start + MEMORIES * MEMORY
}

/// The pages of a range, by number.
pub(super) fn pages_of(range: Span<Iova>) -> Range<usize> {
    let first = ((range.start - IOVA) / PAGE) as usize;
    first..first + (range.len / PAGE) as usize
}

/// The device address of a page.
pub(super) const fn iova_of(page: usize) -> u64 {
    IOVA + page as u64 * PAGE
}

/// How many pages there are.
pub(super) const fn pages() -> usize {
    PAGES as usize
}
