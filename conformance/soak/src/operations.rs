//! The operations: which there are, how often each comes, and with what. What they do to the model, the world knows.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ioas::{AttachError, Flushing, MapError, Placement, UnmapError};
use iommu::NodeId;
use iopt::Prot;
use runs::{GuestAddr, Iova, Span};
use virtio_balloon::KeepReason;

use crate::mutator::{Mutator, everywhere};
use crate::scenario::{Fault, INTACT, PAGE, World, sentence};
use crate::{DEVICES, GUEST, IOVA, MEMORIES, MEMORY, PAGES};

/// What may wait for a lazy flush.
const LAZY: Flushing = Flushing::Lazy {
    holds: 24,
    age: Duration::from_millis(40),
    now,
};
/// One operation of so many has a fault armed.
const ARMED: u64 = 5;

fn now() -> Duration {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed()
}

/// An operation, and how often it comes.
type Operation<'a> = (u64, fn(&mut Mutator<'a>));

/// What is said of an operation: done, or why not and whether that was to be expected.
pub(crate) type Said = Result<(), (String, bool)>;

/// An error that only a fault that was armed explains.
fn said<T, E: std::error::Error>(result: Result<T, E>) -> Said {
    result.map(drop).map_err(|cause| (sentence(&cause), false))
}

impl<'a> Mutator<'a> {
    const OPERATIONS: [Operation<'a>; 16] = [
        (30, Self::map),
        (10, Self::unmap),
        (12, Self::unmap_cutting),
        (7, Self::take_out),
        (7, Self::put_back),
        (8, Self::inflate),
        (8, Self::deflate),
        (6, Self::attach),
        (3, Self::detach),
        (2, Self::track),
        (5, Self::harvest),
        (1, Self::untrack),
        (2, Self::flushing),
        (3, Self::flush),
        (3, Self::poll),
        (2, Self::place),
    ];

    /// Makes one operation.
    pub(crate) fn step(&mut self) {
        let all: u64 = Self::OPERATIONS.iter().map(|(weight, _)| weight).sum();
        let mut nth = self.random.u64(..all);
        for (weight, operation) in Self::OPERATIONS {
            if nth < weight {
                return operation(self);
            }
            nth -= weight;
        }
    }

    /// Perhaps something is to fail in what comes next.
    fn arm(&mut self) {
        if self.random.u64(..ARMED) == 0 {
            let fault = Fault::ALL[self.random.u64(..4) as usize];
            self.world.faults.arm(fault, self.random.u64(..6));
        }
    }

    /// Some area that begins in `region`, if there is one that `suits`.
    pub(crate) fn some_area(
        &mut self,
        region: Span<Iova>,
        suits: impl Fn(&ioas::Area) -> bool,
    ) -> Option<Span<Iova>> {
        let ranges = self.world.space.areas().into_iter().filter(suits);
        let ranges = ranges.map(|area| area.range());
        let ranges = ranges.filter(|range| region.contains(range.start));
        let ranges: Vec<Span<Iova>> = ranges.collect();
        let nth = self.random.u64(..ranges.len().max(1) as u64);
        ranges.get(nth as usize).copied()
    }

    /// Some part of `range`, in whole pages.
    pub(crate) fn some_part<A>(&mut self, range: Span<A>) -> Span<A> {
        let all = range.len / PAGE;
        let first = self.random.u64(..all);
        let most = (all - first).min(1 << self.random.u64(..10));
        let count = 1 + self.random.u64(..most);
        Span::new(range.start + first * PAGE, count * PAGE)
    }

    /// Whether areas begin and end where `range` does, still.
    fn is_whole(&self, range: Span<Iova>) -> bool {
        let at = |at| self.world.space.area_at(at).map(|area| area.range());
        at(range.start).is_some_and(|area| area.start == range.start)
            && at(range.last()).is_some_and(|area| area.last() == range.last())
    }

    fn map(&mut self) {
        let region = self.region();
        let which = self.random.u64(..MEMORIES) as usize;
        let large = 512;
        let (unit, most) = match self.random.u64(..8) {
            0 => (large, 4),
            1..=3 => (1, 600),
            _ => (1, 20),
        };
        let all = MEMORY / PAGE;
        let room = region.len / PAGE / unit;
        let count = unit * (1 + self.random.u64(..most)).min(room);
        let first = self.random.u64(..(all - count) / unit + 1) * unit;
        let mut at = (region.start - IOVA) / PAGE;
        at += self.random.u64(..region.len / PAGE - count + 1);
        // Half of them so that large leaves are possible.
        let suitable = at / large * large + first % large;
        if self.random.u64(..2) == 0 && suitable + count <= PAGES {
            at = suitable;
        }
        let write = self.random.u64(..4) > 0;
        let prot = if write { Prot::RW } else { Prot::READ };
        let range = Span::new(IOVA + at * PAGE, count * PAGE);
        let part = Span::new(first * PAGE, range.len);
        let before = self.world.before(range);
        let free = self.world.is_free(range);
        self.arm();
        let result = self.world.map(range.start, which, part, prot);
        let alone = self.world.was_alone(&before);
        let expected = match &result {
            Err(MapError::Overlap { .. }) => !free || !alone,
            Err(MapError::OverLimit(_)) => free || !alone,
            _ => false,
        };
        let what = format!("{range} to memory {which} from {:#x}, {prot}", part.start);
        let said = result.map_err(|cause| (sentence(&cause), expected));
        self.note("map", &what, said);
    }

    fn unmap(&mut self) {
        let region = self.region();
        let Some(mut range) = self.some_area(region, |_| true) else {
            return;
        };
        // With a hole in it perhaps.
        if let Some(other) = self.some_area(region, |_| true)
            && self.random.u64(..4) == 0
        {
            let last = range.last().max(other.last());
            range.start = range.start.min(other.start);
            range.len = last - range.start + 1;
        }
        if range.len > 1024 * PAGE && self.random.u64(..4) > 0 {
            return;
        }
        let before = self.world.before(range);
        if !self.is_whole(range) {
            return;
        }
        self.arm();
        let result = self.world.unmap(range, |space| space.unmap(range));
        let said = result.map(drop).map_err(|cause| {
            let cuts = matches!(cause, UnmapError::CutsArea { .. });
            (sentence(&cause), cuts && !self.world.was_alone(&before))
        });
        self.note("unmap", &range.to_string(), said);
    }

    fn unmap_cutting(&mut self) {
        let region = self.region();
        let whole = match self.random.u64(..3) {
            0 => None,
            _ => self.some_area(region, |_| true),
        };
        let range = self.some_part(whole.unwrap_or(region));
        self.arm();
        let result = self
            .world
            .unmap(range, |space| space.unmap_cutting(range, INTACT));
        self.note("unmap cutting", &range.to_string(), said(result));
    }

    fn take_out(&mut self) {
        let region = self.region();
        let Some(area) = self.some_area(region, |area| !area.is_out()) else {
            return;
        };
        let range = self.some_part(area);
        let before = self.world.before(range);
        if self
            .world
            .space
            .area_at(area.start)
            .is_none_or(|now| now.range() != area)
        {
            return;
        }
        self.arm();
        let said = self.world.take_out(range).map(drop).map_err(|cause| {
            let hole = matches!(cause, UnmapError::Hole { .. });
            (sentence(&cause), hole && !self.world.was_alone(&before))
        });
        self.note("take out", &range.to_string(), said);
    }

    fn put_back(&mut self) {
        let region = self.region();
        let Some(range) = self.some_area(region, ioas::Area::is_out) else {
            return;
        };
        let before = self.world.before(range);
        if !self.is_whole(range) {
            return;
        }
        self.arm();
        let said = self.world.put_back(range).map_err(|cause| {
            let expected = match cause {
                MapError::OverLimit(_) => true,
                MapError::NotOut { .. } => !self.world.was_alone(&before),
                _ => false,
            };
            (sentence(&cause), expected)
        });
        self.note("put back", &range.to_string(), said);
    }

    /// Some device of this mutator, if there is one.
    fn some_device(&mut self) -> Option<usize> {
        let mine = (self.number..DEVICES as usize).step_by(self.of);
        let nth = self.random.u64(..mine.len().max(1) as u64);
        mine.clone().nth(nth as usize)
    }

    fn attach(&mut self) {
        let Some(number) = self.some_device() else {
            return;
        };
        let was = self.world.is_attached(number);
        self.arm();
        let attach = |world: &World| world.attach(number);
        let result = match was {
            true => attach(self.world),
            false => self.world.blurring(attach),
        };
        let expected = match &result {
            Err(AttachError::Unit(_)) => was,
            Err(AttachError::Replay { cause, .. }) => matches!(cause, MapError::OverLimit(_)),
            _ => false,
        };
        let said = result.map_err(|cause| (sentence(&cause), expected));
        self.note("attach", &format!("device {number}"), said);
    }

    fn detach(&mut self) {
        if let Some(number) = self.some_device() {
            self.detach_one(number);
        }
    }

    fn detach_one(&self, number: usize) {
        if self.world.is_attached(number) {
            let result = self.world.detach(number);
            self.note("detach", &format!("device {number}"), said(result));
        }
    }

    /// Runs of the guest's memory, as a balloon tells them: they ascend and do not touch.
    fn some_runs(&mut self) -> Vec<Span<GuestAddr>> {
        let number = self.random.u64(..MEMORIES);
        let whole = Span::new(number * GUEST, MEMORY);
        let mut runs: Vec<Span<GuestAddr>> = (0..1 + self.random.u64(..4))
            .map(|_| self.some_part(whole))
            .collect();
        runs.sort_by_key(|run| run.start);
        let mut behind = None;
        runs.retain(|run| {
            let apart = behind.is_none_or(|behind| run.start > behind);
            if apart {
                behind = Some(run.start + run.len);
            }
            apart
        });
        runs
    }

    /// A balloon takes memory: devices release it, then it is discarded.
    fn inflate(&mut self) {
        let runs = self.some_runs();
        self.arm();
        let (kept, alone) = self.world.release(&runs);
        // Some of it was unmapped meanwhile, or another thread has flushed it and is about to unpin it. What stays
        // pinned for longer a look finds.
        let expected = kept.iter().all(|(_, why)| match why {
            KeepReason::NotCut => !alone,
            KeepReason::PinnedElsewhere => self.of > 1,
            _ => false,
        });
        self.moved("inflate", &runs, kept.first(), expected);
    }

    /// The balloon gives memory back. That may find the limit reached, when no device was there to keep the charge.
    fn deflate(&mut self) {
        let runs = self.some_runs();
        self.arm();
        let failed = self.world.restore(&runs);
        self.moved("deflate", &runs, failed.first(), false);
    }

    fn moved(
        &self,
        name: &'static str,
        runs: &[Span<GuestAddr>],
        stayed: Option<&(Span<GuestAddr>, KeepReason)>,
        expected: bool,
    ) {
        let said = match stayed {
            None => Ok(()),
            Some((span, why)) => Err((format!("{span} stays as it was: {why:?}"), expected)),
        };
        self.note(name, &format!("{runs:?}"), said);
    }

    fn track(&mut self) {
        if self.world.tracks() {
            return;
        }
        let leaf = (self.random.u64(..4) > 0).then_some(PAGE);
        self.arm();
        let result = self.world.track(leaf);
        self.note("track", &format!("{leaf:?}"), said(result));
    }

    fn untrack(&mut self) {
        if self.world.tracks() {
            self.arm();
            self.world.untrack();
            self.note("untrack", "", Ok(()));
        }
    }

    fn harvest(&mut self) {
        if !self.world.tracks() {
            return;
        }
        let region = self.region();
        let mask = !(64 * PAGE - 1);
        let (start, end) = (region.start & mask, (region.last() | !mask) + 1);
        let range = Span::new(start, end - start);
        self.arm();
        let (found, failed) = match self.world.harvest(range) {
            Ok(found) => found,
            Err(cause) => return self.world.scene.complain(sentence(&cause)),
        };
        let said = match (failed, found.blind) {
            (Some(cause), _) => Err((sentence(&cause), false)),
            (None, true) => Err(("some unit is blind".into(), false)),
            (None, false) => Ok(()),
        };
        self.note("harvest", &range.to_string(), said);
        let (missed, more) = (found.missed, found.more);
        if (missed, more) != (0, 0) {
            let text = format!("a harvest misses {missed} pages, and has {more} too many");
            self.world.scene.complain(text);
        }
    }

    fn flushing(&mut self) {
        let lazy = self.random.u64(..2) == 0;
        let flushing = if lazy { LAZY } else { Flushing::Strict };
        self.world.space.set_flushing(flushing);
        self.note("flushing", if lazy { "lazy" } else { "strict" }, Ok(()));
    }

    fn flush(&mut self) {
        self.arm();
        let result = self.world.space.flush();
        self.note("flush", "", said(result));
    }

    fn poll(&mut self) {
        self.arm();
        let result = self.world.space.poll();
        self.note("poll", "", said(result));
    }

    fn place(&mut self) {
        let all = [
            Placement::Shared,
            Placement::PerNode,
            Placement::Near(NodeId(1)),
        ];
        let placement = all[self.random.u64(..3) as usize];
        let placed = self.world.space.set_placement(placement);
        self.note("place", &format!("{placement:?}"), said(placed));
    }

    /// All goes: devices, then areas.
    pub(crate) fn clear(&mut self) {
        (0..DEVICES as usize).for_each(|number| self.detach_one(number));
        let window = everywhere();
        let result = self.world.unmap(window, |space| space.unmap_all());
        self.note("unmap all", &window.to_string(), said(result));
    }
}
