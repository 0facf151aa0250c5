//! Random sequences.

use anyhow::Context as _;
use iopt::Format;
use runs::Span;

use super::{Pair, Prots};
use crate::random::Random;
use crate::setup::Heap;

impl<F: Format, A: Heap> Pair<'_, F, A> {
    pub(super) fn random_operation(
        &mut self,
        prots: &Prots,
        random: &mut Random,
    ) -> anyhow::Result<()> {
        let range = if random.below(5) < 3 {
            let Some((iova, runs)) = self.random_runs(random) else {
                return Ok(());
            };
            let (flags, prot) = *random.pick(prots).context("no permissions")?;
            self.map(iova, &runs, flags, prot)?;
            Span::new(iova, runs.iter().map(|run| run.len).sum())
        } else {
            let Some(range) = self.random_range(random) else {
                return Ok(());
            };
            self.unmap(range)?;
            range
        };
        self.translate(range, random)
    }

    /// What is to be mapped: runs of which some allow large leaves and some do not.
    fn random_runs(&self, random: &mut Random) -> Option<(u64, Vec<Span>)> {
        let page = self.smallest();
        let output = 1u64 << self.table.format().output_bits();
        let place = *random.pick(&self.places)?;
        let nth = random.below(self.sizes.len() as u64) as usize;
        let size = *self.sizes.get(nth)?;
        let kind = random.below(4);
        let (iova, lens) = match kind {
            // Pages of one size, and some of a smaller one behind them.
            0 => {
                let first = (place & !(size - 1)).wrapping_add(random.below(8) * size);
                let smaller = self.sizes.get(nth.saturating_sub(1)).copied()?;
                let len = (random.below(3) + 1) * size + random.below(3) * smaller;
                (first, vec![len])
            }
            // From a bit before a boundary of a larger size to a bit behind it.
            1 => {
                let larger = *self.sizes.get(nth + 1)?;
                let before = (random.below(4) + 1) * size;
                let first = (place & !(larger - 1)).wrapping_add((random.below(4) + 1) * larger);
                let len = before + random.below(3) * larger + random.below(4) * size;
                (first.wrapping_sub(before), vec![len])
            }
            // Small pages only.
            _ => {
                let first = place.wrapping_add(random.below(4096) * page);
                let count = random.below(3) + 1;
                let most = if kind == 2 { 8 } else { 700 };
                let lens = (0..count).map(|_| (random.below(most) + 1) * page);
                (first, lens.collect())
            }
        };
        let total: u64 = lens.iter().sum();
        let range = Span::checked(iova, total)?;
        if !self.spans.iter().any(|span| span.covers(&range)) {
            return None;
        }
        let mut at = iova;
        let mut runs = Vec::new();
        for len in lens {
            // Alike up to the largest size, or aligned to the smallest page only.
            let alike = self.largest() - 1;
            let pa = random.below(output);
            let pa = if kind < 2 {
                pa & !alike | at & alike
            } else {
                pa & !(page - 1)
            };
            if pa.checked_add(len)? > output {
                return None;
            }
            runs.push(Span::new(pa, len));
            at = at.wrapping_add(len);
        }
        Some((iova, runs))
    }

    /// What is to be unmapped: mostly leaves that are there.
    fn random_range(&self, random: &mut Random) -> Option<Span> {
        let page = self.smallest();
        if random.below(4) == 0 {
            let place = *random.pick(&self.places)?;
            let first = place.wrapping_add(random.below(4096) * page);
            let range = Span::checked(first, (random.below(16) + 1) * page)?;
            return self
                .spans
                .iter()
                .any(|span| span.covers(&range))
                .then_some(range);
        }
        let place = *random.pick(&self.places)?;
        let whole = self.spans.iter().find(|span| span.contains(place))?;
        let rest = Span::inclusive(place, whole.last())?;
        let skip = random.below(200) as usize;
        let take = random.below(600) as usize + 1;
        let mut leaves = self.table.leaves(rest).skip(skip).take(take);
        let first = leaves.next()?;
        let last = leaves.last().unwrap_or(first);
        Span::inclusive(first.run.iova, last.run.input().last())
    }
}
