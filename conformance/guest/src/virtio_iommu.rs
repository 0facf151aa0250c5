//! The host's side of a guest with our virtio-iommu: the device, the DMA of all that is behind it, and a balloon.
//!
//! QEMU hands the device's queues and the guest's memory over by vhost-user, and knows nothing else of it.
//! The guest's programs ask for DMA, which is done here by the software unit: it walks the tables
//! that the requests of the guest's kernel have filled, and finds what the guest has written, or faults. A
//! fault goes to the guest's kernel as an event.
//!
//! The balloon beside it gives back what the guest reports as free, or puts into it, and asks the device what the
//! guest has mapped.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    ops::ControlFlow,
    os::unix::{fs::MetadataExt as _, net::UnixListener},
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock, atomic::AtomicU64},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use dmaspace::{
    BalloonDma, Region, RegionMemory,
    vhost::{Backend, Balloon, BalloonHost, Iommu, IommuHost, Link},
    virtio_balloon::device::{BalloonSettings, GuestDiscard},
};
use hostmem::{FrameSource, Mapping, Pinner};
use ioas::{
    AttachError, Cause, DetachError, DomainIds, HostMemory, Ioas, Ledger, Memory, MemoryObject,
    Synthetic,
};
use iommu::{DeviceId, RunMap, SoftwareUnit, Unit as _};
use iopt::{FormatId, HeapTables};
use runs::{GuestAddr, Iova, Span};
use virtio_iommu::{
    Domains, EndpointConfig, Failed, FaultReport, MemoryRegion, RequestError, RingError, Units,
    VirtioIommu, VirtioIommuConfig,
    wire::{
        CONFIG_BYTES, DEVICE_ID, NUM_QUEUES, QUEUE_SIZE, Request, ReservedKind, ReservedMemory,
    },
};
use vm_memory::{
    GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _, GuestRegionMmap,
};

use crate::{
    machines::{BALLOON, EDU, IVSHMEM, NVME, RESERVED, VIRTIO_IOMMU, bdf},
    qemu::{PATIENCE, remove, shared_memory, slot},
    viot,
};

/// Pages of tables that there can be: for some times what the guest maps.
const TABLES: u64 = 4096;
/// Bytes pinned at a time, at most; where the kernel does not allow so much, pins are only counted.
const PINNED: u64 = 512 << 20;
/// Type of the balloon (VIRTIO 1.3, 5.5.1).
const BALLOON_ID: u32 = 5;
/// The longest transfer.
const MOST_BYTES: u64 = 64 << 20;

type Data = Arc<RwLock<RunMap<Cells>>>;
type Software = SoftwareUnit<Arc<HeapTables>, Data>;

/// The host's side.
pub struct Host {
    iommu: Arc<Iommu<Spaces>>,
    unit: Software,
    ledger: Arc<Ledger>,
    tables: Arc<HeapTables>,
    endpoints: [u16; 3],
    /// Words that each endpoint has read last.
    buffers: BTreeMap<u16, Vec<u64>>,
    viot: PathBuf,
    /// QEMU's way to it, and to the balloon.
    port: Port<Iommu<Spaces>>,
    balloon: Port<Balloon<Ram>>,
}

/// A back end, and the socket by which QEMU comes to it.
struct Port<B: Backend> {
    backend: Arc<B>,
    listener: UnixListener,
    socket: PathBuf,
    link: Option<Link<B>>,
}

impl<B: Backend> Port<B> {
    fn new(socket: PathBuf, backend: Arc<B>) -> anyhow::Result<Self> {
        remove(&socket)?;
        let listener = UnixListener::bind(&socket).with_context(|| socket.display().to_string())?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            backend,
            listener,
            socket,
            link: None,
        })
    }

    /// QEMU's arguments: a device of type `id`, known to QEMU as `name`, with `more` of its kind.
    fn arguments(&self, name: &str, id: u32, more: &str, address: &str) -> [String; 4] {
        [
            "-chardev".into(),
            format!("socket,id={name},path={}", self.socket.display()),
            "-device".into(),
            format!(
                "vhost-user-test-device-pci,chardev={name},virtio-id={id},{more},addr={}",
                slot(address)
            ),
        ]
    }

    fn connect(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let front = loop {
            match self.listener.accept() {
                Ok((front, _)) => break front,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ensure!(begun.elapsed() < PATIENCE, "QEMU does not connect");
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error.into()),
            }
        };
        front.set_nonblocking(false)?;
        self.link = Some(Link::new(front, self.backend.clone())?);
        Ok(())
    }

    fn close(&mut self) -> anyhow::Result<()> {
        let link = self.link.take().context("QEMU never came")?;
        match link.close() {
            Some(wrong) => bail!("the connection to QEMU: {wrong}"),
            None => Ok(()),
        }
    }
}

impl<B: Backend> Drop for Port<B> {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.socket);
    }
}

/// The guest's memory for its balloon. Its devices reach what it has mapped.
struct Ram(Arc<Iommu<Spaces>>);

impl Ram {
    fn devices(&self) -> BalloonDma {
        let mut devices = BalloonDma::new();
        let iommu = self.0.clone();
        devices.add_mapped_by_guest(move |memory, part| {
            iommu.with(|device| device.first_mapped(memory, part))
        });
        devices
    }
}

impl BalloonHost for Ram {
    type Memory = RegionMemory;
    type Devices = BalloonDma;

    fn regions(&mut self, memory: &GuestMemoryMmap) -> io::Result<Vec<Region<RegionMemory>>> {
        let known = self.0.with(|device| device.memory().to_vec());
        let regions = GuestDiscard::regions(memory, 4096).map_err(io::Error::other)?;
        let regions = regions.into_iter().map(|region| {
            let same = |known: &&MemoryRegion| {
                (known.start, known.memory.len()) == (region.guest.start, region.guest.len)
            };
            let other = || io::Error::other("memory that the IOMMU does not know");
            let memory = known.iter().find(same).ok_or_else(other)?.memory.clone();
            let discard = region.memory;
            Ok(Region {
                guest: region.guest,
                page: region.page,
                memory: RegionMemory { memory, discard },
            })
        });
        regions.collect()
    }
}

impl Host {
    /// Before QEMU starts.
    ///
    /// # Errors
    ///
    /// When there can be no device, or no files below `directory`.
    pub fn new(directory: &Path) -> anyhow::Result<Self> {
        let number = |address| bdf(address).context("no address of a device");
        let endpoints = [number(EDU)?, number(NVME)?, number(IVSHMEM)?];
        let files = ["viommu.vhost", "viommu.balloon", "viommu.viot"];
        let [socket, balloon, viot] = files.map(|name| directory.join(name));
        let table = viot::table(number(VIRTIO_IOMMU)?, endpoints[0]..=endpoints[2]);
        fs::write(&viot, table).with_context(|| viot.display().to_string())?;

        let tables = Arc::new(HeapTables::with_tables(TABLES)?);
        let data: Data = Arc::new(RwLock::new(RunMap::new([])?));
        let unit = SoftwareUnit::new(tables.clone(), data.clone());
        let formats = [FormatId::VtdSs];
        let mut units = Units::new(tables.clone(), DomainIds::new(16), formats);
        let mut config = VirtioIommuConfig {
            // Addresses that tables of four levels reach.
            input: Some(0..=(1 << 48) - 1),
            ..VirtioIommuConfig::default()
        };
        for id in endpoints.map(u32::from) {
            units.insert(id, Arc::new(unit.clone()), DeviceId(id));
            let mut endpoint = EndpointConfig::new(id);
            let range = RESERVED.0..=RESERVED.1;
            let kind = ReservedKind::Reserved;
            endpoint.reserved = vec![ReservedMemory { kind, range }, ReservedMemory::X86_MSI];
            config.endpoints.push(endpoint);
        }
        let pinner = Arc::new(Pinner::probe(2 << 20)?);
        let room = pinner.room()?;
        let ledger = Ledger::new("guest memory", None, 0);
        let spaces = Spaces {
            units,
            data,
            pinner: room.is_none_or(|room| room >= PINNED).then_some(pinner),
            ledger: ledger.clone(),
            known: Vec::new(),
            file: None,
            wrong: Vec::new(),
        };
        let iommu = Arc::new(Iommu::new(VirtioIommu::new(config, spaces)?));
        let ram = Ram(iommu.clone());
        let beside = Balloon::new(BalloonSettings::default(), 0, ram.devices(), ram)?;
        Ok(Self {
            port: Port::new(socket, iommu.clone())?,
            balloon: Port::new(balloon, Arc::new(beside))?,
            iommu,
            unit,
            ledger,
            tables,
            endpoints,
            buffers: BTreeMap::new(),
            viot,
        })
    }

    /// QEMU's arguments for it.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = shared_memory().to_vec();
        let more = format!("num_vqs={NUM_QUEUES},vq_size={QUEUE_SIZE},config_size={CONFIG_BYTES}");
        arguments.extend(
            self.port
                .arguments("viommu", DEVICE_ID, &more, VIRTIO_IOMMU),
        );
        let more = "num_vqs=5,config_size=24";
        arguments.extend(self.balloon.arguments("balloon", BALLOON_ID, more, BALLOON));
        arguments.extend(["-acpitable".into(), format!("file={}", self.viot.display())]);
        arguments
    }

    /// Meets QEMU, which has been started.
    ///
    /// # Errors
    ///
    /// When it does not come.
    pub fn connect(&mut self) -> anyhow::Result<()> {
        self.port.connect()?;
        self.balloon.connect()
    }

    /// The answer to what the guest asks (`src/init/host.rs`).
    pub fn answer(&mut self, question: &str) -> String {
        let answer = match question {
            "held" => Ok(self.held()),
            "ram" => self.ram(),
            other => match other.strip_prefix("balloon ") {
                Some(bytes) => self.inflate(bytes),
                None => self.transfer(other),
            },
        };
        answer.unwrap_or_else(|error| format!("no answer: {error:#}"))
    }

    /// Numbers of domains, mappings, bytes that are mapped and charged, and pages of tables.
    fn held(&self) -> String {
        let (mut mappings, mut mapped) = (0, 0);
        let domains = self.iommu.with(|device| {
            let mut seen = BTreeMap::new();
            for id in self.endpoints.map(u32::from) {
                if let (Some(domain), Some(space)) = (device.domain_of(id), device.space_of(id)) {
                    let bytes: u64 = space.areas().iter().map(|area| area.range().len).sum();
                    seen.insert(domain, (space.len(), bytes));
                }
            }
            for (areas, bytes) in seen.values() {
                mappings += areas;
                mapped += bytes;
            }
            device.domains().count()
        });
        let (charged, tables) = (self.ledger.in_use(), self.tables.in_use());
        format!("{domains} {mappings} {mapped} {charged} {tables}")
    }

    /// Bytes of the guest's memory that are there, that are in its balloon, that it has reported as free, and that
    /// were kept because it had mapped them.
    fn ram(&self) -> anyhow::Result<String> {
        let there = self.iommu.with(|device| {
            let file = device.back_end().file.as_ref();
            Ok::<_, anyhow::Error>(512 * file.context("no memory")?.metadata()?.blocks())
        })?;
        let balloon = &self.balloon.backend;
        let (actual, counters) = (balloon.actual(), balloon.counters());
        let (reported, kept) = (counters.reported, counters.kept);
        Ok(format!("{there} {actual} {reported} {kept}"))
    }

    /// Wants so many bytes in the balloon.
    fn inflate(&self, bytes: &str) -> anyhow::Result<String> {
        let balloon = &self.balloon.backend;
        balloon.set_target(bytes.parse()?);
        let (_, changed) = balloon.heard();
        let link = self.balloon.link.as_ref().filter(|_| changed);
        let told = link.context("no driver of a balloon")?.config_changed()?;
        ensure!(told, "QEMU does not listen");
        Ok("done".into())
    }

    /// Does DMA: `read` or `write`, endpoint, address and length.
    fn transfer(&mut self, question: &str) -> anyhow::Result<String> {
        let words: Vec<&str> = question.split(' ').collect();
        let &[what, endpoint, iova, len] = &*words else {
            bail!("{question} is no question");
        };
        let endpoint = u16::from_str_radix(endpoint, 16)?;
        let iova = u64::from_str_radix(iova, 16)?;
        let len = u64::from_str_radix(len, 16)?;
        ensure!(
            len.is_multiple_of(8) && len <= MOST_BYTES,
            "{len} bytes at once"
        );
        let mut port = self.unit.port(DeviceId(endpoint.into()));
        let buffer = self.buffers.entry(endpoint).or_default();
        let words = (len / 8) as usize;
        let done = match what {
            "read" => {
                buffer.resize(words, 0);
                port.read(iova, buffer)
            }
            "write" => {
                buffer.resize(words.max(buffer.len()), 0);
                port.write(iova, &buffer[..words])
            }
            _ => bail!("{question} is no question"),
        };
        let Err(aborted) = done else {
            return Ok("done".into());
        };
        let mut faults = Vec::new();
        self.unit.drain_faults(&mut |fault| faults.push(fault));
        let faults = faults
            .iter()
            .map(|fault| FaultReport::of(fault.device.0, fault));
        self.iommu.report(faults);
        if let Some(link) = &self.port.link {
            link.wake();
        }
        Ok(format!("fault {:x}", aborted.fault.iova))
    }

    /// After QEMU's end: resets the device, and nothing of the guest is left. QEMU says nothing to a back end
    /// when the guest's kernel resets its device, which it does when it powers off.
    ///
    /// # Errors
    ///
    /// Leftovers, and earlier faults.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.balloon.close()?;
        self.port.close()?;
        let (domains, wrong) = self.iommu.with(|device| {
            device.reset_system();
            let wrong = std::mem::take(&mut device.back_end().wrong);
            (device.domains().count(), wrong)
        });
        ensure!(wrong.is_empty(), "{}", wrong.join("; "));
        let (charged, tables) = (self.ledger.in_use(), self.tables.in_use());
        ensure!(
            (domains, charged, tables) == (0, 0, 0),
            "{domains} domains, {charged} bytes charged and {tables} tables are left"
        );
        Ok(())
    }
}

/// Address spaces with tables of ours, over the guest's memory.
struct Spaces {
    units: Units<Arc<HeapTables>>,
    data: Data,
    /// `None` where the kernel does not let this process pin enough.
    pinner: Option<Arc<Pinner>>,
    ledger: Arc<Ledger>,
    known: Vec<(Which, MemoryRegion)>,
    /// File of the guest's memory.
    file: Option<File>,
    /// Errors that no driver of Linux's causes.
    wrong: Vec<String>,
}

/// Which memory a region is: the file by device and number, where it begins there, and the guest's
/// addresses.
type Which = (u64, u64, u64, Span<GuestAddr>);

/// All of a region, by word.
struct Cells(Arc<Mapping>);

impl AsRef<[AtomicU64]> for Cells {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.cells()
    }
}

impl Spaces {
    /// The region as memory for address spaces; its words are where its pins say they are.
    fn region(&self, region: &GuestRegionMmap) -> anyhow::Result<(MemoryRegion, u64, Cells)> {
        let start = region.start_addr().0;
        let mapping = Arc::new(Mapping::of_guest_region(region)?);
        let object: Arc<dyn MemoryObject> = match &self.pinner {
            Some(pinner) => {
                // Runs of the file, at addresses of their own.
                let frames = FrameSource::FileOffset;
                Arc::new(HostMemory::with_pinner(
                    mapping.clone(),
                    pinner.clone(),
                    frames,
                ))
            }
            None => Arc::new(Synthetic::new([Span::new(start, mapping.len())])),
        };
        let first = Span::new(0, 4096);
        let pin = object.pin(first, &mut |_| ControlFlow::Continue(()))?;
        let mut runs = [Span::default()];
        let found = pin
            .runs(first)
            .and_then(|mut runs_of| runs_of.next_batch(&mut runs));
        let found = found.map_err(anyhow::Error::from_boxed)?;
        ensure!(found == 1, "no run of the memory at {start:#x}");
        let memory = Memory::new(object.clone(), &self.ledger);
        Ok((
            MemoryRegion::new(start, memory),
            runs[0].start,
            Cells(mapping),
        ))
    }

    fn renew(&mut self, memory: &GuestMemoryMmap) -> anyhow::Result<Vec<MemoryRegion>> {
        let mut known = Vec::new();
        for region in memory.iter() {
            let span = Span::new(region.start_addr().0, region.len());
            let file = region.file_offset().context("memory without a file")?;
            let about = file.file().metadata()?;
            if self.file.is_none() {
                self.file = Some(file.file().try_clone()?);
            }
            let which = (about.dev(), about.ino(), file.start(), span);
            if let Some(same) = self.known.iter().find(|(known, _)| *known == which) {
                known.push(same.clone());
                continue;
            }
            let (region, address, cells) = self.region(region)?;
            let mut data = self.data.write().unwrap_or_else(PoisonError::into_inner);
            data.insert(address, cells)?;
            known.push((which, region));
        }
        // Removed regions may still be mapped, so their words stay.
        self.known = known;
        Ok(self
            .known
            .iter()
            .map(|(_, region)| region.clone())
            .collect())
    }
}

impl Domains for Spaces {
    fn space(&mut self) -> Result<Ioas, Cause> {
        self.units.space()
    }

    fn attach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), AttachError> {
        self.units.attach(endpoint, space)
    }

    fn detach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), DetachError> {
        self.units.detach(endpoint, space)
    }

    fn reserved(&self, endpoint: u32, sink: &mut dyn FnMut(Span<Iova>)) {
        self.units.reserved(endpoint, sink);
    }

    fn refused(&mut self, request: Option<&Request>, refusal: &RequestError) {
        self.wrong
            .push(format!("{request:?} was refused: {refusal:?}"));
    }

    fn failed(&mut self, failed: &Failed) {
        self.wrong.push(format!("{failed:?}"));
    }
}

impl IommuHost for Spaces {
    fn regions(&mut self, memory: &GuestMemoryMmap) -> io::Result<Vec<MemoryRegion>> {
        self.renew(memory).map_err(io::Error::other)
    }

    fn broken(&mut self, error: &RingError) {
        self.wrong.push(format!("{error:?}"));
    }
}
