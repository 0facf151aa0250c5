//! Windows for mappings, and the choice of an address when none is given.

use alloc::sync::Arc;
use alloc::vec::Vec;

use iopt::{Prot, RangeError};
use runs::{Iova, Offset, Span};

use crate::memory::Memory;
use crate::ranges::extents::Extent;
use crate::ranges::windows::{within, without};
use crate::space::Ioas;
use crate::space::error::MapError;
use crate::space::operation::{Claim, Op};

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
    /// Windows for mappings: what all devices translate, less what they reserve. In order;
    /// stretches of more than 2^63 bytes come in two.
    pub fn windows(&self) -> Vec<Span<Iova>> {
        self.gate.read().backend.windows()
    }

    /// Has [`map_anywhere`](Self::map_anywhere) choose only addresses in `ranges`, or any if there
    /// are none. Mapping at a given address is not bound to them.
    ///
    /// # Errors
    ///
    /// [`MapError::Allowed`] when a range is empty, ends beyond 2^64, or overlaps another one, or when
    /// the back end knows of a device that cannot translate it.
    pub fn allow(&self, ranges: &[Span<Iova>]) -> Result<(), MapError> {
        let allowed = in_order(ranges).map_err(|range| MapError::Allowed { range })?;
        let core = &mut *self.gate.write();
        core.backend.allow(&allowed)?;
        core.allowed = allowed;
        Ok(())
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
    ) -> Result<u64, MapError> {
        let core = self.gate.read();
        let op = self.op(&core);
        let (claim, iova) = op.choose(part)?;
        claim.run(|claim| {
            let area = op.check(iova, memory, part, prot)?;
            self.state.lock().check_vacant(area.range)?;
            op.map_taken(claim, area, &mut ())?;
            Ok(iova)
        })
    }
}

impl<'a> Op<'a> {
    /// An address for `part`, taken. Where other operations are under way nothing is chosen, as long as there is
    /// room elsewhere.
    fn choose(self, part: Span<Offset>) -> Result<(Claim<'a>, u64), MapError> {
        const LARGEST: u64 = 1 << 30;
        let no_room = MapError::NoRoom { len: part.len };
        let Some(log2) = part.len.checked_ilog2() else {
            return Err(MapError::Range(RangeError::Empty));
        };
        let granule = self.core.backend.granule();
        let align = (1u64 << log2).min(LARGEST).max(granule);
        let windows = match self.core.backend.windows() {
            all if self.core.allowed.is_empty() => all,
            all => within(&all, &self.core.allowed),
        };
        // Offset of the part in such a page.
        let lead = part.start & (align - 1);
        let Some(len) = part.len.checked_add(lead) else {
            return Err(no_room);
        };
        // Never 0: the first page is left out.
        let zero = Span::new(0, granule.max(4096));
        let windows: Vec<Span<Iova>> = windows
            .into_iter()
            .flat_map(|window| without(window, zero))
            .collect();
        let mut guard = self.ioas.state.lock();
        loop {
            let state = &mut *guard;
            let mut free = windows.clone();
            for taken in state.taken.all() {
                let cut = free.iter();
                free = cut
                    .flat_map(|window| without(*window, taken.span()))
                    .collect();
            }
            if let Some(start) = state.areas.0.gap(len, align, &free) {
                let range = Span::<Iova>::new(start + lead, part.len);
                let claim = self.claim(state, &[Extent::of(range)]);
                return Ok((claim, range.start));
            }
            if !state.taken.at_work() {
                return Err(no_room);
            }
            guard = self.ioas.given_back.wait(&self.ioas.state, guard);
        }
    }
}
