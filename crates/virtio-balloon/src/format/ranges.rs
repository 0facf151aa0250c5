//! Ranges of pages (version 6 of the series).
//!
//! Behind the [header](super::header), a range is a le64: bits 12–63 the number of its first
//! page, bits 0–11 how many pages. A range of 4096 pages and more has 0 there, and its pages in a le64 of
//! their own behind it. (The series compared with "more than 4096", so that 4096 ran over into the
//! first page's number.)

use runs::{GuestAddr, Span};

use super::header::{HEAD, data, header};
use super::{Format, WIRE_SHIFT, Writer, hand_on, word};
use crate::refusal::{Refusal, Refusals};
use crate::source::{EncodeError, Source};

/// Ranges: first page and number of pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ranges;

/// From so many pages on, the length has a word of its own.
const LONG: u64 = 1 << 12;

impl Format for Ranges {
    fn encode<I: Iterator<Item = Span<GuestAddr>>>(
        &self,
        source: &mut Source<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        let mut out = Writer::behind(message, HEAD)?;
        let mut needed = 0;
        while let Some(run) = source.front()? {
            let pages = run.len >> WIRE_SHIFT;
            if pages < LONG {
                if !out.put_word(run.start | pages) {
                    needed = 8;
                    break;
                }
            } else {
                if out.left() < 16 {
                    needed = 16;
                    break;
                }
                out.put_word(run.start);
                out.put_word(pages);
            }
            source.advance(run.len);
        }
        let head = header(out.data(HEAD));
        out.finish(&head, needed)
    }

    /// Takes lengths below 4096 in either place.
    fn decode(
        &self,
        message: &[u8],
        refusals: &mut Refusals,
        mut sink: impl FnMut(Span<GuestAddr>),
    ) {
        let Some(data) = data(message, refusals) else {
            return;
        };
        if data.len() % 8 != 0 {
            refusals.add(Refusal::Length {
                bytes: data.len(),
                unit: 8,
            });
        }
        let end = data.len() - data.len() % 8;
        let mut at = 0;
        while at < end {
            let place = HEAD + at;
            let head = word(data, at);
            at += 8;
            let mut pages = head % LONG;
            if pages == 0 {
                if at == end {
                    return refusals.add(Refusal::Record {
                        at: place,
                        bytes: 16,
                        left: 8,
                    });
                }
                pages = word(data, at);
                at += 8;
            }
            if pages == 0 {
                refusals.add(Refusal::Empty { at: place });
                continue;
            }
            hand_on(head - head % LONG, pages, refusals, &mut sink);
        }
    }
}
