//! Devices first: a memory balloon over the address spaces that map a guest's memory.
//!
//! [`BalloonDma`] knows which memory is at which guest addresses, and the address spaces of the
//! devices. It implements [`virtio_balloon::Dma`], so the balloon's device asks it before it discards
//! and before it gives a buffer of deflateq back:
//!
//! 1. A run of guest addresses becomes parts of memory, and these, in each address space, device
//!    addresses: all areas over this memory count, wherever the guest or the monitor has put them.
//! 2. All address spaces release them: one flush for each, however many runs there are.
//! 3. What one of them keeps, or what is still held by somebody else (another address space, an
//!    external pin), is restored in all of them and told as kept: it must not be discarded.
//!
//! Restoring has all address spaces take the runs back. What fails in one stays released there, is told,
//! and can be tried again; it may be back in others.
//!
//! Kernels pin by themselves: of memory that only they pin, address spaces that are not given here are
//! not known. Two [`Memory`]s over the same pages do not know of each other either.

mod reasons;

use std::fmt;
use std::sync::Arc;

use ioas::{Ioas, Memory};
use iopt::Interruption;
use runs::Span;
use virtio_balloon::{Dma, Reason};

/// A part of the guest's memory: guest addresses, and where they are in a memory.
#[derive(Clone)]
struct Region {
    guest: Span,
    memory: Arc<Memory>,
    offset: u64,
}

/// What a balloon asks before it discards memory: see the module.
#[derive(Default)]
pub struct BalloonDma {
    regions: Vec<Region>,
    spaces: Vec<Arc<Ioas>>,
}

impl fmt::Debug for BalloonDma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BalloonDma")
            .field("regions", &self.regions.len())
            .field("spaces", &self.spaces.len())
            .finish()
    }
}

/// A stretch of guest addresses, and where an address space has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    device: Span,
    guest: Span,
}

impl Place {
    fn goes_on_in(&self, next: &Self) -> bool {
        let ends_at = |span: &Span, start| span.start.checked_add(span.len) == Some(start);
        ends_at(&self.device, next.device.start) && ends_at(&self.guest, next.guest.start)
    }
}

impl BalloonDma {
    /// Without memory and address spaces: nothing is anybody's business.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds memory of the guest: the whole of `memory` at the guest address `at`, which no other has.
    pub fn add_memory(&mut self, at: u64, memory: Arc<Memory>) {
        let guest = Span::new(at, memory.len());
        self.regions.push(Region {
            guest,
            memory,
            offset: 0,
        });
        self.regions.sort_by_key(|region| region.guest.start);
    }

    /// Adds an address space. It is asked anew for its areas each time: what is mapped later counts as
    /// well.
    pub fn add_space(&mut self, space: Arc<Ioas>) {
        self.spaces.push(space);
    }

    /// The parts of `runs` that are memory of the guest: guest addresses, number of the region and
    /// offset in its memory. In order of the runs.
    fn parts(&self, runs: &[Span]) -> Vec<(Span, usize, u64)> {
        let mut parts = Vec::with_capacity(runs.len());
        for run in runs {
            let first = self
                .regions
                .partition_point(|region| region.guest.last() < run.start);
            for (number, region) in self.regions.iter().enumerate().skip(first) {
                let Some(guest) = region.guest.intersection(run) else {
                    break;
                };
                let offset = region.offset + (guest.start - region.guest.start);
                parts.push((guest, number, offset));
            }
        }
        parts
    }

    /// Where `space` has these parts, by device addresses.
    fn places(&self, space: &Ioas, parts: &[(Span, usize, u64)]) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::with_capacity(parts.len());
        let mut here = Vec::new();
        for (guest, number, offset) in parts {
            let Some(region) = self.regions.get(*number) else {
                continue;
            };
            let part = Span::new(*offset, guest.len);
            space.areas_over(&region.memory, part, |area| {
                let (device, begin) = (area.range(), area.part().start);
                if let Some(both) = Span::new(begin, device.len).intersection(&part) {
                    let device = Span::new(device.start + (both.start - begin), both.len);
                    let guest = Span::new(guest.start + (both.start - offset), both.len);
                    here.push(Place { device, guest });
                }
            });
            here.sort_unstable();
            for place in here.drain(..) {
                match places.last_mut() {
                    // What was cut when something was released.
                    Some(before) if before.goes_on_in(&place) => {
                        before.device.len += place.device.len;
                        before.guest.len += place.guest.len;
                    }
                    _ => places.push(place),
                }
            }
        }
        places.sort_unstable();
        places
    }

    /// Has each address space do `job` with the parts; what it tells comes by guest addresses.
    fn in_all(
        &self,
        parts: &[(Span, usize, u64)],
        mut job: impl FnMut(&Ioas, &[Span], &mut dyn FnMut(Span, Reason)),
    ) -> Vec<(Span, Reason)> {
        let mut told = Vec::new();
        for space in &self.spaces {
            let places = self.places(space, parts);
            let ranges: Vec<Span> = places.iter().map(|place| place.device).collect();
            job(space, &ranges, &mut |range, reason| {
                let first = places.partition_point(|place| place.device.last() < range.start);
                let near = places.iter().skip(first);
                for place in near.take_while(|place| place.device.overlaps(&range)) {
                    if let Some(both) = place.device.intersection(&range) {
                        let start = place.guest.start + (both.start - place.device.start);
                        told.push((Span::new(start, both.len), reason));
                    }
                }
            });
        }
        told
    }
}

/// Releases `ranges` of device addresses; `kept` receives those that are not, and why.
fn release(space: &Ioas, ranges: &[Span], kept: &mut dyn FnMut(Span, Reason)) {
    let mut tell = |range, cause| kept(range, reasons::of_release(&cause));
    space.release(ranges, Interruption::Refused, &mut tell, &mut ());
}

/// Restores `ranges`; `failed` receives those that stay released, and why.
fn restore(space: &Ioas, ranges: &[Span], failed: &mut dyn FnMut(Span, Reason)) {
    let mut tell = |range, cause| failed(range, reasons::of_restore(&cause));
    space.restore(ranges, Interruption::Refused, &mut tell, &mut ());
}

/// In order, each byte once: what begins first counts, and of those the first that was told.
fn in_order(mut told: Vec<(Span, Reason)>) -> Vec<(Span, Reason)> {
    told.sort_by_key(|(span, _)| span.start);
    let mut out: Vec<(Span, Reason)> = Vec::with_capacity(told.len());
    for (span, reason) in told {
        let behind = out.last().map_or(0, |(last, _)| last.start + last.len);
        let start = span.start.max(behind);
        let end = span.start + span.len;
        if start >= end {
            continue;
        }
        match out.last_mut() {
            Some((last, same)) if *same == reason && behind == start => last.len = end - last.start,
            _ => out.push((Span::new(start, end - start), reason)),
        }
    }
    out
}

impl Dma for BalloonDma {
    fn attached(&self) -> bool {
        self.spaces.iter().any(|space| space.is_live())
    }

    fn release(&mut self, runs: &[Span], kept: &mut dyn FnMut(Span, Reason)) {
        let parts = self.parts(runs);
        let mut told = self.in_all(&parts, release);
        for (guest, number, offset) in &parts {
            let Some(region) = self.regions.get(*number) else {
                continue;
            };
            let (mut at, end) = (*offset, offset + guest.len);
            while at < end
                && let Some(held) = region.memory.first_held(Span::new(at, end - at))
            {
                let start = guest.start + (held.start - offset);
                let here = Span::new(start, held.len);
                told.push((here, Reason::PinnedElsewhere));
                at = held.start + held.len;
            }
        }
        let told = in_order(told);
        if !told.is_empty() {
            let back: Vec<Span> = told.iter().map(|(span, _)| *span).collect();
            let parts = self.parts(&back);
            // What cannot be had stays released: it is not discarded, and comes back with the rest.
            let _ = self.in_all(&parts, restore);
        }
        told.into_iter()
            .for_each(|(span, reason)| kept(span, reason));
    }

    fn restore(&mut self, runs: &[Span], failed: &mut dyn FnMut(Span, Reason)) {
        let parts = self.parts(runs);
        let told = self.in_all(&parts, restore);
        for (span, reason) in in_order(told) {
            failed(span, reason);
        }
    }
}
