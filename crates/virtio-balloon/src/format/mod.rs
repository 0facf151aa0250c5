//! The seam of both formats: runs into messages, messages into runs.
//!
//! A message is what one buffer (descriptor chain) on inflateq or deflateq holds, in the driver's byte order
//! of things: device-readable bytes, all numbers little-endian. Encoding takes from a [`MessageSource`] until
//! the buffer is full and is called again for the next message. Decoding goes through a message once, front
//! to back, in work bounded by the message's length, and hands on runs as they come; those that follow one
//! another are merged within the message only as far as the format says (see
//! [`RunCollector`](crate::RunCollector) for the rest). Invalid parts are counted in [`Refusals`] and left
//! out. Runs are not compared with the guest's memory here: that is [`MemoryMap`](crate::MemoryMap)'s.
//!
//! The formats:
//!
//! * [`LePfns`]: VIRTIO 1.3, 5.5.6, which every driver and monitor speaks.
//! * [`BitmapRecords`]: version 5 of the series of 2016, "Extend virtio-balloon for fast (de)inflating", which
//!   was not merged: many pages at once.

use runs::{GuestAddr, Span};

use crate::refusal::{Refusal, Refusals};
use crate::source::{EncodeError, MessageSource, WIRE_PAGE, WIRE_SHIFT};

mod bitmap_records;
mod header;
mod le_pfns;

pub use bitmap_records::BitmapRecords;
pub(crate) use header::LEAST_MESSAGE_BYTES;
pub use header::{MOST_DATA_BYTES, MOST_MESSAGE_BYTES};
pub use le_pfns::LePfns;

/// A wire format of inflateq and deflateq.
pub trait MessageFormat {
    /// Fills one message with what comes next and returns its bytes; 0 when nothing is left. Not more
    /// than [`MOST_MESSAGE_BYTES`] of the buffer are used.
    ///
    /// # Errors
    ///
    /// A run that cannot be encoded, or a buffer that is too short for the next record: then the
    /// message is not to be sent.
    fn encode<I: Iterator<Item = Span<GuestAddr>>>(
        &self,
        source: &mut MessageSource<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError>;

    /// Hands the runs of a message to `sink`, and counts what it does not take.
    fn decode(&self, message: &[u8], refusals: &mut Refusals, sink: impl FnMut(Span<GuestAddr>));
}

/// Blocks and runs are at most this long, so that their sums stay far from wrapping: 2^51 bytes.
pub(crate) const MOST_SHIFT: u32 = 51;

/// A little-endian word; 0 when it is not all there.
#[inline]
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    let piece = at.checked_add(8).and_then(|end| bytes.get(at..end));
    piece
        .and_then(|piece| piece.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

/// A message being written: bytes behind one another, as long as there is room.
pub(crate) struct Writer<'a> {
    bytes: &'a mut [u8],
    used: usize,
}

impl<'a> Writer<'a> {
    /// Begins behind `head` bytes, which are filled in at the end.
    pub(crate) fn behind(bytes: &'a mut [u8], head: usize) -> Result<Self, EncodeError> {
        let most = bytes.len().min(MOST_MESSAGE_BYTES);
        let (bytes, _) = bytes.split_at_mut(most);
        if bytes.len() < head {
            let bytes = bytes.len();
            return Err(EncodeError::Buffer {
                bytes,
                needed: head,
            });
        }
        Ok(Self { bytes, used: head })
    }

    #[inline]
    pub(crate) const fn left(&self) -> usize {
        self.bytes.len() - self.used
    }

    /// Appends, if there is room for all of it.
    #[inline]
    fn put(&mut self, bytes: &[u8]) -> bool {
        let Some(place) = self.bytes.get_mut(self.used..self.used + bytes.len()) else {
            return false;
        };
        place.copy_from_slice(bytes);
        self.used += bytes.len();
        true
    }

    /// So many bytes to be written, or as many as are left.
    #[inline]
    pub(crate) fn room(&mut self, bytes: usize) -> &mut [u8] {
        let bytes = bytes.min(self.left());
        self.used += bytes;
        self.bytes
            .get_mut(self.used - bytes..self.used)
            .unwrap_or(&mut [])
    }

    /// Appends two little-endian words, if there is room for both.
    #[inline]
    pub(crate) fn put_words(&mut self, words: [u64; 2]) -> bool {
        let [low, high] = words.map(u128::from);
        self.put(&(low | high << 64).to_le_bytes())
    }

    /// Appends a little-endian word, if there is room.
    #[inline]
    pub(crate) fn put_word(&mut self, word: u64) -> bool {
        self.put(&word.to_le_bytes())
    }

    /// Writes the head. Returns the bytes of the message, 0 when nothing lies behind the head.
    ///
    /// `needed` are the bytes of the record that was not written for lack of room, 0 if all were.
    pub(crate) fn finish(self, head: &[u8], needed: usize) -> Result<usize, EncodeError> {
        if self.used == head.len() {
            if needed > 0 {
                let needed = head.len() + needed;
                return Err(EncodeError::Buffer {
                    bytes: self.bytes.len(),
                    needed,
                });
            }
            return Ok(0);
        }
        if let Some(place) = self.bytes.get_mut(..head.len()) {
            place.copy_from_slice(head);
        }
        Ok(self.used)
    }

    /// Bytes behind a head of `head` bytes.
    pub(crate) const fn data(&self, head: usize) -> usize {
        self.used.saturating_sub(head)
    }
}

/// Hands on `pages` pages of 4 KiB from `start`, unless they end beyond 2^64.
#[inline]
pub(crate) fn hand_on(
    start: u64,
    pages: u64,
    refusals: &mut Refusals,
    sink: &mut impl FnMut(Span<GuestAddr>),
) {
    // All 2^64 bytes have no length, and are not memory of a guest.
    let run = pages
        .checked_mul(WIRE_PAGE)
        .and_then(|len| Span::checked(start, len));
    match run {
        Some(run) => sink(run),
        None => refusals.add(Refusal::Wraps { start, pages }),
    }
}
