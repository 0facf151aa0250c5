//! Disjoint stretches, each with a value.

use alloc::collections::BTreeMap;

use runs::Span;

#[derive(Debug)]
pub(crate) struct Intervals<T> {
    map: BTreeMap<u64, (Span, T)>,
}

impl<T> Default for Intervals<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Intervals<T> {
    pub(crate) const fn new() -> Self {
        Self {
            map: BTreeMap::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    pub(crate) fn insert(&mut self, span: Span, value: T) -> Result<(), Span> {
        if let Some((there, _)) = self.first_in(span) {
            return Err(there);
        }
        self.map.insert(span.start, (span, value));
        Ok(())
    }

    pub(crate) fn remove(&mut self, start: u64) -> Option<(Span, T)> {
        self.map.remove(&start)
    }

    pub(crate) fn at(&self, address: u64) -> Option<(Span, &T)> {
        let (_, (span, value)) = self.map.range(..=address).next_back()?;
        span.contains(address).then_some((*span, value))
    }

    pub(crate) fn at_mut(&mut self, address: u64) -> Option<(Span, &mut T)> {
        let (_, (span, value)) = self.map.range_mut(..=address).next_back()?;
        span.contains(address).then_some((*span, value))
    }

    pub(crate) fn first_in(&self, range: Span) -> Option<(Span, &T)> {
        self.at(range.start).or_else(|| {
            let (_, (span, value)) = self.map.range(range.start..=range.last()).next()?;
            Some((*span, value))
        })
    }

    /// Those that begin between `first` and `last`, both included.
    pub(crate) fn from_to(&self, first: u64, last: u64) -> impl Iterator<Item = (Span, &T)> {
        self.map
            .range(first..=last)
            .map(|(_, (span, value))| (*span, value))
    }

    pub(crate) fn from_to_mut(
        &mut self,
        first: u64,
        last: u64,
    ) -> impl Iterator<Item = (Span, &mut T)> {
        self.map
            .range_mut(first..=last)
            .map(|(_, (span, value))| (*span, value))
    }

    pub(crate) fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = (Span, &T)> {
        let before = self.at(first).filter(|(span, _)| span.start < first);
        before.into_iter().chain(self.from_to(first, last))
    }

    pub(crate) fn extract_inside(
        &mut self,
        first: u64,
        last: u64,
    ) -> impl Iterator<Item = (Span, T)> + '_ {
        core::iter::from_fn(move || {
            let start = *self.map.range(first..=last).next()?.0;
            self.map.remove(&start)
        })
    }

    /// To come: a structure that keeps gaps.
    pub(crate) fn gap(&self, len: u64, align: u64, windows: &[Span]) -> Option<u64> {
        windows.iter().find_map(|window| {
            let mut at = window.start;
            loop {
                at = at.checked_next_multiple_of(align)?;
                let fits = Span::checked(at, len).filter(|found| window.covers(found))?;
                match self.first_in(fits) {
                    None => return Some(at),
                    Some((there, _)) => at = there.start.checked_add(there.len)?,
                }
            }
        })
    }
}
