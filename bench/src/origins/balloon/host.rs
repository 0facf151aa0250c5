//! The host's end: the device, or what hosts do page by page.

use std::sync::Arc;

use hostmem::{Backing, Discard, Mapping};
use runs::{GuestAddr, Offset, Span};
use virtio_balloon::device::{BalloonDevice, BalloonSettings, Bulk, Discarder, NotDiscarded};
use virtio_balloon::driver::QueueAddresses;
use virtio_balloon::{MemoryMap, Part, Refusals, Region, WIRE_PAGE};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestMemoryMmap};

use super::{BLOCK, Way, clock};

/// Description of a failed step.
type Failed = &'static str;

/// Memory of a mapping goes back to the machine, timed.
pub(super) struct Timed {
    discard: Discard,
    offsets: Vec<Span<Offset>>,
    seconds: f64,
}

impl Discarder for Timed {
    fn discard(
        &mut self,
        _: MemoryMap<'_>,
        parts: &[Part],
        failed: &mut dyn FnMut(Part, NotDiscarded),
    ) -> u64 {
        let begun = clock();
        self.offsets.clear();
        // There is one region.
        self.offsets.extend(parts.iter().map(|part| part.offsets));
        let done = self.discard.discard(&self.offsets, &mut |offsets, _| {
            failed(Part::new(0, offsets), NotDiscarded::NotPages);
        });
        self.seconds += clock() - begun;
        done.map_or(0, |done| done.bytes)
    }
}

/// Discard page by page.
struct Pages {
    discard: Discard,
    /// The guest's memory, and the pages of what backs it.
    memory: Span<GuestAddr>,
    backing: u64,
    /// Offsets of the pages of a message.
    offsets: Vec<u64>,
    /// In a pool: bytes of the huge page that has come so far, in order, and the next offset.
    come: (u64, u64),
    seconds: f64,
    discarded: u64,
    messages: u64,
}

impl Pages {
    fn message(&mut self, message: &[u8]) -> Result<(), Failed> {
        self.messages += 1;
        self.offsets.clear();
        let memory = [Region::new(self.memory)];
        let map = MemoryMap::new(&memory).map_err(|_| "no memory of a guest")?;
        let mut refusals = Refusals::new();
        for number in message.chunks_exact(4) {
            let number = u32::from_le_bytes(number.try_into().unwrap_or_default());
            let page = u64::from(number) * WIRE_PAGE;
            map.resolve(Span::new(page, WIRE_PAGE), &mut refusals, |page| {
                self.offsets.push(page.offsets.start);
            });
        }
        if refusals.total() != 0 {
            return Err("a page is not the guest's");
        }
        let (begun, backing) = (clock(), self.backing);
        for offset in &self.offsets {
            let offset = *offset;
            // As QEMU: a huge page is discarded when all of it has come in order.
            self.come = match self.come {
                (bytes, next) if next == offset && offset % backing != 0 => {
                    (bytes + WIRE_PAGE, next + WIRE_PAGE)
                }
                _ => (WIRE_PAGE, offset + WIRE_PAGE),
            };
            if self.come.0 == backing {
                let page = [Span::new(offset + WIRE_PAGE - backing, backing)];
                let done = self.discard.discard(&page, &mut |_, _| ());
                self.discarded += done.map_err(|_| "the kernel refuses to discard")?.bytes;
            }
        }
        self.seconds += clock() - begun;
        Ok(())
    }
}

/// The device, its rings, and its time.
pub(super) struct Host {
    pub(super) device: BalloonDevice<Timed>,
    rings: Vec<(u16, Queue)>,
    memory: GuestMemoryMmap,
    pages: Option<Pages>,
    /// Seconds of all drains.
    pub(super) busy: f64,
}

impl Host {
    pub(super) fn new(
        way: Way,
        mapping: &Arc<Mapping>,
        guest: Span<GuestAddr>,
        memory: GuestMemoryMmap,
    ) -> Result<Self, Failed> {
        let settings = BalloonSettings {
            bulk: (way == Way::Bitmaps).then(Bulk::default),
            ..BalloonSettings::default()
        };
        let discard = || {
            let discard = Discard::new(mapping.clone());
            discard.map_err(|_| "such memory cannot be discarded")
        };
        let timed = Timed {
            discard: discard()?,
            offsets: Vec::new(),
            seconds: 0.0,
        };
        // Nothing less than a whole one is free, transparent or not.
        let page = match mapping.backing() {
            Backing::Thp => BLOCK,
            backing => backing.page(),
        };
        let pages = match way {
            Way::PageByPage => Some(Pages {
                discard: discard()?,
                memory: guest,
                backing: mapping.backing().page(),
                offsets: Vec::new(),
                come: (0, 0),
                seconds: 0.0,
                discarded: 0,
                messages: 0,
            }),
            Way::Numbers | Way::Bitmaps => None,
        };
        let region = Region {
            guest,
            page,
            memory: (),
        };
        let device = BalloonDevice::new(settings, [region], timed, (), ());
        Ok(Self {
            device: device.map_err(|_| "the device refuses the memory")?,
            rings: Vec::new(),
            memory,
            pages,
            busy: 0.0,
        })
    }

    pub(super) fn enable(
        &mut self,
        number: u16,
        size: u16,
        at: QueueAddresses,
    ) -> Result<(), Failed> {
        let mut ring = Queue::new(size).map_err(|_| "no such size of a queue")?;
        ring.set_desc_table_address(Some(at.descriptors as u32), Some(0));
        ring.set_avail_ring_address(Some(at.available as u32), Some(0));
        ring.set_used_ring_address(Some(at.used as u32), Some(0));
        ring.set_ready(true);
        self.rings.push((number, ring));
        Ok(())
    }

    /// Empties the queue of this number.
    pub(super) fn drain(&mut self, number: u16) -> Result<(), Failed> {
        let begun = clock();
        let ring = self.rings.iter_mut().find(|ring| ring.0 == number);
        let (_, ring) = ring.ok_or("no such queue")?;
        match &mut self.pages {
            Some(pages) => {
                while let Some(chain) = ring.pop_descriptor_chain(&self.memory) {
                    let head = chain.head_index();
                    for buffer in chain {
                        let mut message = vec![0; buffer.len() as usize];
                        let read = self.memory.read_slice(&mut message, buffer.addr());
                        read.map_err(|_| "no memory")?;
                        pages.message(&message)?;
                    }
                    let used = ring.add_used(&self.memory, head, 0);
                    used.map_err(|_| "no memory")?;
                }
            }
            None => {
                let queue = self.device.queue(number).ok_or("no such queue")?;
                loop {
                    let drained = self.device.drain(queue, ring, &self.memory);
                    if !drained.map_err(|_| "the device is broken")?.more {
                        break;
                    }
                }
            }
        }
        self.busy += clock() - begun;
        Ok(())
    }

    /// Messages that have come.
    pub(super) fn messages(&self) -> u64 {
        let pages = self.pages.as_ref().map(|pages| pages.messages);
        pages.unwrap_or_else(|| self.device.counters().chains)
    }

    /// Bytes that were discarded, and seconds of that.
    pub(super) fn discarded(&mut self) -> (u64, f64) {
        match &self.pages {
            Some(pages) => (pages.discarded, pages.seconds),
            None => {
                let bytes = self.device.counters().discarded;
                (bytes, self.device.discarder().seconds)
            }
        }
    }
}
