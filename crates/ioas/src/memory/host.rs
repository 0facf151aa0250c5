//! Memory of the Linux host: objects that are really pinned, and table memory.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::ControlFlow;
use core::sync::atomic::{AtomicU64, Ordering};

use hostmem::{
    Backing, FrameSource, Frames, KernelNodes, Mapping, NodePolicy, Pin, PinError, PinKind, Pinner,
    PinnerError,
};
use iopt::{Arena, AtomicMeta, Storage, TABLE_BYTES, WideCell};
use runs::{Offset, Pa, Span};

use crate::memory::object::{Cause, MemoryObject, PinFailed, Pinned, ProcessMemory, RunReader};

/// A mapping of this process.
///
/// Address spaces over tables of ours pin it: by the pinner [of the process](Pinner::of_process), or by
/// one that is [given](Self::with_pinner). A kernel that maps it pins it by itself, and none is made.
#[derive(Debug)]
pub struct HostMemory {
    mapping: Arc<Mapping>,
    pinner: Option<Arc<Pinner>>,
    /// `None`: what is found to be possible when it is pinned.
    frames: Option<FrameSource>,
    registers: Vec<Span<Offset>>,
    effort: Arc<Effort>,
}

/// Work of pinning and of finding runs, over all pins of a [`HostMemory`].
#[derive(Debug, Default)]
pub struct Effort {
    calls: AtomicU64,
    buffers: AtomicU64,
    entries_read: AtomicU64,
}

impl Effort {
    /// System calls that pinned.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Buffers that were registered with io_uring.
    pub fn buffers(&self) -> u64 {
        self.buffers.load(Ordering::Relaxed)
    }

    /// Entries of the kernel's page map that were read to find runs.
    pub fn entries_read(&self) -> u64 {
        self.entries_read.load(Ordering::Relaxed)
    }
}

impl HostMemory {
    /// `mapping`, pinned by the pinner of the process, with the physical addresses that this process
    /// [can know](FrameSource::detect).
    pub fn new(mapping: Arc<Mapping>) -> Self {
        Self {
            mapping,
            pinner: None,
            frames: None,
            registers: Vec::new(),
            effort: Arc::default(),
        }
    }

    /// `mapping`, pinned by `pinner`, with the addresses that `frames` gives.
    pub fn with_pinner(mapping: Arc<Mapping>, pinner: Arc<Pinner>, frames: FrameSource) -> Self {
        Self {
            pinner: Some(pinner),
            frames: Some(frames),
            ..Self::new(mapping)
        }
    }

    /// With `parts` that are a device's registers among the memory, whole pages, none of which overlap. A kernel that
    /// maps them by their address, as VFIO's type 1 does, charges nothing for them; tables of ours cannot have them.
    pub fn with_registers(mut self, parts: impl IntoIterator<Item = Span<Offset>>) -> Self {
        self.registers.extend(parts);
        self
    }

    /// The mapping.
    pub const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Pinner of the memory: its own, or the one of the process.
    ///
    /// # Errors
    ///
    /// When there is none for the process.
    pub fn pinner(&self) -> Result<Arc<Pinner>, PinnerError> {
        match &self.pinner {
            Some(pinner) => Ok(Arc::clone(pinner)),
            None => Pinner::of_process(),
        }
    }

    /// Bytes of the pages of `page` bytes that `part` has bytes in.
    fn in_pages(&self, part: Span<Offset>, page: u64) -> u64 {
        // Pages are counted by address: foreign memory need not begin where a huge page does.
        let begin = self.mapping.address() & (page - 1);
        let first = ((begin + part.start) & !(page - 1)).max(begin);
        let last = (begin + part.last()) | (page - 1);
        last.min(begin + self.mapping.len() - 1) - first + 1
    }

    /// Work of pinning and reading so far.
    pub fn effort(&self) -> &Effort {
        &self.effort
    }
}

impl MemoryObject for HostMemory {
    fn len(&self) -> u64 {
        self.mapping.len()
    }

    fn charge(&self, part: Span<Offset>) -> u64 {
        // io_uring charges the huge pages that it touches whole; mlock compares the length. Without a
        // pinner there is no pin, which says why.
        let kind = self.pinner().map_or(PinKind::Mlock, |pinner| pinner.kind());
        self.in_pages(
            part,
            match kind {
                PinKind::IoUring => self.mapping.backing().largest_page(),
                PinKind::Mlock => Backing::Anon4K.page(),
            },
        )
    }

    fn charge_of_mapping(&self, part: Span<Offset>) -> u64 {
        let page = Backing::Anon4K.page();
        let registers = self.registers.iter();
        let registers = registers.filter_map(|registers| registers.intersection(&part));
        let free: u64 = registers.map(|part| self.in_pages(part, page)).sum();
        self.in_pages(part, page).saturating_sub(free)
    }

    fn pin(
        &self,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Box<dyn Pinned>, PinFailed> {
        let pinner = self.pinner();
        let pinner = pinner.map_err(|cause| PinFailed::Refused(Box::new(cause)))?;
        let pin = pinner
            .pin(&self.mapping, part, progress)
            .map_err(|cause| match cause {
                PinError::Interrupted { .. } => PinFailed::Interrupted,
                cause => PinFailed::Refused(Box::new(cause)),
            })?;
        let steps = pin.steps();
        self.effort.calls.fetch_add(steps.calls, Ordering::Relaxed);
        self.effort
            .buffers
            .fetch_add(steps.buffers, Ordering::Relaxed);
        let frames = self.frames;
        let frames = frames.unwrap_or_else(|| FrameSource::detect(&self.mapping));
        let effort = Arc::clone(&self.effort);
        Ok(Box::new(HostPin {
            pin,
            frames,
            effort,
        }))
    }

    #[allow(unsafe_code)]
    fn in_process(&self) -> Option<ProcessMemory> {
        // SAFETY: a mapping stays as it is until it is dropped, which this object prevents, and
        // lends its memory as atomic cells only. The owner of a foreign one keeps to the same.
        Some(unsafe { ProcessMemory::new(self.mapping.address()) })
    }

    #[cfg(feature = "iommufd")]
    fn file(&self) -> Option<(std::os::fd::BorrowedFd<'_>, u64)> {
        Some((self.mapping.fd()?, self.mapping.file_offset()))
    }
}

#[derive(Debug)]
struct HostPin {
    pin: Pin,
    frames: FrameSource,
    effort: Arc<Effort>,
}

impl Pinned for HostPin {
    fn runs(&self, part: Span<Offset>) -> Result<Box<dyn RunReader + '_>, Cause> {
        let frames = self.pin.runs(part, self.frames)?;
        Ok(Box::new(HostRuns {
            frames,
            effort: &self.effort,
        }))
    }

    fn release(&mut self, part: Span<Offset>) -> Result<u64, Cause> {
        self.pin.release(part)?;
        Ok(self.pin.charged_bytes())
    }

    fn unpin(self: Box<Self>) -> Result<u64, Cause> {
        Ok(self.pin.unpin()?)
    }
}

struct HostRuns<'a> {
    frames: Frames<'a>,
    effort: &'a Effort,
}

impl RunReader for HostRuns<'_> {
    fn next_batch(&mut self, out: &mut [Span<Pa>]) -> Result<usize, Cause> {
        let before = self.frames.entries_read();
        let count = self.frames.next_pieces(out)?;
        self.effort
            .entries_read
            .fetch_add(self.frames.entries_read() - before, Ordering::Relaxed);
        Ok(count)
    }
}

/// Memory of the host for tables: an [`Arena`] over a mapping, with a window of addresses.
pub type HostTables = Arena<MappedStorage>;

/// Bytes of an arena that has room for `bytes` bytes of tables.
pub(crate) fn arena_bytes(bytes: u64) -> u64 {
    let bytes = bytes.max(16 * TABLE_BYTES);
    bytes.checked_next_power_of_two().unwrap_or(1 << 63)
}

/// A mapping that holds tables.
#[derive(Debug)]
pub struct MappedStorage {
    mapping: Mapping,
    metas: Box<[AtomicMeta]>,
}

impl MappedStorage {
    /// Anonymous memory of at least `bytes` bytes, on `node` if one is named, in huge pages where
    /// the machine gives them. It is all there already: tables are never waited for.
    pub fn new(bytes: u64, node: Option<u32>) -> Result<Self, Cause> {
        Self::brought_in(Self::mapped(arena_bytes(bytes), node, &KernelNodes)?)
    }

    /// The memory, no page of which is there yet.
    pub(crate) fn mapped(
        bytes: u64,
        node: Option<u32>,
        policy: &dyn NodePolicy,
    ) -> Result<Mapping, hostmem::MappingError> {
        let backing = if bytes < Backing::Thp.largest_page() {
            Backing::Anon4K
        } else {
            Backing::Thp
        };
        Mapping::with_nodes(backing, bytes, node, policy)
    }

    /// All of `mapping`, brought in.
    pub(crate) fn brought_in(mapping: Mapping) -> Result<Self, Cause> {
        mapping.populate(&mut |_| ControlFlow::Continue(()))?;
        Ok(Self::over(mapping))
    }

    /// A mapping of any kind. One of a memory file can be handed to another process with the tables
    /// in it, which takes them over ([`iopt::Takeover`]) while units go on walking them.
    pub fn over(mapping: Mapping) -> Self {
        let metas = (0..mapping.len() / TABLE_BYTES)
            .map(|_| AtomicMeta::default())
            .collect();
        Self { mapping, metas }
    }

    /// The memory.
    pub const fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

// SAFETY: a mapping's cells and a boxed slice stay where they are while the value moves. The
// mapping belongs to this value, which lends it by shared reference only, so that no code of this
// process can write to it but through its atomic cells; and a mapping of the same memory file
// elsewhere has nothing but such cells either.
#[allow(unsafe_code)]
unsafe impl Storage for MappedStorage {
    type Cell = WideCell;

    fn cells(&self) -> &[WideCell] {
        WideCell::over(self.mapping.cells())
    }

    fn metas(&self) -> &[AtomicMeta] {
        &self.metas
    }
}
