//! The driver's side of a split virtqueue (VIRTIO 1.3, 2.7), with one message in it at a time.
//!
//! # Protocol
//!
//! Offering (2.7.13): the descriptors are written, from the first of the table on; then the head, 0,
//! into the available ring; then, by a store that releases, the available index. The device, which
//! reads the index first, sees all of them. Before the used ring's flags are read for whether it wants to
//! be told, there is a full barrier (2.7.13.4.1): otherwise the device, about to sleep, could miss the
//! index and we its flag.
//!
//! Taking (2.7.14): the used index is read by a load that acquires, then the entry. Since there is one
//! message, there is at most one answer, to descriptor 0; whatever else the device says is an error, and
//! nothing is trusted that it wrote. The buffers, and the descriptors, are the device's from the store of
//! the index until its answer was taken; so nothing is offered before that.
//!
//! A chain that is longer than one descriptor may lie in a table of its own (2.7.5.3), where that was
//! negotiated.

use super::seams::{BufferMemory, Element, QueueAddresses};

/// `VIRTQ_DESC_F_NEXT`.
const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
const WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`.
const INDIRECT: u16 = 4;
/// `VIRTQ_USED_F_NO_NOTIFY`.
const NO_NOTIFY: u16 = 1;

/// Bytes of a descriptor.
pub(super) const DESCRIPTOR: u64 = 16;

impl Element {
    /// As it stands in a table at place `nr`, with another one behind it or not.
    pub(super) fn to_bytes(self, nr: u16, more: bool, indirect: bool) -> [u8; 16] {
        let mut flags = 0;
        for (flag, set) in [(NEXT, more), (WRITE, self.write), (INDIRECT, indirect)] {
            if set {
                flags |= flag;
            }
        }
        let next = if more { nr.wrapping_add(1) } else { 0 };
        let [a, b, c, d, e, f, g, h] = self.address.to_le_bytes();
        let [i, j, k, l] = self.len.to_le_bytes();
        let [m, n] = flags.to_le_bytes();
        let [o, p] = next.to_le_bytes();
        [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
    }
}

/// Error of a used ring.
pub(super) enum Wrong<E> {
    Seam(E),
    Answer { answers: u16, id: u32 },
}

impl<E> From<E> for Wrong<E> {
    fn from(error: E) -> Self {
        Self::Seam(error)
    }
}

/// A queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    number: u16,
    size: u16,
    at: QueueAddresses,
    /// The available index, which counts what was offered.
    offered: u16,
    /// The used index that was seen.
    taken: u16,
    /// Bytes that the device says it has written to the buffer that was taken last.
    written: u32,
}

impl Ring {
    /// Bytes of a queue of `size` entries: table, available ring, used ring on a boundary of 4 bytes.
    pub(super) const fn bytes(size: u16) -> u64 {
        Self::used_offset(size) + 6 + 8 * size as u64
    }

    const fn used_offset(size: u16) -> u64 {
        (DESCRIPTOR * size as u64 + 6 + 2 * size as u64).next_multiple_of(4)
    }

    /// A queue in memory that is all 0, on a boundary of 16 bytes.
    pub(super) const fn new(number: u16, size: u16, at: u64) -> Self {
        let addresses = QueueAddresses {
            descriptors: at,
            available: at + DESCRIPTOR * size as u64,
            used: at + Self::used_offset(size),
        };
        Self {
            number,
            size,
            at: addresses,
            offered: 0,
            taken: 0,
            written: 0,
        }
    }

    pub(super) const fn number(&self) -> u16 {
        self.number
    }

    pub(super) const fn size(&self) -> u16 {
        self.size
    }

    pub(super) const fn written(&self) -> u32 {
        self.written
    }

    pub(super) const fn addresses(&self) -> QueueAddresses {
        self.at
    }

    /// A message is with the device.
    pub(super) const fn in_flight(&self) -> bool {
        self.offered != self.taken
    }

    /// Writes a descriptor of the chain that is offered next.
    pub(super) fn describe<M: BufferMemory>(
        &self,
        memory: &M,
        nr: u16,
        element: Element,
        more: bool,
    ) -> Result<(), M::Error> {
        let place = self.at.descriptors + DESCRIPTOR * u64::from(nr);
        memory.write(place, &element.to_bytes(nr, more, false))
    }

    /// Makes the chain a table elsewhere.
    pub(super) fn describe_table<M: BufferMemory>(
        &self,
        memory: &M,
        table: u64,
        bytes: u32,
    ) -> Result<(), M::Error> {
        let element = Element {
            address: table,
            len: bytes,
            write: false,
        };
        memory.write(self.at.descriptors, &element.to_bytes(0, false, true))
    }

    /// Offers the chain that was described. True when the device wants to be told.
    pub(super) fn offer<M: BufferMemory>(&mut self, memory: &M) -> Result<bool, M::Error> {
        let entry = self.at.available + 4 + 2 * u64::from(self.offered % self.size);
        memory.write(entry, &[0, 0])?;
        self.offered = self.offered.wrapping_add(1);
        memory.store(self.at.available + 2, self.offered)?;
        memory.fence();
        Ok(memory.load(self.at.used)? & NO_NOTIFY == 0)
    }

    /// True when the device has answered, once for each message.
    pub(super) fn take<M: BufferMemory>(&mut self, memory: &M) -> Result<bool, Wrong<M::Error>> {
        let used = memory.load(self.at.used + 2)?;
        if used == self.taken {
            return Ok(false);
        }
        let answers = used.wrapping_sub(self.taken);
        let mut entry = [0; 8];
        let place = self.at.used + 4 + 8 * u64::from(self.taken % self.size);
        memory.read(place, &mut entry)?;
        let [a, b, c, d, e, f, g, h] = entry;
        let id = u32::from_le_bytes([a, b, c, d]);
        if !self.in_flight() || answers != 1 || id != 0 {
            return Err(Wrong::Answer { answers, id });
        }
        self.taken = used;
        self.written = u32::from_le_bytes([e, f, g, h]);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_byte_by_byte() {
        let element = Element {
            address: 0x0102_0304_0506_0708,
            len: 0x0a0b_0c0d,
            write: true,
        };
        let expected = [8, 7, 6, 5, 4, 3, 2, 1, 0x0d, 0x0c, 0x0b, 0x0a, 3, 0, 6, 0];
        assert_eq!(element.to_bytes(5, true, false), expected);
        let last = Element {
            write: false,
            ..element
        }
        .to_bytes(5, false, true);
        assert_eq!(last[12..], [4, 0, 0, 0]);
    }

    #[test]
    fn a_queue_is_laid_out_as_the_standard_says() {
        for size in [1, 2, 128, 256, 1 << 15] {
            let ring = Ring::new(0, size, 0x1000);
            let entries = u64::from(size);
            let at = ring.addresses();
            assert_eq!(at.descriptors % 16, 0);
            assert_eq!(at.available, at.descriptors + 16 * entries);
            assert!(at.used.is_multiple_of(4) && at.used >= at.available + 6 + 2 * entries);
            assert_eq!(Ring::bytes(size), at.used + 6 + 8 * entries - 0x1000);
        }
    }
}
