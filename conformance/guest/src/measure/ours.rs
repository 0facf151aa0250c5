//! `ioas::Dma`, used as the kernel's benchmark uses its DMA API.
//!
//! Each thread maps a buffer of its own and unmaps it, and reads the clock before and after each. The memory stays
//! where it is, as a driver's in the kernel does: nothing is pinned. A figure includes checks, the device address, the
//! buffer's record, the table, and the driver's flush: commands, the register write and one poll. The registers are the
//! guest's own (`guest::unit`) and answer at once, in some 100 instructions; another column has the software unit,
//! whose cache walks are guest instructions. Lazy has Linux's bounds, and reads the clock in each unmap. Two adjacent
//! reads of the clock are subtracted.

use std::{
    hint::black_box,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use guest::{
    samples::{SECONDS, SIZES, THREADS},
    unit::{self, prompt},
};
use ioas::{Dma, FixedRuns, Flushing, Ledger, Memory};
use iommu::{
    BadTarget, DeviceId, DomainId, FormatSupport, SoftwareConfig, SoftwareUnit, TargetMemory,
};
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{Iova, Pa, PageSizes, Span};

/// Device addresses are below those of interrupts, as Linux's are as long as there is room.
const WINDOW: Span<Iova> = Span::new(1 << 20, 0xfee0_0000 - (1 << 20));
const DOMAIN: DomainId = DomainId(1);
const DEVICE: DeviceId = DeviceId::pci(0, 1, 0);
/// Tables of all threads.
const TABLES: u64 = 4096;
/// The largest buffer, and the most threads.
const LARGEST: u64 = SIZES[SIZES.len() - 1];
const MOST: usize = THREADS[THREADS.len() - 1] as usize;

/// All physical memory: no device reads it.
struct Nothing;

impl TargetMemory for Nothing {
    fn with_cells(&self, span: Span<Pa>, _: &mut dyn FnMut(&[AtomicU64])) -> Result<(), BadTarget> {
        let address = span.start;
        Err(BadTarget { address })
    }
}

/// The unit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Behind {
    /// One of hardware that answers at once, with the library's driver.
    Driver,
    /// The library's own in software: what a unit of hardware does by itself, the guest's processor does.
    Software,
}

/// A page table and its device.
pub(crate) struct Ours {
    dma: Dma,
    memory: Arc<Memory>,
}

fn since_start() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

impl Ours {
    /// A table of this format with a device `behind` a unit, and with flushes in each unmap or `lazy`.
    pub(crate) fn new(format: FormatId, lazy: bool, behind: Behind) -> anyhow::Result<Self> {
        let tables = Arc::new(HeapTables::with_tables(TABLES)?);
        // All that the format has, as Linux's domain.
        let sizes = PageSizes::from_bits(u64::MAX);
        let table = AnyTable::new(format, 4, sizes, Arc::clone(&tables))?;
        let root = table.root();
        let mut config = SoftwareConfig::default();
        config.capabilities = config.capabilities.with_format(FormatSupport {
            format: root.format,
            levels: 1 << root.levels,
            page_sizes: table.page_sizes(),
        });
        let flushing = match lazy {
            // Linux's bounds.
            true => Flushing::Lazy {
                holds: 256,
                age: Duration::from_millis(10),
                now: since_start,
            },
            false => Flushing::Strict,
        };
        let dma = Dma::new(DOMAIN, table, &[WINDOW], flushing, MOST);
        match behind {
            Behind::Driver => dma.attach((prompt(unit::Kind::of(format)?, &tables)?, DEVICE))?,
            Behind::Software => {
                let unit = SoftwareUnit::with_config(tables, Nothing, config);
                dma.attach((Arc::new(unit), DEVICE))?;
            }
        }
        let ram = FixedRuns::new([Span::new(1 << 32, LARGEST * MOST as u64)], 4096)?;
        let memory = Memory::new(Arc::new(ram), &Ledger::unlimited());
        Ok(Self { dma, memory })
    }

    /// Nanoseconds of a map and of an unmap of `size` bytes.
    pub(crate) fn run(&self, threads: u32, size: u64) -> anyhow::Result<[f64; 2]> {
        let stop = AtomicBool::new(false);
        let sums = thread::scope(|scope| {
            let stop = &stop;
            let begin = |thread| scope.spawn(move || self.work(thread, size, stop));
            let threads: Vec<_> = (0..threads.into()).map(begin).collect();
            thread::sleep(Duration::from_secs(SECONDS.into()));
            stop.store(true, Ordering::Relaxed);
            let ends = threads.into_iter().map(|thread| {
                let panicked = |_| anyhow!("a thread has panicked");
                thread.join().map_err(panicked)?
            });
            ends.collect::<anyhow::Result<Vec<_>>>()
        })?;
        let mut all = (0, [Duration::ZERO; 2]);
        for (count, times) in sums {
            all.0 += count;
            all.1[0] += times[0];
            all.1[1] += times[1];
        }
        Ok(all.1.map(|time| time.as_nanos() as f64 / f64::from(all.0)))
    }

    /// Work of a thread: the number of rounds, and the time of all maps and all unmaps.
    fn work(
        &self,
        thread: u64,
        size: u64,
        stop: &AtomicBool,
    ) -> anyhow::Result<(u32, [Duration; 2])> {
        let part = Span::new(thread * LARGEST, size);
        let (mut count, mut times) = (0, [Duration::ZERO; 2]);
        while !stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let buffer = self.dma.map(&self.memory, black_box(part), Prot::WRITE);
            times[0] += begun.elapsed();
            let buffer = black_box(buffer.context("a buffer was not mapped")?);
            let begun = Instant::now();
            let unmapped = self.dma.unmap(buffer);
            times[1] += begun.elapsed();
            unmapped.context("a buffer was not unmapped")?;
            count += 1;
        }
        Ok((count, times))
    }
}
