//! Emptying the queues.
//!
//! # Protocol
//!
//! Messages of inflateq, and reports, are all read first; their parts are merged across them. Then, for
//! each batch of merged parts, devices let go ([`Releaser::release`]), and what they let go of is discarded.
//! Only then do the messages go back: all that the driver sees used has been done. A page is not in
//! use between the two (VIRTIO 1.3, 5.5.6.1, 5.5.6.7.1).
//!
//! Messages of deflateq are taken one by one. Each is read, what it names leaves the balloon, devices
//! are given it back ([`Releaser::restore`]), and only then it goes back to the driver. One whose pages devices
//! cannot be given is held, and those behind it stay in the queue. Messages before it have gone back, and
//! only the runs that devices lack are tried again.
//!
//! A drain takes no more chains than the ring has descriptors, and no new one after
//! [`drain_bytes`](super::BalloonSettings::drain_bytes) bytes of messages and descriptors; what is left is for
//! the next time.

use std::mem;
use std::time::Instant;
use std::vec::Vec;

use runs::{GuestAddr, Span};
use virtio_queue::QueueT;
use vm_memory::GuestMemory;

use super::BalloonDevice;
use super::back::{Back, add, bytes};
use super::chain::{Piece, Wire, gather, read};
use super::discarder::Discarder;
use super::error::QueueError;
use super::initialized::{Bitmaps, bitmap_behind};
use super::monitor::{BalloonEvent, BalloonMonitor, Unrestored};
use super::ring::{Drained, Ring, give_back_or_keep};
use super::state::PendingDeflate;
use crate::collect::RunCollector;
use crate::config::BalloonConfig;
use crate::dma::Releaser;
use crate::features::{Features, InitBit};
use crate::map::{MemoryMap, Part, Region, Resolver};
use crate::queues::Queue;
use crate::refusal::{Refusal, Refusals};
use crate::stats::{ByteOrder, Stats};

/// Room for parts of one drain, before they are sorted and handed on.
const PARTS: usize = 1 << 15;

/// Buffers of a drain; kept, so that it does not allocate each time.
#[derive(Debug, Default)]
pub(super) struct Room {
    pieces: Vec<Piece>,
    message: Vec<u8>,
    parts: Vec<Part>,
    heads: Vec<u16>,
    bitmaps: Bitmaps,
}

/// Pages that messages name: addresses outside of memory are refused, the rest is merged.
struct Named<'a, T> {
    resolver: Resolver<'a, T>,
    outside: Refusals,
    collector: RunCollector<'a>,
}

impl<'a, T> Named<'a, T> {
    fn new(regions: &'a [Region<T>], room: &'a mut [Part]) -> Self {
        Self {
            resolver: MemoryMap::known(regions).into(),
            outside: Refusals::new(),
            collector: RunCollector::new(room),
        }
    }

    #[inline]
    fn push(&mut self, run: Span<GuestAddr>, mut act: impl FnMut(&[Part])) {
        let (outside, collector) = (&mut self.outside, &mut self.collector);
        self.resolver
            .resolve(run, outside, |part| collector.push(part, &mut act));
    }

    /// Hands on what is left, and counts what was refused.
    fn finish(&mut self, refusals: &mut Refusals, act: impl FnMut(&[Part])) {
        self.collector.finish(act);
        refusals.append(&mem::take(&mut self.outside));
    }
}

impl<D: Discarder<T>, A: Releaser<T>, M: BalloonMonitor, T> BalloonDevice<D, A, M, T> {
    /// Empties a queue: takes everything that is in it, does what it asks for, and then gives it back.
    /// When a message is back with the driver, what it asked for has happened: pages of inflateq, and
    /// reports, were let go of by devices and discarded; pages of deflateq are seen by devices again.
    /// Failures were reported to the monitor before.
    ///
    /// A drain takes no more chains than the ring has descriptors, and no new one after
    /// [`drain_bytes`](super::BalloonSettings::drain_bytes) bytes of messages and descriptors.
    ///
    /// `memory` is where the ring and its buffers lie. Invalid contents are refused, counted
    /// ([`refusals`](BalloonDevice::refusals)) and given back; the queue goes on.
    ///
    /// # Errors
    ///
    /// A queue cannot be used: see [`QueueError`].
    pub fn drain<Q: QueueT, G: GuestMemory>(
        &mut self,
        queue: Queue,
        ring: &mut Q,
        memory: &G,
    ) -> Result<Drained, QueueError> {
        self.usable(queue)?;
        let begun = Instant::now();
        let mut ring = Ring::new(queue, ring, memory, self.settings.drain_bytes.max(1))?;
        // Returned at the end, whatever happens; otherwise it is made anew.
        let mut room = mem::take(&mut self.room);
        room.parts.resize(PARTS, Part::default());
        room.heads.clear();
        let result = match queue {
            Queue::Inflate => self.inflate(&mut ring, &mut room),
            Queue::Deflate => self.deflate(&mut ring, &mut room),
            Queue::Stats => self.statistics(&mut ring, &mut room),
            Queue::FreePage => self.hints(&mut ring, &mut room),
            Queue::Reporting => self.reports(&mut ring, &mut room),
        };
        self.room = room;
        let counters = &mut self.back.counters;
        add(&mut counters.chains, ring.used.into());
        counters.busy += begun.elapsed();
        result?;
        ring.finish(queue == Queue::Deflate && self.held.is_some())
    }

    /// Asks the guest for statistics: gives back the buffer that the device has, so that the driver
    /// fills another one. That comes as [`BalloonMonitor::stats`] out of a later drain of statsq. True when the
    /// driver is to be notified.
    ///
    /// # Errors
    ///
    /// [`QueueError::NoBuffer`] until the driver has given a buffer, and until it has answered.
    pub fn request_stats<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Q,
        memory: &G,
    ) -> Result<bool, QueueError> {
        self.usable(Queue::Stats)?;
        if !ring.ready() || !ring.is_valid(memory) {
            return Err(QueueError::NotReady(Queue::Stats));
        }
        let head = self.stats.buffer.ok_or(QueueError::NoBuffer)?;
        let error = |cause| QueueError::Ring(Queue::Stats, cause);
        give_back_or_keep(ring, memory, head, 0).map_err(error)?;
        self.stats.buffer = None;
        self.stats.asked = true;
        ring.needs_notification(memory).map_err(error)
    }

    /// Fails unless this queue can be used now.
    fn usable(&self, queue: Queue) -> Result<(), QueueError> {
        self.negotiated.ok_or(QueueError::NotNegotiated)?;
        if self.needs_reset {
            return Err(QueueError::NeedsReset);
        }
        if self.number(queue).is_none() {
            return Err(QueueError::NoQueue(queue));
        }
        Ok(())
    }

    fn inflate<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Ring<'_, Q, G>,
        room: &mut Room,
    ) -> Result<(), QueueError> {
        let wire = self.wire();
        let init = self.settings.init_on_inflate.map(InitBit::feature);
        let asks = init.is_some_and(|init| self.has(init));
        // Discarded pages hold zeros, and not what this guest takes for initialized.
        self.back.zeros = (asks && !self.poisoned()).then(Vec::new);
        room.bitmaps.clear();
        let regions = self.memory.regions();
        let mut named = Named::new(&regions, &mut room.parts);
        while let Some((head, whole)) = ring.next(&mut room.pieces, &mut self.refusals) {
            room.heads.push(head);
            if !whole {
                continue;
            }
            let read = match asks {
                true => bitmap_behind(&room.pieces, ring.memory, &mut self.refusals),
                false => Some(room.pieces.len()),
            };
            let Some(read) = read else { continue };
            let (pieces, behind) = room.pieces.split_at(read);
            let (back, memory) = (&mut self.back, &mut self.memory);
            let message = (pieces, &mut room.message);
            let whole = wire.decode(message, ring.memory, &mut self.refusals, |run| {
                named.push(run, |parts| back.inflate(memory, parts));
            });
            ring.spend(room.message.len());
            if asks && whole {
                let chain = room.heads.len() - 1;
                room.bitmaps.ask(chain, &room.message, behind);
            }
        }
        let (back, memory) = (&mut self.back, &mut self.memory);
        named.finish(&mut self.refusals, |parts| back.inflate(memory, parts));
        if self.has(Features::MUST_TELL_HOST) {
            self.memory.remember();
        } else {
            self.memory.forget();
        }
        room.bitmaps
            .sort(self.back.zeros.take().unwrap_or_default());
        for (nr, &head) in room.heads.iter().enumerate() {
            let written = room.bitmaps.write(nr, ring.memory, &mut self.refusals);
            ring.give_back(head, written)?;
        }
        Ok(())
    }

    fn deflate<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Ring<'_, Q, G>,
        room: &mut Room,
    ) -> Result<(), QueueError> {
        let wire = self.wire();
        let regions = self.memory.regions();
        let mut named = Named::new(&regions, &mut room.parts);
        let then = self.settings.unrestored;
        if let Some(held) = self.held.take() {
            let mut lacking = Vec::new();
            let mut parts = Vec::new();
            let map = self.memory.map();
            for run in &held.runs {
                // Memory that was removed is not lacking.
                map.resolve(*run, &mut Refusals::new(), |part| parts.push(part));
            }
            self.back.restore(map, &parts, then, &mut lacking);
            if self.hold(held.head, lacking) {
                return Ok(());
            }
            ring.give_back(held.head, 0)?;
        }
        while let Some((head, whole)) = ring.next(&mut room.pieces, &mut self.refusals) {
            let mut lacking = Vec::new();
            if whole {
                let (back, memory) = (&mut self.back, &mut self.memory);
                let mut take = |parts: &[Part]| {
                    add(&mut back.counters.deflated, bytes(parts));
                    memory.deflate(parts);
                    back.restore(memory.map(), parts, then, &mut lacking);
                };
                let message = (&room.pieces[..], &mut room.message);
                wire.decode(message, ring.memory, &mut self.refusals, |run| {
                    named.push(run, &mut take);
                });
                ring.spend(room.message.len());
                named.finish(&mut self.refusals, &mut take);
            }
            if self.hold(head, lacking) {
                break;
            }
            ring.give_back(head, 0)?;
        }
        Ok(())
    }

    /// Devices lack `runs` of the message at `head`. True when it is held.
    fn hold(&mut self, head: u16, runs: Vec<Span<GuestAddr>>) -> bool {
        if runs.is_empty() || self.settings.unrestored == Unrestored::HandBack {
            return false;
        }
        self.held = Some(PendingDeflate { head, runs });
        if self.settings.unrestored == Unrestored::NeedsReset {
            self.needs_reset = true;
            self.back.monitor.event(BalloonEvent::NeedsReset);
        }
        true
    }

    fn statistics<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Ring<'_, Q, G>,
        room: &mut Room,
    ) -> Result<(), QueueError> {
        while let Some((head, whole)) = ring.next(&mut room.pieces, &mut self.refusals) {
            // Entries of unknown tags may come, too, but not without end.
            let most = 16 * Stats::MOST_BYTES;
            let (pieces, message) = (&room.pieces, &mut room.message);
            let whole = whole && read(pieces, ring.memory, most, message, &mut self.refusals);
            ring.spend(room.message.len());
            if !ring.has(head) {
                continue;
            }
            if let Some(before) = self.stats.buffer.replace(head) {
                self.refusals.add(Refusal::Spare { head });
                ring.give_back(before, 0)?;
            }
            // Drivers of old did not fill their first buffer (5.5.6.3.3).
            let first = !mem::replace(&mut self.stats.first_seen, true);
            let asked = mem::take(&mut self.stats.asked);
            if !whole || first && self.is_legacy() {
                continue;
            }
            let stats = Stats::decode(&room.message, self.order(), &mut self.refusals);
            self.back.monitor.stats(&stats, asked);
        }
        Ok(())
    }

    fn reports<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Ring<'_, Q, G>,
        room: &mut Room,
    ) -> Result<(), QueueError> {
        // Discarded pages hold zeros; those of a guest that poisons must hold something else (5.5.6.7.2).
        let take = !self.poisoned() && !self.devices();
        self.pages(
            ring,
            room,
            |_| take,
            |back, memory, parts| back.report(memory, parts),
        )
    }

    fn hints<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Ring<'_, Q, G>,
        room: &mut Room,
    ) -> Result<(), QueueError> {
        let devices = self.devices();
        let take = |this: &mut Self| {
            let current = this.config.free_page_hint_cmd_id;
            let good = this.hints.begun == Some(current) && current >= BalloonConfig::HINT_FIRST;
            if !good || devices {
                add(&mut this.back.counters.hints_ignored, 1);
            }
            good && !devices
        };
        self.pages(ring, room, take, |back, memory, parts| {
            back.hint(memory, parts)
        })
    }

    /// Chains whose buffers are free pages, and commands of the driver about hints.
    fn pages<Q: QueueT, G: GuestMemory>(
        &mut self,
        ring: &mut Ring<'_, Q, G>,
        room: &mut Room,
        mut take: impl FnMut(&mut Self) -> bool,
        mut act: impl FnMut(&mut Back<D, A, M>, &super::memory::Memory<T>, &[Part]),
    ) -> Result<(), QueueError> {
        let regions = self.memory.regions();
        let mut named = Named::new(&regions, &mut room.parts);
        while let Some((head, whole)) = ring.next(&mut room.pieces, &mut self.refusals) {
            room.heads.push(head);
            if !whole {
                continue;
            }
            let readable = room.pieces.iter().take_while(|piece| !piece.writable);
            let (commands, pages) = room.pieces.split_at(readable.count());
            if !commands.is_empty() && ring.queue == Queue::FreePage {
                // Hints of one command are not to be merged with those of the next.
                let (back, memory) = (&mut self.back, &self.memory);
                named.finish(&mut self.refusals, |parts| act(back, memory, parts));
                let message = &mut room.message;
                if read(commands, ring.memory, 4, message, &mut self.refusals) {
                    self.command(message);
                }
            } else if let Some(wrong) = commands.first() {
                self.refusals.add(wrong.wrong_direction());
                continue;
            }
            if pages.is_empty() || !take(self) {
                continue;
            }
            let (back, memory) = (&mut self.back, &self.memory);
            gather(pages, &mut self.refusals, |run| {
                named.push(run, |parts| act(back, memory, parts));
            });
        }
        let (back, memory) = (&mut self.back, &self.memory);
        named.finish(&mut self.refusals, |parts| act(back, memory, parts));
        for &head in &room.heads {
            ring.give_back(head, 0)?;
        }
        Ok(())
    }

    /// The driver names the command that its hints belong to, or says that it stops.
    fn command(&mut self, message: &[u8]) {
        let Ok(bytes) = message.try_into() else {
            let bytes = message.len();
            return self.refusals.add(Refusal::Length { bytes, unit: 4 });
        };
        let id = match self.order() {
            ByteOrder::Little => u32::from_le_bytes(bytes),
            ByteOrder::Big => u32::from_be_bytes(bytes),
        };
        if id == BalloonConfig::HINT_STOP {
            self.hints.stopped = true;
            if self.hints.begun.take().is_some() {
                self.back.monitor.event(BalloonEvent::HintsEnd);
            }
        } else if id == self.config.free_page_hint_cmd_id && id >= BalloonConfig::HINT_FIRST {
            self.hints.begun = Some(id);
            self.back.monitor.event(BalloonEvent::HintsBegin { id });
        } else {
            // The hints belong to a command that is over.
            self.hints.begun = None;
        }
    }

    /// Encoding of messages of inflateq and deflateq.
    fn wire(&self) -> Wire {
        match self.settings.bulk {
            Some(bulk) if self.has(bulk.bit.feature()) => Wire::Bulk(bulk.message_bytes as usize),
            _ => Wire::Pfns(self.order()),
        }
    }
}
