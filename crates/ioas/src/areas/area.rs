//! Areas: stretches of the address space over parts of memory.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ops::{Deref, DerefMut};

use iopt::Prot;
use runs::{Iova, Offset, Span};

use crate::memory::ledger::OverLimit;
use crate::memory::{Hold, Memory, Reserved};

/// A stretch of the address space over a part of a [`Memory`].
#[derive(Clone, Debug)]
pub struct Area {
    pub(crate) range: Span<Iova>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) offset: u64,
    pub(crate) prot: Prot,
    /// Taken out until it is put back: see [`Ioas::take_out`](crate::Ioas::take_out).
    pub(crate) out: bool,
    /// Released until it is restored: see [`Ioas::release`](crate::Ioas::release).
    pub(crate) released: bool,
    /// True, at its first byte and behind its last, where it was cut out of the range of one map call. Only there it is
    /// joined again.
    pub(crate) cut: [bool; 2],
}

impl Area {
    /// Its device addresses.
    pub const fn range(&self) -> Span<Iova> {
        self.range
    }

    /// The memory.
    pub const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The part of the memory: offset and length in bytes.
    pub const fn part(&self) -> Span<Offset> {
        Span::new(self.offset, self.range.len)
    }

    /// Access that devices have.
    pub const fn prot(&self) -> Prot {
        self.prot
    }

    /// True while it is [taken out](crate::Ioas::take_out).
    pub const fn is_out(&self) -> bool {
        self.out
    }

    /// True while it is [released](crate::Ioas::release).
    pub const fn is_released(&self) -> bool {
        self.released
    }

    /// True when devices are to see it: neither taken out nor released.
    pub const fn is_there(&self) -> bool {
        !self.out && !self.released
    }

    /// True when devices may write to it.
    pub(crate) fn is_written(&self) -> bool {
        self.is_there() && self.prot.contains(Prot::WRITE)
    }

    /// True when it is to keep its charge, while its address space is live.
    pub(crate) const fn keeps_charge(&self) -> bool {
        self.released && !self.out
    }
}

/// An area with what its address space has for it.
#[derive(Debug)]
pub(crate) struct HeldArea {
    area: Area,
    /// The part, pinned, for as long as a domain maps it.
    pub(crate) hold: Option<Hold>,
    /// The charge that is kept for it: see [`Area::keeps_charge`]. Few areas have one: all others are
    /// smaller for the box.
    pub(crate) reserved: Option<Box<Reserved>>,
}

impl Deref for HeldArea {
    type Target = Area;

    fn deref(&self) -> &Area {
        &self.area
    }
}

impl DerefMut for HeldArea {
    fn deref_mut(&mut self) -> &mut Area {
        &mut self.area
    }
}

impl From<Area> for HeldArea {
    fn from(area: Area) -> Self {
        Self {
            area,
            hold: None,
            reserved: None,
        }
    }
}

impl HeldArea {
    /// Keeps what it is charged, so many [`times`](crate::space::backend::Backend::times_charged), if the limit allows.
    pub(crate) fn reserve(&mut self, times: Option<u64>) -> Result<(), OverLimit> {
        self.reserved = None;
        self.reserved = Some(self.memory.reserve(self.part(), times)?);
        Ok(())
    }

    /// The same area, with what its address space had for it here.
    pub(crate) fn lend(&mut self) -> Self {
        Self {
            area: self.area.clone(),
            hold: self.hold.take(),
            reserved: self.reserved.take(),
        }
    }

    /// Cuts it in two at the device address `at`, which lies inside.
    pub(crate) fn split_at(&mut self, at: u64) -> Self {
        let len = at - self.range.start;
        let offset = self.offset + len;
        let tail = Self {
            area: Area {
                range: Span::new(at, self.range.len - len),
                memory: Arc::clone(&self.memory),
                offset,
                cut: [true, self.cut[1]],
                ..self.area
            },
            hold: self.hold.as_mut().map(|hold| hold.split_at(offset)),
            reserved: self
                .reserved
                .as_mut()
                .map(|reserved| Box::new(reserved.split_at(offset))),
        };
        self.range.len = len;
        self.cut[1] = true;
        tail
    }

    /// True when `next` goes on where this one ends, in everything, and both were cut there. Then one
    /// call has mapped both: it has had both sides of the cut, and no other call can have either before
    /// what is there is unmapped.
    pub(crate) fn goes_on_in(&self, next: &Self) -> bool {
        self.range.start.checked_add(self.range.len) == Some(next.range.start)
            && self.cut[1]
            && next.cut[0]
            && self.offset + self.range.len == next.offset
            && Arc::ptr_eq(&self.memory, &next.memory)
            && self.prot == next.prot
            && self.hold.is_some() == next.hold.is_some()
            && self.out == next.out
            && self.released == next.released
            && self.reserved.is_some() == next.reserved.is_some()
    }

    /// Takes in the one that it [goes on in](Self::goes_on_in).
    pub(crate) fn join(&mut self, next: Self) {
        self.range.len += next.range.len;
        self.cut[1] = next.cut[1];
        if let (Some(hold), Some(next)) = (&mut self.hold, next.hold) {
            hold.join(next);
        }
        if let (Some(reserved), Some(next)) = (&mut self.reserved, next.reserved) {
            reserved.join(*next);
        }
    }
}
