//! A software IOMMU over memory of this process: [`SoftwareIommu`].
//!
//! Its unit walks tables as hardware does, and its devices reach memory by the physical runs of the pins, not
//! by what a table says: a wrong entry leads to wrong data. Runs are learned when a device comes to an address
//! that is not known yet, and all are dropped when anything is unmapped.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ptr::with_exposed_provenance;
use core::slice;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use iommu::{BadTarget, DeviceId, FlushError, Port, RunMap, SoftwareUnit, TargetMemory};
use iopt::FormatId;
use runs::{Iova, Offset, Pa, Span};

use super::{DomainIds, Iommu, TableBuilder};
use crate::areas::area::Area;
use crate::lock::Mutex;
use crate::memory::Memory;
use crate::memory::host::{HostTables, MappedStorage};
use crate::space::Ioas;
use crate::space::endpoint::Endpoint;
use crate::space::listener::Listener;
use crate::space::open::{IoasOptions, OpenError, OpenSpace};

/// Bytes of table memory: for 8 GiB of 4 KiB leaves.
const TABLE_BYTES: u64 = 16 << 20;
/// Addresses of tables: above all memory, and above what stands in for frames.
const TABLE_WINDOW: u64 = 1 << 46;
/// Bits of a domain's number.
const DOMAIN_BITS: u32 = 16;

/// The unit of a [`SoftwareIommu`].
pub type SoftwareIommuUnit = SoftwareUnit<Arc<HostTables>, Arc<PinnedMemory>>;

/// The port of a device behind a [`SoftwareIommu`].
pub type SoftwarePort = Port<Arc<HostTables>, Arc<PinnedMemory>>;

/// An IOMMU in software with tables in VT-d's second-stage format, for device models, tests, and to learn by.
/// Clones are the same IOMMU.
///
/// [`Ioas::over`] opens address spaces over it. They pin memory of this process, whose limit applies.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use hostmem::{Backing, Mapping};
/// use ioas::{HostMemory, Ioas, Memory, SoftwareIommu};
/// use iommu::DeviceId;
/// use iopt::Prot;
/// use runs::Span;
/// # use std::sync::{Arc, atomic::Ordering};
///
/// let iommu = SoftwareIommu::new()?;
/// let space = Ioas::over(&iommu)?;
/// let device = DeviceId::pci(0, 5, 0);
/// space.attach(iommu.device(device))?;
///
/// let mapping = Arc::new(Mapping::new(Backing::Anon4K, 0x10000, None)?);
/// let object = Arc::new(HostMemory::new(mapping.clone()));
/// let memory = Memory::new(object, &space.ledger()?);
/// space.map(0x10_0000, &memory, Span::new(0, 0x10000), Prot::RW)?;
///
/// // The device reads what the processor has written.
/// mapping.cells()[0x3000 / 8].store(7, Ordering::Relaxed);
/// let mut word = [0];
/// iommu.port(device).read(0x10_3000, &mut word)?;
/// assert_eq!(word, [7]);
/// space.close()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SoftwareIommu(Iommu<SoftwareIommuUnit>);

impl SoftwareIommu {
    /// An IOMMU without devices.
    ///
    /// # Errors
    ///
    /// [`OpenError::Tables`].
    pub fn new() -> Result<Self, OpenError> {
        let storage = MappedStorage::new(TABLE_BYTES, None).map_err(OpenError::Tables)?;
        let tables = HostTables::new(storage, TABLE_WINDOW);
        let tables = Arc::new(tables.map_err(|cause| OpenError::Tables(Box::new(cause)))?);
        let unit = SoftwareUnit::new(Arc::clone(&tables), Arc::new(PinnedMemory::default()));
        let builder = TableBuilder::new(tables, DomainIds::new(DOMAIN_BITS), [FormatId::VtdSs]);
        Ok(Self(Iommu::with_builder(Arc::new(unit), builder)))
    }

    /// A device, to be [attached](Ioas::attach).
    pub fn device(&self, device: DeviceId) -> Endpoint {
        self.0.device(device)
    }

    /// A port by which `device` accesses memory; one for each thread that plays the device.
    pub fn port(&self, device: DeviceId) -> SoftwarePort {
        self.unit().port(device)
    }

    /// The unit: its faults, its counters, its table memory.
    pub const fn unit(&self) -> &Arc<SoftwareIommuUnit> {
        self.0.unit()
    }
}

impl OpenSpace for SoftwareIommu {
    /// An address space without a domain, which the first device brings.
    fn open_space(&self, options: IoasOptions) -> Result<Ioas, OpenError> {
        let memory = Arc::clone(self.unit().data());
        let number = memory.spaces.fetch_add(1, Ordering::Relaxed);
        let space = Space { memory, number };
        self.0.open_space(options.listener(Arc::new(space)))
    }
}

/// Pinned memory of this process by physical address, as devices behind a [`SoftwareIommu`] reach it.
#[derive(Debug, Default)]
pub struct PinnedMemory {
    spaces: AtomicU64,
    /// By address space and first address; disjoint within an address space.
    areas: Mutex<BTreeMap<(u64, u64), Mapped>>,
    runs: RwLock<RunMap<Piece>>,
}

/// A part of an area that is mapped.
#[derive(Debug)]
struct Mapped {
    range: Span<Iova>,
    memory: Arc<Memory>,
    offset: u64,
}

impl Mapped {
    /// The same memory at `range`, which lies in it.
    fn at(&self, range: Span<Iova>) -> Self {
        Self {
            range,
            memory: Arc::clone(&self.memory),
            offset: self.offset + (range.start - self.range.start),
        }
    }
}

/// A physical run, where it is in this process.
#[derive(Debug)]
struct Piece {
    /// Stays mapped in this process while this is there.
    _memory: Arc<Memory>,
    address: u64,
    words: usize,
}

impl AsRef<[AtomicU64]> for Piece {
    #[allow(unsafe_code)]
    fn as_ref(&self) -> &[AtomicU64] {
        let words = with_exposed_provenance(self.address as usize);
        // SAFETY: the memory object promises with its `ProcessMemory` that this memory stays mapped while the
        // object is there, which this piece holds, and that this process has no references to it but to atomic
        // cells. `learn` takes whole words at multiples of 8 within the object.
        unsafe { slice::from_raw_parts(words, self.words) }
    }
}

impl PinnedMemory {
    /// Reads where the memory of all areas lies that is pinned now.
    fn learn(&self) {
        let mut found: Vec<(Span<Pa>, Piece)> = Vec::new();
        for area in self.areas.lock().values() {
            let Some(process) = area.memory.object().in_process() else {
                continue;
            };
            let part = Span::<Offset>::new(area.offset, area.range.len);
            area.memory.for_each_run(part, |offset, run| {
                let address = process.address() + offset;
                if address % 8 == 0 && run.is_aligned(8) {
                    let piece = Piece {
                        _memory: Arc::clone(&area.memory),
                        address,
                        words: (run.len / 8) as usize,
                    };
                    found.push((run, piece));
                }
            });
        }
        // Memory that is mapped twice is the same memory, whichever mapping is taken.
        found.sort_by_key(|(run, _)| run.start);
        let mut known = RunMap::default();
        let mut end = 0;
        for (run, mut piece) in found {
            let behind = run.start + run.len;
            let skipped = end.max(run.start) - run.start;
            if behind <= end {
                continue;
            }
            piece.address += skipped;
            piece.words -= (skipped / 8) as usize;
            // It begins where the last one ended, or behind.
            if known.insert(run.start + skipped, piece).is_ok() {
                end = behind;
            }
        }
        *self.runs.write().unwrap_or_else(PoisonError::into_inner) = known;
    }
}

impl TargetMemory for PinnedMemory {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        {
            let runs = self.runs.read().unwrap_or_else(PoisonError::into_inner);
            if runs.with_cells(span, &mut |_| ()).is_ok() {
                return runs.with_cells(span, visit);
            }
        }
        self.learn();
        let runs = self.runs.read().unwrap_or_else(PoisonError::into_inner);
        runs.with_cells(span, visit)
    }
}

/// An address space, as its areas come and go.
struct Space {
    memory: Arc<PinnedMemory>,
    number: u64,
}

impl Space {
    /// Leaves nothing of `range` among the areas.
    fn remove(&self, areas: &mut BTreeMap<(u64, u64), Mapped>, range: Span<Iova>) {
        let met = areas.range((self.number, 0)..=(self.number, range.last()));
        let met = met.rev().map(|(at, area)| (*at, area.range.last()));
        let met = met.take_while(|(_, last)| *last >= range.start);
        for (at, last) in met.collect::<Vec<_>>() {
            let Some(area) = areas.remove(&at) else {
                continue;
            };
            let (_, first) = at;
            if first < range.start {
                let head = area.at(Span::new(first, range.start - first));
                areas.insert(at, head);
            }
            if range.last() < last {
                let behind = range.last() + 1;
                let tail = area.at(Span::new(behind, last - range.last()));
                areas.insert((self.number, behind), tail);
            }
        }
    }
}

impl Listener for Space {
    fn mapped(&self, area: &Area) {
        let mapped = Mapped {
            range: area.range(),
            memory: Arc::clone(area.memory()),
            offset: area.part().start,
        };
        let areas = &mut *self.memory.areas.lock();
        // After a failed flush some of it may still be known.
        self.remove(areas, mapped.range);
        areas.insert((self.number, mapped.range.start), mapped);
    }

    fn unmapped(&self, range: Span<Iova>) -> Result<(), FlushError> {
        let areas = &mut *self.memory.areas.lock();
        self.remove(areas, range);
        // Waits for copies under way.
        let runs = &mut *self
            .memory
            .runs
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *runs = RunMap::default();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ledger::Ledger;
    use crate::memory::synthetic::Synthetic;

    #[test]
    fn areas_are_known_until_their_bytes_are_unmapped() {
        let object = Arc::new(Synthetic::new([Span::new(0, 64)]));
        let memory = Memory::new(object, &Ledger::new("a test", None, 0));
        let pinned = Arc::new(PinnedMemory::default());
        let spaces = [0, 1].map(|number| {
            let memory = Arc::clone(&pinned);
            Space { memory, number }
        });
        let mut random = fastrand::Rng::with_seed(51);
        let mut model = [[None; 24]; 2];
        for round in 0..4000_u64 {
            let nr = random.usize(0..2);
            let (start, len) = (random.u64(0..20), random.u64(1..5));
            let range = Span::new(start, len);
            let areas = &mut *pinned.areas.lock();
            spaces[nr].remove(areas, range);
            let offset = random.bool().then_some(round);
            if let Some(offset) = offset {
                let memory = Arc::clone(&memory);
                let mapped = Mapped {
                    range,
                    memory,
                    offset,
                };
                areas.insert((spaces[nr].number, start), mapped);
            }
            for at in start..start + len {
                model[nr][at as usize] = offset.map(|offset| offset + (at - start));
            }
            let mut found = [[None; 24]; 2];
            for ((number, first), area) in areas.iter() {
                assert_eq!(*first, area.range.start);
                for at in area.range.start..=area.range.last() {
                    let place = &mut found[*number as usize][at as usize];
                    assert_eq!(place.replace(area.offset + (at - first)), None);
                }
            }
            assert_eq!(found, model, "round {round}");
        }
    }
}
