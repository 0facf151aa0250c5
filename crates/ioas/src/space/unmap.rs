//! An unmap: tables are emptied, units flushed, and memory is released after that.

use alloc::vec::Vec;

use iopt::{Aperture, Interruption};
use runs::{Iova, Span};

use crate::observer::{Observer, Step, observed};
use crate::ranges::extents::Extent;
use crate::space::Unmapped;
use crate::space::error::UnmapError;
use crate::space::flush::UnmappedHolds;
use crate::space::operation::{Claim, Op, State};

impl Op<'_> {
    /// Unmaps the areas in `range`; `note` receives what devices have written to, and with `blind` what they could.
    /// Their holds go through `gone`.
    pub(crate) fn unmap(
        self,
        range: Span<Iova>,
        blind: bool,
        note: &mut dyn FnMut(Span<Iova>),
        gone: &mut UnmappedHolds<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        if !check_unmap(range)? {
            return Ok(Unmapped::default());
        }
        let extent = Extent::of(range);
        let check = |state: &mut State| {
            for end in [range.start, range.last()] {
                let Some((area, _)) = state.areas.0.at(end) else {
                    continue;
                };
                if !range.covers(&area) {
                    return Err(UnmapError::CutsArea { range, area });
                }
                if area.len == range.len {
                    break;
                }
            }
            Ok(())
        };
        let (claim, ()) = self.take(|_| [extent], check)?;
        claim.run(|claim| {
            if blind {
                // Also before an error: the areas may be gone then.
                self.writable(range).into_iter().for_each(&mut *note);
            }
            self.externals().drop_pins(range)?;
            self.unmap_taken(claim, extent, Interruption::Refused, note, gone, observer)
        })
    }

    pub(super) fn unmap_all(self, observer: &mut dyn Observer) -> Result<Unmapped, UnmapError> {
        let all = Extent::ALL;
        let (claim, ()) = self.take(|_| [all], |_| Ok::<_, UnmapError>(()))?;
        claim.run(|claim| {
            for half in Aperture::zeros(64).spans() {
                self.externals().drop_pins(half)?;
            }
            let (note, gone) = (&mut |_| (), &mut self.retired().gone());
            self.unmap_taken(claim, all, Interruption::Refused, note, gone, observer)
        })
    }

    /// Takes the areas in `range`, which is taken and cuts none of them, from all devices, all or none. `note`
    /// receives what was written to there, which is not harvested any more.
    pub(crate) fn empty(
        self,
        claim: &Claim<'_>,
        range: Extent,
        interruption: Interruption,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), UnmapError> {
        let areas = self.ioas.state.lock().areas_in(range);
        let areas = areas.map(|areas| (areas, claim.widen(areas)));
        let backend = &self.core.backend;
        backend.empty(range, areas, interruption, note)?;
        let Extent { first, last } = range;
        self.externals().take_written_between(first, last, note);
        Ok(())
    }

    /// Unmaps the areas in `range`, which is taken and cuts none of them.
    pub(crate) fn unmap_taken(
        self,
        claim: &Claim<'_>,
        range: Extent,
        interruption: Interruption,
        note: &mut dyn FnMut(Span<Iova>),
        gone: &mut UnmappedHolds<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        let mut unmapped = observed(observer, Step::EmptyTables, |_| {
            self.empty(claim, range, interruption, note)?;
            let mut unmapped = Unmapped::default();
            // Areas with more than a hold, which is given back outside of the lock.
            let mut more = Vec::new();
            let areas = &mut self.ioas.state.lock().areas;
            for (range, mut area) in areas.extract_inside(range.first, range.last) {
                unmapped.areas += 1;
                unmapped.bytes = unmapped.bytes.saturating_add(range.len);
                let hold = area.hold.take();
                if hold.is_none() || area.reserved.is_some() {
                    more.push(area);
                }
                gone.add(range, hold);
            }
            Ok::<_, UnmapError>(((unmapped, more), unmapped.bytes))
        })
        .map(|(unmapped, more)| {
            let released = more.iter().filter(|area| area.released);
            released.for_each(|area| self.core.backend.give_back(area.range));
            unmapped
        })?;
        unmapped.unpinned = self.finish_unmap(gone, observer)?;
        Ok(unmapped)
    }

    /// Flushes what was unmapped, or leaves it for later.
    fn finish_unmap(
        self,
        gone: &mut UnmappedHolds<'_>,
        observer: &mut dyn Observer,
    ) -> Result<u64, UnmapError> {
        if !self.retired().is_strict() {
            self.core.backend.leave_gathered();
            gone.wait();
            if !self.retired().is_due() {
                return Ok(0);
            }
        }
        self.flush_gone(gone, observer)
    }

    /// Has all units and listeners invalidate what was unmapped, and releases `gone` and what has waited.
    pub(crate) fn flush_gone(
        self,
        gone: &mut UnmappedHolds<'_>,
        observer: &mut dyn Observer,
    ) -> Result<u64, UnmapError> {
        let flushed = observed(observer, Step::Flush, |_| {
            let flushed = self.retired().flush(&*self.core.backend);
            flushed.map(|()| ((), 0)).map_err(UnmapError::Flush)
        });
        flushed.inspect_err(|_| gone.wait())?;
        let (unpinned, failed) = observed(observer, Step::Unpin, |_| {
            let mut first = None;
            let (unpinned, failed) = gone.release(|cause| first = first.take().or(cause));
            Ok::<_, UnmapError>(((unpinned, failed.or(first)), unpinned))
        })?;
        failed.map_or(Ok(unpinned), |cause| Err(UnmapError::Unpin(cause)))
    }
}

/// Refuses what ends beyond the address space; false when there is nothing to do.
pub(crate) fn check_unmap(range: Span<Iova>) -> Result<bool, UnmapError> {
    if range.is_empty() {
        return Ok(false);
    }
    if Span::<Iova>::checked(range.start, range.len).is_none() {
        return Err(UnmapError::BeyondEnd { start: range.start });
    }
    Ok(true)
}
