//! The driver: the guest's end of the balloon.
//!
//! It runs wherever its seams do: [`Transport`] reaches the device, [`BufferMemory`] is the memory that
//! both see, [`GuestPages`] the source of pages. It allocates nothing by itself, and every wait is
//! bounded.
//!
//! # Protocol
//!
//! **In**: a page is first taken from the guest, then noted as held, then sent on inflateq; when the
//! device has answered, the host may have discarded it. **Out**: it is sent on deflateq, the answer is
//! waited for, and only then does the guest get it back (VIRTIO 1.3, 5.5.6.1; also where
//! `VIRTIO_BALLOON_F_MUST_TELL_HOST` was not negotiated). So at each moment the pages that the host may
//! take are among the held ones. A message that gets no answer leaves them held, and is sent again before
//! any other: naming a page twice does no harm. They are freed once the device is reset, after which it
//! takes nothing.
//!
//! **Features** (3.1.1): messages in bulk need a format that is known here, and their buffers. Where
//! one of these is missing the bit is not accepted, and the driver sends page numbers. Without a poison
//! value `VIRTIO_BALLOON_F_PAGE_POISON` is not accepted; with one that the device cannot receive
//! `VIRTIO_BALLOON_F_PAGE_REPORTING` is not (5.5.6.6.1, 5.5.6.7.1).
//!
//! **Initialized pages**: where [`DriverSettings::init_on_inflate`] is accepted, each message on inflateq has a bitmap
//! behind it, in which the device says which of its pages it has initialized; [`GuestPages::initialized`] hears of them,
//! and of none where the device has written no bitmap, or a part of one.
//!
//! **Rounds**: work is done in rounds of bounded size ([`DriverSettings::round`]), between which
//! `actual` in the configuration space is brought up to date. When the guest has nothing to give, the
//! pages taken so far are sent, then there is a pause, and another try, as often as
//! [`DriverSettings::tries`] says.
//!
//! A driver is owned by one thread at a time. Code that shares it behind a lock answers a request that cannot
//! wait (a page that is to migrate, from within an allocation) as [`DriverError::Busy`] does: try again.

use core::time::Duration;

use runs::{GuestAddr, Span};

use crate::config::{BULK_CONFIG_BYTES, BalloonConfig, CONFIG_BYTES};
use crate::features::{BulkBit, Features, InitBit};
use crate::format::MOST_MESSAGE_BYTES;
use crate::queues::{Numbering, Queue};
use crate::source::{GuestPage, WIRE_PAGE};

mod error;
mod free;
mod held;
mod life;
mod link;
mod pending;
mod ring;
mod seams;

pub use error::DriverError;
pub use free::Hinting;
pub use life::{Allocated, TargetProgress};
pub use link::{Wait, Wire};
pub use seams::{BufferMemory, Element, GuestPages, QueueAddresses, Queues, Transport};

use held::PageSet;
use link::{INDIRECT, Link};
use pending::Pending;

/// Offsets of the configuration space (5.5.4).
const ACTUAL: u16 = 4;
const HINT_COMMAND: u16 = 8;
const POISON: u16 = 12;

/// How the driver works. The default is Linux's way, where Linux has one.
#[derive(Clone, Copy, Debug)]
pub struct DriverSettings {
    /// Features of the standard that are accepted, where they are offered.
    pub features: Features,
    /// The bit for messages in bulk: the device's; `None` to send page numbers.
    pub bulk: Option<BulkBit>,
    /// The bit of `VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE`, the device's; by default `None`. Where it is accepted
    /// messages in bulk are not, which have no place for its bitmaps (`docs/balloon-bulk.md`).
    pub init_on_inflate: Option<InitBit>,
    /// How queues are numbered.
    pub numbering: Numbering,
    /// How answers are waited for.
    pub wait: Wait,
    /// The most entries of a queue.
    pub queue_size: u16,
    /// Page numbers of a message.
    pub pfns: u16,
    /// Bitmaps of a pass, 32 at most.
    pub bitmaps: usize,
    /// The most bytes of a round.
    pub round: u64,
    /// The largest block that is asked for in bytes, a power of two up to 1 GiB.
    pub block: u64,
    /// How long nothing is asked for when there was nothing.
    pub pause: Duration,
    /// How often a block is asked for in vain, with a pause after each, until inflating ends.
    pub tries: u32,
    /// Bytes that are given back when the guest is out of memory.
    pub out_of_memory: u64,
    /// The value with which the guest fills free pages, if it does.
    pub poison: Option<u32>,
    /// Bytes of a block that is hinted, a power of two.
    pub hint_block: u64,
}

impl Default for DriverSettings {
    fn default() -> Self {
        Self {
            features: Features(0x3f),
            bulk: Some(BulkBit::DEFAULT),
            init_on_inflate: None,
            numbering: Numbering::Compressed,
            wait: Wait::Sleep {
                most: Duration::from_secs(10),
            },
            queue_size: 128,
            pfns: 256,
            bitmaps: pending::MOST_BITMAPS,
            round: 32 << 30,
            block: 2 << 20,
            pause: Duration::from_millis(200),
            tries: 5,
            out_of_memory: 256 * WIRE_PAGE,
            poison: None,
            hint_block: 4 << 20,
        }
    }
}

/// The driver of a balloon.
#[derive(Debug)]
pub struct BalloonDriver<T, M: BufferMemory, P> {
    link: Link<T, M>,
    pages: P,
    settings: DriverSettings,
    page: GuestPage,
    running: bool,
    /// All pages that were taken from the guest, told or not.
    held: PageSet<M::Words>,
    /// Held pages that are not sent yet.
    pending: Pending<M::Words>,
    /// A block that did not fit in there.
    carry: Option<Span<GuestAddr>>,
    /// Pages that were hinted and wait for the end of it.
    hinted: Option<PageSet<M::Words>>,
    /// The command that was answered last.
    hint_command: u32,
}

type DriverResult<V, T> = Result<V, DriverError<<T as Transport>::Error>>;

impl<T, M, P> BalloonDriver<T, M, P>
where
    T: Transport,
    M: BufferMemory<Error = T::Error>,
    P: GuestPages,
{
    /// Takes over the device: resets it, negotiates, sets up its queues, and lets it begin. Nothing is in
    /// the balloon yet.
    ///
    /// # Errors
    ///
    /// When the device cannot be reached or refuses the features, a queue is missing, or there is no
    /// memory for queues, for a bit for each page of [`GuestPages::span`], or for a message of page
    /// numbers. Memory that was taken has been given back by then; but not memory that the device has
    /// seen, when it cannot be reset any more.
    pub fn new(
        transport: T,
        memory: M,
        pages: P,
        settings: DriverSettings,
    ) -> DriverResult<Self, T> {
        let mut driver = Self::frozen(transport, memory, pages, settings)?;
        driver.restore()?;
        Ok(driver)
    }

    /// A driver that has not taken over the device yet, which [`restore`](Self::restore) does: for platforms with
    /// small stacks, on which a driver is too large to lie below that.
    ///
    /// # Errors
    ///
    /// When there is no memory for a bit for each page of [`GuestPages::span`].
    pub fn frozen(
        transport: T,
        mut memory: M,
        pages: P,
        settings: DriverSettings,
    ) -> DriverResult<Self, T> {
        let (page, span) = (pages.page(), pages.span());
        let held = page_set(&mut memory, span, page)?;
        Ok(Self {
            link: Link::new(transport, memory, settings.wait),
            pages,
            settings,
            page,
            running: false,
            held,
            pending: Pending::listed(page),
            carry: None,
            hinted: None,
            hint_command: 0,
        })
    }

    /// Takes over the device anew after [`freeze`](Self::freeze). Nothing is in the balloon.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); the driver is then frozen.
    pub fn restore(&mut self) -> DriverResult<(), T> {
        if self.running {
            return Ok(());
        }
        self.link.transport.reset().map_err(DriverError::Seam)?;
        let started = self.start();
        if started.is_err() {
            // Buffers that the device has seen stay, should it not let go.
            if self.link.transport.reset().is_ok() {
                self.link.release();
            }
        }
        self.running = started.is_ok();
        started
    }

    fn start(&mut self) -> DriverResult<(), T> {
        let offered = self.link.transport.offered().map_err(DriverError::Seam)?;
        let accepted = self.choose(offered)?;
        let settings = self.settings;
        if !self
            .link
            .transport
            .accept(accepted)
            .map_err(DriverError::Seam)?
        {
            return Err(DriverError::Features { offered, accepted });
        }
        self.link.features = accepted;
        self.link.small_buffers()?;
        for (queue, number) in Queue::numbered(accepted, settings.numbering) {
            self.link.enable(queue, number, settings.queue_size)?;
        }
        let poisons = accepted.contains(Features::PAGE_POISON);
        if let Some(poison) = settings.poison.filter(|_| poisons) {
            let transport = &mut self.link.transport;
            transport
                .write_config(POISON, poison)
                .map_err(DriverError::Seam)?;
        }
        self.link.transport.begin().map_err(DriverError::Seam)?;
        if accepted.contains(Features::STATS_VQ) {
            // The first buffer: the device answers it when it wants statistics (5.5.6.3).
            self.offer_stats()?;
        }
        Ok(())
    }

    /// The features to accept, and all that depends on it: what cannot be had is not accepted.
    fn choose(&mut self, offered: Features) -> DriverResult<Features, T> {
        let settings = self.settings;
        let standard = Features(offered.0 & settings.features.0 & 0x3f);
        let others = Features(offered.0 & Features::VERSION_1.with(INDIRECT).0);
        let mut accepted = standard.with(others);
        if settings.poison.is_none() {
            accepted = accepted.without(Features::PAGE_POISON);
        } else if !accepted.contains(Features::PAGE_POISON) {
            accepted = accepted.without(Features::PAGE_REPORTING);
        }
        if accepted.contains(Features::FREE_PAGE_HINT) {
            let (page, span) = (self.page, self.pages.span());
            match page_set(&mut self.link.memory, span, page) {
                Ok::<_, DriverError<T::Error>>(hinted) => self.hinted = Some(hinted),
                Err(_) => accepted = accepted.without(Features::FREE_PAGE_HINT),
            }
        }
        let there = |bit: &Features| offered.contains(*bit);
        let bulk = settings.bulk.map(BulkBit::feature);
        let init = settings.init_on_inflate.map(InitBit::feature);
        // A bit of both could be of either.
        let init = init.filter(there).filter(|bit| bulk != Some(*bit));
        match bulk.filter(there).filter(|_| init.is_none()) {
            Some(bit) if self.bulk()? => {
                accepted = accepted.with(bit);
                self.link.wire = Wire::Bulk;
            }
            _ => {
                self.link.wire = Wire::Pfns;
                let first = self.link.memory.words(pending::WORDS);
                self.pending.use_bitmaps(first, self.settings.bitmaps);
                let pfns = usize::from(settings.pfns.max(1));
                let bitmap = if init.is_some() { pfns.div_ceil(8) } else { 0 };
                self.link.message_buffer(pfns * 4, bitmap)?;
                accepted = accepted.with(init.unwrap_or_default());
            }
        }
        Ok(accepted)
    }

    /// True when the device's messages in bulk are known here, and buffers for them are to be had.
    fn bulk(&mut self) -> DriverResult<bool, T> {
        let config = self.config(BULK_CONFIG_BYTES)?;
        if !config.has_bulk() {
            return Ok(false);
        }
        let Some(first) = self.link.memory.words(pending::WORDS) else {
            return Ok(false);
        };
        let bytes = (config.bulk_message_bytes as usize).min(MOST_MESSAGE_BYTES);
        if self.link.message_buffer(bytes, 0).is_err() {
            return Ok(false);
        }
        self.pending.use_bitmaps(Some(first), self.settings.bitmaps);
        Ok(true)
    }

    /// The configuration space. A field is read whole; the device may change others meanwhile.
    fn config(&mut self, bytes: usize) -> DriverResult<BalloonConfig, T> {
        let mut all = [0; BULK_CONFIG_BYTES];
        let (read, _) = all.split_at_mut(bytes.clamp(CONFIG_BYTES, BULK_CONFIG_BYTES));
        let mut offset = 0;
        for field in read.chunks_exact_mut(4) {
            let transport = &mut self.link.transport;
            transport
                .read_config(offset, field)
                .map_err(DriverError::Seam)?;
            offset += 4;
        }
        Ok(BalloonConfig::from_bytes(&all))
    }

    /// Ends all work, and gives every page back to the guest: hinted and held ones. Then the device is
    /// reset. If it still answers, the pages are sent on deflateq before.
    ///
    /// # Errors
    ///
    /// When the device cannot be reset: then everything stays as it is, since it may still take pages.
    pub fn freeze(&mut self) -> DriverResult<(), T> {
        if self.running {
            // It may be broken, which is why it is reset.
            let _ = self.deflate(0);
        }
        self.link.transport.reset().map_err(DriverError::Seam)?;
        self.running = false;
        self.link.release();
        self.pending.clear();
        self.carry = None;
        self.give_back_hinted(u64::MAX);
        self.give_back_all()?;
        self.hinted = None;
        self.hint_command = 0;
        Ok(())
    }

    /// [Freezes](Self::freeze) the driver, and hands back what it was made of.
    ///
    /// # Errors
    ///
    /// As [`freeze`](Self::freeze): the device may then still take pages, so that they stay where they
    /// are for good. Callers that want to try again call that first.
    pub fn remove(mut self) -> DriverResult<(T, M, P), T> {
        self.freeze()?;
        Ok((self.link.transport, self.link.memory, self.pages))
    }

    /// The negotiated features.
    pub const fn features(&self) -> Features {
        self.link.features
    }

    /// Encoding of messages.
    pub const fn wire(&self) -> Wire {
        self.link.wire
    }

    /// Bytes in the balloon.
    pub const fn held(&self) -> u64 {
        self.held.bytes()
    }

    /// The guest's pages.
    pub const fn pages(&mut self) -> &mut P {
        &mut self.pages
    }

    /// The way to the device, beside the driver.
    pub const fn transport(&mut self) -> &mut T {
        &mut self.link.transport
    }

    fn check_running(&self) -> DriverResult<(), T> {
        match self.running {
            true => Ok(()),
            false => Err(DriverError::Frozen),
        }
    }
}

/// An empty set of this span's pages.
fn page_set<M: BufferMemory, E>(
    memory: &mut M,
    span: Span<GuestAddr>,
    page: GuestPage,
) -> Result<PageSet<M::Words>, DriverError<E>> {
    let count = held::words(span, page);
    let words = memory.words(count).ok_or(DriverError::NoMemory {
        bytes: count as u64 * 8,
    })?;
    Ok(PageSet::new(words, span, page))
}
