//! The memory: pages of the host that the kernel pins, as devices of the software unit reach them.
//!
//! A frame is there as long as an owner has it pinned, and not a moment longer. Which frame holds which bytes is
//! learnt from the pins, not from any page table: a wrong leaf leads to wrong data, and a leaf that outlives its
//! pin leads nowhere, which is counted as a stray access.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use hostmem::Mapping;
use ioas::{Cause, HostMemory, MemoryObject, PinFailed, Pinned, ProcessMemory, RunReader};
use iommu::{BadTarget, TargetMemory};
use runs::{Offset, Pa, Span};

use super::faults::{Fault, Faults};

/// Runs that are read at once.
const BATCH: usize = 4096;

/// Physical addresses that stand in for page frames: chunks from `base` on, in another order than in the memory,
/// so that leaves of all sizes occur on every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The lowest.
    pub(crate) base: u64,
    /// Bytes that lie together.
    pub(crate) chunk: u64,
    chunks: u64,
}

impl Layout {
    /// Layout of `len` bytes, in chunks of `chunk`; 0 for one chunk.
    pub(crate) fn new(base: u64, len: u64, chunk: u64) -> Self {
        let chunk = if chunk == 0 { len.max(1) } else { chunk };
        let chunks = len / chunk;
        Self {
            base,
            chunk,
            chunks,
        }
    }

    /// Where the byte at `offset` lies. Every second group of four chunks is reversed, so that some are
    /// neighbours still.
    pub(crate) const fn address(&self, offset: u64) -> u64 {
        let nth = offset / self.chunk;
        let place = match self.chunks < 4 || nth & 4 == 0 {
            true => nth,
            false => nth ^ 3,
        };
        self.base + place * self.chunk + offset % self.chunk
    }
}

/// The runs of `part` of a memory that lies so.
struct Chunks {
    layout: Layout,
    part: Span<Offset>,
}

impl RunReader for Chunks {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        let mut count = 0;
        for slot in out {
            if self.part.is_empty() {
                break;
            }
            let (offset, chunk) = (self.part.start, self.layout.chunk);
            let len = (chunk - offset % chunk).min(self.part.len);
            *slot = Span::new(self.layout.address(offset), len);
            self.part = Span::new(offset + len, self.part.len - len);
            count += 1;
        }
        Ok(count)
    }
}

/// A reader that can be made to fail.
struct Rigged<'a> {
    inner: Chunks,
    faults: &'a Faults,
}

impl RunReader for Rigged<'_> {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        match self.faults.hit(Fault::Runs) {
            true => Err("runs that are not to be read".into()),
            false => self.inner.next_batch(out),
        }
    }
}

/// A pin of a process, by a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinNumber(pub(crate) u64);

/// A frame that two pages have.
#[derive(Debug, thiserror::Error)]
#[error("another page that is pinned has a frame of {run}")]
struct FrameTwice {
    run: Span<Pa>,
}

/// A run of frames, and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    len: u64,
    memory: usize,
    offset: u64,
    pin: PinNumber,
}

/// Pins of a process, by physical address.
#[derive(Debug, Default)]
pub(crate) struct Frames(BTreeMap<u64, Piece>);

impl Frames {
    pub(crate) fn add(
        &mut self,
        pin: PinNumber,
        memory: usize,
        offset: u64,
        run: Span<Pa>,
    ) -> Result<(), Cause> {
        let before = self.0.range(..=run.last()).next_back();
        if before.is_some_and(|(start, piece)| start + piece.len > run.start) {
            return Err(FrameTwice { run }.into());
        }
        let len = run.len;
        let piece = Piece {
            len,
            memory,
            offset,
            pin,
        };
        self.0.insert(run.start, piece);
        Ok(())
    }

    pub(crate) fn remove(&mut self, pin: PinNumber, memory: usize, part: Span<Offset>) {
        let hit = |piece: &Piece| {
            let here = Span::new(piece.offset, piece.len);
            (piece.pin == pin && piece.memory == memory && here.overlaps(&part)).then_some(here)
        };
        let gone: Vec<(u64, Piece, Span<Offset>)> = self
            .0
            .iter()
            .filter_map(|(start, piece)| Some((*start, *piece, hit(piece)?)))
            .collect();
        for (start, piece, here) in gone {
            self.0.remove(&start);
            for left in without(here, &part) {
                let piece = Piece {
                    len: left.len,
                    offset: left.start,
                    ..piece
                };
                self.0.insert(start + (left.start - here.start), piece);
            }
        }
    }

    /// The piece in which `address` lies, and where it begins.
    fn at(&self, address: u64) -> Option<(u64, Piece)> {
        let (start, piece) = self.0.range(..=address).next_back()?;
        (address - start < piece.len).then_some((*start, *piece))
    }

    /// Joined runs with what they hold, whatever pins hold them.
    fn joined(&self) -> Vec<(u64, u64, usize, u64)> {
        let mut joined: Vec<(u64, u64, usize, u64)> = Vec::new();
        for (start, piece) in &self.0 {
            match joined.last_mut() {
                Some((at, len, memory, offset))
                    if *memory == piece.memory
                        && *at + *len == *start
                        && *offset + *len == piece.offset =>
                {
                    *len += piece.len;
                }
                _ => joined.push((*start, piece.len, piece.memory, piece.offset)),
            }
        }
        joined
    }
}

/// Rest of `span` without `part`: none, one or two spans.
pub(crate) fn without<A>(span: Span<A>, part: &Span<A>) -> impl Iterator<Item = Span<A>> + use<A> {
    let both = span.intersection(part);
    let both = both.unwrap_or(Span::new(span.start + span.len, 0));
    let behind = both.start + both.len;
    let head = Span::new(span.start, both.start - span.start);
    let tail = Span::new(behind, span.start + span.len - behind);
    [head, tail].into_iter().filter(|span| span.len > 0)
}

/// Physical memory: frames that are pinned.
#[derive(Debug)]
pub(crate) struct Physical {
    memories: Vec<Arc<Mapping>>,
    frames: RwLock<Frames>,
    stray: AtomicU64,
}

impl Physical {
    pub(crate) fn new(memories: Vec<Arc<Mapping>>) -> Self {
        Self {
            memories,
            frames: RwLock::default(),
            stray: AtomicU64::new(0),
        }
    }

    /// All that is pinned: the memory, the offset in it, and the length.
    pub(crate) fn pinned(&self) -> Vec<(usize, u64, u64)> {
        let joined = read(&self.frames).joined().into_iter();
        joined
            .map(|(_, len, memory, offset)| (memory, offset, len))
            .collect()
    }

    /// How often a device has reached what is not pinned.
    pub(crate) fn stray(&self) -> u64 {
        self.stray.load(Ordering::Relaxed)
    }

    /// Lends what is there from `address` on, as far as it lies together and `most` bytes.
    fn lend(&self, address: u64, most: u64, visit: &mut dyn FnMut(&[AtomicU64])) -> Option<u64> {
        let (start, piece) = read(&self.frames).at(address)?;
        let inside = address - start;
        let len = (piece.len - inside).min(most);
        let first = ((piece.offset + inside) / 8) as usize;
        let cells = self.memories.get(piece.memory)?.cells();
        visit(cells.get(first..first + (len / 8) as usize)?);
        Some(len)
    }

    fn releasing(&self, pin: PinNumber, memory: usize, part: Span<Offset>) {
        write(&self.frames).remove(pin, memory, part);
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl TargetMemory for Physical {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        let mut done = 0;
        while done < span.len {
            let (address, most) = (span.start + done, span.len - done);
            let lent = self.lend(address, most, visit);
            done += lent.ok_or_else(|| {
                self.stray.fetch_add(1, Ordering::Relaxed);
                BadTarget { address }
            })?;
        }
        Ok(())
    }
}

/// Memory of the host whose pins are recorded, and can be made to fail.
pub(crate) struct Ram {
    pub(crate) inner: HostMemory,
    pub(crate) number: usize,
    /// Addresses in the place of page frames.
    pub(crate) layout: Layout,
    pub(crate) faults: Arc<Faults>,
    pub(crate) physical: Arc<Physical>,
    pub(crate) pins: AtomicU64,
}

impl std::fmt::Debug for Ram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ram").field(&self.number).finish()
    }
}

impl MemoryObject for Ram {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        self.inner.charge(part)
    }

    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        if self.faults.hit(Fault::Pin) {
            return Err(PinFailed::Refused("a pin that is to fail".into()));
        }
        let pin = Pin {
            inner: Some(self.inner.pin(part, progress)?),
            part,
            number: PinNumber(self.pins.fetch_add(1, Ordering::Relaxed)),
            memory: self.number,
            layout: self.layout,
            faults: Arc::clone(&self.faults),
            physical: Arc::clone(&self.physical),
        };
        // A drop takes the frames back.
        pin.tell().map_err(PinFailed::Refused)?;
        Ok(Box::new(pin))
    }

    fn in_process(&self) -> Option<ProcessMemory> {
        self.inner.in_process()
    }

    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.inner.file()
    }
}

struct Pin {
    inner: Option<Box<dyn Pinned>>,
    part: Span<Offset>,
    number: PinNumber,
    memory: usize,
    layout: Layout,
    faults: Arc<Faults>,
    physical: Arc<Physical>,
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pin").field(&self.part).finish()
    }
}

/// The pin was given back before.
#[derive(Debug, thiserror::Error)]
#[error("the pin was given back before")]
struct Gone;

impl Pin {
    fn tell(&self) -> Result<(), Cause> {
        let mut offset = self.part.start;
        let mut reader = self.frames(self.part);
        let mut batch = [Span::default(); BATCH];
        loop {
            let count = reader.next_batch(&mut batch)?;
            for run in batch.iter().take(count) {
                let (pin, memory) = (self.number, self.memory);
                write(&self.physical.frames).add(pin, memory, offset, *run)?;
                offset += run.len;
            }
            if count == 0 {
                return Ok(());
            }
        }
    }

    fn frames(&self, part: Span<Offset>) -> Chunks {
        let layout = self.layout;
        Chunks { layout, part }
    }

    fn releasing(&self, part: Span<Offset>) {
        self.physical.releasing(self.number, self.memory, part);
    }
}

impl Pinned for Pin {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        let (inner, faults) = (self.frames(part), &*self.faults);
        Ok(Box::new(Rigged { inner, faults }))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        self.releasing(part);
        self.inner.as_mut().ok_or(Gone)?.release(part)
    }

    fn unpin(mut self: Box<Self>) -> Result<u64, Cause> {
        self.releasing(self.part);
        self.inner.take().ok_or(Gone)?.unpin()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if self.inner.is_some() {
            self.releasing(self.part);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

    use super::*;

    const FIRST: PinNumber = PinNumber(1);

    #[test]
    fn frames_go_with_the_pin_that_holds_them_and_no_others() {
        let mut frames = Frames::default();
        frames
            .add(FIRST, 0, 0, Span::new(0x10_0000, 0x4000))
            .unwrap();
        frames
            .add(FIRST, 0, 0x4000, Span::new(0x8000, 0x1000))
            .unwrap();
        assert!(
            frames
                .add(FIRST, 1, 0, Span::new(0x10_3000, 0x2000))
                .is_err()
        );
        frames.remove(FIRST, 0, Span::new(0x1000, 0x1000));
        assert!(frames.at(0x10_1000).is_none());
        assert_eq!(frames.at(0x10_2008).unwrap().1.offset, 0x2000);
        // Pinned anew elsewhere by another pin: the first does not take that along.
        let again = PinNumber(2);
        frames
            .add(again, 0, 0x1000, Span::new(0x20_0000, 0x1000))
            .unwrap();
        frames.remove(FIRST, 0, Span::new(0, 0x5000));
        assert_eq!(frames.joined(), [(0x20_0000, 0x1000, 0, 0x1000)]);
    }
}
