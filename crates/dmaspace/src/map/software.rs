//! The job over tables of our own, walked by the software unit for devices that are threads.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hostmem::{FrameSource, Mapping};
use ioas::{Area, HostTables, Ioas, Ledger, MappedStorage, Own};
use iommu::{DeviceId, DomainId, SoftwareUnit, Unit};
use iopt::{AnyTable, Prot, TABLE_BYTES, TableMemory};
use runs::{PageSizes, Run, SizeHistogram, Span};

use super::clock::{in_nanoseconds, nanoseconds};
use super::job::{Mapped, Side};
use super::memory::nodes;
use super::report::{
    DmaReport, MapReport, PinsReport, RunsReport, SizeClass, Stretch, TablesReport, UnitReport,
};
use super::{JobError, Software, Stage, Watch, dma, pattern, target};

/// Where the memory is mapped: a multiple of every leaf size, with room for a neighbour below.
const IOVA: u64 = 1 << 40;
/// The window of the tables' addresses: above all memory, and above the addresses that stand in
/// for frames that this process may not know.
const TABLE_WINDOW: u64 = 1 << 46;
/// Levels of the tables: 48 bits of addresses.
const LEVELS: u8 = 4;

/// Tables of ours, and the address space over them.
pub(super) struct SoftwareSide<'a> {
    job: &'a Software,
    tables: Arc<HostTables>,
    space: Ioas<Own<Arc<HostTables>>>,
}

impl<'a> SoftwareSide<'a> {
    /// With room for tables of `size` bytes.
    pub(super) fn new(job: &'a Software, size: u64) -> Result<Self, JobError> {
        let (tables, table) = new_table(job, size)?;
        let space = Ioas::new(DomainId(1), table);
        Ok(Self { job, tables, space })
    }
}

impl Side for SoftwareSide<'_> {
    type Backend = Own<Arc<HostTables>>;

    fn space(&mut self) -> &mut Ioas<Self::Backend> {
        &mut self.space
    }

    fn place(
        &mut self,
        _size: u64,
        _ledger: &Arc<Ledger>,
        _watch: &mut dyn Watch,
    ) -> Result<u64, JobError> {
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
        report.times.map_by_page_ns = Some(map_by_page(self.job, &runs, range, watch)?);

        let Some(hold) = self.space.area_at(range.start).and_then(Area::hold) else {
            return Err(JobError::Lost { iova: range.start });
        };
        let memory = mapped.memory.mapping();
        let data = target::of_pin(memory, hold)?;
        let unit = Arc::new(SoftwareUnit::new(Arc::clone(&self.tables), data));
        // Devices of bus 1, as many to a slot as it has functions.
        let devices: Vec<DeviceId> = (0..self.job.devices)
            .map(|n| DeviceId(1 << 8 | n))
            .collect();
        let started = Instant::now();
        for device in &devices {
            let unit = Arc::clone(&unit) as Arc<dyn Unit>;
            self.space.attach(unit, *device).map_err(JobError::Attach)?;
        }
        report.times.attach_ns = nanoseconds(started);

        let started = Instant::now();
        let found = check_dma(&unit, &devices, memory, range, watch)?;
        report.times.dma_check_ns = Some(nanoseconds(started));
        let counters = unit.counters();
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

impl SoftwareSide<'_> {
    /// Fills in what is to be said of runs, pins and tables; returns the runs.
    fn describe(&self, mapped: &Mapped<'_>, report: &mut MapReport) -> Result<Vec<Run>, JobError> {
        let (memory, frames) = (mapped.memory, mapped.frames);
        let table = self.space.table().ok_or(JobError::Lost {
            iova: mapped.range.start,
        })?;
        let mut runs = Vec::new();
        let mut joiner = runs::Joiner::new();
        let mut layout: Vec<Stretch> = Vec::new();
        table.for_each_leaf(mapped.range, |leaf| {
            runs.extend(joiner.push(leaf.run));
            match layout.last_mut() {
                Some(open) if open.leaf_bytes == leaf.run.len => open.len_bytes += leaf.run.len,
                _ => layout.push(Stretch {
                    iova: leaf.run.iova,
                    len_bytes: leaf.run.len,
                    leaf_bytes: leaf.run.len,
                }),
            }
        });
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
            looks: memory.effort().looks(),
        });
        report.charge.pins = Some(PinsReport {
            pin: memory.pinner().kind().to_string(),
            pin_reason: memory.pinner().why().map(Into::into),
            pin_calls: memory.effort().calls(),
            pin_buffers: memory.effort().buffers(),
        });
        let root = table.root();
        report.backend.page_sizes_bytes = Some(table.page_sizes().iter().collect());
        report.tables = Some(TablesReport {
            format: root.format.name().into(),
            levels: root.levels,
            leaves: classes(&table.leaf_sizes()),
            table_pages: table.tables(),
            table_bytes: table.tables() * TABLE_BYTES,
            nodes: nodes(self.tables.storage().mapping())?,
        });
        Ok(runs)
    }
}

fn check_dma(
    unit: &SoftwareUnit<Arc<HostTables>, iommu::RunMap<target::Piece>>,
    devices: &[DeviceId],
    memory: &Mapping,
    range: Span,
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

/// A table, and memory for as many tables as `size` bytes in leaves of 4 KiB take, the most that can
/// be needed.
fn new_table(
    job: &Software,
    size: u64,
) -> Result<(Arc<HostTables>, AnyTable<Arc<HostTables>>), JobError> {
    let leaf_tables = size.div_ceil(2 << 20) + 1;
    let upper = leaf_tables.div_ceil(512) * 2 + u64::from(LEVELS);
    let storage = MappedStorage::new((leaf_tables + upper) * TABLE_BYTES, None)
        .map_err(JobError::TableMemory)?;
    let tables = Arc::new(HostTables::new(storage, TABLE_WINDOW)?);
    let sizes = PageSizes::from_bits(u64::MAX).up_to(job.max_leaf.unwrap_or(u64::MAX));
    let table = AnyTable::new(job.format, LEVELS, sizes, Arc::clone(&tables))?;
    Ok((tables, table))
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

/// The time of the same map done page by page, in tables of its own.
fn map_by_page(
    job: &Software,
    runs: &[Run],
    range: Span,
    watch: &mut dyn Watch,
) -> Result<u64, JobError> {
    let (_, mut table) = new_table(job, range.len)?;
    let mut taken = Duration::ZERO;
    for run in runs {
        // In stretches, so that somebody can stop it; what watching takes is not counted.
        for start in (0..run.len).step_by(1 << 30) {
            let len = (run.len - start).min(1 << 30);
            let started = Instant::now();
            for offset in (start..start + len).step_by(TABLE_BYTES as usize) {
                let page = [Span::new(run.pa + offset, TABLE_BYTES)];
                table.map(run.iova + offset, &page, Prot::RW)?;
            }
            taken += started.elapsed();
            let done = run.iova - range.start + start + len;
            if watch.progress(Stage::Map, done, range.len).is_break() {
                return Err(JobError::Interrupted);
            }
        }
    }
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    Ok(in_nanoseconds(taken))
}
