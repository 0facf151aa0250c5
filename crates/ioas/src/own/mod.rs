//! The own back end: domains with tables of ours, and the pins behind them.
//!
//! The rule that this module keeps: **no memory is unpinned that a device can still reach.** Memory
//! leaves by one of two ways only.
//!
//! * Its entries are emptied in every domain's table, its hold is *retired*, and only when every
//!   domain has been flushed it is let go. What is not flushed yet stays in the domains' gathers and
//!   among the retired, over failed flushes too.
//! * Every device is detached, as when the whole address space is dropped. If a unit does not let a
//!   device go, the memory is never unpinned: a leak is harmless, DMA into memory that belongs to
//!   somebody else is not.
//!
//! Areas are pinned and mapped for as long as there is a domain. The first domain to come maps all
//! of them, the last to go lets all of them go; the areas themselves stay.

mod build;
mod domain;
mod fill;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::convert::Infallible;
use core::iter;
use core::slice;
use core::time::Duration;

use iommu::{DeviceId, DomainId, FlushError, Unit};
use iopt::{AnyTable, Aperture, Interruption, RefitError, TableMemory};
use runs::Span;

pub use build::{BuildDomain, Builder, BuilderError, DomainIds};
pub(crate) use domain::Domain;
use fill::Fill;

use crate::area::Area;
use crate::error::{AttachError, DetachError, MapError, UnmapError};
use crate::intervals::Intervals;
use crate::listener::Listeners;
use crate::memory::Hold;
use crate::object::Cause;
use crate::observer::Observer;

/// Spans in a batch: 64 KiB.
const BATCH: usize = 4096;

/// When units are told what was unmapped.
#[derive(Clone, Copy, Debug, Default)]
pub enum Flushing {
    /// At the end of every unmap: its memory is unpinned when it returns.
    #[default]
    Strict,
    /// In batches. Until then devices may still reach what was unmapped, and it stays pinned and
    /// charged. What is mapped where something waits flushes first.
    Lazy {
        /// Holds that may wait; one more and everything is flushed.
        holds: usize,
        /// How long the first of them may wait. It is looked at with every unmap, and by
        /// [`Ioas::poll`](crate::Ioas::poll).
        age: Duration,
        /// A clock that only goes forward.
        now: fn() -> Duration,
    },
}

pub(crate) struct Own<M: TableMemory> {
    pub(crate) domains: Vec<Domain<M>>,
    /// The first domain stays without devices.
    kept: bool,
    builder: Option<Box<dyn BuildDomain<M>>>,
    /// Memory that was unmapped and that gathers still name.
    pub(crate) retired: Vec<Hold>,
    /// Others with translations of their own.
    pub(crate) listeners: Listeners,
    pub(crate) flushing: Flushing,
    /// When the first of the retired was.
    since: Option<Duration>,
    batch: Box<[Span]>,
}

impl<M: TableMemory> Own<M> {
    pub(crate) fn new(
        kept: Option<(DomainId, AnyTable<M>)>,
        builder: Option<Box<dyn BuildDomain<M>>>,
    ) -> Self {
        Self {
            kept: kept.is_some(),
            domains: Vec::from_iter(kept.map(|(id, table)| Domain::new(id, table, None))),
            builder,
            retired: Vec::new(),
            listeners: Listeners::default(),
            flushing: Flushing::Strict,
            since: None,
            batch: vec![Span::default(); BATCH].into_boxed_slice(),
        }
    }

    /// The smallest page that every domain has; 1 without a domain.
    pub(crate) fn granule(&self) -> u64 {
        let smallest = |domain: &Domain<M>| domain.table.page_sizes().smallest();
        self.domains.iter().map(smallest).max().unwrap_or(1)
    }

    /// The addresses of each domain.
    pub(crate) fn apertures(&self) -> impl Iterator<Item = Aperture> + '_ {
        self.domains.iter().map(|domain| domain.table.aperture())
    }

    /// Pins the memory of `area` and maps it in every domain, all or nothing; without a domain there
    /// is nothing to do. Its hold is in the area before the first entry is in a table, so that at no
    /// moment, not even while a panic of an observer unwinds, there is an entry to memory that
    /// nothing holds.
    pub(crate) fn map(
        &mut self,
        area: &mut Area,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        if self.domains.is_empty() {
            return Ok(());
        }
        let hold = area.memory.hold(area.part(), observer)?;
        area.hold = Some(hold);
        let (filled, reached) = fill(&mut self.domains, &mut self.batch, area, observer);
        let told = || self.domains.iter().try_for_each(Domain::mapped);
        let result = filled.and_then(|()| told().map_err(MapError::Flush));
        if result.is_err() {
            self.undo(area, reached);
        }
        result
    }

    /// Takes back an area of which the first `reached` bytes may be in tables.
    fn undo(&mut self, area: &mut Area, reached: u64) {
        // What the caller must learn is why the map failed. That memory could not be unpinned
        // shows in the ledger, and that it waits for a flush in `retired`.
        if reached > 0 {
            let range = Span::new(area.range.start, reached);
            for domain in &mut self.domains {
                if let Err(cause) = domain.empty(range, &mut |_| ()) {
                    // Not reached: whole leaves were mapped here just now. Devices might reach the
                    // memory, so it stays what it is.
                    debug_assert!(false, "what was just mapped cannot be unmapped: {cause}");
                    return;
                }
            }
            self.retire(range, area.hold.take());
            let _ = self.settle();
        } else if let Some(hold) = area.hold.take() {
            // No device has ever seen it: there is nothing to wait for.
            let _ = hold.release();
        }
    }

    /// Keeps the memory that was mapped at `range` until everybody has forgotten it.
    pub(crate) fn retire(&mut self, range: Span, hold: Option<Hold>) {
        self.listeners.note(range);
        self.retired.extend(hold);
    }

    /// Empties the entries of the areas that begin between `first` and `last`, both included, in
    /// every domain, all or nothing. None of them ends behind `last`. `note` is told what a device
    /// has written to, while that is tracked.
    pub(crate) fn empty(
        &mut self,
        areas: &Intervals<Area>,
        first: u64,
        last: u64,
        note: &mut dyn FnMut(Span),
    ) -> Result<(), UnmapError> {
        // A table takes out a stretch whole or not at all. That every table takes out every stretch
        // or none does, needs a look at all ends but the first stretch's in the first table.
        let mut looked = false;
        for domain in &self.domains {
            for stretch in stretches(areas, first, last, domain.table.aperture()) {
                if looked && let Some(leaf) = domain.leaf_over_ends(stretch) {
                    let range = stretch;
                    return Err(UnmapError::Table(iopt::UnmapError::InsideLeaf {
                        range,
                        leaf,
                    }));
                }
                looked = true;
            }
        }
        for domain in &mut self.domains {
            for stretch in stretches(areas, first, last, domain.table.aperture()) {
                domain.empty(stretch, note).map_err(UnmapError::Table)?;
            }
        }
        Ok(())
    }

    /// Has a leaf begin at `at` in every domain.
    pub(crate) fn cut(
        &mut self,
        at: u64,
        interruption: Interruption,
    ) -> Result<(), RefitError<FlushError>> {
        self.domains
            .iter_mut()
            .try_for_each(|domain| domain.cut(at, interruption))
    }

    /// Gives the leaves in `range` the largest sizes, in every domain.
    pub(crate) fn merge(
        &mut self,
        range: Span,
        interruption: Interruption,
    ) -> Result<(), RefitError<FlushError>> {
        self.domains
            .iter_mut()
            .try_for_each(|domain| domain.merge(range, interruption))
    }

    /// Makes the leaves in `range` ones of at most `size` bytes, in every domain that has leaves of
    /// that size.
    pub(crate) fn split(
        &mut self,
        range: Span,
        size: u64,
        interruption: Interruption,
    ) -> Result<(), RefitError<FlushError>> {
        let has = |domain: &&mut Domain<M>| domain.table.page_sizes().bits() & size == size;
        self.domains
            .iter_mut()
            .filter(has)
            .try_for_each(|domain| domain.split(range, size, interruption))
    }

    /// What must happen before something is mapped in `range`: a unit that still holds old
    /// translations there, or a table that was unlinked, would not see what is new.
    pub(crate) fn make_way(&mut self, range: Span) -> Result<(), FlushError> {
        let waits = |domain: &Domain<M>| {
            let what = domain.gather.invalidation();
            what.tables_unlinked()
                || what.new_root().is_some()
                || what.ranges().iter().any(|waiting| waiting.overlaps(&range))
        };
        match self.flushing {
            Flushing::Strict => self.settle(),
            Flushing::Lazy { .. } if !self.listeners.is_quiet() => self.settle(),
            Flushing::Lazy { .. } if self.domains.iter().any(waits) => self.settle(),
            Flushing::Lazy { .. } => Ok(()),
        }
    }

    /// Flushes what earlier calls have left to be flushed, and lets go of it.
    pub(crate) fn settle(&mut self) -> Result<(), FlushError> {
        self.flush()?;
        // Whoever asks wants room for something else; what cannot be unpinned stays charged.
        let _ = self.release();
        Ok(())
    }

    /// Whether lazy flushing has come to its bound.
    pub(crate) fn is_due(&mut self) -> bool {
        match self.flushing {
            Flushing::Strict => true,
            Flushing::Lazy { holds, age, now } => {
                if self.retired.is_empty() && self.listeners.is_quiet() {
                    self.since = None;
                    return false;
                }
                let now = now();
                let since = *self.since.get_or_insert(now);
                self.retired.len() > holds || now.saturating_sub(since) >= age
            }
        }
    }

    /// Has every unit and every listener forget what was taken out of the tables. After an error all
    /// of that of whoever failed is still to come.
    pub(crate) fn flush(&mut self) -> Result<(), FlushError> {
        let flushed = self.domains.iter_mut().map(Domain::flush);
        let flushed = flushed.fold(Ok(()), |all, one| all.and(one));
        self.listeners.flush().and(flushed)
    }

    /// Lets go of the retired memory, which was flushed. Returns the bytes that were unpinned, and
    /// the first failure.
    pub(crate) fn release(&mut self) -> (u64, Option<Cause>) {
        debug_assert!(
            self.listeners.is_quiet() && self.domains.iter().all(|domain| domain.gather.is_empty()),
            "released before it was flushed"
        );
        self.since = None;
        let mut unpinned = 0;
        let mut failed = None;
        for hold in self.retired.drain(..) {
            let (bytes, cause) = hold.release();
            unpinned += bytes;
            failed = failed.or(cause);
        }
        (unpinned, failed)
    }

    /// Lets `device` into a domain that suits its unit, or into a new one.
    pub(crate) fn attach(
        &mut self,
        unit: Arc<dyn Unit>,
        device: DeviceId,
        dirty: bool,
        areas: &mut Intervals<Area>,
    ) -> Result<(), AttachError> {
        let mut refused = None;
        for domain in &mut self.domains {
            // A table that the caller has built is tried in any case: the unit says what is wrong.
            if domain.coherent.is_some() && !domain.suits(&*unit, dirty) {
                continue;
            }
            match unit.attach(device, domain.id, domain.table.root()) {
                Ok(()) => {
                    domain.devices.0.push((unit, device));
                    return Ok(());
                }
                // Where it was it stays, and no other domain could have it.
                Err(cause @ iommu::AttachError::AlreadyAttached { .. }) => {
                    return Err(AttachError::Unit(cause));
                }
                Err(cause) => refused = refused.or(Some(cause)),
            }
        }
        let Some(builder) = &mut self.builder else {
            return Err(refused.map_or(AttachError::NoDomain { device }, AttachError::Unit));
        };
        let (id, table) = builder.build(&*unit, dirty).map_err(AttachError::Build)?;
        let coherent = Some(unit.capabilities().snoop_control);
        let mut domain = Domain::new(id, table, coherent);
        if dirty {
            domain.track();
        }
        let first = self.domains.is_empty();
        let attached = replay(&mut domain, &mut self.batch, areas).and_then(|()| {
            let root = domain.table.root();
            unit.attach(device, id, root).map_err(AttachError::Unit)
        });
        match attached {
            Ok(()) => {
                domain.devices.0.push((unit, device));
                self.domains.push(domain);
                Ok(())
            }
            Err(cause) => {
                domain.end();
                builder.ended(id);
                if first {
                    let_go(areas);
                }
                Err(cause)
            }
        }
    }

    /// Takes `device` out of its domain, from the one that came first if several units have a device
    /// of that name. A domain without devices ends, and with the last one the pins of all areas.
    pub(crate) fn detach(
        &mut self,
        device: DeviceId,
        areas: &mut Intervals<Area>,
    ) -> Result<(), DetachError> {
        let mut found = None;
        for (place, domain) in self.domains.iter_mut().enumerate() {
            if let Some(detached) = domain.devices.detach(device) {
                detached?;
                found = Some(place);
                break;
            }
        }
        let place = found.ok_or(DetachError::NotAttached { device })?;
        self.end_if_left(place, areas);
        Ok(())
    }

    fn end_if_left(&mut self, place: usize, areas: &mut Intervals<Area>) {
        if !self.domains[place].devices.0.is_empty() || (self.kept && place == 0) {
            return;
        }
        let domain = self.domains.remove(place);
        let id = domain.id;
        domain.end();
        if let Some(builder) = &mut self.builder {
            builder.ended(id);
        }
        if self.domains.is_empty() {
            let_go(areas);
            // No device is left that could reach it. Who is in this process is waited for.
            let _ = self.settle();
        }
    }

    /// Detaches every device that its unit lets go. The error is that of the first one that stays.
    pub(crate) fn detach_all(&mut self, areas: &mut Intervals<Area>) -> Result<(), DetachError> {
        let mut result = Ok(());
        for place in (0..self.domains.len()).rev() {
            result = self.domains[place].devices.detach_all().and(result);
            self.end_if_left(place, areas);
        }
        result
    }

    /// Ends the domain that was kept, whose table is empty and which has no device.
    pub(crate) fn end(&mut self) {
        self.domains.drain(..).for_each(Domain::end);
    }
}

/// Fills the tables of `domains` with an area that is held. Also says how many bytes of it may be in
/// tables.
fn fill<M: TableMemory>(
    domains: &mut [Domain<M>],
    batch: &mut [Span],
    area: &Area,
    observer: &mut dyn Observer,
) -> (Result<(), MapError>, u64) {
    let Some(hold) = &area.hold else {
        return (Ok(()), 0);
    };
    let mut fill = Fill::new(domains, batch, area);
    let result = fill.run(hold, area.part(), observer);
    (result, fill.reached)
}

/// Maps all areas in a domain that no device sees yet. Areas that nothing holds are pinned for it.
fn replay<M: TableMemory>(
    domain: &mut Domain<M>,
    batch: &mut [Span],
    areas: &mut Intervals<Area>,
) -> Result<(), AttachError> {
    areas.try_for_each_mut(0, u64::MAX, |range, area| {
        if area.out {
            return Ok(());
        }
        let failed = |cause| AttachError::Replay { area: range, cause };
        if area.hold.is_none() {
            area.hold = Some(area.memory.hold(area.part(), &mut ()).map_err(failed)?);
        }
        let (filled, _) = fill(slice::from_mut(domain), batch, area, &mut ());
        filled.map_err(failed)
    })
}

/// Lets go of the memory of all areas, which no domain maps.
fn let_go(areas: &mut Intervals<Area>) {
    let Ok(()) = areas.try_for_each_mut(0, u64::MAX, |_, area| {
        area.hold = None;
        Ok::<_, Infallible>(())
    });
}

/// The ranges of the areas that begin between `first` and `last`, put together as far as the
/// aperture allows: a table finds what lies in a stretch faster than we do, and goes down once.
fn stretches(
    areas: &Intervals<Area>,
    first: u64,
    last: u64,
    aperture: Aperture,
) -> impl Iterator<Item = Span> {
    let mut ranges = areas
        .overlapping(first, last)
        .map(|(range, _)| range)
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
