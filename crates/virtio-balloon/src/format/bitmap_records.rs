//! Records of bitmap words and blocks (page-bitmap series, version 5).
//!
//! A record begins, behind the [header](super::header), with a le64 head:
//!
//! | bits | |
//! |---|---|
//! | 0–51 | number of the first page, of 4 KiB |
//! | 52–57 | log2 of the bytes that a bit, or the block, stands for |
//! | 58–63 | bytes of the bitmap behind the head; 0: the record is a block |
//!
//! A run is encoded by the whole words of bitmap at its ends, each of which covers all runs that touch
//! its 64 pages, and by blocks of 64 pages times a power of two in the middle, largest first. Blocks are
//! not aligned to their size. Records ascend, so that what they stand for is merged as it streams by;
//! the series sent the word at the end before the middle, and a decoder takes any order.
//!
//! The series gave the first page in units of 4 KiB and the bits in the guest's own pages without
//! saying so. Here it is said: a bit stands for 2^shift bytes, so guests with pages of 64 KiB send one
//! bit for each of them, and words begin at multiples of 64 of the guest's pages.

use runs::{GuestAddr, Span};

use super::header::{HEAD, data, header};
use super::{MOST_SHIFT, MessageFormat, WIRE_SHIFT, Writer, hand_on, word};
use crate::refusal::{Refusal, Refusals};
use crate::source::{EncodeError, GuestPage, MessageSource, Stretches, Words};

/// Bitmap words at the ends of runs and blocks in the middle. A bit that is encoded stands for a page of the
/// source's size; decoding takes the size from each record.
#[derive(Clone, Copy, Debug, Default)]
pub struct BitmapRecords;

/// Bits of a page's number.
const PFN_BITS: u32 = 52;
/// Pages of a word.
const WORD: u64 = u64::BITS as u64;

impl BitmapRecords {
    const fn head(address: u64, shift: u32, bitmap: u64) -> u64 {
        address >> WIRE_SHIFT | (shift as u64) << PFN_BITS | bitmap << 58
    }

    /// The bits of all runs that touch the 64 pages from `base` on, which are taken from the source.
    fn gather<I: Iterator<Item = Span<GuestAddr>>>(
        base: u64,
        source: &mut MessageSource<I>,
    ) -> Result<u64, EncodeError> {
        let shift = source.page().shift();
        let mut bits = 0;
        while let Some(run) = source.front()? {
            let from = (run.start >> shift) - base;
            if from >= WORD {
                break;
            }
            let pages = (run.len >> shift).min(WORD - from);
            // Never empty: from 1 to 64 bits.
            bits |= (u64::MAX >> (WORD - pages)) << from;
            source.advance(pages << shift);
        }
        Ok(bits)
    }

    /// As [`encode`](MessageFormat::encode), the same messages, from pages that the driver holds as bitmaps: their
    /// words are copied, and not cut into runs first.
    ///
    /// # Errors
    ///
    /// As [`encode`](MessageFormat::encode).
    pub fn encode_bitmap(
        &self,
        source: &mut MessageSource<Stretches<'_>>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        let mut out = Writer::behind(message, HEAD)?;
        let mut needed = 0;
        while let Some(words) = source.words() {
            let bit;
            (bit, needed) = Self::copy(words, source.page(), &mut out);
            source.seek(bit);
            if needed > 0 || !source.next_bitmap() {
                let head = header(out.data(HEAD));
                return out.finish(&head, needed);
            }
        }
        // Bits that are no words of ours: in a message of their own.
        if out.data(HEAD) == 0 {
            return self.encode(source, message);
        }
        let head = header(out.data(HEAD));
        out.finish(&head, needed)
    }

    /// Copies a bitmap, as far as there is room. Returns the first bit that was not, and how many bytes its
    /// record takes; 0 where all were.
    fn copy(bitmap: Words<'_>, page: GuestPage, out: &mut Writer<'_>) -> (u64, usize) {
        let Words {
            words,
            base,
            mut bit,
        } = bitmap;
        let shift = page.shift();
        while let Some((word, behind)) = words
            .get((bit / WORD) as usize..)
            .and_then(<[u64]>::split_first)
        {
            let bits = word & (u64::MAX << (bit % WORD));
            let address = base + ((bit - bit % WORD) << shift);
            if bits == u64::MAX {
                let full = behind.iter().take_while(|word| **word == u64::MAX).count();
                let mut pages = (1 + full as u64) * WORD;
                while pages > 0 {
                    let block = (pages.ilog2() + shift).min(MOST_SHIFT);
                    if !out.put_word(Self::head(base + (bit << shift), block, 0)) {
                        return (bit, 8);
                    }
                    bit += 1 << (block - shift);
                    pages -= 1 << (block - shift);
                }
                continue;
            }
            if bits != 0 && !out.put_words([Self::head(address, shift, 8), bits]) {
                return (bit, 16);
            }
            bit += WORD - bit % WORD;
        }
        (bit, 0)
    }
}

impl MessageFormat for BitmapRecords {
    fn encode<I: Iterator<Item = Span<GuestAddr>>>(
        &self,
        source: &mut MessageSource<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        let shift = source.page().shift();
        let mut out = Writer::behind(message, HEAD)?;
        let mut needed = 0;
        while let Some(run) = source.front()? {
            let (first, pages) = (run.start >> shift, run.len >> shift);
            if first % WORD == 0 && pages >= WORD {
                let block = (pages.ilog2() + shift).min(MOST_SHIFT);
                if !out.put_word(Self::head(run.start, block, 0)) {
                    needed = 8;
                    break;
                }
                source.advance(1 << block);
            } else {
                if out.left() < 16 {
                    needed = 16;
                    break;
                }
                let base = first - first % WORD;
                let bits = Self::gather(base, source)?;
                out.put_word(Self::head(base << shift, shift, 8));
                out.put_word(bits);
            }
        }
        let head = header(out.data(HEAD));
        out.finish(&head, needed)
    }

    /// Takes records in any order, bitmaps of 8 to 56 bytes, and blocks of any length from 4 KiB to 2^51
    /// bytes at any page. A run of bits comes in one piece for each le64.
    fn decode(
        &self,
        message: &[u8],
        refusals: &mut Refusals,
        mut sink: impl FnMut(Span<GuestAddr>),
    ) {
        let Some(data) = data(message, refusals) else {
            return;
        };
        let mut at = 0;
        while at < data.len() {
            let left = data.len() - at;
            // Where it stands in the message, for refusals.
            let place = HEAD + at;
            if left < 8 {
                return refusals.add(Refusal::Record {
                    at: place,
                    bytes: 8,
                    left,
                });
            }
            let head = word(data, at);
            let start = head << WIRE_SHIFT;
            let shift = (head >> PFN_BITS) as u32 & 0x3f;
            let bytes = (head >> 58) as usize;
            if bytes % 8 != 0 {
                return refusals.add(Refusal::Bitmap { at: place, bytes });
            }
            if left - 8 < bytes {
                return refusals.add(Refusal::Record {
                    at: place,
                    bytes: 8 + bytes,
                    left,
                });
            }
            let bitmap = data.get(at + 8..at + 8 + bytes).unwrap_or(&[]);
            at += 8 + bytes;
            if !(WIRE_SHIFT..=MOST_SHIFT).contains(&shift) {
                refusals.add(Refusal::Shift { at: place, shift });
                continue;
            }
            // Pages of 4 KiB for each bit, or of the block.
            let pages = 1 << (shift - WIRE_SHIFT);
            if bytes == 0 {
                hand_on(start, pages, refusals, &mut sink);
                continue;
            }
            let words = bitmap.chunks_exact(8).map(|bits| word(bits, 0));
            // 448 bits of 2^51 bytes at most: below 2^60.
            let all = (8 * bytes as u64) << shift;
            if start.checked_add(all).is_some() {
                let mut base = start;
                for bits in words {
                    runs_of(bits, base, shift, &mut sink);
                    base += WORD << shift;
                }
                continue;
            }
            for (nr, bits) in (0u64..).zip(words) {
                // From the word's own first page on, so that nothing wraps around here.
                let base = (WORD * nr) << shift;
                runs_of(bits, base, shift, |run| {
                    let pages = run.len >> WIRE_SHIFT;
                    match start.checked_add(run.start) {
                        Some(start) => hand_on(start, pages, refusals, &mut sink),
                        None => refusals.add(Refusal::Wraps { start, pages }),
                    }
                });
            }
        }
    }
}

/// The runs of a word of bitmap whose first bit stands for the 2^shift bytes at `base`, which do not wrap
/// around.
#[inline]
fn runs_of(mut bits: u64, base: u64, shift: u32, mut sink: impl FnMut(Span<GuestAddr>)) {
    while bits != 0 {
        let first = bits.trailing_zeros();
        // The carry goes through this run and ends behind it, at the top of the word in nothing.
        let rest = bits.wrapping_add(1 << first);
        let len = u64::from(rest.trailing_zeros() - first) << shift;
        bits &= rest;
        sink(Span::new(base + (u64::from(first) << shift), len));
    }
}
