//! The memory that a front end shares, watched for losses.
//!
//! All memory of a front end is watched before the first access, and for as long as the link is there, if the
//! program has asked for that (`hostmem::ShrinkWatch::install`). The first loss that is seen is the end of the link,
//! and stays so, whatever memory the front end shares next.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hostmem::{Mapping, ShrinkWatch};
use runs::{GuestAddr, Span};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _};

/// A front end has taken memory away that it shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryLost {
    /// It has made the file shorter.
    #[error("the front end has shrunk its memory: region {region}, offset {offset:#x}")]
    Shrunk {
        /// The guest's addresses of the region.
        region: Span<GuestAddr>,
        /// From here on in the region, bytes.
        offset: u64,
    },
    /// There is no room for a page of the file.
    #[error("the front end's memory has no room for a page: region {region}, offset {offset:#x}")]
    NoRoom {
        /// The guest's addresses of the region.
        region: Span<GuestAddr>,
        /// The page, in the region, bytes.
        offset: u64,
    },
}

/// Watched regions, and the first loss.
#[derive(Debug, Default)]
pub(super) struct Watched {
    regions: Mutex<Vec<(Span<GuestAddr>, ShrinkWatch)>>,
    lost: OnceLock<MemoryLost>,
}

impl Watched {
    /// Watches `memory` as well as what is watched already, of which nothing has been lost.
    pub(super) fn add(&self, memory: &GuestMemoryMmap) -> io::Result<()> {
        if let Some(lost) = self.lost() {
            return Err(io::Error::other(lost));
        }
        let mut new = Vec::new();
        for region in memory.iter() {
            let guest = Span::new(region.start_addr().0, region.len());
            let mapping = Mapping::of_guest_region(region).map_err(io::Error::other)?;
            let watch = ShrinkWatch::new(Arc::new(mapping)).map_err(io::Error::other)?;
            new.extend(watch.map(|watch| (guest, watch)));
        }
        self.regions().append(&mut new);
        Ok(())
    }

    /// Watches the latest memory only, from `memory` on: the one before is not accessed any more.
    pub(super) fn keep_latest(&self, memory: &GuestMemoryMmap) {
        self.lost();
        let host = |region: &vm_memory::GuestRegionMmap| region.as_ptr() as u64;
        let starts: Vec<u64> = memory.iter().map(host).collect();
        self.regions()
            .retain(|(_, watch)| starts.contains(&watch.mapping().address()));
    }

    /// First loss observed.
    pub(super) fn lost(&self) -> Option<MemoryLost> {
        if let Some(lost) = self.lost.get() {
            return Some(*lost);
        }
        let regions = self.regions();
        let (region, lost) = regions
            .iter()
            .find_map(|(region, watch)| Some((*region, watch.lost()?)))?;
        let offset = lost.offset;
        Some(*self.lost.get_or_init(|| match lost.shrunk {
            true => MemoryLost::Shrunk { region, offset },
            false => MemoryLost::NoRoom { region, offset },
        }))
    }

    fn regions(&self) -> MutexGuard<'_, Vec<(Span<GuestAddr>, ShrinkWatch)>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use vm_memory::{Bytes as _, FileOffset, GuestAddress};

    const LEN: usize = 0x8000;

    fn memory() -> (File, GuestMemoryMmap) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(LEN as u64).unwrap();
        let place = FileOffset::new(file.try_clone().unwrap(), 0);
        let ranges = [(GuestAddress(1 << 20), LEN, Some(place))];
        (
            file,
            GuestMemoryMmap::from_ranges_with_files(ranges).unwrap(),
        )
    }

    #[test]
    fn the_first_loss_stays_whatever_memory_comes_next() {
        ShrinkWatch::install().unwrap();
        let watched = Watched::default();
        let (_older, older) = memory();
        let (file, first) = memory();
        watched.add(&older).unwrap();
        watched.add(&first).unwrap();
        watched.keep_latest(&first);
        assert_eq!(watched.regions().len(), 1);
        file.set_len(0x3000).unwrap();
        assert_eq!(watched.lost(), None, "nobody has looked");
        let seen: u64 = first.read_obj(GuestAddress((1 << 20) + 0x5008)).unwrap();
        assert_eq!(seen, 0);
        let (_next, next) = memory();
        watched.keep_latest(&next);
        let lost = MemoryLost::Shrunk {
            region: Span::new(1 << 20, LEN as u64),
            offset: 0x5000,
        };
        assert_eq!(watched.lost(), Some(lost));
        let refused = watched.add(&next).unwrap_err().to_string();
        assert_eq!(refused, lost.to_string());
    }
}
