//! Physical runs of held memory, pin after pin and joined.

use alloc::boxed::Box;

use iopt::RangeError;
use runs::{Joinable as _, Joiner, Pa, Span};

use super::OfPin;
use crate::memory::object::{Cause, RunReader};

/// Reads the runs of a part, pin after pin, and joins them: the one place where that is done on the way to
/// a table.
pub(super) struct Runs<'a> {
    pins: &'a [OfPin],
    reader: Option<Box<dyn RunReader + 'a>>,
    joiner: Joiner<Span<Pa>>,
    /// Bytes that are still to be read, if readers read what they have to.
    left: u64,
}

impl<'a> Runs<'a> {
    /// Runs of `len` bytes of these pins.
    pub(super) const fn of(pins: &'a [OfPin], len: u64) -> Self {
        Self {
            pins,
            reader: None,
            joiner: Joiner::new(),
            left: len,
        }
    }

    /// Puts the last run behind the first `count` runs of `out`, if there is room: nothing follows that it
    /// could be joined with. Returns how many there are then.
    fn finish(&mut self, out: &mut [Span<Pa>], count: usize) -> usize {
        let Some(slot) = out.get_mut(count) else {
            return count;
        };
        let last = self.joiner.finish();
        *slot = last.unwrap_or_default();
        count + usize::from(last.is_some())
    }
}

/// A look at a batch of runs, without a branch for each.
struct Looked {
    /// Bytes together, modulo 2^64.
    bytes: u64,
    /// There are runs of no bytes.
    empty: bool,
    /// There may be runs that join: nearly always false where pages lie anywhere.
    joins: bool,
}

impl Looked {
    fn at(batch: &[Span<Pa>]) -> Self {
        let (mut bytes, mut empty, mut joins) = (0u64, false, false);
        let mut behind = None;
        for run in batch {
            bytes = bytes.wrapping_add(run.len);
            empty |= run.is_empty();
            joins |= behind == Some(run.start);
            behind = Some(run.start.wrapping_add(run.len));
        }
        Self {
            bytes,
            empty,
            joins,
        }
    }
}

/// The joiner's work on a batch in which no run joins the next one: [`Joiner::push_all`] in one move.
fn pass(joiner: &mut Joiner<Span<Pa>>, batch: &mut [Span<Pa>]) -> usize {
    let Some((first, last)) = batch.first().copied().zip(batch.last().copied()) else {
        return 0;
    };
    let open = joiner.finish();
    if let Some(joined) = open.and_then(|open| open.join(&first)) {
        batch[0] = joined;
        joiner.push(*batch.last().unwrap_or(&joined));
        return batch.len() - 1;
    }
    joiner.push(last);
    match open {
        // All but the last are where they belong.
        None => batch.len() - 1,
        Some(open) => {
            batch.copy_within(..batch.len() - 1, 1);
            batch[0] = open;
            batch.len()
        }
    }
}

impl RunReader for Runs<'_> {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        loop {
            let Some(reader) = &mut self.reader else {
                let Some(((pin, part), rest)) = self.pins.split_first() else {
                    return Ok(self.finish(out, 0));
                };
                self.reader = Some(pin.runs(*part)?);
                self.pins = rest;
                continue;
            };
            let count = reader.next_batch(out)?;
            // More than there is room for is the caller's to refuse.
            let Some(batch) = out.get_mut(..count) else {
                return Ok(count);
            };
            if batch.is_empty() {
                self.reader = None;
                continue;
            }
            let Looked {
                bytes,
                empty,
                joins,
            } = Looked::at(batch);
            if empty {
                return Err(RangeError::Empty.into());
            }
            let left = self.left.wrapping_sub(bytes);
            self.left = left;
            let mut complete = match joins {
                true => self.joiner.push_all(batch, |_| ()),
                false => pass(&mut self.joiner, batch),
            };
            if left == 0 {
                complete = self.finish(out, complete);
            }
            if complete > 0 {
                return Ok(complete);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    proptest! {
        /// Batches of pages of which few or many lie side by side, one after the other through the same joiner.
        #[test]
        fn a_batch_without_neighbours_passes_as_it_would_join(
            batches in prop::collection::vec(prop::collection::vec((0..6u64, 1..3u64), 1..6), 1..6),
        ) {
            let [mut fast, mut slow] = [(); 2].map(|()| Joiner::new());
            for batch in batches {
                let runs = batch.iter().map(|(start, len)| Span::<Pa>::new(*start, *len));
                let mut fast_batch: Vec<_> = runs.collect();
                let mut slow_batch = fast_batch.clone();
                let looked = Looked::at(&fast_batch);
                prop_assert_eq!(looked.bytes, batch.iter().map(|(_, len)| len).sum::<u64>());
                prop_assert!(!looked.empty);
                let neighbours = fast_batch.windows(2).any(|two| two[0].join(&two[1]).is_some());
                prop_assert_eq!(looked.joins, neighbours);
                let complete = match looked.joins {
                    true => fast.push_all(&mut fast_batch, |_| ()),
                    false => pass(&mut fast, &mut fast_batch),
                };
                prop_assert_eq!(complete, slow.push_all(&mut slow_batch, |_| ()));
                prop_assert_eq!(&fast_batch[..complete], &slow_batch[..complete]);
            }
            prop_assert_eq!(fast.finish(), slow.finish());
        }
    }
}
