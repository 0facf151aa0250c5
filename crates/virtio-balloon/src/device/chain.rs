//! Descriptor chains, read once: later changes by the driver are not seen. And the layout of
//! messages in them.

use std::vec::Vec;

use runs::{GuestAddr, Span};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use crate::format::{BitmapRecords, LePfns, MOST_MESSAGE_BYTES, MessageFormat, hand_on};
use crate::refusal::{Refusal, Refusals};
use crate::source::{WIRE_PAGE, WIRE_SHIFT};
use crate::stats::ByteOrder;

/// A buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) len: u32,
    /// The device may write to it.
    pub(super) writable: bool,
}

impl Piece {
    pub(super) const fn wrong_direction(self) -> Refusal {
        Refusal::Direction {
            address: self.address,
            len: self.len,
        }
    }
}

/// Puts the buffers of `chain` into `pieces`. False, and refused, when its end cannot be reached, or it
/// is longer than a queue of this size allows (VIRTIO 1.3, 2.7.5.3.1).
pub(super) fn follow<M: GuestMemory>(
    chain: DescriptorChain<&M>,
    size: u16,
    pieces: &mut Vec<Piece>,
    refusals: &mut Refusals,
) -> bool {
    let head = chain.head_index();
    pieces.clear();
    // The iterator ends without a word where the chain cannot be followed: then something should have
    // come.
    let mut goes_on = true;
    for descriptor in chain {
        if pieces.len() == usize::from(size) {
            goes_on = true;
            break;
        }
        pieces.push(Piece {
            address: descriptor.addr().0,
            len: descriptor.len(),
            writable: descriptor.is_write_only(),
        });
        goes_on = descriptor.has_next();
    }
    if goes_on {
        refusals.add(Refusal::Chain { head });
    }
    !goes_on
}

/// Reads a message of at most `most` bytes into `message`. False, and refused, when it is longer, has
/// a buffer that is not to be read, or one that is not memory.
pub(super) fn read(
    pieces: &[Piece],
    memory: &impl GuestMemory,
    most: usize,
    message: &mut Vec<u8>,
    refusals: &mut Refusals,
) -> bool {
    message.clear();
    // 2^32 at most: the chain was followed.
    let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
    if let Some(wrong) = pieces.iter().find(|piece| piece.writable) {
        refusals.add(wrong.wrong_direction());
        return false;
    }
    if bytes > most as u64 {
        let bytes = bytes as usize;
        refusals.add(Refusal::TooLong { bytes, most });
        return false;
    }
    for &Piece { address, len, .. } in pieces {
        let used = message.len();
        message.resize(used + len as usize, 0);
        let place = message.get_mut(used..).unwrap_or(&mut []);
        if memory.read_slice(place, GuestAddress(address)).is_err() {
            refusals.add(Refusal::Buffer { address, len });
            return false;
        }
    }
    true
}

/// Encoding of messages.
#[derive(Clone, Copy)]
pub(super) enum Wire {
    /// Page numbers, as the standard has them; those of a legacy guest are in its own byte order (VIRTIO 1.3,
    /// 2.7.3).
    Pfns(ByteOrder),
    /// In bulk, and the longest of them.
    Bulk(usize),
}

impl Wire {
    /// Hands the runs of a message to `sink`; what was read of it is in `message`. False, and refused, when the message
    /// is none that can be read.
    pub(super) fn decode(
        self,
        (pieces, message): (&[Piece], &mut Vec<u8>),
        memory: &impl GuestMemory,
        refusals: &mut Refusals,
        sink: impl FnMut(Span<GuestAddr>),
    ) -> bool {
        let most = match self {
            Self::Pfns(_) => MOST_MESSAGE_BYTES,
            Self::Bulk(most) => most,
        };
        if !read(pieces, memory, most, message, refusals) {
            return false;
        }
        match self {
            Self::Bulk(_) => BitmapRecords.decode(message, refusals, sink),
            Self::Pfns(order) => {
                if order == ByteOrder::Big {
                    message.chunks_exact_mut(4).for_each(<[u8]>::reverse);
                }
                LePfns.decode(message, refusals, sink);
            }
        }
        true
    }
}

/// Hands on buffers that are the pages.
pub(super) fn gather(
    pieces: &[Piece],
    refusals: &mut Refusals,
    mut sink: impl FnMut(Span<GuestAddr>),
) {
    for (nr, piece) in pieces.iter().enumerate() {
        if !piece.writable {
            refusals.add(piece.wrong_direction());
            continue;
        }
        let (address, len) = (piece.address, u64::from(piece.len));
        let wrong = [address, len]
            .into_iter()
            .find(|word| word % WIRE_PAGE != 0);
        match wrong {
            Some(word) => refusals.add(Refusal::Bits { nr, word }),
            None if len == 0 => refusals.add(Refusal::Empty { nr }),
            None => hand_on(address, len >> WIRE_SHIFT, refusals, &mut sink),
        }
    }
}
