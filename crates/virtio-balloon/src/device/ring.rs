//! A queue's ring, as one drain sees it: what is available at its start, and no more than a budget.

use std::sync::atomic::Ordering;
use std::vec::Vec;

use virtio_queue::QueueT;
use vm_memory::GuestMemory;

use super::chain::{Piece, follow};
use super::error::QueueError;
use crate::queues::Queue;
use crate::refusal::{Refusal, Refusals};

/// Result of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Drained {
    /// Chains that went back to the driver.
    pub used: u16,
    /// Send the driver a used buffer notification.
    pub notify: bool,
    /// There is more in the queue than one drain takes: call again soon.
    pub more: bool,
    /// A message of deflateq is held, since devices could not be given its pages: call again when that
    /// may have changed. Until then deflateq stands still.
    pub held: bool,
}

/// Bytes of a descriptor.
const DESCRIPTOR: usize = 16;

/// Gives a buffer back with `written` bytes in it. Where that fails it can be tried again.
pub(super) fn give_back_or_keep<Q: QueueT>(
    ring: &mut Q,
    memory: &impl GuestMemory,
    head: u16,
    written: u32,
) -> Result<(), virtio_queue::Error> {
    let next = ring.next_used();
    ring.add_used(memory, head, written)
        // The entry may be there, and the index that shows it is not.
        .inspect_err(|_| ring.set_next_used(next))
}

/// The ring of a queue, as one drain sees it.
pub(super) struct Ring<'a, Q, G> {
    pub(super) queue: Queue,
    ring: &'a mut Q,
    pub(super) memory: &'a G,
    /// Chains that may still be taken.
    left: u16,
    /// Bytes of messages and descriptors that may still be looked at; the last chain may go beyond.
    budget: usize,
    pub(super) used: u16,
}

impl<'a, Q: QueueT, G: GuestMemory> Ring<'a, Q, G> {
    pub(super) fn new(
        queue: Queue,
        ring: &'a mut Q,
        memory: &'a G,
        budget: usize,
    ) -> Result<Self, QueueError> {
        if !ring.ready() || !ring.is_valid(memory) {
            return Err(QueueError::NotReady(queue));
        }
        ring.disable_notification(memory)
            .map_err(|cause| QueueError::Ring(queue, cause))?;
        let index = ring
            .avail_idx(memory, Ordering::Acquire)
            .map_err(|cause| QueueError::Ring(queue, cause))?;
        let (available, size) = (index.0.wrapping_sub(ring.next_avail()), ring.size());
        if available > size {
            return Err(QueueError::Index {
                queue,
                available,
                size,
            });
        }
        Ok(Self {
            queue,
            ring,
            memory,
            left: available,
            budget,
            used: 0,
        })
    }

    /// The next chain: its first descriptor, and its buffers unless it is refused.
    pub(super) fn next(
        &mut self,
        pieces: &mut Vec<Piece>,
        refusals: &mut Refusals,
    ) -> Option<(u16, bool)> {
        if self.budget == 0 {
            return None;
        }
        self.left = self.left.checked_sub(1)?;
        let chain = self.ring.pop_descriptor_chain(self.memory)?;
        let head = chain.head_index();
        let size = self.ring.size();
        if head >= size {
            pieces.clear();
            refusals.add(Refusal::Head { head, size });
            return Some((head, false));
        }
        let whole = follow(chain, size, pieces, refusals);
        self.spend(DESCRIPTOR * pieces.len());
        Some((head, whole))
    }

    pub(super) fn spend(&mut self, bytes: usize) {
        self.budget = self.budget.saturating_sub(bytes);
    }

    /// Returns true if the ring has this descriptor.
    pub(super) fn has(&self, head: u16) -> bool {
        head < self.ring.size()
    }

    /// Gives a chain back, with so many bytes written to its buffers. One that is not a descriptor of the ring was
    /// counted before, and cannot be.
    pub(super) fn give_back(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        if self.has(head) {
            let result = self.ring.add_used(self.memory, head, written);
            result.map_err(|cause| QueueError::Ring(self.queue, cause))?;
            self.used += 1;
        }
        Ok(())
    }

    pub(super) fn finish(self, held: bool) -> Result<Drained, QueueError> {
        let error = |cause| QueueError::Ring(self.queue, cause);
        let more = self.ring.enable_notification(self.memory).map_err(error)?;
        let notify = self.used > 0 && self.ring.needs_notification(self.memory).map_err(error)?;
        Ok(Drained {
            used: self.used,
            notify,
            more: more && !held,
            held,
        })
    }
}
