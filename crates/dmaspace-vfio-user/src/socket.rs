//! Whole messages over a socket, with their file descriptors.
//!
//! A message is read as a header and then its payload, each as many bytes as it has, so that what is read never reaches
//! into the next one. Descriptors that come with any byte of a message belong to it. Those beyond the most that a
//! message may have are closed, and the message is refused.
//!
//! Each is a [`PeerFile`], since the client may have it block when it is closed. So all that come are received, and none
//! is left for the kernel to close in `recvmsg`; the socket of a client that goes, in which there may be more, is one too.
//!
//! While a message is awaited, other clients that connect are refused: the protocol has one client for a socket
//! (specification, "Client/server interactions"). They find the connection closed.

use std::io::{self, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};

use hostmem::PeerFile;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

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

/// A client, and the socket on which others connect.
pub(crate) struct Channel<'a> {
    pub(crate) client: UnixStream,
    pub(crate) listener: &'a UnixListener,
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
        loop {
            let mut fds = [
                PollFd::new(&self.client, PollFlags::IN),
                PollFd::new(self.listener, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Err(Errno::INTR) => continue,
                polled => polled.map_err(|errno| ServeError::Socket(errno.into()))?,
            };
            let [client, other] = fds.map(|fd| !fd.revents().is_empty());
            // One that connects after this one has left is the next, and not refused.
            if client {
                return Ok(());
            }
            if other {
                if let Ok((refused, _)) = self.listener.accept() {
                    close(refused);
                    self.refused += 1;
                }
            }
        }
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
