//! The crate `virtio-drivers` over an address space: [`VirtioHal`].
//!
//! # What a device reaches
//!
//! Rings are in pages that are mapped for them alone ([`Hal::dma_alloc`]). Buffers of requests are copied through a
//! *window* that is mapped once ([`Hal::share`]): a driver's requests lie on stacks and heaps, whose pages hold
//! other data too, and a device of which one is not sure would reach it. A buffer that does not fit into the window has
//! pages of its own for as long as it is shared.
//!
//! # What the trait cannot report
//!
//! [`Hal`] has no errors but for `dma_alloc`. Where something fails in another call, [`DriverMemory::failure`] has it:
//!
//! - `share` returns [`UNREACHABLE`], at which no device finds memory: its access is a fault, and the request is not
//!   completed. A driver that polls without a limit waits for good, so choose the window for the requests that are
//!   under way at once.
//! - `dma_dealloc` returns 0, since the crate panics for other values while it drops a queue. Memory that could not be
//!   unmapped is not used again.
//! - `mmio_phys_to_virt`, for PCI only, panics where [`HalMemory::registers`] has none.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::fmt;
use core::marker::PhantomData;
use core::mem;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use iopt::Prot;
use runs::{Iova, Offset, Span};
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};

use crate::dma::Iovas;
use crate::lock::Mutex;
use crate::memory::Memory;
use crate::memory::object::Cause;
use crate::space::Ioas;
use crate::space::error::{MapError, UnmapError};

/// Address without memory behind it: the last page of all addresses.
pub const UNREACHABLE: PhysAddr = !(PAGE_SIZE as PhysAddr - 1);

/// Buffers in the window begin at its multiples, so that they share no cache line.
const GRANULE: u64 = 64;

/// Pages of a driver: a part of a memory, and where the driver has it.
#[derive(Debug)]
pub struct DmaPages {
    /// The memory.
    pub memory: Arc<Memory>,
    /// Offset and length of the pages in it, bytes.
    pub part: Span<Offset>,
    /// Their address in this program.
    pub address: NonNull<u8>,
}

// SAFETY: the address is of memory that belongs to no thread; it is followed by unsafe code only.
unsafe impl Send for DmaPages {}
// SAFETY: so too.
unsafe impl Sync for DmaPages {}

/// Source of a driver's pages: a page allocator of a kernel, or [`HostPages`](crate::HostPages).
///
/// # Safety
///
/// Pages that [`allocate`](Self::allocate) returns stay where they are until they are given back, and are used for
/// nothing else: `part.len` bytes at `address` that can be read and written, all 0, on a boundary of 4 KiB.
pub unsafe trait PageSource: Send + Sync {
    /// Allocates `bytes`, a multiple of 4 KiB, contiguous in the memory.
    ///
    /// # Errors
    ///
    /// Failure to allocate.
    fn allocate(&self, bytes: u64) -> Result<DmaPages, Cause>;

    /// Takes them back. No device reaches them any more.
    fn free(&self, pages: DmaPages);
}

/// Failure to get memory for a device, or to give it back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverMemoryError {
    /// More bytes than there are addresses, or none.
    #[error("{pages} pages of {PAGE_SIZE:#x} bytes cannot be allocated")]
    Length {
        /// Pages that were asked for.
        pages: usize,
    },
    /// The source of pages has none.
    #[error("{bytes:#x} bytes of pages cannot be allocated")]
    Pages {
        /// Bytes that were asked for.
        bytes: u64,
        /// Cause.
        #[source]
        cause: Cause,
    },
    /// They cannot be mapped: the limit, for instance. They are not used again if a unit may still have a part of them.
    #[error(transparent)]
    Map(MapError),
    /// They were not unmapped, or not flushed, and are not used again.
    #[error(transparent)]
    Unmap(UnmapError),
    /// Nothing is mapped there for the driver.
    #[error("{paddr:#x} was not allocated, or is free already")]
    Unknown {
        /// The device address.
        paddr: PhysAddr,
    },
}

/// Memory that drivers share with their devices through an address space.
///
/// Mapped pages are charged to the ledger of the source's memory. The address space can have other areas.
/// When it is dropped, everything is unmapped; what a unit does not flush is lost on purpose.
pub struct DriverMemory {
    space: Arc<Ioas>,
    source: Box<dyn PageSource>,
    window: Mapped,
    free: Iovas,
    /// Pages by device address: rings, and buffers beyond the window.
    mapped: Mutex<BTreeMap<PhysAddr, DmaPages>>,
    failed: Mutex<Failed>,
}

#[derive(Default)]
struct Failed {
    count: u64,
    last: Option<DriverMemoryError>,
}

/// Pages at a device address.
struct Mapped {
    iova: PhysAddr,
    pages: Option<DmaPages>,
}

impl fmt::Debug for DriverMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverMemory")
            .field("mapped", &self.mapped.lock().len())
            .field("failures", &self.failed.lock().count)
            .finish_non_exhaustive()
    }
}

impl DriverMemory {
    /// Maps what drivers need in `space`, at addresses that it chooses, in pages of `source`. The window for the
    /// buffers of requests has `window` bytes, rounded up to pages.
    ///
    /// # Errors
    ///
    /// [`DriverMemoryError`], for the window.
    pub fn new(
        space: Arc<Ioas>,
        source: impl PageSource + 'static,
        window: usize,
    ) -> Result<Self, DriverMemoryError> {
        let source = Box::new(source);
        let pages = window.div_ceil(PAGE_SIZE);
        let (iova, pages) = map(&space, &*source, pages, Prot::RW)?;
        Ok(Self {
            free: Iovas::new(&[Span::new(0, pages.part.len)], GRANULE, 1),
            window: Mapped {
                iova,
                pages: Some(pages),
            },
            space,
            source,
            mapped: Mutex::default(),
            failed: Mutex::default(),
        })
    }

    /// Number of failures, and the last one that was not taken yet.
    pub fn failure(&self) -> (u64, Option<DriverMemoryError>) {
        let mut failed = self.failed.lock();
        (failed.count, failed.last.take())
    }

    fn fails(&self, error: DriverMemoryError) {
        let mut failed = self.failed.lock();
        failed.count += 1;
        failed.last = Some(error);
    }

    /// Maps pages of their own, for the driver at the pointer, for the device at the address.
    fn allocate(
        &self,
        pages: usize,
        direction: BufferDirection,
    ) -> Result<(PhysAddr, NonNull<u8>), DriverMemoryError> {
        // Not every format has pages that can be written but not read.
        let prot = match direction {
            BufferDirection::DriverToDevice => Prot::READ,
            BufferDirection::DeviceToDriver | BufferDirection::Both => Prot::RW,
        };
        let (iova, pages) = map(&self.space, &*self.source, pages, prot)?;
        let address = pages.address;
        self.mapped.lock().insert(iova, pages);
        Ok((iova, address))
    }

    /// Unmaps what [`allocate`](Self::allocate) has mapped.
    fn free(&self, paddr: PhysAddr) -> Result<(), DriverMemoryError> {
        let pages = self.mapped.lock().remove(&paddr);
        let pages = pages.ok_or(DriverMemoryError::Unknown { paddr })?;
        unmap(&self.space, &*self.source, paddr, pages)
    }

    /// Place in the window of `len` bytes at a device address.
    fn in_window(&self, paddr: PhysAddr, len: u64) -> Option<(u64, NonNull<u8>)> {
        let window = self.window.pages.as_ref()?;
        let offset = paddr.checked_sub(self.window.iova)?;
        let inside = offset.checked_add(len)? <= window.part.len;
        // SAFETY: the offset lies inside of the window's pages.
        inside.then(|| (offset, unsafe { window.address.add(offset as usize) }))
    }

    /// A place for a buffer that the device reaches.
    fn place(&self, len: usize) -> Result<(PhysAddr, NonNull<u8>), DriverMemoryError> {
        if let Ok(found) = self.free.allocate(len as u64) {
            if let Some((_, address)) = self.in_window(self.window.iova + found.start, found.len) {
                return Ok((self.window.iova + found.start, address));
            }
        }
        self.allocate(len.div_ceil(PAGE_SIZE), BufferDirection::Both)
    }

    /// Copies the buffer where the device reaches it.
    ///
    /// # Safety
    ///
    /// As for [`Hal::share`].
    unsafe fn share(&self, buffer: NonNull<[u8]>) -> Result<PhysAddr, DriverMemoryError> {
        let (paddr, place) = self.place(buffer.len())?;
        // A buffer that the device writes, too: what it leaves out is to stay as it was.
        // SAFETY: the caller answers for the buffer; the place has as many bytes and is this buffer's.
        unsafe { copy_in(place, buffer) };
        Ok(paddr)
    }

    /// Copies it back, if the device could write it, and ends that the device reaches it.
    ///
    /// # Safety
    ///
    /// As for [`Hal::unshare`].
    unsafe fn unshare(
        &self,
        paddr: PhysAddr,
        buffer: NonNull<[u8]>,
        direction: BufferDirection,
    ) -> Result<(), DriverMemoryError> {
        if paddr == UNREACHABLE {
            return Ok(());
        }
        let len = buffer.len() as u64;
        let in_window = self.in_window(paddr, len);
        let place = match in_window {
            Some((_, place)) => place,
            None => {
                let mapped = self.mapped.lock();
                let pages = mapped.get(&paddr).filter(|pages| len <= pages.part.len);
                pages.ok_or(DriverMemoryError::Unknown { paddr })?.address
            }
        };
        if direction != BufferDirection::DriverToDevice {
            // SAFETY: the caller answers for the buffer, and that the place is its.
            unsafe { copy_out(place, buffer) };
        }
        match in_window {
            Some((offset, _)) => {
                self.free.free(offset, len);
                Ok(())
            }
            None => self.free(paddr),
        }
    }
}

/// Maps fresh pages.
fn map(
    space: &Ioas,
    source: &dyn PageSource,
    pages: usize,
    prot: Prot,
) -> Result<(PhysAddr, DmaPages), DriverMemoryError> {
    let bytes = pages.checked_mul(PAGE_SIZE).filter(|bytes| *bytes > 0);
    let bytes = bytes.ok_or(DriverMemoryError::Length { pages })? as u64;
    let allocated = source.allocate(bytes);
    let pages = allocated.map_err(|cause| DriverMemoryError::Pages { bytes, cause })?;
    match space.map_anywhere(&pages.memory, pages.part, prot) {
        Ok(iova) => Ok((iova, pages)),
        Err(cause) => {
            // Pages of an undone map are retired if a unit may still have their translation.
            match space.retired() == 0 || space.flush().is_ok() {
                true => source.free(pages),
                false => mem::forget(pages),
            }
            Err(DriverMemoryError::Map(cause))
        }
    }
}

/// Unmaps pages and gives them back.
fn unmap(
    space: &Ioas,
    source: &dyn PageSource,
    iova: PhysAddr,
    pages: DmaPages,
) -> Result<(), DriverMemoryError> {
    let range = Span::<Iova>::new(iova, pages.part.len);
    match space.unmap(range) {
        Ok(_) => {
            source.free(pages);
            Ok(())
        }
        Err(cause) => {
            mem::forget(pages);
            Err(DriverMemoryError::Unmap(cause))
        }
    }
}

impl Drop for DriverMemory {
    fn drop(&mut self) {
        let window = self
            .window
            .pages
            .take()
            .map(|pages| (self.window.iova, pages));
        for (iova, pages) in mem::take(self.mapped.get_mut()).into_iter().chain(window) {
            // Pages whose unmap fails are lost: no caller is left to return the error to.
            let _ = unmap(&self.space, &*self.source, iova, pages);
        }
    }
}

/// Stores the buffer at `to`, a multiple of 8, by atomic stores: a device may access the memory at any time.
///
/// # Safety
///
/// The buffer can be read; `to` has as many bytes, which this program accesses in no other way meanwhile.
unsafe fn copy_in(to: NonNull<u8>, buffer: NonNull<[u8]>) {
    let (from, len) = (buffer.cast::<u8>().as_ptr(), buffer.len());
    let words = len / 8;
    for word in 0..words {
        // SAFETY: the word lies in both; the destination is aligned.
        unsafe {
            let value = ptr::read_unaligned(from.add(word * 8).cast::<u64>());
            AtomicU64::from_ptr(to.as_ptr().cast::<u64>().add(word))
                .store(value, Ordering::Relaxed);
        }
    }
    for byte in words * 8..len {
        // SAFETY: the byte lies in both.
        unsafe {
            AtomicU8::from_ptr(to.as_ptr().add(byte)).store(*from.add(byte), Ordering::Relaxed);
        }
    }
}

/// Loads the buffer from `from`, as [`copy_in`] stores it.
///
/// # Safety
///
/// The buffer can be written; else as [`copy_in`].
unsafe fn copy_out(from: NonNull<u8>, buffer: NonNull<[u8]>) {
    let (to, len) = (buffer.cast::<u8>().as_ptr(), buffer.len());
    let words = len / 8;
    for word in 0..words {
        // SAFETY: the word lies in both; the source is aligned.
        unsafe {
            let value =
                AtomicU64::from_ptr(from.as_ptr().cast::<u64>().add(word)).load(Ordering::Relaxed);
            ptr::write_unaligned(to.add(word * 8).cast::<u64>(), value);
        }
    }
    for byte in words * 8..len {
        // SAFETY: the byte lies in both.
        unsafe {
            *to.add(byte) = AtomicU8::from_ptr(from.as_ptr().add(byte)).load(Ordering::Relaxed);
        }
    }
}

/// Memory of a [`VirtioHal`]: `Hal` has functions without a receiver, so that it is static.
pub trait HalMemory {
    /// The memory; `None` before it is set up: then nothing is allocated.
    fn memory() -> Option<&'static DriverMemory>;

    /// The registers at `paddr`, for `virtio-drivers`' PCI transport, mapped in this program for good.
    fn registers(paddr: PhysAddr, size: usize) -> Option<NonNull<u8>> {
        let _ = (paddr, size);
        None
    }
}

/// `virtio-drivers`' [`Hal`] over an address space.
///
/// ```
/// use std::sync::{Arc, OnceLock};
///
/// use hostmem::{Backing, Mapping};
/// use ioas::{DriverMemory, HalMemory, HostPages, Ioas, Ledger, VirtioHal};
/// use iommu::DomainId;
/// use iopt::{AnyTable, FormatId, HeapTables};
/// use runs::PageSizes;
///
/// static MEMORY: OnceLock<DriverMemory> = OnceLock::new();
///
/// struct Here;
///
/// impl HalMemory for Here {
///     fn memory() -> Option<&'static DriverMemory> {
///         MEMORY.get()
///     }
/// }
///
/// type Hal = VirtioHal<Here>; // VirtIOBlk::<Hal, _>::new(transport)
///
/// let tables = Arc::new(HeapTables::with_tables(64)?);
/// let table = AnyTable::new(FormatId::VtdSs, 4, PageSizes::from_bits(u64::MAX), tables)?;
/// let space = Arc::new(Ioas::over_table(DomainId(1), table)); // Or over VFIO or iommufd.
/// let ledger = Ledger::new("DMA memory", Some(1 << 20), 0);
/// let pages = HostPages::new(Arc::new(Mapping::new(Backing::Anon4K, 1 << 20, None)?), &ledger);
/// let memory = DriverMemory::new(space, pages, 64 << 10)?;
/// # assert_eq!(ledger.in_use(), 64 << 10);
/// MEMORY.set(memory).unwrap();
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct VirtioHal<S>(PhantomData<fn(S)>);

impl<S> fmt::Debug for VirtioHal<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VirtioHal")
    }
}

// SAFETY: pages come from a `PageSource`, whose implementation promises what `dma_alloc` has to; they go back only
// when they are deallocated. Registers are what `HalMemory` says.
unsafe impl<S: HalMemory> Hal for VirtioHal<S> {
    fn dma_alloc(pages: usize, direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let none = (0, NonNull::dangling());
        let Some(memory) = S::memory() else {
            return none;
        };
        memory.allocate(pages, direction).unwrap_or_else(|error| {
            memory.fails(error);
            none
        })
    }

    unsafe fn dma_dealloc(paddr: PhysAddr, _: NonNull<u8>, _: usize) -> i32 {
        let Some(memory) = S::memory() else {
            return 0;
        };
        if let Err(error) = memory.free(paddr) {
            memory.fails(error);
        }
        0
    }

    #[allow(clippy::panic, reason = "the trait knows no other answer")]
    unsafe fn mmio_phys_to_virt(paddr: PhysAddr, size: usize) -> NonNull<u8> {
        match S::registers(paddr, size) {
            Some(registers) => registers,
            None => panic!("no registers of {size:#x} bytes at {paddr:#x}"),
        }
    }

    unsafe fn share(buffer: NonNull<[u8]>, _: BufferDirection) -> PhysAddr {
        let Some(memory) = S::memory() else {
            return UNREACHABLE;
        };
        // SAFETY: the caller answers for the buffer.
        unsafe { memory.share(buffer) }.unwrap_or_else(|error| {
            memory.fails(error);
            UNREACHABLE
        })
    }

    unsafe fn unshare(paddr: PhysAddr, buffer: NonNull<[u8]>, direction: BufferDirection) {
        let Some(memory) = S::memory() else {
            return;
        };
        // SAFETY: the caller answers for the buffer.
        if let Err(error) = unsafe { memory.unshare(paddr, buffer, direction) } {
            memory.fails(error);
        }
    }
}
