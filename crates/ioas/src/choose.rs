//! Where something can be mapped, and where it is when nobody says.

use alloc::sync::Arc;
use alloc::vec::Vec;

use iopt::{Prot, RangeError};
use runs::{Iova, Offset, Span};

use crate::error::MapError;
use crate::memory::Memory;
use crate::observer::Observer;
use crate::space::{Ioas, Space};
use crate::windows::{within, without};

/// Ranges in ascending order; an error is one that is empty, ends beyond 2^64, or overlaps another one.
pub(crate) fn in_order(ranges: &[Span<Iova>]) -> Result<Vec<Span<Iova>>, Span<Iova>> {
    let mut ranges = ranges.to_vec();
    ranges.sort_unstable();
    let ill = |range: &&Span<Iova>| Span::<Iova>::checked(range.start, range.len).is_none();
    let overlapping = || {
        let mut pairs = ranges.iter().zip(ranges.iter().skip(1));
        pairs.find(|(one, next)| one.overlaps(next))
    };
    let first = ranges.iter().find(ill);
    match first.or_else(|| overlapping().map(|(_, next)| next)) {
        Some(range) => Err(*range),
        None => Ok(ranges),
    }
}

impl Ioas {
    /// Where something can be mapped: what all devices translate, less what they reserve. In order;
    /// stretches of more than 2^63 bytes come in two.
    pub fn windows(&self) -> Vec<Span<Iova>> {
        self.lock().windows()
    }

    /// Has [`map_anywhere`](Self::map_anywhere) choose only addresses in `ranges`, or any if there
    /// are none. Mapping at a given address is not bound to them.
    ///
    /// # Errors
    ///
    /// [`MapError::Allowed`] when a range is empty, ends beyond 2^64, or overlaps another one, or when
    /// the back end knows of a device that cannot translate it.
    pub fn allow(&self, ranges: &[Span<Iova>]) -> Result<(), MapError> {
        self.lock().allow(ranges)
    }

    /// [`map`](Self::map) at an address that is chosen: never 0, in the
    /// [allowed](Self::allow) ranges, with the offset in the memory kept within the largest page that
    /// the length has room for, so that large pages stay possible.
    ///
    /// # Errors
    ///
    /// As [`map`](Self::map), and [`MapError::NoRoom`].
    pub fn map_anywhere(
        &self,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<u64, MapError> {
        let space = &mut *self.lock();
        let iova = space.choose(part)?;
        space.map(iova, memory, part, prot, observer)?;
        Ok(iova)
    }
}

impl Space {
    pub(crate) fn windows(&self) -> Vec<Span<Iova>> {
        self.backend.windows()
    }

    pub(crate) fn allow(&mut self, ranges: &[Span<Iova>]) -> Result<(), MapError> {
        let allowed = in_order(ranges).map_err(|range| MapError::Allowed { range })?;
        self.backend.allow(&allowed)?;
        self.allowed = allowed;
        Ok(())
    }

    /// An address for `part`.
    fn choose(&mut self, part: Span<Offset>) -> Result<u64, MapError> {
        const LARGEST: u64 = 1 << 30;
        let no_room = MapError::NoRoom { len: part.len };
        let Some(log2) = part.len.checked_ilog2() else {
            return Err(MapError::Range(RangeError::Empty));
        };
        let align = (1u64 << log2).min(LARGEST).max(self.backend.granule());
        let windows = match self.windows() {
            all if self.allowed.is_empty() => all,
            all => within(&all, &self.allowed),
        };
        // Where the part begins in such a page.
        let lead = part.start & (align - 1);
        let Some(len) = part.len.checked_add(lead) else {
            return Err(no_room);
        };
        // Never 0: the first page is left out.
        let zero = Span::new(0, self.backend.granule().max(4096));
        let windows: Vec<Span<Iova>> = windows
            .into_iter()
            .flat_map(|window| without(window, zero))
            .collect();
        let found = self.areas.0.gap(len, align, &windows);
        found.map(|start| start + lead).ok_or(no_room)
    }
}
