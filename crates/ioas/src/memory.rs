//! Memory with its pins: pinned once and charged once, whoever uses it.
//!
//! A [`Memory`] is a [`MemoryObject`] with an account. Areas of any address spaces, and whoever
//! else reads or writes its pages for a device, take a [`Hold`] of a part. The first hold of a byte
//! has it pinned and charged, the last one gone has it unpinned and its charge given back; those
//! between cost a count. So memory that is mapped twice, or copied into another address space of the
//! same owner, is pinned and charged once.
//!
//! Pins belong to the memory and not to areas. So an area can be cut without touching a pin, and an
//! external pin can outlive its area. A hold reads its runs also where several pins cover it.
//!
//! # How it is kept
//!
//! *Parts* are disjoint stretches of the object, each with the number of its users and the pin that
//! holds it; neighbours of the same pin and number are one part. A pin may hold several parts. When
//! the last user of a part goes, the pin gives back that part, or, if it was the last, ends.
//!
//! A part may also be *reserved*: it keeps its charge when its last user goes, and whoever holds it
//! next takes that (see `reserved.rs`).
//!
//! A new hold pins what nobody holds yet: usually all of it, in one pin. Its charge is one step.
//! Nothing is noted before all of it has succeeded, so that a failure, or a panic of an observer,
//! leaves what was there.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

use runs::{Offset, Pa, Span};

use crate::error::MapError;
use crate::ledger::{Charge, Forecast, Ledger};
use crate::lock::Mutex;
use crate::object::{Cause, MemoryObject, Pinned, RunReader};
use crate::observer::{Observer, Step, observed};
use crate::range_map::RangeMap;
pub(crate) use crate::reserved::Reserved;

/// A memory object with its pins and the account that they are charged to.
///
/// The first hold of a byte, by an area or an external pin, has it pinned and charged; the last one
/// gone has it unpinned and its charge given back.
#[derive(Debug)]
pub struct Memory {
    object: Arc<dyn MemoryObject>,
    ledger: Arc<Ledger>,
    pins: Mutex<Pins>,
}

#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// By offset in the object.
    pub(crate) parts: RangeMap<Offset, Part>,
    /// Pins, by number.
    held: Vec<Option<Held>>,
    /// Numbers that are free.
    free: Vec<usize>,
    /// The charge of parts that are reserved and that nobody holds.
    pub(crate) reserve: Option<Charge>,
    /// Bytes that are reserved, each as often as it is.
    pub(crate) reservations: u64,
}

/// Without users: nobody holds it, and there is no pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) users: u64,
    pub(crate) reserved: u64,
    pin: usize,
}

/// Memory that is pinned and charged.
///
/// Dropped, it is unpinned first and its charge given back after that: the order of the fields.
#[derive(Debug)]
struct Held {
    pin: Box<dyn Pinned>,
    charge: Charge,
    /// Bytes that have users.
    used: u64,
}

impl Memory {
    /// `object`, whose pins are charged to `ledger`. Nothing is pinned yet.
    pub fn new(object: Arc<dyn MemoryObject>, ledger: &Arc<Ledger>) -> Arc<Self> {
        Arc::new(Self {
            object,
            ledger: Arc::clone(ledger),
            pins: Mutex::default(),
        })
    }

    /// The object.
    pub fn object(&self) -> &Arc<dyn MemoryObject> {
        &self.object
    }

    pub(crate) const fn pins(&self) -> &Mutex<Pins> {
        &self.pins
    }

    /// The account.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.object.len()
    }

    /// True when it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.object.is_empty()
    }

    /// Bytes that are held, each counted once.
    pub fn held(&self) -> u64 {
        let pins = self.pins.lock();
        pins.held.iter().flatten().map(|held| held.used).sum()
    }

    /// The first stretch of `part` (offset and length in bytes) that is held, by an area of any address
    /// space or an external pin. What back ends of a kernel pin by themselves is not known here.
    pub fn first_held(&self, part: Span<Offset>) -> Option<Span<Offset>> {
        let pins = self.pins.lock();
        let mut parts = pins.parts.inside(part);
        parts.find(|(_, part)| part.users > 0).map(|(span, _)| span)
    }

    /// Bytes that are charged for it, also those that are only [reserved](Self::reserved).
    pub fn charged(&self) -> u64 {
        let pins = self.pins.lock();
        let held = pins.held.iter().flatten().map(|held| &held.charge);
        held.chain(&pins.reserve).map(Charge::bytes).sum()
    }

    /// Whether the limit permits to hold `part` (offset and length in bytes), before anything is
    /// touched: what is held already, or lies outside the object, costs nothing, and what is reserved
    /// no more than was kept for it.
    pub fn forecast(&self, part: Span<Offset>) -> Forecast {
        self.forecast_times(part, None)
    }

    /// The same for an address space that charges each mapping so many
    /// [`times`](crate::Backend::times_charged), whoever else holds the memory.
    pub(crate) fn forecast_times(&self, part: Span<Offset>, times: Option<u64>) -> Forecast {
        let inside = Span::new(0, self.len()).intersection(&part);
        let needed = inside.map_or(0, |part| match times {
            Some(times) => self.charge_of_mapping(part).saturating_mul(times),
            None => {
                let pins = self.pins.lock();
                let needed = self.charge(&pins.unheld(part));
                needed.saturating_sub(self.kept(&pins, part))
            }
        });
        self.ledger.forecast(needed)
    }

    /// What is kept for `part` alone.
    fn kept(&self, pins: &Pins, part: Span<Offset>) -> u64 {
        let object = &*self.object;
        let all = pins.kept_for(part, object);
        let kept = all.saturating_sub(pins.kept_beside(part, object));
        kept.min(pins.reserve.as_ref().map_or(0, Charge::bytes))
    }

    /// What a kernel that charges each mapping for itself charges for one of `part`.
    pub(crate) fn charge_of_mapping(&self, part: Span<Offset>) -> u64 {
        self.object.charge_of_mapping(part)
    }

    fn charge(&self, parts: &[Span<Offset>]) -> u64 {
        let charges = parts.iter().map(|part| self.object.charge(*part));
        charges.fold(0, u64::saturating_add)
    }

    /// Holds `part`, of which nobody but the caller has checked that it lies in the object: charges
    /// and pins what nobody holds yet, all or nothing.
    pub(crate) fn hold(
        self: &Arc<Self>,
        part: Span<Offset>,
        observer: &mut dyn Observer,
    ) -> Result<Hold, MapError> {
        let mut pins = self.pins.lock();
        let gaps = pins.unheld(part);
        let kept = self.kept(&pins, part);
        // Dropped last: what is pinned goes before its charge.
        let mut charge = if gaps.is_empty() {
            Charge::nothing(&self.ledger)
        } else {
            observed(observer, Step::Charge, |_| {
                let bytes = self.charge(&gaps);
                let charge = self.ledger.charge(bytes.saturating_sub(kept));
                Ok::<_, MapError>((charge.map_err(MapError::OverLimit)?, bytes))
            })?
        };
        let mut fresh = Vec::with_capacity(gaps.len());
        if !gaps.is_empty() {
            let mut done = 0;
            observed(observer, Step::Pin, |observer| {
                for gap in &gaps {
                    let mut progress = |here| observer.progress(Step::Pin, done + here);
                    fresh.push((*gap, self.object.pin(*gap, &mut progress)?));
                    done += gap.len;
                }
                Ok::<_, MapError>(((), done))
            })?;
            // Dropping `fresh` gives everything back.
            if observer.progress(Step::Pin, done).is_break() {
                return Err(MapError::Interrupted);
            }
        }
        let kept = pins.draw(kept);
        kept.into_iter().for_each(|kept| charge.join(kept));
        // Usually there is nobody else.
        if gaps != [part] {
            pins.parts
                .change(part, |part| part.users += u64::from(part.users > 0));
        }
        for (gap, pin) in fresh {
            let charge = charge.split(self.object.charge(gap));
            let used = gap.len;
            pins.add(gap, Held { pin, charge, used });
        }
        Ok(Hold {
            memory: Arc::clone(self),
            part,
        })
    }

    /// Lets go of `part`. Returns the bytes that were unpinned, and the first failure.
    fn release(&self, part: Span<Offset>) -> (u64, Option<Cause>) {
        let mut pins = self.pins.lock();
        let before = pins.kept_for(part, &*self.object);
        let mut unused = Vec::new();
        pins.parts.change_each(part, |span, part| {
            if part.users == 1 {
                unused.push((span, mem::take(&mut part.pin)));
            }
            part.users = part.users.saturating_sub(1);
        });
        let mut unpinned = 0;
        let mut failed = None;
        let mut freed = Charge::nothing(&self.ledger);
        for (span, pin) in unused {
            match pins.unpin(span, pin, &mut freed) {
                Ok(bytes) => unpinned += bytes,
                Err(cause) => failed = failed.or(Some(cause)),
            }
        }
        // Where the limit forbids it, less is kept.
        let _ = pins.keep(part, before, &mut freed, &*self.object);
        (unpinned, failed)
    }
}

impl Pins {
    /// Notes a new pin of `span`, with one user.
    fn add(&mut self, span: Span<Offset>, held: Held) {
        let pin = self.free.pop().unwrap_or(self.held.len());
        match self.held.get_mut(pin) {
            Some(place) => *place = Some(held),
            None => self.held.push(Some(held)),
        }
        self.parts
            .change(span, |part| (part.users, part.pin) = (1, pin));
    }

    /// The pin that holds `at`, and how far before `end` it holds what follows.
    fn pin_at(&self, at: u64, end: u64) -> Option<(&dyn Pinned, Span<Offset>)> {
        if at >= end {
            return None;
        }
        let (mut span, first) = self.parts.at(at).filter(|(_, part)| part.users > 0)?;
        let mut until = span.start + span.len;
        while until < end {
            match self.parts.at(until) {
                Some((next, part)) if part.users > 0 && part.pin == first.pin => span = next,
                _ => break,
            }
            until = span.start + span.len;
        }
        let held = self.held.get(first.pin)?.as_ref()?;
        Some((&*held.pin, Span::new(at, until.min(end) - at)))
    }

    /// Gives back the part `span` of a pin, and its charge to `freed`; returns the bytes.
    ///
    /// When that fails nobody knows how much of it is still pinned. The kernel goes on counting
    /// that, and so does the ledger: the charge stays.
    fn unpin(&mut self, span: Span<Offset>, pin: usize, freed: &mut Charge) -> Result<u64, Cause> {
        let Some(place) = self.held.get_mut(pin) else {
            return Ok(0);
        };
        let Some(mut held) = place.take() else {
            return Ok(0);
        };
        held.used -= span.len;
        if held.used == 0 {
            self.free.push(pin);
            let Held { pin, charge, .. } = held;
            return match pin.unpin() {
                Ok(bytes) => {
                    freed.join(charge);
                    Ok(bytes)
                }
                Err(cause) => {
                    charge.keep();
                    Err(cause)
                }
            };
        }
        let released = held.pin.release(span);
        let result = released.map(|charged| {
            let less = held.charge.bytes().saturating_sub(charged);
            freed.join(held.charge.split(less));
            span.len
        });
        *place = Some(held);
        result
    }
}

/// Cuts `part` in two at `offset`, which lies inside; what is behind it is returned.
pub(crate) fn cut(part: &mut Span<Offset>, offset: u64) -> Span<Offset> {
    let len = offset - part.start;
    let tail = Span::new(offset, part.len - len);
    part.len = len;
    tail
}

/// Takes `tail`, which begins where `part` ends, into it and leaves nothing of it.
pub(crate) fn append(part: &mut Span<Offset>, tail: &mut Span<Offset>) {
    debug_assert_eq!(part.start + part.len, tail.start);
    part.len += mem::take(tail).len;
}

/// A part of a [`Memory`] that stays pinned for as long as this is there.
#[derive(Debug)]
#[must_use = "the memory is let go as soon as this is dropped"]
pub struct Hold {
    memory: Arc<Memory>,
    part: Span<Offset>,
}

impl Hold {
    /// The memory.
    pub const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The part: offset and length in bytes.
    pub const fn part(&self) -> Span<Offset> {
        self.part
    }

    /// Has `work` read the physical runs of `part`, which lies in what is held. The memory is locked
    /// meanwhile: who else holds or lets go of it waits.
    pub fn with_runs<T>(
        &self,
        part: Span<Offset>,
        work: impl FnOnce(&mut dyn RunReader) -> T,
    ) -> T {
        let pins = self.memory.pins.lock();
        let part = part.intersection(&self.part).unwrap_or_default();
        work(&mut Runs {
            pins: &pins,
            at: part.start,
            end: part.start + part.len,
            reader: None,
        })
    }

    /// Cuts it in two at `offset` in the object, which lies inside.
    pub(crate) fn split_at(&mut self, offset: u64) -> Self {
        Self {
            memory: Arc::clone(&self.memory),
            part: cut(&mut self.part, offset),
        }
    }

    /// Takes in `other`, which holds what follows in the same memory.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.memory, &other.memory));
        append(&mut self.part, &mut other.part);
    }

    /// Lets go, and says how many bytes that has unpinned.
    pub(crate) fn release(mut self) -> (u64, Option<Cause>) {
        self.memory.release(mem::take(&mut self.part))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Empty: moved into another one, or let go already.
        if !self.part.is_empty() {
            self.memory.release(self.part);
        }
    }
}

/// Reads the runs of a part, pin after pin.
struct Runs<'a> {
    pins: &'a Pins,
    at: u64,
    end: u64,
    reader: Option<Box<dyn RunReader + 'a>>,
}

impl RunReader for Runs<'_> {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        loop {
            if let Some(reader) = &mut self.reader {
                let count = reader.next_batch(out)?;
                if count > 0 {
                    return Ok(count);
                }
                self.reader = None;
            }
            let Some((pin, part)) = self.pins.pin_at(self.at, self.end) else {
                return Ok(0);
            };
            self.reader = Some(pin.runs(part)?);
            self.at += part.len;
        }
    }
}
