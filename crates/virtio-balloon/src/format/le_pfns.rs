//! The standard's format: an array of le32 page numbers (VIRTIO 1.3, 5.5.6).
//!
//! No header; a number stands for 4 KiB, so a guest with larger pages names each of them by several
//! numbers, and a number reaches 16 TiB. The numbers may come in any order.

use runs::{GuestAddr, Span};

use super::{MessageFormat, Writer};
use crate::refusal::{Refusal, Refusals};
use crate::source::{EncodeError, MessageSource, WIRE_SHIFT};

/// Arrays of le32 page numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct LePfns;

/// The last byte that a number reaches.
const LAST: u64 = (1 << (32 + WIRE_SHIFT)) - 1;

impl MessageFormat for LePfns {
    fn encode<I: Iterator<Item = Span<GuestAddr>>>(
        &self,
        source: &mut MessageSource<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        let mut out = Writer::behind(message, 0)?;
        let mut needed = 0;
        while let Some(run) = source.front()? {
            if run.last() > LAST {
                let address = run.start.max(LAST + 1);
                return Err(EncodeError::Beyond {
                    address,
                    last: LAST,
                });
            }
            let first = run.start >> WIRE_SHIFT;
            let pages = (run.len >> WIRE_SHIFT).min(out.left() as u64 / 4);
            if pages == 0 {
                needed = 4;
                break;
            }
            let places = out.room(4 * pages as usize).chunks_exact_mut(4);
            for (place, page) in places.zip(first..) {
                place.copy_from_slice(&(page as u32).to_le_bytes());
            }
            source.advance(pages << WIRE_SHIFT);
        }
        out.finish(&[], needed)
    }

    /// Numbers that follow one another are one run. A number that is cut short at the end is left out.
    fn decode(
        &self,
        message: &[u8],
        refusals: &mut Refusals,
        mut sink: impl FnMut(Span<GuestAddr>),
    ) {
        let numbers = message.chunks_exact(4);
        let rest = numbers.remainder();
        let mut numbers = numbers
            .map(|number| u32::from_le_bytes(number.try_into().unwrap_or_default()))
            .map(u64::from);
        let mut next = numbers.next();
        while let Some(first) = next {
            let mut behind = first + 1;
            next = numbers.next();
            while next == Some(behind) {
                behind += 1;
                next = numbers.next();
            }
            sink(Span::new(
                first << WIRE_SHIFT,
                (behind - first) << WIRE_SHIFT,
            ));
        }
        if !rest.is_empty() {
            refusals.add(Refusal::Length {
                bytes: message.len(),
                unit: 4,
            });
        }
    }
}
