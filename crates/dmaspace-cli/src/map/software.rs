//! The job over tables of our own, walked by the software unit for devices that are threads.

use std::ops::ControlFlow;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hostmem::{FrameSource, Machine, Mapping};
use ioas::{
    BuildDomain, Cause, Endpoint, HostTables, Ioas, Ledger, MappedStorage, NodeTables, Placement,
    WhenUnmapped,
};
use iommu::{
    BadTarget, Config, DeviceId, DomainId, NodeId, RunMap, SoftwareUnit, TargetMemory, Unit,
};
use iopt::{AnyTable, Leaf, Prot, TABLE_BYTES};
use runs::{Iova, Pa, PageSizes, Run, SizeHistogram, Span};
use scenario::{nodes, pattern};

use super::clock::nanoseconds;
use super::compared::compare;
use super::job::{Backend, Mapped};
use super::report::{
    DmaReport, DomainReport, MapReport, NodeShare, PinsReport, PlacementReport, RunsReport,
    SizeClass, Stretch, TablesReport, UnitReport,
};
use super::{JobError, Software, Stage, Watch, dma, target};

/// Where the memory is mapped: a multiple of every leaf size, with room for a neighbour below.
const IOVA: u64 = 1 << 40;
/// The window of the tables' addresses: above all memory, and above the addresses that stand in
/// for frames that this process may not know.
const TABLE_WINDOW: u64 = 1 << 46;
/// Levels of the tables: 48 bits of addresses.
const LEVELS: u8 = 4;

/// Tables of ours, the address space over them, and a unit that walks them.
pub(super) struct SoftwareBackend<'a> {
    job: &'a Software,
    placement: Option<Placement>,
    tables: Arc<NodeTables>,
    space: Ioas,
    unit: Arc<SoftwareUnit<Arc<NodeTables>, DeferredMap>>,
    data: DeferredMap,
    devices: Vec<DeviceId>,
    attach_ns: u64,
}

/// The memory that devices reach, once it is pinned.
#[derive(Clone, Default)]
struct DeferredMap(Arc<OnceLock<RunMap<target::Piece>>>);

impl TargetMemory for DeferredMap {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        match self.0.get() {
            Some(memory) => memory.with_cells(span, visit),
            None => Err(BadTarget {
                address: span.start,
            }),
        }
    }
}

/// Builds tables as the job wants them.
struct Tables {
    job: Software,
    memory: Arc<NodeTables>,
    next: u32,
}

impl BuildDomain for Tables {
    fn build(
        &mut self,
        _unit: &dyn Unit,
        _dirty: bool,
        node: Option<NodeId>,
    ) -> Result<(DomainId, AnyTable), Cause> {
        let memory = self.memory.memory(node)?;
        let table = AnyTable::new(self.job.format, LEVELS, page_sizes(&self.job), memory)?;
        self.next += 1;
        Ok((DomainId(self.next), table))
    }

    /// Numbers are not used again: there are more than a job has domains.
    fn ended(&mut self, _domain: DomainId) {}
}

impl<'a> SoftwareBackend<'a> {
    /// With room for tables of `size` bytes on each node.
    pub(super) fn new(
        job: &'a Software,
        placement: Option<Placement>,
        size: u64,
    ) -> Result<Self, JobError> {
        let tables = Arc::new(NodeTables::new(table_bytes(size), TABLE_WINDOW));
        let space = Ioas::with_builder(Tables {
            job: *job,
            memory: Arc::clone(&tables),
            next: 0,
        });
        space.set_placement(placement.unwrap_or_default())?;
        let data = DeferredMap::default();
        let mut config = Config::default();
        config.capabilities.dirty_tracking = true;
        // Not every format has a bit for it.
        config.capabilities.snoop_control = false;
        let unit = SoftwareUnit::with_config(Arc::clone(&tables), data.clone(), config);
        Ok(Self {
            job,
            placement,
            unit: Arc::new(unit),
            tables,
            space,
            data,
            devices: Vec::new(),
            attach_ns: 0,
        })
    }
}

impl Backend for SoftwareBackend<'_> {
    fn space(&self) -> &Ioas {
        &self.space
    }

    /// Attaches the devices, which are at the nodes that have memory, in turn.
    fn place(
        &mut self,
        _size: u64,
        _ledger: &Arc<Ledger>,
        _watch: &mut dyn Watch,
    ) -> Result<u64, JobError> {
        let nodes = Machine::probe()?.nodes;
        let started = Instant::now();
        for n in 0..self.job.devices {
            // Devices of bus 1, as many to a slot as it has functions.
            let device = DeviceId(1 << 8 | n);
            let near = nodes.get(n as usize % nodes.len().max(1));
            let near = near.map(|node| NodeId(*node));
            let unit = Arc::clone(&self.unit) as Arc<dyn Unit>;
            let attached = self.space.attach(Endpoint::from((unit, device)).near(near));
            attached.map_err(JobError::Attach)?;
            self.devices.push(device);
        }
        self.attach_ns = nanoseconds(started);
        Ok(IOVA)
    }

    fn while_mapped(
        &mut self,
        mapped: &Mapped<'_>,
        watch: &mut dyn Watch,
        report: &mut MapReport,
    ) -> Result<(), JobError> {
        let range = mapped.range;
        let runs = self.describe(mapped, report)?;
        report.compared = Some(compare(self.beside(range.len)?, &runs, range, watch)?);

        let lost = || JobError::Lost { iova: range.start };
        let pin = self.space.pin(range, Prot::READ, WhenUnmapped::Keeps);
        let pin = pin.map_err(|_| lost())?;
        let hold = pin.holds().first().ok_or_else(lost)?;
        let memory = mapped.memory.mapping();
        // Nobody was there before.
        let _ = self.data.0.set(target::of_pin(memory, hold)?);
        report.times.attach_ns = self.attach_ns;

        let started = Instant::now();
        let found = check_dma(&self.unit, &self.devices, memory, range, watch)?;
        report.times.dma_check_ns = Some(nanoseconds(started));
        let counters = self.unit.counters();
        report.dma = DmaReport {
            devices: self.job.devices,
            read_bytes: found.read,
            written_bytes: found.written,
            wrong_bytes: found.wrong,
            neighbour_accesses: found.neighbour_accesses,
            neighbour_reached: found.neighbour_accesses - found.neighbour_faults,
            unit: Some(UnitReport {
                faults: found.faults,
                neighbour_faults: found.neighbour_faults,
                iotlb_hits: counters.iotlb_hits,
                iotlb_misses: counters.iotlb_misses,
                table_reads: counters.table_reads,
            }),
            ..DmaReport::default()
        };
        Ok(())
    }

    fn close(self, _report: &mut MapReport) -> Result<(), JobError> {
        self.space.close()?;
        match self.tables.in_use() {
            0 => Ok(()),
            left => Err(JobError::TablesLeft { tables: left }),
        }
    }
}

impl SoftwareBackend<'_> {
    /// Fills in what is to be said of runs, pins and tables; returns the runs.
    fn describe(&self, mapped: &Mapped<'_>, report: &mut MapReport) -> Result<Vec<Run>, JobError> {
        let (memory, frames) = (mapped.memory, mapped.frames);
        let mut runs = Vec::new();
        let mut joiner = runs::Joiner::new();
        let mut layout: Vec<Stretch> = Vec::new();
        let mut each = |leaf: Leaf| {
            runs.extend(joiner.push(leaf.run));
            match layout.last_mut() {
                Some(open) if open.leaf_bytes == leaf.run.len => open.len_bytes += leaf.run.len,
                _ => layout.push(Stretch {
                    iova: leaf.run.iova,
                    len_bytes: leaf.run.len,
                    leaf_bytes: leaf.run.len,
                }),
            }
        };
        let look = |table: &AnyTable| {
            table.for_each_leaf(mapped.range, &mut each);
            (table.root(), table.page_sizes(), table.leaf_sizes())
        };
        let (root, page_sizes, leaves) = self.space.with_table(look).ok_or(JobError::Lost {
            iova: mapped.range.start,
        })?;
        runs.extend(joiner.finish());
        let mut sizes = SizeHistogram::new();
        runs.iter().for_each(|run| sizes.add(run.len, 1));

        report.layout = Some(layout);
        report.memory.found = Some(RunsReport {
            runs: runs.len() as u64,
            run_sizes: classes(&sizes),
            addresses: match frames {
                FrameSource::Pagemap => "pagemap",
                FrameSource::FileOffset => "file-offset",
                FrameSource::Synthetic { .. } => "synthetic",
            }
            .into(),
            addresses_reason: frames.to_string(),
            looks: memory.effort().entries_read(),
        });
        let pinner = memory.pinner()?;
        report.charge.pins = Some(PinsReport {
            pin: pinner.kind().to_string(),
            pin_reason: pinner.why().map(Into::into),
            pin_calls: memory.effort().calls(),
            pin_buffers: memory.effort().buffers(),
        });
        report.backend.page_sizes_bytes = Some(page_sizes.iter().collect());
        let pages = self.space.tables(|_, table| table.tables());
        let table_pages = pages.iter().sum();
        let first = self.space.places().first().and_then(|place| place.tables);
        report.tables = Some(TablesReport {
            format: root.format.name().into(),
            levels: root.levels,
            leaves: classes(&leaves),
            table_pages,
            table_bytes: table_pages * TABLE_BYTES,
            nodes: self.nodes_of(first)?,
        });
        report.placement = self
            .placement
            .map(|policy| self.places(policy))
            .transpose()?;
        Ok(runs)
    }

    /// The nodes of the pages of tables that were asked to lie on `node`.
    fn nodes_of(&self, node: Option<NodeId>) -> Result<Vec<NodeShare>, JobError> {
        let memory = self.tables.memory(node).map_err(JobError::TableMemory)?;
        Ok(nodes(memory.storage().mapping())?)
    }

    /// An empty table beside the job's, for as much memory.
    fn beside(&self, size: u64) -> Result<AnyTable, JobError> {
        let storage = MappedStorage::new(table_bytes(size), None).map_err(JobError::TableMemory)?;
        let memory = Arc::new(HostTables::new(storage, TABLE_WINDOW)?);
        Ok(AnyTable::new(
            self.job.format,
            LEVELS,
            page_sizes(self.job),
            memory,
        )?)
    }

    /// Which devices share a table, and where it lies.
    fn places(&self, policy: Placement) -> Result<PlacementReport, JobError> {
        let mut domains = Vec::new();
        let tables = self.space.tables(|_, table| table.tables());
        for (place, tables) in self.space.places().iter().zip(tables) {
            domains.push(DomainReport {
                node: place.node.map(|node| node.0),
                devices: place.endpoints.len() as u64,
                table_bytes: Some(tables * TABLE_BYTES),
                nodes: Some(self.nodes_of(place.tables)?),
                charged_bytes: None,
            });
        }
        let misplaced = self.tables.misplaced();
        Ok(PlacementReport {
            policy: policy.to_string(),
            domains,
            misplaced: misplaced.iter().map(ToString::to_string).collect(),
        })
    }
}

fn check_dma(
    unit: &SoftwareUnit<Arc<NodeTables>, DeferredMap>,
    devices: &[DeviceId],
    memory: &Mapping,
    range: Span<Iova>,
    watch: &mut dyn Watch,
) -> Result<dma::Found, JobError> {
    let stage = Stage::DmaCheck;
    // The processor writes once, each device reads once, all write once, the processor reads once.
    let total = range.len * (devices.len() as u64 + 3);
    let filled = pattern::fill(memory, &mut |done| watch.progress(stage, done, total));
    if filled.is_break() {
        return Err(JobError::Interrupted);
    }
    let mut report = |done: u64, _| watch.progress(stage, range.len + done, total);
    match dma::check(unit, devices, memory, range, &mut report) {
        ControlFlow::Continue(found) => Ok(found),
        ControlFlow::Break(()) => Err(JobError::Interrupted),
    }
}

/// Bytes of as many tables as `size` bytes in leaves of 4 KiB take, the most that can be needed.
pub(crate) fn table_bytes(size: u64) -> u64 {
    let leaf_tables = size.div_ceil(2 << 20) + 1;
    let upper = leaf_tables.div_ceil(512) * 2 + u64::from(LEVELS);
    (leaf_tables + upper) * TABLE_BYTES
}

fn page_sizes(job: &Software) -> PageSizes {
    PageSizes::from_bits(u64::MAX).up_to(job.max_leaf.unwrap_or(u64::MAX))
}

fn classes(sizes: &SizeHistogram) -> Vec<SizeClass> {
    sizes
        .iter()
        .map(|(from_bytes, class)| SizeClass {
            from_bytes,
            count: class.count,
            bytes: class.bytes,
        })
        .collect()
}
