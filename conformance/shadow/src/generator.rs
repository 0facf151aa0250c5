//! The operations: which there are, how often each comes, and where.
//!
//! Ranges come from the areas that the address space has, not from a shadow: where several threads change it, only
//! the address space knows. Some cut areas, some have holes, and some are refused.

use ioas::{Area, Ioas, Placement};
use iommu::NodeId;
use iopt::Prot;
use runs::{Iova, Offset, Span};

use crate::PAGE;

/// Pages of a large leaf.
const LARGE: u64 = 512;

/// Device addresses and memory of a rig.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// All device addresses, whole pages.
    pub iova: Span<Iova>,
    /// Memories.
    pub memories: u64,
    /// Bytes of each.
    pub memory: u64,
    /// Devices.
    pub devices: u64,
}

/// A map.
#[derive(Clone, Copy, Debug)]
pub struct Map {
    /// Its device addresses.
    pub range: Span<Iova>,
    /// Number of its memory.
    pub memory: usize,
    /// Part of that.
    pub part: Span<Offset>,
    /// Rights of devices.
    pub prot: Prot,
}

/// An operation on an address space.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Maps; something may be there already.
    Map(Map),
    /// Unmaps whole areas.
    Unmap(Span<Iova>),
    /// Unmaps what is in a range, where areas may begin before it and end behind it.
    UnmapCutting(Span<Iova>),
    /// Takes part of an area out.
    TakeOut(Span<Iova>),
    /// Puts areas back that were taken out.
    PutBack(Span<Iova>),
    /// A balloon takes parts of one memory: they ascend and do not touch.
    Release(usize, Vec<Span<Offset>>),
    /// A balloon gives them back.
    Restore(usize, Vec<Span<Offset>>),
    /// Attaches a device.
    Attach(usize),
    /// Detaches a device.
    Detach(usize),
    /// Begins to track what devices write to, in leaves of this size at most.
    Track(Option<u64>),
    /// Harvests a range of whole words of 64 pages.
    Harvest(Span<Iova>),
    /// Ends tracking.
    Untrack,
    /// From now on flushes are lazy, or strict.
    SetLazy(bool),
    /// Flushes what waits.
    Flush,
    /// Flushes what has waited for too long.
    Poll,
    /// Which devices share tables from now on.
    Place(Placement),
}

/// Makes random operations.
#[derive(Debug)]
pub struct Generator<'a> {
    /// The address space.
    pub space: &'a Ioas,
    /// All there is.
    pub layout: Layout,
    /// Everything follows from it.
    pub random: &'a mut fastrand::Rng,
}

/// How often an operation comes, and its choices; there may be nothing to choose from.
type Choice = (u64, fn(&mut Generator<'_>, Span<Iova>) -> Option<Operation>);

const CHOICES: [Choice; 16] = [
    (30, |from, region| Some(Operation::Map(from.map(region)))),
    (10, |from, region| from.unmap(region).map(Operation::Unmap)),
    (12, |from, region| {
        Some(Operation::UnmapCutting(from.any_part(region)))
    }),
    (7, |from, region| {
        let area = from.area(region, |area| !area.is_out())?;
        Some(Operation::TakeOut(from.part(area)))
    }),
    (7, |from, region| {
        from.area(region, Area::is_out).map(Operation::PutBack)
    }),
    (8, |from, _| {
        let (memory, parts) = from.parts();
        Some(Operation::Release(memory, parts))
    }),
    (8, |from, _| {
        let (memory, parts) = from.parts();
        Some(Operation::Restore(memory, parts))
    }),
    (6, |from, _| Some(Operation::Attach(from.device()))),
    (3, |from, _| Some(Operation::Detach(from.device()))),
    (2, |from, _| {
        let leaf = (from.random.u64(..4) > 0).then_some(PAGE);
        Some(Operation::Track(leaf))
    }),
    (5, |_, region| {
        let mask = !(64 * PAGE - 1);
        let (start, end) = (region.start & mask, (region.last() | !mask) + 1);
        Some(Operation::Harvest(Span::new(start, end - start)))
    }),
    (1, |_, _| Some(Operation::Untrack)),
    (2, |from, _| Some(Operation::SetLazy(from.random.bool()))),
    (3, |_, _| Some(Operation::Flush)),
    (3, |_, _| Some(Operation::Poll)),
    (2, |from, _| {
        let all = [
            Placement::Shared,
            Placement::PerNode,
            Placement::Near(NodeId(1)),
        ];
        let nth = from.random.usize(..all.len());
        Some(Operation::Place(all[nth]))
    }),
];

impl Generator<'_> {
    /// The next operation, in `region` where it has a range. `None` when there is nothing on which it could be made.
    pub fn next(&mut self, region: Span<Iova>) -> Option<Operation> {
        let all: u64 = CHOICES.iter().map(|(weight, _)| weight).sum();
        let mut nth = self.random.u64(..all);
        let chosen = CHOICES.iter().find(|(weight, _)| {
            let here = nth < *weight;
            nth = nth.saturating_sub(*weight);
            here
        });
        chosen.and_then(|(_, choose)| choose(self, region))
    }

    /// Some area that begins in `region`, if there is one that `suits`.
    fn area(&mut self, region: Span<Iova>, suits: impl Fn(&Area) -> bool) -> Option<Span<Iova>> {
        let ranges = self.space.areas().into_iter().filter(suits);
        let ranges = ranges.map(|area| area.range());
        let ranges = ranges.filter(|range| region.contains(range.start));
        let ranges: Vec<Span<Iova>> = ranges.collect();
        let nth = self.random.u64(..ranges.len().max(1) as u64);
        ranges.get(nth as usize).copied()
    }

    /// Some part of `range`, in whole pages.
    fn part<A>(&mut self, range: Span<A>) -> Span<A> {
        let all = range.len / PAGE;
        let first = self.random.u64(..all);
        let most = (all - first).min(1 << self.random.u64(..10));
        let count = 1 + self.random.u64(..most);
        Span::new(range.start + first * PAGE, count * PAGE)
    }

    /// Some part of an area, or of `region`.
    fn any_part(&mut self, region: Span<Iova>) -> Span<Iova> {
        let whole = match self.random.u64(..3) {
            0 => None,
            _ => self.area(region, |_| true),
        };
        self.part(whole.unwrap_or(region))
    }

    fn map(&mut self, region: Span<Iova>) -> Map {
        let Layout { iova, memory, .. } = self.layout;
        let which = self.random.u64(..self.layout.memories) as usize;
        let (unit, most) = match self.random.u64(..8) {
            0 => (LARGE, 4),
            1..=3 => (1, 600),
            _ => (1, 20),
        };
        let all = memory / PAGE;
        let room = (region.len / PAGE / unit).min(all / unit);
        let count = unit * (1 + self.random.u64(..most)).min(room);
        let first = self.random.u64(..(all - count) / unit + 1) * unit;
        let mut at = (region.start - iova.start) / PAGE;
        at += self.random.u64(..region.len / PAGE - count + 1);
        // Half of them so that large leaves are possible.
        let suitable = at / LARGE * LARGE + first % LARGE;
        if self.random.bool() && suitable + count <= iova.len / PAGE {
            at = suitable;
        }
        let write = self.random.u64(..4) > 0;
        Map {
            range: Span::new(iova.start + at * PAGE, count * PAGE),
            memory: which,
            part: Span::new(first * PAGE, count * PAGE),
            prot: if write { Prot::RW } else { Prot::READ },
        }
    }

    fn unmap(&mut self, region: Span<Iova>) -> Option<Span<Iova>> {
        let mut range = self.area(region, |_| true)?;
        // With a hole in it perhaps.
        if let Some(other) = self.area(region, |_| true)
            && self.random.u64(..4) == 0
        {
            let last = range.last().max(other.last());
            range.start = range.start.min(other.start);
            range.len = last - range.start + 1;
        }
        let long = range.len > 1024 * PAGE;
        (!long || self.random.u64(..4) == 0).then_some(range)
    }

    /// Parts of some memory, as a balloon tells them: they ascend and do not touch.
    fn parts(&mut self) -> (usize, Vec<Span<Offset>>) {
        let memory = self.random.u64(..self.layout.memories) as usize;
        let whole = Span::new(0, self.layout.memory);
        let count = 1 + self.random.u64(..4);
        let mut parts: Vec<Span<Offset>> = (0..count).map(|_| self.part(whole)).collect();
        parts.sort_by_key(|part| part.start);
        let mut behind = None;
        parts.retain(|part| {
            let apart = behind.is_none_or(|behind| part.start > behind);
            if apart {
                behind = Some(part.start + part.len);
            }
            apart
        });
        (memory, parts)
    }

    fn device(&mut self) -> usize {
        self.random.u64(..self.layout.devices) as usize
    }
}
