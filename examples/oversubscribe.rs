//! A guest with a passed-through device whose memory the machine may have back: by its virtual IOMMU the guest
//! names what the device reaches, and everything else comes and goes as without a device.
//!
//! For authors of virtual machine monitors; `docs/virtio-iommu.md` leads through it. The guest is played by its
//! requests, and its device is one in software. Over iommufd `Passthrough` changes, and so do `input` and the
//! reserved ranges, which depend on the devices.
//!
//!     cargo run -p dmaspace-examples --example oversubscribe

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, ensure};
use dmaspace::ioas::Cause;
use dmaspace::runs::Bytes as Size;
use dmaspace::virtio_iommu::wire::{Attach, MOST_REQUEST_BYTES, Map, Request, Unmap, map_flags};
use dmaspace::virtio_iommu::{
    Domains, EndpointConfig, MemoryRegion, Status, VirtioIommu, VirtioIommuConfig,
};
use dmaspace::{
    AttachError, Backing, DetachError, DeviceId, GuestAddr, GuestBalloon, GuestRam, Ioas, Ledger,
    Mapping, SoftwareIommu, Span,
};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const MEMORY: u64 = 16 << 20;
/// Memory that the guest's driver has mapped for the device, and where the device finds it.
const BUFFER: Span<GuestAddr> = Span::new(4 << 20, 1 << 20);
const AT: u64 = 1 << 32;
/// The device: endpoint 8 is 00:01.0.
const ENDPOINT: u32 = 8;
const DOMAIN: u32 = 1;

/// Maker of the address spaces of the guest's domains.
struct Passthrough(SoftwareIommu);

impl Domains for Passthrough {
    fn space(&mut self) -> Result<Ioas, Cause> {
        Ok(Ioas::over(&self.0)?)
    }

    fn attach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), AttachError> {
        space.attach(self.0.device(DeviceId(endpoint)))
    }

    fn detach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), DetachError> {
        space.detach(DeviceId(endpoint))
    }
}

type VirtualIommu = Arc<Mutex<VirtioIommu<Passthrough>>>;

struct Monitor {
    memory: GuestMemoryMmap,
    /// The file of it: what it occupies is what the machine has given.
    file: File,
    iommu: VirtualIommu,
    balloon: GuestBalloon,
    ledger: Arc<Ledger>,
}

impl Monitor {
    fn new(software: SoftwareIommu) -> anyhow::Result<Self> {
        let mapping = Mapping::new(Backing::Memfd, MEMORY, None)?;
        let file = File::from(mapping.fd().context("no file")?.try_clone_to_owned()?);
        let part = FileOffset::new(file.try_clone()?, 0);
        let ranges = [(GuestAddress(0), MEMORY as usize, Some(part))];
        let memory = GuestMemoryMmap::from_ranges_with_files(ranges)?;

        // Pinned and charged is what the guest maps: memory of more guests than the machine has may be promised.
        let ledger = Ledger::new("memory of the guest's devices", Some(MEMORY / 2), 0);
        let ram = GuestRam::new(&memory, &ledger)?;
        let config = VirtioIommuConfig {
            input: Some(0..=(1 << 48) - 1),
            endpoints: vec![EndpointConfig::new(ENDPOINT)],
            ..VirtioIommuConfig::default()
        };
        let mut iommu = VirtioIommu::new(config, Passthrough(software))?;
        let regions = ram
            .regions()
            .map(|(base, memory)| MemoryRegion::new(base.0, memory.clone()));
        iommu.set_memory(regions.collect())?;
        iommu.ack_features(iommu.features())?;
        let iommu = Arc::new(Mutex::new(iommu));

        // No address space of the monitor's: devices reach what the guest has mapped, which the balloon asks for.
        let mut balloon = GuestBalloon::new(&memory, [&ram], [])?;
        let look = iommu.clone();
        balloon.add_mapped_by_guest(move |memory, part| {
            let look = look.lock().unwrap_or_else(PoisonError::into_inner);
            look.first_mapped(memory, part)
        });
        Ok(Self {
            memory,
            file,
            iommu,
            balloon,
            ledger,
        })
    }

    /// The guest has reported `run` as free, or put it into its balloon: what no device reaches goes back to the
    /// machine. What it takes back needs nothing: the processor brings it in by touching it, and a device sees
    /// it only when the guest has mapped it, which brings it in and pins it.
    fn free(&mut self, run: Span<GuestAddr>) -> anyhow::Result<u64> {
        let mut kept = |run, why| println!("  kept {run}: {why}");
        Ok(self.balloon.inflate(&[run], &mut kept)?)
    }

    fn say(&self, what: &str) -> anyhow::Result<u64> {
        let there = 512 * self.file.metadata()?.blocks();
        let pinned = self.ledger.in_use();
        println!("{what}: {} there, {} pinned", Size(there), Size(pinned));
        Ok(there)
    }
}

/// The driver of the virtual IOMMU: a ring in memory of its own, one request after the other.
struct Driver {
    rings: GuestMemoryMmap,
    queue: Queue,
    sent: u16,
}

impl Driver {
    const SIZE: u16 = 2;
    const AVAILABLE: u64 = 0x1000;
    const USED: u64 = 0x2000;
    const REQUEST: u64 = 0x3000;
    const ANSWER: u64 = 0x4000;

    fn new() -> anyhow::Result<Self> {
        let rings = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x5000)])?;
        let mut queue = Queue::new(Self::SIZE)?;
        queue.set_desc_table_address(Some(0), None);
        queue.set_avail_ring_address(Some(Self::AVAILABLE as u32), None);
        queue.set_used_ring_address(Some(Self::USED as u32), None);
        queue.set_ready(true);
        Ok(Self {
            rings,
            queue,
            sent: 0,
        })
    }

    /// A request (VIRTIO 1.3, 5.13.6): a buffer to read and one for the status.
    fn send(&mut self, iommu: &VirtualIommu, request: &Request) -> anyhow::Result<()> {
        let mut buffer = [0; MOST_REQUEST_BYTES];
        let bytes = request.encode(&mut buffer);
        let rings = &self.rings;
        rings.write_slice(bytes, GuestAddress(Self::REQUEST))?;
        let answer = request.answer_bytes(0) as u32;
        let buffers = [
            (Self::REQUEST, bytes.len() as u32, 1_u16, 1_u16),
            (Self::ANSWER, answer, 2, 0),
        ];
        for (nr, (address, len, flags, next)) in (0..).zip(buffers) {
            let at = 16 * nr;
            rings.write_obj(address, GuestAddress(at))?;
            rings.write_obj(len, GuestAddress(at + 8))?;
            rings.write_obj(flags, GuestAddress(at + 12))?;
            rings.write_obj(next, GuestAddress(at + 14))?;
        }
        self.sent += 1;
        rings.write_obj(self.sent, GuestAddress(Self::AVAILABLE + 2))?;
        let mut iommu = iommu.lock().unwrap_or_else(PoisonError::into_inner);
        let served = iommu.requests(&mut self.queue, rings)?;
        ensure!(served.used == 1, "{} requests were served", served.used);
        // The status is the first byte of the tail.
        let status: u8 = rings.read_obj(GuestAddress(Self::ANSWER + u64::from(answer) - 4))?;
        ensure!(status == Status::Ok as u8, "{request:?}: status {status}");
        Ok(())
    }
}

fn map(iova: u64, memory: Span<GuestAddr>) -> Request {
    Request::Map(Map {
        domain: DOMAIN,
        virt_start: iova,
        virt_end: iova + memory.len - 1,
        phys_start: memory.start,
        flags: map_flags::READ | map_flags::WRITE,
    })
}

fn main() -> anyhow::Result<()> {
    let software = SoftwareIommu::new()?;
    let mut device = software.port(DeviceId(ENDPOINT));
    let mut monitor = Monitor::new(software)?;
    let mut driver = Driver::new()?;

    // The guest runs, and uses all of its memory.
    for page in (0..MEMORY).step_by(4096) {
        monitor.memory.write_obj(page, GuestAddress(page))?;
    }
    let attach = Request::Attach(Attach {
        domain: DOMAIN,
        endpoint: ENDPOINT,
        flags: 0,
        reserved: [0; 4],
    });
    driver.send(&monitor.iommu, &attach)?;
    driver.send(&monitor.iommu, &map(AT, BUFFER))?;
    let there = monitor.say("the guest uses its memory")?;
    ensure!(there == MEMORY && monitor.ledger.in_use() == BUFFER.len);

    // It says that all of it is free, which is not true of what its device reaches.
    let back = monitor.free(Span::new(0, MEMORY))?;
    ensure!(back == MEMORY - BUFFER.len, "{back} bytes back");
    let there = monitor.say("it reports it as free")?;
    ensure!(there == BUFFER.len, "the device lost its memory");
    let mut word = [0];
    device.read(AT + 4096, &mut word)?;
    ensure!(
        word[0] == BUFFER.start + 4096,
        "{:#x} in the buffer",
        word[0]
    );

    // A page that is not there: mapped, it is brought in, before the device can reach it.
    let fresh = Span::new(8 << 20, 1 << 20);
    driver.send(&monitor.iommu, &map(AT + BUFFER.len, fresh))?;
    device.write(AT + BUFFER.len, &[42])?;
    let found: u64 = monitor.memory.read_obj(GuestAddress(fresh.start))?;
    ensure!(found == 42, "{found} and not what the device has written");
    monitor.say("a driver maps more")?;

    // Once unmapped, memory goes, and the device's next access faults.
    let unmap = Request::Unmap(Unmap {
        domain: DOMAIN,
        virt_start: AT,
        virt_end: AT + BUFFER.len - 1,
        reserved: [0; 4],
    });
    driver.send(&monitor.iommu, &unmap)?;
    ensure!(monitor.free(BUFFER)? == BUFFER.len, "it stays");
    let there = monitor.say("the buffer is unmapped and free")?;
    ensure!(there == fresh.len, "{there} bytes are there");
    ensure!(device.read(AT, &mut word).is_err(), "still within reach");

    let mut iommu = monitor.iommu.lock().unwrap_or_else(PoisonError::into_inner);
    ensure!(iommu.reset(), "the device stays in its domain");
    ensure!(monitor.ledger.in_use() == 0, "still charged");
    println!("everything was given back");
    Ok(())
}
