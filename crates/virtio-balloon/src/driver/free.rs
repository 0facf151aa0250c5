//! Statistics, reports and hints: information on guest memory outside the balloon.

use runs::{GuestAddr, Span};

use super::error::DriverError;
use super::link::{HINT_AT, REPORTED, STATS_AT};
use super::seams::{BufferMemory, Element, GuestPages, Transport};
use super::{BalloonDriver, DriverResult, HINT_COMMAND};
use crate::config::BalloonConfig;
use crate::features::Features;
use crate::queues::Queue;
use crate::stats::{ByteOrder, Stats};

/// Result of hinting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hinting {
    /// There is no new command.
    Nothing,
    /// Free pages were hinted for a command, so many bytes; they are kept until it is over.
    Hinted {
        /// The command's id.
        command: u32,
        /// Bytes.
        bytes: u64,
    },
    /// It is over, and the guest has its pages again.
    Done {
        /// Bytes.
        bytes: u64,
    },
}

/// Longest part of a chain, of whole pages of any size.
const LONGEST: u64 = (1 << 32) - (1 << 16);

impl<T, M, P> BalloonDriver<T, M, P>
where
    T: Transport,
    M: BufferMemory<Error = T::Error>,
    P: GuestPages,
{
    /// Hands fresh statistics to the device, if it asks: it has answered the buffer before (VIRTIO 1.3,
    /// 5.5.6.3). Does not wait.
    ///
    /// # Errors
    ///
    /// When the device cannot be reached, or statistics were not negotiated.
    pub fn answer_stats(&mut self) -> DriverResult<bool, T> {
        self.check_running()?;
        if !self.link.features.contains(Features::STATS_VQ) {
            let feature = Features::STATS_VQ;
            return Err(DriverError::NotNegotiated { feature });
        }
        let asked = self.link.idle(Queue::Stats)?;
        if asked {
            self.offer_stats()?;
        }
        Ok(asked)
    }

    /// Offers the buffer with statistics, which the device keeps until it wants new ones.
    pub(super) fn offer_stats(&mut self) -> DriverResult<(), T> {
        let mut bytes = [0; Stats::MOST_BYTES];
        let used = self.pages.stats().encode(&mut bytes, ByteOrder::Little);
        let (bytes, _) = bytes.split_at(used);
        let element = self.link.put_small(STATS_AT, bytes)?;
        self.link.offer(Queue::Stats, &[element])
    }

    /// Reports free blocks, which the caller keeps out of use until this returns; the host may discard
    /// them (5.5.6.7). Afterwards they hold the poison value, where there is one, or anything. Returns the
    /// number of messages.
    ///
    /// # Errors
    ///
    /// As all that talks to the device. After [`DriverError::Silent`] and its like the device may still discard
    /// them, until it was reset. [`DriverError::BadBlock`] where one is made of no whole pages.
    pub fn report(&mut self, blocks: &[Span<GuestAddr>]) -> DriverResult<u64, T> {
        self.check_running()?;
        if !self.link.features.contains(Features::PAGE_REPORTING) {
            let feature = Features::PAGE_REPORTING;
            return Err(DriverError::NotNegotiated { feature });
        }
        let page = self.page.bytes();
        let bad = |block: &&Span<GuestAddr>| {
            block.is_empty() || block.len > LONGEST || !block.is_aligned(page)
        };
        if let Some(&block) = blocks.iter().find(bad) {
            return Err(DriverError::BadBlock { block });
        }
        let most = usize::from(self.link.size(Queue::Reporting)).min(REPORTED);
        let mut messages = 0;
        for blocks in blocks.chunks(most.max(1)) {
            if !self.link.idle(Queue::Reporting)? {
                return Err(DriverError::Busy);
            }
            let mut chain = [Element {
                address: 0,
                len: 0,
                write: true,
            }; REPORTED];
            for (element, block) in chain.iter_mut().zip(blocks) {
                (element.address, element.len) = (block.start, block.len as u32);
            }
            let (chain, _) = chain.split_at(blocks.len());
            self.link.exchange_apart(Queue::Reporting, chain)?;
            messages += 1;
        }
        Ok(messages)
    }

    /// Does what the device wants of free page hinting (5.5.6.5): for a new command, takes free blocks,
    /// hints each, until the guest has no more or the command changes; when all is over, gives them
    /// back. Called when the device has told of a change of its configuration, and not before: QEMU shows a new
    /// command a moment earlier, and what it tells then looks like the command's end, so that nothing is hinted.
    ///
    /// # Errors
    ///
    /// As all that talks to the device. Blocks that were taken are kept.
    pub fn hint(&mut self) -> DriverResult<Hinting, T> {
        self.check_running()?;
        if !self.link.features.contains(Features::FREE_PAGE_HINT) {
            let feature = Features::FREE_PAGE_HINT;
            return Err(DriverError::NotNegotiated { feature });
        }
        let mut generation = self.generation()?;
        let command = self.hint_command()?;
        if command == BalloonConfig::HINT_DONE {
            self.hint_command = command;
            return Ok(match self.give_back_hinted(u64::MAX) {
                0 => Hinting::Nothing,
                bytes => Hinting::Done { bytes },
            });
        }
        if command < BalloonConfig::HINT_FIRST || command == self.hint_command {
            return Ok(Hinting::Nothing);
        }
        self.say(command)?;
        self.hint_command = command;
        let mut bytes = 0;
        let size = self.settings.hint_block.max(self.page.bytes());
        let size = 1 << size.min(1 << 30).ilog2();
        loop {
            // Looked at only when the device says so: once hinting has begun, QEMU shows 0 there.
            let now = self.generation()?;
            if now != generation && self.hint_command()? != command {
                break;
            }
            generation = now;
            let Some(address) = self.pages.take(size) else {
                break;
            };
            let block = Span::new(address, size);
            let hinted = self.hinted.as_mut();
            if !self.held.fits(block)
                || self.held.any(block)
                || !hinted.is_some_and(|hinted| hinted.insert(block))
            {
                return Err(DriverError::BadBlock { block });
            }
            let element = Element {
                address,
                len: size as u32,
                write: true,
            };
            self.exchange_hint(element)?;
            bytes += size;
        }
        self.say(BalloonConfig::HINT_STOP)?;
        Ok(Hinting::Hinted { command, bytes })
    }

    /// An id over free_page_vq: the begin of hints for it, or, 0, their end.
    fn say(&mut self, id: u32) -> DriverResult<(), T> {
        if !self.link.idle(Queue::FreePage)? {
            return Err(DriverError::Busy);
        }
        let element = self.link.put_small(HINT_AT, &id.to_le_bytes())?;
        self.exchange_hint(element)
    }

    fn exchange_hint(&mut self, element: Element) -> DriverResult<(), T> {
        if !self.link.idle(Queue::FreePage)? {
            return Err(DriverError::Busy);
        }
        self.link.exchange(Queue::FreePage, &[element])
    }

    fn generation(&mut self) -> DriverResult<u32, T> {
        self.link.transport.generation().map_err(DriverError::Seam)
    }

    fn hint_command(&mut self) -> DriverResult<u32, T> {
        let mut bytes = [0; 4];
        let transport = &mut self.link.transport;
        transport
            .read_config(HINT_COMMAND, &mut bytes)
            .map_err(DriverError::Seam)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Pages that are hinted are not to be had for anything else.
    pub(super) fn in_hinted(&self, block: Span<GuestAddr>) -> bool {
        let hinted = self.hinted.as_ref();
        hinted.is_some_and(|hinted| hinted.fits(block) && hinted.any(block))
    }

    /// Gives so many bytes of hinted pages back, as far as there are: the guest may use such pages again at any
    /// time (5.5.6.5), and does when memory is short. The device is not told. Returns the bytes.
    pub fn give_back_hinted(&mut self, bytes: u64) -> u64 {
        let mut left = bytes;
        let hinted = &mut self.hinted;
        while let Some(run) = hinted.as_mut().and_then(|hinted| hinted.take_front(left)) {
            left -= run.len;
            self.pages.give_back(run);
        }
        bytes - left
    }
}
