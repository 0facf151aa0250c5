//! Devices first: a memory balloon over the address spaces that map a guest's memory.
//!
//! [`BalloonDma`] knows the address spaces of the devices; the map of the balloon's device has the memory at each
//! guest address, an `Arc<Memory>` for each region ([`RegionMemory`] has what discards it,
//! too). It implements [`virtio_balloon::Releaser`], so the balloon's device asks it before it discards
//! and before it gives a buffer of deflateq back:
//!
//! 1. A part of the map is a part of the memory of its region, and becomes, in each address space, device
//!    addresses: all areas over this memory count, wherever the guest or the monitor has put them.
//! 2. All address spaces release them: one flush for each, however many parts there are.
//! 3. Parts that one of them keeps, or that another user still holds (another address space, an external pin), are
//!    restored in all of them and reported as kept: they must not be discarded.
//!
//! Restoring has all address spaces take the parts back. A part that fails in one stays released there, is reported,
//! and can be tried again; others may have restored it.
//!
//! Devices behind a guest's virtual IOMMU reach what the guest maps. With [`BalloonDma::add_mapped_by_guest`] all
//! other memory is free to go, and comes back when it is touched, or mapped again.
//!
//! Kernels pin by themselves: an address space whose memory only they pin is unknown here unless it is
//! given. Two [`Memory`]s over the same pages do not know of each other either.

#[cfg(feature = "vm-memory")]
mod guest;
mod reasons;

#[cfg(feature = "vm-memory")]
pub use guest::{GuestBalloon, GuestBalloonError, NotReturned};

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use hostmem::Discard;
use ioas::{Ioas, Memory};
use iopt::Interruption;
use runs::{Iova, Offset, Span};
use virtio_balloon::{KeepReason, MemoryMap, Part, Releaser};

/// Memory of one region of a guest, as devices map it and as a balloon discards it: the region holds the whole of
/// `memory`, and of the mapping that `discard` is for.
#[derive(Debug)]
pub struct RegionMemory {
    /// Memory object that address spaces map.
    pub memory: Arc<Memory>,
    /// Gives it back to the machine.
    pub discard: Discard,
}

impl Borrow<Arc<Memory>> for RegionMemory {
    fn borrow(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl Borrow<Discard> for RegionMemory {
    fn borrow(&self) -> &Discard {
        &self.discard
    }
}

/// Address spaces that release memory before a balloon discards it, and restore it afterwards. The [module](self) has
/// the order.
#[derive(Default)]
pub struct BalloonDma {
    spaces: Vec<Arc<Ioas>>,
    /// Look-ups of what a guest has mapped.
    mapped: Vec<Box<FirstMapped>>,
}

/// The first stretch of a part of a memory that is mapped.
type FirstMapped = dyn Fn(&Arc<Memory>, Span<Offset>) -> Option<Span<Offset>> + Send + Sync;

impl fmt::Debug for BalloonDma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BalloonDma")
            .field("spaces", &self.spaces.len())
            .field("mapped", &self.mapped.len())
            .finish()
    }
}

/// A part of the guest's memory, and where an address space has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    device: Span<Iova>,
    part: Part,
}

impl Place {
    fn goes_on_in(&self, next: &Self) -> bool {
        fn ends_at<A>(span: &Span<A>, start: u64) -> bool {
            span.start.checked_add(span.len) == Some(start)
        }
        self.part.region == next.part.region
            && ends_at(&self.device, next.device.start)
            && ends_at(&self.part.offsets, next.part.offsets.start)
    }
}

/// Memory and parts of it for each of `parts`.
fn memories<'a, T: Borrow<Arc<Memory>>>(
    map: MemoryMap<'a, T>,
    parts: &'a [Part],
) -> impl Iterator<Item = (&'a Part, &'a Arc<Memory>)> {
    let memory = move |part| Some((part, map.region(part)?.memory.borrow()));
    parts.iter().filter_map(memory)
}

/// Device addresses of these parts in `space`.
fn places<T: Borrow<Arc<Memory>>>(
    space: &Ioas,
    map: MemoryMap<'_, T>,
    parts: &[Part],
) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::with_capacity(parts.len());
    for (part, memory) in memories(map, parts) {
        let first = places.len();
        space.areas_over(memory, part.offsets, |area| {
            let (device, begin) = (area.range(), area.part().start);
            if let Some(both) = Span::new(begin, device.len).intersection(&part.offsets) {
                let device = Span::new(device.start + (both.start - begin), both.len);
                let part = Part::new(part.region, both);
                places.push(Place { device, part });
            }
        });
        // Mostly a part lies in one area. Parts touch nowhere, so that no place goes on in one of another part.
        if places.len() - first > 1 {
            join_from(&mut places, first);
        }
    }
    places.sort_unstable();
    places
}

/// Joins the places of one part, those from `first` on, where only the border of two areas is between them:
/// areas are cut when something is released, and devices see no border there.
fn join_from(places: &mut Vec<Place>, first: usize) {
    let mut stretches = places.split_off(first);
    stretches.sort_unstable();
    stretches.dedup_by(|next, before| {
        let joins = before.goes_on_in(next);
        if joins {
            before.device.len += next.device.len;
            before.part.offsets.len += next.part.offsets.len;
        }
        joins
    });
    places.append(&mut stretches);
}

impl BalloonDma {
    /// Without address spaces: nothing is any device's.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an address space. It is asked anew for its areas each time: what is mapped later counts as
    /// well.
    pub fn add_space(&mut self, space: Arc<Ioas>) {
        self.spaces.push(space);
    }

    /// Keeps what a guest has mapped for devices behind its virtual IOMMU, which reach nothing else. Such memory is
    /// not released, since only the guest may unmap it; all other memory may be discarded at any time, so that
    /// free page reporting is offered.
    ///
    /// `first_mapped` is `VirtioIommu::first_mapped` of that device. A guest that maps a page while it
    /// gives it up has its devices reach a page that its processors do not: a loss of that guest alone.
    pub fn add_mapped_by_guest(
        &mut self,
        first_mapped: impl Fn(&Arc<Memory>, Span<Offset>) -> Option<Span<Offset>>
        + Send
        + Sync
        + 'static,
    ) {
        self.mapped.push(Box::new(first_mapped));
    }

    /// Pieces of `parts` that a guest has mapped, or that are pinned, in no order.
    fn kept<T: Borrow<Arc<Memory>>>(
        &self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
    ) -> Vec<(Part, KeepReason)> {
        let mut told = Vec::new();
        for (part, memory) in memories(map, parts) {
            let mut tell = |reason, first: &dyn Fn(Span<Offset>) -> Option<Span<Offset>>| {
                let mut rest = part.offsets;
                while let Some(held) = first(rest).and_then(|held| held.intersection(&rest)) {
                    told.push((Part::new(part.region, held), reason));
                    let done = held.start + held.len - rest.start;
                    rest = Span::new(rest.start + done, rest.len - done);
                }
            };
            for first_mapped in &self.mapped {
                tell(KeepReason::MappedByGuest, &|rest| {
                    first_mapped(memory, rest)
                });
            }
            tell(KeepReason::PinnedElsewhere, &|rest| memory.first_held(rest));
        }
        told
    }

    /// Has each address space do `job` with the parts; what it tells comes by parts.
    fn in_all<T: Borrow<Arc<Memory>>>(
        &self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
        mut job: impl FnMut(&Ioas, &[Span<Iova>], &mut dyn FnMut(Span<Iova>, KeepReason)),
    ) -> Vec<(Part, KeepReason)> {
        let mut told = Vec::new();
        for space in &self.spaces {
            let places = places(space, map, parts);
            let ranges: Vec<Span<Iova>> = places.iter().map(|place| place.device).collect();
            job(space, &ranges, &mut |range, reason| {
                let first = places.partition_point(|place| place.device.last() < range.start);
                let near = places.iter().skip(first);
                for place in near.take_while(|place| place.device.overlaps(&range)) {
                    if let Some(both) = place.device.intersection(&range) {
                        let Part { region, offsets } = place.part;
                        let start = offsets.start + (both.start - place.device.start);
                        told.push((Part::new(region, Span::new(start, both.len)), reason));
                    }
                }
            });
        }
        told
    }
}

/// Releases `ranges` of device addresses; `kept` receives those that are not, and why.
fn release(space: &Ioas, ranges: &[Span<Iova>], kept: &mut dyn FnMut(Span<Iova>, KeepReason)) {
    let mut tell = |range, cause| kept(range, reasons::of_release(&cause));
    space.release(ranges, Interruption::Refused, &mut tell);
}

/// Restores `ranges`; `failed` receives those that stay released, and why.
fn restore(space: &Ioas, ranges: &[Span<Iova>], failed: &mut dyn FnMut(Span<Iova>, KeepReason)) {
    let mut tell = |range, cause| failed(range, reasons::of_restore(&cause));
    space.restore(ranges, Interruption::Refused, &mut tell);
}

/// Sorts and removes overlaps: of parts that overlap the one that begins first stays, and of those that begin together
/// the one reported first.
fn in_order(mut told: Vec<(Part, KeepReason)>) -> Vec<(Part, KeepReason)> {
    told.sort_by_key(|(part, _)| (part.region, part.offsets.start));
    let mut out: Vec<(Part, KeepReason)> = Vec::with_capacity(told.len());
    for (Part { region, offsets }, reason) in told {
        let last = out.last_mut().filter(|(last, _)| last.region == region);
        let behind = last
            .as_ref()
            .map_or(0, |(last, _)| last.offsets.start + last.offsets.len);
        let start = offsets.start.max(behind);
        let end = offsets.start + offsets.len;
        if start >= end {
            continue;
        }
        match last {
            Some((last, same)) if *same == reason && behind == start => {
                last.offsets.len = end - last.offsets.start;
            }
            _ => out.push((Part::new(region, Span::new(start, end - start)), reason)),
        }
    }
    out
}

impl<T: Borrow<Arc<Memory>>> Releaser<T> for BalloonDma {
    fn attached(&self) -> bool {
        self.spaces.iter().any(|space| space.is_live())
    }

    fn release(
        &mut self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
        kept: &mut dyn FnMut(Part, KeepReason),
    ) {
        let mut told = self.in_all(map, parts, release);
        told.extend(self.kept(map, parts));
        let told = in_order(told);
        if !told.is_empty() {
            let back: Vec<Part> = told.iter().map(|(part, _)| *part).collect();
            // A part that cannot be restored stays released: it is not discarded, and comes back with the rest.
            let _ = self.in_all(map, &back, restore);
        }
        told.into_iter()
            .for_each(|(part, reason)| kept(part, reason));
    }

    fn held(&self, map: MemoryMap<'_, T>, parts: &[Part], held: &mut dyn FnMut(Part, KeepReason)) {
        for (part, reason) in in_order(self.kept(map, parts)) {
            held(part, reason);
        }
    }

    fn restore(
        &mut self,
        map: MemoryMap<'_, T>,
        parts: &[Part],
        failed: &mut dyn FnMut(Part, KeepReason),
    ) {
        let told = self.in_all(map, parts, restore);
        for (part, reason) in in_order(told) {
            failed(part, reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn part(region: usize, first: u64, pages: u64) -> Part {
        Part::new(region, Span::new(first * PAGE, pages * PAGE))
    }

    #[test]
    fn what_is_reported_of_a_region_says_nothing_of_another() {
        let (pinned, limit) = (KeepReason::PinnedElsewhere, KeepReason::Limit);
        let told = vec![
            (part(1, 0, 2), limit),
            (part(0, 1, 2), pinned),
            (part(0, 0, 2), pinned),
            (part(1, 1, 3), pinned),
            (part(2, 4, 1), pinned),
        ];
        let expected = [
            (part(0, 0, 3), pinned),
            (part(1, 0, 2), limit),
            (part(1, 2, 2), pinned),
            (part(2, 4, 1), pinned),
        ];
        assert_eq!(in_order(told), expected);
    }

    #[test]
    fn places_go_on_in_their_region_only() {
        let place = |device, part| Place {
            device: Span::new(device * PAGE, PAGE),
            part,
        };
        let one = place(7, part(0, 1, 1));
        assert!(one.goes_on_in(&place(8, part(0, 2, 1))));
        assert!(!one.goes_on_in(&place(8, part(1, 2, 1))));
        assert!(!one.goes_on_in(&place(9, part(0, 2, 1))));
    }

    #[test]
    fn areas_that_were_cut_are_one_place_of_a_part() {
        let place = |device, pages, first| Place {
            device: Span::new(device * PAGE, pages * PAGE),
            part: part(0, first, pages),
        };
        // Another part, which is not looked at, and one that is seen at two device addresses, with a hole in
        // the second.
        let before = place(9, 1, 4);
        let mut places = vec![before];
        places.extend(
            [(12, 3, 7), (10, 2, 5), (31, 1, 6), (15, 1, 10)].map(|(at, n, of)| place(at, n, of)),
        );
        places.push(place(33, 3, 8));
        join_from(&mut places, 1);
        assert_eq!(
            places,
            [before, place(10, 6, 5), place(31, 1, 6), place(33, 3, 8)]
        );
    }
}
