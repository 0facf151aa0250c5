//! Physical memory as the devices of a life reach it: a frame is there as long as somebody has it
//! pinned, and not a moment longer.
//!
//! Which frame holds which bytes is learnt from the pins, not from any page table: a wrong leaf leads to
//! wrong data, and a leaf that outlives its pin leads nowhere.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use hostmem::Mapping;
use ioas::{Cause, HostMemory, MemoryObject, PinFailed, Pinned, ProcessMemory, RunReader};
use iommu::{BadTarget, TargetMemory};
use runs::Span;

/// Runs that are read at once.
const BATCH: usize = 4096;

/// A pin of a process, by a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PinNumber(pub(super) u64);

/// Who is told what is pinned, and where.
pub(super) trait Witness: fmt::Debug + Send + Sync {
    /// `pin` holds `run`, which is memory number `memory` from `offset` on.
    fn pinned(&self, pin: PinNumber, memory: usize, offset: u64, run: Span) -> Result<(), Cause>;

    /// `pin` is about to let go of `part` of a memory.
    fn letting_go(&self, pin: PinNumber, memory: usize, part: Span) -> Result<(), Cause>;
}

/// A frame that two pages have.
#[derive(Debug)]
struct FrameTwice {
    run: Span,
}

impl fmt::Display for FrameTwice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "another page that is pinned has a frame of {}", self.run)
    }
}

impl Error for FrameTwice {}

/// A run of frames, and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    len: u64,
    memory: usize,
    offset: u64,
    pin: PinNumber,
}

/// What a process has pinned, by physical address.
#[derive(Debug, Default)]
pub(super) struct Frames(BTreeMap<u64, Piece>);

impl Frames {
    pub(super) fn add(
        &mut self,
        pin: PinNumber,
        memory: usize,
        offset: u64,
        run: Span,
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

    pub(super) fn remove(&mut self, pin: PinNumber, memory: usize, part: Span) {
        let hit = |piece: &Piece| {
            let here = Span::new(piece.offset, piece.len);
            (piece.pin == pin && piece.memory == memory && here.overlaps(&part)).then_some(here)
        };
        let gone: Vec<(u64, Piece, Span)> = self
            .0
            .iter()
            .filter_map(|(start, piece)| Some((*start, *piece, hit(piece)?)))
            .collect();
        for (start, piece, here) in gone {
            self.0.remove(&start);
            let Some(cut) = here.intersection(&part) else {
                continue;
            };
            let head = cut.start - here.start;
            let tail = here.len - head - cut.len;
            if head > 0 {
                self.0.insert(start, Piece { len: head, ..piece });
            }
            if tail > 0 {
                let offset = cut.start + cut.len;
                let tail = Piece {
                    len: tail,
                    offset,
                    ..piece
                };
                self.0.insert(start + head + cut.len, tail);
            }
        }
    }

    /// The piece in which `address` lies, and where it begins.
    fn at(&self, address: u64) -> Option<(u64, &Piece)> {
        let (start, piece) = self.0.range(..=address).next_back()?;
        (address - start < piece.len).then_some((*start, piece))
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

/// The memory of one life: what this process has pinned of it, and what its successor has.
#[derive(Debug)]
pub(super) struct Physical {
    memories: Vec<Arc<Mapping>>,
    ours: RwLock<Frames>,
    theirs: RwLock<Frames>,
}

impl Physical {
    pub(super) fn new(memories: Vec<Arc<Mapping>>) -> Self {
        Self {
            memories,
            ours: RwLock::default(),
            theirs: RwLock::default(),
        }
    }

    /// What the successor has pinned.
    pub(super) const fn theirs(&self) -> &RwLock<Frames> {
        &self.theirs
    }

    /// How many runs this process has pinned.
    pub(super) fn runs(&self) -> u64 {
        read(&self.ours).joined().len() as u64
    }

    /// How many runs the successor has pinned.
    pub(super) fn runs_of_successor(&self) -> u64 {
        read(&self.theirs).joined().len() as u64
    }

    /// Whether the successor has pinned the same frames as this process.
    pub(super) fn same(&self) -> bool {
        read(&self.ours).joined() == read(&self.theirs).joined()
    }

    /// Lends what is there from `address` on, as far as it lies together and `most` bytes.
    fn lend(
        &self,
        frames: &RwLock<Frames>,
        address: u64,
        most: u64,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Option<u64> {
        let (start, piece) = read(frames).at(address).map(|(at, piece)| (at, *piece))?;
        let inside = address - start;
        let len = (piece.len - inside).min(most);
        let first = ((piece.offset + inside) / 8) as usize;
        let cells = self.memories.get(piece.memory)?.cells();
        visit(cells.get(first..first + (len / 8) as usize)?);
        Some(len)
    }
}

fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl TargetMemory for Physical {
    fn with_cells(&self, span: Span, visit: &mut dyn FnMut(&[AtomicU64])) -> Result<(), BadTarget> {
        let mut done = 0;
        while done < span.len {
            let (address, most) = (span.start + done, span.len - done);
            let lent = self.lend(&self.ours, address, most, visit);
            let lent = lent.or_else(|| self.lend(&self.theirs, address, most, visit));
            done += lent.ok_or(BadTarget { address })?;
        }
        Ok(())
    }
}

impl Witness for Physical {
    fn pinned(&self, pin: PinNumber, memory: usize, offset: u64, run: Span) -> Result<(), Cause> {
        write(&self.ours).add(pin, memory, offset, run)
    }

    fn letting_go(&self, pin: PinNumber, memory: usize, part: Span) -> Result<(), Cause> {
        write(&self.ours).remove(pin, memory, part);
        Ok(())
    }
}

/// Memory of the host whose pins a [`Witness`] is told of.
#[derive(Debug)]
pub(super) struct Witnessed {
    memory: HostMemory,
    number: usize,
    /// Where offsets in the memory stand in for frames, and from which address on.
    stand_in: Option<u64>,
    witness: Arc<dyn Witness>,
    pins: AtomicU64,
}

impl Witnessed {
    pub(super) fn new(
        memory: HostMemory,
        number: usize,
        stand_in: Option<u64>,
        witness: Arc<dyn Witness>,
    ) -> Self {
        Self {
            memory,
            number,
            stand_in,
            witness,
            pins: AtomicU64::new(0),
        }
    }
}

impl MemoryObject for Witnessed {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn charge(&self, part: Span) -> u64 {
        self.memory.charge(part)
    }

    fn pin(
        &self,
        part: Span,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        let pin = WitnessedPin {
            inner: Some(self.memory.pin(part, progress)?),
            part,
            number: PinNumber(self.pins.fetch_add(1, Ordering::Relaxed)),
            memory: self.number,
            stand_in: self.stand_in,
            witness: Arc::clone(&self.witness),
        };
        // Dropping it takes back what the witness was told.
        pin.tell().map_err(PinFailed::Refused)?;
        Ok(Box::new(pin))
    }

    fn in_process(&self) -> Option<ProcessMemory> {
        self.memory.in_process()
    }

    fn file(&self) -> Option<(std::os::fd::BorrowedFd<'_>, u64)> {
        self.memory.file()
    }
}

#[derive(Debug)]
struct WitnessedPin {
    inner: Option<Box<dyn Pinned>>,
    part: Span,
    number: PinNumber,
    memory: usize,
    stand_in: Option<u64>,
    witness: Arc<dyn Witness>,
}

impl WitnessedPin {
    fn tell(&self) -> Result<(), Cause> {
        let mut offset = self.part.start;
        let mut reader = self.runs(self.part)?;
        let mut batch = [Span::default(); BATCH];
        loop {
            let count = reader.next_batch(&mut batch)?;
            for run in batch.iter().take(count) {
                let (pin, memory) = (self.number, self.memory);
                self.witness.pinned(pin, memory, offset, *run)?;
                offset += run.len;
            }
            if count == 0 {
                return Ok(());
            }
        }
    }

    fn inner(&self) -> Result<&dyn Pinned, Cause> {
        self.inner.as_deref().ok_or_else(|| Gone.into())
    }
}

/// The pin was given back before.
#[derive(Debug)]
struct Gone;

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the pin was given back before")
    }
}

impl Error for Gone {}

impl Pinned for WitnessedPin {
    fn runs(&self, part: Span) -> Result<Box<dyn RunReader + '_>, Cause> {
        match self.stand_in {
            Some(base) => Ok(Box::new(One(Some(Span::new(base + part.start, part.len))))),
            None => self.inner()?.runs(part),
        }
    }

    fn release(&mut self, part: Span) -> Result<u64, Cause> {
        self.witness.letting_go(self.number, self.memory, part)?;
        let inner = self.inner.as_mut().ok_or(Gone)?;
        inner.release(part)
    }

    fn unpin(mut self: Box<Self>) -> Result<u64, Cause> {
        self.witness
            .letting_go(self.number, self.memory, self.part)?;
        self.inner.take().ok_or(Gone)?.unpin()
    }
}

impl Drop for WitnessedPin {
    fn drop(&mut self) {
        if self.inner.is_some() {
            // Whoever cannot be told any more is gone.
            let _ = self.witness.letting_go(self.number, self.memory, self.part);
        }
    }
}

/// A single run.
struct One(Option<Span>);

impl RunReader for One {
    fn next_batch(&mut self, out: &mut [Span]) -> Result<usize, Cause> {
        match (out.first_mut(), self.0.is_some()) {
            (Some(slot), true) => {
                *slot = self.0.take().unwrap_or_default();
                Ok(1)
            }
            _ => Ok(0),
        }
    }
}

#[cfg(test)]
mod tests {
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
