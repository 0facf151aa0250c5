//! The queues: requests of the driver, and faults for it.

use std::sync::atomic::Ordering;

use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::GuestMemory;

use super::{VirtioIommu, buffers};
use crate::domains::Domains;
use crate::fault::FaultReport;
use crate::features;
use crate::refusal::{Failed, RequestError};
use crate::wire::{FAULT_BYTES, MOST_REQUEST_BYTES, Request, Status, TAIL_BYTES};

/// Failure to serve a queue, or to serve it to its end. What was taken before stays taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// No features are negotiated.
    #[error("no features are negotiated")]
    NotNegotiated,
    /// The device goes on only after a reset.
    #[error("the device needs a reset")]
    NeedsReset,
    /// The ring is not ready, or does not lie in the guest's memory.
    #[error("the ring is not ready, or not in memory")]
    NotReady,
    /// More is available than the ring holds: the driver is broken.
    #[error("{available} chains are available in a ring of {size} descriptors")]
    Index {
        /// Chains available.
        available: u16,
        /// Descriptors of the ring.
        size: u16,
    },
    /// The ring could not be read or written. Chains may have gone back before, so that the driver is to be
    /// notified; one that was served may have not, and stays away until the driver resets the device.
    #[error("the ring cannot be read or written")]
    Ring(#[from] virtio_queue::Error),
}

/// Result of serving a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Served {
    /// Chains that went back to the driver.
    pub used: u16,
    /// Send the driver a used buffer notification.
    pub notify: bool,
    /// There is more in the queue: of requests, what has come since the start, so call again soon; of events,
    /// also the buffers for faults to come.
    pub more: bool,
}

impl<D: Domains> VirtioIommu<D> {
    /// Serves the queue of requests, number [0](crate::REQUEST_QUEUE): does what each asks for, in order,
    /// and gives it back with its status. When a DETACH or UNMAP is back with the driver, none of the
    /// endpoint's accesses by what it had is under way.
    ///
    /// Chains that are available at the start are served, and so no more than the ring has descriptors. `memory` is
    /// where the ring and its buffers lie. A chain that is no request goes back as it came, and is counted.
    ///
    /// # Errors
    ///
    /// A queue that cannot be used: see [`RingError`].
    pub fn requests<Q: QueueT, M: GuestMemory>(
        &mut self,
        queue: &mut Q,
        memory: &M,
    ) -> Result<Served, RingError> {
        let available = self.open(queue, memory)?;
        // Returned at the end, whatever happens; otherwise it is made anew.
        let mut room = std::mem::take(&mut self.room);
        let served = serve(queue, memory, available, |chain, size| {
            Some(self.serve_request(chain, size, memory, &mut room))
        });
        self.room = room;
        served
    }

    /// Tells the driver of faults on the queue of events, number [1](crate::EVENT_QUEUE): one buffer for
    /// each. Faults for which there is none are dropped, and counted (5.13.6.9); so are those of endpoints
    /// that are not known.
    ///
    /// # Errors
    ///
    /// A queue that cannot be used: see [`RingError`].
    pub fn faults<Q: QueueT, M: GuestMemory>(
        &mut self,
        queue: &mut Q,
        memory: &M,
        faults: &[FaultReport],
    ) -> Result<Served, RingError> {
        let available = self.open(queue, memory)?;
        let mut room = std::mem::take(&mut self.room);
        let known = |fault: &&FaultReport| self.endpoints.contains_key(&fault.endpoint);
        let mut left = faults.iter().filter(known).peekable();
        let mut told = 0;
        let served = serve(queue, memory, available, |chain, size| {
            let fault = left.peek()?;
            room.answer.clear();
            room.answer.extend(fault.to_bytes());
            let good = room.follow(chain, size) && room.readable() == 0;
            let writable = room.writable(memory).filter(|_| good);
            // A buffer that is too small goes back as it is (5.13.6.9.2).
            let written = match writable {
                Some(bytes) if bytes >= FAULT_BYTES as u64 => room.write(memory),
                _ => 0,
            };
            if written > 0 {
                left.next();
                told += 1;
            }
            Some(written)
        });
        self.room = room;
        self.counters.faults += told;
        self.counters.dropped += faults.len() as u64 - told;
        served
    }

    /// Chains that are available in a queue that can be used.
    fn open<Q: QueueT, M: GuestMemory>(&self, queue: &mut Q, memory: &M) -> Result<u16, RingError> {
        self.negotiated.ok_or(RingError::NotNegotiated)?;
        if self.stuck {
            return Err(RingError::NeedsReset);
        }
        if !queue.ready() || !queue.is_valid(memory) {
            return Err(RingError::NotReady);
        }
        queue.disable_notification(memory)?;
        let index = queue.avail_idx(memory, Ordering::Acquire)?;
        let (available, size) = (index.0.wrapping_sub(queue.next_avail()), queue.size());
        if available > size {
            return Err(RingError::Index { available, size });
        }
        Ok(available)
    }

    /// Does what a chain asks for. Returns the bytes that were written: 0 when it is no request.
    fn serve_request<M: GuestMemory>(
        &mut self,
        chain: DescriptorChain<&M>,
        size: u16,
        memory: &M,
        room: &mut buffers::Room,
    ) -> u32 {
        let written = self.answer(chain, size, memory, room);
        match (written, room.answer.last_chunk::<TAIL_BYTES>()) {
            (1.., Some([status, ..])) => {
                if let Some(count) = self.counters.answered.get_mut(usize::from(*status)) {
                    *count += 1;
                }
            }
            _ => self.counters.malformed += 1,
        }
        written
    }

    fn answer<M: GuestMemory>(
        &mut self,
        chain: DescriptorChain<&M>,
        size: u16,
        memory: &M,
        room: &mut buffers::Room,
    ) -> u32 {
        let most = self.config.probe_bytes as usize + TAIL_BYTES;
        // Without a tail nothing could be said, so that nothing is done either.
        let whole = room.follow(chain, size) && room.readable() <= MOST_REQUEST_BYTES as u64;
        let writable = room.writable(memory).filter(|_| whole);
        let writable = writable.and_then(|bytes| usize::try_from(bytes).ok());
        let Some(bytes) = writable.filter(|bytes| (TAIL_BYTES..=most).contains(bytes)) else {
            return 0;
        };
        room.answer.clear();
        let message = match room.read(memory) {
            Ok(message) => message,
            Err(buffers::Unreadable { address, len }) => {
                let refusal = RequestError::Unreadable { address, len };
                self.back.refused(None, &refusal);
                return finish(room, bytes, refusal.status(), memory);
            }
        };
        let request = match Request::decode(message.bytes()) {
            Ok(request) if self.is_known(&request, bytes) => request,
            _ => return 0,
        };
        room.answer.resize(bytes - TAIL_BYTES, 0);
        let done = match &request {
            _ if self.stuck => Err(RequestError::NeedsReset),
            Request::Attach(attach) => self.attach(attach),
            Request::Detach(detach) => self.detach(detach),
            Request::Map(map) => self.map(map),
            Request::Unmap(unmap) => self.unmap(unmap),
            Request::Probe(probe) => self.probe(probe, &mut room.answer),
        };
        let status = match &done {
            Ok(()) => Status::Ok,
            Err(refusal) => {
                self.back.refused(Some(&request), refusal);
                refusal.status()
            }
        };
        let written = finish(room, bytes, status, memory);
        if written == 0 {
            self.back.failed(&Failed::Unanswered { status });
        }
        written
    }

    /// Returns true if the device has such requests, with the features that are negotiated, and an answer of so many
    /// bytes.
    fn is_known(&self, request: &Request, answer: usize) -> bool {
        match request {
            Request::Attach(_) | Request::Detach(_) => answer == TAIL_BYTES,
            Request::Map(_) | Request::Unmap(_) => {
                answer == TAIL_BYTES && self.has(features::MAP_UNMAP)
            }
            Request::Probe(_) => self.has(features::PROBE),
        }
    }
}

/// Writes the answer, with the tail at the end of `bytes` bytes.
fn finish<M: GuestMemory>(
    room: &mut buffers::Room,
    bytes: usize,
    status: Status,
    memory: &M,
) -> u32 {
    room.answer.resize(bytes - TAIL_BYTES, 0);
    room.answer.extend(status.tail());
    room.write(memory)
}

/// Gives so many chains to `act`, and back with as many bytes as it says; none any more when it says none.
fn serve<'m, Q: QueueT, M: GuestMemory>(
    queue: &mut Q,
    memory: &'m M,
    available: u16,
    mut act: impl FnMut(DescriptorChain<&'m M>, u16) -> Option<u32>,
) -> Result<Served, RingError> {
    let size = queue.size();
    let mut served = Served::default();
    for _ in 0..available {
        let Some(chain) = queue.pop_descriptor_chain(memory) else {
            break;
        };
        let head = chain.head_index();
        let Some(bytes) = act(chain, size) else {
            queue.set_next_avail(queue.next_avail().wrapping_sub(1));
            break;
        };
        // One that is no descriptor of the ring cannot be given back.
        if head < size {
            queue.add_used(memory, head, bytes)?;
            served.used += 1;
        }
    }
    served.more = queue.enable_notification(memory)?;
    served.notify = served.used > 0 && queue.needs_notification(memory)?;
    Ok(served)
}
