//! One client after the other.
//!
//! A client sends its version first. Then requests are served in the order in which they come, each with its reply unless
//! it wants none (*No_reply*: then a refusal is not replied to either). A request that is refused changes nothing, and the
//! connection goes on. It ends when the start of the next message is unknown, and when the version is not agreed on.
//!
//! When the client has left, its memory is unmapped and its interrupts are gone before
//! [`DeviceModel::left`] is called and the next client is accepted.

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use hostmem::PeerEvent;
use serde::{Deserialize, Serialize};

use crate::device::{Description, DeviceModel};
use crate::error::ServeError;
use crate::irqs::Irqs;
use crate::memory::{ClientLimits, ClientMemory, ServerSetupError};
use crate::migration::Progress;
use crate::socket::{self, Channel, Door, Message};
use crate::wire::{Bytes, Command, Fields, Header, MOST_DATA, MOST_FDS};

/// Page sizes of maps: 4 KiB, and what large leaves take.
const PAGE_SIZES: u64 = 1 << 12 | 1 << 21 | 1 << 30;

/// Serves a device to one client at a time.
pub struct Server {
    listener: UnixListener,
    pub(crate) description: Description,
    pub(crate) memory: Arc<ClientMemory>,
    pub(crate) irqs: Arc<Irqs>,
}

/// Requests of a client, counted.
#[derive(Debug)]
pub struct SessionReport {
    /// Its requests, without those that were refused.
    pub requests: u64,
    /// Maps among these requests.
    pub maps: u64,
    /// Unmaps among these requests.
    pub unmaps: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Other clients that connected meanwhile, and were refused.
    pub others: u64,
    /// Cause of the end, if the client did not leave between two messages.
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
pub(crate) struct Session<'a> {
    pub(crate) server: &'a Server,
    pub(crate) device: &'a dyn DeviceModel,
    pub(crate) progress: Progress,
    pub(crate) served: &'a mut SessionReport,
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
}
