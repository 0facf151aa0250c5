//! Charges that are kept for memory which is not pinned for a while.
//!
//! Memory of a [`Reserved`] was pinned and is to be pinned again: the last hold gone does not give
//! its charge back, and the next hold takes that instead of a new one. So the limit cannot refuse it,
//! whatever else was charged meanwhile. (It is the ledger that keeps it. The kernel's own counter
//! goes down, and another process that charges that directly can take what is free there.)
//!
//! It is kept for areas that are released and not out (`Area::keeps_charge`), while their address space is
//! live: a device or domain that makes it so has the charge of all of them kept (`Areas::charge_released`)
//! as well, or does not come; the last one to go gives it back.
//!
//! A kernel that charges each mapping for itself wants the charge of each again: there an area keeps its
//! own, whatever other users map, hold or have released the same memory.
//!
//! Otherwise how much is kept is a matter of the stretches that are reserved and not held: what
//! pinning each of them is charged. A part of a huge page is charged as the whole where the kernel does
//! so; then a release may have to charge more than it gives back. If the limit forbids that, less is kept.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use runs::{Offset, Span};

use crate::memory::ledger::{Charge, OverLimit};
use crate::memory::object::MemoryObject;
use crate::memory::{Memory, Part, Pins, append, cut};

/// A part of a [`Memory`] whose charge stays for as long as this is there.
#[derive(Debug)]
#[must_use = "the charge is given back as soon as this is dropped"]
pub(crate) struct Reserved {
    memory: Arc<Memory>,
    part: Span<Offset>,
    /// Charge kept for one area alone; `None` where the memory keeps it, once for all.
    alone: Option<Charge>,
}

impl Reserved {
    /// Gives back all but so many `times` of the charge kept for one area alone.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    pub(crate) fn shrink_to(&mut self, times: u64) {
        if let Some(alone) = &mut self.alone {
            let once = self.memory.charge_of_mapping(self.part);
            alone.shrink_to(once.saturating_mul(times));
        }
    }

    /// Keeps what `more` keeps for the same area as well.
    pub(crate) fn add(&mut self, mut more: Self) {
        if let Some(alone) = &mut self.alone {
            if let Some(charge) = more.alone.take() {
                more.part = Span::default();
                alone.join(charge);
            }
        }
    }

    /// Cuts it in two at `offset` in the object, which lies inside.
    pub(crate) fn split_at(&mut self, offset: u64) -> Self {
        let whole = u128::from(self.part.len);
        let tail = cut(&mut self.part, offset);
        let alone = self.alone.as_mut().map(|alone| {
            let bytes = u128::from(alone.bytes()) * u128::from(tail.len);
            alone.split((bytes / whole) as u64)
        });
        Self {
            memory: Arc::clone(&self.memory),
            part: tail,
            alone,
        }
    }

    /// Takes in `other`, of what follows in the same memory.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.memory, &other.memory));
        append(&mut self.part, &mut other.part);
        debug_assert_eq!(self.alone.is_some(), other.alone.is_some());
        if let (Some(alone), Some(more)) = (&mut self.alone, other.alone.take()) {
            alone.join(more);
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // Empty: moved into another one.
        if self.alone.is_none() && !self.part.is_empty() {
            let _ = self.memory.change_reserved(self.part, -1);
        }
    }
}

impl Memory {
    /// Has the charge of `part` stay when the last hold goes: what is not held is charged now. With
    /// `times` all of it is, so often, for one area alone.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        part: Span<Offset>,
        times: Option<u64>,
    ) -> Result<Box<Reserved>, OverLimit> {
        let alone = match times {
            Some(times) => {
                let once = self.charge_of_mapping(part);
                Some(self.ledger().charge(once.saturating_mul(times))?)
            }
            None => {
                self.change_reserved(part, 1)?;
                None
            }
        };
        Ok(Box::new(Reserved {
            memory: Arc::clone(self),
            part,
            alone,
        }))
    }

    fn change_reserved(&self, part: Span<Offset>, by: i64) -> Result<(), OverLimit> {
        let pins = &mut *self.pins_of(part);
        let before = pins.kept_for(part, &**self.object());
        let change = |part: &mut Part| part.reserved = part.reserved.saturating_add_signed(by);
        pins.parts.change(part, change);
        pins.reservations = match by {
            1.. => pins.reservations + part.len,
            _ => pins.reservations - part.len,
        };
        let mut nothing = Charge::nothing(self.ledger());
        let now = pins.kept_for(part, &**self.object());
        match pins.keep(before, now, &mut nothing) {
            Err(over) if by > 0 => {
                let change = |part: &mut Part| part.reserved -= 1;
                pins.parts.change(part, change);
                pins.reservations -= part.len;
                Err(over)
            }
            // A reservation cut in two may need more, which was not promised.
            _ => Ok(()),
        }
    }

    /// Bytes that are charged for parts which are not held, each once. What areas keep for themselves,
    /// where a kernel charges each mapping, is in the [ledger](Self::ledger) only.
    pub fn reserved(&self) -> u64 {
        let pins = self.pins.lock();
        pins.reserve.as_ref().map_or(0, Charge::bytes)
    }
}

impl Pins {
    /// Bytes to be kept for stretches in `part`, and for those that go over its ends.
    pub(crate) fn kept_for(&self, part: Span<Offset>, object: &dyn MemoryObject) -> u64 {
        if self.reservations == 0 {
            return 0;
        }
        let end = part.start + part.len;
        let before = part
            .start
            .checked_sub(1)
            .and_then(|last| self.parts.at(last));
        let behind = self.parts.at(end);
        let start = before.map_or(part.start, |(span, _)| span.start);
        let end = behind.map_or(end, |(span, _)| span.start + span.len);
        let stretches = self.parts.inside(Span::new(start, end - start));
        let idle = stretches.filter(|(_, part)| part.users == 0);
        idle.fold(0, |sum: u64, (span, _)| {
            sum.saturating_add(object.charge(span))
        })
    }

    /// The same when `part` is held.
    pub(crate) fn kept_beside(&self, part: Span<Offset>, object: &dyn MemoryObject) -> u64 {
        if self.reservations == 0 {
            return 0;
        }
        let end = part.start + part.len;
        let idle = |stretch: &(Span<Offset>, Part)| stretch.1.users == 0;
        let before = part
            .start
            .checked_sub(1)
            .and_then(|last| self.parts.at(last));
        let head = before.filter(idle).map_or(0, |(span, _)| {
            object.charge(Span::new(span.start, part.start - span.start))
        });
        let tail = self.parts.at(end).filter(idle).map_or(0, |(span, _)| {
            object.charge(Span::new(end, span.start + span.len - end))
        });
        head.saturating_add(tail)
    }

    /// After a change, for which `before` was to be kept and `now` is: takes from `freed` what is to be
    /// kept now, and charges what is missing; or gives back what is too much.
    pub(crate) fn keep(
        &mut self,
        before: u64,
        now: u64,
        freed: &mut Charge,
    ) -> Result<(), OverLimit> {
        if now < before {
            drop(self.draw(before - now));
        }
        if now <= before {
            return Ok(());
        }
        let mut kept = freed.split(now - before);
        let missing = (now - before) - kept.bytes();
        let result = match missing {
            0 => Ok(()),
            _ => freed.more(missing).map(|more| kept.join(more)),
        };
        match &mut self.reserve {
            Some(reserve) => reserve.join(kept),
            None => self.reserve = Some(kept),
        }
        result
    }

    /// Takes `bytes` of what is kept, or what there is.
    pub(crate) fn draw(&mut self, bytes: u64) -> Option<Charge> {
        let reserve = self.reserve.as_mut()?;
        Some(reserve.split(bytes))
    }

    /// Stretches of `part` that are not held.
    pub(crate) fn unheld(&self, part: Span<Offset>) -> Vec<Span<Offset>> {
        let held = self.parts.inside(part).filter(|(_, part)| part.users > 0);
        let mut held = held.peekable();
        if held.peek().is_none() && !part.is_empty() {
            return vec![part];
        }
        let mut gaps = Vec::new();
        let mut at = part.start;
        let end = part.start + part.len;
        for (span, _) in held {
            if span.start > at {
                gaps.push(Span::new(at, span.start - at));
            }
            at = span.start + span.len;
        }
        if at < end {
            gaps.push(Span::new(at, end - at));
        }
        gaps
    }
}
