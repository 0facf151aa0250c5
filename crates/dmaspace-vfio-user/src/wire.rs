//! Messages as bytes.
//!
//! Numbers are in the byte order of the machine, which both ends share. A header of 16 bytes (message ID, command,
//! size of the whole message, flags, error) is followed by the command's payload.
//!
//! Source: vfio-user protocol specification, "Protocol Specification", "Header", "Commands".

use crate::error::RequestRefusal;

/// Bytes of a header.
pub(crate) const HEADER: usize = 16;
/// The most bytes that a message moves to or from a region (`max_data_xfer_size`).
pub(crate) const MOST_DATA: usize = 1 << 20;
/// The longest message: data with the largest fixed part before it, and some room.
pub(crate) const MOST_MESSAGE: usize = MOST_DATA + 4096;
/// The most file descriptors of one message (`max_msg_fds`).
pub(crate) const MOST_FDS: usize = 16;

/// Flags of a header: the type, which is 0 for a command.
const TYPE: u32 = 0xf;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// A command of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Version,
    DmaMap,
    DmaUnmap,
    GetInfo,
    GetRegionInfo,
    GetIrqInfo,
    SetIrqs,
    RegionRead,
    RegionWrite,
    Reset,
    RegionWriteMulti,
    Feature,
    MigrationRead,
    MigrationWrite,
}

impl Command {
    /// Refuses alike commands that this server has no use for (`GET_REGION_IO_FDS`), that only a server sends
    /// (`DMA_READ`, `DMA_WRITE`), and that are in no specification.
    pub(crate) const fn of(number: u16) -> Result<Self, RequestRefusal> {
        Ok(match number {
            1 => Self::Version,
            2 => Self::DmaMap,
            3 => Self::DmaUnmap,
            4 => Self::GetInfo,
            5 => Self::GetRegionInfo,
            7 => Self::GetIrqInfo,
            8 => Self::SetIrqs,
            9 => Self::RegionRead,
            10 => Self::RegionWrite,
            13 => Self::Reset,
            15 => Self::RegionWriteMulti,
            16 => Self::Feature,
            17 => Self::MigrationRead,
            18 => Self::MigrationWrite,
            command => return Err(RequestRefusal::Command { command }),
        })
    }
}

/// Header of each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) id: u16,
    pub(crate) command: u16,
    /// Bytes of the whole message.
    pub(crate) size: u32,
    flags: u32,
}

impl Header {
    pub(crate) fn of(bytes: &[u8; HEADER]) -> Self {
        let mut fields = Fields::new(bytes);
        Self {
            id: fields.u16(),
            command: fields.u16(),
            size: fields.u32(),
            flags: fields.u32(),
        }
    }

    pub(crate) const fn is_command(&self) -> bool {
        self.flags & TYPE == 0
    }

    pub(crate) const fn wants_reply(&self) -> bool {
        self.flags & NO_REPLY == 0
    }

    /// Bytes behind the header, if the size is one that a message can have.
    pub(crate) fn payload(&self) -> Option<usize> {
        let size = self.size as usize;
        (HEADER..=MOST_MESSAGE)
            .contains(&size)
            .then(|| size - HEADER)
    }

    /// The reply to it that carries `payload`.
    pub(crate) fn reply(&self, payload: &[u8]) -> Vec<u8> {
        self.answer(REPLY, 0, payload)
    }

    /// The reply that it is refused: a header and no more ("If an error occurs, the reply message must only
    /// include the reply header").
    pub(crate) fn refused(&self, errno: u32) -> Vec<u8> {
        self.answer(REPLY | ERROR, errno, &[])
    }

    fn answer(&self, flags: u32, error: u32, payload: &[u8]) -> Vec<u8> {
        let size = (HEADER + payload.len()) as u32;
        let mut bytes = Bytes(Vec::with_capacity(size as usize));
        bytes.u16(self.id).u16(self.command).u32(size);
        bytes.u32(flags).u32(error).bytes(payload);
        bytes.0
    }
}

/// Reads fields one after the other. What is not there reads as 0: lengths are checked first, by
/// [`exactly`] and [`at_least`].
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => [0; N],
        }
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }

    /// Bytes not read yet.
    pub(crate) const fn rest(&self) -> &'a [u8] {
        self.0
    }
}

/// Writes fields one after the other.
#[derive(Default)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Bytes {
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }
}

/// The fields of a payload of `bytes` bytes.
pub(crate) const fn exactly(payload: &[u8], bytes: usize) -> Result<Fields<'_>, RequestRefusal> {
    match payload.len() == bytes {
        true => Ok(Fields::new(payload)),
        false => Err(short(payload, bytes)),
    }
}

/// The fields of a payload of `bytes` bytes or more.
pub(crate) const fn at_least(payload: &[u8], bytes: usize) -> Result<Fields<'_>, RequestRefusal> {
    match payload.len() >= bytes {
        true => Ok(Fields::new(payload)),
        false => Err(short(payload, bytes)),
    }
}

const fn short(payload: &[u8], needed: usize) -> RequestRefusal {
    RequestRefusal::Payload {
        given: payload.len(),
        needed,
    }
}

/// Refuses an `argsz` that has no room for `needed` bytes.
pub(crate) const fn room(argsz: u32, needed: u32) -> Result<(), RequestRefusal> {
    match argsz >= needed {
        true => Ok(()),
        false => Err(RequestRefusal::ArgumentSize { argsz, needed }),
    }
}
