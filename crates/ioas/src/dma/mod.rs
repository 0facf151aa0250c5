//! The DMA API: see [`Dma`].

mod iova;

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use iopt::Prot;
use runs::{Iova, Offset, Span};

use crate::error::{MapError, UnmapError};
use crate::lock::Mutex;
use crate::memory::Memory;
use crate::space::Ioas;
use iova::Iovas;

/// A buffer that a device reaches, until it is [unmapped](Dma::unmap).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the buffer stays mapped until it is given to `Dma::unmap`"]
pub struct DmaBuffer {
    /// What was asked for.
    range: Span<Iova>,
    /// The [`Dma`] by which it is mapped.
    owner: u64,
}

impl DmaBuffer {
    /// Its device addresses.
    pub const fn range(&self) -> Span<Iova> {
        self.range
    }
}

/// Why a buffer was not mapped. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmaError {
    /// No range of device addresses is that long.
    #[error(
        "no {wanted:#x} bytes of device addresses are free; the longest range has {longest:#x}"
    )]
    NoRoom {
        /// Bytes, in whole granules.
        wanted: u64,
        /// The longest range that could be allocated, bytes.
        longest: u64,
    },
    /// The list is empty, or longer than 2^64 bytes.
    #[error("a list of {parts} parts is no buffer")]
    List {
        /// How many parts it has.
        parts: usize,
    },
    /// A part of a list begins or ends inside a granule, where another part is to follow.
    #[error("part {index} of the list, {part}, is not joined at a multiple of {granule:#x} bytes")]
    Gap {
        /// Its place in the list, from 0 on.
        index: usize,
        /// The part: offset and length in bytes.
        part: Span<Offset>,
        /// The smallest page, bytes.
        granule: u64,
    },
    /// The address space has refused it.
    #[error(transparent)]
    Map(MapError),
}

/// What became of a buffer that was not unmapped as it should be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmaUnmapError {
    /// It is mapped as before.
    #[error("{cause}")]
    Mapped {
        /// The buffer.
        buffer: DmaBuffer,
        /// Why.
        cause: UnmapError,
    },
    /// It is unmapped, but devices may still reach it, or it is still pinned. Its address is used again when a
    /// later flush has succeeded.
    #[error("{0}")]
    Unmapped(UnmapError),
    /// It was mapped by another [`Dma`], and is mapped as before.
    #[error("{} was mapped by another DMA allocator", buffer.range)]
    Foreign {
        /// The buffer.
        buffer: DmaBuffer,
    },
}

/// Device addresses for the buffers of a driver's requests.
///
/// A driver, in user space or in a kernel, gives each request a buffer, which a device reads or writes at a device
/// address for as long as the request takes. [`map`](Self::map) allocates such an address and maps there,
/// [`unmap`](Self::unmap) unmaps and frees it, for requests of any size from any number of threads. A scatter-gather list is
/// mapped at one range ([`map_list`](Self::map_list)), so that the device sees one buffer.
///
/// # When an address is used again
///
/// Not before units have been told that it was unmapped: a device that still has the old translation would
/// reach the new buffer's neighbours by it. With [`Flushing::Strict`](crate::Flushing::Strict) that is when `unmap`
/// returns. With [`Flushing::Lazy`](crate::Flushing::Lazy) the address waits in a queue here, in the order of
/// unmapping, and the flush that the address space makes at one of its bounds frees all that were unmapped before. An
/// address whose flush has failed waits in the same way. When no other address is left, `map` has the address space flush.
pub struct Dma {
    space: Arc<Ioas>,
    iovas: Iovas,
    granule: u64,
    id: u64,
    /// Whole ranges that are unmapped, each with the number of the flush that it waits for.
    waiting: Mutex<VecDeque<(u64, Span<Iova>)>>,
}

impl fmt::Debug for Dma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dma")
            .field("space", &self.space)
            .field("waiting", &self.waiting.lock().len())
            .finish_non_exhaustive()
    }
}

impl Dma {
    /// Buffers in `windows` of `space`: ranges in order, disjoint, and used for nothing else
    /// ([`Ioas::windows`] says what devices can translate). About as many `threads` as are given keep addresses of
    /// their own; more share those.
    ///
    /// Devices should be attached before: a buffer is made of whole pages of the size that they all translate.
    pub fn new(space: Arc<Ioas>, windows: &[Span<Iova>], threads: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // 1 when nothing is known yet.
        let granule = space.granule().max(4096);
        Self {
            iovas: Iovas::new(windows, granule, threads),
            granule,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            space,
            waiting: Mutex::default(),
        }
    }

    /// The address space.
    pub fn space(&self) -> &Arc<Ioas> {
        &self.space
    }

    /// Maps `part` (offset and length in bytes, of any alignment) of `memory` at an address that is free. Devices also
    /// reach the rest of the pages in which it begins and ends.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn map(
        &self,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        prot: Prot,
    ) -> Result<DmaBuffer, DmaError> {
        self.map_list(&[(memory, part)], prot)
    }

    /// Maps the parts of a list one behind the other, at one range of addresses. Only the first may begin, and only the
    /// last may end, inside a page.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn map_list(
        &self,
        list: &[(&Arc<Memory>, Span<Offset>)],
        prot: Prot,
    ) -> Result<DmaBuffer, DmaError> {
        let len = self.check(list)?;
        let lead = list
            .first()
            .map_or(0, |(_, part)| part.start % self.granule);
        let ends = lead.checked_add(len);
        let whole = ends.and_then(|end| end.checked_next_multiple_of(self.granule));
        let wanted = whole.ok_or(DmaError::List { parts: list.len() })?;
        let found = self.iovas.allocate(wanted).or_else(|_| {
            // What waits for a flush is free after it. If it fails, there is no room.
            let _ = self.space.flush();
            self.free_flushed();
            self.iovas.allocate(wanted)
        });
        let range = found.map_err(|longest| DmaError::NoRoom { wanted, longest })?;
        let mut at = range.start;
        for (memory, part) in list {
            let whole = self.whole(*part);
            if let Err(cause) = self.space.map(at, memory, whole, prot, &mut ()) {
                // What is in the way is not ours. After other errors an area may stay that a device still reaches.
                let failed = match cause {
                    MapError::Overlap { .. } => 0,
                    _ => whole.len,
                };
                self.take_back(range.start, at - range.start + failed, wanted);
                return Err(DmaError::Map(cause));
            }
            at += whole.len;
        }
        Ok(DmaBuffer {
            range: Span::new(range.start + lead, len),
            owner: self.id,
        })
    }

    /// The length of a list in bytes.
    fn check(&self, list: &[(&Arc<Memory>, Span<Offset>)]) -> Result<u64, DmaError> {
        let parts = list.len();
        let mut len = 0u64;
        for (index, (_, part)) in list.iter().enumerate() {
            let granule = self.granule;
            let end = part.start.checked_add(part.len);
            let within = (index > 0 && part.start % granule != 0)
                || (index + 1 < parts && end.is_some_and(|end| end % granule != 0));
            if within {
                let part = *part;
                return Err(DmaError::Gap {
                    index,
                    part,
                    granule,
                });
            }
            let sum = len.checked_add(part.len);
            // The page in which it ends has an end, too.
            let rounded = end.and_then(|end| end.checked_next_multiple_of(granule));
            len = sum
                .filter(|_| rounded.is_some() && part.len > 0)
                .ok_or(DmaError::List { parts })?;
        }
        if parts == 0 {
            return Err(DmaError::List { parts });
        }
        Ok(len)
    }

    /// Unmaps the buffer, whatever pages it is in. With strict flushing no device reaches it when this returns.
    ///
    /// # Errors
    ///
    /// See [`DmaUnmapError`], which has the buffer if it is still mapped.
    pub fn unmap(&self, buffer: DmaBuffer) -> Result<(), DmaUnmapError> {
        if buffer.owner != self.id {
            return Err(DmaUnmapError::Foreign { buffer });
        }
        let range = self.whole(buffer.range);
        let (unmapped, waits) = self.space.unmap_numbered(range);
        let result = match unmapped {
            Ok(_) => Ok(()),
            Err(cause @ (UnmapError::Flush(_) | UnmapError::Unpin(_))) => {
                Err(DmaUnmapError::Unmapped(cause))
            }
            Err(cause) => return Err(DmaUnmapError::Mapped { buffer, cause }),
        };
        self.unmapped(range, waits);
        result
    }

    /// The pages in which `part` lies.
    fn whole<A>(&self, part: Span<A>) -> Span<A> {
        let start = part.start - part.start % self.granule;
        let end = (part.start + part.len).next_multiple_of(self.granule);
        Span::new(start, end - start)
    }

    /// Frees an address that is unmapped, now or, if no flush came with it, after the next one.
    fn unmapped(&self, range: Span<Iova>, waits: Option<u64>) {
        match waits {
            Some(number) => self.waiting.lock().push_back((number, range)),
            None => {
                self.iovas.free(range.start, range.len);
                self.free_flushed();
            }
        }
    }

    /// Unmaps the first `mapped` bytes of an address that is given up, and frees it.
    fn take_back(&self, start: u64, mapped: u64, len: u64) {
        if mapped == 0 {
            return self.iovas.free(start, len);
        }
        let (unmapped, waits) = self.space.unmap_numbered(Span::new(start, mapped));
        if let Ok(_) | Err(UnmapError::Flush(_) | UnmapError::Unpin(_)) = unmapped {
            self.unmapped(Span::new(start, len), waits);
        }
        // What cannot be unmapped keeps its address.
    }

    /// Frees the addresses that were flushed.
    fn free_flushed(&self) {
        let flushed = self.space.retired.flushed();
        let waiting = &mut *self.waiting.lock();
        while waiting
            .front()
            .is_some_and(|(number, _)| *number <= flushed)
            && let Some((_, range)) = waiting.pop_front()
        {
            self.iovas.free(range.start, range.len);
        }
    }
}
