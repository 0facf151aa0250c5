//! The socket on which front ends connect, and connections that have not sent a message yet.
//!
//! A front end speaks first (vhost-user protocol, "Communication"), so that a connection is one once the header
//! of a message is there. Until then it costs a file descriptor, and neither counts nor delays a front end that
//! speaks: another program that looks whether the socket is in use, a connection that ends at once, one that
//! sends nothing, one that sends something else. What it has sent is not received, and may hold files that block
//! when they are closed ([`PeerFile`]).

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use hostmem::PeerFile;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::channel;
use super::job::BalloonError;

/// The most connections that wait.
const MOST_WAITING: usize = 64;
/// The most connections that are accepted at once.
const MOST_ACCEPTED: usize = 1024;

/// The socket, and its place in the file system, which goes with it.
pub(super) struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Connections that may become front ends, the oldest first.
    waiting: VecDeque<UnixStream>,
    /// Connections that began with something else than a message, and were not reported yet.
    refused: u64,
    /// The last connection could not be accepted, for want of descriptors or memory.
    stuck: bool,
    /// Error of that, until it is reported.
    shortage: Option<io::Error>,
}

/// Received part of a connection's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Less than a header.
    Silent,
    /// A header of the protocol.
    Speaks,
    /// Something else.
    Nonsense,
    /// It has ended.
    Gone,
}

impl Socket {
    pub(super) fn listen(path: &Path) -> Result<Self, BalloonError> {
        let named = || path.display().to_string();
        let taken = |what| BalloonError::Taken {
            path: named(),
            what,
        };
        match fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => return Err(taken("no socket")),
            Ok(_) if UnixStream::connect(path).is_ok() => {
                return Err(taken("in use by another program"));
            }
            // Left behind by a program that is no more.
            Ok(_) => drop(fs::remove_file(path)),
            Err(_) => {}
        }
        let listen = || {
            let listener = UnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let listener = listen().map_err(|source| BalloonError::Listen {
            path: named(),
            source,
        })?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            waiting: VecDeque::new(),
            refused: 0,
            stuck: false,
            shortage: None,
        })
    }

    /// Accepts what has connected, and drops connections that are none of a front end. Those for which there is no
    /// descriptor or memory are left for the next call.
    ///
    /// # Errors
    ///
    /// When connections can be accepted no more.
    pub(super) fn look(&mut self) -> io::Result<()> {
        for _ in 0..MOST_ACCEPTED {
            if self.waiting.len() >= MOST_WAITING && self.oldest_silent().is_none() {
                break;
            }
            let accepted = self.listener.accept();
            let shortage = accepted.as_ref().err().is_some_and(is_shortage);
            let was_stuck = std::mem::replace(&mut self.stuck, shortage);
            match accepted {
                Ok((front, _)) => self.wait(front),
                Err(error) if shortage => {
                    if !was_stuck {
                        self.shortage = Some(error);
                    }
                    break;
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
        self.screen();
        Ok(())
    }

    /// Error of accepting connections, once.
    pub(super) fn shortage(&mut self) -> Option<io::Error> {
        self.shortage.take()
    }

    /// The front end that has waited longest, and has sent a message.
    pub(super) fn front(&mut self) -> Option<UnixStream> {
        let speaks = |front| state(front) == State::Speaks;
        let first = self.waiting.iter().position(speaks)?;
        self.waiting.remove(first)
    }

    /// Number of connections that began with no message since the last call.
    pub(super) fn refused(&mut self) -> u64 {
        std::mem::take(&mut self.refused)
    }

    /// Drops what has ended or sent no message.
    fn screen(&mut self) {
        for front in std::mem::take(&mut self.waiting) {
            let state = state(&front);
            self.refused += u64::from(state == State::Nonsense);
            match state {
                State::Silent | State::Speaks => self.waiting.push_back(front),
                State::Nonsense | State::Gone => close(front),
            }
        }
    }

    /// Has one more connection wait; where that is one too many, the oldest that has sent nothing goes.
    fn wait(&mut self, front: UnixStream) {
        self.waiting.push_back(front);
        if self.waiting.len() > MOST_WAITING {
            self.screen();
        }
        if self.waiting.len() > MOST_WAITING {
            if let Some(oldest) = self.oldest_silent() {
                self.waiting.remove(oldest).into_iter().for_each(close);
            }
        }
    }

    fn oldest_silent(&self) -> Option<usize> {
        let silent = |front| state(front) == State::Silent;
        self.waiting.iter().position(silent)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        self.waiting.drain(..).for_each(close);
    }
}

/// True for what passes: a want of descriptors, of the process or the system, or of memory.
fn is_shortage(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    errno.is_some_and(|errno| shortages.contains(&errno))
}

/// Ends a connection. What it has sent is closed in its own time.
fn close(front: UnixStream) {
    let _ = front.shutdown(Shutdown::Both);
    drop(PeerFile::from(front));
}

/// Looks at a connection, and takes nothing of what it has sent.
fn state(front: &UnixStream) -> State {
    let mut header = [0; channel::HEADER];
    let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let mut ended = [PollFd::new(front, PollFlags::RDHUP)];
    // After an error the connection counts as open.
    let _ = poll(&mut ended, Some(&Timespec::default()));
    let [ended] = ended.map(|ended| ended.revents());
    match recv(front, &mut header[..], peek) {
        Ok((0, _)) => State::Gone,
        Ok((sent, _)) if sent < header.len() => {
            match ended.intersects(PollFlags::RDHUP | PollFlags::HUP) {
                true => State::Nonsense,
                false => State::Silent,
            }
        }
        Ok(_) if !channel::is_request(&header) => State::Nonsense,
        // Nothing can be answered any more.
        Ok(_) if ended.contains(PollFlags::HUP) => State::Gone,
        Ok(_) => State::Speaks,
        Err(Errno::AGAIN | Errno::INTR) => State::Silent,
        Err(_) => State::Gone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::Shutdown;

    /// Another program's socket, as a path of its own.
    fn socket() -> (tempfile::TempDir, Socket) {
        let directory = tempfile::tempdir().unwrap();
        let socket = Socket::listen(&directory.path().join("socket")).unwrap();
        (directory, socket)
    }

    fn sends(socket: &Socket, bytes: &[u8]) -> UnixStream {
        let mut front = UnixStream::connect(&socket.path).unwrap();
        front.write_all(bytes).unwrap();
        front
    }

    fn get_features() -> Vec<u8> {
        [1u32, 1, 0]
            .into_iter()
            .flat_map(u32::to_ne_bytes)
            .collect()
    }

    #[test]
    fn a_connection_is_a_front_end_once_the_header_of_a_request_is_there() {
        let (_directory, mut socket) = socket();
        let header = get_features();
        let mut slow = sends(&socket, &header[..11]);
        let _silent = sends(&socket, &[]);
        drop(sends(&socket, &[]));
        drop(sends(&socket, &header));
        let short = sends(&socket, &header[..5]);
        short.shutdown(Shutdown::Write).unwrap();
        // Another version, an answer, and more than any message has.
        for words in [[1u32, 2, 0], [1, 1 | 1 << 2, 0], [1, 1, 4097]] {
            let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
            drop(sends(&socket, &bytes));
        }
        socket.look().unwrap();
        assert!(socket.front().is_none());
        assert_eq!((socket.waiting.len(), socket.refused()), (2, 4));
        let second = sends(&socket, &header);
        slow.write_all(&header[11..]).unwrap();
        socket.look().unwrap();
        assert_eq!((socket.waiting.len(), socket.refused()), (3, 0));
        // Nothing of it was taken, and the order of connections is kept.
        for mut theirs in [slow, second] {
            let front = socket.front().unwrap();
            theirs.write_all(b"next").unwrap();
            let mut sent = [0; 16];
            let len = recv(&front, &mut sent[..], RecvFlags::empty()).unwrap().0;
            assert_eq!(sent[..len], [&header[..], b"next"].concat());
        }
        assert!(socket.front().is_none());
    }

    #[test]
    fn silent_connections_give_way_and_front_ends_do_not() {
        let (_directory, mut socket) = socket();
        let mut silent = Vec::new();
        for _ in 0..3 * MOST_WAITING {
            silent.push(sends(&socket, &[]));
            socket.look().unwrap();
        }
        assert_eq!(socket.waiting.len(), MOST_WAITING);
        let header = get_features();
        let fronts: Vec<_> = (0..MOST_WAITING + 2)
            .map(|_| sends(&socket, &header))
            .collect();
        socket.look().unwrap();
        for nth in 0..fronts.len() {
            assert!(socket.front().is_some(), "{nth}");
            socket.look().unwrap();
        }
        assert_eq!(socket.refused(), 0);
    }
}
