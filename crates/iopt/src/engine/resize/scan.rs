//! Which leaves are not as they should be.

use runs::{Iova, PageSizes, Run, Span};

use super::super::Table;
use super::up_to;
use crate::error::ResizeError;
use crate::format::Format;
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;

/// Kind of resize.
#[derive(Clone, Copy)]
pub(in crate::engine) enum Job {
    /// Leaves of at most so many bytes.
    Split(u64),
    /// A leaf begins at this stripped address.
    Cut(u64),
    /// The largest leaves.
    Merge,
}

/// How the new leaves are chosen: as [`map`](crate::TableOps::map) would for the same memory.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) sizes: PageSizes,
    /// No leaf lies on both sides of this stripped address.
    pub(super) cut: u64,
}

/// Entries of one table that change together: those of a leaf that becomes smaller, or those that
/// become one leaf.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// Stripped address.
    pub(super) at: u64,
    pub(super) pa: u64,
    pub(super) len: u64,
    /// The level of the entries.
    pub(super) level: u8,
    /// Permission and attribute bits of the leaves.
    pub(super) bits: u64,
    /// It becomes one leaf.
    pub(super) merges: bool,
}

impl Extent {
    pub(super) fn input<F: Format, M: TableMemory>(&self, table: &Table<F, M>) -> Span<Iova> {
        Span::new(table.aperture().extend(self.at), self.len)
    }

    pub(super) fn run<F: Format, M: TableMemory>(&self, table: &Table<F, M>) -> Run {
        Run::new(self.input(table).start, Span::new(self.pa, self.len))
    }

    /// How many entries it has.
    pub(super) fn entries<F: Format>(&self) -> usize {
        (self.len >> F::shift(self.level.into())) as usize
    }

    /// Notes that its old leaves, and the tables that they lie in, have to be flushed.
    pub(super) fn note<F: Format, M: TableMemory>(&self, table: &Table<F, M>, gather: &mut Gather) {
        let levels = if self.merges {
            (2 << self.level) - 1
        } else {
            1 << self.level
        };
        gather.add(self.input(table), levels);
        if self.merges && self.level > 0 {
            gather.note_tables(table);
        }
    }
}

/// Goes through a range in order. Parts that it has passed may be changed meanwhile.
#[derive(Clone)]
pub(super) struct Scan {
    job: Job,
    at: u64,
    last: u64,
    first: u64,
    /// The range is passed, also where it ends with the last address of all.
    over: bool,
    /// In a merge: the rest of the run that lies at `at`, and the size of its first leaf if known.
    run: Option<(Run, Prot, Option<u64>)>,
    /// In a split: the next extent, and the bytes of the extents that go on behind it.
    larger: Option<(Extent, u64)>,
    /// The next extent, where that is known.
    known: Option<Extent>,
}

impl Scan {
    pub(super) fn new(hull: (u64, u64), job: Job) -> Self {
        Self {
            job,
            at: hull.0,
            last: hull.1,
            first: hull.0,
            over: false,
            run: None,
            larger: None,
            known: None,
        }
    }

    /// There is this extent and no other.
    pub(super) fn only(&mut self, extent: Extent) {
        self.put_back(extent);
        self.over = true;
    }

    /// This extent, which came last, comes again.
    pub(super) fn put_back(&mut self, extent: Extent) {
        self.known = Some(extent);
    }

    pub(super) fn first(&self) -> u64 {
        self.first
    }

    pub(super) fn layout<F: Format, M: TableMemory>(&self, table: &Table<F, M>) -> Layout {
        let sizes = table.sizes;
        match self.job {
            Job::Split(size) => Layout {
                sizes: up_to(sizes, size),
                cut: 0,
            },
            Job::Cut(cut) => Layout { sizes, cut },
            Job::Merge => Layout { sizes, cut: 0 },
        }
    }

    /// Goes on behind `last`.
    fn pass(&mut self, last: u64) {
        match last.checked_add(1) {
            Some(next) if next <= self.last => self.at = next,
            _ => self.over = true,
        }
    }

    /// The rest of the range, as the table's user addresses it.
    fn rest<F: Format, M: TableMemory>(&self, table: &Table<F, M>) -> Span<Iova> {
        // A range is at most 2^63 bytes long, or its length would not fit where it was checked.
        let len = (self.last - self.at).saturating_add(1);
        Span::new(table.aperture().extend(self.at), len)
    }

    /// The next extent.
    pub(super) fn next<F: Format, M: TableMemory, E>(
        &mut self,
        table: &Table<F, M>,
    ) -> Result<Option<Extent>, ResizeError<E>> {
        if let Some(extent) = self.known.take() {
            return Ok(Some(extent));
        }
        match self.job {
            Job::Split(size) => self.next_larger(table, size),
            // One larger than a page that begins before is the only one that can be meant.
            Job::Cut(cut) => match self.next_larger(table, 1)? {
                Some(extent) if extent.at < cut => Ok(Some(extent)),
                _ => Ok(None),
            },
            Job::Merge => self.next_mergeable(table),
        }
    }

    /// The next leaf of more than `size` bytes. Leaves that continue each other are found together.
    fn next_larger<F: Format, M: TableMemory, E>(
        &mut self,
        table: &Table<F, M>,
        size: u64,
    ) -> Result<Option<Extent>, ResizeError<E>> {
        let (mut extent, rest) = match self.larger.take() {
            Some(found) => found,
            None if self.over => return Ok(None),
            None => {
                let mut stretches = table.leaves(self.rest(table)).stretches();
                let Some((leaf, run)) = stretches.find(|(leaf, _)| leaf.run.len > size) else {
                    self.over = true;
                    return Ok(None);
                };
                let extent = Extent {
                    at: table.aperture().strip(run.iova),
                    pa: run.pa,
                    len: leaf.run.len,
                    level: leaf.level,
                    bits: bits_of(table, leaf.run, leaf.prot)?,
                    merges: false,
                };
                (extent, run.len - leaf.run.len)
            }
        };
        let (found, len) = (extent, extent.len);
        self.pass(found.at + (len - 1));
        if rest > 0 {
            extent.at += len;
            extent.pa += len;
            self.larger = Some((extent, rest - len));
        }
        Ok(Some(found))
    }

    /// The next entries that can be one leaf and are not.
    fn next_mergeable<F: Format, M: TableMemory, E>(
        &mut self,
        table: &Table<F, M>,
    ) -> Result<Option<Extent>, ResizeError<E>> {
        while !self.over {
            let Some((run, prot, leaf)) = self.run.take().or_else(|| self.next_run(table)) else {
                self.over = true;
                break;
            };
            let aperture = table.aperture();
            let at = aperture.strip(run.iova);
            // The leaf that `map` would put here: see `leaves_here`.
            let room = (!run.pa & low_bits(F::LINEAR_LOG2)).saturating_add(1);
            let Some((size, count)) = table.sizes.step(at, Span::new(run.pa, run.len.min(room)))
            else {
                self.pass_in(run, prot, run.len);
                continue;
            };
            // Leaves that are large enough are passed in one go.
            let stretch = Span::new(run.iova, size * count);
            let small = match leaf {
                Some(len) if len < size => Some(0),
                _ => table
                    .leaves(stretch)
                    .first_of(|len| len < size)
                    .map(|leaf| (leaf.run.iova - run.iova) & !(size - 1)),
            };
            let Some(offset) = small else {
                self.pass_in(run, prot, stretch.len);
                continue;
            };
            self.pass_in(run, prot, offset + size);
            let level = (0..table.begin().levels)
                .find(|level| F::leaf_sizes(usize::from(*level)).contains(size));
            return Ok(Some(Extent {
                at: at + offset,
                pa: run.pa + offset,
                len: size,
                level: level.unwrap_or(0),
                bits: bits_of(table, run, prot)?,
                merges: true,
            }));
        }
        Ok(None)
    }

    /// Goes on in a run, `bytes` further.
    fn pass_in(&mut self, run: Run, prot: Prot, bytes: u64) {
        if bytes < run.len {
            let rest = run.skip(bytes);
            self.run = Some((rest, prot, None));
        }
        self.pass(self.at + (bytes - 1));
    }

    /// The run of leaves with the same permissions that comes next; `at` goes to its start.
    fn next_run<F: Format, M: TableMemory>(
        &mut self,
        table: &Table<F, M>,
    ) -> Option<(Run, Prot, Option<u64>)> {
        let range = self.rest(table);
        let mut leaves = table
            .leaves(range)
            .stretches()
            .map(|(leaf, run)| (within(&range, leaf.run.len, run), leaf))
            .filter(|(run, _)| run.len > 0);
        let (mut run, first) = leaves.next()?;
        for (next, leaf) in leaves {
            if !run.is_followed_by(&next) || leaf.prot != first.prot {
                break;
            }
            run.len += next.len;
        }
        self.at = table.aperture().strip(run.iova);
        Some((run, first.prot, Some(first.run.len)))
    }
}

/// Part of a run of leaves of `size` bytes: the leaves that lie in `range` whole.
fn within(range: &Span<Iova>, size: u64, mut run: Run) -> Run {
    if run.iova < range.start {
        run = run.skip(size);
    }
    if run.len > 0 && run.input().last() > range.last() {
        run.len -= size;
    }
    run
}

/// The bits with which leaves of these permissions are made.
fn bits_of<F: Format, M: TableMemory, E>(
    table: &Table<F, M>,
    run: Run,
    prot: Prot,
) -> Result<u64, ResizeError<E>> {
    table
        .format
        .leaf_bits(prot)
        .ok_or(ResizeError::Foreign { leaf: run, prot })
}

/// The lowest `bits` bits.
const fn low_bits(bits: u32) -> u64 {
    if bits >= 64 {
        u64::MAX
    } else {
        (1 << bits) - 1
    }
}
