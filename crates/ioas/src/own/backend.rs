//! Implementation of the own back end for an address space.

use alloc::vec::Vec;
use core::any::Any;
use core::iter;

use iommu::FlushError;
use iopt::{Aperture, Interruption, Invalidation, Pending, RangeError, ResizeError};
use runs::{Iova, PageSizes, Span};

use super::{Domain, Member, Own, fill};
use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::capability::Unsupported;
use crate::observer::Observer;
use crate::ranges::extents::Extent;
use crate::ranges::windows::windows;
use crate::space::backend::{Backend, Capabilities};
use crate::space::dirty::{HarvestError, Harvested, Tracking, TrackingError};
use crate::space::endpoint::{Endpoint, EndpointId, EndpointKind};
use crate::space::error::{AttachError, DetachError, MapError, UnmapError};
use crate::space::flush::Retired;
use crate::space::placement::{Place, Placement};

impl Own {
    /// The addresses of each domain.
    fn apertures(&self) -> impl Iterator<Item = Aperture> + '_ {
        let tables = self.domains.iter().map(|domain| &domain.table);
        tables.map(|table| table.aperture())
    }

    /// True when every unit notes what its devices write to.
    fn units_track_dirty(&self) -> bool {
        let mut units = self
            .domains
            .iter()
            .flat_map(|domain| domain.devices.units());
        units.all(|unit| unit.capabilities().dirty_tracking)
    }

    /// Takes back an area of which the first `mapped` bytes are in tables.
    fn undo(
        &self,
        area: &mut HeldArea,
        mapped: u64,
        owned: &dyn Fn() -> Extent,
        retired: &Retired,
    ) {
        // The caller must learn why the map failed. Memory that could not be unpinned shows in the ledger, and memory
        // that waits for a flush in `retired`.
        if mapped > 0 {
            let range = Span::new(area.range.start, mapped);
            let owned = owned();
            for domain in &self.domains {
                if let Err(cause) = domain.empty_within(Extent::of(range), owned, &mut |_| ()) {
                    // Not reached: whole leaves were mapped here just now. Devices might reach the
                    // memory, so it stays what it is.
                    debug_assert!(false, "a new mapping cannot be unmapped: {cause}");
                    return;
                }
            }
            let mut gone = retired.gone();
            gone.add(range, area.hold.take());
            match retired.flush(self) {
                Ok(()) => drop(gone.release(|_| ())),
                Err(_) => gone.wait(),
            }
        } else if let Some(hold) = area.hold.take() {
            // No device has ever seen it: there is nothing to wait for.
            let _ = hold.release();
        }
    }
}

impl Backend for Own {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: "own tables",
            hitless_cut: true,
            unmap_part: true,
            shares_pins: true,
            page_dirty: self.units_track_dirty(),
            fixed_runs: true,
            table_placement: true,
            node_tables: true,
            most_mappings: None,
        }
    }

    /// The smallest page that every domain has; 1 without a domain.
    fn granule(&self) -> u64 {
        let smallest = |domain: &Domain| domain.table.page_sizes().smallest();
        self.domains.iter().map(smallest).max().unwrap_or(1)
    }

    fn windows(&self) -> Vec<Span<Iova>> {
        let reserved = self.reserved.iter().map(|(_, span)| *span);
        windows(self.apertures(), reserved)
    }

    fn check(&self, iova: u64, len: u64) -> Result<Span<Iova>, MapError> {
        let range = Span::checked(iova, len);
        for aperture in self.apertures() {
            if range.is_none_or(|range| !aperture.covers(&range)) {
                return Err(MapError::Range(RangeError::OutsideAperture {
                    iova,
                    len: range.map(|range| range.len),
                    aperture,
                }));
            }
        }
        let wanted = range.ok_or(MapError::BeyondEnd { start: iova })?;
        let reserved = self.reserved.iter().map(|(_, span)| *span);
        match reserved.into_iter().find(|span| span.overlaps(&wanted)) {
            Some(reserved) => Err(MapError::Reserved { wanted, reserved }),
            None => Ok(wanted),
        }
    }

    /// Pins the memory of `area` and maps it in every domain; without a domain there is nothing to
    /// do. Its hold is in the area before the first entry is in a table, so that at no moment, not
    /// even while a panic of an observer unwinds, there is an entry to memory that nothing holds.
    fn map(
        &self,
        area: &mut HeldArea,
        owned: &dyn Fn() -> Extent,
        retired: &Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        if self.domains.is_empty() {
            return Ok(());
        }
        let hold = area.memory.hold(area.part(), observer)?;
        area.hold = Some(hold);
        let (filled, mapped) = fill(&self.domains, &self.batches, area, observer);
        let range = area.range;
        let told = || {
            let mut domains = self.domains.iter();
            domains.try_for_each(|domain| domain.mapped(range))
        };
        let result = filled.and_then(|()| told().map_err(MapError::Flush));
        if result.is_err() {
            self.undo(area, mapped, owned, retired);
        }
        result
    }

    fn empty(
        &self,
        range: Extent,
        areas: Option<(Extent, Extent)>,
        _interruption: Interruption,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), UnmapError> {
        for domain in &self.domains {
            let settled = domain.settle().map_err(ResizeError::Flush);
            settled.map_err(UnmapError::Cut)?;
        }
        // A table takes out a stretch whole or not at all. That every table takes out every stretch
        // or none does, needs a look at all ends but the first stretch's in the first table.
        let mut looked = false;
        for domain in &self.domains {
            for range in areas
                .into_iter()
                .flat_map(|(areas, _)| domain.within(areas))
            {
                if looked {
                    if let Some(leaf) = domain.leaf_over_ends(range) {
                        let cause = iopt::TableUnmapError::InsideLeaf { range, leaf };
                        return Err(UnmapError::Table(cause));
                    }
                }
                looked = true;
            }
        }
        if let Some((areas, owned)) = areas {
            let mut all = self.domains.iter();
            all.try_for_each(|domain| domain.empty_within(areas, owned, &mut *note))
                .map_err(UnmapError::Table)?;
        }
        let Extent { first, last } = range;
        self.written.lock().take_between(first, last, note);
        Ok(())
    }

    fn is_live(&self) -> bool {
        !self.domains.is_empty()
    }

    fn set_aside(&self, range: Span<Iova>) -> Result<(), MapError> {
        for (place, domain) in self.domains.iter().enumerate() {
            let mut spare = domain.spare.lock();
            let kept = spare.add(range, &domain.table);
            drop(spare);
            if let Err(cause) = kept {
                for domain in &self.domains[..place] {
                    domain.give_back(range);
                }
                return Err(MapError::Table(cause));
            }
        }
        Ok(())
    }

    fn give_back(&self, range: Span<Iova>) {
        for domain in &self.domains {
            domain.give_back(range);
        }
    }

    fn map_again(
        &self,
        area: &mut HeldArea,
        owned: &dyn Fn() -> Extent,
        retired: &Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let mapped = self.map(area, owned, retired, observer);
        if mapped.is_ok() {
            self.give_back(area.range);
        }
        self.domains.iter().for_each(Domain::fill_up);
        mapped
    }

    /// Has a leaf begin at `at` in every domain.
    fn cut(&self, at: u64, interruption: Interruption) -> Result<(), UnmapError> {
        self.domains
            .iter()
            .try_for_each(|domain| domain.cut(at, interruption))
            .map_err(UnmapError::Cut)
    }

    /// In every domain that has leaves of that size.
    fn split(
        &self,
        range: Span<Iova>,
        size: u64,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        let has = |domain: &&Domain| domain.table.page_sizes().bits() & size == size;
        self.domains
            .iter()
            .filter(has)
            .try_for_each(|domain| domain.split(range, size, interruption))
    }

    fn merge(
        &self,
        range: Span<Iova>,
        area: Span<Iova>,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        self.domains
            .iter()
            .try_for_each(|domain| domain.merge(range, area, interruption))
    }

    fn waits(&self) -> bool {
        self.domains.iter().any(Domain::waits)
    }

    /// A unit that still holds old translations there, or a table that was unlinked, would not see
    /// new ones.
    fn waits_in(&self, range: Span<Iova>) -> bool {
        self.domains.iter().any(|domain| domain.waits_in(range))
    }

    fn leave_gathered(&self) {
        self.domains.iter().for_each(Domain::leave_gathered);
    }

    fn give_back_tables(&self) {
        for domain in &self.domains {
            domain.table.poll();
        }
    }

    fn flush(&self) -> Result<(), FlushError> {
        let mut all = Ok(());
        for domain in &self.domains {
            all = all.and(domain.flush());
        }
        all
    }

    fn track(&mut self, _tracking: Tracking) -> Result<(), TrackingError> {
        self.domains.iter_mut().for_each(Domain::track);
        Ok(())
    }

    fn untrack(&mut self) {
        self.written.get_mut().clear();
        self.domains.iter_mut().for_each(Domain::untrack);
    }

    fn harvest(
        &self,
        writable: &[Span<Iova>],
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<Harvested, HarvestError> {
        let span = pending.span();
        for domain in &self.domains {
            // A unit may still note in leaves of another size what its devices do.
            domain.settle().map_err(HarvestError::Flush)?;
        }
        let mut found = Harvested::default();
        let of_domains = self.domains.iter().map(|domain| &domain.written);
        for written in iter::once(&self.written).chain(of_domains) {
            let here = written.lock().take(span, &mut |range| pending.mark(range));
            found.bytes += here.bytes;
            found.blind |= here.blind;
        }
        for domain in &self.domains {
            let blind = domain.is_blind();
            found.blind |= blind;
            for range in writable {
                if blind {
                    pending.mark(*range);
                }
                if domain.tracked {
                    let bytes = domain.table.harvest(*range, pending);
                    found.bytes += bytes.map_err(HarvestError::Table)?;
                }
            }
        }
        Ok(found)
    }

    fn show(&self, what: &Invalidation) -> Result<(), FlushError> {
        let mut all = self.domains.iter();
        all.try_for_each(|domain| domain.devices.invalidate(domain.id, what))
    }

    fn is_blind(&self) -> bool {
        self.domains.iter().any(Domain::is_blind)
    }

    /// A unit that has let its last device of a domain go has dropped the domain, so that nothing
    /// needs to be flushed any more.
    fn leave(&mut self, areas: &mut Areas, retired: &Retired) -> Result<(), DetachError> {
        self.detach_all(areas, retired)
    }

    /// Ends the domain that was kept, whose table is empty and which has no device.
    fn end(&mut self) {
        for domain in self.domains.drain(..) {
            domain.end();
        }
    }

    fn attach(
        &mut self,
        endpoint: Endpoint,
        dirty: bool,
        areas: &mut Areas,
    ) -> Result<(), AttachError> {
        let Endpoint { kind, near } = endpoint;
        let EndpointKind::Device(unit, device) = kind else {
            let backend = self.capabilities().backend;
            return Err(AttachError::Endpoint { backend });
        };
        self.attach_member(Member { unit, device, near }, dirty, areas)
    }

    fn detach(
        &mut self,
        endpoint: EndpointId,
        dirty: bool,
        areas: &mut Areas,
        retired: &Retired,
    ) -> Result<(), DetachError> {
        let device = endpoint.device().ok_or(DetachError::Unknown)?;
        self.detach_device(device, dirty, areas, retired)
    }

    /// One for each domain.
    fn places(&self) -> Vec<Place> {
        let places = self.domains.iter().map(|domain| {
            let members = domain.devices.0.iter();
            Place {
                number: Some(domain.id.0),
                node: domain.node(),
                tables: domain.tables_on,
                tracks: domain.tracked,
                endpoints: members.map(|member| member.device.into()).collect(),
                ..Place::default()
            }
        });
        places.collect()
    }

    fn set_placement(&mut self, placement: Placement) -> Result<(), Unsupported> {
        self.placement = placement;
        Ok(())
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    /// Page sizes of the tables of all domains.
    fn page_sizes(&self) -> Option<PageSizes> {
        let tables = self.domains.iter().map(|domain| &domain.table);
        let sizes = tables.map(|table| table.page_sizes());
        sizes.reduce(|all, here| PageSizes::from_bits(all.bits() & here.bits()))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
