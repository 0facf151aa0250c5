//! Chunks of base and size (versions 7 to 10 of the series, in the layout of version 10).
//!
//! A le64 with the number of chunks, then as many pairs: le64 address, le64 length, both in bytes and
//! multiples of 4096.

use runs::{GuestAddr, Span};

use super::{Format, MOST_DATA_BYTES, WIRE_SHIFT, Writer, hand_on, word};
use crate::refusal::{Refusal, Refusals};
use crate::source::{EncodeError, Source, WIRE_PAGE};

/// Pairs of address and length.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chunks;

const HEAD: usize = 8;
const PAIR: usize = 16;

impl Format for Chunks {
    fn encode<I: Iterator<Item = Span<GuestAddr>>>(
        &self,
        source: &mut Source<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        let mut out = Writer::behind(message, HEAD)?;
        let mut needed = 0;
        while let Some(run) = source.front()? {
            if out.left() < PAIR {
                needed = PAIR;
                break;
            }
            out.put_word(run.start);
            out.put_word(run.len);
            source.advance(run.len);
        }
        let number = out.data(HEAD) / PAIR;
        out.finish(&(number as u64).to_le_bytes(), needed)
    }

    fn decode(
        &self,
        message: &[u8],
        refusals: &mut Refusals,
        mut sink: impl FnMut(Span<GuestAddr>),
    ) {
        let bytes = message.len();
        let Some((number, data)) = message.split_first_chunk::<HEAD>() else {
            return refusals.add(Refusal::Length { bytes, unit: HEAD });
        };
        if data.len() > MOST_DATA_BYTES {
            return refusals.add(Refusal::TooLong {
                bytes,
                most: HEAD + MOST_DATA_BYTES,
            });
        }
        let pairs = data.chunks_exact(PAIR);
        let (stated, found) = (u64::from_le_bytes(*number), pairs.len() as u64);
        if stated != found || !pairs.remainder().is_empty() {
            return refusals.add(Refusal::Stated { stated, found });
        }
        for (nr, pair) in pairs.enumerate() {
            let at = HEAD + nr * PAIR;
            let (start, len) = (word(pair, 0), word(pair, 8));
            let wrong = [start, len].into_iter().find(|word| word % WIRE_PAGE != 0);
            match wrong {
                Some(word) => refusals.add(Refusal::Bits { at, word }),
                None if len == 0 => refusals.add(Refusal::Empty { at }),
                None => hand_on(start, len >> WIRE_SHIFT, refusals, &mut sink),
            }
        }
    }
}
