//! The operations: which there are, how often each comes, and with what. What they do to the model, the world knows.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ioas::{AttachError, Flushing, MapError, Placement};
use iommu::{DomainId, NodeId};
use iopt::Prot;
use runs::{GuestAddr, Iova, Span};
use scenario::{Fault, INTACT, PAGE, sentence};

use crate::{DEVICES, GUEST, IOVA, MEMORIES, MEMORY, PAGES, Soak};

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
type Operation = (u64, fn(&mut Soak));

const OPERATIONS: [Operation; 17] = [
    (30, Soak::map),
    (10, Soak::unmap),
    (12, Soak::unmap_cutting),
    (7, Soak::take_out),
    (7, Soak::put_back),
    (8, Soak::inflate),
    (8, Soak::deflate),
    (6, Soak::attach),
    (3, Soak::detach),
    (2, Soak::track),
    (5, Soak::harvest),
    (1, Soak::untrack),
    (2, Soak::flushing),
    (3, Soak::flush),
    (3, Soak::poll),
    (2, Soak::place),
    (3, Soak::move_tables),
];

/// What is said of an operation: done, or why not and whether that was to be expected.
type Said = Result<(), (String, bool)>;

/// An error that only a fault that was armed explains.
fn said<T, E: std::error::Error>(result: Result<T, E>) -> Said {
    result.map(drop).map_err(|cause| (sentence(&cause), false))
}

impl Soak {
    /// Makes one operation.
    pub(crate) fn step(&mut self) {
        let all: u64 = OPERATIONS.iter().map(|(weight, _)| weight).sum();
        let mut nth = self.random.below(all);
        for (weight, operation) in OPERATIONS {
            if nth < weight {
                return operation(self);
            }
            nth -= weight;
        }
    }

    /// Perhaps something is to fail in what comes next.
    fn arm(&mut self) {
        if self.random.below(ARMED) == 0 {
            let fault = Fault::ALL[self.random.below(4) as usize];
            self.world.faults.arm(fault, self.random.below(6));
        }
    }

    /// Some area, if there is one that `suits`.
    pub(crate) fn some_area(&mut self, suits: impl Fn(&ioas::Area) -> bool) -> Option<Span<Iova>> {
        let ranges = self.world.space.areas().into_iter().filter(suits);
        let ranges: Vec<Span<Iova>> = ranges.map(|area| area.range()).collect();
        let nth = self.random.below(ranges.len().max(1) as u64);
        ranges.get(nth as usize).copied()
    }

    /// Some part of `range`, in whole pages.
    pub(crate) fn some_part<A>(&mut self, range: Span<A>) -> Span<A> {
        let all = range.len / PAGE;
        let first = self.random.below(all);
        let most = (all - first).min(1 << self.random.below(10));
        let count = 1 + self.random.below(most);
        Span::new(range.start + first * PAGE, count * PAGE)
    }

    fn map(&mut self) {
        let which = self.random.below(MEMORIES) as usize;
        let large = 512;
        let (unit, most) = match self.random.below(8) {
            0 => (large, 4),
            1..=3 => (1, 600),
            _ => (1, 20),
        };
        let all = MEMORY / PAGE;
        let count = unit * (1 + self.random.below(most));
        let first = self.random.below((all - count) / unit + 1) * unit;
        let mut at = self.random.below(PAGES - count - large);
        // Half of them so that large leaves are possible.
        if self.random.below(2) == 0 {
            at = at / large * large + first % large;
        }
        let write = self.random.below(4) > 0;
        let prot = if write { Prot::RW } else { Prot::READ };
        let range = Span::new(IOVA + at * PAGE, count * PAGE);
        let part = Span::new(first * PAGE, range.len);
        let free = self.world.is_free(range);
        self.arm();
        let result = self.world.map(range.start, which, part, prot, &mut ());
        let expected = match &result {
            Err(MapError::Overlap { .. }) => !free,
            Err(MapError::OverLimit(_)) => free,
            _ => false,
        };
        let what = format!("{range} to memory {which} from {:#x}, {prot}", part.start);
        let said = result.map_err(|cause| (sentence(&cause), expected));
        self.note("map", &what, said);
    }

    fn unmap(&mut self) {
        let Some(mut range) = self.some_area(|_| true) else {
            return;
        };
        // With a hole in it perhaps.
        if let Some(other) = self.some_area(|_| true)
            && self.random.below(4) == 0
        {
            let last = range.last().max(other.last());
            range.start = range.start.min(other.start);
            range.len = last - range.start + 1;
        }
        if range.len > 1024 * PAGE && self.random.below(4) > 0 {
            return;
        }
        self.arm();
        let result = self.world.unmap(range, |space| space.unmap(range, &mut ()));
        self.note("unmap", &range.to_string(), said(result));
    }

    fn unmap_cutting(&mut self) {
        let whole = match self.random.below(3) {
            0 => None,
            _ => self.some_area(|_| true),
        };
        let range = self.some_part(whole.unwrap_or(self.world.range()));
        self.arm();
        let result = self
            .world
            .unmap(range, |space| space.unmap_cutting(range, INTACT, &mut ()));
        self.note("unmap cutting", &range.to_string(), said(result));
    }

    fn take_out(&mut self) {
        let Some(area) = self.some_area(|area| !area.is_out()) else {
            return;
        };
        let range = self.some_part(area);
        self.arm();
        let result = self.world.take_out(range);
        self.note("take out", &range.to_string(), said(result));
    }

    fn put_back(&mut self) {
        let Some(range) = self.some_area(ioas::Area::is_out) else {
            return;
        };
        self.arm();
        let result = self.world.put_back(range);
        let expected = matches!(result, Err(MapError::OverLimit(_)));
        let said = result.map_err(|cause| (sentence(&cause), expected));
        self.note("put back", &range.to_string(), said);
    }

    fn attach(&mut self) {
        let number = self.random.below(DEVICES) as usize;
        let was = self.world.is_attached(number);
        self.arm();
        let result = self.world.attach(number);
        let expected = match &result {
            Err(AttachError::Unit(_)) => was,
            Err(AttachError::Replay { cause, .. }) => matches!(cause, MapError::OverLimit(_)),
            _ => false,
        };
        if self.world.tracks() {
            self.world.blur();
        }
        let said = result.map_err(|cause| (sentence(&cause), expected));
        self.note("attach", &format!("device {number}"), said);
    }

    fn detach(&mut self) {
        let number = self.random.below(DEVICES) as usize;
        self.detach_one(number);
    }

    fn detach_one(&mut self, number: usize) {
        if self.world.is_attached(number) {
            let result = self.world.detach(number);
            self.note("detach", &format!("device {number}"), said(result));
        }
    }

    /// Runs of the guest's memory, as a balloon tells them: they ascend and do not touch.
    fn some_runs(&mut self) -> Vec<Span<GuestAddr>> {
        let number = self.random.below(MEMORIES);
        let whole = Span::new(number * GUEST, MEMORY);
        let mut runs: Vec<Span<GuestAddr>> = (0..1 + self.random.below(4))
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
        let kept = self.world.release(&runs);
        self.moved("inflate", &runs, kept.first());
    }

    /// The balloon gives memory back. That may find the limit reached, when no device was there to keep the charge.
    fn deflate(&mut self) {
        let runs = self.some_runs();
        self.arm();
        let failed = self.world.restore(&runs);
        self.moved("deflate", &runs, failed.first());
    }

    fn moved(
        &mut self,
        name: &'static str,
        runs: &[Span<GuestAddr>],
        stayed: Option<&(Span<GuestAddr>, virtio_balloon::Reason)>,
    ) {
        let said = match stayed {
            None => Ok(()),
            Some((span, why)) => Err((format!("{span} stays as it was: {why:?}"), false)),
        };
        self.note(name, &format!("{runs:?}"), said);
    }

    fn track(&mut self) {
        if self.world.tracks() {
            return;
        }
        let leaf = (self.random.below(4) > 0).then_some(PAGE);
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
        self.arm();
        let (found, failed) = match self.world.harvest() {
            Ok(found) => found,
            Err(cause) => return self.world.scene.complain(sentence(&cause)),
        };
        let said = match (failed, found.blind) {
            (Some(cause), _) => Err((sentence(&cause), false)),
            (None, true) => Err(("some unit is blind".into(), false)),
            (None, false) => Ok(()),
        };
        self.note("harvest", "", said);
        let (missed, more) = (found.missed, found.more);
        if (missed, more) != (0, 0) {
            let text = format!("a harvest misses {missed} pages, and has {more} too many");
            self.world.scene.complain(text);
        }
    }

    fn flushing(&mut self) {
        let lazy = self.random.below(2) == 0;
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
        let placement = all[self.random.below(3) as usize];
        let placed = self.world.space.set_placement(placement);
        self.note("place", &format!("{placement:?}"), said(placed));
    }

    fn move_tables(&mut self) {
        let places = self.world.space.places().into_iter();
        let domains: Vec<u32> = places.filter_map(|place| place.number).collect();
        let nth = self.random.below(domains.len().max(1) as u64) as usize;
        let Some(domain) = domains.get(nth).map(|id| DomainId(*id)) else {
            return;
        };
        let node = NodeId(self.random.below(2) as u32);
        self.arm();
        let result = self.world.space.move_tables(domain, Some(node));
        if self.world.tracks() {
            self.world.blur();
        }
        let what = format!("of domain {}", domain.0);
        self.note("move tables", &what, said(result));
    }

    /// All goes: devices, then areas.
    pub(crate) fn clear(&mut self) {
        (0..DEVICES as usize).for_each(|number| self.detach_one(number));
        let window = self.world.range();
        let result = self.world.unmap(window, |space| space.unmap_all(&mut ()));
        self.note("unmap all", &window.to_string(), said(result));
    }
}
