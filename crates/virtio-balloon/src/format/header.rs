//! The header of messages in bulk (page-bitmap series, version 5).
//!
//! The series declared it as bit-fields of one 64-bit word; here are the bytes of that word:
//! u8 command, u8 flag, le16 id, le32 length of the data behind it. All but the length are 0.

use crate::refusal::{Refusal, Refusals};

/// Bytes of a header.
pub(super) const HEAD: usize = 8;

/// The most data behind a header: 32 KiB.
pub const MOST_DATA_BYTES: usize = 32 << 10;

/// The shortest message that has room for any record: a header, the record's head and a word.
pub(crate) const LEAST_MESSAGE_BYTES: usize = HEAD + 16;

/// The longest message: a header and its data.
pub const MOST_MESSAGE_BYTES: usize = HEAD + MOST_DATA_BYTES;

/// The header in front of `data` bytes, which are never more than [`MOST_DATA_BYTES`].
pub(super) const fn header(data: usize) -> [u8; HEAD] {
    let [a, b, c, d] = (data as u32).to_le_bytes();
    [0, 0, 0, 0, a, b, c, d]
}

/// The data of a message. Refuses one whose header is another, or states another length than there is.
pub(super) fn data<'a>(message: &'a [u8], refusals: &mut Refusals) -> Option<&'a [u8]> {
    let bytes = message.len();
    let Some((head, data)) = message.split_first_chunk::<HEAD>() else {
        refusals.add(Refusal::Length { bytes, unit: HEAD });
        return None;
    };
    if bytes > MOST_MESSAGE_BYTES {
        refusals.add(Refusal::TooLong {
            bytes,
            most: MOST_MESSAGE_BYTES,
        });
        return None;
    }
    let [command, flag, id, id_high, a, b, c, d] = *head;
    let found = u32::from_le_bytes([command, flag, id, id_high]);
    if found != 0 {
        refusals.add(Refusal::Header { found });
        return None;
    }
    let stated = u64::from(u32::from_le_bytes([a, b, c, d]));
    let found = data.len() as u64;
    if stated != found {
        refusals.add(Refusal::Stated { stated, found });
        return None;
    }
    Some(data)
}
