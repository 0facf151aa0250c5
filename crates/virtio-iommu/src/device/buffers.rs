//! Descriptor chains, read once: later changes by the driver are not seen.

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use crate::wire::MOST_REQUEST_BYTES;

/// A buffer.
#[derive(Clone, Copy)]
struct Buffer {
    address: u64,
    len: u32,
}

/// Room for the request in a chain and its answer, kept from one to the next.
#[derive(Default)]
pub(super) struct Room {
    /// The device-readable part.
    readable: Vec<Buffer>,
    /// The device-writable part.
    writable: Vec<Buffer>,
    /// Bytes to be written.
    pub(super) answer: Vec<u8>,
}

/// The device-readable part of a chain.
pub(super) struct Message {
    bytes: [u8; MOST_REQUEST_BYTES],
    len: usize,
}

impl Message {
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}

/// A device-readable buffer that is not in the guest's memory.
pub(super) struct Unreadable {
    pub(super) address: u64,
    pub(super) len: u32,
}

impl Room {
    /// Notes the buffers of a chain. False when its end cannot be reached, when it is longer than a queue of
    /// `size` descriptors allows (VIRTIO 1.3, 2.7.5.3.1), or when a buffer to read follows one to write
    /// (2.7.4.2).
    pub(super) fn follow<M: GuestMemory>(&mut self, chain: DescriptorChain<&M>, size: u16) -> bool {
        self.readable.clear();
        self.writable.clear();
        // The iterator ends without a word where the chain cannot be followed: then something should have
        // come.
        let mut goes_on = true;
        for descriptor in chain {
            let write = descriptor.is_write_only();
            let count = self.readable.len() + self.writable.len();
            if count == usize::from(size) || !write && !self.writable.is_empty() {
                return false;
            }
            let buffer = Buffer {
                address: descriptor.addr().0,
                len: descriptor.len(),
            };
            match write {
                true => self.writable.push(buffer),
                false => self.readable.push(buffer),
            }
            goes_on = descriptor.has_next();
        }
        !goes_on
    }

    /// Bytes of the device-readable part.
    pub(super) fn readable(&self) -> u64 {
        bytes(&self.readable)
    }

    /// Bytes of the device-writable part, if all of it is memory.
    pub(super) fn writable<M: GuestMemory>(&self, memory: &M) -> Option<u64> {
        let there = |buffer: &Buffer| {
            let (address, len) = (GuestAddress(buffer.address), buffer.len as usize);
            memory.check_range(address, len, Permissions::Write)
        };
        let all = self.writable.iter().all(there);
        all.then(|| bytes(&self.writable))
    }

    /// Reads the device-readable part, which is no longer than a request.
    pub(super) fn read<M: GuestMemory>(&self, memory: &M) -> Result<Message, Unreadable> {
        let mut message = Message {
            bytes: [0; MOST_REQUEST_BYTES],
            len: 0,
        };
        for &Buffer { address, len } in &self.readable {
            let end = message.len + len as usize;
            let place = message.bytes.get_mut(message.len..end);
            let read = place.map(|place| memory.read_slice(place, GuestAddress(address)));
            if !matches!(read, Some(Ok(()))) {
                return Err(Unreadable { address, len });
            }
            message.len = end;
        }
        Ok(message)
    }

    /// Writes `answer` to the device-writable part, from its first byte on. Returns how many bytes that are:
    /// 0 when they have no room, or are not memory.
    pub(super) fn write<M: GuestMemory>(&self, memory: &M) -> u32 {
        let mut left = self.answer.as_slice();
        for &Buffer { address, len } in &self.writable {
            let (here, rest) = left.split_at(left.len().min(len as usize));
            if memory.write_slice(here, GuestAddress(address)).is_err() {
                return 0;
            }
            left = rest;
        }
        match left {
            [] => u32::try_from(self.answer.len()).unwrap_or(0),
            _ => 0,
        }
    }
}

/// 2^32 − 1 at most in a chain that was followed.
fn bytes(buffers: &[Buffer]) -> u64 {
    buffers.iter().map(|buffer| u64::from(buffer.len)).sum()
}
