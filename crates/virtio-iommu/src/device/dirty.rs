//! Writes of endpoints, by guest address: for the live migration of a guest.
//!
//! Tables note them by device address ([`ioas::Ioas::harvest`]), and mappings come and go: so writes through a mapping
//! are *kept*, a bit for each page of the guest, before the mapping goes, and all others when they are reported. In
//! doubt, all pages that could have been written count: a write is never missing.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioas::{HarvestError, Ioas, Memory, Tracking, TrackingError, UnmapError, Unmapped};
use iopt::{Aperture, Pending, Prot};
use runs::{GuestAddr, Iova, Offset, Span, bitmap};

use super::VirtioIommu;
use crate::config::MemoryRegion;
use crate::domains::Domains;

/// Bytes of a bit, of every format's smallest page or less.
const PAGE: u64 = 4096;
/// Words of the bitmap of a harvest: 1 GiB.
const WORDS: usize = 4096;

/// State of dirty tracking.
pub(super) struct Dirty {
    pub(super) tracking: Tracking,
    /// Bitmaps by the start of a region.
    kept: BTreeMap<u64, Vec<u64>>,
    /// Unmapped, but units may write to it until a later flush succeeds.
    retired: Vec<(Arc<Memory>, Span<Offset>)>,
    /// A unit may write without a trace, until tracking begins anew.
    blind: bool,
}

/// Parts of the guest's memory that are the part of a memory.
fn guest(
    memory: &Arc<Memory>,
    part: Span<Offset>,
    regions: &[MemoryRegion],
) -> impl Iterator<Item = (u64, Span<Offset>, u64)> {
    let found = regions
        .iter()
        .filter(|region| Arc::ptr_eq(&region.memory, memory));
    found.map(move |region| (region.start, part, region.memory.len()))
}

impl Dirty {
    /// Keeps a part of a memory.
    pub(super) fn keep(
        &mut self,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        regions: &[MemoryRegion],
    ) {
        for (start, part, len) in guest(memory, part, regions) {
            let words = len.div_ceil(PAGE).div_ceil(64) as usize;
            let bits = self.kept.entry(start).or_default();
            // Another region may have begun there before.
            bits.resize(bits.len().max(words), 0);
            let behind = (part.start + part.len)
                .div_ceil(PAGE)
                .min(words as u64 * 64);
            bitmap::set(bits, part.start / PAGE..behind);
        }
    }

    /// Keeps all that could be written to in `range`.
    fn keep_writable(&mut self, space: &Ioas, range: Span<Iova>, regions: &[MemoryRegion]) {
        for area in space.areas() {
            let here = area.range().intersection(&range);
            if let Some(here) = here.filter(|_| area.prot().contains(Prot::WRITE)) {
                let offset = area.part().start + (here.start - area.range().start);
                self.keep(area.memory(), Span::new(offset, here.len), regions);
            }
        }
    }

    /// Keeps what was written in an address space, or, if that is not learned, what could have been.
    pub(super) fn keep_all(&mut self, space: &Ioas, regions: &[MemoryRegion]) {
        if self.blind || self.harvest(space, regions).is_err() {
            self.keep_all_writable(space, regions);
        }
    }

    fn keep_all_writable(&mut self, space: &Ioas, regions: &[MemoryRegion]) {
        for half in Aperture::zeros(64).spans() {
            self.keep_writable(space, half, regions);
        }
    }

    /// Moves what was written out of the tables of an address space. True when some device leaves no trace.
    fn harvest(&mut self, space: &Ioas, regions: &[MemoryRegion]) -> Result<bool, HarvestError> {
        let (mut words, mut blind) = (vec![0; WORDS], false);
        for area in space.areas() {
            if !area.prot().contains(Prot::WRITE) {
                continue;
            }
            let (range, memory) = (area.range(), area.memory());
            let bytes = WORDS as u64 * 64 * PAGE;
            // Bits stand for multiples of a page, and mappings begin there.
            for done in (0..range.len).step_by(bytes as usize) {
                let here = Span::<Iova>::new(range.start + done, bytes.min(range.len - done));
                words.fill(0);
                let Ok(mut pending) = Pending::new(&mut words[..], here, PAGE) else {
                    // Not reached: the range is an area's, and there are words enough.
                    self.keep_writable(space, here, regions);
                    continue;
                };
                let found = space.harvest(&mut pending);
                let shown = space.show(&mut pending).map_err(HarvestError::Flush);
                let (found, shown) = match (found, shown) {
                    (Ok(found), Ok(shown)) => (found, shown),
                    (Err(cause), _) | (_, Err(cause)) => {
                        self.keep_writable(space, here, regions);
                        return Err(cause);
                    }
                };
                blind |= found.blind;
                for run in shown.runs() {
                    if let Some(run) = run.intersection(&here) {
                        let offset = area.part().start + (run.start - range.start);
                        self.keep(memory, Span::new(offset, run.len), regions);
                    }
                }
                shown.acknowledge();
            }
        }
        Ok(blind)
    }

    /// Unmaps `range`, or everything, and keeps what was written there.
    pub(super) fn unmap(
        &mut self,
        space: &Ioas,
        range: Option<Span<Iova>>,
        regions: &[MemoryRegion],
    ) -> Result<Unmapped, UnmapError> {
        let Some(range) = range else {
            self.keep_all_writable(space, regions);
            return space.unmap_all();
        };
        let parts = space.parts(range);
        let mut written = Vec::new();
        let unmapped = space.unmap_reporting(range, &mut |run| written.push(run));
        if let Err(UnmapError::Flush(_)) = unmapped {
            let parts = parts.iter();
            self.retired
                .extend(parts.map(|(_, memory, part)| (memory.clone(), *part)));
        }
        if self.blind {
            written.push(range);
        }
        for run in written {
            let first = parts.partition_point(|(part, ..)| part.last() < run.start);
            for (at, memory, part) in parts.iter().skip(first) {
                let Some(here) = at.intersection(&run) else {
                    break;
                };
                let offset = part.start + (here.start - at.start);
                self.keep(memory, Span::new(offset, here.len), regions);
            }
        }
        unmapped
    }
}

impl<D: Domains> VirtioIommu<D> {
    /// Begins to track what endpoints write to, in all address spaces that there are and that come. What they wrote to
    /// before is discarded.
    ///
    /// # Errors
    ///
    /// See [`TrackingError`]; it is not tracked then.
    pub fn track_dirty(&mut self, tracking: Tracking) -> Result<(), TrackingError> {
        self.untrack_dirty();
        let begun = self
            .spaces()
            .try_for_each(|space| space.track_dirty(tracking));
        if begun.is_err() {
            self.spaces().for_each(Ioas::untrack_dirty);
        } else {
            self.dirty = Some(Dirty {
                tracking,
                kept: BTreeMap::new(),
                retired: Vec::new(),
                blind: false,
            });
        }
        begun
    }

    /// Ends it. What was not reported is discarded.
    pub fn untrack_dirty(&mut self) {
        if self.dirty.take().is_some() {
            self.spaces().for_each(Ioas::untrack_dirty);
        }
    }

    /// Reports what endpoints have written to since the last report, through mappings that are there or have gone, to
    /// `sink`: runs of pages of 4 KiB, by guest address and ascending. What is written from now on is reported next
    /// time. False when some of it only could have been written, since a unit or a format does not tell. Nothing is
    /// reported while it is not tracked.
    ///
    /// # Errors
    ///
    /// When it cannot be learned what was written; nothing is reported then, and nothing is lost: from now on everything
    /// that endpoints may write to counts as written to, until tracking begins anew.
    pub fn dirty(&mut self, sink: &mut dyn FnMut(Span<GuestAddr>)) -> Result<bool, HarvestError> {
        let Some(mut dirty) = self.dirty.take() else {
            return Ok(true);
        };
        let (mut failed, mut exact) = (None, !dirty.blind);
        for space in self.spaces() {
            if dirty.blind {
                break;
            }
            match dirty.harvest(space, &self.memory) {
                Ok(blind) => exact &= !blind,
                Err(cause) => {
                    failed = Some(cause);
                    break;
                }
            }
        }
        dirty.blind |= failed.is_some();
        if dirty.blind {
            self.spaces()
                .for_each(|space| dirty.keep_all_writable(space, &self.memory));
        }
        for (memory, part) in std::mem::take(&mut dirty.retired) {
            dirty.keep(&memory, part, &self.memory);
            if self.spaces().any(|space| space.retired() > 0) {
                dirty.retired.push((memory, part));
            }
        }
        if failed.is_none() {
            for (start, words) in std::mem::take(&mut dirty.kept) {
                bitmap::runs(&words).for_each(|pages| {
                    let at = start + pages.start * PAGE;
                    sink(Span::new(at, (pages.end - pages.start) * PAGE));
                });
            }
        }
        self.dirty = Some(dirty);
        failed.map_or(Ok(exact), Err)
    }

    fn spaces(&self) -> impl Iterator<Item = &Ioas> {
        let domains = self
            .domains
            .values()
            .filter_map(|domain| domain.space.as_ref());
        domains.chain(self.identity.as_ref().map(|identity| &identity.space))
    }
}
