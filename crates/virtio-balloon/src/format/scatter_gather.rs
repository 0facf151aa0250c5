//! The pages themselves are the buffers (`VIRTIO_BALLOON_F_SG`, versions 11 and 12 of the series).
//!
//! There is no payload: each descriptor of the chain is a run, by address and length. What is encoded
//! here is the chain as a split ring's indirect table has it (VIRTIO 1.3, 2.7.5.3): 16 bytes each, le64
//! address, le32 length, le16 flags, le16 next. A device whose queue gives it descriptors calls
//! [`ScatterGather::take`] for each.
//!
//! Buffers are device-writable, as on reporting_vq (5.5.6.7), since discarding changes what they hold.
//! A chain is at most 4 GiB (2.7.5.2), and at most as long as the queue (2.7.5.3.1). One of 2^32 bytes is not
//! encoded: devices that count them in 32 bits, such as those on `virtio-queue`, refuse it.

use runs::{GuestAddr, Span};

use super::{Format, MOST_DATA_BYTES, WIRE_SHIFT, Writer, hand_on, word};
use crate::refusal::{Refusal, Refusals};
use crate::source::{EncodeError, Source, WIRE_PAGE};

/// Chains whose buffers are the pages.
#[derive(Clone, Copy, Debug)]
pub struct ScatterGather {
    most: usize,
}

const DESCRIPTOR: usize = 16;
/// `VIRTQ_DESC_F_NEXT`.
const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
const WRITE: u16 = 2;
/// The most bytes of a chain, and of a descriptor, whose length has 32 bits: whole pages of every size of them.
const CHAIN: u64 = (1 << 32) - (1 << 16);

impl Default for ScatterGather {
    /// Chains of at most 256 descriptors.
    fn default() -> Self {
        Self::new(256)
    }
}

impl ScatterGather {
    /// Chains of at most this many descriptors, the size of the queue. Without any, each encoding
    /// fails for want of room.
    pub const fn new(queue_size: u16) -> Self {
        Self {
            most: queue_size as usize,
        }
    }

    /// Takes one descriptor's address and length. `nr` is its place in the chain.
    pub fn take(
        nr: usize,
        address: u64,
        len: u32,
        refusals: &mut Refusals,
        mut sink: impl FnMut(Span<GuestAddr>),
    ) {
        let at = nr.saturating_mul(DESCRIPTOR);
        let len = u64::from(len);
        let wrong = [address, len]
            .into_iter()
            .find(|word| word % WIRE_PAGE != 0);
        match wrong {
            Some(word) => refusals.add(Refusal::Bits { at, word }),
            None if len == 0 => refusals.add(Refusal::Empty { at }),
            None => hand_on(address, len >> WIRE_SHIFT, refusals, &mut sink),
        }
    }
}

impl Format for ScatterGather {
    fn encode<I: Iterator<Item = Span<GuestAddr>>>(
        &self,
        source: &mut Source<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        let room = message.len().min(MOST_DATA_BYTES);
        let room = (room - room % DESCRIPTOR).min(self.most * DESCRIPTOR);
        let (message, _) = message.split_at_mut(room);
        let mut out = Writer::behind(message, 0)?;
        let mut left = CHAIN;
        let mut needed = 0;
        while let Some(run) = source.front()? {
            let len = run.len.min(left);
            if len == 0 {
                break;
            }
            let [next, next_high] = ((out.data(0) / DESCRIPTOR + 1) as u16).to_le_bytes();
            let [flags, flags_high] = (NEXT | WRITE).to_le_bytes();
            let [a, b, c, d] = (len as u32).to_le_bytes();
            let tail = [a, b, c, d, flags, flags_high, next, next_high];
            if out.left() < DESCRIPTOR {
                needed = DESCRIPTOR;
                break;
            }
            out.put_word(run.start);
            out.put(&tail);
            left -= len;
            source.advance(len);
        }
        let used = out.finish(&[], needed)?;
        // Nothing follows the last one.
        if let Some(tail) = used.checked_sub(4).and_then(|at| message.get_mut(at..used)) {
            tail.copy_from_slice(&[WRITE as u8, 0, 0, 0]);
        }
        Ok(used)
    }

    /// Takes the descriptors of a table in their order, whatever their flags: following and bounding a
    /// chain is the queue's.
    fn decode(
        &self,
        message: &[u8],
        refusals: &mut Refusals,
        mut sink: impl FnMut(Span<GuestAddr>),
    ) {
        let (bytes, unit) = (message.len(), DESCRIPTOR);
        if bytes > MOST_DATA_BYTES {
            return refusals.add(Refusal::TooLong {
                bytes,
                most: MOST_DATA_BYTES,
            });
        }
        let descriptors = message.chunks_exact(DESCRIPTOR);
        let rest = descriptors.remainder();
        for (nr, descriptor) in descriptors.enumerate() {
            let len = word(descriptor, 8) as u32;
            Self::take(nr, word(descriptor, 0), len, refusals, &mut sink);
        }
        if !rest.is_empty() {
            refusals.add(Refusal::Length { bytes, unit });
        }
    }
}
