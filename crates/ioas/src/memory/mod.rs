//! Memory with its pins: pinned once and charged once, however many use it.
//!
//! A [`Memory`] is a [`MemoryObject`] with an account. Areas of any address spaces, and other
//! code that reads or writes its pages for a device, take a [`Hold`] of a part. The first hold of a byte
//! has it pinned and charged, the last one gone has it unpinned and its charge given back; those
//! between cost a count. So memory that is mapped twice, or copied into another address space of the
//! same owner, is pinned and charged once. A kernel back end takes no hold, as the kernel pins: type 1
//! for each mapping, iommufd once.
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
//! A part may also be *reserved*: it keeps its charge when its last user goes, and the next hold
//! takes that (see `reservation.rs`).
//!
//! A new hold pins what is not held yet: usually all of it, in one pin. Its charge is one step.
//! Nothing is noted before all of it has succeeded, so that a failure, or a panic of an observer,
//! leaves what was there.
//!
//! # Many threads
//!
//! The lock is held to look and to note, never while something is pinned, read or unpinned. A thread that
//! pins or unpins a part takes it first: others that hold or release some of it wait, and those of other
//! parts do not. A pin that several parts belong to gives one of them back when no thread reads its runs,
//! and is read when no thread gives back a part of it.

#[cfg(feature = "linux")]
mod counters;
pub(crate) mod error;
pub(crate) mod fixed;
mod hold;
#[cfg(feature = "linux")]
pub(crate) mod host;
pub(crate) mod ledger;
#[cfg(feature = "linux")]
pub(crate) mod node_tables;
pub(crate) mod object;
mod read;
#[cfg(all(feature = "linux", feature = "vm-memory"))]
pub(crate) mod regions;
mod reservation;
pub(crate) mod synthetic;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

#[cfg(feature = "linux")]
use runs::Pa;
use runs::{Offset, Span};

use crate::lock::{Changed, Guard, Mutex};
use crate::memory::error::MapError;
use crate::memory::ledger::{Charge, Forecast, Ledger};
use crate::memory::object::{Cause, MemoryObject, Pinned};
use crate::observer::{Observer, Step, observed};
use crate::ranges::extents::{Extent, Extents};
use crate::ranges::range_map::RangeMap;
pub use hold::Hold;
pub(crate) use hold::{append, cut};
pub(crate) use reservation::Reserved;

/// A memory object with its pins and the account that they are charged to.
///
/// The first hold of a byte, by an area or an external pin, has it pinned and charged; the last one
/// gone has it unpinned and its charge given back. Over a kernel's tables the kernel pins and charges: once if it
/// [shares pins](crate::Capabilities::shares_pins), as iommufd, otherwise for each mapping, as type 1.
#[derive(Debug)]
pub struct Memory {
    object: Arc<dyn MemoryObject>,
    ledger: Arc<Ledger>,
    pub(crate) pins: Mutex<Pins>,
    /// A part or a pin may be free again.
    changed: Changed,
}

#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// Parts by offset in the object.
    pub(crate) parts: RangeMap<Offset, Part>,
    /// Pins, by number.
    held: Vec<Option<PinEntry>>,
    /// Numbers that are free.
    free: Vec<usize>,
    /// The charge of parts that are reserved and not held.
    pub(crate) reserve: Option<Charge>,
    /// Bytes that are reserved, each as often as it is.
    pub(crate) reservations: u64,
    /// Parts that are being pinned or unpinned.
    taken: Extents,
}

/// Without users: it is not held, and there is no pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) users: u64,
    pub(crate) reserved: u64,
    pin: usize,
}

/// A pin that threads may read.
type Shared = Arc<Box<dyn Pinned>>;

/// Part held by a pin.
type OfPin = (Shared, Span<Offset>);

/// Memory that is pinned and charged.
///
/// Dropped, it is unpinned first and its charge given back after that: the order of the fields.
#[derive(Debug)]
struct PinEntry {
    /// `None` while a thread gives back a part of it. Who reads it has an `Arc` of it.
    pin: Option<Shared>,
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
            changed: Changed::default(),
        })
    }

    /// The object.
    pub fn object(&self) -> &Arc<dyn MemoryObject> {
        &self.object
    }

    /// Locked, with no thread that pins or unpins some of `part`, or of what is reserved beside it.
    pub(crate) fn pins_of(&self, part: Span<Offset>) -> Guard<'_, Pins> {
        let mut pins = self.pins.lock();
        while pins.taken.overlaps(&[pins.around(part)]) {
            pins = self.changed.wait(&self.pins, pins);
        }
        pins
    }

    /// Takes `part`, which no other thread has taken.
    fn take<'m>(&'m self, pins: &mut Pins, part: Span<Offset>) -> Busy<'m> {
        let around = pins.around(part);
        let by = pins.taken.take(&[around]);
        Busy { memory: self, by }
    }

    /// Has `work` give back `len` bytes of the pin with number `pin` outside of the lock, when no thread reads it.
    /// It receives whether they are the last, which is what this returns, too. What remains is there again
    /// under the lock that is returned.
    fn with_pin<T>(
        &self,
        pin: usize,
        len: u64,
        work: impl FnOnce(&mut Option<Box<dyn Pinned>>, bool) -> T,
    ) -> Option<(T, bool, Guard<'_, Pins>)> {
        let mut pins = self.pins.lock();
        let (here, last) = loop {
            let held = pins.held.get_mut(pin)?.as_mut()?;
            match held.pin.take().map(Arc::try_unwrap) {
                Some(Ok(here)) => {
                    held.used -= len;
                    break (Some(here), held.used == 0);
                }
                Some(Err(read)) => held.pin = Some(read),
                None => {}
            }
            pins = self.changed.wait(&self.pins, pins);
        };
        drop(pins);
        let memory = self;
        let mut back = Back { memory, pin, here };
        let result = work(&mut back.here, last);
        let mut pins = self.pins.lock();
        if let (Some(here), Some(Some(held))) = (back.here.take(), pins.held.get_mut(pin)) {
            held.pin = Some(Arc::new(here));
        }
        Some((result, last, pins))
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

    /// Says if the limit permits to hold `part` (offset and length in bytes), before anything is touched: bytes that
    /// are held already, or lie outside the object, cost nothing, and reserved ones no more than was kept for them.
    pub fn forecast(&self, part: Span<Offset>) -> Forecast {
        self.forecast_times(part, None)
    }

    /// The same for an address space that charges each mapping so many
    /// [`times`](crate::Backend::times_charged), whatever else holds the memory.
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

    /// Bytes kept for `part` alone.
    fn kept(&self, pins: &Pins, part: Span<Offset>) -> u64 {
        let object = &*self.object;
        let all = pins.kept_for(part, object);
        let kept = all.saturating_sub(pins.kept_beside(part, object));
        kept.min(pins.reserve.as_ref().map_or(0, Charge::bytes))
    }

    /// Charge of one mapping of `part` with a kernel that charges each mapping for itself.
    pub(crate) fn charge_of_mapping(&self, part: Span<Offset>) -> u64 {
        self.object.charge_of_mapping(part)
    }

    fn charge(&self, parts: &[Span<Offset>]) -> u64 {
        let charges = parts.iter().map(|part| self.object.charge(*part));
        charges.fold(0, u64::saturating_add)
    }

    /// Holds `part`, of which the caller has checked that it lies in the object: charges
    /// and pins what is not held yet, all or nothing.
    pub(crate) fn hold(
        self: &Arc<Self>,
        part: Span<Offset>,
        observer: &mut dyn Observer,
    ) -> Result<Hold, MapError> {
        let mut pins = self.pins_of(part);
        let gaps = pins.unheld(part);
        if gaps.is_empty() {
            pins.parts.change(part, |part| part.users += 1);
            let memory = Arc::clone(self);
            return Ok(Hold { memory, part });
        }
        let kept = self.kept(&pins, part);
        let taken = self.take(&mut pins, part);
        drop(pins);
        // Dropped last: what is pinned goes before its charge.
        let mut charge = observed(observer, Step::Charge, |_| {
            let bytes = self.charge(&gaps);
            let charge = self.ledger.charge(bytes.saturating_sub(kept));
            Ok::<_, MapError>((charge.map_err(MapError::OverLimit)?, bytes))
        })?;
        let mut fresh = Vec::with_capacity(gaps.len());
        let mut done = 0;
        observed(observer, Step::Pin, |observer| {
            for gap in &gaps {
                let mut progress = |here| observer.progress(Step::Pin, done + here);
                fresh.push((*gap, 0, self.object.pin(*gap, &mut progress)?));
                done += gap.len;
            }
            Ok::<_, MapError>(((), done))
        })?;
        // Dropping `fresh` gives everything back.
        if observer.progress(Step::Pin, done).is_break() {
            return Err(MapError::Interrupted);
        }
        let mut pins = self.pins.lock();
        let before = pins.kept_for(part, &*self.object);
        // Usually there is no other hold.
        if gaps != [part] {
            pins.parts
                .change(part, |part| part.users += u64::from(part.users > 0));
        }
        for (gap, pin, _) in &mut fresh {
            *pin = pins.number();
            pins.parts
                .change(*gap, |part| (part.users, part.pin) = (1, *pin));
        }
        let now = pins.kept_for(part, &*self.object);
        let kept = pins.draw(before.saturating_sub(now));
        kept.into_iter().for_each(|kept| charge.join(kept));
        for (gap, number, pin) in fresh {
            let charge = charge.split(self.object.charge(gap));
            let used = gap.len;
            let pin = Some(Arc::new(pin));
            pins.held[number] = Some(PinEntry { pin, charge, used });
        }
        drop(pins);
        drop(taken);
        Ok(Hold {
            memory: Arc::clone(self),
            part,
        })
    }

    /// Releases `part`. Returns the bytes that were unpinned, and the first failure.
    fn release(&self, part: Span<Offset>) -> (u64, Option<Cause>) {
        let mut pins = self.pins_of(part);
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
        if unused.is_empty() {
            return (unpinned, failed);
        }
        // Here and now, so that it is right whatever becomes of the neighbours.
        let now = pins.kept_for(part, &*self.object);
        let taken = self.take(&mut pins, part);
        drop(pins);
        let mut freed = Charge::nothing(&self.ledger);
        for (span, pin) in unused {
            match self.unpin(span, pin, &mut freed) {
                Ok(bytes) => unpinned += bytes,
                Err(cause) => failed = failed.or(Some(cause)),
            }
        }
        // Less is kept if the limit forbids it.
        let _ = self.pins.lock().keep(before, now, &mut freed);
        drop(taken);
        (unpinned, failed)
    }

    /// Gives back the part `span` of a pin, and its charge to `freed`; returns the bytes.
    ///
    /// When that fails it is not known how much of it is still pinned. The kernel goes on counting
    /// that, and so does the ledger: the charge stays.
    fn unpin(&self, span: Span<Offset>, pin: usize, freed: &mut Charge) -> Result<u64, Cause> {
        let done = self.with_pin(pin, span.len, |here, last| match here {
            Some(_) if last => here.take().map_or(Ok(0), Pinned::unpin),
            Some(here) => here.release(span),
            None => Ok(0),
        });
        let Some((result, last, mut pins)) = done else {
            return Ok(0);
        };
        if last {
            let charge = pins.end(pin);
            match (&result, charge) {
                (Err(_), Some(charge)) => charge.keep(),
                (Ok(_), Some(charge)) => freed.join(charge),
                (_, None) => {}
            }
            return result;
        }
        let charged = result?;
        if let Some(Some(held)) = pins.held.get_mut(pin) {
            let less = held.charge.bytes().saturating_sub(charged);
            freed.join(held.charge.split(less));
        }
        Ok(span.len)
    }

    /// Calls `each` with the physical runs of what is held of `part`, and their offsets in the object. A pin
    /// that cannot be read is left out.
    #[cfg(feature = "linux")]
    pub(crate) fn for_each_run(&self, part: Span<Offset>, mut each: impl FnMut(u64, Span<Pa>)) {
        let readers = Readers {
            memory: self,
            pins: self.readers(part),
        };
        let mut batch = [Span::default(); 64];
        for (pin, span) in &readers.pins {
            let Ok(mut reader) = pin.runs(*span) else {
                continue;
            };
            let mut offset = span.start;
            while let Ok(count @ 1..) = reader.next_batch(&mut batch) {
                for run in batch.iter().take(count) {
                    each(offset, *run);
                    offset += run.len;
                }
            }
        }
    }

    /// The pins of `part`, with what each holds of it, in order; none of them is given back meanwhile.
    fn readers(&self, part: Span<Offset>) -> Vec<OfPin> {
        if part.is_empty() {
            return Vec::new();
        }
        let mut pins = self.pins.lock();
        loop {
            if let Some(readers) = pins.readers(part) {
                return readers;
            }
            pins = self.changed.wait(&self.pins, pins);
        }
    }
}

/// A pin of which a part is given back. When that panics, the rest is where it was.
struct Back<'m> {
    memory: &'m Memory,
    pin: usize,
    here: Option<Box<dyn Pinned>>,
}

impl Drop for Back<'_> {
    fn drop(&mut self) {
        if let Some(here) = self.here.take() {
            if let Some(Some(held)) = self.memory.pins.lock().held.get_mut(self.pin) {
                held.pin = Some(Arc::new(here));
            }
        }
        self.memory.changed.notify();
    }
}

/// A part that is being pinned or unpinned.
struct Busy<'m> {
    memory: &'m Memory,
    by: u64,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.memory.pins.lock().taken.give_back(self.by);
        self.memory.changed.notify();
    }
}

impl Pins {
    /// A number for a new pin, where there is none yet.
    fn number(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.held.push(None);
            self.held.len() - 1
        })
    }

    /// `part`, and what is reserved beside it, of which the charge follows from how it is cut.
    fn around(&self, part: Span<Offset>) -> Extent {
        let mut around = Extent::of(part);
        if self.reservations > 0 {
            let beside = around.and_beside();
            for at in [beside.first, beside.last] {
                let idle = self.parts.at(at).filter(|(_, part)| part.users == 0);
                around = idle.map_or(around, |(span, _)| around.with(Extent::of(span)));
            }
        }
        around
    }

    /// Forgets a pin that has ended. Returns its charge.
    fn end(&mut self, pin: usize) -> Option<Charge> {
        let PinEntry { charge, .. } = self.held.get_mut(pin)?.take()?;
        self.free.push(pin);
        Some(charge)
    }

    /// The pins of `part`, with what each holds of it, in order; `None` while one of them is given back.
    fn readers(&self, part: Span<Offset>) -> Option<Vec<OfPin>> {
        let mut readers = Vec::new();
        let mut open: Option<(usize, Span<Offset>)> = None;
        let mut push = |(pin, span): (usize, Span<Offset>)| {
            let held = self.held.get(pin).and_then(Option::as_ref);
            if let Some(held) = held {
                readers.push((Arc::clone(held.pin.as_ref()?), span));
            }
            Some(())
        };
        for (span, part) in self.parts.inside(part).filter(|(_, part)| part.users > 0) {
            match &mut open {
                Some((pin, before)) if *pin == part.pin && before.last() + 1 == span.start => {
                    before.len += span.len;
                }
                _ => open.replace((part.pin, span)).map_or(Some(()), &mut push)?,
            }
        }
        open.map_or(Some(()), push)?;
        Some(readers)
    }
}

/// The pins of a part that is read.
struct Readers<'m> {
    memory: &'m Memory,
    pins: Vec<OfPin>,
}

impl Drop for Readers<'_> {
    fn drop(&mut self) {
        // Under the lock: a thread that waits for the last reader has looked before, or looks after this.
        let _pins = self.memory.pins.lock();
        self.pins.clear();
        self.memory.changed.notify();
    }
}
