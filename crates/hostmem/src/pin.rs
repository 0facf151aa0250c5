//! Pinned memory.
//!
//! A [`Pin`] holds its pages until they are released, in parts or as a whole, and is the only one
//! that yields their [runs](Pin::runs): a long-term pin may move pages first, so frames that were
//! read before it are stale.
//!
//! Giving back a part that is not made of whole pieces takes two steps: the rest of the pieces at
//! its ends is registered again, in another table, and only then are the old buffers dropped. The
//! pages of the rest are pinned at every moment, and the charge rises in between. Either all of the
//! part is given back or, on an error before the first buffer is dropped, nothing has changed.

use std::io;
use std::sync::{Arc, PoisonError};

use runs::{Joiner, Offset, Span};
use thiserror::Error;

use crate::buffers::{Buffer, drop_buffers, release_buffers};
use crate::charge::charge;
use crate::frames::{Frames, FramesError};
use crate::mapping::Mapping;
use crate::pinner::PinKind;
use crate::rings::Tables;
use crate::source::FrameSource;

/// Memory that is pinned until it is released or this is dropped.
#[derive(Debug)]
#[must_use = "the memory is unpinned as soon as this is dropped"]
pub struct Pin {
    mapping: Arc<Mapping>,
    held: PinState,
    pub(crate) steps: Steps,
}

/// Work of pinning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// System calls that pinned.
    pub calls: u64,
    /// Buffers that were registered; 0 with `mlock`.
    pub buffers: u64,
}

#[derive(Debug)]
enum PinState {
    /// In order of their offsets.
    Buffers {
        tables: Arc<Tables>,
        buffers: Vec<Buffer>,
    },
    /// Parts locked with `mlock`, in order.
    Locked(Vec<Span<Offset>>),
}

/// Failure to give back a part.
#[derive(Debug, Error)]
pub enum UnpinError {
    /// A part that is empty or not a multiple of 4 KiB, or that is not pinned. Nothing has
    /// changed.
    #[error("{part} is not pinned as a whole; offset {offset:#x} is not")]
    NotPinned {
        /// The part: offset and length in bytes.
        part: Span<Offset>,
        /// The first offset that is not pinned, or not a multiple of 4 KiB.
        offset: u64,
    },
    /// The rest of a piece cannot be registered anew, for instance because of the limit on locked memory, which it
    /// needs for a moment. Nothing has changed.
    #[error("{stays} stays pinned and must be registered anew before the rest can be given back")]
    Keep {
        /// The rest: offset and length in bytes.
        stays: Span<Offset>,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel does not drop a buffer. Those before it are given back, the others are not.
    #[error("the kernel does not unpin {part}")]
    Refused {
        /// The part: offset and length in bytes.
        part: Span<Offset>,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl Pin {
    pub(crate) fn buffers(mapping: Arc<Mapping>, tables: Arc<Tables>) -> Self {
        let buffers = Vec::new();
        Self {
            mapping,
            held: PinState::Buffers { tables, buffers },
            steps: Steps::default(),
        }
    }

    pub(crate) fn locked(mapping: Arc<Mapping>, part: Span<Offset>) -> Self {
        Self {
            mapping,
            held: PinState::Locked(vec![part]),
            steps: Steps::default(),
        }
    }

    /// Takes a buffer that lies behind all others.
    pub(crate) fn hold(&mut self, buffer: Buffer) {
        if let PinState::Buffers { buffers, .. } = &mut self.held {
            buffers.push(buffer);
            self.steps.buffers += 1;
        }
    }

    /// The memory object of which it holds a part.
    pub const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Method by which it is pinned.
    pub const fn kind(&self) -> PinKind {
        match self.held {
            PinState::Buffers { .. } => PinKind::IoUring,
            PinState::Locked(_) => PinKind::Mlock,
        }
    }

    /// The parts that are pinned, in order and joined: offsets and lengths in bytes.
    pub fn parts(&self) -> Vec<Span<Offset>> {
        let mut joiner = Joiner::new();
        let mut parts = Vec::new();
        match &self.held {
            PinState::Buffers { buffers, .. } => {
                parts.extend(buffers.iter().filter_map(|buffer| joiner.push(buffer.span)));
            }
            PinState::Locked(spans) => {
                parts.extend(spans.iter().filter_map(|span| joiner.push(*span)))
            }
        }
        parts.extend(joiner.finish());
        parts
    }

    /// Bytes that are pinned.
    pub fn bytes(&self) -> u64 {
        self.parts().iter().map(|part| part.len).sum()
    }

    /// Bytes that the kernel charges for this pin: huge pages count whole, also those of which
    /// only a part is pinned; and `mlock` counts no pages of a pool at all.
    ///
    /// Two pins that hold parts of one huge page may together be charged less than the sum.
    pub fn charged_bytes(&self) -> u64 {
        match self.held {
            PinState::Buffers { .. } => charge(&self.mapping, &self.parts()),
            PinState::Locked(_) if self.mapping.backing().huge_size().is_some() => 0,
            PinState::Locked(_) => self.bytes(),
        }
    }

    /// Work of pinning, also that of registering anew what stayed.
    pub const fn steps(&self) -> Steps {
        self.steps
    }

    /// Reads the physical runs of `part` (offset and length in the mapping, in bytes).
    ///
    /// # Errors
    ///
    /// When `part` is not pinned as a whole, or the source is not to be had for this memory.
    pub fn runs(&self, part: Span<Offset>, source: FrameSource) -> Result<Frames<'_>, FramesError> {
        self.check(part)
            .map_err(|offset| FramesError::NotPinned { offset })?;
        Frames::new(&self.mapping, part, source)
    }

    /// The first offset of `part` that is not pinned, or at which no page begins.
    fn check(&self, part: Span<Offset>) -> Result<(), u64> {
        if self.mapping.pages_of(part).is_none() {
            return Err(part.start);
        }
        let parts = self.parts();
        let held = parts.iter().find(|held| held.contains(part.start));
        match held {
            None => Err(part.start),
            Some(held) if held.covers(&part) => Ok(()),
            Some(held) => Err(held.last() + 1),
        }
    }

    /// Gives back `part` (offset and length in the mapping, multiples of 4 KiB). What is pinned
    /// besides stays so without a break.
    ///
    /// # Errors
    ///
    /// When `part` is not pinned as a whole, or what stays of a piece cannot be registered anew:
    /// nothing has changed then.
    pub fn release(&mut self, part: Span<Offset>) -> Result<(), UnpinError> {
        self.check(part)
            .map_err(|offset| UnpinError::NotPinned { part, offset })?;
        match &mut self.held {
            PinState::Buffers { tables, buffers } => {
                release_buffers(&self.mapping, tables, buffers, part, &mut self.steps)
            }
            PinState::Locked(spans) => {
                unlock(&self.mapping, part)?;
                subtract(spans, part);
                Ok(())
            }
        }
    }

    /// Gives back everything; returns the bytes that were pinned.
    ///
    /// # Errors
    ///
    /// When the kernel does not drop a buffer; all others are dropped all the same.
    pub fn unpin(mut self) -> Result<u64, UnpinError> {
        let bytes = self.bytes();
        self.give_back().map(|()| bytes)
    }

    fn give_back(&mut self) -> Result<(), UnpinError> {
        match &mut self.held {
            PinState::Buffers { tables, buffers } => {
                let mut all = std::mem::take(buffers);
                let mut first_error = Ok(());
                while let Err((done, error)) = drop_buffers(tables, &all) {
                    first_error = first_error.and(Err(error));
                    // Goes on behind the buffer that was not dropped: closing its table will do it.
                    all.drain(..(done + 1).min(all.len()));
                }
                first_error
            }
            PinState::Locked(spans) => {
                let mut result = Ok(());
                for span in std::mem::take(spans) {
                    result = result.and(unlock(&self.mapping, span));
                }
                result
            }
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            tracing::error!(%error, "memory stays pinned");
        }
    }
}

fn unlock(mapping: &Mapping, part: Span<Offset>) -> Result<(), UnpinError> {
    mapping
        .region()
        .unlock(part)
        .map_err(|source| UnpinError::Refused { part, source })?;
    let mut locked = mapping
        .locked
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    subtract(&mut locked, part);
    Ok(())
}

/// Takes `part` out of the spans.
fn subtract(spans: &mut Vec<Span<Offset>>, part: Span<Offset>) {
    let mut left = Vec::with_capacity(spans.len() + 1);
    for span in spans.iter() {
        match span.intersection(&part) {
            None => left.push(*span),
            Some(common) => {
                let head = Span::new(span.start, common.start - span.start);
                let tail = Span::new(common.last().wrapping_add(1), span.last() - common.last());
                left.extend([head, tail].into_iter().filter(|span| !span.is_empty()));
            }
        }
    }
    *spans = left;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtracting_leaves_exactly_the_other_bytes() {
        for start in 0..12 {
            for len in 1..12 {
                let mut spans = vec![Span::new(1, 3), Span::new(4, 2), Span::new(8, 4)];
                let before = spans.clone();
                let part = Span::new(start, len);
                subtract(&mut spans, part);
                for byte in 0..30 {
                    let was = before.iter().any(|span| span.contains(byte));
                    let count = spans.iter().filter(|span| span.contains(byte)).count();
                    assert_eq!(
                        count,
                        usize::from(was && !part.contains(byte)),
                        "{part} {byte}"
                    );
                }
            }
        }
    }
}
