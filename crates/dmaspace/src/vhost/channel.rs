//! Relay between a front end and `vhost-user-backend`, and the one message that this sends by itself.
//!
//! A driver of a balloon looks at its target when the configuration space changed, which a back end
//! says on a channel of its own (vhost-user protocol, `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`). `vhost`
//! 0.18 reads that message and does not send it, and keeps the channel's socket to itself. So every
//! message of the front end goes through [`requests`], with its file descriptors; the socket that comes
//! with `VHOST_USER_SET_BACKEND_REQ_FD` is kept in a [`Channel`], too. The cost is two more threads and a
//! copy of every message of the protocol; pages and their queues do not pass here.
//!
//! **Files are not trusted** ([`PeerFile`]). Only files that block in no call go on: memory, and events as kicks, calls and
//! errors. A call may be a local socket, as User-Mode Linux has it (`os_pipe`): a send that does not wait raises it. The
//! channel's socket stays here, and the back end gets another one; messages are put into it only where there is room. A
//! front end that brings any other file is disconnected.
//!
//! Two more things are changed on the way, for User-Mode Linux. It describes its memory in a table of two places,
//! however many it uses, and `vhost` takes no byte more than are used: the rest is cut off. And it stops no queue when
//! its driver resets the device, but sets the next driver's features, without those of vhost-user, which have no
//! other way to be stopped: `vhost-user-backend` would go on with the eventfds of the last one. So the queues that
//! have one are stopped before such features are set, and the answers to that are left out.
//!
//! Source: vhost-user protocol (QEMU, docs/interop/vhost-user.rst), "Message Specification",
//! "Communication". A header is three 32-bit words in the machine's byte order: request, flags (bits
//! 0-1 the version, which is 1), and the bytes of payload behind it.

use std::collections::BTreeSet;
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use hostmem::{PeerFile, PeerKind};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketType, recvmsg, sendmsg,
};

/// Bytes of a header.
pub(super) const HEADER: usize = 12;
/// The longest payload; vhost-user's own messages stay far below, but for configuration spaces.
const MOST_PAYLOAD: usize = 4096;
/// File descriptors of one message: one for each region of memory.
const MOST_FDS: usize = 32;
/// The most that come with one part of a message. All are received: those that are not, the kernel closes, which may block.
/// Source: Linux, `include/net/scm.h`, `SCM_MAX_FD`.
const MOST_RECEIVED: usize = 253;
/// `VHOST_USER_SET_MEM_TABLE`, of the front end: the number of regions, 32 bits of padding, and 32 bytes
/// for each region ("Memory regions description").
const SET_MEM_TABLE: u32 = 5;
const MEM_TABLE: usize = 8;
const MEM_REGION: usize = 32;
/// `VHOST_USER_SET_FEATURES`, of the front end.
const SET_FEATURES: u32 = 2;
/// `VHOST_USER_F_PROTOCOL_FEATURES`: the front end stops and enables each queue.
const PROTOCOL_FEATURES: u32 = 1 << 30;
/// `VHOST_USER_GET_VRING_BASE`, of the front end, which stops a queue. Its payload and its answer are number and index.
const GET_VRING_BASE: u32 = 11;
/// `VHOST_USER_SET_VRING_KICK`, `_CALL` and `_ERR`, of the front end. The payload begins with the queue's number.
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
/// `VHOST_USER_SET_BACKEND_REQ_FD`, of the front end.
const SET_BACKEND_REQ_FD: u32 = 21;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`, of the back end.
const CONFIG_CHANGE: u32 = 2;
/// Flags of a message of version 1 that wants no reply.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 0b11;
/// The flag of an answer.
const REPLY: u32 = 1 << 2;

/// The channel from the back end to the front end, once there is one.
#[derive(Debug, Default)]
pub(super) struct Channel {
    socket: Mutex<Option<PeerFile>>,
    /// Queues that were stopped here, and not by the front end, to which there is no answer yet.
    stopped: AtomicU32,
}

impl Channel {
    fn keep(&self, socket: PeerFile) {
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
    }

    /// Tells the front end that the configuration space changed. False when there is no channel:
    /// the driver sees the change when it looks the next time.
    ///
    /// # Errors
    ///
    /// When the front end has left the channel full, or has closed it.
    pub(super) fn config_changed(&self) -> io::Result<bool> {
        let channel = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(socket) = channel.as_ref() else {
            return Ok(false);
        };
        // A flag of the message, and not of the socket, which the front end has, too, keeps this from waiting for room. A
        // message of this length goes as a whole or not at all.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::send(socket, &words([CONFIG_CHANGE, VERSION, 0]), flags)?;
        Ok(true)
    }
}

/// True for the header of a request.
pub(super) fn is_request(header: &[u8]) -> bool {
    word(header, 1) & (VERSION_MASK | REPLY) == VERSION && word(header, 2) as usize <= MOST_PAYLOAD
}

/// Refuses files that a message may not bring.
fn admit(request: u32, files: &[PeerFile]) -> io::Result<()> {
    let may = |file: &PeerFile| match (request, file.kind()) {
        (SET_MEM_TABLE, PeerKind::Memory)
        | (SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR, PeerKind::Event) => true,
        (SET_BACKEND_REQ_FD | SET_VRING_CALL, PeerKind::Other) => is_local_stream(file),
        _ => false,
    };
    if (files.len() <= 1 || request == SET_MEM_TABLE) && files.iter().all(may) {
        return Ok(());
    }
    let kinds: Vec<_> = files.iter().map(PeerFile::kind).collect();
    let why = format!("message {request} of the front end may not bring these files: {kinds:?}");
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

pub(super) fn is_local_stream(file: &PeerFile) -> bool {
    socket_domain(file) == Ok(AddressFamily::UNIX) && socket_type(file) == Ok(SocketType::STREAM)
}

/// Hands messages of `front` on to `back` until one of them has gone.
///
/// # Errors
///
/// When a message is longer than any of the protocol, or brings a file that it may not bring, or a socket fails.
pub(super) fn requests(front: &UnixStream, back: &UnixStream, channel: &Channel) -> io::Result<()> {
    let mut bytes = [0; HEADER + MOST_PAYLOAD];
    let mut fds = Vec::new();
    // The queues that have an eventfd.
    let mut started = BTreeSet::new();
    loop {
        fds.clear();
        let (header, payload) = bytes.split_at_mut(HEADER);
        if !receive(front, header, &mut fds)? {
            return Ok(());
        }
        let (request, mut size) = (word(header, 0), word(header, 2) as usize);
        let payload = payload.get_mut(..size).ok_or_else(|| {
            let why = format!("message {request} of the front end states {size} bytes");
            io::Error::new(io::ErrorKind::InvalidData, why)
        })?;
        if !receive(front, payload, &mut fds)? {
            return Ok(());
        }
        admit(request, &fds)?;
        if request == SET_BACKEND_REQ_FD {
            if let Some(socket) = fds.pop() {
                channel.keep(socket);
                let (other, _) = UnixStream::pair()?;
                fds.push(other.into());
            }
        }
        if request == SET_FEATURES && word(payload, 0) & PROTOCOL_FEATURES == 0 {
            while let Some(queue) = started.pop_first() {
                channel.stopped.fetch_add(1, Ordering::Relaxed);
                send(back, &words([GET_VRING_BASE, VERSION, 8, queue, 0]), &[])?;
            }
        }
        if request == SET_VRING_KICK {
            started.insert(word(payload, 0) & 0xff);
        }
        if request == SET_MEM_TABLE {
            let regions = word(payload, 0) as usize;
            size = size.min(regions.saturating_mul(MEM_REGION).saturating_add(MEM_TABLE));
            if let Some(stated) = header.get_mut(8..) {
                stated.copy_from_slice(&(size as u32).to_ne_bytes());
            }
        }
        send(back, bytes.get(..HEADER + size).unwrap_or_default(), &fds)?;
    }
}

/// Hands answers of `back` on to `front` until one of them has gone. None of those to requests that
/// are offered here carries file descriptors.
///
/// # Errors
///
/// When a socket fails.
pub(super) fn answers(
    back: &UnixStream,
    mut front: &UnixStream,
    channel: &Channel,
) -> io::Result<()> {
    let mut bytes = [0; HEADER + MOST_PAYLOAD];
    let mut fds = Vec::new();
    loop {
        let (header, payload) = bytes.split_at_mut(HEADER);
        if !receive(back, header, &mut fds)? {
            return Ok(());
        }
        let (request, size) = (word(header, 0), word(header, 2) as usize);
        let payload = payload.get_mut(..size).ok_or_else(|| {
            let why = format!("answer {request} of the back end states {size} bytes");
            io::Error::new(io::ErrorKind::InvalidData, why)
        })?;
        if !receive(back, payload, &mut fds)? {
            return Ok(());
        }
        // A front end that asks this by itself waits for the answer, and sets no features meanwhile.
        if request == GET_VRING_BASE && channel.stopped.load(Ordering::Relaxed) > 0 {
            channel.stopped.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        front.write_all(bytes.get(..HEADER + size).unwrap_or_default())?;
    }
}

/// A message of these words.
fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// The `nth` word of `bytes`; 0 where there is none.
fn word(bytes: &[u8], nth: usize) -> u32 {
    let bytes = bytes.get(4 * nth..).and_then(<[u8]>::first_chunk);
    bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// Fills `bytes`; false when the peer has gone before.
fn receive(socket: &UnixStream, bytes: &mut [u8], fds: &mut Vec<PeerFile>) -> io::Result<bool> {
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RECEIVED))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            socket,
            &mut [IoSliceMut::new(rest)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received.map(PeerFile::from));
            }
        }
        match got {
            _ if fds.len() > MOST_FDS => {
                let why = format!("more than {MOST_FDS} file descriptors with one message");
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            Ok(got) if got.bytes == 0 => return Ok(false),
            Ok(got) => filled += got.bytes,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// Sends `bytes`, the file descriptors with the first of them.
fn send(socket: &UnixStream, bytes: &[u8], fds: &[PeerFile]) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
    let mut sent = 0;
    while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            let why = format!("{} file descriptors in one message", fds.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        match sendmsg(
            socket,
            &[IoSlice::new(rest)],
            &mut control,
            SendFlags::NOSIGNAL,
        ) {
            Ok(len) => sent += len,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::thread;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn memory() -> PeerFile {
        tempfile::tempfile_in("/dev/shm").unwrap().into()
    }

    fn message(request: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = words([request, VERSION, payload.len() as u32]);
        bytes.extend(payload);
        bytes
    }

    /// A front end, the other end of the relay, and what the relay returns.
    fn relay() -> (
        UnixStream,
        UnixStream,
        std::sync::Arc<Channel>,
        thread::JoinHandle<io::Result<()>>,
    ) {
        let (front, ours) = UnixStream::pair().unwrap();
        let (inner, back) = UnixStream::pair().unwrap();
        let channel = std::sync::Arc::new(Channel::default());
        let kept = channel.clone();
        let thread = thread::spawn(move || requests(&ours, &inner, &kept));
        (front, back, channel, thread)
    }

    #[test]
    fn messages_arrive_whole_with_their_files_however_they_are_cut() {
        let (mut front, back, _, thread) = relay();
        let table: Vec<u8> = (0..200).collect();
        let sent = message(5, &table);
        let files = [memory(), memory()];
        send(&front, &sent[..7], &files).unwrap();
        front.write_all(&sent[7..30]).unwrap();
        front.write_all(&sent[30..]).unwrap();
        front.write_all(&message(1, &[])).unwrap();
        let mut fds = Vec::new();
        let mut got = vec![0; sent.len()];
        assert!(receive(&back, &mut got, &mut fds).unwrap());
        assert_eq!((got, fds.len()), (sent, 2));
        let mut next = [0; HEADER];
        assert!(receive(&back, &mut next, &mut fds).unwrap());
        assert_eq!((next.to_vec(), fds.len()), (message(1, &[]), 2));
        drop(front);
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn queues_are_stopped_before_features_that_leave_no_other_way() {
        let (mut front, back, channel, _thread) = relay();
        let kick = |queue: u32| {
            let eventfd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            (
                message(SET_VRING_KICK, &[queue.to_ne_bytes(), [0; 4]].concat()),
                eventfd,
            )
        };
        let arrive = |expected: &[u8]| {
            let mut got = vec![0; expected.len()];
            assert!(receive(&back, &mut got, &mut Vec::new()).unwrap());
            assert_eq!(got, expected);
        };
        for queue in [1, 0, 1] {
            let (sent, eventfd) = kick(queue);
            send(&front, &sent, &[eventfd.into()]).unwrap();
            arrive(&sent);
        }
        let features = |bits: u64| message(SET_FEATURES, &bits.to_ne_bytes());
        // Features from a front end that stops queues by itself change nothing.
        front.write_all(&features(1 << 30 | 2)).unwrap();
        arrive(&features(1 << 30 | 2));
        front.write_all(&features(2)).unwrap();
        let stop = |queue: u32| message(GET_VRING_BASE, &[queue.to_ne_bytes(), [0; 4]].concat());
        arrive(&stop(0));
        arrive(&stop(1));
        arrive(&features(2));
        // They are stopped once.
        front.write_all(&features(2)).unwrap();
        arrive(&features(2));
        assert_eq!(channel.stopped.load(Ordering::Relaxed), 2);
        // The answers to that are left out, and others are not.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (inner, outer) = UnixStream::pair().unwrap();
        (&outer)
            .write_all(&[stop(0), stop(1), stop(2), features(5)].concat())
            .unwrap();
        drop(outer);
        answers(&inner, &ours, &channel).unwrap();
        drop(ours);
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).unwrap();
        assert_eq!(all, [stop(2), features(5)].concat());
    }

    #[test]
    fn a_memory_table_ends_with_its_last_region() {
        let (mut front, back, _, _thread) = relay();
        let mut table = [7; MEM_TABLE + 2 * MEM_REGION];
        table[..4].copy_from_slice(&1u32.to_ne_bytes());
        for whole in [1, 2] {
            let used = MEM_TABLE + whole * MEM_REGION;
            table[..4].copy_from_slice(&(whole as u32).to_ne_bytes());
            front.write_all(&message(SET_MEM_TABLE, &table)).unwrap();
            let mut got = vec![0; HEADER + used];
            assert!(receive(&back, &mut got, &mut Vec::new()).unwrap());
            assert_eq!(got, message(SET_MEM_TABLE, &table[..used]));
        }
    }

    #[test]
    fn the_channel_is_kept_and_handed_on() {
        let (front, back, channel, _thread) = relay();
        assert!(!channel.config_changed().unwrap(), "there is none yet");
        let (mut told, theirs) = UnixStream::pair().unwrap();
        send(&front, &message(SET_BACKEND_REQ_FD, &[]), &[theirs.into()]).unwrap();
        let mut fds = Vec::new();
        assert!(receive(&back, &mut [0; HEADER], &mut fds).unwrap());
        assert_eq!(fds.len(), 1);
        assert!(channel.config_changed().unwrap());
        let mut said = [0; HEADER];
        told.read_exact(&mut said).unwrap();
        assert_eq!(said.to_vec(), message(2, &[]));
        drop((told, fds));
        assert!(channel.config_changed().is_err(), "nobody listens any more");
    }

    #[test]
    fn a_message_in_pieces_does_not_bring_a_file_with_each() {
        let (front, _back, _, thread) = relay();
        let sent = message(5, &[0; 64]);
        for byte in &sent[..=MOST_FDS] {
            send(&front, &[*byte], &[memory()]).unwrap();
        }
        let error = thread.join().unwrap().unwrap_err();
        let expected = "more than 32 file descriptors with one message";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_length_that_no_message_has_ends_it() {
        let (mut front, _back, _, thread) = relay();
        let words = [5, VERSION, MOST_PAYLOAD as u32 + 1];
        let header: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        front.write_all(&header).unwrap();
        let error = thread.join().unwrap().unwrap_err();
        assert_eq!(
            error.to_string(),
            "message 5 of the front end states 4097 bytes"
        );
    }
}
