//! Requests of the host: which pages does the guest not use? (`docs/balloon-bulk.md`, "Requests of the
//! host".)

use core::mem;

use runs::Span;

use super::error::Error;
use super::seams::{GuestPages, Memory, Transport};
use super::{Driver, DriverResult};
use crate::format::{HostRequest, ResponseHeader};
use crate::queues::Queue;

/// A request that was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Its id.
    pub id: u16,
    /// Bytes of the pages that were told.
    pub bytes: u64,
}

impl<T, M, P> Driver<T, M, P>
where
    T: Transport,
    M: Memory<Error = T::Error>,
    P: GuestPages,
{
    /// Answers the host's request, if there is one: takes the guest's free blocks of
    /// [`hint_block`](super::Settings::hint_block), tells which they are, and gives them back. What the host
    /// learns is what was free then. A request that is not known is answered with no pages.
    ///
    /// # Errors
    ///
    /// As all that talks to the device, and [`Error::NoRequests`]. The guest has its blocks back in any case.
    pub fn answer_request(&mut self) -> DriverResult<Option<Answered>, T> {
        self.check_running()?;
        if self.unused.is_none() {
            return Err(Error::NoRequests);
        }
        if !self.link.idle(Queue::Requests)? {
            return Ok(None);
        }
        if !mem::take(&mut self.request_offered) {
            // What came back is an answer that was given up.
            self.offer_request()?;
            return Ok(None);
        }
        let request = self.link.request()?;
        let answered = self.answer(request);
        let unused = &mut self.unused;
        while let Some(run) = unused
            .as_mut()
            .and_then(|unused| unused.take_front(u64::MAX))
        {
            self.pages.give_back(run);
        }
        let answered = answered?;
        self.offer_request()?;
        Ok(Some(answered))
    }

    fn answer(&mut self, request: HostRequest) -> DriverResult<Answered, T> {
        if request.command == HostRequest::UNUSED_PAGES {
            self.take_unused()?;
        }
        let Some(unused) = &self.unused else {
            return Err(Error::NoRequests);
        };
        // Of both the low bits are what there is room for.
        let (command, id) = (request.command as u8, request.param as u16);
        let header = ResponseHeader {
            command,
            id,
            ..ResponseHeader::default()
        };
        let bytes = unused.bytes();
        self.link
            .answer(self.page, header, unused.front(u64::MAX))?;
        Ok(Answered { id, bytes })
    }

    /// Takes all free blocks.
    fn take_unused(&mut self) -> DriverResult<(), T> {
        let size = self.settings.hint_block.max(self.page.bytes());
        let size = 1 << size.min(1 << 30).ilog2();
        while let Some(address) = self.pages.take(size) {
            let block = Span::new(address, size);
            let free = self.held.fits(block) && !self.held.any(block) && !self.in_hinted(block);
            let unused = self.unused.as_mut().filter(|_| free);
            if !unused.is_some_and(|unused| unused.insert(block)) {
                return Err(Error::BadBlock { block });
            }
        }
        Ok(())
    }

    /// Gives the device the buffer for its next request.
    pub(super) fn offer_request(&mut self) -> DriverResult<(), T> {
        self.link.offer_request()?;
        self.request_offered = true;
        Ok(())
    }
}
