//! Requests of a client, each with the payload of its reply. A request that is refused changes nothing.
//!
//! Source: the vfio-user specification, whose name of each command stands at its method.

use hostmem::PeerFile;
use iopt::Prot;

use crate::device::{INTX, IRQS, Migration, REGIONS};
use crate::error::{DirtyRefusal, MapRefusal, RequestRefusal, UnmapRefusal};
use crate::migration::FLAGS;
use crate::server::Session;
use crate::socket::Message;
use crate::wire::{Bytes, Command, Fields, MOST_DATA, MOST_FDS, at_least, exactly, room};

/// `VFIO_DEVICE_FLAGS_RESET`, `VFIO_DEVICE_FLAGS_PCI`.
const DEVICE_FLAGS: u32 = 0b11;
/// `VFIO_REGION_INFO_FLAG_READ`, `VFIO_REGION_INFO_FLAG_WRITE`.
const REGION_FLAGS: u32 = 0b11;
/// `VFIO_IRQ_INFO_EVENTFD`, `VFIO_IRQ_INFO_NORESIZE`.
const IRQ_FLAGS: u32 = 0b1001;
/// `VFIO_IRQ_INFO_EVENTFD`, `VFIO_IRQ_INFO_MASKABLE`, `VFIO_IRQ_INFO_AUTOMASKED`.
const INTX_FLAGS: u32 = 0b0111;
/// `VFIO_DMA_UNMAP_FLAG_ALL`.
const UNMAP_ALL: u32 = 1 << 1;
/// `VFIO_DEVICE_FEATURE_GET`, `_SET` and `_PROBE`.
const GET: u32 = 1 << 16;
const SET: u32 = 1 << 17;
const PROBE: u32 = 1 << 18;
/// Features.
const MIGRATION: u16 = 1;
const MIG_DEVICE_STATE: u16 = 2;
const DMA_LOGGING_START: u16 = 6;
const DMA_LOGGING_STOP: u16 = 7;
const DMA_LOGGING_REPORT: u16 = 8;

impl Session<'_> {
    /// Serves a request; returns the payload of its reply.
    pub(crate) fn request(&mut self, message: Message) -> Result<Vec<u8>, RequestRefusal> {
        let Message {
            header,
            payload,
            fds,
            too_many,
        } = message;
        if !header.is_command() {
            let command = header.command;
            return Err(RequestRefusal::Reply { command });
        }
        let command = Command::of(header.command)?;
        let expected = match command {
            Command::DmaMap => 1,
            Command::SetIrqs => MOST_FDS,
            _ => 0,
        };
        if too_many || fds.len() > expected {
            let given = fds.len();
            return Err(RequestRefusal::Descriptors { given, expected });
        }
        let payload = &*payload;
        match command {
            Command::Version => Err(RequestRefusal::VersionTwice),
            Command::DmaMap => self.dma_map(payload, fds),
            Command::DmaUnmap => self.dma_unmap(payload),
            Command::GetInfo => self.info(payload),
            Command::GetRegionInfo => self.region_info(payload),
            Command::GetIrqInfo => self.irq_info(payload),
            Command::SetIrqs => self.set_irqs(payload, fds),
            Command::RegionRead => self.region_read(payload),
            Command::RegionWrite => self.region_write(payload),
            Command::Reset => self.reset(payload),
            Command::MigrationRead => self.migration_read(payload),
            Command::MigrationWrite => self.migration_write(payload),
            Command::RegionWriteMulti => self.write_multi(payload),
            Command::Feature => self.feature(payload),
        }
    }

    /// Specification: `VFIO_USER_DMA_MAP`.
    fn dma_map(&mut self, payload: &[u8], fds: Vec<PeerFile>) -> Result<Vec<u8>, RequestRefusal> {
        let mut fields = exactly(payload, 32)?;
        room(fields.u32(), 32)?;
        let flags = fields.u32();
        let prot = [Prot::READ, Prot::WRITE, Prot::RW];
        let prot = flags.checked_sub(1).and_then(|nth| prot.get(nth as usize));
        let prot = *prot.ok_or(MapRefusal::Flags { flags })?;
        let (offset, iova, size) = (fields.u64(), fields.u64(), fields.u64());
        let file = fds.into_iter().next();
        self.server.memory.map(prot, offset, iova, size, file)?;
        self.served.maps += 1;
        Ok(Vec::new())
    }

    /// Specification: `VFIO_USER_DMA_UNMAP`.
    fn dma_unmap(&mut self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut reply = Bytes::default();
        let mut fields = exactly(payload, 24)?;
        room(fields.u32(), 24)?;
        let (flags, iova, size) = (fields.u32(), fields.u64(), fields.u64());
        match (flags, iova, size) {
            (0, ..) => self.server.memory.unmap(iova, size).map(|_| ())?,
            (UNMAP_ALL, 0, 0) => self.server.memory.unmap_all()?,
            _ => return Err(UnmapRefusal::Flags { flags, iova, size }.into()),
        }
        self.served.unmaps += 1;
        reply.u32(24).u32(flags).u64(iova).u64(size);
        Ok(reply.0)
    }

    /// Specification: `VFIO_USER_DEVICE_GET_INFO`.
    fn info(&self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut reply = Bytes::default();
        room(exactly(payload, 16)?.u32(), 16)?;
        reply.u32(16).u32(DEVICE_FLAGS);
        reply.u32(REGIONS as u32).u32(IRQS as u32);
        Ok(reply.0)
    }

    /// Specification: `VFIO_USER_DEVICE_GET_REGION_INFO`.
    fn region_info(&self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut reply = Bytes::default();
        let mut fields = exactly(payload, 32)?;
        room(fields.u32(), 32)?;
        let (_flags, index) = (fields.u32(), fields.u32());
        let size = self.region(index)?;
        let flags = if size == 0 { 0 } else { REGION_FLAGS };
        reply.u32(32).u32(flags).u32(index).u32(0);
        reply.u64(size).u64(0);
        Ok(reply.0)
    }

    /// Specification: `VFIO_USER_DEVICE_GET_IRQ_INFO`.
    fn irq_info(&self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut reply = Bytes::default();
        let mut fields = exactly(payload, 16)?;
        room(fields.u32(), 16)?;
        let (_flags, index) = (fields.u32(), fields.u32());
        if index as usize >= IRQS {
            let (start, count, there) = (0, 0, 0);
            return Err(RequestRefusal::Interrupts {
                index,
                start,
                count,
                there,
            });
        }
        let count = self.server.irqs.count(index as usize);
        let flags = match count {
            0 => 0,
            _ if index as usize == INTX => INTX_FLAGS,
            _ => IRQ_FLAGS,
        };
        reply.u32(16).u32(flags).u32(index).u32(count);
        Ok(reply.0)
    }

    /// Specification: `VFIO_USER_DEVICE_SET_IRQS`.
    fn set_irqs(&self, payload: &[u8], fds: Vec<PeerFile>) -> Result<Vec<u8>, RequestRefusal> {
        let mut fields = at_least(payload, 20)?;
        room(fields.u32(), 20)?;
        let (flags, index) = (fields.u32(), fields.u32());
        let (start, count) = (fields.u32(), fields.u32());
        self.server
            .irqs
            .set(flags, index, start, count, fields.rest(), fds)?;
        Ok(Vec::new())
    }

    /// Specification: `VFIO_USER_REGION_READ`.
    fn region_read(&mut self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut reply = Bytes::default();
        let mut fields = exactly(payload, 16)?;
        let (offset, region, count) = (fields.u64(), fields.u32(), fields.u32());
        self.access(region, offset, count.into())?;
        reply.u64(offset).u32(region).u32(count);
        let fixed = reply.0.len();
        reply.0.resize(fixed + count as usize, 0);
        let bytes = reply.0.get_mut(fixed..).unwrap_or_default();
        let read = self.device.read(region as usize, offset, bytes);
        read.map_err(RequestRefusal::Device)?;
        Ok(reply.0)
    }

    /// Specification: `VFIO_USER_REGION_WRITE`.
    fn region_write(&mut self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut reply = Bytes::default();
        let mut fields = at_least(payload, 16)?;
        let (offset, region, count) = (fields.u64(), fields.u32(), fields.u32());
        let bytes = fields.rest();
        exactly(bytes, count as usize)?;
        self.access(region, offset, count.into())?;
        let written = self.device.write(region as usize, offset, bytes);
        written.map_err(RequestRefusal::Device)?;
        reply.u64(offset).u32(region).u32(count);
        Ok(reply.0)
    }

    /// Specification: `VFIO_USER_DEVICE_RESET`.
    fn reset(&mut self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        exactly(payload, 0)?;
        self.device.reset();
        if let Some(migration) = self.device.migration() {
            self.progress.reset(migration);
        }
        Ok(Vec::new())
    }

    /// Specification: `VFIO_USER_MIG_DATA_READ`.
    fn migration_read(&mut self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut reply = Bytes::default();
        let mut fields = exactly(payload, 8)?;
        let (argsz, size) = (fields.u32(), fields.u32());
        room(argsz, 8)?;
        self.migration()?;
        let most = (size.min(argsz - 8) as usize).min(MOST_DATA);
        let data = self.progress.read(most)?;
        let len = data.len() as u32;
        reply.u32(8 + len).u32(len).bytes(data);
        Ok(reply.0)
    }

    /// Specification: `VFIO_USER_MIG_DATA_WRITE`.
    fn migration_write(&mut self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut fields = at_least(payload, 8)?;
        let (argsz, size) = (fields.u32(), fields.u32());
        room(argsz, 8)?;
        exactly(fields.rest(), size as usize)?;
        self.migration()?;
        self.progress.write(fields.rest())?;
        Ok(Vec::new())
    }

    /// Bytes of a region.
    fn region(&self, index: u32) -> Result<u64, RequestRefusal> {
        let size = self.server.description.regions.get(index as usize);
        size.copied().ok_or(RequestRefusal::Region { index })
    }

    /// Refuses an access that does not lie inside its region.
    fn access(&self, region: u32, offset: u64, count: u64) -> Result<(), RequestRefusal> {
        let size = self.region(region)?;
        let end = offset.checked_add(count).filter(|end| *end <= size);
        match end {
            Some(_) if count > 0 && count <= MOST_DATA as u64 => Ok(()),
            _ => Err(RequestRefusal::Access {
                region,
                offset,
                count,
                size,
            }),
        }
    }

    /// Specification: `VFIO_USER_REGION_WRITE_MULTI`. All writes are looked at first.
    fn write_multi(&self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut fields = at_least(payload, 8)?;
        let count = fields.u64();
        let bytes = usize::try_from(count).ok().and_then(|n| n.checked_mul(24));
        exactly(fields.rest(), bytes.unwrap_or(usize::MAX))?;
        let writes = fields.rest().chunks_exact(24).map(|write| {
            let mut fields = Fields::new(write);
            let (offset, region, count) = (fields.u64(), fields.u32(), fields.u32());
            (offset, region, count, fields.rest())
        });
        for (offset, region, count, data) in writes.clone() {
            self.access(region, offset, count.into())?;
            at_least(data, count as usize)?;
        }
        for (offset, region, count, data) in writes {
            let data = data.get(..count as usize).unwrap_or_default();
            let written = self.device.write(region as usize, offset, data);
            written.map_err(RequestRefusal::Device)?;
        }
        let mut reply = Bytes::default();
        reply.u64(count);
        Ok(reply.0)
    }

    fn migration(&self) -> Result<&dyn Migration, RequestRefusal> {
        let migration = self.device.migration();
        let migration = migration.filter(|_| self.server.description.migration);
        migration.ok_or(RequestRefusal::NoMigration)
    }

    /// Specification: `VFIO_USER_DEVICE_FEATURE`.
    fn feature(&mut self, payload: &[u8]) -> Result<Vec<u8>, RequestRefusal> {
        let mut fields = at_least(payload, 8)?;
        let (argsz, flags) = (fields.u32(), fields.u32());
        room(argsz, 8)?;
        let (feature, methods) = (flags as u16, flags & !0xffff);
        let data = fields.rest();
        let unsupported = RequestRefusal::Feature { feature, flags };
        let supported = match feature {
            MIGRATION | MIG_DEVICE_STATE if self.migration().is_err() => 0,
            MIGRATION | DMA_LOGGING_REPORT => GET,
            MIG_DEVICE_STATE => GET | SET,
            DMA_LOGGING_START | DMA_LOGGING_STOP => SET,
            _ => 0,
        };
        if methods & PROBE != 0 {
            let asked = methods & !PROBE;
            return match supported != 0 && asked & !supported == 0 {
                true => Ok(payload.to_vec()),
                false => Err(unsupported),
            };
        }
        if supported & methods == 0 || !matches!(methods, GET | SET) {
            return Err(unsupported);
        }
        let memory = &self.server.memory;
        let mut found = Bytes::default();
        match (feature, methods) {
            (MIGRATION, _) => {
                found.u64(FLAGS);
            }
            (MIG_DEVICE_STATE, GET) => {
                found.u32(self.progress.state()).u32(u32::MAX);
            }
            (MIG_DEVICE_STATE, _) => {
                let to = exactly(data, 8)?.u32();
                let device = self.device;
                let migration = device.migration().ok_or(RequestRefusal::NoMigration)?;
                self.progress.go(migration, to)?;
            }
            (DMA_LOGGING_START, _) => {
                let mut fields = at_least(data, 16)?;
                let (page, ranges) = (fields.u64(), fields.u32());
                let bytes = fields.rest().len() - 4;
                if ranges as usize * 16 != bytes {
                    return Err(DirtyRefusal::Ranges { ranges, bytes }.into());
                }
                if !page.is_power_of_two() {
                    return Err(DirtyRefusal::Page { page }.into());
                }
                // All of it is tracked, by 4 KiB: what is asked for is a hint.
                memory.track()?;
                let mut reply = payload.to_vec();
                if let Some(page) = reply.get_mut(8..16) {
                    page.copy_from_slice(&4096_u64.to_ne_bytes());
                }
                return Ok(reply);
            }
            (DMA_LOGGING_STOP, _) => memory.untrack(),
            _ => {
                let mut fields = exactly(data, 24)?;
                let (iova, len, page) = (fields.u64(), fields.u64(), fields.u64());
                let pending = memory.bitmap(iova, len, page)?;
                // A reply without room would lose what it says.
                room(argsz, 32 + 8 * len.div_ceil(page).div_ceil(64) as u32)?;
                let words = memory.written(pending)?;
                found.u64(iova).u64(len).u64(page);
                words.iter().for_each(|word| {
                    found.u64(*word);
                });
            }
        }
        if methods == SET {
            return Ok(payload.to_vec());
        }
        let size = 8 + found.0.len() as u32;
        room(argsz, size)?;
        let mut reply = Bytes::default();
        reply.u32(size).u32(flags).bytes(&found.0);
        Ok(reply.0)
    }
}
