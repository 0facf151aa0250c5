//! The address space: areas over pinned memory, in one domain.
//!
//! # Mapping
//!
//! Check, charge, pin, then batch by batch: find runs, fill tables. The batch is the only memory
//! that the way takes, whatever the number of runs. Each step can fail, and then everything before
//! it is undone in the opposite order: tables are emptied, units flushed, memory unpinned, the
//! charge given back.
//!
//! # Unmapping
//!
//! Tables are emptied, units flushed, and only then memory is unpinned and its charge given back.
//! Memory whose flush has failed is *retired*: it belongs to no area any more, but stays pinned
//! and charged until a later flush succeeds.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use iommu::{AttachError, DeviceId, DomainId, Unit};
use iopt::{AnyTable, Leaf, Prot, RangeError, TableMemory};
use runs::Span;

use crate::domain::Domain;
use crate::error::{DetachError, MapError, UnmapError};
use crate::ledger::{Charge, Ledger};
use crate::object::{MemoryObject, Pinned};
use crate::observer::{Observer, Step};

/// Spans in a batch: 64 KiB.
const BATCH: usize = 4096;

/// A stretch of the address space over a part of a memory object.
#[derive(Debug)]
pub struct Area {
    range: Span,
    object: Arc<dyn MemoryObject>,
    offset: u64,
    prot: Prot,
    held: Held,
}

/// Memory that is pinned and charged.
#[derive(Debug)]
struct Held {
    pin: Box<dyn Pinned>,
    charge: Charge,
}

impl Area {
    /// Its device addresses.
    pub const fn range(&self) -> Span {
        self.range
    }

    /// The memory object.
    pub fn object(&self) -> &Arc<dyn MemoryObject> {
        &self.object
    }

    /// Offset in the memory object, bytes.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// What devices may do with it.
    pub const fn prot(&self) -> Prot {
        self.prot
    }

    /// The memory behind it, pinned.
    pub fn pinned(&self) -> &dyn Pinned {
        &*self.held.pin
    }

    /// Bytes that are charged for it.
    pub const fn charged(&self) -> u64 {
        self.held.charge.bytes()
    }
}

/// What an unmap has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmapped {
    /// Areas.
    pub areas: u64,
    /// Their bytes together.
    pub bytes: u64,
    /// Bytes that were unpinned.
    pub unpinned: u64,
}

/// An I/O address space.
///
/// Dropping it leaves its tables out of use, since a unit may still walk them;
/// [`close`](Self::close) gives everything back.
pub struct Ioas<M> {
    domain: Domain<M>,
    areas: BTreeMap<u64, Area>,
    retired: Vec<Held>,
    ledger: Arc<Ledger>,
    batch: Box<[Span]>,
}

impl<M: TableMemory> Ioas<M> {
    /// An empty address space over `table`, which units know as `domain`, charging to `ledger`.
    pub fn new(domain: DomainId, table: AnyTable<M>, ledger: Arc<Ledger>) -> Self {
        Self {
            domain: Domain::new(domain, table),
            areas: BTreeMap::new(),
            retired: Vec::new(),
            ledger,
            batch: vec![Span::default(); BATCH].into_boxed_slice(),
        }
    }

    /// The page table.
    pub fn table(&self) -> &AnyTable<M> {
        &self.domain.table
    }

    /// The ledger.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The areas, in order.
    pub fn areas(&self) -> impl Iterator<Item = &Area> {
        self.areas.values()
    }

    /// The area that holds `iova`.
    pub fn area_at(&self, iova: u64) -> Option<&Area> {
        let (_, area) = self.areas.range(..=iova).next_back()?;
        area.range.contains(iova).then_some(area)
    }

    /// The leaf that maps `iova`.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.domain.table.leaf_at(iova)
    }

    /// The attached devices.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        self.domain.devices()
    }

    /// Lets `device` of `unit` see this address space.
    pub fn attach(&mut self, unit: Arc<dyn Unit>, device: DeviceId) -> Result<(), AttachError> {
        self.domain.attach(unit, device)
    }

    /// Takes this address space away from `device`. Areas stay.
    pub fn detach(&mut self, device: DeviceId) -> Result<(), DetachError> {
        self.domain.detach(device)
    }

    /// Maps `part` (offset and length in bytes) of `object` at `iova`.
    pub fn map(
        &mut self,
        iova: u64,
        object: &Arc<dyn MemoryObject>,
        part: Span,
        prot: Prot,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let range = self.check(iova, &**object, part)?;

        observer.begin(Step::Charge);
        let bytes = object.charge(part);
        let charge = self.ledger.charge(bytes).map_err(MapError::OverLimit)?;
        observer.end(Step::Charge, bytes);

        observer.begin(Step::Pin);
        let pin = object.pin(part, &mut |done| observer.progress(Step::Pin, done))?;
        observer.end(Step::Pin, part.len);
        if observer.progress(Step::Pin, part.len).is_break() {
            return Err(MapError::Interrupted);
        }

        let held = Held { pin, charge };
        let mut mapped = 0;
        let result = self
            .fill(range, &*held.pin, prot, &mut mapped, observer)
            .and_then(|()| self.domain.mapped().map_err(MapError::Flush));
        if let Err(cause) = result {
            self.undo(Span::new(iova, mapped), held);
            return Err(cause);
        }
        let (object, offset) = (Arc::clone(object), part.start);
        self.areas.insert(
            iova,
            Area {
                range,
                object,
                offset,
                prot,
                held,
            },
        );
        Ok(())
    }

    /// Everything that can be known to be wrong before anything is touched.
    fn check(&self, iova: u64, object: &dyn MemoryObject, part: Span) -> Result<Span, MapError> {
        let granule = self.domain.table.page_sizes().smallest();
        let aperture = self.domain.table.aperture();
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
        match self.areas_in(range).next() {
            Some(area) => Err(MapError::Overlap {
                wanted: range,
                area: area.range,
            }),
            None => Ok(range),
        }
    }

    /// The areas with at least one byte in `range`, in order.
    fn areas_in(&self, range: Span) -> impl Iterator<Item = &Area> {
        // The one that begins before the range may reach into it.
        let first = self
            .areas
            .range(..range.start)
            .next_back()
            .map_or(range.start, |(k, _)| *k);
        self.areas
            .range(first..=range.last())
            .map(|(_, area)| area)
            .filter(move |area| area.range.overlaps(&range))
    }

    /// Finds the runs and fills the tables, batch by batch. `mapped` counts the bytes from the
    /// start of `range` that are in the tables, after an error too.
    fn fill(
        &mut self,
        range: Span,
        pin: &dyn Pinned,
        prot: Prot,
        mapped: &mut u64,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        observer.begin(Step::FindRuns);
        let mut reader = pin.runs().map_err(MapError::Runs)?;
        loop {
            let count = reader.next_batch(&mut self.batch).map_err(MapError::Runs)?;
            let batch = self.batch.get(..count).unwrap_or(&[]);
            let bytes = batch
                .iter()
                .fold(0u64, |sum, run| sum.saturating_add(run.len));
            observer.end(Step::FindRuns, bytes);
            if count == 0 {
                break;
            }
            if bytes > range.len - *mapped {
                let found = mapped.saturating_add(bytes);
                return Err(MapError::RunsDiffer {
                    pinned: range.len,
                    found,
                });
            }
            observer.begin(Step::FillTables);
            self.domain
                .map(range.start + *mapped, batch, prot)
                .map_err(MapError::Table)?;
            *mapped += bytes;
            observer.end(Step::FillTables, bytes);
            if observer.progress(Step::FillTables, *mapped).is_break() {
                return Err(MapError::Interrupted);
            }
            observer.begin(Step::FindRuns);
        }
        if *mapped != range.len {
            return Err(MapError::RunsDiffer {
                pinned: range.len,
                found: *mapped,
            });
        }
        Ok(())
    }

    /// Takes back what a failed map has mapped.
    fn undo(&mut self, mapped: Span, held: Held) {
        if mapped.len > 0 && self.domain.unmap(mapped).is_err() {
            // Not reached: the range was mapped just now, whole leaf by whole leaf.
            debug_assert!(false, "a range that was just mapped cannot be unmapped");
        }
        self.retired.push(held);
        // If a unit does not take notice the memory stays retired, and the next flush tries again;
        // what the caller must learn is why the map failed. Dropping a pin unpins it.
        let _ = self.flush();
    }

    /// Unmaps every area in `range`. Areas that lie only partly in it are not cut: that is refused
    /// and nothing changes. Where nothing is mapped nothing happens.
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
        if let Some(area) = self.areas_in(range).find(|area| !range.covers(&area.range)) {
            return Err(UnmapError::CutsArea {
                range,
                area: area.range,
            });
        }
        let mut unmapped = Unmapped::default();
        observer.begin(Step::EmptyTables);
        let first = |areas: &BTreeMap<u64, Area>| {
            areas
                .range(range.start..=range.last())
                .next()
                .map(|(start, area)| (*start, area.range))
        };
        while let Some((start, area)) = first(&self.areas) {
            self.domain.unmap(area).map_err(UnmapError::Table)?;
            unmapped.areas += 1;
            unmapped.bytes += area.len;
            self.retired
                .extend(self.areas.remove(&start).map(|area| area.held));
        }
        observer.end(Step::EmptyTables, unmapped.bytes);
        unmapped.unpinned = self.flush_observed(observer)?;
        Ok(unmapped)
    }

    /// Unmaps everything.
    pub fn unmap_all(&mut self, observer: &mut dyn Observer) -> Result<Unmapped, UnmapError> {
        let Some(first) = self.areas.values().next() else {
            return Ok(Unmapped::default());
        };
        let first = first.range.start;
        let last = self
            .areas
            .values()
            .next_back()
            .map_or(first, |area| area.range.last());
        self.unmap(Span::inclusive(first, last).unwrap_or_default(), observer)
    }

    /// Has every unit forget what was unmapped and releases the memory that was retired. Returns
    /// the bytes that were unpinned.
    pub fn flush(&mut self) -> Result<u64, UnmapError> {
        self.flush_observed(&mut ())
    }

    fn flush_observed(&mut self, observer: &mut dyn Observer) -> Result<u64, UnmapError> {
        observer.begin(Step::Flush);
        self.domain.flush().map_err(UnmapError::Flush)?;
        observer.end(Step::Flush, 0);
        observer.begin(Step::Unpin);
        let mut unpinned = 0;
        let mut failed = None;
        for Held { pin, charge } in self.retired.drain(..) {
            match pin.unpin() {
                Ok(bytes) => unpinned += bytes,
                Err(cause) => failed = failed.or(Some(cause)),
            }
            drop(charge);
        }
        observer.end(Step::Unpin, unpinned);
        failed.map_or(Ok(unpinned), |cause| Err(UnmapError::Unpin(cause)))
    }

    /// Memory that is unmapped but waits for a flush, in pins.
    pub fn retired(&self) -> usize {
        self.retired.len()
    }

    /// Ends the address space: unmaps everything, detaches every device, gives all tables back.
    pub fn close(mut self) -> Result<(), CloseError> {
        self.unmap_all(&mut ()).map_err(CloseError::Unmap)?;
        self.flush().map_err(CloseError::Unmap)?;
        self.domain.close().map_err(CloseError::Detach)
    }
}

impl<M> fmt::Debug for Ioas<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ioas")
            .field("domain", &self.domain.id)
            .field("areas", &self.areas.len())
            .field("retired", &self.retired.len())
            .finish_non_exhaustive()
    }
}

/// Why an address space did not come to an end in order.
#[derive(Debug)]
pub enum CloseError {
    /// Something could not be unmapped.
    Unmap(UnmapError),
    /// A device could not be detached.
    Detach(DetachError),
}

impl fmt::Display for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmap(cause) => cause.fmt(f),
            Self::Detach(cause) => cause.fmt(f),
        }
    }
}

impl core::error::Error for CloseError {}
