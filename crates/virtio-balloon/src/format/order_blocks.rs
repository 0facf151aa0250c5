//! Blocks of a power of two, aligned to their size: what reviewers asked for instead of bitmaps.
//!
//! Behind the [header](super::ResponseHeader), a block is a le64: its address, with log2 of its bytes in
//! bits 0–5. Bits 6–11 are zero, as are the bits of the address below the block's size.

use runs::Span;

use super::{Format, MOST_SHIFT, PageSizes, ResponseHeader, WIRE_SHIFT, Writer, word};
use crate::refusal::{Refusal, Refusals};
use crate::source::{EncodeError, Source};

/// Naturally aligned blocks, of all sizes from 4 KiB to 2^51 bytes.
#[derive(Clone, Copy, Debug)]
pub struct OrderBlocks;

const HEAD: usize = ResponseHeader::BYTES;
const ALL: PageSizes = PageSizes::from_log2_range(WIRE_SHIFT, MOST_SHIFT);

impl Format for OrderBlocks {
    fn encode<I: Iterator<Item = Span>>(
        &self,
        source: &mut Source<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        let mut out = Writer::behind(message, HEAD)?;
        let mut needed = 0;
        'message: while let Some(run) = source.front()? {
            let Some((size, count)) = ALL.step(run.start, run.start, run.len) else {
                return Err(EncodeError::Sizes { run });
            };
            let blocks = count.min(out.left() as u64 / 8);
            for nr in 0..blocks {
                let address = run.start + nr * size;
                out.put_word(address | u64::from(size.trailing_zeros()));
            }
            source.advance(blocks * size);
            if blocks < count {
                needed = 8;
                break 'message;
            }
        }
        let header = ResponseHeader::of_pages(out.data(HEAD));
        out.finish(&header.to_bytes(), needed)
    }

    fn decode(&self, message: &[u8], refusals: &mut Refusals, mut sink: impl FnMut(Span)) {
        let Some(data) = ResponseHeader::data(message, refusals) else {
            return;
        };
        let (blocks, rest) = data.as_chunks::<8>();
        if !rest.is_empty() {
            refusals.add(Refusal::Length {
                bytes: data.len(),
                unit: 8,
            });
        }
        for (nr, block) in blocks.iter().enumerate() {
            let at = HEAD + nr * 8;
            let word = word(block, 0);
            let shift = word as u32 & 0x3f;
            if !(WIRE_SHIFT..=MOST_SHIFT).contains(&shift) {
                refusals.add(Refusal::Shift { at, shift });
                continue;
            }
            let size = 1 << shift;
            let start = word & !0x3f;
            if !start.is_multiple_of(size) {
                refusals.add(Refusal::Bits { at, word });
                continue;
            }
            // Aligned to its size, a block ends at 2^64 at the latest.
            sink(Span::new(start, size));
        }
    }
}
