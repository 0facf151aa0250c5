//! Everything that is under test, with its shadow: an address space, the memory, the devices, and
//! what the model says of each page.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use dmaspace::balloon::BalloonDma;
use hostmem::{Discard, FrameSource, Mapping, Pinner};
use ioas::{HostMemory, Ioas, Ledger, Memory};
use runs::{GuestAddr, Iova, Span};
use virtio_balloon::{MemoryMap, Region};

use super::check::Counted;
use super::devices::{Player, play};
use super::dirty::Dirty;
use super::faults::Faults;
use super::hardware::{Hardware, Kind};
use super::model::Model;
use super::ram::{Layout, Ram};
use super::scene::{Players, Scene, locked};
use super::{Error, PAGE};

/// A memory of the guest, before the world is made.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Its first guest address.
    pub(crate) guest: u64,
    /// The memory file.
    pub(crate) mapping: Arc<Mapping>,
    /// Addresses in the place of page frames.
    pub(crate) layout: Layout,
}

/// Parts of a world.
pub(crate) struct Setup {
    /// The device addresses, whole pages.
    pub(crate) range: Span<Iova>,
    /// The memories, all of one length.
    pub(crate) memories: Vec<Source>,
    /// Ledger of the pins.
    pub(crate) ledger: Arc<Ledger>,
}

/// A memory of the guest.
pub(crate) struct Part {
    /// Its guest addresses.
    pub(crate) guest: Span<GuestAddr>,
    /// The memory as address spaces hold it.
    pub(crate) memory: Arc<Memory>,
    /// Gives it back to the machine.
    pub(crate) discard: Discard,
    /// For writing while it is released and discarded: no operation maps it meanwhile.
    pub(crate) discarding: RwLock<()>,
    pub(crate) layout: Layout,
}

/// See the module. Dropped in this order: devices stop, and the address space goes first.
pub(crate) struct World {
    pub(crate) players: Players,
    /// The address space.
    pub(crate) space: Arc<Ioas>,
    /// The guest's memory, as the balloon has it.
    pub(crate) regions: Vec<Region<Arc<Memory>>>,
    /// The units, and the memory of their tables.
    pub(crate) hardware: Hardware,
    /// The guest's memory.
    pub(crate) parts: Vec<Part>,
    /// Ledger of the pins.
    pub(crate) ledger: Arc<Ledger>,
    /// Counts of ledger and kernel before.
    pub(crate) charged: u64,
    pub(crate) counted: Counted,
    /// Expectations of devices.
    pub(crate) scene: Arc<Scene>,
    /// Locked for a moment, before a call of the address space and after it.
    model: Mutex<Model>,
    /// Locked while tracking begins or ends, and during a harvest.
    pub(crate) dirty: Mutex<Dirty>,
    /// Calls that fail.
    pub(crate) faults: Arc<Faults>,
}

impl World {
    /// Over units of these kinds, with so many devices, which have the units in turn.
    ///
    /// # Errors
    ///
    /// When there is no memory for it.
    pub(crate) fn over_units(
        setup: Setup,
        pinner: Pinner,
        kinds: &[Kind],
        tables: u64,
        devices: usize,
    ) -> Result<Self, Error> {
        let faults = Arc::new(Faults::default());
        let mappings = setup
            .memories
            .iter()
            .map(|source| Arc::clone(&source.mapping));
        let hardware = Hardware::new(kinds, tables, mappings.collect(), &faults);
        let hardware = hardware.map_err(Error::Tables)?;
        let space = Ioas::over_tables(hardware.builder());
        let (pinner, physical) = (Arc::new(pinner), Arc::clone(&hardware.physical));
        let memory = |(number, source): (usize, &Source)| {
            let (mapping, pinner) = (Arc::clone(&source.mapping), Arc::clone(&pinner));
            let ram = Ram {
                inner: HostMemory::with_pinner(mapping, pinner, FrameSource::FileOffset),
                number,
                layout: source.layout,
                faults: Arc::clone(&faults),
                physical: Arc::clone(&physical),
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
                discard: Discard::new(source.mapping)?,
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
        let scene = Scene::new(setup.range, memory, devices);
        let (scene, space) = (Arc::new(scene), Arc::new(space));
        Ok(Self {
            players: Players::new(Arc::clone(&scene)),
            regions,
            space,
            hardware,
            ledger: setup.ledger,
            charged,
            counted,
            model: Mutex::new(Model::new(scene.len(), memory, devices)),
            scene,
            parts,
            dirty: Mutex::default(),
            faults,
        })
    }

    /// Has the devices of the software unit begin, on so many threads.
    ///
    /// # Errors
    ///
    /// Where there can be no threads.
    pub(crate) fn play(&mut self, threads: usize, seed: u64) -> std::io::Result<()> {
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
            }))?;
        }
        Ok(())
    }

    /// Stops the devices.
    pub(crate) fn stop(&mut self) {
        self.players.stop();
    }

    /// All device addresses.
    pub(crate) fn range(&self) -> Span<Iova> {
        Span::new(self.scene.base, self.scene.len() as u64 * PAGE)
    }

    pub(crate) fn model(&self) -> MutexGuard<'_, Model> {
        locked(&self.model)
    }

    /// How many devices there are.
    pub(crate) fn devices(&self) -> usize {
        self.model().attached.len()
    }

    /// True if this device is attached.
    pub(crate) fn is_attached(&self, device: usize) -> bool {
        self.model().attached[device]
    }

    /// True if writes of devices are tracked.
    pub(crate) fn tracks(&self) -> bool {
        self.space.tracks_dirty()
    }

    /// Does `work`, from which on more is found dirty than what was written to.
    pub(crate) fn blurring<T>(&self, work: impl FnOnce(&Self) -> T) -> T {
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
}

/// DMA side of the balloon: the address space.
pub(crate) fn dma(space: &Arc<Ioas>) -> BalloonDma {
    let mut dma = BalloonDma::new();
    dma.add_space(Arc::clone(space));
    dma
}
