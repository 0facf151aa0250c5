//! The DMA API: see [`Dma`].
//!
//! # What threads share
//!
//! A driver maps and unmaps a buffer for each request, on all processors at once, so no request writes what another
//! thread's request reads. Each thread has a [`Shard`]: its devices' list, which it reads under a lock that only
//! attaching and detaching take in all shards; its [`Local`], with a record of each buffer that it has mapped and the queue of
//! those that it has unmapped; and its magazines of addresses (`iova.rs`). Threads meet in the page table, where
//! their entries are their own, and in the unit, which invalidates what was unmapped.
//!
//! # What is held
//!
//! A buffer's record holds its memory before the first entry is in the table, and goes when a flush has succeeded
//! after the last entry has left it. A panic or a failure in between leaves memory that is held and an address that is
//! not used again.

mod iova;
mod shards;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};
use core::{fmt, mem, slice};

use iommu::{DeviceId, DomainId};
use iopt::{AnyTable, Gather, NoRuns, Prot};
use runs::{Iova, Offset, Pa, Span};

use crate::lock::{Mutex, RwLock};
use crate::memory::Memory;
use crate::own::{Devices, Domain, Fill, Leaves, Member, detach, map_runs};
use crate::space::endpoint::{Endpoint, EndpointKind};
use crate::space::error::{AttachError, DetachError, MapError, UnmapError};
use crate::space::flush::Flushing;
pub(crate) use iova::Iovas;
use shards::{Local, Part, Record, Shard, ShardHold, Shards};

/// A buffer that a device reaches, until it is [unmapped](Dma::unmap).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the buffer stays mapped until it is given to `Dma::unmap`"]
pub struct DmaBuffer {
    /// The requested range.
    range: Span<Iova>,
    /// The [`Dma`] by which it is mapped.
    owner: u64,
    /// Place of its record.
    shard: u32,
    slot: u32,
}

impl DmaBuffer {
    /// Its device addresses.
    pub const fn range(&self) -> Span<Iova> {
        self.range
    }
}

/// Failure of a map: nothing has changed.
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
        /// Number of parts.
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
    /// The memory, or the page table, has refused it.
    #[error(transparent)]
    Map(MapError),
}

/// Failure of an unmap, and the state of its buffer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmaUnmapError {
    /// It is mapped as before.
    #[error("{} stays mapped", buffer.range)]
    Mapped {
        /// The buffer.
        buffer: DmaBuffer,
        /// Cause.
        #[source]
        cause: iopt::TableUnmapError,
    },
    /// It is unmapped, but devices may still reach it ([`UnmapError::Flush`]: it is pinned, and its address is not used
    /// again, until a later flush has succeeded), or memory that was flushed is still pinned ([`UnmapError::Unpin`]).
    #[error(transparent)]
    Unmapped(UnmapError),
    /// It was mapped by another [`Dma`], and is mapped as before.
    #[error("{} was mapped by another DMA allocator", buffer.range)]
    Foreign {
        /// The buffer.
        buffer: DmaBuffer,
    },
}

/// A domain for the buffers of a driver's requests, with an allocator of its device addresses.
///
/// A driver, in user space or in a kernel, gives each request a buffer, which a device reads or writes at a device
/// address for as long as the request takes. [`map`](Self::map) allocates such an address and maps there,
/// [`unmap`](Self::unmap) unmaps and frees it, for requests of any size from any number of threads. A scatter-gather list is
/// mapped at one range ([`map_list`](Self::map_list)), so that the device sees one buffer.
///
/// It has a page table of its own, as a device of a driver has it in Linux: an [`Ioas`](crate::Ioas) is for memory that
/// stays mapped. The table is one of ours: over VFIO or iommufd use
/// [`Ioas::map_anywhere`](crate::Ioas::map_anywhere). Devices are [attached](Self::attach) before or while buffers are mapped.
///
/// Memory that stays where it is ([`MemoryObject::fixed_runs`](crate::MemoryObject::fixed_runs), for instance a part that was
/// [pinned](Memory::pinned) once) costs no pin and no charge for each buffer.
///
/// ```
/// use std::sync::Arc;
/// use ioas::{Dma, Flushing, FixedRuns, Ledger, Memory};
/// use iommu::DomainId;
/// use iopt::{AnyTable, FormatId, HeapTables, Prot};
/// use runs::{PageSizes, Span};
///
/// let tables = Arc::new(HeapTables::with_tables(64)?);
/// let table = AnyTable::new(FormatId::VtdSs, 4, PageSizes::from_bits(u64::MAX), tables)?;
/// let windows = [Span::new(0x10_0000, 1 << 30)];
/// let dma = Dma::new(DomainId(1), table, &windows, Flushing::Strict, 4);
/// // dma.attach((unit, device))?;
///
/// let ram = FixedRuns::new([Span::new(0x8000_0000, 1 << 20)], 4096)?;
/// let memory = Memory::new(Arc::new(ram), &Ledger::unlimited());
/// let buffer = dma.map(&memory, Span::new(0x1234, 2000), Prot::RW)?;
/// assert_eq!(dma.table().translate(buffer.range().start), Some(0x8000_1234));
/// dma.unmap(buffer)?;
/// dma.close()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
///
/// # When an address is used again
///
/// Not before units have invalidated it: a device that still has the old translation would
/// reach the new buffer's neighbours by it. With [`Flushing::Strict`] that is when `unmap` returns. With
/// [`Flushing::Lazy`] each thread has a queue of the buffers that it has unmapped, with bounds of its own, and one
/// flush frees all of them. An address whose flush has failed waits in the same way. When no other address is left,
/// `map` flushes.
///
/// # Tables
///
/// A table goes with the buffer that had all of it, and others stay until the end: the lowest addresses are used
/// first, so there are as many as there were for the most buffers at a time.
///
/// # Dropping
///
/// Every device is detached, which waits for its accesses, and then all memory is released. If a unit does not
/// release a device, the memory stays pinned for good. [`close`](Self::close) gives the tables back, too.
pub struct Dma {
    domain: Domain,
    flushing: Flushing,
    windows: Box<[Span<Iova>]>,
    iovas: Iovas,
    granule: u64,
    id: u64,
    shards: Shards,
}

/// Runs that are looked up at a time, where memory is pinned.
const BATCH: usize = 64;

impl fmt::Debug for Dma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dma")
            .field("domain", &self.domain.id)
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}

impl Dma {
    /// Buffers in `windows`, ranges in order and disjoint, of `table`, which is empty and which units know as
    /// `domain`. About as many `threads` as are given share nothing when they map and unmap; more take turns.
    pub fn new(
        domain: DomainId,
        table: AnyTable,
        windows: &[Span<Iova>],
        flushing: Flushing,
        threads: usize,
    ) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let granule = table.page_sizes().smallest();
        let shards = (0..threads.max(1)).map(|_| Shard {
            devices: RwLock::default(),
            local: Mutex::default(),
            flushing: Mutex::default(),
        });
        Self {
            domain: Domain::new(domain, table, None),
            flushing,
            windows: windows.into(),
            iovas: Iovas::new(windows, granule, threads),
            granule,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            shards: Shards(shards.collect()),
        }
    }

    /// The page table.
    pub const fn table(&self) -> &AnyTable {
        &self.domain.table
    }

    /// Has a device of a unit reach the buffers, those that are mapped and those to come. Waits until no thread
    /// maps or unmaps.
    ///
    /// # Errors
    ///
    /// [`AttachError::Endpoint`], [`AttachError::Unit`], and [`AttachError::Reserved`] with the window.
    pub fn attach(&self, endpoint: impl Into<Endpoint>) -> Result<(), AttachError> {
        let Endpoint { kind, near } = endpoint.into();
        let EndpointKind::Device(unit, device) = kind else {
            let backend = "own tables";
            return Err(AttachError::Endpoint { backend });
        };
        let mut refused = Ok(());
        unit.reserved(device, &mut |reserved| {
            let mut windows = self.windows.iter();
            if let Some(area) = windows.find(|window| window.overlaps(&reserved)) {
                let area = *area;
                refused = Err(AttachError::Reserved { area, reserved });
            }
        });
        refused?;
        self.shards.change(|devices| {
            let attached = unit.attach(device, self.domain.id, self.domain.table.root());
            attached.map_err(AttachError::Unit)?;
            devices.0.push(Member { unit, device, near });
            Ok(())
        })
    }

    /// Detaches a device, which waits for its accesses. Waits until no thread maps or unmaps.
    ///
    /// # Errors
    ///
    /// [`DetachError::NotAttached`], [`DetachError::Unit`].
    pub fn detach(&self, device: DeviceId) -> Result<(), DetachError> {
        self.shards.change(|devices| {
            let mut members = devices.0.iter();
            let place = members.position(|member| member.device == device);
            let place = place.ok_or(DetachError::NotAttached { device })?;
            detach(&*devices.0[place].unit, device)?;
            devices.0.remove(place);
            Ok(())
        })
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
        let len = self.check(list, prot)?;
        let lead = list
            .first()
            .map_or(0, |(_, part)| part.start % self.granule);
        let ends = lead.checked_add(len);
        let whole = ends.and_then(|end| end.checked_next_multiple_of(self.granule));
        let wanted = whole.ok_or(DmaError::List { parts: list.len() })?;
        let found = self.iovas.allocate(wanted).or_else(|_| {
            // A flush frees the ranges that wait for one. If it fails, there is no room.
            let _ = self.flush();
            self.iovas.allocate(wanted)
        });
        let start = found
            .map_err(|longest| DmaError::NoRoom { wanted, longest })?
            .start;
        let (place, shard) = self.shards.own();
        let mut held = ShardHold {
            shard,
            record: None,
        };
        let mut mapped = 0;
        let attached = shard.devices.read();
        let done = held.hold(list, self.granule).and_then(|record| {
            self.fill(start, list, record, prot, &mut mapped)?;
            match attached.told_of_maps {
                true => attached
                    .devices
                    .mapped(self.domain.id, Span::new(start, wanted))
                    .map_err(MapError::Flush),
                false => Ok(()),
            }
        });
        let buffer = DmaBuffer {
            range: Span::new(start + lead, len),
            owner: self.id,
            shard: place,
            slot: held.note(),
        };
        match done {
            Ok(()) => Ok(buffer),
            Err(cause) => {
                self.undo(buffer, mapped, (shard, &attached.devices));
                Err(DmaError::Map(cause))
            }
        }
    }

    /// Stores the entries of a list from `at` on. `mapped` bytes are in the table then, after an error too.
    fn fill(
        &self,
        at: u64,
        list: &[(&Arc<Memory>, Span<Offset>)],
        record: &Record,
        prot: Prot,
        mapped: &mut u64,
    ) -> Result<(), MapError> {
        let domains = slice::from_ref(&self.domain);
        for ((memory, part), held) in list.iter().zip(record.parts()) {
            let part = whole(*part, self.granule);
            let (at, object) = (at + *mapped, memory.object());
            let leaves = Leaves::new(prot, object.is_mmio());
            let given = object.fixed_runs();
            if let Some(run) = given.and_then(|given| given.one_run(part)) {
                map_runs(domains, at, &[run], leaves)?;
                *mapped += part.len;
                continue;
            }
            let mut batch = [Span::<Pa>::default(); BATCH];
            let mut fill = Fill::new(domains, &mut batch, Span::new(at, part.len), leaves);
            let filled = match (given, held) {
                (_, Part::Hold(hold)) => hold.with_runs(part, |runs| fill.stream(runs, &mut ())),
                (Some(given), _) => fill.stream(&mut given.reader(part), &mut ()),
                // Not reached: what is not given is held.
                (None, _) => Err(MapError::RunsDiffer {
                    pinned: 0,
                    found: 0,
                }),
            };
            *mapped += fill.mapped;
            filled?;
        }
        Ok(())
    }

    /// Takes back a buffer of which `mapped` bytes are in the table.
    fn undo(&self, buffer: DmaBuffer, mapped: u64, (shard, devices): (&Shard, &Devices)) {
        let mut gather = Gather::new();
        if mapped > 0 {
            let range = Span::new(whole(buffer.range, self.granule).start, mapped);
            let table = &self.domain.table;
            if let Err(cause) = table.owning(range).unmap(range, &mut gather, &mut NoRuns) {
                // Not reached: it was mapped just now. Devices might reach the memory, so it stays held.
                debug_assert!(false, "a new mapping cannot be unmapped: {cause}");
                return;
            }
        }
        // The caller learns why the map failed; what is not flushed or unpinned shows in the ledger.
        let _ = self.settle(gather, buffer, (shard, devices));
    }

    /// The length of a list in bytes.
    fn check(&self, list: &[(&Arc<Memory>, Span<Offset>)], prot: Prot) -> Result<u64, DmaError> {
        let parts = list.len();
        if !prot.intersects(Prot::RW | Prot::EXECUTE) {
            return Err(DmaError::Map(MapError::Prot { prot }));
        }
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

    /// Unmaps the buffer. With strict flushing no device reaches it when this returns.
    ///
    /// # Errors
    ///
    /// See [`DmaUnmapError`], which has the buffer if it is still mapped.
    pub fn unmap(&self, buffer: DmaBuffer) -> Result<(), DmaUnmapError> {
        if buffer.owner != self.id {
            return Err(DmaUnmapError::Foreign { buffer });
        }
        let range = whole(buffer.range, self.granule);
        let (_, shard) = self.shards.own();
        let attached = &*shard.devices.read();
        let table = &self.domain.table;
        let mut local = shard.local.lock();
        if matches!(self.flushing, Flushing::Strict) && local.waiting == 0 {
            drop(local);
            let mut gather = Gather::new();
            if let Err(cause) = table.owning(range).unmap(range, &mut gather, &mut NoRuns) {
                return Err(DmaUnmapError::Mapped { buffer, cause });
            }
            let settled = self.settle(gather, buffer, (shard, &attached.devices));
            return settled.map_err(DmaUnmapError::Unmapped);
        }
        // With others that wait for a flush.
        let gather = &mut local.unmapped.gather;
        if let Err(cause) = table.owning(range).unmap(range, gather, &mut NoRuns) {
            return Err(DmaUnmapError::Mapped { buffer, cause });
        }
        local.wait(buffer);
        let due = |local: &mut Local| local.is_due(self.flushing);
        if !due(&mut local) {
            return Ok(());
        }
        drop(local);
        self.settle_all((shard, &attached.devices), due)
            .map_err(DmaUnmapError::Unmapped)
    }

    /// Has units invalidate what every thread has unmapped, and releases it. Waits for flushes of other threads.
    ///
    /// # Errors
    ///
    /// [`UnmapError::Flush`] and [`UnmapError::Unpin`] only. After the first, what was unmapped waits for the next.
    pub fn flush(&self) -> Result<(), UnmapError> {
        let flushed = self.flush_each(|_| true);
        self.domain.table.poll();
        flushed
    }

    /// [`flush`](Self::flush), for threads whose buffers have come to a bound of [lazy flushing](Flushing::Lazy).
    pub fn poll(&self) -> Result<(), UnmapError> {
        self.flush_each(|local| local.is_due(self.flushing))
    }

    /// Unmapped buffers that wait for a flush, or for the end of one.
    pub fn waiting(&self) -> usize {
        let waiting = |shard: &Shard| shard.local.lock().waiting;
        self.shards.0.iter().map(waiting).sum()
    }

    fn flush_each(&self, due: impl Fn(&mut Local) -> bool) -> Result<(), UnmapError> {
        let mut all = Ok(());
        for shard in &self.shards.0 {
            let attached = shard.devices.read();
            all = all.and(self.settle_all((shard, &attached.devices), |local| {
                local.forget_unused();
                due(local)
            }));
        }
        all
    }

    /// Has units invalidate what a thread has unmapped, and releases it, if that is due when no other flush of it is
    /// under way. After a failed flush all of it waits for the next.
    fn settle_all(
        &self,
        (shard, devices): (&Shard, &Devices),
        due: impl FnOnce(&mut Local) -> bool,
    ) -> Result<(), UnmapError> {
        let batch = &mut *shard.flushing.lock();
        {
            let local = &mut *shard.local.lock();
            if !due(local) {
                return Ok(());
            }
            local.flush_into(batch, self.domain.table.memory());
        }
        self.invalidate(&mut batch.gather, devices)?;
        shard.local.lock().waiting -= batch.buffers.len();
        self.release(batch.buffers.drain(..))
    }

    /// Has units invalidate what `gather` has of a buffer, and releases it. After a failed flush it waits in the shard.
    fn settle(
        &self,
        mut gather: Gather,
        buffer: DmaBuffer,
        (shard, devices): (&Shard, &Devices),
    ) -> Result<(), UnmapError> {
        if let Err(cause) = self.invalidate(&mut gather, devices) {
            let local = &mut *shard.local.lock();
            let memory = self.domain.table.memory();
            memory.join(&mut local.unmapped.gather, gather);
            local.wait(buffer);
            return Err(cause);
        }
        self.release([buffer])
    }

    /// Has units invalidate what was gathered, and gives its tables back.
    fn invalidate(&self, gather: &mut Gather, devices: &Devices) -> Result<(), UnmapError> {
        let flushed = gather.flush_with(|what| devices.invalidate(self.domain.id, what));
        self.domain
            .table
            .reclaim(flushed.map_err(UnmapError::Flush)?);
        Ok(())
    }

    /// Releases buffers that no device reaches, and their addresses.
    fn release(&self, buffers: impl IntoIterator<Item = DmaBuffer>) -> Result<(), UnmapError> {
        let mut failed = None;
        for buffer in buffers {
            failed = failed.or(self.shards.release(&buffer));
            let whole = whole(buffer.range, self.granule);
            self.iovas.free(whole.start, whole.len);
        }
        failed.map_or(Ok(()), |cause| Err(UnmapError::Unpin(cause)))
    }

    /// Detaches all devices, releases all memory and gives the tables back.
    ///
    /// # Errors
    ///
    /// The error of the first device that its unit does not release: then memory and tables are lost on purpose.
    pub fn close(self) -> Result<(), DetachError> {
        let Self {
            domain, mut shards, ..
        } = self;
        shards.leave()?;
        for shard in &mut shards.0 {
            let (batch, memory) = (shard.flushing.get_mut(), domain.table.memory());
            shard.local.get_mut().flush_into(batch, memory);
            let gather = mem::take(&mut batch.gather);
            memory.reclaim(gather.never_walked().into_tables());
        }
        drop(shards);
        domain.end();
        Ok(())
    }
}

/// The pages in which `part` lies. It has bytes, and may end at 2^64.
fn whole<A>(part: Span<A>, granule: u64) -> Span<A> {
    let start = part.start & !(granule - 1);
    let last = part.last() | (granule - 1);
    Span::new(start, last - start + 1)
}
