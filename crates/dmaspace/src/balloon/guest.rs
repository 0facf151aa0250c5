//! A balloon by guest addresses: [`GuestBalloon`].

use std::sync::Arc;

use ioas::{GuestRam, Ioas, Memory};
use runs::{GuestAddr, Offset, Span};
use virtio_balloon::device::{Discarder as _, GuestDiscard, GuestDiscardError, NotDiscarded};
use virtio_balloon::{
    BadRam, KeepReason, MemoryMap, Part, Refusal, Refusals, Region, Releaser as _,
};
use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::Bitmap;

use super::{BalloonDma, RegionMemory};

/// Memory that a guest gives up and takes back, by guest addresses, for a monitor with a balloon device of its
/// own. Devices release it before it is discarded, and have it again before the guest.
///
/// It is made of the guest's memory as it is mapped now, and is to be made again after memory was plugged or
/// unplugged. A monitor that takes our balloon device gives [`BalloonDma`] to
/// [`BalloonDevice`](crate::BalloonDevice) instead.
#[derive(Debug)]
pub struct GuestBalloon {
    dma: BalloonDma,
    discard: GuestDiscard,
    regions: Vec<Region<RegionMemory>>,
}

/// Failure of a balloon over a guest's memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestBalloonError {
    /// A region cannot be discarded.
    #[error(transparent)]
    Discard(#[from] GuestDiscardError),
    /// A region is not among what was mapped.
    #[error("guest memory {region} is not mapped for devices")]
    NotMapped {
        /// Its guest addresses.
        region: Span<GuestAddr>,
    },
    /// Regions that are not whole pages in order.
    #[error(transparent)]
    Regions(#[from] BadRam),
    /// A run that is no memory of the guest.
    #[error("{0}")]
    Refused(Refusal),
}

/// Reason why a part that the guest gave up was not returned to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReturned {
    /// A device still has it.
    #[error("{0}")]
    Devices(KeepReason),
    /// Devices have released it, and the machine did not take it.
    #[error("{0}")]
    NotDiscarded(NotDiscarded),
}

impl GuestBalloon {
    /// A balloon over `guest`, of which `ram` was mapped in `spaces`.
    ///
    /// # Errors
    ///
    /// See [`GuestBalloonError`].
    pub fn new<'r, B: Bitmap + Send + Sync + 'static>(
        guest: &GuestMemoryMmap<B>,
        ram: impl IntoIterator<Item = &'r GuestRam>,
        spaces: impl IntoIterator<Item = Arc<Ioas>>,
    ) -> Result<Self, GuestBalloonError> {
        let ram = ram.into_iter().flat_map(GuestRam::regions);
        let ram: Vec<_> = ram.collect();
        let mut dma = BalloonDma::new();
        spaces.into_iter().for_each(|space| dma.add_space(space));
        let mut regions = Vec::new();
        for Region {
            guest,
            page,
            memory: discard,
        } in GuestDiscard::regions(guest, 4096)?
        {
            let mut mapped = ram.iter();
            let mapped =
                mapped.find(|(base, memory)| (base.0, memory.len()) == (guest.start, guest.len));
            let (_, memory) = mapped.ok_or(GuestBalloonError::NotMapped { region: guest })?;
            let memory = RegionMemory {
                memory: Arc::clone(memory),
                discard,
            };
            regions.push(Region {
                guest,
                page,
                memory,
            });
        }
        MemoryMap::new(&regions)?;
        Ok(Self {
            dma,
            discard: GuestDiscard::new(),
            regions,
        })
    }

    /// Keeps what the guest has mapped for devices behind its virtual IOMMU: see
    /// [`BalloonDma::add_mapped_by_guest`]. Then [`inflate`](Self::inflate) takes pages that the guest reports as free,
    /// too.
    pub fn add_mapped_by_guest(
        &mut self,
        first_mapped: impl Fn(&Arc<Memory>, Span<Offset>) -> Option<Span<Offset>>
        + Send
        + Sync
        + 'static,
    ) {
        self.dma.add_mapped_by_guest(first_mapped);
    }

    /// Gives `runs` (guest addresses and lengths in bytes, whole pages) back to the machine: all devices release
    /// them, with one flush for each address space, then the pages are discarded. `kept` receives the pieces that
    /// stay as they were, also those that are no whole huge pages where such back the memory, or that the machine did
    /// not take. Returns the bytes that the machine has back. The
    /// memory stays charged, so that the guest can always have it back.
    ///
    /// # Errors
    ///
    /// [`GuestBalloonError::Refused`]: nothing has changed then.
    pub fn inflate(
        &mut self,
        runs: &[Span<GuestAddr>],
        kept: &mut dyn FnMut(Span<GuestAddr>, NotReturned),
    ) -> Result<u64, GuestBalloonError> {
        let map = MemoryMap::new(&self.regions)?;
        let parts = whole_pages(map, &resolve(map, runs)?, &mut |part| {
            kept(
                map.run(&part),
                NotReturned::NotDiscarded(NotDiscarded::NotPages),
            );
        });
        let mut stay = Vec::new();
        self.dma.release(map, &parts, &mut |part, reason| {
            kept(map.run(&part), NotReturned::Devices(reason));
            stay.push(part);
        });
        let released = without(&parts, &stay);
        Ok(self.discard.discard(map, &released, &mut |part, why| {
            kept(map.run(&part), NotReturned::NotDiscarded(why));
        }))
    }

    /// Has all devices take `runs` back, before the guest uses them. `failed` receives the pieces that devices
    /// lack; the guest must not have them.
    ///
    /// # Errors
    ///
    /// [`GuestBalloonError::Refused`]: nothing has changed then.
    pub fn deflate(
        &mut self,
        runs: &[Span<GuestAddr>],
        failed: &mut dyn FnMut(Span<GuestAddr>, KeepReason),
    ) -> Result<(), GuestBalloonError> {
        let map = MemoryMap::new(&self.regions)?;
        let parts = resolve(map, runs)?;
        self.dma.restore(map, &parts, &mut |part, reason| {
            failed(map.run(&part), reason);
        });
        Ok(())
    }
}

/// The parts of `runs`, ascending, none of which touch within a region.
fn resolve<T>(
    map: MemoryMap<'_, T>,
    runs: &[Span<GuestAddr>],
) -> Result<Vec<Part>, GuestBalloonError> {
    let (mut parts, mut refusals) = (Vec::new(), Refusals::new());
    for run in runs {
        map.resolve(*run, &mut refusals, |part| parts.push(part));
    }
    if let Some(refusal) = refusals.latest() {
        return Err(GuestBalloonError::Refused(refusal));
    }
    parts.sort_unstable();
    parts.dedup_by(|next, before| {
        let (end, start) = (
            before.offsets.start + before.offsets.len,
            next.offsets.start,
        );
        let touch = before.region == next.region && start <= end;
        if touch {
            let last = end.max(start + next.offsets.len);
            before.offsets.len = last - before.offsets.start;
        }
        touch
    });
    Ok(parts)
}

/// Parts of whole pages of what backs their regions; `rest` receives the pieces beside them.
fn whole_pages<T>(map: MemoryMap<'_, T>, parts: &[Part], rest: &mut dyn FnMut(Part)) -> Vec<Part> {
    let mut whole = Vec::with_capacity(parts.len());
    for part in parts {
        let Some(region) = map.region(part) else {
            continue;
        };
        let inside = |offset: u64| region.guest.start.wrapping_add(offset) & (region.page - 1);
        let (start, end) = (part.offsets.start, part.offsets.start + part.offsets.len);
        let first = match inside(start) {
            0 => start,
            some => start + (region.page - some),
        };
        let last = end - inside(end).min(end);
        let mut piece = |from: u64, to: u64| {
            if from < to {
                rest(Part::new(part.region, Span::new(from, to - from)));
            }
        };
        if first < last {
            piece(start, first);
            whole.push(Part::new(part.region, Span::new(first, last - first)));
            piece(last, end);
        } else {
            piece(start, end);
        }
    }
    whole
}

/// Pieces of `parts` beside those that stay, both ascending.
fn without(parts: &[Part], stay: &[Part]) -> Vec<Part> {
    let mut rest = Vec::new();
    for part in parts {
        let (mut start, end) = (part.offsets.start, part.offsets.start + part.offsets.len);
        for piece in stay.iter().filter_map(|piece| piece.intersection(part)) {
            let (from, to) = (piece.offsets.start, piece.offsets.start + piece.offsets.len);
            if start < from {
                rest.push(Part::new(part.region, Span::new(start, from - start)));
            }
            start = start.max(to);
        }
        if start < end {
            rest.push(Part::new(part.region, Span::new(start, end - start)));
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(region: usize, start: u64, len: u64) -> Part {
        Part::new(region, Span::new(start, len))
    }

    #[test]
    fn what_stays_is_left_out_and_nothing_else() {
        let parts = [part(0, 0, 10), part(0, 20, 10), part(1, 0, 5)];
        assert_eq!(without(&parts, &[]), parts);
        let stay = [part(0, 2, 2), part(0, 8, 2), part(0, 20, 10), part(1, 0, 1)];
        let rest = [part(0, 0, 2), part(0, 4, 4), part(1, 1, 4)];
        assert_eq!(without(&parts, &stay), rest);
    }

    #[test]
    fn only_whole_pages_of_what_backs_a_region_are_given_up() {
        const MIB: u64 = 1 << 20;
        let regions = [Region {
            guest: Span::new(MIB, 7 * MIB),
            page: 2 * MIB,
            memory: (),
        }];
        let map = MemoryMap::new(&regions).unwrap();
        let mut rest = Vec::new();
        // From 1.5 MiB to 6.5 MiB of guest addresses, a page without its end, and a piece of a page.
        let parts = [part(0, MIB / 2, 5 * MIB), part(0, 6 * MIB, MIB / 2)];
        let whole = whole_pages(map, &parts, &mut |part| rest.push(part));
        assert_eq!(whole, [part(0, MIB, 4 * MIB)]);
        let pieces = [
            part(0, MIB / 2, MIB / 2),
            part(0, 5 * MIB, MIB / 2),
            part(0, 6 * MIB, MIB / 2),
        ];
        assert_eq!(rest, pieces);
    }

    #[test]
    fn runs_are_sorted_and_joined_within_a_region() {
        let regions = [
            Region::new(Span::new(0, 0x10000)),
            Region::new(Span::new(0x10000, 0x10000)),
        ];
        let map = MemoryMap::new(&regions).unwrap();
        let runs = [
            Span::new(0x3000, 0x1000),
            Span::new(0x1000, 0x2000),
            Span::new(0x2000, 0x1000),
            Span::new(0xf000, 0x2000),
        ];
        let parts = resolve(map, &runs).unwrap();
        let expected = [
            part(0, 0x1000, 0x3000),
            part(0, 0xf000, 0x1000),
            part(1, 0, 0x1000),
        ];
        assert_eq!(parts, expected);
        let beyond = resolve(map, &[Span::new(0x1f000, 0x2000)]);
        assert!(matches!(beyond, Err(GuestBalloonError::Refused(_))));
    }
}
