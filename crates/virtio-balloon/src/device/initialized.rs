//! Bitmaps behind the page numbers of inflateq, in which the device says which pages it has initialized
//! (`VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE`, proposed in oasis-tcs/virtio-spec issue 242).
//!
//! A chain is an array of page numbers that the device reads, and at least a bit for each of them that it writes: bit
//! *n* % 8 of byte *n* / 8 for number *n*, 1 if the page holds zeros. All messages of a drain are discarded together,
//! so their numbers wait here until it is known what came of it.

use std::ops::Range;
use std::vec::Vec;

use runs::{GuestAddr, Span, merge_sorted};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use super::chain::Piece;
use crate::refusal::{Refusal, Refusals};
use crate::source::{WIRE_PAGE, WIRE_SHIFT};

/// The number of buffers of this chain that are read; those behind them have room for a bit for each page number. `None`,
/// and refused, when they have not, or are no memory.
pub(super) fn bitmap_behind(
    pieces: &[Piece],
    memory: &impl GuestMemory,
    refusals: &mut Refusals,
) -> Option<usize> {
    let read = pieces.iter().take_while(|piece| !piece.writable).count();
    let (numbers, behind) = pieces.split_at(read);
    if let Some(wrong) = behind.iter().find(|piece| !piece.writable) {
        refusals.add(wrong.wrong_direction());
        return None;
    }
    let pages = bytes(numbers) / 4;
    let (needed, bytes) = (pages.div_ceil(8), bytes(behind));
    if bytes < needed {
        refusals.add(match behind {
            [] => Refusal::NoBitmap { pages },
            _ => Refusal::ShortBitmap {
                pages,
                bytes,
                needed,
            },
        });
        return None;
    }
    let outside = first(behind, needed).find(|piece| {
        let (address, len) = (GuestAddress(piece.address), piece.len as usize);
        !memory.check_range(address, len, Permissions::Write)
    });
    if let Some(Piece { address, len, .. }) = outside {
        refusals.add(Refusal::Buffer { address, len });
        return None;
    }
    Some(read)
}

fn bytes(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

/// The first so many bytes of these buffers.
fn first(pieces: &[Piece], bytes: u64) -> impl Iterator<Item = Piece> {
    let mut left = bytes;
    pieces.iter().filter_map(move |piece| {
        // No more than the buffer has.
        let len = u64::from(piece.len).min(left) as u32;
        left -= u64::from(len);
        (len > 0).then_some(Piece { len, ..*piece })
    })
}

/// A message that gets a bitmap.
#[derive(Debug)]
struct Asked {
    /// The place of its chain in the drain.
    chain: usize,
    numbers: Range<usize>,
    pieces: Range<usize>,
}

/// Bitmaps of a drain.
#[derive(Debug, Default)]
pub(super) struct Bitmaps {
    asked: Vec<Asked>,
    /// Page numbers of all messages, le32.
    numbers: Vec<u8>,
    /// Buffers of all bitmaps.
    pieces: Vec<Piece>,
    /// Memory that is certain to hold zeros, sorted and merged.
    zeros: Vec<Span<GuestAddr>>,
    /// Memory of the bitmaps, sorted and merged.
    written: Vec<Span<GuestAddr>>,
    bits: Vec<u8>,
}

impl Bitmaps {
    pub(super) fn clear(&mut self) {
        self.asked.clear();
        self.numbers.clear();
        self.pieces.clear();
    }

    /// The chain of this place, of these page numbers, gets its bitmap in `behind`, which
    /// [has room for it](bitmap_behind).
    pub(super) fn ask(&mut self, chain: usize, message: &[u8], behind: &[Piece]) {
        let (number, piece) = (self.numbers.len(), self.pieces.len());
        let numbers = message.chunks_exact(4);
        let needed = numbers.len().div_ceil(8) as u64;
        self.numbers.extend(numbers.flatten());
        self.pieces.extend(first(behind, needed));
        self.asked.push(Asked {
            chain,
            numbers: number..self.numbers.len(),
            pieces: piece..self.pieces.len(),
        });
    }

    /// All is discarded; `zeros` are pages that hold zeros now.
    pub(super) fn sort(&mut self, zeros: Vec<Span<GuestAddr>>) {
        self.zeros = zeros;
        sort(&mut self.zeros);
        let pieces = self.pieces.iter();
        let pieces = pieces.map(|piece| Span::new(piece.address, piece.len.into()));
        self.written.clear();
        self.written.extend(pieces);
        sort(&mut self.written);
    }

    /// Writes the bitmap of the chain of this place, if it gets one. Returns its bytes; 0, and refused, when the memory
    /// is gone.
    pub(super) fn write(
        &mut self,
        chain: usize,
        memory: &impl GuestMemory,
        refusals: &mut Refusals,
    ) -> u32 {
        let asked = self.asked.binary_search_by_key(&chain, |asked| asked.chain);
        let Some(asked) = asked.ok().and_then(|at| self.asked.get(at)) else {
            return 0;
        };
        let numbers = self.numbers.get(asked.numbers.clone()).unwrap_or(&[]);
        let (zeros, written) = (&self.zeros, &self.written);
        // Pages that were discarded, and in which no bitmap lies.
        let holds_zeros = |number: &[u8]| {
            let number = number.try_into().map_or(0, u32::from_le_bytes);
            let page = Span::new(u64::from(number) << WIRE_SHIFT, WIRE_PAGE);
            let all_of_it = |run: &Span<GuestAddr>| run.covers(&page);
            let none_of_it = |run: &Span<GuestAddr>| !run.overlaps(&page);
            last_at(zeros, &page).is_some_and(all_of_it)
                && last_at(written, &page).is_none_or(none_of_it)
        };
        self.bits.clear();
        self.bits.extend(numbers.chunks(32).map(|numbers| {
            let numbers = numbers.chunks_exact(4).enumerate();
            numbers.fold(0, |bits, (nr, number)| {
                bits | u8::from(holds_zeros(number)) << nr
            })
        }));
        let pieces = self.pieces.get(asked.pieces.clone()).unwrap_or(&[]);
        let mut rest = &self.bits[..];
        for &Piece { address, len, .. } in pieces {
            let (bits, more) = rest.split_at(rest.len().min(len as usize));
            rest = more;
            if memory.write_slice(bits, GuestAddress(address)).is_err() {
                refusals.add(Refusal::Buffer { address, len });
                return 0;
            }
        }
        self.bits.len() as u32
    }
}

fn sort(runs: &mut Vec<Span<GuestAddr>>) {
    runs.sort_unstable_by_key(|run| run.start);
    let merged = merge_sorted(runs);
    runs.truncate(merged);
}

/// The last of these runs, which ascend and are apart, that begins in the page or before it.
fn last_at<'a>(runs: &'a [Span<GuestAddr>], page: &Span<GuestAddr>) -> Option<&'a Span<GuestAddr>> {
    let behind = runs.partition_point(|run| run.start <= page.last());
    runs.get(behind.checked_sub(1)?)
}
