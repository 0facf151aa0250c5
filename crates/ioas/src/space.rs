//! The address space: areas over memory.
//!
//! # Mapping
//!
//! Check, charge, pin, then batch by batch: find runs, fill tables. Each step can fail, and then
//! everything before it is undone in the opposite order: tables are emptied, units flushed, memory
//! let go. Without a domain an area is only noted; the first device that comes has it pinned and
//! mapped.
//!
//! # Unmapping
//!
//! Tables are emptied, units flushed, and only then memory is let go: unpinned, and its charge given
//! back, if nobody else holds it. Memory whose flush has failed is *retired*: it belongs to no area
//! any more, but stays pinned and charged until a later flush succeeds. Until then nothing is mapped
//! either: a unit that still holds old translations and tables would not see what is new.
//!
//! # The end
//!
//! [`Ioas::close`] gives everything back and tells what it could not. Dropping an address space
//! detaches its devices and unpins its memory; see [`Ioas`].

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem;

use iommu::{DeviceId, DomainId, Unit};
use iopt::{AnyTable, Aperture, Interruption, Leaf, Prot, RangeError, TableMemory};
use runs::Span;

use crate::area::Area;
use crate::dirty::Tracking;
use crate::error::{AttachError, CloseError, DetachError, MapError, UnmapError};
use crate::external::Externals;
use crate::intervals::Intervals;
use crate::listener::Listener;
use crate::memory::Memory;
use crate::observer::{Observer, Step, observed};
use crate::own::{BuildDomain, Flushing, Own};

/// What an unmap has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmapped {
    /// Areas.
    pub areas: u64,
    /// Their bytes together.
    pub bytes: u64,
    /// Bytes that were unpinned: those of the areas that nobody else holds, and those that were
    /// retired before.
    pub unpinned: u64,
}

/// An I/O address space.
///
/// # Dropping
///
/// [`close`](Self::close) gives everything back. Dropping an address space detaches its devices,
/// which waits for their accesses under way, and then unpins its memory. If a unit does not let a
/// device go, the memory of all areas stays pinned and charged for good: a device must never reach
/// memory that is not pinned. Tables of the caller's, as those of a dropped
/// [`Table`](iopt::Table), stay out of use in any case.
pub struct Ioas<M: TableMemory> {
    pub(crate) areas: Intervals<Area>,
    pub(crate) own: Own<M>,
    pub(crate) externals: Arc<Externals>,
    /// What devices cannot translate, with the device.
    pub(crate) reserved: Vec<(DeviceId, Span)>,
    /// To which addresses are chosen; anywhere when empty.
    pub(crate) allowed: Vec<Span>,
    /// While it is tracked what devices write to.
    pub(crate) tracking: Option<Tracking>,
}

impl<M: TableMemory> Ioas<M> {
    /// An empty address space over `table`, which is empty and which units know as `domain`. It is
    /// the only domain, and mapped and pinned also while no device is attached.
    pub fn new(domain: DomainId, table: AnyTable<M>) -> Self {
        Self::over(Own::new(Some((domain, table)), None))
    }

    /// An empty address space without a domain. The first device brings one, which `builder` builds,
    /// and every device that no domain suits another one. Until then areas are only noted.
    pub fn with_builder(builder: impl BuildDomain<M> + 'static) -> Self {
        Self::over(Own::new(None, Some(Box::new(builder))))
    }

    fn over(own: Own<M>) -> Self {
        Self {
            areas: Intervals::new(),
            own,
            externals: Arc::default(),
            reserved: Vec::new(),
            allowed: Vec::new(),
            tracking: None,
        }
    }

    /// When units are told what was unmapped. What waits now is flushed by the next call that
    /// flushes.
    pub fn set_flushing(&mut self, flushing: Flushing) {
        self.own.flushing = flushing;
    }

    /// Tells `listener` of all areas, from now on.
    pub fn add_listener(&mut self, listener: Arc<dyn Listener>) {
        let areas = self.areas().filter(|area| !area.out);
        areas.for_each(|area| listener.mapped(area));
        self.own.listeners.add(listener);
    }

    /// Tells `listener` nothing any more. It must not use what it knows.
    pub fn remove_listener(&mut self, listener: &Arc<dyn Listener>) {
        self.own.listeners.remove(listener);
    }

    /// The domains: number, page table and devices of each.
    pub fn domains(&self) -> impl Iterator<Item = (DomainId, &AnyTable<M>)> {
        let domains = self.own.domains.iter();
        domains.map(|domain| (domain.id, &domain.table))
    }

    /// The page table of the first domain, if there is one.
    pub fn table(&self) -> Option<&AnyTable<M>> {
        self.own.domains.first().map(|domain| &domain.table)
    }

    /// The areas, in order.
    pub fn areas(&self) -> impl Iterator<Item = &Area> {
        self.areas.overlapping(0, u64::MAX).map(|(_, area)| area)
    }

    /// How many areas there are.
    pub fn len(&self) -> usize {
        self.areas.len()
    }

    /// True when there is no area.
    pub fn is_empty(&self) -> bool {
        self.areas.is_empty()
    }

    /// The area that holds `iova`.
    pub fn area_at(&self, iova: u64) -> Option<&Area> {
        self.areas.at(iova).map(|(_, area)| area)
    }

    /// The leaf that maps `iova`, in the first domain.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.table()?.leaf_at(iova)
    }

    /// The attached devices.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        let domains = self.own.domains.iter();
        domains.flat_map(|domain| domain.devices.0.iter().map(|(_, device)| *device))
    }

    /// Lets `device` of `unit` see this address space: in a domain that suits the unit, or in a new
    /// one, in which all areas are mapped first.
    ///
    /// While memory is [retired](Self::retired), the device may come to see that too, as those
    /// that are attached already.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    pub fn attach(&mut self, unit: Arc<dyn Unit>, device: DeviceId) -> Result<(), AttachError> {
        let mut reserved = Vec::new();
        unit.reserved(device, &mut |span| reserved.push((device, span)));
        for (_, span) in &reserved {
            if let Some((area, _)) = self.areas.first_overlap(span.start, span.last()) {
                let reserved = *span;
                return Err(AttachError::Reserved { area, reserved });
            }
        }
        let dirty = self.tracking.is_some();
        self.own.attach(unit, device, dirty, &mut self.areas)?;
        self.reserved.append(&mut reserved);
        Ok(())
    }

    /// Takes this address space away from `device`, from the one that was attached first if several
    /// units have a device of that name. Areas stay, pinned for as long as there is a domain: when
    /// the device comes back, it finds them.
    pub fn detach(&mut self, device: DeviceId) -> Result<(), DetachError> {
        self.own.detach(device, &mut self.areas)?;
        if self.devices().all(|other| other != device) {
            self.reserved.retain(|(whose, _)| *whose != device);
        }
        Ok(())
    }

    /// Maps `part` (offset and length in bytes) of `memory` at `iova`, all or nothing.
    ///
    /// # Errors
    ///
    /// See [`MapError`]. Nothing is touched, not even for a moment, when the range, the part or
    /// the limit forbids it. If earlier unmaps still wait for a [`flush`](Self::flush), that comes
    /// first, and if it fails again nothing is mapped.
    pub fn map(
        &mut self,
        iova: u64,
        memory: &Arc<Memory>,
        part: Span,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let range = self.check(iova, memory, part)?;
        self.own.make_way(range).map_err(MapError::Flush)?;
        let area = Area {
            range,
            memory: Arc::clone(memory),
            offset: part.start,
            prot,
            hold: None,
            out: false,
        };
        // Vacant: `check` has seen that no area lies there.
        if self.areas.insert(range, area).is_err() {
            let areas = self.areas.len();
            return Err(MapError::TooMany { areas });
        }
        let Some((_, area)) = self.areas.at_mut(iova) else {
            return Ok(());
        };
        if let Err(cause) = self.own.map(area, observer) {
            if area.hold.is_none() {
                self.areas.remove(iova);
            }
            return Err(cause);
        }
        self.own.listeners.mapped(area);
        self.refit(range, range, Interruption::Refused);
        Ok(())
    }

    /// Everything that can be known to be wrong before anything is touched.
    fn check(&self, iova: u64, memory: &Memory, part: Span) -> Result<Span, MapError> {
        let granule = self.own.granule();
        if part.len == 0 {
            return Err(MapError::Range(RangeError::Empty));
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
        let range = Span::checked(iova, part.len);
        for aperture in self.own.apertures() {
            if range.is_none_or(|range| !aperture.covers(&range)) {
                return Err(MapError::Range(RangeError::OutsideAperture {
                    iova,
                    len: range.map(|range| range.len),
                    aperture,
                }));
            }
        }
        let Some(range) = range else {
            return Err(MapError::BeyondEnd { start: iova });
        };
        let reserved = self.reserved.iter().find(|(_, span)| span.overlaps(&range));
        if let Some((_, reserved)) = reserved {
            let (wanted, reserved) = (range, *reserved);
            return Err(MapError::Reserved { wanted, reserved });
        }
        match self.areas.first_overlap(range.start, range.last()) {
            Some((area, _)) => Err(MapError::Overlap {
                wanted: range,
                area,
            }),
            None => Ok(range),
        }
    }

    /// Unmaps every area in `range`. Areas that lie only partly in it are not cut: that is refused
    /// and nothing changes. Where nothing is mapped nothing happens.
    ///
    /// Memory that was retired before is released as well, if the flush succeeds.
    ///
    /// # Errors
    ///
    /// See [`UnmapError`], which says for each case what has happened to the areas: either all of
    /// them are unmapped or none.
    pub fn unmap(
        &mut self,
        range: Span,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        self.unmap_with(range, &mut |_| (), observer)
    }

    /// Unmaps the areas in `range`; `note` is told what devices have written to.
    pub(crate) fn unmap_with(
        &mut self,
        range: Span,
        note: &mut dyn FnMut(Span),
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        if !self.check_unmap(range)? {
            return Ok(Unmapped::default());
        }
        for end in [range.start, range.last()] {
            if let Some((area, _)) = self.areas.at(end)
                && !range.covers(&area)
            {
                return Err(UnmapError::CutsArea { range, area });
            }
        }
        self.externals.let_go(range)?;
        self.unmap_between(range.start, range.last(), note, observer)
    }

    /// Refuses what ends beyond the address space; false when there is nothing to do.
    pub(crate) fn check_unmap(&self, range: Span) -> Result<bool, UnmapError> {
        if range.is_empty() {
            return Ok(false);
        }
        if Span::checked(range.start, range.len).is_none() {
            return Err(UnmapError::BeyondEnd { start: range.start });
        }
        Ok(true)
    }

    /// Unmaps everything, as [`unmap`](Self::unmap) does.
    pub fn unmap_all(&mut self, observer: &mut dyn Observer) -> Result<Unmapped, UnmapError> {
        for half in Aperture::zeros(64).spans() {
            self.externals.let_go(half)?;
        }
        // The whole space: a span cannot say that.
        self.unmap_between(0, u64::MAX, &mut |_| (), observer)
    }

    /// Unmaps the areas that begin between `first` and `last`, both included. None of them ends
    /// behind `last`.
    pub(crate) fn unmap_between(
        &mut self,
        first: u64,
        last: u64,
        note: &mut dyn FnMut(Span),
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        let mut unmapped = observed(observer, Step::EmptyTables, |_| {
            self.own.empty(&self.areas, first, last, note)?;
            let mut unmapped = Unmapped::default();
            for (range, area) in self.areas.extract_inside(first, last) {
                unmapped.areas += 1;
                unmapped.bytes += range.len;
                self.own.retire(range, area.hold);
            }
            Ok::<_, UnmapError>((unmapped, unmapped.bytes))
        })?;
        unmapped.unpinned = self.finish_unmap(observer)?;
        Ok(unmapped)
    }

    pub(crate) fn finish_unmap(&mut self, observer: &mut dyn Observer) -> Result<u64, UnmapError> {
        if self.own.is_due() {
            self.flush_observed(observer)
        } else {
            Ok(0)
        }
    }

    /// Has every unit forget what was unmapped and releases the memory that was retired. Returns
    /// the bytes that were unpinned.
    ///
    /// # Errors
    ///
    /// [`UnmapError::Flush`] and [`UnmapError::Unpin`] only. After the first everything is still
    /// retired, and this may be called again. A device that is stuck can be
    /// [detached](Self::detach); then there is nobody to wait for.
    pub fn flush(&mut self) -> Result<u64, UnmapError> {
        self.flush_observed(&mut ())
    }

    /// [`flush`](Self::flush), if [lazy flushing](Flushing::Lazy) has come to one of its bounds.
    pub fn poll(&mut self) -> Result<u64, UnmapError> {
        self.finish_unmap(&mut ())
    }

    fn flush_observed(&mut self, observer: &mut dyn Observer) -> Result<u64, UnmapError> {
        observed(observer, Step::Flush, |_| {
            self.own.flush().map_err(UnmapError::Flush)?;
            Ok::<_, UnmapError>(((), 0))
        })?;
        let (unpinned, failed) = observed(observer, Step::Unpin, |_| {
            let (unpinned, failed) = self.own.release();
            Ok::<_, UnmapError>(((unpinned, failed), unpinned))
        })?;
        failed.map_or(Ok(unpinned), |cause| Err(UnmapError::Unpin(cause)))
    }

    /// Memory that is unmapped but waits for a flush, in areas.
    pub const fn retired(&self) -> usize {
        self.own.retired.len()
    }

    /// Ends the address space: detaches every device, unmaps everything, gives all tables back.
    ///
    /// # Errors
    ///
    /// The first failure, but everything is tried: memory is also released when a device cannot
    /// be detached but its unit forgets what was unmapped, and when a flush fails but every device
    /// can be detached. What is left then is lost on purpose, see [`CloseError`]. Who wants to try
    /// again calls [`detach`](Self::detach) and [`unmap_all`](Self::unmap_all) first.
    pub fn close(mut self) -> Result<(), CloseError> {
        let detached = self.own.detach_all(&mut self.areas);
        self.own.flushing = Flushing::Strict;
        let unmapped = self.unmap_all(&mut ()).map_err(CloseError::Unmap);
        // Only when both have failed memory is left; dropping tries to detach once more.
        detached.map_err(CloseError::Detach)?;
        // Nobody is attached, so that the flush was empty, and each unit has forgotten the domain
        // with its last device. Areas are left in a damaged table only, which nobody should follow.
        if self.areas.is_empty() {
            self.own.end();
        }
        unmapped.map(|_| ())
    }
}

impl<M: TableMemory> Drop for Ioas<M> {
    fn drop(&mut self) {
        // A unit that has let its last device of a domain go has forgotten the domain, so that
        // nothing needs to be flushed any more.
        if self.own.detach_all(&mut self.areas).is_err() {
            mem::forget(mem::take(&mut self.areas));
            mem::forget(mem::take(&mut self.own.retired));
        }
    }
}

impl<M: TableMemory> fmt::Debug for Ioas<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ioas")
            .field("domains", &self.own.domains.len())
            .field("areas", &self.areas.len())
            .field("retired", &self.own.retired.len())
            .finish_non_exhaustive()
    }
}
