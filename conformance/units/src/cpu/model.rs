//! Mapped memory, in runs: the model beside a table.

use std::collections::BTreeMap;

use runs::{Iova, Run, Span};

/// Mapped runs. None reaches the end of the address space.
#[derive(Clone, Debug, Default)]
pub(super) struct Model(BTreeMap<u64, Run>);

impl Model {
    /// Where `iova` leads.
    pub(super) fn translate(&self, iova: u64) -> Option<u64> {
        let (_, run) = self.0.range(..=iova).next_back()?;
        let offset = iova - run.iova;
        (offset < run.len).then(|| run.pa + offset)
    }

    /// Mapped runs in `span`, in order.
    pub(super) fn inside(&self, span: Span<Iova>) -> Vec<Run> {
        let part = |run: &Run| Some(run.part(run.input().intersection(&span)?));
        self.0.values().filter_map(part).collect()
    }

    /// Adds what was not mapped.
    pub(super) fn add(&mut self, run: Run) {
        self.0.insert(run.iova, run);
    }

    /// Takes away what is mapped in `span`.
    pub(super) fn remove(&mut self, span: Span<Iova>) {
        let touched: Vec<Run> = self.0.values().copied().collect();
        for run in touched {
            let Some(gone) = run.input().intersection(&span) else {
                continue;
            };
            self.0.remove(&run.iova);
            let before = gone.start - run.iova;
            let after = run.input().last() - gone.last();
            if before > 0 {
                self.add(Run { len: before, ..run });
            }
            if after > 0 {
                let skip = run.len - after;
                self.add(run.skip(skip));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_goes_and_the_rest_stays() {
        let mut model = Model::default();
        model.add(Run::new(0x1000, Span::new(0xa000, 0x5000)));
        model.add(Run::new(0x8000, Span::new(0x1000, 0x1000)));
        model.remove(Span::new(0x2000, 0x2000));
        let found = [
            0xfff, 0x1000, 0x2000, 0x3fff, 0x4000, 0x5fff, 0x6000, 0x8abc,
        ];
        let found = found.map(|iova| model.translate(iova));
        let expected = [
            None,
            Some(0xa000),
            None,
            None,
            Some(0xd000),
            Some(0xefff),
            None,
            Some(0x1abc),
        ];
        assert_eq!(found, expected);
        let inside = model.inside(Span::new(0x5000, 0x3800));
        let runs = [
            Run::new(0x5000, Span::new(0xe000, 0x1000)),
            Run::new(0x8000, Span::new(0x1000, 0x800)),
        ];
        assert_eq!(inside, runs);
    }
}
