//! A front end that says anything to the balloon, with any files.
//!
//! One job serves all inputs, as it would serve front ends one after the other. What an input brings is set up
//! as a good front end does as far as its first byte says, and goes on with messages of its own.

use std::fs::File;
use std::io::{IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use dmaspace::vhost::{BackendEvent, BalloonJob, Command, Operator};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::Bytes;

/// The guest's memory, and where it begins in its file.
const MEMORY: u64 = 1 << 20;
const OFFSET: u64 = 4096;
const BASE: u64 = 1 << 30;
/// The front end's own addresses of it.
const USER: u64 = 1 << 40;

/// An operator that never has a command, and looks after the job often.
struct NoOperator;

impl Operator for NoOperator {
    fn next(&mut self, _patience: Duration) -> Option<Command> {
        thread::sleep(Duration::from_micros(100));
        None
    }

    fn tell(&mut self, _event: &BackendEvent) {}
}

/// Socket of the job, which runs from the first call on.
fn socket() -> &'static PathBuf {
    static SOCKET: OnceLock<PathBuf> = OnceLock::new();
    SOCKET.get_or_init(|| {
        let directory = tempfile::tempdir().expect("there is a directory").keep();
        let socket = directory.join("socket");
        let job = BalloonJob {
            socket: socket.clone(),
            target: 64 << 10,
            stats: None,
            bulk: None,
            reporting: true,
        };
        thread::spawn(move || {
            let ended = job.run(&mut NoOperator);
            panic!("the balloon's job has ended: {ended:?}");
        });
        socket
    })
}

fn connect() -> UnixStream {
    let deadline = Instant::now() + Duration::from_secs(600);
    loop {
        match UnixStream::connect(socket()) {
            Ok(front) => return front,
            Err(error) => assert!(Instant::now() < deadline, "nobody listens: {error}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// One message, as far as the socket takes it.
fn send(
    front: &UnixStream,
    request: u32,
    flags: u32,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> bool {
    let words = [request, flags, payload.len() as u32];
    let mut message: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    message.extend(payload);
    raw(front, &message, fds)
}

fn raw(front: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(
        front,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .is_ok()
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Two 32-bit words in one of 64 bits.
fn pair(low: u64, high: u64) -> u64 {
    low | high << 32
}

/// The files that messages may bring.
struct Files {
    memory: File,
    others: Vec<OwnedFd>,
}

impl Files {
    fn new() -> Self {
        let memory = tempfile::tempfile_in("/dev/shm").expect("there is shared memory");
        memory
            .set_len(OFFSET + MEMORY)
            .expect("a file has a length");
        let (end, other) = UnixStream::pair().expect("there are sockets");
        let mut others: Vec<OwnedFd> = vec![end.into(), other.into()];
        for path in [
            "/dev/null",
            "/dev/zero",
            "/proc/self/maps",
            "/dev/shm",
            "/dev/shm/..",
        ] {
            others.extend(File::open(path).map(OwnedFd::from));
        }
        // A file without a byte.
        others.push(tempfile::tempfile().expect("there is a directory").into());
        Self { memory, others }
    }

    fn get(&self, number: usize) -> BorrowedFd<'_> {
        match self.others.get(number % (self.others.len() + 1)) {
            Some(file) => file.as_fd(),
            None => self.memory.as_fd(),
        }
    }
}

/// The first messages of a good front end, `steps` of them.
fn set_up(front: &UnixStream, files: &Files, kick: &OwnedFd, steps: usize) {
    const V1: u32 = 1;
    // VIRTIO_F_VERSION_1, VHOST_USER_F_PROTOCOL_FEATURES, the balloon's features.
    let features = 1 << 32 | 1 << 30 | 0b11_1011;
    let table = words(&[1, BASE, MEMORY, USER, OFFSET]);
    let ring = |nth: u64| USER + 0x4000 * nth;
    let addresses = |n: u64| words(&[pair(n, 0), ring(n), ring(n) + 0x2000, ring(n) + 0x1000, 0]);
    let none: &[BorrowedFd<'_>] = &[];
    let kick = [kick.as_fd()];
    let memory = [files.memory.as_fd()];
    let mut all = vec![
        (3, vec![], none),
        (1, vec![], none),
        (15, vec![], none),
        // VHOST_USER_PROTOCOL_F_MQ, REPLY_ACK, BACKEND_REQ, CONFIG.
        (16, words(&[1 | 1 << 3 | 1 << 5 | 1 << 9]), none),
        (2, words(&[features]), none),
        (5, table, &memory[..]),
    ];
    for n in 0..3 {
        all.extend([
            (8, words(&[pair(n, 16)]), none),
            (10, words(&[pair(n, 0)]), none),
            (9, addresses(n), none),
            (12, words(&[n]), &kick[..]),
            (18, words(&[pair(n, 1)]), none),
        ]);
    }
    for (request, payload, fds) in all.iter().take(steps) {
        send(front, *request, V1, payload, fds);
    }
}

pub fn messages(data: &[u8]) {
    let front = connect();
    let patience = Some(Duration::from_secs(600));
    front
        .set_read_timeout(patience)
        .expect("a socket has a timeout");
    front
        .set_write_timeout(patience)
        .expect("a socket has a timeout");
    let files = Files::new();
    let kick =
        rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("there are events");
    let mut bytes = Bytes(data);
    set_up(&front, &files, &kick, bytes.below(24));
    // Content of the guest's memory, rings too: pieces of the input.
    for _ in 0..bytes.below(8) {
        let (at, piece) = (u64::from(bytes.u16()), bytes.take::<16>());
        let _ = std::os::unix::fs::FileExt::write_at(&files.memory, &piece, OFFSET + at % 0xc000);
    }
    while !bytes.is_empty() {
        let (kind, request, fds) = (bytes.u8(), u32::from(bytes.u8()), usize::from(bytes.u8()));
        let fds: Vec<_> = (0..fds >> 5).map(|nth| files.get(fds + nth)).collect();
        let len = usize::from(bytes.u8()).min(bytes.0.len());
        let (payload, rest) = bytes.0.split_at(len);
        bytes = Bytes(rest);
        let went = match kind % 8 {
            // Without a header of its own.
            0 => raw(&front, payload, &fds),
            // The guest kicks.
            1 => rustix::io::write(&kick, &1u64.to_ne_bytes()).is_ok(),
            // The version and whether an answer is wanted.
            flags => send(
                &front,
                request % 48,
                1 | u32::from(flags & 1) << 3,
                payload,
                &fds,
            ),
        };
        if !went {
            break;
        }
    }
    let _ = front.shutdown(std::net::Shutdown::Write);
    // The read ends once the back end has taken everything and closes.
    let mut answers = Vec::new();
    let closed = front.take(1 << 20).read_to_end(&mut answers);
    let hangs = closed.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
    assert!(!hangs, "the back end does not come to its end");
}
