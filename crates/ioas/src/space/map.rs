//! A map: checked, then made on a range that is taken.

use alloc::sync::Arc;

use iopt::{Interruption, Prot, RangeError};
use runs::{Iova, Offset, Span};

use crate::areas::area::Area;
use crate::memory::Memory;
use crate::memory::error::MOST_AREAS;
use crate::observer::Observer;
use crate::ranges::extents::Extent;
use crate::space::error::MapError;
use crate::space::operation::{Claim, Op, State};

impl Op<'_> {
    pub(crate) fn map(
        self,
        iova: u64,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let area = self.check(iova, memory, part, prot)?;
        let named = [Extent::of(area.range)];
        let (claim, ()) = self.take(|_| named, |state| state.check_vacant(area.range))?;
        claim.run(|claim| self.map_taken(claim, area, observer))
    }

    /// Maps an area where there is none, on a range that is taken.
    pub(crate) fn map_taken(
        self,
        claim: &Claim<'_>,
        area: Area,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let (backend, range) = (&*self.core.backend, area.range);
        self.retired()
            .make_way(backend, range)
            .map_err(MapError::Flush)?;
        let mut edit = self.hand_of(area.into());
        let owned = || claim.widen(Extent::of(range));
        backend.map(&mut edit.area, &owned, self.retired(), observer)?;
        self.retired().listeners.mapped(&edit.area);
        edit.comes = true;
        drop(edit);
        self.resize(range, range, Interruption::Refused);
        Ok(())
    }

    /// The area, after everything that can be known to be wrong before anything is touched, but for what is
    /// [in the way](State::check_vacant).
    pub(crate) fn check(
        self,
        iova: u64,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        prot: Prot,
    ) -> Result<Area, MapError> {
        let backend = &self.core.backend;
        let granule = backend.granule();
        if part.len == 0 {
            return Err(MapError::Range(RangeError::Empty));
        }
        if !prot.intersects(Prot::RW | Prot::EXECUTE) {
            return Err(MapError::Prot { prot });
        }
        if !Span::new(0, memory.len()).covers(&part) || !part.is_aligned(granule) {
            return Err(MapError::Part {
                part,
                object: memory.len(),
                granule,
            });
        }
        if iova & (granule - 1) != 0 {
            return Err(MapError::Range(RangeError::Misaligned {
                value: iova,
                granule,
            }));
        }
        Ok(Area {
            range: backend.check(iova, part.len)?,
            memory: Arc::clone(memory),
            offset: part.start,
            prot,
            out: false,
            released: false,
            cut: [false; 2],
        })
    }
}

impl State {
    /// Refuses `wanted` where there is an area.
    pub(crate) fn check_vacant(&self, wanted: Span<Iova>) -> Result<(), MapError> {
        if let Some((area, _)) = self.areas.0.first_overlap(wanted.start, wanted.last()) {
            return Err(MapError::Overlap { wanted, area });
        }
        // Some threads' areas are still to come.
        let (here, most) = (self.areas.0.len() as u64, MOST_AREAS);
        if here >= most {
            let wanted = here + 1;
            return Err(MapError::TooMany { wanted, most });
        }
        Ok(())
    }
}
