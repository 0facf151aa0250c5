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
///
/// Empty and full stretches are scanned at the speed of memory. Where runs are many, [`fill`](Runs::fill),
/// `for_each` and `fold` take 64 words at a time and are up to three times as fast as a loop over `next`.
pub fn runs(words: &[u64]) -> Runs<'_> {
    Runs {
        words,
        index: 0,
        bits: words.first().copied().unwrap_or(0),
    }
}

/// Ascending runs; two with at most `gap` bits between them are joined.
///
/// ```
/// use runs::bitmap::{joined, runs};
///
/// let joined: Vec<_> = joined(runs(&[0b1001_0001u64]), 2).collect();
/// assert_eq!(joined, [0..1, 4..8]);
/// ```
pub fn joined<I: IntoIterator<Item = Range<u64>>>(runs: I, gap: u64) -> Joined<I::IntoIter> {
    Joined {
        runs: runs.into_iter(),
        gap,
        open: None,
    }
}

/// At most `n` parts of about the same length, for several threads; 0 parts count as 1. None for an empty bitmap.
///
/// A part yields only its own runs, numbered as in the whole bitmap; its [`words`](Runs::words) are the bitmap's up
/// to the end of the part. A run across the border of two parts is cut there: [`joined`] with a gap of 0 makes it
/// whole.
///
/// ```
/// use runs::bitmap::{joined, spans};
///
/// let words = vec![u64::MAX; 100];
/// let parts: Vec<Vec<_>> = std::thread::scope(|scope| {
///     let threads = spans(&words, 2).map(|runs| scope.spawn(|| runs.collect()));
///     let threads: Vec<_> = threads.collect();
///     threads.into_iter().map(|thread| thread.join().unwrap()).collect()
/// });
/// assert_eq!(parts, [vec![0..4096], vec![4096..6400]]);
/// assert!(joined(parts.into_iter().flatten(), 0).eq([0..6400]));
/// ```
pub fn spans(words: &[u64], n: usize) -> impl Iterator<Item = Runs<'_>> {
    // Whole blocks, since the rest of a part goes word by word.
    let len = words.len().div_ceil(n.max(1)).div_ceil(BLOCK).max(1) * BLOCK;
    (0..words.len()).step_by(len).map(move |first| {
        let end = words.len().min(first + len);
        let mut runs = runs(&words[..end]);
        runs.enter(first);
        runs
    })
}

/// Words in a block: as many as a word has bits.
const BLOCK: usize = 64;

/// The bits of a word one by one: from memory, a vector takes more of them than by shifts.
const BITS: [u64; BLOCK] = {
    let mut bits = [1; BLOCK];
    let mut nth = 1;
    while nth < BLOCK {
        bits[nth] = bits[nth - 1] << 1;
        nth += 1;
    }
    bits
};

/// Most runs that begin in a word.
const IN_WORD: usize = 32;

/// Iterator of [`runs`].
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    words: &'a [u64],
    /// The word it stands in.
    index: usize,
    /// The bits of that word that were not yet seen. All before some bit are clear, all others as they are.
    bits: u64,
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
        let index = usize::try_from(bit / 64).map_or(end, |index| index.min(end));
        self.enter(index);
        self.bits &= u64::MAX << (bit % 64);
    }

    /// Writes the next runs to the front of `out`. Returns how many, fewer than it holds only at the end.
    ///
    /// The last 32 places in `out` are filled one by one: it is fast with several hundred.
    ///
    /// ```
    /// let mut runs = runs::bitmap::runs(&[0b1011u64, 1]);
    /// let mut out = [0..0, 0..0];
    /// assert_eq!((runs.fill(&mut out), &out), (2, &[0..2, 3..4]));
    /// assert_eq!((runs.fill(&mut out), &out[0]), (1, &(64..65)));
    /// ```
    pub fn fill(&mut self, out: &mut [Range<u64>]) -> usize {
        let blocks = self.fill_by_blocks(out);
        let rest = out[blocks..].iter_mut().zip(self);
        blocks + rest.map(|(slot, run)| *slot = run).count()
    }

    /// As [`fill`](Self::fill), but leaves room when less than a word's most runs would fit, and the words of an
    /// incomplete block.
    fn fill_by_blocks(&mut self, out: &mut [Range<u64>]) -> usize {
        let mut n = 0;
        while out.len() - n >= IN_WORD {
            let rest = self.words.get(self.index..);
            let Some(block) = rest.and_then(<[u64]>::first_chunk::<{ BLOCK + 1 }>) else {
                break;
            };
            if block[1..].iter().fold(self.bits, |any, word| any | word) == 0 {
                self.enter(self.index + block.len());
                continue;
            }
            let some = block[1..].iter().zip(&BITS).fold(0, |some, (word, bit)| {
                some | if *word == 0 { 0 } else { *bit }
            });
            let dense = some.count_ones() > 48;
            let out = &mut out[n..];
            n += match dense {
                false => self.fill_block::<2>(block, some, out),
                true => self.fill_block::<4>(block, some, out),
            };
        }
        n
    }

    /// Takes the runs of this word and the block behind it, as far as there is room, and there is for one word; `some`
    /// are the words of the block with set bits. Bits are nearly random: writing `K` runs unconditionally costs less than
    /// branches that the processor predicts badly.
    #[inline(always)]
    fn fill_block<const K: usize>(
        &mut self,
        block: &[u64; BLOCK + 1],
        mut some: u64,
        out: &mut [Range<u64>],
    ) -> usize {
        let (mut n, mut at, mut word, mut carry) = (0, 0, self.bits, 0);
        loop {
            let (done, room) = out.split_at_mut(n);
            let Some(room) = room.first_chunk_mut::<IN_WORD>() else {
                break;
            };
            let base = (self.index + at) as u64 * 64;
            let mut first = word & !(word << 1 | carry);
            let mut last = word & !(word >> 1);
            if carry & word != 0 {
                if let Some(run) = done.last_mut() {
                    run.end = base + 1 + u64::from(last.trailing_zeros());
                }
                last &= last.wrapping_sub(1);
            }
            for slots in room.chunks_exact_mut(K) {
                if first == 0 {
                    break;
                }
                for slot in slots {
                    let start = base + u64::from(first.trailing_zeros());
                    *slot = start..base + 1 + u64::from(last.trailing_zeros());
                    n += usize::from(first != 0);
                    first &= first.wrapping_sub(1);
                    last &= last.wrapping_sub(1);
                }
            }
            if some == 0 {
                at = block.len();
                carry = block[BLOCK] >> 63;
                break;
            }
            let before = some.trailing_zeros() as usize % BLOCK;
            some &= some - 1;
            at = before + 1;
            word = block[at];
            carry = block[before] >> 63;
        }
        self.enter(self.index + at);
        if carry != 0 {
            let end = self.end_of_run();
            if let Some(run) = out[..n].last_mut() {
                run.end = end;
            }
        }
        n
    }

    /// Goes to this word.
    fn enter(&mut self, index: usize) {
        self.index = index;
        self.bits = self.words.get(index).copied().unwrap_or(0);
    }

    /// Goes to the next word with a set bit. False when there is none.
    #[inline]
    fn enter_next(&mut self) -> bool {
        self.enter(self.index + 1);
        if self.bits == 0 {
            self.index += self.eights(|words| words.iter().fold(0, |any, word| any | word) == 0);
            let rest = self.words.get(self.index..).unwrap_or_default();
            let empty = rest.iter().take_while(|word| **word == 0).count();
            self.enter(self.index + empty);
        }
        self.bits != 0
    }

    /// The end of a run that goes on at the bottom of this word.
    #[inline]
    fn end_of_run(&mut self) -> u64 {
        self.enter(self.index);
        if self.bits == u64::MAX {
            self.index += self
                .eights(|words| words.iter().fold(u64::MAX, |all, word| all & word) == u64::MAX);
            let rest = self.words.get(self.index..).unwrap_or_default();
            let full = rest.iter().take_while(|word| **word == u64::MAX).count();
            self.enter(self.index + full);
        }
        let ones = self.bits.trailing_ones();
        self.bits &= self.bits.wrapping_add(1);
        self.index as u64 * 64 + u64::from(ones)
    }

    /// Words from this one on in eights, by vectors, for as long as they are alike.
    #[inline]
    fn eights(&self, alike: impl Fn(&[u64]) -> bool) -> usize {
        let rest = self.words.get(self.index..).unwrap_or_default();
        let eights = rest.chunks_exact(8);
        8 * eights.take_while(|words| alike(words)).count()
    }
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    #[inline]
    fn next(&mut self) -> Option<Range<u64>> {
        if self.bits == 0 && !self.enter_next() {
            return None;
        }
        let first = self.bits.trailing_zeros();
        let start = self.index as u64 * 64 + u64::from(first);
        // The carry goes through the run and ends behind it; at the top of the word it is lost.
        let (rest, goes_on) = self.bits.overflowing_add(1 << first);
        if goes_on {
            self.index += 1;
            return Some(start..self.end_of_run());
        }
        self.bits &= rest;
        Some(start..self.index as u64 * 64 + u64::from(rest.trailing_zeros()))
    }

    fn fold<B, F: FnMut(B, Range<u64>) -> B>(mut self, init: B, mut f: F) -> B {
        let mut folded = init;
        let mut buffer = [const { 0..0 }; 4 * IN_WORD];
        loop {
            let n = self.fill_by_blocks(&mut buffer);
            if n == 0 {
                break;
            }
            folded = buffer[..n].iter().cloned().fold(folded, &mut f);
        }
        for run in self {
            folded = f(folded, run);
        }
        folded
    }
}

/// Iterator of [`joined`].
#[derive(Clone, Debug)]
pub struct Joined<I> {
    runs: I,
    gap: u64,
    /// The run that the next one may be joined to.
    open: Option<Range<u64>>,
}

/// Joins `next` to the open run, or gives that out and opens `next`.
#[inline]
fn join(open: &mut Option<Range<u64>>, next: Range<u64>, gap: u64) -> Option<Range<u64>> {
    match open {
        Some(open) if next.start.saturating_sub(open.end) <= gap => {
            open.end = next.end.max(open.end);
            None
        }
        _ => open.replace(next),
    }
}

impl<I: Iterator<Item = Range<u64>>> Iterator for Joined<I> {
    type Item = Range<u64>;

    #[inline]
    fn next(&mut self) -> Option<Range<u64>> {
        for next in self.runs.by_ref() {
            if let Some(run) = join(&mut self.open, next, self.gap) {
                return Some(run);
            }
        }
        self.open.take()
    }

    fn fold<B, F: FnMut(B, Range<u64>) -> B>(self, init: B, mut f: F) -> B {
        let (mut open, gap) = (self.open, self.gap);
        let folded = self
            .runs
            .fold(init, |folded, next| match join(&mut open, next, gap) {
                Some(run) => f(folded, run),
                None => folded,
            });
        match open {
            Some(run) => f(folded, run),
            None => folded,
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

/// Sets a bit; one outside the bitmap is ignored. Returns whether it was clear before.
#[inline]
pub fn insert(words: &mut [u64], bit: u64) -> bool {
    let word = usize::try_from(bit / 64)
        .ok()
        .and_then(|at| words.get_mut(at));
    let mask = 1 << (bit % 64);
    word.is_some_and(|word| core::mem::replace(word, *word | mask) & mask == 0)
}

/// Sets the bits of `range`; those outside the bitmap are ignored. Returns how many were clear
/// before.
#[inline]
pub fn set(words: &mut [u64], range: Range<u64>) -> u64 {
    change(words, range, |word, mask, bits| {
        let before = *word & mask;
        *word |= mask;
        bits - ones(before)
    })
}

/// Clears the bits of `range`; those outside the bitmap are ignored. Returns how many were set
/// before.
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

/// The number of set bits. Mostly there are none, and few targets that programs are compiled for
/// count bits in one instruction.
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

    /// Bitmaps of several blocks, in stretches of the same kind: dense, sparse, all, none, words that runs go through.
    fn bitmaps() -> impl Strategy<Value = Vec<u64>> {
        let word = prop_oneof![
            Just(0u64),
            Just(u64::MAX),
            any::<u64>(),
            (0u64..64).prop_map(|bit| 1 << bit),
            (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(a, b, c)| a & b & c),
            Just(1 << 63 | 1),
            Just(0xaaaa_aaaa_aaaa_aaaa),
        ];
        let stretch = (proptest::collection::vec(word, 1..9), 1usize..90);
        let stretch = stretch.prop_map(|(words, len)| words.into_iter().cycle().take(len));
        let stretches = proptest::collection::vec(stretch, 0..5);
        stretches.prop_map(|all| all.into_iter().flatten().collect())
    }

    /// The runs bit by bit, with those joined that have at most `gap` bits between them.
    fn bit_by_bit(words: &[u64], gap: u64) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for bit in 0..words.len() as u64 * 64 {
            if words[(bit / 64) as usize] >> (bit % 64) & 1 == 1 {
                match runs.last_mut() {
                    Some(run) if bit - run.end <= gap => run.end = bit + 1,
                    _ => runs.push(bit..bit + 1),
                }
            }
        }
        runs
    }

    proptest! {
        #[test]
        fn runs_and_bitmaps_say_the_same(words in bitmaps()) {
            let found: Vec<_> = runs(&words).collect();
            prop_assert_eq!(&found, &bit_by_bit(&words, 0));

            let mut again = std::vec![0; words.len()];
            for run in found {
                let len = run.end - run.start;
                prop_assert_eq!(set(&mut again, run), len);
            }
            prop_assert_eq!(&again, &words);
        }

        #[test]
        fn every_way_gives_the_same_runs(words in bitmaps(), bit in 0u64..9000, before in 0usize..99, room in 1usize..600) {
            let mut from = runs(&words);
            from.by_ref().take(before).for_each(drop);
            if before % 2 == 1 {
                from.seek(bit);
            }
            let mut expected = Vec::new();
            for run in from.clone() {
                expected.push(run);
            }
            let mut found = Vec::new();
            from.clone().for_each(|run| found.push(run));
            prop_assert_eq!(&found, &expected);

            let mut filled = std::vec![0..0; room];
            found.clear();
            loop {
                let n = from.fill(&mut filled);
                found.extend_from_slice(&filled[..n]);
                prop_assert!(found.last().is_none_or(|run| run.end <= from.position()));
                if n < room {
                    break;
                }
            }
            prop_assert_eq!(&found, &expected);
            prop_assert_eq!(from.fill(&mut filled), 0);
        }

        #[test]
        fn joined_runs_have_longer_gaps(words in bitmaps(), gap in 0u64..200) {
            let expected = bit_by_bit(&words, gap);
            let mut found = Vec::new();
            joined(runs(&words), gap).for_each(|run| found.push(run));
            prop_assert_eq!(&found, &expected);
            prop_assert!(joined(runs(&words), gap).eq(expected));
        }

        #[test]
        fn spans_are_the_whole(words in bitmaps(), n in 0usize..7) {
            let mut end = 0;
            for part in spans(&words, n) {
                prop_assert_eq!(part.words(), &words[..part.words().len()]);
                for run in part.clone() {
                    prop_assert!(end <= run.start);
                    prop_assert!(run.end <= part.words().len() as u64 * 64);
                }
                end = part.words().len() as u64 * 64;
            }
            prop_assert_eq!(end, words.len() as u64 * 64);
            prop_assert!(spans(&words, n).count() <= n.max(1));
            let parts = spans(&words, n).flatten();
            prop_assert!(joined(parts, 0).eq(bit_by_bit(&words, 0)));
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
