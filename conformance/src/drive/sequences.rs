//! Random sequences.

use anyhow::Context as _;
use iopt::Format;
use runs::{Iova, Pa, Span};

use super::{Pair, Prots};
use crate::setup::Heap;
use fastrand::Rng;

impl<F: Format, A: Heap> Pair<'_, F, A> {
    pub(super) fn random_operation(
        &mut self,
        prots: &Prots,
        random: &mut Rng,
    ) -> anyhow::Result<()> {
        let range = if random.u64(..5) < 3 {
            let Some((iova, runs)) = self.random_runs(random) else {
                return Ok(());
            };
            let (flags, prot) = *random.choice(prots).context("no permissions")?;
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

    /// Runs to map, of which some allow large leaves and some do not.
    fn random_runs(&self, random: &mut Rng) -> Option<(u64, Vec<Span<Pa>>)> {
        let page = self.smallest();
        let output = 1u64 << self.table.format().output_bits();
        let place = *random.choice(&self.places)?;
        let nth = random.usize(..self.sizes.len());
        let size = *self.sizes.get(nth)?;
        let kind = random.u64(..4);
        let (iova, lens) = match kind {
            // Pages of one size, and some of a smaller one behind them.
            0 => {
                let first = (place & !(size - 1)).wrapping_add(random.u64(..8) * size);
                let smaller = self.sizes.get(nth.saturating_sub(1)).copied()?;
                let len = (random.u64(..3) + 1) * size + random.u64(..3) * smaller;
                (first, vec![len])
            }
            // From a bit before a boundary of a larger size to a bit behind it.
            1 => {
                let larger = *self.sizes.get(nth + 1)?;
                let before = (random.u64(..4) + 1) * size;
                let first = (place & !(larger - 1)).wrapping_add((random.u64(..4) + 1) * larger);
                let len = before + random.u64(..3) * larger + random.u64(..4) * size;
                (first.wrapping_sub(before), vec![len])
            }
            // Small pages only.
            _ => {
                let first = place.wrapping_add(random.u64(..4096) * page);
                let count = random.u64(..3) + 1;
                let most = if kind == 2 { 8 } else { 700 };
                let lens = (0..count).map(|_| (random.u64(..most) + 1) * page);
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
            let pa = random.u64(..output);
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

    /// Range to unmap: mostly leaves that are there.
    fn random_range(&self, random: &mut Rng) -> Option<Span<Iova>> {
        let page = self.smallest();
        if random.u64(..4) == 0 {
            let place = *random.choice(&self.places)?;
            let first = place.wrapping_add(random.u64(..4096) * page);
            let range = Span::checked(first, (random.u64(..16) + 1) * page)?;
            return self
                .spans
                .iter()
                .any(|span| span.covers(&range))
                .then_some(range);
        }
        let place = *random.choice(&self.places)?;
        let whole = self.spans.iter().find(|span| span.contains(place))?;
        let rest = Span::inclusive(place, whole.last())?;
        let skip = random.u64(..200) as usize;
        let take = random.u64(..600) as usize + 1;
        let mut leaves = self.table.leaves(rest).skip(skip).take(take);
        let first = leaves.next()?;
        let last = leaves.last().unwrap_or(first);
        Span::inclusive(first.run.iova, last.run.input().last())
    }
}
