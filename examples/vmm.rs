//! A monitor's side of device memory: guest memory of vm-memory for passed-through devices, memory that
//! is plugged and unplugged while they run, and a balloon that gives some of it back.
//!
//! For authors of virtual machine monitors; `docs/guides/monitor.md` leads through it. Without an
//! argument the tables are ours, and the device is one in software that is made to reach the memory after
//! each step. With the address of a device that is bound to `vfio-pci` the same goes over iommufd, and
//! the device is the guest's, and does no DMA here.
//!
//!     cargo run -p dmaspace-examples --example vmm
//!     cargo run -p dmaspace-examples --example vmm -- 0000:01:00.0

use std::fs::File;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::{Context as _, anyhow, ensure};
use dmaspace::balloon::{BalloonDma, RegionMemory};
use hostmem::{Backing, Mapping, Pinner};
use ioas::iommufd::Iommufd;
use ioas::{
    Area, Builder, DomainIds, GuestRam, HostTables, Ioas, Ledger, Listener, MappedStorage,
    WhenUnmapped,
};
use iommu::{DeviceId, FlushError, RunMap, SoftwareUnit};
use iopt::{FormatId, Prot};
use runs::{Bytes as Size, GuestAddr, Iova, Span};
use virtio_balloon::device::{Discarder, GuestDiscard};
use virtio_balloon::{Dma, MemoryMap, Part, Refusals, Region};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap,
};

/// Where memory is plugged, and how much each time: little, so that an ordinary user's limit is enough.
const LOW: GuestAddress = GuestAddress(0);
const HIGH: GuestAddress = GuestAddress(4 << 30);
const LATER: GuestAddress = GuestAddress(8 << 30);
const MODULE: u64 = 2 << 20;
/// What a balloon takes at a time. Kernels unmap nothing smaller than what was mapped, so they are asked to
/// map in such pieces: a monitor takes 2 MiB or more.
const BLOCK: u64 = 1 << 20;

struct Monitor {
    memory: GuestMemoryMmap,
    /// What passed-through devices see. Shared with the balloon.
    space: Arc<Ioas>,
    /// What may be pinned, and what is.
    ledger: Arc<Ledger>,
    /// What was plugged, one after the other.
    modules: Vec<GuestRam>,
}

impl Monitor {
    fn new(space: Ioas) -> anyhow::Result<Self> {
        space.add_listener(Arc::new(Log));
        // Refused by name and with numbers before anything is touched; without, the kernel would refuse
        // half-way.
        let ledger = Ledger::new("locked memory", Pinner::of_process()?.room()?, 0);
        Ok(Self {
            memory: GuestMemoryMmap::new(),
            space: Arc::new(space),
            ledger,
            modules: Vec::new(),
        })
    }
}

impl Monitor {
    /// Memory at `at`, when the machine is built and while it runs. Devices see it before the guest is notified.
    fn plug(&mut self, at: GuestAddress) -> anyhow::Result<()> {
        // A memory file: iommufd takes it by its offset, and others could share it.
        let file = Mapping::new(Backing::Memfd, MODULE, None)?;
        let file = file.fd().context("no file")?.try_clone_to_owned()?;
        let file = FileOffset::new(File::from(file), 0);
        let region = GuestRegionMmap::from_range(at, MODULE as usize, Some(file))?;
        let region = Arc::new(region);
        let module = GuestMemoryMmap::from_arc_regions(vec![region.clone()])?;
        let ram = GuestRam::new(&module, &self.ledger)?;
        // Pins, charges, and maps in the tables of all domains: all of it, or nothing.
        self.space.map_guest_ram(&ram, Prot::RW)?;
        self.memory = self.memory.insert_region(region)?;
        self.modules.push(ram);
        Ok(())
    }

    /// The guest has released the memory at `at`, and has reported it.
    fn unplug(&mut self, at: GuestAddress) -> anyhow::Result<()> {
        // Removes it from the tables, waits for units and listeners to invalidate, then unpins.
        self.space.unmap(Span::new(at.0, MODULE))?;
        self.modules
            .retain(|ram| ram.regions().all(|(base, _)| base != at));
        (self.memory, _) = self.memory.remove_region(at, MODULE)?;
        Ok(())
    }
}

impl Monitor {
    /// What the balloon asks before it discards: who maps memory for devices.
    fn dma(&self) -> BalloonDma {
        let mut dma = BalloonDma::new();
        dma.add_space(self.space.clone());
        dma
    }

    /// Which memory the guest has, and what devices and the host have there: the balloon's map.
    fn regions(&self) -> anyhow::Result<Vec<Region<RegionMemory>>> {
        let mut regions = Vec::new();
        for Region {
            guest,
            page,
            memory: discard,
        } in GuestDiscard::regions(&self.memory, 4096)?
        {
            let mut modules = self.modules.iter().flat_map(GuestRam::regions);
            let module = modules.find(|(base, _)| base.0 == guest.start);
            let memory = module.context("a module that is not plugged")?.1.clone();
            regions.push(Region {
                guest,
                page,
                memory: RegionMemory { memory, discard },
            });
        }
        Ok(regions)
    }

    /// The guest has put `runs` into its balloon. Returns the bytes that the host has back.
    fn inflate(&self, runs: &[Span<GuestAddr>]) -> anyhow::Result<u64> {
        let (mut dma, mut discard) = (self.dma(), GuestDiscard::new());
        let regions = self.regions()?;
        let map = MemoryMap::new(&regions)?;
        // The one look-up; from here on parts know their memory.
        let parts = resolve(map, runs)?;
        let mut kept = Vec::new();
        // One flush for all parts. A page that a device still has must not be discarded: it would go on
        // with the old one, and the guest would get another.
        dma.release(map, &parts, &mut |part, reason| {
            println!("  kept {}: {reason}", map.run(&part));
            kept.push(part);
        });
        let free = |part: &&Part| kept.iter().all(|kept| kept.intersection(part).is_none());
        let gone: Vec<Part> = parts.iter().filter(free).copied().collect();
        Ok(discard.discard(map, &gone, &mut |part, why| {
            println!("  not discarded {}: {why:?}", map.run(&part))
        }))
    }

    /// The guest wants `runs` back. Only when this has returned it may use them.
    fn deflate(&self, runs: &[Span<GuestAddr>]) -> anyhow::Result<()> {
        let regions = self.regions()?;
        let map = MemoryMap::new(&regions)?;
        let parts = resolve(map, runs)?;
        let mut lacking = Vec::new();
        self.dma().restore(map, &parts, &mut |part, reason| {
            lacking.push(format!("{}: {reason}", map.run(&part)))
        });
        ensure!(lacking.is_empty(), "devices lack {}", lacking.join(", "));
        Ok(())
    }
}

/// The parts of `runs` in the guest's memory, of which nothing else may be named.
fn resolve<T>(map: MemoryMap<'_, T>, runs: &[Span<GuestAddr>]) -> anyhow::Result<Vec<Part>> {
    let (mut parts, mut refusals) = (Vec::new(), Refusals::new());
    for run in runs {
        map.resolve(*run, &mut refusals, |part| parts.push(part));
    }
    match refusals.latest() {
        None => Ok(parts),
        Some(refusal) => Err(anyhow!("{refusal}")),
    }
}

/// A device model in this process that looks up addresses is notified as units are; `ioas::GuestIommu` is one for
/// the device models of rust-vmm.
struct Log;

impl Listener for Log {
    fn mapped(&self, area: &Area) {
        println!("  there {}", area.range());
    }

    fn unmapped(&self, range: Span<Iova>) -> Result<(), FlushError> {
        println!("  gone  {range}");
        Ok(())
    }
}

/// A machine's life. `look` has a device reach for an address, and says whether it should get there.
fn live(
    mut monitor: Monitor,
    mut look: impl FnMut(&Monitor, GuestAddress, bool) -> anyhow::Result<()>,
) -> anyhow::Result<Monitor> {
    println!("power on");
    monitor.plug(LOW)?;
    monitor.plug(HIGH)?;
    look(&monitor, HIGH, true)?;
    println!("memory is plugged");
    monitor.plug(LATER)?;
    look(&monitor, LATER, true)?;
    let charged = monitor.ledger.in_use();

    println!("the balloon takes memory");
    let run = Span::new(HIGH.0 + BLOCK, BLOCK);
    let given = GuestAddress(run.start);
    monitor.memory.write_obj(7_u64, given)?;
    let back = monitor.inflate(&[run])?;
    println!("  the host has {} back", Size(back));
    ensure!(back == BLOCK, "the host has {back} bytes back");
    // The charge stays, so that the guest can always have its memory back.
    ensure!(monitor.ledger.in_use() == charged, "the charge has gone");
    look(&monitor, given, false)?;
    look(&monitor, HIGH, true)?;

    println!("and gives it back");
    monitor.deflate(&[run])?;
    ensure!(monitor.memory.read_obj::<u64>(given)? == 0, "not fresh");
    look(&monitor, given, true)?;

    println!("memory is unplugged");
    monitor.unplug(LATER)?;
    look(&monitor, LATER, false)?;
    ensure!(monitor.ledger.in_use() == charged - MODULE, "still charged");
    Ok(monitor)
}

/// Power off: nothing is left anywhere.
fn end(monitor: Monitor) -> anyhow::Result<()> {
    println!("power off");
    let space = Arc::into_inner(monitor.space).context("the space is still in use")?;
    space.close()?;
    ensure!(monitor.ledger.in_use() == 0, "still charged");
    println!("everything was given back");
    Ok(())
}

fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1) {
        Some(address) => over_iommufd(&address),
        None => over_own_tables(),
    }
}

/// The kernel pins, charges and maps.
fn over_iommufd(address: &str) -> anyhow::Result<()> {
    let iommufd = Iommufd::open()?;
    let monitor = Monitor::new(Ioas::options().granule(BLOCK).over(&iommufd)?)?;
    let device = iommufd.device(address)?;
    monitor.space.attach(device.clone())?;
    for what in monitor.space.capabilities().missing() {
        println!("the kernel cannot {what}");
    }
    let monitor = live(monitor, |_, _, _| Ok(()))?;
    monitor.space.detach(&device)?;
    end(monitor)
}

/// Tables of ours, in VT-d's second-stage format, walked by a unit in software.
fn over_own_tables() -> anyhow::Result<()> {
    let tables = MappedStorage::new(1 << 20, None).map_err(anyhow::Error::from_boxed)?;
    let tables = Arc::new(HostTables::new(tables, 1 << 46)?);
    let builder = Builder::new(tables.clone(), DomainIds::new(16), [FormatId::VtdSs]);
    let monitor = Monitor::new(Ioas::over_tables(builder))?;
    let frames = Arc::new(RwLock::new(RunMap::new([])?));
    let unit = Arc::new(SoftwareUnit::new(tables.clone(), frames.clone()));
    monitor.space.attach((unit.clone(), DEVICE))?;
    let mut port = unit.port(DEVICE);
    let monitor = live(monitor, |monitor, at, reached| {
        *frames.write().unwrap_or_else(PoisonError::into_inner) = learn(monitor)?;
        let (mut word, number) = ([0], at.0 | 5);
        if !reached {
            ensure!(
                port.read(at.0, &mut word).is_err(),
                "the device reaches {at:?}"
            );
            return Ok(());
        }
        // What the guest writes the device reads, and the other way round.
        monitor.memory.write_obj(number, at)?;
        port.read(at.0, &mut word)?;
        port.write(at.0, &[!word[0]])?;
        let found: u64 = monitor.memory.read_obj(at)?;
        ensure!(found == !number, "{found:#x} at {at:?}");
        Ok(())
    })?;
    monitor.space.detach(DEVICE)?;
    end(monitor)?;
    ensure!(unit.tables().in_use() == 0, "tables are left");
    Ok(())
}

// What follows stands for hardware: physical memory as the software unit reaches it.

const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);

/// A part of a region, in cells.
struct Cells(Arc<Mapping>, std::ops::Range<usize>);

impl AsRef<[AtomicU64]> for Cells {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.cells().get(self.1.clone()).unwrap_or_default()
    }
}

/// Which physical addresses hold which bytes: learnt from the pins, not from any table.
fn learn(monitor: &Monitor) -> anyhow::Result<RunMap<Cells>> {
    let mut pieces = Vec::new();
    let there = monitor.space.areas().into_iter().filter(Area::is_there);
    for area in there {
        let (range, part) = (area.range(), area.part());
        let pin = monitor.space.pin(range, Prot::READ, WhenUnmapped::Drops)?;
        let hold = pin.holds().first().context("no memory")?;
        let at = GuestAddress(area.range().start - part.start);
        let region = monitor.memory.find_region(at).context("no region")?;
        let mapping = Arc::new(Mapping::of_guest_region(region)?);
        let mut offset = part.start as usize;
        hold.with_runs(part, |reader| -> anyhow::Result<()> {
            let mut batch = [Span::default(); 64];
            loop {
                let count = reader
                    .next_batch(&mut batch)
                    .map_err(anyhow::Error::from_boxed)?;
                if count == 0 {
                    return Ok(());
                }
                for run in batch.iter().take(count) {
                    let end = offset + run.len as usize;
                    pieces.push((run.start, Cells(mapping.clone(), offset / 8..end / 8)));
                    offset = end;
                }
            }
        })?;
    }
    Ok(RunMap::new(pieces)?)
}
