//! The host's end: the device, or what hosts do page by page.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use hostmem::{Backing, Discard, Mapping};
use runs::Span;
use virtio_balloon::device::{Bulk, Device, NotDiscarded, Region, Settings};
use virtio_balloon::driver::QueueAddresses;
use virtio_balloon::{BulkFormat, GuestRam, Refusals, WIRE_PAGE};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::measure::clock;

/// How pages are told and taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    PageByPage,
    Numbers,
    Bulk(BulkFormat),
}

/// Memory of a mapping goes back to the machine, timed.
pub(crate) struct Timed {
    discard: Discard,
    base: u64,
    offsets: Vec<Span>,
    pub(crate) seconds: f64,
}

impl virtio_balloon::device::Discard for Timed {
    fn discard(&mut self, runs: &[Span], failed: &mut dyn FnMut(Span, NotDiscarded)) -> u64 {
        let begun = clock();
        let base = self.base;
        self.offsets.clear();
        let offsets = runs.iter().map(|run| Span::new(run.start - base, run.len));
        self.offsets.extend(offsets);
        let done = self.discard.discard(&self.offsets, &mut |part, _| {
            failed(
                Span::new(part.start + base, part.len),
                NotDiscarded::NotPages,
            );
        });
        self.seconds += clock() - begun;
        done.unwrap().bytes
    }
}

/// What is discarded page by page.
pub(crate) struct Pages {
    mapping: Arc<Mapping>,
    memory: Span,
    /// Offsets of the pages of a message.
    offsets: Vec<u64>,
    /// In a pool: bytes of the huge page that has come so far, in order, and the next offset.
    come: (u64, u64),
    pub(crate) seconds: f64,
    pub(crate) discarded: u64,
}

impl Pages {
    fn message(&mut self, message: &[u8]) {
        self.offsets.clear();
        let memory = [self.memory];
        let ram = GuestRam::new(&memory).unwrap();
        let mut refusals = Refusals::new();
        for number in message.as_chunks::<4>().0 {
            let page = u64::from(u32::from_le_bytes(*number)) * WIRE_PAGE;
            ram.keep(Span::new(page, WIRE_PAGE), &mut refusals, |page| {
                self.offsets.push(page.start - self.memory.start);
            });
        }
        assert_eq!(refusals.total(), 0);
        let begun = clock();
        let backing = self.mapping.backing().page();
        for nr in 0..self.offsets.len() {
            let offset = self.offsets[nr];
            if backing == WIRE_PAGE {
                self.discard(offset, WIRE_PAGE);
                continue;
            }
            // As QEMU: a huge page is discarded when all of it has come in order.
            self.come = match self.come {
                (bytes, next) if next == offset && !offset.is_multiple_of(backing) => {
                    (bytes + WIRE_PAGE, next + WIRE_PAGE)
                }
                _ => (WIRE_PAGE, offset + WIRE_PAGE),
            };
            if self.come.0 == backing {
                self.discard(offset + WIRE_PAGE - backing, backing);
            }
        }
        self.seconds += clock() - begun;
    }

    fn discard(&mut self, offset: u64, len: u64) {
        let failed = match self.mapping.fd() {
            // SAFETY: the call touches the file alone; whoever has it mapped finds zeros.
            Some(file) => unsafe {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64)
            },
            // SAFETY: the range lies in the mapping, whose bytes are atomic cells: they may become
            // zeros at any time.
            None => unsafe {
                let address = (self.mapping.address() + offset) as *mut libc::c_void;
                libc::madvise(address, len as usize, libc::MADV_DONTNEED)
            },
        };
        assert_eq!(failed, 0, "{}", std::io::Error::last_os_error());
        self.discarded += len;
    }
}

/// The device, its rings, and its time.
pub(crate) struct Host {
    pub(crate) device: Device<Timed>,
    rings: Vec<(u16, Queue)>,
    memory: GuestMemoryMmap,
    pub(crate) pages: Option<Pages>,
    /// Seconds of all drains.
    pub(crate) busy: f64,
}

impl Host {
    pub(crate) fn new(
        way: Way,
        mapping: &Arc<Mapping>,
        guest: Span,
        memory: GuestMemoryMmap,
    ) -> Self {
        let settings = Settings {
            bulk: match way {
                Way::Bulk(format) => Some(Bulk::new(format)),
                _ => None,
            },
            ..Settings::default()
        };
        let timed = Timed {
            discard: Discard::new(mapping.clone()).unwrap(),
            base: guest.start,
            offsets: Vec::new(),
            seconds: 0.0,
        };
        // Nothing less than a whole one is free, transparent or not.
        let page = match mapping.backing() {
            Backing::Thp => 2 << 20,
            backing => backing.page(),
        };
        let pages = (way == Way::PageByPage).then(|| Pages {
            mapping: mapping.clone(),
            memory: guest,
            offsets: Vec::new(),
            come: (0, 0),
            seconds: 0.0,
            discarded: 0,
        });
        Self {
            device: Device::new(settings, &[Region { guest, page }], timed, (), ()).unwrap(),
            rings: Vec::new(),
            memory,
            pages,
            busy: 0.0,
        }
    }

    pub(crate) fn enable(&mut self, number: u16, size: u16, at: QueueAddresses) {
        let mut ring = Queue::new(size).unwrap();
        ring.set_desc_table_address(Some(at.descriptors as u32), Some(0));
        ring.set_avail_ring_address(Some(at.available as u32), Some(0));
        ring.set_used_ring_address(Some(at.used as u32), Some(0));
        ring.set_ready(true);
        self.rings.push((number, ring));
    }

    /// Empties the queue of this number.
    pub(crate) fn drain(&mut self, number: u16) {
        let begun = clock();
        let (_, ring) = self.rings.iter_mut().find(|ring| ring.0 == number).unwrap();
        match &mut self.pages {
            Some(pages) => {
                while let Some(chain) = ring.pop_descriptor_chain(&self.memory) {
                    let head = chain.head_index();
                    for buffer in chain {
                        let mut message = vec![0; buffer.len() as usize];
                        self.memory.read_slice(&mut message, buffer.addr()).unwrap();
                        pages.message(&message);
                    }
                    ring.add_used(&self.memory, head, 0).unwrap();
                }
            }
            None => {
                let queue = self.device.queue(number).unwrap();
                while self.device.drain(queue, ring, &self.memory).unwrap().more {}
            }
        }
        self.busy += clock() - begun;
    }

    /// Bytes that were discarded, and seconds of that.
    pub(crate) fn discarded(&mut self) -> (u64, f64) {
        match &self.pages {
            Some(pages) => (pages.discarded, pages.seconds),
            None => {
                let bytes = self.device.counters().discarded;
                (bytes, self.device.discarder().seconds)
            }
        }
    }
}

/// Where rings and messages lie: 1 MiB from 0 on.
pub(crate) fn shared() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
}
