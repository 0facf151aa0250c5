//! Runs of pages of a few sizes, which the configuration space states: what reviewers asked for in place
//! of bitmaps, "both length and order", with two bits for 4K, 2M or 1G.
//!
//! Behind the [header](super::header), a record is a le64:
//!
//! | bits | |
//! |---|---|
//! | 0–1 | which of the sizes |
//! | 2–11 | how many pages of this size, less one |
//! | 12–63 | number of the first page, of 4 KiB, a multiple of the size |

use runs::{GuestAddr, Span};

use super::header::{HEAD, data, header};
use super::{Format, MOST_SHIFT, PageSizes, WIRE_SHIFT, Writer, hand_on, word};
use crate::refusal::{Refusal, Refusals};
use crate::source::{EncodeError, GuestPage, Source};

/// The sizes of pages in messages of [`SizedRuns`], as the configuration space has them: up to four,
/// ascending, each by its log2 from 12 to 51.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShifts([u8; Self::BYTES]);

impl PageShifts {
    /// Bytes in the configuration space.
    pub const BYTES: usize = 4;
    /// 4K, 2M and 1G.
    pub const DEFAULT: Self = Self([12, 21, 30, 0]);

    /// These sizes, those that are not used 0 and behind the others; `None` where they do not ascend, there
    /// is none, or one is not 12 to 51.
    pub fn new(shifts: [u8; Self::BYTES]) -> Option<Self> {
        let [first, ..] = shifts;
        let fits = |shift: u8| (WIRE_SHIFT..=MOST_SHIFT).contains(&shift.into());
        let follows = |pair: &[u8]| match pair {
            [before, next] => *next == 0 || *before != 0 && before < next && fits(*next),
            _ => false,
        };
        (fits(first) && shifts.windows(2).all(follows)).then_some(Self(shifts))
    }

    /// As they stand in the configuration space.
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    /// True when any page of this size can be named.
    pub fn divide(self, page: GuestPage) -> bool {
        let [first, ..] = self.0;
        u32::from(first) <= page.shift()
    }

    /// The log2 of the size with this number.
    fn shift(self, number: u64) -> Option<u32> {
        let shift = usize::try_from(number).ok().and_then(|nr| self.0.get(nr));
        shift
            .filter(|shift| **shift != 0)
            .map(|shift| (*shift).into())
    }

    /// The number of this size.
    fn number(self, size: u64) -> Option<u64> {
        let shift = size.trailing_zeros();
        let mut numbers = (0..).zip(self.0);
        let found = numbers.find(|(_, found)| u32::from(*found) == shift);
        found.map(|(number, _)| number)
    }

    fn sizes(self) -> PageSizes {
        let used = self.0.into_iter().filter(|shift| *shift != 0);
        PageSizes::from_bits(used.fold(0, |bits, shift| bits | 1 << shift))
    }
}

/// Runs of pages of these sizes.
#[derive(Clone, Copy, Debug)]
pub struct SizedRuns {
    shifts: PageShifts,
}

/// The most pages of a record.
const MOST: u64 = 1 << 10;

impl SizedRuns {
    /// Encodes and decodes pages of these sizes.
    pub const fn new(shifts: PageShifts) -> Self {
        Self { shifts }
    }
}

impl Format for SizedRuns {
    fn encode<I: Iterator<Item = Span<GuestAddr>>>(
        &self,
        source: &mut Source<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        let sizes = self.shifts.sizes();
        let mut out = Writer::behind(message, HEAD)?;
        let mut needed = 0;
        while let Some(run) = source.front()? {
            let step = sizes.step(run.start, run.cast());
            let step =
                step.and_then(|(size, count)| Some((size, count, self.shifts.number(size)?)));
            let Some((size, count, number)) = step else {
                return Err(EncodeError::Sizes { run });
            };
            let count = count.min(MOST);
            if !out.put_word(run.start | (count - 1) << 2 | number) {
                needed = 8;
                break;
            }
            source.advance(count * size);
        }
        let head = header(out.data(HEAD));
        out.finish(&head, needed)
    }

    fn decode(
        &self,
        message: &[u8],
        refusals: &mut Refusals,
        mut sink: impl FnMut(Span<GuestAddr>),
    ) {
        let Some(data) = data(message, refusals) else {
            return;
        };
        let records = data.chunks_exact(8);
        if !records.remainder().is_empty() {
            refusals.add(Refusal::Length {
                bytes: data.len(),
                unit: 8,
            });
        }
        for (nr, record) in records.enumerate() {
            let at = HEAD + nr * 8;
            let word = word(record, 0);
            let start = word & !0xfff;
            match self.shifts.shift(word & 3) {
                Some(shift) if start.trailing_zeros() >= shift => {
                    // At most 2^10 pages of 2^39 of 4 KiB.
                    let pages = (1 + (word >> 2 & (MOST - 1))) << (shift - WIRE_SHIFT);
                    hand_on(start, pages, refusals, &mut sink);
                }
                // No such size, or not at a multiple of it.
                _ => refusals.add(Refusal::Bits { at, word }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_ascend_from_4k_on() {
        for shifts in [[12, 21, 30, 0], [16, 0, 0, 0], [12, 13, 14, 51]] {
            let sizes = PageShifts::new(shifts).unwrap();
            assert_eq!(sizes.to_bytes(), shifts);
        }
        for shifts in [
            [0; 4],
            [11, 12, 0, 0],
            [12, 12, 0, 0],
            [21, 12, 0, 0],
            [12, 0, 21, 0],
            [12, 21, 30, 52],
        ] {
            assert_eq!(PageShifts::new(shifts), None, "{shifts:?}");
        }
        let large = PageShifts::new([16, 29, 0, 0]).unwrap();
        assert!(large.divide(GuestPage::SIZE_64K) && !large.divide(GuestPage::SIZE_16K));
    }
}
