//! Pages into the balloon and out of it.

use runs::{GuestAddr, Span};

use super::error::DriverError;
use super::seams::{BufferMemory, GuestPages, Transport};
use super::{ACTUAL, BalloonDriver, DriverResult};
use crate::config::CONFIG_BYTES;
use crate::features::Features;
use crate::queues::Queue;
use crate::source::WIRE_PAGE;

/// The most bytes of a round of deflating: in bulk their bitmap, two bits a page of 4 KiB at most, fits into a message.
const DEFLATED: u64 = 512 << 20;

/// How far a target was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetProgress {
    /// Reached.
    Reached,
    /// The guest has no more pages to give, or none that may leave ([`GuestPages::choose`]). There were as many
    /// pauses as were to be.
    Starved {
        /// Bytes that are in the balloon.
        held: u64,
    },
}

/// Pages allocated from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// Bytes.
    pub bytes: u64,
    /// There was nothing more.
    pub starved: bool,
}

impl<T, M, P> BalloonDriver<T, M, P>
where
    T: Transport,
    M: BufferMemory<Error = T::Error>,
    P: GuestPages,
{
    /// Brings the balloon to what the device wants (`num_pages`).
    ///
    /// # Errors
    ///
    /// As [`inflate`](Self::inflate).
    pub fn follow(&mut self) -> DriverResult<TargetProgress, T> {
        self.check_running()?;
        let target = self.target()?;
        match target < self.held() {
            // Not a page below the target, where the guest's pages are larger than the device's.
            true => {
                let whole = target.next_multiple_of(self.page.bytes());
                self.deflate(whole)?;
                match self.held() {
                    held if held > whole => Ok(TargetProgress::Starved { held }),
                    _ => Ok(TargetProgress::Reached),
                }
            }
            false => self.inflate(target),
        }
    }

    /// Bytes that the device wants in the balloon (`num_pages`).
    ///
    /// # Errors
    ///
    /// When the device cannot be reached.
    pub fn target(&mut self) -> DriverResult<u64, T> {
        Ok(u64::from(self.config(CONFIG_BYTES)?.num_pages) * WIRE_PAGE)
    }

    /// Takes pages until there are `target` bytes in the balloon, rounded up to whole pages.
    ///
    /// # Errors
    ///
    /// As all that talks to the device: when it cannot be reached, does not answer in time, answers
    /// wrongly, or still has the message before. Pages that were taken stay in the balloon.
    pub fn inflate(&mut self, target: u64) -> DriverResult<TargetProgress, T> {
        self.check_running()?;
        let page = self.page.bytes();
        let target = target.checked_next_multiple_of(page).unwrap_or(target);
        let mut vain = 0;
        // Pages left over from a message without an answer come before new ones.
        self.tell()?;
        while self.held() < target {
            let wanted = (target - self.held()).min(self.settings.round.max(page));
            let allocated = self.allocate(wanted)?;
            self.tell()?;
            self.write_actual()?;
            if allocated.starved {
                if vain >= self.settings.tries {
                    let held = self.held();
                    return Ok(TargetProgress::Starved { held });
                }
                vain += 1;
                self.link.transport.pause(self.settings.pause);
            }
        }
        Ok(TargetProgress::Reached)
    }

    /// Gives pages back until there are no more than `target` bytes in the balloon, rounded up to whole
    /// pages. Each is sent on deflateq before. Returns the bytes.
    ///
    /// # Errors
    ///
    /// As [`inflate`](Self::inflate). Pages that were not sent to the device, or not answered, stay
    /// in the balloon.
    pub fn deflate(&mut self, target: u64) -> DriverResult<u64, T> {
        self.check_running()?;
        self.tell()?;
        let page = self.page.bytes();
        let target = target.checked_next_multiple_of(page).unwrap_or(target);
        let before = self.held();
        let mut vain = 0;
        while self.held() > target {
            let most = DEFLATED.min(self.settings.round.max(page));
            let left = self.leave((self.held() - target).min(most), true)?;
            self.write_actual()?;
            if left == 0 {
                // The guest is about to migrate all that there is.
                if vain >= self.settings.tries {
                    break;
                }
                vain += 1;
                self.link.transport.pause(self.settings.pause);
            }
        }
        Ok(before - self.held())
    }

    /// So many bytes leave the balloon, at most. They are sent to the device, unless it was reset. Returns the
    /// bytes.
    fn leave(&mut self, bytes: u64, tell: bool) -> DriverResult<u64, T> {
        let Self {
            link,
            pages,
            held,
            pending,
            page,
            ..
        } = self;
        // It is empty: all pages that came were sent, or forgotten.
        let memory = &mut link.memory;
        let chosen = pages.choose(bytes, &mut |run| {
            held.all(run) && pending.add(run, || memory.words(super::pending::WORDS))
        });
        if !chosen {
            if tell {
                link.tell(Queue::Deflate, *page, held.front(bytes), |_| ())?;
            }
            let before = self.held();
            self.give_back(bytes);
            return Ok(before - self.held());
        }
        pending.sort();
        let (bitmaps, count) = pending.bitmaps();
        let (bitmaps, _) = bitmaps.split_at(count);
        let told = match tell {
            true => link
                .tell(Queue::Deflate, *page, pending.list(), |_| ())
                .and_then(|_| link.tell_bitmaps(Queue::Deflate, *page, bitmaps, |_| ())),
            false => Ok(0),
        };
        let managed = !link.features.contains(Features::DEFLATE_ON_OOM);
        let mut left = 0;
        for run in pending.list().chain(page.stretches_of(bitmaps)) {
            if told.is_err() {
                pages.stay(run);
            } else if held.remove(run) {
                pages.counted(run, false, managed);
                pages.give_back(run);
                left += run.len;
            }
        }
        pending.clear();
        told.map(|_| left)
    }

    /// Gives all pages back, of which the device, which was reset, knows nothing.
    pub(super) fn give_back_all(&mut self) -> DriverResult<(), T> {
        let mut vain = 0;
        while self.held() > 0 {
            if self.leave(u64::MAX, false)? == 0 {
                if vain >= self.settings.tries {
                    return Err(DriverError::Busy);
                }
                vain += 1;
                self.link.transport.pause(self.settings.pause);
            }
        }
        Ok(())
    }

    /// The guest is out of memory: gives back a step ([`DriverSettings::out_of_memory`](super::DriverSettings)), if
    /// it was negotiated that the balloon does. Returns the bytes.
    ///
    /// # Errors
    ///
    /// As [`deflate`](Self::deflate).
    pub fn out_of_memory(&mut self) -> DriverResult<u64, T> {
        self.check_running()?;
        if !self.link.features.contains(Features::DEFLATE_ON_OOM) {
            return Ok(0);
        }
        let step = self.settings.out_of_memory.max(self.page.bytes());
        self.deflate(self.held().saturating_sub(step & !(self.page.bytes() - 1)))
    }

    /// The page at `old`, which is in the balloon, changes places with the one at `new`, which the caller
    /// took from the guest: the new one is sent, then the old (so that the host has never given away
    /// less than it counts). Afterwards the page at `old` is the caller's.
    ///
    /// # Errors
    ///
    /// [`DriverError::Busy`], [`DriverError::NotHeld`] and [`DriverError::BadBlock`] have changed nothing. After
    /// all others both pages are in the balloon.
    pub fn migrate(&mut self, old: u64, new: u64) -> DriverResult<(), T> {
        self.check_running()?;
        self.link.ready()?;
        let bytes = self.page.bytes();
        let (run, block) = (Span::new(old, bytes), Span::new(new, bytes));
        if !self.held.all(run) {
            return Err(DriverError::NotHeld { run });
        }
        self.tell()?;
        if self.in_hinted(block) || !self.held.insert(block) {
            return Err(DriverError::BadBlock { block });
        }
        let pages = &mut self.pages;
        let told = self
            .link
            .tell(Queue::Inflate, self.page, [block].into_iter(), |run| {
                pages.initialized(run);
            });
        if let Err(error) = told {
            // The device has it, or will be told when it answers again.
            self.carry = Some(block);
            return Err(error);
        }
        self.link
            .tell(Queue::Deflate, self.page, [run].into_iter(), |_| ())?;
        self.held.remove(run);
        Ok(())
    }

    /// Takes `bytes` from the guest, in blocks as large as there are: the stage of
    /// [`inflate`](Self::inflate) before they are [told](Self::tell). When the bitmaps are full they are
    /// told here: one pass more.
    ///
    /// # Errors
    ///
    /// As [`inflate`](Self::inflate); [`DriverError::BadBlock`] when the guest gives what is none.
    pub fn allocate(&mut self, bytes: u64) -> DriverResult<Allocated, T> {
        self.check_running()?;
        let page = self.page.bytes();
        let mut left = bytes & !(page - 1);
        let mut size = self.settings.block.clamp(page, 1 << 30);
        size = 1 << size.ilog2();
        let mut starved = false;
        while left >= page {
            while size > left {
                size /= 2;
            }
            let Some(address) = self.pages.take(size) else {
                starved = size == page;
                if starved {
                    break;
                }
                size /= 2;
                continue;
            };
            let block = Span::new(address, size);
            let aligned = address & (size - 1) == 0;
            if !aligned || self.in_hinted(block) || !self.held.insert(block) {
                return Err(DriverError::BadBlock { block });
            }
            self.counted(block, true);
            left -= size;
            if !self.pend(block) {
                self.carry = Some(block);
                self.pass()?;
                self.carry = self.carry.filter(|block| !self.pend(*block));
            }
        }
        let bytes = (bytes & !(page - 1)) - left;
        Ok(Allocated { bytes, starved })
    }

    /// Tells what was taken and is not told yet, in ascending order. Returns the number of messages.
    ///
    /// # Errors
    ///
    /// As [`inflate`](Self::inflate): messages without an answer are sent again the next time.
    pub fn tell(&mut self) -> DriverResult<u64, T> {
        self.check_running()?;
        let mut messages = 0;
        loop {
            messages += self.pass()?;
            // Empty, it has room.
            match self.carry.take() {
                Some(block) if !self.pend(block) => {
                    self.carry = Some(block);
                    return Err(DriverError::BadBlock { block });
                }
                Some(_) => {}
                None => return Ok(messages),
            }
        }
    }

    /// Tells what is in the bitmaps or in the list, which are empty then.
    fn pass(&mut self) -> DriverResult<u64, T> {
        if self.pending.is_empty() {
            return Ok(0);
        }
        self.pending.sort();
        // One of the two is empty.
        let (list, (bitmaps, count)) = (self.pending.list(), self.pending.bitmaps());
        let (bitmaps, _) = bitmaps.split_at(count);
        let (link, page, pages) = (&mut self.link, self.page, &mut self.pages);
        let messages = link.tell(Queue::Inflate, page, list, |run| pages.initialized(run))?
            + link.tell_bitmaps(Queue::Inflate, page, bitmaps, |run| {
                pages.initialized(run);
            })?;
        self.pending.clear();
        Ok(messages)
    }

    fn pend(&mut self, block: Span<GuestAddr>) -> bool {
        let memory = &mut self.link.memory;
        self.pending
            .add(block, || memory.words(super::pending::WORDS))
    }

    /// Gives the guest the lowest pages back, so many bytes, or all there are.
    fn give_back(&mut self, bytes: u64) {
        let mut left = bytes;
        while let Some(run) = self.held.take_front(left) {
            left -= run.len;
            self.counted(run, false);
            self.pages.give_back(run);
        }
    }

    fn counted(&mut self, run: Span<GuestAddr>, held: bool) {
        let managed = !self.link.features.contains(Features::DEFLATE_ON_OOM);
        self.pages.counted(run, held, managed);
    }

    fn write_actual(&mut self) -> DriverResult<(), T> {
        let pages = u32::try_from(self.held() / WIRE_PAGE).unwrap_or(u32::MAX);
        let transport = &mut self.link.transport;
        transport
            .write_config(ACTUAL, pages)
            .map_err(DriverError::Seam)
    }
}
