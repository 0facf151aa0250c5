//! The DMA check: devices read and write all of the memory through the tables, and every byte is
//! compared.
//!
//! Each device is a thread with a port of its own. First every device reads all of the memory, in a
//! shuffled order, and finds what the processor wrote. Then the devices write the second pattern,
//! each a share of the pages, and the processor finds that. Accesses just outside of the range must
//! fault.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use hostmem::Mapping;
use iommu::{DeviceId, Port, SoftwareUnit, TargetMemory};
use iopt::walk::WalkMemory;
use runs::{Iova, Span};

use scenario::pattern::{Pattern, differing, shuffled};

/// Bytes of one access.
const PAGE: u64 = 4096;
const WORDS: usize = PAGE as usize / 8;

/// What the devices and the processor found.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) read: u64,
    pub(super) written: u64,
    pub(super) wrong: u64,
    pub(super) faults: u64,
    pub(super) neighbour_faults: u64,
    pub(super) neighbour_accesses: u64,
}

/// What all threads share.
struct Check<'a> {
    range: Span<Iova>,
    /// Bytes that are done, and the wish to stop.
    done: AtomicU64,
    stop: AtomicBool,
    wrong: AtomicU64,
    faults: AtomicU64,
    memory: &'a Mapping,
}

/// Checks that `devices` see `memory`, which holds the processor's pattern, at `range`.
pub(super) fn check<T, D>(
    unit: &SoftwareUnit<T, D>,
    devices: &[DeviceId],
    memory: &Mapping,
    range: Span<Iova>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> ControlFlow<(), Found>
where
    T: WalkMemory + Send + Sync,
    D: TargetMemory + Send + Sync,
{
    let check = Check {
        range,
        done: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        wrong: AtomicU64::new(0),
        faults: AtomicU64::new(0),
        memory,
    };
    let count = devices.len() as u64;
    let total = range.len * (count + 2);
    let mut found = Found::default();

    // All devices read everything.
    check.on_devices(unit, devices, total, progress, |check, port, n| {
        check.read_all(port, n)
    })?;
    found.read = check.done.load(Ordering::Relaxed);
    // Each writes its share.
    let before = found.read;
    check.on_devices(unit, devices, total, progress, |check, port, n| {
        check.write_share(port, n, count);
    })?;
    found.written = check.done.load(Ordering::Relaxed) - before;
    // The processor reads what they wrote.
    check.verify(&mut |done| progress(done, total))?;

    found.wrong = check.wrong.load(Ordering::Relaxed);
    found.faults = check.faults.load(Ordering::Relaxed);
    for device in devices {
        neighbours(&mut unit.port(*device), range, &mut found);
    }
    ControlFlow::Continue(found)
}

impl Check<'_> {
    /// Runs `work` for each device on a thread of its own, while this thread reports.
    fn on_devices<T, D>(
        &self,
        unit: &SoftwareUnit<T, D>,
        devices: &[DeviceId],
        total: u64,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
        work: impl Fn(&Self, &mut Port<T, D>, u64) + Sync,
    ) -> ControlFlow<()>
    where
        T: WalkMemory + Send + Sync,
        D: TargetMemory + Send + Sync,
    {
        let work = &work;
        thread::scope(|scope| {
            let threads: Vec<_> = (0u64..)
                .zip(devices)
                .filter_map(|(n, device)| {
                    let work = move || work(self, &mut unit.port(*device), n);
                    let thread = thread::Builder::new().spawn_scoped(scope, work);
                    // Where no more threads are to be had, devices come one after the other.
                    thread.map_err(|_| work()).ok()
                })
                .collect();

            while threads.iter().any(|thread| !thread.is_finished()) {
                if progress(self.done.load(Ordering::Relaxed), total).is_break() {
                    self.stop.store(true, Ordering::Relaxed);
                }
                thread::sleep(Duration::from_micros(500));
            }
        });
        match self.stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn pages(&self) -> u64 {
        self.range.len / PAGE
    }

    /// The `n`-th device reads every page and compares it.
    fn read_all<T: WalkMemory, D: TargetMemory>(&self, port: &mut Port<T, D>, n: u64) {
        let mut words = [0; WORDS];
        for page in shuffled(self.pages(), n) {
            match port.read(self.range.start + page * PAGE, &mut words) {
                Ok(()) => {
                    let offsets = (page * PAGE..).step_by(8);
                    let expected = offsets.map(|offset| Pattern::Processor.word(offset));
                    self.compare(words.iter().copied(), expected);
                }
                Err(_) => self.fault(),
            }
            if self.page_done() {
                return;
            }
        }
    }

    /// The `n`-th of `count` devices writes every page whose number is n modulo the count.
    fn write_share<T: WalkMemory, D: TargetMemory>(
        &self,
        port: &mut Port<T, D>,
        n: u64,
        count: u64,
    ) {
        let mut words = [0; WORDS];
        for page in shuffled(self.pages(), n).filter(|page| page % count == n) {
            for (offset, word) in (page * PAGE..).step_by(8).zip(&mut words) {
                *word = Pattern::Device.word(offset);
            }
            if port.write(self.range.start + page * PAGE, &words).is_err() {
                self.fault();
            }
            if self.page_done() {
                return;
            }
        }
    }

    /// The processor reads what devices have written.
    fn verify(&self, progress: &mut dyn FnMut(u64) -> ControlFlow<()>) -> ControlFlow<()> {
        for (n, chunk) in self.memory.cells().chunks(1 << 20).enumerate() {
            let offsets = ((n as u64) << 23..).step_by(8);
            let found = chunk.iter().map(|cell| cell.load(Ordering::Relaxed));
            self.compare(found, offsets.map(|offset| Pattern::Device.word(offset)));
            progress(
                self.done
                    .fetch_add(size_of_val(chunk) as u64, Ordering::Relaxed),
            )?;
        }
        ControlFlow::Continue(())
    }

    fn compare(&self, found: impl Iterator<Item = u64>, expected: impl Iterator<Item = u64>) {
        let wrong = differing(found, expected);
        if wrong > 0 {
            self.wrong.fetch_add(wrong, Ordering::Relaxed);
        }
    }

    fn fault(&self) {
        self.faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a page; true when everybody shall stop.
    fn page_done(&self) -> bool {
        self.done.fetch_add(PAGE, Ordering::Relaxed);
        self.stop.load(Ordering::Relaxed)
    }
}

/// Reads and writes a word on either side of the range: all four must fault.
fn neighbours<T: WalkMemory, D: TargetMemory>(
    port: &mut Port<T, D>,
    range: Span<Iova>,
    found: &mut Found,
) {
    for iova in [range.start - 8, range.last() + 1] {
        for result in [port.read(iova, &mut [0]), port.write(iova, &[0])] {
            found.neighbour_accesses += 1;
            found.neighbour_faults += u64::from(result.is_err());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hostmem::Backing;
    use iommu::{DomainId, RunMap, Unit};
    use iopt::format::VtdSs;
    use iopt::{Gather, HeapTables, Prot, Table};

    use super::super::target::Piece;
    use super::*;
    use scenario::pattern::fill;

    const IOVA: u64 = 1 << 40;
    const PA: u64 = 1 << 33;
    const LEN: u64 = 64 * PAGE;

    /// Runs the check over a table that maps the memory, after `tamper` has had its hands on it.
    fn check_with(tamper: impl FnOnce(&mut Table<VtdSs, Arc<HeapTables>>)) -> Found {
        let memory = Arc::new(Mapping::new(Backing::Anon4K, LEN, None).unwrap());
        let data = RunMap::new([(PA, Piece::new(&memory, 0, LEN))]).unwrap();
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let mut table = Table::new(VtdSs::new(4).unwrap(), Arc::clone(&tables)).unwrap();
        table.map(IOVA, &[Span::new(PA, LEN)], Prot::RW).unwrap();
        tamper(&mut table);

        let unit = SoftwareUnit::new(tables, data);
        let devices = [DeviceId::pci(1, 0, 0), DeviceId::pci(2, 0, 0)];
        for device in devices {
            unit.attach(device, DomainId(1), table.root()).unwrap();
        }
        let range = Span::new(IOVA, LEN);
        assert!(fill(&memory, &mut |_| ControlFlow::Continue(())).is_continue());
        match check(&unit, &devices, &memory, range, &mut |_, _| {
            ControlFlow::Continue(())
        }) {
            ControlFlow::Continue(found) => found,
            ControlFlow::Break(()) => panic!("nobody stopped it"),
        }
    }

    fn remap(table: &mut Table<VtdSs, Arc<HeapTables>>, page: u64, pa: Option<u64>) {
        let mut gather = Gather::new();
        let range = Span::new(IOVA + page * PAGE, PAGE);
        table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
        table.reclaim(gather.never_walked());
        if let Some(pa) = pa {
            table
                .map(range.start, &[Span::new(pa, PAGE)], Prot::RW)
                .unwrap();
        }
    }

    #[test]
    fn memory_that_is_mapped_right_is_found_right() {
        let found = check_with(|_| {});
        assert_eq!((found.read, found.written), (2 * LEN, LEN));
        assert_eq!((found.wrong, found.faults), (0, 0));
        assert_eq!((found.neighbour_faults, found.neighbour_accesses), (8, 8));
    }

    #[test]
    fn a_pair_of_swapped_leaves_is_found() {
        let found = check_with(|table| {
            remap(table, 3, None);
            remap(table, 40, Some(PA + 3 * PAGE));
            table
                .map(
                    IOVA + 3 * PAGE,
                    &[Span::new(PA + 40 * PAGE, PAGE)],
                    Prot::RW,
                )
                .unwrap();
        });
        // Two pages are wrong to both devices and then to the processor; hardly a byte of two
        // different words is equal.
        assert!(
            (found.wrong as f64) > 0.95 * (6 * PAGE) as f64,
            "{}",
            found.wrong
        );
        assert_eq!(found.faults, 0);
    }

    #[test]
    fn a_missing_leaf_is_a_fault_and_a_leaf_too_many_a_neighbour_that_does_not_fault() {
        let found = check_with(|table| remap(table, 7, None));
        assert_eq!(found.faults, 3, "two reads and one write");
        let found = check_with(|table| {
            table
                .map(IOVA + LEN, &[Span::new(PA, PAGE)], Prot::READ)
                .unwrap();
        });
        assert_eq!((found.neighbour_faults, found.neighbour_accesses), (6, 8));
    }
}
