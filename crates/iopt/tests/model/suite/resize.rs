//! Split, cut and merge in the model suite.

use std::collections::BTreeSet;

use iopt::format::BreakBeforeMake;
use iopt::{Format, Gather, Interruption, Invalidation, ResizeError, TableOps as _};
use proptest::prelude::*;
use runs::{Iova, Run, Span};

use super::model::ModelLeaf;
use super::{LEAVES, Tables, World, on, root_tables};

/// One such operation, in raw numbers.
#[derive(Clone, Debug)]
pub(crate) struct Resize {
    kind: usize,
    first: usize,
    count: usize,
    size: usize,
    offset: u64,
    allowed: bool,
    failing_flush: bool,
}

pub(crate) fn resize() -> impl Strategy<Value = Resize> {
    let place = (any::<prop::sample::Index>(), 1usize..700);
    (
        0usize..4,
        place,
        0usize..16,
        any::<u64>(),
        prop::bool::weighted(0.8),
        prop::bool::weighted(0.1),
    )
        .prop_map(
            |(kind, (first, count), size, offset, allowed, failing_flush)| Resize {
                kind,
                first: first.index(1 << 20),
                count,
                size,
                offset,
                allowed,
                failing_flush,
            },
        )
}

impl<F: Format, A: Tables, const SHARED: bool> World<'_, F, A, SHARED> {
    pub(crate) fn resize(&mut self, resize: &Resize) {
        let leaves: Vec<ModelLeaf> = self.model.leaves.values().copied().collect();
        let Some(start) = leaves.get(resize.first % leaves.len().max(1)) else {
            return;
        };
        let end = (resize.first % leaves.len() + resize.count - 1).min(leaves.len() - 1);
        let end = leaves[end];
        let grain = self.model.sizes[0];
        // Somewhere in the first leaf, at a page.
        let at = start.run.iova + resize.offset % start.run.len / grain * grain;
        let last = match resize.kind {
            3 => end.run.input().last(),
            // Some page of the last leaf.
            _ => end.run.iova + (resize.offset >> 32) % end.run.len / grain * grain + (grain - 1),
        };
        // Never across the halves of a sign-extended space.
        if last < at || last - at > 1 << 60 {
            return;
        }
        let range = Span::inclusive(at, last).unwrap();

        // Expected parts of each run.
        let mut wanted: Vec<(Run, iopt::Prot, Vec<Run>)> = Vec::new();
        let sizes = self.model.sizes.clone();
        let size = sizes[resize.size % sizes.len()];
        match resize.kind {
            0 => {
                let smaller: Vec<u64> = sizes.iter().copied().filter(|s| *s <= size).collect();
                let parts: u64 = self
                    .model
                    .touched(range)
                    .map(|leaf| leaf.run.len / size)
                    .sum();
                if parts > LEAVES as u64 {
                    return;
                }
                for leaf in self.model.touched(range) {
                    let parts = super::model::layout(leaf.run, &smaller);
                    wanted.push((leaf.run, leaf.prot, parts));
                }
            }
            1 => {
                let front = at - start.run.iova;
                let (iova, pa) = (start.run.iova, start.run.pa);
                let mut parts = Vec::new();
                if front > 0 {
                    parts = super::model::layout(Run::new(iova, Span::new(pa, front)), &sizes);
                }
                let rest = Run::new(at, Span::new(pa + front, start.run.len - front));
                parts.extend(super::model::layout(rest, &sizes));
                wanted.push((start.run, start.prot, parts));
            }
            _ => {
                let mut runs: Vec<(Run, iopt::Prot)> = Vec::new();
                for leaf in self.model.touched(range) {
                    if !range.covers(&leaf.run.input()) {
                        continue;
                    }
                    match runs.last_mut() {
                        Some((run, prot))
                            if run.is_followed_by(&leaf.run) && *prot == leaf.prot =>
                        {
                            run.len += leaf.run.len;
                        }
                        _ => runs.push((leaf.run, leaf.prot)),
                    }
                }
                for (run, prot) in runs {
                    wanted.push((run, prot, super::model::layout(run, &sizes)));
                }
            }
        }
        let before: Vec<Run> = wanted
            .iter()
            .flat_map(|(run, ..)| self.model.touched(run.input()))
            .map(|leaf| leaf.run)
            .collect();
        let after: Vec<Run> = wanted
            .iter()
            .flat_map(|(.., parts)| parts.clone())
            .collect();
        if self.model.leaves.len() - before.len() + after.len() > LEAVES {
            return;
        }
        let changes = before != after;

        let bbm = self.table.format().break_before_make();
        let interruption = if resize.allowed {
            Interruption::Allowed
        } else {
            Interruption::Refused
        };
        let refused = changes && !resize.allowed && bbm != BreakBeforeMake::NotNeeded;
        let bytes_before = (!changes || refused).then(|| self.snapshot());
        let mut gather = Gather::new();
        let mut flushes = 0;
        let mut flushed: Vec<Span<Iova>> = Vec::new();
        let flush = |what: &Invalidation| {
            flushes += 1;
            flushed.extend(what.ranges());
            if resize.failing_flush {
                Err("no answer")
            } else {
                Ok(())
            }
        };
        let result = on!(self, table => match resize.kind {
            0 => table.split(range, size, interruption, &mut gather, flush),
            1 => table.cut(at, interruption, &mut gather, flush),
            _ => table.merge(range, interruption, &mut gather, flush),
        });
        if let Some(bytes) = bytes_before {
            assert!(
                bytes == self.snapshot(),
                "nothing was to be done: {result:?}"
            );
            assert!(flushes == 0 && gather.is_empty());
        }
        match result {
            Ok(()) => {
                assert!(!(refused || changes && resize.failing_flush));
                assert!(gather.is_empty());
                assert_eq!(flushes > 0, changes);
                // Every leaf that is gone was flushed.
                let after: BTreeSet<&Run> = after.iter().collect();
                let gone = before.iter().filter(|leaf| !after.contains(leaf));
                for leaf in gone.step_by(37) {
                    let input = leaf.input();
                    assert!(flushed.iter().any(|span| span.covers(&input)), "{leaf}");
                }
                for (run, prot, parts) in wanted {
                    self.model.replace(run, prot, &parts);
                }
            }
            Err(ResizeError::BreakBeforeMake { .. }) => assert!(refused),
            Err(ResizeError::Flush(_)) => {
                assert!(changes && resize.failing_flush);
                assert!(!gather.is_empty());
                // Translations are what they were, the leaves are old or new: read them back.
                for (run, prot, parts) in wanted {
                    let now: Vec<Run> = self
                        .table
                        .leaves(run.input())
                        .map(|leaf| leaf.run)
                        .collect();
                    let bytes: u64 = now.iter().map(|leaf| leaf.len).sum();
                    assert_eq!(bytes, run.len);
                    let old = self.model.touched(run.input());
                    let old: BTreeSet<Run> = old.map(|leaf| leaf.run).collect();
                    let parts: BTreeSet<Run> = parts.into_iter().collect();
                    for leaf in &now {
                        assert!(old.contains(leaf) || parts.contains(leaf), "{leaf}");
                        assert_eq!(leaf.iova - run.iova, leaf.pa - run.pa);
                    }
                    self.model.replace(run, prot, &now);
                    self.read_dirty_back(run.input(), &old);
                }
                let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
                self.table.reclaim(flushed);
            }
            Err(ResizeError::NoTables(_)) => {
                assert!(root_tables(&self.table.format()) < self.memory.used());
            }
            Err(other) => panic!("{resize:?}: {other}"),
        }
        self.check_dirty();
    }

    /// After a flush that failed, what took the place of tables counts as written to.
    fn read_dirty_back(&mut self, range: Span<Iova>, old: &BTreeSet<Run>) {
        if !self.table.format().keeps_dirty() {
            return;
        }
        for leaf in self.model.touched_mut(range) {
            if !old.contains(&leaf.run) {
                let mut dirty = false;
                self.table
                    .peek_dirty(leaf.run.input(), |_| dirty = true)
                    .unwrap();
                assert!(dirty || !leaf.dirty, "{} was dirty", leaf.run);
                leaf.dirty = dirty;
            }
        }
    }
}
