//! Common parts of the tests: memory objects, units and observers that fail on demand, and the whole state of an
//! address space as a value.

#![allow(dead_code, unused_imports, reason = "no test binary uses all of it")]

mod beside;
pub(crate) mod machines;
pub(crate) mod nodes;
pub(crate) mod pin_model;
mod tracked;
mod unit;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ioas::{
    Cause, EndpointId, Ioas, Ledger, Memory, MemoryObject, Observer, PinFailed, Pinned, RunReader,
    Step, Synthetic,
};
use iommu::{BadTarget, DeviceId, DomainId, RunMap, SoftwareUnit, TargetMemory, Unit};
use iopt::{AnyTable, FormatId, HeapTables, Leaf};
use runs::{Iova, Joiner, Offset, Pa, PageSizes, Span};

pub(crate) use beside::{Before, beside, stop};
pub(crate) use tracked::{Pages, Tracked};
pub(crate) use unit::{FrailUnit, Hook, call};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const DOMAIN: DomainId = DomainId(7);
pub(crate) const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);

/// The formats under test.
pub(crate) const FORMATS: [(FormatId, u8); 3] = [
    (FormatId::VtdSs, 4),
    (FormatId::X86_64, 4),
    (FormatId::AmdV1, 4),
];

pub(crate) type Space = Ioas;

pub(crate) fn table(format: FormatId, levels: u8, tables: &Arc<HeapTables>) -> AnyTable {
    let sizes = PageSizes::from_bits(u64::MAX);
    AnyTable::new(format, levels, sizes, tables.clone()).unwrap()
}

pub(crate) fn space(format: FormatId, levels: u8, tables: &Arc<HeapTables>) -> Space {
    Ioas::over_table(DOMAIN, table(format, levels, tables))
}

/// `object` with an account of its own, which refuses nothing.
pub(crate) fn unlimited(object: Arc<dyn MemoryObject>) -> Arc<Memory> {
    Memory::new(object, &Ledger::unlimited())
}

/// A software unit over `tables` for tests that do no DMA.
pub(crate) fn unit(tables: &Arc<HeapTables>) -> Arc<dyn Unit> {
    let none = RunMap::<Vec<AtomicU64>>::new([]).unwrap();
    Arc::new(SoftwareUnit::new(tables.clone(), none))
}

/// Memory in which every word is its own physical address: a read by DMA tells where it came from.
pub(crate) struct Echo;

impl TargetMemory for Echo {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        let words: Vec<_> = (0..span.len / 8)
            .map(|n| AtomicU64::new(span.start + 8 * n))
            .collect();
        visit(&words);
        Ok(())
    }
}

/// All leaves in the lower half of the address space.
pub(crate) fn leaves(space: &Ioas) -> Vec<Leaf> {
    space.with_table(leaves_of).unwrap()
}

pub(crate) fn leaves_of(table: &AnyTable) -> Vec<Leaf> {
    let mut leaves = Vec::new();
    table.for_each_leaf(Span::new(0, 1 << 47), |leaf| leaves.push(leaf));
    leaves
}

/// Everything that an operation which has failed must leave as it was.
#[derive(Debug, PartialEq)]
pub(crate) struct State {
    pub(crate) in_use: u64,
    pub(crate) pinned: u64,
    pub(crate) domains: Vec<DomainId>,
    /// Leaves of all domains, one after the other.
    pub(crate) leaves: Vec<Leaf>,
    pub(crate) tables: u64,
    pub(crate) areas: Vec<Span<Iova>>,
    /// Bytes that are held of the memory of each.
    pub(crate) held: Vec<u64>,
    pub(crate) devices: Vec<EndpointId>,
    pub(crate) retired: usize,
}

impl State {
    pub(crate) fn of(
        space: &Space,
        ledger: &Ledger,
        tables: &HeapTables,
        memories: &[&Synthetic],
    ) -> Self {
        let areas = space.areas();
        let (mut domains, mut leaves) = (Vec::new(), Vec::new());
        space.tables(|id, table| {
            domains.push(id);
            leaves.append(&mut leaves_of(table));
        });
        Self {
            in_use: ledger.in_use(),
            pinned: memories.iter().map(|memory| memory.pinned()).sum(),
            domains,
            leaves,
            tables: tables.in_use(),
            areas: areas.iter().map(|area| area.range()).collect(),
            held: areas.iter().map(|area| area.memory().held()).collect(),
            devices: space.endpoints(),
            retired: space.retired(),
        }
    }
}

/// Runs that `reader` reads, neighbours joined.
pub(crate) fn read_runs(reader: &mut dyn RunReader) -> Vec<Span<Pa>> {
    let mut runs = Vec::new();
    let mut joiner = Joiner::new();
    let mut batch = [Span::default(); 64];
    loop {
        match reader.next_batch(&mut batch).unwrap() {
            0 => break,
            count => runs.extend(batch[..count].iter().filter_map(|run| joiner.push(*run))),
        }
    }
    runs.extend(joiner.finish());
    runs
}

/// Calls of a kind that fail: none by default.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    calls: AtomicU64,
    at: Mutex<BTreeSet<u64>>,
}

impl Faults {
    /// The calls from now on that fail: 0 for the next one.
    pub(crate) fn set(&self, at: impl IntoIterator<Item = u64>) {
        let mut set = self.at.lock().unwrap();
        self.calls.store(0, Ordering::SeqCst);
        *set = at.into_iter().collect();
    }

    /// Counts a call; true when it is to fail.
    pub(crate) fn hit(&self) -> bool {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        self.at.lock().unwrap().contains(&call)
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }
}

/// Deviation of a reader of runs from what is right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Lie {
    #[default]
    None,
    /// 40 pages more at the end, in runs of their own: more than a batch.
    More,
    /// Without the last run.
    Less,
    /// A run of no bytes behind the last one.
    Nothing,
    /// More runs than there was room for.
    TooMany,
}

/// A [`Synthetic`] of which each step can fail, in small batches.
#[derive(Debug)]
pub(crate) struct Frail {
    pub(crate) memory: Synthetic,
    /// Runs in a batch, over and over; each cut into pieces of at most `piece` bytes.
    pub(crate) batches: Vec<usize>,
    pub(crate) piece: u64,
    pub(crate) pins: Faults,
    pub(crate) readers: Arc<Faults>,
    pub(crate) reads: Arc<Faults>,
    pub(crate) releases: Arc<Faults>,
    pub(crate) unpins: Arc<Faults>,
    pub(crate) lie: Lie,
}

impl Frail {
    pub(crate) fn new(memory: Synthetic) -> Self {
        Self {
            memory,
            batches: vec![5],
            piece: u64::MAX,
            pins: Faults::default(),
            readers: Arc::default(),
            reads: Arc::default(),
            releases: Arc::default(),
            unpins: Arc::default(),
            lie: Lie::None,
        }
    }
}

impl MemoryObject for Frail {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        self.memory.charge(part)
    }

    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        if self.pins.hit() {
            return Err(PinFailed::Refused("no".into()));
        }
        Ok(Box::new(FrailPin {
            pin: self.memory.pin(part, progress)?,
            batches: self.batches.clone(),
            piece: self.piece,
            readers: self.readers.clone(),
            reads: self.reads.clone(),
            releases: self.releases.clone(),
            unpins: self.unpins.clone(),
            lie: self.lie,
        }))
    }
}

#[derive(Debug)]
struct FrailPin {
    pin: Box<dyn Pinned>,
    batches: Vec<usize>,
    piece: u64,
    readers: Arc<Faults>,
    reads: Arc<Faults>,
    releases: Arc<Faults>,
    unpins: Arc<Faults>,
    lie: Lie,
}

impl Pinned for FrailPin {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        if self.readers.hit() {
            return Err("no runs".into());
        }
        let mut runs = Vec::new();
        for run in read_runs(&mut *self.pin.runs(part)?) {
            let mut at = 0;
            while at < run.len {
                let len = self.piece.min(run.len - at);
                runs.push(Span::new(run.start + at, len));
                at += len;
            }
        }
        match self.lie {
            Lie::More => runs.extend((0..40).map(|n| Span::new(0x7f00_0000 + n * 2 * PAGE, PAGE))),
            Lie::Less => drop(runs.pop()),
            Lie::Nothing => runs.push(Span::new(0x7fff_0000, 0)),
            Lie::None | Lie::TooMany => {}
        }
        Ok(Box::new(FrailReader {
            runs,
            next: 0,
            batch: 0,
            pin: self,
        }))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        if self.releases.hit() {
            return Err("a part stays".into());
        }
        self.pin.release(part)
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        if self.unpins.hit() {
            // The state of the memory is unknown.
            std::mem::forget(self.pin);
            return Err("it stays".into());
        }
        self.pin.unpin()
    }
}

struct FrailReader<'a> {
    runs: Vec<Span<Pa>>,
    next: usize,
    batch: usize,
    pin: &'a FrailPin,
}

impl RunReader for FrailReader<'_> {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        if self.pin.reads.hit() {
            return Err("unreadable".into());
        }
        let batches = &self.pin.batches;
        let rest = &self.runs[self.next..];
        let count = batches[self.batch % batches.len()]
            .min(out.len())
            .min(rest.len());
        self.batch += 1;
        out[..count].copy_from_slice(&rest[..count]);
        self.next += count;
        if self.pin.lie == Lie::TooMany && count == rest.len() {
            return Ok(out.len() + 1);
        }
        Ok(count)
    }
}

/// An observer that sees that steps never overlap and always end; it breaks or panics on demand.
#[derive(Default)]
pub(crate) struct Watch {
    pub(crate) open: Option<Step>,
    pub(crate) steps: Vec<(Step, u64)>,
    /// Calls of `progress` that break.
    pub(crate) breaks: Faults,
    /// Calls of any method that panic.
    pub(crate) panics: Faults,
}

impl Watch {
    pub(crate) fn breaking(n: u64) -> Self {
        let watch = Self::default();
        watch.breaks.set([n]);
        watch
    }

    pub(crate) fn panicking(n: u64) -> Self {
        let watch = Self::default();
        watch.panics.set([n]);
        watch
    }

    fn event(&self) {
        if self.panics.hit() {
            // Without the noise that the hook of `panic!` makes.
            std::panic::resume_unwind(Box::new("the observer gives up"));
        }
    }

    pub(crate) fn bytes(&self, step: Step) -> u64 {
        let of_step = self.steps.iter().filter(|(s, _)| *s == step);
        of_step.map(|(_, bytes)| bytes).sum()
    }
}

impl Observer for Watch {
    fn begin(&mut self, step: Step) {
        self.event();
        assert_eq!(self.open, None, "{step:?} begins inside of another step");
        self.open = Some(step);
    }

    fn end(&mut self, step: Step, bytes: u64) {
        self.event();
        assert_eq!(self.open.take(), Some(step), "ends without having begun");
        self.steps.push((step, bytes));
    }

    fn progress(&mut self, _step: Step, _done: u64) -> ControlFlow<()> {
        self.event();
        if self.breaks.hit() {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !std::thread::panicking() && self.panics.calls() > 0 {
            let panicked = !self.panics.at.lock().unwrap().is_empty();
            assert!(
                panicked || self.open.is_none(),
                "{:?} has no end",
                self.open
            );
        }
    }
}
