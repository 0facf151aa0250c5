//! Everything that is under test, with its shadow: an address space, the memory, the devices, and
//! what the model says of each page.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use dmaspace::balloon::BalloonDma;
use hostmem::{Discard, FrameSource, Mapping, Pinner};
use ioas::{HostMemory, Ioas, Ledger, Memory};
use runs::{GuestAddr, Iova, Span};
use virtio_balloon::{MemoryMap, Region};

use crate::check::Counted;
use crate::devices::{Player, play};
use crate::dirty::Dirty;
use crate::faults::Faults;
use crate::hardware::{Hardware, Kind, TableNode};
use crate::model::Model;
use crate::ram::{Layout, Ram};
use crate::scene::{Manner, Players, Scene, locked};
use crate::{Error, PAGE};

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

/// Parts of a world.
pub struct Setup {
    /// The device addresses, whole pages.
    pub range: Span<Iova>,
    /// The memories, all of one length.
    pub memories: Vec<Source>,
    /// What pins are charged to.
    pub ledger: Arc<Ledger>,
    /// How devices behave at first.
    pub manner: Manner,
    /// The memory consists of huge pages.
    pub huge: bool,
}

/// A memory of the guest.
pub struct Part {
    /// Its guest addresses.
    pub guest: Span<GuestAddr>,
    /// The memory file.
    pub mapping: Arc<Mapping>,
    /// The memory as address spaces hold it.
    pub memory: Arc<Memory>,
    /// Gives it back to the machine.
    pub discard: Discard,
    /// For writing while it is released and discarded: no operation maps it meanwhile.
    pub(crate) discarding: RwLock<()>,
    pub(crate) layout: Option<Layout>,
}

/// See the module. Dropped in this order: devices stop, and the address space goes first.
pub struct World {
    pub(crate) players: Players,
    /// The address space.
    pub space: Arc<Ioas>,
    /// The guest's memory, as the balloon has it.
    pub(crate) regions: Vec<Region<Arc<Memory>>>,
    /// The units, and the memory of their tables.
    pub(crate) hardware: Hardware,
    /// The guest's memory.
    pub parts: Vec<Part>,
    /// What pins are charged to.
    pub ledger: Arc<Ledger>,
    /// What ledger and kernel counted before.
    pub(crate) charged: u64,
    pub(crate) counted: Counted,
    pub(crate) huge: bool,
    /// A part of a page was taken out, once.
    pub(crate) cut: AtomicBool,
    /// What devices may expect.
    pub scene: Arc<Scene>,
    /// Locked for a moment, before a call of the address space and after it.
    model: Mutex<Model>,
    /// Locked while tracking begins or ends, and during a harvest.
    pub(crate) dirty: Mutex<Dirty>,
    /// What is to fail.
    pub faults: Arc<Faults>,
    /// What the last call of the address space took, in nanoseconds.
    took: AtomicU64,
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
        Self::new(setup, memories, space, hardware, faults, devices)
    }

    fn new(
        setup: Setup,
        memories: Vec<Arc<Memory>>,
        space: Ioas,
        hardware: Hardware,
        faults: Arc<Faults>,
        devices: usize,
    ) -> Result<Self, Error> {
        let (charged, counted) = (setup.ledger.in_use(), Counted::now()?);
        let pages = |part: &Part| (part.guest.len / PAGE) as usize;
        let part = |(source, memory): (Source, _)| {
            Ok(Part {
                guest: Span::new(source.guest, source.mapping.len()),
                discard: Discard::new(Arc::clone(&source.mapping))?,
                mapping: source.mapping,
                memory,
                discarding: RwLock::default(),
                layout: source.layout,
            })
        };
        let parts = setup.memories.into_iter().zip(memories).map(part);
        let parts = parts.collect::<Result<Vec<_>, hostmem::DiscardError>>();
        let parts = parts?;
        let memory = parts.iter().map(pages).sum();
        let region = |part: &Part| Region {
            guest: part.guest,
            page: PAGE,
            memory: Arc::clone(&part.memory),
        };
        let regions: Vec<_> = parts.iter().map(region).collect();
        MemoryMap::new(&regions)?;
        let scene = Scene::new(setup.range, memory, devices, setup.manner);
        let (scene, space) = (Arc::new(scene), Arc::new(space));
        Ok(Self {
            players: Players::new(Arc::clone(&scene)),
            regions,
            space,
            hardware,
            ledger: setup.ledger,
            charged,
            counted,
            huge: setup.huge,
            cut: AtomicBool::default(),
            model: Mutex::new(Model::new(scene.len(), memory, devices)),
            scene,
            parts,
            dirty: Mutex::default(),
            faults,
            took: AtomicU64::default(),
        })
    }

    /// Has the devices of the software unit begin, on so many threads.
    ///
    /// # Errors
    ///
    /// Where there can be no threads.
    pub fn play(&mut self, threads: usize, seed: u64) -> std::io::Result<()> {
        let hardware = &self.hardware;
        let (all, threads) = (self.devices(), threads.max(1));
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

    /// Stops the devices. Returns why one had stopped by itself.
    pub fn stop(&mut self) -> Option<String> {
        self.players.stop()
    }

    /// All device addresses.
    pub fn range(&self) -> Span<Iova> {
        Span::new(self.scene.base, self.scene.len() as u64 * PAGE)
    }

    pub(crate) fn model(&self) -> MutexGuard<'_, Model> {
        locked(&self.model)
    }

    /// How many devices there are.
    pub fn devices(&self) -> usize {
        self.model().attached.len()
    }

    /// True while pages are pinned: some device is attached.
    pub fn is_live(&self) -> bool {
        self.model().is_live()
    }

    /// Whether this device is attached.
    pub fn is_attached(&self, device: usize) -> bool {
        self.model().attached[device]
    }

    /// Whether it is tracked what devices write to.
    pub fn tracks(&self) -> bool {
        self.space.tracks_dirty()
    }

    /// Does `work`, from which on more is found dirty than what was written to.
    pub fn blurring<T>(&self, work: impl FnOnce(&Self) -> T) -> T {
        let blur = |on: bool| {
            let touched = &mut self.model().touched;
            touched.blurred = true;
            touched.blurring = touched.blurring + u32::from(on) - u32::from(!on);
        };
        blur(true);
        let done = work(self);
        blur(false);
        done
    }

    /// What the last call of the address space took.
    pub fn took(&self) -> Duration {
        Duration::from_nanos(self.took.load(Ordering::Relaxed))
    }

    pub(crate) fn set_took(&self, took: Duration) {
        self.took.store(took.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// What the balloon asks: the address space.
pub(crate) fn dma(space: &Arc<Ioas>) -> BalloonDma {
    let mut dma = BalloonDma::new();
    dma.add_space(Arc::clone(space));
    dma
}
