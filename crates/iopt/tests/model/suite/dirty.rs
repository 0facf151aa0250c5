//! Dirty state and permissions in the random sequences: the model keeps one flag per leaf.

use iopt::{
    DirtyError, Format, Gather, Pending, Prot, ProtectError, Table, TableOps as _, TableUnmapError,
    WithDirty,
};
use proptest::prelude::*;
use runs::{Iova, Joiner, PageSizes, Run, Span};

use super::model::{Model, ModelLeaf, Refusal};
use super::{Tables, World, on, owning};

#[derive(Clone, Debug)]
pub(crate) enum DirtyOp {
    Track(bool),
    Set(Leaves),
    Harvest(Leaves, u32),
    Protect(Leaves, usize),
}

/// From one leaf to another; the ends may lie a page further in or out.
#[derive(Clone, Debug)]
pub(crate) struct Leaves {
    first: usize,
    count: usize,
    ends: (u64, u64),
}

pub(crate) fn dirty_op() -> impl Strategy<Value = DirtyOp> {
    let leaves = || {
        (
            any::<prop::sample::Index>(),
            1usize..400,
            (0u64..8, 0u64..8),
        )
            .prop_map(|(first, count, ends)| Leaves {
                first: first.index(1 << 20),
                count,
                ends,
            })
    };
    prop_oneof![
        2 => prop::bool::weighted(0.8).prop_map(DirtyOp::Track),
        4 => leaves().prop_map(DirtyOp::Set),
        3 => (leaves(), 0u32..6).prop_map(|(leaves, coarser)| DirtyOp::Harvest(leaves, coarser)),
        3 => (leaves(), 0usize..3).prop_map(|(leaves, prot)| DirtyOp::Protect(leaves, prot)),
    ]
}

impl Model {
    fn protect(&mut self, span: Span<Iova>, prot: Prot) -> Result<(), Refusal> {
        let span = self.range(span.start, span.len)?;
        let mut at = Some(span.start);
        for leaf in self.touched(span) {
            let leaf = leaf.run.input();
            // The first of these in order: the cut at the front, a hole, the cut at the end.
            if leaf.start < span.start {
                return Err(Refusal::InsideLeaf);
            }
            if Some(leaf.start) != at {
                return Err(Refusal::Hole(at.unwrap()));
            }
            if leaf.last() > span.last() {
                return Err(Refusal::InsideLeaf);
            }
            at = leaf.last().checked_add(1);
        }
        if at != span.last().checked_add(1) {
            return Err(Refusal::Hole(at.unwrap()));
        }
        self.touched_mut(span).for_each(|leaf| leaf.prot = prot);
        Ok(())
    }

    /// Dirty leaves, as runs in the order of the leaves.
    fn dirty_runs(&self, span: Span<Iova>) -> Vec<Span<Iova>> {
        let dirty = self.touched(span).filter(|leaf| leaf.dirty);
        joined(dirty.map(|leaf| leaf.run.input()))
    }
}

fn joined(spans: impl Iterator<Item = Span<Iova>>) -> Vec<Span<Iova>> {
    let mut joiner = Joiner::new();
    let mut runs: Vec<_> = spans.filter_map(|span| joiner.push(span)).collect();
    runs.extend(joiner.finish());
    runs
}

impl<F: Format, A: Tables, const SHARED: bool> World<'_, F, A, SHARED> {
    fn span_of(&self, leaves: &Leaves) -> Option<Span<Iova>> {
        let all: Vec<Run> = self.model.leaves.values().map(|leaf| leaf.run).collect();
        let start = leaves.first % all.len().max(1);
        let end = (start + leaves.count - 1).min(all.len().saturating_sub(1));
        let (first, last) = (all.get(start)?.iova, all[end].input().last());
        let grain = self.model.sizes[0];
        let moved = |at: u64, end| match end {
            0 => at.saturating_add(grain),
            1 => at.saturating_sub(grain),
            _ => at,
        };
        Span::inclusive(moved(first, leaves.ends.0), moved(last, leaves.ends.1))
    }

    pub(crate) fn apply_dirty(&mut self, op: &DirtyOp) {
        match op {
            DirtyOp::Track(on) => {
                let result = if SHARED {
                    let shared = iopt::SharedTable::<_, _>::new(self.table.take());
                    let result = shared.track_dirty(*on);
                    self.table.put(shared.into_inner());
                    result
                } else {
                    self.table.track_dirty(*on)
                };
                assert_eq!(result.is_ok(), self.table.format().keeps_dirty());
                assert_eq!(self.table.tracks_dirty(), *on && result.is_ok());
            }
            DirtyOp::Set(leaves) => {
                let Some(span) = self.span_of(leaves) else {
                    return;
                };
                let result = on!(self, table => table.set_dirty(span));
                if let Some(bytes) = self.check_kept(span, result) {
                    let writable = |leaf: &&mut ModelLeaf| leaf.prot.contains(Prot::WRITE);
                    let mut any = false;
                    for leaf in self.model.touched_mut(span).filter(writable) {
                        (leaf.dirty, any) = (true, true);
                    }
                    assert_eq!(bytes > 0, any);
                }
            }
            DirtyOp::Harvest(leaves, coarser) => {
                if let Some(span) = self.span_of(leaves) {
                    self.harvest(span, *coarser);
                }
            }
            DirtyOp::Protect(leaves, prot) => {
                if let Some(span) = self.span_of(leaves) {
                    self.protect(span, self.prots[*prot]);
                }
            }
        }
        self.check_dirty();
    }

    /// Checks a refusal that does not depend on mappings; otherwise returns the answer.
    fn check_kept(&self, span: Span<Iova>, result: Result<u64, DirtyError>) -> Option<u64> {
        let format = self.table.format().id();
        match result {
            Ok(bytes) if self.table.format().keeps_dirty() => Some(bytes),
            Err(DirtyError::NotKept { format: named }) => {
                assert!(named == format && !self.table.format().keeps_dirty());
                None
            }
            Err(DirtyError::Range(_)) => {
                assert_eq!(self.model.range(span.start, span.len), Err(Refusal::Range));
                None
            }
            other => panic!("{span}: {other:?}"),
        }
    }

    fn harvest(&mut self, span: Span<Iova>, coarser: u32) {
        // Not too many bits.
        let size = self.model.sizes[0].max((span.len >> 14).next_power_of_two()) << coarser;
        let mut pending = Pending::new(vec![0; 512], span, size).unwrap();
        let ends = |leaf: &ModelLeaf| !span.covers(&leaf.run.input());
        let cut = self.model.touched(span).any(ends);
        let outside = self.model.range(span.start, span.len).is_err();
        let before = (cut || outside || !self.table.tracks_dirty()).then(|| self.snapshot());
        let result = on!(self, table => table.harvest(span, &mut pending));
        match result {
            Err(DirtyError::NotTracked) => assert!(!self.table.tracks_dirty()),
            Err(DirtyError::InsideLeaf { .. }) => assert!(cut),
            other => {
                if let Some(bytes) = self.check_kept(span, other) {
                    assert!(before.is_none());
                    let dirty = self.model.dirty_runs(span);
                    assert_eq!(bytes, dirty.iter().map(|run| run.len).sum::<u64>());
                    for leaf in &dirty {
                        let flushed = pending.invalidation().ranges();
                        assert!(flushed.iter().any(|range| range.covers(leaf)));
                    }
                    let shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
                    let all: Vec<_> = shown.runs().collect();
                    assert_eq!(all, widened(&dirty, size, span));
                    shown.acknowledge();
                    let leaves = self.model.touched_mut(span);
                    leaves.for_each(|leaf| leaf.dirty = false);
                    return;
                }
            }
        }
        assert!(
            before.is_some_and(|before| before == self.snapshot()),
            "a refused harvest stored"
        );
    }

    fn protect(&mut self, span: Span<Iova>, prot: Prot) {
        let expected = self.model.protect(span, prot);
        let before = expected.is_err().then(|| self.snapshot());
        let mut gather = Gather::new();
        let result = on!(self, table => table.protect(span, prot, &mut gather));
        match (&result, &expected) {
            (Ok(()), Ok(())) => {}
            (Err(ProtectError::InsideLeaf { .. }), Err(Refusal::InsideLeaf)) => {}
            (Err(ProtectError::Hole { at, .. }), Err(Refusal::Hole(hole))) => assert_eq!(at, hole),
            (Err(ProtectError::Range(_)), Err(Refusal::Range)) => {}
            _ => panic!("protect {span} {prot}: {result:?}, expected {expected:?}"),
        }
        if let Some(before) = before {
            assert!(gather.is_empty());
            assert!(before == self.snapshot(), "a refused protect stored");
        }
        assert_eq!(gather.tables(), 0);
        let _ = gather.never_walked();
    }

    /// Unmaps while dirty tracking is on.
    pub(crate) fn unmap_tracked(&mut self, span: Span<Iova>, holes: bool) {
        let refused = self
            .table
            .unmap(span, &mut Gather::new(), &mut iopt::NoRuns);
        assert_eq!(refused, Err(TableUnmapError::DirtyWanted));
        let before: Vec<ModelLeaf> = match self.model.range(span.start, span.len) {
            Ok(span) => self.model.touched(span).copied().collect(),
            Err(_) => Vec::new(),
        };
        let expected = self.model.unmap(span, holes);
        let (mut gather, mut runs) = (Gather::new(), Vec::new());
        let mut sink = WithDirty(|run, dirty| runs.push((run, dirty)));
        let result = if holes {
            let result =
                owning!(self, span, table => table.unmap_mapped(span, &mut gather, &mut sink));
            result.map(|_| ())
        } else {
            owning!(self, span, table => table.unmap(span, &mut gather, &mut sink))
        };
        assert_eq!(result.is_ok(), expected.is_ok(), "{span}: {result:?}");
        let mut told: Vec<(Run, bool)> = Vec::new();
        if result.is_ok() {
            for leaf in before {
                match told.last_mut() {
                    Some((open, dirty))
                        if *dirty == leaf.dirty && open.is_followed_by(&leaf.run) =>
                    {
                        open.len += leaf.run.len;
                    }
                    _ => told.push((leaf.run, leaf.dirty)),
                }
            }
        }
        assert_eq!(runs, told);
        let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
        self.table.reclaim(flushed);
        self.check_dirty();
    }

    /// A look without clearing says what the model says, and stores nothing.
    pub(crate) fn check_dirty(&self) {
        if !self.table.format().keeps_dirty() {
            return;
        }
        for span in self.model.aperture.spans() {
            let mut dirty = Vec::new();
            self.table.peek_dirty(span, |run| dirty.push(run)).unwrap();
            assert_eq!(dirty, self.model.dirty_runs(span));
        }
    }
}

/// Pages that are written to here and there are found, each and no other, and once.
pub(crate) fn harvest_finds_every_write<F: Format, A: Tables>(format: F, sizes: PageSizes) {
    let memory = A::room_for(64, format.output_bits());
    let mut table = Table::with_page_sizes(format, &memory, sizes).unwrap();
    let size = table.page_sizes().smallest();
    let start = format.aperture().spans().next().unwrap().start;
    let range = Span::new(start, 600 * size);
    // Runs of one page: every one is a leaf.
    let runs: Vec<_> = (0..600)
        .map(|page| Span::new(page % 64 * size, size))
        .collect();
    table.map(start, &runs, Prot::RW).unwrap();
    assert_eq!(table.leaves(range).count(), 600);
    let mut pending = Pending::new([0; 10], range, size).unwrap();
    if table.track_dirty(true).is_err() {
        let format = format.id();
        let refused = table.harvest(range, &mut pending);
        assert_eq!(refused, Err(DirtyError::NotKept { format }));
        return;
    }
    let written = |round: u64, page: u64| page.wrapping_mul(0x9e37_79b9) >> round & 5 == 0;
    for round in 0..4 {
        let pages = (0..600).filter(|page| written(round, *page));
        let pages: Vec<_> = pages
            .map(|page| Span::new(start + page * size, size))
            .collect();
        for page in &pages {
            table.set_dirty(*page).unwrap();
        }
        let bytes = table.harvest(range, &mut pending).unwrap();
        assert_eq!(bytes, pages.len() as u64 * size);
        let shown = pending.flush_with(|_| Ok::<_, ()>(())).unwrap();
        assert!(shown.runs().eq(joined(pages.into_iter())));
        shown.acknowledge();
    }
    assert_eq!(table.harvest(range, &mut pending), Ok(0));
}

/// The granules of `size` bytes that have a byte in one of `runs`, as far as they are in `span`.
fn widened(runs: &[Span<Iova>], size: u64, span: Span<Iova>) -> Vec<Span<Iova>> {
    let mut wide: Vec<Span<Iova>> = Vec::new();
    for run in runs {
        let first = (run.start & !(size - 1)).max(span.start);
        let last = (run.last() | (size - 1)).min(span.last());
        match wide.last_mut() {
            Some(open) if first <= open.last().saturating_add(1) => {
                open.len = last - open.start + 1;
            }
            _ => wide.push(Span::inclusive(first, last).unwrap()),
        }
    }
    wide
}
