//! Memory for rings and messages where guest and host are one process.

use std::marker::PhantomData;
use std::sync::atomic::{Ordering, fence};

use runs::{GuestAddr, Span};
use virtio_balloon::WIRE_PAGE;
use virtio_balloon::driver::BufferMemory;
use vm_memory::mmap::FromRangesError;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

const BYTES: u64 = 1 << 20;

/// There is no memory at this address.
#[derive(Debug, thiserror::Error)]
#[error("rings and messages have no memory at {address:#x}")]
pub struct NoMemory {
    /// The address.
    pub address: u64,
}

/// 1 MiB at the guest's address 0, given out once; its first page is not.
pub struct Rings<E> {
    memory: GuestMemoryMmap,
    next: u64,
    error: PhantomData<fn() -> E>,
}

impl<E> Rings<E> {
    /// All of it, zeros.
    ///
    /// # Errors
    ///
    /// When the system has no memory.
    pub fn new() -> Result<Self, FromRangesError> {
        Ok(Self {
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), BYTES as usize)])?,
            next: WIRE_PAGE,
            error: PhantomData,
        })
    }

    /// The memory.
    pub const fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }
}

impl<E: From<NoMemory>> BufferMemory for Rings<E> {
    type Error = E;
    type Words = Vec<u64>;
    type Bytes = Vec<u8>;

    fn words(&mut self, count: usize) -> Option<Vec<u64>> {
        Some(vec![0; count])
    }

    fn bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        Some(vec![0; count])
    }

    fn allocate(&mut self, len: u64) -> Option<u64> {
        let at = self.next;
        let end = at.checked_add(len.checked_next_multiple_of(WIRE_PAGE)?)?;
        if end > BYTES {
            return None;
        }
        self.next = end;
        Some(at)
    }

    fn free(&mut self, _memory: Span<GuestAddr>) {}

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), E> {
        let read = self.memory.read_slice(bytes, GuestAddress(address));
        read.map_err(|_| NoMemory { address }.into())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), E> {
        let written = self.memory.write_slice(bytes, GuestAddress(address));
        written.map_err(|_| NoMemory { address }.into())
    }

    fn load(&self, address: u64) -> Result<u16, E> {
        let loaded = self.memory.load(GuestAddress(address), Ordering::Acquire);
        loaded
            .map(u16::from_le)
            .map_err(|_| NoMemory { address }.into())
    }

    fn store(&self, address: u64, value: u16) -> Result<(), E> {
        let to = GuestAddress(address);
        let stored = self.memory.store(value.to_le(), to, Ordering::Release);
        stored.map_err(|_| NoMemory { address }.into())
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}
