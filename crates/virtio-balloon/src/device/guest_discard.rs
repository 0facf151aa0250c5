//! Discarding guest memory of vm-memory: see [`GuestDiscard`].

use std::borrow::Borrow;
use std::sync::Arc;
use std::vec::Vec;

use hostmem::{Discard, DiscardRefusal, Discarded, GuestRegionError, Mapping};
use runs::{GuestAddr, Offset, Span};
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::discarder::{Discarder, NotDiscarded};
use crate::map::{MemoryMap, Part, Region};

/// Gives guest memory of vm-memory back to the machine, by what backs each region.
///
/// The map has the regions, each with a `hostmem::Discard`, which holds it: dropping the `GuestMemoryMmap`
/// unmaps nothing. Memory of this process, and memory files that it shares, can be given back; memory that
/// another process has mapped privately can only be discarded by that process.
///
/// ```
/// use virtio_balloon::device::{BalloonDevice, GuestDiscard, BalloonSettings};
/// use vm_memory::{GuestAddress, GuestMemoryMmap};
///
/// let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 64 << 20)])?;
/// // Nothing is held back until a huge page is whole.
/// let regions = GuestDiscard::regions(&memory, 4096)?;
/// let device = BalloonDevice::new(BalloonSettings::default(), regions, GuestDiscard::new(), (), ())?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct GuestDiscard {
    offsets: Vec<Span<Offset>>,
    totals: Discarded,
}

/// Why a region of guest memory cannot be discarded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestDiscardError {
    /// It is no memory that can be mapped and held.
    #[error("guest memory {region} cannot be used")]
    Region {
        /// Its guest addresses.
        region: Span<GuestAddr>,
        /// Why not.
        #[source]
        cause: GuestRegionError,
    },
    /// Discarding would not free it, or not give zeros.
    #[error("guest memory {region} cannot be discarded")]
    Discard {
        /// Its guest addresses.
        region: Span<GuestAddr>,
        /// Why not.
        #[source]
        cause: hostmem::DiscardError,
    },
}

impl GuestDiscard {
    /// It has discarded nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The regions of this memory, as a [`BalloonDevice`](super::BalloonDevice) takes them: each with the pages that back
    /// it, or with pages of `least` bytes where those are smaller. 2 MiB are right where memory is mostly in
    /// transparent huge pages, of which a part frees nothing before the rest is discarded; otherwise 4096.
    ///
    /// # Errors
    ///
    /// A region that cannot be discarded: see [`GuestDiscardError`].
    pub fn regions<B: Bitmap + Send + Sync + 'static>(
        memory: &GuestMemoryMmap<B>,
        least: u64,
    ) -> Result<Vec<Region<Discard>>, GuestDiscardError> {
        let regions = memory.iter().map(|part| {
            let region = Span::new(part.start_addr().0, part.len());
            let mapping = Mapping::of_guest_region(part)
                .map_err(|cause| GuestDiscardError::Region { region, cause })?;
            let discard = Discard::new(Arc::new(mapping))
                .map_err(|cause| GuestDiscardError::Discard { region, cause })?;
            Ok(Region {
                guest: region,
                page: discard.page().max(least),
                memory: discard,
            })
        });
        let mut regions = regions.collect::<Result<Vec<_>, _>>()?;
        regions.sort_by_key(|region| region.guest.start);
        Ok(regions)
    }

    /// Bytes discarded, and the number of system calls for them.
    pub const fn totals(&self) -> Discarded {
        self.totals
    }

    /// Discards the offsets that have been collected, all in the region of this number.
    fn flush(
        &mut self,
        discard: &Discard,
        region: usize,
        failed: &mut dyn FnMut(Part, NotDiscarded),
    ) -> u64 {
        let result = discard.discard(&self.offsets, &mut |offsets, why| {
            let cause = match why {
                DiscardRefusal::Refused { errno, .. } => NotDiscarded::Kernel(errno),
                _ => NotDiscarded::NotPages,
            };
            failed(Part::new(region, offsets), cause);
        });
        let done = result.unwrap_or_else(|_| {
            // Runs that are none, or do not ascend; nothing was touched.
            for offsets in &self.offsets {
                failed(Part::new(region, *offsets), NotDiscarded::NotPages);
            }
            Discarded::default()
        });
        self.totals += done;
        done.bytes
    }
}

impl<T: Borrow<Discard>> Discarder<T> for GuestDiscard {
    fn discard(
        &mut self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
        failed: &mut dyn FnMut(Part, NotDiscarded),
    ) -> u64 {
        let mut bytes = 0;
        for parts in parts.chunk_by(|part, next| part.region == next.region) {
            self.offsets.clear();
            let [first, ..] = parts else { continue };
            let region = map.region(first);
            let inside = Span::new(0, region.map_or(0, |region| region.guest.len));
            for part in parts {
                match inside.covers(&part.offsets) {
                    true => self.offsets.push(part.offsets),
                    false => failed(*part, NotDiscarded::NotPages),
                }
            }
            if let Some(region) = region {
                bytes += self.flush(region.memory.borrow(), first.region, failed);
            }
        }
        bytes
    }

    /// True: a `hostmem::Discard` refuses memory that would come back with data. But a user-fault handler that brings in
    /// missing pages may do that, which nothing here sees.
    fn gives_zeros(&self, map: MemoryMap<'_, T>, region: usize) -> bool {
        map.regions().get(region).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::string::{String, ToString};

    use super::*;
    use crate::device::QueueError;
    use crate::queues::Queue;

    /// Messages of an error and its causes, none of which has the next one within it.
    fn chain(error: &(dyn Error + 'static)) -> Vec<String> {
        let causes = core::iter::successors(Some(error), |&error| error.source());
        let said: Vec<_> = causes.map(ToString::to_string).collect();
        for pair in said.windows(2) {
            assert!(!pair[0].contains(&pair[1]), "{pair:?}");
        }
        said
    }

    #[test]
    fn each_cause_is_said_once() {
        let cause = hostmem::DiscardError::Outside {
            index: 0,
            run: Span::new(0, 4096),
            len: 0,
        };
        let region = Span::new(0, 4096);
        assert_eq!(
            chain(&GuestDiscardError::Discard { region, cause }).len(),
            2
        );
        let ring = QueueError::Ring(Queue::Inflate, virtio_queue::Error::AddressOverflow);
        assert_eq!(chain(&ring).len(), 2);
    }
}
