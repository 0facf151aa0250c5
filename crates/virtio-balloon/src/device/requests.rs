//! Requests of the host: which pages does the guest not use? (`docs/balloon-bulk.md`, "Requests of the
//! host".)
//!
//! The driver gives a buffer, which the device keeps until the monitor asks. The answer comes as messages
//! on the same queue, and behind it the next buffer.

use std::vec::Vec;

use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use super::Device;
use super::back::in_guest;
use super::chain::{Piece, Wire, read};
use super::discarder::Discarder;
use super::error::QueueError;
use super::monitor::{Event, Monitor};
use super::queues::Room;
use super::ring::{Ring, give_back_or_keep};
use super::state::RequestState;
use crate::collect::RunCollector;
use crate::dma::Dma;
use crate::format::{HostRequest, ResponseHeader};
use crate::map::{MemoryMap, Part, Resolver};
use crate::queues::Queue;
use crate::refusal::{Refusal, Refusals};

impl<D: Discarder<T>, A: Dma<T>, M: Monitor, T> Device<D, A, M, T> {
    /// Asks the guest which pages it does not use. They come as [`Monitor::unused`] out of later drains
    /// of req_vq. Returns the request's id, and whether the driver is to be notified.
    ///
    /// # Errors
    ///
    /// [`QueueError::NoBuffer`] until the driver has given a buffer, and until it has answered.
    pub fn request_unused<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Q,
        memory: &G,
    ) -> Result<(u16, bool), QueueError> {
        const BYTES: u32 = HostRequest::BYTES as u32;
        self.usable(Queue::Requests)?;
        if !ring.ready() || !ring.is_valid(memory) {
            return Err(QueueError::NotReady(Queue::Requests));
        }
        let (head, address) = self.requests.buffer.ok_or(QueueError::NoBuffer)?;
        let id = self.requests.latest.wrapping_add(1).max(1);
        let request = HostRequest {
            command: HostRequest::UNUSED_PAGES,
            param: id.into(),
        };
        let place = GuestAddress(address);
        let error = |cause| QueueError::Ring(Queue::Requests, cause);
        if memory.write_slice(&request.to_bytes(), place).is_err() {
            let len = BYTES;
            self.refusals.add(Refusal::Buffer { address, len });
            return Err(QueueError::NoBuffer);
        }
        give_back_or_keep(ring, memory, head, BYTES).map_err(error)?;
        self.requests = RequestState {
            buffer: None,
            latest: id,
            asked: Some(id),
        };
        Ok((id, ring.needs_notification(memory).map_err(error)?))
    }

    /// Buffers for requests, and answers to them.
    pub(super) fn answers<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Ring<'_, Q, G>,
        room: &mut Room,
    ) -> Result<(), QueueError> {
        let regions = self.memory.regions();
        let map = MemoryMap::known(&regions);
        let Wire::Bulk(format, most) = self.wire() else {
            return Ok(());
        };
        let mut resolver = Resolver::from(map);
        let mut outside = Refusals::new();
        let mut collector = RunCollector::new(&mut room.parts);
        let mut runs = Vec::new();
        while let Some((head, whole)) = ring.next(&mut room.pieces, &mut self.refusals) {
            let writable = room.pieces.first().is_some_and(|piece| piece.writable);
            if whole && writable {
                if let Some(back) = self.keep(head, &room.pieces) {
                    ring.give_back(back)?;
                }
                continue;
            }
            let (pieces, message) = (&room.pieces, &mut room.message);
            let whole = whole && read(pieces, ring.memory, most, message, &mut self.refusals);
            ring.spend(message.len());
            let answered = if whole { self.answered(message) } else { None };
            if let Some((id, flag)) = answered {
                let monitor = &mut self.back.monitor;
                let mut unused = |parts: &[Part]| {
                    in_guest(map, parts, &mut runs);
                    monitor.unused(id, &runs);
                };
                format.decode(message, &mut self.refusals, |run| {
                    resolver.resolve(run, &mut outside, |part| collector.push(part, &mut unused));
                });
                // Each message by itself: the next may answer another request.
                collector.finish(unused);
                if flag == ResponseHeader::DONE {
                    self.requests.asked = None;
                    monitor.event(Event::UnusedEnd { id });
                }
            }
            ring.give_back(head)?;
        }
        self.refusals.append(&outside);
        Ok(())
    }

    /// Keeps a buffer for the next request. Returns which goes back: one that is of no use, or the one
    /// before.
    fn keep(&mut self, head: u16, pieces: &[Piece]) -> Option<u16> {
        let [Piece { address, len, .. }] = *pieces else {
            self.refusals.add(Refusal::Chain { head });
            return Some(head);
        };
        let (bytes, unit) = (len as usize, HostRequest::BYTES);
        if bytes < unit {
            self.refusals.add(Refusal::Length { bytes, unit });
            return Some(head);
        }
        let (before, _) = self.requests.buffer.replace((head, address))?;
        self.refusals.add(Refusal::Spare { head });
        Some(before)
    }

    /// The request that this message answers, and its flag. Both are taken out of the header: what is left
    /// is a message of pages.
    fn answered(&mut self, message: &mut [u8]) -> Option<(u16, u8)> {
        let Some(head) = message.first_chunk_mut::<{ ResponseHeader::BYTES }>() else {
            let (bytes, unit) = (message.len(), ResponseHeader::BYTES);
            self.refusals.add(Refusal::Length { bytes, unit });
            return None;
        };
        let header = ResponseHeader::from_bytes(*head);
        let ResponseHeader {
            command, flag, id, ..
        } = header;
        let known = u16::from(command) == HostRequest::UNUSED_PAGES && flag <= ResponseHeader::DONE;
        if !known || self.requests.asked != Some(id) {
            let [a, b, c, d, ..] = *head;
            let found = u32::from_le_bytes([a, b, c, d]);
            self.refusals.add(Refusal::Header { found });
            return None;
        }
        *head = ResponseHeader::of_pages(header.data_len as usize).to_bytes();
        Some((id, flag))
    }
}
