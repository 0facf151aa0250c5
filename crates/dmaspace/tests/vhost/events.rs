//! Files that block where they are written to, read or closed, and a front end that has them do so.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use dmaspace::vhost::{Backend, BackendMemory, Link, Vring};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::ioctl_fionbio;
use rustix::net::sockopt::{set_socket_linger, set_socket_send_buffer_size};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

use super::*;

/// `VHOST_USER_SET_MEM_TABLE`, `_SET_VRING_KICK`, `_CALL` and `_ERR`, `_SET_BACKEND_REQ_FD`.
const GET_FEATURES: u32 = 1;
const MEM_TABLE: u32 = 5;
pub(super) const KICK: u32 = 12;
pub(super) const CALL: u32 = 13;
const ERR: u32 = 14;
const REQ_FD: u32 = 21;
/// `VIRTIO_RING_F_EVENT_IDX`.
const EVENT_IDX: u64 = 1 << 29;

fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, 1, payload.len() as u32];
    let mut bytes: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
    bytes.extend(payload);
    bytes
}

pub(super) fn queue(queue: usize) -> Vec<u8> {
    (queue as u64).to_ne_bytes().to_vec()
}

/// Sends bytes with files.
fn send(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    }
    let parts = [IoSlice::new(bytes)];
    let sent = sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL);
    assert_eq!(sent.unwrap(), bytes.len());
}

/// Sends a message with a file, of which this side keeps no descriptor.
fn send_away(socket: &UnixStream, message: &[u8], file: OwnedFd) {
    let (first, rest) = message.split_at(1);
    send(socket, first, &[file.as_fd()]);
    drop(file);
    send(socket, rest, &[]);
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn fill(event: &OwnedFd) {
    rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
}

/// A socket whose last close waits until all that was sent is taken, which nothing does while the other end is there.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&socket, Some(Duration::from_secs(1 << 20))).unwrap();
    (socket.into(), other)
}

impl Monitor {
    /// Sends a message with a file, and waits until it is taken.
    pub(super) fn give(&mut self, request: u32, payload: &[u8], file: impl AsFd) {
        send(&self.socket, &message(request, payload), &[file.as_fd()]);
        self.front.get_features().unwrap();
    }
}

/// The session ends; why.
fn end(running: &mut Running) -> Option<String> {
    match running.wait(|event| matches!(event, BackendEvent::Disconnected { .. })) {
        BackendEvent::Disconnected { cause } => cause,
        _ => None,
    }
}

fn is_served(running: &mut Running) {
    let mut next = Monitor::connect(&running.socket, &guest(), [0; 3]);
    next.inflate(0, PAGES, 256);
    assert!(next.calls[INFLATE].read().is_ok());
    drop(next);
    assert_eq!(end(running), None);
}

#[test]
fn a_call_that_is_full_and_made_to_block_delays_no_queue_and_no_other_front_end() {
    let mut running = Running::start(1 << 20);
    for features in [FEATURES, FEATURES | EVENT_IDX] {
        let file = guest();
        let mut monitor = Monitor::connect_with(&running.socket, &file, &[0; 3], features, None);
        let call = event();
        monitor.give(CALL, &queue(INFLATE), &call);
        // The flag is the open file's, which the front end has, too.
        ioctl_fionbio(&call, false).unwrap();
        fill(&call);
        // With the index of the last event that it wants to be told of, which lies behind the ring of available buffers.
        let [_, available, ..] = ring(INFLATE);
        for nth in 0..3 {
            let last = GuestAddress(available + 4 + 2 * u64::from(SIZE));
            monitor.memory.write_obj(nth, last).unwrap();
            monitor.inflate(nth, PAGES, 256);
        }
        drop(monitor);
        assert_eq!(end(&mut running), None);
        is_served(&mut running);
    }
    running.end();
}

#[test]
fn a_channel_that_is_full_delays_no_command() {
    let mut running = Running::start(1 << 20);
    let mut monitor = Monitor::connect(&running.socket, &guest(), [0; 3]);
    let (mut theirs, _ours) = UnixStream::pair().unwrap();
    monitor.give(REQ_FD, &[], &theirs);
    theirs.set_nonblocking(true).unwrap();
    while theirs.write(&[0; 12]).is_ok() {}
    // The front end undoes the flag that the back end has set.
    theirs.set_nonblocking(false).unwrap();
    theirs.set_write_timeout(None).unwrap();
    for target in [2 << 20, 3 << 20] {
        running.commands.send(Command::Target(target)).unwrap();
        running.wait(
            |event| matches!(event, BackendEvent::Balloon(report) if report.target_bytes == target),
        );
    }
    drop(monitor);
    assert_eq!(end(&mut running), None);
    is_served(&mut running);
    running.end();
}

#[test]
fn files_that_a_message_may_not_bring_end_the_session_by_name_and_the_next_is_served() {
    let mut running = Running::start(1 << 20);
    let (reader, writer) = std::io::pipe().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let disk = File::open(std::env::current_exe().unwrap()).unwrap();
    let null = File::open("/dev/null").unwrap();
    let (memory, kick) = (guest(), event());
    let [
        reader,
        writer,
        socket,
        listener,
        timer,
        set,
        disk,
        null,
        memory,
        kick,
    ]: [BorrowedFd<'_>; 10] = [
        reader.as_fd(),
        writer.as_fd(),
        socket.as_fd(),
        listener.as_fd(),
        timer.as_fd(),
        set.as_fd(),
        disk.as_fd(),
        null.as_fd(),
        memory.as_fd(),
        kick.as_fd(),
    ];
    let none = [reader, writer, listener, timer, set, disk, null, memory];
    let mut wrong = Vec::new();
    for request in [KICK, CALL, ERR] {
        wrong.extend(none.map(|file| (request, vec![file])));
    }
    for request in [KICK, ERR] {
        wrong.push((request, vec![socket]));
    }
    let no_memory = [reader, socket, timer, disk, null, kick];
    wrong.extend(no_memory.map(|file| (MEM_TABLE, vec![memory, file])));
    let no_channel = [reader, listener, timer, disk, memory, kick];
    wrong.extend(no_channel.map(|file| (REQ_FD, vec![file])));
    wrong.extend([(REQ_FD, vec![socket; 2]), (CALL, vec![kick; 2])]);
    wrong.push((GET_FEATURES, vec![kick]));
    for (request, files) in wrong {
        let front = first_message(&running.socket);
        send(&front, &message(request, &[]), &files);
        let cause = end(&mut running).unwrap();
        let expected = format!("message {request} of the front end may not bring these files: ");
        assert!(cause.starts_with(&expected), "{cause}");
    }
    is_served(&mut running);
    running.end();
}

#[test]
fn files_that_block_when_they_are_closed_delay_no_other_front_end() {
    let mut running = Running::start(1 << 20);
    let mut others = Vec::new();
    for request in [GET_FEATURES, MEM_TABLE, KICK, CALL, ERR, REQ_FD] {
        let front = first_message(&running.socket);
        let (socket, other) = lingering();
        send_away(&front, &message(request, &[0; 8]), socket);
        others.push(other);
        assert!(end(&mut running).is_some());
    }
    // More than a message may have.
    let front = first_message(&running.socket);
    let (socket, other) = lingering();
    let bytes = message(KICK, &queue(0));
    for byte in &bytes[..5] {
        send(&front, &[*byte], &[socket.as_fd(); 8]);
    }
    drop(socket);
    assert!(end(&mut running).is_some());
    drop(other);
    // In connections of which nothing is received: one that has gone, one that is no front end.
    let first = first_message(&running.socket);
    for bytes in [&message(GET_FEATURES, &[])[..], b"GET / HTTP/1.1\r\n\r\n"] {
        let waiting = UnixStream::connect(&running.socket).unwrap();
        let (socket, other) = lingering();
        send_away(&waiting, bytes, socket);
        others.push(other);
    }
    running.wait(|event| matches!(event, BackendEvent::Refused { .. }));
    drop(first);
    assert_eq!(end(&mut running), None);
    is_served(&mut running);
    running.end();
    drop(others);
}

#[test]
fn a_channel_with_files_that_block_when_they_are_closed_delays_no_other_front_end() {
    let mut running = Running::start(1 << 20);
    let monitor = Monitor::connect(&running.socket, &guest(), [0; 3]);
    let mut others = Vec::new();
    // One that another takes the place of, and one that goes with its front end.
    for _ in 0..2 {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let (socket, other) = lingering();
        send_away(&ours, b"more", socket);
        others.push(other);
        send_away(&monitor.socket, &message(REQ_FD, &[]), theirs.into());
        monitor.front.get_features().unwrap();
    }
    drop(monitor);
    assert_eq!(end(&mut running), None);
    is_served(&mut running);
    running.end();
}

#[test]
fn a_socket_is_called_like_an_event_and_delays_nothing_when_it_is_full() {
    let mut running = Running::start(1 << 20);
    let mut monitor = Monitor::connect(&running.socket, &guest(), [0; 3]);
    // As User-Mode Linux calls a pipe.
    let (mut reader, mut writer) = UnixStream::pair().unwrap();
    monitor.give(CALL, &queue(INFLATE), &writer);
    let mut called = [0; 8];
    for nth in 0..2 {
        monitor.inflate(nth, PAGES, 256);
        reader.read_exact(&mut called).unwrap();
        assert_eq!(u64::from_ne_bytes(called), 1);
    }
    ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[0; 4096]).is_ok() {}
    ioctl_fionbio(&writer, false).unwrap();
    for nth in 2..5 {
        monitor.inflate(nth, PAGES, 256);
    }
    drop(monitor);
    assert_eq!(end(&mut running), None);
    is_served(&mut running);
    running.end();
}

/// A device whose first features are taken only when the test says so.
struct Slow(std::sync::Mutex<Receiver<()>>);

impl Backend for Slow {
    const QUEUES: u16 = 1;

    fn features(&self) -> u64 {
        1 << 32
    }

    fn negotiated(&self, _features: u64) {
        let _ = self.0.lock().unwrap().recv();
    }

    fn read_config(&self, _offset: u32, _size: u32) -> Vec<u8> {
        Vec::new()
    }

    fn write_config(&self, _offset: u32, _bytes: &[u8]) {}

    fn memory(&self, _memory: &BackendMemory) -> std::io::Result<()> {
        Ok(())
    }

    fn kicked(&self, _queue: u16, _vrings: &[Vring]) {}

    fn woken(&self, _vrings: &[Vring]) {}

    fn stopped(&self, _queue: u16) {}

    fn reset(&self) {}
}

#[test]
fn what_a_front_end_has_sent_and_was_not_received_does_not_delay_its_end() {
    const SET_FEATURES: u32 = 2;
    const SET_PROTOCOL_FEATURES: u32 = 16;
    let (go, slow) = mpsc::channel();
    let (theirs, front) = UnixStream::pair().unwrap();
    let link = Link::new(front, Arc::new(Slow(std::sync::Mutex::new(slow)))).unwrap();
    // The back end stands, so that messages pile up, first behind it and then before the link.
    send(&theirs, &message(3, &[]), &[]);
    send(
        &theirs,
        &message(SET_FEATURES, &(1_u64 << 30 | 1 << 32).to_ne_bytes()),
        &[],
    );
    theirs.set_nonblocking(true).unwrap();
    let next = message(SET_PROTOCOL_FEATURES, &[0; 8]);
    // Ends after a while in which there was no room.
    let mut full = 0;
    while full < 100 {
        match (&theirs).write(&next) {
            Ok(sent) => {
                assert_eq!(sent, next.len());
                full = 0;
            }
            Err(_) => {
                full += 1;
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    // The message that ends it is followed by one that is not received.
    set_socket_send_buffer_size(&theirs, 1 << 20).unwrap();
    theirs.set_nonblocking(false).unwrap();
    let long: Vec<u8> = [5_u32, 1, 4097]
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    send(&theirs, &long, &[]);
    let (socket, other) = lingering();
    send_away(&theirs, b"more", socket);
    drop(go);
    let deadline = Instant::now() + PATIENCE;
    while !link.ended() {
        assert!(Instant::now() < deadline, "it goes on");
        thread::sleep(Duration::from_millis(1));
    }
    let (done, closed) = mpsc::channel();
    thread::spawn(move || done.send(link.close()));
    let cause = closed
        .recv_timeout(PATIENCE)
        .expect("it is closed")
        .unwrap();
    assert!(cause.ends_with("states 4097 bytes"), "{cause}");
    drop(other);
}
