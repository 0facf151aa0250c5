//! The operations, by the generator that all rigs share, and which errors of each may come. What they do to the model, the world knows.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ioas::{AttachError, Flushing, MapError, Placement, UnmapError};
use runs::{GuestAddr, Iova, Offset, Span};
use shadow::{Generator, Layout, Map, Operation};
use virtio_balloon::KeepReason;

use crate::mutator::{Mutator, everywhere};
use crate::scenario::{Fault, INTACT, World, sentence};
use crate::{DEVICES, GUEST, MEMORIES, MEMORY};

/// Limits of lazy flushing.
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

/// Parts of a memory, as the guest has them.
fn of_guest(memory: usize, parts: Vec<Span<Offset>>) -> Vec<Span<GuestAddr>> {
    let base = memory as u64 * GUEST;
    let parts = parts.into_iter();
    parts
        .map(|part| Span::new(base + part.start, part.len))
        .collect()
}

/// Result of an operation: done, or why not and whether that was to be expected.
pub(crate) type Said = Result<(), (String, bool)>;

/// An error that only a fault that was armed explains.
fn said<T, E: std::error::Error>(result: Result<T, E>) -> Said {
    result.map(drop).map_err(|cause| (sentence(&cause), false))
}

impl Mutator<'_> {
    /// Makes one operation.
    pub(crate) fn step(&mut self) {
        let region = self.region();
        let world = self.world;
        let layout = Layout {
            iova: everywhere(),
            memories: MEMORIES,
            memory: MEMORY,
            devices: DEVICES,
        };
        let next = Generator {
            space: &world.space,
            layout,
            random: self.random,
        }
        .next(region);
        match next {
            None => {}
            Some(Operation::Map(map)) => self.map(&map),
            Some(Operation::Unmap(range)) => self.unmap(range),
            Some(Operation::UnmapCutting(range)) => self.unmap_cutting(range),
            Some(Operation::TakeOut(range)) => self.take_out(range),
            Some(Operation::PutBack(range)) => self.put_back(range),
            Some(Operation::Release(memory, parts)) => self.inflate(&of_guest(memory, parts)),
            Some(Operation::Restore(memory, parts)) => self.deflate(&of_guest(memory, parts)),
            Some(Operation::Attach(number)) => {
                if let Some(number) = self.mine(number) {
                    self.attach(number);
                }
            }
            Some(Operation::Detach(number)) => {
                if let Some(number) = self.mine(number) {
                    self.detach(number);
                }
            }
            Some(Operation::Track(leaf)) => self.track(leaf),
            Some(Operation::Untrack) => self.untrack(),
            Some(Operation::Harvest(range)) => self.harvest(range),
            Some(Operation::SetLazy(lazy)) => self.flushing(lazy),
            Some(Operation::Flush) => self.flush(),
            Some(Operation::Poll) => self.poll(),
            Some(Operation::Place(placement)) => self.place(placement),
        }
    }

    /// The device of this mutator that comes for `number`, if it has any.
    fn mine(&self, number: usize) -> Option<usize> {
        let mine = (self.number..DEVICES as usize).step_by(self.of);
        mine.clone().nth(number % mine.len().max(1))
    }

    /// Perhaps something is to fail in what comes next.
    fn arm(&mut self) {
        if self.random.u64(..ARMED) == 0 {
            let fault = Fault::ALL[self.random.u64(..4) as usize];
            self.world.faults.arm(fault, self.random.u64(..6));
        }
    }

    /// True if areas begin and end where `range` does, still.
    fn is_whole(&self, range: Span<Iova>) -> bool {
        let at = |at| self.world.space.area_at(at).map(|area| area.range());
        at(range.start).is_some_and(|area| area.start == range.start)
            && at(range.last()).is_some_and(|area| area.last() == range.last())
    }

    fn map(&mut self, map: &Map) {
        let Map {
            range,
            memory: which,
            part,
            prot,
        } = *map;
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

    fn unmap(&mut self, range: Span<Iova>) {
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

    fn unmap_cutting(&mut self, range: Span<Iova>) {
        self.arm();
        let result = self
            .world
            .unmap(range, |space| space.unmap_cutting(range, INTACT));
        self.note("unmap cutting", &range.to_string(), said(result));
    }

    fn take_out(&mut self, range: Span<Iova>) {
        let before = self.world.before(range);
        // Another thread may have cut the area meanwhile.
        let area = self.world.space.area_at(range.start);
        if area.is_none_or(|area| !area.range().covers(&range)) {
            return;
        }
        self.arm();
        let said = self.world.take_out(range).map(drop).map_err(|cause| {
            let hole = matches!(cause, UnmapError::Hole { .. });
            (sentence(&cause), hole && !self.world.was_alone(&before))
        });
        self.note("take out", &range.to_string(), said);
    }

    fn put_back(&mut self, range: Span<Iova>) {
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

    fn attach(&mut self, number: usize) {
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

    fn detach(&self, number: usize) {
        if self.world.is_attached(number) {
            let result = self.world.detach(number);
            self.note("detach", &format!("device {number}"), said(result));
        }
    }

    /// A balloon takes memory: devices release it, then it is discarded.
    fn inflate(&mut self, runs: &[Span<GuestAddr>]) {
        self.arm();
        let (kept, alone) = self.world.release(runs);
        // Some of it was unmapped meanwhile, or another thread has flushed it and is about to unpin it. What stays
        // pinned for longer a look finds.
        let expected = kept.iter().all(|(_, why)| match why {
            KeepReason::NotCut => !alone,
            KeepReason::PinnedElsewhere => self.of > 1,
            _ => false,
        });
        self.moved("inflate", runs, kept.first(), expected);
    }

    /// The balloon gives memory back. That may find the limit reached, when no device was there to keep the charge.
    fn deflate(&mut self, runs: &[Span<GuestAddr>]) {
        self.arm();
        let failed = self.world.restore(runs);
        self.moved("deflate", runs, failed.first(), false);
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

    fn track(&mut self, leaf: Option<u64>) {
        if self.world.tracks() {
            return;
        }
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

    fn harvest(&mut self, range: Span<Iova>) {
        if !self.world.tracks() {
            return;
        }
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

    fn flushing(&self, lazy: bool) {
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

    fn place(&self, placement: Placement) {
        let placed = self.world.space.set_placement(placement);
        self.note("place", &format!("{placement:?}"), said(placed));
    }

    /// All goes: devices, then areas.
    pub(crate) fn clear(&mut self) {
        (0..DEVICES as usize).for_each(|number| self.detach(number));
        let window = everywhere();
        let result = self.world.unmap(window, |space| space.unmap_all());
        self.note("unmap all", &window.to_string(), said(result));
    }
}
