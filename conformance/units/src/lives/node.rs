//! Memory of a machine's node that this process shares: pinned here, and with the addresses that it has there.

use std::{ops::ControlFlow, sync::Arc};

use hostmem::{FrameSource, Mapping, Pinner};
use ioas::{Cause, HostMemory, MemoryObject, PinFailed, Pinned, RunReader};
use runs::{Offset, Pa, Span};

/// The node's memory file; its offsets become addresses from `base` on.
#[derive(Debug)]
pub(super) struct Node {
    inner: HostMemory,
    base: u64,
}

impl Node {
    pub(super) fn new(mapping: Arc<Mapping>, pinner: Pinner, base: u64) -> Self {
        let pinner = Arc::new(pinner);
        let inner = HostMemory::with_pinner(mapping, pinner, FrameSource::FileOffset);
        Self { inner, base }
    }
}

impl MemoryObject for Node {
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
        let (inner, base) = (self.inner.pin(part, progress)?, self.base);
        Ok(Box::new(Pin { inner, base }))
    }
}

#[derive(Debug)]
struct Pin {
    inner: Box<dyn Pinned>,
    base: u64,
}

impl Pinned for Pin {
    /// Offsets of the file are offsets of the node, whatever frames of this machine hold them.
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        Ok(Box::new(Once(Span::new(self.base + part.start, part.len))))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        self.inner.release(part)
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        self.inner.unpin()
    }
}

/// One run, read once.
struct Once(Span<Pa>);

impl RunReader for Once {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        let left = std::mem::replace(&mut self.0, Span::new(0, 0));
        match out.first_mut().filter(|_| !left.is_empty()) {
            Some(slot) => {
                *slot = left;
                Ok(1)
            }
            None => Ok(0),
        }
    }
}
