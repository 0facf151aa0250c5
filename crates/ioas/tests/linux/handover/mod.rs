//! An address space goes from one owner to the next while its device runs: within this process, and
//! from another one.

mod process;
mod within;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use hostmem::{Backing, FrameSource, Mapping, Pinner};
use ioas::{Handover, HostMemory, HostTables, Ioas, Ledger, MappedStorage, Memory};
use iommu::{BadTarget, DeviceId, DomainId, SoftwareUnit, TargetMemory};
use iopt::{AnyTable, FormatId, Interruption, Prot, Takeover};
use runs::{Iova, Pa, PageSizes, Span};

use super::{AT, MIB, alone, counted, runs_of};

type Space = Ioas;

const BYTES: u64 = 8 * MIB;
const BASE: u64 = 1 << 46;
const PAGE: u64 = 4096;
const GIB: u64 = 1 << 30;
const DOMAIN: DomainId = DomainId(9);
const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);
/// Taken out before it changes hands.
const OUT: Span<Iova> = Span::new(AT + 5 * PAGE, 2 * PAGE);
/// Bytes that the areas hold.
const HELD: u64 = BYTES - 2 * PAGE;

fn also(mapping: &Mapping) -> Mapping {
    let file = mapping.fd().unwrap().try_clone_to_owned().unwrap();
    Mapping::of_file(file).unwrap()
}

/// The memory files that go along: tables, and data in which each word is its offset.
fn files() -> (Mapping, Mapping) {
    let tables = Mapping::new(Backing::Memfd, MIB, None).unwrap();
    let data = Mapping::new(Backing::Memfd, BYTES, None).unwrap();
    data.populate(&mut |_| ControlFlow::Continue(())).unwrap();
    for (word, cell) in (0..).zip(data.cells()) {
        cell.store(8 * word, Ordering::Relaxed);
    }
    (tables, data)
}

/// A pinner, where that many bytes may be locked and frames are what they are.
fn pinner(bytes: u64, data: &Mapping) -> Option<Arc<Pinner>> {
    let pinner = Pinner::probe(2 << 20).unwrap();
    if pinner.room().unwrap().is_some_and(|room| room < bytes) {
        eprintln!("SKIPPED: too little may be locked here");
        return None;
    }
    if !FrameSource::detect(data).is_real() {
        eprintln!("SKIPPED: frames are hidden, and what stands in for them differs by mapping");
        return None;
    }
    Some(Arc::new(pinner))
}

fn memory(data: Mapping, pinner: &Arc<Pinner>, ledger: &Arc<Ledger>) -> Arc<Memory> {
    let object = HostMemory::with_pinner(Arc::new(data), pinner.clone(), FrameSource::Pagemap);
    Memory::new(Arc::new(object), ledger)
}

fn tables(file: &Mapping) -> Arc<HostTables> {
    Arc::new(HostTables::new(MappedStorage::over(also(file)), BASE).unwrap())
}

/// The first owner's address space: all of the memory, and a part of it for reading only.
fn first_owner(tables: Arc<HostTables>, memory: &Arc<Memory>) -> Space {
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables).unwrap();
    let space = Ioas::over_table(DOMAIN, table);
    let whole = Span::new(0, BYTES);
    space.map(AT, memory, whole, Prot::RW).unwrap();
    let part = Span::new(MIB, 3 * MIB);
    space.map(AT + GIB, memory, part, Prot::READ).unwrap();
    space.take_out(OUT, Interruption::Refused).unwrap();
    space
}

/// Tables that were handed over, with the devices of their domains.
fn adopted(file: &Mapping, handover: &Handover) -> (Arc<HostTables>, Vec<AnyTable>) {
    let mut takeover = Takeover::new(MappedStorage::over(also(file)), BASE).unwrap();
    let found: Vec<_> = handover
        .domains
        .iter()
        .map(|domain| {
            let (root, sizes) = (domain.root, domain.page_sizes);
            AnyTable::adopt(&mut takeover, root, sizes).unwrap()
        })
        .collect();
    let tables = Arc::new(takeover.finish());
    let open = |adopted: iopt::AnyAdopted| adopted.open(tables.clone()).unwrap();
    let opened = found.into_iter().map(open).collect();
    (tables, opened)
}

/// The data by physical address: what the device reaches.
struct Physical {
    data: Mapping,
    /// With the offset of each, by address.
    runs: Vec<(Span<Pa>, u64)>,
}

impl Physical {
    fn new(data: Mapping, runs: &[Span<Pa>]) -> Arc<Self> {
        let mut at = 0;
        let mut placed = Vec::new();
        for run in runs {
            placed.push((*run, at));
            at += run.len;
        }
        assert_eq!(at, BYTES);
        placed.sort_unstable();
        let runs = placed;
        Arc::new(Self { data, runs })
    }
}

impl TargetMemory for Physical {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        for address in (span.start..=span.last()).step_by(8) {
            let next = self.runs.partition_point(|(run, _)| run.start <= address);
            let found = next.checked_sub(1).map(|at| self.runs[at]);
            let Some((run, offset)) = found.filter(|(run, _)| run.contains(address)) else {
                return Err(BadTarget { address });
            };
            let word = (offset + (address - run.start)) / 8;
            visit(std::slice::from_ref(&self.data.cells()[word as usize]));
        }
        Ok(())
    }
}

/// Frames of all of the data, which is pinned.
fn frames(data: &Mapping) -> Vec<Span<Pa>> {
    let pinner = Pinner::probe(2 << 20).unwrap();
    let memory = memory(also(data), &Arc::new(pinner), &Ledger::unlimited());
    let file = Mapping::new(Backing::Memfd, MIB, None).unwrap();
    let space = first_owner(tables(&file), &memory);
    space.put_back(OUT, Interruption::Refused).unwrap();
    let runs = runs_of(&space, Span::new(AT, BYTES));
    space.close().unwrap();
    runs
}

type Machine = SoftwareUnit<Arc<HostTables>, Arc<Physical>>;

/// The device reads and writes all that it can reach, until it is stopped, without one fault.
fn run(unit: &Machine, stop: &AtomicBool, rounds: &AtomicU64) {
    let mut port = unit.port(DEVICE);
    while !stop.load(Ordering::Relaxed) {
        for offset in (0..BYTES).step_by(PAGE as usize + 8) {
            let at = AT + offset;
            let mut word = [0];
            if !OUT.contains(at) {
                port.read(at, &mut word).unwrap();
                assert_eq!(word[0], offset);
                port.write(at, &word).unwrap();
            }
            if (MIB..4 * MIB).contains(&offset) {
                port.read(AT + GIB + offset - MIB, &mut word).unwrap();
                assert_eq!(word[0], offset);
            }
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs `work` beside the device. It is given a function that waits until the device has been
/// everywhere once more.
fn beside_the_device<T>(unit: &Machine, work: impl FnOnce(&dyn Fn()) -> T) -> T {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let device = scope.spawn(|| run(unit, &stop, &rounds));
        let done = work(&|| {
            let until = rounds.load(Ordering::Relaxed) + 2;
            while rounds.load(Ordering::Relaxed) < until {
                assert!(!device.is_finished(), "the device has met a fault");
                thread::yield_now();
            }
        });
        stop.store(true, Ordering::Relaxed);
        device.join().unwrap();
        done
    })
}

/// The new owner puts back what was out, maps and unmaps, and comes to an end.
fn goes_on(unit: &Machine, space: Space, memory: &Arc<Memory>, tables: &HostTables) {
    let mut port = unit.port(DEVICE);
    let mut word = [0];
    assert!(port.read(OUT.start, &mut word).is_err());
    space.put_back(OUT, Interruption::Refused).unwrap();
    port.read(OUT.start, &mut word).unwrap();
    assert_eq!((word[0], space.len()), (5 * PAGE, 2));
    let part = Span::new(0, 600 * PAGE);
    let at = AT + 40 * GIB;
    space.map(at, memory, part, Prot::RW).unwrap();
    port.read(at + 599 * PAGE, &mut word).unwrap();
    assert_eq!(word[0], 599 * PAGE);
    let range = Span::new(at, part.len);
    assert_eq!(space.unmap(range).unwrap().bytes, part.len);
    assert!(port.read(at, &mut word).is_err());
    assert_eq!(space.endpoints(), [DEVICE.into()]);
    space.close().unwrap();
    assert!(port.read(AT, &mut word).is_err());
    assert_eq!((tables.in_use(), memory.held()), (0, 0));
    assert_eq!(memory.ledger().in_use(), 0);
}
