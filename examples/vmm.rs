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
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use dmaspace::{
    Area, Backing, DeviceId, FlushError, GuestAddr, GuestBalloon, GuestRam, Ioas, Iommufd, Iova,
    Ledger, Listener, Mapping, Prot, SoftwareIommu, Span,
};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// Addresses of plugged memory, and the size of each module: little, so that an ordinary user's limit is enough.
const LOW: GuestAddress = GuestAddress(0);
const HIGH: GuestAddress = GuestAddress(4 << 30);
const LATER: GuestAddress = GuestAddress(8 << 30);
const MODULE: u64 = 2 << 20;
/// Size of a piece that a balloon takes. Kernels unmap nothing smaller than what was mapped, so they are asked to
/// map in such pieces: a monitor takes 2 MiB or more.
const BLOCK: u64 = 1 << 20;

struct Monitor {
    memory: GuestMemoryMmap,
    /// Memory as passed-through devices see it. Shared with the balloon.
    space: Arc<Ioas>,
    /// Modules that were plugged, one after the other.
    modules: Vec<GuestRam>,
    /// The account of locked memory, and bytes in use before.
    ledger: Arc<Ledger>,
    before: u64,
}

impl Monitor {
    fn new(space: Ioas) -> anyhow::Result<Self> {
        space.add_listener(Arc::new(Log));
        let ledger = space.ledger()?;
        Ok(Self {
            memory: GuestMemoryMmap::new(),
            space: Arc::new(space),
            modules: Vec::new(),
            before: ledger.in_use(),
            ledger,
        })
    }

    fn charged(&self) -> u64 {
        self.ledger.in_use() - self.before
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
        // Pins, charges, and maps in the tables of all domains: all of it, or nothing. What exceeds the limit is
        // refused with numbers before anything changes.
        let ram = self.space.map_guest(&module, Prot::RW)?;
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
    fn balloon(&self) -> anyhow::Result<GuestBalloon> {
        let spaces = [self.space.clone()];
        Ok(GuestBalloon::new(&self.memory, &self.modules, spaces)?)
    }

    /// The guest has put `runs` into its balloon. Returns the bytes that the host has back.
    fn inflate(&self, runs: &[Span<GuestAddr>]) -> anyhow::Result<u64> {
        let mut kept = |run, why| println!("  kept {run}: {why}");
        Ok(self.balloon()?.inflate(runs, &mut kept)?)
    }

    /// The guest wants `runs` back. Only when this has returned it may use them.
    fn deflate(&self, runs: &[Span<GuestAddr>]) -> anyhow::Result<()> {
        let mut lacking = Vec::new();
        let mut failed = |run, why| lacking.push(format!("{run}: {why}"));
        self.balloon()?.deflate(runs, &mut failed)?;
        ensure!(lacking.is_empty(), "devices lack {}", lacking.join(", "));
        Ok(())
    }
}

/// A device model in this process that looks up addresses is notified as units are; `dmaspace::GuestIommu` is
/// one for the device models of rust-vmm.
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
    let charged = monitor.charged();

    println!("the balloon takes memory");
    let run = Span::new(HIGH.0 + BLOCK, BLOCK);
    let given = GuestAddress(run.start);
    monitor.memory.write_obj(7_u64, given)?;
    let back = monitor.inflate(&[run])?;
    println!("  the host has {} back", dmaspace::runs::Bytes(back));
    ensure!(back == BLOCK, "the host has {back} bytes back");
    // The charge stays, so that the guest can always have its memory back.
    ensure!(monitor.charged() == charged, "the charge has gone");
    look(&monitor, given, false)?;
    look(&monitor, HIGH, true)?;

    println!("and gives it back");
    monitor.deflate(&[run])?;
    ensure!(monitor.memory.read_obj::<u64>(given)? == 0, "not fresh");
    look(&monitor, given, true)?;

    println!("memory is unplugged");
    monitor.unplug(LATER)?;
    look(&monitor, LATER, false)?;
    ensure!(monitor.charged() == charged - MODULE, "still charged");
    Ok(monitor)
}

/// Power off: nothing is left anywhere.
fn end(monitor: Monitor) -> anyhow::Result<()> {
    println!("power off");
    let space = Arc::into_inner(monitor.space).context("the space is still in use")?;
    space.close()?;
    ensure!(monitor.ledger.in_use() == monitor.before, "still charged");
    println!("everything was given back");
    Ok(())
}

fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1) {
        Some(address) => over_iommufd(&address),
        None => over_software(),
    }
}

/// The kernel pins, charges and maps.
fn over_iommufd(address: &str) -> anyhow::Result<()> {
    let iommufd = Iommufd::open()?;
    // The kernel unmaps whole mappings only, and the balloon takes blocks.
    let space = Ioas::options().granule(BLOCK).over(&iommufd)?;
    let device = iommufd.device(address)?;
    space.attach(device.clone())?;
    for what in space.capabilities().missing() {
        println!("the kernel cannot {what}");
    }
    let monitor = live(Monitor::new(space)?, |_, _, _| Ok(()))?;
    monitor.space.detach(&device)?;
    end(monitor)
}

/// An IOMMU in software, whose device reaches for the memory.
fn over_software() -> anyhow::Result<()> {
    let iommu = SoftwareIommu::new()?;
    let space = Ioas::over(&iommu)?;
    let device = DeviceId::pci(0, 5, 0);
    space.attach(iommu.device(device))?;
    let mut port = iommu.port(device);
    let monitor = live(Monitor::new(space)?, |monitor, at, reached| {
        let (mut word, number) = ([0], at.0 | 5);
        if !reached {
            let read = port.read(at.0, &mut word);
            ensure!(read.is_err(), "the device reaches {at:?}");
            return Ok(());
        }
        // The device reads the guest's writes, and the other way round.
        monitor.memory.write_obj(number, at)?;
        port.read(at.0, &mut word)?;
        port.write(at.0, &[!word[0]])?;
        let found: u64 = monitor.memory.read_obj(at)?;
        ensure!(found == !number, "{found:#x} at {at:?}");
        Ok(())
    })?;
    monitor.space.detach(device)?;
    end(monitor)?;
    let tables = iommu.unit().tables();
    ensure!(tables.in_use() == 0, "tables are left");
    Ok(())
}
