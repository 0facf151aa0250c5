//! A guest in front of the device: its physical memory, the rings of its driver, and a unit in software
//! behind the device, whose reads tell where an access arrives: every word holds its own guest address.

#![allow(dead_code, reason = "no suite uses all of it")]
#![allow(unreachable_pub, reason = "public to the fuzz targets")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use ioas::{AttachError, DetachError, DomainIds, FixedRuns, Ioas, Ledger, Memory, Synthetic};
use iommu::{DeviceId, RunMap, SoftwareUnit, Unit};
use iopt::{FormatId, HeapTables};
use runs::{GuestAddr, Iova, Span};
use virtio_iommu::wire::{FAULT_BYTES, MOST_REQUEST_BYTES, Request};
use virtio_iommu::{
    Domains, EndpointConfig, Failed, FaultReport, MemoryRegion, RequestError, ReservedKind,
    ReservedMemory, RingError, Served, Status, Units, VirtioIommu, VirtioIommuConfig,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

pub const PAGE: u64 = 4096;
/// The guest's memory: two regions without a hole between them, one behind a hole, and registers.
pub const LOW: Span<GuestAddr> = Span::new(0, 1 << 20);
pub const NEXT: Span<GuestAddr> = Span::new(1 << 20, 1 << 19);
pub const HIGH: Span<GuestAddr> = Span::new(16 << 20, 1 << 20);
pub const REGISTERS: Span<GuestAddr> = Span::new(0xfe00_0000, 1 << 16);
/// Endpoints: one with x86's interrupts, one without anything reserved, one that reserves a page.
pub const ENDPOINTS: [u32; 3] = [8, 9, 16];
pub const RESERVED_PAGE: u64 = 5 * PAGE;
/// Last address that can be mapped.
pub const LAST: u64 = (1 << 40) - 1;
pub const PROBE_BYTES: u32 = 64;

/// Descriptors of each ring.
pub const SIZE: u16 = 16;
pub const F_NEXT: u16 = 1;
pub const F_WRITE: u16 = 2;
pub const F_INDIRECT: u16 = 4;
/// The memory of rings and buffers.
pub const RINGS: u64 = 1 << 16;
const BUFFERS: u64 = 0x8000;
/// Address of the buffer of an answer.
pub const ANSWER: u64 = BUFFERS + 0x400;

pub type Tables = Arc<HeapTables>;
pub type SoftUnit = SoftwareUnit<Tables, RunMap<Vec<AtomicU64>>>;

/// Back end of the device: units, and the failures to inject.
pub struct Back {
    pub units: Units<Tables>,
    /// Number of further address spaces that there can be.
    pub spaces: usize,
    /// Endpoints that are not attached, or not detached.
    pub no_attach: Option<u32>,
    pub why: fn() -> AttachError,
    pub no_detach: Option<u32>,
    /// Endpoints that were attached or detached so far.
    pub moves: usize,
    /// Notifications, as text.
    pub refused: Vec<String>,
    pub failed: Vec<String>,
}

impl Domains for Back {
    fn space(&mut self) -> Result<Ioas, ioas::Cause> {
        self.spaces = self.spaces.checked_sub(1).ok_or("no more address spaces")?;
        self.units.space()
    }

    fn attach(&mut self, id: u32, space: &Ioas) -> Result<(), AttachError> {
        match self.no_attach == Some(id) {
            true => Err((self.why)()),
            false => {
                self.moves += 1;
                self.units.attach(id, space)
            }
        }
    }

    fn detach(&mut self, id: u32, space: &Ioas) -> Result<(), DetachError> {
        match self.no_detach == Some(id) {
            true => Err(DetachError::Unknown),
            false => {
                self.moves += 1;
                self.units.detach(id, space)
            }
        }
    }

    fn reserved(&self, id: u32, sink: &mut dyn FnMut(Span<Iova>)) {
        self.units.reserved(id, sink);
    }

    fn refused(&mut self, request: Option<&Request>, refusal: &RequestError) {
        let request = request.map_or(0, Request::kind);
        self.refused.push(format!("{request}: {refusal}"));
    }

    fn failed(&mut self, failed: &Failed) {
        self.failed.push(failed.to_string());
    }
}

/// The machine.
pub struct Guest {
    pub device: VirtioIommu<Back>,
    pub memory: GuestMemoryMmap<()>,
    pub queues: [Queue; 2],
    seen: [u16; 2],
    pub unit: Arc<SoftUnit>,
    pub tables: Tables,
    pub ledger: Arc<Ledger>,
    pub ram: Vec<Arc<Synthetic>>,
    pub regions: Vec<MemoryRegion>,
}

/// Configuration of the tests.
pub fn config() -> VirtioIommuConfig {
    let mut endpoints = ENDPOINTS.map(EndpointConfig::new);
    endpoints[0].reserved.push(ReservedMemory::X86_MSI);
    endpoints[2].reserved.push(ReservedMemory {
        kind: ReservedKind::Reserved,
        range: RESERVED_PAGE..=RESERVED_PAGE + PAGE - 1,
    });
    VirtioIommuConfig {
        input: Some(0..=LAST),
        domains: Some(0..=99),
        probe_bytes: PROBE_BYTES,
        mmio: true,
        endpoints: endpoints.to_vec(),
        most_domains: 4,
        most_mappings: 64,
        ..VirtioIommuConfig::default()
    }
}

pub const fn device_of(endpoint: u32) -> DeviceId {
    DeviceId(endpoint)
}

/// Words that hold their guest addresses.
fn words(guest: Span<GuestAddr>) -> Vec<AtomicU64> {
    let addresses = (guest.start..=guest.last()).step_by(8);
    addresses.map(AtomicU64::new).collect()
}

impl Guest {
    pub fn new() -> Self {
        Self::with(config(), FormatId::VtdSs)
    }

    /// Everything is offered, and accepted; the limit of locked memory is that of all regions.
    pub fn with(config: VirtioIommuConfig, format: FormatId) -> Self {
        Self::tracking(config, format, false)
    }

    /// The unit sets dirty bits, or does not.
    pub fn tracking(config: VirtioIommuConfig, format: FormatId, tells: bool) -> Self {
        let ledger = Ledger::new("guest", Some(LOW.len + NEXT.len + HIGH.len), 0);
        // Physical memory has other addresses than the guest's, and LOW's second half comes first.
        let (a, b) = (
            Span::new(0x4008_0000, LOW.len / 2),
            Span::new(0x4000_0000, LOW.len / 2),
        );
        let ram = [
            Synthetic::new([a, b]),
            Synthetic::new([Span::new(0x5000_0000, NEXT.len)]),
            Synthetic::new([Span::new(0x6000_0000, HIGH.len)]),
        ]
        .map(Arc::new);
        let bar = FixedRuns::bar(Span::new(0x7000_0000, REGISTERS.len), PAGE).unwrap();
        let half = LOW.len / 2;
        let data = RunMap::new([
            (a.start, words(Span::new(0, half))),
            (b.start, words(Span::new(half, half))),
            (0x5000_0000, words(NEXT)),
            (0x6000_0000, words(HIGH)),
            (0x7000_0000, words(REGISTERS)),
        ])
        .unwrap();
        let starts = [LOW.start, NEXT.start, HIGH.start];
        let mut regions: Vec<_> = starts
            .into_iter()
            .zip(&ram)
            .map(|(start, ram)| MemoryRegion::new(start, Memory::new(ram.clone(), &ledger)))
            .collect();
        let bar = Memory::new(Arc::new(bar), &ledger);
        regions.push(MemoryRegion::new(REGISTERS.start, bar));

        let tables = Arc::new(HeapTables::with_tables(256).unwrap());
        let mut of_unit = iommu::SoftwareConfig::default();
        // x86's tables have no bit for it.
        of_unit.capabilities.snoop_control = format == FormatId::VtdSs;
        of_unit.capabilities.dirty_tracking = tells;
        let unit = Arc::new(SoftwareUnit::with_config(tables.clone(), data, of_unit));
        let mut units = Units::new(tables.clone(), DomainIds::new(16), [format]);
        for endpoint in ENDPOINTS {
            let unit: Arc<dyn Unit> = unit.clone();
            units.insert(endpoint, unit, device_of(endpoint));
        }
        let back = Back {
            units,
            spaces: usize::MAX,
            no_attach: None,
            why: || AttachError::Busy("broken".into()),
            no_detach: None,
            moves: 0,
            refused: Vec::new(),
            failed: Vec::new(),
        };
        let mut device = VirtioIommu::new(config, back).unwrap();
        device.set_memory(regions.clone()).unwrap();
        device.ack_features(device.features()).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RINGS as usize)]).unwrap();
        let queues = [0, 1].map(|nr| {
            let base = 0x1000 * nr;
            let mut queue = Queue::new(SIZE).unwrap();
            queue.set_desc_table_address(Some(base), None);
            queue.set_avail_ring_address(Some(base + 0x400), None);
            queue.set_used_ring_address(Some(base + 0x800), None);
            queue.set_ready(true);
            queue
        });
        Self {
            device,
            memory,
            queues,
            seen: [0; 2],
            unit,
            tables,
            ledger,
            ram: ram.into(),
            regions,
        }
    }

    // The driver's rings.

    /// Writes a descriptor to the table at `table`.
    pub fn descriptor(&self, table: u64, nr: u16, buffer: (u64, u32), flags: u16, next: u16) {
        let at = table + 16 * u64::from(nr);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&buffer.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&buffer.1.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
    }

    /// Makes a chain of these buffers, the last of which goes to the device to be written to if the flag
    /// says so, and makes it available.
    pub fn chain(&mut self, queue: usize, buffers: &[(u64, u32, bool)]) {
        let table = self.queues[queue].desc_table();
        for (nr, (address, len, write)) in buffers.iter().enumerate() {
            let goes_on = nr + 1 < buffers.len();
            let flags = (u16::from(goes_on) * F_NEXT) | (u16::from(*write) * F_WRITE);
            self.descriptor(table, nr as u16, (*address, *len), flags, nr as u16 + 1);
        }
        self.offer(queue, 0);
    }

    /// Makes a chain available.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let ring = self.queues[queue].avail_ring();
        let index: u16 = self
            .memory
            .load(GuestAddress(ring + 2), Ordering::Acquire)
            .unwrap();
        let place = GuestAddress(ring + 4 + 2 * u64::from(index % SIZE));
        self.memory.store(head, place, Ordering::Relaxed).unwrap();
        let next = index.wrapping_add(1);
        self.memory
            .store(next, GuestAddress(ring + 2), Ordering::Release)
            .unwrap();
    }

    /// Chains that came back since the last look: descriptors, and the bytes that were written.
    pub fn used(&mut self, queue: usize) -> Vec<(u32, u32)> {
        let ring = self.queues[queue].used_ring();
        let index: u16 = self
            .memory
            .load(GuestAddress(ring + 2), Ordering::Acquire)
            .unwrap();
        let mut used = Vec::new();
        while self.seen[queue] != index {
            let place = ring + 4 + 8 * u64::from(self.seen[queue] % SIZE);
            let head = self.memory.read_obj(GuestAddress(place)).unwrap();
            let bytes = self.memory.read_obj(GuestAddress(place + 4)).unwrap();
            used.push((head, bytes));
            self.seen[queue] = self.seen[queue].wrapping_add(1);
        }
        used
    }

    pub fn serve(&mut self) -> Result<Served, RingError> {
        self.device.requests(&mut self.queues[0], &self.memory)
    }

    /// Sends bytes with room for so many of an answer. Returns what came back: nothing when nothing was
    /// written.
    pub fn send_bytes(&mut self, bytes: &[u8], room: u32) -> Vec<u8> {
        self.memory
            .write_slice(bytes, GuestAddress(BUFFERS))
            .unwrap();
        self.blank(room);
        let request = (BUFFERS, bytes.len() as u32, false);
        match room {
            0 => self.chain(0, &[request]),
            _ => self.chain(0, &[request, (ANSWER, room, true)]),
        }
        self.answer(room)
    }

    /// Makes the room for an answer, and what is behind it, look unwritten.
    pub fn blank(&self, room: u32) {
        let blank = vec![0xee; room as usize + 8];
        self.memory
            .write_slice(&blank, GuestAddress(ANSWER))
            .unwrap();
    }

    /// Serves the queue, in which one chain is, and returns the answer.
    pub fn answer(&mut self, room: u32) -> Vec<u8> {
        let served = self.serve().unwrap();
        let used = self.used(0);
        assert_eq!((used.len(), served.used), (1, 1));
        assert!(served.notify && !served.more);
        let written = used[0].1;
        assert!(written == 0 || written == room, "{written} bytes");
        let mut answer = vec![0; room as usize + 8];
        self.memory
            .read_slice(&mut answer, GuestAddress(ANSWER))
            .unwrap();
        let (answer, behind) = answer.split_at(room as usize);
        assert_eq!(behind, [0xee; 8], "written behind the answer");
        if written == 0 {
            assert!(answer.iter().all(|byte| *byte == 0xee), "{answer:?}");
            return Vec::new();
        }
        answer.to_vec()
    }

    /// Sends a request. `None` when nothing was answered.
    pub fn send(&mut self, request: Request) -> Option<Status> {
        let mut buffer = [0; MOST_REQUEST_BYTES];
        let room = request.answer_bytes(PROBE_BYTES as usize) as u32;
        let answer = self.send_bytes(request.encode(&mut buffer), room);
        status(&answer)
    }

    pub fn tell(&mut self, faults: &[FaultReport]) -> Result<Served, RingError> {
        self.device
            .faults(&mut self.queues[1], &self.memory, faults)
    }

    /// Gives a buffer for a fault; buffers lie one behind the other.
    pub fn give(&mut self, nr: u16, len: u32) {
        let table = self.queues[1].desc_table();
        let address = BUFFERS + 0x1000 + 32 * u64::from(nr);
        self.descriptor(table, nr, (address, len), F_WRITE, 0);
        self.offer(1, nr);
    }

    pub fn fault(&self, nr: u16) -> [u8; FAULT_BYTES] {
        let address = BUFFERS + 0x1000 + 32 * u64::from(nr);
        let mut bytes = [0; FAULT_BYTES];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }

    // The endpoints' accesses.

    /// Value of the word at `iova`, which is its address; `None` when it is blocked.
    pub fn read(&self, endpoint: u32, iova: u64) -> Option<u64> {
        let mut port = self.unit.port(device_of(endpoint));
        let mut word = [0];
        port.read(iova, &mut word).ok().map(|()| word[0])
    }

    /// Returns true if the word at `iova`, which is that of `guest`, can be written to. It stays what it is.
    pub fn writes(&self, endpoint: u32, iova: u64, guest: u64) -> bool {
        self.unit
            .port(device_of(endpoint))
            .write(iova, &[guest])
            .is_ok()
    }

    /// The faults that the unit has noted.
    pub fn drain(&self) -> Vec<iommu::Fault> {
        let mut faults = Vec::new();
        self.unit.drain_faults(&mut |fault| faults.push(fault));
        faults
    }

    /// Bytes that are pinned, once for each pin.
    pub fn pinned(&self) -> u64 {
        self.ram.iter().map(|ram| ram.pinned()).sum()
    }

    /// Nothing of the guest's is held for anybody.
    pub fn assert_all_back(&self) {
        assert_eq!((self.pinned(), self.ledger.in_use()), (0, 0));
        assert_eq!(self.tables.in_use(), 0);
        assert_eq!(self.device.domains().count(), 0);
    }
}

/// The status of an answer: its tail, whose other bytes are zeros.
pub fn status(answer: &[u8]) -> Option<Status> {
    let tail = answer.last_chunk::<4>()?;
    assert_eq!(tail[1..], [0; 3]);
    Some(Status::ALL[usize::from(tail[0])])
}

pub fn attach(endpoint: u32, domain: u32) -> Request {
    attach_with(endpoint, domain, 0)
}

pub fn attach_with(endpoint: u32, domain: u32, flags: u32) -> Request {
    let reserved = [0; 4];
    Request::Attach(virtio_iommu::wire::Attach {
        domain,
        endpoint,
        flags,
        reserved,
    })
}

pub fn detach(endpoint: u32, domain: u32) -> Request {
    Request::Detach(virtio_iommu::wire::Detach { domain, endpoint })
}

/// Maps `range` to guest addresses from `phys` on.
pub fn map(domain: u32, range: Span<Iova>, phys: u64, flags: u32) -> Request {
    Request::Map(virtio_iommu::wire::Map {
        domain,
        virt_start: range.start,
        virt_end: range.last(),
        phys_start: phys,
        flags,
    })
}

pub fn unmap(domain: u32, range: Span<Iova>) -> Request {
    Request::Unmap(virtio_iommu::wire::Unmap {
        domain,
        virt_start: range.start,
        virt_end: range.last(),
        reserved: [0; 4],
    })
}

pub fn probe(endpoint: u32) -> Request {
    Request::Probe(virtio_iommu::wire::Probe { endpoint })
}

pub fn pages(first: u64, count: u64) -> Span<Iova> {
    Span::new(first * PAGE, count * PAGE)
}

/// A device that knows no units.
pub fn try_device(
    config: VirtioIommuConfig,
) -> Result<VirtioIommu<Units<Tables>>, virtio_iommu::ConfigError> {
    let tables = Arc::new(HeapTables::with_tables(16).unwrap());
    VirtioIommu::new(
        config,
        Units::new(tables, DomainIds::new(4), [FormatId::VtdSs]),
    )
}
