//! Messages to the device, one at a time on each queue, and waiting for their answers.
//!
//! Memory shown to the device is given back only after a reset: a device that does not answer may
//! still read and write it.

use core::hint;
use core::time::Duration;

use runs::{GuestAddr, Joiner, Span};

use super::error::DriverError;
use super::ring::{DESCRIPTOR, Ring, Wrong};
use super::seams::{BufferMemory, Element, Transport};
use crate::features::Features;
use crate::format::{BitmapRecords, LePfns, MessageFormat as _};
use crate::queues::Queue;
use crate::source::{EncodeError, GuestPage, MessageSource, WIRE_PAGE};

/// `VIRTIO_F_INDIRECT_DESC` (6).
pub(super) const INDIRECT: Features = Features(1 << 28);

/// How the driver waits for an answer. Both end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Sleeps ([`Transport::wait`]), so long at most.
    Sleep {
        /// The most.
        most: Duration,
    },
    /// Looks again and again, so often at most.
    Spin {
        /// The most.
        looks: u64,
    },
}

/// Encoding of messages on inflateq and deflateq.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// The standard's page numbers.
    Pfns,
    /// Messages in bulk: [`BitmapRecords`].
    Bulk,
}

/// Parts of the page that small messages share.
pub(super) const STATS_AT: u64 = 0;
pub(super) const HINT_AT: u64 = 256;
const TABLE_AT: u64 = 512;
/// Descriptors of the table for free pages.
pub(super) const REPORTED: usize = 32;

const QUEUES: usize = Queue::ALL.len();
/// The most pieces of memory that the device sees: queues, a message, and small ones.
const PIECES: usize = QUEUES + 2;

pub(super) type LinkResult<V, T> = Result<V, DriverError<<T as Transport>::Error>>;

/// Where messages are made, and where they lie for the device: as long as the scratch. The last bytes are a bitmap that the
/// device writes behind page numbers of inflateq.
#[derive(Debug)]
struct Buffer<B> {
    scratch: B,
    place: u64,
    bitmap: usize,
}

/// A queue that is set up.
#[derive(Clone, Copy, Debug)]
enum Virtqueue {
    /// Its rings are the driver's.
    Own(Ring),
    /// Its rings are the platform's ([`Transport::queues`]).
    Platform {
        number: u16,
        size: u16,
        in_flight: bool,
    },
}

impl Virtqueue {
    const fn number(&self) -> u16 {
        match self {
            Self::Own(ring) => ring.number(),
            Self::Platform { number, .. } => *number,
        }
    }

    const fn size(&self) -> u16 {
        match self {
            Self::Own(ring) => ring.size(),
            Self::Platform { size, .. } => *size,
        }
    }
}

/// Transport, memory, queues and buffers.
#[derive(Debug)]
pub(super) struct Link<T, M: BufferMemory> {
    pub(super) transport: T,
    pub(super) memory: M,
    pub(super) features: Features,
    pub(super) wire: Wire,
    pub(super) wait: Wait,
    queues: [Option<Virtqueue>; QUEUES],
    pieces: [Option<Span<GuestAddr>>; PIECES],
    /// Buffer for messages of inflateq and deflateq.
    message: Option<Buffer<M::Bytes>>,
    /// The page of small messages.
    small: u64,
}

/// Hands on the whole pages, as runs, of which all bits are set; bits that are not there are not.
fn initialized(
    numbers: &[u8],
    bitmap: &[u8],
    page: GuestPage,
    sink: &mut impl FnMut(Span<GuestAddr>),
) {
    let mut joiner = Joiner::new();
    let mut whole = |run: Span<GuestAddr>| {
        let first = run.start.next_multiple_of(page.bytes());
        let end = (run.start + run.len) & !(page.bytes() - 1);
        if first < end {
            sink(Span::new(first, end - first));
        }
    };
    for (numbers, bits) in numbers.chunks(32).zip(bitmap) {
        for (nr, number) in numbers.chunks_exact(4).enumerate() {
            let number = number.try_into().map_or(0, u32::from_le_bytes);
            if bits >> nr & 1 != 0 {
                let run = Span::new(u64::from(number) * WIRE_PAGE, WIRE_PAGE);
                joiner.push(run).into_iter().for_each(&mut whole);
            }
        }
    }
    joiner.finish().into_iter().for_each(whole);
}

impl<T: Transport, M: BufferMemory<Error = T::Error>> Link<T, M> {
    pub(super) const fn new(transport: T, memory: M, wait: Wait) -> Self {
        Self {
            transport,
            memory,
            features: Features(0),
            wire: Wire::Pfns,
            wait,
            queues: [None; QUEUES],
            pieces: [None; PIECES],
            message: None,
            small: 0,
        }
    }

    /// Memory that the device sees, until it was reset.
    fn piece(&mut self, bytes: u64) -> LinkResult<u64, T> {
        let missing = DriverError::NoMemory { bytes };
        let place = self.pieces.iter_mut().find(|place| place.is_none());
        let (Some(place), Some(address)) = (place, self.memory.allocate(bytes)) else {
            return Err(missing);
        };
        *place = Some(Span::new(address, bytes));
        Ok(address)
    }

    /// Room for messages of so many bytes, and for a bitmap behind them.
    pub(super) fn message_buffer(&mut self, message: usize, bitmap: usize) -> LinkResult<(), T> {
        let bytes = message + bitmap;
        let missing = DriverError::NoMemory {
            bytes: bytes as u64,
        };
        let scratch = self.memory.bytes(bytes).ok_or(missing)?;
        let place = self.piece(bytes as u64)?;
        self.message = Some(Buffer {
            scratch,
            place,
            bitmap,
        });
        Ok(())
    }

    /// Room for statistics, hints and reports.
    pub(super) fn small_buffers(&mut self) -> LinkResult<(), T> {
        self.small = self.piece(4096)?;
        Ok(())
    }

    /// Sets up a queue.
    pub(super) fn enable(&mut self, queue: Queue, number: u16, wished: u16) -> LinkResult<(), T> {
        let most = self
            .transport
            .queue_size(number)
            .map_err(DriverError::Seam)?;
        let size = most.min(wished.max(2));
        // A power of two (2.7), of two entries at least: hints come in pairs with an id.
        if !size.is_power_of_two() || size < 2 {
            let size = most;
            return Err(DriverError::NoQueue {
                queue,
                number,
                size,
            });
        }
        let set_up = if self.transport.queues().is_some() {
            let in_flight = false;
            Virtqueue::Platform {
                number,
                size,
                in_flight,
            }
        } else {
            let at = self.piece(Ring::bytes(size))?;
            let ring = Ring::new(number, size, at);
            self.transport
                .enable_queue(number, size, ring.addresses())
                .map_err(DriverError::Seam)?;
            Virtqueue::Own(ring)
        };
        if let Some(place) = self.queues.get_mut(queue as usize) {
            *place = Some(set_up);
        }
        Ok(())
    }

    /// Gives all memory back. The device has been reset.
    pub(super) fn release(&mut self) {
        self.queues = [None; QUEUES];
        self.message = None;
        for piece in self.pieces.iter_mut().filter_map(Option::take) {
            self.memory.free(piece);
        }
    }

    /// Entries of a queue; 0 where it is not there.
    pub(super) fn size(&self, queue: Queue) -> u16 {
        let queue = self.queues.get(queue as usize).copied().flatten();
        queue.map_or(0, |queue| queue.size())
    }

    fn queue(&self, queue: Queue) -> LinkResult<Virtqueue, T> {
        let found = self.queues.get(queue as usize).copied().flatten();
        found.ok_or(DriverError::NotNegotiated {
            feature: queue.needs(),
        })
    }

    /// True when nothing of this queue is with the device, whose answer is taken if it has come.
    pub(super) fn idle(&mut self, queue: Queue) -> LinkResult<bool, T> {
        match self.queues.get_mut(queue as usize).and_then(Option::as_mut) {
            None => Ok(true),
            Some(Virtqueue::Own(ring)) => match ring.take(&self.memory) {
                Ok(answered) => Ok(answered || !ring.in_flight()),
                Err(Wrong::Seam(error)) => Err(DriverError::Seam(error)),
                Err(Wrong::Answer { answers, id }) => {
                    Err(DriverError::Answer { queue, answers, id })
                }
            },
            Some(Virtqueue::Platform {
                number, in_flight, ..
            }) => {
                if *in_flight {
                    if let Some(queues) = self.transport.queues() {
                        *in_flight = !queues.answered(*number).map_err(DriverError::Seam)?;
                    }
                }
                Ok(!*in_flight)
            }
        }
    }

    /// Fails unless pages can be told: their buffer is not with the device.
    pub(super) fn ready(&mut self) -> LinkResult<(), T> {
        match self.idle(Queue::Inflate)? && self.idle(Queue::Deflate)? {
            true => Ok(()),
            false => Err(DriverError::Busy),
        }
    }

    /// Tells runs, ascending, in as many messages as it takes, and waits for each. Returns how many. Pages that the device
    /// says it has initialized go to `sink`.
    pub(super) fn tell(
        &mut self,
        queue: Queue,
        page: GuestPage,
        runs: impl Iterator<Item = Span<GuestAddr>>,
        mut sink: impl FnMut(Span<GuestAddr>),
    ) -> LinkResult<u64, T> {
        let wire = self.wire;
        let mut source = MessageSource::new(runs, page);
        let encode = |scratch: &mut [u8]| match wire {
            Wire::Pfns => LePfns.encode(&mut source, scratch),
            Wire::Bulk => BitmapRecords.encode(&mut source, scratch),
        };
        self.send(queue, encode, |numbers, bitmap| {
            initialized(numbers, bitmap, page, &mut sink);
        })
    }

    /// The same for the pages of bitmaps, each with its first address, ascending.
    pub(super) fn tell_bitmaps(
        &mut self,
        queue: Queue,
        page: GuestPage,
        bitmaps: &[(u64, &[u64])],
        sink: impl FnMut(Span<GuestAddr>),
    ) -> LinkResult<u64, T> {
        let runs = page.stretches_of(bitmaps);
        if self.wire == Wire::Pfns {
            return self.tell(queue, page, runs, sink);
        }
        let mut source = MessageSource::new(runs, page);
        let encode = |scratch: &mut [u8]| BitmapRecords.encode_bitmap(&mut source, scratch);
        // Messages in bulk have no bitmap behind them.
        self.send(queue, encode, |_, _| ())
    }

    /// Sends messages until there is nothing to `encode`, and waits for each; `sink` receives the message, and what the device
    /// has written to the bitmap behind it.
    fn send(
        &mut self,
        queue: Queue,
        mut encode: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
        mut sink: impl FnMut(&[u8], &[u8]),
    ) -> LinkResult<u64, T> {
        self.ready()?;
        let mut messages = 0;
        loop {
            let Some(buffer) = &mut self.message else {
                return Err(DriverError::Frozen);
            };
            let (address, scratch) = (buffer.place, buffer.scratch.as_mut());
            let room = scratch.len().saturating_sub(buffer.bitmap);
            let (message, bitmap) = scratch.split_at_mut(room);
            let used = encode(message)?;
            if used == 0 {
                return Ok(messages);
            }
            let (bytes, _) = message.split_at(used);
            self.memory
                .write(address, bytes)
                .map_err(DriverError::Seam)?;
            let element = |address, bytes: usize, write| Element {
                address,
                len: bytes as u32,
                write,
            };
            let bits = match queue {
                Queue::Inflate => bitmap.len().min(used.div_ceil(32)),
                _ => 0,
            };
            let behind = address + room as u64;
            let chain = [element(address, used, false), element(behind, bits, true)];
            let (chain, _) = chain.split_at(1 + usize::from(bits > 0));
            self.exchange(queue, chain)?;
            if bits > 0 {
                self.read_bitmap(queue, used, bits, &mut sink)?;
            }
            messages += 1;
        }
    }

    /// The message of `used` bytes was answered: hands on what the device has written of the `bits` bytes behind it.
    fn read_bitmap(
        &mut self,
        queue: Queue,
        used: usize,
        bits: usize,
        sink: &mut impl FnMut(&[u8], &[u8]),
    ) -> LinkResult<(), T> {
        let written = match self.queue(queue)? {
            Virtqueue::Own(ring) => ring.written(),
            Virtqueue::Platform { number, .. } => {
                let queues = self.transport.queues();
                queues.map_or(0, |queues| queues.written(number))
            }
        };
        let Some(buffer) = &mut self.message else {
            return Err(DriverError::Frozen);
        };
        let scratch = buffer.scratch.as_mut();
        let room = scratch.len().saturating_sub(buffer.bitmap);
        let (message, bitmap) = scratch.split_at_mut(room);
        let (bitmap, _) = bitmap.split_at_mut(bits.min(written as usize));
        self.memory
            .read(buffer.place + room as u64, bitmap)
            .map_err(DriverError::Seam)?;
        let (message, _) = message.split_at(used);
        sink(message, bitmap);
        Ok(())
    }

    /// The same as [`exchange`](Self::exchange) by a table of its own, where there may be one; up to
    /// [`REPORTED`] elements.
    pub(super) fn exchange_apart(&mut self, queue: Queue, chain: &[Element]) -> LinkResult<(), T> {
        let Virtqueue::Own(ring) = self.queue(queue)? else {
            return self.exchange(queue, chain);
        };
        if !self.features.contains(INDIRECT) || chain.len() < 2 {
            return self.exchange(queue, chain);
        }
        let table = self.small + TABLE_AT;
        for (nr, element) in (0..).zip(chain.iter().take(REPORTED)) {
            let more = usize::from(nr) + 1 < chain.len();
            let bytes = element.to_bytes(nr, more, false);
            self.memory
                .write(table + DESCRIPTOR * u64::from(nr), &bytes)
                .map_err(DriverError::Seam)?;
        }
        let len = DESCRIPTOR as u32 * chain.len() as u32;
        ring.describe_table(&self.memory, table, len)
            .map_err(DriverError::Seam)?;
        self.offer(queue, &[])?;
        self.answered(queue)
    }

    /// Writes a small message, and yields where it is.
    pub(super) fn put_small(&mut self, at: u64, bytes: &[u8]) -> LinkResult<Element, T> {
        let address = self.small + at;
        self.memory
            .write(address, bytes)
            .map_err(DriverError::Seam)?;
        Ok(Element {
            address,
            len: bytes.len() as u32,
            write: false,
        })
    }

    /// Offers a chain to the device, in a queue of which nothing is with it. Without elements: the one that
    /// stands in the queue's own table.
    pub(super) fn offer(&mut self, queue: Queue, chain: &[Element]) -> LinkResult<(), T> {
        let feature = queue.needs();
        let place = self.queues.get_mut(queue as usize);
        let found = place.and_then(Option::as_mut);
        match found.ok_or(DriverError::NotNegotiated { feature })? {
            Virtqueue::Own(ring) => {
                for (nr, element) in (0..).zip(chain) {
                    let more = usize::from(nr) + 1 < chain.len();
                    ring.describe(&self.memory, nr, *element, more)
                        .map_err(DriverError::Seam)?;
                }
                if ring.offer(&self.memory).map_err(DriverError::Seam)? {
                    let number = ring.number();
                    self.transport.notify(number).map_err(DriverError::Seam)?;
                }
            }
            Virtqueue::Platform {
                number, in_flight, ..
            } => {
                let queues = self.transport.queues();
                let queues = queues.ok_or(DriverError::NotNegotiated { feature })?;
                queues.offer(*number, chain).map_err(DriverError::Seam)?;
                *in_flight = true;
            }
        }
        Ok(())
    }

    /// Offers a chain, and waits for the answer.
    pub(super) fn exchange(&mut self, queue: Queue, chain: &[Element]) -> LinkResult<(), T> {
        self.offer(queue, chain)?;
        self.answered(queue)
    }

    /// Waits for the answer to what was offered.
    fn answered(&mut self, queue: Queue) -> LinkResult<(), T> {
        let number = self.queue(queue)?.number();
        let mut looked = 0;
        let mut waited = Duration::ZERO;
        let begun = match self.wait {
            Wait::Sleep { .. } => self.transport.now(),
            Wait::Spin { .. } => Duration::ZERO,
        };
        loop {
            if self.idle(queue)? {
                return Ok(());
            }
            looked += 1;
            match self.wait {
                Wait::Spin { looks } if looked < looks => hint::spin_loop(),
                Wait::Sleep { most } if waited < most => {
                    self.transport
                        .wait(number, most - waited)
                        .map_err(DriverError::Seam)?;
                    waited = self.transport.now().saturating_sub(begun);
                }
                _ if self.transport.broken().map_err(DriverError::Seam)? => {
                    return Err(DriverError::Broken);
                }
                _ => {
                    return Err(DriverError::Silent {
                        queue,
                        waited,
                        looked,
                    });
                }
            }
        }
    }
}
