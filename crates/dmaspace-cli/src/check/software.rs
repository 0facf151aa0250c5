//! The check over tables of our own, walked by the software unit for devices that are threads.
//!
//! Devices reach memory by what its pins say ([`Frames`]) and not by what a page table says: a wrong entry leads to wrong
//! data. While memory is in a hole its old place stays known, so that a translation that should have been flushed is
//! found; before it comes back, it is forgotten.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};

use dmaspace::balloon::BalloonDma;
use hostmem::{Discard, FrameSource, Machine, Mapping, Pinner};
use ioas::{
    BuildDomain, Cause, Endpoint, HostMemory, HostTables, Ioas, Ledger, MappedStorage, Memory,
    NodeTables, Tracking, WhenUnmapped,
};
use iommu::{DeviceId, DomainId, NodeId, RunMap, SoftwareConfig, SoftwareUnit, Unit};
use iopt::{AnyTable, Interruption, Prot, TABLE_BYTES};
use runs::{Bytes, GuestAddr, Iova, Joiner, Offset, PageSizes, Run, SizeHistogram, Span};
use virtio_balloon::{MemoryMap, Part, Region, Releaser as _};

use super::devices::Dma;
use super::job::{Job, PROBE, StepOf, Times, dirty, timed};
use super::memory::{Account, PIECE, take};
use super::report::{DomainReport, Done, NodeShare, Step, TablesReport, nodes};
use super::{Because as _, CheckError, PAGE, Software, times};
use crate::size::{classes, count, counted};

/// Where the memory is mapped: a multiple of every leaf size.
const IOVA: u64 = 1 << 40;
/// Addresses of tables: above all memory, and above what stands in for frames.
const TABLE_WINDOW: u64 = 1 << 46;
/// 48 bits of addresses.
const LEVELS: u8 = 4;
const RUNS: &str = "cannot find the physical runs of pinned memory";
const BALLOON: &str = "cannot describe the memory to a balloon";
const TABLE_MEMORY: &str = "cannot get memory for the page tables";

/// All steps but the first and the last.
pub(super) const STEPS: &[StepOf<OwnTables>] = &[
    (Step::Attach, OwnTables::attach),
    (Step::Pin, OwnTables::pin),
    (Step::FindRuns, OwnTables::find_runs),
    (Step::Map, OwnTables::map),
    (Step::Dma, OwnTables::begin),
    (Step::Hole, OwnTables::hole),
    (Step::CloseHole, OwnTables::close_hole),
    (Step::Track, OwnTables::track),
    (Step::Harvest, OwnTables::harvest),
    (Step::Merge, OwnTables::merge),
    (Step::Release, OwnTables::release),
    (Step::Restore, OwnTables::restore),
    (Step::Unmap, OwnTables::unmap),
];

pub(super) fn check(job: &mut Job<'_>, software: Software) -> Result<(), CheckError> {
    let pinner = Arc::new(Pinner::probe(PIECE).failed("cannot pin memory")?);
    let account = Account::of_pinner(&pinner)?;
    job.report.memory.pin = pinner.kind().to_string();
    job.report.memory.pin_reason = pinner.why().map(Into::into);
    let mapping = take(job, &account)?;
    let mut own = OwnTables::new(software, mapping, &pinner, account.ledger()?)?;
    own.space
        .set_placement(job.asked.placement.unwrap_or_default())
        .map_err(CheckError::input)?;
    for (step, work) in STEPS {
        job.step(*step, |job| {
            let done = work(&mut own, job);
            job.report.dma = Some(own.dma.report());
            done
        })?;
    }
    if job.asked.times {
        let (source, most) = (own.source, own.memory.len());
        let host = |mapping| HostMemory::with_pinner(mapping, Arc::clone(&pinner), source);
        times::measure(&own.space, |_| Some(IOVA), &own.ledger, &host, most, job)?;
    }
    let OwnTables {
        balloon,
        space,
        tables,
        memory,
        runs,
        ..
    } = own;
    job.step(Step::Close, |job| {
        drop(balloon);
        let space = Arc::into_inner(space);
        let pages = || tables.in_use();
        job.close(space, &memory, pages, "ledger, pins, tables, kernel: 0")
    })?;
    let size = memory.len();
    let storage = MappedStorage::new(table_bytes(size), None).failed(TABLE_MEMORY)?;
    let beside = HostTables::new(storage, TABLE_WINDOW);
    let beside = Arc::new(beside.failed("cannot use the memory for the page tables")?);
    let table = AnyTable::new(software.format, LEVELS, page_sizes(software), beside);
    let table = table.failed("cannot build a page table")?;
    job.report.compared = Some(times::compare(table, &runs, Span::new(IOVA, size), job)?);
    Ok(())
}

/// A part of a mapping that is one physical run.
#[derive(Debug)]
struct Piece {
    mapping: Arc<Mapping>,
    words: std::ops::Range<usize>,
}

impl AsRef<[AtomicU64]> for Piece {
    fn as_ref(&self) -> &[AtomicU64] {
        self.mapping.cells().get(self.words.clone()).unwrap_or(&[])
    }
}

/// Physical memory as the devices reach it.
type Frames = Arc<RwLock<RunMap<Piece>>>;

/// Builds a table for each domain.
struct Builder {
    software: Software,
    memory: Arc<NodeTables>,
    next: u32,
}

impl BuildDomain for Builder {
    fn build(
        &mut self,
        _unit: &dyn Unit,
        _dirty: bool,
        node: Option<NodeId>,
    ) -> Result<(DomainId, AnyTable), Cause> {
        let sizes = page_sizes(self.software);
        let memory = self.memory.memory(node)?;
        let table = AnyTable::new(self.software.format, LEVELS, sizes, memory)?;
        self.next += 1;
        Ok((DomainId(self.next), table))
    }

    /// Numbers are not used again: there are more than a check has domains.
    fn ended(&mut self, _domain: DomainId) {}
}

/// Everything that is there while it is mapped. Dropped in this order: devices stop first.
pub(super) struct OwnTables {
    dma: Dma,
    balloon: BalloonDma,
    space: Arc<Ioas>,
    unit: Arc<SoftwareUnit<Arc<NodeTables>, Frames>>,
    frames: Frames,
    tables: Arc<NodeTables>,
    memory: Arc<Memory>,
    mapping: Arc<Mapping>,
    source: FrameSource,
    discard: Discard,
    ledger: Arc<Ledger>,
    software: Software,
    devices: Vec<DeviceId>,
    /// Times of the call that pins, finds runs and maps.
    times: Times,
    /// Leaves by size of each table, before something was cut out of them.
    leaves: Vec<SizeHistogram>,
    hole: Span<Iova>,
    runs: Vec<Run>,
}

impl OwnTables {
    fn new(
        software: Software,
        mapping: Arc<Mapping>,
        pinner: &Arc<Pinner>,
        ledger: Arc<Ledger>,
    ) -> Result<Self, CheckError> {
        let source = FrameSource::detect(&mapping);
        let discard = Discard::new(Arc::clone(&mapping)).failed("cannot discard memory")?;
        let host = HostMemory::with_pinner(Arc::clone(&mapping), Arc::clone(pinner), source);
        let memory = Memory::new(Arc::new(host), &ledger);
        // Leaves of 4 KiB, and as many tables set aside for what is released.
        let tables = NodeTables::new(2 * table_bytes(mapping.len()), TABLE_WINDOW);
        let tables = Arc::new(tables);
        let space = Arc::new(Ioas::over_tables(Builder {
            software,
            memory: Arc::clone(&tables),
            next: 0,
        }));
        let mut balloon = BalloonDma::new();
        balloon.add_space(Arc::clone(&space));
        let frames: Frames = Arc::new(RwLock::new(RunMap::new([]).failed(RUNS)?));
        let mut config = SoftwareConfig::default();
        config.capabilities.dirty_tracking = true;
        // Not every format has a bit for it.
        config.capabilities.snoop_control = false;
        let unit = SoftwareUnit::with_config(Arc::clone(&tables), Arc::clone(&frames), config);
        Ok(Self {
            dma: Dma::new(software.devices, Span::new(IOVA, mapping.len())),
            balloon,
            space,
            unit: Arc::new(unit),
            frames,
            tables,
            memory,
            mapping,
            source,
            discard,
            ledger,
            software,
            devices: Vec::new(),
            times: Times::default(),
            leaves: Vec::new(),
            hole: Span::default(),
            runs: Vec::new(),
        })
    }

    fn range(&self) -> Span<Iova> {
        Span::new(IOVA, self.memory.len())
    }

    /// Leaves by size of each table, and how many there are.
    fn leaves_now(&self) -> (Vec<SizeHistogram>, String) {
        let leaves = self.space.tables(|_, table| table.leaf_sizes());
        let number = leaves.iter().map(|sizes| sizes.total().count).sum();
        (leaves, counted(number, "leaf"))
    }

    /// A step after which leaves are those that they were at first.
    fn merged(&self, bytes: u64, took_ns: u64) -> Done {
        let (now, leaves) = self.leaves_now();
        let right = now == self.leaves;
        Done::new(bytes, took_ns, right, format!("{leaves} again"))
    }

    /// Notes where memory that is mapped at these addresses lies. Everything else is forgotten.
    fn find_frames(&self, mapped: &[Span<Iova>]) -> Result<(), CheckError> {
        let mut pieces = Vec::new();
        let mut batch = vec![Span::default(); 4096];
        for range in mapped.iter().filter(|range| !range.is_empty()) {
            let pin = self.space.pin(*range, Prot::READ, WhenUnmapped::Keeps);
            for hold in pin.failed("cannot hold memory that is mapped")?.holds() {
                let mut offset = hold.part().start;
                hold.with_runs(hold.part(), |reader| {
                    loop {
                        let found = reader.next_batch(&mut batch).failed(RUNS)?;
                        for run in batch.get(..found).unwrap_or_default() {
                            let words = (offset / 8) as usize..((offset + run.len) / 8) as usize;
                            let mapping = Arc::clone(&self.mapping);
                            pieces.push((run.start, Piece { mapping, words }));
                            offset += run.len;
                        }
                        if found == 0 {
                            return Ok::<_, CheckError>(());
                        }
                    }
                })?;
            }
        }
        let known = RunMap::new(pieces).failed(RUNS)?;
        *self.frames.write().unwrap_or_else(PoisonError::into_inner) = known;
        Ok(())
    }

    fn attach(&mut self, _job: &mut Job<'_>) -> Result<Done, CheckError> {
        let nodes = Machine::probe().failed(PROBE)?.nodes;
        let (attached, took_ns) = timed(|| {
            (0..self.software.devices).try_for_each(|n| {
                // Bus 1; at the nodes that have memory, in turn.
                let device = DeviceId(1 << 8 | n);
                self.devices.push(device);
                let near = nodes.get(n as usize % nodes.len().max(1));
                let near = near.map(|node| NodeId(*node));
                let unit = Arc::clone(&self.unit) as Arc<dyn Unit>;
                let endpoint = Endpoint::from((unit, device)).near(near);
                self.space.attach(endpoint)
            })
        });
        attached.failed("cannot attach a device")?;
        let tables = self.space.places().len() as u64;
        let devices = counted(self.devices.len() as u64, "device");
        let checked = format!("{devices}, {}", counted(tables, "table"));
        Ok(Done::new(0, took_ns, tables > 0, checked))
    }

    /// Pins, finds the runs and maps, in one call.
    fn pin(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        self.times = job.map(&self.space, IOVA, &self.memory, &self.ledger)?;
        self.find_frames(&[self.range()])?;
        let charged = job.report.memory.charged_bytes;
        let steps = job.report.memory.charge_steps;
        let took_ns = self.times.of(&[ioas::Step::Charge, ioas::Step::Pin]);
        // The kernel's own count is reported, not judged: Linux 7.2 counts nothing for who has CAP_IPC_LOCK.
        let right = steps == 1 && charged >= self.memory.len();
        let (bytes, steps) = (Bytes(charged), counted(steps, "step"));
        let pages = count(self.memory.len() / PAGE);
        let checked = format!("{bytes} charged in {steps}, not {pages}");
        Ok(Done::new(charged, took_ns, right, checked))
    }

    fn find_runs(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let (range, runs, mut joiner) = (self.range(), &mut self.runs, Joiner::new());
        self.space.with_table(|table| {
            table.for_each_leaf(range, |leaf| runs.extend(joiner.push(leaf.run)));
        });
        runs.extend(joiner.finish());
        let (number, bytes) = (runs.len() as u64, runs.iter().map(|run| run.len).sum());
        job.report.memory.runs = Some(number);
        let took_ns = self.times.of(&[ioas::Step::FindRuns]);
        let right = bytes == range.len;
        Ok(Done::new(bytes, took_ns, right, counted(number, "run")))
    }

    fn map(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let (leaves, number) = self.leaves_now();
        let pages = self.space.tables(|_, table| (table.root(), table.tables()));
        let table_pages: u64 = pages.iter().map(|(_, pages)| pages).sum();
        let places = self.space.places();
        let first = places.first().and_then(|place| place.tables);
        job.report.tables = Some(TablesReport {
            format: self.software.format.name(),
            levels: pages.first().map_or(0, |(root, _)| root.levels),
            leaves: leaves.first().map(classes).unwrap_or_default(),
            table_pages,
            nodes: self.nodes_of(first)?,
        });
        let misplaced = self.tables.misplaced();
        let misplaced = misplaced.iter().map(ToString::to_string).collect();
        let mut each = pages.iter();
        job.place(&self.space, misplaced, |place| {
            Ok(DomainReport {
                table_bytes: each.next().map(|(_, pages)| pages * TABLE_BYTES),
                nodes: Some(self.nodes_of(place.tables)?),
                ..DomainReport::default()
            })
        })?;
        let bytes: u64 = leaves.iter().map(|sizes| sizes.total().bytes).sum();
        let sizes = leaves.iter().flat_map(|sizes| sizes.iter());
        let largest = sizes.map(|(size, _)| size).max().unwrap_or(0);
        self.leaves = leaves;
        let allowed = self.software.max_leaf.unwrap_or(u64::MAX);
        let right = bytes == self.memory.len() * pages.len() as u64 && largest <= allowed;
        let pages = counted(table_pages, "table page");
        let checked = format!("{number} of up to {}, {pages}", Bytes(largest));
        let took_ns = self.times.of(&[ioas::Step::FillTables]);
        Ok(Done::new(bytes, took_ns, right, checked))
    }

    /// Nodes of table memory that was asked to lie on `node`.
    fn nodes_of(&self, node: Option<NodeId>) -> Result<Vec<NodeShare>, CheckError> {
        let memory = self.tables.memory(node).failed(TABLE_MEMORY)?;
        nodes(memory.storage().mapping())
    }

    fn begin(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let ports = self.devices.iter().map(|device| self.unit.port(*device));
        let (ports, dma) = (ports.collect(), &mut self.dma);
        let (begun, took_ns) = timed(|| {
            dma.start(ports, &self.mapping, job)?;
            dma.see_by_each(dma.everywhere(), job)
        });
        begun?;
        let report = dma.report();
        let devices = self.devices.len() as u64;
        let right = report.read_bytes >= self.memory.len() * devices;
        let checked = format!("each of {} had every page", counted(devices, "device"));
        let bytes = report.read_bytes + report.written_bytes;
        Ok(Done::new(bytes, took_ns, right, checked))
    }

    /// A page in the middle of the largest leaf.
    fn hole(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let mut largest = Span::<Iova>::default();
        self.space.tables(|_, table| {
            table.for_each_leaf(self.range(), |leaf| {
                if leaf.run.len > largest.len {
                    largest = leaf.run.input();
                }
            });
        });
        let hole = Span::new(largest.start + ((largest.len / 2) & !(PAGE - 1)), PAGE);
        self.hole = hole;
        self.dma.expect(|scene| scene.moving = Some(hole));
        let (out, took_ns) = timed(|| self.space.take_out(hole, Interruption::Refused));
        let unpinned = out.failed("cannot unmap a page")?;
        let faults = self.dma.meet_hole(hole, job)?;
        let (leaves, number) = self.leaves_now();
        let mut both = leaves.iter().zip(&self.leaves);
        let less = both.all(|(now, was)| now.total().bytes + PAGE == was.total().bytes);
        let right = less && unpinned == PAGE && faults >= 2 * self.devices.len() as u64;
        let checked = format!("out of a leaf of {}; now {number}", Bytes(largest.len));
        Ok(Done::new(unpinned, took_ns, right, checked))
    }

    /// Maps by `how` what was a hole: until that is done, an access may fault.
    fn mapped_again(
        &mut self,
        hole: Span<Iova>,
        how: impl FnOnce(&mut Self) -> Result<(), CheckError>,
    ) -> Result<u64, CheckError> {
        let range = self.range();
        let end = range.start + range.len;
        let (below, above) = (hole.start - range.start, hole.start + hole.len);
        self.find_frames(&[Span::new(range.start, below), Span::new(above, end - above)])?;
        self.dma
            .expect(|scene| (scene.moving, scene.hole) = (Some(hole), None));
        let (done, took_ns) = timed(|| how(self));
        done?;
        self.find_frames(&[range])?;
        self.dma.expect(|scene| scene.moving = None);
        Ok(took_ns)
    }

    fn close_hole(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let hole = self.hole;
        let took_ns = self.mapped_again(hole, |own| {
            let back = own.space.put_back(hole, Interruption::Refused);
            back.map_err(|cause| CheckError::of_map(cause, Step::CloseHole))
        })?;
        self.dma.see_by_each(hole, job)?;
        Ok(self.merged(PAGE, took_ns))
    }

    /// An eighth of the memory, to which alone devices write while it is tracked.
    fn hot(&self) -> Span<Iova> {
        let len = self.memory.len();
        let eighth = ((len / 8) & !(PAGE - 1)).max(PAGE);
        Span::new(IOVA + ((len / 4) & !(PAGE - 1)), eighth)
    }

    fn track(&mut self, _job: &mut Job<'_>) -> Result<Done, CheckError> {
        let hot = self.hot();
        self.dma.expect(|scene| scene.writes = hot);
        self.dma.take_written();
        let tracking = Tracking {
            leaf: Some(PAGE),
            interruption: Interruption::Refused,
        };
        let (tracked, took_ns) = timed(|| self.space.track_dirty(tracking));
        tracked.failed("cannot track dirty pages")?;
        let (leaves, number) = self.leaves_now();
        let mut sizes = leaves.iter().flat_map(|sizes| sizes.iter());
        let right = sizes.all(|(size, _)| size == PAGE);
        let checked = format!("{number} of {}", Bytes(PAGE));
        Ok(Done::new(self.memory.len(), took_ns, right, checked))
    }

    /// Every page that was written to is dirty and no other; and when nothing is written any more, none is. Where a unit
    /// cannot tell, that is an error of the unit here.
    fn harvest(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let (range, hot, dma) = (self.range(), self.hot(), &self.dma);
        dma.see(hot, job)?;
        let (harvested, took_ns) = timed(|| dirty(&self.space, range));
        let (pages, bytes, blind) = harvested?;
        let same = pages == dma.take_written();
        dma.expect(|scene| scene.writes = Span::new(IOVA, 0));
        dirty(&self.space, range)?;
        dma.see(hot, job)?;
        let (_, none, _) = dirty(&self.space, range)?;
        let right = same && !blind && bytes == hot.len && none == 0;
        let pages = counted(bytes / PAGE, "page");
        let checked = format!("{pages} as written, then {}", Bytes(none));
        Ok(Done::new(bytes, took_ns, right, checked))
    }

    fn merge(&mut self, _job: &mut Job<'_>) -> Result<Done, CheckError> {
        let range = self.range();
        let ((), took_ns) = timed(|| self.space.untrack_dirty());
        self.dma.expect(|scene| scene.writes = range);
        Ok(self.merged(range.len, took_ns))
    }

    /// All but the first eighth, in whole pages of what backs it; or all of a single page.
    fn ballooned(&self) -> Span<Offset> {
        let len = self.memory.len();
        let eighth = (len / 8).next_multiple_of(self.discard.page());
        let start = if eighth < len { eighth } else { 0 };
        Span::new(start, len - start)
    }

    /// The guest's memory, at guest addresses that are those of devices.
    fn regions(&self) -> [Region<Arc<Memory>>; 1] {
        [Region {
            guest: Span::<GuestAddr>::new(IOVA, self.memory.len()),
            page: self.discard.page(),
            memory: Arc::clone(&self.memory),
        }]
    }

    fn release(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let (part, regions) = (self.ballooned(), self.regions());
        let map = MemoryMap::new(&regions).failed(BALLOON)?;
        let hole = Span::new(IOVA + part.start, part.len);
        self.dma.expect(|scene| scene.moving = Some(hole));
        let mut kept = 0;
        let (discarded, took_ns) = timed(|| {
            let parts = [Part::new(0, part)];
            let balloon = &mut self.balloon;
            balloon.release(map, &parts, &mut |part, _| kept += part.offsets.len);
            if kept > 0 {
                return Ok(());
            }
            let discarded = self
                .discard
                .discard(&[part], &mut |part, _| kept += part.len);
            discarded.map(drop)
        });
        discarded.failed("cannot discard memory")?;
        if kept > 0 {
            return Ok(Done::new(
                0,
                took_ns,
                false,
                format!("{} were kept", Bytes(kept)),
            ));
        }
        let faults = self.dma.meet_hole(hole, job)?;
        self.dma.zeroed(hole);
        let held = self.memory.held();
        let right = held == self.memory.len() - part.len
            && faults >= 2 * self.devices.len() as u64 * part.len / PAGE;
        let checked = format!("{} stay pinned", Bytes(held));
        Ok(Done::new(part.len, took_ns, right, checked))
    }

    fn restore(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let (part, regions) = (self.ballooned(), self.regions());
        let map = MemoryMap::new(&regions).failed(BALLOON)?;
        let mut failed = 0;
        let took_ns = self.mapped_again(Span::new(IOVA + part.start, part.len), |own| {
            let parts = [Part::new(0, part)];
            let balloon = &mut own.balloon;
            balloon.restore(map, &parts, &mut |part, _| failed += part.offsets.len);
            Ok(())
        })?;
        self.dma.see_by_each(self.dma.everywhere(), job)?;
        let held = self.memory.held();
        let right = failed == 0 && held == self.memory.len();
        let checked = format!("{} pinned again, zeros found", Bytes(held));
        Ok(Done::new(part.len, took_ns, right, checked))
    }

    /// Devices go on, meet faults everywhere, and stop; the processor compares all that they have written.
    fn unmap(&mut self, job: &mut Job<'_>) -> Result<Done, CheckError> {
        let range = self.range();
        self.dma.expect(|scene| scene.moving = Some(range));
        let (unmapped, took_ns) = timed(|| self.space.unmap_all());
        unmapped.failed("cannot unmap the memory")?;
        self.dma.meet_hole(range, job)?;
        self.dma.stop();
        self.dma.compare(&self.mapping, job)?;
        let checked = format!("{} compared by the processor", Bytes(range.len));
        let right = self.memory.held() == 0;
        Ok(Done::new(range.len, took_ns, right, checked))
    }
}

/// Bytes of the most tables that `size` bytes can need, in leaves of 4 KiB.
fn table_bytes(size: u64) -> u64 {
    let leaf_tables = size.div_ceil(2 << 20) + 1;
    let upper = leaf_tables.div_ceil(512) * 2 + u64::from(LEVELS);
    (leaf_tables + upper) * TABLE_BYTES
}

fn page_sizes(software: Software) -> PageSizes {
    PageSizes::from_bits(u64::MAX).up_to(software.max_leaf.unwrap_or(u64::MAX))
}
