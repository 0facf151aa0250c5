//! The work of [`work`](crate::peers::work) for tables that others wrote: what a table is asked for, and the
//! batches around it.
//!
//! A [`Peer`] says how one range is mapped, unmapped and translated by its best call; [`Bench`] makes
//! a [`Subject`] of it: it builds a table for one kind of work, keeps it for as long as that work is
//! asked for, and undoes what was timed. Ranges and batches are those of our own tables
//! ([`places`](crate::peers::places)), so that all see the same set of lines.
//!
//! # Tables that stay
//!
//! Where the table of a batch is to be there and empty, it is made by mapping and unmapping. Some
//! remove a table with its last page; theirs have one page in each table just behind the range, and
//! are not empty. Where a range fills whole tables, such a peer cannot keep them: no figure.

use std::hint::black_box;

use anyhow::{Context as _, Result, bail, ensure};
use runs::{Iova, Run, Span};

use crate::peers::clock::time;
use crate::peers::memory;
use crate::peers::places::{Geometry, Places, RANGES, random};
use crate::peers::work::{Beside, Subject, Work};

/// Batches of which a sample takes the mean, where an operation is short.
pub(crate) const BATCHES: u32 = 16;
/// The most pages of a short operation.
pub(crate) const LONG: u64 = 16 << 10;
/// Bytes of the smallest page.
pub(crate) const SMALL: u64 = 4 << 10;
/// Bytes of a page of the level above.
pub(crate) const LARGE: u64 = 2 << 20;

/// The sizes of leaves that an operation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// 4 KiB.
    Small,
    /// 2 MiB.
    Large,
    /// Any size that fits.
    Any,
}

impl Leaves {
    fn of(page: u64) -> Option<Self> {
        match page {
            SMALL => Some(Self::Small),
            LARGE => Some(Self::Large),
            _ => None,
        }
    }
}

/// Treatment of tables that an unmap leaves empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// They stay.
    Stay,
    /// They are given back.
    GoBack,
}

/// Receiver of the runs that an unmap returns.
pub trait Sink {
    /// They are wanted.
    const WANTED: bool;
    /// Takes a page, or several, in ascending order.
    fn push(&mut self, run: Run);
}

/// They are not wanted.
pub struct Unwanted;

impl Sink for Unwanted {
    const WANTED: bool = false;

    #[inline(always)]
    fn push(&mut self, _: Run) {}
}

/// Joins neighbours, and drops whole runs.
#[derive(Default)]
struct Joined(Run);

impl Sink for Joined {
    const WANTED: bool = true;

    #[inline(always)]
    fn push(&mut self, next: Run) {
        if self.0.is_followed_by(&next) {
            self.0.len += next.len;
        } else {
            if self.0.len > 0 {
                black_box(self.0);
            }
            self.0 = next;
        }
    }
}

impl Joined {
    #[inline(always)]
    fn finish(self) {
        black_box(self.0);
    }
}

/// A table of another project, of four levels, tables of 512 entries and pages of 4 KiB.
pub trait Peer: Sized {
    /// The name, for people.
    const NAME: &'static str;
    /// An empty table stays where [`Tables::Stay`] says so.
    const KEEPS: bool = true;
    /// Tables can be given back before all of them are.
    const GIVES_BACK: bool = true;
    /// A large leaf can be split.
    const SPLITS: bool = false;

    /// An empty table, in the pages of [`memory`].
    fn new() -> Result<Self>;
    /// Maps `range` to what begins at `pa`, to be read and written, in one call where there is one.
    fn map(&mut self, range: Span<Iova>, pa: u64, leaves: Leaves) -> Result<()>;
    /// Unmaps `range`, which is mapped.
    fn unmap<S: Sink>(
        &mut self,
        range: Span<Iova>,
        leaves: Leaves,
        tables: Tables,
        sink: &mut S,
    ) -> Result<()>;
    /// Where an address leads.
    fn translate(&self, iova: u64) -> Option<u64>;
    /// Makes small leaves of a large one.
    fn split(&mut self, leaf: Span<Iova>) -> Result<()> {
        bail!("{}: {leaf} cannot be split", Self::NAME)
    }
}

/// The shape of every peer's tables. Addresses of the lower half only, where x86-64 has no holes.
pub(crate) fn geometry() -> Geometry {
    Geometry {
        input_bits: 47,
        output_bits: 48,
        levels: vec![(12, 21), (21, 30), (30, 39), (39, 48)],
        entry_bytes: 8,
    }
}

/// A peer as a subject.
pub struct Bench<P> {
    ready: Option<Ready<P>>,
}

/// State prepared for one kind of work.
struct Ready<P> {
    work: Work,
    peer: P,
    places: Places,
    leaves: Leaves,
    /// Batches of a sample.
    batches: u32,
    addresses: Vec<u64>,
}

impl<P: Peer> Bench<P> {
    /// Does nothing yet.
    pub fn new() -> Self {
        Self { ready: None }
    }
}

impl<P: Peer> Default for Bench<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Peer> Subject for Bench<P> {
    fn name(&self) -> String {
        P::NAME.to_owned()
    }

    fn sample(&mut self, work: &Work) -> Result<Option<f64>> {
        if self.ready.as_ref().is_none_or(|ready| ready.work != *work) {
            // The tables of what was before go first.
            self.ready = None;
            self.ready = Ready::prepare(work).with_context(|| format!("{}: {work:?}", P::NAME))?;
        }
        let Some(ready) = &mut self.ready else {
            return Ok(None);
        };
        let sample = ready.sample();
        if sample.is_err() {
            // Half of a batch may be mapped.
            self.ready = None;
        }
        sample
            .map(Some)
            .with_context(|| format!("{}: {work:?}", P::NAME))
    }
}

/// Where a kind of work is done.
pub(crate) struct Shape {
    /// The places of a batch.
    pub places: Places,
    /// Bytes of a page.
    pub page: u64,
    /// Pages of an operation.
    pub count: u64,
    /// Tables are warm, and hold this.
    pub warm: Option<Beside>,
}

impl Shape {
    /// Where some work is done in tables of this geometry; `None` where they have no room.
    pub(crate) fn of(work: &Work, geometry: &Geometry) -> Option<Self> {
        let (page, count, warm) = match *work {
            Work::Map {
                page,
                count,
                beside,
            }
            | Work::Unmap {
                page,
                count,
                beside,
                ..
            } => (page, count, Some(beside)),
            Work::MapAllocated { page, count }
            | Work::UnmapAllocated { page, count, .. }
            | Work::Cycle { page, count } => (page, count, None),
            Work::MapChosen | Work::UnmapChosen => {
                let places = geometry.chosen()?;
                let len = places.ranges.first()?.len;
                let page = if places.ranges.len() as u64 > RANGES {
                    len
                } else {
                    1 << geometry.levels.first()?.0
                };
                return Some(Self {
                    places,
                    page,
                    count: len / page,
                    warm: Some(Beside::Half),
                });
            }
            Work::Translate { page } | Work::Harvest { page, .. } => (page, (1 << 30) / page, None),
            Work::UnmapDirty { page, count } => (page, count, Some(Beside::Page)),
            Work::MapSeveral { page } | Work::UnmapSeveral { page } => {
                (page, 1, Some(Beside::Page))
            }
            Work::Split { page } | Work::Merge { page } => (page, 1, None),
        };
        Some(Self {
            places: geometry.places(page, count)?,
            page,
            count,
            warm,
        })
    }
}

impl<P: Peer> Ready<P> {
    /// Sets a table up; `None` where this peer does not do such work.
    fn prepare(work: &Work) -> Result<Option<Self>> {
        let offered = match work {
            Work::Split { page } => P::SPLITS && *page == LARGE,
            // None has a call for it: their own walks could be made to, page by page.
            Work::Merge { .. } | Work::Harvest { .. } | Work::UnmapDirty { .. } => false,
            // They have nothing that would be done once for all.
            Work::MapSeveral { .. } | Work::UnmapSeveral { .. } => false,
            // A peer that does not give tables back would unmap from warm ones here.
            Work::UnmapAllocated { .. } | Work::Cycle { .. } => P::GIVES_BACK,
            _ => true,
        };
        if !offered {
            return Ok(None);
        }
        let Some(shape) = Shape::of(work, &geometry()) else {
            return Ok(None);
        };
        let Shape {
            places,
            page,
            count,
            warm,
        } = shape;
        let leaves = match work {
            Work::MapChosen | Work::UnmapChosen => Some(Leaves::Any),
            _ => Leaves::of(page),
        };
        let Some(leaves) = leaves else {
            return Ok(None);
        };
        let held = match warm {
            None => Vec::new(),
            Some(Beside::Half) => places.beside.clone(),
            Some(Beside::Page | Beside::Kept) if P::KEEPS => Vec::new(),
            Some(Beside::Kept) => return Ok(None),
            Some(Beside::Page) => places.behind(page),
        };
        if warm.is_some() && !P::KEEPS && held.is_empty() {
            return Ok(None);
        }
        memory::reserve(geometry().tables(&places, page) as usize);
        let mut ready = Self {
            work: *work,
            peer: P::new()?,
            places,
            leaves,
            batches: if count <= LONG { BATCHES } else { 1 },
            addresses: Vec::new(),
        };
        ready.keep()?;
        for span in held {
            ready.peer.map(span, ready.places.pa, leaves)?;
        }
        let stays = matches!(work, Work::Translate { .. } | Work::Split { .. });
        for range in &ready.places.ranges {
            if stays || warm.is_some() {
                ready.peer.map(*range, ready.places.pa, leaves)?;
            }
            if !stays && warm.is_some() {
                let peer = &mut ready.peer;
                peer.unmap(*range, leaves, Tables::Stay, &mut Unwanted)?;
            }
        }
        if matches!(work, Work::Translate { .. }) {
            let range = ready.places.ranges.first().context("no range")?;
            ready.addresses = random(*range);
        }
        Ok(Some(ready))
    }

    /// Maps what keeps the upper tables.
    fn keep(&mut self) -> Result<()> {
        match self.places.keeper {
            Some(keeper) => self.peer.map(keeper, self.places.pa, self.leaves),
            None => Ok(()),
        }
    }

    /// The mean time of one operation: of `timed` for every range, after `before` and followed by
    /// `after` for every range.
    #[inline(always)]
    fn timed(
        &mut self,
        before: impl Fn(&mut P, Span<Iova>, u64, Leaves) -> Result<()>,
        timed: impl Fn(&mut P, Span<Iova>, u64, Leaves) -> Result<()>,
        after: impl Fn(&mut P, Span<Iova>, u64, Leaves) -> Result<()>,
    ) -> Result<f64> {
        let (pa, leaves) = (self.places.pa, self.leaves);
        // A peer that cannot give its tables back begins anew.
        let anew = !P::GIVES_BACK && matches!(self.work, Work::MapAllocated { .. });
        let mut sum = 0.0;
        for _ in 0..self.batches {
            let (ranges, peer) = (&self.places.ranges, &mut self.peer);
            for range in ranges {
                before(peer, *range, pa, leaves)?;
            }
            let mut result = Ok(());
            sum += time(ranges.len() as u64, || {
                for range in black_box(ranges) {
                    result = timed(peer, *range, black_box(pa), leaves);
                    if result.is_err() {
                        break;
                    }
                }
            });
            result?;
            if anew {
                self.peer = P::new()?;
                self.keep()?;
                continue;
            }
            for range in ranges {
                after(peer, *range, pa, leaves)?;
            }
        }
        Ok(sum / f64::from(self.batches))
    }

    fn sample(&mut self) -> Result<f64> {
        let nothing = |_: &mut P, _, _, _| Ok(());
        let map = |p: &mut P, range, pa, leaves| p.map(range, pa, leaves);
        match self.work {
            Work::Map { .. } | Work::MapChosen => self.timed(nothing, map, discard::<P, false>),
            Work::MapAllocated { .. } => self.timed(nothing, map, discard::<P, true>),
            Work::Unmap { runs: false, .. } => self.timed(map, discard::<P, false>, nothing),
            Work::Unmap { .. } | Work::UnmapChosen => self.timed(map, unmap::<P, false>, nothing),
            Work::UnmapAllocated { runs: false, .. } => {
                self.timed(map, discard::<P, true>, nothing)
            }
            Work::UnmapAllocated { .. } => self.timed(map, unmap::<P, true>, nothing),
            Work::Cycle { .. } => {
                let cycle = |p: &mut P, range, pa, leaves| {
                    p.map(range, pa, leaves)?;
                    unmap::<P, true>(p, range, pa, leaves)
                };
                self.timed(nothing, cycle, nothing)
            }
            Work::Split { .. } => self.timed(
                nothing,
                |p, range, _, _| p.split(range),
                |p, range, pa, leaves| {
                    p.unmap(range, Leaves::Small, Tables::GoBack, &mut Unwanted)?;
                    p.map(range, pa, leaves)
                },
            ),
            Work::Translate { .. } => {
                let (peer, addresses) = (&self.peer, &self.addresses);
                let mut well = true;
                let taken = time(addresses.len() as u64, || {
                    for at in addresses {
                        well &= black_box(peer.translate(black_box(*at))).is_some();
                    }
                });
                ensure!(well, "an address is not mapped");
                Ok(taken)
            }
            Work::MapSeveral { .. }
            | Work::UnmapSeveral { .. }
            | Work::Merge { .. }
            | Work::Harvest { .. }
            | Work::UnmapDirty { .. } => {
                bail!("not offered")
            }
        }
    }
}

/// Unmaps a range whose runs are not wanted; empty tables are given back where `BACK`.
#[inline(always)]
fn discard<P: Peer, const BACK: bool>(
    peer: &mut P,
    range: Span<Iova>,
    _: u64,
    leaves: Leaves,
) -> Result<()> {
    peer.unmap(range, leaves, back(BACK), &mut Unwanted)
}

/// Unmaps a range whose runs are wanted.
#[inline(always)]
fn unmap<P: Peer, const BACK: bool>(
    peer: &mut P,
    range: Span<Iova>,
    _: u64,
    leaves: Leaves,
) -> Result<()> {
    let mut runs = Joined::default();
    peer.unmap(range, leaves, back(BACK), &mut runs)?;
    runs.finish();
    Ok(())
}

const fn back(back: bool) -> Tables {
    if back { Tables::GoBack } else { Tables::Stay }
}

#[cfg(test)]
pub(crate) mod tests;
