//! Memory whose physical runs are given: see [`FixedRuns`].
//!
//! It is a memory object like any other, with a pin that does nothing. Areas never share a leaf, also
//! when leaves are merged, so registers that are mapped beside memory keep entries of their own.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow;

use runs::{Joinable, Offset, Pa, Span};

use crate::memory::error::MapError;
use crate::memory::ledger::Ledger;
use crate::memory::object::{Cause, MemoryObject, PinFailed, Pinned, RunReader};
use crate::memory::{Hold, Memory};

/// Memory of given physical runs: a BAR of another device (peer to peer), or memory that the system
/// has set aside. It always stays where it is, so nothing is pinned and nothing charged.
///
/// Only a back end with tables of ours maps it
/// ([`Capabilities::fixed_runs`](crate::Capabilities::fixed_runs)): others find memory by themselves,
/// and refuse it by name.
///
/// ```
/// use ioas::{FixedRuns, Ledger, Memory};
/// use runs::Span;
///
/// // BAR 2 of some device, as `/sys/bus/pci/devices/0000:00:06.0/resource` says.
/// let bar = FixedRuns::bar(Span::new(0xfe00_0000, 0x10_0000), 4096)?;
/// let memory = Memory::new(std::sync::Arc::new(bar), &Ledger::unlimited());
/// assert_eq!(memory.len(), 0x10_0000);
/// # Ok::<_, ioas::UnalignedRun>(())
/// ```
#[derive(Clone, Debug)]
pub struct FixedRuns {
    /// Joined, with their offsets.
    runs: Arc<[(u64, Span<Pa>)]>,
    len: u64,
    mmio: bool,
}

/// A run that is not to be had in pages: it is empty, no multiple of the page at both ends, ends
/// beyond 2^64, or makes more than 2^64 bytes altogether; or the page is no power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{run} is no run of whole pages of {page:#x} bytes")]
pub struct UnalignedRun {
    /// The first such run.
    pub run: Span<Pa>,
    /// The page, bytes.
    pub page: u64,
}

impl FixedRuns {
    /// Memory that consists of `runs` (physical address and length in bytes, whole pages of `page`
    /// bytes), in the order of its offsets.
    ///
    /// # Errors
    ///
    /// [`UnalignedRun`].
    pub fn new(runs: impl IntoIterator<Item = Span<Pa>>, page: u64) -> Result<Self, UnalignedRun> {
        let mut len = 0u64;
        let mut whole = Vec::new();
        for run in runs {
            let pages = page.is_power_of_two() && run.is_aligned(page);
            let checked = Span::<Pa>::checked(run.start, run.len).filter(|_| pages);
            let sum = checked.and_then(|run| len.checked_add(run.len));
            let offset = len;
            len = sum.ok_or(UnalignedRun { run, page })?;
            let before: Option<&mut (u64, Span<Pa>)> = whole.last_mut();
            match before.and_then(|(_, before)| Some((before.join(&run)?, before))) {
                Some((joined, before)) => *before = joined,
                None => whole.push((offset, run)),
            }
        }
        Ok(Self {
            runs: whole.into(),
            len,
            mmio: false,
        })
    }

    /// Registers of a device: `bar` (physical address and length in bytes, whole pages of `page`
    /// bytes).
    ///
    /// # Errors
    ///
    /// [`UnalignedRun`].
    pub fn bar(bar: Span<Pa>, page: u64) -> Result<Self, UnalignedRun> {
        let runs = Self::new([bar], page)?;
        Ok(Self { mmio: true, ..runs })
    }
}

impl FixedRuns {
    /// Physical range of `part`, if that is one run.
    #[inline]
    pub(crate) fn one_run(&self, part: Span<Offset>) -> Option<Span<Pa>> {
        let behind = self
            .runs
            .partition_point(|(offset, _)| *offset <= part.start);
        let (offset, run) = self.runs[..behind].last()?;
        let at = part.start - offset;
        (part.len <= run.len.saturating_sub(at)).then(|| Span::new(run.start + at, part.len))
    }

    pub(crate) fn reader(&self, part: Span<Offset>) -> Reader<'_> {
        Reader::new(&self.runs, part)
    }
}

impl MemoryObject for FixedRuns {
    fn fixed_runs(&self) -> Option<&FixedRuns> {
        Some(self)
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn charge(&self, _part: Span<Offset>) -> u64 {
        0
    }

    fn is_mmio(&self) -> bool {
        self.mmio
    }

    fn pin(
        &self,
        part: Span<Offset>,
        _progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        let runs = Arc::clone(&self.runs);
        Ok(Box::new(FixedPin {
            runs,
            bytes: part.len,
        }))
    }
}

/// A part of a memory that was pinned once.
#[derive(Debug)]
struct PinnedPart {
    runs: FixedRuns,
    /// Has it stay where it is.
    _hold: Hold,
}

impl Memory {
    /// `part` (offset and length in bytes) of it, pinned and charged until what this returns is gone everywhere: memory that
    /// stays where it is, with offsets from 0 on. Buffers of it that [`Dma`](crate::Dma) maps need no pin of
    /// their own.
    ///
    /// # Errors
    ///
    /// [`MapError::Part`], and those of charging, pinning and looking up.
    pub fn pinned(self: &Arc<Self>, part: Span<Offset>) -> Result<Arc<Self>, MapError> {
        if part.is_empty() || !Span::new(0, self.len()).covers(&part) {
            return Err(MapError::Part {
                part,
                object: self.len(),
                granule: 1,
            });
        }
        let hold = self.hold(part, &mut ())?;
        let mut runs = Vec::new();
        let found = hold.with_runs(part, |reader| {
            let mut batch = [Span::<Pa>::default(); 256];
            let (mut found, room) = (0u64, batch.len());
            loop {
                let count = reader.next_batch(&mut batch).map_err(MapError::Runs)?;
                let Some(batch) = batch.get(..count) else {
                    return Err(MapError::BatchTooLong { count, room });
                };
                for run in batch {
                    runs.push((found, *run));
                    found = found.saturating_add(run.len);
                }
                if count == 0 || found > part.len {
                    return Ok(found);
                }
            }
        })?;
        if found != part.len {
            let pinned = part.len;
            return Err(MapError::RunsDiffer { pinned, found });
        }
        let runs = FixedRuns {
            runs: runs.into(),
            len: part.len,
            mmio: self.object().is_mmio(),
        };
        let part = PinnedPart { runs, _hold: hold };
        Ok(Self::new(Arc::new(part), &Ledger::unlimited()))
    }
}

impl MemoryObject for PinnedPart {
    fn fixed_runs(&self) -> Option<&FixedRuns> {
        Some(&self.runs)
    }

    fn len(&self) -> u64 {
        self.runs.len
    }

    fn charge(&self, _part: Span<Offset>) -> u64 {
        0
    }

    fn is_mmio(&self) -> bool {
        self.runs.mmio
    }

    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        self.runs.pin(part, progress)
    }
}

/// A part that is used. It stays where it is anyway.
#[derive(Debug)]
struct FixedPin {
    runs: Arc<[(u64, Span<Pa>)]>,
    bytes: u64,
}

impl Pinned for FixedPin {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        Ok(Box::new(Reader::new(&self.runs, part)))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        self.bytes -= part.len;
        Ok(0)
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        Ok(self.bytes)
    }
}

/// Reads the runs of a part out of those of a whole object.
pub(crate) struct Reader<'a> {
    /// Runs that overlap the part, with their offsets.
    runs: &'a [(u64, Span<Pa>)],
    part: Span<Offset>,
}

impl<'a> Reader<'a> {
    /// The runs of `part` of the object that consists of `runs`, with their offsets.
    pub(crate) fn new(runs: &'a [(u64, Span<Pa>)], part: Span<Offset>) -> Self {
        let end = part.start + part.len;
        let first = runs.partition_point(|(offset, run)| offset + run.len <= part.start);
        let runs = &runs[first..];
        let count = runs.partition_point(|(offset, _)| *offset < end);
        let runs = &runs[..count];
        Self { runs, part }
    }
}

impl RunReader for Reader<'_> {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        let filled = out.len().min(self.runs.len());
        let (runs, rest) = self.runs.split_at(filled);
        for (slot, (_, run)) in out.iter_mut().zip(runs) {
            *slot = *run;
        }
        // The first may begin before the part, and the last may end behind it.
        let end = self.part.start + self.part.len;
        if let (Some((offset, run)), Some(last)) = (runs.last(), out[..filled].last_mut()) {
            last.len -= (offset + run.len).saturating_sub(end);
        }
        if let (Some((offset, _)), Some(first)) = (runs.first(), out.first_mut()) {
            let skipped = self.part.start.saturating_sub(*offset);
            *first = Span::new(first.start + skipped, first.len - skipped);
        }
        self.runs = rest;
        Ok(filled)
    }
}
