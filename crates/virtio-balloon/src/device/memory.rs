//! The guest's memory, region by region, with the parts of its huge pages that are in the balloon.

use std::iter;
use std::sync::Arc;
use std::vec;
use std::vec::Vec;

use runs::{GuestAddr, Offset, Span};

use super::error::BalloonSetupError;
use super::state::PartialState;
use crate::map::{MemoryMap, Part, Region};
use crate::partial::PartialHugePages;
use crate::refusal::Refusals;
use crate::source::WIRE_PAGE;

/// The guest's memory: its map, and what is remembered of it.
#[derive(Debug)]
pub(super) struct Memory<T> {
    regions: Arc<[Region<T>]>,
    /// Huge pages of each region, by its number.
    partials: Vec<Option<Partial>>,
    /// No region has huge pages: what is given can be discarded as it is.
    plain: bool,
}

/// A [`PartialHugePages`] of offsets in a region that owns its memory.
#[derive(Debug)]
struct Partial {
    /// The guest address at which the region begins.
    base: u64,
    /// The whole huge pages of the region.
    region: Span<Offset>,
    huge: u64,
    words: Vec<u64>,
    totals: (u64, u64),
    /// From the lowest to the highest byte that was inflated since the last [`forget`](Memory::forget).
    touched: Option<(u64, u64)>,
}

impl Partial {
    /// Creates the state of these guest addresses, in a region that begins at `base`.
    fn new(base: u64, whole: Span<GuestAddr>, huge: u64) -> Result<Self, BalloonSetupError> {
        let words = PartialHugePages::words(whole.len, huge);
        let mut words = vec![0; usize::try_from(words).unwrap_or(0)];
        PartialHugePages::new(whole, huge, &mut words).map_err(BalloonSetupError::Region)?;
        Ok(Self {
            base,
            region: Span::new(whole.start - base, whole.len),
            huge,
            words,
            totals: (0, 0),
            touched: None,
        })
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut PartialHugePages<'_, Offset>) -> T) -> T {
        let mut pages =
            PartialHugePages::again(self.region, self.huge, &mut self.words, self.totals);
        let result = act(&mut pages);
        self.totals = pages.totals();
        result
    }

    /// These parts, which ascend, are inflated.
    fn touch(&mut self, parts: &[Part]) {
        if let Some((first, last)) = parts.first().zip(parts.last()) {
            let (first, last) = (first.offsets.start, last.offsets.last());
            let touched = self.touched.get_or_insert((first, last));
            *touched = (touched.0.min(first), touched.1.max(last));
        }
    }

    /// The words that have a bit for each page.
    fn bits(&self) -> &[u64] {
        let pages = usize::try_from(self.region.len / WIRE_PAGE).unwrap_or(0);
        self.words.get(..pages.div_ceil(64)).unwrap_or(&[])
    }
}

/// The whole pages of `page` bytes in `run`.
fn inner(run: Span<GuestAddr>, page: u64) -> Span<GuestAddr> {
    // A run may end at 2^64.
    let (start, len, page) = (u128::from(run.start), u128::from(run.len), u128::from(page));
    let (first, end) = (start.next_multiple_of(page), (start + len) / page * page);
    let len = end.saturating_sub(first);
    match (u64::try_from(first), u64::try_from(len)) {
        (Ok(first), Ok(len)) => Span::new(first, len),
        _ => Span::new(run.start, 0),
    }
}

/// These parts, which ascend, region by region.
fn by_region(mut parts: &[Part]) -> impl Iterator<Item = (usize, &[Part])> {
    iter::from_fn(move || {
        let number = parts.first()?.region;
        let end = parts.partition_point(|part| part.region <= number);
        let (group, rest) = parts.split_at(end);
        parts = rest;
        Some((number, group))
    })
}

impl<T> Memory<T> {
    pub(super) fn new(regions: Arc<[Region<T>]>) -> Result<Self, BalloonSetupError> {
        MemoryMap::new(&regions).map_err(BalloonSetupError::Ram)?;
        let partials = regions.iter().map(|region| {
            let page = region.page;
            match page {
                WIRE_PAGE => Ok(None),
                // Also refuses sizes that are none.
                _ if !page.is_power_of_two() || page < WIRE_PAGE => {
                    Partial::new(region.guest.start, region.guest, page).map(Some)
                }
                _ => {
                    let whole = inner(region.guest, page);
                    // Without a whole page nothing can be given back.
                    (!whole.is_empty())
                        .then(|| Partial::new(region.guest.start, whole, page))
                        .transpose()
                }
            }
        });
        Ok(Self {
            partials: partials.collect::<Result<_, _>>()?,
            plain: regions.iter().all(|region| region.page == WIRE_PAGE),
            regions,
        })
    }

    pub(super) fn regions(&self) -> Arc<[Region<T>]> {
        self.regions.clone()
    }

    pub(super) fn map(&self) -> MemoryMap<'_, T> {
        MemoryMap::known(&self.regions)
    }

    /// The guest gives these parts, which ascend. Returns what can be discarded now, ascending; `room` is
    /// for what has to be written down for that.
    pub(super) fn inflate<'a>(&mut self, parts: &'a [Part], room: &'a mut Vec<Part>) -> &'a [Part] {
        if self.plain {
            return parts;
        }
        room.clear();
        for (number, parts) in by_region(parts) {
            let page = self.regions.get(number).map(|region| region.page);
            if let Some(Some(partial)) = self.partials.get_mut(number) {
                partial.touch(parts);
                partial.with(|pages| {
                    let runs = parts.iter().map(|part| part.offsets);
                    pages.inflate_all(runs, |whole| room.push(Part::new(number, whole)));
                });
            } else if page == Some(WIRE_PAGE) {
                room.extend_from_slice(parts);
            }
        }
        room
    }

    /// The guest takes these parts back, which ascend.
    pub(super) fn deflate(&mut self, parts: &[Part]) {
        if self.plain {
            return;
        }
        for (number, parts) in by_region(parts) {
            if let Some(Some(partial)) = self.partials.get_mut(number) {
                let runs = parts.iter().map(|part| part.offsets);
                partial.with(|pages| pages.deflate_all(runs));
            }
        }
    }

    /// Forgets what was inflated since the last time: parts must not be remembered.
    pub(super) fn forget(&mut self) {
        for partial in self.partials.iter_mut().flatten() {
            let touched = partial.touched.take();
            if let Some(run) = touched.and_then(|(first, last)| Span::inclusive(first, last)) {
                partial.with(|pages| pages.deflate(run));
            }
        }
    }

    /// Keeps inflated pages: parts are remembered.
    pub(super) fn remember(&mut self) {
        for partial in self.partials.iter_mut().flatten() {
            partial.touched = None;
        }
    }

    /// The balloon is empty.
    pub(super) fn empty(&mut self) {
        for partial in self.partials.iter_mut().flatten() {
            partial.touched = None;
            partial.with(|pages| pages.forget());
        }
    }

    /// Hands on what of this part is whole pages of what backs its region.
    pub(super) fn cut(&self, part: Part, sink: impl FnOnce(Part)) {
        let Some(region) = self.regions.get(part.region) else {
            return;
        };
        let run = region.run(part.offsets);
        let whole = match run.is_aligned(region.page) {
            true => run,
            false => inner(run, region.page),
        };
        if !whole.is_empty() {
            sink(Part::new(part.region, region.offsets(whole)));
        }
    }

    /// Bytes in the balloon that wait for the rest of their huge pages.
    pub(super) fn waiting(&self) -> u64 {
        let partials = self.partials.iter().flatten();
        partials
            .map(|partial| partial.totals.0 * WIRE_PAGE - partial.totals.1 * partial.huge)
            .sum()
    }

    pub(super) fn save(&self) -> Vec<PartialState> {
        let partials = self.partials.iter().flatten();
        partials
            .map(|partial| PartialState {
                region: Span::new(partial.base + partial.region.start, partial.region.len),
                bits: partial.bits().to_vec(),
            })
            .collect()
    }

    /// Remembers parts as they were saved, as far as they lie in this memory.
    pub(super) fn load(&mut self, saved: &[PartialState]) {
        self.empty();
        let regions = self.regions();
        let mut room = Vec::new();
        for partial in saved {
            for bits in runs::bitmap::runs(&partial.bits) {
                let start = bits.start.checked_mul(WIRE_PAGE);
                let start = start.and_then(|offset| partial.region.start.checked_add(offset));
                let run = start.and_then(|start| {
                    Span::checked(start, (bits.end - bits.start).checked_mul(WIRE_PAGE)?)
                });
                if let Some(run) = run.and_then(|run| run.intersection(&partial.region)) {
                    // Addresses without memory here are not remembered.
                    let mut outside = Refusals::new();
                    MemoryMap::known(&regions).resolve(run, &mut outside, |part| {
                        self.inflate(&[part], &mut room);
                    });
                }
            }
        }
        self.remember();
    }
}
