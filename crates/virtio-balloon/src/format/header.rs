//! The header of messages in bulk, and the host's requests (page-bitmap series, version 5).
//!
//! The series declared it as bit-fields of one 64-bit word; here it is what that word is as bytes:
//! u8 command, u8 flag, le16 id, le32 length of the data behind it.

use super::word;
use crate::refusal::{Refusal, Refusals};

/// The most data behind a header: 32 KiB.
pub const MOST_DATA_BYTES: usize = 32 << 10;

/// The longest message: a header and its data.
pub const MOST_MESSAGE_BYTES: usize = ResponseHeader::BYTES + MOST_DATA_BYTES;

/// The header of a message from the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseHeader {
    /// What is answered; 0 for pages that are inflated or deflated, and for [`HostRequest::UNUSED_PAGES`].
    pub command: u8,
    /// [`CONTINUED`](Self::CONTINUED) or [`DONE`](Self::DONE); 0 when it is no answer.
    pub flag: u8,
    /// The request's id; 0 when it is no answer.
    pub id: u16,
    /// Bytes behind the header.
    pub data_len: u32,
}

impl ResponseHeader {
    /// Bytes of a header.
    pub const BYTES: usize = 8;
    /// More messages of this answer follow.
    pub const CONTINUED: u8 = 0;
    /// The last message of this answer.
    pub const DONE: u8 = 1;

    /// The header of `data` bytes that are inflated or deflated.
    pub(crate) const fn of_pages(data: usize) -> Self {
        // Never more than `MOST_DATA_BYTES`.
        Self {
            command: 0,
            flag: 0,
            id: 0,
            data_len: data as u32,
        }
    }

    /// As it stands in the message.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let [id, id_high] = self.id.to_le_bytes();
        let [a, b, c, d] = self.data_len.to_le_bytes();
        [self.command, self.flag, id, id_high, a, b, c, d]
    }

    /// Reads a header.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let [command, flag, id, id_high, a, b, c, d] = bytes;
        Self {
            command,
            flag,
            id: u16::from_le_bytes([id, id_high]),
            data_len: u32::from_le_bytes([a, b, c, d]),
        }
    }

    /// The data of a message that inflates or deflates. Refuses one whose header is not for that, or
    /// states another length than there is.
    pub(crate) fn data<'a>(message: &'a [u8], refusals: &mut Refusals) -> Option<&'a [u8]> {
        let bytes = message.len();
        let Some((head, data)) = message.split_first_chunk::<{ Self::BYTES }>() else {
            refusals.add(Refusal::Length {
                bytes,
                unit: Self::BYTES,
            });
            return None;
        };
        if bytes > MOST_MESSAGE_BYTES {
            refusals.add(Refusal::TooLong {
                bytes,
                most: MOST_MESSAGE_BYTES,
            });
            return None;
        }
        let [command, flag, id, id_high, ..] = *head;
        let found = u32::from_le_bytes([command, flag, id, id_high]);
        if found != 0 {
            refusals.add(Refusal::Header { found });
            return None;
        }
        let stated = u64::from(Self::from_bytes(*head).data_len);
        let found = data.len() as u64;
        if stated != found {
            refusals.add(Refusal::Stated { stated, found });
            return None;
        }
        Some(data)
    }
}

/// What the device asks for on a queue of its own (version 5 of the series).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRequest {
    /// What: [`UNUSED_PAGES`](Self::UNUSED_PAGES) is all there is.
    pub command: u16,
    /// A parameter of the command.
    pub param: u64,
}

impl HostRequest {
    /// Asks for the pages that the guest does not use.
    pub const UNUSED_PAGES: u16 = 0;
    /// Bytes of a request: le16 command, 6 reserved bytes, le64 parameter.
    pub const BYTES: usize = 16;

    /// As it stands in the device's buffer.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [u64::from(self.command), self.param];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a request; reserved bytes are ignored.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            command: word(bytes, 0) as u16,
            param: word(bytes, 8),
        }
    }
}
