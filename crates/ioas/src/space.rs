//! The address space: areas over pinned memory, in one domain.
//!
//! # Mapping
//!
//! Check, charge, pin, then batch by batch: find runs, fill tables. Each step can fail, and then
//! everything before it is undone in the opposite order: tables are emptied, units flushed, memory
//! unpinned, the charge given back.
//!
//! The area is there, with its pin, before the first entry of its range is. So at no moment, not
//! even while a panic of an observer unwinds, is there an entry to memory that nothing holds.
//!
//! # Unmapping
//!
//! Tables are emptied, units flushed, and only then memory is unpinned and its charge given back.
//! Memory whose flush has failed is *retired*: it belongs to no area any more, but stays pinned
//! and charged until a later flush succeeds. Until then nothing is mapped either: a unit that
//! still holds old translations and tables would not see what is new.
//!
//! # The end
//!
//! [`Ioas::close`] gives everything back and tells what it could not. Dropping an address space
//! detaches its devices and unpins its memory; see [`Ioas`].

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec;
use core::fmt;
use core::iter;

use iommu::{AttachError, DeviceId, DomainId, FlushError, Unit};
use iopt::{AnyTable, Aperture, Discard, Leaf, Prot, RangeError, TableMemory};
use runs::Span;

use crate::area::{Area, Held};
use crate::error::{CloseError, DetachError, MapError, UnmapError};
use crate::fill::Fill;
use crate::ledger::Ledger;
use crate::object::MemoryObject;
use crate::observer::{Observer, Step, observed};
use crate::reach::Reach;

/// Spans in a batch: 64 KiB.
const BATCH: usize = 4096;

/// What an unmap has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmapped {
    /// Areas.
    pub areas: u64,
    /// Their bytes together.
    pub bytes: u64,
    /// Bytes that were unpinned: those of the areas, and those that were retired before.
    pub unpinned: u64,
}

/// An I/O address space.
///
/// # Dropping
///
/// [`close`](Self::close) gives everything back. Dropping an address space detaches its devices,
/// which waits for their accesses under way, and then unpins its memory. If a unit does not let a
/// device go, the memory of all areas stays pinned and charged for good: a device must never reach
/// memory that is not pinned. Tables, as those of a dropped [`Table`](iopt::Table), stay out of use
/// in any case.
pub struct Ioas<M: TableMemory> {
    table: AnyTable<M>,
    reach: Reach,
    ledger: Arc<Ledger>,
    batch: Box<[Span]>,
}

impl<M: TableMemory> Ioas<M> {
    /// An empty address space over `table`, which is empty and which units know as `domain`,
    /// charging to `ledger`.
    pub fn new(domain: DomainId, table: AnyTable<M>, ledger: Arc<Ledger>) -> Self {
        Self {
            table,
            reach: Reach::new(domain),
            ledger,
            batch: vec![Span::default(); BATCH].into_boxed_slice(),
        }
    }

    /// The page table.
    pub const fn table(&self) -> &AnyTable<M> {
        &self.table
    }

    /// The ledger.
    pub const fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The areas, in order.
    pub fn areas(&self) -> impl Iterator<Item = &Area> {
        self.reach.areas.values()
    }

    /// The area that holds `iova`.
    pub fn area_at(&self, iova: u64) -> Option<&Area> {
        let (_, area) = self.reach.areas.range(..=iova).next_back()?;
        area.range.contains(iova).then_some(area)
    }

    /// The leaf that maps `iova`.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.table.leaf_at(iova)
    }

    /// The attached devices.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.reach.devices()
    }

    /// Lets `device` of `unit` see this address space.
    ///
    /// While memory is [retired](Self::retired), the device may come to see that too, as those
    /// that are attached already.
    pub fn attach(&mut self, unit: Arc<dyn Unit>, device: DeviceId) -> Result<(), AttachError> {
        self.reach.attach(unit, device, self.table.root())
    }

    /// Takes this address space away from `device`, from the one that was attached first if several
    /// units have a device of that name. Areas stay.
    pub fn detach(&mut self, device: DeviceId) -> Result<(), DetachError> {
        self.reach.detach(device)
    }

    /// Maps `part` (offset and length in bytes) of `object` at `iova`, all or nothing.
    ///
    /// A part that is mapped twice is pinned and charged twice.
    ///
    /// # Errors
    ///
    /// See [`MapError`]. Nothing is touched, not even for a moment, when the range, the part or
    /// the limit forbids it. If earlier unmaps still wait for a [`flush`](Self::flush), that comes
    /// first, and if it fails again nothing is mapped.
    pub fn map(
        &mut self,
        iova: u64,
        object: &Arc<dyn MemoryObject>,
        part: Span,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let range = self.check(iova, &**object, part)?;
        self.settle().map_err(MapError::Flush)?;

        let charge = observed(observer, Step::Charge, |_| {
            let bytes = object.charge(part);
            let charge = self.ledger.charge(bytes).map_err(MapError::OverLimit)?;
            Ok::<_, MapError>((charge, bytes))
        })?;
        let pin = observed(observer, Step::Pin, |observer| {
            let pin = object.pin(part, &mut |done| observer.progress(Step::Pin, done))?;
            Ok::<_, MapError>((pin, part.len))
        })?;
        // From here on dropping gives back both, in this order.
        let held = Held { pin, charge };
        if observer.progress(Step::Pin, part.len).is_break() {
            return Err(MapError::Interrupted);
        }

        // Vacant: `check` has seen that no area lies there.
        let area = self.reach.areas.entry(iova).or_insert(Area {
            range,
            object: Arc::clone(object),
            offset: part.start,
            prot,
            held,
        });
        let mut fill = Fill {
            table: &mut self.table,
            batch: &mut self.batch,
            range,
            prot,
            mapped: 0,
        };
        let filled = fill.run(area.pinned(), observer);
        let mapped = fill.mapped;
        let result = filled.and_then(|()| self.reach.mapped().map_err(MapError::Flush));
        if result.is_err() {
            self.undo(iova, mapped);
        }
        result
    }

    /// Everything that can be known to be wrong before anything is touched.
    fn check(&self, iova: u64, object: &dyn MemoryObject, part: Span) -> Result<Span, MapError> {
        let granule = self.table.page_sizes().smallest();
        let aperture = self.table.aperture();
        if part.len == 0 {
            return Err(MapError::Range(RangeError::Empty));
        }
        if !Span::new(0, object.len()).covers(&part) || !part.is_aligned(granule) {
            return Err(MapError::Part {
                part,
                object: object.len(),
                granule,
            });
        }
        if iova & (granule - 1) != 0 {
            return Err(MapError::Range(RangeError::Misaligned {
                value: iova,
                granule,
            }));
        }
        let range = Span::checked(iova, part.len).filter(|range| aperture.covers(range));
        let Some(range) = range else {
            let len = iova.checked_add(part.len - 1).map(|_| part.len);
            return Err(MapError::Range(RangeError::OutsideAperture {
                iova,
                len,
                aperture,
            }));
        };
        match self.first_area_in(range) {
            Some(area) => Err(MapError::Overlap {
                wanted: range,
                area: area.range,
            }),
            None => Ok(range),
        }
    }

    /// The first area with at least one byte in `range`.
    fn first_area_in(&self, range: Span) -> Option<&Area> {
        let inside = || self.reach.areas.range(range.start..=range.last()).next();
        self.area_at(range.start)
            .or_else(|| inside().map(|(_, area)| area))
    }

    /// Takes back the area at `iova`, of which the first `mapped` bytes are in the table.
    fn undo(&mut self, iova: u64, mapped: u64) {
        let Some(area) = self.reach.areas.remove(&iova) else {
            return;
        };
        // What the caller must learn is why the map failed. That memory could not be unpinned
        // shows in the ledger, and that it waits for a flush in `retired`.
        if mapped == 0 {
            // No device has ever seen it: there is nothing to wait for.
            let _ = area.held.release();
            return;
        }
        let range = Span::new(iova, mapped);
        let gather = &mut self.reach.gather;
        if let Err(cause) = self.table.unmap_mapped(range, gather, &mut Discard) {
            // Not reached: whole leaves were mapped here just now. Devices might reach the memory,
            // so it stays what it is.
            debug_assert!(false, "what was just mapped cannot be unmapped: {cause}");
            self.reach.areas.insert(iova, area);
            return;
        }
        self.reach.retired.push(area.held);
        let _ = self.settle();
    }

    /// Flushes what earlier calls have left to be flushed, and releases it.
    fn settle(&mut self) -> Result<(), FlushError> {
        if !self.reach.gather.is_empty() {
            self.table.reclaim(self.reach.flush()?);
        }
        // Whoever asks wants room for something else; what cannot be unpinned stays charged.
        let _ = self.reach.release();
        Ok(())
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
        if range.is_empty() {
            return Ok(Unmapped::default());
        }
        if Span::checked(range.start, range.len).is_none() {
            return Err(UnmapError::BeyondEnd { start: range.start });
        }
        for end in [range.start, range.last()] {
            if let Some(area) = self.area_at(end)
                && !range.covers(&area.range)
            {
                return Err(UnmapError::CutsArea {
                    range,
                    area: area.range,
                });
            }
        }
        self.unmap_between(range.start, range.last(), observer)
    }

    /// Unmaps everything, as [`unmap`](Self::unmap) does.
    pub fn unmap_all(&mut self, observer: &mut dyn Observer) -> Result<Unmapped, UnmapError> {
        // The whole space: a span cannot say that.
        self.unmap_between(0, u64::MAX, observer)
    }

    /// Unmaps the areas that begin between `first` and `last`, both included. None of them ends
    /// behind `last`.
    fn unmap_between(
        &mut self,
        first: u64,
        last: u64,
        observer: &mut dyn Observer,
    ) -> Result<Unmapped, UnmapError> {
        let mut unmapped = observed(observer, Step::EmptyTables, |_| {
            let unmapped = self.retire(first, last)?;
            Ok::<_, UnmapError>((unmapped, unmapped.bytes))
        })?;
        unmapped.unpinned = self.flush_observed(observer)?;
        Ok(unmapped)
    }

    /// Empties the entries of these areas and retires their memory; all or nothing.
    fn retire(&mut self, first: u64, last: u64) -> Result<Unmapped, UnmapError> {
        let Self { table, reach, .. } = self;
        let aperture = table.aperture();
        // The table takes out a stretch whole or not at all. That it takes out every stretch or
        // none needs a look at the ends of all but the first before the first store.
        for stretch in stretches(&reach.areas, first, last, aperture).skip(1) {
            for end in [stretch.start, stretch.last()] {
                if let Some(leaf) = table.leaf_at(end)
                    && !stretch.covers(&leaf.run.input())
                {
                    return Err(UnmapError::Table(iopt::UnmapError::InsideLeaf {
                        range: stretch,
                        leaf: leaf.run,
                    }));
                }
            }
        }
        for stretch in stretches(&reach.areas, first, last, aperture) {
            table
                .unmap_mapped(stretch, &mut reach.gather, &mut Discard)
                .map_err(UnmapError::Table)?;
        }
        let mut unmapped = Unmapped::default();
        while let Some((&start, _)) = reach.areas.range(first..=last).next() {
            let Some(area) = reach.areas.remove(&start) else {
                break;
            };
            unmapped.areas += 1;
            unmapped.bytes += area.range.len;
            reach.retired.push(area.held);
        }
        Ok(unmapped)
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

    fn flush_observed(&mut self, observer: &mut dyn Observer) -> Result<u64, UnmapError> {
        observed(observer, Step::Flush, |_| {
            let flushed = self.reach.flush().map_err(UnmapError::Flush)?;
            self.table.reclaim(flushed);
            Ok::<_, UnmapError>(((), 0))
        })?;
        let (unpinned, failed) = observed(observer, Step::Unpin, |_| {
            let (unpinned, failed) = self.reach.release();
            Ok::<_, UnmapError>(((unpinned, failed), unpinned))
        })?;
        failed.map_or(Ok(unpinned), |cause| Err(UnmapError::Unpin(cause)))
    }

    /// Memory that is unmapped but waits for a flush, in pins.
    pub const fn retired(&self) -> usize {
        self.reach.retired.len()
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
        let detached = self.reach.detach_all().map_err(CloseError::Detach);
        let unmapped = self.unmap_all(&mut ()).map_err(CloseError::Unmap);
        // Only when both have failed memory is left; dropping tries to detach once more.
        detached?;
        let Self { table, reach, .. } = self;
        // Nobody is attached, so that the flush was empty, and each unit has forgotten the domain
        // with its last device. Areas are left in a damaged table only, which nobody should follow.
        if reach.areas.is_empty() {
            let (gather, memory) = table.tear_down();
            memory.reclaim(gather.never_walked().into_tables());
        }
        unmapped.map(|_| ())
    }
}

/// The ranges of the areas that begin between `first` and `last`, put together as far as the
/// aperture allows: a table finds what lies in a stretch faster than we do, and goes down once.
fn stretches(
    areas: &BTreeMap<u64, Area>,
    first: u64,
    last: u64,
    aperture: Aperture,
) -> impl Iterator<Item = Span> {
    let mut ranges = areas
        .range(first..=last)
        .map(|(_, area)| area.range)
        .peekable();
    iter::from_fn(move || {
        let mut stretch = ranges.next()?;
        while let Some(joined) = ranges
            .peek()
            .and_then(|next| Span::inclusive(stretch.start, next.last()))
            .filter(|joined| aperture.covers(joined))
        {
            stretch = joined;
            ranges.next();
        }
        Some(stretch)
    })
}

impl<M: TableMemory> fmt::Debug for Ioas<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ioas")
            .field("domain", &self.reach.domain)
            .field("areas", &self.reach.areas.len())
            .field("retired", &self.reach.retired.len())
            .finish_non_exhaustive()
    }
}
