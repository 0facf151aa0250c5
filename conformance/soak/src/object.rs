//! The memory: pages of the host, pinned by the kernel, at physical addresses that are made up.
//!
//! Each memory has a window of addresses of its own and a layout: one run, or chunks in another order,
//! so that leaves of all sizes occur on every machine. Whether a page is pinned is noted here beside the
//! kernel: a device that reaches a page which nobody holds is found out, whatever the page tables say.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use hostmem::Mapping;
use ioas::{Cause, HostMemory, MemoryObject, PinFailed, Pinned, ProcessMemory, RunReader};
use iommu::{BadTarget, TargetMemory};
use runs::Span;

use crate::PAGE;
use crate::faults::{Fault, Faults};

/// Address bits of a memory.
const WINDOW_LOG2: u32 = 36;

/// Where the bytes of a memory lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    number: usize,
    chunk: u64,
    chunks: u64,
}

impl Layout {
    /// Of memory `number` of `len` bytes, in chunks of `chunk` bytes, both powers of two.
    pub(crate) const fn new(number: usize, len: u64, chunk: u64) -> Self {
        Self {
            number,
            chunk,
            chunks: len / chunk,
        }
    }

    /// Where the byte at `offset` lies. Chunks lie in the opposite order, and every second pair of them
    /// is exchanged, so that some are neighbours still.
    pub(crate) const fn address(&self, offset: u64) -> u64 {
        let place = Self::turned(offset / self.chunk, self.chunks);
        ((self.number as u64 + 1) << WINDOW_LOG2) + place * self.chunk + offset % self.chunk
    }

    /// A permutation that is its own inverse.
    const fn turned(chunk: u64, chunks: u64) -> u64 {
        if chunks < 4 || chunk & 4 == 0 {
            chunk
        } else {
            chunk ^ 3
        }
    }

    const fn offset(&self, address: u64) -> u64 {
        let inside = address & ((1 << WINDOW_LOG2) - 1);
        Self::turned(inside / self.chunk, self.chunks) * self.chunk + inside % self.chunk
    }
}

/// Who is told that `part` of a memory is pinned (true) or no longer.
pub(crate) type Told = dyn Fn(usize, Span, bool) -> Result<(), Cause> + Send + Sync;

/// What devices reach at a physical address, as long as somebody has it pinned.
pub(crate) struct Physical {
    memories: Vec<(Layout, Arc<Mapping>)>,
    /// By memory and page: how many pins hold it.
    pins: Vec<Vec<AtomicU32>>,
    /// Accesses to what nobody has pinned.
    stray: AtomicU64,
}

impl Physical {
    pub(crate) fn new(memories: Vec<(Layout, Arc<Mapping>)>) -> Self {
        let pages = |(_, mapping): &(Layout, Arc<Mapping>)| {
            let pages = 0..mapping.len() / PAGE;
            pages.map(|_| AtomicU32::new(0)).collect()
        };
        Self {
            pins: memories.iter().map(pages).collect(),
            memories,
            stray: AtomicU64::new(0),
        }
    }

    /// Notes a pin, or that it has gone.
    pub(crate) fn note(&self, memory: usize, part: Span, pinned: bool) {
        let first = (part.start / PAGE) as usize;
        let pages = self.pins.get(memory).into_iter().flatten();
        for page in pages.skip(first).take((part.len / PAGE) as usize) {
            match pinned {
                true => page.fetch_add(1, Ordering::SeqCst),
                false => page.fetch_sub(1, Ordering::SeqCst),
            };
        }
    }

    /// By memory and page: whether it is pinned.
    pub(crate) fn pinned(&self) -> impl Iterator<Item = bool> + '_ {
        let pages = self.pins.iter().flatten();
        pages.map(|pins| pins.load(Ordering::SeqCst) > 0)
    }

    /// How often a device has reached what nobody has pinned.
    pub(crate) fn stray(&self) -> u64 {
        self.stray.load(Ordering::Relaxed)
    }
}

impl TargetMemory for Physical {
    fn with_cells(&self, span: Span, visit: &mut dyn FnMut(&[AtomicU64])) -> Result<(), BadTarget> {
        let mut done = 0;
        while done < span.len {
            let address = span.start + done;
            let bad = BadTarget { address };
            let number = (address >> WINDOW_LOG2).wrapping_sub(1) as usize;
            let (layout, mapping) = self.memories.get(number).ok_or(bad)?;
            let offset = layout.offset(address);
            let page = self.pins[number].get((offset / PAGE) as usize).ok_or(bad)?;
            if page.load(Ordering::SeqCst) == 0 {
                self.stray.fetch_add(1, Ordering::Relaxed);
                return Err(bad);
            }
            let len = (PAGE - offset % PAGE).min(span.len - done);
            let cells = (offset / 8) as usize..((offset + len) / 8) as usize;
            visit(mapping.cells().get(cells).ok_or(bad)?);
            done += len;
        }
        Ok(())
    }
}

/// A memory whose pins are told, and can be made to fail.
pub(crate) struct Object {
    inner: HostMemory,
    layout: Layout,
    faults: Arc<Faults>,
    told: Arc<Told>,
}

impl Object {
    pub(crate) fn new(
        inner: HostMemory,
        layout: Layout,
        faults: Arc<Faults>,
        told: Arc<Told>,
    ) -> Self {
        Self {
            inner,
            layout,
            faults,
            told,
        }
    }
}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Object").field(&self.layout).finish()
    }
}

impl MemoryObject for Object {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn charge(&self, part: Span) -> u64 {
        self.inner.charge(part)
    }

    fn pin(
        &self,
        part: Span,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        if self.faults.hit(Fault::Pin) {
            return Err(PinFailed::Refused("a pin that is to fail".into()));
        }
        let inner = self.inner.pin(part, progress)?;
        (self.told)(self.layout.number, part, true).map_err(PinFailed::Refused)?;
        Ok(Box::new(Pin {
            inner: Some(inner),
            left: vec![part],
            layout: self.layout,
            faults: Arc::clone(&self.faults),
            told: Arc::clone(&self.told),
        }))
    }

    fn in_process(&self) -> Option<ProcessMemory> {
        self.inner.in_process()
    }
}

struct Pin {
    inner: Option<Box<dyn Pinned>>,
    /// What was told to be pinned.
    left: Vec<Span>,
    layout: Layout,
    faults: Arc<Faults>,
    told: Arc<Told>,
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pin").field(&self.left).finish()
    }
}

impl Pin {
    fn letting_go(&mut self, part: Span) -> Result<(), Cause> {
        let mut left = Vec::new();
        for span in self.left.drain(..) {
            let Some(both) = span.intersection(&part) else {
                left.push(span);
                continue;
            };
            (self.told)(self.layout.number, both, false)?;
            let head = Span::new(span.start, both.start - span.start);
            let behind = both.start + both.len;
            let tail = Span::new(behind, span.start + span.len - behind);
            left.extend([head, tail].into_iter().filter(|span| span.len > 0));
        }
        self.left = left;
        Ok(())
    }

    fn all_goes(&mut self) -> Result<(), Cause> {
        self.letting_go(Span::new(0, 1 << WINDOW_LOG2))
    }
}

impl Pinned for Pin {
    fn runs(&self, part: Span) -> Result<Box<dyn RunReader + '_>, Cause> {
        Ok(Box::new(Runs {
            layout: self.layout,
            part,
            faults: &self.faults,
        }))
    }

    fn release(&mut self, part: Span) -> Result<u64, Cause> {
        self.letting_go(part)?;
        match &mut self.inner {
            Some(inner) => inner.release(part),
            None => Ok(0),
        }
    }

    fn unpin(mut self: Box<Self>) -> Result<u64, Cause> {
        self.all_goes()?;
        self.inner.take().map_or(Ok(0), Pinned::unpin)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // Whoever cannot be told any more is gone.
        let _ = self.all_goes();
    }
}

struct Runs<'a> {
    layout: Layout,
    part: Span,
    faults: &'a Faults,
}

impl RunReader for Runs<'_> {
    fn next_batch(&mut self, out: &mut [Span]) -> Result<usize, Cause> {
        if self.faults.hit(Fault::Runs) {
            return Err("runs that are not to be read".into());
        }
        let mut count = 0;
        for slot in out {
            if self.part.is_empty() {
                break;
            }
            let offset = self.part.start;
            let chunk = self.layout.chunk;
            let len = (chunk - offset % chunk).min(self.part.len);
            *slot = Span::new(self.layout.address(offset), len);
            self.part = Span::new(offset + len, self.part.len - len);
            count += 1;
        }
        Ok(count)
    }
}
