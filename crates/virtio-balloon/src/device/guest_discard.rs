//! Discarding guest memory of vm-memory: see [`GuestDiscard`].

use std::sync::Arc;
use std::vec::Vec;

use hostmem::{Discarded, GuestRegionError, Kept, Mapping};
use runs::Span;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::discard::{Discard, NotDiscarded};
use super::settings::Region;

/// Gives guest memory of vm-memory back to the machine, by what backs each region.
///
/// It holds the regions: dropping the `GuestMemoryMmap` unmaps nothing. What it can give back is the
/// memory of this process, and memory files that it shares; what others have mapped privately, nobody
/// else can discard.
///
/// ```
/// use virtio_balloon::device::{Device, GuestDiscard, Settings};
/// use vm_memory::{GuestAddress, GuestMemoryMmap};
///
/// let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 64 << 20)])?;
/// let discard = GuestDiscard::new(&memory)?;
/// // Nothing is held back until a huge page is whole.
/// let regions = discard.regions(4096);
/// let device = Device::new(Settings::default(), &regions, discard, (), ())?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GuestDiscard {
    /// Ascending.
    regions: Vec<(Span, hostmem::Discard)>,
    offsets: Vec<Span>,
    totals: Discarded,
}

/// Why a region of guest memory cannot be discarded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestDiscardError {
    /// It is no memory that can be mapped and held.
    #[error("guest memory {region}: {cause}")]
    Region {
        /// Its guest addresses.
        region: Span,
        /// Why not.
        #[source]
        cause: GuestRegionError,
    },
    /// Discarding would not free it, or not give zeros.
    #[error("guest memory {region}: {cause}")]
    Discard {
        /// Its guest addresses.
        region: Span,
        /// Why not.
        #[source]
        cause: hostmem::DiscardError,
    },
}

impl GuestDiscard {
    /// All regions of this memory.
    ///
    /// # Errors
    ///
    /// A region that cannot be discarded: see [`GuestDiscardError`].
    pub fn new<B: Bitmap + Send + Sync + 'static>(
        memory: &GuestMemoryMmap<B>,
    ) -> Result<Self, GuestDiscardError> {
        let regions = memory.iter().map(|part| {
            let region = Span::new(part.start_addr().0, part.len());
            let mapping = Mapping::of_guest_region(part)
                .map_err(|cause| GuestDiscardError::Region { region, cause })?;
            let discard = hostmem::Discard::new(Arc::new(mapping))
                .map_err(|cause| GuestDiscardError::Discard { region, cause })?;
            Ok((region, discard))
        });
        let mut regions = regions.collect::<Result<Vec<_>, _>>()?;
        regions.sort_by_key(|(region, _)| region.start);
        Ok(Self {
            regions,
            offsets: Vec::new(),
            totals: Discarded::default(),
        })
    }

    /// The regions, as a [`Device`](super::Device) takes them: each with the pages that back it, or with
    /// pages of `least` bytes where those are smaller. 2 MiB are right where memory is mostly in transparent
    /// huge pages, of which a part frees nothing before the rest is discarded; otherwise 4096.
    pub fn regions(&self, least: u64) -> Vec<Region> {
        let regions = self.regions.iter().map(|(guest, discard)| Region {
            guest: *guest,
            page: discard.page().max(least),
        });
        regions.collect()
    }

    /// What backs the region that `run` begins in, and the run's offset and length there: what lies
    /// beyond the region is left out. `None` outside of all.
    pub fn translate(&self, run: Span) -> Option<(&hostmem::Discard, Span)> {
        let (nr, offset) = self.locate(run)?;
        let (_, discard) = self.regions.get(nr)?;
        Some((discard, offset))
    }

    /// The number of the region, and the run's place in it.
    fn locate(&self, run: Span) -> Option<(usize, Span)> {
        let before = |(region, _): &(Span, _)| region.last() < run.start;
        let nr = self.regions.partition_point(before);
        let (region, _) = self.regions.get(nr)?;
        let part = region.intersection(&run)?;
        (part.start == run.start).then(|| (nr, Span::new(part.start - region.start, part.len)))
    }

    /// What was discarded, and by how many system calls.
    pub const fn totals(&self) -> Discarded {
        self.totals
    }

    /// Discards the offsets that have been collected, all in this region.
    fn flush(&mut self, nr: usize, failed: &mut dyn FnMut(Span, NotDiscarded)) -> u64 {
        let Some((region, discard)) = self.regions.get(nr) else {
            return 0;
        };
        let guest = |part: Span| Span::new(region.start + part.start, part.len);
        let result = discard.discard(&self.offsets, &mut |part, why| {
            let cause = match why {
                Kept::Refused { errno, .. } => NotDiscarded::Kernel(errno),
                _ => NotDiscarded::NotPages,
            };
            failed(guest(part), cause);
        });
        let done = result.unwrap_or_else(|_| {
            // Runs that are none, or do not ascend; nothing was touched.
            let parts = self.offsets.iter().copied().map(guest);
            parts.for_each(|part| failed(part, NotDiscarded::NotPages));
            Discarded::default()
        });
        self.offsets.clear();
        self.totals.bytes += done.bytes;
        self.totals.kept += done.kept;
        self.totals.in_parts += done.in_parts;
        self.totals.calls += done.calls;
        done.bytes
    }
}

impl Discard for GuestDiscard {
    fn discard(&mut self, runs: &[Span], failed: &mut dyn FnMut(Span, NotDiscarded)) -> u64 {
        let mut bytes = 0;
        let mut latest = None;
        for run in runs {
            let place = self
                .locate(*run)
                .filter(|(_, offset)| offset.len == run.len);
            let Some((nr, offset)) = place else {
                failed(*run, NotDiscarded::NotPages);
                continue;
            };
            if let Some(before) = latest.replace(nr).filter(|before| *before != nr) {
                bytes += self.flush(before, failed);
            }
            self.offsets.push(offset);
        }
        if let Some(nr) = latest {
            bytes += self.flush(nr, failed);
        }
        bytes
    }
}
