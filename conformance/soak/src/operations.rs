//! The operations, each with what the model says of it.

use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ioas::{AttachError, Flushing, MapError, Placement, Tracking, UnmapError};
use iommu::{DomainId, NodeId, Unit};
use iopt::{Interruption, Pending, Prot};
use runs::Span;

use crate::hardware::{DEVICES, UNITS, device};
use crate::model::Page;
use crate::scene::Attached;
use crate::world::{World, sentence};
use crate::{IOVA, MEMORIES, MEMORY, PAGE, PAGES};

const INTACT: Interruption = Interruption::Refused;
/// What may wait for a lazy flush.
const LAZY: Flushing = Flushing::Lazy {
    holds: 24,
    age: Duration::from_millis(40),
    now,
};

fn now() -> Duration {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed()
}

/// An operation, and how often it comes.
type Operation = (u64, fn(&mut World));

const OPERATIONS: [Operation; 17] = [
    (30, World::map),
    (10, World::unmap),
    (12, World::unmap_cutting),
    (7, World::take_out),
    (7, World::put_back),
    (8, World::inflate),
    (8, World::deflate),
    (6, World::attach),
    (3, World::detach),
    (2, World::track),
    (5, World::harvest),
    (1, World::untrack),
    (2, World::flushing),
    (3, World::flush),
    (3, World::poll),
    (2, World::place),
    (3, World::move_tables),
];

fn unmapped(cause: &UnmapError) -> bool {
    matches!(cause, UnmapError::Flush(_) | UnmapError::Unpin(_))
}

impl World {
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

    fn map(&mut self) {
        let which = self.random.below(MEMORIES as u64) as usize;
        let large = 512;
        let (unit, most) = match self.random.below(8) {
            0 => (large, 4),
            1..=3 => (1, 600),
            _ => (1, 20),
        };
        let all = MEMORY / PAGE;
        let count = unit * (1 + self.random.below(most));
        let first = self.random.below((all - count) / unit + 1) * unit;
        // Half of them so that large leaves are possible.
        let align = if self.random.below(2) == 0 { large } else { 1 };
        let at = self.random.below(PAGES as u64 - count - large);
        let at = if align > 1 {
            at / align * align + first % align
        } else {
            at
        };
        let write = self.random.below(4) > 0;
        let prot = if write { Prot::RW } else { Prot::READ };
        let range = Span::new(IOVA + at * PAGE, count * PAGE);
        let part = Span::new(first * PAGE, count * PAGE);
        let pages = Self::pages_of(range);
        let free = self.model.is_free(pages.clone());
        if free {
            self.moving(pages.clone());
        }
        self.arm();
        let memory = Arc::clone(&self.memories[which]);
        let result = self.space.map(range.start, &memory, part, prot, &mut ());
        let done = result.is_ok();
        let expected = match &result {
            Err(MapError::Overlap { .. }) => !free,
            Err(MapError::OverLimit(_)) => free,
            _ => false,
        };
        let what = format!("{range} to memory {which} from {:#x}, {prot}", part.start);
        if done && !free {
            self.scene.complain(format!("map {what}: over an area"));
        }
        let said = result.map_err(|cause| (sentence(&cause), expected));
        self.note("map", &what, said);
        if done {
            let memory = (which as u64 * all + first) as u32;
            for (n, page) in pages.clone().enumerate() {
                let memory = memory + n as u32;
                self.model.pages[page] = Some(Page {
                    memory,
                    write,
                    out: false,
                    released: false,
                });
            }
        }
        if free {
            self.settle(pages);
        }
    }

    fn gone(&mut self, name: &'static str, range: Span, result: Result<(), UnmapError>) {
        let pages = Self::pages_of(range);
        if result.as_ref().map_or_else(unmapped, |()| true) {
            self.model.pages[pages.clone()].fill(None);
        }
        let said = result.map_err(|cause| (sentence(&cause), false));
        self.note(name, &range.to_string(), said);
        self.settle(pages);
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
        self.moving(Self::pages_of(range));
        self.arm();
        let result = self.space.unmap(range, &mut ()).map(|_| ());
        self.gone("unmap", range, result);
    }

    fn unmap_cutting(&mut self) {
        let window = Span::new(IOVA, PAGES as u64 * PAGE);
        let whole = match self.random.below(3) {
            0 => window,
            _ => self.some_area(|_| true).unwrap_or(window),
        };
        let range = self.some_part(whole);
        self.moving(Self::pages_of(range));
        self.arm();
        let result = self.space.unmap_cutting(range, INTACT, &mut ());
        self.gone("unmap cutting", range, result.map(|_| ()));
    }

    fn take_out(&mut self) {
        let Some(area) = self.some_area(|area| !area.is_out()) else {
            return;
        };
        let range = self.some_part(area);
        let pages = Self::pages_of(range);
        self.moving(pages.clone());
        self.arm();
        let result = self.space.take_out(range, INTACT, &mut ());
        if result.as_ref().map_or_else(unmapped, |_| true) {
            self.model.change(pages.clone(), |page| page.out = true);
        }
        let said = result.map_err(|cause| (sentence(&cause), false));
        self.note("take out", &range.to_string(), said.map(|_| ()));
        self.settle(pages);
    }

    fn put_back(&mut self) {
        let Some(range) = self.some_area(ioas::Area::is_out) else {
            return;
        };
        let pages = Self::pages_of(range);
        self.moving(pages.clone());
        self.arm();
        let result = self.space.put_back(range, INTACT, &mut ());
        if result.is_ok() {
            self.model.change(pages.clone(), |page| page.out = false);
        }
        let expected = matches!(result, Err(MapError::OverLimit(_)));
        let said = result.map_err(|cause| (sentence(&cause), expected));
        if !self.note("put back", &range.to_string(), said) {
            self.learn(&pages.clone().collect::<Vec<_>>());
        }
        self.settle(pages);
    }

    fn attach(&mut self) {
        let number = self.random.below(DEVICES as u64) as usize;
        let was = self.model.attached[number];
        if !was {
            self.scene.attached(number, Attached::Changing);
        }
        self.arm();
        let unit = Arc::clone(&self.rigged[number % UNITS.len()]) as Arc<dyn Unit>;
        let result = self.space.attach((unit, device(number)));
        let done = result.is_ok();
        let expected = match &result {
            Err(AttachError::Unit(_)) => was,
            Err(AttachError::Replay { cause, .. }) => matches!(cause, MapError::OverLimit(_)),
            _ => false,
        };
        if self.dirty.is_on() {
            self.dirty.blur();
        }
        self.model.attached[number] |= done;
        let said = result.map_err(|cause| (sentence(&cause), expected));
        self.note("attach", &format!("device {number}"), said);
        let now = match self.model.attached[number] {
            true => Attached::Yes,
            false => Attached::No,
        };
        self.scene.attached(number, now);
        self.settle([]);
    }

    fn detach(&mut self) {
        let number = self.random.below(DEVICES as u64) as usize;
        if self.model.attached[number] {
            self.detach_one(number);
        }
    }

    fn detach_one(&mut self, number: usize) {
        self.scene.attached(number, Attached::Changing);
        let result = self.space.detach(device(number));
        let done = result.is_ok();
        let said = result.map_err(|cause| (sentence(&cause), false));
        self.note("detach", &format!("device {number}"), said);
        if done {
            self.model.attached[number] = false;
            self.scene.attached(number, Attached::No);
        }
        self.settle([]);
    }

    fn track(&mut self) {
        if self.dirty.is_on() {
            return;
        }
        let leaf = (self.random.below(4) > 0).then_some(PAGE);
        self.arm();
        let tracking = Tracking {
            leaf,
            interruption: INTACT,
        };
        let result = self.space.track_dirty(tracking);
        if result.is_ok() {
            // Marks from before are worth nothing.
            drop((self.scene.take_written(), self.scene.take_perhaps_written()));
            self.dirty.begin(leaf.is_none());
        }
        let said = result.map_err(|cause| (sentence(&cause), false));
        self.note("track", &format!("{leaf:?}"), said);
    }

    fn untrack(&mut self) {
        if self.dirty.is_on() {
            self.arm();
            self.space.untrack_dirty();
            self.dirty.end();
            self.note("untrack", "", Ok(()));
        }
    }

    fn harvest(&mut self) {
        if !self.dirty.is_on() {
            return;
        }
        let window = Span::new(IOVA, PAGES as u64 * PAGE);
        let Ok(mut pending) = Pending::new(vec![0; PAGES / 64], window, PAGE) else {
            return self.scene.complain("no bitmap".into());
        };
        let sure = self.scene.take_written();
        self.arm();
        let result = self.space.harvest(&mut pending);
        let blind = result.as_ref().is_ok_and(|found| found.blind);
        let said = match (result, blind) {
            (Err(cause), _) => Err((sentence(&cause), false)),
            (_, true) => Err(("some unit is blind".into(), false)),
            _ => Ok(()),
        };
        let shown = self.space.show(&mut pending).map(drop);
        let said = said.and(shown.map_err(|cause| (sentence(&cause), false)));
        self.note("harvest", "", said);
        // Once more, without a fault: nothing of it is lost.
        let found = match self.space.show(&mut pending) {
            Ok(shown) => shown.words().to_vec(),
            Err(cause) => return self.scene.complain(format!("show: {cause}")),
        };
        let perhaps = self.scene.take_perhaps_written();
        let (missed, more) = self.dirty.judge(&sure, perhaps, found);
        if (missed, more) != (0, 0) {
            let text = format!("a harvest misses {missed} pages, and has {more} too many");
            self.scene.complain(text);
        }
    }

    fn flushing(&mut self) {
        let lazy = self.random.below(2) == 0;
        let flushing = if lazy { LAZY } else { Flushing::Strict };
        self.space.set_flushing(flushing);
        self.note("flushing", if lazy { "lazy" } else { "strict" }, Ok(()));
    }

    fn flush(&mut self) {
        self.arm();
        let result = self.space.flush().map(|_| ());
        let said = result.map_err(|cause| (sentence(&cause), false));
        self.note("flush", "", said);
        self.settle([]);
    }

    fn poll(&mut self) {
        self.arm();
        let result = self.space.poll().map(|_| ());
        let said = result.map_err(|cause| (sentence(&cause), false));
        self.note("poll", "", said);
        self.settle([]);
    }

    fn place(&mut self) {
        let all = [
            Placement::Shared,
            Placement::PerNode,
            Placement::Near(NodeId(1)),
        ];
        let placement = all[self.random.below(3) as usize];
        let placed = self.space.set_placement(placement);
        let said = placed.map_err(|cause| (sentence(&cause), false));
        self.note("place", &format!("{placement:?}"), said);
    }

    fn move_tables(&mut self) {
        let places = self.space.places().into_iter();
        let domains: Vec<u32> = places.filter_map(|place| place.number).collect();
        let nth = self.random.below(domains.len().max(1) as u64) as usize;
        let Some(domain) = domains.get(nth).map(|id| DomainId(*id)) else {
            return;
        };
        let node = NodeId(self.random.below(2) as u32);
        self.arm();
        let result = self.space.move_tables(domain, Some(node));
        if self.dirty.is_on() {
            self.dirty.blur();
        }
        let said = result.map_err(|cause| (sentence(&cause), false));
        self.note("move tables", &format!("of domain {}", domain.0), said);
        self.settle([]);
    }

    /// All goes: devices, then areas.
    pub(crate) fn clear(&mut self) {
        for number in 0..DEVICES {
            if self.model.attached[number] {
                self.detach_one(number);
            }
        }
        self.moving(0..PAGES);
        let result = self.space.unmap_all(&mut ()).map(|_| ());
        let window = Span::new(IOVA, PAGES as u64 * PAGE);
        self.gone("unmap all", window, result);
    }
}
