//! Memory that is not there: any layout of runs, for tests, simulations and examples.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::ControlFlow;
use core::sync::atomic::{AtomicU64, Ordering};

use runs::{Offset, Pa, Span};

use crate::memory::fixed::Reader;
use crate::memory::object::{Cause, MemoryObject, PinFailed, Pinned, RunReader};

/// A memory object of given physical runs, which counts what is pinned.
///
/// ```
/// use std::ops::ControlFlow;
/// use ioas::{MemoryObject, Synthetic};
/// use runs::Span;
///
/// let memory = Synthetic::new([Span::new(0x10_0000, 0x4000), Span::new(0x80_0000, 0x2000)]);
/// let pin = memory.pin(Span::new(0x3000, 0x2000), &mut |_| ControlFlow::Continue(()))?;
/// assert_eq!(memory.pinned(), 0x2000);
/// let mut runs = [Span::default(); 8];
/// let part = Span::new(0x3000, 0x2000);
/// assert_eq!(pin.runs(part).unwrap().next_batch(&mut runs).unwrap(), 2);
/// assert_eq!(runs[..2], [Span::new(0x10_3000, 0x1000), Span::new(0x80_0000, 0x1000)]);
/// # Ok::<_, ioas::PinFailed>(())
/// ```
#[derive(Debug)]
pub struct Synthetic {
    /// With their offsets.
    runs: Arc<[(u64, Span<Pa>)]>,
    len: u64,
    /// Bytes of a page as the kernel would charge it.
    page: u64,
    refused: Option<u64>,
    pinned: Arc<AtomicU64>,
}

impl Synthetic {
    /// Memory that consists of `runs`, in the order of its offsets, charged in pages of 4 KiB.
    pub fn new(runs: impl IntoIterator<Item = Span<Pa>>) -> Self {
        let mut len = 0;
        let place = |run: Span<Pa>| {
            let offset = len;
            len += run.len;
            (offset, run)
        };
        let runs = runs.into_iter().filter(|run| !run.is_empty());
        let runs: Vec<_> = runs.map(place).collect();
        Self {
            runs: runs.into(),
            len,
            page: 4096,
            refused: None,
            pinned: Arc::default(),
        }
    }

    /// The same, charged in whole pages of `page` bytes, a power of two.
    pub fn charged_by(mut self, page: u64) -> Self {
        self.page = page.next_power_of_two();
        self
    }

    /// The same, but the page at `offset` cannot be pinned.
    pub fn refusing(mut self, offset: u64) -> Self {
        self.refused = Some(offset);
        self
    }

    /// Bytes that are pinned now; a byte that is pinned twice counts twice.
    pub fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }
}

/// The page that [`Synthetic::refusing`] names.
#[derive(Debug, thiserror::Error)]
#[error("the page at offset {0:#x} cannot be pinned")]
struct Refused(u64);

impl MemoryObject for Synthetic {
    fn len(&self) -> u64 {
        self.len
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        let first = part.start & !(self.page - 1);
        (part.last() | (self.page - 1)) - first + 1
    }

    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        let refused = self.refused.filter(|offset| part.contains(*offset));
        if let Some(offset) = refused {
            return Err(PinFailed::Refused(Box::new(Refused(offset))));
        }
        if progress(part.len).is_break() {
            return Err(PinFailed::Interrupted);
        }
        self.pinned.fetch_add(part.len, Ordering::Relaxed);
        Ok(Box::new(SyntheticPin {
            runs: Arc::clone(&self.runs),
            parts: vec![part],
            page: self.page,
            pinned: Arc::clone(&self.pinned),
        }))
    }
}

#[derive(Debug)]
struct SyntheticPin {
    runs: Arc<[(u64, Span<Pa>)]>,
    /// Pinned parts, in order.
    parts: Vec<Span<Offset>>,
    page: u64,
    pinned: Arc<AtomicU64>,
}

/// It is not pinned.
#[derive(Debug, thiserror::Error)]
#[error("{0} is not pinned as a whole")]
struct NotPinned(Span<Offset>);

impl SyntheticPin {
    fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len).sum()
    }

    fn holds(&self, part: Span<Offset>) -> Result<usize, Cause> {
        let place = self.parts.iter().position(|held| held.covers(&part));
        place.ok_or_else(|| NotPinned(part).into())
    }
}

impl Pinned for SyntheticPin {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        self.holds(part)?;
        Ok(Box::new(Reader::new(&self.runs, part)))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        let place = self.holds(part)?;
        let held = self.parts[place];
        let head = Span::new(held.start, part.start - held.start);
        let tail = Span::new(part.start + part.len, held.len - head.len - part.len);
        let stays = [head, tail].into_iter().filter(|span| !span.is_empty());
        self.parts.splice(place..=place, stays);
        self.pinned.fetch_sub(part.len, Ordering::Relaxed);
        // Pages of which a part is held count whole, once.
        let mut charged_to = 0;
        let mut charged = 0;
        for part in &self.parts {
            let first = (part.start & !(self.page - 1)).max(charged_to);
            let end = (part.last() | (self.page - 1)) + 1;
            charged += end.saturating_sub(first);
            charged_to = charged_to.max(end);
        }
        Ok(charged)
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        Ok(self.bytes())
    }
}

impl Drop for SyntheticPin {
    fn drop(&mut self) {
        self.pinned.fetch_sub(self.bytes(), Ordering::Relaxed);
    }
}
