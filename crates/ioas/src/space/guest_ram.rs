//! Guest memory of vm-memory as memory objects: see [`GuestRam`].
//!
//! Each memory object holds its region, which stays mapped for so long, and the kernel pins it where
//! it is. The region is a foreign `hostmem::Mapping`, so there is one way to pin, to look and to charge
//! for all memory of this process.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::ops::ControlFlow;

use hostmem::{GuestRegionError, Mapping, PinnerError, PopulateError, Population};
use iopt::{Interruption, Prot};
use runs::{GuestAddr, Span};
use vm_memory::bitmap::Bitmap;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

use crate::memory::Memory;
use crate::memory::host::HostMemory;
use crate::memory::ledger::Ledger;
use crate::ranges::extents::Extent;
use crate::space::Ioas;
use crate::space::error::MapError;
use crate::space::observed::Observed;
use crate::space::operation::{Panicked, State};

/// The memory of a guest, region by region.
///
/// Each region is a [`Memory`] over a [`HostMemory`]: of its memory file, if it is shared, so that
/// iommufd takes it by offset; of the address in this process for other kernels; pinned by us for
/// tables of ours. It holds the region: dropping the `GuestMemoryMmap` unmaps nothing that is in use.
///
/// ```
/// use std::sync::Arc;
///
/// use ioas::Ioas;
/// use iommu::DomainId;
/// use iopt::{AnyTable, FormatId, HeapTables, Prot};
/// use runs::PageSizes;
/// use vm_memory::{GuestAddress, GuestMemoryMmap};
///
/// let regions = [(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 1 << 20)];
/// let guest = GuestMemoryMmap::<()>::from_ranges(&regions)?;
/// let tables = Arc::new(HeapTables::with_tables(64)?);
/// let table = AnyTable::new(FormatId::VtdSs, 4, PageSizes::from_bits(u64::MAX), tables)?;
/// let space = Ioas::over_table(DomainId(1), table);
/// match space.map_guest(&guest, Prot::RW) {
///     Ok(ram) => assert_eq!(ram.regions().count(), 2),
///     Err(error) => println!("{error:?}"), // With its causes, for instance the limit, with its numbers.
/// }
/// space.close()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct GuestRam {
    regions: Vec<Region>,
}

#[derive(Clone, Debug)]
struct Region {
    base: GuestAddress,
    mapping: Arc<Mapping>,
    memory: Arc<Memory>,
}

impl Region {
    /// Its guest addresses.
    fn span(&self) -> Span<GuestAddr> {
        Span::new(self.base.0, self.memory.len())
    }
}

/// Failure to map guest memory, or to bring it in.
#[derive(Debug)]
#[non_exhaustive]
pub enum GuestRamError {
    /// It is no mapping that can be pinned.
    Mapping {
        /// Its guest addresses.
        region: Span<GuestAddr>,
        /// Cause.
        cause: GuestRegionError,
    },
    /// Its pages cannot be brought in.
    Populate {
        /// Its guest addresses.
        region: Span<GuestAddr>,
        /// Cause. Offsets are those in the region.
        cause: PopulateError,
    },
    /// It cannot be mapped. No region is, with the exception that [`MapError`] names.
    Map {
        /// Its guest addresses.
        region: Span<GuestAddr>,
        /// Cause.
        cause: MapError,
    },
    /// The limit on locked memory cannot be read.
    Limit(PinnerError),
    /// The caller of [`GuestRam::populate`] wanted to stop.
    Interrupted {
        /// Bytes whose pages are there, of all regions.
        done: u64,
    },
}

impl fmt::Display for GuestRamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mapping { region, .. } => write!(f, "guest memory {region} cannot be used"),
            Self::Populate { region, .. } => {
                write!(f, "the pages of guest memory {region} cannot be brought in")
            }
            Self::Map { region, .. } => write!(f, "guest memory {region} cannot be mapped"),
            Self::Limit(cause) => cause.fmt(f),
            Self::Interrupted { done } => write!(f, "interrupted after {}", runs::Bytes(*done)),
        }
    }
}

impl core::error::Error for GuestRamError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Interrupted { .. } => None,
            Self::Populate { cause, .. } => Some(cause),
            Self::Map { cause, .. } => Some(cause),
            Self::Limit(cause) => cause.source(),
            Self::Mapping { cause, .. } => Some(cause),
        }
    }
}

impl GuestRam {
    /// The regions of `guest`, charged to `ledger`, before they are [mapped](Ioas::map_guest_ram): nothing is
    /// pinned yet. Regions that this ledger knows already are the same memory, pinned and charged once.
    ///
    /// # Errors
    ///
    /// See [`GuestRamError`].
    pub fn new<B: Bitmap + Send + Sync + 'static>(
        guest: &GuestMemoryMmap<B>,
        ledger: &Arc<Ledger>,
    ) -> Result<Self, GuestRamError> {
        let region = |region: &GuestRegionMmap<B>| {
            let mapping = Mapping::of_guest_region(region);
            let mapping = Arc::new(mapping.map_err(|cause| GuestRamError::Mapping {
                region: Span::new(region.start_addr().0, region.len()),
                cause,
            })?);
            let memory = ledger.guests.memory(&mapping, || {
                Memory::new(Arc::new(HostMemory::new(Arc::clone(&mapping))), ledger)
            });
            Ok(Region {
                base: region.start_addr(),
                mapping,
                memory,
            })
        };
        let regions: Result<_, GuestRamError> = guest.iter().map(region).collect();
        Ok(Self { regions: regions? })
    }

    /// Guest address and memory of each region, in order.
    pub fn regions(&self) -> impl Iterator<Item = (GuestAddress, &Arc<Memory>)> {
        self.regions
            .iter()
            .map(|region| (region.base, &region.memory))
    }

    /// Brings in the pages of all regions at once, which is faster than to have the pin do it: a
    /// [`Population`] of them, with workers on the nodes that the policy of each region names (`mbind`).
    /// `progress` receives how many bytes of all regions are done, and may stop the work.
    ///
    /// # Errors
    ///
    /// [`GuestRamError::Populate`], [`GuestRamError::Interrupted`].
    pub fn populate(
        &self,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), GuestRamError> {
        let mappings = self.regions.iter().map(|region| &*region.mapping);
        let populated = Population::new(mappings).run(progress);
        populated.map_err(|cause| match cause {
            PopulateError::Interrupted { done } => GuestRamError::Interrupted { done },
            cause => {
                let region = cause.mapping().and_then(|nth| self.regions.get(nth));
                let region = region.map_or(Span::default(), Region::span);
                GuestRamError::Populate { region, cause }
            }
        })
    }
}

impl Ioas {
    /// Maps all regions of `guest` at their guest addresses, as a virtual machine's devices see its memory
    /// without an IOMMU of the guest: all of them, or none. Each is an area. The memory is charged to the
    /// [account](Self::ledger) of this address space; what another one with the same account maps is
    /// pinned and charged once, if the back end [can](crate::Capabilities::shares_pins).
    ///
    /// Returns the handle that a balloon and unplugging need.
    ///
    /// # Errors
    ///
    /// See [`GuestRamError`].
    pub fn map_guest<B: Bitmap + Send + Sync + 'static>(
        &self,
        guest: &GuestMemoryMmap<B>,
        prot: Prot,
    ) -> Result<GuestRam, GuestRamError> {
        let ledger = self.ledger().map_err(GuestRamError::Limit)?;
        let ram = GuestRam::new(guest, &ledger)?;
        self.map_guest_ram(&ram, prot)?;
        Ok(ram)
    }

    /// [`map_guest`](Self::map_guest) of memory that is ready: populated, or charged to another account.
    ///
    /// # Errors
    ///
    /// [`GuestRamError::Map`] of the first region that cannot be mapped. What can be known beforehand is
    /// looked at for all regions before any of them is touched.
    pub fn map_guest_ram(&self, ram: &GuestRam, prot: Prot) -> Result<(), GuestRamError> {
        self.observed(&mut ()).map_guest_ram(ram, prot)
    }
}

impl Observed<'_> {
    /// [`Ioas::map_guest_ram`], observed.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn map_guest_ram(&mut self, ram: &GuestRam, prot: Prot) -> Result<(), GuestRamError> {
        let (ioas, observer) = (self.ioas, &mut *self.observer);
        let core = ioas.gate.read();
        let op = ioas.op(&core);
        let mut areas = Vec::with_capacity(ram.regions.len());
        for region in &ram.regions {
            let (region, memory) = (region.span(), &region.memory);
            let whole = Span::new(0, region.len);
            let checked = op.check(region.start, memory, whole, prot);
            areas.push(checked.map_err(|cause| GuestRamError::Map { region, cause })?);
        }
        let named: Vec<Extent> = areas.iter().map(|area| Extent::of(area.range)).collect();
        let vacant = |state: &mut State| {
            areas.iter().try_for_each(|area| {
                let region = area.range.cast();
                let vacant = state.check_vacant(area.range);
                vacant.map_err(|cause| GuestRamError::Map { region, cause })
            })
        };
        let (claim, ()) = op.take(|_| &named, vacant)?;
        claim.run(|claim| {
            for (done, area) in areas.into_iter().enumerate() {
                let region = area.range.cast();
                if let Err(cause) = op.map_taken(claim, area, observer) {
                    for before in named.iter().take(done) {
                        // The caller must learn why the map failed. If a unit does not take notice, the memory is
                        // retired.
                        let (note, gone) = (&mut |_| (), &mut ioas.retired.gone());
                        let refused = Interruption::Refused;
                        let _ = op.unmap_taken(claim, *before, refused, note, gone, &mut ());
                    }
                    return Err(GuestRamError::Map { region, cause });
                }
            }
            Ok(())
        })
    }
}

impl From<Panicked> for GuestRamError {
    fn from(Panicked(range): Panicked) -> Self {
        Self::Map {
            region: range.cast(),
            cause: MapError::Panicked { range },
        }
    }
}
