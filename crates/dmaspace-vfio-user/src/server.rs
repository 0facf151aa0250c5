//! One client after the other.
//!
//! A client sends its version first. Then requests are served in the order in which they come, each with its reply unless
//! it wants none (*No_reply*: then a refusal is not replied to either). A request that is refused changes nothing, and the
//! connection goes on. It ends where it is not known any more where the next message begins, and where
//! the version is not agreed on.
//!
//! When the client has left, its memory is unmapped and its interrupts are gone before
//! [`DeviceModel::left`] is called and the next client is accepted.

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use hostmem::PeerEvent;
use iopt::Prot;
use serde::{Deserialize, Serialize};

use crate::device::{Description, DeviceModel, INTX, IRQS, Migration, REGIONS};
use crate::error::{DirtyRefusal, MapRefusal, RequestRefusal, ServeError, UnmapRefusal};
use crate::irqs::Irqs;
use crate::memory::{ClientLimits, ClientMemory, ServerSetupError};
use crate::migration::{FLAGS, Progress};
use crate::socket::{self, Channel, Door, Message};
use crate::wire::{Bytes, Command, Fields, Header, MOST_DATA, MOST_FDS, at_least, exactly, room};

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
/// Page sizes of maps: 4 KiB, and what large leaves take.
const PAGE_SIZES: u64 = 1 << 12 | 1 << 21 | 1 << 30;

/// Serves a device to one client at a time.
pub struct Server {
    listener: UnixListener,
    description: Description,
    memory: Arc<ClientMemory>,
    irqs: Arc<Irqs>,
}

/// What a client did.
#[derive(Debug)]
pub struct SessionReport {
    /// Its requests, without those that were refused.
    pub requests: u64,
    /// Of these, maps.
    pub maps: u64,
    /// Of these, unmaps.
    pub unmaps: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Other clients that connected meanwhile, and were refused.
    pub others: u64,
    /// Why it ended, if the client did not leave between two messages.
    pub end: Result<(), ServeError>,
}

impl Server {
    /// A server on `listener`, for a device that `description` describes.
    ///
    /// # Errors
    ///
    /// See [`ServerSetupError`].
    pub fn new(
        listener: UnixListener,
        description: Description,
        limits: ClientLimits,
    ) -> Result<Self, ServerSetupError> {
        listener.set_nonblocking(true)?;
        PeerEvent::supported()?;
        Ok(Self {
            listener,
            description,
            memory: ClientMemory::new(limits)?,
            irqs: Arc::new(Irqs::new(description.irqs)),
        })
    }

    /// The client's memory, for the device model.
    pub const fn memory(&self) -> &Arc<ClientMemory> {
        &self.memory
    }

    /// The client's interrupts, for the device model.
    pub const fn irqs(&self) -> &Arc<Irqs> {
        &self.irqs
    }

    /// Waits for a client, and serves it until it leaves.
    ///
    /// # Errors
    ///
    /// [`ServeError::Accept`] only: the next call would fail, too. A want of descriptors or memory is waited out, and
    /// [reported](DeviceModel::not_accepted).
    pub fn serve(&self, device: &dyn DeviceModel) -> Result<SessionReport, ServeError> {
        let mut door = Door {
            listener: &self.listener,
            device,
            stuck: false,
        };
        let client = door.next()?;
        let mut served = SessionReport {
            requests: 0,
            maps: 0,
            unmaps: 0,
            refused: 0,
            others: 0,
            end: Ok(()),
        };
        let mut session = Session {
            server: self,
            device,
            progress: Progress::new(),
            served: &mut served,
        };
        let mut channel = Channel {
            client,
            door,
            refused: 0,
        };
        let mut end = session.run(&mut channel);
        // Nothing of the client stays, and nothing can be sent to it any more.
        socket::close(channel.client);
        let others = channel.refused;
        session.progress.leave(device.migration());
        self.irqs.clear();
        self.memory.untrack();
        let left = self.memory.unmap_all();
        end = end.and(left.map_err(ServeError::Leave));
        device.left();
        served.others = others;
        served.end = end;
        Ok(served)
    }
}

/// A client while it is there.
struct Session<'a> {
    server: &'a Server,
    device: &'a dyn DeviceModel,
    progress: Progress,
    served: &'a mut SessionReport,
}

/// The client's side of the version. What is not named is not looked at.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Proposal {
    capabilities: Proposed,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Proposed {
    max_msg_fds: Option<u32>,
    max_data_xfer_size: Option<u64>,
    write_multiple: bool,
}

#[derive(Serialize)]
struct Answer {
    capabilities: Agreed,
}

#[derive(Serialize)]
struct Agreed {
    max_msg_fds: usize,
    max_data_xfer_size: usize,
    max_dma_maps: usize,
    pgsizes: u64,
    write_multiple: bool,
}

impl Session<'_> {
    fn run(&mut self, channel: &mut Channel<'_>) -> Result<(), ServeError> {
        let patience = self.server.memory.limits().reply;
        let timeout = channel.client.set_write_timeout(Some(patience));
        timeout.map_err(ServeError::Socket)?;
        let Some(first) = channel.receive()? else {
            return Ok(());
        };
        match self.version(&first) {
            Ok(reply) => channel.send(&first.header.reply(&reply))?,
            Err(error) => {
                let errno = rustix::io::Errno::INVAL.raw_os_error() as u32;
                channel.send(&first.header.refused(errno))?;
                return Err(error);
            }
        }
        while let Some(message) = channel.receive()? {
            let header = message.header;
            let reply = match self.request(message) {
                Ok(payload) => {
                    self.served.requests += 1;
                    header.reply(&payload)
                }
                Err(refusal) => {
                    self.served.refused += 1;
                    self.device.refused(header.command, &refusal);
                    header.refused(refusal.errno())
                }
            };
            if let Some(offset) = self.server.memory.lost() {
                return Err(ServeError::MemoryLost { offset });
            }
            if header.wants_reply() {
                channel.send(&reply)?;
            }
        }
        Ok(())
    }

    /// Agrees on a version, or does not. Specification: `VFIO_USER_VERSION`.
    fn version(&self, message: &Message) -> Result<Vec<u8>, ServeError> {
        let Header { command, .. } = message.header;
        let is_version = matches!(Command::of(command), Ok(Command::Version));
        if !is_version || !message.header.is_command() || message.payload.len() < 4 {
            return Err(ServeError::NoVersion { command });
        }
        let mut fields = Fields::new(&message.payload);
        let (major, minor) = (fields.u16(), fields.u16());
        if major != 0 {
            return Err(ServeError::Version { major, minor });
        }
        let proposal = match fields.rest() {
            [] => Proposal::default(),
            [json @ .., 0] => serde_json::from_slice(json)
                .map_err(|error| ServeError::Capabilities(error.to_string()))?,
            _ => return Err(ServeError::Capabilities("no NUL at the end".into())),
        };
        let Proposed {
            max_msg_fds,
            max_data_xfer_size,
            write_multiple,
        } = proposal.capabilities;
        if max_msg_fds == Some(0) || max_data_xfer_size == Some(0) {
            return Err(ServeError::Capabilities("a limit of 0".into()));
        }
        let answer = Answer {
            capabilities: Agreed {
                max_msg_fds: MOST_FDS,
                max_data_xfer_size: MOST_DATA,
                max_dma_maps: self.server.memory.limits().maps,
                pgsizes: PAGE_SIZES,
                write_multiple,
            },
        };
        let json = serde_json::to_vec(&answer)
            .map_err(|error| ServeError::Capabilities(error.to_string()))?;
        let mut reply = Bytes::default();
        reply.u16(0).u16(0).bytes(&json).bytes(&[0]);
        Ok(reply.0)
    }

    /// Serves a request; returns the payload of its reply.
    fn request(&mut self, message: Message) -> Result<Vec<u8>, RequestRefusal> {
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
        let (memory, irqs) = (&self.server.memory, &self.server.irqs);
        let mut reply = Bytes::default();
        match command {
            Command::Version => return Err(RequestRefusal::VersionTwice),
            Command::DmaMap => {
                let mut fields = exactly(&payload, 32)?;
                room(fields.u32(), 32)?;
                let flags = fields.u32();
                let prot = [Prot::READ, Prot::WRITE, Prot::RW];
                let prot = flags.checked_sub(1).and_then(|nth| prot.get(nth as usize));
                let prot = *prot.ok_or(MapRefusal::Flags { flags })?;
                let (offset, iova, size) = (fields.u64(), fields.u64(), fields.u64());
                let file = fds.into_iter().next();
                memory.map(prot, offset, iova, size, file)?;
                self.served.maps += 1;
            }
            Command::DmaUnmap => {
                let mut fields = exactly(&payload, 24)?;
                room(fields.u32(), 24)?;
                let (flags, iova, size) = (fields.u32(), fields.u64(), fields.u64());
                match (flags, iova, size) {
                    (0, ..) => memory.unmap(iova, size).map(|_| ())?,
                    (UNMAP_ALL, 0, 0) => memory.unmap_all()?,
                    _ => return Err(UnmapRefusal::Flags { flags, iova, size }.into()),
                }
                self.served.unmaps += 1;
                reply.u32(24).u32(flags).u64(iova).u64(size);
            }
            Command::GetInfo => {
                room(exactly(&payload, 16)?.u32(), 16)?;
                reply.u32(16).u32(DEVICE_FLAGS);
                reply.u32(REGIONS as u32).u32(IRQS as u32);
            }
            Command::GetRegionInfo => {
                let mut fields = exactly(&payload, 32)?;
                room(fields.u32(), 32)?;
                let (_flags, index) = (fields.u32(), fields.u32());
                let size = self.region(index)?;
                let flags = if size == 0 { 0 } else { REGION_FLAGS };
                reply.u32(32).u32(flags).u32(index).u32(0);
                reply.u64(size).u64(0);
            }
            Command::GetIrqInfo => {
                let mut fields = exactly(&payload, 16)?;
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
                let count = irqs.count(index as usize);
                let flags = match count {
                    0 => 0,
                    _ if index as usize == INTX => INTX_FLAGS,
                    _ => IRQ_FLAGS,
                };
                reply.u32(16).u32(flags).u32(index).u32(count);
            }
            Command::SetIrqs => {
                let mut fields = at_least(&payload, 20)?;
                room(fields.u32(), 20)?;
                let (flags, index) = (fields.u32(), fields.u32());
                let (start, count) = (fields.u32(), fields.u32());
                irqs.set(flags, index, start, count, fields.rest(), fds)?;
            }
            Command::RegionRead => {
                let mut fields = exactly(&payload, 16)?;
                let (offset, region, count) = (fields.u64(), fields.u32(), fields.u32());
                self.access(region, offset, count.into())?;
                reply.u64(offset).u32(region).u32(count);
                let fixed = reply.0.len();
                reply.0.resize(fixed + count as usize, 0);
                let bytes = reply.0.get_mut(fixed..).unwrap_or_default();
                let read = self.device.read(region as usize, offset, bytes);
                read.map_err(RequestRefusal::Device)?;
            }
            Command::RegionWrite => {
                let mut fields = at_least(&payload, 16)?;
                let (offset, region, count) = (fields.u64(), fields.u32(), fields.u32());
                let bytes = fields.rest();
                exactly(bytes, count as usize)?;
                self.access(region, offset, count.into())?;
                let written = self.device.write(region as usize, offset, bytes);
                written.map_err(RequestRefusal::Device)?;
                reply.u64(offset).u32(region).u32(count);
            }
            Command::RegionWriteMulti => return self.write_multi(&payload),
            Command::Reset => {
                exactly(&payload, 0)?;
                self.device.reset();
                if let Some(migration) = self.device.migration() {
                    self.progress.reset(migration);
                }
            }
            Command::Feature => return self.feature(&payload),
            Command::MigrationRead => {
                let mut fields = exactly(&payload, 8)?;
                let (argsz, size) = (fields.u32(), fields.u32());
                room(argsz, 8)?;
                self.migration()?;
                let most = (size.min(argsz - 8) as usize).min(MOST_DATA);
                let data = self.progress.read(most)?;
                let len = data.len() as u32;
                reply.u32(8 + len).u32(len).bytes(data);
            }
            Command::MigrationWrite => {
                let mut fields = at_least(&payload, 8)?;
                let (argsz, size) = (fields.u32(), fields.u32());
                room(argsz, 8)?;
                exactly(fields.rest(), size as usize)?;
                self.migration()?;
                self.progress.write(fields.rest())?;
            }
        }
        Ok(reply.0)
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
