//! Bitmaps and runs of set bits.
//!
//! A bitmap is a slice of 64-bit words, bit *n* of word *w* standing for page `64 w + n`. Both
//! directions take a step per run and per word, never per bit.

use core::ops::Range;

/// The runs of set bits, in order, as ranges of bit numbers.
///
/// ```
/// let words = [0b0111_0001u64, 1 << 63, 0b1];
/// let runs: Vec<_> = runs::bitmap::runs(&words).collect();
/// assert_eq!(runs, [0..1, 4..7, 127..129]);
/// ```
pub fn runs(words: &[u64]) -> Runs<'_> {
    Runs {
        words,
        index: 0,
        bits: words.first().copied().unwrap_or(0),
    }
}

impl<'a> Runs<'a> {
    /// The bitmap.
    pub const fn words(&self) -> &'a [u64] {
        self.words
    }

    /// The bit from which on runs come: those before it have been given out, or are clear.
    pub fn position(&self) -> u64 {
        let bits = u64::from(self.bits.trailing_zeros());
        (self.index as u64 * 64 + bits).min(self.words.len() as u64 * 64)
    }

    /// Goes on with this bit, forward or back, as if those before it were clear.
    pub fn seek(&mut self, bit: u64) {
        let end = self.words.len();
        self.index = usize::try_from(bit / 64).map_or(end, |index| index.min(end));
        let word = self.words.get(self.index).copied().unwrap_or(0);
        self.bits = word & (u64::MAX << (bit % 64));
    }
}

/// Iterator of [`runs`].
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    words: &'a [u64],
    /// The word it stands in.
    index: usize,
    /// The bits of that word that were not yet seen.
    bits: u64,
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    #[inline]
    fn next(&mut self) -> Option<Range<u64>> {
        while self.bits == 0 {
            let index = self.index + 1;
            self.bits = *self.words.get(index)?;
            self.index = index;
        }
        let first = self.bits.trailing_zeros();
        let start = self.index as u64 * 64 + u64::from(first);
        // The carry goes through the run and ends behind it; at the top of the word it is lost.
        let (rest, goes_on) = self.bits.overflowing_add(1 << first);
        if !goes_on {
            self.bits &= rest;
            return Some(start..self.index as u64 * 64 + u64::from(rest.trailing_zeros()));
        }
        // Whole words, then the bits at the bottom of one.
        loop {
            self.index += 1;
            match self.words.get(self.index).copied() {
                Some(u64::MAX) => {}
                word => {
                    let word = word.unwrap_or(0);
                    let ones = word.trailing_ones();
                    self.bits = word & word.wrapping_add(1);
                    return Some(start..self.index as u64 * 64 + u64::from(ones));
                }
            }
        }
    }
}

/// The number of set bits in `range`; those outside the bitmap are clear.
#[inline]
pub fn count(words: &[u64], range: Range<u64>) -> u64 {
    let end = range.end.min(words.len() as u64 * 64);
    let mut at = range.start;
    let mut count = 0;
    while at < end {
        let (bits, mask) = in_word(at, end);
        count += ones(words[(at / 64) as usize] & mask);
        at += bits;
    }
    count
}

/// Sets a bit; one outside the bitmap is left out. Returns whether it was clear before.
#[inline]
pub fn insert(words: &mut [u64], bit: u64) -> bool {
    let word = usize::try_from(bit / 64)
        .ok()
        .and_then(|at| words.get_mut(at));
    let mask = 1 << (bit % 64);
    word.is_some_and(|word| core::mem::replace(word, *word | mask) & mask == 0)
}

/// Sets the bits of `range`; those outside the bitmap are left out. Returns how many it set that
/// were clear before.
#[inline]
pub fn set(words: &mut [u64], range: Range<u64>) -> u64 {
    change(words, range, |word, mask, bits| {
        let before = *word & mask;
        *word |= mask;
        bits - ones(before)
    })
}

/// Clears the bits of `range`; those outside the bitmap are left out. Returns how many it cleared
/// that were set before.
#[inline]
pub fn clear(words: &mut [u64], range: Range<u64>) -> u64 {
    change(words, range, |word, mask, bits| {
        let left = !*word & mask;
        *word &= !mask;
        bits - ones(left)
    })
}

/// Calls `f` with each word that the range touches, the mask of its bits in there and their number.
#[inline]
fn change(words: &mut [u64], range: Range<u64>, f: impl Fn(&mut u64, u64, u64) -> u64) -> u64 {
    let end = range.end.min(words.len() as u64 * 64);
    let mut at = range.start;
    let mut changed = 0;
    while at < end {
        let (bits, mask) = in_word(at, end);
        changed += f(&mut words[(at / 64) as usize], mask, bits);
        at += bits;
    }
    changed
}

/// The bits from `at` to `end` that lie in the word of `at`: how many, at least one, and their mask.
#[inline]
const fn in_word(at: u64, end: u64) -> (u64, u64) {
    let (word, left) = (64 - at % 64, end - at);
    let bits = if word < left { word } else { left };
    (bits, (u64::MAX >> (64 - bits)) << (at % 64))
}

/// The number of set bits. Mostly there are none, and few processors that programs are compiled for
/// count them in one instruction.
#[inline]
fn ones(word: u64) -> u64 {
    match word {
        0 => 0,
        word => u64::from(word.count_ones()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn runs_and_bitmaps_say_the_same(words in proptest::collection::vec(
            prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>()], 0..6)) {
            let mut plain = Vec::new();
            for bit in 0..words.len() as u64 * 64 {
                if words[(bit / 64) as usize] >> (bit % 64) & 1 == 1 {
                    match plain.last_mut() {
                        Some(Range { end, .. }) if *end == bit => *end += 1,
                        _ => plain.push(bit..bit + 1),
                    }
                }
            }
            let found: Vec<_> = runs(&words).collect();
            prop_assert_eq!(&found, &plain);

            let mut again = std::vec![0; words.len()];
            for run in found {
                let len = run.end - run.start;
                prop_assert_eq!(set(&mut again, run), len);
            }
            prop_assert_eq!(&again, &words);
        }

        #[test]
        fn runs_go_on_from_any_bit(words in proptest::collection::vec(
            prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>()], 0..5), bit in 0u64..400, before in 0usize..9) {
            let expected: Vec<_> = runs(&words)
                .filter_map(|run| (run.end > bit).then(|| run.start.max(bit)..run.end))
                .collect();
            let mut found = runs(&words);
            // Wherever it stood.
            let seen = found.by_ref().take(before).last();
            prop_assert!(seen.is_none_or(|run| run.end <= found.position()));
            found.seek(bit);
            for run in expected {
                prop_assert!(found.position() <= run.start);
                prop_assert_eq!(found.next(), Some(run.clone()));
                prop_assert!((run.end..=words.len() as u64 * 64).contains(&found.position()));
            }
            prop_assert_eq!(found.next(), None);
        }

        #[test]
        fn a_bit_is_a_range_of_one(words in any::<[u64; 2]>(), bit in 0u64..140) {
            let (mut found, mut expected) = (words, words);
            let new = insert(&mut found, bit);
            prop_assert_eq!(u64::from(new), set(&mut expected, bit..bit + 1));
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn setting_and_clearing_touch_exactly_the_range(a in 0u64..200, n in 0u64..200, b in 0u64..200, m in 0u64..200) {
            let mut words = [0u64; 3];
            set(&mut words, a..a + n);
            let counted = (b..b + m).filter(|bit| *bit < 192 && (a..a + n).contains(bit)).count();
            prop_assert_eq!(count(&words, b..b + m), counted as u64);
            let cleared = clear(&mut words, b..b + m);
            let mut expected = 0;
            for bit in 0..192 {
                let was = (a..a + n).contains(&bit);
                let gone = was && (b..b + m).contains(&bit);
                expected += u64::from(gone);
                prop_assert_eq!(words[(bit / 64) as usize] >> (bit % 64) & 1 == 1, was && !gone);
            }
            prop_assert_eq!(cleared, expected);
        }
    }

    #[test]
    fn ranges_outside_are_left_out() {
        let mut words = [0u64; 1];
        assert_eq!(set(&mut words, 60..u64::MAX), 4);
        assert_eq!(set(&mut words, 64..70), 0);
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 9..3;
        assert_eq!(set(&mut words, backwards), 0);
        assert!(!insert(&mut words, u64::MAX));
        assert_eq!(words[0], 0xf << 60);
    }
}
