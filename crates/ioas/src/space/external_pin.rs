//! Pages that a user in this process holds: an emulated device, a copy engine.
//!
//! An [`ExternalPin`] holds the memory behind a range of device addresses. The pages are pinned
//! already, or, without a domain, are pinned for it; in either case once, and charged once. It says
//! which parts of which memory they are, and keeps them pinned also when the area goes.
//!
//! Held pages are counted by device address. One look-up finds the lowest address in a range that is held, and goes on
//! from there in order, however the pins were made.
//!
//! Ranges held to write to count as dirty at each harvest, and so do ranges that were dropped since the last one: when
//! their user wrote last is not known.
//!
//! # Dropping pins on request
//!
//! A pin either [keeps](WhenUnmapped::Keeps) its pages when their area is unmapped, or its user must
//! [drop it](WhenUnmapped::Drops). In the second case an unmap asks all users that the address space
//! knows, before it changes anything, as often as [`ROUNDS`], and fails when the pages are still held
//! then.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem;

use iopt::{Aperture, Prot};
use runs::{Iova, Offset, Span};

use crate::lock::Mutex;
use crate::memory::{Hold, Memory};
use crate::ranges::extents::Extent;
use crate::ranges::range_map::RangeMap;
use crate::space::Ioas;
use crate::space::error::{MapError, UnmapError};
use crate::space::operation::{Panicked, State};

/// Requests to users to drop pins before an unmap fails.
pub const ROUNDS: u32 = 10;

/// A user of external pins, which can be asked to drop them.
pub trait PinUser: Send + Sync {
    /// `range` is to be unmapped: drop the pins in it, now or soon. This is round `round` from 0 on;
    /// when it returns and pages are still held, the next one follows. Waiting is up to the user,
    /// here, and must have an end.
    fn drop_pins(&self, range: Span<Iova>, round: u32);
}

/// Fate of an external pin when its area is unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenUnmapped {
    /// The user drops it: until then nothing is unmapped.
    Drops,
    /// It stays: the pages are pinned and charged until it is dropped.
    Keeps,
}

/// Number of users that hold an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    must_go: u64,
    keep: u64,
    /// Users, of both counts, that may write.
    writers: u64,
    /// It was written to, or could be, by a user that does not hold it any more, since it was harvested.
    written: bool,
}

#[derive(Debug, Default)]
struct Counts {
    range_map: RangeMap<Iova, Count>,
    /// A dropped pin leaves a mark of what its user could write to.
    tracks: bool,
}

/// External pins of an address space.
#[derive(Default)]
pub(crate) struct Externals {
    counts: Mutex<Counts>,
    users: Mutex<Vec<Arc<dyn PinUser>>>,
}

/// A range of device addresses whose memory stays pinned until this is dropped.
#[must_use = "the memory is released as soon as this is dropped"]
pub struct ExternalPin {
    externals: Arc<Externals>,
    range: Span<Iova>,
    when: WhenUnmapped,
    writes: bool,
    /// In the order of device addresses.
    holds: Vec<Hold>,
}

impl ExternalPin {
    /// The device addresses.
    pub const fn range(&self) -> Span<Iova> {
        self.range
    }

    /// The memory behind them, in order.
    pub fn holds(&self) -> &[Hold] {
        &self.holds
    }
}

impl fmt::Debug for ExternalPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalPin")
            .field("range", &self.range)
            .field("when", &self.when)
            .finish_non_exhaustive()
    }
}

impl Drop for ExternalPin {
    fn drop(&mut self) {
        self.externals.count(self.range, self.when, self.writes, -1);
    }
}

/// Failure to hold a range.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExternalPinError {
    /// It is empty or ends beyond 2^64.
    #[error("{0} is empty or ends beyond 2^64")]
    Range(Span<Iova>),
    /// Some of it is in no area, taken out, or released.
    #[error("{at:#x} in {range} is not mapped")]
    NotThere {
        /// The range.
        range: Span<Iova>,
        /// The first such address.
        at: u64,
    },
    /// It is to be written to, and an area does not permit that.
    #[error("the area {area} permits {has}, not {asked}")]
    Prot {
        /// The area.
        area: Span<Iova>,
        /// Access that the area permits.
        has: Prot,
        /// Requested access.
        asked: Prot,
    },
    /// The memory cannot be pinned.
    #[error(transparent)]
    Memory(MapError),
    /// An operation on some of it has panicked, and its range stays taken until the address space is closed.
    #[error("an operation on {range} has panicked")]
    Panicked {
        /// The range of that operation.
        range: Span<Iova>,
    },
}

impl From<Panicked> for ExternalPinError {
    fn from(Panicked(range): Panicked) -> Self {
        Self::Panicked { range }
    }
}

impl Externals {
    fn count(&self, range: Span<Iova>, when: WhenUnmapped, writes: bool, by: i64) {
        let mut counts = self.counts.lock();
        let Counts { range_map, tracks } = &mut *counts;
        range_map.change(range, |count| {
            let pins = match when {
                WhenUnmapped::Drops => &mut count.must_go,
                WhenUnmapped::Keeps => &mut count.keep,
            };
            *pins = pins.saturating_add_signed(by);
            if writes {
                count.writers = count.writers.saturating_add_signed(by);
                count.written |= *tracks && by < 0;
            }
        });
    }

    /// The lowest stretch in `range` that is held and of which `wanted` is true.
    fn first(&self, range: Span<Iova>, wanted: impl Fn(&Count) -> bool) -> Option<Span<Iova>> {
        let counts = self.counts.lock();
        let mut held = counts.range_map.inside(range);
        held.find(|(_, count)| wanted(count)).map(|(span, _)| span)
    }

    pub(crate) fn first_pinned(&self, range: Span<Iova>) -> Option<Span<Iova>> {
        self.first(range, |count| count.must_go > 0 || count.keep > 0)
    }

    /// Begins or ends to note what is written to.
    pub(crate) fn track(&self, on: bool) {
        let mut counts = self.counts.lock();
        counts.tracks = on;
        for half in Aperture::zeros(64).spans() {
            counts.range_map.change(half, |count| count.written = false);
        }
    }

    /// Notes that `range` was written to.
    pub(crate) fn note_written(&self, range: Span<Iova>) {
        let mut counts = self.counts.lock();
        if counts.tracks {
            counts.range_map.change(range, |count| count.written = true);
        }
    }

    /// Calls `each` for what of `range` was written to, or may be.
    pub(crate) fn written(&self, range: Span<Iova>, each: impl FnMut(Span<Iova>)) {
        let counts = self.counts.lock();
        let all = counts.range_map.inside(range);
        let written = all.filter(|(_, count)| count.written || count.writers > 0);
        written.map(|(span, _)| span).for_each(each);
    }

    /// The same, after which only what is still held to write to is left.
    pub(crate) fn take_written(&self, range: Span<Iova>, each: &mut dyn FnMut(Span<Iova>)) {
        self.counts
            .lock()
            .range_map
            .change_each(range, |span, count| {
                if mem::take(&mut count.written) || count.writers > 0 {
                    each(span);
                }
            });
    }

    /// The same of all between `first` and `last`, both included.
    pub(crate) fn take_written_between(
        &self,
        first: u64,
        last: u64,
        each: &mut dyn FnMut(Span<Iova>),
    ) {
        for half in Aperture::zeros(64).spans() {
            let here = Span::inclusive(half.start.max(first), half.last().min(last));
            here.into_iter()
                .for_each(|here| self.take_written(here, each));
        }
    }

    /// Has users drop their pins in `range`.
    pub(crate) fn drop_pins(&self, range: Span<Iova>) -> Result<(), UnmapError> {
        let must_go = |count: &Count| count.must_go > 0;
        for round in 0..ROUNDS {
            if self.first(range, must_go).is_none() {
                return Ok(());
            }
            // Not under the lock: users drop pins in there.
            let users = self.users.lock().clone();
            users.iter().for_each(|user| user.drop_pins(range, round));
        }
        match self.first(range, must_go) {
            None => Ok(()),
            Some(held) => Err(UnmapError::Held { range, held }),
        }
    }
}

impl Ioas {
    /// Makes `user` one of those that are asked to drop pins.
    pub fn add_pin_user(&self, user: Arc<dyn PinUser>) {
        self.externals.users.lock().push(user);
    }

    /// Stops asking `user`. Its pins stay until they are dropped.
    pub fn remove_pin_user(&self, user: &Arc<dyn PinUser>) {
        let mut users = self.externals.users.lock();
        users.retain(|other| !Arc::ptr_eq(other, user));
    }

    /// Holds the memory behind `range` for a user in this process that reads it, or also writes to
    /// it if `prot` says so. Ranges may overlap as they like.
    ///
    /// # Errors
    ///
    /// See [`ExternalPinError`]. Nothing is held then.
    pub fn pin(
        &self,
        range: Span<Iova>,
        prot: Prot,
        when: WhenUnmapped,
    ) -> Result<ExternalPin, ExternalPinError> {
        let core = self.gate.read();
        let op = self.op(&core);
        if Span::<Iova>::checked(range.start, range.len).is_none() {
            return Err(ExternalPinError::Range(range));
        }
        let named = [Extent::of(range)];
        let (claim, parts) = op.take(|_| named, |state| state.parts_to_pin(range, prot))?;
        claim.run(|_| {
            let holds = parts.into_iter();
            let holds = holds.map(|(memory, part)| memory.hold(part, &mut ()));
            let holds = holds
                .collect::<Result<_, _>>()
                .map_err(ExternalPinError::Memory)?;
            let writes = prot.contains(Prot::WRITE);
            self.externals.count(range, when, writes, 1);
            Ok(ExternalPin {
                externals: Arc::clone(&self.externals),
                range,
                when,
                writes,
                holds,
            })
        })
    }

    /// The lowest stretch of `range` that external pins hold, up to where the number of pins
    /// changes. Who asks again from its end on finds the next.
    pub fn first_pinned(&self, range: Span<Iova>) -> Option<Span<Iova>> {
        self.externals.first_pinned(range)
    }
}

/// A part of a memory.
type PartOf = (Arc<Memory>, Span<Offset>);

impl State {
    /// The parts of memory behind `range`, in order.
    fn parts_to_pin(&self, range: Span<Iova>, prot: Prot) -> Result<Vec<PartOf>, ExternalPinError> {
        let mut parts = Vec::new();
        let mut at = Some(range.start);
        for (span, area) in self.areas.0.overlapping(range.start, range.last()) {
            let Some(here) = span.intersection(&range) else {
                continue;
            };
            if at != Some(here.start) || !area.is_there() {
                break;
            }
            if !area.prot().contains(prot) {
                let (area, has, asked) = (span, area.prot(), prot);
                return Err(ExternalPinError::Prot { area, has, asked });
            }
            let offset = area.offset + (here.start - span.start);
            parts.push((Arc::clone(&area.memory), Span::new(offset, here.len)));
            at = here.last().checked_add(1);
        }
        if at != range.last().checked_add(1) {
            let at = at.unwrap_or(range.start);
            return Err(ExternalPinError::NotThere { range, at });
        }
        Ok(parts)
    }
}
