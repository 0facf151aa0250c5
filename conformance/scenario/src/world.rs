//! Everything that is under test, with its shadow: an address space over a back end, the memory, the devices, and
//! what the model says of each page. Each operation is the call of the address space, and what it changes in the
//! model; devices may find anything at the pages that it is at work on, and only there.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dmaspace::balloon::BalloonDma;
use hostmem::{Discard, FrameSource, Mapping, Pinner};
use ioas::{
    AttachError, DetachError, HostMemory, Ioas, Ledger, MapError, Memory, Observer, Tracking,
    TrackingError, UnmapError,
};
use iommu::{NodeId, Unit};
use iopt::{Interruption, Pending, Prot};
use runs::Span;
use virtio_balloon::device::SetupError;
use virtio_balloon::{Dma as _, MemoryMap, Reason, Refusals, Region};

use crate::copying::Halves;
use crate::devices::{Player, play};
use crate::dirty::Dirty;
use crate::faults::Faults;
use crate::handover::Handed;
use crate::hardware::{Hardware, Kind, TableNode};
use crate::look::Counted;
use crate::model::{Model, Page};
use crate::pattern::fill;
use crate::ram::{Layout, Ram, without};
use crate::scene::{Attached, Expect, Manner, Play, Players, Scene};
use crate::{Error, PAGE, PARTS};

/// A cut leaves the rest where it is.
pub const INTACT: Interruption = Interruption::Refused;

/// A memory of the guest, before the world is made.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its first guest address.
    pub guest: u64,
    /// The memory file.
    pub mapping: Arc<Mapping>,
    /// Addresses in the place of page frames; frames without it.
    pub layout: Option<Layout>,
}

/// What every world has, whatever its back end.
pub struct Setup {
    /// The device addresses, whole pages.
    pub range: Span,
    /// The memories, all of one length.
    pub memories: Vec<Source>,
    /// What pins are charged to.
    pub ledger: Arc<Ledger>,
    /// How devices behave at first.
    pub manner: Manner,
    /// The memory consists of huge pages.
    pub huge: bool,
    /// A node of the caller's choice, for tables of a kernel, which has none for them.
    pub far: NodeId,
}

/// A memory of the guest.
pub struct Part {
    /// Its guest addresses.
    pub guest: Span,
    /// The memory file.
    pub mapping: Arc<Mapping>,
    /// The memory as address spaces hold it.
    pub memory: Arc<Memory>,
    /// Gives it back to the machine.
    pub discard: Discard,
    pub(crate) layout: Option<Layout>,
}

/// Who maps the memory.
pub enum Backend {
    /// Tables of ours, which units of the software IOMMU walk.
    Own(Hardware),
    /// An interface of the kernel.
    Kernel(Handed),
}

/// See the module. Dropped in this order: devices stop, and the address space goes first.
pub struct World {
    pub(crate) players: Players,
    /// The address space.
    pub space: Arc<Ioas>,
    pub(crate) dma: BalloonDma,
    /// The guest's memory, as the balloon has it.
    regions: Vec<Region<Arc<Memory>>>,
    /// Who maps.
    pub backend: Backend,
    /// The guest's memory.
    pub parts: Vec<Part>,
    /// What pins are charged to.
    pub ledger: Arc<Ledger>,
    /// What ledger and kernel counted before.
    pub(crate) charged: u64,
    pub(crate) counted: Counted,
    pub(crate) huge: bool,
    pub(crate) far: NodeId,
    /// What devices may expect.
    pub scene: Arc<Scene>,
    pub(crate) model: Model,
    /// Pages that were unmapped, but not flushed.
    stale: Vec<usize>,
    pub(crate) dirty: Dirty,
    /// What is to fail.
    pub faults: Arc<Faults>,
    /// What the last call of the address space took.
    pub took: Duration,
}

/// What a harvest has found, beside what devices say.
#[derive(Clone, Debug, Default)]
pub struct Harvest {
    /// A unit cannot tell: everything counts as written to.
    pub blind: bool,
    /// What is dirty.
    pub runs: Vec<Span>,
    /// Pages that were written to and are not in it.
    pub missed: u32,
    /// Pages in it that no device has begun to write to.
    pub more: u32,
}

fn unmapped<T>(result: &Result<T, UnmapError>) -> bool {
    result.as_ref().map_or_else(
        |cause| matches!(cause, UnmapError::Flush(_) | UnmapError::Unpin(_)),
        |_| true,
    )
}

impl World {
    /// Over units of these kinds, with so many devices, which have the units in turn.
    ///
    /// # Errors
    ///
    /// When there is no memory for it.
    pub fn over_units(
        setup: Setup,
        pinner: Pinner,
        kinds: &[Kind],
        nodes: &[TableNode],
        devices: usize,
    ) -> Result<Self, Error> {
        let faults = Arc::new(Faults::default());
        let mappings = setup
            .memories
            .iter()
            .map(|source| Arc::clone(&source.mapping));
        let hardware = Hardware::new(kinds, nodes, mappings.collect(), &faults);
        let hardware = hardware.map_err(Error::Tables)?;
        let space = Ioas::with_builder(hardware.builder());
        let (pinner, physical) = (Arc::new(pinner), Arc::clone(&hardware.physical));
        let memory = |(number, source): (usize, &Source)| {
            let frames = match source.layout {
                Some(_) => FrameSource::FileOffset,
                None => FrameSource::Pagemap,
            };
            let (mapping, pinner) = (Arc::clone(&source.mapping), Arc::clone(&pinner));
            let ram = Ram {
                inner: HostMemory::with_pinner(mapping, pinner, frames),
                number,
                layout: source.layout,
                faults: Arc::clone(&faults),
                observer: Arc::clone(&physical) as _,
                pins: AtomicU64::new(0),
            };
            Memory::new(Arc::new(ram), &setup.ledger)
        };
        let memories = setup.memories.iter().enumerate().map(memory).collect();
        let backend = Backend::Own(hardware);
        // By the unit's cache, 2,048 accesses and one in 16 into a hole see what a flush has left.
        let model = (devices, (2048, 128));
        Self::new(setup, memories, space, backend, faults, model)
    }

    /// Over `space`, which an interface of the kernel maps for so many devices: they are attached.
    ///
    /// # Errors
    ///
    /// When there is no memory for it.
    pub fn over_kernel(
        setup: Setup,
        space: Ioas,
        handed: Handed,
        devices: usize,
    ) -> Result<Self, Error> {
        let host = |source: &Source| HostMemory::new(Arc::clone(&source.mapping));
        let memory = |source| Memory::new(Arc::new(host(source)), &setup.ledger);
        let memories = setup.memories.iter().map(memory).collect();
        let (backend, faults) = (Backend::Kernel(handed), Arc::default());
        let mut world = Self::new(setup, memories, space, backend, faults, (devices, (4, 2)))?;
        for device in 0..devices {
            world.model.attached[device] = true;
            world.scene.attached(device, Attached::Yes);
        }
        Ok(world)
    }

    fn new(
        setup: Setup,
        memories: Vec<Arc<Memory>>,
        space: Ioas,
        backend: Backend,
        faults: Arc<Faults>,
        (devices, seen): (usize, (u64, u64)),
    ) -> Result<Self, Error> {
        let (charged, counted) = (setup.ledger.in_use(), Counted::now()?);
        let pages = |part: &Part| (part.guest.len / PAGE) as usize;
        let part = |(source, memory): (Source, _)| {
            Ok(Part {
                guest: Span::new(source.guest, source.mapping.len()),
                discard: Discard::new(Arc::clone(&source.mapping))?,
                mapping: source.mapping,
                memory,
                layout: source.layout,
            })
        };
        let parts = setup.memories.into_iter().zip(memories).map(part);
        let parts = parts.collect::<Result<Vec<_>, hostmem::DiscardError>>();
        let parts = parts.map_err(|cause| Error::Balloon(cause.into()))?;
        let memory = parts.iter().map(pages).sum();
        let region = |part: &Part| Region {
            guest: part.guest,
            page: PAGE,
            memory: Arc::clone(&part.memory),
        };
        let regions: Vec<_> = parts.iter().map(region).collect();
        MemoryMap::new(&regions).map_err(|cause| Error::Balloon(SetupError::Ram(cause).into()))?;
        let scene = Scene::new(setup.range, memory, devices, seen, setup.manner);
        let (scene, space) = (Arc::new(scene), Arc::new(space));
        Ok(Self {
            players: Players::new(Arc::clone(&scene)),
            dma: dma(&space),
            regions,
            space,
            backend,
            ledger: setup.ledger,
            charged,
            counted,
            huge: setup.huge,
            far: setup.far,
            model: Model::new(scene.len(), memory, devices),
            scene,
            parts,
            stale: Vec::new(),
            dirty: Dirty::default(),
            faults,
            took: Duration::ZERO,
        })
    }

    /// Has the devices of the software unit begin, on so many threads.
    ///
    /// # Errors
    ///
    /// Where there can be no threads.
    pub fn play(&mut self, threads: usize, seed: u64) -> std::io::Result<()> {
        let Backend::Own(hardware) = &self.backend else {
            return Ok(());
        };
        let (all, threads) = (self.model.attached.len(), threads.max(1));
        for thread in 0..threads.min(all) {
            let ports: Vec<_> = (thread..all)
                .step_by(threads)
                .map(|number| {
                    let (unit, id) = hardware.device(number);
                    (number, hardware.units[unit].port(id))
                })
                .collect();
            let seed = seed ^ (thread as u64 + 1);
            self.players.start(Box::new(move |scene| {
                let player = |(number, port)| Player {
                    scene,
                    number,
                    port,
                };
                let mut players: Vec<_> = ports.into_iter().map(player).collect();
                play(&mut players, seed);
                Ok(())
            }))?;
        }
        Ok(())
    }

    /// Fills the memory, and has devices of the machine begin, each with work of its own.
    ///
    /// # Errors
    ///
    /// Where there can be no threads.
    pub fn copy(
        &mut self,
        devices: impl IntoIterator<Item = impl FnOnce(Halves) -> Play>,
    ) -> std::io::Result<()> {
        for part in &self.parts {
            // Nobody stops it: it is as quick as bringing the memory in.
            let _ = fill(&part.mapping, &mut |_| ControlFlow::Continue(()));
        }
        for version in &self.scene.versions {
            version.store(1, Ordering::SeqCst);
        }
        let halves = self.parts.iter().map(|part| Arc::clone(&part.mapping));
        let memory = Halves {
            halves: halves.collect(),
            parts: (0..PARTS).map(|_| Default::default()).collect(),
        };
        for device in devices {
            self.players.start(device(memory.clone()))?;
        }
        Ok(())
    }

    /// Stops the devices. Returns why one had stopped by itself.
    pub fn stop(&mut self) -> Option<String> {
        self.players.stop()
    }

    /// All device addresses.
    pub fn range(&self) -> Span {
        Span::new(self.scene.base, self.scene.len() as u64 * PAGE)
    }

    /// True while pages are pinned: some device is attached.
    pub fn is_live(&self) -> bool {
        self.model.is_live()
    }

    /// Whether this device is attached.
    pub fn is_attached(&self, device: usize) -> bool {
        self.model.attached[device]
    }

    /// Whether it is tracked what devices write to.
    pub const fn tracks(&self) -> bool {
        self.dirty.is_on()
    }

    /// More is found dirty than what was written to, from now on.
    pub fn blur(&mut self) {
        self.dirty.blur();
    }

    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let started = Instant::now();
        let done = work(self);
        self.took = started.elapsed();
        done
    }

    /// Devices may find anything at `pages` from now on, until they are [settled](Self::settle).
    pub(crate) fn moving(&mut self, pages: impl IntoIterator<Item = usize>) {
        let _quiet = self.scene.quiet();
        for page in pages {
            self.scene.set(page, Expect::Moving);
            self.dirty.touch(page);
        }
    }

    /// Devices are to find at `pages` what the model says. What is unmapped but not flushed waits.
    pub fn settle(&mut self, pages: impl IntoIterator<Item = usize>) {
        let waits = self.space.retired() > 0;
        let _quiet = self.scene.quiet();
        if !waits {
            for page in self.stale.drain(..) {
                self.scene.set(page, self.model.expect(page));
            }
        }
        for page in pages {
            let expect = self.model.expect(page);
            if waits && expect == Expect::Hole {
                self.stale.push(page);
            } else {
                self.scene.set(page, expect);
            }
        }
    }

    /// What the areas say about `pages`, after an operation that was done in part.
    fn learn(&mut self, pages: impl IntoIterator<Item = usize>) {
        for page in pages {
            let area = self.space.area_at(self.scene.base + page as u64 * PAGE);
            if let (Some(page), Some(area)) = (&mut self.model.pages[page], area) {
                (page.out, page.released) = (area.is_out(), area.is_released());
            }
        }
    }

    /// `part` of memory `number`, counted in pages through all memories.
    pub(crate) fn memory_pages(&self, number: usize, part: Span) -> Range<usize> {
        let before = self.parts.iter().take(number);
        let before: u64 = before.map(|part| part.guest.len / PAGE).sum();
        let first = (before + part.start / PAGE) as usize;
        first..first + (part.len / PAGE) as usize
    }

    /// Nothing is in the way of a map there.
    pub fn is_free(&self, range: Span) -> bool {
        self.model.is_free(self.scene.pages_of(range))
    }

    /// Maps `part` of memory `number` at `iova`.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::map`].
    pub fn map(
        &mut self,
        iova: u64,
        number: usize,
        part: Span,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let range = Span::new(iova, part.len);
        let (pages, free) = (self.scene.pages_of(range), self.is_free(range));
        if free {
            self.moving(pages.clone());
        }
        let memory = Arc::clone(&self.parts[number].memory);
        let done = self.timed(|world| world.space.map(iova, &memory, part, prot, observer));
        if done.is_ok() {
            if !free {
                self.scene.complain(format!("map {range}: over an area"));
            }
            let memory = self.memory_pages(number, part);
            for (page, memory) in pages.clone().zip(memory) {
                self.model.pages[page] = Some(Page {
                    memory: memory as u32,
                    write: prot.contains(Prot::WRITE),
                    out: false,
                    released: false,
                });
            }
        }
        if free {
            self.settle(pages);
        }
        done
    }

    /// Unmaps by `how` what is in `range`.
    ///
    /// # Errors
    ///
    /// That of `how`.
    pub fn unmap<T>(
        &mut self,
        range: Span,
        how: impl FnOnce(&Ioas) -> Result<T, UnmapError>,
    ) -> Result<T, UnmapError> {
        let pages = self.scene.pages_of(range);
        self.moving(pages.clone());
        let done = self.timed(|world| how(&world.space));
        if unmapped(&done) {
            self.model.pages[pages.clone()].fill(None);
        }
        self.settle(pages);
        done
    }

    /// Takes `range` out of what devices reach: the bytes that were unpinned.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::take_out`].
    pub fn take_out(&mut self, range: Span) -> Result<u64, UnmapError> {
        let pages = self.scene.pages_of(range);
        self.moving(pages.clone());
        let done = self.timed(|world| world.space.take_out(range, INTACT, &mut ()));
        if unmapped(&done) {
            self.model.change(pages.clone(), |page| page.out = true);
        }
        self.settle(pages);
        done
    }

    /// Puts `range` back.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::put_back`].
    pub fn put_back(&mut self, range: Span) -> Result<(), MapError> {
        let pages = self.scene.pages_of(range);
        self.moving(pages.clone());
        let done = self.timed(|world| world.space.put_back(range, INTACT, &mut ()));
        match done {
            Ok(()) => self.model.change(pages.clone(), |page| page.out = false),
            Err(_) => self.learn(pages.clone()),
        }
        self.settle(pages);
        done
    }

    /// Attaches a device of the software unit.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::attach`].
    pub fn attach(&mut self, number: usize) -> Result<(), AttachError> {
        let Backend::Own(hardware) = &self.backend else {
            return Err(AttachError::AlreadyAttached);
        };
        let was = self.model.attached[number];
        if !was {
            self.scene.attached(number, Attached::Changing);
        }
        let (unit, id) = hardware.device(number);
        let unit = Arc::clone(&hardware.rigged[unit]) as Arc<dyn Unit>;
        let done = self.timed(|world| world.space.attach((unit, id)));
        if was || done.is_ok() {
            self.model.attached[number] = true;
        }
        let now = match self.model.attached[number] {
            true => Attached::Yes,
            false => Attached::No,
        };
        self.scene.attached(number, now);
        self.settle([]);
        done
    }

    /// Detaches a device of the software unit.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::detach`].
    pub fn detach(&mut self, number: usize) -> Result<(), DetachError> {
        let Backend::Own(hardware) = &self.backend else {
            return Ok(());
        };
        let (_, id) = hardware.device(number);
        self.scene.attached(number, Attached::Changing);
        let done = self.timed(|world| world.space.detach(id));
        if done.is_ok() {
            self.model.attached[number] = false;
            self.scene.attached(number, Attached::No);
        }
        self.settle([]);
        done
    }

    /// Begins to track what devices write to.
    ///
    /// # Errors
    ///
    /// Those of [`Ioas::track_dirty`].
    pub fn track(&mut self, leaf: Option<u64>) -> Result<(), TrackingError> {
        let tracking = Tracking {
            leaf,
            interruption: INTACT,
        };
        self.timed(|world| world.space.track_dirty(tracking))?;
        // Marks from before are worth nothing.
        drop((self.scene.take_written(), self.scene.take_perhaps_written()));
        self.dirty.begin(self.scene.len(), leaf.is_none());
        Ok(())
    }

    /// Ends it.
    pub fn untrack(&mut self) {
        self.timed(|world| world.space.untrack_dirty());
        self.dirty.end();
    }

    /// Harvests all addresses, and compares with what devices have written to. What failed on the way, if
    /// something did, comes beside: nothing of the harvest is lost by it.
    ///
    /// # Errors
    ///
    /// When there is no harvest at all.
    pub fn harvest(&mut self) -> Result<(Harvest, Option<Error>), Error> {
        let range = self.range();
        let words = vec![0; self.scene.len().div_ceil(64)];
        let mut pending = Pending::new(words, range, PAGE)?;
        let sure = self.scene.take_written();
        let (harvested, shown) = self.timed(|world| {
            let harvested = world.space.harvest(&mut pending);
            (harvested, world.space.show(&mut pending).map(drop))
        });
        if self.faults.calm() {
            self.dirty.blur();
        }
        // Once more, without a fault: nothing of it is lost.
        let shown_again = self.space.show(&mut pending)?;
        let (words, runs) = (
            shown_again.words().to_vec(),
            shown_again.runs().collect::<Vec<_>>(),
        );
        shown_again.acknowledge();
        let perhaps = self.scene.take_perhaps_written();
        let (missed, more) = self.dirty.judge(&sure, perhaps, words);
        let blind = harvested.as_ref().is_ok_and(|found| found.blind);
        let failed = harvested.err().map(Error::from);
        let failed = failed.or_else(|| shown.err().map(Error::from));
        let found = Harvest {
            blind,
            runs,
            missed,
            more,
        };
        Ok((found, failed))
    }

    /// The guest's memory at these guest addresses is released or restored by `how`, which returns what stayed as
    /// it was and what was discarded; devices may find anything there meanwhile.
    pub(crate) fn balloon<T>(
        &mut self,
        runs: &[Span],
        released: bool,
        how: impl FnOnce(&mut Self) -> (T, bool, Vec<Span>),
    ) -> T {
        let memory: Vec<_> = runs.iter().flat_map(|run| self.of_guest(*run)).collect();
        let pages = self.model.over(&memory);
        self.moving(pages.iter().copied());
        let (done, whole, discarded) = self.timed(how);
        for run in discarded {
            let memory = self.of_guest(run);
            memory.flatten().for_each(|page| self.scene.zeroed(page));
        }
        for page in &pages {
            if let Some(page) = &mut self.model.pages[*page] {
                page.released = released;
            }
        }
        if !whole {
            self.learn(pages.iter().copied());
        }
        self.settle(pages);
        done
    }

    /// The pages of memory at guest addresses.
    fn of_guest(&self, run: Span) -> impl Iterator<Item = Range<usize>> + use<> {
        let inside = self.parts.iter().enumerate().filter_map(|(number, part)| {
            let both = part.guest.intersection(&run)?;
            let inside = Span::new(both.start - part.guest.start, both.len);
            Some(self.memory_pages(number, inside))
        });
        inside.collect::<Vec<_>>().into_iter()
    }

    /// The devices release guest memory, and it is discarded. What stayed as it was is returned.
    pub fn release(&mut self, runs: &[Span]) -> Vec<(Span, Reason)> {
        let kept = self.balloon(runs, true, |world| {
            let mut kept = Vec::new();
            let (map, parts) = resolved(&world.regions, runs);
            world.dma.release(map, &parts, &mut |part, why| {
                kept.push((map.run(&part), why));
            });
            let whole = kept.is_empty();
            (kept, whole, Vec::new())
        });
        for run in runs {
            let mut left = vec![*run];
            for (span, _) in &kept {
                left = left
                    .into_iter()
                    .flat_map(|part| without(part, span))
                    .collect();
            }
            left.into_iter().for_each(|run| self.discard(run));
        }
        kept
    }

    fn discard(&mut self, run: Span) {
        for part in &self.parts {
            let Some(both) = part.guest.intersection(&run) else {
                continue;
            };
            let inside = Span::new(both.start - part.guest.start, both.len);
            let mut kept = 0;
            let done = part
                .discard
                .discard(&[inside], &mut |span, _| kept += span.len);
            if done.is_err() || kept > 0 {
                let text = format!("guest memory {run} is not discarded: {done:?}, kept {kept}");
                self.scene.complain(text);
                return;
            }
        }
        self.of_guest(run)
            .flatten()
            .for_each(|page| self.scene.zeroed(page));
    }

    /// The devices have guest memory back. What stayed as it was is returned.
    pub fn restore(&mut self, runs: &[Span]) -> Vec<(Span, Reason)> {
        self.balloon(runs, false, |world| {
            let mut failed = Vec::new();
            let (map, parts) = resolved(&world.regions, runs);
            world.dma.restore(map, &parts, &mut |part, why| {
                failed.push((map.run(&part), why));
            });
            let whole = failed.is_empty();
            (failed, whole, Vec::new())
        })
    }
}

/// The guest's memory, and what of the runs is in it.
#[expect(clippy::expect_used, reason = "they were looked at when the world was made")]
fn resolved<'a>(
    regions: &'a [Region<Arc<Memory>>],
    runs: &[Span],
) -> (MemoryMap<'a, Arc<Memory>>, Vec<virtio_balloon::Part>) {
    let map = MemoryMap::new(regions).expect("regions of a guest");
    let mut parts = Vec::new();
    for run in runs {
        map.resolve(*run, &mut Refusals::new(), |part| parts.push(part));
    }
    (map, parts)
}

/// What the balloon asks: the address space.
pub(crate) fn dma(space: &Arc<Ioas>) -> BalloonDma {
    let mut dma = BalloonDma::new();
    dma.add_space(Arc::clone(space));
    dma
}
