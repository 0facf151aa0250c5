//! The guest's memory, region by region, with what of its huge pages is in the balloon.

use std::sync::Arc;
use std::vec;
use std::vec::Vec;

use runs::Span;

use super::error::SetupError;
use super::settings::Region;
use super::state::PartialState;
use crate::partial::PartialHugePages;
use crate::ram::GuestRam;
use crate::source::WIRE_PAGE;

/// The regions of the guest's memory, ascending.
#[derive(Debug, Default)]
pub(super) struct Memory {
    regions: Arc<[Span]>,
    backings: Vec<Backing>,
    /// From the lowest to the highest byte that was inflated since the last [`forget`](Memory::forget).
    touched: Option<(u64, u64)>,
}

/// What backs a region.
#[derive(Debug)]
struct Backing {
    page: u64,
    /// For huge pages.
    partial: Option<Partial>,
}

/// A [`PartialHugePages`] that owns its memory.
#[derive(Debug)]
struct Partial {
    region: Span,
    huge: u64,
    words: Vec<u64>,
    totals: (u64, u64),
}

impl Partial {
    fn new(region: Span, huge: u64) -> Result<Self, SetupError> {
        let words = PartialHugePages::words(region.len, huge);
        let mut words = vec![0; usize::try_from(words).unwrap_or(0)];
        PartialHugePages::new(region, huge, &mut words).map_err(SetupError::Region)?;
        Ok(Self {
            region,
            huge,
            words,
            totals: (0, 0),
        })
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut PartialHugePages<'_>) -> T) -> T {
        let mut pages =
            PartialHugePages::again(self.region, self.huge, &mut self.words, self.totals);
        let result = act(&mut pages);
        self.totals = pages.totals();
        result
    }

    /// The words that have a bit for each page.
    fn bits(&self) -> &[u64] {
        let pages = usize::try_from(self.region.len / WIRE_PAGE).unwrap_or(0);
        self.words.get(..pages.div_ceil(64)).unwrap_or(&[])
    }
}

/// The whole pages of `page` bytes in `run`.
fn inner(run: Span, page: u64) -> Span {
    // A run may end at 2^64.
    let (start, len, page) = (u128::from(run.start), u128::from(run.len), u128::from(page));
    let (first, end) = (start.next_multiple_of(page), (start + len) / page * page);
    let len = end.saturating_sub(first);
    match (u64::try_from(first), u64::try_from(len)) {
        (Ok(first), Ok(len)) => Span::new(first, len),
        _ => Span::new(run.start, 0),
    }
}

/// Those of these runs, which ascend, that meet the region.
fn in_region<'a>(runs: &'a [Span], region: &Span) -> &'a [Span] {
    let first = runs.partition_point(|run| run.last() < region.start);
    let behind = runs.get(first..).unwrap_or(&[]);
    let end = behind.partition_point(|run| run.start <= region.last());
    behind.get(..end).unwrap_or(&[])
}

impl Memory {
    pub(super) fn new(regions: &[Region]) -> Result<Self, SetupError> {
        let spans: Vec<_> = regions.iter().map(|region| region.guest).collect();
        GuestRam::new(&spans).map_err(SetupError::Ram)?;
        let backings = regions.iter().map(|region| {
            let page = region.page;
            let partial = match page {
                WIRE_PAGE => None,
                // Also refuses sizes that are none.
                _ if !page.is_power_of_two() || page < WIRE_PAGE => {
                    Some(Partial::new(region.guest, page)?)
                }
                _ => {
                    let whole = inner(region.guest, page);
                    // Without a whole page nothing can be given back.
                    (!whole.is_empty())
                        .then(|| Partial::new(whole, page))
                        .transpose()?
                }
            };
            Ok(Backing { page, partial })
        });
        let backings = backings.collect::<Result<_, _>>()?;
        Ok(Self {
            regions: spans.into(),
            backings,
            touched: None,
        })
    }

    /// Ascending and disjoint.
    pub(super) fn regions(&self) -> Arc<[Span]> {
        self.regions.clone()
    }

    /// The guest gives these runs, which ascend: hands on what can be discarded now, ascending.
    pub(super) fn inflate(&mut self, runs: &[Span], mut discard: impl FnMut(Span)) {
        if let [first, ..] = runs
            && let [.., last] = runs
        {
            let (first, last) = (first.start, last.last());
            let touched = self.touched.get_or_insert((first, last));
            *touched = (touched.0.min(first), touched.1.max(last));
        }
        for (region, backing) in self.regions.iter().zip(&mut self.backings) {
            let runs = in_region(runs, region);
            match &mut backing.partial {
                Some(partial) => {
                    partial.with(|pages| pages.inflate_all(runs, &mut discard));
                }
                None if backing.page == WIRE_PAGE => {
                    for run in runs {
                        match region.covers(run) {
                            true => discard(*run),
                            false => region.intersection(run).into_iter().for_each(&mut discard),
                        }
                    }
                }
                None => {}
            }
        }
    }

    /// The guest takes these runs back, which ascend.
    pub(super) fn deflate(&mut self, runs: &[Span]) {
        for (region, backing) in self.regions.iter().zip(&mut self.backings) {
            if let Some(partial) = &mut backing.partial {
                partial.with(|pages| pages.deflate_all(in_region(runs, region)));
            }
        }
    }

    /// Forgets what was inflated since the last time: parts must not be remembered.
    pub(super) fn forget(&mut self) {
        let touched = self.touched.take();
        if let Some(run) = touched.and_then(|(first, last)| Span::inclusive(first, last)) {
            self.deflate(&[run]);
        }
    }

    /// What was inflated stays: parts are remembered.
    pub(super) fn remember(&mut self) {
        self.touched = None;
    }

    /// The balloon is empty.
    pub(super) fn empty(&mut self) {
        self.touched = None;
        for backing in &mut self.backings {
            if let Some(partial) = &mut backing.partial {
                partial.with(|pages| pages.forget());
            }
        }
    }

    /// Cuts these runs, which ascend, at the borders of regions, and to whole pages of what backs them.
    pub(super) fn cut(&self, runs: &[Span], mut sink: impl FnMut(Span)) {
        for (region, backing) in self.regions.iter().zip(&self.backings) {
            for run in in_region(runs, region) {
                if region.covers(run) && run.is_aligned(backing.page) && !run.is_empty() {
                    sink(*run);
                    continue;
                }
                let part = region.intersection(run).map(|run| inner(run, backing.page));
                if let Some(part) = part.filter(|part| !part.is_empty()) {
                    sink(part);
                }
            }
        }
    }

    /// Bytes in the balloon that wait for the rest of their huge pages.
    pub(super) fn waiting(&self) -> u64 {
        let partials = self
            .backings
            .iter()
            .filter_map(|backing| backing.partial.as_ref());
        partials
            .map(|partial| partial.totals.0 * WIRE_PAGE - partial.totals.1 * partial.huge)
            .sum()
    }

    pub(super) fn save(&self) -> Vec<PartialState> {
        let partials = self
            .backings
            .iter()
            .filter_map(|backing| backing.partial.as_ref());
        partials
            .map(|partial| PartialState {
                region: partial.region,
                bits: partial.bits().to_vec(),
            })
            .collect()
    }

    /// Remembers parts as they were saved, as far as they lie in this memory.
    pub(super) fn load(&mut self, saved: &[PartialState]) {
        self.empty();
        for partial in saved {
            for bits in runs::bitmap::runs(&partial.bits) {
                let start = bits.start.checked_mul(WIRE_PAGE);
                let start = start.and_then(|offset| partial.region.start.checked_add(offset));
                let run = start.and_then(|start| {
                    Span::checked(start, (bits.end - bits.start).checked_mul(WIRE_PAGE)?)
                });
                if let Some(run) = run.and_then(|run| run.intersection(&partial.region)) {
                    self.inflate(&[run], |_| {});
                }
            }
        }
        self.remember();
    }
}
