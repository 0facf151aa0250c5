//! Everything that is under test, with its shadow, and how an operation is made.

use std::collections::{BTreeMap, VecDeque};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use dmaspace::balloon::BalloonDma;
use hostmem::{Backing, Discard, FrameSource, Mapping, Pinner};
use ioas::{Builder, Cause, DomainIds, HostMemory, Ioas, Ledger, Memory};
use runs::Span;

use crate::dirty::Dirty;
use crate::faults::{Fault, Faults};
use crate::hardware::{DEVICES, Rigged, SoftUnit, Tables, UNITS, arena, table_file, units};
use crate::model::Model;
use crate::object::{Layout, Object, Physical, Told};
use crate::random::Random;
use crate::scene::{Expect, Scene, pages};
use crate::{GUEST, IOVA, LIMIT, MEMORIES, MEMORY, MEMORY_PAGES, PAGE};

/// Operations that are remembered.
const REMEMBERED: usize = 60;
/// A pin is made in steps of so many bytes.
const PIECE: u64 = 4 << 20;
/// One operation of so many has a fault armed.
const ARMED: u64 = 5;

/// Dropped in this order: the address space goes first.
pub(crate) struct World {
    pub(crate) space: Arc<Ioas>,
    pub(crate) dma: BalloonDma,
    pub(crate) units: Vec<SoftUnit>,
    pub(crate) rigged: Vec<Arc<Rigged>>,
    pub(crate) memories: Vec<Arc<Memory>>,
    pub(crate) mappings: Vec<Arc<Mapping>>,
    pub(crate) discards: Vec<Discard>,
    pub(crate) file: Mapping,
    pub(crate) tables: Tables,
    pub(crate) ids: Arc<DomainIds>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) physical: Arc<Physical>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) scene: Arc<Scene>,
    pub(crate) model: Model,
    /// Pages that were unmapped, but not flushed.
    pub(crate) stale: Vec<usize>,
    pub(crate) dirty: Dirty,
    pub(crate) random: Random,
    pub(crate) log: VecDeque<String>,
    pub(crate) operations: u64,
    /// By name: how often it was done, and how often it was refused.
    pub(crate) counts: BTreeMap<&'static str, (u64, u64)>,
}

/// Memory number `number` behind `mapping`, as an owner pins it.
pub(crate) fn object(
    number: usize,
    mapping: &Arc<Mapping>,
    pinner: &Arc<Pinner>,
    faults: &Arc<Faults>,
    told: &Arc<Told>,
) -> Object {
    // Addresses are made up: see `Layout`.
    let frames = FrameSource::FileOffset;
    let inner = HostMemory::with_pinner(Arc::clone(mapping), Arc::clone(pinner), frames);
    Object::new(inner, layout(number), Arc::clone(faults), Arc::clone(told))
}

fn layout(number: usize) -> Layout {
    // One run, fragments, and large pages that are not neighbours.
    let chunk = [MEMORY, 16 << 10, 2 << 20][number % 3];
    Layout::new(number, MEMORY, chunk)
}

pub(crate) fn pinner() -> Result<Arc<Pinner>, Cause> {
    Ok(Arc::new(Pinner::probe(PIECE)?))
}

/// Builds the domains of devices that come.
pub(crate) fn builder(tables: &Tables, ids: &Arc<DomainIds>) -> Builder {
    let formats = UNITS.map(|(format, ..)| format);
    let tables = tables.clone();
    Builder::new(tables, Arc::clone(ids), formats)
}

/// What the balloon asks: the memories one after the other, and the address space.
pub(crate) fn balloon(memories: &[Arc<Memory>], space: &Arc<Ioas>) -> BalloonDma {
    let mut dma = BalloonDma::new();
    for (number, memory) in memories.iter().enumerate() {
        dma.add_memory(number as u64 * GUEST, Arc::clone(memory));
    }
    dma.add_space(Arc::clone(space));
    dma
}

/// An error with all its causes, as one sentence.
pub(crate) fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

impl World {
    pub(crate) fn new(seed: u64) -> Result<Self, Cause> {
        let faults = Arc::new(Faults::default());
        let pinner = pinner()?;
        let mut mappings = Vec::new();
        for _ in 0..MEMORIES {
            let mapping = Mapping::new(Backing::Memfd, MEMORY, None)?;
            mapping.populate(&mut |_| ControlFlow::Continue(()))?;
            mappings.push(Arc::new(mapping));
        }
        let layouts = mappings.iter().enumerate();
        let layouts = layouts.map(|(number, mapping)| (layout(number), Arc::clone(mapping)));
        let physical = Arc::new(Physical::new(layouts.collect()));
        let witness = Arc::clone(&physical);
        let told: Arc<Told> = Arc::new(move |memory, part, pinned| {
            witness.note(memory, part, pinned);
            Ok(())
        });
        let ledger = Ledger::new("the soak's limit", Some(LIMIT), 0);
        let mut memories = Vec::new();
        let mut discards = Vec::new();
        for (number, mapping) in mappings.iter().enumerate() {
            let object = object(number, mapping, &pinner, &faults, &told);
            let memory = Memory::new(Arc::new(object), &ledger);
            memories.push(memory);
            discards.push(Discard::new(Arc::clone(mapping))?);
        }
        let file = table_file()?;
        let tables = Tables::new(arena(crate::hardware::again(&file)?)?, &faults);
        let units = units(&file, &physical)?;
        let rigged = units.iter().map(|unit| {
            let (unit, faults) = (unit.clone(), Arc::clone(&faults));
            Arc::new(Rigged { unit, faults })
        });
        let rigged = rigged.collect();
        let ids = DomainIds::new(16);
        let space = Ioas::with_builder(builder(&tables, &ids));
        let space = Arc::new(space);
        let dma = balloon(&memories, &space);
        Ok(Self {
            space,
            dma,
            rigged,
            units,
            memories,
            mappings,
            discards,
            file,
            tables,
            ids,
            ledger,
            physical,
            faults,
            scene: Arc::new(Scene::new(DEVICES, MEMORY_PAGES)),
            model: Model::new(DEVICES),
            stale: Vec::new(),
            dirty: Dirty::default(),
            random: Random::new(seed),
            log: VecDeque::new(),
            operations: 0,
            counts: BTreeMap::new(),
        })
    }

    /// Devices may find anything at `pages` from now on, until they are [settled](Self::settle).
    pub(crate) fn moving(&mut self, pages: impl IntoIterator<Item = usize>) {
        let _quiet = self.scene.quiet();
        for page in pages {
            self.scene.expect(page, Expect::Moving);
            self.dirty.touch(page);
        }
    }

    /// Devices are to find at `pages` what the model says. What is unmapped but not flushed waits.
    pub(crate) fn settle(&mut self, pages: impl IntoIterator<Item = usize>) {
        let waits = self.space.retired() > 0;
        let _quiet = self.scene.quiet();
        if !waits {
            for page in self.stale.drain(..) {
                self.scene.expect(page, self.model.expect(page));
            }
        }
        for page in pages {
            let expect = self.model.expect(page);
            if waits && expect == Expect::Hole {
                self.stale.push(page);
            } else {
                self.scene.expect(page, expect);
            }
        }
    }

    /// Perhaps something is to fail in what comes next.
    pub(crate) fn arm(&mut self) {
        if self.random.below(ARMED) == 0 {
            let fault = Fault::ALL[self.random.below(4) as usize];
            self.faults.arm(fault, self.random.below(6));
        }
    }

    /// Notes what came of an operation. True when it was done; an error that nobody has brought about is
    /// a complaint.
    pub(crate) fn note(
        &mut self,
        name: &'static str,
        what: &str,
        result: Result<(), (String, bool)>,
    ) -> bool {
        let fired = self.faults.disarm();
        if fired {
            self.dirty.blur();
            // What a flush that failed has left behind is made up for.
            if let Err(cause) = self.space.flush() {
                self.scene
                    .complain(format!("a flush after a failure: {cause}"));
            }
        }
        let counts = self.counts.entry(name).or_default();
        let said = match &result {
            Ok(()) => "done".into(),
            Err((cause, _)) => format!("refused: {cause}"),
        };
        match result {
            Ok(()) => counts.0 += 1,
            Err((_, expected)) => {
                counts.1 += 1;
                if !expected && !fired {
                    self.scene.complain(format!("{name} {what}: {said}"));
                }
            }
        }
        let fault = if fired { ", with a fault" } else { "" };
        self.operations += 1;
        self.log
            .push_back(format!("{}: {name} {what}: {said}{fault}", self.operations));
        if self.log.len() > REMEMBERED {
            self.log.pop_front();
        }
        said == "done"
    }

    /// What the areas say about `pages`, after an operation that was done in part.
    pub(crate) fn learn(&mut self, pages: &[usize]) {
        for page in pages {
            let area = self.space.area_at(IOVA + *page as u64 * PAGE);
            if let (Some(page), Some(area)) = (&mut self.model.pages[*page], area) {
                (page.out, page.released) = (area.is_out(), area.is_released());
            }
        }
    }

    /// Some area, if there is one that `suits`.
    pub(crate) fn some_area(&mut self, suits: impl Fn(&ioas::Area) -> bool) -> Option<Span> {
        let ranges = self.space.areas().into_iter().filter(suits);
        let ranges: Vec<Span> = ranges.map(|area| area.range()).collect();
        let nth = self.random.below(ranges.len().max(1) as u64);
        ranges.get(nth as usize).copied()
    }

    /// Some part of `range`, in whole pages.
    pub(crate) fn some_part(&mut self, range: Span) -> Span {
        let all = range.len / PAGE;
        let first = self.random.below(all);
        let most = (all - first).min(1 << self.random.below(10));
        let count = 1 + self.random.below(most);
        Span::new(range.start + first * PAGE, count * PAGE)
    }

    pub(crate) fn pages_of(range: Span) -> Range<usize> {
        pages(range)
    }
}

/// Where page `page` of all memories lies.
pub(crate) fn address(page: u32) -> u64 {
    let all = (MEMORY_PAGES / MEMORIES) as u32;
    layout((page / all) as usize).address(u64::from(page % all) * PAGE)
}
