//! Messages between driver and device (VIRTIO 1.3, 5.13), all of it little-endian.
//!
//! Ranges of addresses name their first and their last byte. Nothing here panics on any input.

use std::ops::RangeInclusive;

/// The device's type (5.13.1).
pub const DEVICE_ID: u32 = 23;
/// Number of queues (5.13.2).
pub const NUM_QUEUES: usize = 2;
/// The number of the queue with the driver's requests (5.13.2).
pub const REQUEST_QUEUE: usize = 0;
/// The number of the queue with the device's events (5.13.2).
pub const EVENT_QUEUE: usize = 1;
/// Descriptors of each queue that this project's daemons offer; a ring of any size is served.
pub const QUEUE_SIZE: u16 = 256;

/// Bytes of the configuration space (5.13.4).
pub const CONFIG_BYTES: usize = 40;
/// Offset of `bypass` in it: the only byte that a driver may write to.
pub const BYPASS_OFFSET: usize = 36;

/// Bytes of the longest device-readable part of a request: PROBE's.
pub const MOST_REQUEST_BYTES: usize = 72;
/// Bytes of `struct virtio_iommu_req_tail` (5.13.6).
pub const TAIL_BYTES: usize = 4;
/// Bytes of `struct virtio_iommu_fault` (5.13.6.9).
pub const FAULT_BYTES: usize = 24;
/// Bytes of a RESV_MEM property with its head (5.13.6.8.1).
pub const RESERVED_BYTES: usize = 24;

/// The status of a request (5.13.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Status {
    /// `VIRTIO_IOMMU_S_OK`: it is done.
    Ok = 0,
    /// `VIRTIO_IOMMU_S_IOERR`: the request could not be read.
    IoErr = 1,
    /// `VIRTIO_IOMMU_S_UNSUPP`: the device cannot do that.
    Unsupp = 2,
    /// `VIRTIO_IOMMU_S_DEVERR`: the device failed.
    DevErr = 3,
    /// `VIRTIO_IOMMU_S_INVAL`: invalid parameters.
    Inval = 4,
    /// `VIRTIO_IOMMU_S_RANGE`: parameters out of range.
    Range = 5,
    /// `VIRTIO_IOMMU_S_NOENT`: what is named is not there.
    NoEnt = 6,
    /// `VIRTIO_IOMMU_S_FAULT`: a bad address.
    Fault = 7,
    /// `VIRTIO_IOMMU_S_NOMEM`: resources are used up.
    NoMem = 8,
}

impl Status {
    /// All of them, by number.
    pub const ALL: [Self; 9] = [
        Self::Ok,
        Self::IoErr,
        Self::Unsupp,
        Self::DevErr,
        Self::Inval,
        Self::Range,
        Self::NoEnt,
        Self::Fault,
        Self::NoMem,
    ];

    /// `struct virtio_iommu_req_tail` with this status.
    pub const fn tail(self) -> [u8; TAIL_BYTES] {
        [self as u8, 0, 0, 0]
    }
}

/// The configuration space (5.13.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigSpace {
    /// `page_size_mask`: the lowest bit is the granularity of mappings, the others are hints.
    pub page_sizes: u64,
    /// `input_range`: what addresses can be mapped.
    pub input: RangeInclusive<u64>,
    /// `domain_range`: numbers of domains.
    pub domains: RangeInclusive<u32>,
    /// `probe_size`: bytes of the properties in a PROBE request.
    pub probe_bytes: u32,
    /// `bypass`: endpoints without a domain are in bypass mode.
    pub bypass: bool,
}

impl ConfigSpace {
    /// As the driver reads it.
    pub fn to_bytes(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut out = Writer(&mut bytes);
        out.put(self.page_sizes.to_le_bytes());
        out.put(self.input.start().to_le_bytes());
        out.put(self.input.end().to_le_bytes());
        out.put(self.domains.start().to_le_bytes());
        out.put(self.domains.end().to_le_bytes());
        out.put(self.probe_bytes.to_le_bytes());
        out.put([u8::from(self.bypass)]);
        bytes
    }
}

/// Flags of an ATTACH request (5.13.6.3).
pub mod attach_flags {
    /// `VIRTIO_IOMMU_ATTACH_F_BYPASS`: the domain is a bypass domain.
    pub const BYPASS: u32 = 1 << 0;
}

/// Flags of a MAP request (5.13.6.5).
pub mod map_flags {
    /// `VIRTIO_IOMMU_MAP_F_READ`: endpoints may read.
    pub const READ: u32 = 1 << 0;
    /// `VIRTIO_IOMMU_MAP_F_WRITE`: endpoints may write.
    pub const WRITE: u32 = 1 << 1;
    /// `VIRTIO_IOMMU_MAP_F_MMIO`: it is no memory but registers.
    pub const MMIO: u32 = 1 << 2;
}

/// The device-readable part of a request (5.13.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// `VIRTIO_IOMMU_T_ATTACH`.
    Attach(Attach),
    /// `VIRTIO_IOMMU_T_DETACH`.
    Detach(Detach),
    /// `VIRTIO_IOMMU_T_MAP`.
    Map(Map),
    /// `VIRTIO_IOMMU_T_UNMAP`.
    Unmap(Unmap),
    /// `VIRTIO_IOMMU_T_PROBE`.
    Probe(Probe),
}

/// Attach an endpoint to a domain (5.13.6.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attach {
    /// The domain, which comes into being with its first endpoint.
    pub domain: u32,
    /// The endpoint.
    pub endpoint: u32,
    /// See [`attach_flags`].
    pub flags: u32,
    /// Zeros.
    pub reserved: [u8; 4],
}

/// Detach an endpoint from a domain (5.13.6.4). Reserved fields are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detach {
    /// The domain.
    pub domain: u32,
    /// The endpoint.
    pub endpoint: u32,
}

/// Map a range (5.13.6.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Map {
    /// The domain.
    pub domain: u32,
    /// The first address that endpoints use.
    pub virt_start: u64,
    /// The last.
    pub virt_end: u64,
    /// The first address in the guest's physical memory.
    pub phys_start: u64,
    /// See [`map_flags`].
    pub flags: u32,
}

/// Unmap a range (5.13.6.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmap {
    /// The domain.
    pub domain: u32,
    /// The first address that endpoints use.
    pub virt_start: u64,
    /// The last.
    pub virt_end: u64,
    /// Zeros.
    pub reserved: [u8; 4],
}

/// Ask for the properties of an endpoint (5.13.6.7). Reserved fields are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// The endpoint.
    pub endpoint: u32,
}

/// Defect of bytes that are no request. The driver gets its buffers back as they were (5.13.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// There is no head.
    #[error("{bytes} bytes are no head of a request")]
    Head {
        /// Bytes of the device-readable part.
        bytes: usize,
    },
    /// No type that is known.
    #[error("requests of type {kind} are not known")]
    Type {
        /// The type.
        kind: u8,
    },
    /// The type has another length.
    #[error("{bytes} bytes are no request of type {kind}")]
    Length {
        /// The type.
        kind: u8,
        /// Bytes of the device-readable part.
        bytes: usize,
    },
}

impl Request {
    /// Bytes of the device-writable part, of which a PROBE's depends on `probe_size`.
    pub const fn answer_bytes(&self, probe_size: usize) -> usize {
        match self {
            Self::Probe(_) => probe_size + TAIL_BYTES,
            _ => TAIL_BYTES,
        }
    }

    /// The type's number.
    pub const fn kind(&self) -> u8 {
        match self {
            Self::Attach(_) => 1,
            Self::Detach(_) => 2,
            Self::Map(_) => 3,
            Self::Unmap(_) => 4,
            Self::Probe(_) => 5,
        }
    }

    /// Reads the device-readable part of a request.
    ///
    /// # Errors
    ///
    /// A type that is not known, or not its length.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let Some((&[kind, ..], body)) = bytes.split_first_chunk::<4>() else {
            let bytes = bytes.len();
            return Err(Malformed::Head { bytes });
        };
        let mut body = Reader(body);
        let request = match kind {
            1 => body.attach(),
            2 => body.detach(),
            3 => body.map(),
            4 => body.unmap(),
            5 => body.probe(),
            _ => return Err(Malformed::Type { kind }),
        };
        let bytes = bytes.len();
        request
            .filter(|_| body.0.is_empty())
            .ok_or(Malformed::Length { kind, bytes })
    }

    /// Writes the device-readable part into `buffer`; returns its bytes.
    pub fn encode<'a>(&self, buffer: &'a mut [u8; MOST_REQUEST_BYTES]) -> &'a [u8] {
        buffer.fill(0);
        let mut out = Writer(buffer);
        out.put([self.kind(), 0, 0, 0]);
        match *self {
            Self::Attach(Attach {
                domain,
                endpoint,
                flags,
                reserved,
            }) => {
                out.put(domain.to_le_bytes());
                out.put(endpoint.to_le_bytes());
                out.put(flags.to_le_bytes());
                out.put(reserved);
            }
            Self::Detach(Detach { domain, endpoint }) => {
                out.put(domain.to_le_bytes());
                out.put(endpoint.to_le_bytes());
                out.put([0; 8]);
            }
            Self::Map(Map {
                domain,
                virt_start,
                virt_end,
                phys_start,
                flags,
            }) => {
                out.put(domain.to_le_bytes());
                out.put(virt_start.to_le_bytes());
                out.put(virt_end.to_le_bytes());
                out.put(phys_start.to_le_bytes());
                out.put(flags.to_le_bytes());
            }
            Self::Unmap(Unmap {
                domain,
                virt_start,
                virt_end,
                reserved,
            }) => {
                out.put(domain.to_le_bytes());
                out.put(virt_start.to_le_bytes());
                out.put(virt_end.to_le_bytes());
                out.put(reserved);
            }
            Self::Probe(Probe { endpoint }) => {
                out.put(endpoint.to_le_bytes());
                out.put([0; 64]);
            }
        }
        let left = out.0.len();
        let used = MOST_REQUEST_BYTES - left;
        buffer.get(..used).unwrap_or(&[])
    }
}

/// The fields that are left to read.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn le32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn le64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn attach(&mut self) -> Option<Request> {
        Some(Request::Attach(Attach {
            domain: self.le32()?,
            endpoint: self.le32()?,
            flags: self.le32()?,
            reserved: self.take()?,
        }))
    }

    fn detach(&mut self) -> Option<Request> {
        let (domain, endpoint) = (self.le32()?, self.le32()?);
        let _reserved: [u8; 8] = self.take()?;
        Some(Request::Detach(Detach { domain, endpoint }))
    }

    fn map(&mut self) -> Option<Request> {
        Some(Request::Map(Map {
            domain: self.le32()?,
            virt_start: self.le64()?,
            virt_end: self.le64()?,
            phys_start: self.le64()?,
            flags: self.le32()?,
        }))
    }

    fn unmap(&mut self) -> Option<Request> {
        Some(Request::Unmap(Unmap {
            domain: self.le32()?,
            virt_start: self.le64()?,
            virt_end: self.le64()?,
            reserved: self.take()?,
        }))
    }

    fn probe(&mut self) -> Option<Request> {
        let endpoint = self.le32()?;
        let _reserved: [u8; 64] = self.take()?;
        Some(Request::Probe(Probe { endpoint }))
    }
}

/// The room that is left to write to. What has no room is left out: callers have as much as they put.
struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put<const N: usize>(&mut self, field: [u8; N]) {
        if let Some((place, rest)) = std::mem::take(&mut self.0).split_first_chunk_mut() {
            *place = field;
            self.0 = rest;
        }
    }
}

/// Purpose of a reserved range: the subtype of a RESV_MEM property (5.13.6.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReservedKind {
    /// `VIRTIO_IOMMU_RESV_MEM_T_RESERVED`: it cannot be mapped.
    Reserved = 0,
    /// `VIRTIO_IOMMU_RESV_MEM_T_MSI`: writes there are interrupts, and it cannot be mapped.
    Msi = 1,
}

/// Addresses that an endpoint cannot have mapped: a RESV_MEM property (5.13.6.8.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedMemory {
    /// Purpose of the range.
    pub kind: ReservedKind,
    /// The first and the last.
    pub range: RangeInclusive<u64>,
}

impl ReservedMemory {
    /// The interrupts of x86: 0xfee0_0000 to 0xfeef_ffff.
    pub const X86_MSI: Self = Self {
        kind: ReservedKind::Msi,
        range: 0xfee0_0000..=0xfeef_ffff,
    };

    /// The property, with its head.
    pub fn to_bytes(&self) -> [u8; RESERVED_BYTES] {
        let mut bytes = [0; RESERVED_BYTES];
        let mut out = Writer(&mut bytes);
        // VIRTIO_IOMMU_PROBE_T_RESV_MEM, and the bytes that follow the head.
        out.put(1u16.to_le_bytes());
        out.put((RESERVED_BYTES as u16 - 4).to_le_bytes());
        out.put([self.kind as u8, 0, 0, 0]);
        out.put(self.range.start().to_le_bytes());
        out.put(self.range.end().to_le_bytes());
        bytes
    }

    pub(crate) fn overlaps(&self, first: u64, last: u64) -> bool {
        *self.range.start() <= last && first <= *self.range.end()
    }
}
