//! Memory of which every page knows whether it is pinned: a device that reaches a page that is not
//! gets an error, and a word is its own physical address.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ioas::{Cause, MemoryObject, PinFailed, Pinned, RunReader, Synthetic};
use iommu::{BadTarget, TargetMemory};
use runs::{Iova, Offset, Pa, Span};

use super::PAGE;

/// An object, and what a unit reads of it.
#[derive(Debug)]
pub(crate) struct Tracked {
    pub(crate) memory: Synthetic,
    pub(crate) pages: Arc<Pages>,
}

impl Tracked {
    /// Memory of these runs, which are whole pages.
    pub(crate) fn new(runs: &[Span<Pa>]) -> Self {
        let mut offset = 0;
        let mut placed = Vec::new();
        for run in runs {
            placed.push((*run, offset));
            offset += run.len;
        }
        placed.sort_unstable();
        Self {
            memory: Synthetic::new(runs.iter().copied()),
            pages: Arc::new(Pages {
                runs: placed,
                pins: (0..offset / PAGE).map(|_| AtomicU32::new(0)).collect(),
            }),
        }
    }
}

/// Pinned pages, and the number of their pins.
#[derive(Debug)]
pub(crate) struct Pages {
    /// Runs by physical address, with the offset in the object.
    runs: Vec<(Span<Pa>, u64)>,
    pins: Vec<AtomicU32>,
}

impl Pages {
    fn add(&self, part: Span<Offset>, by: u32) {
        let pages = (part.start / PAGE) as usize..((part.start + part.len) / PAGE) as usize;
        for pins in &self.pins[pages] {
            pins.fetch_add(by, Ordering::Relaxed);
        }
    }

    fn is_pinned(&self, pa: u64) -> bool {
        let next = self.runs.partition_point(|(run, _)| run.start <= pa);
        let run = next.checked_sub(1).map(|at| self.runs[at]);
        run.is_some_and(|(run, offset)| {
            let page = (offset + (pa - run.start)) / PAGE;
            run.contains(pa) && self.pins[page as usize].load(Ordering::Relaxed) > 0
        })
    }
}

impl TargetMemory for Pages {
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        for address in (span.start..=span.last()).step_by(8) {
            if !self.is_pinned(address) {
                return Err(BadTarget { address });
            }
            visit(&[AtomicU64::new(address)]);
        }
        Ok(())
    }
}

impl MemoryObject for Tracked {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        self.memory.charge(part)
    }

    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        let pin = self.memory.pin(part, progress)?;
        self.pages.add(part, 1);
        Ok(Box::new(TrackedPin {
            pin,
            held: vec![part],
            pages: self.pages.clone(),
        }))
    }
}

#[derive(Debug)]
struct TrackedPin {
    pin: Box<dyn Pinned>,
    held: Vec<Span<Offset>>,
    pages: Arc<Pages>,
}

impl Pinned for TrackedPin {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        self.pin.runs(part)
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        let charged = self.pin.release(part)?;
        let place = self
            .held
            .iter()
            .position(|held| held.covers(&part))
            .unwrap();
        let held = self.held.swap_remove(place);
        let head = Span::new(held.start, part.start - held.start);
        let tail = Span::new(part.start + part.len, held.len - head.len - part.len);
        let stays = [head, tail].into_iter().filter(|span| !span.is_empty());
        self.held.extend(stays);
        self.pages.add(part, u32::MAX);
        Ok(charged)
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        Ok(self.held.iter().map(|held| held.len).sum())
    }
}

impl Drop for TrackedPin {
    fn drop(&mut self) {
        for held in &self.held {
            self.pages.add(*held, u32::MAX);
        }
    }
}
