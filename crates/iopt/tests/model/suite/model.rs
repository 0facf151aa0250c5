//! The plain model: a map of leaves, built page by page as a person would do it by hand.

use std::collections::BTreeMap;

use iopt::{Above, Aperture, Prot};
use runs::{Iova, Pa, PageSizes, Run, Span};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelLeaf {
    pub(crate) run: Run,
    pub(crate) prot: Prot,
    pub(crate) dirty: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) sizes: Vec<u64>,
    pub(crate) aperture: Aperture,
    pub(crate) leaves: BTreeMap<u64, ModelLeaf>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Range,
    Overlap(Run),
    InsideLeaf,
    Hole(u64),
}

fn new_leaf(run: Run, prot: Prot, dirty: bool) -> ModelLeaf {
    ModelLeaf { run, prot, dirty }
}

/// The largest leaves, page by page.
pub(crate) fn layout(run: Run, sizes: &[u64]) -> Vec<Run> {
    let mut leaves = Vec::new();
    let mut done = 0;
    while done < run.len {
        let (at, pa) = (run.iova.wrapping_add(done), run.pa + done);
        let size = sizes
            .iter()
            .copied()
            .filter(|s| (at | pa) & (s - 1) == 0 && run.len - done >= *s)
            .max()
            .expect("the smallest size always fits");
        leaves.push(Run::new(at, Span::new(pa, size)));
        done += size;
    }
    leaves
}

impl Model {
    pub(crate) fn new(sizes: PageSizes, aperture: Aperture) -> Self {
        Self {
            sizes: sizes.iter().collect(),
            aperture,
            leaves: BTreeMap::new(),
        }
    }

    pub(crate) fn range(&self, iova: u64, len: u64) -> Result<Span<Iova>, Refusal> {
        let span = Span::checked(iova, len).ok_or(Refusal::Range)?;
        let Aperture { bits, above } = self.aperture;
        // The bits above those that count, in the low bits of a number.
        let top = |address: u64| if bits >= 64 { 0 } else { address >> bits };
        let ones = if bits >= 64 { 0 } else { u64::MAX >> bits };
        let fits = |address: u64| match above {
            Above::Zeros => top(address) == 0,
            Above::Ones => top(address) == ones,
            Above::Sign => {
                let sign = address >> (bits - 1) & 1 == 1;
                top(address) == if sign { ones } else { 0 }
            }
        };
        let same_half = above != Above::Sign || span.start >> 63 == span.last() >> 63;
        if !fits(span.start) || !fits(span.last()) || !same_half || !span.is_aligned(self.sizes[0])
        {
            return Err(Refusal::Range);
        }
        Ok(span)
    }

    /// How many leaves runs become.
    pub(crate) fn leaves_of(&self, mut iova: u64, runs: &[Span<Pa>]) -> usize {
        let mut leaves = 0;
        for run in runs {
            leaves += layout(Run::new(iova, *run), &self.sizes).len();
            iova = iova.wrapping_add(run.len);
        }
        leaves
    }

    pub(crate) fn map(&mut self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), Refusal> {
        let len = runs.iter().map(|run| run.len).sum();
        let span = self.range(iova, len)?;
        if let Some(leaf) = self.touched(span).next() {
            return Err(Refusal::Overlap(leaf.run));
        }
        let mut at = iova;
        for run in runs {
            let run = Run::new(at, *run);
            for leaf in layout(run, &self.sizes) {
                self.leaves.insert(leaf.iova, new_leaf(leaf, prot, false));
            }
            at = at.wrapping_add(run.len);
        }
        Ok(())
    }

    /// The leaves that have a byte in `span`.
    pub(crate) fn touched(&self, span: Span<Iova>) -> impl Iterator<Item = &ModelLeaf> {
        let leaves = self.leaves.range(self.first_at(span)..=span.last());
        leaves.map(|(_, leaf)| leaf)
    }

    /// The same, to be changed.
    pub(crate) fn touched_mut(&mut self, span: Span<Iova>) -> impl Iterator<Item = &mut ModelLeaf> {
        let leaves = self.leaves.range_mut(self.first_at(span)..=span.last());
        leaves.map(|(_, leaf)| leaf)
    }

    /// Where the first leaf that has a byte in `span` begins, if there is one.
    fn first_at(&self, span: Span<Iova>) -> u64 {
        let before = self.leaves.range(..span.start).next_back();
        match before {
            Some((at, leaf)) if leaf.run.input().overlaps(&span) => *at,
            _ => span.start,
        }
    }

    /// Puts other leaves in the place of those in `run`: each is dirty if one was that had a byte in
    /// common with it.
    pub(crate) fn replace(&mut self, run: Run, prot: Prot, parts: &[Run]) {
        let old: Vec<ModelLeaf> = self.touched(run.input()).copied().collect();
        for leaf in &old {
            assert!(run.input().covers(&leaf.run.input()));
            self.leaves.remove(&leaf.run.iova);
        }
        let mut dirty = old.iter().filter(|leaf| leaf.dirty).peekable();
        for &part in parts {
            let behind = |leaf: &ModelLeaf| leaf.run.input().last() < part.iova;
            while dirty.next_if(|leaf| behind(leaf)).is_some() {}
            let dirty = dirty
                .peek()
                .is_some_and(|leaf| leaf.run.input().overlaps(&part.input()));
            self.leaves.insert(part.iova, new_leaf(part, prot, dirty));
        }
    }

    pub(crate) fn unmap(&mut self, span: Span<Iova>, holes: bool) -> Result<Vec<Run>, Refusal> {
        let span = self.range(span.start, span.len)?;
        let inside: Vec<ModelLeaf> = self.touched(span).copied().collect();
        if inside.iter().any(|leaf| !span.covers(&leaf.run.input())) {
            return Err(Refusal::InsideLeaf);
        }
        if !holes {
            let mut at = span.start;
            let mut left = span.len;
            for leaf in &inside {
                if leaf.run.iova != at {
                    return Err(Refusal::Hole(at));
                }
                at = at.wrapping_add(leaf.run.len);
                left -= leaf.run.len;
            }
            if left > 0 {
                return Err(Refusal::Hole(at));
            }
        }
        let mut out: Vec<Run> = Vec::new();
        for leaf in inside {
            self.leaves.remove(&leaf.run.iova);
            match out.last_mut() {
                Some(open) if open.is_followed_by(&leaf.run) => open.len += leaf.run.len,
                _ => out.push(leaf.run),
            }
        }
        Ok(out)
    }

    pub(crate) fn translate(&self, iova: u64) -> Option<u64> {
        let (_, leaf) = self.leaves.range(..=iova).next_back()?;
        leaf.run
            .input()
            .contains(iova)
            .then(|| leaf.run.pa + (iova - leaf.run.iova))
    }
}
