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
    BuildDomain, Cause, Endpoint, Hold, HostMemory, HostTables, Ioas, Ledger, MappedStorage,
    Memory, NodeTables, Tracking, WhenUnmapped,
};
use iommu::{
    BadTarget, Config, DeviceId, DomainId, NodeId, RunMap, SoftwareUnit, TargetMemory, Unit,
};
use iopt::{AnyTable, Interruption, Pending, Prot, TABLE_BYTES};
use runs::{Bytes, GuestAddr, Iova, Joiner, Offset, Pa, PageSizes, Run, SizeHistogram, Span};
use virtio_balloon::{Dma as _, MemoryMap, Part, Region};

use super::compared::compare;
use super::devices::Dma;
use super::job::{Clock, Steps, timed};
use super::report::{
    CheckReport, Counted, DmaReport, DomainReport, Done, Left, NodeShare, PlacementReport, Step,
    TablesReport, TimesReport, nodes,
};
use super::{CheckError, CheckJob, PAGE, Software, Watch, times};
use crate::size::{classes, count, counted};

/// Where the memory is mapped: a multiple of every leaf size.
const IOVA: u64 = 1 << 40;
/// Addresses of tables: above all memory, and above what stands in for frames.
const TABLE_WINDOW: u64 = 1 << 46;
/// 48 bits of addresses.
const LEVELS: u8 = 4;

/// All steps after [`Step::Memory`].
pub(super) const ALL_STEPS: &[Step] = &[
    Step::Attach,
    Step::Pin,
    Step::FindRuns,
    Step::Map,
    Step::Dma,
    Step::Hole,
    Step::CloseHole,
    Step::Track,
    Step::Harvest,
    Step::Merge,
    Step::Release,
    Step::Restore,
    Step::Unmap,
    Step::Close,
];

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
#[derive(Clone, Default)]
struct Frames(Arc<RwLock<Option<RunMap<Piece>>>>);

impl TargetMemory for Frames {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let nothing = BadTarget {
            address: span.start,
        };
        known.as_ref().ok_or(nothing)?.with_cells(span, visit)
    }
}

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
pub(super) struct OwnTables<'a> {
    dma: Option<Dma>,
    balloon: BalloonDma,
    space: Option<Arc<Ioas>>,
    unit: Arc<SoftwareUnit<Arc<NodeTables>, Frames>>,
    frames: Frames,
    tables: Arc<NodeTables>,
    memory: Arc<Memory>,
    host: Arc<HostMemory>,
    source: FrameSource,
    discard: Discard,
    ledger: Arc<Ledger>,
    job: &'a CheckJob,
    software: Software,
    before: Counted,
    devices: Vec<DeviceId>,
    /// Times and charge of the one call that maps.
    mapped: Mapped,
    /// Leaves by size of each table, before something was cut out of them.
    leaves: Vec<SizeHistogram>,
    hole: Span<Iova>,
    runs: Vec<Run>,
    found: Found,
}

/// Costs of the call that maps.
#[derive(Default)]
struct Mapped {
    pin: u64,
    find: u64,
    fill: u64,
    charged: u64,
    steps: u64,
}

/// Results for the end.
#[derive(Default)]
struct Found {
    counted: Counted,
    tables: TablesReport,
    placement: Option<PlacementReport>,
    dma: DmaReport,
    times: Vec<TimesReport>,
    left: Left,
}

impl<'a> OwnTables<'a> {
    pub(super) fn new(
        job: &'a CheckJob,
        software: Software,
        mapping: Arc<Mapping>,
        pinner: Arc<Pinner>,
        ledger: Arc<Ledger>,
        before: Counted,
    ) -> Result<Self, CheckError> {
        let source = FrameSource::detect(&mapping);
        let discard = Discard::new(Arc::clone(&mapping))?;
        let host = Arc::new(HostMemory::with_pinner(mapping, pinner, source));
        // Leaves of 4 KiB, and as many tables set aside for what is released.
        let tables = Arc::new(NodeTables::new(
            2 * table_bytes(host.mapping().len()),
            TABLE_WINDOW,
        ));
        let space = Arc::new(Ioas::with_builder(Builder {
            software,
            memory: Arc::clone(&tables),
            next: 0,
        }));
        space.set_placement(job.placement.unwrap_or_default())?;
        let mut balloon = BalloonDma::new();
        balloon.add_space(Arc::clone(&space));
        let frames = Frames::default();
        let mut config = Config::default();
        config.capabilities.dirty_tracking = true;
        // Not every format has a bit for it.
        config.capabilities.snoop_control = false;
        let unit = SoftwareUnit::with_config(Arc::clone(&tables), frames.clone(), config);
        Ok(Self {
            dma: None,
            balloon,
            space: Some(space),
            unit: Arc::new(unit),
            frames,
            tables,
            memory: Memory::new(Arc::clone(&host) as _, &ledger),
            host,
            source,
            discard,
            ledger,
            job,
            software,
            before,
            devices: Vec::new(),
            mapped: Mapped::default(),
            leaves: Vec::new(),
            hole: Span::default(),
            runs: Vec::new(),
            found: Found::default(),
        })
    }

    fn range(&self) -> Span<Iova> {
        Span::new(IOVA, self.memory.len())
    }

    /// There is one until the last step.
    fn space(&self) -> Result<&Arc<Ioas>, CheckError> {
        let ended = || CheckError::Input("the address space has ended".into());
        self.space.as_ref().ok_or_else(ended)
    }

    fn dma(&self) -> Result<&Dma, CheckError> {
        let none = || CheckError::Input("no devices are at work".into());
        self.dma.as_ref().ok_or_else(none)
    }

    /// Leaves by size of each table.
    fn leaves_now(&self) -> Result<Vec<SizeHistogram>, CheckError> {
        Ok(self.space()?.tables(|_, table| table.leaf_sizes()))
    }

    /// Notes where memory that is mapped at these addresses lies. Everything else is forgotten.
    fn find_frames(&self, mapped: &[Span<Iova>]) -> Result<(), CheckError> {
        let mut pieces = Vec::new();
        for range in mapped.iter().filter(|range| !range.is_empty()) {
            let pin = self.space()?.pin(*range, Prot::READ, WhenUnmapped::Keeps)?;
            for hold in pin.holds() {
                self.find_pieces(hold, &mut pieces)?;
            }
        }
        let known = RunMap::new(pieces).map_err(|cause| CheckError::Runs(cause.into()))?;
        *self
            .frames
            .0
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(known);
        Ok(())
    }

    fn find_pieces(&self, hold: &Hold, pieces: &mut Vec<(u64, Piece)>) -> Result<(), CheckError> {
        let mut offset = hold.part().start;
        let mut batch = vec![Span::default(); 4096];
        hold.with_runs(hold.part(), |reader| {
            loop {
                let found = reader.next_batch(&mut batch).map_err(CheckError::Runs)?;
                for run in batch.get(..found).unwrap_or_default() {
                    let words = (offset / 8) as usize..((offset + run.len) / 8) as usize;
                    let mapping = Arc::clone(self.host.mapping());
                    pieces.push((run.start, Piece { mapping, words }));
                    offset += run.len;
                }
                if found == 0 {
                    return Ok(());
                }
            }
        })
    }

    fn attach(&mut self) -> Result<Done, CheckError> {
        let nodes = Machine::probe()?.nodes;
        let (attached, took_ns) = timed(|| {
            for n in 0..self.software.devices {
                // Bus 1; at the nodes that have memory, in turn.
                let device = DeviceId(1 << 8 | n);
                let near = nodes.get(n as usize % nodes.len().max(1));
                let unit = Arc::clone(&self.unit) as Arc<dyn Unit>;
                let near = near.map(|node| NodeId(*node));
                self.space()?
                    .attach(Endpoint::from((unit, device)).near(near))?;
                self.devices.push(device);
            }
            Ok::<_, CheckError>(())
        });
        attached?;
        let (devices, tables) = (
            self.devices.len() as u64,
            self.space()?.places().len() as u64,
        );
        Ok(Done {
            took_ns,
            checked: format!(
                "{}, {}",
                counted(devices, "device"),
                counted(tables, "table")
            ),
            right: devices == u64::from(self.software.devices) && tables > 0,
            ..Done::default()
        })
    }

    /// Pins, finds the runs and maps, in one call.
    fn pin(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let (in_use, steps) = (self.ledger.in_use(), self.ledger.steps());
        let mut clock = Clock::new(Step::Pin, Some(watch));
        let whole = Span::new(0, self.memory.len());
        let mapped = self
            .space()?
            .map(IOVA, &self.memory, whole, Prot::RW, &mut clock);
        mapped.map_err(|cause| CheckError::of_map(cause, Step::Pin))?;
        self.mapped = Mapped {
            pin: clock.spent(&[ioas::Step::Charge, ioas::Step::Pin]),
            find: clock.spent(&[ioas::Step::FindRuns]),
            fill: clock.spent(&[ioas::Step::FillTables]),
            charged: self.ledger.in_use() - in_use,
            steps: self.ledger.steps() - steps,
        };
        self.found.counted = Counted::since(self.before)?;
        self.find_frames(&[self.range()])?;
        let Mapped { charged, steps, .. } = self.mapped;
        // The kernel's own count is reported, not judged: Linux 7.2 counts nothing for who has CAP_IPC_LOCK.
        Ok(Done {
            bytes: charged,
            took_ns: self.mapped.pin,
            checked: format!(
                "{} charged in {}, not {}",
                Bytes(charged),
                crate::size::counted(steps, "step"),
                count(whole.len / PAGE)
            ),
            right: steps == 1 && charged >= whole.len,
            ..Done::default()
        })
    }

    fn find_runs(&mut self) -> Result<Done, CheckError> {
        let (mut runs, mut joiner) = (Vec::new(), Joiner::new());
        self.space()?.with_table(|table| {
            table.for_each_leaf(self.range(), |leaf| runs.extend(joiner.push(leaf.run)));
        });
        runs.extend(joiner.finish());
        let bytes = runs.iter().map(|run| run.len).sum();
        let checked = counted(runs.len() as u64, "run");
        self.runs = runs;
        Ok(Done {
            bytes,
            took_ns: self.mapped.find,
            checked,
            right: bytes == self.memory.len(),
            ..Done::default()
        })
    }

    fn map(&mut self) -> Result<Done, CheckError> {
        self.leaves = self.leaves_now()?;
        let pages = self
            .space()?
            .tables(|_, table| (table.root(), table.tables()));
        let first = pages.first().map(|(root, _)| *root);
        let leaves: u64 = self.leaves.iter().map(|sizes| sizes.total().count).sum();
        let bytes: u64 = self.leaves.iter().map(|sizes| sizes.total().bytes).sum();
        let table_pages: u64 = pages.iter().map(|(_, pages)| pages).sum();
        self.found.tables = TablesReport {
            format: self.software.format.name(),
            levels: first.map_or(0, |root| root.levels),
            leaves: self.leaves.first().map(classes).unwrap_or_default(),
            table_pages,
            nodes: self.nodes_of(
                self.space()?
                    .places()
                    .first()
                    .and_then(|place| place.tables),
            )?,
        };
        self.found.placement = self.places(&pages.iter().map(|(_, n)| *n).collect::<Vec<_>>())?;
        let largest = self
            .leaves
            .iter()
            .flat_map(|sizes| sizes.iter().map(|(size, _)| size));
        let largest = largest.max().unwrap_or(0);
        let allowed = self.software.max_leaf.unwrap_or(u64::MAX);
        Ok(Done {
            bytes,
            took_ns: self.mapped.fill,
            checked: format!(
                "{} of up to {}, {}",
                leaves_of(leaves),
                Bytes(largest),
                counted(table_pages, "table page")
            ),
            right: bytes == self.memory.len() * pages.len() as u64 && largest <= allowed,
            ..Done::default()
        })
    }

    /// Nodes of table memory that was asked to lie on `node`.
    fn nodes_of(&self, node: Option<NodeId>) -> Result<Vec<NodeShare>, CheckError> {
        let memory = self.tables.memory(node).map_err(CheckError::TableMemory)?;
        Ok(nodes(memory.storage().mapping())?)
    }

    fn places(&self, pages: &[u64]) -> Result<Option<PlacementReport>, CheckError> {
        let Some(policy) = self.job.placement else {
            return Ok(None);
        };
        let mut domains = Vec::new();
        for (place, pages) in self.space()?.places().iter().zip(pages) {
            domains.push(DomainReport {
                node: place.node.map(|node| node.0),
                devices: place.endpoints.len() as u64,
                table_bytes: Some(pages * TABLE_BYTES),
                charged_bytes: None,
                nodes: Some(self.nodes_of(place.tables)?),
            });
        }
        let misplaced = self.tables.misplaced();
        Ok(Some(PlacementReport {
            policy: policy.to_string(),
            domains,
            misplaced: misplaced.iter().map(ToString::to_string).collect(),
        }))
    }

    fn begin(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let ports = self
            .devices
            .iter()
            .map(|device| self.unit.port(*device))
            .collect();
        let (begun, took_ns) = timed(|| {
            let dma = Dma::start(ports, self.host.mapping(), self.range(), watch)?;
            dma.see_by_each(dma.everywhere(), Step::Dma, watch)?;
            Ok::<_, CheckError>(dma)
        });
        let dma = self.dma.insert(begun?);
        let report = dma.report();
        Ok(Done {
            bytes: report.read_bytes + report.written_bytes,
            took_ns,
            checked: format!(
                "each of {} had every page",
                counted(self.devices.len() as u64, "device")
            ),
            right: report.read_bytes >= self.memory.len() * self.devices.len() as u64,
            ..Done::default()
        })
    }

    /// A page in the middle of the largest leaf.
    fn hole(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let mut largest = Span::<Iova>::default();
        self.space()?.tables(|_, table| {
            table.for_each_leaf(self.range(), |leaf| {
                if leaf.run.len > largest.len {
                    largest = leaf.run.input();
                }
            });
        });
        let hole = Span::new(largest.start + ((largest.len / 2) & !(PAGE - 1)), PAGE);
        self.hole = hole;
        let (dma, space) = (self.dma()?, self.space()?);
        dma.expect(|scene| scene.moving = Some(hole));
        let (out, took_ns) = timed(|| space.take_out(hole, Interruption::Refused, &mut ()));
        let unpinned = out.map_err(CheckError::Hole)?;
        let faults = self.in_the_hole(hole, Step::Hole, watch)?;
        let leaves = self.leaves_now()?;
        let both = leaves.iter().zip(&self.leaves);
        let less = both
            .clone()
            .all(|(now, was)| now.total().bytes + PAGE == was.total().bytes);
        let now: u64 = leaves.iter().map(|sizes| sizes.total().count).sum();
        Ok(Done {
            bytes: unpinned,
            took_ns,
            checked: format!(
                "out of a leaf of {}; now {}",
                Bytes(largest.len),
                leaves_of(now)
            ),
            right: less && unpinned == PAGE && faults >= 2 * self.devices.len() as u64,
            ..Done::default()
        })
    }

    /// From now on every access to `hole` must fault; the faults until each device has met all of it.
    fn in_the_hole(
        &self,
        hole: Span<Iova>,
        step: Step,
        watch: &mut Watch<'_>,
    ) -> Result<u64, CheckError> {
        let dma = self.dma()?;
        let before = dma.report().faults_expected;
        dma.expect(|scene| (scene.moving, scene.hole) = (None, Some(hole)));
        dma.see(hole, step, watch)?;
        Ok(dma.report().faults_expected - before)
    }

    /// Maps by `how` what was a hole: until that is done, an access may fault.
    fn mapped_again<T>(
        &self,
        hole: Span<Iova>,
        how: impl FnOnce() -> Result<T, CheckError>,
    ) -> Result<(T, u64), CheckError> {
        let (range, dma) = (self.range(), self.dma()?);
        let end = range.start + range.len;
        let (below, above) = (hole.start - range.start, hole.start + hole.len);
        self.find_frames(&[Span::new(range.start, below), Span::new(above, end - above)])?;
        dma.expect(|scene| (scene.moving, scene.hole) = (Some(hole), None));
        let (done, took_ns) = timed(how);
        let done = done?;
        self.find_frames(&[range])?;
        dma.expect(|scene| scene.moving = None);
        Ok((done, took_ns))
    }

    fn close_hole(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let (hole, space) = (self.hole, self.space()?);
        let ((), took_ns) = self.mapped_again(hole, || {
            let back = space.put_back(hole, Interruption::Refused, &mut ());
            back.map_err(|cause| CheckError::of_map(cause, Step::CloseHole))
        })?;
        self.dma()?.see_by_each(hole, Step::CloseHole, watch)?;
        Ok(Done {
            bytes: PAGE,
            took_ns,
            ..self.as_before()?
        })
    }

    /// Leaves are those that they were at first.
    fn as_before(&self) -> Result<Done, CheckError> {
        let now = self.leaves_now()?;
        let leaves: u64 = now.iter().map(|sizes| sizes.total().count).sum();
        Ok(Done {
            checked: format!("{} again", leaves_of(leaves)),
            right: now == self.leaves,
            ..Done::default()
        })
    }

    /// An eighth of the memory, to which alone devices write while it is tracked.
    fn hot(&self) -> Span<Iova> {
        let len = self.memory.len();
        let eighth = ((len / 8) & !(PAGE - 1)).max(PAGE);
        Span::new(IOVA + ((len / 4) & !(PAGE - 1)), eighth)
    }

    fn track(&mut self) -> Result<Done, CheckError> {
        let (hot, dma) = (self.hot(), self.dma()?);
        dma.expect(|scene| scene.writes = hot);
        dma.take_written();
        let tracking = Tracking {
            leaf: Some(PAGE),
            interruption: Interruption::Refused,
        };
        let (tracked, took_ns) = timed(|| {
            self.space()?
                .track_dirty(tracking)
                .map_err(CheckError::from)
        });
        tracked?;
        let leaves = self.leaves_now()?;
        let now: u64 = leaves.iter().map(|sizes| sizes.total().count).sum();
        let mut sizes = leaves.iter().flat_map(|sizes| sizes.iter());
        Ok(Done {
            bytes: self.memory.len(),
            took_ns,
            checked: format!("{} of {}", leaves_of(now), Bytes(PAGE)),
            right: sizes.all(|(size, _)| size == PAGE),
            ..Done::default()
        })
    }

    /// Dirty pages, by bits, and the bytes of them. Where a unit cannot tell, that is an error of the unit here.
    fn dirty(&self) -> Result<(Vec<u64>, u64, bool), CheckError> {
        let range = self.range();
        let words = vec![0; (range.len / PAGE).div_ceil(64) as usize];
        let mut pending = Pending::new(words, range, PAGE)?;
        let harvested = self.space()?.harvest(&mut pending)?;
        let shown = self.space()?.show(&mut pending)?;
        let (words, bytes) = (
            shown.words().to_vec(),
            shown.runs().map(|run| run.len).sum(),
        );
        shown.acknowledge();
        Ok((words, bytes, harvested.blind))
    }

    /// Every page that was written to is dirty and no other; and when nothing is written any more, none is.
    fn harvest(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let dma = self.dma()?;
        dma.see(self.hot(), Step::Harvest, watch)?;
        let (harvested, took_ns) = timed(|| self.dirty());
        let (dirty, bytes, blind) = harvested?;
        let same = dirty == dma.take_written();
        dma.expect(|scene| scene.writes = Span::new(IOVA, 0));
        self.dirty()?;
        dma.see(self.hot(), Step::Harvest, watch)?;
        let (_, none, _) = self.dirty()?;
        Ok(Done {
            bytes,
            took_ns,
            checked: format!(
                "{} as written, then {}",
                counted(bytes / PAGE, "page"),
                Bytes(none)
            ),
            right: same && !blind && bytes == self.hot().len && none == 0,
            ..Done::default()
        })
    }

    fn merge(&mut self) -> Result<Done, CheckError> {
        let (space, range) = (self.space()?, self.range());
        let ((), took_ns) = timed(|| space.untrack_dirty());
        self.dma()?.expect(|scene| scene.writes = range);
        Ok(Done {
            bytes: self.memory.len(),
            took_ns,
            ..self.as_before()?
        })
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

    fn release(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let (part, regions) = (self.ballooned(), self.regions());
        let map = MemoryMap::new(&regions)?;
        let hole = Span::new(IOVA + part.start, part.len);
        self.dma()?.expect(|scene| scene.moving = Some(hole));
        let mut kept = 0;
        let (discarded, took_ns) = timed(|| {
            let parts = [Part::new(0, part)];
            self.balloon
                .release(map, &parts, &mut |part, _| kept += part.offsets.len);
            match kept {
                0 => self
                    .discard
                    .discard(&[part], &mut |part, _| kept += part.len)
                    .map(drop),
                _ => Ok(()),
            }
        });
        discarded?;
        if kept > 0 {
            return Ok(Done {
                took_ns,
                checked: format!("{} were kept", Bytes(kept)),
                ..Done::default()
            });
        }
        let faults = self.in_the_hole(hole, Step::Release, watch)?;
        self.dma()?.zeroed(hole);
        let held = self.memory.held();
        Ok(Done {
            bytes: part.len,
            took_ns,
            checked: format!("{} stay pinned", Bytes(held)),
            right: held == self.memory.len() - part.len
                && faults >= 2 * self.devices.len() as u64 * part.len / PAGE,
            ..Done::default()
        })
    }

    fn restore(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let (part, regions) = (self.ballooned(), self.regions());
        let map = MemoryMap::new(&regions)?;
        let mut failed = 0;
        let mut balloon = std::mem::take(&mut self.balloon);
        let ((), took_ns) = self.mapped_again(Span::new(IOVA + part.start, part.len), || {
            let parts = [Part::new(0, part)];
            balloon.restore(map, &parts, &mut |part, _| failed += part.offsets.len);
            Ok(())
        })?;
        self.balloon = balloon;
        let dma = self.dma()?;
        dma.see_by_each(dma.everywhere(), Step::Restore, watch)?;
        let held = self.memory.held();
        Ok(Done {
            bytes: part.len,
            took_ns,
            checked: format!("{} pinned again, zeros found", Bytes(held)),
            right: failed == 0 && held == self.memory.len(),
            ..Done::default()
        })
    }

    /// Devices go on, meet faults everywhere, and stop; the processor compares all that they have written.
    fn unmap(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let range = self.range();
        self.dma()?.expect(|scene| scene.moving = Some(range));
        let (unmapped, took_ns) = timed(|| self.space().map(|space| space.unmap_all(&mut ())));
        unmapped?.map_err(CheckError::Unmap)?;
        self.in_the_hole(range, Step::Unmap, watch)?;
        if let Some(dma) = &mut self.dma {
            dma.stop();
            dma.compare(self.host.mapping(), Step::Unmap, watch)?;
            self.found.dma = dma.report();
        }
        self.dma = None;
        Ok(Done {
            bytes: range.len,
            took_ns,
            checked: format!("{} compared by the processor", Bytes(range.len)),
            right: self.memory.held() == 0,
            ..Done::default()
        })
    }

    fn close(&mut self, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        if self.job.times {
            let (pinner, source) = (self.host.pinner()?, self.source);
            let host = |mapping| HostMemory::with_pinner(mapping, Arc::clone(&pinner), source);
            let most = self.memory.len();
            let space = self.space()?;
            let times = times::measure(space, |_| Some(IOVA), &self.ledger, &host, most, watch)?;
            self.found.times = times;
        }
        self.balloon = BalloonDma::new();
        let space = self.space.take().and_then(Arc::into_inner);
        let (closed, took_ns) = timed(|| space.map(Ioas::close));
        let ended = closed.transpose()?.is_some();
        self.found.left = Left {
            charged_bytes: self.memory.charged(),
            held_bytes: self.memory.held(),
            table_pages: self.tables.in_use(),
            mappings: 0,
            kernel: Counted::since(self.before)?,
        };
        Ok(Done {
            took_ns,
            checked: "ledger, pins, tables, kernel: 0".into(),
            right: ended && self.found.left == Left::default(),
            ..Done::default()
        })
    }
}

impl Steps for OwnTables<'_> {
    const ALL: &'static [Step] = ALL_STEPS;

    fn step(&mut self, step: Step, watch: &mut Watch<'_>) -> Result<Done, CheckError> {
        let done = match step {
            Step::Attach => self.attach(),
            Step::Pin => self.pin(watch),
            Step::FindRuns => self.find_runs(),
            Step::Map => self.map(),
            Step::Dma => self.begin(watch),
            Step::Hole => self.hole(watch),
            Step::CloseHole => self.close_hole(watch),
            Step::Track => self.track(),
            Step::Harvest => self.harvest(watch),
            Step::Merge => self.merge(),
            Step::Release => self.release(watch),
            Step::Restore => self.restore(watch),
            Step::Unmap => self.unmap(watch),
            Step::Close => self.close(watch),
            Step::Memory | Step::Limit | Step::Nodes | Step::Times => Ok(Done::default()),
        }?;
        // Devices have found nothing wrong so far.
        let dma = self
            .dma
            .as_ref()
            .map_or_else(|| self.found.dma.clone(), Dma::report);
        Ok(Done {
            right: done.right && dma.is_right(),
            ..done
        })
    }

    fn finish(self, report: &mut CheckReport, watch: &mut Watch<'_>) -> Result<(), CheckError> {
        let memory = &mut report.memory;
        let pinner = self.host.pinner()?;
        memory.pin = pinner.kind().to_string();
        memory.pin_reason = pinner.why().map(Into::into);
        memory.counter = self.ledger.counter();
        memory.runs = Some(self.runs.len() as u64);
        (memory.charged_bytes, memory.charge_steps) = (self.mapped.charged, self.mapped.steps);
        memory.mapped = self.found.counted;
        report.tables = Some(self.found.tables);
        report.placement = self.found.placement;
        report.dma = Some(self.found.dma);
        (report.times, report.left) = (self.found.times, self.found.left);
        let storage = MappedStorage::new(table_bytes(memory.size_bytes), None);
        let storage = storage.map_err(CheckError::TableMemory)?;
        let beside = Arc::new(HostTables::new(storage, TABLE_WINDOW)?);
        let sizes = page_sizes(self.software);
        let table = AnyTable::new(self.software.format, LEVELS, sizes, beside)?;
        let range = Span::new(IOVA, memory.size_bytes);
        report.compared = Some(compare(table, &self.runs, range, watch)?);
        Ok(())
    }
}

/// "1 leaf", "3 leaves".
fn leaves_of(number: u64) -> String {
    match number {
        1 => "1 leaf".into(),
        number => format!("{} leaves", count(number)),
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
