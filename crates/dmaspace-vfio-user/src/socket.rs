//! Whole messages over a socket, with their file descriptors.
//!
//! A message is read as a header and then its payload, each by its exact length, so that no read reaches into the next
//! message. Descriptors that come with any byte of a message belong to it. Those beyond the most that a
//! message may have are closed, and the message is refused.
//!
//! Each is a [`PeerFile`], since the client may have it block when it is closed. So all that come are received, and none
//! is left for the kernel to close in `recvmsg`; the socket of a client that leaves, which may hold more, is one too.
//!
//! While a message is awaited, other clients that connect are refused: the protocol has one client for a socket
//! (specification, "Client/server interactions"). They find the connection closed.
//!
//! A connection that cannot be accepted keeps the listening socket readable. So it is not polled after such an error,
//! but retried after a while.

use std::io::{self, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};

use hostmem::PeerFile;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use crate::device::DeviceModel;
use crate::error::ServeError;
use crate::wire::{HEADER, Header, MOST_FDS};

/// The most descriptors that come with one part of a message. Source: Linux, `include/net/scm.h`, `SCM_MAX_FD`.
const MOST_RECEIVED: usize = 253;

/// A message.
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<PeerFile>,
    /// Descriptors were lost because there were too many.
    pub(crate) too_many: bool,
}

/// Time until a connection that could not be accepted is tried again.
const AGAIN: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Entry point of clients.
pub(crate) struct Door<'a> {
    pub(crate) listener: &'a UnixListener,
    pub(crate) device: &'a dyn DeviceModel,
    /// The last connection could not be accepted.
    pub(crate) stuck: bool,
}

impl Door<'_> {
    /// The next connection, if there is one.
    fn accept(&mut self) -> io::Result<Option<UnixStream>> {
        let accepted = match self.listener.accept() {
            Ok((client, _)) => Ok(Some(client)),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            },
        };
        if let (false, Err(error)) = (self.stuck, &accepted) {
            self.device.not_accepted(error);
        }
        self.stuck = accepted.is_err();
        accepted
    }

    /// Waits for a connection, and accepts it.
    pub(crate) fn next(&mut self) -> Result<UnixStream, ServeError> {
        loop {
            match self.accept() {
                Ok(Some(client)) => return Ok(client),
                Ok(None) => {}
                Err(error) if is_shortage(&error) => {}
                Err(error) => return Err(ServeError::Accept(error)),
            }
            self.wait(None).map_err(ServeError::Accept)?;
        }
    }

    /// Waits for a connection, or for `client` to have something to read or have left. Returns whether it has.
    fn wait(&self, client: Option<&UnixStream>) -> io::Result<bool> {
        let poll_of = |fd| PollFd::new(fd, PollFlags::IN);
        let door = Some(self.listener.as_fd()).filter(|_| !self.stuck);
        let again = self.stuck.then_some(&AGAIN);
        let client = client.map(|client| client.as_fd());
        let mut fds: Vec<_> = client.iter().chain(&door).map(poll_of).collect();
        match poll(&mut fds, again) {
            Ok(_) => Ok(client.is_some() && fds.first().is_some_and(|fd| !fd.revents().is_empty())),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// True for what passes: of descriptors, of the process or the system, and of memory.
fn is_shortage(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    errno.is_some_and(|errno| shortages.contains(&errno))
}

/// A client, and where others connect.
pub(crate) struct Channel<'a> {
    pub(crate) client: UnixStream,
    pub(crate) door: Door<'a>,
    /// Clients that were refused.
    pub(crate) refused: u64,
}

/// Ends a connection. What the client has sent and was not received is closed in its own time.
pub(crate) fn close(client: UnixStream) {
    let _ = client.shutdown(Shutdown::Both);
    drop(PeerFile::from(client));
}

impl Channel<'_> {
    /// The next message; `None` if the client has left before it.
    pub(crate) fn receive(&mut self) -> Result<Option<Message>, ServeError> {
        let (mut fds, mut too_many) = (Vec::new(), false);
        let mut header = [0; HEADER];
        if !self.fill(&mut header, &mut fds, &mut too_many)? {
            return Ok(None);
        }
        let header = Header::of(&header);
        let len = header.payload();
        let len = len.ok_or(ServeError::Size { size: header.size });
        let len = match len {
            Ok(len) => len,
            Err(error) => {
                // It learns why; what it has sent behind cannot be told apart any more.
                self.send(&header.refused(Errno::INVAL.raw_os_error() as u32))?;
                return Err(error);
            }
        };
        let mut payload = vec![0; len];
        if len > 0 && !self.fill(&mut payload, &mut fds, &mut too_many)? {
            let size = header.size as usize;
            return Err(ServeError::Cut { got: HEADER, size });
        }
        Ok(Some(Message {
            header,
            payload,
            fds,
            too_many,
        }))
    }

    /// Fills `bytes`. Returns false if the client has left before the first of them.
    fn fill(
        &mut self,
        bytes: &mut [u8],
        fds: &mut Vec<PeerFile>,
        too_many: &mut bool,
    ) -> Result<bool, ServeError> {
        let size = bytes.len();
        let mut got = 0;
        while got < size {
            self.wait()?;
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RECEIVED))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut room);
            let rest = bytes.get_mut(got..).unwrap_or_default();
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received = recvmsg(
                &self.client,
                &mut [IoSliceMut::new(rest)],
                &mut ancillary,
                flags,
            );
            let received = match received {
                Err(Errno::AGAIN | Errno::INTR) => continue,
                // As a client that has died with unread replies leaves.
                Err(Errno::CONNRESET) if got == 0 => return Ok(false),
                received => received.map_err(|errno| ServeError::Socket(errno.into()))?,
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights.map(PeerFile::from));
                }
            }
            *too_many |= received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MOST_FDS;
            fds.truncate(MOST_FDS);
            match received.bytes {
                0 if got == 0 => return Ok(false),
                0 => return Err(ServeError::Cut { got, size }),
                bytes => got += bytes,
            }
        }
        Ok(true)
    }

    /// Waits until the client has something to read or has left.
    fn wait(&mut self) -> Result<(), ServeError> {
        // One that connects after this one has left is the next, and not refused.
        while !self
            .door
            .wait(Some(&self.client))
            .map_err(ServeError::Socket)?
        {
            // An error of the listening socket is no fault of this client.
            if let Ok(Some(refused)) = self.door.accept() {
                close(refused);
                self.refused += 1;
            }
        }
        Ok(())
    }

    /// Sends a reply. A client that does not take it in time is one that has left.
    pub(crate) fn send(&mut self, reply: &[u8]) -> Result<(), ServeError> {
        self.client.write_all(reply).map_err(|error| {
            let error = match error.kind() {
                io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
                _ => error,
            };
            ServeError::Socket(error)
        })
    }
}
